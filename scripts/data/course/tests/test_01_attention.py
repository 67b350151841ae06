"""Chapter 1: attention."""

from torch import nn

from attention import to_linear
from grading import check, expect


def test_attention(data):
    query, key, value = (each.mT for each in data.heads)
    words = query[..., :5], key, value[:, :, :7]  # T, S, D and E all differ
    check("attention.attention", *words)
    check("attention.attention", *(each[0, 0] for each in words))


def weight_and_bias(to_linear, matrix):
    linear = to_linear(matrix)
    return linear.weight, linear.bias


def test_to_linear(right):
    matrix = right.encoder.blocks[0].feed_forward.intermediate.weight.detach().T
    expect(isinstance(to_linear(matrix), nn.Linear), "The result is not an nn.Linear.")
    for each in (matrix[:, : len(matrix)], matrix):  # a square one, too
        check("attention.to_linear", each, run=weight_and_bias)
