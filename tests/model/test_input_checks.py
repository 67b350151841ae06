"""Invalid arguments raise an error that names the argument; and no check waits for an accelerator or breaks a trace."""

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing import assert_close
from transformers import BertConfig, BertModel, DynamicCache

from modeling_scratchbert import ScratchBertConfig, ScratchBertForSequenceClassification, ScratchBertModel
from modeling_scratchbert.versions import CACHE
from support.models import CROSSED, NEEDS, OURS, SPECIAL, TINY
from support.versions import since

SIZES = {**TINY, "num_hidden_layers": 1, "type_vocab_size": 3}
BATCH, CHOICES, LENGTH, SOURCE, WIDTH = 3, 2, 5, 4, 32
LIMIT = TINY["max_position_embeddings"]
# What holds ids, and how many rows its table has.
TABLES = {"input_ids": 99, "token_type_ids": 3, "position_ids": LIMIT}


def ids(*shape):
    return torch.ones(shape or (BATCH, LENGTH), dtype=torch.long)


def make(head="Model", **fields):
    return OURS[head](ScratchBertConfig(**{**SIZES, **NEEDS.get(head, {}), **fields})).eval()


@pytest.fixture(scope="module")
def models():
    return {
        "encoder": make(),
        "decoder": make(**CROSSED),
        "masked LM": make("ForMaskedLM"),
        "classifier": make("ForSequenceClassification"),
        "choices": make("ForMultipleChoice"),
        "seq2seq": make("ForConditionalGeneration", **SPECIAL),
        "without padding id": make("ForConditionalGeneration", **{**SPECIAL, "pad_token_id": None}),
    }


# Valid arguments, with which the invalid ones are passed.
VALID = {
    "encoder": {"input_ids": ids()},
    "decoder": {"input_ids": ids(), "encoder_hidden_states": torch.randn(BATCH, SOURCE, WIDTH)},
    "masked LM": {"input_ids": ids()},
    "classifier": {"input_ids": ids()},
    "choices": {"input_ids": ids(BATCH, CHOICES, LENGTH)},
    "seq2seq": {"input_ids": ids(BATCH, SOURCE), "decoder_input_ids": ids()},
    "without padding id": {"input_ids": ids(BATCH, SOURCE), "decoder_input_ids": ids()},
}


def assert_refused(model, arguments, name, error=ValueError):
    with pytest.raises(error) as raised:
        model(**arguments)
    assert name in str(raised.value)


@pytest.mark.parametrize("model", VALID)
def test_valid_arguments_are_accepted(model, models):
    models[model](**VALID[model])


# Model, argument, invalid shapes. Floating arguments have a last dimension of WIDTH.
SHAPES = [
    ("encoder", "input_ids", [(), (LENGTH,), (1, BATCH, LENGTH)]),
    ("encoder", "inputs_embeds", [(LENGTH, WIDTH), (BATCH, LENGTH, WIDTH - 1), (1, BATCH, LENGTH, WIDTH)]),
    ("encoder", "token_type_ids", [(LENGTH,), (BATCH, 1), (BATCH, LENGTH + 1), (2, LENGTH), (1, BATCH, LENGTH)]),
    ("encoder", "position_ids", [(BATCH, LENGTH - 1), (2, LENGTH)]),
    ("encoder", "attention_mask", [(LENGTH,), (1, LENGTH), (BATCH, 1), (BATCH, LENGTH + 1), (BATCH, LENGTH, LENGTH)]),
    ("encoder", "attention_mask", [(2, 1, LENGTH, LENGTH), (BATCH, 1, LENGTH, LENGTH + 1), (BATCH, 1, 2, LENGTH)]),
    ("encoder", "attention_mask", [(BATCH, 3, LENGTH, LENGTH), (1, BATCH, 1, LENGTH, LENGTH)]),  # there are 4 heads
    ("decoder", "encoder_hidden_states", [(SOURCE, WIDTH), (BATCH, SOURCE, WIDTH - 1), (2, SOURCE, WIDTH)]),
    ("decoder", "encoder_attention_mask", [(BATCH, LENGTH), (2, SOURCE), (BATCH, 1, LENGTH, 3), (BATCH, 1, 2, SOURCE)]),
    ("choices", "input_ids", [(BATCH, LENGTH)]),
    ("choices", "inputs_embeds", [(BATCH, LENGTH, WIDTH)]),
    ("choices", "attention_mask", [(BATCH, LENGTH), (BATCH, CHOICES, LENGTH + 1), (BATCH, CHOICES + 1, LENGTH)]),
    ("choices", "attention_mask", [(CHOICES, BATCH, LENGTH)]),  # as many rows, but other ones
    ("choices", "token_type_ids", [(BATCH, LENGTH), (CHOICES, BATCH, LENGTH)]),
    ("choices", "position_ids", [(BATCH, CHOICES, LENGTH - 1)]),
    ("seq2seq", "attention_mask", [(BATCH, LENGTH), (2, SOURCE)]),
    ("seq2seq", "decoder_attention_mask", [(BATCH, SOURCE), (2, LENGTH)]),
    ("seq2seq", "labels", [(BATCH,), (1, BATCH, LENGTH), (2, LENGTH), (BATCH, LENGTH - 1)]),
    ("seq2seq", "encoder_outputs", [(BATCH, SOURCE, WIDTH - 1)]),
]


