"""What `save_pretrained` and `save_as_bert` write: our names or BERT's, all files or none, and the tied matrix once."""

import copy
import json
import os
import pickle
import resource
from contextlib import contextmanager

import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load, load_file
from torch import nn

from modeling_scratchbert import (
    AUTO_MAP,
    ScratchBertConfig,
    ScratchBertForMaskedLM,
    ScratchBertForPreTraining,
    ScratchBertModel,
    ScratchBertPreTrainedModel,
)
from support.checkpoint_kinds import (
    NOTHING,
    assert_same_outputs,
    change_config,
    config_json,
    logged_warnings,
    write_bert,
)
from support.folders import CODE
from support.hub_server import serving, use
from support.models import BERTS, CROSSED, OURS, REFERENCES, random_bert, random_scratchbert, tiny_config
from support.versions import since

# What a checkpoint of one block holds. People's files have these names: whoever changes one owes them a way to load.
NAMES = {
    "model.embeddings.word_embeddings.weight",
    "model.embeddings.position_embeddings.weight",
    "model.embeddings.token_type_embeddings.weight",
    *(
        f"model.{module}.{leaf}"
        for leaf in ("weight", "bias")
        for module in (
            "embeddings.norm",
            "encoder.blocks.0.attention.query",
            "encoder.blocks.0.attention.key",
            "encoder.blocks.0.attention.value",
            "encoder.blocks.0.attention.output",
            "encoder.blocks.0.attention_norm",
            "encoder.blocks.0.feed_forward.intermediate",
            "encoder.blocks.0.feed_forward.output",
            "encoder.blocks.0.feed_forward_norm",
            "pooler.dense",
        )
    ),
    "lm_head.dense.weight",
    "lm_head.dense.bias",
    "lm_head.norm.weight",
    "lm_head.norm.bias",
    "lm_head.decoder.bias",
    "next_sentence_head.weight",
    "next_sentence_head.bias",
}


def stored(folder) -> dict:
    """All tensors of the checkpoint in `folder`, from one file or from shards."""
    tensors = {}
    for file in folder.glob("model*.safetensors"):
        tensors |= load_file(file)
    return tensors


def assert_same_bits(actual: dict, expected: dict) -> None:
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert actual[name].dtype == tensor.dtype, name
        assert torch.equal(actual[name], tensor), name


def assert_ours(folder, model):
    """`folder` holds `model` as a ScratchBert checkpoint, whole: tensors, configuration and code."""
    wanted = dict(model.state_dict())
    if model.config.tie_word_embeddings:
        wanted.pop("lm_head.decoder.weight", None)
    assert_same_bits(stored(folder), wanted)
    config = config_json(folder)
    assert config["model_type"] == "scratchbert"
    assert config["architectures"] == [type(model).__name__]
    assert config["auto_map"] == AUTO_MAP
    assert config["dtype"] == str(model.dtype).removeprefix("torch.")
    assert {path.name for path in folder.glob("*.py")} == CODE
    again, info = type(model).from_pretrained(folder, output_loading_info=True)
    assert info == NOTHING
    assert again.dtype == model.dtype
    assert_same_outputs(again, model)
    return again


# --- our own names, however the model came about and whichever way it is saved


def from_bert(folder, **kwargs):
    write_bert(folder / "bert", random_bert(num_hidden_layers=1), layer_norm="gamma", decoder="weight and bias")
    return ScratchBertForPreTraining.from_pretrained(folder / "bert", **kwargs)


def from_a_state_dict(folder):
    bert = random_bert(num_hidden_layers=1)
    return ScratchBertForPreTraining.from_pretrained(None, config=bert.config, state_dict=bert.state_dict())


def from_our_own(folder):
    random_scratchbert(num_hidden_layers=1).save_pretrained(folder / "ours")
    return transformers.AutoModelForPreTraining.from_pretrained(folder / "ours")


ORIGINS = {
    "new": lambda folder: random_scratchbert(num_hidden_layers=1),
    "a BERT": from_bert,
    "a BERT in another data type": lambda folder: from_bert(folder).double(),
    "a copied BERT": lambda folder: copy.deepcopy(from_bert(folder)),
    "a pickled BERT": lambda folder: pickle.loads(pickle.dumps(from_bert(folder))),
    "a state dict": from_a_state_dict,
    "our own": from_our_own,
}


def save_with_trainer(model, folder):
    arguments = transformers.TrainingArguments(folder / "runs", report_to=[], use_cpu=True)
    transformers.Trainer(model, arguments).save_model(folder)


