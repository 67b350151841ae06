"""A model with an encoder and a decoder has the outputs and gradients of `EncoderDecoderModel`, and the arguments and
labels of BART."""

import inspect
from itertools import pairwise

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import cross_entropy
from torch.testing import assert_close
from transformers import BartForConditionalGeneration, DynamicCache, EncoderDecoderCache, EncoderDecoderModel
from transformers.modeling_outputs import BaseModelOutput, Seq2SeqLMOutput, Seq2SeqModelOutput
from transformers.models.bart.modeling_bart import shift_tokens_right

from modeling_scratchbert import ScratchBertForConditionalGeneration, ScratchBertSeq2SeqModel
from modeling_scratchbert.bert.names import to_scratchbert
from modeling_scratchbert.versions import CACHE
from support.comparison import TOLERANCE, assert_same_gradients, assert_same_tensors, flat
from support.models import NO_DROPOUT, SPECIAL, TINY, inputs_for, random_encoder_decoder, random_scratchbert
from support.versions import since

START, END, PAD = SPECIAL.values()

B, S, T = 4, 9, 6  # 4 sources of up to 9 words, 4 targets of up to 6
ALL_OUTPUTS = {"output_hidden_states": True, "output_attentions": True}

attentions = pytest.mark.parametrize("attention", ["eager", "sdpa"])


@pytest.fixture
def model():
    return random_scratchbert("ForConditionalGeneration", **NO_DROPOUT, **SPECIAL)


@pytest.fixture(scope="module")
def references(tmp_path_factory):
    """Makes an `EncoderDecoderModel` and opens its folder in our class and in its own."""
    made = {}

    def make(attention="eager", layers=2, **fields):
        key = (layers, *fields.items())
        if key not in made:
            made[key] = tmp_path_factory.mktemp("two_berts")
            random_encoder_decoder(decoder={"num_hidden_layers": layers}, **fields).save_pretrained(made[key])
        classes = ScratchBertForConditionalGeneration, EncoderDecoderModel
        return [cls.from_pretrained(made[key], attn_implementation=attention) for cls in classes]

    return make


def draw_source():
    """Padding at either end and in the middle, and everything else that an encoder takes."""
    mask = torch.ones(B, S, dtype=torch.long)
    mask[0, :3] = 0
    mask[1, 5:] = 0
    mask[2, 2:4] = 0
    return {
        "input_ids": torch.randint(4, TINY["vocab_size"], (B, S)).masked_fill(mask == 0, PAD),
        "attention_mask": mask,
        "token_type_ids": torch.randint(0, 2, (B, S)),
        "position_ids": torch.randint(0, TINY["max_position_embeddings"], (B, S)),
    }


def draw_labels():
    """Targets of several lengths, with -100 behind them, and in one also between its words."""
    labels = torch.randint(4, TINY["vocab_size"], (B, T))
    labels[0, 1:3] = -100
    labels[1:, -2:] = -100
    labels[2, 1:] = -100
    return labels


def from_labels(reference):
    return {"labels": draw_labels(), "use_cache": False}


def from_ids(reference):
    mask = torch.ones(B, T, dtype=torch.long)
    mask[1, 3:] = 0
    ids = torch.randint(0, TINY["vocab_size"], (B, T))
    types, positions = torch.randint(0, 2, (B, T)), torch.randint(0, TINY["max_position_embeddings"], (B, T))
    inputs = {"input_ids": ids, "attention_mask": mask, "token_type_ids": types, "position_ids": positions}
    return {f"decoder_{name}": tensor for name, tensor in inputs.items()}


def from_ids_with_labels(reference):
    return from_ids(reference) | from_labels(reference)


def from_embeddings(reference):
    ids = from_ids(reference)["decoder_input_ids"]
    embeddings = reference.decoder.get_input_embeddings()(ids).detach()
    return {"decoder_inputs_embeds": embeddings + 0.1, **from_labels(reference)}


def gradients(model, inputs):
    """By our names. The pooler of `EncoderDecoderModel`, which is not used, has none."""
    model.zero_grad()
    outputs = model(**inputs)
    loss = outputs.loss
    if loss is None:
        loss = (outputs.logits * torch.linspace(-1, 1, outputs.logits.numel()).view_as(outputs.logits)).sum()
    loss.backward()
    kind = "encoder-decoder" if isinstance(model, EncoderDecoderModel) else "scratchbert"
    return {
        to_scratchbert(name, kind): parameter.grad
        for name, parameter in model.named_parameters()
        if not name.startswith("encoder.pooler.")
    }


