"""What the tests of the chapters share: `compare` names the mistake in a result that is wrong.

The tests compute the right results, so they contain solutions. Write your own one before you read them.
"""

from collections.abc import Callable
from itertools import combinations

import pytest
import torch
from torch import nn


class Pick:
    """Picks the value of a step: the right one, or that of a mistake, if the mistake is one of `made`."""

    def __init__(self, made=()):
        self.made, self.known = made, {}

    def __call__(self, right, mistakes: dict):
        """
        Args:
            right: the right value.
            mistakes: from what is wrong, and what to do, to the wrong value.
        """
        self.known |= mistakes
        return next((wrong for message, wrong in mistakes.items() if message in self.made), right)


def compare(result, reference: Callable, *arguments) -> None:
    """Compares a result with the right one. If it is the result of one or two known mistakes, the message names them.

    Args:
        result: what the learner's function returned: a tensor, or a tuple of tensors.
        reference: computes the right result from a `Pick` and the arguments, or the result of the mistakes of the
            `Pick`.
    """
    expect(result is not None, "The result is None. Is a return missing?")
    right = Pick()
    problem = difference(result, reference(right, *arguments))
    if not problem:
        return
    for number in (1, 2):
        for made in combinations(right.known, number):
            expect(difference(result, reference(Pick(made), *arguments)), " ".join(made))
    expect(False, f"The result is wrong, and it is not one of the known mistakes. {problem}")


def expect(condition, message: str) -> None:
    """Fails the test with nothing but `message` if the condition does not hold."""
    if not condition:
        pytest.fail(message, pytrace=False)


def difference(result, expected) -> str:
    """How a result differs from another one by more than rounding; empty if it does not."""
    try:
        torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-5, equal_nan=True, check_dtype=False)
    except (AssertionError, TypeError) as error:
        return str(error)
    return ""


def loaded(part: nn.Module, source: nn.Module) -> nn.Module:
    """The learner's part with the weights of the package's, in evaluation mode."""
    names, expected = ({name: tuple(each.shape) for name, each in m.state_dict().items()} for m in (part, source))
    expect(names == expected, f"The part has the weights {names}; expected {expected}. Keep the names of the file.")
    part.load_state_dict(source.state_dict())
    return part.eval()


def check_evaluation(part: nn.Module, *inputs) -> None:
    """Checks that a part, whose dropout has probability 1, has none at evaluation."""
    first, second = part(*inputs), part(*inputs)
    expect(
        first is None or (first[0].any() and not difference(first, second)),
        "Dropout is active at evaluation; use self.dropout, which model.eval() switches off.",
    )
