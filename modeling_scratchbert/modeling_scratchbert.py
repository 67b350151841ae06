"""The models: the encoder, the heads that BERT was pre-trained and fine-tuned with (Devlin et al. 2018), and the
generators: a decoder alone, and an encoder with a decoder (Rothe et al. 2020).

Classes stand in the order in which data flows. Signatures, outputs and losses are those of the `Bert…` twins in
`transformers`; unlike the twins' the losses of the batches of a step add up (see `average`). The blocks are in
`embeddings`, `attention`, `feed_forward` and `transformer`.
"""

import copy
import logging
import os
from dataclasses import dataclass
from typing import Any, Self, TypedDict, Unpack

import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, mse_loss
from transformers.activations import ACT2FN
from transformers.cache_utils import Cache, DynamicCache, EncoderDecoderCache
from transformers.generation import GenerationMixin
from transformers.masking_utils import create_bidirectional_mask, create_causal_mask
from transformers.modeling_outputs import (
    BaseModelOutput,
    BaseModelOutputWithPoolingAndCrossAttentions,
    CausalLMOutputWithCrossAttentions,
    MaskedLMOutput,
    MultipleChoiceModelOutput,
    NextSentencePredictorOutput,
    QuestionAnsweringModelOutput,
    Seq2SeqLMOutput,
    Seq2SeqModelOutput,
    SequenceClassifierOutput,
    TokenClassifierOutput,
)
from transformers.modeling_utils import slice_logits_to_keep
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import ModelOutput
from transformers.utils.generic import can_return_tuple, merge_with_config_defaults
from transformers.utils.import_utils import is_tracing
from transformers.utils.output_capturing import capture_outputs

from .attention import MultiHeadAttention
from .configuration_scratchbert import ScratchBertConfig
from .embeddings import Embeddings
from .feed_forward import FeedForward
from .input_checks import (
    cache_lengths,
    check_cache,
    check_choices,
    check_encoder_inputs,
    check_inputs,
    check_labels,
    check_mask,
    check_states,
)
from .packing import KERNELS, Packing, run_stack, without_padding
from .pretrained import ScratchBertPreTrainedModel
from .transformer import TransformerBlock, TransformerStack
from .warm_start import seq2seq_start

logger = logging.getLogger(__name__)

# Kernels that add a mask to the scores.
ADDING = ("sdpa", "flex_attention")


