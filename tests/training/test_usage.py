"""Runs of train.py with other libraries: PEFT, FSDP and the Hub."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from huggingface_hub import HfApi, constants
from safetensors.torch import load_file

from modeling_scratchbert import ScratchBertModel
from support.folders import CODE, ROOT
from support.hub_server import TOKEN, serving, use
from support.tiny import break_off, flags, report_of, reset_accelerate, reviews, run, write_rows
from toolkit.training import push_run

ROW = {"tokens": ["good"], "tags": ["B-X"], "question": "it", "context": "good", "text": "good bad film fun a very"}
ROWS = [
    {**ROW, "label": i % 2, "answers": {"text": ["good"], "answer_start": [0]}, "source": "good", "target": "bad"}
    for i in range(9)
]
MORE = {"question-answering": {"stride": 2}, "seq2seq": {"max_target_length": 8, "source_column": "source"}}


@pytest.fixture
def given(argv, tmp_path):
    """The command line of a run on rows of all tasks."""
    file = write_rows(tmp_path / "all.jsonl", ROWS)

    def make(task: str, **changed) -> list[str]:
        files = {"train_file": file, "validation_file": file, "max_length": 16}
        return argv(task, **{**files, **MORE.get(task, {}), **changed})

    return make


def assert_same_when_evaluated(task: str, folder: Path, tmp_path: Path) -> None:
    reset_accelerate()
    files = {"model": folder, "validation_file": tmp_path / "all.jsonl", "output_dir": tmp_path / "evaluated"}
    assert run([task, *flags(evaluate_only=True, **files)]) == 0
    metrics = [report_of(each)["validation"] for each in (folder, tmp_path / "evaluated")]
    assert metrics[0] == pytest.approx(metrics[1], abs=1e-5, rel=1e-5)


@pytest.mark.parametrize("task", ["classification", "tagging", "question-answering", "masked-lm", "seq2seq"])
def test_lora(task, given, model, tmp_path):
    """Adapters are merged: the saved folder opens without PEFT, and only queries, values and a new head have changed. A
    resumed run has the same weights."""
    pytest.importorskip("peft")
    if task == "seq2seq":  # a generator, whose cross-attention is trained
        model = tmp_path / "generator"
        assert run(given(task, output_dir=model)) == 0
        reset_accelerate()
        before = load_file(model / "model.safetensors")
    else:
        tensors = ScratchBertModel.from_pretrained(model).state_dict()
        before = {f"model.{name}": value for name, value in tensors.items()}
    changed = {"lora_rank": 2, "lora_dropout": 0.1, "learning_rate": 1e-2, "save_strategy": "steps", "save_steps": 1}
    argv = given(task, **changed, model=model, resume_from_checkpoint=True)
    assert run(argv) == 0
    assert_same_when_evaluated(task, tmp_path / "run", tmp_path)
    after = load_file(tmp_path / "run" / "model.safetensors")
    kept = after.keys() & before.keys()
    adapted = {name for name in kept if not after[name].equal(before[name])}
    assert adapted == {name for name in kept if name.endswith(("query.weight", "value.weight"))} != set()
    reset_accelerate()
    break_off(tmp_path / "run", report_of(tmp_path / "run")["updates"] - 1)
    assert run(argv) == 0
    resumed = load_file(tmp_path / "run" / "model.safetensors")
    assert all(value.equal(resumed[name]) for name, value in after.items())


def test_what_is_pushed(argv, tmp_path, monkeypatch, capsys):
    """Model, code, tokenizer and card, and no rows, local paths, checkpoints or logs."""
    hub_flags = {"push_to_hub": True, "hub_model_id": "ada/reviews", "hub_private_repo": True}
    held_out = write_rows(tmp_path / "held_out.jsonl", reviews(8))
    given = argv(validation_file=held_out, report_to="tensorboard", **hub_flags)
    with serving(**{TOKEN: {"ada"}}) as hub:
        use(hub, monkeypatch, tmp_path / "cache")
        assert run(given) == 2
        assert "token" in capsys.readouterr().err.splitlines()[-1]
        use(hub, monkeypatch, tmp_path / "cache", TOKEN)
        assert run(given) == 0
        files, is_private = hub.files("ada/reviews"), hub.repositories["ada/reviews"].private
    assert is_private
    model = {"model.safetensors", "config.json", "probe.json", "tokenizer.json", "tokenizer_config.json"}
    report = {"README.md", "metrics.json", "labels_validation.csv", "curves.png", "confusion_matrix.png", "recipe.yaml"}
    assert files.keys() - {".gitattributes"} == CODE | model | report
    assert not [name for name, content in files.items() if str(tmp_path).encode() in content]
    recipe = yaml.safe_load(files["recipe.yaml"])
    assert (recipe["train_file"], recipe["output_dir"], recipe["seed"]) == (["rows.jsonl"], "run", 42)


@pytest.mark.parametrize("problem", ["no rights", "public", "interrupted", "token in the message"])
def test_a_push_that_fails_leaves_the_folder(argv, tmp_path, monkeypatch, capsys, problem):
    repo = "bob/reviews" if problem == "no rights" else "ada/reviews"
    with serving(**{TOKEN: {"ada"}}) as hub:
        use(hub, monkeypatch, tmp_path / "cache", TOKEN)
        if problem == "public":
            HfApi().create_repo(repo)
        hub.breaks = lambda method, path: problem == "interrupted" and "/commit/" in path
        if problem == "token in the message":
            monkeypatch.setattr(constants, "ENDPOINT", f"{hub.endpoint}/{TOKEN}")
        assert run(argv(push_to_hub=True, hub_model_id=repo, hub_private_repo=True)) == 2
        assert all(len(repository.commits) == 1 for repository in hub.repositories.values())
    line = capsys.readouterr().err.splitlines()[-1]
    assert repo in line
    assert TOKEN not in line
    assert (tmp_path / "run" / "model.safetensors").exists()


@pytest.mark.parametrize("name", ["mine.py", "README.md", "config.json"])
@pytest.mark.parametrize("secret", [TOKEN, "AKIA" + "A1" * 8, "https://ada:pa55@example.org", "a token"])
def test_a_secret_is_not_pushed(tmp_path, monkeypatch, name, secret):
    (tmp_path / name).write_text(f"first line\nsecret = '{secret}'\n")
    with serving(**{TOKEN: {"ada"}, "a token": {"ada"}}) as hub:
        use(hub, monkeypatch, tmp_path / "cache", "a token")
        with pytest.raises(ValueError, match=rf"{name}, line 2,"):
            push_run(tmp_path, "ada/reviews", private=False)
        assert hub.requests == []


TIED = {"tie_encoder_decoder": True}


@pytest.mark.parametrize(("task", "changed"), [("classification", {}), ("seq2seq", {}), ("seq2seq", TIED)])
def test_fsdp(task, changed, given, steady_model, tmp_path):
    """Two processes that share the weights of a model train as one does, save it whole, and continue from its last
    checkpoint."""
    launcher = ["-m", "accelerate.commands.launch", "--config_file", ROOT / "configuration" / "fsdp_cpu.yaml"]
    steps = {"save_strategy": "steps", "save_steps": 1, "save_total_limit": 9, "logging_steps": 1, **changed}
    argv = given(task, **steps, model=steady_model, resume_from_checkpoint=True)
    one = {"per_device_train_batch_size": 4, "output_dir": tmp_path / "one"}
    assert run(given(task, **steps, model=steady_model, **one)) == 0
    folder, reports = tmp_path / "run", []
    for _ in range(2):
        command = [sys.executable, *launcher, ROOT / "scripts" / "train.py", *argv]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        reports.append((report_of(folder)["validation"], load_file(folder / "model.safetensors")))
        if len(reports) == 1:
            assert_same_when_evaluated(task, folder, tmp_path)
            histories = [report_of(each)["history"] for each in (folder, tmp_path / "one")]
            losses = [[point["train"]["loss"] for point in each if "train" in point] for each in histories]
            assert losses[0] == pytest.approx(losses[1], abs=1e-4)
            break_off(folder, 1)
    assert "resuming at step 1 of 3" in done.stdout
    assert reports[0][0] == pytest.approx(reports[1][0], abs=1e-6)
    for name, weight in reports[0][1].items():
        torch.testing.assert_close(reports[1][1][name], weight, rtol=0, atol=1e-6)
