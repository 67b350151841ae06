"""After `optimize_for_inference`, a text has the same bits in any batch, with any number of threads."""

import copy
import pickle
from contextlib import contextmanager

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import StaticCache

from modeling_scratchbert.cpu import optimization
from modeling_scratchbert.cpu.library import find_library
from modeling_scratchbert.cpu.matrices import Matrix, TorchMatrix
from modeling_scratchbert.inference import is_prepacked
from support.models import BERTS, ENCODER_DECODERS, SPECIAL, random_scratchbert
from support.prepacked import product

KERNELS = ("sdpa", "eager")  # an optimised model has one attention for both
DTYPES = (torch.float32, torch.bfloat16, "int8")
# Widths of heads that are, and are not, a multiple of 16, and one head: MKL's products depend on where misaligned
# numbers are, and on the number of threads if there is nothing else to divide among them.
SIZES = (
    {"hidden_size": 32, "num_attention_heads": 2},
    {"hidden_size": 30, "num_attention_heads": 3, "intermediate_size": 41},
    {"hidden_size": 16, "num_attention_heads": 1},
)


@contextmanager
def threads(number: int):
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def optimised(head: str, dtype, kernel: str = "sdpa", seed: int = 0, **fields):
    if dtype == "int8" and not find_library():
        pytest.skip("the library in C++ is not in use")
    special = SPECIAL if head in ("ForCausalLM", *ENCODER_DECODERS) else {}
    model = random_scratchbert(head, seed=seed, attn_implementation=kernel, **{**special, **fields}).eval()
    return model.to(dtype if dtype != "int8" else torch.float32).optimize_for_inference(dtype)


def texts(lengths, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(4, 99, (length,), generator=generator) for length in lengths]


def padded(rows, width: int = 0, side: str = "right") -> dict[str, torch.Tensor]:
    width = max(width, *map(len, rows))
    batch = {name: torch.zeros(len(rows), width, dtype=torch.long) for name in ("input_ids", "attention_mask")}
    for i, row in enumerate(rows):
        place = slice(0, len(row)) if side == "right" else slice(width - len(row), width)
        batch["input_ids"][i, place], batch["attention_mask"][i, place] = row, 1
    return batch


@torch.no_grad()
def outputs(model, rows, width: int = 0) -> list[list[torch.Tensor]]:
    """For each text, every tensor that the model returns, without padding."""
    batch, head = padded(rows, width), type(model).__name__.removeprefix("ScratchBert")
    if head == "ForMultipleChoice":
        return [[logit] for logit in model(**{name: each[:, None] for name, each in batch.items()}).logits]
    masks = dict.fromkeys(("encoder_last_hidden_state", ""), batch["attention_mask"])
    if head in ENCODER_DECODERS:
        shorter = padded([row[: len(row) % 5 + 1] for row in rows])
        batch |= {f"decoder_{name}": each for name, each in shorter.items()}
        masks[""] = shorter["attention_mask"]
    one_per_text = {"pooler_output", "seq_relationship_logits"}
    one_per_text |= {"logits"} if head in ("ForNextSentencePrediction", "ForSequenceClassification") else set()
    found: list[list[torch.Tensor]] = [[] for _ in rows]
    for name, tensor in model(**batch).items():
        for own, values, mask in zip(found, tensor, masks.get(name, masks[""]), strict=False):
            if isinstance(tensor, torch.Tensor):
                own.append(values if name in one_per_text else values[mask.bool()])
    return found


def same(one, other) -> bool:
    """Whether all bits are equal: 0 and -0 differ."""
    pairs = ([each.contiguous().view(torch.uint8) for each in pair] for pair in zip(one, other, strict=True))
    return all(torch.equal(*pair) for pair in pairs)


def check(model, rows, order, sizes, width, number):
    """Compare each text alone, with one thread, with the same in batches of these sizes."""
    with threads(1):
        alone = [outputs(model, [row])[0] for row in rows]
    with threads(number):
        while order:
            part, order = order[: sizes[0]], order[sizes[0] :]
            sizes = sizes[1:] + sizes[:1]
            for i, found in zip(part, outputs(model, [rows[i] for i in part], width), strict=True):
                assert same(found, alone[i]), (i, len(rows[i]))
        assert all(same(outputs(model, [row])[0], each) for row, each in zip(rows, alone, strict=True))


