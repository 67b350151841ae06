"""scripts/convert_checkpoint.py: what goes in comes out, both ways, and what does not is told."""

import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from huggingface_hub import RepoCard
from huggingface_hub.errors import DryRunError
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModel,
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    BertConfig,
    BertModel,
    BertTokenizer,
    EncoderDecoderModel,
    GenerationConfig,
)
from transformers.dynamic_module_utils import get_class_from_dynamic_module
from transformers.utils import is_peft_available

import convert_checkpoint
import modeling_scratchbert
from modeling_scratchbert.bert.export import NOT_IN_BERT
from modeling_scratchbert.bert.names import OUTPUT_BIAS_ALIAS, to_bert, to_scratchbert
from support.checkpoint_kinds import assert_same_outputs, change_config
from support.folders import SCRIPTS
from support.golden import assert_golden
from support.models import (
    BERTS,
    ENCODER_DECODERS,
    NEEDS,
    OURS,
    REFERENCES,
    random_encoder_decoder,
    randomise,
    tiny_config,
)
from toolkit import conversion as script
from toolkit.conversion import BEGIN, END

SCRIPT = SCRIPTS / "convert_checkpoint.py"

VOCABULARY = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "boat", "##s", "sink", "##ing"]
REWRITTEN = {"config.json", "README.md", "model.safetensors"}


@pytest.fixture
def bert(tmp_path):
    """Makes a BERT checkpoint with random weights. `fields` go into its config.json as they are."""

    def make(name="Model", fields=None, edit=None, dtype=torch.float32, **config):
        folder = tmp_path / "bert"
        model = REFERENCES[name](tiny_config(BertConfig, **{**NEEDS.get(name, {}), **config}))
        randomise(model).to(dtype).save_pretrained(folder)
        if fields is not None:
            path = folder / "config.json"
            path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))
        if edit is not None:
            rewrite(folder, edit)
        return folder

    return make


def rewrite(folder, edit):
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def drop(prefix):
    def edit(tensors):
        for name in [name for name in tensors if name.startswith(prefix)]:
            del tensors[name]

    return edit


def read_config(folder):
    return json.loads((folder / "config.json").read_text())


def files_in(folder):
    return {path.relative_to(folder).as_posix() for path in Path(folder).rglob("*") if path.is_file()}


def assert_same_tensors(one, other):
    assert set(one) == set(other)
    for name, tensor in one.items():
        assert tensor.dtype == other[name].dtype, name
        assert torch.equal(tensor, other[name]), name


def there_and_back(source, tmp_path):
    """Converts twice; returns both folders and both reports."""
    there = script.convert(source, tmp_path / "there")
    back = script.convert(tmp_path / "there", tmp_path / "back", to="bert")
    return tmp_path / "there", tmp_path / "back", there, back


# ------------------------------------------------------------------------------------------------ real weights


@pytest.fixture(scope="module")
def minilm_there_and_back(minilm, tmp_path_factory):
    return there_and_back(minilm, tmp_path_factory.mktemp("minilm"))


def test_minilm_comes_back_bit_for_bit(minilm, minilm_there_and_back):
    there, back, report, _ = minilm_there_and_back
    original = load_file(Path(minilm, "model.safetensors"))
    del original["embeddings.position_ids"]
    assert report.left == {"tensor embeddings.position_ids": "the numbers 0, 1, 2, …, which the model counts itself"}
    assert report.tensors == len(original) == 103
    assert report.parameters == sum(tensor.numel() for tensor in original.values())
    assert_same_tensors(load_file(back / "model.safetensors"), original)
    assert read_config(there)["model_type"] == "scratchbert"
    assert read_config(back)["model_type"] == "bert"


def test_minilm_keeps_what_lies_beside_its_weights(minilm, minilm_there_and_back):
    there, back, _, _ = minilm_there_and_back
    beside = files_in(minilm) - REWRITTEN
    assert {"modules.json", "1_Pooling/config.json", "tokenizer.json", ".gitattributes"} <= beside
    for name in beside:
        assert (there / name).read_bytes() == (back / name).read_bytes() == Path(minilm, name).read_bytes(), name
    assert files_in(back) == files_in(minilm)
    assert files_in(there) == files_in(minilm) | script.OUR_CODE | {"probe.json"}


@torch.no_grad()
def test_minilm_computes_what_bert_model_does(minilm, minilm_there_and_back, reviews):
    there, back, _, _ = minilm_there_and_back
    texts = [review["text"] for review in reviews[:8]]
    inputs = AutoTokenizer.from_pretrained(minilm)(texts, padding=True, truncation=True, return_tensors="pt")
    own = AutoTokenizer.from_pretrained(there, trust_remote_code=True)
    assert isinstance(own, BertTokenizer)
    for name, value in own(texts, padding=True, truncation=True, return_tensors="pt").items():
        assert torch.equal(value, inputs[name]), name

    # The folder's own copy of the code, as it runs where the package is not installed.
    remote = get_class_from_dynamic_module("modeling_scratchbert.ScratchBertModel", there)
    assert remote is not modeling_scratchbert.ScratchBertModel
    expected = BertModel.from_pretrained(minilm)(**inputs)
    real = inputs["attention_mask"].bool()
    for model in (
        AutoModel.from_pretrained(there, trust_remote_code=True),
        remote.from_pretrained(there),
        BertModel.from_pretrained(back),
    ):
        outputs = model(**inputs)
        torch.testing.assert_close(outputs.pooler_output, expected.pooler_output, atol=1e-5, rtol=0)
        torch.testing.assert_close(outputs.last_hidden_state[real], expected.last_hidden_state[real], atol=1e-5, rtol=0)


