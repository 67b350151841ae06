"""Faster inference on a CPU: linear layers whose matrices lie as oneDNN wants to read them.

`model.optimize_for_inference()` replaces every `nn.Linear` by a `PackedLinear`. The operators are those that torch's
own compiler uses. Their packed tensors can be neither copied, pickled, converted nor trained, so what follows is mostly
about giving the dense matrix back wherever one is asked for, and saying no where there is no answer.
"""

import ctypes
import mmap
import sys
import weakref
from typing import Any, Self, TypeVar

import torch
from torch import nn
from torch.nn.functional import gelu, linear
from transformers import PreTrainedModel
from transformers.activations import ACT2FN
from transformers.utils import logging

logger = logging.get_logger(__name__)

# GELU by the name that torch has for its form; "none" is the exact one.
GELUS = {
    type(ACT2FN["gelu"]): "none",
    type(ACT2FN["gelu_new"]): "tanh",
    type(ACT2FN["gelu_pytorch_tanh"]): "tanh",
}
# The linear layers that nothing but their module's `activation` follows. By name: a derived class may differ.
BEFORE_ACTIVATION = {"FeedForward": "intermediate", "LanguageModelHead": "dense"}

# The layout is chosen for a number of rows, and any layout computes any number: the one for 32 is good from a single
# token to a large batch, where the one for 1 is slow for all others.
ROWS = 32

Kind = TypeVar("Kind", bound=torch.Tensor)

_is_exporting = getattr(torch.compiler, "is_exporting", lambda: False)  # torch 2.6 has none


def _register_operator():
    """`torch.compile` takes no packed tensor, but an operator that looks it up by name as it runs. There is one for all
    copies of this package in the process: the first registers it, and each matrix brings its own code."""
    namespace = torch.ops.scratchbert
    if hasattr(namespace, "packed_linear"):
        return
    matrices = weakref.WeakValueDictionary()  # key → PackedMatrix

    def packed_linear(x, bias, key, gelu_form):
        return matrices[key].product(x, bias, gelu_form)

    def without_values(x, bias, key, gelu_form):
        matrix = matrices[key].packed
        return x.new_empty((*x.shape[:-1], matrix.shape[0]), dtype=matrix.dtype)

    operator = torch.library.custom_op(
        "scratchbert::packed_linear",
        packed_linear,
        mutates_args=(),
        schema="(Tensor x, Tensor? bias, str key, str? gelu_form) -> Tensor",
    )
    operator.register_fake(without_values)
    namespace.packed_matrices = matrices


_register_operator()


class PackedMatrix:
    """One weight `(out, in)` in oneDNN's layout. Layers that shared the weight share this."""

    # id of a parameter → the matrix that was made of it
    _made: weakref.WeakValueDictionary[int, "PackedMatrix"] = weakref.WeakValueDictionary()

    def __init__(self, weight: nn.Parameter):
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), ROWS)
        self._dense: weakref.WeakValueDictionary[type, torch.Tensor] = weakref.WeakValueDictionary()
        self._dense[nn.Parameter] = weight
        matrices = torch.ops.scratchbert.packed_matrices
        self.key = str(1 + max(map(int, matrices), default=0))
        matrices[self.key] = self

    @classmethod
    def of(cls, weight: nn.Parameter) -> "PackedMatrix":
        """The matrix of `weight`, made now or before."""
        matrix = cls._made.get(id(weight))
        if (
            matrix is None
            or matrix._dense.get(nn.Parameter) is not weight  # ids come again
            or not torch.equal(matrix.packed.to_dense(), weight)  # trained since, in another model
        ):
            matrix = cls._made[id(weight)] = cls(weight)
        return matrix

    def dense(self, kind: type[Kind]) -> Kind:
        """The weight as it was, bit for bit, as a tensor or a parameter. Whoever asks while the last one is still in
        use is given the same, so that what was tied comes out tied."""
        dense: Any = self._dense.get(kind)
        if dense is None:
            dense = self.packed.to_dense()
            if kind is nn.Parameter:
                dense = nn.Parameter(dense, requires_grad=False)
            self._dense[kind] = dense
        return dense

    def product(self, x: torch.Tensor, bias: torch.Tensor | None, gelu_form: str | None) -> torch.Tensor:
        """act(x Wᵀ + b), `(…, in)` → `(…, out)`, in the weight's dtype: oneDNN crashes on two, and under autocast `x`
        may well have another."""
        activation, form = ("none", "") if gelu_form is None else ("gelu", gelu_form)
        x = x.to(self.packed.dtype)
        return torch.ops.mkldnn._linear_pointwise.default(x, self.packed, bias, activation, [], form)


