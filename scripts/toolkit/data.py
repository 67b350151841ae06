"""Reading data: rows of files and of datasets on the Hub, their columns and labels, and a validation split.

Tables are read by Python's `csv` in strict mode, as text. pyarrow opens compressed files and Parquet. A row that cannot
be used is named by its file, its number and its line.
"""

import codecs
import csv
import io
import json
import math
import os
import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby, islice
from typing import Any, TextIO

import fsspec
import numpy as np
import pyarrow as pa

from toolkit.common import first_of
from toolkit.tasks.arguments import NUMBER

COMPRESSIONS = (".gz", ".zst", ".bz2")
DELIMITERS = ";\t|,"

# The longest field of a table, in characters. Python's default, 131,072, is less than a long article; without a limit,
# an unclosed quotation mark would read the rest of the file into memory.
LONGEST_FIELD = 2**24

# A field of a table that is in quotation marks as a whole; those in it are doubled.
QUOTED_FIELD = re.compile(r'"((?:[^"]|"")*)"')

# The columns of a file are those of its first rows, because rows of JSON may lack some.
ROWS_WITH_COLUMNS = 100

LISTED_ROWS = 5  # in the report on skipped rows
LISTED_LABELS = 20

MISSING_VALUES = {"", "na", "n/a", "nan", "none", "null"}
INVISIBLE = re.compile("[\u200b-\u200f\u2060\ufeff]")


@dataclass
class Row:
    """A row of a file or dataset. `content` has its columns, or is the reason why the row cannot be read."""

    file: str
    number: int
    line: int | None
    content: dict | str

    @property
    def place(self) -> str:
        return f"{self.file}, row {self.number}" + (f" (line {self.line})" if self.line else "")


# What a reader of a file yields: the line where a row starts, and its columns or why it cannot be read.
Contents = Iterator[tuple[int | None, dict | str]]


# --------------------------------------------------------------------------------------------------------------- files


@dataclass
class File:
    """A local file or one that fsspec opens.

    Args:
        name: in messages.
        delimiter: of a table. With it, .txt is a table.
        txt_format: of .txt otherwise: ".txt", a text on each line, or ".conll".
    """

    system: Any
    path: str
    name: str
    encoding: str
    delimiter: str | None
    txt_format: str

    @property
    def format(self) -> str:
        name = self.path.lower()
        for compression in COMPRESSIONS:
            name = name.removesuffix(compression)
        ending = os.path.splitext(name)[1]
        if ending == ".txt":
            return ".tsv" if self.delimiter else self.txt_format
        return ending

    @contextmanager
    def open(self) -> Iterator[pa.NativeFile]:
        """The decompressed bytes. An error of reading becomes an OSError with the file's name."""
        try:
            with self.system.open(self.path, "rb") as binary:
                path = self.path.lower()
                compression = pa.Codec.detect(path).name if path.endswith(COMPRESSIONS) else None
                yield pa.input_stream(binary, compression)
        except (OSError, EOFError, UnicodeDecodeError, pa.ArrowInvalid) as error:
            raise OSError(f"{self.name} cannot be read: {error}; expected a complete file.") from error

    @contextmanager
    def open_text(self) -> Iterator[TextIO]:
        """The text. Bytes that are not UTF-8 become surrogates, which `fault_of` finds in their row."""
        try:
            is_utf8 = codecs.lookup(self.encoding).name in ("utf-8", "utf-8-sig")
        except LookupError as error:
            raise ValueError(f"--encoding is {self.encoding}; expected one of Python's, such as cp1252.") from error
        with self.open() as binary:
            if is_utf8 and binary.read(2) in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
                raise ValueError(f"{self.name} is encoded as UTF-16; expected UTF-8. Pass --encoding utf-16.")
        encoding, errors = ("utf-8-sig", "surrogateescape") if is_utf8 else (self.encoding, "strict")
        with self.open() as binary, io.TextIOWrapper(binary, encoding=encoding, errors=errors, newline="") as text:
            try:
                yield text
            except UnicodeError as error:
                raise ValueError(f"{self.name} is not {self.encoding}: {error}; pass its --encoding.") from error


