"""`from_bert`: an encoder and a decoder that start from one BERT, tensor for tensor."""

import re

import pytest
import torch
import transformers
from torch.testing import assert_close

from modeling_scratchbert import ScratchBertForConditionalGeneration
from support.checkpoint_kinds import (
    DECODER_BIAS,
    DECODER_WEIGHT,
    FORMS,
    OUTPUT_BIAS,
    assert_same_outputs,
    logged_warnings,
    write_bert,
    write_two_berts,
    write_weights,
)
from support.models import CROSSED, OURS, SPECIAL, TINY, random_bert, random_scratchbert
from support.refusals import assert_mentions, refusal

pytestmark = pytest.mark.usefixtures("offline")

IDS = torch.tensor([[5, 6, 7, 8, 9], [10, 11, 12, 0, 0]])
MASK = (IDS != 0).long()


def start(source, **kwargs):
    """The model, what it reports of the loading, and what it warns of."""
    with logged_warnings() as warnings:
        model, info = ScratchBertForConditionalGeneration.from_bert(source, output_loading_info=True, **kwargs)
    return model, info, "\n".join(warnings)


def tensors_of(source, head) -> dict[str, torch.Tensor]:
    """Those of the checkpoint `source`, under the names that a model with a head of ours has."""
    tensors = OURS[head].from_pretrained(source).state_dict()
    return {f"model.{name}": tensor for name, tensor in tensors.items()} if head == "Model" else tensors


def assert_started(model, info, source: dict[str, torch.Tensor]) -> set[str]:
    """Every tensor that the source has starts the encoder's and the decoder's, bit for bit, but an encoder has no
    cross-attention. The others, unless they are tied to one of these, are missing. Returns them."""
    tensors, started = model.state_dict(keep_vars=True), set()
    for name, tensor in tensors.items():
        origin = re.sub(r"^model\.(encoder|decoder)\.", "model.", name)
        if origin in source:
            assert torch.equal(tensor, source[origin]), name
            started.add(id(tensor))
    missing = {name for name, tensor in tensors.items() if id(tensor) not in started}
    assert info["missing_keys"] == missing
    assert not info["unexpected_keys"]
    # Equal is not the same: what is not tied has memory of its own, or training would change both.
    pointers = {id(tensor): tensor.data_ptr() for tensor in tensors.values()}
    assert len(set(pointers.values())) == len(pointers)
    return missing


# --- the weights

SOURCES = [
    (random_bert, "Model", {}),
    (random_bert, "Model", CROSSED),
    (random_bert, "ForMaskedLM", {}),
    (random_bert, "ForMaskedLM", {"tie_word_embeddings": False}),
    (random_bert, "ForMaskedLM", {"hidden_act": "prelu"}),  # an activation with a weight
    (random_bert, "ForPreTraining", {}),
    (random_bert, "ForSequenceClassification", {}),
    (random_bert, "ForCausalLM", {}),
    (random_bert, "ForCausalLM", CROSSED),
    (random_scratchbert, "Model", {}),
    (random_scratchbert, "ForCausalLM", CROSSED),
    (random_scratchbert, "ForMaskedLM", {"norm_first": True, "position_embedding_type": "sinusoidal"}),
]
TIES = [{}, {"share_embeddings": False}, {"tie_encoder_decoder": True}, {"tie_word_embeddings": False}]


