"""`scripts/check_parity.py`: it finds what is equal equal, what differs different, and says where."""

import importlib.util
import json
import math
from pathlib import Path

import pytest
import torch
import transformers
from matplotlib import image
from safetensors.torch import load_file, save_file
from transformers import BertConfig, BertModel, EncoderDecoderConfig, EncoderDecoderModel, RobertaConfig

import check_parity
import modeling_scratchbert
from modeling_scratchbert import (
    ScratchBertConfig,
    ScratchBertForConditionalGeneration,
    ScratchBertForPreTraining,
    ScratchBertModel,
    ScratchBertSeq2SeqModel,
)
from support.folders import SCRIPTS
from support.models import NEEDS, REFERENCES, tiny_config
from toolkit import comparison, parity
from toolkit.checkpoint import classes_in, verification

SCRIPT = SCRIPTS / "check_parity.py"

LAYERS = 3


def body(layers=LAYERS, half="", maps=("attention",)):
    """The rows of the embeddings and the blocks of a model, or of a half of one, and those of their gradients."""
    parts = [f"{half}layer {i}" for i in range(layers)]
    rows = [f"{half}embeddings", *(f"{part}: {what}" for part in parts for what in (*maps, "hidden state"))]
    return rows, [f"gradient: {part}" for part in (f"{half}embeddings", *parts)]


BODY, BODY_GRADIENTS = body()
WITH_CROSS = ("attention", "cross-attention")

# What each class adds to the rows above: outputs, and gradients.
ADDED = {
    "Model": (["pooler"], ["pooler"]),
    "ForPreTraining": (
        ["pooler", "prediction_logits", "seq_relationship_logits"],
        ["pooler", "lm head", "next sentence head"],
    ),
    "ForMaskedLM": (["logits"], ["lm head"]),
    "ForNextSentencePrediction": (["pooler", "logits"], ["pooler", "next sentence head"]),
    "ForSequenceClassification": (["pooler", "logits"], ["pooler", "classifier"]),
    "ForMultipleChoice": (["pooler", "logits"], ["pooler", "classifier"]),
    "ForTokenClassification": (["logits"], ["classifier"]),
    "ForQuestionAnswering": (["start_logits", "end_logits"], ["qa outputs"]),
    "ForCausalLM": (["logits"], ["lm head"]),
}
ADDED = {
    name: ([f"{name}: {output}" if "logits" in output else output for output in outputs], gradients)
    for name, (outputs, gradients) in ADDED.items()
}

pytestmark = pytest.mark.usefixtures("quiet_only_here")


def tiny(**fields):
    # Wider weights than BERT starts with: at 0.02 so small a model hardly attends to anything.
    return tiny_config(BertConfig, num_hidden_layers=LAYERS, initializer_range=0.2, **fields)


def bert_folder(folder: Path, name: str, **fields) -> Path:
    torch.manual_seed(0)
    REFERENCES[name](tiny(**{**NEEDS.get(name, {}), **fields})).save_pretrained(folder)
    return folder


def two_berts(folder: Path, **fields) -> Path:
    """An EncoderDecoderModel whose decoder has one layer fewer."""
    torch.manual_seed(0)
    decoder = tiny(**fields, is_decoder=True, add_cross_attention=True)
    decoder.num_hidden_layers = LAYERS - 1
    config = EncoderDecoderConfig.from_encoder_decoder_configs(tiny(**fields), decoder, decoder_start_token_id=2)
    EncoderDecoderModel(config).save_pretrained(folder)
    return folder


def seq2seq(folder: Path, model_class=ScratchBertForConditionalGeneration, **fields) -> Path:
    torch.manual_seed(0)
    fields = {**tiny().to_diff_dict(), "model_type": "scratchbert", "is_encoder_decoder": True, **fields}
    model_class(ScratchBertConfig(**fields)).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def pretraining(tmp_path_factory) -> Path:
    return bert_folder(tmp_path_factory.mktemp("pretraining"), "ForPreTraining")


def converted(source: Path, folder: Path, change=lambda model: None, model_class=ScratchBertForPreTraining) -> Path:
    model = model_class.from_pretrained(source)
    with torch.no_grad():
        change(model)
    model.save_pretrained(folder)
    return folder


