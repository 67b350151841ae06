"""What `scripts/predict.py` reads and writes: formats, columns and their types, rows that cannot be used, --check."""

import bz2
import csv
import datetime
import gzip
import io
import json
import shutil
from decimal import Decimal
from pathlib import Path

import fsspec
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from support.corpora import all_files, errors_of, read_output, refused, results, rows_for, run, write_rows

pytestmark = pytest.mark.usefixtures("quiet_only_here", "here")

ROWS = [
    {"text": "a good film", "n": 1, "x": 0.25, "code": "007", "is_new": True, "tags": ["a", "b"], "none": None},
    {"text": 'a "bad",\nfílm 🎉', "n": None, "x": 1e-07, "code": "", "is_new": False, "tags": [], "none": None},
    {"text": "ada", "n": -(2**62) - 1, "x": None, "code": "1", "is_new": None, "tags": None, "none": None},
]


def as_cell(value) -> str:
    return value if isinstance(value, str) else "" if value is None else json.dumps(value)


def write_input(name: str, rows: list[dict]) -> str:
    """Writes rows in the format and with the compression of the name."""
    format = name.split(".")[1]
    if format == "parquet":
        parquet.write_table(pa.Table.from_pylist(rows), name)
        return name
    if format in ("csv", "tsv"):
        text = io.StringIO(newline="")
        writer = csv.writer(text, delimiter={"csv": ",", "tsv": "\t"}[format])
        writer.writerows([list(rows[0]), *([as_cell(value) for value in row.values()] for row in rows)])
        content = text.getvalue()
    elif format == "json":
        content = json.dumps(rows)
    else:
        content = "".join(json.dumps(row) + "\n" for row in rows)
    compress = {"gz": gzip.compress, "bz2": bz2.compress, "zst": lambda data: pa.compress(data, "zstd", asbytes=True)}
    Path(name).write_bytes(compress.get(name.split(".")[-1], bytes)(content.encode()))
    return name


# ----------------------------------------------------------------------------------------------------- formats, columns


@pytest.mark.parametrize("format", ["parquet", "jsonl", "csv"])
@pytest.mark.parametrize(
    "name", ["in.parquet", "in.jsonl", "in.ndjson.zst", "in.json.gz", "in.csv", "in.csv.bz2", "in.tsv.gz"]
)
def test_the_columns_of_the_input_are_in_the_output(name, format, model):
    """With their types, which CSV has for numbers only. An empty cell is a missing number."""
    is_table = "sv" in name
    rows = [{**row, "text": row["text"].replace("\n", " ")} for row in ROWS] if "tsv" in name else ROWS
    found = results("out", model, write_input(name, rows), "--format", format)
    for number, (row, source) in enumerate(zip(found, rows, strict=True), 1):
        numbers = {key: source[key] for key in ("n", "x")}
        expected = {key: as_cell(value) for key, value in source.items()} | numbers if is_table else source
        expected = {"file": name, "row": number, **expected}
        if format == "csv":
            expected = {key: as_cell(value) for key, value in expected.items()}
        assert list(row) == [*expected, "embedding"]
        assert {key: row[key] for key in expected} == expected


@pytest.mark.parametrize(
    ("values", "type", "expected"),
    [
        ([1, 0.5, None], pa.float64(), [1, 0.5, None]),
        ([2**60 + 1, 0.5, None], pa.string(), ["1152921504606846977", "0.5", None]),
        ([1, "a", None], pa.string(), ["1", '"a"', None]),
        ([1, True, 2], pa.string(), ["1", "true", "2"]),
        ([[1], ["a"], None], pa.string(), ["[1]", '["a"]', None]),
        ([{"a": 1}, {"b": "c"}, None], None, [{"a": 1, "b": None}, {"a": None, "b": "c"}, None]),
        ([2**70, 1, 2], pa.string(), [str(2**70), "1", "2"]),
    ],
)
def test_values_of_several_types_have_one_or_are_json(values, type, expected, model, here):
    write_rows(here / "in.jsonl", [{"text": "a", "value": value} for value in values])
    assert run(model, "in.jsonl", "--output", "out", "--part_rows", "1") == 0
    tables = [parquet.read_table(path) for path in sorted(here.glob("out/part-*"))]
    assert pa.concat_tables(tables)["value"].to_pylist() == expected
    assert type in (None, tables[0]["value"].type)


@pytest.mark.parametrize(("last", "type"), [("2", pa.int64()), ("0.5", pa.float64()), ("a", pa.string())])
def test_the_last_row_of_a_long_table_decides_the_type_too(last, type, model, here):
    write_input("in.csv", [{"text": "", "value": value} for value in ["1"] * 1000 + [last]])
    assert run(model, "in.csv", "--output", "out", "--empty_texts", "null", "--part_rows", "500") == 0
    assert {parquet.read_schema(path).field("value").type for path in here.glob("out/part-*")} == {type}


