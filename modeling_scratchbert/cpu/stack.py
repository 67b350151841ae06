"""The stack of blocks of an optimised model: one module without submodules, which computes all blocks itself.

A text has the same bits in any batch. The products with weights have this property (`matrices`), and so have layer
norms and activations, which treat each token alone. What is left is attention: a kernel adds up numbers in an order
that depends on how many there are, also of those that a mask hides. So it is given each sequence without its padding.
"""

from collections.abc import Callable
from functools import partial
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import gelu, layer_norm, pad, scaled_dot_product_attention
from transformers.activations import GELUActivation, GELUTanh, NewGELUActivation
from transformers.utils.output_capturing import _active_collector

from ..input_checks import OPTIONS, has_values
from ..unpadding import UnpaddedBatch, is_padding_mask
from .layers import PrepackedModule
from .matrices import PackedMatrix

GELU_FORMS: dict[type, str] = {GELUActivation: "none", NewGELUActivation: "tanh", GELUTanh: "tanh"}
# Options of a forward pass that the attention functions of transformers and vLLM read.
KERNEL_OPTIONS = ("output_attentions", "is_causal", "cache", "attention_instances")
DEFAULTS = {"output_attentions": False}


class Block:
    """The weights of a `TransformerBlock`.

    Args:
        block: the block.
        name: its path in the base model.
        prepack: returns the matrix of linear layers of one input, which are one below the other in it; the name is that
            of the factors of int8.

    Attributes:
        gelu_form: of the GELU that is computed with the product before it, see `PackedMatrix.linear`; or None.
        activation: what is computed after that product.
    """

    def __init__(self, block: Any, name: str, prepack: Callable[..., PackedMatrix]):
        attention, network = block.attention, block.feed_forward
        self.query_key_value = prepack(attention.query, attention.key, attention.value, name=f"{name}.attention.query")
        self.attention_output = prepack(attention.output)
        self.attention_norm = copy_of_norm(block.attention_norm)
        if hasattr(block, "cross_attention"):
            attention = block.cross_attention
            self.cross_query = prepack(attention.query)
            self.cross_key_value = prepack(attention.key, attention.value)
            self.cross_output = prepack(attention.output)
            self.cross_norm = copy_of_norm(block.cross_attention_norm)
        self.intermediate = prepack(network.intermediate, name=f"{name}.feed_forward.intermediate")
        self.gelu_form = gelu_form(network.activation, self.intermediate.is_int8)
        self.activation = network.activation if self.gelu_form is None else None
        self.output = prepack(network.output)
        self.feed_forward_norm = copy_of_norm(block.feed_forward_norm)


def copy_of_norm(layer: Any) -> Callable[[Tensor], Tensor]:
    """A layer norm as a function."""
    shape, weight, bias = layer.normalized_shape, layer.weight.detach(), layer.bias.detach()
    return partial(layer_norm, normalized_shape=shape, weight=weight, bias=bias, eps=layer.eps)


def gelu_form(activation: Any, is_int8: bool) -> str | None:
    """The form of the GELU that is computed with the product before it; None if it is another activation."""
    form = GELU_FORMS.get(type(activation))
    is_python = form == "none" and activation.act is not gelu
    # After an int8 product the approximation varies with the batch: see `optimization.VARYING_ACTIVATIONS`.
    return None if is_python or (form == "tanh" and is_int8) else form


