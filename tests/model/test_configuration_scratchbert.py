"""The configuration: BERT's fields and defaults, the values that it refuses, and its way to disk and back."""

import copy
import dataclasses
import json
import pickle

import pytest
import transformers
from huggingface_hub.errors import StrictDataclassFieldValidationError

import modeling_scratchbert
from modeling_scratchbert import AUTO_MAP, ScratchBertConfig, ScratchBertModel
from support.checkpoint_kinds import config_json, write_bert
from support.models import CROSSED, TINY, random_bert, tiny_config

OUR_OWN = {
    "norm_first": False,
    "position_embedding_type": "absolute",
    "num_decoder_layers": None,
    "tie_encoder_decoder": False,
    "padding_free": False,
    "sparse_prediction": False,
    "share_embeddings": True,
    "decoder_start_token_id": None,
}
# `padding_free` is a choice of the program.
SAVED = {name: value for name, value in OUR_OWN.items() if name != "padding_free"}
SEQ2SEQ = {"is_encoder_decoder": True}


def comparable(config) -> dict:
    ignored = {"model_type", "architectures", "transformers_version", "_name_or_path", "dtype", "auto_map"}
    return {name: value for name, value in config.to_dict().items() if name not in ignored}


def fields_of(config_class) -> dict:
    """Types and defaults by name: where they are inherited, types are text."""
    return {
        field.name: (getattr(field.type, "__name__", str(field.type)), field.default)
        for field in dataclasses.fields(config_class)
    }


def test_fields_and_defaults_of_bert():
    theirs, ours = fields_of(transformers.BertConfig), fields_of(ScratchBertConfig)
    assert {name: ours[name] for name in theirs} == theirs
    assert [name for name in ours if name in theirs] == list(theirs)  # arguments by position mean the same
    assert {name: ours[name][1] for name in set(ours) - set(theirs)} == OUR_OWN
    assert comparable(ScratchBertConfig()) == comparable(transformers.BertConfig()) | SAVED
    for name in ("attribute_map", "keys_to_ignore_at_inference", "is_composition", "has_no_defaults_at_init"):
        assert getattr(ScratchBertConfig, name, None) == getattr(transformers.BertConfig, name, None)


# ---------------------------------------------------------------------------------------------------------------------
# Values that it refuses, and values at the limits

NAN = float("nan")
# A field that the error names, and fields with which it is invalid.
INVALID = [
    ("vocab_size", {"vocab_size": 0}),
    ("hidden_size", {"hidden_size": 0}),
    ("num_attention_heads", {"num_attention_heads": 0}),
    ("intermediate_size", {"intermediate_size": -1}),
    ("max_position_embeddings", {"max_position_embeddings": 0}),
    ("type_vocab_size", {"type_vocab_size": 0}),
    ("num_hidden_layers", {"num_hidden_layers": -1}),
    ("hidden_size", {"hidden_size": 33}),
    ("num_attention_heads", {"num_attention_heads": 5}),
    ("hidden_size", {"hidden_size": 33, "num_attention_heads": 3, "position_embedding_type": "sinusoidal"}),
    ("hidden_act", {"hidden_act": "geluu"}),
    ("hidden_act", {"hidden_act": ""}),
    ("hidden_dropout_prob", {"hidden_dropout_prob": -0.1}),
    ("attention_probs_dropout_prob", {"attention_probs_dropout_prob": 1.5}),
    ("classifier_dropout", {"classifier_dropout": NAN}),
    ("layer_norm_eps", {"layer_norm_eps": 0.0}),
    ("layer_norm_eps", {"layer_norm_eps": NAN}),
    ("initializer_range", {"initializer_range": -0.02}),
    ("position_embedding_type", {"position_embedding_type": "relative_key"}),
    ("pad_token_id", {"pad_token_id": 99}),
    ("pad_token_id", {"pad_token_id": -100}),
    ("add_cross_attention", {"add_cross_attention": True}),
    ("is_decoder", {"is_decoder": True, **SEQ2SEQ}),
    ("num_decoder_layers", {"num_decoder_layers": 0, **SEQ2SEQ}),
    ("num_decoder_layers", {"num_decoder_layers": 3, "tie_encoder_decoder": True, **SEQ2SEQ}),
    ("decoder_start_token_id", {"decoder_start_token_id": 99, **SEQ2SEQ}),
    ("decoder_start_token_id", {"decoder_start_token_id": -1, **SEQ2SEQ}),
]


