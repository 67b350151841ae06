"""What all models share: how they start, load and save. The models themselves are in `modeling_scratchbert`."""

import json
import logging
import os
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import PreTrainedConfig, PreTrainedModel
from transformers import initialization as init
from transformers.dynamic_module_utils import get_relative_import_files
from transformers.utils.output_capturing import OutputRecorder

from .attention import MultiHeadAttention
from .bert_weights import OUTPUT_BIAS, OUTPUT_BIAS_ALIAS, loading_patterns, to_bert, to_scratchbert
from .checkpoints import staged, tensor_names
from .configuration_scratchbert import AUTO_MAP, ScratchBertConfig, scratchbert_fields
from .embeddings import SinusoidalPositions, sinusoidal_table
from .transformer import TransformerBlock

logger = logging.getLogger(__name__)

# The arguments of `from_pretrained` that say where on the Hub, or in the cache, a file is.
HUB_OPTIONS = ("cache_dir", "force_download", "local_files_only", "proxies", "revision", "subfolder", "token")


class ScratchBertPreTrainedModel(PreTrainedModel):
    """A model that loads from BERT's checkpoints and its own, and saves to either."""

    config: ScratchBertConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _supports_flash_attn = True
    _supports_sdpa = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    _no_split_modules = ["Embeddings", "TransformerBlock"]
    # Buffers that old BERT checkpoints stored, and the alias of the output bias (see `bert_weights`).
    _keys_to_ignore_on_load_unexpected = [r"\bposition_ids$", rf"^{OUTPUT_BIAS_ALIAS}$"]
    _can_record_outputs = {
        "hidden_states": TransformerBlock,
        "attentions": OutputRecorder(MultiHeadAttention, index=1, layer_name="attention"),
        "cross_attentions": OutputRecorder(MultiHeadAttention, index=1, layer_name="cross_attention"),
    }

    @torch.no_grad()
    def _init_weights(self, module):
        super()._init_weights(module)
        if isinstance(module, SinusoidalPositions):
            init.copy_(module.table, sinusoidal_table(*module.table.shape))

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, *model_args, config=None, key_mapping=None, **kwargs):
        """Loads a ScratchBert checkpoint, or any BERT checkpoint, from a folder or a hub id.

        Weights that the checkpoint does not have are initialised and named in a warning. All other arguments are
        those of `PreTrainedModel.from_pretrained`.

        Raises:
            ValueError: the checkpoint, or `config`, is of another kind of model or wants relative positions.
            OSError: there is no such checkpoint, it has no config.json, or a file of it cannot be read.
        """
        source = pretrained_model_name_or_path
        hub_options = {name: kwargs[name] for name in HUB_OPTIONS if kwargs.get(name) is not None}
        raw_fields = _raw_config(source, hub_options)
        if raw_fields is not None:  # a caller's own `config` does not overrule what the checkpoint says it is
            scratchbert_fields(raw_fields, source)
        if isinstance(config, PreTrainedConfig) and config.model_type != ScratchBertConfig.model_type:
            config = cls.config_class.from_bert(config)
        names = set(kwargs.get("state_dict") or ())
        if source is not None and kwargs.get("gguf_file") is None:
            names = tensor_names(source, kwargs.get("variant"), kwargs.get("use_safetensors"), **hub_options)
        if (raw_fields or {}).get("model_type") != ScratchBertConfig.model_type:
            _refuse_foreign_tensors(names, source)
        model = super().from_pretrained(
            source, *model_args, config=config, key_mapping={**(key_mapping or {}), **loading_patterns(names)}, **kwargs
        )
        loaded = model[0] if isinstance(model, tuple) else model
        # transformers would undo the renaming on the way out; what we save bears our names.
        loaded._weight_conversions = []
        return model

    def save_pretrained(
        self, save_directory, is_main_process: bool = True, state_dict=None, push_to_hub: bool = False, **kwargs
    ):
        """Saves a ScratchBert checkpoint: weights in our names, the code, and a config.json whose `auto_map` leads
        the Auto classes to it. Files are written under a temporary name and moved into place when all are whole.

        The arguments are those of `PreTrainedModel.save_pretrained`.

        Raises:
            NotADirectoryError: `save_directory` is a file.
        """
        self.config.auto_map = self._auto_map()
        with staged(save_directory) as folder:
            if is_main_process:
                models = Path(__file__).with_name("modeling_scratchbert.py")
                for path in [models, *map(Path, get_relative_import_files(models))]:
                    shutil.copyfile(path, folder / path.name)
            super().save_pretrained(folder, is_main_process=is_main_process, state_dict=state_dict, **kwargs)
        if push_to_hub:
            details = ("commit_message", "private", "token", "revision", "create_pr", "max_shard_size")
            repo_id = kwargs.get("repo_id", Path(save_directory).name)
            self.push_to_hub(repo_id, **{name: kwargs[name] for name in details if name in kwargs})

    def _auto_map(self) -> dict[str, str]:
        """The `auto_map` of this model's checkpoint. A class derived from ours is not ours: opening its weights as
        the class that it derives from would drop what was changed, so that entry is left out."""
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
        ours = {f"modeling_scratchbert.{cls.__name__}" for cls in ancestors}
        return {auto: name for auto, name in AUTO_MAP.items() if name not in ours}

    def save_as_bert(self, save_directory: str | os.PathLike) -> None:
        """Writes a BERT checkpoint: config.json and model.safetensors in BERT's own names, which the `Bert…` twin
        loads with no tensor missing or left over, and tools outside of `transformers` read as well.

        Raises:
            ValueError: BERT cannot express this configuration, or has no such tensor or class.
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
        twin = next(cls.__name__ for cls in type(self).__mro__ if _is_ours(cls)).removeprefix("Scratch")
        fields = {
            name: value for name, value in config.to_diff_dict().items() if name not in ("norm_first", "auto_map")
        }
        return {
            **fields,
            "model_type": "bert",
            "architectures": [twin],
            "dtype": str(self.dtype).removeprefix("torch."),
            # transformers 5 no longer writes this field; other readers of BERT checkpoints ask for it.
            "position_embedding_type": "absolute",
            "tie_word_embeddings": config.tie_word_embeddings and self._is_tied(),
        }

    def _bert_tensors(self) -> dict[str, torch.Tensor]:
        with_head = self.base_model is not self
        bert_names = {
            name: to_bert(name if with_head else f"{self.base_model_prefix}.{name}") for name in self.state_dict()
        }
        if unknown := [name for name, bert_name in bert_names.items() if bert_name is None]:
            raise ValueError(
                f"BERT has no tensor for {', '.join(unknown)}: this model computes something else than BERT, and a "
                "BERT checkpoint cannot hold it. Save it with save_pretrained."
            )
        tensors = {
            bert_name if with_head else bert_name.removeprefix("bert."): tensor.contiguous()
            for bert_name, tensor in zip(bert_names.values(), self.state_dict().values(), strict=True)
        }
        if OUTPUT_BIAS in tensors:
            tensors[OUTPUT_BIAS_ALIAS] = tensors[OUTPUT_BIAS].clone()
            if self._is_tied():  # BERT's own files have the alias alone, and the matrix under the embeddings' name
                del tensors[OUTPUT_BIAS], tensors["cls.predictions.decoder.weight"]
        return tensors

    def _is_tied(self) -> bool:
        head = self.get_output_embeddings()
        return head is None or head.weight is self.get_input_embeddings().weight


def _raw_config(source, hub_options: dict) -> dict | None:
    """The checkpoint's config.json as it stands, or None where there is none: a folder of weights or of an adapter."""
    if source is None:
        return None
    try:
        return PreTrainedConfig.get_config_dict(source, **hub_options)[0]
    except OSError:
        return None


def _is_ours(cls: type) -> bool:
    """Whether `cls` is of this copy of the package: the installed one, or one that came with a checkpoint."""
    package = __name__.rpartition(".")[0]
    return cls.__module__ in (__name__, f"{package}.modeling_scratchbert")


def _refuse_foreign_tensors(names: set[str], source) -> None:
    relative = sorted(name for name in names if "distance_embedding" in name)
    if relative:
        raise ValueError(
            f"{source} holds {relative[0]}: it is a BERT with relative positions. ScratchBert loads BERT checkpoints "
            "with absolute positions only."
        )
    known = (to_scratchbert(name) or to_bert(name) or to_bert(f"model.{name}") for name in names)
    if names and not any(known):
        raise ValueError(
            f"{source} holds no weight of BERT's or ScratchBert's; its tensors have names like {min(names)!r}. Loading "
            "it would leave every weight random."
        )
