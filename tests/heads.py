"""Every model class, by what its name has after "ScratchBert", which is what its twin's has after "Bert"."""

import transformers

import modeling_scratchbert

HEADS = (
    "Model",
    "ForPreTraining",
    "ForMaskedLM",
    "ForNextSentencePrediction",
    "ForSequenceClassification",
    "ForTokenClassification",
    "ForQuestionAnswering",
    "ForMultipleChoice",
)
OURS = {head: getattr(modeling_scratchbert, f"ScratchBert{head}") for head in HEADS}
TWINS = {head: getattr(transformers, f"Bert{head}") for head in HEADS}
