"""Checks that a stack of blocks is what `OptimizedStack` computes: anything else would have no effect afterwards."""

import torch
from torch import nn

from ..transformer import TransformerStack

HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
# Attributes that `OptimizedStack` takes from the configuration.
FIELDS = ("norm_first", "is_causal", "scaling", "head_width", "layer_idx", "eps")


def is_base_model(module: nn.Module) -> bool:
    """Whether this is a `ScratchBertModel`. By name, because the class may be of a copy of the code."""
    return any(cls.__name__ == "ScratchBertModel" for cls in type(module).__mro__)


def check_stack(path: str, stack: nn.Module, config) -> None:
    """Compare a stack with one that is made of the configuration.

    Raises:
        RuntimeError: a module is missing, added or replaced, or is not as it was made; with its path.
    """
    with torch.device("meta"):
        expected = {_join(path, name): module for name, module in TransformerStack(config).named_modules()}
    # A module that is used twice has two names.
    found = {_join(path, name): module for name, module in stack.named_modules(remove_duplicate=False)}
    for name in [*found, *expected]:
        if name not in expected:
            raise changed(name, f"is a {type(found[name]).__name__} that was added")
        if name not in found:
            raise changed(name, "is missing")
        _check_module(name, found[name], expected[name])
    dtypes = {str(parameter.dtype) for parameter in stack.parameters()}
    if len(dtypes) > 1:
        raise changed(path, f"has weights of {' and '.join(sorted(dtypes))}")


def _join(path: str, name: str) -> str:
    return f"{path}.{name}".removesuffix(".")


def _check_module(name: str, module: nn.Module, expected: nn.Module) -> None:
    if _origin(type(module)) != _origin(type(expected)):
        raise changed(name, f"is a {type(module).__name__} of {type(module).__module__}")
    check_unchanged(name, module)
    found, own = _describe(module), _describe(expected)
    for field in found.keys() | own.keys():
        if found.get(field) != own.get(field):
            raise changed(name, f"has {field}={found.get(field)}")


def _describe(module: nn.Module) -> dict:
    """The shapes of the parameters of a module, and what else `OptimizedStack` takes from the configuration."""
    shapes = {key: None if weight is None else tuple(weight.shape) for key, weight in module._parameters.items()}
    return shapes | {field: getattr(module, field) for field in FIELDS if hasattr(module, field)}


def check_unchanged(name: str, module: nn.Module) -> None:
    """Raise RuntimeError if a module has hooks, methods, buffers or parameters that its class did not give it."""
    for registry in HOOKS:
        _check_hooks(name, getattr(module, registry))
    for attribute in vars(module):
        if callable(getattr(type(module), attribute, None)):
            raise changed(name, f"has a {attribute} of its own")
    for attribute, tensor in (module._parameters | module._buffers).items():
        if tensor is not None and type(tensor) is not nn.Parameter:
            raise changed(name, f"has {attribute}, a {type(tensor).__name__}")


def _check_hooks(name: str, hooks: dict) -> None:
    for hook in hooks.values():
        if getattr(hook, "__module__", "") != "transformers.utils.output_capturing":  # which records outputs
            raise changed(name, f"has the hook {getattr(hook, '__qualname__', hook)}")


def changed(name: str, fact: str) -> RuntimeError:
    expected = "optimize_for_inference() expects the module that the package makes, because it has no effect afterwards"
    return RuntimeError(f"{name} {fact}; {expected}. Remove the change, or use the model without that call.")


def _origin(cls: type) -> tuple[str, str]:
    """What identifies a class: its module and name; of ours those in the package, whose copies are equal."""
    package, _, module = cls.__module__.rpartition(".")
    is_own = module in ("transformer", "attention", "feed_forward") and not package.startswith(
        ("torch.", "transformers.")
    )
    return (module if is_own else cls.__module__), cls.__qualname__
