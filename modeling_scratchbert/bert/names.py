"""The names of BERT's tensors and ours: one table, read in both directions. It holds names, no modules.

`{i}` is the number of a layer. Names are those of a model with a head: BERT's encoder is `bert`, ours is `model`. The
checkpoint of a bare encoder leaves this first part out. The kinds of checkpoints are "bert", "encoder-decoder" (an
`EncoderDecoderModel` of two BERTs) and "scratchbert".
"""

import re

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

# The last part of a name. Checkpoints converted from TensorFlow, such as bert-base-uncased, have gamma and beta.
TENSORFLOW_NAMES = {"gamma": "weight", "beta": "bias"}

# A BERT checkpoint has the output bias under one of these names or both. They can differ if the head is not tied to the
# embeddings; BERT then computes with the first.
OUTPUT_BIAS, OUTPUT_BIAS_ALIAS = "cls.predictions.decoder.bias", "cls.predictions.bias"


def _seq2seq_table() -> dict[str, str]:
    """The table of an `EncoderDecoderModel`, whose heads are in the decoder."""
    table = {}
    for bert, ours in BERT_TO_SCRATCHBERT.items():
        table[f"decoder.{bert}"] = re.sub(r"^model\.", "model.decoder.", ours)
        if bert.startswith("bert."):
            table[re.sub(r"^bert\.", "encoder.", bert)] = re.sub(r"^model\.", "model.encoder.", ours)
    return table


TABLES = {"bert": BERT_TO_SCRATCHBERT, "encoder-decoder": _seq2seq_table()}

# The classes of transformers that ours mirror, where "Scratch" is not the only difference between the names.
OTHER_REFERENCES = {
    "ScratchBertForCausalLM": "BertLMHeadModel",
    "ScratchBertForConditionalGeneration": "EncoderDecoderModel",
}


def reference_class(class_name: str) -> str:
    """Return the name of the class of transformers that computes what our class `class_name` computes."""
    return OTHER_REFERENCES.get(class_name, class_name.removeprefix("Scratch"))


def loading_patterns(names_in_file: set[str], encoder: str = "model") -> dict[str, str]:
    r"""Return regular expressions for whole names of BERT's tensors, each with our name, in which `\1` is the number of
    the layer: the form of `from_pretrained(key_mapping=…)`.

    Args:
        names_in_file: the names in the checkpoint, as far as they are known.
        encoder: the name of the encoder in the model.
    """
    is_seq2seq = any(name.startswith("decoder.bert.") for name in names_in_file)
    patterns = {}
    for bert, ours in TABLES["encoder-decoder" if is_seq2seq else "bert"].items():
        module = re.escape(bert).replace(re.escape("{i}"), r"(\d+)")
        if bert.startswith("bert."):  # which a bare encoder leaves out
            module = rf"(?:bert\.)?{module.removeprefix(re.escape('bert.'))}"
        ours = re.sub(r"^model\.", f"{encoder}.", ours).replace("{i}", r"\1")
        for alias, leaf in TENSORFLOW_NAMES.items():
            patterns[rf"^{module}\.(?:{leaf}|{alias})$"] = f"{ours}.{leaf}"
    head = "decoder." if is_seq2seq else ""
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
    return (
        name if kind == "scratchbert" else _renamed(name, "model.", {our: bert for bert, our in TABLES[kind].items()})
    )


def _renamed(name: str, encoder: str, table: dict[str, str]) -> str | None:
    """Look up a name, which may lack the name of the encoder."""
    module, _, leaf = name.rpartition(".")
    layer, module = re.search(r"\.(\d+)\.", module), re.sub(r"\.\d+\.", ".{i}.", module)
    renamed = table.get(module) or table.get(encoder + module)
    if renamed is None or leaf not in TENSORFLOW_NAMES.values():
        return None
    return f"{renamed}.{leaf}".replace("{i}", layer[1] if layer else "")


def check_tensor_names(names: set[str], source, is_own: bool) -> None:
    """Raise ValueError if the tensors of `source` belong to a model that ScratchBert does not compute, or if loading
    them would leave every weight random.

    Unknown names in a checkpoint of our own are left to the warning that lists missing weights, unless a wrapper such
    as DataParallel or `torch.compile` has put a prefix before all names.
    """
    known = {name for name in names if _is_known(name)}
    in_block = re.compile(r"(bert\.|encoder\.|decoder\.bert\.)?encoder\.layer\.\d+\.")
    foreign = [] if is_own else [name for name in names - known if in_block.match(name)]
    is_renamed = not is_own or any(_is_known(name.partition(".")[2]) for name in names)
    if foreign or (not known and is_renamed):
        found = f"the tensor {min(foreign or names)!r}" if names else "no tensors"
        raise ValueError(
            f"{source} has {found}; expected the tensors of a BERT with absolute positions, or of a ScratchBert. If "
            "only their names differ, pass key_mapping={pattern: replacement}."
        )


def _is_known(name: str) -> bool:
    """Return whether `name` is a tensor of BERT or ScratchBert, with or without the name of the encoder."""
    return any(to_scratchbert(name, kind) or to_bert(name, kind) for kind in TABLES)
