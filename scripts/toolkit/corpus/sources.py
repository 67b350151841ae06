"""The rows of the input, in parts: files, standard input and datasets of the Hub, read once from beginning to end."""

import gzip
import hashlib
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import BinaryIO

from toolkit.corpus.store import is_remote
from toolkit.row_files import (
    READERS,
    ROWS_WITH_ALL_COLUMNS,
    ending_of,
    errors_of_gzip,
    expand,
    name_labels,
    read_parquet,
)

STANDARD_INPUT = "-"
HUB = "hub:"
ENDINGS = (*READERS, ".parquet.gz")

# Of each end of a file, for its fingerprint: the header or the schema, and the first and the last rows.
FINGERPRINT_BYTES = 2**16


@dataclass
class Row:
    """A row of the input: its columns, or a text that says why it cannot be read."""

    file: str
    number: int  # from 1, in its file
    line: int | None
    content: dict | str


@dataclass
class Part:
    """Rows of the input, in its order: the unit of work, of writing and of resuming."""

    number: int
    rows: list[Row]


class InputFile:
    """A file of this machine or one that fsspec reaches."""

    def __init__(self, url: str):
        self.url, self.path = url, Path(url.removeprefix("file://"))
        self.suffix, self.share_read, self.rows_read = self.path.suffix, 0.0, 0
        if (ending := ending_of(self.path)) not in ENDINGS:
            raise ValueError(f"{url} has the unknown ending {ending!r}; expected one of {', '.join(ENDINGS)}")
        if not is_remote(url):
            if not self.path.is_file():
                raise FileNotFoundError(f"{url}: there is no such file")
            status = self.path.stat()
            self.size, self.modified = status.st_size, str(status.st_mtime_ns)
            return
        import fsspec

        self.system, self.remote_path = fsspec.core.url_to_fs(url)
        try:
            info = self.system.info(self.remote_path)
        except FileNotFoundError:
            raise FileNotFoundError(f"{url}: there is no such file") from None
        self.size = info.get("size") or 0
        changed = (info.get(name) for name in ("mtime", "LastModified", "last_modified", "ETag", "etag"))
        self.modified = str(next((each for each in changed if each), None))

    def __str__(self):
        return self.url

    def open(self, mode: str) -> BinaryIO:
        self.file = self.system.open(self.remote_path, mode) if is_remote(self.url) else self.path.open(mode)
        return self.file

    def read(self, columns: set[str]) -> Iterator[Row]:
        """The rows, with these columns at least; without any, with all."""
        self.rows_read, self.share_read = 0, 0.0
        for line, content in self.contents(columns):
            self.rows_read += 1
            yield Row(self.url, self.rows_read, line, content)
        self.share_read = 1.0

    def contents(self, columns: set[str]) -> Iterator[tuple[int | None, dict | str]]:
        """What a reader of `toolkit.row_files` yields."""
        ending = ending_of(self.path)
        if not ending.startswith(".parquet"):
            yield from READERS[ending](self)
        elif ending == ".parquet":
            yield from read_parquet(self if is_remote(self.url) else self.path, columns or None)
        else:
            with tempfile.NamedTemporaryFile(suffix=".parquet") as plain:
                with errors_of_gzip(self), self.open("rb") as binary, gzip.open(binary) as content:
                    shutil.copyfileobj(content, plain)
                plain.flush()
                yield from read_parquet(Path(plain.name), columns or None)

    def share(self) -> float | None:
        """How much of the file has been read, from 0 to 1; None if that is not known."""
        if self.share_read or not self.rows_read:
            return self.share_read
        with suppress(AttributeError, ValueError, ZeroDivisionError):  # Parquet, or a file that is closed
            return self.file.tell() / self.size
        return None

    def fingerprint(self) -> dict:
        """Size, modification time, and a hash of both ends of the file."""
        digest = hashlib.sha256()
        with self.open("rb") as file:
            digest.update(file.read(FINGERPRINT_BYTES))
            if self.size > FINGERPRINT_BYTES:
                file.seek(max(self.size - FINGERPRINT_BYTES, 0))
                digest.update(file.read())
        return {"file": self.url, "size": self.size, "modified": self.modified, "sha256_of_ends": digest.hexdigest()}


class StandardInput:
    """Standard input: JSON lines if it begins with an opening brace, else a text on each line."""

    url, size, suffix = STANDARD_INPUT, 0, ""

    def __str__(self):
        return "standard input"

    def open(self, mode: str) -> BinaryIO:
        if sys.stdin is None:
            raise OSError("there is no standard input")
        return sys.stdin.buffer

    def read(self, columns: set[str]) -> Iterator[Row]:
        """The rows."""
        start = self.open("rb").peek().lstrip(b"\xef\xbb\xbf \t\r\n")
        reader = READERS[".jsonl" if start.startswith(b"{") else ".txt"]
        for number, (line, content) in enumerate(reader(self), 1):
            yield Row(self.url, number, line, content)

    def share(self) -> None:
        """Unknown."""

    def fingerprint(self) -> dict:
        """Nothing but the name: standard input cannot be read again."""
        return {"file": self.url}


