"""toolkit.finetuning.rows and .batches: rows and their places, bad rows, batches that cover every row."""

import csv
import gzip
import importlib
import io
import itertools
import json
import re
import tempfile
import tracemalloc
from decimal import Decimal
from functools import partial
from pathlib import Path

import datasets
import fsspec
import numpy as np
import pyarrow as pa
import pytest
import torch
from datasets.distributed import split_dataset_by_node
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pyarrow import parquet
from pyarrow.dataset import dataset
from transformers import AutoTokenizer

from modeling_scratchbert import ScratchBertForSequenceClassification, ScratchBertForTokenClassification
from support.finetuning import make_task, read_settings, save_tiny
from support.models import NO_DROPOUT, randomise, tiny_config
from toolkit import row_files
from toolkit.cli import CommandError
from toolkit.finetuning.batches import LengthGroupedBatches, PadOrFlatten, evaluation_batches
from toolkit.finetuning.recipes import changed_flags, recipe_of
from toolkit.finetuning.rows import load_rows, stream_rows
from toolkit.finetuning.run import shared_data
from toolkit.finetuning.task_settings import (
    ClassificationSettings,
    PretrainingSettings,
    QuestionAnsweringSettings,
    Seq2SeqSettings,
    TokenClassificationSettings,
)
from toolkit.inputs import HubDataset, Source, open_files
from toolkit.row_files import find_column, text_of

COMPRESSED = {".gz": partial(gzip.compress, mtime=0), ".zst": partial(pa.compress, codec="zstd", asbytes=True)}

# Any text but what counts as bad.
TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=12)


@pytest.fixture
def write(tmp_path):
    """Writes a file, and makes a source of it."""

    def write(name, content: bytes | str):
        path = tmp_path / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return files_of([path])

    return write


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> Path:
    """The folder where `datasets` keeps what it has read, one of the test's own."""
    folder = tmp_path / "cache"
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", folder)
    return folder


def files_of(paths, max_rows: int | None = None, **options) -> Source:
    return Source(open_files(paths, **options), max_rows)


def hub_of(name, split: str, max_rows: int | None = None, streaming: bool = False) -> Source:
    return Source([HubDataset(str(name), split, streaming=streaming)], max_rows)


def keep_text(row: dict) -> dict:
    return {"text": text_of(row, "text")}


def read(source) -> list:
    """All rows, and what is said of bad ones."""
    rows = list(source.rows())
    return [(row.place, f"{row.place}: {row.content}" if isinstance(row.content, str) else row.content) for row in rows]


def read_back(name: str, content: bytes) -> list:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, name)
        path.write_bytes(content)
        return read(files_of([path]))


# ---------------------------------------------------------------------------------------------------------------------
# Rows and their places


@settings(max_examples=100)
@given(
    st.lists(st.tuples(TEXT, TEXT, st.integers(0, 2)), min_size=1, max_size=6),
    st.sampled_from([",", "\t"]),
    st.sampled_from(["\n", "\r\n", "\r"]),
    st.sampled_from([b"", b"\xef\xbb\xbf"]),
)
def test_rows_of_csv_and_tsv_come_back(rows, delimiter, newline, mark):
    if delimiter == "\t":  # a row is a line
        rows = [(*(re.sub("[\t\r\n]", " ", text) for text in row[:2]), row[2]) for row in rows]
    text, expected = f"one{delimiter}two{newline}", []
    for number, (one, two, blank_lines) in enumerate(rows, 1):
        text += newline * blank_lines
        line = len(re.findall("\r\n|\r|\n", text)) + 1
        expected.append(
            (f"x.{'csv' if delimiter == ',' else 'tsv'}, row {number} (line {line})", {"one": one, "two": two})
        )
        record = io.StringIO(newline="")
        quoting = csv.QUOTE_ALL if re.search("[\r\n]", one + two) else csv.QUOTE_MINIMAL
        csv.writer(record, delimiter=delimiter, lineterminator=newline, quoting=quoting).writerow([one, two])
        text += record.getvalue()
    assert read_back(expected[0][0].split(",")[0], mark + text.encode()) == expected


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.floats(allow_nan=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=5,
)


@settings(max_examples=60)
@given(
    st.lists(st.tuples(st.dictionaries(TEXT, JSON, max_size=3), st.integers(0, 2)), min_size=1, max_size=6),
    st.sampled_from(["x.jsonl", "x.json"]),
    st.sampled_from(["\n", "\r\n"]),
    st.sampled_from([b"", b"\xef\xbb\xbf"]),
    st.booleans(),
)
def test_rows_of_json_lines_come_back(rows, name, newline, mark, ascii_only):
    lines, expected = [], []
    for number, (row, blank_lines) in enumerate(rows, 1):
        lines += [" "] * blank_lines + [json.dumps(row, ensure_ascii=ascii_only)]
        expected.append((f"{name}, row {number} (line {len(lines)})", row))
    assert read_back(name, mark + newline.join(lines).encode()) == expected


@settings(max_examples=100)
@given(
    st.lists(st.dictionaries(TEXT | st.just('[{"a": "\\"}],'), JSON, max_size=3), min_size=1, max_size=6),
    st.sampled_from([None, 0, 2]),
    st.sampled_from([b"", b"\xef\xbb\xbf", b"\n \n"]),
    st.booleans(),
)
def test_rows_of_a_json_array_come_back(rows, indent, mark, ascii_only):
    content = mark + json.dumps(rows, indent=indent, ensure_ascii=ascii_only).encode() + b"\n"
    assert read_back("x.json", content) == [(f"x.json, row {number}", row) for number, row in enumerate(rows, 1)]


@settings(max_examples=30)
@given(st.lists(st.fixed_dictionaries({"text": TEXT, "tags": st.lists(st.integers(0, 9)) | st.none()}), min_size=1))
@example([{"text": str(number), "tags": None} for number in range(200)])
def test_rows_of_parquet_come_back(rows):
    schema = pa.schema({"text": pa.string(), "tags": pa.list_(pa.int64())})
    file = io.BytesIO()
    parquet.write_table(pa.Table.from_pylist(rows, schema), file, row_group_size=3)
    expected = [(f"x.parquet, row {number}", row) for number, row in enumerate(rows, 1)]
    assert read_back("x.parquet", file.getvalue()) == expected


def test_quotation_marks_of_tsv_are_part_of_the_text_unless_around_a_field(write):
    """As in GLUE's files, where they are often unpaired; and as spreadsheets write them."""
    content = 'text\t"the label"\n"good film\t1\nbad film"\t"0"\n"She said ""no"""\t""\n"a" or "b"\t0\n'
    expected = [('"good film', "1"), ('bad film"', "0"), ('She said "no"', ""), ('"a" or "b"', "0")]
    rows = [(row["text"], row["the label"]) for _, row in read(write("x.tsv", content))]
    assert rows == expected
    [_, fault] = read(write("x.csv", 'text,label\n"She" said,1\n"good, film",0\n'))[0]  # in CSV, they are not
    assert fault.startswith("x.csv, row 1 (line 2): invalid quotation or field")


@pytest.mark.parametrize(("name", "delimiter"), [("x.csv", ";"), ("x.tsv", ";"), ("x.txt.gz", "|"), ("x.txt", r"\t")])
def test_a_delimiter(name, delimiter, tmp_path):
    character = delimiter.replace(r"\t", "\t")
    content = f"text{character}label\na, b{character}1\n".encode()
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    assert read(files_of([tmp_path / name], delimiter=delimiter))[0][1] == {"text": "a, b", "label": "1"}


