"""`scripts/predict.py` in several processes: they write what one writes, also if they are killed."""

import argparse
import json
import os
import pickle
import random
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest
from toolkit.corpus.job import Job
from toolkit.corpus.sources import Corpus, open_inputs
from toolkit.corpus.store import open_store
from toolkit.corpus.worker import Worker

import predict
from modeling_scratchbert.cpu.library import find_library
from support.corpora import content, one_line, save_model, texts, write_rows
from support.folders import SCRIPTS
from toolkit.cli import CommandError
from toolkit.corpus import devices, local

pytestmark = pytest.mark.usefixtures("quiet_only_here")

FLAGS = ["--processes", "2", "--threads_per_process", "1", "--part_rows", "8"]
ROWS = [{"text": text, "id": number} for number, text in enumerate(texts(60))]


@pytest.fixture
def here(here) -> Path:
    write_rows(here / "rows.jsonl", ROWS)
    return here


@pytest.fixture(scope="module")
def undisturbed(model, tmp_path_factory) -> dict[str, bytes]:
    """The files of one process that nothing disturbs."""
    folder = tmp_path_factory.mktemp("whole")
    write_rows(folder / "rows.jsonl", ROWS)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)  # the files are named as in the runs that are disturbed
        assert predict.main([model, "rows.jsonl", "--output", "out", *FLAGS, "--processes", "1"]) == 0
    return content(folder / "out")


def worker_processes(pid: int | None = None) -> list[psutil.Process]:
    """The processes of the workers of a process."""
    found = []
    for child in psutil.Process(pid).children():
        with suppress(psutil.Error):  # it has ended
            found += [child] if any("spawn_main" in part for part in child.cmdline()) else []
    return found


@contextmanager
def killer(kills: int, pause):
    """Kills worker processes one after the other, each `pause()` seconds after it was found. Yields those killed."""
    killed, is_over = [], threading.Event()

    def work():
        while len(killed) < kills and not is_over.wait(0.01):
            living = [each for each in worker_processes() if each.pid not in killed]
            if living and not is_over.wait(pause()):
                each = random.choice(living)
                with suppress(psutil.Error):
                    each.kill()
                    killed.append(each.pid)

    thread = threading.Thread(target=work)
    thread.start()
    yield killed
    is_over.set()
    thread.join()


def job_of(model: str) -> Job:
    kept, kinds = {"text": "text", "id": "input_id"}, {"text": "text", "id": "integer"}
    return Job(model, "embed", "out", options={"text_column": "text"}, part_rows=8, keep=kept, kinds=kinds)


def parts_of(job: Job) -> list:
    return list(Corpus(open_inputs(["rows.jsonl"])).parts(job.part_rows, lambda number: True))


# ------------------------------------------------------------------------------------------------------ the same files


def test_two_processes_write_the_same_files(model, undisturbed, here):
    assert predict.main([model, "rows.jsonl", "--output", "out", *FLAGS]) == 0
    assert content(here / "out") == undisturbed


TASKS = [
    ("embed", "float32"),
    ("embed", "bfloat16"),
    ("embed", "int8"),
    ("classify", "float32"),
    ("tag", "float32"),
    ("rerank", "float32"),
    ("fill-mask", "float32"),
]


@pytest.mark.parametrize(("task", "dtype"), TASKS)
def test_processes_batches_and_threads_change_no_byte(task, dtype, tmp_path, monkeypatch):
    if dtype == "int8" and not find_library():
        pytest.skip("the processor has no VNNI instructions")
    monkeypatch.chdir(tmp_path)
    sizes = {"hidden_size": 48, "num_attention_heads": 3, "intermediate_size": 1100}
    folder, found = save_model(tmp_path / "model", task, **sizes), {}
    pairs = [f"{text} [MASK]" if task == "fill-mask" else text for text in texts(50)]
    rows = [{"text": text, "text_pair": text[::2]} if task == "rerank" else {"text": text} for text in pairs]
    data = Path(write_rows(tmp_path / "rows.jsonl", rows)).name
    for processes, threads, tokens in (("1", "1", "4096"), ("1", "3", "7"), ("2", "2", "60")):
        flags = ["--processes", processes, "--threads_per_process", threads, "--tokens_per_batch", tokens]
        argv = [folder, data, "--output", tokens, "--task", task, "--dtype", dtype, "--part_rows", "20", *flags]
        assert predict.main(argv) == 0
        found[tokens] = {name: held for name, held in content(tmp_path / tokens).items() if name.startswith("part-")}
    assert len(found["7"]) == 3
    assert found["7"] == found["60"] == found["4096"]


