"""A solution of the exercise in speed.py."""

import torch
from torch import nn


def unpad(x, attention_mask):
    lengths, tokens = attention_mask.sum(dim=1), attention_mask.bool()
    cu_seqlens = torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(dim=0)])
    return x[tokens][None], cu_seqlens, torch.arange(x.shape[1]).expand(tokens.shape)[tokens][None]


def pad(x, cu_seqlens):
    lengths = cu_seqlens.diff()
    padded = x.new_zeros(len(lengths), int(lengths.max()), x.shape[-1])
    for row, length in enumerate(lengths):
        padded[row, :length] = x[0, cu_seqlens[row] : cu_seqlens[row + 1]]
    return padded


def int8_linear(x, linear):
    s = x.abs().amax(dim=-1, keepdim=True) / 127
    q = (x / s).round().int()
    m = linear.weight.amin(dim=1)
    t = (linear.weight.amax(dim=1) - m) / 255
    v = ((linear.weight - m[:, None]) / t[:, None]).round().int()
    return s * (q @ v.T) * t + s * q.sum(dim=-1, keepdim=True) * m + linear.bias
