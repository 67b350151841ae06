"""Labels of sequences and tokens: their weights, and their names in a model's configuration."""

import math
import re
from collections import Counter
from decimal import Decimal

import torch

from toolkit.hub import read_config

DEFAULT_NAME = re.compile(r"LABEL_\d+")

# The number of labels that an error message lists.
LISTED = 10

# Labels that are sorted by value. `float` accepts more, such as "nan", "infinity" and "1_0".
NUMBER = re.compile(r"-?[0-9]+(\.[0-9]+)?")


def label_order(name: str) -> tuple[Decimal, bool, str]:
    """A sort key: numbers by value, and texts at 0."""
    is_number = NUMBER.fullmatch(name) is not None
    return Decimal(name if is_number else 0), not is_number, name


def saved_labels(source: str) -> list[str] | None:
    """The names of the labels of a checkpoint, by number; None if it has none of its own.

    Raises:
        OSError: it has no configuration.
    """
    labels = labels_of(read_config(source))
    return None if all(map(DEFAULT_NAME.fullmatch, labels)) else labels


def labels_of(config: dict) -> list[str]:
    """The names of the labels in a configuration, by number; none if it has no names."""
    names = config.get("id2label")
    if not isinstance(names, dict) or not all(str(number).isdecimal() for number in names):
        return []
    return [str(names[number]) for number in sorted(names, key=int)]


def trained_labels(source: str, head: str, problem_type: str | None = None) -> list[str]:
    """The names of the labels that a model was trained with, by number.

    Args:
        head: the end of the name of its class, such as ForTokenClassification.

    Raises:
        OSError: it has no configuration.
        ValueError: it is of another class, or was trained for another problem.
    """
    config = read_config(source)
    if (classes := config.get("architectures")) and not any(each.endswith(head) for each in classes):
        raise ValueError(f"--model {source} is a {classes[0]}; expected a trained model, whose class ends in {head}")
    if (trained_for := config.get("problem_type")) not in (None, problem_type):
        raise ValueError(f"--problem is for {problem_type} and --model {source} for {trained_for}; expected the same")
    return labels_of(config) or ["LABEL_0", "LABEL_1"]  # which config.json does not save


def in_saved_order(labels: list[str], saved: list[str] | None) -> list[str]:
    """The labels in the order of a checkpoint that has the same ones, so that its model head fits; else as they are."""
    return saved if saved is not None and sorted(saved) == sorted(labels) else labels


def label_fields(labels: list[str]) -> dict:
    """The fields of a model's configuration for these labels."""
    return {
        "num_labels": len(labels),
        "id2label": dict(enumerate(labels)),
        "label2id": {name: i for i, name in enumerate(labels)},
    }


def class_weights(given: list[str] | None, labels: list[str], counts: Counter) -> torch.Tensor:
    """The weight of each label, `(L,)`.

    Args:
        given: the numbers; "balanced", as in scikit-learn: total count / (number of labels · count of the label); or
            None, all 1.
        counts: how often each label occurs in the training set.

    Raises:
        ValueError: they are not numbers of 0 or more, one for each label; or all are 0.
    """
    if given is None:
        return torch.ones(len(labels))
    if given == ["balanced"]:
        if not counts:
            raise ValueError(
                "--class_weights is balanced and metrics.json of --model has no label_counts; expected numbers"
            )
        return torch.tensor([counts.total() / (len(labels) * max(counts[label], 1)) for label in labels])
    try:
        weights = torch.tensor([float(each) for each in given])
    except ValueError:
        raise ValueError(f"--class_weights is {' '.join(given)}; expected numbers, or balanced") from None
    if not (len(weights) == len(labels) and (weights >= 0).all() and weights.any() and weights.isfinite().all()):
        expected = f"{len(labels)} numbers of 0 or more, not all 0"
        raise ValueError(f"--class_weights is {' '.join(given)}; expected {expected}, for {listed(labels)}")
    return weights


def read_labels(value, problem: str, labels: list[str] | None, separator: str) -> list:
    """The labels, or the numbers, in a row's column.

    Args:
        problem: "single_label", "multi_label" or "regression".
        labels: those that are known; None: any.
        separator: of the labels in a text, for "multi_label".

    Raises:
        ValueError: there are none, one is not known, or there are not as many numbers as labels.
    """
    given = value if isinstance(value, list) else [value]
    if problem == "regression":
        try:
            numbers = [float(number) for number in given]
        except (TypeError, ValueError):
            numbers = []
        if not numbers or not all(map(math.isfinite, numbers)):
            raise ValueError(f"the label is {value!r}; expected finite numbers")
        if labels and len(numbers) != len(labels):
            raise ValueError(f"the label is {value!r}; expected {len(labels)} numbers")
        return numbers
    if problem == "multi_label" and not isinstance(value, list):
        given = ("" if value is None else str(value)).split(separator)
    names = [name for each in given if (name := label_name(each))]
    if problem == "single_label" and len(names) != 1:
        raise ValueError(f"the label is {value!r}; expected one label" if names else "the label is empty")
    if len(set(names)) < len(names):
        raise ValueError(f"the label is {value!r}; expected the name of each label once, not 0 or 1 for each label")
    check_known("the label", names, labels)
    return names


def check_known(what: str, names: list[str], labels: list[str] | None) -> None:
    """Raises ValueError if one of the names is not among the labels; None: any name is."""
    if labels and (unknown := [name for name in names if name not in labels]):
        raise ValueError(f"{what} is {unknown[0]!r}; expected one of {listed(labels)}")


def listed(labels: list[str]) -> str:
    """The first labels, and how many more there are."""
    more = [f"{len(labels) - LISTED:,} more"] if len(labels) > LISTED else []
    return " and ".join([", ".join(labels[:LISTED]), *more])


def label_name(value) -> str:
    """The label as text. 1 and 1.0 are the same label; None is "".

    Raises:
        ValueError: it is neither a text nor a finite number.
    """
    if value is None:
        return ""
    is_number = isinstance(value, float | Decimal)
    if not isinstance(value, str | int | float | Decimal) or (is_number and not math.isfinite(value)):
        raise ValueError(f"the label is {value!r}; expected a text or a finite number")
    if is_number and value == int(value):
        value = int(value)
    return str(value).strip()
