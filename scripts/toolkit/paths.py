"""The flags of the training commands that are paths, and what is public of a path: its last part."""

import os
from collections.abc import Callable
from pathlib import PureWindowsPath

# Flags whose values are files or folders; or, where no such folder exists, hub ids.
FILES = ("train_file", "validation_file", "test_file", "output_dir", "config_name")
FOLDERS_OR_HUB_IDS = ("model", "tokenizer_name", "dataset")


def with_paths(settings: dict, change: Callable[[str, bool], str]) -> dict:
    """The settings with `change(value, is_file)` applied to each value that is a file, a folder or a hub id."""

    def changed(name: str, value):
        if isinstance(value, list):
            return [changed(name, each) for each in value]
        is_path = isinstance(value, str) and name in (*FILES, *FOLDERS_OR_HUB_IDS)
        return change(value, name in FILES) if is_path else value

    return {name: changed(name, value) for name, value in settings.items()}


def public_path(value: str, is_file: bool) -> str:
    """The last part of a path, with `/` or `\\`; a hub id as it is.

    Args:
        is_file: whether it can be no hub id.
    """
    return value if not is_file and is_hub_id(value) else PureWindowsPath(value).name or value


def is_hub_id(source: str) -> bool:
    """Whether `source` can be a repository, and is no file or folder."""
    from huggingface_hub.utils import validate_repo_id  # `--help` does not wait for it

    try:
        validate_repo_id(source)
    except ValueError:
        return False
    return not os.path.exists(source)
