"""`optimize_for_inference`: same results, one copy in memory, every change takes effect or is refused."""

import copy
import gc
import pickle
import re
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune
from transformers.activations import ACT2FN
from transformers.utils import logging

from modeling_scratchbert import ScratchBertModel
from modeling_scratchbert.inference import is_prepacked
from support.comparison import assert_same_tensors
from support.models import CROSSED, OURS, inputs_for
from support.prepacked import (
    DTYPES,
    HAS_LIBRARY,
    TIED,
    all_prepacked,
    assert_equal_tensors,
    compute,
    every_model,
    find_library,
    layers,
    make,
    matrices_of,
    needs_library,
)
from support.unpadded import observed_shapes

SEQ2SEQ = "ForConditionalGeneration"
ACTIVATIONS = ["gelu", "gelu_new", "gelu_fast", "relu", "tanh"]
OF_THE_LIBRARY = ["gelu_pytorch_tanh", "quick_gelu", "silu", "sigmoid"]


@pytest.fixture
def no_library(monkeypatch):
    """A processor without a library in C++."""
    monkeypatch.setenv("SCRATCHBERT_ISA", "torch")
    find_library.cache_clear()
    logging.logging.Logger.warning_once.cache_clear()
    yield
    monkeypatch.undo()
    find_library.cache_clear()


# ---------------------------------------------------------------------------------------------------------------------
# The numbers


@every_model
def test_outputs_stay_the_same(head, fields):
    model, inputs = make(head, **fields), inputs_for(head)
    expected = compute(model, inputs)
    assert model.train().optimize_for_inference() is model
    assert all_prepacked(model)
    assert not model.training
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert not any("encoder.blocks" in name for name, _ in [*model.named_parameters(), *model.named_modules()])
    assert_same_tensors(compute(model, inputs), expected)
    with torch.autocast("cpu", torch.bfloat16):  # which prepacked layers ignore
        actual = compute(model, inputs)
    for name, tensor in expected.items():
        assert (actual[name] - tensor).abs().max() < 0.1, name


@pytest.mark.parametrize("head", OURS)
def test_outputs_in_bfloat16(head):
    model, inputs = make(head), inputs_for(head)
    exact = compute(model, inputs)
    before = compute(copy.deepcopy(model).to(torch.bfloat16), inputs)
    after = compute(model.optimize_for_inference(torch.bfloat16), inputs)
    assert all_prepacked(model)
    assert model.dtype == torch.bfloat16
    for name, tensor in before.items():
        if tensor.is_floating_point():
            error, own_error = ((each[name] - exact[name]).abs().max() for each in (after, before))
            assert after[name].dtype == (torch.float32 if "cache" in name or "past" in name else torch.bfloat16)
            assert error <= 2 * own_error + 1e-2, name


@pytest.mark.parametrize("activation", [*ACTIVATIONS, *OF_THE_LIBRARY, "mish"])
def test_activations(activation):
    """With others, a model is not optimised."""
    model, inputs = make(hidden_act=activation, chunk_size_feed_forward=1), inputs_for()
    expected = compute(model, inputs)
    supported = [*ACTIVATIONS, *OF_THE_LIBRARY] if HAS_LIBRARY else ACTIVATIONS
    assert bool(layers(model.optimize_for_inference())) == (activation in supported)
    assert_same_tensors(compute(model, inputs), expected)


