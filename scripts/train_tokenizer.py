#!/usr/bin/env python
"""Trains BERT's tokenizer, WordPiece, on texts of one's own.

    train_tokenizer.py --train_file reviews.csv --output my-tokenizer --vocab_size 8000
    train_tokenizer.py --train_file words.csv --column word phonemes --output g2p-tokenizer --pre_split whitespace \\
        --min_frequency 100

The files are .txt, with a text a line, or .csv, .tsv, .jsonl or .parquet, all UTF-8, and may be larger than memory:
they are read three times, a row at a time. The same files and flags give the same tokenizer, to the byte.

OUTPUT gets tokenizer.json, tokenizer_config.json and vocab.txt, which AutoTokenizer opens as a BertTokenizer. It
appears when all of it is written.

With --pre_split whitespace the texts are symbols with spaces between them, such as phonemes, and are taken as they are:
nothing is changed to lower case or split at punctuation. A symbol seen at least --min_frequency times is one token.
What is rarer is spelt by its characters: above, HH AH L OW is four tokens, as each of the phonemes is seen thousands of
times, and hello is h ##e ##l ##l ##o. There is no vocab.txt then, as its readers take it for that of a BertTokenizer.

At the end it says how the tokenizer does on every --held_out-th row, which it was not trained on: how many tokens there
are for a word, words being what has spaces between, and how many of them are [UNK].

Exit code: 0 trained, 2 bad usage or texts that cannot be used, 130 interrupted.
"""

import argparse
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from tokenizers import Tokenizer, decoders, pre_tokenizers, processors
from tokenizers.models import WordPiece
from tokenizers.trainers import WordPieceTrainer
from transformers import BertTokenizer, PreTrainedTokenizerFast

from toolkit.files import atomic_folder
from toolkit.training.rows import Source, columns_of, find_column, keep_rows, read_rows, text_of

PROG = "train_tokenizer.py"

# In the order of their ids, 0 to 4. Google's files have them at 0 and 100 to 103, behind tokens without a use.
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
PIECE = "##"  # stands before what continues a word

# So many texts tell how the tokenizer does.
MEASURED = 10_000

Texts = Callable[[], Iterator[str]]  # makes an iterator, from the beginning


# --------------------------------------------------------------------------------------------------------------- texts


class Corpus:
    """The texts of files, read anew each time.

    Args:
        columns: the texts are in; each is a text of its own. None: the column "text".
        on_bad_row: "stop" or "skip". Those that are skipped are told of at the first reading.
        held_out: every so many-th row is kept from training. 0: none.

    Raises:
        OSError, ValueError: as `read_rows` says, or a column is not there.
    """

    def __init__(self, source: Source, columns: list[str] | None, on_bad_row: str, held_out: int):
        there = columns_of(source)
        self.source, self.on_bad_row, self.held_out = source, on_bad_row, held_out
        self.columns = [find_column(there, column, ["text"], "the texts") for column in columns or [None]]
        self.warn = say

    def texts(self) -> Iterator[tuple[bool, str]]:
        """Each text, and whether it is held out."""
        warn, self.warn = self.warn, lambda message: None
        rows = keep_rows(read_rows(self.source), self.texts_of, self.on_bad_row, warn)
        for number, row in enumerate(rows, 1):
            is_held_out = self.held_out > 0 and number % self.held_out == 0
            yield from ((is_held_out, text) for text in row["texts"])

    def texts_of(self, row: dict) -> dict[str, list[str]]:
        return {"texts": [text_of(row, column) for column in self.columns]}

    def to_train_on(self) -> Iterator[str]:
        return (text for is_held_out, text in self.texts() if not is_held_out)

    def to_measure(self) -> tuple[bool, list[str]]:
        """Whether there are held-out texts, and the first of them, or else of all."""
        found = list(islice((text for is_held_out, text in self.texts() if is_held_out), MEASURED))
        return bool(found), found or list(islice((text for _, text in self.texts()), MEASURED))


def say(message: str) -> None:
    print(f"{PROG}: {message}", file=sys.stderr)


# ---------------------------------------------------------------------------------------------------------- vocabulary


