"""`pipeline()` on a folder in Hub form returns what it returns for a BERT of the same weights, in every task for which
transformers has an encoder."""

import pytest
import torch
import transformers
from torch.testing import assert_close
from transformers import AutoModel, AutoTokenizer, pipeline

import modeling_scratchbert
from modeling_scratchbert import ScratchBertConfig

SENTENCES = [
    "The museum in Lisbon opens at nine.",
    "Rain is expected later today, and the wind will turn north over the weekend.",
    "She paid 12 euros!",
]
# Task, head, and the fields beside the sizes that the head's configuration needs.
TASKS = {
    "fill-mask": ("ForMaskedLM", {}),
    "feature-extraction": ("Model", {}),
    "text-classification": (
        "ForSequenceClassification",
        {"id2label": {0: "sad", 1: "glad", 2: "neither"}, "label2id": {"sad": 0, "glad": 1, "neither": 2}},
    ),
    "token-classification": (
        "ForTokenClassification",
        {
            "id2label": {0: "O", 1: "B-PLACE", 2: "I-PLACE", 3: "B-TIME"},
            "label2id": {"O": 0, "B-PLACE": 1, "I-PLACE": 2, "B-TIME": 3},
        },
    ),
    "zero-shot-classification": (
        "ForSequenceClassification",
        {
            "id2label": {0: "contradiction", 1: "neutral", 2: "entailment"},
            "label2id": {"contradiction": 0, "neutral": 1, "entailment": 2},
        },
    ),
}


@pytest.fixture(scope="module")
def tokenizer(minilm):
    return AutoTokenizer.from_pretrained(minilm)


@pytest.fixture(scope="module")
def folders(tokenizer, tmp_path_factory):
    """For a task, the folder of one of our models and that of its reference, with the tokenizer; made once each."""
    made = {}

    def make(task):
        if task not in made:
            head, fields = TASKS[task]
            torch.manual_seed(0)
            config = ScratchBertConfig(
                vocab_size=len(tokenizer),
                hidden_size=32,
                num_hidden_layers=2,
                num_attention_heads=4,
                intermediate_size=64,
                max_position_embeddings=64,
                **fields,
            )
            model = getattr(modeling_scratchbert, f"ScratchBert{head}")(config)
            with torch.no_grad():  # as made, every sentence would be given nearly the same scores
                for parameter in model.parameters():
                    parameter += 0.2 * torch.randn_like(parameter)
            made[task] = save_both(model, tokenizer, tmp_path_factory.mktemp(task))
        return made[task]

    return make


@pytest.fixture(scope="module")
def real_folders(minilm, tokenizer, tmp_path_factory):
    """The same for the encoder of all-MiniLM-L6-v2, below a new head."""
    made = {}

    def make(head):
        if head not in made:
            torch.manual_seed(0)
            model = getattr(modeling_scratchbert, f"ScratchBert{head}").from_pretrained(minilm)
            made[head] = save_both(model, tokenizer, tmp_path_factory.mktemp(head))
        return made[head]

    return make


def save_both(model, tokenizer, folder):
    ours, reference = str(folder / "ours"), str(folder / "bert")
    model.save_pretrained(ours)
    model.save_as_bert(reference)
    tokenizer.save_pretrained(ours)
    tokenizer.save_pretrained(reference)
    return ours, reference


def run(folder, task, *args, arguments=None, **kwargs):
    return pipeline(task, model=folder, device="cpu", **(arguments or {}))(*args, **kwargs)


def assert_same(output, expected):
    """Nested lists and dictionaries: the same structure and words, and numbers to 1e-5."""
    if isinstance(expected, float):
        assert output == pytest.approx(expected, abs=1e-5)
    elif isinstance(expected, dict):
        assert output.keys() == expected.keys()
        for name in expected:
            assert_same(output[name], expected[name])
    elif isinstance(expected, (list, tuple)) and expected and isinstance(expected[0], float):
        assert_close(torch.tensor(output), torch.tensor(expected), rtol=0, atol=1e-5)
    elif isinstance(expected, (list, tuple)):
        assert len(output) == len(expected)
        for part, reference_part in zip(output, expected, strict=True):
            assert_same(part, reference_part)
    elif hasattr(expected, "dtype"):
        assert float(output) == pytest.approx(float(expected), abs=1e-5)
    else:
        assert output == expected


@pytest.mark.parametrize(
    ("task", "inputs", "arguments"),
    [
        ("fill-mask", "The capital of France is [MASK].", {"top_k": 7}),
        ("fill-mask", ["[MASK] is a city.", "A [MASK] and a [MASK]."], {}),
        ("fill-mask", "Paris is a [MASK].", {"targets": ["city", "lamp"]}),
        ("feature-extraction", SENTENCES, {}),
        ("feature-extraction", SENTENCES, {"batch_size": 3}),
        ("text-classification", SENTENCES, {"top_k": None}),
        ("text-classification", SENTENCES, {"batch_size": 2}),
        ("text-classification", {"text": SENTENCES[0], "text_pair": SENTENCES[1]}, {"function_to_apply": "none"}),
        ("token-classification", SENTENCES, {}),
        ("token-classification", SENTENCES, {"batch_size": 3}),
        ("token-classification", SENTENCES, {"aggregation_strategy": "simple"}),
        ("token-classification", SENTENCES, {"aggregation_strategy": "average"}),
    ],
)
def test_a_pipeline_gives_the_references_answers(task, inputs, arguments, folders, said):
    ours, reference = folders(task)
    output = run(ours, task, inputs, **arguments)
    complaints = said()
    expected = run(reference, task, inputs, **arguments)
    assert_same(output, expected)
    assert not complaints, complaints


