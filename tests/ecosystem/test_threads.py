"""One model, many threads: sixteen callers of a prepacked model, and sixteen clients of a FastAPI server, get what one
caller gets."""

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from urllib.request import Request, urlopen

import pytest
import torch

from support.models import inputs_for

THREADS = 16
LENGTHS = (3, 9, 5, 21, 7, 14, 33, 2)


@pytest.fixture
def classifiers(pair):
    """A prepacked classifier, and its reference."""
    ours, reference = pair("ForSequenceClassification", num_labels=3)
    return ours.optimize_for_inference(), reference


@torch.inference_mode()
def logits(model, batch: dict) -> torch.Tensor:
    return model(**batch).logits


def test_sixteen_threads_compute_with_one_prepacked_model(classifiers):
    model, reference = classifiers
    batches = [inputs_for(length=length) for length in LENGTHS] * 8
    serial = [logits(model, batch) for batch in batches]
    together = threading.Barrier(THREADS)

    def compute(share: list[dict]) -> list[torch.Tensor]:
        together.wait()
        return [logits(model, batch) for batch in share]

    with ThreadPoolExecutor(THREADS) as pool:
        shares = list(pool.map(compute, (batches[i::THREADS] for i in range(THREADS))))
    for i, share in enumerate(shares):
        assert all(map(torch.equal, share, serial[i::THREADS]))
    for ours, batch in zip(serial[: len(LENGTHS)], batches, strict=False):
        torch.testing.assert_close(ours, logits(reference, batch), rtol=0, atol=1e-5)


@pytest.fixture
def serve():
    """Serves a FastAPI application in a thread; returns its address."""
    uvicorn = pytest.importorskip("uvicorn", reason="uvicorn is not installed")
    running = []

    def start(application) -> str:
        server = uvicorn.Server(uvicorn.Config(application, port=0, log_level="error"))
        thread = threading.Thread(target=server.run)
        thread.start()
        running.append((server, thread))
        while not server.started:
            assert thread.is_alive()
            thread.join(0.05)
        return f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"

    yield start
    for server, thread in running:
        server.should_exit = True
        thread.join()


def test_sixteen_clients_of_a_fastapi_server(classifiers, serve):
    fastapi = pytest.importorskip("fastapi", reason="FastAPI is not installed")
    model, reference = classifiers
    application, computing, most = fastapi.FastAPI(), set(), []

    @application.post("/classify")
    def classify(batch: dict) -> list:  # not `async`, so each request is computed in a thread of its own
        computing.add(threading.get_ident())
        most.append(len(computing))
        try:
            return logits(model, {name: torch.tensor(rows) for name, rows in batch.items()}).tolist()
        finally:
            computing.discard(threading.get_ident())

    address = serve(application)
    batches = [{name: tensor.tolist() for name, tensor in inputs_for(length=n).items()} for n in LENGTHS] * 8
    together = threading.Barrier(THREADS)

    def ask(share: list[dict]) -> list[list]:
        together.wait()
        headers = {"Content-Type": "application/json"}
        requests = [Request(f"{address}/classify", json.dumps(batch).encode(), headers) for batch in share]
        return [json.load(urlopen(request)) for request in requests]

    with ThreadPoolExecutor(THREADS) as pool:
        answers = list(pool.map(ask, (batches[i::THREADS] for i in range(THREADS))))
    assert max(most) > 1
    for share, batch in zip(answers, batches, strict=False):
        given = {name: torch.tensor(rows) for name, rows in batch.items()}
        assert share[0] == logits(model, given).tolist()
        torch.testing.assert_close(torch.tensor(share[0]), logits(reference, given), rtol=0, atol=1e-5)
