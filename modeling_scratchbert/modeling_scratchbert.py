"""The models: the encoder, the heads that BERT was pre-trained and fine-tuned with (Devlin et al. 2018), and the
generators: a decoder alone, and an encoder with a decoder (Rothe et al. 2020).

Classes stand in the order in which data flows. Signatures, outputs and losses are those of the `Bert…` classes in
`transformers`, except that losses add up over accumulated batches (see `average`). The blocks are in `embeddings`,
`attention`, `feed_forward` and `transformer`.
"""

from .versions import (
    CACHE,
    last_positions,
    names_cache,
    take_cache,
)  # first: it refuses older transformers

# isort: split
import logging
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, mse_loss, pad
from transformers.activations import ACT2FN
from transformers.cache_utils import Cache, DynamicCache, EncoderDecoderCache
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
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import ModelOutput
from transformers.utils.generic import can_return_tuple, merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from .configuration_scratchbert import ScratchBertConfig
from .embeddings import Embeddings
from .generation import ScratchBertGenerationMixin, no_start_id
from .inference import is_prepacked
from .input_checks import (
    cache_lengths,
    check_cache,
    check_choices,
    check_encoder_inputs,
    check_inputs,
    check_options,
    check_tensor,
)
from .installed import installed
from .pretrained import ScratchBertPreTrainedModel
from .transformer import TransformerStack
from .unpadding import choose_batch, scored_tokens, to_padded

if TYPE_CHECKING:  # loaders before 5.9 copy the files that this one names, and no others
    from .attention import MultiHeadAttention  # noqa: F401
    from .checkpoints import staged  # noqa: F401
    from .feed_forward import FeedForward  # noqa: F401

logger = logging.getLogger(__name__)

OptionalTensor = Tensor | None


def recorded(outputs: BaseModelOutput) -> dict:
    """The hidden states and attention weights that a base model returned, if they were requested."""
    return {"hidden_states": outputs.hidden_states, "attentions": outputs.attentions}


class Pooler(nn.Module):
    """A vector for the whole sequence, computed from its first token, [CLS]: tanh(W h_0 + b). `(B, T, C)` → `(B,
    C)`."""

    def __init__(self, config):
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.activation = nn.Tanh()

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.activation(self.dense(hidden_states[:, 0]))


