"""The work of check_parity.py: opens two models, one of them usually a `Bert…`, compares them, and reports."""

import math
import platform
import tempfile
import time
from pathlib import Path

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import EncoderDecoderModel

from modeling_scratchbert import ScratchBertConfig
from toolkit.checkpoint import (
    Checkpoint,
    covering_classes,
    decoder_of,
    load,
    open_tokenizer_if_any,
    read_checkpoint,
    used_parts,
    why_unused,
)
from toolkit.cli import shortened, table
from toolkit.comparison import TOLERANCE, Row, compare
from toolkit.machine import version
from toolkit.pictures import new_figure

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
    names = [
        "is_encoder_decoder",
        "add_cross_attention",
        "vocab_size",
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "max_position_embeddings",
        "type_vocab_size",
    ]
    names += ["num_labels"] if parts & {"classifier", "qa_outputs"} else []
    sizes = [
        {name: getattr(side.config, name) for name in names}
        | {"num_decoder_layers": side.config.decoder_config().num_hidden_layers}
        for side in (one, other)
    ]
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
    lengths = [min(length, config.max_position_embeddings) for length in RANDOM_LENGTHS]
    ids = [torch.randint(config.vocab_size, (length,), generator=generator).tolist() for length in lengths]
    rows = [(row, [0] * (len(row) // 2) + [1] * (len(row) - len(row) // 2)) for row in ids]
    return rows, f"rows of random ids (seed {seed}), because the checkpoint has no suitable tokenizer"


def make_batch(
    rows: list[tuple[list[int], list[int]]], config: ScratchBertConfig, seed: int = 0
) -> dict[str, torch.Tensor]:
    """Every row twice in one batch, padded on the right and on the left: `(2 B, T)`. The targets of a seq2seq model are
    the same rows in reverse order; a decoder with cross-attention attends to random encoder outputs."""

    def padded(columns, value):
        rows = [torch.tensor(column, dtype=torch.long) for column in columns]
        return torch.cat([pad_sequence(rows, True, value, padding_side=side) for side in ("right", "left")])

    types = padded([types for _, types in rows], 0).clamp(max=config.type_vocab_size - 1)
    batch = {
        "input_ids": padded([ids for ids, _ in rows], config.pad_token_id or 0),
        "attention_mask": padded([[1] * len(ids) for ids, _ in rows], 0),
        "token_type_ids": types,
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
        return tuple(load(side, side.kind, name, pooler) for side in (subject, reference))
    model = load(subject, "scratchbert", name, pooler)
    if subject.kind != "scratchbert":
        return model, load(subject, subject.kind, name, pooler)
    with tempfile.TemporaryDirectory() as folder:
        if subject.config.is_encoder_decoder:
            save_as_two_berts(model, Path(folder))
        else:
            model.save_as_bert(folder)
        exported = read_checkpoint(folder)
        return model, load(exported, exported.kind, name, pooler)


def save_as_two_berts(model, folder: Path) -> None:
    """Writes the `EncoderDecoderModel` that computes the same as our seq2seq model, from exports of its encoder and
    decoder.

    Raises:
        ValueError: BERT cannot express the model, or it has no model head, which an `EncoderDecoderModel` always has.
    """
    if not hasattr(model, "lm_head"):
        raise ValueError(
            f"{type(model).__name__} has no model head, and an EncoderDecoderModel always has one; "
            "expected another ScratchBert to compare it with."
        )
    folders = (folder / "encoder", folder / "decoder")
    model.get_encoder().save_as_bert(folders[0])
    decoder_of(model).save_as_bert(folders[1])
    EncoderDecoderModel.from_encoder_decoder_pretrained(*folders).save_pretrained(folder)


# --------------------------------------------------------------------------------------------------------------- report


def not_reached(checkpoint: Checkpoint) -> list[str]:
    """The tensors, or families of them, that the comparison does not reach."""
    tensors, config = checkpoint.tensors, checkpoint.config
    names = sorted(name for name, ours in tensors.items() if ours is None and not why_unused(name, checkpoint.kind))
    has_cross_attention = config.add_cross_attention or config.is_encoder_decoder
    if not has_cross_attention and any(".cross_attention." in (ours or "") for ours in tensors.values()):
        names.append("cross-attention")
    return names


def check(args) -> dict:
    """Opens two checkpoints, compares them in every class that they have the tensors of, and prints the slow steps.
    Returns the report, as it is written into the JSON file, but for `rows`, a list of `Row`.

    Args:
        args: as the command `check_parity` parses them.

    Raises:
        ValueError: a checkpoint is invalid, or the two do not match.
        OSError: a file cannot be read.
    """
    seed, subject = args.seed, read_checkpoint(args.model)
    reference = read_checkpoint(args.other) if args.other is not None else None
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
    padding = f"each padded to {batch['input_ids'].shape[1]} on the right and on the left"
    versions = {name: version(name) or "not installed" for name in ("torch", "transformers", "scratchbert")}
    return {
        "model": f"{ours} from {subject.source}",
        "reference": f"{theirs} from {checkpoints[0].source}{exported}",
        "batch": f"{len(texts)} {origin}; {padding}, {batch['attention_mask'].sum()} non-padding tokens in all",
        "not_compared": not_compared,
        "rows": rows,
        "equal": all(row.equal for row in rows),
        "verdict": verdict(rows) + ("; not everything was compared, see above" if not_compared else ""),
        "versions": {"python": platform.python_version(), **versions},
    }


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
        where = f"{first.what} ({first.worst})" if first.worst else first.what
        return (
            f"DIFFERENT: first at {where}: {first.measured:.1e} where {first.limit:.1e} is allowed; "
            f"{len(different)} of {len(rows)} rows differ"
        )
    if not any(row.max_abs for row in rows):
        return f"equal: bit for bit, in all {len(rows)} rows"
    value = max((row for row in rows if row.kind != "gradient"), key=lambda row: row.max_abs)
    gradient = max((row for row in rows if row.kind == "gradient"), key=lambda row: row.relative)
    return (
        f"equal: values within {value.max_abs:.1e} ({value.what}), gradients within {gradient.relative:.1e} of "
        f"their norm ({gradient.worst})"
    )


def as_text(report: dict) -> str:
    """The report as text."""
    values = [row for row in report["rows"] if row.kind != "gradient"]
    gradients = [row for row in report["rows"] if row.kind == "gradient"]
    lines = [("what", "shape", "max abs", "relative", "own error", "verdict")]
    lines += [cells(row, "×".join(map(str, row.shape))) for row in values]
    lines += [(), ("gradients, worst tensor", "tensors", "max abs", "relative", "own error", "verdict")]
    lines += [cells(row, str(row.tensors)) for row in gradients]
    head = [f"model      {report['model']}", f"reference  {report['reference']}", f"batch      {report['batch']}"]
    head += [f"not compared: {name}" for name in report["not_compared"]]
    legend = (
        "relative: max abs / max |reference|; of gradients, ‖difference‖ / ‖reference‖\n"
        "own error: of the reference, float32 against float64; of gradients, relative"
    )
    return "\n".join([*head, "", table(lines), "", legend, report["verdict"]])


def cells(row: Row, shape: str) -> tuple[str, ...]:
    numbers = (f"{number:.1e}" if number else "0" for number in (row.max_abs, row.relative, row.own_error))
    verdict = f"{'equal' if row.equal else 'DIFFERS':7}"  # as wide as its header, so that it is on the left
    return (row.what.removeprefix("gradient: "), shape, *numbers, verdict)


def plot(report: dict, path: Path) -> None:
    """Draws the difference of each layer on a log axis, which is linear below the smallest number, down to zero."""
    styles = {
        "hidden state": ("tab:blue", "o", 9),
        "cross-attention": ("tab:green", "^", 7),
        "attention": ("tab:orange", "s", 5),
    }
    rows = [row for row in report["rows"] if row.kind in styles]
    places = list(dict.fromkeys(place(row) for row in rows))
    numbers = [number for row in rows for number in (row.max_abs, row.own_error, TOLERANCE) if number > 0]
    smallest = 10.0 ** math.floor(math.log10(min(numbers)))

    with new_figure(path, 9, 5.5) as figure:
        axes = figure.subplots()
        axes.set_yscale("symlog", linthresh=smallest)
        # The larger markers are drawn first, so that smaller ones on top of them stay visible.
        for kind, (colour, marker, size) in styles.items():
            chosen = [row for row in rows if row.kind == kind]
            layers = [places.index(place(row)) for row in chosen]
            differences, own_errors = [row.max_abs for row in chosen], [row.own_error for row in chosen]
            if chosen:
                labels = [f"{kind}: {what}" for what in ("difference", "float32 error of the reference")]
                axes.plot(layers, differences, color=colour, marker=marker, markersize=size, label=labels[0])
                axes.plot(layers, own_errors, color=colour, linestyle="--", label=labels[1])
        axes.axhline(TOLERANCE, color="black", linestyle=":", label="1e-5, the tolerance")
        axes.set_ylim(bottom=-smallest / 5)  # so that the markers at zero are whole
        axes.set_xticks(range(len(places)), [name.split()[-1].replace("embeddings", "emb.") for name in places])
        axes.grid(axis="y", color="lightgrey", linewidth=0.5)
        axes.set_xlabel("layer of the encoder, then of the decoder" if places[0].startswith("encoder") else "layer")
        axes.set_ylabel("max absolute difference")
        axes.set_title(f"{shortened(report['model'])}\nagainst {shortened(report['reference'])}", fontsize="medium")
        figure.legend(fontsize="small", loc="outside lower center", ncols=2)


def place(row: Row) -> str:
    """Where in the model the values of a row are: "embeddings", "decoder layer 3"."""
    return row.what.partition(":")[0]
