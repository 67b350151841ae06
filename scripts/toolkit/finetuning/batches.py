"""Grouping rows into batches by length, and turning the examples of a batch into tensors."""

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import nn
from torch.utils.data import Sampler

# Rows are sorted by length within groups of this many batches, drawn at random.
BATCHES_SORTED_TOGETHER = 50


class LengthGroupedBatches(Sampler[list[int]]):
    """Batches of rows of similar length, or of any rows, in an order that depends on the seed and the epoch only.

    As in transformers' LengthGroupedSampler, rows are shuffled, and groups of 50 batches (smaller ones for few rows, so
    that there are at least four groups) are sorted by length and cut into batches. The order of the batches is random,
    with two exceptions: the batch with the longest row is the first, so that a lack of memory shows at once, and a
    batch with fewer rows is the last.

    Each process takes every `world`-th of the `batch_size` × `world` rows of a step. The remaining rows make a smaller
    step; if there are fewer than processes, some processes have an empty batch in it.

    Args:
        lengths: of each row, in tokens.
        batch_size: rows per batch, on each process.
        rank, world: the number of this process, and the number of processes.
        grouped: False: rows of any length are together.

    Raises:
        ValueError: there are fewer rows than processes, or a number is out of range.
    """

    def __init__(
        self, lengths: Sequence[int], batch_size: int, seed: int, rank: int = 0, world: int = 1, grouped: bool = True
    ):
        if batch_size < 1 or not 0 <= rank < world:
            raise ValueError(
                f"batch_size is {batch_size} and rank is {rank} of {world}; "
                f"expected at least 1, and a rank from 0 to {world - 1}"
            )
        if len(lengths) < world:
            raise ValueError(f"there are {len(lengths)} rows for {world} processes; expected at least one for each")
        self.lengths = np.asarray(lengths)
        self.step_rows = batch_size * world
        self.seed, self.rank, self.world, self.grouped = seed, rank, world, grouped
        self.epoch = self.start = 0

    @property
    def batches_per_epoch(self) -> int:
        """The batches of a whole epoch, as many on each process."""
        return -(-len(self.lengths) // self.step_rows)

    def set_epoch(self, epoch: int) -> None:
        """Sets the next epoch. If it is another one, it starts at its first batch."""
        if epoch != self.epoch:
            self.epoch, self.start = epoch, 0

    def set_start(self, batch: int) -> None:
        """Sets the batch at which this epoch starts. The rows of earlier batches are not read.

        Raises:
            ValueError: the epoch has fewer batches.
        """
        if not 0 <= batch <= self.batches_per_epoch:
            raise ValueError(f"start is {batch}; expected 0 to {self.batches_per_epoch}, the batches of an epoch")
        self.start = batch

    def __len__(self) -> int:
        return self.batches_per_epoch - self.start

    def __iter__(self) -> Iterator[list[int]]:
        for rows in self._steps()[self.start :]:
            yield rows[self.rank :: self.world].tolist()

    def _steps(self) -> list[np.ndarray]:
        """The rows of each step of the epoch, of all processes."""
        count, size = len(self.lengths), self.step_rows
        random = np.random.default_rng([self.seed, self.epoch])
        rows = random.permutation(count)
        group = size * max(1, min(BATCHES_SORTED_TOGETHER, count // (4 * size))) if self.grouped else size
        rows = np.concatenate([part[np.argsort(-self.lengths[part], kind="stable")] for part in cut(rows, group)])
        # The remaining rows may include the longest one. It is moved into a full step.
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
    """The rows in parts of `size`; the last one may be smaller."""
    return np.split(rows, range(size, len(rows), size))


def evaluation_batches(lengths: Sequence[int], batch_size: int, rank: int = 0, world: int = 1) -> list[list[int]]:
    """The batches of one process, the longest rows first. Each row is in one batch of one process.

    All processes have the same number of batches. The exceptions are fewer rows than processes, and batches of one row
    whose number is not a multiple of the processes: then some processes have one batch less.

    Args:
        lengths: of each row, in tokens.
        batch_size: the maximum number of rows in a batch.

    Returns:
        The indices of the rows of each batch, by which results can be put back in order.
    """
    order = np.argsort(-np.asarray(lengths), kind="stable")
    steps = np.array_split(order, max(1, -(-len(order) // (batch_size * world))))
    shares = [step[rank::world].tolist() for step in steps]
    return [share for share in shares if share]


class PadOrFlatten:
    """Collates examples into a batch: padded, `(B, T)`; or flattened, the sequences concatenated in one row, `(1, N)`,
    with their boundaries, `cu_seq_lens_q` and `cu_seq_lens_k`, `(B + 1,)`, and positions that restart at 0 in each.

    transformers' DataCollatorWithFlattening is not enough: it drops token types and labels of whole sequences, and
    replaces the first label of each sequence, because a causal model does not predict it.

    Args:
        tokenizer: defines the padding token and the side to pad on.
        flatten: for a model that supports packed sequences, such as ScratchBert's encoders.
        per_token: the examples' fields with a value for each token. Padded with -100; `(B, T)` or `(1, N)`.
        per_sequence: the fields with a number, or a vector of L numbers, for the whole sequence: `(B,)` or `(B, L)`. Of
            both kinds, fields that the examples lack are omitted; all other fields are dropped.
    """

    def __init__(self, tokenizer, flatten: bool, per_token: Sequence[str] = (), per_sequence: Sequence[str] = ()):
        self.tokenizer, self.flatten = tokenizer, flatten
        self.per_token, self.per_sequence = tuple(per_token), tuple(per_sequence)

    def __call__(self, examples: list[dict]) -> dict[str, torch.Tensor | int]:
        """The batch of examples that have `input_ids` and, optionally, `token_type_ids`.

        Raises:
            ValueError: an example does not have a value for each token.
        """

        def existing(names):
            return [name for name in names if name in examples[0]]

        inputs, per_token = existing(["input_ids", "token_type_ids"]), existing(self.per_token)
        for name, example in ((name, example) for name in [*inputs, *per_token] for example in examples):
            values, tokens = len(example[name]), len(example["input_ids"])
            if values != tokens:
                raise ValueError(f"{name} has {values} values; expected {tokens}, one per token")
        columns = {name: [example[name] for example in examples] for name in [*inputs, *per_token]}
        batch = self._flatten(columns) if self.flatten else self._pad(columns, inputs)
        for name in existing(self.per_sequence):
            batch[name] = torch.tensor([example[name] for example in examples])
        return batch

    def _pad(self, columns: dict[str, list], inputs: list[str]) -> dict[str, torch.Tensor]:
        """Rows that are padded to the same length."""
        padded = {**self.tokenizer.pad({name: columns[name] for name in inputs}, return_tensors="pt")}
        side = self.tokenizer.padding_side
        for name in (name for name in columns if name not in inputs):
            values = [torch.tensor(each) for each in columns[name]]
            padded[name] = nn.utils.rnn.pad_sequence(values, batch_first=True, padding_value=-100, padding_side=side)
        return padded

    def _flatten(self, columns: dict[str, list]) -> dict[str, torch.Tensor | int]:
        """One row without padding."""
        lengths = torch.tensor([len(ids) for ids in columns["input_ids"]])
        starts = nn.functional.pad(lengths.cumsum(0), (1, 0)).int()
        positions = torch.cat([torch.arange(length) for length in lengths])
        longest = int(lengths.max())
        flat = {name: torch.tensor([value for row in rows for value in row])[None] for name, rows in columns.items()}
        bounds = {"cu_seq_lens_q": starts, "cu_seq_lens_k": starts, "max_length_q": longest, "max_length_k": longest}
        return {**flat, "position_ids": positions[None], **bounds}


def unpadded(batch: dict, values: torch.Tensor) -> list[torch.Tensor]:
    """The values of the non-padding tokens, `(B, T)` or, in a flattened batch, `(1, N)`, as a row for each sequence."""
    if "cu_seq_lens_q" in batch:
        return list(values[0].split(batch["cu_seq_lens_q"].diff().tolist()))
    return [row[mask.bool()] for row, mask in zip(values, batch["attention_mask"], strict=True)]
