"""`optimize_for_inference`: replaces stacks of blocks, and layers outside of them, by prepacked ones."""

import os
import threading
from typing import Any

import torch
from torch import nn
from transformers.activations import ACT2FN
from transformers.utils import logging

from ..inference import is_prepacked, refusal
from .calibration import Factors, Groups, find_factors, largest_inputs, load_factors
from .layers import NativeActivation, NativeNorm, PrepackedLinear
from .library import ACTIVATIONS, find_library, spread
from .matrices import Matrix, TorchMatrix, can_prepack, page_out
from .stack import Block, OptimizedStack
from .structure import check_stack, check_unchanged, is_base_model

logger = logging.get_logger(__name__)

# Activations that torch computes in another way at the ends of vectors, which depend on the batch.
VARYING_ACTIVATIONS = ("gelu_pytorch_tanh", "mish", "quick_gelu", "sigmoid", "silu", "sqrtsoftplus", "swish")
# A layer with fewer outputs, as model heads may have, is too small to gain from int8.
MIN_INT8_OUTPUTS = 32
# Two threads may optimise the same model.
LOCK = threading.RLock()
# A module, and the name of a child.
Place = tuple[Any, str]


def optimize(model, dtype: Any, calibration: Any) -> None:
    """See `InferenceMixin.optimize_for_inference`."""
    with LOCK:
        if any(map(is_prepacked, model.modules())):
            raise refusal("optimize_for_inference()")
        models = {path: module for path, module in model.named_modules() if is_base_model(module)}
        is_native = all(supports(each.config) for each in models.values())
        dtype, calibration = _supported_dtype(model, dtype, calibration, is_native)
        layers = _layers_outside(model, models)
        for path, each in models.items():
            check_stack(_join(path, "encoder"), each.encoder, each.config)
        for path, (parent, name) in layers.items():
            check_unchanged(path, getattr(parent, name))
        if isinstance(dtype, torch.dtype):
            model.to(dtype)
        if all(can_prepack(weight) for each in models.values() for weight in each.encoder.parameters()):
            factors = _int8_factors(model, models, calibration) if dtype == "int8" else {}
            prepacker = Prepacker(is_native, torch.int8 if dtype == "int8" else model.dtype, factors)
            _replace(model.requires_grad_(False), models, layers, prepacker)
        else:
            fact = f"optimize_for_inference() kept weights dense that are {model.dtype} on {model.device}"
            logger.warning_once(f"{fact}; prepacking requires a CPU, oneDNN, and float32 or bfloat16.")
        model.eval()


def _replace(model, models: dict[str, Any], layers: dict[str, Place], prepacker: "Prepacker") -> None:
    """Replaces stacks and layers."""
    for path, each in models.items():
        each.encoder = prepacker.stack(each, block_names(model, path, each), model.dtype, frees=True)
    for parent, name in layers.values():
        setattr(parent, name, prepacker.layer(getattr(parent, name)))
    _seal_shared(model, {each for key in prepacker.matrices for each in key})
    if not prepacker.is_native and (name := model.config.hidden_act) in VARYING_ACTIVATIONS:
        logger.warning_once(
            f"hidden_act is {name!r}, which torch rounds differently in other batches; a text may "
            "have other last bits there. See docs/determinism.md."
        )


def supports(config) -> bool:
    """Whether the library is in use, and supports this configuration."""
    return type(ACT2FN[config.hidden_act]) in ACTIVATIONS and find_library() is not None


def _supported_dtype(model, dtype: Any, calibration: Any, is_native: bool) -> tuple[Any, Any]:
    """Returns both, or the dtype of the model and None if int8 is not supported. Raises ValueError for an unknown
    dtype, or for a calibration that has no effect."""
    if dtype not in (None, torch.float32, torch.bfloat16, "int8"):
        raise ValueError(f'dtype is {dtype!r}; expected torch.float32, torch.bfloat16, "int8" or None.')
    if calibration is not None and dtype != "int8":
        raise ValueError(f'calibration was given for dtype {dtype!r}; expected dtype "int8". Pass None instead.')
    is_supported = is_native and model.dtype in (torch.float32, torch.bfloat16) and model.device.type == "cpu"
    if dtype != "int8" or is_supported:
        return dtype, calibration
    logger.warning_once(
        f"The model has {model.dtype} weights on {model.device} and hidden_act {model.config.hidden_act!r}, and keeps "
        "that dtype; int8 requires the library in C++ on a CPU, and an activation that it has. See docs/inference.md."
    )
    return model.dtype, None


def _join(path: str, name: str) -> str:
    return f"{path}.{name}".removeprefix(".")


def _layers_outside(model, models: dict[str, Any]) -> dict[str, Place]:
    """The layers outside of the stacks of `models` that are replaced, by their paths."""
    stacks = tuple(_join(path, "encoder.") for path in models)
    children = {_join(path, name): (parent, name) for path, parent in model.named_modules() for name in parent._modules}
    kinds = {nn.Linear, nn.LayerNorm, *ACTIVATIONS} if find_library() else {nn.Linear}
    layers = {path: place for path, place in children.items() if type(getattr(*place)) in kinds}
    return {path: place for path, place in layers.items() if not path.startswith(stacks)}


