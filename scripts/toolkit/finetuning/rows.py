"""The valid rows of a source, in memory or streamed. Invalid rows stop the reading, or are skipped."""

from collections.abc import Callable, Iterator
from itertools import chain

from datasets import Dataset, IterableDataset
from datasets.fingerprint import generate_random_fingerprint
from datasets.iterable_dataset import ExamplesIterable

from toolkit.inputs import Check, Input, Source, Warn


def load_rows(source: Source, check: Check, on_bad_row: str, warn: Warn = print) -> Dataset:
    """The rows, in memory. Nothing is cached, so a changed file is read again.

    Args:
        check, on_bad_row, warn: see `Source.valid_rows`. The columns have the same types for every row.

    Raises:
        OSError, ValueError: as `Source.rows` and `Source.valid_rows`.
    """
    return Dataset.from_list(list(source.valid_rows(check, on_bad_row, warn)))


def map_rows(rows: Dataset | IterableDataset, function: Callable, **options):
    """`rows.map(function, **options)`, without a hash of the function.

    `datasets` would hash it for a cache, which rows in memory do not have. That takes seconds for a function that
    refers to a whole task, and a Ctrl-C in the meantime is lost.
    """
    if isinstance(rows, Dataset):
        options["new_fingerprint"] = generate_random_fingerprint()
    return rows.map(function, **options)


def stream_rows(source: Source, check: Check, on_bad_row: str, warn: Warn = print) -> IterableDataset:
    """The same as `load_rows`, but read again in each pass, and never all in memory. Each input is a shard, or with
    `max_rows` all of them together. Errors of `load_rows` are raised during the passes, but all rows of a shard may be
    invalid. Skipped rows are reported at the end of each shard, or when reading it is stopped.

    Raises:
        OSError, ValueError: without `max_rows`, an input cannot be read, or has no rows.
    """

    def examples(shards: list[list[Input]]) -> Iterator[tuple[int, dict]]:
        """The rows of some shards, each with a key, as `datasets` expects them."""
        rows = Source(list(chain.from_iterable(shards)), source.max_rows)
        yield from enumerate(rows.valid_rows(check, on_bad_row, warn, may_be_empty=True))

    shards = [[each] for each in source.inputs] if source.max_rows is None else [source.inputs]
    for inputs in shards if source.max_rows is None else ():
        next(Source(inputs).rows())
    # `IterableDataset.from_generator` would leave a file in the user's cache, and pickles `check`.
    return IterableDataset(ExamplesIterable(examples, {"shards": shards}))
