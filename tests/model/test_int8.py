"""`optimize_for_inference("int8")`: close to the float model, and its calibration. `test_inference` has copies,
memory and a missing library."""

import pickle
from itertools import accumulate

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import nn

from modeling_scratchbert import ScratchBertForMaskedLM, ScratchBertModel
from support.models import inputs_for
from support.prepacked import TIED, assert_equal_tensors, compute, every_model, layers, make, needs_library, product

pytestmark = needs_library


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
def test_formula(rows, width, heights, is_smoothed, seed):
    generator = torch.Generator().manual_seed(seed)
    x = 3 * torch.randn(2, rows, width, generator=generator) + 1
    weights = [torch.randn(height, width, generator=generator) for height in heights]
    bias = torch.randn(sum(heights), generator=generator)
    factors = torch.rand(width, generator=generator) + 0.5 if is_smoothed else None
    matrix = product(weights, bias.split(heights), torch.int8, factors)
    used = torch.cat([torch.arange(h) + start for h, start in zip(heights, starts_of(heights), strict=True)])
    actual = matrix(x)[..., used]
    difference = (actual - fake_quantized(x, torch.cat(weights), bias, factors)).abs()
    # Where a number lies between two steps, float32 may round it to the other one.
    step = x.abs().amax() * 2 / 255 * torch.cat(weights).abs().amax()
    assert difference.max() <= 1.1 * step
    assert difference.mean() <= 0.05 * step
    exact = nn.functional.linear(x, torch.cat(weights), bias)
    assert (actual - exact).abs().max() <= width * step


def test_rows_that_are_constant_zero_or_not_finite():
    weight, bias = torch.randn(40, 8), torch.randn(40)
    matrix = product([weight], [bias], torch.int8)
    rows = torch.tensor([[0.0] * 8, [3.0] * 8, [-1e-30] * 8])
    torch.testing.assert_close(matrix(rows), nn.functional.linear(rows, weight, bias), rtol=0, atol=0.2)
    for value in (float("nan"), float("inf")):
        assert not matrix(torch.full((1, 8), value)).isfinite().all()
    assert matrix(rows[:1])[0].allclose(bias)
    assert product([torch.zeros(40, 8)], [bias], torch.int8)(rows).allclose(bias)


@every_model
def test_outputs_are_close_to_those_in_float32(head, fields):
    model, inputs = make(head, **fields), inputs_for(head)
    expected = compute(model, inputs)
    model.optimize_for_inference("int8")
    differences = []
    for name, tensor in compute(model, inputs).items():
        if tensor.is_floating_point():
            assert tensor.dtype == expected[name].dtype
            differences.append((tensor - expected[name]).norm() / expected[name].norm().clamp(min=1e-3))
    assert 0 < max(differences) < 0.1


def test_dtype_between_the_layers_is_that_of_the_model():
    model, inputs = make("Model").to(torch.bfloat16), inputs_for("Model")
    expected = compute(model, inputs)["last_hidden_state"].float()
    actual = compute(model.optimize_for_inference("int8"), inputs)["last_hidden_state"]
    assert actual.dtype == torch.bfloat16
    assert (actual.float() - expected).norm() / expected.norm() < 0.1


def test_size_of_the_blocks():
    model = make("Model", hidden_size=128, intermediate_size=512)
    size = len(pickle.dumps(model.encoder))
    assert len(pickle.dumps(model.optimize_for_inference("int8").encoder)) < 0.3 * size


def test_small_layers_stay_in_float32():
    model = make("ForSequenceClassification", num_labels=3)
    dense, classifier = model.model.pooler.dense, model.classifier
    model.optimize_for_inference("int8")
    x = torch.randn(5, 36)
    torch.testing.assert_close(model.classifier(x), classifier(x))
    assert 1e-3 < (model.model.pooler.dense(x) - dense(x)).abs().max() < 0.1


# ---------------------------------------------------------------------------------------------------------------------
# Calibration


def test_factors_of_the_formula(tmp_path):
    model, inputs = make("Model"), inputs_for("Model")
    attention, seen = model.encoder.blocks[0].attention, []
    hook = attention.query.register_forward_hook(lambda layer, args, output: seen.append(args[0]))
    tokens = {**inputs, "attention_mask": torch.ones_like(inputs["input_ids"])}
    model(**tokens)
    hook.remove()
    weights = torch.cat([attention.query.weight, attention.key.weight, attention.value.weight])
    expected = (seen[0].flatten(0, -2).abs().amax(dim=0) / weights.abs().amax(dim=0)).sqrt()
    factors = factors_of(model.optimize_for_inference("int8", calibration=[tokens]), tmp_path)
    layers = ("attention.query", "feed_forward.intermediate")
    assert set(factors) == {f"encoder.blocks.{i}.{name}" for i in range(2) for name in layers}
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


