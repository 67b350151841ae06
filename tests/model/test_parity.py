"""Every model against its reference, the `Bert…` class of transformers: the same signatures, and from the same weights
the same outputs, losses and gradients."""

import copy
import dataclasses
import inspect
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise

import pytest
import torch
import transformers
from transformers import AutoTokenizer, BertConfig, BertModel
from transformers.cache_utils import DynamicCache

from modeling_scratchbert import ScratchBertModel
from modeling_scratchbert.bert.names import to_scratchbert
from support import comparison
from support.comparison import TOLERANCE, as_doubles, assert_same_tensors, at_tokens, flat
from support.models import BERTS, NEEDS, NO_DROPOUT, OURS, REFERENCES, randomise, tiny_config

LENGTHS, B, T, S = [9, 5, 1, 7], 4, 9, 6  # 4 sequences padded to 9 tokens; the encoder's output has 6

attentions = pytest.mark.parametrize("attention", ["eager", "sdpa"])
paddings = pytest.mark.parametrize("padding", ["none", "right", "left"])


# ---------------------------------------------------------------------------------------------------------------------
# References, what goes into them, and what comes out


def our_name(name: str, model) -> str:
    """Our name for the reference's tensor `name`."""
    ours = to_scratchbert(name)
    return ours.removeprefix("model.") if isinstance(model, BertModel) else ours


def copy_weights(reference, ours) -> None:
    ours.load_state_dict({our_name(name, reference): tensor for name, tensor in reference.state_dict().items()})


@pytest.fixture
def references():
    """Makes our model and its reference, with the same large random weights, ready for inference."""

    def make(head="Model", attention="eager", **fields):
        fields = {"attn_implementation": attention, **NEEDS.get(head, {}), **fields}
        reference = randomise(REFERENCES[head](tiny_config(BertConfig, **fields)))
        ours = OURS[head](tiny_config(**fields))
        copy_weights(reference, ours)
        return ours.eval(), reference.eval()

    return make


def draw_inputs(config, padding="none", choices=False) -> dict:
    """A batch with everything a model takes: ids, mask, token types, positions."""
    lengths = torch.tensor(LENGTHS if padding != "none" else [T] * B)[:, None]
    real = torch.arange(T) < lengths if padding != "left" else torch.arange(T) >= T - lengths
    ids = torch.randint(2, config.vocab_size, (B, T))
    inputs = {
        "input_ids": ids.where(real, torch.tensor(config.pad_token_id)),
        "attention_mask": real.long(),
        "token_type_ids": torch.randint(0, config.type_vocab_size, (B, T)),
        "position_ids": (real.cumsum(dim=-1) - 1).clamp(min=0),
    }
    return {name: tensor.view(2, 2, T) for name, tensor in inputs.items()} if choices else inputs


def draw_word_labels(config, real):
    return torch.randint(0, config.vocab_size, (B, T)).masked_fill(~real | (torch.rand(B, T) < 0.5), -100)


def draw_next_words(config, real):
    """As `draw_word_labels`, and nothing is to be predicted from padding, before a sequence's first word."""
    return draw_word_labels(config, real & real.roll(1, dims=1))


@dataclass
class Task:
    """A head, the fields of a configuration it needs, and how to draw its labels, given the configuration and which
    tokens are real."""

    head: str
    labels: object
    fields: dict = field(default_factory=dict)

    def inputs_without_labels(self, config, padding="none") -> dict:
        return draw_inputs(config, padding, choices=self.head == "ForMultipleChoice")

    def inputs(self, config, padding="none") -> dict:
        inputs = self.inputs_without_labels(config, padding)
        return {**inputs, **self.labels(config, inputs["attention_mask"].bool())}


