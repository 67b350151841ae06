"""Files of checkpoints: which tensors they hold, and writing a folder so that what stood there is never half gone."""

import json
import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from transformers.modeling_utils import load_state_dict
from transformers.utils import cached_file

from .configuration_scratchbert import hub_in_one_line

# In the order in which `from_pretrained` looks for them.
WEIGHT_FILES = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)

# The arguments of `from_pretrained` that say where on the Hub, or in the cache, a file is.
HUB_OPTIONS = ("cache_dir", "force_download", "local_files_only", "proxies", "revision", "subfolder", "token")


def has_tokenizer(source, **hub_options) -> bool:
    """Whether a tokenizer lies beside the weights of `source`. AutoTokenizer makes up one of five words for a BERT
    without one, so it cannot be asked."""
    files = ("tokenizer.json", "vocab.txt")
    return any(cached_file(source, name, _raise_exceptions_for_missing_entries=False, **hub_options) for name in files)


def tensor_names(source, variant=None, use_safetensors=None, **hub_options) -> set[str] | None:
    """The names of the tensors in the checkpoint `source`: a folder, a hub id or a file of weights. None are read.

    Returns:
        The names, or None where `source` has no file of weights.

    Raises:
        OSError: a file is truncated, corrupt, missing or not a checkpoint; the message names it.
    """
    files = weight_files(source, variant, use_safetensors, **hub_options)
    return None if files is None else set().union(*map(_names_in_file, files))


def weight_files(source, variant=None, use_safetensors=None, **hub_options) -> list[str] | None:
    """The files on this machine that `from_pretrained` reads the weights of `source` from, or None where it has none.

    Raises:
        OSError: an index cannot be read, or a file that it lists is missing.
    """
    if os.path.isfile(source):
        return [source]
    for name in _weight_names(variant, use_safetensors):
        path = cached_file(source, name, _raise_exceptions_for_missing_entries=False, **hub_options)
        if path is None:
            continue
        if not name.endswith(".json"):
            return [path]
        # Where a shard is missing this raises, and does not return None, as its hint has it.
        return [cached_file(source, shard, **hub_options) for shard in _shards(path)]  # type: ignore[misc]
    return None


def check_reach(source, variant=None, use_safetensors=None, **hub_options) -> None:
    """Where `weight_files` found none: raises OSError, in one line, if the Hub could just not be asked for them."""
    with hub_in_one_line(source, hub_options.get("revision")):
        for name in _weight_names(variant, use_safetensors):
            try:
                cached_file(source, name, **hub_options)
            except OSError as error:
                if error.__cause__ is not None:  # else there is no such file
                    raise


def _weight_names(variant: str | None, use_safetensors: bool | None) -> list[str]:
    names = [name for name in WEIGHT_FILES if use_safetensors in (None, "safetensors" in name)]
    if variant is None:
        return names
    return [f"{stem}.{variant}.{ending}" for stem, ending in (name.rsplit(".", 1) for name in names)]


def _shards(index: str) -> list[str]:
    try:
        content = json.loads(Path(index).read_text(encoding="utf-8"))
        content["metadata"]  # transformers' loader reads it, and a checkpoint without ends there in a bare KeyError
        return sorted(set(content["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise OSError(
            f"{index} cannot be read as the index of a sharded checkpoint, which wants JSON with 'metadata' and "
            f"'weight_map': {error!r}."
        ) from error


def _names_in_file(path) -> set[str]:
    try:
        tensors = load_state_dict(path, map_location="meta")
        if not isinstance(tensors, dict) or not all(isinstance(name, str) for name in tensors):
            raise ValueError("it holds no tensors by name")
        return set(tensors)
    except Exception as error:  # what a broken pickle raises has no end
        size = f" ({os.path.getsize(path):,} bytes)" if os.path.exists(path) else ""
        raise OSError(
            f"{path}{size} cannot be read as a file of weights: {error}. It is truncated, corrupt or of another kind: "
            "fetch or write it again."
        ) from error


@contextmanager
def staged(folder) -> Iterator[Path]:
    """A temporary folder whose files are moved into `folder` once the `with` block is through.

    Each file is there whole or, if the block fails, as it was before. Files of weights that the new ones replace, a
    single file by shards or the reverse, are removed, or the next load would pick up the old.
    """
    folder = Path(folder)
    if folder.exists() and not folder.is_dir():
        raise NotADirectoryError(f"{folder} is a file; a model is saved into a folder.")
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".saving-", dir=folder) as temporary:
        yield Path(temporary)
        written = sorted(Path(temporary).iterdir())
        for path in written:
            if path.is_file():
                path.chmod(_readable_mode())  # safetensors makes files that none but their owner can read
            os.replace(path, folder / path.name)
    names = {path.name for path in written}
    # "model", "model.fp16", "adapter_model": the families of which this save wrote a new member
    families = {_family(name) for name in names} - {None}
    for path in folder.iterdir():
        if path.name not in names and _family(path.name) in families:
            path.unlink()


def _readable_mode() -> int:
    """The mode that `open` gives a new file. The mask can only be read by setting it."""
    mask = os.umask(0o022)
    os.umask(mask)
    return 0o666 & ~mask


def _family(name: str) -> str | None:
    """What a file of weights shares with those that it replaces: "model", or "model.fp16" for a variant."""
    if index := re.fullmatch(r"(.+)\.safetensors\.index(\..+)?\.json", name):
        return index[1] + (index[2] or "")
    weights = re.fullmatch(r"(.+?)(-\d{5}-of-\d{5})?\.safetensors", name)
    return weights and weights[1]
