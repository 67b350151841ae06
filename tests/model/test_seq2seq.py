"""An encoder with a decoder: the numbers of `EncoderDecoderModel`, the labels of BART, and tensors that are tied."""

import copy
import dataclasses
import inspect
import pickle
from collections import defaultdict
from itertools import pairwise, product

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from torch.nn.functional import cross_entropy
from transformers import BartForConditionalGeneration, DynamicCache, EncoderDecoderCache, EncoderDecoderModel
from transformers.modeling_outputs import BaseModelOutput, Seq2SeqLMOutput, Seq2SeqModelOutput
from transformers.models.bart.modeling_bart import shift_tokens_right

from modeling_scratchbert import (
    ScratchBertConfig,
    ScratchBertForCausalLM,
    ScratchBertForConditionalGeneration,
    ScratchBertForMaskedLM,
    ScratchBertModel,
    ScratchBertSeq2SeqModel,
)
from modeling_scratchbert.attention import MultiHeadAttention
from modeling_scratchbert.bert.names import to_scratchbert
from modeling_scratchbert.feed_forward import FeedForward
from modeling_scratchbert.versions import CACHE
from support.checkpoint_kinds import NOTHING, assert_same_outputs, config_json, logged_warnings
from support.comparison import TOLERANCE, assert_same_gradients, assert_same_tensors, flat
from support.models import NO_DROPOUT, SPECIAL, TINY, inputs_for, random_encoder_decoder, random_scratchbert
from support.refusals import assert_mentions, refusal
from support.unpadded import observed_shapes
from support.versions import checkpoint_activations, since

START, END, PAD = SPECIAL.values()

B, S, T = 4, 9, 6  # 4 sources of up to 9 words, 4 targets of up to 6

attentions = pytest.mark.parametrize("attention", ["eager", "sdpa"])


def random_seq2seq(head="ForConditionalGeneration", seed=0, **fields):
    """With large random weights; without dropout."""
    return random_scratchbert(head, seed, **{**NO_DROPOUT, **SPECIAL, **fields})


# ---------------------------------------------------------------------------------------------------------------------
# Against the EncoderDecoderModel of two BERTs


@pytest.fixture(scope="module")
def references(tmp_path_factory):
    """An `EncoderDecoderModel` as it was saved, and what our class opens in its folder; made once for each kind."""
    made = {}

    def make(attention="eager", layers=2, **fields):
        key = (layers, *fields.items())
        if key not in made:
            made[key] = tmp_path_factory.mktemp("two_berts")
            random_encoder_decoder(decoder={"num_hidden_layers": layers}, **fields).save_pretrained(made[key])
        return (
            ScratchBertForConditionalGeneration.from_pretrained(made[key], attn_implementation=attention),
            EncoderDecoderModel.from_pretrained(made[key], attn_implementation=attention),
        )

    return make