class OptimizedStack(PrepackedModule):
    """What `optimize_for_inference` puts in place of a `TransformerStack`.

    Args:
        config: of the stack.
        blocks: the weights.
        final_norm: of pre-norm blocks, or None.
        is_batch_invariant: whether a text has the same bits in any batch.
    """

    def __init__(self, config, blocks: list[Block], final_norm: Callable | None, is_batch_invariant: bool):
        super().__init__(blocks[0].attention_output.dtype if blocks else config.dtype)
        self.config = config
        self.blocks, self.final_norm = blocks, final_norm
        self.head_width = config.hidden_size // config.num_attention_heads
        self.is_batch_invariant = is_batch_invariant
        # The products of an encoder's attention have the same bits anywhere in memory.
        is_aligned = self.head_width % 16 == 0 and config.num_attention_heads > 1
        self.attention = direct_attention if is_aligned and not config.is_decoder else aligned_attention

    def matrices(self) -> list[PackedMatrix]:
        return [value for block in self.blocks for value in vars(block).values() if isinstance(value, PackedMatrix)]

    def check_arguments(self, model, attention_mask, encoder_attention_mask, options: dict[str, Any]) -> None:
        """Raise for arguments of `ScratchBertModel.forward` that only a model as loaded supports.

        Raises:
            RuntimeError: another attention implementation, attention weights, a full mask, or an argument of the
                attention function is requested.
            ValueError: the pooler would read padding.
        """
        kernel = model.config._attn_implementation
        if kernel not in (None, "eager", "sdpa"):
            raise unsupported(f"attn_implementation is {kernel!r}", "'sdpa' or 'eager'")
        for name in options:
            is_read_by_kernels = name in KERNEL_OPTIONS or name not in OPTIONS
            if is_read_by_kernels and options[name] not in (None, DEFAULTS.get(name)):
                raise unsupported(f"{name} is given", "none")
        check_ndim("attention_mask", attention_mask)
        check_ndim("encoder_attention_mask", encoder_attention_mask)
        if model.pooler is not None and is_padding_mask(attention_mask):
            check_first_tokens(attention_mask)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        encoder_hidden_states: Tensor | None = None,
        encoder_attention_mask: Tensor | None = None,
        past_key_values=None,
        batch: UnpaddedBatch | None = None,
        **options,
    ) -> Tensor:
        """`(B, T, C)` → `(B, T, C)`. The arguments are those of `TransformerStack.forward`."""
        x, pre_norm = hidden_states, self.config.norm_first
        cache = getattr(past_key_values, "self_attention_cache", past_key_values)
        attend, attend_to_source = self._attentions(x, batch, attention_mask, encoder_attention_mask, cache)
        for index, block in enumerate(self.blocks):
            record(x)

            y = block.attention_norm(x) if pre_norm else x
            query, key, value = self._split_heads(block.query_key_value.linear(y), 3)
            if cache is not None:
                key, value = cache.update(key, value, index)
            y = block.attention_output.linear(attend(query, key, value).flatten(2))
            x = x + y if pre_norm else block.attention_norm(x + y)

            if encoder_hidden_states is not None:
                y = block.cross_norm(x) if pre_norm else x
                (query,) = self._split_heads(block.cross_query.linear(y), 1)
                key, value = self._source_heads(block, index, encoder_hidden_states, past_key_values)
                y = block.cross_output.linear(attend_to_source(query, key, value).flatten(2))
                x = x + y if pre_norm else block.cross_norm(x + y)

            y = feed_forward(block, block.feed_forward_norm(x) if pre_norm else x)
            x = x + y if pre_norm else block.feed_forward_norm(x + y)
        record(x)
        return x if self.final_norm is None else self.final_norm(x)

    def _split_heads(self, projected: Tensor, number: int) -> tuple[Tensor, ...]:
        """`(B, T, number · C)` → tensors of `(B, H, T, D)`, with C = H · D."""
        heads = projected.view(*projected.shape[:2], number, -1, self.head_width)
        return heads.transpose(1, 3).unbind(2)

    def _source_heads(self, block: Block, index: int, encoder_hidden_states: Tensor, cache) -> tuple[Tensor, ...]:
        """Keys and values of cross-attention. They are the same at each step of decoding, and are computed once."""
        if cache is not None and cache.is_updated.get(index):
            layer = cache.cross_attention_cache.layers[index]
            return layer.keys, layer.values
        key, value = self._split_heads(block.cross_key_value.linear(encoder_hidden_states), 2)
        if cache is not None:
            key, value = cache.cross_attention_cache.update(key, value, index)
            cache.is_updated[index] = True
        return key, value

    def _attentions(self, hidden_states, batch, mask, encoder_mask, cache) -> tuple[Callable, Callable]:
        """The functions that compute self-attention and cross-attention: queries, keys and values, `(B, H, T, D)`, →
        `(B, T, H, D)`."""
        if batch is not None:
            attend = batch.kernel(lambda _, *heads, **__: (self.attention(*heads), None))
            return lambda *heads: attend(None, *heads)[0], self.attention
        own = PaddedAttention(self.attention, mask, self.config.is_decoder)
        other = PaddedAttention(self.attention, encoder_mask, False)
        if self.is_batch_invariant and has_values(hidden_states):
            rows, length = hidden_states.shape[:2]
            past = 0 if cache is None else int(cache.get_seq_length())
            keys: Any = tokens_of(mask, rows, past + length)
            queries = [slice(max(start - past, 0), max(end - past, 0)) for start, end, _ in keys]
            own.split(queries, keys)
            other.split(queries, tokens_of(encoder_mask, rows, None))
        return own, other


def check_ndim(name: str, mask: Any) -> None:
    if mask is not None and mask.ndim != 2:
        raise unsupported(f"{name} has shape {tuple(mask.shape)}", "a padding mask (B, T)")


def check_first_tokens(attention_mask: Tensor) -> None:
    if not attention_mask[:, 0].all():
        raise ValueError(
            "attention_mask is 0 for the first token of a row, which the pooler reads; expected 1. Pad on the right, "
            "or create the model with add_pooling_layer=False."
        )


def unsupported(fact: str, expected: str) -> RuntimeError:
    return RuntimeError(f"{fact}; an optimised model expects {expected}. Load the model again for that.")


def record(hidden_states: Tensor) -> bool:
    """Hands hidden states to `transformers`, which records those of blocks by hooks on their modules; and returns
    whether it does."""
    collected = _active_collector.get()
    if collected is None or "hidden_states" not in collected:
        return False
    collected["hidden_states"].append(hidden_states)
    return True


