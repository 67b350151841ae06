"""scripts/train.py: arguments, and the files of a run."""

import json
import math
import os
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file
from tokenizers import Tokenizer, models
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertTokenizer,
    PreTrainedTokenizerFast,
    TrainingArguments,
)

import predict
import train
from modeling_scratchbert import ScratchBertModel
from support.checkpoint_kinds import change_config
from support.commands import exit_code
from support.folders import ROOT
from support.models import SPECIAL_TOKENS
from support.tiny import WORDS, flags, make_task, report_of, reviews, run, write_rows
from toolkit.common import find_shipped
from toolkit.tasks import ARGUMENTS

TINY = "configuration/tiny.json"
NEW = {"model": None, "config_name": TINY, "tokenizer_name": "{model}"}
GENERATOR = {"max_target_length": 12, "source_column": "text", "target_column": "label"}

# Changed arguments, and what the line on standard error names.
REFUSED = [
    ({"output_dir": None}, "--output_dir"),
    ({"train_file": None}, "--train_file"),
    ({"model": None}, "--model"),
    ({"model": "./missing"}, "./missing"),
    ({"train": "rows.csv"}, "--train"),  # no abbreviations
    ({"learning_rate": "fast"}, "learning_rate"),
    ({"learning_rate": "nan"}, "--learning_rate"),
    ({"learning_rate": -1}, "--learning_rate"),
    ({"num_train_epochs": 0}, "--num_train_epochs"),
    ({"max_steps": 0}, "--max_steps"),
    ({"per_device_train_batch_size": 0}, "--per_device_train_batch_size"),
    ({"eval_strategy": "sometimes"}, "eval_strategy"),
    ({"eval_strategy": "steps"}, "--eval_steps"),
    ({"early_stopping_patience": 2}, "--early_stopping_patience"),
    ({"early_stopping_patience": 2, "eval_strategy": "no", "validation_fraction": 0.5}, "--eval_strategy"),
    ({"metric_for_best_model": "accuracy"}, "--metric_for_best_model"),
    ({"metric_for_best_model": "beauty", "validation_fraction": 0.5}, "beauty"),
    ({"validation_fraction": 2}, "--validation_fraction"),
    ({"group_column": "text"}, "--group_column"),
    ({"dataset": "a/b"}, "--dataset"),
    ({"test_split": "test"}, "--dataset"),
    ({"delimiter": "::"}, "--delimiter"),
    ({"bf16": True, "fp16": True}, "--fp16"),
    ({"freeze": "head"}, "--freeze"),
    ({"freeze": 1, "lora_rank": 2}, "--lora_rank"),
    ({"lr_scheduler_type": "stairs"}, "--lr_scheduler_type"),
    ({"lr_scheduler_kwargs": '{"speed": 1}', "lr_scheduler_type": "cosine"}, "--lr_scheduler_kwargs"),
    ({"max_length": 100}, "--max_length"),
    ({"label_column": "mood"}, "--label_column"),
    ({"class_weights": 1}, "--class_weights"),
    ({"problem": "regression"}, "row 1"),
    ({"label_columns": "a"}, "--label_columns"),
    ({"push_to_hub": True}, "--hub_model_id"),
    ({"evaluate_only": True}, "--evaluate_only"),
    ({"train_file": "missing/*.csv"}, "--train_file"),
    ({"encoding": "klingon"}, "klingon"),
    ({"report_to": "telegraph"}, "telegraph"),
    (
        {"task": "seq2seq", "max_target_length": 65, "source_column": "text", "target_column": "label"},
        "--max_target_length",
    ),
    ({"problem": "regression", "label_smoothing_factor": 0.1}, "--label_smoothing_factor"),
    ({"output_dir": os.devnull}, os.devnull),
    ({"max_eval_samples": 0}, "--max_eval_samples"),
    ({"max_eval_samples": 2}, "--max_eval_samples"),
    ({"seed": -1}, "--seed"),
    ({"seed": 2**32}, "--seed"),
    ({"label_smoothing_factor": 1}, "--label_smoothing_factor"),
    ({"label_separator": ""}, "--label_separator"),
    ({"labels": ["a", "a"]}, "--labels"),
    ({"labels": ["pos", "neg"], "class_weights": ["1", "x"]}, "--class_weights"),
    ({"labels": ["pos", "neg"], "class_weights": ["-1", "1"]}, "--class_weights"),
    ({"labels": ["pos", "neg"], "class_weights": ["nan", "1"]}, "--class_weights"),
    ({"labels": ["pos", "neg"], "class_weights": ["0", "0"]}, "--class_weights"),
    ({"class_weights": "balanced", "problem": "regression"}, "--class_weights"),
    ({"problem": "guessing"}, "guessing"),
    ({"fp16": True}, "fp16"),
    ({"max_length": 2}, "--max_length"),
    ({"report_to": "wandb"}, "wandb"),  # not installed
    ({"task": "tagging", "labels": ["B-X", "I-X"]}, "--labels"),
    ({"task": "tagging", "stride": -1}, "--stride"),
    ({"task": "tagging", "scheme": "bioes"}, "bioes"),
    ({"task": "question-answering", "null_threshold": "high"}, "--null_threshold"),
    ({"task": "question-answering", "null_threshold": "inf"}, "--null_threshold"),
    ({"task": "question-answering", "null_threshold": "best"}, "--null_threshold"),
    ({"task": "question-answering", "max_answer_length": 0}, "--max_answer_length"),
    ({"task": "question-answering"}, "'question'"),
    ({"task": "seq2seq", "metrics": "meteor"}, "--metrics"),
    ({"task": "seq2seq", "num_beams": 0}, "--num_beams"),
    ({"task": "seq2seq", "implementation": "bert"}, "--implementation"),
    ({"task": "seq2seq", "max_target_length": 1}, "--max_target_length"),
    ({"task": "seq2seq", **GENERATOR, "tie_encoder_decoder": True, "lora_rank": 2}, "--lora_rank"),
    ({"task": "seq2seq", **GENERATOR, "tie_encoder_decoder": True, "num_decoder_layers": 1}, "tie_encoder_decoder"),
    ({"task": "seq2seq", **GENERATOR, **NEW, "config_overrides": "is_encoder_decoder=false"}, "is_encoder_decoder"),
    ({"task": "masked-lm", "max_length": 2}, "--max_length"),
    ({"task": "masked-lm", "label_smoothing_factor": 0.1}, "--label_smoothing_factor"),
    ({"task": "masked-lm", "config_name": TINY}, "--config_name"),
    ({"task": "masked-lm", "config_name": TINY, "model": None}, "--tokenizer_name"),
    ({"task": "masked-lm", **NEW, "config_name": "missing.json"}, "missing.json"),
    ({"task": "masked-lm", **NEW, "freeze": "encoder"}, "--freeze"),
    ({"task": "masked-lm", **NEW, "config_overrides": "hiden_size=3"}, "hiden_size"),
    ({"task": "masked-lm", **NEW, "config_overrides": "hidden_size"}, "NAME=VALUE"),
    ({"task": "masked-lm", **NEW, "config_overrides": "hidden_size=wide"}, "hidden_size"),
    ({"task": "masked-lm", **NEW, "config_overrides": "hidden_size=33"}, "hidden_size"),
    ({"task": "masked-lm", **NEW, "config_overrides": "is_decoder=true"}, "is_decoder"),
    ({"task": "masked-lm", **NEW, "config_overrides": "max_position_embeddings=5"}, "--max_length"),
]