@pytest.mark.parametrize(("name", "fields"), INVALID, ids=str)
def test_invalid_values(name, fields):
    with pytest.raises(ValueError, match=name):
        tiny_config(**fields)


VALID = [
    {"num_hidden_layers": 0},
    {"hidden_dropout_prob": 0, "attention_probs_dropout_prob": 1.0, "classifier_dropout": None},
    {"pad_token_id": None},
    {"pad_token_id": -1},  # which BERT takes as well
    CROSSED,
    {"eos_token_id": [1, 2], "initializer_range": 0.0},
    {"hidden_size": 33, "num_attention_heads": 3},
    {"num_decoder_layers": 0, "decoder_start_token_id": 99},  # which an encoder does not use
]


@pytest.mark.parametrize("fields", VALID, ids=str)
def test_values_at_the_limits(fields):
    ScratchBertModel(tiny_config(**fields))


WRONG_TYPES = [
    *(("vocab_size", "many"), ("hidden_size", None), ("hidden_act", 3), ("hidden_dropout_prob", "0.1")),
    *(("norm_first", "yes"), ("position_embedding_type", 1), ("num_decoder_layers", 2.0)),
    *(("tie_encoder_decoder", None), ("share_embeddings", "no"), ("decoder_start_token_id", "[CLS]")),
]


@pytest.mark.parametrize(("name", "value"), WRONG_TYPES, ids=str)
def test_values_of_the_wrong_type(name, value):
    config = tiny_config()
    with pytest.raises(StrictDataclassFieldValidationError, match=name):
        tiny_config(**{name: value})
    with pytest.raises(StrictDataclassFieldValidationError, match=name):
        setattr(config, name, value)


def test_arguments_of_from_pretrained_are_checked_together(tmp_path):
    tiny_config(**SEQ2SEQ, tie_encoder_decoder=True).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="num_decoder_layers"):
        ScratchBertConfig.from_pretrained(tmp_path, num_decoder_layers=1)
    ScratchBertConfig.from_pretrained(tmp_path, num_decoder_layers=1, tie_encoder_decoder=False)


def test_output_attentions_with_sdpa(tmp_path):
    """The base class refuses it: here such a call runs the formula itself."""
    config = tiny_config(attn_implementation="sdpa")
    config.output_attentions = True
    config.validate()
    config.save_pretrained(tmp_path)
    again = ScratchBertConfig.from_pretrained(tmp_path, attn_implementation="sdpa")
    assert again.output_attentions is copy.deepcopy(config).output_attentions is True
    # Which kernel runs is a matter of the machine, not of the checkpoint.
    assert "attn_implementation" not in (tmp_path / "config.json").read_text()


# ---------------------------------------------------------------------------------------------------------------------
# To disk and back

LABELS = {0: "no", 1: "yes", 2: "perhaps"}
BERT_FIELDS = {
    "hidden_act": "relu",
    "layer_norm_eps": 1e-5,
    "id2label": LABELS,
    "label2id": {label: number for number, label in LABELS.items()},
    "problem_type": "single_label_classification",
    "classifier_dropout": 0.3,
    "pad_token_id": 3,
    "bos_token_id": 1,
    "eos_token_id": [1, 2],
    "is_decoder": True,
    "add_cross_attention": True,
    "use_cache": False,
    "tie_word_embeddings": False,
    "output_hidden_states": True,
    "chunk_size_feed_forward": 2,
    "something_else": "kept",
}
OUR_FIELDS = {
    "norm_first": True,
    "position_embedding_type": "sinusoidal",
    "sparse_prediction": True,
    "num_decoder_layers": 2,
    "tie_encoder_decoder": True,
    "share_embeddings": False,
    "decoder_start_token_id": 5,
}