WAYS = {
    "save_pretrained": lambda model, folder: model.save_pretrained(folder),
    "to a str": lambda model, folder: model.save_pretrained(f"{folder}/"),
    "in the original format": lambda model, folder: model.save_pretrained(folder, save_original_format=True),
    "in shards": lambda model, folder: model.save_pretrained(folder, max_shard_size="10KB"),
    "a state dict": lambda model, folder: model.save_pretrained(folder, state_dict=model.state_dict()),
    "with Trainer": save_with_trainer,
    "compiled": lambda model, folder: torch.compile(model).save_pretrained(folder),
}


@pytest.mark.parametrize(
    ("origin", "way"), [*((origin, "save_pretrained") for origin in ORIGINS), *(("a BERT", way) for way in WAYS)]
)
def test_names(tmp_path, origin, way):
    model, folder = ORIGINS[origin](tmp_path), tmp_path / "saved"
    WAYS[way](model, folder)
    assert set(stored(folder)) == NAMES
    assert_ours(folder, model)
    assert (folder / "probe.json").exists() == (way != "a state dict")
    if way != "a state dict":
        ScratchBertForPreTraining.from_pretrained(folder, verify=True)


def test_weights_on_disk(tmp_path):
    device_map = {"model.embeddings": "cpu", "model.encoder": "disk", "model.pooler": "disk"}
    device_map |= {"lm_head": "cpu", "next_sentence_head": "cpu"}
    model = from_bert(tmp_path, device_map=device_map, offload_folder=str(tmp_path / "disk"))
    assert model.get_parameter("model.pooler.dense.weight").is_meta
    assert_same_outputs(model, random_bert(num_hidden_layers=1))
    with pytest.warns(UserWarning, match="offloaded"):
        model.save_pretrained(tmp_path / "saved")
    assert set(stored(tmp_path / "saved")) == NAMES
    again = ScratchBertForPreTraining.from_pretrained(tmp_path / "saved")
    assert_same_outputs(again, random_bert(num_hidden_layers=1))
    with pytest.raises(ValueError, match=r"model\.encoder\.blocks\.0"):
        model.save_as_bert(tmp_path / "out")


# --- a BERT that is opened and saved, as ours and as a BERT


@pytest.mark.parametrize(
    ("head", "fields", "dtype"),
    [
        *((head, {}, torch.float32) for head in BERTS),
        *((head, {}, torch.bfloat16) for head in ("ForPreTraining", "ForTokenClassification")),
        ("ForCausalLM", {}, torch.float16),
        *((head, {"tie_word_embeddings": False}, torch.float32) for head in ("ForPreTraining", "ForCausalLM")),
        *((head, CROSSED, torch.float32) for head in ("Model", "ForCausalLM")),
        ("ForMaskedLM", {"num_hidden_layers": 0}, torch.float32),
        ("Model", {"num_hidden_layers": 11}, torch.float32),
        ("ForPreTraining", {"hidden_act": "prelu"}, torch.float32),
        ("ForSequenceClassification", {"id2label": {0: "no", 1: "yes", 2: "perhaps"}}, torch.float32),
    ],
    ids=str,
)
def test_a_bert_comes_back_bit_for_bit(tmp_path, head, fields, dtype):
    bert = random_bert(head, **fields).to(dtype)
    if not bert.config.tie_word_embeddings:  # a bias of the second name, which BERT does not compute with, is not kept
        bert.cls.predictions.bias.data.copy_(bert.cls.predictions.decoder.bias)
    bert.save_pretrained(tmp_path / "in")
    with logged_warnings() as warnings:
        model = OURS[head].from_pretrained(tmp_path / "in")
        model.save_as_bert(tmp_path / "out")
        model.save_pretrained(tmp_path / "ours")
        assert_ours(tmp_path / "ours", model).save_as_bert(tmp_path / "again")
    assert not warnings
    for name in ("out", "again"):
        assert_same_bits(load_file(tmp_path / name / "model.safetensors"), load_file(tmp_path / "in/model.safetensors"))
        # transformers 5 does not write this field; other programs read it.
        added = {"position_embedding_type": "absolute"}
        assert config_json(tmp_path / name) == {**config_json(tmp_path / "in"), **added}
    reference, info = REFERENCES[head].from_pretrained(tmp_path / "out", output_loading_info=True)
    assert info == NOTHING
    assert_same_outputs(reference, model)


