"""`optimize_for_inference`: replaces the linear layers of a model by prepacked ones."""

import itertools
import threading
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers.activations import GELUActivation, GELUTanh, NewGELUActivation
from transformers.utils import logging

from .calibration import Factors, find_factors
from .invariance import SlicedBatch, invariant_kernel
from .layers import FusedFeedForward, InferenceDropout, JointProjection, PrepackedLinear
from .matrices import FloatMatrix, Int8Matrix, PackedMatrix, can_prepack, multiplies_int8

logger = logging.get_logger(__name__)

GELU_FORMS: dict[type, str] = {GELUActivation: "none", NewGELUActivation: "tanh", GELUTanh: "tanh"}
QUERY_KEY_VALUE: tuple[str, ...] = ("query", "key", "value")
# Activations that torch computes in another way at the ends of vectors, which depend on the batch.
VARYING_ACTIVATIONS = ("gelu_pytorch_tanh", "mish", "quick_gelu", "sigmoid", "silu", "sqrtsoftplus", "swish")
FEED_FORWARD = ("intermediate", "activation", "output")
SMOOTHED = (QUERY_KEY_VALUE, ("intermediate",))
# A layer with fewer outputs, as model heads may have, is too small to gain from int8.
MIN_INT8_OUTPUTS = 32
# Two threads may optimise the same model.
LOCK = threading.RLock()


class LayerGroup(NamedTuple):
    """Linear layers of one input that become one matrix. It does not hold them, so that each weight can be freed.

    Attributes:
        name: the path of the first layer in the base model, which is the same with any model head.
        parent: the module that has the layers.
        names: their names in it.
        key: the ids of their weights and biases. Groups of the same share a matrix.
    """

    name: str
    parent: Any
    names: tuple[str, ...]
    key: tuple[int, ...]

    @property
    def layers(self) -> list[nn.Linear]:
        return [self.parent._modules[name] for name in self.names]


def optimize(model, dtype: Any, calibration: Any, batch_invariant: bool) -> None:
    """See `InferenceMixin.optimize_for_inference`."""
    if dtype not in (None, torch.float32, torch.bfloat16, "int8"):
        raise ValueError(f'dtype is {dtype!r}; expected torch.float32, torch.bfloat16, "int8" or None.')
    if calibration is not None and dtype != "int8":
        raise ValueError(f'calibration was given for dtype {dtype!r}; expected dtype "int8". Pass None instead.')
    with LOCK:
        converted, dtype = dtype, _check_model(model, dtype, calibration, batch_invariant)
        if isinstance(converted, torch.dtype):
            model.to(converted)
        if groups := _layer_groups(model):
            factors = _int8_factors(model, groups, calibration) if dtype == "int8" else {}
            _replace_layers(groups, (dtype, batch_invariant), factors)
            _replace_others(model.requires_grad_(False), groups, batch_invariant)
        model.eval()
        _warn_of_no_effect(model, dtype)
        if batch_invariant and (name := model.config.hidden_act) in VARYING_ACTIVATIONS:
            logger.warning_once(
                f"hidden_act is {name!r}, which torch rounds differently in other batches; a text may "
                "have other last bits there. See docs/determinism.md."
            )