@pytest.mark.parametrize(
    ("model", "name", "shape"), [(model, name, shape) for model, name, shapes in SHAPES for shape in shapes]
)
def test_an_invalid_shape_is_refused(model, name, shape, models):
    arguments = dict(VALID[model])
    is_floating = name in ("inputs_embeds", "encoder_hidden_states", "encoder_outputs")
    value = torch.randn(shape) if is_floating else ids(*shape) if shape else torch.tensor(3)
    if name == "attention_mask":
        value = value.bool()
    if name in ("inputs_embeds", "encoder_outputs"):
        del arguments["input_ids"]
    arguments[name] = (value,) if name == "encoder_outputs" else value
    mentioned = name.removeprefix("decoder_")  # the decoder's own name for its argument
    assert_refused(models[model], arguments, mentioned)


@pytest.mark.parametrize("name", TABLES)
def test_ids(name, models):
    model, size = models["encoder"], TABLES[name]
    for bad in (-1, size):
        value = ids()
        value[1, 2] = bad
        assert_refused(model, {"input_ids": ids(), name: value}, f"{name} contains {bad};")
    for dtype in (torch.float32, torch.bool, torch.int16, torch.uint8):
        assert_refused(model, {"input_ids": ids(), name: ids().to(dtype)}, name)
    value = torch.full((BATCH, LENGTH), size - 1)
    results = [model(**{"input_ids": ids(), name: value.to(dtype)}) for dtype in (torch.long, torch.int)]
    assert torch.equal(results[0].last_hidden_state, results[1].last_hidden_state)


ROWS = [[1] * LENGTH] * BATCH
TOO_LONG = ids(BATCH, LIMIT + 1)
EMBEDDINGS = torch.randn(BATCH, LENGTH, WIDTH)
# Model, arguments, what the error names, and its type if it is no ValueError.
CALLS = [
    ("encoder", {"input_ids": None}, "input_ids and inputs_embeds"),
    ("encoder", {"inputs_embeds": EMBEDDINGS}, "input_ids and inputs_embeds"),
    ("choices", {"input_ids": None}, "input_ids and inputs_embeds"),
    ("choices", {"inputs_embeds": torch.randn(BATCH, CHOICES, LENGTH, WIDTH)}, "input_ids and inputs_embeds"),
    ("encoder", {"encoder_hidden_states": EMBEDDINGS}, "encoder_hidden_states"),
    ("masked LM", {"encoder_hidden_states": EMBEDDINGS}, "encoder_hidden_states"),
    ("encoder", {"input_ids": ROWS}, "input_ids is a list"),
    ("encoder", {"attention_mask": ROWS}, "attention_mask is a list"),
    ("encoder", {"attention_mask": torch.ones(BATCH, LENGTH).numpy()}, "attention_mask is a ndarray"),
    ("encoder", {"token_type_ids": ROWS}, "token_type_ids is a list"),
    ("encoder", {"input_ids": None, "inputs_embeds": ROWS}, "inputs_embeds is a list"),
    ("encoder", {"input_ids": None, "inputs_embeds": EMBEDDINGS.long()}, "inputs_embeds has dtype"),
    ("choices", {"input_ids": [ROWS]}, "input_ids is a list"),
    ("choices", {"attention_mask": [ROWS]}, "attention_mask is a list"),
    ("decoder", {"encoder_hidden_states": ROWS}, "encoder_hidden_states is a list"),
    ("encoder", {"attention_mask": ids(BATCH, 1, LENGTH, LENGTH)}, "attention_mask has dtype"),
    ("encoder", {"input_ids": TOO_LONG}, f"max_position_embeddings is {LIMIT}"),
    ("encoder", {"input_ids": None, "inputs_embeds": torch.randn(1, LIMIT + 1, WIDTH)}, "max_position_embeddings"),
    ("choices", {"input_ids": TOO_LONG[None]}, "max_position_embeddings"),
    ("seq2seq", {"decoder_input_ids": TOO_LONG}, "max_position_embeddings"),
    ("seq2seq", {"decoder_input_ids": None}, "decoder_input_ids and decoder_inputs_embeds"),
    ("seq2seq", {"decoder_input_ids": None, "labels": 99 * ids()}, "input_ids contains 99"),
    ("seq2seq", {"decoder_input_ids": None, "labels": ids(2, LENGTH)}, "encoder_hidden_states"),
    ("without padding id", {"decoder_input_ids": None, "labels": -100 * ids()}, "config.pad_token_id"),
    ("masked LM", {"labels": 99 * ids()}, "Target 99 is out of bounds", IndexError),
    ("classifier", {"labels": ids(2)}, "batch_size"),
]


