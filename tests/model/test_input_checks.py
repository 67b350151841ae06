"""Bad input: an error that names the argument, what it got and what it wants; and no check that costs an accelerator
anything or that breaks a trace."""

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing import assert_close
from transformers import BertConfig, DynamicCache

import modeling_scratchbert
from modeling_scratchbert import (
    ScratchBertConfig,
    ScratchBertForMaskedLM,
    ScratchBertForMultipleChoice,
    ScratchBertForSequenceClassification,
    ScratchBertModel,
)
from modeling_scratchbert.input_checks import check_inputs, check_mask
from support.models import HEADS, TINY
from support.refusals import assert_mentions, refusal
from support.versions import since

SIZES = {**TINY, "num_hidden_layers": 1, "type_vocab_size": 3}
BATCH, CHOICES, LENGTH, WIDTH = 3, 2, 5, 32
# What may hold ids, how many rows its table has, and the configuration's name for that number.
TABLES = {
    "input_ids": (99, "vocab_size"),
    "token_type_ids": (3, "type_vocab_size"),
    "position_ids": (40, "max_position_embeddings"),
}


def ids(*shape, high=99):
    return torch.randint(0, high, shape or (BATCH, LENGTH))


@pytest.fixture(scope="module")
def model():
    return ScratchBertModel(ScratchBertConfig(**SIZES)).eval()


@pytest.fixture(scope="module")
def decoder():
    return ScratchBertModel(ScratchBertConfig(**SIZES, is_decoder=True, add_cross_attention=True)).eval()


@pytest.fixture(scope="module")
def multiple_choice():
    return ScratchBertForMultipleChoice(ScratchBertConfig(**SIZES)).eval()


def says(message, *parts):
    """The message names everything that helps: the argument, what it got, what it wants."""
    assert_mentions(message, *parts)
    assert message.endswith("."), message


# Ids


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize("bad", ["too high", -1, 2**63 - 1, -(2**63)])
def test_an_id_outside_its_table_is_named(model, name, bad):
    size, field = TABLES[name]
    value = size if bad == "too high" else bad
    arguments = {"input_ids": ids()} | {name: ids(high=size)}
    arguments[name][1, 2] = value
    says(refusal(model, **arguments), name, value, f"0 to {size - 1}", f"{field} is {size}")
    arguments[name][1, 2] = size - 1
    model(**arguments)


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16, torch.bool, torch.complex64, torch.int16, torch.int8, torch.uint8]
)
def test_ids_of_a_type_that_no_table_takes_are_refused(model, name, dtype):
    arguments = {"input_ids": ids()} | {name: torch.ones(BATCH, LENGTH).to(dtype)}
    says(refusal(model, **arguments), name, dtype, "torch.long")


def test_both_types_that_a_table_takes_are_taken(model):
    arguments = {"input_ids": ids(), "token_type_ids": ids(high=3), "position_ids": ids(high=40)}
    long = model(**arguments).last_hidden_state
    short = model(**{name: value.int() for name, value in arguments.items()}).last_hidden_state
    assert_close(short, long, rtol=0, atol=0)


@settings(max_examples=30)
@given(st.integers(1, 4), st.integers(1, 40), st.integers(0, 2**32 - 1))
def test_no_batch_of_good_ids_is_refused(model, batch, length, seed):
    generator = torch.Generator().manual_seed(seed)
    tokens, types, positions = (torch.randint(0, high, (batch, length), generator=generator) for high in (99, 3, 40))
    mask = torch.rand(batch, length, generator=generator) > 0.3
    output = model(tokens, mask, types, positions).last_hidden_state
    assert output.shape == (batch, length, WIDTH)
    assert output.isfinite().all()


# Which arguments


@pytest.mark.parametrize("head", HEADS)
def test_neither_or_both_of_ids_and_embeddings_are_refused_in_every_head(head):
    model = getattr(modeling_scratchbert, f"ScratchBert{head}")(ScratchBertConfig(**SIZES))
    shape = (BATCH, CHOICES, LENGTH) if head == "ForMultipleChoice" else (BATCH, LENGTH)
    says(refusal(model), "input_ids", "inputs_embeds", "exactly one", "got neither")
    both = {"input_ids": ids(*shape), "inputs_embeds": torch.randn(*shape, WIDTH)}
    says(refusal(model, **both), "input_ids", "inputs_embeds", "exactly one", "got both")


