"""The training loop, on Accelerate: updates, evaluations, checkpoints, and the files of the finished run.

The gradient of an update equals that of one large batch: each loss is summed over its labels and divided by the number
of labels in the update, over all accumulated batches and all processes.
"""

import functools
import json
import logging
import math
import os
import shutil
import signal
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, fields
from itertools import islice
from pathlib import Path

import datasets
import torch
import transformers
from accelerate import Accelerator, PartialState
from accelerate.utils import (
    DistributedType,
    FullyShardedDataParallelPlugin,
    ProjectConfiguration,
    gather_object,
    set_seed,
)
from huggingface_hub import get_token
from huggingface_hub.errors import HTTPError
from torch.utils.data import DataLoader
from tqdm.auto import tqdm

from toolkit import publish
from toolkit.checkpoint import config_fields, kind_of, tensor_names
from toolkit.cli import CommandError, Parser
from toolkit.files import to_json, write_text
from toolkit.hub import check_source, open_tokenizer
from toolkit.model_card import auto_class, is_own, write_training_card
from toolkit.training.batches import LengthGroupedBatches, evaluation_batches
from toolkit.training.checkpoints import Checkpoints, Progress, megabytes, read_progress, writing
from toolkit.training.dry_run import rehearse
from toolkit.training.fingerprint import fingerprint
from toolkit.training.metrics import main_metrics
from toolkit.training.optimizer import add_lora, extend_schedule, freeze, make_optimizer, make_schedule, merged
from toolkit.training.output import CHECKPOINTS, OutputFolder, has_checkpoint
from toolkit.training.report import checkpoint_in_words, in_words, plot_curves, write_metrics
from toolkit.training.rows import Source
from toolkit.training.settings import Settings
from toolkit.training.sharding import prepare

# Of the progress bar, where standard error is not a terminal.
SECONDS_BETWEEN_LOG_LINES = 60

# The end of the messages about numbers that are not finite.
AFTER_DIVERGENCE = (
    "The last checkpoint has the weights from before; a lower --learning_rate or --mixed_precision no may help."
)


class TrainingError(CommandError):
    """The run cannot continue. Its checkpoints are still there."""

    def __init__(self, message: str):
        super().__init__(message, exit_code=1)


class Stopped(CommandError):  # noqa: N818, it is not an error
    """The run was stopped by a signal, after it had saved a checkpoint."""

    def __init__(self, message: str, number: int):
        super().__init__(message, exit_code=128 + number)


# ---------------------------------------------------------------------------------------------------------------- task


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
    """A training task: a model, data, a loss and metrics.

    Attributes:
        name: the Hub's name of the task, such as "text-classification".
        model, tokenizer: of transformers.
        new_weights: the names of the parameters that the checkpoint lacks. They are random, so no flag freezes them.
        splits: the examples of "validation" and "test", if there are any.
        rows: the rows of these splits, if metrics are computed from the rows.
        metric: the name of the metric that selects the best checkpoint; `greater_is_better`: in which direction. Of
            checkpoints with the same value, the one with the lowest loss is the best.
        evaluates_at_start: whether the model is evaluated before the first update, as step 0.
    """

    name: str
    metric: str
    greater_is_better = True
    evaluates_at_start = False

    def __init__(self, settings: Settings, accelerator: Accelerator):
        self.settings, self.accelerator = settings, accelerator
        self.splits, self.rows, self.new_weights = {}, {}, set()

    def open_model(self, open_checkpoint: Callable, **fields):
        """The model of --model in float32, with these fields of its configuration. Sets `new_weights` and, if the run
        starts anew, prints their modules. A model head of another size is one of them.

        Args:
            open_checkpoint: `from_pretrained` of a class, or a method like it.

        Raises:
            ValueError: a weight below the model head has another shape than in the configuration.
        """
        # Updates are too small for weights in half precision: --mixed_precision keeps the weights in float32 as well.
        options = {"dtype": torch.float32, "ignore_mismatched_sizes": True, "output_loading_info": True}
        with without_loading_reports():
            model, info = open_checkpoint(self.settings.model, **options, **fields)
        for name, stored, expected in info["mismatched_keys"]:
            if name.startswith(f"{model.base_model_prefix}."):
                raise ValueError(
                    f"--model {self.settings.model} has {name} of shape {tuple(stored)}; expected {tuple(expected)}, "
                    "as its configuration says"
                )
        self.new_weights = set(info["missing_keys"]) | {name for name, *_ in info["mismatched_keys"]}
        if self.new_weights and not has_checkpoint(self.settings):
            new = ", ".join(modules_of(self.new_weights))
            self.accelerator.print(
                f"{self.settings.model} has no weights of {new}; they are random before the training"
            )
        return model

    @abstractmethod
    def counts(self, batch: dict) -> torch.Tensor:
        """The number of labels in a batch, `(k,)`, one for each loss of the task."""

    @abstractmethod
    def losses(self, model, batch: dict) -> torch.Tensor:
        """The sums of the losses over these labels, `(k,)`."""

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
    def fingerprints(self) -> dict[str, str]:
        """The fingerprint of each split: the same for the same data, whatever their path."""

    @abstractmethod
    def batches_per_epoch(self) -> int | None:
        """The batches per epoch on each process; None if the number is not known."""

    @abstractmethod
    def batches(self, epoch: int, start: int) -> Iterator[tuple[list[str], dict]]:
        """The batches of an epoch from number `start` on, each with the places of its rows. They depend on the seed and
        the arguments only.

        A batch without places holds a row of another process: all processes take part in each update, also where the
        last rows of the epoch are fewer than the processes. It adds nothing to the loss."""


