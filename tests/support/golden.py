"""Comparison of a text with a file that was read and found good."""

import os
from pathlib import Path


def assert_golden(text: str, path: Path) -> None:
    """Asserts that `text` is the content of `path`. With REWRITE_GOLDEN=1 in the environment it is written there."""
    if os.environ.get("REWRITE_GOLDEN"):
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8")
