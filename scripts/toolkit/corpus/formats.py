"""The files of parts: columns of values as Parquet, JSON lines, CSV or `.npy`, written and read again.

The kind of a column is an Arrow type, or one of "integer", "unsigned", "double", "boolean", "text", and "json" (any
value, in Parquet and CSV as its JSON). Those of results are "number", "texts", "numbers", "lists of texts", "lists of
numbers", "entities of tokens", "entities of words", "scores of LABELS" (a JSON list), and "vector of N DTYPE", whose
values are an array `(rows, N)`, in which a row without a value is masked. Equal columns give equal bytes, whoever
writes them.
"""

import base64
import csv
import io
import json
from collections.abc import Callable, Mapping, Sequence

import numpy as np

# Fixed numbers, because the bytes of a Parquet file depend on them.
ROWS_IN_GROUP, BYTES_IN_GROUP = 1024, 2**24

Columns = Mapping[str, Sequence]
Kinds = Mapping[str, object]


def encode_part(name: str, kinds: Kinds, columns: Columns) -> dict[str, bytes]:
    """The files of a part in the format `name`, by their endings.

    Args:
        kinds: of the columns, in their order.
    """
    if name == "parquet":
        return {"parquet": to_parquet(kinds, columns)}
    if name == "npy":
        target = io.BytesIO()
        np.save(target, np.asarray(columns["embedding"]), allow_pickle=False)
        places = {key: kinds[key] for key in kinds if key != "embedding"}
        return {"csv": to_csv(places, columns), "npy": target.getvalue()}
    return {name: to_csv(kinds, columns) if name == "csv" else to_json_lines(kinds, columns)}


def decode_part(name: str, kinds: Kinds, content: bytes) -> dict[str, Sequence]:
    """The columns of results with these kinds in the file of a part, which `encode_part` writes as it was. `name` is
    not npy."""
    if name == "parquet":
        return from_parquet(kinds, content)
    csv.field_size_limit(max(csv.field_size_limit(), len(content)))
    lines = io.StringIO(content.decode(), newline="")
    rows = list(csv.DictReader(lines)) if name == "csv" else [json.loads(line) for line in lines]
    parse = parse_cell if name == "csv" else lambda kind, value: value
    found = {column: [parse(kind, row[column]) for row in rows] for column, kind in kinds.items()}
    return {
        column: as_vectors(kinds[column], values) if is_vector(kinds[column]) else values
        for column, values in found.items()
    }


def is_vector(kind) -> bool:
    return isinstance(kind, str) and kind.startswith("vector")


def with_gaps(kind, values: Sequence, places: Sequence[int], rows: int) -> Sequence:
    """The values at their `places` among so many rows; the other rows have none."""
    if is_vector(kind):
        vectors = np.ma.masked_all((rows, values.shape[1]), values.dtype)
        vectors.data[:] = 0
        vectors[list(places)] = values
        return vectors
    found: list = [None] * rows
    for place, value in zip(places, values, strict=True):
        found[place] = value
    return found


def as_column(kind, values: list) -> Sequence:
    """The column of single values."""
    return as_vectors(kind, np.stack(values) if values else []) if is_vector(kind) else values


def joined(pieces: Sequence[Sequence]) -> Sequence:
    """The values of a column one after the other."""
    if len(pieces) == 1:
        return pieces[0]
    if isinstance(pieces[0], np.ndarray):
        return np.concatenate(pieces)
    return [value for piece in pieces for value in piece]


def arrow_type(kind):
    """The type of a column."""
    import pyarrow as pa

    if not isinstance(kind, str):
        return kind
    if kind.startswith("scores of "):
        return pa.struct([(label, pa.float32()) for label in json.loads(kind.removeprefix("scores of "))])
    text, number = pa.string(), pa.float32()
    entity = {"score": number, "word": text, "start": pa.int32(), "end": pa.int32()}
    return {
        "integer": pa.int64(),
        "unsigned": pa.uint64(),
        "double": pa.float64(),
        "boolean": pa.bool_(),
        "text": text,
        "json": text,
        "number": number,
        "texts": pa.list_(text),
        "numbers": pa.list_(number),
        "lists of texts": pa.list_(pa.list_(text)),
        "lists of numbers": pa.list_(pa.list_(number)),
        "entities of tokens": pa.list_(pa.struct({"entity": text, "index": pa.int32()} | entity)),
        "entities of words": pa.list_(pa.struct({"entity_group": text} | entity)),
    }[kind]


