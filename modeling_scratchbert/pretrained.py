"""What all models share: how they start, load and save. The models themselves are in `modeling_scratchbert`."""

import json
import logging
import os
import re
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
from transformers.utils.hub import resolve_revision
from transformers.utils.output_capturing import OutputRecorder

from .attention import MultiHeadAttention
from .bert_weights import (
    OUTPUT_BIAS,
    OUTPUT_BIAS_ALIAS,
    loading_patterns,
    seq2seq_loading_patterns,
    to_bert,
    to_scratchbert,
    twin,
    without_half,
)
from .checkpoints import HUB_OPTIONS, check_reach, staged, tensor_names
from .configuration_scratchbert import (
    AUTO_MAP,
    ScratchBertConfig,
    copy_code,
    hub_in_one_line,
    raw_config,
    scratchbert_fields,
)
from .embeddings import SinusoidalPositions, sinusoidal_table
from .inference import InferenceMixin
from .transformer import TransformerBlock

logger = logging.getLogger(__name__)

# Those of the `HUB_OPTIONS` by which a revision is found.
REVISION_OPTIONS = ("cache_dir", "local_files_only", "token")

# Fields that the config.json of no BERT has.
NOT_IN_BERT = {
    "norm_first", "num_decoder_layers", "tie_encoder_decoder", "share_embeddings", "decoder_start_token_id",
    "padding_free", "sparse_prediction",
}  # fmt: skip

IN_A_BLOCK = re.compile(r"(bert\.)?encoder\.layer\.\d+\.")


