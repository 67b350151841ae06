#!/usr/bin/env python
"""Compares this package with transformers' BertModel and other runtimes: speed, memory and results.

    benchmark.py MODEL --rows texts.csv                your model, on the texts of your file
    benchmark.py MODEL --rows texts.csv --variants ours-optimised ours-bf16 ours-int8
    benchmark.py                                       BERT-base with random weights
    benchmark.py --quick --output speed                also writes speed/report.json and speed/report.png

The variants have the same weights. "bert", BertModel with sdpa in float32, always runs: others are compared with it.
Those that are not installed, or that this CPU does not support, are skipped and listed.

{variants}

The workloads are sets of batches: "reviews", film reviews in batches of 32; "reviews-sorted", the same, sorted by
length; "full-128", 16 sequences of 128 random tokens; "single" and "single-32", sentences of 12 and of 32 random
tokens, one at a time; "training" and "decoding", a step of these. With --rows, they are "rows", your texts sorted by
length, in batches of 32, and "single-rows", 20 of them, one at a time. Calibrated variants get 64 other texts, of your
file at most half.

The variants take turns on each batch, and the time of a batch is the median over the repetitions. On single sentences,
each variant runs alone in a new process for each repetition.

Columns: milliseconds per batch; texts per second; the speed-up over BertModel; the largest absolute difference to its
hidden states at non-padding tokens; the lowest and the mean cosine to its mean-pooled embedding of a text; how many
labels of texts or tokens change, in runtimes of torch with a classifier; and the memory that is allocated to open the
model and to compute the largest batch.

Exit code: 0; 1 if one of our variants fails or differs from BertModel (in float32, by more than 1e-5 of its largest
number; else, a cosine below 0.9); 2 if the benchmark cannot run.
"""

import os
import shlex
import sys
import tempfile
from pathlib import Path

from toolkit.benchmark import ROW_WORKLOADS, VARIANTS, WORKLOADS
from toolkit.common import Parser, add_reading_flags, identity, in_one_line, integer_from, table, write_json

QUICK_WORKLOADS = ["reviews", "full-128", "single", "decoding"]
QUICK_VARIANTS = ["bert", "openvino", "ours", "ours-optimised", "ours-int8"]
COLUMNS = ("ms/batch", "texts/s", "× bert", "max diff", "lowest cosine", "mean cosine", "changed labels", "peak MiB")


def make_parser() -> Parser:
    variants = table([(f"    {name}", f"{each.runtime}, {each.details}") for name, each in VARIANTS.items()])
    parser = Parser(__file__, __doc__.format(variants=variants), usage="%(prog)s [MODEL] [--FLAG VALUE …]")
    model = "a BERT or ScratchBert: a folder or hub id; default: BERT-base with random weights"
    parser.add_argument("model", metavar="MODEL", nargs="?", help=model)
    number = {"type": integer_from(1), "metavar": "N"}
    data = parser.group("data")
    data.add_argument("--rows", metavar="FILE", help="a table, JSON lines, Parquet, or a text on each line")
    add_reading_flags(data)
    data.add_argument("--limit", **number, default=500, help="use only the first N rows")
    evaluation = parser.group("evaluation")
    evaluation.add_argument("--workloads", nargs="+", choices=WORKLOADS, metavar="NAME", help="default: all")
    evaluation.add_argument("--variants", nargs="+", choices=VARIANTS, metavar="NAME", help="default: all")
    evaluation.add_argument("--quick", action="store_true", help="fewer workloads, variants, repetitions and batches")
    evaluation.add_argument("--repetitions", **number, help="default: 3, with --quick 1")
    evaluation.add_argument("--threads", **number, default=os.cpu_count(), help="threads of each runtime")
    output = "a folder for report.json, with all numbers, and report.png, the speed on each workload"
    parser.group("output").add_argument("--output", metavar="FOLDER", type=Path, help=output)
    return parser


def parse(argv: list[str] | None):
    """The parser, and the arguments with the defaults of the full or the quick benchmark."""
    parser = make_parser()
    args = parser.parse_args(argv)
    without_rows = ("text_column", "delimiter", "encoding", "limit")
    for name in without_rows if args.rows is None else ("workloads",):
        if getattr(args, name) != parser.get_default(name):
            parser.error(f"--{name} is given {'with' if args.rows else 'without'} --rows; omit one of them")
    if args.rows is not None:
        args.workloads = list(ROW_WORKLOADS)
    args.workloads = args.workloads or (QUICK_WORKLOADS if args.quick else list(WORKLOADS))
    args.variants = args.variants or (QUICK_VARIANTS if args.quick else list(VARIANTS))
    args.repetitions = args.repetitions or (1 if args.quick else 3)
    args.command = shlex.join(["scripts/benchmark.py", *(sys.argv[1:] if argv is None else argv)])
    return parser, args


