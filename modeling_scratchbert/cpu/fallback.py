"""`OptimizedStack.compute` in torch's operators, for processors without a library.

Products and norms treat each row alone (`TorchMatrix`). A kernel of attention adds up numbers in an order that depends
on how many there are, also of those that a mask hides: so it is given each sequence without its padding.
"""

import itertools
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers.activations import ACT2FN


@torch.autocast("cpu", enabled=False)
def run(stack, to: Tensor, after: Tensor, projected: Tensor, starts: Tensor, own, source, first: int, last: int):
    """See `OptimizedStack.compute`; `own` and `source` are keys, values, which of them there are, and their counts."""
    sequences = [slice(*pair) for pair in itertools.pairwise(starts.tolist())]
    x, projected = to.flatten(0, 1), None if projected is None else projected.flatten(0, 1)
    for index in range(first, last + 1):
        if index:
            x = finish(stack, stack.blocks[index - 1], x, projected, sequences, own, source)
        if index < len(stack.blocks):
            block = stack.blocks[index]
            y = block.attention_norm(x) if stack.config.norm_first else x
            projected = block.query_key_value.multiply(y)
    to.copy_(x.view_as(to))
    if after.numel():
        after.copy_(projected.view_as(after))


def finish(stack, block, x: Tensor, projected: Tensor, sequences: list[slice], own, source) -> Tensor:
    """What follows the queries, keys and values of a block."""
    pre_norm, (*_, is_key, counts) = stack.config.norm_first, own
    is_token = is_key if counts is None else counts.diff(dim=1, prepend=counts.new_zeros(len(counts), 1)) > 0

    def add(y: Tensor, norm: Callable) -> Tensor:
        return x + y if pre_norm else norm(x + y)

    x = add(block.attention_output.multiply(attend(stack, projected, sequences, own, is_token)), block.attention_norm)
    if source[0] is not None:
        query = block.cross_query.multiply(block.cross_norm(x) if pre_norm else x)
        x = add(block.cross_output.multiply(attend(stack, query, sequences, source, is_token)), block.cross_norm)
    y = block.intermediate.multiply(block.feed_forward_norm(x) if pre_norm else x)
    return add(block.output.multiply(ACT2FN[stack.config.hidden_act](y)), block.feed_forward_norm)


def attend(stack, projected: Tensor, sequences: list[slice], keys, is_token) -> Tensor:
    """The attention heads of each sequence side by side, `(N, C)`; its tokens and its padding are computed apart."""
    key, value, is_key, counts = keys
    width, heads = stack.attention_width, (-1, stack.config.num_attention_heads, stack.head_width)
    context = projected.new_zeros(len(projected), width)
    for row, place in enumerate(sequences):
        query, *own = (each.view(heads).transpose(0, 1) for each in projected[place].split(width, dim=1))
        k, v = own if key is None else (key[row].float(), value[row].float())
        if is_key is not None:
            k, v = k[:, is_key[row]], v[:, is_key[row]]
        number = k.shape[1]
        limits = torch.full((query.shape[1],), number) if counts is None else counts[row]
        tokens = torch.ones_like(limits, dtype=torch.bool) if is_token is None else is_token[row]
        for part in (tokens, ~tokens):
            chosen = part & (limits > 0)
            if number and chosen.any():
                mask = torch.arange(number, device="cpu") < limits[chosen, None]
                context[place][chosen] = kernel(query[:, chosen], k, v, mask)
    return context


def kernel(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    """softmax(Q Kᵀ / sqrt(D)) V: `(H, T, D)` → `(T, H · D)`.

    In float32, torch's kernel depends on where in memory a thread has its numbers if there are fewer than four queries,
    or heads whose width is no multiple of 16; and on the number of threads if there is one head.
    """
    length, width = query.shape[1:]
    missing = max(0, 4 - length)
    query, key, value = (pad(each, (0, -width % 16))[None].expand(2, -1, -1, -1) for each in (query, key, value))
    padded_mask = None if mask.all() else pad(mask, (0, 0, 0, missing), value=True)
    query = pad(query, (0, 0, 0, missing))
    context = scaled_dot_product_attention(query, key, value, padded_mask, scale=width**-0.5)
    return context[0, :, :length, :width].transpose(0, 1).flatten(1)
