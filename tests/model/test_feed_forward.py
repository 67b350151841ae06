"""The feed-forward layer against its formula, and its chunks against the whole."""

import math

import pytest
import torch

from modeling_scratchbert.feed_forward import FeedForward
from support.models import randomise, tiny_config

ACTIVATIONS = {
    "gelu": lambda x: x / 2 * (1 + torch.erf(x / math.sqrt(2))),
    "gelu_new": lambda x: x / 2 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    "relu": lambda x: x.clamp(min=0),
}


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_formula(activation):
    layer = randomise(FeedForward(tiny_config(hidden_act=activation))).double()
    first, second = layer.intermediate, layer.output
    x = 3 * torch.randn(2, 5, 32, dtype=torch.float64)
    inner = ACTIVATIONS[activation](x @ first.weight.T + first.bias)
    torch.testing.assert_close(layer(x), inner @ second.weight.T + second.bias)


@pytest.mark.parametrize("chunk_size", [1, 2, 3])
def test_chunks(chunk_size):
    whole = randomise(FeedForward(tiny_config()))
    chunked = FeedForward(tiny_config(chunk_size_feed_forward=chunk_size))
    chunked.load_state_dict(whole.state_dict())
    lengths = []
    chunked.intermediate.register_forward_hook(lambda module, args, output: lengths.append(args[0].shape[1]))
    x, upstream = torch.randn(2, 6, 32, requires_grad=True), torch.randn(2, 6, 32)
    results = []
    for layer in (whole, chunked):
        output = layer(x)
        results.append((output, *torch.autograd.grad(output, [x, *layer.parameters()], upstream)))
    assert lengths == [chunk_size] * (6 // chunk_size)
    torch.testing.assert_close(*results, rtol=0, atol=1e-5)


def test_length_that_chunks_do_not_divide_is_refused():
    with pytest.raises(ValueError, match="chunk"):
        FeedForward(tiny_config(chunk_size_feed_forward=4))(torch.randn(2, 6, 32))