TASKS = {
    "encoder": Task("Model", lambda config, real: {}),
    "pre-training": Task(
        "ForPreTraining",
        lambda config, real: {
            "labels": draw_word_labels(config, real),
            "next_sentence_label": torch.randint(0, 2, (B,)),
        },
    ),
    "masked LM": Task("ForMaskedLM", lambda config, real: {"labels": draw_word_labels(config, real)}),
    "next word": Task("ForCausalLM", lambda config, real: {"labels": draw_next_words(config, real)}),
    "next sentence": Task("ForNextSentencePrediction", lambda config, real: {"labels": torch.randint(0, 2, (B,))}),
    "regression, 1 target": Task(
        "ForSequenceClassification", lambda config, real: {"labels": torch.randn(B)}, {"num_labels": 1}
    ),
    "regression, 3 targets": Task(
        "ForSequenceClassification",
        lambda config, real: {"labels": torch.randn(B, 3)},
        {"num_labels": 3, "problem_type": "regression"},
    ),
    "single label": Task(
        "ForSequenceClassification", lambda config, real: {"labels": torch.randint(0, 3, (B,))}, {"num_labels": 3}
    ),
    "multi label": Task(
        "ForSequenceClassification",
        lambda config, real: {"labels": torch.randint(0, 2, (B, 3)).float()},
        {"num_labels": 3},
    ),
    "token labels": Task(
        "ForTokenClassification",
        lambda config, real: {"labels": torch.randint(0, 5, (B, T)).masked_fill(~real, -100)},
        {"num_labels": 5},
    ),
    "question answering": Task(
        "ForQuestionAnswering",
        lambda config, real: {
            "start_positions": torch.tensor([0, 3, 0, 2]),
            "end_positions": torch.tensor([[T - 1], [4], [T + 3], [5]]),  # one lies beyond the text
        },
    ),
    "multiple choice": Task("ForMultipleChoice", lambda config, real: {"labels": torch.randint(0, 2, (2,))}),
}

tasks = pytest.mark.parametrize("task", TASKS.values(), ids=TASKS)


def of_real_beginnings(pooled, real, config):
    """The pooled outputs that mean something. A decoder's first token, where it is padding, may look at nothing at all,
    and on what follows from that not even the reference's eager and sdpa attention agree."""
    return pooled if real is None or not config.is_decoder else pooled[real[:, 0]]


def assert_same_outputs(ours, reference, inputs, **options):
    """One forward pass of each, on the same inputs: every output is the same."""

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
    model.zero_grad()
    torch.manual_seed(0)  # for dropout, where there is any
    objective(model(**inputs), inputs.get("attention_mask"), model.config).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def assert_same_gradients(ours, reference, inputs):
    expected = {our_name(name, reference): gradient for name, gradient in gradients(reference, inputs).items()}
    comparison.assert_same_gradients(gradients(ours, inputs), expected)


# ---------------------------------------------------------------------------------------------------------------------
# What can be told without running anything


def signature(function):
    """Names, order, kinds and defaults."""
    return [(p.name, p.kind, p.default) for p in inspect.signature(function).parameters.values()]


@pytest.mark.parametrize("head", BERTS)
def test_signatures(head):
    ours, reference = OURS[head], REFERENCES[head]
    assert signature(ours.forward) == signature(reference.forward)
    assert signature(ours.__init__) == signature(reference.__init__)


# ---------------------------------------------------------------------------------------------------------------------
# Outputs and gradients


@tasks
@paddings
@attentions
def test_outputs(task, padding, attention, references):
    ours, reference = references(task.head, attention, **task.fields)
    inputs = task.inputs(reference.config, padding)
    # Under sdpa a call for the maps would run another kernel; see test_maps_are_true.
    assert_same_outputs(ours, reference, inputs, output_hidden_states=True, output_attentions=attention == "eager")
    assert ours.config.problem_type == reference.config.problem_type


@tasks
@paddings
@attentions
def test_gradients(task, padding, attention, references):
    ours, reference = references(task.head, attention, **task.fields, **NO_DROPOUT)
    assert_same_gradients(ours.train(), reference.train(), task.inputs(reference.config, padding))


