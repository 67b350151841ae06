"""`scripts/predict.py --update`: the files of an output after a change of its input are those of a full run."""

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
from hypothesis import given, settings
from hypothesis import strategies as st
from toolkit.corpus.digests import RECENT, DigestIndex, digest_of
from toolkit.corpus.worker import Worker

import predict
from support.corpora import all_files, save_model, texts, write_rows
from support.folders import SCRIPTS
from toolkit.corpus import store
from toolkit.corpus.tasks import CLASSES

pytestmark = pytest.mark.usefixtures("quiet_only_here")

FLAGS = ["--processes", "1", "--threads_per_process", "1", "--part_rows", "8", "--on_bad_row", "skip"]
TEXTS = texts(60)


def rows_of(values: list[str]) -> list[dict]:
    return [{"text": text, "text_pair": text[::2] or "a", "n": number} for number, text in enumerate(values)]


def run(model: str, output: str, *flags: str, rows: list[dict] | None = None, code: int = 0) -> None:
    if rows is not None:
        write_rows(Path("rows.jsonl"), rows)
    assert predict.main([model, "rows.jsonl", "--output", output, *FLAGS, *flags]) == code


@pytest.fixture
def computed(monkeypatch) -> list[tuple[str, str | None]]:
    """The texts, and the second texts of pairs, that a model computes."""
    found: list[tuple[str, str | None]] = []
    results = Worker.results
    monkeypatch.setattr(Worker, "results", lambda self, given: found.extend(given) or results(self, given))
    return found


def changed(rows: list[dict]) -> list[dict]:
    """The rows with some removed, changed, added, repeated and moved, and an empty one."""
    rows = [dict(row) for row in rows]
    del rows[11], rows[3]
    rows[20]["text"], rows[21]["text"], rows[22]["text"] = "a new film [MASK]", "", rows[5]["text"]
    rows[30]["n"] = 1000
    rows.insert(0, {"text": "word1 word2 [MASK]", "text_pair": "a", "n": -1})
    rows += [rows.pop(9), {"text": "a new film [MASK]", "text_pair": rows[20]["text_pair"], "n": 7}]
    return rows


@pytest.mark.parametrize(
    ("task", "format", "flags"),
    [
        ("embed", "parquet", []),
        ("embed", "jsonl", ["--embedding_dtype", "int8"]),
        ("embed", "csv", ["--embedding_dtype", "float16", "--empty_texts", "null"]),
        ("embed", "parquet", ["--empty_texts", "null", "--keep_columns", "none", "--id_column", "n"]),
        ("classify", "parquet", ["--all_scores"]),
        ("classify", "csv", ["--empty_texts", "null"]),
        ("tag", "parquet", []),
        ("tag", "csv", []),
        ("rerank", "jsonl", []),
        ("rerank", "csv", []),
        ("fill-mask", "parquet", []),
        ("fill-mask", "csv", []),
    ],
)
def test_the_files_are_those_of_a_full_run(task, format, flags, here, computed):
    folder = save_model(here / "model", task)
    before = rows_of([text + " [MASK]" * (number % 7 > 0) for number, text in enumerate(TEXTS)])
    flags = ["--task", task, "--format", format, *flags]
    run(folder, "updated", *flags, rows=before)
    del computed[:]
    after = changed(before)
    run(folder, "updated", *flags, "--update", rows=after)
    was, is_now = (
        {(row["text"], row["text_pair"] if task == "rerank" else None) for row in rows if row["text"]}
        for rows in (before, after)
    )
    assert sorted(computed) == sorted(is_now - was)
    run(folder, "full", *flags)
    assert all_files(here / "updated") == all_files(here / "full")
    assert predict.main(["--check", "--output", "updated"]) == 0


@settings(max_examples=12)
@given(st.lists(st.integers(0, 12), min_size=1, max_size=30), st.lists(st.integers(0, 12), min_size=1, max_size=30))
def test_any_change(tmp_path_factory, model, before, after):
    """Each distinct text that is new is computed once; nothing else is."""
    folder, found = tmp_path_factory.mktemp("run"), []
    os.chdir(folder)
    run(model, "updated", rows=rows_of([TEXTS[number] for number in before]))
    results = Worker.results
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Worker, "results", lambda self, given: found.extend(given) or results(self, given))
        run(model, "updated", "--update", rows=rows_of([TEXTS[number] for number in after]))
    assert sorted(text for text, _ in found) == sorted(TEXTS[number] for number in set(after) - set(before))
    run(model, "full")
    assert all_files(folder / "updated") == all_files(folder / "full")