MODELS = {
    (head, dtype, kernel, i): None
    for head in ("Model", "ForConditionalGeneration", "ForCausalLM")
    for dtype in DTYPES
    for kernel in KERNELS
    for i in range(len(SIZES))
}


def model_of(key):
    head, dtype, kernel, i = key
    MODELS[key] = MODELS[key] or optimised(head, dtype, kernel, **SIZES[i])
    return MODELS[key]


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@settings(max_examples=8, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 38), min_size=2, max_size=20),
    sizes=st.lists(st.integers(1, 12), min_size=1, max_size=4),
    extra=st.integers(0, 2),
    number=st.integers(1, 5),
    size=st.integers(0, 2),
    data=st.data(),
)
def test_a_text_has_the_same_bits_in_any_batch(kernel, dtype, lengths, sizes, extra, number, size, data):
    model, rows = model_of(("Model", dtype, kernel, size)), texts(lengths)
    order = data.draw(st.permutations(range(len(rows))))
    check(model, rows, list(order), sizes, max(lengths) + extra, number)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head", [*BERTS, *ENCODER_DECODERS])
def test_every_head(head, dtype, kernel):
    rows = texts([1, 2, 3, 4, 5, 8, 9, 17, 17, 31, 38, 1])
    for fields in SIZES:
        model = optimised(head, dtype, kernel, **fields)
        check(model, rows, [7, 3, 0, 11, 5, 10, 1, 8, 2, 9, 4, 6], [7, 1, 4], 40, 3)


@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("head", ["ForConditionalGeneration", "ForCausalLM"])
@settings(max_examples=6, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 30), min_size=2, max_size=8),
    dtype=st.sampled_from(DTYPES),
    size=st.integers(0, 2),
    number=st.integers(1, 4),
    seed=st.integers(0, 9),
)
def test_a_row_of_a_batch_generates_what_it_does_alone(head, kernel, beams, lengths, dtype, size, number, seed):
    model, rows = model_of((head, dtype, kernel, size)), texts(lengths, seed)
    side = "left" if head == "ForCausalLM" else "right"
    options = {"max_new_tokens": 8, "do_sample": False, "num_beams": beams, "output_scores": True}
    options |= {"return_dict_in_generate": True}

    def generate(rows, number):
        batch = padded(rows, side=side)
        with threads(number):
            found = model.generate(**batch, **options)
        prompt = batch["input_ids"].shape[1] if head == "ForCausalLM" else 1
        return found.sequences[:, prompt:], found.scores if beams == 1 else found.sequences_scores

    ids, scores = generate(rows, number)
    for i, row in enumerate(rows):
        own_ids, own_scores = generate([row], 1)
        length = own_ids.shape[1]
        assert torch.equal(ids[i, :length], own_ids[0])
        # Padding, because others are longer. Beam search pads with the end where the id of padding is 0.
        assert ids[i, length:].eq(3 if beams > 1 else 0).all()
        if beams == 1:
            assert all(torch.equal(all_rows[i], own[0]) for all_rows, own in zip(scores, own_scores, strict=False))
        else:
            assert torch.equal(scores[i], own_scores[0])


@pytest.mark.parametrize("kernel", KERNELS)
def test_rows_of_a_decoder_with_gaps_and_without_tokens(kernel):
    """Keys may be hidden between others, and a row may have none."""
    model, rows = optimised("ForCausalLM", torch.float32, kernel), texts([9, 9, 9, 5])
    batch = padded(rows, 12)
    batch["attention_mask"][1, [2, 3, 6]] = 0
    batch["attention_mask"][2] = 0
    reference = random_scratchbert("ForCausalLM", attn_implementation=kernel, **SPECIAL).eval()
    with torch.no_grad():
        found, expected = model(**batch).logits, reference(**batch).logits
        for i in (0, 1, 3):
            alone = model(**{name: each[i : i + 1, : len(rows[i])] for name, each in batch.items()}).logits
            seen = batch["attention_mask"][i].bool()
            assert torch.equal(found[i, seen], alone[0, seen[: len(rows[i])]])
            torch.testing.assert_close(found[i, seen], expected[i, seen], atol=1e-5, rtol=1e-5)
    assert found.isfinite().all()


