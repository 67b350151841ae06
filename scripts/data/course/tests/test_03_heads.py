"""Chapter 3: attention heads."""

from contextlib import suppress

from grading import check, expect, loaded
from heads import MultiHeadAttention


def test_divisibility(config):
    MultiHeadAttention(config)
    config.hidden_size = config.num_attention_heads * 8 + 1
    with suppress(ValueError):
        MultiHeadAttention(config)
        expect(False, "A width that the heads do not divide is accepted; raise a ValueError.")


def test_forward(config, right, data):
    def run(attention, *inputs):
        return loaded(attention(config), right.encoder.blocks[0].attention)(*inputs)

    x = data.states
    for inputs in ((x,), (x, data.mask), (x[:, :5], None, x)):
        check("heads.MultiHeadAttention", *inputs, run=run)