def block_names(model, path: str, base_model) -> list[str]:
    """The paths of blocks of the base model at `path`, which are the same with any model head."""
    prefix = f"{model.base_model_prefix}."
    names = [_join(path, f"encoder.blocks.{index}") for index in range(len(base_model.encoder.blocks))]
    return [name.removeprefix(prefix) for name in names]


def _int8_factors(model, models: dict[str, Any], calibration: Any) -> Factors:
    """Returns the factors of the layers that follow a layer norm, in whose output a few channels are much larger than
    the others. Raises ValueError if a weight is not finite: int8 would turn NaN into a number."""
    for name in (name for name, weight in model.named_parameters() if not weight.isfinite().all()):
        raise ValueError(f"{name} has NaN or infinity; expected finite weights. Load another checkpoint.")
    groups: Groups = {}
    for path, each in models.items():
        for name, block in zip(block_names(model, path, each), each.encoder.blocks, strict=True):
            attention = block.attention
            groups[f"{name}.attention.query"] = [attention.query, attention.key, attention.value]
            groups[f"{name}.feed_forward.intermediate"] = [block.feed_forward.intermediate]
    if isinstance(calibration, str | os.PathLike):
        return load_factors(calibration, groups)
    # The library computes them, so that they are the same on any processor.
    prepacker = Prepacker(True, torch.float32, {}, collects=True)
    places: dict[Place, nn.Module] = {}
    for path, each in models.items():
        places[each, "encoder"] = prepacker.stack(each, block_names(model, path, each), model.dtype)
        places[each.embeddings, "norm"] = prepacker.layer(each.embeddings.norm)
    return find_factors(groups, largest_inputs(model, calibration, prepacker.named, places)) if groups else {}


class Prepacker:
    """Makes the modules of an optimised model. Layers that are tied share a matrix.

    Args:
        is_native: whether the library computes them, or torch.
        dtype: of the products.
        factors: of int8, by name.
        collects: whether to collect the largest inputs of the layers that have a name, in `named`.
    """

    def __init__(self, is_native: bool, dtype: torch.dtype, factors: Factors, collects: bool = False):
        self.is_native, self.dtype, self.factors, self.collects = is_native, dtype, factors, collects
        # From the ids of weights and biases. All were made before the first matrix, so an id means one of them.
        self.matrices: dict[tuple[int, ...], Any] = {}
        self.named: dict[str, Matrix] = {}

    def matrix(
        self, *layers: nn.Linear, name: str = "", heads: tuple[int, int] = (1, 1), dtype: torch.dtype | None = None
    ) -> Matrix | TorchMatrix:
        """The matrix of layers of one input; `name` is that of its int8 factors, and `dtype` another than
        `self.dtype`."""
        key = tuple(id(tensor) for layer in layers for tensor in layer._parameters.values())
        if key not in self.matrices:
            weights = [layer.weight.detach() for layer in layers]
            biases = [None if layer.bias is None else layer.bias.detach() for layer in layers]
            make: Any = Matrix if self.is_native else TorchMatrix
            self.matrices[key] = make(weights, biases, dtype or self.dtype, self.factors.get(name), heads)
            for weight in weights:
                page_out(weight)
        matrix = self.matrices[key]
        if name and self.collects:
            matrix.largest = torch.zeros(matrix.inputs)
            self.named[name] = matrix
        return matrix

    def norm(self, layer: nn.LayerNorm) -> list[torch.Tensor]:
        tensors = [each.detach().float() for each in (layer.weight, layer.bias)]
        return [spread(each) for each in tensors] if self.is_native else tensors

    def stack(self, base_model, names: list[str], dtype: torch.dtype, frees: bool = False) -> OptimizedStack:
        """The stack of a base model; `frees` the weights of each block when it is done."""
        stack, config, blocks = base_model.encoder, base_model.config, []
        for index, name in enumerate(names):
            blocks.append(Block(stack.blocks[index], name, self))
            if frees:
                stack.blocks[index] = nn.Identity()
        final_norm = self.layer(stack.final_norm) if config.norm_first else None
        return OptimizedStack(config, blocks, final_norm, self.is_native, dtype)

    def layer(self, layer: nn.Module) -> nn.Module:
        """What takes the place of a layer outside of the stacks."""
        if isinstance(layer, nn.LayerNorm):
            return NativeNorm(layer) if self.is_native else layer
        if not isinstance(layer, nn.Linear):
            return NativeActivation(layer)
        own_dtype = layer.weight.dtype
        matrix = self.matrix(layer, dtype=own_dtype if len(layer.weight) < MIN_INT8_OUTPUTS else None)
        return PrepackedLinear(matrix, own_dtype)


def _seal_shared(model, prepacked: set[int]) -> None:
    """Turns parameters that other modules share with prepacked layers into buffers: as parameters, word embeddings that
    are tied to the output matrix could be changed for one of the two."""
    for module in model.modules():
        shared = [name for name, parameter in module._parameters.items() if id(parameter) in prepacked - {id(None)}]
        for name in shared:
            module.register_buffer(name, module._parameters.pop(name).detach(), persistent=False)
