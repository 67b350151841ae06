"""sentence-transformers opens what `convert.py` writes, and computes and trains as with the original."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("sentence_transformers", reason="sentence-transformers is not installed")

from datasets import Dataset
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss

import convert
from modeling_scratchbert import ScratchBertModel

PARAPHRASES = [
    ("A man is playing a guitar.", "Someone is strumming a guitar."),
    ("How do I reset my password?", "I forgot my password, how can I change it?"),
    ("The company's profits fell last year.", "Last year the firm earned less money."),
]
# An empty text, and one that is longer than the 256 tokens that MiniLM's sentence_bert_config.json allows.
TEXTS = ["Yes.", *(text for pair in PARAPHRASES for text in pair), "", "a long story " * 200]

# In a process that has the folder and not the package.
ALONE = """
import json, sys
sys.modules["modeling_scratchbert"] = None
from sentence_transformers import SentenceTransformer
folder, target = sys.argv[1:]
model = SentenceTransformer(folder, trust_remote_code=True, device="cpu")
assert type(model[0].auto_model).__module__.startswith("transformers_modules."), type(model[0].auto_model)
with open(target, "w") as file:
    json.dump(model.encode(json.load(sys.stdin)).tolist(), file)
"""


def opened(folder, **kwargs) -> SentenceTransformer:
    return SentenceTransformer(str(folder), device="cpu", trust_remote_code=True, **kwargs)


def embeddings(model: SentenceTransformer) -> torch.Tensor:
    return model.encode(TEXTS, convert_to_tensor=True, batch_size=4)


@pytest.fixture(scope="module")
def converted(minilm, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("sentences") / "minilm"
    assert convert.main([minilm, str(folder)]) == 0
    return folder


@pytest.fixture(scope="module")
def original(minilm) -> torch.Tensor:
    """The embeddings of the original, `(texts, 384)`."""
    model = SentenceTransformer(minilm, device="cpu")
    assert type(model[0].auto_model).__name__ == "BertModel"
    return embeddings(model)


def assert_same(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)


def test_the_folder_alone_gives_the_embeddings_of_the_original(converted, original, tmp_path):
    target = tmp_path / "embeddings.json"
    environment = {"HF_MODULES_CACHE": str(tmp_path / "modules"), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", ALONE, converted, target],
        input=json.dumps(TEXTS),
        text=True,
        capture_output=True,
        env={**os.environ, **environment},
        cwd=tmp_path,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    assert_same(torch.tensor(json.loads(target.read_text())), original)


def test_the_conversion_carries_pooling_and_limits(converted, original):
    """Without them sentence-transformers builds other embeddings, and says nothing."""
    model = opened(converted)
    assert isinstance(model[0].auto_model, ScratchBertModel)
    assert [type(module).__name__ for module in model] == ["Transformer", "Pooling", "Normalize"]
    assert model.max_seq_length == 256
    assert model[1].pooling_mode == "mean"
    assert_same(embeddings(model), original)
    (converted / "modules.json").rename(converted / "modules.json.away")
    try:
        assert not torch.allclose(embeddings(opened(converted)), original, atol=1e-2)
    finally:
        (converted / "modules.json.away").rename(converted / "modules.json")


def test_packed_matrices(converted, original):
    model = opened(converted)
    model[0].auto_model.optimize_for_inference()
    assert_same(embeddings(model), original)


def test_saves_and_opens_again(converted, original, tmp_path):
    opened(converted).save(str(tmp_path))
    assert (tmp_path / "modeling_scratchbert.py").exists()
    assert_same(embeddings(opened(tmp_path)), original)


def test_trains_as_the_original_does(minilm, converted, tmp_path):
    """With dropout 0 the losses are the original's step by step, and they fall."""
    without_dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    questions, answers = zip(*PARAPHRASES, strict=True)
    losses = {}
    for folder in (minilm, converted):
        model = opened(folder, config_kwargs=without_dropout)
        before = embeddings(model)
        settings = SentenceTransformerTrainingArguments(
            tmp_path,
            max_steps=5,
            per_device_train_batch_size=3,
            learning_rate=1e-4,
            logging_steps=1,
            seed=0,
            report_to="none",
            save_strategy="no",
            use_cpu=True,
            disable_tqdm=True,
        )
        data = Dataset.from_dict({"anchor": questions, "positive": answers})
        # The higher the scale, the smaller the loss: at 2 there is something left to learn.
        loss = MultipleNegativesRankingLoss(model, scale=2.0)
        trainer = SentenceTransformerTrainer(model, settings, train_dataset=data, loss=loss)
        trainer.train()
        losses[folder] = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        assert not torch.allclose(embeddings(model), before, atol=1e-3)
    assert losses[converted] == pytest.approx(losses[minilm], abs=1e-4)
    assert losses[converted][-1] < losses[converted][0]


def test_padding_is_removed_on_request(converted, original):
    model = opened(converted, config_kwargs={"padding_free": True})
    assert model[0].auto_model.config.padding_free
    assert not opened(converted)[0].auto_model.config.padding_free
    torch.testing.assert_close(embeddings(model), original, rtol=0, atol=1e-5)