class HubDataset:
    """A dataset of the Hub, or a folder that `datasets.load_dataset` opens, streamed: `hub:NAME[:SPLIT]`."""

    size = 0

    def __init__(self, url: str):
        self.url = url
        name, _, split = url.removeprefix(HUB).rpartition(":")
        self.name, self.split = (name, split) if name else (split, "train")

    def __str__(self):
        return self.url

    def read(self, columns: set[str]) -> Iterator[Row]:
        """The rows."""
        from toolkit.training.rows import Source, open_hub

        try:
            rows = open_hub(Source(name=self.name, split=self.split), streaming=True)
        except OSError as error:
            if not isinstance(error.__cause__, ConnectionError):
                raise
            raise OSError(f"{self.name} is not a folder, and the Hub cannot be reached; expected one of both") from None
        for number, row in enumerate(rows, 1):
            yield Row(self.url, number, None, name_labels(row, rows.features or {}))

    def share(self) -> None:
        """Unknown."""

    def fingerprint(self) -> dict:
        """The commit of the dataset, or a hash of the folder's files."""
        from toolkit.training.fingerprint import source_fingerprint
        from toolkit.training.rows import Source

        return {"file": self.url, "commit": source_fingerprint(Source(name=self.name, split=self.split))}


Input = InputFile | StandardInput | HubDataset


def open_inputs(given: Sequence[str]) -> list[Input]:
    """The inputs, patterns replaced by the files that match them, sorted.

    Raises:
        OSError: a file is missing, or a pattern matches none.
        ValueError: a file has an unknown ending, or an input is given twice.
    """
    found: list[Input] = []
    for name in given:
        if name == STANDARD_INPUT:
            found.append(StandardInput())
        elif name.startswith(HUB):
            found.append(HubDataset(name))
        else:
            found += [InputFile(each) for each in expand_url(name)]
    names = [each.url for each in found]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"{twice[0]} is given twice; expected each input once")
    return found


def expand_url(name: str) -> list[str]:
    """The files that a pattern matches."""
    if not is_remote(name):
        return [str(path) for path in expand(Path(name.removeprefix("file://")))]
    if "*" not in name:
        return [name]
    import fsspec

    system, path = fsspec.core.url_to_fs(name)
    if not (found := sorted(system.glob(path))):
        raise FileNotFoundError(f"{name} matches no file; expected a pattern of files that exist")
    return [system.unstrip_protocol(each) for each in found]


class Corpus:
    """The rows of all inputs.

    Attributes:
        rows_read: how many rows have been read, skipped parts included.
        empty: inputs without rows, of those that have been read.
    """

    def __init__(self, inputs: list[Input], limit: int | None = None):
        self.inputs, self.limit = inputs, limit
        self.rows_read, self.empty = 0, []
        self.columns: set[str] = set()
        self.stream: Iterator[Row] | None = None

    def rows(self) -> Iterator[Row]:
        """The rows, one input after the other. Each input is opened when the one before it has been read."""
        for each in self.inputs:
            row = None
            for row in each.read(self.columns):
                yield row
            if row is None:
                self.empty.append(each.url)

    def first_rows(self) -> list[Row]:
        """The rows by which columns are found; standard input is left as it was.

        Raises:
            OSError, ValueError: an input cannot be read, or there are no rows.
        """
        self.stream = self.rows()
        found = list(islice(self.stream, ROWS_WITH_ALL_COLUMNS))
        if not found:
            raise ValueError(f"{', '.join(map(str, self.inputs))}: there are no rows")
        if any(isinstance(each, StandardInput) for each in self.inputs):
            self.stream = chain(found, self.stream)
        else:
            self.stream, self.empty = None, []
        return found

    def parts(self, part_rows: int, is_wanted: Callable[[int], bool]) -> Iterator[Part]:
        """The parts that are wanted, in order. All rows are read."""
        stream = islice(self.stream or self.rows(), self.limit)
        number = 0
        while rows := list(islice(stream, part_rows)):
            self.rows_read += len(rows)
            if is_wanted(number):
                yield Part(number, rows)
            number += 1

    def share(self) -> float | None:
        """How much of the input has been read, from 0 to 1; None if that is not known."""
        if self.limit is not None:
            return min(1.0, self.rows_read / self.limit)
        total = sum(each.size for each in self.inputs)
        shares = [each.share() for each in self.inputs]
        if not total or None in shares:
            return None
        return sum(each.size * share for each, share in zip(self.inputs, shares, strict=True)) / total
