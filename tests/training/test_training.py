"""The loop that the training scripts share, its settings and its optimizer, through finetune_classification."""

import csv
import dataclasses
import itertools
import json
import math
import multiprocessing
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections import namedtuple
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from accelerate import DistributedType
from accelerate.state import AcceleratorState, GradientState, PartialState
from datasets import arrow_dataset
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.fsdp import StateDictType
from transformers import AutoModelForSequenceClassification, AutoTokenizer, BertTokenizer

import finetune_classification
import train
from modeling_scratchbert import ScratchBertForSequenceClassification, ScratchBertModel
from support.comparison import assert_same_gradients
from support.finetuning import assert_one_line, read_settings
from support.folders import DATA, ROOT
from support.models import randomise, tiny_config
from toolkit import publish
from toolkit.files import find_shipped
from toolkit.finetuning import loop as training
from toolkit.finetuning import run as run_module
from toolkit.finetuning.checkpoints import Checkpoints, checksums
from toolkit.finetuning.classification import CLASSES, Classification
from toolkit.finetuning.optimizer import make_schedule, parameter_groups
from toolkit.finetuning.output import OutputFolder
from toolkit.finetuning.recipes import changed_flags, recipe_arguments, recipe_of
from toolkit.finetuning.run import check_services, check_sources, launched_process, make_accelerator
from toolkit.finetuning.settings import SCHEDULES, training_flag
from toolkit.finetuning.task import Evaluation
from toolkit.finetuning.task_settings import ClassificationSettings, PretrainingSettings, Seq2SeqSettings

REVIEWS = DATA / "movie_reviews.csv"

pytestmark = pytest.mark.usefixtures("quiet_only_here")


def forget() -> None:
    """Accelerate keeps the state of the first Accelerator of a process for all that come."""
    for state in (AcceleratorState, PartialState, GradientState):
        state._reset_state()


@pytest.fixture(autouse=True)
def alone():
    forget()
    yield
    forget()


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory) -> dict[str, Path]:
    """A tiny model with a tokenizer that spells, as ScratchBert and as BERT."""
    letters = "abcdefghijklmnopqrstuvwxyz0123456789"
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *letters, *(f"##{letter}" for letter in letters), *".,!?'-"]
    tokenizer = BertTokenizer(vocab={word: i for i, word in enumerate(words)})
    model = randomise(ScratchBertModel(tiny_config(vocab_size=101, intermediate_size=64)))
    found = {name: tmp_path_factory.mktemp(name) for name in ("scratchbert", "bert")}
    model.save_pretrained(found["scratchbert"])
    model.save_as_bert(found["bert"])
    for folder in found.values():
        tokenizer.save_pretrained(folder)
    return found


@pytest.fixture
def arguments(checkpoints, tmp_path):
    """The command line of a run: 64 reviews, two epochs of four updates."""

    def make(output="run", **flags) -> list[str]:
        flags = {
            "model": checkpoints["scratchbert"],
            "output": tmp_path / output,
            "train_file": REVIEWS,
            "max_length": 24,
            "validation_file": REVIEWS,
            "batch_size": 16,
            "epochs": 2,
            "learning_rate": 1e-3,
            "log_steps": 1,
            "trackers": "none",
            **flags,
        }
        return [f"--{name}={value}" for name, value in flags.items() if value is not None]

    return make


@pytest.fixture
def make_training(arguments, tmp_path):
    """Makes a `Training` that has not begun."""

    def make(task_class=Classification, **flags):
        settings = read_settings(ClassificationSettings, arguments(**flags))
        OutputFolder(settings).prepare()
        return training.Training(task_class(settings, make_accelerator(settings)), Path(settings.output))

    return make


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(Path(folder) / "model.safetensors")


def assert_same_run(folder: Path, other: Path) -> None:
    """The same weights, bit for bit, and the same curve."""
    own, expected = weights(folder), weights(other)
    assert own.keys() == expected.keys()
    assert [name for name in own if not torch.equal(own[name], expected[name])] == []
    for which in ("history", "validation"):
        own, expected = (json.loads((each / "metrics.json").read_text())[which] for each in (folder, other))
        times = [point.pop("tokens_per_second", None) for point in [*own, *expected] if isinstance(point, dict)]
        assert own == expected, times


# ------------------------------------------------------------------------------------------------------------ settings


def test_a_recipe_and_what_the_command_line_says_instead(tmp_path, monkeypatch):
    here = Path.cwd()
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        "model: a\noutput: b\ntrain_file: [x.csv, y.csv]\nbatch_size: 4\nlearning_rate: 1e-4\nresume: true\nseed: 3\n"
        "freeze: null\n"
    )
    settings = read_settings(ClassificationSettings, [str(recipe), "--batch_size", "8", "--problem", "regression"])
    assert (settings.train_file, settings.batch_size, settings.seed) == (["x.csv", "y.csv"], 8, 3)
    assert (settings.learning_rate, settings.resume, settings.freeze) == (1e-4, True, None)
    assert settings.problem == "regression"
    # The recipe that a run saves is the same run from any folder.
    recipe.write_text(recipe_of(settings))
    monkeypatch.chdir(tmp_path)
    again = read_settings(ClassificationSettings, [str(recipe)])
    paths = {"train_file": [str(here / name) for name in ("x.csv", "y.csv")], "output": str(here / "b")}
    assert again == dataclasses.replace(settings, **paths, resume=False)


def test_files_of_a_recipe_are_relative_to_it_if_they_begin_with_a_dot(tmp_path):
    recipe = tmp_path / "recipes" / "recipe.yaml"
    recipe.parent.mkdir()
    recipe.write_text("model: ../bert\noutput: out\ntrain_file: [../data/x.csv, ./y.csv, z.csv]\n")
    (tmp_path / "bert").mkdir()
    settings = read_settings(ClassificationSettings, [str(recipe)])
    assert settings.model == str(tmp_path / "bert")
    assert settings.train_file == [str(tmp_path / "data" / "x.csv"), str(tmp_path / "recipes" / "y.csv"), "z.csv"]
    assert settings.output == "out"


