"""Rows of files: CSV, TSV, JSON lines, JSON arrays, text, CoNLL and Parquet, each also compressed.

A reader, one of `READERS`, takes an `InputFile` and yields for each row where it starts, and its columns or, as a
string, what is wrong with it, or None if the row counts and has no content. Where it starts is the number of a line,
other words, or None. Nothing here imports datasets or pyarrow before a Parquet or .zst file is read.
"""

import csv
import gzip
import io
import json
import re
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import groupby
from typing import BinaryIO, TextIO

from toolkit.cli import require

# The longest field of a CSV file, in characters. Python's default, 131,072, is less than a long article; without a
# limit, an unclosed quotation mark would read the rest of the file into memory.
LONGEST_FIELD = 2**24

# The longest JSON array, in characters. It is read at once.
LONGEST_ARRAY = 2**29

# Usual names of columns.
TEXTS = ("text", "sentence", "sentence1", "premise", "question1")
SECOND_TEXTS = ("sentence2", "hypothesis", "question2")

# Delimiters of tables. A single column with one of them in its name was read with another one.
DELIMITERS = ";\t|,"

# A field of a table that is in quotation marks as a whole; those in it are doubled.
QUOTED_FIELD = re.compile(r'"((?:[^"]|"")*)"')

# The rows of a Parquet file that are in memory at once.
PARQUET_ROWS = 64

Rows = Iterator[tuple[int | str | None, dict | str | None]]


# ----------------------------------------------------------------------------------------------- columns and their text


def find_column(columns: Sequence[str], named: str | None, candidates: Sequence[str], what: str) -> str:
    """The column `named`, or else the first of the candidates that exists.

    Args:
        what: the content of the column, and the flag that names it, for the message.

    Raises:
        ValueError: there is none.
    """
    for candidate in candidates if named is None else [named]:
        if candidate in columns:
            return candidate
    existing = ", ".join(map(repr, columns)) or "none"
    if len(columns) == 1 and (found := [each for each in DELIMITERS if each in columns[0]]):
        existing += f". If {found[0]!r} is between columns, give it as --delimiter"
    if named is not None:
        raise ValueError(f"there is no column {named!r} for {what}; the columns are {existing}")
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
    """What is wrong with the text in a row, at any depth; None if nothing is. It must not have bytes that are not
    UTF-8, which `open_text` reads as surrogates, or an unpaired surrogate, which JSON can express."""
    for column, value in row.items():
        try:
            json.dumps([column, value], ensure_ascii=False, default=str).encode()
        except UnicodeEncodeError:
            return f"{column!r} is not valid UTF-8"
    return None


# -------------------------------------------------------------------------------------------------------------- opening


class Decompressed(io.RawIOBase):
    """The decompressed bytes of a file. Reading them raises an OSError if it is damaged or incomplete."""

    def __init__(self, file, binary: BinaryIO):
        self.file = file
        if file.compression == ".gz":
            self.stream = gzip.GzipFile(fileobj=binary)
        else:
            require("pyarrow")
            from pyarrow import CompressedInputStream

            self.stream = CompressedInputStream(binary, "zstd")

    def readable(self):
        return True

    def readinto(self, target):
        try:
            return self.stream.readinto(target)
        except (EOFError, OSError, zlib.error) as error:
            expected = f"expected a complete {self.file.compression} file"
            raise OSError(f"{self.file} cannot be read: {error}; {expected}") from error


@contextmanager
def open_binary(file) -> Iterator[BinaryIO]:
    """Opens a file, which may be compressed."""
    with file.open() as binary:
        yield io.BufferedReader(Decompressed(file, binary), 2**16) if file.compression else binary


@contextmanager
def open_text(file, newline: str | None = None) -> Iterator[TextIO]:
    """Opens a text file as `open_binary`. Bytes that are not UTF-8 are read as surrogates, without an error."""
    with open_binary(file) as binary:
        yield io.TextIOWrapper(binary, encoding="utf-8-sig", errors="surrogateescape", newline=newline)


@contextmanager
def errors_about(name: object) -> Iterator[None]:
    """Turns the errors of a library that reads rows, of any type, into an OSError or ValueError of one line that has
    `name`."""
    try:
        yield
    except Exception as error:
        kind = OSError if isinstance(error, OSError) else ValueError
        both = [str(each).strip().splitlines() for each in (error, error.__cause__ or "")]
        reason = ": ".join(lines[0] for lines in both if lines) or type(error).__name__
        raise kind(f"{name} cannot be read: {reason}") from error


