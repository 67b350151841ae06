"""`optimize_for_inference`: same results, same checkpoint, one copy in memory, errors for unsupported operations."""

import copy
import gc
import io
import pickle
import re
import sys
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers.activations import ACT2FN

from modeling_scratchbert import ScratchBertConfig, ScratchBertModel, inference, prepacking
from modeling_scratchbert.inference import PrepackedLinear
from modeling_scratchbert.prepacking import PrepackedWeight
from support.comparison import assert_same_tensors
from support.models import ENCODER_DECODERS, OURS, inputs_for
from support.prepacked import ODD, TIED, all_prepacked, compute, every_model, layers, make, record_row_counts


@pytest.fixture
def no_onednn(monkeypatch):
    """A torch without oneDNN, until it is undone."""
    inference.logging.logging.Logger.warning_once.cache_clear()
    with monkeypatch.context() as patched:
        patched.setattr(torch.backends.mkldnn, "is_available", lambda: False)
        yield patched


def assert_same_state(actual, expected):
    assert list(actual) == list(expected)
    for name, tensor in expected.items():
        assert type(actual[name]) is type(tensor), name
        assert actual[name].dtype == tensor.dtype, name
        assert torch.equal(actual[name], tensor), name
    assert shared(actual) == shared(expected)


def shared(state):
    """The sets of names whose tensors are one in memory."""
    names = {}
    for name, tensor in state.items():
        names.setdefault(tensor.data_ptr(), set()).add(name)
    return sorted(sorted(group) for group in names.values() if len(group) > 1)


# --- the numbers


@every_model
def test_the_same_numbers(head, fields):
    model, inputs = make(head, **fields), inputs_for(head)
    expected = compute(model, inputs)
    assert model.optimize_for_inference() is model
    assert all_prepacked(model)
    assert not any(type(module) is nn.Linear for module in model.modules())
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
            assert after[name].dtype == torch.bfloat16
            assert error <= 2 * own_error + 1e-2, name


@pytest.mark.parametrize("activation", ["gelu", "gelu_new", "gelu_pytorch_tanh", "gelu_fast", "quick_gelu", "relu"])
def test_gelu_is_fused_where_it_is_the_same(activation):
    model, inputs = make(hidden_act=activation), inputs_for("ForMaskedLM")
    expected = compute(model, inputs)
    block = model.optimize_for_inference().model.encoder.blocks[0]
    fused = {"gelu": "none", "gelu_new": "tanh", "gelu_pytorch_tanh": "tanh"}.get(activation)
    assert block.feed_forward.intermediate.gelu_form == model.lm_head.dense.gelu_form == fused
    assert block.feed_forward.output.gelu_form is None
    assert isinstance(block.feed_forward.activation, nn.Identity) == (fused is not None)
    assert_same_tensors(compute(model, inputs), expected)


