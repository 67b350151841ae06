"""Unpadding: the numbers of the padded pass, which are those of `BertModel` (`test_parity`), and when a batch stays
padded."""

import contextlib
import copy
import traceback
from pathlib import Path

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from modeling_scratchbert import ScratchBertModel, unpadding
from modeling_scratchbert.modeling_scratchbert import LanguageModelHead
from modeling_scratchbert.transformer import TransformerBlock
from support.comparison import assert_same_gradients, assert_same_tensors, flat
from support.models import HEADS, NEEDS, OURS, REFERENCES, VOCABULARY, inputs_for
from support.unpadded import FLASH, LENGTHS, draw, flattened, make, observed_shapes


@pytest.fixture
def shapes_seen():
    """Records the shapes that a model's first block is given."""
    with contextlib.ExitStack() as stack:
        yield lambda model: stack.enter_context(
            observed_shapes(TransformerBlock.forward, model.base_model.encoder.blocks[0])
        )


# ---------------------------------------------------------------------------------------------------------------------
# Padded batches


@pytest.mark.parametrize("kind", ["right", "left", "scattered"])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_the_blocks_see_the_real_tokens_alone(kind, attention, tmp_path, shapes_seen):
    ours = make(ScratchBertModel, False, attention=attention)
    ours.save_as_bert(tmp_path)
    reference = transformers.BertModel.from_pretrained(tmp_path, add_pooling_layer=False)
    batch = draw(kind)
    real, seen = batch["attention_mask"].bool(), shapes_seen(ours)
    with torch.no_grad():
        states, expected = ours(**batch).last_hidden_state, reference(**batch).last_hidden_state
    assert seen == [(1, real.sum(), 32)]
    assert_same_tensors({"states": states}, {"states": expected}, real)
    assert not states[~real].any()


def test_a_batch_stays_padded_if_the_pooler_reads_padding(shapes_seen):
    ours, batch = make(), draw("left")
    seen = shapes_seen(ours)
    outputs, padded = ours(**batch), ours(**batch, padding_free=False)
    assert set(seen) == {(5, 9, 32)}
    assert_same_tensors(flat(outputs), flat(padded))


@settings(max_examples=40)
@given(st.lists(st.lists(st.booleans(), min_size=5, max_size=5), min_size=1, max_size=6), st.booleans())
def test_any_mask(rows, position_ids):
    ours = make(ScratchBertModel, False)
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
def test_every_head(head, labels, shapes_seen):
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
def test_a_batch_stays_padded_if_the_feed_forward_is_chunked(head, shapes_seen):
    whole, chunked = make(OURS[head]), make(OURS[head], chunk_size_feed_forward=7)
    batch, seen = inputs_for(head), shapes_seen(chunked)
    real = batch["attention_mask"].flatten(0, -2).bool()
    outputs = chunked(**batch)
    assert_same_tensors(flat(outputs), flat(whole(**batch)), real)
    assert seen == [(*real.shape, 32)]


@pytest.mark.parametrize("head", ["ForMaskedLM", "ForPreTraining"])
def test_the_vocabulary_is_scored_for_the_tokens(head):
    ours, batch = make(OURS[head]), draw()
    batch = {name: tensor.repeat(30, 1) for name, tensor in batch.items()}
    real = batch["attention_mask"].bool()
    with torch.no_grad(), observed_shapes(LanguageModelHead.forward) as shapes:
        outputs, padded = ours(**batch), ours(**batch, padding_free=False)
    assert_same_tensors(flat(outputs), flat(padded), real)
    assert shapes == [(real.sum(), 32), (150, 9, 32)]
    scores = next(iter(outputs.values()))
    assert not scores[~real].any()


