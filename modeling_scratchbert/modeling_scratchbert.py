"""The models: the encoder, and the heads that BERT was pre-trained and fine-tuned with (Devlin et al. 2018).

Classes stand in the order in which data flows. Signatures, outputs and losses are those of the `Bert…` twins in
`transformers`; the blocks are in `embeddings`, `attention`, `feed_forward` and `transformer`.
"""

import copy
import json
import logging
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, mse_loss
from transformers import PreTrainedConfig, PreTrainedModel
from transformers import initialization as init
from transformers.activations import ACT2FN
from transformers.cache_utils import Cache, DynamicCache, EncoderDecoderCache
from transformers.dynamic_module_utils import get_relative_import_files
from transformers.masking_utils import create_bidirectional_mask, create_causal_mask
from transformers.modeling_outputs import (
    BaseModelOutputWithPoolingAndCrossAttentions,
    MaskedLMOutput,
    MultipleChoiceModelOutput,
    NextSentencePredictorOutput,
    QuestionAnsweringModelOutput,
    SequenceClassifierOutput,
    TokenClassifierOutput,
)
from transformers.utils import ModelOutput
from transformers.utils.generic import can_return_tuple, merge_with_config_defaults
from transformers.utils.output_capturing import OutputRecorder, capture_outputs

from .attention import MultiHeadAttention
from .bert_weights import OUTPUT_BIAS, OUTPUT_BIAS_ALIAS, loading_patterns, to_bert, to_scratchbert
from .checkpoints import staged, tensor_names
from .configuration_scratchbert import AUTO_MAP, ScratchBertConfig, scratchbert_fields
from .embeddings import Embeddings, SinusoidalPositions, sinusoidal_table
from .input_checks import check_inputs, check_mask
from .transformer import TransformerBlock, TransformerStack

logger = logging.getLogger(__name__)

# The arguments of `from_pretrained` that say where on the Hub, or in the cache, a file is.
HUB_OPTIONS = ("cache_dir", "force_download", "local_files_only", "proxies", "revision", "subfolder", "token")


class ScratchBertPreTrainedModel(PreTrainedModel):
    """What all models share: how they start, load, and save."""

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
        if config is not None:
            config = cls._checked_config(config, source, hub_options)
        names = set(kwargs.get("state_dict") or ())
        if source is not None and kwargs.get("gguf_file") is None:
            names = tensor_names(source, kwargs.get("variant"), kwargs.get("use_safetensors"), **hub_options)
        _refuse_foreign_tensors(names, source)
        model = super().from_pretrained(
            source, *model_args, config=config, key_mapping={**(key_mapping or {}), **loading_patterns(names)}, **kwargs
        )
        loaded = model[0] if isinstance(model, tuple) else model
        # transformers would undo the renaming on the way out; what we save bears our names.
        loaded._weight_conversions = []
        return model

    @classmethod
    def _checked_config(cls, config, source, hub_options: dict):
        """The caller's own `config`, as ours. It does not overrule what the checkpoint's config.json says it is."""
        if source is not None:
            try:
                fields, _ = PreTrainedConfig.get_config_dict(source, **hub_options)
            except OSError:  # weights without a config.json: the caller's word stands
                pass
            else:
                scratchbert_fields(fields, source)
        if isinstance(config, PreTrainedConfig) and config.model_type != ScratchBertConfig.model_type:
            return cls.config_class.from_bert(config)
        return config

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
                module_file = Path(__file__)
                for path in [module_file, *map(Path, get_relative_import_files(module_file))]:
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
        derived = [cls for cls in ancestors if cls.__module__ != __name__ and not cls.__module__.startswith("torch.")]
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
        twin = next(cls.__name__ for cls in type(self).__mro__ if cls.__module__ == __name__).removeprefix("Scratch")
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


class Pooler(nn.Module):
    """What the first token, [CLS], says of the whole sequence: tanh(W h_0 + b). `(B, T, C)` → `(B, C)`."""

    def __init__(self, config):
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.dense(hidden_states[:, 0]))


