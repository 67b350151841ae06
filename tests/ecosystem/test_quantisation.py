"""torchao's int8 quantisation of our models, beside the same of BERT's: no bitsandbytes, and no GPU."""

import pytest
import torch

pytest.importorskip("torchao", reason="torchao is not installed")

from torch.nn.functional import cosine_similarity
from torchao.quantization import Int8DynamicActivationInt8WeightConfig, Int8WeightOnlyConfig, quantize_
from transformers import AutoModel, AutoTokenizer, BertModel, TorchAoConfig

from modeling_scratchbert import ScratchBertForMaskedLM, ScratchBertModel
from support.models import inputs_for, random_scratchbert

# How close, by the cosine of a text's embedding, each stays to float32.
KINDS = {
    "weights": (Int8WeightOnlyConfig, 0.99),
    "weights and activations": (Int8DynamicActivationInt8WeightConfig, 0.96),
}
TEXTS = ["Yes.", "A man is playing a guitar.", "How do I reset my password? I forgot it, and nothing works at all now."]


@pytest.fixture(scope="module")
def batch(minilm):
    return AutoTokenizer.from_pretrained(minilm)(TEXTS, padding=True, return_tensors="pt")


@torch.no_grad()
def embeddings(model, batch, **kwargs) -> torch.Tensor:
    """The mean of each text's tokens, `(texts, C)`."""
    real = batch["attention_mask"][..., None]
    return (model.eval()(**batch, **kwargs).last_hidden_state * real).sum(1) / real.sum(1)


@pytest.fixture(scope="module", params=KINDS)
def quantised(request, minilm):
    """The model, and what KINDS says of its kind."""
    make, bound = KINDS[request.param]
    return ScratchBertModel.from_pretrained(minilm, quantization_config=TorchAoConfig(make())), make, bound


def matrices(model) -> list[torch.Tensor]:
    return [module.weight for module in model.encoder.modules() if isinstance(module, torch.nn.Linear)]


def test_is_bert_quantised_and_close_to_the_whole(quantised, minilm, batch):
    model, make, bound = quantised
    assert [type(weight).__name__ for weight in matrices(model)] == ["Int8Tensor"] * 36
    # Of the same numbers: rounding, which packing changes a little, may bring an activation to the next step.
    padded = embeddings(model, batch)
    reference = BertModel.from_pretrained(minilm, quantization_config=TorchAoConfig(make()))
    torch.testing.assert_close(padded, embeddings(reference, batch), rtol=0, atol=1e-5)
    whole = embeddings(ScratchBertModel.from_pretrained(minilm), batch)
    for ours in (padded, embeddings(model, batch, padding_free=True)):
        assert cosine_similarity(ours, whole).min() > bound
        assert not torch.allclose(ours, whole, atol=1e-3)


def test_in_place(quantised, minilm, batch):
    model, make, *_ = quantised
    other = ScratchBertModel.from_pretrained(minilm)
    quantize_(other, make())
    torch.testing.assert_close(embeddings(other, batch), embeddings(model, batch), rtol=0, atol=1e-6)


def test_saves_small_and_opens_again(quantised, batch, tmp_path):
    model, *_ = quantised
    model.save_pretrained(tmp_path)
    expected = embeddings(model, batch)
    numbers = 4 * sum(table.numel() for table in model.embeddings.parameters())
    numbers += sum(weight.numel() for weight in matrices(model))
    size = (tmp_path / "model.safetensors").stat().st_size
    assert numbers < size < 1.05 * numbers
    for again in (
        ScratchBertModel.from_pretrained(tmp_path),
        AutoModel.from_pretrained(tmp_path, trust_remote_code=True),
    ):
        assert all(type(weight).__name__ == "Int8Tensor" for weight in matrices(again))
        torch.testing.assert_close(embeddings(again, batch), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("make", [kind[0] for kind in KINDS.values()], ids=KINDS)
def test_a_tied_head_stays_whole(make, tmp_path):
    """The matrix of the words is a table too, and is left in float32, in one copy."""
    random_scratchbert("ForMaskedLM").save_pretrained(tmp_path / "whole")
    inputs = inputs_for("ForMaskedLM")
    model = ScratchBertForMaskedLM.from_pretrained(tmp_path / "whole", quantization_config=TorchAoConfig(make()))
    model.save_pretrained(tmp_path / "quantised")
    assert not (tmp_path / "quantised" / "probe.json").exists()
    again = ScratchBertForMaskedLM.from_pretrained(tmp_path / "quantised")
    for each in (model, again):
        assert each.lm_head.decoder.weight is each.get_input_embeddings().weight
        assert type(each.lm_head.decoder.weight) is torch.nn.Parameter
        assert type(each.lm_head.dense.weight).__name__ == "Int8Tensor"
    with torch.no_grad():
        torch.testing.assert_close(again(**inputs).logits, model(**inputs).logits, rtol=0, atol=1e-6)


def test_is_not_packed_for_inference(quantised):
    model, *_ = quantised
    with pytest.raises(RuntimeError, match="optimize_for_inference"):
        model.optimize_for_inference()


def test_a_bert_checkpoint_is_not_quantised(quantised, tmp_path):
    with pytest.raises(ValueError, match=r"is a Int8Tensor; .*quantised.*save_pretrained"):
        quantised[0].save_as_bert(tmp_path / "bert")
    assert not (tmp_path / "bert").exists()
