"""One prepacked model, many threads: sixteen callers, and sixteen clients of a FastAPI server, get what one caller
gets."""

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from urllib.request import Request, urlopen

import pytest
import torch

from support.models import inputs_for

THREADS = 16
LENGTHS = (3, 9, 5, 21, 7, 14, 33, 2)


@torch.inference_mode()
def logits(model, batch: dict) -> torch.Tensor:
    return model(**batch).logits


def assert_same_in_threads(pair, make_ask) -> None:
    """What `make_ask(model)` returns computes in many threads the bits that it computes alone, as the reference does.
    The model is prepacked."""
    model, reference = pair("ForSequenceClassification", num_labels=3)
    ask = make_ask(model.optimize_for_inference())
    batches = [inputs_for(length=length) for length in LENGTHS] * 8
    alone = [ask(batch) for batch in batches]
    together = threading.Barrier(THREADS)

    def ask_for(share: list[dict]) -> list[torch.Tensor]:
        together.wait()
        return [ask(batch) for batch in share]

    with ThreadPoolExecutor(THREADS) as pool:
        shares = list(pool.map(ask_for, (batches[i::THREADS] for i in range(THREADS))))
    for i, share in enumerate(shares):
        assert all(map(torch.equal, share, alone[i::THREADS]))
    for found, batch in zip(alone[: len(LENGTHS)], batches, strict=False):
        torch.testing.assert_close(found, logits(reference, batch), rtol=0, atol=1e-5)


def test_sixteen_threads_compute_with_one_prepacked_model(pair):
    assert_same_in_threads(pair, lambda model: lambda batch: logits(model, batch))


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


def test_sixteen_clients_of_a_fastapi_server(pair, serve):
    fastapi = pytest.importorskip("fastapi", reason="FastAPI is not installed")
    threads = set()

    def make_ask(model):
        application = fastapi.FastAPI()

        @application.post("/classify")
        def classify(batch: dict) -> list:  # not `async`, so each request is computed in a thread of its own
            threads.add(threading.get_ident())
            return logits(model, {name: torch.tensor(rows) for name, rows in batch.items()}).tolist()

        address = serve(application)

        def ask(batch: dict) -> torch.Tensor:
            body = json.dumps({name: tensor.tolist() for name, tensor in batch.items()}).encode()
            request = Request(f"{address}/classify", body, {"Content-Type": "application/json"})
            return torch.tensor(json.load(urlopen(request)))

        return ask

    assert_same_in_threads(pair, make_ask)
    assert len(threads) > 1
