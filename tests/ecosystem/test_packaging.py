"""The package as it is handed on: a wheel and a source distribution, used in an environment that has nothing else."""

import json
import os
import re
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

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
FILES = {path.relative_to(ROOT).as_posix() for path in (ROOT / "modeling_scratchbert").rglob("*.py")}
FILES.add("modeling_scratchbert/py.typed")
COMMANDS = "scratchbert_commands"
SHIPPED = {
    f"{COMMANDS}/{path.relative_to(ROOT).as_posix()}"
    for folder in ("scripts", "configuration")
    for path in (ROOT / folder).rglob("*")
    if path.is_file() and not any(part.startswith((".", "__pycache__")) for part in path.relative_to(ROOT).parts)
}


def run(*command, **options) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        list(map(str, command)), capture_output=True, text=True, check=False, env=environment, **options
    )
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    """The source distribution, and the wheel that is built out of it."""
    folder = tmp_path_factory.mktemp("dist")
    # A copy: setuptools writes into the source folder, where another process may build as well.
    source = shutil.copytree(
        ROOT, folder / "source", ignore=shutil.ignore_patterns(".*", "build", "demo", "*.egg-info")
    )
    run(sys.executable, "-m", "build", "--outdir", folder, source)
    return folder


NATIVE = "modeling_scratchbert/cpu/native"


def test_the_wheel_is_the_package_and_the_commands(built):
    [wheel] = built.glob("*.whl")
    assert wheel.name.startswith(f"scratchbert-{PROJECT['version']}-")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        metadata = archive.read(next(name for name in names if name.endswith(".dist-info/METADATA"))).decode()
    code = {name for name in names if ".dist-info/" not in name and not name.endswith(".so")}
    assert code == FILES | SHIPPED | {f"{NATIVE}/{path.name}" for path in (ROOT / NATIVE).iterdir()}
    assert any(name.endswith("licenses/LICENSE") for name in names)
    needed = {
        re.split(r"[<>=!~]", line.split(": ")[1])[0]
        for line in metadata.splitlines()
        if line.startswith("Requires-Dist: ") and "extra ==" not in line
    }
    assert needed == {"torch", "transformers", "safetensors"}
    assert "# ScratchBert" in metadata  # the README, which a registry shows


def test_the_source_distribution_is_enough_to_build_from(built):
    [source] = built.glob("*.tar.gz")
    with tarfile.open(source) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert names >= FILES | {"LICENSE", "README.md", "pyproject.toml", "setup.cfg"}
    assert names >= {name.removeprefix(f"{COMMANDS}/") for name in SHIPPED}


def test_the_oldest_versions_are_the_lowest_that_are_admitted():
    """Of all that the tests and those of training install, but torch."""
    extras = PROJECT["optional-dependencies"]
    installed = ("test", "train", "plot", "lora")
    listed = [*PROJECT["dependencies"], *(line for name in installed for line in extras[name])]
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


STRANGER = """
import importlib.metadata, json, sys
from pathlib import Path
import torch
from transformers import AutoModel, BertModel
from modeling_scratchbert import ScratchBertConfig, ScratchBertForConditionalGeneration, ScratchBertModel

torch.manual_seed(0)
sizes = dict(vocab_size=40, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64)
model = ScratchBertModel(ScratchBertConfig(**sizes)).eval()
ids = torch.tensor([[2, 7, 9, 3, 0], [2, 8, 3, 0, 0]])
mask = torch.tensor([[1, 1, 1, 1, 0], [1, 1, 1, 0, 0]])
with torch.no_grad():
    states = model(ids, attention_mask=mask).last_hidden_state
    model.save_pretrained("saved")
    model.save_as_bert("bert")
    again = AutoModel.from_pretrained("saved").eval()(ids, attention_mask=mask).last_hidden_state
    bert = BertModel.from_pretrained("bert").eval()(ids, attention_mask=mask).last_hidden_state
    model.optimize_for_inference()
    fast = model(ids, attention_mask=mask).last_hidden_state
generator = ScratchBertForConditionalGeneration(
    ScratchBertConfig(**sizes, is_encoder_decoder=True, decoder_start_token_id=2, eos_token_id=3, pad_token_id=0)
).eval()
written = generator.generate(ids, attention_mask=mask, max_new_tokens=3, num_beams=2)
print(json.dumps({
    "file": sys.modules["modeling_scratchbert"].__file__,
    "again": (again - states).abs().max().item(),
    "bert": (bert - states)[mask.bool()].abs().max().item(),
    "fast": (fast - states)[mask.bool()].abs().max().item(),
    "written": list(written.shape),
    "installed": sorted(distribution.name.lower() for distribution in importlib.metadata.distributions()),
}))
"""


