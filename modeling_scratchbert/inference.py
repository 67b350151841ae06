"""Faster inference on a CPU: linear layers with prepacked weights, that is, weights in oneDNN's blocked layout.

`model.optimize_for_inference()` replaces each `nn.Linear` by a `PrepackedLinear`. Prepacked tensors cannot be copied,
pickled, converted or trained, so most of this file restores the dense weight where one is needed, or raises an error.
"""

import ctypes
import mmap
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, Self, cast

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.utils import logging

from .attention import MultiHeadAttention
from .calibration import find_factors, load_factors, random_batches, save_factors
from .prepacking import (
    PackedMatrix,
    PrepackedWeight,
    QuantizedWeight,
    can_prepack,
    is_mapped,
    multiplies_int8,
    needs_gradients,
    refuses_export,
    shared_namespace,
    unsupported,
)

logger = logging.get_logger(__name__)

# By class name, because derived classes may differ: the layer before `activation`, and the GELU that an activation is
LAYER_BEFORE_ACTIVATION = {"FeedForward": "intermediate", "LanguageModelHead": "dense"}
GELU_FORMS = {"GELUActivation": "none", "NewGELUActivation": "tanh", "GELUTanh": "tanh"}
# A layer with fewer outputs, as model heads may have, is too small to gain from int8.
MIN_INT8_OUTPUTS = 32