def read_rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize(("changed", "named"), REFUSED)
def test_wrong_arguments_are_refused_in_one_line(changed, named, argv, model, tmp_path, capsys):
    assert run([each.replace("{model}", model) for each in argv(**changed)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert named in line
    assert not (tmp_path / "run").exists()


def cut_weights(folder: Path) -> None:
    os.truncate(folder / "model.safetensors", 1000)


def remove_tokenizer(folder: Path) -> None:
    for path in folder.glob("*token*"):
        path.unlink()


def save_as_scratchbert(folder: Path) -> None:
    ScratchBertModel.from_pretrained(folder).save_pretrained(folder)


def name_words(folder: Path) -> None:
    """A tokenizer without ## tokens, and without [MASK]."""
    words = Tokenizer(
        models.WordLevel({word: i for i, word in enumerate([*SPECIAL_TOKENS, *WORDS])}, unk_token="[UNK]")
    )
    roles = {f"{role}_token": f"[{role.upper()}]" for role in ("pad", "unk", "cls", "sep")}
    PreTrainedTokenizerFast(tokenizer_object=words, **roles).save_pretrained(folder)


MODELS = [
    (cut_weights, {}, "model"),
    (cut_weights, {"implementation": "bert"}, "model"),
    (remove_tokenizer, {}, "model"),
    (partial(change_config, vocab_size=9), {}, "word_embeddings"),
    (partial(change_config, intermediate_size=9), {}, "intermediate"),
    (save_as_scratchbert, {"implementation": "bert"}, "--implementation"),
    (name_words, {"task": "masked-lm"}, "mask_token"),
    (lambda _: None, {"task": "masked-lm", "whole_word_masking": True}, "--whole_word_masking"),
    (name_words, {"task": "seq2seq"}, "[CLS]"),
]


@pytest.mark.parametrize(("change", "changed", "named"), MODELS)
def test_models_that_do_not_fit_are_refused_in_one_line(change, changed, named, argv, model, tmp_path, capsys):
    shutil.copytree(model, tmp_path / "model")
    change(tmp_path / "model")
    assert run(argv(**{**changed, "model": tmp_path / "model"})) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert named in line


@pytest.mark.parametrize("given", [["poetry"], ["classification", "missing.yaml"], ["classification", "rows.jsonl"]])
def test_wrong_tasks_and_recipes_are_refused_in_one_line(given, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_rows(tmp_path / "rows.jsonl", reviews(2))
    assert run(given) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert given[-1] in line


def test_a_recipe_has_defaults(argv, tmp_path):
    """Its paths are relative to it, texts are as they are written, 1e-4 is a number, and the command line wins."""
    labels = ["yes", "no", "-1", "01", "1e3", "2020-01-01", "null", "off"]
    (tmp_path / "recipe.yaml").write_text(
        "train_file: [./a.csv, ./b.csv]\nlearning_rate: 1e-4\nseed: 7\nbf16: yes\nfreeze: null\neval_steps:\n"
        f"labels: [{', '.join(labels)}]\n"
    )
    _, data, arguments = train.parse(
        ["classification", str(tmp_path / "recipe.yaml"), *argv(train_file=None, seed=8)[1:]]
    )
    assert data.train_file == [str(tmp_path / "a.csv"), str(tmp_path / "b.csv")]
    assert (arguments.learning_rate, arguments.seed, arguments.bf16) == (1e-4, 8, True)
    assert (arguments.freeze, arguments.eval_steps, data.labels) == (None, None, labels)


@pytest.mark.parametrize(
    "path", sorted((ROOT / "configuration" / "recipes").glob("*.yaml")), ids=lambda path: path.stem
)
def test_shipped_recipes(path, tmp_path, monkeypatch):
    """They are recipes of a task, and find their files from any folder."""
    monkeypatch.chdir(tmp_path)
    names = {"cmudict": "seq2seq", "entities": "tagging", "pretrain_reviews": "masked-lm"}
    task = names.get(path.stem, "question-answering" if path.stem == "questions" else "classification")
    given = train.recipe_arguments(find_shipped(f"configuration/recipes/{path.name}"))
    found = [Path(each.partition("=")[2] or each) for each in given if each.endswith((".csv", ".jsonl", ".json"))]
    shipped = [each for each in found if each.parts[0] != "cmudict"]  # which the code of a page writes
    assert shipped
    assert all(each.is_absolute() and each.is_file() for each in shipped)
    is_new = any(each.startswith("--config_name=") for each in given)
    given.append("--tokenizer_name=x" if is_new else "--model=x")
    assert train.parse([task, *given, "--output_dir=x"])[0] == task


# Where a default differs from that of TrainingArguments.
OTHER_DEFAULTS = {
    "per_device_train_batch_size",
    "per_device_eval_batch_size",
    "train_sampling_strategy",
    "warmup_steps",
    "weight_decay",
    "eval_strategy",
    "save_strategy",
    "save_total_limit",
    "load_best_model_at_end",
    "logging_steps",
    "resume_from_checkpoint",
    "gradient_checkpointing",
    "hub_private_repo",
}


def test_names_and_defaults_are_those_of_transformers():
    theirs, ours = TrainingArguments.__dataclass_fields__, train.TrainingArguments.__dataclass_fields__
    shared = theirs.keys() & ours.keys()
    assert len(shared) > 25
    assert {name for name in shared if theirs[name].default != ours[name].default} == OTHER_DEFAULTS
    assert (ours["lora_rank"].default, ours["lora_alpha"].default, ours["lora_dropout"].default) == (0, 16, 0)
    assert [arguments().max_length for arguments in ARGUMENTS.values()] == [128, 128, 384, 128, 128]
    questions, pairs = ARGUMENTS["question-answering"](), ARGUMENTS["seq2seq"]()
    assert (questions.stride, questions.max_answer_length, pairs.max_target_length) == (128, 30, 128)


def test_the_files_of_a_run(argv, tmp_path, capsys):
    """The model opens, predictions are in the order of the rows, and the figures have their numbers of rows."""
    rows = write_rows(
        tmp_path / "held_out.jsonl", [{**row, "score": i, "more": [i]} for i, row in enumerate(reviews(5))]
    )
    given = {"validation_file": rows, "test_file": rows, "num_train_epochs": 2, "report_to": "tensorboard"}
    assert run(argv(**given, save_total_limit=1)) == 0
    printed = capsys.readouterr().out
    assert all(part in printed for part in ("2 labels", "neg (4)", "pos (4)", "'text'", "'label'", "classifier"))
    folder = tmp_path / "run"
    metrics = report_of(folder)
    assert metrics["validation"]["rows"] == metrics["test"]["rows"] == 5
    assert metrics["lengths"]["train"]["rows"] == 8
    assert {"loss", "accuracy", "f1_macro", "matthews_correlation"} < metrics["test"].keys()
    predictions = read_rows(folder / "predictions_test.jsonl")
    assert [(row["input_score"], row["more"]) for row in predictions] == [(i, [i]) for i in range(5)]
    assert sum(row["prediction"] == row["label"] for row in predictions) / 5 == metrics["test"]["accuracy"]
    assert all(0.5 <= row["score"] <= 1 for row in predictions)
    names = {path.name for path in folder.iterdir()}
    files = "README.md recipe.yaml curves.png confusion_matrix.png labels_test.csv tokenizer.json"
    assert {*files.split(), "modeling_scratchbert.py"} < names
    assert not {name for name in names if name.endswith((".bin", ".pkl", ".pt", ".lock"))}
    assert list(folder.rglob("events.*"))
    card = (folder / "README.md").read_text()
    assert str(tmp_path) not in card
    assert "- num_train_epochs: 2" in card
    assert "save_total_limit" not in card
    assert "best validation accuracy" in card
    metadata = yaml.safe_load(card.split("---")[1])
    assert (metadata["library_name"], metadata["pipeline_tag"]) == ("transformers", "text-classification")
    results = metadata["model-index"][0]["results"]
    found = {each["dataset"]["split"]: {m["type"]: m["value"] for m in each["metrics"]} for each in results}
    assert found["test"]["accuracy"] == metrics["test"]["accuracy"]
    opened = AutoModelForSequenceClassification.from_pretrained(folder, trust_remote_code=True)
    assert opened.config.label2id == {"neg": 0, "pos": 1}
    inputs = AutoTokenizer.from_pretrained(folder)(
        [row["text"] for row in predictions], padding=True, return_tensors="pt"
    )
    with torch.no_grad():
        labels = [opened.config.id2label[i] for i in opened(**inputs).logits.argmax(-1).tolist()]
    assert labels == [row["prediction"] for row in predictions]
    assert run(argv()) == 2  # the folder holds a run
    assert run(argv(resume_from_checkpoint=True)) == 2  # which is finished
    assert run(["classification", str(folder / "recipe.yaml"), f"--output_dir={tmp_path / 'again'}"]) == 0
    assert report_of(tmp_path / "again")["test"] == metrics["test"]


def test_other_folders_are_not_changed(argv, tmp_path, capsys):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.tex").write_text("mine")
    for changed in ({}, {"resume_from_checkpoint": True}):
        assert run(argv(**changed)) == 2
        assert "--output_dir" in capsys.readouterr().err
    assert [path.read_text() for path in (tmp_path / "run").iterdir()] == ["mine"]


def test_ctrl_c_while_data_are_prepared(argv, monkeypatch, capsys):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(BertTokenizer, "__call__", interrupt)
    assert run(argv()) == 130
    assert len(capsys.readouterr().err.splitlines()) == 1


SENTENCE = {"tokens": ["Anna", "saw", "Paris"], "tags": ["B-PER", "O", "B-LOC"]}
QUESTION = {"question": "Paris", "context": "Anna in Paris", "answers": {"text": ["Paris"], "answer_start": [8]}}
NO_ANSWER = {"question": "it", "context": "a film", "answers": {"text": [], "answer_start": []}}
SAID = {"source": "good film", "target": "bad film"}
HELD_OUT = {"validation_fraction": 0.5, "eval_strategy": "steps", "eval_steps": 1}
NUMBERS = [{"text": "good", "score": [i, "0.5"]} for i in range(8)]
SEVERAL = [{"text": "good", "label": ["x", "y"][: i % 3]} for i in range(8)]
ONE_HOT = [{"text": "good", "toxic": i % 2} for i in range(8)]
TOXIC = {"problem": "multi_label", "label_columns": "toxic"}

# A task, changed arguments, rows, and some of the metrics.
RUNS = {
    "pairs": (
        "classification",
        {},
        [{"sentence1": "good", "sentence2": "bad film", "label": i % 2} for i in range(8)],
        "accuracy",
    ),
    "several labels": ("classification", {"problem": "multi_label"}, SEVERAL, "f1_micro"),
    "one-hot columns": ("classification", TOXIC, ONE_HOT, "subset_accuracy"),
    "numbers": ("classification", {"problem": "regression"}, NUMBERS, "pearson"),
    "balanced": (
        "classification",
        {"class_weights": "balanced", "label_smoothing_factor": 0.1},
        reviews(8),
        "f1_macro",
    ),
    "frozen": ("classification", {"freeze": "encoder"}, reviews(8), "accuracy"),
    "held out": ("classification", HELD_OUT, reviews(8), "accuracy"),
    "transformers' BERT": ("classification", {"implementation": "bert"}, reviews(8), "accuracy"),
    "bfloat16": ("classification", {"bf16": True, "optim": "sgd"}, reviews(8), "accuracy"),
    "no checkpoints": ("classification", {"save_strategy": "no", "optim": "adafactor"}, reviews(8), "accuracy"),
    "entities": ("tagging", {}, [SENTENCE] * 8, "entity_f1 tag_accuracy"),
    "IOB1": (
        "tagging",
        {"scheme": "iob1"},
        [{"words": "in Paris", "tags": "O I-LOC"}] * 8,
        "entity_f1",
    ),
    "plain tags": (
        "tagging",
        {"scheme": "plain", "class_weights": "balanced"},
        [{"words": "a film \u200b", "tags": "DET NOUN NOUN"}] * 8,
        "f1_macro",
    ),
    "short windows": ("tagging", {"max_length": 4, "stride": 1}, [SENTENCE] * 8, "entity_f1"),
    "answers": (
        "question-answering",
        {"max_length": 9, "stride": 1},
        [QUESTION, NO_ANSWER] * 4,
        "exact_match f1 has_answer_f1 no_answer_f1",
    ),
    "best threshold": (
        "question-answering",
        {"null_threshold": "best", "stride": 1},
        [QUESTION] * 8,
        "f1 null_threshold",
    ),
    "generation": ("seq2seq", {"max_target_length": 8, "num_beams": 2}, [SAID] * 8, "rougeL perplexity"),
    "generation without texts": (
        "seq2seq",
        {"metrics": "loss", "label_smoothing_factor": 0.1, "max_target_length": 12},
        [SAID] * 8,
        "perplexity",
    ),
    "masked words": ("masked-lm", {}, reviews(40), "perplexity"),
    "masked whole lines": ("masked-lm", {"line_by_line": True}, reviews(40), "perplexity"),
}


@pytest.mark.parametrize(("task", "changed", "rows", "metrics"), RUNS.values(), ids=RUNS)
def test_runs(task, changed, rows, metrics, argv, tmp_path):
    """Each trains, has its metrics, and has the same ones and the same predictions when its model is evaluated."""
    file = write_rows(tmp_path / "task.jsonl", rows)
    validation = None if "validation_fraction" in changed else file
    assert run(argv(task, train_file=file, validation_file=validation, **changed)) == 0
    folder, evaluated = tmp_path / "run", tmp_path / "evaluated"
    report = report_of(folder)
    assert {*metrics.split(), "loss"} <= report["validation"].keys()
    assert [point["step"] for point in report["history"] if "train" in point][-1] == report["updates"]
    assert (folder / "model.safetensors").exists()
    if "perplexity" in metrics:
        assert report["validation"]["perplexity"] == pytest.approx(math.exp(report["validation"]["loss"]))
    if validation is None:
        return
    given = {"evaluate_only": True, "model": folder, "validation_file": file, "bf16": changed.get("bf16")}
    assert run([task, *flags(**given, output_dir=evaluated)]) == 0
    report["validation"].pop("null_threshold", None)  # which is chosen in the training
    assert report_of(evaluated)["validation"] == pytest.approx(report["validation"], abs=1e-6)
    predictions = [path / "predictions_validation.jsonl" for path in (folder, evaluated)]
    if predictions[0].exists() and "score" not in (row := read_rows(predictions[0])[0]) and "scores" not in row:
        assert predictions[0].read_text() == predictions[1].read_text()
    assert not (evaluated / "model.safetensors").exists()


QUESTIONS = [{**QUESTION, "context": QUESTION["context"] + end} for end in ("", " . a film", " is bad")]
PAIRS = [{"source": f"{word} film", "target": f"a {word}"} for word in WORDS[:4]]

# A task, arguments, rows, and the metric of a perfect model.
LEARNT = {
    "classification": ({}, reviews(8), "accuracy", 1),
    "tagging": ({"max_length": 4, "stride": 1}, [SENTENCE, {"tokens": ["a"], "tags": ["O"]}], "entity_f1", 1),
    "question-answering": ({"max_length": 9, "stride": 2}, [*QUESTIONS, NO_ANSWER], "f1", 100),
    "seq2seq": (
        {"max_target_length": 8, "metrics": "error_rate", "num_beams": 2},
        PAIRS,
        "item_error_rate",
        0,
    ),
}


@pytest.mark.parametrize("task", LEARNT)
def test_rows_are_learnt_by_heart(task, argv, steady_model, tmp_path):
    changed, rows, metric, perfect = LEARNT[task]
    file = write_rows(tmp_path / "task.jsonl", rows)
    steps = {"max_steps": 200, "learning_rate": 3e-3, "eval_strategy": "steps", "eval_steps": 100}
    given = {"train_file": file, "validation_file": file, "model": steady_model}
    assert run(argv(task, **given, **steps, **changed)) == 0
    assert report_of(tmp_path / "run")["validation"][metric] == perfect


@pytest.mark.parametrize(("count", "is_advised"), [(1, False), (2, True)])
def test_labels_that_are_in_no_validation_row(count, is_advised, model):
    """A larger share is advised, unless the only row with a label must be trained on."""
    rows = [{"text": f"{i}", "label": "ab"[i >= 9 - count]} for i in range(9)]
    task, rows = make_task("classification", rows, model=model, validation_fraction=0.1)
    said = []
    kept, held_out = train.hold_out_rows(task, rows, said.append)
    assert (len(kept), {row["label"] for row in held_out}) == (8, {"a"})
    assert said[1].startswith("1 of 2 labels")
    assert ("--validation_fraction" in said[1]) == is_advised


def test_evaluations(argv, model, tmp_path, capsys):
    """The length of inputs is that of the training, unless it is given. Unknown labels and other models are refused."""
    test = write_rows(tmp_path / "test.jsonl", reviews(8))
    assert run(argv(max_length=3)) == 0
    given = {"evaluate_only": True, "model": tmp_path / "run", "test_file": test}
    for length, tokens in ((None, 3), (9, 7)):
        output = tmp_path / f"{length}"
        assert run(["classification", *flags(**given, max_length=length, output_dir=output)]) == 0
        assert report_of(output)["lengths"]["test"]["tokens"] <= 8 * tokens
        lengths = report_of(output)["lengths"]["test"]
        assert (lengths["tokens_cut"], lengths["rows_cut"]) == ((0, 0) if length == 9 else (13, 7))
    capsys.readouterr()
    other = write_rows(tmp_path / "other.jsonl", [*reviews(2), {"text": "good", "label": "fair"}])
    numbered = write_rows(tmp_path / "numbered.jsonl", [{"text": "good", "label": "LABEL_1"}])
    for changed, named in (
        ({"test_file": None}, "--evaluate_only"),
        ({"test_file": other}, "row 3"),
        ({"model": model, "test_file": numbered, "max_length": 9}, "classifier"),
    ):
        assert run(["classification", *flags(**{**given, **changed}, output_dir=tmp_path / "no")]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert named in line


@pytest.mark.parametrize("task", ["classification", "tagging", "question-answering", "seq2seq", "masked-lm"])
def test_a_dry_run_shows_inputs_and_writes_nothing(task, argv, tmp_path, capsys):
    rows = {"tagging": [SENTENCE], "question-answering": [QUESTION], "seq2seq": [SAID]}.get(task, reviews(8))
    file = write_rows(tmp_path / "task.jsonl", rows * 8)
    more = {"question-answering": {"stride": 1}, "seq2seq": {"max_target_length": 8}}.get(task, {})
    assert run(argv(task, train_file=file, **more, dry_run=True)) == 0
    printed = capsys.readouterr().out
    assert printed.count("task.jsonl, row ") >= 3
    assert "[CLS]" in printed
    assert not (tmp_path / "run").exists()


CONTEXT = "a good film . it is fun in Paris . Anna saw it ."
QUESTIONS = [
    {
        "question": f"is it {words}",
        "context": CONTEXT,
        "answers": {"text": [words], "answer_start": [CONTEXT.index(words)]},
    }
    for words in ("good film", "fun", "Paris", "Anna", "Anna saw")
]
LENGTHS = {"max_length": 14, "stride": 4, "max_answer_length": 2}
LONG = {"num_train_epochs": 20, "learning_rate": 2e-3}


@pytest.mark.parametrize(
    ("task", "given", "rows"),
    [
        (
            "classification",
            {"text_column": "body", "max_length": 5, **LONG},
            [{"body": row["text"], "label": row["label"], "text": "a"} for row in reviews(8)],
        ),
        (
            "tagging",
            {"max_length": 4, "stride": 1, **LONG},
            [SENTENCE, {"tokens": ["a", "film"], "tags": ["O", "O"]}] * 4,
        ),
        ("question-answering", LENGTHS, QUESTIONS),
        ("question-answering", LENGTHS | {"null_threshold": "-100"}, QUESTIONS),
        ("question-answering", LENGTHS | {"null_threshold": "best"}, QUESTIONS),
        (
            "seq2seq",
            {"max_length": 4, "max_target_length": 6, "num_beams": 2, **LONG},
            [{"source": f"{a} {b} film", "target": a} for a in WORDS for b in WORDS[:2]],
        ),
    ],
)
def test_predict_predicts_what_the_training_did(task, given, rows, argv, tmp_path):
    """With the columns, lengths, beams and threshold of the training, without a flag for them; and with its metrics."""
    file = write_rows(tmp_path / "task.jsonl", rows)
    assert run(argv(task, train_file=file, validation_file=file, **given)) == 0
    folder, output = tmp_path / "run", tmp_path / "predicted"
    label = {"tagging": "tags", "question-answering": "answers", "seq2seq": "target"}.get(task, "label")
    assert exit_code(predict, folder, file, *flags(format="jsonl", processes=1, output=output, label_column=label)) == 0
    before, now = map(read_rows, (folder / "predictions_validation.jsonl", output / "part-000000.jsonl"))
    for old, new in zip(before, now, strict=True):
        for name in old.keys() - rows[0].keys():
            assert new[name] == (pytest.approx(old[name], abs=5e-5) if name == "score" else old[name])
    name = "predicted_tags" if task == "tagging" else "prediction"
    assert task == "question-answering" or len({str(row[name]) for row in before}) > 1
    metrics, trained = json.loads((output / "__run__" / "metrics.json").read_text()), report_of(folder)["validation"]
    assert (metrics.pop("rows"), metrics.pop("rows_left_out")) == (len(rows), 0)
    assert metrics == {name: pytest.approx(trained[name], abs=1e-5) for name in metrics}


@pytest.mark.parametrize("task", ["seq2seq", "masked-lm"])
def test_random_weights(task, argv, model, tmp_path):
    """A model of --config_name, with changed fields. It is evaluated like others."""
    rows = [SAID] * 4 if task == "seq2seq" else reviews(8)
    file = write_rows(tmp_path / "task.jsonl", rows)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    overrides = [f"{name}={value}" for name, value in sizes.items()] + ["norm_first=true"]
    new = {"model": None, "config_name": TINY, "tokenizer_name": model, "train_file": file, "validation_file": file}
    more = {"max_target_length": 12} if task == "seq2seq" else {}
    assert run(argv(task, **new, **more, config_overrides=overrides)) == 0
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert (config["hidden_size"], config["norm_first"]) == (16, True)
    given = {"evaluate_only": True, "model": tmp_path / "run", "validation_file": file}
    assert run([task, *flags(**given, output_dir=tmp_path / "evaluated")]) == 0
    found = [report_of(tmp_path / name)["validation"] for name in ("run", "evaluated")]
    assert found[0] == pytest.approx(found[1])


def test_frozen_weights_stay(argv, model, tmp_path):
    """Those above and new ones are trained. Gradient checkpointing changes no number."""
    folders = [tmp_path / name for name in ("plain", "checkpointed")]
    for folder, checkpointing in zip(folders, ("false", "true"), strict=True):
        assert run(argv(output_dir=folder, freeze=1, gradient_checkpointing=checkpointing, learning_rate=1e-2)) == 0
    weights = [load_file(folder / "model.safetensors") for folder in folders]
    start = ScratchBertModel.from_pretrained(model).state_dict()
    for name, value in weights[0].items():
        torch.testing.assert_close(weights[1][name], value, rtol=0, atol=1e-6)
        if "key.bias" not in name:  # which has no gradient
            is_frozen = "embeddings" in name or "blocks.0." in name
            assert (name.startswith("model.") and value.equal(start[name[6:]])) == is_frozen, name
