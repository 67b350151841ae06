"""Unpadding: an encoder computes the non-padding tokens of a batch alone.

`ScratchBertModel.forward` decides whether a batch is unpadded, removes its padding before the embeddings and restores
it after the last block. In between, the sequences stand end to end in one row, `(1, N)`. Layers that act on each token
alone need no change; attention is given the `UnpaddedBatch` and lets each sequence attend to itself.
"""

from dataclasses import dataclass
from functools import cached_property, partial
from itertools import groupby
from typing import Any

import torch
from torch import nn
from torch.nn.functional import pad
from torch.nn.modules import module as global_hooks

from .input_checks import has_values

varlen_attn: Any
try:
    from torch.nn.attention.varlen import varlen_attn
except ImportError:  # torch before 2.10
    varlen_attn = None

# Attention implementations that compute one sequence without a mask. The flash kernels accept packed sequences.
UNPADDING_KERNELS = ("eager", "sdpa", "flash_attention_2", "flash_attention_3", "flash_attention_4")
# Those for which packed sequences are handled here; any other kernel is given the options as they are.
PACKED_KERNELS = (*UNPADDING_KERNELS, "flex_attention")

# glibc returns freed blocks above 32 MiB to the system. Splitting 10,000 tokens of BERT-base so that no tensor is
# larger saves 11 % of the time (2 Intel cores).
MAX_TENSOR_BYTES = 32 * 2**20

# Modules whose hooks do not depend on the shape of what they are given: devices, sharding, output recording.
NEUTRAL_MODULES = (
    "torch", "accelerate", "deepspeed", "transformers.distributed", "transformers.utils.output_capturing",
    "modeling_scratchbert.cpu",
)  # fmt: skip
HOOK_REGISTRIES = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


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
    """

    cu_seqlens: torch.Tensor
    max_seqlen: int
    shape: tuple[int, int]
    indices: torch.Tensor | None = None
    lengths: list[int] | None = None
    starts: torch.Tensor | None = None

    @classmethod
    def from_mask(cls, mask: torch.Tensor, lengths: list[int]) -> "UnpaddedBatch":
        """The tokens where `mask`, `(B, T)`, is True. `lengths` has the number of them in each row."""
        indices = mask.flatten().nonzero_static(size=sum(lengths))[:, 0]
        return cls.from_lengths(lengths, (mask.shape[0], mask.shape[1]), indices, mask.device)

    @classmethod
    def from_lengths(cls, lengths: list[int], shape, indices: torch.Tensor | None, device) -> "UnpaddedBatch":
        """Sequences of these lengths, sorted by length: one kernel call computes all those of the same length."""
        ordered = sorted(lengths)
        starts, cu_seqlens = cumulative(lengths), cumulative(ordered)
        if ordered != lengths:
            order = torch.tensor(sorted(range(len(lengths)), key=lengths.__getitem__), device="cpu")
            shifts = (starts[order] - cu_seqlens[:-1]).repeat_interleave(torch.tensor(ordered, device="cpu"))
            places = copy_to_device(torch.arange(len(shifts), device="cpu") + shifts, device)
            indices = places if indices is None else indices[places]
        return cls(copy_to_device(cu_seqlens.int(), device), ordered[-1], shape, indices, ordered)

    @classmethod
    def from_packed(cls, cu_seqlens: torch.Tensor, max_seqlen: int | None, tokens, sort: bool) -> "UnpaddedBatch":
        """Packed sequences, `tokens` `(1, N, …)`. With `sort`, they are reordered as in `from_lengths`."""
        shape, device = (tokens.shape[0], tokens.shape[1]), tokens.device
        if not has_values(cu_seqlens) or (device.type != "cpu" and max_seqlen is not None):
            # The lengths cannot be read while tracing, and need not be if the longest is known.
            batch = cls(copy_to_device(cu_seqlens.int(), device), max_seqlen or shape[1], shape)
        elif sort:
            batch = cls.from_lengths(cu_seqlens.diff().tolist(), shape, None, device)
        else:
            lengths = cu_seqlens.diff().tolist()
            batch = cls(copy_to_device(cu_seqlens.int(), device), max(lengths), shape, None, lengths)
        batch.starts = copy_to_device(cu_seqlens[:-1].long().clamp(max=shape[1] - 1), device)
        return batch

    @property
    def num_tokens(self) -> int:
        """N."""
        return self.shape[1] if self.indices is None else len(self.indices)

    def unpad(self, tensor: torch.Tensor | None) -> torch.Tensor | None:
        """`(B, T, …)`, or `(1, T, …)` for all rows, → `(1, N, …)`; None → None."""
        if tensor is None or self.indices is None:
            return tensor
        flat = tensor.expand(*self.shape, *tensor.shape[2:]).flatten(0, 1)
        return flat.index_select(0, copy_to_device(self.indices, tensor.device))[None]

    def pad(self, unpadded: torch.Tensor) -> torch.Tensor:
        """`(1, N, …)` → `(B, T, …)`, zeros at padding."""
        if self.indices is None:
            return unpadded
        return scatter_rows(unpadded[0], copy_to_device(self.indices, unpadded.device), self.shape)

    def first_tokens(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """A tensor whose position 0 is the first token of each sequence. `hidden_states` is what `pad` returned; it is
        returned unchanged for a padded batch, and as `(S, 1, C)` for packed sequences."""
        if self.starts is None:
            return hidden_states
        return hidden_states[0].index_select(0, copy_to_device(self.starts, hidden_states.device))[:, None]

    def sequence_ids(self) -> torch.Tensor:
        """The number of the sequence of each token, from 1: `(N,)`."""
        row = torch.arange(self.num_tokens, device=self.cu_seqlens.device, dtype=torch.int32)
        return torch.searchsorted(self.cu_seqlens, row, right=True)

    def default_position_ids(self) -> torch.Tensor:
        """`(1, N)`: the position in the padded row, or in the packed sequence."""
        if self.starts is None and self.indices is not None:
            return (self.indices % self.shape[1])[None]
        row = torch.arange(self.num_tokens, device=self.cu_seqlens.device)
        return (row - self.cu_seqlens[self.sequence_ids() - 1])[None]

    def attention_mask(self) -> torch.Tensor:
        """The sequences as a full mask, `(1, 1, N, N)`: True within a sequence."""
        sequence = self.sequence_ids()
        return (sequence[:, None] == sequence)[None, None]

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


def attend_within_sequences(
    attend, implementation: str, query, key, value, unpadded: UnpaddedBatch, dropout: float
) -> torch.Tensor:
    """Attention of each sequence to itself: `(1, H, N, D)` → `(1, N, H, D)`. `attend` takes query, key, value and mask
    as a kernel of `transformers`' attention interface does, and `implementation` is the name of that kernel."""
    if implementation.startswith("flash"):
        cu_seqlens = copy_to_device(unpadded.cu_seqlens, query.device)
        lengths = {"max_length_q": unpadded.max_seqlen, "max_length_k": unpadded.max_seqlen}
        return attend(query, key, value, None, cu_seq_lens_q=cu_seqlens, cu_seq_lens_k=cu_seqlens, **lengths)[0]
    heads = [tensor[0].transpose(0, 1) for tensor in (query, key, value)]  # each (N, H, D)
    if supports_varlen(heads[0], dropout):
        cu_seqlens = copy_to_device(unpadded.cu_seqlens, query.device)
        return varlen_attn(*heads, cu_seqlens, cu_seqlens, unpadded.max_seqlen, unpadded.max_seqlen)[None]
    if not has_values(query):  # while tracing, the lengths cannot be read
        return attend(query, key, value, unpadded.attention_mask())[0]
    contexts, start = [], 0
    for length, count in unpadded.runs:
        end = start + length * count
        run = (tensor[start:end].unflatten(0, (count, length)).transpose(1, 2) for tensor in heads)
        contexts.append(attend(*run, None)[0].flatten(0, 1))
        start = end
    return torch.cat(contexts)[None]