class PackedLinear(nn.Module):
    """act(x Wᵀ + b), where act is GELU or nothing: packed on a CPU that oneDNN knows, and dense elsewhere.

    Copies and pickles of it hold the dense weight, and are packed as they are opened.

    Args:
        layer: the layer to replace. Its bias and, until it is packed, its weight are taken over.
        gelu_form: "none" for the exact GELU, "tanh" for the approximation, None for none.
        keeps_weight: the weight is also another module's, and the dense one stays beside the packed one.
    """

    bias: nn.Parameter | None

    def __init__(self, layer: nn.Linear, gelu_form: str | None = None, keeps_weight: bool = False):
        super().__init__()
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.gelu_form, self.keeps_weight = gelu_form, keeps_weight
        self._parameters.update(layer._parameters)  # the weight is None while there is only a packed one
        self.matrix: PackedMatrix | None = None
        self.pack()

    @property
    def weight(self) -> nn.Parameter | torch.Tensor:
        """The dense weight, `(out, in)`. Where only a packed one is held it is a copy: writing into it does nothing."""
        weight = self._parameters["weight"]
        if weight is not None:
            return weight
        assert self.matrix is not None  # one of the two is held
        return self.matrix.packed.to_dense()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`(…, in)` → `(…, out)`. Packed, it computes in the weight's dtype, whatever autocast says.

        Raises:
            RuntimeError: `x` wants a gradient, or the model is being exported or traced.
        """
        if x.requires_grad and torch.is_grad_enabled():
            raise _no("give a gradient", "Call it under torch.no_grad()")
        if self.matrix is None:
            y = linear(x, self.weight, self.bias)
            return y if self.gelu_form is None else gelu(y, approximate=self.gelu_form)
        if _is_exporting() or torch.jit.is_tracing():
            raise _no("be exported", "Export it before optimize_for_inference()")
        if torch.compiler.is_compiling():
            return torch.ops.scratchbert.packed_linear(x, self.bias, self.matrix.key, self.gelu_form)
        return self.matrix.product(x, self.bias, self.gelu_form)

    def pack(self) -> None:
        """Packs the weight where that can be done."""
        weight = self._parameters["weight"]
        if weight is not None and _obstacle(weight) is None:
            self.matrix = PackedMatrix.of(weight)
            if not self.keeps_weight:
                self._parameters["weight"] = None
                _let_go(weight)

    def unpack(self) -> None:
        """Holds the dense weight alone."""
        if self.matrix is not None:
            self._parameters["weight"] = self.matrix.dense(nn.Parameter)
            self.matrix = None

    def device_after(self, fn) -> torch.device:
        """Where `fn`, by which modules are moved and converted, puts a tensor like the weight.

        Raises:
            RuntimeError: it gives it another dtype.
        """
        before = self.matrix.packed if self.matrix is not None else self.weight
        after = fn(torch.empty(0, dtype=before.dtype, device=before.device))
        if after.dtype != before.dtype:
            raise _no(
                f"change from {before.dtype} to {after.dtype}",
                f"Load it again and call .to({after.dtype}) before optimize_for_inference()",
            )
        return after.device

    def _apply(self, fn, recurse: bool = True):
        if self.device_after(fn).type == "cpu" and self.matrix is not None:
            return super()._apply(fn, recurse)  # the bias
        self.unpack()
        super()._apply(fn, recurse)
        self.pack()
        return self

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        if self._parameters["weight"] is None:
            destination[f"{prefix}weight"] = self.matrix.dense(torch.Tensor)
        super()._save_to_state_dict(destination, prefix, keep_vars)

    def _load_from_state_dict(self, *args):
        raise _no("load weights", "Load them before optimize_for_inference()")

    def __getstate__(self):
        state = dict(self.__dict__)
        if self.matrix is not None:
            weight = self.matrix.dense(nn.Parameter)
            state |= {"matrix": None, "_parameters": {**self._parameters, "weight": weight}}
        return state

    def __setstate__(self, state):
        super().__setstate__(state)
        self.pack()

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, "
            f"gelu_form={self.gelu_form!r}, packed={self.matrix is not None}"
        )


class InferenceMixin(PreTrainedModel):
    """`optimize_for_inference`, and what a model can no longer do after it: said before anything has changed."""

    def optimize_for_inference(self) -> Self:
        """Makes the model faster on a CPU, for inference only. In place.

        The matrices of its linear layers are laid out for oneDNN, one by one, so that there is never a second copy of
        the model; a matrix that is also the table of words is held in both forms. GELU is computed in the product that
        goes before it. Numbers agree within rounding. Packed products run in the weights' dtype even under autocast.
        Elsewhere than on a CPU, in other dtypes than float32 and bfloat16, and where torch has no oneDNN, the layers
        stay dense. `.to(device)` may come before or after.

        The model saves, copies and pickles as before, with the same tensors; a state dict takes the memory of a dense
        copy. `parameters()`, and so `num_parameters()` and `get_memory_footprint()`, do not count packed matrices.
        It cannot be trained, change its dtype, be resized, exported, or load weights any more.

        Returns:
            The model itself, in evaluation mode. Another call does nothing.

        Raises:
            RuntimeError: the model is quantised or offloaded, or has adapters that are not merged.
        """
        _refuse_unfit(self)
        _replace_layers(self.requires_grad_(False))
        self.eval()
        layers = _packed_layers(self)
        if layers and all(layer.matrix is None for layer in layers):
            logger.warning_once(
                f"optimize_for_inference: {_obstacle(layers[0].weight)}. The linear layers stay as they were, and the "
                "model will hardly be faster."
            )
        return self

    def train(self, mode: bool = True) -> Self:
        if mode and _packed_layers(self):
            raise _no("be trained", "Load it again")
        return super().train(mode)

    def load_state_dict(self, *args, **kwargs):
        if _packed_layers(self):
            raise _no("load weights", "Load them before optimize_for_inference()")
        return super().load_state_dict(*args, **kwargs)

    def resize_token_embeddings(
        self, new_num_tokens: int | None = None, pad_to_multiple_of: int | None = None, mean_resizing: bool = True
    ) -> nn.Embedding:
        if _packed_layers(self):
            raise _no("be resized", "Call resize_token_embeddings before optimize_for_inference()")
        return super().resize_token_embeddings(new_num_tokens, pad_to_multiple_of, mean_resizing)

    def _apply(self, fn, recurse: bool = True):
        for layer in _packed_layers(self):
            layer.device_after(fn)  # raises, before the first tensor is converted
        return super()._apply(fn, recurse)


def _let_go(weight: torch.Tensor) -> None:
    """Has Linux take the pages of a mapped file, as safetensors opens one, out of memory: else they would stay there
    beside the packed matrices until the file's last tensor is gone. No value changes; whoever still reads them has
    them read from the file again."""
    if sys.platform != "linux" or weight.untyped_storage().resizable():  # memory of torch's own is freed as it is
        return
    page, start = mmap.PAGESIZE, weight.data_ptr()
    first, end = -(-start // page) * page, (start + weight.nbytes) // page * page
    if first < end:
        advice = 21  # MADV_PAGEOUT, of Linux 5.4; an older one refuses it
        ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(end - first), advice)


def _packed_layers(model) -> list[PackedLinear]:
    return [module for module in model.modules() if isinstance(module, PackedLinear)]


def _no(what: str, instead: str) -> RuntimeError:
    return RuntimeError(f"A model that optimize_for_inference() was called on cannot {what}. {instead}.")


def _refuse_unfit(model) -> None:
    """Raises RuntimeError for a model whose linear layers are not what they seem."""
    for name, module in model.named_modules():
        if hasattr(module, "base_layer"):  # as PEFT's layers call what they adapt
            raise RuntimeError(
                f"optimize_for_inference: {name} has an adapter that is not merged. Call merge_and_unload() of the "
                "PeftModel first."
            )
        if hasattr(module, "_hf_hook") or any(tensor.is_meta for tensor in module.parameters(recurse=False)):
            raise RuntimeError(
                f"optimize_for_inference: the weights of {name or 'the model'} are offloaded or have no values. Load "
                "the model whole, without device_map."
            )
    if getattr(model, "hf_quantizer", None) is not None:
        raise RuntimeError(
            "optimize_for_inference: the model is quantised, and packing is for plain weights. Load it without "
            "quantization_config."
        )


def _replace_layers(model) -> None:
    """Replaces the linear layers one by one, those that share a weight in a row, for it to be freed after the last."""
    kept = {
        id(parameter)
        for module in model.modules()
        if not _is_plain_linear(module)
        for parameter in module.parameters(recurse=False)
    }
    places = [
        (parent, name)
        for parent in model.modules()
        for name, child in parent.named_children()
        if _is_plain_linear(child)
    ]
    for parent, name in sorted(places, key=lambda place: id(getattr(*place).weight)):
        layer = getattr(parent, name)
        setattr(parent, name, PackedLinear(layer, _take_gelu(parent, name), id(layer.weight) in kept))


def _is_plain_linear(module: nn.Module) -> bool:
    """Whether the module is a linear layer and does nothing else: a hook would be lost with it."""
    is_linear = type(module) is nn.Linear and type(module.weight) is nn.Parameter
    return is_linear and not module._forward_hooks and not module._forward_pre_hooks


def _take_gelu(parent: nn.Module, name: str) -> str | None:
    """The form of the GELU that follows this layer, where one does; the module is left with nothing to do."""
    if BEFORE_ACTIVATION.get(type(parent).__name__) != name or parent.get_submodule("activation")._forward_hooks:
        return None
    form = GELUS.get(type(parent.activation))
    if form is not None:
        parent.activation = nn.Identity()
    return form


def _obstacle(weight: torch.Tensor) -> str | None:
    """Why the weight cannot be packed, or None where it can."""
    if weight.device.type != "cpu":
        return f"the model is on {weight.device}, and packing is for the CPU"
    operators = torch.ops.mkldnn
    if not torch.backends.mkldnn.is_available() or not hasattr(operators, "_reorder_linear_weight"):
        return "this build of torch has no oneDNN"
    if weight.dtype == torch.bfloat16 and not operators._is_mkldnn_bf16_supported():
        return "this CPU does not compute in torch.bfloat16"
    if weight.dtype not in (torch.float32, torch.bfloat16):
        return f"the weights are {weight.dtype}, and oneDNN packs torch.float32 and torch.bfloat16"
    return None