def open_files(
    patterns: Iterable[str], flag: str, encoding="utf-8", delimiter: str | None = None, txt_format=".txt"
) -> list[File]:
    """The files of paths, URLs, folders and patterns such as `data/*.csv`.

    Args:
        flag: the argument that names them, for messages.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the format of a file is unknown.
    """
    files = []
    for pattern in patterns:
        system, path = fsspec.core.url_to_fs(pattern)
        if system.isfile(path):
            paths, names = [path], [pattern]
        else:
            is_folder = system.isdir(path)
            paths = sorted(filter(system.isfile, system.find(path) if is_folder else system.glob(path)))
            # As in a shell, a pattern matches no hidden file.
            is_wanted = is_data if is_folder else (lambda each: not os.path.basename(each).startswith("."))
            paths = [each for each in paths if is_wanted(each.removeprefix(path))]
            names = [os.path.relpath(each) if "file" in system.protocol else each for each in paths]
        if not paths:
            raise FileNotFoundError(f"{flag} {pattern} matches no file; expected a file, a folder or a pattern.")
        for each, name in zip(paths, names, strict=True):
            files.append(file := File(system, each, name, encoding, delimiter, txt_format))
            if file.format not in READERS:
                expected = f"{', '.join(READERS)}, also with {', '.join(COMPRESSIONS)}"
                raise ValueError(f"{flag} {name} has an unknown format {file.format!r}; expected {expected}.")
    return files


def is_data(path: str) -> bool:
    """Whether a file of a folder is data, by its path in it: no README, and not hidden or in a hidden folder."""
    parts = path.lower().strip("/").split("/")
    endings = tuple(ending + compression for ending in READERS for compression in ("", *COMPRESSIONS))
    return parts[-1].endswith(endings) and not any(part.startswith((".", "_")) for part in parts)


# ------------------------------------------------------------------------------------------------------------- formats


def read_table(file: File) -> Contents:
    """The rows of a table with a header. In .tsv, quotation marks are text except around a whole field, because files
    of benchmarks have unpaired ones."""
    csv.field_size_limit(LONGEST_FIELD)
    is_tsv = file.format == ".tsv"
    quoting = csv.QUOTE_NONE if is_tsv else csv.QUOTE_MINIMAL
    delimiter = (file.delimiter or ("\t" if is_tsv else ",")).replace("\\t", "\t")
    with file.open_text() as text:
        reader = csv.reader(text, delimiter=delimiter, quoting=quoting, strict=True)
        records = read_records(reader)
        _, header = next(records, (None, "the file is empty"))
        if isinstance(header, str):
            raise ValueError(f"{file.name} has no header: {header}; expected the names of the columns.")
        header = [name.strip() for name in header]
        if twice := [name for name, count in Counter(header).items() if count > 1]:
            raise ValueError(f"{file.name} has the column {twice[0]!r} twice; expected different names.")
        for line, record in records:
            if isinstance(record, list) and len(record) != len(header):
                record = f"the row has {len(record)} fields; expected {len(header)}, as in the header"
            yield line, record if isinstance(record, str) else dict(zip(header, record, strict=True))


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


def read_lines(file: File) -> Contents:
    """A text on each line. Skips blank lines."""
    with file.open_text() as text:
        for number, line in enumerate(text, 1):
            if not line.isspace():
                yield number, {"text": line.rstrip("\r\n")}


def read_conll(file: File) -> Contents:
    """The sentences of a CoNLL file: `tokens` is its first column, `tags` its last."""
    with file.open_text() as text:
        for is_blank, numbered in groupby(enumerate(text, 1), lambda each: each[1].isspace()):
            lines = [(number, line) for number, line in numbered if not line.startswith("-DOCSTART-")]
            if is_blank or not lines:
                continue
            words = [[part for part in line.strip().split("\t" if "\t" in line else " ") if part] for _, line in lines]
            if short := [number for (number, _), word in zip(lines, words, strict=True) if len(word) < 2]:
                yield lines[0][0], f"line {short[0]} has one column; expected a word and its tag"
            else:
                yield lines[0][0], {"tokens": [word[0] for word in words], "tags": [word[-1] for word in words]}


def read_json_lines(file: File) -> Contents:
    for number, row in read_lines(file):
        try:
            value = json.loads(row["text"])
        except (ValueError, RecursionError) as error:
            yield number, f"the line is not JSON ({error}); expected an object on each line"
        else:
            yield number, value if isinstance(value, dict) else "the line is no JSON object"