class ScratchBertPreTrainedModel(InferenceMixin, PreTrainedModel):
    """A model that loads from BERT's checkpoints and its own, and saves to either."""

    config: ScratchBertConfig
    config_class: type[ScratchBertConfig]
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _supports_flash_attn = True
    _supports_sdpa = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    _no_split_modules = ["Embeddings", "TransformerBlock"]
    # Buffers that old BERT checkpoints stored, and the alias of the output bias (see `bert_weights`).
    _keys_to_ignore_on_load_unexpected = [r"\bposition_ids$", rf"^(decoder\.)?{OUTPUT_BIAS_ALIAS}$"]
    _has_two_halves = False
    _can_record_outputs = {
        "hidden_states": TransformerBlock,
        "attentions": OutputRecorder(MultiHeadAttention, index=1, layer_name="attention"),
        "cross_attentions": OutputRecorder(MultiHeadAttention, index=1, layer_name="cross_attention"),
    }

    def __init__(self, config: ScratchBertConfig, *args, **kwargs):
        if not _is_our_config(config):
            raise TypeError(
                f"{type(self).__name__} is made from a ScratchBertConfig; got a {type(config).__name__}. "
                "ScratchBertConfig.from_bert(config) makes one of a BertConfig."
            )
        config.check()
        _refuse_other_halves(type(self), config.is_encoder_decoder, "config")
        super().__init__(config, *args, **kwargs)

    def __getattr__(self, name: str):
        if name == "generate":
            raise AttributeError(
                f"{type(self).__name__} has no head to generate with. ScratchBertForCausalLM and "
                "ScratchBertForConditionalGeneration have generate."
            )
        return super().__getattr__(name)

    @classmethod
    def _class_for(cls, is_encoder_decoder: bool) -> "type[ScratchBertPreTrainedModel]":
        """The class that opens a checkpoint of one or of two halves where this one was asked to."""
        return cls

    @classmethod
    def _from_config(cls, config, **kwargs):
        return super(ScratchBertPreTrainedModel, cls._class_for(config.is_encoder_decoder))._from_config(
            config, **kwargs
        )

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
        **kwargs,
    ) -> Self:
        """Loads a ScratchBert checkpoint, or any BERT checkpoint, from a folder or a hub id.

        Weights that the checkpoint does not have are initialised and named in a warning. All other arguments are
        those of `PreTrainedModel.from_pretrained`.

        Raises:
            ValueError: the checkpoint, or `config`, is of another kind of model or wants relative positions.
            OSError: there is no such checkpoint, it has no config.json, or a file of it cannot be read.
        """
        source = pretrained_model_name_or_path
        # One commit for all that is read below, and one question to the Hub for which it is.
        revision = resolve_revision(
            source, kwargs.get("revision"), **{name: kwargs[name] for name in REVISION_OPTIONS if name in kwargs}
        )
        if revision is not None:
            kwargs["revision"] = revision
        hub_options = {name: kwargs[name] for name in HUB_OPTIONS if kwargs.get(name) is not None}
        own_type = cls.config_class.model_type
        raw_fields = _raw_fields(source, hub_options)
        if raw_fields is not None:  # a caller's own `config` does not overrule what the checkpoint says it is
            has_two_halves = bool(scratchbert_fields(raw_fields, source, own_type).get("is_encoder_decoder"))
            other: Any = cls._class_for(has_two_halves)  # not always a `Self`: see `ScratchBertModel`
            if other is not cls:
                return other.from_pretrained(source, *model_args, config=config, key_mapping=key_mapping, **kwargs)
            _refuse_other_halves(cls, has_two_halves, source)
        is_own = raw_fields is not None and raw_fields.get("model_type") in (ScratchBertConfig.model_type, own_type)
        if isinstance(config, PreTrainedConfig) and not _is_our_config(config):
            config = cls.config_class.from_bert(config)

        names = set(kwargs["state_dict"]) if kwargs.get("state_dict") else None
        which = kwargs.get("variant"), kwargs.get("use_safetensors")
        if source is not None and kwargs.get("gguf_file") is None:
            with hub_in_one_line(source, hub_options.get("revision")):
                names = tensor_names(source, *which, **hub_options)
        key_mapping = dict(key_mapping or {})
        if names is not None:
            renamings = [WeightRenaming(old, new) for old, new in key_mapping.items()]
            names = {apply_renamings(name, renamings) for name in names}
            refuse_foreign_tensors(names, source or "state_dict", is_own)
        if not is_own and any(name.startswith("decoder.bert.") for name in names or ()):
            key_mapping |= seq2seq_loading_patterns(names or set())
        elif not is_own:
            key_mapping |= loading_patterns(names or set(), cls.base_model_prefix)
        with_info = kwargs.pop("output_loading_info", False)
        with hub_in_one_line(source, hub_options.get("revision")):
            try:
                loaded: Any = super().from_pretrained(  # a pair, which its hint does not tell
                    source, *model_args, config=config, key_mapping=key_mapping, output_loading_info=True, **kwargs
                )
            except OSError:
                if names is None and source is not None and kwargs.get("gguf_file") is None:
                    check_reach(source, *which, **hub_options)
                raise
        model, info = loaded
        if not is_own and names:
            _refuse_empty_blocks(model, info["missing_keys"], source or "state_dict")
        # transformers would undo the renaming on the way out; what we save bears our names.
        model._weight_conversions = []
        return loaded if with_info else model

    def save_pretrained(
        self,
        save_directory: str | os.PathLike,
        is_main_process: bool = True,
        state_dict: dict | None = None,
        push_to_hub: bool = False,
        *args,
        **kwargs,
    ) -> None:
        """Saves a ScratchBert checkpoint: weights in our names, the code, and a config.json whose `auto_map` leads
        the Auto classes to it. Files are written under a temporary name and moved into place when all are whole.

        The arguments are those of `PreTrainedModel.save_pretrained`.

        Raises:
            NotADirectoryError: `save_directory` is a file.
        """
        self.config.auto_map = self._auto_map()
        if push_to_hub:
            kwargs.setdefault("repo_id", Path(save_directory).name)
        with staged(save_directory) as folder:
            super().save_pretrained(folder, is_main_process, state_dict, push_to_hub, *args, **kwargs)
            if not isinstance(self.config, ScratchBertConfig) and (folder / "config.json").exists():
                copy_code(folder)  # the configuration, of another copy of the package, has copied the files of that
            if push_to_hub and Path(save_directory, "README.md").exists():
                (folder / "README.md").unlink(missing_ok=True)  # the Hub's model card is not to replace the user's

    def _auto_map(self) -> dict[str, str]:
        """The `auto_map` of this model's checkpoint. A class derived from ours is not ours: any of ours would open its
        weights without what was changed, so no model is named, unless `register_for_auto_class` names the class."""
        ancestors = [cls for cls in type(self).__mro__ if issubclass(cls, ScratchBertPreTrainedModel)]
        # FSDP's classes, made on the fly, change nothing of the model.
        derived = [cls for cls in ancestors if not _is_ours(cls) and not cls.__module__.startswith("torch.")]
        if not derived:
            return dict(AUTO_MAP)
        if type(self)._auto_class is None:
            logger.warning(
                "%s is defined outside of modeling_scratchbert. %s.from_pretrained opens what is saved here; for the "
                "Auto classes to do so, call %s.register_for_auto_class('AutoModel…') before saving.",
                *[derived[0].__name__] * 3,
            )
        return {"AutoConfig": AUTO_MAP["AutoConfig"]}

    def save_as_bert(self, save_directory: str | os.PathLike) -> None:
        """Writes a BERT checkpoint: config.json and model.safetensors in BERT's own names, which the `Bert…` twin
        loads with no tensor missing or left over, and tools outside of `transformers` read as well.

        Raises:
            ValueError: BERT cannot express this configuration, or has no such tensor or class; or a tensor is
                quantised, cut up among processes, or without values.
        """
        fields, tensors = self._bert_fields(), self._bert_tensors()
        with staged(save_directory) as folder:
            save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
            text = json.dumps(fields, indent=2, sort_keys=True) + "\n"
            (folder / "config.json").write_text(text, encoding="utf-8")

    def _bert_fields(self) -> dict:
        config = self.config
        if config.norm_first:
            raise ValueError("norm_first is True: BERT's blocks are post-norm and its checkpoints have no other form.")
        if config.position_embedding_type != "absolute":
            raise ValueError(
                f"position_embedding_type is {config.position_embedding_type!r}: a BERT checkpoint holds a learned "
                "table of positions and nothing else."
            )
        if self._has_two_halves:
            raise ValueError(
                f"{type(self).__name__} has two halves, and a BERT checkpoint holds one. "
                "get_encoder().save_as_bert(…) writes the encoder, get_decoder().save_as_bert(…) the decoder."
            )
        own = next(cls.__name__ for cls in type(self).__mro__ if _is_ours(cls))
        if f"modeling_scratchbert.{own}" not in AUTO_MAP.values():
            raise ValueError(
                f"{type(self).__name__} derives from no model that BERT has a twin of; save_pretrained keeps it."
            )
        encoder: Any = self.base_model.get_submodule("encoder")
        blocks = len(encoder.blocks)
        if blocks != config.num_hidden_layers:
            raise ValueError(
                f"The model has {blocks} blocks and config.num_hidden_layers is {config.num_hidden_layers}."
            )
        dropped = {"auto_map", *NOT_IN_BERT}
        return {
            **{name: value for name, value in config.to_diff_dict().items() if name not in dropped},
            "model_type": "bert",
            "architectures": [twin(own)],
            "dtype": str(self.dtype).removeprefix("torch."),
            # transformers 5 no longer writes this field; other readers of BERT checkpoints ask for it.
            "position_embedding_type": "absolute",
            "tie_word_embeddings": self._is_tied(),
        }

    def _bert_tensors(self) -> dict[str, torch.Tensor]:
        with_head, prefix = self.base_model is not self, f"{self.base_model_prefix}."
        state = self.state_dict()
        if elsewhere := [name for name, tensor in state.items() if tensor.is_meta]:
            raise ValueError(
                f"{elsewhere[0]} has no values here, but on disk or nowhere: load without device_map first."
            )
        if special := [name for name, tensor in state.items() if type(tensor) is not torch.Tensor]:
            raise ValueError(
                f"{special[0]} is of type {type(state[special[0]]).__name__}: quantised, or cut up among processes. A "
                "BERT checkpoint has plain tensors: save the model with save_pretrained, or open what it was made of "
                "without quantisation or tensor parallelism, and call save_as_bert on that."
            )

        def bert_name(name: str) -> str | None:
            in_encoder = name.startswith(prefix) or not with_head
            return to_bert(f"model.{name.removeprefix(prefix)}" if in_encoder else name)

        bert_names = {name: theirs for name in state if (theirs := bert_name(name)) is not None}
        if unknown := [name for name in state if name not in bert_names]:
            raise ValueError(
                f"BERT has no tensor for {', '.join(unknown)}: this model computes something else than BERT, and a "
                "BERT checkpoint cannot hold it. Save it with save_pretrained."
            )
        tensors = {
            theirs if with_head else theirs.removeprefix("bert."): state[name].contiguous()
            for name, theirs in bert_names.items()
        }
        if OUTPUT_BIAS in tensors:
            tensors[OUTPUT_BIAS_ALIAS] = tensors[OUTPUT_BIAS].clone()
            if self._is_tied():  # BERT's own files have the alias alone, and the matrix under the embeddings' name
                del tensors[OUTPUT_BIAS], tensors["cls.predictions.decoder.weight"]
        return tensors

    def _is_tied(self) -> bool:
        """Whether the vocabulary's matrix is one, whatever the configuration, which may have changed since, says."""
        head = self.get_output_embeddings()
        return self.config.tie_word_embeddings if head is None else head.weight is self.get_input_embeddings().weight