def train_bert(
    texts: Texts, vocab_size: int, min_frequency: int, limit_alphabet: int, cased: bool, strip_accents: bool | None,
    model_max_length: int,
) -> BertTokenizer:  # fmt: skip
    """Trains the WordPiece of a BertTokenizer, in two passes over the texts.

    The library numbers the characters in the order in which its hash table has them, another one in each process, and
    by these numbers decides between pairs that are as frequent. Here they are counted first, and numbered in the order
    of Unicode, which makes all that follows the same each time.

    Args:
        vocab_size: at most so many tokens.
        min_frequency: pieces that are seen less often are not joined.
        limit_alphabet: at most so many characters, the most frequent.
        cased: keep upper case.
        strip_accents: None: where not `cased`, as in BERT.

    Raises:
        ValueError: the characters alone are more than `vocab_size`, or the texts have none.
    """
    settings = {"do_lower_case": not cased, "strip_accents": strip_accents, "model_max_length": model_max_length}
    backend = BertTokenizer(**settings).backend_tokenizer
    pieces = alphabet(
        (word for text in texts()
         for word, _ in backend.pre_tokenizer.pre_tokenize_str(backend.normalizer.normalize_str(text))),
        limit_alphabet,
    )  # fmt: skip
    if not pieces:
        raise ValueError("there is no text to train on: nothing but spaces and control characters")
    check_size(vocab_size, {"characters, at the beginning of a word and within": len(pieces)})
    letters = [piece for piece in pieces if not piece.startswith(PIECE) or piece == PIECE[0]]
    trainer = WordPieceTrainer(
        vocab_size=vocab_size,
        min_frequency=min_frequency,
        initial_alphabet=letters,
        limit_alphabet=len(letters),
        # The one way to give "##a" a number as well. Special they are to the trainer alone.
        special_tokens=SPECIAL + pieces,
        show_progress=sys.stderr.isatty(),
    )
    backend.train_from_iterator(texts(), trainer)
    return BertTokenizer(vocab=backend.get_vocab(), **settings)


def alphabet(words: Iterable[str] | Counter, limit: int) -> list[str]:
    """The pieces of a single character that spell these words: each character, in the order of Unicode, and then, with
    ## before them, those that stand within a word. Of more than `limit` characters the most frequent are taken."""
    first, later = Counter(), Counter()
    for word in words:
        first[word[0]] += 1
        later.update(word[1:])
    both = first + later
    kept = sorted(sorted(both, key=lambda character: (-both[character], character))[:limit])
    return kept + [PIECE + character for character in kept if character in later]


def check_size(vocab_size: int, parts: dict[str, int]) -> None:
    """Raises ValueError unless the special tokens and these parts, with their sizes, fit into the vocabulary."""
    needed = len(SPECIAL) + sum(parts.values())
    if vocab_size < needed:
        counts = " and ".join(f"{count:,} {what}" for what, count in parts.items())
        raise ValueError(
            f"--vocab_size is {vocab_size:,}; {len(SPECIAL)} special tokens and {counts} take {needed:,} at least"
        )


def train_symbols(
    texts: Texts, vocab_size: int, min_frequency: int, limit_alphabet: int, model_max_length: int
) -> PreTrainedTokenizerFast:
    """Makes a tokenizer of symbols that spaces separate: the frequent ones whole, the rest by their characters. It is a
    WordPiece in which nothing is joined. All that is rare is in memory at once.

    Args:
        min_frequency: a symbol seen at least so many times is a token.
        limit_alphabet: at most so many characters to spell the others with, the most frequent.

    Raises:
        ValueError: that is more than `vocab_size`, or the texts are blank.
    """
    seen = Counter(symbol for text in texts() for symbol in text.split())
    if not seen:
        raise ValueError("there is no text to train on: nothing but spaces")
    whole = sorted((symbol for symbol in seen if seen[symbol] >= min_frequency), key=lambda one: (-seen[one], one))
    pieces = alphabet((symbol for symbol in seen.elements() if seen[symbol] < min_frequency), limit_alphabet)
    check_size(vocab_size, {"symbols": len(whole), "characters to spell the rarer ones with": len(pieces)})
    vocabulary = {token: i for i, token in enumerate(dict.fromkeys(SPECIAL + whole + pieces))}
    backend = Tokenizer(WordPiece(vocabulary, unk_token="[UNK]", max_input_chars_per_word=max(map(len, seen))))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.decoder = decoders.WordPiece(PIECE, cleanup=False)
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[(token, vocabulary[token]) for token in ("[CLS]", "[SEP]")],
    )
    roles = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        **roles,
        mask_token="[MASK]",
        model_max_length=model_max_length,
        model_input_names=BertTokenizer.model_input_names,
    )


# ------------------------------------------------------------------------------------------------------ what came of it


@dataclass
class Measure:
    """How a tokenizer does on texts."""

    texts: int
    words: int
    tokens: int
    unknown: int


def measure(tokenizer, texts: list[str]) -> Measure:
    """Counts words (what has spaces between), tokens without [CLS] and [SEP], and [UNK] among them."""
    encoded = tokenizer(texts, add_special_tokens=False, return_attention_mask=False, return_token_type_ids=False)
    ids = Counter(number for row in encoded["input_ids"] for number in row)
    return Measure(len(texts), sum(len(text.split()) for text in texts), ids.total(), ids[tokenizer.unk_token_id])


