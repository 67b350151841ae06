"""The pages of docs/: runs their Python, and compares the output with what the page shows.

    python tests/docs/pages.py docs/course/0*.md --marks slow --folder docs/course/pictures
    python tests/docs/pages.py docs/course/01_attention.md --notebooks build/notebooks

A page is Markdown. Its ```python blocks run in one namespace, from top to bottom. A ```text block that follows one of
them is the output of that block. Words after `python` are marks: a block runs only if all its marks are given. A block
```text varies is an output that depends on the processor, such as that of a training: it is not compared.

The first command runs pages with their slow blocks; the files that the blocks write go to --folder. The second one
runs a page as a notebook, and writes it with its outputs and pictures.
"""

import argparse
import contextlib
import difflib
import io
import os
import re
import shlex
import sys
import tempfile
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path

FENCED = re.compile(r"^```(?P<info>[^\n`]*)\n(?P<text>.*?)^```[ ]*$", re.DOTALL | re.MULTILINE)
NUMBER = re.compile(r"((?<![\w.])[-+]?(?<!\w)\d+(?:\.\d+)?(?:[eE][-+]?\d+)?(?!\w))")
BERT = "google-bert/bert-base-uncased"
SHELL = ("", "sh", "bash", "shell", "console")


@dataclass
class Block:
    """A Python block, and the output that the page shows for it."""

    line: int  # the line of its fence
    code: str
    marks: frozenset[str]
    output: str | None = ""  # None for any output


def fenced_blocks(text: str) -> Iterator[tuple[re.Match, str, frozenset[str], int]]:
    """The match, the language, the marks and the line of each fenced block."""
    for match in FENCED.finditer(text):
        language, *marks = match["info"].split() or [""]
        yield match, language, frozenset(marks), text.count("\n", 0, match.start()) + 1


def python_blocks(text: str) -> list[Block]:
    """The Python blocks of a page, with their outputs. Raises ValueError for an output that follows no block."""
    blocks: list[Block] = []
    end_of_code = None
    for match, language, marks, line in fenced_blocks(text):
        follows_code = end_of_code is not None and not text[end_of_code : match.start()].strip()
        if language == "python":
            blocks.append(Block(line, match["text"], marks))
            end_of_code = match.end()
        elif language == "text":
            if not follows_code:
                raise ValueError(f"line {line}: a text block follows no Python block; expected the output of one.")
            blocks[-1].output = None if "varies" in marks else match["text"]
            end_of_code = None
    return blocks


def without_outputs(text: str) -> str:
    """The page without the outputs of its Python blocks."""
    return re.sub(r"^```text( varies)?\n.*?^```\n\n?", "", text, flags=re.DOTALL | re.MULTILINE)


def agrees(actual: str, expected: str) -> bool:
    """Whether two outputs are equal, except for spaces at the ends of lines, and for decimal numbers that differ by at
    most half of the last digit of the expected one. Whole numbers must be equal."""
    actual_parts, expected_parts = (NUMBER.split(stripped(text)) for text in (actual, expected))
    if len(actual_parts) != len(expected_parts) or actual_parts[::2] != expected_parts[::2]:
        return False
    return all(map(is_same_number, actual_parts[1::2], expected_parts[1::2]))


def stripped(text: str) -> str:
    return "\n".join(line.rstrip() for line in text.rstrip().split("\n"))


def is_same_number(actual: str, expected: str) -> bool:
    last_digit = Decimal(expected).as_tuple().exponent
    tolerance = Decimal(5).scaleb(last_digit - 1) if last_digit < 0 else 0
    return abs(Decimal(actual) - Decimal(expected)) <= tolerance


def run(page: Path, marks: Collection[str] = (), model: str | None = None, source: str = BERT) -> dict:
    """Runs the Python blocks of a page in the working directory, and returns their namespace.

    Args:
        page: the Markdown file.
        marks: blocks with other marks are skipped.
        model: the BERT that the blocks open in place of `source`, as a folder or hub id.

    Raises:
        AssertionError: a block printed something else than the page shows.
    """
    namespace: dict = {"__name__": "__main__"}
    for block in python_blocks(page.read_text(encoding="utf-8")):
        if block.marks <= set(marks):
            # Empty lines before the code: a traceback then has the line of the page.
            text = block.code.replace(source, model) if model else block.code
            code = compile("\n" * block.line + text, str(page), "exec")
            with contextlib.redirect_stdout(io.StringIO()) as printed:
                exec(code, namespace)
            check_output(f"{page.name}, line {block.line}", printed.getvalue(), block.output)
    return namespace


def check_output(place: str, actual: str, expected: str | None) -> None:
    """Raises AssertionError, with the differences, if the outputs do not agree."""
    if expected is not None and not agrees(actual, expected):
        lines = (stripped(text).split("\n") for text in (expected, actual))
        differences = difflib.unified_diff(*lines, "the page", "the output", lineterm="")
        raise AssertionError("\n".join([f"{place}: the output is not what the page shows.", *differences]))


def machine_marks() -> set[str]:
    """The marks of blocks that need instructions of this processor."""
    from modeling_scratchbert.cpu.library import find_library

    return {"vnni"} if find_library() else set()


