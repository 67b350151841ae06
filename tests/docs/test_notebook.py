"""The walk-through as a notebook: the cells run, and print what the page shows."""

import os
import subprocess
import sys

import jupytext
import nbformat

from pages import agrees, main, python_blocks
from support.folders import ROOT

WALKTHROUGH = ROOT / "docs" / "walkthrough.md"


def test_the_notebook_runs(tmp_path):
    path = tmp_path / "build" / "walkthrough.ipynb"
    assert main([str(WALKTHROUGH), "--notebook", str(path)]) == 0

    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    blocks = python_blocks(WALKTHROUGH.read_text(encoding="utf-8"))
    assert [cell.source for cell in cells] == [block.code.rstrip("\n") for block in blocks]
    assert not any(cell.outputs for cell in cells)
    assert not any("```text" in cell.source for cell in notebook.cells)

    notebook.cells = [cell for cell in notebook.cells if "slow" not in cell.metadata]
    (tmp_path / "script.py").write_text(jupytext.writes(notebook, fmt="py:percent"), encoding="utf-8")
    environment = {**os.environ, "MPLBACKEND": "Agg", "PYTHONPATH": str(ROOT)}
    result = subprocess.run(
        [sys.executable, "script.py"], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    assert agrees(result.stdout, "".join(block.output for block in blocks if not block.marks))


def test_the_pictures_are_found_from_the_notebook(tmp_path):
    path = tmp_path / "walkthrough.ipynb"
    main([str(WALKTHROUGH), "--notebook", str(path)])
    folder = os.path.relpath(WALKTHROUGH.parent, tmp_path)
    assert f"]({folder}/walkthrough/positions.png)" in path.read_text(encoding="utf-8")
