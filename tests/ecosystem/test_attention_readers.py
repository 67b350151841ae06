"""Tools that look into a model read ours as they read BERT: bertviz its attentions, Captum its word embeddings, hooks
and nnsight its activations."""

import json

import pytest
import torch
from transformers import BertForSequenceClassification

from modeling_scratchbert import (
    ScratchBertForConditionalGeneration,
    ScratchBertForSequenceClassification,
    ScratchBertModel,
)
from support.models import randomise, tiny_config

WORDS = ["[CLS]", "the", "cat", "sat", "##s", "$", "[SEP]"]
WRITTEN = ["[CLS]", "a", "cat", "[SEP]"]


# ------------------------------------------------------------------------------------------------------------ bertviz


@pytest.fixture(params=["head_view", "model_view"])
def view(request):
    """A view of bertviz; returns what it was made of: the attentions by name, as its page holds them."""
    bertviz = pytest.importorskip("bertviz", reason="the package bertviz is not installed")

    def make(**arguments) -> dict:
        page = getattr(bertviz, request.param)(**arguments, html_action="return").data
        _, _, rest = page.partition("const params = ")
        parameters, _ = json.JSONDecoder().raw_decode(rest)
        return {one["name"]: one for one in parameters["attention"]}

    return make


def assert_shows(shown: dict, maps: tuple[torch.Tensor, ...], left: list[str], right: list[str]) -> None:
    """The page has these weights to the last digit, `(layers, heads, left, right)`, and these tokens."""
    assert torch.equal(torch.tensor(shown["attn"]), torch.cat(maps))
    assert (shown["left_text"], shown["right_text"]) == (left, right)


def test_bertviz_shows_the_attentions_of_an_encoder(view):
    model = randomise(ScratchBertModel(tiny_config())).eval()
    with torch.no_grad():
        maps = model(torch.randint(99, (1, len(WORDS))), output_attentions=True).attentions
    shown = view(attention=maps, tokens=WORDS)
    assert shown.keys() == {None}
    assert_shows(shown[None], maps, WORDS, WORDS)


def test_bertviz_shows_the_attentions_of_two_halves(view):
    config = tiny_config(is_encoder_decoder=True, decoder_start_token_id=1)
    model = randomise(ScratchBertForConditionalGeneration(config)).eval()
    source, target = (torch.randint(99, (1, len(tokens))) for tokens in (WORDS, WRITTEN))
    with torch.no_grad():
        outputs = model(source, decoder_input_ids=target, output_attentions=True)
    shown = view(
        encoder_attention=outputs.encoder_attentions,
        decoder_attention=outputs.decoder_attentions,
        cross_attention=outputs.cross_attentions,
        encoder_tokens=WORDS,
        decoder_tokens=WRITTEN,
    )
    assert shown.keys() == {"Encoder", "Decoder", "Cross"}
    assert_shows(shown["Encoder"], outputs.encoder_attentions, WORDS, WORDS)
    assert_shows(shown["Decoder"], outputs.decoder_attentions, WRITTEN, WRITTEN)
    assert_shows(shown["Cross"], outputs.cross_attentions, WRITTEN, WORDS)


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


@torch.no_grad()
def assert_complete(attributions: torch.Tensor, model, batch) -> None:
    """They add up to the difference of the scores (Sundararajan et al. 2017, section 3)."""
    difference = score(model)(batch["ids"], batch["mask"]) - score(model)(batch["baseline"], batch["mask"])
    assert difference.abs().min() > 0.01
    torch.testing.assert_close(attributions.sum((1, 2)), difference, atol=1e-4, rtol=0)


def assert_as_the_references(attributions: torch.Tensor, expected: torch.Tensor) -> None:
    assert expected.abs().max() > 0.05
    torch.testing.assert_close(attributions, expected, atol=1e-4, rtol=0)


def test_captum_attributes_to_word_embeddings_as_with_bert(attr, classifiers, batch):
    model, reference = classifiers
    batch["mask"] = torch.ones_like(batch["mask"])
    attributions = integrated(attr, model, batch)
    assert_as_the_references(attributions, integrated(attr, reference, batch))
    assert_complete(attributions, model, batch)


def test_captum_attributes_in_a_padded_batch(attr, classifiers, batch):
    model, reference = classifiers
    attributions = integrated(attr, model, batch)
    assert_as_the_references(attributions, integrated(attr, reference, batch))
    assert_complete(attributions, model, batch)
    assert not attributions[batch["mask"] == 0].any()


def test_captum_stops_at_a_batch_that_is_unpadded_by_request(attr, classifiers, batch):
    """Its hooks would put embeddings of their own, `(steps × B, T, C)`, in place of unpadded ones, `(1, N, C)`: an
    error, and no wrong attributions."""
    model, _ = classifiers
    with pytest.raises(RuntimeError, match="size of"):
        integrated(attr, model, batch, padding_free=True)


def test_captum_attributes_to_given_embeddings_in_any_batch(attr, classifiers, batch):
    """Embeddings that are an argument need no hook, and so padding may be removed."""
    model, reference = classifiers

    def score_of_embeddings(embeddings, mask):
        return model(inputs_embeds=embeddings, attention_mask=mask).logits[:, TARGET]

    given = (model.get_input_embeddings()(batch[name]).detach() for name in ("ids", "baseline"))
    attributions = attr.IntegratedGradients(score_of_embeddings).attribute(
        *given, additional_forward_args=(batch["mask"],), n_steps=STEPS
    )
    assert_as_the_references(attributions, integrated(attr, reference, batch))
    assert_complete(attributions, model, batch)
    assert not attributions[batch["mask"] == 0].any()


# ------------------------------------------------------------------------------------------------------- activations

# A module of ours, and the same module of BERT, in the order in which they run.
ACTIVATIONS = {
    "model.embeddings": "bert.embeddings",
    "model.encoder.blocks.0": "bert.encoder.layer.0",
    "model.encoder.blocks.1": "bert.encoder.layer.1",
    "model.pooler": "bert.pooler",
    "classifier": "classifier",
}


def test_hooks_read_the_activations_of_bert_in_its_order(classifiers, batch):
    seen = []
    for model, paths in zip(classifiers, (ACTIVATIONS, ACTIVATIONS.values()), strict=True):
        seen.append([])
        handles = [
            model.get_submodule(path).register_forward_hook(
                lambda module, args, output, seen=seen[-1], place=place: seen.append((place, output))
            )
            for place, path in enumerate(paths)
        ]
        with torch.no_grad():
            score(model)(batch["ids"], batch["mask"])
        for handle in handles:
            handle.remove()
    assert [place for place, _ in seen[0]] == list(range(len(ACTIVATIONS)))
    torch.testing.assert_close(*seen, rtol=0, atol=1e-5)


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
