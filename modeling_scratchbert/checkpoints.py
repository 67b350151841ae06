"""The files of a checkpoint: where they are looked up, and how a folder of them is written."""

import importlib.resources
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from transformers import PreTrainedConfig

from .installed import installed
from .versions import resolved_revision

# The arguments of `from_pretrained` that locate a file on the Hub or in the cache; the first four locate a revision.
HUB_OPTIONS = ("cache_dir", "local_files_only", "revision", "token", "force_download", "proxies", "subfolder")


def hub_options(source, kwargs: dict) -> dict:
    """Return those of `kwargs` that locate the files of `source`. `revision` becomes a commit, so that all files are of
    the same one and the Hub is asked for it once."""
    options = {name: kwargs[name] for name in HUB_OPTIONS if kwargs.get(name) is not None}
    revision = resolved_revision(source, {name: options[name] for name in HUB_OPTIONS[:4] if name in options})
    return options if revision is None else options | {"revision": revision}


@contextmanager
def explained(source, options: dict) -> Iterator[None]:
    """Replace an error while loading `source` by one with advice, if the package is installed and finds the cause."""
    try:
        yield
    except Exception as error:
        with suppress(ImportError):
            installed("bert.files").explain(error, source, options)
        raise


def raw_config(source, **kwargs) -> tuple[dict, dict]:
    """Return the fields of the `config.json` of `source` as they are, and those of `kwargs` that did not locate it.
    Raise OSError if there is none, or if it cannot be read."""
    fields: Any = None
    with explained(source, kwargs), suppress(AttributeError, TypeError):  # transformers expects an object of JSON
        fields, kwargs = PreTrainedConfig.get_config_dict(source, **kwargs)
    if isinstance(fields, dict):
        fields.pop("_commit_hash", None)  # which transformers adds before 5.21
    if not isinstance(fields, dict) or not fields:
        raise OSError(
            f"{source}/config.json is missing or has no fields of a model; expected the folder of a saved model. A "
            "training saves it at the end."
        )
    return fields, kwargs


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
    with TemporaryDirectory(prefix=".saving-", dir=folder, ignore_cleanup_errors=True) as private:
        temporary = Path(private, "files")  # with the usual permissions, unlike `private`
        temporary.mkdir()
        yield temporary
        written = sorted(temporary.iterdir())
        for path in written:
            if path.is_file():  # safetensors creates files that only their owner can read
                path.chmod(temporary.stat().st_mode & 0o666)
            os.replace(path, folder / path.name)
    names = {path.name for path in written}
    families = {_family(name) for name in names} - {None}
    for path in folder.iterdir():
        if path.name not in names and _family(path.name) in families:
            path.unlink()


def _family(name: str) -> str | None:
    """Return what all files of the same weights, and their probe, have in common: "model", or "model.fp16" if that is
    the variant."""
    if probe := re.fullmatch(r"probe(\..+)?\.json", name):
        return "model" + (probe[1] or "")
    weights = re.fullmatch(r"(.+?)(-\d{5}-of-\d{5})?\.safetensors(\.index(\..+)?\.json)?", name)
    return weights and weights[1] + (weights[4] or "")


def copy_code(folder) -> None:
    """Copy the files at the top level of this package into `folder`, except `__init__`, which the remote-code loader
    does not read. Raise OSError if they are not there, as in an installation without sources."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    # Also from a zip file, as Spark's addPyFile imports one.
    code = {file.name: file for file in importlib.resources.files(__package__).iterdir() if file.name.endswith(".py")}
    if "modeling_scratchbert.py" not in code:
        raise OSError(
            f"The installed {__package__} has no source files; expected them, because they are saved beside "
            "the model. Install the package with its sources, or save with save_as_bert()."
        )
    for name in code.keys() - {"__init__.py"}:
        Path(folder, name).write_bytes(code[name].read_bytes())