def draw_source(batch=B, length=S):
    """Padding at either end and in the middle, and everything else that an encoder takes."""
    ids = torch.randint(4, TINY["vocab_size"], (batch, length))
    mask = torch.ones(batch, length, dtype=torch.long)
    for row, (first, last) in enumerate(torch.randint(0, max(1, length // 2), (batch, 2)).tolist()):
        mask[row, :first] = 0
        mask[row, length - last :] = 0
    return {
        "input_ids": ids.masked_fill(mask == 0, PAD),
        "attention_mask": mask,
        "token_type_ids": torch.randint(0, 2, (batch, length)),
        "position_ids": torch.randint(0, TINY["max_position_embeddings"], (batch, length)),
    }


def draw_labels(batch=B, length=T):
    """Targets of several lengths, with -100 behind them, and in one also between its words."""
    labels = torch.randint(4, TINY["vocab_size"], (batch, length))
    lengths = torch.randint(1, length + 1, (batch, 1))
    labels[torch.arange(length) >= lengths] = -100
    labels[0] = torch.randint(4, TINY["vocab_size"], (length,))
    labels[0, 1 : length // 2] = -100
    return labels


def from_labels(reference):
    return {"labels": draw_labels(), "use_cache": False}


def from_ids(reference):
    mask = torch.ones(B, T, dtype=torch.long)
    mask[1, 3:] = 0
    ids = torch.randint(0, TINY["vocab_size"], (B, T))
    positions = torch.randint(0, TINY["max_position_embeddings"], (B, T))
    return {"decoder_input_ids": ids, "decoder_attention_mask": mask, "decoder_position_ids": positions}


def from_ids_with_labels(reference):
    return from_ids(reference) | from_labels(reference)


def from_embeddings(reference):
    ids = from_ids(reference).pop("decoder_input_ids")
    return {
        "decoder_inputs_embeds": reference.decoder.get_input_embeddings()(ids).detach() + 0.1,
        "labels": draw_labels(),
    }


TARGETS = (from_labels, from_ids, from_ids_with_labels, from_embeddings)


def seq2seq_gradients(model, inputs):
    """By our names; what is not used in either, the pooler of `EncoderDecoderModel`, has none."""
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


reference_warnings = pytest.mark.filterwarnings("ignore:Version v4.12.0 introduces:FutureWarning")


@reference_warnings
@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.__name__)
@pytest.mark.parametrize("layers", [1, 2, 3], ids="{} decoder layers".format)
@attentions
def test_outputs_and_gradients_are_those_of_an_encoder_decoder_model(attention, layers, target, references):
    ours, reference = references(attention, layers)
    inputs = draw_source() | target(reference)
    options = {"output_hidden_states": True, "output_attentions": attention == "eager"}
    if target is from_embeddings:
        options["use_cache"] = False  # which ours leaves out when it is given labels
    with torch.no_grad():
        mine, theirs = (model(**inputs, **options) for model in (ours, reference))
    assert type(mine) is type(theirs)
    assert list(mine) == list(theirs)
    assert_same_tensors(flat(mine), flat(theirs))
    assert_same_gradients(*(seq2seq_gradients(model, inputs) for model in (ours, reference)))


@reference_warnings
@pytest.mark.parametrize(
    "fields",
    [
        {"tie_word_embeddings": False},
        {"hidden_act": "relu", "layer_norm_eps": 1e-3},
        {"num_attention_heads": 1, "intermediate_size": 7, "num_hidden_layers": 1},
        {"type_vocab_size": 3, "vocab_size": 103},
    ],
    ids=str,
)
def test_other_shapes_of_two_berts(fields, references):
    ours, reference = references(**fields)
    inputs = draw_source() | from_labels(reference)
    options = {"output_hidden_states": True, "output_attentions": True}
    assert_same_tensors(*(flat(model(**inputs, **options)) for model in (ours, reference)))
    assert_same_gradients(*(seq2seq_gradients(model, inputs) for model in (ours, reference)))


@reference_warnings
@settings(max_examples=15)
@given(
    seed=st.integers(0, 10**6),
    batch=st.integers(1, 5),
    length=st.integers(1, 20),
    target=st.integers(1, 20),
    sdpa=st.booleans(),
)
def test_ragged_batches_of_any_size(references, seed, batch, length, target, sdpa):
    torch.manual_seed(seed)
    ours, reference = references("sdpa" if sdpa else "eager")
    inputs = draw_source(batch, length) | {"labels": draw_labels(batch, target), "use_cache": False}
    with torch.no_grad():
        assert_same_tensors(*(flat(model(**inputs, output_hidden_states=True)) for model in (ours, reference)))


@attentions
def test_attention_maps_are_true_whatever_attention_is_set(attention, references):
    ours, _ = references(attention)
    _, eager = references("eager")
    inputs = draw_source() | from_ids(eager)
    mine, theirs = (model(**inputs, output_attentions=True) for model in (ours, eager))
    assert_same_tensors(flat(mine), flat(theirs))
    real = inputs["attention_mask"].bool()[:, None, None, :]
    for weights in mine.cross_attentions:
        assert weights.shape == (B, 4, T, S)
        torch.testing.assert_close(weights.sum(dim=-1), torch.ones(B, 4, T), rtol=0, atol=1e-6)
        assert not weights[~real.expand_as(weights)].any()
    for weights in mine.decoder_attentions:
        assert not weights.triu(1).any()  # no word looks at a later one
    assert all(weights.triu(1).any() for weights in mine.encoder_attentions)


@pytest.mark.parametrize("asked_by", ["call", "config"])
def test_what_is_asked_for_is_returned_for_both_halves(asked_by):
    model = random_seq2seq(num_decoder_layers=3)
    inputs = inputs_for("ForConditionalGeneration", length=6)
    asked = {"output_hidden_states": True, "output_attentions": True}
    if asked_by == "config":
        for name, value in asked.items():
            setattr(model.config, name, value)
        outputs = model(**inputs)
        # The base model, which `model.model` is, goes by the same configuration
        assert len(model.model(**inputs).decoder_attentions) == 3
    else:
        outputs = model(**inputs, **asked)
    counts = {name: len(value) for name, value in outputs.items() if isinstance(value, tuple)}
    assert counts == {
        "encoder_hidden_states": 3,
        "encoder_attentions": 2,
        "decoder_hidden_states": 4,
        "decoder_attentions": 3,
        "cross_attentions": 3,
    }
    assert list(model(**inputs, output_hidden_states=False, output_attentions=False)) == [
        "logits",
        CACHE,
        "encoder_last_hidden_state",
    ]


@since("5.20", "set_attn_implementation reaches submodels with the same class of configuration")
def test_attention_is_set_for_both_halves(references):
    ours, _ = references("eager")

    def kernels():
        modules = (module for module in ours.modules() if isinstance(module, MultiHeadAttention))
        return [module.config._attn_implementation for module in modules]

    assert kernels() == ["eager"] * 6
    ours.set_attn_implementation("sdpa")
    assert kernels() == ["sdpa"] * 6
    assert all(half.config._attn_implementation == "sdpa" for half in (ours.get_encoder(), ours.get_decoder()))


@attentions
def test_cached_steps_equal_the_whole(attention, references):
    """The source is looked at once: from the second step on its output comes from the cache."""
    ours, reference = references(attention, layers=3)
    source, target = draw_source(), from_ids(reference)
    runs = []
    ours.get_encoder().register_forward_hook(lambda *_: runs.append("encoder"))
    with torch.no_grad():
        whole = ours(**source, **target, use_cache=False)
        encoded = BaseModelOutput(whole.encoder_last_hidden_state)
        caches, runs[:] = [None, None], []
        for start, end in pairwise([0, 1, 3, T]):
            step = {name: tensor[:, start:end] for name, tensor in target.items()}
            step["decoder_attention_mask"] = target["decoder_attention_mask"][:, :end]
            step |= {"attention_mask": source["attention_mask"], "encoder_outputs": encoded, "use_cache": True}
            mine, theirs = (
                model(**step, past_key_values=cache) for model, cache in zip((ours, reference), caches, strict=True)
            )
            caches = [mine.past_key_values, theirs.past_key_values]
            assert type(caches[0]) is type(caches[1])
            for expected in (whole.logits[:, start:end], theirs.logits):
                torch.testing.assert_close(mine.logits, expected, rtol=0, atol=TOLERANCE)
            encoded = BaseModelOutput(torch.full_like(encoded.last_hidden_state, float("nan")))
    assert not runs


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@reference_warnings
def test_half_precision_is_as_good_as_the_reference_s(dtype, references):
    ours, reference = references("sdpa")
    inputs = draw_source() | from_labels(reference)
    with torch.no_grad():
        exact = reference.double()(**inputs).logits
        mine, theirs = (model.to(dtype)(**inputs) for model in (ours, reference))
    assert mine.logits.dtype == mine.loss.dtype == dtype
    assert (mine.logits - exact).abs().max() <= (theirs.logits - exact).abs().max()


# ---------------------------------------------------------------------------------------------------------------------
# Labels and outputs, as BART has them


@settings(max_examples=30)
@given(
    labels=st.integers(1, 6).flatmap(
        lambda length: st.lists(
            st.lists(st.just(-100) | st.integers(0, 98), min_size=length, max_size=length), min_size=1, max_size=4
        )
    ),
    start=st.integers(0, 98),
    pad=st.integers(0, 98),
)
def test_the_decoder_s_input_is_the_labels_shifted_as_bart_shifts_them(model, labels, start, pad):
    labels = torch.tensor(labels)
    model.config.decoder_start_token_id, model.config.pad_token_id = start, pad
    before = labels.clone()
    ids = model.prepare_decoder_input_ids_from_labels(labels=labels)
    assert torch.equal(ids, shift_tokens_right(labels, pad, start))
    assert torch.equal(labels, before)
    assert ids.dtype == labels.dtype


@pytest.fixture(scope="module")
def model():
    return random_seq2seq()


@pytest.fixture(autouse=True)
def special_tokens_of(request):
    """A test may set the ids of the model that several share."""
    yield
    if "model" in request.fixturenames:
        for name, value in SPECIAL.items():
            setattr(request.getfixturevalue("model").config, name, value)


def test_labels_alone_are_labels_with_their_shifted_input(model):
    source, labels = draw_source(), draw_labels()
    ids = model.prepare_decoder_input_ids_from_labels(labels)
    mask = (ids != PAD).long()
    from_labels = model(**source, labels=labels)
    explicit = model(**source, labels=labels, decoder_input_ids=ids, decoder_attention_mask=mask)
    assert_same_tensors(flat(from_labels), flat(explicit))
    # A mask that is given goes before the one made of the labels
    ones = torch.ones_like(mask)
    masked = model(**source, labels=labels, decoder_attention_mask=ones)
    assert_same_tensors(
        flat(masked), flat(model(**source, labels=labels, decoder_input_ids=ids, decoder_attention_mask=ones))
    )
    assert (masked.logits - from_labels.logits).abs().max() > 1e-3


def test_the_loss_is_plain_cross_entropy_of_the_labels(model):
    """Input and labels are shifted against each other already: at every place the label is what is to come next."""
    source, labels = draw_source(), draw_labels()
    outputs = model(**source, labels=labels)
    words = labels[labels != -100]
    surprise = -outputs.logits.log_softmax(dim=-1)[labels != -100][torch.arange(len(words)), words]
    torch.testing.assert_close(outputs.loss, surprise.mean())
    torch.testing.assert_close(outputs.loss, cross_entropy(outputs.logits.flatten(0, 1), labels.flatten()))


def test_what_is_no_label_counts_for_nothing(model):
    """Neither what stands behind the target's end, nor how far the batch is padded."""
    source, labels = draw_source(), draw_labels()
    labels[:, -2:] = -100
    short = labels[:, :-2].contiguous()
    shorter = model(**source, labels=short)
    longer = model(**source, labels=labels)
    torch.testing.assert_close(longer.loss, shorter.loss)
    assert_same_gradients(
        seq2seq_gradients(model, source | {"labels": labels}),
        seq2seq_gradients(model, source | {"labels": short}),
    )
    alone = [
        model(**{name: tensor[row : row + 1] for name, tensor in source.items()}, labels=labels[row : row + 1]).loss
        * (labels[row] != -100).sum()
        for row in range(B)
    ]
    torch.testing.assert_close(longer.loss, sum(alone) / (labels != -100).sum())


@pytest.mark.parametrize("pad", [PAD, START, 57], ids=["padding id", "the start id pads", "a word pads"])
def test_padding_in_the_decoder_s_input_is_not_looked_at_but_the_start_is(model, pad):
    """Even where the start token is the padding token, as in T5."""
    model.config.pad_token_id = pad
    source, labels = draw_source(), torch.tensor([[11, -100, 12, 13, -100, -100]] * B)
    outputs = model(**source, labels=labels, output_attentions=True)
    for weights in outputs.decoder_attentions:
        assert not weights[:, :, 3:, 2].any()  # the place of -100
        assert (weights[:, :, :, 0] > 0).all()
        torch.testing.assert_close(weights[:, :, 0, 0], torch.ones(B, 4))


def test_training_fills_no_cache(model):
    inputs = draw_source() | {"labels": draw_labels()}
    for use_cache in (None, True, False):
        assert "past_key_values" not in model(**inputs, use_cache=use_cache)
    del inputs["labels"]
    inputs["decoder_input_ids"] = torch.full((B, 1), START)
    assert model(**inputs).past_key_values.get_seq_length() == 1
    assert "past_key_values" not in model(**inputs, use_cache=False)


@pytest.mark.parametrize("pad_to_multiple_of", [None, 8])
def test_a_data_collator_makes_batches_for_it(model, pad_to_multiple_of):
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{i}" for i in range(94))]
    tokenizer = transformers.BertTokenizer(vocab={word: i for i, word in enumerate(words)})
    collate = transformers.DataCollatorForSeq2Seq(tokenizer, model, pad_to_multiple_of=pad_to_multiple_of)
    rows = [
        {"input_ids": list(range(5, 5 + length)), "labels": list(range(20, 20 + target))}
        for length, target in ((3, 4), (6, 2), (1, 1))
    ]
    batch = collate(rows)
    assert set(batch) == {"input_ids", "attention_mask", "labels", "decoder_input_ids"}
    assert batch["labels"].shape == (3, pad_to_multiple_of or 4)
    assert torch.equal(batch["decoder_input_ids"], shift_tokens_right(batch["labels"], PAD, START))
    outputs = model(**batch)
    del batch["decoder_input_ids"]
    torch.testing.assert_close(outputs.loss, model(**batch).loss)


def parameters_of(function):
    return list(inspect.signature(function).parameters.values())


def test_the_arguments_are_bart_s_in_bart_s_order():
    """And a few of our own behind them, so that a call by position means the same."""
    for ours, theirs in (
        (ScratchBertForConditionalGeneration, BartForConditionalGeneration),
        (ScratchBertSeq2SeqModel, transformers.BartModel),
    ):
        expected = parameters_of(theirs.forward)[:-1]
        actual = parameters_of(ours.forward)[: len(expected)]
        assert [(p.name, p.kind, p.default) for p in actual] == [(p.name, p.kind, p.default) for p in expected]
        assert parameters_of(ours.forward)[-1].kind is inspect.Parameter.VAR_KEYWORD
        assert all(p.default in (None, 0) for p in parameters_of(ours.forward)[len(expected) : -1])


def test_arguments_by_position_are_arguments_by_name(model):
    inputs = draw_source() | {"labels": draw_labels()} | {"decoder_position_ids": torch.arange(T).flip(0)[None]}
    inputs["decoder_input_ids"] = model.prepare_decoder_input_ids_from_labels(inputs["labels"])
    inputs["decoder_attention_mask"] = (inputs["decoder_input_ids"] != PAD).long()
    names = [p.name for p in parameters_of(ScratchBertForConditionalGeneration.forward)][1:-2]
    by_position = model(*(inputs.get(name) for name in names))
    assert_same_tensors(flat(by_position), flat(model(**inputs)))


@pytest.mark.parametrize("labels", [False, True], ids=["without labels", "with labels"])
@pytest.mark.parametrize("asked", [{}, {"output_hidden_states": True, "output_attentions": True}], ids=["", "all"])
def test_outputs_are_those_of_bart_as_objects_and_as_tuples(model, labels, asked):
    bart = BartForConditionalGeneration(
        transformers.BartConfig(
            vocab_size=99,
            d_model=32,
            encoder_layers=2,
            decoder_layers=2,
            encoder_attention_heads=4,
            decoder_attention_heads=4,
            encoder_ffn_dim=37,
            decoder_ffn_dim=37,
            attn_implementation="eager",
        )
    ).eval()
    inputs = {"input_ids": draw_source()["input_ids"], **asked}
    inputs |= {"labels": draw_labels()} if labels else {"decoder_input_ids": torch.randint(4, 99, (B, T))}
    mine, theirs = (either(**inputs) for either in (model, bart))
    assert type(mine) is type(theirs) is Seq2SeqLMOutput
    assert list(mine) == list(theirs)
    as_tuples = [either(**inputs, return_dict=False) for either in (model, bart)]
    assert [type(part) for part in as_tuples[0]] == [type(part) for part in as_tuples[1]]
    for part, expected in zip(as_tuples[0], mine.to_tuple(), strict=True):
        if isinstance(part, torch.Tensor):
            assert torch.equal(part, expected)
    base = model.model(
        **{name: value for name, value in inputs.items() if name != "labels"}
        | {"decoder_input_ids": torch.randint(4, 99, (B, T))}
    )
    assert type(base) is Seq2SeqModelOutput
    fields = {field.name for field in dataclasses.fields(Seq2SeqModelOutput)}
    assert set(base) <= fields


FORMS = {
    "a tuple": lambda outputs: (outputs.last_hidden_state,),
    "a list": lambda outputs: [outputs.last_hidden_state],
    "an object": lambda outputs: BaseModelOutput(last_hidden_state=outputs.last_hidden_state),
    "the encoder's own": lambda outputs: outputs,
    "a tuple with more": lambda outputs: (outputs.last_hidden_state, outputs.hidden_states, outputs.attentions),
}


@pytest.mark.parametrize("form", FORMS)
def test_an_encoder_s_output_may_be_given_instead_of_the_source(model, form):
    source, labels = draw_source(), draw_labels()
    options = {"output_hidden_states": True, "output_attentions": True}
    expected = model(**source, labels=labels, **options)
    encoded = model.get_encoder()(**source, **options)
    runs = []
    hook = model.get_encoder().register_forward_hook(lambda *_: runs.append("encoder"))
    given = FORMS[form](encoded)
    outputs = model(encoder_outputs=given, attention_mask=source["attention_mask"], labels=labels, **options)
    hook.remove()
    assert not runs
    kept = set(expected)
    if form not in ("the encoder's own", "a tuple with more"):
        kept -= {"encoder_hidden_states", "encoder_attentions"}
    assert set(outputs) == kept
    assert_same_tensors(flat(outputs), flat({name: expected[name] for name in kept}))
    # Without the mask every place counts
    assert not torch.allclose(model(encoder_outputs=given, labels=labels).logits, outputs.logits, atol=1e-3)


@pytest.mark.parametrize("kept", [1, 3, torch.tensor([0, 2])], ids=["1", "3", "chosen"])
def test_only_the_positions_that_are_asked_for_go_through_the_head(model, kept):
    inputs = draw_source() | {"decoder_input_ids": torch.randint(4, 99, (B, T))}
    whole = model(**inputs).logits
    chosen = kept if isinstance(kept, torch.Tensor) else slice(-kept, None)
    torch.testing.assert_close(model(**inputs, logits_to_keep=kept).logits, whole[:, chosen], rtol=0, atol=1e-6)


def test_words_of_the_source_may_be_given_as_embeddings(model):
    source, labels = draw_source(), draw_labels()
    words = model.get_input_embeddings()(source["input_ids"])
    expected = model(**source, labels=labels)
    del source["input_ids"]
    assert_same_tensors(flat(model(**source, inputs_embeds=words, labels=labels)), flat(expected))


TARGET = torch.ones(B, T, dtype=torch.long)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({}, ("decoder_input_ids", "decoder_inputs_embeds", "neither", "labels")),
        ({"labels": TARGET[:, 0]}, ("labels", "(4,)", "(batch, length)")),
        ({"labels": TARGET[None]}, ("labels", "(1, 4, 6)", "(batch, length)")),
        ({"labels": TARGET[0], "decoder_input_ids": TARGET}, ("labels", "(6,)", "(4, 6)")),
        ({"labels": TARGET[:3], "decoder_input_ids": TARGET}, ("labels", "(3, 6)", "(4, 6)")),
        ({"labels": TARGET[:, 1:], "decoder_input_ids": TARGET}, ("labels", "(4, 5)", "(4, 6)")),
        ({"labels": TARGET[:3]}, ("encoder_hidden_states", "(4, 9, 32)", "(3, length, 32)")),
        ({"labels": TARGET * 99}, ("input_ids", " 99; ", "0 to 98", "vocab_size is 99")),
        (
            {"labels": TARGET, "input_ids": None, "encoder_outputs": (torch.randn(B, S, 31),)},
            ("encoder_outputs.last_hidden_state", "(4, 9, 31)", "(batch, length, 32)"),
        ),
    ],
    ids=lambda part: " ".join(part) if isinstance(part, tuple) else "",
)
def test_what_is_unfit_is_named_with_what_is_wanted(model, arguments, words):
    message = refusal(model, **{**draw_source(), **arguments})
    assert message.startswith(words[0])
    assert_mentions(message, *words)


def test_labels_of_minus_100_need_a_padding_id(model):
    model.config.pad_token_id = None
    with pytest.raises(ValueError, match=r"^config.pad_token_id is None.*-100"):
        model(**draw_source(), labels=TARGET)


# ---------------------------------------------------------------------------------------------------------------------
# Tensors that are one

TIES = ("tie_encoder_decoder", "share_embeddings", "tie_word_embeddings")
ties = pytest.mark.parametrize(
    "tied",
    [dict(zip(TIES, values, strict=True)) for values in product([False, True], repeat=3)],
    ids=lambda tied: ", ".join(name for name, value in tied.items() if value) or "nothing",
)


def same_tensor_as(name, tie_encoder_decoder, share_embeddings, tie_word_embeddings):
    """The name, as it stands in a model with a head, of the tensor that the one of this name is, if it is another's."""
    if tie_word_embeddings and name == "lm_head.decoder.weight":
        name = "model.decoder.embeddings.word_embeddings.weight"
    part = name.removeprefix("model.decoder.")
    if part == name or ".cross_attention" in part:
        return name
    is_tied = share_embeddings if part.startswith("embeddings.") else tie_encoder_decoder
    return f"model.encoder.{part}" if is_tied else name


def in_a_model_with_a_head(name, model):
    return f"model.{name}" if isinstance(model, ScratchBertSeq2SeqModel) else name


def groups(names_and_keys):
    found = defaultdict(set)
    for name, key in names_and_keys:
        found[key].add(name)
    return {frozenset(names) for names in found.values()}


def assert_tied(model, tied):
    """Exactly those tensors are one and the same that `tied` says."""
    tensors = model.state_dict(keep_vars=True)
    wanted = groups((name, same_tensor_as(in_a_model_with_a_head(name, model), **tied)) for name in tensors)
    assert groups((name, id(tensor)) for name, tensor in tensors.items()) == wanted
    # And each is stored once: for safetensors it is the memory that counts
    assert groups((name, tensor.data_ptr()) for name, tensor in tensors.items()) == wanted
    assert len(list(model.parameters())) == len(wanted)
    for name in TIES:
        assert getattr(model.config, name) == tied[name]


def names_in(folder):
    names = []
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            names += opened.keys()
    return names


def assert_stored_once(folder, model, tied):
    names = names_in(folder)
    every = {in_a_model_with_a_head(name, model): name for name in model.state_dict()}
    wanted = {every[same_tensor_as(name, **tied)] for name in every}
    assert sorted(names) == sorted(wanted)


def saved_and_loaded(model, folder, cls=None, **kwargs):
    model.save_pretrained(folder, **kwargs)
    again, info = (cls or type(model)).from_pretrained(folder, output_loading_info=True)
    assert info == NOTHING
    return again


def loaded_from_shards(model, folder):
    again = saved_and_loaded(model, folder, max_shard_size="20KB")
    assert len(list(folder.glob("model-*.safetensors"))) > 2
    return again


def given_a_state_dict(model, folder):
    other = type(model)(model.config)
    other.load_state_dict(model.state_dict())
    return other


WAYS = {
    "constructed": lambda model, folder: model,
    "tied again": lambda model, folder: model.tie_weights() or model,
    "deep-copied": lambda model, folder: copy.deepcopy(model),
    "pickled": lambda model, folder: pickle.loads(pickle.dumps(model)),
    "loaded": saved_and_loaded,
    "loaded from shards": loaded_from_shards,
    "loaded by an Auto class": lambda model, folder: saved_and_loaded(
        model, folder, transformers.AutoModelForSeq2SeqLM
    ),
    "loaded in another precision": lambda model, folder: saved_and_loaded(model.half(), folder).float(),
    "given a state dict": given_a_state_dict,
}


@pytest.mark.parametrize("way", WAYS)
@ties
def test_what_is_tied_stays_tied(tmp_path, tied, way):
    model = random_seq2seq(**tied, num_hidden_layers=1, norm_first=way == "loaded")
    other = WAYS[way](model, tmp_path / "model").eval()
    assert_tied(other, tied)
    assert_same_outputs(other, model)
    other.save_pretrained(tmp_path / "again")
    assert_stored_once(tmp_path / "again", other, tied)


@ties
def test_without_a_head_the_halves_are_tied_all_the_same(tmp_path, tied):
    model = random_seq2seq(**tied, num_hidden_layers=1)
    model.save_pretrained(tmp_path)
    for cls in (transformers.AutoModel, ScratchBertModel, ScratchBertSeq2SeqModel):
        base = cls.from_pretrained(tmp_path)
        assert type(base) is ScratchBertSeq2SeqModel
        assert_tied(base, tied)
        base_weights, weights = base.state_dict(), model.model.state_dict()
        assert base_weights.keys() == weights.keys()
        assert all(torch.equal(base_weights[name], weights[name]) for name in weights)
    base.save_pretrained(tmp_path / "base")
    assert_stored_once(tmp_path / "base", base, tied)
    again, info = ScratchBertSeq2SeqModel.from_pretrained(tmp_path / "base", output_loading_info=True)
    assert info == NOTHING
    assert_same_outputs(again, base)
    # The head over it is new, but for the matrix where that is the words' own
    with_head, info = ScratchBertForConditionalGeneration.from_pretrained(tmp_path / "base", output_loading_info=True)
    new = {name for name in with_head.state_dict() if name.startswith("lm_head.")}
    assert info["missing_keys"] == new - ({"lm_head.decoder.weight"} if tied["tie_word_embeddings"] else set())
    assert_tied(with_head, tied)


@pytest.mark.parametrize(
    ("size", "multiple", "becomes"), [(120, None, 120), (50, None, 50), (100, 8, 104), (None, 16, 112)]
)
@ties
def test_resizing_keeps_what_is_tied_and_what_is_known(tmp_path, tied, size, multiple, becomes):
    model = random_seq2seq(**tied, num_hidden_layers=1)
    before, known = copy.deepcopy(model.state_dict()), min(becomes, 99)
    embeddings = model.resize_token_embeddings(size, pad_to_multiple_of=multiple)
    assert embeddings is model.get_input_embeddings() is model.get_encoder().get_input_embeddings()
    assert_tied(model, tied)
    for part in (model, model.model, model.get_encoder(), model.get_decoder()):
        assert part.config.vocab_size == becomes
        assert part.get_input_embeddings().weight.shape == (becomes, 32)
    assert len(model.get_output_embeddings().weight) == becomes
    for name, tensor in model.state_dict().items():
        old = before[name]
        if old.shape[0] == 99:
            assert tensor.shape[0] == becomes
            tensor, old = tensor[:known], old[:known]
        assert torch.equal(tensor, old), name
    # The last word can be read, written and learned, and then comes back from a file.
    words = torch.tensor([[5, becomes - 1]])
    model.train()(words, labels=words).loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    again = saved_and_loaded(model, tmp_path)
    assert_tied(again, tied)
    assert_same_outputs(again, model)
    with pytest.raises(ValueError, match=f"vocab_size is {becomes}"):
        model(words, decoder_input_ids=words + 1)


def test_without_a_head_it_resizes_too():
    for shared in (False, True):
        model = random_seq2seq("Seq2SeqModel", share_embeddings=shared)
        model.resize_token_embeddings(120)
        assert_tied(model, {name: getattr(model.config, name) for name in TIES})
        words = torch.tensor([[119]])
        model(words, decoder_input_ids=words)


@ties
def test_embeddings_put_in_by_hand_are_put_in_both_halves_where_they_share(tied):
    model = random_seq2seq(**tied)
    table = torch.nn.Embedding(99, 32)
    model.set_input_embeddings(table)
    assert model.get_encoder().get_input_embeddings() is table
    assert (model.get_decoder().get_input_embeddings() is table) == tied["share_embeddings"]


@ties
def test_the_gradient_of_a_tied_tensor_is_the_sum_over_its_uses(tied):
    model = random_seq2seq(**tied).train()
    apart = random_seq2seq(**dict.fromkeys(TIES, False)).train()
    apart.load_state_dict(model.state_dict())
    inputs = draw_source() | {"labels": draw_labels()}
    for either in (model, apart):
        either(**inputs).loss.backward()
    expected = defaultdict(lambda: 0)
    for name, parameter in apart.named_parameters():
        expected[same_tensor_as(name, **tied)] += parameter.grad
    actual = {same_tensor_as(name, **tied): parameter.grad for name, parameter in model.named_parameters()}
    assert_same_gradients(actual, expected)


@ties
def test_a_step_of_training_leaves_them_tied(tied):
    model = random_seq2seq(**tied).train()
    before = copy.deepcopy(model.state_dict())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model(**draw_source(), labels=draw_labels()).loss.backward()
    optimizer.step()
    assert_tied(model, tied)
    after = model.state_dict()
    assert not [name for name in after if torch.equal(after[name], before[name])]


@pytest.mark.parametrize("norm_first", [False, True])
def test_a_decoder_of_the_encoder_s_tensors_adds_the_cross_attention_alone(norm_first):
    fields = {"num_hidden_layers": 3, "norm_first": norm_first, "tie_encoder_decoder": True}
    model = random_seq2seq("Seq2SeqModel", **fields)
    width = TINY["hidden_size"]
    cross_attention = 3 * (4 * (width * width + width) + 2 * width)
    assert model.num_parameters() == model.get_encoder().num_parameters() + cross_attention
    with_head = random_seq2seq(**fields)
    head = (width * width + width) + 2 * width + 99  # dense, norm, output bias; the matrix is the words'
    assert with_head.num_parameters() == model.num_parameters() + head


def test_a_decoder_of_the_encoder_s_tensors_computes_with_them():
    """Not only the same objects: the same numbers, as a decoder."""
    model = random_seq2seq(tie_encoder_decoder=True)
    alone = ScratchBertModel(model.config.decoder_config(), add_pooling_layer=False).eval()
    alone.load_state_dict({**model.get_decoder().state_dict(), **model.get_encoder().state_dict()})
    inputs = inputs_for("ForConditionalGeneration", length=6)
    encoded = model.get_encoder()(inputs["input_ids"], inputs["attention_mask"], inputs["token_type_ids"])
    expected = alone(
        inputs["decoder_input_ids"],
        encoder_hidden_states=encoded.last_hidden_state,
        encoder_attention_mask=inputs["attention_mask"],
    )
    torch.testing.assert_close(model.model(**inputs).last_hidden_state, expected.last_hidden_state, rtol=0, atol=1e-6)


def opened_with(folder, **fields):
    """The model that was saved in `folder` with other fields, what it reports of the loading, and what it warns of."""
    with logged_warnings() as warnings:
        model, info = ScratchBertForConditionalGeneration.from_pretrained(folder, output_loading_info=True, **fields)
    return model, info, "\n".join(warnings)


@pytest.mark.parametrize("name", TIES)
def test_what_a_file_holds_once_is_named_as_missing_where_two_are_wanted(tmp_path, name):
    random_seq2seq(**dict.fromkeys(TIES, True)).save_pretrained(tmp_path)
    again, info, warnings = opened_with(tmp_path, **{name: False})
    apart, stored = {**dict.fromkeys(TIES, True), name: False}, names_in(tmp_path)
    new = {each for each in again.state_dict() if same_tensor_as(each, **apart) not in stored}
    assert new
    assert info["missing_keys"] == new
    assert "MISSING" in warnings
    assert_tied(again, apart)


@pytest.mark.parametrize("name", TIES)
def test_what_a_file_holds_apart_is_not_thrown_together(tmp_path, name):
    """As for the words' matrix of a BERT: where both are stored and differ, tying would lose one."""
    model = random_seq2seq(**dict.fromkeys(TIES, False))
    model.save_pretrained(tmp_path)
    again, _, warnings = opened_with(tmp_path, **{name: True})
    assert_same_outputs(again, model)
    assert "NOT tie" in warnings


# ---------------------------------------------------------------------------------------------------------------------
# Halves, folders and the Auto classes


def test_a_half_is_a_model_of_its_own(tmp_path):
    model = random_seq2seq(num_decoder_layers=3)
    inputs = inputs_for("ForConditionalGeneration", length=6)
    outputs = model.model(**inputs)
    assert model.get_encoder() is model.model.get_encoder() is model.model.encoder
    assert model.get_decoder() is model.model.get_decoder() is model.model.decoder
    source = {name: inputs[name] for name in ("input_ids", "attention_mask", "token_type_ids")}
    target = {
        "input_ids": inputs["decoder_input_ids"],
        "encoder_hidden_states": outputs.encoder_last_hidden_state,
        "encoder_attention_mask": inputs["attention_mask"],
    }
    halves = {
        "encoder": (model.get_encoder(), source, outputs.encoder_last_hidden_state),
        "decoder": (model.get_decoder(), target, outputs.last_hidden_state),
    }
    for name, (half, arguments, expected) in halves.items():
        assert type(half) is ScratchBertModel
        half.save_pretrained(tmp_path / name)
        for cls in (ScratchBertModel, transformers.AutoModel):
            again, info = cls.from_pretrained(tmp_path / name, output_loading_info=True)
            assert type(again) is ScratchBertModel
            assert info["missing_keys"] == {"pooler.dense.weight", "pooler.dense.bias"}
            assert not info["unexpected_keys"]
            torch.testing.assert_close(again(**arguments).last_hidden_state, expected, rtol=0, atol=1e-6)
        half.save_as_bert(tmp_path / f"{name} as bert")
        our_own = set(ScratchBertConfig().to_dict()) - set(transformers.BertConfig().to_dict())
        assert not our_own & set(config_json(tmp_path / f"{name} as bert")) - {"position_embedding_type"}
        reference = transformers.BertModel.from_pretrained(tmp_path / f"{name} as bert", add_pooling_layer=False)
        theirs = reference(**arguments).last_hidden_state
        torch.testing.assert_close(theirs, expected, rtol=0, atol=TOLERANCE)
        assert reference.config.is_decoder == (name == "decoder")
        assert reference.config.num_hidden_layers == (3 if name == "decoder" else 2)


@pytest.mark.parametrize("head", ["Seq2SeqModel", "ForConditionalGeneration"])
def test_two_halves_are_no_bert(tmp_path, head):
    message = refusal(random_seq2seq(head).save_as_bert, tmp_path / "out")
    assert_mentions(message, "has an encoder and a decoder", "get_encoder().save_as_bert")
    assert not (tmp_path / "out").exists()


ENCODERS_ALONE = [
    name
    for name in dir(transformers)
    if name.startswith("AutoModelFor")
    and ScratchBertConfig in (getattr(getattr(transformers, name), "_model_mapping", None) or ())
    and name not in ("AutoModelForSeq2SeqLM", "AutoModelForTextEncoding")
]


@pytest.mark.parametrize("auto", ENCODERS_ALONE)
def test_a_class_of_one_half_does_not_open_two(tmp_path, auto):
    model = random_seq2seq(num_hidden_layers=1)
    model.save_pretrained(tmp_path)
    auto = getattr(transformers, auto)
    parts = ("is_encoder_decoder is True", "ScratchBertForConditionalGeneration", "AutoModel", "get_encoder()")
    assert_mentions(refusal(auto.from_config, model.config), *parts)
    for config in (None, model.config.encoder_config()):
        assert_mentions(refusal(auto.from_pretrained, tmp_path, config=config), tmp_path, *parts)


def test_the_auto_classes_that_open_two_halves(tmp_path):
    model = random_seq2seq(num_decoder_layers=1)
    model.save_pretrained(tmp_path)
    with logged_warnings() as warnings:
        for auto, wanted in (
            (transformers.AutoModel, ScratchBertSeq2SeqModel),
            (transformers.AutoModelForSeq2SeqLM, ScratchBertForConditionalGeneration),
        ):
            again, info = auto.from_pretrained(tmp_path, output_loading_info=True)
            assert type(again) is wanted
            head = set(model.state_dict()) if wanted is not type(model) else set()
            unused = {name for name in head if name.startswith("lm_head.") and name != "lm_head.decoder.weight"}
            assert info == {**NOTHING, "unexpected_keys": unused}
            made = auto.from_config(model.config)
            assert type(made) is wanted
            assert made.state_dict().keys() == again.state_dict().keys()
            assert_same_outputs(again.base_model, model.model)
    assert all("UNEXPECTED" in warning for warning in warnings)
    assert_same_outputs(again, model)
    assert type(transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path).generation_config) is type(
        model.generation_config
    )