@pytest.mark.parametrize("delimiter", ["", "||", '"', "\n"])
def test_a_delimiter_is_a_character(delimiter, write):
    (file,) = write("x.csv", "text\na\n").inputs
    with pytest.raises(ValueError, match=f"^--delimiter is {re.escape(repr(delimiter))}"):
        open_files([file.url], delimiter=delimiter)


def test_sentences_of_conll(write):
    source = write(
        "x.conll",
        "-DOCSTART- -X- O O\n\nEU NNP I-ORG\nrejects VBZ O\n\n \nNew York\tNNP\tB-LOC\n\nalone\nO O\n\n.  O\r\n",
    )
    assert read(source) == [
        ("x.conll, row 1 (line 3)", {"tokens": ["EU", "rejects"], "tags": ["I-ORG", "O"]}),
        ("x.conll, row 2 (line 7)", {"tokens": ["New York"], "tags": ["B-LOC"]}),
        ("x.conll, row 3 (line 9)", "x.conll, row 3 (line 9): line 9 has one column; expected a word and its tag"),
        ("x.conll, row 4 (line 12)", {"tokens": ["."], "tags": ["O"]}),
    ]


def test_plain_text_is_a_row_a_line(write):
    source = write("x.txt", b'\xef\xbb\xbfone\r\n\r\n  two \r\n\tsaid "three, four"')
    assert read(source) == [
        ("x.txt, row 1 (line 1)", {"text": "one"}),
        ("x.txt, row 3 (line 3)", {"text": "  two "}),
        ("x.txt, row 4 (line 4)", {"text": '\tsaid "three, four"'}),
    ]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("x.csv", b'\xef\xbb\xbftext\r\none\r\n\r\n"two\nlines"\r\n'),
        ("x.tsv", b"text\tn\none\t1\n"),
        ("x.jsonl", b'{"text": "one"}\n\n{"text": "two"}\n'),
        ("x.ndjson", b'{"text": "one"}\n'),
        ("x.json", b'{"text": "one"}\n'),
        ("x.json", b'[{"text": "one"}, {"text": "two"}]'),
        ("x.txt", "one\n\nzwei Käfer\n".encode()),
    ],
)
@pytest.mark.parametrize("ending", COMPRESSED)
def test_compressed_files_have_the_same_rows(ending, name, content):
    rows = [(place.replace(name, f"{name}{ending}"), row) for place, row in read_back(name, content)]
    compressed = COMPRESSED[ending](content)
    assert read_back(f"{name}{ending}", compressed) == rows
    assert len(read_back(f"{name}{ending}".upper(), compressed)) == len(rows)


def test_several_files_count_their_own_rows(tmp_path):
    (tmp_path / "sub").mkdir()
    paths = [tmp_path / "a.txt", tmp_path / "b.jsonl", tmp_path / "sub" / "a.txt"]
    for path, text in zip(paths, ["x\ny", '{"text": "z"}', "w"], strict=True):
        path.write_text(text)
    assert [row.place for row in files_of(paths).rows()] == [
        "a.txt, row 1 (line 1)",
        "a.txt, row 2 (line 2)",
        "b.jsonl, row 1 (line 1)",
        "sub/a.txt, row 1 (line 1)",
    ]


