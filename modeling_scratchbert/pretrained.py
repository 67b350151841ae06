"""What all models share: initialisation, loading and saving. The models themselves are in `modeling_scratchbert`."""

import os
import sys
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel, initialization
from transformers.utils import cached_file, logging
from transformers.utils.output_capturing import OutputRecorder

from .attention import MultiHeadAttention
from .checkpoints import copy_code, explained, hub_options, raw_config, staged
from .configuration_scratchbert import AUTO_MAP, ScratchBertConfig
from .embeddings import SinusoidalPositions, sinusoidal_table
from .inference import InferenceMixin
from .installed import installed
from .transformer import TransformerBlock
from .unpadding import is_requested, labels_include_padding

logger = logging.get_logger(__name__)

PACKAGE = __name__.rpartition(".")[0]

# An import makes a module an attribute of its package; the remote-code loader does not. Without it dill, and with it
# `datasets.map`, pickles the model classes by value, along with objects of transformers that cannot be pickled.
if _models := sys.modules.get(f"{PACKAGE}.modeling_scratchbert"):
    vars(sys.modules[PACKAGE])["modeling_scratchbert"] = _models


class ScratchBertPreTrainedModel(InferenceMixin, PreTrainedModel):
    """A model that loads BERT checkpoints and its own, and saves as either."""

    config: ScratchBertConfig
    config_class: type[ScratchBertConfig]
    base_model_prefix = "model"
    supports_gradient_checkpointing = _supports_attention_backend = True
    _supports_flash_attn = _supports_sdpa = _supports_flex_attn = True
    _no_split_modules = ["Embeddings", "TransformerBlock"]
    # Buffers of old BERT checkpoints, and the second name of the output bias (see `bert.names`).
    _keys_to_ignore_on_load_unexpected = [r"\bposition_ids$", r"^(decoder\.)?cls.predictions.bias$"]
    _is_encoder_decoder = False
    _can_record_outputs = {
        "hidden_states": TransformerBlock,
        "attentions": OutputRecorder(MultiHeadAttention, 1, ".attention"),
        "cross_attentions": OutputRecorder(MultiHeadAttention, 1, ".cross_attention"),
    }

    def __init__(self, config: ScratchBertConfig, *args, **kwargs):
        if not _is_our_config(config):
            raise TypeError(
                f"config is a {type(config).__name__}; expected a ScratchBertConfig. Convert a BertConfig "
                "with ScratchBertConfig.from_bert(config)."
            )
        config.check()
        _check_class(type(self), vars(config), "the configuration")
        super().__init__(config, *args, **kwargs)

    def _keep_labelled_padding(self, options: dict, attention_mask, labels: Tensor | None) -> None:
        """Set `padding_free` in the options of a call: True if it was requested, and the loss reads no padding."""
        is_asked = is_requested(self.base_model, options.get("padding_free"))
        options["padding_free"] = is_asked and not labels_include_padding(attention_mask, labels)

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
            initialization.copy_(module.table, sinusoidal_table(*module.table.shape))
        elif isinstance(module, nn.PReLU):
            initialization.constant_(module.weight, module.init)

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: str | os.PathLike | None,
        *model_args,
        config: PreTrainedConfig | str | os.PathLike | None = None,
        key_mapping: dict[str, str] | None = None,
        verify: bool = False,
        padding_free: bool | None = None,
        **kwargs,
    ) -> Self:
        """Load a ScratchBert checkpoint, or any BERT checkpoint, from a folder or a hub id.

        Weights that the checkpoint does not have are initialised and named in a warning. The other arguments are those
        of `PreTrainedModel.from_pretrained`.

        Args:
            verify: compare the loaded model with the `probe.json` that `save_pretrained` wrote: every tensor bit by bit
                (rounded, if it is loaded in another dtype), and the first numbers that it computes within 1e-3.
            padding_free: whether encoders remove padding unless a call says otherwise; see `ScratchBertModel.forward`.
                By default that of `config`, or False. It is not saved.

        Raises:
            ValueError: the checkpoint, or `config`, is of another kind of model or has relative positions; or with
                `verify`, the model is not the one that was saved, or is quantised, sharded or offloaded.
            OSError: there is no such checkpoint, it has no config.json, or one of its files cannot be read; or with
                `verify`, it has no probe.json, or a damaged one.
        """
        source = pretrained_model_name_or_path
        options = hub_options(source, kwargs)
        with_info = kwargs.pop("output_loading_info", False)
        with explained(source, kwargs | options):
            fields = _raw_fields(source, options)
            if not (is_own := cls.config_class.is_own(fields)):
                fields = fields and installed("bert.fields").scratchbert_fields(fields, source)
            model_class: Any = cls._class_for(bool(fields.get("is_encoder_decoder")))
            _check_class(model_class, fields, source)
            check_probe = installed("probe.comparison").probe_check(source, kwargs | options) if verify else None
            if not is_own:
                key_mapping = installed("bert.loading").bert_key_mapping(
                    model_class, source, bool(fields), key_mapping, options, kwargs
                )
            if isinstance(config, PreTrainedConfig):
                config = config if _is_our_config(config) else cls.config_class.from_bert(config)
            kwargs |= {**options, "config": config, "key_mapping": key_mapping, "output_loading_info": True}
            load: Any = super(ScratchBertPreTrainedModel, model_class).from_pretrained
            model, info = load(source, *model_args, **kwargs)
        _check_blocks(model, info, source)
        _warn_of_unset_tensors(model, info["missing_keys"], source)
        # Encoder and decoder have configurations of their own.
        models: list[Any] = [module for module in model.modules() if isinstance(module, ScratchBertPreTrainedModel)]
        for each in models if padding_free is not None else ():
            each.config.padding_free = padding_free
        model._weight_conversions = []  # with which transformers would save under BERT's names again
        if check_probe is not None:
            check_probe(model)
        return (model, info) if with_info else model  # type: ignore[return-value]

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
            RuntimeError: the model is optimised for inference.
        """
        self._refuse_if_optimized("save_pretrained()")
        self.config.auto_map = self._auto_map()
        if push_to_hub:
            kwargs.setdefault("repo_id", Path(save_directory).name)
        with staged(save_directory) as folder:
            if state_dict is None and is_main_process:
                try:
                    installed("probe.recording").write_probe(self, folder, variant)
                except Exception as error:  # the package may be absent, or broken
                    logger.warning_once(f"The model is saved without a probe.json: {error}")
            super().save_pretrained(
                str(folder), is_main_process, state_dict, push_to_hub, max_shard_size, variant, *args, **kwargs
            )
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
        own = (__name__, f"{PACKAGE}.modeling_scratchbert")
        derived = [
            cls
            for cls in type(self).__mro__
            if issubclass(cls, ScratchBertPreTrainedModel)
            and cls.__module__ not in own
            and not cls.__module__.startswith("torch.")  # FSDP derives classes that change nothing in the model
        ]
        if derived and type(self)._auto_class is None:
            name = derived[0].__name__
            logger.warning(
                f"{name} is defined outside modeling_scratchbert, so only {name}.from_pretrained can load "
                f"what is saved here. Call {name}.register_for_auto_class('AutoModel…') before saving to "
                "let the Auto classes load it."
            )
        return {"AutoConfig": AUTO_MAP["AutoConfig"]} if derived else dict(AUTO_MAP)

    def save_as_bert(self, save_directory: str | os.PathLike) -> None:
        """Save a BERT checkpoint: config.json and model.safetensors with BERT's names, which the `Bert…` class loads
        with no tensor missing or left over, as do tools outside `transformers`.

        Raises:
            ValueError: BERT does not have this configuration, class or tensor, or a tensor is quantised, distributed or
                without values.
            RuntimeError: the model is optimised for inference.
        """
        self._refuse_if_optimized("save_as_bert()")
        installed("bert.export").save_as_bert(self, save_directory)


def _raw_fields(source, options: dict) -> dict:
    """Return the fields of the config.json of `source`; none if there is no such file, but a state dict, an adapter or
    weights alone."""
    folder = Path(source).parent if source is not None and os.path.isfile(source) else source
    # If the Hub cannot be reached, this raises, so that it is not tried for every file of weights. With a resolved
    # revision the repository is in the cache, and may have no config.json.
    is_new = type(options.get("revision")).__name__ != "ResolvedRevision"
    if source is None or not cached_file(
        folder, "config.json", _raise_exceptions_for_missing_entries=is_new, **options
    ):
        return {}
    return raw_config(folder, **options)[0]


def _is_our_config(config) -> bool:
    """Return whether `config` is a `ScratchBertConfig`, of this copy of the package or of the copy in a checkpoint."""
    return any(cls.__name__ == "ScratchBertConfig" for cls in type(config).__mro__)


def _check_class(cls: type[ScratchBertPreTrainedModel], fields: dict, source) -> None:
    """Raise ValueError if `fields`, of a configuration, are those of a seq2seq model and `cls` is none, or the reverse.
    No fields are those of any model."""
    is_encoder_decoder = bool(fields.get("is_encoder_decoder"))
    if fields and is_encoder_decoder != cls._is_encoder_decoder:
        advice = "Start a model from a single BERT with ScratchBertForConditionalGeneration.from_bert(…)."
        if is_encoder_decoder:
            advice = "Load it with ScratchBertForConditionalGeneration or AutoModel, and call get_encoder()."
        raise ValueError(
            f"is_encoder_decoder is {is_encoder_decoder} in {source}; {cls.__name__} expected "
            f"{not is_encoder_decoder}. {advice}"
        )


def _check_blocks(model, info: dict, source) -> None:
    """Raise ValueError if every block was left random although the checkpoint has blocks of other names."""
    blocks = {name for name, _ in model.named_parameters() if ".blocks." in name}
    has_others = any(".0." in name for name in info["unexpected_keys"])
    if blocks and has_others and blocks <= info["missing_keys"]:
        raise ValueError(
            f"{source or 'state_dict'} has {min(info['unexpected_keys'])!r} and no {min(blocks)!r}; "
            f"expected the names of a BERT or ScratchBert. Pass key_mapping={{pattern: replacement}}; in "
            f"a derived class, base_model_prefix, here {model.base_model_prefix!r}, must name the "
            "attribute that holds the encoder."
        )


def _warn_of_unset_tensors(model, missing: set[str], source) -> None:
    """Warn of tensors that the checkpoint does not have and `_init_weights` did not set. `from_pretrained` makes
    modules on the meta device, so the values that `__init__` gave them are lost.

    A derived class may set its tensors in any way, so nothing is checked if it has its own `_init_weights`.
    """
    if type(model)._init_weights is not ScratchBertPreTrainedModel._init_weights:
        return
    names = []
    for path, module in model.named_modules():
        prefix = f"{path}." if path else ""
        absent = {name for name in module._parameters if prefix + name in missing}
        for name in sorted(absent | module._non_persistent_buffers_set):
            tensor = getattr(module, name)
            if tensor is not None and not tensor.is_inference() and tensor._version == 0:  # never written to
                names.append(prefix + name)
    if names:
        logger.warning(
            f"{source or 'state_dict'} has no {', '.join(names)}, and from_pretrained does not keep the values of "
            f"__init__; expected {type(model).__name__}._init_weights to set them. Buffers can also be registered with "
            "persistent=True."
        )
