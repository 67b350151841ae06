"""Reading rows from files or from the Hub, each with its place, and stopping at invalid rows or skipping them."""

import csv
import glob
import gzip
import json
import logging
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import TextIO

import pyarrow as pa
from datasets import ClassLabel, Dataset, Features, IterableDataset, LargeList, List, load_dataset
from datasets.fingerprint import generate_random_fingerprint
from datasets.iterable_dataset import ExamplesIterable
from pyarrow import parquet

logger = logging.getLogger(__name__)

# The longest field of a CSV file and the longest row of a JSON array, in characters. Python's default for CSV, 131,072,
# is less than a long article; without a limit, an unclosed quotation mark would read the rest of the file into memory.
LONGEST_FIELD = 2**24

# The characters of a JSON array that are read at once.
CHARACTERS_TOGETHER = 2**16

# A JSON string after its opening quotation mark, up to the closing one, the group, or to the end of the text.
JSON_STRING = re.compile(r'(?:[^"\\]++|\\.)*+(")?', re.DOTALL)

# Brackets and commas of JSON outside of strings, and strings.
JSON_MARKS = re.compile(rf'"{JSON_STRING.pattern}|[][{{}},]', re.DOTALL)

# The number of rows that the report on skipped rows lists.
LISTED_ROWS = 5

# Rows of JSON lines may lack columns: those of this many rows at the beginning are the columns of the file.
ROWS_WITH_ALL_COLUMNS = 100

# The rows of a Parquet file that are in memory at once.
PARQUET_ROWS = 64


# -------------------------------------------------------------------------------------------------------- reading rows


class BadRow(ValueError):  # noqa: N818
    """A row that cannot be used. The message names its place: "reviews.csv, row 3 (line 4): text is empty"."""


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


def expand(path: Path) -> list[Path]:
    """The files that a pattern matches, sorted; of a path that is no pattern, the path.

    Raises:
        FileNotFoundError: the pattern matches no file.
    """
    if path.is_file() or not glob.has_magic(str(path)):
        return [path]
    # The name of a folder that exists may have brackets.
    folder = next(each for each in path.parents if each.is_dir())
    names = glob.glob(str(path.relative_to(folder)), root_dir=folder, recursive=True)
    if not (found := [folder / name for name in sorted(names) if (folder / name).is_file()]):
        raise FileNotFoundError(f"{path} matches no file; expected a file, or a pattern of files that exist")
    return found


def ending_of(path: Path) -> str:
    """The ending of a file's name by which it is read, such as .csv or .csv.gz."""
    return "".join(path.suffixes[-2:] if path.suffix.lower() == ".gz" else path.suffixes[-1:]).lower()


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


def find_fault(row: dict) -> str | None:
    """What is wrong with the text in a row, at any depth; None if nothing is. Text must not have zero bytes, bytes that
    are not UTF-8, or an unpaired surrogate, which JSON can express."""
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


# A reader yields each row's line (None: it has none), and its columns or, as a string, what is wrong with it.


@contextmanager
def open_text(path: Path, newline: str | None = None) -> Iterator[TextIO]:
    """Opens a text file, which may be compressed. Bytes that are not UTF-8 are read as surrogates, without an error.

    Raises:
        OSError: a compressed file is damaged or incomplete; also while it is read.
    """
    opened = gzip.open if path.suffix.lower() == ".gz" else open
    try:
        with opened(path, "rt", encoding="utf-8-sig", errors="surrogateescape", newline=newline) as file:
            yield file
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise OSError(f"{path} cannot be read: {error}; expected a complete gzip file") from error


def read_csv(path: Path, delimiter: str) -> Iterator[tuple[int, dict | str]]:
    """Rows of a file with a header. An invalid row ends at the end of its line; one with an unclosed quotation ends at
    the line in which the error shows. Reading continues with the next line."""
    csv.field_size_limit(max(csv.field_size_limit(), LONGEST_FIELD))
    with open_text(path, newline="") as file:
        reader = csv.reader(file, delimiter=delimiter, strict=True)
        records = csv_records(reader)
        _, header = next(records, (None, []))
        check_header(path, header)
        for line, record in records:
            if isinstance(record, str):
                lines = "" if reader.line_num == line else f"; the lines up to {reader.line_num} are lost with it"
                yield line, f"invalid quotation or field ({record}){lines}"
            elif delimiter == "\t" and any("\t" in field and "\n" in field for field in record):
                yield line, f"a quotation up to line {reader.line_num} has tabs and line breaks; expected a row a line"
            elif len(record) != len(header):
                yield line, f"the row has {len(record)} columns; expected {len(header)}, as in the header"
            else:
                yield line, dict(zip(header, record, strict=True))


