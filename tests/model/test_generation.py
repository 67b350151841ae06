"""`generate`: the references' ids, whatever the way of decoding; what a step costs; and what it says of bad input."""

import copy
import re
from contextlib import contextmanager
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    BertLMHeadModel,
    BertModel,
    BertTokenizer,
    Cache,
    CompileConfig,
    DynamicCache,
    EncoderDecoderCache,
    EncoderDecoderModel,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    StaticCache,
    StoppingCriteria,
    StoppingCriteriaList,
    pipeline,
)
from transformers.generation.streamers import BaseStreamer
from transformers.modeling_outputs import BaseModelOutput

from modeling_scratchbert import (
    ScratchBertForCausalLM,
    ScratchBertForConditionalGeneration,
    ScratchBertForMaskedLM,
    ScratchBertModel,
    ScratchBertSeq2SeqModel,
)
from modeling_scratchbert.versions import CACHE
from support.comparison import as_doubles
from support.models import VOCABULARY, randomise, tiny_config
from support.versions import since

PAD, START = 0, 1
LIMIT = 80  # positions
NEW = 16  # tokens to generate, where not otherwise said
LENGTHS = (9, 5, 1, 7)  # of the sources or prompts

# The seq2seq model; a decoder alone; and a decoder that is given an encoder's output.
KINDS = ("seq2seq", "causal", "cross-attention")
kinds = pytest.mark.parametrize("kind", KINDS)


# ---------------------------------------------------------------------------------------------------------------------
# Models, what goes into them, and what comes out


def run(model, inputs, **options):
    torch.manual_seed(0)  # for sampling
    return model.generate(**inputs, **{"max_new_tokens": NEW, "do_sample": False, **options})


def ragged(lengths, side, seed=0):
    """A batch with sequences of these lengths, padded on one side, each token of either type."""
    longest, lengths = max(lengths), torch.tensor(lengths)[:, None]
    real = torch.arange(longest) < lengths if side == "right" else torch.arange(longest) >= longest - lengths
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(START + 1, VOCABULARY, real.shape, generator=generator)
    types = torch.randint(0, 2, real.shape, generator=generator)
    return {"input_ids": ids * real, "attention_mask": real.long(), "token_type_ids": types * real}


def inputs_of(kind, lengths=LENGTHS, width=32, seed=0):
    """A ragged batch: sources are padded on the right, prompts on the left."""
    inputs = ragged(lengths, "right" if kind == "seq2seq" else "left", seed)
    if kind != "cross-attention":
        return inputs
    seen = ragged([1 + (7 * length) % 6 for length in lengths], "right", seed)["attention_mask"]
    states = torch.randn(*seen.shape, width, generator=torch.Generator().manual_seed(seed))
    return {**inputs, "encoder_hidden_states": states, "encoder_attention_mask": seen}


def row(inputs, number):
    """One row of the batch without its padding."""

    def trimmed(name, tensor):
        mask = inputs.get("encoder_attention_mask" if name.startswith("encoder_") else "attention_mask")
        return tensor[number, mask[number].bool()][None]

    return {name: trimmed(name, tensor) for name, tensor in inputs.items()}


def new_part(ids, inputs, kind):
    """The ids after the prompt or the start token."""
    return ids[:, 1:] if kind == "seq2seq" else ids[:, inputs["input_ids"].shape[1] :]


def padding_of(beams, end):
    """What follows a row's end. Beam search takes a padding id of 0 for none at all, and repeats the end."""
    return PAD if beams == 1 else end


def lengths_until(end, ids):
    """How many tokens each row has up to its end."""
    return [[*line, end].index(end) for line in ids.tolist()]


def good_end(ids):
    """The id by which the rows, cut off where it stands first, get the most different lengths, none of them short."""
    firsts = {end: lengths_until(end, ids) for end in ids[:, 3:].unique().tolist()}
    return max((end for end in firsts if min(firsts[end]) > 2), key=lambda end: (len(set(firsts[end])), end))


@dataclass
class Pair:
    """Our model and its reference with the same weights; a batch for both; and a good id to end its sequences with."""

    kind: str
    ours: torch.nn.Module
    reference: torch.nn.Module
    inputs: dict
    end: int = -1
    greedy: torch.Tensor | None = None

    def of_reference(self, **options):
        if self.kind == "cross-attention" and options.get("use_cache", True):
            # What generate makes itself holds no encoder's keys, and BertLMHeadModel does not make up for it.
            options.setdefault("past_key_values", empty_cache(self.kind, self.reference))
        return run(self.reference, self.inputs, **options)

    def of_ours(self, **options):
        return run(self.ours, self.inputs, **options)

    def new(self, ids):
        return new_part(ids, self.inputs, self.kind)


def empty_cache(kind, model):
    config = model.config.get_text_config(decoder=True)
    own = DynamicCache(config=config)
    return own if kind == "causal" else EncoderDecoderCache(own, DynamicCache(config=config))


