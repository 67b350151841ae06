"""The comparison of two models of one class and size, from the embeddings to the gradients.

A value may differ by 1e-5, or by as much as the reference differs from a float64 copy of itself if that is more; a
gradient by 1e-5 of its tensor's norm, with the same allowance. Only non-padding tokens are compared.
"""

import copy
import math
import tempfile
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field

import torch
from torch.nn.utils.rnn import pad_sequence

from modeling_scratchbert import ScratchBertConfig
from toolkit.checkpoint import Checkpoint, best_class, open_class, read_checkpoint, to_scratchbert
from toolkit.common import table
from toolkit.texts import encode

TOLERANCE = 1e-5  # of values, absolute; of gradients, relative to the norm of their tensor

# Key biases shift all scores of a row alike, which softmax cancels: their gradients are zero except for rounding. A
# gradient whose norm in float64 is below this share of the whole model's is compared relative to the whole model's.
ZERO_GRADIENT = 1e-7

SIZES = (
    "is_encoder_decoder",
    "add_cross_attention",
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "max_position_embeddings",
    "type_vocab_size",
    "num_labels",
)
LENGTHS = (3, 16, 28, 32, 22, 0)  # of the random rows; the last is a row of padding only
ROWS_IN_BATCH = 8
MAX_TOKENS = 128  # of a text of the user: attention maps grow with the square

Batch = dict[str, torch.Tensor]


# -------------------------------------------------------------------------------------------------------------- batches


def random_rows(config: ScratchBertConfig, seed: int) -> list[list[int]]:
    """Rows of random token ids."""
    generator = torch.Generator().manual_seed(seed)
    lengths = [min(length, config.max_position_embeddings) for length in LENGTHS]
    return [torch.randint(config.vocab_size, (length,), generator=generator).tolist() for length in lengths]


def make_batch(rows: list[list[int]], config: ScratchBertConfig) -> Batch:
    """Every row twice in one batch, padded on the right and on the left: `(2 B, T)`. The second half of each row has
    token type 1. The targets of a seq2seq model are the same rows in reverse order."""

    def padded(columns: Iterable[list[int]], value: int) -> torch.Tensor:
        rows = [torch.tensor(column, dtype=torch.long) for column in columns]
        return torch.cat([pad_sequence(rows, True, value, padding_side=side) for side in ("right", "left")])

    types = padded([[int(2 * i >= len(ids)) for i in range(len(ids))] for ids in rows], 0)
    batch = {
        "input_ids": padded(rows, config.pad_token_id or 0),
        "attention_mask": padded([[1] * len(ids) for ids in rows], 0),
        "token_type_ids": types.clamp(max=config.type_vocab_size - 1),
    }
    if config.is_encoder_decoder:
        batch |= {f"decoder_{name}": batch[name].flip(0) for name in ("input_ids", "attention_mask")}
    return batch


# ------------------------------------------------------------------------------------------------------------- outputs


def non_padding_tokens(batch: Batch) -> dict[str, torch.Tensor]:
    """The masks `(B, T)` of non-padding tokens by the prefix of their outputs, in the order of the computation."""
    source = batch["attention_mask"].bool()
    if "decoder_attention_mask" not in batch:
        return {"": source}
    # The output of a decoder for a source of padding only depends on the kernel.
    target = batch["decoder_attention_mask"].bool() & source.any(dim=1, keepdim=True)
    return {"encoder_": source, "decoder_": target}


