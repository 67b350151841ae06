"""Reading data: a row for each kind of file that users have, good and bad."""

import bz2
import csv
import gzip
import io
import json
import re
from collections import Counter

import datasets
import fsspec
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from toolkit.data import (
    Source,
    canonical,
    find_column,
    hold_out,
    label_of,
    label_summary,
    label_warnings,
    number_of,
    open_files,
    skipped_rows,
    sorted_labels,
    text_of,
    value_of,
)

TWO = [("a", "x"), ("b", "y")]
TABLE = "text,label\na,x\nb,y\n"


def lines(*rows: dict) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def read(patterns, label_column=None, on_bad_row="stop", report=print, **options) -> list[tuple[str, str]]:
    """The texts and labels of files, as classification reads them."""
    source = Source("--train_file", open_files(map(str, patterns), "--train_file", **options))
    columns = source.columns()
    text = find_column(columns, "--text_column", None, ["text"])
    label = find_column(columns, "--label_column", label_column, ["label"])
    rows = source.valid_rows(
        lambda row: {"text": text_of(row, text), "label": label_of(value_of(row, label))}, on_bad_row, report
    )
    return [(row["text"], row["label"]) for row in rows]


NOT_UTF8 = io.BytesIO()
parquet.write_table(pa.table({"text": pa.array([b"caf\xe9"]).view(pa.string()), "label": ["x"]}), NOT_UTF8)