def read_json(file: File) -> Contents:
    """The rows of a JSON array, of `{"data": [...]}`, of SQuAD's nested form, or of JSON lines."""
    with file.open_text() as text:
        try:
            content = json.load(text)
        except (ValueError, RecursionError):
            content = None
    if isinstance(content, dict) and isinstance(content.get("data"), list):
        content = content["data"]
    if not isinstance(content, list):
        yield from read_json_lines(file)
        return
    for value in content:
        if isinstance(value, dict) and "paragraphs" in value:
            yield from squad_questions(value)
        else:
            yield None, value if isinstance(value, dict) else "the entry is no JSON object"


def squad_questions(article: dict) -> Contents:
    try:
        for paragraph in article["paragraphs"]:
            for question in paragraph["qas"]:
                yield None, {**question, "context": paragraph["context"]}
    except (KeyError, TypeError) as error:
        yield None, f"the article is not in SQuAD's form ({error!r}); expected paragraphs with context and qas"


def read_parquet(file: File) -> Contents:
    from pyarrow import parquet

    with file.open() as binary:
        source = binary if binary.seekable() else pa.BufferReader(binary.read())
        with parquet.ParquetFile(source) as table:
            features = {}
            if b"huggingface" in (table.schema_arrow.metadata or {}):
                from datasets import Features

                features = Features.from_arrow_schema(table.schema_arrow)
            for batch in table.iter_batches(1000):
                for row in batch.to_pylist():
                    yield None, {name: named_label(features.get(name), value) for name, value in row.items()}


def named_label(feature, value):
    """The name of a label that `datasets` stores as a number, also in lists. -1 is no label."""
    while hasattr(feature, "feature"):
        feature = feature.feature
    if isinstance(value, list):
        return [named_label(feature, each) for each in value]
    if value is None or getattr(feature, "names", None) is None:
        return value
    return feature.names[value] if value >= 0 else None


READERS: dict[str, Callable[[File], Contents]] = {
    ".csv": read_table,
    ".tsv": read_table,
    ".txt": read_lines,
    ".json": read_json,
    ".jsonl": read_json_lines,
    ".ndjson": read_json_lines,
    ".parquet": read_parquet,
    ".conll": read_conll,
}


# ---------------------------------------------------------------------------------------------------------------- rows


@dataclass
class Source:
    """The rows of files, or of a split of a dataset on the Hub or in a folder.

    Args:
        flag: the argument that names the data, for messages.
        limit: use only the first valid rows.
    """

    flag: str
    files: list[File]
    dataset: tuple[str, str | None, str] | None = None  # name, configuration, split
    limit: int | None = None

    def __str__(self) -> str:
        return " ".join(filter(None, self.dataset or ())) or ", ".join(file.name for file in self.files)

    def rows(self) -> Iterator[Row]:
        """All rows, one at a time. A row with text that is not UTF-8 cannot be read."""
        for name, contents in self.contents():
            number = 0
            for number, (line, content) in enumerate(contents, 1):
                yield Row(name, number, line, content if isinstance(content, str) else fault_of(content) or content)
            if number == 0:
                raise ValueError(f"{self.flag} {name} has no rows; expected at least one.")

    def contents(self) -> Iterator[tuple[str, Contents]]:
        for file in self.files:
            yield file.name, READERS[file.format](file)
        if self.dataset is not None:
            yield str(self), self.dataset_contents(*self.dataset)

    def dataset_contents(self, name: str, config: str | None, split: str) -> Contents:
        from datasets import load_dataset

        try:
            table = load_dataset(name, config, split=split)
        except Exception as error:  # builders raise any type
            raise OSError(f"{self.flag} {name} cannot be read: {error}") from error
        for row in table:
            yield None, {column: named_label(table.features[column], value) for column, value in row.items()}

    def columns(self) -> list[str]:
        return columns_of(self.rows())

    def valid_rows(
        self, read: Callable[[dict], dict], on_bad_row: str, report: Callable[[str], None]
    ) -> Iterator[dict]:
        """What `read` makes of each row, with `place`, for the first `limit` valid rows.

        Args:
            read: returns the fields of a row, or raises ValueError.
            on_bad_row: "stop" raises at the first row that cannot be used; "skip" reports how many there are, and the
                first of them, at the end.

        Raises:
            OSError, ValueError: the data cannot be read, a row cannot be used, or none can.
        """
        used, bad = 0, []
        for row in self.rows():
            try:
                fields = read(usable(row.content))
            except ValueError as error:
                if on_bad_row == "stop":
                    raise ValueError(f"{row.place}: {error}") from None
                bad.append(f"{row.place}: {error}")
                continue
            yield {**fields, "place": row.place}
            used += 1
            if used == self.limit:
                break
        if bad:
            report(skipped_rows(bad, used + len(bad)))


