"""The folder of a run's output: on this machine, or where fsspec reaches. A file appears whole or not at all.

What is not a part is in the folder `__run__`. Arrow, pandas, Spark and `datasets` skip names that begin with two
underscores, and a pattern such as `*.parquet` does not reach into a folder.
"""

import os
import uuid
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import fsspec
from filelock import FileLock, Timeout

RUN = "__run__"
RECORDS = f"{RUN}/parts"  # what is known of each part besides its rows

# Files that are read at once: enough for the latency of an object store.
READ_AT_ONCE = 200


def record_name(number: int) -> str:
    """The name of the record of a part."""
    return f"{RECORDS}/{number:06d}.json"


class Store:
    """A folder that fsspec reaches, of files and of folders. One completed upload takes the place of a rename, which
    object stores lack."""

    def __init__(self, url: str):
        self.system, self.root = fsspec.core.url_to_fs(url)

    def path_of(self, name: str) -> str:
        return f"{self.root}/{name}".rstrip("/")

    def sizes(self, folder: str = "") -> dict[str, int]:
        """The names of the files in the store, or in one of its folders, and their sizes in bytes."""
        self.system.invalidate_cache()
        try:
            entries = self.system.ls(self.path_of(folder), detail=True)
        except FileNotFoundError:
            return {}
        return {each["name"].rpartition("/")[2]: each["size"] for each in entries if each["type"] == "file"}

    def has(self, name: str) -> bool:
        folder, _, file = name.rpartition("/")
        return file in self.sizes(folder)

    def read(self, name: str) -> bytes:
        return self.system.cat_file(self.path_of(name))

    def read_all(self, names: Sequence[str]) -> Iterator[bytes]:
        """The contents of files, in this order, a few at a time in memory."""
        for start in range(0, len(names), READ_AT_ONCE):
            paths = [self.path_of(name) for name in names[start : start + READ_AT_ONCE]]
            found = self.system.cat(paths)  # of one path, its content
            yield from ([found[path] for path in paths] if isinstance(found, dict) else [found])

    def create(self) -> None:
        """Creates the folders."""
        self.system.makedirs(self.path_of(RECORDS), exist_ok=True)

    def write(self, name: str, content: bytes) -> None:
        """Writes a file into a folder of the store. After a crash, the file has the old content or the new one."""
        self.system.pipe_file(self.path_of(name), content)

    def move(self, name: str, target: str) -> None:
        """Moves a file, in place of another one if there is one."""
        self.write(target, self.read(name))
        self.remove(name)

    def remove(self, name: str) -> None:
        with suppress(FileNotFoundError):
            self.system.rm_file(self.path_of(name))

    def remove_folder(self, name: str) -> None:
        if self.system.exists(self.path_of(name)):
            self.system.rm(self.path_of(name), recursive=True)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Creates the folders, and removes those that stay empty."""
        self.create()
        yield


class LocalStore(Store):
    """A folder of this machine.

    Args:
        run: the name of what writes to it. Several may, if they have different names.
    """

    def __init__(self, url: str, run: str):
        super().__init__(url)
        self.path = Path(self.root)
        self.lock = self.path / RUN / f"{run}.lock"
        self.unfinished = self.path / RUN / f"{run}.unfinished"

    def create(self):
        (self.path / RECORDS).mkdir(parents=True, exist_ok=True)
        self.unfinished.mkdir(exist_ok=True)

    def write(self, name, content):
        # Not beside the file: what a killed run leaves must not look like a part, or like a user's file.
        temporary = self.unfinished / uuid.uuid4().hex
        try:
            try:
                with open(temporary, "xb") as file:
                    file.write(content)
                    flush(file)
                self.rename(temporary, self.path / name)
            finally:
                temporary.unlink(missing_ok=True)
        except FileNotFoundError as error:
            raise FileNotFoundError(
                f"--output {self.root}: {error.filename} is missing; expected the folder that the "
                "run created, which nothing removes or moves meanwhile"
            ) from None

    def rename(self, old: Path, new: Path) -> None:
        os.replace(old, new)
        flush_folder(new.parent)

    def move(self, name, target):
        self.rename(self.path / name, self.path / target)

    @contextmanager
    def locked(self):
        """Creates and locks the folder, and removes what a killed run left unfinished in it. Folders that stay empty
        are removed.

        Raises:
            ValueError: another run has it.
        """
        with ExitStack() as stack:
            for folder in (self.path, self.path / RUN, self.path / RECORDS, self.unfinished):
                stack.callback(remove_if_empty, folder)
            self.create()
            lock = FileLock(self.lock, timeout=0)
            try:
                stack.enter_context(lock)
            except Timeout:
                raise ValueError(
                    f"--output {self.root} is in use by another run; expected a folder of its own"
                ) from None
            stack.callback(self.lock.unlink, missing_ok=True)
            for path in self.unfinished.iterdir():
                path.unlink()
            yield


def open_store(url: str, run: str = "run") -> Store:
    """The store of `--output`: a folder of this machine, if `url` has no scheme or `file://`, else another."""
    return Store(url) if is_remote(url) else LocalStore(url, run)


def is_remote(url: str) -> bool:
    """Whether `url` is not a path of this machine."""
    return "://" in url and not url.startswith("file://")


def remove_if_empty(folder: Path) -> None:
    with suppress(OSError):
        folder.rmdir()


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