@pytest.mark.parametrize("labels", [True, False])
@tasks
def test_output_classes(task, labels, references):
    ours, reference = references(task.head, **task.fields)
    inputs = task.inputs(reference.config) if labels else task.inputs_without_labels(reference.config)
    mine, theirs = ours(**inputs), reference(**inputs)
    assert list(mine) == list(theirs)
    fields = [[(f.name, f.default) for f in dataclasses.fields(outputs)] for outputs in (mine, theirs)]
    assert fields[0] == fields[1]
    assert type(mine) is type(theirs) or type(mine).__name__ == f"Scratch{type(theirs).__name__}"
    options = {"return_dict": False, "output_hidden_states": True, "output_attentions": True}
    mine, theirs = (model(**inputs, **options) for model in (ours, reference))
    assert [type(part) for part in mine] == [type(part) for part in theirs]
    for part, expected in zip(mine, theirs, strict=True):
        if isinstance(part, tuple | torch.Tensor):
            torch.testing.assert_close(part, expected, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize(
    ("name", "given"), [("pre-training", "labels"), ("question answering", "end_positions")], ids=lambda value: value
)
def test_half_the_labels_give_no_loss(name, given, references):
    task = TASKS[name]
    ours, reference = references(task.head, **task.fields)
    labels = task.labels(reference.config, torch.ones(B, T, dtype=torch.bool))
    inputs = {**draw_inputs(reference.config), given: labels[given]}
    assert "loss" not in ours(**inputs)
    assert_same_outputs(ours, reference, inputs)


SHAPES = {
    "five heads of 24": {"hidden_size": 120, "num_attention_heads": 5},
    "one layer": {"num_hidden_layers": 1},
    "one head": {"num_attention_heads": 1},
    "vocabulary of 1,237": {"vocab_size": 1237},
    "gelu_new": {"hidden_act": "gelu_new"},
    "relu": {"hidden_act": "relu"},
    "pad id 1": {"pad_token_id": 1},
    "three token types": {"type_vocab_size": 3},
    "coarse norms": {"layer_norm_eps": 0.1},
    "as many tokens as positions": {"max_position_embeddings": T},
    "untied": {"tie_word_embeddings": False},
    "chunks of 3": {"chunk_size_feed_forward": 3},
    "all odd": {
        "hidden_size": 120,
        "num_attention_heads": 5,
        "num_hidden_layers": 1,
        "intermediate_size": 77,
        "vocab_size": 1237,
        "hidden_act": "gelu_new",
        "pad_token_id": 1,
    },
}


@pytest.mark.parametrize("fields", SHAPES.values(), ids=SHAPES)
@attentions
def test_shapes(fields, attention, references):
    ours, reference = references("ForPreTraining", attention, **fields, **NO_DROPOUT)
    inputs = TASKS["pre-training"].inputs(reference.config, "right")
    assert_same_outputs(ours, reference, inputs, output_hidden_states=True, output_attentions=attention == "eager")
    assert_same_gradients(ours.train(), reference.train(), inputs)


def only(*names):
    return lambda inputs, reference: {name: inputs[name] for name in names}


def embedded(inputs, reference):
    words = reference.get_input_embeddings()(inputs["input_ids"]).detach()
    return {**{name: value for name, value in inputs.items() if name != "input_ids"}, "inputs_embeds": words + 0.1}


def shared_positions(inputs, reference):
    return {"input_ids": inputs["input_ids"], "position_ids": torch.arange(T).flip(0)[None]}


def one_token(inputs, reference):
    return {name: tensor[:, :1] for name, tensor in inputs.items()}


ARGUMENTS = {
    "ids alone": only("input_ids"),
    "ids and mask": only("input_ids", "attention_mask"),
    "ids and token types": only("input_ids", "token_type_ids"),
    "ids and positions": only("input_ids", "position_ids"),
    "positions for all": shared_positions,
    "embeddings": embedded,
    "one token": one_token,
}


@pytest.mark.parametrize("choose", ARGUMENTS.values(), ids=ARGUMENTS)
@attentions
def test_arguments(choose, attention, references):
    ours, reference = references("Model", attention)
    inputs = choose(draw_inputs(reference.config, "left" if choose is not one_token else "none"), reference)
    assert_same_outputs(ours, reference, inputs, output_hidden_states=True)
    assert_same_gradients(ours, reference, inputs)


@attentions
def test_an_empty_sequence_in_the_batch(attention, references):
    """A row of padding alone: attention returns zeros, as torch's does; the reference's eager kernel, the mean of the
    padding."""
    ours, eager_reference = references("ForPreTraining", attention)
    _, reference = references("ForPreTraining", "sdpa")
    inputs = draw_inputs(reference.config, "right")
    inputs["attention_mask"][2] = 0
    with torch.no_grad():
        mine, theirs, eager = (flat(model(**inputs)) for model in (ours, reference, eager_reference))
    assert_same_tensors(mine, theirs)
    others = torch.arange(B) != 2
    assert_same_tensors(*({name: x[others] for name, x in tensors.items()} for tensors in (mine, eager)))


def draw_full_mask(heads):
    """`(B, heads, T, T)`, True where a token may look: at itself, and here and there."""
    return (torch.rand(B, heads, T, T) < 0.5) | torch.eye(T, dtype=torch.bool)


@pytest.mark.parametrize("heads", [1, 4])
@pytest.mark.parametrize("kind", ["boolean", "-inf", "lowest", "bias"])
@attentions
def test_full_masks(attention, kind, heads, references):
    ours, reference = references("Model", attention)
    seen = draw_full_mask(heads)
    added = torch.zeros(seen.shape).masked_fill(~seen, float("-inf") if kind == "-inf" else torch.finfo().min)
    if kind == "bias":
        added += torch.randn(seen.shape)
    inputs = draw_inputs(reference.config)
    theirs = {**inputs, "attention_mask": added}
    mine = {**inputs, "attention_mask": seen if kind == "boolean" else added}
    # The reference's eager attention would add True to the scores as 1; what a boolean mask means, the numbers tell it.
    assert_same_tensors(
        *(flat(model(**x, output_hidden_states=True)) for model, x in ((ours, mine), (reference, theirs)))
    )
    if attention == "sdpa":
        assert_same_outputs(ours, reference, mine)


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


@flex_warnings
@pytest.mark.parametrize("is_decoder", [False, True], ids=["encoder", "decoder"])
@paddings
def test_flex_attention(padding, is_decoder, references, uncompiled):
    ours, reference = references("Model", "flex_attention", is_decoder=is_decoder)
    assert_same_outputs(ours, reference, draw_inputs(reference.config, padding), output_hidden_states=True)


@flex_warnings
@pytest.mark.parametrize("head", ["Model", "ForMaskedLM"])
@pytest.mark.parametrize("how", ["argument", "configuration", "configuration from the start"])
@paddings
@pytest.mark.parametrize("attention", ["sdpa", "flex_attention"])
def test_maps_are_true(attention, padding, how, head, references, uncompiled):
    """If the kernel does not return attention maps, a model that is asked for them computes them. The reference leaves
    them out, or raises."""
    ours, reference = references(head, attention)
    _, eager = references(head, "eager")
    inputs = draw_inputs(reference.config, padding)
    asked = {}
    if how == "argument":
        asked = {"output_attentions": True}
        assert not reference(**inputs, **asked).attentions
    elif how == "configuration":
        ours.config.output_attentions = True
        with pytest.raises(ValueError, match="output_attentions"):
            reference.config.output_attentions = True
    else:
        weights = ours.state_dict()
        ours = OURS[head](tiny_config(attn_implementation=attention, output_attentions=True)).eval()
        ours.load_state_dict(weights)
        with pytest.raises(Exception, match="output_attentions"):
            tiny_config(BertConfig, attn_implementation=attention, output_attentions=True)

    outputs = ours(**inputs, **asked, output_hidden_states=True)

    expected = eager(**inputs, output_attentions=True, output_hidden_states=True)
    assert_same_tensors(flat(outputs), flat(expected))
    assert len(outputs.attentions) == 2
    for weights in outputs.attentions:
        assert weights.shape == (B, 4, T, T)
        torch.testing.assert_close(weights.sum(dim=-1), torch.ones(B, 4, T), rtol=0, atol=1e-6)
        assert not weights[~inputs["attention_mask"].bool()[:, None, None, :].expand_as(weights)].any()
    plain = ours(**inputs, output_attentions=False)
    assert "attentions" not in plain
    torch.testing.assert_close(outputs[0], plain[0], rtol=0, atol=TOLERANCE)
    assert ours.config._attn_implementation == attention


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("cast", ["whole model", "autocast"])
@paddings
@attentions
def test_half_precision(attention, padding, cast, dtype, references):
    """As close to the reference as the reference is to the exact result."""
    ours, reference = references("ForPreTraining", attention)
    inputs = draw_inputs(reference.config, padding)
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
        inputs |= TASKS["pre-training"].labels(reference.config, real)
        assert all(gradient.isfinite().all() for gradient in gradients(ours, inputs).values())


# ---------------------------------------------------------------------------------------------------------------------
# Decoders


def draw_encoder_output(config):
    """Another sequence's hidden states, of another length, and which of them are padding."""
    return {
        "encoder_hidden_states": torch.randn(B, S, config.hidden_size),
        "encoder_attention_mask": (torch.arange(S) < torch.tensor([6, 2, 4, 1])[:, None]).long(),
    }


crossings = pytest.mark.parametrize("cross", [False, True], ids=["self-attention only", "cross-attention"])


@pytest.mark.parametrize("head", ["Model", "ForMaskedLM", "ForCausalLM"])
@crossings
@paddings
@attentions
def test_decoder_outputs_and_gradients(attention, padding, cross, head, references):
    fields = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "is_decoder": True}
    ours, reference = references(head, attention, **fields, add_cross_attention=cross)
    inputs = draw_inputs(reference.config, padding) | (draw_encoder_output(reference.config) if cross else {})
    options = {"output_hidden_states": True, "output_attentions": attention == "eager"}
    assert_same_outputs(ours, reference, inputs, **options)
    if head != "ForMaskedLM":
        assert_same_outputs(ours, reference, inputs, **options, use_cache=False)
    as_tuples = [model(**inputs, **options, return_dict=False) for model in (ours, reference)]
    assert [type(part) for part in as_tuples[0]] == [type(part) for part in as_tuples[1]]
    if head != "Model":
        inputs |= TASKS["next word"].labels(reference.config, inputs["attention_mask"].bool())
    assert_same_gradients(ours.train(), reference.train(), inputs)


