"""The files of parts: columns of values as Parquet, JSON lines, CSV or `.npy`.

The kind of a column is one of "integer", "number", "text", "texts", "numbers", "lists of texts", "lists of numbers",
"entities of tokens", "entities of words", "scores of NAMES", a JSON list of names, whose values are dictionaries, and
"vector of N DTYPE", whose values are an array `(rows, N)`. Equal columns give equal bytes, whoever writes them.
"""

import csv
import io
import json
from collections.abc import Mapping, Sequence

import numpy as np

# A fixed number, because the bytes of a Parquet file depend on it.
ROWS_IN_GROUP = 1024

Columns = Mapping[str, Sequence]
Kinds = Mapping[str, str]


def encode_part(name: str, kinds: Kinds, columns: Columns) -> dict[str, bytes]:
    """The files of a part in the format `name`, by their endings, in the order in which they are written: the part is
    complete with the last one.

    Args:
        kinds: of the columns, in their order.
    """
    if name == "parquet":
        return {"parquet": to_parquet(kinds, columns)}
    if name == "npy":
        return {"csv": to_csv({key: kinds[key] for key in kinds if key != "embedding"}, columns),
                "npy": to_npy(np.asarray(columns["embedding"]))}  # fmt: skip
    return {name: to_csv(kinds, columns) if name == "csv" else to_json_lines(kinds, columns)}


# ------------------------------------------------------------------------------------------------------------- Parquet


def arrow_type(kind: str):
    """The type of a column."""
    import pyarrow as pa

    if kind.startswith("scores of"):
        return pa.struct({name: pa.float32() for name in json.loads(kind.removeprefix("scores of"))})
    entity = {"score": pa.float32(), "word": pa.string(), "start": pa.int32(), "end": pa.int32()}
    return {
        "integer": pa.int64,
        "number": pa.float32,
        "text": pa.string,
        "texts": lambda: pa.list_(pa.string()),
        "numbers": lambda: pa.list_(pa.float32()),
        "lists of texts": lambda: pa.list_(pa.list_(pa.string())),
        "lists of numbers": lambda: pa.list_(pa.list_(pa.float32())),
        "entities of tokens": lambda: pa.list_(pa.struct({"entity": pa.string(), "index": pa.int32()} | entity)),
        "entities of words": lambda: pa.list_(pa.struct({"entity_group": pa.string()} | entity)),
    }[kind]()


def to_arrow(kind: str, values):
    """The values as an array of Arrow."""
    import pyarrow as pa

    if not kind.startswith("vector"):
        return pa.array(values, arrow_type(kind))
    numbers = np.asarray(values)
    return pa.FixedSizeListArray.from_arrays(pa.array(numbers.reshape(-1)), numbers.shape[1])


def to_parquet(kinds: Kinds, columns: Columns) -> bytes:
    import pyarrow as pa
    from pyarrow import parquet

    table = pa.table({name: to_arrow(kind, columns[name]) for name, kind in kinds.items()})
    texts = [name for name, kind in kinds.items() if kind == "text"]
    target = io.BytesIO()
    parquet.write_table(table, target, row_group_size=ROWS_IN_GROUP, use_dictionary=texts)
    return target.getvalue()


# ---------------------------------------------------------------------------------------------------------------- text


def plain(kind: str, values) -> list:
    """The values in the types of JSON."""
    if kind.startswith("vector") and np.asarray(values).dtype == np.float16:
        values = np.asarray(values).astype(np.float32)
    return values.tolist() if isinstance(values, np.ndarray) else list(values)


def to_json_lines(kinds: Kinds, columns: Columns) -> bytes:
    values = [plain(kind, columns[name]) for name, kind in kinds.items()]
    rows = (dict(zip(kinds, row, strict=True)) for row in zip(*values, strict=True))
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()


def to_csv(kinds: Kinds, columns: Columns) -> bytes:
    """A file with a header. Lists and dictionaries are written as JSON."""
    target = io.StringIO(newline="")
    writer = csv.writer(target, lineterminator="\n")
    writer.writerow(kinds)
    values = [plain(kind, columns[name]) for name, kind in kinds.items()]
    for row in zip(*values, strict=True):
        cells = (json.dumps(each, ensure_ascii=False) if isinstance(each, (list, dict)) else each for each in row)
        writer.writerow(cells)
    return target.getvalue().encode()


def to_npy(values: np.ndarray) -> bytes:
    target = io.BytesIO()
    np.save(target, values, allow_pickle=False)
    return target.getvalue()
