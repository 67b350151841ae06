"""Checks that a stack of blocks is what `OptimizedStack` computes: anything else would have no effect afterwards."""

from typing import Any

import torch
from torch import nn

from ..transformer import TransformerStack

HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
# What `OptimizedStack` takes from the configuration instead.
FIELDS = ("norm_first", "is_causal", "scaling", "head_width", "layer_idx", "eps")
# The files of our blocks, in the package or in a copy of the code.
FILES = ("transformer", "attention", "feed_forward")


def base_models(model) -> dict[str, Any]:
    """The models without a head in this one, by the beginnings of the paths of their modules. They are found by the
    name of the class, which may be of a copy of the code."""
    return {
        f"{path}.".removeprefix("."): module
        for path, module in model.named_modules()
        if any(cls.__name__ == "ScratchBertModel" for cls in type(module).__mro__)
    }


def check_stack(path: str, stack: nn.Module, config) -> None:
    """Compare a stack with one that is made of the configuration.

    Raises:
        RuntimeError: a module is missing, added or replaced, or is not as it was made; with its path.
    """
    with torch.device("meta"):
        expected = dict(TransformerStack(config).named_modules())
    # A module that is used twice has two names.
    found = dict(stack.named_modules(remove_duplicate=False))
    for name in [*found, *expected]:
        full_name = f"{path}.{name}".removesuffix(".")
        description = _describe(found.get(name))
        if description != _describe(expected.get(name)):
            raise changed(full_name, f"is {description}")
        check_unchanged(full_name, found[name])
    dtypes = {str(parameter.dtype) for parameter in stack.parameters()}
    if len(dtypes) > 1:
        raise changed(path, f"has weights of {' and '.join(sorted(dtypes))}")


def _describe(module: nn.Module | None) -> str:
    """The class of a module, of ours without the package, whose copies are equal; the shapes of its parameters, and its
    `FIELDS`."""
    if module is None:
        return "missing"
    package, _, file = type(module).__module__.rpartition(".")
    is_own = file in FILES and not package.startswith(("torch.", "transformers."))
    shapes = {key: None if weight is None else tuple(weight.shape) for key, weight in module._parameters.items()}
    fields = {field: getattr(module, field) for field in FIELDS if hasattr(module, field)}
    return f"{type(module).__qualname__} of {file if is_own else type(module).__module__} with {shapes | fields}"


def check_unchanged(name: str, module: nn.Module) -> None:
    """Raise RuntimeError if a module has hooks, methods, buffers or parameters that its class did not give it."""
    hooks = [hook for registry in HOOKS for hook in getattr(module, registry).values()]
    # That module records outputs.
    others = [hook for hook in hooks if getattr(hook, "__module__", "") != "transformers.utils.output_capturing"]
    methods = [attribute for attribute in vars(module) if callable(getattr(type(module), attribute, None))]
    tensors = [tensor for tensor in (module._parameters | module._buffers).values() if tensor is not None]
    classes = {type(tensor).__name__ for tensor in tensors if type(tensor) is not nn.Parameter}
    if others or methods or classes:
        raise changed(name, f"has {[*others, *methods, *classes]} of its own")


def changed(name: str, fact: str) -> RuntimeError:
    expected = (
        "optimize_for_inference() expects the module that the package makes, because a change has no effect afterwards"
    )
    return RuntimeError(
        f"{name} {fact}; {expected}. Remove the change (an adapter with merge_and_unload()), or use the "
        "model without that call."
    )
