"""The README's Python runs, on the checkpoint that the tests have in place of bert-base-uncased."""

import re
import runpy

import pytest

from support.folders import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python[^\n]*\n(.*?)^```", README, flags=re.DOTALL | re.MULTILINE)


def test_the_readme_shows_two_uses():
    assert [bool(re.search("BertModel.from_pretrained", block)) for block in BLOCKS] == [True, True]


@pytest.mark.parametrize("code", BLOCKS, ids=["sixty seconds", "change one block"])
def test_the_readmes_python_runs(code, real_bert, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "block.py").write_text(code.replace("google-bert/bert-base-uncased", str(real_bert)), encoding="utf-8")
    runpy.run_path(str(tmp_path / "block.py"))
