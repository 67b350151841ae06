"""Labels of sequences and tokens: their weights, and their names in a model's configuration."""

import math
import re
from decimal import Decimal

from toolkit.hub import read_config

DEFAULT_NAME = re.compile(r"LABEL_\d+")

# The number of labels that an error message lists.
LISTED = 10


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