def test_patterns_are_replaced_by_the_files_that_match_sorted(tmp_path, monkeypatch):
    for name in ("b.txt", "a.txt", "c.txt.gz", "[1].txt", ".hidden.txt", "deep/er/a.txt", "deep/b.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(gzip.compress(b"x") if name.endswith(".gz") else b"x")
    (tmp_path / "folder.txt").mkdir()

    def files(*given) -> list[str]:
        found = open_files([tmp_path / each for each in given])
        return [Path(each.url).relative_to(tmp_path).as_posix() for each in found]

    assert files("*.txt") == ["[1].txt", "a.txt", "b.txt"]
    assert files("?.txt*") == ["a.txt", "b.txt", "c.txt.gz"]
    assert files("[b-z].*", "a.txt") == ["b.txt", "c.txt.gz", "a.txt"]
    assert files("**/a.txt") == ["a.txt", "deep/er/a.txt"]
    assert files("[1].txt") == ["[1].txt"]  # a file that exists
    monkeypatch.chdir(tmp_path)
    assert [each.url for each in open_files(["*.txt"])] == ["[1].txt", "a.txt", "b.txt"]


def test_a_folder_stands_for_the_files_in_it_that_are_data(tmp_path, monkeypatch):
    """As pyarrow's datasets find them, which have other endings, however."""
    names = ["b.txt", "[a].CSV.gz", "deep/er/a.ndjson", "data/data_x.txt", "deep/z.jsonl.zst", "x.parquet"]
    hidden = ["_x.txt", ".x.txt", "_deep/a.txt", "deep/.git/a.txt", "deep/_success.json"]
    for name in [*names, *hidden, "readme", "x.xlsx", "a.gz", "deep/x.py"]:
        (tmp_path / "data" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "data" / name).write_bytes(b"")
    known = {".txt", ".csv", ".ndjson", ".jsonl", ".parquet"}
    found = [Path(each).relative_to(tmp_path) for each in dataset(tmp_path / "data", pa.schema([]), "csv").files]
    expected = sorted(str(path) for path in found if known & {each.lower() for each in path.suffixes})
    assert expected == sorted(f"data/{name}" for name in names)
    for folder in (tmp_path / "data", f"{tmp_path}/data/", f"file://{tmp_path}/data"):
        assert [each.url for each in open_files([folder])] == [f"{tmp_path}/{name}" for name in expected]
    monkeypatch.chdir(tmp_path)
    assert [each.url for each in open_files(["data"])] == expected
    monkeypatch.chdir(tmp_path / "data")
    assert [each.url for each in open_files(["."])] == [name.removeprefix("data/") for name in expected]
    assert [each.name for each in open_files(["."])] == [name.removeprefix("data/") for name in expected]


def test_a_folder_of_a_url():
    system = fsspec.filesystem("memory")
    names = ["b.txt", "deep/a.jsonl", "deep/_a.jsonl", "_deep/a.txt", "readme"]
    for name in names:
        system.pipe(f"/a_url/{name}", b'{"text": "x"}')
    files = open_files(["memory://a_url"])
    assert [each.url for each in files] == ["memory:///a_url/b.txt", "memory:///a_url/deep/a.jsonl"]
    assert [each.name for each in files] == ["b.txt", "deep/a.jsonl"]
    assert [row for _, row in read(Source(files))] == [{"text": '{"text": "x"}'}, {"text": "x"}]
    before = files[0].fingerprint()
    system.pipe("/a_url/b.txt", b"other")
    assert {name for name, value in files[0].fingerprint().items() if before[name] != value} >= {
        "size",
        "sha256_of_ends",
    }


def test_folders_with_brackets_are_not_patterns(tmp_path):
    (tmp_path / "[data]").mkdir()
    (tmp_path / "[data]" / "a.txt").write_text("x")
    (source,) = open_files([tmp_path / "[data]" / "*.txt"])
    assert source.url == str(tmp_path / "[data]" / "a.txt")


def test_patterns_without_a_match_are_errors(tmp_path):
    (tmp_path / "folder.csv").mkdir()
    for pattern in ("*.csv", "missing/*.txt", "a[.txt", "folder.cs?"):
        with pytest.raises(FileNotFoundError) as error:
            files_of([tmp_path / pattern])
        assert str(error.value).startswith(f"{tmp_path / pattern} matches no file; expected")


def test_the_recipe_keeps_the_pattern(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    given = ClassificationSettings(model="a/b", output="out", train_file=["rows-*.csv"], test_file=["more/?.csv"])
    (tmp_path / "recipe.yaml").write_text(recipe_of(given))
    again = read_settings(ClassificationSettings, ["recipe.yaml"])
    assert (again.train_file, again.test_file) == ([f"{tmp_path}/rows-*.csv"], [f"{tmp_path}/more/?.csv"])
    assert changed_flags(given, tmp_path / "recipe.yaml") == {}


def test_a_field_may_be_longer_than_the_csv_module_likes(write):
    text = "x" * 300_000
    assert read(write("x.csv", f"text\n{text}\n")) == [("x.csv, row 1 (line 2)", {"text": text})]


# ---------------------------------------------------------------------------------------------------------------------
# Rows that cannot be read


def test_bad_rows_of_csv_do_not_stop_the_reading(write):
    source = write(
        "x.csv",
        b"text,label\n"
        b"good,1\n"
        b"few\n"
        b"many,1,2\n"
        b"caf\xe9,1\n"
        b"zero\0byte,1\n"
        b'"two\nlines",0\n'
        b'"closed" early,1\n'
        b"good,2\n"
        b'"never closed,1\n'
        b"lost,1\n",
    )
    assert read(source) == [
        ("x.csv, row 1 (line 2)", {"text": "good", "label": "1"}),
        ("x.csv, row 2 (line 3)", "x.csv, row 2 (line 3): the row has 1 columns; expected 2, as in the header"),
        ("x.csv, row 3 (line 4)", "x.csv, row 3 (line 4): the row has 3 columns; expected 2, as in the header"),
        ("x.csv, row 4 (line 5)", "x.csv, row 4 (line 5): 'text' is not valid UTF-8"),
        ("x.csv, row 5 (line 6)", {"text": "zero\0byte", "label": "1"}),
        ("x.csv, row 6 (line 7)", {"text": "two\nlines", "label": "0"}),
        ("x.csv, row 7 (line 9)", "x.csv, row 7 (line 9): invalid quotation or field (',' expected after '\"')"),
        ("x.csv, row 8 (line 10)", {"text": "good", "label": "2"}),
        (
            "x.csv, row 9 (line 11)",
            "x.csv, row 9 (line 11): invalid quotation or field (unexpected end of data); the lines up to 12 are lost "
            "with it",
        ),
    ]


def test_a_quotation_that_nobody_closes_does_not_fill_the_memory(write, monkeypatch):
    monkeypatch.setattr(row_files, "LONGEST_FIELD", 1000)
    before = csv.field_size_limit(1000)
    try:
        rows = read(write("x.csv", 'text\n"open\n' + "word\n" * 300 + "end\n"))
    finally:
        csv.field_size_limit(before)
    place, problem = rows[0]
    assert place == "x.csv, row 1 (line 2)"
    # 5 and 199 × 5 characters, those of the lines 2 to 201, fit.
    assert problem.endswith("(field larger than field limit (1000)); the lines up to 202 are lost with it")
    assert rows[-1][1] == {"text": "end"}


def test_bad_rows_of_json_lines_do_not_stop_the_reading(write):
    source = write(
        "x.jsonl",
        b'{"text": "good"}\n'
        b'{"text": \n'
        b'["a list"]\n'
        b'{"text": "caf\xe9"}\n'
        b'{"deep": [{"\\ud800": 1}]}\n' + b"[" * 100_000 + b"\n"
        b'{"text": "\\ud83d\\ude00"}\n',
    )
    rows = [row for _, row in read(source)]
    assert rows[0] == {"text": "good"}
    assert re.fullmatch(r"x.jsonl, row 2 \(line 2\): not valid JSON \(.*\); expected an object on each line", rows[1])
    assert rows[2] == "x.jsonl, row 3 (line 3): a JSON list; expected an object on each line"
    assert rows[3] == "x.jsonl, row 4 (line 4): 'text' is not valid UTF-8"
    assert rows[4] == "x.jsonl, row 5 (line 5): 'deep' is not valid UTF-8"
    assert "row 6 (line 6): not valid JSON" in rows[5]
    assert rows[6:] == [{"text": "😀"}]


def test_bad_rows_of_a_json_array_do_not_stop_the_reading(write):
    source = write(
        "x.json", b'[\n{"text": "good"},\n7, "a, [text", ["a list", {}],\n{"text": "caf\xe9"}, {"text": "last"}]'
    )
    rows = [row if isinstance(row, dict) else row.removeprefix("x.json, ") for _, row in read(source)]
    assert rows == [
        {"text": "good"},
        "row 2: a JSON int; expected an array of objects",
        "row 3: a JSON str; expected an array of objects",
        "row 4: a JSON list; expected an array of objects",
        "row 5: 'text' is not valid UTF-8",
        {"text": "last"},
    ]


def test_bad_rows_of_text_do_not_stop_the_reading(write):
    lines = [row for _, row in read(write("x.txt", b"one\ncaf\xe9\nthree"))]
    assert lines == [{"text": "one"}, "x.txt, row 2 (line 2): 'text' is not valid UTF-8", {"text": "three"}]


def parquet_of(table: pa.Table) -> bytes:
    file = io.BytesIO()
    parquet.write_table(table, file)
    return file.getvalue()


NOT_UTF8 = parquet_of(pa.table({"text": pa.array([b"good", b"caf\xe9"]).view(pa.string())}))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("x.csv", b"", "x.csv has no rows"),
        ("x.csv", b"text,label\n\n\n", "x.csv has no rows"),
        ("x.txt", b"\n \n", "x.txt has no rows"),
        ("x.jsonl", b"", "x.jsonl has no rows"),
        ("x.json", b" [\n]\n", "x.json has no rows"),
        ("x.txt.gz", gzip.compress(b""), "x.txt.gz has no rows"),
        ("x.csv", b"text,text\na,b\n", "x.csv has 'text' twice in the header"),
        ("x.csv", "text,label\na,b\n".encode("utf-16"), "x.csv has an invalid header: .* UTF-8"),
        ("x.csv", b'"text"s,label\na,b\n', "x.csv has an invalid header: invalid quotation or field"),
        ("x.json", b'[{"n": 1}, {"n": 2}', r"x.json is not valid JSON \(.* line 1 column 20"),
        ("x.json", b'[{"n": 1}]\n \n{"n": 2}', r"x.json is not valid JSON \(Extra data: line 3"),
        ("x.json", b"[" * 1000, "x.json is a JSON array of more than 899 characters; expected JSON lines"),
        ("x.json", b"[" * 899, "x.json is not valid JSON"),
        ("x.parquet", b"not this", "x.parquet cannot be read: .*[Pp]arquet"),
        ("x.parquet", NOT_UTF8, "x.parquet cannot be read: .*utf-8"),
    ],
    ids=[
        "empty",
        "header alone",
        "blank",
        "no lines",
        "empty array",
        "empty gzip",
        "same name",
        "UTF-16",
        "broken header",
        "no end",
        "text after the end",
        "long",
        "deep",
        "no Parquet",
        "Parquet not in UTF-8",
    ],
)
def test_a_file_that_makes_no_sense_is_an_error(name, content, message, write, monkeypatch):
    monkeypatch.setattr(row_files, "LONGEST_ARRAY", 899)
    source = write(name, content)
    for start in (read, Source.columns, lambda source: stream_rows(source, keep_text, "stop")):
        with pytest.raises(ValueError, match=message) as error:
            start(source)
        assert str(error.value).startswith(str(source))
        assert "\n" not in str(error.value)


