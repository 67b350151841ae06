"""The configuration: BERT's fields and defaults, what it refuses and how it says so, and its way to disk and back."""

import copy
import dataclasses
import json
import pickle
import re

import pytest
import transformers
from huggingface_hub.errors import StrictDataclassFieldValidationError
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.activations import ACT2FN

import modeling_scratchbert
from modeling_scratchbert import ScratchBertConfig, ScratchBertModel
from modeling_scratchbert.configuration_scratchbert import AUTO_MAP
from support.checkpoint_kinds import config_json, write_bert
from support.models import TINY, random_bert
from support.refusals import assert_mentions, refusal

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


def fields_of(config_class):
    """Types by name: where they are inherited, they are text."""
    return {
        field.name: (getattr(field.type, "__name__", str(field.type)), field.default)
        for field in dataclasses.fields(config_class)
    }


def test_fields_and_defaults_are_bert_s_and_a_few_of_our_own():
    theirs, ours = fields_of(transformers.BertConfig), fields_of(ScratchBertConfig)
    assert {name: ours[name] for name in theirs} == theirs
    assert [name for name in ours if name in theirs] == list(theirs)  # arguments by position mean the same
    assert {name: ours[name][1] for name in set(ours) - set(theirs)} == OUR_OWN


def test_values_are_bert_s_too():
    """With what the base class makes of the fields."""
    theirs, ours = transformers.BertConfig().to_dict(), ScratchBertConfig().to_dict()
    assert ours.pop("model_type") == "scratchbert"
    assert theirs.pop("model_type") == "bert"
    assert ours == theirs | SAVED
    for name in ("attribute_map", "keys_to_ignore_at_inference", "is_composition", "has_no_defaults_at_init"):
        assert getattr(ScratchBertConfig, name, None) == getattr(transformers.BertConfig, name, None)


def test_two_alike_are_equal_and_two_unlike_are_not():
    assert ScratchBertConfig(**TINY) == ScratchBertConfig(**TINY)
    assert ScratchBertConfig(**TINY) != ScratchBertConfig(**TINY, norm_first=True)


# --- what it refuses

# Field, what it is given, and what the message must say it wants.
UNFIT = [
    *(
        (name, value, "at least 1")
        for name in (
            "vocab_size",
            "hidden_size",
            "num_attention_heads",
            "intermediate_size",
            "max_position_embeddings",
            "type_vocab_size",
        )
        for value in (0, -1)
    ),
    ("num_hidden_layers", -1, "at least 0"),
    ("hidden_size", 33, "num_attention_heads"),
    ("num_attention_heads", 5, "multiple"),
    ("hidden_act", "geluu", "'gelu'"),
    ("hidden_act", "", "Known"),
    *(
        (name, value, "from 0 to 1")
        for name in ("hidden_dropout_prob", "attention_probs_dropout_prob", "classifier_dropout")
        for value in (-0.1, 1.5, float("nan"), float("inf"), 10)
    ),
    ("layer_norm_eps", 0.0, "above 0"),
    ("layer_norm_eps", -1e-12, "above 0"),
    ("layer_norm_eps", float("nan"), "above 0"),
    ("initializer_range", -0.02, "at least 0"),
    ("position_embedding_type", "relative_key", "'absolute' or 'sinusoidal'"),
    ("position_embedding_type", "relative_key_query", "'absolute' or 'sinusoidal'"),
    ("position_embedding_type", "absolut", "'absolute' or 'sinusoidal'"),
    ("pad_token_id", 99, "0 to 98"),
    ("pad_token_id", -100, "0 to 98"),
    ("add_cross_attention", True, "is_decoder"),
]

TWO_HALVES = {"is_encoder_decoder": True}
UNFIT_OF_TWO_HALVES = [
    ("is_decoder", True, "is_encoder_decoder is True"),
    ("num_decoder_layers", 0, "at least 1"),
    ("num_decoder_layers", -2, "at least 1"),
    ("decoder_start_token_id", 99, "0 to 98"),
    ("decoder_start_token_id", -1, "0 to 98"),
    ("num_hidden_layers", -1, "at least 0"),
    ("pad_token_id", 99, "0 to 98"),
]