@torch.no_grad()
@pytest.mark.parametrize("head", ["Model", "ForCausalLM"])
def test_the_numbers_are_those_of_the_model_as_loaded(head):
    """Where a slice of the batch has another mask or shape than usual, and for a decoder at padding."""
    fields = SPECIAL if head == "ForCausalLM" else {}
    pair = random_scratchbert(head, **fields), random_scratchbert(head, **fields).optimize_for_inference()
    ids, mask = torch.tensor([[5, 6, 7], [8, 0, 0]]), torch.tensor([[1, 1, 1], [1, 0, 0]])
    hidden = torch.tensor([[1, 1, 1], [0, 0, 0]])
    cases = [(ids, mask)] if head == "Model" else [(ids, mask), (ids, hidden), (ids[:, :1], hidden[:, :1])]
    for inputs in cases:
        ours, reference = (model(*inputs) for model in reversed(pair))
        name = "pooler_output" if head == "Model" else "logits"
        torch.testing.assert_close(ours[name], reference[name], atol=1e-5, rtol=1e-5)
    if head == "ForCausalLM":
        ours, reference = (model(ids, mask, labels=ids).loss for model in reversed(pair))
        torch.testing.assert_close(ours, reference, atol=1e-5, rtol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_hidden_states_have_the_same_bits(dtype):
    """The batch then stays padded, and so it does by request."""
    model, rows = optimised("ForTokenClassification", dtype), texts([7, 1, 12, 3])
    batch = padded(rows, 15)
    together = model(**batch, output_hidden_states=True).hidden_states
    not_unpadded = model(**batch, padding_free=False).logits
    for i, row in enumerate(rows):
        alone = model(row[None], output_hidden_states=True)
        assert all(same([one[i, : len(row)]], [other[0]]) for one, other in zip(together, alone[1], strict=True))
        assert same([not_unpadded[i, : len(row)]], [alone.logits[0]])


def test_packed_sequences():
    model, rows = optimised("Model", torch.float32), texts([7, 1, 12])
    with torch.no_grad():
        packed = model(torch.cat(rows)[None], cu_seq_lens_q=torch.tensor([0, 7, 8, 20])).last_hidden_state[0]
        alone = torch.cat([model(row[None]).last_hidden_state[0] for row in rows])
    assert torch.equal(packed, alone)


@torch.no_grad()
def test_several_tokens_after_a_cache():
    model, rows, more = optimised("ForCausalLM", torch.float32), texts([7, 1, 12]), torch.tensor([[5, 6, 7]])

    def continued(rows):
        batch, new = padded(rows, side="left"), more.repeat(len(rows), 1)
        mask = torch.cat([batch["attention_mask"], torch.ones_like(new)], dim=1)
        positions = (mask.cumsum(1) - 1).clamp(min=0).split([batch["input_ids"].shape[1], 3], dim=1)
        cache = model(**batch, position_ids=positions[0], use_cache=True).past_key_values
        return model(new, attention_mask=mask, position_ids=positions[1], past_key_values=cache).logits

    found, reference = continued(rows), random_scratchbert("ForCausalLM", **SPECIAL)
    assert torch.equal(found, torch.cat([continued([row]) for row in rows]))
    for own, row in zip(found, rows, strict=True):
        expected = reference(torch.cat([row, more[0]])[None]).logits[0, -3:]
        torch.testing.assert_close(own, expected, atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_a_static_cache_without_a_mask():
    """Its empty slots are hidden by the mask alone, which a kernel is not given if every token may be attended to."""
    model = optimised("ForCausalLM", torch.float32)
    reference, ids = random_scratchbert("ForCausalLM", **SPECIAL), torch.arange(5, 17).view(2, 6)
    for each in (model, reference):
        cache = StaticCache(each.config, max_cache_len=20)
        each(ids, past_key_values=cache, use_cache=True)
        found = each(ids[:, :1], past_key_values=cache, use_cache=True).logits
        torch.testing.assert_close(found, reference(torch.cat([ids, ids[:, :1]], 1)).logits[:, -1:], atol=1e-5, rtol=0)


@pytest.mark.parametrize("head", ["ForConditionalGeneration", "ForCausalLM"])
def test_generate_with_a_static_cache(head):
    model, rows = optimised(head, torch.float32), texts([7, 3, 12])
    batch = padded(rows, side="left" if head == "ForCausalLM" else "right")
    options = {"max_new_tokens": 8, "do_sample": False}
    expected = model.generate(**batch, **options)
    assert torch.equal(model.generate(**batch, **options, cache_implementation="static"), expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_one_row_of_more_numbers_than_onednn_adds_up_in_a_block(dtype):
    """BERT's feed-forward has 3,072 of them."""
    fields = {"hidden_size": 48, "intermediate_size": 1100, "num_hidden_layers": 1}
    check(optimised("Model", dtype, **fields), texts([1, 1, 2, 5]), [2, 0, 3, 1], [4, 1], 7, 2)


def test_copies_keep_it():
    model, rows = optimised("ForConditionalGeneration", torch.float32), texts([3, 12, 1])
    expected = outputs(model, rows)
    for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert all(map(same, outputs(again, rows), expected))
        assert all(map(same, (outputs(again, [row])[0] for row in rows), expected))


@pytest.mark.parametrize("activation", ["gelu_pytorch_tanh", "silu", "mish"])
def test_a_model_with_an_activation_that_depends_on_the_batch_is_not_optimised(caplog, activation, monkeypatch):
    monkeypatch.setattr(optimization, "find_library", lambda: None)
    optimization.logger.warning_once.cache_clear()
    model = random_scratchbert("Model", hidden_act=activation).optimize_for_inference()
    assert activation in caplog.text
    assert not any(map(is_prepacked, model.modules()))


OF_THE_LIBRARY = ["gelu_pytorch_tanh", "silu"] if find_library() else []


@pytest.mark.parametrize("activation", ["gelu", "gelu_new", "gelu_fast", "relu", "tanh", *OF_THE_LIBRARY])
def test_activations_that_do_not(caplog, activation):
    optimization.logger.warning_once.cache_clear()
    for dtype in DTYPES[:: 2 if find_library() else 3]:
        model = optimised("ForMaskedLM", dtype, hidden_act=activation, **SIZES[1])
        check(model, texts([1, 3, 9, 30, 38, 5]), [4, 2, 0, 5, 3, 1], [4, 2], 40, 3)
    assert "hidden_act" not in caplog.text


@pytest.mark.parametrize(("width", "height"), [(768, 768), (1000, 48), (1500, 96)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", [TorchMatrix, *([Matrix] if find_library() else [])])
def test_a_row_of_a_product_has_the_same_bits_with_any_others(kind, dtype, width, height):
    weight, rows, equal = torch.randn(height, width).to(dtype), torch.randn(120, width).to(dtype), []
    multiply = product([weight], [None], dtype, kind=kind)
    alone = torch.cat([multiply(row) for row in rows.split(1)])
    for number in (1, 2, 3):
        with threads(number):
            equal += [torch.equal(multiply(rows[:count]), alone[:count]) for count in (2, 16, 33, 64, 120)]
    assert equal == [True] * 15


@pytest.mark.skipif(not find_library(), reason="the library in C++ is not in use")
def test_the_factors_of_int8_are_the_same_with_any_number_of_threads():
    factors = []
    for number in (1, 3):
        with threads(number):
            model = random_scratchbert("Model", hidden_size=64, intermediate_size=1100)
            model.optimize_for_inference("int8")
            factors.append(model.encoder.blocks[1].intermediate.factors)
            assert torch.get_num_threads() == number
    assert torch.equal(*factors)