def outputs(model, batch: Batch) -> dict[str, torch.Tensor]:
    """The outputs at non-padding tokens, under their names in transformers, in the order of the computation. Hidden
    states and logits come from the model's default attention kernel, attention weights from the eager one, which alone
    returns them."""
    tokens_of = non_padding_tokens(batch)
    pooled = None if "encoder_" in tokens_of else model.base_model(**batch).get("pooler_output")
    inputs = batch
    if type(model).__name__.endswith("ForMultipleChoice"):
        inputs = {name: tensor.unflatten(0, (-1, 2)) for name, tensor in batch.items()}
    kernel = model.config._attn_implementation
    model.set_attn_implementation("eager")
    with torch.no_grad():
        maps = model(**inputs, output_attentions=True)
    model.set_attn_implementation(kernel)
    returned = model(**inputs, output_hidden_states=True)

    values = {}
    for prefix, tokens in tokens_of.items():
        # The tokens that each kind of attention attends to.
        keys = {f"{prefix}attentions": tokens}
        if prefix == "decoder_":
            keys["cross_attentions"] = tokens_of["encoder_"]
        for i, states in enumerate(returned[f"{prefix}hidden_states"]):
            for name, attended in keys.items() if i > 0 else ():
                pairs = tokens[:, :, None] & attended[:, None, :]
                values[f"{name}.{i - 1}"] = maps[name][i - 1].permute(0, 2, 3, 1)[pairs]
            values[f"{prefix}hidden_states.{i}"] = states[tokens]
    # Outputs for a whole sequence come from its first token, which must not be padding.
    whole = tokens[:, 0]
    if pooled is not None:
        values["pooler_output"] = pooled[whole]
    for name, logits in returned.items():
        if name.endswith("logits"):
            is_per_token = logits.ndim == 3 or name in ("start_logits", "end_logits")
            values[name] = logits[tokens] if is_per_token else logits.reshape(len(whole), -1)[whole]
    return values


