"""`optimize_for_inference("int8")`: close to the float model, a quarter of its memory, and errors for what it lacks."""

import copy
import gc
import pickle
import weakref

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from modeling_scratchbert import ScratchBertForMaskedLM, ScratchBertModel, inference, prepacking
from modeling_scratchbert.calibration import find_factors
from modeling_scratchbert.prepacking import PrepackedWeight, QuantizedWeight
from support.comparison import assert_same_tensors
from support.models import inputs_for
from support.prepacked import compute, every_model, layers, make, record_row_counts

pytestmark = pytest.mark.skipif(not prepacking.multiplies_int8(), reason="this CPU has no VNNI instructions")


def assert_equal_tensors(actual, expected):
    assert list(actual) == list(expected)
    assert all(torch.equal(actual[name], tensor) for name, tensor in expected.items())


def fake_quantized(x, weight, bias, factors=None):
    """The formula in float64: each row of the input and of the weight rounded to 256 and 255 steps."""
    x, weight = x.double(), weight.double()
    if factors is not None:
        x, weight = x / factors.double(), weight * factors.double()
    weight_scale = weight.abs().amax(dim=1, keepdim=True) / 127
    low, high = x.amin(dim=-1, keepdim=True), x.amax(dim=-1, keepdim=True)
    scale = (high - low) / 255
    steps = torch.where(scale > 0, ((x - low) / scale).round(), 0)
    return nn.functional.linear(steps * scale + low, (weight / weight_scale).round() * weight_scale, bias.double())


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
    matrix = QuantizedWeight(weights, factors)
    actual = matrix.linear(x, bias, None)
    expected = fake_quantized(x, torch.cat(weights), bias, factors)
    # Where a number lies between two steps, float32 may round it to the other one.
    step = x.abs().amax() * 2 / 255 * torch.cat(weights).abs().amax()
    assert (actual - expected).abs().max() <= 1.1 * step
    assert (actual - expected).abs().mean() <= 0.05 * step
    exact = nn.functional.linear(x, torch.cat(weights), bias)
    assert (actual - exact).abs().max() <= width * step
    gelu = matrix.linear(x, None, "tanh")
    torch.testing.assert_close(
        gelu, nn.functional.gelu(actual - bias, approximate="tanh"), rtol=1e-4, atol=1e-4 * max(1.0, exact.abs().max())
    )


@pytest.mark.parametrize("shape", [(0, 36), (36,), (1, 1, 36), (2, 0, 36), (300, 36)])
def test_any_shape(shape):
    matrix, x = QuantizedWeight([torch.randn(5, 36)]), torch.randn(shape)
    assert matrix.linear(x, torch.randn(5), None).shape == (*shape[:-1], 5)
    transposed = torch.randn(*shape[:-1], 36, 3).transpose(-1, -2)
    by_row = [matrix.linear(row.clone(), None, None) for row in transposed.reshape(-1, transposed.shape[-1])]
    assert torch.equal(matrix.linear(transposed, None, None).reshape(-1, 5), torch.stack([*by_row, torch.ones(5)])[:-1])


def test_rows_that_are_constant_zero_or_no_numbers():
    weight, bias = torch.randn(40, 8), torch.randn(40)
    matrix = QuantizedWeight([weight])
    rows = torch.tensor([[0.0] * 8, [3.0] * 8, [-1e-30] * 8])
    torch.testing.assert_close(
        matrix.linear(rows, bias, None), nn.functional.linear(rows, weight, bias), rtol=0, atol=0.2
    )
    for value in (float("nan"), float("inf")):
        assert not matrix.linear(torch.full((1, 8), value), bias, None).isfinite().all()
    assert matrix.linear(rows[:1], bias, None)[0].allclose(bias)
    assert QuantizedWeight([torch.zeros(40, 8)]).linear(rows, bias, None).allclose(bias)


@every_model
def test_close_to_float(head, fields):
    model, inputs = make(head, **fields), inputs_for(head)
    expected = compute(model, inputs)
    assert model.optimize_for_inference("int8") is model
    assert any(layer.is_quantized for layer in layers(model))
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
    assert isinstance(model.classifier.prepacked, PrepackedWeight)
    assert isinstance(model.model.encoder.blocks[0].attention.query.prepacked, QuantizedWeight)


def test_generates():
    model = make("ForConditionalGeneration")
    batch = {name: inputs_for("Model")[name] for name in ("input_ids", "attention_mask")}
    model.optimize_for_inference("int8")
    options = {"max_new_tokens": 7, "min_new_tokens": 7, "do_sample": False}
    cached, not_cached = (model.generate(**batch, **options, use_cache=use) for use in (True, False))
    assert torch.equal(cached, not_cached)


def through_pickle(model):
    return pickle.loads(pickle.dumps(model))


