"""The base class of the tasks: opening the tokenizer and the model, and padding examples into a batch."""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence

from toolkit.common import about
from toolkit.hub import check_vocabulary, open_tokenizer, read_config
from toolkit.tasks.arguments import TaskArguments

IGNORED = -100  # the label that torch's cross-entropy ignores
ROWS_TOGETHER = 1000  # that the tokenizer gets at once

Batch = dict[str, torch.Tensor]


class Task(ABC):
    """A task. A row is a dict that `read` returns. An example is an input of the model: a dict with `input_ids`,
    `length`, its number of tokens, by which batches are made; `row`, the index of its row; and `cut`, the number of
    tokens that --max_length cut off.

    Attributes:
        name: of the task on the Hub, such as "text-classification".
        label_fields: the fields of a row that `metrics` needs.
        model_class: of this package, without "ScratchBert".
        txt_format: how .txt is read; see `toolkit.data.File`.
        is_language_model: whether the loss is per token, so that the perplexity is a metric.
        grouped_by: fields of a row. Rows in which they are equal, such as copies of a text, are on the same side of
            --validation_fraction.
        metric_names: the metrics that can select the best model, besides the loss; the first one does by default.
        lower_is_better: the metrics of which a lower value is better.
        labels: the names of the labels, once `prepare` has been called; None: the task has no labels.
        label_counts: how often each label occurs in the training rows.
        weights: of the labels in the loss, `(L,)`; None: all weigh 1.
        say: prints a remark.
        label_smoothing: the share of each label's weight that is spread over all labels, in the training.
        new_weights: the parameters that the checkpoint lacks. They are random before the training.
    """

    name: str
    label_fields: Sequence[str] = ()
    model_class: str
    txt_format = ".txt"
    is_language_model = False
    grouped_by: Sequence[str] = ("text",)
    metric_names: Sequence[str]
    lower_is_better: Sequence[str] = ("loss",)
    labels: list[str] | None = None
    weights: torch.Tensor | None = None
    label_smoothing: float = 0.0

    def __init__(self, arguments: TaskArguments):
        self.arguments = arguments
        self.say = print
        source = getattr(arguments, "tokenizer_name", None) or arguments.model
        with about(source):
            self.tokenizer = open_tokenizer(source, getattr(arguments, "trust_remote_code", False))
        self.label_counts = Counter()
        self.new_weights = set()

    # -- data

    @abstractmethod
    def find_inputs(self, columns: list[str]) -> str:
        """Finds the columns of the model's input, and describes what is read as what.

        Raises:
            ValueError: a column is missing.
        """

    def find_labels(self, columns: list[str]) -> str:
        """The same for the columns of what the model is trained to return, if it is more than the input. `find_inputs`
        comes first."""
        return ""

    @abstractmethod
    def read_inputs(self, content: dict) -> dict:
        """The fields of the input of a row. Raises ValueError if it cannot be used."""

    def read_labels(self, content: dict) -> dict:
        """The fields of what is to be returned for a row. Raises ValueError if it cannot be used."""
        return {}

    def find_columns(self, columns: list[str]) -> str:
        return ", ".join(filter(None, [self.find_inputs(columns), self.find_labels(columns)]))

    def read(self, content: dict) -> dict:
        """The fields of a row. Raises ValueError if it cannot be used."""
        return {**self.read_inputs(content), **self.read_labels(content)}

    def prepare(self, rows: list[dict]) -> Iterator[str]:
        """Learns from the training rows what the model depends on, such as the labels. Yields remarks to print."""
        yield from ()

    def restore(self) -> None:  # noqa: B027
        """Takes from --model what `prepare` learns otherwise, for an evaluation without training."""

    def stratum(self, row: dict) -> object:
        """Rows of each stratum have the same share in --validation_fraction."""
        return None

    @abstractmethod
    def encode(self, rows: list[dict]) -> list[dict]:
        """The examples of rows, with labels if the rows have them."""

    def collate(self, examples: list[dict], seed: Sequence[int] = ()) -> Batch:
        """A batch of examples, padded.

        Args:
            seed: of what is drawn in each epoch of the training, such as masked words. Empty in an evaluation.
        """
        return pad(examples, self.tokenizer.pad_token_id)

    # -- model

    def open_model(self, **fields):
        """The model of --model in float32, with padding removed inside; sets `new_weights`.

        Args:
            fields: of its configuration.
        """
        return self.load(self.choose_class().from_pretrained, **fields)

    def choose_class(self) -> type:
        import transformers

        import modeling_scratchbert

        if self.arguments.implementation == "scratchbert":
            return getattr(modeling_scratchbert, f"ScratchBert{self.model_class}")
        model = self.arguments.model
        if read_config(model).get("model_type") == "scratchbert":
            raise ValueError(f"--implementation is bert and --model {model} is a ScratchBert; expected scratchbert.")
        return getattr(transformers, f"Bert{self.model_class}")

    def load(self, opener: Callable, **fields):
        """The model of --model, opened by `from_pretrained` of a class or a method like it, with fields of its
        configuration.

        Raises:
            ValueError: the weights are damaged, one below the model head has another shape than in the configuration,
                or the tokenizer has more tokens than the model.
        """
        # An update is often too small for a weight in half precision. --bf16 keeps float32 weights as well.
        options = {"dtype": torch.float32, "ignore_mismatched_sizes": True, "output_loading_info": True}
        if self.arguments.implementation == "scratchbert":
            options["padding_free"] = True
        source = self.arguments.model
        try:
            model, info = opener(source, **options, **fields)
        except SafetensorError as error:
            raise ValueError(f"--model {source} has damaged weights: {error}; expected complete files.") from error
        for name, stored, expected in sorted(info["mismatched_keys"]):
            if name.startswith(f"{model.base_model_prefix}."):
                raise ValueError(
                    f"--model {source} has {name} of shape {tuple(stored)}; expected {tuple(expected)}, as in its "
                    "config.json."
                )
        self.new_weights = set(info["missing_keys"]) | {name for name, *_ in info["mismatched_keys"]}
        check_vocabulary(len(self.tokenizer), model.config)
        return model

    # -- loss and metrics

    def count(self, batch: Batch) -> torch.Tensor:
        """The number of labels in a batch, or the sum of their weights, on its device. The loss of an update is divided
        by it."""
        labels = batch["labels"]
        counted = labels != IGNORED
        return counted.sum() if self.weights is None else self.weights.to(labels.device)[labels[counted]].sum()

    def logits(self, model, batch: Batch) -> Any:
        """The scores that the loss and the predictions are computed from."""
        return model(**inputs_of(batch)).logits.float()

    def loss_of(self, logits, batch: Batch) -> torch.Tensor:
        """The loss, summed over the labels of a batch. In an evaluation it is not smoothed."""
        return cross_entropy(
            logits.flatten(0, -2),
            batch["labels"].flatten(),
            None if self.weights is None else self.weights.to(logits.device),
            ignore_index=IGNORED,
            reduction="sum",
            label_smoothing=self.label_smoothing if torch.is_grad_enabled() else 0.0,
        )

    def outputs_of(self, logits, batch: Batch) -> list:
        """What `decode` needs of each example."""
        return [None] * len(batch["input_ids"])

    def answer(self, model, batch: Batch) -> list:
        """What `decode` needs of each example, of a batch without labels; None if the model's numbers are not
        finite."""
        logits = self.logits(model, batch)
        numbers = logits.flatten(1)
        is_bad = (numbers.isnan() | numbers.isposinf()).any(1)  # at padding they may be -inf
        outputs = self.outputs_of(logits, batch)
        return [None if bad else output for bad, output in zip(is_bad.tolist(), outputs, strict=True)]

    def predict(self, model, batch: Batch) -> tuple[list, torch.Tensor]:
        """What `decode` needs of each example, and the loss."""
        logits = self.logits(model, batch)
        return self.outputs_of(logits, batch), self.loss_of(logits, batch)

    def tune(self, rows: list[dict], examples: list[dict], outputs: list) -> None:  # noqa: B027
        """Chooses what depends on the outputs for the validation rows, such as a threshold, before `decode`."""

    def save_settings(self, config) -> None:
        """Notes in the model's configuration or tokenizer what predictions depend on, before both are saved."""
        self.tokenizer.model_max_length = self.arguments.max_length

    def decode(self, rows: list[dict], examples: list[dict], outputs: list) -> list[dict]:
        """The prediction of each row, from the outputs of the examples; none if the task predicts nothing of a row."""
        return []

    def metrics(self, rows: list[dict], predictions: list[dict]) -> dict[str, float]:
        """The metrics of a split besides the loss. Each row counts once."""
        return {}

    def table_by_label(self, rows: list[dict], predictions: list[dict]) -> list[dict] | dict[str, Sequence]:
        """The metrics of each label, as rows or columns; none if the task has no labels."""
        return []