def _check_model(model, dtype: Any, calibration, batch_invariant: bool) -> Any:
    """Returns the dtype to optimise for, or "int8". Raises RuntimeError if the model is quantised or offloaded, has
    adapters, or is already optimised with other arguments."""
    expected = "optimize_for_inference() expects dense weights in memory, without adapters"
    for name, module in model.named_modules():
        if hasattr(module, "base_layer"):  # PEFT's name for the layer that it adapts
            raise RuntimeError(f"{name} has an adapter; {expected}. Call merge_and_unload() of the PeftModel first.")
        if hasattr(module, "_hf_hook") or any(tensor.is_meta for tensor in module.parameters(recurse=False)):
            raise RuntimeError(f"{name or 'The model'} is offloaded; {expected}. Load the model without device_map.")
    if getattr(model, "hf_quantizer", None) is not None:
        raise RuntimeError(f"The model is quantised; {expected}. Load it without quantization_config.")
    if dtype == "int8" and (model.device.type != "cpu" or not multiplies_int8()):
        fact = f"The model has {model.dtype} weights on {model.device}"
        logger.warning_once(f"{fact}, and keeps that dtype; int8 requires a CPU with VNNI instructions.")
        dtype, calibration = model.dtype, None
    layers = _prepacked_layers(model)
    before = [layer.optimized_for for layer in layers] or [(model.dtype, batch_invariant)]
    dtype = before[0][0] if dtype is None else dtype
    if layers and (others := set(before) - {(dtype, batch_invariant)}):
        fact = "The model is optimised for {} with batch_invariant={}; expected {} with batch_invariant={}"
        raise RuntimeError(f"{fact.format(*others.pop(), dtype, batch_invariant)}. Load it again for that.")
    if calibration is not None and any(layer.matrix.is_int8 for layer in layers):
        raise RuntimeError("calibration was given for a model that is int8; expected None. Load the model again first.")
    return dtype


def _int8_factors(model, groups: list[LayerGroup], calibration: Any) -> Factors:
    """Returns the factors of the layers that follow a layer norm, in whose output a few channels are much larger than
    the others. Raises ValueError if a weight is not finite: int8 would turn NaN into a number."""
    for name, weight in model.named_parameters():
        if not weight.isfinite().all():
            raise ValueError(f"{name} has NaN or infinity; expected finite weights. Load another checkpoint.")
    smoothed = {group.name: group.layers for group in groups if group.names in SMOOTHED}
    return find_factors(model, smoothed, calibration) if smoothed else {}


def _warn_of_no_effect(model, dtype: Any) -> None:
    layers = _prepacked_layers(model)
    if not layers:
        fact = f"optimize_for_inference() kept weights dense that are {model.dtype} on {model.device}"
        logger.warning_once(f"{fact}; prepacking requires oneDNN, a CPU, and float32 or (on many CPUs) bfloat16.")
    elif dtype == "int8" and not any(layer.matrix.is_int8 for layer in layers):
        fact = f"No linear layer of the model has {MIN_INT8_OUTPUTS} outputs"
        logger.warning_once(f"{fact}; smaller ones gain nothing from int8. Their weights stay {model.dtype}.")


def _prepacked_layers(model) -> list[PrepackedLinear]:
    return [module for module in model.modules() if isinstance(module, PrepackedLinear)]


def _layer_groups(model) -> list[LayerGroup]:
    """Returns the layers to replace. Groups that share weights follow one another, so that these are freed after the
    last."""
    groups = []
    for path, parent in model.named_modules():
        plain = {name: child for name, child in parent._modules.items() if _is_plain_linear(child)}
        joint = [QUERY_KEY_VALUE] if _can_join(path, parent, plain) else []
        for names in [*joint, *((name,) for name in plain if not joint or name not in QUERY_KEY_VALUE)]:
            key = tuple(id(tensor) for name in names for tensor in plain[name]._parameters.values())
            first = f"{path}.{names[0]}".removeprefix(f"{model.base_model_prefix}.").removeprefix(".")
            groups.append(LayerGroup(first, parent, names, key))
    return sorted(groups, key=lambda group: group.key)


def _is_plain_linear(module: Any) -> bool:
    """Whether this is torch's linear layer, as torch makes it, and can be prepacked."""
    is_original = type(module) is nn.Linear and not _is_patched(module)
    if not is_original or module._buffers or module._modules or list(module._parameters) != ["weight", "bias"]:
        return False
    return type(module.weight) is nn.Parameter and can_prepack(module.weight)


def _is_patched(module: nn.Module) -> bool:
    """Whether an attribute of the module hides one of its class, for example its own `forward`; or that of its class
    was replaced."""
    cls = type(module)
    code = getattr(cls.forward, "__code__", None)  # `functools.wraps` copies the name, not the code
    is_own = getattr(code, "co_qualname", None) == f"{cls.__name__}.forward"
    return not is_own or any(hasattr(cls, name) for name in vars(module))


