"""Every model against its reference, the `Bert…` class of transformers: the same signatures, and from the same weights
the same outputs, losses and gradients, with dropout as well."""

import copy
import dataclasses
import inspect
from functools import cache
from itertools import pairwise

import pytest
import torch
import transformers
from transformers import AutoTokenizer, BertConfig, BertModel
from transformers.cache_utils import DynamicCache

from modeling_scratchbert import ScratchBertForCausalLM, ScratchBertModel
from modeling_scratchbert.bert.names import to_scratchbert
from support import comparison
from support.comparison import TOLERANCE, as_doubles, assert_same_tensors, at_tokens, flat
from support.models import BERTS, CROSSED, NEEDS, NO_DROPOUT, OURS, REFERENCES, randomise, tiny_config

LENGTHS, B, T, S = [9, 5, 1, 7], 4, 9, 6  # 4 sequences padded to 9 tokens; the encoder's output has 6

attentions = pytest.mark.parametrize("attention", ["eager", "sdpa"])
paddings = pytest.mark.parametrize("padding", ["none", "right", "left", "scattered"])


# ---------------------------------------------------------------------------------------------------------------------
# References, what goes into them, and what comes out


def our_name(name: str, model) -> str:
    """Our name for the reference's tensor `name`."""
    ours = to_scratchbert(name)
    return ours.removeprefix("model.") if isinstance(model, BertModel) else ours


@pytest.fixture
def references():
    """Makes our model and its reference, with the same large random weights, ready for inference."""

    def make(head="Model", attention="eager", **fields):
        defaults = {"attn_implementation": attention, "hidden_dropout_prob": 0.2}  # attention weights: 0.1
        fields = defaults | NEEDS.get(head, {}) | fields
        reference = randomise(REFERENCES[head](tiny_config(BertConfig, **fields)))
        ours = OURS[head](tiny_config(**fields))
        ours.load_state_dict({our_name(name, reference): tensor for name, tensor in reference.state_dict().items()})
        return ours.eval(), reference.eval()

    return make


def draw_inputs(config, padding="none") -> dict:
    """A batch with everything a model takes: ids, mask, token types, positions."""
    lengths = torch.tensor([T] * B if padding == "none" else LENGTHS)[:, None]
    real = torch.arange(T) < lengths
    if padding == "left":
        real = real.flip(1)
    elif padding == "scattered":
        real = torch.rand(B, T) < 0.5
        real[:, 0] = True
    ids = torch.randint(2, config.vocab_size, (B, T))
    return {
        "input_ids": ids.where(real, torch.tensor(config.pad_token_id)),
        "attention_mask": real.long(),
        "token_type_ids": torch.randint(0, config.type_vocab_size, (B, T)),
        "position_ids": (real.cumsum(dim=-1) - 1).clamp(min=0),
    }


def draw_encoder_output(config) -> dict:
    """Another sequence's hidden states, of another length, and which of them are padding."""
    return {
        "encoder_hidden_states": torch.randn(B, S, config.hidden_size),
        "encoder_attention_mask": (torch.arange(S) < torch.tensor([6, 2, 4, 1])[:, None]).long(),
    }


def draw_classes(number, *shape):
    return {"labels": torch.randint(0, number, shape)}


def draw_words(real):
    return {"labels": torch.randint(0, 99, (B, T)).masked_fill(~real | (torch.rand(B, T) < 0.5), -100)}


def draw_next_words(real):
    """As `draw_words`, and nothing is to be predicted from padding, before a sequence's first word."""
    return draw_words(real & real.roll(1, dims=1))


def draw_sentence_pairs(real):
    return draw_words(real) | {"next_sentence_label": torch.randint(0, 2, (B,))}


def draw_answers(real):
    ends = torch.tensor([[T - 1], [4], [T + 3], [5]])  # one lies beyond the text
    return {"start_positions": torch.tensor([0, 3, 0, 2]), "end_positions": ends}


