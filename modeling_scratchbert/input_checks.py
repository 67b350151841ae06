"""The checks of a forward pass's arguments. Each raises ValueError, with what the argument has and what was expected.

Shapes and dtypes are always checked; values only of eager tensors on the CPU, so that nothing waits for an accelerator
and nothing breaks a trace.
"""

import inspect
from difflib import get_close_matches
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils.import_utils import is_tracing

# What a forward pass accepts beside the arguments in its signature. The first are documented in
# `ScratchBertModel.forward`.
OPTIONS = frozenset(
    (
        *("output_attentions", "output_hidden_states", "return_dict", "num_items_in_batch", "padding_free"),
        *("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"),
        # Of transformers: `generate`, `generate_batch` with a paged cache, and the losses of language models.
        *("cache_position", "cache", "block_table", "read_index", "write_index", "logits_indices", "tokenizer"),
        *("logits_processor_args", "logits_to_keep", "is_causal", "shift_labels", "ignore_index"),
        # Of tokenizers, packing collators and vLLM.
        *("length", "special_tokens_mask", "offset_mapping", "overflow_to_sample_mapping", "seq_idx"),
        "attention_instances",
    )
)
# The arguments of BERT's models, among which the nearest to an unknown one is looked up.
ARGUMENTS = (
    *("input_ids", "attention_mask", "token_type_ids", "position_ids", "inputs_embeds"),
    *("encoder_hidden_states", "encoder_attention_mask", "past_key_values", "use_cache", "logits_to_keep"),
    *("labels", "next_sentence_label", "start_positions", "end_positions", "encoder_outputs"),
    *("decoder_input_ids", "decoder_attention_mask", "decoder_inputs_embeds"),
    *("decoder_position_ids", "decoder_token_type_ids"),
)

INTEGER, FLOATING, MASK = "torch.long or torch.int", "a floating dtype", "torch.bool or a floating dtype"


def has_values(tensor: Tensor) -> bool:
    """Whether values may be read now: not while tracing, under a transform of `torch.func`, or on the meta device."""
    # Under a transform no value is read, even of an argument that is not wrapped: others, such as labels, may be.
    return not (is_tracing(tensor) or tensor.is_meta or torch._C._functorch.peek_interpreter_stack() is not None)


def check_options(options: Any, config) -> None:
    """Checks that each option of a forward pass is known: it is in `OPTIONS`, or a parameter of the attention function
    that is registered under `config._attn_implementation`. Raises TypeError."""
    for name in options:
        if name in OPTIONS:
            continue
        kernel = ALL_ATTENTION_FUNCTIONS.get(config._attn_implementation)
        parameters = () if kernel is None else inspect.signature(kernel).parameters
        if name not in parameters:
            close = get_close_matches(name, (*ARGUMENTS, *OPTIONS), n=1)
            expected = f"perhaps {close[0]}" if close else "one of forward's signature"
            if name in ARGUMENTS:
                expected = "a class that has it, such as one with a model head"
            raise TypeError(f"{name} is no argument of this model; expected {expected}. Correct it or leave it out.")


def check_tensor(name: str, tensor, *shape, dtype: str | None = None, note: str = "") -> None:
    """Checks the type, dtype and shape of one argument.

    Args:
        shape: for each dimension its size, a tuple of the sizes that it may have, or a name if it may have any size.
        dtype: INTEGER, FLOATING, or MASK for boolean or floating; any by default.
        note: an explanation of the shape, for the message.
    """
    if not isinstance(tensor, Tensor):
        raise ValueError(
            f"{name} is a {type(tensor).__name__}; expected a tensor. Tokenizers return one with return_tensors='pt'."
        )
    is_allowed = tensor.is_floating_point() or (dtype == MASK and tensor.dtype == torch.bool)
    if dtype is not None and not (tensor.dtype in (torch.long, torch.int) if dtype == INTEGER else is_allowed):
        raise ValueError(f"{name} has dtype {tensor.dtype}; expected {dtype}.")
    sizes = [size if isinstance(size, tuple) else (size,) for size in shape]
    fits = [isinstance(size[0], str) or n in size for n, size in zip(tensor.shape, sizes, strict=False)]
    if tensor.ndim != len(sizes) or not all(fits):
        expected = ", ".join(str(size[0]) for size in sizes)
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}; expected ({expected}){note}.")


