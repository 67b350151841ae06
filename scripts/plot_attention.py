#!/usr/bin/env python
"""Draws what a model's heads look at in one sentence: a heat map for each head, a row of them for each layer.

    plot_attention.py google-bert/bert-base-uncased "The cat sat on the mat." --output cat.png
    plot_attention.py my-bert "The cat sat on the mat." --output head.svg --layers 3 --heads 0,2,5-7
    plot_attention.py my-summariser "A long text." --output cross.png --decoder-text "A text."

MODEL is a BERT or a ScratchBert of any kind. In a map, the row of a token has the weights, 0 to 1, with which it looks
at the token of each column; they sum to 1. Layers and heads count from 0, as in `outputs.attentions[layer][0, head]`.

Of an encoder or of a decoder alone, that is self-attention. A model with both has three kinds: --kind cross, the
default, is what the target's tokens look at in the source; self is the encoder's and decoder the decoder's
self-attention. The target is --decoder-text, or else what the model writes itself, by its generation_config but without
sampling, the first --max-tokens tokens of it. Its rows are the tokens that the decoder reads, the start token first:
that of a token shows where the next one comes from.

The more heads and tokens, the larger the picture, so that every label can be read; what would grow too large is
refused. In an SVG the labels are text, which can be searched, and is drawn in the fonts of whoever looks at it.

Exit code: 0 the picture is written; 2 bad usage, or a checkpoint that cannot be opened or does not do what is asked:
then no file is written, or changed.
"""

import argparse
import importlib.util
import logging
import re
import sys
import textwrap
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from transformers import AutoTokenizer

from modeling_scratchbert import ScratchBertConfig, ScratchBertForConditionalGeneration, ScratchBertModel

from check_parity import shortened
from generate import Parser, UsageError, about, special_ids, special_tokens, whole_number
from output import written
from sources import check_source, has_tokenizer

PROG = "plot_attention.py"

KINDS = ("self", "cross", "decoder")

# A sentence of so many tokens fills, with the 12 × 12 heads of BERT-base, the largest picture.
MAX_TOKENS = 48
MAX_PIXELS = 80_000_000  # of a PNG; drawing it takes eight bytes each

# Lengths are in points, of which a pixel is half of one.
COLOURS = "Blues"
DPI = 144
POINTS_PER_INCH = 72
WANTED = 1300  # the longer side of all maps together, where cells of it are neither too small nor too large
CELL = (7.2, 30)  # the least and the greatest side of a weight's cell
LINE = 1.2  # times the font's size is a line's height
LABEL = 10  # the greatest font size of tokens
HEAD = (10, 16)  # the least and the greatest font size of "head 11"
LEAST_MAP = 46  # the least side of a map: "layer 11" stands beside it
BAR = (12, 300)  # the colour bar's width, and its greatest height
GAP = 6  # between maps, and around everything


# ------------------------------------------------------------------------------------------------------ the attention


@dataclass
class Attention:
    """The weights of all heads, `(layers, heads, queries, keys)`, between the tokens that look and those looked at."""

    weights: torch.Tensor
    queries: list[str]
    keys: list[str]
    kind: str  # in words
    text: str  # what was read, and for two halves what was written


def open_model(source: str, kind: str | None, target: str | None):
    """The tokenizer, the model in float32, and `kind`, or what stands for None.

    Raises:
        OSError: there is no such checkpoint, a file of it cannot be read, or it has no tokenizer.
        ValueError: it is no BERT, has no attention of that kind, or lacks weights.
    """
    check_source(source)
    has_two_halves = ScratchBertConfig.from_pretrained(source).is_encoder_decoder
    kind = kind or ("cross" if has_two_halves else "self")
    if kind != "self" and not has_two_halves:
        raise ValueError(f"It has one half, with self-attention alone: there is nothing to draw for --kind {kind}.")
    if kind == "self" and target is not None:
        raise ValueError("--decoder-text is the target of a model with two halves, and no part of --kind self.")
    if not has_tokenizer(source):
        raise OSError("It has no tokenizer, neither tokenizer.json nor vocab.txt: save the model's beside it.")
    tokenizer = AutoTokenizer.from_pretrained(source)
    writes = kind != "self" and target is None
    model_class = ScratchBertForConditionalGeneration if writes else ScratchBertModel
    model, info = model_class.from_pretrained(source, dtype=torch.float32, output_loading_info=True)
    if missing := sorted(name for name in info["missing_keys"] if not name.startswith("pooler.")):
        raise ValueError(
            f"Weights that it lacks: {len(missing)}, such as {missing[0]}. With random ones in their place there would "
            "be nothing to see." + (" With --decoder-text no head is needed." if writes else "")
        )
    return tokenizer, model.eval(), kind


