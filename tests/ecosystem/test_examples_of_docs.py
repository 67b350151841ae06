"""The Python of docs/ that uses other packages: the blocks with the mark `ecosystem`."""

import sys

import pytest

import convert_checkpoint
from support.folders import ROOT

sys.path.append(str(ROOT / "tests" / "docs"))

from pages import python_blocks, run

PAGES = [
    page
    for page in sorted((ROOT / "docs").glob("*.md"))
    if any("ecosystem" in block.marks for block in python_blocks(page.read_text(encoding="utf-8")))
]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_python_of_the_page_runs(page, minilm, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert convert_checkpoint.main([minilm, "my-model"]) == 0
    run(page, marks=["ecosystem"], model=minilm)
