"""The rows of a run: what is needed of each, which cannot be used, and the types of the columns that are kept."""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import groupby, islice
from operator import itemgetter

from toolkit.corpus.digests import DigestIndex, digest_of
from toolkit.corpus.formats import arrow_type
from toolkit.corpus.job import Job
from toolkit.inputs import Input, Row
from toolkit.labels import read_labels
from toolkit.row_files import text_of

# Integers of CSV that are the same when they are written again: "007" is a text.
INTEGER = re.compile(r"-?[1-9][0-9]*|0")

# Rows whose columns are looked at together.
ROWS_AT_ONCE = 100


def check_row(job: Job, row: Row) -> dict:
    """What is needed of a row. Raises ValueError if it cannot be used."""
    content = row.content
    if isinstance(content, str):
        raise ValueError(content)
    values = {"text": read_text(job, content, job.options["text_column"])}
    if (column := job.options.get("text_pair_column")) is not None:
        values["text_pair"] = read_text(job, content, column)
    if job.id_column is not None:
        values["id"] = read_id(content.get(job.id_column), job.id_column)
    if job.label_column is not None:
        problem, labels = job.options["problem"], job.options["labels"]
        found = read_labels(content.get(job.label_column), problem, labels, job.options["label_separator"])
        values["reference"] = found[0] if problem == "single_label" else found
    return values


def read_text(job: Job, content: dict, column: str) -> str | None:
    """The text in a column; None for an empty one, if the job gives it a row without results."""
    value = content.get(column)
    if job.empty_texts == "null" and (value is None or (isinstance(value, str) and not value.strip())):
        return None
    return text_of(content, column)


def read_id(value, column: str) -> int | str:
    """The id of a row. Raises ValueError if it is missing or neither a text nor a number."""
    if value is None or value == "" or (isinstance(value, float) and math.isnan(value)):
        raise ValueError(f"{column!r} is {value!r}; expected an id")
    if isinstance(value, str) and value.strip().lower() in ("", "nan"):
        raise ValueError(f"{column!r} is {value!r}, which stands for a missing number; expected an id")
    if isinstance(value, (dict, list, bool)):
        raise ValueError(f"{column!r} is {value!r}; expected a text or a number")
    return value if isinstance(value, int) else str(value)


@dataclass
class Scan:
    """What a first reading of all rows finds.

    Attributes:
        rows: their number.
        repeated: what is wrong with rows whose id another row has, by their place among all rows, from 0.
        kinds: of the columns, see `toolkit.corpus.formats`.
        first_bad: the first row that cannot be used, and why.
    """

    rows: int = 0
    repeated: dict[int, str] = field(default_factory=dict)
    kinds: dict[str, object] = field(default_factory=dict)
    first_bad: tuple[Row, str] | None = None


def scan_rows(job: Job, rows: Iterator[tuple[Row, Input]], keeps_all: bool) -> Scan:
    """Reads all rows once; or, if the job stops at a row that cannot be used, up to it.

    Args:
        rows: each with its input.
        keeps_all: also look at columns that only later rows have, and that the job does not name.
    """
    found, ids = Scan(), DigestIndex()
    texts = (job.options["text_column"], job.options.get("text_pair_column"))
    columns = {column: ColumnKind(column in texts) for column in (*job.keep, job.id_column) if column is not None}
    for source, of_source in groupby(rows, key=itemgetter(1)):
        declared = source.types() or {}
        while batch := [row for row, _ in islice(of_source, ROWS_AT_ONCE)]:
            used = scan_batch(job, batch, found, ids)
            if job.on_bad_row == "stop" and found.first_bad is not None:
                return found
            if keeps_all:
                new = dict.fromkeys(column for row in used for column in row.content if column not in columns)
                columns |= {column: ColumnKind(column in texts) for column in new}
            for column, kind in columns.items():
                values = [row.content.get(column) for row in used]
                kind.look_at(values, declared.get(column), source.is_table)
            found.rows += len(batch)
    found.kinds = {column: kind.kind or "text" for column, kind in columns.items()}
    if found.kinds.get(job.id_column) in ("double", "boolean", "json"):
        found.kinds[job.id_column] = "text"
    return found


