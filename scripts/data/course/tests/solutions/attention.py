"""A solution of the exercise in attention.py."""

import torch
from torch import nn


def attention(query, key, value):
    scores = query.transpose(-2, -1) @ key / query.shape[-2] ** 0.5
    weights = scores.softmax(dim=-1)
    return value @ weights.transpose(-2, -1), weights


def to_linear(matrix):
    linear = nn.Linear(*matrix.shape, bias=False)
    linear.weight = nn.Parameter(matrix.T)
    return linear