@pytest.mark.parametrize(
    ("halves", "field", "value", "wants"),
    [*(({}, *case) for case in UNFIT), *((TWO_HALVES, *case) for case in UNFIT_OF_TWO_HALVES)],
    ids=lambda part: str(part).replace(" ", "_"),
)
def test_an_unfit_value_is_named_with_what_is_wanted(halves, field, value, wants):
    assert_mentions(refusal(ScratchBertConfig, **{**TINY, **halves, field: value}), field, value, wants)
    if field in ("num_decoder_layers", "decoder_start_token_id"):  # which mean nothing to one half
        ScratchBertConfig(**{**TINY, field: value})


@pytest.mark.parametrize("depth", [1, 3])
def test_halves_that_are_the_same_tensors_are_as_deep(depth):
    fields = {**TINY, **TWO_HALVES, "tie_encoder_decoder": True}
    ScratchBertConfig(**fields, num_decoder_layers=2)
    ScratchBertConfig(**fields)
    message = refusal(ScratchBertConfig, **fields, num_decoder_layers=depth)
    assert_mentions(message, f"num_decoder_layers is {depth}", "num_hidden_layers (2)", "tie_encoder_decoder is True")


def test_the_width_of_sinusoidal_positions_is_even():
    fields = {"hidden_size": 33, "num_attention_heads": 3}
    ScratchBertConfig(**{**TINY, **fields})
    message = refusal(ScratchBertConfig, **{**TINY, **fields}, position_embedding_type="sinusoidal")
    assert_mentions(message, "hidden_size is 33", "even")


WRONG_TYPES = [
    ("vocab_size", "many"),
    ("hidden_size", 32.0),
    ("hidden_size", None),
    ("num_attention_heads", [4]),
    ("hidden_act", None),
    ("hidden_act", 3),
    ("hidden_dropout_prob", "0.1"),
    ("hidden_dropout_prob", None),
    ("layer_norm_eps", "tiny"),
    ("norm_first", "yes"),
    ("norm_first", None),
    ("position_embedding_type", 1),
    ("pad_token_id", "[PAD]"),
    ("use_cache", "no"),
    ("tie_word_embeddings", "no"),
    ("is_encoder_decoder", "no"),
    ("num_decoder_layers", 2.0),
    ("tie_encoder_decoder", None),
    ("share_embeddings", "no"),
    ("decoder_start_token_id", "[CLS]"),
]


@pytest.mark.parametrize(("field", "value"), WRONG_TYPES, ids=str)
def test_a_value_of_the_wrong_type_is_named_also_if_it_is_set_later(field, value):
    error = StrictDataclassFieldValidationError
    assert_mentions(refusal(ScratchBertConfig, **{**TINY, field: value}, error=error), field, repr(value))
    assert_mentions(refusal(setattr, ScratchBertConfig(**TINY), field, value, error=error), field)


TYPOS = {
    "geluu": "gelu",
    "Gelu": "gelu",
    "gelu-new": "gelu_new",
    "gleu": "gelu",
    "rellu": "relu",
    "sillu": "silu",
    "gelu_fats": "gelu_fast",
    "tahn": "tanh",
}


@pytest.mark.parametrize("typo", TYPOS)
def test_a_typo_in_the_activation_gets_a_suggestion(typo):
    assert_mentions(refusal(ScratchBertConfig, hidden_act=typo), repr(typo), repr(TYPOS[typo]), *ACT2FN)


def test_an_activation_like_no_other_still_gets_a_known_one():
    assert re.search(r"perhaps '(\w+)'", refusal(ScratchBertConfig, hidden_act="%%%"))[1] in ACT2FN


