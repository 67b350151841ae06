"""`scripts/check.py`: what is equal passes, and what differs is found and named: models, bits, and code."""

import importlib
import json
import math
import os
import tomllib
from functools import partial

import pytest
import torch
from transformers import BertConfig, BertModel

import check
from modeling_scratchbert import ScratchBertForConditionalGeneration, ScratchBertForPreTraining, ScratchBertModel
from support.checkpoint_kinds import change_config, change_tensors
from support.commands import exit_code
from support.folders import ROOT
from support.models import (
    OURS,
    REFERENCES,
    TINY,
    random_bert,
    random_encoder_decoder,
    random_scratchbert,
    tiny_config,
    word_tokenizer,
)
from support.prepacked import needs_library
from toolkit import trust
from toolkit.checkpoint import best_class, read_checkpoint
from toolkit.common import read_json
from toolkit.compare import determinism, parity
from toolkit.hub import check_source

pytestmark = pytest.mark.usefixtures("quiet_only_here")

run = partial(exit_code, check)


def report(tmp_path, *arguments) -> tuple[int, dict]:
    code = run(*arguments, "--json", tmp_path / "report.json")
    return code, read_json(tmp_path / "report.json")


def saved(model, folder):
    model.save_pretrained(folder)
    word_tokenizer(["the", "dog", "sat", "on", "a", "mat"]).save_pretrained(folder)
    return folder


def converted(source, folder, model_class=ScratchBertForPreTraining):
    model_class.from_pretrained(source).save_pretrained(folder)
    (folder / "probe.json").unlink()  # else a changed tensor is found before anything is compared
    return folder


@pytest.fixture(scope="module")
def bert(tmp_path_factory):
    return saved(random_bert(), tmp_path_factory.mktemp("bert"))


# --------------------------------------------------------------------------------------------------------------- parity


STATES = ["hidden_states.0", "attentions.0", "hidden_states.1", "attentions.1", "hidden_states.2"]
OUTPUTS = {
    "Model": ["pooler_output"],
    "ForPreTraining": ["pooler_output", "prediction_logits", "seq_relationship_logits"],
    "ForNextSentencePrediction": ["pooler_output", "logits"],
    "ForSequenceClassification": ["pooler_output", "logits"],
    "ForMultipleChoice": ["pooler_output", "logits"],
    "ForQuestionAnswering": ["start_logits", "end_logits"],
}


@pytest.mark.parametrize("head", REFERENCES)
def test_every_class_equals_its_reference(head, tmp_path):
    folder = saved(random_bert(head), tmp_path / "bert")
    code, found = report(tmp_path, folder)
    rows = [row for row in found["rows"] if not row["is_gradient"]]
    assert code == 0
    assert [row["what"] for row in rows] == STATES + OUTPUTS.get(head, ["logits"])
    assert all(row["difference"] <= 1e-5 and 0 < row["own_error"] < 1e-3 for row in rows)
    gradients = {row["what"].removeprefix("model.") for row in found["rows"] if row["is_gradient"]}
    parameters = OURS[head].from_pretrained(folder).named_parameters()
    assert gradients == {name.removeprefix("model.") for name, _ in parameters}
    assert found["not_compared"] == []


def test_real_weights_on_texts_of_a_file(minilm, tmp_path):
    (tmp_path / "texts.csv").write_text("id,body\n1,A dog.\n2,The cat sat on the mat.\n3," + "long " * 300 + "\n")
    code, found = report(
        tmp_path, minilm, "--input", tmp_path / "texts.csv", "--text_column", "body", "--rows", 3, "--seed", 1
    )
    assert (code, found["equal"], len(found["rows"])) == (0, True, 7 + 6 + 1 + 103)
    assert all(row["difference"] <= 1e-5 for row in found["rows"] if not row["is_gradient"])
    errors = [row["own_error"] for row in found["rows"]]
    _, random = report(tmp_path, minilm)  # of other ids
    assert [row["own_error"] for row in random["rows"]] != errors


def test_a_model_equals_itself_bit_for_bit(tmp_path):
    folder = saved(random_scratchbert(norm_first=True), tmp_path / "ours")
    code, found = report(tmp_path, folder, folder)
    assert code == 0
    assert {row["difference"] for row in found["rows"]} == {0.0}


@pytest.mark.parametrize("order", [1, -1])
def test_a_converted_folder_and_its_source_in_any_order(order, bert, tmp_path):
    code, found = report(tmp_path, *[converted(bert, tmp_path / "ours"), bert][::order])
    assert (code, found["not_compared"]) == (0, [])


