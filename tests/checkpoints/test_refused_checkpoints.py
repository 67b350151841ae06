"""What is no checkpoint of a BERT, or a damaged one, is refused by `from_pretrained` and by `from_bert`."""

import json
import pickle

import pytest
import torch
import transformers
from safetensors.torch import load_file

from modeling_scratchbert import (
    ScratchBertConfig,
    ScratchBertForConditionalGeneration,
    ScratchBertModel,
    ScratchBertPreTrainedModel,
)
from support.checkpoint_kinds import (
    CONTAINERS,
    Intruder,
    bert_tensors,
    change_config,
    weight_files,
    write_bert,
    write_hub_cache,
    write_weights,
)
from support.models import TINY, random_bert, random_scratchbert
from support.refusals import assert_mentions, refusal

pytestmark = pytest.mark.usefixtures("offline")

load, from_bert = ScratchBertModel.from_pretrained, ScratchBertForConditionalGeneration.from_bert
load_config = ScratchBertConfig.from_pretrained


def write_scratchbert(folder, container="safetensors"):
    random_scratchbert().save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    write_weights(folder, tensors, container)


both_formats = pytest.mark.parametrize("write", [write_bert, write_scratchbert], ids=["BERT", "ScratchBert"])


@pytest.mark.parametrize(
    ("fields", "mentioned"),
    [
        ({"model_type": "roberta"}, "roberta"),
        ({"model_type": None, "architectures": ["RobertaModel"]}, "RobertaModel"),
        ({"model_type": None, "architectures": ["BertModel", "MobileBertModel"]}, "MobileBertModel"),
        ({"model_type": None, "architectures": None}, "model_type"),
        ({"position_embedding_type": "relative_key"}, "relative_key"),
        ({"position_embedding_type": "relative_key_query", "model_type": None}, "relative_key_query"),
        ({"position_embedding_type": "alibi", "architectures": None}, "alibi"),
    ],
)
def test_configurations_of_other_models(tmp_path, fields, mentioned):
    """The tensors of a RoBERTa, for one, have the names of BERT's, so that config.json alone can decide."""
    folder = write_bert(tmp_path / "model")
    change_config(folder, **fields)
    for opens in (load, load_config, from_bert):
        assert_mentions(refusal(opens, folder), folder, mentioned)
    for config in (transformers.BertConfig(**TINY), ScratchBertConfig(**TINY)):
        assert_mentions(refusal(load, folder, config=config), folder, mentioned)
    for field in ({"model_type": "bert"}, {"position_embedding_type": "absolute"}):
        assert_mentions(refusal(load, folder, **field), folder, mentioned)
    write_hub_cache(tmp_path, "someone/a-model", folder)
    assert_mentions(refusal(load, "someone/a-model", cache_dir=tmp_path), "someone/a-model", mentioned)


@pytest.mark.parametrize("field", ["embedding_size", "num_hidden_groups", "rotary_value", "relative_attention"])
def test_releases_that_resemble_google_s(tmp_path, field):
    """Those of ALBERT, ELECTRA, RoFormer and DeBERTa have no model type either, but fields that BERT's has not."""
    write_bert(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({**TINY, field: 1}))
    assert_mentions(refusal(load, tmp_path), tmp_path, "model_type")


@pytest.mark.parametrize(
    ("kwargs", "mentioned"),
    [
        ({"config": transformers.RobertaConfig()}, "roberta"),
        ({"config": transformers.BertConfig(**TINY, position_embedding_type="relative_key")}, "relative_key"),
        ({"num_attention_heads": 5}, "num_attention_heads"),
        ({"pad_token_id": 500}, "pad_token_id"),
        ({"add_cross_attention": True}, "is_decoder"),
        ({"layer_norm_eps": 0.0}, "layer_norm_eps"),
    ],
)
def test_invalid_arguments(tmp_path, kwargs, mentioned):
    write_bert(tmp_path)
    assert mentioned in refusal(load, tmp_path, **kwargs)
    if "config" not in kwargs:
        assert mentioned in refusal(load_config, tmp_path, **kwargs)
        change_config(tmp_path, **kwargs)
        assert mentioned in refusal(load, tmp_path)


def test_a_bert_config_makes_no_model():
    assert "BertConfig" in refusal(ScratchBertModel, transformers.BertConfig(**TINY), error=TypeError)


@pytest.mark.parametrize("text", ["", '{"model_type": "bert"', "\x93\x00", "{}", "[]", '"bert"', "null"])
def test_damaged_configurations(tmp_path, text):
    write_bert(tmp_path)
    (tmp_path / "config.json").write_bytes(text.encode("latin-1"))
    for opens in (load, load_config, from_bert):
        assert_mentions(refusal(opens, tmp_path, error=OSError), tmp_path / "config.json")
    refusal(load, tmp_path, error=OSError, config=transformers.BertConfig(**TINY))


@both_formats
@pytest.mark.parametrize("file", ["config.json", "model.safetensors"])
def test_missing_files(tmp_path, write, file):
    write(tmp_path)
    (tmp_path / file).unlink()
    assert_mentions(refusal(load, tmp_path, error=OSError), tmp_path, file)
    assert_mentions(refusal(from_bert, tmp_path, error=OSError), tmp_path)
    if file == "config.json":
        assert_mentions(refusal(load_config, tmp_path, error=OSError), tmp_path, file)


