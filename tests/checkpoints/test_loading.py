"""`from_pretrained`: every form of BERT checkpoint gives the reference's numbers; any other raises an error."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import nn
from transformers.utils import is_peft_available

from modeling_scratchbert import (
    ScratchBertConfig,
    ScratchBertForPreTraining,
    ScratchBertModel,
    ScratchBertPreTrainedModel,
)
from modeling_scratchbert.bert.names import to_scratchbert
from support.checkpoint_kinds import (
    CONTAINERS,
    DECODER_BIAS,
    DECODER_WEIGHT,
    NOTHING,
    OUTPUT_BIAS,
    Intruder,
    assert_same_outputs,
    bert_fields,
    bert_tensors,
    change_config,
    config_json,
    every_form,
    largest_difference,
    logged_warnings,
    outputs,
    two_bert_tensors,
    weight_files,
    write_bert,
    write_hub_cache,
    write_two_berts,
    write_weights,
)
from support.models import BERTS, OURS, REFERENCES, TINY, random_bert, random_encoder_decoder, random_scratchbert
from support.refusals import assert_mentions, refusal

pytestmark = pytest.mark.usefixtures("offline")

SUPPORTED = ("'bert'", "'scratchbert'")


def load(source, head="ForPreTraining", **kwargs):
    """The model, what it reports of the loading, and what it warns of."""
    with logged_warnings() as warnings:
        model, info = OURS[head].from_pretrained(source, output_loading_info=True, **kwargs)
    return model, info, "\n".join(warnings)


def assert_loads(source, expected, head="ForPreTraining", tolerance=1e-6, **kwargs):
    """`from_pretrained` finds and uses every tensor, warns of nothing, and the model computes what `expected` does."""
    model, info, warnings = load(source, head, **kwargs)
    assert info == NOTHING
    assert not warnings
    assert_same_outputs(model, expected, tolerance=tolerance)
    return model


def assert_loads_two_berts(source, expected, **kwargs):
    return assert_loads(source, expected, "ForConditionalGeneration", tolerance=1e-5, **kwargs)


def load_reference(source, head="ForPreTraining", **kwargs):
    return REFERENCES[head].from_pretrained(source, output_loading_info=True, **kwargs)


def assert_refused(source, *parts, error=ValueError, head="Model", **kwargs):
    """`from_pretrained` raises `error`, and the message has all of `parts`."""
    assert_mentions(refusal(OURS[head].from_pretrained, source, error=error, **kwargs), *parts)


# --- all shapes that BERT checkpoints come in


@every_form(
    dtype_field=("dtype", "torch_dtype", None),
    prefix=(True, False),
    head=("Model", "ForPreTraining", "ForMaskedLM", "ForNextSentencePrediction"),
)
def test_every_form_of_a_pretraining_checkpoint(tmp_path, form):
    form = dict(form)
    container, head, dtype, field = (form.pop(name) for name in ("container", "head", "dtype", "dtype_field"))
    fields = {"dtype": None, **({field: str(dtype).removeprefix("torch.")} if field else {})}
    bert = random_bert()
    write_bert(tmp_path, bert, container, fields=fields, dtype=dtype, **form)
    ours, info, warnings = load(tmp_path, head)
    reference, reference_info = load_reference(tmp_path, head)

    assert ours.dtype == reference.dtype == dtype
    assert not ours.training
    assert_same_outputs(ours, reference)
    # The reference itself against the weights that were written
    assert_same_outputs(reference, load_bits(REFERENCES[head](bert.config), bert.to(dtype)))

    assert info["missing_keys"] == reference_info["missing_keys"] == set()
    unexpected = {name for name in reference_info["unexpected_keys"] if not name.endswith("position_ids")}
    assert info["unexpected_keys"] == {to_scratchbert(name) for name in unexpected}
    assert not info["mismatched_keys"]
    if head == "ForPreTraining":
        assert info == NOTHING
        assert not warnings


def load_bits(model, source):
    """`model` with the weights that it shares with `source`, a `BertForPreTraining`, by name."""
    prefix = "" if hasattr(model, "bert") else "bert."
    weights = source.state_dict()
    model.to(source.dtype).load_state_dict({name: weights[prefix + name] for name in model.state_dict()})
    return model


@pytest.mark.parametrize("container", ["safetensors", "sharded legacy bin"])
@pytest.mark.parametrize("layer_norm", ["weight", "gamma"])
def test_a_bare_encoder_of_the_original_names(tmp_path, container, layer_norm):
    write_bert(tmp_path, random_bert("Model"), container, layer_norm=layer_norm, position_ids=True)
    assert_loads(tmp_path, load_reference(tmp_path, "Model")[0], "Model")


@pytest.fixture(scope="module")
def every_head(tmp_path_factory):
    """A BERT checkpoint of every class, as `transformers` writes it today, the encoder's weights the same in all."""
    folders = {}
    for head in BERTS:
        folders[head] = tmp_path_factory.mktemp(head)
        random_bert(head, num_labels=3 if "Classification" in head else 2).save_pretrained(folders[head])
    return folders


@pytest.mark.parametrize("loaded", BERTS)
@pytest.mark.parametrize("stored", BERTS)
def test_any_head_into_any_other(every_head, stored, loaded):
    fields = {"num_labels": 2} if loaded == "ForQuestionAnswering" else {}
    fields |= {"ignore_mismatched_sizes": True}
    ours, info, warnings = load(every_head[stored], loaded, **fields)
    reference, reference_info = load_reference(every_head[stored], loaded, **fields)

    assert info["missing_keys"] == renamed(reference_info["missing_keys"], bare=loaded == "Model")
    assert info["unexpected_keys"] == renamed(reference_info["unexpected_keys"], bare=False)
    assert {key for key, *_ in info["mismatched_keys"]} == {key for key, *_ in reference_info["mismatched_keys"]}
    new = info["missing_keys"] | {key for key, *_ in info["mismatched_keys"]}
    if stored == loaded:
        assert info == NOTHING
        assert not warnings
    for name in new:
        assert name in warnings
    # Everything that both have agrees; a new head is random in both.
    assert_same_outputs(ours, reference, only="" if not new else "hidden_states")


def renamed(names, bare):
    return {to_scratchbert(name).removeprefix("model." if bare else "") for name in names}


@pytest.mark.parametrize("stored", BERTS)
def test_any_head_of_our_own_into_any_other(tmp_path, stored):
    def names(model):
        held = {name.removeprefix("model.") for name in model.state_dict()}
        return held - {"lm_head.decoder.weight"}

    def bare(found):
        return {name.removeprefix("model.") for name in found}

    model = random_scratchbert(stored)
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    for loaded in BERTS:
        ours, info, warnings = load(tmp_path, loaded, ignore_mismatched_sizes=True)
        assert bare(info["missing_keys"]) == names(ours) - names(model)
        assert bare(info["unexpected_keys"]) == names(model) - names(ours)
        assert all(name in warnings for name in info["missing_keys"])
        assert_same_outputs(ours, model, only="hidden_states")
    assert_same_outputs(load(tmp_path, stored)[0], model)


def test_a_new_head_starts_as_the_reference_s_does(every_head):
    torch.manual_seed(0)
    new = load(every_head["ForPreTraining"], "ForSequenceClassification", num_labels=5)[0]
    assert new.classifier.weight.shape == (5, 32)
    assert 0.01 < new.classifier.weight.std() < 0.03  # initializer_range is 0.02
    assert not new.classifier.bias.any()
    assert not new.classifier.weight.is_meta


@pytest.mark.parametrize("fields", [{}, {"add_cross_attention": True}])
def test_a_decoder(tmp_path, fields):
    fields = {"is_decoder": True, **fields}
    write_bert(tmp_path, random_bert("Model", **fields), "sharded safetensors", layer_norm="gamma")
    assert_loads(tmp_path, load_reference(tmp_path, "Model")[0], "Model")


