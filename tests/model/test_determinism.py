"""After `optimize_for_inference`, a text has the same bits in any batch, with any number of threads."""

from contextlib import contextmanager
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from transformers import StaticCache

from support.models import BERTS, ENCODER_DECODERS, SPECIAL, random_scratchbert
from support.prepacked import HAS_LIBRARY

DTYPES = (torch.float32, torch.bfloat16, "int8")
# Widths of heads that are, and are not, a multiple of 16, and one head: MKL's products depend on where misaligned
# numbers are, and on the number of threads if there is nothing else to divide among them. The last has more numbers in
# a row, as BERT's feed-forward has, than oneDNN adds up in a block.
SIZES = (
    {"hidden_size": 32, "num_attention_heads": 2},
    {"hidden_size": 30, "num_attention_heads": 3, "intermediate_size": 41},
    {"hidden_size": 16, "num_attention_heads": 1},
    {"hidden_size": 48, "intermediate_size": 1100, "num_hidden_layers": 1},
)
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


@contextmanager
def threads(number: int):
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def make(head: str, **fields):
    special = SPECIAL if head in ("ForCausalLM", *ENCODER_DECODERS) else {}
    return random_scratchbert(head, max_position_embeddings=140, **special, **fields).eval()


def optimised(head: str, dtype=torch.float32, **fields):
    if dtype == "int8" and not HAS_LIBRARY:
        pytest.skip("the library in C++ is not in use")
    return make(head, **fields).optimize_for_inference(dtype)


@cache
def model_of(head: str, dtype, size: int):
    return optimised(head, dtype, **SIZES[size])


def texts(lengths) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
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


@dtypes
@settings(max_examples=15)
@given(
    lengths=st.lists(st.integers(1, 130), min_size=2, max_size=20),
    sizes=st.lists(st.integers(1, 12), min_size=1, max_size=4),
    extra=st.integers(0, 2),
    number=st.integers(1, 5),
    size=st.integers(0, 3),
    data=st.data(),
)
def test_text_has_the_same_bits_in_any_batch(dtype, lengths, sizes, extra, number, size, data):
    order = data.draw(st.permutations(range(len(lengths))))
    check(model_of("Model", dtype, size), texts(lengths), list(order), sizes, max(lengths) + extra, number)


@dtypes
@pytest.mark.parametrize("head", [*BERTS, *ENCODER_DECODERS])
def test_every_head(head, dtype):
    rows = texts([1, 2, 3, 4, 5, 8, 9, 17, 17, 31, 38, 1])
    for size in range(4):
        check(model_of(head, dtype, size), rows, [7, 3, 0, 11, 5, 10, 1, 8, 2, 9, 4, 6], [7, 1, 4], 40, 3)


ACTIVATIONS = ["gelu_new", "gelu_fast", "relu", "tanh", *(["gelu_pytorch_tanh", "silu"] if HAS_LIBRARY else [])]


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations(activation):
    model = optimised("ForMaskedLM", hidden_act=activation, **SIZES[1])
    check(model, texts([1, 3, 9, 30, 38, 5]), [4, 2, 0, 5, 3, 1], [4, 2], 40, 3)


@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("head", ["ForConditionalGeneration", "ForCausalLM"])
@settings(max_examples=10)
@given(
    lengths=st.lists(st.integers(1, 30), min_size=2, max_size=8),
    dtype=st.sampled_from(DTYPES),
    size=st.integers(0, 3),
    number=st.integers(1, 4),
)
def test_row_of_a_batch_generates_what_it_does_alone(head, beams, lengths, dtype, size, number):
    model, rows = model_of(head, dtype, size), texts(lengths)
    side = "left" if head == "ForCausalLM" else "right"
    options = {"max_new_tokens": 8, "do_sample": False, "num_beams": beams, "output_scores": True}

    def generate(rows, number):
        batch = padded(rows, side=side)
        with threads(number):
            found = model.generate(**batch, **options, return_dict_in_generate=True)
        prompt = batch["input_ids"].shape[1] if head == "ForCausalLM" else 1
        return found.sequences[:, prompt:], found.scores if beams == 1 else [found.sequences_scores]

    ids, scores = generate(rows, number)
    for i, row in enumerate(rows):
        own_ids, own_scores = generate([row], 1)
        length = own_ids.shape[1]
        assert torch.equal(ids[i, :length], own_ids[0])
        # Padding, because others are longer. Beam search pads with the end where the id of padding is 0.
        assert ids[i, length:].eq(3 if beams > 1 else 0).all()
        assert all(torch.equal(all_rows[i], own[0]) for all_rows, own in zip(scores, own_scores, strict=False))


