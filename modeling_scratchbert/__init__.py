"""BERT, written from scratch, as a Hugging Face model.

Importing the package registers its classes with the Auto classes of `transformers`, so that a ScratchBert checkpoint
opens without `trust_remote_code`.
"""

import transformers

from . import modeling_scratchbert
from .configuration_scratchbert import AUTO_MAP, ScratchBertConfig
from .pretrained import ScratchBertPreTrainedModel

# isort: off
from .modeling_scratchbert import (
    ScratchBertForCausalLM,
    ScratchBertForConditionalGeneration,
    ScratchBertForMaskedLM,
    ScratchBertForMultipleChoice,
    ScratchBertForNextSentencePrediction,
    ScratchBertForPreTraining,
    ScratchBertForQuestionAnswering,
    ScratchBertForSequenceClassification,
    ScratchBertForTokenClassification,
    ScratchBertModel,
    ScratchBertSeq2SeqModel,
)
# isort: on

__all__ = [
    "ScratchBertConfig",
    "ScratchBertForCausalLM",
    "ScratchBertForConditionalGeneration",
    "ScratchBertForMaskedLM",
    "ScratchBertForMultipleChoice",
    "ScratchBertForNextSentencePrediction",
    "ScratchBertForPreTraining",
    "ScratchBertForQuestionAnswering",
    "ScratchBertForSequenceClassification",
    "ScratchBertForTokenClassification",
    "ScratchBertModel",
    "ScratchBertPreTrainedModel",
    "ScratchBertSeq2SeqModel",
]

transformers.AutoConfig.register(ScratchBertConfig.model_type, ScratchBertConfig, exist_ok=True)
for auto_class, path in AUTO_MAP.items():
    if auto_class != "AutoConfig":
        model_class = getattr(modeling_scratchbert, path.split(".")[1])
        getattr(transformers, auto_class).register(ScratchBertConfig, model_class, exist_ok=True)
