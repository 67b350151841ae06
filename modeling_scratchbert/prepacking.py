"""Weights in the layouts of oneDNN's matrix products on a CPU: of float32, bfloat16 or int8.

A `PrepackedWeight` computes the same products as the weights it is made of; a `QuantizedWeight` computes them in int8.
"""

import functools
import operator
import platform
import threading
import uuid
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import torch
from torch import nn

# oneDNN caches about 0.5 MiB for each row count of a layer, so a weight is multiplied by a bounded set of row counts.
MAX_EXACT_ROW_COUNTS = 48
# On Intel's processors, MKL multiplies up to this many rows by dense weights faster than oneDNN by prepacked ones.
MAX_DENSE_ROWS = 2
# The bytes after each quantised row: its scale and its minimum, each a float32.
ROW_PARAMETERS = 8


def shared_namespace():
    """Returns `torch.ops.scratchbert`, which all copies of this package in a process share, with what they register
    once. `torch.compile` does not accept prepacked tensors, so the operator looks up the weight by its key."""
    namespace = torch.ops.scratchbert
    with vars(namespace).setdefault("prepacking_lock", threading.RLock()):
        vars(namespace).setdefault("weights_by_parameter_ids", weakref.WeakValueDictionary())  # not in version 0.1.0
        if "weights_by_key" not in vars(namespace):
            weights = namespace.weights_by_key = weakref.WeakValueDictionary()
            torch.library.custom_op(
                "scratchbert::prepacked_linear",
                lambda x, bias, key, gelu_form: weights[key].linear(x, bias, gelu_form),
                mutates_args=(),
                schema="(Tensor x, Tensor? bias, str key, str? gelu_form) -> Tensor",
            ).register_fake(lambda x, bias, key, gelu_form: weights[key].empty_output(x))
    return namespace


shared_namespace()


