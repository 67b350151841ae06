"""Chapter 4: blocks. The block is checked alone: feed-forward and norms are replaced by right ones."""

import pytest
import torch

import blocks
from grading import check, check_evaluation, expect, loaded


def test_geglu():
    check("blocks.geglu", torch.linspace(-4, 4, 200).reshape(2, 100))


@pytest.mark.parametrize("dim", [-1, 1])
def test_layer_norm(dim, right, data):
    def run(layer_norm, x):
        source = right.encoder.blocks[0].attention_norm
        return loaded(layer_norm(len(source.weight), 0.5, dim), source)(x)  # eps is so large that its place counts

    check("blocks.LayerNorm", data.states.movedim(-1, dim), run=run)


def test_feed_forward(config, right, data):
    sizes = []

    def run(feed_forward, *inputs):
        part = loaded(feed_forward(config), right.encoder.blocks[0].feed_forward)
        part.intermediate.register_forward_hook(lambda layer, inputs, result: sizes.append(result.shape[1]))
        return part(*inputs)

    check("blocks.FeedForward", data.states, run=run)
    sizes.clear()
    check("blocks.FeedForward", data.states, 4, run=run)
    expect(max(sizes) <= 4, f"With chunk_size=4, {max(sizes)} positions are computed at once; split x along dim 1.")


@pytest.mark.parametrize("order", ["post", "parallel"])
def test_block(order, config, right, data):
    def make(block_class):
        source = right.encoder.blocks[0]
        block = loaded(block_class(config, order), source)
        block.feed_forward = source.feed_forward
        block.attention_norm, block.feed_forward_norm = source.attention_norm, source.feed_forward_norm
        return block

    inputs = data.states, data.mask
    check_evaluation(make(blocks.Block), *inputs)
    check("blocks.Block", *inputs, run=lambda block, *inputs: make(block)(*inputs))
    check("blocks.Block", *inputs, run=lambda block, *inputs: make(block).train()(*inputs))
