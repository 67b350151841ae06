"""Measures the README's server: the time of an answer, with several numbers of clients.

    python tests/docs/latency.py MY_CLASSIFIER MY_BERT --infinity VENV --vllm VENV --json latency.json

MY_CLASSIFIER is a ScratchBert classifier, MY_BERT the same as a BERT. Infinity and vLLM serve MY_BERT, each from a
virtual environment of its own. The servers start one after the other, in several rounds. Each client sends one film
review after the other. A time is the median over the rounds, of the median (or the 95th percentile) over the requests.
`changed` is the number of reviews whose answer with several clients is not, bit for bit, that with one.
"""

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "scripts")]

from support.server import PORT, Client, replaced, running, server_code  # noqa: E402
from toolkit.common import write_json  # noqa: E402
from toolkit.data import Source, open_files  # noqa: E402

REVIEWS = ROOT / "scripts" / "data" / "movie_reviews" / "test.csv"


@dataclass
class Server:
    """A server, and how it is asked."""

    command: list[str]
    code: str = ""  # of server.py
    path: str = "/predict"

    def ask(self, client: Client, text: str) -> object:
        is_ours = self.path == "/predict"
        body = {"text": text} if is_ours else {"model": "bert", "input": [text]}
        status, answer = client.request("POST", self.path, body)
        assert status == 200, answer
        return answer if is_ours else answer["data"]


def servers(infinity: Path | None, vllm: Path | None) -> dict[str, Server]:
    code = server_code()
    loaded = replaced(code, "        self.classify.model.optimize_for_inference()\n", "")
    found = {
        name: Server([sys.executable, "server.py"], code)
        for name, code in {
            "bert": replaced(loaded, '"my-classifier"', '"my-bert"'),
            "ours": replaced(loaded, '"my-classifier"', '"my-classifier", model_kwargs={"padding_free": True}'),
            "ours-optimised": code,
            "ours-int8": replaced(code, "optimize_for_inference()", 'optimize_for_inference("int8")'),
        }.items()
    }
    common = ["--served-model-name", "bert", "--host", "127.0.0.1", "--port", str(PORT)]
    if infinity is not None:
        command = (
            f"{infinity}/bin/infinity_emb v2 --model-id my-bert --engine torch --device cpu --no-bettertransformer"
        )
        found["infinity"] = Server([*command.split(), *common], path="/classify")
    if vllm is not None:
        command = f"{vllm}/bin/python -m vllm.entrypoints.openai.api_server --model my-bert --runner pooling"
        found["vllm"] = Server([*command.split(), "--dtype", "float32", *common], path="/classify")
    return found


def measure(server: Server, texts: list[str], clients: int) -> tuple[dict, list]:
    """The times of the requests of several clients, and the answers."""

    def send(share: list[str]) -> Iterator[tuple[float, object]]:
        client = Client(PORT)
        for text in share:
            start = time.perf_counter()
            answer = server.ask(client, text)
            yield time.perf_counter() - start, answer

    start = time.perf_counter()
    with ThreadPoolExecutor(clients) as pool:
        shares = list(pool.map(lambda share: list(send(share)), (texts[i::clients] for i in range(clients))))
    seconds = time.perf_counter() - start
    ordered = [shares[i % clients][i // clients] for i in range(len(texts))]
    times = [time for time, _ in ordered]
    found = {
        "median_ms": 1000 * statistics.median(times),
        "p95_ms": 1000 * statistics.quantiles(times, n=20)[-1],
        "requests_per_second": len(texts) / seconds,
    }
    return found, [answer for _, answer in ordered]


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("classifier", type=Path)
    parser.add_argument("bert", type=Path)
    parser.add_argument("--infinity", type=Path, metavar="VENV")
    parser.add_argument("--vllm", type=Path, metavar="VENV")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--requests", type=int, default=320)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, required=True)
    args = parser.parse_args(argv)
    if 1 not in args.clients:
        parser.error("--clients lacks 1; expected it, because the other answers are compared with those of one client")
    rows = islice(Source("data", open_files([str(REVIEWS)], "data")).rows(), args.requests)
    texts = [row.content["text"] for row in rows]
    rounds: dict = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "my-classifier").symlink_to(args.classifier.resolve())
        (folder / "my-bert").symlink_to(args.bert.resolve())
        for _ in range(args.rounds):
            for variant, server in servers(args.infinity, args.vllm).items():
                (folder / "server.py").write_text(server.code, encoding="utf-8")
                with running(server.command, folder):
                    measure(server, texts[:64], 4)  # warm up
                    results = {clients: measure(server, texts, clients) for clients in args.clients}
                alone = results[1][1]
                for clients, (found, answers) in results.items():
                    found["changed"] = sum(map(lambda a, b: a != b, alone, answers))
                    rounds.setdefault(variant, {}).setdefault(f"clients-{clients}", []).append(found)
                    print(variant, clients, found, flush=True)
    write_json(
        args.json,
        {
            variant: {
                clients: {key: statistics.median(found[key] for found in results) for key in results[0]}
                for clients, results in by_clients.items()
            }
            for variant, by_clients in rounds.items()
        },
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
