"""Parity: whether two models of the same class and size, one of them usually a `Bert…`, compute the same.

Both run in float32, without dropout, on the same batch, and only non-padding tokens are compared. A value may differ by
1e-5, or by as much as the reference differs from a float64 copy of itself if that is more; a gradient by 1e-5 of its
tensor's norm, with the same allowance.
"""

import copy
import math
import platform
import re
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from transformers import EncoderDecoderModel

from modeling_scratchbert import ScratchBertConfig, ScratchBertForCausalLM
from toolkit.checkpoint import (
    Checkpoint,
    covering_classes,
    load,
    open_tokenizer_if_any,
    read_checkpoint,
    short_name,
    to_scratchbert,
    used_parts,
    why_unused,
)
from toolkit.cli import shortened
from toolkit.files import atomic_file
from toolkit.machine import version

TOLERANCE = 1e-5  # of values, absolute; of gradients, relative to the norm of their tensor

# Key biases shift all scores of a row alike, which softmax cancels: their gradients are zero except for rounding. A
# gradient whose norm in float64 is below this share of the whole model's is compared relative to the whole model's.
ZERO_GRADIENT = 1e-7

# The logits that each class returns: from the output's field to the name in the table.
LOGITS = {
    "ForPreTraining": {
        "prediction_logits": "masked-LM logits",
        "seq_relationship_logits": "next-sentence logits",
    },
    "ForMaskedLM": {"logits": "masked-LM logits"},
    "ForNextSentencePrediction": {"logits": "next-sentence logits"},
    "ForSequenceClassification": {"logits": "sequence logits"},
    "ForMultipleChoice": {"logits": "choice logits"},
    "ForTokenClassification": {"logits": "token logits"},
    "ForQuestionAnswering": {"start_logits": "answer start logits", "end_logits": "answer end logits"},
    "ForCausalLM": {"logits": "next-word logits"},
    "ForConditionalGeneration": {"logits": "next-word logits"},
    "Model": {},
    "Seq2SeqModel": {},
}
ONE_PER_TOKEN = {"masked-LM logits", "next-word logits", "token logits", "answer start logits", "answer end logits"}

# Single texts, pairs, a single word, and a row of padding only.
SENTENCES = [
    ("Yes.",),
    ("The cat sat on the mat, and the dog lay down beside it.",),
    ("How many people live in Berlin?", "About 3.7 million people are registered in an area of 891 square kilometres."),
    (
        "When the storm had passed, the fishermen went down to the harbour to see which of the boats were still afloat "
        "and found that two had sunk at their moorings.",
    ),
    ("A man is playing a guitar on stage.", "Nobody in this picture is making any music."),
    (),
]
RANDOM_LENGTHS = (3, 16, 28, 32, 22, 0)
SOURCE_LENGTHS = (7, 1, 4)  # of the random encoder outputs that a decoder attends to, in turn


def check_same_size(one: Checkpoint, other: Checkpoint, parts: set[str]) -> None:
    """Raises ValueError if the two do not accept the same inputs or do not return the same shapes."""
    names = ["is_encoder_decoder", "add_cross_attention", "vocab_size", "hidden_size", "num_hidden_layers",
             "num_attention_heads", "max_position_embeddings", "type_vocab_size"]  # fmt: skip
    names += ["num_labels"] if parts & {"classifier", "qa_outputs"} else []
    sizes = [{name: getattr(side.config, name) for name in names} for side in (one, other)]
    for side, own in zip((one, other), sizes, strict=True):
        own["num_decoder_layers"] = side.config.decoder_config().num_hidden_layers
    for name, here in sizes[0].items():
        if here != sizes[1][name]:
            raise ValueError(
                f"The models differ in size: {name} is {here} in {one.source} and {sizes[1][name]} in {other.source}."
            )


# ----------------------------------------------------------------------------------------------------------- the batch