def run_encoder(encoder, hidden_states: torch.Tensor, unpadded: UnpaddedBatch, width: int, records, **kwargs):
    """`encoder(hidden_states, unpadded=unpadded, …)`, `(1, N, C)`. On a CPU without autograd, the sequences are
    computed in parts, so that no tensor exceeds `MAX_TENSOR_BYTES`; unless a hook, or the caller (`records`), would see
    it. `width` is that of the feed-forward, which has the largest tensors."""
    max_tokens = MAX_TENSOR_BYTES // (width * hidden_states.element_size())
    is_small = hidden_states.shape[1] <= max_tokens or hidden_states.device.type != "cpu"
    if is_small or records or torch.is_grad_enabled() or not has_values(hidden_states) or is_observed(encoder):
        return encoder(hidden_states, unpadded=unpadded, **kwargs)
    parts = unpadded.split(max_tokens)
    states = hidden_states.split([part.num_tokens for part in parts], dim=1)
    results = [encoder(part, unpadded=batch, **kwargs) for part, batch in zip(states, parts, strict=True)]
    return torch.cat(results, dim=1)


def labels_include_padding(attention_mask, labels) -> bool:
    """Whether a label other than -100, `(B, T)`, is at padding, so that the loss reads padding. Also True if there is
    not one label for each position, for the loss to raise the error of torch."""
    if not isinstance(labels, torch.Tensor) or not is_padding_mask(attention_mask):
        return False
    if labels.numel() != attention_mask.numel():
        return True
    return bool((labels.flatten().ne(-100) & attention_mask.flatten().eq(0).to(labels.device)).any())


