"""The chapters of the course as notebooks: the cells run, and print what the page shows."""

import os

import nbformat
import pytest

from pages import agrees, notebook_text, python_blocks, write_notebook
from support.folders import ROOT

COURSE = ROOT / "docs" / "course"
CHAPTER = COURSE / "01_attention.md"


def test_a_notebook_has_the_outputs_and_pictures_of_its_page(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.delenv("MPLBACKEND", raising=False)
    notebook = nbformat.read(write_notebook(CHAPTER, tmp_path), as_version=4)
    nbformat.validate(notebook)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    blocks = python_blocks(CHAPTER.read_text(encoding="utf-8"))
    assert [cell.source for cell in cells] == [block.code.rstrip("\n") for block in blocks]
    for cell, block in zip(cells, blocks, strict=True):
        printed = "".join(output.text for output in cell.outputs if output.output_type == "stream")
        assert agrees(printed, block.output)
        pictures = [output for output in cell.outputs if "image/png" in output.get("data", {})]
        assert len(pictures) == block.code.count("savefig")


@pytest.mark.parametrize("page", sorted(COURSE.glob("[0-9]*.md")), ids=lambda page: page.name)
def test_links_lead_to_notebooks_and_to_files(page, tmp_path):
    text = notebook_text(page, tmp_path)
    assert "](pictures/" not in text
    assert f"]({os.path.relpath(COURSE, tmp_path)}/../../modeling_scratchbert/" in text
    assert ".ipynb)" in text
    assert "```text" not in text