LINES = {
    ".csv": "text\n" + "".join(f"word {n}\n" for n in range(1000)),
    ".tsv": "text\n" + "".join(f"word {n}\n" for n in range(1000)),
    ".jsonl": "".join(f'{{"text": "word {n}"}}\n' for n in range(1000)),
    ".json": json.dumps([{"text": f"word {n}"} for n in range(1000)]),
    ".txt": "".join(f"word {n}\n" for n in range(1000)),
}


@pytest.mark.parametrize("ending", LINES)
@pytest.mark.parametrize("damage", ["truncated", "corrupt", "wrong checksum", "not gzip"])
@pytest.mark.parametrize("make", [load_rows, stream_rows])
def test_damaged_gzip_files_are_errors_of_one_line(ending, damage, make, write):
    whole = gzip.compress(LINES[ending].encode(), mtime=0)
    content = {
        "truncated": whole[:-100],
        "corrupt": whole[:-1000] + b"\xff" * 500 + whole[-500:],
        "wrong checksum": whole[:-8] + b"\0" * 8,
        "not gzip": LINES[ending].encode(),
    }[damage]
    fails_to_read(write(f"x{ending}.gz", content), make, "gz")


@pytest.mark.parametrize("ending", LINES)
@pytest.mark.parametrize("damage", ["truncated", "one byte less", "not zstd"])
@pytest.mark.parametrize("make", [load_rows, stream_rows])
def test_damaged_zst_files_are_errors_of_one_line(ending, damage, make, write):
    whole = COMPRESSED[".zst"](LINES[ending].encode())
    content = {"truncated": whole[:-100], "one byte less": whole[:-1], "not zstd": LINES[ending].encode()}[damage]
    fails_to_read(write(f"x{ending}.zst", content), make, "zst")


def fails_to_read(source: Source, make, kind: str) -> None:
    with pytest.raises(OSError, match=rf"cannot be read: .*; expected a complete \.{kind} file$") as error:
        list(make(source, keep_text, "skip"))
    assert str(error.value).startswith(f"{source} cannot be read: ")
    assert str(error.value).count("cannot be read") == 1
    assert "\n" not in str(error.value)


def test_zst_files_need_pyarrow(write, monkeypatch):
    source = write("x.txt.zst", COMPRESSED[".zst"](b"one\n"))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(CommandError, match="pyarrow"):
        read(source)


def test_an_empty_parquet_file_is_an_error(tmp_path):
    parquet.write_table(pa.table({"text": pa.array([], pa.string())}), tmp_path / "x.parquet")
    with pytest.raises(ValueError, match="has no rows"):
        read(files_of([tmp_path / "x.parquet"]))


@pytest.mark.parametrize(("name", "word"), [("gone.csv", "no such file"), ("folder.csv", "has no file")])
def test_a_file_that_does_not_exist(name, word, tmp_path):
    (tmp_path / "folder.csv").mkdir()
    with pytest.raises(OSError, match=f"{name}.* {word}"):
        open_files([tmp_path / name])


@pytest.mark.parametrize(("name", "ending"), [("x.xls", ".xls"), ("x.xls.gz", ".xls"), ("x.gz", ""), ("x", "")])
def test_an_ending_that_is_not_known(name, ending):
    with pytest.raises(ValueError, match=f"{name} has the unknown ending '{ending}'; expected .csv, .tsv, .jsonl"):
        open_files([name])


# ---------------------------------------------------------------------------------------------------------------------
# Datasets with names


@pytest.fixture(params=[datasets.List, datasets.LargeList])
def labelled(request) -> datasets.Dataset:
    label = datasets.ClassLabel(names=["bad", "good"])
    features = datasets.Features({"text": datasets.Value("string"), "label": label, "tags": request.param(label)})
    rows = [{"text": "a", "label": 1, "tags": [0, 1]}, {"text": "b", "label": -1, "tags": None}]
    return datasets.Dataset.from_list(rows, features=features)


WITH_NAMES = [{"text": "a", "label": "good", "tags": ["bad", "good"]}, {"text": "b", "label": None, "tags": None}]


def test_labels_of_parquet_come_as_their_names(labelled, tmp_path):
    labelled.to_parquet(tmp_path / "x.parquet")
    assert [row for _, row in read(files_of([tmp_path / "x.parquet"]))] == WITH_NAMES


@pytest.mark.parametrize("streaming", [False, True])
def test_a_dataset_by_name(streaming, labelled, tmp_path):
    (tmp_path / "named").mkdir()
    labelled.to_parquet(tmp_path / "named" / "train.parquet")
    name = str(tmp_path / "named")
    source = hub_of(name, "train", streaming=streaming)
    assert read(source) == [(f"{name} (train), row {number}", row) for number, row in enumerate(WITH_NAMES, 1)]
    rows = list(stream_rows(source, keep_text, "stop") if streaming else load_rows(source, keep_text, "stop"))
    assert rows == [{"text": text, "place": f"{name} (train), row {n}"} for n, text in enumerate("ab", 1)]
    assert source.columns() == ["text", "label", "tags"]


@pytest.mark.parametrize("split", ["train[:1]", "train[50%:]", "train+train"])
def test_parts_of_splits(split, labelled, tmp_path):
    (tmp_path / "named").mkdir()
    labelled.to_parquet(tmp_path / "named" / "train.parquet")
    source = hub_of(tmp_path / "named", split, streaming=True)
    assert source.columns() == ["text", "label", "tags"]
    texts = [row["text"] for _, row in read(source)]
    assert texts == {"train[:1]": ["a"], "train[50%:]": ["b"], "train+train": ["a", "b", "a", "b"]}[split]
    assert [row["text"] for row in stream_rows(source, keep_text, "stop")] == texts


def test_a_dataset_that_cannot_be_had_is_one_line(monkeypatch):
    def load(name, config, split, streaming):
        assert (name, config, split, streaming) == ("a/b", "c", "test", False)
        raise ConnectionError("no way\nto get there")

    monkeypatch.setattr(datasets, "load_dataset", load)
    with pytest.raises(OSError, match=r"^a/b \(test\) cannot be read: .* the Hub cannot be reached; expected [^\n]*$"):
        list(HubDataset("a/b", "test", "c").rows())


@pytest.mark.parametrize(
    ("name", "content", "word"),
    [("named.py", "", "scripts are no longer supported"), ("train.jsonl", "[1]\n{", "generating the dataset")],
)
def test_a_folder_that_datasets_cannot_read_is_one_line(name, content, word, tmp_path):
    (tmp_path / "named").mkdir()
    (tmp_path / "named" / name).write_text(content)
    with pytest.raises(ValueError, match=rf"^{tmp_path / 'named'} \(train\) cannot be read: [^\n]*{word}[^\n]*$"):
        list(hub_of(tmp_path / "named", "train").rows())


# ---------------------------------------------------------------------------------------------------------------------
# Types