def without(part: str, model, folder: Path) -> Path:
    """The model, saved without the tensors that have this part in their names."""
    tensors = {name: tensor for name, tensor in model.state_dict().items() if part not in name}
    model.save_pretrained(folder, state_dict=tensors)
    return folder


def run(*arguments) -> int:
    return check_parity.main([str(argument) for argument in arguments])


def report(tmp_path, *arguments) -> tuple[int, dict]:
    """The exit code, and the JSON file."""
    code = run(*arguments, "--json", tmp_path / "report.json")
    return code, json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))


def what(found: dict) -> list[str]:
    return [row["what"] for row in found["rows"]]


# ------------------------------------------------------------------------------------------------------------- equality


def test_real_weights_with_their_tokenizer(minilm, tmp_path, capsys):
    code, found = report(tmp_path, minilm, "--plot", tmp_path / "drift.png")
    printed = capsys.readouterr()
    assert code == 0
    assert found["equal"]
    assert printed.out.splitlines()[-1].startswith("equal: ")
    assert printed.err == ""
    assert "6 sentences" in found["batch"]
    assert len(found["rows"]) == 1 + 6 * 2 + 1 + 1 + 6 + 1  # embeddings, layers, pooler; their gradients
    assert all(row["max_abs"] <= row["limit"] for row in found["rows"] if row["kind"] != "gradient")
    assert all(0 < row["own_error"] < 1e-4 for row in found["rows"])
    assert set(found["versions"]) == {"python", "torch", "transformers", "scratchbert"}
    picture = image.imread(tmp_path / "drift.png")
    assert picture.shape[0] > 400
    assert picture[..., :3].std() > 0.05
    assert sorted(path.name for path in tmp_path.iterdir()) == ["drift.png", "report.json"]


def test_rounding_is_no_difference(minilm):
    """Another kernel rounds otherwise everywhere; the gradients of the key biases then hold nothing but noise."""
    checkpoint = parity.read_checkpoint(minilm)
    model, reference = parity.load_pair(checkpoint, None, "Model", True)
    model.set_attn_implementation("eager")
    rows, _ = parity.encode([checkpoint], 0)
    rows = comparison.compare(model, reference, parity.make_batch(rows[:3], checkpoint.config))
    assert all(row.equal for row in rows)
    assert any(0 < row.relative < 1e-5 for row in rows if row.kind == "gradient")


@pytest.mark.parametrize("name", ADDED)
def test_every_class(tmp_path, name):
    outputs, gradients = ADDED[name]
    code, found = report(tmp_path, bert_folder(tmp_path / "bert", name, num_labels=2))
    assert code == 0
    assert what(found) == BODY + outputs + BODY_GRADIENTS + [f"gradient: {part}" for part in gradients]
    assert found["not_compared"] == []
    assert "random ids" in found["batch"]


@pytest.mark.parametrize("name", ADDED)
def test_every_class_as_a_decoder_with_cross_attention(tmp_path, name):
    code, found = report(tmp_path, bert_folder(tmp_path, name, is_decoder=True, add_cross_attention=True, num_labels=2))
    assert code == 0
    assert found["not_compared"] == []
    tells = name in ("Model", "ForCausalLM")  # the others return no maps of cross-attention
    rows, gradients = body(maps=WITH_CROSS) if tells else body()
    assert set(rows) | set(gradients) <= set(what(found))
    crossed = [row["shape"] for row in found["rows"] if row["kind"] == "cross-attention"]
    assert crossed == [[12, 4, 32, 7]] * (LAYERS if tells else 0)


def test_a_decoder_that_looks_at_itself_alone(tmp_path):
    folder = bert_folder(tmp_path, "Model", is_decoder=True)
    code, found = report(tmp_path, folder)
    assert code == 0
    assert what(found)[: len(BODY)] == BODY


ENCODER_DECODERS = [
    [*of_encoder, *of_decoder]
    for of_encoder, of_decoder in zip(body(half="encoder "), body(LAYERS - 1, "decoder ", WITH_CROSS), strict=True)
]