class ForwardOptions(TypedDict, total=False):
    """What every forward pass takes beside its own arguments: see `ScratchBertModel.forward`, and `average`."""

    output_attentions: bool | None
    output_hidden_states: bool | None
    return_dict: bool | None
    padding_free: bool
    cu_seq_lens_q: torch.Tensor | None
    cu_seq_lens_k: torch.Tensor | None
    max_length_q: int | None
    max_length_k: int | None
    num_items_in_batch: int | torch.Tensor | None


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
    as well, as in `BertModel`. A checkpoint of both halves opens as `ScratchBertSeq2SeqModel`.
    """

    @classmethod
    def _class_for(cls, is_encoder_decoder: bool) -> type[ScratchBertPreTrainedModel]:
        # AutoModel knows one class for each class of configurations.
        return ScratchBertSeq2SeqModel if is_encoder_decoder and cls is ScratchBertModel else cls

    def __init__(self, config: ScratchBertConfig, add_pooling_layer: bool = True):
        super().__init__(config)
        self.embeddings = Embeddings(config)
        self.encoder = TransformerStack(config)
        self.pooler = Pooler(config) if add_pooling_layer else None
        self.post_init()

    def get_input_embeddings(self) -> nn.Embedding:
        return self.embeddings.word_embeddings

    def set_input_embeddings(self, value: nn.Module):
        self.embeddings.word_embeddings = value

    @merge_with_config_defaults
    @capture_outputs
    @without_padding("last_hidden_state")
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
        **kwargs: Unpack[ForwardOptions],
    ) -> tuple | BaseModelOutputWithPoolingAndCrossAttentions:
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
            padding_free: False to have the blocks see the padding; `config.padding_free` if left out.
            cu_seq_lens_q: `(S + 1,)`, for an encoder: S sequences come packed in one row, `(1, N)`, and start here, as
                `DataCollatorWithFlattening` delivers them; so too `position_ids` that restart at 0. The outputs are
                then `(1, N, C)`, and `pooler_output` is `(S, C)`.
            max_length_q: the longest one's tokens, which spares the look at `cu_seq_lens_q`.

        Returns:
            `last_hidden_state` `(B, T, C)`, `pooler_output` `(B, C)` or None without a pooler, and what was asked for.
            An encoder computes the real tokens alone, and its `last_hidden_state` is zero where there is padding,
            unless attention maps or hidden states are asked for, the mask is a full one, or the model is compiled or
            exported: there padding is computed, as in BERT.

        Raises:
            ValueError: an argument is unfit; the message names it, what it got and what it wants.
        """
        kwargs.pop("num_items_in_batch", None)  # is for the heads' losses
        packing = attention_mask if isinstance(attention_mask, Packing) else None
        past_length, slots = cache_lengths(past_key_values)
        # `generate_batch` keeps keys in pages of its own.
        if "cache" in kwargs and isinstance(attention_mask, torch.Tensor):
            slots = attention_mask.shape[-1]
        # An adapter may have put a module without a size in the table's place.
        vocab_size = getattr(self.get_input_embeddings(), "num_embeddings", self.config.vocab_size)
        check_inputs(
            self.config,
            input_ids,
            inputs_embeds,
            attention_mask,
            token_type_ids,
            position_ids,
            past_length,
            vocab_size,
            slots,
        )
        # Checkpointed blocks run twice and must not fill a cache.
        use_cache = use_cache and self.config.is_decoder and not (self.training and self.is_gradient_checkpointing)
        if use_cache and past_key_values is None:
            past_key_values = DynamicCache(config=self.config)

        embeddings = self.embeddings(input_ids, token_type_ids, position_ids, inputs_embeds, past_length)
        batch, queries, _ = embeddings.shape
        if encoder_hidden_states is not None:
            check_encoder_inputs(self.config, encoder_hidden_states, encoder_attention_mask, batch, queries)
            if past_key_values is not None and not isinstance(past_key_values, EncoderDecoderCache):
                past_key_values = EncoderDecoderCache(past_key_values, DynamicCache(config=self.config))
        check_cache(self.config, past_key_values, batch, encoder_hidden_states)
        kwargs["output_attentions"] = kwargs.get("output_attentions", self.config.output_attentions)
        attention_mask, encoder_attention_mask = self._attention_masks(
            embeddings,
            attention_mask,
            encoder_hidden_states,
            encoder_attention_mask,
            past_key_values,
            eager=kwargs["output_attentions"],
        )
        hidden_states = run_stack(
            self.encoder,
            self.config.intermediate_size,
            embeddings,
            attention_mask,
            encoder_hidden_states,
            encoder_attention_mask=encoder_attention_mask,
            past_key_values=past_key_values,
            position_ids=position_ids,  # by which flash attention tells packed sequences apart
            **kwargs,
        )
        first = packing.first_tokens(hidden_states) if packing is not None else hidden_states
        return BaseModelOutputWithPoolingAndCrossAttentions(
            last_hidden_state=hidden_states,
            pooler_output=self.pooler(first) if self.pooler is not None else None,
            past_key_values=past_key_values if use_cache else None,
        )

    def takes_packed(self) -> bool:
        """Whether tokens look at one another through our own attention alone, and its kernel does without a mask.
        Another's block may do anything, and is given padded tokens and their mask."""
        blocks = self.encoder.blocks
        parts = [(Embeddings, self.embeddings), *((TransformerBlock, block) for block in blocks)]
        parts += [(MultiHeadAttention, getattr(block, "attention", None)) for block in blocks]
        parts += [(FeedForward, getattr(block, "feed_forward", None)) for block in blocks]
        # FSDP's classes, made on the fly, change nothing of the part.
        return self.config._attn_implementation in KERNELS and all(
            type(part) is own or (isinstance(part, own) and type(part).__module__.startswith("torch."))
            for own, part in parts
        )

    def _attention_masks(self, embeddings, mask, encoder_hidden_states, encoder_mask, cache, eager: bool | None):
        """The padding masks in the form that the attention kernel of this call wants."""
        config = self.config
        if eager and config._attn_implementation != "eager":
            config = copy.copy(config)
            config._attn_implementation = "eager"
        if isinstance(mask, Packing):
            # Compiled, packed attention knows no dropout.
            drops = is_tracing(embeddings) and self.training and config.attention_probs_dropout_prob > 0
            mask = mask.mask() if eager or drops or not self.takes_packed() else mask
        elif self.config.is_decoder:
            mask = create_causal_mask(config, embeddings, mask, cache)
        else:
            mask = create_bidirectional_mask(config, embeddings, mask)
        if encoder_hidden_states is not None:
            encoder_mask = create_bidirectional_mask(config, embeddings, encoder_mask, encoder_hidden_states)
        if config._attn_implementation in ADDING:  # which would make numbers of booleans in every block, or not at all
            mask, encoder_mask = (_added_to_scores(each, embeddings.dtype) for each in (mask, encoder_mask))
        return mask, encoder_mask


def _added_to_scores(mask: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    if not isinstance(mask, torch.Tensor) or mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=dtype).masked_fill(~mask, -torch.inf)


