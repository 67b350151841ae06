"""--evaluate_only: the metrics and the predictions of a trained model on labelled files."""

import json
from dataclasses import fields
from pathlib import Path

import pytest
import yaml

import finetune_classification
import finetune_question_answering
import finetune_seq2seq
import finetune_token_classification
import pretrain_mlm
from support.finetuning import TEXTS, assert_one_line, write_labels, write_rows
from toolkit.finetuning.settings import EVALUATED_WITH, EVALUATION_OF
from toolkit.finetuning.task_settings import (
    ClassificationSettings,
    PretrainingSettings,
    QuestionAnsweringSettings,
    Seq2SeqSettings,
    TokenClassificationSettings,
)

pytestmark = pytest.mark.usefixtures("quiet_only_here", "new_accelerator")

CONTEXT = "good film . a very good film . bad film ."
TAGS = ["X", "Y", "Z", "X"]

# A command, its rows, and flags on which its metrics depend.
CASES = {
    "classes": (
        finetune_classification,
        [{"text": text, "label": f"l{i % 3}"} for i, text in enumerate(TEXTS)],
        {"class_weights": "balanced", "label_smoothing": 0.1, "max_length": 4, "all_scores": True},
    ),
    "numbered classes": (
        finetune_classification,
        [{"text": text, "label": f"LABEL_{len(text) % 2}"} for text in TEXTS],
        {"mixed_precision": "bf16"},
    ),
    "several classes": (
        finetune_classification,
        [{"phrase": text, "kind": ["a;b", "b", "", "c"][i % 4]} for i, text in enumerate(TEXTS)],
        {"problem": "multi_label", "label_separator": ";", "text_column": "phrase", "label_column": "kind"},
    ),
    "numbers": (
        finetune_classification,
        [{"text": text, "label": len(text) / 3} for text in TEXTS],
        {"problem": "regression", "implementation": "bert"},
    ),
    "tags": (
        finetune_token_classification,
        # The tokenizer drops the last word, so that it has the most frequent tag.
        [{"tokens": [*text.split()[:3], "\u200b"], "tags": [*TAGS[: len(text.split()[:3])], "Z"]} for text in TEXTS],
        {"scheme": "plain", "class_weights": "balanced", "label_all_pieces": True, "stride": 1, "max_length": 5},
    ),
    "answers": (
        finetune_question_answering,
        [
            {"question": "good", "context": CONTEXT, "answers": {"text": text, "answer_start": [0] * len(text)}}
            for text in ([], ["good"], ["good film"], [])
        ],
        {"max_length": 14, "stride": 2, "null_threshold": "best", "max_answer_length": 2},
    ),
    "pairs": (
        finetune_seq2seq,
        [{"first": text, "second": text[:8]} for text in TEXTS],
        {"max_target_length": 6, "num_beams": 2, "source_column": "first", "target_column": "second"},
    ),
    "masked words": (
        pretrain_mlm,
        [{"text": f"{text} {CONTEXT}"} for text in TEXTS],
        {"line_by_line": True, "max_length": 9},
    ),
}


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("predictions_*")}


@pytest.mark.parametrize("case", CASES)
def test_the_metrics_and_predictions_are_those_of_the_end_of_the_training(case, flags, tmp_path):
    command, rows, given = CASES[case]
    files = {
        "validation_file": write_rows(tmp_path / "validation.jsonl", rows[1:]),
        "test_file": write_rows(tmp_path / "test.jsonl", rows[::-1]),
    }
    train = write_rows(tmp_path / "train.jsonl", rows)
    assert command.main(flags(train, **files, **given)) == 0
    Path(train).unlink()
    evaluated = tmp_path / "evaluated"
    argv = [f"--{name}={value}" for name, value in {"model": tmp_path / "run", "output": evaluated, **files}.items()]
    assert command.main([*argv, "--evaluate_only"]) == 0
    report, expected = (json.loads((folder / "metrics.json").read_text()) for folder in (evaluated, tmp_path / "run"))
    assert report.keys() == files_to_splits(files)
    for split in report:
        expected[split].pop("loss_by_frequency", None)  # requires the training set
        expected[split].pop("null_threshold", None)  # is chosen in the training
        assert report[split] == pytest.approx(expected[split], rel=1e-6)
    if "implementation" not in given:  # bits of a BERT depend on where its weights are in memory
        assert contents(evaluated) == contents(tmp_path / "run")
    assert not (evaluated / "model.safetensors").exists()


