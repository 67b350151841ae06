"""`pipeline()` on the folder of a saved model returns what it returns for a BERT of the same weights, in every task for
which transformers has an encoder. Text generation is in `versions/check.py`."""

import pytest
import torch
from transformers import AutoTokenizer, pipeline

from support.models import OURS, randomise, tiny_config

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
    "text-classification": ("ForSequenceClassification", ("sad", "glad", "neither")),
    "token-classification": ("ForTokenClassification", ("O", "B-PLACE", "I-PLACE", "B-TIME")),
    "zero-shot-classification": ("ForSequenceClassification", ("contradiction", "neutral", "entailment")),
}


@pytest.fixture(scope="module")
def folders(minilm, tmp_path_factory):
    """For a task, the folder of one of our models and that of its reference, with a tokenizer; made once each."""
    tokenizer, made = AutoTokenizer.from_pretrained(minilm), {}

    def make(task: str) -> tuple[str, str]:
        if task not in made:
            head, labels = TASKS[task]
            names = {"id2label": dict(enumerate(labels)), "label2id": {name: i for i, name in enumerate(labels)}}
            config = tiny_config(vocab_size=len(tokenizer), max_position_embeddings=64, **(names if labels else {}))
            model = randomise(OURS[head](config), std=0.2)
            made[task] = ours, reference = [str(tmp_path_factory.mktemp(name)) for name in ("ours", "bert")]
            model.save_pretrained(ours)
            model.save_as_bert(reference)
            for folder in made[task]:
                tokenizer.save_pretrained(folder)
        return made[task]

    return make


def assert_same(output, expected, tolerance=1e-5) -> None:
    """Nested lists and dictionaries: the same structure and words, and numbers within the tolerance."""
    if isinstance(expected, dict):
        assert output.keys() == expected.keys()
        for name in expected:
            assert_same(output[name], expected[name], tolerance)
    elif isinstance(expected, list | tuple):
        for part, expected_part in zip(output, expected, strict=True):
            assert_same(part, expected_part, tolerance)
    elif isinstance(expected, str):
        assert output == expected
    else:
        assert float(output) == pytest.approx(float(expected), abs=tolerance)


@pytest.mark.parametrize(
    ("task", "inputs", "options"),
    [
        ("fill-mask", "The capital of France is [MASK].", {"top_k": 7}),
        ("fill-mask", ["[MASK] is a city.", "A [MASK] and a [MASK]."], {}),
        ("fill-mask", "Paris is a [MASK].", {"targets": ["city", "lamp"]}),
        ("feature-extraction", SENTENCES, {}),
        ("feature-extraction", SENTENCES, {"batch_size": 3}),
        ("text-classification", SENTENCES, {"top_k": None}),
        ("text-classification", SENTENCES, {"batch_size": 2}),
        ("text-classification", PAIR, {"function_to_apply": "none"}),
        ("token-classification", SENTENCES, {}),
        ("token-classification", SENTENCES, {"batch_size": 3}),
        ("token-classification", SENTENCES, {"aggregation_strategy": "simple"}),
        ("token-classification", SENTENCES, {"aggregation_strategy": "average"}),
        ("zero-shot-classification", SENTENCES, {**ZERO_SHOT, "batch_size": 4}),
        ("zero-shot-classification", SENTENCES, {**ZERO_SHOT, "multi_label": True}),
    ],
)
def test_a_pipeline_returns_what_it_returns_for_bert(task, inputs, options, folders, said):
    ours, reference = (pipeline(task, model=folder, device="cpu") for folder in folders(task))
    assert type(ours.model) is OURS[TASKS[task][0]]
    output, warnings = ours(inputs, **options), said()
    assert_same(output, reference(inputs, **options))
    assert not warnings  # such as that the task does not support the class


def test_a_pipeline_in_half_precision(folders):
    ours, reference = (
        pipeline("text-classification", model=folder, device="cpu", dtype=torch.bfloat16)(SENTENCES)
        for folder in folders("text-classification")
    )
    assert_same(ours, reference, tolerance=2e-2)
