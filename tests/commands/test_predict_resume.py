"""`scripts/predict.py` after crashes and changes, and on hard input: nothing is lost, and nothing is silently wrong."""

import gzip
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from datasets import Dataset
from toolkit.corpus.worker import Worker
from transformers import BertConfig, BertForQuestionAnswering

import predict
from support.corpora import WORDS, content, one_line, save_model, texts, write_rows
from support.folders import SCRIPTS
from support.models import tiny_config
from toolkit.corpus import store

pytestmark = pytest.mark.usefixtures("quiet_only_here")

FLAGS = ["--processes", "1", "--threads_per_process", "1", "--part_rows", "8", "--on_bad_row", "skip"]
ROWS = [{"text": text, "id": number} for number, text in enumerate(texts(60))]
ROWS[9]["text"] = ROWS[30]["text"] = ""  # rows that cannot be used


@pytest.fixture
def data(tmp_path) -> str:
    return write_rows(tmp_path / "rows.jsonl", ROWS)


@pytest.fixture(scope="module")
def undisturbed(model, tmp_path_factory) -> dict[str, dict[str, bytes]]:
    """The files of a run that nothing disturbs, for each format."""
    folder = tmp_path_factory.mktemp("whole")
    data, found = write_rows(folder / "rows.jsonl", ROWS), {}
    before = Path.cwd()
    os.chdir(folder)  # the files are named as in the runs that are disturbed
    for name in ("parquet", "jsonl", "npy"):
        assert predict.main([model, Path(data).name, "--output", name, "--format", name, *FLAGS]) == 0
        found[name] = content(folder / name)
    os.chdir(before)
    return found


@pytest.fixture
def here(here, data) -> Path:
    return here


# ------------------------------------------------------------------------------------------------------------- resuming


@pytest.mark.parametrize("format", ["parquet", "jsonl", "npy"])
@pytest.mark.parametrize("lost", [["part-000003"], ["part-000000", "part-000007", "part-000004"], []])
def test_missing_parts_are_computed_and_nothing_else(format, lost, model, undisturbed, here, monkeypatch):
    argv = [model, "rows.jsonl", "--output", "out", "--format", format, *FLAGS]
    if format == "npy":  # the parts are removed at the end
        monkeypatch.setattr("toolkit.corpus.run.join_arrays", lambda *_: None)
    assert predict.main(argv) == 0
    monkeypatch.undo()
    os.chdir(here)
    for name in lost:
        (here / "out" / f"{name}.{format}").unlink()
    (here / "out" / "__run__" / "errors.jsonl").unlink()
    computed, run = [], Worker.run
    with monkeypatch.context() as patch:
        patch.setattr(Worker, "run", lambda self, part: computed.append(part.number) or run(self, part))
        assert predict.main([*argv, "--resume"]) == 0
    assert sorted(computed) == sorted(int(name[-6:]) for name in lost)
    assert content(here / "out") == undisturbed[format]
    assert predict.main([*argv, "--resume"]) == 0
    assert content(here / "out") == undisturbed[format]


def test_after_kill_9_the_files_are_the_same(model, undisturbed, here):
    """Kills at random moments, from the first writing on."""
    command = [sys.executable, SCRIPTS / "predict.py", model, "rows.jsonl", "--output", "out", *FLAGS]
    numbers, kills = random.Random(0), 0
    while kills < 3:
        process = subprocess.Popen([*command, "--resume"], stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        while process.poll() is None and not (here / "out" / "__run__" / "manifest.json").exists():
            time.sleep(0.01)
        time.sleep(numbers.random() / 2)
        kills += process.poll() is None
        process.kill()
        process.wait()
        if (here / "out" / "__run__" / "errors.jsonl").exists():  # it was finished
            shutil.rmtree(here / "out")
    assert subprocess.run([*command, "--resume"], capture_output=True, check=False).returncode == 0
    assert content(here / "out") == undisturbed["parquet"]


def test_a_part_is_whole_or_not_there(model, here, monkeypatch):
    """A full disk: what was finished is kept."""
    write, count = store.flush, []

    def full(file):
        count.append(file.name)
        if len(count) == 9:
            raise OSError(28, "No space left on device", file.name)
        write(file)

    monkeypatch.setattr(store, "flush", full)
    argv = [model, "rows.jsonl", "--output", "out", *FLAGS]
    assert predict.main(argv) == 2
    names = {path.name for path in (here / "out").iterdir()}
    assert not [name for name in names if name.startswith(".part")]
    assert len([name for name in names if name.startswith("part-")]) >= 2
    monkeypatch.setattr(store, "flush", write)
    assert predict.main([*argv, "--resume"]) == 0
    assert len(list((here / "out").glob("part-*"))) == 8


def test_ctrl_c_finishes_the_parts_in_work(model, undisturbed, here, monkeypatch, capsys):
    run, computed = Worker.run, []

    def interrupted(self, part):
        done = run(self, part)
        computed.append(part.number)
        if computed.index(part.number) == 1:  # true in one thread only: a second Ctrl-C ends the process at once
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.1)
        return done

    argv = [model, "rows.jsonl", "--output", "out", *FLAGS]
    with monkeypatch.context() as patch:
        patch.setattr(Worker, "run", interrupted)
        one_line(argv, capsys, "--resume", code=130)
    assert 2 <= len(computed) < 8
    assert {path.name for path in (here / "out").glob("part-*")} == {f"part-{i:06d}.parquet" for i in computed}
    assert signal.getsignal(signal.SIGINT) is not interrupted
    assert predict.main([*argv, "--resume"]) == 0
    assert content(here / "out") == undisturbed["parquet"]


