"""Writing so that what stood there is never half gone: a file or a folder is made under a temporary name, and takes the
place of the old one once it is whole."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def written(path: Path) -> Iterator[Path]:
    """A temporary name beside `path`, which takes its place once the block is through."""
    temporary = path.with_name(f".{path.stem}-{os.getpid()}{path.suffix}")
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def check_target(source: Path, target: Path, overwrite: bool) -> None:
    """Raises OSError unless `target` may be written, or replaced."""
    if target.exists() and not target.is_dir():
        raise NotADirectoryError(f"TARGET {target} is a file; it must be a folder.")
    if source.exists() and (source == target or source in target.parents or target in source.parents):
        raise FileExistsError(f"SOURCE {source} and TARGET {target} must be two folders, side by side.")
    if not target.exists() or not any(target.iterdir()):
        return
    if not overwrite:
        raise FileExistsError(f"TARGET {target} is not empty; with --overwrite it is replaced.")
    if not (target / "config.json").exists() or (target / ".git").exists():
        raise FileExistsError(
            f"TARGET {target} is not replaced: it has no config.json, so it is not a checkpoint, or it has a .git, "
            "which would be lost."
        )


@contextmanager
def replacing(target: Path) -> Iterator[Path]:
    """A new folder, on the same disk, that takes the place of `target` if the `with` block goes through."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{target.name}-", dir=target.parent) as temporary:
        new, old = Path(temporary, "new"), Path(temporary, "old")
        new.mkdir()  # and not the temporary folder itself, which only its owner may read
        yield new
        try:
            if target.exists():
                target.rename(old)
            new.rename(target)
        except BaseException:
            if old.exists():
                old.rename(target)
            raise