class PrepackedLinear(nn.Module):
    """act(x Wᵀ + b), where act is GELU or the identity: prepacked on a CPU that oneDNN supports, dense elsewhere.
    Copies and pickles hold the dense weight, and prepack it when they are restored; those of int8 layers hold int8.

    Args:
        layer: the layer to replace. Its bias and, until it is prepacked, its weight are taken over.
        gelu_form: "none" for the exact GELU, "tanh" for the approximation, None for no activation.
        keeps_weight: keep the dense weight beside the prepacked one, because another module uses it too.
        is_part: leave it to a `JointAttention` to prepack the weight, as a part of one matrix.
    """

    bias: nn.Parameter | None

    def __init__(
        self,
        layer: nn.Linear,
        gelu_form: str | None = None,
        keeps_weight: bool = False,
        is_part: bool = False,
    ):
        super().__init__()
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.gelu_form, self.keeps_weight, self.is_part = gelu_form, keeps_weight, is_part
        self._parameters.update(layer._parameters)  # the weight is None while only the prepacked one is held
        self.prepacked: Any = None  # a PackedMatrix, unless the layer is dense
        self.part = 0  # which of the weights in `prepacked`

    @property
    def weight(self) -> nn.Parameter | torch.Tensor:
        """The dense weight, `(out, in)`. While only the prepacked one is held, a copy: writing to it has no effect."""
        weight = self._parameters["weight"]
        return self.prepacked.copy_of(self.part) if weight is None else weight

    @property
    def is_quantized(self) -> bool:
        return isinstance(self.prepacked, QuantizedWeight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`(…, in)` → `(…, out)`, if prepacked in the weight's dtype. Raises RuntimeError for gradients and export."""
        matrix = self.prepacked
        if matrix is None:
            weight: Any = self._parameters["weight"]
        # Written out, because for one row each call of a Python function takes 0.1 % of the time.
        elif (
            x.numel() <= matrix.max_dense_numel
            and x.dtype == matrix.dtype
            and not torch.is_autocast_enabled("cpu")
            and not torch.compiler.is_compiling()
        ):
            weight = matrix.mapped[self.part]
        else:
            return self._multiply(matrix, x)
        if x.requires_grad and torch.is_grad_enabled():
            raise needs_gradients()
        y = nn.functional.linear(x, weight, self._parameters["bias"])  # `self.bias` takes five times as long
        return y if self.gelu_form is None else nn.functional.gelu(y, approximate=self.gelu_form)

    def _multiply(self, matrix: PackedMatrix, x: torch.Tensor) -> torch.Tensor:
        if matrix.shape[0] == self.out_features:
            return matrix.linear(x, self.bias, self.gelu_form)
        y = matrix.linear(x, None, None)[..., matrix.rows_of(self.part)]
        return y if self.bias is None else y + self.bias

    def _slow_forward(self, *args, **kwargs):
        """What `torch.jit.trace` calls in place of `forward`."""
        if self.prepacked is not None:
            raise refuses_export()
        return super()._slow_forward(*args, **kwargs)

    def prepack(self) -> Self:
        """Prepacks the weight if its device, its dtype and this build of torch allow it, and it is not a part."""
        weight: Any = self._parameters["weight"]
        if self.prepacked is None and not self.is_part and can_prepack(weight):
            self.hold(PrepackedWeight.from_parameters([weight]), 0)
        return self

    def hold(self, matrix: PackedMatrix, part: int) -> None:
        """Replaces the dense weight by one of those in `matrix`."""
        self.prepacked, self.part = matrix, part
        weight = self._parameters["weight"]
        if weight is not None and not self.keeps_weight:
            self._parameters["weight"] = None
            _page_out(weight)

    def restore(self) -> Any:
        """Returns the dense weight as a parameter: the same one while it is held, so that ties are kept."""
        if self.prepacked is None or self.keeps_weight:
            return self._parameters["weight"]
        return self.prepacked.to_dense(nn.Parameter, self.part)

    def device_after(self, fn) -> torch.device:
        """Returns the device to which `fn` moves the weight. Raises RuntimeError if `fn` changes the dtype, or moves
        an int8 weight."""
        before = self.weight if self.prepacked is None else torch.empty(0, dtype=self.prepacked.dtype)
        after = fn(torch.empty(0, dtype=before.dtype, device=before.device))
        if after.dtype != before.dtype:
            raise unsupported(f"conversion to {after.dtype}", f"Load it again and call .to({after.dtype}) first")
        if self.is_quantized and after.device.type != "cpu":
            raise unsupported(f"moving int8 weights to {after.device}", "Load it again")
        return after.device

    def _apply(self, fn, recurse: bool = True):
        if self.device_after(fn).type != "cpu" and self.prepacked is not None:
            self._parameters["weight"], self.prepacked = self.restore(), None
        super()._apply(fn, recurse)
        self.prepack()
        return self

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        if self.is_quantized:
            raise unsupported("saving int8 weights", 'Save it before optimize_for_inference("int8")')
        if self._parameters["weight"] is None:
            destination[f"{prefix}weight"] = self.prepacked.to_dense(torch.Tensor, self.part)
        super()._save_to_state_dict(destination, prefix, keep_vars)

    def _load_from_state_dict(self, *args):
        raise unsupported("loading weights", "Load the weights before optimize_for_inference()")

    def __getstate__(self):
        if self.is_quantized:
            return dict(self.__dict__)
        return {**self.__dict__, "prepacked": None, "_parameters": {**self._parameters, "weight": self.restore()}}

    def __setstate__(self, state):
        super().__setstate__(state)
        self.prepack()

    def extra_repr(self) -> str:
        sizes = f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"
        kind = "int8" if self.is_quantized else self.prepacked is not None
        return f"{sizes}, gelu_form={self.gelu_form!r}, prepacked={kind}"


class JointAttention(MultiHeadAttention):
    """Self-attention whose queries, keys and values are one product, as long as one matrix holds the three weights."""

    joint_bias: torch.Tensor | None
    query: Any
    key: Any
    value: Any

    def project(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        query: Any = self._modules["query"]  # `self.query` takes five times as long
        matrix = query.prepacked
        is_dense = matrix is None or (
            hidden_states.numel() <= matrix.max_dense_numel and not torch.compiler.is_compiling()
        )
        if is_dense or not self._is_joint():
            return super().project(hidden_states)
        queries, keys, values = matrix.linear(hidden_states, self.joint_bias, None).chunk(3, dim=-1)
        return queries, keys, values

    def join(self) -> None:
        """Prepacks the weights of the three `PrepackedLinear`s as one matrix, if that is possible."""
        layers = [self.query, self.key, self.value]
        weights = [layer._parameters["weight"] for layer in layers if layer.prepacked is None]
        if len(weights) == len(layers) and all(map(can_prepack, weights)):
            _hold(PrepackedWeight.from_parameters(weights), layers)
        biases = [layer.bias.detach() for layer in layers if layer.bias is not None]
        self.joint_bias = torch.cat(biases) if biases else None

    def _is_joint(self) -> bool:
        # Read in every call: `_is_modified`, which looks at all attributes, is too slow.
        return self.query.prepacked is self.key.prepacked and not any(
            layer._forward_hooks or layer._forward_pre_hooks or "forward" in layer.__dict__
            for layer in (self.query, self.key, self.value)
        )

    def _apply(self, fn, recurse: bool = True):
        super()._apply(fn, recurse)
        self.join()
        return self

    def __setstate__(self, state):
        super().__setstate__(state)
        self.join()


class InferenceDropout(nn.Dropout):
    """Dropout that returns its input directly, unless it is in training mode, as for Monte Carlo dropout. Between
    products of a few rows, the calls that this leaves out take 2 % of the time."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) if self.training else x


class InferenceMixin(PreTrainedModel):
    """Adds `optimize_for_inference`, and raises an error for what a model no longer supports after it."""

    _int8_factors: dict[str, torch.Tensor] | None = None

    def optimize_for_inference(
        self,
        dtype: torch.dtype | Literal["int8"] | None = None,
        calibration: Iterable[Mapping] | str | os.PathLike | None = None,
    ) -> Self:
        """Makes the model faster on a CPU, for inference only. In place.

        Prepacks the weights of the linear layers one by one, so that memory never holds the model twice, and fuses
        GELU into them. Queries, keys and values of self-attention become one product. A weight that is also an
        embedding table is held in both forms. Results agree within rounding, in the weights' dtype even under autocast.
        On Intel's processors, float32 weights that `from_pretrained` opened stay in the mapped file as well, for inputs
        of one or two rows. Layers with hooks or a patched `forward` do not change; others stay dense if oneDNN does not
        support their device or dtype. CPUs are supported with float32 and often bfloat16.

        The model moves, saves, copies and pickles as before, but can no longer be trained, change its dtype, be
        resized, be exported, or load weights. `parameters()` and what counts them leave out prepacked weights.

        With "int8", weights and the inputs of linear layers are rounded to 8 bits, each row with its own scale; the
        numbers between layers keep the model's dtype. Such a model copies and pickles, but cannot be saved or moved. It
        requires a CPU with VNNI instructions; on others a warning says so, and the dtype stays the model's own.

        Args:
            dtype: torch.float32, torch.bfloat16, "int8", or None for the model's own.
            calibration: for int8, a few batches of typical inputs, each a mapping of the model's arguments; or the file
                that `save_calibration` wrote. Channels with large values in them are scaled down before rounding (Xiao
                et al. 2023, SmoothQuant). None for batches of random token ids.

        Returns:
            The model, in evaluation mode.

        Raises:
            RuntimeError: the model is quantised or offloaded, has adapters, or is already optimised for another dtype.
            TypeError, ValueError, OSError: `dtype` or `calibration` is invalid, or its file cannot be read.
        """
        is_int8 = _check_dtype(self, dtype, calibration)
        with shared_namespace().prepacking_lock:
            _check_supported(self)
            if isinstance(dtype, torch.dtype):
                cast(Any, self).to(dtype)
            if is_int8 and self._int8_factors is None:
                _check_finite(self)
                self._int8_factors = _calibrate(self, calibration)
            _replace_layers(self.requires_grad_(False), is_int8, self._int8_factors or {})
            self.eval()
        layers = _prepacked_layers(self)
        if layers and all(layer.prepacked is None for layer in layers):
            fact = f"optimize_for_inference() kept weights dense that are {layers[0].weight.dtype} on {self.device}"
            logger.warning_once(f"{fact}; prepacking requires oneDNN, a CPU, and float32 or (on many CPUs) bfloat16.")
        return self

    def save_calibration(self, path: str | os.PathLike) -> None:
        """Writes a small file that `optimize_for_inference("int8", calibration=path)` accepts instead of batches, for
        the same model with any model head.

        Raises:
            RuntimeError: the model is not optimised for int8.
        """
        if self._int8_factors is None:
            raise RuntimeError(
                "The model has no calibration factors; save_calibration() expects a model that was optimised for int8. "
                'Call optimize_for_inference("int8", calibration=…) before.'
            )
        save_factors(self._int8_factors, path)

    def train(self, mode: bool = True) -> Self:
        if mode and _prepacked_layers(self):
            raise unsupported("training", "Load it again")
        return super().train(mode)

    def load_state_dict(self, *args, **kwargs):
        if _prepacked_layers(self):
            raise unsupported("loading weights", "Load the weights before optimize_for_inference()")
        return super().load_state_dict(*args, **kwargs)

    def resize_token_embeddings(self, *args, **kwargs) -> nn.Embedding:
        if _prepacked_layers(self):
            raise unsupported("resizing", "Call resize_token_embeddings() before optimize_for_inference()")
        return super().resize_token_embeddings(*args, **kwargs)

    def _apply(self, fn, recurse: bool = True):
        for layer in _prepacked_layers(self):
            layer.device_after(fn)  # raises before the first tensor is converted
        return super()._apply(fn, recurse)


def _page_out(weight: torch.Tensor) -> None:
    """Takes the pages of a mapped file, as safetensors opens one, out of memory. Reading them loads them again."""
    if sys.platform == "linux" and is_mapped(weight):
        # BERT-base from a file takes 747 MiB of resident memory instead of 1,073, Python's 394 included.
        start, end = weight.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE, weight.data_ptr() + weight.nbytes
        ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), 21)  # MADV_PAGEOUT


def _prepacked_layers(model) -> list[PrepackedLinear]:
    return [module for module in model.modules() if isinstance(module, PrepackedLinear)]


def _check_supported(model) -> None:
    """Raises RuntimeError if the model is quantised or offloaded, or has adapters."""
    expected = "optimize_for_inference() expects dense weights in memory, without adapters"
    for name, module in model.named_modules():
        if hasattr(module, "base_layer"):  # PEFT's name for the layer that it adapts
            raise RuntimeError(f"{name} has an adapter; {expected}. Call merge_and_unload() of the PeftModel first.")
        if hasattr(module, "_hf_hook") or any(tensor.is_meta for tensor in module.parameters(recurse=False)):
            raise RuntimeError(f"{name or 'The model'} is offloaded; {expected}. Load the model without device_map.")
    if getattr(model, "hf_quantizer", None) is not None:
        raise RuntimeError(f"The model is quantised; {expected}. Load it without quantization_config.")


def _check_dtype(model, dtype, calibration) -> bool:
    """Returns whether to use int8. Raises ValueError for invalid arguments, RuntimeError if the model is optimised for
    another dtype."""
    if dtype not in (None, torch.float32, torch.bfloat16, "int8"):
        raise ValueError(f'dtype is {dtype!r}; expected torch.float32, torch.bfloat16, "int8" or None.')
    if calibration is not None and dtype != "int8":
        raise ValueError(f'calibration was given for dtype {dtype!r}; expected dtype "int8". Pass None instead.')
    layers = _prepacked_layers(model)
    if dtype == "int8":
        if any(not layer.is_quantized and layer.out_features >= MIN_INT8_OUTPUTS for layer in layers):
            raise unsupported("conversion to int8", 'Load it again and call optimize_for_inference("int8")')
        if model.device.type != "cpu" or not multiplies_int8():
            logger.warning_once(
                f'The model is on {model.device}; optimize_for_inference("int8") requires a CPU with VNNI '
                f"instructions. Its weights stay {model.dtype}."
            )
            return False
        return True
    if dtype is not None and any(layer.is_quantized for layer in layers):
        raise unsupported(f"conversion to {dtype}", f"Load it again and call optimize_for_inference({dtype})")
    return False


def _check_finite(model) -> None:
    """Raises ValueError if a weight is not finite: quantisation would turn NaN into a number."""
    for name, weight in model.named_parameters():
        if not weight.isfinite().all():
            raise ValueError(f"{name} has NaN or infinity; expected finite weights. Load another checkpoint.")


def _calibrate(model, calibration) -> dict[str, torch.Tensor]:
    """Returns the factors by the names of the layers in the base model, which are those of any model head."""
    prefix = f"{model.base_model_prefix}."
    groups = {
        name.removeprefix(prefix): [getattr(parent, each) for each in names]
        for name, parent, names in _layer_groups(model)
        if _follows_norm(parent, names)
    }
    if isinstance(calibration, str | os.PathLike):
        return load_factors(calibration, groups)
    if calibration is None:
        return find_factors(model.base_model, groups, random_batches(model.config))
    return find_factors(model, groups, calibration)


def _follows_norm(parent: nn.Module, names: Sequence[str]) -> bool:
    """Whether the input of these layers is the output of a layer norm, in which a few channels are much larger."""
    return len(names) > 1 or (type(parent).__name__ == "FeedForward" and names == ("intermediate",))


def _layer_groups(model) -> list[tuple[str, Any, tuple[str, ...]]]:
    """Returns the linear layers to replace, in groups that become one matrix: the name of the first layer, its parent,
    and the names in it. Groups that share weights follow one another, so that these are freed after the last."""
    groups: list[tuple[str, Any, tuple[str, ...]]] = []
    joint = {
        id(child) for parent in model.modules() for name, child in parent.named_children() if _can_join(name, child)
    }
    for path, parent in model.named_modules():
        names = [name for name, child in parent.named_children() if _is_plain_linear(child)]
        together: list[tuple[str, ...]] = [("query", "key", "value")] if id(parent) in joint else []
        together += [(name,) for name in names if not together or name not in together[0]]
        groups += [(f"{path}.{each[0]}" if path else each[0], parent, each) for each in together]
    return sorted(groups, key=lambda group: [id(getattr(group[1], name).weight) for name in group[2]])


def _can_join(name: str, attention: nn.Module) -> bool:
    """Whether this is self-attention whose queries, keys and values can be one product."""
    if name != "attention" or type(attention) is not MultiHeadAttention or _is_modified(attention):
        return False
    layers: list[Any] = [attention.query, attention.key, attention.value]
    if not all(map(_is_plain_linear, layers)) or len({layer.bias is None for layer in layers}) > 1:
        return False
    return len({(layer.in_features, layer.weight.dtype, layer.weight.device) for layer in layers}) == 1


def _replace_layers(model, is_int8: bool, factors: dict[str, torch.Tensor]) -> None:
    """Replaces the linear layers, a group at a time, and the dropouts."""
    kept = {id(weight) for m in model.modules() if not _is_plain_linear(m) for weight in m._parameters.values()}
    for name, parent, names in _layer_groups(model):
        of_group = factors.get(name.removeprefix(f"{model.base_model_prefix}."))
        _replace_group(parent, names, kept, is_int8, of_group)
    for module in model.modules():
        if type(module) is nn.Dropout:
            module.__class__ = InferenceDropout


def _replace_group(parent: Any, names: Sequence[str], kept: set[int], is_int8: bool, factors) -> None:
    """Replaces layers of one input by `PrepackedLinear`s that share a matrix. Weights with an id in `kept` stay."""
    is_part, layers = len(names) > 1, []
    for name in names:
        layer = getattr(parent, name)
        layers.append(PrepackedLinear(layer, _fuse_gelu(parent, name), id(layer.weight) in kept, is_part))
        setattr(parent, name, layers[-1])
    weights: list[Any] = [layer._parameters["weight"] for layer in layers]
    if can_prepack(weights[0]):
        if is_int8 and sum(map(len, weights)) >= MIN_INT8_OUTPUTS:
            _hold(QuantizedWeight.from_parameters(weights, factors), layers)
        else:
            _hold(PrepackedWeight.from_parameters(weights), layers)
    if is_part:
        parent.__class__ = JointAttention
        parent.join()


def _hold(matrix: PackedMatrix, layers: Sequence[PrepackedLinear]) -> None:
    """Replaces the dense weights of these layers by those in `matrix`."""
    for part, layer in enumerate(layers):
        layer.hold(matrix, part)


def _is_plain_linear(module: nn.Module) -> bool:
    return type(module) is nn.Linear and type(module.weight) is nn.Parameter and not _is_modified(module)


def _is_modified(module: Any) -> bool:
    """Whether the module has hooks, or an attribute that hides one of its class, for example its own `forward`."""
    return any(hasattr(type(module), key) or (key.endswith("_hooks") and value) for key, value in vars(module).items())


def _fuse_gelu(parent: nn.Module, name: str) -> str | None:
    """Returns the form of the GELU that follows this layer, or None. The GELU is replaced by the identity."""
    activation = getattr(parent, "activation", None)
    is_fusible = LAYER_BEFORE_ACTIVATION.get(type(parent).__name__) == name and not _is_modified(parent)
    form = GELU_FORMS.get(type(activation).__name__) if is_fusible and not _is_modified(activation) else None
    if form is not None:
        parent.activation = nn.Identity()
    return form
