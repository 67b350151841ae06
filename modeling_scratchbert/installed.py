"""Imports the part of the package that is only installed, for the files that are copied into saved models: loading and
exporting BERT checkpoints, inference on a CPU, and verification."""

import importlib.util
from typing import Any

# Increased when the interface between the copied files and the installed part changes.
INTERFACE_VERSION = 3

# The name `scratchbert` of the public index belongs to nobody of this project.
INSTALL_COMMAND = "`python -m pip install -c constraints.txt -e .`"


def installed(name: str) -> Any:
    """Return the module `modeling_scratchbert.<name>` of the installed package.

    Raises:
        ImportError: the package is not installed, is of another version, or a saved model hides it.
    """
    package = "modeling_scratchbert"
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        spec = None
    if spec is None:
        raise ImportError(
            f"{package}.{name} is not in the folder of a saved model; expected the installed package. "
            f"In a clone of ScratchBert, run {INSTALL_COMMAND}."
        )
    if spec.submodule_search_locations is None or spec.origin is None:
        found = spec.origin or f"The folder {package}"
        raise ImportError(
            f"{found} is part of a saved model; expected the installed package {package}. Start Python "
            f"in another folder; in a clone of ScratchBert, {INSTALL_COMMAND} installs the package."
        )
    has_version = importlib.util.find_spec(f"{package}.installed") is not None  # 0.1.0 has none
    version = importlib.import_module(f"{package}.installed").INTERFACE_VERSION if has_version else 0
    if version != INTERFACE_VERSION:
        advice = (
            f"Upgrade the package: in a newer clone of ScratchBert, run {INSTALL_COMMAND}."
            if version < INTERFACE_VERSION
            else f"Import {package} first, load the model without trust_remote_code, and save it again."
        )
        raise ImportError(
            f"The installed {package} has interface version {version}; the code of this model expects "
            f"{INTERFACE_VERSION}. {advice}"
        )
    return importlib.import_module(f"{package}.{name}")
