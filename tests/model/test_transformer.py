"""The block and the stack against PyTorch's own, which has both places for the norm, and a decoder."""

import pytest
import torch
from torch import nn

from modeling_scratchbert import ScratchBertModel
from modeling_scratchbert.transformer import TransformerBlock, TransformerStack
from support.models import randomise, tiny_config

B, T, S, C = 3, 7, 5, 16
EPS = 1e-5  # torch's default for its norms, and large enough to show if it is not passed on

# How torch calls the parts of a block, and how we do.
PARTS = {
    "self_attn": "attention",
    "multihead_attn": "cross_attention",
    "linear1": "feed_forward.intermediate",
    "linear2": "feed_forward.output",
}


def copy_block(theirs: nn.Module, ours: TransformerBlock) -> None:
    norms = ["attention_norm", "cross_attention_norm", "feed_forward_norm"]
    if isinstance(theirs, nn.TransformerEncoderLayer):
        norms.remove("cross_attention_norm")
    state = {}
    for name, tensor in theirs.state_dict().items():
        part, _, rest = name.partition(".")
        if part.startswith("norm"):
            state[f"{norms[int(part.removeprefix('norm')) - 1]}.{rest}"] = tensor
        elif rest.startswith("in_proj_"):
            for ours_name, piece in zip(("query", "key", "value"), tensor.chunk(3), strict=True):
                state[f"{PARTS[part]}.{ours_name}.{rest.removeprefix('in_proj_')}"] = piece
        else:
            state[f"{PARTS[part]}.{rest.replace('out_proj', 'output')}"] = tensor
    ours.load_state_dict(state)


def copy_stack(theirs: nn.Module, ours: TransformerStack) -> None:
    for their_block, our_block in zip(theirs.layers, ours.blocks, strict=True):
        copy_block(their_block, our_block)
    if theirs.norm is not None:
        ours.final_norm.load_state_dict(theirs.norm.state_dict())


def their_arguments(norm_first, activation):
    # Dropout 0 and train(): in eval() torch may take a fused path that has another order of operations.
    return {
        "d_model": C,
        "nhead": 4,
        "dim_feedforward": 2 * C,
        "dropout": 0.0,
        "activation": activation,
        "layer_norm_eps": EPS,
        "batch_first": True,
        "norm_first": norm_first,
    }


def our_config(norm_first, activation, implementation, **fields):
    return tiny_config(
        hidden_size=C,
        intermediate_size=2 * C,
        norm_first=norm_first,
        hidden_act=activation,
        layer_norm_eps=EPS,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        attn_implementation=implementation,
        **fields,
    )


def padding_mask(lengths, size) -> torch.Tensor:
    """`(B, size)`, True for the tokens."""
    return torch.arange(size) < torch.tensor(lengths)[:, None]


def draw_masks(kind, dtype=torch.float32):
    """The same mask as torch's layer takes it, `(padding, attention mask)`, and as ours does: True where one may look,
    or numbers to add."""
    real = padding_mask([T, 4, 1], T)
    seen = (torch.rand(T, T) < 0.6).index_fill(-1, torch.tensor(0), True)
    bias = torch.randn(T, T, dtype=dtype)
    return {
        "none": (None, None, None),
        "padding": (~real, None, real[:, None, None, :]),
        "boolean": (None, ~seen, seen[None, None].expand(B, 1, T, T)),
        "additive": (None, bias, bias[None, None]),
        "padding and boolean": (~real, ~seen, real[:, None, None, :] & seen),
        "causal": (None, ~torch.ones(T, T).tril().bool(), torch.ones(1, 1, T, T).tril().bool()),
    }[kind]


def dtypes(tolerance):
    """In float32 within `tolerance`; and in float64, where rounding hides nothing."""
    return pytest.mark.parametrize(
        ("dtype", "tolerance"), [(torch.float32, tolerance), (torch.float64, 1e-12)], ids=["float32", "float64"]
    )


norm_places = pytest.mark.parametrize("norm_first", [False, True], ids=["post-norm", "pre-norm"])
activations = pytest.mark.parametrize("activation", ["relu", "gelu"])


