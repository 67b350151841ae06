"""`probe.json`: what a saved model holds and computes; and `verify=True`, which refuses a model that differs."""

import hashlib
import json

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn

from modeling_scratchbert import ScratchBertForMaskedLM, ScratchBertModel
from support.checkpoint_kinds import assert_same_outputs, config_json, logged_warnings, write_bert
from support.models import (
    BERTS,
    ENCODER_DECODERS,
    OURS,
    REFERENCES,
    random_bert,
    random_scratchbert,
    tiny_config,
)

# Inputs have eight tokens, and the fifth is the last one of the second row.
LAST = 4

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def probe_of(folder, name="probe.json") -> dict:
    return json.loads((folder / name).read_text(encoding="utf-8"))


def saved(folder, head="ForPreTraining", seed=0, **fields):
    model = random_scratchbert(head, seed, **fields)
    model.save_pretrained(folder)
    return model


def verified(folder, head="ForPreTraining", **kwargs):
    return OURS[head].from_pretrained(folder, verify=True, **kwargs)


def refused(folder, head="ForPreTraining", error=ValueError, **kwargs) -> str:
    """The message of the error that `verify=True` raises, for a model that opens without it."""
    with pytest.raises(error) as raised:
        verified(folder, head, **kwargs)
    OURS[head].from_pretrained(folder, **kwargs)
    return str(raised.value)


def stored_bytes(path) -> dict[str, tuple[int, bytes]]:
    """Of each tensor in a file of safetensors, its place in the file and its bytes, without the library."""
    content = path.read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:start])
    header.pop("__metadata__")
    offsets = {name: [start + place for place in entry["data_offsets"]] for name, entry in header.items()}
    return {name: (begin, content[begin:end]) for name, (begin, end) in offsets.items()}


# --- what is written


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_digests_are_those_of_the_bytes_in_the_file(tmp_path, dtype):
    random_scratchbert().to(dtype).save_pretrained(tmp_path)
    expected = {
        name: hashlib.sha256(held).hexdigest()
        for name, (_, held) in stored_bytes(tmp_path / "model.safetensors").items()
    }
    tied = {"lm_head.decoder.weight": expected["model.embeddings.word_embeddings.weight"]}
    assert probe_of(tmp_path)["tensors"] == expected | tied


@pytest.mark.parametrize("fields", [{}, {"add_cross_attention": True, "is_decoder": True}], ids=str)
@pytest.mark.parametrize("head", BERTS)
def test_outputs_are_those_of_the_reference(tmp_path, head, fields):
    if fields and head not in ("Model", "ForCausalLM"):
        pytest.skip("a decoder of these classes only")
    model = saved(tmp_path, head, **fields)
    model.save_as_bert(tmp_path / "bert")
    reference = REFERENCES[head].from_pretrained(tmp_path / "bert").eval()
    probe = probe_of(tmp_path)
    rows = {name: torch.tensor(numbers) for name, numbers in probe["inputs"].items()}
    assert rows["attention_mask"].tolist() == [[1] * 8, [1] * (LAST + 1) + [0] * 3]
    cross = {"encoder_hidden_states": reference.get_input_embeddings()(rows["input_ids"])} if fields else {}
    batch = {name: table[None] for name, table in rows.items()} if head == "ForMultipleChoice" else rows
    with torch.no_grad():
        expected = dict(reference.base_model(**rows, **cross)) | dict(reference(**batch, **cross))
    assert probe["class"] == type(model).__name__
    names = {"ForPreTraining": {"prediction_logits", "seq_relationship_logits"}, "Model": {"pooler_output"}}.get(head)
    names = names or ({"start_logits", "end_logits"} if head == "ForQuestionAnswering" else {"logits"})
    assert {"last_hidden_state", *names} <= set(probe["outputs"])
    for name, numbers in probe["outputs"].items():
        table = expected[name][:, LAST] if expected[name].ndim == 3 else expected[name]
        torch.testing.assert_close(torch.tensor(numbers), table[:, : LAST + 1], rtol=0, atol=1e-5)