def print_rows(workload: str, rows: list[dict]) -> None:
    """Prints the table of a workload, and the texts with the lowest cosines."""
    batches, sequences, fill_rate = (rows[0][name] for name in ("batches", "sequences", "fill_rate"))
    print(f"\n{workload}: batches: {batches}, sequences: {sequences}, fill rate {fill_rate:.0%}")
    print(table([("variant", *COLUMNS), *map(cells, rows)]))
    for row in rows:
        if row["lowest"] is not None:
            print(f"lowest cosine of {row['variant']}: {row['lowest']}")


def cells(row: dict) -> tuple[str, ...]:
    return (
        row["variant"] + ("  WRONG" if row["is_wrong"] else ""),
        f"{1000 * row['seconds_per_batch']:.1f}",
        f"{row['sequences_per_second']:.1f}",
        f"{row['vs_bert']:.2f}",
        f"{row['max_abs']:.1e}",
        f"{row['cosine_lowest']:.5f}",
        f"{row['cosine_mean']:.5f}",
        f"{row['changed_labels']} of {row['labels']}" if row["labels"] else "–",
        f"{row['peak_anonymous_mib']:.0f}",
    )


def run(args) -> dict:
    """Runs the workloads, prints the results, and returns the report, as it is written into the JSON file.

    Raises:
        CommandError, OSError, ValueError: the model or the rows cannot be read.
        RuntimeError: BertModel fails.
    """
    import torch

    from toolkit.benchmark.measure import run_workloads
    from toolkit.benchmark.steps import decode, train
    from toolkit.benchmark.variants import missing, save_model
    from toolkit.benchmark.workloads import make_workloads

    torch.set_num_threads(args.threads)
    machine = identity()
    print(in_one_line(machine), f"threads: {args.threads}", sep="\n", flush=True)
    rows, unavailable, training, decoding = [], {}, None, []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config = save_model(args.model, folder)
        workloads = make_workloads(args, config, folder)
        reviews = workloads.pop("training", None)
        if workloads:
            names = list(dict.fromkeys(["bert", *args.variants]))
            rows, unavailable = run_workloads(names, workloads, folder, args)
        for workload in workloads:
            print_rows(workload, [row for row in rows if row["workload"] == workload])
        print("", *(f"skipped {name}: {reason}" for name, reason in unavailable.items()), sep="\n")
        if reviews is not None:
            training = train(folder, reviews.batches, args.repetitions)
            print(f"training step, × BertForSequenceClassification: {training['vs_bert']:.2f}", flush=True)
        for row in decode(folder, config, args) if "decoding" in args.workloads else ():
            decoding.append(row)
            speeds = ", ".join(f"{name} {speed:.2f}" for name, speed in row["vs_bert"].items())
            print(
                f"decoding step, batch {row['batch']}, {row['decoding']}, × EncoderDecoderModel: {speeds}", flush=True
            )
    failures = [
        *(f"{name}: {unavailable[name]}" for name in unavailable if name.startswith("ours") and not missing(name)),
        *(f"{row['variant']} on {row['workload']}: differs from BertModel" for row in rows if row["is_wrong"]),
    ]
    return {
        "machine": {**machine, "threads": args.threads},
        "model": args.model or "BERT-base, random weights",
        "command": args.command,
        "rows": rows,
        "unavailable": unavailable,
        "training": training,
        "decoding": decoding,
        "failures": failures,
    }


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code."""
    parser, args = parse(argv)

    def work() -> int:
        from toolkit.pictures import plot_speeds

        report = run(args)
        if args.output is not None:
            write_json(args.output / "report.json", report)
            plot_speeds(report, args.output / "report.png")
        print("", *(report["failures"] or ["None of our variants failed or differs from BertModel."]), sep="\n")
        return 1 if report["failures"] else 0

    return parser.run(work, expected=(RuntimeError,), is_silent=True)


if __name__ == "__main__":
    sys.exit(main())
