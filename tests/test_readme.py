"""The README's Python prints what the README shows, with the checkpoint of the tests in place of that of the Hub."""

from pages import python_blocks, run
from support.folders import ROOT

README = ROOT / "README.md"
SOURCE = "sentence-transformers/all-MiniLM-L6-v2"


def test_the_readme_shows_three_tasks():
    blocks = python_blocks(README.read_text(encoding="utf-8"))
    assert [block.marks for block in blocks] == [set(), set(), {"trained"}, set()]
    assert all(block.output != "" for block in blocks)


def test_the_readmes_python_prints_what_it_shows(minilm, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run(README, model=minilm, source=SOURCE)
