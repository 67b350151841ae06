"""The code in a checkpoint's folder, which runs only with --trust_remote_code.

A ScratchBert folder holds the code of the package that saved it. Where that is the code of the installed package or of
a release, the installed package opens the folder, and nothing in it runs. Elsewhere the package could give other
results than the folder's code, so the folder is refused.
"""

import hashlib
import importlib
from collections.abc import Iterator
from pathlib import Path

from transformers.utils import cached_file

from toolkit.files import read_json, read_json_object, write_json

PACKAGE = "modeling_scratchbert"
FLAG = "--trust_remote_code"

# From each release to the digests of its files. `make record-release` adds the installed package.
RELEASES = Path(__file__).with_name("released_code.json")


def check_code(source: str, has_flag: bool) -> None:
    """Checks that a checkpoint opens without code from its folder, and imports the package if that opens it.

    Args:
        has_flag: whether the command can run such code, so that the error message may recommend it.

    Raises:
        ValueError: it has code that this package did not write.
        ImportError: the package is required and not installed.
    """
    advice = f"If you trust it, {FLAG} runs it" if has_flag else "Remove it if the model computes the same without it"
    for name in ("tokenizer_config.json", "custom_generate/generate.py"):
        path = find(source, name)
        if path is not None and (path.suffix == ".py" or read_json_object(path).get("auto_map")):
            raise ValueError(f"It has its own code in {name}; expected none. {advice}.")
    path = find(source, "config.json")
    fields = read_json_object(path) if path is not None else {}
    kernel = next(hub_kernels(fields), None)
    if kernel is not None:
        raise ValueError(f"Its config.json names the code of an attention kernel, {kernel}; expected none. {advice}.")
    auto_map = fields.get("auto_map") or {}
    if fields.get("model_type") == "scratchbert" or auto_map:
        package = import_package()
        check_auto_map(auto_map, package.configuration_scratchbert.AUTO_MAP, advice)
    if auto_map:
        check_files(source, package, advice)


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


def check_auto_map(auto_map: dict, expected: dict[str, str], advice: str) -> None:
    """Raises ValueError if it has an entry that is not in `expected`."""
    entries = auto_map.items() if isinstance(auto_map, dict) else [("auto_map", auto_map)]
    for name, value in entries:
        if expected.get(name) != value:
            entry = f"{expected[name]!r} or no such entry" if name in expected else "no such entry"
            raise ValueError(f"Its auto_map names its own code, {value!r} for {name}; expected {entry}. {advice}.")


def check_files(source: str, package, advice: str) -> None:
    """Raises ValueError unless the folder's files of code, if it has any, are those of the package or of a release."""
    releases = [digests(Path(package.__file__).parent), *read_json(RELEASES).values()]
    names = sorted({name for release in releases for name in release})
    found = {name: digest(path) for name in names if (path := find(source, name)) is not None}
    if not found or any(found.items() == release.items() for release in releases):
        return
    closest = max(releases, key=lambda release: len(found.items() & release.items()))
    changed = sorted({name for name, _ in found.items() ^ closest.items()})
    raise ValueError(
        f"Its code differs from that of the installed {PACKAGE} and of its releases, in "
        f"{', '.join(changed)}; expected the same code. {advice}."
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