def csv_records(reader) -> Iterator[tuple[int, list[str] | str]]:
    """The line in which each record starts, and its fields or, as a string, the error of the csv module."""
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
    """Raises ValueError if a file's header cannot be read, or has a name twice."""
    if isinstance(header, str):
        raise ValueError(f"{path} has an invalid quotation or field in the header ({header})")
    if fault := find_fault(dict.fromkeys(header)):
        raise ValueError(f"{path} has an invalid header: {fault}; expected a UTF-8 file")
    if twice := [name for name, count in Counter(header).items() if count > 1]:
        raise ValueError(f"{path} has {', '.join(map(repr, twice))} twice in the header; expected different names")


def read_json_lines(path: Path) -> Iterator[tuple[int, dict | str]]:
    """Rows of JSON lines."""
    for line, row in read_text(path):
        yield line, parse_object(row["text"], "an object on each line")


def parse_object(text: str, expected: str) -> dict | str:
    """The object that `text` is in JSON; or, as a string, what is wrong with it."""
    try:
        row = json.loads(text)
    except (ValueError, RecursionError) as error:
        # Not its line, which counts from the beginning of `text`.
        problem = f"{error.msg} at character {error.pos + 1}" if isinstance(error, json.JSONDecodeError) else error
        return f"not valid JSON ({problem}); expected {expected}"
    return row if isinstance(row, dict) else f"a JSON {type(row).__name__}; expected {expected}"


def read_json(path: Path) -> Iterator[tuple[int | None, dict | str]]:
    """Rows of a JSON array or, if the file begins otherwise, of JSON lines."""
    with open_text(path) as file:
        if first_character(file) == "[":
            yield from ((None, row) for row in read_array(file))
            return
    yield from read_json_lines(path)


def first_character(file: TextIO) -> str:
    """Reads a file up to its first character that is not blank, and returns it; "" if there is none."""
    while (character := file.read(1)).isspace():
        pass
    return character


def read_array(file: TextIO) -> Iterator[dict | str]:
    """Rows of a JSON array whose opening bracket was read, one in memory at a time. An invalid row ends at its comma;
    one with an unclosed bracket or quotation mark is the last."""
    text, depth, quoted, after_comma = "", 0, False, False
    for part in json_parts(file):
        start = position = 0
        if quoted:
            string = JSON_STRING.match(part)
            position, quoted = string.end(), string[1] is None
        for match in JSON_MARKS.finditer(part, position):
            mark = part[match.start()]
            if mark == '"':
                quoted = match[1] is None
            elif mark in "[{":
                depth += 1
            elif depth and mark in "]}":
                depth -= 1
            elif not depth and mark in ",]":
                text += part[start : match.start()]
                if mark == "," or after_comma or text.strip():
                    yield parse_object(text.strip(), "an array of objects")
                text, start, after_comma = "", match.end(), True
                if mark == "]":
                    if any(map(str.strip, chain([part[start:]], json_parts(file)))):
                        yield "not valid JSON (text after the end of the array); expected one array of objects"
                    return
        text += part[start:]
        if len(text) > LONGEST_FIELD:
            yield f"the row has more than {LONGEST_FIELD:,} characters; the rest of the file is lost with it"
            return
    yield "not valid JSON (the array has no end); the rest of the file is lost with this row"


def json_parts(file: TextIO) -> Iterator[str]:
    """The text of a file in parts that do not end between a backslash and the character after it."""
    while part := file.read(CHARACTERS_TOGETHER):
        while part.endswith("\\") and (more := file.read(1)):
            part += more
        yield part


def read_text(path: Path) -> Iterator[tuple[int, dict]]:
    """The lines of a text file that are not blank."""
    with open_text(path) as file:
        for line, text in enumerate(file, 1):
            if not text.isspace():
                yield line, {"text": text.removesuffix("\n")}


