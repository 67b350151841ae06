"""Unpadding: an encoder computes the non-padding tokens of a batch alone, if the caller asks for it.

The caller asks with `padding_free=True`, in `from_pretrained` or in a call, or with `optimize_for_inference()`.
`ScratchBertModel.forward` then calls `choose_batch`, once and before the embeddings. It returns a `PaddedBatch` or an
`UnpaddedBatch`, which have the same methods, so that `forward` has no branches. In an unpadded batch the sequences
stand end to end in one row, `(1, N)`. Layers that act on each token alone need no change; attention calls the kernel
that the batch returns, which lets each sequence attend to itself.

The decision reads the arguments of the call, the configuration, and whether the model is optimised or has a pooler.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers.integrations.flash_attention import flash_attention_forward
from transformers.masking_utils import create_bidirectional_mask, create_causal_mask

from .inference import is_prepacked
from .input_checks import check_packed, has_values
from .versions import CACHE

# The attention implementations that compute one sequence without a mask. The flash kernels accept packed sequences.
UNPADDING_KERNELS = ("eager", "sdpa", "flash_attention_2", "flash_attention_3", "flash_attention_4")

# glibc returns freed blocks above 32 MiB to the system. Splitting 10,000 tokens of BERT-base so that no tensor is
# larger saves 11 % of the time (2 Intel cores).
MAX_TENSOR_BYTES = 32 * 2**20

# --------------------------------------------------------------------------------------------------------- the decision


def choose_batch(model, tokens, attention_mask, position_ids, records, eager, options):
    """Decide whether a batch is unpadded: the only place that does.

    Args:
        model: a `ScratchBertModel`.
        tokens: `(B, T)` or `(B, T, C)`.
        records: whether hidden states or attention weights are requested; `eager`: whether attention weights are.
        options: of the forward pass. `padding_free` and the lengths of packed sequences are taken out of it.

    Returns:
        A `PaddedBatch`, or an `UnpaddedBatch` of packed sequences or without padding.
    """
    config = model.config
    padding_free = is_requested(model, options.pop("padding_free", None))
    if config.is_decoder:
        return PaddedBatch(attention_mask)
    kernel = config._attn_implementation
    if kernel in UNPADDING_KERNELS or kernel == "flex_attention":
        packed = packed_batch(tokens, attention_mask, position_ids, padding_free, records, eager, model, options)
        if packed is not None:
            return packed
    can_unpad = kernel in UNPADDING_KERNELS and not records and not config.chunk_size_feed_forward
    if padding_free and can_unpad and is_padding_mask(attention_mask, tokens):
        return remove_padding(attention_mask, model.pooler is not None, config.intermediate_size)
    return PaddedBatch(attention_mask)


def is_requested(model, padding_free: bool | None) -> bool:
    """Whether padding is to be removed: the argument of the call, or else what `from_pretrained` was given; an
    optimised model removes it."""
    default = model.config.padding_free or is_prepacked(model.encoder)
    return default if padding_free is None else padding_free


def remove_padding(attention_mask, has_pooler: bool, max_width: int):
    """The tokens where `attention_mask`, `(B, T)`, is not 0. The batch stays padded if there is no padding or nothing
    else, or if a pooler reads it: a first token that is masked."""
    mask = attention_mask.bool()
    # One transfer from the device, because each one waits for it.
    num_first_tokens, *lengths = torch.cat([mask[:, 0].sum()[None], mask.sum(1)]).tolist()
    if min(lengths) == mask.shape[1]:
        return PADDED
    pools_padding = has_pooler and num_first_tokens < len(lengths)
    if pools_padding or not any(lengths):
        return PaddedBatch(attention_mask)
    return UnpaddedBatch.from_mask(mask, lengths, max_width)


def packed_batch(tokens, attention_mask, position_ids, padding_free, records, eager, model, options):
    """The packed sequences in a row of `tokens`, marked by `cu_seq_lens_q` in `options`; or, with `padding_free`, by
    `position_ids`, `(1, N)`, that restart at 0. All-zero positions are one sequence. None if there are none."""
    names = ("cu_seq_lens_q", "max_length_q", "cu_seq_lens_k", "max_length_k")
    cu_seqlens, max_seqlen, *_ = [options.pop(name, None) for name in names]
    config = model.config
    if cu_seqlens is None:
        has_positions = padding_free and attention_mask is None and position_ids is not None
        cu_seqlens = packed_starts(position_ids[0]) if has_positions and tokens.shape[0] == 1 else None
        if cu_seqlens is None:
            return None
    check_packed(cu_seqlens, tokens, attention_mask, position_ids, config)
    sequences = UnpaddedBatch.from_packed(cu_seqlens, max_seqlen, tokens, 0 if records else config.intermediate_size)
    # While tracing, lengths cannot be read; the flash kernels and optimised models need none.
    kernel = config._attn_implementation
    has_lengths = has_values(cu_seqlens) or kernel.startswith("flash") or is_prepacked(model.encoder)
    can_unpad = kernel in UNPADDING_KERNELS and has_lengths and not eager
    return sequences if can_unpad else MaskedSequences(sequences)


def packed_starts(positions: Tensor) -> Tensor | None:
    """The `cu_seqlens` of packed sequences with these positions, `(N,)`: each is 0 or one more than the one before.
    None if they are one sequence."""
    if not has_values(positions):
        raise ValueError(
            "position_ids have no values while tracing; expected cu_seq_lens_q to mark packed sequences. Pass it, or "
            "padding_free=False for a single sequence."
        )
    positions = positions.cpu()
    is_first = positions == 0
    counts_on = pad(positions.diff() == 1, (1, 0), value=False)
    if is_first.sum() < 2 or is_first.all() or not (is_first | counts_on).all():
        return None
    return pad(is_first.nonzero()[:, 0], (0, 1), value=len(is_first)).int()


def scored_tokens(config, outputs, attention_mask) -> Tensor | None:
    """The positions in the flattened batch, `(N,)`, of the tokens that a language-model head scores: those that are not
    padding. None for all tokens."""
    states = outputs.last_hidden_state
    is_recorded = outputs.hidden_states is not None or outputs.attentions is not None  # padding is then computed
    if config.is_decoder or is_recorded or not is_padding_mask(attention_mask, states):
        return None
    indices = attention_mask.flatten().nonzero()[:, 0].to(states.device)
    return None if len(indices) in (0, attention_mask.numel()) else indices


# --------------------------------------------------------------------------------------------------------- two batches


class PaddedBatch:
    """Sequences of one length, `(B, T)`, as the caller passed them.

    Args:
        attention_mask: `(B, T)`, or a full mask, `(B, 1, T, T)`; None if every token may be attended to.
    """

    def __init__(self, attention_mask=None):
        self.attention_mask = attention_mask

    def unpad(self, *tensors: Tensor | None) -> tuple:
        """The tokens to compute, of tensors of `(B, T, …)` or None. The embeddings count positions that are None."""
        return tensors

    def encoder_inputs(self, config, hidden_states, eager, position_ids, encoder_states, encoder_mask, cache) -> dict:
        """The arguments of the encoder beside `hidden_states`, with masks in the form that the kernel expects, or with
        `eager` the eager formula."""
        if eager and config._attn_implementation != "eager":
            config = copy.copy(config)
            config._attn_implementation = "eager"
        mask = (
            create_causal_mask(config, hidden_states, self.attention_mask, **{CACHE: cache})
            if config.is_decoder
            else create_bidirectional_mask(config, hidden_states, self.attention_mask)
        )
        if encoder_states is not None:
            encoder_mask = create_bidirectional_mask(config, hidden_states, encoder_mask, encoder_states)
        if config._attn_implementation in ("sdpa", "flex_attention"):
            # Convert a boolean mask once per forward pass, not once per block.
            mask, encoder_mask = (additive_mask(each, hidden_states.dtype) for each in (mask, encoder_mask))
        return {
            "attention_mask": mask,
            "encoder_hidden_states": encoder_states,
            "encoder_attention_mask": encoder_mask,
            "past_key_values": cache,
            # Flash kernels would take positions that restart for packed sequences, which BERT does not.
            "position_ids": None if config._attn_implementation.startswith("flash") else position_ids,
        }

    def encoder(self, encoder: nn.Module) -> Callable:
        """What to call in place of the encoder."""
        return encoder

    def kernel(self, kernel: Callable) -> Callable:
        """What to call in place of a kernel of transformers' attention interface."""
        return kernel

    def restore(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        """The last hidden states as they are returned, `(B, T, C)`, and those whose position 0 is the first token of
        each sequence, for the pooler."""
        return hidden_states, hidden_states


# Its methods are those of any padded batch: the default of the blocks.
PADDED = PaddedBatch()


@dataclass(eq=False)
class UnpaddedBatch:
    """S sequences of N tokens in all, end to end in one row.

    Args:
        cu_seqlens: `(S + 1,)`, int32, on the device of the tokens: the start of each sequence, and the end of the last.
        max_seqlen: the length of the longest sequence.
        shape: `(B, T)` of the batch before unpadding.
        indices: `(N,)`: the position of each token in the flattened batch; None if it did not change.
        lengths: the length of each sequence; None to read them from `cu_seqlens` if a kernel needs them.
        starts: `(S,)`, of packed sequences: the position of the first token of each in the row that the caller passed.
        max_width: the width of the largest tensor in the encoder, to compute the sequences in parts; 0 to compute them
            together, because the caller asked for their hidden states.
    """

    cu_seqlens: Tensor
    max_seqlen: int
    shape: tuple[int, int]
    indices: Tensor | None = None
    lengths: list[int] | None = None
    starts: Tensor | None = None
    max_width: int = 0

    @classmethod
    def from_mask(cls, mask: Tensor, lengths: list[int], max_width: int = 0) -> "UnpaddedBatch":
        """The tokens where `mask`, `(B, T)`, is True. `lengths` has the number of them in each row."""
        indices = mask.flatten().nonzero_static(size=sum(lengths))[:, 0]
        return cls.from_lengths(lengths, mask.shape, indices, mask.device, max_width=max_width)

    @classmethod
    def from_lengths(cls, lengths: list[int], shape, indices, device, sort=True, max_width=0) -> "UnpaddedBatch":
        """Sequences of these lengths. With `sort`, they are sorted by length: one kernel call computes all those of the
        same length."""
        ordered = sorted(lengths) if sort else lengths
        starts, cu_seqlens = cumulative(lengths), cumulative(ordered)
        if ordered != lengths:
            order = torch.tensor(sorted(range(len(lengths)), key=lengths.__getitem__), device="cpu")
            shifts = (starts[order] - cu_seqlens[:-1]).repeat_interleave(torch.tensor(ordered, device="cpu"))
            places = copy_to_device(torch.arange(len(shifts), device="cpu") + shifts, device)
            indices = places if indices is None else indices[places]
        return cls(copy_to_device(cu_seqlens.int(), device), max(lengths), shape, indices, ordered, None, max_width)

    @classmethod
    def from_packed(cls, cu_seqlens: Tensor, max_seqlen: int | None, tokens, max_width: int) -> "UnpaddedBatch":
        """Packed sequences, `tokens` `(1, N, …)`. Unless `max_width` is 0, they are sorted as in `from_lengths`."""
        shape, device = tokens.shape[:2], tokens.device
        # The lengths cannot be read while tracing, and need not be if the longest is known.
        if has_values(cu_seqlens) and (device.type == "cpu" or max_seqlen is None):
            batch = cls.from_lengths(cu_seqlens.diff().tolist(), shape, None, device, bool(max_width), max_width)
        else:
            batch = cls(copy_to_device(cu_seqlens.int(), device), max_seqlen or shape[1], shape, max_width=max_width)
        batch.starts = copy_to_device(cu_seqlens[:-1].long().clamp(max=shape[1] - 1), device)
        return batch

    @property
    def num_tokens(self) -> int:
        """N."""
        return self.shape[1] if self.indices is None else len(self.indices)

    def unpad(self, input_ids, token_type_ids, position_ids, inputs_embeds) -> tuple:
        """Tensors of `(B, T, …)`, or `(1, T, …)` for all rows, → `(1, N, …)`. Positions are counted in the padded row,
        or in the packed sequence, if they are None."""
        tensors = [input_ids, token_type_ids, position_ids, inputs_embeds]
        for place, tensor in enumerate(tensors):
            if tensor is not None and self.indices is not None:
                rows = tensor.expand(*self.shape, *tensor.shape[2:]).flatten(0, 1)
                tensors[place] = rows.index_select(0, copy_to_device(self.indices, rows.device))[None]
        if position_ids is None:
            tensors[2] = self.position_ids().to((inputs_embeds if input_ids is None else input_ids).device)
        return tuple(tensors)

    def position_ids(self) -> Tensor:
        """`(1, N)`: the position of each token in the padded row, or in the packed sequence."""
        if self.starts is None and self.indices is not None:
            return (self.indices % self.shape[1])[None]
        row = torch.arange(self.num_tokens, device=self.cu_seqlens.device)
        return (row - self.cu_seqlens[self.sequence_ids() - 1])[None]

    def encoder_inputs(self, *args, **kwargs) -> dict:
        """The arguments of the encoder beside `hidden_states`: the batch, and no mask."""
        return {"batch": self}

    def encoder(self, encoder: nn.Module) -> Callable:
        """What to call in place of the encoder."""
        return partial(self._run, encoder)

    def _run(self, encoder, hidden_states: Tensor, **kwargs) -> Tensor:
        """The output of the encoder, `(1, N, C)`. On a CPU without autograd, the sequences are computed in parts, so
        that no tensor exceeds `MAX_TENSOR_BYTES`."""
        max_tokens = MAX_TENSOR_BYTES // (self.max_width * hidden_states.element_size()) if self.max_width else 0
        is_whole = not max_tokens or hidden_states.shape[1] <= max_tokens or hidden_states.device.type != "cpu"
        if is_whole or torch.is_grad_enabled() or not has_values(hidden_states):
            return encoder(hidden_states, **kwargs)
        parts = self.split(max_tokens)
        states = hidden_states.split([part.num_tokens for part in parts], dim=1)
        results = [encoder(part, **{**kwargs, "batch": batch}) for part, batch in zip(states, parts, strict=True)]
        return torch.cat(results, dim=1)

    def kernel(self, kernel: Callable) -> Callable:
        """What to call in place of a kernel of transformers' attention interface."""
        return partial(self._attend, kernel)

    def _attend(self, kernel, module, query, key, value, attention_mask=None, dropout=0.0, **kwargs) -> tuple:
        """Attention of each sequence to itself: `(1, H, N, D)` → `(1, N, H, D)`, and no weights."""
        if kernel is flash_attention_forward:
            kwargs |= dict.fromkeys(("cu_seq_lens_q", "cu_seq_lens_k"), copy_to_device(self.cu_seqlens, query.device))
            kwargs |= dict.fromkeys(("max_length_q", "max_length_k"), self.max_seqlen)
            return kernel(module, query, key, value, None, dropout=dropout, **kwargs)[0], None
        contexts, sizes = [], [length * count for length, count in self.runs]
        heads = [tensor[0].split(sizes, dim=1) for tensor in (query, key, value)]
        for (length, count), *run in zip(self.runs, *heads, strict=True):
            run = [part.view(-1, count, length, query.shape[-1]).transpose(0, 1) for part in run]
            contexts.append(kernel(module, *run, None, dropout=dropout, **kwargs)[0].flatten(0, 1))
        return torch.cat(contexts)[None], None

    def restore(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        """The last hidden states as they are returned, `(B, T, C)`, zero at padding; and those whose position 0 is the
        first token of each sequence, for the pooler: `(S, 1, C)` for packed sequences."""
        if self.indices is not None:
            hidden_states = to_padded(hidden_states[0], self.indices, self.shape)
        if self.starts is None:
            return hidden_states, hidden_states
        starts = copy_to_device(self.starts, hidden_states.device)
        return hidden_states, hidden_states[0].index_select(0, starts)[:, None]

    def sequence_ids(self) -> Tensor:
        """The number of the sequence of each token, from 1: `(N,)`."""
        row = torch.arange(self.num_tokens, device=self.cu_seqlens.device, dtype=torch.int32)
        return torch.searchsorted(self.cu_seqlens, row, right=True)

    @cached_property
    def runs(self) -> list[tuple[int, int]]:
        """`(length, count)` of each run of sequences of one length."""
        lengths = self.cu_seqlens.diff().tolist() if self.lengths is None else self.lengths
        return [(length, len(list(run))) for length, run in groupby(lengths) if length]

    def split(self, max_tokens: int) -> list["UnpaddedBatch"]:
        """The sequences in parts of at most `max_tokens` tokens, or of one longer sequence."""
        parts: list[list[int]] = [[]]
        for length in (length for length, count in self.runs for _ in range(count)):
            if parts[-1] and sum(parts[-1]) + length > max_tokens:
                parts.append([])
            parts[-1].append(length)
        return [UnpaddedBatch(cumulative(part).int(), max(part), (1, sum(part)), None, part) for part in parts]


class MaskedSequences(PaddedBatch):
    """Packed sequences that are computed as one row with a full mask, because the kernel does not support an
    `UnpaddedBatch`, or because attention weights, `(1, H, N, N)`, are requested."""

    def __init__(self, sequences: UnpaddedBatch):
        ids = sequences.sequence_ids()
        super().__init__((ids[:, None] == ids)[None, None])  # (1, 1, N, N): True between tokens of the same sequence
        self.unpad, self.restore = sequences.unpad, sequences.restore  # type: ignore[method-assign, assignment]


# ------------------------------------------------------------------------------------------------------------- tensors


def labels_include_padding(attention_mask, labels) -> bool:
    """Whether a label other than -100, `(B, T)`, is at padding, so that the loss reads padding. Also True if there is
    not one label for each position, for the loss to raise the error of torch."""
    if not isinstance(labels, Tensor) or not is_padding_mask(attention_mask):
        return False
    is_padding = attention_mask.flatten().eq(0).to(labels.device)
    return labels.numel() != is_padding.numel() or bool((labels.flatten().ne(-100) & is_padding).any())


def is_padding_mask(mask, tokens: Tensor | None = None) -> bool:
    """Whether `mask` is a padding mask, `(B, T)`, whose values may be read; of `tokens`, `(B, T, …)`, if given."""
    is_readable = isinstance(mask, Tensor) and mask.ndim == 2 and mask.numel() > 0 and has_values(mask)
    return is_readable and (tokens is None or mask.shape == tokens.shape[:2])


def to_padded(rows: Tensor, indices: Tensor, shape) -> Tensor:
    """`rows`, `(N, …)`, at `indices` of a flattened batch of `shape` `(B, T)`, zeros elsewhere: `(B, T, …)`."""
    flat = rows.new_zeros(shape[0] * shape[1], *rows.shape[1:])
    return flat.index_copy_(0, copy_to_device(indices, rows.device), rows).unflatten(0, shape)


def additive_mask(mask: Any, dtype: torch.dtype) -> Any:
    """A boolean mask as one that is added to the scores; any other is returned unchanged."""
    is_boolean = isinstance(mask, Tensor) and mask.dtype == torch.bool
    return torch.zeros_like(mask, dtype=dtype).masked_fill(~mask, -torch.inf) if is_boolean else mask


def cumulative(lengths: list[int]) -> Tensor:
    """The start of each sequence, end to end, and the end of the last: `(S + 1,)`, on the CPU."""
    return pad(torch.tensor(lengths, device="cpu").cumsum(0), (1, 0))


def copy_to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on `device`; a copy from the CPU is non-blocking. (One to the CPU could be read before it is done.)"""
    return tensor.to(device, non_blocking=tensor.device.type == "cpu")