@pytest.fixture(scope="module")
def references(tmp_path_factory):
    """Makes a pair; ours is opened from the folder that the reference was saved to."""
    made = {}

    def make(kind, depths=(2, 3), attention="sdpa"):
        def half(seed, model_class, depth, **fields):
            fields |= {"num_hidden_layers": depth, "max_position_embeddings": LIMIT, "attn_implementation": attention}
            return randomise(model_class(tiny_config(BertConfig, **fields)), seed)

        if kind == "seq2seq":
            decoder = half(1, BertLMHeadModel, depths[1], is_decoder=True, add_cross_attention=True)
            reference = EncoderDecoderModel(encoder=half(0, BertModel, depths[0]), decoder=decoder)
            reference.config.decoder_start_token_id, reference.config.pad_token_id = START, PAD
            reference.generation_config = GenerationConfig(decoder_start_token_id=START, pad_token_id=PAD)
        else:
            with_encoder = kind == "cross-attention"
            reference = half(1, BertLMHeadModel, depths[0], is_decoder=True, add_cross_attention=with_encoder)
        folder = tmp_path_factory.mktemp(kind)
        reference.eval().save_pretrained(folder)
        our_class = ScratchBertForConditionalGeneration if kind == "seq2seq" else ScratchBertForCausalLM
        pair = Pair(kind, our_class.from_pretrained(folder, attn_implementation=attention), reference, inputs_of(kind))
        pair.end = good_end(pair.new(pair.of_reference()))
        pair.greedy = pair.of_ours(eos_token_id=pair.end)
        return pair

    def cached(*args, **kwargs):
        key = (args, tuple(kwargs.items()))
        if key not in made:
            made[key] = make(*args, **kwargs)
        return made[key]

    return cached


@contextmanager
def recorded(*modules):
    """Every call of these modules: `(module, args, kwargs, output)`."""
    calls = []
    hooks = [module.register_forward_hook(lambda *call: calls.append(call), with_kwargs=True) for module in modules]
    yield calls
    for hook in hooks:
        hook.remove()


def blocks_of(model):
    return (model.get_decoder() if model.config.is_encoder_decoder else model.model).encoder.blocks


# ---------------------------------------------------------------------------------------------------------------------
# The references' ids


SAMPLING = {"do_sample": True, "top_k": 20, "top_p": 0.9, "temperature": 1.5}


class NoEvenIds(LogitsProcessor):
    def __call__(self, input_ids, scores):
        scores = scores.clone()
        scores[:, ::2] = -torch.inf
        return scores


WAYS = {
    "sampling": SAMPLING,
    "other warpers": {"do_sample": True, "min_p": 0.02, "typical_p": 0.9, "epsilon_cutoff": 1e-3, "eta_cutoff": 1e-3},
    "beams": {"num_beams": 4, "length_penalty": 0.3},
    "beams, early": {"num_beams": 4, "length_penalty": 2.0, "early_stopping": True},
    "beam sampling": {"num_beams": 3, **SAMPLING},
    "several beams back": {"num_beams": 4, "num_return_sequences": 3},
    "several samples back": {"num_return_sequences": 3, **SAMPLING},
    "no repeated pairs": {"no_repeat_ngram_size": 2},
    "repetition penalty": {"repetition_penalty": 1.7},
    "bad words": {"bad_words_ids": [[42], [83], [58, 58]]},
    "suppressed": {"suppress_tokens": [18, 83], "begin_suppress_tokens": [3]},
    "bias": {"sequence_bias": [[[12], 2.5], [[12, 13], 9.0]]},
    "forced end": {"forced_eos_token_id": 9, "max_new_tokens": 6},
    "minimum": {"min_new_tokens": NEW - 2},
    "shorter and shorter": {"exponential_decay_length_penalty": (4, 1.5)},
    "a processor of one's own": {"logits_processor": LogitsProcessorList([NoEvenIds()])},
    "allowed words": {"prefix_allowed_tokens_fn": lambda batch, ids: [*range(2 + batch, 60), 9], "num_beams": 2},
}


@kinds
@pytest.mark.parametrize("way", WAYS)
def test_ids_are_the_references(way, kind, references):
    pair = references(kind)
    options = {"eos_token_id": pair.end, **WAYS[way]}
    ids = pair.of_ours(**options)
    assert torch.equal(ids, pair.of_reference(**options))
    assert not ids.equal(pair.greedy)  # it is no greedy search under a new name


def test_a_forced_beginning(references):
    pair = references("seq2seq")
    ids = pair.of_ours(forced_bos_token_id=33)
    assert torch.equal(ids, pair.of_reference(forced_bos_token_id=33))
    assert (ids[:, 1] == 33).all()


@kinds
@pytest.mark.parametrize(
    ("attention", "options"),
    [
        ("sdpa", {}),
        ("eager", {}),
        ("sdpa", {"num_beams": 4, "length_penalty": 0.3}),
        ("sdpa", SAMPLING),
    ],
    ids=["greedy", "greedy, eager", "beams", "sampling"],
)
def test_64_ids_are_the_references(attention, options, kind, references):
    pair = references(kind, attention=attention)
    ids = pair.of_ours(max_new_tokens=64, **options)
    assert torch.equal(ids, pair.of_reference(max_new_tokens=64, **options))
    new = pair.new(ids)
    assert new.shape == (len(LENGTHS), 64)
    assert "num_beams" in options or all(len(line.unique()) > 4 for line in new)  # and they say something


@pytest.mark.parametrize("depths", [(3, 1), (1, 3)], ids=str)
def test_halves_of_any_depth(depths, references):
    pair = references("seq2seq", depths=depths)
    assert len(pair.ours.get_encoder().encoder.blocks) == depths[0]
    assert len(blocks_of(pair.ours)) == depths[1]
    for options in ({"max_new_tokens": 64}, {"num_beams": 3, "length_penalty": 2.0}):
        assert torch.equal(pair.of_ours(**options), pair.of_reference(**options))


@kinds
@pytest.mark.parametrize("options", [{}, {"num_beams": 3, "length_penalty": 0.0}], ids=["greedy", "beams"])
def test_a_row_that_has_ended_stays_ended(options, kind, references):
    pair = references(kind)
    ids = pair.of_ours(eos_token_id=pair.end, **options)
    assert torch.equal(ids, pair.of_reference(eos_token_id=pair.end, **options))
    new = pair.new(ids)
    lengths = lengths_until(pair.end, new)
    assert len(set(lengths)) > 1  # some row ended before others
    unended = pair.new(pair.of_ours())
    for line, other, length in zip(new, unended, lengths, strict=True):
        assert (line[length + 1 :] == padding_of(options.get("num_beams", 1), pair.end)).all()
        assert options or torch.equal(line[:length], other[:length])


