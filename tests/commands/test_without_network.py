"""A Hub that cannot be reached: one line that says what to do, and what is in the cache opens all the same."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers
from huggingface_hub import HfApi, constants, snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HTTPError

import check
import convert
import predict
import train
from modeling_scratchbert import ScratchBertConfig, ScratchBertForConditionalGeneration, ScratchBertModel
from support.commands import exit_code
from support.hub_server import TOKEN, serving, use
from support.models import random_scratchbert, word_tokenizer
from toolkit.checkpoint import read_checkpoint
from toolkit.common import CommandError
from toolkit.hub import check_reachable, has_tokenizer

# The scripts quieten their whole process.
pytestmark = pytest.mark.usefixtures("quiet_only_here")


@pytest.fixture
def unreachable(tmp_path, monkeypatch) -> list[float]:
    """A Hub that was there a moment ago. The client tries again; the seconds that it would wait in between."""
    with serving() as gone:
        pass
    use(gone, monkeypatch, tmp_path / "cache")
    waits = []
    monkeypatch.setattr(time, "sleep", waits.append)
    return waits


@pytest.mark.parametrize("options", [{}, {"local_files_only": True}, {"revision": "0" * 40}], ids=str)
@pytest.mark.parametrize(
    "opens",
    [
        ScratchBertModel.from_pretrained,
        ScratchBertConfig.from_pretrained,
        ScratchBertForConditionalGeneration.from_bert,
    ],
    ids=lambda opens: f"{opens.__self__.__name__}.{opens.__name__}",
)
def test_from_python(unreachable, opens, options):
    with pytest.raises(OSError, match="HF_HUB_OFFLINE=1") as caught:
        opens("ada/never-seen", **options)
    message = str(caught.value)
    assert "\n" not in message
    assert "hf download ada/never-seen" in message
    # For the first file that is wanted, and not at every one of them; a commit might be in the cache, in part.
    assert bool(unreachable) != ("local_files_only" in options)
    assert "revision" in options or sum(unreachable) < 30
    assert ("--revision 0000" in message) == ("revision" in options)


TRAIN = ["--train_file", "TEXTS", "--output_dir", "OUT"]


@pytest.mark.parametrize(
    ("script", "argv"),
    [
        (check, ["ada/never-seen"]),
        (check, ["ada/never-seen", "--determinism"]),
        (convert, ["ada/never-seen", "OUT"]),
        (predict, ["ada/never-seen", "TEXTS", "--output", "OUT"]),
        (predict, ["ada/never-seen", "--task", "answer", "--text", "Who?", "--text_pair", "Ada."]),
        (train, ["classification", "--model", "ada/never-seen", *TRAIN]),
        (train, ["seq2seq", "--config_name", "configuration/tiny.json", "--tokenizer_name", "ada/never-seen", *TRAIN]),
        (train, ["classification", "--model", "MODEL", "--dataset", "ada/never-seen", "--output_dir", "OUT"]),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_scripts(unreachable, tmp_path, capsys, script, argv):
    (tmp_path / "texts.csv").write_text("text,label\nfine,1\n")
    saved(tmp_path / "model")
    places = {"TEXTS": str(tmp_path / "texts.csv"), "OUT": str(tmp_path / "out"), "MODEL": str(tmp_path / "model")}
    assert exit_code(script, *(places.get(word, word) for word in argv)) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "ada/never-seen" in line
    assert ("--dataset" if "--dataset" in argv else "HF_HUB_OFFLINE=1") in line
    assert not (tmp_path / "out").exists()
    assert "--dataset" in argv or not unreachable  # it did not try again, which takes half a minute


def test_what_the_hub_answers_is_left_to_the_loader(tmp_path, monkeypatch):
    def busy(*args, **kwargs):
        raise HfHubHTTPError("busy", response=SimpleNamespace(headers={}, status_code=503, request=None))

    with serving() as hub:
        use(hub, monkeypatch, tmp_path / "cache")
        check_reachable("ada/not-there")
        check_reachable("no..name")
        monkeypatch.setattr(HfApi, "repo_info", busy)
        check_reachable("ada/not-there")


def saved(folder: Path):
    model = random_scratchbert("Model")
    model.save_pretrained(folder, max_shard_size="20KB")
    word_tokenizer(["the", "cat"]).save_pretrained(folder)
    return model.eval()


@contextmanager
def on_the_hub(tmp_path: Path) -> Iterator[None]:
    """There is a Hub, with the model in a folder."""
    with serving(**{TOKEN: {"ada"}}) as hub, pytest.MonkeyPatch.context() as patch:
        use(hub, patch, tmp_path / "cache", TOKEN)
        HfApi().create_repo("ada/never-seen")
        HfApi().upload_folder(repo_id="ada/never-seen", folder_path=tmp_path / "model")
        yield


def fetch(tmp_path: Path, without: str | None = None) -> None:
    """Fetch the model in a folder by way of the Hub, but for the files of this pattern."""
    with on_the_hub(tmp_path):
        snapshot_download("ada/never-seen", ignore_patterns=without)


@pytest.mark.parametrize("without", ["model[.-]*", "model-00002*", "tokenizer*"])
def test_what_the_hub_lacks_is_said_to_be_missing(unreachable, tmp_path, without):
    saved(tmp_path / "model")
    with on_the_hub(tmp_path):
        snapshot_download("ada/never-seen", ignore_patterns=without)
        with pytest.raises(OSError, match=r"model\.fp16\.safetensors|variant"):
            ScratchBertModel.from_pretrained("ada/never-seen", variant="fp16")
        with pytest.raises(OSError, match=r"lost\.gguf"):
            ScratchBertModel.from_pretrained("ada/never-seen", gguf_file="lost.gguf")


@pytest.mark.parametrize("offline", [False, True])
def test_what_is_in_the_cache_opens(unreachable, tmp_path, monkeypatch, capsys, offline):
    """As the advice has it: fetched while there was a network, opened where there is none."""
    model = saved(tmp_path / "model")
    fetch(tmp_path)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)
    opened = ScratchBertModel.from_pretrained("ada/never-seen").eval()
    ids = torch.tensor([[2, 5, 6, 3]])
    with torch.no_grad():
        assert torch.equal(opened(ids).last_hidden_state, model(ids).last_hidden_state)
    assert ScratchBertConfig.from_pretrained("ada/never-seen").vocab_size == model.config.vocab_size
    with pytest.raises(OSError, match="HF_HUB_OFFLINE=1"):
        ScratchBertModel.from_pretrained("ada/never-seen", subfolder="elsewhere")
    assert check.main(["ada/never-seen"]) == 0


@pytest.mark.parametrize("options", [{}, {"local_files_only": True}], ids=str)
def test_weights_without_a_configuration(unreachable, tmp_path, options):
    """What the cache has of a repository can be opened with what the caller knows, as an adapter's is."""
    model = saved(tmp_path / "model")
    (tmp_path / "model" / "config.json").unlink()
    fetch(tmp_path)
    opened = ScratchBertModel.from_pretrained("ada/never-seen", config=model.config, **options)
    assert torch.equal(opened.pooler.dense.weight, model.pooler.dense.weight)


