"""`scripts/benchmark.py`: its variants compute the model, its numbers are those of models opened by hand, and bad uses.
No time is asserted."""

import json
import math

import pytest
import torch
from transformers import AutoTokenizer, BertForSequenceClassification, BertForTokenClassification

import benchmark
import modeling_scratchbert
from support.commands import exit_code
from support.corpora import save_model, texts, write_rows
from support.prepacked import needs_library
from toolkit.benchmark import VARIANTS, measure, variants

pytestmark = pytest.mark.usefixtures("quiet_only_here")
MANY_LABELS = {"id2label": {i: str(i) for i in range(40)}, "problem_type": "multi_label_classification"}
OURS = [name for name in VARIANTS if name.startswith("ours")]


def run(*arguments) -> int:
    return exit_code(benchmark, *arguments, "--threads", 1, "--repetitions", 1)


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder with 40 rows; other processes are this one."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(measure, "in_new_process", lambda function, *arguments: function(*arguments))
    write_rows(tmp_path / "rows.jsonl", [{"text": text} for text in texts(40)])
    return tmp_path


def report_of(*arguments, code: int = 0) -> dict:
    assert run(*arguments, "--output", "speed") == code
    with open("speed/report.json", encoding="utf-8") as file:
        return json.load(file)


def test_every_variant_computes_the_model(here):
    """On rows, which have padding, and alone."""
    found = report_of(save_model(here / "model"), "--rows", "rows.jsonl")
    installed = [name for name in VARIANTS if variants.missing(name) is None]
    assert found["unavailable"].keys() == VARIANTS.keys() - installed
    rows = {(row["workload"], row["variant"]): row for row in found["rows"]}
    assert list(rows) == [(workload, name) for workload in ("rows", "single-rows") for name in installed]
    for (_, name), row in rows.items():
        is_exact = VARIANTS[name].precision == "float32"
        assert (row["max_abs"] <= 1e-4) == is_exact
        assert row["cosine_mean"] >= row["cosine_lowest"] >= (0.999999 if is_exact else 0.9)
        assert min(row["seconds_per_batch"], row["vs_bert"], row["sequences_per_second"]) > 0
    assert (rows["rows", "bert"]["sequences"], rows["rows", "bert"]["fill_rate"] < 1) == (20, True)
    assert (here / "speed" / "report.png").stat().st_size > 10_000


def test_other_workloads_and_steps(here):
    """The memory is that of new processes."""
    model = save_model(here / "model", max_position_embeddings=64)
    found = report_of(model, "--quick", "--variants", *OURS[1:], "--workloads", *benchmark.WORKLOADS)
    assert {row["workload"] for row in found["rows"]} == set(benchmark.WORKLOADS) - {"training", "decoding"}
    assert found["training"]["vs_bert"] > 0
    (row,) = found["decoding"]
    assert {"bert", "ours", "ours-optimised"} <= row["vs_bert"].keys()
    assert min(row["seconds"].values()) > 0


@torch.no_grad()
def outputs_by_hand(model_class, folder: str, found: list[str], optimised=None) -> tuple[list, list]:
    """The mean embedding and the logits of each text alone."""
    dtype = torch.bfloat16 if optimised is torch.bfloat16 else torch.float32
    model = model_class.from_pretrained(folder, dtype=dtype).eval()
    if optimised is not None:
        model.optimize_for_inference(optimised)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    embeddings, logits = [], []
    for text in found:
        inputs = tokenizer(text, truncation=True, max_length=model.config.max_position_embeddings, return_tensors="pt")
        embeddings.append(model.base_model(**inputs).last_hidden_state[0].double().mean(dim=0))
        logits.append(model(**inputs).logits[0])
    return embeddings, logits


