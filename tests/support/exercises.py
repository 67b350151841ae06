"""The exercises of the course, with their solutions and mistakes."""

import runpy
import sys
from pathlib import Path

import course
from course import EXERCISES

MISTAKES: dict[str, list[tuple[str, str, str]]] = runpy.run_path(str(EXERCISES / "tests" / "mistakes.py"))["MISTAKES"]
CHAPTERS = {name: number for number, name in enumerate(MISTAKES, start=1)}
SOLUTIONS = {name: (EXERCISES / "tests" / "solutions" / f"{name}.py").read_text(encoding="utf-8") for name in MISTAKES}


def solve(folder: Path, old: str = "", new: str = "") -> None:
    """Writes the exercises into `folder`, and the solutions over them.

    Args:
        old, new: a text that is in one solution at least, and what to write in its place, to plant a mistake.
    """
    course.start(folder)
    assert any(old in text for text in SOLUTIONS.values()), f"no solution contains {old!r}"
    for name, text in SOLUTIONS.items():
        (folder / f"{name}.py").write_text(text.replace(old, new) if old else text, encoding="utf-8")


def run_tests(folder: Path, chapter: int, source: str) -> int:
    """Runs `course check` on the files in `folder`, in this process. Returns the exit code."""
    for path in EXERCISES.rglob("*.py"):
        sys.modules.pop(path.stem, None)  # of another folder
    return course.main(["check", str(chapter), "--folder", str(folder), "--model", source])