def test_start_end_and_padding_come_from_the_configuration(references):
    """A model that is made, not opened, has no generation_config.json."""
    end = references("seq2seq").end
    fields = {"is_encoder_decoder": True, "decoder_start_token_id": 7, "eos_token_id": end, "pad_token_id": 3}
    model = randomise(ScratchBertForConditionalGeneration(tiny_config(**fields))).eval()
    ids = model.generate(**inputs_of("seq2seq"), max_new_tokens=12)
    assert (ids[:, 0] == 7).all()
    assert model.generation_config.eos_token_id == end
    first = ids[0, 3].item()
    model.generation_config.eos_token_id = first
    again = model.generate(**inputs_of("seq2seq"), max_new_tokens=12)
    length = lengths_until(first, again)[0]
    assert (again[0, length + 1 :] == 3).all()


# ---------------------------------------------------------------------------------------------------------------------
# The cache changes nothing, and neither does the rest of the batch


VARIANTS = {
    "as BERT": {},
    "pre-norm": {"norm_first": True},
    "sinusoidal": {"position_embedding_type": "sinusoidal"},
    "shared": {"tie_encoder_decoder": True},
    "of their own": {"share_embeddings": False, "num_decoder_layers": 1},
}


@pytest.fixture(scope="module")
def variants():
    """Makes a model of float64, where no rounding decides between two words. Most have no reference."""
    made = {}

    def make(kind, variant):
        if (kind, variant) not in made:
            fields = {"max_position_embeddings": LIMIT, "decoder_start_token_id": START, **VARIANTS[variant]}
            if kind == "seq2seq":
                model = ScratchBertForConditionalGeneration(tiny_config(is_encoder_decoder=True, **fields))
            else:
                fields |= {"is_decoder": True, "add_cross_attention": kind == "cross-attention"}
                model = ScratchBertForCausalLM(tiny_config(**fields))
            made[kind, variant] = randomise(model, seed=2).double().eval()
        return made[kind, variant]

    return make


@settings(max_examples=24)
@given(
    st.sampled_from(KINDS),
    st.sampled_from(sorted(VARIANTS)),
    st.lists(st.integers(1, 12), min_size=1, max_size=4),
    st.sampled_from([1, 3]),
    st.integers(0, 2**32 - 1),
)
def test_neither_the_cache_nor_the_rest_of_the_batch_changes_a_row(variants, kind, variant, lengths, beams, seed):
    model, inputs = variants(kind, variant), as_doubles(inputs_of(kind, lengths, seed=seed))
    options = {"num_beams": beams, "max_new_tokens": 12}
    ids = run(model, inputs, **options)
    assert torch.equal(ids, run(model, inputs, use_cache=False, **options))
    end = new_part(ids, inputs, kind)[0, 5].item()
    together = new_part(run(model, inputs, eos_token_id=end, **options), inputs, kind)
    for number in range(len(lengths)):
        one = row(inputs, number)
        alone = new_part(run(model, one, eos_token_id=end, **options), one, kind)[0]
        assert torch.equal(together[number, : len(alone)], alone)
        assert (together[number, len(alone) :] == padding_of(beams, end)).all()


@kinds
@pytest.mark.parametrize("options", [{}, SAMPLING, {"num_beams": 3}], ids=["greedy", "sampling", "beams"])
def test_a_cache_of_any_make_gives_the_same(options, kind, references):
    pair = references(kind)
    ids = pair.of_ours(**options)
    config = pair.ours.config.get_text_config(decoder=True)
    static = StaticCache(config, max_cache_len=LIMIT)
    if kind == "seq2seq":
        static = EncoderDecoderCache(static, StaticCache(config, max_cache_len=max(LENGTHS)))
    for given_cache in (DynamicCache(), empty_cache(kind, pair.ours), static):
        assert torch.equal(pair.of_ours(past_key_values=given_cache, **options), ids)
        assert given_cache.get_seq_length() == ids.shape[1] - 1
    for implementation in ("dynamic", "static"):
        assert torch.equal(pair.of_ours(cache_implementation=implementation, **options), ids)


@pytest.mark.parametrize("kind", ["seq2seq", "cross-attention"])
@pytest.mark.parametrize("options", [{"num_beams": 4}, {"num_beams": 3, **SAMPLING}], ids=["beams", "beam sampling"])
def test_beams_may_leave_the_encoders_keys_in_place(options, kind, references, monkeypatch):
    """Ours moves the self-attention's cache alone; transformers' own reordering moves both."""
    pair = references(kind)
    inputs = inputs_of(kind, [30, 60, 11] if kind == "seq2seq" else LENGTHS)
    options |= {"eos_token_id": pair.end, "max_new_tokens": 40}
    ids = run(pair.ours, inputs, **options)
    moved = []

    def move_everything(self, past_key_values, beam_idx):
        moved.append(not torch.equal(beam_idx, torch.arange(len(beam_idx))))
        past_key_values.reorder_cache(beam_idx)
        return past_key_values

    monkeypatch.setattr(type(pair.ours), "_reorder_cache", move_everything)
    assert torch.equal(run(pair.ours, inputs, **options), ids)
    assert sum(moved) > 5


# ---------------------------------------------------------------------------------------------------------------------
# Other ways to decode


def draft_of(model):
    """A model that mostly says what `model` would."""
    draft = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter += 0.02 * torch.randn(parameter.shape, generator=generator)
    return draft


