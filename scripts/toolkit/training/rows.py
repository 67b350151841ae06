"""Rows from files or from the Hub, each with its place, and what happens to those that cannot be used."""

import csv
import json
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path

import pyarrow as pa
from datasets import ClassLabel, Dataset, Features, IterableDataset, List, load_dataset
from datasets.iterable_dataset import ExamplesIterable
from pyarrow import parquet

logger = logging.getLogger(__name__)

# The longest field of a CSV file, in characters. Python's own limit, 131,072, is less than a long article; without any,
# a quotation mark that nobody closes would draw the rest of the file into memory.
LONGEST_FIELD = 2**24

# So many bad rows are named in the report of those that were skipped.
NAMED_ROWS = 5

# Rows of JSON lines may leave columns out. Those of the first so many rows are the columns of the file.
ROWS_WITH_ALL_COLUMNS = 100

# Rows of a Parquet file that are in memory at once.
PARQUET_ROWS = 64


# --------------------------------------------------------------------------------------------------- rows out of files


class BadRow(ValueError):  # noqa: N818
    """A row that cannot be used. The message names its place: "reviews.csv, row 3 (line 4): text is empty"."""


@dataclass(frozen=True)
class Source:
    """Where rows come from: local files, one after the other, or a dataset of the hub.

    Args:
        files: `.csv` and `.tsv`, both with a header and with quotation marks as spreadsheets write them; `.jsonl` and
            `.json`, one object a line; `.parquet`; and `.txt`, a row a line, with the one column `text`. All UTF-8.
        name: the hub's `user/dataset`, or a folder that `datasets.load_dataset` opens.
        config: the one of the dataset's configurations, if it has several.
        split: such as `train` or `train[:1000]`; wanted with `name`.

    Raises:
        OSError: a file is missing.
        ValueError: a file's ending is unknown, or it is not either files or a name with a split.
    """

    files: Sequence[Path | str] = ()
    name: str | None = None
    config: str | None = None
    split: str | None = None

    def __post_init__(self):
        object.__setattr__(self, "files", tuple(map(Path, self.files)))
        if bool(self.files) == (self.name is not None):
            raise ValueError(f"rows come from files or from a dataset's name, one of the two; got {self}")
        if self.name is not None and self.split is None:
            raise ValueError(f"{self.name}: which split of it? split is wanted, such as 'train'")
        for path in self.files:
            if path.suffix.lower() not in READERS:
                raise ValueError(f"{path}: unknown ending {path.suffix!r}; wanted is one of {', '.join(READERS)}")
            if not path.is_file():
                raise FileNotFoundError(f"{path}: there is no such file")

    def parts(self) -> list[tuple[Path, str]]:
        """Each file, and what messages call it: its name, or its path where several have the same name."""
        names = Counter(path.name for path in self.files)
        return [(path, path.name if names[path.name] == 1 else str(path)) for path in self.files]


def read_rows(source: Source, streaming: bool = False) -> Iterator[tuple[str, dict | BadRow]]:
    """All rows, one at a time, each with its place.

    A place is "reviews.csv, row 3 (line 4)": rows count from 1 without the header and without empty lines, which are
    passed over; the line is the one where the row starts. Parquet and the hub have no lines. Labels that a dataset
    stores as numbers, with a name for each, come as the names.

    Args:
        streaming: whether a dataset of the hub is read from there, and not from a copy on disk.

    Yields:
        The place, and the row's columns; or, where there is no making sense of it, the BadRow that says why.

    Raises:
        OSError: a file or a dataset cannot be read.
        ValueError: a file has no rows, or its header or its format is broken.
    """
    return read_files(source.parts()) if source.files else read_hub(source, streaming)


def read_files(parts: list[tuple[Path, str]]) -> Iterator[tuple[str, dict | BadRow]]:
    """`read_rows` of files, each with the name that messages call it by."""
    for path, name in parts:
        number = 0
        for number, (line, row) in enumerate(READERS[path.suffix.lower()](path), 1):
            place = f"{name}, row {number}" + ("" if line is None else f" (line {line})")
            yield place, as_row(place, row)
        if not number:
            raise ValueError(f"{path} has no rows")


