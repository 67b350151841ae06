"""scripts/train.py: arguments, and the files of a run."""

import json
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoModelForSequenceClassification, TrainingArguments

import train
from support.tiny import reviews, save_tiny, write_rows
from toolkit.tasks.question_answering import best_match, best_span, best_threshold, positions
from toolkit.tasks.tagging import tagged_words

pytestmark = pytest.mark.usefixtures("new_accelerator")


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return save_tiny(tmp_path_factory.mktemp("model"))


@pytest.fixture
def argv(model, tmp_path):
    """The command line of a run on eight texts, with changed arguments; None removes one."""
    rows = write_rows(tmp_path / "rows.jsonl", reviews(8))

    def make(task="classification", **changed) -> list[str]:
        given = {
            "model": model,
            "train_file": rows,
            "output_dir": tmp_path / "run",
            "per_device_train_batch_size": 2,
            "num_train_epochs": 1,
            "max_length": 12,
            **changed,
        }
        return [task, *(f"--{name}={value}" for name, value in given.items() if value is not None)]

    return make


def run(argv: list[str]) -> int:
    try:
        return train.main(argv)
    except SystemExit as stopped:
        return stopped.code


# Changed arguments, and what the line on standard error names.
REFUSED = [
    ({"output_dir": None}, "--output_dir"),
    ({"train_file": None}, "--train_file"),
    ({"model": None}, "--model"),
    ({"model": "./missing"}, "no such folder"),
    ({"train": "rows.csv"}, "--train=rows.csv"),  # no abbreviations
    ({"learning_rate": "fast"}, "learning_rate"),
    ({"learning_rate": "nan"}, "--learning_rate"),
    ({"learning_rate": -1}, "--learning_rate"),
    ({"num_train_epochs": 0}, "--num_train_epochs"),
    ({"max_steps": 0}, "--max_steps"),
    ({"per_device_train_batch_size": 0}, "--per_device_train_batch_size"),
    ({"eval_strategy": "sometimes"}, "eval_strategy"),
    ({"eval_strategy": "steps"}, "--eval_steps"),
    ({"early_stopping_patience": 2}, "--early_stopping_patience"),
    ({"metric_for_best_model": "accuracy"}, "--metric_for_best_model"),
    ({"validation_fraction": 2}, "--validation_fraction"),
    ({"group_column": "text"}, "--group_column"),
    ({"dataset": "a/b"}, "--dataset"),
    ({"test_split": "test"}, "--dataset"),
    ({"delimiter": "::"}, "--delimiter"),
    ({"bf16": True, "fp16": True}, "--fp16"),
    ({"freeze": "head"}, "--freeze"),
    ({"freeze": 1, "lora_rank": 2}, "--lora_rank"),
    ({"lr_scheduler_type": "stairs"}, "--lr_scheduler_type"),
    ({"lr_scheduler_kwargs": '{"speed": 1}', "lr_scheduler_type": "cosine"}, "--lr_scheduler_kwargs"),
    ({"max_length": 100}, "--max_length"),
    ({"label_column": "mood"}, "--label_column"),
    ({"class_weights": 1}, "--class_weights"),
    ({"problem": "regression"}, "row 1"),
    ({"label_columns": "a"}, "--label_columns"),
    ({"push_to_hub": True}, "--hub_model_id"),
    ({"evaluate_only": True}, "--evaluate_only"),
    ({"train_file": "missing/*.csv"}, "--train_file"),
    ({"encoding": "klingon"}, "klingon"),
    ({"report_to": "telegraph"}, "telegraph"),
    (
        {"task": "seq2seq", "max_target_length": 65, "source_column": "text", "target_column": "label"},
        "--max_target_length",
    ),
    ({"problem": "regression", "label_smoothing_factor": 0.1}, "--label_smoothing_factor"),
]