# ---------------------------------------------------------------------------------------------------------------------
# Against the EncoderDecoderModel of two BERTs

reference_warnings = pytest.mark.filterwarnings("ignore:Version v4.12.0 introduces:FutureWarning")
SHAPES = [
    {"layers": 1},
    {"layers": 3},
    {"tie_word_embeddings": False},
    {"hidden_act": "relu", "layer_norm_eps": 1e-3},
    {"num_attention_heads": 1, "intermediate_size": 7, "num_hidden_layers": 1},
    {"type_vocab_size": 3, "vocab_size": 103},
]


@reference_warnings
@pytest.mark.parametrize(
    ("fields", "target"),
    [
        *(({}, target) for target in (from_labels, from_ids, from_ids_with_labels, from_embeddings)),
        *((fields, from_labels) for fields in SHAPES),
    ],
)
@attentions
def test_outputs_and_gradients_are_those_of_an_encoder_decoder_model(attention, fields, target, references):
    ours, reference = references(attention, **fields)
    inputs = draw_source() | target(reference)
    options = {"output_hidden_states": True, "output_attentions": attention == "eager"}
    mine, theirs = (model(**inputs, **options) for model in (ours, reference))
    assert type(mine) is type(theirs)
    assert list(mine) == list(theirs)
    assert_same_tensors(flat(mine), flat(theirs))
    assert_same_gradients(gradients(ours, inputs), gradients(reference, inputs))


def test_attention_weights_under_sdpa_are_those_of_eager(references):
    ours, eager = references("sdpa")[0], references("eager")[1]
    inputs = draw_source() | from_ids(eager)
    assert_same_tensors(*(flat(model(**inputs, output_attentions=True)) for model in (ours, eager)))


@attentions
def test_cached_steps_equal_the_whole(attention, references):
    """The source is read once: from the second step on, its keys come from the cache."""
    ours, reference = references(attention, layers=3)
    source, target = draw_source(), from_ids(reference)
    whole = ours(**source, **target, use_cache=False)
    encoded, caches = BaseModelOutput(whole.encoder_last_hidden_state), [None, None]
    for start, end in pairwise([0, 1, 3, T]):
        step = {name: tensor[:, start:end] for name, tensor in target.items()}
        step["decoder_attention_mask"] = target["decoder_attention_mask"][:, :end]
        step |= {"attention_mask": source["attention_mask"], "encoder_outputs": encoded, "use_cache": True}
        mine, theirs = (model(**step, **{CACHE: c}) for model, c in zip((ours, reference), caches, strict=True))
        caches = [getattr(mine, CACHE), getattr(theirs, CACHE)]
        assert type(caches[0]) is type(caches[1])
        for expected in (whole.logits[:, start:end], theirs.logits):
            assert_close(mine.logits, expected, rtol=0, atol=TOLERANCE)
        encoded = BaseModelOutput(torch.full_like(encoded.last_hidden_state, float("nan")))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@reference_warnings
def test_half_precision_is_as_exact_as_the_references(dtype, references):
    ours, reference = references("sdpa")
    inputs = draw_source() | from_labels(reference)
    with torch.no_grad():
        exact = reference.double()(**inputs).logits
        mine, theirs = (model.to(dtype)(**inputs) for model in (ours, reference))
    assert mine.logits.dtype == mine.loss.dtype == dtype
    assert (mine.logits - exact).abs().max() <= (theirs.logits - exact).abs().max()


# ---------------------------------------------------------------------------------------------------------------------
# Labels, as of BART


@settings(max_examples=30)
@given(length=st.integers(1, 6), start=st.integers(0, 98), pad=st.integers(0, 98), data=st.data())
def test_labels_are_shifted_as_bart_shifts_them(length, start, pad, data):
    row = st.lists(st.just(-100) | st.integers(0, 98), min_size=length, max_size=length)
    labels = torch.tensor(data.draw(st.lists(row, min_size=1, max_size=4)))
    model, before = random_scratchbert("ForConditionalGeneration", num_hidden_layers=0, **SPECIAL), labels.clone()
    model.config.decoder_start_token_id, model.config.pad_token_id = start, pad
    ids = model.prepare_decoder_input_ids_from_labels(labels=labels)
    assert torch.equal(ids, shift_tokens_right(labels, pad, start))
    assert torch.equal(labels, before)


