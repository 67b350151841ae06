"""Fine-tuning on two processes, as `accelerate launch` starts them with the files in configuration/, beside one."""

import csv
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForSeq2SeqLM, AutoModelForSequenceClassification, AutoTokenizer

import finetune_seq2seq
from support import launched
from support.comparison import assert_same_gradients
from support.finetuning import save_tiny
from support.folders import ROOT

REVIEWS = ROOT / "tests" / "data" / "movie_reviews.csv"
LETTERS = "abcdefghijklmnopqrstuvwxyz"

pytestmark = pytest.mark.usefixtures("quiet_only_here")


@pytest.fixture(scope="module")
def arguments(tmp_path_factory):
    """The command line of a run of nine updates on 64 reviews, evaluated on 61: two processes have not as many."""
    folder = tmp_path_factory.mktemp("processes")
    model = Path(save_tiny(folder / "model", [*LETTERS, *(f"##{letter}" for letter in LETTERS)]))
    config = json.loads((model / "config.json").read_text())
    config |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    (model / "config.json").write_text(json.dumps(config))
    with REVIEWS.open(encoding="utf-8", newline="") as file:
        rows = list(csv.reader(file))[:62]
    validation = folder / "validation.csv"
    with validation.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows(rows)

    def make(name: str, batch_size: int, **flags) -> list[str]:
        flags = {
            "model": model,
            "output": folder / name,
            "train_file": REVIEWS,
            "validation_file": validation,
            "epochs": 3,
            "max_length": 24,
            "batch_size": batch_size,
            "gradient_accumulation_steps": 2,
            "eval_batch_size": 7,
            "class_weights": "balanced",
            "learning_rate": 1e-3,
            "log_steps": 1,
            "trackers": "none",
            **flags,
        }
        return [str(folder / f"{name}.pt"), *(f"--{flag}={value}" for flag, value in flags.items())]

    make.folder, make.rows = folder, rows[1:]
    return make


@pytest.fixture(scope="module")
def alone(arguments) -> Path:
    """What one process makes of it, with batches that are twice as large."""
    assert launched.main(arguments("alone", 12)) == 0
    return arguments.folder / "alone"


def launch(configuration: str, argv: list[str], script: str = launched.__file__) -> subprocess.CompletedProcess:
    file = ROOT / "configuration" / configuration
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", file, script, *argv]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=240)


def measured(folder: Path) -> dict:
    return json.loads((folder / "metrics.json").read_text())


def losses(report: dict) -> list[float]:
    """Of the updates."""
    return [point["loss"] for point in report["history"] if "loss" in point]


def accuracy(folder: Path, rows: list[list[str]]) -> float:
    """Of a saved model, by nothing of ours but the model."""
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    inputs = tokenizer([text for text, *_ in rows], truncation=True, max_length=24, padding=True, return_tensors="pt")
    with torch.no_grad():
        predicted = model(**inputs).logits.argmax(-1).tolist()
    return sum(model.config.id2label[each] == row[1] for each, row in zip(predicted, rows, strict=True)) / len(rows)


@pytest.mark.parametrize("configuration", ["two_process.yaml", "fsdp_cpu.yaml"])
def test_two_processes_do_what_one_does(configuration, arguments, alone):
    name = Path(configuration).stem
    done = launch(configuration, arguments(name, 6))
    assert done.returncode == 0, done.stderr
    folder = arguments.folder / name
    # The gradient is that of batches twice as large.
    gradients, expected = (torch.load(arguments.folder / f"{each}.pt") for each in (name, "alone"))
    assert_same_gradients(gradients, expected)
    # So are the losses, and each row is evaluated once: 61 rows, of which a 62nd would show.
    own, one = measured(folder), measured(alone)
    assert own["processes"] == 2
    assert len(losses(own)) == 9
    assert losses(own) == pytest.approx(losses(one), abs=1e-3)
    assert own["validation"]["accuracy"] == accuracy(folder, arguments.rows)
    # One set of files, one line for each evaluation, one model.
    missing = {"probe.json"} if "fsdp" in configuration else set()  # whose weights come as a state dict
    assert {path.name for path in folder.iterdir()} == {path.name for path in alone.iterdir()} - missing
    assert (alone / "probe.json").exists()
    AutoModelForSequenceClassification.from_pretrained(folder if not missing else alone, verify=True)
    assert sum(line.startswith("step ") for line in done.stdout.splitlines()) == 3


@pytest.mark.parametrize("configuration", ["two_process.yaml", "fsdp_cpu.yaml"])
def test_the_last_row_of_an_epoch_is_trained_on_without_a_row_for_the_other_process(configuration, arguments):
    """25 rows are two steps of 12, and one of a single row."""
    train = arguments.folder / "25.csv"
    with train.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows([["text", "label", "rating"], *arguments.rows[:25]])
    flags = {"train_file": train, "gradient_accumulation_steps": 1, "epochs": 2}
    name = f"odd_{Path(configuration).stem}"
    assert launched.main(arguments(f"{name}_alone", 12, **flags)) == 0
    done = launch(configuration, arguments(name, 6, **flags))
    assert done.returncode == 0, done.stderr
    own, one = (losses(measured(arguments.folder / each)) for each in (name, f"{name}_alone"))
    assert len(own) == 6
    assert own == pytest.approx(one, abs=1e-4)