def test_gelu_of_large_and_of_no_numbers():
    x = torch.cat([torch.linspace(-12, 12, 4001), torch.tensor([-1e30, 1e30, 0.0])])[:, None]
    layer = nn.Linear(1, 1, bias=False)
    layer.weight.data.fill_(1)
    for name in ("gelu", "gelu_new", "gelu_pytorch_tanh"):
        activation = ACT2FN[name]
        form = inference.GELU_FORMS[type(activation).__name__]
        with torch.no_grad():
            actual = PrepackedLinear(layer, form, True).prepack()(x)
            torch.testing.assert_close(actual, activation(x), rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("shape", [(0, 36), (36,), (1, 1, 36), (2, 0, 36), (300, 36)])
def test_any_shape(shape):
    layer, x = nn.Linear(36, 5), torch.randn(shape)
    packed = PrepackedLinear(layer, keeps_weight=True).prepack()
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
def test_prepacked_layers_compute_in_the_weights_dtype_under_autocast(head, fields):
    model, inputs = make(head, **fields), inputs_for(head)
    expected = compute(model, inputs)
    model.optimize_for_inference()
    seen = set()
    for layer in layers(model):
        layer.register_forward_hook(lambda layer, args, output: seen.add(output.dtype))
    with torch.autocast("cpu", torch.bfloat16):
        actual = compute(model, inputs)
    assert seen == {torch.float32}
    for name, tensor in expected.items():
        assert (actual[name] - tensor).abs().max() < 0.1, name


# --- what goes into a checkpoint


@every_model
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_state_and_saved_files_are_as_before(tmp_path, head, fields, dtype):
    model = make(head, **fields).to(dtype)
    before = copy.deepcopy(model.state_dict())
    model.save_pretrained(tmp_path / "before")
    model.optimize_for_inference()
    assert_same_state(model.state_dict(), before)
    assert_same_state(model.state_dict(), before)
    model.save_pretrained(tmp_path / "after")
    for name in ("model.safetensors", "config.json"):
        assert (tmp_path / "after" / name).read_bytes() == (tmp_path / "before" / name).read_bytes()
    torch.save(model.state_dict(), tmp_path / "state.pt")
    assert_same_state(torch.load(tmp_path / "state.pt"), before)


@pytest.mark.parametrize("head", ["Model", "ForMaskedLM", "ForSequenceClassification"])
@pytest.mark.parametrize("tied", [True, False])
def test_saved_as_bert(tmp_path, head, tied):
    model = make(head, tie_word_embeddings=tied)
    model.save_as_bert(tmp_path / "before")
    model.optimize_for_inference().save_as_bert(tmp_path / "after")
    for name in ("model.safetensors", "config.json"):
        assert (tmp_path / "after" / name).read_bytes() == (tmp_path / "before" / name).read_bytes()


def through_pickle(model):
    return pickle.loads(pickle.dumps(model))


def through_torch(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@every_model
@pytest.mark.parametrize("way", [copy.deepcopy, through_pickle, through_torch])
def test_copies_are_prepacked_too(head, fields, way):
    model, inputs = make(head, **fields), inputs_for(head)
    before = copy.deepcopy(model.state_dict())
    model.optimize_for_inference()
    again = way(model)
    assert all_prepacked(again)
    assert all_prepacked(model)
    assert_same_state(again.state_dict(), before)
    weights, copied_weights = ({id(layer.prepacked) for layer in layers(each)} for each in (model, again))
    assert len(copied_weights) == len(weights)
    assert not copied_weights & weights
    assert_same_tensors(compute(again, inputs), compute(model, inputs))


def test_the_weight_of_a_layer_is_given_as_a_copy():
    model = make()
    layer = model.model.encoder.blocks[0].attention.query
    weight, state = layer.weight.detach().clone(), copy.deepcopy(model.state_dict())
    packed = model.optimize_for_inference().model.encoder.blocks[0].attention.query
    assert torch.equal(packed.weight, weight)
    copied = packed.weight
    copied.zero_()
    assert_same_state(model.state_dict(), state)
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight


# --- memory


@every_model
def test_one_copy_in_memory_all_along(monkeypatch, head, fields):
    model = make(head, **fields)
    weights = {id(m.weight): weakref.ref(m.weight) for m in model.modules() if type(m) is nn.Linear}
    tables = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    tied = len(tables & set(weights))
    packed, plain_init = [], PrepackedWeight.__init__

    def counting(self, parameters):
        plain_init(self, parameters)
        packed.extend([self] * len(parameters))
        dense = sum(weight() is not None for weight in weights.values())
        assert dense + len(packed) <= len(weights) + 3 + tied

    monkeypatch.setattr(PrepackedWeight, "__init__", counting)
    model.optimize_for_inference()
    assert len(packed) == len(weights)
    assert sum(weight() is not None for weight in weights.values()) == tied
    model.state_dict()
    assert not any(kind is torch.Tensor for matrix in packed for kind, _ in matrix._dense)


def test_a_weight_that_another_model_shares_and_trains():
    weight, x = nn.Parameter(torch.randn(3, 4)), torch.randn(2, 4)
    one, other = nn.Linear(4, 3), nn.Linear(4, 3)
    one.weight = other.weight = weight
    packed = PrepackedLinear(one).prepack()
    weight.data.mul_(2)
    with torch.no_grad():
        torch.testing.assert_close(PrepackedLinear(other).prepack()(x), other(x))
        torch.testing.assert_close(packed(x), nn.functional.linear(x, weight / 2, one.bias))


def test_nothing_is_left_of_a_model_that_is_gone():
    model = make().optimize_for_inference()
    matrices = [weakref.ref(layer.prepacked) for layer in layers(model)]
    del model
    gc.collect()
    assert not any(matrix() for matrix in matrices)


# --- moving


@every_model
def test_where_onednn_is_missing_the_layers_are_dense(no_onednn, said, head, fields):
    model, inputs = make(head, **fields), inputs_for(head)
    expected, before = compute(model, inputs), copy.deepcopy(model.state_dict())
    model.optimize_for_inference()
    assert {layer.prepacked for layer in layers(model)} == {None}
    assert_same_tensors(compute(model, inputs), expected)
    assert_same_state(model.state_dict(), before)
    assert model.num_parameters() == sum(
        tensor.numel() for tensor in {t.data_ptr(): t for t in before.values()}.values()
    )
    make().optimize_for_inference()
    [line] = [line for line in said() if "oneDNN" in line]
    assert "torch.float32 on cpu" in line


@every_model
def test_to_the_cpu_prepacks_again(no_onednn, head, fields):
    model, inputs = make(head, **fields).optimize_for_inference(), inputs_for(head)
    expected, before = compute(model, inputs), copy.deepcopy(model.state_dict())
    no_onednn.undo()
    model.to("cpu")
    assert all_prepacked(model)
    assert_same_tensors(compute(model, inputs), expected)
    assert_same_state(model.state_dict(), before)
    weights = {tensor.data_ptr() for name, tensor in before.items() if name.endswith("weight")}
    assert len({id(layer.prepacked) for layer in layers(model)}) <= len(weights)


def test_pickle_is_dense_where_onednn_is_missing(monkeypatch):
    model, inputs = make().optimize_for_inference(), inputs_for()
    stored = pickle.dumps(model)
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    again = pickle.loads(stored)
    assert {layer.prepacked for layer in layers(again)} == {None}
    assert_same_tensors(compute(again, inputs), compute(model, inputs))
    assert_same_state(again.state_dict(), model.state_dict())


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_other_dtypes_stay_dense(said, dtype):
    inference.logging.logging.Logger.warning_once.cache_clear()
    model, inputs = make().to(dtype), inputs_for()
    expected = compute(model, inputs)
    assert_same_tensors(compute(model.optimize_for_inference(), inputs), expected)
    assert {layer.prepacked for layer in layers(model)} == {None}
    assert f"{dtype} on cpu" in "\n".join(said())


@every_model
def test_to_another_device_and_back(head, fields):
    """To "meta", which has no values, for want of another device."""
    model = make(head, **fields)
    names = {name: (tensor.shape, tensor.dtype) for name, tensor in model.state_dict().items()}
    model.optimize_for_inference().to("meta")
    assert {layer.prepacked for layer in layers(model)} == {None}
    state = model.state_dict()
    assert {name: (tensor.shape, tensor.dtype) for name, tensor in state.items()} == names
    assert all(tensor.is_meta for tensor in state.values())
    assert model(**{name: value.to("meta") for name, value in inputs_for(head).items() if name != "attention_mask"})
    model.to_empty(device="cpu")
    assert all_prepacked(model)
    assert not any(tensor.is_meta for tensor in model.state_dict().values())


@every_model
def test_to_a_device_that_torch_moves_parameters_to_in_place(monkeypatch, head, fields):
    """As to a GPU: the model is told that here is elsewhere."""
    model, inputs = make(head, **fields), inputs_for(head)
    expected, before = compute(model, inputs), copy.deepcopy(model.state_dict())
    matrices = len({id(layer.prepacked) for layer in layers(model.optimize_for_inference())})
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(PrepackedLinear, "device_after", lambda layer, fn: torch.device("cuda"))
        elsewhere.setattr(inference, "can_prepack", lambda weight: False)
        model._apply(torch.clone)
        assert {layer.prepacked for layer in layers(model)} == {None}
        assert_same_state(model.state_dict(), before)
        assert_same_tensors(compute(model, inputs), expected)
    model._apply(torch.clone)
    assert all_prepacked(model)
    assert len({id(layer.prepacked) for layer in layers(model)}) == matrices
    assert_same_state(model.state_dict(), before)
    assert_same_tensors(compute(model, inputs), expected)


def test_a_move_to_the_same_device_keeps_prepacked_weights():
    model = make().optimize_for_inference()
    matrices = [layer.prepacked for layer in layers(model)]
    model.to("cpu").float().cpu()
    model.share_memory()
    assert [layer.prepacked for layer in layers(model)] == matrices
    assert model.device == torch.device("cpu")
    assert model.dtype == torch.float32
    assert model.num_parameters() > 0
    assert model.get_memory_footprint() > 0


# --- what it refuses


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@every_model
def test_another_dtype_is_refused_before_anything_changed(head, fields, dtype):
    model = make(head, **fields)
    before = copy.deepcopy(model.state_dict())
    model.optimize_for_inference()
    with pytest.raises(RuntimeError, match=rf"{dtype}.*\.to\({dtype}\)"):
        model.to(dtype)
    with pytest.raises(RuntimeError, match=r"torch.float16"):
        model.half()
    assert_same_state(model.state_dict(), before)
    assert all_prepacked(model)


def test_training_is_refused():
    model = make().optimize_for_inference()
    with pytest.raises(RuntimeError, match="training"):
        model.train()
    assert not any(module.training for module in model.modules())
    assert model.eval() is model
    assert model.train(False) is model


def test_gradients_are_refused():
    model = make("Model").optimize_for_inference()
    embeds = torch.randn(2, 5, ODD["hidden_size"], requires_grad=True)
    with pytest.raises(RuntimeError, match=r"torch.no_grad\(\)"):
        model(inputs_embeds=embeds)
    with torch.no_grad():
        model(inputs_embeds=embeds)
    with torch.inference_mode():
        model(inputs_embeds=embeds.detach())
    model(inputs_embeds=embeds.detach())


def test_loading_weights_is_refused():
    other, model = make("Model").state_dict(), make("Model")
    before = copy.deepcopy(model.state_dict())
    model.optimize_for_inference()
    for module, state in ((model, other), (model.encoder.blocks[0].attention.query, {})):
        with pytest.raises(RuntimeError, match=r"loading weights.* before optimize_for_inference\(\)"):
            module.load_state_dict(state)
    assert_same_state(model.state_dict(), before)


@pytest.mark.parametrize("head", ["ForMaskedLM", "ForConditionalGeneration"])
def test_resizing_is_refused(head):
    model = make(head).optimize_for_inference()
    with pytest.raises(RuntimeError, match=r"resize_token_embeddings\(\) before optimize_for_inference\(\)"):
        model.resize_token_embeddings(120)
    assert model.config.vocab_size == ODD["vocab_size"]


def test_twice_is_once():
    model = make().optimize_for_inference()
    modules = list(model.modules())
    assert model.optimize_for_inference() is model
    assert all(one is other for one, other in zip(model.modules(), modules, strict=True))


def test_a_part_and_then_the_whole():
    model, inputs = make(), inputs_for()
    expected, before = compute(model, inputs), copy.deepcopy(model.state_dict())
    model.model.optimize_for_inference()
    with pytest.raises(RuntimeError, match="training"):
        model.train()
    model.optimize_for_inference()
    assert all_prepacked(model)
    assert_same_tensors(compute(model, inputs), expected)
    assert_same_state(model.state_dict(), before)


def test_adapters_are_refused_until_they_are_merged():
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=["query", "value", "intermediate"], init_lora_weights=False)
    model, inputs = peft.get_peft_model(make(), config), inputs_for()
    state = copy.deepcopy(model.state_dict())
    with pytest.raises(RuntimeError, match=r"query has an adapter.*merge_and_unload\(\)"):
        model.optimize_for_inference()
    assert_same_state(model.state_dict(), state)
    assert model.training
    expected = compute(model.eval(), inputs)
    merged = model.merge_and_unload().optimize_for_inference()
    assert all_prepacked(merged)
    assert_same_tensors(compute(merged, inputs), expected)
    with pytest.raises(ValueError, match="PrepackedLinear"):
        peft.get_peft_model(merged, config)


def test_offloaded_and_quantised_models_are_refused():
    accelerate = pytest.importorskip("accelerate")
    with torch.device("meta"):
        empty = OURS["Model"](ScratchBertConfig(**ODD))
    for model in (empty, accelerate.cpu_offload(make("Model"), execution_device="cpu")):
        with pytest.raises(RuntimeError, match=r"offloaded.*device_map"):
            model.optimize_for_inference()
        assert not layers(model)
    quantised = make("Model")
    quantised.hf_quantizer = object()
    with pytest.raises(RuntimeError, match=r"quantised.*quantization_config"):
        quantised.optimize_for_inference()


def add_forward_hook(module):
    module.register_forward_hook(lambda module, args, output: output.square())


def add_forward_pre_hook(module):
    module.register_forward_pre_hook(lambda module, args: (args[0].square(),))


def patch_forward(module):
    forward = module.forward
    module.forward = lambda x: forward(x).square()


def add_backward_hook(module):
    module.register_full_backward_hook(lambda *args: None)


def add_backward_pre_hook(module):
    module.register_full_backward_pre_hook(lambda *args: None)


MODIFICATIONS = [add_forward_hook, add_forward_pre_hook, patch_forward, add_backward_hook, add_backward_pre_hook]
PLACES = [
    "model.encoder.blocks.0.attention.query",
    "model.encoder.blocks.0.feed_forward.intermediate",
    "model.encoder.blocks.0.feed_forward.activation",
    "lm_head.activation",
]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("modify", MODIFICATIONS)
def test_layers_and_activations_with_hooks_or_a_patched_forward_do_not_change(modify, place):
    model, inputs = make(), inputs_for()
    unmodified = compute(model, inputs)
    modified = model.get_submodule(place)
    modify(modified)
    expected = compute(model, inputs)
    if modify in (add_forward_hook, add_forward_pre_hook, patch_forward):
        assert (expected["logits"] - unmodified["logits"]).abs().max() > 1e-3
    assert_same_tensors(compute(model.optimize_for_inference(), inputs), expected)
    assert model.get_submodule(place) is modified
    assert all_prepacked(model)


def test_gelu_is_not_fused_if_the_forward_around_it_is_patched():
    model, inputs = make(), inputs_for()
    feed_forward = model.model.encoder.blocks[0].feed_forward
    feed_forward.forward = lambda x: feed_forward.output(feed_forward.intermediate(x))
    expected = compute(model, inputs)
    assert_same_tensors(compute(model.optimize_for_inference(), inputs), expected)


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
    prepacked = {layer.prepacked for model in models for layer in layers(model)}
    weights_by_key = torch.ops.scratchbert.weights_by_key
    assert len({weight.key for weight in prepacked}) == len(models) * len({m.prepacked for m in layers(models[0])})
    assert all(weights_by_key[weight.key] is weight for weight in prepacked)


@pytest.mark.usefixtures("_frequent_thread_switches")
def test_one_model_optimised_in_threads():
    for _ in range(10):
        model, inputs = make(), inputs_for()
        expected = compute(model, inputs)
        in_threads(lambda model: model.optimize_for_inference(), [model] * 4)
        assert all_prepacked(model)
        assert_same_tensors(compute(model, inputs), expected)


# --- row counts, and the memory that oneDNN's cache takes for each


def test_the_first_row_counts_are_exact():
    prepacked = PrepackedLinear(nn.Linear(4, 3)).prepack()
    computed = record_row_counts(prepacked.prepacked)
    first = list(range(2730, 2761))
    rounded = {2761: 2816, 2730 + 4096: 6912, 2048: 2048, 100: 104, 17: 18}
    exact = [*first, *range(1, 17), *first]
    with torch.no_grad():
        for rows in [*exact, *rounded, *exact]:
            assert prepacked(torch.randn(rows, 4)).shape == (rows, 3)
    assert computed == [*exact, *rounded.values(), *exact]
    for rows in range(17, 5000):
        assert rows <= prepacked.prepacked._round_row_count(rows) <= 1.125 * rows


def test_rows_are_appended_without_a_copy_if_their_storage_has_them():
    storage = torch.randn(10, 4)
    extended = prepacking.extend_rows(storage[2:5], 6)
    assert extended.data_ptr() == storage[2:5].data_ptr()
    assert torch.equal(extended, storage[2:8])
    for x in (storage[6:], storage[:3].clone(), storage.t()[:, :4].t()[:3], storage[::2][:2]):
        extended = prepacking.extend_rows(x, len(x) + 1)
        assert extended.shape == (len(x) + 1, 4)
        assert torch.equal(extended[: len(x)], x)
    assert prepacking.extend_rows(storage[6:], 5).data_ptr() != storage[6:].data_ptr()


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="only Linux tells what of a file is in memory")
def test_a_mapped_file_does_not_stay_in_memory(tmp_path):
    make("Model", hidden_size=512, intermediate_size=2048).save_pretrained(tmp_path)
    model = ScratchBertModel.from_pretrained(tmp_path)
    query = model.encoder.blocks[0].attention.query.weight

    def mapped_kib() -> int:
        entries = re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text(), flags=re.MULTILINE)
        return sum(
            int(re.search(r"^Rss: +(\d+) kB$", entry, flags=re.MULTILINE)[1])
            for entry in entries
            if str(tmp_path / "model.safetensors") in entry
        )

    expected = query.clone()
    assert sum(weight.sum().item() for weight in model.parameters())  # reads all
    before, size = mapped_kib(), model.get_memory_footprint() / 1024
    assert before > 0.9 * size
    model.optimize_for_inference()
    kept = sum(weight.nbytes for weight in model.parameters()) / 1024
    assert mapped_kib() < kept + 0.1 * size
    assert torch.equal(query, expected)  # one that a user still holds


