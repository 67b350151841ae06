"""The inputs of `scripts/predict.py`: their rows, names, types and fingerprints, and standard input."""

import csv
import gzip
import hashlib
import io
import json
import os
import shutil
import subprocess
import sys
import tempfile
from functools import partial

import fsspec
import pyarrow as pa
import pytest
from datasets import Dataset
from pyarrow import parquet
from toolkit.corpus.sources import open_inputs

import predict
from support.corpora import texts, write_rows
from support.folders import SCRIPTS
from toolkit.inputs import Input

pytestmark = pytest.mark.usefixtures("quiet_only_here")

TEXTS = texts(40)
COMPRESSED = {"": bytes, ".gz": gzip.compress, ".zst": partial(pa.compress, codec="zstd", asbytes=True)}
FLAGS = ["--processes", "1", "--threads_per_process", "1", "--part_rows", "16"]


@pytest.fixture
def pipe(tmp_path, monkeypatch):
    """Makes bytes the standard input."""

    def pipe(content: bytes) -> None:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))

    return pipe


def encoded(ending: str) -> bytes:
    """`TEXTS` in a format."""
    rows = [{"text": text, "other": number} for number, text in enumerate(TEXTS)]
    if ending == ".parquet":
        target = io.BytesIO()
        Dataset.from_list(rows).to_parquet(target)
        return target.getvalue()
    if ending in (".csv", ".tsv"):
        target = io.StringIO(newline="")
        writer = csv.writer(target, delimiter="," if ending == ".csv" else "\t")
        writer.writerows([["other", "text"], *([row["other"], row["text"]] for row in rows)])
        return target.getvalue().encode()
    if ending == ".json":
        return json.dumps(rows).encode()
    if ending in (".jsonl", ".ndjson"):
        return "".join(json.dumps(row) + "\n" for row in rows).encode()
    return "".join(f"{text}\n" for text in TEXTS).encode()


def read(inputs: list[Input]) -> list[tuple]:
    """The file, the number and the text of each row."""
    return [(row.file, row.number, row.content["text"]) for each in inputs for row in each.rows()]


# ---------------------------------------------------------------------------------------------------------------- files


@pytest.mark.parametrize("ending", [".txt", ".csv", ".tsv", ".jsonl", ".ndjson", ".json", ".parquet"])
@pytest.mark.parametrize("compression", COMPRESSED)
def test_every_format_and_every_way_to_name_a_file_gives_the_same(ending, compression, here):
    name = f"texts{ending}{compression}"
    (here / "data").mkdir()
    path = here / "data" / name
    path.write_bytes(COMPRESSED[compression](encoded(ending)))
    expected = [(name, number, text) for number, text in enumerate(TEXTS, 1)]
    for given in (f"data/{name}", str(path), f"file://{path}", "data/te*ts.*", "data", f"{here}/data/", "data/../data"):
        assert read(open_inputs([given])) == expected


def test_the_output_has_the_lines_of_a_text_file(model, here):
    lines = ["a film", "", "good", "  ", "\t", "bad", ""]
    (here / "x.txt").write_text("\n".join(lines))
    assert predict.main([model, "x.txt", "--output", "out", *FLAGS]) == 0
    found = parquet.read_table(here / "out" / "part-000000.parquet").to_pylist()
    assert [(row["file"], row["row"]) for row in found] == [("x.txt", 1), ("x.txt", 3), ("x.txt", 6)]
    assert [lines[row["row"] - 1] for row in found] == ["a film", "good", "bad"]