class ScratchBertModel(ScratchBertPreTrainedModel):
    """BERT without a head: embeddings, the stack of blocks, and the pooler.

    As in `BertModel`, `config.is_decoder` makes the blocks causal, and `config.add_cross_attention` lets them attend to
    the output of an encoder. A checkpoint with an encoder and a decoder opens as `ScratchBertSeq2SeqModel`.
    """

    @classmethod
    def _class_for(cls, is_encoder_decoder: bool) -> type[ScratchBertPreTrainedModel]:
        # AutoModel has one class for each class of configurations.
        return ScratchBertSeq2SeqModel if is_encoder_decoder and cls is ScratchBertModel else cls

    def __init__(self, config: ScratchBertConfig, add_pooling_layer: bool = True):
        super().__init__(config)
        self.embeddings = Embeddings(config)
        self.encoder = TransformerStack(config)
        self.pooler = Pooler(config) if add_pooling_layer else None
        self.gradient_checkpointing = False  # read by the decorators of `forward`: checkpointed blocks fill no cache
        self.post_init()

    def get_input_embeddings(self) -> nn.Embedding:
        return self.embeddings.word_embeddings

    def set_input_embeddings(self, value: nn.Module):
        self.embeddings.word_embeddings = value

    @names_cache
    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self,
        input_ids: OptionalTensor = None,
        attention_mask: OptionalTensor = None,
        token_type_ids: OptionalTensor = None,
        position_ids: OptionalTensor = None,
        inputs_embeds: OptionalTensor = None,
        encoder_hidden_states: OptionalTensor = None,
        encoder_attention_mask: OptionalTensor = None,
        past_key_values: Cache | None = None,
        use_cache: bool | None = None,
        **kwargs,
    ) -> tuple | BaseModelOutputWithPoolingAndCrossAttentions:
        """
        Args:
            input_ids: `(B, T)` token ids; or else `inputs_embeds`, `(B, T, C)`.
            attention_mask: `(B, T)`, 1 for a token and 0 for padding; or a full mask `(B, 1, T, T)`, boolean (True:
                may attend) or additive.
            token_type_ids: `(B, T)`, 0 for sentence A and 1 for sentence B; all 0 by default.
            position_ids: `(B, T)` or `(1, T)`; 0 to T - 1 by default. With `padding_free`, one row without a mask can
                have packed sequences: each 0 starts a new one. Positions that are all 0 are one sequence.
            encoder_hidden_states: `(B, S, C)`, for a decoder with cross-attention.
            encoder_attention_mask: `(B, S)`, 1 for a token and 0 for padding.
            past_key_values: the cache of a decoder. With transformers 5.24 and newer, the signature has the name
                `cache`. Both names can be used.
            use_cache: whether a decoder fills a cache.
            output_attentions: also return the attention weights of every block, `(B, H, T, T)`. The eager formula is
                then used with any attention implementation, because no other returns its weights.
            output_hidden_states: also return the embeddings and the output of every block, `(B, T, C)`.
            return_dict: False for a plain tuple.
            padding_free: whether an encoder removes the padding, see below. By default: what was passed to
                `from_pretrained`; if nothing was passed, True for an optimised model, and False for others.
            cu_seq_lens_q: `(S + 1,)`, for an encoder: the starts of S packed sequences in one row, `(1, N)`, and the
                end, as `DataCollatorWithFlattening` returns them. The outputs are then `(1, N, C)`, and `pooler_output`
                is `(S, C)`.
            max_length_q: the length of the longest packed sequence. Without it, the length is read from the device.

        Returns:
            `last_hidden_state` `(B, T, C)`, `pooler_output` `(B, C)` or None without a pooler, and what was requested.
            With `padding_free`, an encoder removes the padding, and `last_hidden_state` is zero there. The modules of
            the stack, and hooks on them, then receive `(1, N, C)`: the non-padding tokens of the batch. The
            batch stays padded, as in BERT, if

            - attention weights or hidden states are requested, or the mask is a full one;
            - the pooler or the loss reads padding, or the feed-forward is chunked;
            - the attention kernel cannot compute sequences of different lengths;
            - the model is compiled or exported.

            A row in which every token is masked attends to nothing, and its attention outputs are zero. The eager
            attention of BERT returns the mean of all values there.

        Raises:
            TypeError: an argument is unknown.
            ValueError: an argument has a wrong shape, dtype or value.
        """
        past_key_values = take_cache(past_key_values, kwargs)
        check_options(kwargs, self.config)
        kwargs.pop("num_items_in_batch", None)  # used by the losses of the model heads
        past_length, slots = cache_lengths(past_key_values, attention_mask, kwargs)
        # An adapter may have replaced the word embeddings by a module without a size.
        vocab_size = getattr(self.get_input_embeddings(), "num_embeddings", self.config.vocab_size)
        ids = {"input_ids": input_ids, "token_type_ids": token_type_ids, "position_ids": position_ids}
        is_packed = kwargs.get("cu_seq_lens_q") is not None
        check_inputs(self.config, ids, inputs_embeds, attention_mask, vocab_size, past_length, slots, is_packed)
        use_cache = use_cache and self.config.is_decoder
        if use_cache and past_key_values is None:
            past_key_values = DynamicCache(config=self.config)
        eager = kwargs.setdefault("output_attentions", self.config.output_attentions)
        records = eager or kwargs.get("output_hidden_states", self.config.output_hidden_states)
        tokens: Any = inputs_embeds if input_ids is None else input_ids
        encoder: Any = self.encoder
        if is_prepacked(encoder):
            encoder.check_arguments(self, attention_mask, encoder_attention_mask, kwargs)
        batch = choose_batch(self, tokens, attention_mask, position_ids, records, eager, kwargs)

        per_token = batch.unpad(input_ids, token_type_ids, position_ids, inputs_embeds)
        hidden_states, position_ids = self.embeddings(*per_token, past_length), per_token[2]
        if encoder_hidden_states is not None:
            check_encoder_inputs(self.config, encoder_hidden_states, encoder_attention_mask, *hidden_states.shape[:2])
            if past_key_values is not None and not isinstance(past_key_values, EncoderDecoderCache):
                past_key_values = EncoderDecoderCache(past_key_values, DynamicCache(config=self.config))
        check_cache(self.config, past_key_values, hidden_states.shape[0], encoder_hidden_states)

        inputs = batch.encoder_inputs(
            self.config,
            hidden_states,
            eager,
            position_ids,
            encoder_hidden_states,
            encoder_attention_mask,
            past_key_values,
        )
        hidden_states = batch.encoder(encoder)(hidden_states, **inputs, **kwargs)
        last_hidden_state, first_tokens = batch.restore(hidden_states)
        return BaseModelOutputWithPoolingAndCrossAttentions(
            last_hidden_state=last_hidden_state,
            pooler_output=None if self.pooler is None else self.pooler(first_tokens),
            **cast(Any, {CACHE: past_key_values if use_cache else None}),
        )


def average(loss, predictions: Tensor, targets: Tensor, num_items, **options) -> Tensor:
    """The mean of a loss over a batch; or, with `num_items`, the sum divided by that number. `Trainer` passes the
    number of targets of all batches of a step as `num_items_in_batch`: with accumulated gradients or several processes,
    the losses of the batches then add up to the mean over all targets.

    Args:
        loss: a function of `torch.nn.functional`.
        num_items: the number of targets of all batches, a number or a tensor of one on any device; None for the mean.
        options: other arguments of `loss`.
    """
    if num_items is None:
        return loss(predictions, targets, **options)
    losses = loss(predictions, targets, reduction="none", **options)
    total = losses.sum(dtype=torch.promote_types(losses.dtype, torch.float32))  # float16 would overflow
    return total / torch.as_tensor(num_items, device=total.device)


