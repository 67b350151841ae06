"""The model and the folder of most tests of `scripts/predict.py`."""

from collections.abc import Callable
from pathlib import Path

import pytest

from support.corpora import save_model


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    """The folder of a tiny encoder of the kind scratchbert."""
    return save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def make_bert(tmp_path_factory) -> Callable[..., str]:
    """Makes the folder of a tiny model of the kind bert, once for each task and fields."""

    made: dict[tuple[str, str], str] = {}

    def make(task: str = "embed", **fields) -> str:
        key = (task, repr(fields))
        if key not in made:
            made[key] = save_model(tmp_path_factory.mktemp("model"), task, "bert", **fields)
        return made[key]

    return make


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    """An empty folder, which is the working directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path
