"""The rows of a corpus: read twice, once to check them and to find the types of their columns, and once in parts."""

import datetime
import hashlib
import json
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from decimal import Decimal
from itertools import islice
from pathlib import Path

import numpy as np
import pyarrow as pa

from toolkit.data import Row, Source, columns_of, open_files, usable

HUB, STANDARD_INPUT = "hub:", "-"
TABLES = (".csv", ".tsv")
# Integers of CSV that are the same when they are written again: "007" is a text.
INTEGER = re.compile(r"-?[1-9][0-9]*|0")
ROWS_AT_ONCE = 1000  # whose types are found together


@dataclass
class Part:
    """Rows of the input, in its order: the unit of work, of writing and of resuming.

    Args:
        known: for each row, where an earlier run has its result: the numbers of a part and of a row in it; -1: nowhere.
    """

    number: int
    rows: list[Row]
    known: np.ndarray | None = None


@dataclass
class Corpus:
    """The rows of all inputs.

    Args:
        sources: each with the format of its files, such as ".csv".
        limit: use the first so many rows only.
    """

    sources: list[tuple[str, Source]]
    limit: int | None = None

    def rows(self) -> Iterator[Row]:
        return islice((row for _, row in self.with_formats()), self.limit)

    def with_formats(self) -> Iterator[tuple[str, Row]]:
        """Each row with the format of its file."""
        for format, source in self.sources:
            for row in source.rows():
                yield format, row

    def columns(self) -> list[str]:
        return columns_of(self.rows())

    def parts(self, size: int, wanted: Callable[[int], bool] = lambda number: True) -> Iterator[Part]:
        """The parts that are wanted, by their numbers, in order. All rows are read."""
        rows, number = self.rows(), 0
        while part := list(islice(rows, size)):
            if wanted(number):
                yield Part(number, part)
            number += 1

    def fingerprints(self) -> list[dict]:
        """What identifies each input: of a local file its content, else what its store says of it."""
        return [own for _, source in self.sources for own in fingerprints_of(source)]


def fingerprints_of(source: Source) -> Iterator[dict]:
    if source.dataset is not None:
        yield {"input": str(source)}
    for file in source.files:
        if "file" in file.system.protocol:
            with open(file.path, "rb") as content:
                identity = hashlib.file_digest(content, "sha256").hexdigest()
        else:
            identity = str(file.system.checksum(file.path))
        yield {"input": file.name, "content": identity, "encoding": file.encoding, "delimiter": file.delimiter}


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
            sources.append((name, Source("INPUT", [], dataset)))
            continue
        patterns = [save_standard_input(folder, args.stdin_format)] if name == STANDARD_INPUT else [name]
        for file in open_files(patterns, "INPUT", args.encoding, args.delimiter):
            if name == STANDARD_INPUT:
                file.name = "standard input"
            sources.append((file.format, Source("INPUT", [file])))
    names = [str(source) for _, source in sources]
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


@dataclass
class Scan:
    """What the first reading finds.

    Attributes:
        types: of the columns that the output keeps; None: values of several types, which are written as JSON.
        bad: the rows that cannot be used, as errors.jsonl has them.
        digests: of the rows that can be used, 16 bytes each, and zeros for the others.
    """

    rows: int = 0
    types: dict[str, pa.DataType | None] = field(default_factory=dict)
    bad: list[dict] = field(default_factory=list)
    digests: bytearray = field(default_factory=bytearray)


def scan_rows(
    corpus: Corpus, read: Callable[[dict], dict], keep: Callable[[str], bool], digest_of, stops: bool
) -> Scan:
    """Reads all rows once.

    Args:
        read: returns what is needed of a row, or raises ValueError.
        keep: whether the output has a column.
        digest_of: of what `read` returns; None: digests are not needed.
        stops: at the first row that cannot be used.
    """
    scan, types, large = Scan(), {}, set()
    rows = islice(corpus.with_formats(), corpus.limit)
    while batch := list(islice(rows, ROWS_AT_ONCE)):
        columns: dict[tuple[str, bool], list] = {}
        for format, row in batch:
            digest = bytes(16)
            try:
                fields = read(usable(row.content))
                digest = digest_of(fields) if digest_of else digest
            except ValueError as error:
                scan.bad.append(fault(row, str(error)))
                if stops:
                    return scan
            for name, value in row.content.items() if isinstance(row.content, dict) else ():
                if keep(name):
                    columns.setdefault((name, format in TABLES), []).append(value)
            if digest_of:
                scan.digests += digest
        for (name, is_table), values in columns.items():
            own = type_of_cells(values) if is_table else type_of_values(values)
            types[name] = common_type(types[name], own, is_table) if name in types else own
            if own == pa.int64() and any(abs(int(value)) > 2**53 for value in values if value not in (None, "")):
                large.add(name)
        scan.rows += len(batch)
    for name, own in types.items():
        # As numbers with a decimal point, large integers would lose digits; a column without values is text.
        is_text = own == pa.null() or (own == pa.float64() and name in large)
        scan.types[name] = pa.string() if is_text else own
    return scan


def fault(row: Row, reason: str) -> dict:
    """A row that cannot be used, as errors.jsonl has it."""
    return {"file": row.file, "row": row.number, "line": row.line, "reason": reason}


def in_words(bad: dict) -> str:
    return f"{Row(bad['file'], bad['row'], bad['line'], {}).place}: {bad['reason']}"


def type_of_cells(cells: list[str]) -> pa.DataType:
    """The type of cells of CSV: numbers only if each one is the same when it is written again."""
    filled = [cell for cell in cells if cell]
    if not filled:
        return pa.null()
    if all(INTEGER.fullmatch(cell) and abs(int(cell)) < 2**63 for cell in filled):
        return pa.int64()
    return pa.float64() if all(map(is_number, filled)) else pa.string()


def is_number(cell: str) -> bool:
    """Whether a cell is written again with the same digits, as 1.5 and 2 are, in a column of decimal numbers."""
    try:
        number = float(cell)
        is_integer = abs(number) <= 2**53 and str(int(number)) == cell
        return cell.strip("-")[:1].isdecimal() and (is_integer or repr(number) == cell)
    except ValueError:
        return False


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
        convert = int if type == pa.int64() else float
        values = [(convert(value) if value else None) if isinstance(value, str) else value for value in values]
    if type == pa.string():
        values = [value if value is None or isinstance(value, str) else to_json_text(value) for value in values]
    return pa.array(values, type)


def to_json_text(value) -> str:
    return json.dumps(value, ensure_ascii=False, default=json_value)


def json_value(value):
    """A value of Arrow that JSON does not have: bytes as hexadecimal digits, dates and decimals as text."""
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, datetime.date | datetime.time | datetime.timedelta | Decimal):
        return str(value)
    return value.tolist()