def test_two_berts(tmp_path):
    theirs = tmp_path / "theirs"
    random_encoder_decoder(decoder={"num_hidden_layers": 1}).save_pretrained(theirs)
    ours = converted(theirs, tmp_path / "ours", ScratchBertForConditionalGeneration)
    for arguments in ([theirs], [ours, theirs]):
        code, found = report(tmp_path, *arguments)
        names = [row["what"] for row in found["rows"] if not row["is_gradient"]]
        assert code == 0
        assert names == [f"encoder_{name}" for name in STATES] + [
            "decoder_hidden_states.0",
            "decoder_attentions.0",
            "cross_attentions.0",
            "decoder_hidden_states.1",
            "logits",
        ]
    assert run(ours) == 2


ENCODER, DECODER = "model.encoder.encoder.blocks.", "model.decoder.encoder.blocks."


@pytest.mark.parametrize(
    ("is_seq2seq", "tensor", "first"),
    [
        (False, "model.embeddings.norm.bias", "hidden_states.0"),
        (False, "model.encoder.blocks.1.attention.query.weight", "attentions.1"),
        (False, "model.encoder.blocks.1.feed_forward.output.bias", "hidden_states.2"),
        (False, "model.pooler.dense.weight", "pooler_output"),
        (False, "lm_head.norm.weight", "prediction_logits"),
        (False, "next_sentence_head.bias", "seq_relationship_logits"),
        (True, f"{ENCODER}1.attention.key.weight", "encoder_attentions.1"),
        (True, f"{DECODER}0.attention.query.weight", "decoder_attentions.0"),
        (True, f"{DECODER}1.cross_attention.query.weight", "cross_attentions.1"),
        (True, f"{DECODER}1.cross_attention_norm.weight", "decoder_hidden_states.2"),
        (True, "lm_head.dense.weight", "logits"),
    ],
)
def test_one_wrong_row_is_found_where_it_is(is_seq2seq, tensor, first, bert, tmp_path, capsys):
    source, model_class = bert, ScratchBertForPreTraining
    if is_seq2seq:
        source, model_class = tmp_path / "two", ScratchBertForConditionalGeneration
        random_encoder_decoder().save_pretrained(source)
    ours = converted(source, tmp_path / "ours", model_class)
    change_tensors(ours, lambda tensors: tensors[tensor].add_(torch.randn(tensors[tensor].shape) * 0.1))
    code, found = report(tmp_path, ours, source)
    assert (code, found["equal"]) == (1, False)
    assert next(row["what"] for row in found["rows"] if row["excess"] > 1) == first
    assert capsys.readouterr().out.splitlines()[-1] == f"DIFFERENT: first in {first}"


def test_not_a_number_differs(bert, tmp_path):
    ours = converted(bert, tmp_path / "ours")
    change_tensors(ours, lambda tensors: tensors["model.encoder.blocks.1.attention.output.bias"][:1].fill_(math.nan))
    code, found = report(tmp_path, ours, bert)
    excess = {row["what"]: row["excess"] for row in found["rows"] if not row["is_gradient"]}
    assert (code, excess["hidden_states.1"], excess["hidden_states.2"]) == (1, 0, None)


def test_a_changed_file_differs_from_its_probe(tmp_path, capsys):
    folder = saved(random_scratchbert(), tmp_path / "ours")
    change_tensors(folder, lambda tensors: tensors["lm_head.dense.bias"][:1].add_(1))
    assert run(folder) == 2
    assert "lm_head.dense.bias" in capsys.readouterr().err


def test_what_is_not_compared_is_named(bert, tmp_path):
    ScratchBertModel.from_pretrained(bert).save_pretrained(tmp_path / "ours")
    code, found = report(tmp_path, tmp_path / "ours", bert)
    assert code == 0
    assert found["not_compared"] == [f"lm_head of {bert}", f"next_sentence_head of {bert}"]
    gated = saved(random_bert(), tmp_path / "gated")
    change_tensors(gated, lambda tensors: tensors.update({"gate.weight": torch.ones(2)}))
    assert report(tmp_path, gated)[1]["not_compared"] == [f"gate.weight of {gated}"]


def open_both(folder) -> tuple:
    model, reference = parity.open_pair(read_checkpoint(str(folder)), None, "ForPreTraining", True)
    batch = parity.make_batch(parity.random_rows(model.config, seed=0), model.config)
    return model, reference, batch


def hide_mask(module, args, kwargs):
    return args, kwargs | {"attention_mask": None}


def scramble_padding(module, args, output):
    """The last states of 6 rows padded on the right, then of the same on the left."""
    lengths = torch.tensor(parity.LENGTHS)[:, None]
    right = torch.arange(output.shape[1]) >= lengths
    return output + 7.0 * torch.cat([right, right.flip(1)])[..., None]


