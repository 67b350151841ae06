"""The Python of docs/ that uses other packages: the blocks with the mark `ecosystem`, and all of embeddings.md."""

import re
import shlex
import shutil
import subprocess
import sys

import datasets
import pytest

import convert
from pages import fenced_blocks, python_blocks, run
from support.folders import ROOT, SCRIPTS

# `convert.py` disables warnings.
pytestmark = pytest.mark.usefixtures("quiet_only_here")

PAGES = [
    page
    for page in sorted((ROOT / "docs").glob("*.md"))
    if any(block.marks == {"ecosystem"} for block in python_blocks(page.read_text(encoding="utf-8")))
]
# As many rows of the reviews as train an encoder in a minute.
ROWS = {"train.csv": 1000, "test.csv": 300}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_python_of_the_page_runs(page, minilm, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert convert.main([minilm, "my-model"]) == 0
    run(page, marks=["ecosystem"], model=minilm)


def test_the_trainings_of_the_page_on_embeddings_raise_the_scores(minilm, tmp_path, monkeypatch):
    """The page's code and commands from top to bottom, with one seed of three and the first rows of the reviews."""
    for package in ("sentence_transformers", "setfit"):
        pytest.importorskip(package, reason=f"{package} is not installed")
    monkeypatch.chdir(tmp_path)
    shutil.copytree(SCRIPTS, "scripts", ignore=shutil.ignore_patterns("__pycache__"))
    for name, rows in ROWS.items():
        file = tmp_path / "scripts" / "data" / "movie_reviews" / name
        lines = file.read_text(encoding="utf-8").splitlines(keepends=True)
        file.write_text("".join(lines[: rows + 1]), encoding="utf-8")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    namespace = {"__name__": "__main__"}
    for match, language, _, _ in fenced_blocks((ROOT / "docs" / "embeddings.md").read_text(encoding="utf-8")):
        if language == "python":
            exec(match["text"].replace("range(3)", "range(1)"), namespace)
        elif language == "":
            for command in re.findall("^scratchbert (.*)$", match["text"], re.MULTILINE):
                command = command.replace("sentence-transformers/all-MiniLM-L6-v2", minilm)
                subprocess.run([sys.executable, "scripts", *shlex.split(command)], check=True)
    assert namespace["after"][0]["recall@1"] > namespace["before"]["recall@1"]
    assert namespace["after"][0]["MRR@10"] > namespace["before"]["MRR@10"]
    assert abs(namespace["vectors"] - namespace["optimised"]).max() < 1e-5
    assert abs(namespace["vectors"] - namespace["numpy"].load("vectors/embeddings.npy")).max() < 1e-5
    assert namespace["accuracies"][0]["after"] > namespace["accuracies"][0]["before"]
