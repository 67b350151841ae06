#!/usr/bin/env python
"""Checks whether a text gets the same bits, whatever else is in the batch, in our model and in other runtimes.

    check_determinism.py MODEL                                     film reviews (scripts/data)
    check_determinism.py MODEL --data texts.csv --column text
    check_determinism.py MODEL --variants ours-optimised openvino --json report.json

Each variant computes the last hidden states of each text alone, then in random batchings, then alone again. A batching
is all texts, shuffled, in batches of 1 to 64, with 0 to 8 columns of extra padding on the right. The numbers of threads
take turns. The hidden states at non-padding tokens are compared, bit by bit, with those of the text alone.

The texts are of three kinds: pieces of 1 to 16 tokens, single texts, and about a tenth of joined texts, the longest
with as many tokens as the model has positions.

Columns: comparisons; those that differ; texts that differ in at least one comparison; and the largest absolute
difference. Runtimes that are not installed are skipped and listed.

Exit code: 0; 1 if one of our optimised variants (ours-optimised, ours-bf16, ours-int8) changes a text or fails; 2
bad usage, or a model or texts that cannot be read.
"""

import sys

from toolkit.benchmark import VARIANTS
from toolkit.cli import Parser, file_in_existing_folder, integer_from

DEFAULT_VARIANTS = [
    "bert",
    "onnx",
    "onnx-int8",
    "openvino",
    "ctranslate2",
    "ctranslate2-int8",
    "ours",
    "ours-optimised",
    "ours-bf16",
    "ours-int8",
]


def make_parser() -> Parser:
    parser = Parser(__file__, __doc__, usage="%(prog)s MODEL [--FLAG VALUE …]")
    parser.add_argument("model", metavar="MODEL", help="a BERT or ScratchBert with a tokenizer: a folder or a hub id")
    number = {"type": integer_from(1), "metavar": "N"}
    parser.add_texts("the texts, by default film reviews")
    data = parser.group("data")
    data.add_argument("--texts", **number, default=100, help="number of texts, the three kinds together")
    model = parser.group("model")
    model.add_argument(
        "--variants",
        nargs="+",
        choices=VARIANTS,
        metavar="NAME",
        default=DEFAULT_VARIANTS,
        help=f"some of {', '.join(VARIANTS)}",
    )
    evaluation = parser.group("evaluation")
    evaluation.add_argument("--batchings", **number, default=4, help="number of random batchings")
    evaluation.add_argument(
        "--threads",
        **number,
        nargs="+",
        default=[1, 2, 3],
        help="numbers of threads that take turns; ONNX Runtime, OpenVINO and CTranslate2 always use the last",
    )
    evaluation.add_argument("--seed", type=int, default=0, metavar="N", help="the seed of texts and batchings")
    parser.group("output").add_argument(
        "--json", metavar="FILE", type=file_in_existing_folder, help="write all numbers, the machine and the versions"
    )
    return parser


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code."""
    parser = make_parser()
    args = parser.parse_args(argv)
    if args.column is not None and args.data is None:
        parser.error("--column is given without --data; expected both, or neither for the film reviews")

    def work() -> int:
        from toolkit.determinism import check
        from toolkit.files import write_json

        report = check(args)
        if args.json is not None:
            write_json(args.json, report)
        return 1 if report["failures"] else 0

    return parser.run(work, is_silent=True)


if __name__ == "__main__":
    sys.exit(main())