@pytest.mark.parametrize(
    "fields",
    [
        {"num_hidden_layers": 0},
        {"hidden_dropout_prob": 0, "attention_probs_dropout_prob": 0, "classifier_dropout": 0},
        {"hidden_dropout_prob": 0.999},
        {"pad_token_id": None},
        {"pad_token_id": 98},
        {"pad_token_id": -1},  # which BERT takes as well
        {"hidden_dropout_prob": 1.0},
        {"is_decoder": True, "add_cross_attention": True},
        {"eos_token_id": [1, 2]},
        {"classifier_dropout": None},
        {"initializer_range": 0.0},
        {"norm_first": True, "position_embedding_type": "sinusoidal"},
        {"type_vocab_size": 1, "num_attention_heads": 32},
    ],
    ids=str,
)
def test_what_is_at_the_edge_is_allowed_and_makes_a_model(fields):
    ScratchBertModel(ScratchBertConfig(**{**TINY, **fields}))


@pytest.mark.parametrize("attention", ["sdpa", "eager", None])
def test_attention_maps_may_be_asked_for_beside_any_kernel(tmp_path, attention):
    """The base class refuses "sdpa": here such a call runs the formula itself."""
    config = ScratchBertConfig(**TINY, attn_implementation=attention, output_attentions=True)
    assert config.output_attentions is True
    config.output_attentions = False
    assert config.output_attentions is False
    config.output_attentions = True
    config.validate()
    for again in (copy.deepcopy(config), ScratchBertConfig.from_dict(config.to_dict())):
        assert again.output_attentions is True
    config.save_pretrained(tmp_path)
    assert ScratchBertConfig.from_pretrained(tmp_path, attn_implementation=attention).output_attentions is True
    # Which kernel runs is a matter of the machine, not of the checkpoint.
    assert "attn_implementation" not in (tmp_path / "config.json").read_text()


# --- to disk and back

VALID = st.fixed_dictionaries(
    {},
    optional={
        "vocab_size": st.integers(10, 10**6),
        "num_hidden_layers": st.integers(0, 48),
        "intermediate_size": st.integers(1, 10**5),
        "hidden_act": st.sampled_from(sorted(ACT2FN)),
        "hidden_dropout_prob": st.floats(0, 1, exclude_max=True),
        "attention_probs_dropout_prob": st.sampled_from([0, 0.1, 0.5]),
        "classifier_dropout": st.none() | st.floats(0, 0.9),
        "max_position_embeddings": st.integers(1, 10**5),
        "type_vocab_size": st.integers(1, 10),
        "initializer_range": st.floats(0, 1),
        "layer_norm_eps": st.floats(1e-15, 1),
        "pad_token_id": st.none() | st.integers(0, 9),
        "use_cache": st.booleans(),
        "is_decoder": st.just(True),
        "eos_token_id": st.none() | st.integers(0, 9) | st.lists(st.integers(0, 9), min_size=1, max_size=3),
        "tie_word_embeddings": st.booleans(),
        "norm_first": st.booleans(),
        "position_embedding_type": st.sampled_from(["absolute", "sinusoidal"]),
        "output_attentions": st.booleans(),
        "output_hidden_states": st.booleans(),
        "return_dict": st.booleans(),
        "chunk_size_feed_forward": st.integers(0, 8),
        "dtype": st.sampled_from(["float32", "bfloat16"]),
        "problem_type": st.sampled_from([None, "regression"]),
        "id2label": st.just({0: "a", 1: "b", 2: "c"}),
        "something_else": st.text(max_size=5),
    },
)
HALVES = st.fixed_dictionaries(
    {"is_encoder_decoder": st.just(True), "num_hidden_layers": st.just(2)},
    optional={
        "num_decoder_layers": st.sampled_from([None, 2]),
        "tie_encoder_decoder": st.booleans(),
        "share_embeddings": st.booleans(),
        "decoder_start_token_id": st.integers(0, 9),
        "bos_token_id": st.none() | st.integers(0, 9),
    },
)
VALID |= st.builds(lambda fields, halves: {**fields, **halves, "is_decoder": False}, VALID, HALVES)


