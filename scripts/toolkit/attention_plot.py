"""The attention weights of a model for one sentence, and a heat map of them for each attention head."""

import itertools
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from modeling_scratchbert import ScratchBertConfig, ScratchBertForConditionalGeneration, ScratchBertModel
from toolkit.files import atomic_file
from toolkit.hub import check_source, open_model, open_tokenizer

# Drawing a PNG takes eight bytes for each pixel. With the 12 × 12 heads of BERT-base that is enough for 48 tokens.
MAX_PIXELS = 80_000_000

COLOURS = "Blues"
DPI = 144
POINTS_PER_INCH = 72

# Lengths in points.
GRID = 1300  # the longer side of all maps together, unless cells would be too small or too large
CELL = (7.2, 30)  # the minimum and maximum side of a weight's cell
TOKEN = 10  # the maximum font size of tokens
HEAD = (10, 16)  # the minimum and maximum font size of "head 11"
LEAST_MAP = 46  # the minimum side of a map, beside which "layer 11" is written
BAR = 12  # the width of the colour bar
GAP = 6  # between maps
LINE = 1.2  # the height of a line, relative to the font size


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
    return tokenizer, open_model(model_class, source, optional=("pooler.",), advice=advice, dtype=torch.float32), kind


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
        return Attention(torch.cat(encoder(source, output_attentions=True).attentions), keys, keys, words, sentence)
    target_ids = decoder_ids(model, tokenizer, source, target, max_tokens)
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
            f"The {what} has {len(ids)} tokens; expected at most {max_tokens}. Shorten it, or give "
            f"--max_tokens {len(ids)}."
        )
    return ids


def decoder_ids(model, tokenizer, source: torch.Tensor, target: str | None, max_tokens: int) -> list[int]:
    """The ids that the decoder reads, the start token first: of the target as in training, with the start token in
    place of [CLS] and with the end token; or what the model generates, at most `max_tokens`."""
    if target is None:
        length = min(max_tokens, model.config.max_position_embeddings) - 1
        options = {"do_sample": False, "num_return_sequences": 1, "return_dict_in_generate": False}
        for name, number in (("eos_token_id", tokenizer.sep_token_id), ("pad_token_id", tokenizer.pad_token_id)):
            if getattr(model.generation_config, name) is None:
                options[name] = number
        mask = torch.ones_like(source)
        return model.generate(source, attention_mask=mask, max_new_tokens=length, **options)[0].tolist()
    start = model.config.decoder_start_token_id
    if start is None:
        raise ValueError("Its config.json has no decoder_start_token_id, which a target starts with.")
    ids = encode(tokenizer, target, "target", max_tokens)
    return [start, *ids[int(ids[0] == tokenizer.cls_token_id) :]]


# -------------------------------------------------------------------------------------------------------- the picture


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
        A `matplotlib.figure.Figure`. Its first axes are the maps, layer by layer; each has one image, whose array is
        that head's weights, `(queries, keys)`. The last is the colour bar.

    Raises:
        ValueError: there is no such layer or head.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    layers = chosen("layers", layers, attention.weights.shape[0])
    heads = chosen("heads", heads, attention.weights.shape[1])
    queries, keys = attention.queries, attention.keys
    cell = GRID / max(len(layers) * len(queries), len(heads) * len(keys))
    cell = min(max(cell, CELL[0]), CELL[1])
    map_height, map_width = (max(cell * len(tokens), LEAST_MAP) for tokens in (queries, keys))
    grid_height, grid_width = len(layers) * (map_height + GAP), len(heads) * (map_width + GAP)
    size = min(max(grid_width / 100, HEAD[0]), HEAD[1], max(min(map_height, map_width) / 5, HEAD[0]))
    token_size = min(cell / LINE, TOKEN)
    is_vertical = width_of(keys, token_size) > 0.9 * map_width / len(keys)
    width = grid_width + width_of(queries, token_size) + 10 * size
    title, title_size = fitted(title, 1.2 * size, width)
    height = grid_height + (width_of(keys, token_size) if is_vertical else token_size) + 5 * LINE * size
    height += LINE * title_size * (title.count("\n") + 1)
    with rc_context({"font.size": size, "axes.titlesize": "medium", "figure.labelsize": "medium"}):
        figure = Figure((width / POINTS_PER_INCH, height / POINTS_PER_INCH), DPI, layout="constrained")
        margin = GAP / 2 / POINTS_PER_INCH
        figure.get_layout_engine().set(w_pad=margin, h_pad=margin, wspace=0, hspace=0)
        figure.suptitle(title, fontsize=title_size, parse_math=False)
        maps = figure.subplots(len(layers), len(heads), squeeze=False)
        for axes, (layer, head) in zip(maps.flat, itertools.product(layers, heads), strict=True):
            weights = attention.weights[layer, head].numpy()
            # "nearest" draws cells of many pixels in an SVG as well; viewers would blur cells of one pixel.
            image = axes.imshow(weights, vmin=0, vmax=1, cmap=COLOURS, aspect="auto", interpolation="nearest")
            axes.set(xticks=[], yticks=[])
        figure.colorbar(
            image,
            ax=maps,
            label="attention weight",
            ticks=[0, 0.25, 0.5, 0.75, 1],
            aspect=grid_height / BAR,
            fraction=BAR / grid_width,
            pad=2 * GAP / grid_width,
        )
        label(figure, maps, attention, layers, heads, token_size, "vertical" if is_vertical else "horizontal")
    return figure


def label(figure, maps, attention: Attention, layers, heads, token_size: float, rotation: str) -> None:
    """Writes the labels around the maps. Tokens are not parsed as formulas, even if they contain $."""
    tokens = {"fontsize": token_size, "parse_math": False}
    for axes, layer in zip(maps[:, 0], layers, strict=True):
        axes.set_yticks(range(len(attention.queries)), attention.queries, **tokens)
        axes.set_ylabel(f"layer {layer}")
    for axes in maps[-1]:
        axes.set_xticks(range(len(attention.keys)), attention.keys, rotation=rotation, **tokens)
    for axes, head in zip(maps[0], heads, strict=True):
        axes.set_title(f"head {head}")
    is_cross = attention.kind == "cross-attention"
    figure.supylabel("query (target)" if is_cross else "query")
    figure.supxlabel("key (source)" if is_cross else "key")


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
    if path.suffix.lower() == ".png" and width * height > MAX_PIXELS:
        raise ValueError(
            f"The picture has {width:,} × {height:,} pixels; expected at most {MAX_PIXELS:,}. Choose "
            "--layers and --heads, shorten the text, or write an SVG."
        )
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "plot_attention"}), atomic_file(path) as temporary:
        figure.savefig(temporary, metadata={"Date": None})  # the same picture gives the same bytes