class FineTuning(Task):
    """A task with all examples in memory, in a `datasets.Dataset` with the columns that `collate` expects, `place`, and
    `length`, the number of tokens.

    Attributes:
        train_set: the examples to train on.
        collate: turns examples into a batch, a dict of tensors.
    """

    train_set = None
    collate: Callable[[list[dict]], dict]

    @functools.cached_property
    def sampler(self) -> LengthGroupedBatches:
        return LengthGroupedBatches(
            self.train_set["length"],
            self.settings.batch_size,
            seed=self.settings.seed,
            rank=self.accelerator.process_index,
            world=self.accelerator.num_processes,
        )

    def fingerprints(self):
        rows = {split: [rows] for split, rows in self.rows.items()}
        examples = {"train": self.train_set, **self.splits}
        return {split: fingerprint(each, *rows.get(split, [])) for split, each in examples.items()}

    def batches_per_epoch(self) -> int:
        return self.sampler.batches_per_epoch

    def batches(self, epoch, start):
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
    def predict(
        self, model, split: str, forward: Callable[[torch.nn.Module, dict], tuple[list, list[float]]]
    ) -> tuple[list, list[float]]:
        """Evaluates a split with `forward(model, batch)`, which returns a value for each row, and sums over the batch.

        All processes make the same number of calls, because a sharded model requires all of them in each.

        Returns:
            On every process: the values of all rows, in order, and the sums over all batches.
        """
        examples, accelerator = self.splits[split], self.accelerator
        sharding = self.settings.eval_batch_size, accelerator.num_processes
        shards = [evaluation_batches(examples["length"], sharding[0], rank, sharding[1]) for rank in range(sharding[1])]
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


@contextmanager
def without_loading_reports() -> Iterator[None]:
    """Hides the table of missing and superfluous weights that transformers logs for each model."""
    logger = logging.getLogger("transformers.modeling_utils")

    def is_other(record: logging.LogRecord) -> bool:
        return "LOAD REPORT" not in str(record.msg)

    logger.addFilter(is_other)
    try:
        yield
    finally:
        logger.removeFilter(is_other)


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


def sources(settings: Settings) -> dict[str, Source]:
    """The sources of "train" and, if there are any, of "validation" and "test".

    Raises:
        OSError, ValueError: a file is missing, or has an unknown ending.
    """
    rows = {"train": settings.max_train_samples} | dict.fromkeys(("validation", "test"), settings.max_eval_samples)
    if settings.dataset is None:
        files = {"train": settings.train_file, "validation": settings.validation_file, "test": settings.test_file}
        return {split: Source(files=each, max_rows=rows[split]) for split, each in files.items() if each}
    names = {"train": settings.train_split, "validation": settings.validation_split, "test": settings.test_split}
    return {
        split: Source(name=settings.dataset, config=settings.dataset_config, split=name, max_rows=rows[split])
        for split, name in names.items()
        if name and name != "none"
    }


# ------------------------------------------------------------------------------------------------------------ training