class LanguageModelHead(nn.Module):
    """Scores for every word of the vocabulary: E · norm(act(W h + b)) + c, with E the word embeddings
    (Devlin et al. 2018, section 3.1, task 1). `(B, T, C)` → `(B, T, V)`."""

    def __init__(self, config):
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.activation = ACT2FN[config.hidden_act]
        self.norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.decoder = nn.Linear(config.hidden_size, config.vocab_size)

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.decoder(self.norm(self.activation(self.dense(hidden_states))))


class ScratchBertWithLanguageModelHead(ScratchBertPreTrainedModel):
    """The models that score the vocabulary, and share the word embeddings between input and output."""

    _tied_weights_keys = {"lm_head.decoder.weight": "model.embeddings.word_embeddings.weight"}
    # Split as the word embeddings are: see `base_model_tp_plan`.
    _tp_plan = {"lm_head.decoder": "colwise_gather_output"}

    def get_output_embeddings(self) -> nn.Linear:
        return self.lm_head.decoder

    def set_output_embeddings(self, new_embeddings: nn.Linear):
        self.lm_head.decoder = new_embeddings

    def _score(self, outputs, attention_mask, labels: Tensor | None, padding_free: bool) -> tuple:
        """Score the vocabulary for the tokens that need it: the labelled ones with `sparse_prediction`, the non-padding
        ones with `padding_free`, or else all.

        Returns:
            The logits that the model returns, `(B, T, V)`, or `(labelled tokens, V)` with `sparse_prediction`; and for
            the loss the scores, `(tokens, V)`, and their labels, `(tokens,)` or None.
        """
        hidden_states = outputs.last_hidden_state
        shape = hidden_states.shape[:2]
        if labels is not None and self.config.sparse_prediction:
            labels = labels.reshape(shape)
            labelled = labels != -100
            logits = self.lm_head(hidden_states[labelled])
            return logits, logits, labels[labelled]
        indices = scored_tokens(self.config, outputs, attention_mask) if padding_free else None
        if indices is None:
            logits = self.lm_head(hidden_states)
            return logits, logits.flatten(0, 1), None if labels is None else labels.flatten()
        scores = self.lm_head(hidden_states.flatten(0, 1).index_select(0, indices))
        return to_padded(scores, indices, shape), scores, None if labels is None else labels.flatten()[indices]


@dataclass
class ScratchBertForPreTrainingOutput(ModelOutput):
    """Output of `ScratchBertForPreTraining`, with the fields of `BertForPreTrainingOutput`.

    Args:
        loss: the sum of the masked-LM and the next-sentence loss, if both labels were given.
        prediction_logits: `(B, T, V)`.
        seq_relationship_logits: `(B, 2)`; 0: B follows A, 1: B is a random sentence.
        hidden_states: a tuple of `(B, T, C)`, if requested.
        attentions: a tuple of `(B, H, T, T)`, if requested.
    """

    loss: OptionalTensor = None
    prediction_logits: OptionalTensor = None
    seq_relationship_logits: OptionalTensor = None
    hidden_states: tuple[Tensor, ...] | None = None
    attentions: tuple[Tensor, ...] | None = None


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
        input_ids: OptionalTensor = None,
        attention_mask: OptionalTensor = None,
        token_type_ids: OptionalTensor = None,
        position_ids: OptionalTensor = None,
        inputs_embeds: OptionalTensor = None,
        labels: OptionalTensor = None,
        next_sentence_label: OptionalTensor = None,
        **kwargs,
    ) -> tuple | ScratchBertForPreTrainingOutput:
        """
        Args:
            labels: `(B, T)`, the ids of the masked words, and -100 for all other tokens.
            next_sentence_label: `(B,)`; 0: sentence B follows A, 1: it is a random one.
            num_items_in_batch: the number of masked words in all batches of the step. The number of sequences is not
                known, so the mean next-sentence loss of the batch is weighted by its share of the masked words.

        The other arguments are those of `ScratchBertModel.forward`. Logits at padding have no meaning.
        """
        self._keep_labelled_padding(kwargs, attention_mask, labels)
        outputs = self.model(
            input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds, return_dict=True, **kwargs
        )
        prediction_logits, scores, targets = self._score(outputs, attention_mask, labels, kwargs["padding_free"])
        seq_relationship_logits = self.next_sentence_head(outputs.pooler_output)
        loss = None
        if targets is not None and next_sentence_label is not None:
            num_items = kwargs.get("num_items_in_batch")
            loss = average(cross_entropy, scores, targets, num_items)
            next_sentence_loss = cross_entropy(seq_relationship_logits, next_sentence_label.view(-1))
            if num_items is not None:
                share = targets.ne(-100).sum() / torch.as_tensor(num_items, device=targets.device)
                next_sentence_loss = next_sentence_loss * share
            loss = loss + next_sentence_loss
        return ScratchBertForPreTrainingOutput(
            loss=loss,
            prediction_logits=prediction_logits,
            seq_relationship_logits=seq_relationship_logits,
            **recorded(outputs),
        )


