"""`optimize_for_inference`: same results, one copy in memory, every change takes effect or is refused."""

import copy
import gc
import io
import pickle
import re
import sys
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from torch.nn.utils import prune
from transformers.activations import ACT2FN
from transformers.utils import logging

from modeling_scratchbert import ScratchBertModel
from modeling_scratchbert.cpu import library, optimization
from modeling_scratchbert.cpu.layers import BY_KEY
from modeling_scratchbert.cpu.library import ACTIVATIONS, find_library
from modeling_scratchbert.cpu.optimization import ACTIVATIONS_OF_TORCH, Prepacker
from modeling_scratchbert.cpu.stack import OptimizedStack
from modeling_scratchbert.inference import is_prepacked
from support.comparison import assert_same_tensors
from support.models import ENCODER_DECODERS, OURS, inputs_for
from support.prepacked import (
    DTYPES,
    TIED,
    all_prepacked,
    assert_equal_tensors,
    compute,
    every_model,
    layers,
    make,
    matrices_of,
    prepack,
)


@pytest.fixture
def no_onednn(monkeypatch):
    """A torch without oneDNN, and no library, until it is undone."""
    logging.logging.Logger.warning_once.cache_clear()
    with monkeypatch.context() as patched:
        patched.setattr(torch.backends.mkldnn, "is_available", lambda: False)
        patched.setattr(optimization, "find_library", lambda: None)
        yield patched


# --- the numbers


@every_model
def test_the_same_numbers(head, fields):
    model, inputs = make(head, **fields), inputs_for(head)
    expected = compute(model, inputs)
    assert model.optimize_for_inference() is model
    assert all_prepacked(model)
    assert not model.training
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert_same_tensors(compute(model, inputs), expected)


@pytest.mark.parametrize("head", OURS)
def test_the_same_numbers_in_bfloat16(head):
    model, inputs = make(head), inputs_for(head)
    exact = compute(model, inputs)
    before = compute(model.to(torch.bfloat16), inputs)
    after = compute(model.optimize_for_inference(), inputs)
    assert all_prepacked(model)
    assert model.dtype == torch.bfloat16
    for name, tensor in before.items():
        if tensor.is_floating_point():
            error, own_error = ((each[name] - exact[name]).abs().max() for each in (after, before))
            assert after[name].dtype == (torch.float32 if "cache" in name or "past" in name else torch.bfloat16)
            assert error <= 2 * own_error + 1e-2, name


NAMES = sorted(name for name in ACT2FN if type(ACT2FN[name]) in ACTIVATIONS)


@pytest.mark.parametrize("activation", [*NAMES, "mish", "leaky_relu"])
def test_activations(activation):
    """Those of the library, or of torch, and others, with which a model is not optimised."""
    model, inputs = make(hidden_act=activation, chunk_size_feed_forward=1), inputs_for("ForMaskedLM")
    expected = compute(model, inputs)
    supported = NAMES if find_library() else [name for name in NAMES if isinstance(ACT2FN[name], ACTIVATIONS_OF_TORCH)]
    assert is_prepacked(model.optimize_for_inference().model.encoder) == (activation in supported)
    assert_same_tensors(compute(model, inputs), expected)