@pytest.mark.parametrize("head", ["ForMaskedLM", "ForTokenClassification", "ForPreTraining"])
def test_labels_on_padding_count_as_in_bert(head, shapes_seen):
    ours, batch = make(OURS[head]), inputs_for(head, labels=True)
    batch["labels"] = torch.randint(0, 2, batch["input_ids"].shape)
    seen = shapes_seen(ours)
    assert torch.equal(ours(**batch).loss, ours(**batch, padding_free=False).loss)
    assert set(seen) == {(3, 7, 32)}


@pytest.mark.parametrize("head", ["ForMaskedLM", "ForPreTraining"])
def test_sparse_prediction(head):
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
def test_padding_stays_where_it_is_wanted(head, options, shapes_seen):
    ours, batch = make(OURS[head]), inputs_for(head)
    seen = shapes_seen(ours)
    outputs = ours(**batch, **options)
    assert seen == [(3, 7, 32)]
    for states in outputs.hidden_states or ():
        assert states.shape == (3, 7, 32)
    assert "padding_free" not in outputs


@pytest.mark.parametrize("field", ["padding_free", "output_hidden_states", "output_attentions"])
def test_the_configuration_may_ask_for_padding_too(field, shapes_seen):
    ours = make(**({field: False} if field == "padding_free" else {"attention": "eager", field: True}))
    seen = shapes_seen(ours)
    ours(**draw())
    assert seen == [(5, 9, 32)]


def test_a_full_mask_or_none(shapes_seen):
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


def test_a_kernel_of_another_ones_own_is_given_the_mask(monkeypatch):
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


def test_256_short_sequences_are_not_256_calls(monkeypatch):
    calls, sdpa = [], nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(
        nn.functional,
        "scaled_dot_product_attention",
        lambda *args, **kwargs: calls.append(args[0].shape) or sdpa(*args, **kwargs),
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
def test_much_at_once_goes_through_in_parts(lengths, monkeypatch, shapes_seen):
    ours = make()
    cu_seqlens = unpadding.cumulative(lengths).int()
    batch = {"input_ids": torch.randint(1, VOCABULARY, (1, sum(lengths))), "cu_seq_lens_q": cu_seqlens}
    with torch.no_grad():
        expected = flat(ours(**batch))
    seen = shapes_seen(ours)
    monkeypatch.setattr(unpadding, "MAX_TENSOR_BYTES", 10 * 4 * ours.config.intermediate_size)
    with torch.no_grad():
        assert_same_tensors(flat(ours(**batch)), expected)
    tokens = [shape[1] for shape in seen]
    assert sum(tokens) == sum(lengths)
    assert max(tokens) <= max(10, *lengths)
    assert all(tokens)
    assert (len(seen) > 1) == (lengths not in ([3], [0, 20]))
    seen.clear()
    ours(**batch)  # autograd keeps all of it anyway
    assert seen == [(1, sum(lengths), 32)]


def test_pickled_and_copied_models_still_pack(shapes_seen):
    ours, batch = make(), draw()
    seen = shapes_seen(copied := copy.deepcopy(ours))
    assert torch.equal(copied(**batch).last_hidden_state, ours(**batch).last_hidden_state)
    assert seen == [(1, sum(LENGTHS), 32)]


# ---------------------------------------------------------------------------------------------------------------------
# Batches that come packed


@pytest.mark.parametrize("given", ["both", "cu_seq_lens", "position_ids", "maps", "states", "unpacked", "embeddings"])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_packed_batches(given, attention):
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


def test_packed_labels():
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


def test_one_sequence_is_not_packed(shapes_seen):
    ours = make()
    ids, positions = torch.randint(1, VOCABULARY, (1, 6)), torch.tensor([[3, 0, 7, 1, 0, 2]])
    seen = shapes_seen(ours)
    plain = ours(ids, position_ids=positions).last_hidden_state
    full = ours(ids, position_ids=positions, attention_mask=torch.ones(1, 1, 6, 6).bool()).last_hidden_state
    assert_same_tensors({"": plain}, {"": full})
    assert ours(ids, position_ids=torch.arange(6)[None]).last_hidden_state.shape == (1, 6, 32)
    assert set(seen) == {(1, 6, 32)}


WRONG = {
    "mask": ({"attention_mask": torch.ones(1, 6)}, "attention_mask and cu_seq_lens_q"),
    "end": ({"cu_seq_lens_q": torch.tensor([0, 2, 5])}, r"cu_seq_lens_q is \[0, 2, 5\];.* 6"),
    "start": ({"cu_seq_lens_q": torch.tensor([1, 6])}, r"cu_seq_lens_q is \[1, 6\]"),
    "falls": ({"cu_seq_lens_q": torch.tensor([0, 4, 2, 6])}, r"cu_seq_lens_q is \[0, 4, 2, 6\]"),
    "list": ({"cu_seq_lens_q": [0, 6]}, "cu_seq_lens_q is a list"),
    "floats": ({"cu_seq_lens_q": torch.tensor([0.0, 6.0])}, "cu_seq_lens_q has dtype torch.float32"),
    "two dimensions": ({"cu_seq_lens_q": torch.tensor([[0, 6]])}, r"cu_seq_lens_q has shape \(1, 2\)"),
    "rows": ({"input_ids": torch.ones(2, 3).long()}, "cu_seq_lens_q .* 2 rows"),
}


@pytest.mark.parametrize(("change", "message"), WRONG.values(), ids=WRONG)
def test_wrong_packings(change, message):
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


def test_flash_attention_is_given_the_lengths(monkeypatch):
    def flash(module, query, key, value, mask, *, cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k, **kwargs):
        assert mask is None
        heads = (each[0].transpose(0, 1) for each in (query, key, value))
        return one_by_one(*heads, cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k)[None], None

    ours, batch = make(), draw()
    expected = ours(**batch).last_hidden_state
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "flash_attention_2", flash)
    monkeypatch.setattr(unpadding, "flash_attention_forward", flash)
    ours.config._attn_implementation = "flash_attention_2"
    assert_same_tensors({"": ours(**batch).last_hidden_state}, {"": expected})