def test_cross_attention_added_while_loading_is_new_and_named(every_head):
    fields = {"is_decoder": True, "add_cross_attention": True}
    ours, info, warnings = load(every_head["Model"], "Model", **fields)
    _, reference_info = load_reference(every_head["Model"], "Model", **fields)
    assert info["missing_keys"] == renamed(reference_info["missing_keys"], bare=True)
    assert all(".cross_attention" in name for name in info["missing_keys"])
    assert len(info["missing_keys"]) == 2 * 10
    assert "cross_attention" in warnings
    assert ours.encoder.blocks[0].cross_attention.query.weight.std() > 0.01


def test_a_checkpoint_that_lacks_half_its_weights_names_them(tmp_path):
    bert = random_bert()
    held = {name: tensor for name, tensor in bert_tensors(bert).items() if ".layer.1." not in name}
    write_bert(tmp_path, bert)
    write_weights(tmp_path, held)
    _, info, warnings = load(tmp_path)
    assert len(info["missing_keys"]) == 16
    # transformers abbreviates "{0, 1}" where a number alone differs
    assert "model.encoder.blocks.1.attention.query" in warnings
    assert "MISSING" in warnings


# --- the output matrix and its bias, tied or not

HEAD_NAMES = (DECODER_WEIGHT, DECODER_BIAS, OUTPUT_BIAS)


def untied_checkpoint(folder, *left_out, tie):
    """A checkpoint whose output matrix is not the embeddings', and whose two output biases differ."""
    bert = random_bert(tie_word_embeddings=False)
    tensors = bert.state_dict()
    assert not torch.equal(tensors[DECODER_WEIGHT], tensors["bert.embeddings.word_embeddings.weight"])
    tensors[OUTPUT_BIAS] = torch.randn(TINY["vocab_size"])
    assert not torch.equal(tensors[DECODER_BIAS], tensors[OUTPUT_BIAS])
    write_weights(folder, {name: tensor for name, tensor in tensors.items() if name not in left_out})
    (folder / "config.json").write_text(json.dumps(bert_fields(bert, tie_word_embeddings=tie)))
    return tensors


@pytest.mark.parametrize("left_out", [(), (OUTPUT_BIAS,)], ids=["both biases", "decoder's bias alone"])
@pytest.mark.parametrize("head", ["ForPreTraining", "ForMaskedLM"])
def test_an_untied_head(tmp_path, head, left_out):
    tensors = untied_checkpoint(tmp_path, *left_out, tie=False)
    ours, info, _ = load(tmp_path, head)
    assert_same_outputs(ours, load_reference(tmp_path, head)[0])
    assert not info["missing_keys"]
    assert torch.equal(ours.lm_head.decoder.bias, tensors[DECODER_BIAS])
    assert torch.equal(ours.lm_head.decoder.weight, tensors[DECODER_WEIGHT])


def test_an_untied_head_whose_bias_has_its_old_name_alone(tmp_path):
    """As stored by transformers 4, where the two biases were one parameter. Today's reference reports it as missing and
    computes without an output bias."""
    tensors = untied_checkpoint(tmp_path, DECODER_BIAS, tie=False)
    reference = REFERENCES["ForPreTraining"](transformers.BertConfig(**TINY, tie_word_embeddings=False))
    reference.load_state_dict({**tensors, DECODER_BIAS: tensors[OUTPUT_BIAS]})
    assert_loads(tmp_path, reference.eval())


@pytest.mark.parametrize(
    "left_out",
    [(), (DECODER_BIAS,), (OUTPUT_BIAS,), (DECODER_WEIGHT,), (DECODER_WEIGHT, DECODER_BIAS)],
    ids=lambda names: "without " + ", ".join(name.removeprefix("cls.predictions.") for name in names),
)
def test_a_config_that_ties_what_the_weights_do_not(tmp_path, left_out):
    untied_checkpoint(tmp_path, *left_out, tie=True)
    ours, info, warnings = load(tmp_path)
    assert_same_outputs(ours, load_reference(tmp_path)[0])
    assert info == NOTHING
    if DECODER_WEIGHT in left_out:
        assert ours.lm_head.decoder.weight is ours.get_input_embeddings().weight
        assert not warnings
    else:  # both are there and differ: tying would throw one away
        assert ours.lm_head.decoder.weight is not ours.get_input_embeddings().weight
        assert "NOT tie" in warnings
        assert "lm_head.decoder.weight" in warnings


@pytest.mark.parametrize("left_out", [(DECODER_WEIGHT,), (OUTPUT_BIAS, DECODER_BIAS)], ids=["matrix", "bias"])
def test_what_an_untied_head_lacks_is_named(tmp_path, left_out):
    untied_checkpoint(tmp_path, *left_out, tie=False)
    _, info, warnings = load(tmp_path)
    assert info["missing_keys"] == {to_scratchbert(left_out[0])}
    assert to_scratchbert(left_out[0]) in warnings


# --- where a checkpoint may lie


@pytest.mark.parametrize("kind", ["str", "Path", "trailing slash", "relative", "with spaces", "named like a hub id"])
def test_every_way_to_name_a_folder(tmp_path, monkeypatch, every_head, kind):
    folder = tmp_path / {"with spaces": "my model, v2.0 (best)", "named like a hub id": "user/model"}.get(kind, "model")
    shutil.copytree(every_head["ForPreTraining"], folder)
    monkeypatch.chdir(tmp_path)
    source = {
        "str": str(folder),
        "Path": folder,
        "trailing slash": f"{folder}{os.sep}",
        "relative": Path("model"),
        "with spaces": str(folder),
        "named like a hub id": "user/model",
    }[kind]
    assert_loads(source, load_reference(source)[0])


@pytest.mark.skipif(is_peft_available(), reason="with PEFT transformers looks for adapters in the file, and raises")
def test_a_file_of_weights_and_a_config(tmp_path, every_head):
    """The reference takes the path of a file as well, since it then needs no other."""
    file, config = every_head["ForPreTraining"] / "model.safetensors", transformers.BertConfig(**TINY)
    assert_same_outputs(load(str(file), config=config)[0], load_reference(str(file), config=config)[0])


def test_in_a_subfolder(tmp_path):
    write_bert(tmp_path, random_bert(seed=1))
    write_bert(tmp_path / "inner", random_bert(seed=2), "sharded bin")
    for kwargs in ({}, {"subfolder": "inner"}):
        for config in (None, transformers.BertConfig(**TINY)):
            assert_same_outputs(load(tmp_path, config=config, **kwargs)[0], load_reference(tmp_path, **kwargs)[0])
    assert largest_difference(outputs(load(tmp_path)[0]), outputs(load(tmp_path, subfolder="inner")[0])) > 0.1


@pytest.mark.parametrize("container", ["safetensors", "sharded safetensors", "bin", "sharded bin"])
def test_a_variant(tmp_path, container):
    write_bert(tmp_path, random_bert(seed=1))
    write_weights(tmp_path, bert_tensors(random_bert(seed=2), dtype=torch.float16), container, variant="fp16")
    kwargs = {"variant": "fp16", "dtype": torch.float32}
    ours = assert_loads(tmp_path, load_reference(tmp_path, **kwargs)[0], **kwargs)
    assert largest_difference(outputs(ours), outputs(load(tmp_path)[0])) > 0.1


def test_a_variant_that_is_not_there(tmp_path):
    write_bert(tmp_path)
    assert_refused(tmp_path, "model.int8.safetensors", tmp_path, error=OSError, variant="int8")


def test_use_safetensors_chooses_the_file(tmp_path):
    write_bert(tmp_path, random_bert(seed=1), "safetensors")
    write_bert(tmp_path, random_bert(seed=2), "bin", decoder="weight and bias")
    for use in (None, True, False):
        assert_loads(tmp_path, load_reference(tmp_path, use_safetensors=use)[0], use_safetensors=use)
    (tmp_path / "model.safetensors").unlink()
    assert_refused(tmp_path, "safetensors", tmp_path, error=OSError, use_safetensors=True)


def test_only_the_file_that_is_loaded_has_to_be_whole(tmp_path):
    write_bert(tmp_path, container="bin")
    (tmp_path / "model.safetensors").write_bytes(b"broken")
    assert_same_outputs(load(tmp_path, use_safetensors=False)[0], random_bert())


