"""Times `predict.py` beside sentence-transformers: whole commands, over all film reviews of scripts/data.

    python tests/docs/corpus_speed.py all-MiniLM-L6-v2 --json corpus.json

The commands run in turns, in two rounds. A time is the median over the rounds. A cosine is that of a text's embedding
to the one of `encode`, the lowest of all texts.
"""

import argparse
import sys
import tempfile
from pathlib import Path

import numpy

from record import ROOT, measure, medians
from toolkit.common import write_json

REVIEWS = ROOT / "scripts" / "data" / "movie_reviews"
ROUNDS = 2
ENCODE = """
import csv, sys
from pathlib import Path
import numpy
from sentence_transformers import SentenceTransformer

if __name__ == "__main__":
    model, folder, processes, output = sys.argv[1:]
    texts = []
    for file in sorted(Path(folder).glob("*.csv")):
        with file.open(encoding="utf-8", newline="") as rows:
            texts += [row["text"] for row in csv.DictReader(rows)]
    model = SentenceTransformer(model, device="cpu")
    if processes == "1":
        embeddings = model.encode(texts)
    else:
        pool = model.start_multi_process_pool(["cpu"] * int(processes))
        embeddings = model.encode(texts, pool=pool)
        model.stop_multi_process_pool(pool)
    Path(output).mkdir()
    numpy.save(Path(output) / "embeddings.npy", embeddings)
"""


def embeddings(folder: Path) -> numpy.ndarray:
    rows = numpy.load(folder / "embeddings.npy")
    return rows / numpy.linalg.norm(rows, axis=1, keepdims=True)


def measure_round(model: str, folder: Path) -> dict[str, dict]:
    """Runs each command once, with its output in the folder, and returns its time and its lowest cosine."""
    script = folder / "encode.py"
    script.write_text(ENCODE, encoding="utf-8")
    encode = [script, model, REVIEWS]
    predict = [ROOT / "scripts" / "predict.py", model, REVIEWS, "--format", "npy", "--dtype"]
    variants = {
        "encode": [*encode, "1"],
        "encode-pool": [*encode, "2"],
        "predict": [*predict, "float32", "--output"],
        "predict-bfloat16": [*predict, "bfloat16", "--output"],
        "predict-int8": [*predict, "int8", "--output"],
    }
    results = {}
    for variant, command in variants.items():
        cost = measure([sys.executable, *map(str, command), str(folder / variant)])
        cosines = (embeddings(folder / variant) * embeddings(folder / "encode")).sum(axis=1)
        results[variant] = {"seconds": cost["seconds"], "lowest_cosine": float(cosines.min())}
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--json", type=Path, required=True)
    args = parser.parse_args()
    rounds = []
    for _ in range(ROUNDS):
        with tempfile.TemporaryDirectory() as name:
            rounds.append(measure_round(args.model, Path(name)))
    write_json(args.json, medians(rounds))


if __name__ == "__main__":
    main()
