"""Files of a compiled or traced model compute what the same BERT does, in a fresh process without the package."""

import shutil

import pytest
import torch

from support.models import inputs_for
from support.processes import run_python

SHAPES = ((3, 7), (2, 5), (5, 12), (4, 40))  # batch, length; the last at the length's limit
NAMES = ("input_ids", "attention_mask", "token_type_ids")

COMPUTE = """
import sys
import torch

kind, path = sys.argv[1:]
sys.modules["modeling_scratchbert"] = sys.modules["transformers"] = None
load = {"aoti": torch._inductor.aoti_load_package, "jit": torch.jit.load}[kind]
model = load(path)
for inputs, expected in torch.load("expected.pt"):
    with torch.no_grad():
        torch.testing.assert_close(model(*inputs)[0], expected, rtol=0, atol=1e-5)
"""


@pytest.fixture
def model(pair, tmp_path):
    """A classifier; what its reference computes is in `expected.pt`."""
    ours, reference = pair("ForSequenceClassification", num_hidden_layers=1)
    batches = [tuple(inputs_for("Model", *shape)[name] for name in NAMES) for shape in SHAPES]
    with torch.no_grad():
        torch.save([(batch, reference(*batch).logits) for batch in batches], tmp_path / "expected.pt")
    ours.config.return_dict = False
    return ours


@pytest.mark.skipif(shutil.which("g++") is None, reason="AOTInductor requires a C++ compiler")
def test_a_package_of_aotinductor_computes_in_every_shape(model, tmp_path):
    batch, length = torch.export.Dim("batch", max=64), torch.export.Dim("length", max=40)
    inputs = tuple(inputs_for()[name] for name in NAMES)
    shapes = tuple({0: batch, 1: length} for _ in NAMES)
    with torch.no_grad():
        program = torch.export.export(model, inputs, dynamic_shapes=shapes)
    torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "model.pt2"))
    run_python("-c", COMPUTE, "aoti", "model.pt2", cwd=tmp_path)


def test_a_trace_computes_in_every_shape(model, tmp_path):
    inputs = tuple(inputs_for()[name] for name in NAMES)
    torch.jit.trace(model, inputs, check_trace=False).save(str(tmp_path / "model.ts"))
    run_python("-c", COMPUTE, "jit", "model.ts", cwd=tmp_path)


TRACE_REMOTE_CODE = """
import sys
from pathlib import Path
import torch
sys.modules["modeling_scratchbert"] = None
from transformers import AutoModelForSequenceClassification
from transformers.dynamic_module_utils import get_class_from_dynamic_module

def folder_hash():
    name = "modeling_scratchbert.ScratchBertForSequenceClassification"
    return get_class_from_dynamic_module(name, "model").__module__.split(".")[-2]

# TorchScript reads module names as identifiers: no trace of a custom model loads if the hash of its code, which is one
# of them, starts with a digit.
code = Path("model", "modeling_scratchbert.py")
while folder_hash()[0].isdigit():
    code.write_text(code.read_text() + "#")

model = AutoModelForSequenceClassification.from_pretrained("model", trust_remote_code=True, return_dict=False).eval()
assert type(model).__module__.startswith("transformers_modules.model.")
inputs, _ = torch.load("expected.pt")[0]

torch.jit.trace(model, inputs, check_trace=False).save("model.ts")
"""


def test_a_trace_of_remote_code_computes_in_every_shape(model, tmp_path):
    model.save_pretrained(tmp_path / "model")
    run_python("-c", TRACE_REMOTE_CODE, cwd=tmp_path)
    run_python("-c", COMPUTE, "jit", "model.ts", cwd=tmp_path)