@pytest.mark.parametrize("name", ["nowhere", "no/where", "/no/where/at/all"])
def test_folders_that_do_not_exist(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    for opens in (load, load_config, from_bert):
        refusal(opens, name, error=OSError, cache_dir=tmp_path)
    refusal(load, name, error=OSError, cache_dir=tmp_path, config=transformers.BertConfig(**TINY))


DAMAGE = {
    "empty": lambda content: b"",
    "truncated in its header": lambda content: content[:20],
    "truncated": lambda content: content[: len(content) // 3],
    "without its end": lambda content: content[:-100],
    "noise": lambda content: b"\x93garbage\x00" * 500,
    "a pointer of Git LFS": lambda content: b"version https://git-lfs.github.com/spec/v1\noid sha256:abc\nsize 123\n",
    "a web page": lambda content: b"<!DOCTYPE html><html><body>404 Not Found</body></html>",
    "a pickle of something else": lambda content: pickle.dumps({"lr": 0.1}, protocol=2),
}


@both_formats
@pytest.mark.parametrize("container", CONTAINERS)
@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_weights(tmp_path, write, container, damage):
    write(tmp_path, container=container)
    file = weight_files(tmp_path)[-1]
    file.write_bytes(DAMAGE[damage](file.read_bytes()))
    for opens in (load, from_bert):
        assert_mentions(refusal(opens, tmp_path, error=OSError), file)


@both_formats
@pytest.mark.parametrize("container", ["sharded safetensors", "sharded bin"])
def test_damaged_shards(tmp_path, write, container):
    write(tmp_path, container=container)
    shard, index = weight_files(tmp_path)[1], next(tmp_path.glob("*.index.json"))
    shard.unlink()
    for opens in (load, from_bert):
        assert_mentions(refusal(opens, tmp_path, error=OSError), shard.name)
    for text in ("", "[]", "{}", '{"metadata": {}}', '{"weight_map": {}}', '{"metadata": {}, "weight_map": null}'):
        index.write_text(text)
        assert_mentions(refusal(load, tmp_path, error=OSError), index)


@pytest.mark.parametrize("content", [[torch.zeros(2)], torch.zeros(3), "text", {1: torch.zeros(2)}, None], ids=repr)
def test_pickles_without_named_tensors(tmp_path, content):
    file = write_bert(tmp_path, container="bin") / "pytorch_model.bin"
    torch.save(content, file)
    for opens in (load, from_bert):
        assert_mentions(refusal(opens, tmp_path, error=OSError), file)


@pytest.mark.parametrize("zipped", [True, False])
def test_pickles_are_never_executed(tmp_path, zipped):
    file = write_bert(tmp_path, container="bin") / "pytorch_model.bin"
    tensors = {**bert_tensors(random_bert()), "intruder": Intruder(tmp_path / "executed")}
    torch.save(tensors, file, _use_new_zipfile_serialization=zipped)
    for opens, kwargs in ((load, {}), (load, {"weights_only": False}), (from_bert, {})):
        assert_mentions(refusal(opens, tmp_path, error=OSError, **kwargs), file)
    assert not (tmp_path / "executed").exists()
    torch.load(file, weights_only=False)
    assert (tmp_path / "executed").exists()  # so the intruder works


@pytest.mark.parametrize("before", ["module.", "roberta.", "model.bert.", "auto_model.", "_orig_mod."])
@both_formats
def test_tensors_under_the_names_of_a_wrapper(tmp_path, write, before):
    write(tmp_path)
    tensors = {before + name: tensor for name, tensor in load_file(tmp_path / "model.safetensors").items()}
    write_weights(tmp_path, tensors)
    for opens in (load, from_bert):
        assert_mentions(refusal(opens, tmp_path), tmp_path, min(tensors))


@pytest.mark.parametrize("prefix", ["", "bert."])
@pytest.mark.parametrize("module", ["attention.self.Wqkv", "attention.self.distance_embedding", "attentionXself.query"])
def test_tensors_that_a_layer_of_bert_does_not_have(tmp_path, module, prefix):
    name = f"{prefix}encoder.layer.0.{module}.weight"
    write_bert(tmp_path)
    tensors = {**bert_tensors(random_bert(), prefix=bool(prefix)), name: torch.zeros(3)}
    write_weights(tmp_path, tensors)
    for opens in (load, from_bert):
        assert_mentions(refusal(opens, tmp_path), tmp_path, name)
    message = refusal(load, None, config=ScratchBertConfig(**TINY), state_dict=tensors)
    assert_mentions(message, "state_dict", name)


@pytest.mark.parametrize("container", ["safetensors", "bin"])
def test_files_without_weights(tmp_path, container):
    write_bert(tmp_path, container=container)
    write_weights(tmp_path, {}, container)
    for opens in (load, from_bert):
        assert_mentions(refusal(opens, tmp_path, error=(ValueError, OSError)), tmp_path)


def test_weights_within_a_checkpoint_of_training(tmp_path):
    file = write_bert(tmp_path, container="bin") / "pytorch_model.bin"
    torch.save({"state_dict": bert_tensors(random_bert()), "epoch": 3}, file)
    assert_mentions(refusal(load, tmp_path), tmp_path, "epoch")


class UnknownEncoder(ScratchBertPreTrainedModel):
    """`base_model_prefix`, which it inherits, is not the name of its encoder."""

    def __init__(self, config):
        super().__init__(config)
        self.bert = ScratchBertModel(config)
        self.post_init()


def test_an_encoder_that_base_model_prefix_does_not_name(tmp_path):
    write_bert(tmp_path)
    assert "base_model_prefix" in refusal(UnknownEncoder.from_pretrained, tmp_path)
