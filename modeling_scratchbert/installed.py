"""Imports what a saved model does not carry."""

import importlib
from typing import Any


def installed(name: str) -> Any:
    """Return the module of this name in the installed package, such as "probe.recording"."""
    return importlib.import_module(f"modeling_scratchbert.{name}")
