"""Comparing two models of the same class and size on the same batch: outputs at non-padding tokens, and gradients.

A value may differ by 1e-5, or by as much as the reference differs from a float64 copy of itself if that is more; a
gradient by 1e-5 of its tensor's norm, with the same allowance.
"""

import copy
import math
import re
from dataclasses import dataclass, field, replace

import torch

from toolkit.checkpoint import is_per_token, short_name, to_scratchbert

TOLERANCE = 1e-5  # of values, absolute; of gradients, relative to the norm of their tensor

# Key biases shift all scores of a row alike, which softmax cancels: their gradients are zero except for rounding. A
# gradient whose norm in float64 is below this share of the whole model's is compared relative to the whole model's.
ZERO_GRADIENT = 1e-7

# Of a parameter's name: encoder or decoder of a seq2seq model, and the number of the layer or the part outside of them.
GRADIENT_NAME = re.compile(
    r"(?:model\.)?(?:(encoder|decoder)\.(?=embeddings|encoder|pooler))?(?:encoder\.)?"
    r"(?:blocks\.(\d+)|(\w+))"
)


@dataclass
class Observed:
    """One output of a model: the values at non-padding tokens, and the shape that it was returned in."""

    kind: str  # "hidden state", "attention", "cross-attention", "pooler" or "logits"
    layer: int | None
    shape: list[int]
    values: torch.Tensor


def observe(model, batch: dict[str, torch.Tensor], seed: int) -> tuple[dict[str, Observed], dict[str, torch.Tensor]]:
    """All outputs of a model by name, in the order in which data flows, and the gradients of all its parameters by
    ScratchBert's name."""
    tokens_of = non_padding_tokens(batch)
    batch = {name: tensor.to(model.dtype) if tensor.is_floating_point() else tensor for name, tensor in batch.items()}
    if type(model).__name__.endswith("ForMultipleChoice"):
        batch |= {name: batch[name].unflatten(0, (-1, 2)) for name in ("input_ids", "attention_mask", "token_type_ids")}
    seen = outputs(model, batch, tokens_of)

    # Gradients are of a scalar that weights every number of every output differently.
    generator = torch.Generator().manual_seed(seed)
    total = sum(
        (one.values * torch.randn(one.values.shape, generator=generator).to(one.values.dtype)).mean()
        for one in seen.values()
        if one.values.requires_grad
    )
    model.zero_grad()
    total.backward()
    found = gradients(model)
    model.zero_grad()  # a copy of the model must not hold the gradients
    for one in seen.values():
        one.values = one.values.detach()
    return seen, found


def gradients(model) -> dict[str, torch.Tensor]:
    """The gradients of the parameters that have one, by ScratchBert's name."""
    named = {to_scratchbert(name, model.config.model_type): weight.grad for name, weight in model.named_parameters()}
    return {name: gradient for name, gradient in named.items() if gradient is not None}


