"""`generate`: the ids of `BertLMHeadModel` and `EncoderDecoderModel` in every mode and with every cache; the cost of a
step; and the limits."""

import copy
from dataclasses import dataclass

import pytest
import torch
from torch.testing import assert_close
from transformers import (
    BertConfig,
    BertLMHeadModel,
    BertModel,
    CompileConfig,
    DynamicCache,
    EncoderDecoderCache,
    EncoderDecoderModel,
    GenerationConfig,
    StaticCache,
)
from transformers.modeling_outputs import BaseModelOutput

from modeling_scratchbert import ScratchBertForCausalLM, ScratchBertForConditionalGeneration
from modeling_scratchbert.versions import CACHE
from support.models import VOCABULARY, randomise, tiny_config

PAD, START = 0, 1
LIMIT = 80  # positions
NEW = 16  # tokens to generate, where not otherwise said
LENGTHS = (9, 5, 1, 7)  # of the sources or prompts

# The seq2seq model; a decoder alone; and a decoder that is given an encoder's output.
KINDS = ("seq2seq", "causal", "cross-attention")
kinds = pytest.mark.parametrize("kind", KINDS)


# ---------------------------------------------------------------------------------------------------------------------
# Models and inputs


def run(model, inputs, **options):
    torch.manual_seed(0)  # for sampling
    return model.generate(**inputs, **{"max_new_tokens": NEW, "do_sample": False, **options})


def ragged(lengths, side):
    """A batch with sequences of these lengths, padded on one side, each token of either type."""
    longest, lengths = max(lengths), torch.tensor(lengths)[:, None]
    real = torch.arange(longest) < lengths if side == "right" else torch.arange(longest) >= longest - lengths
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(START + 1, VOCABULARY, real.shape, generator=generator)
    types = torch.randint(0, 2, real.shape, generator=generator)
    return {"input_ids": ids * real, "attention_mask": real.long(), "token_type_ids": types * real}


def inputs_of(kind, lengths=LENGTHS):
    """A ragged batch: sources are padded on the right, prompts on the left."""
    inputs = ragged(lengths, "right" if kind == "seq2seq" else "left")
    if kind == "cross-attention":
        encoder_mask = ragged((4, 6, 2, 1)[: len(lengths)], "right")["attention_mask"]
        states = torch.randn(*encoder_mask.shape, 32, generator=torch.Generator().manual_seed(0))
        inputs |= {"encoder_hidden_states": states.double(), "encoder_attention_mask": encoder_mask}
    return inputs


def row_of(inputs, number):
    """One row of the batch without its padding."""
    row = {}
    for name, tensor in inputs.items():
        mask = inputs["encoder_attention_mask" if name.startswith("encoder_") else "attention_mask"]
        row[name] = tensor[number, mask[number].bool()][None]
    return row


@dataclass
class Pair:
    """Our model and its reference with the same weights, in float64, where no rounding decides between two tokens; a
    batch for both; and an id that ends some sequences before others."""

    kind: str
    ours: torch.nn.Module
    reference: torch.nn.Module
    inputs: dict
    end: int = -1

    def of_reference(self, inputs=None, **options):
        if self.kind == "cross-attention":
            # What generate makes itself holds no encoder's keys, and BertLMHeadModel does not make up for it.
            options[CACHE] = empty_cache(self.kind, self.reference)
        return run(self.reference, inputs or self.inputs, **options)

    def of_ours(self, inputs=None, **options):
        return run(self.ours, inputs or self.inputs, **options)

    def prompt_length(self):
        return 1 if self.kind == "seq2seq" else self.inputs["input_ids"].shape[1]