def columns_of(rows: Iterator[Row]) -> list[str]:
    """The columns of the first rows. Those of a nested object are named as in `annotation.label`."""
    first = list(islice(rows, ROWS_WITH_COLUMNS))
    found = dict.fromkeys(name for row in first if isinstance(row.content, dict) for name in flat_names(row.content))
    if not found:
        raise ValueError(f"{first[0].place}: {first[0].content}")
    return list(found)


def skipped_rows(problems: list[str], total: int) -> str:
    """A report on rows that are skipped. Raises ValueError if all are."""
    if len(problems) == total:
        raise ValueError(f"no row can be used; the first is {problems[0]}")
    first = f"{len(problems)} of {total} rows cannot be used and are skipped:"
    return "\n  ".join([first, *first_of(problems, LISTED_ROWS)])


def usable(content: dict | str) -> dict:
    """The columns of a row. Raises ValueError if it cannot be read."""
    if isinstance(content, str):
        raise ValueError(content)
    return content


def fault_of(content: dict) -> str | None:
    """Which column has text that cannot be saved as UTF-8; None if none has."""
    for column, value in content.items():
        try:
            json.dumps([column, value], ensure_ascii=False, default=str).encode()
        except UnicodeEncodeError:
            return f"{column!r} is not UTF-8; pass the --encoding of the file, such as cp1252"
    return None


# ------------------------------------------------------------------------------------------------------------- columns


def flat_names(content: dict, prefix: str = "") -> Iterator[str]:
    for name, value in content.items():
        yield prefix + name
        if isinstance(value, dict):
            yield from flat_names(value, f"{prefix}{name}.")


def value_of(content: dict, column: str):
    """The value of a column. `annotation.label` is a value of a nested object.

    Raises:
        ValueError: the row lacks it.
    """
    if column in content:
        return content[column]
    value: Any = content
    for part in column.split("."):
        if not isinstance(value, dict) or part not in value:
            raise ValueError(f"the column {column!r} is missing")
        value = value[part]
    return value


def find_column(columns: Sequence[str], flag: str, named: str | None, usual: Sequence[str]) -> str:
    """The column that `flag` names, or else the first usual one, in this spelling or with other capitals.

    Raises:
        ValueError: there is none, or several differ in capitals only.
    """
    for name in usual if named is None else [named]:
        if name in columns:
            return name
        if len(matches := [column for column in columns if column.strip().lower() == name.lower()]) == 1:
            return matches[0]
    existing = ", ".join(map(repr, columns)) or "none"
    if len(columns) == 1 and (found := [each for each in DELIMITERS if each in columns[0]]):
        raise ValueError(f"the only column is {existing}; pass --delimiter {found[0]!r} if it separates columns.")
    missing = " or ".join(map(repr, usual if named is None else [named]))
    raise ValueError(f"{flag}: there is no column {missing}; the columns are {existing}. Pass the name of one.")


class EmptyText(ValueError):  # noqa: N818
    """A text is null or blank."""


def text_of(content: dict, column: str) -> str:
    """The text of a column. Raises EmptyText if it is blank, and ValueError if it is missing or no text."""
    value = value_of(content, column)
    if value is None or (isinstance(value, str) and not value.strip()):
        raise EmptyText(f"{column!r} is empty; expected a text")
    if not isinstance(value, str):
        raise ValueError(f"{column!r} is {value!r}; expected a text")
    return value


# -------------------------------------------------------------------------------------------------------------- labels