def test_results_do_not_depend_on_what_a_process_computed_before(model, here):
    job = Job(model, "embed", "out", options={"text_column": "text"})
    parts = list(Corpus(open_inputs(["rows.jsonl"])).parts(3, lambda number: True))
    forward, backward = Worker(job), Worker(job)
    first = {part.number: forward.compute(part)[0]["embedding"].tobytes() for part in parts}
    assert first == {part.number: backward.compute(part)[0]["embedding"].tobytes() for part in parts[::-1]}


# ------------------------------------------------------------------------------------------------------ dead processes


def test_a_process_that_dies_at_work_is_replaced(model, undisturbed, here, monkeypatch):
    """Killed when each has parts, so that both parts of a process are computed again."""
    killed, run = [], local.LocalWorker.run

    def kill(self, part):
        if part is not None and part.number == 3 and not killed:
            killed.append(self.process.pid)
            os.kill(killed[0], signal.SIGKILL)
        return run(self, part)

    monkeypatch.setattr(local.LocalWorker, "run", kill)
    assert predict.main([model, "rows.jsonl", "--output", "out", *FLAGS]) == 0
    assert killed
    assert content(here / "out") == undisturbed


def test_processes_killed_at_random_moments_are_replaced(model, undisturbed, here):
    """While they start, open the model, compute and write. The first is killed before half of a run's time."""
    started, numbers = time.monotonic(), random.Random(0)
    assert predict.main([model, "rows.jsonl", "--output", "timed", *FLAGS]) == 0
    half = (time.monotonic() - started) / 2
    with killer(4, lambda: numbers.random() * half) as killed:
        assert predict.main([model, "rows.jsonl", "--output", "out", *FLAGS]) == 0
    assert killed
    assert content(here / "out") == undisturbed


def test_processes_killed_while_the_input_waits_are_replaced(model, undisturbed, here):
    """No part is in work then, so nothing but the next part can notice."""
    job, killed = job_of(model), []

    def parts():
        for part in parts_of(job):
            if part.number == 4:
                time.sleep(1)  # all are idle
                killed.extend(worker_processes())
                for each in killed:
                    each.kill()
                while any(each.status() != psutil.STATUS_ZOMBIE for each in killed):
                    time.sleep(0.01)
            yield part

    open_store("out").create()
    done = list(local.run_locally(job, parts(), ["cpu", "cpu"]))
    assert len(killed) == 2
    assert sorted(each.number for each in done) == list(range(8))
    expected = {name: held for name, held in undisturbed.items() if name.startswith("part-")}
    assert {name: held for name, held in content(here / "out").items() if name.startswith("part-")} == expected


def test_processes_that_die_again_and_again_end_the_run(model, undisturbed, here, capsys):
    """Killed as soon as they are found, so while they start."""
    argv = [model, "rows.jsonl", "--output", "out", *FLAGS]
    with killer(local.RETRIES + 1, lambda: 0) as killed:
        one_line(argv, capsys, str(local.RETRIES + 1), "signal 9", "--processes", "--resume")
    assert len(killed) == local.RETRIES + 1
    assert not worker_processes()
    assert predict.main([*argv, "--resume"]) == 0
    assert content(here / "out") == undisturbed


def test_a_process_that_ends_itself_is_named_by_its_exit_code(model, here, monkeypatch):
    """`os._exit` stands for a library that does it."""
    monkeypatch.setattr(local, "serve", os.kill)  # its arguments are wrong, and the process ends with an exit code
    monkeypatch.setattr(local, "RETRIES", 1)
    with pytest.raises(CommandError, match=r"exit code 1\b"):
        list(local.run_locally(job_of(model), iter([]), ["cpu", "cpu"]))


def test_processes_end_with_the_main_one(model, here):
    command = [sys.executable, SCRIPTS / "predict.py", model, "rows.jsonl", "--output", "out", *FLAGS]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    while process.poll() is None and len(found := worker_processes(process.pid)) < 2:
        time.sleep(0.05)
    process.kill()
    process.wait()
    assert len(found) == 2
    assert not psutil.wait_procs(found, timeout=30)[1]


def test_a_signal_to_all_processes_stops_the_run_after_the_parts_in_work(model, undisturbed, here):
    """As a scheduler sends it, and a terminal SIGINT."""
    command = [sys.executable, SCRIPTS / "predict.py", model, "rows.jsonl", "--output", "out", *FLAGS]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, start_new_session=True, text=True)
    while process.poll() is None and not list((here / "out").glob("part-*")):
        time.sleep(0.005)
    os.killpg(process.pid, signal.SIGTERM)
    errors = process.communicate(timeout=120)[1]
    assert process.returncode in (0, 130), errors  # 0: it had finished
    assert "Traceback" not in errors
    assert predict.main([*command[2:], "--resume"]) == 0
    assert content(here / "out") == undisturbed


# -------------------------------------------------------------------------------------------------------------- errors


class UnpicklableError(ValueError):
    """Holds what cannot be pickled."""

    def __init__(self, message: str):
        super().__init__(message)
        self.lock = threading.Lock()


