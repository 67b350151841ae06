"""What several files of training tests share."""

import pytest

from support.tiny import flags, reset_accelerate, reviews, save_tiny, write_rows


@pytest.fixture(autouse=True)
def new_accelerator():
    reset_accelerate()
    yield
    reset_accelerate()


@pytest.fixture(scope="session")
def model(tmp_path_factory) -> str:
    return save_tiny(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def steady_model(tmp_path_factory) -> str:
    """Without dropout, so that gradients do not depend on how rows are put into batches."""
    no_dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return save_tiny(tmp_path_factory.mktemp("steady"), **no_dropout)


@pytest.fixture
def argv(model, tmp_path):
    """The command line of a run of four updates on eight texts, with changed arguments; None removes one."""

    def make(task="classification", **changed) -> list[str]:
        given = {
            "model": model,
            "train_file": write_rows(tmp_path / "rows.jsonl", reviews(8)),
            "output_dir": tmp_path / "run",
            "per_device_train_batch_size": 2,
            "num_train_epochs": 1,
            "max_length": 12,
        }
        return [task, *flags(**{**given, **changed})]

    return make
