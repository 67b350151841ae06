"""What users of a library model rely on, held against the same calls on the `Bert…` reference with the same weights."""

import copy
import inspect
import io
import pickle
from collections import Counter
from tempfile import TemporaryDirectory

import pytest
import torch
from accelerate import Accelerator, cpu_offload, disk_offload, infer_auto_device_map
from safetensors import safe_open
from torch import nn
from torch.testing import assert_close
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoTokenizer,
    BertConfig,
    DataCollatorWithPadding,
    DynamicCache,
    Trainer,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask
from transformers.modeling_outputs import SequenceClassifierOutput
from transformers.utils import find_labels

from modeling_scratchbert import (
    ScratchBertConfig,
    ScratchBertForSequenceClassification,
    ScratchBertForTokenClassification,
    ScratchBertModel,
    ScratchBertPreTrainedModel,
)
from modeling_scratchbert.attention import MultiHeadAttention
from modeling_scratchbert.feed_forward import FeedForward
from modeling_scratchbert.transformer import TransformerBlock
from modeling_scratchbert.versions import CACHE
from support.checkpoint_kinds import NOTHING
from support.models import HEADS, NO_DROPOUT, OURS, REFERENCES, TINY, inputs_for, random_scratchbert
from support.training import sgd_settings
from support.unpadded import observed_shapes
from support.versions import checkpoint_activations, since

FIELDS = {**TINY, **NO_DROPOUT}
LANGUAGE_MODELS = ("ForMaskedLM", "ForPreTraining")
BATCH, LENGTH = 3, 7


def references(head="Model", attention="sdpa", **fields):
    """Our model and BERT's with the same weights; every one is away from its initial value, so that a bias or a norm
    that is left out shows."""
    reference = REFERENCES[head](BertConfig(**{**FIELDS, **fields}, attn_implementation=attention))
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    with TemporaryDirectory() as folder:
        reference.save_pretrained(folder)
        ours = OURS[head].from_pretrained(folder, attn_implementation=attention)
    return ours.eval(), reference.eval()


def real_tokens(output, inputs):
    """An output's values at the tokens that are no padding."""
    return output[inputs["attention_mask"].bool()]


def loss_of(outputs):
    """A model's own loss, or for one without a number that depends on every output."""
    if outputs.get("loss") is not None:
        return outputs.loss
    return outputs.last_hidden_state.pow(2).mean() + outputs.pooler_output.sum()


def gradients(model, inputs, seed=0):
    """Every parameter's gradient, by our name or BERT's, with the same dropout at every call."""
    torch.manual_seed(seed)
    model.zero_grad()
    loss_of(model(**inputs)).backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}


@pytest.fixture
def recorder():
    """Attention implementations registered as users do it, which record every call: `recorder(name, function)`."""
    registered = []

    def register(name, function=sdpa_attention_forward, mask_function=sdpa_mask):
        calls = []

        def attention(module, query, key, value, attention_mask, **kwargs):
            calls.append({"module": module, "mask": attention_mask, "kwargs": kwargs})
            return function(module, query, key, value, attention_mask, **kwargs)

        AttentionInterface.register(name, attention)
        AttentionMaskInterface.register(name, mask_function)
        registered.append(name)
        return calls

    yield register
    for name in registered:
        AttentionInterface._global_mapping.pop(name)
        AttentionMaskInterface._global_mapping.pop(name)


# Outputs


@pytest.mark.parametrize("head", OURS)
def test_return_dict_of_the_configuration_gives_way_to_the_call(head):
    model, inputs = random_scratchbert(head, return_dict=False), inputs_for(head)
    as_tuple, expected = model(**inputs), model(**inputs, return_dict=True)
    assert type(as_tuple) is tuple
    assert not isinstance(expected, tuple)
    assert len(as_tuple) == len(expected.to_tuple())
    assert torch.equal(as_tuple[0], expected[0])
    model.config.return_dict = True
    assert not isinstance(model(**inputs, return_dict=None), tuple)


@pytest.mark.parametrize("selected", [1, -1, [0, -1], [7]])
def test_hidden_states_can_be_selected_by_number(selected):
    ours, reference = references()
    inputs = inputs_for()
    states, expected = (model(**inputs, output_hidden_states=selected).hidden_states for model in (ours, reference))
    assert [state is None for state in states] == [state is None for state in expected]
    for state, reference_state in zip(states, expected, strict=True):
        if state is not None:
            assert_close(real_tokens(state, inputs), real_tokens(reference_state, inputs), rtol=0, atol=1e-5)


