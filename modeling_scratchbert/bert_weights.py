"""BERT's names for its tensors, and ours: one table, read in both directions.

It knows names only. `{i}` is a layer's number. Ours stand as in the models with a head, where the encoder is `model`;
BERT's stand as in a `BertFor…` checkpoint. A bare encoder's checkpoint leaves the first part out, on either side.
"""

import re
from functools import cache

BERT_TO_SCRATCHBERT = {
    "bert.embeddings.word_embeddings": "model.embeddings.word_embeddings",
    "bert.embeddings.position_embeddings": "model.embeddings.position_embeddings",
    "bert.embeddings.token_type_embeddings": "model.embeddings.token_type_embeddings",
    "bert.embeddings.LayerNorm": "model.embeddings.norm",
    "bert.encoder.layer.{i}.attention.self.query": "model.encoder.blocks.{i}.attention.query",
    "bert.encoder.layer.{i}.attention.self.key": "model.encoder.blocks.{i}.attention.key",
    "bert.encoder.layer.{i}.attention.self.value": "model.encoder.blocks.{i}.attention.value",
    "bert.encoder.layer.{i}.attention.output.dense": "model.encoder.blocks.{i}.attention.output",
    "bert.encoder.layer.{i}.attention.output.LayerNorm": "model.encoder.blocks.{i}.attention_norm",
    "bert.encoder.layer.{i}.crossattention.self.query": "model.encoder.blocks.{i}.cross_attention.query",
    "bert.encoder.layer.{i}.crossattention.self.key": "model.encoder.blocks.{i}.cross_attention.key",
    "bert.encoder.layer.{i}.crossattention.self.value": "model.encoder.blocks.{i}.cross_attention.value",
    "bert.encoder.layer.{i}.crossattention.output.dense": "model.encoder.blocks.{i}.cross_attention.output",
    "bert.encoder.layer.{i}.crossattention.output.LayerNorm": "model.encoder.blocks.{i}.cross_attention_norm",
    "bert.encoder.layer.{i}.intermediate.dense": "model.encoder.blocks.{i}.feed_forward.intermediate",
    "bert.encoder.layer.{i}.intermediate.intermediate_act_fn": "model.encoder.blocks.{i}.feed_forward.activation",
    "bert.encoder.layer.{i}.output.dense": "model.encoder.blocks.{i}.feed_forward.output",
    "bert.encoder.layer.{i}.output.LayerNorm": "model.encoder.blocks.{i}.feed_forward_norm",
    "bert.pooler.dense": "model.pooler.dense",
    "cls.predictions.transform.dense": "lm_head.dense",
    "cls.predictions.transform.transform_act_fn": "lm_head.activation",
    "cls.predictions.transform.LayerNorm": "lm_head.norm",
    "cls.predictions.decoder": "lm_head.decoder",
    "cls.seq_relationship": "next_sentence_head",
    "classifier": "classifier",
    "qa_outputs": "qa_outputs",
}

# A tensor's last name, and the one that TensorFlow's layer norms gave it, which bert-base-uncased's own file has.
LEAVES = {"weight": "gamma", "bias": "beta"}

# The output bias stands in a BERT checkpoint under either name or both. Where they differ, which only an untied head
# brings about, the twin computes with the decoder's.
OUTPUT_BIAS, OUTPUT_BIAS_ALIAS = "cls.predictions.decoder.bias", "cls.predictions.bias"
OUR_OUTPUT_BIAS = "lm_head.decoder.bias"


# What stands before a tensor's name in either half of an `EncoderDecoderModel` of two BERTs, and in ours. The heads,
# which are the decoder's, have another prefix.
BERT_HALVES = {"encoder.": "model.encoder.", "decoder.bert.": "model.decoder."}
HEADS_OF_DECODER = "decoder."

# The classes whose twins have another name than ours without "Scratch".
OTHER_TWINS = {
    "ScratchBertForCausalLM": "BertLMHeadModel",
    "ScratchBertForConditionalGeneration": "EncoderDecoderModel",
}


def loading_patterns(names_in_file: set[str], encoder: str = "model") -> dict[str, str]:
    r"""Regular expressions for whole names of BERT's, each with our name for the tensor, a layer's number as `\1`: the
    form that `from_pretrained(key_mapping=…)` takes.

    Args:
        names_in_file: the names that the checkpoint has, as far as they are known.
        encoder: what the model calls its encoder, where it is not `model`.
    """
    patterns = _patterns_of_one(r"(?:bert\.)?", f"{encoder}.", "")
    if OUTPUT_BIAS not in names_in_file:
        patterns[f"^{re.escape(OUTPUT_BIAS_ALIAS)}$"] = OUR_OUTPUT_BIAS
    return patterns


