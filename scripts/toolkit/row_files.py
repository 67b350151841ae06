"""Rows of files: CSV, TSV, JSON lines, JSON arrays, text, each also compressed, and Parquet.

A reader, one of `READERS`, yields each row's line (None: it has none), and its columns or, as a string, what is wrong
with it. Nothing here imports datasets or pyarrow before a Parquet file is read.
"""

import csv
import glob
import gzip
import io
import json
import re
import zlib
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from pathlib import Path
from typing import BinaryIO, Protocol, TextIO

# The longest field of a CSV file and the longest row of a JSON array, in characters. Python's default for CSV, 131,072,
# is less than a long article; without a limit, an unclosed quotation mark would read the rest of the file into memory.
LONGEST_FIELD = 2**24

# The characters of a JSON array that are read at once.
CHARACTERS_TOGETHER = 2**16

# A JSON string after its opening quotation mark, up to the closing one, the group, or to the end of the text.
JSON_STRING = re.compile(r'(?:[^"\\]++|\\.)*+(")?', re.DOTALL)

# Brackets and commas of JSON outside of strings, and strings.
JSON_MARKS = re.compile(rf'"{JSON_STRING.pattern}|[][{{}},]', re.DOTALL)

# Rows of JSON may lack columns: those of this many rows at the beginning are the columns of the file.
ROWS_WITH_ALL_COLUMNS = 100

# Usual names of columns.
TEXTS = ("text", "sentence", "sentence1", "premise", "question1")
SECOND_TEXTS = ("sentence2", "hypothesis", "question2")

# The rows of a Parquet file that are in memory at once.
PARQUET_ROWS = 64


class File(Protocol):
    """A file to read: a `Path`, or an object with these members. Its text is its name in messages."""

    @property
    def suffix(self) -> str: ...

    def open(self, mode: str) -> BinaryIO: ...


class BadRow(ValueError):  # noqa: N818
    """A row that cannot be used. The message names its place: "reviews.csv, row 3 (line 4): text is empty"."""


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


@contextmanager
def open_text(path: File, newline: str | None = None) -> Iterator[TextIO]:
    """Opens a text file, which may be compressed. Bytes that are not UTF-8 are read as surrogates, without an error.

    Raises:
        OSError: a compressed file is damaged or incomplete; also while it is read.
    """
    with errors_of_gzip(path), path.open("rb") as binary, decompressed(path, binary) as plain:
        yield io.TextIOWrapper(plain, encoding="utf-8-sig", errors="surrogateescape", newline=newline)


@contextmanager
def errors_of_gzip(path: File) -> Iterator[None]:
    """Turns the errors of a damaged or incomplete gzip file into OSError."""
    try:
        yield
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise OSError(f"{path} cannot be read: {error}; expected a complete gzip file") from error


def decompressed(path: File, binary: BinaryIO) -> BinaryIO:
    """The content of a file that may be compressed."""
    return gzip.open(binary) if path.suffix.lower() == ".gz" else binary


def read_csv(path: File, delimiter: str) -> Iterator[tuple[int, dict | str]]:
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


def check_header(path: File, header: list[str] | str) -> None:
    """Raises ValueError if a file's header cannot be read, or has a name twice."""
    if isinstance(header, str):
        raise ValueError(f"{path} has an invalid quotation or field in the header ({header})")
    if fault := find_fault(dict.fromkeys(header)):
        raise ValueError(f"{path} has an invalid header: {fault}; expected a UTF-8 file")
    if twice := [name for name, count in Counter(header).items() if count > 1]:
        raise ValueError(f"{path} has {', '.join(map(repr, twice))} twice in the header; expected different names")


def read_json_lines(path: File) -> Iterator[tuple[int, dict | str]]:
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


def read_json(path: File) -> Iterator[tuple[int | None, dict | str]]:
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


def read_text(path: File) -> Iterator[tuple[int, dict]]:
    """The lines of a text file that are not blank."""
    with open_text(path) as file:
        for line, text in enumerate(file, 1):
            if not text.isspace():
                yield line, {"text": text.removesuffix("\n")}


def read_parquet(path: File, columns: Collection[str] | None = None) -> Iterator[tuple[None, dict | str]]:
    """Rows of a Parquet file, a few in memory at a time.

    Args:
        columns: those to read, of which the file may lack some; None: all.
    """
    from pyarrow import parquet

    source = path if isinstance(path, Path) else path.open("rb")
    with errors_about(path), parquet.ParquetFile(source, pre_buffer=False, buffer_size=2**20) as file:
        features = label_features(file.schema_arrow)
        chosen = None if columns is None else [name for name in file.schema_arrow.names if name in columns]
        for batch in file.iter_batches(PARQUET_ROWS, columns=chosen):
            for row in rows_of(batch):
                yield None, row if isinstance(row, str) else name_labels(row, features)


def label_features(schema) -> dict:
    """The names of labels that `datasets` stores in the schema of a Parquet file."""
    if b"huggingface" not in (schema.metadata or {}):
        return {}
    from datasets import Features

    return Features.from_arrow_schema(schema)


def rows_of(batch) -> Iterator[dict | str]:
    """The rows of a batch of Arrow's; for one that is not valid UTF-8, what is wrong with it."""
    try:
        yield from batch.to_pylist()
    except UnicodeDecodeError:
        for index in range(len(batch)):
            try:
                yield batch.slice(index, 1).to_pylist()[0]
            except UnicodeDecodeError as error:
                yield f"not valid UTF-8 ({error.reason})"


@contextmanager
def errors_about(name: File | str):
    """Turns an error of Arrow or `datasets` into one of one line that names `name`."""
    import pyarrow as pa

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


def name_labels(row: dict, features: dict) -> dict:
    """The row with the names of its labels instead of their numbers; None for -1, no label."""
    if not features:
        return row
    return {column: name_label(features.get(column), value) for column, value in row.items()}


def name_label(feature, value):
    """The name of a label that is stored as a number, also in lists; any other value as it is."""
    from datasets import ClassLabel, LargeList, List

    if isinstance(feature, List | LargeList) and value is not None:
        return [name_label(feature.feature, each) for each in value]
    if not isinstance(feature, ClassLabel) or value is None:
        return value
    return feature.int2str(value) if value >= 0 else None
