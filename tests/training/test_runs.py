"""Runs of train.py that are interrupted, distributed or diverge."""

import json
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from filelock import FileLock
from first_gradients import main as run_with_gradients
from safetensors.torch import load_file
from transformers import AutoTokenizer, BertForSequenceClassification, BertModel

import train
from support.folders import ROOT
from support.tiny import break_off, flags, report_of, reset_accelerate, reviews, run, write_rows

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}

# Nine rows of each task, and what it requires besides.
ROWS = {
    "classification": [{"text": " ".join(["good"] * (1 + i % 3)), "label": f"{i % 2}"} for i in range(9)],
    "question-answering": [
        {"question": "it", "context": "Anna in Paris" + " ." * i, "answers": {"text": ["Paris"], "answer_start": [8]}}
        for i in range(9)
    ],
    "tagging": [{"tokens": ["good"] * (1 + i), "tags": ["B-X", *["O"] * i]} for i in range(9)],
    "seq2seq": [{"source": "good", "target": " ".join(["bad"] * (1 + i))} for i in range(9)],
    "masked-lm": [{"text": "good bad film fun a very good bad film " * 9}] * 9,
}
MORE = {"question-answering": {"stride": 2}, "seq2seq": {"metrics": "loss", "max_target_length": 12}}


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def start(script: str, *argv: str, launcher: list = ()) -> subprocess.CompletedProcess:
    """Runs a script of this folder in a process of its own."""
    command = [sys.executable, *launcher, Path(__file__).with_name(script), *argv]
    return subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, check=False)


# ------------------------------------------------------------------------------------------------------- interruptions


@pytest.mark.parametrize("task", ROWS)
def test_killed_and_resumed(task, model, tmp_path):
    """The weights are those of the uninterrupted run, bit for bit: killed in two saves, and at random moments."""
    rows = write_rows(tmp_path / "rows.jsonl", ROWS[task])
    given = {"train_file": rows, "validation_file": rows, "model": model, "max_length": 16, "num_train_epochs": 3}
    steps = {"per_device_train_batch_size": 2, "save_strategy": "steps", "save_steps": 1, "save_total_limit": 1}
    argv = flags(**given, **steps, **MORE.get(task, {}))
    done = start("forked_runs.py", "0", "3", task, *argv, f"--output_dir={tmp_path / 'run'}")
    codes = json.loads(done.stdout.splitlines()[-1])
    assert codes[:3] == [0, -signal.SIGKILL, -signal.SIGKILL], done.stderr
    assert codes[-1] == 0, done.stderr
    whole, resumed = weights(tmp_path / "run-whole"), weights(tmp_path / "run")
    assert all(whole[name].equal(resumed[name]) for name in whole)
    reports = [report_of(tmp_path / name) for name in ("run-whole", "run")]
    for name in ("validation", "history", "step"):
        assert reports[0][name] == reports[1][name]
    assert not list((tmp_path / "run").glob(".checkpoint-*"))


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signals_save_and_stop(number, code, argv, tmp_path):
    given = argv(max_steps=100_000, save_strategy="steps", save_steps=5, save_total_limit=1)
    command = [sys.executable, ROOT / "scripts" / "train.py", *given]
    started = subprocess.Popen(command, env=ENVIRONMENT, stderr=-1, text=True)
    while not list((tmp_path / "run").glob("checkpoint-*")):
        assert started.poll() is None
        time.sleep(0.1)
    started.send_signal(number)
    _, errors = started.communicate(timeout=60)
    assert started.returncode == code
    (step,) = [path.name.split("-")[1] for path in (tmp_path / "run").glob("checkpoint-*")]
    assert f"step {int(step):,}" in errors.splitlines()[-1]


@pytest.fixture
def stopped(argv, tmp_path, monkeypatch):
    """The command line that continues a run, which has stopped after its last update, of four."""

    def stop(_):
        sys.exit(7)

    given = {"save_strategy": "steps", "save_steps": 1, "save_total_limit": 9}
    with monkeypatch.context() as patch:
        patch.setattr(train, "finish", stop)
        assert run(argv(**given)) == 7
    reset_accelerate()
    return lambda **changed: argv(**{**given, "resume_from_checkpoint": True, **changed})


def change_rows(folder: Path) -> None:
    write_rows(folder / "rows.jsonl", [*reviews(7), {"text": "bad", "label": "pos"}])


def change_processes(folder: Path) -> None:
    path = folder / "run" / "checkpoint-4" / "progress.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"processes": 2}))


CHANGES = [
    (None, {"learning_rate": 1e-3}, "--learning_rate"),
    (None, {"num_train_epochs": 2}, "--num_train_epochs"),
    (None, {"class_weights": "balanced"}, "--class_weights"),
    (change_rows, {}, "data"),
    (change_processes, {}, "processes"),
]


