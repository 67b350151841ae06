"""What differs between versions of transformers for the tests alone."""

import pytest
import transformers
from packaging.version import Version


def since(version: str, change: str) -> pytest.MarkDecorator:
    """Skip a test on versions of transformers before the one with a change."""
    is_old = Version(transformers.__version__) < Version(version)
    return pytest.mark.skipif(is_old, reason=f"since transformers {version}, {change}")


def checkpoint_activations(model, *args) -> None:
    """Turn activation checkpointing on; the method was renamed in 5.22 or 5.23."""
    name = "activation_checkpointing_enable"
    getattr(model, name if hasattr(model, name) else "gradient_checkpointing_enable")(*args)
