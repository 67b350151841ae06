"""What all commands share: parsing, errors in one line and exit codes; files that are whole or absent; the machine.

Nothing here imports torch or transformers before it is used, so that every command answers `--help` at once.
"""

import argparse
import importlib.metadata
import importlib.util
import json
import logging
import math
import os
import platform
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from functools import partial
from pathlib import Path, PureWindowsPath
from typing import Any, TextIO

# The libraries that each extra installs. pyproject.toml has the versions.
LIBRARIES = {
    "bench": ("ctranslate2", "nncf", "onnx", "onnxruntime", "onnxscript", "openvino", "torchao", "zentorch"),
    "corpus": ("pyarrow",),
    "ecosystem": ("sentence_transformers",),
    "lora": ("peft",),
    "plot": ("matplotlib",),
    "ray": ("ray",),
    "test": ("pytest",),
    "train": (
        "accelerate",
        "datasets",
        "evaluate",
        "rapidfuzz",
        "rouge_score",
        "sacrebleu",
        "scipy",
        "seqeval",
        "sklearn",
        "tensorboard",
    ),
}
EXTRAS = {library: extra for extra, libraries in LIBRARIES.items() for library in libraries}

# The folder that holds scripts/ and configuration/, in a clone and in an installation.
ROOT = Path(__file__).resolve().parents[2]


class CommandError(Exception):
    """Ends a command with a message of one line and an exit code."""

    def __init__(self, message: str, exit_code: int = 2):
        super().__init__(message)
        self.exit_code = exit_code


# ------------------------------------------------------------------------------------------------------------- parsing


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Keeps the lines of the description, and shows defaults that carry information."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.default is None or isinstance(action.default, bool | list):
            return action.help
        return super()._get_help_string(action)


class Parser(argparse.ArgumentParser):
    """The argument parser of a command.

    Flags are defined with underscores (`--num_beams`); hyphens (`--num-beams`) are accepted everywhere. A usage error
    is one line on standard error, with exit code 2.

    Args:
        file: the command's `__file__`.
        description: the command's docstring.
    """

    def __init__(self, file: str, description: str, **options):
        super().__init__(prog=Path(file).name, description=description, formatter_class=HelpFormatter, **options)

    group = argparse.ArgumentParser.add_argument_group

    def parse_args(self, args=None, namespace=None) -> argparse.Namespace:
        """The arguments. Flags may be between positional ones, as in `SOURCE --to bert OUTPUT`."""
        found, unknown = self.parse_known_intermixed_args(with_underscores(args), namespace)
        refuse_unknown(self, unknown)
        return found

    def error(self, message: str):
        """Prints `message` on one line of standard error and exits with code 2."""
        self.exit(2, f"{self.prog}: {one_line(message)}\n")

    def report(self, message: object) -> None:
        """Prints a remark or an error on one line of standard error."""
        print(f"{self.prog}: {one_line(message)}", file=sys.stderr)

    def run(
        self,
        work: Callable[[], int | None],
        *,
        interrupted: str = "interrupted",
        expected: tuple[type[Exception], ...] = (),
        is_silent: bool = False,
    ) -> int:
        """Calls `work` and returns the command's exit code.

        The code is what `work` returns (None: 0), 2 for an error that the user can resolve, which is reported in one
        line, 130 after Ctrl-C, and 141 if the reader of standard output has closed it.

        Args:
            interrupted: the message after Ctrl-C.
            expected: exception types to report in one line, in addition to those of `is_expected`.
            is_silent: without the warnings and progress bars of libraries; see `silence_libraries`.
        """
        try:
            if is_silent:
                silence_libraries()
            code = work() or 0
            print(end="", flush=True)  # at the exit, an error of writing would be Python's own message
            return code
        except KeyboardInterrupt:
            self.report(interrupted)
            return 130
        except BrokenPipeError:
            if sys.stdout is sys.__stdout__:
                discard_output(sys.stdout)
            return 141
        except CommandError as error:
            self.report(error)
            return error.exit_code
        except Exception as error:
            if not is_expected(error, expected):
                raise
            self.report(missing_library(error) or error)
            return 2


def refuse_unknown(parser: argparse.ArgumentParser, unknown: Sequence[str]) -> None:
    """Ends the command if there are arguments that the parser does not have."""
    if unknown:
        flag = unknown[0].partition("=")[0]
        close = get_close_matches(flag, parser._option_string_actions, n=1) or ["one that `--help` lists"]
        parser.error(f"{flag} is no argument of this command; expected {close[0]}. Correct it or leave it out.")


