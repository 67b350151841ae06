"""Tools that look into a model read ours as they read BERT: bertviz its attentions, Captum its word embeddings,
nnsight its activations."""

import json

import pytest
import torch
from transformers import BertForSequenceClassification

from modeling_scratchbert import ScratchBertForConditionalGeneration, ScratchBertForSequenceClassification
from support.models import randomise, tiny_config

WORDS = ["[CLS]", "the", "cat", "sat", "##s", "$", "[SEP]"]
WRITTEN = ["[CLS]", "a", "cat", "[SEP]"]


# ------------------------------------------------------------------------------------------------------------ bertviz


@pytest.mark.parametrize("view", ["head_view", "model_view"])
def test_bertviz_shows_the_attention_weights_of_an_encoder_and_a_decoder(view):
    """Its page has the weights to the last digit, `(layers, heads, left, right)`, and the tokens."""
    bertviz = pytest.importorskip("bertviz", reason="the package bertviz is not installed")
    config = tiny_config(is_encoder_decoder=True, decoder_start_token_id=1)
    model = randomise(ScratchBertForConditionalGeneration(config)).eval()
    source, target = torch.randint(99, (1, len(WORDS))), torch.randint(99, (1, len(WRITTEN)))
    with torch.no_grad():
        outputs = model(source, decoder_input_ids=target, output_attentions=True)
    page = getattr(bertviz, view)(
        encoder_attention=outputs.encoder_attentions,
        decoder_attention=outputs.decoder_attentions,
        cross_attention=outputs.cross_attentions,
        encoder_tokens=WORDS,
        decoder_tokens=WRITTEN,
        html_action="return",
    ).data
    parameters, _ = json.JSONDecoder().raw_decode(page.partition("const params = ")[2])
    shown = {each["name"]: each for each in parameters["attention"]}
    expected = {
        "Encoder": (outputs.encoder_attentions, WORDS, WORDS),
        "Decoder": (outputs.decoder_attentions, WRITTEN, WRITTEN),
        "Cross": (outputs.cross_attentions, WRITTEN, WORDS),
    }
    assert shown.keys() == expected.keys()
    for name, (weights, left, right) in expected.items():
        assert torch.equal(torch.tensor(shown[name]["attn"]), torch.cat(weights))
        assert (shown[name]["left_text"], shown[name]["right_text"]) == (left, right)


# ------------------------------------------------------------------------------------------------------------- Captum

CLS, PAD = 1, 0
TARGET = 1  # the class whose score is attributed
STEPS = 32  # of the integral


@pytest.fixture(scope="module")
def attr():
    return pytest.importorskip("captum.attr", reason="the package captum is not installed")


@pytest.fixture(scope="module")
def classifiers(tmp_path_factory):
    """A classifier and its Bert reference, with the same weights."""
    model = randomise(ScratchBertForSequenceClassification(tiny_config()), seed=1).eval()
    with torch.no_grad():
        model.classifier.weight *= 20  # so that scores are of a size that 1e-4 of it is little
    folder = tmp_path_factory.mktemp("reference")
    model.save_as_bert(folder)
    return model, BertForSequenceClassification.from_pretrained(folder).eval()


@pytest.fixture
def batch() -> dict[str, torch.Tensor]:
    """Three texts, two of them padded, and what they are compared with: [CLS], and padding for every word."""
    ids, mask = torch.randint(2, 99, (3, 9)), torch.ones(3, 9, dtype=torch.long)
    ids[:, 0], mask[0, 5:], mask[1, 7:] = CLS, 0, 0
    ids = ids.masked_fill(mask == 0, PAD)
    return {"ids": ids, "mask": mask, "baseline": torch.full_like(ids, PAD).index_fill(1, torch.tensor([0]), CLS)}


def score(model, **options):
    return lambda ids, mask: model(ids, attention_mask=mask, **options).logits[:, TARGET]


def integrated(attr, model, batch, **options) -> torch.Tensor:
    """The attributions to the word embeddings, `(B, T, C)`, by integrated gradients (Sundararajan et al. 2017)."""
    return attr.LayerIntegratedGradients(score(model, **options), model.get_input_embeddings()).attribute(
        batch["ids"], batch["baseline"], additional_forward_args=(batch["mask"],), n_steps=STEPS
    )


@pytest.mark.parametrize("is_padded", [False, True], ids=["no padding", "padding"])
def test_captum_attributes_to_word_embeddings_as_with_bert(attr, classifiers, batch, is_padded):
    model, reference = classifiers
    if not is_padded:
        batch["mask"] = torch.ones_like(batch["mask"])
    attributions = integrated(attr, model, batch)
    expected = integrated(attr, reference, batch)
    assert expected.abs().max() > 0.05
    torch.testing.assert_close(attributions, expected, atol=1e-4, rtol=0)
    assert not attributions[batch["mask"] == 0].any()


def test_captum_stops_at_a_batch_that_is_unpadded_by_request(attr, classifiers, batch):
    """Its hooks would put embeddings of their own, `(steps × B, T, C)`, in place of unpadded ones, `(1, N, C)`: an
    error, and no wrong attributions."""
    model, _ = classifiers
    with pytest.raises(RuntimeError, match="size of"):
        integrated(attr, model, batch, padding_free=True)


# ------------------------------------------------------------------------------------------------------- activations


@pytest.mark.filterwarnings("ignore:Module .* has a submodule named 'output'")
@pytest.mark.parametrize("block", [0, 1])
def test_nnsight_reads_and_intervenes_as_in_bert(classifiers, batch, block, tmp_path, monkeypatch):
    # By default nnsight gives every object of the process a method `save`, with which torch's ONNX exporter fails.
    (tmp_path / "nnsight.yaml").write_text("APP: {PYMOUNT: false}")
    monkeypatch.setenv("NNSIGHT_CONFIG", str(tmp_path / "nnsight.yaml"))
    nnsight = pytest.importorskip("nnsight", reason="the package nnsight is not installed")
    inputs = {"input_ids": batch["ids"], "attention_mask": batch["mask"]}
    results = []
    for model, layers in zip(classifiers, ("model.encoder.blocks", "bert.encoder.layer"), strict=True):
        traced = nnsight.NNsight(model)
        with torch.no_grad(), traced.trace(**inputs):
            output = traced.get(f"{layers}.{block}").output
            read = nnsight.save(output.clone())
            output[:, 0] = output[:, 1]
            changed = nnsight.save(traced.output.logits)
        assert read.shape == (*batch["ids"].shape, 32)
        with torch.no_grad():
            assert not torch.allclose(changed, model(**inputs).logits, atol=1e-2)
        results.append((read, changed))
    torch.testing.assert_close(*results, rtol=0, atol=1e-4)