def test_two_berts(tmp_path, capsys):
    """As they are, converted, and converted back for want of a reference."""
    theirs = two_berts(tmp_path / "theirs")
    ours = converted(theirs, tmp_path / "ours", model_class=ScratchBertForConditionalGeneration)
    rows, gradients = ENCODER_DECODERS
    for arguments, reference in (
        ([theirs], theirs),
        ([ours], f"{ours} exported to BERT"),
        ([ours, theirs], theirs),
        ([theirs, ours], theirs),
    ):
        code, found = report(tmp_path, *arguments, "--plot", tmp_path / "drift.png")
        assert code == 0
        assert what(found) == [*rows, "ForConditionalGeneration: logits", *gradients, "gradient: lm head"]
        assert found["not_compared"] == []
        assert found["model"].startswith("ScratchBertForConditionalGeneration from ")
        assert found["reference"] == f"EncoderDecoderModel from {reference}"
        assert capsys.readouterr().out.splitlines()[-1].startswith("equal: ")
    assert image.imread(tmp_path / "drift.png")[..., :3].std() > 0.05


@pytest.mark.parametrize(
    ("fields", "alone"),
    [
        ({}, ["decoder layer 0", "lm head"]),
        ({"tie_encoder_decoder": True}, ["decoder layer 0", "lm head"]),
        ({"share_embeddings": False}, ["decoder embeddings", "decoder layer 0", "lm head"]),
        ({"tie_word_embeddings": False, "num_decoder_layers": 1}, ["decoder layer 0", "lm head"]),
    ],
)
def test_what_the_halves_share_has_the_sum_of_their_gradients(fields, alone, tmp_path):
    """The export has each tensor twice, and the two gradients must come to that of the one here."""
    code, found = report(tmp_path, seq2seq(tmp_path / "ours", **fields))
    assert code == 0
    gradients = {row["what"].removeprefix("gradient: "): row for row in found["rows"] if row["kind"] == "gradient"}
    assert set(alone) <= set(gradients)
    assert ("decoder embeddings" in gradients) == ("decoder embeddings" in alone)
    # Cross-attention is the decoder's own: query, key, value and output, and the norm, each with a bias.
    assert gradients["decoder layer 0"]["tensors"] == (10 if fields.get("tie_encoder_decoder") else 26)
    assert all(row["max_abs"] > 0 or row["equal"] for row in gradients.values())


def test_gradients_of_half_a_shared_tensor_differ(tmp_path):
    checkpoint = parity.read_checkpoint(str(seq2seq(tmp_path / "ours")))
    model, reference = parity.load_pair(checkpoint, None, "ForConditionalGeneration", False)
    positions = model.get_decoder().embeddings.position_embeddings
    positions.register_forward_hook(lambda module, args, output: output.detach())
    rows, _ = parity.encode([checkpoint], 0)
    rows = comparison.compare(model, reference, parity.make_batch(rows, checkpoint.config))
    (different,) = [row for row in rows if not row.equal]
    assert different.worst == "model.encoder.embeddings.position_embeddings.weight"


def test_seq2seq_models_without_a_reference(tmp_path, capsys):
    bare, other = (seq2seq(tmp_path / name, ScratchBertSeq2SeqModel) for name in ("bare", "other"))
    assert run(bare) == 2
    assert "ScratchBertSeq2SeqModel has no model head" in one_line(capsys)
    code, found = report(tmp_path, bare, other)
    assert code == 0
    assert {"encoder layer 2: attention", "decoder layer 2: cross-attention"} <= set(what(found))
    assert not [row for row in found["rows"] if row["kind"] == "logits"]

    ours = seq2seq(tmp_path / "ours", norm_first=True)
    assert run(ours, ours) == 0
    assert "encoder final norm" in capsys.readouterr().out
    assert run(ours) == 2
    assert "norm_first" in one_line(capsys)


def test_a_scratchbert_folder_against_its_export(tmp_path, pretraining):
    code, found = report(tmp_path, converted(pretraining, tmp_path / "ours"))
    assert code == 0
    assert found["model"].startswith("ScratchBertForPreTraining")
    assert found["reference"].startswith("BertForPreTraining")
    assert found["reference"].endswith("exported to BERT")


def test_a_scratchbert_that_differs_from_its_probe(tmp_path, pretraining, capsys):
    """Its export, which it is compared with, would have the same damage."""
    ours = converted(pretraining, tmp_path / "ours")
    tensors = load_file(ours / "model.safetensors")
    tensors["model.encoder.blocks.1.attention.key.weight"][0, 0] += 0.5
    save_file(tensors, ours / "model.safetensors", {"format": "pt"})
    assert run(ours) == 2
    assert "model.encoder.blocks.1.attention.key.weight in the files" in capsys.readouterr().err
    (ours / "probe.json").unlink()
    assert run(ours) == 0


