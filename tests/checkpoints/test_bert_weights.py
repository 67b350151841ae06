"""The table of names, against the names that the `Bert…` classes themselves have."""

import pytest
import transformers
from hypothesis import given
from hypothesis import strategies as st
from transformers.core_model_loading import WeightRenaming, rename_source_key

from modeling_scratchbert import ScratchBertConfig, ScratchBertForConditionalGeneration, ScratchBertModel
from modeling_scratchbert.bert.names import (
    BERT_TO_SCRATCHBERT,
    OUTPUT_BIAS,
    OUTPUT_BIAS_ALIAS,
    TENSORFLOW_NAMES,
    loading_patterns,
    reference_class,
    to_bert,
    to_scratchbert,
)
from support.models import BERTS, OURS, REFERENCES, TINY, random_encoder_decoder

ALIASES = {leaf: alias for alias, leaf in TENSORFLOW_NAMES.items()}
DECODER = {"is_decoder": True, "add_cross_attention": True}
# Each of our models and its reference: every class, and with cross-attention those that may have it.
PAIRS = {
    **{head: (OURS[head], REFERENCES[head], {}) for head in BERTS},
    "Model, decoder": (ScratchBertModel, transformers.BertModel, DECODER),
    "ForCausalLM, decoder": (OURS["ForCausalLM"], REFERENCES["ForCausalLM"], DECODER),
    "an activation with a weight": (OURS["ForPreTraining"], REFERENCES["ForPreTraining"], {"hidden_act": "prelu"}),
}

BERT_NAMES = st.builds(
    lambda module, layer, leaf: f"{module.replace('{i}', str(layer))}.{leaf}",
    st.sampled_from(sorted(BERT_TO_SCRATCHBERT)),
    st.integers(0, 2000),
    st.sampled_from(sorted(TENSORFLOW_NAMES.values())),
)


def bare(name: str, prefix: str) -> str:
    return name.removeprefix(f"{prefix}.")


def renamed(names: set[str], beside: str | None = None) -> dict[str, str]:
    """What `from_pretrained` makes of the names in a checkpoint, which also has `beside`: transformers' own code
    searches, substitutes, and applies one pattern after the other."""
    patterns = loading_patterns(names | {beside} if beside else names)
    renamings = [WeightRenaming(source, target) for source, target in patterns.items()]
    return {name: rename_source_key(name, renamings, [])[0] for name in names}


@pytest.mark.parametrize("kind", PAIRS)
def test_the_table_covers_exactly_the_tensors_of_both_models(kind):
    ours, reference, fields = PAIRS[kind]
    ours = ours(ScratchBertConfig(**TINY, **fields)).state_dict()
    theirs = reference(transformers.BertConfig(**TINY, **fields)).state_dict()
    theirs.pop(OUTPUT_BIAS_ALIAS, None)  # the same tensor as the decoder's bias
    headless = kind.startswith("Model")

    mapped = {name: to_scratchbert(name) for name in theirs}
    assert None not in mapped.values()
    if headless:
        mapped = {name: bare(ours_name, "model") for name, ours_name in mapped.items()}
    assert len(set(mapped.values())) == len(mapped)
    assert set(mapped.values()) == set(ours)
    assert {theirs[name].shape == ours[mapped[name]].shape for name in theirs} == {True}

    back = {name: to_bert(f"model.{name}" if headless else name) for name in ours}
    assert {bare(name, "bert") if headless else name for name in back.values()} == set(theirs)


def test_the_table_is_one_to_one():
    assert len(set(BERT_TO_SCRATCHBERT.values())) == len(BERT_TO_SCRATCHBERT)


def test_the_table_has_no_line_that_no_model_uses():
    used = set()
    for ours, _, fields in PAIRS.values():
        names = ours(ScratchBertConfig(**{**TINY, "num_hidden_layers": 1}, **fields)).state_dict()
        used |= {name.rpartition(".")[0].replace("blocks.0", "blocks.{i}") for name in names}
    used |= {f"model.{name}" for name in used}
    assert set(BERT_TO_SCRATCHBERT.values()) <= used


