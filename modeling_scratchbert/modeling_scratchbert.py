"""The models: the encoder, and the heads that BERT was pre-trained and fine-tuned with (Devlin et al. 2018).

Classes stand in the order in which data flows. Signatures, outputs and losses are those of the `Bert…` twins in
`transformers`; the blocks are in `embeddings`, `attention`, `feed_forward` and `transformer`.
"""

import copy
import logging
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, mse_loss
from transformers.activations import ACT2FN
from transformers.cache_utils import Cache, DynamicCache, EncoderDecoderCache
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
from transformers.processing_utils import Unpack
from transformers.utils import ModelOutput, TransformersKwargs
from transformers.utils.generic import can_return_tuple, merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from .configuration_scratchbert import ScratchBertConfig
from .embeddings import Embeddings
from .input_checks import check_choices, check_encoder_inputs, check_inputs
from .pretrained import ScratchBertPreTrainedModel
from .transformer import TransformerStack

logger = logging.getLogger(__name__)


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
        **kwargs: Unpack[TransformersKwargs],
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
        )
        # Checkpointed blocks run twice and must not fill a cache.
        use_cache = use_cache and self.config.is_decoder and not (self.training and self.is_gradient_checkpointing)
        if use_cache and past_key_values is None:
            past_key_values = self._new_cache(encoder_hidden_states)

        embeddings = self.embeddings(input_ids, token_type_ids, position_ids, inputs_embeds, past_length)
        if encoder_hidden_states is not None:
            batch, queries, _ = embeddings.shape
            check_encoder_inputs(self.config, encoder_hidden_states, encoder_attention_mask, batch, queries)
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
            position_ids=position_ids,  # by which flash attention tells packed sequences apart
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
            encoder_mask = create_bidirectional_mask(config, embeddings, encoder_mask, encoder_hidden_states)
        return mask, encoder_mask


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
        **kwargs: Unpack[TransformersKwargs],
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
        **kwargs: Unpack[TransformersKwargs],
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
    """Does sentence B follow sentence A? softmax(C Wᵀ + b), C the pooled [CLS] (Devlin et al. 2018, section 3.1,
    task 2)."""

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
        **kwargs: Unpack[TransformersKwargs],
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
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        token_type_ids: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
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
        if self.config.problem_type == "multi_label_classification":
            return binary_cross_entropy_with_logits(logits, labels)
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
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        token_type_ids: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
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
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        token_type_ids: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        start_positions: torch.Tensor | None = None,
        end_positions: torch.Tensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
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
        **kwargs: Unpack[TransformersKwargs],
    ) -> tuple[torch.Tensor] | MultipleChoiceModelOutput:
        """
        Args:
            input_ids: `(B, N, T)` for N choices; so too `attention_mask`, `token_type_ids`, `position_ids`, and
                `inputs_embeds`, `(B, N, T, C)`.
            labels: `(B,)`, which choice is right.

        The other arguments are those of `ScratchBertModel.forward`. `logits` are `(B, N)`.
        """
        masks = {"attention_mask": attention_mask, "token_type_ids": token_type_ids, "position_ids": position_ids}
        check_choices(input_ids, inputs_embeds, **masks)
        flat = [
            None if tensor is None else tensor.flatten(0, 1)
            for tensor in (input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds)
        ]
        outputs = self.model(*flat, return_dict=True, **kwargs)
        choices = (input_ids if input_ids is not None else inputs_embeds).shape[1]
        logits = self.classifier(self.dropout(outputs.pooler_output)).view(-1, choices)
        return MultipleChoiceModelOutput(
            loss=None if labels is None else cross_entropy(logits, labels),
            logits=logits,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )
