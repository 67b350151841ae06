"""Faster inference on a CPU: `optimize_for_inference`, and the errors for what a model no longer supports after it.

The work is done by the subpackage `cpu`, which is installed and not copied into saved models.
"""

import os
from collections.abc import Iterable, Mapping
from typing import Literal, Self

import torch
from torch import nn
from transformers import PreTrainedModel

from .installed import installed


def is_prepacked(module: nn.Module) -> bool:
    """Return whether this is a module with prepacked weights, whose class declares `is_prepacked = True`."""
    return getattr(type(module), "is_prepacked", False)


def refusal(operation: str, instead="Do this before optimize_for_inference(), or load the model again") -> RuntimeError:
    """Return the error for what an optimised model does not support."""
    return RuntimeError(f"The model is optimised for inference; {operation} expects one that is not. {instead}.")


class InferenceMixin(PreTrainedModel):
    """Adds `optimize_for_inference`, and raises an error for what a model no longer supports after it."""

    def optimize_for_inference(
        self,
        dtype: torch.dtype | Literal["int8"] | None = None,
        calibration: Iterable[Mapping] | str | os.PathLike | None = None,
    ) -> Self:
        """Make the model faster on a CPU, for inference only. In place. Requires the installed package.

        Replaces the stack of blocks by one module without submodules, which holds prepacked weights, and the linear
        layers of the pooler and of the model heads by prepacked ones. An encoder removes the padding. The results are
        those of the model as loaded, up to rounding. Autocast does not change their dtype.

        After this call, the model runs `forward`, `generate` and `torch.compile`, and can be copied and pickled.
        Saving, `state_dict`, loading weights, training, gradients, export, resizing and another dtype or device raise a
        RuntimeError. So do attention weights, a full mask, and attention implementations other than "sdpa" and "eager",
        which are computed alike. Prepacked weights and biases are not in `parameters()`, cannot be read, and raise an
        error if they are assigned.

        The blocks must be as the package makes them: with a hook, a replaced module or method, or a weight of another
        class, the call raises an error, because the change would have no effect. A model in another dtype than float32
        and bfloat16, or on another device than a CPU, stays an ordinary one, with a warning.

        A library in C++ computes the blocks, if `pip install` could build it; otherwise torch does. `print(model)`
        shows which. docs/inference.md has the conditions.

        With "int8", weights and the inputs of linear layers are rounded to 8 bits, each row with its own scale; the
        numbers between layers are float32, and layers of model heads with fewer than 32 outputs keep the model's dtype.
        It requires the library in C++; without it a warning says so, and the dtype stays the model's own.

        A text has the same bits in any batch: in any order, batch size, amount of right padding, number of threads and
        process, and after any earlier calls. With the library, in float32 and int8, it has the same bits on other
        processors and in other versions of torch, too. This holds for the last hidden states at non-padding tokens, the
        pooled output and the logits of encoders and decoders, and for what `generate` returns. docs/determinism.md has
        the exceptions.

        Args:
            dtype: torch.float32, torch.bfloat16, "int8", or None for the model's own.
            calibration: for int8, a few batches of typical inputs, each a mapping of the model's arguments; or the file
                that `save_calibration` wrote. Channels with large values in them are scaled down before rounding (Xiao
                et al. 2023, SmoothQuant). None for batches of random token ids.

        Returns:
            The model, in evaluation mode.

        Raises:
            RuntimeError: the model, or a part of it, is optimised already, quantised or offloaded, or has adapters or
                changed modules.
            TypeError, ValueError, OSError: `dtype` or `calibration` is invalid, or its file cannot be read.
            ImportError: the package is not installed.
        """
        installed("cpu.optimization").optimize(self, dtype, calibration)
        return self

    def save_calibration(self, path: str | os.PathLike) -> None:
        """Write a small file that `optimize_for_inference("int8", calibration=path)` accepts instead of batches, for
        the same model with any model head.

        Raises:
            RuntimeError: the model is not optimised for int8.
        """
        installed("cpu.calibration").save_calibration(self, path)

    def _refuse_if_optimized(self, operation: str, *instead: str) -> None:
        """Raise RuntimeError if a module of the model has prepacked weights."""
        if any(map(is_prepacked, self.modules())):
            raise refusal(operation, *instead)

    def train(self, mode: bool = True) -> Self:
        if mode:
            self._refuse_if_optimized("training")
        return super().train(mode)

    def load_state_dict(self, *args, **kwargs):
        self._refuse_if_optimized("load_state_dict()")
        return super().load_state_dict(*args, **kwargs)

    def push_to_hub(self, *args, **kwargs):
        self._refuse_if_optimized("push_to_hub()")
        return super().push_to_hub(*args, **kwargs)

    def resize_token_embeddings(self, *args, **kwargs) -> nn.Embedding:
        self._refuse_if_optimized("resize_token_embeddings()")
        return super().resize_token_embeddings(*args, **kwargs)

    def _apply(self, fn, recurse: bool = True):
        for module in filter(is_prepacked, self.modules()):
            module._apply(fn)  # raises, before anything is converted, if `fn` changes the dtype or the device
        return super()._apply(fn, recurse)
