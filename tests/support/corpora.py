"""Tiny models of every task with a tokenizer, texts of their words, and runs of `predict.py`."""

import csv
import json
import random
from pathlib import Path

from pyarrow import parquet

import predict
from support.commands import exit_code
from support.models import (
    NEEDS,
    NO_DROPOUT,
    OURS,
    SPECIAL,
    SPECIAL_TOKENS,
    random_encoder_decoder,
    randomise,
    tiny_config,
    word_tokenizer,
)

WORDS = ["a", "good", "bad", "film", "with", "ada", "and", "bo", "in", "rome", "##s", "##ful", ".", ",", "!"]
WORDS += [f"word{number}" for number in range(40)]
HEADS = {
    "embed": "Model",
    "classify": "ForSequenceClassification",
    "tag": "ForTokenClassification",
    "rerank": "ForSequenceClassification",
    "answer": "ForQuestionAnswering",
    "generate": "ForConditionalGeneration",
    "continue": "ForCausalLM",
    "fill-mask": "ForMaskedLM",
}
FIELDS = {
    "classify": {"id2label": {0: "bad", 1: "fair", 2: "good"}},
    "rerank": {"num_labels": 1},
    "tag": {"id2label": dict(enumerate(["O", "B-PER", "I-PER", "B-LOC", "I-LOC"]))},
    "generate": SPECIAL,
}


def save_model(folder: Path, task: str = "embed", kind: str = "scratchbert", seed: int = 0, **fields) -> str:
    """Saves a tiny model for a task, of `kind` scratchbert or bert, and its tokenizer. Returns the folder."""
    needs = NEEDS.get(HEADS[task], {}) if kind == "scratchbert" or task != "generate" else {}
    fields = {**NO_DROPOUT, "vocab_size": len(SPECIAL_TOKENS + WORDS), **needs, **FIELDS.get(task, {}), **fields}
    if "id2label" in fields:
        fields["label2id"] = {name: number for number, name in fields["id2label"].items()}
        fields.pop("num_labels", None)
    if kind == "bert" and task == "generate":
        random_encoder_decoder(seed, **{name: fields[name] for name in fields.keys() - SPECIAL}).save_pretrained(folder)
    else:
        model = randomise(OURS[HEADS[task]](tiny_config(**fields)), seed, std=0.5).eval()
        model.save_pretrained(folder) if kind == "scratchbert" else model.save_as_bert(folder)
    word_tokenizer(WORDS, model_max_length=40).save_pretrained(folder)
    return str(folder)


def texts(count: int, seed: int = 0, longest: int = 30) -> list[str]:
    """Texts of 1 to `longest` words."""
    numbers = random.Random(seed)
    return [" ".join(numbers.choices(WORDS, k=numbers.randint(1, longest))) for _ in range(count)]


def rows_for(task: str, count: int = 30, longest: int = 30) -> list[dict]:
    """Rows with an id and the inputs of a task."""
    own, others = texts(count, 1, longest), texts(count, 2, min(longest, 30))
    rows = {
        "rerank": [{"query": text, "document": other} for text, other in zip(own, others, strict=True)],
        "answer": [{"question": text[:30], "context": other} for other, text in zip(own, others, strict=True)],
        "fill-mask": [{"text": f"[MASK] {text} [MASK]"} for text in texts(count, 1, 15)],
    }.get(task, [{"text": text} for text in own])
    return [{"id": number, **row} for number, row in enumerate(rows)]


def write_rows(path: Path, rows: list[dict]) -> str:
    """Writes JSON lines. Returns the path."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def run(*argv: str) -> int:
    """The exit code of predict.py, in one process of one thread unless the arguments have others."""
    return exit_code(predict, *argv[:1], "--processes", 1, *argv[1:])


def refused(capsys, named: str, *argv: str) -> None:
    """Runs the command, which ends with code 2 and one line on standard error that has `named`."""
    capsys.readouterr()
    assert run(*argv) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if line and "rows/s" not in line]
    assert len(lines) == 1, lines
    assert named in lines[0], lines[0]


def read_output(folder: Path | str) -> list[dict]:
    """The rows of all parts, of CSV as text."""
    rows = []
    for path in sorted(Path(folder).glob("part-*")):
        if path.suffix == ".parquet":
            rows += parquet.read_table(path).to_pylist()
        elif path.suffix == ".jsonl":
            rows += map(json.loads, path.read_text(encoding="utf-8").splitlines())
        else:
            with open(path, encoding="utf-8", newline="") as file:
                rows += csv.DictReader(file)
    return rows


def results(folder: Path | str, *argv: str) -> list[dict]:
    """The rows that the command writes into a new folder."""
    assert run(*argv, "--output", folder) == 0
    return read_output(folder)


def errors_of(folder: Path | str) -> list[dict]:
    path = Path(folder) / "__run__" / "errors.jsonl"
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


def all_files(folder: Path | str) -> dict[str, bytes]:
    """All files of an output."""
    folder = Path(folder)
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
