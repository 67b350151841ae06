"""scripts/export.py: what it writes computes, in the runtime that it is for, what the model does, and what does not is
found; and CTranslate2, which reads what save_as_bert writes."""

import dataclasses
import importlib.util
import json
import math
import shutil
import subprocess
import sys

import numpy
import pytest
import torch
from torch.testing import assert_close
from transformers import AutoTokenizer, BertConfig, BertModel, BertTokenizer, RobertaConfig, RobertaModel

import export
from modeling_scratchbert import ScratchBertConfig, ScratchBertModel
from support.models import HEADS, NEEDS, OURS, randomise, tiny_config
from toolkit import exporting as script

EXTRAS = ["onnx", "openvino"]

# That every head comes through torch.export is for test_compile_export to say.
EVERY_HEAD = [
    *[("torch", head) for head in ("Model", "ForQuestionAnswering")],
    *[(name, head) for name in ("onnx", "openvino") for head in (*HEADS, "ForCausalLM")],
]
EVERY_FORMAT = ["torch", *EXTRAS]

# Batch and length: one of each, those beside the traced (3, 7), and as long as can be.
SHAPES = ((1, 1), (1, 6), (5, 8), (5, 6), (2, 40))

SPECIAL_IDS = {"decoder_start_token_id": 2, "eos_token_id": 3, "pad_token_id": 0, "bos_token_id": 1}


@pytest.fixture(autouse=True)
def quiet(quiet_only_here):
    pass


@pytest.fixture
def needs():
    """Skips where what a format's runtime needs is not installed."""

    def skip(format_name):
        for package in script.FORMATS[format_name].needs:
            pytest.importorskip(package, reason=f"{package} is not installed")

    return skip


@pytest.fixture
def folder(tmp_path):
    """Makes a checkpoint of ours with random weights, and opens it as it stands there."""

    def make(head="Model", **fields):
        fields = {**SPECIAL_IDS, **NEEDS.get(head, {}), **fields}
        model = OURS[head](tiny_config(ScratchBertConfig, **{"num_hidden_layers": 1, **fields}))
        randomise(model).save_pretrained(tmp_path / "model")
        return tmp_path / "model", OURS[head].from_pretrained(tmp_path / "model").eval()

    return make


def run(*arguments) -> int:
    return export.main([str(argument) for argument in arguments])


def runtime(folder, format_name, piece="model"):
    """A function from inputs to outputs, both by name, as a user of the files would write it."""
    if format_name == "torch":
        module = torch.export.load(folder / f"{piece}.pt2").module()
        return lambda **inputs: module(**inputs)
    if format_name == "aotinductor":
        return torch._inductor.aoti_load_package(str(folder / f"compiled_{piece}.pt2"))
    if format_name == "onnx":
        import onnxruntime

        session = onnxruntime.InferenceSession(folder / f"{piece}.onnx", providers=["CPUExecutionProvider"])
        names = [output.name for output in session.get_outputs()]

        def run_onnx(**inputs):
            arrays = session.run(names, {name: tensor.numpy() for name, tensor in inputs.items()})
            return {name: torch.from_numpy(array) for name, array in zip(names, arrays, strict=True)}

        return run_onnx
    import openvino

    compiled = openvino.Core().compile_model(
        folder / f"openvino_{piece}.xml", "CPU", {"INFERENCE_PRECISION_HINT": "f32"}
    )

    def run_openvino(**inputs):
        arrays = compiled({name: tensor.numpy() for name, tensor in inputs.items()})
        return {output.any_name: torch.from_numpy(arrays[output].copy()) for output in compiled.outputs}

    return run_openvino


def ragged(batch, length, choices=None):
    """Rows of every length up to `length`, with padding on the right."""
    shape = (batch, length) if choices is None else (batch, choices, length)
    lengths = length - torch.arange(math.prod(shape[:-1])).reshape(shape[:-1]) % length
    return {
        "input_ids": torch.randint(1, 99, shape),
        "attention_mask": (torch.arange(length) < lengths[..., None]).long(),
        "token_type_ids": torch.randint(0, 2, shape),
    }


