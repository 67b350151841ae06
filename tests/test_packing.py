"""Padding removed and put back: the numbers of the padded pass, whose own are the twin's (`test_parity`)."""

import copy
import importlib
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from transformers import DataCollatorWithFlattening
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import modeling_scratchbert
from comparison import assert_same_gradients, assert_same_tensors, flat
from heads import HEADS, OURS, VOCABULARY, inputs_for
from modeling_scratchbert import ScratchBertModel, ScratchBertPreTrainedModel, packing
from modeling_scratchbert.feed_forward import FeedForward
from modeling_scratchbert.packing import by_length, packed_attention

DROPLESS = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
LENGTHS = [4, 9, 1, 4, 6]


@pytest.fixture
def make(tiny_config, randomise):
    """Makes a model of large random weights, for inference."""

    def make(cls=ScratchBertModel, *args, attention="sdpa", **fields):
        fields = {"attn_implementation": attention, **DROPLESS, **fields}
        return randomise(cls(tiny_config(**fields), *args)).eval()

    return make


def draw(kind="right", batch=5, width=9) -> dict:
    """A batch and its mask."""
    mask = torch.arange(width) < torch.tensor(LENGTHS[:batch])[:, None]
    if kind == "left":
        mask = mask.flip(1)
    elif kind == "scattered":
        mask = torch.rand(batch, width) < 0.5
        mask[:, 0] = True
    return {"input_ids": torch.randint(1, VOCABULARY, (batch, width)), "attention_mask": mask.long()}


def flattened(batch: dict, **options) -> dict:
    """The same sequences as transformers' padding-free collator packs them."""
    rows = [ids[mask.bool()].tolist() for ids, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True)]
    packed = DataCollatorWithFlattening(return_tensors="pt", **options)([{"input_ids": row} for row in rows])
    packed.pop("labels")
    return packed


def shapes_seen(model: ScratchBertPreTrainedModel) -> list[tuple]:
    """The shapes of what the first block is given from now on."""
    seen = []
    block = model.base_model.encoder.blocks[0]
    block.register_forward_pre_hook(lambda _, args: seen.append(tuple(args[0].shape)))
    return seen


# ---------------------------------------------------------------------------------------------------------------------
# Padded batches


@pytest.mark.parametrize("kind", ["right", "left", "scattered"])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_the_blocks_see_the_real_tokens_alone(kind, attention, make, tmp_path):
    ours = make(ScratchBertModel, False, attention=attention)
    ours.save_as_bert(tmp_path)
    twin = transformers.BertModel.from_pretrained(tmp_path, add_pooling_layer=False)
    batch = draw(kind)
    real, seen = batch["attention_mask"].bool(), shapes_seen(ours)
    with torch.no_grad():
        states, expected = ours(**batch).last_hidden_state, twin(**batch).last_hidden_state
    assert seen == [(1, real.sum(), 32)]
    assert_same_tensors({"states": states}, {"states": expected}, real)
    assert not states[~real].any()


def test_padding_before_the_first_token_is_what_the_pooler_reads(make):
    ours, batch = make(), draw("left")
    outputs, padded = ours(**batch), ours(**batch, padding_free=False)
    real = batch["attention_mask"].bool()
    assert_same_tensors(flat(outputs), flat(padded), real)
    assert not outputs.last_hidden_state[~real].any()
    assert padded.last_hidden_state[~real].any()


@settings(deadline=None, max_examples=40)
@given(st.lists(st.lists(st.booleans(), min_size=5, max_size=5), min_size=1, max_size=6), st.booleans())
def test_any_mask(tiny_config, randomise, rows, position_ids):
    ours = randomise(ScratchBertModel(tiny_config(**DROPLESS), add_pooling_layer=False)).eval()
    mask = torch.tensor(rows)
    mask[0, 3] = True  # some token there is
    batch = {"input_ids": torch.randint(1, VOCABULARY, mask.shape), "attention_mask": mask.long()}
    batch["token_type_ids"] = torch.randint(0, 2, mask.shape)
    if position_ids:
        batch["position_ids"] = torch.randint(0, 30, (1, 5))
    with torch.no_grad():
        outputs, padded = ours(**batch), ours(**batch, padding_free=False)
    assert_same_tensors(flat(outputs), flat(padded), mask)


