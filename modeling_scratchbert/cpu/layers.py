"""The modules and functions that `optimize_for_inference` puts in place of others."""

from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import _has_any_global_hook

from ..inference import refusal
from .matrices import PackedMatrix, page_out

HOOK_REGISTRIES = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class PrepackedLinear(nn.Module):
    """x Wᵀ + b with a prepacked weight. Weight and bias are in a `PackedMatrix`, which never changes.

    Args:
        layer: the layer to replace. Its hooks are taken over, in the same dictionaries, so that their handles remain
            valid; and its other attributes, apart from parameters, buffers and submodules.
        matrix: a matrix with its weight and bias, and perhaps others.
        part: which of the weights in `matrix`.
        optimized_for: the arguments of `optimize_for_inference`: a dtype or "int8", and `batch_invariant`.
    """

    is_prepacked = True  # by which the code in a saved model recognises this class

    def __init__(self, layer: nn.Linear, matrix: PackedMatrix, part: int, optimized_for: tuple[Any, bool]):
        super().__init__()
        own = ("_parameters", "_buffers", "_modules")
        vars(self).update({name: value for name, value in vars(layer).items() if name not in own})
        self.matrix, self.part, self.optimized_for = matrix, part, optimized_for
        start = sum(matrix.heights[:part])
        self.rows = slice(start, start + self.out_features) if len(matrix.heights) > 1 else None
        page_out(layer.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`(…, in)` → `(…, out)`, in the weight's dtype. Raises RuntimeError for gradients and export."""
        y = self.matrix.linear(x)
        return y if self.rows is None else y[..., self.rows]

    def __getattr__(self, name: str) -> Any:
        if name in ("weight", "bias"):
            raise AttributeError(refusal(f"reading the {name} of a layer"))
        return super().__getattr__(name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ("weight", "bias"):
            raise AttributeError(refusal(f"assigning the {name} of a layer"))
        super().__setattr__(name, value)

    def _apply(self, fn, recurse: bool = True):
        after = fn(torch.empty(0, dtype=self.matrix.dtype))
        if after.dtype != self.matrix.dtype or after.device.type != "cpu":
            raise refusal(f"a conversion to {after.dtype} on {after.device}")
        return super()._apply(fn, recurse)

    def _save_to_state_dict(self, *args, **kwargs):
        raise refusal("state_dict() or load_state_dict()")

    _load_from_state_dict = _save_to_state_dict

    def extra_repr(self) -> str:
        kind = "int8" if self.matrix.is_int8 else self.matrix.dtype
        return f"in_features={self.in_features}, out_features={self.out_features}, prepacked={kind}"


class FusedMethod:
    """A method of a module in which some of its children are computed by one product, as long as nothing replaces or
    hooks these; otherwise they are called, as in the method of the class. It is an attribute of the instance, which
    hides that method.

    Args:
        parent: the module.
        names: the children of it that need not be called, of which the first has the matrix.
        gelu_form: of the activation among them; see `PackedMatrix.linear`.
    """

    hidden: str  # the name of the method

    def __init__(self, parent: Any, names: tuple[str, ...], gelu_form: str | None = None):
        # Not the parent itself: memory of a cycle is not freed until the garbage collector runs.
        self.modules, self.owner, self.names = parent._modules, type(parent), names
        self.method: Any = getattr(self.owner, self.hidden)
        self.children = list(map(self.modules.get, names))
        self.calls = [(*called_by(child)[:-1], False) for child in self.children]
        self.matrix, self.gelu_form = self.modules[names[0]].matrix, gelu_form

    def applies(self) -> bool:
        if getattr(self.owner, self.hidden) is not self.method:
            raise refusal(f"replacing {self.owner.__name__}.{self.hidden}")
        if list(map(self.modules.get, self.names)) != self.children or _has_any_global_hook():
            return False
        return list(map(called_by, self.children)) == self.calls


def called_by(module: Any) -> tuple:
    """What a call of the module runs: `forward`, of its class and of its own; the function `act` of an activation; and
    whether it has hooks."""
    own = module.__dict__
    return type(module).forward, own.get("forward"), own.get("act"), any(map(own.get, HOOK_REGISTRIES))


class JointProjection(FusedMethod):
    """`MultiHeadAttention.project`, with one product for queries, keys and values."""

    hidden = "project"

    def __call__(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, ...]:
        if self.applies():
            return self.matrix.linear(hidden_states).split(self.matrix.heights, dim=-1)
        return tuple([self.modules[name](hidden_states) for name in self.names])


class FusedFeedForward(FusedMethod):
    """`FeedForward.formula`, with GELU computed at the end of the first product; and of an int8 model, with as many
    tokens at a time as fit into the processor's cache."""

    hidden = "formula"

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        modules, width = self.modules, x.shape[-1]
        if not self.applies():
            return modules["output"](modules["activation"](modules["intermediate"](x)))
        if x.numel() <= self.matrix.max_rows * width or torch.compiler.is_compiling():
            return modules["output"](self.matrix.linear(x, self.gelu_form))
        parts = x.reshape(-1, width).split(self.matrix.max_rows)
        return torch.cat([self(part) for part in parts]).view(*x.shape[:-1], -1)


class InferenceDropout(nn.Dropout):
    """Dropout that returns its input directly, unless it is in training mode, as for Monte Carlo dropout. Between
    products of a few rows, the calls that this leaves out take 2 % of the time."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) if self.training else x