def test_one_half_is_not_opened_as_two(tmp_path):
    random_scratchbert("ForMaskedLM").save_pretrained(tmp_path)
    one_half, two_halves = ScratchBertConfig(**TINY), ScratchBertConfig(**TINY, is_encoder_decoder=True)
    for cls in (ScratchBertForConditionalGeneration, ScratchBertSeq2SeqModel):
        parts = ("is_encoder_decoder is False", "from_bert")
        assert_mentions(refusal(cls, one_half), *parts)
        for options in ({}, {"config": two_halves}, {"is_encoder_decoder": True}):
            assert_mentions(refusal(cls.from_pretrained, tmp_path, **options), *parts)
    for cls in (ScratchBertModel, ScratchBertForMaskedLM, ScratchBertForCausalLM):
        assert_mentions(refusal(cls, two_halves), "is_encoder_decoder is True")


# ---------------------------------------------------------------------------------------------------------------------
# Training and graphs


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("tied", [False, True], ids=["apart", "tied"])
def test_gradient_checkpointing_of_both_halves_changes_no_gradient(reentrant, tied):
    model = random_seq2seq(tie_encoder_decoder=tied).train()
    inputs = draw_source() | {"labels": draw_labels()}
    with observed_shapes(FeedForward.forward) as runs:
        expected = seq2seq_gradients(model, inputs)
        expected = {name: gradient.clone() for name, gradient in expected.items()}
        assert [shape[0] for shape in runs] == [B] * 4
        checkpoint_activations(model, {"use_reentrant": reentrant})
        assert_same_gradients(seq2seq_gradients(model, inputs), expected)
    assert len(runs) == 12  # once more forward, and again on the way back
    # Blocks that run twice would fill a cache twice
    decoder_input_ids = torch.randint(4, 99, (B, T))
    source = {name: tensor for name, tensor in inputs.items() if name != "labels"}
    outputs = model(**source, decoder_input_ids=decoder_input_ids, use_cache=True)
    assert "past_key_values" not in outputs
    assert "past_key_values" in model.eval()(**source, decoder_input_ids=decoder_input_ids, use_cache=True)


