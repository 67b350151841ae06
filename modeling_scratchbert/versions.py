"""What differs between the minor versions of transformers 5: the only file that depends on them.

Both files that a loader opens first, the configuration and the models, import it first, so that an older version gets
one line instead of an error about a name that it does not have.
"""

import inspect
from collections.abc import Callable
from typing import Any

import torch
import transformers
from packaging.version import Version
from torch import Tensor
from transformers import modeling_outputs
from transformers.utils import hub

if Version(transformers.__version__) < Version("5.5"):
    raise ImportError(
        f"transformers is {transformers.__version__}; ScratchBert expects 5.5 or newer. Upgrade it with `pip install "
        "--upgrade transformers`, or ask for a copy of the model that was saved with save_as_bert()."
    )

# The name of a cache of keys and values in `forward`, `generate` and outputs: "cache" since 5.24.
CACHE = "cache" if hasattr(modeling_outputs.CausalLMOutputWithCrossAttentions, "cache") else "past_key_values"


def names_cache(forward: Callable) -> Callable:
    """Decorate a `forward` with a parameter `past_key_values`, whose signature then has the installed version's name.
    It is called with either: `take_cache` finds the one that is not a parameter."""
    signature = inspect.signature(forward)
    parameters = signature.parameters.values()
    named = [each.replace(name=CACHE) if each.name == "past_key_values" else each for each in parameters]
    vars(forward)["__signature__"] = signature.replace(parameters=named)
    return forward


def take_cache(past_key_values: Any, options: dict[str, Any]) -> Any:
    """Return the cache that a call was given, under either name, and remove it from its options. `generate_batch`
    passes a paged cache as `cache`, which attention functions read; it stays there.

    Raises:
        ValueError: it was given under both names.
    """
    if type(options.get("cache")).__name__ == "PagedAttentionCache":
        return past_key_values
    cache = options.pop("cache", None)
    if cache is not None and past_key_values is not None:
        raise ValueError("cache and past_key_values: both were given; expected one of them, which mean the same.")
    return past_key_values if cache is None else cache


def resolved_revision(source, options: dict[str, Any]) -> str | None:
    """Return the commit of a revision on the Hub, since 5.21; before it, the revision, which each file resolves."""
    resolve = getattr(hub, "resolve_revision", None)
    return options.get("revision") if resolve is None else resolve(source, **options)


def last_positions(hidden_states: Tensor, logits_to_keep: int | Tensor) -> Tensor:
    """Return the hidden states, `(B, T, C)`, whose logits `generate` reads: the last ones, or all for 0; or those at
    positions, `(K,)` or `(B, K)`; or, flattened, those where a mask `(B, T)` is True."""
    if isinstance(logits_to_keep, int):
        return hidden_states[:, -logits_to_keep:]
    if logits_to_keep.ndim == 1:
        return hidden_states[:, logits_to_keep]
    if logits_to_keep.dtype == torch.bool:
        return hidden_states[logits_to_keep]
    return torch.take_along_dim(hidden_states, logits_to_keep[..., None], dim=1)