@pytest.mark.skipif(not find_library(), reason="the library in C++ is not in use")
@pytest.mark.parametrize("activation", NAMES)
def test_activations_of_large_and_small_numbers(activation):
    x = torch.cat([torch.linspace(-12, 12, 4001), torch.tensor([-1e30, 1e30, 0.0, -1e-30])])
    layer = Prepacker(torch.float32, torch.float32, {}).layer(ACT2FN[activation])
    torch.testing.assert_close(layer(x), ACT2FN[activation](x), rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("shape", [(0, 36), (36,), (1, 1, 36), (2, 0, 36), (300, 36)])
def test_any_shape(shape):
    layer, x = nn.Linear(36, 5), torch.randn(shape)
    packed = prepack(layer)
    with torch.no_grad():
        torch.testing.assert_close(packed(x), layer(x))
        torch.testing.assert_close(
            packed(x.expand(2, *shape).transpose(0, -2)), layer(x.expand(2, *shape)).transpose(0, -2)
        )


@pytest.mark.parametrize(
    ("head", "fields"), [("ForCausalLM", {}), ("ForConditionalGeneration", {}), (ENCODER_DECODERS[1], TIED)]
)
@pytest.mark.parametrize("beams", [1, 3])
def test_it_generates_the_same(head, fields, beams):
    model = make(head, **fields)
    batch = {name: inputs_for("Model")[name] for name in ("input_ids", "attention_mask")}
    batch["attention_mask"] = batch["attention_mask"].flip(1)
    options = {"max_new_tokens": 9, "do_sample": False, "num_beams": beams}
    expected = model.generate(**batch, **options)
    assert torch.equal(model.optimize_for_inference().generate(**batch, **options), expected)


@every_model
def test_autocast_changes_no_dtype_of_the_stack(head, fields):
    model, inputs = make(head, **fields), inputs_for(head)
    expected = compute(model, inputs)
    model.optimize_for_inference()
    with torch.autocast("cpu", torch.bfloat16):
        actual = compute(model, inputs)
    for name, tensor in expected.items():
        assert (actual[name] - tensor).abs().max() < 0.1, name


@pytest.mark.parametrize("fields", [{}, {"norm_first": True}])
@pytest.mark.parametrize("head", ["Model", "ForMaskedLM", "ForConditionalGeneration"])
def test_hidden_states(head, fields):
    model, inputs = make(head, **fields), inputs_for(head)
    expected = compute(model, inputs | {"output_hidden_states": True})
    actual = compute(model.optimize_for_inference(), inputs | {"output_hidden_states": True})
    assert any("hidden_states" in name for name in expected)
    assert_same_tensors(actual, expected)


# --- where the stack is, and what is left


def test_one_module_without_submodules_in_place_of_the_blocks():
    model = make("ForConditionalGeneration").optimize_for_inference()
    for each in (model.get_encoder(), model.get_decoder()):
        assert type(each.encoder) is OptimizedStack
        assert not list(each.encoder.children())
        assert not [*each.encoder.parameters(), *each.encoder.buffers()]


def test_weights_and_biases_of_optimised_layers_raise():
    model, inputs = make(), inputs_for()
    expected = compute(model.optimize_for_inference(), inputs)
    for layer in (model.lm_head.dense, model.lm_head.decoder):
        for name in ("weight", "bias"):
            assert not hasattr(layer, name)
            for value in (nn.Parameter(torch.zeros(2)), torch.zeros(2), None):
                with pytest.raises(AttributeError, match=rf"{name} of a layer .* before optimize_for_inference\(\)"):
                    setattr(layer, name, value)
    with pytest.raises(AttributeError, match="weight of a layer"):
        model.tie_weights()
    assert_equal_tensors(compute(model, inputs), expected)


def test_parameters_in_place_take_effect():
    """Those that are left: of embedding tables, and of norms outside of the stack."""
    model, other, inputs = make(), make(), inputs_for()
    unchanged = compute(model.optimize_for_inference(), inputs)
    own = dict(other.named_parameters())
    for name, parameter in model.named_parameters():
        for each in (parameter, own[name]):
            each.data.mul_(1.5)
        expected = compute(other, inputs)
        assert_same_tensors(compute(model, inputs), expected)
    assert (expected["logits"] - unchanged["logits"]).abs().max() > 1e-2


def test_tied_embeddings_are_no_parameter_but_can_be_replaced():
    model, other, ids = make(), make(), torch.arange(9)[None] + 5
    words, table = model.get_input_embeddings(), torch.randn(99, 36)
    model.optimize_for_inference()
    assert model.get_input_embeddings() is words
    assert not list(words.parameters())
    words.weight = nn.Parameter(table)
    other.tie_weights = lambda: None
    other.set_input_embeddings(nn.Embedding.from_pretrained(table))
    assert_same_tensors(compute(model, {"input_ids": ids}), compute(other, {"input_ids": ids}))


@pytest.mark.parametrize("change", ["hook", "module"])
def test_modules_outside_of_the_stack_can_be_changed(change):
    model, other, inputs = make("ForSequenceClassification"), make("ForSequenceClassification"), inputs_for()
    new = nn.Linear(36, 2)
    for each in (model, other):
        if each is model:
            model.optimize_for_inference()
        if change == "hook":
            each.model.pooler.register_forward_hook(lambda module, args, output: output.square())
            each.model.embeddings.register_forward_hook(lambda module, args, output: output * 2)
        else:
            each.classifier = new
    inputs.pop("labels", None)
    assert_same_tensors(compute(model, inputs), compute(other, inputs))


def test_own_layers_of_a_head_stay():
    model, other, inputs = make("Model"), make("Model"), inputs_for("Model")
    own = type("OwnLinear", (nn.Linear,), {"forward": lambda self, x: x + 1})(36, 36)
    model.pooler.dense = other.pooler.dense = own
    assert_same_tensors(compute(model.optimize_for_inference(), inputs), compute(other, inputs))
    assert model.pooler.dense is own


@pytest.mark.parametrize("fields", [{"bias": False}, {"elementwise_affine": False}], ids=str)
def test_a_norm_of_a_head_without_weights_stays(fields):
    model, other, inputs = make(), make(), inputs_for()
    model.lm_head.norm = other.lm_head.norm = nn.LayerNorm(36, **fields)
    assert_same_tensors(compute(model.optimize_for_inference(), inputs), compute(other, inputs))


@pytest.mark.parametrize("width", [5, 35, 200])
def test_inputs_of_another_width_are_refused(width):
    for layer in (nn.Linear(36, 5), nn.LayerNorm(36)):
        prepacked = prepack(layer)
        if prepacked is not layer:  # without the library, norms stay
            with pytest.raises(RuntimeError):
                prepacked(torch.zeros(3, width))


# --- what cannot be optimised, because it would have no effect


def set_module(path, new):
    return lambda model: model.set_submodule(path, new(model.get_submodule(path)))


def set_attribute(path, name, value):
    return lambda model: setattr(model.get_submodule(path), name, value)


def derived(module):
    module.__class__ = type("Own", (type(module),), {})
    return module


BLOCK = "model.encoder.blocks.1"
CHANGES = {
    f"{BLOCK}.attention.query has the hook": lambda model: model.get_submodule(
        f"{BLOCK}.attention.query"
    ).register_forward_hook(lambda *args: None),
    f"{BLOCK}.feed_forward has the hook": lambda model: model.get_submodule(
        f"{BLOCK}.feed_forward"
    ).register_forward_pre_hook(lambda *args: None),
    f"{BLOCK}.dropout has the hook": lambda model: model.get_submodule(f"{BLOCK}.dropout").register_full_backward_hook(
        lambda *args: None
    ),
    f"{BLOCK} has the hook": lambda model: model.get_submodule(BLOCK).register_full_backward_pre_hook(lambda *a: None),
    "model.encoder has the hook": lambda model: model.model.encoder.register_forward_hook(lambda *args: None),
    f"{BLOCK}.attention.output has a forward of its own": set_attribute(
        f"{BLOCK}.attention.output", "forward", lambda x: x
    ),
    f"{BLOCK} has a forward of its own": set_attribute(BLOCK, "forward", lambda x, *args, **kwargs: x),
    "model.encoder has a forward of its own": set_attribute("model.encoder", "forward", lambda x, **kwargs: x),
    f"{BLOCK}.attention is a Own": set_module(f"{BLOCK}.attention", derived),
    f"{BLOCK} is a Own": set_module(BLOCK, derived),
    "model.encoder is a Own": set_module("model.encoder", derived),
    f"{BLOCK}.attention.value is a Own": set_module(f"{BLOCK}.attention.value", derived),
    f"{BLOCK}.attention_norm is a RMSNorm": set_module(f"{BLOCK}.attention_norm", lambda module: nn.RMSNorm(36)),
    f"{BLOCK}.feed_forward.activation is a ReLU": set_module(
        f"{BLOCK}.feed_forward.activation", lambda module: nn.ReLU()
    ),
    f"{BLOCK}.adapter is a Linear that was added": lambda model: model.get_submodule(BLOCK).add_module(
        "adapter", nn.Linear(36, 36)
    ),
    "model.encoder.blocks.2 is a TransformerBlock that was added": lambda model: model.model.encoder.blocks.append(
        model.model.encoder.blocks[0]
    ),
    "model.encoder.blocks.1 is missing": lambda model: model.model.encoder.blocks.__delitem__(1),
    f"{BLOCK}.attention.key is a ParametrizedLinear": lambda model: nn.utils.parametrizations.weight_norm(
        model.get_submodule(f"{BLOCK}.attention.key")
    ),
    f"{BLOCK}.attention.key has the hook": lambda model: prune.random_unstructured(
        model.get_submodule(f"{BLOCK}.attention.key"), "weight", 0.5
    ),
    f"{BLOCK}.attention.key has bias=None": set_module(
        f"{BLOCK}.attention.key", lambda module: nn.Linear(36, 36, bias=False)
    ),
    f"{BLOCK}.attention.query has weight, a OwnParameter": set_attribute(
        f"{BLOCK}.attention.query", "weight", type("OwnParameter", (nn.Parameter,), {})(torch.zeros(36, 36))
    ),
    "model.encoder has weights of torch.bfloat16 and torch.float32": lambda model: model.get_submodule(BLOCK).to(
        torch.bfloat16
    ),
    f"{BLOCK}.attention has is_causal=True": set_attribute(f"{BLOCK}.attention", "is_causal", True),
    f"{BLOCK}.attention_norm has eps=0.5": set_attribute(f"{BLOCK}.attention_norm", "eps", 0.5),
    "lm_head.dense has the hook": lambda model: model.lm_head.dense.register_forward_hook(lambda *args: None),
    "lm_head.decoder has a forward of its own": set_attribute("lm_head.decoder", "forward", lambda x: x),
}


@pytest.mark.parametrize("fact", CHANGES)
def test_a_changed_module_is_refused_and_named(fact):
    model = make()
    CHANGES[fact](model)
    modules, training = list(model.modules()), model.train().training
    with pytest.raises(RuntimeError, match=f"^{re.escape(fact.split()[0])} (is|has) .*; optimize_for_inference"):
        model.optimize_for_inference()
    assert all(one is other for one, other in zip(model.modules(), modules, strict=True))
    assert model.training == training


def test_hooks_of_transformers_are_accepted():
    model, inputs = make("Model", attn_implementation="eager"), inputs_for("Model")
    expected = compute(model, inputs)
    model(**inputs, output_attentions=True)
    assert_same_tensors(compute(model.optimize_for_inference(), inputs), expected)


# --- what a forward pass refuses


FULL = torch.ones(2, 1, 5, 5, dtype=torch.bool)
UNSUPPORTED = {
    "output_attentions is given": {"output_attentions": True},
    r"attention_mask has shape \(2, 1, 5, 5\)": {"attention_mask": FULL},
    "is_causal is given": {"is_causal": False},
}


@pytest.mark.parametrize("match", UNSUPPORTED)
@pytest.mark.parametrize("head", ["Model", "ForCausalLM"])
def test_arguments_that_only_a_model_as_loaded_supports(head, match):
    model, ids = make(head).optimize_for_inference(), torch.arange(10).view(2, 5)
    with pytest.raises(RuntimeError, match=f"{match}; an optimised model expects"):
        model(ids, **UNSUPPORTED[match])


@pytest.mark.parametrize("is_after", [False, True])
def test_other_attention_implementations_are_refused(is_after):
    model, ids = make("Model"), torch.arange(10).view(2, 5)
    steps = [lambda: model.set_attn_implementation("flex_attention"), model.optimize_for_inference]
    for step in steps[:: -1 if is_after else 1]:
        step()
    with pytest.raises(RuntimeError, match=r"attn_implementation is 'flex_attention'; .* expects 'sdpa' or 'eager'"):
        model(ids)


def test_eager_and_sdpa_are_the_same():
    one, inputs = make("Model"), inputs_for("Model")
    other = copy.deepcopy(one)
    other.set_attn_implementation("eager")
    one.optimize_for_inference()
    other.optimize_for_inference()
    assert_equal_tensors(compute(one, inputs), compute(other, inputs))


@pytest.mark.parametrize("part", ["", "model"])
def test_padding_is_removed_unless_the_loss_reads_it(part):
    """Also if only the base model is optimised; and another model with the same configuration stays as it is."""
    model = make("ForMaskedLM")
    other, ids, mask = OURS["ForMaskedLM"](model.config).eval(), torch.arange(6).view(2, 3), torch.ones(2, 3).long()
    mask[1, 1:] = 0
    model.get_submodule(part).optimize_for_inference()
    assert not other.config.padding_free
    encoder, seen = model.model.encoder, []
    encoder.run, run = lambda *args: seen.append(args[0][0].shape[:2].numel()) or run(*args), encoder.run
    model(ids, mask)
    model(ids, mask, labels=ids)
    model(ids, mask, padding_free=False)
    assert seen == [4, 6, 6]


@pytest.mark.parametrize("mask", [[[1, 1, 0], [0, 1, 1]], [[1, 1, 0], [0, 0, 0]]])
def test_a_pooler_does_not_read_padding(mask):
    ids, mask = torch.arange(6).view(2, 3), torch.tensor(mask)
    with pytest.raises(ValueError, match=r"first token of a row.*Pad on the right"):
        make("Model").optimize_for_inference()(ids, mask)
    without = make("ForMaskedLM")
    expected = without(ids, mask).logits
    actual = without.optimize_for_inference()(ids, mask).logits
    assert_same_tensors({"": actual}, {"": expected}, mask.bool())


# --- copies


def through_torch(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@every_model
@pytest.mark.parametrize("way", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model)), through_torch])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_copies_are_prepacked_too(head, fields, way, dtype):
    model, inputs = make(head, **fields).optimize_for_inference(dtype), inputs_for(head)
    model.base_model.requires_grad_(False).share_memory()
    again = way(model)
    found, copied = map(matrices_of, (model, again))
    assert len(copied) == len(found)
    assert copied == found if way is copy.deepcopy else not copied & found
    assert_equal_tensors(compute(again, inputs), compute(model, inputs))