@needs_library
@pytest.mark.parametrize(
    ("task", "reference", "fields"),
    [
        ("classify", BertForSequenceClassification, {}),
        ("classify", BertForSequenceClassification, MANY_LABELS),
        ("tag", BertForTokenClassification, {}),
    ],
)
def test_the_table_by_precision_is_that_of_models_opened_by_hand(task, reference, fields, here, monkeypatch):
    monkeypatch.setattr("toolkit.benchmark.workloads.CALIBRATION_TEXTS", 0)
    folder = save_model(here / "model", task, "bert", **fields)
    precisions = {"ours-bf16": torch.bfloat16, "ours-int8": "int8"}
    found = report_of(folder, "--rows", "rows.jsonl", "--variants", *precisions)["rows"]
    by_name = {row["variant"]: row for row in found if row["workload"] == "rows"}
    expected, labels = outputs_by_hand(reference, folder, texts(40))
    ours = getattr(modeling_scratchbert, f"Scratch{reference.__name__}")
    for name, optimised in precisions.items():
        embeddings, logits = outputs_by_hand(ours, folder, texts(40), optimised)
        pairs = zip(embeddings, expected, strict=True)
        cosines = [float(a @ b) / math.sqrt(float((a @ a) * (b @ b))) for a, b in pairs]
        row = by_name[name]
        assert row["cosine_lowest"] == pytest.approx(min(cosines), abs=1e-6)
        assert row["cosine_mean"] == pytest.approx(sum(cosines) / 40, abs=1e-6)
        assert f"row {1 + cosines.index(min(cosines))} " in row["lowest"]
        if task == "tag":
            changed = [a.argmax(-1) != b.argmax(-1) for a, b in zip(logits, labels, strict=True)]
            changed = torch.cat([each[1:-1] for each in changed])
        elif fields:
            changed = torch.stack([((a > 0) != (b > 0)).any() for a, b in zip(logits, labels, strict=True)])
        else:
            changed = torch.stack([a.argmax() != b.argmax() for a, b in zip(logits, labels, strict=True)])
        assert (row["labels"], row["changed_labels"]) == (len(changed), int(changed.sum()))
    assert changed.any() or not (fields or task == "tag"), "else the number above is not checked"


@pytest.mark.parametrize("name", ["ours", "ours-bf16", "onnx"])
@pytest.mark.parametrize("is_wrong", [True, False])
def test_a_variant_that_is_wrong_or_fails_is_named(name, is_wrong, here, monkeypatch, capsys):
    """Of our own variants, it is an error."""

    def open_damaged(name, *arguments):
        opened = open_variant(name, *arguments)
        if name != damaged:
            return opened
        return (lambda inputs: opened(inputs).flip(-1)) if is_wrong else {}["not today"]

    damaged, open_variant, is_ours = name, variants.open_variant, name != "onnx"
    monkeypatch.setattr(variants, "open_variant", open_damaged)
    flags = ["--rows", "rows.jsonl", "--variants", name]
    found = report_of(save_model(here / "model"), *flags, code=int(is_ours))
    assert bool(found["failures"]) == is_ours
    if is_wrong:
        assert {row["variant"] for row in found["rows"] if row["is_wrong"]} == ({name} if is_ours else set())
    else:
        assert {row["variant"] for row in found["rows"]} == {"bert"}
        assert found["unavailable"].keys() == {name}


def test_memory_is_that_of_a_new_process(here, monkeypatch):
    monkeypatch.undo()
    monkeypatch.chdir(here)
    peaks = []
    for width in (32, 8192):  # of the second, a block takes 2 MiB more
        model = save_model(here / f"model-{width}", intermediate_size=width)
        found = report_of(model, "--rows", "rows.jsonl", "--variants", "bert")
        peaks += {row["peak_anonymous_mib"] for row in found["rows"]}
    assert 0 <= peaks[0] < peaks[1] - 2 < 100


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["--text_column", "text"], "--text_column"),
        (["--rows", "rows.jsonl", "--workloads", "single"], "--workloads"),
        (["--rows", "missing.csv"], "missing.csv"),
        (["--rows", "rows.jsonl", "--text_column", "body"], "'body'"),
        (["--rows", "blank.jsonl"], "row 2"),
        (["--rows", "rows.jsonl", "--limit", "0"], "--limit"),
        (["--rows", "rows.jsonl", "--variants", "tensorflow"], "tensorflow"),
        (["./missing", "--rows", "rows.jsonl"], "missing"),
        (["decoder", "--rows", "rows.jsonl"], "decoder"),
        (["bare", "--rows", "rows.jsonl"], "tokenizer"),
    ],
)
def test_bad_uses(arguments, word, here, capsys):
    write_rows(here / "blank.jsonl", [{"text": "a film"}, {"text": " "}])
    save_model(here / "model")
    save_model(here / "decoder", is_decoder=True)
    modeling_scratchbert.ScratchBertModel.from_pretrained(here / "model").save_pretrained(here / "bare")
    model = [] if arguments[0] in ("./missing", "decoder", "bare") else ["model"]
    assert run(*model, *arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert word in line
