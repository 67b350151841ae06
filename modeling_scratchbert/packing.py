"""Padding is a property of the batch: it is removed once, on the way in, and put back once, on the way out.

The real tokens stand end to end in between, `(1, N)`. Whatever acts on each token alone needs not know of it; attention
is told by the `Packing` that stands in the mask's place, and lets each sequence look at itself alone.
"""

import functools
import inspect
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import nn
from torch._C._functorch import is_functorch_wrapped_tensor
from transformers.utils.import_utils import is_tracing

varlen_attn: Any
try:
    from torch.nn.attention.varlen import varlen_attn
except ImportError:  # torch before 2.10
    varlen_attn = None

# Kernels that need no mask where a sequence comes alone. Those of flash attention take packed sequences themselves.
KERNELS = ("eager", "sdpa", "flash_attention_2", "flash_attention_3", "flash_attention_4")

# What transformers' padding-free collators say of packed sequences.
PACKED_ARGUMENTS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")

# glibc hands blocks above 32 MiB back to the system when they are freed, and has each new one paged in again.
ALLOCATION = 32 * 2**20

PER_TOKEN = ("input_ids", "token_type_ids", "position_ids", "inputs_embeds")


@dataclass(eq=False)
class Packing:
    """Where the tokens of a batch, `shape` (B, T), stand once its S sequences are packed end to end, N tokens in all.

    Args:
        cu_seqlens: `(S + 1,)`, int32: where each packed sequence starts, and the end of the last.
        max_length: the longest one's tokens.
        lengths: each one's tokens, where the host knows them.
        indices: `(N,)`, each token's place in the flattened batch; None if it is its place in the packing.
        starts: `(S,)`, where each sequence's first token stands, in the order of the batch.
    """

    cu_seqlens: torch.Tensor
    max_length: int
    lengths: list[int] | None
    shape: tuple[int, int]
    indices: torch.Tensor | None
    starts: torch.Tensor

    @classmethod
    def of_mask(cls, mask: torch.Tensor, lengths: list[int]) -> "Packing":
        """Of a padded batch's mask, `(B, T)`, and the number of real tokens in each row.

        Shorter sequences come first, so that those of the same length stand together.
        """
        order = sorted(range(len(lengths)), key=lengths.__getitem__)
        lengths = [lengths[row] for row in order]
        rows = there(torch.tensor(order), mask.device)
        batch, width = mask.shape
        tokens = mask[rows].flatten().nonzero_static(size=sum(lengths))[:, 0]
        cu_seqlens = there(cumulative(torch.tensor(lengths)), mask.device)
        starts = torch.empty_like(rows).index_copy_(0, rows, cu_seqlens[:-1].long())
        indices = rows[tokens // width] * width + tokens % width
        return cls(cu_seqlens, max(lengths), lengths, (batch, width), indices, starts)

    @classmethod
    def of_packed(cls, cu_seqlens: torch.Tensor, max_length: int | None, tokens: torch.Tensor, sort: bool) -> "Packing":
        """Of sequences that come packed already, as `tokens`, `(1, N, …)`; `sort` brings those of a length together."""
        shape, device = (tokens.shape[0], tokens.shape[1]), tokens.device
        if is_tracing(cu_seqlens) or (device.type != "cpu" and max_length is not None):
            starts = cu_seqlens[:-1].long()
            return cls(cu_seqlens, shape[1] if max_length is None else max_length, None, shape, None, starts)
        cu_seqlens = cu_seqlens.cpu()  # the one reading
        starts, lengths, indices = cu_seqlens[:-1].long(), cu_seqlens.diff(), None
        if sort and bool((lengths.diff() < 0).any()):
            lengths, order = lengths.sort(stable=True)
            cu_seqlens = cumulative(lengths)
            moves = (starts[order] - cu_seqlens[:-1]).repeat_interleave(lengths)
            indices = there(torch.arange(shape[1]) + moves, device)
            starts = torch.empty_like(starts).index_copy_(0, order, cu_seqlens[:-1].long())
        known = lengths.tolist()
        return cls(there(cu_seqlens.int(), device), max(known), known, shape, indices, there(starts, device))

    def pack(self, per_token: torch.Tensor) -> torch.Tensor:
        """`(B, T, …)`, or `(1, T, …)` for all rows, → `(1, N, …)`"""
        if self.indices is None:
            return per_token
        per_token = per_token.expand(*self.shape, *per_token.shape[2:]).flatten(0, 1)
        return per_token.index_select(0, there(self.indices, per_token.device))[None]

    def pad(self, packed: torch.Tensor) -> torch.Tensor:
        """`(1, N, …)` → `(B, T, …)`, zeros where there was padding. What is padded already stays as it is."""
        if self.indices is None or packed.shape[:2] != (1, len(self.indices)):
            return packed
        batch, width = self.shape
        padded = packed.new_zeros(batch * width, *packed.shape[2:])
        padded.index_copy_(0, there(self.indices, packed.device), packed[0])
        return padded.unflatten(0, (batch, width))

    def pad_scores(self, head, packed: torch.Tensor, chunk: int = 256) -> torch.Tensor:
        """`head(packed)`, `(1, N, V)`, padded: `(B, T, V)`. A few tokens at a time, so that scores of a whole
        vocabulary are in memory once."""
        if self.indices is None:
            return head(packed)
        parts = zip(packed.split(chunk, dim=1), there(self.indices, packed.device).split(chunk), strict=True)
        padded = None
        for tokens, places in parts:
            scores = head(tokens)[0]
            if padded is None:
                padded = scores.new_zeros(self.shape[0] * self.shape[1], scores.shape[-1])
            padded.index_copy_(0, places, scores)
        assert padded is not None  # there is a token
        return padded.unflatten(0, self.shape)

    def first_tokens(self, packed: torch.Tensor) -> torch.Tensor:
        """The first token of each sequence: `(1, N, C)` → `(S, 1, C)`"""
        return packed[0].index_select(0, there(self.starts, packed.device))[:, None]

    def parts(self, limit: int) -> list["Packing"]:
        """The sequences in runs of at most `limit` tokens, or of one sequence that is longer."""
        runs: list[list[int]] = [[]]
        for length in self.cu_seqlens.diff().tolist() if self.lengths is None else self.lengths:
            if sum(runs[-1]) and sum(runs[-1]) + length > limit:
                runs.append([])
            runs[-1].append(length)
        return [
            Packing(cu_seqlens, max(run), run, (1, sum(run)), None, cu_seqlens[:-1].long())
            for run in runs
            for cu_seqlens in [cumulative(torch.tensor(run))]
        ]

    def mask(self) -> torch.Tensor:
        """What says the same to a kernel that wants a mask: `(1, 1, N, N)`, True within a sequence."""
        sequence = sequences(self.cu_seqlens, self.shape[1])
        return (sequence[:, None] == sequence)[None, None]

    def attend(
        self, kernel: str, attend, module, query, key, value, mask: None, scaling: float, dropout: float, **kwargs
    ):
        """Attention of each sequence to itself, in the form of `transformers`' attention interface: `(1, H, N, D)` in,
        `(1, N, H, D)` out. `kernel` is the name of `attend`, which computes one sequence, or several of a length."""
        if kernel.startswith("flash"):
            cu_seqlens = there(self.cu_seqlens, query.device)
            kwargs |= {"cu_seq_lens_q": cu_seqlens, "cu_seq_lens_k": cu_seqlens}
            kwargs |= {"max_length_q": self.max_length, "max_length_k": self.max_length}
            return attend(module, query, key, value, None, scaling=scaling, dropout=dropout, **kwargs)
        query, key, value = (heads[0].transpose(0, 1) for heads in (query, key, value))  # (N, H, D)
        if takes_varlen(query, dropout):
            cu_seqlens = there(self.cu_seqlens, query.device)
            context = varlen_attn(query, key, value, cu_seqlens, cu_seqlens, self.max_length, self.max_length)
        elif is_tracing(query):
            context = packed_attention(query, key, value, self.cu_seqlens, scaling)
        else:
            self.lengths = self.cu_seqlens.diff().tolist() if self.lengths is None else self.lengths

            def attend_alone(*heads):
                return attend(module, *heads, None, scaling=scaling, dropout=dropout, **kwargs)[0]

            context = by_length(attend_alone, self.lengths, query, key, value)
        return context[None], None


def run_stack(stack, width: int, hidden_states: torch.Tensor, mask, *args, **kwargs) -> torch.Tensor:
    """`stack(hidden_states, mask, …)`. Of much that is packed, a few sequences at a time, where nothing but the result
    is wanted: then no tensor in between is too large for its memory to be used again. `width` is that of the widest."""
    limit = ALLOCATION // (width * hidden_states.element_size())
    if (
        not isinstance(mask, Packing)
        or is_tracing(hidden_states)
        or hidden_states.shape[1] <= limit
        or hidden_states.device.type != "cpu"
        or torch.is_grad_enabled()
        or any(module._forward_hooks or module._forward_pre_hooks for module in stack.modules())
    ):
        return stack(hidden_states, mask, *args, **kwargs)
    parts = mask.parts(limit)
    split = hidden_states.split([part.shape[1] for part in parts], dim=1)
    return torch.cat([stack(states, part, *args, **kwargs) for states, part in zip(split, parts, strict=True)], dim=1)


def there(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The tensor on another device, which nobody waits for."""
    return tensor.to(device, non_blocking=True)


def cumulative(lengths: torch.Tensor) -> torch.Tensor:
    """Where sequences of these lengths start, end to end, and the end of the last: `(S,)` → `(S + 1,)`, int32."""
    return nn.functional.pad(lengths.cumsum(0), (1, 0)).int()


def sequences(cu_seqlens: torch.Tensor, tokens: int) -> torch.Tensor:
    """Which sequence each token is of, `(N,)`."""
    return torch.searchsorted(cu_seqlens, torch.arange(tokens, device=cu_seqlens.device).int(), right=True) - 1


def by_length(attend, lengths: list[int], *packed: torch.Tensor) -> torch.Tensor:
    """Calls `attend` once for each run of sequences of one length, with `(sequences, H, length, D)` of each of
    `packed`, `(N, H, D)`, and puts what it returns, `(sequences, length, H, D)`, end to end again."""
    results, start = [], 0
    for length, run in groupby(lengths):
        end = start + length * len(list(run))
        if length:
            runs = (heads[start:end].unflatten(0, (-1, length)).transpose(1, 2) for heads in packed)
            results.append(attend(*runs).flatten(0, 1))
        start = end
    return torch.cat(results)


def takes_varlen(query: torch.Tensor, dropout: float) -> bool:
    """Whether torch's variable-length kernel takes these heads, `(N, H, D)`. It runs on CUDA in half precision, knows
    no dropout, and no width that is not a multiple of 8."""
    return (
        varlen_attn is not None
        and query.is_cuda
        and query.dtype in (torch.float16, torch.bfloat16)
        and not dropout
        and query.shape[-1] % 8 == 0
        and query.shape[-1] <= 256
    )


# For compiled models, which may look at no value of `cu_seqlens`: an operator that the compiler does not look into.
@torch.library.custom_op("scratchbert::packed_attention", mutates_args=())
def packed_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, cu_seqlens: torch.Tensor, scaling: float
) -> torch.Tensor:
    """Attention of each sequence to itself: `(N, H, D)` in and out."""

    def attend(*heads):
        return nn.functional.scaled_dot_product_attention(*heads, scale=scaling).transpose(1, 2)

    return by_length(attend, cu_seqlens.diff().tolist(), query, key, value)


@torch.library.custom_op("scratchbert::packed_attention_backward", mutates_args=())
def packed_attention_backward(
    gradient: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seqlens: torch.Tensor,
    scaling: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients of query, key and value, each `(N, H, D)`, of that of the context."""

    def derive(gradient, query, key, value):  # each (sequences, H, length, D)
        weights = (query @ key.transpose(-2, -1) * scaling).softmax(-1)
        of_weights = gradient @ value.transpose(-2, -1)
        of_scores = weights * (of_weights - (of_weights * weights).sum(-1, keepdim=True)) * scaling
        gradients = of_scores @ key, of_scores.transpose(-2, -1) @ query, weights.transpose(-2, -1) @ gradient
        return torch.stack(gradients, -1).transpose(1, 2)

    gradients = by_length(derive, cu_seqlens.diff().tolist(), gradient, query, key, value)
    of_query, of_key, of_value = gradients.unbind(-1)
    return of_query.contiguous(), of_key.contiguous(), of_value.contiguous()


packed_attention.register_fake(lambda query, *_: torch.empty_like(query, memory_format=torch.contiguous_format))
packed_attention_backward.register_fake(
    lambda gradient, *heads: tuple(torch.empty_like(each, memory_format=torch.contiguous_format) for each in heads[:3])
)


def _keep_inputs(ctx, inputs, output):
    *tensors, ctx.scaling = inputs
    ctx.save_for_backward(*tensors)


packed_attention.register_autograd(
    lambda ctx, gradient: (*packed_attention_backward(gradient, *ctx.saved_tensors, ctx.scaling), None, None),
    setup_context=_keep_inputs,
)


def without_padding(*per_token: str, labels: bool = False, unless: str | None = None):
    """Has a model's `forward` see packed tokens where its batch has padding and nothing asked for needs it.

    Args:
        per_token: the outputs with something for each token, into which the padding is put back, as zeros.
        labels: whether there is a label for each token. Those of padding count where they are not -100, and need it.
        unless: an argument whose effect needs the padding.
    """

    def decorate(forward):
        names = list(inspect.signature(forward).parameters)[1:-1]  # but self and kwargs

        @functools.wraps(forward)
        def wrapper(self, *args, **kwargs):
            if len(args) > len(names) or kwargs.keys() & set(names[: len(args)]):
                return forward(self, *args, **kwargs)  # Python's own error
            arguments = {**dict(zip(names[: len(args)], args, strict=True)), **kwargs}
            restore = remove_padding(self, arguments, labels, unless)
            outputs = forward(self, **arguments)
            for field in per_token if restore is not None else ():
                # With `sparse_prediction` the logits are those of the labelled tokens alone, (tokens, V).
                if not labels or outputs[field].ndim == 3:
                    outputs[field] = restore(outputs[field])
            return outputs

        return wrapper

    return decorate


def remove_padding(model, arguments: dict, labels: bool, unless: str | None):
    """Packs the batch in `arguments`, those of `forward`, if it can be done. Returns what puts the padding back."""
    if isinstance(arguments.get("attention_mask"), Packing):  # the model around this one has packed them
        return None
    wanted = arguments.pop("padding_free", model.config.padding_free)
    if model.config.is_decoder:
        return None
    if (packing := packed_already(model, arguments)) is None:
        if not isinstance(arguments.get("attention_mask"), torch.Tensor):
            return None
        needs_padding = unless is not None and arguments.get(unless) is not None
        packing = None if needs_padding or not wanted else packed_now(model, arguments, labels)
        if not isinstance(packing, Packing):
            if model is not model.base_model:  # which is to decide the same
                arguments["padding_free"] = False
            return packing
    for name in (*PER_TOKEN, *(["labels"] if labels else [])):
        if arguments.get(name) is not None:
            arguments[name] = packing.pack(arguments[name])
    arguments["attention_mask"] = packing
    return packing.pad


def tokens_of(arguments: dict):
    """`input_ids` or else `inputs_embeds`."""
    tokens = arguments.get("input_ids")
    return arguments.get("inputs_embeds") if tokens is None else tokens


def packed_now(model, arguments: dict, labels: bool):
    """The `Packing` of a padded batch; or None where padding is to stay, or there is none; or, where it is computed but
    not wanted, what puts zeros in its place."""
    mask, tokens = arguments["attention_mask"], tokens_of(arguments)
    if not fit_to_pack(model, arguments, mask, tokens):
        return None
    mask = mask.bool()
    counts = [mask.sum(1)]
    if labels and arguments.get("labels") is not None:
        if arguments["labels"].shape != mask.shape:
            return None
        counts.append((arguments["labels"].ne(-100) & ~mask).sum()[None])
    # Read at once: each reading waits for the device.
    first_tokens, *lengths = torch.cat([mask[:, 0].sum()[None], *counts]).tolist()
    batch, width = mask.shape
    lengths, stray_labels = lengths[:batch], any(lengths[batch:])
    if min(lengths) == width:
        arguments["attention_mask"] = None
        return None
    if stray_labels or not any(lengths):
        return None
    reads_padding = first_tokens < batch and getattr(model.base_model, "pooler", None) is not None
    if reads_padding or model.config.chunk_size_feed_forward:
        # BERT's pooler reads what stands first, be it padding; and chunks want a length that they divide.
        return lambda padded: padded.masked_fill(~mask if padded.ndim == 2 else ~mask[..., None], 0)
    if arguments.get("position_ids") is None:
        arguments["position_ids"] = torch.arange(width, device=mask.device)[None]
    return Packing.of_mask(mask, lengths)


def fit_to_pack(model, arguments: dict, mask: torch.Tensor, tokens) -> bool:
    """Whether a batch can be packed. Where arguments do not fit one another, `forward` says so in its own way."""
    if (
        not isinstance(tokens, torch.Tensor)
        or is_tracing(mask)
        or any(map(is_functorch_wrapped_tensor, (mask, tokens)))
    ):
        return False
    wants_recording = any(
        arguments.get(f"output_{kind}", getattr(model.config, f"output_{kind}"))
        for kind in ("attentions", "hidden_states")
    )
    batch, width = tokens.shape[:2] if tokens.ndim > 1 else (0, 0)
    return (
        mask.shape == (batch, width)
        and mask.numel() > 0
        and mask.device.type != "meta"
        and (arguments.get("input_ids") is None or arguments.get("inputs_embeds") is None)
        and all(
            arguments.get(name) is None or getattr(arguments[name], "shape", None) in ((batch, width), (1, width))
            for name in ("token_type_ids", "position_ids")
        )
        and (arguments.get("position_ids") is not None or width <= model.config.max_position_embeddings)
        and arguments.get("encoder_hidden_states") is None
        and not wants_recording
        and model.base_model.takes_packed()
    )


def packed_already(model, arguments: dict) -> Packing | None:
    """The `Packing` of a batch that came packed: a single row, with `cu_seq_lens_q` or with positions that restart."""
    if model.config._attn_implementation not in (*KERNELS, "flex_attention"):
        return None  # another's kernel knows what to make of them
    cu_seqlens, _, max_length, _ = (arguments.pop(name, None) for name in PACKED_ARGUMENTS)
    tokens, positions = tokens_of(arguments), arguments.get("position_ids")
    if cu_seqlens is None:
        if positions is None or arguments.get("attention_mask") is not None or tokens is None or len(tokens) != 1:
            return None
        cu_seqlens = restarts(positions, arguments)
        if cu_seqlens is None:
            return None
    check_packed(cu_seqlens, tokens, arguments.get("attention_mask"))
    if positions is None:
        places = torch.arange(tokens.shape[1], device=cu_seqlens.device)
        places = places - cu_seqlens[sequences(cu_seqlens, tokens.shape[1])]
        arguments["position_ids"] = there(places[None], tokens.device)
    records = arguments.get("output_hidden_states", model.config.output_hidden_states)
    records = records or arguments.get("output_attentions", model.config.output_attentions)
    return Packing.of_packed(cu_seqlens, max_length, tokens, sort=not records)


def restarts(positions: torch.Tensor, arguments: dict) -> torch.Tensor | None:
    """Where sequences start whose positions, `(1, N)`, count from 0 again and again, or None where they do not."""
    if not isinstance(positions, torch.Tensor) or positions.ndim != 2 or len(positions) != 1:
        return None
    positions = positions[0] if is_tracing(positions) else positions[0].cpu()
    starts = positions == 0
    counts_on = nn.functional.pad(positions.diff() == 1, (1, 0), value=False)
    if is_tracing(positions):
        # How many sequences there are is not known now: a mask tells them apart, and none where it is not as above.
        sequence = starts.cumsum(0)
        arguments["attention_mask"] = ((sequence[:, None] == sequence) | ~(starts | counts_on).all())[None, None]
        return None
    if not bool((starts | counts_on).all()) or starts.sum() < 2:
        return None
    return nn.functional.pad(starts.nonzero()[:, 0], (0, 1), value=len(starts)).int()


def check_packed(cu_seqlens, tokens, mask) -> None:
    """Checks the arguments of a packed batch.

    Raises:
        ValueError: they do not fit one another; the message names what it got and what it wants.
    """
    if mask is not None:
        raise ValueError(
            "attention_mask and cu_seq_lens_q were both given: packed sequences have no padding. Leave one out."
        )
    if not isinstance(cu_seqlens, torch.Tensor) or cu_seqlens.ndim != 1 or cu_seqlens.is_floating_point():
        got = tuple(cu_seqlens.shape) if isinstance(cu_seqlens, torch.Tensor) else type(cu_seqlens).__name__
        raise ValueError(
            f"cu_seq_lens_q is {got}; it wants whole numbers, (sequences + 1,): where each sequence starts, "
            "and the end of the last."
        )
    if not isinstance(tokens, torch.Tensor) or tokens.ndim < 2 or tokens.shape[0] != 1:
        raise ValueError(
            f"With cu_seq_lens_q the sequences come in one row: the tokens want shape (1, length), and have "
            f"{tuple(tokens.shape) if isinstance(tokens, torch.Tensor) else tokens}."
        )
    if is_tracing(cu_seqlens) or cu_seqlens.is_cuda:  # reading it would wait for the device
        return
    if len(cu_seqlens) < 2 or cu_seqlens[0] != 0 or cu_seqlens[-1] != tokens.shape[1] or (cu_seqlens.diff() < 0).any():
        raise ValueError(
            f"cu_seq_lens_q is {cu_seqlens.tolist()}; it wants to start at 0, never to fall, and to end at the number "
            f"of tokens, {tokens.shape[1]}."
        )