@every_model
@pytest.mark.parametrize("way", [copy.deepcopy, through_pickle])
def test_copies_hold_int8(head, fields, way):
    model, inputs = make(head, **fields), inputs_for(head)
    model.optimize_for_inference("int8", calibration=[inputs])
    again = way(model)
    matrices, copies = ({layer.prepacked for layer in layers(each)} for each in (model, again))
    assert len(copies) == len(matrices)
    assert not copies & matrices
    assert_equal_tensors(compute(again, inputs), compute(model, inputs))
    if fields.get("tie_encoder_decoder"):
        encoder, decoder = again.get_encoder(), again.get_decoder()
        assert (
            encoder.encoder.blocks[0].attention.query.prepacked is decoder.encoder.blocks[0].attention.query.prepacked
        )


def test_no_float_copy_in_memory():
    model = make("ForMaskedLM", tie_word_embeddings=False)
    weights = [weakref.ref(module.weight) for module in model.modules() if type(module) is nn.Linear]
    model.optimize_for_inference("int8")
    gc.collect()
    assert not any(weight() is not None for weight in weights)
    size = sum(parameter.nbytes for parameter in model.model.encoder.parameters())
    assert size < 4 * 2 * (5 * 36 + 2 * (36 + 36) + 64 + 37 * 4)  # biases and layer norms
    large = make("Model", hidden_size=128, intermediate_size=512)
    size = len(pickle.dumps(large.encoder))
    assert len(pickle.dumps(large.optimize_for_inference("int8").encoder)) < 0.3 * size


def test_the_weight_of_a_layer_is_rounded():
    model = make("Model")
    weight = model.encoder.blocks[0].attention.key.weight.detach().clone()
    rounded = model.optimize_for_inference("int8").encoder.blocks[0].attention.key.weight
    assert rounded.shape == weight.shape
    assert 0 < (rounded - weight).abs().max() <= weight.abs().max() / 127


# --- what it refuses


@pytest.mark.parametrize("save", ["save_pretrained", "save_as_bert"])
def test_saving_is_refused(tmp_path, save):
    model = make("Model").optimize_for_inference("int8")
    with pytest.raises(RuntimeError, match=r'int8.*before optimize_for_inference\("int8"\)'):
        getattr(model, save)(tmp_path)
    assert not list(tmp_path.glob("*.safetensors"))


def test_other_dtypes_and_devices_are_refused():
    model = make("Model").optimize_for_inference("int8")
    for convert in (model.half, model.bfloat16, lambda: model.to("meta"), model.train):
        with pytest.raises(RuntimeError, match="optimised for inference"):
            convert()
    for dtype in (torch.float32, torch.bfloat16):
        with pytest.raises(RuntimeError, match=str(dtype)):
            model.optimize_for_inference(dtype)
    assert model.optimize_for_inference("int8") is model.optimize_for_inference() is model
    with pytest.raises(RuntimeError, match="int8"):
        make("Model").optimize_for_inference().optimize_for_inference("int8")
    model.to("cpu")
    assert model.encoder.blocks[0].attention.query.is_quantized


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


def test_without_vnni_it_keeps_the_dtype_and_says_so(monkeypatch, said):
    inference.logging.logging.Logger.warning_once.cache_clear()
    monkeypatch.setattr(torch.cpu, "_is_vnni_supported", lambda: False)
    model, inputs = make("Model"), inputs_for("Model")
    expected = compute(model, inputs)
    model.optimize_for_inference("int8")
    assert not any(layer.is_quantized for layer in layers(model))
    assert_same_tensors(compute(model, inputs), expected)
    assert [line for line in said() if "VNNI" in line and "torch.float32" in line]


def test_weights_that_are_no_numbers_are_refused():
    model = make("Model")
    model.encoder.blocks[1].attention_norm.weight.data[3] = float("nan")
    with pytest.raises(ValueError, match=r"encoder.blocks.1.attention_norm.weight .*finite"):
        model.optimize_for_inference("int8")
    assert not layers(model)


# --- calibration


def test_factors_are_those_of_the_formula():
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
    model.optimize_for_inference("int8", calibration=[tokens])
    factors = attention.query.prepacked.factors
    torch.testing.assert_close(factors, (expected / expected.mean()).detach())
    assert set(model._int8_factors) == {
        f"encoder.blocks.{i}.{name}" for i in range(2) for name in ("attention.query", "feed_forward.intermediate")
    }


def test_random_ids_are_the_default():
    state = torch.get_rng_state()
    model = make("ForMaskedLM").optimize_for_inference("int8")
    again = make("ForMaskedLM").optimize_for_inference("int8")
    other = make("ForMaskedLM").optimize_for_inference("int8", calibration=[inputs_for("ForMaskedLM")])
    assert_equal_tensors(model._int8_factors, again._int8_factors)
    name = "encoder.blocks.1.attention.query"
    assert not torch.equal(model._int8_factors[name], other._int8_factors[name])
    assert not torch.equal(model._int8_factors[name], torch.ones(36))
    torch.set_rng_state(state)