NUMBERS = pa.table(
    {
        "big": pa.array([2**64 - 1, None], pa.uint64()),
        "time": pa.array([1_700_000_000_123_456, 0], pa.timestamp("us", "UTC")),
        "day": pa.array([1, None], pa.date32()),
        "price": pa.array([Decimal("12.3400"), Decimal("-0.0001")], pa.decimal128(12, 4)),
        "half": pa.array(np.array([0.5, 1], np.float16)),
        "vector": pa.array([[1, 2], [3, 4]], pa.list_(pa.int8(), 2)),
        "pair": pa.array([{"a": 1}, None], pa.struct({"a": pa.int16()})),
        "kind": pa.array(["a", "b"]).dictionary_encode(),
        "text": pa.array(["a", "b"], pa.large_string()),
    }
)


@pytest.mark.parametrize("ending", ["", ".gz", ".zst"])
def test_types_and_values_of_parquet_are_kept(ending, write):
    [file] = write(f"x.parquet{ending}", COMPRESSED.get(ending, bytes)(parquet_of(NUMBERS))).inputs
    assert file.types() == {field.name: field.type for field in NUMBERS.schema}
    rows = [row.content for row in file.rows()]
    assert pa.Table.from_pylist(rows, pa.schema(file.types())) == NUMBERS


def test_types_of_labels_are_those_of_their_names(labelled, tmp_path):
    (tmp_path / "named").mkdir()
    labelled.to_parquet(tmp_path / "named" / "train.parquet")
    expected = pa.table({name: [row[name] for row in WITH_NAMES] for name in WITH_NAMES[0]}).schema
    inputs = [
        *open_files([tmp_path / "named" / "train.parquet"]),
        *(HubDataset(str(tmp_path / "named"), "train", streaming=streaming) for streaming in (False, True)),
    ]
    for each in inputs:
        assert each.types() == {field.name: field.type for field in expected}
        assert list(each.types().values()) == [pa.string(), pa.string(), pa.list_(pa.string())]


@pytest.mark.parametrize("name", ["x.csv", "x.tsv", "x.jsonl", "x.ndjson", "x.json", "x.txt", "x.conll", "x.csv.gz"])
def test_formats_without_types(name, write):
    [file] = write(name, b"").inputs
    assert file.types() is None


# ---------------------------------------------------------------------------------------------------------------------
# Columns, and what is kept


def test_the_column_that_is_named_or_the_first_there_is(write):
    columns = write("x.csv", "text,label\nx\na,1\n").columns()
    assert columns == ["text", "label"]
    assert find_column(columns, None, ["sentence", "text", "label"], "the text") == "text"
    assert find_column(columns, "label", ["text"], "the text") == "label"
    with pytest.raises(ValueError, match=r"^there is no column 'tetx' for the text; the columns are 'text', 'label'$"):
        find_column(columns, "tetx", ["text"], "the text")
    with pytest.raises(
        ValueError, match=r"for the target; expected 'target' or 'summary', .* columns are 'text', 'label'$"
    ):
        find_column(columns, None, ["target", "summary"], "the target")


def test_columns_of_json_lines_are_those_of_many_rows(write):
    assert write("x.jsonl", '{"b": 1}\n[]\n{"a": 1, "b": 2}\n').columns() == ["b", "a"]
    with pytest.raises(ValueError, match=r"x.jsonl, row 1 \(line 1\): a JSON list"):
        write("x.jsonl", '[{"a": 1}]\n{"a": \n').columns()


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"other": "x"}, "'text' is missing"),
        ({"text": None}, "'text' is empty"),
        ({"text": ""}, "'text' is empty"),
        ({"text": " \n"}, "'text' is empty"),
        ({"text": 5}, "'text' is 5; expected a text"),
    ],
)
def test_text_that_is_none(row, message):
    with pytest.raises(ValueError, match=f"^{message}$"):
        text_of(row, "text")


def test_text_stays_as_it_is():
    assert text_of({"text": " a "}, "text") == " a "


ROWS = "text,label\none,1\n,1\ntwo,0\nthree\nfour,9\nfive,1\n"


def check_label(row: dict) -> dict:
    if row["label"] not in ("0", "1"):
        raise ValueError(f"'label' is {row['label']!r}; wanted is '0' or '1'")
    return {"text": text_of(row, "text"), "label": int(row["label"])}


@pytest.mark.parametrize("make", [load_rows, stream_rows])
def test_stop_names_the_first_bad_row(make, write):
    with pytest.raises(ValueError, match=r"^x.csv, row 2 \(line 3\): 'text' is empty$"):
        list(make(write("x.csv", ROWS), check_label, "stop"))


@pytest.mark.parametrize("make", [load_rows, stream_rows])
def test_skip_keeps_the_good_rows_and_reports_the_bad(make, write):
    told = []
    kept = list(make(write("x.csv", ROWS), check_label, "skip", told.append))
    assert kept == [
        {"text": "one", "label": 1, "place": "x.csv, row 1 (line 2)"},
        {"text": "two", "label": 0, "place": "x.csv, row 3 (line 4)"},
        {"text": "five", "label": 1, "place": "x.csv, row 6 (line 7)"},
    ]
    assert told == [
        "3 of 6 rows are invalid and were skipped:\n"
        "  x.csv, row 2 (line 3): 'text' is empty\n"
        "  x.csv, row 4 (line 5): the row has 1 columns; expected 2, as in the header\n"
        "  x.csv, row 5 (line 6): 'label' is '9'; wanted is '0' or '1'"
    ]


def test_a_long_report_is_cut(write):
    told = []
    load_rows(write("x.csv", "text,label\na,1\n" + "a,2\n" * 7), check_label, "skip", told.append)
    (report,) = told
    assert report.startswith("7 of 8 rows are invalid")
    assert [line.strip().split(":")[0] for line in report.splitlines()[1:]] == [
        *(f"x.csv, row {number} (line {number + 1})" for number in range(2, 7)),
        "and 2 more",
    ]


def test_no_good_row_is_an_error(write):
    told = []
    source = write("x.csv", "text,label\na,2\nb,3\n")
    with pytest.raises(ValueError, match=r"^all 2 rows are invalid; the first is x.csv, row 1 \(line 2\): 'label'"):
        load_rows(source, check_label, "skip", told.append)
    assert told == []
    assert list(stream_rows(source, check_label, "skip", told.append)) == []
    assert told[0].startswith("2 of 2 rows are invalid")


@pytest.mark.parametrize("make", [load_rows, stream_rows])
def test_a_file_without_a_valid_row_is_skipped_if_others_have_one(make, tmp_path):
    files = []
    for name, labels in (("a", "xy"), ("b", "1z"), ("c", "01")):
        files.append(tmp_path / f"{name}.csv")
        files[-1].write_text("text,label\n" + "".join(f"w,{label}\n" for label in labels))
    reports = []
    rows = make(files_of(files), check_label, "skip", reports.append)
    for _ in range(2):
        assert [row["place"][:12] for row in rows] == ["b.csv, row 1", "c.csv, row 1", "c.csv, row 2"]
    assert "a.csv, row 1" in reports[0]


@pytest.mark.parametrize("make", [load_rows, stream_rows])
def test_good_rows_need_no_report(make, write):
    told = []
    source = write("x.csv", "text,label\na,1\n")
    assert len(list(make(source, check_label, "skip", told.append))) == 1
    assert told == []


def test_a_fault_of_the_check_is_no_bad_row(write):
    with pytest.raises(KeyError):
        load_rows(write("x.csv", "text\na\n"), check_label, "skip")


