"""Chapter 10: speed."""

import pytest
import torch
from torch import nn

from grading import compare, difference, expect
from speed import int8_linear, pad, unpad


@pytest.fixture
def starts(data):
    """Where each sequence begins in the row without padding, and the number of tokens."""
    return nn.functional.pad(data.tokens.sum(dim=1).cumsum(dim=0), (1, 0))


def unpadded(pick, x, tokens, starts):
    kept = pick(
        tokens.bool(), {"The padding is kept; select the tokens with attention_mask 1.": torch.ones_like(tokens).bool()}
    )
    offsets = pick(
        starts,
        {
            "cu_seqlens has the lengths; expected where each sequence begins, and N: the cumulative sums, from 0 "
            "on.": starts.diff(),
            "cu_seqlens does not begin with 0.": starts[1:],
            "cu_seqlens does not end with the number of tokens.": starts[:-1],
        },
    )
    positions = torch.arange(x.shape[1]).expand(tokens.shape)[tokens.bool()]
    positions = pick(
        positions,
        {"The positions go on from one sequence to the next; they restart at 0.": torch.arange(len(positions))},
    )
    return x[kept][None], offsets, positions[None]


def test_unpad(data, starts):
    compare(unpad(data.states, data.tokens), unpadded, data.states, data.tokens, starts)


def padded(pick, x, tokens):
    side = pick(tokens, {"The padding is on the wrong side; the tokens of a sequence come first.": tokens.flip(1)})
    result = torch.zeros(x.shape)
    result[side] = x[tokens]
    return result


def test_pad(data, starts):
    tokens = data.tokens.bool()
    compare(pad(data.states[tokens][None], starts), padded, data.states, tokens)


def rounded(pick, x, linear):
    weight = linear.weight
    rounding = pick(torch.round, {"The numbers are truncated; round them.": torch.trunc})
    s = pick(
        x.abs().amax(dim=-1, keepdim=True),
        {"There is one s for all of x; compute it for each row, over the last dimension.": x.abs().max()},
    )
    m = weight.amin(dim=1)
    m = pick(m, {"There is one m for the whole weight; compute it for each row.": m.min().expand(len(m))})
    t = pick(
        weight.amax(dim=1) - m,
        {
            "There is one scale for the whole weight; compute t for each row.": (weight.max() - weight.min()).expand(
                len(m)
            )
        },
    )
    s, t = s / 127, t / 255
    q, v = rounding(x / s).double(), rounding((weight - m[:, None]) / t[:, None]).double()
    product = q @ v.T
    product = pick(
        product,
        {"The product overflows: multiply int32 or float64 numbers, not int8.": (product + 128) % 256 - 128},
    )
    sums = pick(
        q.sum(dim=-1, keepdim=True) * m,
        {"m is forgotten: w ≈ t · v + m, so s times the sum of q times m is part of the product.": 0},
    )
    return s * (product * t + sums) + pick(linear.bias, {"The bias is forgotten.": 0})


def test_int8_linear(right, data):
    linear, x = right.encoder.blocks[0].feed_forward.intermediate, data.states
    result = int8_linear(x, linear)
    expect(difference(result, linear(x)), "Nothing is rounded: this is the result of the layer itself.")
    compare(result, rounded, x, linear)