def to_arrow(kind, values):
    """The values as an array of Arrow."""
    import pyarrow as pa

    if kind == "json":
        values = [None if value is None else to_json_text(value) for value in values]
    if not is_vector(kind):
        return pa.array(values, arrow_type(kind))
    numbers = np.ma.getdata(values)
    is_missing = np.ma.getmaskarray(values)[:, 0] if np.ma.is_masked(values) else None
    flat = pa.array(np.ascontiguousarray(numbers).reshape(-1))
    return pa.FixedSizeListArray.from_arrays(
        flat, numbers.shape[1], mask=None if is_missing is None else pa.array(is_missing)
    )


def to_parquet(kinds: Kinds, columns: Columns) -> bytes:
    import pyarrow as pa
    from pyarrow import parquet

    table = pa.table({name: to_arrow(kind, columns[name]) for name, kind in kinds.items()})
    texts = [name for name, kind in kinds.items() if kind in ("text", pa.string())]
    target = io.BytesIO()
    groups = -(-table.nbytes // BYTES_IN_GROUP)  # of long texts several, because a group is held in memory
    rows = ROWS_IN_GROUP if groups < 2 else -(-table.num_rows // groups)
    parquet.write_table(table, target, row_group_size=rows, use_dictionary=texts)
    return target.getvalue()


def from_parquet(kinds: Kinds, content: bytes) -> dict[str, Sequence]:
    from pyarrow import parquet

    found = parquet.read_table(io.BytesIO(content), columns=list(kinds)).combine_chunks()
    columns: dict[str, Sequence] = {}
    for name, kind in kinds.items():
        column = found.column(name)
        if is_vector(kind):
            pieces = [chunk.values.to_numpy() for chunk in column.chunks] or [np.empty(0)]
            columns[name] = as_vectors(kind, np.concatenate(pieces))
        else:
            columns[name] = column.to_pylist()
    return columns


def as_vectors(kind: str, values) -> np.ndarray:
    """Numbers as the array `(rows, N)` of a column of vectors."""
    _, _, size, dtype = kind.split()
    if isinstance(values, list):  # rows without a value have no digest: nobody asks for them
        values = [[0] * int(size) if row is None else row for row in values]
    return np.asarray(values, dtype).reshape(-1, int(size))


def plain(kind, values) -> list:
    """The values in the types of JSON, but for those of an Arrow type that it does not have."""
    if is_vector(kind):
        numbers = np.ma.getdata(values)
        rows = (numbers.astype(np.float32) if numbers.dtype == np.float16 else numbers).tolist()
        return [
            None if is_missing else row
            for row, is_missing in zip(rows, np.ma.getmaskarray(values).any(axis=1), strict=True)
        ]
    return values.tolist() if isinstance(values, np.ndarray) else list(values)


def to_json_text(value) -> str:
    return json.dumps(value, ensure_ascii=False, default=json_value)


def json_value(value):
    """A value of an Arrow type that JSON does not have: bytes as base64, numbers of NumPy, and dates and decimals as
    text."""
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    return value.tolist() if hasattr(value, "tolist") else str(value)


def to_json_lines(kinds: Kinds, columns: Columns) -> bytes:
    values = [plain(kind, columns[name]) for name, kind in kinds.items()]
    rows = (dict(zip(kinds, row, strict=True)) for row in zip(*values, strict=True))
    return "".join(to_json_text(row) + "\n" for row in rows).encode()


def to_csv(kinds: Kinds, columns: Columns) -> bytes:
    """A file with a header. Lists, objects and columns of the kind json are written as JSON."""
    target = io.StringIO(newline="")
    writer = csv.writer(target, lineterminator="\n")
    writer.writerow(kinds)
    values = [[cell(kind, value) for value in plain(kind, columns[name])] for name, kind in kinds.items()]
    writer.writerows(zip(*values, strict=True))
    return target.getvalue().encode()


def cell(kind, value):
    """A value in CSV."""
    if isinstance(value, (list, dict, bool)) or (kind == "json" and value is not None):
        return to_json_text(value)
    return value if value is None or isinstance(value, (str, int, float)) else json_value(value)


def parse_cell(kind: str, text: str):
    """The value of a result in a cell of CSV."""
    if text == "":
        return None
    parse: Callable = {"text": str, "integer": int, "number": float}.get(kind, json.loads)
    return parse(text)
