"""One prepacked model, many threads: sixteen callers get what one caller gets."""

import threading
from concurrent.futures import ThreadPoolExecutor

import torch

from support.models import inputs_for

THREADS = 16
LENGTHS = (3, 9, 5, 21, 7, 14, 33, 2)


@torch.inference_mode()
def logits(model, batch: dict) -> torch.Tensor:
    return model(**batch).logits


def test_sixteen_threads_compute_with_one_prepacked_model(pair):
    """Each gets the bits that one thread computes alone, and the numbers of the reference."""
    model, reference = pair("ForSequenceClassification", num_labels=3)
    model.optimize_for_inference()
    batches = [inputs_for(length=length) for length in LENGTHS] * 8
    alone = [logits(model, batch) for batch in batches]
    together = threading.Barrier(THREADS)

    def compute(share: list[dict]) -> list[torch.Tensor]:
        together.wait()
        return [logits(model, batch) for batch in share]

    with ThreadPoolExecutor(THREADS) as pool:
        shares = list(pool.map(compute, (batches[i::THREADS] for i in range(THREADS))))
    for i, share in enumerate(shares):
        assert all(map(torch.equal, share, alone[i::THREADS]))
    for found, batch in zip(alone[: len(LENGTHS)], batches, strict=False):
        torch.testing.assert_close(found, logits(reference, batch), rtol=0, atol=1e-5)
