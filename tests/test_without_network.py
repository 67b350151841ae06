"""A Hub that cannot be reached: one line that says what to do, and what is in the cache opens all the same."""

import time
from pathlib import Path

import pytest
import torch
import transformers
from huggingface_hub import constants, snapshot_download

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

# The scripts quieten their whole process.
pytestmark = pytest.mark.usefixtures("quiet_only_here")

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "cat", "sat", "on", "mat", "."]
WHAT_TO_DO = "hf download ada/never-seen"


@pytest.fixture
def unreachable(tmp_path, monkeypatch) -> str:
    """The address of a Hub that was there a moment ago. The client tries again, but does not wait in between."""
    with serving() as gone:
        pass
    use(gone, monkeypatch, tmp_path / "cache")
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    return gone.endpoint


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
def test_scripts(unreachable, tmp_path, monkeypatch, capsys, script, argv):
    def wait(seconds):
        raise AssertionError(f"It waits {seconds} s to try again.")

    monkeypatch.setattr(time, "sleep", wait)
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


def test_convert_and_push(unreachable, tmp_path, monkeypatch, capsys):
    assert convert_checkpoint.main(["ada/never-seen", str(tmp_path / "out")]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert "give the folder of the snapshot in the cache" in err

    monkeypatch.setenv("HF_TOKEN", "hf_" + "Ada" * 12)
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
    token = "hf_" + "Ada" * 12
    with serving(**{token: {"ada"}}) as hub, pytest.MonkeyPatch.context() as patch:
        use(hub, patch, tmp_path / "cache", token)
        assert push_to_hub.main([str(tmp_path / "model"), "ada/never-seen"]) == 0
        snapshot_download("ada/never-seen")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)
    opened = ScratchBertModel.from_pretrained("ada/never-seen").eval()
    ids = torch.tensor([[2, 5, 6, 3]])
    with torch.no_grad():
        assert torch.equal(opened(ids).last_hidden_state, model(ids).last_hidden_state)
    assert ScratchBertConfig.from_pretrained("ada/never-seen").vocab_size == model.config.vocab_size
    capsys.readouterr()
    assert check_parity.main(["ada/never-seen"]) == 0
    assert "equal" in capsys.readouterr().out