@pytest.mark.parametrize(
    "path", sorted((ROOT / "configuration" / "recipes").glob("*.yaml")), ids=lambda path: path.stem
)
def test_shipped_recipes_find_their_files_from_any_folder(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    known = {field.name for cls in (Seq2SeqSettings, PretrainingSettings) for field in dataclasses.fields(cls)}
    recipe = find_shipped(f"configuration/recipes/{path.name}")
    is_of_train = path.stem.startswith("train_")
    arguments = train.recipe_arguments(recipe) if is_of_train else recipe_arguments(recipe, known | {"stride"})
    files = [argument.partition("=")[2] or argument for argument in arguments if argument.endswith((".csv", ".jsonl"))]
    files += [
        argument.partition("=")[2]
        for argument in arguments
        if argument.startswith(("--config_file=", "--config_name="))
    ]
    made = [file for file in files if not file.startswith("cmudict/")]  # the user's, in the working directory
    assert made
    assert all(Path(file).is_absolute() and Path(file).is_file() for file in made)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"batch_size": 0}, "--batch_size is 0; expected 1 or more"),
        ({"batch_size": "many"}, "argument --batch_size"),
        ({"learning_rate": -1}, "--learning_rate is -1.0; expected 0 or more"),
        ({"layer_decay": 2}, "--layer_decay is 2.0; expected"),
        ({"no_such_flag": 1}, "--no_such_flag"),
        ({"model": None}, "--model is missing"),
        ({"train_file": None, "validation_file": None}, "--train_file or --dataset is missing"),
        ({"dataset": "imdb"}, "--dataset are both given"),
        ({"train_file": "nowhere.csv"}, "nowhere.csv: there is no such file"),
        ({"train_file": "data.xls"}, "unknown ending '.xls'"),
        ({"model": "/no/such/model"}, "--model /no/such/model: there is no such folder"),
        ({"output": os.devnull}, "is a file; expected a folder"),
        ({"output": f"{os.devnull}/run"}, f"{os.devnull} is a file; expected a folder"),
        ({"freeze": "3"}, "--freeze is 3; expected embeddings, encoder, or a number of blocks, at most 2"),
        ({"schedule": "steep"}, "steep"),
        ({"schedule": "reduce_lr_on_plateau"}, "argument --schedule: invalid choice"),
        (
            {"text_column": "words"},
            "no column 'words' for the text (--text_column); the columns are 'text', 'label', 'rating'",
        ),
        ({"label_smoothing": 1}, "--label_smoothing is 1.0"),
        ({"metric": "elegance"}, "--metric is elegance; expected one of accuracy, f1, matthews_correlation"),
        ({"trackers": "nobody"}, "nobody"),
        ({"push_to_hub": "reviews"}, "--push_to_hub is reviews; expected user/name"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(flags, message, arguments, capsys):
    assert_one_line(lambda: finetune_classification.main(arguments(**flags)), message, capsys)


def test_bert_does_not_open_a_scratchbert(arguments, checkpoints, tmp_path, capsys):
    """It would have random weights: the tensors have other names."""
    flags = {"model": checkpoints["scratchbert"], "implementation": "bert"}
    assert_one_line(lambda: finetune_classification.main(arguments(**flags)), "--implementation bert", capsys)
    assert list(tmp_path.iterdir()) == []
    for model, implementation in (("bert", "bert"), ("bert", "scratchbert"), ("scratchbert", "scratchbert")):
        argv = arguments(model=checkpoints[model], implementation=implementation)
        check_sources(read_settings(ClassificationSettings, argv))


@pytest.mark.parametrize("implementation", ["scratchbert", "bert"])
@pytest.mark.parametrize("harm", [lambda content: content[:1000], lambda content: b"", lambda content: b"x" * 1000])
def test_a_corrupt_model(implementation, harm, arguments, checkpoints, tmp_path, capsys):
    shutil.copytree(checkpoints["bert"], tmp_path / "model")
    weights = tmp_path / "model" / "model.safetensors"
    weights.write_bytes(harm(weights.read_bytes()))
    argv = arguments(model=tmp_path / "model", implementation=implementation)
    assert_one_line(
        lambda: finetune_classification.main(argv), "is truncated, corrupt or not a file of weights", capsys
    )


def test_a_library_that_is_missing():
    """In a process that has not imported it."""
    command = "import sys; sys.modules['accelerate'] = None; sys.path.insert(0, 'scripts'); import finetune_seq2seq; "
    command += "sys.exit(finetune_seq2seq.main(['--model=a', '--output=b', '--train_file=c.csv']))"
    done = subprocess.run([sys.executable, "-c", command], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == 'finetune_seq2seq.py: accelerate is not installed; pip install "scratchbert[train]"\n'


@pytest.mark.parametrize("text", ["batch_sise: 3", "- a list", "a: [", None])
def test_recipes_that_are_none(text, tmp_path, capsys):
    recipe = tmp_path / "recipe.yaml"
    if text is not None:
        recipe.write_text(text)
    with pytest.raises(SystemExit) as exit:
        read_settings(ClassificationSettings, [str(recipe)])
    line = capsys.readouterr().err
    assert exit.value.code == 2
    assert str(recipe) in line
    assert line.count("\n") == 1


# ----------------------------------------------------------------------------------------------------------- optimizer


@pytest.mark.parametrize("implementation", ["scratchbert", "bert"])
def test_learning_rates_fall_with_the_depth(implementation, checkpoints):
    model = CLASSES[implementation].from_pretrained(checkpoints[implementation])
    rate = {}
    for group in parameter_groups(model, learning_rate=1.0, weight_decay=0.01, layer_decay=0.5):
        rate |= {id(parameter): (group["lr"], group["weight_decay"]) for parameter in group["params"]}
    assert len(rate) == len(list(model.parameters()))
    base = model.base_model
    blocks = base.encoder.blocks if implementation == "scratchbert" else base.encoder.layer
    modules = [(model.classifier, 1), (base.pooler, 1), (blocks[1], 0.5), (blocks[0], 0.25), (base.embeddings, 0.125)]
    for module, expected in modules:
        for part in module.modules():
            for name, parameter in part.named_parameters(recurse=False):
                decays = name != "bias" and not isinstance(part, nn.LayerNorm)
                assert rate[id(parameter)] == (expected, 0.01 if decays else 0.0)


@pytest.mark.parametrize(
    ("what", "trained"),
    [
        ("embeddings", {"encoder", "pooler", "classifier"}),
        ("0", {"encoder", "pooler", "classifier"}),
        ("1", {"blocks.1", "pooler", "classifier"}),
        ("2", {"pooler", "classifier"}),
        ("encoder", {"classifier"}),
    ],
)
def test_what_is_frozen_stays(what, trained, make_training):
    run = make_training(freeze=what, max_steps=2)
    before = {name: value.clone() for name, value in run.model.state_dict().items()}
    run.train()
    changed = {name for name, value in run.model.state_dict().items() if not torch.equal(value, before[name])}
    expected = {name for name in before if any(part in name for part in trained)}
    # A key's bias has no gradient: the softmax does not see it. In the classifier of two batches all others have.
    assert {name for name in expected - changed if "key.bias" not in name} == set()
    assert changed <= expected


@pytest.mark.parametrize("implementation", ["scratchbert", "bert"])
@pytest.mark.parametrize("flags", [{"freeze": "encoder"}, {"lora_rank": 2}], ids=["frozen", "adapted"])
def test_a_pooler_that_the_checkpoint_lacks_is_trained(flags, implementation, checkpoints, make_training, tmp_path):
    if "lora_rank" in flags:
        pytest.importorskip("peft", reason="PEFT is not installed")
    model = tmp_path / "without-pooler"
    shutil.copytree(checkpoints[implementation], model)
    tensors = {name: value for name, value in weights(model).items() if "pooler" not in name}
    save_file(tensors, model / "model.safetensors", {"format": "pt"})
    run = make_training(model=model, implementation=implementation, max_steps=2, **flags)
    before = {name: value.clone() for name, value in run.model.state_dict().items()}
    run.train()
    changed = {name for name, value in run.model.state_dict().items() if not torch.equal(value, before[name])}
    assert {name for name in before if "pooler" in name} <= changed
    assert not [name for name in changed if not any(part in name for part in ("pooler", "classifier", "lora"))]


def test_adapters_are_merged_into_a_model_of_its_own_kind(arguments, checkpoints, tmp_path):
    pytest.importorskip("peft", reason="PEFT is not installed")
    assert finetune_classification.main(arguments(lora_rank=4, learning_rate=1e-2)) == 0
    model = ScratchBertForSequenceClassification.from_pretrained(tmp_path / "run")
    start = ScratchBertForSequenceClassification.from_pretrained(checkpoints["scratchbert"]).state_dict()
    changed = {name for name, value in model.state_dict().items() if not torch.equal(value, start[name])}
    expected = {f"model.encoder.blocks.{i}.attention.{name}.weight" for i in (0, 1) for name in ("query", "value")}
    assert changed == expected | {"classifier.weight", "classifier.bias"}
    # What was evaluated before they were merged is what the merged one gives.
    report = json.loads((tmp_path / "run" / "metrics.json").read_text())
    assert report["validation"]["accuracy"] == accuracy(tmp_path / "run")


def accuracy(folder: Path) -> float:
    """Of a saved model on the reviews, by nothing of ours but the model."""
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    with REVIEWS.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    inputs = tokenizer([row["text"] for row in rows], truncation=True, max_length=24, padding=True, return_tensors="pt")
    with torch.no_grad():
        predicted = model(**inputs).logits.argmax(-1).tolist()
    right = [model.config.id2label[label] == row["label"] for label, row in zip(predicted, rows, strict=True)]
    return sum(right) / len(rows)


# ----------------------------------------------------------------------------------------------------------- gradients


def gradients_of_first_update(run) -> dict[str, torch.Tensor]:
    found = {}
    run.step = lambda group: found.update({name: each.grad.clone() for name, each in run.model.named_parameters()})
    run.settings.max_steps = 1
    run.model.eval()  # without dropout
    group = next(run.groups())
    run.update(group)
    return found


@pytest.mark.parametrize("flatten", [False, True], ids=["padded", "flattened"])
def test_accumulated_batches_are_one_large_batch(flatten, make_training):
    """With weights, rows of one label count more than those of the other: batches have unequal counts."""
    common = {"class_weights": "balanced", "padding_free_collation": flatten, "train_file": REVIEWS}
    large = make_training(output="large", batch_size=64, **common)
    expected = gradients_of_first_update(large)
    forget()
    small = make_training(output="small", batch_size=24, gradient_accumulation_steps=3, **common)
    assert [len(rows) for rows, _ in next(small.groups())] == [24, 24, 16]
    found = gradients_of_first_update(small)
    assert_same_gradients(found, expected)


def test_the_loss_is_torchs_mean(make_training):
    run = make_training(class_weights="balanced", label_smoothing=0.2, batch_size=64)
    ((_, batch),) = next(run.groups())
    run.model.eval()
    loss = run.task.losses(run.model, batch) / run.task.counts(batch)
    logits = run.model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    counts = torch.bincount(batch["labels"])
    balanced = 64 / (2 * counts.float())
    # torch divides a weighted loss by the weights of the rows, smoothed or not.
    expected = nn.functional.cross_entropy(logits, batch["labels"], balanced, label_smoothing=0.2)
    assert torch.allclose(loss, expected)


# ------------------------------------------------------------------------------------------------- a run, start to end


def test_what_a_run_leaves(arguments, tmp_path):
    assert finetune_classification.main(arguments(test_file=REVIEWS, trackers="tensorboard", epochs=3)) == 0
    folder = tmp_path / "run"
    report = json.loads((folder / "metrics.json").read_text())
    assert report["steps"] == 12
    assert report["epochs"] == 3
    losses = [point["loss"] for point in report["history"] if "loss" in point]
    assert len(losses) == 12
    assert losses[-1] < losses[0]
    evaluations = [point["validation"]["accuracy"] for point in report["history"] if "validation" in point]
    assert len(evaluations) == 3
    # The model that is left is the best one, and what is said of it is so.
    assert report["validation"]["accuracy"] == report["test"]["accuracy"] == max(evaluations) == accuracy(folder)
    names = {path.name for path in folder.iterdir()}
    assert {"README.md", "config.json", "model.safetensors", "tokenizer.json", "curves.png", "recipe.yaml"} <= names
    assert {"modeling_scratchbert.py", "checkpoints", "logs"} <= names
    assert not [name for name in names if name.startswith(".")]
    assert list((folder / "logs").rglob("events.*"))
    assert len(list((folder / "checkpoints").iterdir())) in (2, 3)  # the last two, and the best if it is neither
    settings = yaml.safe_load((folder / "recipe.yaml").read_text())
    assert settings["learning_rate"] == 1e-3


def test_a_run_ends_with_the_results(make_training, tmp_path, monkeypatch, capsys):
    run = make_training(test_file=REVIEWS)
    results = {
        "validation": {"loss": 0.25, "f1": 0.7, "accuracy": 0.75, "good_precision": 1.0, "good_f1": 0.9},
        "test": {"loss": 0.5, "f1": 0.6, "accuracy": 0.625, "good_precision": 0.0, "good_f1": 0.0},
    }
    drawn = []
    monkeypatch.setattr(run.task, "evaluate", lambda model, split: Evaluation(results[split], []))
    monkeypatch.setattr(training, "plot_curves", lambda path, history, *names: drawn.extend(names))
    run.finish()
    said = capsys.readouterr().out.splitlines()
    assert "validation: loss 0.2500, f1 0.7000, accuracy 0.7500, good_f1 0.9000" in said
    assert "test: loss 0.5000, f1 0.6000, accuracy 0.6250, good_f1 0.0000" in said
    assert drawn == [["accuracy", "f1"], "text-classification"]
    report = json.loads((tmp_path / "run" / "metrics.json").read_text())
    assert {split: report[split] for split in results} == results
    card = (tmp_path / "run" / "README.md").read_text()
    number = len(run.task.train_set)
    assert f"- Rows: {number} train, {number} validation, {number} test\n" in card
    assert "- The weights are those of the last step, 0, because" in card
    assert "| train_file | " in card
    assert "| weight_decay | " not in card  # the default
    assert str(tmp_path) not in card


def test_both_implementations_make_the_same_of_the_same(checkpoints, make_training, tmp_path):
    """The reference, from the same weights, has the same losses step by step."""
    curves = {}
    for name, source in checkpoints.items():
        model = tmp_path / f"{name}-without-dropout"
        shutil.copytree(source, model)
        config = json.loads((model / "config.json").read_text())
        config |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        (model / "config.json").write_text(json.dumps(config))
        run = make_training(output=name, model=model, implementation=name, max_steps=6)
        run.model.classifier.weight.data.normal_(0, 0.1, generator=torch.Generator().manual_seed(1))
        run.train()
        curves[name] = [point["loss"] for point in run.progress.history if "loss" in point]
        forget()
    assert len(curves["bert"]) == 6
    assert curves["scratchbert"] == pytest.approx(curves["bert"], abs=1e-5)


def test_early_stopping(make_training, monkeypatch):
    run = make_training(epochs=20, early_stopping=3)
    values = iter([(0.5, 0.4), (0.55, 0.4), (0.5, 0.4), (0.6, 0.4), (0.6, 0.3), (0.55, 0.2), (0.6, 0.35), (0.9, 0.1)])
    monkeypatch.setattr(
        run.task, "evaluate", lambda *_: Evaluation(dict(zip(("accuracy", "loss"), next(values), strict=True)), [])
    )
    run.train()
    assert run.progress.epoch == 7  # three after the fourth, whose accuracy none exceeds
    assert run.progress.best == 0.6
    assert run.progress.best_checkpoint == "step-00000020-epoch-5"  # of equal ones that with the lowest loss
    assert [path.name for path in run.checkpoints.complete()] == [
        "step-00000020-epoch-5",
        "step-00000024-epoch-6",
        "step-00000028-epoch-7",
    ]


@pytest.mark.parametrize(
    ("metric", "values", "best"),
    [
        ("accuracy", [(0.9, 0.1), (1.0, 0.5), (1.0, 0.3), (1.0, 0.4), (0.8, 0.2)], 3),
        ("accuracy", [(math.nan, 0.5), (0.2, 0.5), (math.nan, 0.1), (0.1, 0.1), (0.2, math.nan)], 2),
        ("loss", [(0, 0.5), (0, 0.4), (0, 0.4), (0, math.nan), (0, 0.6)], 2),
    ],
)
def test_of_equal_checkpoints_the_one_with_the_lowest_loss_is_the_best(
    metric, values, best, make_training, monkeypatch
):
    run = make_training(epochs=5, save_steps=1)
    run.task.metric, run.task.greater_is_better = metric, metric == "accuracy"
    found = iter(values)
    monkeypatch.setattr(
        run.task,
        "evaluate",
        lambda *_: Evaluation(dict(zip(("accuracy", "loss"), next(found), strict=True)), []),
    )
    run.train()
    assert run.progress.best_checkpoint == f"step-{4 * best:08d}-epoch-{best}"
    assert (run.progress.best, run.progress.best_loss) == (values[best - 1][metric == "loss"], values[best - 1][1])
    # As the next process reads it.
    read = run.checkpoints.load(run.checkpoints.complete()[-1])
    assert (read.best_checkpoint, read.best_loss) == (run.progress.best_checkpoint, run.progress.best_loss)


def test_a_loss_that_is_no_number_stops_the_run(arguments, tmp_path, capsys):
    assert (
        finetune_classification.main(arguments(learning_rate=1e30, max_grad_norm=0, save_steps=1, warmup_ratio=0)) == 1
    )
    line = capsys.readouterr().err.splitlines()[-1]
    assert "the loss is nan at step 2, batch 2 of epoch 1: movie_reviews.csv, row " in line
    assert line.endswith("may help.")
    # What was saved is from before, and not one weight more.
    assert [path.name for path in (tmp_path / "run" / "checkpoints").glob("step*")] == ["step-00000001"]
    assert not (tmp_path / "run" / "model.safetensors").exists()


def test_what_is_pushed(arguments, tmp_path, monkeypatch, capsys):
    """All that belongs to the model, and neither checkpoints nor logs; and a push that fails leaves it where it is."""
    flags = {"push_to_hub": "me/reviews", "hub_private": True, "max_steps": 1, "trackers": "tensorboard"}
    monkeypatch.setattr(run_module, "get_token", lambda: None)
    assert finetune_classification.main(arguments(**flags)) == 2
    assert "--push_to_hub is given and there is no token" in capsys.readouterr().err
    assert not (tmp_path / "run" / "model.safetensors").exists()
    calls = []

    def push(listing, repo, private):
        calls.append((set(listing.files), repo, private))
        if len(calls) == 2:
            raise ConnectionError("the line is dead")
        return "https://huggingface.co/me/reviews", True

    monkeypatch.setattr(run_module, "get_token", lambda: "hf_x")
    monkeypatch.setattr(publish, "push", push)
    assert finetune_classification.main(arguments("pushed", **flags)) == 0
    files, *others = calls[0]
    assert others == ["me/reviews", True]
    written = {path.name for path in (tmp_path / "pushed").iterdir() if path.is_file()}
    assert files == written - {"predictions_validation.jsonl"}  # which has the rows of the data
    assert {"model.safetensors", "README.md", "metrics.json", "modeling_scratchbert.py"} <= files
    assert "pushed to https://huggingface.co/me/reviews" in capsys.readouterr().out
    assert finetune_classification.main(arguments("pushed", **flags, resume=True)) == 2
    assert "was not pushed: the line is dead. push_to_hub.py pushes it" in capsys.readouterr().err
    assert (tmp_path / "pushed" / "model.safetensors").exists()


def test_nothing_is_pushed_offline(arguments, offline, tmp_path, capsys):
    argv = arguments(push_to_hub="me/reviews", max_steps=1)
    assert_one_line(
        lambda: finetune_classification.main(argv), "--push_to_hub is me/reviews and HF_HUB_OFFLINE", capsys
    )
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("name", "message"), [("tensorboard", 'pip install "scratchbert[train]"'), ("wandb", "pip install wandb")]
)
def test_a_tracker_that_is_not_installed(name, message, arguments, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(run_module, "get_available_trackers", list)
    argv = arguments(trackers=name, max_steps=1)
    assert_one_line(lambda: finetune_classification.main(argv), message, capsys)
    assert not (tmp_path / "run").exists()
    for accepted in ("all", "none"):
        check_services(read_settings(ClassificationSettings, arguments(trackers=accepted)))


# --------------------------------------------------------------------------------------------------------------- files


def test_folders_that_are_not_written_over(arguments, tmp_path, capsys):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.tex").write_text("mine")
    assert finetune_classification.main(arguments()) == 2
    assert "is not empty; expected a new folder, or --resume" in capsys.readouterr().err
    assert finetune_classification.main(arguments(resume=True)) == 2
    assert "holds no run; recipe.yaml is missing there" in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["thesis.tex"]


TORCHRUN = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
OPEN_MPI = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, (0, 1)),
        ({"RANK": "1"}, (0, 1)),
        ({"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "host", "MASTER_PORT": "1"}, (0, 1)),
        ({"LOCAL_RANK": "-1"}, (0, 1)),
        (TORCHRUN, (1, 2)),
        ({**TORCHRUN, "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}, (0, 1)),
        ({"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_LOCAL_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"}, (0, 1)),
        ({**OPEN_MPI, "MASTER_ADDR": "host", "MASTER_PORT": "1"}, (1, 2)),
        ({"PMI_RANK": "3", "MPI_LOCALRANKID": "1", "PMI_SIZE": "4", "MASTER_ADDR": "host", "MASTER_PORT": "1"}, (3, 4)),
        ({"RANK": "abc"}, "RANK is 'abc'"),
        ({"RANK": ""}, "RANK is ''"),
        ({**TORCHRUN, "MASTER_PORT": "http"}, "MASTER_PORT is 'http'"),
        ({"OMPI_COMM_WORLD_SIZE": "two"}, "OMPI_COMM_WORLD_SIZE is 'two'"),
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE is 2 without RANK, LOCAL_RANK, MASTER_PORT, MASTER_ADDR"),
        ({"LOCAL_RANK": "0"}, "LOCAL_RANK is 0 without RANK, WORLD_SIZE, MASTER_PORT, MASTER_ADDR"),
        (OPEN_MPI, "OMPI_COMM_WORLD_SIZE is 2 without MASTER_PORT, MASTER_ADDR"),
        ({**TORCHRUN, "RANK": "2"}, "RANK is 2"),
    ],
    ids=str,
)
def test_the_process_that_a_launcher_declares(environment, expected, monkeypatch):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    if isinstance(expected, tuple):
        assert launched_process() == expected
    else:
        with pytest.raises(ValueError, match=expected):
            launched_process()


@pytest.mark.parametrize(("rank", "message"), [("1", "--output"), ("abc", "RANK is 'abc'")])
def test_a_rank_alone_switches_no_check_off(rank, message, arguments, tmp_path, monkeypatch, capsys):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "README.md").write_text("mine")
    monkeypatch.setenv("RANK", rank)
    assert_one_line(lambda: finetune_classification.main(arguments(max_steps=1)), message, capsys)
    assert [path.read_text() for path in (tmp_path / "run").iterdir()] == ["mine"]


def test_a_run_is_continued_with_its_own_flags_alone(arguments, capsys, tmp_path):
    assert finetune_classification.main(arguments(max_steps=1)) == 0
    assert finetune_classification.main(arguments(max_steps=1, resume=True, learning_rate=1.0, seed=4)) == 2
    assert "--learning_rate was 0.001 and is 1.0, --seed was 0 and is 4" in capsys.readouterr().err
    # One that has ended ends again, with the same.
    before = weights(tmp_path / "run")
    assert finetune_classification.main(arguments(max_steps=1, resume=True, keep_checkpoints=5)) == 0
    assert all(torch.equal(value, before[name]) for name, value in weights(tmp_path / "run").items())


def test_a_full_disk_is_found_before_the_training(arguments, capsys, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10, 10, 2**20))
    monkeypatch.setattr(training.Training, "train", lambda self: pytest.fail("training began"))
    assert finetune_classification.main(arguments(keep_checkpoints=50)) == 2
    assert (
        "a disk with 1.00 MiB free; expected 13.69 MiB, which the run may need. A smaller --keep_checkpoints than 50"
        in (capsys.readouterr().err)
    )


def test_a_checkpoint_that_breaks_off_is_none(make_training, monkeypatch):
    run = make_training(save_steps=1, max_steps=3)
    save = run.accelerator.save_state

    def fail_at_two(folder):
        save(folder)
        if run.progress.step == 2:
            raise OSError("No space left on device")

    monkeypatch.setattr(run.accelerator, "save_state", fail_at_two)
    with pytest.raises(OSError, match="No space left"):
        run.train()
    assert [path.name for path in run.checkpoints.complete()] == ["step-00000001"]
    run.checkpoints.discard_unfinished()
    assert [path.name for path in run.checkpoints.folder.iterdir()] == ["step-00000001"]


# ---------------------------------------------------------------------------------------------------------- preparation


def test_no_function_is_hashed(arguments, monkeypatch):
    """`datasets` ignores all exceptions while it hashes one, a KeyboardInterrupt included."""
    monkeypatch.setattr(arrow_dataset, "update_fingerprint", lambda *arguments: pytest.fail("a function is hashed"))
    assert finetune_classification.main(arguments(max_steps=1)) == 0


def test_rows_are_mapped_in_one_place():
    """By `map_rows`, so that no function is hashed in any task."""
    training = (ROOT / "scripts" / "toolkit" / "training").glob("*.py")
    assert [
        path.name for path in training if "def map_rows" not in path.read_text() and ".map(" in path.read_text()
    ] == []


def test_ctrl_c_while_data_are_prepared(arguments, monkeypatch, capsys):
    call = BertTokenizer.__call__

    def interrupt(self, *arguments, **options):
        os.kill(os.getpid(), signal.SIGINT)
        return call(self, *arguments, **options)

    monkeypatch.setattr(BertTokenizer, "__call__", interrupt)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a process in the background ignores it
    try:
        assert finetune_classification.main(arguments()) == 130
    finally:
        signal.signal(signal.SIGINT, before)
    assert capsys.readouterr().err == "finetune_classification.py: interrupted\n"


# --------------------------------------------------------------------------------------------------------- checkpoints


@pytest.fixture(scope="module")
def whole(checkpoints, tmp_path_factory) -> tuple[Path, list[str]]:
    """A run with a checkpoint at each of four updates, and its flags but for --output."""
    output = tmp_path_factory.mktemp("whole") / "run"
    flags = {
        "model": checkpoints["scratchbert"],
        "train_file": REVIEWS,
        "validation_file": REVIEWS,
        "max_length": 24,
        "batch_size": 16,
        "max_steps": 4,
        "save_steps": 1,
        "eval_steps": 4,
        "keep_checkpoints": 9,
        "trackers": "none",
        "learning_rate": 1e-3,
        "log_steps": 1,
    }
    argv = [f"--{name}={value}" for name, value in flags.items()]
    forget()
    assert finetune_classification.main([*argv, f"--output={output}"]) == 0
    forget()
    return output, argv


@pytest.fixture
def stopped(whole, tmp_path):
    """A copy of this run as it was after three updates, and a function that continues it."""
    output, argv = tmp_path / "stopped", whole[1]
    shutil.copytree(whole[0], output)
    (output / "model.safetensors").unlink()
    shutil.rmtree(output / "checkpoints" / "step-00000004-epoch-1", ignore_errors=True)
    shutil.rmtree(output / "checkpoints" / "step-00000004", ignore_errors=True)
    return output, lambda *more: finetune_classification.main([*argv, f"--output={output}", "--resume", *more])


def flip_last_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def overwrite_random_state(path: Path) -> None:
    """Another state of torch's generator, which Accelerate would load without a word."""
    states = torch.load(path, weights_only=False)
    states["torch_manual_seed"] = torch.Generator().manual_seed(1).get_state()
    torch.save(states, path)


@pytest.mark.parametrize(
    ("name", "harm"),
    [
        ("random_states_0.pkl", overwrite_random_state),
        ("random_states_0.pkl", lambda path: path.write_bytes(b"")),
        ("optimizer.bin", lambda path: path.write_bytes(path.read_bytes()[:1000])),
        ("model.safetensors", flip_last_byte),
        ("schedule.json", Path.unlink),
        ("progress.json", lambda path: path.write_text("")),
        ("checksums.json", lambda path: path.write_text("[]")),
    ],
)
def test_the_checkpoint_before_a_damaged_one_is_used(name, harm, whole, stopped, capsys):
    output, resume = stopped
    harm(output / "checkpoints" / "step-00000003" / name)
    assert resume() == 0
    said = capsys.readouterr()
    assert "resuming at step 2 of 4" in said.out
    (line,) = [line for line in said.err.splitlines() if "step-00000003 is not used: " in line]
    assert name in line.partition(": ")[2]
    assert_same_run(output, whole[0])
    names = {path.name for path in (output / "checkpoints").iterdir()}
    assert {"step-00000003", "damaged-step-00000003"} <= names


def test_a_checkpoint_whose_best_one_is_damaged_is_not_used(stopped, whole, capsys):
    output, resume = stopped
    folder = output / "checkpoints"
    progress = json.loads((folder / "step-00000003" / "progress.json").read_text()) | {
        "best_checkpoint": "step-00000002"
    }
    (folder / "step-00000003" / "progress.json").write_text(json.dumps(progress))
    renew_checksums(folder / "step-00000003")
    flip_last_byte(folder / "step-00000002" / "model.safetensors")
    assert resume() == 0
    assert "in the best checkpoint, step-00000002, model.safetensors differs" in capsys.readouterr().err
    assert_same_run(output, whole[0])


@pytest.mark.parametrize("earlier", [1, 2])
def test_a_run_continues_on_as_many_processes(earlier, stopped, capsys):
    """Of more processes than before, some have no random states in the checkpoint."""
    output, resume = stopped
    for folder in (output / "checkpoints").iterdir():
        progress = json.loads((folder / "progress.json").read_text()) | {"processes": earlier + 2}
        (folder / "progress.json").write_text(json.dumps(progress))
        (folder / "random_states_0.pkl").rename(folder / f"random_states_{earlier}.pkl")
        renew_checksums(folder)
    before = (output / "recipe.yaml").read_bytes()
    assert_one_line(lambda: resume("--log_steps=3"), f"of a run on {earlier + 2} processes; expected 1", capsys)
    assert (output / "recipe.yaml").read_bytes() == before


def test_a_flag_that_the_version_of_the_run_did_not_have(stopped, whole, capsys):
    output, resume = stopped
    recipe = yaml.safe_load((output / "recipe.yaml").read_text())
    del recipe["optimizer"], recipe["max_train_samples"]
    (output / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    assert_one_line(lambda: resume("--optimizer=sgd"), "--optimizer was adamw and is sgd", capsys)
    assert resume() == 0
    assert_same_run(output, whole[0])


def test_a_flag_may_have_had_another_value_before_it_existed(tmp_path):
    @dataclasses.dataclass
    class Later(ClassificationSettings):
        dropout: float = training_flag("", 0.1, before=0.0)

    (tmp_path / "recipe.yaml").write_text("model: a/b\noutput: out\ntrain_file: [x.csv]\n")
    given = {"model": "a/b", "output": "out", "train_file": [str(Path("x.csv").resolve())]}
    for value, expected in ((0.0, {}), (0.1, {"dropout": (0.0, 0.1)})):
        changed = changed_flags(Later(**given, dropout=value), tmp_path / "recipe.yaml")
        assert {name: each for name, each in changed.items() if name != "train_file"} == expected


def test_without_an_intact_checkpoint_the_run_does_not_continue(stopped, capsys):
    output, resume = stopped
    for path in (output / "checkpoints").iterdir():
        flip_last_byte(path / "optimizer.bin")
    assert_one_line(resume, "is intact (step-00000003: optimizer.bin differs from its checksum; step-00000002", capsys)
    assert len(list((output / "checkpoints").glob("step-*"))) == 3


@pytest.mark.parametrize("text", ["", "a: [", "- a list"])
def test_a_damaged_recipe(text, stopped, capsys):
    output, resume = stopped
    (output / "recipe.yaml").write_text(text)
    assert_one_line(resume, f"{output / 'recipe.yaml'} is not ", capsys)


class Payload:
    """Creates a file when it is unpickled."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


def renew_checksums(folder: Path) -> None:
    (folder / "checksums.json").write_text(json.dumps(checksums(folder)))


@pytest.mark.parametrize("name", ["custom_checkpoint_0.pkl", "optimizer.bin", "random_states_0.pkl"])
def test_code_in_a_checkpoint_does_not_run(name, stopped, capsys):
    output, resume = stopped
    folder, ran = output / "checkpoints" / "step-00000003", output / "the-code-ran"
    torch.save(Payload(ran), folder / name)
    renew_checksums(folder)
    assert_one_line(resume, f"{folder} cannot be loaded", capsys)
    assert not ran.exists()


def test_formats_that_run_code_require_a_flag(stopped, monkeypatch, capsys):
    _, resume = stopped
    monkeypatch.setattr(Checkpoints, "runs_code", True)
    assert_one_line(resume, "of sharded FSDP, which can run code when it is read; expected --trust_checkpoints", capsys)
    forget()
    assert resume("--trust_checkpoints") == 0
    assert "which can run code when it is read" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("distributed", "state_dict", "expected"),
    [
        (DistributedType.NO, None, False),
        (DistributedType.DEEPSPEED, None, True),
        (DistributedType.FSDP, StateDictType.SHARDED_STATE_DICT, True),
        (DistributedType.FSDP, StateDictType.FULL_STATE_DICT, False),
    ],
)
def test_formats_that_run_code(distributed, state_dict, expected):
    state = SimpleNamespace(fsdp_plugin=state_dict and SimpleNamespace(state_dict_type=state_dict))
    accelerator = SimpleNamespace(distributed_type=distributed, state=state)
    assert Checkpoints(Path(), accelerator, None, 1).runs_code == expected


@pytest.mark.parametrize("name", ["fsdp.yaml", "fsdp_cpu.yaml"])
def test_fsdp_is_configured_for_full_state_dicts(name):
    configuration = yaml.safe_load((ROOT / "configuration" / name).read_text())
    assert configuration["fsdp_config"]["fsdp_state_dict_type"] == "FULL_STATE_DICT"


# The arguments that a schedule does not do without.
NEEDED = {"cosine_with_min_lr": ["min_lr_rate=0.1"], "warmup_stable_decay": ["num_decay_steps=3"]}


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules_survive_json(name):
    def make():
        optimizer = torch.optim.AdamW([nn.Parameter(torch.zeros(2))], lr=1e-3)
        return make_schedule(
            optimizer, SimpleNamespace(schedule=name, warmup_ratio=0.3, lr_scheduler_kwargs=NEEDED.get(name)), 10
        )

    def rates(schedule, steps: int) -> list[float]:
        found = []
        for _ in range(steps):
            schedule.optimizer.step()
            schedule.step()
            found += schedule.get_last_lr()
        return found

    whole, first, second = make(), make(), make()
    expected = rates(whole, 10)
    assert rates(first, 4) == expected[:4]
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert rates(second, 6) == expected[4:]


@pytest.fixture
def small_files():
    """Limits the size of files, so that writing fails as it does on a full disk."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.bin"])
