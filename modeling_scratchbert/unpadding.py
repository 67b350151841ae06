"""Unpadding: an encoder computes the non-padding tokens of a batch alone.

`choose_batch` decides, once per forward pass and before the embeddings, whether a batch is unpadded. The result is a
`PaddedBatch` or an `UnpaddedBatch`, which have the same methods, so that `ScratchBertModel.forward` has no branches. In
an unpadded batch the sequences stand end to end in one row, `(1, N)`. Layers that act on each token alone need no
change; attention calls the kernel that the batch returns, which lets each sequence attend to itself.

A batch is unpadded only if every module is known to support it: `Inspection` has the rules.
"""

import copy
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import groupby
from typing import Any

import torch
from torch import nn
from torch.nn.functional import pad
from torch.utils.hooks import RemovableHandle
from transformers.activations import ACT2CLS
from transformers.integrations.flash_attention import flash_attention_forward
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import create_bidirectional_mask, create_causal_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .input_checks import check_packed, has_values

varlen_attn: Any = None
with suppress(ImportError):  # torch before 2.10
    from torch.nn.attention.varlen import varlen_attn

# The attention implementations that compute one sequence without a mask, and their functions in transformers. The flash
# kernels accept packed sequences. The eager one is in `attention`.
UNPADDING_KERNELS: dict[str, Callable | None] = {"eager": None, "sdpa": sdpa_attention_forward}
UNPADDING_KERNELS |= {f"flash_attention_{version}": flash_attention_forward for version in (2, 3, 4)}

# glibc returns freed blocks above 32 MiB to the system. Splitting 10,000 tokens of BERT-base so that no tensor is
# larger saves 11 % of the time (2 Intel cores).
MAX_TENSOR_BYTES = 32 * 2**20

# --------------------------------------------------------------------------------------------------------- two batches


