#!/usr/bin/env python
"""Fine-tunes on the film reviews with several seeds, and compares ScratchBert with transformers' BERT.

    train_demo.py MODEL FOLDER
    train_demo.py MODEL --output FOLDER --seeds 0 --implementations scratchbert

Each run is one of finetune_classification.py with the recipe movie_reviews.yaml, in a folder of its own,
FOLDER/IMPLEMENTATION-SEED; an existing run is continued, or read if it has finished. The test set is
evaluated once, with the model that is best on the validation set. The accuracies and the times are printed.

Exit code: 0 done, 1 a run failed or one of our models is less accurate than --at_least, 2 bad usage.
"""

import json
import statistics
import subprocess
import sys
from pathlib import Path

from toolkit.cli import CommandError, Parser
from toolkit.files import ROOT

RECIPE = ROOT / "configuration" / "recipes" / "movie_reviews.yaml"


def train(model: str, folder: Path, implementation: str, seed: int) -> dict:
    """Runs one training in a process of its own. Returns the content of its metrics.json."""
    script = ROOT / "scripts" / "finetune_classification.py"
    command = [sys.executable, script, RECIPE, f"--model={model}", f"--output={folder}",
               f"--implementation={implementation}", f"--seed={seed}", "--resume"]  # fmt: skip
    subprocess.run(command, check=True)
    return json.loads((folder / "metrics.json").read_text(encoding="utf-8"))


def summary(name: str, reports: list[dict]) -> str:
    """The accuracies and times of an implementation, in one line."""
    accuracies = [report["test"]["accuracy"] for report in reports]
    minutes = [report["seconds"] / 60 for report in reports]
    spread = f" ± {statistics.stdev(accuracies):.4f}" if len(reports) > 1 else ""
    each = ", ".join(f"{accuracy:.4f}" for accuracy in accuracies)
    return (
        f"{name:12} test accuracy {statistics.mean(accuracies):.4f}{spread} ({each}); "
        f"{statistics.mean(minutes):.1f} minutes per seed, at most {max(minutes):.1f}"
    )


def make_parser() -> Parser:
    parser = Parser(__file__, __doc__, usage="%(prog)s MODEL FOLDER [--FLAG VALUE …]")
    parser.add_argument("model", metavar="MODEL", help="a BERT: a folder or hub id")
    implementations = ("scratchbert", "bert")
    parser.group("model").add_argument("--implementations", nargs="+", choices=implementations, metavar="NAME",
                                       default=list(implementations), help="some of scratchbert, bert")  # fmt: skip
    parser.group("training").add_argument(
        "--seeds", type=int, nargs="+", metavar="N", default=[0, 1, 2], help="the seeds, with a run for each"
    )
    parser.group("evaluation").add_argument("--at_least", type=float, default=0.0, metavar="ACCURACY", help="the "
                                            "accuracy on the test set that each of our models must reach")  # fmt: skip
    parser.add_output("FOLDER", help="the folder of the runs")
    return parser


def run_all(args) -> None:
    """Trains every model, and prints the summaries.

    Raises:
        CommandError: a run failed, or one of our models is not accurate enough.
    """
    reports = {name: [] for name in args.implementations}
    for seed in args.seeds:
        for name, own in reports.items():
            print(f"\n== {name}, seed {seed}", flush=True)
            try:
                own.append(train(args.model, (args.output / f"{name}-{seed}").resolve(), name, seed))
            except subprocess.CalledProcessError as error:
                raise CommandError(
                    f"the run of {name} with seed {seed} failed with exit code {error.returncode}", exit_code=1
                ) from error
    print("", *(summary(name, own) for name, own in reports.items()), sep="\n")
    lowest = min((each["test"]["accuracy"] for each in reports.get("scratchbert", [])), default=1.0)
    if lowest < args.at_least:
        raise CommandError(f"a test accuracy of ScratchBert is {lowest:.4f}; expected at least {args.at_least}", 1)


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code."""
    parser = make_parser()
    args = parser.parse_args(argv)
    return parser.run(lambda: run_all(args))


if __name__ == "__main__":
    sys.exit(main())
