"""As loaded, the model is BERT at every position, padding included; padding is removed only on request; and a forward
pass accepts no argument that it does not know."""

import json
import logging

import pytest
import torch
import transformers
from torch import nn
from transformers import Trainer, TrainingArguments, initialization
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from modeling_scratchbert import ScratchBertConfig, ScratchBertForConditionalGeneration, ScratchBertModel
from modeling_scratchbert.attention import MultiHeadAttention
from support.comparison import assert_same_gradients, assert_same_tensors, flat
from support.models import HEADS, NEEDS, OURS, inputs_for
from support.unpadded import FLASH, LENGTHS, draw, flattened, make, observed_shapes

UNPADDED, PADDED = {(1, sum(LENGTHS), 32)}, {(5, 9, 32)}
MASKS = ("right", "left", "scattered")


def shapes(model, **options) -> set[tuple]:
    """The shapes that attention is given for a batch with padding."""
    with observed_shapes(MultiHeadAttention.forward) as seen, torch.no_grad():
        model(**draw(), **options)
    return set(seen)


@pytest.mark.parametrize("head", HEADS)
def test_every_position_is_berts(head, pair):
    ours, reference = pair(head)
    for kind in MASKS * 2:
        batch = inputs_for(head)
        mask = draw(kind, batch=5, width=7)["attention_mask"]
        rows = torch.arange(batch["attention_mask"].shape[:-1].numel()) % 5
        batch["attention_mask"] = mask[rows].view_as(batch["attention_mask"])
        with torch.no_grad():
            assert_same_tensors(flat(ours(**batch)), flat(reference(**batch)))


# ---------------------------------------------------------------------------------------------------------------------
# Hooks and patches

# Where the same tensor is in the reference and in ours.
PLACES = {
    "embeddings": ("embeddings", "embeddings"),
    "word embeddings": ("embeddings.word_embeddings", "embeddings.word_embeddings"),
    "block": ("encoder.layer.1", "encoder.blocks.1"),
    "query": ("encoder.layer.0.attention.self.query", "encoder.blocks.0.attention.query"),
    "intermediate": ("encoder.layer.1.intermediate.dense", "encoder.blocks.1.feed_forward.intermediate"),
}
KINDS = ("forward", "pre", "backward", "backward pre")
# BERT passes the arguments of its embeddings by keyword.
SEEN = [(place, kind) for place in PLACES for kind in KINDS if (place, kind) != ("embeddings", "pre")]


def first(value):
    return value[0] if isinstance(value, tuple) else value


def register(kind, module, seen):
    """Registers a hook that adds the first tensor that it sees to `seen`."""
    if kind == "forward":
        module.register_forward_hook(lambda _, args, output: seen.append(first(output)))
    elif kind == "pre":
        module.register_forward_pre_hook(lambda _, args: seen.append(first(args)))
    elif kind == "backward":
        module.register_full_backward_hook(lambda _, into, out: seen.append(first(out)))
    else:
        module.register_full_backward_pre_hook(lambda _, out: seen.append(first(out)))


@pytest.mark.parametrize(("place", "kind"), SEEN)
def test_a_hook_sees_what_it_sees_in_bert(kind, place, pair):
    ours, reference = pair()
    inputs, results = draw(), []
    real = inputs["attention_mask"].bool()
    for model, path in zip((reference, ours), PLACES[place], strict=True):
        seen: list = []
        register(kind, model.get_submodule(path), seen)
        states = model(**inputs).last_hidden_state
        (states[real] ** 2).sum().backward()
        results.append([tensor.detach() for tensor in seen if tensor is not None])
    assert len(results[0]) == len(results[1]) == 1
    expected, actual = results[0][0], results[1][0]
    assert actual.shape == expected.shape
    assert actual.shape[:2] == (5, 9)
    if actual.is_floating_point() and "backward" in kind:
        assert_same_gradients({"": actual}, {"": expected})
    else:
        assert_same_tensors({"": actual}, {"": expected})


