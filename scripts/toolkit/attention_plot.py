"""The attention weights of a model for one sentence, and a heat map of them for each attention head."""

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from modeling_scratchbert import ScratchBertConfig, ScratchBertForConditionalGeneration, ScratchBertModel
from toolkit.files import atomic_file
from toolkit.generation import special_ids, special_tokens
from toolkit.hub import check_source, open_model, open_tokenizer

# Drawing a PNG takes eight bytes for each pixel. With the 12 × 12 heads of BERT-base that is enough for 48 tokens.
MAX_PIXELS = 80_000_000

# Lengths are in points; a pixel is half a point.
COLOURS = "Blues"
DPI = 144
POINTS_PER_INCH = 72
GRID = 1300  # the longer side of all maps together, unless cells would be too small or too large
CELL = (7.2, 30)  # the minimum and maximum side of a weight's cell
LINE = 1.2  # the height of a line, relative to the font size
LABEL = 10  # the maximum font size of tokens
HEAD = (10, 16)  # the minimum and maximum font size of "head 11"
LEAST_MAP = 46  # the minimum side of a map, beside which "layer 11" is written
BAR = (12, 300)  # the width and the maximum height of the colour bar
GAP = 6  # between maps, and around everything


# ------------------------------------------------------------------------------------------------------ the attention


@dataclass
class Attention:
    """The weights of all attention heads, `(layers, heads, queries, keys)`, and the tokens of queries and keys."""

    weights: torch.Tensor
    queries: list[str]
    keys: list[str]
    kind: str  # in words
    text: str  # the sentence, followed by the target of an encoder-decoder


def open_for_attention(source: str, kind: str | None, target: str | None):
    """The tokenizer, the model in float32, and `kind` or its default.

    Raises:
        OSError: there is no such checkpoint, a file of it cannot be read, or it has no tokenizer.
        ValueError: it is not a BERT, has no attention of that kind, or lacks weights.
    """
    check_source(source)
    is_encoder_decoder = ScratchBertConfig.from_pretrained(source).is_encoder_decoder
    kind = kind or ("cross" if is_encoder_decoder else "self")
    if kind != "self" and not is_encoder_decoder:
        raise ValueError(f"--kind is {kind}, and it has self-attention only; expected --kind self.")
    if kind == "self" and target is not None:
        raise ValueError(
            "--decoder_text is given with self-attention; expected --kind cross or decoder, of an encoder-decoder."
        )
    tokenizer = open_tokenizer(source)
    generates = kind != "self" and target is None
    model_class = ScratchBertForConditionalGeneration if generates else ScratchBertModel
    advice = "--decoder_text requires no model head." if generates else "Train it first."
    model = open_model(model_class, source, optional=("pooler.",), advice=advice, dtype=torch.float32)
    return tokenizer, model, kind


@torch.inference_mode()
def attention(
    model, tokenizer, sentence: str, kind: str = "self", target: str | None = None, max_tokens: int = 48
) -> Attention:
    """The attention weights of a model for `sentence`.

    Args:
        model: a `ScratchBertModel`; for "cross" and "decoder", an encoder-decoder.
        kind: "self", "cross" or "decoder".
        target: the decoder's input; None: what the model, which then has a model head, generates.
        max_tokens: of the sentence and of the target, special tokens included. A generated target is cut there.

    Raises:
        ValueError: a text is empty or has more tokens, or the model has no start token.
    """
    source_ids = encode(tokenizer, sentence, "sentence", max_tokens)
    keys = tokenizer.convert_ids_to_tokens(source_ids)
    source = torch.tensor([source_ids])
    if kind == "self":
        encoder, words = model, "self-attention"
        if model.config.is_encoder_decoder:
            encoder, words = model.get_encoder(), "the encoder's self-attention"
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
    """The text's ids, with special tokens. Raises ValueError if it is empty or has more than `max_tokens`."""
    if not text.strip():
        raise ValueError(f"The {what} is empty.")
    ids = tokenizer(text, verbose=False)["input_ids"]
    if len(ids) > max_tokens:
        raise ValueError(
            f"The {what} has {len(ids)} tokens; expected at most {max_tokens}. Shorten it, or give --max_tokens "
            f"{len(ids)}."
        )
    return ids


