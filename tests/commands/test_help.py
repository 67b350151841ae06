"""What `--help` shows, and that it imports nothing heavy; and the extras that error messages name."""

import ast
import subprocess
import sys
import tomllib

import pytest

from support.folders import ROOT

SCRIPTS = ROOT / "scripts"
COMMANDS = {path.stem: path for path in sorted(SCRIPTS.glob("*.py")) if path.name != "__main__.py"}

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
    from toolkit.benchmark import VARIANTS
    from toolkit.common import EXTRAS

    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    distributions = {"sklearn": "scikit-learn", "scipy": "scikit-learn"}  # scikit-learn requires scipy
    needed = {library for variant in VARIANTS.values() for library in variant.needs}
    assert needed <= EXTRAS.keys()
    for library, extra in EXTRAS.items():
        distribution = distributions.get(library, library).replace("_", "-")
        assert any(requirement.startswith(distribution) for requirement in extras[extra]), library