@torch.inference_mode()
def attention(
    model, tokenizer, sentence: str, kind: str = "self", target: str | None = None, max_tokens: int = MAX_TOKENS
) -> Attention:
    """The attention weights of a model that reads `sentence`.

    Args:
        model: a `ScratchBertModel`; for "cross" and "decoder", and the encoder's "self", one with two halves.
        kind: one of `KINDS`.
        target: what the decoder reads; None for what the model, which then has a head, writes.
        max_tokens: of the sentence, and of the target, special ones included. What the model writes is cut there.

    Raises:
        ValueError: a text is empty or has more tokens, or there is no start token.
    """
    source_ids = encode(tokenizer, sentence, "sentence", max_tokens)
    keys = tokenizer.convert_ids_to_tokens(source_ids)
    source = torch.tensor([source_ids])
    if kind == "self":
        of_two = model.config.is_encoder_decoder
        encoder, words = (model.get_encoder(), "the encoder's self-attention") if of_two else (model, "self-attention")
        maps = encoder(source, output_attentions=True).attentions
        return Attention(torch.cat(maps), keys, keys, words, sentence)
    target_ids = (
        generated_ids(model, tokenizer, source, max_tokens)
        if target is None
        else given_ids(model, tokenizer, target, max_tokens)
    )
    outputs = model(source, decoder_input_ids=torch.tensor([target_ids]), output_attentions=True, use_cache=False)
    queries = tokenizer.convert_ids_to_tokens(target_ids)
    text = f"{sentence} → {tokenizer.decode(target_ids, skip_special_tokens=True)}"
    if kind == "cross":
        return Attention(torch.cat(outputs.cross_attentions), queries, keys, "cross-attention", text)
    return Attention(torch.cat(outputs.decoder_attentions), queries, queries, "the decoder's self-attention", text)


def encode(tokenizer, text: str, what: str, max_tokens: int) -> list[int]:
    """The text's ids, with special tokens. Raises ValueError where it is empty or has more than `max_tokens`."""
    if not text.strip():
        raise ValueError(f"The {what} is empty.")
    ids = tokenizer(text, verbose=False)["input_ids"]
    if len(ids) > max_tokens:
        raise ValueError(
            f"The {what} has {len(ids)} tokens, and the limit is {max_tokens}: shorten it, or give --max-tokens "
            f"{len(ids)}."
        )
    return ids


def given_ids(model, tokenizer, target: str, max_tokens: int) -> list[int]:
    """The target as the decoder is trained to read it: the start token in the place of [CLS], and the end."""
    start = model.config.decoder_start_token_id
    if start is None:
        raise ValueError("Its config.json has no decoder_start_token_id, so nothing says what a target starts with.")
    opening, _ = special_tokens(tokenizer)
    return [start, *encode(tokenizer, target, "target", max_tokens)[len(opening) :]]


def generated_ids(model, tokenizer, source: torch.Tensor, max_tokens: int) -> list[int]:
    """What the model writes, at most `max_tokens` tokens, the start token the first of them."""
    room = min(max_tokens, model.config.max_position_embeddings)
    return model.generate(
        source,
        attention_mask=torch.ones_like(source),
        do_sample=False,
        max_new_tokens=room - 1,
        num_return_sequences=1,
        return_dict_in_generate=False,
        **special_ids(tokenizer, model.generation_config, {}),
    )[0].tolist()


