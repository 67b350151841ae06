"""Attention against numbers worked out by others, and against PyTorch's own function and layer."""

import json
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from modeling_scratchbert.attention import MultiHeadAttention, scaled_dot_product_attention
from support.folders import DATA
from support.models import randomise, tiny_config

WORKED = json.loads((DATA / "worked_attention.json").read_text(encoding="utf-8"))


# ---------------------------------------------------------------------------------------------------------------------
# The worked example


def assert_four_digits(actual, printed):
    """`printed` has four digits after the point, so that rounding hides up to half a unit of the fourth."""
    torch.testing.assert_close(actual, torch.tensor(printed), rtol=0, atol=0.5e-4 + 1e-6)


def test_worked_example_without_weights():
    expected = WORKED["unscaled_without_weights"]
    x = torch.tensor(WORKED["embeddings"])
    context, weights = scaled_dot_product_attention(x, x, x, scaling=1.0)
    assert_four_digits(weights, expected["weights"])
    assert_four_digits(context, expected["contexts"])


def test_worked_example_with_weights():
    expected = WORKED["scaled_with_weights"]
    x = torch.tensor(WORKED["embeddings"])
    # The file prints the matrices to four digits; its results come from all the digits of the same random numbers.
    torch.manual_seed(123)
    query, key, value = (x @ torch.rand(3, 2) for _ in range(3))
    context, weights = scaled_dot_product_attention(query, key, value)
    assert_four_digits(weights, expected["attention"])
    assert_four_digits(context, expected["contexts"])


# ---------------------------------------------------------------------------------------------------------------------
# torch's function


def draw_tensors(seed, lead, queries, keys, width, value_width):
    """Random query, key and value, and a random boolean mask that may hide everything from a query."""
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(*lead, queries, width, generator=generator, dtype=torch.float64)
    key = torch.randn(*lead, keys, width, generator=generator, dtype=torch.float64)
    value = torch.randn(*lead, keys, value_width, generator=generator, dtype=torch.float64)
    visible = torch.rand(*lead, queries, keys, generator=generator) < 0.6
    return query, key, value, visible


def as_mask(visible, kind, dtype=torch.float64):
    """The boolean mask `visible` as it is, or as numbers to add to the scores."""
    if kind == "boolean":
        return visible
    hidden = -math.inf if kind == "-inf" else torch.finfo(dtype).min
    return torch.zeros(visible.shape, dtype=dtype).masked_fill(~visible, hidden)


def expected_attention(query, key, value, visible, bias, scaling):
    """What torch's function returns, but zeros for a query that sees no key, for which it promises nothing."""
    sees = visible.any(dim=-1, keepdim=True)
    mask = bias.masked_fill(~visible & sees, -math.inf)
    return nn.functional.scaled_dot_product_attention(query, key, value, mask, scale=scaling) * sees