def test_matrices_that_the_configuration_ties_and_the_checkpoint_does_not(tmp_path):
    bert = random_bert(tie_word_embeddings=False)
    bert.save_pretrained(tmp_path / "bert")
    change_config(tmp_path / "bert", tie_word_embeddings=True)
    model = ScratchBertForPreTraining.from_pretrained(tmp_path / "bert")
    model.save_pretrained(tmp_path / "ours")
    assert_same_outputs(ScratchBertForPreTraining.from_pretrained(tmp_path / "ours"), bert)
    model.save_as_bert(tmp_path / "out")
    assert_same_outputs(REFERENCES["ForPreTraining"].from_pretrained(tmp_path / "out"), bert)


def test_files_and_configuration(tmp_path):
    """As a BERT: no code, a file that is marked as PyTorch's, and a configuration with BERT's fields alone."""
    model = random_scratchbert("ForMaskedLM")
    model.save_pretrained(tmp_path / "ours")  # which adds `auto_map` to the configuration
    files = {"config.json", "model.safetensors"}
    assert {path.name for path in (tmp_path / "ours").iterdir()} == CODE | files | {"probe.json"}
    model.save_as_bert(tmp_path / "out")
    assert {path.name for path in (tmp_path / "out").iterdir()} == files
    with safe_open(tmp_path / "out" / "model.safetensors", framework="numpy") as file:
        assert file.metadata() == {"format": "pt"}
    fields = config_json(tmp_path / "out")
    # Readers other than transformers, CTranslate2 for one, expect it.
    assert fields["position_embedding_type"] == "absolute"
    our_own = set(ScratchBertConfig().to_dict()) - set(transformers.BertConfig().to_dict())
    assert {"auto_map", *our_own} & set(fields) == {"position_embedding_type"}
    assert "scratch" not in json.dumps(fields).lower()


class WithoutTensorsOfItsOwn(ScratchBertForMaskedLM):
    """A class with the reference of the one that it derives from."""


def test_as_bert_describes_the_model_and_not_its_configuration(tmp_path):
    """The weights were tied, and the blocks made, before the configuration or the model was changed."""
    model = WithoutTensorsOfItsOwn(tiny_config()).eval()
    model.config.tie_word_embeddings = False
    model.model.encoder.blocks = model.model.encoder.blocks[:1]
    model.save_as_bert(tmp_path)
    assert config_json(tmp_path)["architectures"] == ["BertForMaskedLM"]
    reference, info = REFERENCES["ForMaskedLM"].from_pretrained(tmp_path, output_loading_info=True)
    assert info == NOTHING
    assert_same_outputs(reference, model)


class WithATensorOfItsOwn(ScratchBertModel):
    def __init__(self, config):
        super().__init__(config)
        self.more = nn.Linear(config.hidden_size, 2)
        self.post_init()


class WithoutReference(ScratchBertPreTrainedModel):
    """A class that derives from no model of BERT's."""

    def __init__(self, config):
        super().__init__(config)
        self.model = ScratchBertModel(config)
        self.post_init()


@pytest.mark.parametrize(
    ("model_class", "fields", "mentioned"),
    [
        (ScratchBertModel, {"norm_first": True}, "norm_first"),
        (ScratchBertForMaskedLM, {"norm_first": True, "num_hidden_layers": 0}, "norm_first"),
        (ScratchBertForMaskedLM, {"position_embedding_type": "sinusoidal"}, "position_embedding_type"),
        (WithATensorOfItsOwn, {}, r"more\.weight"),
        (WithoutReference, {}, "WithoutReference"),
    ],
)
def test_as_bert_refuses_models_that_bert_cannot_express(tmp_path, model_class, fields, mentioned):
    with pytest.raises(ValueError, match=mentioned):
        model_class(tiny_config(**fields)).save_as_bert(tmp_path / "out")
    assert not (tmp_path / "out").exists()


# --- the folder

both_ways = pytest.mark.parametrize("way", ["save_pretrained", "save_as_bert"])