def label_of(value) -> str:
    """A label as it is written in the file, by one rule for all formats: 1 is "1", 1.0 is "1.0", true is "true".

    Raises:
        ValueError: it is missing, or neither text, number nor boolean.
    """
    if isinstance(value, str):
        value = value.strip()
    if value in (None, "") or value != value:  # NaN
        raise ValueError("the label is empty; expected one")
    if not isinstance(value, str | int | float):
        raise ValueError(f"the label is {value!r}; expected a text or a number")
    return value if isinstance(value, str) else json.dumps(value)


def number_of(value) -> float:
    """A number, in JSON or as text. Raises ValueError if it is none, or not finite."""
    if isinstance(value, str):
        text = value.strip()
        if re.fullmatch(r"[+-]?\d+,\d+", text):
            raise ValueError(f"the number {text!r} has a decimal comma; expected a point")
        value = float(text) if NUMBER.fullmatch(text) else text
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"the label is {value!r}; expected a finite number")
    return float(value)


def canonical(label: str) -> object:
    """The same for spellings of one value: numbers, booleans, missing values, capitals, spaces, accents."""
    text = INVISIBLE.sub("", unicodedata.normalize("NFKC", label))
    text = " ".join(text.casefold().split())
    if text in MISSING_VALUES:
        return None
    return float(text) if NUMBER.fullmatch(text) else {"true": 1.0, "false": 0.0}.get(text, text)


def label_warnings(counts: Counter[str]) -> list[str]:
    """A warning for each group of labels that look like spellings of one value, and for missing values."""
    groups = defaultdict(list)
    for label in counts:
        groups[canonical(label)].append(label)
    warnings = [
        f"{' and '.join(f'{label!r} ({counts[label]} rows)' for label in labels)} look like one label; "
        "they are trained as different ones."
        for value, labels in groups.items()
        if len(labels) > 1 and value is not None
    ]
    if missing := groups.get(None):
        warnings.append(f"{' and '.join(map(repr, missing))} look like missing values; they are trained as labels.")
    return warnings


def label_summary(counts: Counter[str]) -> str:
    """The labels with how often each occurs, the most frequent first."""
    shown = [f"{label} ({count:,})" for label, count in counts.most_common()]
    return f"{len(counts)} labels: {', '.join(first_of(shown, LISTED_LABELS))}"


def sorted_labels(labels: Iterable[str]) -> list[str]:
    """Numbers by their value, then texts."""
    return sorted(labels, key=lambda label: (float(label) if NUMBER.fullmatch(label) else math.inf, label))


# ---------------------------------------------------------------------------------------------------- validation split


def hold_out(
    keys: Sequence[Sequence[object]], strata: Sequence[object], fraction: float, seed: int
) -> tuple[list[int], list[int]]:
    """The rows to train on and the rows to validate on. Rows that share a key are on one side.

    Args:
        keys: of each row, such as its text and its group.
        strata: of each row, such as its label: each has about the same share of rows held out, and keeps one.

    Raises:
        ValueError: nothing is held out.
    """
    random = np.random.default_rng(seed)
    groups = connected(keys)
    by_stratum = defaultdict(list)
    for group in groups:
        by_stratum[strata[group[0]]].append(group)
    held_out, wanted = [], 0.0
    for stratum in by_stratum.values():
        # What one label has too few rows for is left to the next one.
        wanted += fraction * sum(map(len, stratum))
        for i in random.permutation(len(stratum))[1:]:
            if len(held_out) + len(stratum[i]) / 2 <= wanted:
                held_out += stratum[i]
    if not held_out:
        raise ValueError(
            f"--validation_fraction is {fraction}, which holds out none of {len(keys)} rows in {len(groups)} groups; "
            "expected one or more."
        )
    return sorted(set(range(len(keys))) - set(held_out)), sorted(held_out)


def connected(keys: Sequence[Sequence[object]]) -> list[list[int]]:
    """The numbers of rows in groups: rows that share a key are in one."""
    from networkx.utils import UnionFind  # it takes a moment

    parts = UnionFind()  # of numbers of rows and their keys
    for row, own in enumerate(keys):
        parts.union(row, *enumerate(own))
    return [sorted(each for each in part if isinstance(each, int)) for part in parts.to_sets()]