def as_row(place: str, row: dict | str) -> dict | BadRow:
    """The row, or what is wrong with it: what a reader says of it, or text that can be neither shown nor saved."""
    problem = row if isinstance(row, str) else find_fault(row)
    return row if problem is None else BadRow(f"{place}: {problem}")


def find_fault(row: dict) -> str | None:
    """What is wrong with the text in a row, at whatever depth: bytes that are no UTF-8 (or half of a surrogate pair,
    which JSON can write), or zero bytes."""
    for column, value in row.items():
        waiting = [column, value]
        while waiting:
            value = waiting.pop()
            if isinstance(value, dict):
                waiting += [*value, *value.values()]
            elif isinstance(value, (list, tuple)):
                waiting += value
            elif isinstance(value, str) and "\0" in value:
                return f"{column!r} has a zero byte in it"
            elif isinstance(value, str) and not is_utf8(value):
                return f"{column!r} is not valid UTF-8"
    return None


def is_utf8(text: str) -> bool:
    """Whether the text can be written as UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


# A reader yields, for each row, its line (None: it has none), and its columns or, as a string, what is wrong with it.


def open_text(path: Path, newline: str | None = None):
    """Opens a text file so that no byte stops the reading. What is not UTF-8 comes as surrogates."""
    return open(path, encoding="utf-8-sig", errors="surrogateescape", newline=newline)


def read_csv(path: Path, delimiter: str) -> Iterator[tuple[int, dict | str]]:
    """Rows of a file with a header. A broken row ends at the end of its line, or, if it is a quotation that is not
    closed as it should be, of the line where that shows; reading goes on behind it."""
    csv.field_size_limit(max(csv.field_size_limit(), LONGEST_FIELD))
    with open_text(path, newline="") as file:
        reader = csv.reader(file, delimiter=delimiter, strict=True)
        records = csv_records(reader)
        _, header = next(records, (None, []))
        check_header(path, header)
        for line, record in records:
            if isinstance(record, str):
                lines = "" if reader.line_num == line else f"; all up to line {reader.line_num} is lost with it"
                yield line, f"broken quotation or field ({record}){lines}"
            elif len(record) != len(header):
                yield line, f"the header has {len(header)} columns, and this row {len(record)}"
            else:
                yield line, dict(zip(header, record, strict=True))


def csv_records(reader) -> Iterator[tuple[int, list[str] | str]]:
    """The line where each record starts, and its fields or, as a string, what the csv module says of it."""
    while True:
        line = reader.line_num + 1
        try:
            record = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            record = str(error)
        if record:  # not an empty line
            yield line, record


def check_header(path: Path, header: list[str] | str) -> None:
    """Checks the names of a file's columns.

    Raises:
        ValueError: it cannot be read, or two columns have the same name.
    """
    if isinstance(header, str):
        raise ValueError(f"{path}: broken quotation or field in the header ({header})")
    if fault := find_fault(dict.fromkeys(header)):
        raise ValueError(f"{path}: in the header {fault}; is the file UTF-8?")
    if twice := [name for name, count in Counter(header).items() if count > 1]:
        raise ValueError(f"{path}: the header names {', '.join(map(repr, twice))} more than once")


def read_json(path: Path) -> Iterator[tuple[int, dict | str]]:
    """Rows of JSON lines."""
    for line, row in read_text(path):
        try:
            row = json.loads(row["text"])
        except (ValueError, RecursionError) as error:
            yield line, f"not valid JSON ({error}); wanted is one object a line"
            continue
        yield line, row if isinstance(row, dict) else f"a JSON {type(row).__name__}; wanted is one object a line"


def read_text(path: Path) -> Iterator[tuple[int, dict]]:
    """The lines of a text file that are not blank."""
    with open_text(path) as file:
        for line, text in enumerate(file, 1):
            if not text.isspace():
                yield line, {"text": text.removesuffix("\n")}


def read_parquet(path: Path) -> Iterator[tuple[None, dict | str]]:
    """Rows of a Parquet file, a few at a time in memory."""
    with faults_of(path), parquet.ParquetFile(path, pre_buffer=False, buffer_size=2**20) as file:
        schema = file.schema_arrow
        # `datasets` leaves the names of labels there.
        features = Features.from_arrow_schema(schema) if b"huggingface" in (schema.metadata or {}) else {}
        for batch in file.iter_batches(PARQUET_ROWS):
            for index in range(len(batch)):
                try:
                    row = batch.slice(index, 1).to_pylist()[0]
                except UnicodeDecodeError as error:
                    row = f"not valid UTF-8 ({error.reason})"
                yield None, row if isinstance(row, str) else name_labels(row, features)


@contextmanager
def faults_of(name: Path | str):
    """Has what Arrow and `datasets` complain about say in one line what it is about."""
    try:
        yield
    except (OSError, ValueError, pa.ArrowException) as error:
        kind = OSError if isinstance(error, OSError) else ValueError
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise kind(f"{name} cannot be read: {reason}") from error


READERS = {
    ".csv": partial(read_csv, delimiter=","),
    ".tsv": partial(read_csv, delimiter="\t"),
    ".jsonl": read_json,
    ".json": read_json,
    ".parquet": read_parquet,
    ".txt": read_text,
}


def read_hub(source: Source, streaming: bool) -> Iterator[tuple[str, dict | BadRow]]:
    """`read_rows` of a dataset of the hub."""
    name = f"{source.name} ({source.split})"
    try:
        with faults_of(name):
            rows = load_dataset(source.name, source.config, split=source.split, streaming=streaming)
    except OSError as error:
        if not isinstance(error.__cause__, ConnectionError):
            raise
        raise OSError(
            f"--dataset {source.name}: it is no folder, and the Hub cannot be reached. Give a folder that "
            "datasets.load_dataset opens, or files (--train_file)."
        ) from error
    number = 0
    for number, row in enumerate(rows, 1):
        place = f"{name}, row {number}"
        yield place, as_row(place, name_labels(row, rows.features or {}))
    if not number:
        raise ValueError(f"{name} has no rows")


def name_labels(row: dict, features: dict) -> dict:
    """The row, with the names of its labels in place of their numbers; None where there is no label (-1)."""
    kinds = {column: features.get(column) for column in row}
    return {
        column: [name_label(kinds[column].feature, label) for label in value]
        if isinstance(kinds[column], List) and isinstance(kinds[column].feature, ClassLabel) and value is not None
        else name_label(kinds[column], value)
        for column, value in row.items()
    }


def name_label(feature, value):
    """The name of a label that is stored as a number. Any other value stays as it is."""
    if not isinstance(feature, ClassLabel) or value is None:
        return value
    return feature.int2str(value) if value >= 0 else None


# ------------------------------------------------------------------------------------------------ columns and bad rows


def columns_of(source: Source) -> list[str]:
    """The columns of the first 100 rows that can be read, in the order in which they turn up.

    Raises:
        OSError, ValueError: as `read_rows` says, or none of those rows can be read.
    """
    columns, first_bad = {}, None
    for _, row in islice(read_rows(source, streaming=True), ROWS_WITH_ALL_COLUMNS):
        if isinstance(row, BadRow):
            first_bad = first_bad or row
        else:
            columns |= dict.fromkeys(row)
    if not columns and first_bad is not None:
        raise first_bad
    return list(columns)


def find_column(columns: Sequence[str], named: str | None, candidates: Sequence[str], what: str) -> str:
    """The column that was named, or else the first of the candidates that there is.

    Args:
        what: what the column is to hold, for the message.

    Raises:
        ValueError: there is none.
    """
    there_are = f"there are {', '.join(map(repr, columns))}" if columns else "there are none at all"
    if named is not None:
        if named not in columns:
            raise ValueError(f"no column {named!r} for {what}: {there_are}")
        return named
    for candidate in candidates:
        if candidate in columns:
            return candidate
    wanted = " or ".join(map(repr, candidates)) or "one to be named"
    raise ValueError(f"no column for {what}: wanted is {wanted}, or another by name; {there_are}")


def text_of(row: dict, column: str) -> str:
    """The text in a row's column, for the `check` of `load_rows`.

    Raises:
        ValueError: the column is missing, empty, blank or no text.
    """
    value = row.get(column)
    if value is None:
        raise ValueError(f"no column {column!r}" if column not in row else f"{column!r} is empty")
    if not isinstance(value, str):
        raise ValueError(f"{column!r} is {value!r}, which is no text")
    if not value.strip():
        raise ValueError(f"{column!r} is empty")
    return value


Check = Callable[[dict], dict]
Warn = Callable[[str], None]


def load_rows(source: Source, check: Check, on_bad_row: str, warn: Warn = logger.warning) -> Dataset:
    """All rows, in memory. Nothing is cached: a file that has changed is read as it is now.

    Args:
        check: makes of a row's columns those that are kept, of the same types for every row; or raises ValueError.
        on_bad_row: "stop" at the first bad row; or "skip" bad rows, and say at the end how many, and where the first
            were.
        warn: is told of those that were skipped.

    Returns:
        The columns that `check` keeps, and `place`.

    Raises:
        BadRow: the first bad row, with "stop".
        OSError, ValueError: as `read_rows` says, or every row is bad.
    """
    check_policy(on_bad_row)
    return Dataset.from_list(list(keep_rows(read_rows(source), check, on_bad_row, warn)))


def stream_rows(source: Source, check: Check, on_bad_row: str, warn: Warn = logger.warning) -> IterableDataset:
    """The same as `load_rows`, read anew in each pass and never in memory at once. A file is a shard. What `load_rows`
    raises, the passes raise; every file is opened now, so that a broken one shows before training starts. Bad rows are
    told of at the end of each file, or where the reading of it is broken off.

    Raises:
        OSError, ValueError: one of the files cannot be read, or has no rows.
    """
    check_policy(on_bad_row)
    for part in source.parts():
        next(read_files([part]))
    kept = {"check": check, "on_bad_row": on_bad_row, "warn": warn}
    kept |= {"parts": source.parts()} if source.files else {"source": source}
    # `IterableDataset.from_generator` would do, but leaves a file in the user's cache, and has to pickle `check`.
    return IterableDataset(ExamplesIterable(stream_examples, kept))


def stream_examples(check, on_bad_row, warn, parts=None, source=None) -> Iterator[tuple[int, dict]]:
    """What `stream_rows` reads in a pass, in the form that `datasets` expects: each row with a key. Of `parts`, a list,
    it makes shards."""
    rows = read_hub(source, streaming=True) if parts is None else read_files(parts)
    yield from enumerate(keep_rows(rows, check, on_bad_row, warn))


def check_policy(on_bad_row: str) -> None:
    """Raises ValueError where there is no such policy."""
    if on_bad_row not in ("stop", "skip"):
        raise ValueError(f"on_bad_row is {on_bad_row!r}; expected 'stop' or 'skip'")


def keep_rows(rows: Iterable[tuple[str, dict | BadRow]], check: Check, on_bad_row: str, warn: Warn) -> Iterator[dict]:
    """What `check` keeps of each row, and the row's place. Arguments and errors are those of `load_rows`."""
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
                first_bad += [problem] if bad <= NAMED_ROWS else []
            else:
                yield kept
    finally:  # also if the reading is broken off
        if 0 < bad < total:
            more = [f"and {bad - NAMED_ROWS} more"] if bad > NAMED_ROWS else []
            warn("\n  ".join([f"{bad} of {total} rows are bad and were skipped:", *map(str, first_bad), *more]))
    if bad == total:
        raise ValueError(f"every row is bad, {total} in all; the first is {first_bad[0]}")
