"""`scripts/predict.py`: its results beside those of transformers' own classes and pipelines, its inputs and formats."""

import csv
import io
import itertools
import json

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import parquet
from transformers import AutoTokenizer

import predict
from support.corpora import reference_of, save_model, texts, write_rows
from support.tasks import compute
from toolkit.batching import batches_by_length, packed

pytestmark = pytest.mark.usefixtures("quiet_only_here")

TEXTS = texts(40)
MANY_TEXTS = texts(200)


@pytest.fixture
def run(tmp_path, capsys):
    """Runs the command on rows, and returns the rows of its output."""
    runs = []

    def start(folder: str, rows: list[dict] | str, *flags: str, format: str = "jsonl", code: int = 0) -> list[dict]:
        path = rows if isinstance(rows, str) else write_rows(tmp_path / f"rows-{len(runs)}.jsonl", rows)
        output = tmp_path / f"out-{len(runs)}"
        runs.append(output)
        given = [folder, path, "--output", str(output), "--processes", "1", "--threads_per_process", "1"]
        assert predict.main([*given, "--part_rows", "16", "--format", format, *flags]) == code
        return read(output, format)

    return start


def read(output, format: str) -> list[dict]:
    """The rows of all parts, in order."""
    found = []
    for path in sorted(output.glob(f"part-*.{format}")):
        if format == "parquet":
            found += parquet.read_table(path).to_pylist()
        elif format == "csv":
            found += csv.DictReader(io.StringIO(path.read_text(encoding="utf-8")))
        else:
            found += [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return found


def enumerate_texts(values: list[str]) -> list[list[str]]:
    return [[str(number), text] for number, text in enumerate(values)]


def rows_of(values: list[str], **more) -> list[dict]:
    return [{"text": text, **{name: column[i] for name, column in more.items()}} for i, text in enumerate(values)]


# -------------------------------------------------------------------------------------------------------------- embed


@torch.no_grad()
def embeddings(folder: str, values: list[str]) -> torch.Tensor:
    """The means over the tokens, by BertModel, one text at a time."""
    bert, tokenizer = reference_of(folder, "embed"), AutoTokenizer.from_pretrained(folder)
    encoded = [tokenizer(text, truncation=True, max_length=40, return_tensors="pt") for text in values]
    return torch.stack([bert(**each).last_hidden_state[0].mean(0) for each in encoded])


def assert_close(found, expected, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(torch.tensor(np.array(found), dtype=torch.float32), expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize("batch", ["1", "50", "16384"])
def test_batches_change_nothing_but_rounding(batch, make_bert, run):
    found = run(make_bert(), rows_of(TEXTS), "--tokens_per_batch", batch)
    assert_close([row["embedding"] for row in found], embeddings(make_bert(), TEXTS))


@pytest.mark.parametrize(("dtype", "tolerance"), [("float16", 2e-3), ("int8", 2e-2)])
@pytest.mark.parametrize("format", ["parquet", "jsonl", "csv", "npy"])
def test_types_of_embeddings(dtype, tolerance, format, make_bert, run, tmp_path):
    found = run(make_bert(), rows_of(TEXTS), "--embedding_dtype", dtype, format=format)
    if format == "npy":
        vectors = np.load(tmp_path / "out-0" / "embeddings.npy")
        found = list(csv.DictReader((tmp_path / "out-0" / "rows.csv").open(encoding="utf-8")))
    elif format == "csv":
        vectors = np.array([json.loads(row["embedding"]) for row in found])
    else:
        vectors = np.array([row["embedding"] for row in found])
    if format in ("parquet", "npy"):
        types = {"parquet": {"float16": "halffloat", "int8": "int8"}}
        if format == "npy":
            assert vectors.dtype == dtype
        else:
            schema = parquet.read_schema(tmp_path / "out-0" / "part-000000.parquet")
            assert str(schema.field("embedding").type.value_type) == types["parquet"][dtype]
            assert schema.field("embedding").type.list_size == 32
    scales = np.array([float(row["scale"]) for row in found])[:, None] if dtype == "int8" else 1
    assert_close(vectors.astype(np.float32) * scales, embeddings(make_bert(), TEXTS), tolerance)
    assert [int(row["row"]) for row in found] == list(range(1, 41))


# --------------------------------------------------------------------------------------------------------- other tasks


@pytest.mark.parametrize("format", ["jsonl", "csv", "parquet"])
def test_entities_and_scores_in_every_format(format, make_bert, run):
    for task, name in (("tag", "entities"), ("classify", "all_scores")):
        flags = ["--all_scores"] if task == "classify" else []
        expected = compute(make_bert(task), task, TEXTS, all_scores=True)[name]
        found = [row[name] for row in run(make_bert(task), rows_of(TEXTS), *flags, format=format)]
        assert [json.loads(value) if format == "csv" else value for value in found] == expected


@pytest.mark.parametrize("task", ["embed", "classify", "tag", "rerank", "fill-mask"])
@pytest.mark.parametrize("kind", ["bert", "scratchbert"])
def test_the_task_is_what_the_class_is_for(task, kind, run, tmp_path):
    folder = save_model(tmp_path / "model", task, kind)
    rows = [{"text": "a film [MASK]", "text_pair": "good"}]
    [row] = run(folder, rows, *(["--text_pair_column", "text_pair"] if task == "rerank" else []))
    column = {"embed": "embedding", "classify": "label", "tag": "entities", "rerank": "score", "fill-mask": "words"}
    assert column[task] in row


# -------------------------------------------------------------------------------------------------------------- metrics


def test_metrics_are_those_of_scikit_learn(make_bert, run, tmp_path):
    from sklearn.metrics import accuracy_score, f1_score

    labels = ["bad", "fair", "good", "bad"] * 10
    for format in ("parquet", "jsonl", "csv"):
        found = run(make_bert("classify"), rows_of(TEXTS, y=labels), "--label_column", "y", format=format)
        assert [row["reference"] for row in found] == labels
        predictions = [row["label"] for row in found]
        output = sorted(tmp_path.glob("out-*"))[-1]
        metrics = json.loads((output / "__run__" / "metrics.json").read_text())
        assert metrics["accuracy"] == pytest.approx(accuracy_score(labels, predictions))
        assert metrics["f1_macro"] == pytest.approx(f1_score(labels, predictions, average="macro"))
        assert (output / "__run__" / "confusion_matrix.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("format", ["parquet", "jsonl", "csv"])
def test_metrics_of_several_labels_and_of_numbers(format, make_bert, run, tmp_path):
    from sklearn.metrics import accuracy_score, mean_squared_error

    several = make_bert("classify", problem_type="multi_label_classification")
    labels = ["bad|good", "fair", "", "good"] * 10
    found = run(several, rows_of(TEXTS, y=labels), "--label_column", "y", format=format)
    given = [json.loads(row["labels"]) if format == "csv" else row["labels"] for row in found]
    sets = [
        [[name in row for name in ("bad", "fair", "good")] for row in rows]
        for rows in ([label.split("|") for label in labels], given)
    ]
    metrics = json.loads((tmp_path / "out-0" / "__run__" / "metrics.json").read_text())
    assert metrics["subset_accuracy"] == pytest.approx(accuracy_score(*sets))
    numbers = [float(i % 7) for i in range(40)]
    rows = [{"query": text, "document": text, "y": y} for text, y in zip(TEXTS, numbers, strict=True)]
    found = run(make_bert("rerank"), rows, "--label_column", "y", format=format)
    metrics = json.loads((tmp_path / "out-1" / "__run__" / "metrics.json").read_text())
    scores = [float(row["score"]) for row in found]
    assert metrics["mean_squared_error"] == pytest.approx(mean_squared_error(numbers, scores), rel=1e-5)


def test_a_label_that_the_model_does_not_have(make_bert, run, capsys):
    run(make_bert("classify"), rows_of(TEXTS, y=["bad"] * 39 + ["wonderful"]), "--label_column", "y", code=2)
    line = capsys.readouterr().err.splitlines()[-1]
    assert "row 40" in line
    assert "'wonderful'" in line


# --------------------------------------------------------------------------------------------------------------- inputs


@pytest.mark.parametrize(("name", "delimiter"), [("x.csv", ";"), ("x.txt", r"\t"), ("x.tsv", None)])
def test_tables_with_another_delimiter_and_unpaired_quotation_marks(name, delimiter, make_bert, run, tmp_path):
    values = ['"good film', "a film", 'bad "film"'] if name != "x.csv" else ["good film", "a, film", "bad film"]
    lines = [(delimiter or "\t").replace(r"\t", "\t").join(row) for row in (["id", "text"], *enumerate_texts(values))]
    (tmp_path / name).write_text("\n".join(lines))
    found = run(
        make_bert(), str(tmp_path / name), "--id_column", "id", *(["--delimiter", delimiter] if delimiter else [])
    )
    assert [row["id"] for row in found] == [0, 1, 2]
    assert [row["embedding"] for row in found] == [row["embedding"] for row in run(make_bert(), rows_of(values))]


def test_another_delimiter_is_another_input(make_bert, run, tmp_path, capsys):
    (tmp_path / "x.csv").write_text("text;id\na;1\n")
    run(make_bert(), str(tmp_path / "x.csv"), code=2)
    assert "--delimiter" in capsys.readouterr().err
    argv = [make_bert(), str(tmp_path / "x.csv"), "--output", str(tmp_path / "out"), "--processes", "1"]
    assert predict.main([*argv, "--delimiter", ";"]) == 0
    assert predict.main([*argv, "--text_column", "text;id", "--resume"]) == 2
    assert "delimiter" in capsys.readouterr().err


def test_a_dataset_in_a_folder(make_bert, run, tmp_path):
    (tmp_path / "data").mkdir()
    write_rows(tmp_path / "data" / "train.jsonl", rows_of(TEXTS))
    expected = [row["embedding"] for row in run(make_bert(), rows_of(TEXTS))]
    for name in (f"hub:{tmp_path / 'data'}", f"hub:{tmp_path / 'data'}:train"):
        assert [row["embedding"] for row in run(make_bert(), name)] == expected


@pytest.mark.parametrize(("ids", "kind"), [(list(range(100, 140)), int), ([f"r{i}" for i in range(40)], str)])
@pytest.mark.parametrize("format", ["jsonl", "parquet"])
def test_ids_stand_for_places(ids, kind, format, make_bert, run):
    found = run(make_bert(), rows_of(TEXTS, key=ids), "--id_column", "key", format=format)
    assert [row["id"] for row in found] == ids
    assert all(type(row["id"]) is kind for row in found)
    assert "file" not in found[0]


def test_a_limit(make_bert, run):
    assert [row["row"] for row in run(make_bert(), rows_of(TEXTS), "--limit", "18")] == list(range(1, 19))


def test_a_dry_run_writes_nothing(make_bert, run, tmp_path, capsys):
    assert run(make_bert(), rows_of(TEXTS), "--dry_run") == []
    assert not (tmp_path / "out-0").exists()
    assert "embedding" in capsys.readouterr().out


def test_truncated_texts_are_counted(make_bert, run, tmp_path, capsys):
    run(make_bert(), rows_of(["a", "word1 " * 38, "word1 " * 39, "word1 " * 500]))
    assert json.loads((tmp_path / "out-0" / "__run__" / "parts" / "000000.json").read_text())["truncated"] == 2
    assert capsys.readouterr().out.splitlines()[1].startswith("2 ")


# -------------------------------------------------------------------------------------------------------------- batches


@given(st.lists(st.integers(1, 50)), st.integers(1, 120))
def test_batches_have_every_sequence_once_and_no_more_tokens_than_allowed(lengths, tokens):
    found = list(batches_by_length(lengths, tokens))
    assert sorted(index for batch in found for index in batch) == list(range(len(lengths)))
    sizes = [[lengths[index] for index in batch] for batch in found]
    assert all(sum(batch) <= tokens or len(batch) == 1 for batch in sizes)
    assert [size for batch in sizes for size in batch] == sorted(lengths, reverse=True)


@given(st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=5), min_size=1, max_size=5))
def test_packed_sequences(ids):
    inputs = packed(ids, [[1] * len(each) for each in ids], "cpu")
    ends = inputs["cu_seq_lens_q"].tolist()
    row = inputs["input_ids"][0].tolist()
    assert [row[start:end] for start, end in itertools.pairwise(ends)] == ids
    assert inputs["token_type_ids"].shape == inputs["input_ids"].shape
    assert inputs["max_length_q"] == max(map(len, ids))
