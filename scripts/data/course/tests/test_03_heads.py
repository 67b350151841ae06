"""Chapter 3: attention heads. `multi_head` is also the attention of the blocks in chapter 4."""

from contextlib import suppress

from grading import compare, expect, loaded
from heads import MultiHeadAttention
from test_01_attention import attend


def test_divisibility(config):
    MultiHeadAttention(config)
    config.hidden_size = config.num_attention_heads * 8 + 1
    with suppress(ValueError):
        MultiHeadAttention(config)
        expect(False, "A width that the heads do not divide is accepted; raise a ValueError.")


def multi_head(pick, layer, x, mask=None, memory=None):
    """Multi-head attention with the linear layers of `layer`."""
    width = layer.head_width
    heads = x.shape[-1] // width
    if memory is not None:
        memory = pick(memory, {"Keys and values are made of x; expected those of memory.": x})

    def split(projected):
        tokens_apart = projected.unflatten(-1, (heads, width)).transpose(1, 2)
        return pick(
            tokens_apart,
            {
                "The heads are split without a transpose, which mixes the tokens; view as (B, T, H, D), and then "
                "transpose(1, 2).": projected.reshape(tokens_apart.shape),
                "The width is viewed as (D, H), so that the numbers of a head are not next to each other; view it as "
                "(H, D).": projected.unflatten(-1, (width, heads)).permute(0, 3, 1, 2),
            },
        )

    other = x if memory is None else memory
    query, key, value = split(layer.query(x)), split(layer.key(other)), split(layer.value(other))
    query = pick(
        query,
        {"The scores are divided by √C; divide them by √D, where D is the width of one head.": query / heads**0.5},
    )
    contexts, weights = attend(pick, query, key, value, mask)
    joined = pick(
        contexts.transpose(1, 2),
        {
            "The heads are joined without a transpose, which mixes the tokens; transpose(1, 2), and then reshape to "
            "(B, T, C).": contexts
        },
    ).reshape(x.shape)
    return pick(
        layer.output(joined),
        {"The output matrix is not applied; return self.output(...) of the joined heads.": joined},
    ), weights


def test_forward(config, right, data):
    source, x = right.encoder.blocks[0].attention, data.states
    layer = loaded(MultiHeadAttention(config), source)
    for arguments in ((x,), (x, data.mask), (x[:, :5], None, x)):
        compare(layer(*arguments), multi_head, source, *arguments)
