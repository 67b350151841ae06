"""Runs of train.py that are interrupted, distributed or diverge."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from accelerate.state import AcceleratorState, GradientState, PartialState
from safetensors.torch import load_file
from transformers import AutoTokenizer, BertConfig, BertModel

import train
from support.first_gradients import main as run_with_gradients
from support.folders import ROOT
from support.tiny import reviews, save_tiny, write_rows

pytestmark = pytest.mark.usefixtures("new_accelerator")

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return save_tiny(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def steady_model(model, tmp_path_factory) -> str:
    """Without dropout, so that gradients do not depend on how rows are put into batches."""
    folder = str(tmp_path_factory.mktemp("steady"))
    config = BertConfig.from_pretrained(model, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    BertModel.from_pretrained(model, config=config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(model).save_pretrained(folder)
    return folder


def command(task: str, **given) -> list[str]:
    given = {"max_length": 16, "save_total_limit": 1, **given}
    return [task, *(f"--{name}={value}" for name, value in given.items())]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


@pytest.mark.parametrize("task", ["classification", "masked-lm"])
def test_killed_and_resumed(task, model, tmp_path):
    """The weights are those of the uninterrupted run, bit for bit: killed in two saves, and at random moments."""
    count = 24 if task == "classification" else 100  # masked-lm puts several texts in a row
    rows = write_rows(tmp_path / "rows.jsonl", reviews(count))
    flags = {"train_file": rows, "validation_file": rows, "model": model, "output_dir": tmp_path / "run"}
    argv = command(
        task, **flags, per_device_train_batch_size=4, num_train_epochs=3, save_strategy="steps", save_steps=1
    )
    script = ROOT / "tests" / "support" / "forked_runs.py"
    done = subprocess.run(
        [sys.executable, script, "0", "3", *argv], env=ENVIRONMENT, capture_output=True, text=True, check=False
    )
    codes = json.loads(done.stdout.splitlines()[-1])
    assert codes[:3] == [0, -signal.SIGKILL, -signal.SIGKILL], done.stderr
    assert codes[-1] == 0, done.stderr
    whole, resumed = weights(tmp_path / "run-whole"), weights(tmp_path / "run")
    assert all(whole[name].equal(resumed[name]) for name in whole)
    metrics = [json.loads((tmp_path / name / "metrics.json").read_text()) for name in ("run-whole", "run")]
    assert metrics[0]["validation"] == metrics[1]["validation"]
    assert not list((tmp_path / "run").glob(".checkpoint-*"))


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signals_save_and_stop(number, code, model, tmp_path):
    rows = write_rows(tmp_path / "rows.jsonl", reviews(8))
    flags = {"train_file": rows, "model": model, "output_dir": tmp_path / "run", "max_steps": 100_000}
    argv = command("classification", **flags, save_strategy="steps", save_steps=5)
    started = subprocess.Popen(
        [sys.executable, ROOT / "scripts" / "train.py", *argv], env=ENVIRONMENT, stderr=-1, text=True
    )
    while not list((tmp_path / "run").glob("checkpoint-*")):
        assert started.poll() is None
        time.sleep(0.1)
    started.send_signal(number)
    _, errors = started.communicate(timeout=60)
    assert started.returncode == code
    (step,) = [path.name.split("-")[1] for path in (tmp_path / "run").glob("checkpoint-*")]
    assert f"step {int(step):,}" in errors.splitlines()[-1]


CHANGES = [{"learning_rate": 1e-3}, {"train_file": "changed"}, {"num_train_epochs": 2}, {"class_weights": "balanced"}]


@pytest.mark.parametrize("changed", CHANGES)
def test_another_run_is_not_resumed(changed, model, tmp_path, monkeypatch, capsys):
    rows = write_rows(tmp_path / "rows.jsonl", reviews(8))
    flags = {"train_file": rows, "model": model, "output_dir": tmp_path / "run", "num_train_epochs": 1}
    monkeypatch.setattr(train, "finish", lambda _: sys.exit(7))
    with pytest.raises(SystemExit, match="7"):
        train.main(command("classification", **flags))
    if "train_file" in changed:
        write_rows(tmp_path / "rows.jsonl", [*reviews(7), {"text": "bad", "label": "pos"}])
        changed = {}
    capsys.readouterr()
    assert train.main([*command("classification", **{**flags, **changed}), "--resume_from_checkpoint"]) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert all(f"--{name}" in line for name in changed) or "data" in line


def test_rows_of_a_diverged_loss_are_named(model, tmp_path, capsys):
    rows = write_rows(tmp_path / "rows.jsonl", reviews(8))
    flags = {"train_file": rows, "model": model, "output_dir": tmp_path / "run", "learning_rate": 1e38}
    assert train.main(command("classification", **flags, warmup_steps=0, max_grad_norm=0)) == 1
    line = capsys.readouterr().err.splitlines()[-1]
    assert "rows.jsonl, row" in line
    assert "--learning_rate" in line


def test_a_checkpoint_in_bfloat16_trains_in_float32(model, tmp_path):
    half = tmp_path / "half"
    BertModel.from_pretrained(model, dtype=torch.bfloat16).save_pretrained(half)
    AutoTokenizer.from_pretrained(model).save_pretrained(half)
    rows = write_rows(tmp_path / "rows.jsonl", reviews(8))
    flags = {"train_file": rows, "model": half, "output_dir": tmp_path / "run", "num_train_epochs": 1}
    assert train.main(command("classification", **flags)) == 0
    assert {tensor.dtype for tensor in weights(tmp_path / "run").values()} == {torch.float32}


def test_the_best_model_is_saved(model, tmp_path):
    """By error the first one is the best, since the learning rate is far too high."""
    rows = write_rows(
        tmp_path / "rows.jsonl", [{"text": row["text"], "score": i / 8} for i, row in enumerate(reviews(8))]
    )
    flags = {"train_file": rows, "validation_file": rows, "model": model, "output_dir": tmp_path / "run"}
    best = {"metric_for_best_model": "mean_squared_error", "early_stopping_patience": 2}
    argv = command("classification", **flags, **best, problem="regression", learning_rate=0.3, num_train_epochs=30)
    assert train.main(argv) == 0
    report = json.loads((tmp_path / "run" / "metrics.json").read_text())
    errors = {
        point["step"]: point["validation"]["mean_squared_error"] for point in report["history"] if "validation" in point
    }
    assert min(errors, key=errors.__getitem__) == report["step"] == report["steps"] - 2
    assert report["validation"]["mean_squared_error"] == pytest.approx(errors[report["step"]])


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


def gradients(task: str, flags: dict, file: Path, launcher: list[str] = (), **changed) -> dict[str, torch.Tensor]:
    """Those of the first update, of nine rows."""
    argv = command(task, **flags, **changed, train_sampling_strategy="random")
    if launcher:
        script = ROOT / "tests" / "support" / "first_gradients.py"
        done = subprocess.run(
            [*launcher, script, file, *argv], env=ENVIRONMENT, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
    else:
        assert run_with_gradients(str(file), argv) == 0
    return torch.load(file)


def flags_of(task: str, steady_model: str, tmp_path: Path) -> dict:
    rows = write_rows(tmp_path / "rows.jsonl", ROWS[task])
    more = {"question-answering": {"stride": 2}, "seq2seq": {"metrics": "loss", "max_target_length": 12}}.get(task, {})
    return {
        "train_file": rows,
        "validation_file": rows,
        "model": steady_model,
        "max_steps": 1,
        "max_grad_norm": 0,
        **more,
    }


def reset_accelerate() -> None:
    for state in (AcceleratorState, PartialState, GradientState):
        state._reset_state()


def assert_equal(found: dict, expected: dict) -> None:
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, atol=1e-6, rtol=0, msg=name)


@pytest.mark.parametrize("task", ROWS)
def test_accumulated_batches_are_one_large_batch(task, steady_model, tmp_path):
    flags = flags_of(task, steady_model, tmp_path)
    large = gradients(
        task, flags, tmp_path / "1.pt", output_dir=tmp_path / "1", per_device_train_batch_size=100, max_length=32
    )
    reset_accelerate()
    small = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 100}
    assert_equal(gradients(task, flags, tmp_path / "2.pt", output_dir=tmp_path / "2", max_length=32, **small), large)


LAUNCH = [
    sys.executable,
    "-m",
    "accelerate.commands.launch",
    "--config_file",
    ROOT / "configuration" / "two_process.yaml",
]


@pytest.mark.parametrize("task", ["classification", "question-answering"])
def test_two_processes(task, steady_model, tmp_path):
    """The gradient is that of one large batch, and nine rows of validation are counted, in order."""
    flags = flags_of(task, steady_model, tmp_path)
    one = {"output_dir": tmp_path / "1", "per_device_train_batch_size": 100}
    large = gradients(task, flags, tmp_path / "1.pt", max_length=32, **one)
    two = {"output_dir": tmp_path / "2", "per_device_train_batch_size": 2, "gradient_accumulation_steps": 100}
    assert_equal(gradients(task, flags, tmp_path / "2.pt", LAUNCH, max_length=32, **two), large)
    metrics = [json.loads((tmp_path / name / "metrics.json").read_text()) for name in ("1", "2")]
    assert metrics[1]["processes"] == 2
    assert metrics[0]["validation"] == pytest.approx(metrics[1]["validation"], abs=1e-4)
    predictions = [(tmp_path / name / "predictions_validation.jsonl").read_text().splitlines() for name in ("1", "2")]
    texts = [[json.loads(line).get("text", line) for line in lines] for lines in predictions]
    assert len(texts[0]) == 9
    assert task != "classification" or texts[0] == texts[1]