def test_one_kernel_call_for_each_run_of_a_length():
    calls, lengths = [], [2, 2, 0, 1, 4]
    batch = unpadding.UnpaddedBatch(unpadding.cumulative(lengths), 4, (1, 9), None, lengths)

    def attend(module, query, key, value, mask, **options):
        calls.append((tuple(query.shape), mask))
        return 2 * query.transpose(1, 2), None

    heads = torch.arange(9.0).view(1, 1, 9, 1)
    result, _ = batch.kernel(attend)(None, heads, heads, heads)
    assert calls == [((count, 1, length, 1), None) for length, count in ((2, 2), (1, 1), (4, 1))]
    assert torch.equal(result, 2 * heads.transpose(1, 2))


@pytest.mark.parametrize("option", ["output_hidden_states", "output_attentions"])
def test_much_at_once_stays_whole_if_states_are_requested(option, monkeypatch):
    ours, packed = make(), flattened(draw(), **FLASH)
    options, shapes = {option: True}, []
    ours.encoder.blocks[0].register_forward_hook(lambda _, args, output: shapes.append(tuple(output.shape)))
    with torch.no_grad():
        expected = flat(ours(**packed, **options))
        monkeypatch.setattr(unpadding, "MAX_TENSOR_BYTES", 10 * 4 * ours.config.intermediate_size)
        assert_same_tensors(flat(ours(**packed, **options)), expected)
    assert shapes == [(1, sum(LENGTHS), 32)] * 2


def test_a_row_of_packed_sequences_may_be_longer_than_the_table_of_positions():
    ours, lengths = make(), [30, 25, 40]
    rows = [torch.randint(1, VOCABULARY, (1, length)) for length in lengths]
    cu_seqlens = unpadding.cumulative(lengths).int()
    outputs = ours(torch.cat(rows, 1), cu_seq_lens_q=cu_seqlens).last_hidden_state
    expected = torch.cat([ours(row).last_hidden_state for row in rows], 1)
    assert_same_tensors({"": outputs}, {"": expected})
    with pytest.raises(ValueError, match=r"cu_seq_lens_q .* 55 .* max_position_embeddings is 40"):
        ours(torch.cat(rows, 1), cu_seq_lens_q=torch.tensor([0, 55, 95]).int())