@pytest.mark.skipif(not find_library(), reason="the library in C++ is not in use")
def test_a_pickle_is_refused_where_its_weights_cannot_be_multiplied(monkeypatch):
    stored = pickle.dumps(make().optimize_for_inference())
    monkeypatch.setattr(library, "find_library", lambda: None)
    with pytest.raises(RuntimeError, match=r"layout.*call optimize_for_inference\(\)"):
        pickle.loads(stored)


# --- memory


@every_model
@pytest.mark.parametrize("dtype", DTYPES)
def test_one_copy_in_memory_all_along(monkeypatch, head, fields, dtype):
    model = make(head, **fields)
    weights = {id(m.weight): weakref.ref(m.weight) for m in model.modules() if type(m) is nn.Linear}
    tied = len({id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)} & set(weights))
    packed, pack, a_block = [], Prepacker.matrix, 2 * 10 if head in ENCODER_DECODERS else 6

    def counting(self, *layers, **options):
        before = len(self.matrices)
        matrix = pack(self, *layers, **options)
        if self.dtype == torch.int8 or dtype != "int8":  # the model that calibrates is a copy
            packed.append(len(layers) * (len(self.matrices) - before))
            alive = sum(weight() is not None for weight in weights.values())
            assert alive + sum(packed) <= len(weights) + a_block + tied
        return matrix

    monkeypatch.setattr(Prepacker, "matrix", counting)
    model.optimize_for_inference(dtype)
    assert sum(packed) == len(weights)
    assert not any(weight() is not None for weight in weights.values())


