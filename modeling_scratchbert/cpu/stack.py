"""The stack of blocks of an optimised model: one module without submodules, which computes all blocks itself.

A text has the same bits in any batch, because the library in C++ computes each row of numbers in the same order
whatever the others are. `fallback` has the same functions in torch's operators.
"""

import ctypes
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers.activations import ACT2FN
from transformers.utils.output_capturing import _active_collector

from ..input_checks import OPTIONS
from ..unpadding import UnpaddedBatch, is_padding_mask
from . import fallback
from .layers import PrepackedLayer, PrepackedModule
from .library import (
    ACTIVATIONS,
    TYPES,
    NativeBatch,
    NativeBlock,
    NativeKeys,
    NativeStack,
    address,
    call,
    fill,
    library_in_use,
)

# Options of a forward pass that the attention functions of transformers and vLLM read.
KERNEL_OPTIONS = ("output_attentions", "is_causal", "cache", "attention_instances")
DEFAULTS = {"output_attentions": False}
OptionalTensor = Tensor | None

# Whether this process was forked from one that had imported this module. `torch.compile` cannot trace os.getpid().
is_forked = False


def _note_fork() -> None:
    global is_forked
    is_forked = True


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_note_fork)


class Block:
    """The weights of a `TransformerBlock`.

    Args:
        block: the block.
        prepacker: returns the matrix of linear layers of one input, and the weights of a layer norm.
    """

    def __init__(self, block: Any, prepacker):
        attention, network, heads = block.attention, block.feed_forward, block.attention.config.num_attention_heads
        self.query_key_value = prepacker.matrix(attention.query, attention.key, attention.value, heads=(heads, 1))
        self.attention_output = prepacker.matrix(attention.output, heads=(1, heads))
        self.attention_norm = prepacker.norm(block.attention_norm)
        if hasattr(block, "cross_attention"):
            attention = block.cross_attention
            self.cross_query = prepacker.matrix(attention.query, heads=(heads, 1))
            key_value = prepacker.matrix(attention.key, attention.value, heads=(heads, 1))
            self.cross_key_value = PrepackedLayer(torch.float32, key_value)
            self.cross_output = prepacker.matrix(attention.output, heads=(1, heads))
            self.cross_norm = prepacker.norm(block.cross_attention_norm)
        self.intermediate = prepacker.matrix(network.intermediate)
        self.output = prepacker.matrix(network.output)
        self.feed_forward_norm = prepacker.norm(block.feed_forward_norm)

    def native(self) -> NativeBlock:
        """The weights as the library reads them; valid as long as this object."""
        names = [name for name, *_ in NativeBlock._fields_ if hasattr(self, name)]
        return NativeBlock(**{name: getattr(self, name).native() for name in names})