def scan_batch(job: Job, batch: list[Row], found: Scan, ids: DigestIndex) -> list[Row]:
    """The rows that can be used. Notes the others in `found`."""
    values: dict[int, dict] = {}
    for index, row in enumerate(batch):
        try:
            values[index] = check_row(job, row)
        except ValueError as error:
            found.first_bad = found.first_bad or (row, str(error))
    if job.id_column is not None:
        for index in find_repeated({index: str(each["id"]) for index, each in values.items()}, ids):
            reason = f"{job.id_column!r} is {values.pop(index)['id']!r}, as in an earlier row; expected each id once"
            found.repeated[found.rows + index] = reason
            found.first_bad = found.first_bad or (batch[index], reason)
    return [batch[index] for index in values]


def find_repeated(ids: Mapping[int, str], known: DigestIndex) -> list[int]:
    """The places of ids that are known or occur before among these. Adds the others to the known ones."""
    digests = {place: digest_of(text) for place, text in ids.items()}
    new: dict[bytes, int] = {}
    repeated = [
        place
        for (place, digest), before in zip(digests.items(), known.find(list(digests.values())), strict=True)
        if before >= 0 or new.setdefault(digest, place) != place
    ]
    known.add(list(new), list(new.values()))
    return repeated


def kind_of_json(value) -> object:
    """The kind of a value of a JSON file; "nested" for a list or an object."""
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int):
        return "integer" if -(2**63) <= value < 2**63 else "unsigned" if 0 <= value < 2**64 else "json"
    return {str: "text", float: "double"}.get(type(value), "nested")


def kind_of_cell(text: str) -> object:
    """The kind of a cell of CSV: a number only if it is the same when it is written again."""
    if INTEGER.fullmatch(text):
        kind = kind_of_json(int(text))
        return "text" if kind == "json" else kind
    try:
        return "double" if text.strip("-")[:1].isdecimal() and repr(float(text)) == text else "text"
    except ValueError:
        return "text"


def kind_of_nested(values: list) -> object:
    """The kind of lists or objects of JSON."""
    try:
        import pyarrow as pa

        return pa.array(values).type
    except (ImportError, ValueError, TypeError):  # those of Arrow are among them
        return "json"


def common_kind(one: object, other: object, is_negative: bool) -> object:
    """The kind of a column with values of both kinds; "json" if there is none.

    Args:
        is_negative: an integer of the column is.
    """
    if one is None or one == other:
        return other
    if {one, other} == {"integer", "unsigned"}:
        return "json" if is_negative else "unsigned"
    if {one, other} <= {"integer", "unsigned", "double"}:
        return "double"
    if isinstance(one, str) and isinstance(other, str):
        return "json"
    import pyarrow as pa

    try:
        schemas = [pa.schema([("value", arrow_type(kind))]) for kind in (one, other)]
        return pa.unify_schemas(schemas, promote_options="permissive").field("value").type
    except (TypeError, ValueError):
        return "json"


class ColumnKind:
    """The kind of a column, from the values that it is shown.

    Args:
        is_text: its values are texts, also where they could be numbers.
    """

    def __init__(self, is_text: bool):
        self.is_text, self.kind, self.is_negative = is_text, None, False

    def look_at(self, values: list, declared: object, is_table: bool) -> None:
        """Takes values into account.

        Args:
            declared: the Arrow type that their input declares; None: none.
            is_table: they are cells of CSV.
        """
        found = {declared}
        if declared is None:
            values = [value for value in values if value is not None]
            is_number = is_table and not self.is_text
            found = set(map(kind_of_cell, filter(None, values)) if is_number else map(kind_of_json, values))
            if "nested" in found:
                found = {kind_of_nested(values)}
            if "integer" in found and not self.is_negative:
                self.is_negative = any(str(value).startswith("-") for value in values)
        for kind in found:
            is_text = is_table and "text" in (self.kind, kind)  # some cells are no numbers
            self.kind = "text" if is_text else common_kind(self.kind, kind, self.is_negative)


def in_kind(kind: object, value):
    """A value of an input as one of a column of this kind."""
    if value is None or not isinstance(kind, str):
        return value
    if kind in ("integer", "unsigned"):
        return int(value) if value != "" else None
    if kind == "double":
        return float(value) if value != "" else None
    return str(value) if kind == "text" else value