def test_installed_into_an_empty_environment(built, tmp_path):
    run(sys.executable, "-m", "venv", tmp_path / "env")
    python = tmp_path / "env" / "bin" / "python"
    pip = [python, "-m", "pip", "--disable-pip-version-check"]
    run(*pip, "install", "-c", ROOT / "constraints.txt", next(built.glob("*.whl")))
    assert "No broken requirements" in run(*pip, "check")

    (tmp_path / "stranger.py").write_text(STRANGER)
    lines = run(python, "-I", "stranger.py", cwd=tmp_path).splitlines()
    found = json.loads(lines[-1])
    assert Path(found["file"]).is_relative_to(tmp_path / "env")
    groups = PROJECT["optional-dependencies"].values()
    extras = {re.split(r"[\[<>=]", requirement)[0] for group in groups for requirement in group} - {"scratchbert"}
    assert len(extras) > 20
    assert not extras & set(found["installed"])
    assert found["again"] == 0
    assert found["bert"] < 1e-6
    assert found["fast"] < 1e-6
    assert found["written"][0] == 2


BERT = """
import torch
from transformers import BertConfig, BertModel, BertTokenizer

words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "good", "bad", "film"]
torch.manual_seed(0)
sizes = dict(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32)
BertModel(BertConfig(vocab_size=len(words), max_position_embeddings=32, **sizes)).save_pretrained("bert")
BertTokenizer(vocab={word: i for i, word in enumerate(words)}).save_pretrained("bert")
"""


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

    run(installed / "python", "-c", BERT, cwd=tmp_path)
    run(scratchbert, "convert", "bert", "converted", cwd=tmp_path)
    assert (tmp_path / "converted" / "modeling_scratchbert.py").exists()

    (tmp_path / "films.csv").write_text("text,label\ngood film,1\nbad film,0\n")
    flags = ["--train_file", "films.csv", "--max-steps", "1", "--max_length", "8"]
    classification = ["classification", "--model", "converted", *flags]
    run(scratchbert, "train", *classification, "--output_dir", "classifier", cwd=tmp_path)
    assert (tmp_path / "classifier" / "metrics.json").exists()
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


def test_the_console_script_names_what_it_does_not_know(installed, tmp_path):
    for arguments, message in (
        (["predit"], "there is no command 'predit'"),
        (["--path", "nothing"], "--path is nothing; expected a command or a shipped file"),
        (["--path"], "--path has no name"),
    ):
        done = subprocess.run(
            [installed / "scratchbert", *arguments], cwd=tmp_path, capture_output=True, text=True, check=False
        )
        assert done.returncode == 2
        assert done.stderr.startswith(f"scratchbert: {message}")
        assert done.stderr.count("\n") == 1


def test_help_works_without_any_library(built, tmp_path):
    """In an environment with nothing but the wheel."""
    run(sys.executable, "-m", "venv", tmp_path / "env")
    programs = tmp_path / "env" / "bin"
    run(
        programs / "python",
        "-m",
        "pip",
        "--disable-pip-version-check",
        "install",
        "--no-deps",
        next(built.glob("*.whl")),
    )
    for command in ("predict", "course"):
        assert "usage:" in run(programs / "scratchbert", command, "--help")
