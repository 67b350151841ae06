"""Labels of texts and words: their names in a model, their weights in the loss, and the metrics of each."""

import re
import warnings
from abc import abstractmethod
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import torch

from toolkit.common import first_of, read_json_object
from toolkit.data import label_summary, label_warnings, sorted_labels
from toolkit.hub import read_config
from toolkit.tasks.arguments import LabelArguments
from toolkit.tasks.task import Task


class LabelTask(Task):
    """A task with labels of texts or words. Their order is that of --labels, of a checkpoint that has the same ones, or
    sorted.

    Attributes:
        numbers: of the labels, by name.
        saved: the labels of the checkpoint in the order of its model head.
        least_labels: the least number of labels that can be trained.
    """

    arguments: LabelArguments
    least_labels = 2

    def __init__(self, arguments: LabelArguments):
        super().__init__(arguments)
        self.labels = arguments.labels
        names = read_config(arguments.model).get("id2label") or {}
        # Two labels without a name are not saved.
        self.saved = [str(names[number]) for number in sorted(names, key=int)] or ["LABEL_0", "LABEL_1"]

    @abstractmethod
    def labels_of(self, row: dict) -> list[str]:
        """The labels of a row."""

    def ordered(self, labels: Iterable[str]) -> list[str]:
        """The labels to train with, of those that occur."""
        return sorted_labels(labels)

    def prepare(self, rows):
        self.label_counts = Counter(label for row in rows for label in self.labels_of(row))
        yield label_summary(self.label_counts)
        yield from label_warnings(self.label_counts)
        found = self.ordered(self.label_counts)
        if self.labels is None:
            self.labels = self.saved if sorted(self.saved) == sorted(found) else found
        self.set_labels(self.labels)
        if len(self.labels) < self.least_labels:
            raise ValueError(
                f"the labels of the training rows are {self.labels}; expected {self.least_labels} or more."
            )

    def restore(self):
        report = Path(self.arguments.model, "metrics.json")
        self.label_counts = Counter(read_json_object(report).get("label_counts") if report.is_file() else None)
        self.set_labels(self.saved)

    def set_labels(self, labels: list[str]) -> None:
        self.labels, self.numbers = labels, {label: number for number, label in enumerate(labels)}
        given, counts = self.arguments.class_weights, self.label_counts
        if given == ["balanced"]:  # as in scikit-learn
            given = [counts.total() / (len(labels) * max(counts[label], 1)) for label in labels]
        self.weights = given and torch.tensor([float(each) for each in given])

    def open_model(self, **fields):
        """The model for the labels. Its head is new if the checkpoint has other labels."""
        labels = {"id2label": dict(enumerate(self.labels)), "label2id": self.numbers}
        model = super().open_model(**labels, **fields)
        is_numbered = all(re.fullmatch(r"LABEL_\d+", name) for name in self.saved)
        if self.saved != self.labels and not is_numbered:
            self.new_weights |= initialise_head(model)
        return model


def check_known(labels: Sequence[str], known: list[str] | None) -> None:
    """Raises ValueError if a label is none of those that the model is trained with."""
    for label in labels:
        if known is not None and label not in known:
            shown = ", ".join(first_of(list(map(repr, known)), 10))
            raise ValueError(
                f"the label is {label!r}; expected one of {shown}. Write labels alike in all files, or pass --labels"
            )


@torch.no_grad()
def initialise_head(model) -> set[str]:
    """Draws the weights outside the base model anew, and returns their names."""
    names = {name for name, _ in model.named_parameters() if not name.startswith(f"{model.base_model_prefix}.")}
    for name in sorted({name.rpartition(".")[0] for name in names}):
        module = model.get_submodule(name)
        for parameter in module.parameters(recurse=False):
            parameter._is_hf_initialized = False  # else transformers takes them for loaded
        model._init_weights(module)
    return names


def table_by_label(labels: list[str], references: np.ndarray, predictions: np.ndarray) -> dict[str, Sequence]:
    """Precision, recall, F1 and the number of rows of each label.

    Args:
        references, predictions: numbers of labels, `(N,)`, or 0 and 1 for each label, `(N, L)`.
    """
    from sklearn.metrics import precision_recall_fscore_support

    with warnings.catch_warnings(action="ignore"):
        precision, recall, f1, rows = precision_recall_fscore_support(
            references, predictions, labels=range(len(labels)), zero_division=0
        )
    return {"label": labels, "precision": precision, "recall": recall, "f1": f1, "rows": rows}