def observe(model, batch: Batch, seed: int) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The outputs of a model by name, and the gradients of its parameters by ScratchBert's name, of a scalar that
    weights every number of every output differently."""
    values = outputs(model, batch)
    generator = torch.Generator().manual_seed(seed)
    total = torch.zeros((), dtype=model.dtype)
    for output in values.values():
        weights = torch.randn(output.shape, generator=generator)
        if output.requires_grad:
            total = total + (output * weights).mean()
    model.zero_grad()
    total.backward()
    named = {to_scratchbert(name, model.config.model_type): weight.grad for name, weight in model.named_parameters()}
    model.zero_grad()
    gradients = {name: gradient for name, gradient in named.items() if gradient is not None}
    return {name: output.detach() for name, output in values.items()}, gradients


# ----------------------------------------------------------------------------------------------------------- comparison


@dataclass
class Comparison:
    """One line of the table."""

    what: str  # an output, or the parameter of a gradient
    difference: float  # of outputs, the largest; of gradients, ‖difference‖ / ‖reference‖
    own_error: float  # the same of the reference in float32 and in float64
    is_gradient: bool
    excess: float = field(init=False)  # the difference as a share of what is allowed

    def __post_init__(self):
        is_finite = self.difference < math.inf
        self.excess = self.difference / max(TOLERANCE, self.own_error) if is_finite else math.inf


def compare(model, reference, batches: list[Batch], seed: int = 0) -> list[Comparison]:
    """Compares two models of the same class and size, either of which may be a BERT or a ScratchBert. Of each output
    and gradient, the row has the batch that is closest to the limit, or furthest beyond it.

    Args:
        batches: as `make_batch` returns them.
        seed: of the weights in the scalar whose gradients are compared.

    Raises:
        ValueError: one has an output that the other does not have.
    """
    sides = (model, reference, copy.deepcopy(reference).double())
    ties = {
        to_scratchbert(name, side.config.model_type): to_scratchbert(one, side.config.model_type)
        for side in sides[:2]
        for name, one in side.all_tied_weights_keys.items()
    }
    worst: dict[tuple, Comparison] = {}
    for batch in batches:
        values, gradients = zip(*(observe(side, batch, seed) for side in sides), strict=True)
        ours, theirs, exact = values
        if one_sided := ours.keys() ^ theirs.keys():
            raise ValueError(f"Only one model returns {sorted(one_sided)}; expected the same outputs of both.")
        rows = [
            Comparison(name, largest(ours[name] - theirs[name]), largest(theirs[name] - exact[name]), is_gradient=False)
            for name in theirs
        ]
        # What is tied in one model has the sum of two gradients of the other.
        for name, one in ties.items():
            for side in gradients:
                if name in side and name != one:
                    side[one] = side.get(one, 0) + side.pop(name)
        for row in rows + gradient_rows(*gradients):
            key = (row.what, row.is_gradient)
            worst[key] = max(worst.get(key, row), row, key=lambda row: row.excess)
    return list(worst.values())


def gradient_rows(ours: dict, theirs: dict, exact: dict) -> list[Comparison]:
    whole = norm(torch.stack([gradient.norm() for gradient in exact.values()]))
    rows = []
    for name in dict.fromkeys((*exact, *ours)):
        # A model without the tensor is equal only if no output depends on it.
        our, their, true = (side.get(name, torch.zeros(())) for side in (ours, theirs, exact))
        scale = norm(true) if norm(true) > ZERO_GRADIENT * whole else whole
        rows.append(Comparison(name, norm(our - their) / scale, norm(their - true) / scale, is_gradient=True))
    return rows


def largest(values: torch.Tensor) -> float:
    """The largest absolute value; infinite if any is NaN, so that every comparison with a limit fails."""
    return values.abs().nan_to_num(math.inf, math.inf).max().item() if values.numel() else 0.0


def norm(values: torch.Tensor) -> float:
    return values.double().norm().nan_to_num(math.inf, math.inf).item()


# -------------------------------------------------------------------------------------------------------- checkpoints


def open_pair(subject: Checkpoint, reference: Checkpoint | None, name: str, with_pooler: bool) -> list:
    """The two models to compare. Without a checkpoint for the reference, it is the `Bert…` class, opened from the same
    checkpoint if that is a BERT, else from an export of the ScratchBert."""
    model = open_class(subject, subject.kind if reference else "scratchbert", name, with_pooler)
    with tempfile.TemporaryDirectory() as folder:
        if reference is None and subject.kind == "scratchbert":
            model.save_as_bert(folder)
            reference = read_checkpoint(folder)
        reference = reference or subject
        return [model, open_class(reference, reference.kind, name, with_pooler)]


def compare_checkpoints(args, texts: list[str] | None) -> dict:
    """Opens two checkpoints, compares and prints them. Returns the report, as it is written into the JSON file.

    Args:
        args: as `check.py` parses them.
        texts: by default random token ids.

    Raises:
        CommandError, OSError, ValueError: a checkpoint is invalid, or the two do not match.
    """
    subject = read_checkpoint(args.model)
    reference = None if args.other is None else read_checkpoint(args.other)
    sides = [reference or subject, subject]
    config = subject.config
    for name in SIZES:
        expected, size = (getattr(side.config, name) for side in sides)
        if size != expected:
            raise ValueError(f"{name} is {size} in {args.model} and {expected} in {args.other}; expected equal sizes.")
    parts = sides[0].parts & subject.parts
    name = best_class(sides[0], parts)
    used = parts & (sides[0].classes[name] | {"pooler"})
    skipped = {f"{part} of {side.source}" for side in sides for part in (side.parts - used) | side.unknown_tensors}
    if config.add_cross_attention and not config.is_encoder_decoder:
        skipped.add("cross-attention, because there is no encoder")
    models = open_pair(subject, reference, name, "pooler" in parts)
    rows = random_rows(config, args.seed) if texts is None else encode(sides[0].source, config, texts, MAX_TOKENS)
    batches = [make_batch(rows[i : i + ROWS_IN_BATCH], config) for i in range(0, len(rows), ROWS_IN_BATCH)]
    compared = compare(*models, batches, args.seed)
    print(f"{type(models[0]).__name__} from {subject.source}\n{type(models[1]).__name__} from {sides[0].source}")
    print(*(f"not compared: {what}" for what in sorted(skipped)), "", sep="\n")
    gradients = [row for row in compared if row.is_gradient]
    shown = [row for row in compared if row not in gradients or row.excess > 1]
    cells = [
        (row.what, f"{row.difference:.1e}", f"{row.own_error:.1e}", "equal" if row.excess <= 1 else "DIFFERS")
        for row in shown
    ]
    print(table([("", "difference", "own error of the reference", "verdict"), *cells]))
    print(f"\ngradients, relative to their norm: {max(row.difference for row in gradients):.1e} at most")
    is_equal = all(row.excess <= 1 for row in compared)
    print("equal" if is_equal else f"DIFFERENT: first in {next(row.what for row in compared if row.excess > 1)}")
    return {"not_compared": sorted(skipped), "rows": [asdict(row) for row in compared], "equal": is_equal}
