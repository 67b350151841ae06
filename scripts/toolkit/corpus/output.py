"""The folder of a run: its parts and their records, written whole or not at all, here or where fsspec reaches.

What is not a part is in the folder `__run__`. Arrow, pandas, Spark and `datasets` skip names that begin with two
underscores, and a pattern such as `*.parquet` does not reach into a folder.
"""

import csv
import hashlib
import io
import json
import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import fsspec
import numpy as np
import pyarrow as pa
from filelock import FileLock, Timeout
from pyarrow import compute, parquet

from toolkit.common import CommandError, first_of
from toolkit.corpus.rows import to_json_text

RUN = "__run__"
MANIFEST, ERRORS, METRICS_FILE, JOINED = (
    f"{RUN}/{name}" for name in ("manifest.json", "errors.jsonl", "metrics.json", "joined.json")
)
RECORDS = f"{RUN}/parts"
UPDATE = f"{RUN}/update"  # where the parts of an update are written before they replace the others
COMPLETE = f"{UPDATE}/complete"  # marks that all are there
EMBEDDINGS, ROWS = "embeddings.npy", "rows.csv"

# Fixed, because the bytes of a Parquet file depend on them.
ROWS_IN_GROUP = 1024
NAMED_FILES = 5  # that --check names
DAMAGED = (OSError, pa.ArrowException, ValueError, KeyError, TypeError)  # the errors of reading a damaged record


def part_name(number: int, format: str) -> str:
    """The name of a part. Those of npy are Parquet until they are joined."""
    return f"part-{number:06d}.{'parquet' if format == 'npy' else format}"


def record_name(number: int) -> str:
    return f"{number:06d}.parquet"


