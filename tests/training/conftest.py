"""What several files of training tests share."""

import pytest
import torch
from accelerate.state import AcceleratorState, GradientState, PartialState

from support.finetuning import WORDS, save_tiny, write_labels


@pytest.fixture
def new_accelerator():
    """Accelerate keeps the state of the first Accelerator of a process for all later ones."""
    states = (AcceleratorState, PartialState, GradientState)
    for state in states:
        state._reset_state()
    yield
    for state in states:
        state._reset_state()


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    torch.manual_seed(0)
    return save_tiny(tmp_path_factory.mktemp("model"), WORDS)


@pytest.fixture
def flags(model, tmp_path):
    """The command line of a run of four updates, one epoch, on eight texts."""

    def make(train_file=None, output="run", **changed) -> list[str]:
        given = {
            "model": model,
            "output": tmp_path / output,
            "batch_size": 2,
            "epochs": 1,
            "max_length": 12,
            "trackers": "none",
            "train_file": train_file or write_labels(tmp_path / "train.jsonl", [1, 0] * 4),
            **changed,
        }
        return [f"--{name}={value}" for name, value in given.items() if value is not None]

    return make