# ------------------------------------------------------------------------------------------------ classes and weights


CROSSED = {f"{name} with cross-attention": name for name in ("Model", "ForCausalLM")}


@pytest.mark.parametrize("name", [*BERTS, *CROSSED])
@torch.no_grad()
def test_every_class_there_and_back(name, bert, tmp_path):
    crossed, name = name in CROSSED, CROSSED.get(name, name)
    source = bert(name, **({"is_decoder": True, "add_cross_attention": True} if crossed else {}))
    there, back, report, _ = there_and_back(source, tmp_path)
    assert (report.left, report.notes) == ({}, [])
    assert read_config(there)["architectures"] == [f"ScratchBert{name}"]
    assert_same_tensors(load_file(back / "model.safetensors"), load_file(source / "model.safetensors"))
    config = read_config(back)
    assert config["architectures"] == [REFERENCES[name].__name__]
    assert (config["is_decoder"], config["add_cross_attention"]) == (crossed or name == "ForCausalLM", crossed)
    assert set(config) - set(read_config(source)) == {"position_embedding_type", "tokenizer_class"}

    ids = torch.arange(5, 17).view(2, 6)
    ids = ids.view(1, 2, 6) if name == "ForMultipleChoice" else ids
    options = {"encoder_hidden_states": torch.randn(2, 3, 32)} if crossed else {}
    if crossed or name == "ForCausalLM":
        options["use_cache"] = False
    expected = REFERENCES[name].from_pretrained(source)(ids, **options).to_tuple()
    outputs = OURS[name].from_pretrained(there, verify=True)(ids, **options).to_tuple()
    for own, reference in zip(outputs, expected, strict=True):
        torch.testing.assert_close(own, reference, atol=1e-5, rtol=0)


def test_heads_that_the_named_class_would_drop_are_kept(bert, tmp_path):
    """bert-base-uncased: `BertForMaskedLM` in its config.json, `BertForPreTraining` in its file."""
    source = bert("ForPreTraining", fields={"architectures": ["BertForMaskedLM"]})
    there, back, report, _ = there_and_back(source, tmp_path)
    assert report.model_class == "ScratchBertForPreTraining"
    assert "all of BertForPreTraining" in report.notes[0]
    assert read_config(there)["architectures"] == ["ScratchBertForMaskedLM"]
    assert read_config(back)["architectures"] == ["BertForMaskedLM"]
    assert_same_tensors(load_file(back / "model.safetensors"), load_file(source / "model.safetensors"))


@pytest.mark.parametrize("name", [name for name in BERTS if name != "ForMultipleChoice"])
def test_without_architectures_the_tensors_decide(name, bert, tmp_path):
    source = bert(name, fields={"architectures": None})
    there, back, report, _ = there_and_back(source, tmp_path)
    assert report.model_class == f"ScratchBert{name}"
    assert report.notes == [f"config.json names no architectures; the tensors are those of {REFERENCES[name].__name__}"]
    assert read_config(there)["architectures"] == [f"ScratchBert{name}"]
    assert_same_tensors(load_file(back / "model.safetensors"), load_file(source / "model.safetensors"))


@pytest.mark.parametrize("name", ["ForMaskedLM", "ForCausalLM"])
def test_the_named_class_stands_whichever_way_it_looks(name, bert, tmp_path):
    """The two have the same tensors, and either may look both ways or back only."""
    source = bert(name, is_decoder=name == "ForMaskedLM")
    _, back, report, _ = there_and_back(source, tmp_path)
    assert (report.model_class, report.notes) == (f"ScratchBert{name}", [])
    assert read_config(back)["architectures"] == [REFERENCES[name].__name__]


def test_a_head_that_the_named_class_would_drop_is_a_decoders(bert, tmp_path):
    report = script.convert(bert("ForCausalLM", fields={"architectures": ["BertModel"]}), tmp_path / "there")
    assert report.model_class == "ScratchBertForCausalLM"
    assert report.notes == ["config.json names BertModel; the file has all of BertLMHeadModel, which is kept"]


@pytest.mark.parametrize("name", ["ForMaskedLM", "ForTokenClassification", "ForQuestionAnswering", "ForCausalLM"])
def test_a_pooler_that_the_class_does_not_use_is_kept(name, bert, tmp_path):
    def add_pooler(tensors):
        tensors["bert.pooler.dense.weight"] = torch.randn(32, 32)
        tensors["bert.pooler.dense.bias"] = torch.randn(32)

    source = bert(name, edit=add_pooler)
    there, back, report, _ = there_and_back(source, tmp_path)
    assert report.left == {}
    assert_same_tensors(load_file(back / "model.safetensors"), load_file(source / "model.safetensors"))
    reference = BertModel.from_pretrained(source)
    assert torch.equal(AutoModel.from_pretrained(there).pooler.dense.weight, reference.pooler.dense.weight)


def test_no_pooler_stays_no_pooler(bert, tmp_path):
    source = bert("Model", edit=drop("pooler"))
    there, back, report, _ = there_and_back(source, tmp_path)
    assert report.notes == ["the source has no pooler, so the target has none either"]
    assert not [name for name in load_file(there / "model.safetensors") if "pooler" in name]
    assert_same_tensors(load_file(back / "model.safetensors"), load_file(source / "model.safetensors"))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("claimed", ["same", "float32"])
