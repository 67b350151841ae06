"""The training loop, on Accelerate: updates, evaluations, checkpoints, and the files of the finished run.

The gradient of an update equals that of one large batch: each loss is summed over its labels and divided by the number
of labels in the update, over all accumulated batches and all processes.
"""

import functools
import math
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext
from itertools import islice
from pathlib import Path

import torch
from accelerate.utils import DistributedType, gather_object, set_seed
from huggingface_hub.errors import HTTPError
from tqdm.auto import tqdm

from toolkit import publish
from toolkit.cli import CommandError
from toolkit.files import write_json
from toolkit.finetuning.card import write_card
from toolkit.finetuning.checkpoints import Checkpoints, Progress, damage, files_in, read_progress
from toolkit.finetuning.optimizer import make_optimizer, make_schedule
from toolkit.finetuning.output import CHECKPOINTS, moved_when_complete
from toolkit.finetuning.report import checkpoint_in_words, in_words, plot_curves, rank
from toolkit.finetuning.settings import Settings
from toolkit.finetuning.sharding import prepare
from toolkit.finetuning.task import (
    AFTER_DIVERGENCE,
    METRICS,
    Task,
    TrainingError,
    non_padding_tokens,
    sources,
    to_device,
)
from toolkit.metrics import main_metrics
from toolkit.model_card import is_own, opening
from toolkit.progress import LogLines
from toolkit.training import add_lora, freeze, merged

# Of the progress bar, where standard error is not a terminal.
SECONDS_BETWEEN_LOG_LINES = 60