def test_cu_seqlens_of_any_integer_dtype():
    ours, packed = make(), flattened(draw(), **FLASH)
    long = {**packed, "cu_seq_lens_q": packed["cu_seq_lens_q"].long()}
    assert_same_tensors(flat(ours(**long)), flat(ours(**packed)))


# ---------------------------------------------------------------------------------------------------------------------
# What looks like packed sequences, and is not

POSITIONS = {"zeros": [0, 0, 0, 0, 0, 0], "restarting": [0, 1, 2, 0, 1, 2]}
WITH_POSITIONS = ["Model", *(head for head in HEADS if head not in ("Model", "ForMultipleChoice"))]


@pytest.mark.parametrize("positions", POSITIONS.values(), ids=POSITIONS)
@pytest.mark.parametrize("head", WITH_POSITIONS)
def test_a_row_with_a_mask_is_one_sequence_whatever_its_positions(head, positions, tmp_path):
    ours = make(OURS[head])
    ours.save_as_bert(tmp_path)
    reference = REFERENCES[head].from_pretrained(tmp_path).eval()
    batch = {"input_ids": torch.randint(1, VOCABULARY, (1, 6)), "attention_mask": torch.ones(1, 6, dtype=torch.long)}
    batch["position_ids"] = torch.tensor([positions])
    with torch.no_grad():
        assert_same_tensors(flat(ours(**batch)), flat(reference(**batch)))


@pytest.mark.parametrize("length", [1, 2, 6])
def test_positions_that_are_all_zero_are_one_sequence(length, tmp_path):
    ours = make()
    ours.save_as_bert(tmp_path)
    reference = transformers.BertModel.from_pretrained(tmp_path).eval()
    batch = {"input_ids": torch.randint(1, VOCABULARY, (1, length)), "position_ids": torch.zeros(1, length).long()}
    with torch.no_grad():
        assert_same_tensors(flat(ours(**batch)), flat(reference(**batch)))


@pytest.mark.parametrize("head", ["ForMaskedLM", "ForTokenClassification", "ForPreTraining", "ForCausalLM"])
def test_a_loss_over_padding_is_the_references(head, tmp_path):
    ours = make(OURS[head], num_labels=3, is_decoder=False)
    ours.save_as_bert(tmp_path)
    reference = REFERENCES[head].from_pretrained(tmp_path).eval()
    batch = draw()
    batch["labels"] = torch.randint(0, 3, batch["input_ids"].shape)
    if head == "ForPreTraining":
        batch["next_sentence_label"] = torch.randint(0, 2, (5,))
    assert_same_tensors({"loss": ours(**batch).loss}, {"loss": reference(**batch).loss})


@pytest.mark.parametrize("head", ["ForMaskedLM", "ForTokenClassification"])
def test_labels_in_one_dimension_count_at_padding_as_well(head, tmp_path):
    ours = make(OURS[head], num_labels=3)
    ours.save_as_bert(tmp_path)
    reference = REFERENCES[head].from_pretrained(tmp_path).eval()
    batch = draw()
    batch["labels"] = torch.randint(0, 3, (45,))
    assert_same_tensors({"loss": ours(**batch).loss}, {"loss": reference(**batch).loss})
    for model in (ours, reference):
        with pytest.raises((ValueError, RuntimeError)):
            model(**{**batch, "labels": batch["labels"].repeat(2)})