def test_the_dtype_is_the_files_own(dtype, claimed, bert, tmp_path):
    fields = None if claimed == "same" else {"dtype": "float32", "torch_dtype": "float32"}
    source = bert("ForMaskedLM", dtype=dtype, fields=fields)
    there, back, report, _ = there_and_back(source, tmp_path)
    assert report.dtype == str(dtype)
    assert {tensor.dtype for tensor in load_file(there / "model.safetensors").values()} == {dtype}
    assert_same_tensors(load_file(back / "model.safetensors"), load_file(source / "model.safetensors"))
    for folder in (there, back):
        assert read_config(folder)["dtype"] == str(dtype).removeprefix("torch.")
        assert "torch_dtype" not in read_config(folder)


def test_mixed_dtypes_become_the_one_that_holds_all(bert, tmp_path):
    def halve(tensors):
        tensors["pooler.dense.bias"] = tensors["pooler.dense.bias"].half()

    source = bert(edit=halve)
    there, _, report, _ = there_and_back(source, tmp_path)
    converted = load_file(there / "model.safetensors")["pooler.dense.bias"]
    assert converted.dtype == torch.float32
    assert torch.equal(converted.half(), load_file(source / "model.safetensors")["pooler.dense.bias"])
    assert report.notes == [
        "the weights are in torch.float16 and torch.float32; all are written in torch.float32, without loss"
    ]


