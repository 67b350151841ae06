"""`optimize_for_inference("int8")`: close to the float model, a quarter of its memory, and errors for what it lacks."""

import copy
import gc
import pickle
import weakref
from itertools import accumulate

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import nn
from transformers.utils import logging

from modeling_scratchbert import ScratchBertForMaskedLM, ScratchBertModel
from modeling_scratchbert.cpu import optimization
from modeling_scratchbert.cpu.library import find_library
from support.comparison import assert_same_tensors
from support.models import inputs_for
from support.prepacked import TIED, assert_equal_tensors, compute, every_model, layers, make, matrices_of, product

pytestmark = pytest.mark.skipif(not find_library(), reason="the library in C++ is not in use")


def factors_of(model, path) -> dict[str, torch.Tensor]:
    model.save_calibration(path / "factors")
    return load_file(path / "factors")


def fake_quantized(x, weight, bias, factors=None):
    """The formula in float64: each row of the input and of the weight rounded to 256 and 255 steps."""
    x, weight = x.double(), weight.double()
    if factors is not None:
        x, weight = x / factors.double(), weight * factors.double()
    weight_scale = weight.abs().amax(dim=1, keepdim=True) / 127
    low, high = x.amin(dim=-1, keepdim=True).clamp(max=0), x.amax(dim=-1, keepdim=True).clamp(min=0)
    scale = torch.where(high > low, (high - low) / 255, 1)
    zero = (-low / scale).round()
    steps = (x / scale + zero).round().clamp(0, 255) - zero
    return nn.functional.linear(steps * scale, (weight / weight_scale).round() * weight_scale, bias.double())


def starts_of(heights: list[int]) -> list[int]:
    """The first output of each weight in a matrix of several, each of which ends in zeros."""
    return [0, *accumulate(height + -height % 32 for height in heights)][:-1]


@given(
    rows=st.integers(1, 40),
    width=st.integers(1, 70),
    heights=st.lists(st.integers(1, 40), min_size=1, max_size=3),
    is_smoothed=st.booleans(),
    seed=st.integers(0, 9),
)
def test_the_formula(rows, width, heights, is_smoothed, seed):
    generator = torch.Generator().manual_seed(seed)
    x = 3 * torch.randn(2, rows, width, generator=generator) + 1
    weights = [torch.randn(height, width, generator=generator) for height in heights]
    bias = torch.randn(sum(heights), generator=generator)
    factors = torch.rand(width, generator=generator) + 0.5 if is_smoothed else None
    matrix = product(weights, bias.split(heights), torch.int8, factors)
    used = torch.cat([torch.arange(h) + start for h, start in zip(heights, starts_of(heights), strict=True)])
    actual = matrix(x)[..., used]
    expected = fake_quantized(x, torch.cat(weights), bias, factors)
    # Where a number lies between two steps, float32 may round it to the other one.
    step = x.abs().amax() * 2 / 255 * torch.cat(weights).abs().amax()
    assert (actual - expected).abs().max() <= 1.1 * step
    assert (actual - expected).abs().mean() <= 0.05 * step
    exact = nn.functional.linear(x, torch.cat(weights), bias)
    assert (actual - exact).abs().max() <= width * step
    assert torch.equal(pickle.loads(pickle.dumps(matrix))(x)[..., used], actual)


@pytest.mark.parametrize("width", [36, 37, 38, 39])
@pytest.mark.parametrize("shape", [(0,), (), (1, 1), (2, 0), (300,)])
def test_any_shape(shape, width):
    matrix, x = product([torch.randn(5, width)], [None], torch.int8), torch.randn(*shape, width)
    assert matrix(x).shape == (*shape, 5)
    transposed = torch.randn(*shape, width, 3).transpose(-1, -2)
    by_row = [matrix(row.clone()) for row in transposed.reshape(-1, transposed.shape[-1])]
    assert torch.equal(matrix(transposed).reshape(-1, 5), torch.stack([*by_row, torch.ones(5)])[:-1])


