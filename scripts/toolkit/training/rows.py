"""Reading rows from files or from the Hub, each with its place, and stopping at invalid rows or skipping them."""

import logging
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

from datasets import Dataset, IterableDataset, load_dataset
from datasets.fingerprint import generate_random_fingerprint
from datasets.iterable_dataset import ExamplesIterable

from toolkit.row_files import (
    READERS,
    ROWS_WITH_ALL_COLUMNS,
    BadRow,
    ending_of,
    errors_about,
    expand,
    find_fault,
    name_labels,
)

logger = logging.getLogger(__name__)

# The number of rows that the report on skipped rows lists.
LISTED_ROWS = 5

# -------------------------------------------------------------------------------------------------------- reading rows


@dataclass(frozen=True)
class Source:
    """Where rows come from: local files, one after the other, or a dataset on the Hub.

    Args:
        files: `.csv` and `.tsv`, both with a header and with quotation marks as spreadsheets write them; `.jsonl`, an
            object on each line; `.json`, the same or an array of objects; `.txt`, a row on each line, in the column
            `text`; and `.parquet`. Text is UTF-8, and may be compressed: `.csv.gz`. A value that is not a file and has
            `*`, `?` or `[` is a pattern, replaced by the files that match it, sorted.
        name: `user/dataset` on the Hub, or a folder that `datasets.load_dataset` opens.
        config: the configuration of the dataset, if it has several.
        split: such as `train` or `train[:1000]`; required with `name`.
        max_rows: only the first so many valid rows are used, and nothing after them is read; None: all.

    Raises:
        OSError: a file is missing, or a pattern matches none.
        ValueError: a file has an unknown ending; there are both files and a name, or neither; or there is no split.
    """

    files: Sequence[Path | str] = ()
    name: str | None = None
    config: str | None = None
    split: str | None = None
    max_rows: int | None = field(default=None, compare=False)

    def __post_init__(self):
        object.__setattr__(self, "files", tuple(path for given in self.files for path in expand(Path(given))))
        if bool(self.files) == (self.name is not None):
            raise ValueError(f"the source of rows is {self!r}; expected either files or the name of a dataset")
        if self.name is not None and self.split is None:
            raise ValueError(f"{self.name} has no split; expected one, such as 'train'")
        for path in self.files:
            if (ending := ending_of(path)) not in READERS:
                raise ValueError(f"{path} has the unknown ending {ending!r}; expected one of {', '.join(READERS)}")
            if not path.is_file():
                raise FileNotFoundError(f"{path}: there is no such file")

    def __str__(self):
        return ", ".join(map(str, self.files)) or f"{self.name} ({self.split})"

    def parts(self) -> list[tuple[Path, str]]:
        """Each file with its name in messages: the file's name, or its path if several have the same name."""
        names = Counter(path.name for path in self.files)
        return [(path, path.name if names[path.name] == 1 else str(path)) for path in self.files]


def read_rows(source: Source, streaming: bool = False) -> Iterator[tuple[str, dict | BadRow]]:
    """All rows, whatever `max_rows` is, one at a time, each with its place.

    A place is "reviews.csv, row 3 (line 4)": rows count from 1, without the header and empty lines, which are skipped;
    the line is the one in which the row starts. Rows of JSON arrays, of Parquet and of the Hub have no line. Labels
    that a dataset stores as numbers with names are replaced by the names.

    Args:
        streaming: read a dataset from the Hub directly, without a copy on the disk; not supported for a part of a
            split, such as train[:1000], of which there is a copy.

    Yields:
        The place and the row's columns; or the place and a BadRow, if the row cannot be read.

    Raises:
        OSError: a file or a dataset cannot be read.
        ValueError: a file has no rows, or its header or its format is broken.
    """
    return read_files(source.parts()) if source.files else read_hub(source, streaming)


def read_files(parts: list[tuple[Path, str]]) -> Iterator[tuple[str, dict | BadRow]]:
    """`read_rows` for files, each with its name in messages."""
    for path, name in parts:
        number = 0
        for number, (line, row) in enumerate(READERS[ending_of(path)](path), 1):
            place = f"{name}, row {number}" + ("" if line is None else f" (line {line})")
            yield place, as_row(place, row)
        if not number:
            raise ValueError(f"{path} has no rows")


def as_row(place: str, row: dict | str) -> dict | BadRow:
    """The row; or a BadRow, if `row` is the error message of a reader or has text that cannot be saved."""
    problem = row if isinstance(row, str) else find_fault(row)
    return row if problem is None else BadRow(f"{place}: {problem}")


def read_hub(source: Source, streaming: bool) -> Iterator[tuple[str, dict | BadRow]]:
    """`read_rows` for a dataset on the Hub."""
    name, number = f"{source.name} ({source.split})", 0
    try:
        rows = open_hub(source, streaming)
    except OSError as error:
        if not isinstance(error.__cause__, ConnectionError):
            raise
        raise OSError(
            f"--dataset is {source.name}, which is not a folder, and the Hub cannot be reached; expected one of the "
            "two. Give a folder that datasets.load_dataset opens, or files (--train_file)."
        ) from error
    for number, row in enumerate(rows, 1):
        place = f"{name}, row {number}"
        yield place, as_row(place, name_labels(row, rows.features or {}))
    if not number:
        raise ValueError(f"{name} has no rows")


def open_hub(source: Source, streaming: bool) -> Dataset | IterableDataset:
    """A dataset on the Hub, or in a folder that `datasets.load_dataset` opens. Raises OSError or ValueError if it
    cannot be read."""
    streaming = streaming and re.fullmatch(r"[\w.-]+", source.split) is not None
    with errors_about(f"{source.name} ({source.split})"):
        return load_dataset(source.name, source.config, split=source.split, streaming=streaming)


