"""Unpadding: the numbers of the padded pass, which are those of `BertModel` (`test_parity`), and when a batch stays
padded."""

import contextlib

import pytest
import torch
import transformers
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from modeling_scratchbert import ScratchBertModel, unpadding
from modeling_scratchbert.modeling_scratchbert import LanguageModelHead
from modeling_scratchbert.transformer import TransformerBlock
from support.comparison import assert_same_gradients, assert_same_tensors, flat
from support.models import HEADS, NEEDS, OURS, VOCABULARY, inputs_for
from support.unpadded import LENGTHS, draw, flattened, make, observed_shapes


@pytest.fixture
def shapes_seen():
    """Records the shapes that a model's first block is given."""
    with contextlib.ExitStack() as stack:
        yield lambda model: stack.enter_context(
            observed_shapes(TransformerBlock.forward, model.base_model.encoder.blocks[0])
        )


def starts_of(lengths) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


# ---------------------------------------------------------------------------------------------------------------------
# Padded batches


@pytest.mark.parametrize("kind", ["right", "left", "scattered"])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_blocks_compute_non_padding_tokens_alone(kind, attention, tmp_path, shapes_seen):
    ours = make(ScratchBertModel, False, attention=attention)
    ours.save_as_bert(tmp_path)
    reference = transformers.BertModel.from_pretrained(tmp_path, add_pooling_layer=False)
    batch = draw(kind) | {"token_type_ids": torch.randint(0, 2, (5, 9))}
    if kind == "scattered":
        batch["position_ids"] = torch.randint(0, 30, (1, 9))
        batch["attention_mask"][2] = 0
    if kind == "left":
        batch["inputs_embeds"] = ours.get_input_embeddings()(batch.pop("input_ids")).detach()
    real, seen = batch["attention_mask"].bool(), shapes_seen(ours)
    with torch.no_grad():
        states, expected = ours(**batch).last_hidden_state, reference(**batch).last_hidden_state
    assert seen == [(1, real.sum(), 32)]
    assert_same_tensors({"states": states}, {"states": expected}, real)
    assert not states[~real].any()