@pytest.mark.parametrize("call", CALLS, ids=lambda call: f"{call[0]}, {', '.join(call[1])}")
def test_an_invalid_call_is_refused(call, models):
    model, arguments, *expected = call
    assert_refused(models[model], VALID[model] | arguments, *expected)


def test_positions_are_counted_from_the_cache(models):
    decoder, width = models["decoder"], WIDTH // 4
    cache = getattr(decoder(ids(BATCH, LIMIT - 2), use_cache=True), CACHE)
    assert_refused(decoder, {"input_ids": ids(BATCH, 3), CACHE: cache}, f"{LIMIT - 2} in the cache")
    for length in (3, LIMIT - 1, LIMIT + 1):
        arguments = {"input_ids": ids(BATCH, 2), "attention_mask": ids(BATCH, length), CACHE: cache}
        assert_refused(decoder, arguments, "attention_mask")
    decoder(ids(BATCH, 2), ids(BATCH, LIMIT), **{CACHE: cache})
    prefix = DynamicCache()
    prefix.update(torch.randn(BATCH, 4, LIMIT - 4, width), torch.randn(BATCH, 4, LIMIT - 4, width), 0)
    assert_refused(models["encoder"], {"input_ids": ids(), CACHE: prefix}, f"{LIMIT - 4} in the cache")


def test_a_sequence_of_any_length_with_its_own_positions(models):
    reference, tokens = BertModel(BertConfig(**SIZES)), ids(2, LIMIT + 20)
    positions = torch.arange(LIMIT + 20)[None] % LIMIT
    shapes = [model(tokens, position_ids=positions)[0].shape for model in (models["encoder"], reference)]
    assert shapes == [(2, LIMIT + 20, WIDTH)] * 2


def test_word_embeddings_may_be_any_module():
    """Adapters replace them: what stands there must be callable, and need not have a size."""
    model = make()
    expected = model(ids()).last_hidden_state
    model.embeddings.word_embeddings = nn.Sequential(model.embeddings.word_embeddings)
    assert_close(model(ids()).last_hidden_state, expected, rtol=0, atol=0)


# Configurations


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_attention_heads", 5),
        ("hidden_act", "glue"),
        ("position_embedding_type", "relative_key"),
        ("max_position_embeddings", 0),
        ("_attn_implementation", "sdap"),
    ],
)
def test_a_field_that_was_set_later_is_checked(field, value):
    config = ScratchBertConfig(**SIZES)
    setattr(config, field, value)
    with pytest.raises(ValueError, match=field.removeprefix("_")):
        ScratchBertModel(config)


def test_an_unknown_attention_is_refused_while_loading_and_later(tmp_path):
    model = make()
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="attn_implementation"):
        ScratchBertModel.from_pretrained(tmp_path, attn_implementation="sdap")
    with pytest.raises(ValueError, match="attn_implementation"):
        model.set_attn_implementation("sdap")
    assert model.config._attn_implementation == "sdpa"
    model(ids())


@since("5.10", "the configuration accepts any problem_type")
def test_an_unknown_problem_type_is_refused():
    model = ScratchBertForSequenceClassification(ScratchBertConfig(**SIZES, problem_type="regresion"))
    assert_refused(model, {"input_ids": ids(), "labels": torch.rand(BATCH, 2)}, "problem_type")


# What the checks must not do


class TensorElsewhere(torch.Tensor):
    """A tensor as an accelerator's: its shape and dtype can be read, its values only by waiting for the device."""

    @staticmethod
    def __new__(cls, value):
        return torch.Tensor._make_wrapper_subclass(cls, value.shape, dtype=value.dtype, device="cuda:0")

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        raise AssertionError(f"{function} would run on the device")


def test_checks_do_not_wait_for_a_device(models):
    """The first operation is the lookup of the ids."""
    bad = TensorElsewhere(-5 * ids())
    arguments = {"input_ids": bad, "token_type_ids": bad, "position_ids": bad}
    assert_refused(models["encoder"], arguments, "aten.embedding", AssertionError)
    short = TensorElsewhere(ids(BATCH, 2))
    for name in ("token_type_ids", "position_ids", "attention_mask"):
        assert_refused(models["encoder"], arguments | {name: short}, name)
    assert_refused(models["encoder"], {"input_ids": TensorElsewhere(TOO_LONG)}, "max_position_embeddings")
    assert_refused(models["encoder"], {"input_ids": TensorElsewhere(EMBEDDINGS[..., 0])}, "input_ids")


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_tensors_without_values(attention):
    """Under a fake mode each read of a value raises."""
    with FakeTensorMode():
        model = make(attn_implementation=attention)
        tokens = torch.full((BATCH, LENGTH), 500)
        output = model(tokens, torch.ones_like(tokens), token_type_ids=tokens, position_ids=tokens)
        assert output.last_hidden_state.shape == (BATCH, LENGTH, WIDTH)
        assert_refused(model, {"input_ids": tokens, "attention_mask": tokens[:, 1:]}, "attention_mask")
        assert_refused(model, {"input_ids": tokens.repeat(1, 9)}, "max_position_embeddings")
