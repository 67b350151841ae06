"""The check that a text gets the same bits alone and in any batch, for the variants of the benchmark."""

import math
import random
import tempfile
from pathlib import Path

import torch

from modeling_scratchbert.probe.recording import to_bits
from toolkit.benchmark.variants import Run, missing, open_variants, save_model
from toolkit.benchmark.workloads import REVIEWS, pad
from toolkit.cli import about, described
from toolkit.comparison import largest
from toolkit.hub import check_vocabulary, open_tokenizer
from toolkit.inputs import read_texts
from toolkit.machine import identity, lines

OPTIMISED = ("ours-optimised", "ours-bf16", "ours-int8")
LONGEST_PIECE = 16  # tokens
LARGEST_BATCH = 64  # texts
LARGEST_PADDING = 8  # columns
HEADER = "variant                comparisons  different  changed texts   max abs"

# All texts in batches, each with the numbers of its texts.
Batching = list[tuple[list[int], dict[str, torch.Tensor]]]


# --------------------------------------------------------------------------------------------------------------- texts


def token_sequences(texts: list[str], tokenizer, config, count: int, generator: random.Random) -> list[torch.Tensor]:
    """The ids of at most `count` sequences: pieces of texts, one of each length up to 16 tokens; single texts; and a
    tenth of joined texts, of max_position_embeddings tokens down to half of it.

    Raises:
        ValueError: the tokenizer does not fit the model.
    """
    check_vocabulary(len(tokenizer), config)
    longest = config.max_position_embeddings
    chosen = generator.sample(texts, min(count, len(texts)))
    encoded = tokenizer(chosen, truncation=True, max_length=longest)["input_ids"]
    single = [torch.tensor(ids) for ids in encoded if ids]
    joined = torch.cat(single)
    joined = joined.repeat(1 + longest // len(joined))
    pieces, tenth = min(LONGEST_PIECE, longest, count // 2), math.ceil(count / 10)
    lengths = [*range(1, pieces + 1), *(longest - longest * i // (2 * tenth) for i in range(tenth))]
    starts = [generator.randint(0, len(joined) - length) for length in lengths]
    cut = [joined[start : start + length] for start, length in zip(starts, lengths, strict=True)]
    return cut + single[: count - len(cut)]


def random_batching(rows: list[torch.Tensor], longest: int, generator: random.Random) -> Batching:
    """The sequences, shuffled, in batches of random sizes, with random extra padding up to `longest` tokens."""
    order, batches = generator.sample(range(len(rows)), len(rows)), []
    while order:
        size, padding = generator.randint(1, LARGEST_BATCH), generator.randint(0, LARGEST_PADDING)
        numbers, order = order[:size], order[size:]
        own = [rows[number] for number in numbers]
        batch = pad(own)
        padding = min(padding, longest - max(map(len, own)))
        batch = {name: torch.nn.functional.pad(each, (0, padding)) for name, each in batch.items()}
        batches.append((numbers, batch))
    return batches


# --------------------------------------------------------------------------------------------------------------- check


def examine(run: Run, rows: list[torch.Tensor], batchings: list[Batching], threads: list[int]) -> dict:
    """The comparisons of each text in later batchings with the first, in which it is alone.

    Args:
        threads: the numbers of threads of torch, which the batchings take in turns.
    """
    alone: dict[int, torch.Tensor] = {}
    differences: list[tuple[int, float]] = []  # the number of a text, and how much it differs
    for i, batching in enumerate(batchings):
        torch.set_num_threads(threads[i % len(threads)])
        for numbers, batch in batching:
            for number, hidden in zip(numbers, run(batch), strict=True):
                states = hidden[: len(rows[number])]
                if i == 0:
                    alone[number] = states.clone()
                elif not torch.equal(to_bits(states), to_bits(alone[number])):  # 0 and -0 differ, NaN equals itself
                    differences.append((number, largest(states.float() - alone[number].float())))
    changed = {number for number, _ in differences}
    return {
        "comparisons": (len(batchings) - 1) * len(rows),
        "different": len(differences),
        "changed_texts": len(changed),
        "tokens_of_changed_texts": sorted(len(rows[number]) for number in changed),
        "max_abs": max((difference for _, difference in differences), default=0.0),
    }


def print_lines(*lines: str) -> None:
    print(*lines, sep="\n", flush=True)


def line(row: dict) -> str:
    if row["error"] is not None:
        return f"{row['variant']:21} {row['error']}"
    return (
        f"{row['variant']:21} {row['comparisons']:12} {row['different']:10} {row['changed_texts']:14} "
        f"{row['max_abs']:9.1e}"
    )


def failures(report: dict) -> list[str]:
    """The reasons for exit code 1, in words."""
    found = [
        f"{name}: {reason}"
        for name, reason in report["unavailable"].items()
        if name in OPTIMISED and missing(name) is None
    ]
    return found + [
        f"{row['variant']}: {row['error'] or 'changes texts'}"
        for row in report["rows"]
        if row["variant"] in OPTIMISED and (row["error"] is not None or row["changed_texts"])
    ]


def check(args) -> dict:
    """Runs the variants, prints a row for each, and returns the report, as it is written into the JSON file.

    Args:
        args: as the command `check_determinism` parses them.

    Raises:
        CommandError: the model cannot be opened.
        OSError, ValueError: the texts cannot be read.
    """
    texts = [row["text"] for row in read_texts(args.data or REVIEWS, args.column, args.delimiter)]
    generator = random.Random(args.seed)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with about(args.model):
            config = save_model(args.model, folder)
            rows = token_sequences(texts, open_tokenizer(args.model), config, args.texts, generator)
        longest = config.max_position_embeddings
        alone = [([number], pad([row])) for number, row in enumerate(rows)]
        batchings = [alone, *(random_batching(rows, longest, generator) for _ in range(args.batchings)), alone]
        report = {
            "machine": identity(),
            "model": args.model,
            "config": config.to_dict(),
            "seed": args.seed,
            "threads": args.threads,
            "batchings": args.batchings,
            "tokens": sorted(map(len, rows)),
            "unavailable": {},
            "rows": [],
        }
        print_lines(
            f"{len(rows)} texts of {report['tokens'][0]} to {report['tokens'][-1]} tokens, batchings: "
            f"{args.batchings}, threads: {', '.join(map(str, args.threads))}\n\n{HEADER}"
        )
        for variant in dict.fromkeys(args.variants):
            check_variant(report, variant, folder, rows, batchings)
    print_lines("", *(f"skipped {name}: {reason}" for name, reason in report["unavailable"].items()))
    report["failures"] = failures(report)
    result = report["failures"] or ["No optimised variant that ran changes a text."]
    print_lines(*lines(report["machine"]), "", *result)
    return report


def check_variant(report: dict, name: str, folder: Path, rows: list[torch.Tensor], batchings: list[Batching]) -> None:
    """Adds a variant to the report, and prints its row. It is closed before the next one is opened."""
    torch.set_num_threads(report["threads"][-1])
    runs, unavailable = open_variants([name], folder, report["threads"][-1])
    report["unavailable"] |= unavailable
    for run in runs.values():
        try:
            row = {"variant": name, "error": None, **examine(run, rows, batchings, report["threads"])}
        except Exception as error:  # a runtime can raise any exception
            row = {"variant": name, "error": described(error)}
        report["rows"].append(row)
        print_lines(line(row))