@pytest.mark.parametrize(
    ("container", "kwargs"),
    [
        ("safetensors", {}),
        ("safetensors", {"local_files_only": True}),
        ("safetensors", {"revision": "v2"}),
        ("sharded safetensors", {"subfolder": "inner"}),
        ("sharded safetensors", {}),
        ("bin", {}),
        ("sharded bin", {"subfolder": "inner"}),
    ],
    ids=str,
)
def test_a_hub_id(tmp_path, container, kwargs):
    folder = write_bert(tmp_path / "folder", container=container, layer_norm="gamma")
    write_bert(folder / "inner", random_bert(seed=2), container)
    write_hub_cache(tmp_path, "someone/a-bert", folder, revisions=("main", "v2"))
    assert_loads("someone/a-bert", random_bert(seed=2 if "subfolder" in kwargs else 0), cache_dir=tmp_path, **kwargs)


def test_a_hub_id_of_our_own(tmp_path):
    model = random_scratchbert("ForMaskedLM")
    model.save_pretrained(tmp_path / "folder", max_shard_size="20KB")
    write_hub_cache(tmp_path, "someone/a-scratchbert", tmp_path / "folder")
    assert_loads("someone/a-scratchbert", model, "ForMaskedLM", cache_dir=tmp_path)
    auto = transformers.AutoModelForMaskedLM.from_pretrained("someone/a-scratchbert", cache_dir=str(tmp_path))
    assert type(auto) is OURS["ForMaskedLM"]
    assert_same_outputs(auto, model)


def test_a_hub_id_of_a_look_alike(tmp_path):
    write_bert(tmp_path / "folder", fields={"model_type": "roberta"})
    write_hub_cache(tmp_path, "someone/a-roberta", tmp_path / "folder")
    for config in (None, transformers.BertConfig(**TINY)):
        assert_refused("someone/a-roberta", "someone/a-roberta", "'roberta'", cache_dir=tmp_path, config=config)


def test_a_hub_id_without_a_shard(tmp_path):
    folder = write_bert(tmp_path / "folder", container="sharded safetensors")
    (folder / "model-00002-of-00003.safetensors").unlink()
    write_hub_cache(tmp_path, "someone/a-bert", folder)
    with pytest.raises(OSError):  # noqa: PT011  what it says is the Hub's own word for what it cannot fetch
        load("someone/a-bert", cache_dir=tmp_path)


# --- the other arguments of from_pretrained


@pytest.mark.parametrize("device_map", ["cpu", "auto", "sequential", {"": "cpu"}, torch.device("cpu")], ids=str)
def test_device_map(tmp_path, every_head, device_map):
    reference = load_reference(every_head["ForPreTraining"])[0]
    ours = assert_loads(every_head["ForPreTraining"], reference, device_map=device_map)
    ours.save_pretrained(tmp_path)
    again = assert_loads(tmp_path, reference, device_map=device_map)
    assert not any(parameter.is_meta for parameter in again.parameters())


@pytest.mark.parametrize("container", ["safetensors", "sharded safetensors", "bin"])
def test_half_of_the_model_on_disk(tmp_path, container):
    write_bert(tmp_path / "model", container=container, layer_norm="gamma")
    device_map = {"model.embeddings": "cpu", "model.encoder": "disk", "model.pooler": "cpu", "lm_head": "cpu"}
    device_map |= {"next_sentence_head": "cpu"}
    ours = load(tmp_path / "model", device_map=device_map, offload_folder=str(tmp_path / "offload"))[0]
    assert ours.model.encoder.blocks[0].attention.query.weight.is_meta
    assert_same_outputs(ours, load_reference(tmp_path / "model")[0])


@pytest.mark.parametrize("spelling", ["dtype", "torch_dtype"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, "auto", "bfloat16"], ids=str)
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16], ids=str)
def test_dtype(tmp_path, stored, dtype, spelling):
    write_bert(tmp_path, dtype=stored, fields={"dtype": str(stored).removeprefix("torch.")})
    reference = load_reference(tmp_path, **{spelling: dtype})[0]
    ours = assert_loads(tmp_path, reference, **{spelling: dtype})
    assert ours.dtype == reference.dtype
    assert {tensor.dtype for tensor in ours.state_dict().values()} == {reference.dtype}


@pytest.mark.parametrize("form", [{}, {"prefix": False, "layer_norm": "gamma", "decoder": "weight and bias"}], ids=str)
def test_a_state_dict(form):
    bert = random_bert()
    tensors = bert_tensors(bert, **form)
    config = ScratchBertConfig(**TINY)
    for configuration in (config, bert.config):
        ours = assert_loads(None, bert, config=configuration, state_dict=tensors)
    assert_loads(None, bert, config=config, state_dict=ours.state_dict())


def test_a_foreign_state_dict_is_refused():
    config = ScratchBertConfig(**TINY)
    relative = {"bert.encoder.layer.0.attention.self.distance_embedding.weight": torch.zeros(3)}
    for tensors, found in ((relative, "distance_embedding"), ({"encoder.weight": torch.zeros(3)}, "encoder.weight")):
        message = refusal(ScratchBertModel.from_pretrained, None, config=config, state_dict=tensors)
        assert_mentions(message, "state_dict", found)
        assert "None" not in message


@pytest.mark.parametrize(
    ("start", "key_mapping"),
    [
        ("encoder_of_mine.", {r"^encoder_of_mine\.": "bert."}),
        ("teacher.bert.", {r"^teacher\.": ""}),
    ],
    ids=["part of the names", "all names"],
)
def test_a_key_mapping_goes_before_our_own(tmp_path, start, key_mapping):
    """What the caller's own patterns make of the names is what BERT calls them."""
    bert = random_bert()
    everything = start.endswith("bert.")
    tensors = {
        start.removesuffix("bert.") + name if everything else name.replace("bert.", start): tensor
        for name, tensor in bert_tensors(bert, layer_norm="gamma").items()
    }
    write_bert(tmp_path, bert)
    write_weights(tmp_path, tensors)
    ours = assert_loads(tmp_path, bert, key_mapping=key_mapping)
    assert_same_outputs(ours, load_reference(tmp_path, key_mapping=key_mapping)[0])


def test_a_key_mapping_into_our_names(tmp_path):
    """The caller knows our names too."""
    bert = random_bert("Model")
    tensors = {name.replace("pooler.dense", "first_token"): tensor for name, tensor in bert_tensors(bert).items()}
    write_bert(tmp_path, bert)
    write_weights(tmp_path, tensors)
    assert_loads(tmp_path, bert, "Model", key_mapping={"^first_token": "pooler.dense"})


@pytest.mark.parametrize("is_own", [False, True], ids=["BERT", "ScratchBert"])
def test_sizes_that_do_not_fit(tmp_path, every_head, is_own):
    folder, fields = every_head["ForTokenClassification"], {"num_labels": 7}
    reference = load_reference(folder, "ForTokenClassification", num_labels=3)[0]
    if is_own:
        load(folder, "ForTokenClassification")[0].save_pretrained(tmp_path)
        folder = tmp_path
    with pytest.raises(RuntimeError, match="ignore_mismatched_sizes"), logged_warnings() as warnings:
        OURS["ForTokenClassification"].from_pretrained(folder, **fields)
    assert "classifier.weight" in "\n".join(warnings)
    ours, info, warnings = load(folder, "ForTokenClassification", ignore_mismatched_sizes=True, **fields)
    assert {name: (stored, wanted) for name, stored, wanted in info["mismatched_keys"]} == {
        "classifier.weight": ((3, 32), (7, 32)),
        "classifier.bias": ((3,), (7,)),
    }
    assert "classifier.weight" in warnings
    assert ours.classifier.weight.shape == (7, 32)
    assert 0.01 < ours.classifier.weight.std() < 0.03  # initializer_range is 0.02
    assert not ours.classifier.bias.any()
    assert_same_outputs(ours, reference, only="hidden_states")