def test_a_text_that_is_there_needs_no_model(model, here, monkeypatch):
    run(model, "updated", rows=rows_of(TEXTS))
    monkeypatch.setitem(CLASSES, "embed", None)
    run(model, "updated", "--update", rows=rows_of(TEXTS[::-1]))
    monkeypatch.undo()
    os.chdir(here)
    run(model, "full")
    assert all_files(here / "updated") == all_files(here / "full")


def test_parts_that_are_as_before_are_not_written(model, here):
    run(model, "updated", rows=rows_of(TEXTS))
    before = {path: path.stat().st_ino for path in here.glob("updated/part-*")}
    run(model, "updated", "--update", rows=rows_of([*TEXTS, "a new film"]))
    after = {path: path.stat().st_ino for path in here.glob("updated/part-*")}
    assert [path.name for path in before if before[path] != after[path]] == ["part-000007.parquet"]


def test_without_an_output_it_is_a_run(model, here):
    run(model, "updated", "--update", rows=rows_of(TEXTS))
    run(model, "full")
    assert all_files(here / "updated") == all_files(here / "full")


@pytest.mark.parametrize("flags", [["--format", "jsonl"], ["--part_rows", "13"], ["--pooling", "cls"]])
def test_other_flags_give_the_files_of_a_run_with_them(flags, model, here, computed):
    run(model, "updated", rows=rows_of(TEXTS))
    del computed[:]
    run(model, "updated", "--update", *flags)
    assert len(computed) == (len(set(TEXTS)) if "--pooling" in flags else 0)
    run(model, "full", *flags)
    assert all_files(here / "updated") == all_files(here / "full")


def test_another_model_computes_all(model, here, computed, tmp_path_factory):
    other = save_model(tmp_path_factory.mktemp("other"), seed=1)
    run(model, "updated", rows=rows_of(TEXTS))
    del computed[:]
    run(other, "updated", "--update", rows=rows_of([*TEXTS, TEXTS[0]]))
    assert sorted(text for text, _ in computed) == sorted(set(TEXTS))
    run(other, "full")
    assert all_files(here / "updated") == all_files(here / "full")


@pytest.mark.parametrize("change", ["torch", "processor", "dtype", "device", "npy"])
def test_where_the_bits_of_a_text_may_differ_it_stops(change, model, here, capsys):
    run(model, "out", *(["--format", "npy"] if change == "npy" else []), rows=rows_of(TEXTS))
    path = here / "out" / "__run__" / "manifest.json"
    manifest = json.loads(path.read_text())
    if change == "torch":
        manifest["versions"]["torch"] = "2.0"
    elif change == "processor":
        manifest["processor"]["model"] = "other"
    elif change == "device":
        manifest["flags"]["device"] = "cuda"
    path.write_text(json.dumps(manifest))
    before = all_files(here / "out")
    flags = ["--dtype", "bfloat16"] if change == "dtype" else []
    run(model, "out", "--update", *flags, rows=rows_of(TEXTS[:50]), code=2)
    line = capsys.readouterr().err.splitlines()[-1]
    assert "--update" in line
    assert change in line
    assert all_files(here / "out") == before


@pytest.mark.parametrize("flags", [["--shard", "1/2"], ["--format", "npy"]])
def test_flags_that_do_not_go_with_it(flags, model, here, capsys):
    run(model, "out", "--update", *flags, rows=rows_of(TEXTS), code=2)
    assert "--update" in capsys.readouterr().err
    assert not (here / "out").exists()


# ---------------------------------------------------------------------------------------------------------- interrupted


def test_an_error_at_any_write(model, here, monkeypatch):
    """Every file that an update writes or moves fails once; the next update gives the files of a full run."""
    run(model, "before", rows=rows_of(TEXTS))
    rows = [*rows_of(TEXTS)[4:], {"text": "a new film", "text_pair": "a", "n": 0}]
    run(model, "full", rows=rows)
    rename, failures = store.LocalStore.rename, 0
    for failing in range(100):
        shutil.copytree("before", "updated")
        count = iter(range(1000))

        def fail(self, old, new, failing=failing, count=count):
            if next(count) == failing:
                raise OSError(28, "No space left on device")
            rename(self, old, new)

        with monkeypatch.context() as patch:
            patch.setattr(store.LocalStore, "rename", fail)
            code = predict.main([model, "rows.jsonl", "--output", "updated", *FLAGS, "--update"])
        failures += code == 2
        if code == 2 and failing % 3 == 0:  # the input has changed again meanwhile
            run(model, "updated", "--update", rows=rows[:30])
            write_rows(Path("rows.jsonl"), rows)
        if code == 2:
            run(model, "updated", "--update")
        assert all_files(here / "updated") == all_files(here / "full")
        shutil.rmtree("updated")
        if code == 0:
            break
    assert failures > 25