implementations = pytest.mark.parametrize("implementation", ["eager", "sdpa"])
mask_kinds = ["none", "padding", "boolean", "additive", "padding and boolean", "causal"]


@dtypes(1e-6)
@norm_places
@activations
@implementations
@pytest.mark.parametrize("kind", mask_kinds)
def test_block_is_torchs_encoder_layer(kind, implementation, activation, norm_first, dtype, tolerance):
    theirs = randomise(nn.TransformerEncoderLayer(**their_arguments(norm_first, activation))).to(dtype).train()
    ours = TransformerBlock(our_config(norm_first, activation, implementation)).to(dtype)
    copy_block(theirs, ours)
    x = torch.randn(B, T, C, dtype=dtype)
    padding, their_mask, our_mask = draw_masks(kind, dtype)
    expected = theirs(x, src_mask=their_mask, src_key_padding_mask=padding)
    torch.testing.assert_close(ours(x, our_mask), expected, rtol=0, atol=tolerance)


@dtypes(1e-6)  # three sub-layers' roundings
@norm_places
@activations
@implementations
@pytest.mark.parametrize("kind", mask_kinds)
def test_block_is_torchs_decoder_layer(kind, implementation, activation, norm_first, dtype, tolerance):
    theirs = randomise(nn.TransformerDecoderLayer(**their_arguments(norm_first, activation))).to(dtype).train()
    config = our_config(norm_first, activation, implementation, is_decoder=True, add_cross_attention=True)
    ours = TransformerBlock(config).to(dtype)
    copy_block(theirs, ours)
    x, memory = torch.randn(B, T, C, dtype=dtype), torch.randn(B, S, C, dtype=dtype)
    padding, their_mask, our_mask = draw_masks(kind, dtype)
    if our_mask is None:
        our_mask = torch.ones(1, 1, T, T, dtype=torch.bool)  # without one, the block's own sdpa kernel looks back only
    real = padding_mask([S, 2, 1], S)
    expected = theirs(x, memory, tgt_mask=their_mask, tgt_key_padding_mask=padding, memory_key_padding_mask=~real)
    actual = ours(x, our_mask, memory, encoder_attention_mask=real[:, None, None, :])
    torch.testing.assert_close(actual, expected, rtol=0, atol=tolerance)


# Width, heads, feed-forward, and how many sequences of how many words look at how many
ODD_SHAPES = [(18, 3, 7, 2, 5, 11), (5, 1, 1, 1, 1, 1), (12, 12, 31, 4, 3, 1), (10, 5, 20, 1, 13, 2)]


@norm_places
@pytest.mark.parametrize("shape", ODD_SHAPES, ids=str)
def test_decoder_block_of_any_shape(shape, norm_first):
    """All three masks at once: what comes later, the target's padding and the source's."""
    width, heads, inner, batch, targets, sources = shape
    arguments = their_arguments(norm_first, "gelu") | {"d_model": width, "nhead": heads, "dim_feedforward": inner}
    theirs = randomise(nn.TransformerDecoderLayer(**arguments)).train()
    sizes = {"hidden_size": width, "num_attention_heads": heads, "intermediate_size": inner}
    config = our_config(norm_first, "gelu", "sdpa", is_decoder=True, add_cross_attention=True)
    for name, size in sizes.items():
        setattr(config, name, size)
    ours = TransformerBlock(config)
    copy_block(theirs, ours)
    x, memory = torch.randn(batch, targets, width), torch.randn(batch, sources, width)
    causal = torch.ones(targets, targets).tril().bool()
    real, seen = (padding_mask(torch.randint(1, n + 1, (batch,)).tolist(), n) for n in (targets, sources))
    expected = theirs(x, memory, tgt_mask=~causal, tgt_key_padding_mask=~real, memory_key_padding_mask=~seen)
    actual = ours(x, real[:, None, None, :] & causal, memory, encoder_attention_mask=seen[:, None, None, :])
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-6)


