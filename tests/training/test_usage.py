"""Runs of train.py with other libraries: PEFT, FSDP and the Hub."""

import json
import os
import subprocess
import sys

import pytest

import train
from support.folders import ROOT
from support.hub_server import serving, use
from support.tiny import reviews, save_tiny, write_rows

pytestmark = pytest.mark.usefixtures("new_accelerator")


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return save_tiny(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("task", ["classification", "tagging", "question-answering", "masked-lm"])
def test_lora(task, model, tmp_path):
    """Adapters are merged: the saved folder opens without PEFT, and a run is resumed."""
    pytest.importorskip("peft")
    row = {"tokens": ["good"], "tags": ["B-X"], "question": "it", "context": "good", "text": "good bad film fun a very"}
    rows = [{**row, "label": i % 2, "answers": {"text": ["good"], "answer_start": [0]}} for i in range(8)]
    file = write_rows(tmp_path / "rows.jsonl", rows)
    argv = [
        task,
        f"--train_file={file}",
        f"--validation_file={file}",
        f"--model={model}",
        f"--output_dir={tmp_path / 'run'}",
        "--lora_rank=2",
        "--max_length=16",
        "--num_train_epochs=1",
        *(["--stride=2"] if task == "question-answering" else []),
    ]
    assert train.main(argv) == 0
    evaluated = [task, "--evaluate_only", f"--model={tmp_path / 'run'}", f"--validation_file={file}"]
    assert train.main([*evaluated, f"--output_dir={tmp_path / 'evaluated'}"]) == 0
    metrics = [
        json.loads((tmp_path / name / "metrics.json").read_text())["validation"] for name in ("run", "evaluated")
    ]
    assert metrics[0] == pytest.approx(metrics[1], abs=1e-5)


TOKEN = "hf_" + "Ada" * 12


def test_what_is_pushed(model, tmp_path, monkeypatch, capsys):
    """Model, code, tokenizer and card, and no rows, local paths or checkpoints."""
    file = write_rows(tmp_path / "rows.jsonl", reviews(8))
    flags = {"train_file": file, "validation_file": file, "model": model, "max_length": 16, "num_train_epochs": 1}
    hub_flags = ["--push_to_hub", "--hub_model_id=ada/reviews", "--hub_private_repo"]
    argv = ["classification", *(f"--{name}={value}" for name, value in flags.items()), *hub_flags]
    with serving(**{TOKEN: {"ada"}}) as hub:
        use(hub, monkeypatch, tmp_path / "cache")
        assert train.main([*argv, f"--output_dir={tmp_path / 'run'}"]) == 2
        assert "token" in capsys.readouterr().err.splitlines()[-1]
        use(hub, monkeypatch, tmp_path / "cache", TOKEN)
        assert train.main([*argv, f"--output_dir={tmp_path / 'run'}"]) == 0
        repository = hub.repositories["ada/reviews"]
        files = repository.commits[repository.refs["main"]].files
    assert repository.private
    assert {
        "model.safetensors",
        "config.json",
        "tokenizer.json",
        "README.md",
        "modeling_scratchbert.py",
    } <= files.keys()
    assert not [name for name in files if name.startswith(("predictions", "checkpoint-", "logs", ".checkpoint"))]
    assert not [name for name, blob in files.items() if str(tmp_path).encode() in blob.content]


def test_fsdp(model, tmp_path):
    """Two processes that share the weights of a model save it whole."""
    file = write_rows(tmp_path / "rows.jsonl", reviews(9))
    flags = {
        "train_file": file,
        "validation_file": file,
        "model": model,
        "max_length": 16,
        "output_dir": tmp_path / "run",
    }
    launcher = ["-m", "accelerate.commands.launch", "--config_file", ROOT / "configuration" / "fsdp_cpu.yaml"]
    argv = ["classification", *(f"--{name}={value}" for name, value in flags.items())]
    command = [sys.executable, *launcher, ROOT / "scripts" / "train.py", *argv]
    done = subprocess.run(
        command, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    evaluated = ["classification", "--evaluate_only", f"--model={tmp_path / 'run'}", f"--validation_file={file}"]
    assert train.main([*evaluated, f"--output_dir={tmp_path / 'evaluated'}"]) == 0
    metrics = [
        json.loads((tmp_path / name / "metrics.json").read_text())["validation"] for name in ("run", "evaluated")
    ]
    assert metrics[0] == pytest.approx(metrics[1], abs=1e-5)
