"""The files of a checkpoint of any kind: which ones hold the weights, the names of the tensors in them, and why they
cannot be read."""

import os
from typing import Any

import torch
from huggingface_hub.errors import HTTPError, LocalEntryNotFoundError
from transformers.modeling_utils import load_state_dict
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, WEIGHTS_INDEX_NAME, WEIGHTS_NAME, cached_file
from transformers.utils.hub import get_checkpoint_shard_files

from ..checkpoints import HUB_OPTIONS

# In the order in which `from_pretrained` looks for them.
WEIGHT_FILES = (SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME, WEIGHTS_NAME, WEIGHTS_INDEX_NAME)


class UnreachableHubError(OSError):
    """A file is not in the cache, and the Hub cannot be reached."""


def explain(error: Exception, source, options: dict) -> None:
    """Raise an error with advice in place of `error`, which loading `source` raised, if its cause is known: the Hub
    cannot be reached, or a file of weights is damaged."""
    check_is_reachable(error, source, options.get("revision"))
    has_weights = source is not None and options.get("gguf_file") is None
    if has_weights and type(error) not in (UnreachableHubError, ValueError, ImportError):
        located = {name: options[name] for name in HUB_OPTIONS if name in options}
        tensor_names(source, options.get("variant"), options.get("use_safetensors"), **located)


def check_is_reachable(error: Exception, source, revision: str | None) -> None:
    """Raise UnreachableHubError if that is what `error` means."""
    # A proxy raises an HTTPError that is no OSError.
    is_local = isinstance(error, OSError) and not isinstance(error.__cause__, LocalEntryNotFoundError)
    if is_local or not isinstance(error, OSError | HTTPError):
        return
    requested = getattr(revision, "initial", revision)  # before `hub_options` resolved it
    command = f"hf download {source}" + (f" --revision {requested}" if requested else "")
    raise UnreachableHubError(
        f"{source} is neither a folder nor completely in the cache, and the Hub cannot be "
        f"reached; expected one of the three. Run `{command}` where there is a network: it then "
        "opens from the cache, at once with HF_HUB_OFFLINE=1."
    ) from error


def tensor_names(source, variant=None, use_safetensors=None, **hub_options) -> set[str] | None:
    """Return the names of the tensors in the files of `weight_files`, none of which is loaded; None if there are no
    files. Raise OSError if a file is truncated, corrupt, missing or not a file of weights."""
    files = weight_files(source, variant, use_safetensors, **hub_options)
    return None if files is None else set().union(*(read_tensors(file, device="meta") for file in files))


def weight_files(source, variant=None, use_safetensors=None, **hub_options) -> list[str] | None:
    """Return the local paths of the files that `from_pretrained` reads the weights of `source`, a folder, a hub id or a
    file of weights, from; None if there are none. Raise OSError if one is missing or the Hub cannot be reached."""
    if os.path.isfile(source):
        return [source]
    suffix = f".{variant}." if variant else "."
    names = [name for name in WEIGHT_FILES if use_safetensors in (None, "safetensors" in name)]
    errors = []
    for name in names:
        try:
            path: Any = cached_file(source, suffix.join(name.rsplit(".", 1)), **hub_options)
        except OSError as reason:
            errors.append(reason)
        else:
            return _shards(source, path, hub_options)
    for error in filter(lambda error: error.__cause__, errors):  # without a cause, there is no such file
        check_is_reachable(error, source, hub_options.get("revision"))
        raise error
    return None


def _shards(source, index: str, hub_options: dict) -> list[str]:
    """Return the files that an index names; or the file itself, if it is one of weights."""
    if not index.endswith(".json"):
        return [index]
    try:
        return get_checkpoint_shard_files(source, index, **hub_options)[0]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise OSError(
            f"{index} is not the index of a sharded checkpoint; expected JSON with 'metadata' and "
            f"'weight_map': {error!r}. Download or save it again."
        ) from error


def read_tensors(path, device: str = "cpu") -> dict[str, torch.Tensor]:
    """Return the tensors of a file of weights by name; on the device "meta", none is loaded. Raise OSError if it is
    truncated, corrupt, missing or not a file of weights."""
    try:
        tensors = load_state_dict(path, map_location=device)
        if not isinstance(tensors, dict) or not all(isinstance(name, str) for name in tensors):
            raise ValueError("it does not hold tensors by name")
        return tensors
    except Exception as error:  # a corrupt pickle can raise any exception
        size = f" ({os.path.getsize(path):,} bytes)" if os.path.exists(path) else ""
        raise OSError(
            f"{path}{size} is truncated, corrupt or not a file of weights; expected a safetensors file or a "
            f"PyTorch state dict: {error}. Download or save it again."
        ) from error
