"""The servers of docs/serving.md: their answers are those of a reference, with one client and with sixteen."""

import socket
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from transformers import AutoTokenizer, BertModel, pipeline

from modeling_scratchbert import ScratchBertForSequenceClassification
from pages import run
from support.folders import ROOT
from support.server import Client, replaced, running, server_code

CLIENTS = 16
TEXTS = ["", *(" ".join(["A joy to watch, again and again."] * (1 + i % 5)) + f" {i}" for i in range(96))]
HUB_ID = "sentence-transformers/all-MiniLM-L6-v2"


@pytest.fixture
def port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


@pytest.fixture
def folder(minilm, tmp_path, monkeypatch):
    """The working directory, with my-classifier, whose classifier is random."""
    monkeypatch.chdir(tmp_path)
    model = ScratchBertForSequenceClassification.from_pretrained(minilm, num_labels=2)
    model.save_pretrained("my-classifier")
    AutoTokenizer.from_pretrained(minilm).save_pretrained("my-classifier")
    return tmp_path


def test_the_readme_predicts(folder, minilm):
    run(ROOT / "README.md", {"trained"}, minilm, HUB_ID)


@pytest.mark.parametrize("mark", ["server", "embedder"])
def test_sixteen_clients_get_the_bits_of_one(mark, folder, port, minilm):
    pytest.importorskip("litserve", reason="LitServe is not installed")
    code = replaced(server_code(mark), "port=8000", f"port={port}").replace(HUB_ID, minilm)
    (folder / "server.py").write_text(code, encoding="utf-8")
    with running([sys.executable, "server.py"], folder, port):

        def ask(text):
            status, answer = Client(port).request("POST", "/predict", {"text": text})
            assert status == 200
            return answer

        alone = [ask(text) for text in TEXTS]
        with ThreadPoolExecutor(CLIENTS) as pool:
            assert list(pool.map(ask, TEXTS)) == alone
        for invalid in ({"txt": "A joy."}, {"text": ["A joy."]}, []):
            assert Client(port).request("POST", "/predict", invalid)[0] == 422
    if mark == "server":
        classify = pipeline("text-classification", "my-classifier")
        classify.model.optimize_for_inference()
        assert alone == [classify(text)[0] for text in TEXTS]
    else:
        tokenizer, model = AutoTokenizer.from_pretrained(minilm), BertModel.from_pretrained(minilm)
        states = [model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0] for text in TEXTS]
        expected = torch.nn.functional.normalize(torch.stack([rows.mean(dim=0) for rows in states]))
        torch.testing.assert_close(torch.tensor(alone), expected, atol=1e-5, rtol=0)
