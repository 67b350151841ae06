"""Every model class, by what its name has after "ScratchBert", which is what its twin's has after "Bert"; and a batch
for each."""

import torch
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

VOCABULARY = 99  # words of the tiny models that take these batches


def inputs_for(head="Model", batch=3, length=7, labels=False):
    """A batch with padding at the end of its first sequence, and the labels of the head's task."""
    shape = (batch, 4, length) if head == "ForMultipleChoice" else (batch, length)
    ids = torch.randint(1, VOCABULARY, shape)
    mask = torch.ones(shape, dtype=torch.long)
    mask[0, ..., length // 2 + 1 :] = 0
    inputs = {"input_ids": ids, "attention_mask": mask, "token_type_ids": torch.randint(0, 2, shape)}
    classes = torch.randint(0, 2, (batch,))
    if not labels or head == "Model":
        return inputs
    return inputs | {
        "ForPreTraining": {"labels": ids.where(ids % 2 == 0, -100), "next_sentence_label": classes},
        "ForMaskedLM": {"labels": ids.where(ids % 2 == 0, -100)},
        "ForTokenClassification": {"labels": ids % 2},
        "ForQuestionAnswering": {"start_positions": classes, "end_positions": classes + 2},
    }.get(head, {"labels": classes})
