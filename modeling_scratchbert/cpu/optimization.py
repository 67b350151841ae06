"""`optimize_for_inference`: replaces stacks of blocks, and the linear layers of model heads, by prepacked ones."""

import threading
from typing import Any

import torch
from torch import nn
from transformers.utils import logging

from ..inference import is_prepacked, refusal
from . import compiled
from .calibration import Factors, Groups, find_factors
from .layers import PrepackedLinear
from .matrices import FloatMatrix, Int8Matrix, PackedMatrix, can_prepack, multiplies_int8, page_out
from .stack import Block, OptimizedStack, copy_of_norm
from .structure import check_stack, check_unchanged, is_base_model

logger = logging.get_logger(__name__)

# Activations that torch computes in another way at the ends of vectors, which depend on the batch.
VARYING_ACTIVATIONS = ("gelu_pytorch_tanh", "mish", "quick_gelu", "sigmoid", "silu", "sqrtsoftplus", "swish")
# A layer with fewer outputs, as model heads may have, is too small to gain from int8.
MIN_INT8_OUTPUTS = 32
# Two threads may optimise the same model.
LOCK = threading.RLock()


def optimize(model, dtype: Any, calibration: Any, batch_invariant: bool) -> None:
    """See `InferenceMixin.optimize_for_inference`."""
    with LOCK:
        if any(map(is_prepacked, model.modules())):
            raise refusal("optimize_for_inference()")
        dtype, calibration = _supported_dtype(model, dtype, calibration)
        models = {path: module for path, module in model.named_modules() if is_base_model(module)}
        linears = _linears_of_heads(model, models)
        for path, each in models.items():
            check_stack(_join(path, "encoder"), each.encoder, each.config)
        for path, (parent, name) in linears.items():
            check_unchanged(path, getattr(parent, name))
        if isinstance(dtype, torch.dtype):
            model.to(dtype)
        if all(can_prepack(weight) for each in models.values() for weight in each.encoder.parameters()):
            factors = _int8_factors(model, models, calibration) if dtype == "int8" else {}
            prepacker = Prepacker(dtype == "int8", batch_invariant, factors)
            _replace(model.requires_grad_(False), models, linears, prepacker)
            _warn_of_activation(model, batch_invariant)
        else:
            fact = f"optimize_for_inference() kept weights dense that are {model.dtype} on {model.device}"
            logger.warning_once(f"{fact}; prepacking requires oneDNN, a CPU, and float32 or (on many CPUs) bfloat16.")
        model.eval()


def _supported_dtype(model, dtype: Any, calibration: Any) -> tuple[Any, Any]:
    """Returns both, or the dtype of the model and None if this machine does not multiply int8 numbers. Raises
    ValueError for an unknown dtype, or for a calibration that has no effect."""
    if dtype not in (None, torch.float32, torch.bfloat16, "int8"):
        raise ValueError(f'dtype is {dtype!r}; expected torch.float32, torch.bfloat16, "int8" or None.')
    if calibration is not None and dtype != "int8":
        raise ValueError(f'calibration was given for dtype {dtype!r}; expected dtype "int8". Pass None instead.')
    if dtype != "int8" or (model.device.type == "cpu" and multiplies_int8()):
        return dtype, calibration
    fact = f"The model has {model.dtype} weights on {model.device}"
    logger.warning_once(f"{fact}, and keeps that dtype; int8 requires a CPU with VNNI instructions.")
    return model.dtype, None


def _join(path: str, name: str) -> str:
    return f"{path}.{name}".removeprefix(".")


def _linears_of_heads(model, models: dict[str, Any]) -> dict[str, tuple[Any, str]]:
    """The parent of each linear layer outside of the stacks of `models`, and the name there, by its path."""
    stacks = tuple(_join(path, "encoder.") for path in models)
    children = {_join(path, name): (parent, name) for path, parent in model.named_modules() for name in parent._modules}
    layers = {path: place for path, place in children.items() if type(getattr(*place)) is nn.Linear}
    return {path: place for path, place in layers.items() if not path.startswith(stacks)}