@pytest.mark.parametrize("activation", ACTIVATIONS + OF_THE_LIBRARY)
def test_activations_of_large_and_small_numbers(activation):
    layer = make(hidden_act=activation).optimize_for_inference().lm_head.activation
    x = torch.cat([torch.linspace(-12, 12, 4001), torch.tensor([-1e30, 1e30, 0.0, -1e-30])])
    torch.testing.assert_close(layer(x), ACT2FN[activation](x), rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("shape", [(0, 36), (36,), (2, 0, 36), (300, 36)])
def test_inputs_of_any_shape(shape):
    model, x = make("Model").requires_grad_(False), torch.randn(shape)
    layer, prepacked = model.pooler.dense, model.optimize_for_inference().pooler.dense
    for each in (x, x.expand(2, *shape).transpose(0, -2)):
        torch.testing.assert_close(prepacked(each), layer(each))


@pytest.mark.parametrize("width", [35, 200])
def test_inputs_of_another_width_are_refused(width):
    head = make().optimize_for_inference().lm_head
    for layer in (head.dense, head.norm):
        with pytest.raises(RuntimeError):
            layer(torch.zeros(3, width))


@pytest.mark.parametrize(("head", "fields"), [("ForCausalLM", {}), (SEQ2SEQ, {}), (SEQ2SEQ, TIED)])
@pytest.mark.parametrize("beams", [1, 3])
def test_generated_ids_stay_the_same(head, fields, beams):
    model = make(head, **fields)
    batch = {name: inputs_for("Model")[name] for name in ("input_ids", "attention_mask")}
    batch["attention_mask"] = batch["attention_mask"].flip(1)
    options = {"max_new_tokens": 9, "do_sample": False, "num_beams": beams}
    expected = model.generate(**batch, **options)
    assert torch.equal(model.optimize_for_inference().generate(**batch, **options), expected)


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize(
    ("head", "options"), [("ForMaskedLM", {}), (SEQ2SEQ, {}), (SEQ2SEQ, {"use_cache": False})], ids=str
)
def test_hidden_states_stay_the_same(head, options, norm_first):
    model, inputs = make(head, norm_first=norm_first), inputs_for(head) | {"output_hidden_states": True, **options}
    expected = compute(model, inputs)
    assert_same_tensors(compute(model.optimize_for_inference(), inputs), expected)


@pytest.mark.parametrize("part", ["", "model"])
def test_padding_is_removed_unless_the_loss_reads_it(part):
    """Also if only the base model is optimised; and another model with the same configuration stays as it is."""
    model = make("ForMaskedLM")
    other, ids, mask = OURS["ForMaskedLM"](model.config).eval(), torch.arange(6).view(2, 3), torch.ones(2, 3).long()
    mask[1, 1:] = 0
    model.get_submodule(part).optimize_for_inference()
    assert not other.config.padding_free
    with observed_shapes(type(model.model.encoder).forward) as seen:
        for options in ({}, {"labels": ids}, {"padding_free": False}):
            model(ids, mask, **options)
    assert seen == [(1, 4, 36), (2, 3, 36), (2, 3, 36)]


# ---------------------------------------------------------------------------------------------------------------------
# Changes of the model


def test_weights_and_biases_of_prepacked_layers_raise():
    model, inputs = make(), inputs_for()
    expected = compute(model.optimize_for_inference(), inputs)
    for layer in (model.lm_head.dense, model.lm_head.decoder):
        for name in ("weight", "bias"):
            assert not hasattr(layer, name)
            for value in (nn.Parameter(torch.zeros(2)), None):
                with pytest.raises(AttributeError, match=name):
                    setattr(layer, name, value)
    with pytest.raises(AttributeError, match="weight"):
        model.tie_weights()
    assert_equal_tensors(compute(model, inputs), expected)


def test_parameters_in_place_take_effect():
    """Those that are left: of embedding tables, and of norms outside of the stack."""
    model, other, inputs = make().optimize_for_inference(), make(), inputs_for()
    unchanged = compute(model, inputs)
    own = dict(other.named_parameters())
    for name, parameter in model.named_parameters():
        for each in (parameter, own[name]):
            each.data.mul_(1.5)
    expected = compute(other, inputs)
    assert_same_tensors(compute(model, inputs), expected)
    assert (expected["logits"] - unchanged["logits"]).abs().max() > 1e-2


def test_tied_embeddings_are_no_parameter_but_can_be_replaced():
    model, other, ids = make().optimize_for_inference(), make(), torch.arange(9)[None] + 5
    words, table = model.get_input_embeddings(), torch.randn(99, 36)
    assert not list(words.parameters())
    words.weight = nn.Parameter(table)
    other.tie_weights = lambda: None
    other.set_input_embeddings(nn.Embedding.from_pretrained(table))
    assert_same_tensors(compute(model, {"input_ids": ids}), compute(other, {"input_ids": ids}))


def add_hooks(model):
    model.model.pooler.register_forward_hook(lambda module, args, output: output.square())
    model.model.embeddings.register_forward_hook(lambda module, args, output: output * 2)


class OwnLinear(nn.Linear):
    def forward(self, x):
        return x + 1


LAYER = nn.Linear(36, 2)
# Changes after the call, and before it.
AFTER = {"hooks": add_hooks, "classifier": lambda model: setattr(model, "classifier", LAYER)}
BEFORE = {
    "own layer": lambda model: setattr(model.model.pooler, "dense", OwnLinear(36, 36)),
    "norm without bias": lambda model: setattr(model.model.embeddings, "norm", nn.LayerNorm(36, bias=False)),
    "hooks of transformers": lambda model: model(torch.arange(6).view(1, 6), output_attentions=True),
}


@pytest.mark.parametrize("change", [*AFTER, *BEFORE])
def test_changes_outside_of_the_stack_take_effect(change):
    model, other = (make("ForSequenceClassification", attn_implementation="eager") for _ in range(2))
    inputs = inputs_for()
    (AFTER | BEFORE)[change](other)
    if change in BEFORE:
        BEFORE[change](model)
    model.optimize_for_inference()
    if change in AFTER:
        AFTER[change](model)
    assert_same_tensors(compute(model, inputs), compute(other, inputs))


def add_hook(kind):
    return lambda module: getattr(module, f"register_{kind}_hook")(lambda *args: None)


def identity(x, *args, **kwargs):
    return x


def set_attribute(name, value):
    return lambda module: setattr(module, name, value)


def derive(module):
    module.__class__ = type("Own", (type(module),), {})


OwnParameter = type("OwnParameter", (nn.Parameter,), {})
BLOCK = "model.encoder.blocks.1"
CHANGES = [
    (f"{BLOCK}.attention.query", add_hook("forward")),
    (f"{BLOCK}.feed_forward", add_hook("forward_pre")),
    (f"{BLOCK}.dropout", add_hook("full_backward")),
    (BLOCK, add_hook("full_backward_pre")),
    ("lm_head.dense", add_hook("forward")),
    (f"{BLOCK}.attention.output", set_attribute("forward", identity)),
    (f"{BLOCK}.attention", derive),
    ("model.encoder", derive),
    (f"{BLOCK}.attention.key", parametrizations.weight_norm),
    (f"{BLOCK}.attention.key", lambda module: prune.random_unstructured(module, "weight", 0.5)),
    (f"{BLOCK}.attention.query", set_attribute("weight", OwnParameter(torch.zeros(36, 36)))),
    (f"{BLOCK}.attention", set_attribute("is_causal", True)),
    (f"{BLOCK}.attention_norm", set_attribute("eps", 0.5)),
    ("model.encoder", lambda stack: stack.blocks[1].to(torch.bfloat16)),
]
REPLACED = [
    (f"{BLOCK}.attention_norm", nn.RMSNorm(36)),
    (f"{BLOCK}.feed_forward.activation", nn.ReLU()),
    (f"{BLOCK}.attention.key", nn.Linear(36, 36, bias=False)),
    (f"{BLOCK}.adapter", nn.Linear(36, 36)),
    ("model.encoder.blocks.2", nn.Identity()),
    (BLOCK, None),
]


def assert_refused(model, path):
    """The error begins with the path of the module, and nothing has changed."""
    modules = list(model.modules())
    with pytest.raises(RuntimeError, match=f"^{re.escape(path)} "):
        model.optimize_for_inference()
    assert [*map(id, model.modules())] == [*map(id, modules)]


@pytest.mark.parametrize(("path", "change"), CHANGES)
def test_changed_modules_are_refused(path, change):
    model = make()
    change(model.get_submodule(path))
    assert_refused(model, path)


@pytest.mark.parametrize(("path", "module"), REPLACED)
def test_replaced_added_and_missing_modules_are_refused(path, module):
    model = make()
    parent, _, name = path.rpartition(".")
    if module is None:
        delattr(model.get_submodule(parent), name)
    else:
        setattr(model.get_submodule(parent), name, module)
    assert_refused(model, path)


def test_adapters_are_refused():
    peft = pytest.importorskip("peft")
    model, inputs = peft.get_peft_model(make(), peft.LoraConfig(target_modules=["query"])).eval(), inputs_for()
    expected = compute(model, inputs)
    with pytest.raises(RuntimeError, match="query"):
        model.optimize_for_inference()
    assert_equal_tensors(compute(model, inputs), expected)


# ---------------------------------------------------------------------------------------------------------------------
# What an optimised model refuses

FULL = torch.ones(2, 1, 5, 5, dtype=torch.bool)
# Fields of the configuration, and arguments of the call.
UNSUPPORTED = [
    *(({}, options) for options in ({"output_attentions": True}, {"attention_mask": FULL}, {"is_causal": False})),
    (CROSSED, {"encoder_hidden_states": torch.zeros(2, 0, 36)}),
]


@pytest.mark.parametrize(("fields", "options"), UNSUPPORTED, ids=str)
@pytest.mark.parametrize("head", ["Model", "ForCausalLM"])
def test_unsupported_arguments(head, fields, options):
    model, ids = make(head, **fields).optimize_for_inference(), torch.arange(10).view(2, 5)
    with pytest.raises(RuntimeError, match=next(iter(options))):
        model(ids, **options)
    model.set_attn_implementation("flex_attention")
    with pytest.raises(RuntimeError, match="attn_implementation"):
        model(ids)


@pytest.mark.parametrize("mask", [[[1, 1, 0], [0, 1, 1]], [[1, 1, 0], [0, 0, 0]]])
def test_pooler_does_not_read_padding(mask):
    ids, mask = torch.arange(6).view(2, 3), torch.tensor(mask)
    with pytest.raises(ValueError, match="attention_mask"):
        make("Model").optimize_for_inference()(ids, mask)
    without = make("ForMaskedLM")
    expected = without(ids, mask).logits
    actual = without.optimize_for_inference()(ids, mask).logits
    assert_same_tensors({"": actual}, {"": expected}, mask.bool())


OPERATIONS = {
    "training": lambda model, path: model.train(),
    "float16": lambda model, path: model.half(),
    "meta": lambda model, path: model.to("meta"),
    "state_dict": lambda model, path: model.state_dict(),
    "load_state_dict": lambda model, path: model.load_state_dict(make("Model").state_dict()),
    "save_pretrained": lambda model, path: model.save_pretrained(path / "saved"),
    "push_to_hub": lambda model, path: model.push_to_hub("user/name"),
    "save_as_bert": lambda model, path: model.save_as_bert(path / "saved"),
    "resize_token_embeddings": lambda model, path: model.resize_token_embeddings(120),
    "optimize_for_inference": lambda model, path: model.optimize_for_inference(torch.bfloat16),
}


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("place", ["Model/", "ForMaskedLM/model", f"{SEQ2SEQ}/model.encoder"])
def test_operations_are_refused_before_anything_changed(tmp_path, operation, place):
    head, part = place.split("/")
    model, inputs = make(head), inputs_for(head)
    model.get_submodule(part).optimize_for_inference()
    expected, config = compute(model, inputs), copy.deepcopy(model.config.to_dict())
    with pytest.raises(RuntimeError, match=operation):
        OPERATIONS[operation](model, tmp_path)
    assert not list(tmp_path.iterdir())
    assert model.config.to_dict() == config
    assert not any(module.training for module in model.modules())
    assert_equal_tensors(compute(model, inputs), expected)


def test_parts_refuse_the_same():
    model = make("Model").optimize_for_inference()
    for part in (model.encoder, model.pooler):
        for call in (part.half, lambda part=part: part.to("meta"), part.state_dict):
            with pytest.raises(RuntimeError, match="optimised"):
                call()
    model.to("cpu").float().eval().train(False).requires_grad_(False).share_memory()  # changes nothing
    assert model.dtype == torch.float32
    assert min(model.num_parameters(), model.get_memory_footprint()) > 0


@pytest.mark.parametrize("rows", [1, 3])
def test_gradients_are_refused(tmp_path, rows):
    make("Model").save_pretrained(tmp_path)
    model = ScratchBertModel.from_pretrained(tmp_path).optimize_for_inference()
    embeds = torch.randn(1, rows, 36, requires_grad=True)
    for call in (lambda x: model(inputs_embeds=x), model.encoder, model.pooler):
        with pytest.raises(RuntimeError, match="no_grad"):
            call(embeds)
    with torch.no_grad():
        model(inputs_embeds=embeds)
    model(inputs_embeds=embeds.detach())
    model.set_attn_implementation("eager")
    with torch.no_grad(), pytest.raises(RuntimeError, match="no_grad"):
        torch.func.jacfwd(lambda factor: model(inputs_embeds=embeds * factor)[0].sum())(torch.tensor(1.0))


# ---------------------------------------------------------------------------------------------------------------------
# Copies and memory


@every_model
@pytest.mark.parametrize("way", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
@pytest.mark.parametrize("dtype", [*DTYPES, torch.bfloat16])
def test_copies(head, fields, way, dtype):
    """A deep copy shares the weights, which never change."""
    model, inputs = make(head, **fields).optimize_for_inference(dtype), inputs_for(head)
    again = way(model)
    found, copied = map(matrices_of, (model, again))
    assert len(copied) == len(found)
    assert copied == found if way is copy.deepcopy else not copied & found
    assert_equal_tensors(compute(again, inputs), compute(model, inputs))


@needs_library
def test_pickle_is_refused_where_its_weights_cannot_be_multiplied(request):
    stored = pickle.dumps(make().optimize_for_inference())
    request.getfixturevalue("no_library")
    with pytest.raises(RuntimeError, match="optimize_for_inference"):
        pickle.loads(stored)


@pytest.mark.parametrize("head", ["ForMaskedLM", SEQ2SEQ])
@pytest.mark.parametrize("dtype", DTYPES)
def test_weights_are_freed_block_by_block(head, dtype):
    model, freed = make(head), []
    base = model.get_encoder() if head == SEQ2SEQ else model.model
    linear = [module for module in model.modules() if type(module) is nn.Linear]
    weights = [weakref.ref(module.weight, lambda _: freed.append(is_prepacked(base.encoder))) for module in linear]
    del linear
    model.optimize_for_inference(dtype)
    gc.collect()
    assert not freed[0]  # before the last block was prepacked
    assert not any(weight() is not None for weight in weights)


def test_weight_that_another_model_shares_and_trains():
    weight, x = nn.Parameter(torch.randn(36, 36)), torch.randn(2, 36)
    one, other = make("Model"), make("Model")
    for model in (one, other):
        model.pooler.dense.weight = weight
    one.optimize_for_inference()
    weight.data.mul_(2)
    dense = other.pooler.dense
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


def test_one_model_optimised_in_threads():
    model, inputs = make(), inputs_for()
    expected, start = compute(model, inputs), threading.Barrier(4)

    def optimize(_):
        start.wait()
        try:
            return model.optimize_for_inference()
        except RuntimeError as error:
            return error

    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(optimize, range(4)))
    assert results.count(model) == 1
    assert all_prepacked(model)
    assert_same_tensors(compute(model, inputs), expected)


# ---------------------------------------------------------------------------------------------------------------------
# What stays an ordinary model, with a warning

ORDINARY = {
    "float16": ({}, torch.float16),
    "float64": ({}, torch.float64),
    "an activation that depends on the batch": ({"hidden_act": "silu"}, torch.float32),
}


@pytest.mark.parametrize(("fields", "dtype"), ORDINARY.values(), ids=ORDINARY)
def test_ordinary_models(fields, dtype, said, no_library):
    model, inputs = make(**fields).to(dtype), inputs_for()
    expected, before = compute(model, inputs), copy.deepcopy(model.state_dict())
    for _ in range(2):
        assert_equal_tensors(compute(model.optimize_for_inference(), inputs), expected)
    assert_equal_tensors(model.state_dict(), before)
    assert all(parameter.requires_grad for parameter in model.train().parameters())
    [line] = said()
    assert str(dtype) in line
    assert model.config.hidden_act in line


def test_int8_requires_the_library(said, no_library):
    model, inputs = make(), inputs_for()
    expected = compute(model, inputs)
    assert_same_tensors(compute(model.optimize_for_inference("int8"), inputs), expected)
    assert all_prepacked(model)
    assert ["int8" in line for line in said()] == [True]


def test_without_onednn_nothing_is_optimised(said, no_library, monkeypatch):
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert not layers(make().optimize_for_inference())
    assert ["torch.float32" in line for line in said()] == [True]