@pytest.mark.parametrize("ties", TIES, ids=str)
@pytest.mark.parametrize(("make", "head", "fields"), SOURCES)
def test_every_tensor_of_the_source_starts_encoder_and_decoder(tmp_path, make, head, fields, ties):
    source = make(head, **fields)
    source.save_pretrained(tmp_path / "source", max_shard_size="20KB")
    model, info, warnings = start(tmp_path / "source", **SPECIAL, **ties)
    missing = assert_started(model, info, tensors_of(tmp_path / "source", head))
    kinds = {"cross_attention" if "cross_attention" in name else name.partition(".")[0] for name in missing}
    has_head = "LM" in head or head == "ForPreTraining"
    assert kinds == {*(() if fields == CROSSED else ["cross_attention"]), *(() if has_head else ["lm_head"])}
    assert ("MISSING" in warnings) == bool(missing)
    assert not model.training
    # What is tied, in the model and in its configuration
    encoder, decoder = model.get_encoder(), model.get_decoder()
    query = "encoder.blocks.1.attention.query.weight"
    tied = {
        "tie_encoder_decoder": encoder.get_parameter(query) is decoder.get_parameter(query),
        "share_embeddings": encoder.embeddings.norm.bias is decoder.embeddings.norm.bias,
        "tie_word_embeddings": model.lm_head.decoder.weight is decoder.get_input_embeddings().weight,
    }
    default = {"tie_encoder_decoder": False, "share_embeddings": True}
    assert tied == {**default, "tie_word_embeddings": source.config.tie_word_embeddings, **ties}
    assert all(getattr(model.config, name) == value for name, value in tied.items())
    if not source.config.is_decoder:
        encoded, expected = (each(IDS, MASK).last_hidden_state for each in (encoder, source.base_model))
        assert_close(encoded[MASK.bool()], expected[MASK.bool()], rtol=0, atol=1e-5)
    # It is a checkpoint of its own from now on.
    model.save_pretrained(tmp_path / "ours")
    again = ScratchBertForConditionalGeneration.from_pretrained(tmp_path / "ours", verify=True)
    assert_same_outputs(again, model)


@pytest.mark.parametrize("form", FORMS)
def test_forms(tmp_path, form):
    write_bert(tmp_path, **FORMS[form])
    model, info, _ = start(tmp_path)
    assert {tensor.dtype for tensor in model.state_dict().values()} == {FORMS[form].get("dtype", torch.float32)}
    missing = assert_started(model, info, tensors_of(tmp_path, "ForPreTraining"))
    assert all("cross_attention" in name for name in missing)


def test_of_two_output_biases_the_decoder_s_counts(tmp_path):
    bert = random_bert("ForMaskedLM", tie_word_embeddings=False)
    tensors = bert.state_dict()
    tensors[OUTPUT_BIAS] = tensors.pop(OUTPUT_BIAS) + 1  # the last in the file
    write_bert(tmp_path, bert, "bin")
    write_weights(tmp_path, tensors, "bin")
    model, _, _ = start(tmp_path)
    assert torch.equal(model.lm_head.decoder.bias, tensors[DECODER_BIAS])
    assert torch.equal(model.lm_head.decoder.weight, tensors[DECODER_WEIGHT])


@pytest.mark.parametrize("ties", TIES[:2], ids=str)
@pytest.mark.parametrize("layers", [1, 2, 4])
def test_a_decoder_of_another_depth_takes_the_first_blocks_or_has_more(tmp_path, layers, ties):
    random_bert("ForMaskedLM").save_pretrained(tmp_path)
    model, info, _ = start(tmp_path, num_decoder_layers=layers, **ties)
    missing = assert_started(model, info, tensors_of(tmp_path, "ForMaskedLM"))
    assert (len(model.get_encoder().encoder.blocks), len(model.get_decoder().encoder.blocks)) == (2, layers)
    blocks = {int(re.search(r"blocks\.(\d+)", name)[1]) for name in missing if "cross_attention" not in name}
    assert blocks == set(range(2, layers))


# --- the configuration


def test_fields_of_the_configuration(tmp_path):
    write_bert(tmp_path)
    model, _, _ = start(tmp_path, attn_implementation="eager", hidden_dropout_prob=0.25)
    for part in (model, model.get_encoder(), model.get_decoder()):
        assert part.config._attn_implementation == "eager"
        assert part.config.hidden_dropout_prob == 0.25


def special_ids(config):
    return {name: getattr(config, name) for name in SPECIAL}