class ScratchBertForMaskedLM(ScratchBertWithLanguageModelHead):
    """Fills in masked words (Devlin et al. 2018, section 3.1, task 1)."""

    def __init__(self, config: ScratchBertConfig):
        super().__init__(config)
        if config.is_decoder:
            logger.warning("config.is_decoder is True; each token attends to earlier tokens only, not to both sides.")
        self.model = ScratchBertModel(config, add_pooling_layer=False)
        self.lm_head = LanguageModelHead(config)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: OptionalTensor = None,
        attention_mask: OptionalTensor = None,
        token_type_ids: OptionalTensor = None,
        position_ids: OptionalTensor = None,
        inputs_embeds: OptionalTensor = None,
        encoder_hidden_states: OptionalTensor = None,
        encoder_attention_mask: OptionalTensor = None,
        labels: OptionalTensor = None,
        **kwargs,
    ) -> tuple | MaskedLMOutput:
        """
        Args:
            labels: `(B, T)`, the ids of the masked words, and -100 for all other tokens.

        The other arguments are those of `ScratchBertModel.forward`. `logits` are `(B, T, V)`; those at padding have no
        meaning.
        """
        self._keep_labelled_padding(kwargs, attention_mask, labels)
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
        logits, scores, targets = self._score(outputs, attention_mask, labels, kwargs["padding_free"])
        loss = None if targets is None else average(cross_entropy, scores, targets, kwargs.get("num_items_in_batch"))
        return MaskedLMOutput(loss=loss, logits=logits, **recorded(outputs))


class ClassifierDropout(nn.Dropout):
    """The dropout before a classifier: `classifier_dropout`, or `hidden_dropout_prob` if that is None."""

    def __init__(self, config):
        rate = config.classifier_dropout
        super().__init__(config.hidden_dropout_prob if rate is None else rate)


class ScratchBertClassifier(ScratchBertPreTrainedModel):
    """The models that classify sequences or tokens. A subclass may have its own `_logits` and `_loss`."""

    _outputs: Any  # the class of the outputs
    _has_token_labels = False

    def __init__(self, config: ScratchBertConfig):
        super().__init__(config)
        self.num_labels = config.num_labels
        self.model = ScratchBertModel(config, add_pooling_layer=not self._has_token_labels)
        self.dropout = ClassifierDropout(config)
        self.classifier = nn.Linear(config.hidden_size, config.num_labels)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: OptionalTensor = None,
        attention_mask: OptionalTensor = None,
        token_type_ids: OptionalTensor = None,
        position_ids: OptionalTensor = None,
        inputs_embeds: OptionalTensor = None,
        labels: OptionalTensor = None,
        **kwargs,
    ) -> tuple | SequenceClassifierOutput:
        """
        Args:
            labels: the classes, or what else the class of this model describes; the loss is computed from them.

        The other arguments are those of `ScratchBertModel.forward`. The logits are described in the class as well. The
        fields of the output are the same for every subclass.
        """
        self._keep_labelled_padding(kwargs, attention_mask, labels if self._has_token_labels else None)
        outputs = self.model(
            input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds, return_dict=True, **kwargs
        )
        logits = self._logits(outputs)
        loss = None if labels is None else self._loss(logits, labels, kwargs.get("num_items_in_batch"))
        return self._outputs(loss=loss, logits=logits, **recorded(outputs))

    def _logits(self, outputs) -> Tensor:
        """The scores of the classes of a sequence, `(B, L)`, from its pooled [CLS]."""
        return self.classifier(self.dropout(outputs.pooler_output))

    def _loss(self, logits: Tensor, labels: Tensor, num_items) -> Tensor:
        return average(cross_entropy, logits.flatten(0, -2), labels.view(-1), num_items)


class ScratchBertForNextSentencePrediction(ScratchBertClassifier):
    """Whether sentence B follows sentence A: softmax(C Wᵀ + b), C the pooled [CLS] (Devlin et al. 2018, section 3.1,
    task 2).

    `labels` are `(B,)`; 0: sentence B follows A, 1: it is a random one. `logits` are `(B, 2)`.
    """

    _outputs = NextSentencePredictorOutput

    def __init__(self, config: ScratchBertConfig):
        super(ScratchBertClassifier, self).__init__(config)  # its head has another name, and no dropout
        self.model = ScratchBertModel(config)
        self.next_sentence_head = nn.Linear(config.hidden_size, 2)
        self.post_init()

    def _logits(self, outputs) -> Tensor:
        return self.next_sentence_head(outputs.pooler_output)


