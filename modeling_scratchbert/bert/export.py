"""Saves a model as a BERT checkpoint."""

import json
import os

import torch
from safetensors.torch import save_file

from ..checkpoints import staged
from ..configuration_scratchbert import AUTO_MAP
from .names import OUTPUT_BIAS, OUTPUT_BIAS_ALIAS, reference_class, to_bert

# Fields that the config.json of a BERT does not have.
NOT_IN_BERT = {
    "norm_first",
    "num_decoder_layers",
    "tie_encoder_decoder",
    "share_embeddings",
    "decoder_start_token_id",
    "padding_free",
    "sparse_prediction",
}


def save_as_bert(model, save_directory: str | os.PathLike) -> None:
    """See `ScratchBertPreTrainedModel.save_as_bert`. The model's classes may be of another copy of the package."""
    fields, tensors = bert_fields(model), bert_tensors(model)
    with staged(save_directory) as folder:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        (folder / "config.json").write_text(json.dumps(fields, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def bert_fields(model) -> dict:
    """Return the content of the config.json of a BERT checkpoint."""
    config, name = model.config, type(model).__name__
    for field, expected in (("norm_first", False), ("position_embedding_type", "absolute")):
        if (value := getattr(config, field)) != expected:
            raise ValueError(
                f"{field} is {value!r}; expected {expected!r}, as in BERT. Save the model with save_pretrained."
            )
    if config.is_encoder_decoder:
        raise ValueError(
            f"{name} has an encoder and a decoder; expected one of them, as in a BERT checkpoint. Save "
            "them with get_encoder().save_as_bert(…) and get_decoder().save_as_bert(…)."
        )
    own = [cls.__name__ for cls in type(model).__mro__ if f"modeling_scratchbert.{cls.__name__}" in AUTO_MAP.values()]
    if not own:
        raise ValueError(f"{name} is not a model that BERT has as well; expected one. Save it with save_pretrained.")
    fields = {field: value for field, value in config.to_diff_dict().items() if field not in {"auto_map", *NOT_IN_BERT}}
    fields |= {"model_type": "bert", "architectures": [reference_class(own[0])], "tie_word_embeddings": is_tied(model)}
    # transformers 5 does not write the type of positions; CTranslate2, for one, reads it.
    fields |= {"position_embedding_type": "absolute", "dtype": str(model.dtype).removeprefix("torch.")}
    return fields | {"num_hidden_layers": len(model.base_model.get_submodule("encoder").blocks)}  # which may be pruned


def check_plain(name: str, tensor: torch.Tensor) -> None:
    """Raise ValueError if a tensor is quantised, distributed or without values."""
    if tensor.is_meta:
        raise ValueError(f"{name} has no values; expected them in memory. Load the model without device_map.")
    if type(tensor) is not torch.Tensor:
        raise ValueError(
            f"{name} is a {type(tensor).__name__}; expected a plain tensor, neither quantised nor "
            "distributed. Save the model with save_pretrained, or load it without quantisation and "
            "tensor parallelism."
        )


def bert_tensors(model) -> dict[str, torch.Tensor]:
    """Return the tensors of the model under BERT's names."""
    state = model.state_dict()
    for name, tensor in state.items():
        check_plain(name, tensor)
    bert_names = {name: to_bert(name) or "" for name in state}
    if unknown := [name for name, bert_name in bert_names.items() if not bert_name]:
        raise ValueError(
            f"The model has {', '.join(unknown)}; expected tensors that BERT has. Save it with save_pretrained."
        )
    dropped = "bert." if model.base_model is model else ""
    tensors = {bert_names[name].removeprefix(dropped): tensor.contiguous() for name, tensor in state.items()}
    if OUTPUT_BIAS in tensors:
        tensors[OUTPUT_BIAS_ALIAS] = tensors[OUTPUT_BIAS].clone()
        if is_tied(model):  # BERT's own files have neither the matrix nor the first name of its bias
            del tensors[OUTPUT_BIAS], tensors["cls.predictions.decoder.weight"]
    return tensors


def is_tied(model) -> bool:
    """Return whether the output matrix is the word embeddings; the configuration may have changed since."""
    head = model.get_output_embeddings()
    return model.config.tie_word_embeddings if head is None else head.weight is model.get_input_embeddings().weight