def test_it_learns_to_copy():
    """The whole of it: source, shifted target, loss, and gradients into both halves."""
    torch.manual_seed(0)
    config = ScratchBertConfig(**{**TINY, **NO_DROPOUT, **SPECIAL, "vocab_size": 12}, is_encoder_decoder=True)
    model = ScratchBertForConditionalGeneration(config).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(150):
        words = torch.randint(4, 12, (32, 3))
        loss = model(words, labels=words).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    words = torch.randint(4, 12, (32, 3))
    correct = model.eval()(words, labels=words).logits.argmax(dim=-1) == words
    assert correct.float().mean() > 0.95


def test_labels_after_cached_positions():
    """As PEFT's prefixes are: the mask that is derived from the labels counts them."""
    model = random_seq2seq().eval()
    batch = inputs_for("ForConditionalGeneration", labels=True)
    width = model.config.hidden_size // model.config.num_attention_heads

    def prefix():
        torch.manual_seed(0)
        cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
        for layer in range(model.config.num_hidden_layers):
            keys, values = torch.randn(2, 3, model.config.num_attention_heads, 5, width)
            cache.self_attention_cache.update(keys, values, layer)
        return cache

    ids = model.prepare_decoder_input_ids_from_labels(batch["labels"])
    mask = (ids != model.config.pad_token_id).long()
    mask[:, 0] = 1
    given = {"decoder_input_ids": ids, "decoder_attention_mask": torch.cat([torch.ones(3, 5).long(), mask], 1)}
    with torch.no_grad():
        derived = model(**batch, past_key_values=prefix())
        explicit = model(**batch, **given, past_key_values=prefix())
        without = model(**batch)
    assert torch.equal(derived.logits, explicit.logits)
    assert not torch.allclose(derived.logits, without.logits)