def empty_cache(kind, model):
    config = model.config.get_text_config(decoder=True)
    own = DynamicCache(config=config)
    return own if kind == "causal" else EncoderDecoderCache(own, DynamicCache(config=config))


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    """Makes a pair; ours is opened from the folder that the reference was saved to."""
    made = {}

    def bert(seed, model_class, layers, attention, **fields):
        config = {"num_hidden_layers": layers, "max_position_embeddings": LIMIT, "attn_implementation": attention}
        return randomise(model_class(tiny_config(BertConfig, **config, **fields)), seed)

    def make(kind, attention):
        crossed = kind != "causal"
        decoder = bert(1, BertLMHeadModel, 3, attention, is_decoder=True, add_cross_attention=crossed)
        reference, our_class = decoder, ScratchBertForCausalLM
        if kind == "seq2seq":
            reference = EncoderDecoderModel(encoder=bert(0, BertModel, 2, attention), decoder=decoder)
            reference.config.decoder_start_token_id, reference.config.pad_token_id = START, PAD
            reference.generation_config = GenerationConfig(decoder_start_token_id=START, pad_token_id=PAD)
            our_class = ScratchBertForConditionalGeneration
        folder = tmp_path_factory.mktemp(kind)
        reference.eval().save_pretrained(folder)
        ours = our_class.from_pretrained(folder, attn_implementation=attention)
        pair = Pair(kind, ours.double(), reference.double(), inputs_of(kind))
        pair.end = pair.of_reference()[0, -8].item()
        return pair

    def cached(kind, attention="sdpa"):
        if (kind, attention) not in made:
            made[kind, attention] = make(kind, attention)
        return made[kind, attention]

    return cached


# ---------------------------------------------------------------------------------------------------------------------
# The ids of the reference


SAMPLING = {"do_sample": True, "top_k": 20, "top_p": 0.9, "temperature": 1.5}
MODES = {
    "greedy": {"max_new_tokens": 64},
    "sampling": SAMPLING,
    "beams": {"num_beams": 4, "length_penalty": 0.3, "max_new_tokens": 40},
    "beams, early": {"num_beams": 4, "length_penalty": 2.0, "early_stopping": True},
    "several samples of beams": {"num_beams": 3, "num_return_sequences": 2, **SAMPLING},
    "constraints": {"repetition_penalty": 1.7, "no_repeat_ngram_size": 2, "forced_bos_token_id": 33},
}
CACHES = ("made by generate", "none", "static by name", "dynamic", "static")


def cache_options(cache, pair):
    """The options of `generate` for one kind of cache."""
    if cache == "none":
        return {"use_cache": False}
    if cache == "static by name":
        return {"cache_implementation": "static"}
    if cache == "dynamic":
        return {CACHE: empty_cache(pair.kind, pair.ours)}
    if cache == "static":
        config = pair.ours.config.get_text_config(decoder=True)
        static = StaticCache(config=config, max_cache_len=LIMIT)
        if pair.kind == "causal":
            return {CACHE: static}
        source = pair.inputs.get("encoder_hidden_states", pair.inputs["input_ids"])
        return {CACHE: EncoderDecoderCache(static, StaticCache(config=config, max_cache_len=source.shape[1]))}
    return {}


@kinds
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_ids_are_those_of_the_reference(attention, mode, kind, pairs):
    pair = pairs(kind, attention)
    options = {"eos_token_id": pair.end, **MODES[mode]}
    expected = pair.of_reference(**options)
    for cache in CACHES:
        assert torch.equal(pair.of_ours(**options, **cache_options(cache, pair)), expected), cache


def test_special_tokens_are_those_of_the_configuration():
    """A model that was not loaded has no generation_config.json."""
    fields = {"is_encoder_decoder": True, "decoder_start_token_id": 7, "pad_token_id": 3}
    model = randomise(ScratchBertForConditionalGeneration(tiny_config(**fields, eos_token_id=5))).eval()
    ids = run(model, inputs_of("seq2seq"))
    assert (ids[:, 0] == 7).all()
    model = ScratchBertForConditionalGeneration(tiny_config(**fields, eos_token_id=ids[0, 3].item())).eval()
    again = run(randomise(model), inputs_of("seq2seq"))
    assert torch.equal(again[0, :4], ids[0, :4])
    assert (again[0, 4:] == 3).all()


VARIANTS = {
    "as BERT": {},
    "pre-norm": {"norm_first": True},
    "sinusoidal": {"position_embedding_type": "sinusoidal"},
    "tied": {"tie_encoder_decoder": True},
    "separate": {"share_embeddings": False, "num_decoder_layers": 1},
}