@pytest.mark.parametrize("head", ENCODER_DECODERS)
def test_outputs_of_an_encoder_and_a_decoder(tmp_path, head):
    model = saved(tmp_path, head)
    probe = probe_of(tmp_path)
    rows = {name: torch.tensor(numbers) for name, numbers in probe["inputs"].items()}
    with torch.no_grad():
        expected = dict(model.base_model(**rows)) | dict(model(**rows))
    assert set(probe["outputs"]) == {"last_hidden_state", "encoder_last_hidden_state"} | (expected.keys() & {"logits"})
    for name, numbers in probe["outputs"].items():
        torch.testing.assert_close(torch.tensor(numbers), expected[name][:, LAST, : LAST + 1], rtol=0, atol=1e-5)


def test_nothing_is_written_elsewhere(tmp_path):
    model = saved(tmp_path)
    model.save_as_bert(tmp_path / "bert")
    assert not (tmp_path / "bert" / "probe.json").exists()
    assert not {"verify", "probe"} & set(config_json(tmp_path))
    assert not {"verify", "probe"} & set(verified(tmp_path).config.to_dict())


def watched(model) -> list:
    """Calls of the hooks that are registered on every module."""
    calls = []
    for module in model.modules():
        module.register_forward_hook(lambda *args: calls.append("after"))
        module.register_forward_pre_hook(lambda *args: calls.append("before"))
        module.register_full_backward_hook(lambda *args: calls.append("backward"))
    return calls


@pytest.mark.parametrize("head", OURS)
def test_saving_a_model_in_training_observes_and_changes_nothing(tmp_path, head):
    model = random_scratchbert(head)
    model.save_pretrained(tmp_path / "at rest")
    model.train()
    model.base_model.get_input_embeddings().eval()
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    calls, modes = watched(model), [module.training for module in model.modules()]
    nn.modules.module.register_module_forward_hook(hook := lambda *args: calls.append("everywhere"))
    attributes = [set(vars(module)) for module in model.modules()]
    parameters, tensors = list(model.parameters()), {name: t.clone() for name, t in model.state_dict().items()}
    random_state = torch.get_rng_state()
    try:
        with torch.autocast("cpu", torch.bfloat16):
            model.save_pretrained(tmp_path / "in training")
    finally:
        hooks = nn.modules.module._global_forward_hooks
        for key in [key for key, each in hooks.items() if each is hook]:
            del hooks[key]
    assert calls == []
    assert torch.equal(torch.get_rng_state(), random_state)
    assert [module.training for module in model.modules()] == modes
    assert [set(vars(module)) for module in model.modules()] == attributes
    assert all(old is new for old, new in zip(parameters, model.parameters(), strict=True))
    assert all(torch.equal(parameter.grad, torch.ones_like(parameter)) for parameter in parameters)
    assert all(parameter.requires_grad for parameter in parameters)
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in model.state_dict().items())
    assert probe_of(tmp_path / "in training") == probe_of(tmp_path / "at rest")


def test_a_replaced_forward_is_not_called(tmp_path):
    """Accelerate replaces it for mixed precision."""
    model = random_scratchbert("Model")

    def forward(*args, **kwargs):
        raise AssertionError("called")

    model.forward = model.encoder.blocks[0].forward = forward
    model.save_pretrained(tmp_path)
    verified(tmp_path, "Model")


# --- what is accepted


@pytest.mark.parametrize("fields", [{}, {"norm_first": True, "position_embedding_type": "sinusoidal"}], ids=str)
@pytest.mark.parametrize("head", OURS)
@pytest.mark.parametrize(("at_save", "at_load"), [(a, b) for a in DTYPES[:2] for b in DTYPES], ids=str)
def test_every_class_in_every_dtype(tmp_path, head, fields, at_save, at_load):
    """Tensors are rounded to another dtype; what is computed is compared in float32, before they are."""
    random_scratchbert(head, **fields).to(at_save).save_pretrained(tmp_path)
    assert verified(tmp_path, head, dtype=at_load).dtype == at_load