def test_several_files_are_one_corpus(model, here, capsys):
    """Parts go over the ends of files; an empty file is reported."""
    for i in range(3):
        write_rows(here / f"{i}.jsonl", [{"text": text} for text in TEXTS[i * 10 : i * 10 + 10]])
    (here / "empty.jsonl").write_text("")
    argv = [model, "0.jsonl", f"{here}/1.jsonl", "empty.jsonl", "2.jsonl", "--output", "out", "--format", "csv"]
    assert predict.main([*argv, *FLAGS]) == 0
    found = [row for path in sorted(here.glob("out/part-*")) for row in csv.DictReader(path.open(encoding="utf-8"))]
    assert [(row["file"], int(row["row"])) for row in found] == [
        (f"{i}.jsonl", n) for i in range(3) for n in range(1, 11)
    ]
    assert len(list(here.glob("out/part-*"))) == 2
    assert "empty.jsonl" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("given", "names"),
    [
        (["data/a/x.csv"], ["x.csv"]),
        (["data/a"], ["x.csv", "y.csv"]),
        (["data/a/y.csv", "data/b/x.csv"], ["a/y.csv", "b/x.csv"]),
        (["data"], ["a/x.csv", "a/y.csv", "ab/x.csv", "b/x.csv", "top.csv"]),
        (["data/b", "data/ab/x.csv"], ["b/x.csv", "ab/x.csv"]),
        (["data/a/../b/x.csv", "./data/top.csv"], ["b/x.csv", "top.csv"]),
        (["memory://names/a/x.csv", "memory://names/b/x.csv"], ["a/x.csv", "b/x.csv"]),
        (["-", "data/a/x.csv"], ["-", "x.csv"]),
        (["hub:data", "data/a/x.csv"], ["hub:data", "x.csv"]),
    ],
)
def test_names_are_paths_below_the_folder_that_all_share(given, names, here, pipe):
    pipe(b"good\n")
    for name in ("a/x.csv", "a/y.csv", "ab/x.csv", "b/x.csv", "top.csv"):
        (here / "data" / name).parent.mkdir(parents=True, exist_ok=True)
        (here / "data" / name).write_text("text\na\n")
        fsspec.filesystem("memory").pipe(f"/names/{name}", b"text\na\n")
    assert [each.name for each in open_inputs(given)] == names
    absolute = [f"{here}/{each}" if each.startswith("data") else each for each in given]
    pipe(b"good\n")
    assert [each.name for each in open_inputs(absolute)] == names


@pytest.mark.parametrize(
    "given",
    [
        ["x.txt", "x.txt"],
        ["x.txt", "./x.txt"],
        ["link.txt", "x.txt"],
        [".", "x.txt"],
        ["linked/x.txt", "x.txt"],
        ["hub:data", "hub:data:train"],
        ["-", "x.txt", "-"],
    ],
)
def test_an_input_that_is_given_twice(given, here, pipe):
    pipe(b"good\n")
    (here / "x.txt").write_text("a\n")
    (here / "link.txt").symlink_to("x.txt")
    (here / "linked").symlink_to(here)
    with pytest.raises(ValueError, match="twice"):
        open_inputs(given)
    assert len(open_inputs(["x.txt"])) == 1


def test_local_files_are_opened_without_fsspec(here, monkeypatch):
    monkeypatch.setattr("fsspec.core.url_to_fs", lambda *_: pytest.fail("fsspec was called"))
    for number in range(300):
        (here / f"{number:03d}.txt").write_text(f"text {number}\n")
    assert read(open_inputs(["*.txt"])) == [(f"{i:03d}.txt", 1, f"text {i}") for i in range(300)]


# --------------------------------------------------------------------------------------------------------- fingerprints