@settings(max_examples=50)
@given(VALID)
def test_there_and_back(tmp_path_factory, fields):
    config = ScratchBertConfig(**fields)
    for name, value in fields.items():
        assert getattr(config, name) == value or name == "dtype" or (value is None and config.is_encoder_decoder)
    folder = tmp_path_factory.mktemp("config")
    config.save_pretrained(folder)
    config.to_json_file(folder / "whole.json", use_diff=False)
    copies = {
        "dict": ScratchBertConfig.from_dict(config.to_dict()),
        "diff": ScratchBertConfig.from_dict(config.to_diff_dict()),
        "text": ScratchBertConfig.from_dict(json.loads(config.to_json_string())),
        "file": ScratchBertConfig.from_json_file(folder / "config.json"),
        "whole file": ScratchBertConfig.from_json_file(folder / "whole.json"),
        "folder": ScratchBertConfig.from_pretrained(folder),
        "AutoConfig": transformers.AutoConfig.from_pretrained(folder),
        "deepcopy": copy.deepcopy(config),
        "pickle": pickle.loads(pickle.dumps(config)),
    }
    wanted = comparable(config)
    for way, again in copies.items():
        assert type(again) is ScratchBertConfig
        assert comparable(again) == wanted, way


# --- two halves


@pytest.mark.parametrize(
    ("fields", "start", "end"),
    [
        ({}, 101, 102),
        ({"vocab_size": 103}, 101, 102),
        ({"vocab_size": 102}, None, None),
        ({"bos_token_id": 7}, 7, 102),
        ({"bos_token_id": 0, "vocab_size": 20}, 0, None),
        ({"decoder_start_token_id": 5, "bos_token_id": 7}, 5, 102),
        ({"decoder_start_token_id": 0}, 0, 102),
        ({"eos_token_id": 9}, 101, 9),
        ({"eos_token_id": 0}, 101, 0),
        ({"eos_token_id": [3, 9]}, 101, [3, 9]),
    ],
    ids=str,
)
def test_two_halves_start_and_end_with_google_s_ids_unless_told_otherwise(tmp_path, fields, start, end):
    config = ScratchBertConfig(**fields, **TWO_HALVES)
    assert (config.decoder_start_token_id, config.eos_token_id) == (start, end)
    assert config.pad_token_id == 0
    one_half = ScratchBertConfig(**fields)
    assert one_half.decoder_start_token_id == fields.get("decoder_start_token_id")
    assert one_half.eos_token_id == fields.get("eos_token_id")
    # As arguments beside a checkpoint of one half, which are set when the configuration is there already
    one_half.save_pretrained(tmp_path)
    later = ScratchBertConfig.from_pretrained(tmp_path, **TWO_HALVES)
    assert (later.decoder_start_token_id, later.eos_token_id) == (start, end)


def test_an_argument_beside_a_checkpoint_is_checked_with_its_other_half(tmp_path):
    ScratchBertConfig(**TINY, **TWO_HALVES, tie_encoder_decoder=True).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="num_decoder_layers is 1"):
        ScratchBertConfig.from_pretrained(tmp_path, num_decoder_layers=1)
    ScratchBertConfig.from_pretrained(tmp_path, num_decoder_layers=1, tie_encoder_decoder=False)


