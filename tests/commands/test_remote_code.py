"""Code in a model's folder: it runs only with --trust_remote_code, and what this package wrote opens without it."""

import importlib
import json
import os
import subprocess
import sys
import tomllib

import pytest
from transformers import AutoTokenizer, BertConfig, BertModel

import convert_checkpoint
import predict
import train
from modeling_scratchbert import ScratchBertForCausalLM
from modeling_scratchbert.configuration_scratchbert import AUTO_MAP
from support.folders import ROOT, SCRIPTS
from support.models import tiny_config
from toolkit import remote_code
from toolkit.files import read_json
from toolkit.hub import check_source
from toolkit.remote_code import digests

pytestmark = pytest.mark.usefixtures("quiet_only_here")


@pytest.fixture
def folder(minilm, tmp_path):
    folder = tmp_path / "model"
    tokenizer = AutoTokenizer.from_pretrained(minilm)
    ScratchBertForCausalLM(tiny_config(vocab_size=len(tokenizer), is_decoder=True)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def change_code(folder):
    """Adds a line to the code, which leaves a file behind when it runs."""
    ran = folder / "the-code-ran"
    with (folder / "modeling_scratchbert.py").open("a") as file:
        file.write(f"\nopen({str(ran)!r}, 'w').close()\n")
    return ran


def set_field(file, name, value):
    file.write_text(json.dumps(read_json(file) | {name: value}))


def run(folder, *flags) -> subprocess.CompletedProcess:
    """In a process that has not imported the package, whose classes would otherwise be taken."""
    command = [sys.executable, SCRIPTS / "generate.py", folder, "Dogs bark.", "--max_new_tokens", "1", *flags]
    environment = {**os.environ, "HF_MODULES_CACHE": str(folder.parent / "modules"), "HF_HUB_OFFLINE": "1"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def test_changed_code_runs_only_with_the_flag(folder):
    ran = change_code(folder)
    done = run(folder)
    assert (done.returncode, done.stdout, ran.exists()) == (2, "", False), done.stderr
    (line,) = done.stderr.splitlines()
    assert "in modeling_scratchbert.py; expected the same code. If you trust it, --trust_remote_code runs it." in line
    assert run(folder, "--trust-remote-code").returncode == 0
    assert ran.exists()


def test_the_package_opens_what_it_wrote(folder):
    done = run(folder)
    assert done.returncode == 0, done.stderr
    assert not (folder.parent / "modules").exists()


# What each command that opens a checkpoint is called with.
OPENING = {
    "benchmark": ["MODEL", "--threads", "1"],
    "check_determinism": ["MODEL"],
    "check_parity": ["MODEL"],
    "convert_checkpoint": ["MODEL", "NEW"],
    "course": ["check", "1", "--model", "MODEL"],
    "predict": ["MODEL", "ROWS", "--output", "NEW"],
    "train": ["classification", "--model", "MODEL", "--output_dir", "NEW", "--train_file", "ROWS"],
}


def test_every_command_is_known():
    commands = {path.stem for path in SCRIPTS.glob("*.py")} - {"__main__"}
    assert commands == OPENING.keys()


@pytest.mark.parametrize("kind", ["bert", "scratchbert"])
@pytest.mark.parametrize("command", OPENING)
def test_every_command_refuses_other_code(folder, tmp_path, command, kind, capsys):
    """Only a command that can run the code recommends it."""
    if kind == "scratchbert":
        change_code(folder)
    else:
        BertModel(BertConfig(**tiny_config().to_dict())).save_pretrained(folder)
        set_field(folder / "config.json", "auto_map", {"AutoModel": "own.AlibiBert"})
    (tmp_path / "rows.csv").write_text("text,label\nDogs bark.,1\n")
    places = {"MODEL": str(folder), "ROWS": str(tmp_path / "rows.csv")}
    argv = [places.get(word, word.replace("NEW", str(tmp_path / "new"))) for word in OPENING[command]]
    before = set(tmp_path.iterdir())
    assert importlib.import_module(command).main(argv) == 2
    told = capsys.readouterr()
    (line,) = told.err.splitlines()
    assert {"bert": "own.AlibiBert", "scratchbert": "in modeling_scratchbert.py"}[kind] in line
    assert str(folder) in line
    assert ("--trust_remote_code" in line) == (command == "predict")
    assert set(tmp_path.iterdir()) == before


def test_a_tokenizer_with_code_is_refused(folder, minilm, tmp_path, capsys):
    """A training opens it from another folder than the model."""
    set_field(folder / "tokenizer_config.json", "auto_map", {"AutoTokenizer": ["own.Tokenizer", None]})
    (folder / "config.json").unlink()
    argv = ["--model", minilm, "--tokenizer_name", str(folder), "--output_dir", str(tmp_path / "new")]
    assert train.main(["masked-lm", *argv, "--train_file", "x.txt"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"--tokenizer_name {folder}: It has its own code in tokenizer_config.json" in line


@pytest.mark.parametrize("auto_map", [{}, AUTO_MAP, {"AutoModel": AUTO_MAP["AutoModel"]}])
def test_a_bert_that_names_our_code_opens(folder, tmp_path, auto_map):
    BertModel(BertConfig(**tiny_config().to_dict())).save_pretrained(folder)
    set_field(folder / "config.json", "auto_map", auto_map)
    assert convert_checkpoint.main([str(folder), str(tmp_path / "new")]) == 0


@pytest.mark.parametrize(
    "change", ["code", "missing file", "auto_map", "other repository", "tokenizer", "generate", "kernel"]
)
def test_other_code_is_refused(folder, change, capsys):
    config = folder / "config.json"
    auto_map = read_json(config)["auto_map"]
    if change == "code":
        change_code(folder)
    elif change == "missing file":
        (folder / "attention.py").unlink()
    elif change == "auto_map":
        set_field(config, "auto_map", auto_map | {"AutoModel": "other.Model"})
    elif change == "other repository":
        set_field(config, "auto_map", auto_map | {"AutoModel": f"ada/code--{auto_map['AutoModel']}"})
    elif change == "kernel":
        set_field(config, "parts", [{"attn_implementation": {"}": "sdpa", "": "someone/attention"}}])
    elif change == "tokenizer":
        set_field(folder / "tokenizer_config.json", "auto_map", {"AutoTokenizer": ["own.Tokenizer", None]})
    else:
        (folder / "custom_generate").mkdir()
        (folder / "custom_generate" / "generate.py").write_text("")
    assert predict.main([str(folder), "--text", "Dogs bark."]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "--trust_remote_code runs it" in line


@pytest.mark.parametrize(
    ("fields", "kernels"),
    [
        ({"_attn_implementation": "a/b", "name": "c/d"}, ["a/b"]),
        ({"encoder": {"attn_implementation": {"": "sdpa", "a/b": "c/d"}}}, ["c/d"]),
        ({"attn_implementation": "sdpa", "_attn_implementation_internal": None}, []),
    ],
)
def test_kernels_of_the_hub_are_found(fields, kernels):
    assert list(remote_code.hub_kernels(fields)) == kernels


def test_code_of_a_release_is_accepted(folder, tmp_path, monkeypatch):
    with (folder / "attention.py").open("a") as file:
        file.write("# as in the release\n")
    (folder / "unpadding.py").write_bytes((folder / "unpadding.py").read_bytes().replace(b"\n", b"\r\n"))
    with pytest.raises(ValueError, match=r"in attention\.py; expected the same"):
        check_source(str(folder))
    monkeypatch.setattr(remote_code, "RELEASES", tmp_path / "released_code.json")
    remote_code.RELEASES.write_text(json.dumps({"0.0.1": digests(folder)}))
    check_source(str(folder))
    remote_code.record_release("0.0.2")
    assert list(read_json(remote_code.RELEASES)) == ["0.0.1", "0.0.2"]


def test_a_release_keeps_its_code():
    """Who changes the code of a released version gives it another number."""
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    releases = read_json(remote_code.RELEASES)
    assert releases.get(version) in (None, digests(ROOT / "modeling_scratchbert"))


def test_without_the_package_its_own_code_must_be_trusted(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "modeling_scratchbert", None)
    with pytest.raises(ImportError, match="--trust_remote_code"):
        check_source(str(folder), trust_remote_code=False)
