"""The server of docs/serving.md: its answers are those of the pipeline, with one client and with sixteen."""

import socket
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
from transformers import AutoTokenizer, pipeline

from modeling_scratchbert import ScratchBertForSequenceClassification
from pages import run
from support.folders import ROOT
from support.server import Client, replaced, running, server_code

CLIENTS = 16
TEXTS = [" ".join(["A joy to watch, again and again."] * (1 + i % 5)) + f" {i}" for i in range(96)]


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
    run(ROOT / "README.md", {"trained"}, minilm, "sentence-transformers/all-MiniLM-L6-v2")


def test_sixteen_clients_get_the_bits_of_one(folder, port):
    pytest.importorskip("litserve", reason="LitServe is not installed")
    classify = pipeline("text-classification", "my-classifier")
    classify.model.optimize_for_inference()
    expected = [classify(text)[0] for text in TEXTS]

    (folder / "server.py").write_text(replaced(server_code(), "port=8000", f"port={port}"), encoding="utf-8")
    with running([sys.executable, "server.py"], folder, port):

        def ask(text):
            status, answer = Client(port).request("POST", "/predict", {"text": text})
            assert status == 200
            return answer

        with ThreadPoolExecutor(CLIENTS) as pool:
            assert list(pool.map(ask, TEXTS)) == expected
        for invalid in ({"txt": "A joy."}, {"text": ["A joy."]}, []):
            assert Client(port).request("POST", "/predict", invalid)[0] == 422
        assert ask("") == classify("")[0]
