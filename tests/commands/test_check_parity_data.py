"""`scripts/check_parity.py --data`: its numbers are those of models that are opened and compared by hand."""

import csv
import gzip
import json
import math

import pytest
import torch
from matplotlib import image
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

import check_parity
import modeling_scratchbert
from modeling_scratchbert import ScratchBertModel
from modeling_scratchbert.cpu.library import find_library
from support.corpora import HEADS, save_model, texts, write_rows
from toolkit import precision
from toolkit.benchmark import variants
from toolkit.benchmark.timing import multiplies_natively

pytestmark = pytest.mark.usefixtures("quiet_only_here")
with_int8 = pytest.mark.skipif(not find_library(), reason="int8 needs VNNI instructions")
HERE = [
    "float32",
    *(["bfloat16"] if multiplies_natively(torch.bfloat16) else []),
    *(["int8"] if find_library() else []),
]


@pytest.fixture(autouse=True)
def no_new_processes(monkeypatch):
    """Most tests do not wait for processes that measure memory."""
    monkeypatch.setattr(precision, "peak_memory", lambda build, folder, threads, batch: (200.0, 100.0))


def run(*arguments) -> int:
    try:
        return check_parity.main([str(argument) for argument in arguments])
    except SystemExit as stopped:
        return stopped.code


def report(folder, *arguments) -> dict:
    assert run(*arguments, "--json", folder / "report.json") == 0
    return json.loads((folder / "report.json").read_text(encoding="utf-8"))


def rows_of(found: dict) -> dict[str, dict]:
    return {row["precision"]: row for row in found["rows"]}


def calibration_of(model: str, path, change=lambda factor: factor):
    """A calibration file of the model, with changed factors."""
    ScratchBertModel.from_pretrained(model, add_pooling_layer=False).optimize_for_inference("int8").save_calibration(
        path
    )
    save_file({name: change(factor).contiguous() for name, factor in load_file(path).items()}, path)
    return path


@torch.no_grad()
def outputs_of(model: str, task: str, found: list[str], name: str, calibration=None):
    """The embedding and the logits of each text alone, unpadded, with its special tokens."""
    dtype = torch.bfloat16 if name == "bfloat16" else torch.float32
    options = {"add_pooling_layer": False} if task in ("embed", "fill-mask") else {}
    head = "Model" if options else HEADS[task]
    opened = getattr(modeling_scratchbert, f"ScratchBert{head}").from_pretrained(model, dtype=dtype, **options)
    opened.optimize_for_inference("int8" if name.startswith("int8") else dtype, calibration=calibration)
    states, logits = [], []
    opened.base_model.register_forward_hook(lambda module, args, output: states.append(output.last_hidden_state[0]))
    tokenizer = AutoTokenizer.from_pretrained(model)
    for text in found:
        ids = tokenizer(text, truncation=True, max_length=opened.config.max_position_embeddings, return_tensors="pt")
        logits.append(getattr(opened(ids["input_ids"]), "logits", None))
    return [each.double().mean(dim=0) for each in states], logits


def cosine(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a @ b) / math.sqrt(float((a @ a) * (b @ b))))


# -------------------------------------------------------------------------------------------------------------- numbers


@pytest.mark.parametrize("kind", ["bert", "scratchbert"])
@pytest.mark.parametrize("task", ["embed", "classify", "tag", "fill-mask"])
def test_numbers_are_those_of_models_opened_by_hand(kind, task, tmp_path, capsys):
    model, found = save_model(tmp_path / "model", task, kind), texts(50)
    data = write_rows(tmp_path / "texts.jsonl", [{"text": text} for text in found])
    calibration = calibration_of(model, tmp_path / "factors", lambda factor: factor**0.5) if find_library() else None
    measured = report(tmp_path, model, "--data", data, *(["--calibration", calibration] if calibration else []))
    expected = [*HERE, "int8 calibrated"] if calibration else HERE
    assert list(rows_of(measured)) == expected
    assert (measured["texts"], measured["total_texts"]) == (50, 50)
    reference, reference_logits = outputs_of(model, task, found, "float32")
    for name, row in rows_of(measured).items():
        states, logits = outputs_of(model, task, found, name, calibration if name == "int8 calibrated" else None)
        cosines = list(map(cosine, states, reference))
        by_place = {f"texts.jsonl, row {number} (line {number})": each for number, each in enumerate(cosines, 1)}
        assert row["cosines"] == pytest.approx(by_place, abs=1e-6)
        assert row["lowest_cosine"] == pytest.approx(min(cosines), abs=1e-6)
        assert row["mean_cosine"] == pytest.approx(sum(cosines) / 50, abs=1e-6)
        if name != "float32":
            worst = cosines.index(min(cosines))
            assert (row["lowest"]["text"], str(worst + 1) in row["lowest"]["place"]) == (found[worst], True)
        if task not in ("classify", "tag"):
            assert (row["changed_labels"], row["labels"]) == (None, None)
            continue
        labels, before = (
            [label for each in side for label in each[0].argmax(dim=-1).flatten().tolist()]
            if task == "classify"
            else [label for each in side for label in each[0, 1:-1].argmax(dim=-1).tolist()]
            for side in (logits, reference_logits)
        )
        assert row["labels"] == len(before)
        assert row["changed_labels"] == sum(one != other for one, other in zip(labels, before, strict=True))
    if task == "tag" and "int8" in HERE:
        assert rows_of(measured)["int8"]["changed_labels"] > 0, "else the number above is not checked"
    assert capsys.readouterr().err == ""