def test_what_is_left_of_another_update_is_not_used(model, here):
    run(model, "updated", rows=rows_of(TEXTS))
    run(model, "other", rows=rows_of(texts(16, 9)))
    shutil.copytree("other", "updated/__run__/update/new")
    run(model, "updated", "--update", rows=rows_of([*TEXTS, "a new film"]))
    run(model, "full")
    assert all_files(here / "updated") == all_files(here / "full")


def test_a_part_that_has_changed_is_not_used(model, here, capsys):
    run(model, "out", rows=rows_of(TEXTS))
    part = here / "out" / "part-000002.parquet"
    data = bytearray(part.read_bytes())
    data[len(data) // 2] ^= 1
    part.write_bytes(data)
    run(model, "out", "--update", rows=rows_of(TEXTS[1:]), code=2)
    assert part.name in capsys.readouterr().err.splitlines()[-1]
    part.unlink()
    run(model, "out", "--update")
    run(model, "full")
    assert all_files(here / "out") == all_files(here / "full")


def test_after_kill_9(model, here):
    run(model, "updated", rows=rows_of(TEXTS))
    rows = changed(rows_of(texts(300, 1)))
    run(model, "full", rows=rows)
    command = [sys.executable, SCRIPTS / "predict.py", model, "rows.jsonl", "--output", "updated", *FLAGS, "--update"]
    numbers, kills = random.Random(0), 0
    while kills < 3:
        process = subprocess.Popen(command, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        while process.poll() is None and not (here / "updated" / "__run__" / "update").exists():
            time.sleep(0.01)
        time.sleep(numbers.random() / 2)
        kills += 1
        process.kill()
        process.wait()
    run(model, "updated", "--update")
    assert all_files(here / "updated") == all_files(here / "full")


def test_what_is_not_finished_is_not_resumed_as_a_run(model, here, monkeypatch, capsys):
    run(model, "out", rows=rows_of(TEXTS))
    with monkeypatch.context() as patch:
        patch.setattr("toolkit.corpus.update.finish_update", lambda store: None)
        patch.setattr("toolkit.corpus.update.COMPLETE", "__run__/update/not-the-mark")
        run(model, "out", "--update", rows=rows_of(TEXTS[5:]))
    capsys.readouterr()
    run(model, "out", "--resume", code=2)
    assert "--update" in capsys.readouterr().err.splitlines()[-1]
    run(model, "out", "--update")
    run(model, "full")
    assert all_files(here / "out") == all_files(here / "full")


def test_ctrl_c(model, here, monkeypatch, capsys):
    run(model, "out", rows=rows_of(TEXTS))
    results = Worker.results

    def interrupted(self, given):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.1)
        return results(self, given)

    with monkeypatch.context() as patch:
        patch.setattr(Worker, "results", interrupted)
        run(model, "out", "--update", rows=rows_of(texts(60, 3)), code=130)
    assert "--update" in capsys.readouterr().err.splitlines()[-1]
    run(model, "out", "--update")
    run(model, "full")
    assert all_files(here / "out") == all_files(here / "full")


# -------------------------------------------------------------------------------------------------------------- digests


def test_digests_are_found_among_many():
    index, added = DigestIndex(), {}
    numbers = random.Random(0)
    for _ in range(40):
        new = {digest_of(str(numbers.random())): number for number in range(len(added), len(added) + RECENT // 7)}
        assert set(index.find(list(new))) == {-1}
        index.add(list(new), list(new.values()))
        added |= new
        chosen = numbers.sample(list(added), 50)
        assert index.find([*chosen, digest_of("absent")]) == [*(added[digest] for digest in chosen), -1]
    assert len(index.runs) > 1
    assert index.find([]) == []


def test_digests_with_one_first_half():
    index = DigestIndex()
    same = [bytes(8) + number.to_bytes(8, "little") for number in (7, 9)]
    index.add([*same, *(digest_of(str(number)) for number in range(RECENT))], range(RECENT + 2))
    assert index.runs
    assert index.find(same) == [0, 1]


def test_texts_and_pairs_have_digests_of_their_own():
    pairs = [("ab", None), ("a", "b"), ("", "ab"), ("ab", ""), ("a:", "b"), ("a", ":b"), ("1:a", None)]
    assert len({digest_of(*pair) for pair in pairs}) == len(pairs)
