"""Layers outside of the stack of blocks: in the embeddings, the pooler and the model heads."""

import ctypes
from typing import Any

import torch
from torch import Tensor, nn

from ..inference import refusal
from .library import ACTIVATIONS, Norm, address, call, spread
from .matrices import Matrix, TorchMatrix, is_compiling, multiply


class PrepackedModule(nn.Module):
    """A module with prepacked weights, which are neither parameters nor buffers.

    Args:
        dtype: of its inputs and results.
    """

    is_prepacked = True  # by which the code in a saved model recognises this class

    def __init__(self, dtype: torch.dtype):
        super().__init__()
        self.dtype, self.training = dtype, False

    def _apply(self, fn, recurse: bool = True):
        after = fn(torch.empty(0, dtype=self.dtype))
        if after.dtype != self.dtype or after.device.type != "cpu":
            raise refusal(f"a conversion to {after.dtype} on {after.device}")
        return super()._apply(fn, recurse)

    def _save_to_state_dict(self, *args, **kwargs):
        raise refusal("state_dict() or load_state_dict()")

    _load_from_state_dict = _save_to_state_dict


class PrepackedLinear(PrepackedModule):
    """x Wᵀ + b, `(…, in)` → `(…, out)`."""

    def __init__(self, matrix: Matrix | TorchMatrix, dtype: torch.dtype):
        super().__init__(dtype)
        self.matrix, self.in_features, self.out_features = matrix, matrix.width, matrix.height

    def forward(self, x: Tensor) -> Tensor:
        return multiply(x, self.matrix).to(self.dtype)

    def __getattr__(self, name: str) -> Any:
        if name in ("weight", "bias"):
            raise AttributeError(refusal(f"reading the {name} of a layer"))
        return super().__getattr__(name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ("weight", "bias"):
            raise AttributeError(refusal(f"assigning the {name} of a layer"))
        super().__setattr__(name, value)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, prepacked={self.matrix.dtype}"


class NativeNorm(nn.LayerNorm):
    """A layer norm that the library computes, with the same bits on any processor."""

    def __init__(self, norm: nn.LayerNorm):
        super().__init__(norm.normalized_shape, norm.eps, elementwise_affine=False)
        self.weight, self.bias = norm.weight, norm.bias

    def forward(self, x: Tensor) -> Tensor:
        return map_rows(x, self.weight, self.bias, self.eps, 0)


class NativeActivation(nn.Module):
    """An activation that the library computes, with the same bits in any batch."""

    def __init__(self, activation: nn.Module):
        super().__init__()
        self.form = ACTIVATIONS[type(activation)]

    def forward(self, x: Tensor) -> Tensor:
        return map_rows(x, None, None, 0.0, self.form)


def map_rows(x: Tensor, weight: Tensor | None, bias: Tensor | None, epsilon: float, activation: int) -> Tensor:
    """The layer norm of the rows of `x`, or an activation, in the dtype of `x`."""
    function = torch.ops.scratchbert_cpu.map_rows if is_compiling(x) else compute_map
    return function(x, weight, bias, epsilon, activation)


def compute_map(x: Tensor, weight: Tensor | None, bias: Tensor | None, epsilon: float, activation: int) -> Tensor:
    rows = spread(x.float().reshape(-1, x.shape[-1])).clone(memory_format=torch.contiguous_format)
    tensors = [None if each is None else spread(each.detach().float()) for each in (weight, bias)]
    norm = Norm(*map(address, tensors))
    arguments = len(rows), x.shape[-1], rows.shape[1], torch.get_num_threads()
    call("map", None if weight is None else ctypes.byref(norm), epsilon, activation, rows.data_ptr(), *arguments)
    return rows[:, : x.shape[-1]].reshape(x.shape).to(x.dtype)


torch.library.custom_op(
    "scratchbert_cpu::map_rows",
    compute_map,
    mutates_args=(),
    schema="(Tensor x, Tensor? weight, Tensor? bias, float epsilon, int activation) -> Tensor",
).register_fake(lambda x, *_: torch.empty_like(x))