def _raw_fields(source, hub_options: dict) -> dict | None:
    """The checkpoint's config.json as it stands, or None where there is none: a folder of weights or of an adapter."""
    if source is None:
        return None
    folder = Path(source).parent if os.path.isfile(source) else source
    # Without a network this is where the Hub is found to be out of reach, rather than again at every file of weights.
    # What is in the cache without a config.json, as an adapter is, has a commit there.
    is_new = not isinstance(hub_options.get("revision"), ResolvedRevision)
    with hub_in_one_line(source, hub_options.get("revision")):
        if cached_file(folder, "config.json", _raise_exceptions_for_missing_entries=is_new, **hub_options) is None:
            return None
    return raw_config(folder, **hub_options)[0]


def _is_our_config(config) -> bool:
    """Whether `config` is a `ScratchBertConfig`, of this copy of the package or of one that came with a checkpoint."""
    return any(cls.__name__ == "ScratchBertConfig" for cls in type(config).__mro__)


def _is_ours(cls: type) -> bool:
    """Whether `cls` is of this copy of the package: the installed one, or one that came with a checkpoint."""
    package = __name__.rpartition(".")[0]
    return cls.__module__ in (__name__, f"{package}.modeling_scratchbert")


def _refuse_other_halves(cls: type[ScratchBertPreTrainedModel], has_two_halves: bool, what) -> None:
    """Raises ValueError if `what`, a checkpoint or a configuration, has a decoder beside its encoder and models of
    `cls` have not, or the reverse."""
    if has_two_halves and not cls._has_two_halves:
        raise ValueError(
            f"is_encoder_decoder is True in {what}: it has an encoder and a decoder, and {cls.__name__} would drop the "
            "decoder. ScratchBertForConditionalGeneration, ScratchBertSeq2SeqModel and AutoModel open both halves; "
            "get_encoder() then gives the encoder, which can be saved by itself."
        )
    if cls._has_two_halves and not has_two_halves:
        raise ValueError(
            f"is_encoder_decoder is False in {what}, and {cls.__name__} has an encoder and a decoder. "
            "ScratchBertForConditionalGeneration.from_bert(…) starts one from a BERT; for random weights, give the "
            "configuration is_encoder_decoder=True."
        )


