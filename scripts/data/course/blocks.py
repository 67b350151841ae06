"""Chapter 4, docs/course/04_blocks.md: fill the gaps, then run `scratchbert course check 4`.

The block contains the attention that you wrote in chapter 3. Chapter 6 loads the weights of a real BERT into it.
"""

import torch
from torch import nn

from heads import MultiHeadAttention


def geglu(x):
    """GEGLU, the activation of ModernBERT and T5: `(..., 2 C)` → `(..., C)`.

    The first half of the last dimension is a, the second half is b. The result is GELU(a) · b, with the exact
    GELU(a) = a Φ(a), where Φ is the distribution function of the normal distribution. Write it with `torch.erf`.
    """
    raise NotImplementedError  # your code


class LayerNorm(nn.Module):
    """Shifts and scales one dimension to mean 0 and variance 1, then multiplies by `weight` and adds `bias`.

    Args:
        width: the size of the dimension.
        eps: is added to the variance.
        dim: the dimension. BERT has -1. A convolution with shape `(B, C, T)` has 1.
    """

    def __init__(self, width, eps, dim=-1):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))
        self.eps, self.dim = eps, dim

    def forward(self, x):
        """Returns a tensor of the shape of x."""
        raise NotImplementedError  # your code


class FeedForward(nn.Module):
    """A linear layer to four times the width, GELU, and a linear layer back. `nn.functional.gelu` is allowed."""

    def __init__(self, config):
        super().__init__()
        self.intermediate = nn.Linear(config.hidden_size, config.intermediate_size)
        self.output = nn.Linear(config.intermediate_size, config.hidden_size)

    def forward(self, x, chunk_size=None):
        """`(B, T, C)` → `(B, T, C)`

        Args:
            chunk_size: saves memory: the layers are applied to at most so many positions of T at a time. The result is
                the same. None: all at once.
        """
        raise NotImplementedError  # your code


class Block(nn.Module):
    """Attention and feed-forward, each with dropout, a residual sum and a layer norm. `__init__` stores the order.

    order="post", as in BERT:     x ← norm(x + dropout(part(x))), first for attention, then for feed_forward
    order="parallel", as in PaLM: x ← x + dropout(attention(attention_norm(x)))
                                        + dropout(feed_forward(feed_forward_norm(x)))
    """

    def __init__(self, config, order="post"):
        super().__init__()
        self.order = order
        self.attention = MultiHeadAttention(config)
        self.attention_norm = LayerNorm(config.hidden_size, config.layer_norm_eps)
        self.feed_forward = FeedForward(config)
        self.feed_forward_norm = LayerNorm(config.hidden_size, config.layer_norm_eps)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(self, x, mask=None):
        """`(B, T, C)` → `(B, T, C)`, in the order `self.order`

        Args:
            mask: as for `MultiHeadAttention`.
        """
        raise NotImplementedError  # your code