@pytest.mark.parametrize(
    ("damage", "different"),
    [
        (lambda model: model.encoder.register_forward_pre_hook(hide_mask, with_kwargs=True), "attentions.0"),
        (lambda model: model.encoder.blocks[-1].register_forward_hook(scramble_padding), None),
        (
            lambda model: model.encoder.blocks[1].feed_forward.output.weight.register_hook(lambda g: g * 1.001),
            "model.encoder.blocks.1.feed_forward.output.weight",
        ),
        (lambda model: model.encoder.blocks[1].attention.key.bias.register_hook(lambda g: g * 1.001), None),
    ],
    ids=["mask", "padding", "gradient", "gradient that is zero"],
)
def test_damage_outside_the_weights(damage, different, bert):
    model, reference, batch = open_both(bert)
    damage(model.base_model)
    found = [row.what for row in parity.compare(model, reference, [batch]) if row.excess > 1]
    assert found[:1] == [different] * (different is not None)


def test_each_batch_counts(bert):
    model, reference, batch = open_both(bert)
    short = parity.make_batch([[5, 6]], model.config)
    with torch.no_grad():
        model.base_model.embeddings.position_embeddings.weight[9, 0] += 1  # no text of the second batch is so long
    for batches in ([batch, short], [short, batch]):
        rows = parity.compare(model, reference, batches)
        assert next(row.what for row in rows if row.excess > 1) == "hidden_states.0"
    assert all(row.excess <= 1 for row in parity.compare(model, reference, [short]))


def test_the_reference_is_allowed_its_own_error():
    for own_error, difference, excess in ((1e-4, 9e-5, 0.9), (1e-4, 1.1e-4, 1.1), (1e-7, 1.1e-5, 1.1)):
        assert parity.Comparison("logits", difference, own_error, False).excess == pytest.approx(excess)
    assert parity.Comparison("logits", math.inf, math.inf, False).excess == math.inf


@pytest.mark.parametrize(
    ("head", "architectures", "dropped", "expected"),
    [
        ("ForPreTraining", ["BertForMaskedLM"], None, "ForPreTraining"),
        ("ForPreTraining", ["BertForMaskedLM"], "pooler", "ForMaskedLM"),
        ("ForMaskedLM", ["BertLMHeadModel"], None, "ForCausalLM"),
        ("ForMaskedLM", None, None, "ForMaskedLM"),
        ("ForCausalLM", None, None, "ForCausalLM"),
        ("ForSequenceClassification", None, None, "ForSequenceClassification"),
        ("ForMultipleChoice", ["BertForMultipleChoice"], None, "ForMultipleChoice"),
        ("Model", ["BertForMaskedLM"], None, "ForMaskedLM"),  # which then lacks its head
        ("Model", None, "pooler", "Model"),
    ],
)
def test_the_class_keeps_all_heads(head, architectures, dropped, expected, tmp_path):
    random_bert(head).save_pretrained(tmp_path)
    change_config(tmp_path, architectures=architectures)
    checkpoint = read_checkpoint(str(tmp_path))
    checkpoint.tensors = {name: ours for name, ours in checkpoint.tensors.items() if not (dropped and dropped in name)}
    assert best_class(checkpoint, checkpoint.parts) == expected


# ---------------------------------------------------------------------------------------------------------- determinism


def ids_of(ids, mask, padding=0.0):
    """Hidden states that are the ids."""
    return torch.where(mask.bool(), ids.float(), padding)[..., None]


TEXTS = [torch.arange(1, 1 + length) for length in (*range(1, 41), *range(1, 41))]


@pytest.mark.parametrize(
    ("run_batch", "changed", "max_abs"),
    [
        (lambda ids, mask: ids_of(ids, mask, torch.rand(()).item()), 0, 0.0),
        (lambda ids, mask: ids_of(ids, mask) * (math.nan if len(ids) else 1), 0, 0.0),
        (lambda ids, mask: ids_of(ids, mask) + 0.5 * (len(ids) > 1), 80, 0.5),
        (lambda ids, mask: ids_of(ids, mask) * 0 * (1 if len(ids) > 1 else -1), 80, 0.0),
        (lambda ids, mask: ids_of(ids, mask) + torch.get_num_threads(), 80, 1.0),
        (lambda ids, mask: (ids_of(ids, mask) + (len(ids) > 1)).bfloat16(), 80, 1.0),
    ],
    ids=["padding", "nan", "batch", "zeros", "threads", "bfloat16"],
)
def test_bits_that_depend_on_the_batch(run_batch, changed, max_abs):
    generator = determinism.random.Random(0)
    sizes = [(1, 0), (64, 8), (64, 8), (1, 0)]
    batchings = [determinism.random_batching(TEXTS, 40, generator, *size) for size in sizes]
    for batching in batchings:
        assert sorted(number for numbers, _, _ in batching for number in numbers) == list(range(80))
        assert all(ids.shape[1] <= 40 for _, ids, _ in batching)
    before = torch.get_num_threads()
    found = determinism.examine(run_batch, TEXTS, batchings, [1, 2])
    torch.set_num_threads(before)
    assert found["max_abs"] == max_abs
    assert changed * 0.9 <= found["changed_texts"] <= changed  # a text may be alone in every batching


