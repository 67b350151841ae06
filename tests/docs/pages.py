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
import tempfile
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path

FENCED = re.compile(r"^```(?P<info>[^\n`]*)\n(?P<text>.*?)^```[ ]*$", re.DOTALL | re.MULTILINE)
FOLDED = re.compile(
    r"^<details><summary>The code of [^<]+</summary>\n\n(```python[^\n]*)(.*?^```\n)\n</details>\n",
    re.DOTALL | re.MULTILINE,
)
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
    end_of_code = 0
    for match, language, marks, line in fenced_blocks(text):
        if language == "python":
            blocks.append(Block(line, match["text"], marks))
            end_of_code = match.end()
        elif language == "text":
            if text[end_of_code : match.start()].strip():
                raise ValueError(f"line {line}: a text block follows no Python block; expected the output of one.")
            blocks[-1].output = None if "varies" in marks else match["text"]
    return blocks


def agrees(actual: str, expected: str) -> bool:
    """Whether two outputs are equal, except for spaces at the ends of lines, and for decimal numbers that differ by at
    most half of the last digit of the expected one. Whole numbers must be equal."""
    actual_parts, expected_parts = (NUMBER.split(stripped(text)) for text in (actual, expected))
    return actual_parts[::2] == expected_parts[::2] and all(
        map(is_same_number, actual_parts[1::2], expected_parts[1::2])
    )


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
    A folded block becomes a cell whose code is hidden. Links to other pages with a number lead to their notebooks."""
    text = page.read_text(encoding="utf-8")
    text = FOLDED.sub(r'\1 jupyter={"source_hidden": true}\2', text)
    text = re.sub(r"^```text( varies)?\n.*?^```\n\n?", "", text, flags=re.DOTALL | re.MULTILINE)
    # jupytext would make cells of shell blocks.
    text = re.sub(rf"^```({'|'.join(SHELL)})$", "```", text, flags=re.MULTILINE)
    here = Path(os.path.relpath(page.resolve().parent, folder.resolve())).as_posix()

    def changed(match: re.Match) -> str:
        target = match["target"]
        if target is None or re.match(r"#|[a-z]+:", target):  # a block, or a link that leads there as it is
            return match[0]
        if match["picture"] and re.fullmatch(r"pictures/.*\.png", target):  # an .svg is drawn by hand, and stays
            return ""
        number = re.fullmatch(r"(\d+_\w+)\.md(#.*)?", target)
        target = f"{number[1]}.ipynb{number[2] or ''}" if number else f"{here}/{target}"
        return f"{match['picture'] or ''}[{match['label']}]({target})"

    link = re.compile(
        rf"{FENCED.pattern}|(?P<picture>!)?\[(?P<label>(?:[^\[\]]|\[[^\]]*\])*)\]\((?P<target>[^)\s]+)\)", FENCED.flags
    )
    return link.sub(changed, text)


# ------------------------------------------------------------------------------------------------------ shell commands

# A command of this project with its arguments, also after a launcher: "$(scratchbert --path train)".
SCRIPT = re.compile(r"(?<!\w)scratchbert (?:--path )?(?P<command>\w+)(?![\w/])(?P<arguments>.*)")


def shell_lines(text: str) -> Iterator[str]:
    """The commands in the shell blocks of a page, without comments."""
    for match, language, _, _ in fenced_blocks(text):
        if language in SHELL:
            for line in match["text"].replace("\\\n", " ").splitlines():
                yield line.partition(" #")[0]


def script_calls(text: str) -> Iterator[tuple[str, list[str]]]:
    """The name and the flags of each call of a script in a page. The name of train has its task."""
    for match in filter(None, map(SCRIPT.search, shell_lines(text))):
        script = match["command"]
        words = match["arguments"].split()
        if script == "train":
            script = f"train {next(word for word in words if re.match(r'[a-z]', word))}"
        yield script, re.findall(r" (--[\w-]+)", match["arguments"])


def make_targets(text: str) -> list[str]:
    """The Makefile targets in the shell blocks of a page."""
    return [target for line in shell_lines(text) for target in re.findall(r"^make ([a-z-]+)", line)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pages", type=Path, nargs="+", metavar="page")
    parser.add_argument("--marks", nargs="*", default=[], metavar="MARK", help="also run the blocks with these marks")
    parser.add_argument("--folder", type=Path, default=Path(), help="the working directory of the blocks")
    parser.add_argument("--notebooks", type=Path, help="write the pages into this folder as notebooks, run completely")
    args = parser.parse_args()
    pages = [page.resolve() for page in args.pages]
    if args.notebooks:
        for page in pages:
            print(write_notebook(page, args.notebooks), flush=True)
        return
    args.folder.mkdir(parents=True, exist_ok=True)
    os.chdir(args.folder)
    for page in pages:
        run(page, {*args.marks, *machine_marks()})
        print(f"{page.name}: every output is as shown.", flush=True)


if __name__ == "__main__":
    main()
