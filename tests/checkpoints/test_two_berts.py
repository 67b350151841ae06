"""The checkpoint of an `EncoderDecoderModel` of two BERTs opens as one of our seq2seq models."""

import pytest
import torch
import transformers

from modeling_scratchbert import ScratchBertConfig, ScratchBertForConditionalGeneration
from support.checkpoint_kinds import (
    FORMS,
    assert_loads,
    assert_same_outputs,
    change_config,
    config_json,
    two_bert_tensors,
    write_two_berts,
    write_weights,
)
from support.models import OURS, TINY, random_encoder_decoder
from support.refusals import assert_mentions, refusal

pytestmark = pytest.mark.usefixtures("offline")

SPECIAL_IDS = {"decoder_start_token_id": 7, "bos_token_id": 6, "eos_token_id": 8, "pad_token_id": 9}
NO_SPECIAL_IDS = {"decoder_start_token_id": None, "bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}


def change_part(folder, part, **fields):
    """Write fields of the encoder, of the decoder, or with None of the model; a change to None removes one."""
    if part is None:
        change_config(folder, **fields)
        return
    changed = {**config_json(folder)[part], **fields}
    change_config(folder, **{part: {name: value for name, value in changed.items() if value is not None}})


@pytest.mark.parametrize(("form", "layers"), [*((form, 2) for form in FORMS), ("today's", 1), ("today's", 3)])
def test_forms(tmp_path, form, layers):
    reference = random_encoder_decoder(decoder={"num_hidden_layers": layers})
    dtype = FORMS[form].get("dtype", torch.float32)
    write_two_berts(tmp_path, reference, **FORMS[form])
    model = assert_loads(tmp_path, reference.to(dtype), "ForConditionalGeneration")
    assert model.dtype == dtype
    assert model.lm_head.decoder.weight is model.get_decoder().get_input_embeddings().weight
    assert model.get_encoder().get_input_embeddings() is not model.get_decoder().get_input_embeddings()


@pytest.mark.parametrize("head", ["Model", "Seq2SeqModel", "ForConditionalGeneration"])
def test_classes(tmp_path, head):
    """A model that was opened is saved as one of ours."""
    reference = random_encoder_decoder()
    reference.save_pretrained(tmp_path / "theirs")
    model, info = OURS[head].from_pretrained(tmp_path / "theirs", output_loading_info=True)
    assert type(model) is OURS["Seq2SeqModel" if head == "Model" else head]
    assert not info["missing_keys"]
    assert_same_outputs(model, reference, only="encoder_hidden_states", tolerance=1e-5)
    model.save_pretrained(tmp_path / "ours")
    assert_same_outputs(type(model).from_pretrained(tmp_path / "ours"), model)
    config = config_json(tmp_path / "ours")
    assert config["model_type"] == "scratchbert"
    assert not {"encoder", "decoder"} & set(config)


@pytest.mark.parametrize("kept", ["encoder", "decoder", "both"])
def test_two_berts_that_transformers_4_tied(tmp_path, kept):
    """Its `tie_encoder_decoder` made their tensors one, but for the cross-attention and the pooler. It stored each
    once, as of the encoder or of the decoder."""
    reference = random_encoder_decoder()
    reference.decoder.bert.load_state_dict(reference.encoder.state_dict(), strict=False)
    tensors = two_bert_tensors(reference)
    other = {"encoder": "decoder.bert.", "decoder": "encoder.", "both": "nothing"}[kept]
    dropped = {n for n in tensors if n.startswith(other) and "crossattention" not in n and "pooler" not in n}
    assert len(dropped) == (0 if kept == "both" else 2 * 16 + 5)
    write_two_berts(tmp_path, reference)
    write_weights(tmp_path, {name: tensor for name, tensor in tensors.items() if name not in dropped})
    change_config(tmp_path, tie_encoder_decoder=True)
    model = assert_loads(tmp_path, reference, "ForConditionalGeneration")
    decoder = dict(model.get_decoder().named_parameters())
    assert all(weight is decoder[name] for name, weight in model.get_encoder().named_parameters())


@pytest.mark.parametrize("file", ["generation_config.json", "config.json"])
def test_the_settings_of_generation(tmp_path, file):
    """transformers 4 left them in config.json."""
    wanted = {"num_beams": 3, "max_length": 9, "no_repeat_ngram_size": 2}
    reference = random_encoder_decoder()
    reference.generation_config.update(**wanted)
    reference.save_pretrained(tmp_path)
    if file == "config.json":
        (tmp_path / "generation_config.json").unlink()
        change_config(tmp_path, **wanted)
    model = ScratchBertForConditionalGeneration.from_pretrained(tmp_path)
    model.save_pretrained(tmp_path / "ours")
    again = ScratchBertForConditionalGeneration.from_pretrained(tmp_path / "ours")
    ids = torch.tensor([[5, 6, 7, 8]])
    for each in (model, again):
        config = each.generation_config
        assert {name: getattr(config, name) for name in wanted} == wanted
        assert (config.decoder_start_token_id, config.eos_token_id, config.pad_token_id) == (2, 3, 0)
        assert torch.equal(each.generate(ids), reference.generate(ids))


@pytest.mark.parametrize(
    ("part", "fields", "expected"),
    [
        (None, SPECIAL_IDS, SPECIAL_IDS),
        ("decoder", SPECIAL_IDS, SPECIAL_IDS),
        (None, {}, NO_SPECIAL_IDS),
        (None, {"return_dict": False}, {"return_dict": False}),
        ("encoder", {"return_dict": False}, {"return_dict": True}),
        ("decoder", {"return_dict": False}, {"return_dict": True}),
        (None, {"output_hidden_states": True}, {"output_hidden_states": True}),
        ("encoder", {"output_hidden_states": True}, {"output_hidden_states": False}),
        ("decoder", {"output_attentions": True}, {"output_attentions": False}),
        ("encoder", {"use_cache": False}, {"use_cache": True}),
        ("decoder", {"use_cache": False}, {"use_cache": False}),
        ("decoder", {"tie_word_embeddings": False}, {"tie_word_embeddings": False}),
    ],
    ids=str,
)
def test_fields_of_the_configuration(tmp_path, part, fields, expected):
    write_two_berts(tmp_path)
    for place in (None, "encoder", "decoder"):
        change_part(tmp_path, place, **dict.fromkeys(SPECIAL_IDS))
    change_part(tmp_path, part, **fields)
    config = ScratchBertConfig.from_pretrained(tmp_path)
    assert {name: getattr(config, name) for name in expected} == expected


DIFFERENT = {
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
ROBERTA = transformers.RobertaConfig(**TINY, is_decoder=True, add_cross_attention=True).to_dict()


@pytest.mark.parametrize(
    ("part", "fields", "mentioned"),
    [
        *(("decoder", {name: value}, name) for name, value in DIFFERENT.items()),
        ("decoder", {"add_cross_attention": False}, "add_cross_attention"),
        ("decoder", {"position_embedding_type": "relative_key"}, "relative_key"),
        ("encoder", {"position_embedding_type": "relative_key"}, "relative_key"),
        ("decoder", ROBERTA, "roberta"),
        ("encoder", ROBERTA, "roberta"),
        (None, {"encoder": None}, "encoder"),
    ],
    ids=lambda value: "" if isinstance(value, dict) else str(value),
)
def test_configurations_that_are_refused(tmp_path, part, fields, mentioned):
    write_two_berts(tmp_path)
    change_part(tmp_path, part, **fields)
    for opens in (ScratchBertForConditionalGeneration.from_pretrained, ScratchBertConfig.from_pretrained):
        assert_mentions(refusal(opens, tmp_path), tmp_path, mentioned)


@pytest.mark.parametrize("prefix", ["encoder.", "decoder.bert."])
def test_tensors_of_relative_positions_are_refused(tmp_path, prefix):
    write_two_berts(tmp_path)
    relative = f"{prefix}encoder.layer.0.attention.self.distance_embedding.weight"
    write_weights(tmp_path, {**two_bert_tensors(random_encoder_decoder()), relative: torch.zeros(39, 8)})
    assert_mentions(refusal(ScratchBertForConditionalGeneration.from_pretrained, tmp_path), tmp_path, relative)


def test_classes_of_one_bert_are_refused(tmp_path):
    write_two_berts(tmp_path)
    assert_mentions(refusal(OURS["ForMaskedLM"].from_pretrained, tmp_path), tmp_path, "is_encoder_decoder")