def test_a_vocabulary_that_does_not_fit(tmp_path):
    write_bert(tmp_path)  # were the output matrix stored too, transformers would fail, for the reference as well
    fields = {"vocab_size": 120, "ignore_mismatched_sizes": True}
    with pytest.raises(RuntimeError, match="ignore_mismatched_sizes"):
        load(tmp_path, vocab_size=120)
    ours, info, _ = load(tmp_path, **fields)
    _, reference_info = load_reference(tmp_path, **fields)
    shared = {"model.embeddings.word_embeddings.weight", "lm_head.decoder.bias"}
    assert shared <= {name for name, *_ in info["mismatched_keys"]}
    assert {to_scratchbert(name) for name, *_ in reference_info["mismatched_keys"]} == {
        name for name, *_ in info["mismatched_keys"]
    }
    assert ours.lm_head.decoder.weight is ours.get_input_embeddings().weight
    assert ours.get_input_embeddings().weight.std() > 0.01


def test_without_a_pooler(every_head):
    ours, info, _ = load(every_head["Model"], "Model", add_pooling_layer=False)
    assert ours.pooler is None
    assert info["unexpected_keys"] == {"model.pooler.dense.weight", "model.pooler.dense.bias"}
    assert_same_outputs(ours, load_reference(every_head["Model"], "Model", add_pooling_layer=False)[0])


def test_without_loading_info_it_is_just_the_model(every_head):
    assert type(ScratchBertModel.from_pretrained(every_head["Model"])) is ScratchBertModel


def test_weights_that_config_json_points_to(tmp_path):
    """A config.json may name the file (`transformers_weights`), of whatever name."""
    bert = write_bert(tmp_path, random_bert(seed=2), fields={"transformers_weights": "best.safetensors"})
    os.rename(tmp_path / "model.safetensors", tmp_path / "best.safetensors")
    write_weights(tmp_path, bert_tensors(random_bert(seed=3)))
    ours = assert_loads(bert, random_bert(seed=2))
    assert_same_outputs(ours, load_reference(bert)[0])


# --- what config.json says, and what the caller says


def test_the_fields_of_config_json_arrive(tmp_path):
    labels = {0: "no", 1: "yes", 2: "perhaps"}
    fields = {
        "id2label": labels,
        "problem_type": "multi_label_classification",
        "hidden_dropout_prob": 0.3,
        "classifier_dropout": 0.25,
        "layer_norm_eps": 1e-5,
        "pad_token_id": 3,
        "hidden_act": "gelu_new",
        "a_field_of_nobody": [1, 2],
    }
    bert = random_bert("ForSequenceClassification", **fields)
    write_bert(tmp_path, bert)
    ours = load(tmp_path, "ForSequenceClassification")[0]
    reference = load_reference(tmp_path, "ForSequenceClassification")[0]
    for name in fields:
        assert getattr(ours.config, name) == getattr(reference.config, name) == fields[name], name
    assert ours.config.model_type == "scratchbert"
    assert ours.config.name_or_path == reference.config.name_or_path
    assert ours.dropout.p == 0.25
    assert ours.get_input_embeddings().padding_idx == 3
    assert_same_outputs(ours, reference)


CONFIGS = {
    "BertConfig": lambda folder: transformers.BertConfig(**TINY, num_labels=4),
    "ScratchBertConfig": lambda folder: ScratchBertConfig(**TINY, num_labels=4),
    "BertConfig.from_pretrained": lambda folder: transformers.BertConfig.from_pretrained(folder, num_labels=4),
    "AutoConfig": lambda folder: transformers.AutoConfig.from_pretrained(folder, num_labels=4),
    "ScratchBertConfig.from_pretrained": lambda folder: ScratchBertConfig.from_pretrained(folder, num_labels=4),
}


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_caller_s_own_config(every_head, kind):
    folder = every_head["ForPreTraining"]
    config = CONFIGS[kind](folder)
    before = config.to_dict()
    ours, info, _ = load(folder, "ForSequenceClassification", config=config)
    assert info["missing_keys"] == {"classifier.weight", "classifier.bias"}
    assert ours.num_labels == 4
    assert type(ours.config) is ScratchBertConfig
    assert ours.config.model_type == "scratchbert"
    assert config.to_dict() == before
    assert_same_outputs(ours, load_reference(folder, "ForSequenceClassification")[0], only="hidden_states")


def test_our_config_makes_an_auto_class_open_a_bert_as_ours(every_head):
    config = ScratchBertConfig.from_pretrained(every_head["ForMaskedLM"])
    model = transformers.AutoModelForMaskedLM.from_pretrained(every_head["ForMaskedLM"], config=config)
    assert type(model) is OURS["ForMaskedLM"]
    assert_same_outputs(model, load_reference(every_head["ForMaskedLM"], "ForMaskedLM")[0])


@pytest.mark.parametrize("as_path", [str, Path])
@pytest.mark.parametrize("name", ["", "config.json"])
def test_a_path_as_config(tmp_path, every_head, name, as_path):
    write_bert(tmp_path, fields={"id2label": dict.fromkeys(range(6), "label")})
    ours = load(every_head["Model"], "ForSequenceClassification", config=as_path(tmp_path / name))[0]
    assert ours.num_labels == 6
    assert_same_outputs(ours, load_reference(every_head["Model"])[0], only="hidden_states")


def test_attention_and_outputs_asked_for_while_loading(every_head):
    for attention in ("eager", "sdpa"):
        ours, _, _ = load(every_head["Model"], "Model", attn_implementation=attention, output_attentions=True)
        assert ours.config._attn_implementation == attention
        ids = torch.tensor([[5, 6, 7]])
        assert [a.shape for a in ours(ids).attentions] == [(1, 4, 3, 3)] * 2
    config = transformers.BertConfig(**TINY, attn_implementation="eager", output_hidden_states=True)
    ours, _, _ = load(every_head["Model"], "Model", config=config)
    assert ours.config._attn_implementation == "eager"
    assert len(ours(ids).hidden_states) == 3


# Each with what the message has to name. A value that no model can be built from must not get in by way of an argument.
UNFIT_FIELDS = {
    "hidden_act": ("geluu", "'gelu'"),
    "hidden_dropout_prob": (1.5, "1.5"),
    "attention_probs_dropout_prob": (-0.5, "-0.5"),
    "num_attention_heads": (5, "hidden_size"),
    "position_embedding_type": ("relative_key", "'relative_key'"),
    "pad_token_id": (500, "98"),
    "layer_norm_eps": (0.0, "above 0"),
    "add_cross_attention": (True, "is_decoder"),
}


@pytest.mark.parametrize("field", UNFIT_FIELDS)
def test_an_unfit_field_as_an_argument_or_in_config_json_is_refused(tmp_path, every_head, field):
    value, wanted = UNFIT_FIELDS[field]
    write_bert(tmp_path, fields={field: value})
    assert_refused(tmp_path, field, value, wanted)
    assert_refused(every_head["Model"], field, value, wanted, **{field: value})
    with pytest.raises(ValueError, match=field):
        ScratchBertConfig.from_pretrained(every_head["Model"], **{field: value})


# --- what is no BERT

LOOK_ALIKES = ("Roberta", "Albert", "DistilBert", "Electra")
# Of these, the config.json alone
MORE_LOOK_ALIKES = ("XLMRoberta", "Camembert", "MobileBert", "MegatronBert", "BertGeneration", "Ernie", "ConvBert")


@pytest.fixture(scope="module")
def look_alikes(tmp_path_factory):
    """Real checkpoints of other models, small ones."""
    folders = {}
    for kind in LOOK_ALIKES + MORE_LOOK_ALIKES:
        config = getattr(transformers, f"{kind}Config")(
            **TINY, **({"embedding_size": 32} if kind in ("Albert", "Electra", "MobileBert") else {})
        )
        folders[kind] = tmp_path_factory.mktemp(kind)
        name = f"{kind}Encoder" if kind == "BertGeneration" else f"{kind}Model"
        if kind in LOOK_ALIKES:
            getattr(transformers, name)(config).save_pretrained(folders[kind])
        else:
            config.architectures = [name]
            config.save_pretrained(folders[kind])
            write_weights(folders[kind], bert_tensors(random_bert("Model")))
    return folders