@pytest.mark.parametrize(
    "fields",
    [
        {"tie_word_embeddings": False},
        {"tie_encoder_decoder": True, "share_embeddings": True},
        {"tie_encoder_decoder": False, "share_embeddings": False},
        {"num_decoder_layers": 1},
        {"vocab_size": 5, "max_position_embeddings": 3, "type_vocab_size": 1},
    ],
    ids=str,
)
def test_ties_and_small_sizes(tmp_path, fields):
    for head in ("ForConditionalGeneration", "ForMaskedLM"):
        model = saved(tmp_path / head, head, **fields)
        again, info = verified(tmp_path / head, head, output_loading_info=True)
        assert not info["missing_keys"]
        assert len(list(again.parameters())) == len(list(model.parameters()))  # tied ones count once


def test_in_shards(tmp_path):
    model = random_scratchbert()
    model.save_pretrained(tmp_path, max_shard_size="10KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    assert_same_outputs(verified(tmp_path), model)


@pytest.mark.parametrize("pooler", [True, False])
def test_the_base_model_of_another_class(tmp_path, pooler):
    """It has fewer tensors than the file, under names without a prefix."""
    saved(tmp_path)
    model = verified(tmp_path, "Model", add_pooling_layer=pooler)
    assert (model.pooler is not None) == pooler
    assert type(transformers.AutoModel.from_pretrained(tmp_path, verify=True)) is ScratchBertModel


def test_a_model_without_a_pooler(tmp_path):
    ScratchBertModel(tiny_config(), add_pooling_layer=False).save_pretrained(tmp_path)
    verified(tmp_path, "Model", add_pooling_layer=False)
    assert "pooler.dense.weight, pooler.dense.bias are not in" in refused(tmp_path, "Model")


def test_the_auto_class_of_a_task(tmp_path):
    saved(tmp_path, "ForMaskedLM")
    model = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path, verify=True)
    assert type(model) is ScratchBertForMaskedLM
    assert not model.training


def test_weights_that_are_not_finite(tmp_path):
    """A diverged model is saved as it is."""
    model = random_scratchbert()
    nn.init.constant_(model.model.pooler.dense.bias, torch.nan)
    model.save_pretrained(tmp_path)
    verified(tmp_path)
    verified(tmp_path, dtype=torch.bfloat16)


class Gated(ScratchBertForMaskedLM):
    """A model with a part of its own, which its forward pass expects an argument for."""

    def __init__(self, config):
        super().__init__(config)
        self.gate = nn.Parameter(torch.ones(()))
        self.post_init()

    def forward(self, strength, **kwargs):
        raise AssertionError("called")


def test_a_derived_class_has_digests_alone(tmp_path):
    Gated(tiny_config()).save_pretrained(tmp_path)
    probe = probe_of(tmp_path)
    assert "gate" in probe["tensors"]
    assert probe["outputs"] == {}
    Gated.from_pretrained(tmp_path, verify=True)
    flip_bit(tmp_path / "model.safetensors", "gate")
    with pytest.raises(ValueError, match=r"^gate in the files"):
        Gated.from_pretrained(tmp_path, verify=True)


def test_a_variant_has_its_own(tmp_path):
    models = {variant: random_scratchbert(seed=seed) for seed, variant in enumerate([None, "ema"])}
    for variant, model in models.items():
        model.save_pretrained(tmp_path, variant=variant)
    for variant, model in models.items():
        assert_same_outputs(verified(tmp_path, variant=variant), model)
    assert probe_of(tmp_path)["tensors"] != probe_of(tmp_path, "probe.ema.json")["tensors"]
    models[None].save_pretrained(tmp_path, state_dict=models[None].state_dict())
    assert not (tmp_path / "probe.json").exists()
    assert_same_outputs(verified(tmp_path, variant="ema"), models["ema"])


# --- what is refused


def flip_bit(path, name, byte=0):
    """The lowest bit of a byte of one tensor in a file of safetensors."""
    place, _ = stored_bytes(path)[name]
    content = bytearray(path.read_bytes())
    content[place + byte] ^= 1
    path.write_bytes(content)