@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("batch_size", [1, 4])
def test_zero_shot_classification_gives_the_references_answers(several, batch_size, folders, said):
    ours, reference = folders("zero-shot-classification")
    labels = ["weather", "culture", "money"]
    arguments = {"multi_label": several, "hypothesis_template": "This is about {}.", "batch_size": batch_size}
    output = run(ours, "zero-shot-classification", SENTENCES, labels, **arguments)
    complaints = said()
    assert_same(output, run(reference, "zero-shot-classification", SENTENCES, labels, **arguments))
    assert not complaints, complaints  # among others, that no label of the model means entailment
    assert {answer["labels"][0] for answer in output} <= set(labels)
    if not several:
        assert sum(output[0]["scores"]) == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize("task", TASKS)
def test_a_pipeline_opens_our_class_and_knows_it(task, folders, said):
    ours, _ = folders(task)
    head = TASKS[task][0]
    opened = pipeline(task, model=ours, device="cpu")
    assert type(opened.model) is getattr(modeling_scratchbert, f"ScratchBert{head}")
    assert not [line for line in said() if "not supported" in line]
    assert not opened.model.training


@pytest.mark.parametrize("task", TASKS)
def test_a_pipeline_takes_a_model_and_a_tokenizer(task, folders, tokenizer, said):
    ours, _ = folders(task)
    model = getattr(modeling_scratchbert, f"ScratchBert{TASKS[task][0]}").from_pretrained(ours)
    args = (["weather", "money"],) if task.startswith("zero") else ()
    text = "It will be [MASK] soon." if task == "fill-mask" else SENTENCES[1]
    made = pipeline(task, model=model, tokenizer=tokenizer, device="cpu")
    assert made.model is model
    assert_same(made(text, *args), run(ours, task, text, *args))
    assert not said()


def test_pipelines_run_in_half_precision(folders):
    ours, reference = folders("text-classification")
    arguments = {"dtype": torch.bfloat16}
    output = run(ours, "text-classification", SENTENCES, arguments=arguments, top_k=None)
    expected = run(reference, "text-classification", SENTENCES, arguments=arguments, top_k=None)
    for answers, reference_answers in zip(output, expected, strict=True):
        scores = {answer["label"]: answer["score"] for answer in answers}
        assert scores == pytest.approx({answer["label"]: answer["score"] for answer in reference_answers}, abs=2e-2)


def test_a_text_that_is_too_long_is_refused_with_the_way_to_truncate_it(folders):
    ours, _ = folders("text-classification")
    text = "word " * 100
    with pytest.raises(ValueError, match=r"102 tokens.* max_position_embeddings is 64.*truncation=True, max_length=64"):
        run(ours, "text-classification", text)
    assert run(ours, "text-classification", text, truncation=True, max_length=64)[0]["label"]


# Real weights


def test_features_of_real_weights_are_the_references(real_folders):
    ours, reference = real_folders("Model")
    assert_same(run(ours, "feature-extraction", SENTENCES), run(reference, "feature-extraction", SENTENCES))


def test_features_of_a_bert_folder_as_it_is(minilm, tokenizer, said):
    model = modeling_scratchbert.ScratchBertModel.from_pretrained(minilm)
    reference = transformers.BertModel.from_pretrained(minilm)
    output, expected = (
        pipeline("feature-extraction", model=either, tokenizer=tokenizer, device="cpu")(SENTENCES, batch_size=3)
        for either in (model, reference)
    )
    assert_same(output, expected)
    assert not said()


def test_a_masked_word_of_real_weights_is_the_references(real_folders):
    """The encoder and the matrix are all-MiniLM-L6-v2's; the transformation before the matrix is new."""
    ours, reference = real_folders("ForMaskedLM")
    text = "The capital of France is [MASK]."
    output = run(ours, "fill-mask", text, top_k=20)
    expected = run(reference, "fill-mask", text, top_k=20)
    assert_same(output, expected)
    assert len({answer["token_str"] for answer in output}) == 20


def test_a_new_head_is_named_in_a_warning(minilm, said):
    modeling_scratchbert.ScratchBertForMaskedLM.from_pretrained(minilm)
    assert any("lm_head.dense.weight" in line and "MISSING" in line for line in said())


def test_the_auto_class_opens_the_folder_too(real_folders):
    ours, _ = real_folders("Model")
    assert type(AutoModel.from_pretrained(ours)) is modeling_scratchbert.ScratchBertModel