def test_padding_is_not_calibrated():
    model, inputs = make("Model"), inputs_for("Model")
    ids = inputs["input_ids"]
    padded = {
        "input_ids": torch.cat([ids, torch.full_like(ids, 3)], dim=1),
        "attention_mask": torch.cat([torch.ones_like(ids), torch.zeros_like(ids)], dim=1),
    }
    layer = {"query": [model.encoder.blocks[1].attention.query]}
    with_padding = find_factors(model, layer, [padded])
    torch.testing.assert_close(with_padding, find_factors(model, layer, [{"input_ids": ids}]))


def test_calibration_helps_where_one_channel_is_large():
    torch.manual_seed(1)
    weight, x = torch.randn(64, 64), torch.randn(256, 64)
    x[:, 5] *= 50
    x[::2, 5] *= -1
    exact = nn.functional.linear(x, weight)
    factors = (x.abs().amax(0) / weight.abs().amax(0)).sqrt()
    errors = [(QuantizedWeight([weight], each).linear(x, None, None) - exact).norm() for each in (None, factors)]
    assert errors[1] < 0.5 * errors[0]


def test_factors_from_a_file_for_any_head(tmp_path):
    base, inputs = make("Model"), inputs_for("Model")
    base.save_pretrained(tmp_path)
    file = tmp_path / "calibration.safetensors"
    base.optimize_for_inference("int8", calibration=[inputs]).save_calibration(file)
    assert file.stat().st_size < 20_000
    again = ScratchBertModel.from_pretrained(tmp_path).optimize_for_inference("int8", calibration=file)
    assert_equal_tensors(compute(again, inputs), compute(base, inputs))
    head = ScratchBertForMaskedLM.from_pretrained(tmp_path).optimize_for_inference("int8", calibration=str(file))
    assert_equal_tensors(head._int8_factors, base._int8_factors)
    assert head.model.encoder.blocks[0].attention.query.prepacked.factors is not None


def test_bad_calibration_is_refused_before_anything_changed(tmp_path):
    model, other = make("Model"), make("Model", num_hidden_layers=1)
    with pytest.raises(RuntimeError, match="calibration"):
        model.save_calibration(tmp_path / "none")
    other.optimize_for_inference("int8", calibration=[inputs_for("Model")]).save_calibration(tmp_path / "other")
    (tmp_path / "damaged").write_bytes(b"no factors")
    for calibration, error, match in [
        ([], ValueError, "calibration has no batches"),
        ([["a text"]], TypeError, "calibration has a list as batch 1"),
        (tmp_path / "other", ValueError, r"other has no factors for encoder.blocks.1"),
        (tmp_path / "damaged", ValueError, "damaged"),
        (tmp_path / "absent", OSError, "absent"),
    ]:
        with pytest.raises(error, match=match):
            model.optimize_for_inference("int8", calibration=calibration)
        assert not layers(model)
    with pytest.raises(ValueError, match="calibration was given for dtype None"):
        model.optimize_for_inference(calibration=[inputs_for("Model")])


# --- row counts, hooks, other copies


def test_row_counts_are_bounded():
    matrix = QuantizedWeight([torch.randn(33, 8)])
    computed = record_row_counts(matrix)
    for rows in range(1, 1025):
        assert matrix.linear(torch.randn(rows, 8), None, None).shape == (rows, 33)
    assert len(set(computed)) <= 48 + 3 * 8 + 3 * 16


@pytest.mark.parametrize("dtype", [None, "int8"])
def test_a_hook_on_a_part_of_the_joint_product_fires(dtype):
    model, inputs = make("Model"), inputs_for("Model")
    whole = compute(model.optimize_for_inference(dtype), inputs)
    key, seen = model.encoder.blocks[0].attention.key, []
    hook = key.register_forward_hook(lambda layer, args, output: seen.append(output))
    assert_same_tensors(compute(model, inputs), whole)
    hook.remove()
    assert len(seen) == 1
    assert seen[0].shape[-1] == key.out_features
    key.register_forward_hook(lambda layer, args, output: 0 * output)
    assert (compute(model, inputs)["last_hidden_state"] - whole["last_hidden_state"]).abs().max() > 1e-2


def test_self_attention_is_one_product():
    model, inputs = make("Model"), inputs_for("Model")
    model.optimize_for_inference()
    attention = model.encoder.blocks[0].attention
    assert attention.query.prepacked is attention.key.prepacked is attention.value.prepacked
    computed = record_row_counts(attention.query.prepacked)
    compute(model, inputs)
    assert len(computed) == 1