def assert_same(output, expected, mask):
    """Exactly the same fields, and within 1e-4 the same numbers wherever there is a token."""
    assert output.keys() == {name for name, value in expected.items() if isinstance(value, torch.Tensor)}
    for name, value in output.items():
        assert value.shape == expected[name].shape
        per_token = value.ndim == 3 or name in ("start_logits", "end_logits")
        real = mask.bool() if per_token else ...
        assert_close(value[real], expected[name][real], rtol=0, atol=1e-4)
        assert value[real].abs().max() > 0.01


# ------------------------------------------------------------------------------------------------ every head and format


@pytest.mark.parametrize(("format_name", "head"), EVERY_HEAD)
def test_every_head(format_name, head, folder, needs, tmp_path, capsys):
    needs(format_name)
    fields = {"ForQuestionAnswering": {}, "ForCausalLM": {"num_hidden_layers": 2}}.get(head, {"num_labels": 3})
    source, model = folder(head, **fields)
    assert run(source, tmp_path / "out", "--format", format_name) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    assert "out: within " in printed.out.splitlines()[-1]
    run_file = runtime(tmp_path / "out", format_name)
    choices = (2, 3, 1, 4, 2) if head == "ForMultipleChoice" else (None,) * 5
    for shape, choice in zip(SHAPES, choices, strict=True):
        inputs = ragged(*shape, choice)
        with torch.no_grad():
            expected = model(**inputs, **({"use_cache": False} if head == "ForCausalLM" else {}))
        assert_same(run_file(**inputs), expected, inputs["attention_mask"])


@pytest.mark.parametrize(
    ("format_name", "head"),
    [
        ("torch", "ForConditionalGeneration"),
        pytest.param(
            *("aotinductor", "ForConditionalGeneration"),
            marks=pytest.mark.skipif(shutil.which("g++") is None, reason="AOTInductor requires a C++ compiler"),
        ),
        ("onnx", "ForConditionalGeneration"),
        ("onnx", "Seq2SeqModel"),
        ("openvino", "ForConditionalGeneration"),
    ],
)
def test_two_halves(format_name, head, folder, needs, tmp_path):
    """One after the other they are the whole model, with source and target of any lengths."""
    needs(format_name)
    source, model = folder(head, num_decoder_layers=2)
    assert run(source, tmp_path / "out", "--format", format_name) == 0
    encoder, decoder = (runtime(tmp_path / "out", format_name, half) for half in ("encoder_model", "decoder_model"))
    for (batch, length), target_length in zip(SHAPES, (5, 1, 9, 40, 3), strict=True):
        inputs, target = ragged(batch, length), ragged(batch, target_length)
        encoded = encoder(**inputs)["last_hidden_state"]
        output = decoder(
            input_ids=target["input_ids"],
            attention_mask=target["attention_mask"],
            encoder_hidden_states=encoded,
            encoder_attention_mask=inputs["attention_mask"],
        )
        with torch.no_grad():
            expected = model(
                **inputs,
                decoder_input_ids=target["input_ids"],
                decoder_attention_mask=target["attention_mask"],
                use_cache=False,
            )
        field = "logits" if head == "ForConditionalGeneration" else "last_hidden_state"
        assert_same(output, {field: expected[field]}, target["attention_mask"])


@pytest.mark.parametrize(
    "fields",
    [
        {"norm_first": True, "position_embedding_type": "sinusoidal", "type_vocab_size": 1, "hidden_act": "relu"},
        {"add_cross_attention": True, "is_decoder": True},
    ],
)
def test_other_blocks(fields, folder, tmp_path):
    source, model = folder("ForCausalLM" if "is_decoder" in fields else "ForMaskedLM", **fields)
    assert run(source, tmp_path / "out", "--format", "torch") == 0
    inputs = ragged(5, 8)
    if "is_decoder" in fields:
        del inputs["token_type_ids"]
        inputs |= {"encoder_hidden_states": torch.randn(5, 3, 32), "encoder_attention_mask": torch.ones(5, 3).long()}
    else:
        inputs["token_type_ids"].clamp_(max=model.config.type_vocab_size - 1)
    with torch.no_grad():
        expected = model(**inputs).logits
    assert_same(runtime(tmp_path / "out", "torch")(**inputs), {"logits": expected}, inputs["attention_mask"])


