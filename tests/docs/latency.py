"""Measures the README's server: the time of an answer, with 1 and with 16 clients.

    python tests/docs/latency.py MY_CLASSIFIER MY_BERT --infinity VENV --vllm VENV --json latency.json

MY_CLASSIFIER is a ScratchBert classifier, MY_BERT the same as a BERT. Infinity and vLLM serve MY_BERT, each from a
virtual environment of its own. The servers start one after the other, in three rounds. Each client sends one film
review after the other. A time is the median over the rounds, of the median (or the 95th percentile) over the requests.
`changed` is the number of reviews whose answer with several clients is not, bit for bit, that with one.
"""

import argparse
import csv
import statistics
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from record import ROOT, medians
from toolkit.common import write_json

sys.path.insert(0, str(ROOT / "tests"))

from support.server import PORT, Client, replaced, running, server_code

REVIEWS = ROOT / "scripts" / "data" / "movie_reviews" / "test.csv"
REQUESTS = 320
ROUNDS = 3


@dataclass
class Server:
    """The command of a server, and for LitServe the code of its server.py."""

    command: str
    code: str = ""

    def ask(self, client: Client, text: str) -> object:
        path, body = ("/predict", {"text": text}) if self.code else ("/classify", {"model": "bert", "input": [text]})
        status, answer = client.request("POST", path, body)
        assert status == 200, answer
        return answer if self.code else answer["data"]


def servers(infinity: Path, vllm: Path) -> dict[str, Server]:
    """The servers by variant."""
    code = server_code()
    loaded = replaced(code, "        self.classify.model.optimize_for_inference()\n", "")
    codes = {
        "bert": replaced(loaded, '"my-classifier"', '"my-bert"'),
        "ours": replaced(loaded, '"my-classifier"', '"my-classifier", model_kwargs={"padding_free": True}'),
        "ours-optimised": code,
        "ours-int8": replaced(code, "optimize_for_inference()", 'optimize_for_inference("int8")'),
    }
    found = {variant: Server(f"{sys.executable} server.py", code) for variant, code in codes.items()}
    bert = f"--served-model-name bert --host 127.0.0.1 --port {PORT}"
    infinity_flags = "--model-id my-bert --engine torch --device cpu --no-bettertransformer"
    vllm_flags = "--model my-bert --runner pooling --dtype float32"
    found["infinity"] = Server(f"{infinity}/bin/infinity_emb v2 {infinity_flags} {bert}")
    found["vllm"] = Server(f"{vllm}/bin/python -m vllm.entrypoints.openai.api_server {vllm_flags} {bert}")
    return found


def measure(server: Server, texts: list[str], clients: int) -> tuple[dict, list]:
    """The times of the requests of several clients, and the answers."""
    local = threading.local()

    def connect() -> None:
        local.client = Client(PORT)

    def send(text: str) -> tuple[float, object]:
        start = time.perf_counter()
        answer = server.ask(local.client, text)
        return time.perf_counter() - start, answer

    start = time.perf_counter()
    with ThreadPoolExecutor(clients, initializer=connect) as pool:
        times, answers = zip(*pool.map(send, texts), strict=True)
    found = {
        "median_ms": 1000 * statistics.median(times),
        "p95_ms": 1000 * statistics.quantiles(times, n=20)[-1],
        "requests_per_second": len(texts) / (time.perf_counter() - start),
    }
    return found, answers


def measure_server(server: Server, texts: list[str], folder: Path) -> dict[str, dict]:
    """Runs a server in a folder, and returns its times by the number of clients."""
    (folder / "server.py").write_text(server.code, encoding="utf-8")
    with running(server.command.split(), folder):
        measure(server, texts[:64], 4)  # warm up
        alone, expected = measure(server, texts, 1)
        together, answers = measure(server, texts, 16)
    together["changed"] = sum(answer != other for answer, other in zip(answers, expected, strict=True))
    return {"clients-1": alone, "clients-16": together}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("classifier", type=Path)
    parser.add_argument("bert", type=Path)
    parser.add_argument("--infinity", type=Path, metavar="VENV", required=True)
    parser.add_argument("--vllm", type=Path, metavar="VENV", required=True)
    parser.add_argument("--json", type=Path, required=True)
    args = parser.parse_args()
    with REVIEWS.open(encoding="utf-8", newline="") as rows:
        texts = [row["text"] for row in csv.DictReader(rows)][:REQUESTS]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "my-classifier").symlink_to(args.classifier.resolve())
        (folder / "my-bert").symlink_to(args.bert.resolve())
        variants = servers(args.infinity, args.vllm)
        rounds = [
            {variant: measure_server(server, texts, folder) for variant, server in variants.items()}
            for _ in range(ROUNDS)
        ]
    write_json(args.json, medians(rounds))


if __name__ == "__main__":
    main()