def test_what_changed_is_named(model, here, capsys, tmp_path_factory):
    argv = [model, "rows.jsonl", "--output", "out", *FLAGS]
    assert predict.main([*argv, "--limit", "20"]) == 0
    again = [*argv, "--limit", "20", "--resume"]
    before = content(here / "out")
    one_line([*argv, "--limit", "21", "--resume"], capsys, "--limit", "20", "21")
    one_line([*again, "--pooling", "cls"], capsys, "--pooling", "cls")
    one_line([*again, "--threads_per_process", "2"], capsys, "--threads_per_process", "1", "2")
    one_line([*again, "--format", "csv"], capsys, "--format", "csv")
    other = save_model(tmp_path_factory.mktemp("other"), seed=1)
    one_line([other, *again[1:]], capsys, "model", model)
    write_rows(here / "more.jsonl", ROWS)
    one_line([model, "rows.jsonl", "more.jsonl", *again[2:]], capsys, "more.jsonl")
    one_line([model, "more.jsonl", *again[2:]], capsys, "rows.jsonl", "more.jsonl")
    (here / "rows.jsonl").write_text(json.dumps(ROWS[0]) + "\n")
    one_line(again, capsys, "rows.jsonl", "size")
    write_rows(here / "rows.jsonl", [{**row, "text": row["text"].replace("word1", "word2")} for row in ROWS])
    one_line(again, capsys, "rows.jsonl", "sha256")
    one_line(argv, capsys, "--output", "--resume", "--update")
    (here / "out" / "__run__" / "manifest.json").write_text("{")
    one_line(again, capsys, "manifest.json")
    assert content(here / "out") == before


def test_an_input_that_was_touched_or_is_named_by_another_path_is_the_same(model, undisturbed, here):
    assert predict.main([model, "rows.jsonl", "--output", "out", *FLAGS]) == 0
    (here / "sub").mkdir()
    os.utime(here / "rows.jsonl", (1, 1))
    for name in ("rows.jsonl", f"{here}/rows.jsonl", "sub/../rows.jsonl", "row*.jsonl", f"file://{here}/rows.jsonl"):
        (here / "out" / "part-000002.parquet").unlink()
        assert predict.main([model, name, "--output", "out", *FLAGS, "--resume"]) == 0
        assert content(here / "out") == undisturbed["parquet"]


def test_the_number_of_threads_of_a_run_is_kept(model, here):
    argv = [model, "rows.jsonl", "--output", "out", "--on_bad_row", "skip", "--processes", "1"]
    assert predict.main([*argv, "--threads_per_process", "1"]) == 0
    assert predict.main([*argv, "--resume"]) == 0
    assert json.loads((here / "out" / "__run__" / "manifest.json").read_text())["threads_per_process"] == 1


def test_the_default_batch_is_recorded(model, here, capsys):
    argv = [model, "rows.jsonl", "--output", "out", "--on_bad_row", "skip", "--processes", "1", "--device", "cpu"]
    assert predict.main(argv) == 0
    assert json.loads((here / "out" / "__run__" / "manifest.json").read_text())["flags"]["tokens_per_batch"] == 2048
    assert predict.main([*argv, "--resume", "--tokens_per_batch", "2048"]) == 0
    one_line([*argv, "--resume", "--tokens_per_batch", "4096"], capsys, "tokens_per_batch", "2048", "4096")


def test_a_folder_that_another_run_has(model, here, capsys):
    from filelock import FileLock

    (here / "out" / "__run__").mkdir(parents=True)
    with FileLock(here / "out" / "__run__" / "run.lock"):
        one_line([model, "rows.jsonl", "--output", "out", *FLAGS], capsys, "in use")


# ------------------------------------------------------------------------------------------------------------- bad rows


