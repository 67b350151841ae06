import pytest


@pytest.fixture(autouse=True)
def _fresh_compiler(fresh_compiler):
    """Every test compiles anew."""
