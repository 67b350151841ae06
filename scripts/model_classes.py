"""What convert_checkpoint and check_parity both know of a checkpoint: which model class its tensors stand for."""

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


def parts_of(canonical_names) -> set[str]:
    """The parts, of those that any class is known by, that these tensors belong to."""
    known = set().union(*CLASS_PARTS.values())
    return {name.removeprefix("model.").split(".")[0] for name in canonical_names if name} & known
