"""What all models share: initialisation, loading and saving. The models themselves are in `modeling_scratchbert`."""

import json
import logging
import os
import sys
from pathlib import Path
from typing import Any, Self

import torch
from huggingface_hub import ResolvedRevision
from safetensors.torch import save_file
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers import initialization as init
from transformers.core_model_loading import WeightRenaming, apply_renamings
from transformers.utils import cached_file
from transformers.utils.output_capturing import OutputRecorder

from .attention import MultiHeadAttention
from .bert_configuration import scratchbert_fields
from .bert_weights import OUTPUT_BIAS, OUTPUT_BIAS_ALIAS, check_tensor_names, loading_patterns, reference_class, to_bert
from .checkpoints import (
    UnreachableHubError,
    copy_code,
    explain_unreachable_hub,
    hub_options,
    raw_config,
    staged,
    tensor_names,
    weight_files,
)
from .configuration_scratchbert import AUTO_MAP, ScratchBertConfig
from .embeddings import SinusoidalPositions, sinusoidal_table
from .inference import InferenceMixin
from .installed import installed
from .transformer import TransformerBlock

logger = logging.getLogger(__name__)

PACKAGE = __name__.rpartition(".")[0]

# An import makes a module an attribute of its package; the remote-code loader does not. Without it dill, and with it
# `datasets.map`, pickles the model classes by value, along with objects of transformers that cannot be pickled.
if _models := sys.modules.get(f"{PACKAGE}.modeling_scratchbert"):
    vars(sys.modules[PACKAGE])["modeling_scratchbert"] = _models

# Fields that the config.json of a BERT does not have.
NOT_IN_BERT = {
    "norm_first", "num_decoder_layers", "tie_encoder_decoder", "share_embeddings", "decoder_start_token_id",
    "padding_free", "sparse_prediction",
}  # fmt: skip


