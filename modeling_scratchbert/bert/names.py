"""The names of BERT's tensors and ours: one table, read in both directions. It holds names, no modules.

`{i}` is the number of a layer. Names are those of a model with a head: BERT's encoder is `bert`, ours is `model`. The
checkpoint of a bare encoder leaves this first part out. The kinds of checkpoints are "bert", "encoder-decoder" (an
`EncoderDecoderModel` of two BERTs) and "scratchbert".
"""

import re

# The modules of a layer. Those of cross-attention differ from self-attention's in the beginning of their names.
LAYER = {
    "attention.self.query": "attention.query",
    "attention.self.key": "attention.key",
    "attention.self.value": "attention.value",
    "attention.output.dense": "attention.output",
    "attention.output.LayerNorm": "attention_norm",
    "intermediate.dense": "feed_forward.intermediate",
    "intermediate.intermediate_act_fn": "feed_forward.activation",
    "output.dense": "feed_forward.output",
    "output.LayerNorm": "feed_forward_norm",
}
LAYER |= {f"cross{bert}": f"cross_{ours}" for bert, ours in LAYER.items() if bert.startswith("attention.")}

BERT_TO_SCRATCHBERT = {
    "bert.embeddings.word_embeddings": "model.embeddings.word_embeddings",
    "bert.embeddings.position_embeddings": "model.embeddings.position_embeddings",
    "bert.embeddings.token_type_embeddings": "model.embeddings.token_type_embeddings",
    "bert.embeddings.LayerNorm": "model.embeddings.norm",
    "bert.pooler.dense": "model.pooler.dense",
    **{f"bert.encoder.layer.{{i}}.{bert}": f"model.encoder.blocks.{{i}}.{ours}" for bert, ours in LAYER.items()},
    "cls.predictions.transform.dense": "lm_head.dense",
    "cls.predictions.transform.transform_act_fn": "lm_head.activation",
    "cls.predictions.transform.LayerNorm": "lm_head.norm",
    "cls.predictions.decoder": "lm_head.decoder",
    "cls.seq_relationship": "next_sentence_head",
    "classifier": "classifier",
    "qa_outputs": "qa_outputs",
}

# The last part of a name. Checkpoints converted from TensorFlow, such as bert-base-uncased, have gamma and beta.
TENSORFLOW_NAMES = {"gamma": "weight", "beta": "bias"}

# A BERT checkpoint has the output bias under one of these names or both. They can differ if the head is not tied to the
# embeddings; BERT then computes with the first.
OUTPUT_BIAS, OUTPUT_BIAS_ALIAS = "cls.predictions.decoder.bias", "cls.predictions.bias"

# An `EncoderDecoderModel` has its heads in the decoder.
SEQ2SEQ = {f"decoder.{bert}": ours.replace("model.", "model.decoder.") for bert, ours in BERT_TO_SCRATCHBERT.items()}
SEQ2SEQ |= {
    bert.replace("bert.", "encoder."): ours.replace("model.", "model.encoder.")
    for bert, ours in BERT_TO_SCRATCHBERT.items()
    if bert.startswith("bert.")
}
TABLES = {"bert": BERT_TO_SCRATCHBERT, "encoder-decoder": SEQ2SEQ}
REVERSED_TABLES = {kind: {ours: bert for bert, ours in table.items()} for kind, table in TABLES.items()}

# The references whose names are not ours with "Bert" in place of "ScratchBert".
OTHER_REFERENCES = {"ForCausalLM": "BertLMHeadModel", "ForConditionalGeneration": "EncoderDecoderModel"}


def reference_class(class_name: str) -> str:
    """Return the name of the class of transformers that computes what our class `class_name` computes."""
    return OTHER_REFERENCES.get(class_name.removeprefix("ScratchBert"), class_name.removeprefix("Scratch"))


def loading_patterns(names_in_file: set[str], encoder: str = "model") -> dict[str, str]:
    r"""Return regular expressions for whole names of BERT's tensors, each with our name, in which `\1` is the number of
    the layer: the form of `from_pretrained(key_mapping=…)`.

    Args:
        names_in_file: the names in the checkpoint, as far as they are known.
        encoder: the name of the encoder in the model.
    """
    is_seq2seq = any(name.startswith("decoder.bert.") for name in names_in_file)
    kind, head = ("encoder-decoder", "decoder.") if is_seq2seq else ("bert", "")
    patterns = {}
    for bert, ours in TABLES[kind].items():
        prefix = r"(?:bert\.)?" if bert.startswith("bert.") else ""  # which a bare encoder leaves out
        module = prefix + re.escape(bert.removeprefix("bert.")).replace(r"\{i\}", r"(\d+)")
        ours = re.sub(r"^model\.", f"{encoder}.", ours).replace("{i}", r"\1")
        for alias, leaf in TENSORFLOW_NAMES.items():
            patterns[rf"^{module}\.(?:{leaf}|{alias})$"] = f"{ours}.{leaf}"
    if head + OUTPUT_BIAS not in names_in_file:
        patterns[f"^{re.escape(head + OUTPUT_BIAS_ALIAS)}$"] = "lm_head.decoder.bias"
    return patterns


def to_scratchbert(name: str, kind: str = "bert") -> str | None:
    """Return our name for the tensor `name` of a checkpoint of this kind, or None if we have no such tensor."""
    if kind == "scratchbert":
        return f"model.{name}" if name.startswith(("embeddings.", "encoder.", "decoder.", "pooler.")) else name
    module, _, leaf = name.replace(OUTPUT_BIAS_ALIAS, OUTPUT_BIAS).rpartition(".")
    return _renamed(f"{module}.{TENSORFLOW_NAMES.get(leaf, leaf)}", "bert.", TABLES[kind])


def to_bert(name: str, kind: str = "bert") -> str | None:
    """Return the name, in today's spelling, that our tensor `name` has in a checkpoint of this kind, or None."""
    return name if kind == "scratchbert" else _renamed(name, "model.", REVERSED_TABLES[kind])


def _renamed(name: str, encoder: str, table: dict[str, str]) -> str | None:
    """Look up a name, which may lack the name of the encoder."""
    module, _, leaf = name.rpartition(".")
    layer, module = "".join(re.findall(r"\.(\d+)\.", module)), re.sub(r"\.\d+\.", ".{i}.", module)
    renamed = table.get(module) or table.get(encoder + module)
    is_known = renamed is not None and leaf in TENSORFLOW_NAMES.values()
    return f"{renamed}.{leaf}".replace("{i}", layer) if is_known else None


def check_tensor_names(names: set[str], source) -> None:
    """Raise ValueError if the tensors of `source` belong to a model that ScratchBert does not compute, or if loading
    them would leave every weight random."""
    # With or without the name of the encoder.
    known = {name for name in names if any(to_scratchbert(name, kind) or to_bert(name, kind) for kind in TABLES)}
    in_layer = re.compile(r"((bert|encoder|decoder\.bert)\.)?encoder\.layer\.\d+\.")
    foreign = list(filter(in_layer.match, names - known))
    if foreign or not known:
        found = f"the tensor {min(foreign or names)!r}" if names else "no tensors"
        raise ValueError(
            f"{source} has {found}; expected the tensors of a BERT with absolute positions, or of a "
            "ScratchBert. If only names differ, pass key_mapping={pattern: replacement}."
        )