def test_nothing_is_cached(write, cache):
    for text in ("one", "two"):
        source = write("x.csv", f"text\n{text}\n")
        loaded = load_rows(source, keep_text, "stop")
        assert isinstance(loaded, datasets.Dataset)
        assert loaded.cache_files == []
        assert list(loaded["text"]) == [text]
        assert next(iter(stream_rows(source, keep_text, "stop")))["text"] == text
    assert not cache.exists()


# ---------------------------------------------------------------------------------------------------------------------
# The first rows only


@pytest.mark.parametrize("make", [load_rows, stream_rows])
def test_max_rows_counts_valid_rows(make, write):
    told, files = [], write("x.csv", ROWS).inputs
    rows = list(make(Source(files, max_rows=2), check_label, "skip", told.append))
    assert [row["text"] for row in rows] == ["one", "two"]
    assert told == ["1 of 3 rows are invalid and were skipped:\n  x.csv, row 2 (line 3): 'text' is empty"]
    assert len(list(make(Source(files, max_rows=99), check_label, "skip", told.append))) == 3
    with pytest.raises(ValueError, match="row 2"):
        list(make(Source(files, max_rows=2), check_label, "stop"))


@pytest.mark.parametrize("make", [load_rows, stream_rows])
def test_nothing_is_read_after_max_rows(make, write, monkeypatch):
    read_text, lines = row_files.READERS[".txt"], []

    def recorded(file):
        for line, row in read_text(file):
            lines.append(row["text"])
            yield line, row

    monkeypatch.setitem(row_files.READERS, ".txt", recorded)
    texts = {"a.txt": "a\nb\n", "b.txt": "c\nd\ne", "c.txt": ""}
    files = [file for name, text in texts.items() for file in write(name, text).inputs]
    source = Source(files, max_rows=3)
    assert source.columns() == ["text"]
    for _ in range(2):
        assert [row["text"] for row in make(source, keep_text, "stop")] == ["a", "b", "c"]
    assert set(lines) == {"a", "b", "c"}
    with pytest.raises(ValueError, match=r"c.txt has no rows"):
        list(make(Source(files, max_rows=6), keep_text, "stop"))


def test_columns_are_those_of_the_rows_that_may_be_used(write):
    files = write("x.jsonl", '[]\n{"a": 1}\n{"b": 1}\n').inputs
    assert [Source(files, n).columns() for n in (1, 2, 3)] == [["a"], ["a", "b"], ["a", "b"]]


@pytest.mark.parametrize("streaming", [False, True])
def test_max_rows_of_a_dataset(streaming, labelled, tmp_path):
    (tmp_path / "named").mkdir()
    labelled.to_parquet(tmp_path / "named" / "train.parquet")
    source = hub_of(tmp_path / "named", "train", 1, streaming)
    assert [row["text"] for row in (stream_rows if streaming else load_rows)(source, keep_text, "stop")] == ["a"]


TASK_ROWS = {
    ClassificationSettings: [{"text": "good film", "label": "1"}, {"text": "bad film", "label": "0"}],
    TokenClassificationSettings: [{"tokens": ["good", "film"], "tags": ["B-X", "O"]}],
    Seq2SeqSettings: [{"source": "good", "target": "bad"}],
    QuestionAnsweringSettings: [
        {"question": "who", "context": "good film", "answers": {"text": ["film"], "answer_start": [5]}}
    ],
    PretrainingSettings: [{"text": "good bad film who"}],
}
STREAMED = {"streaming": True, "max_steps": 1}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> str:
    return save_tiny(tmp_path_factory.mktemp("tiny"), ["good", "bad", "film", "who"])


@pytest.mark.parametrize("by_name", [False, True], ids=["files", "dataset"])
@pytest.mark.parametrize(
    ("settings_class", "flags"),
    [*((each, {}) for each in TASK_ROWS), (PretrainingSettings, STREAMED)],
    ids=lambda each: each.__name__ if isinstance(each, type) else "streamed" if each else "",
)
def test_tasks_use_the_first_samples(settings_class, flags, by_name, tiny, tmp_path):
    good, bad = TASK_ROWS[settings_class], dict.fromkeys(TASK_ROWS[settings_class][0])
    folder = tmp_path / "named"  # the cache is beside it
    folder.mkdir()
    for split, count in (("train", 3), ("validation", 2), ("test", 2)):
        rows = [*(good * 3)[:count], bad]  # a bad row would stop the reading
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    files = {f"{split}_file": [str(folder / f"{split}.jsonl")] for split in ("train", "validation", "test")}
    flags = {"max_length": 24, "max_target_length": 8, "stride": 4, "line_by_line": True} | flags
    known = {name: value for name, value in flags.items() if name in settings_class.__dataclass_fields__}
    known |= {"dataset": str(folder), "test_split": "test"} if by_name else files
    module, _, name = settings_class.task.partition(":")
    task_class = getattr(importlib.import_module(module), name)
    task = make_task(task_class, settings_class, model=tiny, max_train_samples=3, max_eval_samples=2, **known)
    assert len(list(task.train_set)) == 3
    assert {split: len(examples) for split, examples in task.splits.items()} == {"validation": 2, "test": 2}


def test_numbers_of_samples_are_positive_and_not_free_to_change(tmp_path):
    given = {"model": "a/b", "output": "out", "train_file": ["x.csv"], "test_file": ["y.csv"]}
    for name in ("max_train_samples", "max_eval_samples"):
        with pytest.raises(ValueError, match=f"--{name} is 0; expected 1 or more"):
            ClassificationSettings(**given, **{name: 0})
        (tmp_path / "recipe.yaml").write_text(recipe_of(ClassificationSettings(**given, **{name: 5})))
        assert changed_flags(ClassificationSettings(**given), tmp_path / "recipe.yaml") == {name: (5, None)}


def test_splits_are_the_same_with_other_numbers_of_samples():
    same = {"model": "a/b", "output": "out", "dataset": "c/d", "validation_split": "train"}
    (warning,) = shared_data(ClassificationSettings(**same, max_train_samples=9, max_eval_samples=5))
    assert warning.startswith("c/d (train) is in the train rows and in the validation rows")


# ---------------------------------------------------------------------------------------------------------------------
# Streams


@pytest.mark.parametrize("kind", ["csv", "jsonl", "txt", "parquet", "txt.gz"])
def test_a_stream_never_holds_the_file(kind, tmp_path):
    path, rows, row = tmp_path / f"x.{kind}", 3000, {"text": "many words " * 500}
    if kind == "parquet":
        parquet.write_table(pa.Table.from_pylist([row] * rows), path, use_dictionary=False, compression=None)
    else:
        line = json.dumps(row) if kind == "jsonl" else row["text"]
        content = "text\n" * (kind == "csv") + f"{line}\n" * rows
        path.write_bytes(gzip.compress(content.encode(), 1) if kind == "txt.gz" else content.encode())
    budget, arrows_budget = 6_000_000, 10_000_000
    assert kind == "txt.gz" or path.stat().st_size > 16_000_000
    arrow = pa.total_allocated_bytes()
    tracemalloc.start()
    try:
        count = 0
        for _ in stream_rows(files_of([path]), keep_text, "stop"):
            count += 1
            assert pa.total_allocated_bytes() - arrow < arrows_budget
        assert count == rows
        assert tracemalloc.get_traced_memory()[1] < budget
    finally:
        tracemalloc.stop()