@pytest.mark.parametrize("labels", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("head", HEADS)
def test_every_head(head, labels, make):
    ours = make(OURS[head])
    batch = inputs_for(head, labels=labels)
    real = batch["attention_mask"].flatten(0, -2).bool()
    if "labels" in batch and batch["labels"].shape == real.shape:
        batch["labels"] = batch["labels"].masked_fill(~real, -100)
    seen = shapes_seen(ours)

    def run(**options):
        ours.zero_grad()
        outputs = ours(**batch, **options)
        if labels and head != "Model":
            outputs.loss.backward()
            return flat(outputs), {name: parameter.grad for name, parameter in ours.named_parameters()}
        return flat(outputs), {}

    (outputs, gradients), (padded, padded_gradients) = run(), run(padding_free=False)
    assert_same_tensors(outputs, padded, real)
    if gradients:
        assert_same_gradients(gradients, padded_gradients)
    # The loss of question answering is over padding as well.
    tokens = real.shape if head == "ForQuestionAnswering" and labels else (1, real.sum())
    assert seen == [(*tokens, 32), (*real.shape, 32)]


@pytest.mark.parametrize("head", HEADS)
def test_chunks_compute_the_padding_and_say_zeros_there(head, make):
    whole, chunked = make(OURS[head]), make(OURS[head], chunk_size_feed_forward=7)
    batch, seen = inputs_for(head), shapes_seen(chunked)
    real = batch["attention_mask"].flatten(0, -2).bool()
    outputs = flat(chunked(**batch))
    assert_same_tensors(outputs, flat(whole(**batch)), real)
    assert seen == [(*real.shape, 32)]
    for value in outputs.values():
        assert value.shape[:2] != real.shape or not value[~real].any()


@pytest.mark.parametrize("head", ["ForMaskedLM", "ForPreTraining"])
def test_scores_of_the_vocabulary_are_in_memory_once(head, make):
    ours, batch = make(OURS[head]), draw()
    shapes = []
    ours.lm_head.register_forward_hook(lambda _, args, output: shapes.append(tuple(output.shape)))
    batch = {name: tensor.repeat(30, 1) for name, tensor in batch.items()}
    real = batch["attention_mask"].bool()
    with torch.no_grad():
        outputs, padded = ours(**batch), ours(**batch, padding_free=False)
    assert_same_tensors(flat(outputs), flat(padded), real)
    assert shapes == [(1, 256, 101)] * 2 + [(1, real.sum() - 512, 101), (150, 9, 101)]
    scores = next(iter(outputs.values()))
    assert not scores[~real].any()


@pytest.mark.parametrize("head", ["ForMaskedLM", "ForTokenClassification", "ForPreTraining"])
def test_labels_on_padding_count_as_in_bert(head, make):
    ours, batch = make(OURS[head]), inputs_for(head, labels=True)
    batch["labels"] = torch.randint(0, 2, batch["input_ids"].shape)
    seen = shapes_seen(ours)
    assert torch.equal(ours(**batch).loss, ours(**batch, padding_free=False).loss)
    assert set(seen) == {(3, 7, 32)}


@pytest.mark.parametrize("head", ["ForMaskedLM", "ForPreTraining"])
def test_sparse_prediction(head, make):
    dense = make(OURS[head])
    sparse = make(OURS[head], sparse_prediction=True)
    batch = inputs_for(head, labels=True)
    batch["labels"].masked_fill_(batch["attention_mask"] == 0, -100)
    expected, outputs = dense(**batch), sparse(**batch)
    assert_same_tensors({"loss": outputs.loss}, {"loss": expected.loss})
    field = "logits" if head == "ForMaskedLM" else "prediction_logits"
    labelled = batch["labels"] != -100
    assert_same_tensors({"logits": outputs[field]}, {"logits": expected[field][labelled]})
    assert_same_tensors({"logits": sparse(**batch, padding_free=False)[field]}, {"logits": outputs[field]})
    batch.pop("labels")
    assert outputs[field].ndim == 2
    assert sparse(**batch)[field].shape == expected[field].shape


REASONS = {
    "hidden states": {"output_hidden_states": True},
    "attention maps": {"output_attentions": True},
    "asked for": {"padding_free": False},
}


@pytest.mark.parametrize("options", REASONS.values(), ids=REASONS)
@pytest.mark.parametrize("head", ["Model", "ForMaskedLM", "ForSequenceClassification"])
def test_padding_stays_where_it_is_wanted(head, options, make):
    ours, batch = make(OURS[head]), inputs_for(head)
    seen = shapes_seen(ours)
    outputs = ours(**batch, **options)
    assert seen == [(3, 7, 32)]
    for states in outputs.hidden_states or ():
        assert states.shape == (3, 7, 32)
    assert "padding_free" not in outputs


@pytest.mark.parametrize("field", ["padding_free", "output_hidden_states", "output_attentions"])
def test_the_configuration_may_ask_for_padding_too(field, make):
    ours = make(**({field: False} if field == "padding_free" else {"attention": "eager", field: True}))
    seen = shapes_seen(ours)
    ours(**draw())
    assert seen == [(5, 9, 32)]


def test_a_full_mask_or_none(make):
    ours, batch = make(), draw()
    batch["attention_mask"] = torch.ones(5, 9)
    seen = shapes_seen(ours)
    plain = ours(batch["input_ids"]).last_hidden_state
    batch["attention_mask"][0, 4:] = 1
    assert torch.equal(ours(**batch).last_hidden_state, plain)
    assert set(seen) == {(5, 9, 32)}
    batch["attention_mask"] = torch.zeros(5, 9)
    assert ours(**batch).last_hidden_state.shape == plain.shape
    full = torch.ones(5, 1, 9, 9, dtype=torch.bool)
    assert_same_tensors({"": ours(batch["input_ids"], full).last_hidden_state}, {"": plain})


class Mixing(FeedForward):
    """A researcher's: looks at the sequence's mean as well."""

    def forward(self, hidden_states):
        return super().forward(hidden_states + hidden_states.mean(1, keepdim=True))


def test_another_ones_block_is_given_the_padding(make):
    ours, batch = make(), draw()
    ours.encoder.blocks[1].feed_forward = Mixing(ours.config)
    seen = shapes_seen(ours)
    assert torch.equal(ours(**batch).last_hidden_state, ours(**batch, padding_free=False).last_hidden_state)
    assert set(seen) == {(5, 9, 32)}


def test_a_kernel_of_another_ones_own_is_given_the_mask(make, monkeypatch):
    masks = []

    def attend(module, query, key, value, attention_mask, **kwargs):
        masks.append(attention_mask)
        return query.transpose(1, 2), None

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "of_a_test", attend)
    ours = make()
    ours.config._attn_implementation = "of_a_test"
    ours(**draw())
    assert len(masks) == 2


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing(reentrant, make):
    ours, batch = make(ScratchBertModel, False), draw()

    def gradients():
        ours.zero_grad()
        ours(**batch).last_hidden_state.square().sum().backward()
        return {name: parameter.grad for name, parameter in ours.train().named_parameters()}

    expected = gradients()
    ours.gradient_checkpointing_enable({"use_reentrant": reentrant})
    seen = shapes_seen(ours)
    assert_same_gradients(gradients(), expected)
    assert set(seen) == {(1, sum(LENGTHS), 32)}


