"""Faster inference on a CPU: linear layers with prepacked weights, that is, weights in oneDNN's blocked layout.

`model.optimize_for_inference()` replaces each `nn.Linear` by a `PrepackedLinear`. Prepacked tensors cannot be copied,
pickled, converted or trained, so most of this file restores the dense weight where one is needed, or raises an error.
"""

import ctypes
import mmap
import sys
import threading
import uuid
import weakref
from typing import Any, Self

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.utils import logging

logger = logging.get_logger(__name__)

# By class name, because derived classes may differ: the layer before `activation`, and the GELU that an activation is
LAYER_BEFORE_ACTIVATION = {"FeedForward": "intermediate", "LanguageModelHead": "dense"}
GELU_FORMS = {"GELUActivation": "none", "NewGELUActivation": "tanh", "GELUTanh": "tanh"}
# oneDNN caches about 0.5 MiB for each row count of a layer, so a weight is multiplied by a bounded set of row counts.
MAX_EXACT_ROW_COUNTS = 48


def _shared_namespace():
    """Returns `torch.ops.scratchbert`, which all copies of this package in a process share, with what they register
    once. `torch.compile` does not accept prepacked tensors, so the operator looks up the weight by its key."""
    namespace = torch.ops.scratchbert
    with vars(namespace).setdefault("prepacking_lock", threading.RLock()):
        if "weights_by_key" not in vars(namespace):
            weights = namespace.weights_by_key = weakref.WeakValueDictionary()
            namespace.weights_by_parameter_id = weakref.WeakValueDictionary()
            torch.library.custom_op(
                "scratchbert::prepacked_linear",
                lambda x, bias, key, gelu_form: weights[key].linear(x, bias, gelu_form),
                mutates_args=(),
                schema="(Tensor x, Tensor? bias, str key, str? gelu_form) -> Tensor",
            ).register_fake(lambda x, bias, key, gelu_form: weights[key].empty_output(x))
    return namespace


_shared_namespace()