def read_parquet(path: Path) -> Iterator[tuple[None, dict | str]]:
    """Rows of a Parquet file, a few in memory at a time."""
    with errors_about(path), parquet.ParquetFile(path, pre_buffer=False, buffer_size=2**20) as file:
        schema = file.schema_arrow
        # `datasets` stores the names of labels there.
        features = Features.from_arrow_schema(schema) if b"huggingface" in (schema.metadata or {}) else {}
        for batch in file.iter_batches(PARQUET_ROWS):
            for index in range(len(batch)):
                try:
                    row = batch.slice(index, 1).to_pylist()[0]
                except UnicodeDecodeError as error:
                    row = f"not valid UTF-8 ({error.reason})"
                yield None, row if isinstance(row, str) else name_labels(row, features)


@contextmanager
def errors_about(name: Path | str):
    """Turns an error of Arrow or `datasets` into one of one line that names `name`."""
    try:
        yield
    except (OSError, ValueError, pa.ArrowException) as error:
        kind = OSError if isinstance(error, OSError) else ValueError
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise kind(f"{name} cannot be read: {reason}") from error


READERS = {
    ".csv": partial(read_csv, delimiter=","),
    ".tsv": partial(read_csv, delimiter="\t"),
    ".jsonl": read_json_lines,
    ".json": read_json,
    ".parquet": read_parquet,
    ".txt": read_text,
}
READERS |= {f"{ending}.gz": read for ending, read in READERS.items() if ending != ".parquet"}


def read_hub(source: Source, streaming: bool) -> Iterator[tuple[str, dict | BadRow]]:
    """`read_rows` for a dataset on the Hub."""
    name = f"{source.name} ({source.split})"
    streaming = streaming and re.fullmatch(r"[\w.-]+", source.split) is not None
    try:
        with errors_about(name):
            rows = load_dataset(source.name, source.config, split=source.split, streaming=streaming)
    except OSError as error:
        if not isinstance(error.__cause__, ConnectionError):
            raise
        raise OSError(
            f"--dataset is {source.name}, which is not a folder, and the Hub cannot be reached; expected one of the "
            "two. Give a folder that datasets.load_dataset opens, or files (--train_file)."
        ) from error
    number = 0
    for number, row in enumerate(rows, 1):
        place = f"{name}, row {number}"
        yield place, as_row(place, name_labels(row, rows.features or {}))
    if not number:
        raise ValueError(f"{name} has no rows")


def name_labels(row: dict, features: dict) -> dict:
    """The row with the names of its labels instead of their numbers; None for -1, no label."""
    return {column: name_label(features.get(column), value) for column, value in row.items()}


def name_label(feature, value):
    """The name of a label that is stored as a number, also in lists; any other value as it is."""
    if isinstance(feature, List | LargeList) and value is not None:
        return [name_label(feature.feature, each) for each in value]
    if not isinstance(feature, ClassLabel) or value is None:
        return value
    return feature.int2str(value) if value >= 0 else None


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


def find_column(columns: Sequence[str], named: str | None, candidates: Sequence[str], what: str) -> str:
    """The column `named`, or else the first of the candidates that exists.

    Args:
        what: the content of the column, and the flag that names it, for the message.

    Raises:
        ValueError: there is none.
    """
    existing = ", ".join(map(repr, columns)) or "none"
    if named is not None:
        if named not in columns:
            raise ValueError(f"there is no column {named!r} for {what}; the columns are {existing}")
        return named
    for candidate in candidates:
        if candidate in columns:
            return candidate
    expected = " or ".join(map(repr, candidates)) or "one that is named"
    raise ValueError(f"there is no column for {what}; expected {expected}, and the columns are {existing}")


def text_of(row: dict, column: str) -> str:
    """The text in a row's column, for the `check` of `load_rows`.

    Raises:
        ValueError: the column is missing, empty, blank or not a text.
    """
    value = row.get(column)
    if value is None:
        raise ValueError(f"{column!r} is missing" if column not in row else f"{column!r} is empty")
    if not isinstance(value, str):
        raise ValueError(f"{column!r} is {value!r}; expected a text")
    if not value.strip():
        raise ValueError(f"{column!r} is empty")
    return value


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
