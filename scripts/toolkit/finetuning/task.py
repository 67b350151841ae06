"""The base class of the training tasks."""

import functools
import json
import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from datasets import Dataset
from torch.utils.data import DataLoader

from toolkit.cli import CommandError
from toolkit.files import read_json_object, to_json, write_text
from toolkit.finetuning.batches import LengthGroupedBatches, evaluation_batches
from toolkit.finetuning.fingerprint import fingerprint
from toolkit.finetuning.output import has_checkpoint
from toolkit.finetuning.rows import Check, load_rows
from toolkit.finetuning.settings import Settings
from toolkit.inputs import HubDataset, Readers, Source, open_files
from toolkit.labels import label_fields
from toolkit.tasks.labels import initialise_head
from toolkit.tasks.task import without_loading_reports

# In the folder of a finished run.
METRICS = "metrics.json"

# The end of the messages about numbers that are not finite.
AFTER_DIVERGENCE = (
    "The last checkpoint has the weights from before; a lower --learning_rate or --mixed_precision no may help."
)


class TrainingError(CommandError):
    """The run cannot continue. Its checkpoints are still there."""

    def __init__(self, message: str):
        super().__init__(message, exit_code=1)


@dataclass
class Evaluation:
    """The result of an evaluation.

    Attributes:
        metrics: by name; one of them is `loss`.
        predictions: for each row, in order, what is written to predictions_SPLIT.jsonl.
    """

    metrics: dict[str, float]
    predictions: list[dict]


