"""Attention whose numbers for a sequence do not depend on the rest of the batch.

A kernel adds up numbers in an order that depends on how many there are, also of those that a mask hides. So each
sequence is given to the kernel without its padding. An encoder's batches are unpadded already; these are a decoder's.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from ..input_checks import has_values
from ..unpadding import PaddedBatch, is_padding_mask


class SlicedBatch(PaddedBatch):
    """Sequences of a decoder, `(B, T)`. The kernel is called once for all rows whose tokens are in the same place."""

    def encoder_inputs(self, config, hidden_states, eager, position_ids, encoder_states, encoder_mask, cache) -> dict:
        source = encoder_states, encoder_mask, cache
        inputs = super().encoder_inputs(config, hidden_states, eager, position_ids, *source)
        masks = [mask for mask in (self.attention_mask, encoder_mask) if mask is not None]
        name = config._attn_implementation
        is_shipped = name in ("eager", "sdpa")
        if eager or not is_shipped or not has_values(hidden_states) or not all(map(is_padding_mask, masks)):
            return inputs
        rows, length = hidden_states.shape[:2]
        past = 0 if cache is None else int(cache.get_seq_length())
        keys = tokens_of(self.attention_mask, rows, past + length)
        queries = [(max(start - past, 0), max(end - past, 0)) for start, end, _ in keys]
        sources = keys if encoder_states is None else tokens_of(encoder_mask, rows, encoder_states.shape[1])
        self.groups = {True: grouped(queries, keys), False: grouped(queries, sources)}
        self.has_padding = any(own != (0, length) for own in queries) or any(start == end for start, end, _ in sources)
        return inputs | {"batch": self}

    def kernel(self, kernel, encoder_hidden_states):
        return partial(self._attend, kernel, encoder_hidden_states is None)

    def _attend(self, kernel, is_self, module, query, key, value, attention_mask=None, **options) -> tuple:
        """Attention of the queries in each row, `(B, H, T, D)`, to the keys that are tokens: `(B, T, H, D)`; and no
        weights. At padding, the numbers are those of the whole batch, as in a model as loaded."""
        context, heads, groups = None, (query, key, value), self.groups[is_self]
        for (first_query, end_query, first_key, end_key, has_gaps), rows in groups.items():
            queries, keys = end_query - first_query, end_key - first_key
            is_causal = module.is_causal and "is_causal" not in options
            is_implied = not is_self or (is_causal and queries in (1, keys))
            mask = None if is_implied and not has_gaps and kernel is aligned_sdpa else attention_mask
            if len(groups) == 1 and (queries, keys) == (query.shape[2], key.shape[2]) and rows == slice(len(query)):
                return kernel(module, *heads, mask, **options)[0], None
            if context is None:
                whole = kernel(module, *heads, attention_mask, **options)[0] if self.has_padding else None
                context = query.new_empty(query.transpose(1, 2).shape) if whole is None else whole
            queries, keys = slice(first_query, end_query), slice(first_key, end_key)
            if mask is not None:
                mask = mask.expand(len(query), -1, -1, -1)[rows, :, queries, keys]
            part = query[rows, :, queries], key[rows, :, keys], value[rows, :, keys]
            context[rows, queries] = kernel(module, *part, mask, **options)[0]
        return kernel(module, *heads, attention_mask, **options)[0] if context is None else context, None


def tokens_of(mask: torch.Tensor | None, rows: int, width: int) -> list[tuple[int, int, bool]]:
    """For each row of a padding mask, `(B, width)`: the start of the tokens, their end, and whether there is padding in
    between. Without a mask, there is none."""
    if mask is None or mask.all():
        return [(0, width, False)] * rows
    mask = mask.bool()
    starts, ends = mask.int().argmax(1), width - mask.flip(1).int().argmax(1)
    columns = zip(starts.tolist(), ends.tolist(), mask.sum(1).tolist(), strict=True)
    return [(start, end if number else start, end - start != number) for start, end, number in columns]


def grouped(queries, keys) -> dict[tuple, slice | list[int]]:
    """The rows with the same queries and keys; as a slice if they follow one another, which needs no copy."""
    groups: dict[tuple, list[int]] = {}
    for row, (own, others) in enumerate(zip(queries, keys, strict=True)):
        if own[0] != own[1] and others[0] != others[1]:
            groups.setdefault((*own, *others), []).append(row)
    return {
        key: slice(rows[0] or None, rows[-1] + 1) if rows[-1] - rows[0] < len(rows) else rows
        for key, rows in groups.items()
    }


def invariant_kernel(is_aligned: bool, kernel: Callable) -> Callable:
    """What to call in place of a kernel of the attention interface. `is_aligned`: see `aligned_sdpa`."""
    if kernel is sdpa_attention_forward:
        return direct_sdpa if is_aligned else aligned_sdpa
    return partial(row_by_row, kernel) if getattr(kernel, "__name__", "") == "eager_attention" else kernel


def direct_sdpa(module, query, key, value, attention_mask, scaling=None, dropout=0.0, **options) -> tuple:
    """`sdpa_attention_forward` for an encoder, without its checks for grouped queries and for a paged cache. Between
    products of a few rows, they take 1 % of the time."""
    if options:
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **options)
    return scaled_dot_product_attention(query, key, value, attention_mask, dropout, scale=scaling).transpose(1, 2), None


def aligned_sdpa(module, query, key, value, attention_mask, scaling=None, **options) -> tuple:
    """`sdpa_attention_forward`, whose products in float32 depend on where in memory a thread has its numbers if there
    are fewer than four queries, or heads whose width is no multiple of 16; and on the number of threads if there is one
    head of one sequence. A single query, as in decoding, is multiplied by `matmul`, which does not, and is faster."""
    rows, _, length, width = query.shape
    if options.get("is_causal") is None:
        options["is_causal"] = module.is_causal and length > 1 and attention_mask is None
    if query.dtype == torch.float32:
        if width % 16:
            query, key, value = (pad(heads, (0, -width % 16)) for heads in (query, key, value))
        if length == 1 and attention_mask is None and not options.get("dropout"):
            weights = (query @ key.transpose(2, 3) * scaling).softmax(dim=-1)
            return (weights @ value)[..., :width].transpose(1, 2), None
        if query.shape[:2] == (1, 1):
            query, key, value = (heads.expand(2, -1, -1, -1) for heads in (query, key, value))
        if length < 4:
            query = pad(query, (0, 0, 0, 4 - length))
            if attention_mask is not None and attention_mask.shape[2] == length:
                attention_mask = pad(attention_mask, (0, 0, 0, 4 - length))
    context = sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **options)[0]
    return context[:rows, :length, :, :width], None


def row_by_row(kernel, module, query, key, value, attention_mask, **options) -> tuple:
    """A kernel for one sequence at a time, in memory of its own: MKL multiplies small matrices differently if there are
    more of them, or elsewhere in memory."""
    rows, copy = len(query), partial(torch.clone, memory_format=torch.contiguous_format)
    masks = [None] * rows if attention_mask is None else attention_mask.expand(rows, -1, -1, -1).split(1)
    sequences = zip(*(map(copy, each.split(1)) for each in (query, key, value)), masks, strict=True)
    contexts, weights = zip(*(kernel(module, *sequence, **options) for sequence in sequences), strict=True)
    return torch.cat(contexts), torch.cat(weights)
