"""Frameworks around a model train, save and open it as the same BERT: Lightning, SetFit, MLflow."""

import json

import numpy
import pytest
import torch
from transformers import BertTokenizer, pipeline

from support.models import SPECIAL_TOKENS, inputs_for, word_tokenizer
from support.processes import run_python
from support.tiny import TEXTS, WORDS

FIELDS = {"vocab_size": len(SPECIAL_TOKENS + WORDS), "max_position_embeddings": 64}


@pytest.fixture
def tokenizer() -> BertTokenizer:
    return word_tokenizer(WORDS)


def test_lightning_trains_in_two_processes_as_bert(pair, tmp_path):
    lightning = pytest.importorskip("lightning", reason="Lightning is not installed")
    from lightning_classifier import Classifiers

    models = pair("ForSequenceClassification")
    batch = inputs_for("ForSequenceClassification", batch=12, labels=True)
    rows = [{name: tensor[i] for name, tensor in batch.items()} for i in range(12)]
    before = models[0](**batch).loss
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp_spawn",
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        default_root_dir=tmp_path,
    )
    trainer.fit(Classifiers(models), torch.utils.data.DataLoader(rows, batch_size=2))
    with torch.no_grad():
        ours, reference = (model.eval()(**batch) for model in models)
    torch.testing.assert_close(ours.logits, reference.logits, rtol=0, atol=1e-4)
    assert ours.loss < before - 0.01


def test_setfit_trains_as_bert_and_reloads(pair, tokenizer, tmp_path):
    setfit = pytest.importorskip("setfit", reason="SetFit is not installed")
    from datasets import Dataset

    rows = Dataset.from_dict({"text": TEXTS, "label": [int("bad" in text) for text in TEXTS]})
    settings = setfit.TrainingArguments(tmp_path, batch_size=4, max_steps=3, report_to="none", save_strategy="no")
    results = []
    for model in reversed(pair(**FIELDS)):
        folder = str(tmp_path / type(model).__name__)
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        classifier = setfit.SetFitModel.from_pretrained(folder, trust_remote_code=True)
        setfit.Trainer(classifier, settings, train_dataset=rows).train()
        results.append(classifier.predict_proba(TEXTS, as_numpy=True))
    numpy.testing.assert_allclose(*results, rtol=0, atol=1e-4)
    assert results[0].std() > 0.01
    classifier.save_pretrained(tmp_path / "saved")
    again = setfit.SetFitModel.from_pretrained(tmp_path / "saved", trust_remote_code=True)
    numpy.testing.assert_array_equal(again.predict_proba(TEXTS, as_numpy=True), results[1])


OPEN_WITH_MLFLOW = """
import json, sys
import mlflow
sys.modules["modeling_scratchbert"] = None

opened = mlflow.transformers.load_model("logged")
assert type(opened.model).__module__.startswith("transformers_modules."), type(opened.model)
print(json.dumps(opened(sys.argv[1:])))
"""


def test_mlflow_opens_in_a_fresh_process(pair, tokenizer, tmp_path):
    mlflow = pytest.importorskip("mlflow", reason="MLflow is not installed")
    model, reference = pair("ForSequenceClassification", **FIELDS)
    mlflow.transformers.save_model(
        {"model": model, "tokenizer": tokenizer},
        str(tmp_path / "logged"),
        task="text-classification",
        pip_requirements=[],
    )
    answers = json.loads(run_python("-c", OPEN_WITH_MLFLOW, *TEXTS, cwd=tmp_path).splitlines()[-1])
    expected = pipeline("text-classification", model=reference, tokenizer=tokenizer, device="cpu")(TEXTS)
    for ours, theirs in zip(answers, expected, strict=True):
        assert ours == {"label": theirs["label"], "score": pytest.approx(theirs["score"], abs=1e-5)}