def test_the_argument_that_verifies(tmp_path, pretraining):
    """For commands with a flag."""
    ours = converted(pretraining, tmp_path / "ours")
    ScratchBertForPreTraining.from_pretrained(ours, **verification(str(ours)))
    for source in (pretraining, None):
        with pytest.raises(OSError, match=r"has no probe\.json"):
            verification(source and str(source))


def test_the_order_of_the_arguments_does_not_change_the_reference(tmp_path, pretraining):
    ours = converted(pretraining, tmp_path / "ours")
    for arguments in ((ours, pretraining), (pretraining, ours)):
        code, found = report(tmp_path, *arguments)
        assert code == 0
        assert found["reference"] == f"BertForPreTraining from {pretraining}"


def test_two_scratchberts_that_bert_cannot_express(tmp_path, capsys):
    fields = {**tiny().to_diff_dict(), "norm_first": True, "position_embedding_type": "sinusoidal"}
    config = ScratchBertConfig(**{name: value for name, value in fields.items() if name != "model_type"})
    ScratchBertModel(config).save_pretrained(tmp_path / "ours")
    assert run(tmp_path / "ours", tmp_path / "ours") == 0
    assert "gradient" in capsys.readouterr().out
    assert run(tmp_path / "ours") == 2
    assert "norm_first" in capsys.readouterr().err


def test_a_pooler_that_the_class_has_no_use_for(tmp_path):
    """Older checkpoints of token classifiers hold one."""
    folder = bert_folder(tmp_path / "bert", "ForTokenClassification")
    model = transformers.BertForTokenClassification.from_pretrained(folder)
    model.bert.pooler = BertModel(model.config).pooler
    model.save_pretrained(folder)
    code, found = report(tmp_path, folder)
    assert code == 0
    assert {"ForTokenClassification: logits", "pooler", "gradient: pooler"} < set(what(found))
    assert len(set(what(found))) == len(found["rows"])


def test_what_is_left_out_is_named(tmp_path, pretraining, capsys):
    ScratchBertModel.from_pretrained(pretraining).save_pretrained(tmp_path / "ours")
    code, found = report(tmp_path, tmp_path / "ours", pretraining)
    assert code == 0
    assert found["not_compared"] == [f"{part}, only in {pretraining}" for part in ("lm_head", "next_sentence_head")]
    assert capsys.readouterr().out.splitlines()[-1].endswith("not everything was compared, see above")


def test_a_head_without_the_pooler_that_it_needs_is_named(tmp_path, pretraining):
    model = transformers.BertForPreTraining.from_pretrained(pretraining)
    code, found = report(tmp_path, without("pooler", model, tmp_path))
    assert code == 0
    assert "ForMaskedLM: logits" in what(found)
    assert [name.split(",")[0] for name in found["not_compared"]] == ["next_sentence_head"]


# ---------------------------------------------------------------------------------------------------------- differences


@pytest.mark.parametrize(
    ("source", "tensor", "first"),
    [
        ("pretraining", "model.embeddings.norm.bias", "embeddings"),
        ("pretraining", "model.encoder.blocks.1.attention.query.weight", "layer 1: attention"),
        ("pretraining", "model.encoder.blocks.1.feed_forward.output.weight", "layer 1: hidden state"),
        ("pretraining", "model.pooler.dense.weight", "pooler"),
        ("pretraining", "lm_head.norm.weight", "ForPreTraining: prediction_logits"),
        ("pretraining", "next_sentence_head.bias", "ForPreTraining: seq_relationship_logits"),
        ("two", "model.encoder.embeddings.norm.bias", "encoder embeddings"),
        ("two", "model.encoder.encoder.blocks.2.attention.key.weight", "encoder layer 2: attention"),
        ("two", "model.decoder.embeddings.token_type_embeddings.weight", "decoder embeddings"),
        ("two", "model.decoder.encoder.blocks.0.attention.value.weight", "decoder layer 0: cross-attention"),
        ("two", "model.decoder.encoder.blocks.1.cross_attention.query.weight", "decoder layer 1: cross-attention"),
        ("two", "model.decoder.encoder.blocks.1.cross_attention_norm.weight", "decoder layer 1: hidden state"),
        ("two", "lm_head.dense.weight", "ForConditionalGeneration: logits"),
    ],
)
def test_a_changed_tensor_is_found_where_it_stands(source, tensor, first, tmp_path, pretraining, capsys):
    def change(model):
        parameter = model.get_parameter(tensor)
        parameter += 1e-2 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0))

    theirs, model_class = pretraining, ScratchBertForPreTraining
    if source == "two":
        theirs, model_class = two_berts(tmp_path / "theirs"), ScratchBertForConditionalGeneration
    code, found = report(tmp_path, converted(theirs, tmp_path / "ours", change, model_class), theirs)
    assert (code, found["equal"]) == (1, False)
    assert next(row["what"] for row in found["rows"] if not row["equal"]) == first
    assert found["verdict"].startswith(f"DIFFERENT: first at {first}")
    assert capsys.readouterr().out.splitlines()[-1] == found["verdict"]