def test_256_short_sequences_are_not_256_calls(make, monkeypatch):
    calls = []
    sdpa = ALL_ATTENTION_FUNCTIONS["sdpa"]
    monkeypatch.setitem(
        ALL_ATTENTION_FUNCTIONS._global_mapping,
        "sdpa",
        lambda module, query, *args, **kwargs: calls.append(query.shape) or sdpa(module, query, *args, **kwargs),
    )
    ours = make(num_hidden_layers=1)
    lengths = torch.randint(5, 9, (256, 1))
    ours(torch.ones(256, 9).long(), (torch.arange(9) < lengths).long())
    assert len(calls) == 4
    assert sum(shape[0] for shape in calls) == 256
    packed = flattened({"input_ids": torch.ones(256, 9).long(), "attention_mask": torch.arange(9) < lengths})
    ours(**packed)
    assert len(calls) == 8


@pytest.mark.parametrize("lengths", [LENGTHS, [0, 9, 0, 5, 0], [3], [20, 1], [0, 20]])
def test_much_at_once_goes_through_in_parts(lengths, make, monkeypatch):
    ours = make()
    cu_seqlens = packing.cumulative(torch.tensor(lengths))
    batch = {"input_ids": torch.randint(1, VOCABULARY, (1, sum(lengths))), "cu_seq_lens_q": cu_seqlens}
    with torch.no_grad():
        expected = flat(ours(**batch))
    seen = []
    block = ours.encoder.blocks[0]
    run = block.forward
    monkeypatch.setattr(
        block, "forward", lambda states, *args, **kwargs: seen.append(states.shape[1]) or run(states, *args, **kwargs)
    )
    monkeypatch.setattr(packing, "ALLOCATION", 10 * 4 * ours.config.intermediate_size)
    with torch.no_grad():
        assert_same_tensors(flat(ours(**batch)), expected)
    longest = max(10, *lengths)
    assert sum(seen) == sum(lengths)
    assert max(seen) <= longest
    assert all(seen)
    assert (len(seen) > 1) == (lengths not in ([3], [0, 20]))
    seen.clear()
    ours(**batch)  # autograd keeps all of it anyway
    block.register_forward_hook(lambda *_: None)  # and hooks see all of it
    with torch.no_grad():
        ours(**batch)
    assert seen == [sum(lengths)] * 2