@kinds
@pytest.mark.parametrize("number", range(len(LENGTHS)))
def test_a_draft_models_help_changes_nothing(number, kind, references):
    pair = references(kind)
    one = row(pair.inputs, number)
    one.pop("token_type_ids")
    draft = draft_of(pair.ours)
    for options in ({}, {"eos_token_id": pair.end}):
        with recorded(pair.ours) as calls:
            ids = run(pair.ours, one, assistant_model=draft, max_new_tokens=40, **options)
        assert torch.equal(ids, run(pair.ours, one, max_new_tokens=40, **options))
        assert len(calls) < new_part(ids, one, kind).shape[1]  # some of the drafts were taken


def test_a_draft_model_may_be_of_another_size(references):
    large, small = references("causal", depths=(3, 3)), references("causal", depths=(1, 1))
    one = row(large.inputs, 0)
    ids = run(large.ours, one, assistant_model=small.ours, max_new_tokens=40)
    assert torch.equal(ids, run(large.ours, one, max_new_tokens=40))
    sampled = run(large.ours, one, assistant_model=small.ours, max_new_tokens=40, **SAMPLING)
    assert sampled.shape == ids.shape


@since("5.17", "a prompt can be looked up without an end token")
@pytest.mark.parametrize("kind", ["causal", "seq2seq"])
def test_looking_the_draft_up_in_the_prompt_changes_nothing(kind, references):
    pair = references(kind)
    one = row(pair.inputs, 0)
    with recorded(pair.ours) as calls:
        ids = run(pair.ours, one, prompt_lookup_num_tokens=4, max_new_tokens=60)
    assert torch.equal(ids, run(pair.ours, one, max_new_tokens=60))
    assert len(calls) < 60


class Collected(BaseStreamer):
    def __init__(self):
        self.parts, self.has_ended = [], False

    def put(self, value):
        self.parts.append(value)

    def end(self):
        self.has_ended = True


@kinds
@pytest.mark.parametrize("options", [{}, SAMPLING], ids=["greedy", "sampling"])
def test_streamed_ids_are_those_returned(options, kind, references):
    pair = references(kind)
    streamer = Collected()
    ids = pair.of_ours(streamer=streamer, eos_token_id=pair.end, **options)
    first, *others = streamer.parts
    assert streamer.has_ended
    assert torch.equal(torch.cat([first, torch.stack(others, dim=1)], dim=1), ids)
    assert torch.equal(ids, pair.of_ours(eos_token_id=pair.end, **options))


class StopAtMultiplesOf7(StoppingCriteria):
    """Row by row."""

    def __call__(self, input_ids, scores, **kwargs):
        return (input_ids[:, -1] % 7 == 0) & (input_ids[:, -1] != PAD)


@kinds
def test_a_stopping_criterion_of_ones_own(kind, references):
    pair = references(kind)
    options = {"stopping_criteria": StoppingCriteriaList([StopAtMultiplesOf7()]), "eos_token_id": VOCABULARY - 1}
    options["max_new_tokens"] = 60
    ids = pair.of_ours(**options)
    assert torch.equal(ids, pair.of_reference(**options))
    new = pair.new(ids)
    stops = [[*(token % 7 == 0 and token != PAD for token in line), True].index(True) for line in new.tolist()]
    assert len(set(stops)) > 1
    for line, stop in zip(new, stops, strict=True):
        assert (line[stop + 1 :] == PAD).all()


@kinds
def test_when_time_is_up(kind, references):
    pair = references(kind)
    ids = pair.of_ours(max_time=0.0)
    assert torch.equal(pair.new(ids), pair.new(pair.of_ours())[:, :1])


def test_what_the_encoder_said_before_spares_its_pass(references):
    pair = references("seq2seq")
    given_outputs = pair.ours.get_encoder()(**pair.inputs)
    mask = {"attention_mask": pair.inputs["attention_mask"]}
    for options in ({}, {"num_beams": 3}, {"num_return_sequences": 2, **SAMPLING}):
        ids = pair.of_ours(**options)
        with recorded(pair.ours.get_encoder()) as calls:
            outputs = BaseModelOutput(given_outputs.last_hidden_state)
            assert torch.equal(run(pair.ours, mask, encoder_outputs=outputs, **options), ids)
        assert not calls
    # Where the outputs are a tuple, transformers asks the ids how many rows there are.
    with recorded(pair.ours.get_encoder()) as calls:
        as_tuple = (given_outputs.last_hidden_state,)
        assert torch.equal(pair.of_ours(encoder_outputs=as_tuple), pair.of_ours(encoder_outputs=given_outputs))
        pair.ours(**pair.inputs, encoder_outputs=as_tuple, decoder_input_ids=words(2))
    assert not calls


@kinds
@pytest.mark.parametrize("options", [{}, {"num_beams": 3}], ids=["greedy", "beams"])
def test_embeddings_in_place_of_ids(options, kind, references):
    pair = references(kind)
    inputs = dict(pair.inputs)
    inputs["inputs_embeds"] = pair.ours.get_input_embeddings()(inputs.pop("input_ids"))
    ids = run(pair.ours, inputs, **options)
    expected = pair.of_ours(**options)
    assert torch.equal(ids, expected if kind == "seq2seq" else pair.new(expected))


PROMPTS = ragged((4, 2, 1, 3), "left", seed=5)


def decoder_prompts():
    """Left-padded, each row's first token the start token, and what goes with them."""
    mask = PROMPTS["attention_mask"]
    positions = (mask.cumsum(dim=1) - 1).clamp(min=0)
    ids = PROMPTS["input_ids"].masked_fill((positions == 0) & mask.bool(), START)
    return {"decoder_input_ids": ids, "decoder_attention_mask": mask, "decoder_position_ids": positions}


