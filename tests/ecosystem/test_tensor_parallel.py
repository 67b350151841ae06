"""Tensor parallelism: two processes that have each a part of a model, beside one that has the whole.

They run once, in `sharded.py`, and write what they computed; the tests read it."""

import os
import re
import subprocess
import sys

import pytest
import torch

from support import sharded
from support.comparison import assert_same_gradients, assert_same_tensors
from support.models import NO_DROPOUT, OURS, SPECIAL, inputs_for, random_bert, random_scratchbert

FIELDS = {
    "ForMaskedLM-untied": {"tie_word_embeddings": False, "norm_first": True, "position_embedding_type": "sinusoidal"},
    "ForCausalLM-crossed": {"add_cross_attention": True},
    "ForConditionalGeneration": {**SPECIAL, "share_embeddings": False},
    "ForConditionalGeneration-tied": {**SPECIAL, "tie_encoder_decoder": True},
    "Seq2SeqModel": SPECIAL,
}
PROCESSES = 2
# The dimension in which a tensor is divided, by its name; others are whole in each process.
DIVIDED = {
    r"\.blocks\.\d+\..*\.(query|key|value|intermediate)\.(weight|bias)$": 0,
    r"\.blocks\.\d+\..*\.output\.weight$": 1,
    r"(embeddings\.word_embeddings\.weight|lm_head\.decoder\.(weight|bias))$": 0,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    torch.manual_seed(0)
    folder, inputs = tmp_path_factory.mktemp("sharded"), {}
    for case in sharded.CASES:
        head = sharded.head_of(case)
        make = random_bert if case.endswith("of-BERT") else random_scratchbert
        make(head, **NO_DROPOUT, **FIELDS.get(case, {})).save_pretrained(folder / case)
        inputs[case] = {"inputs": inputs_for(head), "labelled": inputs_for(head, labels=head != "Seq2SeqModel")}
    for batch in inputs["ForCausalLM-crossed"].values():
        batch["encoder_hidden_states"] = torch.randn(3, 5, 32)
    torch.save(inputs, folder / "inputs.pt")
    return folder


@pytest.fixture(scope="module")
def results(folder) -> list[dict]:
    """The results of each process."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={PROCESSES}"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    command = [*torchrun, sharded.__file__, folder]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=240)
    assert done.returncode == 0, done.stderr[-4000:]
    for complaint in ("match nothing", "not applied"):  # of rules of the plan
        assert complaint not in done.stderr
    return [torch.load(folder / f"results-{rank}.pt") for rank in range(PROCESSES)]


@pytest.mark.parametrize("case", sharded.CASES)
def test_two_processes_compute_and_save_what_one_does(case, folder, results):
    load = OURS[sharded.head_of(case)].from_pretrained
    model = load(folder / case)
    outputs, gradients = sharded.compute(model, case, **torch.load(folder / "inputs.pt")[case])
    found = [of_one[case] for of_one in results]
    if case == "Model":  # each process returns the weights of the heads that it has
        attentions = torch.cat([of_one[0].pop("attentions") for of_one in found], dim=1)
        assert_same_tensors({"attentions": attentions}, {"attentions": outputs.pop("attentions")})
    for found_outputs, found_gradients, _ in found:
        assert_same_tensors(found_outputs, outputs)
        assert_same_gradients(found_gradients, gradients)

    saved, expected = (each.state_dict() for each in (load(folder / f"{case}-saved"), model))
    assert saved.keys() == expected.keys()
    assert all(torch.equal(saved[name], tensor) for name, tensor in expected.items())
    files = {path.name for path in (folder / f"{case}-saved").iterdir()}
    assert "modeling_scratchbert.py" in files
    assert not any(name.startswith(".") or name == "probe.json" for name in files)


@pytest.mark.parametrize("case", sharded.CASES)
def test_each_process_has_its_part_of_every_large_matrix(case, folder, results):
    for name, parameter in OURS[sharded.head_of(case)].from_pretrained(folder / case).named_parameters():
        shapes = [of_one[case][2][name] for of_one in results]
        dimension = next((dimension for pattern, dimension in DIVIDED.items() if re.search(pattern, name)), None)
        if dimension is None:
            assert shapes == [parameter.shape] * PROCESSES, name
        else:
            parts = [shape[dimension] for shape in shapes]
            assert sum(parts) == parameter.shape[dimension], name
            assert abs(parts[0] - parts[1]) <= 1, name
