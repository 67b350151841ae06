"""Checkpoints of a run: writing them so that an interruption leaves complete ones only, and reading them."""

import hashlib
import json
import math
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from pickle import UnpicklingError

from accelerate import Accelerator
from accelerate.utils import RNG_STATE_NAME, DistributedType, gather_object, load
from safetensors import SafetensorError
from torch.distributed.fsdp import StateDictType
from torch.optim.lr_scheduler import LRScheduler

from toolkit.cli import one_line
from toolkit.files import read_json_object

# The files of a checkpoint that Accelerate does not write.
PROGRESS, SCHEDULE, CHECKSUMS = "progress.json", "schedule.json", "checksums.json"


@dataclass
class Progress:
    """The state of a run, except for tensors."""

    step: int = 0  # updates made
    epoch: int = 0  # complete epochs
    batch: int = 0  # complete batches of the current epoch
    batches: int | None = None  # of the last complete epoch, on each process
    best_checkpoint: str | None = None
    best: float | None = None
    best_loss: float = math.inf  # decides between checkpoints with the same metric
    without_better: int = 0  # evaluations since the best
    evaluated_step: int | None = None
    seconds: float = 0.0  # of training, including evaluations
    finished: bool = False
    steps: int = 0  # the updates of the whole run
    processes: int = 1
    data: dict[str, str] = field(default_factory=dict)  # the fingerprints of the task
    history: list[dict] = field(default_factory=list)
    # Loss, tokens and seconds of each update since the last point of the history.
    window: list[tuple[float, int, float]] = field(default_factory=list)


class Checkpoints:
    """The checkpoints of a run, in one folder. All processes write a checkpoint together, under a temporary name; it is
    renamed when it is complete.

    Each holds the SHA-256 of its files, so that a damaged one is recognised. Nothing in it can run code when it is
    read, except in the formats of DeepSpeed and of sharded FSDP: see `runs_code`.
    """

    def __init__(self, folder: Path, accelerator: Accelerator, schedule: LRScheduler, keep: int):
        self.folder, self.accelerator, self.schedule = folder, accelerator, schedule
        self.keep = max(1, keep)  # 0: the run removes them when it is finished

    def path(self, progress: Progress) -> Path:
        """The folder of a checkpoint. At the end of an epoch its name differs, because an evaluation may have come
        between."""
        complete = f"-epoch-{progress.epoch}" if progress.batch == 0 else ""
        return self.folder / f"step-{progress.step:08d}{complete}"

    def complete(self) -> list[Path]:
        """The complete checkpoints, the oldest first."""
        return sorted(self.folder.glob("step-*"))

    # -- writing

    def discard_unfinished(self) -> None:
        for path in self.folder.glob(".unfinished-*"):
            shutil.rmtree(path)

    def save(self, progress: Progress) -> None:
        """Writes a checkpoint, unless there is one of this step.

        Raises:
            OSError: it cannot be written, as on a full disk.
        """
        path = self.path(progress)
        if path.exists():
            return
        unfinished = self.folder / f".unfinished-{path.name}"
        earlier = [each.name for each in self.complete()]
        advice = f"--resume continues from {earlier[-1]}" if earlier else "start again in a new --output"
        with writing(unfinished, path, advice):
            if self.accelerator.is_main_process:
                self.folder.mkdir(parents=True, exist_ok=True)
                self.discard_unfinished()
            self.accelerator.wait_for_everyone()
            self.accelerator.save_state(unfinished)
            self.accelerator.wait_for_everyone()
            if self.accelerator.is_main_process:
                (unfinished / PROGRESS).write_text(json.dumps(asdict(progress)), encoding="utf-8")
                (unfinished / SCHEDULE).write_text(json.dumps(self.schedule.state_dict()), encoding="utf-8")
                (unfinished / CHECKSUMS).write_text(json.dumps(checksums(unfinished)), encoding="utf-8")
                for file in files_in(unfinished):
                    with file.open("rb") as written:
                        os.fsync(written.fileno())
        if self.accelerator.is_main_process:
            unfinished.rename(path)
            for old in self.complete()[: -self.keep]:
                if old.name != progress.best_checkpoint:
                    # It is renamed first, so that a partly removed one is not taken for complete.
                    shutil.rmtree(old.rename(old.with_name(f".unfinished-removed-{old.name}")))
        self.accelerator.wait_for_everyone()

    # -- reading

    @property
    def runs_code(self) -> bool:
        """Whether code in a checkpoint could run when it is read: DeepSpeed and torch's sharded state dicts unpickle
        any object."""
        if self.accelerator.distributed_type == DistributedType.FSDP:
            return self.accelerator.state.fsdp_plugin.state_dict_type != StateDictType.FULL_STATE_DICT
        return self.accelerator.distributed_type == DistributedType.DEEPSPEED

    def last_intact(self) -> Path:
        """The last intact checkpoint, the same on all processes. Moves damaged ones after it out of the way.

        Raises:
            ValueError: all checkpoints are damaged.
        """
        damaged = {}
        for path in reversed(self.complete()):
            # All processes take the same one, even if only one of them cannot read a file.
            if not any(problems := gather_object([self.damage(path)])):
                break
            damaged[path] = next(filter(None, problems))
        else:
            reasons = "; ".join(f"{path.name}: {problem}" for path, problem in damaged.items())
            raise ValueError(
                f"--resume: no checkpoint in {self.folder} is intact ({reasons}); expected one. "
                "Start again in a new --output"
            )
        for bad, problem in damaged.items() if self.accelerator.is_main_process else ():
            moved = bad.with_name(f"damaged-{bad.name}")  # the run will write it again
            shutil.rmtree(moved, ignore_errors=True)
            bad.rename(moved)
            print(f"{bad} is not used: {problem}. It is now {moved.name}", file=sys.stderr)
        return path

    def damage(self, path: Path) -> str | None:
        """What is damaged in a checkpoint, or in the best one, which the end of the run loads; None if nothing is."""
        if (problem := damage(path)) is not None:
            return problem
        best = read_progress(path).best_checkpoint
        problem = None if best in (None, path.name) else damage(self.folder / best)
        return problem and f"in the best checkpoint, {best}, {problem}"

    def load(self, path: Path) -> Progress:
        """Loads an intact checkpoint. Raises ValueError if it cannot be loaded."""
        try:
            load(path / f"{RNG_STATE_NAME}_{self.accelerator.process_index}.pkl")  # load_state ignores errors there
            self.accelerator.load_state(path)
        except (RuntimeError, UnpicklingError) as error:  # also of torch, where a file holds more than tensors
            raise ValueError(f"{path} cannot be loaded: {error}") from error
        self.schedule.load_state_dict(read_json_object(path / SCHEDULE))
        return read_progress(path)


