"""The loop that all training scripts share, on Accelerate: updates, evaluations, checkpoints, and what is left after.

The gradient of an update is that of one big batch: each loss is summed over its labels and divided by the number of
labels in the whole update, over all batches that are accumulated and all processes.
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
from dataclasses import asdict, dataclass, field
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
from huggingface_hub.errors import HfHubHTTPError, HTTPError, StrictDataclassError
from torch.utils.data import DataLoader
from tqdm.auto import tqdm
from transformers import get_scheduler

from toolkit import publish
from toolkit.files import atomic_file
from toolkit.hub import check_source
from toolkit.model_card import write_training_card
from toolkit.training.batches import LengthGroupedBatches, evaluation_batches
from toolkit.training.optimizer import add_lora, freeze, make_optimizer, merged
from toolkit.training.report import plot_curves, write_metrics
from toolkit.training.rows import Source
from toolkit.training.settings import Settings, changed, parse, recipe_of

# Adam keeps two numbers for each that is trained, and the weights lie beside them.
FLOATS_PER_PARAMETER = 3


class TrainingError(RuntimeError):
    """The run cannot go on. What it had saved is still there."""


class Stopped(Exception):  # noqa: N818, it is no error
    """A signal asked the run to stop. It has saved."""

    def __init__(self, message: str, number: int):
        super().__init__(message)
        self.number = number


# ---------------------------------------------------------------------------------------------------------------- task


class Task(ABC):
    """What a script wants trained: a model, data, a loss, metrics.

    Attributes:
        name: what the Hub calls the task, such as "text-classification".
        model, tokenizer: of transformers' kind.
        splits: the examples to evaluate on, "validation" and "test", where there are any.
        metric: the name of the metric that says which checkpoint is the best; `greater_is_better` which way.
        evaluates_at_start: whether what the model is worth before the first update is to be known, as step 0.
    """

    name: str
    metric: str
    greater_is_better = True
    evaluates_at_start = False

    def __init__(self, settings: Settings, accelerator: Accelerator):
        self.settings, self.accelerator = settings, accelerator
        self.splits = {}

    @abstractmethod
    def counts(self, batch: dict) -> torch.Tensor:
        """How many labels a batch has, `(k,)`, one number for each of the task's losses."""

    @abstractmethod
    def losses(self, model, batch: dict) -> torch.Tensor:
        """The sums of the losses of these labels, `(k,)`."""

    @abstractmethod
    def evaluate(self, model, split: str) -> dict[str, float]:
        """The metrics, computed over all processes, each row once."""

    @abstractmethod
    def batches_per_epoch(self) -> int | None:
        """On each process; None where nobody can tell."""

    @abstractmethod
    def batches(self, epoch: int, start: int) -> Iterator[tuple[list[str], dict]]:
        """The batches of an epoch from number `start` on, each with its rows' places. A function of the seed and of its
        arguments alone."""


