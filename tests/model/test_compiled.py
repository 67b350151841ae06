"""The encoder in C++, beside `BertModel`, beside itself in other batches, and on other kinds of processors."""

import copy
import ctypes
import hashlib
import json
import os
import pickle
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from modeling_scratchbert import ScratchBertConfig, ScratchBertModel
from modeling_scratchbert.cpu import compiled
from support.folders import ROOT

LIBRARY = compiled.find_library()
pytestmark = pytest.mark.skipif(LIBRARY is None, reason="the encoder in C++ is not built, or not for this processor")
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
    {"hidden_act": "relu"},
    {"hidden_act": "gelu_new"},
    {"hidden_act": "gelu_pytorch_tanh", "num_attention_heads": 3, "layer_norm_eps": 1e-3},
    {"hidden_size": 64, "num_attention_heads": 1, "intermediate_size": 32},
    {"hidden_size": 32, "num_attention_heads": 2},
]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "int8": "int8"}


def make(dtype=None, **fields) -> ScratchBertModel:
    torch.manual_seed(0)
    model = ScratchBertModel(ScratchBertConfig(**FIELDS | fields), add_pooling_layer=False).eval()
    for name, parameter in model.named_parameters():
        if "bias" in name or "norm" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    return model if dtype is None else model.optimize_for_inference(dtype)


def batch_of(lengths: list[int], side: str = "right") -> tuple[dict, torch.Tensor]:
    ids = torch.zeros(len(lengths), max(lengths), dtype=torch.long)
    for row, length in enumerate(lengths):
        tokens = slice(0, length) if side == "right" else slice(ids.shape[1] - length, None)
        ids[row, tokens] = torch.arange(5, 5 + length) * (row + 3) % 94 + 5
    return {"input_ids": ids, "attention_mask": (ids != 0).long()}, ids != 0


@torch.no_grad()
def states(model, inputs, **options) -> torch.Tensor:
    return model(**inputs, **options).last_hidden_state


@pytest.mark.parametrize("fields", OTHERS, ids=str)
@pytest.mark.parametrize("side", ["left", "right"])
def test_outputs_are_those_of_the_model_as_loaded(fields, side):
    inputs, is_token = batch_of([7, 1, 45, 100, 33], side)
    expected, model = states(make(**fields), inputs), make(torch.float32, **fields)
    assert type(model.encoder) is compiled.CompiledStack
    unpadded = states(model, inputs)
    torch.testing.assert_close(unpadded[is_token], expected[is_token], rtol=0, atol=2e-5)
    padded = states(model, inputs, padding_free=False)  # whose padding a loss may read
    torch.testing.assert_close(padded, expected, rtol=0, atol=2e-5)
    assert torch.equal(padded[is_token], unpadded[is_token])


@pytest.mark.parametrize(("name", "least"), [("bfloat16", 0.999), ("int8", 0.998)])
def test_other_dtypes_are_close(name, least):
    inputs, is_token = batch_of([7, 1, 45, 100, 33])
    expected, found = states(make(), inputs)[is_token], states(make(DTYPES[name]), inputs)[is_token].float()
    assert torch.nn.functional.cosine_similarity(found, expected).min() > least


def test_hidden_states():
    inputs, _ = batch_of([7, 45])
    with torch.no_grad():
        expected, found = (each(**inputs, output_hidden_states=True) for each in (make(), make(torch.float32)))
    for ours, theirs in zip(found.hidden_states, expected.hidden_states, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-5)


def test_padding_in_the_middle_and_a_row_of_padding():
    inputs = {"input_ids": torch.arange(5, 41).view(3, 12), "attention_mask": torch.ones(3, 12, dtype=torch.long)}
    inputs["attention_mask"][0, 3:6] = inputs["attention_mask"][1] = 0
    expected, found = (states(model, inputs, padding_free=False) for model in (make(), make(torch.float32)))
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-5)


