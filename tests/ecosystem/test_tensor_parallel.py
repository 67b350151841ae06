"""Tensor parallelism: two processes that have each a part of a model, beside one that has the whole.

They run once, in `sharded.py`, and note what they computed; the tests read the notes."""

import os
import re
import subprocess
import sys

import pytest
import torch

from support import sharded
from support.comparison import assert_same_gradients, assert_same_tensors
from support.models import OURS, SPECIAL, inputs_for, random_bert, random_scratchbert

FIELDS = {
    "ForMaskedLM-untied": {"tie_word_embeddings": False, "norm_first": True, "position_embedding_type": "sinusoidal"},
    "ForCausalLM-crossed": {"add_cross_attention": True},
    "ForConditionalGeneration": {**SPECIAL, "share_embeddings": False},
    "ForConditionalGeneration-tied": {**SPECIAL, "tie_encoder_decoder": True},
    "Seq2SeqModel": SPECIAL,
}
PROCESSES = 2


def make(case: str):
    fields = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, **FIELDS.get(case, {})}
    random = random_bert if case.endswith("of-BERT") else random_scratchbert
    return random(sharded.head_of(case), **fields)


def batches(case: str) -> dict:
    """The arguments of `sharded.compute`."""
    head = sharded.head_of(case)
    given = {"inputs": inputs_for(head), "labelled": inputs_for(head, labels=head != "Seq2SeqModel")}
    if case == "ForCausalLM-crossed":
        for batch in given.values():
            batch["encoder_hidden_states"] = torch.randn(3, 5, 32)
    return given


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("sharded")
    for case in sharded.CASES:
        make(case).save_pretrained(folder / case)
    torch.save({case: batches(case) for case in sharded.CASES}, folder / "inputs.pt")
    return folder


@pytest.fixture(scope="module")
def done(folder) -> subprocess.CompletedProcess:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={PROCESSES}"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    return subprocess.run(
        [*torchrun, sharded.__file__, folder], capture_output=True, text=True, env=environment, timeout=240
    )


@pytest.fixture(scope="module")
def notes(folder, done) -> list[dict]:
    """Of each process."""
    assert done.returncode == 0, done.stderr[-4000:]
    return [torch.load(folder / f"notes-{rank}.pt") for rank in range(PROCESSES)]


def assert_same_results(actual: dict, expected: dict) -> None:
    gradients, outputs = (
        [
            {name: value for name, value in each.items() if name.startswith("gradient.") == wanted}
            for each in (actual, expected)
        ]
        for wanted in (True, False)
    )
    assert_same_gradients(*gradients)
    assert_same_tensors(*outputs)


@pytest.mark.parametrize("case", sharded.CASES)
def test_two_processes_compute_what_one_does(case, folder, notes):
    alone = OURS[sharded.head_of(case)].from_pretrained(folder / case)
    expected = sharded.compute(alone, case, **torch.load(folder / "inputs.pt")[case])
    results = [of_one[case]["results"] for of_one in notes]
    if case == "Model":  # each process returns the weights of the heads that it has
        attentions = torch.cat([of_one.pop("attentions") for of_one in results], dim=1)
        assert_same_tensors({"attentions": attentions}, {"attentions": expected.pop("attentions")})
    for of_one in results:
        assert_same_results(of_one, expected)


@pytest.mark.parametrize("case", sharded.CASES)
def test_each_process_has_its_part_of_every_large_matrix(case, folder, notes):
    alone = OURS[sharded.head_of(case)].from_pretrained(folder / case)
    dimension_cut = {
        r"\.blocks\.\d+\..*\.(query|key|value|intermediate)\.(weight|bias)": 0,
        r"\.blocks\.\d+\..*\.output\.weight": 1,
        r"embeddings\.word_embeddings\.weight|lm_head\.decoder\.(weight|bias)": 0,
    }
    for name, parameter in alone.named_parameters():
        parts = [of_one[case]["parts"][name] for of_one in notes]
        cut = next((each for pattern, each in dimension_cut.items() if re.search(f"({pattern})$", name)), None)
        if cut is None:
            assert parts == [parameter.shape] * PROCESSES, name
        else:
            assert sum(part[cut] for part in parts) == parameter.shape[cut], name
            assert abs(parts[0][cut] - parts[1][cut]) <= 1, name


@pytest.mark.parametrize("case", sharded.CASES)
def test_they_save_the_whole(case, folder, notes):
    alone = OURS[sharded.head_of(case)].from_pretrained(folder / case).state_dict()
    saved = OURS[sharded.head_of(case)].from_pretrained(folder / f"{case}-saved").state_dict()
    assert saved.keys() == alone.keys()
    assert all(saved[name].equal(alone[name]) for name in alone)
    ours = {path.name for path in (folder / f"{case}-saved").iterdir()}
    assert {"config.json", "model.safetensors", "modeling_scratchbert.py"} <= ours
    assert not any(name.startswith(".") for name in ours)


def test_no_rule_of_the_plan_is_left_over(done, notes):
    assert "match nothing" not in done.stderr
    assert "not applied" not in done.stderr