class PrepackedWeight:
    """One weight `(out, in)` in oneDNN's layout. Layers that shared the weight share this."""

    def __init__(self, weight: nn.Parameter):
        self.blocked = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), 32)  # rows; fast for any number
        self._dense: weakref.WeakValueDictionary[type, Any] = weakref.WeakValueDictionary([(nn.Parameter, weight)])
        self._exact_row_counts = set(range(17))
        self.key = uuid.uuid4().hex
        _shared_namespace().weights_by_key[self.key] = self

    @classmethod
    def from_parameter(cls, weight: nn.Parameter) -> "PrepackedWeight":
        """Returns the prepacked form of `weight`: the one that exists if it is up to date, otherwise a new one."""
        known = _shared_namespace().weights_by_parameter_id
        prepacked = known.get(id(weight))
        is_same = prepacked is not None and prepacked._dense.get(nn.Parameter) is weight  # ids are reused
        if not is_same or not torch.equal(prepacked.blocked.to_dense(), weight):  # trained, as part of another model
            prepacked = known[id(weight)] = cls(weight)
        return prepacked

    def to_dense(self, kind: type[torch.Tensor]) -> Any:
        """Returns the weight as a Tensor or a Parameter: the same object while one is held, so that ties are kept."""
        dense = self._dense.get(kind)
        if dense is None:
            dense = self.blocked.to_dense()
            dense = self._dense[kind] = dense if kind is torch.Tensor else nn.Parameter(dense, requires_grad=False)
        return dense

    def linear(self, x: torch.Tensor, bias: torch.Tensor | None, gelu_form: str | None) -> torch.Tensor:
        """Returns act(x Wᵀ + b), `(…, in)` → `(…, out)`, in the weight's dtype: oneDNN crashes for `x` of another."""
        activation, form = ("none", "") if gelu_form is None else ("gelu", gelu_form)
        x, shape, rows = x.to(self.blocked.dtype), x.shape, x.numel() // x.shape[-1]
        computed_rows = rows if rows in self._exact_row_counts else self._round_row_count(rows)
        if computed_rows != rows:
            x = _extend_rows(x.reshape(rows, -1), computed_rows)
        y = torch.ops.mkldnn._linear_pointwise.default(x, self.blocked, bias, activation, [], form)
        return y if computed_rows == rows else y[:rows].view(*shape[:-1], -1)

    def _round_row_count(self, rows: int) -> int:
        """Returns the number of rows to compute for `rows` rows. The first row counts of a weight are exact, so that
        batches of a few fixed shapes are never copied; others are rounded up, by a sixteenth at most from 128 rows."""
        if len(self._exact_row_counts) < MAX_EXACT_ROW_COUNTS:
            self._exact_row_counts.add(rows)
            return rows
        power_of_two = 2 ** (rows - 1).bit_length()
        step = max(power_of_two // 32, min(power_of_two // 16, 8))
        return -(-rows // step) * step

    def empty_output(self, x: torch.Tensor) -> torch.Tensor:
        return x.new_empty((*x.shape[:-1], self.blocked.shape[0]), dtype=self.blocked.dtype)


class PrepackedLinear(nn.Module):
    """act(x Wᵀ + b), where act is GELU or the identity: prepacked on a CPU that oneDNN supports, dense elsewhere.
    Copies and pickles hold the dense weight, and prepack it when they are restored.

    Args:
        layer: the layer to replace. Its bias and, until it is prepacked, its weight are taken over.
        gelu_form: "none" for the exact GELU, "tanh" for the approximation, None for no activation.
        keeps_weight: keep the dense weight beside the prepacked one, because another module uses it too.
    """

    bias: nn.Parameter | None

    def __init__(self, layer: nn.Linear, gelu_form: str | None = None, keeps_weight: bool = False):
        super().__init__()
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.gelu_form, self.keeps_weight = gelu_form, keeps_weight
        self._parameters.update(layer._parameters)  # the weight is None while only the prepacked one is held
        self.prepacked: Any = None  # a PrepackedWeight, unless the layer is dense
        self.prepack()

    @property
    def weight(self) -> nn.Parameter | torch.Tensor:
        """The dense weight, `(out, in)`. While only the prepacked one is held, a copy: writing to it has no effect."""
        weight = self._parameters["weight"]
        return self.prepacked.blocked.to_dense() if weight is None else weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`(…, in)` → `(…, out)`, if prepacked in the weight's dtype. Raises RuntimeError for gradients and export."""
        if x.requires_grad and torch.is_grad_enabled():
            raise _unsupported("computing gradients", "Call the model under torch.no_grad()")
        if self.prepacked is None:
            y = nn.functional.linear(x, self.weight, self.bias)
            return y if self.gelu_form is None else nn.functional.gelu(y, approximate=self.gelu_form)
        if getattr(torch.compiler, "is_exporting", bool)() or torch.jit.is_tracing():  # torch 2.6 has no is_exporting
            raise _unsupported("export", "Export the model before optimize_for_inference()")
        if torch.compiler.is_compiling():
            return torch.ops.scratchbert.prepacked_linear(x, self.bias, self.prepacked.key, self.gelu_form)
        return self.prepacked.linear(x, self.bias, self.gelu_form)

    def prepack(self) -> None:
        """Prepacks the weight if its device, its dtype and this build of torch allow it."""
        weight = self._parameters["weight"]
        if weight is not None and _can_prepack(weight):
            self.prepacked = PrepackedWeight.from_parameter(weight)
            if not self.keeps_weight:
                self._parameters["weight"] = None
                _page_out(weight)

    def device_after(self, fn) -> torch.device:
        """Returns the device to which `fn` moves the weight. Raises RuntimeError if `fn` changes the dtype."""
        before = self.weight if self.prepacked is None else self.prepacked.blocked
        after = fn(torch.empty(0, dtype=before.dtype, device=before.device))
        if after.dtype != before.dtype:
            raise _unsupported(f"conversion to {after.dtype}", f"Load it again and call .to({after.dtype}) first")
        return after.device

    def _apply(self, fn, recurse: bool = True):
        if self.device_after(fn).type != "cpu" and self.prepacked is not None:
            self._parameters["weight"], self.prepacked = self.prepacked.to_dense(nn.Parameter), None
        super()._apply(fn, recurse)
        self.prepack()
        return self

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        if self._parameters["weight"] is None:
            destination[f"{prefix}weight"] = self.prepacked.to_dense(torch.Tensor)
        super()._save_to_state_dict(destination, prefix, keep_vars)

    def _load_from_state_dict(self, *args):
        raise _unsupported("loading weights", "Load the weights before optimize_for_inference()")

    def __getstate__(self):
        weight = self._parameters["weight"] if self.prepacked is None else self.prepacked.to_dense(nn.Parameter)
        return {**self.__dict__, "prepacked": None, "_parameters": {**self._parameters, "weight": weight}}

    def __setstate__(self, state):
        super().__setstate__(state)
        self.prepack()

    def extra_repr(self) -> str:
        sizes = f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"
        return f"{sizes}, gelu_form={self.gelu_form!r}, prepacked={self.prepacked is not None}"


class InferenceMixin(PreTrainedModel):
    """Adds `optimize_for_inference`, and raises an error for what a model no longer supports after it."""

    def optimize_for_inference(self) -> Self:
        """Makes the model faster on a CPU, for inference only. In place.

        Prepacks the weights of the linear layers one by one, so that memory never holds the model twice, and fuses
        GELU into them. A weight that is also an embedding table is held in both forms. Results agree within rounding,
        in the weights' dtype even under autocast. Layers with hooks or a patched `forward` do not change; others stay
        dense if oneDNN does not support their device or dtype. CPUs are supported with float32 and often bfloat16.

        The model moves, saves, copies and pickles as before, but can no longer be trained, change its dtype, be
        resized, be exported, or load weights. `parameters()` and what counts them leave out prepacked weights.

        Returns the model, in evaluation mode. Raises RuntimeError if it is quantised or offloaded, or has adapters.
        """
        with _shared_namespace().prepacking_lock:
            _check_supported(self)
            _replace_layers(self.requires_grad_(False))
            self.eval()
        layers = _prepacked_layers(self)
        if layers and all(layer.prepacked is None for layer in layers):
            fact = f"optimize_for_inference() kept weights dense that are {layers[0].weight.dtype} on {self.device}"
            logger.warning_once(f"{fact}; prepacking requires oneDNN, a CPU, and float32 or (on many CPUs) bfloat16.")
        return self

    def train(self, mode: bool = True) -> Self:
        if mode and _prepacked_layers(self):
            raise _unsupported("training", "Load it again")
        return super().train(mode)

    def load_state_dict(self, *args, **kwargs):
        if _prepacked_layers(self):
            raise _unsupported("loading weights", "Load the weights before optimize_for_inference()")
        return super().load_state_dict(*args, **kwargs)

    def resize_token_embeddings(self, *args, **kwargs) -> nn.Embedding:
        if _prepacked_layers(self):
            raise _unsupported("resizing", "Call resize_token_embeddings() before optimize_for_inference()")
        return super().resize_token_embeddings(*args, **kwargs)

    def _apply(self, fn, recurse: bool = True):
        for layer in _prepacked_layers(self):
            layer.device_after(fn)  # raises before the first tensor is converted
        return super()._apply(fn, recurse)


def _extend_rows(x: torch.Tensor, rows: int) -> torch.Tensor:
    """Appends rows of any values, `(N, in)` → `(rows, in)`, without a copy if the storage of `x` has as many rows."""
    if x.is_contiguous() and (x.storage_offset() + rows * x.shape[1]) * x.itemsize <= x.untyped_storage().nbytes():
        return x.as_strided((rows, x.shape[1]), (x.shape[1], 1))
    return torch.cat([x, x[: rows - len(x)]])


def _page_out(weight: torch.Tensor) -> None:
    """Takes the pages of a mapped file, as safetensors opens one, out of memory. Reading them loads them again."""
    if sys.platform == "linux" and not weight.untyped_storage().resizable():  # torch's own memory is resizable
        # BERT-base from a file takes 747 MiB of resident memory instead of 1,073, Python's 394 included.
        start, end = weight.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE, weight.data_ptr() + weight.nbytes
        ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), 21)  # MADV_PAGEOUT


def _prepacked_layers(model) -> list[PrepackedLinear]:
    return [module for module in model.modules() if isinstance(module, PrepackedLinear)]


def _unsupported(operation: str, instead: str) -> RuntimeError:
    return RuntimeError(f"The model is optimised for inference; {operation} expects one that is not. {instead}.")


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


def _replace_layers(model) -> None:
    """Replaces the linear layers. Those that share a weight follow one another, so that it is freed after the last."""
    kept = {id(weight) for m in model.modules() if not _is_plain_linear(m) for weight in m._parameters.values()}
    places = [(m, name) for m in model.modules() for name, child in m.named_children() if _is_plain_linear(child)]
    for parent, name in sorted(places, key=lambda place: id(getattr(*place).weight)):
        layer = getattr(parent, name)
        setattr(parent, name, PrepackedLinear(layer, _fuse_gelu(parent, name), id(layer.weight) in kept))


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


def _can_prepack(weight: torch.Tensor) -> bool:
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    is_bfloat16 = weight.dtype == torch.bfloat16
    return torch.ops.mkldnn._is_mkldnn_bf16_supported() if is_bfloat16 else weight.dtype == torch.float32