def test_sharded_runs_resume(arguments):
    flags = {"save_steps": 2, "keep_checkpoints": 9}
    assert launch("fsdp_cpu.yaml", arguments("fsdp_broken", 6, **flags, max_steps=4)).returncode == 0
    folder = arguments.folder / "fsdp_broken"
    before = accuracy(folder, arguments.rows), measured(folder)
    for path in (folder / "checkpoints").glob("step-00000004*"):
        path.rename(folder / path.name)  # as if it had never been written
    (folder / "model.safetensors").unlink()
    done = launch("fsdp_cpu.yaml", arguments("fsdp_broken", 6, **flags, max_steps=4, resume=True))
    assert done.returncode == 0, done.stderr
    assert "resuming at step 3 of 4" in done.stdout
    after = measured(folder)
    assert (accuracy(folder, arguments.rows), after["validation"]) == (before[0], before[1]["validation"])
    assert losses(after) == pytest.approx(losses(before[1]), abs=1e-6)


@pytest.mark.parametrize(
    "more",
    [[], ["--tie_encoder_decoder"], ["--config_overrides", "share_embeddings=false"]],
    ids=["shared_embeddings", "tied", "unshared_embeddings"],
)
def test_a_sharded_encoder_and_decoder_train_as_on_one_process(more, arguments, tmp_path):
    """The best checkpoint is loaded, texts are generated, and the last row has none for the other process."""
    file = tmp_path / "pairs.jsonl"
    words = ["cat", "dog", "bird", "fish", "horse", "cow", "pig", "hen", "goose"]
    file.write_text("".join(json.dumps({"source": word, "target": word[::-1]}) + "\n" for word in words))
    common = ["--model", arguments.folder / "model", "--train_file", file, "--validation_file", file, *more]
    common += ["--max_length", "16", "--max_target_length", "9", "--metrics", "error_rate", "--trackers", "none"]
    common += ["--epochs", "2", "--learning_rate", "1e-3", "--log_steps", "1"]
    common = list(map(str, common))
    assert finetune_seq2seq.main([*common, "--output", str(tmp_path / "one"), "--batch_size", "4"]) == 0
    argv = [*common, "--output", str(tmp_path / "two"), "--batch_size", "2"]
    done = launch("fsdp_cpu.yaml", argv, finetune_seq2seq.__file__)
    assert done.returncode == 0, done.stderr
    own, one = measured(tmp_path / "two"), measured(tmp_path / "one")
    assert len(losses(own)) == 6
    assert losses(own) == pytest.approx(losses(one), abs=1e-4)
    assert own["validation"] == pytest.approx(one["validation"], abs=1e-3)
    models = [AutoModelForSeq2SeqLM.from_pretrained(tmp_path / name).state_dict() for name in ("two", "one")]
    for name in models[1].keys() - {name for name in models[1] if name.endswith("key.bias")}:
        expected = models[1][name]  # not of those biases: their gradient is 0, and Adam scales rounding errors up
        torch.testing.assert_close(models[0][name], expected, rtol=0, atol=1e-4)


def test_an_error_on_two_processes(arguments):
    done = launch("two_process.yaml", arguments("wrong", 6, text_column="words"))
    assert done.returncode != 0
    assert "finetune_classification.py: there is no column 'words' for the text" in done.stderr


def test_processes_of_open_mpi_are_connected(arguments):
    common = {**os.environ, "OMP_NUM_THREADS": "1", "OMPI_COMM_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        common["MASTER_PORT"] = str(free.getsockname()[1])
    command = [sys.executable, launched.__file__, *arguments("mpi", 6, max_steps=1)]
    started = [
        subprocess.Popen(
            command,
            env={**common, "OMPI_COMM_WORLD_RANK": rank, "OMPI_COMM_WORLD_LOCAL_RANK": rank},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in ("0", "1")
    ]
    errors = [process.communicate(timeout=240)[1] for process in started]
    assert [process.returncode for process in started] == [0, 0], errors
    assert measured(arguments.folder / "mpi")["processes"] == 2


def test_seeds_and_evaluations_on_two_processes(arguments):
    done = launch("two_process.yaml", [*arguments("seeds", 6, epochs=1), "--seeds", "0", "1"])
    assert done.returncode == 0, done.stderr
    folder = arguments.folder / "seeds"
    found = measured(folder)
    assert found["processes"] == 2
    assert found["seeds"]["runs"].keys() == {"0", "1"}
    assert done.stdout.count("the best on the validation set") == 1
    argv = [f"--model={folder}", "--evaluate_only", f"--validation_file={arguments.folder / 'validation.csv'}"]
    done = launch("two_process.yaml", [str(folder / "evaluated.pt"), *argv, f"--output={folder / 'evaluated'}"])
    assert done.returncode == 0, done.stderr
    assert measured(folder / "evaluated")["validation"] == pytest.approx(found["validation"], rel=1e-5)
    assert len((folder / "evaluated" / "predictions_validation.jsonl").read_text().splitlines()) == len(arguments.rows)