def draw_tags(real):
    return {"labels": torch.randint(0, 5, (B, T)).masked_fill(~real, -100)}


# A head, the fields of a configuration that it needs, and how to draw its labels, given which tokens are real.
CLASSES = "ForSequenceClassification"
REGRESSION = {"num_labels": 3, "problem_type": "regression"}
TASKS = {
    "encoder": ("Model", {}, lambda real: {}),
    "pre-training": ("ForPreTraining", {}, draw_sentence_pairs),
    "masked LM": ("ForMaskedLM", {}, draw_words),
    "next word": ("ForCausalLM", {}, draw_next_words),
    "next sentence": ("ForNextSentencePrediction", {}, lambda real: draw_classes(2, B)),
    "regression, 1 target": (CLASSES, {"num_labels": 1}, lambda real: {"labels": torch.randn(B)}),
    "regression, 3 targets": (CLASSES, REGRESSION, lambda real: {"labels": torch.randn(B, 3)}),
    "single label": (CLASSES, {"num_labels": 3, "classifier_dropout": 0.5}, lambda real: draw_classes(3, B)),
    "multi label": (CLASSES, {"num_labels": 3}, lambda real: {"labels": torch.randint(0, 2, (B, 3)).float()}),
    "token labels": ("ForTokenClassification", {"num_labels": 5, "classifier_dropout": 0.0}, draw_tags),
    "question answering": ("ForQuestionAnswering", {}, draw_answers),
    "multiple choice": ("ForMultipleChoice", {}, lambda real: draw_classes(2, 2)),
}

tasks = pytest.mark.parametrize("task", TASKS)


def task_inputs(task, config, padding="none") -> dict:
    head, _, draw_labels = TASKS[task]
    inputs = draw_inputs(config, padding)
    labels = draw_labels(inputs["attention_mask"].bool())
    if head == "ForMultipleChoice":
        inputs = {name: tensor.view(2, 2, T) for name, tensor in inputs.items()}
    return inputs | labels


def of_real_beginnings(pooled, real, config):
    """The pooled outputs that mean something. A decoder's first token, where it is padding, may look at nothing at all,
    and on what follows from that not even the reference's eager and sdpa attention agree."""
    return pooled if real is None or not config.is_decoder else pooled[real[:, 0]]


def assert_same_outputs(ours, reference, inputs, **options):
    """One forward pass of each, on the same inputs: every output is the same, of an encoder at padding as well."""

    mask = inputs.get("attention_mask")
    # In a decoder, padding before the first token may look at nothing at all; each kernel computes something there.
    is_compared = mask is None or mask.ndim == 4 or not ours.config.is_decoder
    real = None if is_compared else mask.flatten(0, -2).bool()

    def run(model, inputs):
        outputs = model(**inputs, **options)
        if outputs.get("pooler_output") is not None:
            outputs.pooler_output = of_real_beginnings(outputs.pooler_output, real, model.config)
        return outputs

    with torch.no_grad():
        mine, theirs = run(ours, inputs), run(reference, inputs)
        assert list(mine) == list(theirs)
        exact = cache(lambda: flat(run(copy.deepcopy(reference).double(), as_doubles(inputs))))
        assert_same_tensors(flat(mine), flat(theirs), real, exact)


def objective(outputs, mask, config):
    """What training minimises; for a model without a loss, a sum in which every output counts, each differently."""
    if "loss" in outputs:
        return outputs.loss
    real = torch.ones(outputs.last_hidden_state.shape[:2], dtype=torch.bool) if mask is None else mask.bool()
    tensors = (outputs.last_hidden_state[real], of_real_beginnings(outputs.pooler_output, real, config))
    return sum((tensor * torch.linspace(-1, 1, tensor.numel()).view_as(tensor)).sum() for tensor in tensors)