def test_a_weight_that_another_model_shares_and_trains():
    weight, x = nn.Parameter(torch.randn(36, 36)), torch.randn(2, 36)
    one, other = make("Model"), make("Model")
    for model in (one, other):
        model.pooler.dense.weight = weight
    one.optimize_for_inference()
    weight.data.mul_(2)
    dense = other.pooler.dense
    with torch.no_grad():
        torch.testing.assert_close(one.pooler.dense(x), nn.functional.linear(x, weight / 2, dense.bias))
        torch.testing.assert_close(other.optimize_for_inference().pooler.dense(x), dense(x))


def test_nothing_is_left_of_a_model_that_is_gone():
    """At once, without garbage collection."""
    model = make().optimize_for_inference()
    compute(model, inputs_for())
    found = list(map(weakref.ref, matrices_of(model)))
    gc.disable()
    del model
    gc.enable()
    assert not any(matrix() for matrix in found)


# --- what stays an ordinary model


@every_model
def test_where_onednn_is_missing_the_model_stays_an_ordinary_one(no_onednn, said, head, fields):
    model, inputs = make(head, **fields), inputs_for(head)
    expected, before = compute(model, inputs), copy.deepcopy(model.state_dict())
    assert_equal_tensors(compute(model.train().optimize_for_inference(), inputs), expected)
    assert_equal_tensors(model.state_dict(), before)
    assert all(parameter.requires_grad for parameter in model.train().parameters())
    make().optimize_for_inference()
    [line] = said()
    assert "torch.float32 on cpu" in line


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_other_dtypes_stay_dense(said, dtype):
    logging.logging.Logger.warning_once.cache_clear()
    model, inputs = make().to(dtype), inputs_for()
    expected = compute(model, inputs)
    assert_equal_tensors(compute(model.optimize_for_inference(), inputs), expected)
    assert not layers(model)
    assert f"{dtype} on cpu" in "\n".join(said())


