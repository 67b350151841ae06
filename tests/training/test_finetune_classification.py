"""scripts/finetune_classification.py: labels of each kind, in each form that a file has them; losses and metrics."""

import json
import math
from collections import Counter

import pytest
import torch
import yaml
from datasets import ClassLabel, Dataset, Features, List, Value
from torch import nn
from transformers import AutoTokenizer, BertForSequenceClassification

from finetune_classification import main
from support.finetuning import assert_one_line, assert_resumes, make_task, save_tiny
from support.folders import ROOT
from toolkit.finetuning.classification import Classification
from toolkit.finetuning.task_settings import ClassificationSettings
from toolkit.labels import label_name

pytestmark = pytest.mark.usefixtures("quiet_only_here")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> str:
    torch.manual_seed(0)
    return save_tiny(tmp_path_factory.mktemp("tiny"), ["good", "bad", "film", "fun", "a", "very", "."])


@pytest.fixture
def make(tiny, tmp_path):
    """Makes the task of some rows, JSON lines, without a run."""

    def make(rows: list[dict], validation: list[dict] | None = None, **flags):
        files = {"train_file": rows} | ({"validation_file": validation} if validation else {})
        for name, each in files.items():
            files[name] = [str(tmp_path / f"{name}.jsonl")]
            (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in each))
        return make_task(Classification, ClassificationSettings, **{"model": tiny, **files, **flags})

    return make


def batch_of(task) -> dict:
    return task.collate([task.train_set[i] for i in range(len(task.train_set))])


TEXTS = ["good film .", "bad film", "a very good film", "fun ."]
KINDS = {
    "single_label": [{"text": text, "label": label} for text, label in zip(TEXTS, [1, 0, 1, 2], strict=True)],
    "multi_label": [
        {"text": text, "labels": labels}
        for text, labels in zip(TEXTS, [["x", "y"], [], ["y"], ["z", "x"]], strict=True)
    ],
    "regression": [{"text": text, "score": score} for text, score in zip(TEXTS, [0.5, -1, 2, 0], strict=True)],
}


@pytest.mark.parametrize("flatten", [False, True], ids=["padded", "flattened"])
@pytest.mark.parametrize("problem", KINDS)
def test_the_loss_is_berts(problem, flatten, make, tmp_path):
    task = make(KINDS[problem], problem=problem, padding_free_collation=flatten)
    task.model.eval().save_as_bert(tmp_path / "bert")
    reference = BertForSequenceClassification.from_pretrained(tmp_path / "bert").eval()
    batch = batch_of(task)
    padded = batch_of(make(KINDS[problem], problem=problem))
    with torch.no_grad():
        loss = task.losses(task.model, batch) / task.counts(batch)
        assert torch.allclose(loss, reference(**padded).loss[None], atol=1e-6)
    assert reference.config.problem_type == {"regression": "regression"}.get(problem, f"{problem}_classification")


@pytest.mark.parametrize("implementation", ["scratchbert", "bert"])
def test_our_model_removes_padding(implementation, make):
    config = make(KINDS["single_label"], implementation=implementation).model.config
    assert getattr(config, "padding_free", None) == (True if implementation == "scratchbert" else None)


@pytest.mark.parametrize("problem", KINDS)
def test_the_loss_of_an_evaluation_is_that_of_the_training(problem, make):
    """Whatever the batches, with weights of the labels."""
    weights = {"labels": ["0", "1", "2"], "class_weights": ["1", "2", "3"]} if problem == "single_label" else {}
    found = []
    for size in (1, 3, 64):
        task = make(KINDS[problem], KINDS[problem], problem=problem, eval_batch_size=size, **weights)
        torch.manual_seed(1)
        torch.nn.init.normal_(task.model.classifier.weight)
        found.append(task.evaluate(task.model, "validation").metrics["loss"])
    batch = batch_of(task)
    with torch.no_grad():
        loss = task.losses(task.model.eval(), batch) / task.counts(batch)
    assert found == pytest.approx([loss.item()] * 3, rel=1e-5)


