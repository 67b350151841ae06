"""Labels of sequences and tokens: their weights, and their names in a model's configuration."""

import math
import re
from collections import Counter
from decimal import Decimal

import torch

from toolkit.hub import read_config

DEFAULT_NAME = re.compile(r"LABEL_\d+")

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
    names = read_config(source).get("id2label")
    if not isinstance(names, dict) or not all(str(number).isdecimal() for number in names):
        return None
    labels = [str(names[number]) for number in sorted(names, key=int)]
    return None if all(map(DEFAULT_NAME.fullmatch, labels)) else labels


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
        return torch.tensor([counts.total() / (len(labels) * max(counts[label], 1)) for label in labels])
    try:
        weights = torch.tensor([float(each) for each in given])
    except ValueError:
        raise ValueError(f"--class_weights is {' '.join(given)}; expected numbers, or balanced") from None
    is_valid = len(weights) == len(labels) and (weights >= 0).all() and weights.any() and weights.isfinite().all()
    if not is_valid:
        expected = f"{len(labels)} numbers of 0 or more, not all 0"
        raise ValueError(f"--class_weights is {' '.join(given)}; expected {expected}, for {labels}")
    return weights


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