# --- what it refuses


REFUSED = {
    "training": lambda model, path: model.train(),
    "float16": lambda model, path: model.half(),
    "bfloat16": lambda model, path: model.to(torch.bfloat16),
    "meta": lambda model, path: model.to("meta"),
    r"state_dict\(\)": lambda model, path: model.state_dict(),
    r"load_state_dict\(\)": lambda model, path: model.load_state_dict(make("Model").state_dict()),
    r"save_pretrained\(\)": lambda model, path: model.save_pretrained(path / "saved"),
    r"push_to_hub\(\)": lambda model, path: model.push_to_hub("user/name"),
    r"save_as_bert\(\)": lambda model, path: model.save_as_bert(path / "saved"),
    r"resize_token_embeddings\(\)": lambda model, path: model.resize_token_embeddings(120),
}


PARTS = ("", "model", "model.encoder")


@pytest.mark.parametrize("operation", REFUSED)
@pytest.mark.parametrize("place", ["Model/", "ForMaskedLM/model", *(f"{ENCODER_DECODERS[1]}/{part}" for part in PARTS)])
def test_what_it_refuses_is_refused_before_anything_changed(tmp_path, operation, place):
    head, part = place.split("/")
    model, inputs = make(head), inputs_for(head)
    model.get_submodule(part).optimize_for_inference()
    expected, config = compute(model, inputs), copy.deepcopy(model.config.to_dict())
    with pytest.raises(RuntimeError, match=rf"optimised for inference; .*{operation}.* before optimize_for_inference"):
        REFUSED[operation](model, tmp_path)
    assert not list(tmp_path.iterdir())
    assert model.config.to_dict() == config
    assert not any(module.training for module in model.modules())
    assert_equal_tensors(compute(model, inputs), expected)