# -------------------------------------------------------------------------------------------------------- the picture


@dataclass
class Layout:
    """Where everything stands, in points: `rows` × `columns` maps of `map_height` × `map_width`, the margins around
    them, and the sizes of the letters."""

    rows: int
    columns: int
    map_height: float
    map_width: float
    token_size: float
    head_size: float
    title: str  # in lines
    title_size: float
    left: float
    bottom: float
    turned: bool  # the columns' tokens stand upright
    right: float  # the colour bar with its numbers

    @classmethod
    def of(cls, rows: int, columns: int, queries: Sequence[str], keys: Sequence[str], title: str) -> "Layout":
        """For so many layers and heads, and these tokens."""
        cell = WANTED / max(rows * len(queries), columns * len(keys))
        cell = min(max(cell, CELL[0]), CELL[1])
        size = min(cell / LINE, LABEL)
        height, width = max(cell * len(queries), LEAST_MAP), max(cell * len(keys), LEAST_MAP)
        head_size = min(max(columns * width / 100, HEAD[0]), HEAD[1], max(min(height, width) / 5, HEAD[0]))
        across = width_of(keys, size)
        turned = across > 0.9 * width / len(keys)
        layout = cls(
            rows, columns, height, width, size, head_size, title="", title_size=1.3 * head_size,
            left=width_of(queries, size) + 2 * LINE * head_size + 4 * GAP,
            bottom=(across if turned else LINE * size) + LINE * head_size + 3 * GAP,
            turned=turned,
            right=BAR[0] + 5 * head_size + 4 * GAP,
        )  # fmt: skip
        layout.title, layout.title_size = fitted(title, layout.title_size, layout.width - 2 * GAP)
        return layout

    @property
    def grid_width(self) -> float:
        return self.columns * (self.map_width + GAP) - GAP

    @property
    def grid_height(self) -> float:
        return self.rows * (self.map_height + GAP) - GAP

    @property
    def width(self) -> float:
        return self.left + self.grid_width + self.right

    @property
    def top(self) -> float:
        """The title, and below it the names of the heads."""
        lines = self.title.count("\n") + 1
        return 1.1 * LINE * self.title_size * lines + LINE * self.head_size + 4 * GAP

    @property
    def height(self) -> float:
        return self.bottom + self.grid_height + self.top

    def at(self, x: float, y: float) -> tuple[float, float]:
        """As shares of the figure."""
        return x / self.width, y / self.height

    def grid(self) -> dict[str, float]:
        """The place of the maps, in matplotlib's terms."""
        left, bottom = self.at(self.left, self.bottom)
        right, top = self.at(self.left + self.grid_width, self.bottom + self.grid_height)
        gaps = {"wspace": GAP / self.map_width, "hspace": GAP / self.map_height}
        return {"left": left, "right": right, "bottom": bottom, "top": top, **gaps}


def width_of(texts: Sequence[str], size: float) -> float:
    """Of the longest, in points."""
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import text_to_path

    font = FontProperties(size=size)
    return max(text_to_path.get_text_width_height_descent(text, font, ismath=False)[0] for text in texts)


def fitted(text: str, size: float, width: float) -> tuple[str, float]:
    """The text, each of its lines folded into three at most, and the size, not above `size`, at which it has room."""
    folded = []
    for line in filter(str.strip, text.splitlines()):
        room = max(8, int(width * len(line) / (1.1 * width_of([line], size))))
        folded += textwrap.wrap(line, room, max_lines=3, placeholder=" …")
    return "\n".join(folded), size * min(1, width / max(width_of(folded or [""], size), 1))


