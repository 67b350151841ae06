"""The package as it is handed on: a wheel and a source distribution, used in an environment that has nothing else."""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from support.folders import ROOT
from support.tiny import save_tiny

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
FILES = {path.relative_to(ROOT).as_posix() for path in (ROOT / "modeling_scratchbert").rglob("*.py")}
FILES.add("modeling_scratchbert/py.typed")
EXTRAS = PROJECT["optional-dependencies"]
COMMANDS = "scratchbert_commands"
SHIPPED = {
    f"{COMMANDS}/{path.relative_to(ROOT).as_posix()}"
    for folder in ("scripts", "configuration")
    for path in (ROOT / folder).rglob("*")
    if path.is_file() and not any(part.startswith((".", "__pycache__")) for part in path.relative_to(ROOT).parts)
}


def run(*command, **options) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, **options)
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    """The source distribution, and the wheel that is built out of it."""
    folder = tmp_path_factory.mktemp("dist")
    # A copy: setuptools writes into the source folder, where another process may build as well.
    ignored = shutil.ignore_patterns(".*", "build", "demo", "*.egg-info")
    source = shutil.copytree(ROOT, folder / "source", ignore=ignored)
    run(sys.executable, "-m", "build", "--outdir", folder, source)
    return folder


def test_the_wheel_and_the_source_distribution_are_complete(built):
    [wheel], [source] = built.glob("*.whl"), built.glob("*.tar.gz")
    native = {path.relative_to(ROOT).as_posix() for path in (ROOT / "modeling_scratchbert/cpu/native").iterdir()}
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        [metadata] = [archive.read(name).decode() for name in names if name.endswith(".dist-info/METADATA")]
    code = {name for name in names if ".dist-info/" not in name and not name.endswith(".so")}
    assert code == FILES | SHIPPED | native
    assert any(name.endswith("licenses/LICENSE") for name in names)
    requirements = [line for line in metadata.splitlines() if line.startswith("Requires-Dist: ")]
    required = {Requirement(line.split(": ")[1]).name for line in requirements if "extra ==" not in line}
    assert required == {"torch", "transformers", "safetensors"}
    assert "# ScratchBert" in metadata  # the README, which a registry shows
    with tarfile.open(source) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    others = {name.removeprefix(f"{COMMANDS}/") for name in SHIPPED}
    assert names >= FILES | native | others | {"LICENSE", "README.md", "pyproject.toml", "setup.cfg"}


def test_the_oldest_versions_are_the_lowest_that_are_admitted():
    """Of all that the tests and those of training install, but torch."""
    listed = [*PROJECT["dependencies"], *(line for name in ("test", "train", "plot", "lora") for line in EXTRAS[name])]
    lowest = {
        requirement.name: bound.version
        for requirement in map(Requirement, listed)
        for bound in requirement.specifier
        if bound.operator == ">="
    }
    text = (ROOT / "constraints-oldest.txt").read_text()
    pins = dict(line.split("==") for line in text.splitlines() if line and not line.startswith("#"))
    for name in lowest.keys() - {"torch"}:
        assert Version(pins[name]) == Version(lowest[name]), name


USE = """
import importlib.metadata, json
import torch
from transformers import AutoModel, BertModel
import modeling_scratchbert
from modeling_scratchbert import ScratchBertConfig, ScratchBertModel

sizes = dict(vocab_size=40, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64)
model = ScratchBertModel(ScratchBertConfig(**sizes)).eval()
model.save_pretrained("saved")
model.save_as_bert("bert")
opened = AutoModel.from_pretrained("saved"), BertModel.from_pretrained("bert"), model.optimize_for_inference()
ids, mask = torch.tensor([[2, 7, 9, 3, 0], [2, 8, 3, 0, 0]]), torch.tensor([[1, 1, 1, 1, 0], [1, 1, 1, 0, 0]])
with torch.no_grad():
    states = [each.eval()(ids, attention_mask=mask).last_hidden_state[mask.bool()] for each in opened]
for each in states[1:]:
    torch.testing.assert_close(each, states[0], rtol=0, atol=1e-6)
installed = [distribution.name.lower() for distribution in importlib.metadata.distributions()]
print(json.dumps([modeling_scratchbert.__file__, installed]))
"""