@contextmanager
def writing(folder: Path, target: Path, advice: str) -> Iterator[None]:
    """Turns an error while `folder` is written, such as a full disk, into an OSError about `target`, which the folder
    was to become; and removes the folder.

    Args:
        advice: what to do when there is enough space.
    """
    try:
        yield
    except (OSError, RuntimeError, SafetensorError) as error:  # torch and safetensors have their own
        shutil.rmtree(folder, ignore_errors=True)
        raise OSError(f"{target} cannot be written: {error}. With enough space on the disk, {advice}.") from error


def read_progress(path: Path) -> Progress:
    """The progress in a checkpoint. Raises ValueError if it is not of this version."""
    try:
        return Progress(**read_json_object(path / PROGRESS))
    except TypeError as error:
        raise ValueError(f"{path / PROGRESS} is of another version of this project: {error}") from error


def files_in(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def checksums(folder: Path) -> dict[str, str]:
    """The SHA-256 of each file in a folder but that of the checksums."""
    found = {}
    for path in files_in(folder):
        if (name := path.relative_to(folder).as_posix()) != CHECKSUMS:
            with path.open("rb") as file:
                found[name] = hashlib.file_digest(file, "sha256").hexdigest()
    return found


def damage(folder: Path) -> str | None:
    """What differs between the files of a checkpoint and their checksums; None if nothing does."""
    try:
        expected, found = read_json_object(folder / CHECKSUMS), checksums(folder)
    except (OSError, ValueError) as error:
        return one_line(error)
    if missing := sorted(expected.keys() - found.keys()):
        return f"{missing[0]} is missing"
    if changed := sorted(name for name in found if found[name] != expected.get(name)):
        return f"{changed[0]} differs from its checksum"
    return None
