"""What the tests of the training scripts share: a tiny checkpoint with a tokenizer of a few words, a task of it without
a run, and a run that breaks off."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from accelerate import Accelerator
from safetensors.torch import load_file
from transformers import BertConfig, BertModel, BertTokenizer

import finetune_classification
import finetune_question_answering
import finetune_seq2seq
import finetune_token_classification
import pretrain_mlm
from support.models import tiny_config
from toolkit.finetuning.command_line import parse
from toolkit.finetuning.loop import Training

WORDS = ["good", "bad", "film", "fun", "a", "very", "."]
TEXTS = ["good film .", "bad film", "a very good film", "a bad film .", "good fun .", "very bad", "good", "bad ."]

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


def save_tiny(folder, words: list[str]) -> str:
    """A BertModel with 64 positions, and a tokenizer of SPECIAL and these words."""
    vocabulary = {word: i for i, word in enumerate([*SPECIAL, *words])}
    config = tiny_config(BertConfig, vocab_size=len(vocabulary), max_position_embeddings=64, initializer_range=0.2)
    BertModel(config).save_pretrained(folder)
    BertTokenizer(vocab=vocabulary).save_pretrained(folder)
    return str(folder)


def read_settings(settings_class, argv: list[str]):
    """The settings of a command line."""
    return parse(__file__, "", settings_class, argv)[1]


def make_task(task_class, settings_class, **flags):
    """A task as a script makes it, without a run."""
    return task_class(settings_class(**{"output": "", **flags}), Accelerator())


@contextmanager
def breaking_off(monkeypatch, after: int) -> Iterator[list[Training]]:
    """Interrupts a run before update `after + 1`. Yields a list, to which each update adds its run before it begins."""
    update, runs = Training.update, []

    def break_off(self, group):
        runs.append(self)
        if len(runs) > after:
            raise KeyboardInterrupt
        return update(self, group)

    with monkeypatch.context() as patch:
        patch.setattr(Training, "update", break_off)
        yield runs


def assert_resumes(main, argv: list[str], folder, monkeypatch, after: int) -> None:
    """A run that breaks off after some updates and goes on with --resume ends as one that does not break off."""

    def run(name: str, *more: str) -> int:
        return main([*argv, "--output", str(folder / name), "--save_steps", "4", "--trackers", "none", *more])

    assert run("whole") == 0
    with breaking_off(monkeypatch, after):
        assert run("broken") == 130
    assert not (folder / "broken" / "model.safetensors").exists()
    assert run("broken", "--resume") == 0
    whole, broken = (load_file(folder / name / "model.safetensors") for name in ("whole", "broken"))
    assert all(whole[name].equal(broken[name]) for name in whole)
    metrics = [json.loads((folder / name / "metrics.json").read_text()) for name in ("whole", "broken")]
    assert metrics[0]["validation"] == metrics[1]["validation"]


def assert_one_line(run, message: str, capsys) -> None:
    """A run that cannot be made says so in one line, and its exit code is 2."""
    try:
        code = run()
    except SystemExit as stopped:
        code = stopped.code
    lines = capsys.readouterr().err.splitlines()
    assert (code, len(lines)) == (2, 1), lines
    assert message in lines[0]


def assert_help_tells(script, flags: tuple[str, ...], capsys) -> None:
    """`--help` begins as the script's own text does, and has these flags."""
    with pytest.raises(SystemExit) as stopped:
        script.main(["--help"])
    assert stopped.value.code == 0
    said = capsys.readouterr().out
    assert script.__doc__.split("\n")[0][:40] in " ".join(said.split())
    assert all(flag in said for flag in flags)


def write_rows(path: Path, rows: list[dict]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def write_labels(path: Path, labels: list) -> str:
    """A file of TEXTS with these labels."""
    return write_rows(path, [{"text": text, "label": label} for text, label in zip(TEXTS, labels, strict=True)])


# A row for each command.
ROWS = {
    finetune_classification: {"text": "good", "label": 1},
    finetune_token_classification: {"tokens": ["good"], "tags": ["O"]},
    finetune_question_answering: {"question": "a", "context": "a", "answers": {"text": [], "answer_start": []}},
    finetune_seq2seq: {"source": "good", "target": "bad"},
    pretrain_mlm: {"text": "good film"},
}

TASKS = ("classification", "tags", "answers", "pairs", "masked words")


def main_of(task: str, tmp_path) -> tuple:
    """A command, and its flags for eight rows that are the training set and the validation set."""
    command, row = {
        "classification": (finetune_classification, {"text": "good", "label": 1}),
        "tags": (finetune_token_classification, {"tokens": ["good", "bad"], "tags": ["B-X", "O"]}),
        "answers": (finetune_question_answering, {**ROWS[finetune_question_answering]}),
        "pairs": (finetune_seq2seq, {"source": "good", "target": "bad"}),
        "masked words": (pretrain_mlm, {"text": "good bad film fun a very good bad film"}),
    }[task]
    file = write_rows(
        tmp_path / "rows.jsonl", [{**row, **({"label": i % 2} if "label" in row else {})} for i in range(8)]
    )
    more = {"pairs": {"max_target_length": 8, "metrics": "loss"}, "answers": {"stride": 4}}.get(task, {})
    return command.main, {"train_file": file, "validation_file": file, "max_length": 24, **more}
