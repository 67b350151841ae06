"""What the tests share. `check` compares your function with the solution, and names the mistake in a wrong result."""

import copy
import importlib
from itertools import combinations
from pathlib import Path

import pytest
import torch

from mistakes import MISTAKES


def call(function, *inputs):
    return function(*inputs)


def check(name, *inputs, run=call, function=None):
    """Compares the result of the learner's function with that of the solution. If it is the result of one or two known
    mistakes, the message names them.

    Args:
        name: of the function or class, such as "blocks.geglu".
        inputs: must not be changed in place.
        run: computes the result from the function and the inputs.
        function: the learner's, if it has another name.
    """
    module, _, attribute = name.partition(".")
    solution = Path(__file__).with_name("solutions").joinpath(f"{module}.py").read_text(encoding="utf-8")
    function = function or getattr(importlib.import_module(module), attribute)
    given = copy.deepcopy(inputs)
    torch.manual_seed(0)
    result = run(function, *given)
    expect(result is not None, "The result is None. Is a return missing?")
    expect(not difference(given, inputs), "An argument is changed in place; compute a new tensor, as in x = x - mean.")

    def outcome(*mistakes):
        text, namespace = solution, {}
        for old, new, _ in mistakes:
            text = text.replace(old, new)
        exec(text, namespace)
        torch.manual_seed(0)
        try:
            return run(namespace[attribute], *inputs)
        except Exception:  # with these mistakes, the solution does not run
            return None

    right = outcome()
    problem = difference(result, right)
    if not problem:
        return
    known = [mistake for mistake in MISTAKES[module] if difference(outcome(mistake), right)]
    for number in (1, 2):
        for made in combinations(known, number):
            expect(difference(result, outcome(*made)), " ".join(message for *_, message in made))
    expect(False, f"The result is wrong, and it is not one of the known mistakes. {problem}")


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


def check_evaluation(part, *inputs):
    """Checks that a part, whose dropout has probability 1, has none at evaluation."""
    first, second = part(*inputs), part(*inputs)
    expect(
        first is None or (first[0].any() and not difference(first, second)),
        "Dropout is active at evaluation; use self.dropout, which model.eval() switches off.",
    )


def saved_folder(name):
    """The path of a folder in that of the learner's files. It is absolute, so that nothing is looked for on the Hub."""
    folder = Path(__file__).parents[1] / name
    expect(folder.is_dir(), f"There is no folder {folder}; train the model, and save it there.")
    return folder