def test_not_a_number_is_a_difference(tmp_path, pretraining):
    def change(model):
        model.get_parameter("model.encoder.blocks.2.attention.output.bias")[0] = math.nan

    code, found = report(tmp_path, converted(pretraining, tmp_path / "ours", change), pretraining)
    assert code == 1
    rows = {row["what"]: row for row in found["rows"]}
    assert rows["layer 1: hidden state"]["equal"]
    assert not rows["layer 2: hidden state"]["equal"]
    assert rows["layer 2: hidden state"]["max_abs"] is None


def pair_and_batch(pretraining):
    checkpoint = parity.read_checkpoint(str(pretraining))
    pair = parity.load_pair(checkpoint, None, "ForPreTraining", True)
    rows, _ = parity.encode([checkpoint], 0)
    return *pair, parity.make_batch(rows, checkpoint.config)


def test_gradients_alone_may_differ(pretraining):
    model, reference, batch = pair_and_batch(pretraining)
    name = "model.encoder.blocks.1.feed_forward.output.weight"
    model.get_parameter(name).register_hook(lambda gradient: gradient * (1 + 1e-4))
    rows = comparison.compare(model, reference, batch)
    (different,) = [row for row in rows if not row.equal]
    assert (different.what, different.worst) == ("gradient: layer 1", name)
    assert different.relative == pytest.approx(1e-4, rel=1e-2)
    assert name in parity.verdict(rows)


def test_a_mask_that_is_not_heeded_differs(pretraining):
    model, reference, batch = pair_and_batch(pretraining)

    def drop_mask(module, args, kwargs):
        return args, {name: value for name, value in kwargs.items() if name != "attention_mask"}

    model.register_forward_pre_hook(drop_mask, with_kwargs=True)
    different = [row.what for row in comparison.compare(model, reference, batch) if not row.equal]
    assert different[0] == "layer 0: attention"


@pytest.mark.parametrize(
    ("folder", "name", "mask", "first"),
    [
        (two_berts, "ForConditionalGeneration", "attention_mask", "encoder layer 0: attention"),
        (two_berts, "ForConditionalGeneration", "decoder_attention_mask", "decoder layer 0: attention"),
        (
            lambda folder: bert_folder(folder, "ForCausalLM", add_cross_attention=True),
            "ForCausalLM",
            "encoder_attention_mask",
            "layer 0: cross-attention",
        ),
        (lambda folder: bert_folder(folder, "ForCausalLM"), "ForCausalLM", "attention_mask", "layer 0: attention"),
    ],
)
def test_a_decoders_mask_that_is_not_heeded_differs(folder, name, mask, first, tmp_path):
    checkpoint = parity.read_checkpoint(str(folder(tmp_path)))
    pair = parity.load_pair(checkpoint, None, name, False)
    rows, _ = parity.encode([checkpoint], 0)

    def drop_mask(module, args, kwargs):
        return args, {name: value for name, value in kwargs.items() if name != mask}

    pair[0].register_forward_pre_hook(drop_mask, with_kwargs=True)
    rows = comparison.compare(*pair, parity.make_batch(rows, checkpoint.config))
    assert next(row.what for row in rows if not row.equal) == first


