"""Chapter 1: attention. `attend` is also the reference of the chapters 2 and 3."""

import torch
from torch import nn

from attention import attention, to_linear
from grading import compare, difference, expect


def attend(pick, query, key, value, mask=None):
    """Attention over rows, `(..., T, D)`."""
    width = query.shape[-1]
    divisor = pick(
        width**0.5,
        {
            "The scores are not divided by √d; divide them by the square root of the width of a query.": 1,
            "The scores are divided by d; divide them by √d, the square root of the width of a query.": width,
        },
    )
    scores, factor, after = query @ key.mT / divisor, 1, 0
    if mask is not None:
        # What is added to the scores, what the weights are multiplied by, and what is added to them.
        before, factor, after = pick(
            (mask, 1, 0),
            {
                "The mask is added after the softmax, so hidden keys still take their share of the weights; add it to "
                "the scores, before the softmax.": (0, 1, mask),
                "The weights of hidden keys are set to zero after the softmax, so the others no longer sum to 1; add "
                "the mask to the scores, before the softmax.": (0, mask == 0, 0),
                "The mask is not used; add it to the scores, before the softmax.": (0, 1, 0),
                "The mask is subtracted, so that it hides the wrong keys; add it.": (-mask, 1, 0),
                "Hidden keys have minus infinity, so that a query without keys gets NaN; add the mask as it is.": (
                    mask.masked_fill(mask < 0, -torch.inf),
                    1,
                    0,
                ),
            },
        )
        scores = scores + before
    weights = pick(
        scores.softmax(dim=-1),
        {
            "The scores are divided by their sum; use the softmax, whose weights are never negative.": scores
            / scores.sum(dim=-1, keepdim=True),
            "The softmax is over the queries; compute it over the keys, the last dimension (dim=-1).": scores.softmax(
                dim=-2
            ),
            "The softmax is over the wrong dimension; compute it over the keys, the last dimension (dim=-1).": (
                scores.softmax(dim=1)
            ),
        },
    )
    weights = weights * factor + after
    return weights @ value, weights


def in_columns(pick, query, key, value):
    contexts, weights = attend(pick, query, key, value)
    return pick(contexts.mT, {"The words of the result are rows; expected columns, (..., E, T).": contexts}), weights


def test_attention(data):
    query, key, value = data.heads
    words = query[:, :, :5], key, value[..., :7]  # T, S, D and E all differ
    for rows in (words, [each[0, 0] for each in words]):
        compare(attention(*(each.mT for each in rows)), in_columns, *rows)


def test_to_linear(right, data):
    matrix = right.encoder.blocks[0].feed_forward.intermediate.weight.detach().T
    for each in (matrix[:, : len(matrix)], matrix):  # a square one, too
        linear = to_linear(each)
        expect(isinstance(linear, nn.Linear), f"The result is a {type(linear).__name__}; expected an nn.Linear.")
        expect(linear.bias is None, "The layer has a bias; pass bias=False.")
        expect(
            difference(linear.weight, each),
            "The matrix is not transposed; nn.Linear stores the transpose, `(D, C)`, and computes x @ weight.T.",
        )
        expect(not difference(linear(data.states), data.states @ each), "The layer does not compute x @ matrix.")
