"""Loads a BERT checkpoint of any kind: what `from_pretrained` does beyond loading a checkpoint of our own."""

from transformers.core_model_loading import WeightRenaming

from .files import UnreachableHubError, tensor_names
from .names import check_tensor_names, loading_patterns


def bert_key_mapping(model_class, source, has_config: bool, key_mapping, options: dict, kwargs: dict) -> dict[str, str]:
    """Return the patterns that turn the names of the tensors of `source` into those of `model_class`: the patterns of
    the caller, then BERT's. Raise ValueError if the tensors are those of another model.

    Args:
        source: a BERT checkpoint, a folder or file of weights alone, an adapter, or None for a state dict.
        has_config: whether it has a config.json.
        options: the arguments that locate it on the Hub; `kwargs`: the other arguments of `from_pretrained`.
    """
    names = set(kwargs["state_dict"]) if kwargs.get("state_dict") else None
    if source is not None and kwargs.get("gguf_file") is None:
        try:
            names = tensor_names(source, kwargs.get("variant"), kwargs.get("use_safetensors"), **options)
        except UnreachableHubError:
            if has_config:  # otherwise an adapter, whose base model is elsewhere
                raise
    key_mapping = dict(key_mapping or {})
    if names is not None:
        for renaming in [WeightRenaming(old, new) for old, new in key_mapping.items()]:
            names = {renaming.rename_source_key(name)[0] for name in names}
        check_tensor_names(names, source or "state_dict")
    return key_mapping | loading_patterns(names or set(), model_class.base_model_prefix)
