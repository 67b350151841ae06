"""The modules of sentence-transformers after the pooling, and its activation functions, for single rows.

The functions of an array have other last bits at its end, and a product may have others for another number of rows. So
on a CPU each row is computed alone, and has the same bits in any batch.
"""

import importlib
from collections import OrderedDict
from collections.abc import Callable
from functools import partial

import torch
from torch import nn
from torch.nn.functional import normalize

from modeling_scratchbert.bert.files import read_tensors
from modeling_scratchbert.cpu.optimization import Prepacker, can_prepack
from toolkit.corpus.sentence_folder import MODULE_WEIGHTS, Module
from toolkit.trust import find

VALUES = "sentence_embedding"


def by_row(function: Callable, values: torch.Tensor) -> torch.Tensor:
    """`function` of each row of `(N, C)`: on a CPU of one after the other, in memory of its own."""
    if values.device.type != "cpu":
        return function(values)
    return torch.cat([function(row.clone()) for row in values.split(1)])


def open_activation(path: str, width: int) -> nn.Module:
    """The activation function with this path, of rows of `width` numbers.

    Raises:
        ValueError: it is no class of torch.nn that takes no arguments and keeps the shape of a row.
    """
    module, _, name = str(path).rpartition(".")
    try:
        if module.split(".")[:2] == ["torch", "nn"]:
            activation = getattr(importlib.import_module(module), name)().eval()
            row = torch.zeros(1, width)
            if isinstance(activation, nn.Module) and activation(row).shape == row.shape:
                return activation
    except (ImportError, AttributeError, TypeError, ValueError, RuntimeError):
        pass
    raise ValueError(
        f"Its activation function is {path}; expected a class of torch.nn that takes no arguments and keeps the shape."
    )


class Dense(nn.Module):
    """act(x Wᵀ + b), to which x is added if it has a residual connection."""

    def __init__(self, fields: dict):
        super().__init__()
        width, height = fields["in_features"], fields["out_features"]
        self.linear = nn.Linear(width, height, bias=fields.get("bias", True))
        self.activation_function = open_activation(fields.get("activation_function", "torch.nn.Tanh"), height)
        if fields.get("use_residual"):
            self.residual = nn.Identity() if width == height else nn.Linear(width, height, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.activation_function(self.linear(x))
        return y + self.residual(x) if "residual" in self._modules else y


def open_modules(source: str, modules: list[Module], width: int, device: torch.device) -> tuple[list[Callable], int]:
    """The functions of the modules, for rows of `width` numbers in float32; and the width of their results.

    Raises:
        ValueError: a module cannot be opened, or is for another width.
    """
    found: list[Callable] = []
    for module in modules:
        names = module.fields.get("module_input_name", VALUES), module.fields.get("module_output_name") or VALUES
        if names != (VALUES, VALUES):
            raise ValueError(f"Its {module.folder} reads {names[0]} and writes {names[1]}; expected {VALUES}.")
        if module.kind == "Normalize":
            found.append(partial(normalize, dim=-1))
        elif module.kind in ("Dense", "LayerNorm"):
            expected = module.fields.get("in_features" if module.kind == "Dense" else "dimension")
            if expected != width:
                raise ValueError(
                    f"Its {module.folder} is for vectors of {expected} numbers; the one before it gives {width}."
                )
            norm = OrderedDict(norm=nn.LayerNorm(width))  # the name of the stored weights
            layer = Dense(module.fields) if module.kind == "Dense" else nn.Sequential(norm)
            layer.load_state_dict(read_weights(source, module.folder))
            layer.requires_grad_(False).eval().to(device)
            for name, child in layer.named_children():
                if type(child) is nn.Linear and can_prepack(child):
                    setattr(layer, name, Prepacker(torch.float32, torch.float32, {}).layer(child))
            found.append(layer)
            width = module.fields.get("out_features", width)
    return found, width


def read_weights(source: str, folder: str) -> dict[str, torch.Tensor]:
    """The weights of a module. Raises OSError if there are none, or they cannot be read."""
    for name in MODULE_WEIGHTS:
        if (path := find(source, f"{folder}/{name}")) is not None:
            return read_tensors(path)
    raise OSError(f"Its {folder} has no weights; expected model.safetensors there.")
