"""The output of `scripts/predict.py`: columns, ids, what readers of datasets find, checks, shares, and lost files."""

import csv
import datetime
import decimal
import json
import shutil
from pathlib import Path

import numpy as np
import pandas
import pyarrow as pa
import pytest
from datasets import ClassLabel, Dataset, Features, Value, load_dataset
from pyarrow import dataset, parquet
from toolkit.corpus.formats import decode_part, encode_part
from toolkit.corpus.worker import slices

import predict
from support.corpora import all_files, save_model, texts, write_rows
from toolkit.corpus import worker

pytestmark = pytest.mark.usefixtures("quiet_only_here", "here")

FLAGS = ["--processes", "1", "--threads_per_process", "1", "--part_rows", "8"]
TEXTS = texts(20)


def rows_of(**columns) -> list[dict]:
    return [
        {"text": text, **{name: values[number] for name, values in columns.items()}}
        for number, text in enumerate(TEXTS)
    ]


def run(model: str, rows: str | list[dict], *flags: str, output: str = "out", code: int = 0) -> pa.Table | None:
    """Runs the command, and returns its rows."""
    data = rows if isinstance(rows, str) else write_rows(Path("rows.jsonl"), rows)
    assert predict.main([model, data, "--output", output, *FLAGS, *flags]) == code
    return dataset.dataset(output).to_table() if code == 0 and "--format" not in flags else None


# -------------------------------------------------------------------------------------------------------------- readers


@pytest.mark.parametrize("format", ["parquet", "jsonl", "csv"])
def test_readers_of_datasets_find_the_rows_and_nothing_else(format, here):
    """With skipped rows, metrics and a picture beside the parts."""
    folder = save_model(here / "model", "classify")
    rows = rows_of(label=["bad", "good"] * 10)
    rows[3]["text"] = ""
    run(folder, rows, "--label_column", "label", "--on_bad_row", "skip", "--format", format)
    assert {path.name for path in (here / "out" / "__run__").iterdir()} >= {"errors.jsonl", "metrics.json"}
    if format == "parquet":
        assert len(pandas.read_parquet("out")) == 19
        assert pandas.read_parquet("out")["text"].tolist() == [row["text"] for row in rows if row["text"]]
    assert dataset.dataset("out", format=format if format != "jsonl" else "json").count_rows() == 19
    assert len(load_dataset("out", cache_dir=str(here / "cache"))["train"]) == 19
    assert sorted(path.name for path in here.glob("out/*.*")) == [f"part-{i:06d}.{format}" for i in range(3)]


# -------------------------------------------------------------------------------------------------------------- columns


TYPED = {
    "small": pa.array(range(20), pa.int8()),
    "large": pa.array([2**64 - 1 - number for number in range(20)], pa.uint64()),
    "day": pa.array([datetime.date(2026, 1, 1 + number) for number in range(20)], pa.date32()),
    "time": pa.array([datetime.datetime(2026, 1, 1, 1, number) for number in range(20)], pa.timestamp("us", "UTC")),
    "price": pa.array([decimal.Decimal("1.10")] * 20, pa.decimal128(8, 2)),
    "flag": pa.array([True, None] * 10),
    "tags": pa.array([["a", "b"], []] * 10, pa.list_(pa.string())),
    "meta": pa.array([{"a": 1, "b": "x"}] * 20),
    "blob": pa.array([b"\xff\x00"] * 20),
    "nothing": pa.nulls(20),
}


def test_columns_of_parquet_keep_their_types(model):
    given = pa.table({"text": TEXTS, **TYPED})
    parquet.write_table(given, "data.parquet")
    found = run(model, "data.parquet")
    assert found.column_names == ["file", "row", "text", *TYPED, "embedding"]
    assert found.select(given.column_names).equals(given)
    found = run(model, "data.parquet", "--keep_columns", "price,large", output="some")
    assert found.column_names == ["file", "row", "price", "large", "embedding"]
    assert run(model, "data.parquet", "--keep_columns", "none", output="none").column_names[:2] == ["file", "row"]