def test_stale_files_of_weights_are_removed_and_other_files_stay(tmp_path):
    """Of a variant of the weights, the files of its last save are there, and no others."""
    others = {
        "tokenizer.json",
        "README.md",
        "adapter_model.safetensors",
        "optimizer.pt",
        "pytorch_model.bin",
        "other.py",
    }
    for name in others:
        (tmp_path / name).write_text("other")
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "model.safetensors").write_text("another model's")
    models, expected = {}, {}
    saves = [(None, "50GB"), ("fp16", "10KB"), (None, "20KB"), ("fp16", "50GB"), (None, "10KB"), ("ema", "20KB")]
    saves += [(None, "50GB"), ("fp16", "20KB"), ("fp16", "10KB"), (None, "20KB"), ("fp16", "50GB"), (None, "50GB")]
    for seed, (variant, size) in enumerate(saves):
        models[variant] = random_scratchbert("Model", seed, num_hidden_layers=1)
        models[variant].save_pretrained(tmp_path, max_shard_size=size, variant=variant)
        models[variant].save_pretrained(tmp_path / str(seed), max_shard_size=size, variant=variant)
        expected[variant] = {path.name for path in (tmp_path / str(seed)).iterdir()}
        files = {path.name for path in tmp_path.iterdir() if path.is_file()}
        assert files == others.union(*expected.values())
        for each, model in models.items():
            assert_same_outputs(ScratchBertModel.from_pretrained(tmp_path, variant=each, verify=True), model)
    assert {(tmp_path / name).read_text() for name in others} == {"other"}
    assert (tmp_path / "runs" / "model.safetensors").read_text() == "another model's"


@both_ways
@pytest.mark.parametrize("container", ["safetensors", "sharded safetensors", "bin"])
def test_a_model_is_saved_over_the_folder_that_it_was_loaded_from(tmp_path, container, way):
    write_bert(tmp_path, container=container)
    model = ScratchBertForPreTraining.from_pretrained(tmp_path)
    for _ in range(2):
        getattr(model, way)(tmp_path)
    assert_same_outputs(model, random_bert())
    assert_same_outputs(ScratchBertForPreTraining.from_pretrained(tmp_path), random_bert())
    assert [path.name for path in tmp_path.glob("*.safetensors*")] == ["model.safetensors"]


@contextmanager
def limited_file_size(size):
    """Writing more than `size` bytes to a file fails, as on a full disk."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@both_ways
@pytest.mark.parametrize("size", ["50GB", "20KB"])
def test_a_save_that_fails_leaves_the_old_checkpoint(tmp_path, way, size):
    random_scratchbert(seed=1).save_pretrained(tmp_path, max_shard_size=size)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    kwargs = {"max_shard_size": size} if way == "save_pretrained" else {}
    with limited_file_size(15_000), pytest.raises(Exception):  # noqa: B017, PT011  safetensors has errors of its own
        getattr(random_scratchbert(seed=2), way)(tmp_path, **kwargs)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


@both_ways
def test_files_have_the_usual_permissions(tmp_path, monkeypatch, way):
    """A folder is often shared between users. The umask can be read only by setting another one, under which other
    threads would create their files."""
    monkeypatch.setattr(os, "umask", lambda mask: pytest.fail("os.umask was called"))
    (tmp_path / "other.txt").write_text("as open() makes a file here")
    getattr(random_scratchbert(), way)(tmp_path / "new" / "saved")
    modes = {path.stat().st_mode for path in (tmp_path / "new" / "saved").iterdir()}
    assert modes == {(tmp_path / "other.txt").stat().st_mode}


@both_ways
def test_a_file_in_place_of_the_folder(tmp_path, way):
    (tmp_path / "model").write_text("mine")
    with pytest.raises(NotADirectoryError, match=str(tmp_path / "model")):
        getattr(random_scratchbert(), way)(tmp_path / "model")
    assert (tmp_path / "model").read_text() == "mine"


@since("5.15", "weights are written by the main process only")
def test_push_while_saving(tmp_path, monkeypatch):
    """The repository has the name of the folder unless it is given; weights given by hand are uploaded, as with FSDP
    where the model has but a part of them; only the main process writes and uploads."""
    model, other = random_scratchbert(seed=1), random_scratchbert(seed=2)
    with serving(token={"ada"}) as hub:
        use(hub, monkeypatch, tmp_path / "cache", "token")
        model.save_pretrained(tmp_path / "saved", is_main_process=False, push_to_hub=True)
        assert not hub.repositories
        assert not list((tmp_path / "saved").iterdir())
        model.save_pretrained(tmp_path / "saved", state_dict=other.state_dict(), push_to_hub=True)
        model.save_pretrained(tmp_path / "named", push_to_hub=True, repo_id="ada/other-name")
    for folder, repository, expected in (("saved", "ada/saved", other), ("named", "ada/other-name", model)):
        assert_ours(tmp_path / folder, expected)
        files = hub.files(repository)
        assert_same_bits(load(files["model.safetensors"]), stored(tmp_path / folder))
        assert set(files) >= CODE
