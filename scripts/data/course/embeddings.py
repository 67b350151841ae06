"""Chapter 5, docs/course/05_embeddings.md: fill the gaps, then run `scratchbert course check 5`."""

import torch
from torch import nn

from blocks import LayerNorm


def sinusoidal_table(length, width):
    """The table of the first implementation of the transformer, in tensor2tensor: `(length, width)`.

    It has the columns of the chapter in another order: all sines in the left half, all cosines in the right half.

    PE(pos, i)             = sin(pos / 10000^(2i / width))    for i = 0 … width / 2 - 1
    PE(pos, width / 2 + i) = cos(pos / 10000^(2i / width))
    """
    raise NotImplementedError  # your code


class Embeddings(nn.Module):
    """The sum of three vectors for each token, then a layer norm and dropout. Positions are learned, as in BERT."""

    def __init__(self, config):
        super().__init__()
        self.word_embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        self.position_embeddings = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        self.token_type_embeddings = nn.Embedding(config.type_vocab_size, config.hidden_size)
        self.norm = LayerNorm(config.hidden_size, config.layer_norm_eps)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(self, input_ids, attention_mask, token_type_ids=None):
        """
        Args:
            input_ids: `(B, T)`.
            attention_mask: `(B, T)`, 1 for a token and 0 for padding, which may be on the left or on the right. The
                positions count tokens only: the first token of each row has position 0.
            token_type_ids: `(B, T)`, 0 or 1; None: all 0.

        Returns:
            `(B, T, C)`. The vectors at padding may have any position of the table, such as 0. A negative one fails.
        """
        raise NotImplementedError  # your code