class PaddedBatch:
    """Sequences of one length, `(B, T)`, as the caller passed them.

    Args:
        attention_mask: `(B, T)`, or a full mask, `(B, 1, T, T)`; None if every token may be attended to.
        padding: `(B, T, 1)`, True where the last hidden states are returned as zeros; None to return all as they are.
    """

    def __init__(self, attention_mask=None, padding: torch.Tensor | None = None):
        self.attention_mask, self.padding = attention_mask, padding

    def unpad(self, input_ids, token_type_ids, position_ids, inputs_embeds) -> tuple:
        """The tokens to compute, of tensors of `(B, T, …)` or None. The embeddings count positions that are None."""
        return input_ids, token_type_ids, position_ids, inputs_embeds

    def encoder_inputs(self, config, hidden_states, eager, position_ids, encoder_states, encoder_mask, cache) -> dict:
        """The arguments of the encoder beside `hidden_states`, with masks in the form that the kernel expects, or with
        `eager` the eager formula."""
        if eager and config._attn_implementation != "eager":
            config = copy.copy(config)
            config._attn_implementation = "eager"
        mask = (
            create_causal_mask(config, hidden_states, self.attention_mask, cache)
            if config.is_decoder
            else create_bidirectional_mask(config, hidden_states, self.attention_mask)
        )
        if encoder_states is not None:
            encoder_mask = create_bidirectional_mask(config, hidden_states, encoder_mask, encoder_states)
        if config._attn_implementation in ("sdpa", "flex_attention"):
            # Convert a boolean mask once per forward pass, not once per block.
            mask, encoder_mask = (additive_mask(each, hidden_states.dtype) for each in (mask, encoder_mask))
        masks = {"attention_mask": mask, "encoder_attention_mask": encoder_mask}
        # Flash attention finds packed sequences in the positions.
        return masks | {"encoder_hidden_states": encoder_states, "past_key_values": cache, "position_ids": position_ids}

    def encoder(self, encoder: nn.Module) -> Callable:
        """What to call in place of the encoder."""
        return encoder

    def kernel(self, kernel: Callable, encoder_hidden_states: torch.Tensor | None) -> Callable:
        """What to call in place of a kernel of transformers' attention interface; in self-attention, without states."""
        return kernel

    def restore(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The last hidden states as they are returned, `(B, T, C)`, and those whose position 0 is the first token of
        each sequence, for the pooler."""
        padding = None if self.padding is None else self.padding.to(hidden_states.device)
        return hidden_states if padding is None else hidden_states.masked_fill(padding, 0), hidden_states


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
            together, because the caller or a hook would see the parts.
    """

    cu_seqlens: torch.Tensor
    max_seqlen: int
    shape: tuple[int, int]
    indices: torch.Tensor | None = None
    lengths: list[int] | None = None
    starts: torch.Tensor | None = None
    max_width: int = 0

    @classmethod
    def from_mask(cls, mask: torch.Tensor, lengths: list[int], max_width: int = 0) -> "UnpaddedBatch":
        """The tokens where `mask`, `(B, T)`, is True. `lengths` has the number of them in each row."""
        indices = mask.flatten().nonzero_static(size=sum(lengths))[:, 0]
        return cls.from_lengths(lengths, (mask.shape[0], mask.shape[1]), indices, mask.device, max_width=max_width)

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
    def from_packed(cls, cu_seqlens: torch.Tensor, max_seqlen: int | None, tokens, max_width: int) -> "UnpaddedBatch":
        """Packed sequences, `tokens` `(1, N, …)`. Unless `max_width` is 0, they are sorted as in `from_lengths`."""
        shape, device = (tokens.shape[0], tokens.shape[1]), tokens.device
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

    def position_ids(self) -> torch.Tensor:
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

    def _run(self, encoder, hidden_states: torch.Tensor, **kwargs) -> torch.Tensor:
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

    def kernel(self, kernel: Callable, encoder_hidden_states: torch.Tensor | None) -> Callable:
        """What to call in place of a kernel of transformers' attention interface; in self-attention, without states."""
        return partial(self._attend, kernel)

    def _attend(self, kernel, module, query, key, value, attention_mask=None, dropout=0.0, **kwargs) -> tuple:
        """Attention of each sequence to itself: `(1, H, N, D)` → `(1, N, H, D)`, and no weights."""
        if kernel is flash_attention_forward:
            kwargs |= dict.fromkeys(("cu_seq_lens_q", "cu_seq_lens_k"), copy_to_device(self.cu_seqlens, query.device))
            kwargs |= dict.fromkeys(("max_length_q", "max_length_k"), self.max_seqlen)
            return kernel(module, query, key, value, None, dropout=dropout, **kwargs)[0], None
        if supports_varlen(query, dropout):
            cu_seqlens = copy_to_device(self.cu_seqlens, query.device)
            heads = [tensor[0].transpose(0, 1) for tensor in (query, key, value)]  # each (N, H, D)
            return varlen_attn(*heads, cu_seqlens, cu_seqlens, self.max_seqlen, self.max_seqlen)[None], None
        contexts, sizes = [], [length * count for length, count in self.runs]
        heads = [tensor[0].split(sizes, dim=1) for tensor in (query, key, value)]
        for (length, count), *run in zip(self.runs, *heads, strict=True):
            run = [part.view(-1, count, length, query.shape[-1]).transpose(0, 1) for part in run]
            contexts.append(kernel(module, *run, None, dropout=dropout, **kwargs)[0].flatten(0, 1))
        return torch.cat(contexts)[None], None

    def restore(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The last hidden states as they are returned, `(B, T, C)`, zero at padding; and those whose position 0 is the
        first token of each sequence, for the pooler: `(S, 1, C)` for packed sequences."""
        if self.indices is not None:
            hidden_states = to_padded(hidden_states[0], self.indices, self.shape)
        if self.starts is None:
            return hidden_states, hidden_states
        starts = copy_to_device(self.starts, hidden_states.device)
        return hidden_states, hidden_states[0].index_select(0, starts)[:, None]

    def sequence_ids(self) -> torch.Tensor:
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
    """Packed sequences that are computed as one row with a full mask, because a block or a kernel may not support an
    `UnpaddedBatch`, or because attention weights, `(1, H, N, N)`, are requested."""

    def __init__(self, sequences: UnpaddedBatch):
        super().__init__(within_sequence(sequences.sequence_ids()))
        self.unpad, self.restore = sequences.unpad, sequences.restore  # type: ignore[method-assign]


# --------------------------------------------------------------------------------------------------------- the decision


def choose_batch(model, tokens, attention_mask, position_ids, records, eager, options) -> PaddedBatch | UnpaddedBatch:
    """Decide whether a batch is unpadded: the only place that does.

    Args:
        model: a `ScratchBertModel`.
        tokens: `(B, T)` or `(B, T, C)`.
        records: whether hidden states or attention weights are requested; `eager`: whether attention weights are.
        options: of the forward pass. `padding_free` and the lengths of packed sequences are taken out of it.
    """
    config, padding_free = model.config, options.pop("padding_free", None)
    if config.is_decoder:
        # That of an optimised model gives each sequence the same bits in any batch.
        return getattr(model, "padded_batch", PaddedBatch)(attention_mask)
    inspect, name = partial(model.inspection, model.embeddings, model.encoder), config._attn_implementation
    # The function that transformers ships: another may be registered under its name.
    is_shipped = name in UNPADDING_KERNELS and ALL_ATTENTION_FUNCTIONS.get(name) is UNPADDING_KERNELS[name]
    if is_shipped or name in ("eager", "sdpa", "flex_attention"):
        packed = packed_sequences(tokens, attention_mask, position_ids, config, options)
        if isinstance(packed, tuple):
            # While tracing, neither modules nor lengths can be read; the flash kernels need no lengths.
            is_traced, is_flash = not has_values(packed[0]), name.startswith("flash")
            are_known, are_unobserved = (True, True) if padding_free or is_traced else inspect()
            max_width = 0 if records or not are_unobserved else config.intermediate_size
            sequences = UnpaddedBatch.from_packed(packed[0], packed[1], tokens, max_width)
            is_masked = eager or not is_shipped or not are_known or (is_traced and not is_flash)
            return MaskedSequences(sequences) if is_masked else sequences
        if packed is not None:
            return PaddedBatch(packed)
    if records or not is_shipped or not has_removable_padding(config, attention_mask, tokens, padding_free):
        return PaddedBatch(attention_mask)
    mask = attention_mask.bool()
    # One transfer from the device, because each one waits for it.
    num_first_tokens, *lengths = torch.cat([mask[:, 0].sum()[None], mask.sum(1)]).tolist()
    are_known, are_unobserved = (True, True) if min(lengths) == mask.shape[1] else inspect()
    if min(lengths) == mask.shape[1] or not (are_known or padding_free):
        return PADDED if min(lengths) == mask.shape[1] else PaddedBatch(attention_mask)
    is_own_pooler = model.pooler is None or type(model.pooler) in KNOWN_CLASSES
    reads_padding = not is_own_pooler or (model.pooler is not None and num_first_tokens < len(lengths))
    # `chunk_size_feed_forward` must divide the length.
    if not any(lengths) or reads_padding or config.chunk_size_feed_forward or not (are_unobserved or padding_free):
        return PaddedBatch(attention_mask, ~mask[..., None])
    return UnpaddedBatch.from_mask(mask, lengths, max_width=config.intermediate_size if are_unobserved else 0)


def choose_tokens(model, outputs, attention_mask, padding_free: bool | None) -> torch.Tensor | None:
    """Decide whether a language-model head scores the non-padding tokens alone: return their positions in the flattened
    batch, `(N,)`, or None to score all tokens."""
    is_recorded = outputs.hidden_states is not None or outputs.attentions is not None  # padding is then computed
    is_padded = has_removable_padding(model.config, attention_mask, outputs.last_hidden_state, padding_free)
    if is_recorded or model.config.is_decoder or not is_padded:
        return None
    indices = attention_mask.flatten().nonzero()[:, 0].to(outputs.last_hidden_state.device)
    is_whole = len(indices) in (0, attention_mask.numel())
    return None if is_whole or not is_selectable(model, attention_mask, padding_free) else indices


def is_selectable(model, tensor: torch.Tensor, padding_free: bool | None) -> bool:
    """Whether the language-model head may be given some of the tokens. While tracing, no hook sees the difference."""
    return padding_free or not has_values(tensor) or all(model.inspection(model.lm_head))


def has_removable_padding(config, mask, tokens: torch.Tensor, padding_free: bool | None) -> bool:
    """Whether padding is to be removed, and `mask` is a padding mask of `tokens`, `(B, T, …)`, that may be read."""
    is_enabled = config.padding_free if padding_free is None else padding_free
    return is_enabled and is_padding_mask(mask) and mask.shape == tokens.shape[:2]


def packed_sequences(tokens: torch.Tensor, attention_mask, position_ids, config, options: Any):
    """The packed sequences in a row of `tokens`, marked by `cu_seq_lens_q` in `options`, or by `position_ids`,
    `(1, N)`, that restart at 0. All-zero positions are one sequence.

    Returns:
        `cu_seqlens`, and the length of the longest sequence or None; or while tracing, if positions mark them, a full
        mask, `(1, 1, N, N)`. None if there are none.
    """
    names = ("cu_seq_lens_q", "max_length_q", "cu_seq_lens_k", "max_length_k")
    cu_seqlens, max_seqlen, *_ = [options.pop(name, None) for name in names]
    if cu_seqlens is None:
        if attention_mask is not None or position_ids is None or tokens.shape[0] != 1:
            return None
        positions = position_ids[0].cpu() if has_values(position_ids) else position_ids[0]
        starts = positions == 0
        counts_on = pad(positions.diff() == 1, (1, 0), value=False)
        is_packed = (starts | counts_on).all() & ~starts.all()
        if not has_values(position_ids):
            is_flash = config._attn_implementation.startswith("flash")  # whose kernels read the positions
            return None if is_flash else within_sequence(starts.cumsum(0) * is_packed)
        if not bool(is_packed) or starts.sum() < 2:
            return None
        cu_seqlens = pad(starts.nonzero()[:, 0], (0, 1), value=len(starts)).int()
    check_packed(cu_seqlens, tokens, attention_mask, position_ids, config)
    return cu_seqlens, max_seqlen


# ---------------------------------------------------------------------------------------------------- what is known

# From each class whose modules support unpadded batches to the methods that make it so.
KNOWN_CLASSES: dict[type, dict[str, Any]] = {}


def supports_unpadding(cls: type, *methods: str) -> type:
    """Register a class whose modules support unpadded batches: they treat tokens one by one, or are attention that
    calls the kernel of the batch. Used as a decorator of our own classes, of which all methods are recorded."""
    own = [name for name, value in vars(cls).items() if callable(value) and not name.startswith("__")]
    KNOWN_CLASSES[cls] = {name: vars(cls)[name] for name in methods or own if name in vars(cls)}
    return cls


# Elementwise activations, which PReLU is not; layers that treat tokens one by one; containers.
_position_wise: set[Any] = {entry[0] if isinstance(entry, tuple) else entry for entry in ACT2CLS.values()} - {nn.PReLU}
_position_wise |= {
    nn.GELU,
    nn.ELU,
    nn.SELU,
    nn.CELU,
    nn.Mish,
    nn.Softplus,
    nn.Softsign,
    nn.Hardtanh,
    nn.Hardsigmoid,
    nn.Linear,
    nn.LayerNorm,
    nn.RMSNorm,
    nn.Embedding,
    nn.Dropout,
    nn.Identity,
    nn.ModuleList,
    nn.ModuleDict,
    nn.Sequential,
    nn.ParameterList,
    nn.ParameterDict,
}
for _class in _position_wise:
    supports_unpadding(_class, "forward")

# Weights of other classes may be quantised, with numbers that depend on the shape of the batch.
KNOWN_TENSORS = ("torch.nn.parameter", "torch.distributed", "torchao")
# Where hooks and replaced methods come from that compute the same on unpadded batches: devices, sharding, output
# recording, calibration.
NEUTRAL_ORIGINS = (
    "transformers.distributed.",
    "transformers.utils.output_capturing.",
    "modeling_scratchbert.cpu.",
    "torch.distributed.",
    "torch.nn.utils.",
    "torch.utils.",
    "accelerate.",
    "deepspeed.",
)
HOOK_REGISTRIES = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class Inspection:
    """Whether modules support unpadded batches, and whether hooks would see a difference.

    All modules are read once. Later calls compare what could change the answer: the modules, their classes, the methods
    of these classes, the attributes of the modules, and the number of hooks that were ever registered.
    """

    _known: tuple | None = None

    def __reduce__(self):
        return type(self), ()  # a copy of the model has other modules

    def __call__(self, *roots: nn.Module) -> tuple[bool, bool]:
        """Whether all modules in `roots` are known to support unpadded batches, and whether no hook of other code sees
        their tensors."""
        if self._known is not None and self._known == self._state(roots):
            return True, True
        modules = [module for root in roots for module in root.modules()]
        registries = [getattr(nn.modules.module, f"_global{name}") for name in HOOK_REGISTRIES]
        registries += [getattr(module, name) for module in modules for name in HOOK_REGISTRIES]
        are_unobserved = not any(is_foreign(hook) for registry in registries for hook in registry.values())
        are_known = all(map(is_known, modules))
        if are_known and are_unobserved:
            self._modules, self._attributes = modules, list(map(vars, modules))
            self._children = [module._modules for module in modules if module._modules]
            self._methods: list = [(vars(module), name) for module in modules for name, _ in replaced_methods(module)]
            classes = {original_class(type(module)) for module in modules}
            self._methods += [(vars(cls), name) for cls in classes for name in KNOWN_CLASSES.get(cls, ())]
            self._known = self._state(roots)
        return are_known, are_unobserved

    def _state(self, roots: tuple) -> tuple:
        """What could change the answer. `map` and comprehensions, because this runs in each forward pass."""
        children = [list(modules.values()) for modules in self._children]
        methods = [attributes.get(name) for attributes, name in self._methods]
        types, sizes = list(map(type, self._modules)), list(map(len, self._attributes))
        return RemovableHandle.next_id, roots, types, sizes, children, methods


def is_known(module: nn.Module) -> bool:
    """Whether a module, leaving its children aside, is known to support unpadded batches. A class that is not listed
    here may declare in its own `__dict__` `is_position_wise = True`: it treats tokens one by one."""
    cls = original_class(type(module))
    is_declared = vars(cls).get("is_position_wise") or cls.__module__.startswith("peft.")
    methods = {} if is_declared else KNOWN_CLASSES.get(cls)
    if methods is None or any(vars(cls).get(name) is not method for name, method in methods.items()):
        return False
    are_plain = all(type(tensor).__module__.startswith(KNOWN_TENSORS) for tensor in module.parameters(recurse=False))
    is_plain = are_plain and vars(module).get("_compiled_call_impl") is None
    is_row_wise = len(getattr(module, "normalized_shape", (1,))) == 1
    return is_plain and is_row_wise and not any(is_foreign(method) for _, method in replaced_methods(module))


def is_foreign(function) -> bool:
    """Whether a hook, or a method that replaces one, comes from none of `NEUTRAL_ORIGINS`, and may depend on the shape
    of its arguments."""
    while isinstance(function, partial):
        function = function.func
    is_position_wise = vars(type(function)).get("is_position_wise") is True
    origin = getattr(function, "__module__", None) or ""
    if origin == "transformers.modeling_utils":  # of its hooks, only this one is neutral
        return "enable_input_require_grads" not in getattr(function, "__qualname__", "")
    return not is_position_wise and not f"{origin}.".startswith(NEUTRAL_ORIGINS)


def original_class(cls: type) -> type:
    """The class from which FSDP derived `cls`."""
    return cls.__bases__[-1] if cls.__module__.startswith("torch.distributed.") else cls


def replaced_methods(module: nn.Module) -> list[tuple[str, Any]]:
    """The attributes of a module that hide a method of its class by which it supports unpadded batches, or that
    Accelerate calls in place of it."""
    own, names = vars(module), (*(KNOWN_CLASSES.get(original_class(type(module))) or ("forward",)), "_old_forward")
    original: Any = type(module).forward
    return [(name, own[name]) for name in names if name in own and getattr(own[name], "__func__", None) is not original]


# ------------------------------------------------------------------------------------------------------------- tensors


def labels_include_padding(attention_mask, labels) -> bool:
    """Whether a label other than -100, `(B, T)`, is at padding, so that the loss reads padding. Also True if there is
    not one label for each position, for the loss to raise the error of torch."""
    if not isinstance(labels, torch.Tensor) or not is_padding_mask(attention_mask):
        return False
    is_padding = attention_mask.flatten().eq(0).to(labels.device)
    return labels.numel() != is_padding.numel() or bool((labels.flatten().ne(-100) & is_padding).any())


def is_padding_mask(mask) -> bool:
    """Whether `mask` is a padding mask, `(B, T)`, whose values may be read."""
    return isinstance(mask, torch.Tensor) and mask.ndim == 2 and mask.numel() > 0 and has_values(mask)


def to_padded(rows: torch.Tensor, indices: torch.Tensor, shape) -> torch.Tensor:
    """`rows`, `(N, …)`, at `indices` of a flattened batch of `shape` `(B, T)`, zeros elsewhere: `(B, T, …)`."""
    flat = rows.new_zeros(shape[0] * shape[1], *rows.shape[1:])
    return flat.index_copy_(0, copy_to_device(indices, rows.device), rows).unflatten(0, shape)


def additive_mask(mask: Any, dtype: torch.dtype) -> Any:
    """A boolean mask as one that is added to the scores; any other is returned unchanged."""
    is_boolean = isinstance(mask, torch.Tensor) and mask.dtype == torch.bool
    return torch.zeros_like(mask, dtype=dtype).masked_fill(~mask, -torch.inf) if is_boolean else mask


def cumulative(lengths: list[int]) -> torch.Tensor:
    """The start of each sequence, end to end, and the end of the last: `(S + 1,)`, on the CPU."""
    return pad(torch.tensor(lengths, device="cpu").cumsum(0), (1, 0))


def within_sequence(sequence_ids: torch.Tensor) -> torch.Tensor:
    """A full mask, `(1, 1, N, N)`: True between tokens of the same sequence."""
    return (sequence_ids[:, None] == sequence_ids)[None, None]


def copy_to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The tensor on `device`; a copy from the CPU is non-blocking. (One to the CPU could be read before it is done.)"""
    return tensor.to(device, non_blocking=tensor.device.type == "cpu")


def supports_varlen(query: torch.Tensor, dropout: float) -> bool:
    """Whether torch's variable-length kernel supports these heads, `(…, D)`: on CUDA, in half precision, without
    dropout, and a width that is a multiple of 8."""
    is_half, width = query.dtype in (torch.float16, torch.bfloat16), query.shape[-1]
    return varlen_attn is not None and query.is_cuda and is_half and not dropout and width % 8 == 0 and width <= 256
