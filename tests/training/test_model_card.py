"""toolkit.finetuning.card: the model card of a run reports it, and shows nothing private.

golden/ has a card of each task. REWRITE_GOLDEN=1 writes them anew.
"""

import json
import math
import re
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from huggingface_hub import ModelCard
from transformers import AutoTokenizer, BertConfig, BertForSequenceClassification, BertTokenizer

import modeling_scratchbert
from support.finetuning import TASKS, main_of
from support.golden import assert_golden
from support.models import tiny_config
from toolkit.finetuning import card as training_card
from toolkit.finetuning.card import public_settings, write_card
from toolkit.finetuning.checkpoints import Progress
from toolkit.finetuning.task_settings import (
    ClassificationSettings,
    PretrainingSettings,
    QuestionAnsweringSettings,
    Seq2SeqSettings,
    TokenClassificationSettings,
)
from toolkit.model_card import cell
from toolkit.paths import FILES, FOLDERS_OR_HUB_IDS, public_path

pytestmark = pytest.mark.usefixtures("quiet_only_here")

GOLDEN = Path(__file__).with_name("golden")
HISTORY = [
    {"step": 10, "epoch": 0.5, "loss": 0.9, "learning_rate": 2e-5, "tokens_per_second": 1000.0},
    {"step": 20, "epoch": 1.0, "loss": 0.5, "learning_rate": 1e-5, "tokens_per_second": 3000.0},
    {"step": 20, "epoch": 1.0, "validation": {"loss": 0.6, "accuracy": 0.75}},
    {"step": 1500, "epoch": 2.25, "loss": 0.4, "learning_rate": 0.0, "tokens_per_second": 2000.0},
]
SECRETS = ["hf_" + "a" * 34, "https://jane:pw@host/x", "sk-" + "b" * 30]
BASE = "google-bert/bert-base-uncased"
BASE_CARD = """\
license: apache-2.0
language:
- en
- no
base_model: google-bert/bert-base-uncased
tags: [exbert]
model-index: broken
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The folder of a model with a card, in the working directory; and the same machine and versions everywhere."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(training_card, "hardware", lambda: "a processor, processes: 1, threads of each: 2")
    monkeypatch.setattr(training_card, "version", lambda library: None if library == "peft" else "1.2.3")
    (tmp_path / "my-model").mkdir()
    return tmp_path / "my-model"


@pytest.fixture
def card(folder):
    """Writes a card, and reads it with the Hub's own reader. `fields` are settings; `files`, the JSON files beside the
    card, without their ending."""

    def make(
        task="text-classification",
        settings=ClassificationSettings,
        model_class=None,
        metrics=None,
        files=None,
        metric="accuracy",
        rows=None,
        history=(),
        **fields,
    ) -> ModelCard:
        for name, content in (files or {}).items():
            (folder / f"{name}.json").write_text(json.dumps(content))
        given = {
            "model": BASE,
            "output": "run",
            **({} if "train_file" in fields else {"dataset": "user/data"}),
            **fields,
        }
        run = SimpleNamespace(name=task, settings=settings(**given), row_counts=rows or {}, metric=metric)
        progress = Progress(step=1500, history=list(history))
        model_class = model_class or "ScratchBertForSequenceClassification"
        write_card(folder, run, progress, metrics or {}, model_class=model_class, name="my-model")
        return ModelCard.load(folder / "README.md")

    return make


def base_model(path: Path, metadata: str | bytes) -> str:
    """A folder of a model whose card has these metadata."""
    path.mkdir()
    (path / "README.md").write_bytes(metadata if isinstance(metadata, bytes) else f"---\n{metadata}---\n".encode())
    return str(path)


# ------------------------------------------------------------------------------------------------------- whole cards


def test_a_classifier_of_files(card, folder, tmp_path):
    """With everything that is private: folders, secrets in flags and in their names."""
    for name in ("confusion_matrix.png", "curves.png"):
        (folder / name).touch()
    metrics = {
        "validation": {"loss": 0.25, "accuracy": 0.91, "pearson": math.nan},
        "test": {"loss": 30522.25, "accuracy": 0.875, "pearson": 2e-5},
    }
    found = card(
        model=base_model(tmp_path / "base", BASE_CARD),
        train_file=["/home/jane/a/train.csv", "/home/jane/a/train.csv", r"C:\jane\*.csv"],
        validation_file=["private/valid|1.csv"],
        test_file=["~/private/test.csv"],
        output="/home/jane/out",
        labels=["neg`", "very\npositive"],
        label_column=SECRETS[0],
        class_weights=["1", SECRETS[1]],
        text_column="two\nlines|*",
        learning_rate=2e-5,
        push_to_hub="jane/private",
        metrics=metrics,
        rows={"train": 8066, "validation": 1200, "test": 12},
        history=HISTORY,
        files={"config": {"id2label": {"0": "neg`", "1": "very\npositive"}}},
    )
    text = (folder / "README.md").read_text()
    assert not re.search("jane|private|/home|hf_a|pw@", text)
    assert_golden(text, GOLDEN / "text-classification.md")
    assert [path.name for path in folder.iterdir() if path.name.startswith(".")] == []
    assert [(each.dataset_name, each.dataset_split, each.metric_type) for each in found.data.eval_results] == [
        ("valid|1.csv", "validation", "loss"),
        ("valid|1.csv", "validation", "accuracy"),
        ("test.csv", "test", "loss"),
        ("test.csv", "test", "accuracy"),
        ("test.csv", "test", "pearson"),
    ]


def test_a_tagger_of_a_reference_on_a_dataset_of_the_hub(card, folder):
    card(
        "token-classification",
        TokenClassificationSettings,
        "BertForTokenClassification",
        dataset="user/words",
        dataset_config="en",
        validation_split="validation_matched",
        test_split="test[:100]",
        metrics={"validation": {"f1": 0.5, "accuracy": 0.75}, "test": {"f1": 0.25}},
        files={"config": {"id2label": {"0": "O", "1": "B-PER", "2": "I-PER"}, "problem_type": "regression"}},
    )
    assert_golden((folder / "README.md").read_text(), GOLDEN / "token-classification.md")


def test_a_reader_of_questions(card, folder):
    card(
        "question-answering",
        QuestionAnsweringSettings,
        "ScratchBertForQuestionAnswering",
        train_file=["squad.json"],
        validation_file=["dev.json"],
        null_threshold="best",
        metrics={"validation": {"exact_match": 50.0, "f1": 60.0, "null_threshold": None}},
        files={"config": {"id2label": {"0": "LABEL_0", "1": "LABEL_1"}}},
    )
    assert_golden((folder / "README.md").read_text(), GOLDEN / "question-answering.md")


def test_a_generator_from_random_weights(card, folder, tmp_path):
    (tmp_path / "tiny.json").write_text("{}")
    card(
        "text2text-generation",
        Seq2SeqSettings,
        "ScratchBertForConditionalGeneration",
        model=None,
        config_file=f"{tmp_path}/tiny.json",
        tokenizer="/",
        train_file=["pairs.jsonl"],
        test_file=["test.jsonl"],
        metrics={"test": {"rouge1": 0.5}},
        files={"generation_config": {"num_beams": 3, "eos_token_id": 3, "do_sample": False, "_from": "x"}},
    )
    assert_golden((folder / "README.md").read_text(), GOLDEN / "text2text-generation.md")


def test_a_masked_language_model_without_evaluation(card, folder):
    card("fill-mask", PretrainingSettings, "ScratchBertForPreTraining", train_file=["a.txt"], max_length=1024)
    assert_golden((folder / "README.md").read_text(), GOLDEN / "fill-mask.md")


# ------------------------------------------------------------------------------------------------------- its values


@pytest.mark.parametrize("task", TASKS[:4])
def test_rows_are_counted_as_often_as_their_file_is_given(task, model, tmp_path):
    """Also if a row has several windows."""
    main, flags = main_of(task, tmp_path)
    more = {"answers": ["--max_length=6", "--stride=0"], "tags": ["--max_length=3", "--stride=0"]}.get(task, [])
    if task == "answers":
        row = {"question": "a", "context": "a " * 5, "answers": {"text": ["a"], "answer_start": [0]}}
        Path(flags["train_file"]).write_text(f"{json.dumps(row)}\n" * 8)
    arguments = [f"--{name}={value}" for name, value in flags.items() if name != "train_file"] + more
    file = flags["train_file"]
    arguments += ["--train_file", file, file, "--model", model, "--output", str(tmp_path / "run"), "--max_steps=1"]
    assert main([*arguments, "--trackers=none"]) == 0
    assert "\n- Rows: 16 train, 8 validation\n" in (tmp_path / "run" / "README.md").read_text()


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        (
            "base_model: user/one\nlicense: mit\nlanguage: no\n",
            {"base_model": "user/one", "license": "mit", "language": "no"},
        ),
        (
            "license: other\nlicense_name: x\nlicense_link: https://host/x\n",
            {"license": "other", "license_name": "x", "license_link": "https://host/x"},
        ),
        ("license: other\nlicense_name: x\nlicense_link: LICENSE\n", {"license": "other", "license_name": "x"}),
        ("license: [mit, bsd]\nlicense_name: x\nlanguage: {a: b}\nbase_model: {a: b}\n", {}),
        ("base_model: [user/one]\n", {"base_model": "user/one"}),
        ("base_model: [user/one, user/two]\n", {}),
        ("base_model: /home/jane/mine\n", {}),
        ("base_model: ../mine\n", {}),
        ("- a list\n", {}),
        ("license: [\n", {}),
        (b"", {}),
        (b"# Base\n", {}),
        (b"---\nlicense: \xff\n---\n", {}),
    ],
)
def test_of_the_card_of_a_base_model_only_what_the_hub_accepts_is_taken(metadata, expected, card, tmp_path, capsys):
    found = card(model=base_model(tmp_path / "base", metadata)).data.to_dict()
    names = {"base_model", "license", "license_name", "license_link", "language"}
    assert {name: value for name, value in found.items() if name in names} == expected
    assert capsys.readouterr().err == ""


def test_the_card_of_a_base_model_in_the_cache_gives_licence_and_language(card, tmp_path, monkeypatch):
    repository = tmp_path / "hub" / f"models--{BASE.replace('/', '--')}"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("abc")
    base_model(repository / "snapshots", "")
    base_model(repository / "snapshots" / "abc", "license: mit\nlanguage: en\n")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    data = card().data
    assert (data.base_model, data.license, data.language) == (BASE, "mit", "en")
    data = card(model="google-bert/another").data
    assert (data.base_model, data.license, data.language) == ("google-bert/another", None, None)


def test_a_dataset_in_a_folder_is_no_hub_id(card, tmp_path):
    (tmp_path / "data" / "mine").mkdir(parents=True)
    found = card(dataset="data/mine", metrics={"validation": {"accuracy": 0.5}})
    assert found.data.datasets is None
    assert found.data.eval_results[0].dataset_name == "mine"
    assert "trained on `mine` from" in found.text
    assert card(dataset="data/other").data.datasets == ["data/other"]


def test_without_a_number_there_are_no_results_for_the_hub(card):
    for metrics in ({"validation": {"pearson": math.nan}}, {"validation": {}}, {}):
        found = card(metrics=metrics)
        assert not {"model-index", "model_name", "metrics"} & set(found.data.to_dict())
        assert ("## Results" in found.text) == ("pearson" in str(metrics))


def test_only_entities_are_grouped_in_the_example_of_a_tagger(card):
    for names, groups in ((["O", "B-PER", "I-PER"], True), (["NOUN", "VERB"], False), (["O", "B-PER", "X"], False)):
        config = {"config": {"id2label": dict(enumerate(names))}}
        text = card("token-classification", model_class="ScratchBertForTokenClassification", files=config).text
        assert ('aggregation_strategy="first"' in text) == groups
        assert ("ignore_labels=[]" in text) != groups


@pytest.mark.parametrize(
    ("config", "part"),
    [
        ({"problem_type": "regression", "id2label": {"0": "similarity"}}, "Outputs: `similarity`\n"),
        ({"problem_type": "regression"}, "- It predicts numbers for a text"),
        ({"problem_type": "multi_label_classification"}, "- It predicts any number of labels"),
        ({"id2label": {str(i): f"intent {i}" for i in range(52)}}, "`intent 49`, and 2 more\n"),
    ],
)
def test_the_problem_and_the_labels_of_a_classifier(config, part, card):
    assert part in card(files={"config": config}).text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "undefined"),
        (0.91234567, "0.9123"),
        (2e-5, "2e-05"),
        (30522.25, "30,522.2"),
        (1e9, "1e+09"),
        (3, "3"),
        (["a", "b"], "a, b"),
        (list(range(51)), ", ".join(map(str, range(50))) + ", and 1 more"),
        ("a|*\n b", r"a\|\* b"),
    ],
)
def test_cells_of_a_table(value, text):
    assert cell(value) == text


# ------------------------------------------------------------------------------------------------- what is private


def test_all_flags_that_are_paths_are_known():
    """The others are shown as they are."""
    settings = (
        ClassificationSettings,
        TokenClassificationSettings,
        QuestionAnsweringSettings,
        Seq2SeqSettings,
        PretrainingSettings,
    )
    helps = [(field.name, field.metadata["help"]) for each in settings for field in fields(each)]
    paths = {name for name, text in helps if re.search(r"\b(files?|folders?|paths?)\b", text)}
    of_train = {"output_dir", "config_name", "tokenizer_name"}
    assert paths | of_train == {*FILES, *FOLDERS_OR_HUB_IDS}


@pytest.mark.parametrize(
    ("value", "seen"),
    [
        ("/home/jane/x.csv", "x.csv"),
        ("/home/Jane Doe/x.csv", "x.csv"),
        ("~/x.csv", "x.csv"),
        ("../x", "x"),
        (r"C:\Users\jane\x.csv", "x.csv"),
        ("//home/jane/x.csv", "x.csv"),
        ("data/*.csv", "*.csv"),
        ("/", "/"),
        ("private/folder/", "folder"),
        ("x/y.csv", "y.csv"),
    ],
)
def test_of_paths_the_last_part_is_public(value, seen, tmp_path, monkeypatch):
    assert public_path(value, is_file=True) == seen
    assert public_path("user/model", is_file=False) == "user/model"
    monkeypatch.chdir(tmp_path)
    Path("user/model").mkdir(parents=True)
    assert public_path("user/model", is_file=False) == "model"


@pytest.mark.parametrize("name", ["hub_token", "token", "wandb_api_key", "password", "client_secret", "auth"])
def test_settings_named_like_secrets_are_omitted(name, monkeypatch):
    monkeypatch.setattr(training_card, "defaults_of", lambda settings: dict.fromkeys(vars(settings)))
    monkeypatch.setattr(training_card, "asdict", vars)
    kept = {"max_tokens": 5, "tokens_per_batch": 6, "author": "x"}
    assert public_settings(SimpleNamespace(**{name: "hunter2"}, **kept)) == kept


@pytest.mark.parametrize("value", SECRETS)
def test_values_that_look_like_secrets_are_omitted(value):
    settings = ClassificationSettings(model=BASE, output="run", dataset="user/data", labels=["x", value])
    assert public_settings(settings) == {"model": BASE, "dataset": "user/data"}


# --------------------------------------------------------------------------------------------------- the code in it


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    """A tokenizer."""
    folder = tmp_path_factory.mktemp("tokenizer")
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "text", "question", ".", "?"]
    BertTokenizer(vocab={word: i for i, word in enumerate(vocabulary)}).save_pretrained(folder)
    return AutoTokenizer.from_pretrained(folder)


def run_code(text: str) -> dict:
    """The names that the card's code leaves, run beside the model's folder."""
    names = {}
    exec(re.search(r"```python\n(.*?)```", text, flags=re.DOTALL)[1], names)
    return names


@pytest.mark.parametrize(
    "short",
    [
        "ForSequenceClassification",
        "ForTokenClassification",
        "ForQuestionAnswering",
        "ForConditionalGeneration",
        "ForMaskedLM",
        "ForPreTraining",
    ],
)
def test_the_code_of_the_card_runs(short, card, words, folder, capsys):
    name = f"ScratchBert{short}"
    seq2seq = {"is_encoder_decoder": True, "decoder_start_token_id": 2, "eos_token_id": 3}
    model = getattr(modeling_scratchbert, name)(tiny_config(**seq2seq if short == "ForConditionalGeneration" else {}))
    model.save_pretrained(folder)
    words.save_pretrained(folder)
    text = card(model_class=name).text
    assert text.count('("my-model", trust_remote_code=True)') == 2  # without it, the tokenizer asks as well
    opened = run_code(text)["model"]
    assert type(opened).__name__ == f"ScratchBert{'ForMaskedLM' if short == 'ForPreTraining' else short}"
    ours = model.state_dict()
    assert all(torch.equal(tensor, ours[key]) for key, tensor in opened.state_dict().items() if key in ours)
    assert capsys.readouterr().out.strip()


def test_a_reference_needs_no_code_from_the_folder(card, words, folder):
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    BertForSequenceClassification(BertConfig(vocab_size=101, **sizes)).save_pretrained(folder)
    words.save_pretrained(folder)
    found = card(model_class="BertForSequenceClassification")
    assert "trust_remote_code" not in found.text
    assert "ScratchBert" not in found.text
    assert found.data.tags is None
    assert type(run_code(found.text)["model"]) is BertForSequenceClassification