def test_a_stream_is_read_again_and_goes_on_where_it_was(tmp_path):
    for name, letters in (("a.txt", "abc"), ("b.txt", "defg")):
        (tmp_path / name).write_text("\n".join(letters))
    unpicklable = (character for character in "")

    def check(row):
        assert unpicklable is not None
        return row

    stream = stream_rows(files_of([tmp_path / "a.txt", tmp_path / "b.txt"]), check, "stop")
    assert isinstance(stream, datasets.IterableDataset)
    assert stream.num_shards == 2
    for _ in range(2):
        assert "".join(row["text"] for row in stream) == "abcdefg"
    assert [row["place"] for row in stream][3] == "b.txt, row 1 (line 1)"
    seen = iter(stream)
    assert [next(seen)["text"] for _ in range(5)] == list("abcde")
    state = stream.state_dict()
    resumed = stream_rows(files_of([tmp_path / "a.txt", tmp_path / "b.txt"]), check, "stop")
    resumed.load_state_dict(state)
    assert [row["text"] for row in resumed] == ["f", "g"]
    assert sorted(row["text"] for row in stream.shuffle(seed=1, buffer_size=3)) == list("abcdefg")
    halves = [split_dataset_by_node(stream, rank, 2) for rank in range(2)]
    assert ["".join(row["text"] for row in half) for half in halves] == ["abc", "defg"]


def test_a_stream_that_is_broken_off_reports_as_well(write):
    told = []
    rows = iter(stream_rows(write("x.txt", b"a\n\xe9\nb\nc\n"), keep_text, "skip", told.append))
    assert [next(rows)["text"] for _ in range(2)] == ["a", "b"]
    del rows
    assert len(told) == 1
    assert told[0].startswith("1 of 3 rows are invalid")


# ---------------------------------------------------------------------------------------------------------------------
# Which rows make a batch

# Lists of any size up to 130: hypothesis' own are nearly all short.
LENGTHS = st.builds(
    lambda count, seed: np.random.default_rng(seed).integers(1, 50, count).tolist(),
    st.integers(1, 130),
    st.integers(0, 1000),
)


def sampled(lengths, batch_size, world, epoch=0, **options) -> list[list[list[int]]]:
    """The batches of each process."""
    processes = []
    for rank in range(world):
        sampler = LengthGroupedBatches(lengths, batch_size, rank=rank, world=world, **options)
        sampler.set_epoch(epoch)
        processes.append(list(sampler))
        assert len(sampler) == len(processes[-1])
    return processes


@settings(max_examples=150)
@given(LENGTHS, st.integers(1, 5), st.integers(1, 4), st.integers(0, 3))
def test_batches_cover_the_rows(lengths, batch_size, world, epoch):
    if len(lengths) < world:
        with pytest.raises(ValueError, match=f"{len(lengths)} rows for {world} processes"):
            LengthGroupedBatches(lengths, batch_size, 0, world=world)
        return
    processes = sampled(lengths, batch_size, world, epoch, seed=3)
    steps = list(zip(*processes, strict=True))  # as many batches on each process
    seen = sorted(row for step in steps for batch in step for row in batch)
    whole, left = divmod(len(lengths), batch_size * world)
    assert seen == list(range(len(lengths)))
    assert all(len(batch) == batch_size for step in steps[:whole] for batch in step)
    assert len(steps) == whole + (left > 0)
    for step in steps[whole:]:
        sizes = [len(batch) for batch in step]
        assert max(sizes) - min(sizes) <= 1
    if whole:
        assert max(lengths) in {lengths[row] for batch in steps[0] for row in batch}


@settings(max_examples=60)
@given(LENGTHS, st.integers(1, 4), st.integers(1, 3), st.integers(0, 5), st.integers(0, 5), st.data())
def test_a_resumed_epoch_has_exactly_the_remaining_batches(lengths, batch_size, world, seed, epoch, data):
    if len(lengths) < world:
        return
    whole = sampled(lengths, batch_size, world, epoch, seed=seed)
    start = data.draw(st.integers(0, len(whole[0])))
    for rank in range(world):
        resumed = LengthGroupedBatches(lengths, batch_size, seed, rank, world)
        resumed.set_epoch(epoch)
        resumed.set_start(start)
        resumed.set_epoch(epoch)  # as accelerate's loader does once more
        assert len(resumed) == len(whole[0]) - start
        assert resumed.batches_per_epoch == len(whole[0])
        assert list(resumed) == whole[rank][start:]
        resumed.set_epoch(epoch + 1)
        following = sampled(lengths, batch_size, world, epoch + 1, seed=seed)
        assert list(resumed) == following[rank]


@pytest.mark.parametrize("rows", [*range(30, 41), 297, 300])
def test_processes_share_the_steps_of_one_with_the_larger_batch(rows):
    lengths = torch.randint(1, 60, (rows,)).tolist()
    two, one = sampled(lengths, 4, 2, 1, seed=7), sampled(lengths, 8, 1, 1, seed=7)
    assert [sorted(a + b) for a, b in zip(*two, strict=True)] == [sorted(batch) for batch in one[0]]


def test_batches_that_are_not_grouped_have_rows_of_any_length():
    lengths = list(range(1, 401))
    grouped, drawn = (sampled(lengths, 4, 1, 0, seed=7, grouped=grouped)[0] for grouped in (True, False))
    spread = [np.mean([np.ptp(batch) for batch in batches]) for batches in (grouped, drawn)]
    assert spread[0] < 20 < 200 < spread[1]  # of four uniform numbers: 3 / 5 of 400
    assert sorted(row for batch in drawn for row in batch) == list(range(400))
    assert 399 in drawn[0]


def test_seed_and_epoch_change_the_batches():
    lengths = [5] * 100
    orders = [sampled(lengths, 4, 1, epoch, seed=seed)[0] for seed, epoch in [(0, 0), (0, 1), (1, 0), (1, 1)]]
    assert all(orders[a] != orders[b] for a in range(4) for b in range(a))
    assert {tuple(sorted(batch)) for batch in orders[0]} != {tuple(sorted(batch)) for batch in orders[1]}


def test_rows_of_a_batch_are_of_like_length_and_batches_in_any_order():
    lengths = torch.randint(1, 129, (4000,)).tolist()
    (batches,) = sampled(lengths, 8, 1, seed=0)
    tokens = [[lengths[row] for row in batch] for batch in batches]
    padded = sum(max(batch) * len(batch) for batch in tokens)
    assert padded < 1.05 * sum(lengths)  # in random batches of 8: 1.8 times as many
    longest = [max(batch) for batch in tokens]
    assert longest[0] == max(lengths)
    rises = sum(a < b for a, b in itertools.pairwise(longest))
    assert 0.4 * len(longest) < rises < 0.6 * len(longest)


@pytest.mark.parametrize(("count", "lot"), [(4000, 400), (320, 80)])
def test_rows_are_sorted_in_lots(count, lot):
    """Of 50 batches' worth of rows, or a fourth of all, so that they meet other rows in each epoch."""
    lengths = torch.randperm(count).tolist()
    (batches,) = sampled(lengths, 8, 1, seed=0)
    spans = [max(lengths[row] for row in batch) - min(lengths[row] for row in batch) for batch in batches]
    # Neighbours among so many rows, drawn at random and sorted, are count / lot apart.
    assert sum(spans) / len(spans) == pytest.approx(7 * count / lot, rel=0.1)


def test_the_longest_row_is_in_the_first_step_though_it_were_left_over():
    for seed in range(60):
        (batches,) = sampled(range(9), 4, 1, seed=seed)
        assert 8 in batches[0]
        assert [len(batch) for batch in batches] == [4, 4, 1]
        assert sorted(row for batch in batches for row in batch) == list(range(9))