@pytest.mark.parametrize(("change", "changed", "named"), CHANGES)
def test_another_run_is_not_resumed(change, changed, named, stopped, tmp_path, capsys):
    recipe = (tmp_path / "run" / "recipe.yaml").read_bytes()
    given = stopped(**changed)
    if change is not None:
        change(tmp_path)
    capsys.readouterr()
    assert run(given) == 2
    assert named in capsys.readouterr().err.splitlines()[-1]
    assert (tmp_path / "run" / "recipe.yaml").read_bytes() == recipe


def test_what_changes_no_weight_may_change(stopped, tmp_path, capsys):
    """Such as the path of the data. What a killed process has left is removed."""
    rest = tmp_path / "run" / ".checkpoint-3-removed"
    rest.mkdir()
    given = {"save_steps": 3, "per_device_eval_batch_size": 3, "logging_steps": 1}
    moved = write_rows(tmp_path / "moved.jsonl", reviews(8))
    assert run(stopped(**given, train_file=moved)) == 0
    assert "step 4" in capsys.readouterr().out
    assert not rest.exists()


class Payload:
    """Creates a file when it is unpickled."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


@pytest.mark.parametrize(
    "name", ["model.safetensors", "optimizer.bin", "scheduler.bin", "random_states_0.pkl", "progress.json"]
)
def test_damaged_checkpoints_are_named(name, stopped, tmp_path, capsys):
    """And code in them does not run. The random states are not used."""
    path, ran = tmp_path / "run" / "checkpoint-4" / name, tmp_path / "the-code-ran"
    if name.endswith((".bin", ".pkl")):
        torch.save(Payload(ran), path)
    else:
        os.truncate(path, 100)
    capsys.readouterr()
    is_used = name != "random_states_0.pkl"
    assert run(stopped()) == (2 if is_used else 0)
    assert not is_used or "checkpoint-4" in capsys.readouterr().err.splitlines()[-1]
    assert not ran.exists()


@pytest.mark.parametrize("closed", ["stdout", "stderr"])
def test_training_continues_when_the_reader_of_its_output_has_gone(closed, argv, tmp_path):
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, ROOT / "scripts" / "train.py", *argv(validation_file=tmp_path / "rows.jsonl")]
    with os.fdopen(writing, "w") as pipe:
        output = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, closed: pipe}
        assert subprocess.run(command, env=ENVIRONMENT, check=False, **output).returncode == 0
    assert (tmp_path / "run" / "metrics.json").exists()


OPTIMIZERS = [
    {"optim": "sgd", "gradient_accumulation_steps": 2, "num_train_epochs": 2},
    {"optim": "adafactor", "lr_scheduler_type": "cosine", "bf16": True},
    {"optim": "adamw_torch_fused", "validation_fraction": 0.3, "train_sampling_strategy": "random"},
]


@pytest.mark.parametrize("changed", OPTIMIZERS)
def test_optimizers_are_resumed(changed, argv, tmp_path):
    """Also within an epoch."""
    given = argv(**changed, save_strategy="steps", save_steps=1, save_total_limit=9, resume_from_checkpoint=True)
    found = []
    for _ in range(2):
        assert run(given) == 0
        found.append(weights(tmp_path / "run"))
        break_off(tmp_path / "run", 1)
        reset_accelerate()
    assert all(value.equal(found[1][name]) for name, value in found[0].items())


@pytest.mark.parametrize(("epochs", "batch_size", "steps"), [(0.25, 2, 1), (0.3, 2, 2), (1.5, 3, 5), (2, 8, 2)])
def test_fractions_of_epochs(epochs, batch_size, steps, argv, tmp_path):
    assert run(argv(num_train_epochs=epochs, per_device_train_batch_size=batch_size)) == 0
    assert report_of(tmp_path / "run")["updates"] == steps


def test_the_loss_of_an_update_without_labels_is_zero(argv, tmp_path):
    """Here of a label with the weight 0: each batch is one row."""
    rows = [{**row, "label": int(i == 7)} for i, row in enumerate(reviews(8))]
    given = {"labels": [0, 1], "class_weights": [0, 1], "per_device_train_batch_size": 1, "logging_steps": 1}
    assert run(argv(train_file=write_rows(tmp_path / "labels.jsonl", rows), **given)) == 0
    losses = sorted(point["train"]["loss"] for point in report_of(tmp_path / "run")["history"])
    assert losses[:7] == [0] * 7
    assert losses[7] > 0


@pytest.fixture
def small_files():
    """Limits the size of files, so that writing fails as it does on a full disk."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda size=limits[0]: resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.bin"])