def own_config(kind):
    return getattr(transformers, f"{kind}Config")()


CALLERS_CONFIGS = {
    "no config": lambda kind: None,
    "BertConfig": lambda kind: transformers.BertConfig(**TINY),
    "ScratchBertConfig": lambda kind: ScratchBertConfig(**TINY),
    "its own config": own_config,
}


def test_a_roberta_has_bert_s_names_and_would_load_without_a_murmur(look_alikes):
    """Why the config.json decides."""
    names = set(transformers.RobertaModel.from_pretrained(look_alikes["Roberta"]).state_dict())
    assert names == set(random_bert("Model").state_dict())


@pytest.mark.parametrize("config", CALLERS_CONFIGS)
@pytest.mark.parametrize("kind", LOOK_ALIKES + MORE_LOOK_ALIKES)
def test_another_model_is_refused(look_alikes, kind, config):
    folder, model_type = look_alikes[kind], config_json(look_alikes[kind])["model_type"]
    config = CALLERS_CONFIGS[config](kind)
    assert_refused(folder, f"{model_type!r}", *SUPPORTED, folder, config=config)
    assert_refused(folder, f"{model_type!r}", head="ForMaskedLM", config=config)
    if config is None:
        assert_refused_config(folder, f"{model_type!r}", *SUPPORTED)


def assert_refused_config(folder, *parts, **kwargs):
    assert_mentions(refusal(ScratchBertConfig.from_pretrained, folder, **kwargs), *parts)


@pytest.mark.parametrize("config", ["no config", "BertConfig", "ScratchBertConfig"])
@pytest.mark.parametrize("kind", LOOK_ALIKES + MORE_LOOK_ALIKES)
def test_another_model_without_model_type_is_refused(tmp_path, look_alikes, kind, config):
    """It is known by its architectures; without them nothing says that it is a BERT."""
    shutil.copytree(look_alikes[kind], tmp_path, dirs_exist_ok=True)
    config, architecture = CALLERS_CONFIGS[config](kind), config_json(tmp_path)["architectures"][0]
    change_config(tmp_path, model_type=None)
    assert_refused(tmp_path, architecture, *SUPPORTED, config=config)
    change_config(tmp_path, architectures=None)
    assert_refused(tmp_path, tmp_path, "model_type", *SUPPORTED, "config.json", config=config)


@pytest.mark.parametrize("kind", LOOK_ALIKES)
def test_another_model_s_config_for_a_bert_checkpoint_is_refused(every_head, kind):
    config = own_config(kind)
    assert_refused(every_head["Model"], f"{config.model_type!r}", type(config).__name__, *SUPPORTED, config=config)


def test_the_caller_cannot_rename_another_model(look_alikes):
    """`transformers` lets an argument overrule model_type; the numbers would still be other ones."""
    assert_refused(look_alikes["Roberta"], "'roberta'", model_type="bert")
    assert_refused(look_alikes["Roberta"], "'roberta'", model_type="scratchbert")


@pytest.mark.parametrize("kind", ["relative_key", "relative_key_query", "alibi"])
@pytest.mark.parametrize("config", ["no config", "BertConfig", "ScratchBertConfig"])
@pytest.mark.parametrize("known_by", ["model_type", "architectures"])
def test_relative_positions_are_refused(tmp_path, kind, config, known_by):
    write_bert(tmp_path, fields={"position_embedding_type": kind})
    change_config(tmp_path, **{"model_type" if known_by == "architectures" else "architectures": None})
    parts = (tmp_path, repr(kind), "position_embedding_type", "absolute")
    assert_refused(tmp_path, *parts, config=CALLERS_CONFIGS[config]("Bert"))
    # Saying otherwise does not make it otherwise.
    if config == "no config":
        assert_refused(tmp_path, *parts, position_embedding_type="absolute")


def test_a_config_that_wants_relative_positions_is_refused(every_head):
    config = transformers.BertConfig(**TINY, position_embedding_type="relative_key")
    assert_refused(every_head["Model"], "'relative_key'", "absolute", config=config)


@pytest.mark.parametrize("config", ["no config", "BertConfig"])
@pytest.mark.parametrize("container", ["safetensors", "sharded bin"])
def test_tensors_of_relative_positions_are_refused(tmp_path, container, config):
    bert = random_bert()
    tensors = bert_tensors(bert)
    for layer in range(2):
        name = f"bert.encoder.layer.{layer}.attention.self.distance_embedding.weight"
        tensors[name] = torch.zeros(39, 8)
    write_weights(tmp_path, tensors, container)
    (tmp_path / "config.json").write_text(json.dumps(bert_fields(bert)))
    config = CALLERS_CONFIGS[config]("Bert")
    assert_refused(tmp_path, tmp_path, "distance_embedding", "absolute", config=config)


@pytest.mark.parametrize("value", [None, "absolute"])
def test_absolute_positions_said_so_are_fine(tmp_path, value):
    write_bert(tmp_path)
    fields = config_json(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({**fields, "position_embedding_type": value}))
    assert_loads(tmp_path, random_bert())


def write_scratchbert(folder, container="safetensors"):
    model = random_scratchbert()
    model.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    write_weights(folder, tensors, container)


both_formats = pytest.mark.parametrize("write", [write_bert, write_scratchbert], ids=["BERT", "ScratchBert"])


@pytest.mark.parametrize(
    ("write", "start"),
    [
        *((write_bert, start) for start in ("module.", "roberta.", "model.bert.", "auto_model.")),
        *((write_scratchbert, start) for start in ("module.", "_orig_mod.")),
    ],
)
def test_weights_with_foreign_names_are_refused(tmp_path, write, start):
    """As of other models, or as a wrapper leaves them that was not removed before its state was saved."""
    write(tmp_path)
    tensors = {start + name: tensor for name, tensor in load_file(tmp_path / "model.safetensors").items()}
    write_weights(tmp_path, tensors)
    assert_refused(tmp_path, tmp_path, min(tensors), "BERT", "ScratchBert")


def test_weights_wrapped_into_something_else_are_refused(tmp_path):
    write_bert(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    torch.save({"state_dict": bert_tensors(random_bert()), "epoch": 3}, tmp_path / "pytorch_model.bin")
    assert_refused(tmp_path, tmp_path, "'epoch'")


@pytest.mark.parametrize("container", ["safetensors", "bin"])
def test_a_file_without_any_weight_is_refused(tmp_path, container):
    """Every weight would be random."""
    write_bert(tmp_path, container=container)
    write_weights(tmp_path, {}, container)
    with pytest.raises((ValueError, OSError), match=str(tmp_path)):
        ScratchBertModel.from_pretrained(tmp_path)


# --- a config.json that does not say what it is


@pytest.mark.parametrize("model_type", [None, "bert"])
@pytest.mark.parametrize("architectures", [None, ["BertForPreTraining"], ["BertForSomeTaskOfMine"]])
def test_a_bert_that_half_says_so(tmp_path, model_type, architectures):
    write_bert(tmp_path)
    change_config(tmp_path, model_type=model_type, architectures=architectures)
    if not (model_type or architectures):
        assert_refused(tmp_path, tmp_path, *SUPPORTED, '"model_type": "bert"')
        return
    assert_loads(tmp_path, random_bert())


@pytest.mark.parametrize("hub", [False, True], ids=["folder", "hub id"])
@pytest.mark.parametrize("container", ["bin", "safetensors"])
@pytest.mark.parametrize("config", ["no config", "BertConfig", "ScratchBertConfig"])
def test_the_configuration_of_google_s_own_release(tmp_path, container, hub, config):
    """Converted from TensorFlow in 2018, with the bert_config.json that lay beside it; many on the Hub are so."""
    bert = random_bert()
    folder = write_bert(tmp_path / "folder", bert, container, layer_norm="gamma", position_ids=True)
    fields = {
        "attention_probs_dropout_prob": 0.1,
        "directionality": "bidi",
        "hidden_act": "gelu",
        "hidden_dropout_prob": 0.1,
        "hidden_size": 32,
        "initializer_range": 0.02,
        "intermediate_size": 37,
        "max_position_embeddings": 40,
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "pooler_fc_size": 768,
        "pooler_num_attention_heads": 12,
        "pooler_num_fc_layers": 3,
        "pooler_size_per_head": 128,
        "pooler_type": "first_token_transform",
        "type_vocab_size": 2,
        "vocab_size": 99,
    }
    (folder / "config.json").write_text(json.dumps(fields))
    kwargs = {"config": CALLERS_CONFIGS[config]("Bert")}
    if hub:
        write_hub_cache(tmp_path, "google/old-bert", folder)
        kwargs["cache_dir"] = tmp_path
    assert_loads("google/old-bert" if hub else folder, bert, **kwargs)


@pytest.mark.parametrize(
    "field", ["embedding_size", "num_hidden_groups", "rotary_value", "relative_attention", "hidden_groups", "n_layers"]
)
def test_google_s_form_with_another_field_is_not_google_s_bert(tmp_path, field):
    """ALBERT's, ELECTRA's, RoFormer's and DeBERTa's own releases looked much the same."""
    write_bert(tmp_path)
    fields = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2, "vocab_size": 99, field: 1}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    assert_refused(tmp_path, tmp_path, *SUPPORTED)


