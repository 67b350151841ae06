"""Features of every library model, compared with the same calls on the `Bert…` reference with the same weights."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn
from torch.testing import assert_close
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    DynamicCache,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask
from transformers.modeling_outputs import SequenceClassifierOutput
from transformers.utils import find_labels

from modeling_scratchbert import ScratchBertConfig, ScratchBertModel, ScratchBertPreTrainedModel
from modeling_scratchbert.feed_forward import FeedForward
from modeling_scratchbert.transformer import TransformerBlock
from modeling_scratchbert.versions import CACHE
from support.checkpoint_kinds import NOTHING
from support.comparison import assert_same_tensors, flat
from support.models import BERTS, CROSSED, HEADS, NO_DROPOUT, OURS, SPECIAL, TINY, inputs_for, random_scratchbert
from support.unpadded import observed_shapes
from support.versions import checkpoint_activations, since

FIELDS = {**TINY, **NO_DROPOUT}
BATCH, LENGTH = 3, 7


def assert_same_outputs(ours, reference, inputs):
    """At the tokens that are not padding."""
    mask = inputs["attention_mask"].bool()
    assert_same_tensors(flat(ours(**inputs)), flat(reference(**inputs)), real=mask)


def gradients(model, inputs):
    """Every parameter's gradient, with the same dropout at every call."""
    torch.manual_seed(0)
    model.zero_grad()
    outputs = model(**inputs)
    loss = outputs.loss if "loss" in outputs else outputs[0].pow(2).mean() + outputs.pooler_output.sum()
    loss.backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}


@pytest.fixture
def recorder():
    """Attention functions registered as users do it, which record every call: `recorder(name, function)`."""
    registered = []

    def register(name, function=sdpa_attention_forward, mask_function=sdpa_mask):
        calls = []

        def attention(module, query, key, value, attention_mask, **kwargs):
            calls.append({"mask": attention_mask, **kwargs})
            return function(module, query, key, value, attention_mask, **kwargs)

        AttentionInterface.register(name, attention)
        AttentionMaskInterface.register(name, mask_function)
        registered.append(name)
        return calls

    yield register
    for name in registered:
        AttentionInterface._global_mapping.pop(name)
        AttentionMaskInterface._global_mapping.pop(name)


# Outputs and attributes


@pytest.mark.parametrize("head", OURS)
def test_return_dict_of_the_configuration_is_a_default(head):
    model, inputs = random_scratchbert(head, return_dict=False), inputs_for(head)
    as_tuple, as_object = model(**inputs), model(**inputs, return_dict=True)
    assert type(as_tuple) is tuple
    assert len(as_tuple) == len(as_object.to_tuple())
    assert torch.equal(as_tuple[0], as_object[0])


@pytest.mark.parametrize("selected", [1, [0, -1], [7]])
def test_hidden_states_can_be_selected_by_number(selected, pair):
    ours, reference = pair()
    inputs = inputs_for()
    states, expected = (model(**inputs, output_hidden_states=selected).hidden_states for model in (ours, reference))
    assert [state is None for state in states] == [state is None for state in expected]
    for state, reference_state in zip(states, expected, strict=True):
        if state is not None:
            assert_close(state[1:], reference_state[1:], rtol=0, atol=1e-5)
    assert list(ours(**inputs)) == ["last_hidden_state", "pooler_output"]  # nothing is left of the call before


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_is_causal_reaches_the_kernel_as_in_the_reference(attention, pair):
    ours, reference = pair(attention=attention)
    ids = inputs_for()["input_ids"]
    causal, expected = (model(ids, is_causal=True).last_hidden_state for model in (ours, reference))
    assert_close(causal, expected, rtol=0, atol=1e-5)
    assert torch.allclose(causal, ours(ids).last_hidden_state, atol=1e-2) == (attention == "eager")


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_an_encoder_accepts_a_prefix_of_keys_and_values(attention, pair):
    """PEFT's prefix tuning passes a cache to an encoder, and a mask that is longer by as much."""
    inputs, outputs = inputs_for(), []
    prefix = torch.randn(TINY["num_hidden_layers"], 2, BATCH, 4, 2, 8)
    inputs["attention_mask"] = torch.cat([torch.ones(BATCH, 2, dtype=torch.long), inputs["attention_mask"]], dim=1)
    for model in pair(attention=attention):
        cache = DynamicCache()
        for layer, (keys, values) in enumerate(prefix):
            cache.update(keys, values, layer)
        outputs.append(model(**inputs, **{CACHE: cache}).last_hidden_state)
    assert_close(outputs[0][1:], outputs[1][1:], rtol=0, atol=1e-5)


