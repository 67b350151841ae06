"""A solution of the exercise in embeddings.py."""

import torch
from torch import nn

from blocks import LayerNorm


def sinusoidal_table(length, width):
    position = torch.arange(length)[:, None]
    angle = position / 10_000 ** (torch.arange(0, width, 2) / width)
    return torch.cat([angle.sin(), angle.cos()], dim=1)


class Embeddings(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.word_embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        self.position_embeddings = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        self.token_type_embeddings = nn.Embedding(config.type_vocab_size, config.hidden_size)
        self.norm = LayerNorm(config.hidden_size, config.layer_norm_eps)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(self, input_ids, attention_mask, token_type_ids=None):
        if token_type_ids is None:
            token_type_ids = torch.zeros_like(input_ids)
        positions = (attention_mask.cumsum(dim=1) - 1).clamp(min=0)
        x = self.word_embeddings(input_ids)
        x = x + self.position_embeddings(positions)
        x = x + self.token_type_embeddings(token_type_ids)
        return self.dropout(self.norm(x))