def test_pickled_and_copied_models_still_pack(make):
    ours, batch = make(), draw()
    seen = shapes_seen(copied := copy.deepcopy(ours))
    assert torch.equal(copied(**batch).last_hidden_state, ours(**batch).last_hidden_state)
    assert seen == [(1, sum(LENGTHS), 32)]


# ---------------------------------------------------------------------------------------------------------------------
# Batches that come packed

FLASH = {"return_flash_attn_kwargs": True}


@pytest.mark.parametrize("given", ["both", "cu_seq_lens", "position_ids", "maps", "states", "unpacked", "embeddings"])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_packed_batches(given, attention, make):
    ours, batch = make(attention=attention), draw()
    expected = ours(**batch)
    packed = flattened(batch, return_flash_attn_kwargs=given != "position_ids")
    if given == "cu_seq_lens":
        packed = {name: packed[name] for name in ("input_ids", "cu_seq_lens_q")}
    elif given == "embeddings":
        packed["inputs_embeds"] = ours.get_input_embeddings()(packed.pop("input_ids"))
    options = {"maps": {"output_attentions": True}, "states": {"output_hidden_states": True}}.get(given, {})
    if given == "unpacked":
        options = {"padding_free": False}
    outputs = ours(**packed, **options)
    real = batch["attention_mask"].bool()
    assert_same_tensors({"": outputs.last_hidden_state}, {"": expected.last_hidden_state[real][None]})
    assert_same_tensors({"": outputs.pooler_output}, {"": expected.pooler_output})
    if given == "states":
        states = ours(**batch, output_hidden_states=True).hidden_states
        assert_same_tensors(
            dict(enumerate(outputs.hidden_states)), dict(enumerate(state[real][None] for state in states))
        )


def test_packed_labels(make):
    ours = make(OURS["ForTokenClassification"], num_labels=3)
    batch = draw()
    labels = torch.randint(0, 3, (5, 9)).masked_fill(batch["attention_mask"] == 0, -100)
    expected = ours(**batch, labels=labels)
    real = batch["attention_mask"].bool()
    outputs = ours(**flattened(batch, **FLASH), labels=labels[real][None])
    assert_same_tensors(flat(outputs), {"loss": expected.loss.detach(), "logits": expected.logits[real][None].detach()})
    classes = make(OURS["ForSequenceClassification"], num_labels=3)
    logits = classes(**flattened(batch, **FLASH)).logits
    assert_same_tensors({"": logits}, {"": classes(**batch).logits})


def test_one_sequence_is_not_packed(make):
    ours = make()
    ids, positions = torch.randint(1, VOCABULARY, (1, 6)), torch.tensor([[3, 0, 7, 1, 0, 2]])
    seen = shapes_seen(ours)
    plain = ours(ids, position_ids=positions).last_hidden_state
    full = ours(ids, position_ids=positions, attention_mask=torch.ones(1, 1, 6, 6).bool()).last_hidden_state
    assert_same_tensors({"": plain}, {"": full})
    assert ours(ids, position_ids=torch.arange(6)[None]).last_hidden_state.shape == (1, 6, 32)
    assert set(seen) == {(1, 6, 32)}


