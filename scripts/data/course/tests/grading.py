"""What the tests of the chapters share: `compare` names the mistake in a result that is wrong.

The tests compute the right results, so they contain solutions. Write your own one before you read them.
"""

from itertools import combinations
from pathlib import Path

import pytest
import torch


class Pick:
    """Picks the value of a step: the right one, or that of a mistake, if the mistake is one of `made`."""

    def __init__(self, made=()):
        self.made, self.known = made, {}

    def __call__(self, right, mistakes):
        """
        Args:
            right: the right value.
            mistakes: from what is wrong, and what to do, to the wrong value.
        """
        self.known |= mistakes
        return next((wrong for message, wrong in mistakes.items() if message in self.made), right)


def compare(result, reference, *arguments):
    """Compares a result with the right one. If it is the result of one or two known mistakes, the message names them.

    Args:
        result: what the learner's function returned: a tensor, or a tuple of tensors.
        reference: computes the right result from a `Pick` and the arguments, or the result of the mistakes of the
            `Pick`.
    """
    expect(result is not None, "The result is None. Is a return missing?")
    right = Pick()
    problem = difference(result, reference(right, *arguments))
    for number in (1, 2) if problem else ():
        for made in combinations(right.known, number):
            expect(difference(result, reference(Pick(made), *arguments)), " ".join(made))
    expect(not problem, f"The result is wrong, and it is not one of the known mistakes. {problem}")


def expect(condition, message):
    """Fails the test with nothing but `message` if the condition does not hold."""
    if not condition:
        pytest.fail(message, pytrace=False)


def difference(result, expected):
    """How a result differs from another one by more than rounding; empty if it does not."""
    try:
        torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-5, equal_nan=True, check_dtype=False)
    except (AssertionError, TypeError) as error:
        return str(error)
    return ""


def loaded(part, source):
    """The learner's part with the weights of the package's, in evaluation mode."""
    names, expected = ({name: tuple(each.shape) for name, each in m.state_dict().items()} for m in (part, source))
    expect(names == expected, f"The part has the weights {names}; expected {expected}. Keep the names of the file.")
    part.load_state_dict(source.state_dict())
    return part.eval()


def check_dropout(part, *inputs):
    """Checks that a part, whose dropout has probability 1, has dropout in training, and none at evaluation."""
    first, second, training = part(*inputs), part(*inputs), part.train()(*inputs)
    part.eval()
    expect(
        first is None or (first[0].any() and not difference(first, second)),
        "Dropout is active at evaluation; use self.dropout, which model.eval() switches off.",
    )
    expect(difference(first, training), "There is no dropout in training; apply self.dropout to the results.")


def saved_folder(name):
    """The path of a folder in that of the learner's files. It is absolute, so that nothing is looked for on the Hub."""
    folder = Path(__file__).parents[1] / name
    expect(folder.is_dir(), f"There is no folder {folder}; train the model, and save it there.")
    return folder
