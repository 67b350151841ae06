"""A Hub that cannot be reached: one line that says what to do, and what is in the cache opens all the same."""

import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers
from huggingface_hub import HfApi, constants, snapshot_download
from huggingface_hub.errors import HfHubHTTPError

from modeling_scratchbert import ScratchBertConfig, ScratchBertForConditionalGeneration, ScratchBertModel

import check_parity
import convert_checkpoint
import export
import finetune_classification
import finetune_seq2seq
import generate
import plot_attention
import pretrain_mlm
import push_to_hub
import question_answering
import sentence_similarity
from checkpoint_kinds import random_scratchbert
from hub_server import serving, use
from sources import check_source

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
    assert message.startswith("ada/never-seen is no folder, it is not in the cache")
    assert "\n" not in message
    assert "HF_HUB_OFFLINE=1" in message
    assert "folder" in message
    # Once for the first file that is wanted, and not at every one of them.
    assert bool(unreachable) != ("local_files_only" in options)
    assert sum(unreachable) < 30


TRAIN = ["--train_file", "TEXTS", "--output", "OUT"]


@pytest.mark.parametrize(
    ("script", "argv"),
    [
        (check_parity, ["ada/never-seen"]),
        (export, ["ada/never-seen", "OUT", "--format", "torch"]),
        (generate, ["ada/never-seen", "hello"]),
        (plot_attention, ["ada/never-seen", "hello", "--output", "OUT.png"]),
        (question_answering, ["ada/never-seen", "--question", "Who?", "--context", "Ada."]),
        (sentence_similarity, ["ada/never-seen", "a", "b"]),
        (finetune_classification, ["--model", "ada/never-seen", *TRAIN]),
        (finetune_seq2seq, ["--model", "ada/never-seen", *TRAIN]),
        (pretrain_mlm, ["--model", "ada/never-seen", *TRAIN]),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_scripts(unreachable, tmp_path, capsys, script, argv):
    (tmp_path / "texts.csv").write_text("text,label\nfine,1\n")
    places = {"TEXTS": str(tmp_path / "texts.csv"), "OUT": str(tmp_path / "out"), "OUT.png": str(tmp_path / "a.png")}
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
        check_source("ada/not-there")
        check_source("no..name")
        monkeypatch.setattr(HfApi, "repo_info", busy)
        check_source("ada/not-there")


def test_convert_and_push(unreachable, tmp_path, monkeypatch, capsys):
    assert convert_checkpoint.main(["ada/never-seen", str(tmp_path / "out")]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert "give the folder of the snapshot in the cache" in err

    monkeypatch.setenv("HF_TOKEN", TOKEN)
    saved(tmp_path / "model")
    capsys.readouterr()
    assert push_to_hub.main([str(tmp_path / "model"), "ada/m"]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert "cannot be reached" in err


def test_a_dataset(unreachable, tmp_path, capsys):
    saved(tmp_path / "model")
    argv = ["--model", str(tmp_path / "model"), "--dataset", "ada/texts", "--output", str(tmp_path / "out")]
    assert finetune_classification.main(argv) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert "--dataset ada/texts: it is no folder, and the Hub cannot be reached" in line
    assert "--train_file" in line


def saved(folder: Path):
    model = random_scratchbert("Model")
    model.save_pretrained(folder)
    transformers.BertTokenizer(vocab={word: i for i, word in enumerate(WORDS)}).save_pretrained(folder)
    return model


@pytest.mark.parametrize("offline", [False, True])
def test_what_is_in_the_cache_opens(unreachable, tmp_path, monkeypatch, capsys, offline):
    """As the advice has it: fetched while there was a network, opened where there is none."""
    model = saved(tmp_path / "model").eval()
    with serving(**{TOKEN: {"ada"}}) as hub, pytest.MonkeyPatch.context() as patch:
        use(hub, patch, tmp_path / "cache", TOKEN)
        assert push_to_hub.main([str(tmp_path / "model"), "ada/never-seen"]) == 0
        snapshot_download("ada/never-seen")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)
    opened = ScratchBertModel.from_pretrained("ada/never-seen").eval()
    ids = torch.tensor([[2, 5, 6, 3]])
    with torch.no_grad():
        assert torch.equal(opened(ids).last_hidden_state, model(ids).last_hidden_state)
    assert ScratchBertConfig.from_pretrained("ada/never-seen").vocab_size == model.config.vocab_size
    with pytest.raises(OSError, match="not all of it"):
        ScratchBertModel.from_pretrained("ada/never-seen", subfolder="elsewhere")
    capsys.readouterr()
    assert check_parity.main(["ada/never-seen"]) == 0
    assert "equal" in capsys.readouterr().out


def test_weights_without_a_configuration(unreachable, tmp_path, monkeypatch):
    """What the cache has of a repository can be opened with what the caller knows, as an adapter's is."""
    model = saved(tmp_path / "model").eval()
    (tmp_path / "model" / "config.json").unlink()
    with serving(**{TOKEN: {"ada"}}) as hub, pytest.MonkeyPatch.context() as patch:
        use(hub, patch, tmp_path / "cache", TOKEN)
        HfApi().create_repo("ada/weights")
        HfApi().upload_folder(repo_id="ada/weights", folder_path=tmp_path / "model")
        snapshot_download("ada/weights")
    opened = ScratchBertModel.from_pretrained("ada/weights", config=model.config, local_files_only=True)
    assert torch.equal(opened.pooler.dense.weight, model.pooler.dense.weight)


@pytest.mark.parametrize("offline", [False, True])
def test_a_configuration_without_weights(unreachable, tmp_path, monkeypatch, offline):
    saved(tmp_path / "model")
    with serving(**{TOKEN: {"ada"}}) as hub, pytest.MonkeyPatch.context() as patch:
        use(hub, patch, tmp_path / "cache", TOKEN)
        assert push_to_hub.main([str(tmp_path / "model"), "ada/never-seen"]) == 0
        ScratchBertConfig.from_pretrained("ada/never-seen")
        (tmp_path / "model" / "model.safetensors").rename(tmp_path / "weights")
        assert push_to_hub.main([str(tmp_path / "model"), "ada/empty"]) == 2
        HfApi().create_repo("ada/empty")
        HfApi().upload_folder(repo_id="ada/empty", folder_path=tmp_path / "model")
        with pytest.raises(OSError, match="does not appear to have a file named"):
            ScratchBertModel.from_pretrained("ada/empty")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)
    with pytest.raises(OSError, match="not all of it") as caught:
        ScratchBertModel.from_pretrained("ada/never-seen")
    assert "\n" not in str(caught.value)
