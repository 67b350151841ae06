"""A Hub that cannot be reached: one line that says what to do, and what is in the cache opens all the same."""

import time
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
from modeling_scratchbert import ScratchBertConfig, ScratchBertForConditionalGeneration, ScratchBertModel, pretrained
from support.hub_server import serving, use
from support.models import random_scratchbert
from toolkit.hub import check_reachable, has_tokenizer

# The scripts quieten their whole process.
pytestmark = pytest.mark.usefixtures("quiet_only_here")

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "cat", "sat", "on", "mat", "."]
TOKEN = "hf_" + "Ada" * 12
WHAT_TO_DO = "hf download ada/never-seen"


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
    with pytest.raises(OSError, match=WHAT_TO_DO) as caught:
        opens("ada/never-seen", **options)
    message = str(caught.value)
    assert message.startswith("ada/never-seen is neither a folder nor completely in the cache")
    assert "\n" not in message
    assert "HF_HUB_OFFLINE=1" in message
    assert "folder" in message
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
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_scripts(unreachable, tmp_path, capsys, script, argv):
    (tmp_path / "texts.csv").write_text("text,label\nfine,1\n")
    places = {"TEXTS": str(tmp_path / "texts.csv"), "OUT": str(tmp_path / "out")}
    try:
        code = script.main([places.get(word, word) for word in argv])
    except SystemExit as stop:
        code = stop.code
    assert code == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert WHAT_TO_DO in err
    assert "HF_HUB_OFFLINE=1" in err
    assert not (tmp_path / "out").exists()
    assert not unreachable  # it did not try again, which takes half a minute


def test_what_the_hub_answers_is_left_to_the_loader(tmp_path, monkeypatch):
    def busy(*args, **kwargs):
        raise HfHubHTTPError("busy", response=SimpleNamespace(headers={}, status_code=503, request=None))

    with serving() as hub:
        use(hub, monkeypatch, tmp_path / "cache")
        check_reachable("ada/not-there")
        check_reachable("no..name")
        monkeypatch.setattr(HfApi, "repo_info", busy)
        check_reachable("ada/not-there")


def test_a_dataset(unreachable, tmp_path, capsys):
    saved(tmp_path / "model")
    argv = ["--model", str(tmp_path / "model"), "--dataset", "ada/texts", "--output_dir", str(tmp_path / "out")]
    assert train.main(["classification", *argv]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "--dataset ada/texts" in line
    assert "on the Hub" in line


def saved(folder: Path):
    model = random_scratchbert("Model")
    model.save_pretrained(folder)
    transformers.BertTokenizer(vocab={word: i for i, word in enumerate(WORDS)}).save_pretrained(folder)
    return model


def push(folder: Path) -> None:
    HfApi().create_repo("ada/never-seen")
    HfApi().upload_folder(repo_id="ada/never-seen", folder_path=folder)


@pytest.mark.parametrize("offline", [False, True])
def test_what_is_in_the_cache_opens(unreachable, tmp_path, monkeypatch, capsys, offline):
    """As the advice has it: fetched while there was a network, opened where there is none."""
    model = saved(tmp_path / "model").eval()
    with serving(**{TOKEN: {"ada"}}) as hub, pytest.MonkeyPatch.context() as patch:
        use(hub, patch, tmp_path / "cache", TOKEN)
        push(tmp_path / "model")
        snapshot_download("ada/never-seen")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)
    opened = ScratchBertModel.from_pretrained("ada/never-seen").eval()
    ids = torch.tensor([[2, 5, 6, 3]])
    with torch.no_grad():
        assert torch.equal(opened(ids).last_hidden_state, model(ids).last_hidden_state)
    assert ScratchBertConfig.from_pretrained("ada/never-seen").vocab_size == model.config.vocab_size
    with pytest.raises(OSError, match="nor completely in the cache"):
        ScratchBertModel.from_pretrained("ada/never-seen", subfolder="elsewhere")
    capsys.readouterr()
    assert check.main(["ada/never-seen"]) == 0
    assert "equal" in capsys.readouterr().out


