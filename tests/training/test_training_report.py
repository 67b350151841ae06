"""toolkit.training.report and toolkit.model_card: the files of a run report it, and show nothing private."""

import json
import math
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from huggingface_hub import ModelCard
from matplotlib import image, pyplot
from matplotlib.figure import Figure
from transformers import AutoTokenizer, BertConfig, BertForSequenceClassification, BertTokenizer

import modeling_scratchbert
from support.models import tiny_config
from toolkit import model_card, pictures
from toolkit.confusion_matrix import plot_confusion
from toolkit.metrics import RANGES, main_metrics, metric_range
from toolkit.model_card import public, shown
from toolkit.model_card import write_training_card as write_card
from toolkit.training.checkpoints import Progress
from toolkit.training.report import (
    MOST_PANELS,
    checkpoint_in_words,
    headline,
    plot_curves,
    write_metrics,
)
from toolkit.training.settings import SEQ2SEQ_METRICS, ClassificationSettings

pytestmark = pytest.mark.usefixtures("quiet_only_here")

HISTORY = [
    {"step": 10, "epoch": 0.5, "loss": 0.9, "learning_rate": 2e-5, "tokens_per_second": 1000.0},
    {"step": 20, "epoch": 1.0, "loss": 0.5, "learning_rate": 1e-5, "tokens_per_second": 3000.0},
    {"step": 20, "epoch": 1.0, "validation": {"loss": 0.6, "accuracy": 0.75}},
    {"step": 1500, "epoch": 2.25, "loss": 0.4, "learning_rate": 0.0, "tokens_per_second": 2000.0},
]
CARD = {
    "task": "text-classification",
    "model_class": "ScratchBertForSequenceClassification",
    "base_model": "google-bert/bert-base-uncased",
    "dataset": "stanfordnlp/sst2",
    "dataset_on_hub": True,
    "metrics": {"validation": {"accuracy": 0.91, "f1": 0.9}, "test": {"accuracy": 0.875}},
    "settings": {"learning_rate": 2e-5, "num_train_epochs": 3, "seed": None},
    "history": HISTORY,
}


@pytest.fixture
def card(tmp_path):
    """Writes a card, with these fields changed, and reads it with the Hub's own reader."""

    def make(**fields) -> ModelCard:
        folder = tmp_path / "my-model"
        folder.mkdir(exist_ok=True)
        write_card(folder, **{**CARD, **fields})
        assert [path.name for path in folder.iterdir() if path.name.startswith(".")] == []
        return ModelCard.load(folder / "README.md")

    return make


def rows(text: str, header: str) -> list[list[str]]:
    """The table under this header, as a Markdown reader takes it."""
    lines = text.split(f"| {header} |\n")[1].split("\n\n")[0].strip().split("\n")
    cells = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]
    assert cells[0] == ["---"] * (header.count("|") + 1)
    return cells[1:]


# ------------------------------------------------------------------------------------------------------------- metrics


def test_metrics_are_strict_json_whatever_the_numbers_are_made_of(tmp_path):
    metrics = {
        "accuracy": np.float32(0.5), "count": np.int64(3), "pearson": math.nan, "perplexity": torch.tensor(math.inf),
        "per_class": {"ä": [0.25, np.nan]}, "stopped_early": True,
    }  # fmt: skip
    write_metrics(tmp_path, metrics)
    text = (tmp_path / "metrics.json").read_text(encoding="utf-8")
    assert "ä" in text
    assert json.loads(text, parse_constant=pytest.fail) == {
        "accuracy": 0.5, "count": 3, "pearson": None, "perplexity": None, "per_class": {"ä": [0.25, None]},
        "stopped_early": True,
    }  # fmt: skip


def test_metrics_that_cannot_be_written_leave_the_old_ones(tmp_path):
    write_metrics(tmp_path, {"accuracy": 0.5})
    with pytest.raises(TypeError, match="not JSON serializable"):
        write_metrics(tmp_path, {"accuracy": object()})
    assert json.loads((tmp_path / "metrics.json").read_text()) == {"accuracy": 0.5}
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.json"]


# ---------------------------------------------------------------------------------------------------------- model card


def test_the_metadata_is_what_the_hub_reads(card):
    data = card(language="en", licence="apache-2.0").data.to_dict()
    assert data.pop("model-index") == [
        {
            "name": "my-model",
            "results": [
                {
                    "task": {"type": "text-classification"},
                    "dataset": {"name": "stanfordnlp/sst2", "type": "stanfordnlp/sst2", "split": split},
                    "metrics": metrics,
                }
                for split, metrics in (
                    ("validation", [{"type": "accuracy", "value": 0.91}, {"type": "f1", "value": 0.9}]),
                    ("test", [{"type": "accuracy", "value": 0.875}]),
                )
            ],
        }
    ]
    assert data == {
        "language": "en",
        "license": "apache-2.0",
        "library_name": "transformers",
        "pipeline_tag": "text-classification",
        "tags": ["scratchbert"],
        "base_model": "google-bert/bert-base-uncased",
        "datasets": ["stanfordnlp/sst2"],
        "metrics": ["accuracy", "f1"],
    }