class OptimizedStack(PrepackedModule):
    """What `optimize_for_inference` puts in place of a `TransformerStack`.

    Args:
        config: of the stack.
        blocks: the weights.
        final_norm: of pre-norm blocks, or None.
        is_native: whether the library computes the blocks, or torch.
        dtype: of the hidden states.
    """

    def __init__(self, config, blocks: list[Block], final_norm: Callable | None, is_native: bool, dtype: torch.dtype):
        super().__init__(dtype)
        self.config, self.blocks, self.final_norm, self.is_native = config, blocks, final_norm, is_native
        heads = config.num_attention_heads
        self.head_width = config.hidden_size // heads
        # With the zeros that the library expects at the end of rows and of attention heads.
        panel, part = (32, 16) if is_native else (1, 1)
        self.padded_head_width = rounded_up(self.head_width, part)
        self.width = rounded_up(config.hidden_size, panel)
        self.attention_width = rounded_up(heads * self.padded_head_width, panel)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_native"}

    def extra_repr(self) -> str:
        return f"compiled for {library_in_use()[0]}" if self.is_native else "torch"

    def check_arguments(self, model, attention_mask, encoder_attention_mask, options: dict[str, Any]) -> None:
        """Raise for arguments of `ScratchBertModel.forward` that only a model as loaded supports.

        Raises:
            RuntimeError: another attention implementation, attention weights, a full mask, or an argument of the
                attention function is requested; or the process was forked, where torch would wait for its threads
                for ever.
            ValueError: the pooler would read padding.
        """
        if is_forked and torch.get_num_threads() > 1:
            raise RuntimeError(
                "The process was forked from one with an optimised model; expected one thread, because those of torch "
                'do not survive a fork. Call torch.set_num_threads(1), or start processes by "spawn".'
            )
        kernel = model.config._attn_implementation
        if kernel not in (None, "eager", "sdpa"):
            raise unsupported(f"attn_implementation is {kernel!r}", "'sdpa' or 'eager'")
        for name in options:
            is_read_by_kernels = name in KERNEL_OPTIONS or name not in OPTIONS
            if is_read_by_kernels and options[name] not in (None, DEFAULTS.get(name)):
                raise unsupported(f"{name} is given", "none")
        check_padding_mask("attention_mask", attention_mask)
        check_padding_mask("encoder_attention_mask", encoder_attention_mask)
        if model.pooler is not None and is_padding_mask(attention_mask) and not attention_mask[:, 0].all():
            raise ValueError(
                "attention_mask is 0 for the first token of a row, which the pooler reads; expected 1. Pad on the "
                "right, or create the model with add_pooling_layer=False."
            )

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: OptionalTensor = None,
        encoder_hidden_states: OptionalTensor = None,
        encoder_attention_mask: OptionalTensor = None,
        past_key_values=None,
        batch: UnpaddedBatch | None = None,
        **options,
    ) -> Tensor:
        """`(B, T, C)` → `(B, T, C)`. The arguments are those of `TransformerStack.forward`."""
        cache = getattr(past_key_values, "self_attention_cache", past_key_values)
        own = self._visible_keys(hidden_states, attention_mask, cache)
        sources = None if encoder_attention_mask is None else visible(encoder_attention_mask)[:, -1].contiguous()
        rows, length = hidden_states.shape[:2]
        starts = torch.arange(rows + 1, dtype=torch.int32, device="cpu") * length if batch is None else batch.cu_seqlens
        depth, width = len(self.blocks), self.config.hidden_size
        # An encoder is one call, unless its hidden states are recorded; a decoder is one for each cache.
        steps = [(0, depth)]
        if self.config.is_decoder or _recorded() is not None:
            steps = [(index, index) for index in range(depth + 1)]
        x = pad(hidden_states.float(), (0, self.width - width)).contiguous()  # a copy
        projected = None
        keys: tuple = (None, None)
        source: tuple = (None, None)
        for first, last in steps:
            before = projected
            projected = x.new_empty(rows, length, 3 * self.attention_width if last < depth else 0)
            self.run([x, projected], [before, starts, *keys, *own, *source, sources, None], [first, last])
            if (states := _recorded()) is not None:
                states.append(x[..., :width].to(self.dtype, copy=True))
            if last < depth and cache is not None:
                keys = cache.update(*self._split_heads(projected, 3)[1:], first)
            if last < depth and encoder_hidden_states is not None:
                source = self._source_keys(first, encoder_hidden_states, past_key_values)
        x = x[..., :width].to(self.dtype)
        return x if self.final_norm is None else self.final_norm(x)

    def _visible_keys(
        self, hidden_states: Tensor, mask: OptionalTensor, cache
    ) -> tuple[OptionalTensor, OptionalTensor]:
        """Which keys there are, `(B, S)`, and in a decoder, the number of them that each query attends to, `(B, T)`:
        the first ones. None for all of them."""
        rows, length = hidden_states.shape[:2]
        if mask is not None:
            allowed = visible(mask).expand(rows, -1, -1)
            counts = allowed.sum(dim=2, dtype=torch.int32) if self.config.is_decoder else None
            return allowed[:, -1].contiguous(), counts
        if not self.config.is_decoder:
            return None, None
        past = 0 if cache is None else cache.get_seq_length()
        counts = torch.arange(1, length + 1, device="cpu") + past
        return None, counts.to(torch.int32).expand(rows, -1).contiguous()

    def _split_heads(self, projected: Tensor, number: int) -> Tensor:
        """`(B, T, number · attention_width)` → `(number, B, H, T, D)`."""
        heads = projected.unflatten(2, (number, -1))[..., : self.config.num_attention_heads * self.padded_head_width]
        heads = heads.unflatten(3, (-1, self.padded_head_width))[..., : self.head_width]
        return heads.permute(2, 0, 3, 1, 4)

    def _source_keys(self, index: int, encoder_hidden_states: Tensor, cache) -> tuple[Tensor, Tensor]:
        """Keys and values of cross-attention. They are the same at each step of decoding, and are computed once."""
        if cache is not None and cache.is_updated.get(index):
            layer = cache.cross_attention_cache.layers[index]
            return layer.keys, layer.values
        if not encoder_hidden_states.shape[1]:
            raise unsupported("encoder_hidden_states has no position", "one or more")
        key, value = self._split_heads(self.blocks[index].cross_key_value(encoder_hidden_states), 2)
        if cache is not None:
            key, value = cache.cross_attention_cache.update(key, value, index)
            cache.is_updated[index] = True
        return key, value

    def compute(self, results: list[Tensor], tensors: list[Any], numbers: Sequence[int]) -> None:
        """Compute what follows the queries, keys and values of block `first`, up to those of block `last`.

        Args:
            results: `x`, `(B, T, C)`, in float32, which becomes the output of block `last - 1`; and the queries, keys
                and values of block `last`, `(B, T, 3 · C)`, if there is one. All tensors may end in zeros, see
                `spread`.
            tensors: the queries, keys and values of block `first`, or None; the starts of the sequences in `x`, and
                the end, `(S + 1,)`; keys and values from a cache, `(B, H, S, D)`, or None for those of the block, and
                what `_visible_keys` returns; and the same four for cross-attention.
            numbers: `first` and `last`.
        """
        (x, after), (projected, starts, *keys) = results, tensors
        own, source = keys[:4], keys[4:]
        if not self.is_native:
            fallback.run(self, x, after, projected, starts, own, source, *numbers)
            return
        starts = starts.contiguous()
        pointers = map(address, (x, projected, after, starts))
        sizes = x.shape[0] * x.shape[1], len(starts) - 1, *numbers, torch.get_num_threads()
        # The results of `native_keys` are named, because they keep the tensors.
        own_keys, source_keys = native_keys(*own), native_keys(*source)
        call("run", self._native_stack(), NativeBatch(*pointers, *sizes, own_keys, source_keys))

    def _native_stack(self) -> NativeStack:
        """The structure of the library, which is made once."""
        if "_native" not in vars(self):
            config, dtype = self.config, self.blocks[0].output.dtype if self.blocks else torch.float32
            blocks = (NativeBlock * len(self.blocks))(*[each.native() for each in self.blocks])
            native = NativeStack(
                ctypes.sizeof(NativeStack),
                TYPES[dtype],
                ACTIVATIONS[type(ACT2FN[config.hidden_act])],
                config.hidden_size,
                config.intermediate_size,
                config.num_attention_heads,
                config.norm_first,
                len(blocks),
                config.layer_norm_eps,
                ctypes.addressof(blocks),
            )
            native.kept = blocks
            vars(self)["_native"] = native
        return vars(self)["_native"]


