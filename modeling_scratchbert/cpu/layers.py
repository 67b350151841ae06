"""Modules with prepacked weights, and the layers outside of the stack of blocks: in the embeddings, the pooler and the
model heads."""

import uuid
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..inference import refusal
from .library import TYPES, NativeLayer, address, call, spread
from .matrices import Matrix, NormWeights, TorchMatrix

# `torch.compile` does not accept the modules below, so its operator looks them up by a key.
BY_KEY: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()


class PrepackedModule(nn.Module):
    """A module with prepacked weights, which are neither parameters nor buffers.

    Args:
        dtype: of its inputs and results.

    Attributes:
        compute: a method that writes results, from tensors, some of them None, and numbers.
    """

    is_prepacked = True  # by which the code in a saved model recognises this class
    compute: Callable

    def __init__(self, dtype: torch.dtype):
        super().__init__()
        self.dtype, self.training = dtype, False
        self.register()

    def register(self) -> None:
        """Give the module a key in `BY_KEY`."""
        self.key = uuid.uuid4().hex
        BY_KEY[self.key] = self

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.register()

    def _apply(self, fn, recurse: bool = True):
        after = fn(torch.empty(0, dtype=self.dtype, device="cpu"))
        if after.dtype != self.dtype or after.device.type != "cpu":
            raise refusal(f"a conversion to {after.dtype} on {after.device}")
        return super()._apply(fn, recurse)

    def _save_to_state_dict(self, *args, **kwargs):
        raise refusal("state_dict() or load_state_dict()")

    _load_from_state_dict = _save_to_state_dict

    def run(self, results: list[Tensor], tensors: Sequence[Tensor | None], numbers: Sequence[int] = ()) -> None:
        """`compute`, also while `torch.compile` traces the call. Raises RuntimeError for gradients and export."""
        has_gradients = any(each is not None and each.requires_grad for each in [*results, *tensors])
        if (has_gradients and torch.is_grad_enabled()) or torch.autograd.forward_ad._current_level >= 0:
            raise refusal("computing gradients", "Call the model under torch.no_grad()")
        if torch.jit.is_tracing() or getattr(torch.compiler, "is_exporting", bool)():  # not in torch 2.6
            raise refusal("export")
        if torch.compiler.is_compiling():
            torch.ops.scratchbert_cpu.compute(self.key, results, tensors, numbers)
        else:
            self.compute(results, tensors, numbers)


torch.library.custom_op(
    "scratchbert_cpu::compute",
    lambda key, results, tensors, numbers: BY_KEY[key].compute(results, tensors, numbers),
    mutates_args=("results",),
    schema="(str key, Tensor(a!)[] results, Tensor?[] tensors, int[] numbers) -> ()",
).register_fake(lambda *_: None)


class PrepackedLayer(PrepackedModule):
    """One layer: linear, `(…, in)` → `(…, out)`, a layer norm, or an activation.

    Args:
        dtype: of its inputs and results.
        matrix: of a linear layer.
        norm: of a layer norm.
        activation: the number of an activation.
    """

    def __init__(
        self,
        dtype: torch.dtype,
        matrix: Matrix | TorchMatrix | None = None,
        norm: NormWeights | None = None,
        activation: int = 0,
    ):
        super().__init__(dtype)
        self.matrix, self.norm, self.activation = matrix, norm, activation

    def forward(self, x: Tensor) -> Tensor:
        weights = self.matrix or self.norm
        if weights is not None and x.shape[-1] != weights.width:
            raise RuntimeError(f"The input of a layer has shape {tuple(x.shape)}; expected (…, {weights.width}).")
        y = x.new_empty(x.shape if self.matrix is None else (*x.shape[:-1], self.matrix.height), dtype=torch.float32)
        self.run([y], [x])
        return y.to(self.dtype)

    def compute(self, results: list[Tensor], tensors: list[Tensor], numbers: Sequence[int]) -> None:
        """Write the result to the only tensor of `results`."""
        (y,), (x,) = results, tensors
        if isinstance(self.matrix, TorchMatrix):
            y.copy_(self.matrix.multiply(x))
            return
        rows = spread(x.float().reshape(-1, x.shape[-1])).contiguous()
        sizes = rows.shape[1], y.shape[-1], torch.get_num_threads(), len(rows)
        layer = NativeLayer(0, self.activation, *sizes, address(rows), address(y))  # what is not given is 0
        if self.matrix is not None:
            layer.type = TYPES[self.matrix.dtype]
            layer.linear = self.matrix.native()
        if self.norm is not None:
            layer.norm = self.norm.native()
            layer.epsilon = self.norm.epsilon
        call("layer", layer)

    def __getattr__(self, name: str) -> Any:
        if name in ("weight", "bias"):
            raise AttributeError(refusal(f"reading the {name} of a layer"))
        return super().__getattr__(name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ("weight", "bias"):
            raise AttributeError(refusal(f"assigning the {name} of a layer"))
        super().__setattr__(name, value)

    def extra_repr(self) -> str:
        return (
            ""
            if self.matrix is None
            else f"in_features={self.matrix.width}, out_features={self.matrix.height}, prepacked={self.matrix.dtype}"
        )