def test_files_and_folders_are_no_hub_ids(card, tmp_path, monkeypatch):
    (tmp_path / "models" / "mine").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    files = ["/home/jane/reviews.csv", "data/private/more.csv"]
    for base in ("models/mine", "./models/mine", "/home/jane/mine", "~/mine"):
        found = card(base_model=base, dataset=files, dataset_on_hub=False)
        assert not {"base_model", "datasets"} & set(found.data.to_dict())
        assert "trained on `reviews.csv, more.csv` from the weights of `mine`" in found.text
        assert found.data.eval_results[0].dataset_type == "reviews.csv, more.csv"
    found = card(dataset="models/mine", dataset_on_hub=True)  # a folder that load_dataset opens
    assert "datasets" not in found.data.to_dict()
    assert "trained on `mine`" in found.text
    assert "from random weights" in card(base_model=None).text


BASE_CARD = """\
---
license: apache-2.0
language:
- en
- no
base_model: google-bert/bert-base-uncased
tags: [exbert]
model-index: broken
---
# Base
"""


@pytest.fixture
def base(tmp_path):
    """A folder of a model with this card."""

    def make(text: str | bytes) -> str:
        folder = tmp_path / "base"
        folder.mkdir(exist_ok=True)
        (folder / "README.md").write_bytes(text if isinstance(text, bytes) else text.encode())
        return str(folder)

    return make


def metadata(found: ModelCard) -> dict:
    names = ("base_model", "license", "license_name", "license_link", "language")
    return {name: value for name, value in found.data.to_dict().items() if name in names}


def test_the_card_of_a_local_base_model_gives_licence_language_and_hub_id(card, base):
    found = card(base_model=base(BASE_CARD))
    assert metadata(found) == {
        "base_model": "google-bert/bert-base-uncased", "license": "apache-2.0", "language": ["en", "no"],
    }  # fmt: skip
    assert (
        "from the weights of `base`, which derives from "
        "[google-bert/bert-base-uncased](https://huggingface.co/google-bert/bert-base-uncased)."
    ) in found.text
    assert found.data.tags == ["scratchbert"]
    given = card(base_model=base(BASE_CARD), licence="mit", language="de")
    assert (given.data.license, given.data.language) == ("mit", "de")


def test_the_card_of_a_base_model_in_the_cache_gives_licence_and_language(card, tmp_path, monkeypatch):
    repository = tmp_path / "hub" / "models--google-bert--bert-base-uncased"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("abc")
    (repository / "snapshots" / "abc").mkdir(parents=True)
    (repository / "snapshots" / "abc" / "README.md").write_text("---\nlicense: mit\nlanguage: en\n---\n")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    expected = {"base_model": "google-bert/bert-base-uncased", "license": "mit", "language": "en"}
    assert metadata(card()) == expected
    assert metadata(card(base_model="google-bert/another")) == {"base_model": "google-bert/another"}


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        ("license: other\nlicense_name: x\nlicense_link: https://host/x",
         {"license": "other", "license_name": "x", "license_link": "https://host/x"}),
        ("license: other\nlicense_name: x\nlicense_link: LICENSE", {"license": "other", "license_name": "x"}),
        ("license: [mit, bsd]\nlicense_name: x\nlanguage: no", {"language": "no"}),
        ("language: {a: b}\nbase_model: {a: b}", {}),
        ("base_model: [user/one]", {"base_model": "user/one"}),
        ("base_model: [user/one, user/two]", {}),
        ("base_model: /home/jane/mine", {}),
        ("base_model: ../mine", {}),
        ("base_model: user/one\nmodel-index:\n- name: user/two\n  results: []", {"base_model": "user/two"}),
        ("base_model: user/one\nmodel-index:\n- name: two\n  results: []", {"base_model": "user/one"}),
        ("- a list", {}),
        ("license: [", {}),
    ],
)  # fmt: skip
def test_of_the_card_of_a_base_model_only_what_the_hub_accepts_is_taken(header, expected, card, base):
    assert metadata(card(base_model=base(f"---\n{header}\n---\n# Base\n"))) == expected


