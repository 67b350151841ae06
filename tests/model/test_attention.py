"""Attention against the textbook, against numbers worked out by others, and against PyTorch's own layer."""

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
# The textbook


def textbook(query, key, value, visible, bias, scaling):
    """Equation 1 of Vaswani et al. 2017, number by number in Python's own floats, for `(N, T, D)`.

    `visible` and `bias` are `(N, T, S)`. A query that sees nothing gets zeros.
    """
    contexts, maps = [], []
    for n in range(query.shape[0]):
        q, k, v = query[n].tolist(), key[n].tolist(), value[n].tolist()
        for t in range(len(q)):
            scores = {
                s: scaling * sum(a * b for a, b in zip(q[t], k[s], strict=True)) + bias[n, t, s].item()
                for s in range(len(k))
                if visible[n, t, s]
            }
            total = sum(math.exp(score) for score in scores.values())
            weights = [math.exp(scores[s]) / total if s in scores else 0.0 for s in range(len(k))]
            maps.append(weights)
            contexts.append([sum(w * v[s][e] for s, w in enumerate(weights)) for e in range(value.shape[-1])])
    shape = query.shape[:2]
    return torch.tensor(contexts).view(*shape, -1), torch.tensor(maps).view(*shape, -1)


sizes = st.fixed_dictionaries({name: st.integers(1, 5) for name in ("queries", "keys", "width", "value_width")})
seeds = st.integers(0, 2**31)


def draw_tensors(lead, queries, keys, width, value_width, seed=0, dtype=torch.float32):
    """Random query, key and value, and a random boolean mask that may hide everything from a query."""
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(*lead, queries, width, generator=generator).to(dtype)
    key = torch.randn(*lead, keys, width, generator=generator).to(dtype)
    value = torch.randn(*lead, keys, value_width, generator=generator).to(dtype)
    visible = torch.rand(*lead[:1], *[1] * len(lead[1:]), queries, keys, generator=generator) < 0.6
    return query, key, value, visible


def as_mask(visible, kind, dtype=torch.float32):
    """The boolean mask `visible` as it is, or as numbers to add to the scores."""
    if kind == "boolean":
        return visible
    hidden = -math.inf if kind == "-inf" else torch.finfo(dtype).min
    return torch.zeros(visible.shape, dtype=dtype).masked_fill(~visible, hidden)


# The same examples in every run: the profile of tests/conftest.py.
@settings(max_examples=40)
@given(sizes, seeds, st.sampled_from(["boolean", "-inf", "lowest", None]), st.booleans(), st.booleans())
def test_textbook(sizes, seed, kind, has_query_mask, has_key_mask):
    query, key, value, visible = draw_tensors((2, 3), **sizes, seed=seed)
    query_mask, key_mask = (torch.rand(x.shape[:-1]) < 0.7 for x in (query, key))
    allowed = torch.ones(*query.shape[:-1], key.shape[-2], dtype=torch.bool)
    bias = torch.zeros(allowed.shape)
    mask, options = None, {}
    if kind is not None:
        allowed = allowed & visible
        mask = as_mask(visible, kind)
    if kind in ("-inf", "lowest"):  # numbers hide some keys and shift the scores of others
        bias = torch.randn(allowed.shape)
        mask = mask + bias
    if has_query_mask:
        allowed = allowed & query_mask[..., :, None]
        options["query_mask"] = query_mask.long()  # ones will do for True
    if has_key_mask:
        allowed = allowed & key_mask[..., None, :]
        options["key_mask"] = key_mask.long()
    tensors = (x.flatten(0, 1) for x in (query, key, value, allowed, bias))
    expected_context, expected_weights = textbook(*tensors, scaling=0.3)

    context, weights = scaled_dot_product_attention(query, key, value, mask, **options, scaling=0.3)

    torch.testing.assert_close(context.flatten(0, 1), expected_context, rtol=0, atol=1e-5)
    torch.testing.assert_close(weights.flatten(0, 1), expected_weights, rtol=0, atol=1e-6)


@settings(max_examples=40)
@given(sizes, seeds, st.sampled_from([None, "boolean", "-inf", "lowest"]), st.sampled_from([(), (3,), (2, 1, 2)]))
def test_function_of_torch(sizes, seed, kind, lead):
    query, key, value, visible = draw_tensors(lead, **sizes, seed=seed, dtype=torch.float64)
    visible[..., 0] = True  # torch's function promises nothing for a query that sees no key
    mask = None if kind is None else as_mask(visible, kind, torch.float64)
    leaves = [x.requires_grad_() for x in (query, key, value)]
    upstream = torch.randn(*query.shape[:-1], value.shape[-1], dtype=torch.float64)
    expected = nn.functional.scaled_dot_product_attention(*leaves, attn_mask=mask)
    expected_gradients = torch.autograd.grad(expected, leaves, upstream)
    context, _ = scaled_dot_product_attention(*leaves, mask)
    gradients = torch.autograd.grad(context, leaves, upstream)
    torch.testing.assert_close(context, expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(gradients, expected_gradients, rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", ["boolean", "-inf", "lowest", "query_mask", "key_mask"])
def test_hidden_tokens_have_no_part_forward_or_backward(kind, dtype):
    query, key, value, visible = draw_tensors((2, 3), 4, 5, 8, 6, dtype=dtype)
    visible[:] = True
    if kind == "query_mask":
        visible[0, :, 2] = False
        masks = {"query_mask": visible[..., 0].expand(2, 3, 4)}
    elif kind == "key_mask":
        visible[0] = False  # a sequence of nothing but padding
        visible[1, ..., 3:] = False
        masks = {"key_mask": visible[:, :, 0].expand(2, 3, 5)}
    else:
        visible[0, :, 2] = False  # one query that sees no key, one key that no query sees
        visible[1, ..., 3] = False
        masks = {"mask": as_mask(visible, kind, dtype)}
    leaves = [x.requires_grad_() for x in (query, key, value)]

    with torch.autograd.set_detect_anomaly(True, check_nan=True):
        context, weights = scaled_dot_product_attention(*leaves, **masks)
        (context.float().square().sum() + weights.float().square().sum()).backward()

    assert context.dtype == weights.dtype == dtype
    sees = visible.any(dim=-1).expand(2, 3, 4)
    seen = visible.any(dim=-2).expand(2, 3, 5)
    assert not context[~sees].any()
    assert not weights[~visible.expand_as(weights)].any()
    for leaf, used in ((query, sees), (key, seen), (value, seen)):
        assert leaf.grad.isfinite().all()
        assert not leaf.grad[~used].any()
        assert leaf.grad[used].any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision(dtype):
    *tensors, visible = draw_tensors((2, 2), 6, 7, 8, 8, dtype=dtype)
    actual = scaled_dot_product_attention(*tensors, visible)
    exact = scaled_dot_product_attention(*(x.double() for x in tensors), visible)
    # A rounding each of the scores, which reach 4, of the weights, up to 1, and of the context, up to 4.
    tolerance = 8 * torch.finfo(dtype).eps
    torch.testing.assert_close([x.double() for x in actual], [*exact], rtol=0, atol=tolerance)


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