class PackedMatrix:
    """One or several weights `(out, in)` of the same `in`, one below the other, in a layout of oneDNN's. Layers that
    shared the weights share this.

    Attributes:
        dtype: of the results.
        shape: `(out, in)` of all weights together.
        key: identifies the matrix in the process.
        mapped: the weights themselves, if they stay in a mapped file.
        max_dense_numel: the most elements of an input that these multiply faster; -1 if there are none.
    """

    dtype: torch.dtype
    shape: tuple[int, int]
    mapped: Sequence[torch.Tensor] = ()
    max_dense_numel = -1

    def __init__(self, weights: Sequence[torch.Tensor]):
        self.shape = (sum(map(len, weights)), weights[0].shape[1])
        self.dtype = weights[0].dtype
        self._heights = [len(weight) for weight in weights]
        self._register()

    def _register(self) -> None:
        self._exact_row_counts = set(range(17))
        self.key = uuid.uuid4().hex
        shared_namespace().weights_by_key[self.key] = self

    @classmethod
    def from_parameters(cls, weights: Sequence[nn.Parameter], *args) -> Self:
        """Returns the matrix of these weights: the one that exists if it is up to date, otherwise a new one."""
        known = shared_namespace().weights_by_parameter_ids
        ids = (cls.__name__, *map(id, weights))
        matrix = known.get(ids)
        if matrix is None or not matrix.is_made_of(weights, *args):  # ids are reused
            matrix = known[ids] = cls(weights, *args)
        return matrix

    def linear(self, x: torch.Tensor, bias: torch.Tensor | None, gelu_form: str | None) -> torch.Tensor:
        """Returns act(x Wᵀ + b), `(…, in)` → `(…, out)`, in `self.dtype`. Raises RuntimeError for gradients and
        export."""
        if x.requires_grad and torch.is_grad_enabled():
            raise needs_gradients()
        if torch.compiler.is_compiling() or torch.jit.is_tracing():
            if getattr(torch.compiler, "is_exporting", bool)() or torch.jit.is_tracing():  # not in torch 2.6
                raise refuses_export()
            return torch.ops.scratchbert.prepacked_linear(x, bias, self.key, gelu_form)
        rows = x.numel() // x.shape[-1]
        if rows in self._exact_row_counts:
            return self._compute(x, bias, gelu_form)
        return self._compute_rounded(x, rows, bias, gelu_form)

    def _compute_rounded(self, x, rows, bias, gelu_form):
        computed_rows = self._round_row_count(rows)
        if computed_rows == rows:
            return self._compute(x, bias, gelu_form)
        extended = extend_rows(x.reshape(rows, -1), computed_rows)
        return self._compute(extended, bias, gelu_form)[:rows].view(*x.shape[:-1], -1)

    def empty_output(self, x: torch.Tensor) -> torch.Tensor:
        return x.new_empty((*x.shape[:-1], self.shape[0]), dtype=self.dtype)

    def rows_of(self, part: int) -> slice:
        """Returns the rows of one of the weights."""
        start = sum(self._heights[:part])
        return slice(start, start + self._heights[part])

    def _round_row_count(self, rows: int) -> int:
        """Returns the number of rows to compute for `rows` rows. The first row counts of a weight are exact, so that
        batches of a few fixed shapes are never copied; others are rounded up, by a sixteenth at most from 128 rows."""
        if len(self._exact_row_counts) < MAX_EXACT_ROW_COUNTS:
            self._exact_row_counts.add(rows)
            return rows
        power_of_two = 2 ** (rows - 1).bit_length()
        step = max(power_of_two // 32, min(power_of_two // 16, 8))
        return -(-rows // step) * step

    def is_made_of(self, weights: Sequence[nn.Parameter], *args) -> bool:
        """Whether the matrix holds the present values of these weights."""
        raise NotImplementedError

    def _compute(self, x: torch.Tensor, bias: torch.Tensor | None, gelu_form: str | None) -> torch.Tensor:
        raise NotImplementedError


class PrepackedWeight(PackedMatrix):
    """Weights of float32 or bfloat16, whose values can be restored bit for bit.

    On a CPU without instructions for bfloat16, bfloat16 weights are held and multiplied in float32, which takes more
    memory and a quarter of the time. The results are bfloat16.

    On Intel's processors, float32 weights in a mapped file stay mapped, which takes no memory of the process, and are
    multiplied as they are by one or two rows: a step of greedy decoding.
    """

    def __init__(self, weights: Sequence[nn.Parameter]):
        super().__init__(weights)
        weight = weights[0].detach() if len(weights) == 1 else torch.cat([weight.detach() for weight in weights])
        weight = weight if multiplies_natively(self.dtype) else weight.float()
        self.blocked = torch.ops.mkldnn._reorder_linear_weight(weight, 32)  # rows; fast for any number
        self._is_converted = self.blocked.dtype != self.dtype
        self._operator = torch.ops.mkldnn._linear_pointwise.default
        if self.dtype == torch.float32 and is_intel() and all(map(is_mapped, weights)):
            self.mapped = [weight.detach() for weight in weights]
            self.max_dense_numel = MAX_DENSE_ROWS * self.shape[1]
        self._dense: weakref.WeakValueDictionary[tuple[type, int], Any] = weakref.WeakValueDictionary()
        self._dense.update({(nn.Parameter, part): weight for part, weight in enumerate(weights)})

    def is_made_of(self, weights: Sequence[nn.Parameter]) -> bool:
        is_same = all(self._dense.get((nn.Parameter, part)) is weight for part, weight in enumerate(weights))
        return is_same and all(torch.equal(self.copy_of(part), weight) for part, weight in enumerate(weights))

    def copy_of(self, part: int) -> torch.Tensor:
        """Returns a dense copy of one of the weights."""
        dense = self.blocked.to_dense().to(self.dtype)
        return dense if len(self._heights) == 1 else dense[self.rows_of(part)].clone()

    def to_dense(self, kind: type[torch.Tensor], part: int) -> Any:
        """Returns one of the weights as a Tensor or a Parameter: the same object while one is held, so that ties are
        kept."""
        dense = self._dense.get((kind, part))
        if dense is None:
            dense = self.copy_of(part)
            dense = dense if kind is torch.Tensor else nn.Parameter(dense, requires_grad=False)
            self._dense[kind, part] = dense
        return dense

    def _compute(self, x, bias, gelu_form):
        if x.dtype != self.blocked.dtype:  # oneDNN crashes
            x = x.to(self.blocked.dtype)
        if self._is_converted and bias is not None:
            bias = bias.to(self.blocked.dtype)
        activation, form = ("none", "") if gelu_form is None else ("gelu", gelu_form)
        y = self._operator(x, self.blocked, bias, activation, [], form)
        return y.to(self.dtype) if self._is_converted else y


class QuantizedWeight(PackedMatrix):
    """Weights of int8 with a scale for each row, multiplied by inputs that are quantised to 8 bits as they come, with a
    scale and a minimum for each row (Zafrir et al. 2019, section 3, with the granularity of Dettmers et al. 2022).

    Args:
        weights: the weights to quantise.
        factors: `(in,)`, by which inputs are divided and weights multiplied before quantisation (Xiao et al. 2023,
            SmoothQuant, equation 3); None for ones.
    """

    def __init__(self, weights: Sequence[torch.Tensor], factors: torch.Tensor | None = None):
        super().__init__(weights)
        self.factors = factors
        values, self.scales = self._round(weights, factors)
        self._pack(values)
        self._sources = [weakref.ref(weight) for weight in weights]

    def _round(self, weights: Sequence[torch.Tensor], factors) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the int8 values, `(out, in + ROW_PARAMETERS)`, and the scales of the rows."""
        # Zeros where a quantised row has its parameters: a product with the whole row needs no copy of it.
        values = torch.zeros(self.shape[0], self.shape[1] + ROW_PARAMETERS, dtype=torch.int8)
        scales = torch.empty(self.shape[0])
        for part, weight in enumerate(weights):
            rows = self.rows_of(part)
            quantize_rows(weight.detach(), factors, values[rows, : self.shape[1]], scales[rows])
        return values, scales

    def _values(self) -> torch.Tensor:
        return self._blocked.to_dense().t()

    def _pack(self, values: torch.Tensor) -> None:
        self._blocked = torch.ops.onednn.qlinear_prepack(values, None)
        self._row_sums = values.sum(dim=1, dtype=torch.float32) * self.scales
        self._zero_points = torch.zeros(self.shape[0], dtype=torch.int64)
        self._quantize = torch.ops.quantized.embedding_bag_byte_prepack.default
        self._operator = torch.ops.onednn.qlinear_pointwise.default
        self._inverse_factors = None if self.factors is None else 1 / self.factors

    def __getstate__(self):
        kept = ("dtype", "shape", "_heights", "factors", "scales")
        return {**{name: getattr(self, name) for name in kept}, "values": self._values().contiguous()}

    def __setstate__(self, state):
        values = state.pop("values")
        vars(self).update(state)
        self._sources = []
        self._pack(values)
        self._register()

    def is_made_of(self, weights: Sequence[nn.Parameter], factors: torch.Tensor | None = None) -> bool:
        sources = [source() for source in self._sources]
        if len(sources) != len(weights) or any(map(operator.is_not, sources, weights)):
            return False
        values, scales = self._round(weights, factors)
        return torch.equal(self._values(), values) and torch.equal(self.scales, scales)

    def copy_of(self, part: int) -> torch.Tensor:
        """Returns a dense copy of one of the weights, rounded as it is."""
        values = self._values()[self.rows_of(part), : self.shape[1]]
        dense = values.float() * self.scales[self.rows_of(part), None]
        return (dense if self._inverse_factors is None else dense * self._inverse_factors).to(self.dtype)

    def _compute(self, x, bias, gelu_form):
        shape = x.shape
        x = x.reshape(-1, shape[-1]).float()
        if len(x) == 0:  # the kernel that quantises expects rows
            return x.new_empty(*shape[:-1], self.shape[0], dtype=self.dtype)
        if self._inverse_factors is not None:
            x = x * self._inverse_factors
        # x ≈ scale · q + minimum, with q in 0 … 255: the kernel for rows of an embedding table quantises rows of x.
        quantized = self._quantize(x)
        parameters = quantized[:, -ROW_PARAMETERS:]
        if shape[-1] % 4:
            parameters = parameters.contiguous()
        scale, minimum = parameters.view(torch.float32).split(1, dim=1)
        product = self._operator(
            quantized, 1.0, 0, self._blocked, self.scales, self._zero_points,
            None, 1.0, 0, torch.float32, "none", [], "",
        )  # fmt: skip
        y = minimum * self._row_sums if bias is None else torch.addcmul(bias.float(), minimum, self._row_sums)
        y = y.addcmul_(product, scale)
        if gelu_form is not None:
            y = nn.functional.gelu(y, approximate=gelu_form)
        return y.to(self.dtype).view(*shape[:-1], -1)


def unsupported(operation: str, instead: str) -> RuntimeError:
    return RuntimeError(f"The model is optimised for inference; {operation} expects one that is not. {instead}.")


def needs_gradients() -> RuntimeError:
    return unsupported("computing gradients", "Call the model under torch.no_grad()")


def refuses_export() -> RuntimeError:
    return unsupported("export", "Export the model before optimize_for_inference()")


def quantize_rows(weight: torch.Tensor, factors: torch.Tensor | None, values: torch.Tensor, scales: torch.Tensor):
    """Writes the int8 values and the scales of the rows of a weight. A few rows at a time: a float copy of a whole
    weight would raise the peak of memory."""
    for start in range(0, len(weight), 1024):
        rows = slice(start, start + 1024)
        part = weight[rows].float() if factors is None else weight[rows].float() * factors
        scales[rows] = part.abs().amax(dim=1).clamp(min=torch.finfo(torch.float32).tiny) / 127
        values[rows] = (part / scales[rows, None]).round().to(torch.int8)


def extend_rows(x: torch.Tensor, rows: int) -> torch.Tensor:
    """Appends rows of any values, `(N, in)` → `(rows, in)`, without a copy if the storage of `x` has as many rows."""
    if x.is_contiguous() and (x.storage_offset() + rows * x.shape[1]) * x.itemsize <= x.untyped_storage().nbytes():
        return x.as_strided((rows, x.shape[1]), (x.shape[1], 1))
    return torch.cat([x, x[: rows - len(x)]])


def is_mapped(weight: torch.Tensor) -> bool:
    """Whether the weight is in a file that is mapped into memory, as safetensors opens one."""
    return not weight.untyped_storage().resizable()  # torch's own memory is


@functools.cache
def is_intel() -> bool:
    """Whether this is one of Intel's processors, for which MKL, torch's library of dense products, is made."""
    cpuinfo = Path("/proc/cpuinfo")
    return "GenuineIntel" in (cpuinfo.read_text() if cpuinfo.exists() else platform.processor())


def can_prepack(weight: torch.Tensor) -> bool:
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