@dtypes(3e-6)  # eight sub-layers' roundings
@norm_places
@activations
@implementations
def test_stack_is_torchs_encoder(implementation, activation, norm_first, dtype, tolerance):
    layer = nn.TransformerEncoderLayer(**their_arguments(norm_first, activation))
    # A pre-norm stack ends with one more norm; a post-norm one has just normalised.
    norm = nn.LayerNorm(C, eps=EPS) if norm_first else None
    theirs = randomise(nn.TransformerEncoder(layer, 4, norm=norm, enable_nested_tensor=False)).to(dtype).train()
    config = our_config(norm_first, activation, implementation, num_hidden_layers=4)
    ours = TransformerStack(config).to(dtype)
    copy_stack(theirs, ours)
    x = torch.randn(B, T, C, dtype=dtype)
    padding, their_mask, our_mask = draw_masks("padding and boolean")
    expected = theirs(x, mask=their_mask, src_key_padding_mask=padding)
    actual = ours(x, our_mask)
    torch.testing.assert_close(actual, expected, rtol=0, atol=tolerance)


@dtypes(3e-6)  # nine sub-layers' roundings
@norm_places
@activations
@implementations
def test_stack_is_torchs_decoder(implementation, activation, norm_first, dtype, tolerance):
    layer = nn.TransformerDecoderLayer(**their_arguments(norm_first, activation))
    norm = nn.LayerNorm(C, eps=EPS) if norm_first else None
    theirs = randomise(nn.TransformerDecoder(layer, 3, norm=norm)).to(dtype).train()
    decoder = {"is_decoder": True, "add_cross_attention": True, "num_hidden_layers": 3}
    ours = TransformerStack(our_config(norm_first, activation, implementation, **decoder)).to(dtype)
    copy_stack(theirs, ours)
    x, memory = torch.randn(B, T, C, dtype=dtype), torch.randn(B, S, C, dtype=dtype)
    _, their_causal, our_causal = draw_masks("causal")
    real, seen = padding_mask([T, 4, 1], T), padding_mask([S, 2, 1], S)
    expected = theirs(x, memory, tgt_mask=their_causal, tgt_key_padding_mask=~real, memory_key_padding_mask=~seen)
    actual = ours(x, real[:, None, None, :] & our_causal, memory, encoder_attention_mask=seen[:, None, None, :])
    torch.testing.assert_close(actual, expected, rtol=0, atol=tolerance)


@norm_places
def test_model_returns_every_blocks_output(norm_first):
    model = randomise(ScratchBertModel(tiny_config(norm_first=norm_first, num_hidden_layers=3, hidden_size=C))).eval()
    ids = torch.randint(1, 99, (B, T))
    outputs = model(ids, output_hidden_states=True)
    hidden_states = model.embeddings(ids)
    expected = [hidden_states]
    for block in model.encoder.blocks:
        hidden_states = block(hidden_states)
        expected.append(hidden_states)
    # As elsewhere in transformers, the last one is the model's own output: behind the last norm.
    expected[-1] = model.encoder.final_norm(expected[-1])
    for actual, state in zip(outputs.hidden_states, expected, strict=True):
        torch.testing.assert_close(actual, state, rtol=0, atol=0)
    assert outputs.hidden_states[-1] is outputs.last_hidden_state


def test_dropout_stands_on_each_sub_layer_and_not_on_the_sum():
    """With everything dropped, a pre-norm block hands its input on as it is."""
    config = our_config(True, "gelu", "eager", is_decoder=True, add_cross_attention=True)
    block = randomise(TransformerBlock(config)).train()
    block.dropout.p = 1.0
    x = torch.randn(B, T, C)
    assert torch.equal(block(x, encoder_hidden_states=torch.randn(B, S, C)), x)
    block.dropout.p = 0.0
    assert not torch.equal(block(x), x)


def test_no_blocks_at_all():
    """What goes in comes out of a post-norm stack without blocks; a pre-norm one still normalises."""
    x = torch.randn(B, T, C)
    post_norm, pre_norm = (
        TransformerStack(tiny_config(num_hidden_layers=0, hidden_size=C, norm_first=norm_first))
        for norm_first in (False, True)
    )
    assert torch.equal(post_norm(x), x)
    torch.testing.assert_close(pre_norm(x), nn.functional.layer_norm(x, (C,), eps=1e-12))