# --------------------------------------------------------------------------------------------------------------- tables


def read_table(file, delimiter: str, quoting: int) -> Rows:
    """Rows of a file with a header. An invalid row ends at the end of its line; one with an unclosed quotation ends at
    the line in which the error shows. Reading continues with the next line.

    Args:
        delimiter: unless the file has one.
        quoting: `csv.QUOTE_MINIMAL`; or `csv.QUOTE_NONE`: a row is a line, and quotation marks are part of the text, as
            in the files of GLUE, where many are unpaired; except those around a whole field, which spreadsheets write.

    Raises:
        ValueError: the header cannot be read, or has a name twice.
    """
    csv.field_size_limit(max(csv.field_size_limit(), LONGEST_FIELD))
    with open_text(file, newline="") as text:
        records = read_records(csv.reader(text, delimiter=file.delimiter or delimiter, quoting=quoting, strict=True))
        _, header = next(records, (None, []))
        if problem := header if isinstance(header, str) else find_fault(dict.fromkeys(header)):
            raise ValueError(f"{file} has an invalid header: {problem}; expected the names of the columns in UTF-8")
        if twice := [name for name, count in Counter(header).items() if count > 1]:
            raise ValueError(f"{file} has {', '.join(map(repr, twice))} twice in the header; expected different names")
        for line, record in records:
            if isinstance(record, str):
                yield line, record
            elif len(record) != len(header):
                is_open = quoting == csv.QUOTE_NONE and any(field.startswith('"') for field in record)
                advice = ". If it has line breaks or tabs in quotation marks, name the file .csv" if is_open else ""
                yield line, f"the row has {len(record)} columns; expected {len(header)}, as in the header{advice}"
            else:
                yield line, dict(zip(header, record, strict=True))


def read_records(reader) -> Iterator[tuple[int, list[str] | str]]:
    """The line in which each record starts, and its fields or, as a string, what is wrong with it."""
    while True:
        line = reader.line_num + 1
        try:
            record = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            lost = "" if reader.line_num == line else f"; the lines up to {reader.line_num} are lost with it"
            record = f"invalid quotation or field ({error}){lost}"
        if isinstance(record, list) and reader.dialect.quoting == csv.QUOTE_NONE:
            quoted = [QUOTED_FIELD.fullmatch(field) for field in record]
            record = [q[1].replace('""', '"') if q else field for q, field in zip(quoted, record, strict=True)]
        if record:  # not an empty line
            yield line, record


# ---------------------------------------------------------------------------------------------------------------- lines


def read_text(file) -> Rows:
    """The lines of a text file. A blank line counts, so that the number of a row is that of its line."""
    with open_text(file) as text:
        for number, line in enumerate(text, 1):
            yield number, None if line.isspace() else {"text": line.removesuffix("\n")}


def guess_format(file, is_table: bool) -> str:
    """The format of standard input: jsonl if it begins with a brace; else txt.

    Args:
        is_table: whether a delimiter is given, so that txt is a table.

    Raises:
        ValueError: it begins as a table does, with the usual name of a column.
    """
    with open_text(file) as text:
        first = next((line.strip() for line in text if not line.isspace()), "")
    if first.startswith("{"):
        return "jsonl"
    names = [name for name in re.split(f"[{DELIMITERS}]", first) if name.strip(' "').lower() in TEXTS]
    if names and not is_table:
        raise ValueError(
            f"{file} begins as a table with the column {names[0]!r}; expected --stdin_format csv or tsv, "
            "or txt if it has a text on each line"
        )
    return "txt"


def read_conll(file) -> Rows:
    """The sentences of a CoNLL file, each with the lists `tokens`, of the first column, and `tags`, of the last one.
    Columns are separated by tabs or, in lines without any, by spaces; sentences are separated by blank lines."""
    with open_text(file) as text:
        for is_blank, lines in groupby(enumerate(text, 1), lambda each: each[1].isspace()):
            words = [(number, split_columns(line)) for number, line in lines if not line.startswith("-DOCSTART-")]
            if is_blank or not words:
                continue
            if single := [number for number, columns in words if len(columns) == 1]:
                yield (words[0][0], f"line {single[0]} has one column; expected a word and its tag")
            else:
                tokens, tags = ([columns[i] for _, columns in words] for i in (0, -1))
                yield words[0][0], {"tokens": tokens, "tags": tags}


