"""Where rows come from: files of this machine or of a URL, standard input, and datasets of the Hub. They are read from
the beginning to the end, and each row has a place, by which errors name it."""

import glob
import hashlib
import os
import re
import sys
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, islice
from pathlib import Path
from types import MappingProxyType
from typing import BinaryIO

import fsspec

from toolkit.row_files import READERS, Rows, errors_about, find_fault, label_names, name_labels

Readers = Mapping[str, Callable[..., Rows]]
Check = Callable[[dict], dict]
Warn = Callable[[str], None]

# Rows of JSON may lack columns: those of this many rows at the beginning are the columns of the file.
ROWS_WITH_ALL_COLUMNS = 100

# The number of rows that the report on skipped rows lists.
LISTED_ROWS = 5

# Of each end of a file, for its fingerprint: the header or the schema, and the first and the last rows.
FINGERPRINT_BYTES = 2**16


@dataclass
class Row:
    """A row of an input.

    Attributes:
        file: the name of the input.
        number: from 1, in its input, without the header and empty lines.
        line: the line in which it starts, or other words for where it starts; None: it has none.
        content: its columns; or, as a string, what is wrong with it.
    """

    file: str
    number: int
    line: int | str | None
    content: dict | str

    @property
    def place(self) -> str:
        """Such as "reviews.csv, row 3 (line 4)"."""
        start = f"line {self.line}" if isinstance(self.line, int) else self.line
        return f"{self.file}, row {self.number}" + ("" if start is None else f" ({start})")


class Input(ABC):
    """A source of rows. Its text is its name in messages about all of it.

    Attributes:
        name: in places and results.
        identity: the same for the same rows, however they are named.
        size: in bytes; 0 if it is not known.
        is_compressed, delimiter: for the readers of files; see `InputFile`.
        columns: those to read of Parquet, of which the file may lack some; None: all.
        features: the columns of `datasets`, by name, once a row has been read; empty if there are none.
    """

    name: str
    identity: object = None
    size, is_compressed, delimiter = 0, False, None
    columns: set[str] | None = None
    features: Mapping = MappingProxyType({})

    def __str__(self):
        return self.name

    def rows(self) -> Iterator[Row]:
        """All rows, with the names of labels instead of their numbers. One with text that cannot be saved cannot be
        used.

        Raises:
            OSError, ValueError: the input cannot be read.
        """
        for number, (line, content) in enumerate(self.contents(), 1):
            if isinstance(content, dict):
                content = find_fault(content) or name_labels(content, self.features)
            yield Row(self.name, number, line, content)

    @abstractmethod
    def contents(self) -> Rows:
        """What a reader of `row_files` yields."""

    def share(self) -> float | None:
        """How much has been read, from 0 to 1; None if that is not known."""
        return None

    def fingerprint(self) -> dict:
        """Its name, and what changes with its content."""
        return {"file": self.name}


class InputFile(Input):
    """A file of this machine or one that fsspec reaches.

    Args:
        name: in places; None: the URL.
        delimiter: of .csv, .tsv and .txt, which is a table then; None: comma, tab, and .txt has a text on each line.
        readers: of endings that are read in another way than by `READERS`.

    Raises:
        OSError: there is no such file.
        ValueError: its ending or the delimiter is invalid.
    """

    binary: BinaryIO | None = None

    def __init__(self, url: str, name: str | None = None, delimiter: str | None = None, readers: Readers | None = None):
        self.url, self.name, self.delimiter = url, name or url, delimiter and delimiter.replace("\\t", "\t")
        if delimiter is not None and (len(self.delimiter) != 1 or self.delimiter in '"\r\n'):
            raise ValueError(f"--delimiter is {delimiter!r}; expected one character, or \\t for a tab")
        path = Path(url.lower())
        self.is_compressed = path.suffix == ".gz"
        ending = (path.with_suffix("") if self.is_compressed else path).suffix
        if ending not in READERS:
            raise ValueError(f"{url} has the unknown ending {ending!r}; expected {', '.join(READERS)}, or with .gz")
        is_table = ending == ".txt" and delimiter is not None
        self.reader = READERS[".tsv"] if is_table else {**READERS, **(readers or {})}[ending]
        self.system, self.path = fsspec.core.url_to_fs(url)
        if not self.system.isfile(self.path):
            raise FileNotFoundError(f"{url}: there is no such file")
        self.info = self.system.info(self.path)
        self.size, self.identity = self.info.get("size") or 0, os.path.realpath(self.path)

    def __str__(self):
        return self.url

    def open(self) -> BinaryIO:
        self.binary = self.system.open(self.path, "rb")
        return self.binary

    def contents(self):
        return self.reader(self)

    def share(self):
        if self.binary is None or self.binary.closed:  # not yet opened, or read
            return float(self.binary is not None)
        return self.binary.tell() / max(self.size, 1)

    def fingerprint(self):
        ends = self.system.head(self.path, FINGERPRINT_BYTES) + self.system.tail(self.path, FINGERPRINT_BYTES)
        names = ("mtime", "LastModified", "last_modified", "ETag", "etag")
        return {
            "file": self.url,
            "size": self.size,
            "modified": str(next(filter(None, map(self.info.get, names)), None)),
            "sha256_of_ends": hashlib.sha256(ends).hexdigest(),
            **({"delimiter": self.delimiter} if self.delimiter else {}),
        }