class ScratchBertModel(ScratchBertPreTrainedModel):
    """BERT without a head: embeddings, the stack of blocks, and the pooler.

    With `config.is_decoder` its blocks look back only, and with `config.add_cross_attention` at an encoder's output
    as well, as in `BertModel`.
    """

    def __init__(self, config: ScratchBertConfig, add_pooling_layer: bool = True):
        super().__init__(config)
        self.embeddings = Embeddings(config)
        self.encoder = TransformerStack(config)
        self.pooler = Pooler(config) if add_pooling_layer else None
        self.post_init()

    def get_input_embeddings(self) -> nn.Embedding:
        return self.embeddings.word_embeddings

    def set_input_embeddings(self, value: nn.Embedding):
        self.embeddings.word_embeddings = value

    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        token_type_ids: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        encoder_hidden_states: torch.Tensor | None = None,
        encoder_attention_mask: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        use_cache: bool | None = None,
        **kwargs,
    ) -> tuple[torch.Tensor] | BaseModelOutputWithPoolingAndCrossAttentions:
        """
        Args:
            input_ids: `(B, T)` token ids; or else `inputs_embeds`, `(B, T, C)`.
            attention_mask: `(B, T)`, 1 for a token and 0 for padding; or a full mask `(B, 1, T, T)`, boolean (True:
                may look) or additive.
            token_type_ids: `(B, T)`, 0 for sentence A and 1 for sentence B.
            position_ids: `(B, T)` or `(1, T)`; 0 to T - 1 if left out.
            encoder_hidden_states: `(B, S, C)`, for a decoder with cross-attention.
            encoder_attention_mask: `(B, S)`, 1 for a token and 0 for padding.
            past_key_values: the cache of a decoder.
            use_cache: whether a decoder fills one.
            output_attentions: also return every block's attention weights, `(B, H, T, T)`. The pass then runs the
                eager formula whatever attention is set, since no other kernel tells its weights.
            output_hidden_states: also return the embeddings and every block's output, `(B, T, C)`.
            return_dict: False for a plain tuple.

        Returns:
            `last_hidden_state` `(B, T, C)`, `pooler_output` `(B, C)` or None without a pooler, and what was asked for.

        Raises:
            ValueError: an argument is unfit; the message names it, what it got and what it wants.
        """
        past_length = past_key_values.get_seq_length() if past_key_values is not None else 0
        check_inputs(self.config, input_ids, inputs_embeds, attention_mask, token_type_ids, position_ids, past_length)
        if use_cache and self.config.is_decoder and past_key_values is None:
            past_key_values = self._new_cache(encoder_hidden_states)

        embeddings = self.embeddings(input_ids, token_type_ids, position_ids, inputs_embeds, past_length)
        kwargs["output_attentions"] = kwargs.get("output_attentions", self.config.output_attentions)
        attention_mask, encoder_attention_mask = self._attention_masks(
            embeddings,
            attention_mask,
            encoder_hidden_states,
            encoder_attention_mask,
            past_key_values,
            eager=kwargs["output_attentions"],
        )
        hidden_states = self.encoder(
            embeddings,
            attention_mask,
            encoder_hidden_states,
            encoder_attention_mask=encoder_attention_mask,
            past_key_values=past_key_values,
            **kwargs,
        )
        return BaseModelOutputWithPoolingAndCrossAttentions(
            last_hidden_state=hidden_states,
            pooler_output=self.pooler(hidden_states) if self.pooler is not None else None,
            past_key_values=past_key_values if use_cache else None,
        )

    def _new_cache(self, encoder_hidden_states) -> Cache:
        own = DynamicCache(config=self.config)
        if encoder_hidden_states is None:
            return own
        return EncoderDecoderCache(own, DynamicCache(config=self.config))

    def _attention_masks(self, embeddings, mask, encoder_hidden_states, encoder_mask, cache, eager: bool):
        """The padding masks in the form that the attention kernel of this call wants."""
        config = self.config
        if eager and config._attn_implementation != "eager":
            config = copy.copy(config)
            config._attn_implementation = "eager"
        if self.config.is_decoder:
            mask = create_causal_mask(config, embeddings, mask, cache)
        else:
            mask = create_bidirectional_mask(config, embeddings, mask)
        if encoder_hidden_states is not None:
            if not self.config.add_cross_attention:
                raise ValueError(
                    "encoder_hidden_states needs cross-attention, which this model does not have: make it with "
                    "is_decoder=True and add_cross_attention=True."
                )
            batch, keys = encoder_hidden_states.shape[:2]
            check_mask("encoder_attention_mask", encoder_mask, batch, embeddings.shape[1], keys)
            encoder_mask = create_bidirectional_mask(config, embeddings, encoder_mask, encoder_hidden_states)
        return mask, encoder_mask


