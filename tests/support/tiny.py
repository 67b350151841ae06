"""A tiny BERT with a tokenizer of a few words, files of rows, and runs of train.py on them."""

import json
import shutil
from pathlib import Path

import torch
from accelerate.state import AcceleratorState, GradientState, PartialState
from transformers import BertConfig, BertModel

import train
from support.commands import exit_code
from support.models import SPECIAL_TOKENS, tiny_config, word_tokenizer
from toolkit.tasks import ARGUMENTS, task_class

WORDS = ["good", "bad", "film", "fun", "a", "very", ".", "is", "it", "Anna", "Paris", "in", "saw"]
TEXTS = ["good film .", "bad film", "a very good film", "a bad film .", "good fun .", "very bad", "good", "bad ."]


def save_tiny(folder: Path, words: list[str] = WORDS, **fields) -> str:
    """A BertModel with 64 positions, and a tokenizer of these words.

    Args:
        fields: of the configuration.
    """
    torch.manual_seed(0)
    sizes = {"vocab_size": len(SPECIAL_TOKENS) + len(words), "max_position_embeddings": 64, "initializer_range": 0.2}
    BertModel(tiny_config(BertConfig, **{**sizes, **fields})).save_pretrained(folder)
    word_tokenizer(words).save_pretrained(folder)
    return str(folder)


def write_rows(path: Path, rows: list[dict]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def reviews(count: int) -> list[dict]:
    return [{"text": TEXTS[i % 8], "label": "pos" if "good" in TEXTS[i % 8] else "neg"} for i in range(count)]


def flags(**given) -> list[str]:
    """Arguments of the command line, without those that are None. A list has several values."""
    made = []
    for name, value in given.items():
        values = value if isinstance(value, list) else [value]
        made += [f"--{name}", *map(str, values)] if value is not None else []
    return made


def reset_accelerate() -> None:
    """Accelerate keeps the state of the first Accelerator of a process for all later ones."""
    for state in (AcceleratorState, PartialState, GradientState):
        state._reset_state()


def run(argv: list[str]) -> int:
    """The exit code of train.py."""
    return exit_code(train, *argv)


def report_of(folder: Path) -> dict:
    return json.loads((Path(folder) / "metrics.json").read_text())


def break_off(folder: Path, step: int) -> None:
    """Makes a finished run one that was interrupted after a checkpoint."""
    for path in folder.glob("checkpoint-*"):
        if int(path.name.split("-")[1]) > step:
            shutil.rmtree(path)
    (folder / "metrics.json").unlink()
    (folder / "model.safetensors").unlink()


def make_task(name: str, contents: list[dict], **given) -> tuple:
    """A task without a run, which has learnt its labels from some rows; and these rows."""
    task = task_class(name)(ARGUMENTS[name](**given))
    task.find_columns(list(contents[0]))
    rows = [
        {**task.read(content), "place": f"row {number}", "columns": content}
        for number, content in enumerate(contents, 1)
    ]
    task.remarks = list(task.prepare(rows))
    return task, rows


def tokens(task, ids) -> str:
    return " ".join(task.tokenizer.convert_ids_to_tokens(ids))


def as_question(batch: dict) -> dict:
    """A batch of question answering with the names of the models for its labels."""
    start, end = batch["labels"].unbind(1)
    others = {name: value for name, value in batch.items() if name != "labels"}
    return others | {"start_positions": start, "end_positions": end}
