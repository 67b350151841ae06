"""What a forward pass refuses, and what it then says. Shapes are always checked. Values are checked where that costs
nothing: for eager tensors on the CPU, so that nothing waits for an accelerator and nothing breaks a trace."""

import torch
from torch._C._functorch import is_functorch_wrapped_tensor
from transformers.cache_utils import Cache, EncoderDecoderCache
from transformers.utils.import_utils import is_tracing


def check_inputs(
    config, input_ids, inputs_embeds, attention_mask, token_type_ids, position_ids, past_length, vocab_size, slots=None
) -> None:
    """Checks the arguments of `ScratchBertModel.forward`; `vocab_size` is that of the table of word embeddings,
    `past_length` and `slots` are the `cache_lengths`.

    Raises:
        ValueError: an argument has a wrong shape, dtype or value; the message names it, what it got and what it wants.
    """
    if (input_ids is None) == (inputs_embeds is None):
        got = "neither" if input_ids is None else "both"
        raise ValueError(f"Give exactly one of input_ids and inputs_embeds; got {got}.")
    if torch.jit.is_tracing():  # where sizes are tensors, and every comparison would draw a warning
        return
    if input_ids is not None:
        _check_ids("input_ids", input_ids, vocab_size, "vocab_size")
        if input_ids.ndim != 2:
            raise ValueError(f"input_ids has shape {_shape(input_ids)}; it wants (batch, length).")
        batch, length = input_ids.shape
    else:
        check_states("inputs_embeds", inputs_embeds, config.hidden_size)
        batch, length = inputs_embeds.shape[:2]

    limit = config.max_position_embeddings
    if position_ids is None and isinstance(past_length, int) and past_length + length > limit:
        if past_length:
            raise ValueError(
                f"The sequence has {length} tokens after {past_length} in the cache, and max_position_embeddings is "
                f"{limit}. Generate fewer tokens, or shorten the prompt."
            )
        raise ValueError(
            f"The sequence has {length} tokens, and max_position_embeddings is {limit}. Truncate it, "
            f"tokenizer(text, truncation=True, max_length={limit}), or split it into windows."
        )
    for name, ids, size, field in (
        ("token_type_ids", token_type_ids, config.type_vocab_size, "type_vocab_size"),
        ("position_ids", position_ids, limit, "max_position_embeddings"),
    ):
        if ids is None:
            continue
        _check_tensor(name, ids)
        if ids.ndim != 2 or ids.shape[0] not in (1, batch) or ids.shape[1] != length:
            raise ValueError(f"{name} has shape {_shape(ids)}; it wants {(batch, length)}, like the tokens.")
        _check_ids(name, ids, size, field)
    keys = past_length + length
    check_mask("attention_mask", attention_mask, batch, config.num_attention_heads, length, keys, slots)


def check_encoder_inputs(config, encoder_hidden_states, encoder_attention_mask, batch: int, queries: int) -> None:
    """Checks what a decoder of `batch` sequences of `queries` tokens is given of an encoder.

    Raises:
        ValueError: the model has no cross-attention, or an argument has a wrong shape or dtype.
    """
    if not config.add_cross_attention:
        raise ValueError(
            "encoder_hidden_states needs cross-attention, which this model does not have: make it with "
            "is_decoder=True and add_cross_attention=True."
        )
    check_states("encoder_hidden_states", encoder_hidden_states, config.hidden_size, batch)
    keys = encoder_hidden_states.shape[1]
    check_mask("encoder_attention_mask", encoder_attention_mask, batch, config.num_attention_heads, queries, keys)


def cache_lengths(cache) -> tuple[int | torch.Tensor, int | None]:
    """How many tokens a cache holds, and how many it has room for if its size is fixed: a full mask is then as wide.

    Raises:
        ValueError: it is no `Cache`.
    """
    if cache is None:
        return 0, None
    if not isinstance(cache, Cache):
        raise ValueError(
            f"past_key_values is a {type(cache).__name__}; it wants a Cache of transformers, as a forward pass with "
            "use_cache=True returns it."
        )
    return cache.get_seq_length(), cache.get_max_length() if cache.is_compileable else None


def check_cache(config, cache, batch: int, encoder_hidden_states) -> None:
    """Checks that the filled part of a cache is this model's, for `batch` sequences and this encoder's output.

    Raises:
        ValueError: it has other layers, heads or sequences.
    """
    if cache is None or torch.jit.is_tracing() or torch.compiler.is_compiling():
        return
    caches = {"": cache}
    if isinstance(cache, EncoderDecoderCache):
        caches = {"": cache.self_attention_cache, " for cross-attention": cache.cross_attention_cache}
    heads, width = config.num_attention_heads, config.hidden_size // config.num_attention_heads
    for kind, one in caches.items():
        filled = [layer.keys for layer in one.layers if layer.is_initialized and isinstance(layer.keys, torch.Tensor)]
        filled = [keys for keys in filled if keys.ndim == 4]  # a quantised layer's may be in another form
        if not filled:
            continue
        # Processes that share a model by tensor parallelism have some of its heads each.
        shared = torch.distributed.is_available() and torch.distributed.is_initialized()
        fits = heads % filled[0].shape[1] == 0 if shared else filled[0].shape[1] == heads
        if len(filled) != config.num_hidden_layers or not fits or filled[0].shape[3] != width:
            raise ValueError(
                f"past_key_values is the cache{kind} of another model: it has {len(filled)} layers of "
                f"{filled[0].shape[1]} heads, {filled[0].shape[3]} wide, and this model has {config.num_hidden_layers} "
                f"of {heads}, {width} wide. Start from an empty cache: leave past_key_values out."
            )
        if filled[0].shape[0] != batch:
            raise ValueError(
                f"past_key_values holds {filled[0].shape[0]} sequences{kind}, and the batch has {batch}. Start from an "
                "empty cache: leave past_key_values out."
            )
        if kind and encoder_hidden_states is not None and filled[0].shape[2] != encoder_hidden_states.shape[1]:
            raise ValueError(
                f"past_key_values holds an encoder's output of {filled[0].shape[2]} tokens, and encoder_hidden_states "
                f"has {encoder_hidden_states.shape[1]}. Start from an empty cache: leave past_key_values out."
            )


