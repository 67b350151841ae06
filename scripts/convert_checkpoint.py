#!/usr/bin/env python
"""Converts a BERT checkpoint into a ScratchBert folder, or a ScratchBert back into a BERT.

    convert_checkpoint.py google-bert/bert-base-uncased my-model
    convert_checkpoint.py my-model --output my-bert --to bert

An EncoderDecoderModel of two BERTs becomes a ScratchBertForConditionalGeneration, which no BERT checkpoint can hold.

The weights are converted bit for bit, in their dtype. Tokenizer, label maps, generation settings, the module files of
sentence-transformers and the other files are copied; those that are not are listed, with the reason. A checkpoint that
lacks a weight of its class raises an error: nothing is ever filled in at random.

OUTPUT appears, or is replaced, only when it is complete.

Exit code: 0 converted, 2 bad usage or a checkpoint that cannot be converted, 130 interrupted.
"""

import sys

from toolkit.cli import Parser


def make_parser() -> Parser:
    parser = Parser(__file__, __doc__, usage="%(prog)s SOURCE OUTPUT [--FLAG VALUE …]")
    parser.add_argument("source", metavar="SOURCE", help="the checkpoint: a folder or a hub id")
    parser.group("model").add_argument("--revision", help="the branch, tag or commit of a hub id")
    parser.add_output("OUTPUT", help="the folder to write")
    output = parser.group("output")
    output.add_argument("--to", choices=("bert", "scratchbert"), default="scratchbert", help="the format to write")
    output.add_argument("--overwrite", action="store_true", help="replace OUTPUT if it holds a checkpoint")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code."""
    parser = make_parser()
    args = parser.parse_args(argv)

    def work() -> None:
        from toolkit.conversion import convert, print_report

        report = convert(args.source, args.output, args.to, overwrite=args.overwrite, revision=args.revision)
        print_report(report, args.output, args.to)

    return parser.run(work, interrupted=f"interrupted; {args.output} is unchanged")


if __name__ == "__main__":
    sys.exit(main())