@pytest.mark.parametrize("given", [(), ("encoder_hidden_states",)], ids=["no encoder", "no mask"])
@attentions
def test_cross_attention_is_optional_and_so_is_its_mask(attention, given, references):
    ours, reference = references("Model", attention, is_decoder=True, add_cross_attention=True)
    encoded = draw_encoder_output(reference.config)
    inputs = draw_inputs(reference.config) | {name: encoded[name] for name in given}
    assert_same_outputs(ours, reference, inputs, output_attentions=attention == "eager")


@crossings
@pytest.mark.parametrize("padding", ["none", "right"])
@attentions
def test_decoder_maps(attention, padding, cross, references):
    ours, reference = references("Model", attention, is_decoder=True, add_cross_attention=cross)
    _, eager = references("Model", "eager", is_decoder=True, add_cross_attention=cross)
    inputs = draw_inputs(reference.config, padding) | (draw_encoder_output(reference.config) if cross else {})
    outputs, expected = (model(**inputs, output_attentions=True) for model in (ours, eager))
    assert_same_tensors(flat(outputs), flat(expected))
    assert len(outputs.cross_attentions) == (2 if cross else 0)
    for weights in outputs.cross_attentions:
        real = inputs["encoder_attention_mask"].bool()[:, None, None, :]
        assert weights.shape == (B, 4, T, S)
        torch.testing.assert_close(weights.sum(dim=-1), torch.ones(B, 4, T), rtol=0, atol=1e-6)
        assert not weights[~real.expand_as(weights)].any()