@kinds
@pytest.mark.parametrize("fields", VARIANTS.values(), ids=VARIANTS)
@pytest.mark.parametrize("beams", [1, 3])
def test_neither_the_cache_nor_other_rows_change_a_row(beams, fields, kind):
    fields = {"max_position_embeddings": LIMIT, "decoder_start_token_id": START, **fields}
    if kind == "seq2seq":
        model = ScratchBertForConditionalGeneration(tiny_config(is_encoder_decoder=True, **fields))
    else:
        crossed = kind == "cross-attention"
        model = ScratchBertForCausalLM(tiny_config(is_decoder=True, add_cross_attention=crossed, **fields))
    model, inputs = randomise(model, seed=2).double().eval(), inputs_of(kind)
    ids = run(model, inputs, num_beams=beams, eos_token_id=None)
    assert torch.equal(run(model, inputs, num_beams=beams, eos_token_id=None, use_cache=False), ids)
    for number in range(len(LENGTHS)):
        alone = run(model, row_of(inputs, number), num_beams=beams, eos_token_id=None)
        assert torch.equal(alone[0, -NEW:], ids[number, -NEW:])


# ---------------------------------------------------------------------------------------------------------------------
# Other inputs


@kinds
def test_assisted_generation_gives_the_same_ids_in_fewer_passes(kind, pairs):
    pair = pairs(kind)
    assistant = copy.deepcopy(pair.ours)
    with torch.no_grad():
        for parameter in assistant.parameters():
            parameter += 0.02 * torch.randn_like(parameter)
    row, passes = row_of(pair.inputs, 0), []
    row.pop("token_type_ids")
    expected = pair.of_ours(row, max_new_tokens=40)
    hook = pair.ours.register_forward_hook(lambda *_: passes.append(1))
    ids = pair.of_ours(row, assistant_model=assistant, max_new_tokens=40)
    hook.remove()
    assert torch.equal(ids, expected)
    assert len(passes) < 40


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}, {"num_return_sequences": 2, **SAMPLING}], ids=str)
def test_encoder_outputs_replace_the_source(options, pairs):
    pair = pairs("seq2seq")
    outputs = BaseModelOutput(pair.ours.get_encoder()(**pair.inputs).last_hidden_state)
    expected = pair.of_ours(**options)
    hook = pair.ours.get_encoder().register_forward_hook(lambda *_: pytest.fail("the encoder ran"))
    inputs = {"attention_mask": pair.inputs["attention_mask"], "encoder_outputs": outputs}
    assert torch.equal(pair.of_ours(inputs, **options), expected)
    hook.remove()


@kinds
def test_inputs_embeds_give_the_ids_of_input_ids(kind, pairs):
    pair = pairs(kind)
    inputs, expected = dict(pair.inputs), pair.of_ours()
    inputs["inputs_embeds"] = pair.ours.get_input_embeddings()(inputs.pop("input_ids"))
    assert torch.equal(pair.of_ours(inputs), expected if kind == "seq2seq" else expected[:, -NEW:])


@pytest.mark.parametrize("use_cache", [True, False])
def test_decoder_prompts_padded_on_the_left(use_cache, pairs):
    """Each row generates what the reference generates for it alone."""
    pair, prompts = pairs("seq2seq"), ragged((4, 2, 1, 3), "left")
    mask = prompts["attention_mask"]
    is_first = (mask.cumsum(dim=1) == 1) & mask.bool()
    prompts = {"decoder_input_ids": prompts["input_ids"].masked_fill(is_first, START), "decoder_attention_mask": mask}
    ids = pair.of_ours(**prompts, use_cache=use_cache)
    for number, length in enumerate(mask.sum(dim=1)):
        row = row_of(pair.inputs, number)
        row["decoder_input_ids"] = prompts["decoder_input_ids"][number : number + 1, -length:]
        assert torch.equal(pair.of_reference(row)[0, length:], ids[number, 4:])
    positions = (mask.cumsum(dim=1) - 1).clamp(min=0)
    assert torch.equal(pair.of_ours(**prompts, decoder_position_ids=positions, use_cache=use_cache), ids)
    assert not torch.equal(pair.of_ours(**prompts, decoder_position_ids=positions + 1, use_cache=use_cache), ids)