def draw(
    attention: Attention, layers: Sequence[int] | None = None, heads: Sequence[int] | None = None, title: str = ""
):
    """A heat map for each of `layers` and `heads`, in this order; None for all.

    Returns:
        A `matplotlib.figure.Figure`, with room for every label. Its first axes are the maps, layer by layer; each has
        one image, whose array is that head's weights, `(queries, keys)`. The last is the colour bar.

    Raises:
        ValueError: there is no such layer or head.
    """
    from matplotlib.figure import Figure

    layers = chosen("layers", layers, attention.weights.shape[0])
    heads = chosen("heads", heads, attention.weights.shape[1])
    layout = Layout.of(len(layers), len(heads), attention.queries, attention.keys, title)
    figure = Figure(figsize=(layout.width / POINTS_PER_INCH, layout.height / POINTS_PER_INCH), dpi=DPI)
    maps = figure.subplots(len(layers), len(heads), squeeze=False, gridspec_kw=layout.grid())
    for row, layer in zip(maps, layers, strict=True):
        for axes, head in zip(row, heads, strict=True):
            weights = attention.weights[layer, head].numpy()
            # "nearest" has cells of many pixels each in an SVG as well: most viewers blur one of a pixel a cell.
            image = axes.imshow(weights, vmin=0, vmax=1, cmap=COLOURS, aspect="auto", interpolation="nearest")
            axes.set(xticks=[], yticks=[])
    label(figure, maps, layout, attention, layers, heads)
    left, top = layout.left + layout.grid_width + 2 * GAP, layout.bottom + layout.grid_height
    height = min(layout.grid_height, BAR[1])
    bar = figure.add_axes((*layout.at(left, top - height), *layout.at(BAR[0], height)))
    figure.colorbar(image, cax=bar, ticks=[0, 0.25, 0.5, 0.75, 1])
    bar.tick_params(labelsize=layout.head_size)
    bar.set_ylabel("attention weight", fontsize=layout.head_size)
    return figure


def label(figure, maps, layout: Layout, attention: Attention, layers: Sequence[int], heads: Sequence[int]) -> None:
    """Writes what stands around the maps. A token is no formula, be there a $ in it."""
    tokens = {"fontsize": layout.token_size, "parse_math": False}
    for axes, layer in zip(maps[:, 0], layers, strict=True):
        axes.set_yticks(range(len(attention.queries)), attention.queries, **tokens)
        axes.tick_params(axis="y", length=2, pad=2)
        middle = axes.get_position().y0 + axes.get_position().height / 2
        x, _ = layout.at(2 * GAP + 1.5 * LINE * layout.head_size, 0)
        figure.text(x, middle, f"layer {layer}", rotation=90, ha="center", va="center", fontsize=layout.head_size)
    for axes in maps[-1]:
        axes.set_xticks(range(len(attention.keys)), attention.keys, rotation=90 if layout.turned else 0, **tokens)
        axes.tick_params(axis="x", length=2, pad=2)
    for axes, head in zip(maps[0], heads, strict=True):
        axes.set_title(f"head {head}", fontsize=layout.head_size, pad=GAP)
    x, y = layout.at(layout.left + layout.grid_width / 2, layout.bottom + layout.grid_height / 2)
    left, bottom = layout.at(GAP + LINE * layout.head_size / 2, GAP + LINE * layout.head_size / 2)
    queries, keys = ("query (target)", "key (source)") if attention.kind == "cross-attention" else ("query", "key")
    figure.text(left, y, queries, rotation=90, ha="center", va="center", fontsize=layout.head_size)
    figure.text(x, bottom, keys, ha="center", va="center", fontsize=layout.head_size)
    figure.text(*layout.at(layout.width / 2, layout.height - GAP), layout.title, ha="center", va="top",
                fontsize=layout.title_size, parse_math=False)  # fmt: skip


def chosen(what: str, indices: Sequence[int] | None, count: int) -> list[int]:
    """`indices`, each once; all for None. Raises ValueError where one of them is not there."""
    if indices is None:
        return list(range(count))
    if wrong := [index for index in indices if not 0 <= index < count]:
        raise ValueError(f"It has no {wrong[0]} among its {what}, which are 0 to {count - 1}.")
    return list(dict.fromkeys(indices))