def test_older_forms_of_a_file(bert, tmp_path):
    """A pickle in shards, TensorFlow's names for the layer norms, and the prefix of a model with a head."""
    source = bert("Model")
    tensors = load_file(source / "model.safetensors")
    (source / "model.safetensors").unlink()
    old_names = {
        name: "bert." + name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta")
        for name in tensors
    }
    shards = {name: f"pytorch_model-0000{1 + i % 2}-of-00002.bin" for i, name in enumerate(old_names.values())}
    for shard in set(shards.values()):
        torch.save({old: tensors[new] for new, old in old_names.items() if shards[old] == shard}, source / shard)
    (source / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": shards}))

    there, back, report, _ = there_and_back(source, tmp_path)
    assert report.left == {}
    assert not [name for name in files_in(there) if "pytorch_model" in name]
    assert_same_tensors(load_file(back / "model.safetensors"), tensors)


def test_tensors_that_no_class_has_are_named(bert, tmp_path, capsys):
    def add(tensors):
        tensors["cls.predictions.decoder.bias"] = tensors["cls.predictions.bias"] + 1
        tensors["bert.whitening.weight"] = torch.ones(3)

    source = bert("ForMaskedLM", edit=add, tie_word_embeddings=False)
    assert convert_checkpoint.main([str(source), str(tmp_path / "there")]) == 0
    told = capsys.readouterr().out
    assert "tensor bert.whitening.weight: ScratchBertForMaskedLM has no place for it" in told
    assert "tensor cls.predictions.bias: cls.predictions.decoder.bias differs" in told


# ------------------------------------------------------------------------------------------------ two halves


@pytest.fixture
def two_berts(tmp_path):
    """Makes the checkpoint of an EncoderDecoderModel, with random weights and a decoder of three layers."""

    def make(edit=None, dtype=torch.float32, **fields):
        folder = tmp_path / "bert2bert"
        random_encoder_decoder(decoder={"num_hidden_layers": 3}, **fields).to(dtype).save_pretrained(folder)
        if edit is not None:
            rewrite(folder, edit)
        return folder

    return make


NEVER_USED = {
    f"tensor encoder.pooler.dense.{leaf}": "the encoder's pooler, which EncoderDecoderModel never uses"
    for leaf in ("bias", "weight")
}


def by_canonical_name(tensors):
    named = {to_scratchbert(name, "encoder-decoder"): tensor for name, tensor in tensors.items()}
    return {name: tensor for name, tensor in named.items() if ".pooler." not in name}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_two_berts(dtype, two_berts, tmp_path):
    source, there = two_berts(dtype=dtype), tmp_path / "there"
    report = script.convert(source, there)
    assert report.model_class == "ScratchBertForConditionalGeneration"
    assert (report.left, report.notes) == (NEVER_USED, [])
    ours, theirs = (load_file(folder / "model.safetensors") for folder in (there, source))
    assert_same_tensors(ours, by_canonical_name(theirs))
    assert report.tensors == len(ours) == len(theirs) - 2
    assert (there / "generation_config.json").read_bytes() == (source / "generation_config.json").read_bytes()

    config = read_config(there)
    assert config["architectures"] == ["ScratchBertForConditionalGeneration"]
    assert (config["num_hidden_layers"], config["num_decoder_layers"]) == (2, 3)
    assert config["decoder_start_token_id"] == 2
    assert not {"encoder", "decoder"} & set(config)
    if dtype == torch.float32:
        reference = EncoderDecoderModel.from_pretrained(source)
        remote = get_class_from_dynamic_module("modeling_scratchbert.ScratchBertForConditionalGeneration", there)
        assert remote is not OURS["ForConditionalGeneration"]
        for model in (AutoModelForSeq2SeqLM.from_pretrained(there), remote.from_pretrained(there)):
            assert_same_outputs(model, reference)


def test_what_lies_beside_two_berts(two_berts, tmp_path):
    source, there = two_berts(), tmp_path / "there"
    (tmp_path / "words").write_text("\n".join(VOCABULARY) + "\n")
    tokenizer = BertTokenizer(str(tmp_path / "words"))
    tokenizer.save_pretrained(source)
    write_readme(source, "license: mit\n", "\nA summariser.\n")
    (source / "notes").mkdir()
    (source / "notes" / "1.txt").write_text("as it was")
    script.convert(source, there)

    for name in files_in(source) - REWRITTEN:
        assert (there / name).read_bytes() == (source / name).read_bytes(), name
    card = RepoCard((there / "README.md").read_text())
    assert card.data.pipeline_tag == "text2text-generation"
    assert card.data.license == "mit"
    assert card.text.endswith("\nA summariser.\n")
    text = " ".join(card.text.split())
    assert "computes what `EncoderDecoderModel` computes" in text
    assert 'AutoModelForSeq2SeqLM.from_pretrained("there", trust_remote_code=True)' in text
    own = AutoTokenizer.from_pretrained(there)
    assert own("a boats sinking") == tokenizer("a boats sinking")

    summarise = {"max_new_tokens": 8, "num_beams": 2}
    inputs = tokenizer(["a boat sinking", "boats"], padding=True, return_tensors="pt")
    expected = EncoderDecoderModel.from_pretrained(source).eval().generate(**inputs, **summarise)
    assert torch.equal(AutoModelForSeq2SeqLM.from_pretrained(there).generate(**inputs, **summarise), expected)


def test_two_berts_as_transformers_4_wrote_them(two_berts, tmp_path):
    """All fields of either half, settings of `generate` beside them; here, halves that are the same tensors."""
    source, there = tmp_path / "old", tmp_path / "there"
    source.mkdir()
    model = random_encoder_decoder()
    for name, tensor in model.decoder.bert.state_dict().items():
        if ".crossattention." not in name:
            tensor.copy_(model.encoder.state_dict()[name])
    tensors = model.state_dict()
    for half in ("encoder", "decoder.bert"):
        tensors[f"{half}.embeddings.position_ids"] = torch.arange(20)[None]
    torch.save(tensors, source / "pytorch_model.bin")
    every_field = {
        "max_length": 20,
        "num_beams": 1,
        "is_encoder_decoder": False,
        "decoder_start_token_id": None,
        "tokenizer_class": None,
        "tie_encoder_decoder": False,
        "gradient_checkpointing": False,
    }
    fields = model.config.to_dict()
    halves = {half: {**fields[half], **every_field} for half in ("encoder", "decoder")}
    settings = {"num_beams": 4, "max_length": 14, "no_repeat_ngram_size": 3}
    (source / "config.json").write_text(json.dumps({**fields, **halves, **settings, "tie_encoder_decoder": True}))

    report = script.convert(source, there)
    left = {why for name, why in report.left.items() if name.endswith("position_ids")}
    assert left == {"the numbers 0, 1, 2, …, which the model counts itself"}
    assert set(report.left) - set(NEVER_USED) == {f"tensor {name}" for name in tensors if "position_ids" in name}
    stored = load_file(there / "model.safetensors")
    assert not [name for name in stored if name.startswith("model.decoder.") and "cross_attention" not in name]
    expected = by_canonical_name({name: t for name, t in tensors.items() if "position_ids" not in name})
    assert_same_tensors(stored, {name: tensor for name, tensor in expected.items() if name in stored})

    config = read_config(there)
    assert {name: config[name] for name in settings} == settings
    assert config["tokenizer_class"] == "BertTokenizer"
    assert config["tie_encoder_decoder"] is True
    assert not (there / "generation_config.json").exists()
    ids = torch.randint(5, 90, (2, 7))
    reference = EncoderDecoderModel.from_pretrained(source).eval()
    assert torch.equal(OURS["ForConditionalGeneration"].from_pretrained(there).generate(ids), reference.generate(ids))


def test_two_berts_without_architectures(two_berts, tmp_path):
    source = two_berts()
    change_config(source, architectures=None)
    report = script.convert(source, tmp_path / "there")
    assert report.notes == ["config.json names no architectures; the tensors are those of EncoderDecoderModel"]
    assert read_config(tmp_path / "there")["architectures"] == ["ScratchBertForConditionalGeneration"]


def test_the_bias_that_two_berts_compute_with(two_berts, tmp_path):
    def add(tensors):
        tensors["decoder.cls.predictions.decoder.bias"] = tensors["decoder.cls.predictions.bias"] + 1

    report = script.convert(two_berts(edit=add, tie_word_embeddings=False), tmp_path / "there")
    (alias,) = set(report.left) - set(NEVER_USED)
    assert alias == f"tensor decoder.{OUTPUT_BIAS_ALIAS}"
    assert "differs" in report.left[alias]


@pytest.mark.parametrize(
    ("edit", "says"),
    [
        (drop("encoder.encoder.layer.1"), "encoder.encoder.layer.1.attention.self.query.weight is not in the file"),
        (drop("encoder.embeddings.word"), "encoder.embeddings.word_embeddings.weight is not in the file"),
        (
            drop("decoder.bert.encoder.layer.2.cross"),
            "decoder.bert.encoder.layer.2.crossattention.self.key.bias is not",
        ),
        (drop("decoder.cls"), "decoder.cls.predictions.transform.dense.weight is not in the file"),
        (
            lambda tensors: tensors.update({"decoder.bert.embeddings.LayerNorm.bias": torch.ones(3)}),
            "decoder.bert.embeddings.LayerNorm.bias is (3,) and not (32,)",
        ),
    ],
)
@pytest.mark.usefixtures("quiet_only_here")
def test_nothing_of_two_berts_is_filled_in_at_random(edit, says, two_berts, tmp_path, capsys):
    assert_refused([two_berts(edit=edit), tmp_path / "there"], says, capsys)
    assert not (tmp_path / "there").exists()


@pytest.mark.usefixtures("quiet_only_here")
def test_two_halves_that_are_refused(two_berts, tmp_path, capsys):
    source, target = two_berts(), tmp_path / "there"
    assert_refused([source, target, "--to", "bert"], "is a Bert checkpoint already; --to scratchbert", capsys)
    change_config(source, decoder={**read_config(source)["decoder"], "hidden_size": 64})
    assert_refused([source, target], "hidden_size is 32 in the encoder and 64", capsys)
    for name in ENCODER_DECODERS:
        ours = tmp_path / name
        OURS[name](tiny_config(is_encoder_decoder=True)).save_pretrained(ours)
        assert_refused([ours, target], "is a ScratchBert checkpoint already; --to bert", capsys)
        assert_refused([ours, target, "--to", "bert"], f"ScratchBert{name} has an encoder and a decoder", capsys)
    assert not target.exists()


def test_each_name_in_a_file_of_two_berts_has_one_of_ours():
    theirs, ours = random_encoder_decoder(), OURS["ForConditionalGeneration"]
    config = modeling_scratchbert.ScratchBertConfig.from_bert(theirs.config)
    names = {name: to_scratchbert(name, "encoder-decoder") for name in theirs.state_dict() if "pooler" not in name}
    del names[f"decoder.{OUTPUT_BIAS_ALIAS}"]  # one more name for the decoder's
    assert sorted(names.values()) == sorted(ours(config).state_dict())
    assert {name: to_bert(own, "encoder-decoder") for name, own in names.items()} == {name: name for name in names}
    for stray in ("encoder.cls.predictions.bias", "decoder.bert.x.weight", "enc_to_dec_proj.weight"):
        assert to_scratchbert(stray, "encoder-decoder") is None
    for stray in ("model.encoder.encoder.final_norm.weight", "model.decoder.x.weight", "gate.weight"):
        assert to_bert(stray, "encoder-decoder") is None


# ------------------------------------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("name", "fields", "edit", "says"),
    [
        ("Model", {"architectures": ["BertForMaskedLM"]}, None, "cls.predictions.transform.dense.weight is not in"),
        ("ForSequenceClassification", None, drop("bert.pooler"), "bert.pooler.dense.bias is not in the file"),
        ("ForSequenceClassification", {"architectures": ["BertForMaskedLM"]}, None, "cls.predictions.bias is not in"),
        ("ForTokenClassification", {"num_labels": 5}, None, "classifier.weight is (2, 32) and not (5, 32)"),
    ],
)
def test_nothing_is_filled_in_at_random(name, fields, edit, says, bert, tmp_path, capsys):
    source = bert(name, fields=fields, edit=edit)
    assert convert_checkpoint.main([str(source), str(tmp_path / "new" / "there")]) == 2
    assert says.replace("cls.predictions.bias", "cls.predictions.decoder.bias") in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bert"]


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"model_type": "roberta", "architectures": ["RobertaModel"]}, "has model_type 'roberta'"),
        ({"position_embedding_type": "relative_key"}, "'relative_key'"),
        ({"architectures": ["BertForRanking"]}, "is of the class BertForRanking; expected one of BertForPreTraining"),
        (
            {"architectures": ["EncoderDecoderModel"]},
            "is of the class EncoderDecoderModel; expected one of BertForPreTraining",
        ),
        ({"auto_map": {"AutoModel": "modeling_x.BertModel"}}, "names its own code"),
        ({"quantization_config": {"quant_method": "gptq"}}, "is quantised"),
        ({"model_type": "scratchbert"}, "is a ScratchBert checkpoint already; --to bert"),
        ({"hidden_size": 33}, "hidden_size is 33"),
        ({"hidden_size": "wide"}, "hidden_size"),
    ],
)
def test_refused_by_its_config(fields, says, bert, tmp_path, capsys):
    assert_refused([bert(fields=fields), tmp_path / "there"], says, capsys)
    assert not (tmp_path / "there").exists()