@pytest.fixture(scope="module")
def optimised():
    return {name: make(dtype) for name, dtype in DTYPES.items()}


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 130), min_size=1, max_size=12), st.integers(1, 3), st.sampled_from(sorted(DTYPES)))
def test_a_text_has_the_same_bits_in_any_batch(optimised, lengths, threads, name):
    model, (inputs, _) = optimised[name], batch_of(lengths)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    together = states(model, inputs)
    torch.set_num_threads(1)
    for row, length in enumerate(lengths):
        alone = states(model, {"input_ids": inputs["input_ids"][row : row + 1, :length]})[0]
        assert torch.equal(together[row, :length], alone)
    torch.set_num_threads(before)


DIGESTS = """
import json, sys
sys.path[:0] = sys.argv[1:]
from model.test_compiled import digests
print(json.dumps(digests()))
"""


def digests() -> dict[str, str]:
    import torch

    torch.backends.mkldnn.enabled = True
    inputs = torch.sin(torch.arange(300 * 96, dtype=torch.float32)).view(1, 300, 96)
    starts = torch.tensor([0, 1, 3, 20, 150, 300], dtype=torch.int32)
    found = {"library": compiled.library_in_use()[0]}
    for name, dtype in DTYPES.items():
        stack = make(dtype).encoder
        result = stack.encode(inputs.to(stack.dtype), None, starts, 0, len(stack.blocks))
        found[name] = hashlib.sha256(result.float().numpy().tobytes()).hexdigest()
    return found


def test_other_processors_compute_the_same_bits():
    """bfloat16 is rounded by the processor's own instructions. The factors of int8 come from a float32 model that torch
    computes, on this processor in each case."""
    ours, path = digests(), [str(ROOT), str(ROOT / "tests"), str(ROOT / "scripts")]
    for library in compiled.REQUIREMENTS:
        environment = {**os.environ, "SCRATCHBERT_ISA": library}
        command = [sys.executable, "-c", DIGESTS, *path]
        process = subprocess.run(command, env=environment, capture_output=True, text=True)
        if "expected the library" in process.stderr:
            continue
        found = json.loads(process.stdout.splitlines()[-1])
        assert found["library"] == library
        assert (found["float32"], found["int8"]) == (ours["float32"], ours["int8"])


@pytest.mark.parametrize("name", DTYPES)
def test_numbers_that_are_not_finite_stay_within_their_text(name, optimised):
    model = optimised[name]
    inputs = torch.randn(3, 9, 96).to(model.dtype)
    expected = states(model, {"inputs_embeds": inputs})
    for value in (float("nan"), float("inf")):
        changed = inputs.clone()
        changed[1, 4, 7] = value
        found = states(model, {"inputs_embeds": changed})
        assert found[1].isnan().all()
        assert torch.equal(found[[0, 2]], expected[[0, 2]])


def test_packed_sequences(optimised):
    model, lengths = optimised["float32"], [7, 1, 45, 3]
    inputs, is_token = batch_of(lengths)
    starts = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0).int()
    packed = {"input_ids": inputs["input_ids"][is_token][None], "cu_seq_lens_q": starts, "max_length_q": 45}
    expected = states(model, inputs)[is_token]
    assert torch.equal(states(model, packed)[0], expected)
    torch.testing.assert_close(states(torch.compile(model), packed)[0], expected, rtol=0, atol=2e-5)


@pytest.mark.parametrize("name", DTYPES)
def test_copies_and_pickles(name, optimised):
    model, (inputs, _) = optimised[name], batch_of([7, 45])
    expected = states(model, inputs)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(states(other, inputs), expected)


def test_threads_of_python_share_a_model(optimised):
    model, (inputs, _) = optimised["int8"], batch_of([7, 45, 100])
    expected = states(model, inputs)
    with ThreadPoolExecutor(4) as pool:
        for found in pool.map(lambda _: states(model, inputs), range(40)):
            assert torch.equal(found, expected)


