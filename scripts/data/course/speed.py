"""Chapter 10, docs/course/10_speed.md: fill the gaps, then run `scratchbert course check 10`."""

import torch
from torch import nn


def unpad(x, attention_mask):
    """Removes padding.

    Args:
        x: `(B, T, C)`.
        attention_mask: `(B, T)`, 1 for a token and 0 for padding.

    Returns:
        The N non-padding tokens of all sequences, in the order of the batch, `(1, N, C)`; `cu_seqlens`, `(B + 1,)`: the
        position in the row at which each sequence begins, and N; and `position_ids`, `(1, N)`, which restart at 0 where
        a sequence begins.
    """
    raise NotImplementedError  # your code


def pad(x, cu_seqlens):
    """The inverse of `unpad`, without the attention mask: `(1, N, C)` → `(B, T, C)`.

    T is the length of the longest sequence. Zeros fill up the right side of the shorter ones.
    """
    raise NotImplementedError  # your code


def int8_linear(x, linear):
    """Approximates `linear(x)` by a product of integers.

    The roles are swapped against the chapter: the inputs are symmetric, and the weight has a minimum. Each token of x
    is rounded to x ≈ s · q, with q in -127 … 127, and s the largest absolute value of the token divided by 127. The
    weights of each output are rounded to w ≈ t · v + m, with v in 0 … 255, m their minimum, and t their range divided
    by 255.

    Args:
        x: `(..., C)`.
        linear: with a weight of shape `(D, C)`, and a bias.

    Returns:
        `(..., D)`
    """
    raise NotImplementedError  # your code