@pytest.mark.parametrize("is_intel", [True, False])
def test_one_or_two_rows_are_multiplied_by_the_mapped_weights_on_intel(monkeypatch, tmp_path, is_intel):
    monkeypatch.setattr(prepacking, "is_intel", lambda: is_intel)
    make("ForCausalLM").save_pretrained(tmp_path)
    reference, model = (OURS["ForCausalLM"].from_pretrained(tmp_path).eval() for _ in range(2))
    prepacked = layers(model.optimize_for_inference())
    computed = [record_row_counts(layer.prepacked) for layer in prepacked]
    dense_rows = 2 if is_intel else 0
    for rows in (1, 2, 3, 40):
        ids = torch.arange(rows)[None] + 5
        assert_same_tensors(compute(model, {"input_ids": ids}), compute(reference, {"input_ids": ids}))
        assert all(any(counts) == (rows > dense_rows) for counts in computed)
        for counts in computed:
            counts.clear()
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
        assert all(layer(torch.randn(1, layer.in_features)).dtype == torch.float32 for layer in prepacked)
        assert all(computed)  # not dense, which autocast would round
    for layer in prepacked:
        assert layer(torch.randn(2, layer.in_features, dtype=torch.bfloat16)).dtype == torch.float32


@pytest.mark.parametrize("rows", [1, 3])
def test_gradients_are_refused_whatever_multiplies(monkeypatch, tmp_path, rows):
    monkeypatch.setattr(prepacking, "is_intel", lambda: True)
    make().save_pretrained(tmp_path)
    for layer in layers(OURS["ForMaskedLM"].from_pretrained(tmp_path).optimize_for_inference()):
        with pytest.raises(RuntimeError, match="no_grad"):
            layer(torch.randn(rows, layer.in_features, requires_grad=True))


def test_dropout_in_training_mode_drops():
    model, inputs = make(hidden_dropout_prob=0.5).optimize_for_inference(), inputs_for()
    expected = compute(model, inputs)
    assert_same_tensors(compute(model, inputs), expected)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.train()
    assert not torch.allclose(compute(model, inputs)["logits"], expected["logits"])


# --- pickled by value, as dill does with code from a checkpoint's folder


# --- torch.compile