def gradients(model, inputs) -> dict[str, torch.Tensor]:
    """Of a training step with dropout, whose random numbers are the same for every model."""
    model.train().zero_grad()
    torch.manual_seed(0)
    objective(model(**inputs), inputs.get("attention_mask"), model.config).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def assert_same_gradients(ours, reference, inputs):
    expected = {our_name(name, reference): gradient for name, gradient in gradients(reference, inputs).items()}
    comparison.assert_same_gradients(gradients(ours, inputs), expected)


# ---------------------------------------------------------------------------------------------------------------------
# Encoders


def signature(function):
    """Names, order, kinds and defaults."""
    return [(p.name, p.kind, p.default) for p in inspect.signature(function).parameters.values()]


@pytest.mark.parametrize("head", BERTS)
def test_signatures(head):
    ours, reference = OURS[head], REFERENCES[head]
    assert signature(ours.forward) == signature(reference.forward)
    assert signature(ours.__init__) == signature(reference.__init__)


@tasks
@paddings
@attentions
def test_outputs_and_gradients(task, padding, attention, references):
    head, fields, _ = TASKS[task]
    ours, reference = references(head, attention, **fields)
    inputs = task_inputs(task, reference.config, padding)
    # Under sdpa a call for the maps would run another kernel; see test_attention_maps.
    assert_same_outputs(ours, reference, inputs, output_hidden_states=True, output_attentions=attention == "eager")
    assert ours.config.problem_type == reference.config.problem_type
    assert_same_gradients(ours, reference, inputs)


@tasks
def test_output_classes(task, references):
    head, fields, _ = TASKS[task]
    ours, reference = references(head, **fields)
    inputs = task_inputs(task, reference.config)
    mine, theirs = ours(**inputs), reference(**inputs)
    ours_fields, fields = ([(f.name, f.default) for f in dataclasses.fields(outputs)] for outputs in (mine, theirs))
    assert ours_fields == fields
    assert type(mine).__name__.removeprefix("Scratch") == type(theirs).__name__


@pytest.mark.parametrize(("task", "name"), [("pre-training", "labels"), ("question answering", "end_positions")])
def test_half_the_labels_give_no_loss(task, name, references):
    ours, reference = references(TASKS[task][0])
    labels = task_inputs(task, reference.config)[name]
    assert_same_outputs(ours, reference, draw_inputs(reference.config) | {name: labels})


FIELDS = [
    {"hidden_size": 120, "num_attention_heads": 5},
    {"num_hidden_layers": 1},
    {"vocab_size": 1237},
    {"hidden_act": "gelu_new"},
    {"pad_token_id": 1},
    {"type_vocab_size": 3},
    {"layer_norm_eps": 0.1},
    {"max_position_embeddings": T},
    {"tie_word_embeddings": False},
    {"chunk_size_feed_forward": 3, **NO_DROPOUT},
]


@pytest.mark.parametrize("fields", FIELDS, ids=str)
@attentions
def test_fields_of_the_configuration(fields, attention, references):
    ours, reference = references("ForPreTraining", attention, **fields)
    inputs = task_inputs("pre-training", reference.config, "right")
    assert_same_outputs(ours, reference, inputs, output_hidden_states=True, output_attentions=attention == "eager")
    assert_same_gradients(ours, reference, inputs)


ARGUMENTS = {
    "ids": ["input_ids"],
    "ids and mask": ["input_ids", "attention_mask"],
    "ids and token types": ["input_ids", "token_type_ids"],
    "embeddings": ["inputs_embeds", "attention_mask", "token_type_ids", "position_ids"],
}