def test_one_bit_of_any_tensor(tmp_path):
    """The lowest of a number in float32, which no output shows."""
    model = saved(tmp_path)
    names = sorted(stored_bytes(tmp_path / "model.safetensors"))[::4]
    assert len(names) >= 10
    intact = (tmp_path / "model.safetensors").read_bytes()
    for name in names:
        flip_bit(tmp_path / "model.safetensors", name)
        assert_same_outputs(type(model).from_pretrained(tmp_path), model, tolerance=1e-4)
        for dtype in DTYPES[:2]:
            message = refused(tmp_path, dtype=dtype)
            assert message.startswith(f"{name} in the files of {tmp_path} differs from probe.json; expected")
        (tmp_path / "model.safetensors").write_bytes(intact)
    verified(tmp_path)


@pytest.mark.parametrize("size", ["50GB", "10KB"])
def test_two_tensors_under_each_other_s_names(tmp_path, size):
    random_scratchbert().save_pretrained(tmp_path, max_shard_size=size)
    query, key = (f"model.encoder.blocks.1.attention.{name}.weight" for name in ("query", "key"))
    files = {path: load_file(path) for path in tmp_path.glob("*.safetensors")}
    whole = {name: tensor for tensors in files.values() for name, tensor in tensors.items()}
    swapped = {query: whole[key], key: whole[query]}
    for path, tensors in files.items():
        save_file({name: swapped.get(name, tensor) for name, tensor in tensors.items()}, path, {"format": "pt"})
    message = refused(tmp_path)
    assert query in message
    assert key in message


