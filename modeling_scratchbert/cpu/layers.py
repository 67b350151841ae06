"""A linear layer with a prepacked weight, and what all modules with prepacked weights refuse."""

from typing import Any

import torch
from torch import nn

from ..inference import refusal
from .matrices import PackedMatrix


class PrepackedModule(nn.Module):
    """A module with prepacked weights, which are neither parameters nor buffers.

    Args:
        dtype: of its inputs and results.
    """

    is_prepacked = True  # by which the code in a saved model recognises this class

    def __init__(self, dtype: torch.dtype):
        super().__init__()
        self.dtype, self.training = dtype, False

    def matrices(self) -> list[PackedMatrix]:
        """The weights; one that layers share is there more than once."""
        raise NotImplementedError

    def _apply(self, fn, recurse: bool = True):
        after = fn(torch.empty(0, dtype=self.dtype))
        if after.dtype != self.dtype or after.device.type != "cpu":
            raise refusal(f"a conversion to {after.dtype} on {after.device}")
        return super()._apply(fn, recurse)

    def _save_to_state_dict(self, *args, **kwargs):
        raise refusal("state_dict() or load_state_dict()")

    _load_from_state_dict = _save_to_state_dict


class PrepackedLinear(PrepackedModule):
    """x Wᵀ + b, `(…, in)` → `(…, out)`, outside of the stack of blocks: in the pooler and the model heads."""

    def __init__(self, matrix: PackedMatrix):
        super().__init__(matrix.dtype)
        self.matrix, self.in_features, self.out_features = matrix, matrix.width, sum(matrix.heights)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.matrix.linear(x)

    def matrices(self) -> list[PackedMatrix]:
        return [self.matrix]

    def __getattr__(self, name: str) -> Any:
        if name in ("weight", "bias"):
            raise AttributeError(refusal(f"reading the {name} of a layer"))
        return super().__getattr__(name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ("weight", "bias"):
            raise AttributeError(refusal(f"assigning the {name} of a layer"))
        super().__setattr__(name, value)

    def extra_repr(self) -> str:
        kind = "int8" if self.matrix.is_int8 else self.matrix.dtype
        return f"in_features={self.in_features}, out_features={self.out_features}, prepacked={kind}"
