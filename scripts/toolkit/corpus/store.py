"""The folder of a run's output: on this machine, or where fsspec reaches. A file appears whole or not at all."""

import os
from pathlib import Path

import fsspec

from toolkit.files import atomic_file

STATE = ".state"  # what is known of each part besides its rows


class Store:
    """A folder that fsspec reaches, of files and of one level of folders. One completed upload takes the place of a
    rename, which object stores lack."""

    def __init__(self, url: str):
        self.system, self.root = fsspec.core.url_to_fs(url)

    def names(self, folder: str = "") -> set[str]:
        """The names of the files in the store, or in one of its folders."""
        path = f"{self.root}/{folder}".rstrip("/")
        self.system.invalidate_cache()
        if not self.system.exists(path):
            return set()
        return {
            entry["name"].rpartition("/")[2] for entry in self.system.ls(path, detail=True) if entry["type"] == "file"
        }

    def read(self, name: str) -> bytes:
        return self.system.cat_file(f"{self.root}/{name}")

    def write(self, name: str, content: bytes) -> None:
        """Writes a file. After a crash, the file has the old content or the new one."""
        path = f"{self.root}/{name}"
        self.system.makedirs(path.rpartition("/")[0], exist_ok=True)
        self.system.pipe_file(path, content)

    def remove(self, name: str) -> None:
        self.system.rm_file(f"{self.root}/{name}")


class LocalStore(Store):
    """A folder of this machine."""

    def __init__(self, url: str):
        super().__init__(url)
        self.path = Path(self.root)

    def write(self, name: str, content: bytes) -> None:
        path = self.path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_file(path) as temporary, open(temporary, "wb") as file:
            file.write(content)
            flush(file)
        flush_folder(path.parent)


def open_store(url: str) -> Store:
    """The store of `--output`: a folder of this machine, if `url` has no scheme or `file://`, else another."""
    return Store(url) if is_remote(url) else LocalStore(url)


def is_remote(url: str) -> bool:
    """Whether `url` is not a path of this machine."""
    return "://" in url and not url.startswith("file://")


def flush(file) -> None:
    """Returns when the content of a file is on the disk."""
    file.flush()
    os.fsync(file.fileno())


def flush_folder(path: Path) -> None:
    """Returns when the names of the files in a folder are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
