"""Times `predict.py` beside sentence-transformers: whole commands, over all film reviews of scripts/data.

    python tests/docs/corpus_speed.py all-MiniLM-L6-v2 --json corpus.json

The commands run in turns, in several rounds. A time is the median over the rounds. A cosine is that of a text's
embedding to the one of `encode`, the lowest of all texts.
"""

import argparse
import csv
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

from toolkit.common import write_json  # noqa: E402
from toolkit.data import Source, open_files  # noqa: E402

ENCODE = """
import csv, sys
import numpy
from sentence_transformers import SentenceTransformer

if __name__ == "__main__":
    model, file, output, processes = sys.argv[1:]
    with open(file, encoding="utf-8", newline="") as rows:
        texts = [row["text"] for row in csv.DictReader(rows)]
    model = SentenceTransformer(model, device="cpu")
    if processes == "1":
        embeddings = model.encode(texts)
    else:
        pool = model.start_multi_process_pool(["cpu"] * int(processes))
        embeddings = model.encode(texts, pool=pool)
        model.stop_multi_process_pool(pool)
    numpy.save(output, embeddings)
"""


def commands(model: str) -> dict[str, list[str]]:
    """The command of each variant, which writes into the folder of its name."""
    encode = [sys.executable, "encode.py", model, "reviews.csv"]
    predict = [
        sys.executable,
        str(ROOT / "scripts" / "predict.py"),
        model,
        "reviews.csv",
        "--format",
        "npy",
        "--output",
    ]
    return {
        "encode": [*encode, "encode.npy", "1"],
        "encode-pool": [*encode, "encode-pool.npy", "2"],
        "predict": [*predict, "predict"],
        "predict-bfloat16": [*predict, "predict-bfloat16", "--dtype", "bfloat16"],
        "predict-int8": [*predict, "predict-int8", "--dtype", "int8"],
    }


def embeddings(folder: Path, name: str) -> numpy.ndarray:
    file = folder / name / "embeddings.npy"
    rows = numpy.load(file if file.exists() else folder / f"{name}.npy")
    return rows / numpy.linalg.norm(rows, axis=1, keepdims=True)


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=lambda name: str(Path(name).resolve()))
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--json", type=Path, required=True)
    args = parser.parse_args(argv)
    times: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "encode.py").write_text(ENCODE, encoding="utf-8")
        files = open_files([str(ROOT / "scripts" / "data" / "movie_reviews")], "data")
        texts = [[row.content["text"]] for row in Source("data", files).rows()]
        with (folder / "reviews.csv").open("w", encoding="utf-8", newline="") as output:
            csv.writer(output).writerows([["text"], *texts])
        for _ in range(args.rounds):
            for variant, command in commands(args.model).items():
                shutil.rmtree(folder / variant, ignore_errors=True)
                start = time.perf_counter()
                subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL)
                times.setdefault(variant, []).append(time.perf_counter() - start)
                print(variant, f"{times[variant][-1]:.1f} s", flush=True)
        reference = embeddings(folder, "encode")
        result = {
            variant: {
                "seconds": statistics.median(seconds),
                "lowest_cosine": float((embeddings(folder, variant) * reference).sum(axis=1).min()),
            }
            for variant, seconds in times.items()
        }
    write_json(args.json, result | {"texts": len(texts)})
    return 0


if __name__ == "__main__":
    sys.exit(main())