def with_underscores(arguments: Sequence[str] | None) -> list[str]:
    """The arguments with the hyphens inside flag names, up to a bare `--`, replaced by underscores."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    end = arguments.index("--") if "--" in arguments else len(arguments)
    flags = [
        re.sub(r"(?s)^--([A-Za-z][\w-]*)(?==|$)", lambda match: "--" + match[1].replace("-", "_"), argument)
        for argument in arguments[:end]
    ]
    return flags + arguments[end:]


def add_reading_flags(group) -> None:
    """Adds the flags that say how a file of texts is read."""
    group.add_argument(
        "--text_column", metavar="NAME", help="the column of the texts; default: a usual name, such as text"
    )
    group.add_argument(
        "--delimiter",
        metavar="C",
        help="the separator of .csv, .tsv and .txt; default: comma, tab, and .txt is no table",
    )
    group.add_argument(
        "--encoding", metavar="NAME", default="utf-8", help="the encoding of text files, such as cp1252 or utf-16"
    )


def integer_from(minimum: int) -> Callable[[str], int]:
    """An argument type: an integer of at least `minimum`."""

    def parse(text: str) -> int:
        if not text.isdecimal() or int(text) < minimum:
            raise argparse.ArgumentTypeError(f"{text!r} is invalid; expected an integer of at least {minimum}")
        return int(text)

    return parse


# -------------------------------------------------------------------------------------------------- errors and output


def one_line(message: object) -> str:
    """The message with all white space, line breaks included, as single spaces."""
    return " ".join(str(message).split())


def silence_libraries() -> None:
    """Turns off warnings, load reports and progress bars. What matters in them is raised as an error."""
    import transformers

    logging.disable(logging.WARNING)
    transformers.logging.disable_progress_bar()


def described(error: Exception) -> str:
    """The class and the message of any exception, in one line of at most 300 characters."""
    return one_line(f"{type(error).__name__}: {error}".removesuffix(": "))[:300]


def first_of(items: Sequence[str], most: int) -> list[str]:
    """The first items, and as the last one how many more there are."""
    more = [f"and {len(items) - most:,} more"] if len(items) > most else []
    return [*items[:most], *more]


def table(rows: Sequence[Sequence[str]]) -> str:
    """The rows with aligned columns, the first on the left and the others on the right."""
    first, *others = (max(map(len, column)) for column in zip(*rows, strict=True))
    form = "  ".join([f"{{:<{first}}}", *(f"{{:>{width}}}" for width in others)])
    return "\n".join(form.format(*row).rstrip() for row in rows)


class UntilClosed:
    """A text stream, such as standard output, that discards what it is given when its reader has closed it."""

    def __init__(self, stream: TextIO):
        self._stream = stream

    def __getattr__(self, name: str):
        found = getattr(self._stream, name)
        return partial(self._unless_closed, found) if name in ("write", "flush") else found

    def _unless_closed(self, method: Callable, *texts: str):
        try:
            return method(*texts)
        except BrokenPipeError:
            discard_output(self._stream)
            return sum(map(len, texts))


def discard_output(stream: TextIO) -> None:
    """Discards what is in the buffer of a stream, which Python writes again at the exit, and what is written later."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, stream.fileno())
    os.close(null)