class ScratchBertForSequenceClassification(ScratchBertClassifier):
    """softmax(C Wᵀ + b), C the pooled [CLS] (Devlin et al. 2018, section 4.1): classes; or several labels at once, or
    numbers.

    `labels` are `(B,)` class ids; or `(B,)` or `(B, L)` floats for regression; or `(B, L)` floats, 0 or 1, for several
    labels at once. `config.problem_type` selects one of them; if it is None, the number and the dtype of the first
    labels set it. `logits` are `(B, L)`.
    """

    _outputs = SequenceClassifierOutput

    def _loss(self, logits: Tensor, labels: Tensor, num_items) -> Tensor:
        if self.config.problem_type is None:
            kind: Any = f"{'single' if labels.dtype in (torch.long, torch.int) else 'multi'}_label_classification"
            self.config.problem_type = "regression" if self.num_labels == 1 else kind
        if self.config.problem_type == "regression":
            if self.num_labels == 1:
                logits, labels = logits.squeeze(), labels.squeeze()
            return average(mse_loss, logits, labels, num_items)
        if self.config.problem_type == "single_label_classification":
            return super()._loss(logits, labels, num_items)
        if self.config.problem_type == "multi_label_classification":
            return average(binary_cross_entropy_with_logits, logits, labels, num_items)
        raise ValueError(
            f"config.problem_type is {self.config.problem_type!r}; expected 'regression', "
            "'single_label_classification', 'multi_label_classification', or None to derive it from the "
            "labels."
        )


class ScratchBertForTokenClassification(ScratchBertClassifier):
    """softmax(T_i Wᵀ + b) for every token i, T_i its hidden state, as for named entities (Devlin et al. 2018, section
    5.3).

    `labels` are `(B, T)` class ids, and -100 for tokens to ignore. `logits` are `(B, T, L)`; those at padding have no
    meaning.
    """

    _outputs = TokenClassifierOutput
    _has_token_labels = True

    def _logits(self, outputs) -> Tensor:
        return self.classifier(self.dropout(outputs.last_hidden_state))


class ScratchBertForQuestionAnswering(ScratchBertPreTrainedModel):
    """The start and the end of the answer in the text: P_start(i) = exp(S·T_i) / Σ_j exp(S·T_j), likewise with E for
    the end, S and E the rows of `qa_outputs`, T_i the hidden state of a token (Devlin et al. 2018, section 4.2). The
    loss is the mean of the two, as in `BertForQuestionAnswering`."""

    def __init__(self, config: ScratchBertConfig):
        super().__init__(config)
        self.num_labels = config.num_labels
        self.model = ScratchBertModel(config, add_pooling_layer=False)
        self.qa_outputs = nn.Linear(config.hidden_size, config.num_labels)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: OptionalTensor = None,
        attention_mask: OptionalTensor = None,
        token_type_ids: OptionalTensor = None,
        position_ids: OptionalTensor = None,
        inputs_embeds: OptionalTensor = None,
        start_positions: OptionalTensor = None,
        end_positions: OptionalTensor = None,
        **kwargs,
    ) -> tuple | QuestionAnsweringModelOutput:
        """
        Args:
            start_positions: `(B,)`, the first token of the answer; one after the end of the sequence is ignored.
            end_positions: `(B,)`, its last token, likewise.

        The other arguments are those of `ScratchBertModel.forward`. Both logits are `(B, T)`. Those at padding have no
        meaning; with both positions, padding is kept, and they equal BERT's.
        """
        if start_positions is not None and end_positions is not None:
            kwargs["padding_free"] = False
        outputs = self.model(
            input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds, return_dict=True, **kwargs
        )
        scores = self.qa_outputs(outputs.last_hidden_state)
        start_logits, end_logits = (each.contiguous() for each in scores.unbind(dim=-1))
        losses, beyond = [], start_logits.shape[1]
        if start_positions is not None and end_positions is not None:
            for scores, positions in ((start_logits, start_positions), (end_logits, end_positions)):
                targets, num_items = positions.view(-1).clamp(0, beyond), kwargs.get("num_items_in_batch")
                losses.append(average(cross_entropy, scores, targets, num_items, ignore_index=beyond))
        loss: Any = sum(losses) / 2 if losses else None
        return QuestionAnsweringModelOutput(
            loss=loss, start_logits=start_logits, end_logits=end_logits, **recorded(outputs)
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
        input_ids: OptionalTensor = None,
        attention_mask: OptionalTensor = None,
        token_type_ids: OptionalTensor = None,
        position_ids: OptionalTensor = None,
        inputs_embeds: OptionalTensor = None,
        labels: OptionalTensor = None,
        **kwargs,
    ) -> tuple | MultipleChoiceModelOutput:
        """
        Args:
            input_ids: `(B, N, T)` for N choices; also `attention_mask`, `token_type_ids`, `position_ids`, and
                `inputs_embeds`, `(B, N, T, C)`.
            labels: `(B,)`, the right choice.

        The other arguments are those of `ScratchBertModel.forward`. `logits` are `(B, N)`.
        """
        inputs = {
            "input_ids": input_ids,
            "inputs_embeds": inputs_embeds,
            "attention_mask": attention_mask,
            "token_type_ids": token_type_ids,
            "position_ids": position_ids,
        }
        choices = check_choices(**inputs)
        flat = {name: None if tensor is None else tensor.flatten(0, 1) for name, tensor in inputs.items()}
        outputs = self.model(**flat, return_dict=True, **kwargs)
        logits = self.classifier(self.dropout(outputs.pooler_output)).view(-1, choices)
        loss = None if labels is None else average(cross_entropy, logits, labels, kwargs.get("num_items_in_batch"))
        return MultipleChoiceModelOutput(loss=loss, logits=logits, **recorded(outputs))