def test_what_is_not_asked_for_is_not_returned():
    ours, _ = references()
    output = ours(**inputs_for(), output_attentions=False, output_hidden_states=None)
    assert list(output) == ["last_hidden_state", "pooler_output"]
    assert output.hidden_states is None
    assert output.attentions is None
    # What one call records must not leak into the next.
    ours(**inputs_for(), output_attentions=True, output_hidden_states=True)
    assert list(ours(**inputs_for())) == ["last_hidden_state", "pooler_output"]


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_is_causal_reaches_the_kernel_as_in_the_reference(attention):
    ours, reference = references(attention=attention)
    ids = inputs_for()["input_ids"]
    causal, expected = (model(ids, is_causal=True).last_hidden_state for model in (ours, reference))
    assert_close(causal, expected, rtol=0, atol=1e-5)
    assert torch.allclose(causal, ours(ids).last_hidden_state, atol=1e-2) == (attention == "eager")


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_an_encoder_takes_a_prefix_of_keys_and_values_like_the_reference(attention):
    """PEFT's prefix tuning hands an encoder a cache, and a mask that is longer by as much."""
    ours, reference = references(attention=attention)
    inputs = inputs_for()
    prefix = [torch.randn(2, BATCH, 4, 2, 8) for _ in range(TINY["num_hidden_layers"])]
    inputs["attention_mask"] = torch.cat([torch.ones(BATCH, 2, dtype=torch.long), inputs["attention_mask"]], dim=1)
    outputs = []
    for model in (ours, reference):
        cache = DynamicCache()
        for layer, (keys, values) in enumerate(prefix):
            cache.update(keys, values, layer)
        outputs.append(model(**inputs, past_key_values=cache).last_hidden_state)
    assert_close(outputs[0][1:], outputs[1][1:], rtol=0, atol=1e-5)
    assert not torch.allclose(outputs[0][1:], ours(**inputs_for()).last_hidden_state[1:], atol=1e-2)


@pytest.mark.parametrize("head", HEADS)
def test_sizes_and_names_that_tools_ask_for_are_the_references(head):
    ours, reference = references(head)
    arguments, expected = (list(inspect.signature(type(model).forward).parameters) for model in (ours, reference))
    assert arguments == expected
    assert ours.num_parameters() == reference.num_parameters()
    assert ours.num_parameters(exclude_embeddings=True) == reference.num_parameters(exclude_embeddings=True)
    assert find_labels(type(ours)) == find_labels(type(reference))  # what `Trainer` takes for labels
    assert ours.main_input_name == reference.main_input_name == "input_ids"
    assert ours.can_generate() == reference.can_generate()
    assert (ours.get_output_embeddings() is None) == (reference.get_output_embeddings() is None)


