"""Paths and URLs of inputs: the files that a folder or a pattern stands for, and short names for files."""

import glob
import os
import re
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path

import fsspec

from toolkit.row_files import READERS, endings_of

# Files and folders that are not taken from a folder: as in Arrow's datasets, metadata and unfinished files.
HIDDEN = re.compile("(^|/)[_.]")


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
    is_folder = system.isdir(path) if system and endings_of(path)[0] not in READERS else os.path.isdir(path)
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
        found = [
            each for each in found if endings_of(each)[0] in READERS and not HIDDEN.search(each.removeprefix(folder))
        ]
    if not found:
        expected = "files with known endings in it" if is_folder else "a file, or a pattern of files that exist"
        raise FileNotFoundError(f"{url} {'has' if is_folder else 'matches'} no file; expected {expected}")
    return sorted(map(system.unstrip_protocol, found) if system else found)


def short_names(urls: Sequence[str]) -> list[str]:
    """The paths of files below the folder that all of them share. They do not depend on where this folder is, or on
    how it is named."""
    paths = [url.split("/") if "://" in url else os.path.abspath(url).split(os.sep) for url in urls]
    levels = zip(*(path[:-1] for path in paths), strict=False)
    shared = len(list(takewhile(lambda names: len(set(names)) == 1, levels)))
    return ["/".join(path[shared:]) for path in paths]