def feed_forward(block: Block, x: Tensor) -> Tensor:
    """act(x W1 + b1) W2 + b2; of an int8 model, of as many tokens at a time as fit into the processor's cache."""
    max_rows, width = block.intermediate.max_rows, x.shape[-1]
    if x.numel() > max_rows * width and not torch.compiler.is_compiling():
        parts = x.reshape(-1, width).split(max_rows)
        return torch.cat([feed_forward(block, part) for part in parts]).view(x.shape)
    y = block.intermediate.linear(x, block.gelu_form)
    return block.output.linear(y if block.activation is None else block.activation(y))


# ------------------------------------------------------------------------------------------------------------ attention


def direct_attention(query: Tensor, key: Tensor, value: Tensor, mask=None, is_causal=False) -> Tensor:
    """softmax(Q Kᵀ / sqrt(D)) V: `(B, H, T, D)` → `(B, T, H, D)`."""
    return scaled_dot_product_attention(query, key, value, mask, is_causal=is_causal).transpose(1, 2)


def aligned_attention(query: Tensor, key: Tensor, value: Tensor, mask=None, is_causal=False) -> Tensor:
    """`direct_attention`, whose products in float32 depend on where in memory a thread has its numbers if there are
    fewer than four queries, or heads whose width is no multiple of 16; and on the number of threads if there is one
    head of one sequence. A single query, as in decoding, is multiplied by `matmul`, which does not, and is faster."""
    if query.dtype != torch.float32:
        return direct_attention(query, key, value, mask, is_causal)
    rows, _, length, width = query.shape
    scale = width**-0.5
    if width % 16:
        query, key, value = (pad(heads, (0, -width % 16)) for heads in (query, key, value))
    if length == 1 and mask is None:
        weights = (query @ key.transpose(2, 3) * scale).softmax(dim=-1)
        return (weights @ value)[..., :width].transpose(1, 2)
    if query.shape[:2] == (1, 1):
        query, key, value = (heads.expand(2, -1, -1, -1) for heads in (query, key, value))
    if length < 4:
        query = pad(query, (0, 0, 0, 4 - length))
        mask = None if mask is None else pad(mask.expand(-1, -1, length, -1), (0, 0, 0, 4 - length))
    context = scaled_dot_product_attention(query, key, value, mask, is_causal=is_causal, scale=scale)
    return context[:rows, :, :length, :width].transpose(1, 2)


class PaddedAttention:
    """Attention in a padded batch, of each row without its padding if `split` was called.

    Args:
        attention: `direct_attention` or `aligned_attention`.
        mask: the full mask, or None.
        is_causal: whether a query attends to earlier keys only.
    """

    def __init__(self, attention: Callable, mask: Tensor | None, is_causal: bool):
        self.attention, self.mask, self.is_causal = attention, mask, is_causal
        self.parts: list[tuple[slice, slice, slice, bool]] = []

    def split(self, queries: list[slice], keys: list[tuple[int, int | None, bool]]) -> None:
        """Say where the tokens of each row are, see `tokens_of`. One call of the kernel computes the rows that follow
        one another and have them in the same place."""
        first = 0
        for (own, (start, end, has_gaps)), group in groupby(zip(queries, keys, strict=True)):
            rows = slice(first, first := first + len(list(group)))
            self.parts.append((rows, own, slice(start, end), has_gaps))

    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        context = None
        for rows, own, others, has_gaps in self.parts:
            part = query[rows, :, own], key[rows, :, others], value[rows, :, others]
            number, width = part[0].shape[2], part[1].shape[2]
            # Otherwise the mask says what `is_causal` does, or nothing.
            is_masked = has_gaps or (self.is_causal and number not in (1, width))
            mask = self.mask if is_masked else None
            if part[0].shape == query.shape:
                return self._attend(*part, None if mask is None else mask[..., others])
            if context is None:  # of padding, the numbers of a model as loaded: a loss may read them
                context = self._attend(query, key, value, self.mask)
            if number and width:
                mask = None if mask is None else mask.expand(len(query), -1, -1, -1)[rows, :, own, others]
                context[rows, own] = self._attend(*part, mask)
        return self._attend(query, key, value, self.mask) if context is None else context

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        # In this order, because the compiler's comparison of a size is no bool.
        return self.attention(query, key, value, mask, query.shape[2] > 1 and self.is_causal and mask is None)


def tokens_of(mask: Tensor | None, rows: int, width: int | None) -> list[tuple[int, int | None, bool]]:
    """For each row of a full mask, `(B, 1, T, width)`: the start of the tokens, their end, and whether there is padding
    in between. Without a mask, there is none."""
    # The last query may attend to every token.
    is_token = None if mask is None else mask[:, 0, -1, :width] == 0
    if is_token is None or is_token.all():
        return [(0, width, False)] * rows
    is_token = is_token.expand(rows, -1)
    starts, ends = is_token.int().argmax(1), is_token.shape[1] - is_token.flip(1).int().argmax(1)
    columns = zip(starts.tolist(), ends.tolist(), is_token.sum(1).tolist(), strict=True)
    return [(start, end if number else start, end - start != number) for start, end, number in columns]