@pytest.mark.parametrize(
    ("damage", "code"), [([], 0), (["loaded"], 0), (["optimised"], 1), pytest.param(["int8"], 1, marks=needs_library)]
)
def test_determinism_of_a_model(damage, code, tmp_path, monkeypatch):
    open_variant = determinism.open_variant

    def open_damaged(checkpoint, name):
        model = open_variant(checkpoint, name)
        return (lambda ids, mask: model(ids, mask) + len(ids)) if name in damage else model

    monkeypatch.setattr(determinism, "open_variant", open_damaged)
    folder = saved(random_scratchbert("Model", hidden_size=64, intermediate_size=64), tmp_path / "ours")
    (tmp_path / "texts.jsonl").write_text('{"text": "the dog sat"}\n{"text": "a mat"}\n')
    flags = ["--input", tmp_path / "texts.jsonl", "--batchings", 2, "--threads", 1]
    found_code, found = report(tmp_path, folder, "--determinism", *flags)
    torch.set_num_threads(1)
    assert (found_code, found["equal"]) == (code, code == 0)
    assert found["texts"] == 2 + 16 + 2
    for name, row in found["rows"].items():
        assert (row["changed_texts"] > 0) >= (name in damage)
        assert name in ("loaded", *damage) or row["max_abs"] == 0


