"""The library in C++, beside the model as loaded, and on other kinds of processors. `test_determinism` tests the
bits of a text in any batch."""

import ctypes
import hashlib
import json
import os
import subprocess
import sys
from functools import partial

import pytest
import torch

from modeling_scratchbert import ScratchBertConfig, ScratchBertForConditionalGeneration, ScratchBertModel
from modeling_scratchbert.cpu import library
from support.folders import ROOT

pytestmark = pytest.mark.skipif(
    library.find_library() is None, reason="the library in C++ is not built, or not for this processor"
)
FIELDS = {
    "vocab_size": 99,
    "hidden_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "intermediate_size": 160,
    "initializer_range": 0.2,
    "max_position_embeddings": 300,
}
OTHERS = [
    {},
    {"norm_first": True},
    {"hidden_act": "gelu_pytorch_tanh", "num_attention_heads": 3, "layer_norm_eps": 1e-3},
    {"hidden_size": 32, "num_attention_heads": 2},
    {"hidden_size": 90, "num_attention_heads": 3, "intermediate_size": 150, "norm_first": True},
    {"num_hidden_layers": 0},
]
SEQ2SEQ = {"is_encoder_decoder": True, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
WITHOUT_POOLER = partial(ScratchBertModel, add_pooling_layer=False)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "int8": "int8"}


def make(dtype=None, model_class=WITHOUT_POOLER, **fields):
    torch.manual_seed(0)
    model = model_class(ScratchBertConfig(**FIELDS | fields)).eval()
    for name, parameter in model.named_parameters():
        if "bias" in name or "norm" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    return model if dtype is None else model.optimize_for_inference(dtype)


def batch_of(lengths: list[int], side: str = "right") -> dict[str, torch.Tensor]:
    ids = torch.zeros(len(lengths), max(lengths), dtype=torch.long)
    for row, length in enumerate(lengths):
        tokens = slice(0, length) if side == "right" else slice(ids.shape[1] - length, None)
        ids[row, tokens] = torch.arange(5, 5 + length) * (row + 3) % 94 + 5
    return {"input_ids": ids, "attention_mask": (ids != 0).long()}


@torch.no_grad()
def states(model, inputs, **options) -> torch.Tensor:
    return model(**inputs, **options).last_hidden_state


@pytest.mark.parametrize("fields", OTHERS, ids=str)
@pytest.mark.parametrize("side", ["left", "right", "middle"])
def test_outputs_of_the_model_as_loaded(fields, side):
    inputs = batch_of([7, 1, 45, 100, 33], side)
    if side == "middle":
        inputs["attention_mask"][4, 3:6] = inputs["attention_mask"][0] = 0  # also a row of padding
    is_token = inputs["attention_mask"].bool()
    expected, model = states(make(**fields), inputs), make(torch.float32, **fields)
    assert model.encoder.is_native
    unpadded = states(model, inputs)
    torch.testing.assert_close(unpadded[is_token], expected[is_token], rtol=0, atol=2e-5)
    padded = states(model, inputs, padding_free=False)  # whose padding a loss may read
    torch.testing.assert_close(padded, expected, rtol=0, atol=2e-5)
    assert torch.equal(padded[is_token], unpadded[is_token])


DIGESTS = """
import json, sys
sys.path[:0] = sys.argv[1:]
try:
    from model.test_compiled import digests
except ValueError:  # the processor does not support it
    print("null")
else:
    print(json.dumps(digests()))
"""


def digest(tensor) -> str:
    return hashlib.sha256(tensor.float().numpy().tobytes()).hexdigest()


@torch.no_grad()
def digests() -> dict[str, str]:
    """Of the outputs of encoders and of encoder-decoders, with the name of the library."""
    torch.backends.mkldnn.enabled = True
    inputs = {"inputs_embeds": torch.sin(torch.arange(5 * 60 * 96, dtype=torch.float32)).view(5, 60, 96)}
    inputs["attention_mask"] = (torch.arange(60) < torch.tensor([1, 2, 17, 60, 44])[:, None]).long()
    ids = torch.arange(5, 41).view(2, 18)
    found = {"library": library.library_in_use()[0]}
    for name, dtype in DTYPES.items():
        model = make(dtype)
        found[name] = digest(model.encoder(inputs["inputs_embeds"], inputs["attention_mask"][:, None, None]))
        seq2seq = make(dtype, ScratchBertForConditionalGeneration, **SEQ2SEQ)
        for length in (1, 7):
            found[f"{name} seq2seq {length}"] = digest(seq2seq(ids, decoder_input_ids=ids[:, :length]).logits)
    return found