def test_parts_refuse_the_same():
    model = make("Model").optimize_for_inference()
    for part in (model.encoder, model.pooler):
        for call, *args in ((part.half,), (part.to, "meta"), (part.state_dict,), (part.load_state_dict, {})):
            with pytest.raises(RuntimeError, match="optimised for inference"):
                call(*args)
    assert model.dtype == torch.float32


@pytest.mark.parametrize("rows", [1, 3])
def test_gradients_are_refused(tmp_path, rows):
    make("Model").save_pretrained(tmp_path)
    model = ScratchBertModel.from_pretrained(tmp_path).optimize_for_inference()
    embeds = torch.randn(1, rows, 36, requires_grad=True)
    with pytest.raises(RuntimeError, match=r"torch.no_grad\(\)"):
        model(inputs_embeds=embeds)
    for part in (model.encoder, model.pooler):
        with pytest.raises(RuntimeError, match="no_grad"):
            part(embeds)
    with torch.no_grad():
        model(inputs_embeds=embeds)
    model(inputs_embeds=embeds.detach())
    model.set_attn_implementation("eager")
    with torch.no_grad(), pytest.raises(RuntimeError, match="no_grad"):
        torch.func.jacfwd(lambda factor: model(inputs_embeds=embeds * factor)[0].sum())(torch.tensor(1.0))


