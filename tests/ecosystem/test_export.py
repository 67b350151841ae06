"""Models in other runtimes: ONNX Runtime and OpenVINO, by torch.export, and CTranslate2, which reads what save_as_bert
writes. That every class passes torch.export is tested in compilation/test_compile_export.py."""

import numpy
import pytest
import torch
from torch.export import Dim
from torch.testing import assert_close
from transformers import AutoTokenizer

from modeling_scratchbert import ScratchBertModel
from support.models import inputs_for, random_scratchbert

HEADS = ("Model", "ForQuestionAnswering", "ForMultipleChoice", "ForCausalLM", "ForConditionalGeneration")
SHAPES = ((1, 1), (1, 6), (5, 8), (2, 40))  # batch and length; the last is the model's maximum


def open_onnx(program, path):
    pytest.importorskip("onnxscript", reason="onnxscript is not installed")
    onnxruntime = pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
    torch.onnx.export(program, f=path, dynamo=True, verbose=False)
    session = onnxruntime.InferenceSession(path)
    names = {value.name for value in session.get_inputs()}
    return lambda arrays: session.run(None, {name: arrays[name] for name in names})


def open_openvino(program, path):
    openvino = pytest.importorskip("openvino", reason="openvino is not installed")
    openvino.save_model(openvino.convert_model(program), path, compress_to_fp16=False)
    compiled = openvino.Core().compile_model(path, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    return lambda arrays: list(compiled(arrays).values())


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize(("runtime", "file"), [(open_onnx, "model.onnx"), (open_openvino, "model.xml")])
def test_outputs_are_equal_in_every_shape(runtime, file, head, tmp_path):
    model = random_scratchbert(head, num_hidden_layers=1)
    model.config.use_cache = False
    inputs = inputs_for(head)
    shapes = {name: dict.fromkeys(range(tensor.ndim), Dim.DYNAMIC) for name, tensor in inputs.items()}
    with torch.no_grad():
        program = torch.export.export(model, (), inputs, dynamic_shapes=shapes)
    run = runtime(program, tmp_path / file)
    for shape in SHAPES:
        inputs = inputs_for(head, *shape)
        with torch.no_grad():
            expected = [value for value in model(**inputs).values() if torch.is_tensor(value)]
        found = run({name: tensor.numpy() for name, tensor in inputs.items()})
        for output, reference in zip(found, expected, strict=True):
            per_token = reference.shape[:2] == inputs["attention_mask"].shape
            compared = inputs["attention_mask"].bool() if per_token else ...
            assert_close(torch.from_numpy(output)[compared], reference[compared], rtol=0, atol=1e-4)


def test_ctranslate2_reads_what_save_as_bert_writes(minilm, tmp_path):
    """From real weights through ScratchBert, BERT's names and CTranslate2's converter, to the same hidden states."""
    ctranslate2 = pytest.importorskip("ctranslate2", reason="ctranslate2 is not installed")
    model = ScratchBertModel.from_pretrained(minilm).eval()
    model.save_as_bert(tmp_path / "bert")
    AutoTokenizer.from_pretrained(minilm).save_pretrained(tmp_path / "bert")  # which the converter reads
    ctranslate2.converters.TransformersConverter(str(tmp_path / "bert")).convert(str(tmp_path / "converted"))

    inputs = inputs_for()
    mask = inputs["attention_mask"].bool()
    ids, types = (
        [row[mask[i]].tolist() for i, row in enumerate(inputs[name])] for name in ("input_ids", "token_type_ids")
    )
    encoder = ctranslate2.Encoder(str(tmp_path / "converted"), compute_type="float32", intra_threads=1)
    found = encoder.forward_batch(ids, token_type_ids=types)
    with torch.no_grad():
        expected = model(**inputs)
    states, pooled = (torch.from_numpy(numpy.array(view)) for view in (found.last_hidden_state, found.pooler_output))
    assert_close(states[mask], expected.last_hidden_state[mask], rtol=0, atol=1e-4)
    assert_close(pooled, expected.pooler_output, rtol=0, atol=1e-4)
