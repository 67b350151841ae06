"""The final project of the course: a solution passes the tests of all steps, and each wrong one is told its mistake."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import course
from support.exercises import run_tests
from support.folders import SCRIPTS

SOLUTION = Path(__file__).with_name("final_project.py")


@pytest.fixture(scope="module")
def solved(minilm, tmp_path_factory):
    """A folder with the solution, and with the models that it has trained."""
    folder = tmp_path_factory.mktemp("solved")
    course.start(folder)
    shutil.copy(SOLUTION, folder / "project.py")
    reviews = SCRIPTS / "data" / "movie_reviews" / "train.csv"
    program = "import sys, project; project.train_doubler(); project.train_reviews(*sys.argv[1:])"
    subprocess.run([sys.executable, "-c", program, minilm, reviews], cwd=folder, check=True)
    return folder


@pytest.fixture
def here(solved, tmp_path, monkeypatch):
    folder = shutil.copytree(solved, tmp_path / "my-bert")
    monkeypatch.chdir(folder)
    monkeypatch.setenv("MODEL", "")
    monkeypatch.setattr(sys, "path", sys.path[:])
    return folder


def test_the_solution_is_right(here, minilm):
    assert run_tests(here, 11, minilm) == 0


CONTEXT = "(states * tokens).sum(dim=1) / tokens.sum(dim=1)"

# Step, a text of the solution, what is planted in its place, and words of the message.
WRONG = [
    (
        1,
        '.self.query",\n    "attention.key": "attention.self.key',
        '.self.key",\n    "attention.key": "attention.self.query',
        ["Queries and keys"],
    ),
    (1, "gelu(self.intermediate(x))", "gelu(self.intermediate(x), approximate='tanh')", ["tanh"]),
    (1, "torch.arange(input_ids.shape[1])", "torch.arange(1, 1 + input_ids.shape[1])", ["first position"]),
    (1, "LOWEST, 0.0)", "0.0, 0.0)", ["attention_mask is not used"]),
    (
        1,
        "    return model\n\n\n#",
        "    from transformers import BertModel\n\n    return BertModel.from_pretrained(source)\n\n\n#",
        ["BertModel", "yourself"],
    ),
    (1, "    return model\n\n\n#", "    return nn.Sequential(model)\n\n\n#", ["PreTrainedModel"]),
    (1, "def load_bert", "def load", ["Final project, step 1: load_bert is not written yet."]),
    (2, "self.classifier(" + CONTEXT, "-self.classifier(" + CONTEXT, ["classes are swapped"]),
    (2, CONTEXT, "states.mean(dim=1)", ["padding"]),
    (2, "self.dropout(", "nn.functional.dropout(", ["Dropout is active"]),
    (2, "cross_entropy(logits, labels)", "cross_entropy(logits, labels, reduction='sum')", ["The loss"]),
    (3, ".triu(1)", ".triu(99)", ["causal mask"]),
    (3, "self.cross_attention(x, memory_mask, memory)", "self.cross_attention(x, mask)", ["does not see the source"]),
    (3, "causal, memory, source_mask", "causal, memory, torch.zeros(())", ["padding of the source"]),
    (3, "labels[:, :-1]], 1)", "labels[:, 1:]], 1)", ["labels without the last"]),
    (3, "labels.flatten())", "labels.clamp(min=0).flatten())", ["of -100"]),
    (3, "            token = token.masked_fill(ended, self.config.pad_token_id)\n", "", ["end token"]),
    (3, "        return ids\n", "        return ids[:, 1:]\n", ["start token"]),
]


@pytest.mark.parametrize(("step", "old", "new", "words"), WRONG, ids=lambda value: str(value)[:40])
def test_a_wrong_solution_is_told_its_mistake(step, old, new, words, here, minilm, capsys):
    text = SOLUTION.read_text(encoding="utf-8")
    assert old in text
    (here / "project.py").write_text(text.replace(old, new), encoding="utf-8")
    for path in here.glob("tests/test_11_*.py"):
        if not path.name.startswith(f"test_11_{step}"):
            path.unlink()
    assert run_tests(here, 11, minilm) == 1
    output = capsys.readouterr().out
    assert all(word in output for word in words), output


def test_wrong_folders_are_told_their_mistake(here, minilm, capsys):
    for path in here.glob("tests/test_11_[123]*.py"):
        path.unlink()
    config = json.loads((here / "reviews" / "config.json").read_text())
    del config["auto_map"]
    (here / "reviews" / "config.json").write_text(json.dumps(config))
    (here / "doubler" / "project.py").write_text("from my_helpers import *\n")
    assert run_tests(here, 11, minilm) == 1
    output = capsys.readouterr().out
    assert "call register_for_auto_class" in output
    assert "my_helpers" in output
