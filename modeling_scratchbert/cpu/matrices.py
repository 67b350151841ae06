"""Weights in the layout of the library in C++, or of oneDNN: prepacked weights."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .library import Linear, Norm, address, library_in_use, spread

PANEL = 32


class Matrix:
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
        height: the number of outputs, with the zeros between several weights.
        largest: `(in,)`, the largest absolute value of each input, while int8 is calibrated.
    """

    largest: Any = None

    def __init__(self, weights: Sequence[Tensor], biases: Sequence[Tensor | None], dtype, factors=None, heads=(1, 1)):
        self.dtype, self.factors, self.width = dtype, factors, weights[0].shape[1]
        filled = [w.new_zeros(len(w)) if b is None else b for w, b in zip(weights, biases, strict=True)]

        def spread_outputs(tensors: Iterable[Tensor]) -> Tensor:
            return torch.cat([spread(each, 0, heads[0]) for each in tensors])

        self.bias = spread_outputs(filled).float()
        self.height = len(filled[0]) if len(filled) == 1 else len(self.bias)
        self.scales = self.sums = self.input_factors = None
        if dtype == torch.int8:
            self.input_factors = None if factors is None else spread(1 / factors)
            weights, scales = zip(*[quantized(weight, factors) for weight in weights], strict=True)
            self.scales = spread_outputs(scales)
        weight = spread(spread_outputs(weights), 1, heads[1])
        if dtype == torch.int8:
            self.sums = weight.sum(dim=1, dtype=torch.int32)
        weight = weight.to(dtype)
        self.inputs, numbers = weight.shape[1], 4 // weight.itemsize  # in a word of 32 bits
        self.panels = weight.view(-1, PANEL, self.inputs // numbers, numbers).transpose(1, 2).contiguous()

    def __deepcopy__(self, memo):
        return self

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        library_in_use()

    def native(self) -> Linear:
        """The matrix as the library reads it; valid as long as this object."""
        tensors = self.panels, self.bias, self.scales, self.input_factors, self.sums, self.largest
        return Linear(self.inputs, len(self.bias), *map(address, tensors))


class NormWeights:
    """The weight and the bias of a layer norm in the layout of the library."""

    def __init__(self, layer: nn.LayerNorm):
        self.weight, self.bias = (spread(each.detach().float()) for each in (layer.weight, layer.bias))
        self.width, self.epsilon = len(layer.bias), layer.eps

    def native(self) -> Norm:
        """The weights as the library reads them; valid as long as this object."""
        return Norm(address(self.weight), address(self.bias))


class TorchMatrix:
    """What `Matrix` is where there is no library: float32, for oneDNN. The arguments are the same."""

    def __init__(self, weights: list[Tensor], biases: Sequence[Tensor | None], dtype, factors=None, heads=(1, 1)):
        self.dtype = dtype
        self.weight = torch.cat(weights).float()
        self.bias = None if biases[0] is None else torch.cat([*biases]).float()  # type: ignore[list-item]
        self.height, self.width = self.weight.shape

    def __deepcopy__(self, memo):
        return self

    def multiply(self, x: Tensor) -> Tensor:
        """x Wᵀ + b, `(…, in)` → `(…, out)`, in float32. At least four rows are computed, because oneDNN adds up more
        than 1,024 products in blocks, which are others for a single row; and few numbers of rows, because it keeps
        about 0.5 MiB for each."""
        rows = x.reshape(-1, self.width).float()
        step = max(4, 2 ** (len(rows).bit_length() - 4))
        padded = nn.functional.pad(rows, (0, 0, 0, -len(rows) % step))
        y = torch.ops.mkldnn._linear_pointwise(padded, self.weight, self.bias, "none", [], "")
        return y[: len(rows)].view(*x.shape[:-1], self.height)


def quantized(weight: Tensor, factors: Tensor | None) -> tuple[Tensor, Tensor]:
    """The int8 values of a weight, and the scale of each row. A few rows at a time: a float copy of a whole weight
    would raise the peak of memory."""
    values, scales = torch.empty(weight.shape, dtype=torch.int8), torch.empty(len(weight))
    for rows, to, scale in zip(weight.split(1024), values.split(1024), scales.split(1024), strict=True):
        part = rows.float() if factors is None else rows.float() * factors
        scale.copy_(part.abs().amax(dim=1).clamp(min=torch.finfo(torch.float32).tiny) / 127)
        to.copy_((part / scale[:, None]).round())
    return values, scales
