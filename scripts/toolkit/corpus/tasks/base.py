"""What the tasks share: tokenising texts, and computing them in batches sorted by length."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from toolkit.checkpoint import verification
from toolkit.corpus.batching import batches_by_length, packed
from toolkit.corpus.job import Job
from toolkit.corpus.model import longest, open_for
from toolkit.hub import open_tokenizer


@dataclass
class Encoded:
    """The sequences of the texts of a part.

    Args:
        ids, types: of the tokens of each sequence; without types, all are 0.
        truncated: how many texts were longer than the model.
        faults: by the number of a text, why it cannot be used.
        details: what a task keeps of the texts for its result.
    """

    ids: list[list[int]]
    types: list[list[int]] | None = None
    truncated: int = 0
    faults: dict[int, str] | None = None
    details: list | None = None

    @property
    def tokens(self) -> int:
        return sum(map(len, self.ids))


class Task(ABC):
    """A task with its tokenizer and its model.

    Attributes:
        columns: the columns of its result, with the kind of each; see `toolkit.corpus.formats`.
    """

    columns: dict[str, str]

    def __init__(self, job: Job, **options):
        self.job, self.device = job, torch.device(job.device)
        self.tokenizer = open_tokenizer(job.model, trust_remote_code=job.trust_remote_code)
        if not self.tokenizer.is_fast:
            raise ValueError("Its tokenizer is a slow one; expected a fast one.")
        options |= verification(job.model) if job.verify else {}
        self.model = open_for(job.task, job.model, job.dtype, job.device, job.trust_remote_code, **options)
        self.max_length = longest(self.tokenizer, self.model, job.max_length)

    def encode(self, texts: list[str], pairs: list[str] | None) -> Encoded:
        """The texts as sequences of the model, truncated."""
        encoded = self.tokenizer(
            texts, pairs, truncation=True, max_length=self.max_length, return_attention_mask=False,
            return_token_type_ids=pairs is not None,
        )  # fmt: skip
        truncated = sum(len(each.ids) == self.max_length and bool(each.overflowing) for each in encoded.encodings)
        return Encoded(encoded["input_ids"], encoded.get("token_type_ids"), truncated)

    @abstractmethod
    def compute(self, encoded: Encoded) -> dict[str, Sequence]:
        """The columns of the result, with a value for each text."""

    @abstractmethod
    def read(self, inputs: dict, lengths: list[int]) -> Iterable:
        """Runs the model on a batch. Returns a value for each sequence, on the CPU."""

    @torch.inference_mode()
    def values(self, encoded: Encoded) -> list:
        """What `read` returns for each sequence, in their order."""
        found: list = [None] * len(encoded.ids)
        lengths = [len(ids) for ids in encoded.ids]
        for batch in batches_by_length(lengths, self.job.tokens_per_batch):
            types = encoded.types and [encoded.types[index] for index in batch]
            inputs = packed([encoded.ids[index] for index in batch], types, self.device)
            for index, value in zip(batch, self.read(inputs, [lengths[index] for index in batch]), strict=True):
                found[index] = value
        return found
