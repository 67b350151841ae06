"""Chapter 5, docs/course/05_embeddings.md: fill the gaps, then run `scratchbert course check 5`."""

import torch
from torch import nn

from blocks import LayerNorm


def sinusoidal_table(length: int, width: int) -> torch.Tensor:
    """The table of Vaswani et al. 2017, section 3.5: `(length, width)`.

    PE(pos, 2i)     = sin(pos / 10000^(2i / width))
    PE(pos, 2i + 1) = cos(pos / 10000^(2i / width))
    """
    ...  # your code


class Embeddings(nn.Module):
    """The sum of three vectors for each token, then a layer norm and dropout. Positions are learned, as in BERT."""

    def __init__(self, config):
        super().__init__()
        self.word_embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        self.position_embeddings = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        self.token_type_embeddings = nn.Embedding(config.type_vocab_size, config.hidden_size)
        self.norm = LayerNorm(config.hidden_size, config.layer_norm_eps)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(self, input_ids: torch.Tensor, token_type_ids: torch.Tensor | None = None, *unused) -> torch.Tensor:
        """
        Args:
            input_ids: `(B, T)`.
            token_type_ids: `(B, T)`, 0 or 1; None: all 0.

        Returns:
            `(B, T, C)`
        """
        ...  # your code