# ------------------------------------------------------------------------------------------------------------- bad uses


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["missing"], "missing"),
        (["no-weights"], "no-weights"),
        (["sinusoidal"], "position_embedding_type"),
        (["bert", "smaller"], "vocab_size is 99 in"),
        (["no-tokenizer", "--input", "words.txt"], "tokenizer"),
        (["no-tokenizer", "--determinism"], "tokenizer"),
        (["smaller", "--determinism"], "vocab_size"),
        (["two", "--determinism"], "--determinism"),
        (["bert", "--input", "missing.csv"], "--input"),
        (["bert", "--input", "texts.csv", "--text_column", "body"], "--text_column"),
        (["bert", "--input", "texts.csv"], "'text' is empty"),
        (["bert", "--text_column", "text"], "--text_column"),
        (["bert", "--rows", "5"], "--rows"),
        (["bert", "bert", "--determinism"], "--other"),
        (["bert", "--variants", "int8"], "--variants"),
        (["bert", "--determinism", "--variants", "onnx"], "--variants"),
        (["bert", "--determinism", "--code"], "--code"),
        (["bert", "--code", "--input", "texts.csv"], "--input"),
        (["missing", "--code"], "missing"),
        ([], "MODEL"),
    ],
    ids=str,
)
def test_bad_uses(arguments, says, bert, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bert").symlink_to(bert)
    (tmp_path / "texts.csv").write_text('text,label\n"",1\n')
    (tmp_path / "words.txt").write_text("the dog\n")
    name = arguments[0] if arguments else ""
    if "smaller" in arguments:
        saved(random_bert(vocab_size=8), tmp_path / "smaller")
    if name in ("no-weights", "no-tokenizer"):
        random_bert().save_pretrained(tmp_path / name)
    if name == "no-weights":
        (tmp_path / name / "model.safetensors").unlink()
    if name == "sinusoidal":
        saved(random_scratchbert(position_embedding_type="sinusoidal"), tmp_path / name)
    if name == "two":
        saved(random_encoder_decoder(), tmp_path / name)
    capsys.readouterr()
    assert run(*arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("check.py: ")
    assert says in line


# ----------------------------------------------------------------------------------------------------------------- code


def append(path, text: bytes):
    path.parent.mkdir(exist_ok=True)
    with path.open("ab") as file:
        file.write(text)


CODE = {
    "a byte": (
        lambda folder: append(folder / "modeling_scratchbert.py", b"\nopen('ran', 'w')\n"),
        1,
        "in modeling_scr",
    ),
    "line ends": (
        lambda folder: (folder / "unpadding.py").write_bytes(
            (folder / "unpadding.py").read_bytes().replace(b"\n", b"\r\n")
        ),
        0,
        "equal",
    ),
    "a missing file": (lambda folder: (folder / "attention.py").unlink(), 1, "in attention.py"),
    "a changed and a new file": (
        lambda folder: [append(folder / name, b"1") for name in ("attention.py", "code/more.py")],
        1,
        "in attention.py, code/more.py",
    ),
    "auto_map": (
        lambda folder: change_config(folder, auto_map={"AutoModel": "other.Model"}),
        1,
        "other.Model",
    ),
    "another repository": (
        lambda folder: change_config(folder, auto_map={"AutoModel": "ada/code--modeling_scratchbert.ScratchBertModel"}),
        1,
        "ada/code",
    ),
    "a kernel": (
        lambda folder: change_config(folder, parts=[{"attn_implementation": {"": "someone/attention"}}]),
        1,
        "someone/attention",
    ),
    "a tokenizer": (
        lambda folder: (folder / "tokenizer_config.json").write_text(
            '{"auto_map": {"AutoTokenizer": ["own.T", null]}}'
        ),
        1,
        "tokenizer_config.json",
    ),
    "generate": (lambda folder: append(folder / "custom_generate" / "generate.py", b""), 1, "custom_generate"),
}


@pytest.mark.parametrize("name", CODE)
def test_code_of_a_folder(name, tmp_path, monkeypatch, capsys):
    """It is compared, and never run. What is refused here is refused by `check_source`, but for unused files."""
    monkeypatch.chdir(tmp_path)
    folder = saved(random_scratchbert("Model"), tmp_path / "ours")
    edit, code, says = CODE[name]
    edit(folder)
    assert (run(folder, "--code"), os.path.exists("ran")) == (code, False)
    assert says in capsys.readouterr().out
    if code and name != "a new file":
        with pytest.raises(trust.ForeignCodeError, match="If you trust it"):
            check_source(str(folder), trust_remote_code=False)
    else:
        check_source(str(folder))


def test_a_bert_has_no_code(bert, capsys):
    assert run(bert, "--code") == 0
    assert "there is no code" in capsys.readouterr().out


# What each command that opens a checkpoint is called with.
OPENING = {
    "benchmark": ["MODEL", "--threads", "1"],
    "check": ["MODEL"],
    "convert": ["MODEL", "NEW"],
    "course": ["check", "1", "--model", "MODEL"],
    "predict": ["MODEL", "ROWS", "--output", "NEW"],
    "train": ["classification", "--model", "MODEL", "--output_dir", "NEW", "--train_file", "ROWS"],
}


@pytest.mark.parametrize("is_bert", [True, False])
@pytest.mark.parametrize("command", OPENING)
def test_every_command_refuses_other_code(command, is_bert, tmp_path, capsys):
    folder = tmp_path / "model"
    if is_bert:
        saved(BertModel(BertConfig(**TINY)), folder)
        change_config(folder, auto_map={"AutoModel": "own.AlibiBert"})
    else:
        saved(ScratchBertModel(tiny_config()), folder)
        append(folder / "modeling_scratchbert.py", b"\nopen('ran', 'w')\n")
    (tmp_path / "rows.csv").write_text("text,label\nDogs bark.,1\n")
    places = {"MODEL": str(folder), "ROWS": str(tmp_path / "rows.csv"), "NEW": str(tmp_path / "new")}
    before = set(tmp_path.iterdir())
    assert importlib.import_module(command).main([places.get(word, word) for word in OPENING[command]]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert ("own.AlibiBert" if is_bert else "in modeling_scratchbert.py") in line
    assert str(folder) in line
    assert ("--trust_remote_code" in line) == (command == "predict")
    assert set(tmp_path.iterdir()) == before


def test_releases(tmp_path, monkeypatch, capsys):
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    package = trust.digests(ROOT / "modeling_scratchbert")
    # Who changes the code of a released version gives it another number.
    assert read_json(trust.RELEASES).get(version) in (None, package)

    folder = saved(random_scratchbert("Model"), tmp_path / "ours")
    append(folder / "attention.py", b"# as in the release\n")
    (folder / "unpadding.py").unlink()
    monkeypatch.setattr(trust, "RELEASES", tmp_path / "released_code.json")
    trust.RELEASES.write_text(json.dumps({"0.0.1": trust.digests(folder)}))
    assert run(folder, "--code") == 0
    assert "0.0.1" in capsys.readouterr().out
    trust.record_release("0.0.2")
    assert read_json(trust.RELEASES) == {"0.0.1": trust.digests(folder), "0.0.2": package}
