"""The library in C++, beside `BertModel`, beside itself in other batches, and on other kinds of processors."""

import copy
import ctypes
import hashlib
import json
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from modeling_scratchbert import ScratchBertConfig, ScratchBertForConditionalGeneration, ScratchBertModel
from modeling_scratchbert.cpu import library
from modeling_scratchbert.cpu.stack import native_keys
from support.folders import ROOT

LIBRARY = library.find_library()
pytestmark = pytest.mark.skipif(LIBRARY is None, reason="the library in C++ is not built, or not for this processor")
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
    {"hidden_size": 90, "num_attention_heads": 3, "intermediate_size": 150, "norm_first": True},
    {"num_hidden_layers": 0},
]
SEQ2SEQ = {"is_encoder_decoder": True, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "int8": "int8"}


WITHOUT_POOLER = partial(ScratchBertModel, add_pooling_layer=False)


def make(dtype=None, model_class: Callable = WITHOUT_POOLER, **fields):
    torch.manual_seed(0)
    model = model_class(ScratchBertConfig(**FIELDS | fields)).eval()
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
    assert model.encoder.is_native
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
try:
    from model.test_compiled import digests
except ValueError:  # the processor does not support it
    print("null")
else:
    print(json.dumps(digests()))
"""


def digests() -> dict[str, str]:
    import torch

    torch.backends.mkldnn.enabled = True
    inputs = torch.sin(torch.arange(300 * 96, dtype=torch.float32)).view(1, 300, 96)
    starts = torch.tensor([0, 1, 3, 20, 150, 300], dtype=torch.int32)
    found = {"library": library.library_in_use()[0]}
    for name, dtype in DTYPES.items():
        result = computed(make(dtype).encoder, inputs, starts)
        found[name] = hashlib.sha256(result.numpy().tobytes()).hexdigest()
        seq2seq = make(dtype, ScratchBertForConditionalGeneration, **SEQ2SEQ)
        ids = torch.arange(5, 41).view(2, 18)
        with torch.no_grad():
            results = (
                seq2seq(ids, decoder_input_ids=ids[:, :7]).logits,
                seq2seq(ids, decoder_input_ids=ids[:, :1]).logits,
            )
        found[f"{name} seq2seq"] = [hashlib.sha256(each.float().numpy().tobytes()).hexdigest() for each in results]
    return found


def computed(stack, inputs: torch.Tensor, starts: torch.Tensor | None) -> torch.Tensor:
    rows, length = inputs.shape[:2]
    starts = torch.arange(rows + 1, dtype=torch.int32) * length if starts is None else starts
    return run(stack, inputs.float(), None, starts, *[None] * 8, 0, len(stack.blocks))


def run(stack, x: torch.Tensor, *arguments) -> torch.Tensor:
    *tensors, first, last = arguments
    after = x.new_empty(*x.shape[:2], 3 * stack.attention_width if last < len(stack.blocks) else 0)
    x = x.clone()
    stack.run([x, after], tensors, [first, last])
    return x


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
        for kind, digest in found.items():
            assert digest == ours[kind] or kind.startswith("bfloat16"), kind


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
    expected = computed(model.encoder, rows, None)
    torch.set_flush_denormal(True)
    found = computed(model.encoder, rows, None)
    torch.set_flush_denormal(False)
    assert torch.equal(found, expected)


def test_a_forked_process_computes_with_one_thread(optimised):
    model, (inputs, _) = optimised["float32"], batch_of([7, 45, 100])
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


def call_of(stack, function, before, monkeypatch):
    """The arguments of the call of a function of the library, made by `before`."""
    calls = []
    monkeypatch.setattr("modeling_scratchbert.cpu.stack.call", lambda name, *arguments: calls.append((name, arguments)))
    before(stack)
    monkeypatch.undo()
    return next(arguments for name, arguments in calls if name == function)


CHANGES = {
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


@pytest.mark.parametrize(("kind", "field", "value"), [(kind, *each) for kind in CHANGES for each in CHANGES[kind]])
def test_the_library_refuses_other_sizes(kind, field, value, monkeypatch):
    stack = make(torch.float32, is_decoder=True, add_cross_attention=True).encoder
    x, heads = torch.zeros(2, 2, stack.width), torch.zeros(2, 2, 7, 48)
    projected, is_key, counts = (
        torch.zeros(2, 2, 3 * stack.attention_width),
        torch.ones(2, 7).bool(),
        torch.ones(2, 2).int(),
    )
    run_library = library.library_in_use()[1].scratchbert_run
    starts = torch.tensor([0, 2, 4], dtype=torch.int32)
    inputs = x, projected, starts, heads, heads, is_key, counts, heads, heads, is_key, None, 1, 2
    native, batch = call_of(stack, "run", lambda stack: run(stack, *inputs), monkeypatch)
    # The tensors that they point to.
    keys, kept = native_keys(heads, heads, is_key, counts), (x.clone(), torch.zeros(2, 2, 3 * stack.attention_width))
    batch.own = batch.source = keys
    batch.x, batch.projected, batch.queries = kept[0].data_ptr(), kept[1].data_ptr(), projected.data_ptr()
    batch.starts = starts.data_ptr()
    pointers = ctypes.byref(native), ctypes.byref(batch)
    assert run_library(*pointers) == 0
    setattr({"stack": native, "batch": batch, "own": batch.own, "source": batch.source}[kind], field, value)
    assert run_library(*pointers) == 1


@pytest.mark.parametrize("starts", [[1, 4], [0, 3], [0, 3, 2, 4], [0, 5]])
def test_the_library_refuses_other_sequences(starts, optimised):
    stack = optimised["float32"].encoder
    with pytest.raises(RuntimeError, match="refused run"):
        run(stack, torch.zeros(1, 4, 96), None, torch.tensor(starts), *[None] * 8, 0, 3)


def test_an_unknown_library_is_refused(monkeypatch):
    monkeypatch.setenv("SCRATCHBERT_ISA", "sse")
    library.find_library.cache_clear()
    with pytest.raises(ValueError, match="SCRATCHBERT_ISA"):
        make(torch.float32)
    monkeypatch.setenv("SCRATCHBERT_ISA", "torch")
    library.find_library.cache_clear()
    assert library.find_library() is None
    monkeypatch.undo()
    library.find_library.cache_clear()