class Store:
    """A folder. One completed upload takes the place of a rename, which object stores lack.

    Args:
        run: the name of what writes to it. Several may, if they have different names.
    """

    def __init__(self, url: str, run: str = "run"):
        self.url, self.run = url, run
        self.system, self.root = fsspec.core.url_to_fs(url)
        self.is_local = "file" in self.system.protocol

    def path(self, name: str) -> str:
        return f"{self.root}/{name}".rstrip("/")

    def sizes(self, folder: str = "") -> dict[str, int]:
        """The names and sizes of the files in a folder."""
        self.system.invalidate_cache()
        files = self.system.find(self.path(folder), maxdepth=1, detail=True)
        return {path.rpartition("/")[2]: each["size"] for path, each in files.items()}

    def has(self, name: str) -> bool:
        return self.system.isfile(self.path(name))

    def read(self, name: str) -> bytes:
        return self.system.cat_file(self.path(name))

    def write(self, name: str, content: bytes) -> None:
        """Writes a file. After a crash, it has the old content or the new one."""
        self.system.makedirs(self.path(name).rpartition("/")[0], exist_ok=True)
        if not self.is_local:
            self.system.pipe_file(self.path(name), content)
            return
        # Not beside the file: what a killed run leaves must not look like a part, or like a user's file.
        temporary = Path(self.path(RUN), f"{self.run}-{uuid.uuid4().hex}.unfinished")
        try:
            with open(temporary, "xb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, self.path(name))
        finally:
            temporary.unlink(missing_ok=True)

    def move(self, name: str, target: str) -> None:
        """Moves a file, in place of another one if there is one."""
        self.system.mv(self.path(name), self.path(target))

    def remove(self, name: str) -> None:
        with suppress(FileNotFoundError):
            self.system.rm_file(self.path(name))

    def remove_folder(self, name: str) -> None:
        with suppress(FileNotFoundError):
            self.system.rm(self.path(name), recursive=True)

    def remove_unfinished(self) -> None:
        """Removes what a killed process of this run has partly written."""
        for path in Path(self.path(RUN)).glob(f"{self.run}-*.unfinished"):
            path.unlink()

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keeps other runs of this name out, and removes what a killed one left unfinished; a folder that stays empty,
        too. Raises ValueError if another run has the folder."""
        if not self.is_local:
            yield
            return
        folder = Path(self.path(RUN))
        folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder / f"{self.run}.lock", timeout=0)
        try:
            lock.acquire()
        except Timeout:
            raise ValueError(f"--output {self.url} is in use by another run; expected a folder of its own.") from None
        try:
            self.remove_unfinished()
            yield
        finally:
            self.remove_unfinished()
            lock.release()
            Path(lock.lock_file).unlink(missing_ok=True)
            with suppress(OSError):
                folder.rmdir()
                folder.parent.rmdir()


# ------------------------------------------------------------------------------------------------------ parts, records


def encode_part(table: pa.Table, format: str) -> bytes:
    """A part as a file. Equal tables give equal bytes."""
    if format in ("parquet", "npy"):
        return to_parquet(table)
    if format == "jsonl":
        return "".join(to_json_text(row) + "\n" for row in table.to_pylist()).encode()
    return to_csv(table).encode()


def to_parquet(table: pa.Table) -> bytes:
    target = io.BytesIO()
    texts = [column.name for column in table.schema if column.type == pa.string()]
    # The items of lists keep the name that they have in memory, so that results of an earlier run are written as new.
    parquet.write_table(
        table, target, row_group_size=ROWS_IN_GROUP, use_dictionary=texts, use_compliant_nested_type=False
    )
    return target.getvalue()


def to_csv(table: pa.Table) -> str:
    """A table with a header. Lists, objects and booleans are JSON."""
    target = io.StringIO(newline="")
    writer = csv.writer(target, lineterminator="\n")
    writer.writerow(table.column_names)
    for row in table.to_pylist():
        writer.writerow(
            [
                value if isinstance(value, str | float) or type(value) is int or value is None else to_json_text(value)
                for value in row.values()
            ]
        )
    return target.getvalue()


def write_part(store: Store, number: int, format: str, table: pa.Table, hidden: pa.Table, record: dict) -> None:
    """Writes a part, and last its record, with which it is complete.

    Args:
        hidden: for each row its digest and numbers of tokens.
        record: what else is known of the part.
    """
    content = encode_part(table, format)
    name = part_name(number, format)
    store.write(name, content)
    record = record | {"name": name, "bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    text = json.dumps(record, ensure_ascii=False)
    store.write(f"{RECORDS}/{record_name(number)}", to_parquet(hidden.replace_schema_metadata({"record": text})))


def read_record(store: Store, name: str) -> dict:
    """The record in a file of `RECORDS`, with the table of its rows under `hidden`. Raises one of `DAMAGED` if it is
    damaged."""
    hidden = parquet.read_table(io.BytesIO(store.read(f"{RECORDS}/{name}")))
    return json.loads(hidden.schema.metadata[b"record"]) | {"hidden": hidden}


def read_records(store: Store) -> Iterator[tuple[int, dict]]:
    """The records of the parts that are complete, in their order: those whose file is there in its size."""
    sizes = store.sizes()
    for name in sorted(store.sizes(RECORDS)):
        with suppress(*DAMAGED):  # a damaged one does not count
            record = read_record(store, name)
            if sizes.get(record["name"]) == record["bytes"]:
                yield int(name.removesuffix(".parquet")), record


def read_part(store: Store, number: int) -> pa.Table:
    """The results in a part of Parquet, with the hidden columns. Raises CommandError if the part has changed."""
    record = read_record(store, record_name(number))
    content = store.read(record["name"])
    if hashlib.sha256(content).hexdigest() != record["sha256"]:
        raise CommandError(f"--update: {record['name']} is not what the run wrote; remove it to compute its rows")
    table = parquet.read_table(io.BytesIO(content), columns=record["results"])
    for name in record["hidden"].column_names:
        table = table.append_column(name, record["hidden"][name])
    return table


def find_known(records: list[tuple[int, dict]], digests: bytes) -> np.ndarray:
    """For each row where an earlier run has the result of its text: the numbers of a part and of a row in it; -1:
    nowhere. `(N, 2)`.

    Args:
        records: those of the earlier run, with their tables.
        digests: of the rows, 16 bytes each.
    """
    empty = pa.array([], pa.binary(16))
    old = pa.concat_arrays([empty, *(chunk for _, record in records for chunk in record["hidden"]["digest"].chunks)])
    buffers = [None, pa.py_buffer(digests)]
    new = pa.FixedSizeBinaryArray.from_buffers(pa.binary(16), len(digests) // 16, buffers)
    found = compute.index_in(new, value_set=old).fill_null(-1).to_numpy()
    places = [np.array([[-1, -1]])]
    for number, record in records:
        rows = np.arange(len(record["hidden"]))
        places.append(np.stack([np.full_like(rows, number), rows], axis=1))
    return np.concatenate(places)[found + 1]


# ----------------------------------------------------------------------------------------------------------- manifests


def to_json_bytes(content: dict) -> bytes:
    return (json.dumps(content, indent=2, ensure_ascii=False, default=str) + "\n").encode()


def read_manifest(store: Store, name: str = MANIFEST) -> dict | None:
    """The manifest of a run; None if there is none. Raises ValueError if it is damaged."""
    if not store.has(name):
        return None
    try:
        manifest = json.loads(store.read(name))
        manifest["settings"], manifest["inputs"], manifest["rows"], manifest["layout"]["part_rows"], manifest["machine"]
    except (ValueError, TypeError, KeyError):
        raise ValueError(f"{name} in --output is damaged; expected the one that the run wrote.") from None
    return manifest


def number_of_parts(manifest: dict) -> int:
    return -(-manifest["rows"] // manifest["layout"]["part_rows"])


def check_same(before: dict, now: dict) -> Iterator[str]:
    """Checks that a run continues the one that wrote the manifest `before`. Yields what may change last digits.

    Raises:
        ValueError: the model, an input or a flag has changed.
    """
    if before["inputs"] != now["inputs"]:
        changed = [each["input"] for each in now["inputs"] if each not in before["inputs"]]
        raise ValueError(
            f"--resume: the input has changed ({', '.join(changed) or 'other files'}); expected the same, or --update."
        )
    for group in ("settings", "layout"):
        for name in sorted(before[group].keys() | now[group].keys()):
            was, is_now = before[group].get(name), now[group].get(name)
            if was != is_now:
                raise ValueError(f"--resume: {name} was {was} and is {is_now}; expected the same.")
    if before["rows"] != now["rows"]:
        raise ValueError(f"--resume: the input had {before['rows']:,} rows and has {now['rows']:,}; expected the same.")
    for name, value in now["machine"].items():
        if before["machine"].get(name) != value:
            yield f"{name} was {before['machine'].get(name)} and is {value}; new parts may differ in the last digits"


def finish_update(store: Store, format: str) -> None:
    """Puts the parts of an update in the places of the old ones, if all are there. May be repeated after a crash."""
    if not store.has(COMPLETE):
        return
    planned = f"{UPDATE}/{MANIFEST}"
    if store.has(planned):
        parts = number_of_parts(json.loads(store.read(planned)))
        for folder in ("", f"{RECORDS}/"):
            for name in store.sizes(f"{UPDATE}/{folder}"):
                if name.startswith("part-") or folder:
                    store.move(f"{UPDATE}/{folder}{name}", f"{folder}{name}")
        for name in store.sizes(RECORDS):
            number = int(name.removesuffix(".parquet"))
            if number >= parts:
                store.remove(part_name(number, format))
                store.remove(f"{RECORDS}/{name}")
        store.move(planned, MANIFEST)
    store.remove_folder(UPDATE)


# ------------------------------------------------------------------------------------------------------------- the end


def join_arrays(store: Store, parts: int) -> None:
    """Joins the parts of the format npy into embeddings.npy and rows.csv, a line for each row, and removes them."""
    names = [part_name(number, "npy") for number in range(parts)]
    if not store.has(JOINED):
        folder = Path(store.root)
        rows = sum(parquet.read_metadata(folder / name).num_rows for name in names)
        vectors = parquet.read_schema(folder / names[0]).field("embedding").type
        shape, dtype = (rows, vectors.list_size), vectors.value_type.to_pandas_dtype()
        temporary = folder / RUN / f"{store.run}-{uuid.uuid4().hex}.unfinished"
        joined, start = np.lib.format.open_memmap(temporary, "w+", dtype, shape), 0
        with open(folder / ROWS, "w", encoding="utf-8", newline="") as lines:
            for name in names:
                table = parquet.read_table(folder / name).combine_chunks()
                values = table["embedding"].combine_chunks().flatten().to_numpy().reshape(-1, shape[1])
                joined[start : start + len(values)] = values
                start += len(values)
                text = to_csv(table.drop_columns("embedding"))
                lines.write(text if name == names[0] else text.partition("\n")[2])
        joined.flush()
        os.replace(temporary, folder / EMBEDDINGS)
        found = {name: fingerprint(store, name) for name in (EMBEDDINGS, ROWS)}
        store.write(JOINED, to_json_bytes(found))
    for name in names:
        store.remove(name)


def fingerprint(store: Store, name: str) -> dict:
    with store.system.open(store.path(name), "rb") as file:
        digest = hashlib.file_digest(file, "sha256")
        return {"bytes": file.seek(0, os.SEEK_END), "sha256": digest.hexdigest()}


def check_output(url: str) -> list[str]:
    """What is wrong with an output: files that are missing, differ from what the run wrote, or are not of the run; of
    many, the first. Raises ValueError if there is no run."""
    store = Store(url)
    manifest = read_manifest(store)
    if manifest is None:
        raise ValueError(f"--check: {url} has no {MANIFEST}; expected the --output of a run.")
    sizes, expected, wrong = store.sizes(), {}, []
    if store.has(JOINED):
        expected = json.loads(store.read(JOINED))
    else:
        for number in range(number_of_parts(manifest)):
            try:
                record = read_record(store, record_name(number))
                expected[record["name"]] = {name: record[name] for name in ("bytes", "sha256")}
            except DAMAGED:
                wrong.append(f"{RECORDS}/{record_name(number)} is missing or damaged")
    for name, before in expected.items():
        if name not in sizes:
            wrong.append(f"{name} is missing")
        elif sizes[name] != before["bytes"] or fingerprint(store, name) != before:
            wrong.append(f"{name} is not what the run wrote")
    wrong += [f"{name} is not of the run" for name in sorted(sizes.keys() - expected) if name.startswith("part-")]
    return first_of(wrong, NAMED_FILES)
