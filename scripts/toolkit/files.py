"""Paths, and writing files and folders atomically: a reader sees the old content or the new, never a part."""

import json
import math
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

# The folder that holds scripts/ and configuration/, in a clone and in an installation.
ROOT = Path(__file__).resolve().parents[2]


def looks_like_a_path(source: str) -> bool:
    """Whether `source` can only be a folder, and no hub id."""
    return source.startswith((".", "/", "~")) or source.count("/") > 1


def find_shipped(path: str | Path) -> Path:
    """`path` if it exists, else the file that this project ships under that name, such as `configuration/tiny.json`;
    `path` as it is if there is neither."""
    path = Path(path)
    return ROOT / path if not path.exists() and (ROOT / path).is_file() else path


# ------------------------------------------------------------------------------------------------------------- writing


@contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    """A temporary path. The file written there replaces `path` when the `with` block succeeds. Of a symbolic link, the
    target is replaced; a device or a named pipe receives the content.

    Raises:
        IsADirectoryError: `path` is a folder.
    """
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder; expected a file.")
    if path.exists() and not path.is_file():
        with tempfile.TemporaryDirectory() as folder:
            temporary = Path(folder, path.name)
            yield temporary
            with open(temporary, "rb") as content, open(path, "wb") as receiver:
                shutil.copyfileobj(content, receiver)
        return
    target = Path(os.path.realpath(path))
    temporary = target.with_name(f".{path.stem}-{os.getpid()}{path.suffix}")
    try:
        yield temporary
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def atomic_folder(target: Path) -> Iterator[Path]:
    """An empty folder on the same disk. It replaces `target` when the `with` block succeeds; of a symbolic link, the
    folder that it names."""
    target = Path(os.path.realpath(target))
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{target.name}-", dir=target.parent) as temporary:
        new, old = Path(temporary, "new"), Path(temporary, "old")
        new.mkdir()  # the temporary folder itself is readable by its owner only
        yield new
        try:
            if target.exists():
                target.rename(old)
            new.rename(target)
        except BaseException:
            if old.exists():
                old.rename(target)
            raise


def write_text(path: Path, text: str) -> None:
    """Writes a UTF-8 file with `\\n` line ends, atomically."""
    with atomic_file(Path(path)) as temporary:
        temporary.write_text(text, encoding="utf-8", newline="\n")


def write_json(path: Path, value: object, indent: int = 2) -> None:
    """Writes `value`, which may hold numbers of NumPy and torch, as strict JSON, atomically."""
    write_text(path, json.dumps(to_json(value), indent=indent, allow_nan=False, ensure_ascii=False) + "\n")


def to_json(value: object):
    """`value` in the types of JSON. NaN and infinities, which JSON does not have, become None."""
    if isinstance(value, Mapping):
        return {str(name): to_json(entry) for name, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_json(entry) for entry in value]
    if hasattr(value, "tolist"):  # an array, a tensor, or one of their numbers
        return to_json(value.tolist())
    return value if not isinstance(value, float) or math.isfinite(value) else None


def read_json(path: Path):
    """The content of a JSON file. Raises ValueError, with its path, if it is not JSON."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error


def read_json_object(path: Path) -> dict:
    """The content of a JSON file. Raises ValueError, with its path, if it is not a JSON object."""
    content = read_json(path)
    if not isinstance(content, dict):
        raise ValueError(f"{path} is not a JSON object")
    return content


# ------------------------------------------------------------------------------------------------- checks beforehand


def check_target(source: Path, target: Path, overwrite: bool) -> None:
    """Raises OSError unless the folder `target`, made from `source`, may be written or replaced."""
    if target.exists() and not target.is_dir():
        raise NotADirectoryError(f"The output {target} is a file; expected a folder.")
    if source.exists() and (source == target or source in target.parents or target in source.parents):
        raise FileExistsError(
            f"The source {source} and the output {target} overlap; expected two folders, neither inside the other."
        )
    if not target.exists() or not any(target.iterdir()):
        return
    if not overwrite:
        raise FileExistsError(f"The output {target} is not empty; --overwrite replaces it.")
    if not (target / "config.json").exists() or (target / ".git").exists():
        raise FileExistsError(
            f"The output {target} is not replaced: it has no config.json, so it is not a checkpoint, "
            "or it has a .git folder, which would be lost."
        )