# Resizing the vocabulary


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
    ("size", "multiple", "becomes"),
    [(120, None, 120), (50, None, 50), (100, 64, 128), (None, 16, 112)],
    ids=["grow", "shrink", "grow to a multiple", "only to a multiple"],
)
@pytest.mark.parametrize("head", LANGUAGE_MODELS)
def test_resizing_gives_the_references_model(head, size, multiple, becomes, tied, tmp_path):
    ours, reference = references(head, tie_word_embeddings=tied)
    inputs = inputs_for(head)
    inputs["input_ids"] %= 50
    logits = "prediction_logits" if head == "ForPreTraining" else "logits"
    before = real_tokens(ours(**inputs)[logits], inputs)
    for model in (ours, reference):
        torch.manual_seed(1)  # new rows are drawn at random
        table = model.resize_token_embeddings(size, pad_to_multiple_of=multiple)
        assert table is model.get_input_embeddings()

    assert ours.config.vocab_size == ours.model.config.vocab_size == reference.config.vocab_size == becomes
    head_layer = ours.get_output_embeddings()
    assert ours.get_input_embeddings().weight.shape == head_layer.weight.shape == (becomes, TINY["hidden_size"])
    assert head_layer.bias.shape == (becomes,)
    assert ours.get_input_embeddings().num_embeddings == becomes
    assert (head_layer.weight is ours.get_input_embeddings().weight) == tied

    after = real_tokens(ours(**inputs)[logits], inputs)
    kept = min(becomes, TINY["vocab_size"])
    assert_close(after[:, :kept], before[:, :kept], rtol=0, atol=1e-6)
    assert_close(after, real_tokens(reference(**inputs)[logits], inputs), rtol=0, atol=1e-5)

    # The labels' loss is taken over the new vocabulary, and the check of ids knows its size.
    labels = {"labels": torch.full((BATCH, LENGTH), becomes - 1)}
    if head == "ForPreTraining":
        labels["next_sentence_label"] = torch.zeros(BATCH, dtype=torch.long)
    inputs["input_ids"][:, -1] = becomes - 1
    assert_close(ours(**inputs, **labels).loss, reference(**inputs, **labels).loss, rtol=1e-5, atol=1e-5)
    with pytest.raises(
        ValueError, match=rf"^input_ids .*\b{becomes}\b.* 0 to {becomes - 1} .*vocab_size is {becomes}\b"
    ):
        ours(inputs["input_ids"] + 1)

    ours.save_pretrained(tmp_path / "ours")
    again = type(ours).from_pretrained(tmp_path / "ours").eval()
    assert_close(again(**inputs)[logits], ours(**inputs)[logits], rtol=0, atol=0)
    assert (again.get_output_embeddings().weight is again.get_input_embeddings().weight) == tied
    ours.save_as_bert(tmp_path / "bert")
    as_bert, info = type(reference).from_pretrained(tmp_path / "bert", output_loading_info=True)
    assert info == NOTHING
    expected = real_tokens(ours(**inputs)[logits], inputs)
    assert_close(real_tokens(as_bert.eval()(**inputs)[logits], inputs), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("head", ["Model", "ForSequenceClassification"])
def test_models_without_a_language_model_head_resize_too(head):
    ours, reference = references(head)
    inputs = inputs_for(head)
    inputs["input_ids"][:, 1] = 119
    for model in (ours, reference):
        torch.manual_seed(1)
        model.resize_token_embeddings(120, mean_resizing=False)
    for part, expected in zip(ours(**inputs, return_dict=False), reference(**inputs, return_dict=False), strict=True):
        assert_close(part[1:], expected[1:], rtol=0, atol=1e-5)


def test_resized_embeddings_still_train_together():
    ours, _ = references("ForMaskedLM")
    ours.resize_token_embeddings(120)
    optimiser = torch.optim.SGD(ours.parameters(), lr=1.0)
    before = ours.get_input_embeddings().weight.detach().clone()
    inputs = inputs_for("ForMaskedLM", labels=True)
    inputs["labels"][:] = 110
    ours(**inputs).loss.backward()
    optimiser.step()
    assert not torch.equal(ours.get_input_embeddings().weight[110], before[110])
    assert ours.get_output_embeddings().weight is ours.get_input_embeddings().weight


def test_embeddings_put_in_by_hand_decide_which_ids_there_are():
    """A table set by `set_input_embeddings` may be longer than `config.vocab_size`, which that call leaves alone."""
    ours, reference = references()
    table = nn.Embedding(200, TINY["hidden_size"])
    ids = torch.tensor([[150, 199, 3]])
    for model in (ours, reference):
        model.set_input_embeddings(table)
    assert_close(ours(ids).last_hidden_state, reference(ids).last_hidden_state, rtol=0, atol=1e-5)


# Tied weights


@pytest.mark.parametrize("head", LANGUAGE_MODELS)
def test_tied_weights_are_saved_once_and_come_back_tied(head, tmp_path):
    ours, _ = references(head)
    ours.save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        shapes = Counter(tuple(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118
    assert shapes[(TINY["vocab_size"], TINY["hidden_size"])] == 1
    again = type(ours).from_pretrained(tmp_path)
    for model in (again, copy.deepcopy(again), again.to(torch.bfloat16), pickle.loads(pickle.dumps(again))):
        assert model.lm_head.decoder.weight is model.model.embeddings.word_embeddings.weight


# Gradient checkpointing


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("head", HEADS)
def test_gradient_checkpointing_changes_no_gradient(head, reentrant):
    ours, _ = references(head, hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.1)
    inputs = inputs_for(head, labels=True)
    ours.train()
    expected = gradients(ours, inputs)
    checkpoint_activations(ours, {"use_reentrant": reentrant})
    layers = [block.feed_forward for block in ours.base_model.encoder.blocks]
    with observed_shapes(FeedForward.forward, modules=(runs := [])):
        checkpointed = gradients(ours, inputs)
        assert [runs.count(layer) for layer in layers] == [2, 2]  # once forward, once more for the gradients
        assert checkpointed.keys() == expected.keys()
        assert_close(checkpointed, expected, rtol=0, atol=1e-7)

        ours.eval()
        loss_of(ours(**inputs)).backward()
        assert [runs.count(layer) for layer in layers] == [3, 3]
        ours.train().gradient_checkpointing_disable()
        gradients(ours, inputs)
        assert [runs.count(layer) for layer in layers] == [4, 4]


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_of_a_decoder_reaches_the_encoder_and_keeps_no_cache(reentrant):
    ours, reference = references(is_decoder=True, add_cross_attention=True)
    inputs = inputs_for()
    results, caches = [], []
    for model in (ours, reference):
        for checkpointing in (False, True):
            model.train()
            if checkpointing:
                checkpoint_activations(model, {"use_reentrant": reentrant})
            torch.manual_seed(3)
            source = torch.randn(BATCH, 5, TINY["hidden_size"], requires_grad=True)
            # Not a leaf, as an encoder's output is none: handed to a reentrant checkpoint by keyword it would fail.
            output = model(**inputs, encoder_hidden_states=source.sin())
            output.last_hidden_state[1:].pow(2).sum().backward()
            results.append(source.grad)
        caches.append(getattr(output, CACHE))
    assert_close(results[1], results[0], rtol=0, atol=1e-6)
    assert_close(results[0], results[2], rtol=1e-4, atol=1e-5)
    assert caches == [None, None]  # a cache that no block has filled would look like that of an empty sequence


@since("5.17", "a part of the blocks can be checkpointed")
def test_every_other_block_can_be_checkpointed():
    ours, _ = references()
    checkpoint_activations(ours.train(), {"use_reentrant": False}, 2)
    with observed_shapes(FeedForward.forward, modules=(runs := [])):
        gradients(ours, inputs_for())
    assert [runs.count(block.feed_forward) for block in ours.encoder.blocks] == [2, 1]


def test_frozen_embeddings_pass_gradients_on_when_adapters_ask_for_them():
    """PEFT freezes the model and calls `enable_input_require_grads`, without which reentrant checkpoints yield none."""
    ours, _ = references()
    ours.train().requires_grad_(False)
    ours.encoder.blocks[0].attention.query.requires_grad_(True)
    ours.enable_input_require_grads()
    checkpoint_activations(ours, {"use_reentrant": True})
    assert set(gradients(ours, inputs_for())) == {
        "encoder.blocks.0.attention.query.weight",
        "encoder.blocks.0.attention.query.bias",
    }


# Choosing the attention


def test_attention_can_be_chosen_while_loading_and_switched_later(recorder, tmp_path):
    ours, reference = references("ForMaskedLM", attention="eager")
    inputs = inputs_for("ForMaskedLM")
    expected = real_tokens(reference(**inputs).logits, inputs)
    calls = recorder("recorded")
    ours.save_pretrained(tmp_path)
    assert type(ours).from_pretrained(tmp_path).config._attn_implementation == "sdpa"
    assert type(ours)(ScratchBertConfig(**FIELDS, attn_implementation="eager")).config._attn_implementation == "eager"
    for attention in ("sdpa", "eager", "recorded"):
        loaded = type(ours).from_pretrained(tmp_path, attn_implementation=attention).eval()
        assert loaded.config._attn_implementation == attention
        assert_close(real_tokens(loaded(**inputs).logits, inputs), expected, rtol=0, atol=1e-5)
    assert len(calls) == 2
    calls.clear()
    for attention in ("sdpa", "eager", "recorded", "sdpa"):
        ours.set_attn_implementation(attention)
        assert ours.config._attn_implementation == ours.model.config._attn_implementation == attention
        assert_close(real_tokens(ours(**inputs).logits, inputs), expected, rtol=0, atol=1e-5)
    assert [call["module"].layer_idx for call in calls] == [0, 1]  # every layer, and in that one pass only
    assert all(isinstance(call["module"], MultiHeadAttention) for call in calls)


def test_an_attention_of_the_users_own_computes_the_same_in_both(recorder):
    """One that no built-in kernel equals, with a mask function of its own: each is called, and its result is used."""
    masks = []

    def near_only(module, query, key, value, attention_mask, scaling, **kwargs):
        position = torch.arange(query.shape[2])
        scores = query @ key.transpose(-1, -2) * scaling - (position[:, None] - position[None]).abs()
        weights = scores.masked_fill(~attention_mask, -torch.inf).softmax(-1)
        return (weights @ value).transpose(1, 2), weights

    def mask_function(*args, **kwargs):
        masks.append(sdpa_mask(*args, **kwargs | {"allow_is_bidirectional_skip": False}))
        return masks[-1]

    ours, reference = references()
    inputs = inputs_for()
    plain = ours(**inputs).last_hidden_state
    calls = recorder("near_only", near_only, mask_function)
    for model in (ours, reference):
        model.set_attn_implementation("near_only")
    output = ours(**inputs).last_hidden_state
    assert len(calls) == TINY["num_hidden_layers"]
    assert all(call["mask"] is masks[0] for call in calls)
    assert_close(
        real_tokens(output, inputs), real_tokens(reference(**inputs).last_hidden_state, inputs), rtol=0, atol=1e-5
    )
    assert not torch.allclose(output, plain, atol=1e-2)


@pytest.mark.parametrize("argument", ["cu_seq_lens_q", "max_length_q", "position_ids"])
def test_a_kernels_own_arguments_reach_it(recorder, argument):
    """From `position_ids`, or from the others, flash attention learns where one packed sequence ends and another
    begins; without them it would mix the two."""
    ours, reference = references()
    calls = recorder("recorded")
    value = torch.arange(LENGTH).expand(BATCH, LENGTH)
    for model in (ours, reference):
        model.set_attn_implementation("recorded")
        model(inputs_for()["input_ids"], **{argument: value})
    assert len(calls) == 2 * TINY["num_hidden_layers"]
    assert [call["kwargs"].get(argument) is value for call in calls] == [True] * len(calls)


def test_a_kernel_is_told_of_dropout_in_training_only(recorder):
    ours, _ = references(attention_probs_dropout_prob=0.25)
    calls = recorder("recorded")
    ours.set_attn_implementation("recorded")
    ours(**inputs_for())
    ours.train()(**inputs_for())
    assert [call["kwargs"]["dropout"] for call in calls] == [0.0, 0.0, 0.25, 0.25]
    assert {call["kwargs"]["scaling"] for call in calls} == {8**-0.5}


# Number formats and devices


@pytest.mark.parametrize("position_embedding_type", ["absolute", "sinusoidal"])
@pytest.mark.parametrize("head", HEADS)
def test_a_model_made_without_memory_takes_weights_afterwards(head, position_embedding_type):
    config = ScratchBertConfig(**FIELDS, position_embedding_type=position_embedding_type)
    full = OURS[head](config).eval()
    with torch.device("meta"):
        empty = OURS[head](config).eval()
    assert all(tensor.is_meta for tensor in (*empty.parameters(), *empty.buffers()))
    inputs = inputs_for(head)
    del inputs["attention_mask"]  # transformers' own mask functions ask a mask for values, for the reference as for us
    outputs = empty(**{name: tensor.to("meta") for name, tensor in inputs.items()}, return_dict=False)
    assert [output.shape for output in outputs] == [output.shape for output in full(**inputs, return_dict=False)]

    if position_embedding_type == "sinusoidal":
        return  # its table is a buffer that is not saved: `from_pretrained` fills it, `load_state_dict` cannot
    empty.to_empty(device="cpu")
    empty.load_state_dict(full.state_dict())
    empty.tie_weights()
    for output, expected in zip(empty(**inputs, return_dict=False), full(**inputs, return_dict=False), strict=True):
        assert_close(output, expected, rtol=0, atol=0)


@pytest.mark.parametrize("position_embedding_type", ["absolute", "sinusoidal"])
@pytest.mark.parametrize("head", ["Model", "ForMaskedLM"])
def test_blocks_can_stay_on_disk(head, position_embedding_type, tmp_path):
    model = OURS[head](ScratchBertConfig(**FIELDS, position_embedding_type=position_embedding_type)).eval()
    model.save_pretrained(tmp_path / "model")
    inputs = inputs_for(head)
    expected = model(**inputs)[0]
    size = sum(parameter.nbytes for parameter in model.base_model.encoder.blocks[0].parameters())
    fits = {"cpu": model.get_memory_footprint() - size, "disk": 10**9}
    device_map = infer_auto_device_map(model, max_memory=fits, no_split_module_classes=model._no_split_modules)
    assert "disk" in device_map.values()
    # No block is split: whatever of one is on the disk, all of it is.
    assert not any(name.split("blocks.")[-1].count(".") for name in device_map if "blocks." in name)
    assert not any("embeddings." in name for name in device_map)
    loaded = type(model).from_pretrained(tmp_path / "model", device_map=device_map, offload_folder=tmp_path / "disk")
    assert any(parameter.is_meta for parameter in loaded.parameters())
    assert_close(loaded.eval()(**inputs)[0], expected, rtol=0, atol=0)
    with_maps = loaded(**inputs, output_attentions=True)[0]
    assert_close(real_tokens(with_maps, inputs), real_tokens(expected, inputs), rtol=0, atol=1e-5)


def test_accelerate_offloads_a_model_that_is_loaded():
    for offload in (cpu_offload, disk_offload):
        ours, _ = references("ForMaskedLM")
        inputs = inputs_for("ForMaskedLM")
        expected = ours(**inputs).logits
        with TemporaryDirectory() as folder:
            offload(ours, *([folder] if offload is disk_offload else []), execution_device=torch.device("cpu"))
            assert all(parameter.is_meta for parameter in ours.parameters())
            assert_close(ours(**inputs).logits, expected, rtol=0, atol=0)


# Saved files


# Feed-forward in chunks


@pytest.mark.parametrize("chunk", [1, 2, 7])
def test_chunked_feed_forward_computes_the_same(chunk):
    whole, _ = references()
    config = copy.deepcopy(whole.config)
    config.chunk_size_feed_forward = chunk
    chunked = ScratchBertModel(config).eval()
    chunked.load_state_dict(whole.state_dict())
    inputs = inputs_for(length=14)
    widths = []
    for block in chunked.encoder.blocks:
        block.feed_forward.intermediate.register_forward_pre_hook(lambda _, args: widths.append(args[0].shape[1]))
    expected = whole(**inputs).last_hidden_state
    assert_close(chunked(**inputs).last_hidden_state, expected, rtol=0, atol=1e-6)
    assert widths == [chunk] * (2 * 14 // chunk)
    assert_close(gradients(chunked, inputs), gradients(whole, inputs), rtol=1e-4, atol=1e-6)


def test_a_length_that_chunks_do_not_divide_is_refused_as_by_the_reference():
    for model in references(chunk_size_feed_forward=4):
        with pytest.raises(ValueError, match=r"dimension to be chunked 7 .* chunk size 4"):
            model(**inputs_for())


# Copies


@pytest.mark.parametrize("head", HEADS)
def test_copies_compute_the_same_and_are_independent(head):
    ours, _ = references(head)
    inputs, recording = (
        inputs_for(head),
        {"output_hidden_states": True, "output_attentions": True, "return_dict": False},
    )
    file = io.BytesIO()
    torch.save(ours, file)
    file.seek(0)
    copies = [copy.deepcopy(ours), pickle.loads(pickle.dumps(ours)), torch.load(file, weights_only=False)]
    expected = ours(**inputs)[0], ours(**inputs, **recording)
    copies.append(copy.deepcopy(ours))  # after outputs were recorded
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.zero_()
    for copied in copies:
        assert type(copied) is type(ours)
        assert_close((copied(**inputs)[0], copied(**inputs, **recording)), expected, rtol=0, atol=0)
        assert copied.config is not ours.config


# Classes that users derive


class GatedTagger(ScratchBertForTokenClassification):
    """A head with a parameter of its own, and a forward pass that goes through the parent's."""

    def __init__(self, config):
        super().__init__(config)
        self.gate = nn.Parameter(torch.ones(config.num_labels))
        self.post_init()

    def forward(self, *args, **kwargs):
        output = super().forward(*args, **kwargs)
        output.logits = output.logits * self.gate
        return output


class ScaledConfig(ScratchBertConfig):
    """A configuration with a field of its own under a model type of its own, as the guide to custom models has it."""

    model_type = "scaled-scratchbert"
    scale: float = 1.0


class MeanClassifier(ScratchBertPreTrainedModel):
    """A head written from nothing over the encoder."""

    config_class = ScaledConfig

    def __init__(self, config):
        super().__init__(config)
        self.model = ScratchBertModel(config, add_pooling_layer=False)
        self.score = nn.Linear(config.hidden_size, config.num_labels)
        self.post_init()

    def forward(self, input_ids, attention_mask, **kwargs):
        outputs = self.model(input_ids, attention_mask, **kwargs)
        mask = attention_mask[..., None].to(outputs.last_hidden_state.dtype)
        mean = (outputs.last_hidden_state * mask).sum(1) / mask.sum(1)
        return SequenceClassifierOutput(
            logits=self.score(mean) * self.config.scale, hidden_states=outputs.hidden_states
        )


class DoublingBlock(TransformerBlock):
    """A block that a user changed."""

    def forward(self, hidden_states, *args, **kwargs):
        return super().forward(hidden_states, *args, **kwargs) * 2


class DoublingModel(ScratchBertModel):
    def __init__(self, config, add_pooling_layer=True):
        super().__init__(config, add_pooling_layer)
        self.encoder.blocks[1] = DoublingBlock(config, 1)
        self.post_init()


def test_a_derived_head_saves_loads_and_starts_from_a_bert(tmp_path):
    ours, reference = references("ForTokenClassification")
    reference.save_pretrained(tmp_path / "bert")
    tagger, report = GatedTagger.from_pretrained(tmp_path / "bert", output_loading_info=True)
    assert set(report["missing_keys"]) == {"gate"}
    inputs = inputs_for()
    # A parameter with no module's name to go by is not initialised by transformers: it must be set by the user.
    with torch.no_grad():
        tagger.gate.copy_(torch.tensor([2.0, 3.0]))
    tagger.eval().save_pretrained(tmp_path / "tagger")
    again = GatedTagger.from_pretrained(tmp_path / "tagger").eval()
    assert_close(again(**inputs).logits, ours(**inputs).logits * torch.tensor([2.0, 3.0]), rtol=0, atol=0)
    with pytest.raises(ValueError, match="gate"):
        again.save_as_bert(tmp_path / "no")


def test_a_derived_model_with_its_own_configuration_saves_and_loads(tmp_path):
    config = ScaledConfig(**FIELDS, scale=3.0, num_labels=4)
    model = MeanClassifier(config).eval()
    inputs = inputs_for()
    del inputs["token_type_ids"]
    logits = model(**inputs).logits
    assert_close(logits, 3 * model.score(logits_input(model, inputs)), rtol=1e-5, atol=1e-6)
    model.save_pretrained(tmp_path)
    assert ScaledConfig.from_pretrained(tmp_path).scale == 3.0
    again = MeanClassifier.from_pretrained(tmp_path).eval()
    assert type(again.config) is ScaledConfig
    assert_close(again(**inputs).logits, logits, rtol=0, atol=0)
    with_config = MeanClassifier.from_pretrained(tmp_path, config=config).eval()
    assert_close(with_config(**inputs).logits, logits, rtol=0, atol=0)


def logits_input(model, inputs):
    """The mean over the real tokens of the encoder's output, one sequence at a time."""
    states = model.model(**inputs).last_hidden_state
    return torch.stack([rows[mask.bool()].mean(0) for rows, mask in zip(states, inputs["attention_mask"], strict=True)])


def test_a_derived_model_takes_the_encoder_of_a_bert(tmp_path):
    _, reference = references()
    reference.save_pretrained(tmp_path)

    class Head(MeanClassifier):
        config_class = ScratchBertConfig

    model, report = Head.from_pretrained(tmp_path, output_loading_info=True)
    assert set(report["missing_keys"]) == {"score.weight", "score.bias"}
    inputs = inputs_for()
    del inputs["token_type_ids"]
    states = model.eval().model(**inputs).last_hidden_state
    expected = reference(**inputs).last_hidden_state
    assert_close(real_tokens(states, inputs), real_tokens(expected, inputs), rtol=0, atol=1e-5)


def test_a_changed_block_is_recorded_checkpointed_and_saved(tmp_path):
    model = DoublingModel(ScratchBertConfig(**FIELDS)).eval()
    inputs = inputs_for()
    output = model(**inputs, output_hidden_states=True, output_attentions=True)
    assert len(output.hidden_states) == 3
    assert len(output.attentions) == 2
    model.save_pretrained(tmp_path)
    again = DoublingModel.from_pretrained(tmp_path).eval()
    assert_close(again(**inputs).last_hidden_state, output.last_hidden_state, rtol=0, atol=1e-5)
    unchanged = ScratchBertModel.from_pretrained(tmp_path).eval()
    unchanged = unchanged(**inputs)
    assert_close(unchanged.last_hidden_state * 2, output.last_hidden_state, rtol=0, atol=1e-5)
    expected = gradients(model.train(), inputs)
    checkpoint_activations(model, {"use_reentrant": False})
    with observed_shapes(FeedForward.forward, modules=(runs := [])):
        assert_close(gradients(model, inputs), expected, rtol=0, atol=1e-7)
    assert [runs.count(block.feed_forward) for block in model.encoder.blocks] == [2, 2]


# Trainer and Accelerate


def examples(count=8, lengths=(6,)):
    """Examples as a data set yields them, with a column that no model takes."""
    return [
        {"input_ids": torch.randint(1, 99, (length,)), "attention_mask": torch.ones(length, dtype=torch.long)}
        | {"labels": number % 2, "text": f"example {number}"}
        for number in range(count)
        for length in [lengths[number % len(lengths)]]
    ]


def train(model, data, folder, collator=None, **arguments):
    settings = sgd_settings(folder, learning_rate=1.0, lr_scheduler_type="constant", **arguments)
    trainer = Trainer(model, settings, train_dataset=data, data_collator=collator)
    return trainer.train().training_loss, trainer


def test_trainer_takes_the_references_steps(minilm, tmp_path):
    """It finds the columns and the labels in the signature, and drops what the model does not take."""
    ours, reference = references("ForSequenceClassification")
    start = copy.deepcopy(ours.state_dict())
    data = [{**row, "label": row.pop("labels")} for row in examples(lengths=(4, 6, 3))]
    arguments = {"max_steps": 2, "per_device_train_batch_size": 4}
    arguments["collator"] = DataCollatorWithPadding(AutoTokenizer.from_pretrained(minilm))
    loss, trainer = train(ours, data, tmp_path / "ours", **arguments)
    reference_loss, reference_trainer = train(reference, data, tmp_path / "bert", **arguments)
    assert trainer.label_names == reference_trainer.label_names == ["labels"]
    assert loss == pytest.approx(reference_loss, abs=1e-5)
    ours.save_as_bert(tmp_path / "exported")
    for name, tensor in type(reference).from_pretrained(tmp_path / "exported").state_dict().items():
        assert_close(tensor, reference.state_dict()[name], rtol=1e-4, atol=1e-5)
    changed = "model.encoder.blocks.0.attention.query.weight"
    assert not torch.equal(ours.get_parameter(changed), start[changed])
    prediction = trainer.predict(data)
    assert prediction.predictions.shape == (8, 2)
    assert prediction.label_ids.tolist() == [0, 1] * 4
    trainer.save_model(str(tmp_path / "saved"))
    again = type(ours).from_pretrained(tmp_path / "saved")
    assert_close(again.classifier.weight, ours.classifier.weight, rtol=0, atol=0)


def test_trainer_with_gradient_checkpointing_takes_the_same_step(tmp_path):
    data = examples()
    reference, _ = references("ForSequenceClassification")
    plain, checkpointed = copy.deepcopy(reference), copy.deepcopy(reference)
    train(plain, data, tmp_path)
    with observed_shapes(FeedForward.forward, modules=(runs := [])):
        train(checkpointed, data, tmp_path, gradient_checkpointing=True)
    assert [runs.count(block.feed_forward) for block in checkpointed.model.encoder.blocks] == [2, 2]
    assert_close(checkpointed.state_dict(), plain.state_dict(), rtol=0, atol=1e-6)
    assert not torch.equal(plain.classifier.weight, reference.classifier.weight)


def test_accelerate_prepares_and_trains_it():
    ours, _ = references("ForSequenceClassification")
    reference = copy.deepcopy(ours)
    rows = examples(4)
    columns = {
        name: torch.stack([torch.as_tensor(row[name]) for row in rows])
        for name in ("input_ids", "attention_mask", "labels")
    }
    accelerator = Accelerator(cpu=True, mixed_precision="no")
    loader = torch.utils.data.DataLoader([{k: v[i] for k, v in columns.items()} for i in range(4)], batch_size=4)
    model, optimiser, loader = accelerator.prepare(ours, torch.optim.SGD(ours.parameters(), lr=0.5), loader)
    for batch in loader:
        accelerator.backward(model(**batch).loss)
        optimiser.step()
    expected = gradients(reference, columns)
    trained = accelerator.unwrap_model(model)
    assert type(trained) is ScratchBertForSequenceClassification
    for name, parameter in reference.named_parameters():
        assert_close(trained.get_parameter(name), parameter - 0.5 * expected[name], rtol=1e-4, atol=1e-6)