# A file's name and content, options of `read`, and the rows; or the error's type and what it names.
CASES = {
    "byte order mark": ("r.csv", "\ufeff" + TABLE, {}, TWO),
    "cp1252": ("r.csv", "text,label\ncafé,x\n".encode("cp1252"), {"encoding": "cp1252"}, [("café", "x")]),
    "cp1252 read as UTF-8": ("r.csv", "text,label\na,x\ncafé,x\n".encode("cp1252"), {}, "row 2 (line 3).*--encoding"),
    "UTF-16": ("r.csv", TABLE.encode("utf-16"), {"encoding": "utf-16"}, TWO),
    "UTF-16 read as UTF-8": ("r.csv", TABLE.encode("utf-16"), {}, "r.csv.*--encoding utf-16"),
    "unknown bytes of another encoding": ("r.csv", b"text,label\n\xff,x\n", {"encoding": "ascii"}, "r.csv.*--encoding"),
    "semicolons": ("r.csv", TABLE.replace(",", ";"), {"delimiter": ";"}, TWO),
    "semicolons read as commas": ("r.csv", TABLE.replace(",", ";"), {}, "--delimiter ';'"),
    "quoted newline": ("r.csv", 'text,label\n"a\nb",x\nb,y\n', {}, [("a\nb", "x"), ("b", "y")]),
    "unclosed quote": ("r.csv", 'text,label\na,x\n"b,y\n', {}, "row 2 (line 3)"),
    "quote in the middle of a quoted field": ("r.csv", 'text,label\n"a"b,x\n', {}, "row 1 (line 2)"),
    "inches": ("r.csv", 'text,label\n5" pipe,x\n', {}, [('5" pipe', "x")]),
    "a field too many in one row": ("r.csv", "text,label\na,x\nb,y,z\n", {}, "row 2 (line 3)"),
    "a field too many in all rows": ("r.csv", "text,label\na,x,\nb,y,\n", {}, "row 1 (line 2)"),
    "a field too few": ("r.csv", "text,label\na\n", {}, "row 1 (line 2)"),
    "NA and null as text": ("r.csv", "text,label\nNA,null\nb,None\n", {}, [("NA", "null"), ("b", "None")]),
    "leading zeros": ("r.csv", "text,label\na,007\n", {}, [("a", "007")]),
    "a late text in a column of numbers": (
        "r.csv",
        "text,label\n" + "a,1\n" * 3000 + "b,one\n",
        {},
        [("a", "1")] * 3000 + [("b", "one")],
    ),
    "spaces and capitals in the header": ("r.csv", "Text , Label\na,x\nb,y\n", {}, TWO),
    "a column twice": ("r.csv", "text,text\na,x\n", {}, "r.csv.*'text'"),
    "missing column": ("r.csv", "text,kind\na,x\n", {}, "--label_column.*'kind'"),
    "named column that does not exist": ("r.csv", TABLE, {"label_column": "mood"}, "--label_column.*'mood'"),
    "empty text": ("r.csv", "text,label\na,x\n ,y\n", {}, "row 2 (line 3).*'text'"),
    "empty label": ("r.csv", "text,label\na,\n", {}, "row 1 (line 2).*label"),
    "empty file": ("r.csv", "", {}, "r.csv"),
    "header without rows": ("r.csv", "text,label\n", {}, "--train_file.*r.csv"),
    "a long text": ("r.csv", f"text,label\n{'a' * 200_000},x\n", {}, [("a" * 200_000, "x")]),
    "tabs and unpaired quotes": ("r.tsv", 'text\tlabel\n"a\tx\n"b ""c"""\ty\n', {}, [('"a', "x"), ('b "c"', "y")]),
    "a table in .txt": ("r.txt", TABLE, {"delimiter": ","}, TWO),
    "gzip": ("r.csv.gz", gzip.compress(TABLE.encode()), {}, TWO),
    "Zstandard": ("r.csv.zst", pa.compress(TABLE.encode(), codec="zstd", asbytes=True), {}, TWO),
    "bzip2": ("R.CSV.BZ2", bz2.compress(TABLE.encode()), {}, TWO),
    "damaged Zstandard": ("r.csv.zst", pa.compress(TABLE.encode(), codec="zstd", asbytes=True)[:-1], {}, OSError),
    "no Zstandard": ("r.csv.zst", TABLE, {}, OSError),
    "no Parquet": ("r.parquet", "text", {}, OSError),
    "Parquet that is not UTF-8": ("r.parquet", NOT_UTF8.getvalue(), {}, OSError),
    "damaged gzip": ("r.csv.gz", gzip.compress(TABLE.encode() * 99)[:-20], {}, OSError),
    "no gzip": ("r.csv.gz", TABLE, {}, OSError),
    "JSON lines": ("r.jsonl", lines({"text": "a", "label": "x"}, {"text": "b", "label": "y"}), {}, TWO),
    "a line that is no JSON": ("r.jsonl", '{"text": "a", "label": "x"}\n{"text"\n', {}, "row 2 (line 2)"),
    "a line that is no object": ("r.jsonl", '{"text": "a", "label": "x"}\n[1]\n', {}, "row 2 (line 2)"),
    "an unpaired surrogate": ("r.jsonl", '{"text": "\\ud800", "label": "x"}\n', {}, "row 1.*'text'"),
    "labels of several types": (
        "r.jsonl",
        lines(*({"text": "a", "label": label} for label in (1, 1.0, True, "1"))),
        {},
        [("a", "1"), ("a", "1.0"), ("a", "true"), ("a", "1")],
    ),
    "null label": ("r.jsonl", lines({"text": "a", "label": None}), {}, "row 1.*label"),
    "list as label": ("r.jsonl", lines({"text": "a", "label": ["x"]}), {}, "row 1.*label"),
    "number as text": ("r.jsonl", lines({"text": 1, "label": "x"}), {}, "row 1.*'text'"),
    "nested label": (
        "r.jsonl",
        lines({"text": "a", "note": {"label": "x"}}),
        {"label_column": "note.label"},
        [("a", "x")],
    ),
    "row without the nested label": (
        "r.jsonl",
        lines({"text": "a", "note": {"label": "x"}}, {"text": "b", "note": None}),
        {"label_column": "note.label"},
        "row 2 (line 2).*'note.label'",
    ),
    "JSON array": ("r.json", json.dumps([{"text": "a", "label": "x"}]), {}, [("a", "x")]),
    "JSON object with data": ("r.json", json.dumps({"data": [{"text": "a", "label": "x"}]}), {}, [("a", "x")]),
    "JSON array of texts": ("r.json", '["a"]', {}, "r.json, row 1"),
    "a JSON array without end": ("r.json", '[{"text": "a"},', {}, "r.json, row 1"),
    "a deep JSON array": ("r.json", "[" * 100_000, {}, "r.json, row 1"),
    "a number in a JSON array": ("r.json", '[{"text": "a", "label": "x"}, 7]', {}, "r.json, row 2"),
    "unknown format": ("r.xlsx", "", {}, "--train_file.*r.xlsx"),
}


@pytest.mark.parametrize(("name", "content", "options", "expected"), CASES.values(), ids=CASES)
def test_files(name, content, options, expected, tmp_path):
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    if isinstance(expected, list):
        assert read([tmp_path / name], **options) == expected
        return
    kind, match = (expected, name) if isinstance(expected, type) else (ValueError, escaped(expected))
    with pytest.raises(kind, match=match) as raised:
        read([tmp_path / name], **options)
    assert "\n" not in str(raised.value)


def escaped(pattern: str) -> str:
    return "(?s)" + pattern.replace("(", r"\(").replace(")", r"\)")


TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=12)