@pytest.mark.parametrize("options", [{}, {"use_cache": False}], ids=["cache", "no cache"])
def test_a_ragged_batch_of_decoder_prompts_is_its_rows_one_by_one(options, references):
    pair = references("seq2seq")
    prompts = decoder_prompts()
    together = pair.of_ours(**prompts, **options)[:, 4:]
    for number, length in enumerate(prompts["decoder_attention_mask"].sum(dim=1)):
        one = row(pair.inputs, number)
        one["decoder_input_ids"] = prompts["decoder_input_ids"][number : number + 1, -length:]
        assert torch.equal(run(pair.ours, one)[0, length:], together[number])
        assert torch.equal(run(pair.reference, one)[0, length:], together[number])
    positions = prompts.pop("decoder_position_ids")  # which follow from the mask
    assert torch.equal(pair.of_ours(**prompts, **options)[:, 4:], together)
    assert not torch.equal(pair.of_ours(**prompts, decoder_position_ids=positions + 1, **options)[:, 4:], together)


def test_a_decoder_prompt_gets_the_start_token_that_it_lacks(references):
    pair = references("seq2seq")
    prompt = torch.tensor([[5, 6, 7], [8, 9, 10], [11, 12, 13], [14, 15, 16]])
    with_start = torch.cat([torch.full((4, 1), START), prompt], dim=1)
    ids = pair.of_ours(decoder_input_ids=prompt)
    assert torch.equal(ids, pair.of_ours(decoder_input_ids=with_start))
    assert torch.equal(ids, pair.of_reference(decoder_input_ids=prompt))
    assert torch.equal(ids[:, :4], with_start)


@kinds
def test_goes_on_from_a_cache(kind, references):
    pair = references(kind)
    inputs = dict(pair.inputs)
    inputs.pop("token_type_ids")
    whole = run(pair.ours, inputs)
    begun = run(pair.ours, inputs, max_new_tokens=10, return_dict_in_generate=True)
    assert begun.past_key_values.get_seq_length() == begun.sequences.shape[1] - 1
    if kind == "seq2seq":
        inputs["decoder_input_ids"] = begun.sequences
    else:
        inputs["input_ids"] = begun.sequences
        inputs["attention_mask"] = torch.cat([inputs["attention_mask"], torch.ones(4, 10, dtype=torch.long)], dim=1)
    with recorded(pair.ours) as calls:
        ids = run(pair.ours, inputs, past_key_values=begun.past_key_values, max_new_tokens=NEW - 10)
    assert torch.equal(ids, whole)
    assert {call[2]["decoder_input_ids" if kind == "seq2seq" else "input_ids"].shape[1] for call in calls} == {1}


@pytest.mark.parametrize("kind", ["causal", "cross-attention"])
def test_a_prompt_in_pieces(kind, references):
    pair = references(kind)
    inputs = {name: tensor for name, tensor in pair.inputs.items() if name != "token_type_ids"}
    assert torch.equal(run(pair.ours, inputs, prefill_chunk_size=4), run(pair.ours, inputs))


def test_guidance(references):
    pair = references("causal")
    one = row(pair.inputs, 0)
    ids = run(pair.ours, one, guidance_scale=1.5)
    assert torch.equal(ids, run(pair.reference, one, guidance_scale=1.5))
    assert not torch.equal(ids, run(pair.ours, one))


RETURNED = {
    "return_dict_in_generate": True,
    "output_scores": True,
    "output_logits": True,
    "output_attentions": True,
    "output_hidden_states": True,
}


@kinds
@pytest.mark.parametrize("options", [{}, {"num_beams": 3}], ids=["greedy", "beams"])
def test_everything_that_generate_returns_is_the_references(options, kind, references):
    pair, steps = references(kind, attention="eager"), 6
    pair = replace(pair, inputs=inputs_of(kind, [5, 5, 5]))  # what is returned of padding means nothing
    options = {**RETURNED, "max_new_tokens": steps, **options}
    ours, reference = pair.of_ours(**options), pair.of_reference(**options)
    assert type(ours) is type(reference)
    assert list(ours) == list(reference)
    assert torch.equal(ours.sequences, reference.sequences)

    def flat(value):
        return [tensor for part in value for tensor in flat(part)] if isinstance(value, tuple) else [value]

    for name in set(ours) - {"sequences", CACHE}:
        if name in ("scores", "logits") or "decoder" in name or kind != "seq2seq":
            assert name.startswith(("sequences_", "beam_")) or len(ours[name]) == steps, name
        for mine, theirs in zip(flat(ours[name]), flat(reference[name]), strict=True):
            assert_close(mine, theirs, rtol=0, atol=1e-4, msg=lambda text, name=name: f"{name}: {text}")


def test_attention_maps_come_back_under_any_kernel(references):
    """Under sdpa the reference leaves them out."""
    ours, eager = (
        references("seq2seq", attention=attention).of_ours(**RETURNED, max_new_tokens=4)
        for attention in ("sdpa", "eager")
    )
    for name in ("encoder_attentions", "decoder_attentions", "cross_attentions"):
        assert_close(ours[name], eager[name], rtol=0, atol=1e-5)
    assert [tuple(step[0].shape) for step in ours.decoder_attentions] == [(4, 4, 1, keys) for keys in (1, 2, 3, 4)]
    assert {tuple(step[0].shape) for step in ours.cross_attentions} == {(4, 4, 1, max(LENGTHS))}