def average(loss, predictions: torch.Tensor, targets: torch.Tensor, num_items, **options) -> torch.Tensor:
    """The mean of a loss over a batch; or what the batch adds to the mean over several whose gradients are summed: its
    sum, divided by the number of targets of all. `Trainer` tells the heads that number, as `num_items_in_batch`: with
    accumulated gradients or several processes each target then counts the same, however many its own batch has.

    Args:
        loss: a function of `torch.nn.functional`.
        num_items: how many targets all batches have, a number or a tensor of one on any device; None for the mean.
        options: other arguments of `loss`.
    """
    if num_items is None:
        return loss(predictions, targets, **options)
    losses = loss(predictions, targets, reduction="none", **options)
    total = losses.sum(dtype=torch.promote_types(losses.dtype, torch.float32))  # too large a number for float16
    return total / torch.as_tensor(num_items, device=total.device)


class LanguageModelHead(nn.Module):
    """Scores for every word of the vocabulary: E · norm(act(W h + b)) + c, with E the word embeddings themselves
    (Devlin et al. 2018, section 3.1, task 1). `(B, T, C)` → `(B, T, V)`."""

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
    # Cut as the table of words is: see `base_model_tp_plan`.
    _tp_plan = {"lm_head.decoder": "colwise_gather_output"}

    def get_output_embeddings(self) -> nn.Linear:
        return self.lm_head.decoder

    def set_output_embeddings(self, new_embeddings: nn.Linear):
        self.lm_head.decoder = new_embeddings

    def _scores(self, states: torch.Tensor, mask) -> torch.Tensor:
        """The score of every word for each token. Where nothing more comes of them, those of packed tokens are padded
        here: two tables of the whole vocabulary are much memory."""
        if isinstance(mask, Packing) and not torch.is_grad_enabled():
            return mask.pad_scores(self.lm_head, states)
        return self.lm_head(states)

    def _labelled(
        self, states: torch.Tensor, labels: torch.Tensor | None, mask
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The states that are to be scored, and their labels: with `sparse_prediction`, of the labelled tokens, in the
        order in which they stand in the batch."""
        if labels is None or not self.config.sparse_prediction:
            return states, labels
        labelled = labels != -100
        states, labels = states[labelled], labels[labelled]
        if isinstance(mask, Packing) and mask.indices is not None:
            order = mask.indices.to(labels.device)[labelled[0]].argsort()
            states, labels = states[order], labels[order]
        return states, labels


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
    hidden_states: tuple[torch.Tensor, ...] | None = None
    attentions: tuple[torch.Tensor, ...] | None = None


class ScratchBertForPreTraining(ScratchBertWithLanguageModelHead):
    """Both tasks of BERT's pre-training: masked LM and next sentence (Devlin et al. 2018, section 3.1)."""

    def __init__(self, config: ScratchBertConfig):
        super().__init__(config)
        self.model = ScratchBertModel(config)
        self.lm_head = LanguageModelHead(config)
        self.next_sentence_head = nn.Linear(config.hidden_size, 2)
        self.post_init()

    @can_return_tuple
    @without_padding("prediction_logits", labels=True)
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        token_type_ids: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        next_sentence_label: torch.Tensor | None = None,
        **kwargs: Unpack[ForwardOptions],
    ) -> tuple | ScratchBertForPreTrainingOutput:
        """
        Args:
            labels: `(B, T)`, the masked words' ids, and -100 wherever no word was masked.
            next_sentence_label: `(B,)`; 0: sentence B follows A, 1: it is a random one.
            num_items_in_batch: how many masked words all batches of the step have. How many sequences they have is not
                said, so the batch's mean next-sentence loss counts for its share of the masked words.

        The other arguments are those of `ScratchBertModel.forward`.
        """
        outputs = self.model(
            input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds, return_dict=True, **kwargs
        )
        states, labels = self._labelled(outputs.last_hidden_state, labels, attention_mask)
        prediction_logits = self._scores(states, attention_mask if labels is None else None)
        seq_relationship_logits = self.next_sentence_head(outputs.pooler_output)
        loss = None
        if labels is not None and next_sentence_label is not None:
            num_items = kwargs.get("num_items_in_batch")
            loss = average(
                cross_entropy, prediction_logits.view(-1, self.config.vocab_size), labels.view(-1), num_items
            )
            next_sentence_loss = cross_entropy(seq_relationship_logits, next_sentence_label.view(-1))
            if num_items is not None:
                share = labels.ne(-100).sum() / torch.as_tensor(num_items, device=labels.device)
                next_sentence_loss = next_sentence_loss * share
            loss = loss + next_sentence_loss
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
    @without_padding("logits", labels=True)
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
        **kwargs: Unpack[ForwardOptions],
    ) -> tuple | MaskedLMOutput:
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
        states, labels = self._labelled(outputs.last_hidden_state, labels, attention_mask)
        logits = self._scores(states, attention_mask if labels is None else None)
        loss = None
        if labels is not None:
            scores = logits.view(-1, self.config.vocab_size)
            loss = average(cross_entropy, scores, labels.view(-1), kwargs.get("num_items_in_batch"))
        return MaskedLMOutput(
            loss=loss, logits=logits, hidden_states=outputs.hidden_states, attentions=outputs.attentions
        )


