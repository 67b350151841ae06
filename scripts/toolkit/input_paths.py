"""Paths and URLs of inputs: the files that a folder or a pattern stands for, and names for files."""

import glob
import os
import re
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path

import fsspec

from toolkit.row_files import READERS

# Endings of compressed files.
COMPRESSIONS = (".gz", ".zst")

# Files and folders that are not taken from a folder: as in Arrow's datasets, metadata and unfinished files.
HIDDEN = re.compile("(^|/)[_.]")


def endings_of(path: str) -> tuple[str, str]:
    """The ending of a file without compression and the ending of its compression, in lower case; "" for none."""
    stem, ending = os.path.splitext(path.lower())
    return (os.path.splitext(stem)[1], ending) if ending in COMPRESSIONS else (ending, "")


def filesystem_of(url: str) -> tuple:
    """The file system of a URL, None for a path of this machine, and the path in it."""
    return fsspec.core.url_to_fs(url) if "://" in url else (None, url)


def expand(url: str) -> list[str]:
    """The files that a pattern matches, or those with known endings in a folder and the folders in it, sorted; of
    another path or URL, itself. A folder's files and folders whose names begin with "_" or "." are left out.

    Raises:
        FileNotFoundError: there are none.
    """
    url = url.removeprefix("file://")
    system, path = filesystem_of(url)
    is_remote_file = system is not None and endings_of(path)[0] in READERS  # without a request
    is_folder = not is_remote_file and (system or os.path).isdir(path)
    if not is_folder and (not glob.has_magic(url) or (system and "*" not in url) or os.path.isfile(path)):
        return [url]
    if system:
        folder, found = path.rstrip("/"), system.find(path) if is_folder else system.glob(path)
    else:
        # The name of a folder that exists may have brackets.
        existing = next(each for each in (Path(path), *Path(path).parents) if each.is_dir())
        folder, rest = "" if existing == Path() else str(existing), str(Path(path).relative_to(existing))
        names = glob.glob("**/*" if is_folder else rest, root_dir=existing, recursive=True)
        found = [each for name in names if os.path.isfile(each := os.path.join(folder, name))]
    if is_folder:
        names = ((each, each.removeprefix(folder)) for each in found)
        found = [each for each, name in names if endings_of(name)[0] in READERS and not HIDDEN.search(name)]
    if not found:
        expected = "files with known endings in it" if is_folder else "a file, or a pattern of files that exist"
        raise FileNotFoundError(f"{url} {'has' if is_folder else 'matches'} no file; expected {expected}")
    return sorted(map(system.unstrip_protocol, found) if system else found)


def name_files(files: Sequence) -> None:
    """Names files by their paths below the folder that all of them share, which do not depend on where this folder is,
    or on how it is named."""
    paths = [each.url.split("/") if each.system else os.path.abspath(each.url).split(os.sep) for each in files]
    levels = zip(*(path[:-1] for path in paths), strict=False)
    shared = len(list(takewhile(lambda names: len(set(names)) == 1, levels)))
    for each, path in zip(files, paths, strict=True):
        each.name = "/".join(path[shared:])
