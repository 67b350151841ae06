"""`probe.json`: what a saved model holds and computes; and `verify=True`, which refuses a model that differs."""

import hashlib
import json
import logging

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn
from transformers.dynamic_module_utils import get_class_from_dynamic_module

from modeling_scratchbert import ScratchBertForMaskedLM, ScratchBertModel
from support.checkpoint_kinds import assert_same_outputs, config_json, logged_warnings, write_bert
from support.models import OURS, REFERENCES, random_bert, random_scratchbert, tiny_config
from support.versions import since

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


def change_probe(folder, **fields) -> None:
    """Write fields of the probe; a change to None removes one."""
    probe = {name: value for name, value in {**probe_of(folder), **fields}.items() if value is not None}
    (folder / "probe.json").write_text(json.dumps(probe))


def rewrite_weights(folder, change) -> None:
    """Save what is in the file again, after `change` was called with it."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


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
    stored = stored_bytes(tmp_path / "model.safetensors")
    expected = {name: hashlib.sha256(held).hexdigest() for name, (_, held) in stored.items()}
    tied = {"lm_head.decoder.weight": expected["model.embeddings.word_embeddings.weight"]}
    assert probe_of(tmp_path)["tensors"] == expected | tied


DECODER = {"add_cross_attention": True, "is_decoder": True}


@pytest.mark.parametrize(("head", "fields"), [*((h, {}) for h in OURS), ("Model", DECODER), ("ForCausalLM", DECODER)])
def test_outputs_are_those_of_the_reference(tmp_path, head, fields):
    reference = model = saved(tmp_path, head, **fields)
    if head in REFERENCES:
        model.save_as_bert(tmp_path / "bert")
        assert not (tmp_path / "bert" / "probe.json").exists()
        reference = REFERENCES[head].from_pretrained(tmp_path / "bert").eval()
    probe = probe_of(tmp_path)
    rows = {name: torch.tensor(numbers) for name, numbers in probe["inputs"].items()}
    assert rows["attention_mask"].tolist() == [[1] * 8, [1] * (LAST + 1) + [0] * 3]
    cross = {"encoder_hidden_states": reference.get_input_embeddings()(rows["input_ids"])} if fields else {}
    batch = {name: table[None] for name, table in rows.items()} if head == "ForMultipleChoice" else rows
    with torch.no_grad():
        expected = dict(reference.base_model(**rows, **cross)) | dict(reference(**batch, **cross))
    assert (probe["class"], probe["custom_modules"]) == (type(model).__name__, [])
    assert set(probe["outputs"]) == {name for name, value in expected.items() if isinstance(value, torch.Tensor)}
    for name, numbers in probe["outputs"].items():
        table = expected[name][:, LAST] if expected[name].ndim == 3 else expected[name]
        torch.testing.assert_close(torch.tensor(numbers), table[:, : LAST + 1], rtol=0, atol=1e-5)


def test_saving_and_verifying_say_nothing(tmp_path):
    with logged_warnings() as warnings:
        saved(tmp_path)
        config = verified(tmp_path).config
    assert not warnings
    assert not {"verify", "probe"} & {*config_json(tmp_path), *config.to_dict()}


def blocks_of(model) -> list:
    return [module for module in model.modules() if type(module).__name__ == "TransformerBlock"]


@pytest.mark.parametrize("head", OURS)
def test_saving_a_model_in_training_observes_and_changes_nothing(tmp_path, head, monkeypatch):
    model = random_scratchbert(head)
    model.save_pretrained(tmp_path / "at rest")
    model.train()
    model.base_model.get_input_embeddings().eval()
    calls: list = []
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    for module in model.modules():
        for register in ("forward_hook", "forward_pre_hook", "full_backward_hook"):
            getattr(module, f"register_{register}")(lambda *args: calls.append(args))
    monkeypatch.setitem(nn.modules.module._global_forward_hooks, 0, lambda *args: calls.append(args))
    blocks_of(model)[0].__dict__["parent"] = model
    attributes = [(set(vars(module)), module.training) for module in model.modules()]
    parameters, tensors = list(model.parameters()), {name: t.clone() for name, t in model.state_dict().items()}
    random_state = torch.get_rng_state()
    with torch.autocast("cpu", torch.bfloat16):
        model.save_pretrained(tmp_path / "in training")
    assert calls == []
    assert torch.equal(torch.get_rng_state(), random_state)
    assert [(set(vars(module)), module.training) for module in model.modules()] == attributes
    assert all(old is new for old, new in zip(parameters, model.parameters(), strict=True))
    assert all(torch.equal(parameter.grad, torch.ones_like(parameter)) for parameter in parameters)
    assert all(parameter.requires_grad for parameter in parameters)
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in model.state_dict().items())
    assert probe_of(tmp_path / "in training") == probe_of(tmp_path / "at rest")


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
        pytest.param(
            {"num_decoder_layers": 1, "pad_token_id": -1},
            marks=since("5.23", "a negative pad_token_id can be saved"),
        ),
        {"vocab_size": 5, "max_position_embeddings": 3, "type_vocab_size": 1},
        {"vocab_size": 1, "num_hidden_layers": 0, "decoder_start_token_id": 0, "eos_token_id": 0},
        {"max_position_embeddings": 1, "pad_token_id": None},
        {"chunk_size_feed_forward": 16, "return_dict": False},
        {"chunk_size_feed_forward": 64, "output_hidden_states": True, "attn_implementation": "flex_attention"},
    ],
    ids=str,
)
def test_ties_sizes_and_chunks(tmp_path, fields):
    for head in ("ForConditionalGeneration", "ForMaskedLM", "Model"):
        model = saved(tmp_path / head, head, **fields)
        assert probe_of(tmp_path / head)["outputs"]
        again, info = verified(tmp_path / head, head, output_loading_info=True)
        assert not info["missing_keys"]
        assert len(list(again.parameters())) == len(list(model.parameters()))  # tied ones count once


@pytest.mark.parametrize("head", ["Model", "ForConditionalGeneration"])
def test_what_does_not_change_a_model(tmp_path, head):
    model = random_scratchbert(head).double()
    for block in blocks_of(model):
        block.compile(backend="eager")
        block.attention.query.weight = nn.Parameter(block.attention.query.weight.detach().t())
        block.attention.forward = None  # Accelerate replaces it for mixed precision
    model.save_pretrained(tmp_path)
    assert probe_of(tmp_path)["outputs"]
    verified(tmp_path, head)


@pytest.mark.parametrize("name", ["weight_norm", "spectral_norm", "orthogonal"])
def test_parametrisations(tmp_path, name):
    model = random_scratchbert("ForMaskedLM")
    getattr(nn.utils.parametrizations, name)(model.model.encoder.blocks[0].attention.query)
    model.save_pretrained(tmp_path)
    assert probe_of(tmp_path)["outputs"]
    assert refused(tmp_path, "ForMaskedLM").startswith("model.encoder.blocks.0.attention.query.weight is not in")


def test_a_smaller_table_of_words(tmp_path):
    for head in ("ForMaskedLM", "ForConditionalGeneration"):
        model = random_scratchbert(head)
        model.set_input_embeddings(nn.Embedding(5, 32))
        model.save_pretrained(tmp_path)
        assert max(map(max, probe_of(tmp_path)["inputs"]["input_ids"])) < 5


@pytest.mark.parametrize("version", ["this one", "an earlier one"])
@pytest.mark.parametrize("head", ["ForSequenceClassification", "ForConditionalGeneration"])
def test_tensors_of_the_same_bytes(tmp_path, head, version):
    """A new head of one label, and one token type, are zeros, as are biases of the same size but another shape."""
    model = random_scratchbert(head, num_labels=1, type_vocab_size=1)
    for name, parameter in model.named_parameters():
        if name.endswith("bias") or "token_type" in name or "classifier" in name:
            nn.init.zeros_(parameter)
    model.save_pretrained(tmp_path)
    if version == "an earlier one":
        change_probe(tmp_path, tied=None, custom_modules=None)
    verified(tmp_path, head)
    verified(tmp_path, head, dtype=torch.bfloat16)
    if version == "this one":  # the name is missed, although a tensor of the same bytes is there
        rewrite_weights(tmp_path, lambda tensors: tensors.pop(min(n for n in tensors if n.endswith("query.bias"))))
        assert "query.bias in the files" in refused(tmp_path, head)


def test_classes_of_the_copied_code(tmp_path):
    saved(tmp_path, "ForMaskedLM")
    copied = get_class_from_dynamic_module("modeling_scratchbert.ScratchBertForMaskedLM", tmp_path)
    assert copied is not ScratchBertForMaskedLM
    copied.from_pretrained(tmp_path, verify=True).save_pretrained(tmp_path / "again")
    assert probe_of(tmp_path / "again") == probe_of(tmp_path)


def test_in_shards(tmp_path):
    model = random_scratchbert("ForMaskedLM")
    model.save_pretrained(tmp_path, max_shard_size="10KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    again = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path, verify=True)
    assert type(again) is ScratchBertForMaskedLM
    assert not again.training
    assert_same_outputs(again, model)


def test_the_base_model_of_another_class(tmp_path):
    """It has fewer tensors than the file, under names without a prefix."""
    saved(tmp_path)
    assert type(transformers.AutoModel.from_pretrained(tmp_path, verify=True)) is ScratchBertModel
    verified(tmp_path, "Model", add_pooling_layer=False).save_pretrained(tmp_path)
    verified(tmp_path, "Model", add_pooling_layer=False)
    message = refused(tmp_path, "Model")
    assert message.startswith(f"pooler.dense.weight, pooler.dense.bias are not in {tmp_path}, and random")


def test_weights_that_are_not_finite(tmp_path):
    """A diverged model is saved as it is."""
    model = random_scratchbert()
    nn.init.constant_(model.model.pooler.dense.bias, torch.nan)
    model.save_pretrained(tmp_path)
    verified(tmp_path)
    verified(tmp_path, dtype=torch.bfloat16)


class Gated(ScratchBertForMaskedLM):
    """A model with a parameter of its own, whose forward pass cannot be called."""

    forward = None

    def __init__(self, config):
        super().__init__(config)
        self.gate = nn.Parameter(torch.ones(()))
        self.post_init()


@pytest.mark.parametrize("version", ["this one", "an earlier one"])
def test_a_derived_class_has_digests_alone(tmp_path, version):
    Gated(tiny_config()).save_pretrained(tmp_path)
    probe = probe_of(tmp_path)
    assert "gate" in probe["tensors"]
    assert (probe["outputs"], probe["custom_modules"]) == ({}, ["Gated"])
    if version == "an earlier one":
        change_probe(tmp_path, tied=None, custom_modules=None)
    for model_class in (Gated, ScratchBertForMaskedLM):
        with logged_warnings() as warnings:
            model_class.from_pretrained(tmp_path, verify=True)
        assert "verify=True compared the tensors" in warnings[-1]
    flip_bit(tmp_path / "model.safetensors", "gate")
    with pytest.raises(ValueError, match=r"^gate in the files"):
        Gated.from_pretrained(tmp_path, verify=True)


def test_a_custom_module_that_the_loaded_model_lacks(tmp_path):
    model = random_scratchbert("Model")
    model.encoder.blocks[0].feed_forward.activation = type("Swish", (nn.SiLU,), {})()
    model.save_pretrained(tmp_path)
    assert "has custom modules []; expected ['Swish']" in refused(tmp_path, "Model")


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


def test_two_tensors_under_each_other_s_names(tmp_path):
    saved(tmp_path)
    query, key = (f"model.encoder.blocks.1.attention.{name}.weight" for name in ("query", "key"))
    rewrite_weights(tmp_path, lambda tensors: tensors.update({query: tensors[key], key: tensors[query]}))
    message = refused(tmp_path)
    assert query in message
    assert key in message


def test_a_file_with_other_names(tmp_path):
    saved(tmp_path)
    rewrite_weights(tmp_path, lambda tensors: tensors.pop("model.pooler.dense.weight"))
    assert refused(tmp_path).startswith("model.pooler.dense.weight in the files")
    saved(tmp_path)
    rewrite_weights(tmp_path, lambda tensors: tensors.update({"model.pooler.dense.scale": torch.ones(32)}))
    assert refused(tmp_path).startswith("model.pooler.dense.scale in the files")


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
    broken_load(monkeypatch, lambda model: setattr(model.lm_head.decoder, "weight", nn.Parameter(torch.randn(99, 32))))
    assert refused(tmp_path).startswith("lm_head.decoder.weight differs in the loaded model")


@pytest.mark.parametrize("at_load", DTYPES, ids=str)
def test_a_buffer_that_is_not_saved(tmp_path, monkeypatch, at_load):
    saved(tmp_path, position_embedding_type="sinusoidal")
    broken_load(monkeypatch, lambda model: model.model.embeddings.position_embeddings.table.zero_())
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
    logits = {"start_logits": torch.zeros(2, 8), "end_logits": torch.zeros(2, 8)}
    monkeypatch.setattr(OURS["ForQuestionAnswering"], "forward", lambda self, **kwargs: logits)
    assert "_logits of the loaded ScratchBertForQuestionAnswering" in refused(tmp_path, "ForQuestionAnswering")


def test_the_tolerance(tmp_path):
    saved(tmp_path)
    for difference in (5e-4, 2e-3):
        verified(tmp_path)
        outputs = probe_of(tmp_path)["outputs"]
        outputs["pooler_output"][1][3] += difference
        change_probe(tmp_path, outputs=outputs)
    assert refused(tmp_path).startswith("pooler_output")


def test_without_a_probe(tmp_path):
    write_bert(tmp_path / "bert", random_bert())
    model = saved(tmp_path)
    (tmp_path / "probe.json").unlink()
    for folder in (tmp_path / "bert", tmp_path):
        assert "has no probe.json; verify=True expects" in refused(folder, error=OSError)
    with pytest.raises(OSError, match=r"has no probe\.json"):
        verified(None, config=model.config, state_dict=model.state_dict())


@pytest.mark.parametrize(
    "content",
    [
        *("", "[1]", "\x00", '{"class": "ScratchBertModel"}'),
        *({"tensors": []}, {"tensors": {"a": []}}, {"tied": []}, {"class": None}, {"custom_modules": ["Gated"]}),
        *({"outputs": {}}, {"inputs": {}}, {"inputs": {}, "outputs": {}}, {"outputs": {"pooler_output": 1}}),
        *({"inputs": {"input_ids": [[1], [1, 2]]}}, {"outputs": {"logits": [["a"]]}}, {"outputs": {"logits": [[1]]}}),
        *({"inputs": {"input_ids": [[999]]}}, {"inputs": {"input_ids": [[0.5]]}}, {"inputs": {"ids": [[1]]}}),
    ],
    ids=str,
)
def test_a_damaged_probe(tmp_path, content):
    saved(tmp_path)
    if isinstance(content, str):
        (tmp_path / "probe.json").write_text(content)
    else:
        change_probe(tmp_path, **content)
    message = refused(tmp_path, error=OSError)
    assert f"{tmp_path / 'probe.json'} is damaged" in message or "does not fit ScratchBertForPreTraining" in message


# --- where none is written


def test_weights_of_the_caller_s(tmp_path):
    model = saved(tmp_path)
    model.save_pretrained(tmp_path, state_dict=random_scratchbert(seed=1).state_dict())
    assert not (tmp_path / "probe.json").exists()
    saved(tmp_path)
    model.save_as_bert(tmp_path)
    assert not (tmp_path / "probe.json").exists()
    model.save_pretrained(tmp_path / "not the main process", is_main_process=False)
    assert not (tmp_path / "not the main process" / "probe.json").exists()


def saved_without_a_probe(model, folder) -> str:
    """The warning of a save that writes everything else."""
    logging.Logger.warning_once.cache_clear()
    with logged_warnings() as warnings:
        for _ in range(2):
            model.save_pretrained(folder)
    assert (folder / "model.safetensors").exists()
    assert not (folder / "probe.json").exists()
    (warning,) = [each for each in warnings if "without probe.json" in each]
    return warning


def test_offloaded_weights(tmp_path):
    saved(tmp_path, "Model")
    device_map = {"embeddings": "cpu", "encoder": "disk", "pooler": "cpu"}
    options = {"device_map": device_map, "offload_folder": tmp_path / "disk"}
    with pytest.raises(ValueError, match="is offloaded"):
        verified(tmp_path, "Model", **options)
    model = ScratchBertModel.from_pretrained(tmp_path, **options)
    assert "is offloaded" in saved_without_a_probe(model, tmp_path / "again")


class PartOfATensor(torch.Tensor):
    """As a quantised or a distributed tensor, it is of a class of its own."""


def test_models_that_cannot_have_one(tmp_path):
    model = random_scratchbert("Model")
    model.encoder.blocks[0].feed_forward.activation = nn.Bilinear(2, 2, 2)
    assert "raises TypeError(" in saved_without_a_probe(model, tmp_path)
    bias = model.pooler.dense.bias
    model.pooler.dense.bias = nn.Parameter(bias.detach().as_subclass(PartOfATensor))
    assert "is quantised or sharded" in saved_without_a_probe(model, tmp_path)