def test_several_labels_a_row(make, tmp_path):
    """By hand: with a logit above 0 for x alone, x is right in rows 0 and 3; y and z are never said."""
    task = make(KINDS["multi_label"], KINDS["multi_label"], problem="multi_label")
    assert task.labels == ["x", "y", "z"]
    assert task.train_set["labels"] == [[1, 1, 0], [0, 0, 0], [0, 1, 0], [1, 0, 1]]
    task.model.classifier.weight.data.zero_()
    task.model.classifier.bias.data = torch.tensor([1.0, -1.0, -1.0])
    metrics = task.evaluate(task.model, "validation").metrics
    # F1 of x: precision 2/4, recall 2/2, so 2/3; macro: a third of it. No row is right in all three.
    # In each row the losses of a label and its absence are -log σ(1) and 1 more: 12 of the first, 5 times 1 more.
    loss = math.log1p(math.exp(-1)) + 5 / 12
    assert metrics == {"loss": pytest.approx(loss), "f1": pytest.approx(2 / 9), "accuracy": 0.0}
    # The same out of a CSV file.
    path = tmp_path / "several.csv"
    path.write_text("text,labels\ngood film .,x|y\nbad film,\na very good film, y\nfun .,z|x\n")
    flags = {"model": task.settings.model, "train_file": [str(path)], "problem": "multi_label"}
    again = make_task(Classification, ClassificationSettings, **flags)
    assert again.train_set["labels"] == task.train_set["labels"]


def test_numbers(make):
    """By hand: (1, 2, 3, 4) and (2, 1, 4, 3) have covariance 3/4, variances 5/4, so r = 0.6; the ranks are the same;
    the mean square of the differences is 1."""
    rows = [{"text": text, "score": score} for text, score in zip(TEXTS, [1, 2, 3, 4], strict=True)]
    task = make(rows, rows, problem="regression")
    said = {1: 2.0, 2: 1.0, 3: 4.0, 4: 3.0}
    task.logits = lambda model, batch: torch.tensor([[said[score]] for [score] in batch["labels"].tolist()])
    metrics = task.evaluate(task.model, "validation").metrics
    expected = {"pearson": 0.6, "spearman": 0.6, "mean_squared_error": 1.0, "loss": 1.0}
    assert metrics == pytest.approx(expected)
    assert task.metric == "pearson"
    assert task.greater_is_better
    assert not make(rows, rows, problem="regression", metric="mean_squared_error").greater_is_better


def test_pairs(make):
    rows = [{"premise": "good film", "hypothesis": "fun .", "label": label} for label in ("yes", "no")]
    task = make(rows)
    first = task.train_set[0]
    tokens = task.tokenizer.convert_ids_to_tokens(first["input_ids"])
    assert tokens == ["[CLS]", "good", "film", "[SEP]", "fun", ".", "[SEP]"]
    assert first["token_type_ids"] == [0, 0, 0, 0, 1, 1, 1]
    assert (task.labels, first["labels"]) == (["no", "yes"], 1)
    cut = make(rows, max_length=6).train_set[0]
    assert len(cut["input_ids"]) == 6


def test_labels_in_order_and_by_one_name(make):
    rows = [{"text": "film", "label": label} for label in (10, 2.0, "-1", 2)]
    task = make(rows)
    assert task.labels == ["-1", "2", "10"]
    assert task.train_set["labels"] == [2, 1, 0, 1]
    assert [label_name(value) for value in (2.5, True, None, " a ")] == ["2.5", "True", "", "a"]


NAMES = ["World", "Sports", "Business", "Science"]  # of which the rows have three


@pytest.mark.parametrize("by_name", [False, True], ids=["file", "dataset"])
@pytest.mark.parametrize("problem", ["single_label", "multi_label"])
def test_labels_of_a_dataset_are_in_its_order(problem, by_name, make, tmp_path):
    label = ClassLabel(names=NAMES)
    features = Features({"text": Value("string"), "label": List(label) if problem == "multi_label" else label})
    numbers = [[number] if problem == "multi_label" else number for number in (2, 0, 1, 0)]
    (tmp_path / "data").mkdir()
    data = Dataset.from_dict({"text": TEXTS, "label": numbers}, features=features)
    data.to_parquet(tmp_path / "data" / "train.parquet")
    source = {"dataset": str(tmp_path / "data"), "validation_split": "none"}
    source = source if by_name else {"train_file": [str(tmp_path / "data" / "train.parquet")]}
    tiny = make(KINDS["single_label"]).settings.model
    task = make_task(Classification, ClassificationSettings, model=tiny, problem=problem, **source)
    assert task.labels == list(task.model.config.id2label.values()) == NAMES
    found = [row.index(1) for row in task.train_set["labels"]] if problem == "multi_label" else task.train_set["labels"]
    assert list(found) == [2, 0, 1, 0]


def test_decimal_labels_are_numbers_or_named_classes(make):
    rows = [{"text": "film", "label": label} for label in ("0.5", 3.2, "-1.5", 2)]
    with pytest.raises(ValueError, match=r"-1\.5.*--problem regression.*--labels -1\.5 0\.5 2"):
        make(rows)
    assert make(rows, labels=["-1.5", "0.5", "2", "3.2"]).train_set["labels"] == [1, 3, 0, 2]
    assert make([{"text": "film", "label": label} for label in ("1.0", "0.0", 2.0)]).labels == ["0.0", "1.0", "2"]
    assert make([*rows, {"text": "film", "label": "other"}]).labels == ["-1.5", "other", "0.5", "2", "3.2"]


