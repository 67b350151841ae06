#!/usr/bin/env python
"""Times the model, transformers' BertModel and other runtimes with the same weights.

    benchmark.py --output speed                        also writes speed/report.json and speed/report.png
    benchmark.py --quick
    benchmark.py --workloads reviews single --variants openvino ours-optimised --memory
    benchmark.py --workloads decoding

All variants run in one process, in turns: for each repetition and batch, each variant once, on the same padded batch
with its mask. The time of a batch is the median over the repetitions; a row has the mean over its batches.

The workloads single-1, single and single-32 are one sentence of 1, 12 and 32 tokens. Each variant runs alone in
--processes new processes, in turns: 20 sentences, three times each, whatever --repetitions and --batches. A row has the
median over the processes. "reviews-sorted" has the texts of "reviews", sorted by length before they are batched.
"decoding" times those of our variants that generate (as loaded, optimised, bfloat16, int8) beside EncoderDecoderModel
in float32.

Columns: sequences and non-padding tokens per second; milliseconds per batch; the speed-up over BertModel (the variant
"bert": sdpa, float32; always timed); the GEMM lower bound, the time of the blocks' matrix products on non-padding
tokens at the best rate measured here, as a share of the time; the largest absolute difference to BertModel at
non-padding tokens; and, except in float32, the lowest and the mean cosine to its mean-pooled embedding of a sequence.

The variants bert-cuda, bert-cuda-flash (flash attention, on packed sequences) and ours-cuda run in bfloat16 on a GPU.
Their times include copying the token ids to it, and they have no GEMM lower bound.

Variants that fail are reported with the reason. Runtimes that are not installed are skipped and listed, as are those
that compute bfloat16 on a CPU without instructions for it, or require a GPU that is not there.

Exit code: 0; 1 if one of our variants differs from BertModel (float32, by more than 1e-5), generates other tokens in
float32, or fails; 2 if the benchmark cannot run.
"""

import os
import shlex
import sys

from toolkit.benchmark import VARIANT_NAMES, WORKLOADS
from toolkit.cli import Parser, integer_from, open_report_output

FULL = {
    "workloads": list(WORKLOADS),
    "variants": list(VARIANT_NAMES),
    "repetitions": 5,
    "batches": 4,
    "processes": 3,
    "cases": [(batch, way) for batch in (1, 8, 32) for way in ("greedy", "beam 4")],
    "tokens": 24,
}
QUICK = {
    "workloads": ["reviews", "mix", "full-128", "single", "decoding"],
    "variants": ["bert", "openvino", "ours", "ours-optimised"],
    "repetitions": 2,
    "batches": 1,
    "processes": 1,
    "cases": [(8, "greedy")],
    "tokens": 8,
}


def make_parser() -> Parser:
    parser = Parser(__file__, __doc__, usage="%(prog)s [--FLAG VALUE …]")
    parser.group("data").add_argument(
        "--workloads", nargs="+", choices=WORKLOADS, metavar="NAME", help=f"some of {', '.join(WORKLOADS)}"
    )
    model = parser.group("model")
    model.add_argument(
        "--model", metavar="MODEL", help="a BERT or ScratchBert: a folder or hub id; default: BERT-base, random weights"
    )
    model.add_argument(
        "--variants", nargs="+", choices=VARIANT_NAMES, metavar="NAME", help=f"some of {', '.join(VARIANT_NAMES)}"
    )
    evaluation = parser.group("evaluation")
    evaluation.add_argument("--quick", action="store_true", help="fewer workloads, variants, repetitions and batches")
    number = {"type": integer_from(1), "metavar": "N"}
    evaluation.add_argument(
        "--repetitions", **number, help="repetitions of each measurement; default: 5, with --quick 2"
    )
    evaluation.add_argument("--batches", **number, help="batches of each workload; default: 4, with --quick 1")
    evaluation.add_argument("--processes", **number, help="for single sentences; default: 3, with --quick 1")
    evaluation.add_argument("--threads", **number, default=os.cpu_count(), help="threads of each runtime")
    evaluation.add_argument(
        "--memory", action="store_true", help="also measure the peak memory of each variant, in a new process"
    )
    evaluation.add_argument("--seed", type=int, default=0, metavar="N", help="the seed of weights, ids and lengths")
    parser.add_report_output("write all numbers", "draw the speed in each precision, and time against tokens")
    return parser


def parse(parser: Parser, argv: list[str] | None):
    """The arguments, with the defaults of the full or the quick benchmark."""
    args = parser.parse_args(argv)
    for name, value in (QUICK if args.quick else FULL).items():
        if getattr(args, name, None) is None:
            setattr(args, name, value)
    args.command = shlex.join(["scripts/benchmark.py", *(sys.argv[1:] if argv is None else argv)])
    args.draws = not set(args.workloads) <= {"training", "decoding"}  # whether the picture has any of them
    if args.plot is not None and not args.draws:
        parser.error(f"--plot draws none of {' and '.join(args.workloads)}; leave it out, or name more --workloads")
    return args


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code."""
    parser = make_parser()
    args = parse(parser, argv)

    def work() -> int:
        open_report_output(args)
        from toolkit.benchmark.measure import benchmark, print_lines
        from toolkit.benchmark.plot import plot
        from toolkit.files import write_json

        report = benchmark(args)
        if args.json is not None:
            write_json(args.json, report)
        if args.plot is not None and args.draws:
            plot(report, args.plot)
        print_lines("", *(report["failures"] or ["Our variants agree with BertModel throughout."]))
        return 1 if report["failures"] else 0

    return parser.run(work, expected=(RuntimeError,), is_silent=True)


if __name__ == "__main__":
    sys.exit(main())
