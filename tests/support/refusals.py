"""The error that a call raises, and what its message must have."""

import pytest


def refusal(call, *args, error=ValueError, **kwargs) -> str:
    """The message of the error that the call raises."""
    with pytest.raises(error) as raised:
        call(*args, **kwargs)
    return str(raised.value)


def assert_mentions(message: str, *parts) -> None:
    missing = [part for part in parts if str(part) not in message]
    assert not missing, f"{missing} not in: {message}"