@with_int8
def test_several_labels_for_a_text(tmp_path):
    """A text counts once, however many of its labels change."""
    fields = {
        "num_labels": 40,
        "id2label": {i: str(i) for i in range(40)},
        "problem_type": "multi_label_classification",
    }
    model, found = save_model(tmp_path / "model", "classify", **fields), texts(50)
    data = write_rows(tmp_path / "texts.jsonl", [{"text": text} for text in found])
    row = rows_of(report(tmp_path, model, "--data", data))["int8"]
    logits, before = (torch.cat(outputs_of(model, "classify", found, name)[1]) for name in ("int8", "float32"))
    changed = [not torch.equal(one > 0, other > 0) for one, other in zip(logits, before, strict=True)]
    assert (row["labels"], row["changed_labels"]) == (50, sum(changed))
    assert 0 < sum(changed) < 50


@pytest.mark.parametrize(("task", "fields"), [("rerank", {}), ("classify", {"problem_type": "regression"})])
def test_numbers_are_no_labels(task, fields, tmp_path):
    model, data = save_model(tmp_path / "model", task, **fields), write_rows(tmp_path / "t.jsonl", [{"text": "a film"}])
    found = report(tmp_path, model, "--data", data)
    assert found["model"].startswith("ScratchBertModel ")
    assert {row["labels"] for row in found["rows"]} == {None}


@with_int8
def test_a_worse_int8_has_a_lower_cosine(tmp_path, capsys):
    """Factors that enlarge a few channels waste the 8 bits of the others."""

    def worsen(factor):
        return torch.where(torch.arange(len(factor)) % 8 == 0, factor / 1000, factor)

    model = save_model(tmp_path / "model")
    data = write_rows(tmp_path / "texts.jsonl", [{"text": text} for text in texts(50)])
    worse = calibration_of(model, tmp_path / "worse", worsen)
    found = rows_of(report(tmp_path, model, "--data", data, "--calibration", worse))
    assert found["int8 calibrated"]["lowest_cosine"] < found["int8"]["lowest_cosine"] - 0.01
    assert found["int8 calibrated"]["mean_cosine"] < found["int8"]["mean_cosine"]
    printed = capsys.readouterr().out
    lowest = found["int8 calibrated"]["lowest"]
    assert f"lowest in int8 calibrated: {lowest['place']}: {lowest['text'][:80]}\n" in printed
    assert f"{found['int8 calibrated']['lowest_cosine']:.5f}" in printed


