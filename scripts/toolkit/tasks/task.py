"""The base class of the tasks: opening the tokenizer and the model, and padding examples into a batch."""

import logging
import tempfile
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import numpy as np
import torch
from safetensors import SafetensorError

from toolkit.cli import about
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
        metric_names: the metrics that can select the best model, besides the loss; the first one does by default.
        lower_is_better: the metrics of which a lower value is better.
        labels: the names of the labels, once `prepare` has been called; None: the task has no labels.
        label_counts: how often each label occurs in the training rows.
        say: prints a remark.
        label_smoothing: the share of each label's weight that is spread over all labels, in the training; see
            `smoothing`.
        new_weights: the parameters that the checkpoint lacks. They are random before the training.
    """

    name: ClassVar[str]
    label_fields: ClassVar[tuple[str, ...]] = ()
    model_class: ClassVar[str]
    txt_format: ClassVar[str] = "lines"
    is_language_model: ClassVar[bool] = False
    metric_names: Sequence[str]
    lower_is_better: ClassVar[set[str]] = {"loss"}
    labels: list[str] | None = None
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

    @abstractmethod
    def group_key(self, row: dict) -> Hashable:
        """Rows with equal keys, such as copies of a text, are on the same side of --validation_fraction."""

    def stratum(self, row: dict) -> object:
        """Rows of each stratum have the same share in --validation_fraction."""
        return None

    @abstractmethod
    def encode(self, rows: list[dict]) -> list[dict]:
        """The examples of rows."""

    def collate(self, examples: list[dict], seed: Sequence[int] = ()) -> Batch:
        """A batch of examples, padded.

        Args:
            seed: of what is drawn in each epoch of the training, such as masked words. Empty in an evaluation.
        """
        return pad(examples, self.tokenizer.pad_token_id)

    # -- model

    def open_model(self):
        """The model of --model in float32, with padding removed inside; sets `new_weights`."""
        return self.load(self.choose_class().from_pretrained, self.arguments.model)

    def choose_class(self) -> type:
        import transformers

        import modeling_scratchbert

        is_ours = self.arguments.implementation == "scratchbert"
        model = self.arguments.model
        if not is_ours and read_config(model).get("model_type") == "scratchbert":
            raise ValueError(f"--implementation is bert and --model {model} is a ScratchBert; expected scratchbert.")
        return getattr(
            *(modeling_scratchbert, f"ScratchBert{self.model_class}")
            if is_ours
            else (transformers, f"Bert{self.model_class}")
        )

    def load(self, opener, source: str, **fields):
        """A model, opened by `from_pretrained` of a class or a method like it, with fields of its configuration.

        Raises:
            ValueError: the weights are damaged, one below the model head has another shape than in the configuration,
                or the tokenizer has more tokens than the model.
        """
        # An update is often too small for a weight in half precision. --bf16 keeps float32 weights as well.
        options: dict[str, Any] = {"dtype": torch.float32, "ignore_mismatched_sizes": True, "output_loading_info": True}
        if self.arguments.implementation == "scratchbert":
            options["padding_free"] = True
        try:
            with without_loading_reports():
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

    @abstractmethod
    def count(self, batch: Batch) -> torch.Tensor:
        """The number of labels in a batch, or the sum of their weights, on its device. The loss of an update is divided
        by it."""

    def logits(self, model, batch: Batch) -> Any:
        """The scores that the loss and the predictions are computed from."""
        return model(**inputs_of(batch)).logits.float()

    @property
    def smoothing(self) -> float:
        """The label smoothing of a loss: none in an evaluation."""
        return self.label_smoothing if torch.is_grad_enabled() else 0.0

    @abstractmethod
    def loss_of(self, logits, batch: Batch) -> torch.Tensor:
        """The loss, summed over the labels of a batch."""

    @abstractmethod
    def outputs_of(self, logits, batch: Batch) -> list:
        """What `decode` needs of each example."""

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

    @abstractmethod
    def decode(self, rows: list[dict], examples: list[dict], outputs: list) -> list[dict]:
        """The prediction of each row, from the outputs of the examples."""

    @abstractmethod
    def metrics(self, rows: list[dict], predictions: list[dict]) -> dict[str, float]:
        """The metrics of a split, in which each row counts once."""

    def table_by_label(self, rows: list[dict], predictions: list[dict]) -> list[dict]:
        """The metrics of each label; none if the task has no labels."""
        return []


# ------------------------------------------------------------------------------------------------------------- helpers


def pad(examples: list[dict], pad_token_id: int) -> Batch:
    """The inputs of examples, padded on the right to the longest one: `(B, T)` each."""
    lengths = np.array([example["length"] for example in examples])
    mask = np.arange(lengths.max()) < lengths[:, None]
    batch = {
        "input_ids": filled(mask, examples, "input_ids", pad_token_id),
        "attention_mask": torch.from_numpy(mask).long(),
    }
    if "token_type_ids" in examples[0]:
        batch["token_type_ids"] = filled(mask, examples, "token_type_ids", 0)
    return batch


def filled(mask: np.ndarray, examples: list[dict], name: str, padding: int) -> torch.Tensor:
    """A field with a value for each token, `(B, T)`."""
    values = np.full(mask.shape, padding, dtype=np.int64)
    values[mask] = np.concatenate([example[name] for example in examples])
    return torch.from_numpy(values)


def tokenize(tokenizer, texts: list[str], pairs: list[str] | None, max_length: int) -> Iterator[dict]:
    """For each text or pair of texts its ids, token types if it is a pair, length, and number of tokens cut off."""
    least = tokenizer.num_special_tokens_to_add(pair=pairs is not None) + (1 if pairs is None else 2)
    if max_length < least:
        raise ValueError(f"--max_length is {max_length}; expected at least {least}, for a token of each text.")
    encoded = tokenizer(texts, pairs, truncation=True, max_length=max_length)
    long = [i for i, encoding in enumerate(encoded.encodings) if encoding.overflowing]
    cuts = dict.fromkeys(long, 0)
    if pairs:
        whole = (
            tokenizer([texts[i] for i in long], [pairs[i] for i in long], verbose=False) if long else {"input_ids": []}
        )
        cuts = {i: len(ids) - max_length for i, ids in zip(long, whole["input_ids"], strict=True)}
    else:
        special = tokenizer.num_special_tokens_to_add()
        cuts = {i: sum(len(rest.ids) - special for rest in encoded.encodings[i].overflowing) for i in long}
    for i, ids in enumerate(encoded["input_ids"]):
        cut = cuts.get(i, 0)
        example = {"input_ids": np.array(ids, dtype=np.int32), "length": len(ids), "cut": cut}
        if pairs:
            example["token_type_ids"] = np.array(encoded["token_type_ids"][i], dtype=np.int8)
        yield example


def chunks(rows: Sequence[dict]) -> Iterator[tuple[int, Sequence[dict]]]:
    """Rows that are tokenised together, with the index of the first of them."""
    for start in range(0, len(rows), ROWS_TOGETHER):
        yield start, rows[start : start + ROWS_TOGETHER]


def is_token(batch: Batch) -> torch.Tensor:
    """Where a batch has a token and no padding, `(B, T)`."""
    return batch["attention_mask"].bool()


def compute(metric: type, predictions: list, references: list) -> dict[str, float]:
    """The values of a metric of `evaluate`, a class beside its task, without a network or a cache."""
    with tempfile.TemporaryDirectory() as folder:
        values = metric(keep_in_memory=True, cache_dir=folder).compute(predictions=predictions, references=references)
    return {name: float(value) for name, value in values.items()}


def inputs_of(batch: Batch) -> Batch:
    """The batch without labels, with which a model would compute a loss of its own."""
    return {name: value for name, value in batch.items() if name in ("input_ids", "attention_mask", "token_type_ids")}


@contextmanager
def without_loading_reports() -> Iterator[None]:
    """Hides the table of missing weights that transformers logs. The new modules are printed instead."""
    logger = logging.getLogger("transformers.modeling_utils")

    def is_other(record: logging.LogRecord) -> bool:
        return "LOAD REPORT" not in str(record.msg)

    logger.addFilter(is_other)
    try:
        yield
    finally:
        logger.removeFilter(is_other)


def modules_of(names: Iterable[str]) -> list[str]:
    """The modules that have these parameters, at most three levels deep."""
    return sorted({".".join(name.split(".")[:-1][:3]) for name in names})
