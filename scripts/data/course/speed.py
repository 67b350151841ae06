"""Chapter 10, docs/course/10_speed.md: fill the gaps, then run `scratchbert course check 10`."""

import torch
from torch import nn


def unpad(x: torch.Tensor, attention_mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Removes padding.

    Args:
        x: `(B, T, C)`.
        attention_mask: `(B, T)`, 1 for a token and 0 for padding.

    Returns:
        The N non-padding tokens of all sequences, in the order of the batch, `(1, N, C)`; and `cu_seqlens`, `(B + 1,)`:
        the position in the row at which each sequence begins, and N.
    """
    ...  # your code


def pad(x: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
    """The inverse of `unpad`: `(1, N, C)` → `(B, T, C)`, with zeros at padding."""
    ...  # your code


def int8_linear(x: torch.Tensor, linear: nn.Linear) -> torch.Tensor:
    """Approximates `linear(x)` by a product of integers.

    Each row of x is rounded to x ≈ s · q + m, with q in 0 … 255, m the minimum of the row, and s the range of the row
    divided by 255. Each row of the weight is rounded to w ≈ t · v, with v in -127 … 127, and t the largest absolute
    value of the row divided by 127.

    Args:
        x: `(..., C)`.
        linear: with a weight of shape `(D, C)`, and a bias.

    Returns:
        `(..., D)`
    """
    ...  # your code
