"""`optimize_for_inference`: replaces stacks of blocks, and layers outside of them, by prepacked ones."""

import copy
import os
import threading
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN, FastGELUActivation, GELUActivation, NewGELUActivation
from transformers.utils import logging

from .calibration import find_factors, load_factors, scaled
from .layers import PrepackedLayer
from .library import ACTIVATIONS, find_library
from .matrices import Matrix, NormWeights, TorchMatrix
from .stack import Block, OptimizedStack
from .structure import base_models, check_stack, check_unchanged

logger = logging.get_logger(__name__)

# Those that torch computes alike in any batch; others differ at the ends of vectors.
ACTIVATIONS_OF_TORCH = (FastGELUActivation, GELUActivation, NewGELUActivation, nn.ReLU, nn.Tanh)
# A layer with fewer outputs, as model heads may have, is too small to gain from int8.
MIN_INT8_OUTPUTS = 32
# Two threads may optimise the same model.
LOCK = threading.RLock()
# A module, and the name of a child.
Place = tuple[Any, str]


def optimize(model, dtype: Any, calibration: Any) -> None:
    """See `InferenceMixin.optimize_for_inference`."""
    if dtype not in (None, torch.float32, torch.bfloat16, "int8"):
        raise ValueError(f'dtype is {dtype!r}; expected torch.float32, torch.bfloat16, "int8" or None.')
    if calibration is not None and dtype != "int8":
        raise ValueError(f'calibration was given for dtype {dtype!r}; expected dtype "int8". Pass None instead.')
    with LOCK, torch.device("cpu"):
        layers = _layers_outside(model)
        check_model(model, layers)
        if dtype == "int8" and find_library() is None:
            logger.warning_once(
                f'dtype "int8" requires the library in C++; the model stays {model.dtype}. See docs/inference.md.'
            )
            dtype = None
        if isinstance(dtype, torch.dtype):
            model.to(dtype)
        # Those that the library computes, or torch with the same bits in any batch.
        activations = ACTIVATIONS if find_library() else ACTIVATIONS_OF_TORCH
        if type(ACT2FN[model.config.hidden_act]) in activations and can_prepack(model):
            factors = _int8_factors(model, calibration) if dtype == "int8" else {}
            prepacker = Prepacker(torch.int8 if dtype == "int8" else model.dtype, model.dtype, factors)
            prepacker.replace(model.requires_grad_(False), layers)
        else:
            logger.warning_once(
                f"The model is {model.dtype} on {model.device} with hidden_act {model.config.hidden_act!r}, and is not "
                "optimised; expected float32 or bfloat16 on a CPU, and an activation in docs/inference.md."
            )
        model.eval()


def _layers_outside(model) -> dict[str, Place]:
    """The layers outside of the stacks that are replaced, by their paths."""
    in_stacks = {module for each in base_models(model).values() for module in each.encoder.modules()}
    kinds = {nn.Linear, nn.LayerNorm, *ACTIVATIONS} if find_library() else {nn.Linear}
    return {
        f"{path}.{name}".removeprefix("."): (parent, name)
        for path, parent in model.named_modules()
        for name, child in parent._modules.items()
        if type(child) in kinds and parent not in in_stacks
    }


def check_model(model, layers: dict[str, Place]) -> None:
    """Raise RuntimeError if a model is optimised, or is not as the package makes it."""
    model._refuse_if_optimized("optimize_for_inference()", "To optimise it in another way, load the model again")
    for path, each in base_models(model).items():
        check_stack(f"{path}encoder", each.encoder, each.config)
    for path, (parent, name) in layers.items():
        check_unchanged(path, getattr(parent, name))


def can_prepack(module: nn.Module) -> bool:
    """Whether the layers of a module, in this dtype and on this device, can be prepacked."""
    has_products = find_library() is not None or torch.backends.mkldnn.is_available()
    dtypes = torch.float32, torch.bfloat16
    return has_products and all(each.dtype in dtypes and each.device.type == "cpu" for each in module.parameters())


