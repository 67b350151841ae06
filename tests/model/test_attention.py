"""Attention against the textbook, against numbers worked out by others, and against PyTorch's own layer."""

import json
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from modeling_scratchbert.attention import MultiHeadAttention, eager_attention, scaled_dot_product_attention
from support.folders import DATA
from support.models import randomise, tiny_config

WORKED = json.loads((DATA / "worked_attention.json").read_text(encoding="utf-8"))

# The same examples in every run: a test that fails now and then tells nothing.
some = settings(max_examples=40)


# ---------------------------------------------------------------------------------------------------------------------
# The worked example


def interface(query, key, value, scaling):
    """`eager_attention` for one sentence and one head, in the form of `scaled_dot_product_attention`."""
    heads = (x[None, None] for x in (query, key, value))
    context, weights = eager_attention(None, *heads, attention_mask=None, scaling=scaling)
    return context[0, :, 0], weights[0, 0]


def formula(query, key, value, scaling):
    return scaled_dot_product_attention(query, key, value, scaling=scaling)


def assert_four_digits(actual, printed, roundings=1):
    """`printed` has four digits after the point, so each rounding hides up to half a unit of the fourth."""
    torch.testing.assert_close(actual, torch.tensor(printed), rtol=0, atol=roundings * 0.5e-4 + 1e-6)


def assert_scores(weights, printed, scaling=1.0):
    """The softmax drops what is common to a row, so weights tell the scores up to that."""
    printed = torch.tensor(printed)
    scores = weights.log() / scaling
    assert_four_digits(scores - scores[:, :1], (printed - printed[:, :1]).tolist(), roundings=2)


@pytest.mark.parametrize("attention", [formula, interface])
def test_worked_example_without_weights(attention):
    expected = WORKED["unscaled_without_weights"]
    x = torch.tensor(WORKED["embeddings"])
    assert x.shape == (len(WORKED["tokens"]), 3)

    context, weights = attention(x, x, x, scaling=1.0)

    assert_four_digits(x @ x.T, expected["scores"])
    assert_scores(weights, expected["scores"])
    assert_four_digits(weights, expected["weights"])
    assert_four_digits(context, expected["contexts"])


@pytest.mark.parametrize("attention", [formula, interface])
def test_worked_example_with_weights(attention):
    expected = WORKED["scaled_with_weights"]
    x = torch.tensor(WORKED["embeddings"])
    # The file prints the matrices to four digits; its results come from all the digits of the same random numbers.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(123)
        matrices = {name: torch.rand(3, 2) for name in ("W_query", "W_key", "W_value")}
    for name, matrix in matrices.items():
        assert_four_digits(matrix, expected[name])
    query, key, value = (x @ matrix for matrix in matrices.values())

    context, weights = attention(query, key, value, scaling=None)

    assert_four_digits(query @ key.T, expected["scores"])
    assert_scores(weights, expected["scores"], scaling=2**-0.5)
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


sizes = st.fixed_dictionaries(
    {name: st.integers(1, 5) for name in ("batch", "heads", "queries", "keys", "width", "value_width")}
)
seeds = st.integers(0, 2**31)
hiding = st.sampled_from(["boolean", "-inf", "lowest"])


def draw_tensors(sizes, seed, dtype=torch.float32):
    """Random query, key and value, and a random boolean mask that may hide everything from a query."""
    generator = torch.Generator().manual_seed(seed)
    lead = (sizes["batch"], sizes["heads"])
    query = torch.randn(*lead, sizes["queries"], sizes["width"], generator=generator).to(dtype)
    key = torch.randn(*lead, sizes["keys"], sizes["width"], generator=generator).to(dtype)
    value = torch.randn(*lead, sizes["keys"], sizes["value_width"], generator=generator).to(dtype)
    visible = torch.rand(sizes["batch"], 1, sizes["queries"], sizes["keys"], generator=generator) < 0.6
    return query, key, value, visible


def as_mask(visible, kind, dtype=torch.float32):
    """The boolean mask `visible` as it is, or as numbers to add to the scores."""
    if kind == "boolean":
        return visible
    hidden = -math.inf if kind == "-inf" else torch.finfo(dtype).min
    return torch.zeros(visible.shape, dtype=dtype).masked_fill(~visible, hidden)


