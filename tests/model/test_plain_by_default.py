"""As loaded, the model is BERT at every position, padding included (`test_parity`), for hooks as well; padding is
removed only on request; and a forward pass accepts no argument that it does not know."""

import json

import pytest
import torch
import transformers
from transformers import AttentionInterface, initialization

from modeling_scratchbert import ScratchBertForConditionalGeneration, ScratchBertModel
from modeling_scratchbert.attention import MultiHeadAttention
from support.comparison import assert_same_gradients, assert_same_tensors, flat
from support.models import NEEDS, OURS, inputs_for
from support.unpadded import LENGTHS, draw, flattened, make, observed_shapes

UNPADDED, PADDED = {(1, sum(LENGTHS), 32)}, {(5, 9, 32)}


def shapes(model, **options) -> set[tuple]:
    """The shapes that attention is given for a batch with padding."""
    with observed_shapes(MultiHeadAttention.forward) as seen, torch.no_grad():
        model(**draw(), **options)
    return set(seen)


# Where the same tensor is in the reference and in ours.
PLACES = [
    ("embeddings", "embeddings"),
    ("encoder.layer.1", "encoder.blocks.1"),
    ("encoder.layer.0.attention.self.query", "encoder.blocks.0.attention.query"),
    ("encoder.layer.1.intermediate.dense", "encoder.blocks.1.feed_forward.intermediate"),
]


@pytest.mark.parametrize("places", PLACES, ids=str)
def test_hooks_see_the_tensors_of_bert(places, pair):
    ours, reference = pair()
    inputs, results = draw(), []
    for model, path in zip((reference, ours), places, strict=True):
        module, seen = model.get_submodule(path), []
        module.register_forward_hook(lambda module, args, output, seen=seen: seen.append(output))
        module.register_full_backward_hook(lambda module, into, out, seen=seen: seen.append(out[0]))
        states = model(**inputs).last_hidden_state
        states[inputs["attention_mask"].bool()].square().sum().backward()
        results.append(seen)
    (expected_output, expected_gradient), (output, gradient) = results
    assert output.shape[:2] == (5, 9)
    assert_same_tensors({"": output.detach()}, {"": expected_output.detach()})
    assert_same_gradients({"": gradient}, {"": expected_gradient})


# ---------------------------------------------------------------------------------------------------------------------
# The request


def test_padding_free_is_neither_saved_nor_read(tmp_path):
    make(padding_free=True).save_pretrained(tmp_path)
    fields = json.loads((tmp_path / "config.json").read_text())
    assert "padding_free" not in fields
    (tmp_path / "config.json").write_text(json.dumps({**fields, "padding_free": True}))
    assert shapes(ScratchBertModel.from_pretrained(tmp_path)) == PADDED


def load_with_config(path, asked_in_config, **options):
    config = transformers.AutoConfig.from_pretrained(path, padding_free=asked_in_config)
    return ScratchBertModel.from_pretrained(path, config=config, **options)


REQUESTS = {
    "nothing": (ScratchBertModel.from_pretrained, PADDED),
    "argument": (lambda path: ScratchBertModel.from_pretrained(path, padding_free=True), UNPADDED),
    "Auto class": (lambda path: transformers.AutoModel.from_pretrained(path, padding_free=True), UNPADDED),
    "configuration": (lambda path: load_with_config(path, True), UNPADDED),
    "beside a configuration": (lambda path: load_with_config(path, False, padding_free=True), UNPADDED),
    "against a configuration": (lambda path: load_with_config(path, True, padding_free=False), PADDED),
}


@pytest.mark.parametrize(("load", "expected"), REQUESTS.values(), ids=REQUESTS)
def test_padding_is_removed_on_request(load, expected, tmp_path):
    make(padding_free=False).save_pretrained(tmp_path)
    model = load(tmp_path)
    assert shapes(model) == expected
    assert shapes(model, padding_free=True) == UNPADDED
    assert shapes(model, padding_free=False) == PADDED


def test_encoder_of_a_seq2seq_model_removes_padding_on_request(tmp_path):
    make(OURS["ForConditionalGeneration"], **NEEDS["ForConditionalGeneration"]).save_pretrained(tmp_path)
    for asked in (None, True):
        model = ScratchBertForConditionalGeneration.from_pretrained(tmp_path, padding_free=asked)
        assert shapes(model.get_encoder()) == (UNPADDED if asked else PADDED)


def test_positions_that_restart_are_one_sequence_unless_padding_free_is_requested(pair):
    ours, reference = pair()
    packed = flattened(draw())
    assert_same_tensors(flat(ours(**packed)), flat(reference(**packed)))
    assert ours(**packed, padding_free=True).pooler_output.shape == (len(LENGTHS), 32)


# ---------------------------------------------------------------------------------------------------------------------
# Arguments


@pytest.mark.parametrize("name", ["attention_masks", "head_mask"])
@pytest.mark.parametrize("head", OURS)
def test_unknown_arguments_are_refused(head, name):
    model = make(OURS[head], **NEEDS.get(head, {}))
    with pytest.raises(TypeError, match=name):
        model(**inputs_for(head), **{name: None})


def test_attention_function_of_the_user():
    """It receives padded tensors, and the parameters that it names."""
    seen = []

    def attend(module, query, key, value, attention_mask, temperature=1.0, **kwargs):
        seen.append((len(query), temperature))
        return query.transpose(1, 2), None

    AttentionInterface.register("of_a_test", attend)
    ours = make(padding_free=True)
    ours.config._attn_implementation = "of_a_test"
    ours(**draw(), temperature=2.0)
    assert seen == [(5, 2.0)] * 2
    with pytest.raises(TypeError, match="temperatures"):
        ours(**draw(), temperatures=2.0)


# ---------------------------------------------------------------------------------------------------------------------
# State that is not saved


class WithTensors(ScratchBertModel):
    """A derived class with a parameter and a buffer of its own, which no checkpoint has."""

    def __init__(self, config):
        super().__init__(config)
        self.scale = torch.nn.Parameter(torch.ones(3))
        self.register_buffer("decay", torch.arange(4.0), persistent=False)
        self.recurrent = torch.nn.GRU(2, 2)  # transformers does not initialise it
        self.linear = torch.nn.Linear(2, 2)


class WithInitialisedTensors(WithTensors):
    def _init_weights(self, module):
        super()._init_weights(module)
        if module is self:
            module.scale.data.fill_(2.0)
            initialization.copy_(module.decay, torch.arange(4.0))


def test_tensors_that_nothing_initialised_are_named(tmp_path, said):
    make(position_embedding_type="sinusoidal").save_pretrained(tmp_path)
    model = WithInitialisedTensors.from_pretrained(tmp_path)
    assert torch.equal(model.scale, torch.full((3,), 2.0))
    assert torch.equal(model.decay, torch.arange(4.0))
    WithTensors.from_pretrained(tmp_path)
    (message,) = (message for message in said() if "_init_weights" in message)
    for name in ("scale", "decay", "recurrent.weight_hh_l0"):
        assert name in message
    for name in ("linear", "table"):
        assert name not in message