@pytest.mark.parametrize("options", [{"batch_size": 0}, {"rank": 1}, {"rank": -1}])
def test_numbers_out_of_range(options):
    with pytest.raises(ValueError, match="|".join(options)):
        LengthGroupedBatches([1] * 6, **{"batch_size": 2, "seed": 0, **options})


@pytest.mark.parametrize("start", [4, -1])
def test_a_start_after_the_epoch(start):
    with pytest.raises(ValueError, match=f"start is {start}"):
        LengthGroupedBatches([1] * 6, 2, 0).set_start(start)


@settings(max_examples=150)
@given(st.just([]) | LENGTHS, st.integers(1, 5), st.integers(1, 4))
def test_evaluation_sees_every_row_once(lengths, batch_size, world):
    processes = [evaluation_batches(lengths, batch_size, rank, world) for rank in range(world)]
    batches = [batch for process in processes for batch in process]
    assert sorted(row for batch in batches for row in batch) == list(range(len(lengths)))
    assert all(0 < len(batch) <= batch_size for batch in batches)
    counts = [len(process) for process in processes]
    assert max(counts) == -(-len(lengths) // (batch_size * world))
    if batch_size > 1 and len(lengths) >= world:
        assert min(counts) == max(counts)
    for process in processes:
        in_order = [lengths[row] for batch in process for row in batch]
        assert in_order == sorted(in_order, reverse=True)


# ---------------------------------------------------------------------------------------------------------------------
# Padded and flattened


@pytest.fixture
def tokenizer(minilm):
    return AutoTokenizer.from_pretrained(minilm)


@pytest.fixture
def examples() -> list[dict]:
    lengths = [4, 1, 7]
    ids = [torch.randint(1, 99, (length,)).tolist() for length in lengths]
    return [{"input_ids": row, "token_type_ids": [n % 2 for n in row], "place": "x.csv, row 1"} for row in ids]


def with_labels(examples, labels) -> list[dict]:
    return [example | {"labels": label} for example, label in zip(examples, labels, strict=True)]


def test_padded_by_hand(tokenizer):
    examples = [
        {"input_ids": [5, 6, 7], "token_type_ids": [0, 1, 1], "tags": [1, 2, 3], "labels": 1.5},
        {"input_ids": [8], "token_type_ids": [1], "tags": [4], "labels": 2.5},
    ]
    batch = PadOrFlatten(tokenizer, False, per_token=["tags"], per_sequence=["labels"])(examples)
    assert {name: value.tolist() for name, value in batch.items()} == {
        "input_ids": [[5, 6, 7], [8, 0, 0]],
        "token_type_ids": [[0, 1, 1], [1, 0, 0]],
        "attention_mask": [[1, 1, 1], [1, 0, 0]],
        "tags": [[1, 2, 3], [4, -100, -100]],
        "labels": [1.5, 2.5],
    }
    tokenizer.padding_side = "left"
    batch = PadOrFlatten(tokenizer, False, per_token=["tags"])(examples)
    assert batch["input_ids"].tolist() == [[5, 6, 7], [0, 0, 8]]
    assert batch["tags"].tolist() == [[1, 2, 3], [-100, -100, 4]]
    assert "labels" not in batch


def test_flattened_by_hand(tokenizer):
    examples = [
        {"input_ids": [5, 6, 7], "tags": [1, 2, 3], "labels": [1.0, 0.0], "token_type_ids": [0, 1, 1]},
        {"input_ids": [8], "tags": [4], "labels": [0.0, 1.0], "token_type_ids": [1]},
        {"input_ids": [9, 9], "tags": [-100, 5], "labels": [0.0, 0.0], "token_type_ids": [0, 0]},
    ]
    batch = PadOrFlatten(tokenizer, True, per_token=["tags"], per_sequence=["labels", "others"])(examples)
    assert (batch.pop("max_length_q"), batch.pop("max_length_k")) == (3, 3)
    assert batch["cu_seq_lens_q"].dtype == batch["cu_seq_lens_k"].dtype == torch.int32
    assert {name: value.tolist() for name, value in batch.items()} == {
        "input_ids": [[5, 6, 7, 8, 9, 9]],
        "token_type_ids": [[0, 1, 1, 1, 0, 0]],
        "position_ids": [[0, 1, 2, 0, 0, 1]],
        "cu_seq_lens_q": [0, 3, 4, 6],
        "cu_seq_lens_k": [0, 3, 4, 6],
        "tags": [[1, 2, 3, 4, -100, 5]],
        "labels": [[1.0, 0.0], [0.0, 1.0], [0.0, 0.0]],
    }


@pytest.mark.parametrize("flatten", [False, True])
@pytest.mark.parametrize("name", ["token_type_ids", "labels"])
def test_a_value_too_few_is_an_error(name, flatten, tokenizer):
    examples = [{"input_ids": [5, 6], "token_type_ids": [0, 0], "labels": [1, 2]} | {name: [1]}]
    with pytest.raises(ValueError, match=f"{name} has 1 values; expected 2"):
        PadOrFlatten(tokenizer, flatten, per_token=["labels"])(examples)


def test_padding_is_quiet(tokenizer, examples, said):
    PadOrFlatten(tokenizer, False)(examples)
    assert said() == []


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize(
    ("labels", "shape", "dtype"),
    [([2, 0, 1], (3,), torch.long), ([[1.0, 0.0, 1.0], [0.0] * 3, [1.0] * 3], (3, 3), torch.float)],
    ids=["single label", "multi label"],
)
def test_sequence_classification_padded_and_flattened(labels, shape, dtype, attention, tokenizer, examples):
    config = tiny_config(num_labels=3, attn_implementation=attention, **NO_DROPOUT)
    model = randomise(ScratchBertForSequenceClassification(config)).eval()
    batches = [
        PadOrFlatten(tokenizer, flatten, per_sequence=["labels"])(with_labels(examples, labels))
        for flatten in (False, True)
    ]
    assert [batch["input_ids"].shape for batch in batches] == [(3, 7), (1, 12)]
    for batch in batches:
        assert (batch["labels"].shape, batch["labels"].dtype) == (shape, dtype)
    padded, flattened = (model(**batch) for batch in batches)
    torch.testing.assert_close(flattened.logits, padded.logits, rtol=0, atol=1e-5)
    torch.testing.assert_close(flattened.loss, padded.loss, rtol=0, atol=1e-5)


@pytest.mark.parametrize("token_types", [False, True])
def test_token_classification_padded_and_flattened(token_types, tokenizer, examples):
    model = randomise(ScratchBertForTokenClassification(tiny_config(num_labels=3, **NO_DROPOUT))).eval()
    if not token_types:
        examples = [{"input_ids": example["input_ids"]} for example in examples]
    labels = [[-100, *(n % 3 for n in example["input_ids"][1:])] for example in examples]
    batches = [
        PadOrFlatten(tokenizer, flatten, per_token=["labels"])(with_labels(examples, labels))
        for flatten in (False, True)
    ]
    assert [batch["labels"].shape for batch in batches] == [(3, 7), (1, 12)]
    padded, flattened = (model(**batch) for batch in batches)
    real = batches[0]["attention_mask"].bool()
    torch.testing.assert_close(flattened.logits[0], padded.logits[real], rtol=0, atol=1e-5)
    torch.testing.assert_close(flattened.loss, padded.loss, rtol=0, atol=1e-5)
