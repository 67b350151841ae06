"""Texts that have no result, and long texts, in the tasks of `scripts/predict.py`."""

from types import SimpleNamespace

import numpy as np
import pytest
import tokenizers
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer, BertTokenizer

from support.corpora import WORDS, save_model, texts
from support.tasks import columns_of, compute, open_tiny, write_sentence_folder
from toolkit.corpus.tasks import base

pytestmark = pytest.mark.usefixtures("quiet_only_here")

TEXTS = texts(40)


# ------------------------------------------------------------------------------------------------ texts without results

TASKS = ["embed", "classify", "tag", "rerank", "fill-mask"]


@pytest.mark.parametrize("task", TASKS)
def test_numbers_that_are_not_finite_are_faults(task, tmp_path):
    """And the other texts have the bits that they have alone."""
    folder = save_model(tmp_path / "model", task, "bert")
    path = tmp_path / "model" / "model.safetensors"
    weights = load_file(path)
    [name] = [name for name in weights if "position_embeddings" in name]
    weights[name][20] = float("nan")
    save_file(weights, path, {"format": "pt"})
    values = ["[MASK] good", "[MASK] " * 19, "a [MASK] film", "[MASK] " * 50]
    pairs = values if task == "rerank" else None
    columns, encoded = columns_of(open_tiny(folder, task), values, pairs)
    assert set(encoded.faults) == {1, 3}
    expected = compute(folder, task, values[::2], pairs and pairs[::2])
    for name, column in columns.items():
        np.testing.assert_equal(list(column), list(expected[name]))


def test_numbers_too_large_for_float16_are_faults(tmp_path):
    folder = save_model(tmp_path / "model", "embed", "bert")
    write_sentence_folder(tmp_path / "model", ["Transformer", "Pooling", "LayerNorm"], LayerNorm={"dimension": 32})
    norm = {"norm.weight": torch.ones(32), "norm.bias": torch.full((32,), 1e5)}
    save_file(norm, tmp_path / "model" / "2_LayerNorm" / "model.safetensors")
    assert len(compute(folder, "embed", TEXTS)["embedding"]) == 40
    columns, encoded = columns_of(open_tiny(folder, "embed", embedding_dtype="float16"), TEXTS)
    assert columns["embedding"].shape == (0, 32)
    assert set(encoded.faults) == set(range(40))


@pytest.mark.parametrize("task", TASKS)
def test_no_text_that_can_be_used(task, tmp_path):
    opened = open_tiny(
        save_model(tmp_path / "model", task, "bert"), task, **({"embedding_dtype": "binary"} if task == "embed" else {})
    )
    values = ["a film"] if task == "fill-mask" else []
    opened.model = SimpleNamespace(config=opened.model.config)  # it is not called
    columns, encoded = columns_of(opened, values, [] if task == "rerank" else None)
    assert set(columns) == set(opened.columns)
    assert all(len(column) == 0 for column in columns.values())
    assert len(encoded.tokens) == len(values)
    if task == "embed":
        assert columns["embedding"].shape == (0, 4)


# ----------------------------------------------------------------------------------------------------------- long texts

ODD_WORDS = [
    "Film",
    "[SEP]",
    "[MASK]",
    "[mask]",
    "film!",
    "x" * 130,
    "中国",
    "e\u0301",
    "\u0301",
    "\x00",
    "\u200b",
    "\ufffd",
    "ΣΑΣ",
    "İ",
    "ad-hoc",
    "[",
    "SEP]",
    "\u3000",
    "\t",
    "\r\n",
    "word1",
    "ﬁlms",
    "\U0001f600",
    "\u00a0",
]
PIECES = st.one_of(st.sampled_from([*ODD_WORDS, " ", "\n"]), st.text(max_size=5))


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return save_model(tmp_path_factory.mktemp("model"), "embed", "bert")


@pytest.fixture(scope="module")
def tokenizing(model):
    """Tasks with tokenizers that lower the case and do not."""
    opened = [open_tiny(model, "embed", max_length=length) for length in (3, 12)]
    for task, lower in zip(opened, (True, False), strict=True):
        vocabulary = {word: number for number, word in enumerate([*WORDS, "中", "e", "s"])}
        task.tokenizer = BertTokenizer(vocab=vocabulary, do_lower_case=lower, strip_accents=lower)
    return opened


@given(st.lists(st.lists(PIECES, max_size=60), min_size=1, max_size=3), st.integers(0, 3), st.booleans())
def test_a_long_text_has_the_tokens_that_the_whole_has(tokenizing, words, repeats, has_spaces):
    values = [(" " * has_spaces).join(pieces * 2**repeats) for pieces in words]
    for task in tokenizing:
        assert task.can_cut
        encoded = task.encode(values, None)
        whole = task.tokenizer(values).input_ids
        cut = task.tokenizer(values, truncation=True, max_length=task.max_length).input_ids
        assert encoded.ids == cut
        assert encoded.truncated == [len(ids) > task.max_length for ids in whole]
        assert encoded.tokens == list(map(len, cut))


def test_of_a_long_text_only_the_beginning_is_tokenised(model, monkeypatch):
    task = open_tiny(model, "embed")
    tokenizer, sizes = task.tokenizer, []
    task.tokenizer = lambda parts, *args, **options: sizes.extend(map(len, parts)) or tokenizer(parts, *args, **options)
    dense, sparse = "a good film " * 10000, ("x" * 90 + " ") * 1000
    encoded = task.encode([dense, sparse], None)
    assert encoded.truncated == [True, True]
    assert max(sizes) < 10000
    assert sizes[0] < 400


@pytest.mark.parametrize("change", ["added", "stripped", "left", "normalizer"])
def test_another_tokenizer_sees_the_whole_text(change, model, monkeypatch):
    """A token may end beyond a space, or the end of a text decides."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    if change == "added":
        tokenizer.add_tokens(["good film"])
    elif change == "stripped":
        tokenizer.backend_tokenizer.add_special_tokens([tokenizers.AddedToken("[X]", lstrip=True)])
    elif change == "left":
        tokenizer.truncation_side = "left"
    else:
        tokenizer.backend_tokenizer.normalizer = tokenizers.normalizers.Replace(" ", "")
    monkeypatch.setattr(base, "open_tokenizer", lambda *_, **__: tokenizer)
    task = open_tiny(model, "embed")
    assert not task.can_cut
    values = ["good film " * 200, "a film " * 200 + "bad"]
    assert task.encode(values, None).ids == tokenizer(values, truncation=True, max_length=40).input_ids
