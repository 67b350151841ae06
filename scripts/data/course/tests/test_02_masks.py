"""Chapter 2: masks."""

import torch

import masks
from grading import check, expect


def check_mask(name, *inputs):
    check(f"masks.{name}", *inputs)
    dtype = getattr(masks, name)(*inputs).dtype
    expect(dtype == torch.bool, f"The mask has dtype {dtype}; expected torch.bool.")


def test_causal_mask():
    check_mask("causal_mask", 7, 3)


def test_padding_mask():
    check_mask("padding_mask", torch.tensor([6, 1, 4]), 6)


def test_masked_attention(data):
    causal = torch.ones((data.states.shape[1],) * 2).tril().bool()
    no_keys = causal.clone()
    no_keys[0] = False
    for mask in (data.mask, causal, no_keys):
        check("masks.masked_attention", *data.heads, mask)