def test_attention_maps_of_a_prompt_look_back_only(references):
    """Without padding, sdpa needs no mask; the formula that gives the maps does."""
    pair = references("causal")
    maps = run(pair.ours, row(pair.inputs, 0), **RETURNED).attentions[0][0]
    assert torch.equal(maps > 0, torch.ones(9, 9).tril().bool().expand(1, 4, 9, 9))


@kinds
def test_a_beams_score_is_the_mean_of_its_tokens(kind, references):
    """Also computed by one pass over the finished sequence, with neither beams nor cache."""
    pair = references(kind)
    found = pair.of_ours(num_beams=3, return_dict_in_generate=True, output_scores=True, max_new_tokens=8)
    inputs = dict(pair.inputs)
    if kind == "seq2seq":
        inputs["decoder_input_ids"] = found.sequences
    else:
        new = torch.ones(4, 8, dtype=torch.long)
        mask = torch.cat([inputs["attention_mask"], new], dim=1)
        types = torch.cat([inputs["token_type_ids"], inputs["token_type_ids"][:, -1:].expand(4, 8)], dim=1)
        inputs |= {"input_ids": found.sequences, "attention_mask": mask, "token_type_ids": types}
        inputs["position_ids"] = (mask.cumsum(dim=1) - 1).clamp(min=0)
    with torch.no_grad():
        probabilities = pair.ours(**inputs).logits[:, -9:-1].log_softmax(dim=-1)
    own = probabilities.gather(2, pair.new(found.sequences)[:, -8:, None]).mean(dim=(1, 2))
    assert_close(own, found.sequences_scores, rtol=0, atol=1e-5)


@kinds
@pytest.mark.parametrize("options", [{}, {"num_beams": 3}], ids=["greedy", "beams"])
def test_half_precision(options, kind, references):
    pair = references(kind)
    options = {**options, "return_dict_in_generate": True, "output_logits": True}
    expected = pair.of_ours(**options)
    half = copy.deepcopy(pair.ours).bfloat16()
    inputs = {name: x.bfloat16() if x.is_floating_point() else x for name, x in pair.inputs.items()}
    found = run(half, inputs, **options)
    assert found.sequences.shape == expected.sequences.shape
    assert_close(found.logits[0], expected.logits[0], rtol=0, atol=0.2)
    filled = found.past_key_values
    assert (filled if kind == "causal" else filled.self_attention_cache).layers[0].keys.dtype == torch.bfloat16


@kinds
@pytest.mark.parametrize("how", ["forward", "generate"])
def test_compiled_decoding_gives_the_same(how, kind, references):
    """One graph for all steps, without a break."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    pair = references(kind, depths=(1, 1))
    model, options = copy.deepcopy(pair.ours), {"cache_implementation": "static"}
    if how == "forward":
        model.forward = torch.compile(model.forward, backend="eager", fullgraph=True, dynamic=False)
    else:
        options["compile_config"] = CompileConfig(fullgraph=True, dynamic=False, mode=None, backend="eager")
        options["compile_config"]._compile_all_devices = True
    assert torch.equal(run(model, pair.inputs, **options), pair.of_ours())
    prefill = 1 if how == "forward" else 0
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == prefill + 1


# ---------------------------------------------------------------------------------------------------------------------
# What a step costs


@kinds
@pytest.mark.parametrize("beams", [1, 3])
def test_a_step_computes_one_position(beams, kind, references):
    """Keys and values of one more token, and the scores of the last alone; the encoder's, once for a generation."""
    pair = references(kind)
    blocks, layers = blocks_of(pair.ours), len(blocks_of(pair.ours))
    prompt = 1 if kind == "seq2seq" else max(LENGTHS)
    own = [part for block in blocks for part in (block.attention.key, block.attention.value)]
    crossed = [] if kind == "causal" else [block.cross_attention for block in blocks]
    with (
        recorded(pair.ours) as passes,
        recorded(pair.ours.lm_head.decoder) as scored,
        recorded(*own) as own_calls,
        recorded(*[part for layer in crossed for part in (layer.key, layer.value)]) as encoder_calls,
    ):
        pair.of_ours(num_beams=beams)
    assert len(passes) == len(scored) == NEW
    assert {call[1][0].shape[1] for call in scored} == {1}
    assert [call[1][0].shape[1] for call in own_calls] == [prompt] * 2 * layers + [1] * 2 * layers * (NEW - 1)
    assert len(encoder_calls) == len({call[0] for call in encoder_calls}) == 2 * len(crossed)


@kinds
def test_the_cache_grows_by_one_a_step(kind, references):
    pair = references(kind)
    prompt = 1 if kind == "seq2seq" else max(LENGTHS)
    sizes = []

    def measure(module, args, kwargs, output):
        filled = output.past_key_values
        parts = [filled] if kind == "causal" else [filled.self_attention_cache, filled.cross_attention_cache]
        sizes.append([{layer.keys.shape[2] for layer in part.layers} for part in parts])

    hook = pair.ours.register_forward_hook(measure, with_kwargs=True)
    pair.of_ours()
    hook.remove()
    assert [size[0] for size in sizes] == [{prompt + step} for step in range(NEW)]
    if kind != "causal":
        states = pair.inputs.get("encoder_hidden_states", pair.inputs["input_ids"])
        assert all(size[1] == {states.shape[1]} for size in sizes)


def test_only_the_last_of_a_decoder_prompt_is_scored(references):
    pair = references("seq2seq")
    with recorded(pair.ours.lm_head.decoder) as calls:
        pair.of_ours(**decoder_prompts())
    assert [call[1][0].shape[1] for call in calls] == [1] * NEW


