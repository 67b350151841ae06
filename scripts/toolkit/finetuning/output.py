"""The folder of --output."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from datasets.utils.py_utils import size_str
from filelock import FileLock, Timeout

from toolkit.files import write_text
from toolkit.finetuning.checkpoints import writing
from toolkit.finetuning.recipes import EXTENDING, RECIPE, changed_flags, recipe_of
from toolkit.finetuning.settings import Settings

CHECKPOINTS, LOCK = "checkpoints", ".lock"

# In a checkpoint: the weight, and two numbers of Adam.
FLOATS_PER_PARAMETER = 3


class OutputFolder:
    """The folder that a run writes. Only one run at a time has it, between `check` and the end of the `with` block.

    Nothing is written there before the data, the model and the schedule have been made, so that a corrected command
    runs after a failed start.
    """

    def __init__(self, settings: Settings):
        self.settings, self.path = settings, Path(settings.output)
        self.lock = FileLock(self.path / LOCK, timeout=0)

    def __enter__(self) -> "OutputFolder":
        return self

    def __exit__(self, *_) -> None:
        if self.lock.is_locked:
            with suppress(PermissionError):  # Windows removes it at the release
                Path(self.lock.lock_file).unlink()
        self.lock.release(force=True)

    def check(self) -> None:
        """Checks the folder and, if it exists, locks it.

        Raises:
            OSError: it cannot be written.
            ValueError: it holds something else, or checkpoints of a run with other flags; or another run has it.
        """
        path, settings = self.path, self.settings
        recipe, is_empty = path / RECIPE, not path.is_dir() or not any(each.name != LOCK for each in path.iterdir())
        if not os.access(folder := existing_folder(path), os.W_OK):
            raise PermissionError(f"--output {path}: {folder} cannot be written; expected a folder that can")
        if not is_empty and not settings.resume:
            raise ValueError(not_empty(path))
        if not is_empty and not recipe.exists():
            raise ValueError(f"--resume: {path} holds no run; {RECIPE} is missing there")
        if has_checkpoint(settings):
            other = changed_flags(settings, recipe)
            if other and not (other.keys() <= EXTENDING and (path / "metrics.json").exists()):  # may be extended
                changes = ", ".join(f"--{name} was {was} and is {now}" for name, (was, now) in other.items())
                raise ValueError(f"--resume: the run in {path} has other flags; expected the same: {changes}")
        elif (path / "metrics.json").exists():
            raise ValueError(
                f"--resume: the run in {path} is finished, and its checkpoints were removed; expected a "
                "run with a checkpoint. Start a new run in another --output, from this --model if it is "
                "to be trained further"
            )
        if path.is_dir():
            try:
                self.lock.acquire()
            except Timeout:
                raise ValueError(
                    f"--output {path} is in use by another run; expected a folder of its own. "
                    "Wait for the other run, or stop it"
                ) from None

    def prepare(self) -> None:
        """Creates and locks the folder. Raises as `check` does, because another run may have created it since."""
        self.path.mkdir(parents=True, exist_ok=True)
        self.check()

    def write_recipe(self) -> None:
        write_text(self.path / RECIPE, recipe_of(self.settings))

    def check_space(self, parameters: int) -> None:
        """Raises OSError unless the disk has room for the checkpoints and the model."""
        # The checkpoints that are kept, the best one, and the one that is being written; and the model.
        keep = max(1, self.settings.keep_checkpoints)
        needed = 4 * parameters * (FLOATS_PER_PARAMETER * (keep + 2) + 1)
        if (free := shutil.disk_usage(existing_folder(self.path)).free) < needed:
            raise OSError(
                f"--output {self.path} is on a disk with {size_str(free)} free; expected {size_str(needed)}, "
                f"which the run may need. A smaller --keep_checkpoints than {keep} needs less"
            )


@contextmanager
def moved_when_complete(folder: Path, advice: str) -> Iterator[Path]:
    """A temporary folder, whose files are moved into `folder` at the end. Raises as `writing`."""
    unfinished = folder / ".unfinished"
    shutil.rmtree(unfinished, ignore_errors=True)
    with writing(unfinished, folder, advice):
        unfinished.mkdir()
        yield unfinished
        for path in sorted(unfinished.iterdir()):
            path.replace(folder / path.name)
        unfinished.rmdir()


def not_empty(path: Path) -> str:
    return f"--output {path} is not empty; expected a new folder, or --resume to continue the run in it"


def has_checkpoint(settings: Settings) -> bool:
    """Whether the run continues from a checkpoint. Without one it starts from the beginning, and may have other
    flags."""
    return settings.resume and any((Path(settings.output) / CHECKPOINTS).glob("step-*"))


def existing_folder(path: Path) -> Path:
    """The folder itself, or the lowest folder above it that exists. Raises NotADirectoryError if that is a file."""
    found = next(each for each in (path, *path.absolute().parents) if each.exists())
    if not found.is_dir():
        raise NotADirectoryError(f"--output {path}: {found} is a file; expected a folder")
    return found