def assert_refused(arguments, says, capsys):
    """One line on the screen, and exit code 2."""
    capsys.readouterr()
    assert convert_checkpoint.main([str(argument) for argument in arguments]) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert re.fullmatch("convert_checkpoint.py: [^\n]+\n", told.err), told.err
    assert says in told.err


def test_refused_by_its_files(bert, tmp_path, capsys):
    target = tmp_path / "there"
    assert_refused([tmp_path / "nowhere", target], "There is no folder", capsys)
    source = bert()
    assert_refused([Path(__file__).parent, target], "no config.json", capsys)
    assert_refused([__file__, target], "no config.json", capsys)
    assert_refused([source, target, "--to", "bert"], "is a Bert checkpoint already; --to scratchbert", capsys)
    assert_refused([source, target, "--revision", "main"], "--revision is given for the folder", capsys)
    weights = (source / "model.safetensors").read_bytes()
    (source / "model.safetensors").write_bytes(weights[:-100])
    assert_refused([source, target], "not a file of weights", capsys)
    rewritten = {"weight_map": {"pooler.dense.bias": "model-00001-of-00001.safetensors"}}
    (source / "model.safetensors").unlink()
    (source / "model.safetensors.index.json").write_text(json.dumps(rewritten))
    assert_refused([source, target], "expected JSON with 'metadata' and 'weight_map'", capsys)
    (source / "model.safetensors.index.json").write_text(json.dumps({**rewritten, "metadata": {}}))
    assert_refused([source, target], "model-00001-of-00001.safetensors", capsys)
    (source / "model.safetensors.index.json").unlink()
    assert_refused([source, target], "no weights that PyTorch reads", capsys)
    save_file({"conv.weight": torch.ones(3)}, source / "model.safetensors", metadata={"format": "pt"})
    assert_refused([source, target], "expected the tensors of a BERT", capsys)
    (source / "config.json").write_text("{")
    assert_refused([source, target], "config.json is not JSON", capsys)
    (source / "config.json").write_text("[]")
    assert_refused([source, target], "config.json is not a JSON object", capsys)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bert"]