# --- files that are broken or not there


@pytest.mark.parametrize("kwargs", [{}, {"config": transformers.BertConfig(**TINY)}], ids=["no config", "config"])
def test_an_empty_folder(tmp_path, kwargs):
    file = "model.safetensors" if kwargs else "config.json"
    assert_refused(tmp_path, tmp_path, file, error=OSError, **kwargs)


@both_formats
@pytest.mark.parametrize("file", ["config.json", "model.safetensors"])
def test_a_folder_without_a_configuration_or_weights(tmp_path, write, file):
    write(tmp_path)
    (tmp_path / file).unlink()
    assert_refused(tmp_path, tmp_path, file, error=OSError)
    if file == "config.json":
        refusal(ScratchBertConfig.from_pretrained, tmp_path, error=OSError)


@pytest.mark.parametrize("source", ["BertConfig", "ScratchBertConfig"])
def test_without_config_json_the_caller_s_config_counts(tmp_path, source):
    write_bert(tmp_path)
    (tmp_path / "config.json").unlink()
    assert_loads(tmp_path, random_bert(), config=CALLERS_CONFIGS[source]("Bert"))
    assert_refused(tmp_path, "'roberta'", config=transformers.RobertaConfig())


NO_OBJECTS = ("", "{", '{"model_type": "bert"', "\x93\x00", "<html>", "[]", '"bert"', "3", "null")


@pytest.mark.parametrize("text", NO_OBJECTS, ids=range(len(NO_OBJECTS)))
@pytest.mark.parametrize("kwargs", [{}, {"config": transformers.BertConfig(**TINY)}], ids=["no config", "config"])
def test_a_config_json_that_is_none(tmp_path, text, kwargs):
    """What it was is not known, so neither does a caller's config stand in for it."""
    write_bert(tmp_path)
    (tmp_path / "config.json").write_bytes(text.encode("latin-1"))
    assert_refused(tmp_path, tmp_path / "config.json", error=OSError, **kwargs)


@pytest.mark.parametrize("kwargs", [{}, {"config": transformers.BertConfig(**TINY)}], ids=["no config", "config"])
@pytest.mark.parametrize("name", ["nowhere", "no/where", "/no/where/at/all"])
def test_a_folder_that_is_not_there(tmp_path, monkeypatch, name, kwargs):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(OSError):  # noqa: PT011  transformers' own message, which differs from kind to kind
        load(name, cache_dir=tmp_path, **kwargs)


@both_formats
@pytest.mark.parametrize("container", CONTAINERS)
@pytest.mark.parametrize("share", [0, 0.3, 0.99, None])
def test_a_file_that_is_truncated_or_garbage(tmp_path, write, container, share):
    write(tmp_path, container=container)
    file = weight_files(tmp_path)[-1]
    content = file.read_bytes()
    file.write_bytes(b"\x93garbage\x00" * 500 if share is None else content[: int(share * len(content))])
    assert_refused(tmp_path, file, "truncated, corrupt", error=OSError)


@both_formats
@pytest.mark.parametrize("container", ["sharded safetensors", "sharded bin"])
def test_a_missing_shard_and_a_broken_index(tmp_path, write, container):
    write(tmp_path, container=container)
    shard, index = next(tmp_path.glob("*-00002-of-00003*")), next(tmp_path.glob("*.index.json"))
    shard.unlink()
    assert_refused(tmp_path, shard.name, tmp_path, error=OSError)
    index.write_text(index.read_text()[:100])
    assert_refused(tmp_path, index, error=OSError)


@pytest.mark.parametrize("kwargs", [{}, {"weights_only": False}], ids=str)
def test_a_pickle_is_never_run(tmp_path, kwargs):
    write_bert(tmp_path, container="bin")
    file = tmp_path / "pytorch_model.bin"
    torch.save({**bert_tensors(random_bert()), "intruder": Intruder(tmp_path / "ran")}, file)
    assert_refused(tmp_path, file, error=OSError, **kwargs)
    assert not (tmp_path / "ran").exists()


# --- a class of the caller's own that loads a BERT, or what it saved itself


class TwoHeads(ScratchBertForPreTraining):
    """As a user would write it."""

    def __init__(self, config):
        super().__init__(config)
        self.extra = nn.Linear(config.hidden_size, 2)
        self.post_init()


def test_a_class_of_one_s_own_loads_a_bert(every_head):
    with logged_warnings() as warnings:
        model, info = TwoHeads.from_pretrained(every_head["ForPreTraining"], output_loading_info=True)
    assert info["missing_keys"] == {"extra.weight", "extra.bias"}
    assert "extra.weight" in "\n".join(warnings)
    assert_same_outputs(model, random_bert())


class OwnNames(ScratchBertModel):
    """Its parts bear, by accident, the names that parts of BERT have."""

    def __init__(self, config):
        super().__init__(config)
        self.distance_embedding = nn.Embedding(3, config.hidden_size)
        self.crossattention = nn.Linear(config.hidden_size, 2)
        self.post_init()


class OldNames(ScratchBertForPreTraining):
    """A part of its own stands where BERT has its head for the next sentence, beside ours."""

    def __init__(self, config):
        super().__init__(config)
        self.cls = nn.ModuleDict({"seq_relationship": nn.Linear(config.hidden_size, 2)})
        self.post_init()


@pytest.mark.parametrize("own", [TwoHeads, OwnNames, OldNames])
def test_a_class_of_one_s_own_gets_back_what_it_saved(tmp_path, own):
    """The table of BERT's names is for BERT's checkpoints; on our own it must change nothing."""
    model = own(ScratchBertConfig(**TINY))
    model.save_pretrained(tmp_path)
    again, info = own.from_pretrained(tmp_path, output_loading_info=True)
    assert info == NOTHING
    different = [
        name for name, tensor in model.state_dict().items() if not torch.equal(tensor, again.state_dict()[name])
    ]
    assert not different


def test_a_model_made_from_the_reference_s_configuration():
    """`ScratchBertModel(BertConfig())` is what is left where an import was changed and the other was not: the same
    model, or an error that says which configuration is wanted."""
    try:
        model = ScratchBertModel(transformers.BertConfig(**TINY))
    except (TypeError, ValueError) as error:
        assert "BertConfig" in str(error)  # noqa: PT017
        assert "ScratchBertConfig" in str(error)  # noqa: PT017
    else:
        assert model.config.model_type == "scratchbert"


# --- classes whose encoder has another name


class UnderBertsName(ScratchBertPreTrainedModel):
    """As most classes that people derived from BERT's are written."""

    base_model_prefix = "bert"

    def __init__(self, config):
        super().__init__(config)
        self.bert = ScratchBertModel(config)
        self.classifier = nn.Linear(config.hidden_size, 2)
        self.post_init()

    def forward(self, *args, **kwargs):
        return self.bert(*args, **kwargs)


class WithoutSayingSo(UnderBertsName):
    base_model_prefix = "model"