def test_padding_and_earlier_calls_do_not_change_the_factors(tmp_path):
    """A call that returns attention weights leaves hooks of transformers."""
    ids = inputs_for("Model")["input_ids"]
    ones = torch.ones_like(ids)
    padded = {"input_ids": torch.cat([ids, 3 * ones], 1), "attention_mask": torch.cat([ones, 0 * ones], 1)}
    model, fresh = make("Model"), make("Model")
    model(ids, output_attentions=True)
    model.optimize_for_inference("int8", calibration=[padded])
    fresh.optimize_for_inference("int8", calibration=[{"input_ids": ids}])
    assert_equal_tensors(factors_of(model, tmp_path), factors_of(fresh, tmp_path))


@pytest.mark.parametrize(
    ("head", "fields"), [("Model", {}), ("ForConditionalGeneration", {}), ("ForConditionalGeneration", TIED)]
)
def test_factors_from_a_file(tmp_path, head, fields):
    model, fresh, inputs = make(head, **fields), make(head, **fields), inputs_for(head)
    model.optimize_for_inference("int8", calibration=[inputs]).save_calibration(tmp_path / "factors")
    fresh.optimize_for_inference("int8", calibration=str(tmp_path / "factors"))
    assert_equal_tensors(compute(fresh, inputs), compute(model, inputs))


def test_factors_fit_any_head(tmp_path):
    base = make("Model")
    base.save_pretrained(tmp_path)
    factors = factors_of(base.optimize_for_inference("int8"), tmp_path)
    head = ScratchBertForMaskedLM.from_pretrained(tmp_path)
    head.optimize_for_inference("int8", calibration=tmp_path / "factors")
    assert_equal_tensors(factors_of(head, tmp_path), factors)


# ---------------------------------------------------------------------------------------------------------------------
# Invalid arguments


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A folder with files of factors that are invalid for `make("Model")`, named after what is wrong."""
    folder = tmp_path_factory.mktemp("factors")
    factors = factors_of(make("Model").optimize_for_inference("int8"), folder)
    for value in ("nan", "inf", "0"):
        save_file({**factors, "encoder.blocks.1.attention.query": torch.full((36,), float(value))}, folder / value)
    del factors["encoder.blocks.1.attention.query"]
    save_file(factors, folder / "missing")
    (folder / "damaged").write_bytes(b"no factors")
    return folder


IDS = {"input_ids": torch.arange(6).view(2, 3)}
# The dtype, the calibration (for text, a file of that name), the error and what it names.
INVALID = [
    *((dtype, None, ValueError, "dtype") for dtype in ("float32", torch.int8)),
    (None, [IDS], ValueError, "calibration"),
    ("int8", [], ValueError, "calibration"),
    ("int8", [{"input_ids": IDS["input_ids"][:0]}], ValueError, "calibration"),
    ("int8", [IDS, ["a text"]], TypeError, "batch 2"),
    ("int8", [IDS, {"inputs_embeds": torch.full((1, 3, 36), float("nan"))}], ValueError, "batch 2"),
    *(("int8", name, ValueError, "encoder.blocks.1.attention.query") for name in ("nan", "inf", "0", "missing")),
    ("int8", "damaged", ValueError, "damaged"),
    ("int8", "absent", OSError, "absent"),
]


@pytest.mark.parametrize(("dtype", "calibration", "error", "name"), INVALID, ids=str)
def test_invalid_arguments_change_nothing(files, dtype, calibration, error, name):
    model = make("Model").train()
    model.encoder.blocks[1].eval()
    training = [module.training for module in model.modules()]
    with pytest.raises(error, match=name):
        model.optimize_for_inference(
            dtype, calibration=files / calibration if isinstance(calibration, str) else calibration
        )
    assert not layers(model)
    assert [module.training for module in model.modules()] == training
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_models_that_cannot_be_int8(tmp_path):
    model = ScratchBertModel(make("Model").config)
    with pytest.raises(RuntimeError, match="int8"):
        model.save_calibration(tmp_path / "none")
    model.encoder.blocks[1].attention_norm.weight.data[3] = float("nan")
    with pytest.raises(ValueError, match="attention_norm"):
        model.optimize_for_inference("int8")
    assert not layers(model)