def test_values_that_json_lacks_are_text_in_it(model):
    values = {"day": datetime.date(2020, 2, 29), "price": Decimal("1.50"), "bytes": b"\x00\xff"}
    parquet.write_table(pa.Table.from_pylist([{"text": "a", **values}]), "in.parquet")
    assert results("parquet", model, "in.parquet")[0].items() >= values.items()
    [row] = results("jsonl", model, "in.parquet", "--format", "jsonl")
    assert [row[name] for name in values] == ["2020-02-29", "1.50", "00ff"]


CELLS = st.text("0123456789.-+eE_ naif", max_size=6) | st.integers().map(str) | st.floats().map(str)


@settings(max_examples=40)
@given(st.lists(CELLS, min_size=1, max_size=3))
@example(["12101344873399975936", "0.5"])
def test_a_cell_of_csv_keeps_its_text_or_its_number(model, tmp_path_factory, cells):
    folder = tmp_path_factory.mktemp("cells")
    with open(folder / "in.csv", "w", newline="") as file:
        csv.writer(file).writerows([["text", "cell"], *(["a", cell] for cell in cells)])
    found = results(folder / "out", model, folder / "in.csv", "--format", "csv")
    for row, cell in zip(found, cells, strict=True):
        assert row["cell"] == cell or Decimal(row["cell"]) == Decimal(cell)


@pytest.mark.parametrize(
    ("content", "flags", "texts"),
    [
        (b"a good film\n\nada\r\n", [], ["a good film", "ada"]),
        (b'{"text": "a"}\n{"text": "{"}', [], ["a", "{"]),
        (b"n;text\n1;caf\xe9\n", ["--stdin_format", "csv", "--delimiter", ";", "--encoding", "cp1252"], ["café"]),
    ],
)
def test_standard_input(content, flags, texts, model, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(content)))
    found = results("out", model, "-", *flags)
    assert [row["text"] for row in found] == texts
    assert {row["file"] for row in found} == {"standard input"}


def test_several_inputs_are_read_in_their_order(model, here, monkeypatch):
    """A folder, a pattern, a URL, and a dataset with names of labels."""
    from datasets import ClassLabel, Dataset, Features, Value

    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", here / "cache")
    for folder, name in [("a", "2.txt"), ("a", "1.txt"), ("a", "README.md"), ("b", "1.txt"), ("b", "_2.txt")]:
        (here / folder).mkdir(exist_ok=True)
        (here / folder / name).write_text(f"{folder} {name}\n")
    fsspec.filesystem("memory").pipe_file("/in.txt", b"memory")
    features = Features({"text": Value("string"), "kind": ClassLabel(names=["x", "y"])})
    Dataset.from_dict({"text": ["ada", "bo"], "kind": [1, 0]}, features).to_parquet(here / "hub" / "data.parquet")
    found = results("out", model, "a", "b/*.txt", "memory://in.txt", "hub:hub:train", "--limit", "6")
    texts = ["a 1.txt", "a 2.txt", "b 1.txt", "b _2.txt", "memory", "ada"]
    assert [row["text"] for row in found] == texts
    assert [(row["row"], row["kind"]) for row in found[3:]] == [(1, None), (1, None), (1, "y")]


@pytest.mark.parametrize(
    ("columns", "flags", "kept"),
    [
        (["text", "n", "x"], [], ["text", "n", "x"]),
        (["text", "n", "x"], ["--keep_columns", "none"], []),
        (["text", "n", "x"], ["--keep_columns", "x, n"], ["n", "x"]),
        (["text", "n", "embedding"], ["--keep_columns", "n"], ["n"]),
        (["body", "n"], ["--text_column", "body"], ["body", "n"]),
    ],
)
def test_columns_that_are_kept(columns, flags, kept, model, here):
    write_rows(here / "in.jsonl", [dict.fromkeys(columns, "a")])
    [row] = results("out", model, "in.jsonl", *flags)
    assert list(row) == ["file", "row", *kept, "embedding"]


def test_arrays_of_numpy(model, here):
    name = write_input("in.csv", [{"id": f"{i}", **row} for i, row in enumerate(rows_for("embed"))])
    expected = results("out", model, name, "--embedding_dtype", "float16", "--part_rows", "7")
    argv = [model, name, "--output", "npy", "--format", "npy", "--embedding_dtype", "float16", "--part_rows", "7"]
    assert run(*argv) == 0
    assert sorted(path.name for path in (here / "npy").iterdir()) == ["__run__", "embeddings.npy", "rows.csv"]
    array = np.load("npy/embeddings.npy")
    assert array.dtype == np.float16
    assert array.tolist() == [row["embedding"] for row in expected]
    with open("npy/rows.csv", newline="") as file:
        assert [row["id"] for row in csv.DictReader(file)] == [f"{i}" for i in range(30)]
    before = all_files("npy")
    assert run(*argv, "--resume") == 0
    assert all_files("npy") == before
    assert run("--check", "--output", "npy") == 0


