"""Reads the fields of a `config.json`, of a ScratchBert or of a BERT checkpoint, as those of a `ScratchBertConfig`.

These fields alone decide what a checkpoint is. The tensors do not: those of a RoBERTa have BERT's names and would load
without an error, and the model would compute different numbers.
"""

import re

from transformers import BertConfig

# The fields of the `bert_config.json` of Google's original release, which has no model type.
GOOGLE_BERT_FIELDS = {
    "attention_probs_dropout_prob",
    "directionality",
    "hidden_act",
    "hidden_dropout_prob",
    "hidden_size",
    "initializer_range",
    "intermediate_size",
    "max_position_embeddings",
    "num_attention_heads",
    "num_hidden_layers",
    "pooler_fc_size",
    "pooler_num_attention_heads",
    "pooler_num_fc_layers",
    "pooler_size_per_head",
    "pooler_type",
    "type_vocab_size",
    "vocab_size",
}

# The fields in which the two BERTs of an `EncoderDecoderModel` must agree.
SHARED_FIELDS = (
    "vocab_size",
    "hidden_size",
    "num_attention_heads",
    "intermediate_size",
    "hidden_act",
    "layer_norm_eps",
    "hidden_dropout_prob",
    "attention_probs_dropout_prob",
    "max_position_embeddings",
    "type_vocab_size",
)

# Fields that an `EncoderDecoderModel` reads from its own configuration only, and those that may be in its decoder's.
OUTPUT_FIELDS = ("return_dict", "output_hidden_states", "output_attentions")
TOKEN_FIELDS = ("decoder_start_token_id", "bos_token_id", "eos_token_id", "pad_token_id")


def scratchbert_fields(fields: dict, source) -> dict:
    """Return the fields of a `ScratchBertConfig` for the raw fields of `source`. Raise ValueError if it is another kind
    of model, or a BERT with relative positions."""
    if fields.get("model_type") == "scratchbert":
        return fields
    if fields.get("model_type") == "encoder-decoder":
        return _fields_of_encoder_decoder(fields, source)
    return _fields_of_bert(fields, source)


def _fields_of_bert(fields: dict, source) -> dict:
    _check_is_bert(fields, source)
    positions = fields.get("position_embedding_type") or "absolute"
    if positions != "absolute":
        raise ValueError(
            f"{source} is a BERT with position_embedding_type={positions!r}; expected 'absolute'. "
            "ScratchBert does not support relative positions."
        )
    dropped = ("model_type", "architectures", "auto_map", "position_embedding_type")
    return {name: value for name, value in fields.items() if name not in dropped}


def _check_is_bert(fields: dict, source) -> None:
    model_type, architectures = fields.get("model_type"), fields.get("architectures") or []
    expected = "expected a BERT or ScratchBert checkpoint (model_type 'bert' or 'scratchbert')"
    if model_type not in ("bert", None):
        raise ValueError(f"{source} has model_type {model_type!r}; {expected}.")
    if model_type is None and not all(re.fullmatch(r"Bert(Model|LMHeadModel|For\w+)", name) for name in architectures):
        raise ValueError(f"{source} has no model_type, and its architectures are {architectures}; {expected}.")
    is_google = {"hidden_size", "num_attention_heads"} <= set(fields) <= GOOGLE_BERT_FIELDS
    if model_type is None and not architectures and not is_google:
        raise ValueError(
            f"The configuration of {source} has neither model_type nor architectures; {expected}, or the "
            'fields of Google\'s original release. If it is a BERT, add "model_type": "bert" to its '
            "config.json."
        )


def _fields_of_encoder_decoder(fields: dict, source) -> dict:
    """The fields for an `EncoderDecoderModel`, whose encoder and decoder may differ in depth alone."""
    kind = f"{source} is an EncoderDecoderModel"
    try:
        encoder = BertConfig(**_fields_of_bert(fields.get("encoder") or {}, "encoder"))
        decoder = BertConfig(**_fields_of_bert(fields.get("decoder") or {}, "decoder"))
    except ValueError as error:
        raise ValueError(f"{kind}, of which only those of two BERTs can be loaded: {error}") from error
    for name in SHARED_FIELDS:
        if (first := getattr(encoder, name)) != (second := getattr(decoder, name)):
            raise ValueError(
                f"{kind}, and {name} is {first!r} in the encoder and {second!r} in the decoder; expected "
                "the same value. They may differ in depth only."
            )
    if not decoder.add_cross_attention:
        raise ValueError(f"{kind}, and add_cross_attention is False in the decoder; expected True.")
    stated = {**fields["decoder"], **{name: value for name, value in fields.items() if value is not None}}
    dropped = {"is_decoder", "add_cross_attention", "model_type", "transformers_version", *OUTPUT_FIELDS}
    is_tied = bool(fields.get("tie_encoder_decoder"))  # by transformers 4; in 5 they share nothing
    result = {name: value for name, value in encoder.to_diff_dict().items() if name not in dropped}
    result |= {name: fields[name] for name in OUTPUT_FIELDS if name in fields}
    result |= {name: stated[name] for name in TOKEN_FIELDS if stated.get(name) is not None}
    result |= {"is_encoder_decoder": True, "tie_encoder_decoder": is_tied, "share_embeddings": is_tied}
    of_decoder = {"num_decoder_layers": decoder.num_hidden_layers, "use_cache": decoder.use_cache}
    return result | of_decoder | {"tie_word_embeddings": decoder.tie_word_embeddings}
