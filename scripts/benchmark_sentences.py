#!/usr/bin/env python
"""Times sentence-transformers with a model as it is and as convert_checkpoint.py converts it.

    benchmark_sentences.py sentence-transformers/all-MiniLM-L6-v2

The texts are film reviews (scripts/data). All variants run in one process, in turns, each once per repetition; the time
is the median over the repetitions. Columns: texts per second, the speed-up over the model as it is, and the largest
absolute difference to its embeddings.

Exit code: 0; 1 if an embedding differs by more than 1e-5; 2 bad usage, or a model that cannot be opened.
"""

import csv
import statistics
import sys
import tempfile
import time
from pathlib import Path

from toolkit.cli import Parser, about, integer_from, require


def open_variants(source: str, folder: Path) -> dict:
    """The model in `source` as it is, and converted into `folder`: as loaded and optimised for inference."""
    from sentence_transformers import SentenceTransformer

    from toolkit.conversion import convert

    convert(source, folder)
    variants = {"as it is": SentenceTransformer(source, device="cpu")}
    for name in ("converted", "optimised"):
        variants[name] = SentenceTransformer(str(folder), device="cpu", trust_remote_code=True)
    variants["optimised"][0].auto_model.optimize_for_inference()
    return variants


def measure(variants: dict, texts: list[str], batch_size: int, repetitions: int):
    """The median seconds that each variant takes for all texts, and the largest difference to the first one's
    embeddings."""
    seconds, differences = {name: [] for name in variants}, dict.fromkeys(variants, 0.0)
    for repetition in range(repetitions + 1):
        embeddings = {}
        for name in sorted(variants, reverse=bool(repetition % 2)):
            started = time.perf_counter()
            embeddings[name] = variants[name].encode(texts, batch_size=batch_size, convert_to_tensor=True)
            seconds[name] += [time.perf_counter() - started] if repetition else []  # the first repetition warms up
        reference = embeddings[next(iter(variants))]
        for name, found in embeddings.items():
            difference = (found - reference).abs().max().item()
            differences[name] = max(differences[name], difference) if difference == difference else float("inf")
    return {name: statistics.median(times) for name, times in seconds.items()}, differences


def make_parser() -> Parser:
    parser = Parser(__file__, __doc__, usage="%(prog)s MODEL [--FLAG VALUE …]")
    parser.add_argument("model", metavar="MODEL", help="a sentence-transformers model, a BERT: a folder or a hub id")
    number = {"type": integer_from(1), "metavar": "N"}
    parser.group("data").add_argument("--texts", **number, default=512, help="number of texts")
    evaluation = parser.group("evaluation")
    evaluation.add_argument("--batch_size", **number, default=32, help="texts per batch")
    evaluation.add_argument("--repetitions", **number, default=5, help="repetitions of each measurement")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code."""
    parser = make_parser()
    args = parser.parse_args(argv)

    def work() -> int:
        require("sentence_transformers")
        import torch

        from toolkit.benchmark.variants import TOLERANCE
        from toolkit.benchmark.workloads import REVIEWS
        from toolkit.hub import silence_libraries

        silence_libraries()
        with open(REVIEWS, encoding="utf-8", newline="") as file:
            texts = [row["text"] for row in csv.DictReader(file)][: args.texts]
        with tempfile.TemporaryDirectory() as folder:
            with about(args.model):
                variants = open_variants(args.model, Path(folder, "converted"))
            seconds, differences = measure(variants, texts, args.batch_size, args.repetitions)
        print(f"{len(texts)} texts, in batches of {args.batch_size}, threads: {torch.get_num_threads()}")
        first = next(iter(variants))
        for name, took in seconds.items():
            print(f"{name:10} {len(texts) / took:8.1f} texts/s  ×{seconds[first] / took:.2f}  {differences[name]:.1e}")
        return int(max(differences.values()) > TOLERANCE)

    return parser.run(work)


if __name__ == "__main__":
    sys.exit(main())