class Task(ABC):
    """A training task: a model, data, a loss and metrics. Its examples are in memory, in a `datasets.Dataset` with the
    columns that `collate` expects, `place`, and `length`, the number of tokens.

    Attributes:
        name: the Hub's name of the task, such as "text-classification".
        model, tokenizer: of transformers.
        new_weights: the names of the parameters that the checkpoint lacks. They are random, so no flag freezes them.
        train_set: the examples to train on, if there are any; `splits`: those of "validation" and "test".
        rows: the rows of these splits, if metrics are computed from the rows.
        row_counts: the number of rows of each split and of "train"; empty if the sequences do not follow the rows.
        label_counts: how often each label, of one for each row or word, occurs in the training set.
        metric: the name of the metric that selects the best checkpoint; `greater_is_better`: in which direction. Of
            checkpoints with the same value, the one with the lowest loss is the best.
        evaluates_at_start: whether the model is evaluated before the first update, as step 0.
        collate: turns examples into a batch, a dict of tensors.
        readers: of files that this task reads in another way than others; see `InputFile`.
    """

    name: str
    metric: str
    greater_is_better = True
    evaluates_at_start = False
    train_set: Dataset | None = None
    collate: Callable[[list[dict]], dict]
    readers: Readers | None = None

    def __init__(self, settings: Settings, accelerator: Accelerator):
        self.settings, self.accelerator = settings, accelerator
        self.splits, self.rows, self.row_counts, self.label_counts = {}, {}, {}, Counter()
        self.new_weights: set[str] = set()

    def open_model(self, open_checkpoint: Callable, *, new_head: bool = False, **fields):
        """The model of --model in float32, with these fields of its configuration. Sets `new_weights` and, if the run
        starts anew, prints their modules. A model head of another size is one of them.

        Args:
            open_checkpoint: `from_pretrained` of a class, or a method like it.
            new_head: initialise the model head, also if the checkpoint has one of this size.

        Raises:
            ValueError: a weight below the model head has another shape than in the configuration.
        """
        # Updates are too small for weights in half precision: --mixed_precision keeps the weights in float32 as well.
        options = {"dtype": torch.float32, "ignore_mismatched_sizes": True, "output_loading_info": True}
        if self.settings.implementation == "scratchbert":
            options["padding_free"] = True
        source = self.settings.model
        with without_loading_reports():
            model, info = open_checkpoint(source, **options | fields)
        for name, stored, expected in info["mismatched_keys"]:
            if name.startswith(f"{model.base_model_prefix}."):
                raise ValueError(
                    f"--model {source} has {name} of shape {tuple(stored)}; expected {tuple(expected)}, "
                    "as its configuration says"
                )
        self.new_weights = set(info["missing_keys"]) | {name for name, *_ in info["mismatched_keys"]}
        if new_head:
            self.new_weights |= initialise_head(model)
        new = ", ".join(modules_of(self.new_weights))
        if new and self.settings.evaluate_only:
            raise ValueError(
                f"--model {source} has no weights of {new}; expected a model trained for this task, "
                "with --evaluate_only"
            )
        if new and not has_checkpoint(self.settings):
            self.accelerator.print(f"{source} has no weights of {new}; they are random before the training")
        return model

    @abstractmethod
    def counts(self, batch: dict) -> torch.Tensor:
        """The number of labels in a batch, `(k,)`, one for each loss of the task."""

    @abstractmethod
    def evaluate(self, model, split: str) -> Evaluation:
        """Evaluates the rows of all processes, each counted once."""

    def shown(self, example: dict) -> str:
        """The tokens of an example and, in tasks with labels, its target."""
        return " ".join(self.tokenizer.convert_ids_to_tokens(example["input_ids"]))

    def write_predictions(self, folder: Path, predictions: dict[str, list[dict]]) -> None:
        """Writes the predictions of each split into the folder of the finished run."""
        for split, rows in predictions.items():
            lines = (json.dumps(to_json(row), ensure_ascii=False, allow_nan=False) for row in rows)
            write_text(folder / f"predictions_{split}.jsonl", "".join(f"{line}\n" for line in lines))

    def samples(self, predictions: list[dict]) -> list[str]:
        """What is printed of the predictions after each evaluation, a line each."""
        return []

    @abstractmethod
    def read(self, source: Source) -> Dataset:
        """The rows of a split."""

    def load(self, source: Source, check: Check) -> Dataset:
        """The rows as `load_rows` returns them; with their columns in the file as JSON, for the predictions."""

        def with_columns(row: dict) -> dict:
            return {**check(row), "columns": json.dumps(row, default=str)}

        return load_rows(source, with_columns, self.settings.on_bad_row, self.accelerator.print)

    def read_splits(self) -> Iterator[tuple[str, Dataset]]:
        """Each split and its rows, the training set first if there is one. With --validation_fraction, some of the rows
        that are read for training are the validation set."""
        from sklearn.model_selection import train_test_split

        fraction = self.settings.validation_fraction
        for split, source in sources(self.settings, self.readers).items():
            rows = self.read(source)
            if split != "train" or fraction is None:
                yield split, rows
                continue
            options = {"test_size": fraction, "random_state": self.settings.split_seed, "stratify": self.strata(rows)}
            try:
                kept, held_out = map(sorted, train_test_split(range(len(rows)), **options))
            except ValueError as error:
                raise ValueError(
                    f"--validation_fraction is {fraction}, of {len(rows)} rows; "
                    f"expected at least a row of each label in both sets: {error}"
                ) from error
            yield "train", rows.select(kept)
            yield "validation", rows.select(held_out[: self.settings.max_eval_samples])

    def encode_splits(self) -> Dataset | None:
        """Sets the rows and the examples of all splits, by the task's `encode(rows)`. Returns the rows of the training
        set, the first split, if there is one."""
        for split, rows in self.read_splits():
            self.rows[split], self.splits[split], self.row_counts[split] = rows, self.encode(rows), len(rows)
        self.train_set = self.splits.pop("train", None)
        return self.rows.pop("train", None)

    def saved_label_counts(self) -> Counter:
        """The `label_counts` of the run that made --model, of its metrics.json; empty if it has none."""
        path = Path(self.settings.model, METRICS)
        return Counter(read_json_object(path).get("label_counts") if path.is_file() else None)

    def strata(self, rows: Dataset) -> list[str] | None:
        """For each row, the group of rows of which --validation_fraction takes the same share as of others; None: there
        are no groups."""
        return None

    def joined(self, rows: Iterable[dict], found: Iterable[dict]) -> list[dict]:
        """The predictions: for each row of `load` its columns in the file, what the task read of it, and what it found.
        A column in the file that has the name of one of these and another value is input_NAME."""
        joined = []
        for row, own in zip(rows, found, strict=True):
            ours = {**row, **own}
            given = {
                f"input_{name}" if name in ours else name: value
                for name, value in json.loads(ours.pop("columns")).items()
                if name not in ours or str(ours[name]) != str(value)
            }
            joined.append(given | ours)
        return joined

    def open_labelled(self, model_class: type, **fields):
        """The model of --model for the task's `labels`. Its model head is new if `saved_labels` are others."""
        is_new = self.saved_labels not in (None, self.labels)
        return self.open_model(model_class.from_pretrained, new_head=is_new, **label_fields(self.labels), **fields)

    def logits(self, model, batch):
        """The scores of the labels: `(B, L)` of sequences; of tokens `(B, T, L)`, or `(1, N, L)` without padding."""
        return model(**without(batch, "labels")).logits.float()

    def losses(self, model, batch: dict) -> torch.Tensor:
        """The sums of the losses over the labels of `counts`, `(k,)`, by the task's `losses_of(logits, batch)`."""
        return self.losses_of(self.logits(model, batch), batch)

    @functools.cached_property
    def sampler(self) -> LengthGroupedBatches:
        settings, rank, world = self.settings, self.accelerator.process_index, self.accelerator.num_processes
        lengths, grouped = self.train_set["length"], settings.group_by_length
        return LengthGroupedBatches(lengths, settings.batch_size, settings.seed, rank, world, grouped)

    def fingerprints(self) -> dict[str, str]:
        """The fingerprint of each split: the same for the same data, whatever their path. A task whose splits are not
        tokenised beforehand adds that of its "tokenizer"."""
        rows = {split: [rows] for split, rows in self.rows.items()}
        examples = {"train": self.train_set, **self.splits}
        return {split: fingerprint(each, *rows.get(split, [])) for split, each in examples.items()}

    def batches_per_epoch(self) -> int | None:
        """The batches per epoch on each process; None if the number is not known."""
        return self.sampler.batches_per_epoch

    def batches(self, epoch: int, start: int) -> Iterator[tuple[list[str], dict]]:
        """The batches of an epoch from number `start` on, each with the places of its rows. They depend on the seed and
        the arguments only.

        A batch without places holds a row of another process: all processes take part in each update, also where the
        last rows of the epoch are fewer than the processes. It adds nothing to the loss."""
        self.sampler.set_epoch(epoch)
        self.sampler.set_start(start)
        return self.loader(self.train_set, self.sampler)

    def loader(self, examples, batches: Iterable[list[int]]) -> DataLoader:
        """Yields places and batches; for no rows, a batch of the first example, without places."""

        def collate(rows: list[dict]):
            return [row["place"] for row in rows], self.collate(rows or [examples[0]])

        # Its own generator: a loader draws a number, at another moment after --resume.
        return DataLoader(examples, batch_sampler=batches, collate_fn=collate, generator=torch.Generator())

    @torch.no_grad()
    def predict(self, model, split: str, forward: Callable[..., tuple[list, list[float]]]) -> tuple[list, list[float]]:
        """Evaluates a split with `forward(model, batch)`, which returns a value for each row, and sums over the batch.

        All processes make the same number of calls, because a sharded model requires all of them in each.

        Returns:
            On every process: the values of all rows, in order, and the sums over all batches.
        """
        examples, accelerator = self.splits[split], self.accelerator
        size, world = self.settings.eval_batch_size, accelerator.num_processes
        shards = [evaluation_batches(examples["length"], size, rank, world) for rank in range(world)]
        own, most = shards[accelerator.process_index], max(map(len, shards))
        filled = own + (own or [[0]])[-1:] * (most - len(own))
        was_training = model.training
        model.eval()
        found, sums = [], []
        for i, (_, batch) in enumerate(self.loader(examples, filled)):
            values, sums_of_batch = forward(model, to_device(batch, accelerator.device))
            if i < len(own):
                found += zip(own[i], values, strict=True)
                sums.append(sums_of_batch)
        model.train(was_training)
        in_order = dict(gather_object(found))
        for row in range(len(examples)):
            if not is_finite(in_order[row]):  # the same on all processes
                place = examples[row]["place"]
                raise TrainingError(f"the output is not finite for {place}, of the {split} set. {AFTER_DIVERGENCE}")
        totals = [math.fsum(each) for each in zip(*gather_object(sums), strict=True)]
        if not all(map(math.isfinite, totals)):
            raise TrainingError(f"the loss is not finite for the {split} set. {AFTER_DIVERGENCE}")
        return [in_order[row] for row in range(len(examples))], totals


