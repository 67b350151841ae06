"""What the tasks share: tokenising texts, and computing them in batches sorted by length."""

import json
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from tokenizers import Encoding

from toolkit.batching import batches_by_length, packed
from toolkit.checkpoint import verification
from toolkit.corpus.job import Job
from toolkit.corpus.model import longest, open_for
from toolkit.corpus.sentence_folder import SentenceFolder
from toolkit.hub import open_tokenizer

# More than most texts have, so that few are tokenised a second time.
CHARACTERS_PER_TOKEN = 8


@dataclass
class Encoded:
    """The sequences of texts.

    Args:
        ids, types: of the tokens of each sequence: one for each text without a fault, or its windows. Without types,
            all are 0.
        tokens: for each text, the number of its tokens after truncation; 0 with a fault.
        truncated: for each text, whether it was longer than the model.
        faults: by the number of a text, why it has no result.
        details: what a task keeps of each text without a fault.
    """

    ids: list[list[int]] = field(default_factory=list)
    types: list[list[int]] | None = None
    tokens: list[int] = field(default_factory=list)
    truncated: list[bool] = field(default_factory=list)
    faults: dict[int, str] = field(default_factory=dict)
    details: list | None = None


class Task(ABC):
    """A task with its tokenizer and its model.

    Attributes:
        columns: the columns of its result, with the kind of each; see `toolkit.corpus.formats`.
        prompt: what is put before each text.
    """

    columns: dict[str, str]

    def __init__(self, job: Job, folder: SentenceFolder | None = None, **options):
        folder = folder or SentenceFolder()
        self.job, self.device, self.prompt = job, torch.device(job.device), folder.choose_prompt(job.options)
        self.tokenizer = open_tokenizer(job.model, trust_remote_code=job.trust_remote_code)
        if not self.tokenizer.is_fast:
            raise ValueError("Its tokenizer is a slow one; expected a fast one.")
        self.can_cut = splits_at_spaces(self.tokenizer)
        options |= verification(job.model) if job.verify else {}
        self.model = open_for(job.task, job.model, job.dtype, job.device, job.trust_remote_code, **options)
        self.max_length = longest(self.tokenizer, self.model, job.max_length, folder.max_length)

    def encode(self, texts: list[str], pairs: list[str] | None) -> Encoded:
        """The texts as sequences of the model, truncated. May be called from several threads."""
        encodings = self.tokenize([self.prompt + text for text in texts] if self.prompt else texts, pairs)
        reasons = (self.fault_of(text, each.ids) for text, each in zip(texts, encodings, strict=True))
        faults = {number: reason for number, reason in enumerate(reasons) if reason is not None}
        kept = [each for number, each in enumerate(encodings) if number not in faults]
        return Encoded(
            [each.ids for each in kept],
            None if pairs is None else [each.type_ids for each in kept],
            [0 if number in faults else len(each.ids) for number, each in enumerate(encodings)],
            [bool(each.overflowing) for each in encodings],
            faults,
        )

    def fault_of(self, text: str, ids: list[int]) -> str | None:
        """Why a text with these tokens cannot be used; None if it can."""
        return None

    def tokenize(self, texts: list[str], pairs: list[str] | None) -> list[Encoding]:
        """The tokens of the texts, truncated. Of a long text, only the beginning that fills the model is tokenised."""
        found: list = [None] * len(texts)
        waiting = range(len(texts))
        size = CHARACTERS_PER_TOKEN * self.max_length if self.can_cut and pairs is None else sys.maxsize
        while waiting:
            parts = [beginning(texts[index], size) for index in waiting]
            encodings = self.tokenizer(parts, pairs, truncation=True, max_length=self.max_length).encodings
            for index, encoding in zip(waiting, encodings, strict=True):
                found[index] = encoding
            waiting = [
                index
                for index, part in zip(waiting, parts, strict=True)
                if len(part) < len(texts[index]) and not found[index].overflowing
            ]
            size *= 2
        return found

    def compute(self, encoded: Encoded) -> dict[str, Sequence]:
        """The columns of the result, with a value for each text without a fault. Adds a fault for each text whose
        numbers are NaN or infinite."""
        texts = [number for number in range(len(encoded.tokens)) if number not in encoded.faults]
        details, kept = encoded.details or [None] * len(texts), []
        for number, value, detail in zip(texts, self.values(encoded), details, strict=True):
            if np.isfinite(value).all():
                kept.append((value, detail))
            else:
                encoded.faults[number] = "the model's numbers for it are NaN or infinite"
        return self.result([value for value, _ in kept], [detail for _, detail in kept])

    @abstractmethod
    def result(self, values: list[np.ndarray], details: list) -> dict[str, Sequence]:
        """The columns of texts.

        Args:
            values: what `values` returns for each text.
            details: of each text, as in `Encoded`.
        """

    @abstractmethod
    def read(self, inputs: dict, lengths: list[int]) -> Iterable[np.ndarray]:
        """Runs the model on a batch. Returns the numbers for each sequence, on the CPU."""

    @torch.inference_mode()
    def values(self, encoded: Encoded) -> list[np.ndarray]:
        """The numbers for each text without a fault: what `read` returns for its sequence."""
        found: list = [None] * len(encoded.ids)
        lengths = [len(ids) for ids in encoded.ids]
        for batch in batches_by_length(lengths, self.job.tokens_per_batch):
            types = encoded.types and [encoded.types[index] for index in batch]
            inputs = packed([encoded.ids[index] for index in batch], types, self.device)
            for index, value in zip(batch, self.read(inputs, [lengths[index] for index in batch]), strict=True):
                found[index] = value
        return found


def splits_at_spaces(tokenizer) -> bool:
    """Whether it is known that the tokens before a space of a text do not depend on the text after it: those of BERT's
    tokenizer, without added tokens that may contain spaces, and truncated at the end."""
    if tokenizer.truncation_side != "right" or not type(tokenizer).__module__.startswith("transformers."):
        return False
    fields = json.loads(tokenizer.backend_tokenizer.to_str())
    kinds = [(fields[name] or {}).get("type") for name in ("normalizer", "pre_tokenizer", "model")]
    if kinds[0] not in (None, "BertNormalizer") or kinds[1:] != ["BertPreTokenizer", "WordPiece"]:
        return False
    return not any(
        token["lstrip"]
        or token["rstrip"]
        or token["single_word"]
        or not (token["content"].isascii() and token["content"].isprintable())
        or " " in token["content"]
        for token in fields["added_tokens"]
    )


def beginning(text: str, size: int) -> str:
    """The text up to the first space or line end after `size` characters."""
    if len(text) <= size:
        return text
    ends = [end for end in (text.find(" ", size), text.find("\n", size)) if end >= 0]
    return text[: min(ends, default=None)]
