"""The walls between commands, toolkit and package, as the import statements have them."""

import ast
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from support.folders import ROOT

SCRIPTS = ROOT / "scripts"
COMMANDS = {path.stem: path for path in sorted(SCRIPTS.glob("*.py")) if path.name != "__main__.py"}
TOOLKIT = sorted((SCRIPTS / "toolkit").rglob("*.py"))
PACKAGE = sorted((ROOT / "modeling_scratchbert").rglob("*.py"))

# What the package may move or rename is imported by one module of the toolkit only.
IMPORTED_ONCE = {
    "raw_config",
    "scratchbert_fields",
    "tensor_names",
    "weight_files",
    "reference_class",
    "OTHER_REFERENCES",
    "to_bert",
    "to_scratchbert",
}


def statements(tree: ast.AST, in_functions: bool) -> Iterator[ast.Import | ast.ImportFrom]:
    """The import statements; without `in_functions`, only those that run when the file is imported."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            yield node
        elif in_functions or not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield from statements(node, in_functions)


def imported(path: Path, in_functions: bool = True) -> dict[str, set[str]]:
    """From each module that a file imports, at any level, to the names that it takes from it."""
    found: dict[str, set[str]] = {}
    for node in statements(ast.parse(path.read_text(encoding="utf-8")), in_functions):
        if isinstance(node, ast.Import):
            for alias in node.names:
                found.setdefault(alias.name, set())
        else:
            found.setdefault("." * node.level + (node.module or ""), set()).update(each.name for each in node.names)
    return found


def toolkit_imports(in_functions: bool) -> dict[str, set[str]]:
    """From each module of the toolkit to those that it imports."""
    modules = {
        ".".join(path.relative_to(SCRIPTS).with_suffix("").parts).removesuffix(".__init__"): path for path in TOOLKIT
    }
    found = {}
    for module, path in modules.items():
        imports = imported(path, in_functions).items()
        names = {each for name, taken in imports for each in (name, *(f"{name}.{inner}" for inner in taken))}
        found[module] = names & modules.keys() - {module}
    return found


def top(module: str) -> str:
    return module.partition(".")[0]


@pytest.mark.parametrize("path", [*COMMANDS.values(), *TOOLKIT, *PACKAGE], ids=lambda path: path.name)
def test_no_file_imports_a_command(path):
    assert not {top(module) for module in imported(path)} & COMMANDS.keys()


@pytest.mark.parametrize("path", COMMANDS.values(), ids=COMMANDS.keys())
def test_a_command_imports_toolkit_and_nothing_else_of_ours(path):
    ours = {file.stem for file in SCRIPTS.iterdir()} - {"toolkit", "__main__"}
    modules = {top(module) for module in imported(path)}
    assert not modules & ours
    assert "toolkit" in modules


@pytest.mark.parametrize("path", PACKAGE, ids=lambda path: path.name)
def test_the_package_does_not_know_the_toolkit(path):
    assert "toolkit" not in {top(module) for module in imported(path)}


@pytest.mark.parametrize("in_functions", [False, True])
def test_no_import_of_the_toolkit_is_in_a_cycle(in_functions):
    assert len(list(TopologicalSorter(toolkit_imports(in_functions)).static_order())) > 50  # else CycleError


def test_what_all_commands_share_does_not_import_training_or_corpus():
    parts = ("toolkit.corpus", "toolkit.data", "toolkit.tasks", "toolkit.training")
    found = toolkit_imports(in_functions=False)
    shared = {module for module in found if module.count(".") == 1 and module not in (*parts, "toolkit.benchmark")}
    assert {each for module in shared for each in found[module] if each.startswith(parts)} == set()


def test_what_the_package_may_move_is_imported_once():
    for name in IMPORTED_ONCE:
        users = [
            path.name
            for path in (*TOOLKIT, *COMMANDS.values())
            if any(name in names for module, names in imported(path).items() if top(module) == "modeling_scratchbert")
        ]
        assert users == ["checkpoint.py"], name


HELP = """
import runpy, sys
path = sys.argv.pop(1)
try:
    runpy.run_path(path, run_name="__main__")
except SystemExit as stopped:
    assert not stopped.code, stopped.code
heavy = {"torch", "transformers", "datasets", "accelerate", "numpy", "huggingface_hub"} & sys.modules.keys()
assert not heavy, heavy
"""


@pytest.mark.parametrize("name", COMMANDS)
def test_help_imports_nothing_heavy(name, tmp_path):
    """From another working directory, as everything is."""
    command = [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(SCRIPTS)!r})\n{HELP}", str(COMMANDS[name])]
    done = subprocess.run([*command, "--help"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    docstring = ast.get_docstring(ast.parse(COMMANDS[name].read_text(encoding="utf-8")))
    assert docstring.partition("\n")[0] in done.stdout


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_a_summary_of_one_line(name):
    summary = ast.get_docstring(ast.parse(COMMANDS[name].read_text(encoding="utf-8"))).partition("\n")[0]
    assert summary.endswith(".")
    assert len(summary) <= 110


def test_every_optional_library_has_its_extra():
    from toolkit.cli import EXTRAS

    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    distributions = {"sklearn": "scikit-learn", "scipy": "scikit-learn"}  # scikit-learn requires scipy
    for library, extra in EXTRAS.items():
        distribution = distributions.get(library, library).replace("_", "-")
        assert any(requirement.startswith(distribution) for requirement in extras[extra]), library