# ------------------------------------------------------------------------------------------------ columns and bad rows


def columns_of(source: Source) -> list[str]:
    """The columns of the first 100 rows, or of fewer with `max_rows`, in the order in which they occur.

    Raises:
        OSError, ValueError: as `read_rows`, or none of these rows can be read.
    """
    columns, first_bad, readable = {}, None, 0
    for _, row in islice(read_rows(source, streaming=True), ROWS_WITH_ALL_COLUMNS):
        if isinstance(row, BadRow):
            first_bad = first_bad or row
        else:
            columns |= dict.fromkeys(row)
            readable += 1
            if readable == source.max_rows:
                break
    if not columns and first_bad is not None:
        raise first_bad
    return list(columns)


Check = Callable[[dict], dict]
Warn = Callable[[str], None]


def load_rows(source: Source, check: Check, on_bad_row: str, warn: Warn = logger.warning) -> Dataset:
    """The rows, in memory. Nothing is cached, so a changed file is read again.

    Args:
        check: returns the columns to keep of a row, of the same types for every row, or raises ValueError.
        on_bad_row: "stop" at the first invalid row; or "skip" invalid rows, and report their number and the first ones
            at the end.
        warn: is called with this report.

    Returns:
        The columns that `check` keeps, and `place`.

    Raises:
        BadRow: the first invalid row, with "stop".
        OSError, ValueError: as `read_rows`, or no row is valid.
    """
    check_policy(on_bad_row)
    return Dataset.from_list(list(keep_rows(read_rows(source), check, on_bad_row, warn, source.max_rows)))


def map_rows(rows: Dataset | IterableDataset, function: Callable, **options):
    """`rows.map(function, **options)`, without a hash of the function.

    `datasets` would hash it for a cache, which rows in memory do not have. That takes seconds for a function that
    refers to a whole task, and a Ctrl-C in the meantime is lost.
    """
    if isinstance(rows, Dataset):
        options["new_fingerprint"] = generate_random_fingerprint()
    return rows.map(function, **options)


def stream_rows(source: Source, check: Check, on_bad_row: str, warn: Warn = logger.warning) -> IterableDataset:
    """The same as `load_rows`, but read again in each pass, and never all in memory. Each file is a shard, or with
    `max_rows` all files together. Errors of `load_rows` are raised during the passes; every file that is used is opened
    once now, so that a corrupt one is found before the training, and with "skip" read up to the first valid row.
    Skipped rows are reported at the end of each shard, or
    when reading it is stopped.

    Raises:
        OSError, ValueError: a file cannot be read, or has no rows.
    """
    check_policy(on_bad_row)
    kept = {"check": check, "on_bad_row": on_bad_row, "warn": warn}
    if source.max_rows is None and source.files:
        kept |= {"parts": source.parts()}
        for part in source.parts():
            next(read_files([part]))
        if on_bad_row == "skip":  # a pass reads each file by itself, and skips one whose rows are all invalid
            next(keep_rows(read_files(source.parts()), check, on_bad_row, lambda _: None))
    else:
        kept |= {"source": source}
        for _ in islice(read_files(source.parts()), source.max_rows):
            pass
    # `IterableDataset.from_generator` would leave a file in the user's cache, and pickles `check`.
    return IterableDataset(ExamplesIterable(stream_examples, kept))


def stream_examples(check, on_bad_row, warn, parts=None, source=None) -> Iterator[tuple[int, dict]]:
    """The rows of a pass, each with a key, as `datasets` expects them. `datasets` makes a shard of each entry of
    `parts`, because it is a list."""
    rows, max_rows = (read_files(parts), None) if source is None else (read_rows(source, True), source.max_rows)
    yield from enumerate(keep_rows(rows, check, on_bad_row, warn, max_rows, may_be_empty=source is None))


def check_policy(on_bad_row: str) -> None:
    """Raises ValueError if there is no such policy."""
    if on_bad_row not in ("stop", "skip"):
        raise ValueError(f"on_bad_row is {on_bad_row!r}; expected 'stop' or 'skip'")


def keep_rows(
    rows: Iterable[tuple[str, dict | BadRow]],
    check: Check,
    on_bad_row: str,
    warn: Warn,
    max_rows: int | None = None,
    may_be_empty: bool = False,
) -> Iterator[dict]:
    """The columns of each row that `check` keeps, and its place, of the first `max_rows` valid rows. Other arguments
    and errors are those of `load_rows`; with `may_be_empty`, all rows may be invalid."""
    total, bad, first_bad = 0, 0, []
    try:
        for place, row in rows:
            total += 1
            try:
                if isinstance(row, BadRow):
                    raise row
                kept = {**check(row), "place": place}
            except ValueError as error:
                problem = error if isinstance(error, BadRow) else BadRow(f"{place}: {error}")
                if on_bad_row == "stop":
                    raise problem from None
                bad += 1
                first_bad += [problem] if bad <= LISTED_ROWS else []
            else:
                yield kept
                if total - bad == max_rows:
                    break
    finally:  # also if reading is stopped
        if 0 < bad < total or (bad and may_be_empty and on_bad_row == "skip"):
            more = [f"and {bad - LISTED_ROWS} more"] if bad > LISTED_ROWS else []
            warn("\n  ".join([f"{bad} of {total} rows are invalid and were skipped:", *map(str, first_bad), *more]))
    if not total and not may_be_empty:
        raise ValueError("there are no rows")
    if bad == total and not may_be_empty:
        raise ValueError(f"all {total} rows are invalid; the first is {first_bad[0]}")
