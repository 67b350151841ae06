"""The checks of a forward pass's arguments. Each raises ValueError, with what the argument has and what was expected.

Shapes and dtypes are always checked; values only of eager tensors on the CPU, so that nothing waits for an accelerator
and nothing breaks a trace.
"""

from itertools import pairwise
from typing import Any

import torch
from transformers.cache_utils import Cache, EncoderDecoderCache
from transformers.utils.import_utils import is_tracing

DTYPES = {
    "integer": "torch.long or torch.int",
    "floating": "a floating dtype",
    "mask": "torch.bool or a floating dtype",
}


def has_values(tensor: torch.Tensor) -> bool:
    """Whether values may be read now: not while tracing, under a transform of `torch.func`, or on the meta device."""
    # Under a transform no value is read, even of an argument that is not wrapped: others, such as labels, may be.
    return not (is_tracing(tensor) or tensor.is_meta or torch._C._functorch.peek_interpreter_stack() is not None)


def check_tensor(name: str, tensor, *shape, dtype: str | None = None, note: str = "") -> None:
    """Checks the type, dtype and shape of one argument.

    Args:
        shape: for each dimension its size, a tuple of the sizes that it may have, or a name if it may have any size.
        dtype: "integer", "floating", or "mask" for boolean or floating; any by default.
        note: an explanation of the shape, for the message.
    """
    if not isinstance(tensor, torch.Tensor):
        raise ValueError(
            f"{name} is a {type(tensor).__name__}; expected a tensor. Tokenizers return one with return_tensors='pt'."
        )
    is_integer, is_floating = tensor.dtype in (torch.long, torch.int), tensor.is_floating_point()
    is_allowed = {"integer": is_integer, "floating": is_floating, "mask": is_floating or tensor.dtype == torch.bool}
    if dtype is not None and not is_allowed[dtype]:
        raise ValueError(f"{name} has dtype {tensor.dtype}; expected {DTYPES[dtype]}.")
    sizes = [size if isinstance(size, tuple) else (size,) for size in shape]
    fits = [isinstance(size[0], str) or n in size for n, size in zip(tensor.shape, sizes, strict=False)]
    if tensor.ndim != len(sizes) or not all(fits):
        expected = ", ".join(str(size[0]) for size in sizes)
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}; expected ({expected}){note}.")


def check_ids(name: str, ids, *shape, field: str, size: int) -> None:
    """Checks integers from 0 to `size` - 1; `field` is the field of the configuration that sets the limit."""
    check_tensor(name, ids, *shape, dtype="integer")
    if ids.device.type != "cpu" or ids.numel() == 0 or not has_values(ids):
        return
    low, high = (bound.item() for bound in ids.aminmax())
    if low < 0 or high >= size:
        wrong = low if low < 0 else high
        raise ValueError(f"{name} contains {wrong}; expected ids from 0 to {size - 1} ({field} is {size}).")


def check_mask(name: str, mask, batch: int, heads: int, queries: int, keys: int, slots=None, note: str = "") -> None:
    """Checks a padding mask `(batch, keys)`, or a full mask `(batch, heads, queries, keys)`, of which `slots` is
    another width. Mask objects of the kernels, and caches whose length is a tensor, are not checked."""
    is_array = isinstance(mask, list) or hasattr(mask, "__array__")  # a NumPy array, or a tensor
    if not is_array or not isinstance(keys, (int, torch.SymInt)):
        return
    full = (batch, 1), (1, heads), (queries, 1), (keys, slots)
    ndim = getattr(mask, "ndim", 2)
    if ndim == 4 and all(size in sizes for size, sizes in zip(mask.shape, full, strict=True)):
        check_tensor(name, mask, *full, dtype="mask")
    else:
        note += "" if ndim == 2 else f", or {(batch, 1, queries, keys)} for a full mask"
        check_tensor(name, mask, batch, keys, note=note)


def check_inputs(
    config, ids: dict, inputs_embeds, attention_mask, vocab_size: int, past_length, slots=None, is_packed: bool = False
) -> None:
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
        check_tensor("inputs_embeds", tokens, "batch", "length", config.hidden_size, dtype="floating")
    (batch, length), limit = tokens.shape[:2], config.max_position_embeddings
    has_own_positions = ids["position_ids"] is not None or is_packed
    if not has_own_positions and isinstance(past_length, int) and past_length + length > limit:
        cached = f" after {past_length} in the cache" if past_length else ""
        truncate = f"Truncate it with tokenizer(text, truncation=True, max_length={limit})"
        raise ValueError(f"The sequence has {length} tokens{cached}; max_position_embeddings is {limit}. "
                         f"{'Generate fewer tokens, or shorten the prompt' if past_length else truncate}.")  # fmt: skip
    for name, field in (("token_type_ids", "type_vocab_size"), ("position_ids", "max_position_embeddings")):
        if ids[name] is not None:
            check_ids(name, ids[name], (batch, 1), length, field=field, size=getattr(config, field))
    is_cached = isinstance(past_length, int) and past_length > 0
    note = f": {past_length} cached positions + {length} new tokens" if is_cached else ""
    keys = past_length + length
    check_mask("attention_mask", attention_mask, batch, config.num_attention_heads, length, keys, slots, note)