WRONG = {
    "mask": ({"attention_mask": torch.ones(1, 6)}, "attention_mask and cu_seq_lens_q were both given"),
    "end": ({"cu_seq_lens_q": torch.tensor([0, 2, 5])}, r"\[0, 2, 5\]; it wants .* end at the number of tokens, 6"),
    "start": ({"cu_seq_lens_q": torch.tensor([1, 6])}, "start at 0"),
    "falls": ({"cu_seq_lens_q": torch.tensor([0, 4, 2, 6])}, "never to fall"),
    "list": ({"cu_seq_lens_q": [0, 6]}, "cu_seq_lens_q is list; it wants whole numbers"),
    "floats": ({"cu_seq_lens_q": torch.tensor([0.0, 6.0])}, "it wants whole numbers"),
    "rows": ({"input_ids": torch.ones(2, 3).long()}, r"shape \(1, length\), and have \(2, 3\)"),
}


@pytest.mark.parametrize(("change", "message"), WRONG.values(), ids=WRONG)
def test_wrong_packings(change, message, make):
    given = {"input_ids": torch.ones(1, 6).long(), "cu_seq_lens_q": torch.tensor([0, 2, 6]).int()}
    with pytest.raises(ValueError, match=message):
        make()(**{**given, **change})


# ---------------------------------------------------------------------------------------------------------------------
# Kernels for packed sequences, in the place of which stands one sdpa a sequence


def one_by_one(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k):
    assert max_q == max_k == cu_seq_q.diff().max()
    assert torch.equal(cu_seq_q, cu_seq_k)
    assert cu_seq_q.dtype == torch.int32
    rows = [heads.split(cu_seq_q.diff().tolist()) for heads in (query, key, value)]
    contexts = [
        nn.functional.scaled_dot_product_attention(*(heads.transpose(0, 1) for heads in row)).transpose(0, 1)
        for row in zip(*rows, strict=True)
    ]
    return torch.cat(contexts)


def test_the_variable_length_kernel(make, monkeypatch):
    ours, batch = make(), draw()
    expected = ours(**batch).last_hidden_state
    calls = []
    monkeypatch.setattr(packing, "varlen_attn", lambda *args: calls.append(0) or one_by_one(*args))
    monkeypatch.setattr(packing, "takes_varlen", lambda query, dropout: not dropout)
    assert_same_tensors({"": ours(**batch).last_hidden_state}, {"": expected})
    packed = ours(**flattened(batch, **FLASH)).last_hidden_state
    assert_same_tensors({"": packed}, {"": expected[batch["attention_mask"].bool()][None]})
    assert len(calls) == 4


def test_flash_attention_is_given_the_lengths(make, monkeypatch):
    def flash(module, query, key, value, mask, *, cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k, **kwargs):
        assert mask is None
        heads = (each[0].transpose(0, 1) for each in (query, key, value))
        return one_by_one(*heads, cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k)[None], None

    ours, batch = make(), draw()
    expected = ours(**batch).last_hidden_state
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "flash_attention_2", flash)
    ours.config._attn_implementation = "flash_attention_2"
    assert_same_tensors({"": ours(**batch).last_hidden_state}, {"": expected})


def test_what_the_variable_length_kernel_takes():
    heads = torch.ones(3, 2, 8, dtype=torch.bfloat16)
    assert not packing.takes_varlen(heads, 0.0)  # on the CPU


def test_the_operator_for_compiled_models():
    lengths = [3, 1, 0, 3, 5]
    cu_seqlens = packing.cumulative(torch.tensor(lengths))
    query, key, value = (torch.randn(12, 2, 4, dtype=torch.float64, requires_grad=True) for _ in range(3))
    arguments = (query, key, value, cu_seqlens, 0.5)
    torch.library.opcheck(packed_attention, arguments)
    assert torch.autograd.gradcheck(lambda *heads: packed_attention(*heads, cu_seqlens, 0.5), arguments[:3])
    expected = one_by_one(query, key, value, cu_seqlens, cu_seqlens, 5, 5)
    assert torch.allclose(packed_attention(query, key, value, cu_seqlens, 4**-0.5), expected)


def test_by_length_calls_once_for_a_run():
    calls = []
    packed = torch.arange(9.0).view(9, 1, 1)
    result = by_length(
        lambda heads: calls.append(tuple(heads.shape)) or 2 * heads.transpose(1, 2), [2, 2, 0, 1, 4], packed
    )
    assert calls == [(2, 1, 2, 1), (1, 1, 1, 1), (1, 1, 4, 1)]
    assert torch.equal(result, 2 * packed)