@pytest.mark.parametrize(("changed", "named"), REFUSED)
def test_wrong_arguments_are_refused_in_one_line(changed, named, argv, tmp_path, capsys):
    assert run(argv(**changed)) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert named in line
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("given", [["poetry"], ["classification", "missing.yaml"], ["classification", "rows.jsonl"]])
def test_wrong_tasks_and_recipes_are_refused_in_one_line(given, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_rows(tmp_path / "rows.jsonl", reviews(2))
    assert run(given) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert given[-1] in line


def test_a_recipe_has_defaults(argv, tmp_path):
    """Its paths are relative to it, 1e-4 is a number, and the command line wins."""
    (tmp_path / "recipe.yaml").write_text("train_file: [./a.csv, ./b.csv]\nlearning_rate: 1e-4\nseed: 7\nbf16: yes\n")
    _, data, arguments = train.parse(
        ["classification", str(tmp_path / "recipe.yaml"), *argv(train_file=None, seed=8)[1:]]
    )
    assert data.train_file == [str(tmp_path / "a.csv"), str(tmp_path / "b.csv")]
    assert (arguments.learning_rate, arguments.seed, arguments.bf16) == (1e-4, 8, True)


# Where a default differs from that of TrainingArguments.
OTHER_DEFAULTS = {
    "per_device_train_batch_size",
    "per_device_eval_batch_size",
    "train_sampling_strategy",
    "warmup_steps",
    "weight_decay",
    "eval_strategy",
    "save_strategy",
    "save_total_limit",
    "load_best_model_at_end",
    "logging_steps",
    "resume_from_checkpoint",
    "gradient_checkpointing",
    "hub_private_repo",
}


def test_names_and_defaults_are_those_of_transformers():
    theirs, ours = TrainingArguments.__dataclass_fields__, train.TrainingArguments.__dataclass_fields__
    shared = theirs.keys() & ours.keys()
    assert len(shared) > 25
    assert {name for name in shared if theirs[name].default != ours[name].default} == OTHER_DEFAULTS


def test_the_files_of_a_run(argv, tmp_path, capsys):
    """The model opens, predictions are in the order of the rows, and the figures have their numbers of rows."""
    rows = write_rows(tmp_path / "held_out.jsonl", [{**row, "score": i} for i, row in enumerate(reviews(5))])
    assert run(argv(validation_file=rows, test_file=rows, num_train_epochs=2, save_total_limit=1)) == 0
    printed = capsys.readouterr().out
    assert all(part in printed for part in ("2 labels", "neg (4)", "pos (4)", "'text'", "'label'", "classifier"))
    folder = tmp_path / "run"
    metrics = json.loads((folder / "metrics.json").read_text())
    assert metrics["validation"]["rows"] == metrics["test"]["rows"] == 5
    assert metrics["lengths"]["train"]["rows"] == 8
    assert {"loss", "accuracy", "f1_macro", "matthews_correlation"} < metrics["test"].keys()
    predictions = [json.loads(line) for line in (folder / "predictions_test.jsonl").read_text().splitlines()]
    assert [row["input_score"] for row in predictions] == list(range(5))
    assert sum(row["prediction"] == row["label"] for row in predictions) / 5 == metrics["test"]["accuracy"]
    names = {path.name for path in folder.iterdir()}
    assert {
        "README.md",
        "recipe.yaml",
        "curves.png",
        "confusion_matrix.png",
        "labels_test.csv",
        "tokenizer.json",
    } < names
    assert not {name for name in names if name.endswith((".bin", ".pkl", ".pt"))}
    assert str(tmp_path) not in (folder / "README.md").read_text()
    opened = AutoModelForSequenceClassification.from_pretrained(folder, trust_remote_code=True)
    assert opened.config.label2id == {"neg": 0, "pos": 1}
    assert run(argv()) == 2  # the folder holds a run
    assert run(argv(resume_from_checkpoint=True)) == 2  # which is finished
    assert run(["classification", str(folder / "recipe.yaml"), f"--output_dir={tmp_path / 'again'}"]) == 0
    again = json.loads((tmp_path / "again" / "metrics.json").read_text())
    assert again["test"] == metrics["test"]
    evaluated = tmp_path / "evaluated"
    argv = [
        "classification",
        "--evaluate_only",
        f"--model={folder}",
        f"--test_file={rows}",
        f"--output_dir={evaluated}",
    ]
    assert run(argv) == 0
    assert json.loads((evaluated / "metrics.json").read_text())["test"] == metrics["test"]
    assert not (evaluated / "model.safetensors").exists()


KINDS = {
    "pairs": ({}, [{"sentence1": "good", "sentence2": "bad film", "label": i % 2} for i in range(8)], "accuracy"),
    "several labels": (
        {"problem": "multi_label"},
        [{"text": "good", "label": ["x", "y"][: i % 3]} for i in range(8)],
        "f1_micro",
    ),
    "one-hot columns": (
        {"problem": "multi_label", "label_columns": "toxic"},
        [{"text": "good", "toxic": i % 2} for i in range(8)],
        "subset_accuracy",
    ),
    "numbers": ({"problem": "regression"}, [{"text": "good", "score": [i, "0.5"]} for i in range(8)], "pearson"),
    "balanced": ({"class_weights": "balanced", "label_smoothing_factor": 0.1}, reviews(8), "accuracy"),
    "frozen": ({"freeze": "encoder", "gradient_checkpointing": True}, reviews(8), "accuracy"),
    "held out": ({"validation_fraction": 0.5, "eval_strategy": "steps", "eval_steps": 1}, reviews(8), "accuracy"),
    "transformers' BERT": ({"implementation": "bert", "bf16": True}, reviews(8), "accuracy"),
    "no checkpoints": ({"save_strategy": "no", "optim": "adafactor"}, reviews(8), "accuracy"),
}


@pytest.mark.parametrize(("changed", "rows", "metric"), KINDS.values(), ids=KINDS)
def test_kinds_of_classification(changed, rows, metric, argv, tmp_path):
    file = write_rows(tmp_path / "kind.jsonl", rows)
    validation = {} if "validation_fraction" in changed else {"validation_file": file}
    assert run(argv(train_file=file, **validation, **changed)) == 0
    metrics = json.loads((tmp_path / "run" / "metrics.json").read_text())
    assert metric in metrics["validation"]
    assert [point["step"] for point in metrics["history"] if "train" in point] == [metrics["steps"]]
    assert Path(tmp_path / "run" / "model.safetensors").exists()


SENTENCE = {"tokens": ["Anna", "saw", "Paris"], "tags": ["B-PER", "O", "B-LOC"]}
ANSWER = {"text": ["Paris"], "answer_start": [8]}
TASKS = {
    "entities": ("tagging", {}, [SENTENCE] * 8, {"entity_f1", "tag_accuracy"}),
    "IOB1": (
        "tagging",
        {"scheme": "iob1", "label_all_pieces": True},
        [{"words": "in Paris", "tags": "O I-LOC"}] * 8,
        {"entity_f1"},
    ),
    "plain tags": ("tagging", {"scheme": "plain"}, [{"words": "a film", "tags": "DET NOUN"}] * 8, {"f1_macro"}),
    "short windows": ("tagging", {"max_length": 4, "stride": 1}, [SENTENCE] * 8, {"entity_f1"}),
    "answers": (
        "question-answering",
        {"max_length": 9, "stride": 1},
        [{"question": "Paris", "context": "Anna in Paris", "answers": ANSWER} for _ in range(4)]
        + [{"question": "it", "context": "a film", "answers": {"text": [], "answer_start": []}} for _ in range(4)],
        {"exact_match", "f1", "has_answer_f1", "no_answer_f1"},
    ),
    "best threshold": (
        "question-answering",
        {"null_threshold": "best", "stride": 1},
        [{"question": "Paris", "context": "Anna in Paris", "answers": ANSWER}] * 8,
        {"f1", "null_threshold"},
    ),
    "generation": (
        "seq2seq",
        {"max_target_length": 8, "num_beams": 2},
        [{"source": "good film", "target": "bad film"}] * 8,
        {"rougeL", "perplexity"},
    ),
    "generation without texts": (
        "seq2seq",
        {"metrics": "loss", "label_smoothing_factor": 0.1, "max_target_length": 12},
        [{"source": "good film", "target": "bad film"}] * 8,
        {"perplexity"},
    ),
    "masked words": ("masked-lm", {}, reviews(40), {"perplexity"}),
    "masked whole lines": ("masked-lm", {"line_by_line": True}, reviews(40), {"perplexity"}),
}


@pytest.mark.parametrize(("task", "changed", "rows", "metrics"), TASKS.values(), ids=TASKS)
def test_tasks(task, changed, rows, metrics, argv, tmp_path):
    """Each trains, has its metrics, and has the same ones when its saved model is evaluated."""
    file = write_rows(tmp_path / "task.jsonl", rows)
    assert run(argv(task, train_file=file, validation_file=file, **changed)) == 0
    folder = tmp_path / "run"
    report = json.loads((folder / "metrics.json").read_text())
    assert metrics | {"loss"} <= report["validation"].keys()
    evaluated = tmp_path / "evaluated"
    given = [task, "--evaluate_only", f"--model={folder}", f"--validation_file={file}", f"--output_dir={evaluated}"]
    assert run(given) == 0
    again = json.loads((evaluated / "metrics.json").read_text())["validation"]
    assert again == pytest.approx(report["validation"], abs=1e-6)


def test_random_weights(argv, model, tmp_path):
    """A model of --config_name, with changed fields."""
    file = write_rows(tmp_path / "pairs.jsonl", [{"source": "good", "target": "bad"}] * 4)
    overrides = [
        "hidden_size=16",
        "num_hidden_layers=1",
        "num_attention_heads=2",
        "intermediate_size=16",
        "norm_first=true",
    ]
    new = {
        "model": None,
        "max_target_length": 12,
        "config_name": "configuration/tiny.json",
        "tokenizer_name": model,
        "train_file": file,
    }
    assert run([*argv("seq2seq", **new), "--config_overrides", *overrides]) == 0
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert (config["hidden_size"], config["norm_first"]) == (16, True)


WINDOWS = [
    ([[None, 0, 0, 1, None]], 1, [{0: 1, 1: 3}]),
    ([[None, 0, 1, 1, None], [None, 1, 2, 3, None]], 1, [{0: 1, 1: 2}, {2: 2, 3: 3}]),
    ([[None, 0, 1, 2, 3, None], [None, 2, 3, 4, None]], 2, [{0: 1, 1: 2, 2: 3}, {3: 2, 4: 3}]),
    ([[None, None]], 1, [{}]),
]


@pytest.mark.parametrize(("windows", "stride", "expected"), WINDOWS)
def test_each_word_is_tagged_in_one_window(windows, stride, expected):
    """By its first piece, in the window where that has more context."""
    assert tagged_words(windows, stride) == expected


CONTEXT = "In O\u0304saka, 1970."  # an uncased tokenizer drops the combining mark
OFFSETS = np.array([(0, 2), (3, 9), (9, 10), (11, 15), (15, 16)])


@pytest.mark.parametrize(
    ("answer", "expected"),
    [(("1970", 11), (4, 4)), ((" 1970.", 10), (4, 5)), ((CONTEXT, 0), (1, 5)), (("97", 12), (4, 4)), (None, (0, 0))],
)
def test_tokens_of_an_answer(answer, expected):
    assert positions(OFFSETS, answer) == expected
    assert positions(OFFSETS[:3], ("1970", 11)) == (0, 0)  # not in this window


def test_best_span():
    """The highest sum of a start and a later end within the longest answer."""
    random = np.random.default_rng(0)
    for width in (1, 2, 5, 9):
        start, end = random.normal(size=(2, 7))
        example = {"first": 2, "offsets": np.array([(i, i + 1) for i in range(4)])}
        pairs = [(start[2 + i] + end[2 + j], i, j + 1) for i in range(4) for j in range(i, min(i + width, 4))]
        assert best_span(example, start, end, width) == pytest.approx(max(pairs))


def test_squad_and_its_threshold():
    assert best_match("The  cat.", ["a cat", "dog"]) == (1.0, 1.0)
    assert best_match("black cat", ["cat"]) == (0.0, pytest.approx(2 / 3))
    assert best_match("", []) == (1.0, 1.0)
    answers = [("cat", 3.0), ("dog", 1.0), ("cat", -2.0)]
    golds = [[("cat", 0)], [], [("cat", 0)]]
    assert best_threshold(answers[:2], golds[:2]) == 2.0
    assert best_threshold(answers, golds) in (-3.0, 2.0)
