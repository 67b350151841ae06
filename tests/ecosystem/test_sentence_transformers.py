"""Every kind of model and of training of sentence-transformers: the results, the losses and the saved folder are those
of the same BERT; also of real weights that `convert.py` converted."""

import shutil
from functools import partial
from pathlib import Path

import numpy
import pytest
import torch

pytest.importorskip("sentence_transformers", reason="sentence-transformers is not installed")

import sentence_transformers
from datasets import Dataset
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Router
from sentence_transformers.cross_encoder import losses as cross_encoder_losses
from sentence_transformers.multi_vector_encoder import losses as multi_vector_losses
from sentence_transformers.sentence_transformer import losses
from sentence_transformers.sparse_encoder import losses as sparse_losses
from torch.testing import assert_close

import convert
from support.models import NO_DROPOUT, OURS, SPECIAL_TOKENS, random_bert, word_tokenizer
from support.processes import run_python
from support.tiny import TEXTS, WORDS

# `convert.py` disables warnings.
pytestmark = pytest.mark.usefixtures("quiet_only_here")

OPTIONS = {"device": "cpu", "trust_remote_code": True}
FIELDS = {"vocab_size": len(SPECIAL_TOKENS + WORDS), "max_position_embeddings": 64, **NO_DROPOUT}
PAIRS = list(zip(TEXTS, TEXTS[1:] + TEXTS[:1], strict=True))


def save(head: str, folder: Path) -> list[Path]:
    """Saves a BERT and the same model as ours, each with a tokenizer. Returns their folders."""
    labels = {"num_labels": 1} if head == "ForSequenceClassification" else {}
    random_bert(head, **FIELDS, **labels).save_pretrained(folder / "bert")
    OURS[head].from_pretrained(folder / "bert").save_pretrained(folder / "ours")
    for each in folder.iterdir():
        word_tokenizer(WORDS).save_pretrained(each)
    return [folder / "bert", folder / "ours"]


# An empty text, and one that is longer than the 256 tokens that the configuration of MiniLM for the library allows.
REAL_TEXTS = ["Yes.", "A man is playing a guitar.", "How do I reset my password?", "", "a long story " * 200]


@pytest.mark.parametrize("kind", ["plain", "padding_free", "optimised", "saved again"])
def test_a_converted_folder_gives_the_embeddings_of_the_original(kind, minilm, tmp_path):
    original = SentenceTransformer(minilm, device="cpu")
    assert convert.main([minilm, str(tmp_path / "converted")]) == 0
    model = SentenceTransformer(
        str(tmp_path / "converted"), **OPTIONS, config_kwargs={"padding_free": kind == "padding_free"}
    )
    encoder = model[0].auto_model
    assert type(encoder) is OURS["Model"]
    assert encoder.config.padding_free == (kind == "padding_free")
    if kind == "optimised":
        encoder.optimize_for_inference()
    elif kind == "saved again":
        model.save(str(tmp_path / "again"))
        model = SentenceTransformer(str(tmp_path / "again"), **OPTIONS)
    embeddings, expected = (each.encode(REAL_TEXTS, convert_to_tensor=True) for each in (model, original))
    assert_close(embeddings, expected, rtol=0, atol=1e-5)


# For each kind of model its head, and what it computes.
KINDS = {
    "SentenceTransformer": ("Model", lambda model: model.encode(TEXTS, convert_to_tensor=True)),
    "CrossEncoder": ("ForSequenceClassification", lambda model: model.predict(PAIRS, convert_to_tensor=True)),
    "SparseEncoder": ("ForMaskedLM", lambda model: model.encode(TEXTS, convert_to_sparse_tensor=False)),
    "MultiVectorEncoder": ("Model", lambda model: torch.cat(model.encode_document(TEXTS))),
}
RANKING = losses.MultipleNegativesRankingLoss
LOSSES = {
    "ranking": ("SentenceTransformer", RANKING),
    "cached ranking": ("SentenceTransformer", partial(losses.CachedMultipleNegativesRankingLoss, mini_batch_size=2)),
    "Matryoshka": (
        "SentenceTransformer",
        lambda model: losses.MatryoshkaLoss(model, RANKING(model), matryoshka_dims=[32, 16, 8]),
    ),
    "cross-entropy": ("CrossEncoder", cross_encoder_losses.BinaryCrossEntropyLoss),
    "SPLADE": (
        "SparseEncoder",
        lambda model: sparse_losses.SpladeLoss(
            model, sparse_losses.SparseMultipleNegativesRankingLoss(model), document_regularizer_weight=0.1
        ),
    ),
    "late interaction": ("MultiVectorEncoder", multi_vector_losses.MultiVectorMultipleNegativesRankingLoss),
}