class Training:
    """A run: `train()`, and then `finish()`. Writes everything into the folder `output`."""

    def __init__(self, task: Task, output: Path):
        self.task, self.settings, self.accelerator, self.output = task, task.settings, task.accelerator, output
        if self.settings.lora_rank and self.accelerator.distributed_type == DistributedType.FSDP:
            raise ValueError("--lora_rank is given with FSDP; expected no sharding, because adapters do not need it")
        self.model_class = type(task.model).__name__  # FSDP replaces the class
        freeze(task.model, self.settings.freeze, task.new_weights)
        if self.settings.gradient_checkpointing:
            task.model.activation_checkpointing_enable({"use_reentrant": False})
        model = add_lora(task.model, self.settings, task.new_weights)
        optimizer = make_optimizer(model, self.settings)
        self.schedule = make_schedule(optimizer, self.settings, self.steps)
        self.model, self.optimizer = prepare(self.accelerator, model, optimizer)
        # The schedule is not prepared, because Accelerate would step it once per process.
        self.checkpoints = Checkpoints(
            output / CHECKPOINTS, self.accelerator, self.schedule, self.settings.keep_checkpoints
        )
        self.progress = Progress(processes=self.accelerator.num_processes, data=task.fingerprints(), steps=self.steps)
        set_seed(self.settings.seed + self.accelerator.process_index)  # dropout differs between processes
        self.stop_signal: int | None = None
        self.stop_agreed = False

    @functools.cached_property
    def steps(self) -> int:
        """The updates of the whole run.

        Raises:
            ValueError: the number is not known.
        """
        if self.settings.max_steps is not None:
            return self.settings.max_steps
        if (batches := self.task.batches_per_epoch()) is None:
            raise ValueError("--max_steps is missing; streaming requires it, because the number of rows is not known")
        return math.ceil(self.settings.epochs * math.ceil(batches / self.settings.gradient_accumulation_steps))

    # -- an update

    def update(self, group: list[tuple[list[str], dict]]) -> tuple[float, int]:
        """One update with these batches. Returns its loss and its non-padding tokens, over all processes.

        Raises:
            TrainingError: the loss or the gradient is not finite.
        """
        accelerator, device = self.accelerator, self.accelerator.device
        # A batch without places counts as 0; see `Task.batches`.
        batches = [(to_device(batch, device), float(bool(places))) for places, batch in group]
        counts = accelerator.reduce(sum(self.task.counts(batch).float() * share for batch, share in batches), "sum")
        counts = counts.where(counts > 0, 1)  # without labels the loss is 0
        # Accelerate divides by the batches of an update, and averages the gradients of the processes.
        scale = accelerator.gradient_accumulation_steps * accelerator.num_processes
        losses = []
        for i, (batch, share) in enumerate(batches):
            last = i == len(batches) - 1
            accelerator.gradient_state._set_sync_gradients(last)
            with nullcontext() if last else accelerator.no_sync(self.model):
                loss = (self.task.losses(self.model, batch).float() / counts).sum() * share
                accelerator.backward(loss * scale)
            losses.append(loss.detach())
        tokens = sum(non_padding_tokens(batch) * share for batch, share in batches)
        own = [sum(losses), tokens, float(self.stop_signal is not None)]
        own = torch.stack([torch.as_tensor(each, dtype=torch.float32, device=device) for each in own])
        loss, tokens, stop = accelerator.reduce(own, "sum").tolist()  # the only synchronisation with the device
        if not math.isfinite(loss):  # the same on all processes
            self.raise_for_loss(losses, group)
        self.step(group)
        self.stop_agreed = bool(stop)
        return loss, int(tokens)

    def step(self, group) -> None:
        """Clips the gradient, and updates the weights and the learning rate."""
        accelerator = self.accelerator
        if self.settings.max_grad_norm:
            norm = accelerator.clip_grad_norm_(self.model.parameters(), self.settings.max_grad_norm)
            if accelerator.scaler is None and norm is not None and not math.isfinite(norm):
                raise TrainingError(self.not_finite("gradient's norm", float(norm), [rows for rows, _ in group]))
        self.optimizer.step()
        if not accelerator.optimizer_step_was_skipped:
            self.schedule.step()
        self.optimizer.zero_grad()

    def raise_for_loss(self, losses: list[torch.Tensor], group) -> None:
        """Raises TrainingError, with the step, the batch and its rows, on whichever process they are."""
        values = [loss.item() for loss in losses]
        bad = [(value, rows) for value, (rows, _) in zip(values, group, strict=True) if not math.isfinite(value)]
        found = gather_object(bad)
        raise TrainingError(self.not_finite("loss", found[0][0], [rows for _, rows in found]))

    def not_finite(self, what: str, value: float, batches: list[list[str]]) -> str:
        rows = [row for batch in batches for row in batch]
        more = f" and {len(rows) - 8} more" if len(rows) > 8 else ""
        return (
            f"the {what} is {value} at step {self.progress.step + 1}, batch {self.progress.batch + 1} of epoch "
            f"{self.progress.epoch + 1}: {'; '.join(rows[:8])}{more}. {AFTER_DIVERGENCE}"
        )

    def check_weights(self) -> None:
        """Raises TrainingError, on all processes, if a weight is not finite. The loss of the last update is computed
        before the update, and does not show it."""
        parts = [each.to_local() if hasattr(each, "to_local") else each for each in self.model.parameters()]
        bad = torch.stack([~each.detach().isfinite().all() for each in parts]).float()
        if bad_tensors := int((self.accelerator.reduce(bad, "sum") > 0).sum()):
            raise TrainingError(
                f"{bad_tensors} of {len(parts)} tensors of the model are not finite after step {self.progress.step}. "
                f"{AFTER_DIVERGENCE}"
            )

    # -- the run

    def train(self) -> None:
        """Makes the remaining updates.

        Raises:
            TrainingError: see `update`.
            Stopped: by a signal; a checkpoint has been saved.
        """
        self.resume()
        progress, started = self.progress, time.monotonic()
        earlier = progress.seconds
        self.model.train()
        with self.bar() as bar:
            if self.task.evaluates_at_start and progress.step == 0:
                self.evaluate(bar)
                self.save()  # it may remain the best
            while not progress.finished:
                began = time.monotonic()
                for group in self.groups():
                    loss, tokens = self.update(group)
                    progress.step, progress.batch = progress.step + 1, progress.batch + len(group)
                    self.note(bar, loss, tokens, time.monotonic() - began)
                    progress.seconds = earlier + time.monotonic() - started
                    progress.finished = progress.step >= self.steps
                    self.between_updates(bar)
                    if progress.finished:
                        break
                    began = time.monotonic()
                else:
                    self.end_of_epoch(bar)
        self.log()

    def groups(self) -> Iterator[list]:
        """The remaining batches of the epoch, in groups that make an update."""
        batches = iter(self.task.batches(self.progress.epoch, self.progress.batch))
        while group := list(islice(batches, self.settings.gradient_accumulation_steps)):
            yield group

    def between_updates(self, bar) -> None:
        step, settings = self.progress.step, self.settings
        evaluates = settings.eval_steps is not None and step % settings.eval_steps == 0
        if evaluates or self.progress.finished:
            self.evaluate(bar)
        if evaluates or self.progress.finished or (settings.save_steps and step % settings.save_steps == 0):
            self.save()
        if self.stop_agreed and not self.progress.finished:
            self.save()
            number = self.stop_signal or signal.SIGTERM
            raise Stopped(f"stopped at step {step} of {self.steps}, which is saved; --resume continues there", number)

    def end_of_epoch(self, bar) -> None:
        if self.progress.batch == 0:
            raise TrainingError("the training set has no batch; expected an example for each process")
        self.progress.epoch, self.progress.batch = self.progress.epoch + 1, 0
        if self.settings.eval_steps is None:
            self.evaluate(bar)
        if self.settings.eval_steps is None or self.settings.save_steps is None:
            self.save()

    def save(self) -> None:
        """Saves a checkpoint, unless a weight is not finite."""
        self.check_weights()
        self.checkpoints.save(self.progress)

    def evaluate(self, bar) -> None:
        progress, task = self.progress, self.task
        if "validation" not in task.splits or progress.evaluated_step == progress.step:
            return
        self.check_weights()
        progress.evaluated_step = progress.step
        evaluation = task.evaluate(self.model, "validation")
        metrics, better = evaluation.metrics, self.is_better(evaluation.metrics)
        if better:
            progress.best, progress.best_loss, progress.without_better = metrics[task.metric], metrics["loss"], 0
            progress.best_checkpoint = self.checkpoints.path(progress).name
        else:
            progress.without_better += 1
            progress.finished |= progress.without_better >= (self.settings.early_stopping or math.inf)
        progress.history.append({"step": progress.step, "epoch": self.epochs_done(), "validation": metrics})
        self.accelerator.log({f"validation/{name}": value for name, value in metrics.items()}, progress.step)
        if self.accelerator.is_main_process:
            best = "  (best)" if better else ""
            bar.write(f"step {progress.step}, epoch {self.epochs_done():.2f}: {in_words(metrics)}{best}")
            for sample in task.samples(evaluation.predictions):
                bar.write(f"  {sample}")

    def is_better(self, metrics: dict[str, float]) -> bool:
        """Whether these metrics are better than those of the best checkpoint. NaN is worse than every number."""
        sign = 1 if self.task.greater_is_better else -1

        def rank(value: float, loss: float) -> list[float]:
            return [-math.inf if math.isnan(each) else each for each in (sign * value, -loss)]

        progress = self.progress
        own = rank(metrics[self.task.metric], metrics["loss"])
        return progress.best is None or own > rank(progress.best, progress.best_loss)

    def epochs_done(self) -> float:
        batches = self.task.batches_per_epoch()
        return self.progress.epoch + (self.progress.batch / batches if batches else 0)

    # -- progress

    def bar(self) -> tqdm:
        is_terminal = sys.stderr.isatty()
        return (tqdm if is_terminal else LogLines)(
            total=self.steps,
            initial=self.progress.step,
            unit="step",
            mininterval=0.5 if is_terminal else SECONDS_BETWEEN_LOG_LINES,
            miniters=1,
            dynamic_ncols=is_terminal,
            disable=not self.accelerator.is_main_process,
        )

    def note(self, bar, loss: float, tokens: int, seconds: float) -> None:
        """Shows an update, and adds a point to the curves every `log_steps` updates."""
        window = self.progress.window
        window.append((loss, tokens, seconds))
        rate = sum(tokens for _, tokens, _ in window) / sum(seconds for *_, seconds in window)
        bar.set_postfix(
            loss=f"{loss:.3f}", lr=f"{self.schedule.get_last_lr()[-1]:.1e}", tokens=f"{rate:.0f}/s", refresh=False
        )
        bar.update()
        if self.progress.step % self.settings.log_steps == 0:
            self.log()

    def log(self) -> None:
        if not self.progress.window:
            return
        losses, tokens, seconds = zip(*self.progress.window, strict=True)
        self.progress.window.clear()
        point = {
            "loss": sum(losses) / len(losses),
            "learning_rate": max(self.schedule.get_last_lr()),
            "tokens_per_second": sum(tokens) / sum(seconds),
        }
        self.progress.history.append({"step": self.progress.step, "epoch": self.epochs_done(), **point})
        self.accelerator.log({f"train/{name}": value for name, value in point.items()}, self.progress.step)

    # -- before and after

    def resume(self) -> None:
        """Loads the last intact checkpoint, with --resume and if there is one.

        Raises:
            ValueError: it was written by another number of processes, the data have changed since, all checkpoints are
                damaged, or code in them could run.
        """
        if not self.settings.resume or not self.checkpoints.complete():
            return
        if self.checkpoints.runs_code:
            self.check_trust()
        checkpoint = self.checkpoints.last_intact()
        self.check_data(checkpoint)
        self.progress = self.checkpoints.load(checkpoint)
        if self.progress.processes != self.accelerator.num_processes:
            raise ValueError(
                f"--resume: {self.checkpoints.path(self.progress)} is of a run on {self.progress.processes} processes; "
                f"expected {self.accelerator.num_processes}, as in this run"
            )
        self.accelerator.print(f"resuming at step {self.progress.step} of {self.steps}")
        if self.steps != self.progress.steps:
            self.extend()

    def extend(self) -> None:
        """Continues a finished run to a later step.

        Raises:
            ValueError: it has made that many updates already.
        """
        progress = self.progress
        if self.steps <= progress.step:
            raise ValueError(
                f"--resume: the run to extend has made {progress.step} updates, and --epochs or --max_steps give "
                f"{self.steps}; expected more"
            )
        self.accelerator.print(
            f"the run of {progress.steps} updates is extended; the learning rate follows the schedule of {self.steps} "
            f"updates from step {progress.step} on"
        )
        progress.steps, progress.finished, progress.without_better = self.steps, False, 0
        extend_schedule(self.schedule)

    def check_data(self, checkpoint: Path) -> None:
        """Raises ValueError if the data are not those of a checkpoint."""
        earlier, present = read_progress(checkpoint).data, self.progress.data
        for split in {**earlier, **present}:
            if earlier.get(split) != present.get(split):
                named = sources(self.settings).get(split)
                raise ValueError(
                    f"--resume: the {split} rows ({named}) have changed since {checkpoint.name} was saved; expected "
                    "the same rows. Restore them, or start a new run in another --output"
                )

    def check_trust(self) -> None:
        """Warns that code in the checkpoints could run, with --trust_checkpoints.

        Raises:
            ValueError: the flag is not given.
        """
        reason = (
            f"the checkpoints in {self.checkpoints.folder} are in a format of DeepSpeed or of sharded FSDP, which can "
            "run code when it is read"
        )
        if not self.settings.trust_checkpoints:
            raise ValueError(
                f"--resume: {reason}; expected --trust_checkpoints. Give it if nobody else can write to the folder"
            )
        self.accelerator.print(f"warning: {reason}", file=sys.stderr)

    def finish(self) -> dict:
        """Evaluates the best model, and writes the files of the finished run. Returns the content of metrics.json."""
        progress, task, accelerator = self.progress, self.task, self.accelerator
        if progress.best_checkpoint not in (None, self.checkpoints.path(progress).name):
            self.checkpoints.load(self.checkpoints.folder / progress.best_checkpoint)
        evaluations = {split: task.evaluate(self.model, split) for split in task.splits}
        report = {
            **{split: evaluation.metrics for split, evaluation in evaluations.items()},
            "steps": progress.step,
            "epochs": self.epochs_done(),
            "checkpoint": progress.best_checkpoint or self.checkpoints.path(progress).name,
            "seconds": progress.seconds,
            "processes": progress.processes,
            "history": progress.history,
        }
        weights = None if self.settings.lora_rank else accelerator.get_state_dict(self.model)
        model = merged(accelerator.unwrap_model(self.model))
        if accelerator.is_main_process:
            self.write(model, weights, report, {split: each.predictions for split, each in evaluations.items()})
        accelerator.wait_for_everyone()
        accelerator.end_training()
        return report

    def write(self, model, weights: dict | None, report: dict, predictions: dict[str, list[dict]]) -> None:
        """Writes the model and its files into a temporary folder, and moves them into `output` when all are
        complete."""
        unfinished = self.output / ".unfinished"
        shutil.rmtree(unfinished, ignore_errors=True)
        with writing(unfinished, self.output, "--resume writes it"):
            unfinished.mkdir()
            self.write_files(unfinished, model, weights, report)
            self.task.write_predictions(unfinished, predictions)
            for path in sorted(unfinished.iterdir()):
                path.replace(self.output / path.name)
            unfinished.rmdir()
        if self.settings.keep_checkpoints == 0:
            self.checkpoints.remove_all()
        print(self.summary(report))
        if self.settings.push_to_hub:
            self.push()

    def write_files(self, folder: Path, model, weights: dict | None, report: dict) -> None:
        """Writes the model, its tokenizer, the metrics, the curves and the model card."""
        model.save_pretrained(folder, state_dict=weights)
        self.task.tokenizer.save_pretrained(folder)
        write_metrics(folder, report)
        names = main_metrics(report.get("validation", {}), first=self.task.metric)
        plot_curves(folder / "curves.png", self.progress.history, names, self.task.name)
        # A row may have several windows, which share its place. Masked-LM sequences do not follow the rows.
        counted = {} if self.task.name == "fill-mask" else {"train": self.task.train_set, **self.task.splits}
        write_training_card(
            folder,
            task=self.task.name,
            model_class=self.model_class,
            base_model=self.settings.model,
            dataset=self.settings.dataset or self.settings.train_file,
            dataset_on_hub=self.settings.dataset is not None,
            metrics={split: report[split] for split in self.task.splits},
            settings=asdict(self.settings),
            history=self.progress.history,
            rows={split: len(set(examples["place"])) for split, examples in counted.items()},
            checkpoint=checkpoint_in_words(self.progress, self.task.metric),
            defaults={each.name: each.default for each in fields(self.settings)},
            name=self.output.resolve().name,
        )

    def summary(self, report: dict) -> str:
        """What is printed at the end: the metrics, whose weights the model has, how to open it, and the space that the
        checkpoints take."""
        lines = [f"{split}: {in_words(report[split])}" for split in self.task.splits]
        lines.append(f"{self.output} has the model. {checkpoint_in_words(self.progress, self.task.metric)}")
        trust = ", trust_remote_code=True" if is_own(self.model_class) else ""
        opening = f'{auto_class(self.model_class)}.from_pretrained("{self.output}"{trust})'
        lines.append(f"  {opening} opens it; README.md has an example")
        if self.checkpoints.complete():
            size = f"{megabytes(self.checkpoints.folder):,.1f} MB"
            lines.append(
                f"{self.checkpoints.folder} takes {size} and can be removed, unless the run will be extended; "
                "--keep_checkpoints 0 does so"
            )
        return "\n".join(lines)

    def push(self) -> None:
        """Pushes the folder to the Hub.

        Raises:
            OSError: that failed. The folder is complete.
        """
        repo = self.settings.push_to_hub
        try:
            commit, _ = publish.push(publish.survey(self.output, repo), repo, private=self.settings.hub_private or None)
        except (OSError, ValueError, RuntimeError, HTTPError) as error:
            why = publish.explain(error, repo)
            raise OSError(
                f"the model is saved in {self.output} and was not pushed: {why}. push_to_hub.py pushes it"
            ) from None
        print(f"pushed to {commit}")