def test_installed_into_an_empty_environment(built, tmp_path):
    run(sys.executable, "-m", "venv", tmp_path / "env")
    python = tmp_path / "env" / "bin" / "python"
    pip = [python, "-m", "pip", "--disable-pip-version-check"]
    run(*pip, "install", "-c", ROOT / "constraints.txt", next(built.glob("*.whl")))
    assert "No broken requirements" in run(*pip, "check")
    file, found = json.loads(run(python, "-I", "-c", USE, cwd=tmp_path).splitlines()[-1])
    assert Path(file).is_relative_to(tmp_path / "env")
    extras = {Requirement(line).name for group in EXTRAS.values() for line in group} - {"scratchbert"}
    assert len(extras) > 20
    assert not extras & set(found)


@pytest.fixture(scope="module")
def installed(built, tmp_path_factory) -> Path:
    """The programs of an environment that has the wheel, and the libraries of this one, but not the clone."""
    folder = tmp_path_factory.mktemp("installed")
    run(sys.executable, "-m", "venv", folder / "env")
    python = folder / "env" / "bin" / "python"
    own = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    # A plain path: .pth files there, such as that of an editable installation, are not read.
    (own / "libraries.pth").write_text(sysconfig.get_path("purelib") + "\n")
    wheel = next(built.glob("*.whl"))
    run(python, "-m", "pip", "--disable-pip-version-check", "install", "--no-deps", "--force-reinstall", wheel)
    return folder / "env" / "bin"


def test_the_commands_run_from_the_wheel(installed, tmp_path):
    scratchbert = installed / "scratchbert"
    listing = run(scratchbert, cwd=tmp_path)
    for path in (ROOT / "scripts").glob("[a-z]*.py"):
        assert f"  {path.stem} " in listing
    where = run(scratchbert, "--path", "train", cwd=tmp_path).strip()
    assert Path(where).is_relative_to(installed.parent)
    assert Path(where).read_bytes() == (ROOT / "scripts" / "train.py").read_bytes()

    save_tiny(tmp_path / "bert")
    run(scratchbert, "convert", "bert", "converted", cwd=tmp_path)
    assert (tmp_path / "converted" / "modeling_scratchbert.py").exists()

    (tmp_path / "films.csv").write_text("text,label\ngood film,1\nbad film,0\n")
    flags = ["--train_file", "films.csv", "--max-steps", "1", "--max_length", "8"]
    classification = ["classification", "--model", "converted", *flags]
    launch = [installed / "python", "-m", "accelerate.commands.launch", "--cpu", "--num_processes", "1", where]
    run(*launch, *classification, "--output_dir", "launched", cwd=tmp_path)
    assert (tmp_path / "launched" / "model.safetensors").exists()

    (tmp_path / "pairs.jsonl").write_text('{"source": "good", "target": "film"}\n{"source": "bad", "target": "film"}\n')
    flags[1] = "pairs.jsonl"
    new = ["--config_name", "configuration/tiny.json", "--config_overrides", "max_position_embeddings=32"]
    flags += ["--tokenizer_name", "bert", "--max_target_length", "8", "--metrics", "loss", "--output_dir", "generator"]
    run(scratchbert, "train", "seq2seq", *new, *flags, cwd=tmp_path)
    written = run(scratchbert, "predict", "generator", "--text", "good", "--max_new_tokens", "3", cwd=tmp_path)
    assert json.loads(written).keys() == {"prediction"}
    for arguments, named in ((["predit"], "predit"), (["--path", "nothing"], "--path"), (["--path"], "--path")):
        done = subprocess.run([scratchbert, *arguments], cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 2
        [line] = done.stderr.splitlines()
        assert named in line