def test_a_bert(tmp_path):
    """Without a word of ScratchBert in its folder, and without a pooler."""
    bert = randomise(BertModel(tiny_config(BertConfig), add_pooling_layer=False)).eval()
    bert.save_pretrained(tmp_path / "bert")
    assert run(tmp_path / "bert", tmp_path / "out", "--format", "torch") == 0
    inputs = ragged(5, 9)
    with torch.no_grad():
        expected = {"last_hidden_state": bert(**inputs).last_hidden_state}
    assert_same(runtime(tmp_path / "out", "torch")(**inputs), expected, inputs["attention_mask"])
    configs = [json.loads((tmp_path / name / "config.json").read_text()) for name in ("bert", "out")]
    assert configs[0] == configs[1]


@pytest.mark.parametrize("format_name", EXTRAS)
def test_real_weights(format_name, minilm, needs, tmp_path):
    """Sentences go in by the tokenizer that lies beside the graph, and the numbers are those of the Bert class."""
    needs(format_name)
    assert run(minilm, tmp_path / "out", "--format", format_name) == 0
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    texts = ["Yes.", "The cat sat on the mat, and the dog lay down beside it.", "A man is playing a guitar on stage."]
    inputs = dict(tokenizer(texts, padding=True, return_tensors="pt"))
    with torch.no_grad():
        expected = BertModel.from_pretrained(minilm).eval()(**inputs)
    assert_same(runtime(tmp_path / "out", format_name)(**inputs), expected, inputs["attention_mask"])


# ------------------------------------------------------------------------------------------------ what lies beside it

ELSEWHERE = """
import sys
sys.modules["modeling_scratchbert"] = None
import torch
module = torch.export.load(sys.argv[1] + "/model.pt2").module()
assert "transformers" not in sys.modules
from transformers import AutoTokenizer
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
inputs = tokenizer(["a boat", "a sinking boat"], padding=True, return_tensors="pt", return_token_type_ids=True)
print(module(**inputs)["logits"].argmax(-1).tolist())
"""


def test_it_is_used_without_the_package(folder, tmp_path):
    source, model = folder("ForTokenClassification", num_labels=7)
    (tmp_path / "words").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "boat", "sinking"]))
    tokenizer = BertTokenizer(str(tmp_path / "words"))
    tokenizer.save_pretrained(source)
    (source / "generation_config.json").write_text('{"num_beams": 4}')
    assert run(source, tmp_path / "out", "--format", "torch") == 0

    fields = json.loads((source / "config.json").read_text())
    assert fields.pop("auto_map")
    assert fields.pop("model_type") == "scratchbert"
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == fields
    assert (tmp_path / "out" / "generation_config.json").read_text() == '{"num_beams": 4}'
    assert not list((tmp_path / "out").glob("*.py"))
    done = subprocess.run(
        [sys.executable, "-c", ELSEWHERE, str(tmp_path / "out")], capture_output=True, text=True, cwd=tmp_path
    )
    assert (done.returncode, done.stderr) == (0, "")  # AutoTokenizer warns about an unknown model type
    ids = torch.tensor([[2, 5, 6, 3, 0], [2, 5, 7, 6, 3]])
    with torch.no_grad():
        expected = model(input_ids=ids, attention_mask=(ids != 0).long()).logits.argmax(-1).tolist()
    found = json.loads(done.stdout)
    assert found[0][:4] == expected[0][:4]
    assert found[1] == expected[1]


WITHOUT_A_COMPILER = """
import sys
sys.modules["modeling_scratchbert"] = sys.modules["transformers"] = None
import torch
run = torch._inductor.aoti_load_package("out/compiled_model.pt2")
for inputs, expected in torch.load("expected.pt"):
    torch.testing.assert_close(run(**inputs)["logits"], expected, rtol=0, atol=1e-5)
"""


@pytest.mark.skipif(shutil.which("g++") is None, reason="AOTInductor requires a C++ compiler")
def test_a_compiled_model_runs_without_the_compiler(folder, tmp_path):
    source, model = folder("ForSequenceClassification")
    assert run(source, tmp_path / "out", "--format", "aotinductor") == 0
    batches = [ragged(*shape) for shape in SHAPES]
    with torch.no_grad():
        torch.save([(batch, model(**batch).logits) for batch in batches], tmp_path / "expected.pt")
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_A_COMPILER],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={"PATH": "", "TMPDIR": str(tmp_path)},
    )
    assert done.returncode == 0, done.stderr