def test_a_checkpoint_that_does_not_fit(name, stopped, small_files, capsys):
    output, resume = stopped
    saved = output / "checkpoints" / "step-00000003"
    small_files((saved / name).stat().st_size - 1000)
    assert resume() == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert f"{saved.with_name('step-00000004')} cannot be written: " in line
    assert line.endswith("With enough space on the disk, --resume continues from step-00000003.")
    assert sorted(path.name for path in saved.parent.iterdir())[-1] == "step-00000003"


def test_a_model_that_does_not_fit(stopped, small_files, monkeypatch, capsys):
    output, resume = stopped
    train = training.Training.train
    monkeypatch.setattr(training.Training, "train", lambda self: (train(self), small_files(5000)))
    assert resume() == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert f"{output} cannot be written: " in line
    assert line.endswith("With enough space on the disk, --resume writes it.")
    assert not (output / ".unfinished").exists()


# --------------------------------------------------------------------------------------------------------------- kills


@pytest.fixture(scope="module")
def start():
    """Starts a run in a process of its own, whose imports are made already."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["finetune_classification"])

    def start(argv: list[str], **changes):
        process = context.Process(target=run_and_exit, args=(argv,), kwargs=changes)
        process.start()
        return process

    yield start
    multiprocessing.forkserver._forkserver._stop()


def run_and_exit(argv: list[str], signal_in_update: tuple[int, int] | None = None) -> None:
    """Runs a training. With `signal_in_update`, a signal and a number, it gets the signal in that update."""
    torch.set_num_threads(1)
    if signal_in_update:
        number, update = signal_in_update
        step, updates = training.Training.step, itertools.count(1)

        def step_and_signal(self, group):
            step(self, group)
            if next(updates) == update:
                signal.raise_signal(number)

        training.Training.step = step_and_signal
    sys.exit(finetune_classification.main(argv))


def wait(process) -> int:
    process.join(120)
    assert process.exitcode is not None
    return process.exitcode


def test_killed_again_and_again_it_ends_with_the_same_weights(arguments, start, tmp_path):
    """SIGKILL, at moments drawn at random: while it opens files, trains, evaluates, or writes a checkpoint."""
    flags = {"save_steps": 1, "epochs": 3, "gradient_accumulation_steps": 2, "batch_size": 8, "keep_checkpoints": 1}
    began = time.monotonic()
    assert wait(start(arguments("undisturbed", **flags))) == 0
    took = time.monotonic() - began
    moments, killed = random.Random(0), 0
    for _ in range(6):
        process = start(arguments("killed", **flags, resume=True))
        process.join(moments.uniform(0.2, 0.9) * took)
        killed += process.exitcode is None
        process.kill()
        process.join()
    assert killed >= 3  # the last may find nothing left to do
    assert wait(start(arguments("killed", **flags, resume=True))) == 0
    assert_same_run(tmp_path / "killed", tmp_path / "undisturbed")
    assert not list((tmp_path / "killed" / "checkpoints").glob(".*"))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_and_stops(number, arguments, start, tmp_path):
    flags = {"epochs": 12, "eval_steps": 1000, "save_steps": 1000}
    process = start(arguments(**flags, trackers="tensorboard"), signal_in_update=(number, 5))
    assert wait(process) == 128 + number
    (saved,) = (tmp_path / "run" / "checkpoints").iterdir()
    assert saved.name == "step-00000006"  # the processes agree on it in the next update
    assert wait(start(arguments(**flags, trackers="tensorboard", resume=True))) == 0
    assert wait(start(arguments("undisturbed", **flags))) == 0
    assert_same_run(tmp_path / "run", tmp_path / "undisturbed")
