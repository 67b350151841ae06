"""Tiny models of every class, with random weights; their references; and a batch for each."""

from typing import Any

import torch
import transformers

import modeling_scratchbert

TINY = {
    "vocab_size": 99,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 37,
    "max_position_embeddings": 40,
}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
VOCABULARY = TINY["vocab_size"]
SPECIAL_TOKENS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
# The special tokens of a seq2seq model of this vocabulary, which is too small for Google's ids.
SPECIAL = {"decoder_start_token_id": 2, "eos_token_id": 3, "pad_token_id": 0}

# What the name of a class has after "ScratchBert", and the name of its reference after "Bert".
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
BERTS = (*HEADS, "ForCausalLM")
ENCODER_DECODERS = ("Seq2SeqModel", "ForConditionalGeneration")
OURS = {head: getattr(modeling_scratchbert, f"ScratchBert{head}") for head in (*BERTS, *ENCODER_DECODERS)}
REFERENCES = {head: getattr(transformers, f"Bert{head}") for head in HEADS} | {
    "ForCausalLM": transformers.BertLMHeadModel
}
# The fields of a decoder that reads the output of an encoder.
CROSSED = {"is_decoder": True, "add_cross_attention": True}
# The fields that a class requires in its configuration.
NEEDS = {"ForCausalLM": {"is_decoder": True}} | {head: {"is_encoder_decoder": True} for head in ENCODER_DECODERS}


def tiny_config(config_class=modeling_scratchbert.ScratchBertConfig, **fields):
    """A configuration of `TINY` and these fields."""
    return config_class(**{**TINY, **fields})


def word_tokenizer(words: list[str], **options) -> transformers.BertTokenizer:
    """A tokenizer of the special tokens and these words."""
    return transformers.BertTokenizer(vocab={word: i for i, word in enumerate([*SPECIAL_TOKENS, *words])}, **options)


@torch.no_grad()
def randomise(model: Any, seed: int = 0, std: float = 0.1) -> Any:
    """Draw every weight anew. A new model has biases of 0 and norms of 1, so that a missing or swapped one would not
    show."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        parameter.normal_(0, std, generator=generator)
        if parameter.ndim == 1 and name.endswith("weight"):  # of a norm
            parameter += 1
    return model


def random_bert(head: str = "ForPreTraining", seed: int = 0, **fields) -> transformers.PreTrainedModel:
    config = tiny_config(transformers.BertConfig, **{**NEEDS.get(head, {}), **fields})
    return randomise(REFERENCES[head](config), seed, std=0.2).eval()


def random_scratchbert(head: str = "ForPreTraining", seed: int = 0, **fields):
    config = tiny_config(**{**NEEDS.get(head, {}), **fields})
    return randomise(OURS[head](config), seed, std=0.2).eval()


def random_encoder_decoder(seed: int = 0, decoder: dict | None = None, **fields) -> transformers.EncoderDecoderModel:
    """Two random BERTs; `decoder` has the fields in which the second differs."""
    encoder = tiny_config(transformers.BertConfig, **fields)
    decoder = {**fields, **CROSSED, **(decoder or {})}
    configs = encoder, tiny_config(transformers.BertConfig, **decoder)
    config = transformers.EncoderDecoderConfig.from_encoder_decoder_configs(*configs, **SPECIAL)
    return randomise(transformers.EncoderDecoderModel(config), seed, std=0.2).eval()


def inputs_for(head="Model", batch=3, length=7, labels=False):
    """A batch with padding at the end of its first sequence, and the labels of the class's task. For an encoder and a
    decoder, it is the source; the target has two words more, or two fewer if the positions would not suffice."""
    shape = (batch, 4, length) if head == "ForMultipleChoice" else (batch, length)
    ids = torch.randint(1, VOCABULARY, shape)
    mask = torch.ones(shape, dtype=torch.long)
    mask[0, ..., length // 2 + 1 :] = 0
    inputs = {"input_ids": ids, "attention_mask": mask, "token_type_ids": torch.randint(0, 2, shape)}
    if head in ENCODER_DECODERS:
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