@pytest.mark.parametrize("text", [b"", b"# Base\n", b"---\nlicense: \xff\n---\n"])
def test_a_base_model_without_metadata(text, card, base, capsys):
    assert metadata(card(base_model=base(text))) == {}
    assert capsys.readouterr().err == ""


def test_an_undefined_metric_is_told_and_kept_from_the_hub(card):
    found = card(metrics={"validation": {"accuracy": 0.5, "pearson": math.nan}, "test": {"perplexity": 30522.25}})
    assert rows(found.text, "metric | validation | test") == [
        ["accuracy", "0.5", ""], ["pearson", "undefined", ""], ["perplexity", "", "30,522.2"],
    ]  # fmt: skip
    assert [(result.dataset_split, result.metric_type) for result in found.data.eval_results] == [
        ("validation", "accuracy"), ("test", "perplexity"),
    ]  # fmt: skip
    assert yaml.safe_load(str(found.data))["metrics"] == ["accuracy", "perplexity"]
    for metrics in ({"validation": {"pearson": math.nan}}, {"validation": {}}, {}):
        found = card(metrics=metrics)
        assert not {"model-index", "model_name", "metrics"} & set(found.data.to_dict())
        assert ("## Results" in found.text) == ("pearson" in str(metrics))


def test_a_folder_may_have_another_name_than_the_model(card):
    found = card(name="the-model")
    assert found.text.startswith("\n# the-model\n")
    assert found.data.model_name == "the-model"
    assert '.from_pretrained("the-model"' in found.text


def test_the_card_says_how_long_with_what_and_where(card):
    text = card().text
    assert "1,500 steps, 2.25 epochs" in text
    assert "2,000 non-padding tokens per second" in text
    assert "processes: 1" in text
    assert f"torch {torch.__version__}" in text
    assert rows(text, "setting | value") == [["learning_rate", "2e-05"], ["num_train_epochs", "3"]]
    assert "0 steps" not in card(history=[]).text


def test_the_card_says_which_rows_and_which_step(card):
    text = card(rows={"train": 8066, "validation": 1200}, checkpoint="The weights are those of step 20.").text
    assert "\n- Rows: 8,066 train, 1,200 validation\n" in text
    assert "\n- The weights are those of step 20.\n" in text
    assert "Rows:" not in card().text


def test_only_settings_that_differ_from_their_defaults_are_in_the_card(card):
    settings = {
        "model": "user/base", "learning_rate": 2e-5, "epochs": 3, "labels": ["a"], "output": "/home/jane/out",
        "log_steps": 7, "extra": 0,
    }  # fmt: skip
    defaults = {"model": None, "learning_rate": 5e-5, "epochs": 3, "labels": None, "output": None, "log_steps": 10}
    text = card(settings=settings, defaults=defaults).text
    assert rows(text, "setting | value") == [
        ["model", "user/base"], ["learning_rate", "2e-05"], ["labels", "a"], ["extra", "0"],
    ]  # fmt: skip
    assert "differ from the defaults" in text
    assert "differ from the defaults" not in card(settings=settings).text


@pytest.fixture
def saved(tmp_path):
    """Writes a JSON file beside the card."""

    def write(name: str, **fields) -> None:
        (tmp_path / "my-model").mkdir(exist_ok=True)
        (tmp_path / "my-model" / name).write_text(json.dumps(fields))

    return write


def test_the_names_of_the_labels_are_in_the_card(card, saved):
    saved("config.json", id2label={"0": "neg`", "1": "very\npositive"})
    assert "\n\nLabels: `neg'`, `very positive`\n\n" in card().text
    assert "Labels:" not in card(model_class="ScratchBertForMaskedLM").text  # those of an earlier task
    saved("config.json", id2label={str(i): f"intent {i}" for i in range(52)})
    assert "`intent 49`, and 2 more\n" in card().text
    saved("config.json", id2label={"0": "similarity"}, problem_type="regression")
    assert "Outputs: `similarity`\n" in card().text
    for names in ({"0": "LABEL_0", "1": "LABEL_1"}, {}, None):
        saved("config.json", id2label=names)
        assert "Labels:" not in card().text


def test_only_entities_are_grouped_in_the_example_of_a_tagger(card, saved):
    """`pipeline` would take neighbours with the same tag, such as two nouns, for one."""
    for names, groups in ((["O", "B-PER", "I-PER"], True), (["NOUN", "VERB"], False), (["O", "B-PER", "X"], False)):
        saved("config.json", id2label=dict(enumerate(names)))
        text = card(model_class="ScratchBertForTokenClassification").text
        assert ('aggregation_strategy="first"' in text) == groups
        assert ("ignore_labels=[]" in text) != groups