@pytest.mark.parametrize("names", ARGUMENTS.values(), ids=ARGUMENTS)
@pytest.mark.parametrize(
    ("head", "fields"),
    [("Model", {}), ("ForCausalLM", {}), ("ForCausalLM", {"is_decoder": False})],
    ids=["encoder", "decoder", "causal LM that attends to both sides"],
)
@attentions
def test_arguments(names, head, fields, attention, references):
    ours, reference = references(head, attention, **fields)
    inputs = draw_inputs(reference.config, "right")
    inputs["position_ids"] = torch.arange(T).flip(0)[None]  # one row for all sequences
    inputs["inputs_embeds"] = reference.get_input_embeddings()(inputs["input_ids"]).detach() + 0.1
    inputs = {name: inputs[name] for name in names}
    assert_same_outputs(ours, reference, {name: tensor[:, :1] for name, tensor in inputs.items()})
    if head == "ForCausalLM":
        inputs["labels"] = torch.randint(0, 99, (B, T))
    assert_same_outputs(ours, reference, inputs, output_hidden_states=True)
    assert_same_gradients(ours, reference, inputs)


@attentions
def test_row_of_padding(attention, references):
    """Attention returns zeros, as torch's does; the reference's eager kernel, the mean of the padding."""
    ours, eager_reference = references("ForPreTraining", attention)
    _, reference = references("ForPreTraining", "sdpa")
    inputs = draw_inputs(reference.config, "right")
    inputs["attention_mask"][2] = 0
    with torch.no_grad():
        mine, theirs, eager = (flat(model(**inputs)) for model in (ours, reference, eager_reference))
    assert_same_tensors(mine, theirs)
    others = torch.arange(B) != 2
    assert_same_tensors(*({name: x[others] for name, x in tensors.items()} for tensors in (mine, eager)))


@pytest.mark.parametrize("heads", [1, 4])
@pytest.mark.parametrize("kind", ["boolean", "-inf", "lowest", "bias"])
@attentions
def test_full_masks(attention, kind, heads, references):
    ours, reference = references("Model", attention)
    # Each token may look at itself, and here and there.
    seen = (torch.rand(B, heads, T, T) < 0.5) | torch.eye(T, dtype=torch.bool)
    added = torch.zeros(seen.shape).masked_fill(~seen, float("-inf") if kind == "-inf" else torch.finfo().min)
    if kind == "bias":
        added += torch.randn(seen.shape)
    inputs = draw_inputs(reference.config)
    # The reference's eager attention would add True to the scores as 1.
    expected = flat(reference(**inputs | {"attention_mask": added}))
    actual = flat(ours(**inputs | {"attention_mask": seen if kind == "boolean" else added}))
    assert_same_tensors(actual, expected)


# ---------------------------------------------------------------------------------------------------------------------
# Attention maps, flex attention, half precision


@pytest.fixture
def uncompiled():
    """Runs flex attention as it stands in Python, since to compile its kernel takes half a minute; and without
    gradients, since on the CPU it has none."""
    if not transformers.utils.is_torch_flex_attn_available():
        pytest.skip("this torch has no flex attention")
    torch.compiler.set_stance("force_eager")
    with torch.no_grad():
        yield
    torch.compiler.set_stance("default")


flex_warnings = pytest.mark.filterwarnings(
    "ignore:flex_attention called without torch.compile", "ignore::DeprecationWarning"
)
KINDS = pytest.mark.parametrize("fields", [{}, {"is_decoder": True}, CROSSED], ids=str)


@flex_warnings
@pytest.mark.parametrize("is_decoder", [False, True], ids=["encoder", "decoder"])
@paddings
def test_flex_attention(padding, is_decoder, references, uncompiled):
    ours, reference = references("Model", "flex_attention", is_decoder=is_decoder)
    assert_same_outputs(ours, reference, draw_inputs(reference.config, padding), output_hidden_states=True)