def test_columns_in_text_formats(model):
    parquet.write_table(pa.table({"text": TEXTS, **TYPED}), "data.parquet")
    run(model, "data.parquet", "--format", "jsonl", output="jsonl")
    run(model, "data.parquet", "--format", "csv", output="csv")
    first = json.loads(Path("jsonl/part-000000.jsonl").read_text().splitlines()[0])
    assert first["large"] == 2**64 - 1
    assert (first["day"], first["price"], first["flag"], first["tags"]) == ("2026-01-01", "1.10", True, ["a", "b"])
    row = read(Path("csv/part-000000.csv"))[0]
    assert (row["large"], row["price"], row["meta"]) == (str(2**64 - 1), "1.10", '{"a": 1, "b": "x"}')


def test_names_of_labels_stay(model):
    features = Features({"text": Value("string"), "topic": ClassLabel(names=["food", "sport"])})
    Dataset.from_dict({"text": TEXTS, "topic": [0, 1] * 10}, features).to_parquet("data.parquet")
    assert run(model, "data.parquet").column("topic").to_pylist() == ["food", "sport"] * 10


def test_columns_of_csv_are_numbers_if_nothing_is_lost(model):
    columns = {
        "count": [str(number) for number in range(20)],
        "zip": ["00123", *["10115"] * 19],
        "share": ["0.5", "-1.25", "", *["2"] * 17],
        "version": ["1.10", *["1.1"] * 19],
        "gap": ["7", "", *["8"] * 18],
        "huge": [str(2**63), *["1"] * 19],
        "mixed": ["1", "n/a", *["2"] * 18],
        "late": [*["1"] * 19, "x"],
        "infinite": ["inf", "nan", *["1"] * 18],
    }
    with open("data.csv", "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["text", *columns])
        writer.writerows(zip(TEXTS, *columns.values(), strict=True))
    found = run(model, "data.csv")
    types = {name: str(found.schema.field(name).type) for name in columns}
    assert types == {
        "count": "int64",
        "zip": "string",
        "share": "double",
        "version": "string",
        "gap": "int64",
        "huge": "uint64",
        "mixed": "string",
        "late": "string",
        "infinite": "string",
    }
    assert found.column("gap").to_pylist()[:3] == [7, None, 8]
    assert found.column("huge").to_pylist()[0] == 2**63
    assert found.column("zip").to_pylist()[0] == "00123"


def test_texts_that_are_numbers_stay_texts(model):
    Path("data.csv").write_text("text\n" + "".join(f"{number}\n" for number in range(20)))
    assert run(model, "data.csv").column("text").to_pylist() == [str(number) for number in range(20)]


def test_columns_of_json(model):
    rows = rows_of(
        n=[1, *[0.5] * 19],
        name=["a", *[None] * 19],
        odd=[1, "x", *[None] * 18],
        tags=[["a"], *[[]] * 19],
        ok=[True] * 20,
        big=[2**64] * 20,
    )
    del rows[4]["name"]
    found = run(model, rows)
    types = {name: str(found.schema.field(name).type) for name in rows[0]}
    assert types["n"] == "double"
    assert (types["name"], types["odd"], types["ok"], types["big"]) == ("string", "string", "bool", "string")
    assert found.schema.field("tags").type == pa.list_(pa.string())
    assert found.column("odd").to_pylist()[:3] == ["1", '"x"', None]
    assert found.column("n").to_pylist()[:2] == [1.0, 0.5]


def test_a_column_that_only_later_rows_have(model):
    rows = [{"text": text, **({"late": number} if number >= 150 else {})} for number, text in enumerate(texts(160))]
    assert run(model, rows).column("late").to_pylist() == [None] * 150 + list(range(150, 160))


def test_a_column_with_the_name_of_a_result_is_renamed(here, capsys):
    folder = save_model(here / "model", "classify")
    found = run(folder, rows_of(label=["x"] * 20, score=[3] * 20))
    assert found.column("input_label").to_pylist() == ["x"] * 20
    assert found.column("input_score").to_pylist() == [3] * 20
    assert set(found.column("label").to_pylist()) <= {"bad", "fair", "good"}
    run(folder, rows_of(label=["x"] * 20, input_label=["y"] * 20), output="twice", code=2)
    assert "input_label" in capsys.readouterr().err.splitlines()[-1]


def test_a_column_that_does_not_exist(model, capsys):
    run(model, rows_of(), "--keep_columns", "text,other", code=2)
    line = capsys.readouterr().err.splitlines()[-1]
    assert "--keep_columns" in line
    assert "'other'" in line


# ------------------------------------------------------------------------------------------------------------------ ids


@pytest.mark.parametrize(
    ("ids", "kind"),
    [
        (list(range(20)), "int64"),
        ([2**64 - 1 - number for number in range(20)], "uint64"),
        ([f"r{number}" for number in range(20)], "string"),
        ([*range(19), "x"], "string"),
        ([-1, 2**63, *range(18)], "string"),
        ([number / 2 for number in range(20)], "string"),
    ],
)
def test_types_of_ids(ids, kind, model):
    found = run(model, rows_of(key=ids), "--id_column", "key")
    assert str(found.schema.field("id").type) == kind
    assert found.column("id").to_pylist() == (list(map(str, ids)) if kind == "string" else ids)
    assert "key" not in found.column_names


def test_ids_of_csv_are_integers(model):
    Path("data.csv").write_text("key,text\n" + "".join(f'{i * 3},"{text}"\n' for i, text in enumerate(TEXTS)))
    found = run(model, "data.csv", "--id_column", "key")
    assert found.column("id").to_pylist() == [number * 3 for number in range(20)]


@pytest.mark.parametrize(
    ("wrong", "row"),
    [
        ({3: 0}, 4),
        ({19: 7}, 20),
        ({2: None}, 3),
        ({2: ""}, 3),
        ({2: "nan"}, 3),
        ({2: "NaN "}, 3),
        ({2: True}, 3),
        ({2: float("nan")}, 3),
        ({2: [1]}, 3),
        ({2: "0"}, 3),
    ],
)
def test_ids_that_cannot_be_used(wrong, row, model, here, capsys):
    """They are found before anything is computed; or left out, with the same output whatever stands in the way."""
    ids = [wrong.get(number, number) for number in range(20)]
    run(model, rows_of(key=ids), "--id_column", "key", code=2)
    line = capsys.readouterr().err.splitlines()[-1]
    assert f"row {row}" in line
    assert "'key'" in line
    assert not (here / "out").exists()
    found = run(model, rows_of(key=ids), "--id_column", "key", "--on_bad_row", "skip")
    assert [str(each) for each in found.column("id").to_pylist()] == [str(i) for i in range(20) if i != row - 1]
    [error] = map(json.loads, (here / "out" / "__run__" / "errors.jsonl").read_text().splitlines())
    assert error["row"] == row


# -------------------------------------------------------------------------------------------------- rows without a text


@pytest.mark.parametrize("task", ["embed", "classify", "tag", "rerank", "fill-mask"])
@pytest.mark.parametrize("format", ["parquet", "csv"])
def test_empty_texts_have_rows_without_results(task, format, here):
    folder = save_model(here / "model", task)
    rows = [{"text": f"{text} [MASK]", "text_pair": "a", "n": number} for number, text in enumerate(TEXTS)]
    rows[1]["text"], rows[9]["text"], rows[10]["text"] = "", None, "  "
    for row in rows[16:]:
        row["text"] = ""  # a part without a text
    flags = ["--task", task, "--format", format, "--on_bad_row", "skip"]
    run(folder, rows, *flags, "--empty_texts", "null", output="null")
    run(folder, rows, *flags, output="bad")
    found = [row for path in sorted(here.glob(f"null/part-*.{format}")) for row in read(path)]
    without = [row for path in sorted(here.glob(f"bad/part-*.{format}")) for row in read(path)]
    assert [int(row["n"]) for row in found] == list(range(20))
    filled = [row for row in found if int(row["n"]) not in (1, 9, 10, 16, 17, 18, 19)]
    assert filled == without
    results = {"file", "row", "text", "text_pair", "n"} ^ found[0].keys()
    assert results
    assert all(not found[number][name] for number in (1, 9, 10, 16) for name in results)


def read(path: Path) -> list[dict]:
    if path.suffix == ".parquet":
        return parquet.read_table(path).to_pylist()
    return list(csv.DictReader(path.read_text().splitlines()))


@pytest.mark.parametrize("task", ["embed", "classify", "tag", "rerank", "fill-mask"])
@pytest.mark.parametrize("format", ["parquet", "jsonl", "csv"])
def test_a_part_without_a_usable_row(task, format, here, capsys):
    folder = save_model(here / "model", task)
    rows = [
        {"text": "" if 8 <= number < 16 else f"{text} [MASK]", "text_pair": "a"} for number, text in enumerate(TEXTS)
    ]
    run(folder, rows, "--task", task, "--format", format, "--on_bad_row", "skip")
    assert len(list(here.glob(f"out/part-*.{format}"))) == 3
    if format == "parquet":
        schemas = {parquet.read_schema(path) for path in here.glob("out/part-*")}
        assert len(schemas) == 1
        assert dataset.dataset("out").count_rows() == 12
    run(folder, rows, "--task", task, "--format", format, output="stopped", code=2)
    assert "row 9" in capsys.readouterr().err.splitlines()[-1]


def test_a_corpus_without_a_usable_row(model, here):
    run(model, [{"text": ""}] * 20, "--on_bad_row", "skip", "--format", "npy")
    assert np.load(here / "out" / "embeddings.npy").shape == (0, 32)


# ---------------------------------------------------------------------------------------------------- memory of a part


def test_texts_are_tokenised_in_slices(model, monkeypatch):
    expected = run(model, rows_of())
    sizes, open_task = [], worker.open_task
    monkeypatch.setattr(worker, "CHARACTERS_AT_ONCE", 100)

    def observed(job):
        task = open_task(job)
        original = task.encode
        task.encode = lambda given, pairs: sizes.append(sum(map(len, given))) or original(given, pairs)
        return task

    monkeypatch.setattr(worker, "open_task", observed)
    assert run(model, rows_of(), output="sliced").equals(expected)
    assert len(sizes) > 10
    assert all(size <= 100 or size in map(len, TEXTS) for size in sizes)


def test_bounds_of_slices(monkeypatch):
    monkeypatch.setattr(worker, "CHARACTERS_AT_ONCE", 10)
    assert list(slices([])) == [(0, 0)]
    assert list(slices([20])) == [(0, 1)]
    assert list(slices([4, 4, 4, 30, 1])) == [(0, 2), (2, 3), (3, 4), (4, 5)]


# --------------------------------------------------------------------------------------------------- shares and checks


def test_shares_fill_one_folder(model, here, capsys):
    rows = rows_of(n=list(range(20)))
    rows[9]["text"] = ""
    flags = ["--on_bad_row", "skip"]
    run(model, rows, *flags, output="whole")
    for share in ("2/3", "3/3", "3/3"):
        run(model, rows, *flags, "--shard", share, output="shared")
        assert not (here / "shared" / "__run__" / "errors.jsonl").exists()
    assert {path.name for path in here.glob("shared/part-*")} == {"part-000001.parquet", "part-000002.parquet"}
    run(model, rows, *flags, "--shard", "1/3", output="shared")
    assert all_files(here / "shared") == all_files(here / "whole")
    capsys.readouterr()
    run(model, rows, *flags, "--shard", "1/3", "--pooling", "cls", output="shared", code=2)
    assert "--pooling" in capsys.readouterr().err


def test_a_share_does_not_remove_what_another_writes(model, here):
    run(model, rows_of(), "--shard", "1/3")
    other = here / "out" / "__run__" / "shard-2-of-3.unfinished"
    other.mkdir()
    (other / "file").write_text("x")
    run(model, rows_of(), "--shard", "1/3")
    assert (other / "file").exists()


@pytest.mark.parametrize("share", ["0/3", "4/3", "x", "1", "1/0", "-1/3"])
def test_shares_that_do_not_exist(share, model, capsys):
    with pytest.raises(SystemExit) if share.startswith("-") else pytest.MonkeyPatch.context():
        run(model, rows_of(), "--shard", share, code=2)
    assert "--shard" in capsys.readouterr().err


def damage(name: str, change) -> None:
    path = Path("out", name)
    if change is None:
        path.unlink()
    elif isinstance(change, int):
        data = bytearray(path.read_bytes())
        data[change] ^= 1
        path.write_bytes(data)
    else:
        path.write_bytes(change)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("part-000001.parquet", None),
        ("part-000001.parquet", b""),
        ("part-000001.parquet", 40),
        ("part-000009.parquet", b"x"),
        ("__run__/parts/000002.json", None),
        ("__run__/parts/000002.json", b"{"),
    ],
)
def test_check_finds_what_differs(name, change, model, capsys):
    run(model, rows_of())
    assert predict.main(["--check", "--output", "out"]) == 0
    damage(name, change)
    capsys.readouterr()
    assert predict.main(["--check", "--output", "out"]) == 1
    assert name in capsys.readouterr().err