def modules_of(names: Iterable[str]) -> list[str]:
    """The modules that have these parameters, with `*` for the numbers of blocks, and without the layers in them."""
    found = set()
    for name in names:
        parts = ["*" if part.isdecimal() else part for part in name.split(".")[:-1]]
        last = parts.index("*") + 2 if "*" in parts else len(parts) - (parts[-1] == "dense")
        found.add(".".join(parts[:last]))
    return sorted(name for name in found if not any(name.startswith(f"{other}.") for other in found))


def without(batch: dict, *names: str) -> dict:
    """The batch without some of its fields, such as the labels, with which a model would compute its own loss."""
    return {name: value for name, value in batch.items() if name not in names}


def to_device(batch: dict, device: torch.device) -> dict:
    return {
        name: value.to(device, non_blocking=True) if isinstance(value, torch.Tensor) else value
        for name, value in batch.items()
    }


def is_finite(value) -> bool:
    """Whether all numbers are finite in a tensor, a number, or lists of these; other values count as finite."""
    if isinstance(value, torch.Tensor):
        return bool(value.isfinite().all())
    if isinstance(value, (list, tuple)):
        return all(map(is_finite, value))
    return not isinstance(value, float) or math.isfinite(value)


def non_padding_tokens(batch: dict) -> int:
    mask = batch.get("attention_mask")
    return int(mask.sum()) if mask is not None else batch["input_ids"].numel()


def sources(settings: Settings, readers: Readers | None = None) -> dict[str, Source]:
    """The sources of "train", unless nothing is trained, and, if there are any, of "validation" and "test".

    Args:
        readers: see `InputFile`.

    Raises:
        OSError, ValueError: a file is missing, or has an unknown ending.
    """
    found = {}
    for split in ("validation", "test") if settings.evaluate_only else ("train", "validation", "test"):
        most = settings.max_train_samples if split == "train" else settings.max_eval_samples
        if files := getattr(settings, f"{split}_file"):
            found[split] = Source(open_files(files, delimiter=settings.delimiter, readers=readers), most)
        elif settings.dataset and (name := getattr(settings, f"{split}_split")) not in (None, "none"):
            streaming = split == "train" and getattr(settings, "streaming", False)
            found[split] = Source([HubDataset(settings.dataset, name, settings.dataset_config, streaming)], most)
    return found