def test_real_weights_and_reviews(minilm, reviews, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(precision, "peak_memory", variants.peak_memory)
    with gzip.open(tmp_path / "reviews.csv.gz", "wt", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, delimiter=";")
        writer.writerows([["review", "label"], *([row["text"], row["label"]] for row in reviews)])
    found = report(
        tmp_path,
        minilm,
        "--data",
        tmp_path / "reviews.csv.gz",
        "--column",
        "review",
        "--delimiter",
        ";",
        "--rows",
        40,
        "--plot",
        tmp_path / "cosines.png",
    )
    assert (found["texts"], found["total_texts"], len(found["tokens"])) == (40, 64, 40)
    for name, row in rows_of(found).items():
        assert row["lowest_cosine"] > 0.99
        assert row["texts_per_second"] > 0
        assert 1 < row["peak_anonymous_mib"] < row["peak_resident_mib"] < 1000
        assert (row["vs_float32"] == 1) == (name == "float32")
    printed = capsys.readouterr().out
    assert "40 of 64 rows" in printed
    assert f"{found['machine']['cores']} cores" in printed
    assert image.imread(tmp_path / "cosines.png")[..., :3].std() > 0.01


def test_what_the_processor_cannot_do_is_skipped(tmp_path, model, monkeypatch, capsys):
    monkeypatch.setattr(variants, "find_library", lambda: None)
    monkeypatch.setattr(variants, "multiplies_natively", lambda dtype: dtype != torch.bfloat16)
    data = write_rows(tmp_path / "texts.jsonl", [{"text": "a film"}])
    output = tmp_path / "new"
    assert run(model, "--data", data, "--calibration", "factors", "--output", output) == 0
    found = json.loads((output / "report.json").read_text(encoding="utf-8"))
    assert list(rows_of(found)) == ["float32"]
    assert set(found["skipped"]) == {"bfloat16", "int8", "int8 calibrated"}
    printed = capsys.readouterr().out
    assert "skipped bfloat16: this CPU has no bfloat16 instructions" in printed
    assert (
        "skipped int8 calibrated: int8 requires the library in C++, which is not built or not for this CPU" in printed
    )
    assert "lowest in" not in printed
    assert (output / "report.png").exists()


def test_one_row_and_rows_after_the_last_that_is_used(tmp_path, model):
    data = write_rows(tmp_path / "texts.jsonl", [{"text": "a good film"}, {"text": ""}, {"text": None}])
    found = report(tmp_path, model, "--data", data, "--rows", 1)
    assert (found["texts"], found["total_texts"]) == (1, 3)
    assert all(len(row["cosines"]) == 1 for row in found["rows"])


def test_a_long_text_is_truncated(tmp_path, model):
    positions = ScratchBertModel.from_pretrained(model).config.max_position_embeddings
    data = write_rows(tmp_path / "texts.jsonl", [{"text": "film " * 1000}, {"text": "film"}])
    assert report(tmp_path, model, "--data", data)["tokens"] == [3, positions]


# ------------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["other", "--data", "texts.csv"], "OTHER is given with --data; expected MODEL alone"),
        (["--column", "text"], "--column is given without --data; expected both"),
        (["--delimiter", ";"], "--delimiter is given without --data"),
        (["--rows", "3"], "--rows is given without --data"),
        (["--calibration", "factors"], "--calibration is given without --data"),
        (["--data", "texts.csv", "--rows", "0"], "expected an integer of at least 1"),
        (["--data", "missing.csv"], "missing.csv: there is no such file"),
        (["--data", "texts.csv"], "there is no column for the texts (--column)"),
        (["--data", "texts.csv", "--column", "text"], "there is no column 'text' for the texts (--column)"),
        (["--data", "empty.csv"], "empty.csv"),
        (["--data", "header.csv"], "header.csv has no rows"),
        (["--data", "blank.jsonl"], "blank.jsonl, row 2 (line 2): 'text' is empty"),
        pytest.param(["--data", "texts.csv", "--column", "body", "--calibration", "none"], "none", marks=with_int8),
        pytest.param(
            ["--data", "texts.csv", "--column", "body", "--calibration", "texts.csv"],
            "expected calibration factors",
            marks=with_int8,
        ),
    ],
)
def test_what_cannot_run_is_said_in_one_line(arguments, words, here, model, capsys):
    (here / "texts.csv").write_text("body\na good film\n")
    (here / "empty.csv").write_text("")
    (here / "header.csv").write_text("text\n")
    write_rows(here / "blank.jsonl", [{"text": "a film"}, {"text": " "}])
    assert run(model, *arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("check_parity.py: ")
    assert words in line


@pytest.mark.parametrize(
    ("fields", "words"),
    [({"is_decoder": True}, "expected an encoder for --data"), ({"vocab_size": 9}, "vocab_size, 9")],
)
def test_models_that_do_not_fit(fields, words, tmp_path, capsys):
    data = write_rows(tmp_path / "texts.jsonl", [{"text": "a film"}])
    assert run(save_model(tmp_path / "model", **fields), "--data", data) == 2
    assert words in capsys.readouterr().err


def test_a_model_without_a_tokenizer(tmp_path, model, capsys):
    data = write_rows(tmp_path / "texts.jsonl", [{"text": "a film"}])
    ScratchBertModel.from_pretrained(model).save_pretrained(tmp_path / "bare")
    assert run(tmp_path / "bare", "--data", data) == 2
    assert "It has no tokenizer" in capsys.readouterr().err