def native_keys(key, value, is_key, counts) -> NativeKeys:
    """Keys, values, which of them there are and their counts, as the library reads them; valid as long as the result
    and the last two."""
    pair: list[Any] = [None if each is None else fill(each.float(), 16).contiguous() for each in (key, value)]
    size, number = 0, 0 if is_key is None else is_key.shape[-1]
    if key is not None:
        size, number = min(each.numel() for each in pair), key.shape[2]
    keys = NativeKeys(*map(address, pair), size, number, address(is_key), address(counts))
    keys.kept = pair
    return keys


def rounded_up(number: int, multiple: int) -> int:
    return number + -number % multiple


def visible(mask: Tensor) -> Tensor:
    """Where a full mask, `(B, 1, T, S)`, lets a query attend to a key: `(B, T, S)`."""
    return mask[:, 0] == 0


def check_padding_mask(name: str, mask: Any) -> None:
    if mask is not None and mask.ndim != 2:
        raise unsupported(f"{name} has shape {tuple(mask.shape)}", "a padding mask (B, T)")


def unsupported(fact: str, expected: str) -> RuntimeError:
    return RuntimeError(f"{fact}; an optimised model expects {expected}. Load the model again for that.")


def _recorded() -> list[Tensor] | None:
    """The hidden states that `transformers` records, by hooks on modules of blocks; None if it does not."""
    collected = _active_collector.get()
    return None if collected is None else collected.get("hidden_states")
