"""Chapter 2, docs/course/02_masks.md: fill the gaps, fix the bug, then run `scratchbert course check 2`.

The masks are boolean, as in the chapter: True where a query may attend to a key, and False where it may not.
"""

import torch


def causal_mask(length, window):
    """The mask `(T, T)` of causal attention in a sliding window. A row is a query.

    Each position attends to `window` positions: itself, and the `window - 1` positions before it.
    """
    raise NotImplementedError  # your code


def padding_mask(lengths, width):
    """The mask `(B, 1, 1, T)` that hides padding on the *left* from all heads and queries.

    Args:
        lengths: `(B,)`, the number of tokens of each sequence. They are the last ones of the row.
        width: T, the length of the rows with their padding. So the first token of a sequence is at `width - length`.
    """
    raise NotImplementedError  # your code


def masked_attention(query, key, value, mask):
    """Scaled dot-product attention with a mask.

    Args:
        query: `(B, H, T, D)`.
        key: `(B, H, S, D)`.
        value: `(B, H, S, E)`.
        mask: boolean, of a shape that broadcasts to `(B, H, T, S)`.

    Returns:
        The context vectors, `(B, H, T, E)`, and the weights, `(B, H, T, S)`, which sum to 1 for each query. If a query
        may not attend to any key, its weights are equal.
    """
    # Fix the bug: hidden keys have a weight.
    scores = query @ key.transpose(-2, -1) / query.shape[-1] ** 0.5
    weights = (scores * mask).softmax(dim=-1)
    return weights @ value, weights