@pytest.mark.parametrize("name", ["embeddings.npy", "rows.csv"])
def test_check_of_joined_arrays(name, model):
    run(model, rows_of(), "--format", "npy")
    assert predict.main(["--check", "--output", "out"]) == 0
    damage(name, 150)
    assert predict.main(["--check", "--output", "out"]) == 1


def test_check_of_what_is_no_output(model, here, capsys):
    assert predict.main(["--check", "--output", str(here)]) == 2
    assert "manifest.json" in capsys.readouterr().err
    for argv in (["--check"], ["--check", model, "--output", "out"], [model, "--output", "out"], []):
        with pytest.raises(SystemExit):
            predict.main(argv)


# ----------------------------------------------------------------------------------------------------------- lost files


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("part-000001.parquet", None),
        ("part-000001.parquet", b""),
        ("__run__/parts/000002.json", None),
        ("__run__/parts/000002.json", b"{}"),
        ("__run__/parts", None),
    ],
)
def test_resume_computes_what_is_lost_or_cut(name, change, model, here):
    run(model, rows_of())
    before = all_files(here / "out")
    shutil.rmtree(here / "out" / name) if name == "__run__/parts" else damage(name, change)
    run(model, rows_of(), "--resume")
    assert all_files(here / "out") == before


def test_files_of_the_user_stay(model, here):
    run(model, rows_of())
    names = [".my-20250101", ".part-000000-17.parquet", "_notes-1.txt", "__run__/.mine-3"]
    for name in names:
        (here / "out" / name).write_text("x")
    run(model, rows_of(), "--resume")
    run(model, rows_of()[:12], "--update")
    assert all((here / "out" / name).read_text() == "x" for name in names)


