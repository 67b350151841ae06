"""Weights in the layouts of oneDNN's matrix products on a CPU: of float32, bfloat16 or int8.

A `FloatMatrix` computes the same products as the weights it is made of; an `Int8Matrix` computes them in int8.
"""

import ctypes
import mmap
import sys
import uuid
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn

from ..inference import refusal

# oneDNN caches about 0.5 MiB for each row count of a layer, so a matrix is multiplied by a bounded set of row counts.
MAX_EXACT_ROW_COUNTS = 48
# The bytes after each quantised row: its scale and its minimum, each a float32.
ROW_PARAMETERS = 8

# `torch.compile` does not accept prepacked tensors, so its operator looks the matrix up by a key.
MATRICES_BY_KEY: weakref.WeakValueDictionary[str, "PackedMatrix"] = weakref.WeakValueDictionary()


class PackedMatrix:
    """One or several weights `(out, in)` of the same `in`, one below the other, in a layout of oneDNN's, with their
    biases. It never changes: copies of a layer share it. Pickles hold the weights, and prepack them when restored.

    Args:
        weights: the weights, without gradients, in a dtype that `can_prepack`.
        biases: the bias of each, or None for each.

    Attributes:
        dtype: of the weights and of the results.
        heights: the number of rows of each weight.
        bias: `(out,)` of all weights together, or None.
        key: identifies the matrix in the process.
        max_rows: the most rows of one product.
    """

    is_int8 = False
    fewest_rows = 1
    max_rows = sys.maxsize
    factors: Tensor | None = None
    _pack: Callable[[Tensor], Tensor]
    _unpack: Callable[[], Tensor]
    _compute: Callable[[Tensor, str | None], Tensor]

    def __init__(self, weights: list[Tensor], biases: Sequence[Tensor | None]):
        self.dtype, self.width = weights[0].dtype, weights[0].shape[1]
        self.heights = [len(weight) for weight in weights]
        self.bias = None if biases[0] is None else torch.cat([bias for bias in biases if bias is not None])

    def _hold(self, values: Tensor) -> None:
        """Prepacks the values of all weights, `(out, …)`."""
        self._exact_row_counts = {0, *range(self.fewest_rows, 17)}
        self.key = uuid.uuid4().hex
        MATRICES_BY_KEY[self.key] = self
        self._blocked = self._pack(values)
        use_huge_pages(self._blocked)

    def __deepcopy__(self, memo) -> Self:
        return self

    def __getstate__(self) -> dict[str, Any]:
        kept = ("dtype", "width", "heights", "bias", "factors", "scales")
        return {"values": self._unpack(), **{name: value for name, value in vars(self).items() if name in kept}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        values = state.pop("values")
        vars(self).update(state)
        if not (multiplies_int8() if self.is_int8 else can_prepack(values)):
            raise RuntimeError(
                f"The pickled model has prepacked weights of {values.dtype}; expected a CPU and a build "
                "of torch that multiply them. Load the checkpoint on this machine and call "
                "optimize_for_inference()."
            )
        self._hold(values)

    def linear(self, x: Tensor, gelu_form: str | None = None) -> Tensor:
        """Returns act(x Wᵀ + b), `(…, in)` → `(…, out)`, in `self.dtype`; act is GELU, with `gelu_form` "none" for the
        exact one and, unless this is int8, "tanh" for the approximation; or the identity. Raises RuntimeError for
        gradients and export."""
        if is_compiling(x):
            return torch.ops.scratchbert_cpu.linear(x, self.key, gelu_form)
        rows = x.numel() // x.shape[-1]
        if rows > self.max_rows:
            parts = x.reshape(rows, -1).split(self.max_rows)
            return torch.cat([self.linear(part, gelu_form) for part in parts]).view(*x.shape[:-1], -1)
        if (computed_rows := self._round_row_count(rows)) == rows:
            return self._compute(x, gelu_form)
        extended = extend_rows(x.reshape(rows, -1), computed_rows)
        return self._compute(extended, gelu_form)[:rows].view(*x.shape[:-1], -1)

    def empty_output(self, x: Tensor) -> Tensor:
        return x.new_empty((*x.shape[:-1], sum(self.heights)), dtype=self.dtype)

    def _round_row_count(self, rows: int) -> int:
        """Returns the number of rows to compute for `rows` rows. The first row counts of a matrix are exact, so that
        batches of a few fixed shapes are never copied; others are rounded up, by a sixteenth at most from 128 rows."""
        if 0 < rows < self.fewest_rows:
            return self.fewest_rows
        if len(self._exact_row_counts) < MAX_EXACT_ROW_COUNTS or rows in self._exact_row_counts:
            self._exact_row_counts.add(rows)
            return rows
        power_of_two = 2 ** (rows - 1).bit_length()
        step = max(power_of_two // 32, min(power_of_two // 16, 8))
        return -(-rows // step) * step


torch.library.custom_op(
    "scratchbert_cpu::linear",
    lambda x, key, gelu_form: MATRICES_BY_KEY[key].linear(x, gelu_form),
    mutates_args=(),
    schema="(Tensor x, str key, str? gelu_form) -> Tensor",
).register_fake(lambda x, key, gelu_form: MATRICES_BY_KEY[key].empty_output(x))


class FloatMatrix(PackedMatrix):
    """Weights of float32 or bfloat16, whose values can be restored bit for bit.

    On a CPU without instructions for bfloat16, bfloat16 weights are held and multiplied in float32, which takes more
    memory, but is up to four times as fast. The results are bfloat16. With AMX, more than 32 rows of bfloat16 are
    computed in parts.
    """

    # Fewer rows are computed as these, which takes less time. And oneDNN adds up more than 1,024 products in blocks,
    # which are others for a single row than for several (its `compute_blocking_heuristic_avx512`).
    fewest_rows = 4

    def __init__(self, weights: list[Tensor], biases: Sequence[Tensor | None]):
        super().__init__(weights, biases)
        self._hold(weights[0] if len(weights) == 1 else torch.cat(weights))

    def _pack(self, values):
        held = self.dtype if multiplies_natively(self.dtype) else torch.float32
        if held == torch.bfloat16 and torch.cpu._is_amx_tile_supported():
            # oneDNN's products with AMX have other last bits for more rows than these, and narrow ones with other
            # numbers of threads.
            self.max_rows = 32
            held = torch.float32 if len(values) < 256 else held
        self._held_bias = None if self.bias is None else self.bias.to(held)
        self._operator = torch.ops.mkldnn._linear_pointwise.default
        return torch.ops.mkldnn._reorder_linear_weight(values.to(held), 32)  # rows; fast for any number

    def _unpack(self):
        return self._blocked.to_dense().to(self.dtype)

    def _compute(self, x, gelu_form):
        held = self._blocked.dtype
        if x.dtype != held:  # oneDNN crashes
            x = x.to(held)
        activation, form = ("none", "") if gelu_form is None else ("gelu", gelu_form)
        y = self._operator(x, self._blocked, self._held_bias, activation, [], form)
        return y if held == self.dtype else y.to(self.dtype)


class Int8Matrix(PackedMatrix):
    """Weights of int8 with a scale for each row, multiplied by inputs that are quantised to 8 bits as they come, with a
    scale and a minimum for each row (Zafrir et al. 2019, section 3, with the granularity of Dettmers et al. 2022).

    Args:
        weights: the weights to quantise.
        biases: the bias of each, or None.
        factors: `(in,)`, by which inputs are divided and weights multiplied before quantisation (Xiao et al. 2023,
            SmoothQuant, equation 3); None for ones.
    """

    is_int8 = True
    # With more, the results of the operators between two products do not fit into the processor's cache.
    max_rows = 512

    def __init__(self, weights: list[Tensor], biases: Sequence[Tensor | None], factors: Tensor | None = None):
        super().__init__(weights, biases)
        self.factors = factors
        # Zeros where a quantised row has its parameters: a product with the whole row needs no copy of it.
        values = torch.zeros(sum(self.heights), self.width + ROW_PARAMETERS, dtype=torch.int8)
        self.scales = torch.empty(len(values))
        parts = zip(weights, values[:, : self.width].split(self.heights), self.scales.split(self.heights), strict=True)
        for part in parts:
            quantize_rows(factors, *part)
        self._hold(values)

    def _pack(self, values):
        self._row_sums = values.sum(dim=1, dtype=torch.float32) * self.scales
        self._zero_points = torch.zeros(len(values), dtype=torch.int64)
        self._float_bias = torch.zeros(len(values)) if self.bias is None else self.bias.float()
        self._inverse_factors = None if self.factors is None else 1 / self.factors
        self._quantize = torch.ops.quantized.embedding_bag_byte_prepack.default
        self._operator = torch.ops.onednn.qlinear_pointwise.default
        return torch.ops.onednn.qlinear_prepack(values, None)

    def _unpack(self):
        return self._blocked.to_dense().t().contiguous()

    def _compute(self, x, gelu_form):
        shape = x.shape
        x = x.reshape(-1, shape[-1]).float()
        if len(x) == 0:  # the kernel that quantises expects rows
            return self.empty_output(x).view(*shape[:-1], len(self.scales))
        if self._inverse_factors is not None:
            x = x * self._inverse_factors
        # x ≈ scale · q + minimum, with q in 0 … 255: the kernel for rows of an embedding table quantises rows of x.
        rows = self._quantize(x)
        # Copied if it is not aligned. A single row is contiguous as it is, so the format must be named.
        end = rows[:, -ROW_PARAMETERS:].clone(memory_format=torch.contiguous_format) if shape[-1] % 4 else rows
        _, scale, minimum = end.view(torch.float32).split((end.shape[1] // 4 - 2, 1, 1), dim=1)
        weight = self._blocked, self.scales, self._zero_points
        product = self._operator(rows, 1.0, 0, *weight, None, 1.0, 0, torch.float32, "none", [], "")
        y = torch.addcmul(self._float_bias, minimum, self._row_sums).addcmul_(product, scale)
        if gelu_form is not None:
            torch.ops.aten.gelu_.default(y)
        return y.to(self.dtype).view(*shape[:-1], -1)


def is_compiling(x: Tensor) -> bool:
    """Whether `torch.compile` traces a call with this input, which then calls an operator. Raises RuntimeError for
    gradients and export."""
    if (x.requires_grad and torch.is_grad_enabled()) or torch.autograd.forward_ad._current_level >= 0:
        raise refusal("computing gradients", "Call the model under torch.no_grad()")
    if torch.jit.is_tracing() or getattr(torch.compiler, "is_exporting", bool)():  # not in torch 2.6
        raise refusal("export")
    return torch.compiler.is_compiling()


def quantize_rows(factors: Tensor | None, weight: Tensor, values: Tensor, scales: Tensor) -> None:
    """Writes the int8 values and the scales of the rows of a weight. A few rows at a time: a float copy of a whole
    weight would raise the peak of memory."""
    for start in range(0, len(weight), 1024):
        rows = slice(start, start + 1024)
        part = weight[rows].float() if factors is None else weight[rows].float() * factors
        scales[rows] = part.abs().amax(dim=1).clamp(min=torch.finfo(torch.float32).tiny) / 127
        values[rows] = (part / scales[rows, None]).round().to(torch.int8)


def extend_rows(x: Tensor, rows: int) -> Tensor:
    """Appends rows of any values, `(N, in)` → `(rows, in)`, without a copy if the storage of `x` has as many rows."""
    if x.is_contiguous() and (x.storage_offset() + rows * x.shape[1]) * x.itemsize <= x.untyped_storage().nbytes():
        return x.as_strided((rows, x.shape[1]), (x.shape[1], 1))
    return nn.functional.pad(x, (0, 0, 0, rows - len(x)))


def use_huge_pages(prepacked: Tensor) -> None:
    """Moves a weight to pages of 2 MiB, from Linux 6.1. With small ones, BERT-base takes up to a tenth longer for one
    sentence in float32 (two AMD cores)."""
    if hasattr(torch.ops.mkldnn, "data_ptr"):  # not in torch 2.6
        advise(torch.ops.mkldnn.data_ptr(prepacked), torch.ops.mkldnn._nbytes(prepacked), 25)  # MADV_COLLAPSE


def page_out(weight: Tensor) -> None:
    """Takes the pages of a mapped file, as safetensors opens one, out of memory. Reading them loads them again."""
    if not weight.untyped_storage().resizable():  # torch's own memory is
        # BERT-base from a file takes 747 MiB of resident memory instead of 1,073, Python's 394 included.
        advise(weight.data_ptr(), weight.nbytes, 21)  # MADV_PAGEOUT


def advise(start: int, size: int, advice: int) -> None:
    """Calls `madvise` of Linux, for the pages at an address. An error has no effect."""
    if sys.platform == "linux":
        first = start // mmap.PAGESIZE * mmap.PAGESIZE
        ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(start + size - first), advice)


def can_prepack(weight: Tensor) -> bool:
    """Whether this build of torch has products of prepacked weights of this dtype, on this device."""
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    is_bfloat16 = weight.dtype == torch.bfloat16
    return torch.ops.mkldnn._is_mkldnn_bf16_supported() if is_bfloat16 else weight.dtype == torch.float32


def multiplies_natively(dtype: torch.dtype) -> bool:
    """Whether the CPU has instructions that multiply numbers of this dtype. Without, oneDNN computes bfloat16 at a
    quarter of float32's speed."""
    is_x86 = torch.backends.cpu.get_cpu_capability().startswith("AVX")
    has_bfloat16 = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return dtype != torch.bfloat16 or not is_x86 or has_bfloat16


def multiplies_int8() -> bool:
    """Whether the CPU has instructions that multiply int8 numbers (VNNI), and this build of torch has products that use
    them."""
    engines = torch.backends.quantized.supported_engines
    return torch.backends.mkldnn.is_available() and "onednn" in engines and torch.cpu._is_vnni_supported()