def test_what_an_encoder_cannot_use_is_refused(model):
    message = refusal(model, ids(), encoder_hidden_states=torch.randn(BATCH, 4, WIDTH))
    says(message, "encoder_hidden_states", "config.add_cross_attention is False")
    says(message, "is_decoder=True", "add_cross_attention=True")
    masked = ScratchBertForMaskedLM(ScratchBertConfig(**SIZES))
    assert refusal(masked, ids(), encoder_hidden_states=torch.randn(BATCH, 4, WIDTH)) == message


# Shapes


@pytest.mark.parametrize("shape", [(), (LENGTH,), (1, BATCH, LENGTH)])
def test_ids_of_another_rank_are_refused(model, shape):
    says(refusal(model, ids(*shape) if shape else torch.tensor(3)), "input_ids", shape, "(batch, length)")


@pytest.mark.parametrize("shape", [(WIDTH,), (LENGTH, WIDTH), (BATCH, LENGTH, WIDTH - 1), (1, BATCH, LENGTH, WIDTH)])
def test_embeddings_of_another_shape_are_refused(model, shape):
    message = refusal(model, inputs_embeds=torch.randn(shape))
    says(message, "inputs_embeds", shape, f"(batch, length, {WIDTH})")


@pytest.mark.parametrize("given_as", ["input_ids", "inputs_embeds"])
@pytest.mark.parametrize("name", ["token_type_ids", "position_ids"])
@pytest.mark.parametrize(
    "shape",
    [(LENGTH,), (BATCH, 1), (BATCH, LENGTH - 1), (BATCH, LENGTH + 1), (2, LENGTH), (LENGTH, BATCH), (1, BATCH, LENGTH)],
)
def test_token_types_and_positions_of_another_shape_are_refused(model, name, shape, given_as):
    tokens = {"input_ids": ids()} if given_as == "input_ids" else {"inputs_embeds": torch.randn(BATCH, LENGTH, WIDTH)}
    says(refusal(model, **tokens, **{name: ids(*shape, high=3)}), name, shape, (BATCH, LENGTH))


@pytest.mark.parametrize(
    "shape",
    [
        (LENGTH,),
        (1, LENGTH),
        (BATCH, 1),
        (BATCH, LENGTH + 1),
        (LENGTH, BATCH),
        (BATCH, LENGTH, LENGTH),
        (2, 1, LENGTH, LENGTH),
        (BATCH, 1, LENGTH, LENGTH + 1),
        (BATCH, 1, 2, LENGTH),
        (BATCH, 3, LENGTH, LENGTH),  # the model has 4 heads
        (1, BATCH, 1, LENGTH, LENGTH),
    ],
)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_mask_of_another_shape_is_refused(shape, attention):
    model = ScratchBertModel(ScratchBertConfig(**SIZES, attn_implementation=attention))
    message = refusal(model, ids(), torch.ones(shape, dtype=torch.bool))
    says(message, "attention_mask", shape, (BATCH, LENGTH))
    if len(shape) != 2:
        says(message, (BATCH, 1, LENGTH, LENGTH), "full mask")


@pytest.mark.parametrize(
    "shape", [(BATCH, 1, LENGTH, LENGTH), (1, 1, LENGTH, LENGTH), (BATCH, 4, LENGTH, LENGTH), (BATCH, 1, 1, LENGTH)]
)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_full_mask_is_taken_and_obeyed(shape, attention):
    model = ScratchBertModel(ScratchBertConfig(**SIZES, attn_implementation=attention)).eval()
    tokens = ids()
    mask = torch.ones(shape, dtype=torch.bool)
    mask[..., -1] = False
    output = model(tokens, mask).last_hidden_state
    padding = torch.tensor([[1] * (LENGTH - 1) + [0]] * BATCH)
    padded = model(tokens, padding).last_hidden_state
    assert_close(output, padded, rtol=0, atol=1e-5)
    additive = torch.zeros(shape).masked_fill(~mask, torch.finfo(torch.float32).min)
    assert_close(model(tokens, additive).last_hidden_state, output, rtol=0, atol=1e-5)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_full_mask_of_whole_numbers_is_refused_not_added(attention):
    """sdpa says so itself; the formula would add 1 to the score of what may be seen, and hide nothing."""
    model = ScratchBertModel(ScratchBertConfig(**SIZES, attn_implementation=attention))
    mask = torch.ones(BATCH, 1, LENGTH, LENGTH, dtype=torch.long)
    mask[..., -1] = 0
    message = refusal(model, ids(), mask, error=(ValueError, RuntimeError))
    says(message, "attention_mask", "torch.int64", "bool")