def check_encoder_inputs(
    config, states, mask, batch, queries: int, name: str = "encoder_hidden_states", mask_name="encoder_attention_mask"
) -> None:
    """Checks the arguments for the cross-attention of a decoder with `batch` sequences of `queries` tokens. `batch` is
    a name if the number is not known."""
    if not config.add_cross_attention:
        raise ValueError(
            "encoder_hidden_states was given, and config.add_cross_attention is False; expected a model with "
            "cross-attention. Create it with is_decoder=True and add_cross_attention=True."
        )
    check_tensor(name, states, batch, "length", config.hidden_size, dtype="floating")
    check_mask(mask_name, mask, states.shape[0], config.num_attention_heads, queries, states.shape[1])


def check_packed(cu_seq_lens_q, tokens: torch.Tensor, attention_mask, position_ids, config) -> None:
    """Checks the arguments for packed sequences, whose `tokens` are `(1, N)` or `(1, N, C)`."""
    if config._attn_implementation == "flex_attention" and tokens.device.type == "cpu":
        raise ValueError(
            "attn_implementation is 'flex_attention'; packed sequences on a CPU expect another one, because torch "
            "aborts the process. Load the model with attn_implementation='sdpa'."
        )
    if attention_mask is not None:
        raise ValueError("attention_mask and cu_seq_lens_q: both were given; expected one of them.")
    check_tensor("cu_seq_lens_q", cu_seq_lens_q, "sequences + 1", dtype="integer")
    if tokens.shape[0] != 1:
        raise ValueError(f"cu_seq_lens_q was given for {tokens.shape[0]} rows; expected packed sequences in one row.")
    if cu_seq_lens_q.is_cuda or not has_values(cu_seq_lens_q):  # reading it would wait for the device
        return
    starts, end = cu_seq_lens_q.tolist(), tokens.shape[1]
    if len(starts) < 2 or starts[0] != 0 or starts[-1] != end or starts != sorted(starts):
        raise ValueError(
            f"cu_seq_lens_q is {starts}; expected numbers that rise from 0 to the number of tokens, {end}."
        )
    longest, limit = max(end - start for start, end in pairwise(starts)), config.max_position_embeddings
    if position_ids is None and longest > limit:  # positions are to be counted
        raise ValueError(f"cu_seq_lens_q has a sequence of {longest} tokens; max_position_embeddings is {limit}. Split "
                         "it, or pass position_ids.")  # fmt: skip


def cache_lengths(cache, mask=None, options: Any = None) -> tuple[int | torch.Tensor, int | None]:
    """The number of tokens in a cache, and its size if that is fixed: a full mask is then as wide. The `cache` of pages
    in the options of `generate_batch` has the width of its mask."""
    paged = mask.shape[-1] if "cache" in (options or {}) and isinstance(mask, torch.Tensor) else None
    if cache is None:
        return 0, paged
    if not isinstance(cache, Cache):
        raise ValueError(f"past_key_values is a {type(cache).__name__}; expected a transformers Cache, as a forward "
                         "pass with use_cache=True returns.")  # fmt: skip
    return cache.get_seq_length(), paged or (cache.get_max_length() if cache.is_compileable else None)


def check_cache(config, cache, batch: int, encoder_hidden_states) -> None:
    """Checks that the keys in a cache have this model's layers, heads and width, the sequences of the batch, and for
    cross-attention the length of the encoder's output."""
    if cache is None or torch.jit.is_tracing() or torch.compiler.is_compiling():
        return
    caches = {"": cache}
    if isinstance(cache, EncoderDecoderCache):
        caches = {"": cache.self_attention_cache, " for cross-attention": cache.cross_attention_cache}
    # With tensor parallelism, each process has some of the attention heads.
    is_parallel = torch.distributed.is_available() and torch.distributed.is_initialized()
    heads, width = config.num_attention_heads, config.hidden_size // config.num_attention_heads
    for kind, one in caches.items():
        keys = [layer.keys for layer in one.layers if layer.is_initialized and isinstance(layer.keys, torch.Tensor)]
        shapes = [tuple(tensor.shape) for tensor in keys if tensor.ndim == 4]  # quantised layers have other forms
        if not shapes:
            continue
        own_heads = shapes[0][1] if is_parallel and heads % shapes[0][1] == 0 else heads
        length = encoder_hidden_states.shape[1] if kind and encoder_hidden_states is not None else shapes[0][2]
        expected = (batch, own_heads, length, width)
        if len(shapes) != config.num_hidden_layers or shapes[0] != expected:
            raise ValueError(f"past_key_values{kind} has {len(shapes)} layers of {shapes[0]} (sequences, heads, "
                             f"positions, width); expected {config.num_hidden_layers} of {expected}. Leave it out to "
                             "start from an empty cache.")  # fmt: skip


def check_labels(labels, decoder_inputs) -> None:
    """Checks the labels of a seq2seq model, `(batch, length)`, against the inputs of the decoder, if they are given."""
    is_given = isinstance(decoder_inputs, torch.Tensor)
    check_tensor("labels", labels, *(decoder_inputs.shape[:2] if is_given else ("batch", "length")))


def check_choices(**tensors) -> int:
    """Checks the arguments of `ScratchBertForMultipleChoice.forward`, which have a dimension of choices, and returns
    the number of choices; 0 without tokens, for which the model raises."""
    shape: tuple = ("batch", "choices", "length")
    for name, tensor in tensors.items():
        if tensor is not None:
            check_tensor(name, tensor, *shape, *(["width"] if name == "inputs_embeds" else []))
            shape = tensor.shape[:3]
    return 0 if isinstance(shape[1], str) else shape[1]