class Training:
    """A run: `train()`, and then `finish()`. Writes everything into the folder `output`.

    Args:
        name: of the model, in its card; None: that of the folder.
    """

    def __init__(self, task: Task, output: Path, name: str | None = None):
        self.name = name or output.resolve().name
        self.task, self.settings, self.accelerator, self.output = task, task.settings, task.accelerator, output
        if self.settings.lora_rank and self.accelerator.distributed_type == DistributedType.FSDP:
            raise ValueError("--lora_rank is given with FSDP; expected no sharding, because adapters do not need it")
        self.model_class = type(task.model).__name__  # FSDP replaces the class
        freeze(task.model, self.settings.freeze, task.new_weights)
        if self.settings.gradient_checkpointing:
            name = "activation_checkpointing_enable"  # its name before 5.22 is a deprecated one since
            enable = getattr(task.model, name if hasattr(task.model, name) else "gradient_checkpointing_enable")
            enable({"use_reentrant": False})
        model = add_lora(task.model, self.settings, task.new_weights)
        optimizer = make_optimizer(model, self.settings)
        self.schedule = make_schedule(optimizer, self.settings, self.steps)
        self.model, self.optimizer = prepare(self.accelerator, model, optimizer)
        # The schedule is not prepared, because Accelerate would step it once per process.
        keep = self.settings.keep_checkpoints
        self.checkpoints = Checkpoints(output / CHECKPOINTS, self.accelerator, self.schedule, keep)
        self.progress = Progress(processes=self.accelerator.num_processes, data=task.fingerprints(), steps=self.steps)
        set_seed(self.settings.seed + self.accelerator.process_index)  # dropout differs between processes
        self.stop_signal: int | None = None
        self.stop_agreed = False

    @functools.cached_property
    def steps(self) -> int:
        """The updates of the whole run."""
        if self.settings.max_steps is not None:  # as always with --streaming
            return self.settings.max_steps
        updates = math.ceil(self.task.batches_per_epoch() / self.settings.gradient_accumulation_steps)
        return math.ceil(self.settings.epochs * updates)

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
            values = [each.item() for each in losses]
            own = [(each, rows) for each, (rows, _) in zip(values, group, strict=True) if not math.isfinite(each)]
            found = gather_object(own)
            raise TrainingError(self.not_finite("loss", found[0][0], [rows for _, rows in found]))
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
            share = f"{bad_tensors} of {len(parts)} tensors of the model"
            raise TrainingError(f"{share} are not finite after step {self.progress.step}. {AFTER_DIVERGENCE}")

    # -- the run

    def train(self) -> None:
        """Makes the remaining updates.

        Raises:
            TrainingError: see `update`.
            CommandError: the run was stopped by a signal; a checkpoint has been saved.
        """
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
            message = f"stopped at step {step} of {self.steps}, which is saved; --resume continues there"
            raise CommandError(message, exit_code=128 + (self.stop_signal or signal.SIGTERM))

    def end_of_epoch(self, bar) -> None:
        if self.progress.batch == 0:
            raise TrainingError("the training set has no batch; expected an example for each process")
        self.progress.batches = self.progress.batch
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
        metrics = evaluation.metrics
        own = rank(metrics[task.metric], metrics["loss"], task.greater_is_better)
        best = None if progress.best is None else rank(progress.best, progress.best_loss, task.greater_is_better)
        # The loss chooses between checkpoints with an equal metric. A lower one is no reason to continue.
        progress.without_better = 0 if best is None or own[0] > best[0] else progress.without_better + 1
        progress.finished |= progress.without_better >= (self.settings.early_stopping or math.inf)
        if is_best := best is None or own > best:
            progress.best, progress.best_loss = metrics[task.metric], metrics["loss"]
            progress.best_checkpoint = self.checkpoints.path(progress).name
        progress.history.append({"step": progress.step, "epoch": self.epochs_done(), "validation": metrics})
        self.accelerator.log({f"validation/{name}": value for name, value in metrics.items()}, progress.step)
        if self.accelerator.is_main_process:
            epoch = "" if (epochs := self.epochs_done()) is None else f", epoch {epochs:.2f}"
            bar.write(f"step {progress.step}{epoch}: {in_words(metrics)}{'  (best)' if is_best else ''}")
            for sample in task.samples(evaluation.predictions):
                bar.write(f"  {sample}")

    def epochs_done(self) -> float | None:
        """The passes over the training set; None within the first epoch of a stream, whose length is not known."""
        progress = self.progress
        if progress.batch == 0:
            return progress.epoch
        if (batches := self.task.batches_per_epoch() or progress.batches) is None:
            return None
        # An epoch of a stream of several files may have a few batches more than the one before.
        return progress.epoch + min(1, progress.batch / batches)

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
        checkpoint, processes = self.checkpoints.last_intact(), self.progress.processes
        earlier = read_progress(checkpoint)
        if earlier.processes != processes:
            raise ValueError(
                f"--resume: {checkpoint} is of a run on {earlier.processes} processes; "
                f"expected {processes}, as in this run"
            )
        self.check_data(earlier.data, checkpoint.name)
        self.progress = self.checkpoints.load(checkpoint)
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
                f"--resume: the run to extend has made {progress.step} updates, "
                f"and --epochs or --max_steps give {self.steps}; expected more"
            )
        self.accelerator.print(
            f"the run of {progress.steps} updates is extended; the learning rate follows the "
            f"schedule of {self.steps} updates from step {progress.step} on"
        )
        progress.steps, progress.finished, progress.without_better = self.steps, False, 0
        self.schedule.last_epoch -= 1
        self.schedule.step()  # sets the learning rates of the longer schedule

    def check_data(self, earlier: dict[str, str], what_has_them: str) -> None:
        """Raises ValueError if the fingerprints of the data are not the earlier ones."""
        present = self.progress.data
        if changed := [part for part in {**earlier, **present} if earlier.get(part) != present.get(part)]:
            # If the tokenizer has changed, so have the tokens of the rows.
            source = sources(self.settings).get(changed[0])
            what = "tokenizer has" if "tokenizer" in changed else f"{changed[0]} rows ({source}) have"
            raise ValueError(
                f"--resume: the {what} changed since {what_has_them} was saved; expected no change. "
                "Restore the earlier state, or start a new run in another --output"
            )

    def check_trust(self) -> None:
        """Warns that code in the checkpoints could run, with --trust_checkpoints. Raises ValueError without it."""
        reason = (
            f"the checkpoints in {self.checkpoints.folder} are in a format of DeepSpeed or of sharded FSDP, "
            "which can run code when it is read"
        )
        if not self.settings.trust_checkpoints:
            raise ValueError(
                f"--resume: {reason}; expected --trust_checkpoints. Give it if nobody else can write to the folder"
            )
        self.accelerator.print(f"warning: {reason}", file=sys.stderr)

    def finish(self) -> None:
        """Evaluates the best model, and writes the files of the finished run."""
        progress, task, accelerator = self.progress, self.task, self.accelerator
        if progress.best_checkpoint not in (None, self.checkpoints.path(progress).name):
            best = self.checkpoints.folder / progress.best_checkpoint
            if (problem := damage(best)) is not None:
                raise ValueError(f"{best} is damaged: {problem}; expected a complete checkpoint")
            self.checkpoints.load(best)
        evaluations = {split: task.evaluate(self.model, split) for split in task.splits}
        report = {
            **{split: evaluation.metrics for split, evaluation in evaluations.items()},
            "steps": progress.step,
            "epochs": self.epochs_done(),
            "checkpoint": progress.best_checkpoint or self.checkpoints.path(progress).name,
            "seconds": progress.seconds,
            "processes": progress.processes,
            "metric": task.metric,
            "greater_is_better": task.greater_is_better,
            **({"label_counts": task.label_counts} if task.label_counts else {}),
            "data": progress.data,
            "history": progress.history,
        }
        # Of a sharded model only: save_pretrained writes no probe.json of weights that it is given.
        is_sharded = accelerator.distributed_type in (DistributedType.FSDP, DistributedType.DEEPSPEED)
        weights = accelerator.get_state_dict(self.model) if is_sharded and not self.settings.lora_rank else None
        model = merged(accelerator.unwrap_model(self.model))
        if accelerator.is_main_process:
            self.write(model, weights, report, {split: each.predictions for split, each in evaluations.items()})
        accelerator.wait_for_everyone()
        for tracker in accelerator.trackers:
            tracker.finish()

    def write(self, model, weights: dict | None, report: dict, predictions: dict[str, list[dict]]) -> None:
        """Writes the model, its tokenizer, predictions, metrics, curves and model card: all or none."""
        with moved_when_complete(self.output, "--resume writes it") as folder:
            self.task.write_predictions(folder, predictions)  # first: the card shows the confusion matrix
            model.save_pretrained(folder, state_dict=weights)
            self.task.tokenizer.save_pretrained(folder)
            write_json(folder / METRICS, report)
            names = main_metrics(report.get("validation", {}), first=self.task.metric)
            plot_curves(folder / "curves.png", self.progress.history, names, self.task.name)
            metrics = {split: report[split] for split in self.task.splits}
            write_card(folder, self.task, self.progress, metrics, model_class=self.model_class, name=self.name)
        if self.settings.keep_checkpoints == 0:
            shutil.rmtree(self.checkpoints.folder)  # with what earlier interruptions left in it
        print(self.summary(report))
        if self.settings.push_to_hub:
            push(self.output, self.settings)

    def summary(self, report: dict) -> str:
        """What is printed at the end: the metrics, whose weights the model has, how to open it, and the space that the
        checkpoints take."""
        lines = [f"{split}: {in_words(report[split])}" for split in self.task.splits]
        lines.append(f"{self.output} has the model. {checkpoint_in_words(self.progress, self.task.metric)}")
        code = opening(str(self.output), self.model_class, trust_remote_code=is_own(self.model_class))
        call = f'{code["auto_class"]}.from_pretrained("{code["name"]}"{code["trust"]})'
        lines.append(f"  {call} opens it; README.md has an example")
        if self.checkpoints.complete():
            folder = self.checkpoints.folder
            megabytes = sum(path.stat().st_size for path in files_in(folder)) / 1e6
            lines.append(
                f"{folder} takes {megabytes:,.1f} MB and can be removed, unless the run will be extended; "
                "--keep_checkpoints 0 does so"
            )
        return "\n".join(lines)


def push(folder: Path, settings: Settings) -> None:
    """Pushes the folder of a finished run to the Hub.

    Raises:
        OSError: that failed. The folder is complete.
    """
    repo = settings.push_to_hub
    try:
        commit, _ = publish.push(publish.survey(folder, repo), repo, private=settings.hub_private or None)
    except (OSError, ValueError, RuntimeError, HTTPError) as error:
        why = publish.explain(error, repo)
        raise OSError(f"the model is saved in {folder} and was not pushed: {why}. push_to_hub.py pushes it") from None
    print(f"pushed to {commit}")