@kinds
def test_a_second_call_continues_the_cache_of_the_first(kind, pairs):
    pair, steps = pairs(kind), []
    inputs = {name: tensor for name, tensor in pair.inputs.items() if name != "token_type_ids"}
    expected = pair.of_ours(inputs)
    first = pair.of_ours(inputs, max_new_tokens=10, return_dict_in_generate=True)
    assert getattr(first, CACHE).get_seq_length() == first.sequences.shape[1] - 1
    name = "decoder_input_ids" if kind == "seq2seq" else "input_ids"
    inputs[name] = first.sequences
    if kind != "seq2seq":
        inputs["attention_mask"] = torch.cat([inputs["attention_mask"], torch.ones(4, 10, dtype=torch.long)], dim=1)
    hook = pair.ours.register_forward_hook(lambda _, args, kwargs, output: steps.append(kwargs[name]), with_kwargs=True)
    ids = pair.of_ours(inputs, past_key_values=getattr(first, CACHE), max_new_tokens=NEW - 10)
    hook.remove()
    assert torch.equal(ids, expected)
    assert {step.shape[1] for step in steps} == {1}


@pytest.mark.parametrize("kind", ["causal", "cross-attention"])
def test_a_prompt_in_chunks(kind, pairs):
    pair = pairs(kind)
    inputs = {name: tensor for name, tensor in pair.inputs.items() if name != "token_type_ids"}
    assert torch.equal(pair.of_ours(inputs, prefill_chunk_size=4), pair.of_ours(inputs))


# ---------------------------------------------------------------------------------------------------------------------
# Everything else that generate returns


def flat(value):
    if isinstance(value, tuple):
        return [tensor for part in value for tensor in flat(part)]
    return [value]


@kinds
@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_scores_states_and_attentions_are_those_of_the_reference(attention, beams, kind, pairs):
    """Under sdpa as well, where the reference returns no attention weights."""
    inputs = inputs_of(kind, (5, 5, 5))  # outputs at padding have no meaning
    options = dict.fromkeys(("output_scores", "output_logits", "output_attentions", "output_hidden_states"), True)
    options |= {"return_dict_in_generate": True, "max_new_tokens": 6, "num_beams": beams}
    ours = pairs(kind, attention).of_ours(inputs, **options)
    reference = pairs(kind, "eager").of_reference(inputs, **options)
    assert type(ours) is type(reference)
    assert list(ours) == list(reference)
    for name in set(ours) - {CACHE}:
        for mine, theirs in zip(flat(ours[name]), flat(reference[name]), strict=True):
            assert_close(mine, theirs, rtol=0, atol=1e-5)


@kinds
def test_bfloat16(kind, pairs):
    pair, options = pairs(kind), {"return_dict_in_generate": True, "output_logits": True}
    expected = pair.of_ours(**options)
    half = copy.deepcopy(pair.ours).bfloat16()
    inputs = {name: value.bfloat16() if value.is_floating_point() else value for name, value in pair.inputs.items()}
    found = run(half, inputs, **options)
    assert found.sequences.shape == expected.sequences.shape
    assert_close(found.logits[0].double(), expected.logits[0].double(), rtol=0, atol=0.2)


@kinds
@pytest.mark.parametrize("by_generate", [False, True], ids=["forward", "generate"])
def test_a_compiled_model_has_one_graph_for_all_steps(by_generate, kind, pairs, fresh_compiler):
    pair, options = pairs(kind), {"cache_implementation": "static"}
    model = copy.deepcopy(pair.ours)
    if by_generate:
        options["compile_config"] = CompileConfig(fullgraph=True, dynamic=False, mode=None, backend="eager")
        options["compile_config"]._compile_all_devices = True
    else:
        model.forward = torch.compile(model.forward, backend="eager", fullgraph=True, dynamic=False)
    assert torch.equal(run(model, pair.inputs, **options), pair.of_ours())
    graphs = 1 if by_generate else 2  # `generate` does not compile the prompt
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs


@kinds
@pytest.mark.parametrize("beams", [1, 3])
def test_a_step_computes_one_position(beams, kind, pairs):
    """The encoder and the keys of its output are computed once; the vocabulary is scored for the last token alone."""
    pair, calls = pairs(kind), {}
    decoder = pair.ours.get_decoder() if kind == "seq2seq" else pair.ours.model
    block = decoder.encoder.blocks[0]
    modules = {"key": block.attention.key, "scores": pair.ours.get_output_embeddings()}
    if kind != "causal":
        modules["cross-attention"] = block.cross_attention.key
    if kind == "seq2seq":
        modules["encoder"] = pair.ours.get_encoder().get_input_embeddings()
    hooks = []
    for name, module in modules.items():
        lengths = calls[name] = []
        hooks.append(module.register_forward_hook(lambda _, args, out, lengths=lengths: lengths.append(out.shape[1])))
    pair.of_ours(num_beams=beams)
    for hook in hooks:
        hook.remove()
    assert calls.pop("key") == [pair.prompt_length()] + [1] * (NEW - 1)
    assert calls.pop("scores") == [1] * NEW
    assert all(len(lengths) == 1 for lengths in calls.values())