def encode(checkpoints: list[Checkpoint], seed: int) -> tuple[list[tuple[list[int], list[int]]], str]:
    """Token ids and token types of a few texts, and a description of them. They come from the tokenizer of the first
    checkpoint that has a suitable one, else they are random."""
    config = checkpoints[0].config
    for checkpoint in checkpoints:
        tokenizer = open_tokenizer_if_any(checkpoint.source)
        if tokenizer is not None and len(tokenizer) <= config.vocab_size:
            options = {"truncation": True, "max_length": config.max_position_embeddings, "return_token_type_ids": True}
            encoded = [tokenizer(*texts, **options) if texts else None for texts in SENTENCES]
            rows = [(row["input_ids"], row["token_type_ids"]) if row else ([], []) for row in encoded]
            return rows, f"sentences, tokenised by {checkpoint.source}"
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for length in RANDOM_LENGTHS:
        length = min(length, config.max_position_embeddings)
        ids = torch.randint(config.vocab_size, (length,), generator=generator).tolist()
        rows.append((ids, [0] * (length // 2) + [1] * (length - length // 2)))
    return rows, f"rows of random ids (seed {seed}), because the checkpoint has no suitable tokenizer"


def make_batch(
    rows: list[tuple[list[int], list[int]]], config: ScratchBertConfig, seed: int = 0
) -> dict[str, torch.Tensor]:
    """Every row twice in one batch, padded on the right and on the left: `(2 B, T)`. The targets of a seq2seq model are
    the same rows in reverse order; a decoder with cross-attention attends to random encoder outputs."""
    width = max(len(ids) for ids, _ in rows)

    def padded(columns, value):
        right = [list(column) + [value] * (width - len(column)) for column in columns]
        left = [[value] * (width - len(column)) + list(column) for column in columns]
        return torch.tensor(right + left)

    batch = {
        "input_ids": padded([ids for ids, _ in rows], config.pad_token_id or 0),
        "attention_mask": padded([[1] * len(ids) for ids, _ in rows], 0),
        "token_type_ids": padded([types for _, types in rows], 0).clamp(max=config.type_vocab_size - 1),
    }
    if config.is_encoder_decoder:
        batch |= {f"decoder_{name}": batch[name].flip(0) for name in ("input_ids", "attention_mask")}
    if config.add_cross_attention:
        lengths = torch.tensor(SOURCE_LENGTHS).repeat(2 * len(rows))[: 2 * len(rows), None]
        shape = (2 * len(rows), max(SOURCE_LENGTHS), config.hidden_size)
        batch["encoder_hidden_states"] = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
        batch["encoder_attention_mask"] = (torch.arange(max(SOURCE_LENGTHS)) < lengths).long()
    return batch


def load_pair(subject: Checkpoint, reference: Checkpoint | None, name: str, pooler: bool):
    """The two models to compare. Without a checkpoint for the reference, it is the `Bert…` class, opened from the same
    checkpoint if that is a BERT, else from an export of the ScratchBert."""
    if reference is not None:
        return tuple(load(side.source, side.kind, name, pooler) for side in (subject, reference))
    model = load(subject.source, "scratchbert", name, pooler)
    if subject.kind != "scratchbert":
        return model, load(subject.source, subject.kind, name, pooler)
    with tempfile.TemporaryDirectory() as folder:
        if subject.config.is_encoder_decoder:
            save_as_two_berts(model, Path(folder))
            return model, load(folder, "encoder-decoder", name, pooler)
        model.save_as_bert(folder)
        return model, load(folder, "bert", name, pooler)


def save_as_two_berts(model, folder: Path) -> None:
    """Writes the `EncoderDecoderModel` that computes the same as our seq2seq model, from exports of its encoder and
    decoder.

    Raises:
        ValueError: BERT cannot express the model, or it has no model head, which an `EncoderDecoderModel` always has.
    """
    if not hasattr(model, "lm_head"):
        raise ValueError(
            f"{type(model).__name__} has no model head, and an EncoderDecoderModel always has one; expected another "
            "ScratchBert to compare it with."
        )
    decoder = ScratchBertForCausalLM(model.config.decoder_config())
    decoder.model, decoder.lm_head = model.get_decoder(), model.lm_head
    folders = (folder / "encoder", folder / "decoder")
    model.get_encoder().save_as_bert(folders[0])
    decoder.save_as_bert(folders[1])
    EncoderDecoderModel.from_encoder_decoder_pretrained(*folders).save_pretrained(folder)


# --------------------------------------------------------------------------------------------------------- observations


@dataclass
class Observed:
    """One output of a model: the values at non-padding tokens, and the shape that it was returned in."""

    kind: str
    stack: str  # "encoder" or "decoder"; "" if there is only one, and for the outputs after both
    layer: int | None
    shape: list[int]
    values: torch.Tensor


def observe(model, batch: dict[str, torch.Tensor], seed: int) -> tuple[dict[str, Observed], dict[str, torch.Tensor]]:
    """All outputs of a model by name, and the gradients of all its parameters by ScratchBert's name."""
    tokens_of = non_padding_tokens(batch)
    batch = {name: tensor.to(model.dtype) if tensor.is_floating_point() else tensor for name, tensor in batch.items()}
    if type(model).__name__.endswith("ForMultipleChoice"):
        choices = ("input_ids", "attention_mask", "token_type_ids")
        batch |= {name: batch[name].unflatten(0, (-1, 2)) for name in choices}
    maps = attention_maps(model, batch, tokens_of)
    values = outputs(model, batch, tokens_of)

    # Gradients are of a scalar that weights every number of every output differently.
    generator = torch.Generator().manual_seed(seed)
    total = sum(
        (seen.values * torch.randn(seen.values.shape, generator=generator).to(seen.values.dtype)).mean()
        for seen in values.values()
    )
    model.zero_grad()
    total.backward()
    kind = model.config.model_type
    gradients = {
        to_scratchbert(name, kind): parameter.grad
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }
    model.zero_grad()  # a copy of the model must not hold the gradients
    for seen in values.values():
        seen.values = seen.values.detach()
    return {**values, **maps}, gradients


def non_padding_tokens(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The masks `(B, T)` of non-padding tokens of the encoder and the decoder (or of the only one), in the order in
    which data flows. The last one is that of the logits."""
    source = batch["attention_mask"].bool()
    if "decoder_attention_mask" not in batch:
        return {"": source}
    # The output of a decoder for a source of padding only depends on the kernel.
    return {"encoder": source, "decoder": batch["decoder_attention_mask"].bool() & source.any(dim=1, keepdim=True)}


def attention_maps(model, batch, tokens_of: dict[str, torch.Tensor]) -> dict[str, Observed]:
    """The attention weights of every layer between non-padding tokens, which only the eager kernel returns."""
    with eager(model), torch.no_grad():
        returned = model(**batch, output_attentions=True)
    seen = {}
    for stack, tokens in tokens_of.items():
        seen |= maps_of("attention", stack, returned[f"{stack}_attentions".removeprefix("_")], tokens, tokens)
    stack, tokens = list(tokens_of.items())[-1]
    keys = tokens_of.get("encoder", batch.get("encoder_attention_mask"))
    if keys is not None and "cross_attentions" in returned:
        seen |= maps_of("cross-attention", stack, returned.cross_attentions, tokens, keys.bool())
    return seen


def maps_of(kind: str, stack: str, maps, queries: torch.Tensor, keys: torch.Tensor) -> dict[str, Observed]:
    pairs = queries[:, :, None] & keys[:, None, :]
    return {
        f"{stack} layer {i}: {kind}".lstrip(): Observed(
            kind, stack, i, list(weights.shape), weights.permute(0, 2, 3, 1)[pairs]
        )
        for i, weights in enumerate(maps)
    }


@contextmanager
def eager(model) -> Iterator[None]:
    default = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        yield
    finally:
        model.set_attn_implementation(default)


def outputs(model, batch, tokens_of: dict[str, torch.Tensor]) -> dict[str, Observed]:
    """Everything else that a model returns, computed with its default attention kernel."""
    pooled, hook = [], None
    if getattr(model.base_model, "pooler", None) is not None:
        hook = model.base_model.pooler.register_forward_hook(lambda module, args, output: pooled.append(output))
    returned = model(**batch, output_hidden_states=True)
    if hook is not None:
        hook.remove()

    seen = {}
    for stack, tokens in tokens_of.items():
        embeddings, *layers = returned[f"{stack}_hidden_states".removeprefix("_")]
        named = {"embeddings": (None, embeddings)}
        named |= {f"layer {i}: hidden state": (i, states) for i, states in enumerate(layers)}
        for name, (layer, states) in named.items():
            seen[f"{stack} {name}".lstrip()] = Observed(
                "hidden state", stack, layer, list(states.shape), states[tokens]
            )
    # Outputs for a whole sequence come from its first token, which must not be padding.
    tokens = list(tokens_of.values())[-1]
    whole = tokens[:, 0]
    for output in pooled:
        seen["pooler"] = Observed("pooler", "", None, list(output.shape), output[whole])
    for field, name in LOGITS[short_name(type(model).__name__)].items():
        logits = returned[field]
        flat = logits.flatten() if name == "choice logits" else logits
        seen[name] = Observed("logits", "", None, list(logits.shape), flat[tokens if name in ONE_PER_TOKEN else whole])
    return seen


# ----------------------------------------------------------------------------------------------------------- comparison


@dataclass
class Row:
    """One line of the table."""

    what: str
    kind: str  # "hidden state", "attention", "cross-attention", "pooler", "logits" or "gradient"
    layer: int | None
    shape: list[int] | None  # None for gradients, of which a row has several tensors
    tensors: int
    max_abs: float
    # Of values: max_abs / max |reference|; of gradients: ‖difference‖ / ‖reference‖ of the worst tensor.
    relative: float
    own_error: float  # the reference's float32 error: max_abs of values, relative of gradients
    limit: float
    equal: bool
    worst: str | None = None  # of gradients: the tensor that all numbers but max_abs belong to


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
    rows = [value_row(name, ours[name], theirs[name], exact[name]) for name in in_order(theirs)]
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


def in_order(seen: dict[str, Observed]) -> list[str]:
    """The outputs' names in the order in which data flows."""
    stacks = ("encoder", "decoder", "")
    kinds = ("attention", "cross-attention", "hidden state", "pooler", "logits")

    def place(name):
        one = seen[name]
        layer = one.layer
        if layer is None:
            layer = -1 if one.kind == "hidden state" else math.inf
        return (stacks.index(one.stack), layer, kinds.index(one.kind))

    return sorted(seen, key=place)


def value_row(name: str, ours: Observed, theirs: Observed, exact: Observed) -> Row:
    max_abs = largest(ours.values - theirs.values)
    own_error = largest(theirs.values - exact.values)
    limit = max(TOLERANCE, own_error)
    return Row(
        what=name,
        kind=theirs.kind,
        layer=theirs.layer,
        shape=theirs.shape,
        tensors=1,
        max_abs=max_abs,
        relative=ratio(max_abs, largest(theirs.values)),
        own_error=own_error,
        limit=limit,
        equal=within(max_abs, limit),
    )


def gradient_rows(ours: dict, theirs: dict, exact: dict) -> list[Row]:
    """A row with the worst tensor of the embeddings, of each layer, and of each part after them."""
    whole = norm(torch.stack([gradient.norm() for gradient in exact.values()]))
    groups: dict[str, list[Row]] = {}
    for name in dict.fromkeys((*exact, *ours)):
        zero = torch.zeros(())  # a model without the tensor is equal only if no output depends on it
        our, their, true = (side.get(name, zero) for side in (ours, theirs, exact))
        scale = norm(true) if norm(true) > ZERO_GRADIENT * whole else whole
        relative, own_error = ratio(norm(our - their), scale), ratio(norm(their - true), scale)
        limit = max(TOLERANCE, own_error)
        block = re.search(r"\.blocks\.(\d+)\.", name)
        stack = re.match(r"model\.(encoder|decoder)\.(?=embeddings|encoder|pooler)", name)  # of a seq2seq model
        rest = name[stack.end() :] if stack else name.removeprefix("model.")
        part = f"layer {block[1]}" if block else rest.removeprefix("encoder.").split(".")[0]
        group = f"{stack[1]} {part}" if stack else part
        row = Row(
            what=f"gradient: {group.replace('_', ' ')}",
            kind="gradient",
            layer=int(block[1]) if block else None,
            shape=None,
            tensors=1,
            max_abs=largest(our - their),
            relative=relative,
            own_error=own_error,
            limit=limit,
            equal=within(relative, limit),
            worst=name,
        )
        groups.setdefault(group, []).append(row)
    return [merged(rows) for rows in groups.values()]


def merged(rows: list[Row]) -> Row:
    """One row for all tensors of a group, with the numbers of the worst one."""
    worst = max(rows, key=lambda row: row.relative / row.limit if math.isfinite(row.limit) else math.inf)
    return replace(
        worst,
        tensors=len(rows),
        max_abs=max(row.max_abs for row in rows),
        equal=all(row.equal for row in rows),
    )


def largest(values: torch.Tensor) -> float:
    """The largest absolute value; infinite if any is NaN, so that every comparison with a limit fails."""
    return not_nan(values.abs().max().item() if values.numel() else 0.0)


def norm(values: torch.Tensor) -> float:
    return not_nan(values.double().norm().item())


def not_nan(value: float) -> float:
    return math.inf if math.isnan(value) else value


def ratio(part: float, whole: float) -> float:
    if part == 0:
        return 0.0
    return not_nan(part / whole) if whole else math.inf


def within(difference: float, limit: float) -> bool:
    return math.isfinite(difference) and difference <= limit


# --------------------------------------------------------------------------------------------------------------- report


@dataclass
class Report:
    """The result, as it is written into the JSON file."""

    model: str
    reference: str
    batch: str
    not_compared: list[str]
    rows: list[Row]
    equal: bool
    verdict: str
    versions: dict[str, str]


def not_reached(checkpoint: Checkpoint) -> list[str]:
    """The tensors, or families of them, that the comparison does not reach."""
    tensors, config = checkpoint.tensors, checkpoint.config
    names = sorted(name for name, ours in tensors.items() if ours is None and not why_unused(name, checkpoint.kind))
    has_cross_attention = config.add_cross_attention or config.is_encoder_decoder
    if not has_cross_attention and any(".cross_attention." in (ours or "") for ours in tensors.values()):
        names.append("cross-attention")
    return names


def check(source: str, other: str | None, seed: int) -> Report:
    """Opens two checkpoints, compares them in every class that they have the tensors of, and prints the slow steps.

    Args:
        other: None: the reference class.
        seed: of random ids and of the scalar whose gradients are compared.

    Raises:
        ValueError: a checkpoint is invalid, or the two do not match.
        OSError: a file cannot be read.
    """
    subject = read_checkpoint(source)
    reference = read_checkpoint(other) if other is not None else None
    if reference is not None and subject.kind != "scratchbert" and reference.kind == "scratchbert":
        subject, reference = reference, subject  # the BERT is the reference
    checkpoints = [subject] if reference is None else [reference, subject]
    for side in checkpoints:
        if side.config.num_hidden_layers == 0:
            raise ValueError(f"{side.source} has no layers, so there is little to compare.")
    parts = set.intersection(*(side.parts for side in checkpoints))
    known = subject.classes
    check_same_size(checkpoints[0], checkpoints[-1], parts)

    texts, origin = encode(checkpoints, seed)
    batch = make_batch(texts, subject.config, seed)
    classes = covering_classes(known, parts, [name for side in checkpoints for name in side.architectures])
    rows, pairs = [], []
    for name in classes:
        pair = timed(f"loading both sides as …{name}", load_pair, subject, reference, name, "pooler" in parts)
        pairs.append([type(model).__name__ for model in pair])
        new = timed("comparing, with a float64 copy of the reference", compare, *pair, batch, seed)
        done = {row.what for row in rows}
        rows += [row for row in new if row.what not in done]
    rows.sort(key=lambda row: row.kind == "gradient")

    not_compared = [f"{part}, only in {side.source}" for side in checkpoints for part in sorted(side.parts - parts)]
    unreached = parts.difference(*(used_parts(known[name]) for name in classes))
    not_compared += [f"{part}, which no class has without parts that are missing here" for part in unreached]
    not_compared += [f"{name} of {side.source}" for side in checkpoints for name in not_reached(side)]
    ours, theirs = (" and ".join(names) for names in zip(*pairs, strict=True))
    exported = " exported to BERT" if reference is None and subject.kind == "scratchbert" else ""
    return Report(
        model=f"{ours} from {subject.source}",
        reference=f"{theirs} from {checkpoints[0].source}{exported}",
        batch=f"{len(texts)} {origin}; each padded to {batch['input_ids'].shape[1]} on the right and on the left, "
        f"{batch['attention_mask'].sum()} non-padding tokens in all",
        not_compared=not_compared,
        rows=rows,
        equal=all(row.equal for row in rows),
        verdict=verdict(rows) + ("; not everything was compared, see above" if not_compared else ""),
        versions=versions(),
    )


def timed(what: str, function, *args):
    print(f"{what} … ", end="", flush=True)
    start = time.perf_counter()
    result = function(*args)
    print(f"{time.perf_counter() - start:.1f} s", flush=True)
    return result


def verdict(rows: list[Row]) -> str:
    different = [row for row in rows if not row.equal]
    if different:
        first = different[0]
        measured = first.relative if first.kind == "gradient" else first.max_abs
        where = f"{first.what} ({first.worst})" if first.worst else first.what
        return (
            f"DIFFERENT: first at {where}: {measured:.1e} where {first.limit:.1e} is allowed; "
            f"{len(different)} of {len(rows)} rows differ"
        )
    if not any(row.max_abs for row in rows):
        return f"equal: bit for bit, in all {len(rows)} rows"
    value = max((row for row in rows if row.kind != "gradient"), key=lambda row: row.max_abs)
    gradient = max((row for row in rows if row.kind == "gradient"), key=lambda row: row.relative)
    return (
        f"equal: values within {value.max_abs:.1e} ({value.what}), gradients within {gradient.relative:.1e} of their "
        f"norm ({gradient.worst})"
    )


def versions() -> dict[str, str]:
    libraries = ("torch", "transformers", "scratchbert")
    return {"python": platform.python_version(), **{name: version(name) or "not installed" for name in libraries}}


def table(report: Report) -> str:
    """The report as text."""
    values = [row for row in report.rows if row.kind != "gradient"]
    gradients = [row for row in report.rows if row.kind == "gradient"]
    lines = [("what", "shape", "max abs", "relative", "own error", "verdict")]
    lines += [cells(row, "×".join(map(str, row.shape))) for row in values]
    lines += [(), ("gradients, worst tensor", "tensors", "max abs", "relative", "own error", "verdict")]
    lines += [cells(row, str(row.tensors)) for row in gradients]
    widths = [max(len(line[i]) for line in lines if line) for i in range(6)]
    text = "\n".join(
        "  ".join(cell.ljust(width) if i in (0, 5) else cell.rjust(width)
                  for i, (cell, width) in enumerate(zip(line, widths, strict=bool(line)))).rstrip()
        for line in lines
    )  # fmt: skip
    head = [f"model      {report.model}", f"reference  {report.reference}", f"batch      {report.batch}"]
    head += [f"not compared: {name}" for name in report.not_compared]
    legend = (
        "relative: max abs / max |reference|; of gradients, ‖difference‖ / ‖reference‖\n"
        "own error: of the reference, float32 against float64; of gradients, relative"
    )
    return "\n".join([*head, "", text, "", legend, report.verdict])


def cells(row: Row, shape: str) -> tuple[str, ...]:
    numbers = (f"{number:.1e}" if number else "0" for number in (row.max_abs, row.relative, row.own_error))
    return (row.what.removeprefix("gradient: "), shape, *numbers, "equal" if row.equal else "DIFFERS")


def plot(report: Report, path: Path) -> None:
    """Draws the difference of each layer on a log axis, whose lowest line is zero."""
    import matplotlib  # in an extra

    matplotlib.use("Agg")
    from matplotlib import pyplot

    styles = {
        "hidden state": ("tab:blue", "o", 9),
        "cross-attention": ("tab:green", "^", 7),
        "attention": ("tab:orange", "s", 5),
    }
    rows = [row for row in report.rows if row.kind in styles]
    places = list(dict.fromkeys(place(row) for row in rows))
    numbers = [number for row in rows for number in (row.max_abs, row.own_error) if 0 < number < math.inf]
    low, high = (math.floor(math.log10(bound)) for bound in (min([*numbers, TOLERANCE]), max([*numbers, TOLERANCE])))
    zero = 10.0 ** (low - 1)

    figure, axes = pyplot.subplots(figsize=(9, 5.5), layout="constrained")
    # The larger markers are drawn first, so that smaller ones on top of them stay visible.
    for kind, (colour, marker, size) in styles.items():
        chosen = [row for row in rows if row.kind == kind]
        if not chosen:
            continue
        layers = [places.index(place(row)) for row in chosen]
        differences = [on_axis(row.max_abs, zero) for row in chosen]
        own_errors = [on_axis(row.own_error, zero) for row in chosen]
        axes.plot(layers, differences, color=colour, marker=marker, markersize=size, label=f"{kind}: difference")
        axes.plot(layers, own_errors, color=colour, linestyle="--", label=f"{kind}: float32 error of the reference")
    axes.axhline(TOLERANCE, color="black", linestyle=":", label="1e-5, the tolerance")
    axes.set_yscale("log")
    powers = range(low, high + 2)
    axes.set_yticks([zero, *(10.0**power for power in powers)], ["0", *(f"1e{power}" for power in powers)])
    axes.minorticks_off()
    axes.set_xticks(range(len(places)), [name.split()[-1].replace("embeddings", "emb.") for name in places])
    axes.grid(axis="y", color="lightgrey", linewidth=0.5)
    axes.set_xlabel("layer of the encoder, then of the decoder" if places[0].startswith("encoder") else "layer")
    axes.set_ylabel("max absolute difference")
    axes.set_title(f"{shortened(report.model)}\nagainst {shortened(report.reference)}", fontsize="medium")
    figure.legend(fontsize="small", loc="outside lower center", ncols=2)
    with atomic_file(path) as temporary:
        figure.savefig(temporary, dpi=120)
    pyplot.close(figure)


def place(row: Row) -> str:
    """Where in the model the values of a row are: "embeddings", "decoder layer 3"."""
    return row.what.partition(":")[0]


def on_axis(number: float, zero: float) -> float:
    return (number or zero) if math.isfinite(number) else math.nan