@given(BERT_NAMES)
def test_there_and_back(name):
    ours = to_scratchbert(name)
    assert to_bert(ours) == name
    assert to_scratchbert(to_bert(ours)) == ours


@given(BERT_NAMES)
def test_all_spellings_of_a_name_mean_the_same(name):
    module, _, leaf = name.rpartition(".")
    spellings = {name, bare(name, "bert"), f"{module}.{ALIASES[leaf]}", bare(f"{module}.{ALIASES[leaf]}", "bert")}
    assert {to_scratchbert(spelling) for spelling in spellings} == {to_scratchbert(name)}


@given(BERT_NAMES, st.booleans(), st.booleans())
def test_from_pretrained_renames_as_the_table_says(name, prefix, tensorflow):
    module, _, leaf = name.rpartition(".")
    spelling = f"{module}.{ALIASES[leaf]}" if tensorflow else name
    spelling = spelling if prefix else bare(spelling, "bert")
    ours = to_scratchbert(name)
    # A second time, or on a checkpoint of ours, there is nothing left to rename.
    assert renamed({spelling, ours}) == {spelling: ours, ours: ours}


def test_the_output_bias_has_two_names_and_the_decoder_s_goes_first():
    ours = "lm_head.decoder.bias"
    assert to_scratchbert(OUTPUT_BIAS_ALIAS) == to_scratchbert(OUTPUT_BIAS) == ours
    assert to_bert(ours) == OUTPUT_BIAS
    assert renamed({OUTPUT_BIAS_ALIAS}) == {OUTPUT_BIAS_ALIAS: ours}
    assert renamed({OUTPUT_BIAS}) == {OUTPUT_BIAS: ours}
    assert renamed({OUTPUT_BIAS, OUTPUT_BIAS_ALIAS}) == {OUTPUT_BIAS: ours, OUTPUT_BIAS_ALIAS: OUTPUT_BIAS_ALIAS}


@pytest.mark.parametrize("head", BERTS)
def test_the_canonical_name_is_ours_as_in_a_model_with_a_head(head):
    ours = OURS[head](ScratchBertConfig(**TINY)).state_dict()
    wanted = {f"model.{name}" if head == "Model" else name for name in ours}
    assert {to_scratchbert(name, "scratchbert") for name in ours} == wanted
    theirs = set(REFERENCES[head](transformers.BertConfig(**TINY)).state_dict()) - {OUTPUT_BIAS_ALIAS}
    assert {to_scratchbert(name, "bert") for name in theirs} == wanted
    for name in wanted:
        assert to_scratchbert(to_bert(name, "bert"), "bert") == name
        assert to_bert(name, "scratchbert") == name
    assert to_scratchbert("something.else", "bert") is None
    assert to_bert("something.else", "bert") is None


@pytest.mark.parametrize("head", OURS)
def test_the_reference_of_a_class_is_known_by_name(head):
    name = OURS[head].__name__
    if head == "Seq2SeqModel":
        assert not hasattr(transformers, reference_class(name))  # transformers has no such class without a head
    else:
        assert reference_class(name) == REFERENCES.get(head, transformers.EncoderDecoderModel).__name__


# --- two halves


OF_A_DECODER = "decoder.bert.embeddings.LayerNorm.weight"  # by which the checkpoint of two BERTs is recognised


def test_every_tensor_of_two_berts_has_its_place():
    """And two that differ have two."""
    config = ScratchBertConfig(**TINY, is_encoder_decoder=True, share_embeddings=False)
    ours = set(ScratchBertForConditionalGeneration(config).state_dict())
    theirs = set(random_encoder_decoder().state_dict())
    new_names = renamed(theirs | ours)
    unused = {name for name in theirs if new_names[name] not in ours}
    poolers = {f"encoder.pooler.dense.{leaf}" for leaf in ALIASES}
    assert unused == poolers | {"decoder." + OUTPUT_BIAS_ALIAS}  # the other of the bias's two names
    assert {new_names[name] for name in theirs - unused} == ours
    assert len(theirs - unused) == len(ours)
    # A second time, or on a checkpoint of ours, there is nothing left to rename.
    assert all(new_names[name] == name for name in ours)
    # Name by name it is the same
    for name in theirs - unused:
        assert to_scratchbert(name, "encoder-decoder") == new_names[name]
        assert to_bert(new_names[name], "encoder-decoder") == name
    assert {to_scratchbert(name, "scratchbert") for name in ours} == ours
    bare_names = {name.removeprefix("model.") for name in ours}
    assert {to_scratchbert(name, "scratchbert") for name in bare_names} == ours


