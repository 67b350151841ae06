"""`probe.json`: what a saved model holds and computes; and `verify=True`, which refuses a model that differs."""

import hashlib
import json
import logging

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import nn

from modeling_scratchbert import ScratchBertForMaskedLM, ScratchBertModel
from support.checkpoint_kinds import change_tensors, config_json, logged_warnings
from support.models import CROSSED, OURS, REFERENCES, random_scratchbert, tiny_config
from support.versions import since

# Inputs have eight tokens, and the fifth is the last one of the second row.
LAST = 4
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
QUERY, KEY = (f"model.encoder.blocks.1.attention.{name}.weight" for name in ("query", "key"))


def probe_of(folder) -> dict:
    return json.loads((folder / "probe.json").read_text(encoding="utf-8"))


def saved(folder, head="ForPreTraining", **fields):
    model = random_scratchbert(head, **fields)
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


def bytes_of(tensor) -> torch.Tensor:
    """A view of its bytes."""
    return tensor.reshape(-1).view(torch.uint8)


def flip_bit(tensor) -> None:
    """The lowest of its first number, which no output shows."""
    bytes_of(tensor)[0] ^= 1


# --- what is written


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_digests_are_those_of_the_bytes_in_the_file(tmp_path, dtype):
    random_scratchbert().to(dtype).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    expected = {name: hashlib.sha256(bytes_of(tensor).numpy()).hexdigest() for name, tensor in tensors.items()}
    tied = {"lm_head.decoder.weight": expected["model.embeddings.word_embeddings.weight"]}
    assert probe_of(tmp_path)["tensors"] == expected | tied


@pytest.mark.parametrize(("head", "fields"), [*((h, {}) for h in OURS), ("Model", CROSSED), ("ForCausalLM", CROSSED)])
def test_outputs_are_those_of_the_reference(tmp_path, head, fields):
    reference = model = saved(tmp_path, head, **fields)
    if head in REFERENCES:
        model.save_as_bert(tmp_path / "bert")
        reference = REFERENCES[head].from_pretrained(tmp_path / "bert")
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


def blocks_of(model) -> list:
    return [module for module in model.modules() if type(module).__name__ == "TransformerBlock"]


def state_of(model) -> tuple:
    """All that saving might change."""
    parameters = [(id(p), p.requires_grad, p.tolist(), p.grad.tolist()) for p in model.parameters()]
    modules = [(set(vars(module)), module.training) for module in model.modules()]
    return parameters, modules, torch.get_rng_state().tolist()


@pytest.mark.parametrize("head", OURS)
def test_saving_a_model_in_training_observes_and_changes_nothing(tmp_path, head):
    model = saved(tmp_path / "at rest", head)
    model.train()
    model.base_model.get_input_embeddings().eval()
    calls: list = []
    for module in model.modules():
        module.register_forward_hook(lambda *args: calls.append(args))
        module.register_forward_pre_hook(lambda *args: calls.append(args))
    blocks_of(model)[0].__dict__["parent"] = model
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    before = state_of(model)
    with torch.autocast("cpu", torch.bfloat16):
        model.save_pretrained(tmp_path / "in training")
    assert not calls
    assert state_of(model) == before
    assert probe_of(tmp_path / "in training") == probe_of(tmp_path / "at rest")


# --- what is accepted


@pytest.mark.parametrize("fields", [{}, {"norm_first": True, "position_embedding_type": "sinusoidal"}], ids=str)
@pytest.mark.parametrize("head", OURS)
@pytest.mark.parametrize("at_save", DTYPES[:2], ids=str)
def test_every_class_in_every_dtype(tmp_path, head, fields, at_save):
    """Tensors are rounded to another dtype; what is computed is compared in float32, before they are."""
    with logged_warnings() as warnings:
        random_scratchbert(head, **fields).to(at_save).save_pretrained(tmp_path)
        for at_load in DTYPES:
            model = verified(tmp_path, head, dtype=at_load)
            assert model.dtype == at_load
    assert not warnings
    assert not {"verify", "probe"} & {*config_json(tmp_path), *model.config.to_dict()}


@pytest.mark.parametrize(
    "fields",
    [
        {"tie_word_embeddings": False},
        {"tie_encoder_decoder": True, "share_embeddings": True},
        {"tie_encoder_decoder": False, "share_embeddings": False, "num_decoder_layers": 1},
        pytest.param({"pad_token_id": -1}, marks=since("5.23", "a negative pad_token_id can be saved")),
        {"vocab_size": 5, "max_position_embeddings": 1, "type_vocab_size": 1, "pad_token_id": None},
        {"vocab_size": 1, "num_hidden_layers": 0, "decoder_start_token_id": 0, "eos_token_id": 0},
        {"chunk_size_feed_forward": 16, "output_hidden_states": True, "return_dict": False},
        {"attn_implementation": "flex_attention"},
    ],
    ids=str,
)
@pytest.mark.parametrize("head", ["ForConditionalGeneration", "ForMaskedLM", "Model"])
def test_ties_sizes_and_chunks(tmp_path, head, fields):
    model = saved(tmp_path, head, **fields)
    assert probe_of(tmp_path)["outputs"]
    again = verified(tmp_path, head)
    assert len(list(again.parameters())) == len(list(model.parameters()))  # tied ones count once


