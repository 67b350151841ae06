"""A tiny BERT with a tokenizer of a few words, and files of rows, for runs of train.py."""

import json
from pathlib import Path

import torch
from transformers import BertConfig, BertModel, BertTokenizer

from support.models import tiny_config

WORDS = ["good", "bad", "film", "fun", "a", "very", ".", "is", "it", "Anna", "Paris", "in", "saw"]
TEXTS = ["good film .", "bad film", "a very good film", "a bad film .", "good fun .", "very bad", "good", "bad ."]


def save_tiny(folder: Path) -> str:
    """A BertModel with 64 positions."""
    vocabulary = {word: i for i, word in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS])}
    torch.manual_seed(0)
    config = tiny_config(BertConfig, vocab_size=len(vocabulary), max_position_embeddings=64, initializer_range=0.2)
    BertModel(config).save_pretrained(folder)
    BertTokenizer(vocab=vocabulary).save_pretrained(folder)
    return str(folder)


def write_rows(path: Path, rows: list[dict]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def reviews(count: int) -> list[dict]:
    return [{"text": TEXTS[i % 8], "label": "pos" if "good" in TEXTS[i % 8] else "neg"} for i in range(count)]