# -------------------------------------------------------------------------------------------- rows that cannot be used

PAIR = {"query": "a", "document": "b"}
BAD_ROWS = {
    "no JSON": ("embed", {"text": "a"}, b'{"text": '),
    "no object": ("embed", {"text": "a"}, b'["a"]'),
    "no text": ("embed", {"text": "a"}, b'{"other": "a"}'),
    "a number": ("embed", {"text": "a"}, b'{"text": 3, "other": null}'),
    "null": ("embed", {"text": "a"}, b'{"text": null}'),
    "blank": ("embed", {"text": "a"}, b'{"text": " "}'),
    "no UTF-8": ("embed", {"text": "a"}, b'{"text": "\xff"}'),
    "half a surrogate": ("embed", {"text": "a"}, b'{"text": "\\ud800"}'),
    "no second text": ("rerank", PAIR, b'{"query": "a"}'),
    "no mask": ("fill-mask", {"text": "[MASK]"}, b'{"text": "a"}'),
    "no words": ("tag", {"words": ["a"]}, b'{"words": []}'),
    "a long question": (
        "answer",
        {"question": "a", "context": "b"},
        json.dumps(dict.fromkeys(("question", "context"), "a " * 50)).encode(),
    ),
    "no label": ("classify", {"text": "a", "label": "good"}, b'{"text": "a", "label": "new"}'),
}


@pytest.mark.parametrize("name", BAD_ROWS)
def test_rows_that_cannot_be_used(name, make_bert, here, capsys):
    """One of them stops the run before a file is written, or is left out and listed."""
    task, good, bad = BAD_ROWS[name]
    line = json.dumps(good).encode()
    (here / "in.jsonl").write_bytes(b"\n".join([line, b"", bad, line]))
    argv = [make_bert(task), "in.jsonl", "--output", "out"]
    argv += {"answer": ["--stride", "5"], "classify": ["--label_column", "label"]}.get(task, [])
    refused(capsys, "in.jsonl, row 2 (line 3)", *argv)
    assert not list(here.glob("out/part-*"))
    shutil.rmtree("out", ignore_errors=True)
    for flags in ([], ["--empty_texts", "null"]):
        assert run(*argv, "--on_bad_row", "skip", *flags) == 0
        is_empty = bool(flags) and name in ("null", "blank", "no words")
        assert [row["row"] for row in read_output("out")] == ([1, 2, 3] if is_empty else [1, 3])
        assert [(each["file"], each["row"], each["line"]) for each in errors_of("out")] == [("in.jsonl", 2, 3)][
            is_empty:
        ]
        shutil.rmtree("out")


def test_rows_without_a_result_are_counted(make_bert, here):
    texts = ["a film", "", "good", "bad", None, "ada"]
    rows = [
        {"text": text, "label": label} for text, label in zip(texts, ["good", "bad"] * 2 + ["fair", "?"], strict=True)
    ]
    write_rows(here / "in.jsonl", rows)
    flags = ["--empty_texts", "null", "--on_bad_row", "skip", "--label_column", "label", "--part_rows", "2"]
    found = results("out", make_bert("classify"), "in.jsonl", *flags)
    assert [row["score"] is None for row in found] == [text in ("", None) for text in texts[:5]]
    metrics = json.loads((here / "out/__run__/metrics.json").read_text())
    right = [row["prediction"] == row["label"] for row in found if row["prediction"] is not None]
    assert metrics["accuracy"] == pytest.approx(np.mean(right))
    assert (metrics["rows"], metrics["rows_left_out"]) == (3, 3)


# ------------------------------------------------------------------------------------------------------------- --check


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


DAMAGE = {
    "a byte": lambda out: flip(out / "part-000001.parquet"),
    "the end": lambda out: (out / "part-000001.parquet").write_bytes(b"PAR1"),
    "a part": lambda out: (out / "part-000001.parquet").unlink(),
    "a record": lambda out: (out / "__run__/parts/000001.parquet").unlink(),
    "a damaged record": lambda out: (out / "__run__/parts/000001.parquet").write_bytes(b"PAR1"),
    "a part of another run": lambda out: shutil.copy(out / "part-000000.parquet", out / "part-000009.parquet"),
    "parts that are swapped": lambda out: (out / "part-000001.parquet").rename(out / "part-000000.parquet"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_check_finds_damage(name, model, here, capsys):
    write_rows(here / "in.jsonl", rows_for("embed"))
    argv = [model, "in.jsonl", "--output", "out", "--part_rows", "8"]
    assert run(*argv) == 0
    before = all_files("out")
    assert run("--check", "--output", "out") == 0
    DAMAGE[name](here / "out")
    capsys.readouterr()
    assert run("--check", "--output", "out") == 1
    assert "00000" in capsys.readouterr().err
    if "byte" not in name and "another" not in name:
        assert run(*argv, "--resume") == 0
        assert all_files("out") == before