def change_attributes(model):
    model.double()
    for block in blocks_of(model):
        block.compile(backend="eager")
        block.attention.query.weight = nn.Parameter(block.attention.query.weight.detach().t())
        block.attention.forward = None  # Accelerate replaces it for mixed precision


CHANGES = {
    "attributes": change_attributes,
    "a smaller vocabulary": lambda model: model.set_input_embeddings(nn.Embedding(5, 32)),
    "values that are not finite": lambda model: nn.init.constant_(blocks_of(model)[0].attention.query.bias, torch.nan),
}


@pytest.mark.parametrize("head", ["Model", "ForConditionalGeneration"])
@pytest.mark.parametrize("change", CHANGES)
def test_changed_models(tmp_path, head, change):
    model = random_scratchbert(head)
    CHANGES[change](model)
    model.save_pretrained(tmp_path)
    assert probe_of(tmp_path)["outputs"]
    if change != "a smaller vocabulary":  # which the configuration does not know of
        verified(tmp_path, head)
        verified(tmp_path, head, dtype=torch.bfloat16)


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
    for dtype in DTYPES[:2]:
        verified(tmp_path, head, dtype=dtype)
    if version == "this one":  # the name is missed, although a tensor of the same bytes is there
        change_tensors(tmp_path, lambda tensors: tensors.pop(min(n for n in tensors if n.endswith("query.bias"))))
        assert "query.bias" in refused(tmp_path, head)


def test_the_base_model_of_another_class(tmp_path):
    """It has fewer tensors than the file, under names without a prefix."""
    saved(tmp_path)
    assert type(transformers.AutoModel.from_pretrained(tmp_path, verify=True)) is ScratchBertModel
    verified(tmp_path, "Model", add_pooling_layer=False).save_pretrained(tmp_path)
    verified(tmp_path, "Model", add_pooling_layer=False)
    assert "pooler.dense.weight" in refused(tmp_path, "Model")


class Gated(ScratchBertForMaskedLM):
    """A model with a parameter of its own, whose forward pass cannot be called."""

    forward = None

    def __init__(self, config):
        super().__init__(config)
        self.gate = nn.Parameter(torch.ones(1))
        self.post_init()


@pytest.mark.parametrize("fields", [{}, {"tied": None, "custom_modules": None}], ids=["", "an earlier version"])
def test_a_derived_class_has_digests_alone(tmp_path, fields):
    Gated(tiny_config()).save_pretrained(tmp_path)
    probe = probe_of(tmp_path)
    assert "gate" in probe["tensors"]
    assert (probe["outputs"], probe["custom_modules"]) == ({}, ["Gated"])
    change_probe(tmp_path, **fields)
    for model_class in (Gated, ScratchBertForMaskedLM):
        with logged_warnings() as warnings:
            model_class.from_pretrained(tmp_path, verify=True)
        assert "verify=True" in warnings[-1]
    change_tensors(tmp_path, lambda tensors: flip_bit(tensors["gate"]))
    with pytest.raises(ValueError, match="gate"):
        Gated.from_pretrained(tmp_path, verify=True)


# --- what is refused


@pytest.mark.parametrize(
    ("change", "names"),
    [
        *((lambda tensors, name=name: flip_bit(tensors[name]), [name]) for name in (QUERY, "lm_head.norm.bias")),
        (lambda tensors: tensors.update({QUERY: tensors[KEY], KEY: tensors[QUERY]}), [QUERY, KEY]),
        (lambda tensors: tensors.pop(QUERY), [QUERY]),
        (lambda tensors: tensors.update({"model.pooler.dense.scale": torch.ones(32)}), ["model.pooler.dense.scale"]),
    ],
    ids=["a bit of the base model", "a bit of the model head", "exchanged", "missing", "more"],
)
def test_files_of_other_tensors(tmp_path, change, names):
    saved(tmp_path)
    change_tensors(tmp_path, change)
    message = refused(tmp_path)
    assert all(name in message for name in names)