def test_the_mode_of_the_processor_has_no_effect(optimised):
    model, inputs = optimised["float32"], {"inputs_embeds": torch.randn(1, 9, 96) * 1e-38}
    rows = inputs["inputs_embeds"]
    encode = model.encoder.encode
    expected = encode(rows, None, None, 0, 3)
    torch.set_flush_denormal(True)
    found = encode(rows, None, None, 0, 3)
    torch.set_flush_denormal(False)
    assert torch.equal(found, expected)


def test_a_forked_process_computes(optimised):
    model, (inputs, _) = optimised["float32"], batch_of([7, 45, 100])
    rows, starts = torch.randn(1, 100, 96), torch.tensor([0, 40, 100], dtype=torch.int32)
    expected = model.encoder.encode(rows, None, starts, 0, 3)
    states(model, inputs)
    child = os.fork()
    if child == 0:
        os._exit(0 if torch.equal(model.encoder.encode(rows, None, starts, 0, 3), expected) else 1)
    assert os.waitpid(child, 0)[1] == 0


CHANGES = {
    "size": 8,
    "type": 3,
    "activation": 3,
    "hidden": 80,
    "inner": 150,
    "heads": 5,
    "number": -1,
}


@pytest.mark.parametrize("field", CHANGES)
def test_the_library_refuses_other_structures(field, optimised):
    native, array, _ = optimised["float32"].encoder._as_structs()
    changed = compiled.NativeEncoder.from_buffer_copy(native)
    changed.blocks, changed.number = ctypes.addressof(array), len(array)
    rows, starts = torch.zeros(4, 96), torch.tensor([0, 4], dtype=torch.int32)
    encode = compiled.library_in_use()[1].scratchbert_encode
    arguments = rows.data_ptr(), 4, starts.data_ptr(), None, 1, 1
    assert encode(ctypes.addressof(changed), *arguments) == 0
    setattr(changed, field, CHANGES[field])
    assert encode(ctypes.addressof(changed), *arguments) == 1


@pytest.mark.parametrize(
    ("rows", "starts", "keys", "threads"),
    [
        *((5, [0, 4], [4], 1), (4, [1, 4], [3], 1), (4, [0, 3, 2, 4], [1, 0, 1], 1), (4, [0, 4], [4], 0)),
        *((4, [0, 4], [5], 1), (4, [0, 4], [-1], 1)),
    ],
)
def test_the_library_refuses_other_sizes(rows, starts, keys, threads, optimised):
    stack, memory = optimised["float32"].encoder, torch.zeros(8, 96)
    native, array, _ = stack._as_structs()
    native.blocks = ctypes.addressof(array)
    places, numbers = torch.tensor(starts, dtype=torch.int32), torch.tensor(keys, dtype=torch.int32)
    encode = compiled.library_in_use()[1].scratchbert_encode
    arguments = memory.data_ptr(), rows, places.data_ptr(), numbers.data_ptr(), len(starts) - 1, threads
    assert encode(ctypes.addressof(native), *arguments) == 1


@pytest.mark.parametrize(
    "fields",
    [
        {"num_hidden_layers": 0},
        {"hidden_size": 80},
        {"intermediate_size": 150},
        {"num_attention_heads": 4},
        {"hidden_act": "silu"},
    ],
    ids=str,
)
def test_others_are_computed_by_torch(fields):
    model, (inputs, is_token) = make(torch.float32, **fields), batch_of([7, 45])
    assert type(model.encoder) is not compiled.CompiledStack
    torch.testing.assert_close(states(model, inputs)[is_token], states(make(**fields), inputs)[is_token])


def test_an_unknown_library_is_refused(monkeypatch):
    monkeypatch.setenv("SCRATCHBERT_ISA", "sse")
    compiled.find_library.cache_clear()
    with pytest.raises(ValueError, match="SCRATCHBERT_ISA"):
        make(torch.float32)
    monkeypatch.setenv("SCRATCHBERT_ISA", "torch")
    compiled.find_library.cache_clear()
    assert compiled.find_library() is None
    monkeypatch.undo()
    compiled.find_library.cache_clear()