def write_notebook(page: Path, folder: Path) -> Path:
    """Runs the page as a notebook, with all blocks that this processor can run, and writes it with its outputs and
    pictures. Returns the path.

    Raises:
        nbclient.exceptions.CellExecutionError: a block failed.
    """
    import jupytext
    from nbclient import NotebookClient

    folder.mkdir(parents=True, exist_ok=True)
    notebook = jupytext.reads(notebook_text(page, folder), fmt="md")
    notebook.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3", "language": "python"}
    impossible = {"vnni"} - machine_marks()
    notebook.cells = [cell for cell in notebook.cells if not impossible & cell.metadata.keys()]
    with tempfile.TemporaryDirectory() as working_directory:
        NotebookClient(notebook, timeout=None, resources={"metadata": {"path": working_directory}}).execute()
    for cell in notebook.cells:
        if cell.cell_type == "code":  # without progress bars and warnings of libraries
            cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
    path = folder / page.with_suffix(".ipynb").name
    jupytext.write(notebook, path)
    return path


def notebook_text(page: Path, folder: Path) -> str:
    """The Markdown of a page for a notebook in `folder`: without the outputs and pictures that its cells will have.
    Links to other pages with a number lead to their notebooks."""
    text = without_outputs(page.read_text(encoding="utf-8"))
    # jupytext would make cells of shell blocks.
    text = re.sub(rf"^```({'|'.join(SHELL)})$", "```", text, flags=re.MULTILINE)
    here = Path(os.path.relpath(page.resolve().parent, folder.resolve())).as_posix()

    def changed(match: re.Match) -> str:
        target = match["target"]
        if target is None or re.match(r"#|[a-z]+:", target):  # a block, or a link that leads there as it is
            return match[0]
        if match["picture"] and target.startswith("pictures/"):
            return ""
        number = re.fullmatch(r"(\d+_\w+)\.md(#.*)?", target)
        target = f"{number[1]}.ipynb{number[2] or ''}" if number else f"{here}/{target}"
        return f"{match['picture'] or ''}[{match['label']}]({target})"

    link = re.compile(
        rf"{FENCED.pattern}|(?P<picture>!)?\[(?P<label>(?:[^\[\]]|\[[^\]]*\])*)\]\((?P<target>[^)\s]+)\)", FENCED.flags
    )
    return link.sub(changed, text)


# ------------------------------------------------------------------------------------------------------ shell commands


@dataclass
class Command:
    """A call of a script of this project in a shell block of a page. `script` is its name; for train, with the task."""

    line: int
    script: str
    flags: list[str]


def shell_lines(text: str) -> Iterator[tuple[int, list[str]]]:
    """The line number and the words of each command in the shell blocks of a page."""
    for match, language, _, line in fenced_blocks(text):
        if language in SHELL:
            start = line
            for command in re.split(r"(?<!\\)\n", match["text"]):
                start, here = start + command.count("\n") + 1, start + 1
                with contextlib.suppress(ValueError):  # a quote that is not closed: no command
                    yield here, shlex.split(command, comments=True)


def commands(text: str, scripts: Collection[str]) -> list[Command]:
    """The calls of scripts in a page: `python scripts/NAME.py …` and `scratchbert NAME …`, also after a launcher.

    Raises:
        ValueError: there is no such script.
    """
    found = []
    for line, words in shell_lines(text):
        for index, word in enumerate(words):
            name = re.search(r"scripts/(\w+)\.py$", word) or re.search(r"scratchbert --path (\w+)\)$", word)
            if name is None and index > 0 and words[index - 1] == "scratchbert":
                name = re.match(r"(\w+)$", word)
            if name is not None:
                if name[1] not in scripts:
                    raise ValueError(f"line {line}: there is no script {name[1]!r}.")
                flags = [word.partition("=")[0] for word in words[index + 1 :] if word.startswith("--")]
                script = " ".join([name[1], *words[index + 1 : index + 2]]) if name[1] == "train" else name[1]
                found.append(Command(line, script, flags))
                break
    return found


def make_targets(text: str) -> list[tuple[int, str]]:
    """The line and the name of each Makefile target in the shell blocks of a page."""
    lines = ((line, words) for line, words in shell_lines(text) if words[:1] == ["make"])
    return [(line, word) for line, words in lines for word in words[1:] if "=" not in word]


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pages", type=Path, nargs="+", metavar="page")
    parser.add_argument("--marks", nargs="*", default=[], metavar="MARK", help="also run the blocks with these marks")
    parser.add_argument("--folder", type=Path, default=Path(), help="the working directory of the blocks")
    parser.add_argument("--notebooks", type=Path, help="write the pages into this folder as notebooks, run completely")
    args = parser.parse_args(argv)
    pages = [page.resolve() for page in args.pages]
    if args.notebooks:
        for page in pages:
            print(write_notebook(page, args.notebooks), flush=True)
        return 0
    args.folder.mkdir(parents=True, exist_ok=True)
    os.chdir(args.folder)
    for page in pages:
        try:
            run(page, {*args.marks, *machine_marks()})
        except AssertionError as error:
            print(error, file=sys.stderr)
            return 1
        print(f"{page.name}: every output is as shown.", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
