"""A batch is unpadded only if every module is known to treat tokens one by one, at each call anew."""

import copy
import pickle

import accelerate
import pytest
import torch
from torch import nn
from transformers.activations import ACT2CLS, ACT2FN
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING

from modeling_scratchbert import ScratchBertModel
from modeling_scratchbert.attention import MultiHeadAttention
from modeling_scratchbert.feed_forward import FeedForward
from support.comparison import assert_same_tensors
from support.models import OURS
from support.unpadded import FLASH, LENGTHS, draw, flattened, make, observed_shapes

UNPADDED, PADDED = {(1, sum(LENGTHS), 32)}, {(5, 9, 32)}


class Convolution(nn.Module):
    """A causal convolution over the tokens, after another module: (B, T, …) → (B, T, C)."""

    def __init__(self, before: nn.Module):
        super().__init__()
        self.before = before

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.before(x)
        return y + nn.functional.pad(y, (0, 0, 1, 0))[:, :-1]


def shapes(model, **options) -> set[tuple]:
    """The shapes that attention is given for a padded batch."""
    with observed_shapes(MultiHeadAttention.forward) as seen, torch.no_grad():
        model(**draw(), **options)
    return set(seen)


PLACES = [
    "embeddings.word_embeddings",
    "embeddings.dropout",
    "encoder.blocks.1.attention.query",
    "encoder.blocks.0.attention.output",
    "encoder.blocks.1.feed_forward.intermediate",
    "encoder.blocks.0.feed_forward.activation",
    "encoder.blocks.1.attention_norm",
    "encoder.final_norm",
]


@pytest.mark.parametrize("place", PLACES)
def test_a_module_that_mixes_tokens_is_given_each_text_alone(place):
    ours, batch = make(), draw()
    assert shapes(ours) == UNPADDED
    ours.set_submodule(place, Convolution(ours.get_submodule(place)))
    outputs = ours(**batch).last_hidden_state
    for row, length in enumerate(LENGTHS):
        alone = ours(batch["input_ids"][row : row + 1, :length]).last_hidden_state
        assert_same_tensors({"": outputs[row : row + 1, :length]}, {"": alone})
    assert shapes(ours) == PADDED
    packed = ours(**flattened(batch, **FLASH)).last_hidden_state
    assert packed.shape == (1, sum(LENGTHS), 32)  # as the caller packed them: that module sees one row


def feed_forward(model) -> FeedForward:
    return model.encoder.blocks[0].feed_forward


def patch_below_accelerate(model) -> None:
    setattr(feed_forward(model), "forward", lambda x: x)  # noqa: B010
    accelerate.hooks.add_hook_to_module(feed_forward(model), accelerate.hooks.ModelHook())


CHANGES = {
    "forward below Accelerate's": patch_below_accelerate,
    "forward of an instance": lambda model: setattr(feed_forward(model), "forward", lambda x: x),
    "another method of an instance": lambda model: setattr(feed_forward(model), "formula", lambda x: x),
    "projection of an instance": lambda model: setattr(
        model.encoder.blocks[1].attention, "project", lambda x: (x, x, x)
    ),
    "hook": lambda model: model.encoder.blocks[1].attention.key.register_forward_hook(lambda *_: None),
    "class of an instance": lambda model: setattr(model.encoder.blocks[0].dropout, "__class__", nn.AlphaDropout),
    "block of a subclass": lambda model: setattr(
        model.encoder.blocks[0], "feed_forward", type("Own", (FeedForward,), {})(model.config)
    ),
    "more blocks": lambda model: model.encoder.blocks.append(Convolution(nn.Identity())),
    "PReLU": lambda model: setattr(model.encoder.blocks[0].feed_forward, "activation", nn.PReLU(1)),
    "norm of two dimensions": lambda model: setattr(model.embeddings, "norm", nn.LayerNorm((9, 32))),
    "parametrization": lambda model: nn.utils.parametrizations.weight_norm(model.encoder.blocks[0].attention.output),
    "compiled part": lambda model: model.encoder.blocks[0].attention.output.compile(),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_change_between_two_calls_is_noticed(change):
    ours = make()
    assert [shapes(ours), shapes(ours)] == [UNPADDED, UNPADDED]
    change(ours)
    assert not all(ours.inspection(ours.embeddings, ours.encoder))


@pytest.mark.parametrize(
    "cls", [MultiHeadAttention, FeedForward, nn.Linear, nn.LayerNorm], ids=lambda cls: cls.__name__
)
def test_a_forward_that_is_replaced_in_a_class_sees_padded_tensors(cls, monkeypatch):
    ours, forward, seen = make(), cls.forward, []
    assert shapes(ours) == UNPADDED

    def patched(self, hidden_states, *args, **kwargs):
        seen.append(tuple(hidden_states.shape[:2]))
        return forward(self, hidden_states, *args, **kwargs)

    monkeypatch.setattr(cls, "forward", patched)
    ours(**draw())
    assert set(seen) <= {(5, 9), (5, 32)}  # the pooler's layer sees (5, 32)
    monkeypatch.undo()
    assert shapes(ours) == UNPADDED


def test_a_kernel_that_is_registered_again_is_given_the_batch(monkeypatch):
    ours, sdpa, seen = make(), ALL_ATTENTION_FUNCTIONS["sdpa"], []

    def kernel(module, query, key, value, attention_mask, **kwargs):
        seen.append((tuple(query.shape), attention_mask is not None))
        return sdpa(module, query, key, value, attention_mask, **kwargs)

    packed = flattened(draw(), **FLASH)
    expected = ours(**packed).last_hidden_state
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "sdpa", kernel)
    for options in ({}, {"padding_free": True}):  # which overrules the check of modules and hooks, nothing else
        ours(**draw(), **options)
    assert set(seen) == {((5, 4, 9, 8), True)}
    seen.clear()
    assert_same_tensors({"": ours(**packed).last_hidden_state}, {"": expected})
    assert set(seen) == {((1, 4, sum(LENGTHS), 8), True)}