@pytest.mark.parametrize("depth", [None, 1, 2, 5])
def test_a_half_is_a_configuration_of_its_own(depth):
    fields = {"norm_first": True, "layer_norm_eps": 1e-5, "bos_token_id": 4, "attn_implementation": "eager"}
    config = ScratchBertConfig(
        **TINY, **TWO_HALVES, **fields, num_decoder_layers=depth, tie_encoder_decoder=depth in (None, 2)
    )
    before = copy.deepcopy(comparable(config))
    encoder, decoder = config.encoder_config(), config.decoder_config()
    assert encoder.num_hidden_layers == 2
    assert decoder.num_hidden_layers == (depth or 2)
    assert (encoder.is_decoder, encoder.add_cross_attention) == (False, False)
    assert (decoder.is_decoder, decoder.add_cross_attention) == (True, True)
    of_the_half = {"is_encoder_decoder", "num_decoder_layers", "tie_encoder_decoder", "is_decoder"}
    of_the_half |= {"add_cross_attention", "num_hidden_layers"}
    for half in (encoder, decoder):
        half.check()
        assert (half.is_encoder_decoder, half.num_decoder_layers, half.tie_encoder_decoder) == (False, None, False)
        assert {k: v for k, v in comparable(half).items() if k not in of_the_half} == {
            k: v for k, v in before.items() if k not in of_the_half
        }
        assert half._attn_implementation == "eager"
        assert comparable(ScratchBertConfig.from_dict(half.to_dict())) == comparable(half)
    assert comparable(config) == before
    # What is changed in a half, however deep in it, is changed there alone
    encoder.hidden_act = "relu"
    encoder.id2label[0] = "changed"
    assert comparable(config) == before


def test_the_text_configuration_is_that_of_the_half_that_is_asked_for():
    """By it `generate` makes as many layers of its caches as the decoder has."""
    config = ScratchBertConfig(**TINY, **TWO_HALVES, num_decoder_layers=5)
    assert config.get_text_config() is config
    assert config.get_text_config(decoder=True, encoder=True) is config
    decoder, encoder = config.get_text_config(decoder=True), config.get_text_config(encoder=True)
    assert (decoder.num_hidden_layers, decoder.is_decoder) == (5, True)
    assert (encoder.num_hidden_layers, encoder.is_decoder) == (2, False)
    assert len(transformers.DynamicCache(config=config).layers) == 5
    one_half = ScratchBertConfig(**TINY, is_decoder=True)
    for asked in ({}, {"decoder": True}, {"encoder": True}):
        assert one_half.get_text_config(**asked) is one_half


def comparable(config):
    ignored = {"transformers_version", "_name_or_path", "auto_map"}
    return {name: value for name, value in config.to_dict().items() if name not in ignored}


def test_config_json_leads_the_auto_classes_to_the_code(tmp_path):
    ScratchBertConfig(**TINY).save_pretrained(tmp_path)
    assert config_json(tmp_path)["auto_map"] == AUTO_MAP
    assert config_json(tmp_path)["model_type"] == "scratchbert"
    assert type(transformers.AutoConfig.from_pretrained(tmp_path)) is ScratchBertConfig
    for auto, path in AUTO_MAP.items():
        module, name = path.split(".")
        assert hasattr(transformers, auto)
        assert hasattr(getattr(modeling_scratchbert, module), name)


def test_saving_does_not_share_the_map_between_configurations(tmp_path):
    one, other = ScratchBertConfig(**TINY), ScratchBertConfig(**TINY)
    one.save_pretrained(tmp_path)
    one.auto_map["AutoModel"] = "mine.Mine"
    other.save_pretrained(tmp_path)
    assert AUTO_MAP["AutoModel"] == "modeling_scratchbert.ScratchBertModel"
    assert config_json(tmp_path)["auto_map"] == AUTO_MAP


# --- from a BERT

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


def assert_computes_what(bert: transformers.BertConfig, ours: ScratchBertConfig):
    assert type(ours) is ScratchBertConfig
    assert ours.model_type == "scratchbert"
    ignored = {"model_type", "architectures", "transformers_version", "_name_or_path", "dtype", "auto_map"}
    theirs, ours = ({k: v for k, v in c.to_dict().items() if k not in ignored} for c in (bert, ours))
    assert ours == theirs | SAVED