# ------------------------------------------------------------------------------------------------------------- helpers


def pad(examples: list[dict], pad_token_id: int) -> Batch:
    """The inputs and targets of examples. Arrays, with a value for each token, are padded on the right: `(B, T)`."""
    batch = {"attention_mask": padded([np.ones(len(example["input_ids"])) for example in examples], 0)}
    for name, padding in {"input_ids": pad_token_id, "token_type_ids": 0, "labels": IGNORED}.items():
        if name in examples[0]:
            values = [example[name] for example in examples]
            is_array = isinstance(values[0], np.ndarray)
            batch[name] = padded(values, padding) if is_array else torch.tensor(values)
    return batch


def padded(arrays: list[np.ndarray], padding: int) -> torch.Tensor:
    return pad_sequence(list(map(torch.from_numpy, arrays)), batch_first=True, padding_value=padding).long()


def encodings(tokenizer, *texts: Sequence, **options) -> Iterator[tuple[int, Any]]:
    """The encodings of texts or pairs of texts, in order, each with the index of its row. With `stride`, a row has an
    encoding for each window."""
    rows = list(zip(*texts, strict=True))
    for start in range(0, len(rows), ROWS_TOGETHER):
        chunk = rows[start : start + ROWS_TOGETHER]
        encoded = tokenizer(
            *map(list, zip(*chunk, strict=True)),
            verbose=False,
            return_overflowing_tokens="stride" in options,
            **options,
        )
        numbers = encoded.get("overflow_to_sample_mapping", range(len(chunk)))
        for number, encoding in zip(numbers, encoded.encodings, strict=True):
            yield start + number, encoding