@some
@given(sizes, seeds, hiding, st.sampled_from([None, 1.0, 0.3]), st.tuples(st.booleans(), st.booleans(), st.booleans()))
def test_equals_the_textbook(sizes, seed, kind, scaling, given_masks):
    query, key, value, visible = draw_tensors(sizes, seed)
    generator = torch.Generator().manual_seed(seed + 1)
    # Ones will do for True.
    query_mask, key_mask = ((torch.rand(x.shape[:-1], generator=generator) < 0.7).long() for x in (query, key))
    bias = torch.randn(visible.shape, generator=generator)
    with_mask, with_query_mask, with_key_mask = given_masks

    allowed = torch.ones(*query.shape[:-1], key.shape[-2], dtype=torch.bool)
    added = torch.zeros(allowed.shape, dtype=torch.float64)
    mask = None
    if with_mask:
        allowed = allowed & visible
        mask = as_mask(visible, kind)
        if kind != "boolean":  # numbers hide some keys and shift the scores of others
            mask, added = mask + bias, added + bias
    if with_query_mask:
        allowed = allowed & query_mask.bool()[..., :, None]
    if with_key_mask:
        allowed = allowed & key_mask.bool()[..., None, :]
    expected_context, expected_weights = textbook(
        *(x.flatten(0, 1) for x in (query, key, value, allowed, added)),
        scaling=scaling or 1 / math.sqrt(query.shape[-1]),
    )

    context, weights = scaled_dot_product_attention(
        query,
        key,
        value,
        mask,
        query_mask=query_mask if with_query_mask else None,
        key_mask=key_mask if with_key_mask else None,
        scaling=scaling,
    )

    torch.testing.assert_close(context.flatten(0, 1), expected_context, rtol=0, atol=1e-5)
    torch.testing.assert_close(weights.flatten(0, 1), expected_weights, rtol=0, atol=1e-6)
    sees = allowed.any(dim=-1)
    torch.testing.assert_close(weights.sum(dim=-1), sees.float(), rtol=0, atol=1e-6)
    assert not context[~sees].any()


@some
@given(sizes, seeds, st.sampled_from([(), (1,), (3, 1), (2, 1, 2)]))
def test_any_leading_dimensions(sizes, seed, lead):
    query, key, value, visible = (x[0, 0] for x in draw_tensors(sizes, seed))
    expected = scaled_dot_product_attention(query, key, value, visible)
    many = (x.expand(*lead, *x.shape) for x in (query, key, value))
    for actual, single in zip(scaled_dot_product_attention(*many, visible), expected, strict=True):
        assert actual.shape == (*lead, *single.shape)
        torch.testing.assert_close(actual, single.expand_as(actual), rtol=0, atol=1e-6)