@pytest.mark.parametrize("fields", [{}, BERT_FIELDS, {**OUR_FIELDS, **SEQ2SEQ}], ids=["none", "BERT's", "ours"])
def test_there_and_back(tmp_path, fields):
    config = tiny_config(**fields)
    assert {name: getattr(config, name) for name in fields} == fields
    config.save_pretrained(tmp_path)
    config.to_json_file(tmp_path / "whole.json", use_diff=False)
    copies = [
        ScratchBertConfig.from_dict(json.loads(config.to_json_string())),
        ScratchBertConfig.from_json_file(tmp_path / "whole.json"),
        ScratchBertConfig.from_pretrained(tmp_path),
        transformers.AutoConfig.from_pretrained(tmp_path),
        copy.deepcopy(config),
        pickle.loads(pickle.dumps(config)),
    ]
    for each in copies:
        assert type(each) is ScratchBertConfig
        assert comparable(each) == comparable(config)


def test_auto_map(tmp_path):
    """The map leads the Auto classes to the code, and is not shared between configurations."""
    config = tiny_config()
    config.save_pretrained(tmp_path)
    config.auto_map["AutoModel"] = "mine.Mine"
    tiny_config().save_pretrained(tmp_path)
    saved = config_json(tmp_path)
    assert (saved["model_type"], saved["auto_map"]) == ("scratchbert", AUTO_MAP)
    for auto_class, path in saved["auto_map"].items():
        module, name = path.split(".")
        assert hasattr(transformers, auto_class)
        assert hasattr(getattr(modeling_scratchbert, module), name)


# ---------------------------------------------------------------------------------------------------------------------
# Encoder and decoder


@pytest.mark.parametrize(
    ("fields", "start", "end"),
    [
        ({}, 101, 102),
        ({"vocab_size": 103}, 101, 102),
        ({"vocab_size": 102}, None, None),
        ({"bos_token_id": 0, "vocab_size": 20}, 0, None),
        ({"decoder_start_token_id": 5, "bos_token_id": 7}, 5, 102),
        ({"decoder_start_token_id": 0, "eos_token_id": 0}, 0, 0),
        ({"eos_token_id": [3, 9]}, 101, [3, 9]),
    ],
    ids=str,
)
def test_start_and_end_tokens_of_a_seq2seq_model(tmp_path, fields, start, end):
    """By default those of Google's vocabularies."""
    config = ScratchBertConfig(**fields, **SEQ2SEQ)
    assert (config.decoder_start_token_id, config.eos_token_id) == (start, end)
    encoder = ScratchBertConfig(**fields)
    assert encoder.decoder_start_token_id == fields.get("decoder_start_token_id")
    assert encoder.eos_token_id == fields.get("eos_token_id")
    # As arguments beside the checkpoint of an encoder, which are set when the configuration is there already
    encoder.save_pretrained(tmp_path)
    later = ScratchBertConfig.from_pretrained(tmp_path, **SEQ2SEQ)
    assert (later.decoder_start_token_id, later.eos_token_id) == (start, end)


@pytest.mark.parametrize("depth", [None, 2, 5])
def test_configurations_of_encoder_and_decoder(depth):
    fields = {"norm_first": True, "attn_implementation": "eager", "tie_encoder_decoder": depth != 5}
    config = tiny_config(**SEQ2SEQ, **fields, num_decoder_layers=depth)
    before = copy.deepcopy(comparable(config))
    none = {"is_encoder_decoder": False, "num_decoder_layers": None, "tie_encoder_decoder": False}
    decoder_fields = {**CROSSED, "num_hidden_layers": depth or 2}
    encoder, decoder = config.encoder_config(), config.decoder_config()
    assert comparable(encoder) == before | none
    assert comparable(decoder) == before | none | decoder_fields
    assert encoder._attn_implementation == decoder._attn_implementation == "eager"
    # What is changed in one of them is changed there alone
    encoder.id2label[0] = "changed"
    assert comparable(config) == before


