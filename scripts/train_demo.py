#!/usr/bin/env python
"""Fine-tunes the same weights on the film reviews with several seeds, in ScratchBert and in transformers' BERT, and
says how accurate they become and how long it takes.

    train_demo.py MODEL FOLDER
    train_demo.py MODEL FOLDER --seeds 0 --implementations scratchbert

Each run is one of finetune_classification.py with the recipe movie_reviews.yaml, in a folder of its own,
FOLDER/IMPLEMENTATION-SEED; one that is there already is continued, or read if it has ended. The test set is seen once,
by the model that is best on the validation set.

Exit code: 0 done, 1 a run failed or a model of ours is less accurate than --at-least, 2 bad usage.
"""

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path

SCRIPTS = Path(__file__).resolve().parent
RECIPE = SCRIPTS.parent / "configuration" / "recipes" / "movie_reviews.yaml"


def train(model: str, folder: Path, implementation: str, seed: int) -> dict:
    """One run, in a process of its own. Returns its metrics.json."""
    command = [sys.executable, SCRIPTS / "finetune_classification.py", RECIPE, f"--model={model}", f"--output={folder}",
               f"--implementation={implementation}", f"--seed={seed}", "--resume"]  # fmt: skip
    subprocess.run(command, check=True, cwd=SCRIPTS.parent)
    return json.loads((folder / "metrics.json").read_text(encoding="utf-8"))


def summary(name: str, reports: list[dict]) -> str:
    accuracies = [report["test"]["accuracy"] for report in reports]
    minutes = [report["seconds"] / 60 for report in reports]
    spread = f" ± {statistics.stdev(accuracies):.4f}" if len(reports) > 1 else ""
    each = ", ".join(f"{accuracy:.4f}" for accuracy in accuracies)
    return (
        f"{name:12} test accuracy {statistics.mean(accuracies):.4f}{spread} ({each}); "
        f"{statistics.mean(minutes):.1f} minutes a seed, at most {max(minutes):.1f}"
    )


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", metavar="MODEL", help="a BERT: a folder or hub id")
    parser.add_argument("folder", metavar="FOLDER", type=Path, help="what the runs are written to")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument(
        "--implementations", nargs="+", choices=("scratchbert", "bert"), default=["scratchbert", "bert"]
    )
    parser.add_argument("--at-least", type=float, default=0.0, metavar="ACCURACY")
    args = parser.parse_args(argv)
    reports = {name: [] for name in args.implementations}
    try:
        for seed in args.seeds:
            for name, own in reports.items():
                print(f"\n== {name}, seed {seed}", flush=True)
                own.append(train(args.model, (args.folder / f"{name}-{seed}").resolve(), name, seed))
    except subprocess.CalledProcessError as error:
        print(
            f"train_demo: the run of {name} with seed {seed} ended with exit code {error.returncode}", file=sys.stderr
        )
        return 1
    print("", *(summary(name, own) for name, own in reports.items()), sep="\n")
    too_low = [each["test"]["accuracy"] < args.at_least for each in reports.get("scratchbert", [])]
    return int(any(too_low))


if __name__ == "__main__":
    sys.exit(main())
