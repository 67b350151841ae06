"""The command line that all commands share: parsing, one-line errors and exit codes.

Nothing here imports torch or transformers, so that every command answers `--help` at once.
"""

import argparse
import importlib.util
import io
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TextIO

# The libraries that each extra installs. pyproject.toml has the versions.
LIBRARIES = {
    "bench": ("ctranslate2", "nncf", "onnx", "onnxruntime", "onnxscript", "openvino", "torchao"),
    "corpus": ("pyarrow",),
    "ecosystem": ("sentence_transformers",),
    "lora": ("peft",),
    "plot": ("matplotlib",),
    "ray": ("ray",),
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

REPORT = "report"  # the name of the files that `Parser.add_report_output` adds


class CommandError(Exception):
    """Ends a command with a message of one line and an exit code."""

    def __init__(self, message: str, exit_code: int = 2):
        super().__init__(message)
        self.exit_code = exit_code


# ------------------------------------------------------------------------------------------------------------- parsing


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Keeps the lines of the description, and shows defaults that carry information."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.default is None or isinstance(action.default, bool) or action.default == []:
            return action.help
        if isinstance(action.default, list):
            return f"{action.help} (default: {' '.join(map(str, action.default))})"
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
        self.groups: dict[str, argparse._ArgumentGroup] = {}

    def group(self, title: str) -> argparse._ArgumentGroup:
        """The argument group with this title. `--help` shows groups in the order in which they are first used."""
        if title not in self.groups:
            self.groups[title] = self.add_argument_group(title)
        return self.groups[title]

    def add_report_output(self, numbers: str, picture: str) -> None:
        """Adds `--json`, `--plot`, and `--output`, which stands for both, to a command that prints a report.

        Args:
            numbers, picture: what is written, for `--help`.
        """
        output = self.group("output")
        output.add_argument(
            "--output",
            metavar="FOLDER",
            type=Path,
            help=f"write {REPORT}.json and {REPORT}.png into this folder, as --json and --plot do",
        )
        output.add_argument("--json", metavar="FILE", type=file_in_existing_folder, help=numbers)
        output.add_argument("--plot", metavar="FILE.png", type=file_in_existing_folder, help=picture)

    def parse_args(self, args=None, namespace=None) -> argparse.Namespace:
        """The arguments. Flags may be between positional ones, as in `SOURCE --to bert OUTPUT`."""
        return self.parse_intermixed_args(with_underscores(args), namespace)

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
                from toolkit.hub import silence_libraries

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


def open_report_output(args: argparse.Namespace) -> None:
    """Creates the folder of `--output`, if it is given, and sets `json` and `plot` to files in it, unless they are set.

    Raises:
        CommandError: matplotlib, which draws the picture, is not installed.
        OSError: the folder cannot be created.
    """
    if args.output is not None:
        args.json = args.json or args.output / f"{REPORT}.json"
        args.plot = args.plot or args.output / f"{REPORT}.png"
    if args.plot is not None:
        require("matplotlib")
    if args.output is not None:
        args.output.mkdir(parents=True, exist_ok=True)


def with_underscores(arguments: Sequence[str] | None) -> list[str]:
    """The arguments with the hyphens inside flag names, up to a bare `--`, replaced by underscores."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    end = arguments.index("--") if "--" in arguments else len(arguments)
    flags = [
        re.sub(r"(?s)^--([A-Za-z][\w-]*)(?==|$)", lambda match: "--" + match[1].replace("-", "_"), argument)
        for argument in arguments[:end]
    ]
    return flags + arguments[end:]


def integer_from(minimum: int) -> Callable[[str], int]:
    """An argument type: an integer of at least `minimum`."""

    def parse(text: str) -> int:
        if not text.isdecimal() or int(text) < minimum:
            raise argparse.ArgumentTypeError(f"{text!r} is invalid; expected an integer of at least {minimum}")
        return int(text)

    return parse


def file_in_existing_folder(text: str) -> Path:
    """An argument type: a file to write, in a folder that exists. It may be a link to one."""
    path, folder = Path(text), Path(os.path.realpath(text)).parent
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} is a folder; expected a file")
    if not folder.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} cannot be written: there is no folder {folder}")
    return path


# -------------------------------------------------------------------------------------------------- errors and output


def one_line(message: object) -> str:
    """The message with all white space, line breaks included, as single spaces."""
    return " ".join(str(message).split())


def described(error: Exception) -> str:
    """The class and the message of any exception, in one line of at most 300 characters."""
    return one_line(f"{type(error).__name__}: {error}".removesuffix(": "))[:300]


def shortened(text: str, width: int = 90) -> str:
    """The text without its middle, if it has more than `width` characters."""
    half = (width - 3) // 2
    return text if len(text) <= width else f"{text[:half]} … {text[-half:]}"


def first_of(items: Sequence[str], most: int) -> list[str]:
    """The first items, and as the last one how many more there are."""
    more = [f"and {len(items) - most:,} more"] if len(items) > most else []
    return [*items[:most], *more]


def table(rows: Sequence[Sequence[str]]) -> str:
    """The rows with aligned columns, the first on the left and the others on the right; `()` is an empty line."""
    first, *others = (max(map(len, column)) for column in zip(*filter(None, rows), strict=True))
    form = "  ".join([f"{{:<{first}}}", *(f"{{:>{width}}}" for width in others)])
    return "\n".join(form.format(*row).rstrip() if row else "" for row in rows)


def use_utf8() -> None:
    """Sets the encoding of standard output to UTF-8, whatever the locale."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(encoding="utf-8")


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
    return f'{" and ".join(libraries)} {verb} not installed; pip install "scratchbert[{extras}]"'


def require(*libraries: str) -> None:
    """Checks that these libraries, all in `EXTRAS`, are installed, without importing them.

    Raises:
        CommandError: one is not installed.
    """
    missing = [library for library in libraries if importlib.util.find_spec(library) is None]
    if missing:
        raise CommandError(how_to_install(missing))
