"""`scripts/convert.py`: what goes in comes out, both ways, and what cannot be converted is refused."""

import os
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer, EncoderDecoderModel

import convert
from modeling_scratchbert import ScratchBertModel
from support.checkpoint_kinds import (
    assert_same_outputs,
    bert_tensors,
    change_config,
    change_tensors,
    write_bert,
    write_weights,
)
from support.commands import exit_code
from support.models import (
    OURS,
    REFERENCES,
    SPECIAL_TOKENS,
    random_bert,
    random_encoder_decoder,
    random_scratchbert,
    word_tokenizer,
)
from toolkit.common import read_json

pytestmark = pytest.mark.usefixtures("quiet_only_here")


run = partial(exit_code, convert)


def change(folder, edit=None, **fields):
    """Edits the tensors of a checkpoint, and sets fields of its config.json."""
    if edit is not None:
        change_tensors(folder, edit)
    change_config(folder, **fields)
    return folder


def drop(part: str):
    def edit(tensors):
        for name in [name for name in tensors if part in name]:
            del tensors[name]

    return edit


def weights(folder) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def files_in(folder) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def there_and_back(source, tmp_path):
    assert run(source, tmp_path / "there") == 0
    assert run(tmp_path / "there", tmp_path / "back", "--to", "bert") == 0
    return tmp_path / "there", tmp_path / "back"


# -------------------------------------------------------------------------------------------------------------- weights


def add_pooler(tensors):
    tensors["bert.pooler.dense.weight"], tensors["bert.pooler.dense.bias"] = torch.randn(32, 32), torch.randn(32)


CASES = {
    **{head: (head, {}, None, torch.float32) for head in REFERENCES},
    "heads that the named class drops": ("ForPreTraining", {"architectures": ["BertForMaskedLM"]}, None, torch.float32),
    "no architectures": ("ForQuestionAnswering", {"architectures": None}, None, torch.float32),
    "a pooler that is not used": ("ForTokenClassification", {}, add_pooler, torch.float32),
    "no pooler": ("Model", {}, drop("pooler"), torch.float32),
    "bfloat16": ("ForMaskedLM", {"dtype": "float32"}, None, torch.bfloat16),
}


@pytest.mark.parametrize("case", CASES)
def test_there_and_back(case, tmp_path):
    head, fields, edit, dtype = CASES[case]
    source = tmp_path / "bert"
    random_bert(head).to(dtype).save_pretrained(source)
    change(source, edit, **fields, _name_or_path="org/base")
    there, back = there_and_back(source, tmp_path)
    expected, found = weights(source), weights(back)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == dtype, name
        assert torch.equal(found[name], tensor), name
    assert read_json(there / "config.json")["architectures"] == [f"ScratchBert{head}"]
    config = read_json(back / "config.json")
    assert config["architectures"] == [REFERENCES[head].__name__]
    assert config["_name_or_path"] == read_json(there / "config.json")["_name_or_path"] == "org/base"
    assert config["dtype"] == str(dtype).removeprefix("torch.")


def test_two_berts(tmp_path):
    source = tmp_path / "two"
    random_encoder_decoder(decoder={"num_hidden_layers": 3}).save_pretrained(source)
    assert run(source, tmp_path / "there") == 0
    ours = OURS["ForConditionalGeneration"].from_pretrained(tmp_path / "there")
    assert_same_outputs(ours, EncoderDecoderModel.from_pretrained(source))
    assert run(tmp_path / "there", tmp_path / "back", "--to", "bert") == 2
    assert not (tmp_path / "back").exists()


def test_mixed_dtypes_become_the_one_that_holds_all(tmp_path):
    source = tmp_path / "bert"
    random_bert("Model").save_pretrained(source)
    change(source, lambda tensors: tensors.update({"pooler.dense.bias": tensors["pooler.dense.bias"].half()}))
    assert run(source, tmp_path / "there") == 0
    assert {tensor.dtype for tensor in weights(tmp_path / "there").values()} == {torch.float32}


def test_old_files_and_tensors_without_a_place(tmp_path, capsys):
    """A pickle in shards, with TensorFlow's names of the layer norms."""
    form = {"layer_norm": "gamma", "position_ids": True}
    source, bert = write_bert(tmp_path / "bert", container="sharded bin", **form), random_bert()
    write_weights(source, bert_tensors(bert, **form) | {"bert.whitening.weight": torch.ones(3)}, "sharded bin")
    assert run(source, tmp_path / "there") == 0
    assert_same_outputs(OURS["ForPreTraining"].from_pretrained(tmp_path / "there", verify=True), bert)
    told = capsys.readouterr().out
    assert "bert.whitening.weight" in told
    assert "position_ids" not in told


# -------------------------------------------------------------------------------------------------------- other files


