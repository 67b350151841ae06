"""Every model class, by what its name has after "ScratchBert"; its twin; and a batch for each."""

import torch
import transformers

import modeling_scratchbert

# Their twins' names have the same after "Bert".
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
# All that have one half, and those that have two.
ONE_HALF = (*HEADS, "ForCausalLM")
TWO_HALVES = ("Seq2SeqModel", "ForConditionalGeneration")
OURS = {head: getattr(modeling_scratchbert, f"ScratchBert{head}") for head in (*ONE_HALF, *TWO_HALVES)}
TWINS = {head: getattr(transformers, f"Bert{head}") for head in HEADS} | {"ForCausalLM": transformers.BertLMHeadModel}
# What a class's configuration must say for it to be what it is.
NEEDS = {"ForCausalLM": {"is_decoder": True}} | {head: {"is_encoder_decoder": True} for head in TWO_HALVES}

VOCABULARY = 99  # words of the tiny models that take these batches


def inputs_for(head="Model", batch=3, length=7, labels=False):
    """A batch with padding at the end of its first sequence, and the labels of the head's task. For two halves, that is
    the source; the target is two words longer, or as many words fewer where the positions end."""
    shape = (batch, 4, length) if head == "ForMultipleChoice" else (batch, length)
    ids = torch.randint(1, VOCABULARY, shape)
    mask = torch.ones(shape, dtype=torch.long)
    mask[0, ..., length // 2 + 1 :] = 0
    inputs = {"input_ids": ids, "attention_mask": mask, "token_type_ids": torch.randint(0, 2, shape)}
    if head in TWO_HALVES:
        target = torch.randint(1, VOCABULARY, (batch, length + 2 if length < 30 else length - 2))
        if not labels:
            return inputs | {"decoder_input_ids": target}
        lengths = torch.arange(1, batch + 1)[:, None]
        return inputs | {"labels": target.masked_fill(torch.arange(target.shape[1]) >= lengths, -100)}
    classes = torch.randint(0, 2, (batch,))
    if not labels or head == "Model":
        return inputs
    return inputs | {
        "ForPreTraining": {"labels": ids.where(ids % 2 == 0, -100), "next_sentence_label": classes},
        "ForMaskedLM": {"labels": ids.where(ids % 2 == 0, -100)},
        "ForCausalLM": {"labels": ids.where(mask == 1, -100)},
        "ForTokenClassification": {"labels": ids % 2},
        "ForQuestionAnswering": {"start_positions": classes, "end_positions": classes + 2},
    }.get(head, {"labels": classes})