@pytest.mark.parametrize("head", ["Model", "ForCausalLM"])
@crossings
@pytest.mark.parametrize("padding", ["none", "left"])
@attentions
def test_cached_steps_equal_the_whole(attention, padding, cross, head, references):
    ours, reference = references(head, attention, is_decoder=True, add_cross_attention=cross)
    inputs = draw_inputs(reference.config, padding)
    encoded = draw_encoder_output(reference.config) if cross else {}
    real = inputs["attention_mask"].bool()
    with torch.no_grad():
        whole = ours(**inputs, **encoded, use_cache=False)[0]
        caches, ends = [None, None], [0, 4, 5, 6, T]
        for start, end in pairwise(ends):
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


KEPT = {"all": 0, "the last": 1, "the last four": 4, "some": torch.tensor([0, 3, 8])}


@pytest.mark.parametrize("kept", KEPT.values(), ids=KEPT)
@crossings
def test_logits_to_keep(kept, cross, references):
    ours, reference = references("ForCausalLM", add_cross_attention=cross)
    inputs = draw_inputs(reference.config) | (draw_encoder_output(reference.config) if cross else {})
    with torch.no_grad():
        mine, theirs = (flat(model(**inputs, logits_to_keep=kept)) for model in (ours, reference))
        whole = ours(**inputs).logits
    assert_same_tensors(mine, theirs)
    chosen = kept if not isinstance(kept, int) else slice(-kept or None, None)
    torch.testing.assert_close(mine["logits"], whole[:, chosen], rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("is_decoder", [False, True], ids=["both ways", "looks back only"])
@pytest.mark.parametrize("choose", ARGUMENTS.values(), ids=ARGUMENTS)
def test_arguments_of_a_causal_model(choose, is_decoder, references):
    ours, reference = references("ForCausalLM", is_decoder=is_decoder)
    inputs = choose(draw_inputs(reference.config), reference)
    assert_same_outputs(ours, reference, inputs, output_hidden_states=True, use_cache=False)
    labels = torch.randint(0, reference.config.vocab_size, (B, T))
    if choose is not one_token:  # after which there is nothing left to predict
        assert_same_gradients(ours, reference, inputs | {"labels": labels})


def test_the_loss_is_that_of_the_next_word(references):
    ours, _ = references("ForCausalLM")
    inputs = draw_inputs(ours.config)
    labels = inputs["input_ids"].masked_fill(torch.rand(B, T) < 0.3, -100)
    outputs = ours(**inputs, labels=labels, use_cache=True)
    predicted, words = outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    expected = -predicted.log_softmax(dim=-1)[torch.arange(len(words)), words.clamp(min=0)][words != -100].mean()
    torch.testing.assert_close(outputs.loss, expected)
    assert "past_key_values" not in outputs  # training has no use for one


def test_a_causal_model_that_sees_what_it_is_to_predict_is_warned_of(caplog):
    OURS["ForCausalLM"](tiny_config(is_decoder=True))
    assert not caplog.records
    OURS["ForCausalLM"](tiny_config())
    assert "is_decoder=True" in caplog.text


@pytest.mark.parametrize("is_decoder", [False, True], ids=["encoder", "decoder"])
@pytest.mark.parametrize("use_cache", [None, False, True])
@pytest.mark.parametrize("given", [False, True], ids=["new", "given"])
@pytest.mark.parametrize("head", ["Model", "ForCausalLM"])
def test_who_returns_a_cache(head, given, use_cache, is_decoder, references):
    """A decoder does, unless told not to. An encoder does not, even if told to."""
    ours, reference = references(head, is_decoder=is_decoder)
    inputs = draw_inputs(reference.config)
    returned = []
    for model in (ours, reference):
        cache = DynamicCache(config=model.config) if given and is_decoder else None
        outputs = model(**inputs, use_cache=use_cache, past_key_values=cache)
        returned.append("past_key_values" in outputs)
        if cache is not None:
            assert cache.get_seq_length() == T
    assert returned == [is_decoder and use_cache is not False] * 2


# ---------------------------------------------------------------------------------------------------------------------
# Real weights, real text


@pytest.fixture(scope="module")
def real_references(real_bert):
    return ScratchBertModel.from_pretrained(real_bert).eval(), BertModel.from_pretrained(real_bert).eval()


@pytest.mark.parametrize("padding", ["right", "left"])
@attentions
def test_real_weights_and_text(attention, padding, real_references, real_bert, reviews):
    ours, reference = real_references
    for model in real_references:
        model.set_attn_implementation(attention)
    tokenizer = AutoTokenizer.from_pretrained(real_bert, padding_side=padding)
    texts = [review["text"] for review in reviews]
    pairs = tokenizer(texts[:6], ["", *texts[6:11]], padding=True, return_tensors="pt")
    assert pairs["attention_mask"].float().mean() < 1
    assert_same_outputs(ours, reference, pairs, output_hidden_states=True, output_attentions=attention == "eager")
    if padding == "right":
        assert_same_gradients(ours, reference, pairs)


@pytest.mark.parametrize("classifier_dropout", [None, 0.0, 0.5])
@tasks
@attentions
def test_dropout_with_the_same_seed(attention, task, classifier_dropout, references):
    """A model and its reference draw the same random numbers in the same order, and so drop the same, forward and
    backward."""
    ours, reference = references(task.head, attention, **task.fields, classifier_dropout=classifier_dropout)
    inputs = task.inputs(reference.config, "right")

    def run(model, seed):
        torch.manual_seed(seed)
        tensors = flat(model(**inputs, output_hidden_states=True))
        return {**tensors, "next random number": torch.rand(1)}

    results = run(ours.train(), 1)
    assert_same_tensors(results, run(reference.train(), 1))
    assert not torch.equal(run(ours, 2)["hidden_states.0"], results["hidden_states.0"])
    assert_same_gradients(ours, reference, inputs)