@pytest.mark.parametrize("offline", [False, True])
@pytest.mark.parametrize(
    ("without", "opens"),
    [
        ("model[.-]*", ScratchBertModel.from_pretrained),
        ("model[.-]*", ScratchBertForConditionalGeneration.from_bert),
        ("model[.-]*", read_checkpoint),
        ("model-00002*", ScratchBertModel.from_pretrained),
        ("tokenizer*", has_tokenizer),
    ],
)
def test_a_part_that_is_out_of_reach_is_not_said_to_be_missing(
    unreachable, tmp_path, monkeypatch, offline, without, opens
):
    saved(tmp_path / "model")
    fetch(tmp_path, without)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)
    with pytest.raises((OSError, CommandError), match="HF_HUB_OFFLINE=1") as caught:
        opens("ada/never-seen")
    assert "\n" not in str(caught.value)


def test_a_proxy_that_refuses(monkeypatch):
    def refuse(*args, **kwargs):
        raise HTTPError("403 Forbidden")

    monkeypatch.setattr(HfApi, "resolve_revision", refuse)
    monkeypatch.setattr(transformers.utils.hub, "hf_hub_download", refuse)
    for opens in (check_reachable, ScratchBertModel.from_pretrained):
        with pytest.raises(OSError, match="HF_HUB_OFFLINE=1"):
            opens("ada/never-seen")


def test_a_file_is_no_model(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.json").write_text("{}")
    with pytest.raises(OSError, match="folder") as caught:
        check_reachable("tiny.json")
    assert "HF_HUB_OFFLINE" not in str(caught.value)
