"""Tiny models of every task with a tokenizer, and texts of their words, for `predict.py`."""

import json
import random
from pathlib import Path

from transformers import BertTokenizer

import predict
from support.models import NO_DROPOUT, OURS, REFERENCES, randomise, tiny_config

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "good", "bad", "film", "with", "ada", "and", "bo", "in"]
WORDS += ["rome", "##s", "##ful", ".", ",", "!"] + [f"word{number}" for number in range(40)]
HEADS = {
    "embed": "Model",
    "classify": "ForSequenceClassification",
    "tag": "ForTokenClassification",
    "rerank": "ForSequenceClassification",
    "fill-mask": "ForMaskedLM",
}
FIELDS = {
    "classify": {"num_labels": 3, "id2label": {0: "bad", 1: "fair", 2: "good"}},
    "rerank": {"num_labels": 1},
    "tag": {"num_labels": 5, "id2label": dict(enumerate(["O", "B-PER", "I-PER", "B-LOC", "I-LOC"]))},
}


def save_model(folder: Path, task: str = "embed", kind: str = "scratchbert", seed: int = 0, **fields) -> str:
    """Saves a tiny model for a task, of `kind` scratchbert or bert, and its tokenizer. Returns the folder."""
    fields = {**NO_DROPOUT, "vocab_size": len(WORDS), **FIELDS.get(task, {}), **fields}
    if "id2label" in fields:
        fields["label2id"] = {name: number for number, name in fields["id2label"].items()}
        fields.pop("num_labels")
    model = randomise(OURS[HEADS[task]](tiny_config(**fields)), seed, std=0.5).eval()
    model.save_pretrained(folder) if kind == "scratchbert" else model.save_as_bert(folder)
    vocabulary = {word: number for number, word in enumerate(WORDS)}
    BertTokenizer(vocab=vocabulary, model_max_length=40).save_pretrained(folder)
    return str(folder)


def reference_of(folder: str, task: str):
    """BERT's own class, from a folder of the kind bert."""
    return REFERENCES[HEADS[task]].from_pretrained(folder).eval()


def texts(count: int, seed: int = 0, longest: int = 30) -> list[str]:
    """Texts of 1 to `longest` words."""
    numbers = random.Random(seed)
    return [" ".join(numbers.choices(WORDS[5:], k=numbers.randint(1, longest))) for _ in range(count)]


def write_rows(path: Path, rows: list[dict]) -> str:
    """Writes JSON lines. Returns the path."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def all_files(folder: Path) -> dict[str, bytes]:
    """All files of an output."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def content(folder: Path) -> dict[str, bytes]:
    """All files of an output, but what names the machine's state."""
    return {name: content for name, content in all_files(folder).items() if not name.endswith("manifest.json")}


def one_line(argv: list[str], capsys, *words: str, code: int = 2) -> None:
    """Runs the command, which ends with one line on standard error."""
    capsys.readouterr()
    try:
        found = predict.main(argv)
    except SystemExit as stopped:
        found = stopped.code
    assert found == code
    lines = [line for line in capsys.readouterr().err.splitlines() if line and "rows/s" not in line]
    assert len(lines) == 1, lines
    assert all(word in lines[0] for word in words), lines[0]