@kinds
def test_no_cache_is_filled_unasked(kind, references, monkeypatch):
    pair = references(kind)
    expected = pair.of_ours(max_new_tokens=2)
    monkeypatch.delattr(Cache, "update")
    assert torch.equal(pair.of_ours(max_new_tokens=2, use_cache=False), expected)
    labels = pair.inputs["input_ids"]
    assert pair.ours(**pair.inputs, labels=labels, use_cache=True).past_key_values is None
    with pytest.raises(AttributeError, match="update"):
        pair.of_ours(max_new_tokens=2)


def test_the_encoder_runs_once(references):
    pair = references("seq2seq")
    with recorded(pair.ours.get_encoder()) as calls:
        pair.of_ours(num_beams=3)
    assert len(calls) == 1


# ---------------------------------------------------------------------------------------------------------------------
# Text


@pytest.fixture(scope="module")
def tokenizer():
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"word{number}" for number in range(VOCABULARY - 5))]
    return BertTokenizer(vocab={word: number for number, word in enumerate(words)}, padding_side="left")


@since("5.20", "a pipeline does not warn of its own arguments")
def test_a_pipeline_writes_what_the_references_does(tokenizer, references, said, tmp_path):
    pair = references("causal")
    pair.ours.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    prompts = ["word3 word77 word5", "word9"]
    options = {"max_new_tokens": 12, "do_sample": False, "batch_size": 2}
    writer = pipeline("text-generation", model=str(tmp_path), device="cpu")
    texts = writer(prompts, **options)
    assert not said()
    assert type(writer.model) is type(AutoModelForCausalLM.from_pretrained(tmp_path)) is ScratchBertForCausalLM
    references_writer = pipeline("text-generation", model=pair.reference, tokenizer=tokenizer, device="cpu")
    assert texts == references_writer(prompts, **options)
    ids = pair.ours.generate(**tokenizer(prompts[0], return_tensors="pt"), max_new_tokens=12, do_sample=False)
    assert writer(prompts[0], return_tensors=True, **options)[0]["generated_token_ids"] == ids[0].tolist()


# ---------------------------------------------------------------------------------------------------------------------
# What is refused, and what is said then


def without_start(model):
    model = copy.deepcopy(model)
    model.config.decoder_start_token_id = model.generation_config.decoder_start_token_id = None
    return model


def test_no_start_token(references):
    pair = references("seq2seq")
    model = without_start(pair.ours)
    with pytest.raises(ValueError, match=r"config.decoder_start_token_id is None.*cls_token_id.*for training"):
        model(**pair.inputs, labels=torch.full((4, 3), 5))
    with pytest.raises(ValueError, match=r"generation_config.decoder_start_token_id is None.*for generate"):
        run(model, pair.inputs)
    # an argument says it as well
    for name in ("decoder_start_token_id", "bos_token_id"):
        assert torch.equal(run(model, pair.inputs, **{name: START}), pair.of_ours())


def words(length, batch=4):
    return torch.randint(START + 1, VOCABULARY, (batch, length))


@pytest.mark.parametrize("kind", ["seq2seq", "causal"])
def test_a_forward_pass_beyond_the_table_of_positions(kind, references):
    pair = references(kind)
    name, others = ("decoder_input_ids", pair.inputs) if kind == "seq2seq" else ("input_ids", {})
    with pytest.raises(
        ValueError, match=r"81 tokens.* max_position_embeddings is 80\b.*truncation=True.*max_length=80\b"
    ):
        pair.ours(**others, **{name: words(LIMIT + 1)})
    filled = pair.ours(**others, **{name: words(LIMIT - 2)}).past_key_values
    with pytest.raises(ValueError, match=r"3 tokens.* 78 in the cache.* max_position_embeddings is 80\b.*prompt"):
        pair.ours(**others, **{name: words(3)}, past_key_values=filled)
    assert pair.ours(**others, **{name: words(2)}, past_key_values=filled).logits.shape[1] == 2


@kinds
@pytest.mark.parametrize("beams", [1, 2])
def test_generates_as_far_as_the_positions_go(beams, kind, references):
    """The last token needs none: it is not fed back."""
    pair = references(kind)
    prompt = 1 if kind == "seq2seq" else max(LENGTHS)
    fits = LIMIT + 1 - prompt
    ids = pair.of_ours(max_new_tokens=fits, num_beams=beams)
    assert ids.shape[1] == LIMIT + 1
    assert torch.equal(ids, pair.of_reference(max_new_tokens=fits, num_beams=beams))
    message = rf"^max_length is {LIMIT + 2}, {prompt} tokens .*\b{LIMIT + 1}\b.* max_position_embeddings is {LIMIT}\b"
    with pytest.raises(ValueError, match=rf"{message}.* max_new_tokens to {fits}\b"):
        pair.of_ours(max_new_tokens=fits + 1, num_beams=beams)


def test_a_prompt_that_leaves_no_position_is_to_be_shortened(references):
    pair = references("causal")
    message = rf", {LIMIT + 3} tokens .*\b{LIMIT + 1}\b.* max_position_embeddings is {LIMIT}\b.*shorten the prompt\.$"
    with pytest.raises(ValueError, match=message) as caught:
        run(pair.ours, {"input_ids": words(LIMIT + 3)})
    assert "max_new_tokens" not in str(caught.value)  # no number of them would do


@kinds
def test_a_cache_that_is_none(kind, references):
    pair = references(kind)
    inputs = {**pair.inputs, "decoder_input_ids": words(1)} if kind == "seq2seq" else pair.inputs
    for no_cache in (((torch.zeros(4, 4, 1, 8),) * 2,) * 2, []):
        with pytest.raises(
            ValueError, match=rf"^past_key_values is a {type(no_cache).__name__}\b.* Cache\b.*use_cache=True"
        ):
            pair.ours(**inputs, past_key_values=no_cache)