@pytest.mark.parametrize("head", HEADS)
def test_sizes_and_names_are_those_of_the_reference(head, pair):
    ours, reference = pair(head)
    assert ours.num_parameters() == reference.num_parameters()
    assert ours.num_parameters(exclude_embeddings=True) == reference.num_parameters(exclude_embeddings=True)
    assert find_labels(type(ours)) == find_labels(type(reference))  # what `Trainer` takes for labels
    assert ours.main_input_name == reference.main_input_name
    assert ours.can_generate() == reference.can_generate()
    assert (ours.get_output_embeddings() is None) == (reference.get_output_embeddings() is None)


# Other embeddings


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(("size", "multiple", "becomes"), [(120, None, 120), (50, None, 50), (None, 16, 112)])
@pytest.mark.parametrize("head", ["ForMaskedLM", "ForPreTraining", "ForSequenceClassification"])
def test_a_resized_model_is_the_references(head, size, multiple, becomes, tied, tmp_path, pair):
    ours, reference = pair(head, tie_word_embeddings=tied)
    inputs = inputs_for(head, labels=True)
    for model in (ours, reference):
        torch.manual_seed(1)  # new rows are drawn at random
        table = model.resize_token_embeddings(size, pad_to_multiple_of=multiple)
        assert table is model.get_input_embeddings()
    assert ours.config.vocab_size == ours.model.config.vocab_size == table.num_embeddings == becomes
    output = ours.get_output_embeddings()
    assert output is None or (output.weight is ours.get_input_embeddings().weight) == tied
    inputs["input_ids"] %= becomes
    inputs["input_ids"][:, 1] = becomes - 1
    if output is not None:
        inputs["labels"] = inputs["input_ids"]
    assert_same_outputs(ours, reference, inputs)
    with pytest.raises(ValueError, match=f"input_ids contains {becomes}"):
        ours(inputs["input_ids"] + 1)
    ours.save_as_bert(tmp_path)
    as_bert, info = type(reference).from_pretrained(tmp_path, output_loading_info=True)
    assert info == NOTHING
    assert_same_outputs(ours, as_bert.eval(), inputs)


def test_embeddings_that_were_set_decide_which_ids_there_are(pair):
    """The table may be longer than `config.vocab_size`, which `set_input_embeddings` does not change."""
    ours, reference = pair()
    table, ids = nn.Embedding(200, TINY["hidden_size"]), torch.tensor([[150, 199, 3]])
    for model in (ours, reference):
        model.set_input_embeddings(table)
    assert_close(ours(ids).last_hidden_state, reference(ids).last_hidden_state, rtol=0, atol=1e-5)


# Gradient checkpointing


SEQ2SEQ = "ForConditionalGeneration"
CHECKPOINTED = [
    *((head, {}) for head in BERTS),
    *((SEQ2SEQ, {"tie_encoder_decoder": tied, **SPECIAL}) for tied in (False, True)),
]


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize(("head", "fields"), CHECKPOINTED, ids=str)
def test_gradient_checkpointing_changes_no_gradient(head, fields, reentrant):
    """Of a seq2seq model, the blocks of encoder and decoder are checkpointed."""
    ours = random_scratchbert(head, **fields).double()
    inputs, layers = inputs_for(head, labels=True), TINY["num_hidden_layers"] * (1 + (head == SEQ2SEQ))
    expected = gradients(ours.train(), inputs)
    checkpoint_activations(ours, {"use_reentrant": reentrant})
    with observed_shapes(FeedForward.forward) as calls:
        checkpointed = gradients(ours, inputs)
        assert len(calls) == 2 * layers  # once forward, once more for the gradients
        gradients(ours.eval(), inputs)
        assert len(calls) == 3 * layers
        ours.train().gradient_checkpointing_disable()
        gradients(ours, inputs)
        assert len(calls) == 4 * layers
    assert_close(checkpointed, expected, rtol=0, atol=1e-7)


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_of_a_decoder_reaches_the_encoder_and_fills_no_cache(reentrant, pair):
    ours, reference = pair(**CROSSED)
    results = []
    for model, checkpointing in ((reference, False), (ours, False), (ours, True)):
        if checkpointing:
            checkpoint_activations(model, {"use_reentrant": reentrant})
        torch.manual_seed(3)
        source = torch.randn(BATCH, 5, TINY["hidden_size"], requires_grad=True)
        # Not a leaf, as an encoder's output is none: handed to a reentrant checkpoint by keyword it would fail.
        output = model.train()(**inputs_for(), encoder_hidden_states=source.sin(), use_cache=True)
        output.last_hidden_state[1:].pow(2).sum().backward()
        results.append(source.grad)
    assert_close(results[1], results[0], rtol=1e-4, atol=1e-5)
    assert_close(results[2], results[1], rtol=0, atol=1e-6)
    assert getattr(output, CACHE) is None


