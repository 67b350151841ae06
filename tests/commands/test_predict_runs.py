"""Runs of `scripts/predict.py` that are killed, stopped, shared, resumed and updated write the bytes of a whole run."""

import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

import fsspec
import psutil
import pytest
from filelock import FileLock
from hypothesis import given, settings
from hypothesis import strategies as st

from support.corpora import all_files, errors_of, refused, rows_for, run, save_model, texts, write_rows
from support.folders import ROOT, SCRIPTS
from toolkit.corpus import workers

pytestmark = pytest.mark.usefixtures("quiet_only_here", "here")

FLAGS = ["--part_rows", "8", "--on_bad_row", "skip", "--empty_texts", "null"]
ROWS = [*rows_for("embed", 20), {"id": 20, "text": ""}, {"id": 21}, *rows_for("embed", 8)]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}


@pytest.fixture
def here(here, model) -> Path:
    """A folder with rows and the output `whole`, of one process that nothing disturbs."""
    write_rows(here / "rows.jsonl", ROWS)
    assert run(model, "rows.jsonl", *FLAGS, "--output", "whole") == 0
    assert len(errors_of("whole")) == 1
    return here


def start(*argv: str) -> subprocess.Popen:
    """Starts the command in a group of processes of its own."""
    command = [sys.executable, SCRIPTS / "predict.py", *argv, *FLAGS]
    return subprocess.Popen(command, env=ENVIRONMENT, stderr=subprocess.PIPE, text=True, start_new_session=True)


def wait_for_parts(process: subprocess.Popen, folder: str, count: int) -> None:
    while len(list(Path(folder).glob("part-*"))) < count:
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.02)


# -------------------------------------------------------------------------------------------------- killed and stopped


@pytest.mark.parametrize("is_update", [False, True])
def test_killed_before_any_write(is_update, model, here):
    argv = [model, "rows.jsonl", *FLAGS, "--part_rows", "16", "--processes", "1"]
    if is_update:
        assert run(*argv, "--output", "before") == 0
        write_rows(here / "rows.jsonl", [*ROWS[3:9], {"id": 7, "text": "a new film"}, *ROWS[:1]])
    assert run(*argv, "--output", "expected") == 0
    argv += ["--update" if is_update else "--resume", "--output", "out"]
    command = [sys.executable, ROOT / "tests" / "commands" / "killed_predict.py"]
    command += ["before" if is_update else "-", *argv]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, check=True)
    codes = json.loads(done.stdout.splitlines()[-1])
    assert codes == [-signal.SIGKILL, 0] * (len(codes) // 2) + [0]
    assert len(codes) > 12
    for number in range(1, len(codes) // 2 + 2):
        assert all_files(f"out-{number}") == all_files("expected")


@pytest.mark.parametrize("what", ["a worker", signal.SIGINT, signal.SIGTERM])
def test_two_processes_that_are_stopped(what, model, here):
    """By the loss of a process, or by a signal to all of them, as a terminal and a scheduler send it."""
    write_rows(here / "rows.jsonl", ROWS * 20)
    assert run(model, "rows.jsonl", *FLAGS, "--output", "expected") == 0
    argv = [model, "rows.jsonl", "--output", "out", "--processes", "2"]
    process = start(*argv)
    wait_for_parts(process, "out", 3)
    children = psutil.Process(process.pid).children()
    if what == "a worker":
        first, _ = (each for each in children if "spawn_main" in str(each.cmdline()))  # two
        first.kill()
    else:
        os.killpg(process.pid, what)
    error = process.communicate(timeout=300)[1]
    assert process.returncode == (2 if what == "a worker" else 130), error
    assert "--resume" in error.splitlines()[-1]
    assert 3 <= len(list(here.glob("out/part-*"))) < 75
    _, alive = psutil.wait_procs(children, timeout=10)
    assert {each.status() for each in alive} <= {psutil.STATUS_ZOMBIE}
    assert run(*argv[:4], *FLAGS, "--resume") == 0
    assert all_files("out") == all_files("expected")


def test_a_process_that_starts_ignores_signals_to_all_of_them(monkeypatch):
    """It inherits that they are blocked, in the place of a part."""
    monkeypatch.setattr(workers, "run_part", partial(signal.pthread_sigmask, signal.SIG_BLOCK))
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        assert workers.submit(pool, []).result() >= {signal.SIGINT, signal.SIGTERM}
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, [])


# ---------------------------------------------------------------------------------------------------- resumed, shared


@pytest.mark.parametrize("format", ["parquet", "jsonl", "csv"])
def test_two_shards_fill_one_folder(format, model, here):
    argv = [model, "rows.jsonl", *FLAGS, "--format", format, "--output"]
    assert run(*argv, "expected") == 0
    for number in (2, 1, 1):
        assert run(*argv, "out", "--shard", f"{number}/2") == 0
    assert all_files("out") == all_files("expected")


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        (["--pooling", "cls"], "pooling"),
        (["--part_rows", "9"], "part_rows"),
        (["--format", "csv"], "format"),
        (["--dtype", "bfloat16"], "dtype"),
        (["--keep_columns", "id"], "keep_columns"),
        (["--limit", "9"], "limit"),
        ("rows", "rows.jsonl"),
        ("model", "model"),
        ("manifest", "manifest.json"),
        ("update", "--update"),
        ("lock", "in use"),
    ],
)
def test_a_run_that_cannot_be_resumed(changed, named, model, here, capsys):
    """Is left as it is. --update computes what the change requires."""
    folder = shutil.copytree(model, here / "model")
    shutil.copytree("whole", "out")
    if changed == "rows":
        write_rows(here / "rows.jsonl", [*ROWS[:-1], {"text": "new"}])
    elif changed == "model":
        save_model(folder, seed=1)
    elif changed == "manifest":
        (here / "out" / "__run__" / "manifest.json").write_text("{")
    elif changed == "update":
        shutil.copytree("out/__run__", "out/__run__/update/__run__")
    flags = changed if isinstance(changed, list) else []
    argv, before = [folder, "rows.jsonl", *FLAGS, *flags, "--output"], all_files("out")
    with FileLock("out/__run__/run.lock" if changed == "lock" else "other.lock") as lock:
        refused(capsys, named, *argv, "out", "--resume")
    Path(lock.lock_file).unlink()  # the refused run leaves it, because it is another run's
    assert all_files("out") == before
    if changed != "manifest" and "--format" not in flags:
        assert run(*argv, "out", "--update") == 0
        assert run(*argv, "new") == 0
        assert all_files("out") == all_files("new")