def _int8_factors(model, models: dict[str, Any], calibration: Any) -> Factors:
    """Returns the factors of the layers that follow a layer norm, in whose output a few channels are much larger than
    the others. Raises ValueError if a weight is not finite: int8 would turn NaN into a number."""
    for name, weight in model.named_parameters():
        if not weight.isfinite().all():
            raise ValueError(f"{name} has NaN or infinity; expected finite weights. Load another checkpoint.")
    groups: Groups = {}
    for path, each in models.items():
        for index, block in enumerate(each.encoder.blocks):
            name, attention = block_name(model, path, index), block.attention
            groups[f"{name}.attention.query"] = [attention.query, attention.key, attention.value]
            groups[f"{name}.feed_forward.intermediate"] = [block.feed_forward.intermediate]
    return find_factors(model, groups, calibration) if groups else {}


def block_name(model, path: str, index: int) -> str:
    """The path of a block of the base model at `path`, which is the same with any model head."""
    return _join(path, f"encoder.blocks.{index}").removeprefix(f"{model.base_model_prefix}.")


class Prepacker:
    """Returns the matrix of linear layers. Tied ones share it."""

    def __init__(self, is_int8: bool, is_batch_invariant: bool, factors: Factors):
        self.is_int8, self.is_batch_invariant, self.factors = is_int8, is_batch_invariant, factors
        self.is_compiled = False  # whether the next matrix is one of a compiled stack
        # From the ids of weights and biases. All were made before the first matrix, so an id means one of them.
        self.matrices: dict[tuple[int, ...], Any] = {}

    def __call__(self, *layers: nn.Linear, name: str = "") -> PackedMatrix:
        """The matrix of layers of one input; `name` is that of its int8 factors."""
        tensors = tuple(id(tensor) for layer in layers for tensor in layer._parameters.values())
        key = (self.is_compiled, *tensors)
        if key not in self.matrices:
            weights = [layer.weight.detach() for layer in layers]
            biases = [None if layer.bias is None else layer.bias.detach() for layer in layers]
            is_int8 = self.is_int8 and sum(map(len, weights)) >= MIN_INT8_OUTPUTS
            factors = self.factors.get(name)
            if self.is_compiled:
                self.matrices[key] = compiled.CompiledMatrix(weights, biases, is_int8, factors)
            else:
                self.matrices[key] = Int8Matrix(weights, biases, factors) if is_int8 else FloatMatrix(weights, biases)
            if not (is_int8 or self.is_batch_invariant):
                self.matrices[key].max_rows = FloatMatrix.max_rows
            for weight in weights:
                page_out(weight)
        return self.matrices[key]


def _replace(model, models: dict[str, Any], linears: dict[str, tuple[Any, str]], prepacker: Prepacker) -> None:
    """Replaces stacks and linear layers."""
    for path, each in models.items():
        stack, blocks = each.encoder.blocks, []
        prepacker.is_compiled = compiled.supports(each.config)
        for index in range(len(stack)):
            blocks.append(Block(stack[index], block_name(model, path, index), prepacker))
            stack[index] = nn.Identity()  # frees the weights of the block
        final_norm = copy_of_norm(each.encoder.final_norm) if each.config.norm_first else None
        arguments = each.config, blocks, final_norm, prepacker.is_batch_invariant
        each.encoder = (compiled.CompiledStack if prepacker.is_compiled else OptimizedStack)(*arguments)
        prepacker.is_compiled = False
    for parent, name in linears.values():
        setattr(parent, name, PrepackedLinear(prepacker(getattr(parent, name))))
    _seal_shared(model, {each for key in prepacker.matrices for each in key})


def _seal_shared(model, prepacked: set[int]) -> None:
    """Turns parameters that other modules share with prepacked layers into buffers: as parameters, word embeddings that
    are tied to the output matrix could be changed for one of the two."""
    for module in model.modules():
        shared = [name for name, parameter in module._parameters.items() if id(parameter) in prepacked - {id(None)}]
        for name in shared:
            module.register_buffer(name, module._parameters.pop(name).detach(), persistent=False)


def _warn_of_activation(model, batch_invariant: bool) -> None:
    if batch_invariant and (name := model.config.hidden_act) in VARYING_ACTIVATIONS:
        logger.warning_once(
            f"hidden_act is {name!r}, which torch rounds differently in other batches; a text may "
            "have other last bits there. See docs/determinism.md."
        )