@contextmanager
def continuing_when_output_is_closed() -> Iterator[None]:
    """Lets the work continue when the reader of its output has gone, as in `command | head`."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = map(UntilClosed, before)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


@contextmanager
def handling_stop_signals(handler: Callable[[int, Any], None]) -> Iterator[None]:
    """Within the `with` block, SIGINT (Ctrl-C) and SIGTERM, which clusters send, call `handler`."""
    before = {number: signal.signal(number, handler) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, each in before.items():
            signal.signal(number, each)


def is_expected(error: Exception, more: tuple[type[Exception], ...] = ()) -> bool:
    """Whether `error` reports something that the user can resolve, such as a missing file, and not a bug."""
    if isinstance(error, (OSError, ValueError, ImportError, *more)):
        return True
    from huggingface_hub.errors import HTTPError, StrictDataclassError

    return isinstance(error, (HTTPError, StrictDataclassError))


@contextmanager
def about(subject: object) -> Iterator[None]:
    """Turns errors from opening or running a checkpoint, or from a file, into a `CommandError` that names `subject`."""
    try:
        yield
    except BrokenPipeError:
        raise
    except Exception as error:
        if not is_expected(error, (RuntimeError, AssertionError)):
            raise
        raise CommandError(f"{subject}: {missing_library(error) or one_line(error)}") from error


def missing_library(error: Exception) -> str | None:
    """How to install the library whose absence caused `error`; None for other errors."""
    if not isinstance(error, ModuleNotFoundError) or error.name is None:
        return None
    library = error.name.partition(".")[0]
    return how_to_install([library]) if library in EXTRAS else None


def how_to_install(libraries: Sequence[str]) -> str:
    """Says that these libraries, all in `EXTRAS`, are not installed, and which extras install them."""
    extras = ",".join(dict.fromkeys(EXTRAS[library] for library in libraries))
    verb = "is" if len(libraries) == 1 else "are"
    command = f'python -m pip install -c constraints.txt -e ".[{extras}]"'
    return f"{' and '.join(libraries)} {verb} not installed; in a clone of ScratchBert, run {command}"


def require(*libraries: str) -> None:
    """Checks that these libraries, all in `EXTRAS`, are installed, without importing them.

    Raises:
        CommandError: one is not installed.
    """
    missing = [library for library in libraries if importlib.util.find_spec(library) is None]
    if missing:
        raise CommandError(how_to_install(missing))


# --------------------------------------------------------------------------------------------------------------- files


def find_shipped(path: str | Path) -> Path:
    """`path` if it exists, else the file that this project ships under that name, such as `configuration/tiny.json`;
    `path` as it is if there is neither."""
    path = Path(path)
    return ROOT / path if not path.exists() and (ROOT / path).is_file() else path


@contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    """A temporary path. The file written there replaces `path` when the `with` block succeeds. Of a symbolic link, the
    target is replaced. A folder that does not exist is created."""
    if path.exists() and not path.is_file():
        yield path  # a device or a pipe, which receives the content; a folder, where opening the file fails
        return
    target = Path(os.path.realpath(path))
    target.parent.mkdir(parents=True, exist_ok=True)
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


def write_json(path: Path, value: object) -> None:
    """Writes `value`, which may hold numbers of NumPy and torch, as strict JSON, atomically."""
    write_text(path, json.dumps(to_json(value), indent=2, allow_nan=False, ensure_ascii=False) + "\n")


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


# --------------------------------------------------------------------------------------------------------------- paths

# Flags whose values are files or folders; or, where no such folder exists, hub ids.
FILES = ("train_file", "validation_file", "test_file", "output_dir", "config_name")
FOLDERS_OR_HUB_IDS = ("model", "tokenizer_name", "dataset")


def with_paths(settings: dict, change: Callable[[str, bool], str]) -> dict:
    """The settings with `change(value, is_file)` applied to each value that is a file, a folder or a hub id."""

    def changed(name: str, value):
        if isinstance(value, list):
            return [changed(name, each) for each in value]
        is_path = isinstance(value, str) and name in (*FILES, *FOLDERS_OR_HUB_IDS)
        return change(value, name in FILES) if is_path else value

    return {name: changed(name, value) for name, value in settings.items()}


def public_path(value: str, is_file: bool) -> str:
    """The last part of a path, with `/` or `\\`; a hub id as it is.

    Args:
        is_file: whether it can be no hub id.
    """
    return value if not is_file and is_hub_id(value) else PureWindowsPath(value).name or value


def is_hub_id(source: str) -> bool:
    """Whether `source` can be a repository, and is no file or folder."""
    from huggingface_hub.utils import validate_repo_id  # `--help` does not wait for it

    try:
        validate_repo_id(source)
    except ValueError:
        return False
    return not os.path.exists(source)


# ------------------------------------------------------------------------------------------------------------- machine

FLAGS = ("avx2", "avx_vnni", "avx512f", "avx512_vnni", "avx512_bf16", "avx512_fp16", "amx_tile", "amx_bf16", "amx_int8")


def processor() -> dict:
    """The processor: its name, its family, model and stepping (x86 on Linux; None elsewhere), and which of `FLAGS`, its
    instruction sets, it has. A virtual machine may hide instructions that its model has."""
    path = Path("/proc/cpuinfo")  # on Linux
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    fields = dict(re.findall(r"^(.+?)\s*: (.*)$", text, flags=re.MULTILINE))
    return {
        "processor": fields.get("model name") or platform.processor() or platform.machine(),
        "family": fields.get("cpu family"),
        "model": fields.get("model"),
        "stepping": fields.get("stepping"),
        "flags": [flag for flag in FLAGS if flag in fields.get("flags", "").split()],
    }


def version(library: str) -> str | None:
    """The installed version; None if the library is not installed."""
    try:
        return importlib.metadata.version(library)
    except importlib.metadata.PackageNotFoundError:
        return None


def commit() -> str:
    """The commit of this clone, with "-dirty" if its files differ from it; empty in an installation, or without git."""
    # --git-dir: an installation may be within the clone of another project.
    command = "git --git-dir=.git describe --always --abbrev=40 --exclude=* --dirty"
    return subprocess.run(command, cwd=ROOT, shell=True, capture_output=True, text=True, check=False).stdout.strip()


def identity() -> dict:
    """The processor, its cores, what computes optimised models, the commit, and the versions of Python and of other
    libraries, None where there is none."""
    from modeling_scratchbert.cpu.library import find_library

    found = find_library()
    libraries = ("torch", "transformers", "sentence-transformers", *LIBRARIES["bench"])
    return {
        **processor(),
        "engine": f"the library for {found[0]}" if found else "torch",
        "cores": os.cpu_count(),
        "commit": commit(),
        "python": platform.python_version(),
        "versions": {library: version(library) for library in libraries},
    }


def in_one_line(machine: dict) -> str:
    """What `identity` returns, as text."""
    libraries = ", ".join(f"{name} {version}" for name, version in machine["versions"].items() if version)
    return (
        f"{machine['processor']}, {machine['cores']} cores; Python {machine['python']}, {libraries}; "
        f"commit {machine['commit'] or 'unknown'}; optimised models are computed by {machine['engine']}"
    )
