"""Chapter 1, docs/course/01_attention.md: fill the gaps, then run `scratchbert course check 1`.

T is the number of queries, S the number of keys and values, D the width of a query, E that of a value.
"""

import torch
from torch import nn


def attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """softmax(Q Kᵀ / √D) V.

    Args:
        query: `(..., T, D)`, with any number of dimensions before the last two.
        key: `(..., S, D)`.
        value: `(..., S, E)`.

    Returns:
        The context vectors, `(..., T, E)`, and the weights, `(..., T, S)`.
    """
    ...  # your code


def to_linear(matrix: torch.Tensor) -> nn.Linear:
    """A linear layer without bias that computes `x @ matrix`, for a `matrix` of shape `(C, D)`."""
    ...  # your code
