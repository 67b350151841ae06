"""Fine-tuning for the classification of texts or pairs of texts: one label, several labels, or numbers."""

import math
from collections import Counter
from collections.abc import Iterable

import torch
from torch import nn
from transformers import BertForSequenceClassification

from modeling_scratchbert import ScratchBertForSequenceClassification
from toolkit.confusion_matrix import plot_confusion
from toolkit.labels import class_weights, in_saved_order, label_fields, label_name, label_order, saved_labels
from toolkit.metrics import CLASSIFICATION_METRICS, classification_metrics, load, mean_loss
from toolkit.row_files import SECOND_TEXTS, TEXTS, find_column, text_of
from toolkit.training.batches import PadOrFlatten
from toolkit.training.rows import columns_of, load_rows, map_rows
from toolkit.training.settings import ClassificationSettings
from toolkit.training.task import Evaluation, FineTuning, check_room, sources, tokenizer_of

LABELS = ("label", "labels", "score")
CLASSES = {"scratchbert": ScratchBertForSequenceClassification, "bert": BertForSequenceClassification}


class Classification(FineTuning):
    """Texts, or pairs of texts, and their labels."""

    name = "text-classification"

    def __init__(self, settings: ClassificationSettings, accelerator):
        super().__init__(settings, accelerator)
        for name in CLASSIFICATION_METRICS[settings.problem]:
            load(name)  # raises before the training if a library is missing
        self.tokenizer = tokenizer_of(settings)
        self.labels, self.saved_labels = settings.labels, None
        if settings.problem != "regression":
            self.saved_labels = saved_labels(settings.model)
        for split, source in sources(settings).items():  # the training set first
            rows = self.read(source)
            self.labels = self.labels or in_saved_order(self.find_labels(rows), self.saved_labels)
            self.rows[split], self.splits[split] = rows, self.encode(rows)
            self.row_counts[split] = len(rows)
        self.train_set = self.splits.pop("train")
        del self.rows["train"]
        self.model = self.make_model()
        counts = Counter(self.labels[label] for label in self.train_set["labels"] if settings.problem == "single_label")
        self.weights = class_weights(settings.class_weights, self.labels, counts).to(accelerator.device)
        self.collate = PadOrFlatten(self.tokenizer, settings.padding_free_collation, per_sequence=["labels"])
        self.metric = settings.metric or settings.metrics[0]
        self.greater_is_better = self.metric != "mean_squared_error"

    # -- data

    def read(self, source):
        """The rows of a split: text, text_pair if there is one, and label."""
        settings, columns = self.settings, columns_of(source)
        text = find_column(columns, settings.text_column, TEXTS, "the text (--text_column)")
        label = find_column(columns, settings.label_column, LABELS, "the label (--label_column)")
        pair = self.find_pair_column(columns)

        def check(row: dict) -> dict:
            if label not in row:
                raise ValueError(f"{label!r} is missing")
            if pair is None and (late := self.default_pair_column(row)):
                raise ValueError(f"there is a second text, {late!r}, unlike in the first rows; expected it in all rows")
            kept = {"text": text_of(row, text), "label": self.read_label(row[label])}
            return kept | ({"text_pair": text_of(row, pair)} if pair else {})

        return load_rows(source, check, settings.on_bad_row, self.accelerator.print)

    def find_pair_column(self, columns: list[str]) -> str | None:
        """The column of the second texts: that of the training set, in every split; None: there are no second texts.

        Raises:
            ValueError: it is missing in this split.
        """
        if not self.splits:  # the training set
            self.pair_column = self.settings.text_pair_column or self.default_pair_column(columns)
        if self.pair_column is not None:
            find_column(columns, self.pair_column, (), "the second text (--text_pair_column)")
        return self.pair_column

    def default_pair_column(self, columns: Iterable[str]) -> str | None:
        """The column of second texts with a usual name. With --text_column, flags name all columns."""
        is_default = self.settings.text_column is None and self.settings.text_pair_column is None
        return next((name for name in SECOND_TEXTS if name in columns), None) if is_default else None

    def read_label(self, value) -> list:
        """The labels, or the numbers, of a row.

        Raises:
            ValueError: there are none, one is not among the labels, or there are not as many numbers as labels.
        """
        if self.settings.problem == "regression":
            try:
                numbers = [float(number) for number in (value if isinstance(value, list) else [value])]
            except (TypeError, ValueError):
                numbers = []
            if not numbers or not all(map(math.isfinite, numbers)):
                raise ValueError(f"the label is {value!r}; expected finite numbers")
            if self.labels and len(numbers) != len(self.labels):
                raise ValueError(f"the label is {value!r}; expected {len(self.labels)} numbers")
            return numbers
        if self.settings.problem == "multi_label" and not isinstance(value, list):
            value = ("" if value is None else str(value)).split(self.settings.label_separator)
        names = [label_name(each) for each in (value if isinstance(value, list) else [value])]
        names = [name for name in names if name]
        if self.settings.problem == "single_label" and len(names) != 1:
            raise ValueError(f"the label is {value!r}; expected one label" if names else "the label is empty")
        if len(set(names)) < len(names):
            raise ValueError(f"the label is {value!r}; expected the name of each label once, not 0 or 1 for each label")
        if self.labels and (unknown := [name for name in names if name not in self.labels]):
            raise ValueError(f"the label is {unknown[0]!r}; expected one of {', '.join(self.labels)}")
        return names

    def find_labels(self, rows) -> list[str]:
        """The labels of the training set, numbers sorted by value."""
        if self.settings.problem == "regression":
            widths = sorted({len(numbers) for numbers in rows["label"]})
            if len(widths) > 1:
                raise ValueError(f"rows have {' and '.join(map(str, widths))} numbers; expected as many in each")
            return [f"LABEL_{i}" for i in range(widths[0])]
        names = {name for names in rows["label"] for name in names}
        if len(names) < 2:
            raise ValueError(f"the training set has the labels {', '.join(names) or 'none'}; expected two or more")
        return sorted(names, key=label_order)

    def encode(self, rows):
        """The rows as inputs of the model."""
        check_room("max_length", self.settings, self.tokenizer, texts=1 + ("text_pair" in rows.column_names))

        def encode(batch: dict) -> dict:
            encoded = self.tokenizer(
                batch["text"], batch.get("text_pair"), truncation=True, max_length=self.settings.max_length,
                return_attention_mask=False,
            )  # fmt: skip
            labels = [self.target(names) for names in batch["label"]]
            return {**encoded, "labels": labels, "length": [len(ids) for ids in encoded["input_ids"]]}

        return map_rows(
            rows, encode, batched=True, remove_columns=[name for name in rows.column_names if name != "place"]
        )

    def target(self, names: list):
        """A row's labels as the loss expects them."""
        if self.settings.problem == "regression":
            return names
        if self.settings.problem == "multi_label":
            return [float(name in names) for name in self.labels]
        return self.labels.index(names[0])

    def shown(self, example):
        labels = example["labels"]
        if self.settings.problem == "single_label":
            labels = self.labels[labels]
        elif self.settings.problem == "multi_label":
            labels = [label for label, is_given in zip(self.labels, labels, strict=True) if is_given]
        return f"{super().shown(example)} → {labels}"

    # -- model

    def make_model(self):
        problem = self.settings.problem
        return self.open_model(
            CLASSES[self.settings.implementation].from_pretrained,
            new_head=self.saved_labels not in (None, self.labels),
            **label_fields(self.labels),
            problem_type=problem if problem == "regression" else f"{problem}_classification",
        )

    # -- loss and metrics

    def counts(self, batch):
        """The sum of the class weights, as in the mean of torch's losses."""
        labels = batch["labels"]
        return (self.weights[labels] if labels.ndim == 1 else torch.ones_like(labels)).sum()[None]

    def losses(self, model, batch):
        return self.losses_of(self.logits(model, batch), batch)

    def logits(self, model, batch) -> torch.Tensor:
        """`(B, L)`."""
        return model(**{name: value for name, value in batch.items() if name != "labels"}).logits.float()

    def losses_of(self, logits: torch.Tensor, batch: dict) -> torch.Tensor:
        """As `losses`, of these logits."""
        labels = batch["labels"]
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
            logits = self.logits(model, batch)
            return logits.tolist(), [self.losses_of(logits, batch).item(), self.counts(batch).item()]

        scores, sums = self.predict(model, split, forward)
        logits, labels = torch.tensor(scores), self.splits[split]["labels"]
        if self.settings.problem == "regression":
            metrics = classification_metrics("regression", logits.tolist(), torch.tensor(list(labels)).tolist())
            return Evaluation({"loss": mean_loss(*sums)} | metrics, self.predictions(split, logits))
        if self.settings.problem == "multi_label":
            predictions, labels = (logits > 0).int().tolist(), torch.tensor(list(labels)).int().tolist()
        else:
            predictions = logits.argmax(-1).tolist()
        metrics = classification_metrics(self.settings.problem, predictions, list(labels))
        return Evaluation({"loss": mean_loss(*sums)} | metrics, self.predictions(split, logits))

    def predictions(self, split: str, logits: torch.Tensor) -> list[dict]:
        """The rows with the predicted label and its probability; several labels, or the numbers."""
        problem, rows = self.settings.problem, self.rows[split]
        if problem == "regression":
            found = [{"prediction": numbers} for numbers in logits.tolist()]
        elif problem == "multi_label":
            scores = logits.sigmoid().tolist()
            found = [
                {"prediction": [label for label, score in zip(self.labels, row, strict=True) if score > 0.5],
                 "scores": dict(zip(self.labels, row, strict=True))}
                for row in scores
            ]  # fmt: skip
        else:
            best = logits.softmax(-1).max(-1)
            found = [
                {"prediction": self.labels[label], "score": score}
                for score, label in zip(best.values.tolist(), best.indices.tolist(), strict=True)
            ]
        one = problem == "single_label"
        return [
            {**row, "label": row["label"][0] if one else row["label"], **own}
            for row, own in zip(rows, found, strict=True)
        ]

    def write_predictions(self, folder, predictions):
        """Also draws the confusion matrix of the test set or, without one, of the validation set."""
        super().write_predictions(folder, predictions)
        split = "test" if "test" in predictions else "validation"
        if self.settings.problem == "single_label" and split in predictions:
            references, predicted = ([row[name] for row in predictions[split]] for name in ("label", "prediction"))
            plot_confusion(folder / "confusion_matrix.png", self.labels, references, predicted, f"{split} set")
