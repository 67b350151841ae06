"""The README's Python runs, on the checkpoint that the tests have in place of bert-base-uncased."""

import re
import runpy

import pytest

import convert_checkpoint
from support.folders import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^## ([^\n]+)\n(?:(?!^## ).)*?^```python\n(.*?)^```", README, flags=re.DOTALL | re.MULTILINE)


def test_the_readme_shows_the_five_uses():
    assert {"Load", "Fill in a mask", "Classify", "Convert", "Check"} <= {heading for heading, _ in BLOCKS}


@pytest.mark.parametrize(("heading", "code"), BLOCKS, ids=[heading for heading, _ in BLOCKS])
def test_the_readmes_python_runs(heading, code, real_bert, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if heading == "Convert":
        assert convert_checkpoint.main([str(real_bert), "my-model"]) == 0
    (tmp_path / "block.py").write_text(code.replace("google-bert/bert-base-uncased", str(real_bert)), encoding="utf-8")
    runpy.run_path(str(tmp_path / "block.py"))
    if heading == "Convert":
        assert (tmp_path / "a-copy" / "modeling_scratchbert.py").exists()
        assert (tmp_path / "a-bert" / "model.safetensors").exists()