class StandardInput(Input):
    """Standard input: JSON lines if it begins with an opening brace, else a text on each line."""

    name = "-"

    def __str__(self):
        return "standard input"

    def open(self) -> BinaryIO:
        if sys.stdin is None:
            raise OSError("there is no standard input")
        return sys.stdin.buffer

    def contents(self):
        start = self.open().peek().lstrip(b"\xef\xbb\xbf \t\r\n")
        return READERS[".jsonl" if start.startswith(b"{") else ".txt"](self)


class HubDataset(Input):
    """A split of a dataset of the Hub, or of a folder that `datasets.load_dataset` opens.

    Args:
        split: such as `train` or `train[:1000]`.
        streaming: read it without a copy on the disk; not supported for a part of a split, of which there is a copy.
        name: in places; None: the dataset and the split.
    """

    def __init__(self, dataset: str, split: str, config: str | None = None, streaming=False, name: str | None = None):
        self.dataset, self.split, self.config = self.identity = dataset, split, config
        self.streaming = streaming and re.fullmatch(r"[\w.-]+", split) is not None
        self.name = name or f"{dataset} ({split})"

    @cached_property
    def table(self):
        """The split, a `Dataset` or an `IterableDataset`. Raises OSError or ValueError if it cannot be read."""
        from datasets import load_dataset

        with errors_about(self):
            try:
                return load_dataset(self.dataset, self.config, split=self.split, streaming=self.streaming)
            except ConnectionError:
                raise OSError(
                    "it is not a folder, and the Hub cannot be reached; expected one of them, or files"
                ) from None

    def contents(self):
        self.features = self.table.features or {}
        with errors_about(self):
            yield from ((None, row) for row in self.table)

    def fingerprint(self):
        return {"file": self.name, "commit": content_hash([self])}