def test_a_causal_head_with_labels_keeps_padding(shapes_seen):
    ours = make(OURS["ForCausalLM"], is_decoder=False)
    batch = {"input_ids": torch.randint(1, VOCABULARY, (2, 5)), "attention_mask": torch.tensor([[1, 1, 1, 0, 0]] * 2)}
    batch["labels"] = torch.full((2, 5), -100)
    batch["labels"][0, 4] = 7  # the logits of a token predict the label of the next
    seen = shapes_seen(ours)
    assert_same_tensors({"": ours(**batch).loss}, {"": ours(**batch, padding_free=False).loss})
    assert seen[0] == (2, 5, 32)


# ---------------------------------------------------------------------------------------------------------------------
# Transforms, devices, rows without a token


@pytest.mark.parametrize("head", ["ForMaskedLM", "ForTokenClassification", "ForSequenceClassification"])
def test_vmap_over_labels(head, tmp_path):
    ours = make(OURS[head], num_labels=3)
    ours.save_as_bert(tmp_path)
    reference = REFERENCES[head].from_pretrained(tmp_path).eval()
    batch = draw()
    shape = (4, 5) if head == "ForSequenceClassification" else (4, 5, 9)
    labels = torch.randint(0, 3, shape)

    def losses(model):
        return torch.func.vmap(lambda labels: model(**batch, labels=labels).loss)(labels)

    one_by_one = torch.stack([ours(**batch, labels=each).loss for each in labels])
    assert_same_tensors({"": losses(ours)}, {"": losses(reference)})
    assert_same_tensors({"": losses(ours)}, {"": one_by_one})


@pytest.mark.parametrize("given", ["padded", "packed", "positions", "optimised"])
def test_index_tensors_are_on_the_device_of_the_inputs(given):
    ours, batch = make(), draw()
    if given == "optimised":
        ours.optimize_for_inference()
    inputs = {"optimised": batch, "padded": batch, "packed": flattened(batch, **FLASH), "positions": flattened(batch)}[
        given
    ]
    with torch.no_grad():
        expected = flat(ours(**inputs))
        torch.set_default_device("meta")
        try:
            outputs = flat(ours(**inputs))
        finally:
            torch.set_default_device(None)
    assert_same_tensors(
        *({name: each for name, each in tensors.items() if "len" not in name} for tensors in (outputs, expected))
    )


@pytest.mark.parametrize("head", [*HEADS, "ForCausalLM", "Seq2SeqModel", "ForConditionalGeneration"])
def test_a_row_without_a_token_is_the_same_in_eager_and_sdpa(head):
    batch = inputs_for(head)
    batch["attention_mask"][1] = 0
    models = [make(OURS[head], attention=attention, **NEEDS.get(head, {})) for attention in ("eager", "sdpa")]
    with torch.no_grad():
        eager, sdpa = (flat(model(**batch, padding_free=False, use_cache=False)) for model in models)
        unpadded = flat(models[1](**batch, use_cache=False))
    assert_same_tensors(eager, sdpa)
    if "logits" in unpadded and unpadded["logits"].ndim == 2:
        assert_same_tensors({"": unpadded["logits"]}, {"": sdpa["logits"]})


# ---------------------------------------------------------------------------------------------------------------------
# The frames from the model to the kernel


@pytest.mark.parametrize(("batch", "most"), [("padded", 4), ("unpadded", 6)])
def test_few_frames(batch, most, monkeypatch):
    """Our own frames above `scaled_dot_product_attention`; those of torch and transformers are not counted."""
    ours, folder, counts = make(), str(Path(unpadding.__file__).parent), []
    sdpa = nn.functional.scaled_dot_product_attention

    def count(*args, **kwargs):
        frames = [frame.f_code.co_filename for frame, _ in traceback.walk_stack(None)]
        counts.append(sum(name.startswith(folder) for name in frames))
        return sdpa(*args, **kwargs)

    monkeypatch.setattr(nn.functional, "scaled_dot_product_attention", count)
    inputs = draw()
    with torch.no_grad():
        ours(**inputs, padding_free=batch == "unpadded")
    assert counts
    assert max(counts) <= most


# ---------------------------------------------------------------------------------------------------------------------
# Compiled
