"""Classification of texts or pairs of texts: one label, several labels, or numbers."""

import numpy as np
import torch
from torch.nn.functional import binary_cross_entropy_with_logits, mse_loss

from toolkit.data import canonical, find_column, label_of, number_of, text_of, value_of
from toolkit.metrics import classification_metrics
from toolkit.tasks.arguments import NUMBER, SECOND_TEXTS, TEXTS, ClassificationArguments
from toolkit.tasks.labels import LabelTask, check_known, table_by_label
from toolkit.tasks.task import tokenize

LABELS = ("label", "labels", "score")
METRICS = {
    "single_label": ("accuracy", "f1_macro", "matthews_correlation"),
    "multi_label": ("f1_macro", "f1_micro", "subset_accuracy"),
    "regression": ("pearson", "spearman", "mean_squared_error"),
}


class Classification(LabelTask):
    """Texts and their labels.

    Attributes:
        threshold: for multi_label, the score above which a label is given.
    """

    name = "text-classification"
    label_fields = ("label",)
    threshold = 0.5
    model_class = "ForSequenceClassification"
    lower_is_better = ("loss", "mean_squared_error")
    grouped_by = ("text", "text_pair")
    arguments: ClassificationArguments

    def __init__(self, arguments: ClassificationArguments):
        super().__init__(arguments)
        self.problem = arguments.problem
        self.metric_names = METRICS[self.problem]
        self.labels = arguments.label_columns or self.labels
        self.least_labels = 1 if self.problem == "multi_label" else 2

    # -- data

    def find_inputs(self, columns):
        flags = self.arguments
        self.text = find_column(columns, "--text_column", flags.text_column, TEXTS)
        second = flags.text_pair_column
        if second is None and flags.text_column is None:
            second = next((name for name in SECOND_TEXTS if name in columns), None)
        self.pair = second and find_column(columns, "--text_pair_column", second, ())
        return f"the text is {self.text!r}" + (f", the second text is {self.pair!r}" if self.pair else "")

    def find_labels(self, columns):
        names = self.arguments.label_columns
        for name in names or ():
            find_column(columns, "--label_columns", name, ())
        if names:
            return f"the labels are {', '.join(names)}"
        self.label = find_column(columns, "--label_column", self.arguments.label_column, LABELS)
        return f"the label is {self.label!r}"

    def read_inputs(self, content):
        row = {"text": text_of(content, self.text)}
        return row | ({"text_pair": text_of(content, self.pair)} if self.pair else {})

    def read_labels(self, content):
        return {"label": self.read_label(content)}

    def read_label(self, content: dict):
        """One label, a list of labels, or a list of numbers."""
        if self.arguments.label_columns:
            return [name for name in self.labels if one_hot(name, value_of(content, name))]
        value = value_of(content, self.label)
        if self.problem == "regression":
            numbers = [number_of(each) for each in (value if isinstance(value, list) else [value])]
            if self.labels is not None and len(numbers) != len(self.labels):
                raise ValueError(f"there are {len(numbers)} numbers; expected {len(self.labels)}")
            return numbers
        if self.problem == "single_label":
            label = label_of(value)
            check_known([label], self.labels)
            return label
        given = value if isinstance(value, list) else str(value or "").split(self.arguments.label_separator)
        labels = [label_of(each) for each in given if each not in ("", None)]
        check_known(labels, self.labels)
        if len(set(labels)) < len(labels):
            raise ValueError(f"the label is {value!r}; expected each label once. Pass --label_columns for 0 and 1")
        return labels

    def labels_of(self, row: dict) -> list[str]:
        return [row["label"]] if self.problem == "single_label" else row["label"]

    def prepare(self, rows):
        if self.problem == "regression":
            widths = sorted({len(row["label"]) for row in rows})
            if len(widths) > 1:
                raise ValueError(f"rows have {' and '.join(map(str, widths))} numbers; expected as many in each.")
            self.set_labels([f"LABEL_{i}" for i in range(widths[0])])
            return
        yield from super().prepare(rows)
        decimals = [label for label in self.labels if NUMBER.fullmatch(label) and float(label) % 1]
        if decimals and self.problem == "single_label" and self.arguments.labels is None:
            raise ValueError(f"labels are numbers such as {decimals[0]}; expected --problem regression, or --labels.")

    def stratum(self, row):
        return row["label"] if self.problem == "single_label" else None

    def encode(self, rows):
        names = ["text", "text_pair"] if self.pair else ["text"]
        texts = [[row[name] for row in rows] for name in names]
        examples = list(tokenize(self.tokenizer, self.arguments.max_length, *texts))
        for row, example in zip(rows, examples, strict=True):
            if "label" in row:
                example["labels"] = self.target(row["label"])
        return examples

    def target(self, label):
        """A label's number; 0 and 1 for each label; or the numbers of a regression."""
        if self.problem == "multi_label":
            return [float(name in label) for name in self.labels]
        return self.numbers[label] if self.problem == "single_label" else label

    # -- model, loss and metrics

    def open_model(self):
        is_number = self.problem == "regression"
        return super().open_model(problem_type=self.problem if is_number else f"{self.problem}_classification")

    def count(self, batch):
        is_number = self.problem == "regression"
        return torch.ones_like(batch["labels"]).sum() if is_number else super().count(batch)

    def loss_of(self, logits, batch):
        if self.problem == "regression":
            return mse_loss(logits, batch["labels"], reduction="sum")
        if self.problem == "multi_label":
            return binary_cross_entropy_with_logits(logits, batch["labels"], reduction="sum")
        return super().loss_of(logits, batch)

    def outputs_of(self, logits, batch):
        return logits.tolist()

    def decode(self, rows, examples, outputs):
        if self.problem == "regression":
            return [{"prediction": numbers if len(numbers) > 1 else numbers[0]} for numbers in outputs]
        # One row after the other: the functions of an array have other last bits at its end.
        scores = [self.activation(torch.tensor(logits)).tolist() for logits in outputs]
        named = [dict(zip(self.labels, row, strict=True)) for row in scores]
        if self.problem == "multi_label":
            return [
                {"prediction": [label for label in row if row[label] > self.threshold], "scores": row} for row in named
            ]
        return [{"prediction": max(row, key=row.__getitem__), "score": max(row.values())} for row in named]

    def activation(self, logits: torch.Tensor) -> torch.Tensor:
        """The scores of the labels, from the logits of a row."""
        return logits.sigmoid() if self.problem == "multi_label" else logits.softmax(-1)

    def metrics(self, rows, predictions):
        return classification_metrics(
            self.problem, self.as_numbers(rows, "label"), self.as_numbers(predictions, "prediction")
        )

    def as_numbers(self, rows: list[dict], name: str) -> np.ndarray:
        """Numbers of labels, `(N,)`; 0 and 1 for each label, `(N, L)`; or the numbers of a regression, `(N, C)`."""
        numbers = np.array([self.target(row[name]) for row in rows])
        return numbers.reshape(len(rows), -1) if self.problem == "regression" else numbers

    def table_by_label(self, rows, predictions):
        if self.problem == "regression":
            return []
        return table_by_label(self.labels, self.as_numbers(rows, "label"), self.as_numbers(predictions, "prediction"))


def one_hot(name: str, value) -> bool:
    """Whether a column of 0 and 1 has 1. Raises ValueError if it has another value."""
    number = canonical(str(value))
    if number not in (0, 1):
        raise ValueError(f"{name!r} is {value!r}; expected 0 or 1")
    return number == 1