# ---------------------------------------------------------------------------------------------------------------- run


def shared_data(settings: Settings) -> list[str]:
    """A warning for each held-out split that has a file, or the whole split, of the training set."""
    train, *held_out = sources(settings).items()
    return [
        f"{part} is in the train rows and in the {split} rows; expected other rows. Metrics of rows that were trained "
        "on are too high"
        for split, source in held_out
        for part in parts_in_both(train[1], source)
    ]


def parts_in_both(one: Source, other: Source) -> list[str]:
    """The files that two sources share; or their split, if it is the same."""
    if one.files:
        return [str(path) for path in other.files if any(path.samefile(each) for each in one.files)]
    return [str(one)] if one == other else []


def tokenizer_of(settings: Settings, **options):
    """The tokenizer of --tokenizer or, where that is not given, of --model.

    Args:
        options: of `AutoTokenizer.from_pretrained`.

    Raises:
        OSError: there is none.
    """
    name = "tokenizer" if getattr(settings, "tokenizer", None) else "model"
    source = getattr(settings, name)
    try:
        return open_tokenizer(source, **options)
    except OSError as error:
        raise OSError(f"--{name} {source}: {error}") from error


def check_lengths(settings: Settings, names: Iterable[str], config) -> None:
    """Raises ValueError if one of these flags exceeds the positions of the model."""
    positions = config.max_position_embeddings
    for name in names:
        if (value := getattr(settings, name)) > positions:
            raise ValueError(f"--{name} is {value}; expected at most {positions}, the positions of the model")


