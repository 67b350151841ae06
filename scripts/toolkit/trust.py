"""The code in a checkpoint's folder, which runs only with --trust_remote_code.

A ScratchBert folder holds the code of the package that saved it. Where that is the code of the installed package or of
a release, the installed package opens the folder, and nothing in it runs. Elsewhere the package could give other
results than the folder's code, so the folder is refused.
"""

import hashlib
import importlib
from collections.abc import Iterable, Iterator
from pathlib import Path

from transformers.utils import cached_file

from toolkit.common import read_json, read_json_object, write_json

PACKAGE = "modeling_scratchbert"
FLAG = "--trust_remote_code"

# From each release to the digests of its files. `make record-release` adds the installed package.
RELEASES = Path(__file__).with_name("released_code.json")


class ForeignCodeError(ValueError):
    """A checkpoint has code that this package did not write."""


def check_code(source: str, advice: str) -> None:
    """Checks that a checkpoint opens without code from its folder, and imports the package if that opens it.

    Args:
        advice: what to do about other code, the end of the error message.

    Raises:
        ForeignCodeError: it has code that this package did not write.
        ImportError: the package is required and not installed.
    """
    if check_settings(source, advice):
        find_release(source, advice)


def check_settings(source: str, advice: str) -> bool:
    """Checks that the settings of a checkpoint name no other code, and returns whether they name this package's.

    Raises:
        ForeignCodeError, ImportError: as `check_code`.
    """
    for name in ("tokenizer_config.json", "custom_generate/generate.py"):
        path = find(source, name)
        if path is not None and (path.suffix == ".py" or read_json_object(path).get("auto_map")):
            raise ForeignCodeError(f"It has its own code in {name}; expected none. {advice}.")
    path = find(source, "config.json")
    fields = read_json_object(path) if path is not None else {}
    kernel = next(hub_kernels(fields), None)
    if kernel is not None:
        raise ForeignCodeError(
            f"Its config.json names the code of an attention kernel, {kernel}; expected none. {advice}."
        )
    auto_map = fields.get("auto_map") or {}
    if fields.get("model_type") == "scratchbert" or auto_map:
        known = import_package().configuration_scratchbert.AUTO_MAP.items()
        if not isinstance(auto_map, dict) or not auto_map.items() <= known:
            raise ForeignCodeError(f"Its auto_map, {auto_map}, names its own code; expected {PACKAGE}'s. {advice}.")
    return bool(auto_map)


def report_code(source: str) -> dict:
    """Prints which release wrote the code in the folder of a checkpoint. Nothing in it is imported or opened.

    Raises:
        OSError, ValueError: there is no such folder, or a file in it cannot be read.
    """
    if not find(source, "config.json"):
        raise OSError(f"{source} has no config.json; expected the folder of a checkpoint, or its hub id.")
    advice = "Read it before you run it"
    try:
        files = [path.relative_to(source).as_posix() for path in Path(source).rglob("*.py")]
        check_settings(source, advice)
        release = find_release(source, advice, files)
    except ForeignCodeError as error:
        print(f"DIFFERENT: {error}")
        return {"equal": False}
    print(f"equal: the code is that of {release}" if release else "equal: there is no code")
    return {"equal": True, "release": release}


def hub_kernels(value: object, is_kernel: bool = False) -> Iterator[str]:
    """The attention kernels of the Hub that a configuration, or one within it, names. transformers runs their code."""
    if isinstance(value, dict):
        for name, part in value.items():
            yield from hub_kernels(part, is_kernel or "attn_implementation" in name)
    elif isinstance(value, list):
        for part in value:
            yield from hub_kernels(part, is_kernel)
    elif is_kernel and isinstance(value, str) and "/" in value:
        yield value


def find_release(source: str, advice: str, others: Iterable[str] = ()) -> str | None:
    """The release that wrote the files of code in the folder; None if there are none.

    Args:
        others: files of code that no release may have.

    Raises:
        ForeignCodeError: no release, nor the installed package, has the same files.
    """
    releases = {**read_json(RELEASES), f"the installed {PACKAGE}": digests(Path(import_package().__file__).parent)}
    names = set(others).union(*releases.values())
    found = {name: digest(path) for name in names if (path := find(source, name)) is not None}
    if not found:
        return None
    closest = min(releases, key=lambda release: len(found.items() ^ releases[release].items()))
    changed = {name for name, _ in found.items() ^ releases[closest].items()}
    if not changed:
        return closest
    raise ForeignCodeError(
        f"Its code differs from {closest} in {', '.join(sorted(changed))}; expected the same code. {advice}."
    )


def find(source: str, name: str) -> Path | None:
    """A file of a checkpoint; None if there is none."""
    path = cached_file(source, name, _raise_exceptions_for_missing_entries=False)
    return path and Path(path)


def digests(folder: Path) -> dict[str, str]:
    """The digest of each file of code that the package in `folder` saves beside a model."""
    return {path.name: digest(path) for path in sorted(folder.glob("*.py")) if path.name != "__init__.py"}


def digest(path: Path) -> str:
    """The SHA-256 of a text file with `\\n` line ends, which Git may have changed."""
    return hashlib.sha256(path.read_bytes().replace(b"\r\n", b"\n")).hexdigest()


def import_package():
    """The installed package, whose import registers its classes with the Auto classes.

    Raises:
        ImportError: it is not installed.
    """
    try:
        return importlib.import_module(PACKAGE)
    except ImportError as error:
        raise ImportError(
            f"{PACKAGE}, which opens it, is not installed: {error}. If it has its own code, and you "
            f"trust that, {FLAG} runs it."
        ) from error


def record_release(version: str) -> None:
    """Adds the digests of the installed package to those of the releases."""
    write_json(RELEASES, read_json(RELEASES) | {version: digests(Path(import_package().__file__).parent)})