def print_report(tokenizer, is_held_out: bool, texts: list[str], output: Path) -> None:
    found = measure(tokenizer, texts)
    on = "held out" if is_held_out else "trained on"
    print(f"{output}: {len(tokenizer):,} tokens")
    print(f"on {found.texts:,} texts that were {on}, {found.words:,} words:")
    if found.tokens:
        print(f"  {found.tokens / found.words:.2f} tokens for a word, {found.unknown / found.tokens:.2%} of them [UNK]")
    sample = tokenizer.tokenize(texts[0])
    print(f"  {' '.join(sample[:40])}{' …' if len(sample) > 40 else ''}")


def save(tokenizer, folder: Path) -> None:
    """Writes the tokenizer's files."""
    tokenizer.save_pretrained(folder)
    if isinstance(tokenizer, BertTokenizer):
        words = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
        text = "".join(f"{word}\n" for word, _ in words)
        (folder / "vocab.txt").write_text(text, encoding="utf-8", newline="\n")


# ---------------------------------------------------------------------------------------------------- the command line


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line."""

    def error(self, message: str):
        self.exit(2, f"{self.prog}: {' '.join(message.split())}\n")


def make_parser() -> argparse.ArgumentParser:
    parser = Parser(
        PROG,
        usage="%(prog)s --train_file FILE … --output FOLDER [--FLAG VALUE …]",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--train_file", nargs="+", type=Path, required=True, metavar="FILE", help=".txt, .csv, .tsv, .jsonl, .parquet")
    add(
        "--output",
        type=Path,
        required=True,
        metavar="FOLDER",
        help="the folder to write; must not exist yet, or be empty",
    )
    add("--column", nargs="+", help='the columns the texts are in, each a text of its own (default: "text")')
    add("--on_bad_row", choices=("stop", "skip"), default="stop",
        help="what to do with a row that cannot be used (default: %(default)s); skipped ones are named")  # fmt: skip
    add("--vocab_size", type=number(1), default=30522, help="tokens, at most (default: %(default)s, BERT's)")
    add("--min_frequency", type=number(1), default=2,
        help="what is seen less often is spelt out of shorter tokens (default: %(default)s)")  # fmt: skip
    add("--limit_alphabet", type=number(1), default=1000,
        help="characters, at most; rarer ones are [UNK] (default: %(default)s)")  # fmt: skip
    add("--cased", action="store_true", help="keep upper case, and with it accents")
    add("--accents", choices=("keep", "strip"), help="(default: stripped, or kept with --cased)")
    add("--pre_split", choices=("bert", "whitespace"), default="bert",
        help="what is a word: bert splits at spaces and punctuation and around each Chinese character; whitespace is "
        "for symbols, see above (default: %(default)s)")  # fmt: skip
    add("--held_out", type=number(0), default=100, metavar="N",
        help="keep every N-th row for the report at the end (default: %(default)s); 0: none")  # fmt: skip
    add("--model_max_length", type=number(1), default=512,
        help="tokens that the model has positions for, to which truncation cuts (default: %(default)s)")  # fmt: skip
    return parser


def number(least: int) -> Callable[[str], int]:
    """Reads an integer of at least so much."""

    def read(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r} is no whole number from {least} on")
        return int(text)

    return read


def train(args: argparse.Namespace) -> None:
    """Trains, saves and reports.

    Raises:
        OSError, ValueError: the texts or the output are of no use.
    """
    if args.output.exists() and (not args.output.is_dir() or any(args.output.iterdir())):
        raise FileExistsError(f"--output {args.output} exists already; give a folder that is new or empty")
    corpus = Corpus(Source(files=args.train_file), args.column, args.on_bad_row, args.held_out)
    sizes = (args.vocab_size, args.min_frequency, args.limit_alphabet)
    with atomic_folder(args.output.resolve()) as folder:  # from the start, so that one that cannot be written shows
        if args.pre_split == "bert":
            strip = {"keep": False, "strip": True}.get(args.accents)
            tokenizer = train_bert(corpus.to_train_on, *sizes, args.cased, strip, args.model_max_length)
        else:
            tokenizer = train_symbols(corpus.to_train_on, *sizes, args.model_max_length)
        measured = corpus.to_measure()
        save(tokenizer, folder)
    print_report(tokenizer, *measured, args.output)


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code."""
    parser = make_parser()
    args = parser.parse_args(argv)
    if args.pre_split == "whitespace" and (args.cased or args.accents):
        parser.error("--cased and --accents have no place with --pre_split whitespace, which changes no character")
    try:
        train(args)
    except (OSError, ValueError) as error:
        say(" ".join(str(error).split()))
        return 2
    except KeyboardInterrupt:
        say(f"interrupted; nothing is written to {args.output}")
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