class LanguageModelHead(nn.Module):
    """Scores for every word of the vocabulary: `(B, T, C)` → `(B, T, V)`. The matrix is the word embeddings' own."""

    def __init__(self, config):
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.activation = ACT2FN[config.hidden_act]
        self.norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.decoder = nn.Linear(config.hidden_size, config.vocab_size)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.decoder(self.norm(self.activation(self.dense(hidden_states))))


class ScratchBertWithLanguageModelHead(ScratchBertPreTrainedModel):
    """The models that score the vocabulary, and so share a matrix between input and output."""

    _tied_weights_keys = {"lm_head.decoder.weight": "model.embeddings.word_embeddings.weight"}

    def get_output_embeddings(self) -> nn.Linear:
        return self.lm_head.decoder

    def set_output_embeddings(self, new_embeddings: nn.Linear):
        self.lm_head.decoder = new_embeddings


@dataclass
class ScratchBertForPreTrainingOutput(ModelOutput):
    """Output of `ScratchBertForPreTraining`, field by field that of `BertForPreTraining`.

    Args:
        loss: the sum of the masked-LM and the next-sentence loss, where both labels were given.
        prediction_logits: `(B, T, V)`.
        seq_relationship_logits: `(B, 2)`; 0: B follows A, 1: B is a random sentence.
        hidden_states: a tuple of `(B, T, C)`, where asked for.
        attentions: a tuple of `(B, H, T, T)`, where asked for.
    """

    loss: torch.Tensor | None = None
    prediction_logits: torch.Tensor | None = None
    seq_relationship_logits: torch.Tensor | None = None
    hidden_states: tuple[torch.Tensor] | None = None
    attentions: tuple[torch.Tensor] | None = None


class ScratchBertForPreTraining(ScratchBertWithLanguageModelHead):
    """Both tasks of BERT's pre-training: masked LM and next sentence (Devlin et al. 2018, section 3.1)."""

    def __init__(self, config: ScratchBertConfig):
        super().__init__(config)
        self.model = ScratchBertModel(config)
        self.lm_head = LanguageModelHead(config)
        self.next_sentence_head = nn.Linear(config.hidden_size, 2)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        token_type_ids: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        next_sentence_label: torch.Tensor | None = None,
        **kwargs,
    ) -> tuple[torch.Tensor] | ScratchBertForPreTrainingOutput:
        """
        Args:
            labels: `(B, T)`, the masked words' ids, and -100 wherever no word was masked.
            next_sentence_label: `(B,)`; 0: sentence B follows A, 1: it is a random one.

        The other arguments are those of `ScratchBertModel.forward`.
        """
        outputs = self.model(
            input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds, return_dict=True, **kwargs
        )
        prediction_logits = self.lm_head(outputs.last_hidden_state)
        seq_relationship_logits = self.next_sentence_head(outputs.pooler_output)
        loss = None
        if labels is not None and next_sentence_label is not None:
            loss = cross_entropy(prediction_logits.view(-1, self.config.vocab_size), labels.view(-1))
            loss = loss + cross_entropy(seq_relationship_logits, next_sentence_label.view(-1))
        return ScratchBertForPreTrainingOutput(
            loss=loss,
            prediction_logits=prediction_logits,
            seq_relationship_logits=seq_relationship_logits,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )


class ScratchBertForMaskedLM(ScratchBertWithLanguageModelHead):
    """Fills in masked words (Devlin et al. 2018, section 3.1, task 1)."""

    def __init__(self, config: ScratchBertConfig):
        super().__init__(config)
        if config.is_decoder:
            logger.warning("config.is_decoder is True: each word then sees only those before it, not both sides.")
        self.model = ScratchBertModel(config, add_pooling_layer=False)
        self.lm_head = LanguageModelHead(config)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        token_type_ids: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        encoder_hidden_states: torch.Tensor | None = None,
        encoder_attention_mask: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        **kwargs,
    ) -> tuple[torch.Tensor] | MaskedLMOutput:
        """
        Args:
            labels: `(B, T)`, the masked words' ids, and -100 wherever no word was masked.

        The other arguments are those of `ScratchBertModel.forward`. `logits` are `(B, T, V)`.
        """
        outputs = self.model(
            input_ids,
            attention_mask,
            token_type_ids,
            position_ids,
            inputs_embeds,
            encoder_hidden_states,
            encoder_attention_mask,
            return_dict=True,
            **kwargs,
        )
        logits = self.lm_head(outputs.last_hidden_state)
        loss = None
        if labels is not None:
            loss = cross_entropy(logits.view(-1, self.config.vocab_size), labels.view(-1))
        return MaskedLMOutput(
            loss=loss, logits=logits, hidden_states=outputs.hidden_states, attentions=outputs.attentions
        )


class ScratchBertForNextSentencePrediction(ScratchBertPreTrainedModel):
    """Does sentence B follow sentence A? (Devlin et al. 2018, section 3.1, task 2)"""

    def __init__(self, config: ScratchBertConfig):
        super().__init__(config)
        self.model = ScratchBertModel(config)
        self.next_sentence_head = nn.Linear(config.hidden_size, 2)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        token_type_ids: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        **kwargs,
    ) -> tuple[torch.Tensor] | NextSentencePredictorOutput:
        """
        Args:
            labels: `(B,)`; 0: sentence B follows A, 1: it is a random one.

        The other arguments are those of `ScratchBertModel.forward`. `logits` are `(B, 2)`.
        """
        outputs = self.model(
            input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds, return_dict=True, **kwargs
        )
        logits = self.next_sentence_head(outputs.pooler_output)
        loss = None
        if labels is not None:
            loss = cross_entropy(logits, labels.view(-1))
        return NextSentencePredictorOutput(
            loss=loss, logits=logits, hidden_states=outputs.hidden_states, attentions=outputs.attentions
        )


class ClassifierDropout(nn.Dropout):
    """The dropout before a classifier: `classifier_dropout`, or the blocks' own rate where that is not set."""

    def __init__(self, config):
        rate = config.classifier_dropout
        super().__init__(config.hidden_dropout_prob if rate is None else rate)


class ScratchBertForSequenceClassification(ScratchBertPreTrainedModel):
    """A linear layer over the pooled output: classes, several labels at once, or numbers
    (Devlin et al. 2018, section 4.1)."""

    def __init__(self, config: ScratchBertConfig):
        super().__init__(config)
        self.num_labels = config.num_labels
        self.model = ScratchBertModel(config)
        self.dropout = ClassifierDropout(config)
        self.classifier = nn.Linear(config.hidden_size, config.num_labels)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        token_type_ids: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        **kwargs,
    ) -> tuple[torch.Tensor] | SequenceClassifierOutput:
        """
        Args:
            labels: `(B,)` class ids; or `(B,)` or `(B, L)` floats for regression; or `(B, L)` floats, 0 or 1, for
                several labels at once. `config.problem_type` says which, and is set at the first labels from their
                number and dtype if it is None.

        The other arguments are those of `ScratchBertModel.forward`. `logits` are `(B, L)`.
        """
        outputs = self.model(
            input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds, return_dict=True, **kwargs
        )
        logits = self.classifier(self.dropout(outputs.pooler_output))
        return SequenceClassifierOutput(
            loss=None if labels is None else self._loss(logits, labels),
            logits=logits,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )

    def _loss(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        if self.config.problem_type is None:
            if self.num_labels == 1:
                self.config.problem_type = "regression"
            elif labels.dtype in (torch.long, torch.int):
                self.config.problem_type = "single_label_classification"
            else:
                self.config.problem_type = "multi_label_classification"
        if self.config.problem_type == "regression":
            return mse_loss(logits.squeeze(), labels.squeeze()) if self.num_labels == 1 else mse_loss(logits, labels)
        if self.config.problem_type == "single_label_classification":
            return cross_entropy(logits, labels.view(-1))
        return binary_cross_entropy_with_logits(logits, labels)


class ScratchBertForTokenClassification(ScratchBertPreTrainedModel):
    """A linear layer over every token, as for named entities (Devlin et al. 2018, section 5.3)."""

    def __init__(self, config: ScratchBertConfig):
        super().__init__(config)
        self.num_labels = config.num_labels
        self.model = ScratchBertModel(config, add_pooling_layer=False)
        self.dropout = ClassifierDropout(config)
        self.classifier = nn.Linear(config.hidden_size, config.num_labels)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        token_type_ids: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        **kwargs,
    ) -> tuple[torch.Tensor] | TokenClassifierOutput:
        """
        Args:
            labels: `(B, T)` class ids, and -100 for tokens that do not count.

        The other arguments are those of `ScratchBertModel.forward`. `logits` are `(B, T, L)`.
        """
        outputs = self.model(
            input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds, return_dict=True, **kwargs
        )
        logits = self.classifier(self.dropout(outputs.last_hidden_state))
        loss = None
        if labels is not None:
            loss = cross_entropy(logits.view(-1, self.num_labels), labels.view(-1))
        return TokenClassifierOutput(
            loss=loss, logits=logits, hidden_states=outputs.hidden_states, attentions=outputs.attentions
        )