class FineTuning(Task):
    """A task whose examples are all in memory, in a `datasets.Dataset` with the columns that `collate` takes, `place`,
    and `length`, the number of tokens.

    Attributes:
        train_set: the examples to train on.
        collate: makes a batch, a dict of tensors, of examples.
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

    def batches_per_epoch(self) -> int:
        return self.sampler.batches_per_epoch

    def batches(self, epoch, start):
        self.sampler.set_epoch(epoch)
        self.sampler.set_start(start)
        return self.loader(self.train_set, self.sampler)

    def loader(self, examples, batches: Iterable[list[int]]) -> DataLoader:
        """Yields places and batches."""

        def collate(rows: list[dict]):
            return [row["place"] for row in rows], self.collate(rows)

        # A generator of its own: a loader draws a number, which would not be drawn at the same moment after --resume.
        return DataLoader(examples, batch_sampler=batches, collate_fn=collate, generator=torch.Generator())

    @torch.no_grad()
    def predict(self, model, split: str, forward: Callable[[torch.nn.Module, dict], list]) -> list:
        """What `forward(model, batch)` says of each row of a split, in order, on every process.

        All processes make the same number of calls, since a sharded model wants all of them at each."""
        examples, accelerator = self.splits[split], self.accelerator
        sharding = self.settings.eval_batch_size, accelerator.num_processes
        shards = [evaluation_batches(examples["length"], sharding[0], rank, sharding[1]) for rank in range(sharding[1])]
        own, most = shards[accelerator.process_index], max(map(len, shards))
        filled = own + (own or [[0]])[-1:] * (most - len(own))
        was_training = model.training
        model.eval()
        found = []
        for i, (_, batch) in enumerate(self.loader(examples, filled)):
            said = forward(model, to_device(batch, accelerator.device))
            found += zip(own[i], said, strict=True) if i < len(own) else []
        model.train(was_training)
        in_order = dict(gather_object(found))
        return [in_order[row] for row in range(len(examples))]


def to_device(batch: dict, device: torch.device) -> dict:
    return {
        name: value.to(device, non_blocking=True) if isinstance(value, torch.Tensor) else value
        for name, value in batch.items()
    }


def real_tokens(batch: dict) -> int:
    mask = batch.get("attention_mask")
    return int(mask.sum()) if mask is not None else batch["input_ids"].numel()


def sources(settings: Settings) -> dict[str, Source]:
    """Where the rows of "train", and of "validation" and "test" if there are any, come from.

    Raises:
        OSError, ValueError: a file is missing, or none that can be read.
    """
    if settings.dataset is None:
        files = {"train": settings.train_file, "validation": settings.validation_file, "test": settings.test_file}
        return {split: Source(files=each) for split, each in files.items() if each}
    names = {"train": settings.train_split, "validation": settings.validation_split, "test": settings.test_split}
    return {
        split: Source(name=settings.dataset, config=settings.dataset_config, split=name)
        for split, name in names.items()
        if name and name != "none"
    }


# --------------------------------------------------------------------------------------------------------- checkpoints


@dataclass
class Progress:
    """Where a run stands: everything that a checkpoint holds beside tensors."""

    step: int = 0  # updates made
    epoch: int = 0  # complete ones
    batch: int = 0  # of the running epoch, done
    best_checkpoint: str | None = None
    best: float | None = None
    without_better: int = 0  # evaluations
    evaluated_step: int | None = None
    seconds: float = 0.0  # of training, evaluations among them
    finished: bool = False
    processes: int = 1
    history: list[dict] = field(default_factory=list)


class Checkpoints:
    """The folder of a run's checkpoints. One is written under another name and renamed when it is whole."""

    def __init__(self, folder: Path, accelerator: Accelerator, keep: int):
        self.folder, self.accelerator, self.keep = folder, accelerator, keep

    def path(self, progress: Progress) -> Path:
        """By its name. That of a complete epoch is another one, as an evaluation may have come between."""
        complete = f"-epoch-{progress.epoch}" if progress.batch == 0 else ""
        return self.folder / f"step-{progress.step:08d}{complete}"

    def whole(self) -> list[Path]:
        """The checkpoints there are, the oldest first."""
        return sorted(self.folder.glob("step-*"))

    def discard_unfinished(self) -> None:
        for path in self.folder.glob(".unfinished-*"):
            shutil.rmtree(path)

    def save(self, progress: Progress) -> None:
        path = self.path(progress)
        if path.exists():
            return
        unfinished = self.folder / f".unfinished-{path.name}"
        if self.accelerator.is_main_process:
            self.folder.mkdir(parents=True, exist_ok=True)
            self.discard_unfinished()
        self.accelerator.wait_for_everyone()
        self.accelerator.save_state(unfinished)
        self.accelerator.wait_for_everyone()
        if self.accelerator.is_main_process:
            (unfinished / "progress.json").write_text(json.dumps(asdict(progress)), encoding="utf-8")
            flush(unfinished)
            unfinished.rename(path)
            for old in self.whole()[: -self.keep]:
                if old.name != progress.best_checkpoint:
                    self.remove(old)
        self.accelerator.wait_for_everyone()

    def remove(self, path: Path) -> None:
        """Renamed first: what is removed in part has no checkpoint's name."""
        removed = path.with_name(f".unfinished-removed-{path.name}")
        path.rename(removed)
        shutil.rmtree(removed)

    def load(self, path: Path) -> Progress:
        self.accelerator.load_state(path)
        return Progress(**json.loads((path / "progress.json").read_text(encoding="utf-8")))


def flush(folder: Path) -> None:
    """Has the files of a folder on the disk before the folder gets its name."""
    for path in (each for each in folder.rglob("*") if each.is_file()):
        with path.open("rb") as file:
            os.fsync(file.fileno())


# ------------------------------------------------------------------------------------------------------------ training