def test_the_decoders_input_and_mask_follow_from_labels(model):
    source, labels = draw_source(), draw_labels()
    ids = model.prepare_decoder_input_ids_from_labels(labels)
    mask, ones = (ids != PAD).long(), torch.ones_like(ids)
    explicit, unmasked = (
        model(**source, labels=labels, decoder_input_ids=ids, decoder_attention_mask=each) for each in (mask, ones)
    )
    assert_same_tensors(flat(model(**source, labels=labels)), flat(explicit))
    assert_same_tensors(flat(model(**source, labels=labels, decoder_attention_mask=ones)), flat(unmasked))
    assert (unmasked.logits - explicit.logits).abs().max() > 1e-3
    assert_close(explicit.loss, cross_entropy(explicit.logits.flatten(0, 1), labels.flatten()))


def test_padding_of_labels_changes_neither_loss_nor_gradient(model):
    source, labels = draw_source(), draw_labels()
    labels[:, -2:] = -100
    short = labels[:, :-2]  # not contiguous
    assert_close(model(**source, labels=labels).loss, model(**source, labels=short).loss)
    assert_same_gradients(*(gradients(model, source | {"labels": each}) for each in (labels, short)))


@pytest.mark.parametrize("pad", [PAD, START, 57], ids=["padding id", "start id", "word"])
def test_the_derived_mask_hides_padding_but_not_the_start_token(model, pad):
    """Even where the start token is the padding token, as in T5."""
    model.config.pad_token_id = pad
    labels = torch.tensor([[11, -100, 12, 13, -100, -100]] * B)
    outputs = model(**draw_source(), labels=labels, output_attentions=True)
    for weights in outputs.decoder_attentions:
        assert not weights[:, :, 3:, 2].any()  # the place of -100
        assert (weights[:, :, :, 0] > 0).all()


def test_labels_after_cached_positions(model):
    """As PEFT's prefixes are: the mask that is derived from the labels counts them."""
    batch, prefixes = inputs_for("ForConditionalGeneration", labels=True), torch.randn(2, 2, 3, 4, 5, 8)

    def prefix():
        cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
        for layer, (keys, values) in enumerate(prefixes):
            cache.self_attention_cache.update(keys, values, layer)
        return {CACHE: cache}

    ids = model.prepare_decoder_input_ids_from_labels(batch["labels"])
    mask = torch.cat([torch.ones(3, 5).long(), (ids != PAD).long()], dim=1)
    derived = model(**batch, **prefix())
    explicit = model(**batch, decoder_input_ids=ids, decoder_attention_mask=mask, **prefix())
    assert torch.equal(derived.logits, explicit.logits)
    assert not torch.allclose(derived.logits, model(**batch).logits)


def test_labels_fill_no_cache(model):
    inputs = draw_source() | {"labels": draw_labels()}
    for use_cache in (None, True, False):
        assert CACHE not in model(**inputs, use_cache=use_cache)
    inputs["decoder_input_ids"] = inputs.pop("labels").clamp(min=0)
    assert getattr(model(**inputs), CACHE).get_seq_length() == T
    assert CACHE not in model(**inputs, use_cache=False)


# ---------------------------------------------------------------------------------------------------------------------
# Arguments and outputs, as of BART


@pytest.mark.parametrize(
    ("ours", "reference"),
    [
        (ScratchBertForConditionalGeneration, BartForConditionalGeneration),
        (ScratchBertSeq2SeqModel, transformers.BartModel),
    ],
)
def test_arguments_begin_with_barts(ours, reference):
    """A few of our own follow, so that a call by position means the same."""
    mine, theirs = (list(inspect.signature(cls.forward).parameters.values()) for cls in (ours, reference))
    for parameter, expected in zip(mine, theirs[:-1], strict=False):
        assert (parameter.name, parameter.kind, parameter.default) == (expected.name, expected.kind, expected.default)
    assert all(parameter.default in (None, 0) for parameter in mine[len(theirs) - 1 : -1])
    assert mine[-1].kind is inspect.Parameter.VAR_KEYWORD


