"""Chapter 3, docs/course/03_heads.md: fill the gaps, then run `scratchbert course check 3`.

B is the number of sequences, T their length, C the width of a vector, H the number of heads, D = C / H. S is the
length of the sequences that are attended to.
"""

import torch
from torch import nn


class MultiHeadAttention(nn.Module):
    """Multi-head attention of one sequence to another one, or to itself."""

    def __init__(self, config):
        super().__init__()
        # Your check: raise a ValueError if `config.hidden_size` is not divisible by `config.num_attention_heads`.
        self.num_heads = config.num_attention_heads
        self.query = nn.Linear(config.hidden_size, config.hidden_size)
        self.key = nn.Linear(config.hidden_size, config.hidden_size)
        self.value = nn.Linear(config.hidden_size, config.hidden_size)
        self.output = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, x, mask=None, memory=None):
        """
        Args:
            x: `(B, T, C)`, of which the queries are made.
            mask: boolean, of a shape that broadcasts to `(B, H, T, S)`; None for no mask.
            memory: `(B, S, C)`, of which keys and values are made; None: x.

        Returns:
            The result, `(B, T, C)`, and the weights of all heads, `(B, H, T, S)`.
        """
        raise NotImplementedError  # your code