def check_room(name: str, settings: Settings, tokenizer, texts: int = 1) -> None:
    """Raises ValueError unless the flag `name` leaves a token of each of so many texts. A tokenizer does not truncate
    to fewer tokens than its special ones."""
    special = tokenizer.num_special_tokens_to_add(pair=texts == 2)
    if (value := getattr(settings, name)) < special + texts:
        needed = f"{special} special tokens + 1 for each text"
        raise ValueError(f"--{name} is {value}; expected at least {special + texts}: {needed}")


def check_vocabulary(tokens: int, config) -> None:
    """Raises ValueError if the tokenizer has more tokens than the model."""
    if tokens > config.vocab_size:
        raise ValueError(f"the tokenizer has {tokens:,} tokens; expected at most vocab_size, {config.vocab_size:,}")


def make_accelerator(settings: Settings) -> Accelerator:
    """The accelerator, as `accelerate launch` configures it.

    Raises:
        ValueError: there is no such tracker, or the launched processes are not connected.
    """
    processes = int(os.environ.get("WORLD_SIZE", 1))
    accelerator = Accelerator(
        mixed_precision=settings.mixed_precision,
        gradient_accumulation_steps=settings.gradient_accumulation_steps,
        log_with=None if settings.trackers == "none" else settings.trackers,
        project_config=ProjectConfiguration(settings.output, logging_dir=settings.output),
        cpu=processes > 1 and not torch.accelerator.is_available(),
    )
    if accelerator.num_processes != processes:
        raise ValueError(f"{processes} processes were launched and are not connected; expected `accelerate launch`")
    if os.environ.get("ACCELERATE_USE_FSDP") == "true" and accelerator.distributed_type == DistributedType.MULTI_CPU:
        # Accelerate disables FSDP on the CPU, where torch supports it.
        accelerator.state.distributed_type = PartialState().distributed_type = DistributedType.FSDP
        accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin()
    return accelerator