@pytest.mark.parametrize("fields", [{}, BERT_FIELDS], ids=["plain", "every field"])
def test_from_a_folder_of_bert(tmp_path, fields):
    bert = random_bert("Model", **fields)
    bert.save_pretrained(tmp_path)
    for source in (tmp_path, str(tmp_path), tmp_path / "config.json"):
        ours = ScratchBertConfig.from_pretrained(source)
        assert_computes_what(transformers.BertConfig.from_pretrained(tmp_path), ours)
        assert getattr(ours, "auto_map", None) is None
    changed = ScratchBertConfig.from_pretrained(tmp_path, hidden_dropout_prob=0.25, num_labels=7)
    assert (changed.hidden_dropout_prob, changed.num_labels) == (0.25, 7)
    unused = ScratchBertConfig.from_pretrained(tmp_path, return_unused_kwargs=True, not_a_field=3)[1]
    assert unused == {"not_a_field": 3}
    ours.save_pretrained(tmp_path / "ours")
    assert config_json(tmp_path / "ours")["model_type"] == "scratchbert"
    again = ScratchBertConfig.from_pretrained(tmp_path / "ours")
    assert_computes_what(transformers.BertConfig.from_pretrained(tmp_path), again)


@pytest.mark.parametrize("fields", [{}, BERT_FIELDS], ids=["plain", "every field"])
def test_from_bert(tmp_path, fields):
    bert = transformers.BertConfig(**TINY, **fields)
    before = bert.to_dict()
    assert_computes_what(bert, ScratchBertConfig.from_bert(bert))
    assert bert.to_dict() == before
    # As it stands on a model that was loaded
    random_bert("Model").save_pretrained(tmp_path)
    loaded = transformers.BertModel.from_pretrained(
        tmp_path, attn_implementation="eager", output_attentions=True
    ).config
    ours = ScratchBertConfig.from_bert(loaded)
    assert_computes_what(loaded, ours)
    assert ours._attn_implementation == "eager"
    assert ours.output_attentions is True
    assert ours.dtype == loaded.dtype
    assert ours.name_or_path == str(tmp_path)


def test_from_bert_of_our_own_is_a_copy():
    config = ScratchBertConfig(**TINY, norm_first=True)
    again = ScratchBertConfig.from_bert(config)
    assert comparable(again) == comparable(config)
    assert again is not config


def test_from_bert_does_not_take_over_another_s_code(tmp_path):
    write_bert(tmp_path, fields={"auto_map": {"AutoModel": "theirs.Theirs"}})  # as some on the Hub have
    config = ScratchBertConfig.from_pretrained(tmp_path)
    assert getattr(config, "auto_map", None) is None
    config.save_pretrained(tmp_path / "ours")
    assert config_json(tmp_path / "ours")["auto_map"] == AUTO_MAP


@pytest.mark.parametrize("kind", ["Roberta", "Albert", "DistilBert", "Electra", "BertGeneration"])
def test_from_bert_of_another_model_is_refused(kind):
    config = getattr(transformers, f"{kind}Config")()
    parts = (type(config).__name__, repr(config.model_type), "'bert'", "'scratchbert'")
    assert_mentions(refusal(ScratchBertConfig.from_bert, config), *parts)


@pytest.mark.parametrize("positions", ["relative_key", "relative_key_query"])
def test_from_bert_with_relative_positions_is_refused(positions):
    message = refusal(ScratchBertConfig.from_bert, transformers.BertConfig(position_embedding_type=positions))
    assert_mentions(message, f"position_embedding_type='{positions}'", "absolute")


def test_a_bert_config_s_own_dictionary_makes_a_model_that_opens_again(tmp_path):
    """`ScratchBertConfig(**bert_config.to_dict())`, which brings BERT's `model_type` along."""
    for config in (
        ScratchBertConfig(**transformers.BertConfig(**TINY).to_dict()),
        ScratchBertConfig.from_dict(transformers.BertConfig(**TINY).to_dict()),
    ):
        ScratchBertModel(config).save_pretrained(tmp_path)
        assert config_json(tmp_path)["model_type"] == "scratchbert"
        again = ScratchBertModel.from_pretrained(tmp_path, config=config)
        assert again.config.model_type == "scratchbert"