def check_labels(labels, decoder_inputs: torch.Tensor | None) -> None:
    """Checks the labels of a seq2seq model, `(batch, length)`, against the decoder's inputs where those are given.

    Raises:
        ValueError: they have another shape.
    """
    _check_tensor("labels", labels)
    if labels.ndim != 2:
        raise ValueError(f"labels has shape {_shape(labels)}; it wants (batch, length).")
    if decoder_inputs is not None and labels.shape != decoder_inputs.shape[:2]:
        raise ValueError(
            f"labels has shape {_shape(labels)}; it wants {_shape(decoder_inputs)[:2]}, like the decoder's inputs."
        )


def check_choices(input_ids, inputs_embeds, **others) -> int:
    """Checks the arguments of `ScratchBertForMultipleChoice.forward`, each of which has a dimension of choices.

    Returns:
        How many choices there are, or 0 where there are no tokens, which the model refuses.

    Raises:
        ValueError: an argument has another shape than the tokens.
    """
    name, tokens = ("inputs_embeds", inputs_embeds) if input_ids is None else ("input_ids", input_ids)
    if tokens is None:
        return 0
    _check_tensor(name, tokens)
    dimensions = "(batch, choices, length)" if input_ids is not None else "(batch, choices, length, width)"
    if tokens.ndim != dimensions.count(",") + 1:
        raise ValueError(f"{name} has shape {_shape(tokens)}; it wants {dimensions}.")
    for name, tensor in others.items():
        if tensor is None:
            continue
        _check_tensor(name, tensor)
        if tensor.shape != tokens.shape[:3]:
            raise ValueError(f"{name} has shape {_shape(tensor)}; it wants {_shape(tokens)[:3]}, like the tokens.")
    return tokens.shape[1]


def check_states(name: str, states: torch.Tensor, width: int, batch: int | None = None) -> None:
    """Checks embeddings or an encoder's output, `(batch, length, width)`.

    Raises:
        ValueError: they have another shape.
    """
    _check_tensor(name, states)
    if not states.is_floating_point():
        raise ValueError(f"{name} has dtype {states.dtype}; it wants floating numbers.")
    if states.ndim != 3 or states.shape[2] != width or (batch is not None and states.shape[0] != batch):
        raise ValueError(f"{name} has shape {_shape(states)}; it wants ({batch or 'batch'}, length, {width}).")


def check_mask(name: str, mask, batch: int, heads: int, queries: int, keys: int, slots: int | None = None) -> None:
    """Checks a padding mask `(batch, keys)` or a full one `(batch, heads, queries, keys)`, or `slots` in place of its
    `keys`. A cache whose filling only tensors tell, and the kernels' own mask objects, are left to the kernels.

    Raises:
        ValueError: the mask has another shape, or is a full one of whole numbers.
    """
    if isinstance(mask, list) or hasattr(mask, "__array__"):  # an array of numpy's
        _check_tensor(name, mask)
    if not isinstance(mask, torch.Tensor) or not isinstance(keys, (int, torch.SymInt)):
        return
    if mask.ndim == 4 and mask.dtype != torch.bool and not mask.is_floating_point():
        raise ValueError(
            f"{name} is a full mask of {mask.dtype}; it wants a boolean one (True: may look), or a floating one, which "
            "is added to the scores."
        )
    full = ((1, batch), (1, heads), (1, queries), (keys, slots))
    wanted = full if mask.ndim == 4 else ((batch,), (keys,))
    if mask.ndim != len(wanted) or any(size not in sizes for size, sizes in zip(mask.shape, wanted, strict=True)):
        raise ValueError(
            f"{name} has shape {_shape(mask)}; it wants {(batch, keys)}, 1 for a token and 0 for padding, or a full "
            f"mask, {(batch, 1, queries, keys)}."
        )


def _check_tensor(name: str, value) -> None:
    if not isinstance(value, torch.Tensor):
        raise ValueError(
            f"{name} is a {type(value).__name__}; it wants a tensor (of a tokenizer: return_tensors='pt')."
        )


def _check_ids(name: str, ids: torch.Tensor, size: int, field: str) -> None:
    _check_tensor(name, ids)
    if ids.dtype not in (torch.long, torch.int):
        raise ValueError(f"{name} has dtype {ids.dtype}; it wants whole numbers, torch.long or torch.int.")
    if ids.device.type != "cpu" or ids.numel() == 0 or is_tracing(ids) or is_functorch_wrapped_tensor(ids):
        return
    low, high = (bound.item() for bound in ids.aminmax())
    if low < 0 or high >= size:
        raise ValueError(
            f"{name} holds {low if low < 0 else high}; it wants ids from 0 to {size - 1} ({field} is {size})."
        )


def _shape(tensor: torch.Tensor) -> tuple[int, ...]:
    return tuple(tensor.shape)
