"""What the tests of `optimize_for_inference` share."""

import pytest
import torch
from torch import nn

from modeling_scratchbert import ScratchBertConfig
from modeling_scratchbert.cpu.layers import PrepackedLayer, PrepackedModule
from modeling_scratchbert.cpu.library import find_library
from modeling_scratchbert.cpu.matrices import Matrix, TorchMatrix
from modeling_scratchbert.cpu.optimization import Prepacker
from modeling_scratchbert.cpu.stack import OptimizedStack
from support.comparison import flat
from support.models import ENCODER_DECODERS, NEEDS, OURS, TINY, randomise

# A width that no vector register divides.
ODD = {**TINY, "hidden_size": 36, "bos_token_id": 1}


TIED = {"tie_encoder_decoder": True}


HAS_LIBRARY = find_library() is not None
needs_library = pytest.mark.skipif(not HAS_LIBRARY, reason="the library in C++ is not in use")
INT8 = pytest.param("int8", marks=needs_library)
DTYPES = [torch.float32, INT8]


KINDS = [*((head, {}) for head in OURS), *((head, TIED) for head in ENCODER_DECODERS)]


every_model = pytest.mark.parametrize(("head", "fields"), KINDS, ids=lambda value: str(value) if value else "")


def make(head="ForMaskedLM", **fields):
    return randomise(OURS[head](ScratchBertConfig(**{**ODD, **NEEDS.get(head, {}), **fields}))).eval()


def layers(model):
    """The modules with prepacked weights: the stacks, and the linear layers of the model heads."""
    return [module for module in model.modules() if isinstance(module, PrepackedModule)]


def matrices_of(model):
    found = layers(model)
    stacks = [each for each in found if isinstance(each, OptimizedStack)]
    found += [weights for stack in stacks for block in stack.blocks for weights in vars(block).values()]
    return {
        each for each in (getattr(each, "matrix", each) for each in found) if isinstance(each, Matrix | TorchMatrix)
    }


def all_prepacked(model):
    return bool(layers(model)) and not any(type(module) is nn.Linear for module in model.modules())


def prepack(layer: nn.Linear) -> PrepackedLayer:
    return Prepacker(layer.weight.dtype, layer.weight.dtype, {}).layer(layer)


def product(*arguments) -> PrepackedLayer:
    """x Wᵀ + b with a matrix of these arguments."""
    return PrepackedLayer(torch.float32, Matrix(*arguments))


def compute(model, inputs):
    """Every output; for whole sentences, so that padding, of which a model may say anything, is left out."""
    whole = {name: torch.ones_like(value) if name == "attention_mask" else value for name, value in inputs.items()}
    with torch.no_grad():
        return flat(model(**whole))


def assert_equal_tensors(actual, expected):
    assert list(actual) == list(expected)
    assert all(torch.equal(actual[name], tensor) for name, tensor in expected.items())