def ids(start, end, pad):
    return dict(zip(SPECIAL, (start, end, pad), strict=True))


WORDS = ("w", "[SEP]", "x", "[PAD]", "[CLS]", "y", "[UNK]", "[MASK]")


def add_tokenizer(folder, file):
    """A tokenizer of `WORDS`, with or without tokenizer.json."""
    words = [*WORDS, *(f"w{i}" for i in range(len(WORDS), TINY["vocab_size"]))]
    transformers.BertTokenizer(vocab={word: i for i, word in enumerate(words)}).save_pretrained(folder)
    if file == "vocab.txt":
        (folder / file).write_text("\n".join(words))
        (folder / "tokenizer.json").unlink()
        (folder / "tokenizer_config.json").unlink()


OTHER_IDS = {"bos_token_id": 8, "eos_token_id": 9, "pad_token_id": 5}


@pytest.mark.parametrize(
    ("tokenizer", "fields", "arguments", "expected"),
    [
        (None, {}, {}, ids(None, None, 0)),
        (None, {}, {"bos_token_id": 7}, ids(7, None, 0)),
        (None, OTHER_IDS, {}, ids(8, 9, 5)),
        (None, {"vocab_size": 103}, {}, ids(101, 102, 0)),
        ("tokenizer.json", {}, {}, ids(4, 1, 3)),
        ("vocab.txt", {}, {}, ids(4, 1, 3)),
        ("tokenizer.json", OTHER_IDS, {}, ids(4, 1, 3)),
        ("tokenizer.json", OTHER_IDS, ids(11, 12, 13), ids(11, 12, 13)),
        ("tokenizer.json", {}, {"eos_token_id": [1, 6]}, ids(4, [1, 6], 3)),
    ],
)
def test_special_ids(tmp_path, tokenizer, fields, arguments, expected):
    """Those of the arguments, else of the tokenizer, else of the configuration. Nothing else has to be set for
    generation and training, before and after the model is saved."""
    random_bert("ForMaskedLM", **fields).save_pretrained(tmp_path)
    if tokenizer:
        add_tokenizer(tmp_path, tokenizer)
    model, _, _ = start(tmp_path, **arguments)
    model.save_pretrained(tmp_path / "ours")
    for each in (model, ScratchBertForConditionalGeneration.from_pretrained(tmp_path / "ours")):
        assert special_ids(each.config) == special_ids(each.generation_config) == expected
        assert each.get_decoder().get_input_embeddings().padding_idx == expected["pad_token_id"]
        if expected["decoder_start_token_id"] is not None:
            written = each.generate(IDS, max_new_tokens=4)
            assert (written[:, 0] == expected["decoder_start_token_id"]).all()
            assert each(IDS, labels=IDS).loss.isfinite()


# --- what is refused beside the checkpoints of test_refused_checkpoints.py


@pytest.mark.parametrize(
    ("arguments", "mentioned"),
    [
        ({"num_decoder_layers": 0}, "num_decoder_layers"),
        ({"tie_encoder_decoder": True, "num_decoder_layers": 1}, "num_decoder_layers"),
        ({"decoder_start_token_id": 99}, "decoder_start_token_id"),
        ({"hidden_act": "geluu"}, "hidden_act"),
    ],
)
def test_invalid_arguments(tmp_path, arguments, mentioned):
    write_bert(tmp_path)
    assert mentioned in refusal(ScratchBertForConditionalGeneration.from_bert, tmp_path, **arguments)


def test_seq2seq_models_are_refused(tmp_path):
    random_scratchbert("ForConditionalGeneration").save_pretrained(tmp_path / "ours")
    write_two_berts(tmp_path / "theirs")
    for folder in (tmp_path / "ours", tmp_path / "theirs"):
        message = refusal(ScratchBertForConditionalGeneration.from_bert, folder)
        assert_mentions(message, folder, "an encoder and a decoder")
