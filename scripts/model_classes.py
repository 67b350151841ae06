"""What convert_checkpoint and check_parity both know of a checkpoint: its kind, and which model class its tensors stand
for."""

from modeling_scratchbert.bert_weights import OTHER_REFERENCES, reference_class

# The model classes, without `Bert` or `ScratchBert` before them, and the parts beyond embeddings and blocks that a
# checkpoint must hold for each. Where a checkpoint does not say which it is, and several fit, the first is taken.
CLASS_PARTS = {
    "ForPreTraining": {"pooler", "lm_head", "next_sentence_head"},
    "ForMaskedLM": {"lm_head"},
    "ForNextSentencePrediction": {"pooler", "next_sentence_head"},
    "ForSequenceClassification": {"pooler", "classifier"},
    "ForMultipleChoice": {"pooler", "classifier"},
    "ForTokenClassification": {"classifier"},
    "ForQuestionAnswering": {"qa_outputs"},
    "Model": set(),
}
CAUSAL_CLASS_PARTS = {"ForCausalLM": {"lm_head"}}
SEQ2SEQ_CLASS_PARTS = {"ForConditionalGeneration": {"lm_head"}, "Seq2SeqModel": set()}


def classes_in(is_encoder_decoder: bool, is_decoder: bool) -> dict[str, set[str]]:
    """The classes that a checkpoint with these fields of a configuration may be of, with their parts."""
    if is_encoder_decoder:
        return SEQ2SEQ_CLASS_PARTS
    return CAUSAL_CLASS_PARTS | CLASS_PARTS if is_decoder else CLASS_PARTS | CAUSAL_CLASS_PARTS


def parts_of(canonical_names) -> set[str]:
    """The parts, of those that any class is known by, that these tensors belong to."""
    known = set().union(*CLASS_PARTS.values())
    return {name.removeprefix("model.").split(".")[0] for name in canonical_names if name} & known


def kind_of(fields: dict) -> str:
    """What a checkpoint with these fields in its config.json is: "scratchbert", "encoder-decoder" or else "bert"."""
    model_type = fields.get("model_type")
    return model_type if model_type in ("scratchbert", "encoder-decoder") else "bert"


def class_name(name: str, kind: str) -> str:
    """What the class `name` of `CLASS_PARTS` is called, ours or its twin."""
    return f"ScratchBert{name}" if kind == "scratchbert" else reference_class(f"ScratchBert{name}")


def short_name(class_name: str) -> str:
    """The name in `CLASS_PARTS` of a class of ours or of its twin."""
    ours = {reference: own for own, reference in OTHER_REFERENCES.items()}.get(class_name, class_name)
    return ours.removeprefix("Scratch").removeprefix("Bert")


def why_unused(name: str, kind: str) -> str | None:
    """Why nothing is computed with the tensor `name` of a checkpoint, or None if something is."""
    if name.endswith("position_ids"):
        return "the numbers 0, 1, 2, …, which the model counts by itself"
    if kind == "encoder-decoder" and name.startswith("encoder.pooler."):
        return "the encoder's pooler, which EncoderDecoderModel never uses"
    return None