def test_a_checkpoint_that_does_not_fit(name, argv, stopped, small_files, tmp_path, capsys):
    """Leaves nothing, and the run is continued when there is space."""
    folder = tmp_path / "other"
    size = (tmp_path / "run" / "checkpoint-4" / name).stat().st_size
    given = argv(output_dir=folder, resume_from_checkpoint=True)
    small_files(size - 1000)
    assert run(given) == 2
    small_files()
    assert str(folder / "checkpoint-4") in capsys.readouterr().err.splitlines()[-1]
    assert not list(folder.glob("*checkpoint-*"))
    reset_accelerate()
    assert run(given) == 0


def test_a_model_that_does_not_fit(argv, small_files, tmp_path, monkeypatch, capsys):
    finish = train.finish

    def finish_on_a_full_disk(this):
        small_files(20_000)
        finish(this)

    with monkeypatch.context() as patch:
        patch.setattr(train, "finish", finish_on_a_full_disk)
        assert run(argv()) == 2
    small_files()
    assert str(tmp_path / "run") in capsys.readouterr().err.splitlines()[-1]
    assert not (tmp_path / "run" / "model.safetensors").exists()
    reset_accelerate()
    assert run(argv(resume_from_checkpoint=True)) == 0


def test_one_run_at_a_time_has_the_folder(argv, tmp_path, capsys):
    (tmp_path / "run").mkdir()
    with FileLock(tmp_path / "run" / train.LOCK):
        assert run(argv()) == 2
    assert "--output_dir" in capsys.readouterr().err.splitlines()[-1]
    reset_accelerate()
    assert run(argv()) == 0


# ---------------------------------------------------------------------------------------------------------- divergence


@pytest.mark.parametrize(("steps", "named"), [(4, "rows.jsonl, row"), (1, "--learning_rate")])
def test_a_run_that_diverges_saves_no_model(steps, named, argv, tmp_path, capsys):
    """Also if it does so in the last update. Rows whose loss is not finite are named."""
    given = {"learning_rate": 1e38, "warmup_steps": 0, "max_grad_norm": 0, "max_steps": steps}
    assert run(argv(**given)) == 1
    line = capsys.readouterr().err.splitlines()[-1]
    assert named in line
    assert "--learning_rate" in line
    assert not (tmp_path / "run" / "model.safetensors").exists()


def test_rows_that_cannot_be_evaluated_are_named(argv, model, tmp_path, capsys):
    broken = BertForSequenceClassification.from_pretrained(model, id2label={0: "neg", 1: "pos"})
    broken.classifier.bias.data.fill_(float("nan"))
    broken.save_pretrained(tmp_path / "broken")
    AutoTokenizer.from_pretrained(model).save_pretrained(tmp_path / "broken")
    given = {"model": tmp_path / "broken", "train_file": None, "test_file": tmp_path / "rows.jsonl"}
    assert run(argv(**given, evaluate_only=True)) == 1
    assert "rows.jsonl, row" in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_checkpoint_in_half_precision_trains_in_float32(dtype, argv, model, tmp_path):
    """At this learning rate an update is less than a bfloat16 resolves."""
    half = BertModel.from_pretrained(model, dtype=dtype)
    half.save_pretrained(tmp_path / "half")
    AutoTokenizer.from_pretrained(model).save_pretrained(tmp_path / "half")
    assert run(argv(model=tmp_path / "half")) == 0
    after = weights(tmp_path / "run")
    assert {tensor.dtype for tensor in after.values()} == {torch.float32}
    before = half.embeddings.token_type_embeddings.weight[0].float()
    assert not before.equal(after["model.embeddings.token_type_embeddings.weight"][0])


def test_both_implementations_train_alike(argv, steady_model, tmp_path):
    """The reference, from the same weights, has the same loss in each update."""
    trained = BertForSequenceClassification.from_pretrained(steady_model, id2label={0: "neg", 1: "pos"})
    trained.save_pretrained(tmp_path / "model")
    AutoTokenizer.from_pretrained(steady_model).save_pretrained(tmp_path / "model")
    given = {"model": tmp_path / "model", "learning_rate": 1e-3, "logging_steps": 1, "num_train_epochs": 2}
    losses = []
    for name in ("scratchbert", "bert"):
        assert run(argv(**given, implementation=name, output_dir=tmp_path / name)) == 0
        losses.append([point["train"]["loss"] for point in report_of(tmp_path / name)["history"] if "train" in point])
        reset_accelerate()
    assert len(losses[0]) == 8
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)


# ------------------------------------------------------------------------------------------------------ the best model