def given_ids(model, tokenizer, target: str, max_tokens: int) -> list[int]:
    """The target as the decoder reads it in training: the start token in place of [CLS], and the end token."""
    start = model.config.decoder_start_token_id
    if start is None:
        raise ValueError("Its config.json has no decoder_start_token_id, which a target starts with.")
    opening, _ = special_tokens(tokenizer)
    return [start, *encode(tokenizer, target, "target", max_tokens)[len(opening) :]]


def generated_ids(model, tokenizer, source: torch.Tensor, max_tokens: int) -> list[int]:
    """What the model generates, the start token first, at most `max_tokens` tokens."""
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
    """The positions of all parts, in points: `rows` × `columns` maps of `map_height` × `map_width`, the margins around
    them, and the font sizes."""

    rows: int
    columns: int
    map_height: float
    map_width: float
    token_size: float
    head_size: float
    title: str  # with line breaks
    title_size: float
    left: float
    bottom: float
    turned: bool  # whether the columns' tokens are vertical
    right: float  # the margin of the colour bar with its numbers

    @classmethod
    def of(cls, rows: int, columns: int, queries: Sequence[str], keys: Sequence[str], title: str) -> "Layout":
        """The layout for `rows` layers, `columns` heads, and these tokens."""
        cell = GRID / max(rows * len(queries), columns * len(keys))
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
        """The margin of the title and of the names of the heads."""
        lines = self.title.count("\n") + 1
        return 1.1 * LINE * self.title_size * lines + LINE * self.head_size + 4 * GAP

    @property
    def height(self) -> float:
        return self.bottom + self.grid_height + self.top

    def at(self, x: float, y: float) -> tuple[float, float]:
        """A point as fractions of the figure."""
        return x / self.width, y / self.height

    def grid(self) -> dict[str, float]:
        """The position of the maps, as matplotlib's subplot parameters."""
        left, bottom = self.at(self.left, self.bottom)
        right, top = self.at(self.left + self.grid_width, self.bottom + self.grid_height)
        gaps = {"wspace": GAP / self.map_width, "hspace": GAP / self.map_height}
        return {"left": left, "right": right, "bottom": bottom, "top": top, **gaps}


def width_of(texts: Sequence[str], size: float) -> float:
    """The width of the longest text, in points."""
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import text_to_path

    font = FontProperties(size=size)
    return max(text_to_path.get_text_width_height_descent(text, font, ismath=False)[0] for text in texts)


def fitted(text: str, size: float, width: float) -> tuple[str, float]:
    """The text with its lines wrapped, into three at most, and the font size, at most `size`, at which it fits."""
    folded = []
    for line in filter(str.strip, text.splitlines()):
        room = max(8, int(width * len(line) / (1.1 * width_of([line], size))))
        folded += textwrap.wrap(line, room, max_lines=3, placeholder=" …")
    return "\n".join(folded), size * min(1, width / max(width_of(folded or [""], size), 1))


def draw(
    attention: Attention, layers: Sequence[int] | None = None, heads: Sequence[int] | None = None, title: str = ""
):
    """Draws a heat map for each of `layers` and `heads`, in this order; None: all.

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
            # "nearest" draws cells of many pixels in an SVG as well; viewers would blur cells of one pixel.
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
    """Writes the labels around the maps. Tokens are not parsed as formulas, even if they contain $."""
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
    """`indices` without duplicates; None: all. Raises ValueError if one is not below `count`."""
    if indices is None:
        return list(range(count))
    if wrong := [index for index in indices if not 0 <= index < count]:
        raise ValueError(f"--{what} has {wrong[0]}; expected 0 to {count - 1}.")
    return list(dict.fromkeys(indices))


def save(figure, path: Path) -> None:
    """Writes the picture, a PNG or an SVG by the name's ending.

    Raises:
        ValueError: a PNG would have more than `MAX_PIXELS`.
        OSError: it cannot be written.
    """
    from matplotlib import rc_context

    width, height = (round(side * DPI) for side in figure.get_size_inches())
    kind = path.suffix[1:].lower()
    if kind == "png" and width * height > MAX_PIXELS:
        raise ValueError(
            f"The picture has {width:,} × {height:,} pixels; expected at most {MAX_PIXELS:,}. Choose --layers and "
            "--heads, shorten the text, or write an SVG."
        )
    # The same picture gives the same bytes.
    options = {"metadata": {"Date": None}} if kind == "svg" else {}
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "plot_attention"}), atomic_file(path) as temporary:
        figure.savefig(temporary, format=kind, **options)