def _can_join(path: str, parent: nn.Module, plain: dict[str, Any]) -> bool:
    """Whether this is self-attention whose queries, keys and values can be one product."""
    layers = {id(plain[name]): plain[name] for name in QUERY_KEY_VALUE if name in plain}
    is_like = len({(each.in_features, each.weight.dtype, each.bias is None) for each in layers.values()}) == 1
    is_self_attention = path.rpartition(".")[2] == "attention" and _has_method(parent, "MultiHeadAttention.project")
    return len(layers) == 3 and is_like and is_self_attention


def _has_method(module: nn.Module, path: str) -> bool:
    """Whether the class of the module has the method `path`, "Class.method" of ours, and that of its instance and
    `forward` are not replaced. By name, because the class may be of another copy of the code."""
    owner, _, name = path.partition(".")
    codes = [getattr(getattr(type(module), each, None), "__code__", None) for each in (name, "forward")]
    names = [getattr(code, "co_qualname", None) for code in codes]
    return names == [path, f"{owner}.forward"] and name not in vars(module)


def _replace_layers(groups: list[LayerGroup], optimized_for: tuple[Any, bool], factors: Factors) -> None:
    """Replaces the linear layers, a group at a time, and the method that calls queries, keys and values."""
    for _, tied in itertools.groupby(groups, key=lambda group: group.key):
        matrix = None
        for group in tied:
            matrix = matrix or _prepack(group.layers, optimized_for[0], factors.get(group.name))
            for part, name in enumerate(group.names):  # without a variable that would keep the last weight
                setattr(group.parent, name, PrepackedLinear(group.layers[part], matrix, part, optimized_for))
            if group.names == QUERY_KEY_VALUE:
                group.parent.project = JointProjection(group.parent, group.names)


def _prepack(layers: list[nn.Linear], dtype: Any, factors: torch.Tensor | None) -> PackedMatrix:
    weights = [layer.weight.detach() for layer in layers]
    biases = [None if layer.bias is None else layer.bias.detach() for layer in layers]
    is_int8 = dtype == "int8" and sum(map(len, weights)) >= MIN_INT8_OUTPUTS
    return Int8Matrix(weights, biases, factors) if is_int8 else FloatMatrix(weights, biases)


def _replace_others(model, groups: list[LayerGroup], batch_invariant: bool) -> None:
    """Replaces feed-forwards, dropouts and what depends on the batch. Turns parameters that other modules share with
    the layers into buffers: as parameters, word embeddings that are tied to the output matrix could be changed for one
    of the two."""
    prepacked = {each for group in groups for each in group.key}
    for module in model.modules():
        if any(cls.__name__ == "ScratchBertModel" for cls in type(module).__mro__):
            module.config.padding_free = True
            module._padded_batch = SlicedBatch if batch_invariant else module._padded_batch
        if batch_invariant and _has_method(module, "MultiHeadAttention.adapt"):
            config = module.config
            is_aligned = not config.is_decoder and module.head_width % 16 == 0 and config.num_attention_heads > 1
            module.adapt = partial(invariant_kernel, is_aligned)
        first, activation, last = map(module._modules.get, FEED_FORWARD)
        form = GELU_FORMS.get(type(activation)) if {type(first), type(last)} == {PrepackedLinear} else None
        form = None if form == "tanh" and first.matrix.is_int8 else form  # see VARYING_ACTIVATIONS
        if form and not _is_patched(activation) and _has_method(module, "FeedForward.formula"):
            module.formula = FusedFeedForward(module, FEED_FORWARD, form)
        if type(module) is nn.Dropout and not _is_patched(module):
            module.__class__ = InferenceDropout
        for name, parameter in list(module._parameters.items()):
            if parameter is not None and id(parameter) in prepacked:
                del module._parameters[name]
                module.register_buffer(name, parameter.detach(), persistent=False)