def both(kind: str, folder: Path) -> list:
    """The model of this kind of a BERT, and of ours."""
    head, _ = KINDS[kind]
    models = []
    for each in save(head, folder):
        torch.manual_seed(0)  # MultiVectorEncoder draws a projection
        models.append(getattr(sentence_transformers, kind)(str(each), **OPTIONS))
    assert [type(model[0].auto_model).__name__ for model in models] == [f"Bert{head}", f"ScratchBert{head}"]
    return models


@pytest.mark.parametrize("kind", KINDS)
def test_computes_as_bert_and_reloads(kind, tmp_path):
    _, compute = KINDS[kind]
    bert, ours = both(kind, tmp_path)
    expected = compute(bert)
    assert expected.std() > 1e-3
    assert_close(compute(ours), expected, rtol=0, atol=1e-5)
    ours.save_pretrained(str(tmp_path / "again"))
    again = type(ours)(str(tmp_path / "again"), **OPTIONS)
    assert type(again[0].auto_model) is type(ours[0].auto_model)
    assert torch.equal(compute(again), compute(ours))


@pytest.mark.parametrize("loss", LOSSES)
def test_trains_as_bert(loss, tmp_path):
    kind, make_loss = LOSSES[loss]
    columns = {"query": TEXTS, "answer": [answer for _, answer in PAIRS]}
    if kind == "CrossEncoder":
        columns["label"] = [float(i % 2) for i in range(len(TEXTS))]
    recorded = []
    for model in both(kind, tmp_path):
        settings = getattr(sentence_transformers, f"{kind}TrainingArguments")(
            tmp_path,
            max_steps=3,
            per_device_train_batch_size=4,
            learning_rate=1e-3,
            logging_steps=1,
            report_to="none",
            save_strategy="no",
            use_cpu=True,
        )
        trainer = getattr(sentence_transformers, f"{kind}Trainer")(
            model, settings, train_dataset=Dataset.from_dict(columns), loss=make_loss(model)
        )
        trainer.train()
        recorded.append([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
    assert len(recorded[0]) == 3
    assert recorded[1] == pytest.approx(recorded[0], abs=1e-4)
    assert recorded[0][2] != pytest.approx(recorded[0][0], abs=1e-3)


ALONE = """
import sys
import numpy
from sentence_transformers import SentenceTransformer

if __name__ == "__main__":
    sys.modules["modeling_scratchbert"] = None
    expected = numpy.load("expected.npy")
    for folder in ("pooled", "routed"):
        model = SentenceTransformer(folder, trust_remote_code=True, device="cpu")
        numpy.testing.assert_allclose(model.encode_query(sys.argv[1:]), expected, rtol=0, atol=1e-5)
    pool = model.start_multi_process_pool(["cpu"] * 2)
    found = model.encode_query(sys.argv[1:], pool=pool, chunk_size=2)
    numpy.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)
    model.stop_multi_process_pool(pool)
"""


def test_without_the_package_a_router_and_two_processes_encode_as_bert(tmp_path):
    """A `Router` looks for the code in the root of its folder, and saves it in a subfolder for each of its modules."""
    bert, ours = both("SentenceTransformer", tmp_path)
    numpy.save(tmp_path / "expected.npy", bert.encode(TEXTS))
    ours.save_pretrained(str(tmp_path / "pooled"))
    router = Router.for_query_document(query_modules=list(ours), document_modules=list(ours))
    SentenceTransformer(modules=[router], device="cpu").save_pretrained(str(tmp_path / "routed"))
    again = SentenceTransformer(str(tmp_path / "routed"), **OPTIONS)  # with the package, the root needs no code
    numpy.testing.assert_array_equal(again.encode_query(TEXTS), ours.encode(TEXTS))
    for path in (tmp_path / "routed" / "query_0_Transformer").glob("*.py"):
        shutil.copy(path, tmp_path / "routed")
    (tmp_path / "alone.py").write_text(ALONE)  # a file, which the processes of the pool import
    run_python("alone.py", *TEXTS, cwd=tmp_path)