def test_rows_that_are_constant_zero_or_no_numbers():
    weight, bias = torch.randn(40, 8), torch.randn(40)
    matrix = product([weight], [bias], torch.int8)
    rows = torch.tensor([[0.0] * 8, [3.0] * 8, [-1e-30] * 8])
    torch.testing.assert_close(matrix(rows), nn.functional.linear(rows, weight, bias), rtol=0, atol=0.2)
    for value in (float("nan"), float("inf")):
        assert not matrix(torch.full((1, 8), value)).isfinite().all()
    assert matrix(rows[:1])[0].allclose(bias)
    assert product([torch.zeros(40, 8)], [bias], torch.int8)(rows).allclose(bias)


@every_model
def test_close_to_float(head, fields):
    model, inputs = make(head, **fields), inputs_for(head)
    expected = compute(model, inputs)
    assert model.optimize_for_inference("int8") is model
    assert any(matrix.dtype == torch.int8 for matrix in matrices_of(model))
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert not any(module.training for module in model.modules())
    for name, tensor in compute(model, inputs).items():
        if tensor.is_floating_point():
            assert tensor.dtype == expected[name].dtype
            difference = (tensor - expected[name]).norm() / expected[name].norm().clamp(min=1e-3)
            assert 0 < difference < 0.1 or torch.equal(tensor, expected[name]), name


def test_bfloat16_between_the_layers():
    model, inputs = make("Model").to(torch.bfloat16), inputs_for("Model")
    expected = compute(model, inputs)["last_hidden_state"].float()
    actual = compute(model.optimize_for_inference("int8"), inputs)["last_hidden_state"]
    assert actual.dtype == torch.bfloat16
    assert (actual.float() - expected).norm() / expected.norm() < 0.1


def test_small_layers_stay_float():
    model = make("ForSequenceClassification", num_labels=3).optimize_for_inference("int8")
    assert model.classifier.matrix.dtype == torch.float32
    assert model.model.encoder.blocks[0].query_key_value.dtype == torch.int8


def test_generates():
    model = make("ForConditionalGeneration")
    batch = {name: inputs_for("Model")[name] for name in ("input_ids", "attention_mask")}
    model.optimize_for_inference("int8")
    options = {"max_new_tokens": 7, "min_new_tokens": 7, "do_sample": False}
    cached, not_cached = (model.generate(**batch, **options, use_cache=use) for use in (True, False))
    assert torch.equal(cached, not_cached)