def non_padding_tokens(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The masks `(B, T)` of non-padding tokens of the encoder and the decoder (or of the only one), in the order in
    which data flows. The last one is that of the logits."""
    source = batch["attention_mask"].bool()
    if "decoder_attention_mask" not in batch:
        return {"": source}
    # The output of a decoder for a source of padding only depends on the kernel.
    return {"encoder": source, "decoder": batch["decoder_attention_mask"].bool() & source.any(dim=1, keepdim=True)}


def outputs(model, batch: dict[str, torch.Tensor], tokens_of: dict[str, torch.Tensor]) -> dict[str, Observed]:
    """The outputs, computed with the model's default attention kernel, and the attention weights between non-padding
    tokens, which only the eager kernel returns."""
    kernel = model.config._attn_implementation
    model.set_attn_implementation("eager")
    with torch.no_grad():
        maps = model(**batch, output_attentions=True)
    model.set_attn_implementation(kernel)
    pooled, pooler = [], getattr(model.base_model, "pooler", None)
    hook = pooler and pooler.register_forward_hook(lambda module, args, output: pooled.append(output))
    returned = model(**batch, output_hidden_states=True)
    if hook is not None:
        hook.remove()

    seen = {}
    for stack, tokens in tokens_of.items():
        field = f"{stack}_".lstrip("_")
        # The tokens that each kind of attention attends to.
        keys_of = {"attention": (f"{field}attentions", tokens)}
        source = tokens_of.get("encoder", batch.get("encoder_attention_mask"))
        if stack != "encoder" and source is not None and "cross_attentions" in maps:
            keys_of["cross-attention"] = ("cross_attentions", source.bool())
        embeddings, *layers = returned[f"{field}hidden_states"]
        name = f"{stack} embeddings".lstrip()
        seen[name] = Observed("hidden state", None, list(embeddings.shape), embeddings[tokens])
        for i, states in enumerate(layers):
            name = f"{stack} layer {i}: ".lstrip()
            for kind, (attentions, keys) in keys_of.items():
                weights, pairs = maps[attentions][i], tokens[:, :, None] & keys[:, None, :]
                seen[name + kind] = Observed(kind, i, list(weights.shape), weights.permute(0, 2, 3, 1)[pairs])
            seen[f"{name}hidden state"] = Observed("hidden state", i, list(states.shape), states[tokens])
    # Outputs for a whole sequence come from its first token, which must not be padding.
    whole = tokens[:, 0]
    for output in pooled:
        seen["pooler"] = Observed("pooler", None, list(output.shape), output[whole])
    for output, logits in returned.items():
        if output.endswith("logits"):
            values = logits.flatten() if len(logits) < len(whole) else logits  # of multiple choice, two to a row
            at = tokens if is_per_token(output, logits) else whole
            name = f"{short_name(type(model).__name__)}: {output}"
            seen[name] = Observed("logits", None, list(logits.shape), values[at])
    return seen


# ----------------------------------------------------------------------------------------------------------- comparison


@dataclass
class Row:
    """One line of the table."""

    what: str
    kind: str  # as in `Observed`, or "gradient"
    layer: int | None
    shape: list[int] | None  # None for gradients, of which a row has several tensors
    tensors: int
    max_abs: float
    # Of values: max_abs / max |reference|; of gradients: ‖difference‖ / ‖reference‖ of the worst tensor.
    relative: float
    own_error: float  # the reference's float32 error: max_abs of values, relative of gradients
    worst: str | None = None  # of gradients: the tensor that all numbers but max_abs belong to
    limit: float = field(init=False)
    equal: bool = field(init=False)

    def __post_init__(self):
        self.limit = max(TOLERANCE, self.own_error)
        self.equal = self.measured <= self.limit and math.isfinite(self.measured)

    @property
    def measured(self) -> float:
        """The number that must be within the limit."""
        return self.relative if self.kind == "gradient" else self.max_abs


def compare(model, reference, batch: dict[str, torch.Tensor], seed: int = 0) -> list[Row]:
    """Compares two models of the same class and size, either of which may be a BERT or a ScratchBert.

    Args:
        batch: as `make_batch` returns it.
        seed: of the weights in the scalar whose gradients are compared.

    Raises:
        ValueError: one has an output that the other does not have.
    """
    ours, our_gradients = observe(model, batch, seed)
    theirs, their_gradients = observe(reference, batch, seed)
    if one_sided := sorted(ours.keys() ^ theirs.keys()):
        raise ValueError(f"Only one of the models returns {', '.join(one_sided)}.")
    exact, exact_gradients = observe(copy.deepcopy(reference).double(), batch, seed)
    rows = [value_row(name, ours[name], theirs[name], exact[name]) for name in theirs]
    ties = shared_tensors(reference) | shared_tensors(model)
    return rows + gradient_rows(*(summed(side, ties) for side in (our_gradients, their_gradients, exact_gradients)))


def shared_tensors(model) -> dict[str, str]:
    """From the name of each tied tensor to that of the tensor it is tied to, by ScratchBert's names."""
    kind = model.config.model_type
    return {to_scratchbert(name, kind): to_scratchbert(one, kind) for name, one in model.all_tied_weights_keys.items()}


def summed(gradients: dict[str, torch.Tensor], ties: dict[str, str]) -> dict[str, torch.Tensor]:
    """The gradients, with those of tensors that are tied in either model added up: if one model ties what the other
    does not, the sums must be equal."""
    total = {}
    for name, gradient in gradients.items():
        one = ties.get(name, name)
        total[one] = total[one] + gradient if one in total else gradient
    return total


def value_row(name: str, ours: Observed, theirs: Observed, exact: Observed) -> Row:
    max_abs, own_error = largest(ours.values - theirs.values), largest(theirs.values - exact.values)
    relative = ratio(max_abs, largest(theirs.values))
    return Row(name, theirs.kind, theirs.layer, theirs.shape, 1, max_abs, relative, own_error)


def gradient_rows(ours: dict, theirs: dict, exact: dict) -> list[Row]:
    """A row with the worst tensor of the embeddings, of each layer, and of each part after them."""
    whole = norm(torch.stack([gradient.norm() for gradient in exact.values()]))
    groups: dict[str, list[Row]] = {}
    for name in dict.fromkeys((*exact, *ours)):
        zero = torch.zeros(())  # a model without the tensor is equal only if no output depends on it
        our, their, true = (side.get(name, zero) for side in (ours, theirs, exact))
        scale = norm(true) if norm(true) > ZERO_GRADIENT * whole else whole
        relative, own_error = ratio(norm(our - their), scale), ratio(norm(their - true), scale)
        stack, layer, part = GRADIENT_NAME.match(name).groups()
        group = " ".join(filter(None, (stack, f"layer {layer}" if layer else part.replace("_", " "))))
        row = Row(
            f"gradient: {group}",
            "gradient",
            layer and int(layer),
            None,
            1,
            largest(our - their),
            relative,
            own_error,
            worst=name,
        )
        groups.setdefault(group, []).append(row)
    return [
        replace(
            max(rows, key=lambda row: (not row.equal, row.relative / row.limit)),
            tensors=len(rows),
            max_abs=max(row.max_abs for row in rows),
        )
        for rows in groups.values()
    ]


def largest(values: torch.Tensor) -> float:
    """The largest absolute value; infinite if any is NaN, so that every comparison with a limit fails."""
    return values.abs().nan_to_num(math.inf, math.inf).max().item() if values.numel() else 0.0


def norm(values: torch.Tensor) -> float:
    return values.double().norm().nan_to_num(math.inf, math.inf).item()


def ratio(part: float, whole: float) -> float:
    return part / whole if whole else math.inf if part else 0.0