@some
@given(sizes, seeds, st.sampled_from([None, "boolean", "-inf", "lowest"]), st.sampled_from([None, 0.7]))
def test_equals_torchs_own_function(sizes, seed, kind, scaling):
    query, key, value, visible = draw_tensors(sizes, seed, torch.float64)
    visible[..., 0] = True  # torch's function promises nothing for a query that sees no key
    mask = None if kind is None else as_mask(visible, kind, torch.float64)
    leaves = [x.requires_grad_() for x in (query, key, value)]
    upstream = torch.randn(*query.shape[:-1], value.shape[-1], dtype=torch.float64)

    expected = nn.functional.scaled_dot_product_attention(*leaves, attn_mask=mask, scale=scaling)
    expected_gradients = torch.autograd.grad(expected, leaves, upstream)
    context, _ = scaled_dot_product_attention(*leaves, mask, scaling=scaling)
    gradients = torch.autograd.grad(context, leaves, upstream)

    torch.testing.assert_close(context, expected, rtol=0, atol=1e-12)
    for gradient, expected_gradient in zip(gradients, expected_gradients, strict=True):
        torch.testing.assert_close(gradient, expected_gradient, rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", ["boolean", "-inf", "lowest", "query_mask", "key_mask"])
def test_what_is_hidden_has_no_part_forward_or_backward(kind, dtype):
    shape = {"batch": 2, "heads": 3, "queries": 4, "keys": 5, "width": 8, "value_width": 6}
    query, key, value, visible = draw_tensors(shape, 0, dtype)
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
@pytest.mark.parametrize("kind", ["boolean", "-inf", "lowest", "lowest of float32"])
def test_half_precision(kind, dtype):
    shape = {"batch": 2, "heads": 2, "queries": 6, "keys": 7, "width": 8, "value_width": 8}
    query, key, value, visible = draw_tensors(shape, 1, dtype)
    visible[0, :, 0] = False
    mask = as_mask(visible, kind, dtype)
    if kind == "lowest of float32":  # lower than any number of the scores' own dtype
        mask = as_mask(visible, "lowest", torch.float32)
    context, weights = scaled_dot_product_attention(query, key, value, mask)
    exact_context, exact_weights = textbook(
        *(x.double().flatten(0, 1) for x in (query, key, value)),
        visible.expand(-1, 2, -1, -1).flatten(0, 1),
        torch.zeros(4, 6, 7),
        scaling=1 / math.sqrt(8),
    )
    # A rounding each of the scores, which reach 4, of the weights, up to 1, and of the context, up to 4.
    tolerance = 8 * torch.finfo(dtype).eps
    torch.testing.assert_close(context.float().flatten(0, 1), exact_context, rtol=0, atol=tolerance)
    torch.testing.assert_close(weights.float().flatten(0, 1), exact_weights, rtol=0, atol=tolerance)


def test_dropout():
    shape = {"batch": 4, "heads": 4, "queries": 100, "keys": 100, "width": 8, "value_width": 8}
    query, key, value, _ = draw_tensors(shape, 2)
    probability = 0.3
    torch.manual_seed(0)
    _, clean = scaled_dot_product_attention(query, key, value)
    context, weights = scaled_dot_product_attention(query, key, value, dropout=probability)

    dropped = weights == 0
    deviation = math.sqrt(probability * (1 - probability) / dropped.numel())
    assert abs(dropped.float().mean().item() - probability) < 4 * deviation
    torch.testing.assert_close(weights[~dropped], clean[~dropped] / (1 - probability))
    torch.testing.assert_close(context, weights @ value)
    assert not torch.equal(weights, scaled_dot_product_attention(query, key, value, dropout=probability)[1])


# ---------------------------------------------------------------------------------------------------------------------
# torch's layer


def from_torch(theirs: nn.MultiheadAttention, config) -> MultiHeadAttention:
    """Our layer, with the weights of torch's, which keeps those of query, key and value in one matrix."""
    ours = MultiHeadAttention(config).eval()
    weights = dict(zip(("query", "key", "value"), theirs.in_proj_weight.chunk(3), strict=True))
    biases = dict(zip(("query", "key", "value"), theirs.in_proj_bias.chunk(3), strict=True))
    state = {f"{name}.weight": weight for name, weight in weights.items()}
    state |= {f"{name}.bias": bias for name, bias in biases.items()}
    state |= {"output.weight": theirs.out_proj.weight, "output.bias": theirs.out_proj.bias}
    ours.load_state_dict(state)
    return ours


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("source", ["self", "cross"])
@pytest.mark.parametrize("padding", [False, True])
@pytest.mark.parametrize("mask", [None, "boolean", "additive", "per head"])
def test_equals_torchs_multi_head_attention(mask, padding, source, implementation):
    config = tiny_config(hidden_size=40, num_attention_heads=5, attn_implementation=implementation)
    theirs = randomise(nn.MultiheadAttention(40, 5, batch_first=True)).eval()
    ours = from_torch(theirs, config)
    batch, heads, queries, keys = 3, 5, 6, 6 if source == "self" else 9
    x = torch.randn(batch, queries, 40)
    other = x if source == "self" else torch.randn(batch, keys, 40)
    # What each of the two wants: torch's booleans say what is hidden, ours what is seen.
    seen = torch.ones(batch, heads, queries, keys, dtype=torch.bool)
    their_mask = their_padding = None
    bias = torch.zeros(())
    if mask == "additive":
        their_mask = bias = torch.randn(queries, keys)
    elif mask is not None:
        shape = (batch, heads, queries, keys) if mask == "per head" else (queries, keys)
        allowed = (torch.rand(shape) < 0.6).index_fill(-1, torch.tensor(0), True)
        their_mask = ~allowed.flatten(0, 1) if mask == "per head" else ~allowed
        seen = seen & allowed
    if padding:
        real = torch.arange(keys) < torch.tensor([keys, 4, 1])[:, None]
        their_padding = torch.zeros(real.shape).masked_fill(~real, -math.inf) if mask == "additive" else ~real
        seen = seen & real[:, None, None, :]
    our_mask = seen if mask != "additive" else (bias + torch.zeros(seen.shape).masked_fill(~seen, -math.inf))

    expected, expected_weights = theirs(
        x, other, other, key_padding_mask=their_padding, attn_mask=their_mask, average_attn_weights=False
    )
    arguments = (x, our_mask if mask or padding else None, None if source == "self" else other)
    actual, told = ours(*arguments)
    with_maps, weights = ours(*arguments, output_attentions=True)

    for context in (actual, with_maps):
        torch.testing.assert_close(context, expected, rtol=0, atol=1e-6)
    torch.testing.assert_close(weights, expected_weights, rtol=0, atol=1e-6)
    assert (told is None) == (implementation == "sdpa")


def test_dropout_only_in_training():
    layer = MultiHeadAttention(tiny_config(attention_probs_dropout_prob=0.5, attn_implementation="eager"))
    x = torch.randn(2, 12, 32)
    dropped = layer.train()(x)[1] == 0
    assert 0.4 < dropped.float().mean() < 0.6
    torch.testing.assert_close(layer.eval()(x)[1].sum(dim=-1), torch.ones(2, 4, 12))


def test_a_mask_of_whole_numbers_is_refused_not_added():
    query = torch.randn(2, 3, 4)
    with pytest.raises(ValueError, match=r"^mask .*torch\.int64.*torch\.bool .*floating.*key_mask"):
        scaled_dot_product_attention(query, query, query, torch.tensor([1, 1, 0]))


@pytest.mark.parametrize("computed", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("given", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_the_lowest_number_of_the_masks_own_dtype_hides(given, computed):
    query = torch.randn(2, 3, 4).to(computed)
    mask = torch.zeros(3, 3, dtype=given)
    mask[:, 1] = torch.finfo(given).min
    mask[2] = torch.finfo(given).min
    context, weights = scaled_dot_product_attention(query, query, query, mask)
    visible = torch.tensor([[1, 0, 1], [1, 0, 1], [0, 0, 0]]).bool()
    expected = scaled_dot_product_attention(query, query, query, visible)
    assert torch.equal(weights, expected[1])
    assert torch.equal(context, expected[0])
    assert weights.isfinite().all()
