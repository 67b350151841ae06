"""The weights of an encoder and a decoder: which tensors are tied, and what opens a folder of both or of one."""

import copy
import pickle
from itertools import product

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch.testing import assert_close

from modeling_scratchbert import ScratchBertForConditionalGeneration, ScratchBertModel, ScratchBertSeq2SeqModel
from support.checkpoint_kinds import NOTHING, assert_same_outputs, logged_warnings
from support.comparison import TOLERANCE, assert_same_gradients
from support.models import BERTS, NO_DROPOUT, OURS, SPECIAL, inputs_for, random_scratchbert, tiny_config

TIES = ("tie_encoder_decoder", "share_embeddings", "tie_word_embeddings")
NONE_TIED, ALL_TIED = dict.fromkeys(TIES, False), dict.fromkeys(TIES, True)
ties = pytest.mark.parametrize(
    "tied", [dict(zip(TIES, values, strict=True)) for values in product([False, True], repeat=3)], ids=str
)


def random_seq2seq(head="ForConditionalGeneration", **fields):
    return random_scratchbert(head, num_hidden_layers=1, **{**NO_DROPOUT, **SPECIAL, **fields})


def first_name(name, tie_encoder_decoder, share_embeddings, tie_word_embeddings):
    """The name of the tensor that the one of this name is tied to, or its own name."""
    if tie_word_embeddings and name == "lm_head.decoder.weight":
        name = "decoder.embeddings.word_embeddings.weight"
    part = name.removeprefix("decoder.")
    if part == name or "cross_attention" in part:
        return name
    is_tied = share_embeddings if part.startswith("embeddings.") else tie_encoder_decoder
    return f"encoder.{part}" if is_tied else name


def assert_tied(model, tied):
    """The tensors that `tied` names have the same memory, and no others."""
    pointers = {name.removeprefix("model."): tensor.data_ptr() for name, tensor in model.state_dict().items()}
    for name, pointer in pointers.items():
        assert pointer == pointers[first_name(name, **tied)], name
    separate = {first_name(name, **tied) for name in pointers}
    assert len(set(pointers.values())) == len(list(model.parameters())) == len(separate)


def opened(folder, model_class=ScratchBertForConditionalGeneration, **options):
    """The model in a folder, the report of its loading, and the warnings."""
    with logged_warnings() as warnings:
        model, report = model_class.from_pretrained(folder, output_loading_info=True, **options)
    return model, report, "\n".join(warnings)


def loaded_from_shards(model, folder):
    model.save_pretrained(folder, max_shard_size="20KB")
    files = list(folder.glob("model-*.safetensors"))
    assert len(files) > 2
    parameters = list(model.parameters())
    assert sum(len(load_file(file)) for file in files) == len(parameters)  # each is stored once
    again, report, _ = opened(folder, transformers.AutoModelForSeq2SeqLM)
    assert report == NOTHING
    return again


def given_a_state_dict(model, folder):
    other = type(model)(model.config).eval()
    other.load_state_dict(model.state_dict())
    return other


WAYS = {
    "deep-copied": lambda model, folder: copy.deepcopy(model),
    "pickled": lambda model, folder: pickle.loads(pickle.dumps(model)),
    "loaded from shards": loaded_from_shards,
    "given a state dict": given_a_state_dict,
}


@pytest.mark.parametrize("way", WAYS)
@ties
def test_tensors_stay_tied(tmp_path, tied, way):
    model = random_seq2seq(**tied)
    again = WAYS[way](model, tmp_path)
    assert_tied(again, tied)
    assert_same_outputs(again, model)


@ties
def test_tensors_are_tied_without_a_head(tmp_path, tied):
    model = random_seq2seq(**tied)
    model.save_pretrained(tmp_path)
    base = transformers.AutoModel.from_pretrained(tmp_path)
    assert type(base) is type(transformers.AutoModel.from_config(base.config)) is ScratchBertSeq2SeqModel
    assert_tied(base, tied)
    assert_same_outputs(base, model.model)
    base.save_pretrained(tmp_path / "base")
    with_head, report, _ = opened(tmp_path / "base")
    new = {name for name in with_head.state_dict() if name.startswith("lm_head.")}
    assert report["missing_keys"] == new - ({"lm_head.decoder.weight"} if tied["tie_word_embeddings"] else set())
    assert_tied(with_head, tied)
    assert_same_outputs(with_head.model, base)


@pytest.mark.parametrize("size", [120, 50])
@pytest.mark.parametrize("head", ["ForConditionalGeneration", "Seq2SeqModel"])
@ties
def test_resized_tensors_stay_tied(tied, head, size):
    model = random_seq2seq(head, **tied)
    before, known = copy.deepcopy(model.state_dict()), min(size, 99)
    assert model.resize_token_embeddings(size) is model.get_encoder().get_input_embeddings()
    assert_tied(model, tied)
    for part in (model, model.get_encoder(), model.get_decoder()):
        assert part.config.vocab_size == part.get_input_embeddings().num_embeddings == size
    for name, tensor in model.state_dict().items():
        rows = known if before[name].shape[0] == 99 else None
        assert torch.equal(tensor[:rows], before[name][:rows]), name
    words = torch.tensor([[5, size - 1]])
    model(words, decoder_input_ids=words)[0].sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    with pytest.raises(ValueError, match=f"vocab_size is {size}"):
        model(words, decoder_input_ids=words + 1)