@pytest.mark.parametrize("has_labels", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("head", HEADS)
def test_every_head(head, has_labels, shapes_seen):
    ours = make(OURS[head])
    batch = inputs_for(head, labels=has_labels)
    real = batch["attention_mask"].flatten(0, -2).bool()
    if "labels" in batch and batch["labels"].shape == real.shape:
        batch["labels"] = batch["labels"].masked_fill(~real, -100)
    seen = shapes_seen(ours)
    results = []
    for options in ({}, {"padding_free": False}):
        ours.zero_grad()
        outputs = ours(**batch, **options)
        if "loss" in outputs:
            outputs.loss.backward()
        results.append((flat(outputs), {name: parameter.grad for name, parameter in ours.named_parameters()}))
    (outputs, gradients), (padded, padded_gradients) = results
    assert_same_tensors(outputs, padded, real)
    if "loss" in outputs:
        assert_same_gradients(gradients, padded_gradients)
    # The loss of question answering is over padding as well.
    tokens = real.shape if head == "ForQuestionAnswering" and has_labels else (1, real.sum())
    assert seen == [(*tokens, 32), (*real.shape, 32)]


ONES = torch.ones(5, 9, dtype=torch.long)
# A head, the fields of its configuration, and what differs in the call from a batch with padding on the right.
PADDED = {
    "the pooler reads padding": ("Model", {}, draw("left")),
    "no mask": ("Model", {}, {"attention_mask": None}),
    "no padding": ("Model", {}, {"attention_mask": ONES}),
    "no tokens": ("Model", {}, {"attention_mask": 0 * ONES}),
    "full mask": ("Model", {}, {"attention_mask": torch.ones(5, 1, 9, 9).bool()}),
    "hidden states": ("ForMaskedLM", {}, {"output_hidden_states": True}),
    "attention maps": ("ForMaskedLM", {}, {"output_attentions": True}),
    "hidden states by the configuration": ("Model", {"output_hidden_states": True}, {}),
    "attention maps by the configuration": ("Model", {"output_attentions": True}, {}),
    "chunks": ("Model", {"chunk_size_feed_forward": 3}, {}),
    "words at padding": ("ForMaskedLM", {}, {"labels": ONES}),
    "words at padding in pre-training": ("ForPreTraining", {}, {"labels": ONES}),
    "labels at padding": ("ForTokenClassification", {}, {"labels": ONES}),
    # The logits of a token predict the label of the next.
    "next words": ("ForCausalLM", {"is_decoder": False}, {"labels": ONES.where(draw()["attention_mask"] == 1, -100)}),
}


@pytest.mark.parametrize(("head", "fields", "changes"), PADDED.values(), ids=PADDED)
def test_batch_stays_padded(head, fields, changes, shapes_seen):
    ours = make(OURS[head], **fields)
    seen = shapes_seen(ours)
    ours(**draw() | changes)
    assert seen == [(5, 9, 32)]


@pytest.mark.parametrize("head", ["ForMaskedLM", "ForPreTraining"])
def test_vocabulary_is_scored_for_non_padding_tokens(head):
    ours, batch = make(OURS[head]), draw()
    real = batch["attention_mask"].bool()
    with torch.no_grad(), observed_shapes(LanguageModelHead.forward) as shapes:
        scores = next(iter(ours(**batch).values()))
    assert shapes == [(real.sum(), 32)]
    assert not scores[~real].any()


@pytest.mark.parametrize("head", ["ForMaskedLM", "ForPreTraining"])
def test_sparse_prediction(head):
    dense, sparse = make(OURS[head]), make(OURS[head], sparse_prediction=True)
    batch = inputs_for(head, labels=True)
    batch["labels"].masked_fill_(batch["attention_mask"] == 0, -100)
    expected, outputs = dense(**batch), sparse(**batch)
    assert_same_tensors({"loss": outputs.loss}, {"loss": expected.loss})
    field = "logits" if head == "ForMaskedLM" else "prediction_logits"
    labelled = batch.pop("labels") != -100
    assert_same_tensors({"logits": outputs[field]}, {"logits": expected[field][labelled]})
    assert_same_tensors({"logits": sparse(**batch)[field]}, {"logits": expected[field]})


@pytest.mark.parametrize("head", ["ForMaskedLM", "ForTokenClassification", "ForPreTraining", "ForCausalLM"])
def test_loss_over_padding(head, pair):
    ours, reference = pair(head, padding_free=True, num_labels=3)
    batch = draw()
    batch["labels"] = torch.randint(0, 3, batch["input_ids"].shape)
    if head == "ForPreTraining":
        batch["next_sentence_label"] = torch.randint(0, 2, (5,))
    shapes = ((5, 9),) if head == "ForCausalLM" else ((5, 9), (45,))
    for shape in shapes:
        batch["labels"] = batch["labels"].view(shape)
        assert_same_tensors({"loss": ours(**batch).loss}, {"loss": reference(**batch).loss})
    with pytest.raises((ValueError, RuntimeError)):
        ours(**{**batch, "labels": batch["labels"].repeat(2)})


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing(reentrant, shapes_seen):
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


def test_sequences_of_one_length_share_a_kernel_call(monkeypatch):
    calls = []

    def count(query, *args, **kwargs):
        calls.append(len(query))
        return scaled_dot_product_attention(query, *args, **kwargs)

    monkeypatch.setattr(nn.functional, "scaled_dot_product_attention", count)
    ours = make(num_hidden_layers=1)
    batch = {"input_ids": torch.ones(256, 9).long()}
    batch["attention_mask"] = (torch.arange(9) < torch.randint(5, 9, (256, 1))).long()
    for inputs in (batch, flattened(batch)):
        calls.clear()
        ours(**inputs)
        assert (len(calls), sum(calls)) == (4, 256)


@pytest.mark.parametrize("head", ["ForSequenceClassification", "ForCausalLM", "ForConditionalGeneration"])
def test_row_without_a_token_is_the_same_in_eager_and_sdpa(head):
    batch = inputs_for(head)
    batch["attention_mask"][1] = 0
    eager, sdpa = (make(OURS[head], attention=attention, **NEEDS.get(head, {})) for attention in ("eager", "sdpa"))
    expected = flat(eager(**batch, padding_free=False, use_cache=False))
    assert_same_tensors(flat(sdpa(**batch, padding_free=False, use_cache=False)), expected)
    if head == "ForSequenceClassification":
        assert_same_tensors(flat(sdpa(**batch)), expected)


def test_vmap_over_labels(pair):
    batch, labels = draw(), torch.randint(0, 3, (4, 5, 9))
    losses = []
    for model in pair("ForTokenClassification", padding_free=True, num_labels=3):
        losses.append(torch.func.vmap(lambda each, model=model: model(**batch, labels=each).loss)(labels))
    assert_same_tensors({"": losses[0]}, {"": losses[1]})


@pytest.mark.parametrize("kind", ["padded", "packed", "optimised"])
def test_index_tensors_are_on_the_device_of_the_inputs(kind):
    ours, batch = make(), draw()
    if kind == "optimised":
        ours.optimize_for_inference()
    inputs = flattened(batch) if kind == "packed" else batch
    with torch.no_grad():
        expected = ours(**inputs)
        torch.set_default_device("meta")
        try:
            outputs = ours(**inputs)
        finally:
            torch.set_default_device(None)
    assert_same_tensors(dict(outputs), dict(expected))


# ---------------------------------------------------------------------------------------------------------------------
# Packed sequences


@pytest.mark.parametrize("kind", ["all", "starts", "int64", "position_ids", "maps", "states", "padded", "embeddings"])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_packed_sequences(kind, attention):
    ours, batch = make(attention=attention), draw()
    expected = ours(**batch, output_hidden_states=True)
    packed = flattened(batch, return_flash_attn_kwargs=kind != "position_ids")
    if kind == "starts":
        packed = {name: packed[name] for name in ("input_ids", "cu_seq_lens_q")}
    elif kind == "int64":
        packed["cu_seq_lens_q"] = packed["cu_seq_lens_q"].long()
    elif kind == "embeddings":
        packed["inputs_embeds"] = ours.get_input_embeddings()(packed.pop("input_ids"))
    options = {
        "maps": {"output_attentions": True},
        "states": {"output_hidden_states": True},
        "padded": {"padding_free": False},
    }
    outputs = ours(**packed, **options.get(kind, {}))
    real = batch["attention_mask"].bool()
    assert_same_tensors({"": outputs.last_hidden_state}, {"": expected.last_hidden_state[real][None]})
    assert_same_tensors({"": outputs.pooler_output}, {"": expected.pooler_output})
    for states, expected_states in zip(outputs.hidden_states or (), expected.hidden_states, strict=kind == "states"):
        assert_same_tensors({"": states}, {"": expected_states[real][None]})


POSITIONS = {"arbitrary": [3, 0, 7, 1, 0, 2], "zeros": [0, 0], "one zero": [0], "restarting": [0, 1, 0]}


@pytest.mark.parametrize("positions", POSITIONS.values(), ids=POSITIONS)
def test_positions_of_one_sequence(positions, pair):
    """Positions that restart mark packed sequences unless there is a mask."""
    ours, reference = pair(padding_free=True)
    batch = {"input_ids": torch.randint(1, VOCABULARY, (1, len(positions))), "position_ids": torch.tensor([positions])}
    expected = flat(reference(**batch))
    if positions != POSITIONS["restarting"]:
        assert_same_tensors(flat(ours(**batch)), expected)
    batch["attention_mask"] = torch.ones_like(batch["input_ids"])
    assert_same_tensors(flat(ours(**batch)), expected)


def test_row_of_packed_sequences_may_be_longer_than_the_table_of_positions():
    ours, lengths = make(), [30, 25, 40]
    rows = [torch.randint(1, VOCABULARY, (1, length)) for length in lengths]
    outputs = ours(torch.cat(rows, 1), cu_seq_lens_q=starts_of(lengths)).last_hidden_state
    expected = torch.cat([ours(row).last_hidden_state for row in rows], 1)
    assert_same_tensors({"": outputs}, {"": expected})
    with pytest.raises(ValueError, match="cu_seq_lens_q"):
        ours(torch.cat(rows, 1), cu_seq_lens_q=starts_of([55, 40]))


INVALID = {
    "mask": {"attention_mask": torch.ones(1, 6)},
    "end": {"cu_seq_lens_q": torch.tensor([0, 2, 5])},
    "start": {"cu_seq_lens_q": torch.tensor([1, 6])},
    "falls": {"cu_seq_lens_q": torch.tensor([0, 4, 2, 6])},
    "list": {"cu_seq_lens_q": [0, 6]},
    "floats": {"cu_seq_lens_q": torch.tensor([0.0, 6.0])},
    "two dimensions": {"cu_seq_lens_q": torch.tensor([[0, 6]])},
}


@pytest.mark.parametrize("changes", INVALID.values(), ids=INVALID)
def test_invalid_packed_sequences(changes):
    inputs = {"input_ids": torch.ones(1, 6).long(), "cu_seq_lens_q": torch.tensor([0, 2, 6]).int()}
    with pytest.raises(ValueError, match="cu_seq_lens_q"):
        make()(**inputs | changes)


def test_packed_sequences_in_two_rows():
    with pytest.raises(ValueError, match=r"cu_seq_lens_q .* 2 rows"):
        make()(torch.ones(2, 3).long(), cu_seq_lens_q=torch.tensor([0, 2, 6]).int())


@pytest.mark.parametrize("lengths", [LENGTHS, [0, 9, 0, 5, 0], [3], [20, 1], [0, 20]])
def test_large_batches_are_computed_in_parts(lengths, monkeypatch, shapes_seen):
    ours = make()
    batch = {"input_ids": torch.randint(1, VOCABULARY, (1, sum(lengths))), "cu_seq_lens_q": starts_of(lengths)}
    whole = (1, sum(lengths), 32)
    seen = shapes_seen(ours)
    with torch.no_grad():
        expected = flat(ours(**batch))
        monkeypatch.setattr(unpadding, "MAX_TENSOR_BYTES", 10 * 4 * ours.config.intermediate_size)
        assert_same_tensors(flat(ours(**batch)), expected)
        tokens = [shape[1] for shape in seen[1:]]
        ours(**batch, output_hidden_states=True)  # stays whole
    ours(**batch)  # autograd keeps all of it anyway
    assert [seen[0], *seen[-2:]] == [whole] * 3
    assert sum(tokens) == sum(lengths)
    assert all(0 < number <= max(10, *lengths) for number in tokens)
    assert (len(tokens) > 1) == (lengths not in ([3], [0, 20]))


def test_flash_attention_receives_the_lengths(monkeypatch):
    """In the place of the kernel, one call of sdpa for each sequence."""

    def flash(module, query, key, value, mask, *, cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k, **kwargs):
        lengths = cu_seq_lens_q.diff().tolist()
        assert mask is None
        assert torch.equal(cu_seq_lens_q, cu_seq_lens_k)
        assert cu_seq_lens_q.dtype == torch.int32
        assert max_length_q == max_length_k == max(lengths)
        sequences = zip(*(heads.split(lengths, dim=2) for heads in (query, key, value)), strict=True)
        return torch.cat([scaled_dot_product_attention(*each) for each in sequences], dim=2).transpose(1, 2), None

    ours, batch = make(), draw()
    expected = ours(**batch).last_hidden_state
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "flash_attention_2", flash)
    monkeypatch.setattr(unpadding, "flash_attention_forward", flash)
    ours.config._attn_implementation = "flash_attention_2"
    assert_same_tensors({"": ours(**batch).last_hidden_state}, {"": expected})
