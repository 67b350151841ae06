#!/usr/bin/env python
"""Draws the attention weights of a model for one sentence: a heat map for each attention head.

    plot_attention.py google-bert/bert-base-uncased "The cat sat on the mat." --output cat.png
    plot_attention.py my-bert "The cat sat on the mat." --output head.svg --layers 3 --heads 0,2,5-7
    plot_attention.py my-summariser "A long text." --output cross.png --decoder_text "A text."

MODEL is a BERT or a ScratchBert of any kind. The row of a token in a map has the weights, 0 to 1, with which it attends
to the token of each column; they sum to 1. Layers and heads count from 0, as in `outputs.attentions[layer][0, head]`.

For an encoder or a decoder, these are the weights of the self-attention. An encoder-decoder has three kinds: --kind
cross, the default, for the target's attention to the source; self for the encoder's self-attention; and decoder for the
decoder's. The target is --decoder_text, or the text that the model generates with its generation_config, without
sampling, in at most --max_tokens tokens. Its rows are the inputs of the decoder, the start token first: the row of a
token shows how the next one was predicted.

The size of the picture grows with heads and tokens, so that every label is readable; a picture that would be too large
raises an error. The labels of an SVG are text, which can be searched, in the fonts of the viewer. The path of the
written file is printed.

Exit code: 0 the picture is written; 2 bad usage, or a checkpoint that cannot be opened or does not support the flags;
no file is then written or changed.
"""

import argparse
import os
import re
import sys
import warnings
from pathlib import Path

from toolkit.cli import Parser, about, file_in_existing_folder, integer_from, require, shortened


def indices(text: str) -> list[int]:
    """The numbers of `0,2,5-7`, for --layers and --heads."""
    numbers = []
    for part in text.split(","):
        bounds = re.fullmatch(r"(\d{1,3})(?:-(\d{1,3}))?", part.strip(), re.ASCII)
        if bounds is None or (bounds[2] and int(bounds[2]) < int(bounds[1])):
            raise argparse.ArgumentTypeError(f"{text!r} is invalid; expected numbers and ranges such as 0,2,5-7")
        numbers += range(int(bounds[1]), int(bounds[2] or bounds[1]) + 1)
    return numbers


def picture(text: str) -> Path:
    """The file of --output."""
    path = file_in_existing_folder(text)
    if path.suffix.lower() not in (".png", ".svg"):
        raise argparse.ArgumentTypeError(f"{text!r} is invalid; expected a name that ends in .png or .svg")
    return path


def make_parser() -> Parser:
    parser = Parser(__file__, __doc__, usage="%(prog)s MODEL SENTENCE --output FILE [--FLAG VALUE …]")
    parser.add_argument("model", metavar="MODEL", help="a checkpoint with a tokenizer: a folder or a hub id")
    parser.add_argument("sentence", metavar="SENTENCE", help="the model's input")
    data = parser.group("data")
    data.add_argument(
        "--decoder_text", metavar="TEXT", help="the target, for an encoder-decoder; default: what the model generates"
    )
    data.add_argument(
        "--max_tokens",
        type=integer_from(2),
        default=48,
        metavar="N",
        help="maximum length of a text, special tokens included",
    )
    model = parser.group("model")
    model.add_argument(
        "--kind",
        choices=("self", "cross", "decoder"),
        help="the kind of attention; default: cross for an encoder-decoder, else self",
    )
    for what in ("layers", "heads"):
        model.add_argument(f"--{what}", type=indices, metavar="N,N-N", help=f"draw these {what} only, such as 0,2,5-7")
    parser.group("output").add_argument(
        "--output", type=picture, required=True, metavar="FILE", help="the picture: a name that ends in .png or .svg"
    )
    return parser


def title_of(model: str) -> str:
    """The model's name in the picture: a hub id, or the last part of a folder's path."""
    return os.path.basename(os.path.abspath(model)) if Path(model).is_dir() else model


def plot(parser: Parser, args) -> None:
    """Opens the model, writes the picture, and prints its path.

    Raises:
        CommandError: one of these is not possible.
    """
    require("matplotlib")
    from toolkit.attention_plot import attention, draw, open_for_attention, save

    with warnings.catch_warnings(record=True) as caught:
        with about(args.model):
            tokenizer, model, kind = open_for_attention(args.model, args.kind, args.decoder_text)
            found = attention(model, tokenizer, args.sentence, kind, args.decoder_text, args.max_tokens)
            title = f"{found.kind} of {shortened(title_of(args.model), 40)}\n{found.text}"
            figure = draw(found, args.layers, args.heads, title)
        with about(args.output):
            save(figure, args.output)
    print(args.output)
    if args.output.suffix.lower() == ".png" and any("missing from font" in str(one.message) for one in caught):
        parser.report(
            "no font here has some of the letters, which are drawn as boxes; write an SVG, or name a font "
            "that has them as font.family in a matplotlibrc"
        )


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code."""
    parser = make_parser()
    args = parser.parse_args(argv)
    return parser.run(lambda: plot(parser, args), is_silent=True)


if __name__ == "__main__":
    sys.exit(main())