@pytest.mark.parametrize("prefix", [True, False])
def test_an_encoder_under_another_name(tmp_path, prefix):
    bert = random_bert("Model")
    write_bert(tmp_path, bert, prefix=prefix)
    model, info = UnderBertsName.from_pretrained(tmp_path, output_loading_info=True)
    assert info["missing_keys"] == {"classifier.weight", "classifier.bias"}
    assert not info["unexpected_keys"]
    assert_same_outputs(model.bert, bert)
    model.save_pretrained(tmp_path / "own")
    again, info = UnderBertsName.from_pretrained(tmp_path / "own", output_loading_info=True)
    assert info == NOTHING
    assert_same_outputs(again.bert, bert)


def test_an_encoder_that_cannot_be_found_is_no_random_one(tmp_path):
    write_bert(tmp_path)
    message = refusal(WithoutSayingSo.from_pretrained, tmp_path)
    assert_mentions(message, "base_model_prefix, here 'model'", "bert.encoder.blocks.0")


# --- blocks that are not BERT's


def test_an_activation_with_a_weight(tmp_path):
    bert = random_bert(hidden_act="prelu")
    write_bert(tmp_path, bert)
    assert_loads(tmp_path, bert)
    new = OURS["ForMaskedLM"].from_pretrained(write_bert(tmp_path / "bare", random_bert("Model", hidden_act="prelu")))
    assert new.lm_head.activation.weight.item() == 0.25  # as torch starts it, and not what lay in memory


@pytest.mark.parametrize("prefix", ["", "bert."])
@pytest.mark.parametrize("config", [None, transformers.BertConfig(**TINY)])
def test_blocks_of_another_make_are_refused(tmp_path, prefix, config):
    """As those of the BERTs that bring their own code, under BERT's model_type."""
    bert = random_bert()
    foreign = f"{prefix}encoder.layer.0.attention.self.Wqkv.weight"
    tensors = {**bert_tensors(bert, prefix=bool(prefix)), foreign: torch.zeros(3)}
    write_bert(tmp_path, bert)
    write_weights(tmp_path, tensors)
    assert_refused(tmp_path, tmp_path, foreign, config=config)


# --- two BERTs: the checkpoint of an EncoderDecoderModel


def their_config(source):
    return transformers.EncoderDecoderConfig.from_pretrained(source)


def load_their_reference(source, **kwargs):
    return transformers.EncoderDecoderModel.from_pretrained(source, **kwargs)


@every_form(layers=(1, 2, 3))
def test_every_form_of_two_berts(tmp_path, form):
    form = dict(form)
    container, layers = form.pop("container"), form.pop("layers")
    reference = random_encoder_decoder(decoder={"num_hidden_layers": layers})
    dtype = str(form["dtype"]).removeprefix("torch.")
    write_two_berts(tmp_path, reference, container, fields={"dtype": dtype}, **form)
    ours = assert_loads_two_berts(tmp_path, reference.to(form["dtype"]))
    assert ours.dtype == form["dtype"]
    assert not ours.training
    assert_same_outputs(ours, load_their_reference(tmp_path), tolerance=1e-5)
    assert ours.lm_head.decoder.weight is ours.get_decoder().get_input_embeddings().weight
    assert ours.get_encoder().get_input_embeddings() is not ours.get_decoder().get_input_embeddings()
    base, info, _ = load(tmp_path, "Seq2SeqModel")
    assert not info["missing_keys"]
    assert {name.partition(".")[0] for name in info["unexpected_keys"]} == {"lm_head"}
    assert_same_outputs(base, ours.model)


@pytest.mark.parametrize("head", ["Model", "Seq2SeqModel", "ForConditionalGeneration"])
def test_two_berts_open_by_every_class_of_two_halves_and_are_ours_from_then_on(tmp_path, head):
    random_encoder_decoder().save_pretrained(tmp_path / "theirs")
    ours, _, _ = load(tmp_path / "theirs", head)
    assert type(ours) is OURS["Seq2SeqModel" if head == "Model" else head]
    ours.save_pretrained(tmp_path / "ours")
    assert type(assert_loads(tmp_path / "ours", ours, head)) is type(ours)
    config = config_json(tmp_path / "ours")
    assert config["model_type"] == "scratchbert"
    assert not {"encoder", "decoder"} & set(config)


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("left_out", [(), (OUTPUT_BIAS,), (DECODER_BIAS,)], ids=["both", "new name", "old name"])
def test_the_matrix_and_the_bias_of_two_berts(tmp_path, left_out, tied):
    reference = random_encoder_decoder(decoder={"tie_word_embeddings": tied})
    tensors = two_bert_tensors(reference, decoder="left out" if tied else "weight and bias")
    tensors["decoder." + OUTPUT_BIAS] = tensors["decoder." + DECODER_BIAS] = torch.randn(TINY["vocab_size"])
    write_two_berts(tmp_path, reference)
    write_weights(tmp_path, {k: v for k, v in tensors.items() if k.removeprefix("decoder.") not in left_out})
    with torch.no_grad():
        reference.decoder.cls.predictions.decoder.bias.copy_(tensors["decoder." + OUTPUT_BIAS])
    ours = assert_loads_two_berts(tmp_path, reference)
    assert torch.equal(ours.lm_head.decoder.bias, tensors["decoder." + OUTPUT_BIAS])
    assert ours.config.tie_word_embeddings == tied


def shared_by_transformers_4(names, kept):
    """What its `tie_encoder_decoder` made one tensor, as far as it stored it once: under the other half's name."""
    other = {"encoder": "decoder.bert.", "decoder": "encoder."}[kept]
    return {
        name for name in names if name.startswith(other) and ".crossattention." not in name and "pooler" not in name
    }


@pytest.mark.parametrize("kept", ["encoder", "decoder", "both"])
@pytest.mark.parametrize("container", ["safetensors", "bin", "sharded safetensors"])
def test_two_berts_that_transformers_4_tied(tmp_path, container, kept):
    reference = random_encoder_decoder()
    reference.decoder.bert.load_state_dict(
        reference.encoder.state_dict(), strict=False
    )  # the pooler is not the decoder's
    tensors = two_bert_tensors(reference)
    dropped = shared_by_transformers_4(tensors, kept) if kept != "both" else set()
    assert kept == "both" or len(dropped) == 2 * 16 + 5
    write_two_berts(tmp_path, reference, container)
    write_weights(tmp_path, {name: t for name, t in tensors.items() if name not in dropped}, container)
    change_config(tmp_path, tie_encoder_decoder=True)
    ours = assert_loads_two_berts(tmp_path, reference)
    encoder, decoder = ours.get_encoder(), ours.get_decoder()
    assert all(weight is dict(decoder.named_parameters())[name] for name, weight in encoder.named_parameters())
    ours.save_pretrained(tmp_path / "ours")
    assert_same_outputs(load(tmp_path / "ours", "ForConditionalGeneration")[0], ours)


def test_two_berts_by_every_way_to_name_them(tmp_path):
    reference = random_encoder_decoder()
    folder = write_two_berts(tmp_path / "folder", reference, "sharded bin", layer_norm="gamma")
    write_two_berts(folder / "inner", random_encoder_decoder(seed=2))
    write_hub_cache(tmp_path, "someone/two-berts", folder)
    config = their_config(folder)
    for source, kwargs in (
        (str(folder), {}),
        (folder, {"config": config}),
        (folder, {"config": ScratchBertConfig.from_pretrained(folder)}),
        (folder, {"config": ScratchBertConfig.from_bert(config)}),
        (folder, {"device_map": "auto"}),
        ("someone/two-berts", {"cache_dir": tmp_path}),
    ):
        assert_loads_two_berts(source, reference, **kwargs)
    assert_loads_two_berts(folder, random_encoder_decoder(seed=2), subfolder="inner")


def test_a_state_dict_of_two_berts():
    reference = random_encoder_decoder()
    for tensors in (
        reference.state_dict(),
        two_bert_tensors(reference),
        two_bert_tensors(reference, layer_norm="gamma"),
    ):
        ours = assert_loads_two_berts(None, reference, config=reference.config, state_dict=tensors)
    assert_loads_two_berts(None, reference, config=ours.config, state_dict=ours.state_dict())


