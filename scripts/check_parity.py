#!/usr/bin/env python
"""Compares two models from the embeddings to the gradients, or the precisions of one model on your texts.

    check_parity.py path/to/bert                       a BERT opened by ScratchBert, with the Bert class itself
    check_parity.py path/to/scratchbert                a ScratchBert, with its own export to BERT
    check_parity.py path/to/scratchbert path/to/bert   a converted folder, with its source
    check_parity.py path/to/bert --output parity       also writes parity/report.json and parity/report.png
    check_parity.py path/to/bert --data texts.csv      the precisions of one model, on the texts of a file

A BERT may be an EncoderDecoderModel of two as well; encoder, decoder and cross-attention are then compared.

Both models run in float32, without dropout, on the same batch, and only non-padding tokens are compared. A value may
differ by 1e-5, or by as much as the reference differs from a float64 copy of itself if that is more; a gradient by 1e-5
of its tensor's norm, with the same allowance. The result is a table of differences with a verdict.

With --data, the result is a row for each precision of optimize_for_inference: the cosines of mean-pooled embeddings to
those in float32, the labels of texts or tokens that change, peak memory and speed.

A ScratchBert with a probe.json, which save_pretrained writes, is first verified against it.

Exit code: 0 the models are equal, or --data, 1 they differ, 2 bad usage, or files that cannot be read or verified.
"""

import sys
from dataclasses import asdict
from pathlib import Path

from toolkit.cli import Parser, integer_from, open_report_output


def make_parser() -> Parser:
    parser = Parser(__file__, __doc__, usage="%(prog)s MODEL [OTHER] [--FLAG VALUE …]")
    parser.add_argument("model", metavar="MODEL", help="a BERT or ScratchBert checkpoint: a folder or a hub id")
    parser.add_argument("other", metavar="OTHER", nargs="?", help="the checkpoint to compare with; default: as above")
    parser.add_texts("compare the precisions of MODEL on these texts")
    data = parser.group("data")
    data.add_argument("--rows", type=integer_from(1), metavar="N", help="use only the first N rows; default: 500")
    data.add_argument("--calibration", type=Path, metavar="FILE", help="of save_calibration; adds calibrated int8")
    parser.group("evaluation").add_argument(
        "--seed",
        type=int,
        default=0,
        metavar="N",
        help="the seed of the random ids, and of the scalar whose gradients are compared",
    )
    parser.add_report_output(
        "write all rows, the verdict and the versions",
        "draw the differences from layer to layer, or the cosines of the texts",
    )
    return parser


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code."""
    parser = make_parser()
    args = parser.parse_args(argv)
    if args.data is not None and args.other is not None:
        parser.error("OTHER is given with --data; expected MODEL alone. Omit OTHER or --data.")
    for name in ("column", "delimiter", "rows", "calibration"):
        if args.data is None and getattr(args, name) is not None:
            parser.error(f"--{name} is given without --data; expected both. Pass the texts, or omit --{name}.")

    def work() -> int:
        open_report_output(args)
        from toolkit import parity, precision
        from toolkit.files import write_json

        kind = parity if args.data is None else precision
        report = kind.check(args)
        print(f"\n{kind.as_text(report)}")
        if args.json is not None:
            rows = [row if isinstance(row, dict) else asdict(row) for row in report["rows"]]
            write_json(args.json, report | {"rows": rows})
        if args.plot is not None:
            kind.plot(report, args.plot)
        return 0 if report.get("equal", True) else 1

    return parser.run(work, expected=(RuntimeError,), is_silent=True)


if __name__ == "__main__":
    sys.exit(main())
