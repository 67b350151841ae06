"""Batches of sequences: sorted by length, bounded by their tokens, without padding."""

from collections.abc import Iterator, Sequence
from itertools import chain

import numpy as np
import torch


def batches_by_length(lengths: Sequence[int], tokens_per_batch: int) -> Iterator[list[int]]:
    """The indices of the sequences, the longest first, in batches of at most so many tokens, or of one longer
    sequence. Sequences of one length stay in their order."""
    batch: list[int] = []
    tokens = 0
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        if batch and tokens + lengths[index] > tokens_per_batch:
            yield batch
            batch, tokens = [], 0
        batch.append(index)
        tokens += lengths[index]
    if batch:
        yield batch


def packed(ids: Sequence[Sequence[int]], types: Sequence[Sequence[int]] | None, device) -> dict[str, torch.Tensor]:
    """The sequences end to end in one row, as the model's arguments. Without `types`, all token types are 0."""
    lengths = [len(each) for each in ids]
    starts = torch.from_numpy(np.cumsum([0, *lengths]))
    inputs = {"input_ids": row(ids, sum(lengths), device), "cu_seq_lens_q": starts.to(device)}
    if types is not None:
        inputs["token_type_ids"] = row(types, sum(lengths), device)
    return inputs | {"max_length_q": max(lengths)}


def row(sequences: Sequence[Sequence[int]], total: int, device) -> torch.Tensor:
    """Numbers end to end, `(1, total)`."""
    return torch.from_numpy(np.fromiter(chain.from_iterable(sequences), np.int64, total))[None].to(device)