def test_text_configuration_is_that_of_encoder_or_decoder():
    """By it `generate` makes as many layers of its caches as the decoder has."""
    config = tiny_config(**SEQ2SEQ, num_decoder_layers=5)
    assert config.get_text_config() is config
    assert config.get_text_config(decoder=True, encoder=True) is config
    assert comparable(config.get_text_config(decoder=True)) == comparable(config.decoder_config())
    assert comparable(config.get_text_config(encoder=True)) == comparable(config.encoder_config())
    assert len(transformers.DynamicCache(config=config).layers) == 5
    decoder = tiny_config(is_decoder=True)
    assert decoder.get_text_config(decoder=True) is decoder.get_text_config(encoder=True) is decoder


# ---------------------------------------------------------------------------------------------------------------------
# From a BERT


@pytest.mark.parametrize("fields", [{}, BERT_FIELDS], ids=["plain", "every field"])
def test_folder_of_bert(tmp_path, fields):
    random_bert("Model", **fields).save_pretrained(tmp_path)
    expected = comparable(transformers.BertConfig.from_pretrained(tmp_path)) | SAVED
    for source in (str(tmp_path), tmp_path / "config.json"):
        ours = ScratchBertConfig.from_pretrained(source)
        assert comparable(ours) == expected
    changed = ScratchBertConfig.from_pretrained(tmp_path, hidden_dropout_prob=0.25, num_labels=7)
    assert (changed.hidden_dropout_prob, changed.num_labels) == (0.25, 7)
    unused = ScratchBertConfig.from_pretrained(tmp_path, return_unused_kwargs=True, not_a_field=3)[1]
    assert unused == {"not_a_field": 3}
    ours.save_pretrained(tmp_path / "ours")
    assert config_json(tmp_path / "ours")["model_type"] == "scratchbert"
    assert comparable(ScratchBertConfig.from_pretrained(tmp_path / "ours")) == expected


@pytest.mark.parametrize("fields", [{}, BERT_FIELDS], ids=["plain", "every field"])
def test_from_bert(tmp_path, fields):
    random_bert("Model", **fields).save_pretrained(tmp_path)
    options = {"attn_implementation": "eager", "output_attentions": True}
    bert = transformers.BertModel.from_pretrained(tmp_path, **options).config
    before = bert.to_dict()
    ours = ScratchBertConfig.from_bert(bert)
    assert comparable(ScratchBertConfig.from_bert(ours)) == comparable(ours)
    assert comparable(ours) == comparable(bert) | SAVED
    assert bert.to_dict() == before
    assert (ours._attn_implementation, ours.output_attentions) == ("eager", True)
    assert (ours.dtype, ours.name_or_path) == (bert.dtype, str(tmp_path))


def test_code_of_a_bert_is_not_taken_over(tmp_path):
    write_bert(tmp_path, fields={"auto_map": {"AutoModel": "theirs.Theirs"}})  # as some on the Hub have
    ScratchBertConfig.from_pretrained(tmp_path).save_pretrained(tmp_path / "ours")
    assert config_json(tmp_path / "ours")["auto_map"] == AUTO_MAP


@pytest.mark.parametrize(
    ("config", "name"),
    [
        (transformers.RobertaConfig(), "RobertaConfig"),
        (transformers.BertGenerationConfig(), "BertGenerationConfig"),
        (transformers.BertConfig(position_embedding_type="relative_key"), "position_embedding_type"),
        (transformers.BertConfig(position_embedding_type="relative_key_query"), "position_embedding_type"),
    ],
    ids=["RoBERTa", "BertGeneration", "relative_key", "relative_key_query"],
)
def test_from_bert_of_other_models_is_refused(config, name):
    with pytest.raises(ValueError, match=name):
        ScratchBertConfig.from_bert(config)


def test_dictionary_of_a_bert_configuration(tmp_path):
    """It brings BERT's `model_type` along."""
    fields = transformers.BertConfig(**TINY).to_dict()
    for config in (ScratchBertConfig(**fields), ScratchBertConfig.from_dict(fields)):
        config.save_pretrained(tmp_path)
        assert config_json(tmp_path)["model_type"] == config.model_type == "scratchbert"