def test_a_changed_weight_is_never_written(bert, tmp_path, monkeypatch, capsys):
    source = bert()
    open_class = script.open_class

    def open_and_change(*args, **kwargs):
        model = open_class(*args, **kwargs)
        with torch.no_grad():
            model.encoder.blocks[1].attention.key.bias[3] = -0.0
        return model

    rewrite(source, lambda tensors: tensors["encoder.layer.1.attention.self.key.bias"][3].zero_())
    monkeypatch.setattr(script, "open_class", open_and_change)
    assert convert_checkpoint.main([str(source), str(tmp_path / "there")]) == 2
    assert "encoder.layer.1.attention.self.key.bias would change" in capsys.readouterr().err
    assert not (tmp_path / "there").exists()


def test_what_bert_cannot_express_is_refused(tmp_path, capsys):
    source, target = tmp_path / "source", tmp_path / "back"
    modeling_scratchbert.ScratchBertModel(tiny_config(norm_first=True)).save_pretrained(source)
    assert convert_checkpoint.main([str(source), str(target), "--to", "bert"]) == 2
    assert "norm_first is True" in capsys.readouterr().err

    config = read_config(source)
    (source / "config.json").write_text(json.dumps({**config, "architectures": ["MyGatedBert"]}))
    assert_refused([source, target, "--to", "bert"], "is of the class MyGatedBert; expected one of ScratchBert", capsys)
    assert not target.exists()


# ------------------------------------------------------------------------------------------------ the two folders


def test_a_target_in_use_is_not_touched(bert, tmp_path, capsys):
    source, target = bert(), tmp_path / "there"
    assert_refused([source, source], "expected two folders", capsys)
    assert_refused([source, source / "inside", "--overwrite"], "expected two folders", capsys)
    assert_refused([source, tmp_path, "--overwrite"], "expected two folders", capsys)
    target.mkdir()
    (target / "thesis.txt").write_text("ten years")
    assert_refused([source, target], "is not empty; --overwrite", capsys)
    assert_refused([source, target, "--overwrite"], "no config.json", capsys)
    (target / "config.json").write_text("{}")
    (target / ".git").mkdir()
    assert_refused([source, target, "--overwrite"], ".git", capsys)
    assert_refused([source, target / "thesis.txt"], "is a file", capsys)
    assert (target / "thesis.txt").read_text() == "ten years"


def test_overwrite_replaces_a_checkpoint_whole(bert, tmp_path):
    source, target = bert(), tmp_path / "new" / "there"
    script.convert(source, target)
    (target / "stale.txt").write_text("from before")
    with pytest.raises(FileExistsError):
        script.convert(source, target)
    rewrite(source, lambda tensors: tensors["pooler.dense.bias"].fill_(7))
    script.convert(source, target, overwrite=True)
    assert not (target / "stale.txt").exists()
    assert torch.all(load_file(target / "model.safetensors")["pooler.dense.bias"] == 7)
    assert [path.name for path in target.parent.iterdir()] == ["there"]


@pytest.mark.parametrize("existed", [False, True])
@pytest.mark.parametrize(
    ("failure", "code", "says"),
    [(KeyboardInterrupt(), 130, "is unchanged"), (OSError(28, "No space left on device"), 2, "No space left")],
)
def test_an_interrupted_conversion_leaves_the_target_as_it_was(
    failure, code, says, existed, bert, tmp_path, monkeypatch, capsys
):
    source, target = bert(), tmp_path / "there"
    if existed:
        script.convert(source, target)
        rewrite(source, lambda tensors: tensors["pooler.dense.bias"].fill_(7))
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}

    def fail(folder, *args):
        assert (folder / "model.safetensors").exists()  # all but the card is written
        raise failure

    monkeypatch.setattr(script, "write_card", fail)
    assert convert_checkpoint.main([str(source), str(target), "--overwrite"]) == code
    assert says in capsys.readouterr().err
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    assert target.exists() == existed


def test_a_failed_swap_puts_the_old_target_back(bert, tmp_path, monkeypatch):
    source, target = bert(), tmp_path / "there"
    script.convert(source, target)
    (target / "mark").write_text("old")
    rename = Path.rename

    def fail_on_new(path, to):
        if path.name == "new":
            raise OSError("busy")
        return rename(path, to)

    monkeypatch.setattr(Path, "rename", fail_on_new)
    with pytest.raises(OSError, match="busy"):
        script.convert(source, target, overwrite=True)
    assert (target / "mark").read_text() == "old"


# ------------------------------------------------------------------------------------------------ what lies beside


LEFT = [
    "tf_model.h5",
    "flax_model.msgpack",
    "rust_model.ot",
    "pytorch_model.bin",
    "model.fp16.safetensors",
    "bert_model.ckpt.index",
    "optimizer.pt",
    "probe.fp16.json",
    "probe.json",  # the target has its own
    *([] if is_peft_available() else ["adapter_config.json"]),  # which PEFT would open
    "onnx/model.onnx",
    "onnx/config.json",
    "openvino/openvino_model.xml",
    ".git/objects/ab/cdef",
    ".cache/huggingface/x.lock",
    "checkpoint-500/model.safetensors",
]
CARRIED = [
    "2_Dense/model.safetensors",
    "2_Dense/pytorch_model.bin",
    "generation_config.json",
    "handler.py",
    "LICENSE",
    "trainer_state.json",
    "deep/er/notes.txt",
]