def test_the_fingerprint_of_a_file_is_that_of_its_content(here):
    content = b"text;id\n" + os.urandom(3_000_000).hex().encode() + b";1\n"
    (here / "x.csv").write_bytes(content)
    [file] = open_inputs(["x.csv"])
    expected = {"file": "x.csv", "size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    assert file.fingerprint() == expected
    os.utime(here / "x.csv", (1, 1))
    assert file.fingerprint() == expected
    shutil.move(here / "x.csv", here / "before.csv")
    shutil.copy(here / "before.csv", here / "x.csv")
    assert open_inputs([str(here / "x.csv")], ";")[0].fingerprint() == {**expected, "delimiter": ";"}
    (here / "x.csv").write_bytes(content[:1_000_000] + b"#" + content[1_000_001:])
    assert {name for name, value in file.fingerprint().items() if expected[name] != value} == {"sha256"}
    (here / "x.csv").write_bytes(content + b"a;2\n")
    assert {name for name, value in file.fingerprint().items() if expected[name] != value} == {"size", "sha256"}


# ------------------------------------------------------------------------------------------------------- standard input


@pytest.mark.parametrize("format", ["txt", "csv", "tsv", "jsonl"])
def test_standard_input_is_read_like_a_file(format, here, pipe):
    (here / f"x.{format}").write_bytes(b"\xef\xbb\xbf" + encoded(f".{format}"))
    expected = [row[1:] for row in read(open_inputs([f"x.{format}"]))]
    for stdin_format in [format] if format in ("csv", "tsv") else [format, None]:
        pipe(b"\xef\xbb\xbf" + encoded(f".{format}"))
        [found] = open_inputs(["-"], None, stdin_format)
        one, other = found.rows(), found.rows()
        for pair in zip(one, other, strict=True):  # the readers do not disturb one another
            assert pair[0] == pair[1]
        assert read([found]) == [("-", *row) for row in expected]


@pytest.mark.parametrize(
    ("delimiter", "format"), [(";", None), (";", "txt"), (";", "csv"), (r"\t", "tsv"), (r"\t", None)]
)
def test_a_delimiter_of_standard_input(delimiter, format, pipe):
    character = delimiter.replace(r"\t", "\t")
    pipe(f"id{character}text\n1{character}a, b\n".encode())
    assert read(open_inputs(["-"], delimiter, format)) == [("-", 1, "a, b")]


@pytest.mark.parametrize(
    "start",
    ["text", '"text"', "id,text", "text\tlabel", 'a;"sentence1";b', "id, text", "\ufeffid,premise", "\n\nid,Text"],
)
def test_what_begins_like_a_table_is_not_taken_for_texts(start, pipe):
    content = f"{start}\r\n1,good\n".encode()
    pipe(content)
    with pytest.raises(ValueError, match="--stdin_format") as error:
        open_inputs(["-"])
    assert "\n" not in str(error.value)
    pipe(content)
    assert len(read(open_inputs(["-"], None, "txt"))) == 2


@pytest.mark.parametrize(
    "start", ["a text, and more", "texts", "the text", "id,body", "{", '{"a": "b, text, c"}', "[text]", "text text"]
)
def test_other_standard_input_needs_no_format(start, pipe):
    pipe(f"{start}\nid,text\n".encode())
    [found] = open_inputs(["-"])
    assert found.format == ("jsonl" if start.startswith("{") else "txt")


def test_standard_input_has_a_fingerprint_of_its_content(pipe):
    content = encoded(".csv")
    expected = {"file": "-", "size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    for format in ("csv", "txt"):
        pipe(content)
        [found] = open_inputs(["-"], None, format)
        assert found.fingerprint() == found.fingerprint() == {**expected, "format": format}
        assert found.types() is None


def test_the_copy_of_standard_input_is_removed(pipe, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    pipe(b"good\n")
    found = open_inputs(["-"])
    assert len(list(tmp_path.iterdir())) == 1
    assert read(found) == [("-", 1, "good")]
    del found
    assert list(tmp_path.iterdir()) == []


def test_piped_rows_are_those_of_the_file(model, here):
    """In a process, with a real pipe, whose end nobody knows before it comes."""
    (here / "x.jsonl").write_bytes(encoded(".jsonl"))
    assert predict.main([model, "x.jsonl", "--output", "file", "--format", "jsonl", *FLAGS]) == 0
    command = [sys.executable, SCRIPTS / "predict.py", model, "-", "--output", "piped", "--format", "jsonl", *FLAGS]
    done = subprocess.run(command, input=encoded(".jsonl"), capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()
    for name in ("part-000000.jsonl", "part-000001.jsonl", "part-000002.jsonl"):
        expected = (here / "file" / name).read_text().replace('"x.jsonl"', '"-"')
        assert (here / "piped" / name).read_text() == expected
    # The same rows, piped again, continue the run; others do not.
    (here / "piped" / "part-000001.jsonl").unlink()
    other = encoded(".jsonl").replace(b"film", b"ada")
    for content, code in ((other, 2), (encoded(".jsonl"), 0)):
        done = subprocess.run([*command, "--resume"], input=content, capture_output=True, check=False)
        assert done.returncode == code, done.stderr.decode()
        assert (here / "piped" / "part-000001.jsonl").exists() == (code == 0)


@pytest.mark.parametrize("closed", [True, False])
def test_without_standard_input(closed, model, here, monkeypatch, capsys):
    stdin = io.TextIOWrapper(io.BytesIO(b""))
    stdin.close()
    monkeypatch.setattr(sys, "stdin", stdin if closed else None)
    assert predict.main([model, "-", "--output", "out", *FLAGS]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert "standard input" in lines[0]
    assert not (here / "out").exists()
