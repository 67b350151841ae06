"""What a training run refuses or reports, because its result would be wrong without a word."""

import json
from pathlib import Path

import pytest
import torch
from accelerate.state import AcceleratorState, GradientState, PartialState
from transformers import BertConfig, BertModel

import finetune_classification
import finetune_question_answering
import finetune_seq2seq
import finetune_token_classification
import pretrain_mlm
from support.finetuning import assert_one_line, save_tiny
from support.models import tiny_config
from toolkit.training.classification import label_order

pytestmark = pytest.mark.usefixtures("quiet_only_here")

WORDS = ["good", "bad", "film", "fun", "a", "very", "."]
TEXTS = ["good film .", "bad film", "a very good film", "a bad film .", "good fun .", "very bad", "good", "bad ."]


@pytest.fixture(autouse=True)
def new_accelerator():
    """Accelerate keeps the state of the first Accelerator of a process for all later ones."""
    states = (AcceleratorState, PartialState, GradientState)
    for state in states:
        state._reset_state()
    yield
    for state in states:
        state._reset_state()


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    torch.manual_seed(0)
    return save_tiny(tmp_path_factory.mktemp("model"), WORDS)


def write_rows(path: Path, rows: list[dict]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def write_labels(path: Path, labels: list) -> str:
    """A file of TEXTS with these labels."""
    return write_rows(path, [{"text": text, "label": label} for text, label in zip(TEXTS, labels, strict=True)])


@pytest.fixture
def flags(model, tmp_path):
    """The command line of a run of four updates, one epoch, on eight texts."""

    def make(train_file=None, output="run", **changed) -> list[str]:
        given = {
            "model": model, "output": tmp_path / output, "batch_size": 2, "epochs": 1, "max_length": 12,
            "trackers": "none", "train_file": train_file or write_labels(tmp_path / "train.jsonl", [1, 0] * 4),
            **changed,
        }  # fmt: skip
        return [f"--{name}={value}" for name, value in given.items() if value is not None]

    return make


# ------------------------------------------------------------------------------------------------------ the tokenizer

ROWS = {
    finetune_classification: {"text": "good", "label": 1},
    finetune_token_classification: {"tokens": ["good"], "tags": ["O"]},
    finetune_question_answering: {"question": "a", "context": "a", "answers": {"text": [], "answer_start": []}},
    finetune_seq2seq: {"source": "good", "target": "bad"},
    pretrain_mlm: {"text": "good film"},
}


@pytest.mark.parametrize("command", ROWS, ids=lambda command: command.__name__)
def test_a_model_without_a_tokenizer_is_refused(command, flags, tmp_path, capsys):
    """transformers would return a tokenizer of five words."""
    bare = tmp_path / "bare"
    BertModel(tiny_config(BertConfig, vocab_size=12)).save_pretrained(bare)
    argv = flags(train_file=write_rows(tmp_path / "rows.jsonl", [ROWS[command]]), model=bare)
    assert_one_line(lambda: command.main(argv), f"--model {bare}: It has no tokenizer: neither tokenizer.json", capsys)


@pytest.mark.parametrize(
    ("command", "row", "changed", "message"),
    [
        (finetune_classification, {}, {"max_length": 2}, "--max_length is 2; expected at least 3: 2 special tokens"),
        (finetune_classification, {"sentence2": "bad"}, {"max_length": 4}, "--max_length is 4; expected at least 5: 3"),
        (
            finetune_seq2seq,
            {"target": "bad"},
            {"max_length": 1, "max_target_length": 8},
            "--max_length is 1; expected at least 3: 2 special",
        ),
        (finetune_seq2seq, {"target": "bad"}, {"max_target_length": 1}, "--max_target_length is 1; expected 2 or more"),
        (finetune_token_classification, {}, {"max_length": 2}, "max_length is 2; expected at least 3"),
    ],
)
def test_sequences_have_room_for_a_token_of_each_text(command, row, changed, message, flags, tmp_path, capsys):
    """A tokenizer truncates nothing if the maximum is less than its special tokens."""
    row = {**ROWS[command], **row}
    argv = flags(train_file=write_rows(tmp_path / "rows.jsonl", [row, {**row, "label": 2, "tags": ["B-X"]}]), **changed)
    assert_one_line(lambda: command.main(argv), message, capsys)


# --------------------------------------------------------------------------------------------------------- the labels


@pytest.mark.parametrize("value", [float("nan"), float("inf"), {"name": "good"}, [["good"]]])
@pytest.mark.parametrize("problem", ["single_label", "multi_label"])
def test_a_label_is_a_text_or_a_finite_number(value, problem, flags, tmp_path, capsys):
    bad = value if problem == "single_label" or isinstance(value, list) else [value]
    argv = flags(train_file=write_labels(tmp_path / "train.jsonl", [1, 0, bad, *[1, 0, 1, 0, 1]]), problem=problem)
    shown = repr(value[0] if isinstance(value, list) else value)
    message = f"train.jsonl, row 3 (line 3): the label is {shown}; expected a text or a finite number"
    assert_one_line(lambda: finetune_classification.main(argv), message, capsys)


def test_labels_that_only_look_like_integers_are_texts():
    names = ["10", "①", "2", "--1", "-3", "²", "9" * 5000, "0", "00", "1" * 18]
    ordered = ["-3", "0", "00", "--1", "9" * 5000, "²", "①", "2", "10", "1" * 18]
    assert sorted(names, key=label_order) == ordered