@pytest.mark.parametrize("mark", ["cu_seq_lens_q", "position_ids"])
def test_packed_sequences_with_flex_attention_are_refused_on_a_cpu(mark):
    """torch aborts the process."""
    packed = flattened(draw(), return_flash_attn_kwargs=mark == "cu_seq_lens_q")
    with pytest.raises(ValueError, match="flex_attention"):
        make(attention="flex_attention")(**packed)


class Scale(nn.Module):
    def forward(self, x):
        return 2 * x


class DeclaredScale(Scale):
    is_position_wise = True


class DerivedScale(DeclaredScale):
    pass


@pytest.mark.parametrize(("cls", "expected"), [(Scale, PADDED), (DeclaredScale, UNPADDED), (DerivedScale, PADDED)])
def test_a_class_declares_for_itself_that_it_treats_tokens_one_by_one(cls, expected):
    ours = make()
    ours.encoder.blocks[0].feed_forward.activation = cls()
    assert shapes(ours) == expected
    assert shapes(ours, padding_free=True) == UNPADDED
    ours.encoder.blocks[0].feed_forward.activation.forward = lambda x: x
    assert shapes(ours) == PADDED


@pytest.mark.parametrize("name", sorted(ACT2CLS))
def test_activations(name):
    x = torch.randn(2, 3, 8, 8).to(torch.float32)
    is_elementwise = name != "prelu"
    ours = make(hidden_act=name)
    assert shapes(ours) == (UNPADDED if is_elementwise else PADDED)
    if is_elementwise and name != "xielu":  # which computes in bfloat16
        whole, parts = ACT2FN[name](x), torch.stack([ACT2FN[name](row) for row in x.unbind(1)], dim=1)
        torch.testing.assert_close(whole, parts)


def test_a_pooler_of_another_class_is_given_the_padding():
    class Mean(nn.Module):
        def forward(self, hidden_states):
            return hidden_states.mean(dim=1)

    ours = make()
    ours.pooler, batch = Mean(), draw()
    expected = ours(**batch, padding_free=False).pooler_output
    assert_same_tensors({"": ours(**batch).pooler_output}, {"": expected})


@pytest.mark.parametrize(
    "way", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))], ids=["copy", "pickle"]
)
def test_a_copy_is_inspected_anew(way):
    ours = make()
    assert shapes(ours) == UNPADDED
    copied = way(ours)
    copied.encoder.blocks[0].feed_forward.activation = Scale()
    assert shapes(copied) == PADDED
    assert shapes(ours) == UNPADDED


def test_a_hook_that_is_removed_counts_no_longer():
    ours = make()
    handle = ours.encoder.register_forward_hook(lambda *_: None)
    assert shapes(ours) == PADDED
    handle.remove()
    assert shapes(ours) == UNPADDED


# Where the layers of each quantiser of transformers come from; those of torchao are `nn.Linear`, with other weights.
QUANTIZED_LAYERS = dict.fromkeys(AUTO_QUANTIZER_MAPPING, "a_quantizer.Linear") | {"torchao": "torch.nn.Linear"}


@pytest.mark.parametrize("quantizer", QUANTIZED_LAYERS)
def test_layers_of_quantizers(quantizer):
    ours = make()
    if quantizer == "torchao":
        quantize = pytest.importorskip("torchao.quantization")
        quantize.quantize_(ours.encoder, quantize.Int8WeightOnlyConfig())
        assert shapes(ours) == UNPADDED
        return
    module, name = QUANTIZED_LAYERS[quantizer].rsplit(".", 1)
    layer = type(
        name, (nn.Linear,), {"__module__": module, "forward": lambda self, x: nn.functional.linear(x, self.weight)}
    )
    ours.encoder.blocks[0].attention.output = layer(32, 32)
    assert shapes(ours) == PADDED


@pytest.mark.parametrize("head", ["ForMaskedLM", "ForPreTraining"])
def test_a_model_head_that_is_not_known_is_given_the_batch(head):
    ours, seen = make(OURS[head]), []
    ours.lm_head.activation = Convolution(ours.lm_head.activation)
    ours.lm_head.norm.forward = lambda x: seen.append(tuple(x.shape)) or nn.functional.layer_norm(x, (32,))
    with torch.no_grad():
        ours(**draw())
    assert seen == [(5, 9, 32)]
    assert isinstance(ours.base_model, ScratchBertModel)
