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
def embeddings(model, batch, **options) -> torch.Tensor:
    """The mean of each text's tokens, `(texts, C)`."""
    mask = batch["attention_mask"][..., None]
    return (model.eval()(**batch, **options).last_hidden_state * mask).sum(1) / mask.sum(1)


def matrices(model) -> list[torch.Tensor]:
    return [module.weight for module in model.encoder.modules() if isinstance(module, torch.nn.Linear)]


def assert_close(actual, expected, tolerance=1e-6) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize("kind", KINDS)
def test_is_bert_quantised_and_saves_small(kind, minilm, batch, tmp_path):
    make, bound = KINDS[kind]
    model, reference = (
        each.from_pretrained(minilm, quantization_config=TorchAoConfig(make()))
        for each in (ScratchBertModel, BertModel)
    )
    # Of the same numbers: rounding, which unpadding changes a little, may bring an activation to the next step.
    expected = embeddings(model, batch)
    assert_close(expected, embeddings(reference, batch), 1e-5)
    in_place = ScratchBertModel.from_pretrained(minilm)
    exact = embeddings(in_place, batch)
    quantize_(in_place, make())
    assert_close(embeddings(in_place, batch), expected)
    for each in (expected, embeddings(model, batch, padding_free=True)):
        assert bound < cosine_similarity(each, exact).min() < 1

    model.save_pretrained(tmp_path)
    size = (tmp_path / "model.safetensors").stat().st_size
    numbers = 4 * sum(table.numel() for table in model.embeddings.parameters())
    numbers += sum(weight.numel() for weight in matrices(model))
    assert numbers < size < 1.05 * numbers
    for opened in (ScratchBertModel, AutoModel):
        again = opened.from_pretrained(tmp_path, trust_remote_code=True)
        assert [type(weight).__name__ for weight in matrices(again)] == ["Int8Tensor"] * 36
        assert_close(embeddings(again, batch), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_a_tied_head_stays_whole(kind, tmp_path):
    """The matrix of the words is a table too, and is left in float32, in one copy. The rest is refused by what requires
    float32."""
    random_scratchbert("ForMaskedLM").save_pretrained(tmp_path / "whole")
    config = TorchAoConfig(KINDS[kind][0]())
    model = ScratchBertForMaskedLM.from_pretrained(tmp_path / "whole", quantization_config=config)
    model.save_pretrained(tmp_path / "quantised")
    assert not (tmp_path / "quantised" / "probe.json").exists()
    again = ScratchBertForMaskedLM.from_pretrained(tmp_path / "quantised")
    for each in (model, again):
        assert each.lm_head.decoder.weight is each.get_input_embeddings().weight
        assert type(each.lm_head.decoder.weight) is torch.nn.Parameter
        assert type(each.lm_head.dense.weight).__name__ == "Int8Tensor"
    inputs = inputs_for("ForMaskedLM")
    with torch.no_grad():
        assert_close(again(**inputs).logits, model(**inputs).logits)
    with pytest.raises(RuntimeError, match="optimize_for_inference"):
        model.optimize_for_inference()
    with pytest.raises(ValueError, match="quantised"):
        model.save_as_bert(tmp_path / "bert")
    assert not (tmp_path / "bert").exists()
