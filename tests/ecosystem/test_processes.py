"""What only other processes show: memory, pickles, and `datasets.map` in processes."""

import os
import pickle
from pathlib import Path

import pytest
import torch
from transformers.dynamic_module_utils import get_class_from_dynamic_module

from support.folders import ROOT
from support.models import inputs_for, random_scratchbert
from support.processes import run_python

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
    for kind in ("optimised", "plain"):
        lines = run_python("-c", RAGGED_BATCHES, kind, cwd=ROOT).split()
        grown[kind] = (int(lines[-1]) - int(lines[-2])) / 1024
    assert grown["optimised"] < grown["plain"] + 40, grown  # MiB; 280 more without rounding


WRITE_PICKLES = """
import pickle, sys
import cloudpickle
sys.modules["modeling_scratchbert"] = None
from transformers import AutoModel

model = AutoModel.from_pretrained("model", trust_remote_code=True)
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
    run_python("-c", WRITE_PICKLES, cwd=tmp_path)
    origins = {"of-package": "modeling_scratchbert", "of-remote-code": "transformers_modules"}
    expected = {f"{name}-{kind}": origin for kind, origin in origins.items() for name in ("pickle", "cloudpickle")}
    path = os.pathsep.join([str(ROOT), str(tmp_path / "modules")])
    found = run_python("-c", READ_PICKLES, *expected, cwd=tmp_path, PYTHONPATH=path)
    assert dict(line.split() for line in found.splitlines()) == expected


def test_dill_and_datasets_map_pickle_a_model_as_bert(pair, tmp_path):
    """Models of the package, and of the code in a folder."""
    datasets = pytest.importorskip("datasets", reason="datasets is not installed")
    import dill
    from datasets.fingerprint import Hasher

    ours, reference = pair()
    ours.save_pretrained(tmp_path / "saved")
    copied_class = get_class_from_dynamic_module("modeling_scratchbert.ScratchBertModel", str(tmp_path / "saved"))
    rows = datasets.Dataset.from_dict({"ids": torch.randint(1, 99, (6, 5)).tolist()})
    pooled = []
    for model in (ours, copied_class.from_pretrained(tmp_path / "saved").eval(), reference):

        def embed(row, model=model):
            with torch.no_grad():
                return {"pooled": model(torch.tensor([row["ids"]])).pooler_output[0].tolist()}

        assert type(dill.loads(dill.dumps(model))) is type(model)
        Hasher.hash(embed)  # `map` warns where this raises
        pooled.append(torch.tensor(rows.map(embed, num_proc=2)["pooled"][:]))
    torch.testing.assert_close(pooled[0], pooled[2], rtol=0, atol=1e-5)
    torch.testing.assert_close(pooled[1], pooled[2], rtol=0, atol=1e-5)
