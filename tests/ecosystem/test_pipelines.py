"""`pipeline()` on the folder of a saved model returns what it returns for a BERT of the same weights, in every task for
which transformers has such a model."""

from pathlib import Path

import pytest
from transformers import AutoTokenizer, pipeline

from support.models import NEEDS, OURS, randomise, tiny_config

SENTENCES = [
    "The museum in Lisbon opens at nine.",
    "Rain is expected later today, and the wind will turn north over the weekend.",
    "She paid 12 euros!",
]
PAIR = {"text": SENTENCES[0], "text_pair": SENTENCES[1]}
ZERO_SHOT = {"candidate_labels": ["weather", "culture", "money"], "hypothesis_template": "This is about {}."}
# Class and labels of each task.
TASKS = {
    "fill-mask": ("ForMaskedLM", ()),
    "feature-extraction": ("Model", ()),
    "text-generation": ("ForCausalLM", ()),
    "text-classification": ("ForSequenceClassification", ("sad", "glad", "neither")),
    "token-classification": ("ForTokenClassification", ("O", "B-PLACE", "I-PLACE", "B-TIME")),
    "zero-shot-classification": ("ForSequenceClassification", ("contradiction", "neutral", "entailment")),
}


def save(task: str, minilm: str, folder: Path) -> list[Path]:
    """Saves one of our models and its reference, each with a tokenizer. Returns their folders."""
    head, labels = TASKS[task]
    tokenizer = AutoTokenizer.from_pretrained(minilm)
    names = {"id2label": dict(enumerate(labels)), "label2id": {name: i for i, name in enumerate(labels)}}
    fields = {**NEEDS.get(head, {}), **(names if labels else {})}
    config = tiny_config(vocab_size=len(tokenizer), max_position_embeddings=64, **fields)
    model = randomise(OURS[head](config), std=0.2)
    model.save_pretrained(folder / "ours")
    model.save_as_bert(folder / "bert")
    for each in folder.iterdir():
        tokenizer.save_pretrained(each)
    return [folder / "ours", folder / "bert"]


def assert_same(output, expected) -> None:
    """Nested lists and dictionaries: the same structure and words, and numbers within 1e-5."""
    if isinstance(expected, dict):
        assert output.keys() == expected.keys()
        for name in expected:
            assert_same(output[name], expected[name])
    elif isinstance(expected, list | tuple):
        for part, expected_part in zip(output, expected, strict=True):
            assert_same(part, expected_part)
    elif isinstance(expected, str):
        assert output == expected
    else:
        assert float(output) == pytest.approx(float(expected), abs=1e-5)


@pytest.mark.parametrize(
    ("task", "inputs", "options"),
    [
        ("fill-mask", "The capital of France is [MASK].", {"top_k": 7}),
        ("fill-mask", ["[MASK] is a city.", "A [MASK] and a [MASK]."], {}),
        ("fill-mask", "Paris is a [MASK].", {"targets": ["city", "lamp"]}),
        ("feature-extraction", SENTENCES, {"batch_size": 3}),
        ("text-generation", SENTENCES[0], {"max_new_tokens": 12, "do_sample": False}),
        ("text-classification", SENTENCES, {"top_k": None}),
        ("text-classification", SENTENCES, {"batch_size": 2}),
        ("text-classification", PAIR, {"function_to_apply": "none"}),
        ("token-classification", SENTENCES, {"batch_size": 3}),
        ("token-classification", SENTENCES, {"aggregation_strategy": "simple"}),
        ("token-classification", SENTENCES, {"aggregation_strategy": "average"}),
        ("zero-shot-classification", SENTENCES, {**ZERO_SHOT, "batch_size": 4}),
        ("zero-shot-classification", SENTENCES, {**ZERO_SHOT, "multi_label": True}),
    ],
)
def test_a_pipeline_returns_what_it_returns_for_bert(task, inputs, options, minilm, tmp_path, said):
    folders = save(task, minilm, tmp_path)
    ours, reference = (pipeline(task, model=str(folder), device="cpu") for folder in folders)
    assert type(ours.model) is OURS[TASKS[task][0]]
    output, warnings = ours(inputs, **options), said()
    assert_same(output, reference(inputs, **options))
    assert not warnings  # such as that the task does not support the class