@settings(max_examples=100)
@given(
    st.lists(st.tuples(TEXT, TEXT, st.integers(0, 2)), min_size=1, max_size=6),
    st.sampled_from([(".csv", ","), (".tsv", "\t")]),
    st.sampled_from(["\n", "\r\n", "\r"]),
)
def test_tables_come_back(rows, form, newline):
    """With the line where each row starts, whatever blank lines are between them."""
    ending, delimiter = form
    if ending == ".tsv":  # a row is a line
        rows = [(*(re.sub("[\t\r\n]", " ", text) for text in row[:2]), row[2]) for row in rows]
    text, expected = f"one{delimiter}two{newline}", []
    for one, two, blank_lines in rows:
        text += newline * blank_lines
        expected.append((len(re.findall("\r\n|\r|\n", text)) + 1, {"one": one, "two": two}))
        record = io.StringIO(newline="")
        quoting = csv.QUOTE_ALL if re.search("[\r\n]", one + two) else csv.QUOTE_MINIMAL
        csv.writer(record, delimiter=delimiter, lineterminator=newline, quoting=quoting).writerow([one, two])
        text += record.getvalue()
    fsspec.filesystem("memory").pipe(f"/tables/r{ending}", text.encode())
    source = Source("--train_file", open_files([f"memory://tables/r{ending}"], "--train_file"))
    assert [(row.line, row.content) for row in source.rows()] == expected


def test_patterns_and_folders(tmp_path, monkeypatch):
    """Of a folder files that are no data are left out. Files that exist are no patterns."""
    monkeypatch.chdir(tmp_path)
    names = ["[1].txt", "a.txt", "b.CSV.gz", "deep/a.txt", "deep/er/c.jsonl.zst"]
    for name in [*names, ".hidden.txt", "deep/.x/x.txt", "README.md", "x.py", "z.txt.bak", "folder.txt/README.md"]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x\n")
    for pattern, expected in {
        ".": names,
        "*.txt": ["[1].txt", "a.txt"],
        "[a-b].*": ["a.txt", "b.CSV.gz"],
        "[1].txt": ["[1].txt"],
        "**/a.txt": ["a.txt", "deep/a.txt"],
    }.items():
        found = [file.name for file in open_files([pattern], "--train_file")]
        assert found == expected, pattern
    source = Source("--train_file", open_files(["a.txt", "deep"], "--train_file"), limit=2)
    assert [row["place"] for row in source.valid_rows(dict, "stop", print)] == [
        "a.txt, row 1 (line 1)",
        "deep/a.txt, row 1 (line 1)",
    ]


def test_the_first_valid_rows(tmp_path):
    """Nothing is read after them."""
    (tmp_path / "r.csv").write_text("text,label\na,x\n,y\nb,y\nc\n")
    source = Source("--train_file", open_files([str(tmp_path / "r.csv")], "--train_file"), limit=2)
    reports = []
    rows = list(source.valid_rows(lambda row: {"text": text_of(row, "text")}, "skip", reports.append))
    assert [row["text"] for row in rows] == ["a", "b"]
    assert len(reports) == 1
    assert "1 of 3" in reports[0]


