"""Chapter 1, docs/course/01_attention.md: fill the gap, fix the bugs, then run `scratchbert course check 1`.

In this file a word is a *column*, as in many papers. In the chapter it is a row. T is the number of queries, S the
number of keys and values, D the width of a query, E that of a value.
"""

import torch
from torch import nn


def attention(query, key, value):
    """Scaled dot-product attention over columns.

    Args:
        query: `(..., D, T)`, with any number of dimensions before the last two.
        key: `(..., D, S)`.
        value: `(..., E, S)`.

    Returns:
        The context vectors, `(..., E, T)`, and the weights, `(..., T, S)`: a row for each query, with the sum 1.
    """
    raise NotImplementedError  # your code


def to_linear(matrix):
    """A linear layer without bias that computes `x @ matrix`, for a `matrix` of shape `(C, D)`."""
    # Fix the bugs: the layer computes something else, even for a square matrix.
    linear = nn.Linear(*matrix.shape)
    linear.weight = nn.Parameter(matrix)
    return linear