def check_ids(name: str, ids, *shape, field: str, size: int) -> None:
    """Checks integers from 0 to `size` - 1; `field` is the field of the configuration that sets the limit."""
    check_tensor(name, ids, *shape, dtype=INTEGER)
    if ids.device.type == "cpu" and ids.numel() > 0 and has_values(ids):
        low, high = (bound.item() for bound in ids.aminmax())
        bound = low if low < 0 else high
        if not 0 <= bound < size:
            raise ValueError(f"{name} contains {bound}; expected ids from 0 to {size - 1} ({field} is {size}).")


def check_mask(name: str, mask, batch: int, heads: int, queries: int, keys: int, slots=None, past=0) -> None:
    """Checks a padding mask `(batch, keys)`, or a full mask `(batch, heads, queries, keys)`, of which `slots` is
    another width; `past` of the keys are cached. Mask objects of the kernels, and caches whose length is a tensor, are
    not checked."""
    is_array = isinstance(mask, list) or hasattr(mask, "__array__")  # a NumPy array, or a tensor
    if is_array and isinstance(keys, (int, torch.SymInt)):
        full, ndim = ((batch, 1), (1, heads), (queries, 1), (keys, slots)), getattr(mask, "ndim", 2)
        if ndim == 4 and all(size in sizes for size, sizes in zip(mask.shape, full, strict=True)):
            check_tensor(name, mask, *full, dtype=MASK)
        else:
            note = f": {past} cached positions + {queries} new tokens" if isinstance(past, int) and past > 0 else ""
            note += "" if ndim == 2 else f", or {(batch, 1, queries, keys)} for a full mask"
            check_tensor(name, mask, batch, keys, note=note)


def check_inputs(config, ids: dict, inputs_embeds, mask, vocab_size: int, past_length, slots=None, is_packed=False):
    """Checks the arguments of `ScratchBertModel.forward`. `ids` are `input_ids`, `token_type_ids` and `position_ids`;
    `vocab_size` is that of the word embeddings; `past_length` and `slots` are the `cache_lengths`. With `is_packed`,
    the row may be longer than the table of positions."""
    tokens = inputs_embeds if ids["input_ids"] is None else ids["input_ids"]
    if (ids["input_ids"] is None) == (inputs_embeds is None):
        got = "neither" if tokens is None else "both"
        raise ValueError(f"input_ids and inputs_embeds: expected exactly one of them; got {got}.")
    if torch.jit.is_tracing():  # sizes are tensors, and each comparison would log a warning
        return
    if inputs_embeds is None:
        check_ids("input_ids", tokens, "batch", "length", field="vocab_size", size=vocab_size)
    else:
        check_tensor("inputs_embeds", tokens, "batch", "length", config.hidden_size, dtype=FLOATING)
    batch, length = tokens.shape[:2]
    limits = {"token_type_ids": "type_vocab_size", "position_ids": "max_position_embeddings"}
    if ids["position_ids"] is None and not is_packed:
        check_length(length, past_length, config.max_position_embeddings)
    for name in [name for name in limits if ids[name] is not None]:
        check_ids(name, ids[name], (batch, 1), length, field=limits[name], size=getattr(config, limits[name]))
    keys = past_length + length
    check_mask("attention_mask", mask, batch, config.num_attention_heads, length, keys, slots, past_length)


def check_length(length: int, past_length, limit: int) -> None:
    """Checks that there are positions for `length` tokens after `past_length` cached ones; not if that is a tensor."""
    if isinstance(past_length, int) and past_length + length > limit:
        cached, advice = "", f"Truncate it with tokenizer(text, truncation=True, max_length={limit})."
        if past_length:
            cached, advice = f" after {past_length} in the cache", "Generate fewer tokens, or shorten the prompt."
        raise ValueError(f"The sequence has {length} tokens{cached}; max_position_embeddings is {limit}. {advice}")


def check_encoder_inputs(
    config,
    states,
    mask,
    batch,
    queries: int,
    name: str = "encoder_hidden_states",
    mask_name: str = "encoder_attention_mask",
) -> None:
    """Checks the arguments for the cross-attention of a decoder with `batch` sequences of `queries` tokens. `batch` is
    a name if the number is not known."""
    if not config.add_cross_attention:
        raise ValueError(
            "encoder_hidden_states was given, and config.add_cross_attention is False; expected True. "
            "Create the model with is_decoder=True and add_cross_attention=True."
        )
    check_tensor(name, states, batch, "length", config.hidden_size, dtype=FLOATING)
    check_mask(mask_name, mask, states.shape[0], config.num_attention_heads, queries, states.shape[1])