# -------------------------------------------------------------------------------------------------------------- updated

INPUT = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 2)), min_size=1, max_size=30)


@settings(max_examples=15)
@given(INPUT, st.lists(INPUT, min_size=1, max_size=2))
def test_an_update_writes_the_files_of_a_new_run(model, tmp_path_factory, before, changes):
    """Whatever rows are removed, added, changed, moved and repeated, again and again."""
    folder, some = tmp_path_factory.mktemp("update"), [*texts(8), "", None]
    argv = [model, folder / "rows.jsonl", *FLAGS, "--output"]
    for numbers in [before, *changes]:
        write_rows(folder / "rows.jsonl", [{"text": some[number], "id": id} for number, id in numbers])
        assert run(*argv, folder / "updated", "--update") == 0
    assert run(*argv, folder / "new") == 0
    assert all_files(folder / "updated") == all_files(folder / "new")


@pytest.mark.parametrize("task", ["classify", "tag", "rerank", "answer", "generate", "fill-mask"])
def test_an_update_computes_only_texts_that_are_new(task, make_bert, here, capsys):
    """Without the weights of the model if there are none."""
    rows, folder = rows_for(task, 20), make_bert(task)
    argv = [folder, "rows.jsonl", *FLAGS, "--output"]
    flags = ["--max_new_tokens", "4"] if task == "generate" else []
    write_rows(here / "rows.jsonl", rows)
    assert run(*argv, "out", *flags) == 0
    moved = [rows[13], *rows[3:9], {**rows[4], "id": 50}, *rows[15:2:-1]]
    write_rows(here / "rows.jsonl", moved)
    assert run(*argv, "new", *flags) == 0
    capsys.readouterr()
    assert run(*argv, "out", *flags, "--update") == 0
    assert all_files("out") == all_files("new")


def test_a_store_without_renaming(model, here):
    """The bytes of a local folder; --resume and --update of it."""
    store = fsspec.filesystem("memory")
    argv = [model, "rows.jsonl", *FLAGS, "--output"]

    def stored() -> dict[str, bytes]:
        return {name.removeprefix("/corpus/out/"): store.cat_file(name) for name in store.find("/corpus/out")}

    assert run(*argv, "memory://corpus/out") == 0
    assert stored() == all_files("whole")
    store.rm_file("/corpus/out/part-000002.parquet")
    assert run(*argv, "memory://corpus/out", "--resume") == 0
    assert stored() == all_files("whole")
    write_rows(here / "rows.jsonl", ROWS[:3] + ROWS[7:12])
    assert run(*argv, "memory://corpus/out", "--update") == 0
    assert run(*argv, "new") == 0
    assert stored() == all_files("new")
    assert run("--check", "--output", "memory://corpus/out") == 0