def test_the_best_model_is_saved(argv, tmp_path):
    """By error the first one is the best, since the learning rate is far too high."""
    rows = [{"text": row["text"], "score": i / 8} for i, row in enumerate(reviews(8))]
    file = write_rows(tmp_path / "numbers.jsonl", rows)
    best = {"metric_for_best_model": "mean_squared_error", "early_stopping_patience": 2, "problem": "regression"}
    given = argv(train_file=file, validation_file=file, **best, learning_rate=0.3, num_train_epochs=30)
    assert run(given) == 0
    report = report_of(tmp_path / "run")
    errors = {
        point["step"]: point["validation"]["mean_squared_error"] for point in report["history"] if "validation" in point
    }
    assert min(errors, key=errors.__getitem__) == report["step"] == report["updates"] - 2 * 4
    assert report["validation"]["mean_squared_error"] == pytest.approx(errors[report["step"]])


def test_early_stopping(argv, tmp_path, monkeypatch):
    """After three evaluations without a higher accuracy. Of equal ones the one with the lowest loss is the best."""
    values = iter([(0.5, 0.4), (0.55, 0.4), (0.5, 0.4), (0.6, 0.4), (0.6, 0.3), (0.55, 0.2), (0.6, 0.35), (0.9, 0.1)])

    def evaluate(*_):
        return dict(zip(("accuracy", "loss"), next(values), strict=True)), []

    runs = []
    monkeypatch.setattr(train, "evaluate", evaluate)
    monkeypatch.setattr(train, "finish", runs.append)
    file = write_rows(tmp_path / "rows.jsonl", reviews(8))
    given = {"validation_file": file, "num_train_epochs": 20, "early_stopping_patience": 3, "save_total_limit": 1}
    assert run(argv(**given)) == 0
    (this,) = runs
    assert (this.progress.epoch, this.progress.best_step) == (7, 20)
    assert [path.name for path in this.checkpoints.complete()] == ["checkpoint-20", "checkpoint-28"]


# ----------------------------------------------------------------------------------------------------------- processes

LAUNCH = ["-m", "accelerate.commands.launch", "--config_file", ROOT / "configuration" / "two_process.yaml"]


def gradients(task: str, given: dict, folder: Path, launcher: list = (), **changed) -> dict[str, torch.Tensor]:
    """Those of the first update, of nine rows, in a run with this folder."""
    file = folder.with_suffix(".pt")
    argv = [task, *flags(**given, **changed, output_dir=folder, train_sampling_strategy="random", max_length=32)]
    if launcher:
        done = start("first_gradients.py", file, *argv, launcher=launcher)
        assert done.returncode == 0, done.stderr
    else:
        assert run_with_gradients(str(file), argv) == 0
    return torch.load(file)


@pytest.mark.parametrize("task", ROWS)
def test_small_batches_of_one_and_of_two_processes(task, steady_model, tmp_path):
    """The gradient is that of one large batch, and nine rows of validation are counted, in order."""
    rows = write_rows(tmp_path / "rows.jsonl", ROWS[task])
    given = {"train_file": rows, "validation_file": rows, "model": steady_model, "max_steps": 1, "max_grad_norm": 0}
    given |= MORE.get(task, {})
    if task == "seq2seq":
        given["metrics"] = "error_rate"
    large = gradients(task, given, tmp_path / "large", per_device_train_batch_size=100)
    small = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 100}
    for folder, launcher in (("one", []), ("two", LAUNCH)):
        reset_accelerate()
        found = gradients(task, given, tmp_path / folder, launcher, **small)
        for name, gradient in large.items():
            torch.testing.assert_close(found[name], gradient, atol=1e-6, rtol=0, msg=name)
    reports = [report_of(tmp_path / name) for name in ("large", "two")]
    assert reports[1]["processes"] == 2
    assert reports[0]["validation"] == pytest.approx(reports[1]["validation"], abs=1e-4)
    if task != "masked-lm":
        files = [tmp_path / name / "predictions_validation.jsonl" for name in ("large", "two")]
        lines = [file.read_text().splitlines() for file in files]
        columns = [[{name: json.loads(line)[name] for name in ROWS[task][0]} for line in each] for each in lines]
        assert columns[0] == columns[1] == ROWS[task]


def test_a_signal_to_one_of_two_processes_stops_both(argv, tmp_path):
    """After the next update, with one checkpoint."""
    given = argv(max_steps=1000, save_strategy="steps", save_steps=1000)
    done = start("signalled.py", "1", *given, launcher=LAUNCH)
    assert done.returncode != 0
    assert [path.name for path in (tmp_path / "run").glob("*checkpoint-*")] == ["checkpoint-4"]
    assert "step 4" in done.stderr