def test_what_is_carried_and_what_is_left(bert, tmp_path, capsys):
    source, target = bert(), tmp_path / "there"
    for name in [*LEFT, *CARRIED, "attention.py"]:
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_text(f"this is {name}")
    (tmp_path / "elsewhere").mkdir()
    (source / "linked").symlink_to(tmp_path / "elsewhere")
    (source / "NOTICE").symlink_to(source / "LICENSE")

    report = script.convert(source, target)
    assert set(report.left) == {*LEFT, "attention.py", "linked"}
    assert sorted(report.copied) == sorted([*CARRIED, "NOTICE"])
    assert files_in(target) == {*CARRIED, "NOTICE", *REWRITTEN, *script.OUR_CODE, "probe.json"}
    modeling_scratchbert.ScratchBertModel.from_pretrained(target, verify=True)
    for name in CARRIED:
        assert (target / name).read_text() == f"this is {name}"
    assert not (target / "NOTICE").is_symlink()
    assert (target / "attention.py").read_text() == Path(modeling_scratchbert.attention.__file__).read_text()

    script.print_report(report, "there", "scratchbert")
    told = capsys.readouterr().out
    assert told.startswith("there: ScratchBertModel, 39 tensors, ")
    for name in LEFT:
        assert (name.split("/")[0] + "/" if "/" in name else name) in told
    assert ".git/… (1 files)" in told


@pytest.mark.parametrize("to", ["bert", "scratchbert"])
def test_checkpoints_and_logs_of_a_trained_folder_are_left(to, bert, tmp_path, capsys):
    if to == "bert":
        source = tmp_path / "trained"
        randomise(OURS["ForSequenceClassification"](tiny_config())).save_pretrained(source)
    else:
        source = bert("ForSequenceClassification")
    left = {
        "checkpoints": {
            "checkpoints/step-00000004-epoch-1/model.safetensors",
            "checkpoints/step-00000006/scheduler.bin",
        },
        "logs": {"logs/events.out.tfevents.1.host", "logs/1700000000.5/hparams.yml"},
        "runs": {"runs/events.out.tfevents.2.host"},
    }
    kept = {"metrics.json", "curves.png", "recipe.yaml"}
    for name in kept.union(*left.values()):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_text("{}")

    report = script.convert(source, tmp_path / "there", to=to)
    # A ScratchBert's own code and its probe are left behind as well.
    assert set(report.left) - script.OUR_CODE - {"probe.json"} == set.union(*left.values())
    assert kept <= files_in(tmp_path / "there")
    assert not files_in(tmp_path / "there") & set.union(*left.values())
    assert {path.name for path in (tmp_path / "there").iterdir() if path.is_dir()} == set()

    script.print_report(report, "there", to)
    told = capsys.readouterr().out
    for folder, names in left.items():
        assert f"{folder}/… ({len(names)} files)" in told


def test_label_maps_and_settings_are_kept(bert, tmp_path):
    labels = {0: "bad", 1: "so-so", 2: "good"}
    fields = {
        "num_beams": 4,  # a generation setting where checkpoints had them before generation_config.json
        "pooler_type": "first_token_transform",
        "_name_or_path": "ours/large",
        "task_specific_params": {"summarization": {"min_length": 9}},
    }
    source = bert(
        "ForSequenceClassification",
        fields=fields,
        id2label=labels,
        label2id={label: i for i, label in labels.items()},
        problem_type="single_label_classification",
        classifier_dropout=0.3,
    )
    (source / "generation_config.json").write_text('{"max_new_tokens": 77, "unknown": [1]}')
    there, back, _, _ = there_and_back(source, tmp_path)
    for folder in (there, back):
        config = read_config(folder)
        changed = {"architectures", "model_type"} if folder == there else set()
        for name, value in read_config(source).items():
            assert name in changed or config[name] == value, name
        assert (folder / "generation_config.json").read_text() == '{"max_new_tokens": 77, "unknown": [1]}'
        assert GenerationConfig.from_pretrained(folder, "config.json").num_beams == 4
    model = modeling_scratchbert.ScratchBertForSequenceClassification.from_pretrained(there)
    assert model.config.id2label == labels
    assert not {"auto_map", *NOT_IN_BERT} & set(read_config(back))


SETTINGS = {"num_beams": 4, "max_length": 17, "early_stopping": True, "temperature": 0.5}


@pytest.mark.parametrize("where", ["in a file of their own", "in config.json", "nowhere"])
def test_generation_settings_are_the_sources(where, bert, tmp_path):
    """To the letter, even one that means nothing: a temperature without sampling."""
    source = bert("ForCausalLM")
    (source / "generation_config.json").unlink()
    if where == "in config.json":
        change_config(source, **SETTINGS)
    elif where == "in a file of their own":
        (source / "generation_config.json").write_text(json.dumps(SETTINGS))
    for folder in there_and_back(source, tmp_path)[:2]:
        own = folder / "generation_config.json"
        assert own.exists() == (where == "in a file of their own")
        assert not own.exists() or own.read_text() == json.dumps(SETTINGS)
        settings = OURS["ForCausalLM"].from_pretrained(folder).generation_config.to_dict()
        for name, value in SETTINGS.items():
            assert settings[name] == (None if where == "nowhere" else value), name


# ------------------------------------------------------------------------------------------------ the tokenizer