@since("5.17", "a part of the blocks can be checkpointed")
def test_every_other_block_can_be_checkpointed():
    ours = random_scratchbert("Model")
    checkpoint_activations(ours.train(), {"use_reentrant": False}, 2)
    with observed_shapes(FeedForward.forward) as calls:
        gradients(ours, inputs_for())
    assert len(calls) == 3


# Attention functions


def test_an_attention_function_of_the_user(recorder, pair):
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

    ours, reference = pair()
    inputs = inputs_for()
    plain = ours(**inputs).last_hidden_state
    calls = recorder("near_only", near_only, mask_function)
    for model in (ours, reference):
        model.set_attn_implementation("near_only")
    near = ours(**inputs).last_hidden_state
    assert len(calls) == TINY["num_hidden_layers"]
    assert all(call["mask"] is masks[0] for call in calls)
    assert_same_outputs(ours, reference, inputs)
    assert not torch.allclose(near, plain, atol=1e-2)
    ours.set_attn_implementation("sdpa")
    assert torch.equal(ours(**inputs).last_hidden_state, plain)


@pytest.mark.parametrize("argument", ["cu_seq_lens_q", "max_length_q", "position_ids"])
def test_a_kernels_own_arguments_reach_it(recorder, argument, pair):
    """From `position_ids`, or from the others, flash attention learns where packed sequences end."""
    calls = recorder("recorded")
    value = torch.arange(LENGTH).expand(BATCH, LENGTH)
    for model in pair():
        model.set_attn_implementation("recorded")
        model(inputs_for()["input_ids"], **{argument: value})
    assert [call.get(argument) is value for call in calls] == [True] * 2 * TINY["num_hidden_layers"]


def test_scale_dropout_and_loss_arguments_of_a_kernel(recorder):
    ours = random_scratchbert("ForMaskedLM", attention_probs_dropout_prob=0.25)
    calls = recorder("recorded")
    ours.set_attn_implementation("recorded")
    ours(**inputs_for(), num_items_in_batch=3)
    ours.train()(**inputs_for(), num_items_in_batch=3)
    assert [call["dropout"] for call in calls] == [0.0, 0.0, 0.25, 0.25]
    assert {call["scaling"] for call in calls} == {8**-0.5}
    assert not any("num_items_in_batch" in call for call in calls)


# Devices and copies


@pytest.mark.parametrize("head", HEADS)
def test_a_model_on_the_meta_device_takes_weights_afterwards(head):
    config, inputs = ScratchBertConfig(**FIELDS), inputs_for(head)
    full = OURS[head](config).eval()
    with torch.device("meta"):
        empty = OURS[head](config).eval()
    assert all(tensor.is_meta for tensor in (*empty.parameters(), *empty.buffers()))
    del inputs["attention_mask"]  # the mask functions of transformers read its values
    expected = full(**inputs, return_dict=False)
    outputs = empty(**{name: tensor.to("meta") for name, tensor in inputs.items()}, return_dict=False)
    assert [output.shape for output in outputs] == [output.shape for output in expected]
    empty.to_empty(device="cpu")
    empty.load_state_dict(full.state_dict())
    empty.tie_weights()
    assert_close(empty(**inputs, return_dict=False), expected, rtol=0, atol=0)


