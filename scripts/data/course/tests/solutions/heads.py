"""A solution of the exercise in heads.py."""

import torch
from torch import nn


class MultiHeadAttention(nn.Module):
    def __init__(self, config):
        super().__init__()
        if config.hidden_size % config.num_attention_heads:
            raise ValueError("the heads do not divide the width")
        self.num_heads = config.num_attention_heads
        self.query = nn.Linear(config.hidden_size, config.hidden_size)
        self.key = nn.Linear(config.hidden_size, config.hidden_size)
        self.value = nn.Linear(config.hidden_size, config.hidden_size)
        self.output = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, x, mask=None, memory=None):
        B, _, C = x.shape
        memory = x if memory is None else memory
        query, key, value = (
            layer(states).view(B, -1, self.num_heads, C // self.num_heads).transpose(1, 2)
            for layer, states in ((self.query, x), (self.key, memory), (self.value, memory))
        )
        scores = query @ key.transpose(-2, -1) / query.shape[-1] ** 0.5
        if mask is not None:
            scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
        weights = scores.softmax(dim=-1)
        context = (weights @ value).transpose(1, 2).reshape(x.shape)
        return self.output(context), weights