def test_a_bare_vocabulary_opens(bert, tmp_path):
    """vocab.txt alone: what the class is follows from the model type "bert", which the target no longer has."""
    source = bert()
    (source / "vocab.txt").write_text("\n".join(VOCABULARY) + "\n")
    (source / "tokenizer_config.json").write_text('{"do_lower_case": true}')
    expected = AutoTokenizer.from_pretrained(source)("a BOATS sinking")
    for folder in there_and_back(source, tmp_path)[:2]:
        tokenizer = AutoTokenizer.from_pretrained(folder)
        assert type(tokenizer) is BertTokenizer
        assert tokenizer("a BOATS sinking") == expected
        assert expected["input_ids"] == [2, 5, 6, 7, 8, 9, 3]


def test_the_vocabulary_is_written_for_bert(bert, tmp_path):
    source = bert()
    (tmp_path / "words").write_text("\n".join(VOCABULARY) + "\n")
    tokenizer = BertTokenizer(str(tmp_path / "words"))
    tokenizer.add_tokens(["[DOC]"])
    tokenizer.save_pretrained(source)
    (source / "vocab.txt").unlink(missing_ok=True)
    there, back, _, report = there_and_back(source, tmp_path)
    assert not (there / "vocab.txt").exists()
    assert (back / "vocab.txt").read_text().splitlines() == [*VOCABULARY, "[DOC]"]
    assert "vocab.txt is written from tokenizer.json" in report.notes

    described = json.loads((source / "tokenizer.json").read_text())
    described["model"] = {"type": "WordLevel", "vocab": described["model"]["vocab"], "unk_token": "[UNK]"}
    (there / "tokenizer.json").write_text(json.dumps(described))
    report = script.convert(there, back, to="bert", overwrite=True)
    assert not (back / "vocab.txt").exists()
    assert "no vocab.txt: the tokenizer is not a WordPiece tokenizer with an id for every line" in report.notes


# ------------------------------------------------------------------------------------------------ the model card


def write_readme(source, metadata, body):
    (source / "README.md").write_bytes(f"---\n{metadata}---\n{body}".encode())


def test_the_card_keeps_the_sources_own(bert, tmp_path):
    source = bert("ForMaskedLM")
    metadata = (
        "license: apache-2.0\nlanguage:\n- en\n- no\ndatasets:\n- wikipedia\ntags:\n- exbert\n"
        "model-index:\n- name: x\n  results: []\n"
    )
    body = "\n\n# A model\n\nTrained on  two books.\n"
    write_readme(source, metadata, body)
    there, back, _, _ = there_and_back(source, tmp_path)

    text = (there / "README.md").read_text()
    assert_golden(text, Path(__file__).with_name("golden") / "converted.md")
    snippet = re.search("```python\n(.+?)```", text, flags=re.DOTALL)[1].replace('"there"', repr(str(there)))
    opened = {}
    (there / "vocab.txt").write_text("\n".join(VOCABULARY) + "\n")
    exec(snippet, opened)
    assert isinstance(opened["model"], modeling_scratchbert.ScratchBertForMaskedLM)

    card = RepoCard((back / "README.md").read_text())
    assert card.data.tags == ["exbert"]
    assert card.text.endswith(END + "\n" + body)
    assert card.text.count(BEGIN) == 1
    assert "trust_remote_code" not in card.text


@pytest.mark.parametrize(
    "text", [None, "# No metadata\n", "---\nlicense: [mit\n---\n# Bad\n", "---\n- a list\n---\nx\n"]
)
def test_a_card_without_readable_metadata(text, bert, tmp_path):
    source = bert()
    if text is not None:
        (source / "README.md").write_text(text)
    script.convert(source, tmp_path / "there")
    card = RepoCard((tmp_path / "there" / "README.md").read_text())
    assert card.data.to_dict() == {
        "tags": ["scratchbert"],
        "library_name": "transformers",
        "pipeline_tag": "feature-extraction",
    }
    assert card.text.endswith(END + "\n" + (text or ""))


# ------------------------------------------------------------------------------------------------ the Hub


@pytest.fixture
def hub(bert, tmp_path, monkeypatch):
    """A repository `someone/bert` on a Hub that is a folder; yields what was fetched of it."""
    repository = bert()
    for name in ("tf_model.h5", "onnx/model.onnx", "1_Pooling/config.json"):
        (repository / name).parent.mkdir(exist_ok=True)
        (repository / name).write_text("{}")
    fetched = []

    def snapshot_download(repo_id, revision=None, dry_run=False, ignore_patterns=()):
        if (repo_id, revision) != ("someone/bert", "v2"):
            raise DryRunError("cannot be accessed") from ConnectionError("no such\nrepository")
        names = files_in(repository) - set(ignore_patterns)
        if dry_run:
            return [SimpleNamespace(filename=name) for name in names]
        for name in names:
            (tmp_path / "snapshot" / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(repository / name, tmp_path / "snapshot" / name)
        fetched.extend(names)
        return str(tmp_path / "snapshot")

    monkeypatch.setattr(script, "snapshot_download", snapshot_download)
    return fetched


def test_a_hub_id(hub, tmp_path):
    report = script.convert("someone/bert", tmp_path / "there", revision="v2")
    assert sorted(hub) == ["1_Pooling/config.json", "config.json", "model.safetensors"]
    assert set(report.left) == {"tf_model.h5", "onnx/model.onnx"}
    assert report.copied == ["1_Pooling/config.json"]
    assert RepoCard((tmp_path / "there" / "README.md").read_text()).data.base_model == "someone/bert"


def test_a_hub_id_that_is_none(hub, tmp_path, capsys):
    assert_refused(["someone/else", tmp_path / "there"], "no such repository", capsys)
    assert_refused(["a/b/c", tmp_path / "there"], "There is no folder a/b/c", capsys)