def test_the_card_says_what_the_model_is_for_and_what_is_not_known(card, saved):
    text = card(settings={"max_length": 128}).text
    assert "It predicts one label for a text" in text
    assert "its inputs had up to 128 tokens" in text
    assert "measured on the validation and test data only" in text
    assert "selected by the validation metrics, which are therefore optimistic. The test data was not used" in text
    assert "The test data was not used" not in card(metrics={"validation": {"accuracy": 1.0}}).text
    assert "optimistic" not in card(metrics={"test": {"accuracy": 1.0}}).text
    assert "It was not evaluated." in card(metrics={}).text
    saved("config.json", problem_type="multi_label_classification")
    assert "It predicts any number of labels" in card().text
    saved("config.json", problem_type="regression")
    assert "It predicts numbers" in card().text
    assert "It tags each word" in card(model_class="ScratchBertForTokenClassification").text


def test_texts_are_generated_with_the_saved_settings(card, saved):
    saved("generation_config.json", num_beams=3, max_new_tokens=64, eos_token_id=3, do_sample=False, _from="x")
    found = card(model_class="ScratchBertForConditionalGeneration")
    assert "settings in `generation_config.json`: num_beams 3, max_new_tokens 64.\n" in found.text
    assert "generate(**inputs)" in found.text
    assert "generation_config" not in card().text


def test_the_pictures_are_shown_where_they_are(card, tmp_path):
    for name in ("curves.png", "confusion_matrix.png"):
        assert name not in card().text
        (tmp_path / "my-model" / name).touch()
        assert f"]({name})" in card().text


def test_no_value_breaks_the_table(card):
    settings = {"separator": "|", "prompt": "two\nlines", "labels": ["a", "b"], "lora": {"rank": 8, "alpha": None}}
    assert rows(card(settings=settings).text, "setting | value") == [
        ["separator", r"\|"], ["prompt", "two lines"], ["labels", "a, b"], ["lora.rank", "8"],
    ]  # fmt: skip


@pytest.mark.parametrize(
    "name", ["hub_token", "token", "HUB_TOKEN", "hubToken", "wandb_api_key", "password", "client-secret", "auth"]
)
def test_settings_named_like_secrets_are_left_out(name, card):
    assert public({name: "x", "inner": {name: "x", "rank": 8}}) == {"inner.rank": 8}
    assert "hunter2" not in str(card(settings={name: "hunter2", "trackers": [{name: "hunter2"}]}))


@pytest.mark.parametrize("value", ["hf_" + "a" * 34, "https://jane:pw@host/x", ["x", "sk-" + "b" * 30]])
def test_values_that_look_like_secrets_are_left_out(value):
    assert public({"harmless": value, "url": "https://host/x"}) == {"url": "https://host/x"}


@pytest.mark.parametrize("name", ["max_tokens", "tokenizer_name", "tokens_per_batch", "monkey", "author"])
def test_settings_that_only_sound_like_secrets_are_shown(name):
    assert public({name: 5}) == {name: 5}


@pytest.mark.parametrize(
    ("value", "seen"),
    [
        ("/home/jane/data/x.csv", "x.csv"), ("/home/Jane Doe/x.csv", "x.csv"), ("~/x.csv", "x.csv"),
        (r"C:\Users\jane\x.csv", "x.csv"), ("file:///home/jane/x.csv", "x.csv"), (Path("/home/jane/out"), "out"),
        ("//home/jane/x.csv", "x.csv"), ("./data/x.csv", "x.csv"), ("../x", "x"), ("/", "/"),
        ("user/model", "user/model"), ("https://host/a/b", "https://host/a/b"), ("a/b/c", "a/b/c"),
        (["/a/x.csv", "y.csv"], "x.csv, y.csv"), ([{"path": "/home/jane/x"}], "path: x"), (3, 3), (False, False),
    ],
)  # fmt: skip
def test_of_paths_the_last_part_is_shown(value, seen):
    assert shown(value) == seen


def test_no_setting_shows_a_path(card, tmp_path, monkeypatch):
    """Paths are recognised by the flag; others by a file or folder of that name."""
    (tmp_path / "private" / "folder").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    settings = {
        "train_file": ["data/private/*.csv", "private/x.csv", r"private\y.csv"], "config_file": "private/tiny.json",
        "output": "private/folder", "model": "private/folder/", "tokenizer": "./private/folder",
        "dataset": "private/*.parquet", "prompt": "private/folder", "dataset_config": "a/b",
    }  # fmt: skip
    found = card(settings=settings, base_model="private/folder", dataset=settings["train_file"], dataset_on_hub=False)
    assert rows(found.text, "setting | value") == [
        ["train_file", r"\*.csv, x.csv, y.csv"], ["config_file", "tiny.json"], ["model", "folder"],
        ["tokenizer", "folder"], ["dataset", r"\*.parquet"], ["prompt", "folder"], ["dataset_config", "a/b"],
    ]  # fmt: skip
    assert "private" not in str(found)
    kept = {"model": "user/model", "tokenizer": "user/tokenizer", "dataset": "user/data"}
    assert public(kept) == kept