def test_what_goes_with_the_encoders_output_is_checked_too(decoder):
    encoded = torch.randn(BATCH, 4, WIDTH)
    for shape in ((BATCH, LENGTH), (2, 4), (4,), (BATCH, 1, 4), (BATCH, 1, LENGTH, 3), (BATCH, 1, 2, 4)):
        message = refusal(decoder, ids(), encoder_hidden_states=encoded, encoder_attention_mask=torch.ones(shape))
        says(message, "encoder_attention_mask", shape, (BATCH, 4))
    decoder(ids(), encoder_hidden_states=encoded, encoder_attention_mask=torch.ones(BATCH, 4))


@pytest.mark.parametrize("shape", [(4, WIDTH), (BATCH, 4, WIDTH - 1), (2, 4, WIDTH), (1, BATCH, 4, WIDTH)])
def test_an_encoders_output_of_another_shape_is_refused(decoder, shape):
    says(refusal(decoder, ids(), encoder_hidden_states=torch.randn(shape)), "encoder_hidden_states", shape, WIDTH)


def test_a_mask_counts_the_cached_tokens(decoder):
    cache = decoder(ids(), use_cache=True).past_key_values
    for length in (1, LENGTH, LENGTH + 2):
        message = refusal(decoder, ids(BATCH, 1), torch.ones(BATCH, length), past_key_values=cache)
        says(message, "attention_mask", (BATCH, length), (BATCH, LENGTH + 1), f"{LENGTH} cached", "1 new")
    decoder(ids(BATCH, 1), torch.ones(BATCH, LENGTH + 1), past_key_values=cache)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("input_ids", (BATCH, LENGTH)),
        ("inputs_embeds", (BATCH, LENGTH, WIDTH)),
        ("attention_mask", (BATCH, LENGTH)),
        ("attention_mask", (LENGTH,)),
        ("attention_mask", (BATCH, CHOICES, LENGTH + 1)),
        ("attention_mask", (BATCH, CHOICES + 1, LENGTH)),
        ("attention_mask", (CHOICES, BATCH, LENGTH)),  # as many rows, but other ones
        ("token_type_ids", (BATCH, LENGTH)),
        ("token_type_ids", (CHOICES, BATCH, LENGTH)),
        ("position_ids", (BATCH, CHOICES, LENGTH - 1)),
    ],
)
def test_choices_of_another_shape_are_refused_in_the_callers_own_shapes(multiple_choice, name, shape):
    tokens = {"input_ids": ids(BATCH, CHOICES, LENGTH)}
    if name == "inputs_embeds":
        tokens = {}
    value = torch.randn(shape) if name == "inputs_embeds" else torch.ones(shape, dtype=torch.long)
    message = refusal(multiple_choice, **(tokens | {name: value}))
    wants = "choices" if name.startswith("input") else (BATCH, CHOICES, LENGTH)
    says(message, name, shape, wants)


def test_a_batch_without_tokens_fails_as_the_reference_does(model):
    reference = transformers.BertModel(BertConfig(**SIZES))
    for empty in (ids()[:0], ids()[:, :0]):
        for either in (model, reference):
            with pytest.raises((RuntimeError, ValueError, IndexError)):
                either(empty)


# Lengths


@pytest.mark.parametrize("head", HEADS)
def test_a_sequence_that_is_too_long_is_refused_with_the_way_to_truncate_it(head):
    model = getattr(modeling_scratchbert, f"ScratchBert{head}")(ScratchBertConfig(**SIZES)).eval()
    choices = (CHOICES,) if head == "ForMultipleChoice" else ()
    message = refusal(model, ids(BATCH, *choices, 41))
    says(message, "41 tokens", "max_position_embeddings is 40", "truncation=True", "max_length=40")
    assert refusal(model, inputs_embeds=torch.randn(BATCH, *choices, 41, WIDTH)) == message
    model(ids(BATCH, *choices, 40))


def test_a_long_sequence_with_positions_of_its_own_is_taken_like_by_the_reference():
    reference = transformers.BertModel(BertConfig(**SIZES)).eval()
    tokens, positions = ids(2, 60), torch.arange(60)[None] % 40
    model = ScratchBertModel(ScratchBertConfig(**SIZES)).eval()
    assert model(tokens, position_ids=positions).last_hidden_state.shape == (2, 60, WIDTH)
    assert reference(tokens, position_ids=positions).last_hidden_state.shape == (2, 60, WIDTH)


def test_the_cache_counts_towards_the_length(decoder):
    cache = decoder(ids(BATCH, 38), use_cache=True).past_key_values
    message = refusal(decoder, ids(BATCH, 3), past_key_values=cache)
    says(message, "3 tokens", "38 in the cache", "max_position_embeddings is 40")
    decoder(ids(BATCH, 2), past_key_values=cache)