class ScratchBertForQuestionAnswering(ScratchBertPreTrainedModel):
    """Where in the text the answer starts and ends (Devlin et al. 2018, section 4.2)."""

    def __init__(self, config: ScratchBertConfig):
        super().__init__(config)
        self.num_labels = config.num_labels
        self.model = ScratchBertModel(config, add_pooling_layer=False)
        self.qa_outputs = nn.Linear(config.hidden_size, config.num_labels)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        token_type_ids: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        start_positions: torch.Tensor | None = None,
        end_positions: torch.Tensor | None = None,
        **kwargs,
    ) -> tuple[torch.Tensor] | QuestionAnsweringModelOutput:
        """
        Args:
            start_positions: `(B,)`, the answer's first token; one beyond the sequence's end is left out of the loss.
            end_positions: `(B,)`, its last, likewise.

        The other arguments are those of `ScratchBertModel.forward`. Both logits are `(B, T)`.
        """
        outputs = self.model(
            input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds, return_dict=True, **kwargs
        )
        start_logits, end_logits = (
            logits.squeeze(-1).contiguous() for logits in self.qa_outputs(outputs.last_hidden_state).split(1, dim=-1)
        )
        loss = None
        if start_positions is not None and end_positions is not None:
            beyond = start_logits.shape[1]
            loss = sum(
                cross_entropy(logits, positions.view(-1).clamp(0, beyond), ignore_index=beyond)
                for logits, positions in ((start_logits, start_positions), (end_logits, end_positions))
            ) / 2  # fmt: skip
        return QuestionAnsweringModelOutput(
            loss=loss,
            start_logits=start_logits,
            end_logits=end_logits,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )


class ScratchBertForMultipleChoice(ScratchBertPreTrainedModel):
    """Scores each choice by itself and takes the softmax over them (Devlin et al. 2018, section 4.4)."""

    def __init__(self, config: ScratchBertConfig):
        super().__init__(config)
        self.model = ScratchBertModel(config)
        self.dropout = ClassifierDropout(config)
        self.classifier = nn.Linear(config.hidden_size, 1)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        token_type_ids: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        **kwargs,
    ) -> tuple[torch.Tensor] | MultipleChoiceModelOutput:
        """
        Args:
            input_ids: `(B, N, T)` for N choices; so too `attention_mask`, `token_type_ids`, `position_ids`, and
                `inputs_embeds`, `(B, N, T, C)`.
            labels: `(B,)`, which choice is right.

        The other arguments are those of `ScratchBertModel.forward`. `logits` are `(B, N)`.
        """
        tokens = input_ids if input_ids is not None else inputs_embeds
        if tokens is not None and tokens.ndim != (3 if input_ids is not None else 4):
            name, wants = ("input_ids", "") if input_ids is not None else ("inputs_embeds", ", width")
            raise ValueError(f"{name} has shape {tuple(tokens.shape)}; it wants (batch, choices, length{wants}).")
        flat = [
            None if tensor is None else tensor.flatten(0, 1)
            for tensor in (input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds)
        ]
        outputs = self.model(*flat, return_dict=True, **kwargs)
        logits = self.classifier(self.dropout(outputs.pooler_output)).view(-1, tokens.shape[1])
        return MultipleChoiceModelOutput(
            loss=None if labels is None else cross_entropy(logits, labels),
            logits=logits,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )
