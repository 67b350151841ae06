"""Uses of `scripts/predict.py` that are refused: exit code 2, and one line that names the flag or the file."""

from pathlib import Path

import numpy as np
import pytest

from support.corpora import refused, rows_for, run, save_model, write_rows

pytestmark = pytest.mark.usefixtures("quiet_only_here", "here")


@pytest.fixture
def here(here) -> Path:
    """A folder with good and bad inputs."""
    write_rows(here / "rows.jsonl", rows_for("embed", 3))
    write_rows(here / "clash.jsonl", [{"text": "a", "embedding": 1}])
    (here / "rows.xlsx").write_text("x")
    (here / "empty.txt").write_text("")
    (here / "twice.csv").write_text("text,text\na,b\n")
    (here / "semicolon.csv").write_text("n;text\n1;a\n")
    (here / "utf16.csv").write_text("text\na\n", encoding="utf-16")
    (here / "cut.jsonl.gz").write_bytes(b"\x1f\x8b\x08")
    (here / "cut.parquet").write_bytes(b"PAR1")
    (here / "full").mkdir()
    (here / "full" / "thesis.txt").write_text("x")
    for name, values in {
        "ranges": [[0] * 32, [1] * 32],
        "order": [[1], [0]],
        "shape": [1, 2],
        "nan": [[np.nan], [1]],
    }.items():
        np.save(here / f"{name}.npy", values)
    return here


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        ("--task sing", "--task"),
        ("--limit 0", "--limit"),
        ("--processes many", "--processes"),
        ("--threshold 2", "--threshold"),
        ("--shard 3/2", "--shard"),
        ("--option x", "--option"),
        ("--format npy --shard 1/2", "--format"),
        ("--format npy --empty_texts null", "--format"),
        ("--format csv --update", "--update"),
        ("--update --resume", "--update"),
        ("--update --shard 1/2", "--update"),
        ("--text a", "--text"),
        ("--text_pair a", "--text_pair"),
        ("--prompt a --prompt_name b", "--prompt"),
        ("--prompt_name b", "--prompt_name"),
        ("--threshold 0.5", "--threshold"),
        ("--top_k 3", "--top_k"),
        ("--words_column text", "--words_column"),
        ("--option top_p=0.5", "--option"),
        ("--task fill-mask --normalize", "--normalize"),
        ("--task fill-mask --embedding_dtype int8", "--embedding_dtype"),
        ("--task fill-mask --format npy", "--format"),
        ("--task classify", "classifier"),
        ("--task rerank", "--task"),
        ("--label_column id", "--label_column"),
        ("--text_column body", "--text_column"),
        ("--encoding klingon", "--encoding"),
        ("--keep_columns body", "--keep_columns"),
        ("--max_length 41", "--max_length"),
        ("--max_length 2", "--max_length"),
        ("--truncate_dim 33", "--truncate_dim"),
        ("--embedding_dtype uint8", "--ranges"),
        ("--ranges ranges.npy", "--ranges"),
        ("--embedding_dtype int8 --ranges no.npy", "--ranges"),
        ("--embedding_dtype int8 --ranges order.npy", "--ranges"),
        ("--embedding_dtype int8 --ranges shape.npy", "--ranges"),
        ("--embedding_dtype int8 --ranges nan.npy", "--ranges"),
        ("--device nothing", "nothing"),
        ("--device cuda --processes 99", "cuda"),
        ("--ray --device mps", "--device"),
        ("--verify", "probe.json"),
        ("--output full", "--output"),
        ("--output full --resume", "--output"),
        ("--output rows.jsonl", "rows.jsonl"),
        ("--output rows.jsonl/out", "rows.jsonl"),
        ("rows.jsonl", "twice"),
        ("nothing.csv", "nothing.csv"),
        ("*.tsv", "*.tsv"),
        ("rows.xlsx", ".xlsx"),
        ("empty.txt", "empty.txt"),
        ("twice.csv", "twice.csv"),
        ("semicolon.csv", "semicolon.csv"),
        ("utf16.csv", "--encoding"),
        ("cut.jsonl.gz", "cut.jsonl.gz"),
        ("cut.parquet", "cut.parquet"),
        ("clash.jsonl", "embedding"),
        ("hub:nothing", "nothing"),
    ],
)
def test_uses_that_are_refused(argv, named, make_bert, here, capsys):
    refused(capsys, named, make_bert(), "rows.jsonl", "--output", "out", *argv.split())
    assert not list(here.glob("out/part-*"))
    assert [path.name for path in here.glob("full/*")] == ["thesis.txt"]


@pytest.mark.parametrize(
    ("task", "flags", "named"),
    [
        ("answer", "--stride 39", "--max_length"),
        ("answer", "--null_threshold often", "--null_threshold"),
        ("generate", "--option nothing=1", "nothing"),
        ("generate", "--num_beams 2 --option num_return_sequences=3", "num_return_sequences"),
        ("continue", "--max_new_tokens 40", "max_new_tokens"),
        ("fill-mask", "--top_k 61", "--top_k"),
        ("tag", "--words_column other", "--words_column"),
        ("tag", "--words_column text --label_column mood", "--label_column"),
        ("generate", "--label_column mood", "--label_column"),
        ("answer", "--label_column mood", "--label_column"),
    ],
)
def test_flags_of_a_task_that_are_refused(task, flags, named, make_bert, here, capsys):
    rows = write_rows(here / "own.jsonl", rows_for(task, 3))
    refused(capsys, named, make_bert(task), rows, "--output", "out", *flags.split())


def without(folder: str, pattern: str) -> None:
    for path in Path(folder).glob(pattern):
        path.unlink()


def change(folder: str, field: str, value: str) -> None:
    path = Path(folder, "config.json")
    path.write_text(path.read_text().replace(field, value))


MODELS = {
    "no folder": (lambda folder: without(folder, "*"), "model"),
    "no tokenizer": (lambda folder: without(folder, "*token*"), "tokenizer"),
    "no weights": (lambda folder: without(folder, "*.safetensors"), "safetensors"),
    "another type": (lambda folder: change(folder, '"bert"', '"roberta"'), "roberta"),
    "no JSON": (lambda folder: change(folder, "{", ""), "config.json"),
    "another module": (
        lambda folder: Path(folder, "modules.json").write_text('[{"type": "own.Module"}]'),
        "own.Module",
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_models_that_are_refused(name, here, capsys):
    damage, named = MODELS[name]
    folder = save_model(here / "model", kind="bert")
    damage(folder)
    refused(capsys, named, folder, "rows.jsonl", "--output", "out")
    assert not list(here.glob("out/part-*"))


def test_a_part_that_has_changed_is_not_used(model, here, capsys):
    argv = [model, "rows.jsonl", "--output", "out", "--part_rows", "2"]
    assert run(*argv) == 0
    path = here / "out" / "part-000000.parquet"
    content = path.read_bytes()
    path.write_bytes(content.replace(b"rows.jsonl", b"r0ws.jsonl"))
    refused(capsys, "part-000000.parquet", *argv, "--update")


@pytest.mark.parametrize(
    "argv", ["", "--check", "--check --output nothing", "--check model --output out", "model", "model rows.jsonl"]
)
def test_a_command_line_that_lacks_something(argv, here, capsys):
    refused(capsys, "predict.py", *argv.split())