def test_an_encoders_prefix_counts_towards_the_length(model):
    cache = DynamicCache()
    cache.update(torch.randn(BATCH, 4, 36, 8), torch.randn(BATCH, 4, 36, 8), 0)
    says(refusal(model, ids(), past_key_values=cache), "5 tokens", "36 in the cache", "40")


# Labels: torch's own errors, which must come, and at the step that is at fault


@pytest.mark.parametrize("label", [99, -1])
def test_a_label_outside_the_vocabulary_fails_on_the_cpu(label):
    model = ScratchBertForMaskedLM(ScratchBertConfig(**SIZES))
    with pytest.raises(IndexError, match=f"Target {label} is out of bounds"):
        model(ids(), labels=torch.full((BATCH, LENGTH), label))


def test_labels_that_do_not_fit_the_batch_fail():
    model = ScratchBertForSequenceClassification(ScratchBertConfig(**SIZES))
    with pytest.raises(ValueError, match=r"Expected input batch_size \(3\) to match target batch_size \(2\)"):
        model(ids(), labels=torch.zeros(2, dtype=torch.long))


# The configuration


@pytest.mark.parametrize("way", ["assignment", "from_pretrained"])
@pytest.mark.parametrize(
    ("field", "value", "parts"),
    [
        (
            "num_attention_heads",
            5,
            ("hidden_size", 32, "num_attention_heads", 5, "multiple", "num_attention_heads (5)"),
        ),
        ("hidden_act", "glue", ("hidden_act", "'glue'", "gelu", "relu")),
        ("position_embedding_type", "relative_key", ("position_embedding_type", "'relative_key'", "'absolute'")),
        ("max_position_embeddings", 0, ("max_position_embeddings", 0, "at least 1")),
    ],
)
def test_a_model_that_cannot_be_is_refused_however_the_field_came_in(field, value, parts, way, tmp_path):
    """`from_pretrained(…, field=value)` sets fields of a configuration that stands already, as users do too."""
    if way == "assignment":
        config = ScratchBertConfig(**SIZES)
        setattr(config, field, value)
        message = refusal(ScratchBertModel, config)
    else:
        ScratchBertModel(ScratchBertConfig(**SIZES)).save_pretrained(tmp_path)
        message = refusal(ScratchBertModel.from_pretrained, tmp_path, **{field: value})
    says(message, *parts)


@since("5.10", "the configuration accepts any problem_type")
def test_an_unknown_problem_is_refused_not_taken_for_another():
    config = ScratchBertConfig(**SIZES, problem_type="regresion")
    model = ScratchBertForSequenceClassification(config)
    says(refusal(model, ids(), labels=torch.rand(BATCH, 2)), "problem_type", "'regresion'", "regression")


def test_an_unknown_attention_is_refused_wherever_it_is_named(model, tmp_path):
    fields = {**SIZES, "attn_implementation": "sdap"}
    model.save_pretrained(tmp_path)
    for message in (
        refusal(ScratchBertModel, ScratchBertConfig(**fields)),
        refusal(ScratchBertModel.from_pretrained, tmp_path, attn_implementation="sdap"),
        refusal(model.set_attn_implementation, "sdap"),
    ):
        says(message, "attn_implementation", "sdap", "eager", "sdpa", "flex_attention")
    assert model.config._attn_implementation == "sdpa"
    model(ids())


# What the checks must not do


class Elsewhere(torch.Tensor):
    """A tensor as an accelerator's: its shape and type can be asked, its values only by waiting for the device."""

    @staticmethod
    def __new__(cls, value):
        return torch.Tensor._make_wrapper_subclass(cls, value.shape, dtype=value.dtype, device="cuda:0")

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        raise AssertionError(f"{function} would run on the device")


def check(config=None, past_length=0, **given):
    config = config or ScratchBertConfig(**SIZES)
    tables = {name: given.get(name) for name in TABLES}
    check_inputs(
        config, tables, given.get("inputs_embeds"), given.get("attention_mask"), config.vocab_size, past_length
    )