def check_packed(cu_seq_lens_q, tokens: Tensor, attention_mask, position_ids, config) -> None:
    """Checks the arguments for packed sequences, whose `tokens` are `(1, N)` or `(1, N, C)`."""
    if attention_mask is not None:
        raise ValueError("attention_mask and cu_seq_lens_q: both were given; expected one of them.")
    if config._attn_implementation == "flex_attention" and tokens.device.type == "cpu":
        raise ValueError(
            "attn_implementation is 'flex_attention'; packed sequences on a CPU expect 'sdpa', "
            "because torch aborts the process. Call model.set_attn_implementation('sdpa')."
        )
    check_tensor("cu_seq_lens_q", cu_seq_lens_q, "sequences + 1", dtype=INTEGER)
    if tokens.shape[0] != 1:
        raise ValueError(f"cu_seq_lens_q was given for {tokens.shape[0]} rows; expected packed sequences in one row.")
    if not cu_seq_lens_q.is_cuda and has_values(cu_seq_lens_q):  # reading it would wait for the device
        limit = config.max_position_embeddings if position_ids is None else tokens.shape[1]
        check_starts(cu_seq_lens_q.tolist(), tokens.shape[1], limit)


def check_starts(starts: list[int], end: int, limit: int) -> None:
    """Checks that `starts` are those of packed sequences of at most `limit` tokens, and their `end`."""
    if starts[:1] + starts[-1:] != [0, end] or starts != sorted(starts):
        raise ValueError(f"cu_seq_lens_q is {starts}; expected numbers from 0 to the number of tokens, {end}, rising.")
    longest = max(after - before for before, after in pairwise(starts))
    if longest > limit:  # positions are to be counted
        raise ValueError(
            f"cu_seq_lens_q has a sequence of {longest} tokens; max_position_embeddings is {limit}. Split "
            "it, or pass position_ids."
        )


def cache_lengths(cache, mask=None, options=()) -> tuple[int | Tensor, int | None]:
    """The number of tokens in a cache, and its size if that is fixed: a full mask is then as wide. The `cache` of pages
    in the options of `generate_batch` has the width of its mask."""
    width = mask.shape[-1] if isinstance(mask, Tensor) else None
    if cache is None:
        return 0, width if "cache" in options else None
    if not isinstance(cache, Cache):
        raise ValueError(
            f"past_key_values is a {type(cache).__name__}; expected a transformers Cache, as a forward "
            "pass with use_cache=True returns."
        )
    return cache.get_seq_length(), width if cache.is_compileable else None


def check_cache(config, cache, batch: int, encoder_hidden_states) -> None:
    """Checks that the keys in a cache have this model's layers, heads and width, the sequences of the batch, and for
    cross-attention the length of the encoder's output."""
    if cache is None or torch.jit.is_tracing() or torch.compiler.is_compiling():
        return
    cross = getattr(cache, "cross_attention_cache", None)
    caches = {"": cache} if cross is None else {"": cache.self_attention_cache, " for cross-attention": cross}
    # With tensor parallelism, each process has some of the attention heads.
    is_parallel = torch.distributed.is_available() and torch.distributed.is_initialized()
    depth, heads = config.num_hidden_layers, config.num_attention_heads
    for kind, one in caches.items():
        # Quantised layers have other forms, and new ones no keys.
        shapes = [tuple(layer.keys.shape) for layer in one.layers if getattr(layer.keys, "ndim", 0) == 4]
        if not shapes:
            continue
        shape = shapes[0]
        own_heads = shape[1] if is_parallel and heads % shape[1] == 0 else heads
        length = encoder_hidden_states.shape[1] if kind and encoder_hidden_states is not None else shape[2]
        expected = (batch, own_heads, length, config.hidden_size // heads)
        if (len(shapes), shape) != (depth, expected):
            raise ValueError(
                f"past_key_values{kind} has {len(shapes)} layers of {shape} (sequences, heads, "
                f"positions, width); expected {depth} of {expected}. Leave it out to "
                "start from an empty cache."
            )


def check_choices(**tensors) -> int:
    """Checks the arguments of `ScratchBertForMultipleChoice.forward`, which have a dimension of choices, and returns
    the number of choices; 0 without tokens, for which the model raises."""
    shape: tuple = ("batch", "choices", "length")
    for name, tensor in tensors.items():
        if tensor is not None:
            check_tensor(name, tensor, *shape, *(["width"] if name == "inputs_embeds" else []))
            shape = tensor.shape[:3]
    return 0 if isinstance(shape[1], str) else shape[1]