def test_other_processors_compute_the_same_bits():
    """bfloat16 is rounded by the processor's own instructions."""
    ours, path = digests(), [str(ROOT), str(ROOT / "tests"), str(ROOT / "scripts")]
    for name in library.REQUIREMENTS:
        environment = {**os.environ, "SCRATCHBERT_ISA": name, "ATEN_CPU_CAPABILITY": "avx2"}
        command = [sys.executable, "-c", DIGESTS, *path]
        process = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        found = json.loads(process.stdout.splitlines()[-1])
        if found is None:
            continue
        assert found.pop("library") == name
        for kind, value in found.items():
            assert value == ours[kind] or kind.startswith("bfloat16"), kind


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_numbers_that_are_not_finite_stay_within_their_text(dtype):
    model = make(dtype)
    inputs = torch.randn(3, 9, 96).to(model.dtype)
    expected = states(model, {"inputs_embeds": inputs})
    for value in (float("nan"), float("inf")):
        changed = inputs.clone()
        changed[1, 4, 7] = value
        found = states(model, {"inputs_embeds": changed})
        assert found[1].isnan().all()
        assert torch.equal(found[[0, 2]], expected[[0, 2]])


def test_flushing_of_denormal_numbers_has_no_effect():
    model, x = make(torch.float32), torch.randn(1, 9, 96) * 1e-38
    expected = model.encoder(x)
    torch.set_flush_denormal(True)
    found = model.encoder(x)
    torch.set_flush_denormal(False)
    assert torch.equal(found, expected)


def test_forked_process_computes_with_one_thread():
    model, inputs = make(torch.float32), batch_of([7, 45, 100])
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    expected = states(model, inputs)
    child = os.fork()
    if child == 0:
        try:
            states(model, inputs)
        except RuntimeError as error:
            torch.set_num_threads(1)
            is_equal = torch.equal(states(model, inputs), expected)
            os._exit(0 if is_equal and "set_num_threads(1)" in str(error) else 1)
        os._exit(2)
    assert os.waitpid(child, 0)[1] == 0
    torch.set_num_threads(before)


REFUSED = [
    *(([0, 4], numbers) for numbers in ([-1, 3], [0, 4], [2, 1])),
    *((starts, [0, 3]) for starts in ([1, 4], [0, 3], [0, 3, 2, 4], [0, 5])),
]


@pytest.mark.parametrize(("starts", "numbers"), REFUSED, ids=str)
def test_library_refuses_other_sequences_and_blocks(starts, numbers):
    stack = make(torch.float32).encoder
    results = torch.zeros(1, 4, stack.width), torch.zeros(1, 4, 0)
    with pytest.raises(RuntimeError, match="run"):
        stack.run(results, [None, torch.tensor(starts, dtype=torch.int32), *[None] * 8], numbers)


# Of each structure of the C interface, fields with values that it refuses.
INVALID = {
    "stack": [
        *(("size", 8), ("type", 3), ("activation", 8), ("hidden", 97), ("hidden", 0), ("inner", 128), ("inner", 0)),
        *(("heads", 0), ("heads", 4), ("heads", 99), ("number", -1), ("blocks", None)),
    ],
    "batch": [
        *(("x", None), ("queries", None), ("starts", None), ("rows", 5), ("rows", 3), ("sequences", -1)),
        *(("first", -1), ("first", 3), ("last", 4), ("threads", 0)),
    ],
    "own": [("number", 99), ("number", -1), ("values", None), ("size", 5)],
    "source": [("number", 99), ("size", 5)],
}


@pytest.mark.parametrize(("kind", "field", "value"), [(kind, *each) for kind in INVALID for each in INVALID[kind]])
def test_library_refuses_invalid_structures(kind, field, value, monkeypatch):
    stack = make(torch.float32, is_decoder=True, add_cross_attention=True).encoder
    results = torch.zeros(2, 2, stack.width), torch.zeros(2, 2, 3 * stack.attention_width)
    starts, heads = torch.tensor([0, 2, 4], dtype=torch.int32), torch.zeros(2, 2, 7, 48)
    is_key, counts = torch.ones(2, 7).bool(), torch.ones(2, 2).int()
    calls = []
    monkeypatch.setattr("modeling_scratchbert.cpu.stack.call", lambda name, *structures: calls.append(structures))
    inputs = [torch.zeros_like(results[1]), starts, heads, heads, is_key, counts, heads, heads, is_key, None]
    stack.run(results, inputs, [1, 2])
    [(native, batch)] = calls
    run = library.library_in_use()[1].scratchbert_run
    pointers = ctypes.byref(native), ctypes.byref(batch)
    assert run(*pointers) == 0
    setattr({"stack": native, "batch": batch, "own": batch.own, "source": batch.source}[kind], field, value)
    assert run(*pointers) == 1


def test_unknown_library_is_refused(monkeypatch):
    monkeypatch.setenv("SCRATCHBERT_ISA", "sse")
    library.find_library.cache_clear()
    with pytest.raises(ValueError, match="SCRATCHBERT_ISA"):
        make(torch.float32)
    monkeypatch.undo()
    library.find_library.cache_clear()