def test_few_of_many_labels_are_listed(make):
    labels = [f"l{number}" for number in range(3000)]
    with pytest.raises(ValueError, match=r"'x'; expected one of l0, .*, l9 and 2,990 more$"):
        make([{"text": "film", "label": "x"}], labels=labels)


# ------------------------------------------------------------------------------------------------ validation_fraction

SHARES = [{"text": "good film", "label": label} for label in "a" * 60 + "b" * 30 + "c" * 9 + "d"]


def held_out(task) -> list[str]:
    return list(task.splits["validation"]["place"])


def test_a_fraction_is_held_out_of_each_label_alike(make):
    task = make(SHARES, validation_fraction=0.1)
    assert (len(task.train_set), len(held_out(task))) == (90, 10)
    assert Counter(task.splits["validation"]["labels"]) == {0: 6, 1: 3, 2: 1}
    assert task.labels == ["a", "b", "c", "d"]
    assert not set(held_out(task)) & set(task.train_set["place"])
    assert held_out(task) == held_out(make(SHARES, validation_fraction=0.1))
    assert held_out(task) != held_out(make(SHARES, validation_fraction=0.1, split_seed=1))
    assert held_out(task) == held_out(make(SHARES, validation_fraction=0.1, seed=1))
    assert held_out(make(SHARES, validation_fraction=0.1, max_eval_samples=4)) == held_out(task)[:4]


def test_a_fraction_of_numbers_and_of_too_few_rows(make):
    assert len(held_out(make(KINDS["regression"], problem="regression", validation_fraction=0.5))) == 2
    with pytest.raises(ValueError, match=r"--validation_fraction is 0\.1, of 6 rows; .*number of classes"):
        make([{"text": "film", "label": label} for label in "aabbcc"], validation_fraction=0.1)


def test_a_resumed_run_holds_out_the_same_rows(tiny, tmp_path, monkeypatch):
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in SHARES))
    argv = ["--model", tiny, "--train_file", str(tmp_path / "rows.jsonl"), "--validation_fraction", "0.1"]
    assert_resumes(
        main, [*argv, "--epochs", "1", "--batch_size", "8", "--max_length", "16"], tmp_path, monkeypatch, after=5
    )
    recipe = yaml.safe_load((tmp_path / "whole" / "recipe.yaml").read_text())
    assert recipe["validation_fraction"] == 0.1
    files = [(tmp_path / name / "predictions_validation.jsonl").read_text() for name in ("whole", "broken")]
    assert files[0] == files[1]
    assert len(files[0].splitlines()) == 10


@pytest.mark.parametrize("weights", [["1", "2", "4"], ["balanced"]])
def test_class_weights(weights, make):
    task = make(KINDS["single_label"], class_weights=weights, labels=["0", "1", "2"])
    task.model.eval()
    batch = batch_of(task)
    # Of the four rows two have label 1: balanced is 4 / (3 · rows of the label).
    expected = torch.tensor([1.0, 2, 4] if weights != ["balanced"] else [4 / 3, 2 / 3, 4 / 3])
    assert torch.allclose(task.weights, expected)
    logits = task.model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    mean = nn.functional.cross_entropy(logits, batch["labels"], expected)
    assert torch.allclose(task.losses(task.model, batch) / task.counts(batch), mean[None])


@pytest.mark.parametrize(
    ("rows", "flags", "message"),
    [
        ([{"text": " ", "label": 1}], {}, "train_file.jsonl, row 3 (line 3): 'text' is empty"),
        ([{"text": "film"}], {}, "row 3 (line 3): 'label' is missing"),
        ([{"text": "film", "label": None}], {}, "row 3 (line 3): the label is empty"),
        ([{"text": "film", "label": "c"}], {"labels": ["a", "b"]}, "the label is 'c'; expected one of a, b"),
        ([{"text": "film", "label": ["a", "b"]}], {}, "the label is ['a', 'b']; expected one label"),
        (
            [{"text": "film", "label": "high"}],
            {"problem": "regression"},
            "the label is 'high'; expected finite numbers",
        ),
        ([{"text": "film", "label": "nan"}], {"problem": "regression"}, "the label is 'nan'; expected finite numbers"),
        ([{"text": "film", "label": [1, 2]}], {"problem": "regression"}, "rows have 1 and 2 numbers"),
    ],
)
def test_bad_rows(rows, flags, message, make):
    good = [1, 2] if flags.get("problem") else ["a", "b"]
    first = [{"text": "film", "label": label} for label in good]
    with pytest.raises(ValueError) as raised:  # noqa: PT011, the message is looked at below
        make(first + rows, **flags)
    assert message in str(raised.value)
    if "row 3" in message or "expected one" in message:  # a row alone, which can be skipped
        assert len(make(first + rows, **flags, on_bad_row="skip").train_set) == 2