LOADING_ERRORS = [
    # What a version of transformers might do to a model that it loads, and what the message names
    ({}, lambda model: nn.init.normal_(model.get_parameter(QUERY)), QUERY),
    ({}, lambda model: setattr(model.lm_head.decoder, "weight", nn.Parameter(torch.randn(99, 32))), "lm_head.decoder"),
    (
        {"position_embedding_type": "sinusoidal"},
        lambda model: model.model.embeddings.position_embeddings.table.zero_(),
        "last_hidden_state",
    ),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("fields", "damage", "mentioned"), LOADING_ERRORS, ids=["a random tensor", "an untied matrix", "a lost buffer"]
)
def test_errors_of_loading(tmp_path, monkeypatch, fields, damage, mentioned, dtype):
    saved(tmp_path, **fields)
    load = transformers.PreTrainedModel.from_pretrained.__func__

    def from_pretrained(cls, *args, **kwargs):
        model, info = load(cls, *args, **kwargs)
        with torch.no_grad():
            damage(model)
        return model, info

    monkeypatch.setattr(transformers.PreTrainedModel, "from_pretrained", classmethod(from_pretrained))
    assert mentioned in refused(tmp_path, dtype=dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head", OURS)
def test_the_same_tensors_that_compute_something_else(tmp_path, head, dtype):
    saved(tmp_path, head)
    message = refused(tmp_path, head, hidden_act="relu", dtype=dtype)
    assert "hidden_state" in message or "logits" in message


@pytest.mark.parametrize("head", ["Model", "ForPreTraining", "ForQuestionAnswering", "ForConditionalGeneration"])
def test_the_tolerance_of_every_output(tmp_path, head):
    saved(tmp_path, head)
    probe = probe_of(tmp_path)
    for name in probe["outputs"]:
        for difference in (5e-4, 5e-3):
            outputs = {name: [list(row) for row in table] for name, table in probe["outputs"].items()}
            outputs[name][1][-1] += difference
            change_probe(tmp_path, outputs=outputs)
            if difference < 1e-3:
                verified(tmp_path, head)
        assert name in refused(tmp_path, head)


@pytest.mark.parametrize(
    ("change", "mentioned"),
    [
        (lambda block: nn.utils.parametrizations.weight_norm(block.attention.query), "query.weight"),
        (lambda block: setattr(block.feed_forward, "activation", type("Swish", (nn.SiLU,), {})()), "Swish"),
    ],
    ids=["parametrisations", "modules of other code"],
)
def test_changed_modules(tmp_path, change, mentioned):
    model = random_scratchbert("Model")
    change(model.encoder.blocks[0])
    model.save_pretrained(tmp_path)
    assert mentioned in refused(tmp_path, "Model")


def test_without_a_probe(tmp_path):
    model = saved(tmp_path)
    (tmp_path / "probe.json").unlink()
    assert "probe.json" in refused(tmp_path, error=OSError)
    with pytest.raises(OSError, match=r"probe\.json"):
        verified(None, config=model.config, state_dict=model.state_dict())


@pytest.mark.parametrize(
    "content",
    [
        "[1]",
        '{"class": "ScratchBertModel"}',
        {"tensors": {"a": []}},
        {"class": None},
        {"custom_modules": ["Gated"]},
        {"inputs": {}},
        {"outputs": {"pooler_output": 1}},
        {"outputs": {"logits": [[1]]}},
        {"inputs": {"input_ids": [[999]]}},
    ],
    ids=str,
)
def test_a_damaged_probe(tmp_path, content):
    saved(tmp_path)
    if isinstance(content, str):
        (tmp_path / "probe.json").write_text(content)
    else:
        change_probe(tmp_path, **content)
    assert "probe.json" in refused(tmp_path, error=OSError)


# --- where none is written


def test_saves_without_a_probe(tmp_path):
    model = saved(tmp_path)
    model.save_pretrained(tmp_path, state_dict=random_scratchbert(seed=1).state_dict())
    assert not (tmp_path / "probe.json").exists()
    saved(tmp_path)
    model.save_as_bert(tmp_path)
    assert not (tmp_path / "probe.json").exists()
    model.save_pretrained(tmp_path / "not the main process", is_main_process=False)
    assert not (tmp_path / "not the main process" / "probe.json").exists()


class PartOfATensor(torch.Tensor):
    """As a quantised or a distributed tensor, it is of a class of its own."""


def test_models_that_cannot_have_a_probe(tmp_path):
    """Everything else is saved. Of any number of saves with the same warning the first warns: the reasons differ."""
    saved(tmp_path, "Model")
    options = {"device_map": {"embeddings": "cpu", "encoder": "disk", "pooler": "cpu"}, "offload_folder": tmp_path}
    with pytest.raises(ValueError, match="offloaded"):
        verified(tmp_path, "Model", **options)
    unusual, sharded = random_scratchbert("Model"), random_scratchbert("Model")
    unusual.encoder.blocks[0].feed_forward.activation = nn.Bilinear(2, 2, 2)
    sharded.pooler.dense.bias = nn.Parameter(sharded.pooler.dense.bias.detach().as_subclass(PartOfATensor))
    logging.Logger.warning_once.cache_clear()
    for model in (ScratchBertModel.from_pretrained(tmp_path, **options), unusual, sharded):
        folder = tmp_path / "saved"
        with logged_warnings() as warnings:
            for _ in range(2):
                model.save_pretrained(folder)
        assert (folder / "model.safetensors").exists()
        assert not (folder / "probe.json").exists()
        assert len([warning for warning in warnings if "probe.json" in warning]) == 1
