"""The feed-forward layer against its formula, and its chunks against the whole and against the reference's."""

import math

import pytest
import torch
from transformers import BertConfig
from transformers.models.bert.modeling_bert import BertLayer

from modeling_scratchbert.feed_forward import FeedForward
from modeling_scratchbert.transformer import TransformerBlock
from support.models import randomise, tiny_config

ACTIVATIONS = {
    "gelu": lambda x: x / 2 * (1 + torch.erf(x / math.sqrt(2))),
    "gelu_new": lambda x: x / 2 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    "relu": lambda x: x.clamp(min=0),
    "silu": lambda x: x / (1 + torch.exp(-x)),
}


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_is_the_formula(activation):
    layer = randomise(FeedForward(tiny_config(hidden_act=activation)))
    w1, b1, w2, b2 = (
        tensor.double() for linear in (layer.intermediate, layer.output) for tensor in (linear.weight.T, linear.bias)
    )
    x = 3 * torch.randn(2, 5, 32)
    expected = ACTIVATIONS[activation](x.double() @ w1 + b1) @ w2 + b2
    torch.testing.assert_close(layer(x).double(), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("chunk_size", [1, 2, 3, 6])
def test_chunks_give_what_the_whole_gives(chunk_size):
    whole = randomise(FeedForward(tiny_config()))
    chunked = FeedForward(tiny_config(chunk_size_feed_forward=chunk_size))
    chunked.load_state_dict(whole.state_dict())
    lengths = []
    chunked.intermediate.register_forward_hook(lambda module, args, output: lengths.append(args[0].shape[1]))
    results = []
    x = torch.randn(2, 6, 32)
    upstream = torch.randn(2, 6, 32)
    for layer in (whole, chunked):
        leaf = x.clone().requires_grad_()
        output = layer(leaf)
        results.append((output, *torch.autograd.grad(output, [leaf, *layer.parameters()], upstream)))
    assert lengths == [chunk_size] * (6 // chunk_size)
    for expected, actual in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5)


def test_chunks_that_do_not_fit_are_refused_as_the_reference_refuses_them():
    x = torch.randn(2, 6, 32)
    messages = []
    for block in (
        TransformerBlock(tiny_config(chunk_size_feed_forward=4, attn_implementation="eager")),
        BertLayer(tiny_config(BertConfig, chunk_size_feed_forward=4, attn_implementation="eager")),
    ):
        with pytest.raises(ValueError, match=r"6 .*chunk size 4") as caught:
            block(x)
        messages.append(str(caught.value))
    assert messages[0] == messages[1]
