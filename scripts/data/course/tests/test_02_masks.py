"""Chapter 2: masks."""

import torch

from grading import check


def clamped(function, *inputs):
    """A mask in which every number that hides a key is -10,000."""
    return function(*inputs).clamp(-10_000.0)


def test_causal_mask():
    check("masks.causal_mask", 7, 3, run=clamped)


def test_padding_mask():
    check("masks.padding_mask", torch.tensor([6, 1, 4]), 6, run=clamped)


def test_masked_attention(data):
    causal = torch.full((data.states.shape[1],) * 2, data.mask.min().item()).triu(1)
    no_keys = causal.clone()
    no_keys[0] = causal[0, 1]
    for mask in (data.mask, causal, no_keys):
        check("masks.masked_attention", *data.heads, mask)