def test_a_label_that_only_the_validation_set_has(make):
    rows = [{"text": "film", "label": label} for label in "ab"]
    with pytest.raises(ValueError, match=r"validation_file.jsonl, row 1 .*: the label is 'c'; expected one of a, b"):
        make(rows, [{"text": "film", "label": "c"}, *rows])
    with pytest.raises(ValueError, match="the training set has the labels a; expected two or more"):
        make(rows[:1])


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--class_weights", "1", "2"], "--class_weights has numbers and --labels is missing"),
        (["--class_weights", "1", "--labels", "0", "1"], "expected 2 numbers of 0 or more"),
        (["--class_weights", "heavy", "--labels", "0", "1"], "--class_weights is heavy; expected numbers, or balanced"),
        (["--class_weights", "balanced", "--problem", "multi_label"], "--class_weights is balanced with"),
        (
            ["--class_weights", "balanced", "--problem", "regression"],
            "--class_weights is balanced without --problem",
        ),
        (
            ["--label_smoothing", "0.1", "--problem", "regression"],
            "--label_smoothing is 0.1 without --problem single_label",
        ),
        (["--labels", "0", "0"], "--labels is 0 0; expected each label once"),
        (["--problem", "guessing"], "invalid choice: 'guessing'"),
        (["--max_length", "65"], "--max_length is 65; expected at most 64"),
        (["--validation_fraction", "1"], "--validation_fraction is 1.0; expected more than 0 and less than 1"),
        (
            ["--validation_fraction", "0.1", "--validation_file", "x.csv"],
            "--validation_fraction and --validation_file are both given",
        ),
        (["--delimiter", "||"], "--delimiter is '||'; expected one character"),
        (["--delimiter", ";"], "columns are 'text,label,rating'. If ',' is between columns, give it as --delimiter"),
    ],
)
def test_flags_that_do_not_go_together(flags, message, tiny, tmp_path, capsys):
    reviews = str(ROOT / "tests" / "data" / "movie_reviews.csv")
    argv = ["--model", tiny, "--output", str(tmp_path / "run"), "--train_file", reviews, *flags]
    assert_one_line(lambda: main(argv), message, capsys)


# -------------------------------------------------------------------------------------- checkpoints with their labels


def save_classifier(tiny, folder, labels: list[str]) -> str:
    """A checkpoint with a model head for these labels, and the tokenizer of `tiny`."""
    names = {"num_labels": len(labels), "id2label": dict(enumerate(labels))}
    BertForSequenceClassification.from_pretrained(tiny, **names).save_pretrained(folder)
    AutoTokenizer.from_pretrained(tiny).save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("implementation", ["scratchbert", "bert"])
@pytest.mark.parametrize("problem", ["single_label", "multi_label"])
@pytest.mark.parametrize(
    ("saved", "flags", "order", "is_new"),
    [
        (["y", "z", "x"], {}, ["y", "z", "x"], False),
        (["y", "z", "x"], {"labels": ["y", "z", "x"]}, ["y", "z", "x"], False),
        (["y", "z", "x"], {"labels": ["x", "y", "z"]}, ["x", "y", "z"], True),
        (["u", "v", "w"], {}, ["x", "y", "z"], True),
        (["LABEL_0", "LABEL_1", "LABEL_2"], {}, ["x", "y", "z"], False),
    ],
    ids=["same set", "same order given", "other order given", "other set", "no names"],
)
def test_a_model_head_keeps_its_labels(
    saved, flags, order, is_new, problem, implementation, tiny, make, tmp_path, capsys
):
    checkpoint = save_classifier(tiny, tmp_path / "trained", saved)
    rows = [{"text": text, "label": label} for text, label in zip(TEXTS, ["x", "y", "z", "x"], strict=True)]
    capsys.readouterr()
    task = make(rows, model=checkpoint, problem=problem, implementation=implementation, **flags)
    assert task.labels == list(task.model.config.id2label.values()) == order
    weight = BertForSequenceClassification.from_pretrained(checkpoint).classifier.weight
    assert task.model.classifier.weight.equal(weight) != is_new
    assert task.new_weights == ({"classifier.weight", "classifier.bias"} if is_new else set())
    assert ("has no weights of classifier; they are random" in capsys.readouterr().out) == is_new
