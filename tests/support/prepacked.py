"""What the tests of `optimize_for_inference` share."""

import importlib
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

import modeling_scratchbert
from modeling_scratchbert import ScratchBertConfig
from modeling_scratchbert.inference import PrepackedLinear
from support.comparison import flat
from support.models import ENCODER_DECODERS, NEEDS, OURS, TINY, randomise

# A width that no vector register divides.
ODD = {**TINY, "hidden_size": 36, "bos_token_id": 1}


TIED = {"tie_encoder_decoder": True}


KINDS = [*((head, {}) for head in OURS), *((head, TIED) for head in ENCODER_DECODERS)]


every_model = pytest.mark.parametrize(("head", "fields"), KINDS, ids=lambda value: str(value) if value else "")


def make(head="ForMaskedLM", **fields):
    return randomise(OURS[head](ScratchBertConfig(**{**ODD, **NEEDS.get(head, {}), **fields}))).eval()


def layers(model):
    return [module for module in model.modules() if isinstance(module, PrepackedLinear)]


def all_prepacked(model):
    return {layer.prepacked is not None for layer in layers(model)} == {True}


def compute(model, inputs):
    """Every output; for whole sentences, so that padding, of which a model may say anything, is left out."""
    whole = {name: torch.ones_like(value) if name == "attention_mask" else value for name, value in inputs.items()}
    with torch.no_grad():
        return flat(model(**whole))


def another_copy(monkeypatch, name: str) -> ModuleType:
    """The module `inference` of another copy of the package, as code from a checkpoint's folder is."""
    package = ModuleType(name)
    package.__path__ = [str(Path(modeling_scratchbert.__file__).parent)]
    monkeypatch.setitem(sys.modules, name, package)
    return importlib.import_module(f"{name}.inference")


def record_row_counts(matrix) -> list[int]:
    """The row counts of the products that this matrix computes from now on."""
    operator, computed = matrix._operator, []

    def record(x, *args):
        computed.append(x.shape[:-1].numel())
        return operator(x, *args)

    matrix._operator = record
    return computed