class ScratchBertForCausalLM(ScratchBertWithLanguageModelHead, ScratchBertGenerationMixin):
    """A causal BERT that predicts the next word, as `BertLMHeadModel`."""

    def __init__(self, config: ScratchBertConfig):
        super().__init__(config)
        if not config.is_decoder:
            logger.warning(
                "config.is_decoder is False; each token then attends to later ones, which generate does not "
                "have. Pass is_decoder=True."
            )
        # With label smoothing, `Trainer` shifts the labels for the classes in this table, to which
        # `AutoModelForCausalLM.register` does not add.
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.setdefault(ScratchBertConfig.model_type, ScratchBertForCausalLM.__name__)
        self.model = ScratchBertModel(config, add_pooling_layer=False)
        self.lm_head = LanguageModelHead(config)
        self.post_init()

    @names_cache
    @can_return_tuple
    def forward(
        self,
        input_ids: OptionalTensor = None,
        attention_mask: OptionalTensor = None,
        token_type_ids: OptionalTensor = None,
        position_ids: OptionalTensor = None,
        inputs_embeds: OptionalTensor = None,
        encoder_hidden_states: OptionalTensor = None,
        encoder_attention_mask: OptionalTensor = None,
        labels: OptionalTensor = None,
        past_key_values: Cache | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        **kwargs,
    ) -> tuple | CausalLMOutputWithCrossAttentions:
        """
        Args:
            labels: `(B, T)`, the input ids, which are shifted here; -100 for tokens that are not to be predicted.
            logits_to_keep: the number of last positions to score; 0 for all.

        The other arguments are those of `ScratchBertModel.forward`. `logits` are `(B, T, V)`.
        """
        past_key_values = take_cache(past_key_values, kwargs)
        if labels is not None:
            # Without a causal mask, the loss of shifted labels reads the logits at padding.
            kwargs["padding_free"] = False
            use_cache = False
        outputs = self.model(
            input_ids,
            attention_mask,
            token_type_ids,
            position_ids,
            inputs_embeds,
            encoder_hidden_states,
            encoder_attention_mask,
            past_key_values,
            use_cache=use_cache,
            return_dict=True,
            **kwargs,
        )
        logits = self.lm_head(last_positions(outputs.last_hidden_state, logits_to_keep))
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        return CausalLMOutputWithCrossAttentions(
            loss=loss,
            logits=logits,
            **{CACHE: getattr(outputs, CACHE)},
            **recorded(outputs),
            cross_attentions=outputs.cross_attentions,
        )


class ScratchBertEncoderDecoder(ScratchBertPreTrainedModel):
    """The models with an encoder and a decoder."""

    _is_encoder_decoder = True
    # An EncoderDecoderModel stores a pooler of the encoder, which it does not use.
    _keys_to_ignore_on_load_unexpected = [
        *ScratchBertPreTrainedModel._keys_to_ignore_on_load_unexpected,
        r"^(model\.)?encoder\.pooler\.",
    ]

    def resize_token_embeddings(self, *args, **kwargs) -> nn.Embedding:
        """As `PreTrainedModel.resize_token_embeddings`, for encoder, decoder and head."""
        self._refuse_if_optimized("resize_token_embeddings()")
        encoder, decoder = self.get_encoder(), self.get_decoder()
        if not self.config.share_embeddings:
            decoder.resize_token_embeddings(*args, **kwargs)
        embeddings = super().resize_token_embeddings(*args, **kwargs)
        encoder.config.vocab_size = decoder.config.vocab_size = self.config.vocab_size
        return embeddings