class ScratchBertForNextSentencePrediction(ScratchBertPreTrainedModel):
    """Does sentence B follow sentence A? softmax(C Wᵀ + b), C the pooled [CLS] (Devlin et al. 2018, section 3.1,
    task 2)."""

    def __init__(self, config: ScratchBertConfig):
        super().__init__(config)
        self.model = ScratchBertModel(config)
        self.next_sentence_head = nn.Linear(config.hidden_size, 2)
        self.post_init()

    @can_return_tuple
    @without_padding()
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        token_type_ids: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        **kwargs: Unpack[ForwardOptions],
    ) -> tuple | NextSentencePredictorOutput:
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
            loss = average(cross_entropy, logits, labels.view(-1), kwargs.get("num_items_in_batch"))
        return NextSentencePredictorOutput(
            loss=loss, logits=logits, hidden_states=outputs.hidden_states, attentions=outputs.attentions
        )


class ClassifierDropout(nn.Dropout):
    """The dropout before a classifier: `classifier_dropout`, or the blocks' own rate where that is not set."""

    def __init__(self, config):
        rate = config.classifier_dropout
        super().__init__(config.hidden_dropout_prob if rate is None else rate)


class ScratchBertForSequenceClassification(ScratchBertPreTrainedModel):
    """softmax(C Wᵀ + b), C the pooled [CLS] (Devlin et al. 2018, section 4.1): classes; or several labels at once, or
    numbers."""

    def __init__(self, config: ScratchBertConfig):
        super().__init__(config)
        self.num_labels = config.num_labels
        self.model = ScratchBertModel(config)
        self.dropout = ClassifierDropout(config)
        self.classifier = nn.Linear(config.hidden_size, config.num_labels)
        self.post_init()

    @can_return_tuple
    @without_padding()
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        token_type_ids: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        **kwargs: Unpack[ForwardOptions],
    ) -> tuple | SequenceClassifierOutput:
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
            loss=None if labels is None else self._loss(logits, labels, kwargs.get("num_items_in_batch")),
            logits=logits,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )

    def _loss(self, logits: torch.Tensor, labels: torch.Tensor, num_items) -> torch.Tensor:
        if self.config.problem_type is None:
            if self.num_labels == 1:
                self.config.problem_type = "regression"
            elif labels.dtype in (torch.long, torch.int):
                self.config.problem_type = "single_label_classification"
            else:
                self.config.problem_type = "multi_label_classification"
        if self.config.problem_type == "regression":
            if self.num_labels == 1:
                logits, labels = logits.squeeze(), labels.squeeze()
            return average(mse_loss, logits, labels, num_items)
        if self.config.problem_type == "single_label_classification":
            return average(cross_entropy, logits, labels.view(-1), num_items)
        if self.config.problem_type == "multi_label_classification":
            return average(binary_cross_entropy_with_logits, logits, labels, num_items)
        raise ValueError(
            f"config.problem_type is {self.config.problem_type!r}; it wants 'regression', "
            "'single_label_classification', 'multi_label_classification', or None to go by the labels."
        )


class ScratchBertForTokenClassification(ScratchBertPreTrainedModel):
    """softmax(T_i Wᵀ + b) for every token i, T_i its hidden state, as for named entities (Devlin et al. 2018, section
    5.3)."""

    def __init__(self, config: ScratchBertConfig):
        super().__init__(config)
        self.num_labels = config.num_labels
        self.model = ScratchBertModel(config, add_pooling_layer=False)
        self.dropout = ClassifierDropout(config)
        self.classifier = nn.Linear(config.hidden_size, config.num_labels)
        self.post_init()

    @can_return_tuple
    @without_padding("logits", labels=True)
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        token_type_ids: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        **kwargs: Unpack[ForwardOptions],
    ) -> tuple | TokenClassifierOutput:
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
            scores = logits.view(-1, self.num_labels)
            loss = average(cross_entropy, scores, labels.view(-1), kwargs.get("num_items_in_batch"))
        return TokenClassifierOutput(
            loss=loss, logits=logits, hidden_states=outputs.hidden_states, attentions=outputs.attentions
        )


