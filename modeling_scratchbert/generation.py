"""`generate` of `transformers`, with what these models require in addition."""

from transformers.cache_utils import Cache
from transformers.generation import GenerationMixin
from transformers.masking_utils import create_masks_for_generate

from .inference import is_prepacked
from .versions import CACHE, take_cache


class ScratchBertGenerationMixin(GenerationMixin):
    """`generate` for models with a limited number of positions, and for seq2seq models."""

    _can_compile_fullgraph = True

    def _reorder_cache(self, past_key_values: Cache, beam_idx) -> Cache:
        """Move the cache of each beam to its new place. All beams of a sequence attend to the same encoder output, so
        the cache of cross-attention, the larger one for a long source, stays as it is."""
        getattr(past_key_values, "self_attention_cache", past_key_values).reorder_cache(beam_idx)
        return past_key_values

    def generate(self, *args, **kwargs):
        """As `GenerationMixin.generate`. The cache of an earlier call may be `cache` or `past_key_values`."""
        cache = take_cache(kwargs.pop("past_key_values", None), kwargs)
        return super().generate(*args, **kwargs if cache is None else {**kwargs, CACHE: cache})

    def _validate_generated_length(self, generation_config, input_ids_length, has_default_max_length):
        super()._validate_generated_length(generation_config, input_ids_length, has_default_max_length)
        limit = self.config.max_position_embeddings + 1  # the last token is not an input
        if generation_config.max_length > limit:
            remedies = [f"set max_new_tokens to {limit - input_ids_length} or less"] if input_ids_length < limit else []
            remedies += ["shorten the prompt"] if input_ids_length > 1 else []
            raise ValueError(
                f"max_length is {generation_config.max_length}, {input_ids_length} tokens of which are "
                f"the prompt; expected at most {limit}, because max_position_embeddings is {limit - 1}. "
                f"To generate, {', or '.join(remedies)}."
            )

    def create_masks_for_generate(self, **kwargs):
        """The mask for a static cache: a full one; or the padding mask, from which an optimised model makes it."""
        is_optimized = any(map(is_prepacked, self.modules()))
        return kwargs["attention_mask"] if is_optimized else create_masks_for_generate(**kwargs)

    def _prepare_model_inputs(self, *args, **kwargs):
        inputs, name, model_kwargs = super()._prepare_model_inputs(*args, **kwargs)
        model_kwargs.pop("labels", None)  # `Seq2SeqTrainer` passes them; `generate` would, to the encoder
        return inputs, name, model_kwargs

    def _prepare_decoder_input_ids_for_generation(self, *args, **kwargs):
        ids, model_kwargs = super()._prepare_decoder_input_ids_for_generation(*args, **kwargs)
        mask = model_kwargs.get("decoder_attention_mask")
        if mask is None and model_kwargs.get(CACHE) is not None:
            # By the length of the mask, transformers finds the ids that the cache contains.
            model_kwargs["decoder_attention_mask"] = ids.new_ones(ids.shape)
        elif mask is not None and model_kwargs.get("decoder_position_ids") is None and not mask.all():
            # Prompts padded on the left: positions count from the first token, as in a decoder alone.
            model_kwargs["decoder_position_ids"] = (mask.long().cumsum(-1) - 1).clamp(min=0)
        return ids, model_kwargs

    def _prepare_special_tokens(self, generation_config, *args, **kwargs):
        starts = generation_config.decoder_start_token_id, generation_config.bos_token_id
        if self.config.is_encoder_decoder and starts == (None, None):
            raise no_start_id("generation_config")
        super()._prepare_special_tokens(generation_config, *args, **kwargs)


def no_start_id(config: str) -> ValueError:
    """The error for a seq2seq model without a start token. `config` is the name of the configuration that lacks it."""
    return ValueError(
        f"{config}.decoder_start_token_id is None; expected the id of the decoder's first token. Set it "
        "to the tokenizer's cls_token_id if the decoder comes from a BERT: config.decoder_start_token_id "
        "for training, and generation_config.decoder_start_token_id for generate."
    )
