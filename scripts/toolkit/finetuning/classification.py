"""Fine-tuning for the classification of texts or pairs of texts: one label, several labels, or numbers."""

from collections import Counter
from collections.abc import Iterable

import torch
from torch import nn
from transformers import BertForSequenceClassification

from modeling_scratchbert import ScratchBertForSequenceClassification
from toolkit.cli import require
from toolkit.confusion_matrix import plot_confusion
from toolkit.finetuning.batches import PadOrFlatten
from toolkit.finetuning.checks import check_room, tokenizer_of
from toolkit.finetuning.rows import map_rows
from toolkit.finetuning.task import Evaluation, Task
from toolkit.finetuning.task_settings import ClassificationSettings
from toolkit.labels import class_weights, in_saved_order, label_order, read_labels, saved_labels, trained_labels
from toolkit.metrics import classification_metrics, mean_loss
from toolkit.row_files import SECOND_TEXTS, TEXTS, find_column, text_of

LABELS = ("label", "labels", "score")
CLASSES = {"scratchbert": ScratchBertForSequenceClassification, "bert": BertForSequenceClassification}


class Classification(Task):
    """Texts, or pairs of texts, and their labels."""

    name = "text-classification"

    def __init__(self, settings: ClassificationSettings, accelerator):
        super().__init__(settings, accelerator)
        require("sklearn")  # raises before the training if it is missing
        self.tokenizer = tokenizer_of(settings)
        self.labels = settings.labels
        self.saved_labels = None if settings.problem == "regression" else saved_labels(settings.model)
        if settings.evaluate_only:
            self.labels = trained_labels(settings.model, "ForSequenceClassification", self.problem_type)
        self.encode_splits()
        self.model = self.open_labelled(CLASSES[settings.implementation], problem_type=self.problem_type)
        if self.train_set is None:
            self.label_counts = self.saved_label_counts()
        elif settings.problem == "single_label":
            self.label_counts = Counter(self.labels[label] for label in self.train_set["labels"])
        self.weights = class_weights(settings.class_weights, self.labels, self.label_counts).to(accelerator.device)
        self.collate = PadOrFlatten(self.tokenizer, settings.padding_free_collation, per_sequence=["labels"])
        self.metric = settings.metric or settings.metrics[0]
        self.greater_is_better = self.metric != "mean_squared_error"

    # -- data

    def read(self, source):
        """The rows of a split: text, text_pair if there is one, and label. Sets the labels if none are known."""
        settings, columns = self.settings, source.columns()
        text = find_column(columns, settings.text_column, TEXTS, "the text (--text_column)")
        label = find_column(columns, settings.label_column, LABELS, "the label (--label_column)")
        if not self.splits:  # the second texts of the training set are in every split, or in none
            self.pair_column = settings.text_pair_column or self.default_pair_column(columns)
        if (pair := self.pair_column) is not None:
            find_column(columns, pair, (), "the second text (--text_pair_column)")

        def check(row: dict) -> dict:
            if label not in row:
                raise ValueError(f"{label!r} is missing")
            if pair is None and (late := self.default_pair_column(row)):
                raise ValueError(f"there is a second text, {late!r}, unlike in the first rows; expected it in all rows")
            kept = {"text": text_of(row, text)} | ({"text_pair": text_of(row, pair)} if pair else {})
            return kept | {"label": read_labels(row[label], settings.problem, self.labels, settings.label_separator)}

        rows = self.load(source, check)
        if not self.labels:
            self.labels = in_saved_order(self.find_labels(rows, source.label_names(label)), self.saved_labels)
        return rows

    def default_pair_column(self, columns: Iterable[str]) -> str | None:
        """The column of second texts with a usual name. With --text_column, flags name all columns."""
        is_default = self.settings.text_column is None and self.settings.text_pair_column is None
        return next((name for name in SECOND_TEXTS if name in columns), None) if is_default else None

    def find_labels(self, rows, names: list[str]) -> list[str]:
        """The labels of the training set in the order of the dataset, `names`, or, if it has none, numbers sorted by
        value.

        Raises:
            ValueError: there are fewer than two, or one is a decimal number; or rows have several numbers of numbers.
        """
        if self.settings.problem == "regression":
            widths = sorted({len(numbers) for numbers in rows["label"]})
            if len(widths) > 1:
                raise ValueError(f"rows have {' and '.join(map(str, widths))} numbers; expected as many in each")
            return [f"LABEL_{i}" for i in range(widths[0])]
        found = sorted({name for names in rows["label"] for name in names}, key=label_order)
        if len(found) < 2:
            raise ValueError(f"the training set has the labels {', '.join(found) or 'none'}; expected two or more")
        if set(found) <= set(names):
            return names
        values, are_texts, _ = zip(*map(label_order, found), strict=True)
        if self.settings.problem == "single_label" and not any(are_texts) and any(value % 1 for value in values):
            decimal = next(name for name, value in zip(found, values, strict=True) if value % 1)
            raise ValueError(
                f"the labels are numbers such as {decimal}; expected --problem regression, which predicts "
                f"a number. If they are names of {len(found)} classes, give them: --labels "
                f"{' '.join(found[:3])} …"
            )
        return found

    def strata(self, rows):
        """The labels; those of one row, which cannot be in both sets, are in one group with the most frequent one."""
        if self.settings.problem != "single_label":
            return None
        counts = Counter(label for [label] in rows["label"])
        [(most_frequent, _)] = counts.most_common(1)
        return [label if counts[label] > 1 else most_frequent for [label] in rows["label"]]

    def encode(self, rows):
        """The rows as inputs of the model."""
        check_room("max_length", self.settings, self.tokenizer, texts=1 + ("text_pair" in rows.column_names))

        def encode(batch: dict) -> dict:
            encoded = self.tokenizer(
                batch["text"],
                batch.get("text_pair"),
                truncation=True,
                max_length=self.settings.max_length,
                return_attention_mask=False,
            )
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

    @property
    def problem_type(self) -> str:
        """As a model's configuration has it."""
        problem = self.settings.problem
        return problem if problem == "regression" else f"{problem}_classification"

    # -- loss and metrics

    def counts(self, batch):
        """The sum of the class weights, as in the mean of torch's losses."""
        labels = batch["labels"]
        return (self.weights[labels] if labels.ndim == 1 else torch.ones_like(labels)).sum()[None]

    def losses_of(self, logits, batch):
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
        logits, problem = torch.tensor(scores), self.settings.problem
        found = {"regression": logits, "multi_label": (logits > 0).int()}.get(problem, logits.argmax(-1))
        references = torch.tensor(list(self.splits[split]["labels"])).to(found.dtype)
        metrics = classification_metrics(problem, found.tolist(), references.tolist())
        return Evaluation({"loss": mean_loss(*sums)} | metrics, self.predictions(split, logits))

    def predictions(self, split: str, logits: torch.Tensor) -> list[dict]:
        """The rows with the predicted label and its probability; several labels, or the numbers."""
        problem, rows = self.settings.problem, self.rows[split]
        if problem == "regression":
            return self.joined(rows, [{"prediction": numbers} for numbers in logits.tolist()])
        probabilities = logits.sigmoid() if problem == "multi_label" else logits.softmax(-1)
        scores = [dict(zip(self.labels, row, strict=True)) for row in probabilities.tolist()]
        if problem == "multi_label":
            found = [{"prediction": [name for name in row if row[name] > 0.5], "scores": row} for row in scores]
            return self.joined(rows, found)
        best = [self.labels[label] for label in logits.argmax(-1)]
        found = [
            {"label": row["label"][0], "prediction": label, "score": own[label]}
            | ({"scores": own} if self.settings.all_scores else {})
            for row, label, own in zip(rows, best, scores, strict=True)
        ]
        return self.joined(rows, found)

    def write_predictions(self, folder, predictions):
        """Also draws the confusion matrix of the test set or, without one, of the validation set."""
        super().write_predictions(folder, predictions)
        split = "test" if "test" in predictions else "validation"
        if self.settings.problem == "single_label" and split in predictions:
            references, predicted = ([row[name] for row in predictions[split]] for name in ("label", "prediction"))
            plot_confusion(folder / "confusion_matrix.png", self.labels, references, predicted, f"{split} set")
