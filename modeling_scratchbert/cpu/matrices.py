"""Weights in the layout of the library in C++, or of oneDNN: prepacked weights."""

import ctypes
import mmap
import sys
import uuid
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..inference import refusal
from .library import TYPES, Linear, address, call, library_in_use, spread

PANEL = 32

# `torch.compile` does not accept the objects below, so its operators look them up by a key.
BY_KEY: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()


class Keyed:
    """An object with a key in `BY_KEY`, which its pickles do not have."""

    def register(self) -> None:
        self.key = uuid.uuid4().hex
        BY_KEY[self.key] = self


class Matrix(Keyed):
    """Weights `(out, in)` of the same `in`, one below the other, with their biases. It never changes: copies of a layer
    share it.

    Args:
        weights: the weights, without gradients.
        biases: the bias of each, or None for each.
        dtype: of the products: torch.float32, torch.bfloat16 or torch.int8.
        factors: `(in,)`, by which inputs are divided and weights multiplied before they are rounded to int8 (Xiao et
            al. 2023, SmoothQuant, equation 3); None for ones.
        heads: the number of attention heads in the outputs, and in the inputs: see `spread`.

    Attributes:
        height: the number of outputs of `multiply`.
        largest: `(in,)`, the largest absolute value of each input, while int8 is calibrated.
    """

    largest: Any = None

    def __init__(self, weights: list[Tensor], biases: Sequence[Tensor | None], dtype, factors=None, heads=(1, 1)):
        self.dtype, self.factors, self.width = dtype, factors, weights[0].shape[1]
        filled = [w.new_zeros(len(w)) if b is None else b for w, b in zip(weights, biases, strict=True)]
        self.bias = torch.cat([spread(each.float(), heads=heads[0]) for each in filled])
        self.height = len(weights[0]) if len(weights) == 1 else len(self.bias)
        self.scales = self.sums = self.input_factors = None
        if dtype == torch.int8:
            self.input_factors = None if factors is None else spread(1 / factors)
            parts = [quantized(weight, factors) for weight in weights]
            weights = [values for values, _ in parts]
            self.scales = torch.cat([spread(scales, heads=heads[0]) for _, scales in parts])
        weight = torch.cat([spread(spread(each, 0, heads[0]), 1, heads[1]) for each in weights])
        if dtype == torch.int8:
            self.sums = weight.sum(dim=1, dtype=torch.int32)
        weight = weight.to(dtype)
        self.inputs, numbers = weight.shape[1], 4 // weight.itemsize  # in a word of 32 bits
        self.panels = weight.view(-1, PANEL, self.inputs // numbers, numbers).transpose(1, 2).contiguous()
        self.register()

    def __deepcopy__(self, memo):
        return self

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "key"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        library_in_use()
        self.register()

    def linear(self) -> Linear:
        """The matrix as the library reads it; valid as long as this object."""
        tensors = self.panels, self.bias, self.scales, self.input_factors, self.sums, self.largest
        return Linear(self.inputs, len(self.bias), *map(address, tensors))

    def multiply(self, x: Tensor) -> Tensor:
        """x Wᵀ + b, `(…, in)` → `(…, height)`, in float32."""
        rows = spread(x.float()).reshape(-1, self.inputs).contiguous()
        y = rows.new_empty(len(rows), self.height)
        sizes = len(rows), self.height, torch.get_num_threads()
        call("linear", ctypes.byref(self.linear()), TYPES[self.dtype], rows.data_ptr(), y.data_ptr(), *sizes)
        return y.view(*x.shape[:-1], self.height)


class TorchMatrix(Keyed):
    """What `Matrix` is where there is no library: float32 in oneDNN's layout. The arguments are the same."""

    factors = None

    def __init__(self, weights: list[Tensor], biases: Sequence[Tensor | None], dtype, factors=None, heads=(1, 1)):
        self.dtype, self.width = dtype, weights[0].shape[1]
        bias = [bias for bias in biases if bias is not None]
        self.bias = torch.cat(bias).float() if bias else None
        self._prepack(torch.cat(weights).float())

    def _prepack(self, weight: Tensor) -> None:
        self.height = len(weight)
        self.prepacked = torch.ops.mkldnn._reorder_linear_weight(weight, 32)  # rows; fast for any number
        self.register()

    def __deepcopy__(self, memo):
        return self

    def __getstate__(self) -> dict[str, Any]:
        return {"dtype": self.dtype, "width": self.width, "bias": self.bias, "weight": self.prepacked.to_dense()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        weight = state.pop("weight")
        if not can_prepack(weight):
            raise RuntimeError(
                "The pickled model has weights in oneDNN's layout; expected a CPU and a build of torch that multiply "
                "them. Load the checkpoint on this machine and call optimize_for_inference()."
            )
        vars(self).update(state)
        self._prepack(weight)

    def multiply(self, x: Tensor) -> Tensor:
        """x Wᵀ + b, `(…, in)` → `(…, height)`, in float32. At least four rows are computed, because oneDNN adds up more
        than 1,024 products in blocks, which are others for a single row; and few numbers of rows, because it keeps
        about 0.5 MiB for each."""
        rows = x.reshape(-1, self.width).float()
        step = max(4, 2 ** (len(rows).bit_length() - 4))
        padded = nn.functional.pad(rows, (0, 0, 0, -len(rows) % step))
        y = torch.ops.mkldnn._linear_pointwise(padded, self.prepacked, self.bias, "none", [], "")
        return y[: len(rows)].view(*x.shape[:-1], self.height)


def multiply(x: Tensor, matrix: Matrix | TorchMatrix) -> Tensor:
    """`matrix.multiply(x)`, also while `torch.compile` traces the call."""
    return torch.ops.scratchbert_cpu.multiply(x, matrix.key) if is_compiling(x) else matrix.multiply(x)


torch.library.custom_op(
    "scratchbert_cpu::multiply",
    lambda x, key: BY_KEY[key].multiply(x),
    mutates_args=(),
    schema="(Tensor x, str key) -> Tensor",
).register_fake(lambda x, key: x.new_empty((*x.shape[:-1], BY_KEY[key].height), dtype=torch.float32))


def is_compiling(x: Tensor) -> bool:
    """Whether `torch.compile` traces a call with this input, which then calls an operator. Raises RuntimeError for
    gradients and export."""
    if (x.requires_grad and torch.is_grad_enabled()) or torch.autograd.forward_ad._current_level >= 0:
        raise refusal("computing gradients", "Call the model under torch.no_grad()")
    if torch.jit.is_tracing() or getattr(torch.compiler, "is_exporting", bool)():  # not in torch 2.6
        raise refusal("export")
    return torch.compiler.is_compiling()


def quantized(weight: Tensor, factors: Tensor | None) -> tuple[Tensor, Tensor]:
    """The int8 values of a weight, and the scale of each row. A few rows at a time: a float copy of a whole weight
    would raise the peak of memory."""
    values, scales = torch.empty(weight.shape, dtype=torch.int8), torch.empty(len(weight))
    for start in range(0, len(weight), 1024):
        rows = slice(start, start + 1024)
        part = weight[rows].float() if factors is None else weight[rows].float() * factors
        scales[rows] = part.abs().amax(dim=1).clamp(min=torch.finfo(torch.float32).tiny) / 127
        values[rows] = (part / scales[rows, None]).round().to(torch.int8)
    return values, scales


def page_out(weight: Tensor) -> None:
    """Take the pages of a mapped file, as safetensors opens one, out of memory. Reading them loads them again:
    BERT-base from a file takes 747 MiB of resident memory instead of 1,073."""
    if sys.platform == "linux" and not weight.untyped_storage().resizable():  # torch's own memory is
        first = weight.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
        size = ctypes.c_size_t(weight.data_ptr() + weight.nbytes - first)
        ctypes.CDLL(None).madvise(ctypes.c_void_p(first), size, 21)  # MADV_PAGEOUT


def can_prepack(weight: Tensor) -> bool:
    """Whether this build of torch has products of prepacked weights of this dtype, on this device."""
    is_float = weight.dtype in (torch.float32, torch.bfloat16)
    return weight.device.type == "cpu" and torch.backends.mkldnn.is_available() and is_float