def test_datasets(tmp_path, monkeypatch):
    """Labels have their names, also in lists."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    label = datasets.ClassLabel(names=["bad", "good"])
    features = datasets.Features({"text": datasets.Value("string"), "label": label, "tags": datasets.List(label)})
    rows = [{"text": "a", "label": 1, "tags": [0, 1]}, {"text": "b", "label": -1, "tags": None}]
    (tmp_path / "named").mkdir()
    datasets.Dataset.from_list(rows, features=features).to_parquet(tmp_path / "named" / "train.parquet")
    named = [{"text": "a", "label": "good", "tags": ["bad", "good"]}, {"text": "b", "label": None, "tags": None}]
    name = str(tmp_path / "named")
    for split, expected in {"train": named, "train[:1]": named[:1]}.items():
        source = Source("--dataset", [], (name, None, split))
        assert source.columns() == ["text", "label", "tags"]
        assert [row.content for row in source.rows()] == expected
        assert next(source.rows()).place == f"{name} {split}, row 1"
    for missing in ((name, None, "test"), (str(tmp_path / "none"), None, "train")):
        with pytest.raises(OSError, match="--dataset"):
            list(Source("--dataset", [], missing).rows())


def test_several_files(tmp_path):
    """Columns go by their names, patterns and folders are expanded, and Parquet has the names of labels."""
    (tmp_path / "1.csv").write_text("text,label\na,x\n")
    (tmp_path / "2.csv").write_text("label,text\ny,b\n")
    (tmp_path / "README.md").write_text("no data")
    for pattern in (tmp_path, tmp_path / "*.csv"):
        assert read([pattern]) == TWO
    with pytest.raises(FileNotFoundError, match="--train_file"):
        read([tmp_path / "*.tsv"])
    (tmp_path / "3.csv").write_text("text,mood\nc,z\n")
    with pytest.raises(ValueError, match=r"3\.csv, row 1"):
        read([tmp_path / "*.csv"])
    feature = {"_type": "ClassLabel", "names": ["x", "y"]}
    features = {"text": {"dtype": "string", "_type": "Value"}, "label": feature}
    metadata = {"huggingface": json.dumps({"info": {"features": features}})}
    parquet.write_table(
        pa.table({"text": ["a", "b"], "label": [0, 1]}).replace_schema_metadata(metadata), tmp_path / "r.parquet"
    )
    assert read([tmp_path / "r.parquet"]) == TWO


def test_conll(tmp_path):
    """Words and tags, separated by tabs or spaces; a line with one column is named."""
    (tmp_path / "r.txt").write_text("-DOCSTART- O\n\nNew_York\tB\nis\tO\n\n\nbig JJ O\n\nbad\nworse O\n")
    source = Source("--train_file", open_files([str(tmp_path / "r.txt")], "--train_file", txt_format=".conll"))
    first, second, bad = source.rows()
    assert (first.content, first.line) == ({"tokens": ["New_York", "is"], "tags": ["B", "O"]}, 3)
    assert second.content == {"tokens": ["big"], "tags": ["O"]}
    assert isinstance(bad.content, str)
    assert "line 9" in bad.content


def test_squad(tmp_path):
    question = {"id": "1", "question": "q", "answers": []}
    (tmp_path / "r.json").write_text(
        json.dumps({"data": [{"paragraphs": [{"context": "c", "qas": [question]}]}, {"paragraphs": [{"qas": [1]}]}]})
    )
    good, bad = Source("--train_file", open_files([str(tmp_path / "r.json")], "--train_file")).rows()
    assert good.content == {**question, "context": "c"}
    assert isinstance(bad.content, str)


def test_rows_that_cannot_be_used_are_skipped_and_listed(tmp_path):
    (tmp_path / "r.csv").write_text("text,label\na,x\n,y\nb\nb,y\n")
    reports = []
    assert read([tmp_path / "r.csv"], on_bad_row="skip", report=reports.append) == TWO
    assert all(place in reports[0] for place in ("2 of 4", "row 2 (line 3)", "row 3 (line 4)"))
    assert len(skipped_rows(["x"] * 5, 9).splitlines()) == 1 + 5
    assert skipped_rows(["x"] * 6, 9).endswith("and 1 more")
    (tmp_path / "r.csv").write_text("text,label\n,y\n")
    with pytest.raises(ValueError, match="row 1"):
        read([tmp_path / "r.csv"], on_bad_row="skip", report=reports.append)


NUMBERS = [("1", 1.0), ("-1.5e3", -1500.0), (2, 2.0), ("1,5", "comma"), ("1_000", "1_000"), ("nan", "nan"), (True, "T")]


@pytest.mark.parametrize(("given", "expected"), NUMBERS)
def test_numbers(given, expected):
    if isinstance(expected, float):
        assert number_of(given) == expected
    else:
        with pytest.raises(ValueError, match=expected):
            number_of(given)


def test_spellings_of_one_label():
    groups = [["1", "1.0", "1.00", "True"], ["NaN", "None", "NULL"], ["Yes", "yes ", "y\u200bes"], ["é", "e\u0301"]]
    assert [len({canonical(label) for label in group}) for group in groups] == [1] * len(groups)
    assert len({canonical(group[0]) for group in groups}) == len(groups)
    warnings = label_warnings(Counter(["1", "1.0", "good", "bad", "NaN"]))
    assert len(warnings) == 2
    assert "'1.0'" in warnings[0]
    assert "'NaN'" in warnings[1]
    assert label_warnings(Counter(["1", "2", "good"])) == []
    assert sorted_labels(["b", "10", "9", "a"]) == ["9", "10", "a", "b"]
    assert label_summary(Counter(range(22))).endswith("19 (1), and 2 more")


def test_held_out_rows():
    """Equal texts and groups are on one side, each label has its share, and none is held out as a whole."""
    texts = [i // 4 for i in range(160)]
    kept, held_out = hold_out([(text,) for text in texts], [text % 2 for text in texts], 0.25, seed=0)
    assert sorted(kept + held_out) == list(range(160))
    assert not {texts[i] for i in kept} & {texts[i] for i in held_out}
    assert Counter(texts[i] % 2 for i in held_out) == {0: 20, 1: 20}
    keys = [(i, i // 10) for i in range(100)]
    kept, held_out = hold_out(keys, [0] * 100, 0.2, seed=1)
    assert (len(held_out), len({i // 10 for i in held_out})) == (20, 2)
    labels = [i // 3 for i in range(600)]
    kept, held_out = hold_out([(i,) for i in range(600)], labels, 0.2, seed=0)
    assert len(held_out) == pytest.approx(120, abs=3)
    assert {labels[i] for i in kept} == set(range(200))
    with pytest.raises(ValueError, match="--validation_fraction"):
        hold_out([(0,)] * 5, [0] * 5, 0.2, seed=0)