# The same examples in every run: the profile of tests/conftest.py.
@settings(max_examples=80)
@given(
    seed=st.integers(0, 2**31),
    lead=st.sampled_from([(), (3,), (2, 3), (2, 1, 2)]),
    sizes=st.lists(st.integers(1, 5), min_size=4, max_size=4),
    kind=st.sampled_from([None, "boolean", "-inf", "lowest"]),
    has_query_mask=st.booleans(),
    has_key_mask=st.booleans(),
    scaling=st.sampled_from([None, 0.3]),
)
def test_function_of_torch(seed, lead, sizes, kind, has_query_mask, has_key_mask, scaling):
    """Forward and backward; with numbers that hide some keys and shift the scores of others."""
    query, key, value, visible = draw_tensors(seed, lead, *sizes)
    bias = torch.zeros(visible.shape, dtype=torch.float64)
    mask, options = None, {"scaling": scaling}
    if kind is None:
        visible = torch.ones_like(visible)
    else:
        bias = bias if kind == "boolean" else torch.randn_like(bias)
        mask = as_mask(visible, kind) if kind == "boolean" else as_mask(visible, kind) + bias
    if has_query_mask:
        options["query_mask"] = (torch.rand(query.shape[:-1]) < 0.7).long()  # ones will do for True
        visible = visible & options["query_mask"].bool()[..., :, None]
    if has_key_mask:
        options["key_mask"] = (torch.rand(key.shape[:-1]) < 0.7).long()
        visible = visible & options["key_mask"].bool()[..., None, :]
    leaves = [x.requires_grad_() for x in (query, key, value)]

    context, weights = scaled_dot_product_attention(*leaves, mask, **options)

    identity = torch.eye(key.shape[-2], dtype=torch.float64).expand(*lead, -1, -1)
    expected = expected_attention(*leaves, visible, bias, scaling)
    expected_weights = expected_attention(query, key, identity, visible, bias, scaling)
    upstream = torch.randn_like(context)
    gradients = [torch.autograd.grad(each, leaves, upstream) for each in (context, expected)]
    torch.testing.assert_close((context, weights), (expected, expected_weights), rtol=0, atol=1e-12)
    torch.testing.assert_close(*gradients, rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", ["boolean", "-inf", "lowest"])
def test_half_precision(kind, dtype):
    *tensors, visible = draw_tensors(1, (2, 2), 6, 7, 8, 8)
    visible[0, :, 0] = False
    leaves = [x.to(dtype).requires_grad_() for x in tensors]
    context, weights = scaled_dot_product_attention(*leaves, as_mask(visible, kind, dtype))
    assert context.dtype == weights.dtype == dtype
    exact = scaled_dot_product_attention(*(x.double() for x in leaves), visible)
    # A rounding each of the scores, which reach 4, of the weights, up to 1, and of the context, up to 4.
    tolerance = 8 * torch.finfo(dtype).eps
    torch.testing.assert_close((context.double(), weights.double()), exact, rtol=0, atol=tolerance)
    assert not context[0, :, 0].any()
    (context.float().square().sum() + weights.float().square().sum()).backward()
    assert all(leaf.grad.isfinite().all() for leaf in leaves)


@pytest.mark.parametrize("computed", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("given", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_lowest_number_of_any_dtype_hides(given, computed):
    query = torch.randn(2, 3, 4).to(computed)
    visible = torch.tensor([[1, 0, 1], [1, 0, 1], [0, 0, 0]]).bool()
    actual = scaled_dot_product_attention(query, query, query, as_mask(visible, "lowest", given))
    expected = scaled_dot_product_attention(query, query, query, visible)
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


def test_mask_of_integers_is_refused():
    query = torch.randn(2, 3, 4)
    with pytest.raises(ValueError, match="mask"):
        scaled_dot_product_attention(query, query, query, torch.tensor([1, 1, 0]))


# ---------------------------------------------------------------------------------------------------------------------
# torch's layer


def from_torch(theirs: nn.MultiheadAttention, config) -> MultiHeadAttention:
    """Our layer, with the weights of torch's, which keeps those of query, key and value in one matrix."""
    ours = MultiHeadAttention(config).eval()
    state = {"output.weight": theirs.out_proj.weight, "output.bias": theirs.out_proj.bias}
    for kind, matrix in (("weight", theirs.in_proj_weight), ("bias", theirs.in_proj_bias)):
        for name, part in zip(("query", "key", "value"), matrix.chunk(3), strict=True):
            state[f"{name}.{kind}"] = part
    ours.load_state_dict(state)
    return ours


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("source", ["self", "cross"])
@pytest.mark.parametrize("mask", [None, "boolean", "additive", "per head"])
def test_multi_head_attention_of_torch(mask, source, implementation):
    config = tiny_config(hidden_size=40, num_attention_heads=5, attn_implementation=implementation)
    theirs = randomise(nn.MultiheadAttention(40, 5, batch_first=True)).eval()
    ours = from_torch(theirs, config)
    batch, heads, queries, keys = 3, 5, 6, 6 if source == "self" else 9
    x = torch.randn(batch, queries, 40)
    other = x if source == "self" else torch.randn(batch, keys, 40)
    our_mask = their_mask = None
    if mask == "additive":
        our_mask = torch.randn(queries, keys).expand(batch, 1, queries, keys)
        their_mask = our_mask[0, 0]
    elif mask is not None:
        our_mask = torch.rand(batch, heads, queries, keys) < 0.6
        our_mask[..., 0] = True
        if mask == "boolean":
            our_mask = our_mask[:, :1].expand_as(our_mask)
        their_mask = ~our_mask.flatten(0, 1)  # torch's booleans say what is hidden

    expected, expected_weights = theirs(x, other, other, attn_mask=their_mask, average_attn_weights=False)
    arguments = (x, our_mask, None if source == "self" else other)
    actual, returned = ours(*arguments)
    with_maps, weights = ours(*arguments, output_attentions=True)

    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-6)
    torch.testing.assert_close(with_maps, expected, rtol=0, atol=1e-6)
    torch.testing.assert_close(weights, expected_weights, rtol=0, atol=1e-6)
    assert (returned is None) == (implementation == "sdpa")