def test_checks_never_wait_for_a_device():
    bad = Elsewhere(torch.full((BATCH, LENGTH), -5))
    check(input_ids=bad, token_type_ids=bad, position_ids=bad, attention_mask=bad)
    check(inputs_embeds=Elsewhere(torch.randn(BATCH, LENGTH, WIDTH)), attention_mask=bad)
    with pytest.raises(AssertionError, match="would run on the device"):
        bad.min()  # the stand-in itself does what it should
    # Shapes are known without asking the device, and are checked there too.
    says(refusal(check, input_ids=bad, attention_mask=Elsewhere(torch.ones(BATCH, 2))), "attention_mask", (BATCH, 2))
    says(refusal(check, input_ids=Elsewhere(torch.ones(BATCH, 41, dtype=torch.long))), "41 tokens", "truncation=True")
    says(refusal(check, input_ids=Elsewhere(torch.ones(BATCH, LENGTH))), "input_ids", "torch.float32")
    says(refusal(check, inputs_embeds=Elsewhere(torch.ones(BATCH, LENGTH))), "inputs_embeds", (BATCH, LENGTH))
    says(
        refusal(check, input_ids=bad, token_type_ids=Elsewhere(torch.ones(BATCH, 2, dtype=torch.long))),
        "token_type_ids",
        (BATCH, 2),
    )


def test_checks_leave_tensors_without_values_alone(monkeypatch):
    asked = []
    monkeypatch.setattr(torch.Tensor, "item", lambda tensor: asked.append(tensor))
    monkeypatch.setattr(torch.Tensor, "aminmax", lambda tensor: asked.append(tensor))
    bad = torch.full((BATCH, LENGTH), -5)
    with FakeTensorMode() as mode:
        fake = mode.from_tensor(bad)
    for tensor in (bad.to("meta"), fake):
        check(input_ids=tensor, token_type_ids=tensor, position_ids=tensor, attention_mask=tensor)
        says(refusal(check, input_ids=tensor, position_ids=tensor[:, 1:]), "position_ids")
    assert asked == []


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_model_runs_on_fake_tensors(attention):
    config = ScratchBertConfig(**SIZES, attn_implementation=attention)
    with FakeTensorMode():
        model = ScratchBertModel(config).eval()
        tokens = torch.full((BATCH, LENGTH), 500)
        output = model(tokens, torch.ones_like(tokens), token_type_ids=tokens, position_ids=tokens)
        assert output.last_hidden_state.shape == (BATCH, LENGTH, WIDTH)
        says(refusal(model, tokens, torch.ones(BATCH, 2)), "attention_mask")
        says(refusal(model, torch.full((BATCH, 41), 5)), "41 tokens")


def test_the_kernels_own_mask_objects_and_tensor_lengths_are_left_to_them():
    check_mask("attention_mask", None, BATCH, 4, LENGTH, LENGTH)
    check_mask("attention_mask", object(), BATCH, 4, LENGTH, LENGTH)
    check_mask("attention_mask", torch.ones(BATCH, 9), BATCH, 4, LENGTH, torch.tensor(LENGTH))


def test_checks_change_no_argument(model):
    arguments = {
        "input_ids": ids(),
        "attention_mask": torch.ones(BATCH, LENGTH),
        "token_type_ids": ids(high=3),
        "position_ids": ids(high=40),
    }
    before = {name: value.clone() for name, value in arguments.items()}
    model(**arguments)
    for name, value in arguments.items():
        assert_close(value, before[name], rtol=0, atol=0)


def test_a_module_in_place_of_the_word_embeddings_is_not_asked_for_a_size():
    """As adapters do it: whatever stands there must be callable, no more."""
    model = ScratchBertModel(ScratchBertConfig(**SIZES)).eval()
    tokens = ids()
    expected = model(tokens).last_hidden_state
    model.embeddings.word_embeddings = nn.Sequential(model.embeddings.word_embeddings)
    assert_close(model(tokens).last_hidden_state, expected, rtol=0, atol=0)


def test_what_is_no_tensor_is_named(model, multiple_choice, decoder):
    rows = [[1] * LENGTH] * BATCH
    for name in ("attention_mask", "token_type_ids", "position_ids"):
        says(refusal(model, ids(), **{name: rows}), f"{name} is a list", "tensor")
    says(refusal(model, ids(), torch.ones(BATCH, LENGTH).numpy()), "attention_mask is a ndarray", "tensor")
    says(refusal(model, rows), "input_ids is a list", "return_tensors='pt'")
    says(refusal(model, inputs_embeds=[rows]), "inputs_embeds is a list", "tensor")
    says(refusal(model, inputs_embeds=torch.ones(BATCH, LENGTH, WIDTH, dtype=torch.long)), "inputs_embeds", "int64")
    says(refusal(multiple_choice, [rows]), "input_ids is a list", "tensor")
    says(refusal(multiple_choice, ids(BATCH, CHOICES, LENGTH), [rows]), "attention_mask is a list", "tensor")
    says(refusal(decoder, ids(), encoder_hidden_states=[rows]), "encoder_hidden_states is a list", "tensor")