def _int8_factors(model, calibration: Any) -> dict[int, Tensor]:
    """The factors of the `scaled` layers, by their ids. Raises ValueError if a weight is not finite: int8 would
    turn NaN into a number."""
    for name, weight in model.named_parameters():
        if not weight.isfinite().all():
            raise ValueError(f"{name} has NaN or infinity; expected finite weights. Load another checkpoint.")
    layers = scaled(model)
    if isinstance(calibration, str | os.PathLike):
        factors = load_factors(calibration, layers)
    else:
        # A copy with the same weights, in float32, so that the factors are the same on any processor.
        tensors = {id(tensor): tensor for tensor in [*model.parameters(), *model.buffers()]}
        trial = copy.deepcopy(model.base_model if calibration is None else model, tensors).eval()
        norms = {path: (each.embeddings, "norm") for path, each in base_models(trial).items()}
        Prepacker(torch.float32, model.dtype, {}).replace(trial, norms)
        factors = find_factors(trial, calibration, scaled(trial)) if layers else {}
    return {id(layer): factors[name] for name, layer in layers.items()}


class Prepacker:
    """Makes the modules of an optimised model. Layers that are tied share a matrix.

    Args:
        dtype: of the products.
        model_dtype: of the inputs and results of modules.
        factors: of int8, by the ids of layers.
    """

    def __init__(self, dtype: torch.dtype, model_dtype: torch.dtype, factors: Mapping[int, Tensor]):
        self.dtype, self.model_dtype, self.factors, self.is_native = dtype, model_dtype, factors, bool(find_library())
        # From the ids of weights and biases. All were made before the first matrix, so an id means one of them.
        self.matrices: dict[tuple[int, ...], Any] = {}

    def replace(self, model, layers: dict[str, Place]) -> None:
        """Replace the stacks of a model, and layers outside of them. A block is freed when it is prepacked."""
        for each in base_models(model).values():
            stack, blocks = each.encoder, []
            for index in range(len(stack.blocks)):
                blocks.append(Block(stack.blocks[index], self))
                stack.blocks[index] = nn.Identity()
            final_norm = self.layer(stack.final_norm) if each.config.norm_first else None
            each.encoder = OptimizedStack(each.config, blocks, final_norm, self.is_native, self.model_dtype)
        for parent, name in layers.values():
            setattr(parent, name, self.layer(getattr(parent, name)))
        _seal_shared(model, {each for key in self.matrices for each in key})

    def matrix(
        self, *layers: nn.Linear, heads: tuple[int, int] = (1, 1), dtype: torch.dtype | None = None
    ) -> Matrix | TorchMatrix:
        """The matrix of layers of one input, with products in `self.dtype` or another."""
        key = tuple(id(tensor) for layer in layers for tensor in layer._parameters.values())
        if key not in self.matrices:
            weights = [layer.weight.detach() for layer in layers]
            biases = [None if layer.bias is None else layer.bias.detach() for layer in layers]
            make: Any = Matrix if self.is_native else TorchMatrix
            self.matrices[key] = make(weights, biases, dtype or self.dtype, self.factors.get(id(layers[0])), heads)
        return self.matrices[key]

    def norm(self, layer: nn.LayerNorm) -> Any:
        return NormWeights(layer) if self.is_native else copy.deepcopy(layer).float()

    def layer(self, layer: nn.Module) -> nn.Module:
        """What takes the place of a layer outside of the stacks."""
        if isinstance(layer, nn.LayerNorm):
            is_plain = self.is_native and layer.bias is not None and layer.bias.ndim == 1
            return PrepackedLayer(self.model_dtype, norm=NormWeights(layer)) if is_plain else layer
        if not isinstance(layer, nn.Linear):
            return PrepackedLayer(self.model_dtype, activation=ACTIVATIONS[type(layer)])
        dtype = layer.weight.dtype if len(layer.weight) < MIN_INT8_OUTPUTS else self.dtype
        return PrepackedLayer(layer.weight.dtype, self.matrix(layer, dtype=dtype))


def _seal_shared(model, prepacked: set[int]) -> None:
    """Turns parameters that other modules share with prepacked layers into buffers: as parameters, word embeddings that
    are tied to the output matrix could be changed for one of the two."""
    for module in model.modules():
        shared = [name for name, parameter in module._parameters.items() if id(parameter) in prepacked - {id(None)}]
        for name in shared:
            module.register_buffer(name, module._parameters.pop(name).detach(), persistent=False)