def check_sources(settings: Settings) -> None:
    """Checks that the model and the tokenizer can be opened.

    Raises:
        OSError: one is neither a folder nor a hub id that can be reached, or the weights of a BERT are corrupt.
        ValueError: the model is of a kind that --implementation bert would open with random weights.
    """
    for name in ("model", "tokenizer"):
        if (source := getattr(settings, name, None)) is not None:
            try:
                check_source(source)
            except OSError as error:
                raise OSError(f"--{name} {source}: {error}") from error
    if settings.implementation == "bert" and settings.model is not None:
        kind = kind_of(config_fields(settings.model))
        if kind != "bert":
            raise ValueError(
                f"--model {settings.model} is of the kind {kind}; expected a BERT with --implementation bert. "
                "convert_checkpoint.py --to bert makes one of a ScratchBert"
            )
        tensor_names(settings.model)  # our classes check the files of weights, those of transformers do not


class LogLines(tqdm):
    """A progress bar for log files, with a line for each state instead of one that is overwritten."""

    displayed = -1

    @staticmethod
    def status_printer(file):
        def print_status(text: str) -> None:
            if text.strip():
                file.write(f"{text}\n")
                file.flush()

        return print_status

    def display(self, msg: str | None = None, pos: int | None = None) -> None:
        if self.n != self.displayed:
            self.displayed = self.n
            super().display(msg, pos)

    @staticmethod
    def write(text: str) -> None:
        print(text, flush=True)


