"""Labels of texts and words: their names in a model, their weights in the loss, and the metrics of each."""

import re
import warnings
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from toolkit.files import read_json_object
from toolkit.hub import read_config


def saved_labels(source: str) -> list[str] | None:
    """The labels of a checkpoint in the order of its model head; None if they are only numbered."""
    names = read_config(source).get("id2label")
    labels = [str(names[number]) for number in sorted(names, key=int)] if isinstance(names, dict) else []
    return None if all(re.fullmatch(r"LABEL_\d+", label) for label in labels) else labels


def trained_labels(source: str) -> tuple[list[str], Counter[str]]:
    """The labels that a model was trained with, and how often each occurred, as far as its folder has that."""
    names = read_config(source).get("id2label") or {"0": "LABEL_0", "1": "LABEL_1"}  # which config.json does not save
    report = Path(source, "metrics.json")
    counts = read_json_object(report).get("label_counts") if report.is_file() else None
    return [str(names[number]) for number in sorted(names, key=int)], Counter(counts)


def in_saved_order(labels: list[str], saved: list[str] | None) -> list[str]:
    """The labels in the order of a checkpoint that has the same ones, so that its model head fits."""
    return saved if saved is not None and sorted(saved) == sorted(labels) else labels


def check_known(labels: Sequence[str], known: list[str] | None) -> None:
    """Raises ValueError if a label is none of those that the model is trained with."""
    for label in labels:
        if known is not None and label not in known:
            shown = ", ".join(map(repr, known[:10])) + (f" and {len(known) - 10} more" if len(known) > 10 else "")
            raise ValueError(
                f"the label is {label!r}; expected one of {shown}. Write labels alike in all files, or pass --labels"
            )


def open_with_labels(task, opener, saved: list[str] | None, **fields):
    """The model for the labels of a task. Its head is new if the checkpoint has other labels."""
    id2label = dict(enumerate(task.labels))
    label2id = {label: number for number, label in id2label.items()}
    model = task.load(opener, task.arguments.model, id2label=id2label, label2id=label2id, **fields)
    if saved not in (None, task.labels):
        task.new_weights |= initialise_head(model)
    return model


@torch.no_grad()
def initialise_head(model) -> set[str]:
    """Draws the weights outside the base model, and returns their names."""
    names = {name for name, _ in model.named_parameters() if not name.startswith(f"{model.base_model_prefix}.")}
    for name in sorted({name.rpartition(".")[0] for name in names}):
        module = model.get_submodule(name)
        for parameter in module.parameters(recurse=False):
            parameter._is_hf_initialized = False  # else transformers takes them for loaded
        model._init_weights(module)
    return names


def class_weights(given: list[str] | None, labels: list[str], counts: Counter[str]) -> torch.Tensor:
    """The weight of each label in the loss, `(L,)`: numbers, or "balanced" as in scikit-learn.

    Raises:
        ValueError: one is no number of 0 or more, or all are 0.
    """
    if given is None:
        return torch.ones(len(labels))
    if given == ["balanced"]:
        return torch.tensor([counts.total() / (len(labels) * max(counts[label], 1)) for label in labels])
    try:
        weights = torch.tensor([float(each) for each in given])
    except ValueError:
        weights = torch.tensor([-1.0])
    if not (weights.isfinite().all() and (weights >= 0).all() and weights.any()):
        raise ValueError(f"--class_weights is {' '.join(given)}; expected numbers of 0 or more, or balanced.")
    return weights


def table_by_label(labels: list[str], references: np.ndarray, predictions: np.ndarray) -> list[dict]:
    """Precision, recall, F1 and the number of rows of each label.

    Args:
        references, predictions: numbers of labels, `(N,)`, or 0 and 1 for each label, `(N, L)`.
    """
    from sklearn.metrics import precision_recall_fscore_support

    with warnings.catch_warnings(action="ignore"):
        columns = precision_recall_fscore_support(references, predictions, labels=range(len(labels)), zero_division=0)
    names = ("precision", "recall", "f1", "rows")
    return [
        {"label": label, **dict(zip(names, map(float, values), strict=True))}
        for label, values in zip(labels, zip(*columns, strict=True), strict=True)
    ]