class TwoArgumentsError(CommandError):
    """Cannot be rebuilt from its `args`."""

    def __init__(self, place: str, message: str):
        super().__init__(f"{place}: {message}", exit_code=3)
        self.lock = threading.Lock()


@pytest.mark.parametrize(
    ("error", "kind", "words"),
    [
        (UnpicklableError("no text"), CommandError, "no text"),
        (TwoArgumentsError("row 3", "no text"), CommandError, "row 3: no text"),
        (MemoryError(), CommandError, "MemoryError"),
        (MemoryError("Unable to allocate 3 GiB"), CommandError, "3 GiB"),
        (BrokenPipeError(32, "Broken pipe"), CommandError, "Broken pipe"),
        (UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid"), CommandError, "utf-8"),
        (RuntimeError("not enough memory"), CommandError, "not enough memory"),
        (KeyError("a bug"), RuntimeError, "Traceback"),
    ],
)
def test_errors_reach_another_process(error, kind, words):
    with pytest.raises(kind) as raised, local.portable_errors():
        raise error
    found = pickle.loads(pickle.dumps(raised.value))
    assert type(found) is kind
    assert words in str(found)
    assert getattr(found, "exit_code", None) == getattr(error, "exit_code", 2 if kind is CommandError else None)


def test_a_broken_pipe_of_the_input_is_not_one_of_standard_output(model, here):
    def parts():
        yield from ()
        raise BrokenPipeError(32, "Broken pipe")

    with pytest.raises(CommandError, match="Broken pipe"):
        list(local.run_locally(job_of(model), parts(), ["cpu"]))


def test_a_model_that_one_process_cannot_open_ends_the_run(model, here):
    """As on a device without memory. No part is asked for."""
    asked = []
    with pytest.raises(CommandError, match="nothing"):
        list(local.run_locally(job_of(model), (asked.append(1) for _ in range(1)), ["cpu", "nothing"]))
    assert not asked
    assert not psutil.wait_procs(worker_processes(), timeout=10)[1]


@pytest.mark.parametrize("count", [0, 1])
def test_more_processes_than_parts(count, model, undisturbed, here):
    job = job_of(model)
    open_store("out").create()
    done = list(local.run_locally(job, iter(parts_of(job)[:count]), ["cpu"] * 3))
    assert [each.number for each in done] == list(range(count))
    for number in range(count):
        assert (here / "out" / job.part_name(number)).read_bytes() == undisturbed[job.part_name(number)]


# ------------------------------------------------------------------------------------------------------------- threads


def flags(**given) -> argparse.Namespace:
    return argparse.Namespace(
        **{"processes": None, "threads_per_process": None, "device": "cpu", "engine": "local"} | given
    )


@pytest.mark.parametrize(
    ("variable", "given", "resumed", "expected"),
    [
        (None, {}, None, (8, 1)),
        ("4", {}, None, (2, 4)),
        ("3", {}, None, (2, 3)),
        ("16", {}, None, (1, 16)),
        ("2,4", {}, None, (4, 2)),
        ("4", {"processes": 3}, None, (3, 4)),
        (None, {"processes": 3}, None, (3, 2)),
        ("4", {"threads_per_process": 2}, None, (4, 2)),
        ("4", {}, 2, (4, 2)),
        (None, {}, 2, (4, 2)),
        ("0", {}, None, (8, 1)),
        ("-1", {}, None, (8, 1)),
        ("many", {}, None, (8, 1)),
        ("", {}, None, (8, 1)),
        (None, {"engine": "ray"}, None, (1, 1)),
        ("4", {"engine": "ray", "processes": 3}, None, (3, 4)),
    ],
)
def test_the_number_of_processes_and_of_threads(variable, given, resumed, expected, monkeypatch):
    monkeypatch.setattr(devices, "processors", lambda: 8)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if variable is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", variable)
    found, threads = devices.devices_and_threads(flags(**given), resumed)
    assert (len(found), threads) == expected


def test_the_threads_of_tokenizers_have_a_variable_of_their_own(monkeypatch):
    monkeypatch.delenv("RAYON_NUM_THREADS", raising=False)
    assert devices.thread_variables(2) == {"OMP_NUM_THREADS": "2", "RAYON_NUM_THREADS": "2"}
    monkeypatch.setenv("RAYON_NUM_THREADS", "3")
    assert devices.thread_variables(2) == {"OMP_NUM_THREADS": "2", "RAYON_NUM_THREADS": "3"}


def test_the_environment_sets_the_threads_of_a_run(model, here, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    argv = [model, "rows.jsonl", "--output", "out", "--part_rows", "8", "--processes", "1"]
    assert predict.main(argv) == 0
    assert json.loads((here / "out" / "__run__" / "manifest.json").read_text())["threads_per_process"] == 3