# ---------------------------------------------------------------------------------------------------------------------
# Compiled


@pytest.fixture
def compiled():
    torch._dynamo.reset()
    yield lambda model: torch.compile(model, fullgraph=True, backend="aot_eager", dynamic=True)
    torch._dynamo.reset()


optimised = pytest.mark.parametrize("optimised", [False, True], ids=["plain", "optimised"])


@optimised
def test_compiled_with_a_mask(optimised, make, compiled):
    ours, graphs = make(), []
    ours = ours.optimize_for_inference() if optimised else ours
    run = compiled(ours)
    for width in (9, 7, 8):
        batch = {name: tensor[:, :width].clone() for name, tensor in draw().items()}
        real = batch["attention_mask"].bool()
        assert_same_tensors(flat(run(**batch)), flat(ours(**batch)), real)
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert graphs[0] == graphs[2]


@optimised
@pytest.mark.parametrize("given", ["lengths", "positions"])
def test_compiled_packed(given, optimised, make, compiled):
    ours, graphs = make(ScratchBertModel, False), []
    ours = ours.optimize_for_inference() if optimised else ours
    run = compiled(ours)
    for batch in (draw(), draw("scattered"), draw("scattered", batch=3)):
        packed = flattened(batch, return_flash_attn_kwargs=given == "lengths")
        expected = ours(**packed).last_hidden_state
        outputs = run(**packed).last_hidden_state
        assert_same_tensors({"": outputs}, {"": expected})
        if not optimised:
            gradients = (
                torch.autograd.grad(states.square().sum(), ours.get_input_embeddings().weight)[0]
                for states in (outputs, expected)
            )
            assert_same_gradients(*({"": gradient} for gradient in gradients))
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert graphs[1] == graphs[2]


@pytest.mark.parametrize("given", ["lengths", "positions"])
def test_compiled_packed_training_drops_attention(given, make, compiled):
    packed = flattened(draw(), return_flash_attn_kwargs=given == "lengths")
    for dropout, same in ((1e-9, True), (0.5, False)):
        ours = make(ScratchBertModel, False, attention_probs_dropout_prob=dropout)
        expected = ours(**packed).last_hidden_state
        torch._dynamo.reset()
        outputs = compiled(ours.train())(**packed).last_hidden_state
        assert torch.allclose(outputs, expected, atol=1e-5) == same


def test_compiled_much_at_once(make, compiled, monkeypatch):
    monkeypatch.setattr(packing, "ALLOCATION", 0)
    ours, packed = make(ScratchBertModel, False), flattened(draw(), **FLASH)
    with torch.no_grad():
        assert_same_tensors(flat(compiled(ours)(**packed)), flat(ours(**packed)))


def test_compiled_positions_that_do_not_count_sequences(make, compiled):
    ours = make(ScratchBertModel, False)
    batch = {"input_ids": torch.randint(1, VOCABULARY, (1, 6)), "position_ids": torch.tensor([[0, 1, 2, 0, 5, 6]])}
    assert_same_tensors(flat(compiled(ours)(**batch)), flat(ours(**batch)))
    assert_same_tensors(flat(ours(**batch)), flat(ours(**batch, attention_mask=torch.ones(1, 6))))


def test_a_second_copy_of_the_package_compiles_too(make, compiled, tmp_path, monkeypatch):
    """As remote code comes with a checkpoint, beside the package itself."""
    shutil.copytree(Path(packing.__file__).parent, tmp_path / "second_copy")
    monkeypatch.syspath_prepend(tmp_path)
    second = importlib.import_module("second_copy")
    importlib.reload(modeling_scratchbert)  # whose classes are again the ones that the Auto classes open
    first = make()
    other = second.ScratchBertModel(second.ScratchBertConfig(**first.config.to_diff_dict())).eval()
    other.load_state_dict(first.state_dict())
    packed = flattened(draw(), **FLASH)
    expected = first(**packed).last_hidden_state
    for model in (other, first):
        assert_same_tensors({"": compiled(model)(**packed).last_hidden_state}, {"": expected})
    assert transformers.AutoConfig.for_model("scratchbert").__class__ is modeling_scratchbert.ScratchBertConfig
