"""Where rows come from: files of this machine or of a URL, standard input, and datasets of the Hub. They are read from
the beginning to the end, and each row has a place, by which errors name it."""

import hashlib
import os
import re
import shutil
import sys
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, islice
from pathlib import Path
from types import MappingProxyType
from typing import BinaryIO

from toolkit import row_files
from toolkit.input_paths import COMPRESSIONS, endings_of, expand, filesystem_of, name_files

# Rows of JSON may lack columns: those of this many rows at the beginning are the columns of the file.
ROWS_WITH_ALL_COLUMNS = 100

# Of each end of a remote file, for its fingerprint: the header or the schema, and the first and the last rows.
FINGERPRINT_BYTES = 2**16


@dataclass
class Row:
    """A row of an input.

    Attributes:
        file: the name of the input.
        number: from 1, in its input, without the header and empty lines; of plain text, the number of the line.
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
        compression, delimiter: for the readers of files; see `InputFile`.
        is_table: whether its values are cells of a table, which are texts.
        columns: those to read of Parquet, of which the file may lack some; None: all.
        features: the columns of `datasets`, by name, once a row has been read; empty if there are none.
    """

    name: str
    identity: object = None
    compression, delimiter, is_table = "", None, False
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
                content = row_files.find_fault(content) or row_files.name_labels(content, self.features)
            if content is not None:
                yield Row(self.name, number, line, content)

    @abstractmethod
    def contents(self) -> row_files.Rows:
        """What a reader of `row_files` yields."""

    def types(self) -> dict | None:
        """The Arrow type of each column; None if the format has no types.

        Raises:
            OSError, ValueError: the input cannot be read.
        """
        return None

    @abstractmethod
    def fingerprint(self) -> dict:
        """Its name, and what changes with its content, which is read for it.

        Raises:
            OSError: the input cannot be read.
        """


class InputFile(Input):
    """A file of this machine or one that fsspec reaches. `name_files` gives it a short name.

    Args:
        delimiter: of .csv, .tsv and .txt, which is a table then; None: comma, tab, and .txt has a text on each line.

    Raises:
        OSError: there is no such file.
        ValueError: its ending or the delimiter is invalid.
    """

    def __init__(self, url: str, delimiter: str | None = None):
        self.url = self.name = url
        ending, self.compression = endings_of(url)
        if ending not in row_files.READERS:
            expected = f"{', '.join(row_files.READERS)}, or with {' or '.join(COMPRESSIONS)}"
            raise ValueError(f"{url} has the unknown ending {ending!r}; expected {expected}")
        self.choose_reader(ending, delimiter)
        self.system, self.path = filesystem_of(url)
        if not (self.system or os.path).isfile(self.path):
            raise FileNotFoundError(f"{url}: there is no such file")
        self.identity = url if self.system else os.path.realpath(url)

    def __str__(self):
        return self.url

    def choose_reader(self, ending: str, delimiter: str | None) -> None:
        """Sets the delimiter and the reader, or raises ValueError if the delimiter is invalid."""
        self.delimiter = delimiter and delimiter.replace("\\t", "\t")
        if delimiter is not None and (len(self.delimiter) != 1 or self.delimiter in '"\r\n'):
            raise ValueError(f"--delimiter is {delimiter!r}; expected one character, or \\t for a tab")
        ending = ".tsv" if ending == ".txt" and delimiter is not None else ending
        self.is_table = ending in (".csv", ".tsv")
        self.reader = row_files.READERS[ending]

    def open(self) -> BinaryIO:
        return self.system.open(self.path, "rb") if self.system else open(self.path, "rb")

    def contents(self):
        return self.reader(self)

    def types(self):
        return row_files.parquet_types(self) if endings_of(self.url)[0] == ".parquet" else None

    def fingerprint(self):
        found = {"file": self.name, **({"delimiter": self.delimiter} if self.delimiter else {})}
        if self.system is None:
            with self.open() as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
                return {**found, "size": file.tell(), "sha256": digest}
        self.system.invalidate_cache()
        info = self.system.info(self.path)
        ends = self.system.head(self.path, FINGERPRINT_BYTES) + self.system.tail(self.path, FINGERPRINT_BYTES)
        names = ("mtime", "LastModified", "last_modified", "ETag", "etag")
        modified = str(next(filter(None, map(info.get, names)), None))
        digest = hashlib.sha256(ends).hexdigest()
        return {**found, "size": info.get("size") or 0, "modified": modified, "sha256_of_ends": digest}