@torch.no_grad()
def test_rows_of_a_decoder_with_gaps_and_without_tokens():
    """Keys may be hidden between others, and a row may have none."""
    model, reference, rows = optimised("ForCausalLM"), make("ForCausalLM"), texts([9, 9, 9, 5])
    batch = padded(rows, 12)
    batch["attention_mask"][1, [2, 3, 6]] = 0
    batch["attention_mask"][2] = 0
    found = model(**batch).logits
    torch.testing.assert_close(found, reference(**batch).logits, atol=1e-5, rtol=1e-5)
    for i in (0, 1, 3):
        alone = model(**{name: each[i : i + 1, : len(rows[i])] for name, each in batch.items()}).logits
        seen = batch["attention_mask"][i].bool()
        assert torch.equal(found[i, seen], alone[0, seen[: len(rows[i])]])


@torch.no_grad()
@dtypes
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


@torch.no_grad()
def test_packed_sequences():
    model, rows = optimised("Model"), texts([7, 1, 12])
    packed = model(torch.cat(rows)[None], cu_seq_lens_q=torch.tensor([0, 7, 8, 20])).last_hidden_state[0]
    assert torch.equal(packed, torch.cat([model(row[None]).last_hidden_state[0] for row in rows]))


@torch.no_grad()
def test_several_tokens_after_a_cache():
    model, rows, more = optimised("ForCausalLM"), texts([7, 1, 12]), torch.tensor([[5, 6, 7]])

    def continued(rows):
        batch, new = padded(rows, side="left"), more.repeat(len(rows), 1)
        mask = torch.cat([batch["attention_mask"], torch.ones_like(new)], dim=1)
        positions = (mask.cumsum(1) - 1).clamp(min=0).split([batch["input_ids"].shape[1], 3], dim=1)
        cache = model(**batch, position_ids=positions[0], use_cache=True).past_key_values
        return model(new, attention_mask=mask, position_ids=positions[1], past_key_values=cache).logits

    found, reference = continued(rows), make("ForCausalLM")
    assert torch.equal(found, torch.cat([continued([row]) for row in rows]))
    for own, row in zip(found, rows, strict=True):
        expected = reference(torch.cat([row, more[0]])[None]).logits[0, -3:]
        torch.testing.assert_close(own, expected, atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_static_cache_without_a_mask():
    """Its empty slots are hidden by the mask alone, which a kernel is not given if every token may be attended to."""
    model, reference, ids = optimised("ForCausalLM"), make("ForCausalLM"), torch.arange(5, 17).view(2, 6)
    cache = StaticCache(model.config, max_cache_len=20)
    model(ids, past_key_values=cache, use_cache=True)
    found = model(ids[:, :1], past_key_values=cache, use_cache=True).logits
    torch.testing.assert_close(found, reference(torch.cat([ids, ids[:, :1]], 1)).logits[:, -1:], atol=1e-5, rtol=0)


@pytest.mark.parametrize("head", ["ForConditionalGeneration", "ForCausalLM"])
def test_generate_with_a_static_cache(head):
    model = optimised(head)
    batch = padded(texts([7, 3, 12]), side="left" if head == "ForCausalLM" else "right")
    options = {"max_new_tokens": 8, "do_sample": False}
    expected = model.generate(**batch, **options)
    assert torch.equal(model.generate(**batch, **options, cache_implementation="static"), expected)


def test_factors_of_int8_are_the_same_with_any_number_of_threads(tmp_path):
    for number in (1, 3):
        with threads(number):
            optimised("Model", "int8", **SIZES[3]).save_calibration(tmp_path / str(number))
            assert torch.get_num_threads() == number
    one, other = (load_file(tmp_path / str(number)) for number in (1, 3))
    assert all(torch.equal(one[name], other[name]) for name in one)