def test_long_lists_are_cut(card):
    assert shown([f"{i}.csv" for i in range(51)]).endswith(", 49.csv, and 1 more")
    assert shown([f"{i}.csv" for i in range(50)]).endswith(", 48.csv, 49.csv")


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    """The folder of a tokenizer."""
    folder = tmp_path_factory.mktemp("tokenizer")
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "text", "question", ".", "?"]
    BertTokenizer(vocab={word: i for i, word in enumerate(vocabulary)}).save_pretrained(folder)
    return folder


def run_code(text: str, folder, monkeypatch) -> dict:
    """The names that the card's code leaves, run beside the model's folder."""
    monkeypatch.chdir(folder.parent)
    names = {}
    exec(re.search(r"```python\n(.*?)```", text, flags=re.DOTALL)[1], names)
    return names


@pytest.mark.parametrize("short", sorted(model_card.EXAMPLES))
def test_the_code_of_the_card_runs(short, card, words, tmp_path, monkeypatch, capsys):
    name = f"ScratchBert{short}"
    seq2seq = {"is_encoder_decoder": True, "decoder_start_token_id": 2, "eos_token_id": 3}
    model = getattr(modeling_scratchbert, name)(tiny_config(**seq2seq if short == "ForConditionalGeneration" else {}))
    model.save_pretrained(tmp_path / "my-model")
    AutoTokenizer.from_pretrained(words).save_pretrained(tmp_path / "my-model")
    found = card(model_class=name)
    assert found.text.count('("my-model", trust_remote_code=True)') == 2  # without it, the tokenizer asks as well
    names = run_code(found.text, tmp_path / "my-model", monkeypatch)
    opened = "ForMaskedLM" if short == "ForPreTraining" else short
    assert type(names["model"]).__name__ == f"ScratchBert{opened}"
    ours = model.state_dict()
    assert all(torch.equal(tensor, ours[key]) for key, tensor in names["model"].state_dict().items() if key in ours)
    assert capsys.readouterr().out.strip()


def test_a_reference_needs_no_code_from_the_folder(card, words, tmp_path, monkeypatch):
    fields = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    BertForSequenceClassification(BertConfig(vocab_size=101, **fields)).save_pretrained(tmp_path / "my-model")
    AutoTokenizer.from_pretrained(words).save_pretrained(tmp_path / "my-model")
    found = card(model_class="BertForSequenceClassification")
    assert "trust_remote_code" not in found.text
    assert "ScratchBert" not in found.text
    assert "tags" not in found.data.to_dict()
    names = run_code(found.text, tmp_path / "my-model", monkeypatch)
    assert type(names["model"]) is BertForSequenceClassification


def test_a_class_that_no_script_trains_is_refused(card):
    with pytest.raises(ValueError, match="model_class is ScratchBertModel; expected one of ForSequence"):
        card(model_class="ScratchBertModel")


def test_the_sentence_on_the_delivered_step():
    progress = Progress(step=1500, history=HISTORY)
    expected = "The weights are those of the last step, 1,500, because there was no evaluation before."
    assert checkpoint_in_words(progress, "accuracy") == expected
    progress = Progress(step=1500, history=HISTORY, best_checkpoint="step-00000020-epoch-1", best=0.75)
    expected = "The weights are those of step 20 (epoch 1), which had the best validation accuracy, 0.75."
    assert checkpoint_in_words(progress, "accuracy") == expected
    progress = Progress(step=1500, best_checkpoint="step-00001020", best=math.nan)
    expected = "The weights are those of step 1,020, which had the best validation pearson, undefined."
    assert checkpoint_in_words(progress, "pearson") == expected


# -------------------------------------------------------------------------------------------------------------- curves


@pytest.fixture
def axes(monkeypatch):
    """Returns the axes of the figure that was drawn last."""
    figures, real = [], Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda figure, path: (figures.append(figure), real(figure, path)))
    return lambda: figures[-1].axes


def lines(axis) -> dict[str, list[tuple[float, float]]]:
    return {line.get_label(): [(float(x), float(y)) for x, y in line.get_xydata()] for line in axis.lines}


def titles(axes) -> list[str]:
    return [axis.get_title(loc="left") for axis in axes]