def test_rows_that_cannot_be_used(model, here, capsys):
    """A part has the same rows of the input, whatever is skipped."""
    argv = [model, "rows.jsonl", "--output", "out", "--format", "jsonl", *FLAGS]
    assert predict.main(argv) == 0
    parts = [path.read_text().splitlines() for path in sorted((here / "out").glob("part-*"))]
    assert [len(lines) for lines in parts] == [8, 7, 8, 7, 8, 8, 8, 4]
    errors = [json.loads(line) for line in (here / "out" / "__run__" / "errors.jsonl").read_text().splitlines()]
    assert [(error["file"], error["row"], error["line"]) for error in errors] == [
        ("rows.jsonl", 10, 10),
        ("rows.jsonl", 31, 31),
    ]
    argv = [model, "rows.jsonl", "--output", "stopped", *FLAGS[:-1], "stop"]
    one_line(argv, capsys, "rows.jsonl, row 10 (line 10)", "'text' is empty")
    assert not (here / "stopped").exists()  # it is found before the model is opened


BAD = {
    "not JSON": b'{"text": \n',
    "another type": b'["a"]\n',
    "no text": b'{"other": "a"}\n',
    "a number": b'{"text": 3}\n',
    "null": b'{"text": null}\n',
    "blank": b'{"text": " "}\n',
    "not UTF-8": b'{"text": "\xff"}\n',
    "half a surrogate": b'{"text": "\\ud800"}\n',
}
GOOD = {
    "a zero byte": b'{"text": "a \\u0000 film"}\n',
    "very long": json.dumps({"text": "word1 " * 20000}).encode() + b"\n",
    "emoji": '{"text": "🎉 film"}\n'.encode(),
    "unknown words only": b'{"text": "xyzzy"}\n',
    "other line ends": b'{"text": "a"}\r\n',
}


@pytest.mark.parametrize("name", [*BAD, *GOOD])
def test_hard_rows(name, model, here, capsys):
    (here / "hard.jsonl").write_bytes(b'{"text": "a film"}\n' + (BAD | GOOD)[name] + b'{"text": "good"}\n')
    argv = [model, "hard.jsonl", "--output", "out", "--format", "jsonl", *FLAGS[:6]]
    if name in BAD:
        one_line(argv, capsys, "hard.jsonl, row 2 (line 2)")
    assert predict.main([*argv, "--on_bad_row", "skip"]) == 0
    rows = [json.loads(line)["row"] for line in (here / "out" / "part-000000.jsonl").read_text().splitlines()]
    assert rows == ([1, 3] if name in BAD else [1, 2, 3])


@pytest.mark.parametrize(
    ("ids", "row"), [([1, 2, 1], 3), ([1, None, 2], 2), (["a", {"b": 1}, "c"], 2), ([1, True, 2], 2)]
)
def test_ids_that_cannot_be_used(ids, row, model, here, capsys):
    write_rows(here / "ids.jsonl", [{"text": "a", "key": key} for key in ids])
    argv = [model, "ids.jsonl", "--output", "out", "--id_column", "key", *FLAGS[:6]]
    one_line(argv, capsys, f"row {row}", "'key'")


# ----------------------------------------------------------------------------------------------------------- hard input


def damaged(here: Path, name: str) -> str:
    """A file that cannot be read to its end, after rows that can."""
    lines = "".join(json.dumps(row) + "\n" for row in ROWS[:9] * 400).encode()
    if name == "cut.jsonl.gz":
        whole = gzip.compress(os.urandom(20000).hex().encode() + b"\n")
        (here / name).write_bytes(gzip.compress(lines) + whole[: len(whole) // 2])
    elif name == "cut.parquet":
        Dataset.from_list(ROWS).to_parquet(here / name)
        (here / name).write_bytes((here / name).read_bytes()[:-100])
    elif name == "header.csv":
        (here / name).write_text("text,text\na,b\n")
    else:
        (here / name).write_bytes(b"not a gzip file")
    return name


@pytest.mark.parametrize("name", ["cut.jsonl.gz", "cut.parquet", "header.csv", "not.txt.gz"])
def test_files_that_cannot_be_read(name, model, here, capsys):
    argv = [model, damaged(here, name), "--output", "out", *FLAGS]
    one_line(argv, capsys, name)
    assert not (here / "out").exists()


def save_question_answering(folder: Path) -> str:
    BertForQuestionAnswering(tiny_config(BertConfig, vocab_size=len(WORDS))).save_pretrained(folder)
    save_model(folder / "other")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(folder / "other" / name, folder)
    return str(folder)


def without_tokenizer(folder: Path) -> str:
    save_model(folder)
    for path in folder.glob("*token*"):
        path.unlink()
    return str(folder)


def of_type(folder: Path, **fields) -> str:
    save_model(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "auto_map": {}, **fields}))
    return str(folder)