class ScratchBertSeq2SeqModel(ScratchBertEncoderDecoder):
    """An encoder and a decoder without a head. Both are BERTs; the decoder's blocks are causal and attend to the output
    of the encoder (Rothe et al. 2020, section 2.1)."""

    def __init__(self, config: ScratchBertConfig):
        super().__init__(config)
        self.encoder = ScratchBertModel(config.encoder_config(), add_pooling_layer=False)
        self.decoder = ScratchBertModel(config.decoder_config(), add_pooling_layer=False)
        # A tensor has the same name in encoder and decoder.
        self._tied_weights_keys = {
            f"decoder.{name}": f"encoder.{name}"
            for name, _ in self.encoder.named_parameters()
            if (config.share_embeddings if name.startswith("embeddings.") else config.tie_encoder_decoder)
        }
        self.post_init()

    def get_expanded_tied_weights_keys(self, all_submodels: bool = False) -> dict[str, str]:
        """The tied tensors: `{name: name of the one that is stored}`."""
        # transformers ties nothing if `tie_word_embeddings` is False, which concerns the head alone.
        return super().get_expanded_tied_weights_keys(True) if all_submodels else dict(self._tied_weights_keys)

    def get_input_embeddings(self) -> nn.Embedding:
        return self.encoder.get_input_embeddings()

    def set_input_embeddings(self, value: nn.Module):
        self.encoder.set_input_embeddings(value)
        if self.config.share_embeddings:
            self.decoder.set_input_embeddings(value)

    @names_cache
    @can_return_tuple
    @merge_with_config_defaults
    def forward(
        self,
        input_ids: OptionalTensor = None,
        attention_mask: OptionalTensor = None,
        decoder_input_ids: OptionalTensor = None,
        decoder_attention_mask: OptionalTensor = None,
        encoder_outputs: BaseModelOutput | tuple | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: OptionalTensor = None,
        decoder_inputs_embeds: OptionalTensor = None,
        use_cache: bool | None = None,
        token_type_ids: OptionalTensor = None,
        position_ids: OptionalTensor = None,
        decoder_position_ids: OptionalTensor = None,
        decoder_token_type_ids: OptionalTensor = None,
        **kwargs,
    ) -> tuple | Seq2SeqModelOutput:
        """
        Args:
            input_ids: `(B, S)` token ids of the source; or else `inputs_embeds`, `(B, S, C)`, or `encoder_outputs`.
            attention_mask: `(B, S)`, 1 for a token of the source and 0 for padding.
            decoder_input_ids: `(B, T)` token ids of the target, each row beginning with the start token; or else
                `decoder_inputs_embeds`, `(B, T, C)`. With a cache, only those that it does not contain.
            decoder_attention_mask: `(B, T)`, 1 for a token of the target, cached or not, and 0 for padding.
            encoder_outputs: the encoder's earlier output for this source, in place of another pass.
            past_key_values: the cache of the decoder.
            use_cache: whether the decoder fills one.
            token_type_ids: `(B, S)`, of the source.
            position_ids: `(B, S)` or `(1, S)`, of the source; 0 to S - 1 by default.
            decoder_position_ids: `(B, T)` or `(1, T)`, of the target; by default they continue those of the cache.
            decoder_token_type_ids: `(B, T)`, of the target.

        Returns:
            `last_hidden_state` `(B, T, C)`, `encoder_last_hidden_state` `(B, S, C)`, and what was requested.

        Raises:
            ValueError: an argument has a wrong shape, dtype or value.
        """
        if decoder_input_ids is None and decoder_inputs_embeds is None:
            raise ValueError(
                "decoder_input_ids and decoder_inputs_embeds: neither was given; expected one of them. "
                "ScratchBertForConditionalGeneration derives decoder_input_ids from labels."
            )
        past_key_values = take_cache(past_key_values, kwargs)
        kwargs.setdefault("output_attentions", self.config.output_attentions)
        kwargs.setdefault("output_hidden_states", self.config.output_hidden_states)
        if encoder_outputs is None:
            encoded = self.encoder(
                input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds, return_dict=True, **kwargs
            )
        else:
            encoded = encoder_outputs
            if isinstance(encoded, (list, tuple)):
                encoded = BaseModelOutput(*encoded)
            states, name = getattr(encoded, "last_hidden_state", None), "encoder_outputs.last_hidden_state"
            check_encoder_inputs(self.decoder.config, states, attention_mask, "batch", 1, name, "attention_mask")
        decoded = self.decoder(
            decoder_input_ids,
            decoder_attention_mask,
            decoder_token_type_ids,
            decoder_position_ids,
            decoder_inputs_embeds,
            encoded.last_hidden_state,
            attention_mask,
            past_key_values,
            use_cache=use_cache,
            return_dict=True,
            **kwargs,
        )
        return Seq2SeqModelOutput(
            last_hidden_state=decoded.last_hidden_state,
            **{CACHE: getattr(decoded, CACHE)},
            decoder_hidden_states=decoded.hidden_states,
            decoder_attentions=decoded.attentions,
            cross_attentions=decoded.cross_attentions,
            encoder_last_hidden_state=encoded.last_hidden_state,
            encoder_hidden_states=encoded.hidden_states,
            encoder_attentions=encoded.attentions,
        )


