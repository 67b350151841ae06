"""What the user of a training command sees: the dry run, the end of a run, its files, and extending it."""

import json
import math
import os
import re
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from sklearn.metrics import accuracy_score
from transformers import get_scheduler

import finetune_classification
import finetune_seq2seq
from support.finetuning import TASKS, TEXTS, assert_one_line, breaking_off, main_of, write_labels, write_rows
from toolkit.finetuning import loop
from toolkit.finetuning.loop import LogLines, Training
from toolkit.finetuning.optimizer import make_optimizer
from toolkit.finetuning.task import modules_of

pytestmark = pytest.mark.usefixtures("quiet_only_here", "new_accelerator")

RUN = finetune_classification.main


def report_of(folder: Path) -> dict:
    return json.loads((folder / "metrics.json").read_text())


def rows_of(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def points(report: dict, name: str) -> list:
    return [point[name] for point in report["history"] if name in point]


@pytest.fixture
def held_out(tmp_path) -> str:
    return write_labels(tmp_path / "held_out.jsonl", [1, 0, 1, 1, 0, 0, 1, 0])


# ------------------------------------------------------------------------------------------------------------ dry run


@pytest.mark.parametrize("task", TASKS)
def test_a_dry_run_shows_rows_and_lengths_and_writes_nothing(task, flags, tmp_path, capsys):
    main, given = main_of(task, tmp_path)
    before = sorted(tmp_path.rglob("*"))
    assert main([*flags(**given, epochs=3), "--dry_run"]) == 0
    assert [path for path in sorted(tmp_path.rglob("*")) if path not in before] in ([], [tmp_path / "train.jsonl"])
    said = capsys.readouterr().out
    sequence = {"classification": 3, "tags": 4, "answers": 5, "pairs": 3, "masked words": 24}[task]
    assert re.search(rf"^train: \d+ examples, .*{sequence} \(median\)", said, re.MULTILINE)
    assert re.search(r"^validation: \d+ examples", said, re.MULTILINE)
    assert len(re.findall(r"^rows.jsonl, row \d.*\[CLS\] ", said, re.MULTILINE)) == 3
    shown = {
        "classification": "[CLS] good [SEP] → 0",
        "tags": "[CLS] good/B-X bad/O [SEP]",
        "pairs": "good [SEP] → bad",
    }
    assert shown.get(task, "[CLS]") in said
    assert re.search(
        r"^\d+ updates of about \d\.\d\d s: 0:00:\d\d \(hours:minutes:seconds\), without evaluations\. Nothing was",
        said,
        re.M,
    )


def test_the_lengths_of_a_streamed_training_set(flags, tmp_path, capsys):
    main, given = main_of("masked words", tmp_path)
    assert main([*flags(**given, max_steps=2, line_by_line=True), "--streaming", "--dry_run"]) == 0
    assert re.search(
        r"^train: 8 examples, 88 tokens; .*, of which the first 8 are counted", capsys.readouterr().out, re.M
    )


# -------------------------------------------------------------------------------------------------------- end of a run


def test_the_end_of_a_run_says_what_was_delivered(flags, held_out, tmp_path, capsys):
    argv = flags(epochs=2, validation_file=held_out, test_file=held_out)
    assert RUN(argv) == 0
    said, run = capsys.readouterr().out.splitlines(), tmp_path / "run"
    report = report_of(run)
    end = said[[line.startswith("validation: ") for line in said].index(True) :]
    assert end[1].startswith(f"test: loss {report['test']['loss']:.4f}, accuracy {report['test']['accuracy']:.4f}")
    step = int(report["checkpoint"].split("-")[1])
    best = max(point["accuracy"] for point in points(report, "validation"))
    assert end[2] == (
        f"{run} has the model. The weights are those of step {step} (epoch {step / 4:.4g}), which had the best "
        f"validation accuracy, {best:.4g}."
    )
    assert f'AutoModelForSequenceClassification.from_pretrained("{run}", trust_remote_code=True)' in end[3]
    size = sum(path.stat().st_size for path in (run / "checkpoints").rglob("*") if path.is_file())
    assert f"{run / 'checkpoints'} takes {size / 1e6:.1f} MB" in end[4]


def test_without_a_validation_set_the_last_step_is_delivered(flags, capsys):
    assert RUN(flags()) == 0
    assert "The weights are those of the last step, 4, because" in capsys.readouterr().out


def test_no_checkpoints_are_kept_of_a_finished_run(flags, held_out, tmp_path, monkeypatch, capsys):
    argv, run = flags(epochs=2, keep_checkpoints=0, validation_file=held_out), tmp_path / "run"
    update, kept = Training.update, []

    def break_off(self, group):
        kept.append(len(self.checkpoints.complete()))
        if len(kept) == 6:
            raise KeyboardInterrupt
        return update(self, group)

    with monkeypatch.context() as patch:
        patch.setattr(Training, "update", break_off)
        assert RUN(argv) == 130
    assert max(kept) == 1  # as long as the run is not finished
    assert RUN([*argv, "--resume"]) == 0
    assert "resuming at step 4 of 8" in capsys.readouterr().out
    assert not (run / "checkpoints").exists()
    before = (run / "model.safetensors").read_bytes()
    assert_one_line(lambda: RUN([*argv, "--resume"]), "is finished, and its checkpoints were removed;", capsys)
    assert (run / "model.safetensors").read_bytes() == before


# --------------------------------------------------------------------------------------------------------- predictions


def test_predictions_of_labels_give_the_metrics(flags, held_out, tmp_path):
    train = write_labels(tmp_path / "train.jsonl", [1, 0] * 4)
    assert RUN(flags(train, validation_file=held_out, test_file=train)) == 0
    for split, file in (("validation", held_out), ("test", train)):
        rows = rows_of(tmp_path / "run" / f"predictions_{split}.jsonl")
        given = rows_of(Path(file))
        assert [row["text"] for row in rows] == [row["text"] for row in given]
        labels = [row["label"] for row in rows]
        assert labels == [str(row["label"]) for row in given]
        accuracy = accuracy_score(labels, [row["prediction"] for row in rows])
        assert accuracy == pytest.approx(report_of(tmp_path / "run")[split]["accuracy"])
        assert all(0.5 <= row["score"] <= 1 for row in rows)
        assert rows[2]["place"] == f"{Path(file).name}, row 3 (line 3)"
    assert (tmp_path / "run" / "confusion_matrix.png").read_bytes().startswith(b"\x89PNG")


def test_predictions_keep_the_columns_of_the_rows(flags, tmp_path):
    """A column that has the name of one of ours, and another value, gets another name."""
    rows = [{"id": i, "sentence": text, "label": i % 2, "score": 3, "more": [i]} for i, text in enumerate(TEXTS)]
    file = write_rows(tmp_path / "rows.jsonl", rows)
    assert RUN(flags(file, validation_file=file, all_scores="true")) == 0
    for row, given in zip(rows_of(tmp_path / "run" / "predictions_validation.jsonl"), rows, strict=True):
        assert {name: row[name] for name in ("id", "sentence", "more")} == {
            name: given[name] for name in ("id", "sentence", "more")
        }
        assert (row["text"], row["label"], row["input_score"]) == (given["sentence"], str(given["label"]), 3)
        assert list(row["scores"]) == ["0", "1"]
        assert row["scores"][row["prediction"]] == row["score"] == max(row["scores"].values())
        assert sum(row["scores"].values()) == pytest.approx(1)


@pytest.mark.parametrize(
    ("problem", "labels", "prediction"),
    [("multi_label", ["a|b", "b", "a", "", "b", "a|b", "b", "a"], list), ("regression", [0.5, 1, 2, 3] * 2, list)],
)
def test_predictions_of_other_problems(problem, labels, prediction, flags, tmp_path):
    file = write_labels(tmp_path / "rows.jsonl", labels)
    assert RUN(flags(file, validation_file=file, problem=problem)) == 0
    rows = rows_of(tmp_path / "run" / "predictions_validation.jsonl")
    assert len(rows) == 8
    assert all(isinstance(row["prediction"], prediction) for row in rows)
    if problem == "multi_label":
        assert all(row["prediction"] == [name for name in "ab" if row["scores"][name] > 0.5] for row in rows)
    else:
        error = sum((row["prediction"][0] - row["label"][0]) ** 2 for row in rows) / 8
        assert error == pytest.approx(report_of(tmp_path / "run")["validation"]["mean_squared_error"], rel=1e-5)
    assert not (tmp_path / "run" / "confusion_matrix.png").exists()


def test_predictions_of_the_other_tasks(flags, tmp_path):
    for task in TASKS[1:]:
        (tmp_path / task).mkdir()
        main, given = main_of(task, tmp_path / task)
        if task == "pairs":
            given["metrics"] = "error_rate"
        assert main(flags(**given, output=f"run-{task}")) == 0
    found = {task: rows_of(tmp_path / f"run-{task}" / "predictions_validation.jsonl") for task in TASKS[1:]}
    assert [len(rows) for rows in found.values()] == [8, 8, 8, 4]
    metrics = {task: report_of(tmp_path / f"run-{task}")["validation"] for task in TASKS[1:]}
    right = [a == b for row in found["tags"] for a, b in zip(row["tags"], row["predicted_tags"], strict=True)]
    assert sum(right) / len(right) == pytest.approx(metrics["tags"]["accuracy"])
    exact = [row["prediction"] == "" for row in found["answers"]]  # no question has an answer
    assert 100 * sum(exact) / 8 == pytest.approx(metrics["answers"]["exact_match"])
    wrong = [row["prediction"] != row["target"] for row in found["pairs"][:1]]  # one source, in eight rows
    assert sum(wrong) == pytest.approx(metrics["pairs"]["item_error_rate"])
    assert all(row["context"] == row["question"] == "a" for row in found["answers"])
    assert all(row["tokens"] == row["words"] for row in found["tags"])
    for row in found["masked words"]:
        assert len(row["masked_words"]) == len(row["prediction"])
    answers = json.loads((tmp_path / "run-answers" / "predictions_validation.json").read_text())
    assert list(answers.values()) == [row["prediction"] for row in found["answers"]]


def test_evaluations_of_generators_print_outputs(flags, tmp_path, capsys):
    file = write_rows(tmp_path / "rows.jsonl", [{"source": f"good film {i}", "target": "bad"} for i in range(5)])
    assert finetune_seq2seq.main(flags(file, validation_file=file, max_target_length=4, metrics="error_rate")) == 0
    samples = [line for line in capsys.readouterr().out.splitlines() if line.startswith("  good film")]
    assert len(samples) == 3
    predictions = rows_of(tmp_path / "run" / "predictions_validation.jsonl")
    assert samples[1] == f"  good film 1 → {predictions[1]['prediction']}  (target: bad)"


# ---------------------------------------------------------------------------------------------- length of the training


@pytest.mark.parametrize(("epochs", "batch_size", "steps"), [(0.25, 2, 1), (0.3, 2, 2), (1.5, 3, 5), (2, 8, 2)])
def test_fractions_of_epochs(epochs, batch_size, steps, flags, tmp_path):
    assert RUN(flags(epochs=epochs, batch_size=batch_size)) == 0
    report = report_of(tmp_path / "run")
    assert report["steps"] == steps
    assert report["epochs"] == pytest.approx(steps / math.ceil(8 / batch_size))


def rates(steps: int, schedule: str = "linear", **arguments) -> list[float]:
    """The learning rate after each update of a schedule of so many steps."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=5e-5)
    made = get_scheduler(schedule, optimizer, round(0.1 * steps), steps, scheduler_specific_kwargs=arguments)
    found = []
    for _ in range(steps):
        optimizer.step()
        made.step()
        found.append(made.get_last_lr()[0])
    return found


def test_a_finished_run_can_be_extended(flags, held_out, tmp_path, monkeypatch, capsys):
    given = {"validation_file": held_out, "log_steps": 1, "early_stopping": 9}
    assert RUN(flags(**given)) == 0
    for name in ("whole", "broken"):
        (tmp_path / name).symlink_to(tmp_path / f"copy-{name}")
        os.system(f"cp -r {tmp_path / 'run'} {tmp_path / f'copy-{name}'}")
    before = report_of(tmp_path / "run")
    assert RUN([*flags(**given, epochs=3, output="whole"), "--resume"]) == 0
    assert "the run of 4 updates is extended; the learning rate follows" in capsys.readouterr().out
    after = report_of(tmp_path / "whole")
    assert (after["steps"], after["epochs"]) == (12, 3)
    assert after["history"][: len(before["history"])] == before["history"]
    assert points(after, "learning_rate") == pytest.approx(rates(4) + rates(12)[4:])
    # It breaks off and continues like any other run.
    argv = [*flags(**given, epochs=3, output="broken"), "--resume"]
    with breaking_off(monkeypatch, after=5):
        assert RUN(argv) == 130
    assert RUN(argv) == 0
    weights = [load_file(tmp_path / name / "model.safetensors") for name in ("whole", "broken")]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    # Neither other flags nor fewer updates extend it.
    capsys.readouterr()
    for changed in ({"learning_rate": 1e-3, "epochs": 5}, {"epochs": 2}):
        argv = [*flags(**given | changed, output="whole"), "--resume"]
        assert_one_line(lambda argv=argv: RUN(argv), "--resume: the run", capsys)


def test_a_run_that_is_not_finished_is_not_extended(flags, monkeypatch, capsys):
    with breaking_off(monkeypatch, after=2):
        assert RUN(flags(save_steps=1)) == 130
    capsys.readouterr()
    argv = [*flags(save_steps=1, epochs=2), "--resume"]
    assert_one_line(lambda: RUN(argv), "has other flags; expected the same: --epochs was 1.0 and is 2.0", capsys)


# --------------------------------------------------------------------------------------------------------- optimisation


def test_gradient_checkpointing_changes_no_number(flags, tmp_path):
    for name in ("true", "false"):
        assert RUN(flags(output=name, gradient_checkpointing=name, log_steps=1)) == 0
    weights = [load_file(tmp_path / name / "model.safetensors") for name in ("true", "false")]
    for name, expected in weights[1].items():
        torch.testing.assert_close(weights[0][name], expected, rtol=0, atol=1e-6)


def test_gradient_checkpointing_is_on(flags, monkeypatch):
    calls = []
    original = torch.utils.checkpoint.checkpoint
    monkeypatch.setattr("torch.utils.checkpoint.checkpoint", lambda *a, **k: calls.append(k) or original(*a, **k))
    monkeypatch.setattr("transformers.modeling_utils.checkpoint", torch.utils.checkpoint.checkpoint, raising=False)
    seen = []
    update = Training.update
    monkeypatch.setattr(
        Training, "update", lambda self, group: seen.append(self.model.is_gradient_checkpointing) or update(self, group)
    )
    assert RUN(flags(gradient_checkpointing=True, max_steps=1)) == 0
    assert seen == [True]


@pytest.mark.parametrize(
    ("name", "expected"),
    [("adamw", torch.optim.AdamW), ("adafactor", torch.optim.Adafactor), ("sgd", torch.optim.SGD)],
)
def test_the_optimizer(name, expected, flags, tmp_path, monkeypatch):
    made = []
    monkeypatch.setattr(loop, "make_optimizer", lambda *given: made.append(make_optimizer(*given)) or made[-1])
    assert RUN(flags(optimizer=name, max_steps=2, save_steps=1)) == 0
    assert type(made[0]) is expected
    # Its state is in the checkpoints.
    whole = load_file(tmp_path / "run" / "model.safetensors")
    assert RUN(flags(optimizer=name, max_steps=2, save_steps=1, output="other", epochs=1)) == 0
    for path in (tmp_path / "other" / "checkpoints").glob("step-00000002*"):
        os.system(f"rm -r {path} {tmp_path / 'other' / 'model.safetensors'}")
    assert RUN([*flags(optimizer=name, max_steps=2, save_steps=1, output="other", epochs=1), "--resume"]) == 0
    other = load_file(tmp_path / "other" / "model.safetensors")
    assert all(torch.equal(whole[each], other[each]) for each in whole)


@pytest.mark.parametrize(
    ("schedule", "given", "arguments"),
    [
        ("cosine_with_restarts", ["num_cycles=2"], {"num_cycles": 2}),
        ("cosine_with_min_lr", ["min_lr_rate=0.5"], {"min_lr_rate": 0.5}),
        ("polynomial", ["power=2", "lr_end=1e-6"], {"power": 2, "lr_end": 1e-6}),
    ],
)
def test_arguments_of_the_schedule(schedule, given, arguments, flags, tmp_path):
    argv = [*flags(epochs=2, log_steps=1, schedule=schedule), "--lr_scheduler_kwargs", *given]
    assert RUN(argv) == 0
    found = points(report_of(tmp_path / "run"), "learning_rate")
    assert found == pytest.approx(rates(8, schedule, **arguments))
    assert found != pytest.approx(rates(8, "linear"))


@pytest.mark.parametrize(
    ("schedule", "given"),
    [("linear", "cycles=2"), ("constant", "num_cycles=2"), ("cosine_with_min_lr", None), ("linear", "num_cycles")],
)
def test_arguments_that_the_schedule_does_not_have(schedule, given, flags, tmp_path, capsys):
    argv = flags(schedule=schedule, lr_scheduler_kwargs=given)
    assert_one_line(lambda: RUN(argv), f"--lr_scheduler_kwargs {'has' if given == 'num_cycles' else 'is'}", capsys)
    assert not (tmp_path / "run").exists()


def test_the_loss_of_an_update_without_labels_is_zero(flags, tmp_path):
    """Here of labels with the weight 0: each batch is one row."""
    argv = flags(write_labels(tmp_path / "rows.jsonl", [0] * 7 + [1]), batch_size=1, log_steps=1)
    assert RUN([*argv, "--labels", "0", "1", "--class_weights", "0", "1"]) == 0
    losses = points(report_of(tmp_path / "run"), "loss")
    assert sorted(losses)[:7] == [0] * 7
    assert max(losses) > 0


# ---------------------------------------------------------------------------------------------------------------- noise


def test_new_weights_are_named_once(flags, held_out, monkeypatch, capsys, model, said):
    update = Training.update

    def stop(self, group):
        os.kill(os.getpid(), signal.SIGINT)
        return update(self, group)

    with monkeypatch.context() as patch:
        patch.setattr(Training, "update", stop)
        assert RUN(flags(validation_file=held_out)) == 130
    first = f"{model} has no weights of classifier; they are random before the training"
    assert capsys.readouterr().out.splitlines()[0] == first
    assert RUN([*flags(validation_file=held_out), "--resume"]) == 0
    output = capsys.readouterr()
    assert "random" not in output.out + output.err
    assert said() == []


def test_modules_of_new_weights():
    names = [f"model.decoder.blocks.{i}.cross_attention.{part}.weight" for i in range(12) for part in ("key", "value")]
    assert modules_of(
        [*names, "model.pooler.dense.weight", "lm_head.norm.weight", "lm_head.bias", "classifier.bias"]
    ) == [
        "classifier",
        "lm_head",
        "model.decoder.blocks.*.cross_attention",
        "model.pooler",
    ]


def test_a_log_file_has_a_line_for_each_state(flags, held_out, capsys, monkeypatch):
    monkeypatch.setattr(loop, "SECONDS_BETWEEN_LOG_LINES", 0)
    assert RUN(flags(validation_file=held_out)) == 0
    lines = capsys.readouterr().err.splitlines()
    assert [re.search(r"(\d)/4", line)[1] for line in lines if line] == ["0", "1", "2", "3", "4"]
    assert "\r" not in "".join(lines)


def test_a_log_file_has_a_line_a_minute(capsys):
    bar = LogLines(total=100, mininterval=loop.SECONDS_BETWEEN_LOG_LINES, miniters=1)
    clock = iter(range(0, 1000, 7))
    bar._time = lambda: next(clock) + bar.start_t
    for _ in range(100):
        bar.update()
    lines = capsys.readouterr().err.splitlines()
    assert 11 <= len(lines) <= 14  # in 700 seconds
