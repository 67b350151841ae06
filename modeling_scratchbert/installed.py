"""The installed part of the package, which is not copied into saved models."""

from importlib import import_module
from typing import Any


def installed(name: str) -> Any:
    """Return the module `modeling_scratchbert.<name>` of the installed package."""
    return import_module(f"modeling_scratchbert.{name}")
