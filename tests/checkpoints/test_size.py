"""How much code a saved model carries, which whoever opens it with `trust_remote_code` is asked to read."""

import ast
import io
import re
import tokenize
from pathlib import Path

import pytest

import modeling_scratchbert
from support.folders import ROOT
from support.models import random_scratchbert

PACKAGE = Path(modeling_scratchbert.__file__).parent
LAYOUT = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER,
}  # fmt: skip


def lines_of_code(path: Path) -> int:
    """The lines that are not blank, a comment or part of a docstring."""
    text = path.read_text(encoding="utf-8")
    lines = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in LAYOUT:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0] if node.body else None
            if ast.get_docstring(node) is not None and isinstance(first, ast.Expr) and first.end_lineno:
                lines.difference_update(range(first.lineno, first.end_lineno + 1))
    return len(lines)


def test_blank_lines_comments_and_docstrings_are_not_counted(tmp_path):
    code = '"""A\n\nmodule."""\n\n# why\ndef f(\n    x,\n):\n    """A function."""\n    return """\n\n"""  # a string\n'
    (tmp_path / "some.py").write_text(code)
    assert lines_of_code(tmp_path / "some.py") == 6


@pytest.fixture
def saved(tmp_path):
    random_scratchbert().save_pretrained(tmp_path)
    return tmp_path


def test_a_saved_folder_has_the_files_that_the_documentation_lists(saved):
    page = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    table = page.partition("### Copied into every saved model")[2].partition("\n#")[0]
    code = set(re.findall(r"^\| `(\w+\.py)` \|", table, re.MULTILINE))
    names = {path.relative_to(saved).as_posix() for path in saved.rglob("*")}
    assert names == code | {"config.json", "model.safetensors", "probe.json"}


def test_a_saved_folder_has_at_most_1500_lines_of_code(saved):
    assert sum(map(lines_of_code, saved.rglob("*.py"))) <= 1500


@pytest.mark.parametrize(("folder", "most"), [("", 2588), ("cpu", 564)], ids=["the whole", "cpu"])
def test_the_package_has_at_most_as_many_lines(folder, most):
    assert sum(map(lines_of_code, (PACKAGE / folder).rglob("*.py"))) <= most