@pytest.mark.parametrize("options", [{}, {"local_files_only": True}], ids=str)
def test_weights_without_a_configuration(unreachable, tmp_path, options):
    """What the cache has of a repository can be opened with what the caller knows, as an adapter's is."""
    model = saved(tmp_path / "model").eval()
    (tmp_path / "model" / "config.json").unlink()
    with serving(**{TOKEN: {"ada"}}) as hub, pytest.MonkeyPatch.context() as patch:
        use(hub, patch, tmp_path / "cache", TOKEN)
        push(tmp_path / "model")
        snapshot_download("ada/never-seen")
    opened = ScratchBertModel.from_pretrained("ada/never-seen", config=model.config, **options)
    assert torch.equal(opened.pooler.dense.weight, model.pooler.dense.weight)


@pytest.mark.parametrize("offline", [False, True])
def test_a_part_that_is_out_of_reach_is_not_said_to_be_missing(unreachable, tmp_path, monkeypatch, capsys, offline):
    saved(tmp_path / "model")
    with serving(**{TOKEN: {"ada"}}) as hub, pytest.MonkeyPatch.context() as patch:
        use(hub, patch, tmp_path / "cache", TOKEN)
        push(tmp_path / "model")
        ScratchBertConfig.from_pretrained("ada/never-seen")
        # What is missing is said to be.
        with pytest.raises(OSError, match=r"model\.fp16\.safetensors|variant"):
            ScratchBertModel.from_pretrained("ada/never-seen", variant="fp16")
        with pytest.raises(OSError, match=r"lost\.gguf"):
            ScratchBertModel.from_pretrained("ada/never-seen", gguf_file="lost.gguf")
        assert not list((tmp_path / "cache").glob("*/snapshots/*/*.safetensors"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)
    for opens in (ScratchBertModel.from_pretrained, ScratchBertForConditionalGeneration.from_bert):
        with pytest.raises(OSError, match="nor completely in the cache") as caught:
            opens("ada/never-seen")
        assert "\n" not in str(caught.value)
    capsys.readouterr()
    assert check.main(["ada/never-seen"]) == 2
    assert "nor completely in the cache" in capsys.readouterr().err
    with pytest.raises(OSError, match="Its tokenizer cannot be opened: it is not completely in the cache"):
        has_tokenizer("ada/never-seen")


def test_shards_that_are_out_of_reach(unreachable, tmp_path):
    random_scratchbert("Model").save_pretrained(tmp_path / "model", max_shard_size="20KB")
    with serving(**{TOKEN: {"ada"}}) as hub, pytest.MonkeyPatch.context() as patch:
        use(hub, patch, tmp_path / "cache", TOKEN)
        push(tmp_path / "model")
        snapshot_download("ada/never-seen", ignore_patterns="model-00002*")
    with pytest.raises(OSError, match="nor completely in the cache"):
        ScratchBertModel.from_pretrained("ada/never-seen")


def test_a_proxy_that_refuses(monkeypatch):
    class ProxyError(HTTPError):
        pass

    def refuse(*args, **kwargs):
        raise ProxyError("403 Forbidden")

    monkeypatch.setattr(HfApi, "resolve_revision", refuse)
    with pytest.raises(OSError, match=r"cannot be reached \(403 Forbidden\)"):
        check_reachable("ada/never-seen")
    monkeypatch.setattr(pretrained, "cached_file", refuse)
    with pytest.raises(OSError, match="nor completely in the cache"):
        ScratchBertModel.from_pretrained("ada/never-seen")


def test_a_file_is_no_model(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.json").write_text("{}")
    with pytest.raises(OSError, match=r"^There is no such folder\.$"):
        check_reachable("tiny.json")