def is_padding_mask(mask) -> bool:
    """Whether `mask` is a padding mask, `(B, T)`, whose values may be read."""
    return isinstance(mask, torch.Tensor) and mask.ndim == 2 and mask.numel() > 0 and has_values(mask)


def is_own(part: nn.Module | None, own: type[nn.Module]) -> bool:
    """Whether `part` is of our class `own`. FSDP creates classes that derive from ours and compute the same."""
    return type(part) is own or (isinstance(part, own) and type(part).__module__.startswith("torch."))


def is_observed(*roots: nn.Module) -> bool:
    """Whether a hook or a replaced `forward` of other code sees the tensors of these modules, or a part is compiled."""
    registries = [getattr(global_hooks, f"_global{name}") for name in HOOK_REGISTRIES]
    for root in roots:
        for module in root.modules():
            state = module.__dict__
            is_compiled = state.get("_compiled_call_impl") is not None or "_orig_mod" in module._modules
            if is_compiled or ("forward" in state and is_foreign(state["forward"])):
                return True
            registries.extend(filter(None, map(state.get, HOOK_REGISTRIES)))
    return any(is_foreign(hook) for registry in registries for hook in registry.values())


def is_foreign(function) -> bool:
    """Whether a hook is defined outside of `NEUTRAL_MODULES`, and may depend on the shape of what it is given."""
    while isinstance(function, partial):
        function = function.func
    origin = getattr(function, "__module__", None) or ""
    if origin == "transformers.modeling_utils":  # of its hooks, only this one is neutral
        return "enable_input_require_grads" not in getattr(function, "__qualname__", "")
    return not any(origin == name or origin.startswith(f"{name}.") for name in NEUTRAL_MODULES)


def packed_sequences(
    tokens: torch.Tensor, attention_mask, position_ids, cu_seqlens, max_seqlen, sort: bool
) -> UnpaddedBatch | None:
    """The packed sequences in a row of `tokens`, by `cu_seqlens`, or by `position_ids`, `(1, N)`, that restart at 0;
    None if it has none. All-zero positions are one sequence."""
    if cu_seqlens is not None:
        return UnpaddedBatch.from_packed(cu_seqlens, max_seqlen, tokens, sort)
    if attention_mask is not None or position_ids is None or len(tokens) != 1:
        return None
    positions = position_ids[0].cpu() if has_values(position_ids) else position_ids[0]
    starts = positions == 0
    counts_on = pad(positions.diff() == 1, (1, 0), value=False)
    is_packed = (starts | counts_on).all() & ~starts.all()
    if has_values(position_ids):
        if not bool(is_packed) or starts.sum() < 2:
            return None
        cu_seqlens = pad(starts.nonzero()[:, 0], (0, 1), value=len(starts)).int()
        return UnpaddedBatch.from_packed(cu_seqlens, None, tokens, sort)
    # While tracing, the number of sequences is not known: empty ones at the end make N of them, and the pooler reads
    # the first token of the row only.
    places = torch.arange(starts.shape[0], device=starts.device)
    end = places[-1:] + 1
    first = torch.where((starts & is_packed) | (places == 0), places, end).sort().values
    return UnpaddedBatch(torch.cat([first, end]).int(), starts.shape[0], (1, starts.shape[0]))


def scatter_rows(rows: torch.Tensor, indices: torch.Tensor, shape) -> torch.Tensor:
    """`rows`, `(N, …)`, at `indices` of a flattened batch of `shape` `(B, T)`, zeros elsewhere: `(B, T, …)`."""
    flat = rows.new_zeros(shape[0] * shape[1], *rows.shape[1:])
    return flat.index_copy_(0, indices, rows).unflatten(0, shape)


def additive_mask(mask: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    """A boolean mask as one that is added to the scores; any other is returned unchanged."""
    if not isinstance(mask, torch.Tensor) or mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=dtype).masked_fill(~mask, -torch.inf)


def cumulative(lengths: list[int]) -> torch.Tensor:
    """The start of each sequence, end to end, and the end of the last: `(S + 1,)`, on the CPU."""
    return pad(torch.tensor(lengths, device="cpu").cumsum(0), (1, 0))


def copy_to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The tensor on `device`; a copy from the CPU is non-blocking. (One to the CPU could be read before it is done.)"""
    return tensor.to(device, non_blocking=tensor.device.type == "cpu")


def supports_varlen(query: torch.Tensor, dropout: float) -> bool:
    """Whether torch's variable-length kernel supports these heads, `(N, H, D)`: on CUDA, in half precision, without
    dropout, and a width that is a multiple of 8."""
    return (
        varlen_attn is not None
        and query.is_cuda
        and query.dtype in (torch.float16, torch.bfloat16)
        and not dropout
        and query.shape[-1] % 8 == 0
        and query.shape[-1] <= 256
    )
