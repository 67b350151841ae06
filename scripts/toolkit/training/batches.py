"""Which rows make a batch, and how a batch of examples becomes tensors."""

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import nn
from torch.utils.data import Sampler

# Batches are formed from rows of similar length, out of this many batches' worth of rows drawn at random.
BATCHES_SORTED_TOGETHER = 50


# ------------------------------------------------------------------------------------------- which rows make a batch


class LengthGroupedBatches(Sampler[list[int]]):
    """Batches of rows of about the same length, in an order that is a pure function of the seed and the epoch.

    As in transformers' LengthGroupedSampler, rows are shuffled, and 50 batches' worth of them at a time (less where
    there are few: at least four lots) sorted by length and cut into batches. The batches come in random order, but the
    one with the longest row first, so that a lack of memory shows at once, and one with fewer rows than the others
    last.

    Of a step's rows, `batch_size` × `world` of them, each process takes every `world`-th. What is left over at the end
    makes a smaller step; if that has not a row for each process, it is left out.

    Args:
        lengths: of each row, in tokens.
        batch_size: rows of a batch, on one process.
        rank, world: this process, and how many there are.
        start: the batch of the first epoch with which to begin.
        shuffle: otherwise rows come in the order of the file, whatever their length.

    Raises:
        ValueError: there is not a row for each process, or a number is out of range.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        batch_size: int,
        seed: int,
        rank: int = 0,
        world: int = 1,
        start: int = 0,
        shuffle: bool = True,
    ):
        if batch_size < 1 or not 0 <= rank < world:
            raise ValueError(
                f"batch_size is {batch_size} and rank {rank} of {world}; expected at least 1, and a rank "
                "below the number of processes"
            )
        if len(lengths) < world:
            raise ValueError(f"{len(lengths)} rows are too few for {world} processes")
        self.lengths = np.asarray(lengths)
        self.step_rows = batch_size * world
        self.seed, self.rank, self.world, self.shuffle = seed, rank, world, shuffle
        self.epoch = 0
        self.set_start(start)

    @property
    def batches_per_epoch(self) -> int:
        """How many batches a whole epoch has, the same on each process."""
        whole, left = divmod(len(self.lengths), self.step_rows)
        return whole + (left >= self.world)

    def set_epoch(self, epoch: int) -> None:
        """Says which epoch comes next. Another one than before begins with its first batch."""
        if epoch != self.epoch:
            self.epoch, self.start = epoch, 0

    def set_start(self, batch: int) -> None:
        """Says with which batch this epoch begins; those before it are not looked at.

        Raises:
            ValueError: the epoch has not as many.
        """
        if not 0 <= batch <= self.batches_per_epoch:
            raise ValueError(f"start is {batch}; an epoch has {self.batches_per_epoch} batches")
        self.start = batch

    def __len__(self) -> int:
        return self.batches_per_epoch - self.start

    def __iter__(self) -> Iterator[list[int]]:
        for rows in self._steps()[self.start : self.batches_per_epoch]:
            yield rows[self.rank :: self.world].tolist()

    def _steps(self) -> list[np.ndarray]:
        """The rows of each step of the epoch, those of all processes together."""
        count, size = len(self.lengths), self.step_rows
        if not self.shuffle:
            return cut(np.arange(count), size)
        random = np.random.default_rng([self.seed, self.epoch])
        rows = random.permutation(count)
        lot = size * max(1, min(BATCHES_SORTED_TOGETHER, count // (4 * size)))
        rows = np.concatenate([part[np.argsort(-self.lengths[part], kind="stable")] for part in cut(rows, lot)])
        # What is left over at the end may have the longest row. It changes places, so that a full step has it.
        whole, longest = count // size, self.lengths[rows].argmax()
        if whole and longest >= whole * size:
            rows[[0, longest]] = rows[[longest, 0]]
            longest = 0
        steps = cut(rows, size)
        order = random.permutation(whole)
        first = [longest // size] if whole else []
        order = [*first, *order[~np.isin(order, first)], *range(whole, len(steps))]
        return [steps[step] for step in order]


def cut(rows: np.ndarray, size: int) -> list[np.ndarray]:
    """The rows in pieces of `size`; the last may be smaller."""
    return np.split(rows, range(size, len(rows), size))


def evaluation_batches(lengths: Sequence[int], batch_size: int, rank: int = 0, world: int = 1) -> list[list[int]]:
    """The batches of one process, those of the longest rows first, such that each row is in one batch of one process.

    All processes have the same number of batches, as sharded models require, unless there are fewer rows than
    processes, or batches of a single row do not come out even: then some have one batch less.

    Args:
        lengths: of each row, in tokens.
        batch_size: the rows of a batch, at most.

    Returns:
        The indices of each batch's rows, by which results are put back into order.
    """
    order = np.argsort(-np.asarray(lengths), kind="stable")
    steps = np.array_split(order, max(1, -(-len(order) // (batch_size * world))))
    shares = [step[rank::world].tolist() for step in steps]
    return [share for share in shares if share]


# ------------------------------------------------------------------------------------------- how rows become tensors


class PadOrFlatten:
    """Makes a batch of examples: padded, `(B, T)`; or flattened, the sequences end to end in one row, `(1, N)`, with
    where they start, `cu_seq_lens_q` and `cu_seq_lens_k`, `(B + 1,)`, and positions that begin anew in each.

    transformers' DataCollatorWithFlattening does not do: it drops token types, takes labels to be those of a causal
    model, whose first is never predicted, and knows of none for whole sequences.

    Args:
        tokenizer: says with what and on which side to pad.
        flatten: for a model that takes packed sequences, such as ScratchBert's encoders.
        per_token: the examples' fields with a value for each token. Padded with -100; `(B, T)` or `(1, N)`.
        per_sequence: those with one number, or one vector of L numbers, for the whole: `(B,)` or `(B, L)`. Fields of
            either kind that the examples do not have are not in the batch, and no others are.
    """

    def __init__(self, tokenizer, flatten: bool, per_token: Sequence[str] = (), per_sequence: Sequence[str] = ()):
        self.tokenizer, self.flatten = tokenizer, flatten
        self.per_token, self.per_sequence = tuple(per_token), tuple(per_sequence)

    def __call__(self, examples: list[dict]) -> dict[str, torch.Tensor | int]:
        """The batch of examples that have `input_ids`, and `token_type_ids` if the model is to see them.

        Raises:
            ValueError: an example has not one value per token where it should.
        """

        def there(names):
            return [name for name in names if name in examples[0]]

        inputs, per_token = there(["input_ids", "token_type_ids"]), there(self.per_token)
        for name, example in ((name, example) for name in [*inputs, *per_token] for example in examples):
            if len(example[name]) != len(example["input_ids"]):
                raise ValueError(f"{name} has {len(example[name])} values for {len(example['input_ids'])} tokens")
        columns = {name: [example[name] for example in examples] for name in [*inputs, *per_token]}
        batch = self._flatten(columns) if self.flatten else self._pad(columns, inputs)
        return batch | {
            name: torch.tensor([example[name] for example in examples]) for name in there(self.per_sequence)
        }

    def _pad(self, columns: dict[str, list], inputs: list[str]) -> dict[str, torch.Tensor]:
        """Rows of the same width."""
        padded = self.tokenizer.pad({name: columns[name] for name in inputs}, return_tensors="pt")
        side = self.tokenizer.padding_side
        return {**padded} | {
            name: nn.utils.rnn.pad_sequence(
                [torch.tensor(values) for values in rows], batch_first=True, padding_value=-100, padding_side=side
            )
            for name, rows in columns.items()
            if name not in inputs
        }

    def _flatten(self, columns: dict[str, list]) -> dict[str, torch.Tensor | int]:
        """One row without padding."""
        lengths = torch.tensor([len(ids) for ids in columns["input_ids"]])
        starts = nn.functional.pad(lengths.cumsum(0), (1, 0)).int()
        positions = torch.cat([torch.arange(length) for length in lengths])
        longest = int(lengths.max())
        return {
            name: torch.tensor([value for row in rows for value in row])[None] for name, rows in columns.items()
        } | {
            "position_ids": positions[None],
            "cu_seq_lens_q": starts,
            "cu_seq_lens_k": starts,
            "max_length_q": longest,
            "max_length_k": longest,
        }


def unpadded(batch: dict, values: torch.Tensor) -> list[torch.Tensor]:
    """What a model says of each token, `(B, T)` or, without padding, `(1, N)`, as a row for each sequence."""
    if "cu_seq_lens_q" in batch:
        return list(values[0].split(batch["cu_seq_lens_q"].diff().tolist()))
    return [row[mask.bool()] for row, mask in zip(values, batch["attention_mask"], strict=True)]
