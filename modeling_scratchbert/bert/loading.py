"""Loads a BERT checkpoint of any kind: what `from_pretrained` does beyond loading a checkpoint of our own."""

from transformers.core_model_loading import WeightRenaming, apply_renamings

from .fields import scratchbert_fields
from .files import UnreachableHubError, tensor_names
from .names import check_tensor_names, loading_patterns


def bert_opening(cls, source, fields: dict, key_mapping, options: dict, kwargs: dict) -> tuple[type, dict[str, str]]:
    """Return the class that loads `source` when `cls` was asked to, and the patterns that turn the names of its tensors
    into those of this class: the patterns of the caller, then BERT's. Raise ValueError if it is another model.

    Args:
        source: a BERT checkpoint, a folder or file of weights alone, an adapter, or None for a state dict.
        fields: its config.json; empty if it has none.
        options: the arguments that locate it on the Hub; `kwargs`: the other arguments of `from_pretrained`.
    """
    is_encoder_decoder = bool(fields) and bool(scratchbert_fields(fields, source).get("is_encoder_decoder"))
    model_class = cls._class_for(is_encoder_decoder)
    names = set(kwargs["state_dict"]) if kwargs.get("state_dict") else None
    if source is not None and kwargs.get("gguf_file") is None:
        try:
            names = tensor_names(source, kwargs.get("variant"), kwargs.get("use_safetensors"), **options)
        except UnreachableHubError:
            if fields:  # otherwise an adapter, whose base model is elsewhere
                raise
    key_mapping = dict(key_mapping or {})
    if names is not None:
        renamings = [WeightRenaming(old, new) for old, new in key_mapping.items()]
        names = {apply_renamings(name, renamings) for name in names}
        check_tensor_names(names, source or "state_dict")
    return model_class, key_mapping | loading_patterns(names or set(), model_class.base_model_prefix)
