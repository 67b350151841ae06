#!/usr/bin/env python
"""Fine-tunes a BERT to classify texts, or pairs of texts: one label each, several at once, or a number.

    finetune_classification.py --model google-bert/bert-base-uncased --train_file train.csv --validation_file val.csv
                               --output my-classifier
    finetune_classification.py configuration/recipes/movie_reviews.yaml --seed 1 --output reviews-1
    accelerate launch --config_file configuration/two_process.yaml scripts/finetune_classification.py …

Files have a column of texts (text, sentence, sentence1, premise, question1), for pairs a second one (sentence2,
hypothesis, question2), and one of labels (label, labels, score); or columns that are named.

--output gets the model in the Hub's form with its tokenizer, a model card, metrics.json, curves.png, recipe.yaml and
the checkpoints.

Exit code: 0 done, 1 the training broke off, 2 bad usage or data, 143 stopped by SIGTERM (--resume continues).
"""

import math
import sys
from collections import Counter
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn
from transformers import AutoTokenizer, BertForSequenceClassification

from modeling_scratchbert import ScratchBertForSequenceClassification
from toolkit.training import loop
from toolkit.training.batches import PadOrFlatten
from toolkit.training.labels import LabelSettings, class_weights
from toolkit.training.loop import FineTuning, sources
from toolkit.training.metrics import compute, load
from toolkit.training.rows import columns_of, find_column, load_rows, text_of
from toolkit.training.settings import flag

TEXTS = ("text", "sentence", "sentence1", "premise", "question1")
SECOND_TEXTS = ("sentence2", "hypothesis", "question2")
LABELS = ("label", "labels", "score")
CLASSES = {"scratchbert": ScratchBertForSequenceClassification, "bert": BertForSequenceClassification}
# Of each problem the metrics' modules, and the values that they give; the first says which model is best.
METRICS = {
    "single_label": (["accuracy", "f1", "matthews_correlation"], ["accuracy", "f1", "matthews_correlation"]),
    "multi_label": (["f1", "accuracy"], ["f1", "accuracy"]),
    "regression": (["correlation", "mean_squared_error"], ["pearson", "spearman", "mean_squared_error"]),
}


@dataclass
class ClassificationSettings(LabelSettings):
    """Of `finetune_classification`."""

    problem: Literal["single_label", "multi_label", "regression"] = flag("single_label", "what the labels are")
    text_column: str | None = flag(None, f"left out: the first there is of {', '.join(TEXTS)}")
    text_pair_column: str | None = flag(None, f"left out: the first there is, if any, of {', '.join(SECOND_TEXTS)}")
    label_column: str | None = flag(None, f"left out: the first there is of {', '.join(LABELS)}")
    label_separator: str = flag("|", "between the labels of a row, of a multi_label problem in CSV or TSV")
    metric: str | None = flag(None, "which one says what model is best; left out: accuracy, f1 or pearson")

    def __post_init__(self):
        super().__post_init__()
        if self.label_smoothing and self.problem != "single_label":
            raise ValueError(f"--label_smoothing goes with --problem single_label, not with {self.problem}")
        values = METRICS[self.problem][1]
        if self.metric is not None and self.metric not in values:
            raise ValueError(f"--metric is {self.metric}; there are {', '.join(values)} with --problem {self.problem}")
        if self.class_weights and self.problem == "regression":
            raise ValueError("--class_weights are of labels; with --problem regression there are none")
        if self.class_weights == ["balanced"] and self.problem == "multi_label":
            raise ValueError("--class_weights balanced goes with --problem single_label, not with multi_label")