def test_labels_may_be_a_part_of_a_tensor(references):
    pair = references("seq2seq")
    target = words(6)
    loss = pair.ours(**pair.inputs, decoder_input_ids=target[:, :-1], labels=target[:, 1:]).loss
    assert_close(loss, pair.ours(**pair.inputs, decoder_input_ids=target[:, :-1], labels=target[:, 1:].clone()).loss)


@pytest.fixture(scope="module")
def stranger():
    """Makes a decoder of another shape, and gives the cache that it fills for these inputs."""

    def filled(with_encoder, lengths=LENGTHS, encoder_length=9, **fields):
        fields = {"num_hidden_layers": 3, **fields}
        config = tiny_config(is_decoder=True, add_cross_attention=with_encoder, max_position_embeddings=LIMIT, **fields)
        states = torch.randn(len(lengths), encoder_length, config.hidden_size) if with_encoder else None
        model = ScratchBertForCausalLM(config)
        return model(words(5, len(lengths)), encoder_hidden_states=states, use_cache=True).past_key_values

    return filled


# The layers of each cache, and the shape of their keys: sequences, heads, positions, width.
CACHES = {
    "deeper": ({"num_hidden_layers": 4}, 4, (4, 4, 5, 8)),
    "flatter": ({"num_hidden_layers": 1}, 1, (4, 4, 5, 8)),
    "finer heads": ({"num_attention_heads": 8}, 3, (4, 8, 5, 4)),
    "wider heads": ({"hidden_size": 64}, 3, (4, 4, 5, 16)),
    "more heads": ({"hidden_size": 64, "num_attention_heads": 8}, 3, (4, 8, 5, 8)),
    "fewer rows": ({"lengths": (5, 5)}, 3, (2, 4, 5, 8)),
    "more rows": ({"lengths": (5,) * 6}, 3, (6, 4, 5, 8)),
}


@pytest.mark.parametrize("kind", ["seq2seq", "causal"])
@pytest.mark.parametrize(("fields", "layers", "shape"), CACHES.values(), ids=CACHES)
def test_a_cache_of_something_else(fields, layers, shape, kind, references, stranger):
    pair = references(kind, depths=(3, 3))
    model_cache = stranger(kind == "seq2seq", **fields)
    name, others = ("decoder_input_ids", pair.inputs) if kind == "seq2seq" else ("input_ids", {})
    message = rf"^past_key_values has {layers} .*{re.escape(str(shape))}.*expected 3 .*\(4, 4, 5, 8\).*empty cache"
    with pytest.raises(ValueError, match=message):
        pair.ours(**others, **{name: words(1)}, past_key_values=model_cache)
    with pytest.raises(ValueError, match=message):
        run(pair.ours, {**others, name: words(6)}, past_key_values=model_cache)


@pytest.mark.parametrize("length", [7, 11])
def test_a_cache_of_another_source(length, references, stranger):
    pair = references("seq2seq")
    model_cache = stranger(True, encoder_length=length)
    message = (
        rf"^past_key_values .*cross-attention.* 3 .*\(4, 4, {length}, 8\).*expected 3 .*\(4, 4, 9, 8\).*empty cache"
    )
    with pytest.raises(ValueError, match=message):
        pair.ours(**pair.inputs, decoder_input_ids=words(1), past_key_values=model_cache)


def test_a_mask_that_does_not_fit_the_source(references):
    pair = references("seq2seq")
    source = {"input_ids": pair.inputs["input_ids"]}
    seen = {"encoder_outputs": pair.ours.get_encoder()(**source)}
    for given_source in (source, seen):
        for mask, shape in ((torch.ones(4, 7), r"\(4, 7\)"), (torch.ones(3, 9), r"\(3, 9\)")):
            message = rf"^attention_mask .*{shape}.* \(4, 9\)"
            with pytest.raises(ValueError, match=message):
                pair.ours(**given_source, attention_mask=mask, decoder_input_ids=words(2))
            with pytest.raises(ValueError, match=message):
                run(pair.ours, given_source, attention_mask=mask)


def test_a_mask_that_does_not_fit_the_target(references):
    pair = references("seq2seq")
    mask = torch.ones(4, 3, dtype=torch.long)
    with pytest.raises(ValueError, match=r"^attention_mask .*\(4, 3\).* \(4, 5\)"):
        pair.ours(**pair.inputs, decoder_input_ids=words(5), decoder_attention_mask=mask)
    begun = pair.ours(**pair.inputs, decoder_input_ids=words(5))
    with pytest.raises(ValueError, match=r"^attention_mask .*\(4, 3\).* \(4, 6\): 5 .*\b1 "):
        pair.ours(
            **pair.inputs,
            decoder_input_ids=words(1),
            decoder_attention_mask=mask,
            past_key_values=begun.past_key_values,
        )
    with pytest.raises(ValueError, match=r"^attention_mask .*\(4, 4\).* \(4, 6\)"):  # with the start
        pair.of_ours(decoder_input_ids=words(5), decoder_attention_mask=mask)


@pytest.mark.parametrize(
    ("model_class", "fields"),
    [
        (ScratchBertModel, {}),
        (ScratchBertModel, {"is_decoder": True}),
        (ScratchBertSeq2SeqModel, {"is_encoder_decoder": True}),
        (ScratchBertForMaskedLM, {}),
    ],
)
def test_a_model_without_a_head_has_no_generate(model_class, fields):
    model = model_class(tiny_config(**fields))
    assert not hasattr(model, "generate")
    assert not model.can_generate()
    with pytest.raises(AttributeError, match=rf"{model_class.__name__}.*generate"):
        model.generate(words(3))