def test_a_target_is_not_its_source():
    """Else a decoder that takes its own mask or tokens for the source's would pass."""
    config = ScratchBertConfig(vocab_size=99, is_encoder_decoder=True)
    batch = parity.make_batch([([5, 6], [0, 0]), ([7, 8, 9], [0, 0, 0]), ([], [])], config)
    for name in ("input_ids", "attention_mask"):
        assert not torch.equal(batch[name], batch[f"decoder_{name}"])
        assert sorted(batch[name].tolist()) == sorted(batch[f"decoder_{name}"].tolist())
    real = comparison.non_padding_tokens(batch)
    assert real["encoder"].sum() == 10
    assert real["decoder"].any(dim=1).tolist() == [False, True, False, False, True, False]


def test_what_one_side_does_not_return_is_no_match(pretraining):
    model, reference, batch = pair_and_batch(pretraining)
    model.base_model.pooler = None
    with pytest.raises(ValueError, match="Only one of the models returns pooler"):
        comparison.compare(model.base_model, reference.base_model, batch)


def test_padding_is_not_compared(pretraining):
    model, reference, batch = pair_and_batch(pretraining)
    padding = ~batch["attention_mask"].bool()[..., None]

    def scramble(module, args, output):
        return output + 7.0 * padding

    assert padding[:, 0].any(), "a first token that is padding"
    assert padding.all(dim=1).any(), "a row that is padding throughout"
    model.base_model.encoder.blocks[-1].register_forward_hook(scramble)
    assert all(row.equal for row in comparison.compare(model, reference, batch))


def test_the_reference_is_allowed_its_own_error():
    def observed(*values):
        return comparison.Observed("logits", None, [3], torch.tensor(values, dtype=torch.float64))

    theirs, exact = observed(1000.0, 0.0, 1.0), observed(1000.0001, 0.0, 1.0)
    near = comparison.value_row("logits", observed(1000.00009, 0.0, 1.0), theirs, exact)
    assert near.equal
    assert near.limit == pytest.approx(1e-4)
    assert near.relative == pytest.approx(9e-8)
    assert not comparison.value_row("logits", observed(1000.00011, 0.0, 1.0), theirs, exact).equal
    assert not comparison.value_row("logits", observed(1000.00009, 0.0, 1.0), theirs, theirs).equal


# ------------------------------------------------------------------------------------------------------- what is chosen


@pytest.mark.parametrize(
    ("is_encoder_decoder", "is_decoder", "parts", "architectures", "classes"),
    [
        (False, False, set(), ["BertModel"], ["Model"]),
        (False, False, {"pooler"}, [], ["Model"]),
        (False, False, {"pooler", "lm_head", "next_sentence_head"}, [], ["ForPreTraining"]),
        (
            False,
            False,
            {"pooler", "lm_head", "next_sentence_head"},
            ["BertForMaskedLM"],
            ["ForMaskedLM", "ForNextSentencePrediction"],
        ),
        (False, False, {"pooler", "lm_head"}, ["BertForMaskedLM"], ["ForMaskedLM", "Model"]),
        (False, False, {"pooler", "classifier"}, [], ["ForSequenceClassification"]),
        (False, False, {"pooler", "classifier"}, ["ScratchBertForMultipleChoice"], ["ForMultipleChoice"]),
        (False, False, {"classifier"}, ["BertForSomethingElse"], ["ForTokenClassification"]),
        (False, False, {"lm_head", "qa_outputs"}, [], ["ForMaskedLM", "ForQuestionAnswering"]),
        (False, False, {"lm_head"}, [], ["ForMaskedLM"]),
        (False, False, {"lm_head"}, ["BertLMHeadModel"], ["ForCausalLM"]),
        (False, True, {"lm_head"}, [], ["ForCausalLM"]),
        (False, True, {"lm_head"}, ["BertForMaskedLM"], ["ForMaskedLM"]),
        (False, True, {"pooler", "lm_head"}, ["ScratchBertForCausalLM"], ["ForCausalLM", "Model"]),
        (False, True, set(), ["BertModel"], ["Model"]),
        (True, False, {"lm_head"}, ["EncoderDecoderModel"], ["ForConditionalGeneration"]),
        (True, False, {"lm_head"}, [], ["ForConditionalGeneration"]),
        (True, False, set(), [], ["Seq2SeqModel"]),
    ],
)
def test_classes_follow_configuration_and_tensors(is_encoder_decoder, is_decoder, parts, architectures, classes):
    known = classes_in(is_encoder_decoder, is_decoder)
    assert parity.covering_classes(known, parts, architectures) == classes