def evaluations(*values: dict) -> list[dict]:
    return [{"step": 10 * i, "epoch": i, "validation": each} for i, each in enumerate(values, 1)]


def test_the_picture_has_both_losses_each_metric_and_in_the_last_panel_the_learning_rate(tmp_path, axes):
    later = {"step": 1500, "epoch": 2.25, "validation": {"loss": 0.55, "accuracy": 0.8, "f1": math.nan}}
    plot_curves(tmp_path / "curves.png", [*HISTORY, later], ["accuracy", "f1", "absent"])
    assert titles(axes()) == ["loss", "accuracy", "f1", "learning rate"]
    loss, accuracy, _, rate = axes()
    assert lines(loss) == {
        "training": [(10, 0.9), (20, 0.5), (1500, 0.4)], "validation": [(20, 0.6), (1500, 0.55)],
    }  # fmt: skip
    assert next(iter(lines(rate).values())) == [(10, 2e-5), (20, 1e-5), (1500, 0)]
    assert next(iter(lines(accuracy).values())) == [(20, 0.75), (1500, 0.8)]
    assert [axis.get_title(loc="right") for axis in axes()] == ["last: 0.55", "last: 0.8", "last: undefined", ""]
    assert [axis.get_xlabel() for axis in axes()] == ["", "", "step", "step"]
    assert len({axis.get_xlim() for axis in axes()}) == 1