def split_columns(line: str) -> list[str]:
    return [part for part in line.strip(" \t\n").split("\t" if "\t" in line else " ") if part]


# ----------------------------------------------------------------------------------------------------------------- JSON


def read_json_lines(file) -> Rows:
    """Rows of JSON lines."""
    expected = "expected an object on each line"
    for line, row in read_text(file):
        if row is None:
            continue
        try:
            value = json.loads(row["text"])
        except (ValueError, RecursionError) as error:
            # Not its line, which counts from the beginning of this one.
            problem = f"{error.msg} at character {error.pos + 1}" if isinstance(error, json.JSONDecodeError) else error
            yield line, f"not valid JSON ({problem}); {expected}"
        else:
            yield line, value if isinstance(value, dict) else f"a JSON {type(value).__name__}; {expected}"


def read_json(file) -> Rows:
    """Rows of a JSON array or, if the file begins otherwise, of JSON lines.

    Raises:
        ValueError: it is an array and not valid, or too long to be read at once.
    """
    with open_text(file) as text:
        start = ""
        while not start.strip() and (character := text.read(1)):
            start += character
        if not start.endswith("["):
            yield from read_json_lines(file)
            return
        content = start + text.read(LONGEST_ARRAY)
        if text.read(1):
            raise ValueError(
                f"{file} is a JSON array of more than {LONGEST_ARRAY:,} characters; expected JSON lines "
                "(.jsonl), which are not read at once"
            )
    try:
        rows = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is not valid JSON ({error}); expected an array of objects") from None
    for row in rows:
        yield None, row if isinstance(row, dict) else f"a JSON {type(row).__name__}; expected an array of objects"


# -------------------------------------------------------------------------------------------------------------- Parquet


@contextmanager
def open_parquet(file):
    """Opens a `ParquetFile`. Sets the `features` of the file, if `datasets` stored them.

    Raises:
        OSError, ValueError: it cannot be read.
    """
    from pyarrow import parquet

    with open_binary(file) as binary, errors_about(file):
        source = io.BytesIO(binary.read()) if file.compression else binary  # the last bytes are read first
        with parquet.ParquetFile(source, pre_buffer=False, buffer_size=2**20) as table:
            if b"huggingface" in (table.schema_arrow.metadata or {}):
                from datasets import Features

                file.features = Features.from_arrow_schema(table.schema_arrow)
            yield table


def read_parquet(file) -> Rows:
    """Rows of a Parquet file, a few in memory at a time.

    Raises:
        OSError, ValueError: it cannot be read.
    """
    with open_parquet(file) as table:
        chosen = [name for name in table.schema_arrow.names if file.columns is None or name in file.columns]
        for batch in table.iter_batches(PARQUET_ROWS, columns=chosen):
            yield from ((None, row) for row in batch.to_pylist())


def parquet_types(file) -> dict:
    """The types of the columns of a Parquet file; see `types_of`."""
    with open_parquet(file) as table:
        return types_of(table.schema_arrow, file.features)


def types_of(schema, features: Mapping) -> dict:
    """The Arrow types of the columns of a schema, those of texts for labels, which `name_labels` names."""
    from pyarrow import list_, string

    def as_text(kind):
        return list_(as_text(kind.value_type)) if hasattr(kind, "value_type") else string()

    return {each.name: as_text(each.type) if label_names(features.get(each.name)) else each.type for each in schema}


def name_labels(row: dict, features: Mapping) -> dict:
    """The row with the names of its labels instead of their numbers; None for -1, no label."""
    return {column: name_label(label_names(features.get(column)), value) for column, value in row.items()}


def name_label(names: list[str] | None, value):
    """The name of a label that is stored as a number, also in lists; any other value as it is."""
    if names is None or value is None:
        return value
    if isinstance(value, list):
        return [name_label(names, each) for each in value]
    return names[value] if value >= 0 else None


def label_names(feature) -> list[str] | None:
    """The names of a `datasets.ClassLabel`, also in lists, in its order; None for other features."""
    while hasattr(feature, "feature"):
        feature = feature.feature
    return getattr(feature, "names", None)


READERS = {
    ".csv": partial(read_table, delimiter=",", quoting=csv.QUOTE_MINIMAL),
    ".tsv": partial(read_table, delimiter="\t", quoting=csv.QUOTE_NONE),
    ".jsonl": read_json_lines,
    ".ndjson": read_json_lines,
    ".json": read_json,
    ".parquet": read_parquet,
    ".txt": read_text,
    ".conll": read_conll,
}
