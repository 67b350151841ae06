"""Chapter 4: blocks. The block is checked alone, with whatever parts you wrote."""

import pytest
import torch
from torch import nn
from torch.nn.functional import gelu

from blocks import Block, FeedForward, LayerNorm, geglu
from grading import Pick, check_dropout, compare, difference, expect, loaded


def gated(pick, x):
    halves = x.chunk(2, dim=-1)
    first, second = pick(halves, {"The halves are swapped; GELU is applied to the first one.": halves[::-1]})
    activated = pick(
        gelu(first),
        {
            "This is the tanh approximation of GELU; BertModel computes it with erf.": gelu(first, approximate="tanh"),
            "This is x · sigmoid(1.702 x), an approximation; BERT computes GELU with erf.": first
            * (1.702 * first).sigmoid(),
            "The argument of erf is x; expected x / √2.": gelu(first * 2**0.5) / 2**0.5,
            "This is Φ(x); expected x · Φ(x).": torch.special.ndtr(first),
            "This is ReLU.": first.relu(),
        },
    )
    return activated * pick(second, {"The second half is not used; multiply by it.": 1})


def test_geglu():
    x = torch.linspace(-4, 4, 200).reshape(2, 100)
    compare(geglu(x), gated, x)


def normed(pick, x, dim, norm, eps):
    over = pick(
        dim,
        {"The mean and the variance are over the tokens; compute them over the dimension dim.": 2 if dim == 1 else 1},
    )
    correction = pick(0, {"The variance is divided by n - 1; divide by n (var(..., correction=0)).": 1})
    variance = x.var(over, correction=correction, keepdim=True)
    scale = pick(
        (variance + eps).sqrt(),
        {
            "The numbers are divided by the variance; divide by its square root.": variance + eps,
            "eps is not used; add it to the variance.": variance.sqrt(),
            "eps is added to the standard deviation; add it to the variance, before the square root.": variance.sqrt()
            + eps,
        },
    )
    mean = pick(x.mean(over, keepdim=True), {"The mean is not subtracted.": 0})
    result = ((x - mean) / scale).movedim(dim, -1)
    result = pick(result * norm.weight + norm.bias, {"weight and bias are not applied.": result})
    return result.movedim(-1, dim)


@pytest.mark.parametrize("dim", [-1, 1])
def test_layer_norm(dim, right, data):
    source, eps = right.encoder.blocks[0].attention_norm, 0.5  # so large that its place counts
    norm = loaded(LayerNorm(len(source.weight), eps, dim), source)
    x = data.states.movedim(-1, dim)
    compare(norm(x), normed, x, dim, source, eps)


def feed_forward(pick, x, part):
    wide = part.intermediate(x)
    activated = pick(
        gelu(wide),
        {
            "GELU is missing between the two linear layers.": wide,
            "The activation is ReLU; expected GELU.": wide.relu(),
        },
    )
    result = part.output(activated)
    return pick(
        result,
        {
            "GELU is applied after the second linear layer as well.": gelu(result),
            "The input is added to the result; the residual sum is part of the block.": result + x,
        },
    )


def test_feed_forward(config, right, data):
    source, x, sizes = right.encoder.blocks[0].feed_forward, data.states, []
    part = loaded(FeedForward(config), source)
    compare(part(x), feed_forward, x, source)
    part.intermediate.register_forward_hook(lambda layer, inputs, result: sizes.append(result.shape[1]))
    compare(part(x, chunk_size=4), feed_forward, x, source)
    expect(max(sizes) <= 4, f"With chunk_size=4, {max(sizes)} positions are computed at once; split x along dim 1.")


def run_block(pick, block, x, mask, drop=1):
    """A block with the parts of `block`, whose dropout multiplies by `drop`."""
    mask = pick(mask, {"The mask is not passed to the attention.": None})
    norms = block.attention_norm, block.feed_forward_norm
    first, second = pick(norms, {"The two norms are swapped.": norms[::-1]})
    place = pick(
        {"post": "sum", "parallel": "input"}[block.order],
        {
            f"The norms come before the parts (pre-norm), where order is {block.order}; see the formulas.": "input",
            f"The norms come after the sums (post-norm), where order is {block.order}; see the formulas.": "sum",
            "The norm is applied to the result of each part, before the residual sum; see the formulas.": "result",
        },
    )

    def add(x, name, part, norm):
        """x and the result of the part for x."""
        norm = pick(norm, {f"{name}_norm is missing.": nn.Identity()})
        result = part(norm(x) if place == "input" else x) * drop
        result = norm(result) if place == "result" else result
        total = result + pick(x, {f"The residual sum of {name} is missing.": 0})
        return norm(total) if place == "sum" else total

    attended = add(x, "attention", lambda x: block.attention(x, mask)[0], first)
    in_sequence = pick(
        block.order == "post",
        {
            "The parts run one after the other; where order is parallel, both of them get x.": True,
            "Both parts get x; where order is post, feed_forward gets the result of the attention.": False,
        },
    )
    if in_sequence:
        return add(attended, "feed_forward", block.feed_forward, second)
    return attended + add(x, "feed_forward", block.feed_forward, second) - x


@pytest.mark.parametrize("order", ["post", "parallel"])
def test_block(order, config, right, data):
    arguments = data.states, data.mask
    block = loaded(Block(config, order), right.encoder.blocks[0])
    check_dropout(block, *arguments)
    compare(block(*arguments), run_block, block, *arguments)
    expect(
        not difference(block.train()(*arguments), run_block(Pick(), block, *arguments, drop=0)),
        "Dropout is in the wrong place; apply self.dropout to the result of each part, before the residual sum.",
    )