@flex_warnings
@pytest.mark.parametrize("requested", ["argument", "attribute", "configuration"])
@pytest.mark.parametrize("attention", ["sdpa", "flex_attention"])
@KINDS
def test_attention_maps(fields, attention, requested, references, uncompiled):
    """If the kernel does not return attention maps, a model that is asked for them computes them. The reference leaves
    them out, or raises."""
    ours, eager = references("Model", "eager", **fields)
    weights = ours.state_dict()
    options = {"output_attentions": True} if requested == "configuration" else {}
    ours = ScratchBertModel(tiny_config(attn_implementation=attention, **options, **fields)).eval()
    ours.load_state_dict(weights)
    inputs = draw_inputs(eager.config, "right")
    if "add_cross_attention" in fields:
        inputs |= draw_encoder_output(eager.config)
    if requested == "attribute":
        ours.config.output_attentions = True
    options = {"output_attentions": True} if requested == "argument" else {}
    outputs = ours(**inputs, **options)
    assert_same_tensors(flat(outputs), flat(eager(**inputs, output_attentions=True)))
    plain = ours(**inputs, output_attentions=False)
    assert "attentions" not in plain
    torch.testing.assert_close(outputs[0], plain[0], rtol=0, atol=TOLERANCE)
    assert ours.config._attn_implementation == attention


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("cast", ["whole model", "autocast"])
@attentions
def test_half_precision(attention, cast, dtype, references):
    """As close to the reference as the reference is to the exact result."""
    ours, reference = references("ForPreTraining", attention)
    inputs = task_inputs("pre-training", reference.config, "left")
    real = inputs["attention_mask"].bool()
    with torch.no_grad():
        exact = flat(copy.deepcopy(reference).double()(**inputs, output_hidden_states=True))
        if cast == "whole model":
            ours.to(dtype), reference.to(dtype)
        with torch.autocast("cpu", dtype=dtype, enabled=cast == "autocast"):
            actual, expected = (flat(model(**inputs, output_hidden_states=True)) for model in (ours, reference))
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        mine, theirs, best = (at_tokens(x, real).double() for x in (actual[name], tensor, exact[name]))
        assert actual[name].dtype == tensor.dtype
        assert (mine - theirs).abs().max() <= (theirs - best).abs().max(), name
    if cast == "whole model":
        assert all(gradient.isfinite().all() for gradient in gradients(ours, inputs).values())


# ---------------------------------------------------------------------------------------------------------------------
# Decoders

crossings = pytest.mark.parametrize("cross", [False, True], ids=["self-attention only", "cross-attention"])


@pytest.mark.parametrize("head", ["Model", "ForMaskedLM", "ForCausalLM"])
@pytest.mark.parametrize("source", ["none", "encoder_hidden_states", "encoder_hidden_states, encoder_attention_mask"])
@paddings
@attentions
def test_decoder(attention, padding, source, head, references):
    ours, reference = references(head, attention, **CROSSED)
    inputs = draw_inputs(reference.config, padding)
    encoded = draw_encoder_output(reference.config)
    inputs |= {name: tensor for name, tensor in encoded.items() if name in source}
    options = {"output_hidden_states": True, "output_attentions": attention == "eager"}
    assert_same_outputs(ours, reference, inputs, **options)
    if head != "Model":
        inputs |= draw_next_words(inputs["attention_mask"].bool())
    assert_same_gradients(ours, reference, inputs)


@pytest.mark.parametrize("head", ["Model", "ForCausalLM"])
@crossings
@pytest.mark.parametrize("padding", ["none", "left"])
@attentions
def test_cached_steps(attention, padding, cross, head, references):
    ours, reference = references(head, attention, is_decoder=True, add_cross_attention=cross)
    inputs = draw_inputs(reference.config, padding)
    encoded = draw_encoder_output(reference.config) if cross else {}
    real = inputs["attention_mask"].bool()
    if padding == "none":
        del inputs["position_ids"]  # which are then counted on from the cache
    with torch.no_grad():
        whole = ours(**inputs, **encoded, use_cache=False)[0]
        caches = [None, None]
        for start, end in pairwise([0, 4, 5, 6, T]):
            step = {name: tensor[:, start:end] for name, tensor in inputs.items()}
            step["attention_mask"] = inputs["attention_mask"][:, :end]
            mine, theirs = (
                model(**step, **encoded, past_key_values=cache, use_cache=True)
                for model, cache in zip((ours, reference), caches, strict=True)
            )
            caches = [mine.past_key_values, theirs.past_key_values]
            assert type(caches[0]) is type(caches[1])
            assert caches[0].get_seq_length() == end
            now = real[:, start:end]
            for expected in (whole[:, start:end], theirs[0]):
                torch.testing.assert_close(mine[0][now], expected[now], rtol=0, atol=TOLERANCE)
            if cross:  # from the second step on, the encoder's keys come from the cache and not from its output
                encoded["encoder_hidden_states"] = torch.full_like(encoded["encoder_hidden_states"], float("nan"))