def test_a_replaced_forward_sees_padded_tensors(pair):
    ours, reference = pair()
    inputs, shapes = draw(), []
    for module in (ours.encoder.blocks[1].feed_forward.intermediate, reference.encoder.layer[1].intermediate.dense):
        original = module.forward
        module.forward = lambda x, original=original: shapes.append(tuple(x.shape)) or original(x)
    for model in (ours, reference):
        model(**inputs)
    assert shapes == [(5, 9, 32), (5, 9, 32)]


@pytest.mark.parametrize("head", ["ForSequenceClassification"])
def test_neftune_noise_is_that_of_bert(head, pair, tmp_path):
    """NEFTune scales its noise by alpha / sqrt(T · C) of what its hook sees (Jain et al. 2023, section 2)."""
    columns = zip(*draw().values(), strict=True)
    rows = [{"input_ids": ids, "attention_mask": mask, "labels": torch.tensor(0)} for ids, mask in columns]
    losses = []
    for model in pair(head):
        arguments = TrainingArguments(
            str(tmp_path / "run"),
            per_device_train_batch_size=len(rows),
            max_steps=2,
            neftune_noise_alpha=5,
            report_to=[],
            save_strategy="no",
            logging_steps=1,
            use_cpu=True,
            disable_tqdm=True,
        )
        trainer = Trainer(model, arguments, train_dataset=rows)
        trainer.train()
        losses.append([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
    ours, reference = losses
    assert len(ours) == 2
    assert ours == pytest.approx(reference, abs=1e-5)


# ---------------------------------------------------------------------------------------------------------------------
# Modules of other people


class Convolution(nn.Module):
    """A causal convolution over the tokens, after another module: (B, T, …) → (B, T, C)."""

    def __init__(self, before: nn.Module):
        super().__init__()
        self.before = before

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.before(x)
        return y + nn.functional.pad(y, (0, 0, 1, 0))[:, :-1]


def test_a_folder_of_an_earlier_version_with_a_convolution_is_computed_padded(tmp_path):
    ours, batch = make(padding_free=False), draw()
    ours.save_pretrained(tmp_path)
    fields = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**fields, "padding_free": True}))
    again = ScratchBertModel.from_pretrained(tmp_path)
    results = []
    for model in (ours, again):
        model.encoder.blocks[1].feed_forward = Convolution(model.encoder.blocks[1].feed_forward)
        results.append(model(**batch).last_hidden_state)
    assert torch.equal(*results)


def test_whoever_asks_for_removed_padding_sees_unpadded_tensors():
    ours, seen = make(padding_free=False), []
    ours.encoder.blocks[0].feed_forward = Convolution(ours.encoder.blocks[0].feed_forward)
    ours.encoder.blocks[0].register_forward_hook(lambda _, args, output: seen.append(tuple(output.shape)))
    with torch.no_grad():
        ours(**draw())
        ours(**draw(), padding_free=True)
    assert seen == [(5, 9, 32), (1, sum(LENGTHS), 32)]


# ---------------------------------------------------------------------------------------------------------------------
# The request


def test_padding_free_is_neither_saved_nor_read(tmp_path, caplog):
    make(padding_free=True).save_pretrained(tmp_path)
    fields = json.loads((tmp_path / "config.json").read_text())
    assert "padding_free" not in fields
    assert "padding_free" not in ScratchBertConfig(padding_free=True).to_dict()
    (tmp_path / "config.json").write_text(json.dumps({**fields, "padding_free": True}))
    config_logger = logging.getLogger("modeling_scratchbert.configuration_scratchbert")
    config_logger.addHandler(caplog.handler)
    config_logger.setLevel(logging.INFO)
    model = ScratchBertModel.from_pretrained(tmp_path)
    config_logger.removeHandler(caplog.handler)
    config_logger.setLevel(logging.NOTSET)
    assert "padding_free" in caplog.text
    assert shapes(model) == PADDED