def test_how_two_berts_generate_is_kept(tmp_path):
    """Whether it stands in generation_config.json, or, as transformers 4 left it, in config.json."""
    wanted = {"num_beams": 3, "max_length": 9, "no_repeat_ngram_size": 2}
    reference = random_encoder_decoder()
    reference.generation_config.update(**wanted)
    reference.save_pretrained(tmp_path / "new")
    write_two_berts(tmp_path / "old", reference, fields=wanted)
    (tmp_path / "old" / "generation_config.json").unlink()
    ids = torch.tensor([[5, 6, 7, 8]])
    expected = load_their_reference(tmp_path / "new").generate(ids)
    for folder in (tmp_path / "new", tmp_path / "old"):
        ours, _, _ = load(folder, "ForConditionalGeneration")
        ours.save_pretrained(tmp_path / "ours")
        for model in (ours, load(tmp_path / "ours", "ForConditionalGeneration")[0]):
            config = model.generation_config
            assert {name: getattr(config, name) for name in wanted} == wanted
            assert (config.decoder_start_token_id, config.eos_token_id, config.pad_token_id) == (2, 3, 0)
            assert torch.equal(model.generate(ids), expected)


@pytest.mark.parametrize("said_in", ["the whole", "the decoder", "nowhere"])
def test_the_special_ids_of_two_berts(tmp_path, said_in):
    ids = {"decoder_start_token_id": 7, "bos_token_id": 6, "eos_token_id": 8, "pad_token_id": 9}
    folder = write_two_berts(tmp_path)
    fields = config_json(folder)
    for name in ids:
        fields.pop(name, None)
        fields["encoder"].pop(name, None)
        fields["decoder"].pop(name, None)
    if said_in != "nowhere":
        (fields if said_in == "the whole" else fields["decoder"]).update(ids)
    (folder / "config.json").write_text(json.dumps(fields))
    config = ScratchBertConfig.from_pretrained(folder)
    nothing = {"decoder_start_token_id": None, "bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
    assert {name: getattr(config, name) for name in ids} == (nothing if said_in == "nowhere" else ids)


@pytest.mark.parametrize("field", ["output_hidden_states", "output_attentions", "return_dict"])
def test_what_two_berts_return_is_said_by_the_whole_and_not_by_a_half(tmp_path, field):
    usual = field == "return_dict"
    inputs = {"input_ids": torch.tensor([[5, 6, 7]]), "decoder_input_ids": torch.tensor([[2, 9]]), "use_cache": False}
    folder = write_two_berts(tmp_path, fields={field: not usual})
    ours, reference = (load(folder) for load in (ScratchBertConfig.from_pretrained, their_config))
    assert getattr(ours, field) == getattr(reference, field) == (not usual)
    for half in ("encoder", "decoder"):
        folder = write_two_berts(tmp_path)
        change_config(folder, **{half: {**config_json(folder)[half], field: not usual}})
        outputs = load(folder, "ForConditionalGeneration", attn_implementation="eager")[0](**inputs)
        assert list(outputs) == ["logits", "encoder_last_hidden_state"]


@pytest.mark.parametrize("half", ["encoder", "decoder"])
def test_whether_two_berts_fill_a_cache_is_the_decoder_s_to_say(tmp_path, half):
    folder = write_two_berts(tmp_path)
    change_config(folder, **{half: {**config_json(folder)[half], "use_cache": False}})
    inputs = {"input_ids": torch.tensor([[5, 6, 7]]), "decoder_input_ids": torch.tensor([[2, 9]])}
    ours, reference = load(folder, "ForConditionalGeneration")[0], load_their_reference(folder)
    assert ("past_key_values" in ours(**inputs)) == ("past_key_values" in reference(**inputs)) == (half == "encoder")


HALVES_THAT_DIFFER = {
    "vocab_size": 120,
    "hidden_size": 64,
    "num_attention_heads": 2,
    "intermediate_size": 41,
    "hidden_act": "relu",
    "hidden_dropout_prob": 0.3,
    "attention_probs_dropout_prob": 0.3,
    "max_position_embeddings": 30,
    "type_vocab_size": 3,
    "layer_norm_eps": 1e-5,
}


@pytest.mark.parametrize("head", ["Model", "ForConditionalGeneration"])
@pytest.mark.parametrize("field", HALVES_THAT_DIFFER)
def test_two_berts_that_differ_in_more_than_depth_are_refused(tmp_path, field, head):
    value = HALVES_THAT_DIFFER[field]
    random_encoder_decoder(decoder={field: value}).save_pretrained(tmp_path)
    usual = getattr(transformers.BertConfig(**TINY), field)
    parts = ("EncoderDecoderModel", field, f"{usual!r} in the encoder", f"{value!r} in the decoder")
    assert_refused(tmp_path, tmp_path, *parts, head=head)
    assert_refused_config(tmp_path, field)


def test_a_decoder_that_does_not_look_at_the_encoder_is_refused(tmp_path):
    random_encoder_decoder().save_pretrained(tmp_path)
    decoder = config_json(tmp_path)["decoder"]
    change_config(tmp_path, decoder={**decoder, "add_cross_attention": False})
    assert_refused(tmp_path, tmp_path, "add_cross_attention is False", head="ForConditionalGeneration")


OTHER_HALVES = {
    "gpt2": transformers.GPT2Config(n_embd=32, n_layer=1, n_head=4, vocab_size=99, add_cross_attention=True),
    "roberta": transformers.RobertaConfig(**TINY, is_decoder=True, add_cross_attention=True),
    "t5": transformers.T5Config(d_model=32),
}


@pytest.mark.parametrize("half", ["encoder", "decoder"])
@pytest.mark.parametrize("kind", OTHER_HALVES)
def test_a_half_that_is_no_bert_is_refused(tmp_path, kind, half):
    random_encoder_decoder().save_pretrained(tmp_path)
    change_config(tmp_path, **{half: OTHER_HALVES[kind].to_dict()})
    assert_refused(tmp_path, tmp_path, "two BERTs", half, repr(kind), *SUPPORTED, head="ForConditionalGeneration")


@pytest.mark.parametrize("half", ["encoder", "decoder"])
def test_two_berts_with_relative_positions_are_refused(tmp_path, half):
    random_encoder_decoder().save_pretrained(tmp_path)
    fields = config_json(tmp_path)[half]
    change_config(tmp_path, **{half: {**fields, "position_embedding_type": "relative_key"}})
    assert_refused(tmp_path, tmp_path, "'relative_key'", "absolute", head="ForConditionalGeneration")
    change_config(tmp_path, **{half: fields})
    tensors = two_bert_tensors(random_encoder_decoder())
    before = "encoder." if half == "encoder" else "decoder.bert."
    tensors[f"{before}encoder.layer.0.attention.self.distance_embedding.weight"] = torch.zeros(39, 8)
    write_weights(tmp_path, tensors)
    assert_refused(tmp_path, tmp_path, "distance_embedding", "absolute", head="ForConditionalGeneration")


@pytest.mark.parametrize("head", [head for head in BERTS if head != "Model"])
def test_two_berts_are_not_opened_as_one(tmp_path, head):
    random_encoder_decoder().save_pretrained(tmp_path)
    assert_refused(tmp_path, tmp_path, "is_encoder_decoder is True", "AutoModel", "get_encoder()", head=head)


def test_two_berts_that_lack_a_weight_name_it(tmp_path):
    write_two_berts(tmp_path)
    tensors = two_bert_tensors(random_encoder_decoder())
    lost = "decoder.bert.encoder.layer.1.crossattention.self.query.weight"
    write_weights(tmp_path, {name: tensor for name, tensor in tensors.items() if name != lost})
    _, info, warnings = load(tmp_path, "ForConditionalGeneration")
    assert info["missing_keys"] == {"model.decoder.encoder.blocks.1.cross_attention.query.weight"}
    assert "cross_attention.query.weight" in warnings
