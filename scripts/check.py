#!/usr/bin/env python
"""Compares two models from the embeddings to the gradients, or one model with itself in other batches.

    check.py path/to/bert                       a BERT opened by ScratchBert, with the Bert class itself
    check.py path/to/scratchbert                a ScratchBert, with its own export to BERT
    check.py path/to/scratchbert path/to/bert   a converted folder, with its source
    check.py MODEL --input texts.csv            on your texts
    check.py MODEL --determinism                whether a text gets the same bits in any batch
    check.py MODEL --code                       whether the code in a folder is that of a release; it is not run

Both models run in float32, without dropout, on the same batch. Hidden states, attention weights, pooler output and
logits are compared at non-padding tokens, and all gradients. A value may differ by 1e-5, or by as much as the reference
differs from a float64 copy of itself if that is more; a gradient by 1e-5 of its tensor's norm, with the same allowance.
A ScratchBert with a probe.json, which save_pretrained writes, is first verified against it.

With --determinism, each variant of the model computes the last hidden states of each text alone, then in random
batches, then alone again, and the bits are compared. The texts are pieces of 1 to 16 tokens, single texts, and joined
texts of up to as many tokens as the model has positions; by default film reviews.

Exit code: 0 equal; 1 the models differ, an optimised variant changes a text, or the code is of no release; 2 bad usage,
or files that cannot be read or verified.
"""

import sys
from pathlib import Path

from toolkit.common import Parser, add_reading_flags, find_shipped, identity, integer_from, write_json

VARIANTS = ["loaded", "optimised", "optimised-eager", "bfloat16", "int8"]
REVIEWS = "scripts/data/movie_reviews/test.csv"


def make_parser() -> Parser:
    parser = Parser(__file__, __doc__, usage="%(prog)s MODEL [OTHER] [--FLAG VALUE …]")
    parser.add_argument("model", metavar="MODEL", help="a BERT or ScratchBert checkpoint: a folder or a hub id")
    parser.add_argument("other", metavar="OTHER", nargs="?", help="the checkpoint to compare with; default: as above")
    check = parser.group("check").add_mutually_exclusive_group()
    check.add_argument("--determinism", action="store_true", help="compare MODEL with itself in other batches")
    check.add_argument("--code", action="store_true", help="compare the code in the folder MODEL with the releases")
    data = parser.group("data")
    number = {"type": integer_from(1), "metavar": "N"}
    data.add_argument("--input", metavar="FILE", help="texts: .txt .csv .tsv .json .jsonl .parquet, also .gz .zst .bz2")
    add_reading_flags(data)
    data.add_argument("--rows", **number, help="use the first N rows; default: 32, with --determinism 100")
    how = parser.group("evaluation")
    how.add_argument("--seed", type=int, default=0, metavar="N", help="the seed of random ids, gradients and batches")
    how.add_argument(
        "--variants",
        nargs="+",
        choices=VARIANTS,
        default=VARIANTS,
        metavar="NAME",
        help=", ".join(VARIANTS),
    )
    how.add_argument("--batchings", **number, default=4, help="of --determinism: random batchings of all texts")
    how.add_argument("--threads", **number, nargs="+", default=[1, 2, 3], help="of --determinism; default: 1 2 3")
    parser.group("output").add_argument("--json", metavar="FILE", type=Path, help="write all numbers and the versions")
    return parser


def parse(parser: Parser, argv: list[str] | None):
    args = parser.parse_args(argv)
    common = ["input", "rows", "text_column", "delimiter", "encoding", "seed", "json"]
    check, known = "MODEL", ["other", *common]
    if args.determinism:
        check, known = "--determinism", [*common, "variants", "batchings", "threads"]
    if args.code:
        check, known = "--code", []
    for name, value in vars(args).items():
        if name not in ("model", "determinism", "code", *known) and value != parser.get_default(name):
            parser.error(f"--{name} is given with {check}; expected one of {' '.join(known)}")
    if args.input is None and (args.text_column or args.delimiter or (args.rows and not args.determinism)):
        parser.error("--text_column, --delimiter or --rows is given without --input; expected it, too")
    return args


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code."""
    parser = make_parser()
    args = parse(parser, argv)

    def texts_of(path: str, rows: int) -> list[str]:
        from toolkit.texts import read_texts

        return [row["text"] for row in read_texts(args, path, "--input", rows)]

    def work() -> int:
        if args.code:
            from toolkit.trust import report_code

            report = report_code(args.model)
        elif args.determinism:
            from toolkit.compare.determinism import compare_batches

            texts = texts_of(args.input or str(find_shipped(REVIEWS)), args.rows or 100)
            report = compare_batches(args, texts)
        else:
            from toolkit.compare.parity import compare_checkpoints

            texts = None if args.input is None else texts_of(args.input, args.rows or 32)
            report = compare_checkpoints(args, texts)
        if args.json is not None:
            write_json(args.json, {**vars(args), **report, "json": str(args.json), "machine": identity()})
        return 0 if report["equal"] else 1

    return parser.run(work, expected=(RuntimeError,), is_silent=True)


if __name__ == "__main__":
    sys.exit(main())
