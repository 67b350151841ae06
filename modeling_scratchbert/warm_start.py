"""An encoder and a decoder out of one BERT (Rothe, Narayan, Severyn 2020, "Leveraging Pre-trained Checkpoints for
Sequence Generation Tasks"): which tensor of the checkpoint starts which of the model's."""

import re

import torch
from transformers import AutoTokenizer
from transformers.modeling_utils import load_state_dict

from .bert_weights import OUTPUT_BIAS, OUTPUT_BIAS_ALIAS, canonical_name
from .checkpoints import HUB_OPTIONS, check_reach, has_tokenizer, tensor_names, weight_files
from .configuration_scratchbert import hub_in_one_line
from .pretrained import refuse_foreign_tensors


def seq2seq_start(config_class, source, **kwargs) -> tuple:
    """What `ScratchBertForConditionalGeneration.from_bert` opens its model with.

    Returns:
        The configuration; the tensors of `source` by their names in a seq2seq model, those of the encoder once more for
        the decoder; and the arguments that are not the configuration's.

    Raises:
        ValueError: `source` is of another kind of model, or has both halves already, or no weight of BERT's.
        OSError: there is no such checkpoint, it has no weights, or a file of it cannot be read.
    """
    hub_options = {name: kwargs[name] for name in HUB_OPTIONS if kwargs.get(name) is not None}
    raw, _ = config_class.get_config_dict(source, **hub_options)
    if raw.get("is_encoder_decoder"):
        raise ValueError(f"{source} has an encoder and a decoder already: open it with from_pretrained.")
    # As the weights are, which is what happens by itself where a model is made of tensors.
    for name in ("dtype", "torch_dtype"):
        if kwargs.get(name) == "auto":
            del kwargs[name]
    halves = {"is_encoder_decoder": True, "is_decoder": False, "add_cross_attention": False}
    fields = {**special_tokens(source, hub_options), **kwargs, **halves}
    config, options = config_class.from_pretrained(source, return_unused_kwargs=True, **fields)

    which = options.pop("variant", None), options.pop("use_safetensors", None)
    with hub_in_one_line(source, hub_options.get("revision")):
        names, files = tensor_names(source, *which, **hub_options), weight_files(source, *which, **hub_options)
    if names is None or files is None:
        check_reach(source, *which, **hub_options)
        raise OSError(f"{source} has no file of weights.")
    refuse_foreign_tensors(names, source, is_own="model_type" in raw)
    tensors = {name: tensor for file in files for name, tensor in load_state_dict(file).items()}
    if OUTPUT_BIAS in tensors:
        tensors.pop(OUTPUT_BIAS_ALIAS, None)
    kind = "scratchbert" if "model_type" in raw else "bert"
    named = {ours: tensor for name, tensor in tensors.items() if (ours := canonical_name(name, kind)) is not None}
    return config, in_both_halves(named, config), {**hub_options, **options}


def special_tokens(source, hub_options: dict) -> dict[str, int]:
    """The ids that the tokenizer of `source` starts, ends and pads with; none where it has no tokenizer."""
    if not has_tokenizer(source, **hub_options):
        return {}
    tokenizer = AutoTokenizer.from_pretrained(source, **hub_options)
    ids = {
        "decoder_start_token_id": tokenizer.cls_token_id,
        "eos_token_id": tokenizer.sep_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    return {name: number for name, number in ids.items() if number is not None}


def in_both_halves(tensors: dict[str, torch.Tensor], config) -> dict[str, torch.Tensor]:
    """The tensors of an encoder with a head by their names in a seq2seq model of this configuration. What such a model
    has no place for is left out: the pooler and the heads of other tasks."""
    started = {}
    decoder_layers = config.decoder_config().num_hidden_layers
    for name, tensor in tensors.items():
        if name.startswith("lm_head."):
            started[name] = tensor
        if not name.startswith(("model.embeddings.", "model.encoder.")):
            continue
        part = name.removeprefix("model.")
        if ".cross_attention" not in part:
            started[f"model.encoder.{part}"] = tensor
        block = re.match(r"encoder\.blocks\.(\d+)\.", part)
        is_shared = config.share_embeddings if part.startswith("embeddings.") else config.tie_encoder_decoder
        if (not is_shared or ".cross_attention" in part) and (block is None or int(block[1]) < decoder_layers):
            started[f"model.decoder.{part}"] = tensor.clone()  # the model takes these as they are, memory and all
    if not config.tie_word_embeddings and "lm_head.dense.weight" in started:
        # A head whose matrix was tied is stored without it.
        words = tensors["model.embeddings.word_embeddings.weight"]
        started.setdefault("lm_head.decoder.weight", words.clone())
    return started