MODELS = {
    "unknown": (lambda folder: str(folder / "nothing"), "no such folder"),
    "without a tokenizer": (without_tokenizer, "tokenizer"),
    "of another type": (lambda folder: of_type(folder, model_type="roberta"), "roberta"),
    "a generator": (lambda folder: of_type(folder, is_decoder=True), "generate"),
    "of another task": (save_question_answering, "BertForQuestionAnswering"),
}


@pytest.mark.parametrize("name", MODELS)
def test_models_that_cannot_be_used(name, here, tmp_path_factory, capsys):
    make, word = MODELS[name]
    folder = make(tmp_path_factory.mktemp("bad"))
    capsys.readouterr()
    one_line([folder, "rows.jsonl", "--output", "out", *FLAGS], capsys, folder, word)
    assert not (here / "out").exists()


def test_a_model_without_the_head_of_the_task(model, here, capsys):
    one_line([model, "rows.jsonl", "--output", "out", "--task", "classify", *FLAGS], capsys, model, "classifier")


def test_int8_on_a_processor_without_its_instructions(model, here, capsys, monkeypatch):
    monkeypatch.setattr("toolkit.corpus.model.find_library", lambda: None)
    one_line([model, "rows.jsonl", "--output", "out", "--dtype", "int8", *FLAGS], capsys, "--dtype", "C++")


@pytest.mark.parametrize("name", ["model.safetensors", "probe.json"])
def test_verify(name, here, capsys, tmp_path_factory):
    folder = Path(save_model(tmp_path_factory.mktemp("model")))
    argv = [str(folder), "rows.jsonl", *FLAGS, "--verify"]
    assert predict.main([*argv, "--output", "good"]) == 0
    content = bytearray((folder / name).read_bytes())
    content[-3] ^= 1
    (folder / name).write_bytes(content)
    one_line([*argv, "--output", "damaged"], capsys, "probe.json")
    (folder / "probe.json").unlink()
    one_line([*argv, "--output", "without"], capsys, "probe.json")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--text_column", "body"], ["'body'", "'text'"]),
        (["--id_column", "key"], ["'key'", "--id_column"]),
        (["--text_pair_column", "id"], ["--text_pair_column", "classify"]),
        (["--label_column", "id"], ["--label_column", "classify"]),
        (["--task", "rerank"], ["--text_pair_column"]),
        (["--threshold", "2"], ["2"]),
        (["--threshold", "0.5"], ["--threshold", "classify"]),
        (["--top_k", "3"], ["--top_k", "fill-mask"]),
        (["--max_length", "41"], ["--max_length", "40"]),
        (["--truncate_dim", "33"], ["--truncate_dim", "32"]),
        (["--task", "classify", "--format", "npy"], ["npy"]),
        (["--device", "nothing"], ["nothing"]),
        (["--device", "cuda", "--processes", "7"], ["cuda"]),
        (["--ray_address", "auto"], ["--engine"]),
        (["--limit", "0"], ["'0'"]),
        (["--processes", "many"], ["'many'"]),
    ],
)
def test_flags_that_cannot_be_used(flags, words, model, here, capsys):
    one_line([model, "rows.jsonl", "--output", "out", *FLAGS, *flags], capsys, *words)


@pytest.mark.parametrize(
    ("inputs", "word"),
    [
        (["nothing.csv"], "nothing.csv"),
        (["*.csv"], "*.csv"),
        (["rows.jsonl", "rows.jsonl"], "twice"),
        (["rows.xlsx"], ".xlsx"),
        (["empty.txt"], "empty.txt"),
    ],
)
def test_inputs_that_cannot_be_used(inputs, word, model, here, capsys):
    (here / "rows.xlsx").write_text("x")
    (here / "empty.txt").write_text("")
    one_line([model, *inputs, "--output", "out", *FLAGS], capsys, word)


def test_an_output_that_cannot_be_used(model, here, capsys):
    (here / "file").write_text("x")
    one_line([model, "rows.jsonl", "--output", "file", *FLAGS], capsys, "file")
    one_line([model, "rows.jsonl", "--output", "file/out", *FLAGS], capsys, "file")
    (here / "full").mkdir()
    (here / "full" / "thesis.txt").write_text("x")
    one_line([model, "rows.jsonl", "--output", "full", *FLAGS], capsys, "not empty")
    one_line([model, "rows.jsonl", "--output", "full", *FLAGS, "--resume"], capsys, "manifest.json")
    assert sorted(path.name for path in (here / "full").iterdir()) == ["thesis.txt"]


def test_without_pyarrow_the_extra_is_named(model, here, capsys, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    one_line([model, "rows.jsonl", "--output", "out", *FLAGS], capsys, "pyarrow", "scratchbert[corpus]")