# ---------------------------------------------------------------------------------------------------------------------
# What is refused


def test_a_missing_start_token_is_refused(pairs):
    pair = pairs("seq2seq")
    model = copy.deepcopy(pair.ours)
    model.config.decoder_start_token_id = model.generation_config.decoder_start_token_id = None
    with pytest.raises(ValueError, match=r"^config\.decoder_start_token_id"):
        model(**pair.inputs, labels=torch.full((4, 3), 5))
    with pytest.raises(ValueError, match=r"^generation_config\.decoder_start_token_id"):
        run(model, pair.inputs)
    for name in ("decoder_start_token_id", "bos_token_id"):
        assert torch.equal(run(model, pair.inputs, **{name: START}), pair.of_ours())


@kinds
@pytest.mark.parametrize("beams", [1, 2])
def test_generates_up_to_the_last_position(beams, kind, pairs):
    """The last token requires none, because it is not an input."""
    pair = pairs(kind)
    longest = LIMIT + 1 - pair.prompt_length()
    ids = pair.of_ours(max_new_tokens=longest, num_beams=beams)
    assert ids.shape[1] == LIMIT + 1
    assert torch.equal(ids, pair.of_reference(max_new_tokens=longest, num_beams=beams))
    with pytest.raises(ValueError, match=rf"max_length.*set max_new_tokens to {longest}\b"):
        pair.of_ours(max_new_tokens=longest + 1, num_beams=beams)


def test_a_prompt_that_leaves_no_position_is_refused(pairs):
    with pytest.raises(ValueError, match=r"^max_length") as caught:
        run(pairs("causal").ours, {"input_ids": torch.full((1, LIMIT + 3), 5)})
    assert "max_new_tokens" not in str(caught.value)  # no value would do


# The fields in which the model that filled a cache differs, and the number of its sequences.
OTHER_CACHES = {
    "deeper": ({"num_hidden_layers": 4}, 4),
    "shallower": ({"num_hidden_layers": 1}, 4),
    "wider heads": ({"hidden_size": 64}, 4),
    "more heads": ({"hidden_size": 64, "num_attention_heads": 8}, 4),
    "fewer sequences": ({}, 2),
}


@pytest.mark.parametrize(("fields", "batch"), OTHER_CACHES.values(), ids=OTHER_CACHES)
def test_the_cache_of_another_model_is_refused(fields, batch, pairs):
    fields = {"num_hidden_layers": 3, "is_decoder": True, **fields}
    cache = getattr(ScratchBertForCausalLM(tiny_config(**fields))(torch.full((batch, 5), 7), use_cache=True), CACHE)
    with pytest.raises(ValueError, match=r"^past_key_values has"):
        pairs("causal").ours(torch.full((4, 1), 7), past_key_values=cache)


def test_the_cache_of_another_source_is_refused(pairs):
    pair, ids = pairs("seq2seq"), torch.full((4, 1), 7)
    cache = getattr(pair.ours(pair.inputs["input_ids"][:, :7], decoder_input_ids=ids, use_cache=True), CACHE)
    with pytest.raises(ValueError, match=r"^past_key_values.*cross-attention"):
        pair.ours(**pair.inputs, decoder_input_ids=ids, past_key_values=cache)


@kinds
@pytest.mark.parametrize("cache", [(((torch.zeros(4, 4, 1, 8),) * 2,) * 2), []], ids=["tuple", "list"])
def test_a_cache_of_another_type_is_refused(cache, kind, pairs):
    pair = pairs(kind)
    inputs = {"decoder_input_ids": torch.full((4, 1), 7)} if kind == "seq2seq" else {}
    with pytest.raises(ValueError, match=r"^past_key_values is a"):
        pair.ours(**pair.inputs, **inputs, past_key_values=cache)