OF_TWO_BERTS = st.tuples(st.sampled_from(["encoder", "decoder"]), BERT_NAMES).filter(
    lambda drawn: drawn[1].startswith(("bert.", "cls.predictions.")[: 1 if drawn[0] == "encoder" else 2])
)


@given(OF_TWO_BERTS, st.booleans())
def test_a_tensor_of_either_half_is_renamed_as_in_one_bert(drawn, tensorflow):
    half, name = drawn
    alone = to_scratchbert(name)
    is_head = not name.startswith("bert.")
    before = "encoder." if half == "encoder" else "decoder." if is_head else "decoder.bert."
    spelling, wanted = before + bare(name, "bert"), alone.replace("model.", f"model.{half}.")
    assert to_scratchbert(spelling, "encoder-decoder") == wanted
    assert to_bert(wanted, "encoder-decoder") == spelling
    if tensorflow:
        module, _, leaf = spelling.rpartition(".")
        spelling = f"{module}.{ALIASES[leaf]}"
    assert renamed({spelling}, beside=OF_A_DECODER) == {spelling: wanted}


@pytest.mark.parametrize(
    "names",
    [{OUTPUT_BIAS_ALIAS}, {OUTPUT_BIAS}, {OUTPUT_BIAS, OUTPUT_BIAS_ALIAS}],
    ids=["the old name", "the new name", "both"],
)
def test_the_decoder_s_output_bias_has_two_names_too(names):
    names = {"decoder." + name for name in names}
    new_names = renamed(names, beside=OF_A_DECODER)
    assert list(new_names.values()).count("lm_head.decoder.bias") == 1
    if len(names) == 2:
        assert new_names["decoder." + OUTPUT_BIAS] == "lm_head.decoder.bias"


@pytest.mark.parametrize(
    "name",
    [
        "",
        "weight",
        "bert",
        "bert.pooler.dense",
        "bert.pooler.dense.weights",
        "bert.pooler.dense.weight.0",
        "xbert.pooler.dense.weight",
        "bert.bert.pooler.dense.weight",
        "module.bert.pooler.dense.weight",
        "roberta.embeddings.word_embeddings.weight",
        "bert.embeddings.position_ids",
        "bert.encoder.layer.attention.self.query.weight",
        "bert.encoder.layer.x.attention.self.query.weight",
        "bert.encoder.layer.-1.attention.self.query.weight",
        "bert.encoder.layer.0.attention.self.distance_embedding.weight",
        "bert.encoder.layer.0.attentionXself.query.weight",
        "bert.cls.predictions.decoder.weight",
        "lm_head.dense.weight",
        "model.encoder.blocks.0.attention.query.weight",
    ],
)
def test_what_is_no_tensor_of_bert_gets_no_name(name):
    assert to_scratchbert(name) is None


@pytest.mark.parametrize(
    "name",
    [
        "",
        "model.encoder.final_norm.weight",
        "model.encoder.blocks.0.attention.query",
        "model.encoder.blocks.x.attention.query.weight",
        "model.encoder.blocks.0.attention.query.gamma",
        "my_head.weight",
        "classifier.0.weight",
        "lm_head.dense_2.weight",
        "model.pooler.dense.extra.weight",
        "my.classifier.weight",
        "bert.pooler.dense.weight",
    ],
)
def test_what_bert_has_no_tensor_for_gets_no_name(name):
    assert to_bert(name) is None
