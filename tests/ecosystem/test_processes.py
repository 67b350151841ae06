"""What only a process of its own shows: memory, pickles without the package, the permissions of new files."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from support.folders import ROOT
from support.prepacked import another_copy

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
import sys, dill, torch

with open(sys.argv[1], "rb") as file:
    layer, classes, x, expected = dill.load(file)
assert "modeling_scratchbert" not in sys.modules and "remote_code.inference" not in sys.modules
with torch.no_grad():
    assert layer.prepacked is not None
    assert torch.equal(layer(x), expected)
print("same")
"""


def test_dill_pickles_the_module_by_value(monkeypatch, tmp_path):
    dill = pytest.importorskip("dill")
    module = another_copy(monkeypatch, "remote_code")
    for name in [name for name in sys.modules if name.partition(".")[0] == "remote_code"]:
        monkeypatch.delitem(sys.modules, name)  # what cannot be imported is pickled by value
    layer, x = module.PrepackedLinear(nn.Linear(4, 3), "none").prepack().requires_grad_(False), torch.randn(2, 4)
    classes = [value for value in vars(module).values() if getattr(value, "__module__", None) == module.__name__]
    assert {module.InferenceMixin, module.JointAttention, module.PrepackedLinear} <= set(classes)
    (tmp_path / "layer.dill").write_bytes(dill.dumps((layer, classes, x, layer(x))))
    command = [sys.executable, "-c", LOAD_WITHOUT_THE_MODULE, str(tmp_path / "layer.dill")]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert run.stdout == "same\n", run.stderr


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
