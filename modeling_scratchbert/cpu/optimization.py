"""`optimize_for_inference`: replaces stacks of blocks, and the linear layers of model heads, by prepacked ones."""

import threading
from typing import Any

import torch
from torch import nn
from transformers.utils import logging

from .calibration import Factors, Groups, find_factors
from .layers import PrepackedLinear, PrepackedModule
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
        _check_weights(model)
        dtype, calibration = _supported_dtype(model, dtype, calibration)
        optimized_for = _arguments(model, dtype, calibration, batch_invariant)
        models = _plain_models(model)
        linears = _linears_of_heads(model)
        for path, each in models.items():
            check_stack(_join(path, "encoder"), each.encoder, each.config)
        for path, (parent, name) in linears.items():
            check_unchanged(path, getattr(parent, name))
        if isinstance(dtype, torch.dtype):
            model.to(dtype)
        if _is_supported(models):
            factors = _int8_factors(model, models, calibration) if optimized_for[0] == "int8" else {}
            _replace(model.requires_grad_(False), models, linears, Prepacker(optimized_for, factors))
            _warn_of_activation_and_dtype(model, *optimized_for)
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


def _check_weights(model) -> None:
    """Raises RuntimeError if the model is quantised or offloaded, or has adapters."""
    expected = "optimize_for_inference() expects dense weights in memory, without adapters"
    for name, module in model.named_modules():
        if hasattr(module, "base_layer"):  # PEFT's name for the layer that it adapts
            raise RuntimeError(f"{name} has an adapter; {expected}. Call merge_and_unload() of the PeftModel first.")
        if hasattr(module, "_hf_hook") or any(tensor.is_meta for tensor in module.parameters(recurse=False)):
            raise RuntimeError(f"{name or 'The model'} is offloaded; {expected}. Load the model without device_map.")
    if getattr(model, "hf_quantizer", None) is not None:
        raise RuntimeError(f"The model is quantised; {expected}. Load it without quantization_config.")


def _prepacked(model) -> list[PrepackedModule]:
    return [module for module in model.modules() if isinstance(module, PrepackedModule)]


def _arguments(model, dtype, calibration, batch_invariant) -> tuple[Any, bool]:
    """Returns the dtype to optimise for, or "int8", and `batch_invariant`. Raises RuntimeError if a part of the model
    is optimised with others."""
    prepacked = _prepacked(model)
    before = [module.optimized_for for module in prepacked] or [(model.dtype, batch_invariant)]
    dtype = before[0][0] if dtype is None else dtype
    if prepacked and (others := set(before) - {(dtype, batch_invariant)}):
        fact = "The model is optimised for {} with batch_invariant={}; expected {} with batch_invariant={}"
        raise RuntimeError(f"{fact.format(*others.pop(), dtype, batch_invariant)}. Load it again for that.")
    if calibration is not None and prepacked:
        raise RuntimeError("calibration was given for a model that is int8; expected None. Load the model again first.")
    return dtype, batch_invariant


def _plain_models(model) -> dict[str, Any]:
    """The base models that are not optimised, by their paths."""
    bases = {path: module for path, module in model.named_modules() if is_base_model(module)}
    return {path: base for path, base in bases.items() if not isinstance(base.encoder, PrepackedModule)}


def _is_supported(models: dict[str, Any]) -> bool:
    return all(can_prepack(weight) for base in models.values() for weight in base.encoder.parameters())


def _join(path: str, name: str) -> str:
    return f"{path}.{name}".removeprefix(".")


def _linears_of_heads(model) -> dict[str, tuple[Any, str]]:
    """The parent of each linear layer outside of the stacks, and the name there, by its path."""
    stacks = tuple(_join(path, "encoder.") for path in _plain_models(model))
    children = {_join(path, name): (parent, name) for path, parent in model.named_modules() for name in parent._modules}
    layers = {path: place for path, place in children.items() if not path.startswith(stacks)}
    return {path: place for path, place in layers.items() if _is_linear(getattr(*place))}


def _is_linear(module: Any) -> bool:
    return type(module) is nn.Linear and can_prepack(module.weight)


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

    def __init__(self, optimized_for: tuple[Any, bool], factors: Factors):
        self.optimized_for, self.factors = optimized_for, factors
        # From the ids of weights and biases. All were made before the first matrix, so an id means one of them.
        self.matrices: dict[tuple[int, ...], PackedMatrix] = {}

    def __call__(self, *layers: nn.Linear, name: str = "") -> PackedMatrix:
        """The matrix of layers of one input; `name` is that of its int8 factors."""
        key = tuple(id(tensor) for layer in layers for tensor in layer._parameters.values())
        if key not in self.matrices:
            weights = [layer.weight.detach() for layer in layers]
            biases = [None if layer.bias is None else layer.bias.detach() for layer in layers]
            is_int8 = self.optimized_for[0] == "int8" and sum(map(len, weights)) >= MIN_INT8_OUTPUTS
            factors = self.factors.get(name)
            self.matrices[key] = Int8Matrix(weights, biases, factors) if is_int8 else FloatMatrix(weights, biases)
            if not (is_int8 or self.optimized_for[1]):
                self.matrices[key].max_rows = FloatMatrix.max_rows
            for weight in weights:
                page_out(weight)
        return self.matrices[key]


def _replace(model, models: dict[str, Any], linears: dict[str, tuple[Any, str]], prepacker: Prepacker) -> None:
    """Replaces stacks and linear layers."""
    blocks: dict[str, list[Block]] = {path: [] for path in models}
    # Blocks that encoder and decoder share follow one another, and are freed after the second.
    places = [(index, path) for path, each in models.items() for index in range(each.config.num_hidden_layers)]
    for index, path in sorted(places, key=lambda place: place[0]):
        stack = models[path].encoder.blocks
        blocks[path].append(Block(stack[index], block_name(model, path, index), prepacker))
        stack[index] = nn.Identity()
    for path, each in models.items():
        final_norm = copy_of_norm(each.encoder.final_norm) if each.config.norm_first else None
        each.encoder = OptimizedStack(each.config, blocks[path], final_norm, prepacker.optimized_for)
    for parent, name in linears.values():
        setattr(parent, name, PrepackedLinear(prepacker(getattr(parent, name)), prepacker.optimized_for))
    _seal_shared(model, {each for key in prepacker.matrices for each in key})


def _seal_shared(model, prepacked: set[int]) -> None:
    """Turns parameters that other modules share with prepacked layers into buffers: as parameters, word embeddings that
    are tied to the output matrix could be changed for one of the two."""
    for module in model.modules():
        shared = [name for name, parameter in module._parameters.items() if id(parameter) in prepacked - {id(None)}]
        for name in shared:
            module.register_buffer(name, module._parameters.pop(name).detach(), persistent=False)


def _warn_of_activation_and_dtype(model, dtype: Any, batch_invariant: bool) -> None:
    if dtype == "int8" and not any(matrix.is_int8 for module in _prepacked(model) for matrix in module.matrices()):
        fact = f"No linear layer of the model has {MIN_INT8_OUTPUTS} outputs"
        logger.warning_once(f"{fact}; smaller ones gain nothing from int8. Their weights stay {model.dtype}.")
    if batch_invariant and (name := model.config.hidden_act) in VARYING_ACTIVATIONS:
        logger.warning_once(
            f"hidden_act is {name!r}, which torch rounds differently in other batches; a text may "
            "have other last bits there. See docs/determinism.md."
        )