class ScratchBertForQuestionAnswering(ScratchBertPreTrainedModel):
    """Where in the text the answer starts and ends: P_start(i) = exp(S·T_i) / Σ_j exp(S·T_j), likewise with E for the
    end, S and E the rows of `qa_outputs`, T_i a token's hidden state (Devlin et al. 2018, section 4.2). The loss is
    the mean of the two, as in the twin."""

    def __init__(self, config: ScratchBertConfig):
        super().__init__(config)
        self.num_labels = config.num_labels
        self.model = ScratchBertModel(config, add_pooling_layer=False)
        self.qa_outputs = nn.Linear(config.hidden_size, config.num_labels)
        self.post_init()

    @can_return_tuple
    @without_padding("start_logits", "end_logits", unless="start_positions")
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        token_type_ids: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        start_positions: torch.Tensor | None = None,
        end_positions: torch.Tensor | None = None,
        **kwargs: Unpack[ForwardOptions],
    ) -> tuple | QuestionAnsweringModelOutput:
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
            beyond, num_items = start_logits.shape[1], kwargs.get("num_items_in_batch")
            start_loss, end_loss = (
                average(cross_entropy, logits, positions.view(-1).clamp(0, beyond), num_items, ignore_index=beyond)
                for logits, positions in ((start_logits, start_positions), (end_logits, end_positions))
            )
            loss = (start_loss + end_loss) / 2
        return QuestionAnsweringModelOutput(
            loss=loss,
            start_logits=start_logits,
            end_logits=end_logits,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )


class ScratchBertForMultipleChoice(ScratchBertPreTrainedModel):
    """softmax over the choices of C_n · v, C_n the pooled [CLS] of choice n (Devlin et al. 2018, section 4.4)."""

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
        **kwargs: Unpack[ForwardOptions],
    ) -> tuple | MultipleChoiceModelOutput:
        """
        Args:
            input_ids: `(B, N, T)` for N choices; so too `attention_mask`, `token_type_ids`, `position_ids`, and
                `inputs_embeds`, `(B, N, T, C)`.
            labels: `(B,)`, which choice is right.

        The other arguments are those of `ScratchBertModel.forward`. `logits` are `(B, N)`.
        """
        masks = {"attention_mask": attention_mask, "token_type_ids": token_type_ids, "position_ids": position_ids}
        choices = check_choices(input_ids, inputs_embeds, **masks)
        flat = [
            None if tensor is None else tensor.flatten(0, 1)
            for tensor in (input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds)
        ]
        outputs = self.model(*flat, return_dict=True, **kwargs)
        logits = self.classifier(self.dropout(outputs.pooler_output)).view(-1, choices)
        loss = None
        if labels is not None:
            loss = average(cross_entropy, logits, labels, kwargs.get("num_items_in_batch"))
        return MultipleChoiceModelOutput(
            loss=loss,
            logits=logits,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )


class ScratchBertGenerationMixin(GenerationMixin):
    """`generate`, which is transformers' own, as far as it is to know of this model."""

    _can_compile_fullgraph = True

    def _reorder_cache(self, past_key_values: Cache, beam_idx: torch.LongTensor) -> Cache:
        """Moves each beam's cache to its new place. All beams of a sequence look at the same encoder output, so the
        cross-attention's part, the larger one for a long source, stays where it is."""
        own = past_key_values
        if isinstance(own, EncoderDecoderCache):
            own = own.self_attention_cache
        own.reorder_cache(beam_idx)
        return past_key_values

    def _validate_generated_length(self, generation_config, input_ids_length, has_default_max_length):
        super()._validate_generated_length(generation_config, input_ids_length, has_default_max_length)
        limit = self.config.max_position_embeddings
        most = limit + 1 - input_ids_length  # the last token is not fed back
        if generation_config.max_length > limit + 1:
            remedies = [f"set max_new_tokens to {most} or less"] if most > 0 else []
            remedies += ["shorten the prompt"] if input_ids_length > 1 else []
            raise ValueError(
                f"max_length is {generation_config.max_length}, of which the prompt takes {input_ids_length}, and "
                f"max_position_embeddings is {limit}: later tokens would have no position. To generate, "
                f"{' or '.join(remedies)}."
            )

    def _prepare_decoder_input_ids_for_generation(self, *args, **kwargs):
        ids, model_kwargs = super()._prepare_decoder_input_ids_for_generation(*args, **kwargs)
        mask = model_kwargs.get("decoder_attention_mask")
        if mask is None and model_kwargs.get("past_key_values") is not None:
            # By the mask transformers tells what of the ids the cache holds already.
            model_kwargs["decoder_attention_mask"] = torch.ones_like(ids)
        elif mask is not None and model_kwargs.get("decoder_position_ids") is None and not mask.all():
            # Prompts padded on the left: each counts from its own first token, as those of a decoder alone do.
            model_kwargs["decoder_position_ids"] = (mask.long().cumsum(-1) - 1).clamp(min=0)
        return ids, model_kwargs

    def _prepare_special_tokens(self, generation_config, *args, **kwargs):
        if (
            self.config.is_encoder_decoder
            and generation_config.decoder_start_token_id is None
            and generation_config.bos_token_id is None
        ):
            raise ValueError(f"generation_config.{NO_START_ID}")
        super()._prepare_special_tokens(generation_config, *args, **kwargs)