@pytest.mark.parametrize("processes", ["1", "2"])
def test_the_output_is_removed_during_a_run(processes, model, here, monkeypatch, capsys):
    rows = [{"text": text} for text in texts(400)]
    # A rename takes all files away at once; `rmtree` fails when a part is written meanwhile.
    parts = predict_parts(monkeypatch, lambda: (here / "out").rename(here / "removed"))
    run(model, rows, "--processes", processes, code=2)
    line = [line for line in capsys.readouterr().err.splitlines() if line][-1]
    assert "--output" in line
    assert "out" in line
    assert parts[-1] < 20  # of 50


def predict_parts(monkeypatch, disturb) -> list[int]:
    """The numbers of the parts that are asked for. `disturb` is called before the fourth."""
    from toolkit.corpus.sources import Corpus

    asked, parts = [], Corpus.parts

    def disturbed(self, *args):
        for part in parts(self, *args):
            asked.append(part.number)
            if len(asked) == 4:
                disturb()
            yield part

    monkeypatch.setattr(Corpus, "parts", disturbed)
    return asked


def test_an_input_that_changes_during_a_run(model, here, monkeypatch, capsys):
    rows = [{"text": text} for text in texts(400)]

    def extend() -> None:
        with open("rows.jsonl", "a") as file:
            file.write('{"text": "a film"}\n')

    predict_parts(monkeypatch, extend)
    run(model, rows, code=2)
    assert "rows.jsonl" in capsys.readouterr().err.splitlines()[-1]


def test_after_a_wrong_flag_the_corrected_command_runs(model, here):
    run(model, rows_of(), "--max_length", "41", code=2)
    assert not (here / "out").exists()
    run(model, rows_of())


def test_an_input_that_was_touched_or_moved_is_the_same(model, here):
    run(model, rows_of(), "--limit", "8")
    (here / "elsewhere").mkdir()
    shutil.move("rows.jsonl", "elsewhere/rows.jsonl")
    (here / "elsewhere" / "rows.jsonl").touch()
    before = all_files(here / "out")
    (here / "out" / "part-000000.parquet").unlink()
    run(model, "elsewhere/rows.jsonl", "--limit", "8", "--resume")
    assert all_files(here / "out") == before


def test_a_dry_run_needs_no_output(model, here, capsys):
    path = write_rows(here / "rows.jsonl", rows_of(n=list(range(20))))
    assert predict.main([model, path, "--dry_run", *FLAGS]) == 0
    out = capsys.readouterr().out
    assert "file, row, text, n, embedding" in out
    assert "20 rows" in out
    assert list(here.iterdir()) == [Path(path)]


# -------------------------------------------------------------------------------------------------------------- formats


@pytest.mark.parametrize("format", ["parquet", "jsonl", "csv"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "int8", "uint8"])
def test_results_are_read_as_they_were_written(format, dtype):
    numbers = np.random.default_rng(0)
    floats = numbers.standard_normal(6).astype(np.float32)
    kinds = {
        "embedding": f"vector of 3 {dtype}",
        "score": "number",
        "label": "text",
        "labels": "texts",
        "scores": "numbers",
        "words": "lists of texts",
        "found": "lists of numbers",
        "entities": "entities of words",
        "all": 'scores of ["a", "b"]',
    }
    columns = {
        "embedding": (numbers.standard_normal((6, 3)) * 9).astype(dtype),
        "score": floats,
        "label": ["a", 'b"', "c\nd", "é,", " ", "0"],
        "labels": [["a"], [], ["b", "c"], [], [], ["\r\n"]],
        "scores": [[float(each)] * n for n, each in enumerate(floats)],
        "words": [[["a", "b"]], [], [["c"]]] * 2,
        "found": [[[float(each), 0.5]] for each in floats],
        "entities": [
            [{"entity_group": "P", "score": float(each), "word": "x", "start": 0, "end": 1}] for each in floats
        ],
        "all": [{"a": float(each), "b": 1.0} for each in floats],
    }
    [(_, written)] = encode_part(format, kinds, columns).items()
    found = decode_part(format, kinds, written)
    assert encode_part(format, kinds, found) == {format: written}
    assert found["embedding"].tobytes() == columns["embedding"].tobytes()
    assert list(found["label"]) == columns["label"]