class Classification(FineTuning):
    """Texts, or pairs, and their labels."""

    name = "text-classification"

    def __init__(self, settings: ClassificationSettings, accelerator):
        super().__init__(settings, accelerator)
        self.modules, values = METRICS[settings.problem]
        for module in self.modules:
            load(module)  # a package that is missing shows before the training
        self.tokenizer = AutoTokenizer.from_pretrained(settings.model)
        self.labels = settings.labels
        for split, source in sources(settings).items():  # the training set first
            rows = self.read(source)
            self.labels = self.labels or self.find_labels(rows)
            self.splits[split] = self.encode(rows)
        self.train_set = self.splits.pop("train")
        self.model = self.make_model()
        counts = Counter(self.labels[label] for label in self.train_set["labels"] if settings.problem == "single_label")
        self.weights = class_weights(settings.class_weights, self.labels, counts).to(accelerator.device)
        self.collate = PadOrFlatten(self.tokenizer, settings.padding_free_collation, per_sequence=["labels"])
        self.metric = settings.metric or values[0]
        self.greater_is_better = self.metric != "mean_squared_error"

    # -- data

    def read(self, source):
        """The rows of a split: text, perhaps text_pair, and label."""
        settings, columns = self.settings, columns_of(source)
        text = find_column(columns, settings.text_column, TEXTS, "the text (--text_column)")
        label = find_column(columns, settings.label_column, LABELS, "the label (--label_column)")
        pair = settings.text_pair_column or next((name for name in SECOND_TEXTS if name in columns), None)
        if pair is not None:
            find_column(columns, pair, (), "the second text (--text_pair_column)")

        def check(row: dict) -> dict:
            kept = {"text": text_of(row, text), "label": self.read_label(row.get(label))}
            return kept | ({"text_pair": text_of(row, pair)} if pair else {})

        return load_rows(source, check, settings.on_bad_row, self.accelerator.print)

    def read_label(self, value) -> list:
        """The labels, or the numbers, of a row.

        Raises:
            ValueError: there are none, or others than in the set.
        """
        if self.settings.problem == "regression":
            try:
                numbers = [float(number) for number in (value if isinstance(value, list) else [value])]
            except (TypeError, ValueError):
                numbers = []
            if not numbers or not all(map(math.isfinite, numbers)):
                raise ValueError(f"the label is {value!r}, which is no number")
            return numbers
        if self.settings.problem == "multi_label" and not isinstance(value, list):
            value = ("" if value is None else str(value)).split(self.settings.label_separator)
        names = [label_name(each) for each in (value if isinstance(value, list) else [value])]
        names = [name for name in names if name]
        if self.settings.problem == "single_label" and len(names) != 1:
            raise ValueError(f"the label is {value!r}; it wants to be one" if names else "the label is empty")
        if self.labels and (unknown := [name for name in names if name not in self.labels]):
            raise ValueError(f"the label is {unknown[0]!r}; it wants to be one of {', '.join(self.labels)}")
        return names

    def find_labels(self, rows) -> list[str]:
        """The set of labels: those of the training set, by value where all are numbers."""
        if self.settings.problem == "regression":
            widths = sorted({len(numbers) for numbers in rows["label"]})
            if len(widths) > 1:
                raise ValueError(f"rows have {' and '.join(map(str, widths))} numbers; they want to have as many each")
            return [f"LABEL_{i}" for i in range(widths[0])]
        names = {name for names in rows["label"] for name in names}
        if len(names) < 2:
            raise ValueError(f"there want to be two labels or more; the training set has {', '.join(names) or 'none'}")
        return sorted(names, key=lambda name: (int(name), "") if name.lstrip("-").isdigit() else (0, name))

    def encode(self, rows):
        """The rows as the model takes them."""

        def encode(batch: dict) -> dict:
            encoded = self.tokenizer(
                batch["text"], batch.get("text_pair"), truncation=True, max_length=self.settings.max_length,
                return_attention_mask=False,
            )  # fmt: skip
            labels = [self.target(names) for names in batch["label"]]
            return {**encoded, "labels": labels, "length": [len(ids) for ids in encoded["input_ids"]]}

        return rows.map(encode, batched=True, remove_columns=[name for name in rows.column_names if name != "place"])

    def target(self, names: list):
        """A row's labels as the loss takes them."""
        if self.settings.problem == "regression":
            return names
        if self.settings.problem == "multi_label":
            return [float(name in names) for name in self.labels]
        return self.labels.index(names[0])

    # -- model

    def make_model(self):
        problem = self.settings.problem
        return CLASSES[self.settings.implementation].from_pretrained(
            self.settings.model,
            num_labels=len(self.labels),
            id2label=dict(enumerate(self.labels)),
            label2id={name: i for i, name in enumerate(self.labels)},
            problem_type=problem if problem == "regression" else f"{problem}_classification",
        )

    # -- loss and metrics

    def counts(self, batch):
        """With class weights, rows count as much as they weigh, as in torch's own mean."""
        labels = batch["labels"]
        return (self.weights[labels] if labels.ndim == 1 else torch.ones_like(labels)).sum()[None]

    def losses(self, model, batch):
        inputs = {name: value for name, value in batch.items() if name != "labels"}
        logits, labels = model(**inputs).logits.float(), batch["labels"]
        if self.settings.problem == "regression":
            loss = nn.functional.mse_loss(logits, labels, reduction="sum")
        elif self.settings.problem == "multi_label":
            loss = nn.functional.binary_cross_entropy_with_logits(logits, labels, self.weights, reduction="sum")
        else:
            smoothing = self.settings.label_smoothing
            loss = nn.functional.cross_entropy(logits, labels, self.weights, reduction="sum", label_smoothing=smoothing)
        return loss[None]

    def evaluate(self, model, split):
        def forward(model, batch):
            inputs = {name: value for name, value in batch.items() if name != "labels"}
            return model(**inputs).logits.float().cpu().tolist()

        logits, labels = torch.tensor(self.predict(model, split, forward)), self.splits[split]["labels"]
        options = {"average": "macro"} if self.settings.problem != "regression" else {}
        if self.settings.problem == "regression":
            predictions, labels = logits.flatten().tolist(), [number for row in labels for number in row]
        elif self.settings.problem == "multi_label":
            predictions, labels = (logits > 0).int().tolist(), torch.tensor(list(labels)).int().tolist()
        else:
            predictions = logits.argmax(-1).tolist()
        return compute(self.modules, predictions, list(labels), **options)


def label_name(value) -> str:
    """1 and 1.0, as files of one kind and another have it, are the same label; nothing is ""."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return "" if value is None else str(value).strip()


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code."""
    return loop.main(ClassificationSettings, __doc__, Classification, argv)


if __name__ == "__main__":
    sys.exit(main())