NO_START_ID = (
    "decoder_start_token_id is None, so nothing says what the decoder starts with. Set it, to the tokenizer's "
    "cls_token_id where the decoder comes from a BERT: config.decoder_start_token_id for training, and "
    "generation_config.decoder_start_token_id for generate."
)


class ScratchBertForCausalLM(ScratchBertWithLanguageModelHead, ScratchBertGenerationMixin):
    """A BERT that looks back only and predicts the next word: the twin of `BertLMHeadModel`."""

    def __init__(self, config: ScratchBertConfig):
        super().__init__(config)
        if not config.is_decoder:
            logger.warning(
                "config.is_decoder is False: each word then sees those after it as well, which generate has not "
                "written yet. Give is_decoder=True for a model that looks back only."
            )
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
        past_key_values: Cache | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        **kwargs: Unpack[ForwardOptions],
    ) -> tuple | CausalLMOutputWithCrossAttentions:
        """
        Args:
            labels: `(B, T)`, the input ids themselves, shifted here; -100 where nothing is to be predicted.
            logits_to_keep: how many positions, from the last, go through the head; 0 for all.

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
            past_key_values,
            use_cache=use_cache if labels is None else False,
            return_dict=True,
            **kwargs,
        )
        logits = self.lm_head(slice_logits_to_keep(outputs.last_hidden_state, logits_to_keep))
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        return CausalLMOutputWithCrossAttentions(
            loss=loss,
            logits=logits,
            past_key_values=outputs.past_key_values,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
            cross_attentions=outputs.cross_attentions,
        )


# `Trainer` shifts the labels that it smooths for the classes named here; `AutoModelForCausalLM.register` names none.
MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.setdefault(ScratchBertConfig.model_type, ScratchBertForCausalLM.__name__)


class ScratchBertWithTwoHalves(ScratchBertPreTrainedModel):
    """The models with an encoder and a decoder."""

    _has_two_halves = True
    # An EncoderDecoderModel stores the encoder's pooler, and does not use it.
    _keys_to_ignore_on_load_unexpected = [
        *ScratchBertPreTrainedModel._keys_to_ignore_on_load_unexpected,
        r"^(model\.)?encoder\.pooler\.",
    ]

    def resize_token_embeddings(
        self, new_num_tokens: int | None = None, pad_to_multiple_of: int | None = None, mean_resizing: bool = True
    ) -> nn.Embedding:
        """As `PreTrainedModel.resize_token_embeddings`, for the words of both halves and of the head."""
        encoder, decoder = self.get_encoder(), self.get_decoder()
        if not self.config.share_embeddings:
            decoder.resize_token_embeddings(new_num_tokens, pad_to_multiple_of, mean_resizing)
        embeddings = super().resize_token_embeddings(new_num_tokens, pad_to_multiple_of, mean_resizing)
        encoder.config.vocab_size = decoder.config.vocab_size = self.config.vocab_size
        return embeddings


class ScratchBertSeq2SeqModel(ScratchBertWithTwoHalves):
    """An encoder and a decoder without a head. Both are BERTs, made of the same blocks; the decoder's look back only,
    and at the encoder's output (Rothe et al. 2020, section 2.1)."""

    def __init__(self, config: ScratchBertConfig):
        super().__init__(config)
        self.encoder = ScratchBertModel(config.encoder_config(), add_pooling_layer=False)
        self.decoder = ScratchBertModel(config.decoder_config(), add_pooling_layer=False)
        # In either half a tensor has the same name.
        self._tied_weights_keys = {
            f"decoder.{name}": f"encoder.{name}"
            for name, _ in self.encoder.named_parameters()
            if (config.share_embeddings if name.startswith("embeddings.") else config.tie_encoder_decoder)
        }
        self.post_init()

    def get_expanded_tied_weights_keys(self, all_submodels: bool = False) -> dict[str, str]:
        """Which tensors are one: `{name: name of the one that is stored}`."""
        # `tie_word_embeddings`, without which transformers ties nothing at all, speaks of the head's matrix alone.
        return super().get_expanded_tied_weights_keys(True) if all_submodels else dict(self._tied_weights_keys)

    def get_input_embeddings(self) -> nn.Embedding:
        return self.encoder.get_input_embeddings()

    def set_input_embeddings(self, value: nn.Module):
        self.encoder.set_input_embeddings(value)
        if self.config.share_embeddings:
            self.decoder.set_input_embeddings(value)

    @can_return_tuple
    @merge_with_config_defaults
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        decoder_input_ids: torch.Tensor | None = None,
        decoder_attention_mask: torch.Tensor | None = None,
        encoder_outputs: BaseModelOutput | tuple | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        decoder_inputs_embeds: torch.Tensor | None = None,
        use_cache: bool | None = None,
        token_type_ids: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        decoder_position_ids: torch.Tensor | None = None,
        decoder_token_type_ids: torch.Tensor | None = None,
        **kwargs: Unpack[ForwardOptions],
    ) -> tuple | Seq2SeqModelOutput:
        """
        Args:
            input_ids: `(B, S)` token ids of the source; or else `inputs_embeds`, `(B, S, C)`, or `encoder_outputs`.
            attention_mask: `(B, S)`, 1 for a token of the source and 0 for padding.
            decoder_input_ids: `(B, T)` token ids of the target, each row's first the start token; or else
                `decoder_inputs_embeds`, `(B, T, C)`. With a cache, only those that it does not hold yet.
            decoder_attention_mask: `(B, T)`, 1 for a token of the target, in the cache or not, and 0 for padding.
            encoder_outputs: what the encoder returned for this source before, to spare its pass.
            past_key_values: the decoder's cache.
            use_cache: whether the decoder fills one.
            token_type_ids: `(B, S)`, of the source.
            position_ids: `(B, S)` or `(1, S)`, of the source; 0 to S - 1 if left out.
            decoder_position_ids: `(B, T)` or `(1, T)`, of the target; counted on from the cache if left out.
            decoder_token_type_ids: `(B, T)`, of the target.

        Returns:
            `last_hidden_state` `(B, T, C)`, `encoder_last_hidden_state` `(B, S, C)`, and what was asked for.

        Raises:
            ValueError: an argument is unfit; the message names it, what it got and what it wants.
        """
        if decoder_input_ids is None and decoder_inputs_embeds is None:
            raise ValueError(
                "Give decoder_input_ids, the target's tokens after the start token, or decoder_inputs_embeds. "
                "ScratchBertForConditionalGeneration makes them of labels, and generate needs none."
            )
        kwargs.setdefault("output_attentions", self.config.output_attentions)
        kwargs.setdefault("output_hidden_states", self.config.output_hidden_states)
        if encoder_outputs is None:
            encoded = self.encoder(
                input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds, return_dict=True, **kwargs
            )
        else:
            encoded = self._given_encoder_outputs(encoder_outputs, attention_mask)
        decoder_outputs = self.decoder(
            decoder_input_ids,
            decoder_attention_mask,
            decoder_token_type_ids,
            decoder_position_ids,
            decoder_inputs_embeds,
            encoder_hidden_states=encoded.last_hidden_state,
            encoder_attention_mask=attention_mask,
            past_key_values=past_key_values,
            use_cache=use_cache,
            return_dict=True,
            **kwargs,
        )
        return Seq2SeqModelOutput(
            last_hidden_state=decoder_outputs.last_hidden_state,
            past_key_values=decoder_outputs.past_key_values,
            decoder_hidden_states=decoder_outputs.hidden_states,
            decoder_attentions=decoder_outputs.attentions,
            cross_attentions=decoder_outputs.cross_attentions,
            encoder_last_hidden_state=encoded.last_hidden_state,
            encoder_hidden_states=encoded.hidden_states,
            encoder_attentions=encoded.attentions,
        )

    def _given_encoder_outputs(self, outputs, attention_mask) -> BaseModelOutput:
        if isinstance(outputs, (list, tuple)):
            outputs = BaseModelOutput(*outputs)
        states: Any = getattr(outputs, "last_hidden_state", None)
        check_states("encoder_outputs.last_hidden_state", states, self.config.hidden_size)
        check_mask(
            "attention_mask", attention_mask, states.shape[0], self.config.num_attention_heads, 1, states.shape[1]
        )
        return outputs


