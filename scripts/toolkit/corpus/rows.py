"""The rows of a corpus: read twice, once to check them and to find the types of their columns, and once in parts."""

import hashlib
import json
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path

import pyarrow as pa

from toolkit.common import CommandError
from toolkit.data import File, Row, Source, columns_of, open_files, usable

HUB, STANDARD_INPUT = "hub:", "-"
TABLES = (".csv", ".tsv")
ROWS_AT_ONCE = 1000  # whose types are found together


@dataclass
class Part:
    """Rows of the input, in its order: the unit of work, of writing and of resuming.

    Args:
        known: of the rows whose results an earlier run has: the numbers of a part and of a row in it, by the place of
            the row in this part.
    """

    number: int
    rows: list[Row]
    known: dict[int, tuple[int, int]] = field(default_factory=dict)


@dataclass
class Corpus:
    """The rows of all inputs, with their columns as of one.

    Args:
        sources: one for each file and dataset.
        limit: use the first rows only.
    """

    sources: list[Source]
    limit: int | None = None

    @property
    def files(self) -> list[File]:
        return [file for source in self.sources for file in source.files]

    def columns(self) -> list[str]:
        return columns_of(self.rows())

    def rows(self) -> Iterator[Row]:
        return islice(chain.from_iterable(source.rows() for source in self.sources), self.limit)

    def tables(self) -> set[str]:
        """The names of the files whose values are cells of text."""
        return {file.name for file in self.files if file.format in TABLES}

    def parts(self, size: int, wanted: Callable[[int], bool] = lambda number: True) -> Iterator[Part]:
        """The parts that are wanted, by their numbers, in order. All rows are read."""
        rows, number = self.rows(), 0
        while part := list(islice(rows, size)):
            if wanted(number):
                yield Part(number, part)
            number += 1

    def fingerprints(self) -> list[dict]:
        """What identifies each input: of a local file its content, else what its store says of it."""
        found = [{"input": str(source)} for source in self.sources if source.dataset is not None]
        for file in self.files:
            if "file" in file.system.protocol:
                with open(file.path, "rb") as content:
                    identity = hashlib.file_digest(content, "sha256").hexdigest()
            else:
                identity = str(file.system.checksum(file.path))
            known = {"content": identity, "encoding": file.encoding, "delimiter": file.delimiter}
            found.append({"input": file.name, **known})
        return found


def open_corpus(args, folder: Path) -> Corpus:
    """The inputs of a command. A folder or a pattern stands for the files in it.

    Args:
        folder: a temporary one, for a copy of standard input.

    Raises:
        OSError: an input does not exist.
        ValueError: its format is unknown, or it is given twice.
    """
    sources = []
    for name in args.inputs:
        if name.startswith(HUB):
            first, _, last = name.removeprefix(HUB).rpartition(":")
            dataset = (first or last, None, last if first else "train")
            sources.append(Source("INPUT", [], dataset))
            continue
        patterns = [save_standard_input(folder, args.stdin_format)] if name == STANDARD_INPUT else [name]
        for file in open_files(patterns, "INPUT", args.encoding, args.delimiter):
            if name == STANDARD_INPUT:
                file.name = "standard input"
            sources.append(Source("INPUT", [file]))
    names = list(map(str, sources))
    if twice := [name for name in names if names.count(name) > 1]:
        raise ValueError(f"INPUT {twice[0]} is given twice; expected each input once.")
    return Corpus(sources, args.limit)


def save_standard_input(folder: Path, format: str | None) -> str:
    """Copies standard input, which is read twice, into a file. Without a format it is JSON lines if it begins with a
    brace, else a text on each line."""
    if sys.stdin is None:
        raise OSError("INPUT is -, and there is no standard input; expected text in it.")
    with open(folder / "input", "wb") as copy:
        shutil.copyfileobj(sys.stdin.buffer, copy)
    if format is None:
        with open(folder / "input", "rb") as copy:
            format = "jsonl" if copy.read(1024).lstrip()[:1] == b"{" else "txt"
    return str((folder / "input").rename(folder / f"input.{format}"))


# -------------------------------------------------------------------------------------------------------- first reading