@pytest.mark.parametrize("name", ["labels", "decoder_input_ids"])
@pytest.mark.parametrize("options", [{}, ALL_OUTPUTS], ids=["default", "all"])
def test_outputs_have_the_types_of_barts(model, name, options):
    names = ("encoder_layers", "decoder_layers", "encoder_ffn_dim", "decoder_ffn_dim")
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4}
    config = transformers.BartConfig(vocab_size=99, d_model=32, **heads, **dict.fromkeys(names, 2))
    bart = BartForConditionalGeneration._from_config(config, attn_implementation="eager").eval()
    inputs = {"input_ids": draw_source()["input_ids"], name: draw_labels().clamp(min=4), **options}
    mine, theirs = (either(**inputs) for either in (model, bart))
    assert type(mine) is type(theirs) is Seq2SeqLMOutput
    assert list(mine) == list(theirs)
    as_tuples = [either(**inputs, return_dict=False) for either in (model, bart)]
    assert [type(part) for part in as_tuples[0]] == [type(part) for part in as_tuples[1]]
    assert torch.equal(as_tuples[0][0], mine.to_tuple()[0])
    base = model.model(inputs["input_ids"], decoder_input_ids=inputs[name])
    assert type(base) is Seq2SeqModelOutput


def test_outputs_that_the_configuration_requests_come_from_encoder_and_decoder(model):
    for name in ALL_OUTPUTS:
        setattr(model.config, name, True)
    inputs = inputs_for("ForConditionalGeneration")
    counts = {name: len(value) for name, value in model(**inputs).items() if isinstance(value, tuple)}
    assert counts == {
        "encoder_hidden_states": 3,
        "encoder_attentions": 2,
        "decoder_hidden_states": 3,
        "decoder_attentions": 2,
        "cross_attentions": 2,
    }
    outputs = model(**inputs, **dict.fromkeys(ALL_OUTPUTS, False))
    assert list(outputs) == ["logits", CACHE, "encoder_last_hidden_state"]


FORMS = {
    "tuple": lambda outputs: (outputs.last_hidden_state,),
    "list": lambda outputs: [outputs.last_hidden_state],
    "the encoder's own": lambda outputs: outputs,
    "longer tuple": lambda outputs: (outputs.last_hidden_state, outputs.hidden_states, outputs.attentions),
}


@pytest.mark.parametrize("form", FORMS)
def test_encoder_outputs_replace_the_source(model, form):
    source, labels = draw_source(), draw_labels()
    expected = dict(model(**source, labels=labels, **ALL_OUTPUTS))
    encoder_outputs = FORMS[form](model.get_encoder()(**source, **ALL_OUTPUTS))
    model.get_encoder().register_forward_hook(lambda *_: pytest.fail("the encoder ran"))
    mask = source["attention_mask"]
    outputs = model(encoder_outputs=encoder_outputs, attention_mask=mask, labels=labels, **ALL_OUTPUTS)
    if form not in ("the encoder's own", "longer tuple"):
        del expected["encoder_hidden_states"], expected["encoder_attentions"]
    assert_same_tensors(flat(outputs), flat(expected))
    assert not torch.allclose(model(encoder_outputs=encoder_outputs, labels=labels).logits, outputs.logits, atol=1e-3)


@pytest.mark.parametrize("kept", [3, torch.tensor([0, 2])], ids=str)
def test_logits_to_keep(model, kept):
    inputs = draw_source() | {"decoder_input_ids": torch.randint(4, 99, (B, T))}
    chosen = kept if isinstance(kept, torch.Tensor) else slice(-kept, None)
    expected = model(**inputs).logits[:, chosen]
    assert_close(model(**inputs, logits_to_keep=kept).logits, expected, rtol=0, atol=1e-6)


def test_the_source_as_embeddings(model):
    inputs = draw_source() | {"labels": draw_labels()}
    expected = model(**inputs)
    inputs["inputs_embeds"] = model.get_input_embeddings()(inputs.pop("input_ids"))
    assert_same_tensors(flat(model(**inputs)), flat(expected))


@since("5.20", "set_attn_implementation reaches submodels with the same class of configuration")
def test_attention_is_set_for_encoder_and_decoder(model):
    for attention in ("eager", "sdpa"):
        model.set_attn_implementation(attention)
        parts = model, model.get_encoder(), model.get_decoder()
        assert {part.config._attn_implementation for part in parts} == {attention}
