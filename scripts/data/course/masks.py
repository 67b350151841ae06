"""Chapter 2, docs/course/02_masks.md: fill the gaps, then run `scratchbert course check 2`.

All masks here are additive: 0 where a query may attend to a key, and the lowest number, `LOWEST`, where it may not.
"""

import torch

LOWEST = torch.finfo(torch.float32).min


def causal_mask(length: int) -> torch.Tensor:
    """The mask `(T, T)` with which each position attends to itself and to earlier positions. A row is a query."""
    ...  # your code


def padding_mask(attention_mask: torch.Tensor) -> torch.Tensor:
    """The mask `(B, 1, 1, T)` that hides padding from all heads and queries.

    Args:
        attention_mask: `(B, T)`, 1 for a token and 0 for padding, as a tokenizer returns it.
    """
    ...  # your code


def masked_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scaled dot-product attention with an additive mask.

    Args:
        query: `(B, H, T, D)`.
        key: `(B, H, S, D)`.
        value: `(B, H, S, E)`.
        mask: additive, of a shape that broadcasts to `(B, H, T, S)`.

    Returns:
        The context vectors, `(B, H, T, E)`, and the weights, `(B, H, T, S)`.
    """
    ...  # your code