def files_to_splits(files: dict) -> set[str]:
    return {name.removesuffix("_file") for name in files}


@pytest.fixture
def trained(flags, tmp_path) -> Path:
    assert finetune_classification.main(flags(max_steps=1, output="trained", max_length=7)) == 0
    return tmp_path / "trained"


@pytest.fixture
def evaluating(trained, tmp_path):
    """The command line of an evaluation of `trained`."""

    def make(**changed) -> list[str]:
        test = write_labels(tmp_path / "test.jsonl", [1, 0] * 4)
        given = {
            "model": trained,
            "test_file": test,
            "output": tmp_path / "evaluated",
            "evaluate_only": True,
            **changed,
        }
        return [f"--{name}={value}" for name, value in given.items() if value is not None]

    return make


def test_flags_are_those_of_the_run_unless_they_are_given(evaluating, tmp_path):
    assert finetune_classification.main(evaluating()) == 0
    assert finetune_classification.main(evaluating(max_length=9, output=tmp_path / "longer")) == 0
    recipes = [yaml.safe_load((tmp_path / name / "recipe.yaml").read_text()) for name in ("evaluated", "longer")]
    assert [recipe["max_length"] for recipe in recipes] == [7, 9]


def test_a_model_without_a_recipe(evaluating, trained, capsys):
    (trained / "recipe.yaml").unlink()
    assert finetune_classification.main(evaluating(max_length=9)) == 0
    assert f"{trained} has no recipe.yaml" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"test_file": None}, "--evaluate_only is given without --validation_file or --test_file;"),
        ({"train_file": "x.csv"}, "--train_file is x.csv with --evaluate_only"),
        ({"epochs": 1}, "--epochs is 1.0 with --evaluate_only"),
        ({"resume": True}, "--resume is given with --evaluate_only"),
        ({"problem": "regression"}, "--problem is for regression and --model"),
    ],
)
def test_flags_that_it_does_not_use_are_refused(changed, message, evaluating, capsys):
    assert_one_line(lambda: finetune_classification.main(evaluating(**changed)), message, capsys)


@pytest.mark.parametrize(
    ("command", "row", "message"),
    [
        (finetune_classification, {"text": "good", "label": "1"}, "is a BertModel; expected a trained model"),
        (finetune_seq2seq, {"source": "good", "target": "bad"}, "has no weights of"),
    ],
)
def test_a_model_without_a_head_is_refused(command, row, message, model, tmp_path, capsys):
    test = write_rows(tmp_path / "test.jsonl", [row])
    argv = ["--model", model, "--evaluate_only", "--test_file", test, "--output", str(tmp_path / "run")]
    more = ["--max_length=8", *(["--max_target_length=8"] if command is finetune_seq2seq else [])]
    assert_one_line(lambda: command.main([*argv, *more]), message, capsys)


def test_a_label_that_the_model_does_not_know(evaluating, tmp_path, capsys):
    argv = evaluating(test_file=write_labels(tmp_path / "other.jsonl", [1, 2] * 4))
    assert_one_line(lambda: finetune_classification.main(argv), "row 2 (line 2): the label is '2'", capsys)


def test_balanced_weights_require_the_labels_of_the_training_set(evaluating, trained, capsys):
    (trained / "metrics.json").unlink()
    argv = evaluating(class_weights="balanced")
    assert_one_line(lambda: finetune_classification.main(argv), "--class_weights is balanced and metrics.json", capsys)


def test_an_evaluation_takes_every_flag_on_which_its_numbers_depend():
    """Of the flags about data and evaluations, these alone are not taken from a recipe."""
    classes = (
        ClassificationSettings,
        TokenClassificationSettings,
        QuestionAnsweringSettings,
        Seq2SeqSettings,
        PretrainingSettings,
    )
    groups = {each.name: each.metadata["group"] for settings in classes for each in fields(settings)}
    about_rows = {name for name, group in groups.items() if group in ("data", "evaluation")}
    assert about_rows - EVALUATED_WITH - EVALUATION_OF == {
        "train_file",
        "train_split",
        "validation_fraction",
        "split_seed",
        "max_train_samples",
        "labels",
        "streaming",
        "shuffle_buffer",
        "metric",
        "eval_steps",
    }
    assert groups.keys() >= EVALUATED_WITH | EVALUATION_OF