def refuse_foreign_tensors(names: set[str], source, is_own: bool) -> None:
    """Raises ValueError if these tensors are of something that we cannot compute, or would leave every weight random.

    In a checkpoint that says it is ours, strange names are left to the warning that names all missing weights; but not
    those that a wrapper, such as DataParallel or torch.compile, has put something before.
    """
    strange = sorted(name for name in names if IN_A_BLOCK.match(without_half(name)) and not _is_known(name))
    if strange and not is_own:
        relative = any("distance_embedding" in name for name in strange)
        what = "relative positions" if relative else "blocks of another make"
        raise ValueError(
            f"{source} holds {strange[0]}: it is a BERT with {what}. ScratchBert loads BERT checkpoints whose blocks "
            "are BERT's own, with absolute positions."
        )
    if any(map(_is_known, names)):
        return
    if not is_own or any(_is_known(name.partition(".")[2]) for name in names):
        example = f"its tensors have names like {min(names)!r}" if names else "it holds no tensors at all"
        raise ValueError(
            f"{source} holds no weight of BERT's or ScratchBert's: {example}. Loading it would leave every weight "
            "random. If the names need changing, key_mapping={pattern: replacement} does it."
        )


def _refuse_empty_blocks(model: PreTrainedModel, missing: set[str], source) -> None:
    """Raises ValueError if a checkpoint with weights of BERT's left all blocks of the model random."""
    blocks = {name for name, _ in model.named_parameters() if ".blocks." in name}
    if blocks and blocks <= missing:
        raise ValueError(
            f"Of {source} no block found its place in {type(model).__name__}, whose base_model_prefix is "
            f"{model.base_model_prefix!r}: it must be the name of the attribute that holds the ScratchBertModel. "
            f"Missing, for one: {min(blocks)}."
        )


def _is_known(name: str) -> bool:
    name = without_half(name)
    return bool(to_scratchbert(name) or to_bert(name) or to_bert(f"model.{name}"))
