"""What only a process of its own shows: memory, pickles, `datasets.map` in processes, the permissions of new files."""

import importlib
import os
import pickle
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from support.folders import ROOT
from support.models import inputs_for, random_scratchbert

RAGGED_BATCHES = """
import sys, torch
from modeling_scratchbert import ScratchBertConfig, ScratchBertModel

torch.set_num_threads(1)
torch.manual_seed(0)
sizes = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64)
model = ScratchBertModel(ScratchBertConfig(vocab_size=101, **sizes)).eval()
if sys.argv[1] == "optimised":
    model.optimize_for_inference()
for call in range(1, 601):
    lengths = torch.randint(2, 60, (int(torch.randint(2, 24, ())),))
    mask = (torch.arange(int(lengths.max())) < lengths[:, None]).long()
    with torch.inference_mode():
        model(torch.randint(1, 101, mask.shape), attention_mask=mask)
    if call in (200, 600):
        [line] = [line for line in open("/proc/self/status") if line.startswith("RssAnon")]
        print(line.split()[1])
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="only Linux has /proc/self/status")
def test_ragged_batches_do_not_fill_memory():
    grown = {}
    for kind in ("optimised", "dense"):
        command = [sys.executable, "-c", RAGGED_BATCHES, kind]
        lines = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split()
        grown[kind] = (int(lines[-1]) - int(lines[-2])) / 1024
    assert grown["optimised"] < grown["dense"] + 40, grown  # MiB; 280 more without rounding


LOAD_WITHOUT_THE_MODULE = """
import sys, dill

with open(sys.argv[1], "rb") as file:
    mixin, refusal = dill.load(file)
assert "modeling_scratchbert" not in sys.modules and "remote_code.inference" not in sys.modules
assert "optimised for inference" in str(refusal("saving")) and "optimize_for_inference" in vars(mixin)
print("same")
"""


def test_dill_pickles_the_module_by_value(monkeypatch, tmp_path):
    """What cannot be imported, as code from a checkpoint's folder."""
    dill = pytest.importorskip("dill")
    package = ModuleType("remote_code")
    package.__path__ = [str(ROOT / "modeling_scratchbert")]
    monkeypatch.setitem(sys.modules, "remote_code", package)
    module = importlib.import_module("remote_code.inference")
    for name in [name for name in sys.modules if name.partition(".")[0] == "remote_code"]:
        monkeypatch.delitem(sys.modules, name)
    (tmp_path / "module.dill").write_bytes(dill.dumps((module.InferenceMixin, module.refusal)))
    command = [sys.executable, "-c", LOAD_WITHOUT_THE_MODULE, str(tmp_path / "module.dill")]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert run.stdout == "same\n", run.stderr


WRITE_PICKLES = """
import pickle, sys
import cloudpickle, torch
sys.modules["modeling_scratchbert"] = None
from transformers import AutoModel

model = AutoModel.from_pretrained(sys.argv[1], trust_remote_code=True)
assert type(model).__module__.startswith("transformers_modules.")
inputs, expected = torch.load("inputs.pt")
with torch.no_grad():
    assert torch.equal(model(**inputs).last_hidden_state, expected)
for pickler in (pickle, cloudpickle):
    with open(f"{pickler.__name__}-of-remote-code", "wb") as file:
        pickler.dump(model, file)
"""

READ_PICKLES = """
import pickle, sys
import torch

inputs, expected = torch.load("inputs.pt")
for path in sys.argv[1:]:
    with open(path, "rb") as file:
        model = pickle.load(file)
    with torch.no_grad():
        assert torch.equal(model(**inputs).last_hidden_state, expected), path
    print(path, type(model).__module__.partition(".")[0])
"""


def test_pickles_open_in_a_fresh_process(tmp_path):
    """Those of a remote-code model as well, if the folder of such code is on the path, as it is in worker processes."""
    cloudpickle = pytest.importorskip("cloudpickle", reason="cloudpickle is not installed")
    model, inputs = random_scratchbert("Model"), inputs_for()
    with torch.no_grad():
        torch.save((inputs, model(**inputs).last_hidden_state), tmp_path / "inputs.pt")
    model.save_pretrained(tmp_path / "model")
    for pickler in (pickle, cloudpickle):
        (tmp_path / f"{pickler.__name__}-of-package").write_bytes(pickler.dumps(model))
    modules = str(tmp_path / "modules")

    def run(code, *arguments, path) -> str:
        environment = {**os.environ, "HF_MODULES_CACHE": modules, "PYTHONPATH": os.pathsep.join(path)}
        command = [sys.executable, "-c", code, *arguments]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    run(WRITE_PICKLES, "model", path=[])
    origins = {"of-package": "modeling_scratchbert", "of-remote-code": "transformers_modules"}
    expected = {f"{name}-{kind}": origin for kind, origin in origins.items() for name in ("pickle", "cloudpickle")}
    found = run(READ_PICKLES, *expected, path=[str(ROOT), modules])
    assert dict(line.split() for line in found.splitlines()) == expected


def test_datasets_map_a_function_over_the_model_in_two_processes(pair):
    datasets = pytest.importorskip("datasets", reason="datasets is not installed")
    from datasets.fingerprint import Hasher

    rows = datasets.Dataset.from_dict({"ids": torch.randint(1, 99, (6, 5)).tolist()})
    pooled = []
    for model in pair():

        def embed(row, model=model):
            with torch.no_grad():
                return {"pooled": model(torch.tensor([row["ids"]])).pooler_output[0].tolist()}

        Hasher.hash(embed)  # `map` warns where this raises
        pooled.append(torch.tensor(rows.map(embed, num_proc=2)["pooled"][:]))
    torch.testing.assert_close(*pooled, rtol=0, atol=1e-5)


WRITE_UNDER_A_UMASK = """
import os, sys
from pathlib import Path
import torch
from safetensors.torch import save_file
from modeling_scratchbert.checkpoints import staged

os.umask(0o027)
with staged(sys.argv[1]) as folder:
    save_file({"weight": torch.zeros(1)}, folder / "model.safetensors")
    (folder / "config.json").write_text("{}")
print({path.name: oct(path.stat().st_mode & 0o777) for path in sorted(Path(sys.argv[1]).iterdir())})
"""


def test_files_have_the_mode_that_the_umask_gives(tmp_path):
    command = [sys.executable, "-c", WRITE_UNDER_A_UMASK, str(tmp_path / "model")]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.splitlines()[-1] == str({"config.json": "0o640", "model.safetensors": "0o640"})