def example_of(encoding, row: int, cut: int = 0) -> dict:
    """An example, with token types if the encoding is of a pair."""
    ids = np.array(encoding.ids, dtype=np.int32)
    example = {"input_ids": ids, "length": len(ids), "row": row, "cut": cut}
    if any(encoding.type_ids):
        example["token_type_ids"] = np.array(encoding.type_ids, dtype=np.int8)
    return example


def tokenize(tokenizer, max_length: int, *texts: list[str]) -> Iterator[dict]:
    """An example of each text or pair of texts."""
    is_pair = len(texts) == 2
    special = tokenizer.num_special_tokens_to_add(is_pair)
    least = special + len(texts)
    if max_length < least:
        raise ValueError(f"--max_length is {max_length}; expected at least {least}, for a token of each text.")
    for row, encoding in encodings(tokenizer, *texts, truncation=True, max_length=max_length):
        cut = sum(len(rest.ids) - special for rest in encoding.overflowing)
        if cut and is_pair:  # the rest of a pair has tokens twice
            whole = tokenizer(*(own[row] for own in texts), verbose=False)["input_ids"]
            cut = len(whole) - len(encoding.ids)
        yield example_of(encoding, row, cut)


def inputs_of(batch: Batch) -> Batch:
    """The batch without labels, with which a model would compute a loss of its own."""
    return {name: value for name, value in batch.items() if name in ("input_ids", "attention_mask", "token_type_ids")}