class ScratchBertPreTrainedModel(InferenceMixin, PreTrainedModel):
    """A model that loads BERT checkpoints and its own, and saves as either."""

    config: ScratchBertConfig
    config_class: type[ScratchBertConfig]
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _supports_flash_attn = True
    _supports_sdpa = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    _no_split_modules = ["Embeddings", "TransformerBlock"]
    # Buffers of old BERT checkpoints, and the second name of the output bias (see `bert_weights`).
    _keys_to_ignore_on_load_unexpected = [r"\bposition_ids$", rf"^(decoder\.)?{OUTPUT_BIAS_ALIAS}$"]
    _is_encoder_decoder = False
    _can_record_outputs = {
        "hidden_states": TransformerBlock,
        "attentions": OutputRecorder(MultiHeadAttention, index=1, layer_name="attention"),
        "cross_attentions": OutputRecorder(MultiHeadAttention, index=1, layer_name="cross_attention"),
    }

    def __init__(self, config: ScratchBertConfig, *args, **kwargs):
        if not _is_our_config(config):
            raise TypeError(
                f"config is a {type(config).__name__}; expected a ScratchBertConfig. Convert a BertConfig with "
                "ScratchBertConfig.from_bert(config)."
            )
        config.check()
        _check_class(type(self), config.is_encoder_decoder, "config")
        super().__init__(config, *args, **kwargs)

    @classmethod
    def _class_for(cls, is_encoder_decoder: bool) -> "type[ScratchBertPreTrainedModel]":
        """Return the class that opens a checkpoint of this kind when this class was asked to."""
        return cls

    @classmethod
    def _from_config(cls, config, **kwargs):
        model_class = cls._class_for(config.is_encoder_decoder)
        return super(ScratchBertPreTrainedModel, model_class)._from_config(config, **kwargs)

    @torch.no_grad()
    def _init_weights(self, module):
        super()._init_weights(module)
        if isinstance(module, SinusoidalPositions):
            init.copy_(module.table, sinusoidal_table(*module.table.shape))
        elif isinstance(module, nn.PReLU):
            init.constant_(module.weight, module.init)

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: str | os.PathLike | None,
        *model_args,
        config: PreTrainedConfig | str | os.PathLike | None = None,
        key_mapping: dict[str, str] | None = None,
        verify: bool = False,
        **kwargs,
    ) -> Self:
        """Load a ScratchBert checkpoint, or any BERT checkpoint, from a folder or a hub id.

        Weights that the checkpoint does not have are initialised and named in a warning. The other arguments are those
        of `PreTrainedModel.from_pretrained`.

        Args:
            verify: compare the loaded model with the `probe.json` that `save_pretrained` wrote: every tensor bit by bit
                (rounded, in another dtype), and the first numbers that it computes within 1e-3.

        Raises:
            ValueError: the checkpoint, or `config`, is of another kind of model or has relative positions; or with
                `verify`, the model is not the one that was saved, or is quantised, sharded or offloaded.
            OSError: there is no such checkpoint, it has no config.json, or one of its files cannot be read; or with
                `verify`, it has no probe.json, or a damaged one.
        """
        source, options = pretrained_model_name_or_path, hub_options(pretrained_model_name_or_path, kwargs)
        with explain_unreachable_hub(source, options.get("revision")):
            model_class, kind = cls._find_checkpoint(source, options)
            variant, use_safetensors = kwargs.get("variant"), kwargs.get("use_safetensors")
            probe = installed("probe.comparison").read_probe(source, variant, **options) if verify else None
            names, key_mapping = model_class._map_names(source, kind, key_mapping, options, kwargs)
            kwargs |= {**options, "config": config, "key_mapping": key_mapping}
            result = model_class._load(source, kind, names, *model_args, **kwargs)
            if probe is not None:
                model = result[0] if isinstance(result, tuple) else result
                files = weight_files(source, variant, use_safetensors, **options) or []
                installed("probe.comparison").check_probe(model, probe, source, files)
            return result

    @classmethod
    def _find_checkpoint(cls, source, options: dict) -> tuple[Any, str | None]:
        """Return the class that loads `source`, and its kind according to config.json, "bert" or "scratchbert"; None
        without a config.json: a state dict, an adapter or a folder of weights alone."""
        folder = Path(source).parent if source is not None and os.path.isfile(source) else source
        # If the Hub cannot be reached, this raises, so that it is not tried for every file of weights. With a resolved
        # revision the repository is in the cache, and may have no config.json.
        is_new = not isinstance(options.get("revision"), ResolvedRevision)
        look_up = {"_raise_exceptions_for_missing_entries": is_new, **options}
        if source is None or cached_file(folder, "config.json", **look_up) is None:
            return cls, None
        fields, _ = raw_config(folder, **options)
        own_types = (ScratchBertConfig.model_type, cls.config_class.model_type)
        is_encoder_decoder = bool(scratchbert_fields(fields, source, own_types[1]).get("is_encoder_decoder"))
        model_class = cls._class_for(is_encoder_decoder)
        _check_class(model_class, is_encoder_decoder, source)
        return model_class, "scratchbert" if fields.get("model_type") in own_types else "bert"

    @classmethod
    def _map_names(cls, source, kind: str | None, key_mapping, options: dict, kwargs: dict) -> tuple[set | None, dict]:
        """Return the names of the tensors, None if they are not known, and the patterns that turn them into ours: those
        of the caller, then BERT's."""
        names = set(kwargs["state_dict"]) if kwargs.get("state_dict") else None
        if source is not None and kwargs.get("gguf_file") is None:
            try:
                names = tensor_names(source, kwargs.get("variant"), kwargs.get("use_safetensors"), **options)
            except UnreachableHubError:
                if kind is not None:  # otherwise an adapter, whose base model is elsewhere
                    raise
        key_mapping = dict(key_mapping or {})
        if names is not None:
            renamings = [WeightRenaming(old, new) for old, new in key_mapping.items()]
            names = {apply_renamings(name, renamings) for name in names}
            check_tensor_names(names, source or "state_dict", kind == "scratchbert")
        if kind != "scratchbert":
            key_mapping |= loading_patterns(names or set(), cls.base_model_prefix)
        return names, key_mapping

    @classmethod
    def _load(cls, source, kind: str | None, names: set[str] | None, *model_args, **kwargs):
        """Load the tensors with these names; see `from_pretrained`."""
        with_info, config = kwargs.pop("output_loading_info", False), kwargs["config"]
        if isinstance(config, PreTrainedConfig) and not _is_our_config(config):
            kwargs["config"] = cls.config_class.from_bert(config)
        result: Any = super().from_pretrained(source, *model_args, output_loading_info=True, **kwargs)
        model, info = result
        blocks = {name for name, _ in model.named_parameters() if ".blocks." in name}
        if names and kind != "scratchbert" and blocks and blocks <= info["missing_keys"]:
            raise ValueError(
                f"base_model_prefix is {cls.base_model_prefix!r} in {cls.__name__}, and {source or 'state_dict'} has "
                f"no {min(blocks)}; expected the name of the attribute that holds the ScratchBertModel."
            )
        model._weight_conversions = []  # with which transformers would save under BERT's names again
        return result if with_info else model

    def save_pretrained(
        self,
        save_directory: str | os.PathLike,
        is_main_process: bool = True,
        state_dict: dict | None = None,
        push_to_hub: bool = False,
        max_shard_size: int | str = "50GB",
        variant: str | None = None,
        *args,
        **kwargs,
    ) -> None:
        """Save a ScratchBert checkpoint: weights under our names, the code, a config.json whose `auto_map` names it,
        and a probe.json for `from_pretrained(verify=True)`. Files are written in a temporary folder and moved into
        place when all are complete.

        The arguments are those of `PreTrainedModel.save_pretrained`. There is no probe.json if `state_dict` is given,
        because the model may have other weights. With a warning, there is none if the model is quantised, sharded over
        processes or offloaded, or if its forward pass fails.

        Raises:
            NotADirectoryError: `save_directory` is a file.
        """
        self.config.auto_map = self._auto_map()
        if push_to_hub:
            kwargs.setdefault("repo_id", Path(save_directory).name)
        with staged(save_directory) as folder:
            if state_dict is None and self.should_save_on_this_rank(is_main_process):
                installed("probe.recording").write_probe(self, folder, variant)
            options = is_main_process, state_dict, push_to_hub, max_shard_size, variant
            super().save_pretrained(folder, *options, *args, **kwargs)
            if (folder / "config.json").exists():
                copy_code(folder)  # the configuration may be of another copy of the package, and has saved its code
            if push_to_hub and Path(save_directory, "README.md").exists():
                (folder / "README.md").unlink(missing_ok=True)  # keep the user's model card

    def _get_files_timestamps(self, working_dir) -> dict[str, float]:
        """Return the files not to upload if they do not change: none, because a staged folder has only new ones."""
        return {}

    def _auto_map(self) -> dict[str, str]:
        """Return the `auto_map` of this model's checkpoint. It names no model for a derived class, because ours would
        drop what was changed; `register_for_auto_class` adds the derived class."""
        ancestors = [cls for cls in type(self).__mro__ if issubclass(cls, ScratchBertPreTrainedModel)]
        # FSDP derives classes that change nothing in the model.
        derived = [cls for cls in ancestors if not _is_ours(cls) and not cls.__module__.startswith("torch.")]
        if not derived:
            return dict(AUTO_MAP)
        if type(self)._auto_class is None:
            logger.warning(
                "%s is defined outside modeling_scratchbert, so only %s.from_pretrained can load what is saved here. "
                "Call %s.register_for_auto_class('AutoModel…') before saving to let the Auto classes load it.",
                *[derived[0].__name__] * 3,
            )
        return {"AutoConfig": AUTO_MAP["AutoConfig"]}

    def save_as_bert(self, save_directory: str | os.PathLike) -> None:
        """Save a BERT checkpoint: config.json and model.safetensors with BERT's names, which the `Bert…` class loads
        with no tensor missing or left over, as do tools outside `transformers`.

        Raises:
            ValueError: BERT does not have this configuration, class or tensor, or a tensor is quantised, distributed or
                without values.
        """
        fields, tensors = self._bert_fields(), self._bert_tensors()
        with staged(save_directory) as folder:
            save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
            text = json.dumps(fields, indent=2, sort_keys=True) + "\n"
            (folder / "config.json").write_text(text, encoding="utf-8")

    def _bert_fields(self) -> dict:
        """Return the content of the config.json of a BERT checkpoint."""
        config, name = self.config, type(self).__name__
        for field, expected in (("norm_first", False), ("position_embedding_type", "absolute")):
            if (value := getattr(config, field)) != expected:
                raise ValueError(
                    f"{field} is {value!r}; expected {expected!r}, as in BERT. Save the model with save_pretrained."
                )
        if self._is_encoder_decoder:
            raise ValueError(
                f"{name} has an encoder and a decoder; expected one of them, as in a BERT checkpoint. Save them with "
                "get_encoder().save_as_bert(…) and get_decoder().save_as_bert(…)."
            )
        own = next(cls.__name__ for cls in type(self).__mro__ if _is_ours(cls))
        if f"modeling_scratchbert.{own}" not in AUTO_MAP.values():
            raise ValueError(
                f"{name} derives from {own}; expected a model that BERT has as well. Save it with save_pretrained."
            )
        encoder: Any = self.base_model.get_submodule("encoder")
        dropped = {"auto_map", *NOT_IN_BERT}
        return {
            **{name: value for name, value in config.to_diff_dict().items() if name not in dropped},
            "model_type": "bert",
            "architectures": [reference_class(own)],
            "dtype": str(self.dtype).removeprefix("torch."),
            # transformers 5 does not write this field; CTranslate2, for one, reads it.
            "position_embedding_type": "absolute",
            "num_hidden_layers": len(encoder.blocks),  # which may have been pruned
            "tie_word_embeddings": self._is_tied(),
        }

    def _bert_tensors(self) -> dict[str, torch.Tensor]:
        """Return the tensors of the model under BERT's names."""
        state = self.state_dict()
        for name, tensor in state.items():
            if tensor.is_meta:
                raise ValueError(f"{name} has no values; expected them in memory. Load the model without device_map.")
            if type(tensor) is not torch.Tensor:
                raise ValueError(
                    f"{name} is a {type(tensor).__name__}; expected a plain tensor, neither quantised nor distributed. "
                    "Save the model with save_pretrained, or load it without quantisation and tensor parallelism."
                )
        bert_names = {name: to_bert(name) or "" for name in state}
        if unknown := [name for name, bert_name in bert_names.items() if not bert_name]:
            raise ValueError(
                f"The model has {', '.join(unknown)}; expected tensors that BERT has. Save it with save_pretrained."
            )
        dropped = "bert." if self.base_model is self else ""
        tensors = {bert_names[name].removeprefix(dropped): tensor.contiguous() for name, tensor in state.items()}
        if OUTPUT_BIAS in tensors:
            tensors[OUTPUT_BIAS_ALIAS] = tensors[OUTPUT_BIAS].clone()
            if self._is_tied():  # BERT's own files have neither the matrix nor the first name of its bias
                del tensors[OUTPUT_BIAS], tensors["cls.predictions.decoder.weight"]
        return tensors

    def _is_tied(self) -> bool:
        """Return whether the output matrix is the word embeddings; the configuration may have changed since."""
        head = self.get_output_embeddings()
        return self.config.tie_word_embeddings if head is None else head.weight is self.get_input_embeddings().weight


def _is_our_config(config) -> bool:
    """Return whether `config` is a `ScratchBertConfig`, of this copy of the package or of the copy in a checkpoint."""
    return any(cls.__name__ == "ScratchBertConfig" for cls in type(config).__mro__)


def _is_ours(cls: type) -> bool:
    """Return whether `cls` belongs to this copy of the package: the installed one, or the one in a checkpoint."""
    return cls.__module__ in (__name__, f"{PACKAGE}.modeling_scratchbert")


def _check_class(cls: type[ScratchBertPreTrainedModel], is_encoder_decoder: bool, source) -> None:
    """Raise ValueError unless `cls` is for the kind of `source`, a checkpoint or a configuration: with or without a
    decoder beside the encoder."""
    if cls._is_encoder_decoder != is_encoder_decoder:
        advice = "Load it with ScratchBertForConditionalGeneration or AutoModel; get_encoder() returns the encoder."
        if not is_encoder_decoder:
            advice = "Start a model from a single BERT with ScratchBertForConditionalGeneration.from_bert(…)."
        raise ValueError(
            f"is_encoder_decoder is {is_encoder_decoder} in {source}; {cls.__name__} expected "
            f"{cls._is_encoder_decoder}. {advice}"
        )