def run(parser: Parser, settings: Settings, make_task: Callable[[Settings, Accelerator], Task]) -> None:
    """The whole run: checks, training, evaluation, and the files of the result.

    Args:
        parser: reports errors; with several processes, the process is named.
        make_task: makes the task of the settings and the accelerator.
    """
    if rank := int(os.environ.get("RANK", 0)):
        parser.prog += f" (process {rank})"
    main_process = int(os.environ.get("RANK", 0)) == 0
    check_sources(settings)
    # It warns at each checkpoint that tied weights are written once.
    logging.getLogger("accelerate.utils.other").setLevel(logging.ERROR)
    # The progress bar of the training is enough.
    transformers.logging.disable_progress_bar()
    datasets.disable_progress_bar()
    if settings.push_to_hub and get_token() is None:
        raise ValueError(
            "--push_to_hub is given and there is no token; expected one with write access, by `hf auth login` or "
            "HF_TOKEN"
        )
    with OutputFolder(settings) as output:
        if main_process:
            output.check()
        accelerator = make_accelerator(settings)
        set_seed(settings.seed)
        task = make_task(settings, accelerator)
        check_lengths(settings, ["max_length"], task.model.config)
        if main_process:
            output.check_space(sum(weight.numel() for weight in task.model.parameters()))
        training = Training(task, output.path)
        if settings.dry_run:
            rehearse(training)
            return
        if main_process:
            output.prepare()
            for warning in shared_data(settings) if not training.checkpoints.complete() else ():
                parser.report(warning)
        accelerator.wait_for_everyone()
        accelerator.init_trackers("logs", {name: str(value) for name, value in asdict(settings).items()})
        with stopped_by_signals(training):
            training.train()
        training.finish()


@contextmanager
def stopped_by_signals(training: Training) -> Iterator[None]:
    """Makes the run save a checkpoint and stop after SIGTERM, which clusters send, or SIGINT (Ctrl-C). A second signal
    stops it at once."""

    def request_stop(number, _):
        training.stop_signal = number
        signal.signal(number, signal.SIG_DFL)

    before = {number: signal.signal(number, request_stop) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