@pytest.mark.parametrize("count", range(8))
def test_the_picture_has_two_columns_and_up_to_three_rows(count, tmp_path, axes):
    """The first metrics are drawn; those without a value need no room. No panel is empty."""
    names = [f"metric_{i}" for i in range(count)]
    point = {"step": 10, "epoch": 1.0, "validation": dict.fromkeys(["loss", *names], 0.5)}
    plot_curves(tmp_path / "curves.png", [*HISTORY[:1], point], ["absent", *names])
    expected = ["loss", *names][:MOST_PANELS]
    assert titles(axes()) == expected + ["learning rate"] * (len(expected) % 2)
    assert MOST_PANELS == 6
    places = [axis.get_subplotspec() for axis in axes()]
    assert {(place.rowspan.start, place.colspan.start) for place in places} == {
        (row, column) for row in range(len(places) // 2) for column in range(2)
    }


TYPES = ["DATE", "ORG", "PER", "LOC", "GPE", "TIME", "MONEY", "EVENT", "LAW", "LANGUAGE", "NORP", "PRODUCT"]
ENTITIES = {f"{name}_{measure}": 0.5 for name in TYPES for measure in ("precision", "recall", "f1", "number")}


@pytest.mark.parametrize(
    ("names", "first", "main"),
    [
        (["loss", "precision", "recall", "f1", "accuracy", *ENTITIES], "f1", ["f1", "precision", "recall", "accuracy"]),
        (["loss", "exact_match", "f1", "has_answer_f1", "no_answer_f1", "null_threshold"], "f1", ["f1", "exact_match"]),
        (["rouge1", "loss", "perplexity"], "loss", ["rouge1", "perplexity"]),
        ([], "f1", []),
    ],
)
def test_the_main_metrics_are_of_the_whole_set_the_selecting_one_first(names, first, main):
    assert main_metrics(dict.fromkeys(names, 0.5), first) == main


def test_every_metric_that_can_select_the_best_model_has_a_range():
    required = {"model": "m", "output": "o", "dataset": "d"}
    problems = ("single_label", "multi_label", "regression")
    classification = {name for each in problems for name in ClassificationSettings(**required, problem=each).metrics}
    seq2seq = {value for values in SEQ2SEQ_METRICS.values() for value in values}
    assert classification | seq2seq | {"precision", "recall", "exact_match", "next_sentence_accuracy"} <= RANGES.keys()


@pytest.mark.parametrize(
    ("name", "task", "values", "bounds"),
    [
        ("accuracy", "text-classification", [0.9, 1.0], (0, 1)),
        ("accuracy", "text-classification", [0.0, 0.02], (0, 1)),
        ("rougeLsum", "text2text-generation", [0.01, 0.99], (0, 1)),
        ("matthews_correlation", "text-classification", [-0.99, 0.99], (-1, 1)),
        ("pearson", "text-classification", [0.9], (-1, 1)),
        ("f1", "token-classification", [0.99], (0, 1)),
        ("f1", "question-answering", [50.0, 99.0], (0, 100)),
        ("exact_match", "question-answering", [0.0, 100.0], (0, 100)),
        ("bleu", "text2text-generation", [0.1, 35.0], (0, 100)),
        ("chrf", "text2text-generation", [99.0, math.nan], (0, 100)),
        ("token_error_rate", "text2text-generation", [0.01, 1.7], (0, math.inf)),
        ("item_error_rate", "text2text-generation", [1.0, 0.5], (0, 1)),
        ("perplexity", "fill-mask", [1.5, 12.0], (1, math.inf)),
        ("perplexity", "fill-mask", [30522.0, 12.0], (1, math.inf)),
        ("next_sentence_accuracy", "fill-mask", [0.5, 0.98], (0, 1)),
    ],
)
def test_axes_follow_the_values_within_the_range_of_the_metric(name, task, values, bounds, tmp_path, axes, recwarn):
    assert metric_range(name, task) == bounds
    plot_curves(tmp_path / "curves.png", evaluations(*({"loss": 0.01, name: value} for value in values)), [name], task)
    loss, metric = axes()
    low, high = metric.get_ylim()
    assert bounds[0] <= low < high <= bounds[1]
    assert loss.get_ylim()[0] >= 0
    drawn = [value for value in values if math.isfinite(value)]
    assert low < min(drawn) or low == min(drawn) == bounds[0]
    assert high > max(drawn) or high == max(drawn) == bounds[1]
    assert [str(warning.message) for warning in recwarn] == []


def test_a_small_change_is_seen_and_noise_is_not_magnified(tmp_path, axes):
    values = evaluations({"accuracy": 0.912, "f1": 0.5}, {"accuracy": 0.913, "f1": 0.8})
    plot_curves(tmp_path / "curves.png", values, ["accuracy", "f1"])
    _, accuracy, f1, _ = axes()
    assert np.ptp(accuracy.get_ylim()) == pytest.approx(0.0913)
    assert np.ptp(f1.get_ylim()) == pytest.approx(0.36)


def test_values_on_another_scale_than_expected_are_drawn(tmp_path, axes):
    plot_curves(tmp_path / "curves.png", evaluations({"f1": 93.0}, {"f1": 94.0}), ["f1"])
    low, high = axes()[1].get_ylim()
    assert 80 < low < 93
    assert high > 94


def test_a_perplexity_that_falls_far_is_drawn_on_a_logarithmic_scale(tmp_path, axes):
    names = ["perplexity", "mean_squared_error"]
    plot_curves(tmp_path / "curves.png", evaluations(*(dict.fromkeys(names, value) for value in (3e4, 12.0))), names)
    assert [axis.get_yscale() for axis in axes()[1:3]] == ["log", "linear"]
    plot_curves(tmp_path / "curves.png", evaluations({"perplexity": 30.0}, {"perplexity": 12.0}), names)
    assert axes()[1].get_yscale() == "linear"


def test_the_background_is_white_whatever_the_users_style(tmp_path):
    with pyplot.style.context("dark_background"):
        plot_curves(tmp_path / "curves.png", HISTORY, ["accuracy"])
    pixels = image.imread(tmp_path / "curves.png")
    assert pixels[0, 0].tolist() == pixels[-1, -1].tolist() == [1, 1, 1, 1]
    height, width, _ = pixels.shape
    assert pixels[height // 3, width // 4, :3].min() > 0.8


def test_details_of_each_label_are_not_in_the_headline():
    metrics = {"f1": 0.5, "DATE_precision": 0.1, "DATE_recall": 0.2, "DATE_f1": 0.3, "DATE_number": 4, "precision": 0.6}
    assert headline(metrics) == {"f1": 0.5, "DATE_f1": 0.3, "precision": 0.6}
    assert headline({}) == {}


def test_nothing_of_the_picture_is_cut_off(tmp_path, axes):
    evaluation = {
        "step": 1500,
        "epoch": 3,
        "validation": {"perplexity": 30522.123456, "a_metric_of_a_long_name": -1e-9},
    }
    plot_curves(tmp_path / "curves.png", [*HISTORY, evaluation], ["perplexity", "a_metric_of_a_long_name"])
    figure = axes()[0].figure
    box = figure.get_tightbbox()
    assert min(box.min) >= 0
    assert (box.max <= figure.get_size_inches()).all()


@pytest.mark.parametrize(
    "history",
    [
        [],
        HISTORY[:1],
        HISTORY[:2],
        HISTORY[2:3],
        [{"step": 0, "epoch": 0, "validation": {"loss": 0.0, "accuracy": 0.5}}],
        [{"step": 1, "epoch": 1, "loss": math.nan, "learning_rate": math.inf, "tokens_per_second": 0}],
        [{"step": 1, "epoch": 1, "validation": {"accuracy": math.nan}}],
        [{"step": 1, "epoch": 1, "validation": {"loss": math.inf, "accuracy": -math.inf}}],
        [{"step": 1, "epoch": 1, "loss": 1.0}],
    ],
)
def test_histories_of_little_are_drawn_without_a_warning(history, tmp_path, axes, recwarn):
    plot_curves(tmp_path / "curves.png", history, ["accuracy"])
    assert len(axes()) == 2
    assert image.imread(tmp_path / "curves.png").shape[0] > 400
    assert [str(warning.message) for warning in recwarn] == []
    assert [path.name for path in tmp_path.iterdir()] == ["curves.png"]


def test_many_points_are_smoothed(tmp_path, axes):
    history = [{"step": i, "epoch": 1, "loss": float(i % 2), "learning_rate": 1e-5} for i in range(1, 501)]
    plot_curves(tmp_path / "curves.png", history, [])
    drawn = lines(axes()[0])
    assert [y for _, y in drawn["training"]] == [i % 2 for i in range(1, 501)]
    assert all(0.4 < y < 0.6 for _, y in drawn["training, smoothed"][100:])


def test_without_matplotlib_a_line_says_so_once(tmp_path, monkeypatch, capsys):
    pictures.has_matplotlib.cache_clear()
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    for _ in range(2):
        plot_curves(tmp_path / "curves.png", HISTORY, ["accuracy"])
        plot_confusion(tmp_path / "confusion_matrix.png", ["a", "b"], ["a", "b"], ["a", "a"], "validation")
    pictures.has_matplotlib.cache_clear()
    assert capsys.readouterr().err.count("matplotlib is not installed") == 1
    assert list(tmp_path.iterdir()) == []


# ---------------------------------------------------------------------------------------------------- confusion matrix


@pytest.fixture
def confusion(tmp_path, axes):
    """Draws a confusion matrix, and returns its axes."""

    def draw(labels, references, predictions, title="validation"):
        plot_confusion(tmp_path / "confusion_matrix.png", labels, references, predictions, title)
        assert [path.name for path in tmp_path.iterdir()] == ["confusion_matrix.png"]
        return axes()[0]

    return draw


def test_rows_of_a_confusion_matrix_are_the_true_labels(confusion):
    """Colours are shares of the row; a label that never occurs has none."""
    axis = confusion(["no", "yes", "maybe"], ["no"] * 4 + ["yes"], ["no"] * 3 + ["yes", "maybe"])
    assert axis.images[0].get_array().tolist() == [[0.75, 0.25, 0], [0, 0, 1], [0, 0, 0]]
    assert axis.images[0].get_clim() == (0, 1)
    assert [text.get_text() for text in axis.texts] == ["3", "1", "0", "0", "0", "1", "0", "0", "0"]
    for labels in (axis.get_yticklabels(), axis.get_xticklabels()):
        assert [label.get_text() for label in labels] == ["no", "yes", "maybe"]
    assert (axis.get_ylabel(), axis.get_xlabel(), axis.get_title("left")) == (
        "True label", "Predicted label", "validation",
    )  # fmt: skip


@pytest.mark.parametrize(("count", "written"), [(15, 225), (16, 0), (60, 0)])
def test_counts_are_written_for_few_labels(count, written, confusion, recwarn):
    labels = [f"label {i}" for i in range(count)]
    axis = confusion(labels, labels, labels[:1] * count)
    assert (len(axis.texts), len(axis.get_yticklabels()), len(recwarn)) == (written, count, 0)


@pytest.mark.parametrize(("count", "items"), [(61, 1), (2, 0), (0, 0)])
def test_no_confusion_matrix_of_many_labels_or_of_no_items(count, items, tmp_path):
    plot_confusion(tmp_path / "confusion_matrix.png", [f"{i}" for i in range(count)], ["0"] * items, ["0"] * items, "")
    assert list(tmp_path.iterdir()) == []


def test_long_labels_are_shortened_in_the_middle_and_no_formula(confusion, recwarn):
    labels = ["customer_service_complaint_1", "customer_service_complaint_2", "$x^2$ \n y", "日本"]
    axis = confusion(labels, labels, labels, title="$validation$")
    assert [label.get_text() for label in axis.get_yticklabels()] == [
        "customer_s…mplaint_1", "customer_s…mplaint_2", r"\$x^2\$ y", "日本",
    ]  # fmt: skip
    assert len(recwarn) == 0


def test_a_confusion_matrix_is_drawn_on_white(tmp_path):
    with pyplot.style.context("dark_background"):
        plot_confusion(tmp_path / "x.png", ["a", "b"], ["a", "b"], ["a", "b"], "validation")
    pixels = image.imread(tmp_path / "x.png")
    assert pixels[0, 0].tolist() == pixels[-1, -1].tolist() == [1, 1, 1, 1]
