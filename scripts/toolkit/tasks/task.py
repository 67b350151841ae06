"""The base class of the tasks: opening the tokenizer and the model, and padding examples into a batch."""

import logging
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from safetensors import SafetensorError
from torch.nn.functional import cross_entropy

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

    name: ClassVar[str]
    label_fields: ClassVar[tuple[str, ...]] = ()
    model_class: ClassVar[str]
    txt_format: ClassVar[str] = "lines"
    is_language_model: ClassVar[bool] = False
    grouped_by: ClassVar[Sequence[str]] = ("text",)
    metric_names: Sequence[str]
    lower_is_better: ClassVar[set[str]] = {"loss"}
    labels: list[str] | None = None
    weights: torch.Tensor | None = None
    label_smoothing: float = 0.0

    def __init__(self, arguments: TaskArguments):
        self.arguments = arguments
        self.say: Callable[[str], None] = print
        source = getattr(arguments, "tokenizer_name", None) or arguments.model
        with about(source):
            self.tokenizer = open_tokenizer(source, getattr(arguments, "trust_remote_code", False))
        self.label_counts: Counter[str] = Counter()
        self.new_weights: set[str] = set()

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
        options: dict[str, Any] = {"dtype": torch.float32, "ignore_mismatched_sizes": True, "output_loading_info": True}
        if self.arguments.implementation == "scratchbert":
            options["padding_free"] = True
        source = self.arguments.model
        # The new modules are printed instead.
        logging.getLogger("transformers.modeling_utils").addFilter(is_no_load_report)
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

    def loss(self, model, batch: Batch) -> torch.Tensor:
        """The loss of a batch in the training."""
        return self.loss_of(self.logits(model, batch), batch)

    def answer(self, model, batch: Batch) -> list:
        """What `decode` needs of each example, of a batch without labels; None if the model's numbers are not
        finite."""
        logits = self.logits(model, batch)
        parts = logits if isinstance(logits, tuple) else (logits,)  # at padding they may be -inf
        is_bad = sum(part.flatten(1).isnan().any(1) | part.flatten(1).isposinf().any(1) for part in parts)
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

    def table_by_label(self, rows: list[dict], predictions: list[dict]) -> list[dict]:
        """The metrics of each label; none if the task has no labels."""
        return []


# ------------------------------------------------------------------------------------------------------------- helpers


def pad(examples: list[dict], pad_token_id: int) -> Batch:
    """The fields of examples that have a value for each token, padded on the right: `(B, T)` each."""
    lengths = np.array([len(example["input_ids"]) for example in examples])
    mask = np.arange(lengths.max()) < lengths[:, None]
    batch = {"attention_mask": torch.from_numpy(mask).long()}
    for name, padding in {"input_ids": pad_token_id, "token_type_ids": 0, "labels": IGNORED}.items():
        if isinstance(examples[0].get(name), np.ndarray):
            values = np.full(mask.shape, padding, dtype=np.int64)
            values[mask] = np.concatenate([example[name] for example in examples])
            batch[name] = torch.from_numpy(values)
    return batch


def chunks(rows: Sequence) -> Iterator[tuple[int, Sequence]]:
    """Rows that are tokenised together, with the index of the first of them."""
    for start in range(0, len(rows), ROWS_TOGETHER):
        yield start, rows[start : start + ROWS_TOGETHER]


def encodings(tokenizer, *texts: Sequence, **options) -> Iterator[tuple[int, Any]]:
    """The encodings of texts or pairs of texts, in order, each with the index of its row."""
    for start, chunk in chunks(list(zip(*texts, strict=True))):
        encoded = tokenizer(*map(list, zip(*chunk, strict=True)), verbose=False, **options)
        rows = encoded.get("overflow_to_sample_mapping", range(len(encoded.encodings)))
        for row, encoding in zip(rows, encoded.encodings, strict=True):
            yield start + row, encoding


def example_of(encoding, row: int, cut: int = 0) -> dict:
    """An example, with token types if the encoding is of a pair."""
    ids = np.array(encoding.ids, dtype=np.int32)
    example = {"input_ids": ids, "length": len(ids), "row": row, "cut": cut}
    if any(encoding.type_ids):
        example["token_type_ids"] = np.array(encoding.type_ids, dtype=np.int8)
    return example


def tokenize(tokenizer, texts: list[str], pairs: list[str] | None, max_length: int) -> Iterator[dict]:
    """An example of each text or pair of texts."""
    given = [texts] if pairs is None else [texts, pairs]
    least = tokenizer.num_special_tokens_to_add(pair=pairs is not None) + len(given)
    if max_length < least:
        raise ValueError(f"--max_length is {max_length}; expected at least {least}, for a token of each text.")
    for row, encoding in encodings(tokenizer, *given, truncation=True, max_length=max_length):
        cut = 0
        if encoding.overflowing and pairs is None:
            special = tokenizer.num_special_tokens_to_add()
            cut = sum(len(rest.ids) - special for rest in encoding.overflowing)
        elif encoding.overflowing:
            whole = tokenizer(texts[row], pairs[row], verbose=False)["input_ids"]
            cut = len(whole) - len(encoding.ids)
        yield example_of(encoding, row, cut)


def is_token(batch: Batch) -> torch.Tensor:
    """Where a batch has a token and no padding, `(B, T)`."""
    return batch["attention_mask"].bool()


def inputs_of(batch: Batch) -> Batch:
    """The batch without labels, with which a model would compute a loss of its own."""
    return {name: value for name, value in batch.items() if name in ("input_ids", "attention_mask", "token_type_ids")}


def is_no_load_report(record: logging.LogRecord) -> bool:
    """Whether a log record is none of the tables of missing weights that transformers logs."""
    return "LOAD REPORT" not in str(record.msg)
