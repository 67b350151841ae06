"""The block and the stack against PyTorch's own, which has both places for the norm, and a decoder."""

import pytest
import torch
from torch import nn

from modeling_scratchbert import ScratchBertModel
from modeling_scratchbert.transformer import TransformerBlock, TransformerStack
from support.models import CROSSED, randomise, tiny_config

B, T, S, C = 3, 7, 5, 16
EPS = 1e-5  # torch's default for its norms, and large enough to show if it is not passed on

# How torch calls the parts of a block, and how we do.
PARTS = {
    "self_attn": "attention",
    "multihead_attn": "cross_attention",
    "linear1": "feed_forward.intermediate",
    "linear2": "feed_forward.output",
}
ENCODER_NORMS = {"norm1": "attention_norm", "norm2": "feed_forward_norm"}
DECODER_NORMS = {"norm1": "attention_norm", "norm2": "cross_attention_norm", "norm3": "feed_forward_norm"}

norm_places = pytest.mark.parametrize("norm_first", [False, True], ids=["post-norm", "pre-norm"])
implementations = pytest.mark.parametrize("implementation", ["eager", "sdpa"])


def copy_block(theirs: nn.Module, ours: TransformerBlock) -> None:
    parts = PARTS | (DECODER_NORMS if isinstance(theirs, nn.TransformerDecoderLayer) else ENCODER_NORMS)
    state = {}
    for name, tensor in theirs.state_dict().items():
        part, _, rest = name.partition(".")
        if rest.startswith("in_proj_"):
            for ours_name, piece in zip(("query", "key", "value"), tensor.chunk(3), strict=True):
                state[f"{parts[part]}.{ours_name}.{rest.removeprefix('in_proj_')}"] = piece
        else:
            state[f"{parts[part]}.{rest.replace('out_proj', 'output')}"] = tensor
    ours.load_state_dict(state)


def make_torch_layer(layer_class, norm_first, width=C, heads=4, inner=2 * C):
    # Dropout 0 and train(): in eval() torch may take a fused path that has another order of operations.
    return randomise(layer_class(width, heads, inner, 0.0, "gelu", EPS, batch_first=True, norm_first=norm_first))


def make_config(norm_first, implementation="sdpa", **fields):
    sizes = {"hidden_size": C, "intermediate_size": 2 * C}
    places = {"norm_first": norm_first, "attn_implementation": implementation, "layer_norm_eps": EPS}
    return tiny_config(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, **(sizes | places | fields))


def padding_mask(lengths, size) -> torch.Tensor:
    """`(B, size)`, True for the tokens."""
    return torch.arange(size) < torch.tensor(lengths)[:, None]


def draw_masks(kind):
    """The same mask as torch's layer takes it, `(padding, attention mask)`, and as ours does: True where one may look,
    or numbers to add."""
    real = padding_mask([T, 4, 1], T)
    seen = (torch.rand(T, T) < 0.6).index_fill(-1, torch.tensor(0), True)
    bias = torch.randn(T, T, dtype=torch.float64)
    return {
        "none": (None, None, None),
        "padding": (~real, None, real[:, None, None, :]),
        "additive": (None, bias, bias[None, None]),
        "padding and boolean": (~real, ~seen, real[:, None, None, :] & seen),
    }[kind]


def draw_states(*shape) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def assert_same(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)


@norm_places
@implementations
@pytest.mark.parametrize("kind", ["none", "padding", "additive", "padding and boolean"])
def test_encoder_of_torch(kind, implementation, norm_first):
    layer = make_torch_layer(nn.TransformerEncoderLayer, norm_first)
    # A pre-norm stack ends with one more norm; a post-norm one has just normalised.
    norm = nn.LayerNorm(C, eps=EPS) if norm_first else None
    theirs = randomise(nn.TransformerEncoder(layer, 3, norm, enable_nested_tensor=False)).double()
    ours = TransformerStack(make_config(norm_first, implementation, num_hidden_layers=3)).double()
    for their_block, our_block in zip(theirs.layers, ours.blocks, strict=True):
        copy_block(their_block, our_block)
    if norm_first:
        ours.final_norm.load_state_dict(theirs.norm.state_dict())
    x = draw_states(B, T, C)
    padding, their_mask, our_mask = draw_masks(kind)
    assert_same(ours(x, our_mask), theirs(x, mask=their_mask, src_key_padding_mask=padding))


# Width, heads, feed-forward, and how many sequences of how many words look at how many
SHAPES = [(16, 4, 32, 3, 7, 5), (18, 3, 7, 2, 5, 11), (5, 1, 1, 1, 1, 1), (12, 12, 31, 4, 3, 1)]


@norm_places
@implementations
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_decoder_layer_of_torch(shape, implementation, norm_first):
    """All three masks at once: what comes later, the target's padding and the source's."""
    width, heads, inner, batch, targets, sources = shape
    theirs = make_torch_layer(nn.TransformerDecoderLayer, norm_first, width, heads, inner).double()
    sizes = {"hidden_size": width, "num_attention_heads": heads, "intermediate_size": inner}
    ours = TransformerBlock(make_config(norm_first, implementation, **sizes, **CROSSED)).double()
    copy_block(theirs, ours)
    x, memory = draw_states(batch, targets, width), draw_states(batch, sources, width)
    causal = torch.ones(targets, targets).tril().bool()
    real, seen = (padding_mask(torch.randint(1, n + 1, (batch,)).tolist(), n) for n in (targets, sources))
    expected = theirs(x, memory, tgt_mask=~causal, tgt_key_padding_mask=~real, memory_key_padding_mask=~seen)
    actual = ours(x, real[:, None, None, :] & causal, memory, encoder_attention_mask=seen[:, None, None, :])
    assert_same(actual, expected)


@norm_places
def test_hidden_states_are_the_outputs_of_the_blocks(norm_first):
    model = randomise(ScratchBertModel(tiny_config(norm_first=norm_first))).eval()
    ids = torch.randint(1, 99, (B, T))
    outputs = model(ids, output_hidden_states=True)
    expected = [model.embeddings(ids)]
    for block in model.encoder.blocks:
        expected.append(block(expected[-1]))
    # As elsewhere in transformers, the last one is the model's own output: behind the last norm.
    expected[-1] = model.encoder.final_norm(expected[-1])
    torch.testing.assert_close(outputs.hidden_states, tuple(expected), rtol=0, atol=0)
    assert outputs.hidden_states[-1] is outputs.last_hidden_state


def test_dropout_is_applied_to_each_sub_layer_and_not_to_the_sum():
    """With everything dropped, a pre-norm block returns its input."""
    block = randomise(TransformerBlock(make_config(True, "eager", **CROSSED))).train()
    block.dropout.p = 1.0
    x = torch.randn(B, T, C)
    assert torch.equal(block(x, encoder_hidden_states=torch.randn(B, S, C)), x)
    block.dropout.p = 0.0
    assert not torch.equal(block(x), x)