def save(figure, path: Path) -> None:
    """Writes the picture, a PNG or an SVG by the name's ending, whole or not at all.

    Raises:
        ValueError: a PNG would have more than `MAX_PIXELS`.
        OSError: it cannot be written.
    """
    from matplotlib import rc_context

    width, height = (round(side * DPI) for side in figure.get_size_inches())
    kind = path.suffix[1:].lower()
    if kind == "png" and width * height > MAX_PIXELS:
        raise ValueError(
            f"A picture of {width:,} × {height:,} pixels is too large: choose from the heads with --layers and "
            "--heads, shorten the text, or write an SVG."
        )
    # The same picture gives the same bytes.
    options = {"metadata": {"Date": None}} if kind == "svg" else {}
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": PROG}), written(path) as temporary:
        figure.savefig(temporary, format=kind, **options)


# --------------------------------------------------------------------------------------------------- the command line


def indices(text: str) -> list[int]:
    """`0,2,5-7`, of --layers and --heads."""
    numbers = []
    for part in text.split(","):
        bounds = re.fullmatch(r"(\d{1,3})(?:-(\d{1,3}))?", part.strip(), re.ASCII)
        if bounds is None or (bounds[2] and int(bounds[2]) < int(bounds[1])):
            raise argparse.ArgumentTypeError(f"{text!r} is not of the form 0,2,5-7")
        numbers += range(int(bounds[1]), int(bounds[2] or bounds[1]) + 1)
    return numbers


def picture(text: str) -> Path:
    """The file of --output."""
    path = Path(text)
    if path.suffix.lower() not in (".png", ".svg"):
        raise argparse.ArgumentTypeError(f"{text!r} does not end in .png or .svg")
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} cannot be written: there is no folder {path.parent}")
    return path


def make_parser() -> argparse.ArgumentParser:
    parser = Parser(prog=PROG, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", metavar="MODEL", help="a checkpoint with a tokenizer: a folder or a hub id")
    parser.add_argument("sentence", help="what the model reads")
    parser.add_argument("--output", type=picture, required=True, metavar="FILE", help="where the picture goes: a name "
                        "that ends in .png or .svg")  # fmt: skip
    parser.add_argument("--kind", choices=KINDS, help="which attention (default: cross where there is one, else self)")
    parser.add_argument("--decoder-text", metavar="TEXT", help="the target, for a model with an encoder and a decoder "
                        "(default: what it writes)")  # fmt: skip
    for what in ("layers", "heads"):
        parser.add_argument(f"--{what}", type=indices, metavar="N,N-N", help=f"draw these {what} only, such as 0,2,5-7")
    parser.add_argument("--max-tokens", type=whole_number(2), default=MAX_TOKENS, metavar="N", help="the most that a "
                        "text may have, special ones included (default: %(default)s)")  # fmt: skip
    return parser


def plot(args) -> None:
    """Opens the model, and writes the picture.

    Raises:
        UsageError: it cannot be done.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise UsageError("matplotlib is not installed: pip install matplotlib")
    with about(args.model):
        tokenizer, model, kind = open_model(args.model, args.kind, args.decoder_text)
        found = attention(model, tokenizer, args.sentence, kind, args.decoder_text, args.max_tokens)
        figure = draw(found, args.layers, args.heads, f"{found.kind} of {shortened(args.model, 40)}\n{found.text}")
    with about(str(args.output)):
        save(figure, args.output)


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code."""
    args = make_parser().parse_args(argv)
    # Load reports and the like: what matters of them comes back as an error.
    logging.disable(logging.WARNING)
    transformers.logging.disable_progress_bar()
    try:
        with warnings.catch_warnings(record=True) as caught:
            plot(args)
    except UsageError as error:
        print(f"{PROG}: {error}", file=sys.stderr)
        return 2
    if args.output.suffix.lower() == ".png" and any("missing from font" in str(one.message) for one in caught):
        print(f"{PROG}: no font here has some of the letters, which are boxes now: write an SVG, or name a font that "
              "has them as font.family in a matplotlibrc", file=sys.stderr)  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