def test_the_files_of_a_real_model(minilm, tmp_path):
    source = tmp_path / "minilm"
    shutil.copytree(minilm, source, copy_function=os.symlink)
    beside = {"README.md", "modules.json", "1_Pooling/config.json", "tokenizer.json", "vocab.txt", "notes/1.txt"}
    beside |= {"2_Dense/model.safetensors", "2_Dense/pytorch_model.bin"}
    left = {"tf_model.h5", "onnx/model.onnx", "pytorch_model.bin", "model.fp16.safetensors", ".git/HEAD"}
    left |= {"optimizer.pt", "checkpoint-5/model.safetensors", "openvino_model.xml"}
    for name in (beside | left) - files_in(Path(minilm)):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_text("{}")
    there, back = there_and_back(source, tmp_path)
    for folder in (there, back):
        assert beside <= files_in(folder)
        assert not files_in(folder) & left
        for name in beside:
            assert (folder / name).read_bytes() == (source / name).read_bytes(), name
    assert "modeling_scratchbert.py" in files_in(there)
    assert not {"modeling_scratchbert.py", "probe.json"} & files_in(back)


def test_a_bert_gets_the_vocabulary_of_its_tokenizer(tmp_path):
    random_scratchbert("Model").save_pretrained(tmp_path / "ours")
    word_tokenizer(["dog", "##s"]).save_pretrained(tmp_path / "ours")
    assert run(tmp_path / "ours", tmp_path / "bert", "--to", "bert") == 0
    assert (tmp_path / "bert" / "vocab.txt").read_text().splitlines() == [*SPECIAL_TOKENS, "dog", "##s"]


def test_a_vocabulary_alone_opens_as_the_tokenizer_of_a_bert(tmp_path):
    random_bert("Model").save_pretrained(tmp_path / "bert")
    (tmp_path / "bert" / "vocab.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\ndog\n##s\n")
    assert run(tmp_path / "bert", tmp_path / "ours") == 0
    assert AutoTokenizer.from_pretrained(tmp_path / "ours")("dogs").input_ids == [2, 5, 6, 3]


# ------------------------------------------------------------------------------------------------------------- bad uses


def random_folder(head, edit=None, **fields):
    def make(folder):
        random_bert(head).save_pretrained(folder)
        change(folder, edit, **fields)

    return make


def to_int8(tensors):
    tensors["pooler.dense.weight"] = tensors["pooler.dense.weight"].to(torch.int8)


def random_ours(folder):
    random_scratchbert("Model", norm_first=True).save_pretrained(folder)


@pytest.mark.parametrize(
    ("make", "flags", "says"),
    [
        (lambda folder: None, [], "source"),
        (random_folder("Model", model_type="roberta"), [], "roberta"),
        (random_folder("Model", architectures=["BertForRanking"]), [], "BertForRanking"),
        (random_folder("Model", architectures=["BertForMaskedLM"]), [], "lm_head.dense.weight"),
        (random_folder("ForSequenceClassification", drop("pooler")), [], "pooler.dense.bias"),
        (random_folder("ForTokenClassification", num_labels=5), [], "classifier.weight"),
        (random_folder("Model", auto_map={"AutoModel": "modeling_x.BertModel"}), [], "modeling_x.BertModel"),
        (random_folder("Model", quantization_config={"quant_method": "gptq"}), [], "quantised"),
        (random_folder("Model", to_int8), [], "quantised"),
        (random_folder("Model"), ["--to", "bert"], "--to is bert"),
        (random_folder("Model"), ["--revision", "main"], "--revision"),
        (random_ours, [], "--to is scratchbert"),
        (random_ours, ["--to", "bert"], "norm_first"),
    ],
)
def test_bad_sources(make, flags, says, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    make(tmp_path / "source")
    capsys.readouterr()
    assert run("./source", "new/there", *flags) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("convert.py: ")
    assert says in line
    assert not (tmp_path / "new" / "there").exists()


@pytest.mark.parametrize(
    ("output", "flags", "code"),
    [
        ("source", ["--overwrite"], 2),
        ("source/inside", [], 2),
        (".", ["--overwrite"], 2),
        ("file", ["--overwrite"], 2),
        ("empty", [], 0),
        ("link", ["--overwrite"], 0),
        ("other", ["--overwrite"], 2),
        ("checkpoint", [], 2),
        ("checkpoint", ["--overwrite"], 0),
        ("clone", ["--overwrite"], 2),
    ],
)
def test_outputs(output, flags, code, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    random_bert("Model").save_pretrained("source")
    for name in ("empty", "other", "checkpoint", "clone/.git"):
        os.makedirs(name)
    for name in ("file", "other/thesis.txt", "checkpoint/config.json", "checkpoint/stale.txt", "clone/config.json"):
        (tmp_path / name).write_text("{}")
    (tmp_path / "link").symlink_to("checkpoint")
    before = files_in(tmp_path)
    assert run("source", output, *flags) == code
    if code:
        assert files_in(tmp_path) == before
    else:
        ScratchBertModel.from_pretrained(output, verify=True)
        assert not (tmp_path / output / "stale.txt").exists()
        assert (tmp_path / "link").is_symlink()


def test_an_interruption_leaves_the_output_as_it_was(tmp_path, monkeypatch):
    def fail(*args):
        raise KeyboardInterrupt

    source, target = tmp_path / "source", tmp_path / "there"
    random_bert("Model").save_pretrained(source)
    assert run(source, target) == 0
    change(source, lambda tensors: tensors["pooler.dense.bias"].fill_(7))
    (source / "vocab.txt").write_text("")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    monkeypatch.setattr(convert.shutil, "copyfile", fail)
    assert run(source, target, "--overwrite") == 130
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