REQUESTS = {
    "nothing": (lambda path: ScratchBertModel.from_pretrained(path), PADDED),
    "argument": (lambda path: ScratchBertModel.from_pretrained(path, padding_free=True), UNPADDED),
    "Auto class": (lambda path: transformers.AutoModel.from_pretrained(path, padding_free=True), UNPADDED),
    "configuration": (
        lambda path: ScratchBertModel.from_pretrained(
            path, config=transformers.AutoConfig.from_pretrained(path, padding_free=True)
        ),
        UNPADDED,
    ),
    "beside a configuration": (
        lambda path: ScratchBertModel.from_pretrained(
            path, config=ScratchBertConfig.from_pretrained(path), padding_free=True
        ),
        UNPADDED,
    ),
    "against a configuration": (
        lambda path: ScratchBertModel.from_pretrained(
            path, config=ScratchBertConfig.from_pretrained(path, padding_free=True), padding_free=False
        ),
        PADDED,
    ),
}


@pytest.mark.parametrize(("load", "expected"), REQUESTS.values(), ids=REQUESTS)
def test_padding_is_removed_on_request(load, expected, tmp_path):
    make().save_pretrained(tmp_path)
    model = load(tmp_path)
    assert shapes(model) == expected
    assert shapes(model, padding_free=True) == UNPADDED
    assert shapes(model, padding_free=False) == PADDED


def test_the_encoder_of_a_seq2seq_model_removes_padding_on_request(tmp_path):
    make(OURS["ForConditionalGeneration"], **NEEDS["ForConditionalGeneration"]).save_pretrained(tmp_path)
    for asked in (None, True):
        model = ScratchBertForConditionalGeneration.from_pretrained(tmp_path, padding_free=asked)
        assert shapes(model.get_encoder()) == (UNPADDED if asked else PADDED)


def test_positions_that_restart_are_one_sequence_unless_padding_free_is_requested(pair):
    ours, reference = pair()
    packed = flattened(draw())
    assert_same_tensors(flat(ours(**packed)), flat(reference(**packed)))
    expected = ours(**flattened(draw(), **FLASH)).last_hidden_state.shape
    assert ours(**packed, padding_free=True).last_hidden_state.shape == expected
    assert ours(**packed, padding_free=True).pooler_output.shape == (len(LENGTHS), 32)


# ---------------------------------------------------------------------------------------------------------------------
# Arguments


@pytest.mark.parametrize("name", ["attention_masks", "token_type_id", "foo", "head_mask"])
@pytest.mark.parametrize("head", OURS)
def test_an_unknown_argument_raises(head, name):
    model = make(OURS[head], padding_free=False, **NEEDS.get(head, {}))
    inputs = inputs_for(head)
    with pytest.raises(TypeError, match=name):
        model(**inputs, **{name: None})


def test_an_attention_function_of_the_user_receives_the_parameters_that_it_names(monkeypatch):
    seen = []

    def attend(module, query, key, value, attention_mask, temperature=1.0, **kwargs):
        seen.append(temperature)
        return query.transpose(1, 2), None

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "of_a_test", attend)
    ours = make(padding_free=False)
    ours.config._attn_implementation = "of_a_test"
    ours(**draw(), temperature=2.0)
    assert seen == [2.0, 2.0]
    with pytest.raises(TypeError, match="temperatures"):
        ours(**draw(), temperatures=2.0)


# ---------------------------------------------------------------------------------------------------------------------
# State that is not saved


class WithBuffer(ScratchBertModel):
    def __init__(self, config):
        super().__init__(config)
        self.register_buffer("decay", torch.arange(4.0), persistent=False)


class WithInitialisedBuffer(WithBuffer):
    def _init_weights(self, module):
        super()._init_weights(module)
        if module is self:
            initialization.copy_(module.decay, torch.arange(4.0))


@pytest.mark.parametrize(("cls", "is_named"), [(WithBuffer, True), (WithInitialisedBuffer, False)])
def test_a_buffer_that_is_not_saved_is_named(cls, is_named, tmp_path, said):
    make(position_embedding_type="sinusoidal").save_pretrained(tmp_path)
    model = cls.from_pretrained(tmp_path)
    messages = " ".join(said())
    assert ("decay" in messages) == is_named
    assert "table" not in messages
    assert is_named or torch.equal(model.decay, torch.arange(4.0))
