"""The weights of one BERT as those of an encoder and a decoder (Rothe, Narayan, Severyn 2020, "Leveraging Pre-trained
Checkpoints for Sequence Generation Tasks")."""

import re

import torch
from transformers import AutoTokenizer
from transformers.utils import cached_file

from ..checkpoints import hub_options
from .files import read_tensors, weight_files
from .names import OUTPUT_BIAS, OUTPUT_BIAS_ALIAS, check_tensor_names, to_scratchbert


def seq2seq_start(config_class, source, **kwargs) -> tuple:
    """Return what `ScratchBertForConditionalGeneration.from_bert` passes to `from_pretrained`: the configuration, the
    tensors of `source` under their names in a seq2seq model, and the arguments that are not fields of it.

    Raises:
        ValueError: `source` is of another kind of model, is a seq2seq model already, or has no weight of BERT's.
        OSError: there is no such checkpoint, it has no weights, or one of its files cannot be read.
    """
    options = hub_options(source, kwargs)
    raw, _ = config_class.get_config_dict(source, **options)
    if raw.get("is_encoder_decoder"):
        raise ValueError(f"{source} has an encoder and a decoder; expected one BERT. Load it with from_pretrained.")
    # "auto" is the default for a model that is made from tensors.
    kwargs = {name: value for name, value in kwargs.items() if name not in ("dtype", "torch_dtype") or value != "auto"}
    kind = {"is_encoder_decoder": True, "is_decoder": False, "add_cross_attention": False}
    fields = {**special_tokens(source, options), **kwargs, **options, **kind}
    config, rest = config_class.from_pretrained(source, return_unused_kwargs=True, **fields)
    files = weight_files(source, rest.pop("variant", None), rest.pop("use_safetensors", None), **options)
    if files is None:
        raise OSError(f"{source} has no file of weights; expected one beside its config.json.")
    tensors = {name: tensor for file in files for name, tensor in read_tensors(file).items()}
    check_tensor_names(set(tensors), source)
    if OUTPUT_BIAS in tensors:
        tensors.pop(OUTPUT_BIAS_ALIAS, None)
    checkpoint_kind = "scratchbert" if "model_type" in raw else "bert"
    named = {ours: tensors[name] for name in tensors if (ours := to_scratchbert(name, checkpoint_kind)) is not None}
    return config, for_encoder_and_decoder(named, config), {**options, **rest}


def special_tokens(source, hub_options: dict) -> dict[str, int]:
    """Return the ids with which the tokenizer of `source` starts, ends and pads, or nothing if it has no tokenizer."""
    # For a BERT without a tokenizer, AutoTokenizer creates one with a vocabulary of five words.
    options, files = {"_raise_exceptions_for_missing_entries": False, **hub_options}, ("tokenizer.json", "vocab.txt")
    if not any(cached_file(source, name, **options) for name in files):
        return {}
    tokenizer = AutoTokenizer.from_pretrained(source, **hub_options)
    start, end, padding = tokenizer.cls_token_id, tokenizer.sep_token_id, tokenizer.pad_token_id
    ids = {"decoder_start_token_id": start, "eos_token_id": end, "pad_token_id": padding}
    return {name: number for name, number in ids.items() if number is not None}


def for_encoder_and_decoder(tensors: dict[str, torch.Tensor], config) -> dict[str, torch.Tensor]:
    """Return the tensors of one model with a head under their names in a seq2seq model of this configuration. The
    pooler and the heads of other tasks, which it does not have, are left out."""
    started = {name: tensor for name, tensor in tensors.items() if name.startswith("lm_head.")}
    decoder_layers = config.decoder_config().num_hidden_layers
    for name, tensor in tensors.items():
        if not name.startswith(("model.embeddings.", "model.encoder.")):
            continue
        part = name.removeprefix("model.")
        is_cross_attention, block = ".cross_attention" in part, re.match(r"encoder\.blocks\.(\d+)\.", part)
        if not is_cross_attention:
            started[f"model.encoder.{part}"] = tensor
        is_shared = config.share_embeddings if part.startswith("embeddings.") else config.tie_encoder_decoder
        is_in_decoder = block is None or int(block[1]) < decoder_layers
        if is_in_decoder and (is_cross_attention or not is_shared):
            started[f"model.decoder.{part}"] = tensor.clone()  # the model takes over the memory of each
    if not config.tie_word_embeddings and "lm_head.dense.weight" in started:
        # The checkpoint of a tied head does not have its matrix.
        started.setdefault("lm_head.decoder.weight", tensors["model.embeddings.word_embeddings.weight"].clone())
    return started