@ties
def test_embeddings_that_are_set_are_shared_as_configured(tied):
    model, table = random_seq2seq(**tied), torch.nn.Embedding(99, 32)
    model.set_input_embeddings(table)
    assert model.get_encoder().get_input_embeddings() is table
    assert (model.get_decoder().get_input_embeddings() is table) == tied["share_embeddings"]


@ties
def test_the_gradient_of_a_tied_tensor_is_the_sum_over_its_uses(tied):
    models = random_seq2seq(**tied), random_seq2seq(**NONE_TIED)
    models[1].load_state_dict(models[0].state_dict())
    inputs, gradients, losses = inputs_for("ForConditionalGeneration", labels=True), [], []
    for model in models:
        losses.append(model(**inputs).loss)
        losses[-1].backward()
        sums = {}
        for name, parameter in model.named_parameters():
            first = first_name(name.removeprefix("model."), **tied)
            sums[first] = sums.get(first, 0) + parameter.grad
        gradients.append(sums)
    assert_close(*losses)
    assert_same_gradients(*gradients)


@pytest.mark.parametrize("name", TIES)
def test_tensors_that_a_file_lacks_are_reported_as_missing(tmp_path, name):
    random_seq2seq(**ALL_TIED).save_pretrained(tmp_path)
    untied = ALL_TIED | {name: False}
    model, report, warnings = opened(tmp_path, **{name: False})
    assert_tied(model, untied)
    stored = {first_name(each.removeprefix("model."), **ALL_TIED) for each in model.state_dict()}
    names = {each for each in model.state_dict() if first_name(each.removeprefix("model."), **untied) not in stored}
    assert report["missing_keys"] == names != set()
    assert "MISSING" in warnings


@pytest.mark.parametrize("name", TIES)
def test_tensors_that_differ_in_a_file_are_not_tied(tmp_path, name):
    model = random_seq2seq(**NONE_TIED)
    model.save_pretrained(tmp_path)
    again, _, warnings = opened(tmp_path, **{name: True})
    assert_same_outputs(again, model)
    assert "NOT tie" in warnings


# Encoder and decoder alone


@pytest.mark.parametrize("part", ["encoder", "decoder"])
def test_encoder_and_decoder_are_models_of_their_own(tmp_path, part):
    model, inputs = random_seq2seq(num_decoder_layers=3), inputs_for("ForConditionalGeneration")
    outputs, target = model.model(**inputs), inputs.pop("decoder_input_ids")
    expected = outputs.encoder_last_hidden_state
    if part == "decoder":
        encoder = {"encoder_hidden_states": expected, "encoder_attention_mask": inputs["attention_mask"]}
        inputs, expected = {"input_ids": target, **encoder}, outputs.last_hidden_state
    alone = model.get_encoder() if part == "encoder" else model.get_decoder()
    alone.save_pretrained(tmp_path / "ours")
    alone.save_as_bert(tmp_path / "bert")
    for model_class in (transformers.AutoModel, transformers.BertModel):
        folder = tmp_path / ("bert" if model_class is transformers.BertModel else "ours")
        again, report, _ = opened(folder, model_class)
        assert report["missing_keys"] == {"pooler.dense.weight", "pooler.dense.bias"}
        assert again.config.is_decoder == (part == "decoder")
        assert_close(again(**inputs).last_hidden_state, expected, rtol=0, atol=TOLERANCE)


def test_a_folder_of_both_is_not_opened_as_one(tmp_path):
    model = random_seq2seq()
    model.save_pretrained(tmp_path)
    autos = [transformers.AutoModelForMaskedLM, transformers.AutoModelForCausalLM]
    for model_class in (*autos, *(OURS[head] for head in BERTS if head != "Model")):
        for config in (None, model.config.encoder_config()):
            with pytest.raises(ValueError, match=r"is_encoder_decoder is True.*get_encoder\(\)"):
                model_class.from_pretrained(tmp_path, config=config)
    with pytest.raises(ValueError, match="is_encoder_decoder is True"):
        ScratchBertModel(model.config)
    for each in (model, model.model):
        with pytest.raises(ValueError, match=r"get_encoder\(\)\.save_as_bert"):
            each.save_as_bert(tmp_path / "out")


@pytest.mark.parametrize("model_class", [ScratchBertForConditionalGeneration, ScratchBertSeq2SeqModel])
def test_a_folder_of_one_is_not_opened_as_both(tmp_path, model_class):
    random_scratchbert("ForMaskedLM").save_pretrained(tmp_path)
    for options in ({}, {"config": tiny_config(is_encoder_decoder=True)}, {"is_encoder_decoder": True}):
        with pytest.raises(ValueError, match="is_encoder_decoder is False"):
            model_class.from_pretrained(tmp_path, **options)
    with pytest.raises(ValueError, match="is_encoder_decoder is False"):
        model_class(tiny_config())