def test_a_tensor_that_is_not_in_the_file(tmp_path):
    saved(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.pooler.dense.weight"]
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    assert refused(tmp_path).startswith("model.pooler.dense.weight in the files")


def test_a_tensor_that_was_not_saved(tmp_path):
    saved(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.pooler.dense.scale"] = torch.ones(32)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"model\.pooler\.dense\.scale"):
        verified(tmp_path)


def broken_load(monkeypatch, damage):
    """`from_pretrained` of transformers as a faulty version may be: `damage` changes the model that it returns."""
    load = transformers.PreTrainedModel.from_pretrained.__func__

    def from_pretrained(cls, *args, **kwargs):
        model, info = load(cls, *args, **kwargs)
        with torch.no_grad():
            damage(model)
        return model, info

    monkeypatch.setattr(transformers.PreTrainedModel, "from_pretrained", classmethod(from_pretrained))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_tensor_left_random_by_the_loader(tmp_path, monkeypatch, dtype):
    saved(tmp_path)
    broken_load(monkeypatch, lambda model: nn.init.normal_(model.model.encoder.blocks[1].feed_forward_norm.bias))
    message = refused(tmp_path, dtype=dtype)
    assert message.startswith("model.encoder.blocks.1.feed_forward_norm.bias differs in the loaded model")
    assert transformers.__version__ in message


def test_an_output_matrix_that_the_loader_does_not_tie(tmp_path, monkeypatch):
    saved(tmp_path)

    def untie(model):
        model.lm_head.decoder.weight = nn.Parameter(torch.randn(99, 32))

    broken_load(monkeypatch, untie)
    assert refused(tmp_path).startswith("lm_head.decoder.weight differs in the loaded model")


@pytest.mark.parametrize("at_load", DTYPES, ids=str)
def test_a_buffer_that_is_not_saved(tmp_path, monkeypatch, at_load):
    saved(tmp_path, position_embedding_type="sinusoidal")

    def zero(model):
        model.model.embeddings.position_embeddings.table.zero_()

    broken_load(monkeypatch, zero)
    assert refused(tmp_path, dtype=at_load).startswith("last_hidden_state of the loaded")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head", OURS)
def test_the_same_tensors_that_compute_something_else(tmp_path, head, dtype):
    saved(tmp_path, head)
    message = refused(tmp_path, head, hidden_act="relu", dtype=dtype)
    assert "hidden_state of the loaded" in message or "logits of the loaded" in message
    assert transformers.__version__ in message


def test_a_head_that_computes_something_else(tmp_path, monkeypatch):
    saved(tmp_path, "ForQuestionAnswering")
    monkeypatch.setattr(
        OURS["ForQuestionAnswering"],
        "forward",
        lambda self, **kwargs: {"start_logits": torch.zeros(2, 8), "end_logits": torch.zeros(2, 8)},
    )
    assert "_logits of the loaded ScratchBertForQuestionAnswering" in refused(tmp_path, "ForQuestionAnswering")


@pytest.mark.parametrize("difference", [5e-4, 2e-3])
def test_the_tolerance(tmp_path, difference):
    saved(tmp_path)
    probe = probe_of(tmp_path)
    probe["outputs"]["pooler_output"][1][3] += difference
    (tmp_path / "probe.json").write_text(json.dumps(probe))
    if difference < 1e-3:
        verified(tmp_path)
    else:
        assert refused(tmp_path).startswith("pooler_output")


def test_a_new_head(tmp_path):
    saved(tmp_path, "ForPreTraining")
    message = refused(tmp_path, "ForTokenClassification")
    assert message.startswith(f"classifier.weight, classifier.bias are not in {tmp_path}, and random")


@pytest.mark.parametrize("source", ["bert", "no probe", "state dict"])
def test_without_a_probe(tmp_path, source):
    if source == "bert":
        write_bert(tmp_path, random_bert())
    elif source == "no probe":
        saved(tmp_path)
        (tmp_path / "probe.json").unlink()
    else:
        model = random_scratchbert()
        with pytest.raises(OSError, match=r"has no probe\.json"):
            verified(None, config=model.config, state_dict=model.state_dict())
        return
    assert "has no probe.json; verify=True expects" in refused(tmp_path, error=OSError)


@pytest.mark.parametrize("content", ["", "[1]", '{"class": "ScratchBertModel"}'])
def test_a_damaged_probe(tmp_path, content):
    saved(tmp_path)
    (tmp_path / "probe.json").write_text(content)
    assert f"{tmp_path / 'probe.json'} is damaged" in refused(tmp_path, error=OSError)


# --- where none is written


def test_weights_of_the_caller_s(tmp_path):
    model = saved(tmp_path)
    model.save_pretrained(tmp_path, state_dict=random_scratchbert(seed=1).state_dict())
    assert not (tmp_path / "probe.json").exists()
    saved(tmp_path)
    assert (tmp_path / "probe.json").exists()
    model.save_as_bert(tmp_path)
    assert not (tmp_path / "probe.json").exists()


def test_only_the_main_process_writes_one(tmp_path):
    random_scratchbert().save_pretrained(tmp_path / "saved", is_main_process=False)
    assert list((tmp_path / "saved").iterdir()) == []


def test_offloaded_weights(tmp_path):
    saved(tmp_path, "Model")
    device_map = {"embeddings": "cpu", "encoder": "disk", "pooler": "cpu"}
    options = {"device_map": device_map, "offload_folder": tmp_path / "disk"}
    with pytest.raises(ValueError, match="is offloaded"):
        verified(tmp_path, "Model", **options)
    ScratchBertModel.from_pretrained(tmp_path, **options).save_pretrained(tmp_path / "again")
    assert (tmp_path / "again" / "model.safetensors").exists()
    assert not (tmp_path / "again" / "probe.json").exists()


class PartOfATensor(torch.Tensor):
    """As a quantised or a distributed tensor, it is of a class of its own."""


def test_tensors_of_another_class(tmp_path):
    model = random_scratchbert("Model")
    bias = model.pooler.dense.bias
    model.pooler.dense.bias = nn.Parameter(bias.detach().as_subclass(PartOfATensor))
    assert type(model.pooler.dense.bias) is PartOfATensor
    model.save_pretrained(tmp_path)
    assert (tmp_path / "model.safetensors").exists()
    assert not (tmp_path / "probe.json").exists()


def test_saving_and_verifying_say_nothing(tmp_path):
    with logged_warnings() as warnings:
        saved(tmp_path)
        verified(tmp_path)
    assert not warnings