# ----------------------------------------------------------------------------------------------------------- refusals


def one_line(capsys) -> str:
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("check_parity.py: ")
    return lines[0]


def saved(folder: Path, config, weights: bytes | None = None) -> Path:
    config.save_pretrained(folder)
    if weights is not None:
        (folder / "model.safetensors").write_bytes(weights)
    return folder


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (lambda tmp, bert: [tmp / "missing"], "missing"),
        (lambda tmp, bert: [saved(tmp, RobertaConfig())], "roberta"),
        (lambda tmp, bert: [saved(tmp, tiny())], "no file of weights"),
        (lambda tmp, bert: [saved(tmp, tiny(), (bert / "model.safetensors").read_bytes()[:5000])], "model.safetensors"),
        (
            lambda tmp, bert: [without("layer.1.output.dense", BertModel.from_pretrained(bert), tmp)],
            "encoder.layer.1.output.dense.bias is not in the file",
        ),
        (
            lambda tmp, bert: [
                without("1.crossattention.output", EncoderDecoderModel.from_pretrained(two_berts(tmp / "two")), tmp)
            ],
            "decoder.bert.encoder.layer.1.crossattention.output.dense.bias is not in the file",
        ),
        (lambda tmp, bert: [bert_folder(tmp, "Model", type_vocab_size=3), bert], "type_vocab_size is 2 in "),
        (
            lambda tmp, bert: [bert_folder(tmp, "Model", is_decoder=True, add_cross_attention=True), bert],
            "add_cross_attention is False in",
        ),
        (lambda tmp, bert: [seq2seq(tmp / "ours"), two_berts(tmp / "two")], "num_decoder_layers is 2 in "),
        (lambda tmp, bert: [bert, two_berts(tmp)], "is_encoder_decoder"),
    ],
)
def test_refuses(arguments, words, tmp_path, pretraining, capsys):
    assert run(*arguments(tmp_path, pretraining)) == 2
    assert words in one_line(capsys)


def test_output_is_the_folder_of_the_report(tmp_path, pretraining):
    output = tmp_path / "new" / "parity"
    assert run(pretraining, "--output", output) == 0
    assert sorted(path.name for path in output.iterdir()) == ["report.json", "report.png"]
    found = json.loads((output / "report.json").read_text(encoding="utf-8"))
    assert found["equal"] is True
    assert "pooler" in what(found)
    assert image.imread(output / "report.png")[..., :3].std() > 0.05


@pytest.mark.parametrize("option", ["--json", "--plot"])
def test_refuses_an_unwritable_file_before_any_work(tmp_path, pretraining, capsys, option):
    with pytest.raises(SystemExit, match="2"):
        run(pretraining, option, tmp_path / "missing" / "file.png")
    assert "missing" in one_line(capsys)


def test_says_so_if_matplotlib_is_missing(tmp_path, pretraining, capsys, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert run(pretraining, "--plot", tmp_path / "drift.png") == 2
    assert "matplotlib" in one_line(capsys)


def test_every_class_of_the_package_is_known():
    """A head that is added later must be added to the toolkit."""
    ours = {name.removeprefix("ScratchBert") for name in modeling_scratchbert.__all__}
    known = {name for two_halves in (True, False) for name in classes_in(two_halves, False)}
    assert ours - {"Config", "PreTrainedModel"} == known


@pytest.mark.parametrize(("max_abs", "equal"), [(0.0, True), (1e-5, True), (2e-5, False), (math.inf, False)])
def test_a_difference_of_nan_is_infinite(max_abs, equal):
    nan = torch.tensor([1.0, math.nan])
    assert comparison.largest(nan) == comparison.norm(nan) == math.inf
    for own_error in (0.0, math.inf):  # an infinite difference is one whatever the limit is
        row = comparison.Row("logits", "logits", None, [3], 1, max_abs, 0.0, own_error)
        assert row.equal == (equal or (own_error == math.inf and math.isfinite(max_abs)))
