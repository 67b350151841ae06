#!/usr/bin/env python
"""Trains a WordPiece tokenizer, as BERT has, on your own texts.

    train_tokenizer.py --train_file reviews.csv --output my-tokenizer --vocab_size 8000
    train_tokenizer.py --train_file words.csv --column word phonemes --output g2p-tokenizer --pre_split whitespace \\
        --min_frequency 100

The files are .txt, with a text on each line, .csv, .tsv, .json, .jsonl or .parquet, all UTF-8 and each also as .gz or
.zst. A pattern, such as 'data/*.txt', stands for the files that match it; a folder, for those in it. Files may be
larger than memory: they are read three times, row by row. The same files and flags give the same tokenizer, to the
byte.

--output becomes a folder with tokenizer.json, tokenizer_config.json and vocab.txt, which AutoTokenizer opens as a
BertTokenizer. It appears when it is complete.

With --pre_split whitespace the texts are symbols separated by spaces, such as phonemes, and are not changed to lower
case or split at punctuation. A symbol that occurs at least --min_frequency times is one token; rarer ones are spelt by
their characters: in the example above, HH AH L OW is four tokens, and hello is h ##e ##l ##l ##o. There is then no
vocab.txt, because its readers would expect a BertTokenizer.

At the end it prints the tokens per word, and the share of [UNK] among them, for every --held_out-th row, which is not
used for training. Words are separated by spaces.

Exit code: 0 trained, 2 bad usage or texts that cannot be used, 130 interrupted.
"""

import sys
from pathlib import Path

from toolkit.cli import Parser, integer_from
from toolkit.files import atomic_folder, check_new_folder


def make_parser() -> Parser:
    parser = Parser(
        __file__, __doc__, allow_abbrev=False, usage="%(prog)s --train_file FILE … --output FOLDER [--FLAG VALUE …]"
    )
    data = parser.group("data")
    data.add_argument(
        "--train_file",
        nargs="+",
        type=Path,
        required=True,
        metavar="FILE",
        help="the texts: .txt, .csv, .tsv, .json, .jsonl or .parquet, each also .gz or .zst; folders; or patterns",
    )
    data.add_argument(
        "--column", nargs="+", metavar="NAME", help="the columns of the texts, each a text of its own; default: text"
    )
    data.add_argument(
        "--delimiter", metavar="C", help="of .csv, .tsv and .txt; default: comma, tab, and in .txt a text on each line"
    )
    data.add_argument(
        "--on_bad_row",
        choices=("stop", "skip"),
        default="stop",
        help="what to do with an invalid row; skipped ones are listed",
    )
    number = {"type": integer_from(1), "metavar": "N"}
    training = parser.group("training")
    training.add_argument("--vocab_size", **number, default=30522, help="maximum number of tokens")
    training.add_argument("--min_frequency", **number, default=2, help="rarer pieces are spelt by shorter tokens")
    training.add_argument(
        "--limit_alphabet", **number, default=1000, help="maximum number of characters; rarer ones are [UNK]"
    )
    training.add_argument("--cased", action="store_true", help="keep upper case and, with it, accents")
    training.add_argument(
        "--accents", choices=("keep", "strip"), help="what to do with accents; default: strip, or keep with --cased"
    )
    training.add_argument(
        "--pre_split",
        choices=("bert", "whitespace"),
        default="bert",
        help="what a word is: bert "
        "splits at spaces, punctuation and around each Chinese character; whitespace is for symbols, "
        "see above",
    )
    training.add_argument(
        "--model_max_length", **number, default=512, help="positions of the model, to which longer texts are cut"
    )
    parser.group("evaluation").add_argument(
        "--held_out", type=integer_from(0), default=100, metavar="N", help="keep every N-th row for the report; 0: none"
    )
    parser.group("output").add_argument(
        "--output", type=Path, required=True, metavar="FOLDER", help="the folder to write; new or empty"
    )
    return parser


def train(parser: Parser, args) -> None:
    """Trains the tokenizer, saves it, and prints the report.

    Raises:
        OSError, ValueError: the texts or the output are invalid.
    """
    from toolkit.inputs import Source, open_files
    from toolkit.wordpiece import Corpus, print_report, save, train_bert, train_symbols

    check_new_folder(args.output)
    source = Source(open_files(args.train_file, delimiter=args.delimiter))
    corpus = Corpus(source, args.column, args.on_bad_row, args.held_out, parser.report)
    sizes = (args.vocab_size, args.min_frequency, args.limit_alphabet)
    with atomic_folder(args.output) as folder:  # raises before the training if it cannot be written
        if args.pre_split == "bert":
            strip = {"keep": False, "strip": True}.get(args.accents)
            tokenizer = train_bert(corpus.texts, *sizes, args.cased, strip, args.model_max_length)
        else:
            tokenizer = train_symbols(corpus.texts, *sizes, args.model_max_length)
        save(tokenizer, folder)
        print_report(tokenizer, corpus, args.output)


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code."""
    parser = make_parser()
    args = parser.parse_args(argv)
    if args.pre_split == "whitespace" and (args.cased or args.accents):
        parser.error("--cased or --accents is given with --pre_split whitespace, which changes no character")
    return parser.run(lambda: train(parser, args), interrupted=f"interrupted; nothing is written to {args.output}")


if __name__ == "__main__":
    sys.exit(main())