class Training:
    """A run: `train()`, and then `finish()`.

    Args:
        task: what is trained.
        output: the folder that all is written to.
    """

    def __init__(self, task: Task, output: Path):
        self.task, self.settings, self.accelerator, self.output = task, task.settings, task.accelerator, output
        self.checkpoints = Checkpoints(output / "checkpoints", self.accelerator, self.settings.keep_checkpoints)
        if self.settings.lora_rank and self.accelerator.distributed_type == DistributedType.FSDP:
            raise ValueError("--lora_rank does not go with FSDP here: adapters are small, and want no sharding")
        self.model_class = type(task.model).__name__  # FSDP makes a class of its own of it
        freeze(task.model, self.settings.freeze)
        model = add_lora(task.model, self.settings)
        optimizer = make_optimizer(model, self.settings)
        self.schedule = get_scheduler(
            self.settings.schedule,
            optimizer,
            num_warmup_steps=round(self.settings.warmup_ratio * self.steps),
            num_training_steps=self.steps,
        )
        self.model, self.optimizer = self.accelerator.prepare(model, optimizer)
        # Not prepared: Accelerate would step it once for every process.
        self.accelerator.register_for_checkpointing(self.schedule)
        self.progress = Progress(processes=self.accelerator.num_processes)
        set_seed(self.settings.seed + self.accelerator.process_index)  # each process drops other units
        self.asked_to_stop: int | None = None
        self.window: list[tuple[float, int, float]] = []  # loss, tokens, seconds of the updates since the last point

        self.stop_agreed = False

    @functools.cached_property
    def steps(self) -> int:
        """The updates of the whole run.

        Raises:
            ValueError: nobody can tell.
        """
        if self.settings.max_steps is not None:
            return self.settings.max_steps
        if (batches := self.task.batches_per_epoch()) is None:
            raise ValueError("--max_steps is missing: how many rows a streamed file has is not known")
        return self.settings.epochs * math.ceil(batches / self.settings.gradient_accumulation_steps)

    # -- an update

    def update(self, group: list[tuple[list[str], dict]]) -> tuple[float, int]:
        """One update from these batches. Returns its loss and its real tokens, over all processes.

        Raises:
            TrainingError: the loss or the gradient is no number.
        """
        accelerator, batches = self.accelerator, [to_device(batch, self.accelerator.device) for _, batch in group]
        counts = accelerator.reduce(sum(self.task.counts(batch).float() for batch in batches), "sum")
        counts = counts.where(counts > 0, 1)  # without labels the loss is 0
        # Accelerate divides by the batches of an update, and the processes' gradients are averaged.
        scale = accelerator.gradient_accumulation_steps * accelerator.num_processes
        losses = []
        for i, batch in enumerate(batches):
            last = i == len(batches) - 1
            accelerator.gradient_state._set_sync_gradients(last)
            with nullcontext() if last else accelerator.no_sync(self.model):
                loss = (self.task.losses(self.model, batch).float() / counts).sum()
                accelerator.backward(loss * scale)
            losses.append(loss.detach())
        own = [sum(losses), sum(map(real_tokens, batches)), float(self.asked_to_stop is not None)]
        own = torch.stack([torch.as_tensor(each, dtype=torch.float32, device=accelerator.device) for each in own])
        loss, tokens, stop = accelerator.reduce(own, "sum").tolist()  # the one reading
        if not math.isfinite(loss):  # on all processes, if it is on any
            self.complain_of_loss(losses, group)
        self.step(group)
        self.stop_agreed = bool(stop)
        return loss, int(tokens)

    def step(self, group) -> None:
        """Lets the optimizer use the gradient."""
        accelerator = self.accelerator
        if self.settings.max_grad_norm:
            norm = accelerator.clip_grad_norm_(self.model.parameters(), self.settings.max_grad_norm)
            if accelerator.scaler is None and norm is not None and not math.isfinite(norm):
                raise TrainingError(self.complaint("gradient's norm", float(norm), [rows for rows, _ in group]))
        self.optimizer.step()
        if not accelerator.optimizer_step_was_skipped:
            self.schedule.step()
        self.optimizer.zero_grad()

    def complain_of_loss(self, losses: list[torch.Tensor], group) -> None:
        """Raises:
        TrainingError: names the step and the batch, of whichever process.
        """
        values = [loss.item() for loss in losses]
        bad = [(value, rows) for value, (rows, _) in zip(values, group, strict=True) if not math.isfinite(value)]
        found = gather_object(bad)
        raise TrainingError(self.complaint("loss", found[0][0], [rows for _, rows in found]))

    def complaint(self, what: str, value: float, batches: list[list[str]]) -> str:
        rows = [row for batch in batches for row in batch]
        more = f" and {len(rows) - 8} more" if len(rows) > 8 else ""
        return (
            f"the {what} is {value} at step {self.progress.step + 1}, batch {self.progress.batch + 1} of epoch "
            f"{self.progress.epoch + 1}: {'; '.join(rows[:8])}{more}. The weights are as they were before it in the "
            f"last checkpoint; a lower --learning_rate or --mixed_precision no may help."
        )

    # -- the run

    def train(self) -> None:
        """Makes the updates that are left.

        Raises:
            TrainingError: see `update`.
            Stopped: a signal came; a checkpoint has been saved.
        """
        self.resume()
        progress, started = self.progress, time.monotonic()
        earlier = progress.seconds
        self.model.train()
        with self.bar() as bar:
            if self.task.evaluates_at_start and progress.step == 0:
                self.evaluate(bar)
                self.checkpoints.save(progress)  # it may stay the best
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
        """The batches of the rest of the epoch, as many at a time as make an update."""
        batches = iter(self.task.batches(self.progress.epoch, self.progress.batch))
        while group := list(islice(batches, self.settings.gradient_accumulation_steps)):
            yield group

    def between_updates(self, bar) -> None:
        step, settings = self.progress.step, self.settings
        evaluates = settings.eval_steps is not None and step % settings.eval_steps == 0
        if evaluates or self.progress.finished:
            self.evaluate(bar)
        if evaluates or self.progress.finished or (settings.save_steps and step % settings.save_steps == 0):
            self.checkpoints.save(self.progress)
        if self.stop_agreed and not self.progress.finished:
            self.checkpoints.save(self.progress)
            number = self.asked_to_stop or signal.SIGTERM
            raise Stopped(f"stopped at step {step} of {self.steps}, which is saved; --resume continues there", number)

    def end_of_epoch(self, bar) -> None:
        if self.progress.batch == 0:
            raise TrainingError("there is not one batch to train on")
        self.progress.epoch, self.progress.batch = self.progress.epoch + 1, 0
        if self.settings.eval_steps is None:
            self.evaluate(bar)
        if self.settings.eval_steps is None or self.settings.save_steps is None:
            self.checkpoints.save(self.progress)

    def evaluate(self, bar) -> None:
        progress, task = self.progress, self.task
        if "validation" not in task.splits or progress.evaluated_step == progress.step:
            return
        progress.evaluated_step = progress.step
        metrics = task.evaluate(self.model, "validation")
        value = metrics[task.metric]
        better = progress.best is None or (value > progress.best if task.greater_is_better else value < progress.best)
        if better:
            progress.best, progress.without_better = value, 0
            progress.best_checkpoint = self.checkpoints.path(progress).name
        else:
            progress.without_better += 1
            progress.finished |= progress.without_better >= (self.settings.early_stopping or math.inf)
        progress.history.append({"step": progress.step, "epoch": self.epochs_done(), "validation": metrics})
        self.accelerator.log({f"validation/{name}": value for name, value in metrics.items()}, progress.step)
        told = ", ".join(f"{name} {value:.4f}" for name, value in metrics.items())
        if self.accelerator.is_main_process:
            bar.write(f"step {progress.step}, epoch {self.epochs_done():.2f}: {told}{'  (best)' if better else ''}")

    def epochs_done(self) -> float:
        batches = self.task.batches_per_epoch()
        return self.progress.epoch + (self.progress.batch / batches if batches else 0)

    # -- what a person sees

    def bar(self) -> tqdm:
        return tqdm(
            total=self.steps,
            initial=self.progress.step,
            unit="step",
            mininterval=0.5,
            dynamic_ncols=True,
            disable=not self.accelerator.is_main_process,
        )

    def note(self, bar, loss: float, tokens: int, seconds: float) -> None:
        """Shows an update, and every `log_steps` of them makes a point of the curve."""
        self.window.append((loss, tokens, seconds))
        rate = sum(tokens for _, tokens, _ in self.window) / sum(seconds for *_, seconds in self.window)
        bar.set_postfix(
            loss=f"{loss:.3f}", lr=f"{self.schedule.get_last_lr()[-1]:.1e}", tokens=f"{rate:.0f}/s", refresh=False
        )
        bar.update()
        if self.progress.step % self.settings.log_steps == 0:
            self.log()

    def log(self) -> None:
        if not self.window:
            return
        losses, tokens, seconds = zip(*self.window, strict=True)
        self.window.clear()
        point = {
            "loss": sum(losses) / len(losses),
            "learning_rate": max(self.schedule.get_last_lr()),
            "tokens_per_second": sum(tokens) / sum(seconds),
        }
        self.progress.history.append({"step": self.progress.step, "epoch": self.epochs_done(), **point})
        self.accelerator.log({f"train/{name}": value for name, value in point.items()}, self.progress.step)

    # -- before and after

    def resume(self) -> None:
        """Takes up the last checkpoint, if --resume was given and there is one.

        Raises:
            ValueError: it is of another number of processes.
        """
        whole = self.checkpoints.whole() if self.settings.resume else []
        if not whole:
            return
        self.progress = self.checkpoints.load(whole[-1])
        if self.progress.processes != self.accelerator.num_processes:
            raise ValueError(
                f"--resume: {whole[-1]} is of a run on {self.progress.processes} processes, this one has "
                f"{self.accelerator.num_processes}"
            )
        self.accelerator.print(f"resuming at step {self.progress.step} of {self.steps}")

    def finish(self) -> dict:
        """Evaluates the best model on the test set and writes what is left of the run; returns metrics.json."""
        progress, task, accelerator = self.progress, self.task, self.accelerator
        if progress.best_checkpoint not in (None, self.checkpoints.path(progress).name):
            self.checkpoints.load(self.checkpoints.folder / progress.best_checkpoint)
        metrics = {split: task.evaluate(self.model, split) for split in task.splits}
        report = {
            **metrics,
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
            self.write(model, weights, report)
        accelerator.wait_for_everyone()
        accelerator.end_training()
        return report

    def write(self, model, weights: dict | None, report: dict) -> None:
        """The model and all that belongs to it, in a folder of its own first, file by file into `output` then."""
        unfinished = self.output / ".unfinished"
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir()
        model.save_pretrained(unfinished, state_dict=weights)
        self.task.tokenizer.save_pretrained(unfinished)
        write_metrics(unfinished, report)
        plot_curves(unfinished / "curves.png", self.progress.history, list(report.get("validation", {})))
        write_training_card(
            unfinished,
            task=self.task.name,
            model_class=self.model_class,
            base_model=self.settings.model,
            dataset=self.settings.dataset or self.settings.train_file,
            dataset_on_hub=self.settings.dataset is not None,
            metrics={split: report[split] for split in self.task.splits},
            settings=asdict(self.settings),
            history=self.progress.history,
            name=self.output.resolve().name,
        )
        for path in sorted(unfinished.iterdir()):
            path.replace(self.output / path.name)
        unfinished.rmdir()
        if self.settings.push_to_hub:
            self.push()

    def push(self) -> None:
        """Raises:
        OSError: it does not get there. The folder is whole all the same.
        """
        repo = self.settings.push_to_hub
        try:
            commit, _ = publish.push(publish.survey(self.output, repo), repo, private=self.settings.hub_private or None)
        except (OSError, ValueError, RuntimeError, HTTPError) as error:
            why = publish.explain(error, repo)
            raise OSError(f"the model is in {self.output} and was not pushed: {why}; push_to_hub.py does it") from None
        print(f"pushed to {commit}")


# -------------------------------------------------------------------------------------------------------------- script


def prepare_output(settings: Settings) -> Path:
    """The folder to write, checked before anything is computed, with the recipe in it.

    Raises:
        OSError: it cannot be written.
        ValueError: it holds something else, or a run with other flags than that to be resumed.
    """
    output = Path(settings.output)
    recipe = output / "recipe.yaml"
    if output.exists() and not output.is_dir():
        raise ValueError(f"--output {output} is a file; it wants a folder")
    if settings.resume and recipe.exists():
        if other := changed(settings, recipe.read_text(encoding="utf-8")):
            told = ", ".join(f"--{name} was {was}, is {now}" for name, (was, now) in other.items())
            raise ValueError(f"--resume continues the run in {output} with the same flags; {told}")
    elif output.is_dir() and any(output.iterdir()):
        if not settings.resume:
            raise ValueError(
                f"--output {output} is not empty; give a new folder, or --resume to continue the run in it"
            )
        raise ValueError(f"--resume: {output} holds no run; recipe.yaml is missing there")
    output.mkdir(parents=True, exist_ok=True)
    with atomic_file(recipe) as temporary:
        temporary.write_text(recipe_of(settings), encoding="utf-8")
    return output


def check_space(output: Path, parameters: int, keep: int) -> None:
    """Raises:
    OSError: the disk has no room for the checkpoints and the model.
    """
    # Those kept, the best, and the one that is being written; and the model.
    needed = 4 * parameters * (FLOATS_PER_PARAMETER * (keep + 2) + 1)
    if (free := shutil.disk_usage(output).free) < needed:
        raise OSError(
            f"--output {output}: {free / 2**30:.1f} GiB are free there, and the run may need {needed / 2**30:.1f} GiB; "
            f"a smaller --keep_checkpoints (now {keep}) needs less"
        )


def make_accelerator(settings: Settings) -> Accelerator:
    """Of what `accelerate launch` says.

    Raises:
        ValueError: there is no such tracker, or the processes that were launched do not work together.
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
        raise ValueError(f"{processes} processes were launched, and each is alone")
    if os.environ.get("ACCELERATE_USE_FSDP") == "true" and accelerator.distributed_type == DistributedType.MULTI_CPU:
        # Accelerate leaves FSDP out on the CPU; torch's own runs there as well.
        accelerator.state.distributed_type = PartialState().distributed_type = DistributedType.FSDP
        accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin()
    return accelerator


def check_sources(settings: Settings) -> None:
    """Raises OSError if the Hub, where the model or the tokenizer would be, cannot be reached."""
    for name in ("model", "tokenizer"):
        if (source := getattr(settings, name, None)) is not None:
            try:
                check_source(source)
            except OSError as error:
                raise OSError(f"--{name} {source}: {error}") from error


def run(settings: Settings, make_task: Callable[[Settings, Accelerator], Task]) -> dict:
    """The whole run: checks, training, evaluation, and the folder that is left. Returns metrics.json."""
    main_process = int(os.environ.get("RANK", 0)) == 0
    check_sources(settings)
    # At each checkpoint it tells that tied weights are written once.
    logging.getLogger("accelerate.utils.other").setLevel(logging.ERROR)
    # The bar of the training is enough.
    transformers.logging.disable_progress_bar()
    datasets.disable_progress_bar()
    output = prepare_output(settings) if main_process else Path(settings.output)
    if settings.push_to_hub and get_token() is None:
        raise ValueError("--push_to_hub wants a token with write access: `hf auth login`, or HF_TOKEN")
    accelerator = make_accelerator(settings)
    set_seed(settings.seed)
    task = make_task(settings, accelerator)
    positions = getattr(task.model.config, "max_position_embeddings", settings.max_length)
    if settings.max_length > positions:
        raise ValueError(f"--max_length is {settings.max_length}; the model has {positions} positions")
    if main_process:
        check_space(output, sum(weight.numel() for weight in task.model.parameters()), settings.keep_checkpoints)
    accelerator.wait_for_everyone()
    training = Training(task, output)
    accelerator.init_trackers("logs", {name: str(value) for name, value in asdict(settings).items()})
    with asked_by_signal(training):
        training.train()
    return training.finish()


@contextmanager
def asked_by_signal(training: Training):
    """SIGTERM, as a cluster sends it, and SIGINT (Ctrl-C) have the run save and stop; the second one stops at once."""

    def ask(number, _):
        training.asked_to_stop = number
        signal.signal(number, signal.SIG_DFL)

    before = {number: signal.signal(number, ask) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def main(settings_class: type[Settings], description: str, make_task, argv: list[str] | None = None) -> int:
    """What the scripts' `main` is. Returns the exit code: 0 done, 1 the training broke off, 2 bad usage or data,
    128 + n stopped by signal n."""
    settings = parse(settings_class, description, argv)
    try:
        run(settings, make_task)
    except (ValueError, OSError, ImportError, StrictDataclassError, HfHubHTTPError) as error:
        return complain(error, 2)
    except TrainingError as error:
        return complain(error, 1)
    except Stopped as stopped:
        return complain(stopped, 128 + stopped.number)
    return 0


def complain(error: Exception, code: int) -> int:
    """Says it in one line; with several processes, each says what stopped it."""
    rank = int(os.environ.get("RANK", 0))
    process = f" (process {rank})" if rank else ""
    print(f"{Path(sys.argv[0]).name}{process}: {' '.join(str(error).split())}", file=sys.stderr)
    return code