def test_moves_to_the_same_device_and_dtype_change_nothing():
    model = make("Model").optimize_for_inference()
    expected = matrices_of(model)
    model.to("cpu").float().cpu().to(torch.float32).eval().train(False).requires_grad_(False).share_memory()
    assert matrices_of(model) == expected
    assert model.device == torch.device("cpu")
    assert model.dtype == torch.float32
    assert min(model.num_parameters(), model.get_memory_footprint()) > 0


def test_a_second_call_is_refused_also_for_the_whole_after_a_part():
    whole, part = make().optimize_for_inference(), make()
    part.model.optimize_for_inference()
    inputs = inputs_for()
    for model in (whole, part):
        expected = compute(model, inputs)
        with pytest.raises(RuntimeError, match=r"optimize_for_inference\(\)"):
            model.optimize_for_inference()
        assert_equal_tensors(compute(model, inputs), expected)


def test_adapters_are_refused_until_they_are_merged():
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=["query", "value", "intermediate"], init_lora_weights=False)
    model, inputs = peft.get_peft_model(make(), config), inputs_for()
    state = copy.deepcopy(model.state_dict())
    with pytest.raises(RuntimeError, match=r"query is .*merge_and_unload\(\)"):
        model.optimize_for_inference()
    assert_equal_tensors(model.state_dict(), state)
    assert model.training
    expected = compute(model.eval(), inputs)
    merged = model.merge_and_unload().optimize_for_inference()
    assert all_prepacked(merged)
    assert_same_tensors(compute(merged, inputs), expected)
    with pytest.raises(ValueError, match="Target modules"):
        peft.get_peft_model(merged, config)


def test_offloaded_models_are_refused():
    accelerate = pytest.importorskip("accelerate")
    model = accelerate.cpu_offload(make("Model"), execution_device="cpu")
    with pytest.raises(RuntimeError, match=r"^encoder"):
        model.optimize_for_inference()
    assert not layers(model)


@pytest.fixture
def _frequent_thread_switches():
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


def in_threads(function, arguments):
    """The function's results for each argument, from four threads that start at once; raises what they raise."""
    start = threading.Barrier(4)

    def run(mine):
        start.wait()
        return [function(argument) for argument in mine]

    with ThreadPoolExecutor(4) as pool:
        futures = [pool.submit(run, arguments[i::4]) for i in range(4)]
    results = [future.result() for future in futures]
    return [results[i % 4][i // 4] for i in range(len(arguments))]


@pytest.mark.usefixtures("_frequent_thread_switches")
def test_models_optimised_in_threads_keep_their_own_weights():
    models = [make("Model", num_hidden_layers=1, hidden_size=4, intermediate_size=5) for _ in range(120)]
    in_threads(lambda model: model.optimize_for_inference(), models)
    found = [layer for model in models for layer in layers(model)]
    assert len({layer.key for layer in found}) == len(models) * len(layers(models[0]))
    assert all(BY_KEY[layer.key] is layer for layer in found)


@pytest.mark.usefixtures("_frequent_thread_switches")
def test_one_model_optimised_in_threads():
    for _ in range(10):
        model, inputs = make(), inputs_for()
        expected = compute(model, inputs)
        refused = []

        def optimize(model, refused=refused):
            try:
                model.optimize_for_inference()
            except RuntimeError as error:
                refused.append(error)

        in_threads(optimize, [model] * 4)
        assert len(refused) == 3
        assert all_prepacked(model)
        assert_same_tensors(compute(model, inputs), expected)