class StandardInput(InputFile):
    """Standard input, copied into a temporary file, so that it can be read again.

    Args:
        format: txt, csv, tsv or jsonl; None: see `guess_format`.
        delimiter: see `InputFile`.

    Raises:
        OSError: there is no standard input, or it cannot be copied.
        ValueError: its format is not known, or the delimiter is invalid.
    """

    url = name = identity = "-"
    system = None

    def __init__(self, format: str | None = None, delimiter: str | None = None):
        if sys.stdin is None or sys.stdin.closed:
            raise OSError("there is no standard input; expected texts or rows from a pipe or a file")
        self.copy = tempfile.NamedTemporaryFile()  # noqa: SIM115 - it is removed with this object
        shutil.copyfileobj(sys.stdin.buffer, self.copy)
        self.copy.flush()
        self.path = self.copy.name
        self.format = format or row_files.guess_format(self, is_table=delimiter is not None)
        self.choose_reader(f".{self.format}", delimiter)

    def __str__(self):
        return "standard input"

    def fingerprint(self):
        return {**super().fingerprint(), "format": self.format}


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

        with row_files.errors_about(self):
            try:
                return load_dataset(self.dataset, self.config, split=self.split, streaming=self.streaming)
            except ConnectionError:
                raise OSError(
                    "it is not a folder, and the Hub cannot be reached; expected one of them, or files"
                ) from None

    def contents(self):
        self.features = self.table.features or {}
        with row_files.errors_about(self):
            yield from ((None, row) for row in self.table)

    def types(self):
        features = self.table.features
        return features and row_files.types_of(features.arrow_schema, features)

    def fingerprint(self):
        return {"file": self.name, "commit": content_hash(self.dataset)}


def content_hash(dataset: str) -> str:
    """A hash of the files in the folder of a dataset, which are read once; or the commit of a dataset on the Hub.

    Raises:
        OSError: a file cannot be read, or the Hub cannot be reached.
    """
    from huggingface_hub import HfApi

    paths = sorted(path for path in Path(dataset).rglob("*") if path.is_file())
    if not paths:
        return HfApi().dataset_info(dataset).sha
    digest = hashlib.sha256()
    for path in paths:
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


# ------------------------------------------------------------------------------------------------------- several inputs


@dataclass
class Source:
    """Rows of inputs, one after the other."""

    inputs: Sequence[Input]

    def __str__(self):
        return ", ".join(map(str, self.inputs))

    def rows(self) -> Iterator[Row]:
        """All rows, one at a time.

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


def columns_of(rows: Callable[[], Iterable[Row]], usable: int | None = None) -> list[str]:
    """The columns of the first 100 rows, or of the first `usable` of them that can be read, in the order in which they
    occur. Raises ValueError if there are none, and the first row cannot be read."""
    readable = (row.content for row in islice(rows(), ROWS_WITH_ALL_COLUMNS) if isinstance(row.content, dict))
    columns = list(dict.fromkeys(chain.from_iterable(islice(readable, usable))))
    if not columns and isinstance((first := next(iter(rows()))).content, str):
        raise ValueError(f"{first.place}: {first.content}")
    return columns


def read_texts(
    path: str | Path, column: str | None, delimiter: str | None = None, max_rows: int | None = None
) -> list[dict]:
    """The `text` and the `place` of each row of a file, or of the first `max_rows`.

    Raises:
        OSError, ValueError: the file cannot be read, or has no such column, or a row without a text.
    """
    source = Source(open_files([path], delimiter=delimiter))
    name = row_files.find_column(columns_of(source.rows, max_rows), column, row_files.TEXTS, "the texts (--column)")
    texts = []
    for row in islice(source.rows(), max_rows):
        if isinstance(row.content, str):
            raise ValueError(f"{row.place}: {row.content}")
        try:
            texts.append({"text": row_files.text_of(row.content, name), "place": row.place})
        except ValueError as error:
            raise ValueError(f"{row.place}: {error}") from None
    return texts


def open_files(given: Iterable[str | Path], **options) -> list[InputFile]:
    """The files, folders and patterns replaced by the files in them; see `expand`.

    Args:
        options: of `InputFile`.

    Raises:
        OSError: a file is missing, or a folder or a pattern has none.
        ValueError: a file has an unknown ending, or the delimiter is invalid.
    """
    files = [InputFile(url, **options) for each in given for url in expand(str(each))]
    name_files(files)
    return files
