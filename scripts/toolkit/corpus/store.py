"""The folder of a run's output: on this machine, or where fsspec reaches. A file appears whole or not at all."""

import os
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from toolkit.files import atomic_file

STATE = ".state"  # what is known of each part besides its rows
UNFINISHED = ".*-*-unfinished*"


class Store(Protocol):
    """A folder of files and of one level of folders."""

    def names(self, folder: str = "") -> set[str]:
        """The names of the files in the store, or in one of its folders."""
        ...

    def read(self, name: str) -> bytes: ...

    def write(self, name: str, content: bytes) -> None:
        """Writes a file. After a crash, the file has the old content or the new one."""
        ...

    def remove(self, name: str) -> None: ...


def open_store(url: str) -> Store:
    """The store of `--output`: a folder of this machine, if `url` has no scheme or `file://`, else one of fsspec."""
    return RemoteFolder(url) if is_remote(url) else LocalFolder(Path(url.removeprefix("file://")))


def is_remote(url: str) -> bool:
    """Whether `url` is not a path of this machine."""
    return "://" in url and not url.startswith("file://")


class LocalFolder:
    """A folder of this machine."""

    def __init__(self, path: Path):
        self.path = path

    def names(self, folder: str = "") -> set[str]:
        path = self.path / folder
        return {entry.name for entry in os.scandir(path) if entry.is_file()} if path.is_dir() else set()

    def read(self, name: str) -> bytes:
        return (self.path / name).read_bytes()

    def write(self, name: str, content: bytes) -> None:
        path = self.path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_file(path) as temporary, open(temporary, "wb") as file:
            file.write(content)
            flush(file)
        with open_folder(path.parent) as folder:
            os.fsync(folder)

    def remove(self, name: str) -> None:
        (self.path / name).unlink(missing_ok=True)


def flush(file) -> None:
    """Returns when the content of a file is on the disk."""
    file.flush()
    os.fsync(file.fileno())


@contextmanager
def open_folder(path: Path):
    """The descriptor of a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


class RemoteFolder:
    """A folder that fsspec reaches. One completed upload takes the place of a rename, which object stores lack."""

    def __init__(self, url: str):
        import fsspec

        self.system, self.root = fsspec.core.url_to_fs(url)

    def names(self, folder: str = "") -> set[str]:
        path = f"{self.root}/{folder}".rstrip("/")
        self.system.invalidate_cache()
        if not self.system.exists(path):
            return set()
        return {entry["name"].rpartition("/")[2] for entry in self.system.ls(path) if entry["type"] == "file"}

    def read(self, name: str) -> bytes:
        return self.system.cat_file(f"{self.root}/{name}")

    def write(self, name: str, content: bytes) -> None:
        path = f"{self.root}/{name}"
        self.system.makedirs(path.rpartition("/")[0], exist_ok=True)
        self.system.pipe_file(path, content)

    def remove(self, name: str) -> None:
        self.system.rm_file(f"{self.root}/{name}")
