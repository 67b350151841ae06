"""The files of a checkpoint: where they are, which tensors they hold, and how a folder of them is written."""

import os
import re
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from huggingface_hub.errors import HTTPError, LocalEntryNotFoundError
from transformers import PreTrainedConfig
from transformers.utils import cached_file
from transformers.utils.hub import get_checkpoint_shard_files, resolve_revision

# In the order in which `from_pretrained` looks for them.
WEIGHT_FILES = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)

# The arguments of `from_pretrained` that locate a file on the Hub or in the cache; the first four locate a revision.
HUB_OPTIONS = ("cache_dir", "local_files_only", "revision", "token", "force_download", "proxies", "subfolder")


def hub_options(source, kwargs: dict) -> dict:
    """Return those of `kwargs` that locate the files of `source`. `revision` becomes a commit, so that all files are of
    the same one and the Hub is asked for it once."""
    options = {name: kwargs[name] for name in HUB_OPTIONS if kwargs.get(name) is not None}
    revision = resolve_revision(source, **{name: options[name] for name in HUB_OPTIONS[:4] if name in options})
    return options if revision is None else options | {"revision": revision}


class UnreachableHubError(OSError):
    """A file is not in the cache, and the Hub cannot be reached."""


@contextmanager
def explain_unreachable_hub(source, revision: str | None = None) -> Iterator[None]:
    """Replace the error of an unreachable Hub by one line with a remedy."""
    try:
        yield
    except (OSError, HTTPError) as error:  # a proxy raises an HTTPError that is no OSError
        if isinstance(error, OSError) and not isinstance(error.__cause__, LocalEntryNotFoundError):
            raise
        requested = getattr(revision, "initial", revision)  # before `hub_options` resolved it
        command = f"hf download {source}" + (f" --revision {requested}" if requested else "")
        raise UnreachableHubError(
            f"{source} is neither a folder nor completely in the cache, and the Hub cannot be reached; expected one of "
            f"the three. Run `{command}` where there is a network: it then opens from the cache, at once with "
            "HF_HUB_OFFLINE=1."
        ) from error


def raw_config(source, **kwargs) -> tuple[dict, dict]:
    """Return the fields of the `config.json` of `source` as they are, and those of `kwargs` that did not locate it.
    Raise OSError if there is none, or if it cannot be read."""
    try:
        with explain_unreachable_hub(source, kwargs.get("revision")):
            fields, kwargs = PreTrainedConfig.get_config_dict(source, **kwargs)
    except (AttributeError, TypeError):  # transformers expects an object, and finds a list, a number, …
        fields = None
    if not isinstance(fields, dict):
        raise OSError(f"{source}/config.json does not hold a JSON object; expected the fields of a configuration.")
    if not fields:
        raise OSError(f"{source} has no config.json; expected one beside the weights.")
    return fields, kwargs


def has_tokenizer(source, **hub_options) -> bool:
    """Return whether `source` has a tokenizer. AutoTokenizer does not show it: for a BERT without one it creates a
    tokenizer with a vocabulary of five words."""
    files = ("tokenizer.json", "vocab.txt")
    return any(cached_file(source, name, _raise_exceptions_for_missing_entries=False, **hub_options) for name in files)


def tensor_names(source, variant=None, use_safetensors=None, **hub_options) -> set[str] | None:
    """Return the names of the tensors in the files of `weight_files`, none of which is loaded; None if there are no
    files. Raise OSError if a file is truncated, corrupt, missing or not a file of weights."""
    files = weight_files(source, variant, use_safetensors, **hub_options)
    return None if files is None else set().union(*map(_names_in_file, files))


def weight_files(source, variant=None, use_safetensors=None, **hub_options) -> list[str] | None:
    """Return the local paths of the files that `from_pretrained` reads the weights of `source`, a folder, a hub id or a
    file of weights, from; None if there are none. Raise OSError if one is missing or the Hub cannot be reached."""
    if os.path.isfile(source):
        return [source]
    suffix = f".{variant}." if variant else "."
    error: OSError | None = None
    with explain_unreachable_hub(source, hub_options.get("revision")):
        for name in WEIGHT_FILES:
            if use_safetensors not in (None, "safetensors" in name):
                continue
            try:
                path: Any = cached_file(source, suffix.join(name.rsplit(".", 1)), **hub_options)
            except OSError as reason:
                error = error or (reason if reason.__cause__ else None)  # without a cause, there is no such file
            else:
                return _shards(source, path, hub_options) if name.endswith(".json") else [path]
        if error is not None:
            raise error
    return None


def _shards(source, index: str, hub_options: dict) -> list[str]:
    try:
        return get_checkpoint_shard_files(source, index, **hub_options)[0]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise OSError(
            f"{index} is not the index of a sharded checkpoint; expected JSON with 'metadata' and 'weight_map': "
            f"{error!r}. Download or save it again."
        ) from error


def _names_in_file(path) -> set[str]:
    from transformers.modeling_utils import load_state_dict  # not for AutoConfig, which imports this file as well

    try:
        tensors = load_state_dict(path, map_location="meta")
        if not isinstance(tensors, dict) or not all(isinstance(name, str) for name in tensors):
            raise ValueError("it does not hold tensors by name")
        return set(tensors)
    except Exception as error:  # a corrupt pickle can raise any exception
        size = f" ({os.path.getsize(path):,} bytes)" if os.path.exists(path) else ""
        raise OSError(
            f"{path}{size} is truncated, corrupt or not a file of weights; expected a safetensors file or a PyTorch "
            f"state dict: {error}. Download or save it again."
        ) from error


@contextmanager
def staged(folder) -> Iterator[Path]:
    """Yield a temporary folder whose files are moved into `folder` at the end of the `with` block.

    If the block raises, `folder` is left as it was. Files of weights that the new ones replace, such as a single file
    by shards, are removed, because the next load could read them; so is the probe of the old weights.
    """
    folder = Path(folder)
    if folder.exists() and not folder.is_dir():
        raise NotADirectoryError(f"{folder} is a file; expected a folder to save the model in.")
    folder.mkdir(parents=True, exist_ok=True)
    temporary = folder / f".saving-{uuid.uuid4().hex}"
    temporary.mkdir()
    try:
        yield temporary
        written = sorted(temporary.iterdir())
        for path in written:
            if path.is_file():  # safetensors creates files that only their owner can read
                path.chmod(temporary.stat().st_mode & 0o666)
            os.replace(path, folder / path.name)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    names = {path.name for path in written}
    families = {_family(name) for name in names} - {None}
    for path in folder.iterdir():
        if path.name not in names and _family(path.name) in families:
            path.unlink()


def _family(name: str) -> str | None:
    """Return what a file of weights, or their probe, has in common with those that it replaces: "model", or
    "model.fp16" if that is the variant."""
    if probe := re.fullmatch(r"probe(\..+)?\.json", name):
        return "model" + (probe[1] or "")
    weights = re.fullmatch(r"(.+?)(-\d{5}-of-\d{5})?\.safetensors(\.index(\..+)?\.json)?", name)
    return weights and weights[1] + (weights[4] or "")


def copy_code(folder) -> None:
    """Copy the files of this package into `folder`, except `__init__`, which the remote-code loader does not read."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    for path in Path(__file__).parent.glob("*.py"):
        if path.name != "__init__.py":
            shutil.copyfile(path, Path(folder) / path.name)