def chosen(logits, keep):
    """The logits at the positions that `logits_to_keep` means."""
    if isinstance(keep, int):
        return logits[:, -keep:]
    if keep.dtype == torch.bool:
        return logits[keep]
    return logits[:, keep] if keep.ndim == 1 else logits[torch.arange(B)[:, None], keep]


@pytest.mark.parametrize(
    "keep",
    [0, 1, 4, torch.tensor([0, 3, 8]), torch.tensor([[0, 3], [2, 5], [1, 1], [8, 7]]), torch.eye(B, T).bool()],
    ids=str,
)
def test_logits_to_keep(keep, references):
    ours, reference = references("ForCausalLM")
    inputs = draw_inputs(reference.config)
    with torch.no_grad():
        expected = chosen(reference(**inputs).logits, keep)
        torch.testing.assert_close(ours(**inputs, logits_to_keep=keep).logits, expected, rtol=0, atol=TOLERANCE)


def test_causal_model_that_attends_to_both_sides_is_warned_of(caplog):
    ScratchBertForCausalLM(tiny_config(is_decoder=True))
    assert not caplog.records
    ScratchBertForCausalLM(tiny_config())
    assert "is_decoder" in caplog.text


@pytest.mark.parametrize("is_decoder", [False, True], ids=["encoder", "decoder"])
@pytest.mark.parametrize("use_cache", [None, False, True])
@pytest.mark.parametrize("is_given", [False, True], ids=["new", "given"])
@pytest.mark.parametrize("head", ["Model", "ForCausalLM"])
def test_which_calls_return_a_cache(head, is_given, use_cache, is_decoder, references):
    """A decoder does, unless told not to. An encoder does not, even if told to."""
    for model in references(head, is_decoder=is_decoder):
        cache = DynamicCache(config=model.config) if is_given and is_decoder else None
        inputs = draw_inputs(model.config)
        outputs = model(**inputs, use_cache=use_cache, past_key_values=cache)
        assert ("past_key_values" in outputs) == (is_decoder and use_cache is not False)
        if cache is not None:
            assert cache.get_seq_length() == T
    if head == "ForCausalLM":  # training has no use for one
        ours, _ = references(head, is_decoder=is_decoder)
        assert "past_key_values" not in ours(**inputs, labels=inputs["input_ids"], use_cache=use_cache)


# ---------------------------------------------------------------------------------------------------------------------
# Real weights, real text


@pytest.mark.parametrize("padding", ["right", "left"])
@attentions
def test_real_weights_and_text(attention, padding, real_bert, reviews):
    ours, reference = (
        model_class.from_pretrained(real_bert, attn_implementation=attention).eval()
        for model_class in (ScratchBertModel, BertModel)
    )
    tokenizer = AutoTokenizer.from_pretrained(real_bert, padding_side=padding)
    texts = [review["text"] for review in reviews]
    pairs = tokenizer(texts[:6], ["", *texts[6:11]], padding=True, return_tensors="pt")
    assert pairs["attention_mask"].float().mean() < 1
    assert_same_outputs(ours, reference, pairs, output_hidden_states=True, output_attentions=attention == "eager")
    if padding == "right":
        assert_same_gradients(ours, reference, pairs)