def test_the_onnx_file_is_sound(folder, needs, tmp_path, monkeypatch):
    needs("onnx")
    import onnx

    source, model = folder("ForQuestionAnswering")
    assert run(source, tmp_path / "out", "--format", "onnx") == 0
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"model.onnx", "config.json"}
    onnx.checker.check_model(tmp_path / "out" / "model.onnx", full_check=True)
    written = onnx.load(tmp_path / "out" / "model.onnx")
    assert [(opset.domain, opset.version) for opset in written.opset_import] == [("", script.OPSET)]
    axes = {
        value.name: [axis.dim_param for axis in value.type.tensor_type.shape.dim]
        for value in (*written.graph.input, *written.graph.output)
    }
    names = ("input_ids", "attention_mask", "token_type_ids", "start_logits", "end_logits")
    assert axes == {name: ["batch", "length"] for name in names}

    monkeypatch.setattr(script, "LARGEST_IN_ONE_FILE", 0)
    assert run(source, tmp_path / "out", "--format", "onnx", "--overwrite") == 0
    assert {"model.onnx", "model.onnx.data"} <= {path.name for path in (tmp_path / "out").iterdir()}
    inputs = ragged(5, 8)
    with torch.no_grad():
        expected = model(**inputs)
    assert_same(runtime(tmp_path / "out", "onnx")(**inputs), expected, inputs["attention_mask"])


# ------------------------------------------------------------------------------------------------ wrong exports


def spoiled(format_name, spoil):
    """A format with `spoil(inputs, outputs)` behind its runtime."""
    opened = script.FORMATS[format_name].open

    def open_spoiled(path, threads):
        run_file = opened(path, threads)
        return lambda inputs: spoil(inputs, dict(run_file(inputs)))

    return dataclasses.replace(script.FORMATS[format_name], open=open_spoiled)


def changed(field, change, when=lambda inputs: True):
    return lambda inputs, outputs: {**outputs, field: change(outputs[field])} if when(inputs) else outputs


def refuse_five(inputs, outputs):
    if len(inputs["input_ids"]) == 5:
        raise RuntimeError("five rows\nare too many")
    return outputs


def at_one_token(inputs, outputs):
    """The last real token of the last row of the batch with left padding."""
    if inputs["attention_mask"][:, 0].min() == 0 and len(inputs["input_ids"]) == 5:
        outputs["last_hidden_state"][-1, -1, 0] += 2e-4
    return outputs


WRONG = {
    "a shift": changed("last_hidden_state", lambda value: value + 2e-4),
    "one output": changed("pooler_output", lambda value: value - 2e-4),
    "one batch": changed("pooler_output", lambda value: value * 2, lambda inputs: inputs["input_ids"].shape == (1, 40)),
    "one number": at_one_token,
    "not a number": changed("last_hidden_state", lambda value: value * math.nan),
    "a shape": changed("last_hidden_state", lambda value: value[:, :1]),
    "no output": lambda inputs, outputs: {"last_hidden_state": outputs["last_hidden_state"]},
    "a runtime's complaint": refuse_five,
}


@pytest.fixture(scope="module")
def one_model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("export") / "model"
    randomise(ScratchBertModel(tiny_config(num_hidden_layers=1))).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def one_piece(one_model):
    """What is exported of it, and a right export, opened."""
    (piece,) = script.pieces_of(script.load_model(script.read_checkpoint(str(one_model)))).values()
    path = one_model.parent / "model.pt2"
    with torch.no_grad():
        script.FORMATS["torch"].write(piece, script.trace(piece), path)
    return piece, path, script.open_torch(path, 1)


@pytest.fixture
def compare(one_piece, monkeypatch):
    """The check of this export with `spoil` behind the runtime."""
    piece, path, run_file = one_piece

    def check(spoil):
        opened = dataclasses.replace(script.FORMATS["torch"], open=lambda path, threads: run_file)
        with monkeypatch.context() as patched, torch.no_grad():
            patched.setitem(script.FORMATS, "torch", opened)
            patched.setitem(script.FORMATS, "torch", spoiled("torch", spoil))
            return script.compare(piece, "torch", path)

    return check


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_export_is_found(wrong, compare):
    found = compare(WRONG[wrong])
    assert not found.agrees
    assert found.shapes == ["1×1", "1×9", "2×5", "5×12", "5×16 left", "1×40"]
    assert found.error == ("5×12: RuntimeError: five rows are too many" if wrong == "a runtime's complaint" else None)
    assert math.isfinite(found.largest) == (wrong in ("a shift", "one output", "one batch", "one number"))
    wrong_cells = [number for row in found.differences.values() for number in row if not number <= script.TOLERANCE]
    only = {"one output": 6, "one batch": 1, "one number": 1, "a runtime's complaint": 4}
    assert len(wrong_cells) == only.get(wrong, len(wrong_cells))