class ScratchBertForConditionalGeneration(
    ScratchBertWithTwoHalves, ScratchBertWithLanguageModelHead, ScratchBertGenerationMixin
):
    """An encoder, and a decoder under BERT's language-model head: text in, text out (Rothe et al. 2020).

    `from_bert` starts it from any BERT, `from_pretrained` opens its own checkpoints and those of an
    `EncoderDecoderModel` of two BERTs. Arguments and outputs are those of `BartForConditionalGeneration`.
    """

    def __init__(self, config: ScratchBertConfig):
        super().__init__(config)
        self.model = ScratchBertSeq2SeqModel(config)
        self.lm_head = LanguageModelHead(config)
        half = "encoder" if config.share_embeddings else "decoder"
        self._tied_weights_keys = {"lm_head.decoder.weight": f"model.{half}.embeddings.word_embeddings.weight"}
        self.post_init()

    @classmethod
    def from_bert(cls, source: str | os.PathLike, **kwargs) -> Self:
        """Starts encoder, decoder and, where the checkpoint has one, the language-model head from a BERT.

        What no BERT has, the cross-attention above all, is new; a warning names it. Start, end and padding ids are
        those of the checkpoint's tokenizer, or else of its configuration.

        Args:
            source: a BERT checkpoint of any kind, or a ScratchBert one: a folder or a hub id.
            kwargs: fields of `ScratchBertConfig`, such as `num_decoder_layers` (the decoder takes the first that many
                blocks), `tie_encoder_decoder` and `share_embeddings`; and arguments of `from_pretrained`.

        Raises:
            ValueError: `source` is of another kind of model, or has both halves already.
            OSError: there is no such checkpoint, or a file of it cannot be read.
        """
        config, tensors, options = seq2seq_start(cls.config_class, source, **kwargs)
        return cls.from_pretrained(None, config=config, state_dict=tensors, **options)

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        decoder_input_ids: torch.Tensor | None = None,
        decoder_attention_mask: torch.Tensor | None = None,
        encoder_outputs: BaseModelOutput | tuple | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        decoder_inputs_embeds: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        use_cache: bool | None = None,
        token_type_ids: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        decoder_position_ids: torch.Tensor | None = None,
        decoder_token_type_ids: torch.Tensor | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        **kwargs: Unpack[ForwardOptions],
    ) -> tuple | Seq2SeqLMOutput:
        """
        Args:
            labels: `(B, T)`, the target's ids without the start token, and -100 for padding. The decoder's input is
                made of them, shifted right, unless it is given.
            logits_to_keep: how many positions, from the last, go through the head; 0 for all.

        The other arguments are those of `ScratchBertSeq2SeqModel.forward`. `logits` are `(B, T, V)`.
        """
        if labels is not None:
            use_cache = False
            check_labels(labels, decoder_input_ids if decoder_inputs_embeds is None else decoder_inputs_embeds)
            if decoder_input_ids is None and decoder_inputs_embeds is None:
                decoder_input_ids = self.prepare_decoder_input_ids_from_labels(labels)
                if decoder_attention_mask is None and (padding := self.config.pad_token_id) is not None:
                    # What stands for -100 is no token; but the first is one, even where it is the padding id.
                    decoder_attention_mask = (decoder_input_ids != padding).long()
                    decoder_attention_mask[:, 0] = 1
        outputs = self.model(
            input_ids,
            attention_mask,
            decoder_input_ids,
            decoder_attention_mask,
            encoder_outputs,
            past_key_values,
            inputs_embeds,
            decoder_inputs_embeds,
            use_cache,
            token_type_ids,
            position_ids,
            decoder_position_ids,
            decoder_token_type_ids,
            return_dict=True,
            **kwargs,
        )
        logits = self.lm_head(slice_logits_to_keep(outputs.last_hidden_state, logits_to_keep))
        loss = None
        if labels is not None:
            # Plain, and not `self.loss_function`, which for this class's name would shift a second time.
            scores = logits.view(-1, self.config.vocab_size)
            loss = average(cross_entropy, scores, labels.reshape(-1), kwargs.get("num_items_in_batch"))
        fields = {name: value for name, value in outputs.items() if name != "last_hidden_state"}
        return Seq2SeqLMOutput(loss=loss, logits=logits, **fields)

    def prepare_decoder_input_ids_from_labels(self, labels: torch.Tensor) -> torch.Tensor:
        """The decoder's input for these labels, `(B, T)`: the start token, then the labels but the last, with padding
        in place of -100. `DataCollatorForSeq2Seq` calls it.

        Raises:
            ValueError: the configuration has no start or padding id.
        """
        if self.config.decoder_start_token_id is None:
            raise ValueError(f"config.{NO_START_ID}")
        if self.config.pad_token_id is None:
            raise ValueError(
                "config.pad_token_id is None, so nothing can stand for a label of -100. Set it to the tokenizer's "
                "pad_token_id."
            )
        start = labels.new_full((labels.shape[0], 1), self.config.decoder_start_token_id)
        return torch.cat([start, labels[:, :-1].masked_fill(labels[:, :-1] == -100, self.config.pad_token_id)], dim=1)