class ScratchBertForConditionalGeneration(
    ScratchBertEncoderDecoder, ScratchBertWithLanguageModelHead, ScratchBertGenerationMixin
):
    """An encoder, and a decoder with BERT's language-model head, for text to text (Rothe et al. 2020).

    `from_bert` initialises it from any BERT; `from_pretrained` opens its own checkpoints and those of an
    `EncoderDecoderModel` of two BERTs. Arguments and outputs are those of `BartForConditionalGeneration`.
    """

    def __init__(self, config: ScratchBertConfig):
        super().__init__(config)
        self.model = ScratchBertSeq2SeqModel(config)
        self.lm_head = LanguageModelHead(config)
        stored = "encoder" if config.share_embeddings else "decoder"
        self._tied_weights_keys = {"lm_head.decoder.weight": f"model.{stored}.embeddings.word_embeddings.weight"}
        self.post_init()

    @classmethod
    def from_bert(cls, source: str | os.PathLike, **kwargs) -> Self:
        """Initialise encoder, decoder and, if the checkpoint has one, the language-model head from a BERT.

        Cross-attention is randomly initialised (with a warning) and must be trained. Start, end and padding ids are
        those of the checkpoint's tokenizer, or else of its configuration.

        Args:
            source: a BERT checkpoint of any kind, or a ScratchBert one: a folder or a hub id.
            kwargs: fields of `ScratchBertConfig`, such as `num_decoder_layers` (the decoder starts with the first
                blocks of the BERT), `tie_encoder_decoder` and `share_embeddings`; and arguments of `from_pretrained`.

        Raises:
            ValueError: `source` is another kind of model, or already has an encoder and a decoder.
            OSError: there is no such checkpoint, or a file of it cannot be read.
        """
        config, tensors, options = installed("bert.warm_start").seq2seq_start(cls.config_class, source, **kwargs)
        return cls.from_pretrained(None, config=config, state_dict=tensors, **options)

    @names_cache
    @can_return_tuple
    def forward(
        self,
        input_ids: OptionalTensor = None,
        attention_mask: OptionalTensor = None,
        decoder_input_ids: OptionalTensor = None,
        decoder_attention_mask: OptionalTensor = None,
        encoder_outputs: BaseModelOutput | tuple | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: OptionalTensor = None,
        decoder_inputs_embeds: OptionalTensor = None,
        labels: OptionalTensor = None,
        use_cache: bool | None = None,
        token_type_ids: OptionalTensor = None,
        position_ids: OptionalTensor = None,
        decoder_position_ids: OptionalTensor = None,
        decoder_token_type_ids: OptionalTensor = None,
        logits_to_keep: int | Tensor = 0,
        **kwargs,
    ) -> tuple | Seq2SeqLMOutput:
        """
        Args:
            labels: `(B, T)`, the ids of the target without the start token, and -100 for padding. Shifted right, they
                are the input of the decoder, unless that is given.
            logits_to_keep: the number of last positions to score; 0 for all.

        The other arguments are those of `ScratchBertSeq2SeqModel.forward`. `logits` are `(B, T, V)`.
        """
        past_key_values = take_cache(past_key_values, kwargs)
        if labels is not None:
            use_cache = False
            targets: Any = decoder_input_ids if decoder_inputs_embeds is None else decoder_inputs_embeds
            check_tensor("labels", labels, *getattr(targets, "shape", ("batch", "length"))[:2])
            if decoder_input_ids is None and decoder_inputs_embeds is None:
                decoder_input_ids = self.prepare_decoder_input_ids_from_labels(labels)
                if decoder_attention_mask is None and self.config.pad_token_id is not None:
                    # The start token counts even if it has the id of the padding; so do cached positions, as PEFT's
                    # prefixes are.
                    decoder_attention_mask = (decoder_input_ids != self.config.pad_token_id).long()
                    decoder_attention_mask[:, 0] = 1
                    past_length: Any = cache_lengths(past_key_values)[0]
                    decoder_attention_mask = pad(decoder_attention_mask, (past_length, 0), value=1)
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
        logits = self.lm_head(last_positions(outputs.last_hidden_state, logits_to_keep))
        loss = None
        if labels is not None:
            # `self.loss_function` would shift the labels a second time, because of this class's name.
            scores = logits.view(-1, self.config.vocab_size)
            loss = average(cross_entropy, scores, labels.reshape(-1), kwargs.get("num_items_in_batch"))
        fields = {name: value for name, value in outputs.items() if name != "last_hidden_state"}
        return Seq2SeqLMOutput(loss=loss, logits=logits, **fields)

    def prepare_decoder_input_ids_from_labels(self, labels: Tensor) -> Tensor:
        """The input of the decoder for these labels, `(B, T)`: the start token, then all labels but the last, with
        padding in place of -100. `DataCollatorForSeq2Seq` calls it.

        Raises:
            ValueError: the configuration has no start or padding id.
        """
        if self.config.decoder_start_token_id is None:
            raise no_start_id("config")
        if self.config.pad_token_id is None:
            raise ValueError(
                "config.pad_token_id is None; expected an id to replace labels of -100. Set it to the "
                "tokenizer's pad_token_id."
            )
        start = labels.new_full((labels.shape[0], 1), self.config.decoder_start_token_id)
        ids = torch.cat([start, labels[:, :-1]], dim=1)
        return ids.masked_fill(ids == -100, self.config.pad_token_id)
