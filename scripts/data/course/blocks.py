"""Chapter 4, docs/course/04_blocks.md: fill the gaps, then run `scratchbert course check 4`.

The block contains the attention that you wrote in chapter 3. Its parts have the names that checkpoints expect.
"""

import torch
from torch import nn

from heads import MultiHeadAttention


def gelu(x: torch.Tensor) -> torch.Tensor:
    """GELU(x) = x Φ(x), where Φ is the distribution function of the normal distribution. `torch.erf` is the error
    function."""
    ...  # your code


class LayerNorm(nn.Module):
    """Shifts and scales the last dimension to mean 0 and variance 1, then multiplies by `weight` and adds `bias`."""

    def __init__(self, width: int, eps: float):
        super().__init__()
        self.weight, self.bias, self.eps = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width)), eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`(..., C)` → `(..., C)`"""
        ...  # your code


class FeedForward(nn.Module):
    """A linear layer to four times the width, GELU, and a linear layer back."""

    def __init__(self, config):
        super().__init__()
        self.intermediate = nn.Linear(config.hidden_size, config.intermediate_size)
        self.output = nn.Linear(config.intermediate_size, config.hidden_size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`(..., C)` → `(..., C)`"""
        ...  # your code


class Block(nn.Module):
    """Attention and feed-forward, each with dropout, a residual sum and a layer norm.

    post-norm, as in BERT:                x ← norm(x + dropout(part(x)))
    pre-norm, with config.norm_first:     x ← x + dropout(part(norm(x)))
    """

    def __init__(self, config):
        super().__init__()
        self.norm_first = config.norm_first
        self.attention = MultiHeadAttention(config)
        self.attention_norm = LayerNorm(config.hidden_size, config.layer_norm_eps)
        self.feed_forward = FeedForward(config)
        self.feed_forward_norm = LayerNorm(config.hidden_size, config.layer_norm_eps)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None, *unused, **options) -> torch.Tensor:
        """`(B, T, C)` → `(B, T, C)`

        Args:
            mask: as for `MultiHeadAttention`.
            unused, options: what `ScratchBertModel` passes in addition, which an encoder does not need.
        """
        ...  # your code
