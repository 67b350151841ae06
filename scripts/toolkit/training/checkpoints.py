"""Checkpoints of a run: writing them so that an interruption leaves complete ones only, and reading them."""

import json
import os
import shutil
from dataclasses import asdict, dataclass, field
from pathlib import Path

from accelerate import Accelerator


@dataclass
class Progress:
    """The state of a run, except for tensors."""

    step: int = 0  # updates made
    epoch: int = 0  # complete epochs
    batch: int = 0  # complete batches of the current epoch
    best_checkpoint: str | None = None
    best: float | None = None
    without_better: int = 0  # evaluations since the best
    evaluated_step: int | None = None
    seconds: float = 0.0  # of training, including evaluations
    finished: bool = False
    processes: int = 1
    data: dict[str, str] = field(default_factory=dict)  # the fingerprint of each split
    history: list[dict] = field(default_factory=list)


class Checkpoints:
    """The checkpoints of a run, in one folder. All processes write a checkpoint together, under a temporary name; it is
    renamed when it is complete."""

    def __init__(self, folder: Path, accelerator: Accelerator, keep: int):
        self.folder, self.accelerator, self.keep = folder, accelerator, keep

    def path(self, progress: Progress) -> Path:
        """The folder of a checkpoint. At the end of an epoch its name differs, because an evaluation may have come
        between."""
        complete = f"-epoch-{progress.epoch}" if progress.batch == 0 else ""
        return self.folder / f"step-{progress.step:08d}{complete}"

    def complete(self) -> list[Path]:
        """The complete checkpoints, the oldest first."""
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
            for old in self.complete()[: -self.keep]:
                if old.name != progress.best_checkpoint:
                    self.remove(old)
        self.accelerator.wait_for_everyone()

    def remove(self, path: Path) -> None:
        """Removes a checkpoint. It is renamed first, so that a partly removed one is not taken for complete."""
        removed = path.with_name(f".unfinished-removed-{path.name}")
        path.rename(removed)
        shutil.rmtree(removed)

    def load(self, path: Path) -> Progress:
        self.accelerator.load_state(path)
        return self.read_progress(path)

    def read_progress(self, path: Path) -> Progress:
        return Progress(**json.loads((path / "progress.json").read_text(encoding="utf-8")))


def flush(folder: Path) -> None:
    """Writes the files of a folder to the disk."""
    for path in (each for each in folder.rglob("*") if each.is_file()):
        with path.open("rb") as file:
            os.fsync(file.fileno())