@pytest.mark.parametrize("position_embedding_type", ["absolute", "sinusoidal"])
def test_whole_blocks_can_stay_on_disk(position_embedding_type, tmp_path):
    model = random_scratchbert("Model", position_embedding_type=position_embedding_type)
    model.save_pretrained(tmp_path)
    inputs, size = inputs_for(), sum(parameter.nbytes for parameter in model.encoder.blocks[0].parameters())
    limits = {"cpu": model.get_memory_footprint() - size, "disk": 10**9}
    options = {"device_map": "auto", "max_memory": limits, "offload_folder": tmp_path / "disk"}
    loaded = ScratchBertModel.from_pretrained(tmp_path, **options)
    assert "disk" in loaded.hf_device_map.values()
    assert not any(name.split("blocks.")[-1].count(".") for name in loaded.hf_device_map if "blocks." in name)
    assert not any("embeddings." in name for name in loaded.hf_device_map)
    assert_close(loaded(**inputs)[0], model(**inputs)[0], rtol=0, atol=0)


@pytest.mark.parametrize("head", HEADS)
def test_copies_compute_the_same_and_are_independent(head):
    ours = random_scratchbert(head)
    inputs = inputs_for(head) | {"output_hidden_states": True, "output_attentions": True, "return_dict": False}
    file = io.BytesIO()
    torch.save(ours, file)
    file.seek(0)
    copies = [pickle.loads(pickle.dumps(ours)), torch.load(file, weights_only=False)]
    expected = ours(**inputs)
    copies.append(copy.deepcopy(ours))  # outputs were recorded, for which transformers registers hooks
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.zero_()
    for copied in copies:
        assert type(copied) is type(ours)
        assert_close(copied(**inputs), expected, rtol=0, atol=0)


# Classes that users derive


class ScaledConfig(ScratchBertConfig):
    """A configuration with a field and a model type of its own, as in the guide to custom models."""

    model_type = "scaled-scratchbert"
    scale: float = 1.0


class MeanClassifier(ScratchBertPreTrainedModel):
    """A head over the encoder."""

    config_class = ScaledConfig

    def __init__(self, config):
        super().__init__(config)
        self.model = ScratchBertModel(config, add_pooling_layer=False)
        self.score = nn.Linear(config.hidden_size, config.num_labels)
        self.post_init()

    def forward(self, input_ids, **kwargs):
        mean = self.model(input_ids, **kwargs).last_hidden_state.mean(dim=1)
        return SequenceClassifierOutput(logits=self.score(mean) * self.config.scale)


class DoublingBlock(TransformerBlock):
    def forward(self, hidden_states, *args, **kwargs):
        return super().forward(hidden_states, *args, **kwargs) * 2


class DoublingModel(ScratchBertModel):
    def __init__(self, config, add_pooling_layer=True):
        super().__init__(config, add_pooling_layer)
        self.encoder.blocks[1] = DoublingBlock(config, 1)
        self.post_init()


def test_a_derived_model_with_its_own_configuration(tmp_path):
    model, ids = MeanClassifier(ScaledConfig(**FIELDS, scale=3.0, num_labels=4)).eval(), inputs_for()["input_ids"]
    expected = 3 * model.score(model.model(ids).last_hidden_state.mean(dim=1))
    model.save_pretrained(tmp_path)
    again = MeanClassifier.from_pretrained(tmp_path)
    assert type(again.config) is ScaledConfig
    assert_close(again(ids).logits, expected, rtol=0, atol=1e-6)


def test_a_derived_block_is_recorded_checkpointed_and_saved(tmp_path):
    model, inputs = DoublingModel(ScratchBertConfig(**FIELDS)).eval(), inputs_for()
    output = model(**inputs, output_hidden_states=True, output_attentions=True)
    assert len(output.hidden_states) == 3
    assert len(output.attentions) == 2
    model.save_pretrained(tmp_path)
    for model_class, factor in ((DoublingModel, 1), (ScratchBertModel, 2)):
        states = model_class.from_pretrained(tmp_path)(**inputs).last_hidden_state
        assert_close(factor * states, output.last_hidden_state, rtol=0, atol=1e-5)
    expected = gradients(model.train(), inputs)
    checkpoint_activations(model, {"use_reentrant": False})
    with observed_shapes(FeedForward.forward) as calls:
        assert_close(gradients(model, inputs), expected, rtol=0, atol=1e-7)
    assert len(calls) == 4