def seq2seq_loading_patterns(names_in_file: set[str]) -> dict[str, str]:
    """`loading_patterns` for the checkpoint of an `EncoderDecoderModel` of two BERTs."""
    patterns: dict[str, str] = {}
    for bert, ours in BERT_HALVES.items():
        patterns |= _patterns_of_one(re.escape(bert), ours, re.escape(HEADS_OF_DECODER))
    if HEADS_OF_DECODER + OUTPUT_BIAS not in names_in_file:
        patterns[f"^{re.escape(HEADS_OF_DECODER + OUTPUT_BIAS_ALIAS)}$"] = OUR_OUTPUT_BIAS
    return patterns


def without_half(name: str) -> str:
    """The name, BERT's or ours, that a tensor of an encoder-decoder has in the half that it belongs to, taken by
    itself: `model.decoder.embeddings.…` → `model.embeddings.…`, `decoder.bert.…` → `bert.…`."""
    for bert, ours in BERT_HALVES.items():
        for before, alone in ((bert, "bert."), (ours, "model."), (ours.removeprefix("model."), "model.")):
            rest = name.removeprefix(before)
            if rest != name and rest.startswith(("embeddings.", "encoder.", "pooler.")):
                return alone + rest
    return name.removeprefix(HEADS_OF_DECODER) if name.startswith(HEADS_OF_DECODER + "cls.") else name


def to_scratchbert(name: str) -> str | None:
    """Our name for the tensor that BERT calls `name`, or None if BERT has no such tensor."""
    name = OUTPUT_BIAS if name == OUTPUT_BIAS_ALIAS else name
    for bert, ours in BERT_TO_SCRATCHBERT.items():
        for leaf in LEAVES:
            if match := re.match(_bert_pattern(bert, leaf), name):
                return f"{ours}.{leaf}".replace("{i}", "".join(match.groups()))
    return None


def to_bert(name: str) -> str | None:
    """BERT's name, in today's spelling, for the tensor that we call `name`, or None if BERT has no such tensor."""
    module, _, leaf = name.rpartition(".")
    for bert, ours in BERT_TO_SCRATCHBERT.items():
        if leaf in LEAVES and (match := re.match(f"^{_pattern(ours)}$", module)):
            return f"{bert}.{leaf}".replace("{i}", "".join(match.groups()))
    return None


def canonical_name(name: str, kind: str) -> str | None:
    """Our name, as it stands in a model with a head, for a tensor of a checkpoint: "bert", "scratchbert", or
    "encoder-decoder", an `EncoderDecoderModel` of two BERTs; None if it has none."""
    if kind == "scratchbert":
        in_encoder = name.startswith(("embeddings.", "encoder.", "decoder.", "pooler."))
        return f"model.{name}" if in_encoder else name
    halves = BERT_HALVES if kind == "encoder-decoder" else {}
    for theirs, ours in halves.items():
        if name.startswith(theirs):
            alone = to_scratchbert(f"bert.{name.removeprefix(theirs)}")
            return alone and ours + alone.removeprefix("model.")
    return to_scratchbert(name.removeprefix(HEADS_OF_DECODER if halves else ""))


def name_in_file(name: str, kind: str) -> str | None:
    """The name that the tensor with this canonical name has in a checkpoint of that kind, in today's spelling."""
    if kind == "scratchbert":
        return name
    halves = BERT_HALVES if kind == "encoder-decoder" else {}
    for theirs, ours in halves.items():
        if name.startswith(ours):
            alone = to_bert(f"model.{name.removeprefix(ours)}")
            return alone and theirs + alone.removeprefix("bert.")
    alone = to_bert(name)
    return alone and (HEADS_OF_DECODER if halves else "") + alone


def twin(class_name: str) -> str:
    """The name of the class of BERT's that computes what ours of this name does."""
    return OTHER_TWINS.get(class_name, class_name.removeprefix("Scratch"))


def _patterns_of_one(bert: str, model: str, head: str) -> dict[str, str]:
    """The patterns for one BERT: `bert` and `head` match what stands before the names of its encoder and its heads in
    the file; `model` is what we put before those of the encoder."""
    return {
        _bert_pattern(name, leaf, bert, head): re.sub(r"^model\.", model, f"{ours}.{leaf}").replace("{i}", r"\1")
        for name, ours in BERT_TO_SCRATCHBERT.items()
        for leaf in LEAVES
    }


@cache
def _bert_pattern(module: str, leaf: str, bert: str = r"(?:bert\.)?", head: str = "") -> str:
    in_encoder = module.startswith("bert.")
    before, rest = (bert, module.removeprefix("bert.")) if in_encoder else (head, module)
    return rf"^{before}{_pattern(rest)}\.(?:{leaf}|{LEAVES[leaf]})$"


@cache
def _pattern(module: str) -> str:
    return re.escape(module).replace(re.escape("{i}"), r"(\d+)")