def scan_rows(corpus: Corpus, job, task, kept: list[str] | None) -> tuple[int, dict, bytearray]:
    """Reads all rows once. Returns how many there are; the types of the columns that the output keeps, None for values
    of several types, which are written as JSON; and with --update the digests of the rows that can be used, 16 bytes
    each, and zeros for the others.

    Args:
        job: see `toolkit.corpus.workers`.
        kept: the columns of the input that the output has; None: all.

    Raises:
        CommandError: a row cannot be used, and --on_bad_row is stop.
    """
    count, digests, types, large = 0, bytearray(), {}, set()
    rows, tables = corpus.rows(), corpus.tables()
    while batch := list(islice(rows, ROWS_AT_ONCE)):
        columns: dict[tuple[str, bool], list] = {}
        for row in batch:
            try:
                fields = job.read(task, usable(row.content))
            except ValueError as error:
                if job.args.on_bad_row == "stop":
                    raise bad_row_error(fault(row, str(error))) from None
                fields = None
            if job.args.update:
                digests += job.digest(fields) if fields else bytes(16)
            for name, value in row.content.items() if isinstance(row.content, dict) else ():
                if kept is None or name in kept:
                    is_table = row.file in tables
                    columns.setdefault((name, is_table), []).append(parse_cell(value) if is_table else value)
        for (name, is_table), values in columns.items():
            own = type_of_values(values)
            if own is None and is_table:
                own = pa.string()
            types[name] = common_type(types[name], own, is_table) if name in types else own
            if own == pa.int64() and any(abs(value) > 2**53 for value in values if value is not None):
                large.add(name)
        count += len(batch)
    for name, own in types.items():
        # As numbers with a decimal point, large integers would lose digits; a column without values is text.
        is_text = own == pa.null() or (own == pa.float64() and name in large)
        types[name] = pa.string() if is_text else own
    return count, types, digests


def fault(row: Row, reason: str) -> dict:
    """A row that cannot be used, as errors.jsonl has it."""
    return {"file": row.file, "row": row.number, "line": row.line, "reason": reason}


def bad_row_error(bad: dict) -> CommandError:
    """The error about a row that cannot be used, with --on_bad_row stop."""
    place = Row(bad["file"], bad["row"], bad["line"], {}).place
    return CommandError(f"{place}: {bad['reason'].rstrip('.')}. --on_bad_row skip leaves such rows out")


def parse_cell(cell: str) -> int | float | str | None:
    """A cell of CSV: a number if it has the same digits when it is written again, so that 007 and 1.10 are texts; None
    if it is empty."""
    if cell.strip("-")[:1].isdecimal():
        for convert in (int, float):
            with suppress(ValueError):
                if str(convert(cell)) == cell:
                    return convert(cell)
    return cell or None


def type_of_values(values: list) -> pa.DataType | None:
    kinds = {type(value) for value in values} - {type(None)}
    if {bool} < kinds:  # Arrow takes them for numbers
        return None
    try:
        return pa.array(values).type
    except (pa.ArrowException, OverflowError):
        return None


def common_type(one: pa.DataType | None, other: pa.DataType | None, is_table: bool) -> pa.DataType | None:
    if one is None or other is None:
        return None
    if is_table and pa.string() in (one, other):
        return pa.string()
    schemas = [pa.schema([("value", each)]) for each in (one, other)]
    try:
        return pa.unify_schemas(schemas, promote_options="permissive").field("value").type
    except pa.ArrowException:
        return None


def column(values: list, type: pa.DataType | None) -> pa.Array:
    """Values of a column that is kept."""
    if type is None:
        return pa.array([None if value is None else to_json_text(value) for value in values], pa.string())
    if type in (pa.int64(), pa.float64()):
        values = [parse_cell(value) if isinstance(value, str) else value for value in values]
    if type == pa.string():
        values = [value if value is None or isinstance(value, str) else to_json_text(value) for value in values]
    return pa.array(values, type)


def to_json_text(value) -> str:
    # What JSON does not have: bytes as hexadecimal digits; dates and decimals as text.
    return json.dumps(value, ensure_ascii=False, default=lambda own: own.hex() if isinstance(own, bytes) else str(own))