def test_what_is_within_the_tolerance_stays(compare):
    """So does whatever comes out at padding."""

    def spoil(inputs, outputs):
        outputs["last_hidden_state"] = outputs["last_hidden_state"] + 5e-5
        outputs["last_hidden_state"][inputs["attention_mask"] == 0] = math.nan
        return outputs

    found = compare(spoil)
    assert found.agrees
    assert 4e-5 < found.largest < 6e-5


def assert_removed(out, capsys) -> str:
    """Neither the export nor a temporary folder is left. Returns what was printed."""
    assert list(out.parent.iterdir()) == []
    printed = capsys.readouterr()
    assert len(printed.err.splitlines()) == 1
    assert "would differ from" in printed.err
    return printed.out


@pytest.mark.parametrize("forgotten", ["attention_mask", "token_type_ids"])
def test_a_graph_that_leaves_out_an_input_is_found(forgotten, one_model, tmp_path, monkeypatch, capsys):
    forward = script.TensorModel.forward

    def forgetful(self, input_ids, attention_mask, token_type_ids):
        given = {"input_ids": input_ids, "attention_mask": attention_mask, "token_type_ids": token_type_ids}
        given[forgotten] = torch.full_like(input_ids, forgotten == "attention_mask")
        return forward(self, **given)

    monkeypatch.setattr(script.TensorModel, "forward", forgetful)
    assert run(one_model, tmp_path / "out", "--format", "torch") == 1
    assert_removed(tmp_path / "out", capsys)


def test_a_graph_for_one_shape_is_found(one_model, tmp_path, monkeypatch, capsys):
    def trace(piece):
        return torch.export.export(
            piece.module, (), script.make_batch(piece.config, piece.axes, *script.TRACED), strict=False
        )

    monkeypatch.setattr(script, "trace", trace)
    assert run(one_model, tmp_path / "out", "--format", "torch") == 1
    assert "inf" in assert_removed(tmp_path / "out", capsys)


@pytest.mark.parametrize("format_name", EXTRAS)
def test_a_wrong_export_is_removed_in_every_format(format_name, one_model, needs, tmp_path, monkeypatch, capsys):
    needs(format_name)
    monkeypatch.setitem(script.FORMATS, format_name, spoiled(format_name, WRONG["one number"]))
    assert run(one_model, tmp_path / "out", "--format", format_name) == 1
    assert_removed(tmp_path / "out", capsys)


def test_what_was_there_before_stays(one_model, tmp_path, monkeypatch, capsys):
    out = tmp_path / "out"
    assert run(one_model, out, "--format", "torch") == 0
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    assert run(one_model, out, "--format", "torch") == 2
    assert "--overwrite" in capsys.readouterr().err
    monkeypatch.setitem(script.FORMATS, "torch", spoiled("torch", WRONG["one output"]))
    assert run(one_model, out, "--format", "torch", "--overwrite") == 1
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


# ------------------------------------------------------------------------------------------------ bad input


def assert_refused(arguments, words, capsys, out=None):
    assert run(*arguments) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert len(printed.err.splitlines()) == 1
    assert printed.err.startswith("export.py: ")
    for word in words:
        assert word in printed.err, printed.err
    assert out is None or not out.exists()


def test_a_checkpoint_that_cannot_be_exported(folder, tmp_path, capsys):
    out = tmp_path / "out"
    assert_refused([tmp_path / "nowhere", out, "--format", "torch"], ["no such folder", "nowhere"], capsys, out)

    RobertaModel(tiny_config(RobertaConfig)).save_pretrained(tmp_path / "roberta")
    assert_refused([tmp_path / "roberta", out, "--format", "torch"], ["roberta"], capsys, out)

    source, _ = folder()
    fields = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**fields, "architectures": ["ScratchBertForTokenClassification"]}))
    assert_refused(
        [source, out, "--format", "torch"],
        ["ScratchBertForTokenClassification", "classifier.weight is not in the file"],
        capsys,
        out,
    )
    (source / "config.json").write_text(json.dumps({**fields, "architectures": ["TimeSeriesBert"]}))
    assert_refused([source, out, "--format", "torch"], ["TimeSeriesBert", "ScratchBertForMaskedLM"], capsys, out)
    (source / "config.json").write_text(json.dumps({**fields, "architectures": None}))
    assert run(source, out, "--format", "torch") == 0


