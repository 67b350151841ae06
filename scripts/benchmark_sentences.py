#!/usr/bin/env python
"""How many texts a second sentence-transformers embeds with a model as it is, and as convert_checkpoint.py makes it.

    benchmark_sentences.py sentence-transformers/all-MiniLM-L6-v2

The texts are film reviews (scripts/data). Everything runs in one process, in turns, each way once a repetition; the
time is the median over the repetitions.

Exit code: 0; 1 if an embedding differs by more than 1e-5; 2 bad usage, or a model that cannot be opened.
"""

import argparse
import csv
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
from huggingface_hub.errors import StrictDataclassError
from sentence_transformers import SentenceTransformer

import convert_checkpoint
from benchmark_variants import TOLERANCE, quiet
from benchmark_workloads import REVIEWS


def open_ways(source: str, folder: Path) -> dict[str, SentenceTransformer]:
    """The model as `source` has it, and twice as it is in `folder`, into which it is converted."""
    convert_checkpoint.convert(source, folder)
    ways = {"as it is": SentenceTransformer(source, device="cpu")}
    for name in ("converted", "optimised"):
        ways[name] = SentenceTransformer(str(folder), device="cpu", trust_remote_code=True)
    ways["optimised"][0].auto_model.optimize_for_inference()
    return ways


def measure(ways: dict[str, SentenceTransformer], texts: list[str], batch_size: int, repetitions: int):
    """The seconds that each way takes for all texts, and how far its embeddings are from the first one's."""
    seconds, differences = {name: [] for name in ways}, dict.fromkeys(ways, 0.0)
    for repetition in range(repetitions + 1):
        embeddings = {}
        for name in sorted(ways, reverse=bool(repetition % 2)):
            started = time.perf_counter()
            embeddings[name] = ways[name].encode(texts, batch_size=batch_size, convert_to_tensor=True)
            seconds[name] += [time.perf_counter() - started] if repetition else []  # the first one warms up
        reference = embeddings[next(iter(ways))]
        for name, found in embeddings.items():
            difference = (found - reference).abs().max().item()
            differences[name] = max(differences[name], difference) if difference == difference else float("inf")
    return {name: statistics.median(times) for name, times in seconds.items()}, differences


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", metavar="MODEL", help="a model of sentence-transformers, a BERT: a folder or a hub id")
    parser.add_argument("--texts", type=int, default=512, metavar="N", help="how many (default: %(default)s)")
    parser.add_argument("--batch-size", type=int, default=32, metavar="N", help="default: %(default)s")
    parser.add_argument("--repetitions", type=int, default=5, metavar="N", help="default: %(default)s")
    args = parser.parse_args(argv)
    for name in ("texts", "batch_size", "repetitions"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} is {getattr(args, name)}; it wants 1 or more")
    quiet()
    with open(REVIEWS, encoding="utf-8", newline="") as file:
        texts = [row["text"] for row in csv.DictReader(file)][: args.texts]
    with tempfile.TemporaryDirectory() as folder:
        try:
            ways = open_ways(args.model, Path(folder, "converted"))
        except (OSError, ValueError, StrictDataclassError) as error:
            print(f"benchmark_sentences: {args.model}: {' '.join(str(error).split())}", file=sys.stderr)
            return 2
        seconds, differences = measure(ways, texts, args.batch_size, args.repetitions)
    print(f"{len(texts)} texts, in batches of {args.batch_size}, {torch.get_num_threads()} threads")
    first = next(iter(ways))
    for name, took in seconds.items():
        print(f"{name:10} {len(texts) / took:8.1f} texts/s  ×{seconds[first] / took:.2f}  {differences[name]:.1e}")
    return int(max(differences.values()) > TOLERANCE)


if __name__ == "__main__":
    sys.exit(main())
