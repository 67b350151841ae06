#!/usr/bin/env python
"""Compares two models from the embeddings to the gradients.

    check_parity.py path/to/bert                       a BERT opened by ScratchBert, with the Bert class itself
    check_parity.py path/to/scratchbert                a ScratchBert, with its own export to BERT
    check_parity.py path/to/scratchbert path/to/bert   a converted folder, with its source
    check_parity.py path/to/bert --output parity       also writes parity/report.json and parity/report.png

A BERT may be an EncoderDecoderModel of two as well; encoder, decoder and cross-attention are then compared.

Both models run in float32, without dropout, on the same batch, and only non-padding tokens are compared. A value may
differ by 1e-5, or by as much as the reference differs from a float64 copy of itself if that is more; a gradient by 1e-5
of its tensor's norm, with the same allowance. The result is a table of differences with a verdict.

A ScratchBert with a probe.json, which save_pretrained writes, is first verified against it.

Exit code: 0 the models are equal, 1 they differ, 2 bad usage, or files that cannot be read or verified.
"""

import sys
from dataclasses import asdict

from toolkit.cli import Parser, open_report_output


def make_parser() -> Parser:
    parser = Parser(__file__, __doc__, usage="%(prog)s MODEL [OTHER] [--FLAG VALUE …]")
    parser.add_argument("model", metavar="MODEL", help="a BERT or ScratchBert checkpoint: a folder or a hub id")
    parser.add_argument("other", metavar="OTHER", nargs="?", help="the checkpoint to compare with; default: as above")
    parser.group("evaluation").add_argument(
        "--seed",
        type=int,
        default=0,
        metavar="N",
        help="the seed of the random ids, and of the scalar whose gradients are compared",
    )
    parser.add_report_output(
        "write all rows, the verdict and the versions",
        "draw the differences from layer to layer",
    )
    return parser


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code."""
    parser = make_parser()
    args = parser.parse_args(argv)

    def work() -> int:
        open_report_output(args)
        from toolkit import parity
        from toolkit.files import write_json

        report = parity.check(args)
        print(f"\n{parity.as_text(report)}")
        if args.json is not None:
            write_json(args.json, report | {"rows": [asdict(row) for row in report["rows"]]})
        if args.plot is not None:
            parity.plot(report, args.plot)
        return 0 if report["equal"] else 1

    return parser.run(work, expected=(RuntimeError,), is_silent=True)


if __name__ == "__main__":
    sys.exit(main())