def test_an_exporter_that_fails(one_model, tmp_path, monkeypatch, capsys):
    def write(piece, program, path):
        path.write_text("half of it")
        raise TypeError("cannot\ndo this")

    wrong = dataclasses.replace(script.FORMATS["torch"], write=write)
    monkeypatch.setitem(script.FORMATS, "torch", wrong)
    words = ["model cannot be exported to torch: TypeError: cannot do this"]
    assert_refused([one_model, tmp_path / "out", "--format", "torch"], words, capsys)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("format_name", "missing", "words"),
    [
        ("onnx", {"onnxruntime"}, 'onnxruntime is not installed; pip install "scratchbert[bench]"'),
        ("onnx", {"onnx", "onnxscript"}, 'onnx and onnxscript are not installed; pip install "scratchbert[bench]"'),
        ("openvino", {"openvino"}, 'pip install "scratchbert[bench]"'),
    ],
)
def test_a_package_that_is_missing(format_name, missing, words, one_model, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in missing else object())
    assert_refused([one_model, tmp_path / "out", "--format", format_name], [words], capsys, tmp_path / "out")


def test_a_compiler_that_is_missing(one_model, tmp_path, monkeypatch, capsys):
    from torch._inductor import config

    monkeypatch.setattr(config.cpp, "cxx", ("no-such-compiler",))
    words = ["no C++ compiler was found", "Install g++"]
    assert_refused([one_model, tmp_path / "out", "--format", "aotinductor"], words, capsys, tmp_path / "out")


def test_a_target_in_use(one_model, tmp_path, capsys):
    (tmp_path / "file").write_text("x")
    assert_refused([one_model, tmp_path / "file", "--format", "torch"], ["is a file"], capsys)
    assert_refused([one_model, one_model / "onnx", "--format", "torch"], ["overlap"], capsys)
    with pytest.raises(SystemExit) as stopped:
        run(one_model, tmp_path / "out", "--format", "tflite")
    assert stopped.value.code == 2


# ------------------------------------------------------------------------------------------------ CTranslate2


def test_ctranslate2_reads_what_save_as_bert_writes(minilm, tmp_path):
    """From real weights through ScratchBert, BERT's names and CTranslate2's converter, to the same hidden states."""
    ctranslate2 = pytest.importorskip("ctranslate2", reason="ctranslate2 is not installed")
    model = ScratchBertModel.from_pretrained(minilm).eval()
    model.save_as_bert(tmp_path / "bert")
    tokenizer = AutoTokenizer.from_pretrained(minilm)
    tokenizer.save_pretrained(tmp_path / "bert")
    ctranslate2.converters.TransformersConverter(str(tmp_path / "bert")).convert(str(tmp_path / "converted"))

    questions = ["How many people live in Berlin?", "Who?", "What is lying on the mat?"]
    answers = ["About 3.7 million people are registered there.", "The dog.", "A cat, and it is fast asleep."]
    rows = tokenizer(questions, answers, return_token_type_ids=True)
    encoder = ctranslate2.Encoder(str(tmp_path / "converted"), compute_type="float32", intra_threads=1)
    found = encoder.forward_batch(rows["input_ids"], token_type_ids=rows["token_type_ids"])
    inputs = tokenizer.pad(rows, return_tensors="pt")
    with torch.no_grad():
        expected = model(**inputs)
    real = inputs["attention_mask"].bool()
    assert not real.all()
    assert inputs["token_type_ids"].any()
    states, pooled = (torch.from_numpy(numpy.array(view)) for view in (found.last_hidden_state, found.pooler_output))
    assert_close(states[real], expected.last_hidden_state[real], rtol=0, atol=1e-4)
    assert_close(pooled, expected.pooler_output, rtol=0, atol=1e-4)