@every_model
@pytest.mark.parametrize("way", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_hold_int8(head, fields, way):
    model, inputs = make(head, **fields), inputs_for(head)
    model.optimize_for_inference("int8", calibration=[inputs])
    again = way(model)
    found, copied = map(matrices_of, (model, again))
    assert copied == found if way is copy.deepcopy else len(copied) == len(found)
    assert_equal_tensors(compute(again, inputs), compute(model, inputs))
    if fields.get("tie_encoder_decoder"):
        encoder, decoder = again.get_encoder(), again.get_decoder()
        assert encoder.encoder.blocks[0].query_key_value is decoder.encoder.blocks[0].query_key_value


def test_no_float_copy_in_memory():
    model = make("ForMaskedLM", tie_word_embeddings=False)
    weights = [weakref.ref(module.weight) for module in model.modules() if type(module) is nn.Linear]
    model.optimize_for_inference("int8")
    gc.collect()
    assert not any(weight() is not None for weight in weights)
    assert not list(model.model.encoder.parameters())
    large = make("Model", hidden_size=128, intermediate_size=512)
    size = len(pickle.dumps(large.encoder))
    assert len(pickle.dumps(large.optimize_for_inference("int8").encoder)) < 0.3 * size


# --- what it refuses


def test_other_dtypes_and_calibrations_are_refused(tmp_path):
    model, inputs = make("Model").optimize_for_inference("int8"), inputs_for("Model")
    expected = compute(model, inputs)
    for dtype, calibration in ((torch.bfloat16, None), ("int8", tmp_path / "absent"), ("int8", [inputs])):
        with pytest.raises(RuntimeError, match=r"optimize_for_inference\(\)"):
            model.optimize_for_inference(dtype, calibration=calibration)
    assert_equal_tensors(compute(model, inputs), expected)


@pytest.mark.parametrize("dtype", ["float32", torch.float16, torch.int8, 8])
def test_unknown_dtypes_are_refused(dtype):
    with pytest.raises(ValueError, match=r"dtype is .*torch.float32, torch.bfloat16"):
        make("Model").optimize_for_inference(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_dtype_converts_the_model_first(dtype):
    model, inputs = make("Model"), inputs_for("Model")
    expected = compute(copy.deepcopy(model).to(dtype).optimize_for_inference(), inputs)
    assert_equal_tensors(compute(model.optimize_for_inference(dtype), inputs), expected)
    assert model.dtype == dtype


def test_without_the_library_it_keeps_the_dtype_and_says_so(monkeypatch, said):
    logging.logging.Logger.warning_once.cache_clear()
    monkeypatch.setattr(optimization, "find_library", lambda: None)
    model, inputs = make("Model"), inputs_for("Model")
    expected = compute(model, inputs)
    model.optimize_for_inference("int8")
    assert not any(matrix.dtype == torch.int8 for matrix in matrices_of(model))
    assert_same_tensors(compute(model, inputs), expected)
    assert [line for line in said() if "C++" in line and "torch.float32" in line]


def test_weights_that_are_no_numbers_are_refused():
    model = make("Model")
    model.encoder.blocks[1].attention_norm.weight.data[3] = float("nan")
    with pytest.raises(ValueError, match=r"encoder.blocks.1.attention_norm.weight .*finite"):
        model.optimize_for_inference("int8")
    assert not layers(model)


# --- calibration


def test_factors_are_those_of_the_formula(tmp_path):
    model, inputs = make("Model"), inputs_for("Model")
    block, seen = model.encoder.blocks[0], []
    hook = block.attention.query.register_forward_hook(lambda layer, args, output: seen.append(args[0]))
    tokens = {**inputs, "attention_mask": torch.ones_like(inputs["input_ids"])}
    with torch.no_grad():
        model(**tokens)
    hook.remove()
    largest = seen[0].flatten(0, -2).abs().amax(dim=0)
    attention = block.attention
    of_weights = torch.stack(
        [layer.weight.abs().amax(0) for layer in (attention.query, attention.key, attention.value)]
    )
    expected = (largest / of_weights.amax(0)).sqrt()
    factors = factors_of(model.optimize_for_inference("int8", calibration=[tokens]), tmp_path)
    assert set(factors) == {
        f"encoder.blocks.{i}.{name}" for i in range(2) for name in ("attention.query", "feed_forward.intermediate")
    }
    torch.testing.assert_close(factors["encoder.blocks.0.attention.query"], expected.detach())


def test_random_ids_are_the_default(tmp_path):
    calibrations = (None, None, [inputs_for("ForMaskedLM")])
    one, again, other = (
        factors_of(make().optimize_for_inference("int8", calibration=each), tmp_path) for each in calibrations
    )
    assert_equal_tensors(one, again)
    name = "encoder.blocks.1.attention.query"
    assert not torch.equal(one[name], other[name])
    assert not torch.equal(one[name], torch.ones(36))


def test_padding_is_not_calibrated(tmp_path):
    ids = inputs_for("Model")["input_ids"]
    padded = {
        "input_ids": torch.cat([ids, torch.full_like(ids, 3)], dim=1),
        "attention_mask": torch.cat([torch.ones_like(ids), torch.zeros_like(ids)], dim=1),
    }
    found = [
        factors_of(make("Model").optimize_for_inference("int8", calibration=[batch]), tmp_path)
        for batch in (padded, {"input_ids": ids})
    ]
    assert_equal_tensors(*found)


def test_what_ran_before_changes_no_number(tmp_path):
    """A forward pass with attention weights leaves hooks of transformers."""
    model, fresh, inputs = make("Model"), make("Model"), inputs_for("Model")
    model(**inputs, output_attentions=True)
    batch = {**inputs, "attention_mask": inputs["attention_mask"].tril()}
    for each in (model, fresh):
        each.optimize_for_inference("int8", calibration=[batch])
    torch.testing.assert_close(factors_of(model, tmp_path), factors_of(fresh, tmp_path))
    assert_same_tensors(compute(model, inputs), compute(fresh, inputs))
    again = make("Model")
    again(**inputs, output_attentions=True)
    again.optimize_for_inference("int8", calibration=tmp_path / "factors")  # is accepted
    assert_equal_tensors(compute(again, inputs), compute(fresh, inputs))


def test_calibration_helps_where_one_channel_is_large():
    torch.manual_seed(1)
    weight, x = torch.randn(64, 64), torch.randn(256, 64)
    x[:, 5] *= 50
    x[::2, 5] *= -1
    exact = nn.functional.linear(x, weight)
    factors = (x.abs().amax(0) / weight.abs().amax(0)).sqrt()
    errors = [(product([weight], [None], torch.int8, each)(x) - exact).norm() for each in (None, factors)]
    assert errors[1] < 0.5 * errors[0]


def test_factors_from_a_file_for_any_head(tmp_path):
    base, inputs = make("Model"), inputs_for("Model")
    base.save_pretrained(tmp_path)
    file = tmp_path / "factors"
    factors = factors_of(base.optimize_for_inference("int8", calibration=[inputs]), tmp_path)
    assert file.stat().st_size < 20_000
    again = ScratchBertModel.from_pretrained(tmp_path).optimize_for_inference("int8", calibration=file)
    assert_equal_tensors(compute(again, inputs), compute(base, inputs))
    head = ScratchBertForMaskedLM.from_pretrained(tmp_path).optimize_for_inference("int8", calibration=str(file))
    assert_equal_tensors(factors_of(head, tmp_path), factors)
    assert head.model.encoder.blocks[0].query_key_value.factors is not None


@pytest.mark.parametrize("fields", [{}, TIED], ids=str)
def test_the_factors_of_an_encoder_decoder(tmp_path, fields):
    model, inputs = make("ForConditionalGeneration", **fields), inputs_for("ForConditionalGeneration")
    model.optimize_for_inference("int8").save_calibration(tmp_path / "factors")
    fresh = make("ForConditionalGeneration", **fields)
    fresh.optimize_for_inference("int8", calibration=tmp_path / "factors")
    assert_equal_tensors(compute(fresh, inputs), compute(model, inputs))


def test_bad_calibration_is_refused_before_anything_changed(tmp_path):
    model, inputs = make("Model"), inputs_for("Model")
    with pytest.raises(RuntimeError, match="no int8 layers"):
        model.save_calibration(tmp_path / "none")
    factors = factors_of(make("Model").optimize_for_inference("int8"), tmp_path)
    name = "encoder.blocks.1.attention.query"
    save_file({each: tensor for each, tensor in factors.items() if each != name}, tmp_path / "other")
    for value in (float("nan"), float("inf"), 0.0):
        save_file({**factors, name: torch.full((36,), value)}, tmp_path / str(value))
    (tmp_path / "damaged").write_bytes(b"no factors")
    empty = {each: tensor[:0] for each, tensor in inputs.items()}
    nan = {"inputs_embeds": torch.full((1, 3, 36), float("nan"))}
    model.train()
    model.encoder.blocks[1].eval()
    training = [module.training for module in model.modules()]
    for calibration, error, match in [
        ([], ValueError, "calibration has no tokens"),
        ([inputs, ["a text"]], TypeError, "calibration has a list as batch 2"),
        ([empty], ValueError, "calibration has no tokens"),
        ([inputs, nan], ValueError, "NaN or infinity in batch 2"),
        ([{"input_ids": torch.tensor([[999]])}], ValueError, "999"),
        *((tmp_path / str(value), ValueError, f"invalid factors for {name}") for value in ("nan", "inf", 0.0)),
        (tmp_path / "other", ValueError, f"other has missing, .* factors for {name}"),
        (tmp_path / "damaged", ValueError, "damaged"),
        (tmp_path / "absent", OSError, "absent"),
    ]:
        with pytest.raises(error, match=match):
            model.optimize_for_inference("int8", calibration=calibration)
        assert not layers(model)
        assert [module.training for module in model.modules()] == training
        assert not any(module._forward_pre_hooks for module in model.modules())
    with pytest.raises(ValueError, match="calibration was given for dtype None"):
        model.optimize_for_inference(calibration=[inputs])