def content_hash(inputs: Sequence[Input]) -> str:
    """A hash of files, which are read once, or of those in the folder of a dataset; or the commit of a dataset on the
    Hub.

    Raises:
        OSError: a file cannot be read, or the Hub cannot be reached.
    """
    from huggingface_hub import HfApi

    if isinstance(first := inputs[0], HubDataset):
        paths = sorted(path for path in Path(first.dataset).rglob("*") if path.is_file())
        if not paths:
            return HfApi().dataset_info(first.dataset).sha
    else:
        paths = [each.path for each in inputs]
    digest = hashlib.sha256()
    for path in paths:
        with open(path, "rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


# ------------------------------------------------------------------------------------------------------- several inputs


@dataclass
class Source:
    """Rows of inputs, one after the other.

    Args:
        max_rows: only the first so many valid rows are used, and nothing after them is read; None: all.
    """

    inputs: Sequence[Input]
    max_rows: int | None = None

    def __str__(self):
        return ", ".join(map(str, self.inputs))

    def rows(self) -> Iterator[Row]:
        """All rows, whatever `max_rows` is, one at a time.

        Raises:
            OSError: an input cannot be read.
            ValueError: an input has no rows, or its header or its format is broken.
        """
        for each in self.inputs:
            row = None
            for row in each.rows():
                yield row
            if row is None:
                self.report_empty(each)

    def report_empty(self, one: Input) -> None:
        raise ValueError(f"{one} has no rows")

    def columns(self) -> list[str]:
        """The columns of the first rows; see `columns_of`."""
        return columns_of(self.rows, self.max_rows)

    def label_names(self, column: str) -> list[str]:
        """The names of the labels in a column, in the order of the dataset; none if the dataset has no names, or no row
        has been read."""
        found = (label_names(each.features.get(column)) or [] for each in self.inputs)
        return list(dict.fromkeys(chain.from_iterable(found)))

    def valid_rows(self, check: Check, on_bad_row: str, warn: Warn, may_be_empty: bool = False) -> Iterator[dict]:
        """The columns of each row that `check` keeps, and its place, of the first `max_rows` valid rows.

        Args:
            check: returns the columns to keep of a row, or raises ValueError.
            on_bad_row: "stop" at the first invalid row; or "skip" invalid rows, and report their number and the first
                ones at the end.
            warn: is called with this report.
            may_be_empty: all rows may be invalid.

        Raises:
            ValueError: a row is invalid, with "stop"; or no row is valid.
        """
        total, bad, first_bad = 0, 0, []
        try:
            for total, row in enumerate(self.rows(), 1):
                try:
                    if isinstance(row.content, str):
                        raise ValueError(row.content)
                    kept = {**check(row.content), "place": row.place}
                except ValueError as error:
                    problem = f"{row.place}: {error}"
                    if on_bad_row == "stop":
                        raise ValueError(problem) from None
                    bad += 1
                    first_bad += [problem] if bad <= LISTED_ROWS else []
                else:
                    yield kept
                    if total - bad == self.max_rows:
                        break
        finally:  # also if reading is stopped
            if bad and (may_be_empty or bad < total):
                more = [f"and {bad - LISTED_ROWS} more"] if bad > LISTED_ROWS else []
                warn("\n  ".join([f"{bad} of {total} rows are invalid and were skipped:", *first_bad, *more]))
        if bad == total and not may_be_empty:
            raise ValueError(f"all {total} rows are invalid; the first is {first_bad[0]}")


def columns_of(rows: Callable[[], Iterable[Row]], usable: int | None = None) -> list[str]:
    """The columns of the first 100 rows, or of the first `usable` of them that can be read, in the order in which they
    occur. Raises ValueError if there are none, and the first row cannot be read."""
    readable = (row.content for row in islice(rows(), ROWS_WITH_ALL_COLUMNS) if isinstance(row.content, dict))
    columns = list(dict.fromkeys(chain.from_iterable(islice(readable, usable))))
    if not columns and isinstance((first := next(iter(rows()))).content, str):
        raise ValueError(f"{first.place}: {first.content}")
    return columns


def open_files(given: Iterable[str | Path], **options) -> list[InputFile]:
    """The files, patterns replaced by those that match them. Their names in places do not have the folder, unless
    several have the same name.

    Args:
        options: of `InputFile`.

    Raises:
        OSError: a file is missing, or a pattern matches none.
        ValueError: a file has an unknown ending, or the delimiter is invalid.
    """
    urls = [url for each in given for url in expand(str(each))]
    names = Counter(Path(url).name for url in urls)
    return [InputFile(url, name if names[name := Path(url).name] == 1 else None, **options) for url in urls]


def expand(url: str) -> list[str]:
    """The files that a pattern matches, sorted; of a path or a URL that is no pattern, itself.

    Raises:
        FileNotFoundError: the pattern matches no file.
    """
    url = url.removeprefix("file://")
    path = Path(url)
    if path.is_file() or not glob.has_magic(url) or ("://" in url and "*" not in url):
        return [url]
    if "://" in url:
        system, pattern = fsspec.core.url_to_fs(url)
        found = [system.unstrip_protocol(each) for each in sorted(system.glob(pattern))]
    else:
        # The name of a folder that exists may have brackets.
        folder = next(each for each in path.parents if each.is_dir())
        names = glob.glob(str(path.relative_to(folder)), root_dir=folder, recursive=True)
        found = [str(folder / name) for name in sorted(names) if (folder / name).is_file()]
    if not found:
        raise FileNotFoundError(f"{url} matches no file; expected a file, or a pattern of files that exist")
    return found
