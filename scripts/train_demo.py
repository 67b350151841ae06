#!/usr/bin/env python
"""Fine-tunes on the film reviews with several seeds, and compares ScratchBert with transformers' BERT and its Trainer.

    train_demo.py MODEL FOLDER
    train_demo.py MODEL --output FOLDER --seeds 0 --implementations scratchbert

Each run has a process and a folder of its own, FOLDER/IMPLEMENTATION-SEED; one that is finished is not run again.
scratchbert and bert are runs of finetune_classification.py with the recipe movie_reviews.yaml. trainer is
BertForSequenceClassification with transformers' Trainer and the same settings. The test set is evaluated once, with the
model that is best on the validation set. The accuracies, the processor time and the peak memory are printed.

Exit code: 0 done, 1 a run failed or one of our models is less accurate than --at_least, 2 bad usage.
"""

import csv
import json
import resource
import statistics
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

from toolkit.cli import CommandError, Parser
from toolkit.files import ROOT, write_json
from toolkit.training.settings import ClassificationSettings, parse, train

RECIPE = ROOT / "configuration" / "recipes" / "movie_reviews.yaml"
RESULT = "result.json"
IMPLEMENTATIONS = ("scratchbert", "bert", "trainer")


def run_ours(model: str, folder: Path, seed: int, grouped: bool, implementation: str) -> float:
    """Runs finetune_classification.py. Returns the accuracy on the test set."""
    argv = [str(RECIPE), f"--model={model}", f"--output={folder}", f"--implementation={implementation}",
            f"--seed={seed}", f"--group_by_length={grouped}"]  # fmt: skip
    if code := train("finetune_classification.py", "", ClassificationSettings, argv):
        raise CommandError(f"exit code {code}")
    return json.loads((folder / "metrics.json").read_text(encoding="utf-8"))["test"]["accuracy"]


def run_trainer(model: str, folder: Path, seed: int, grouped: bool) -> float:
    """Fine-tunes with transformers' Trainer and the settings of the recipe. Returns the accuracy on the test set."""
    from datasets import Dataset
    from transformers import AutoTokenizer, BertForSequenceClassification, Trainer, TrainingArguments, set_seed

    settings = parse("", "", ClassificationSettings, [str(RECIPE), f"--model={model}", f"--output={folder}"])[1]
    tokenizer = AutoTokenizer.from_pretrained(model)
    labels: dict[str, int] = {}

    def read(files: list[str]) -> Dataset:
        with open(files[0], encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(file))
        labels.update(zip(sorted({row["label"] for row in rows}), range(2), strict=True))
        encoded = tokenizer([row["text"] for row in rows], truncation=True, max_length=settings.max_length)
        return Dataset.from_dict({**encoded, "labels": [labels[row["label"]] for row in rows]})

    def accuracy(evaluation) -> dict[str, float]:
        return {"accuracy": float((evaluation.predictions.argmax(-1) == evaluation.label_ids).mean())}

    set_seed(seed)
    trainer = Trainer(
        BertForSequenceClassification.from_pretrained(model, num_labels=2),
        TrainingArguments(
            str(folder), seed=seed, num_train_epochs=settings.epochs, learning_rate=settings.learning_rate,
            per_device_train_batch_size=settings.batch_size, per_device_eval_batch_size=settings.eval_batch_size,
            lr_scheduler_type=settings.schedule, warmup_steps=settings.warmup_ratio, weight_decay=settings.weight_decay,
            max_grad_norm=settings.max_grad_norm, train_sampling_strategy="group_by_length" if grouped else "random",
            eval_strategy="epoch", save_strategy="epoch", load_best_model_at_end=True, metric_for_best_model="accuracy",
            report_to="none",
        ),
        train_dataset=read(settings.train_file), eval_dataset=read(settings.validation_file),
        processing_class=tokenizer, compute_metrics=accuracy,
    )  # fmt: skip
    trainer.train()
    return trainer.evaluate(read(settings.test_file))["eval_accuracy"]


def measured(model: str, folder: Path, implementation: str, seed: int, grouped: bool) -> dict[str, float]:
    """Makes a run in this process. Returns its accuracy, and the processor seconds and the GB that the process took."""
    if implementation == "trainer":
        accuracy = run_trainer(model, folder, seed, grouped)
    else:
        accuracy = run_ours(model, folder, seed, grouped, implementation)
    usage = resource.getrusage(resource.RUSAGE_SELF)
    unit = 1 if sys.platform == "darwin" else 1024  # of the memory, in bytes
    return {"accuracy": accuracy, "cpu_seconds": usage.ru_utime + usage.ru_stime, "gb": usage.ru_maxrss * unit / 1e9}


def result_of(folder: Path, *run) -> dict[str, float]:
    """The result of a run in a new process, or the earlier one in its folder.

    Raises:
        CommandError: the folder holds an unfinished run, or the run failed.
    """
    result = folder / RESULT
    if result.exists():
        return json.loads(result.read_text(encoding="utf-8"))
    if folder.exists():
        raise CommandError(f"{folder} holds an unfinished run; expected none. Remove the folder")
    with ProcessPoolExecutor(1, get_context("spawn")) as process:
        try:
            found = process.submit(measured, *run).result()
        except (Exception, SystemExit) as error:
            raise CommandError(f"the run in {folder} failed: {error}", exit_code=1) from error
    write_json(result, found)
    return found


def summary(name: str, results: list[dict[str, float]]) -> str:
    """The accuracies, times and memory of an implementation, in one line."""
    accuracies, seconds, memory = ([each[key] for each in results] for key in ("accuracy", "cpu_seconds", "gb"))
    spread = f" ± {statistics.stdev(accuracies):.4f}" if len(results) > 1 else ""
    each = ", ".join(f"{accuracy:.4f}" for accuracy in accuracies)
    return (
        f"{name:12} test accuracy {statistics.mean(accuracies):.4f}{spread} ({each}); processor time "
        f"{statistics.mean(seconds) / 60:.1f} minutes per seed; peak memory {max(memory):.2f} GB"
    )


def make_parser() -> Parser:
    parser = Parser(__file__, __doc__, usage="%(prog)s MODEL FOLDER [--FLAG VALUE …]")
    parser.add_argument("model", metavar="MODEL", help="a BERT: a folder or hub id")
    parser.group("model").add_argument(
        "--implementations", nargs="+", choices=IMPLEMENTATIONS, metavar="NAME", default=list(IMPLEMENTATIONS),
        help=f"some of {', '.join(IMPLEMENTATIONS)}")  # fmt: skip
    training = parser.group("training")
    training.add_argument("--seeds", type=int, nargs="+", metavar="N", default=[0, 1, 2], help="a run for each")
    training.add_argument(
        "--random_batches", action="store_true", help="rows of any lengths in a batch, instead of similar ones"
    )
    parser.group("evaluation").add_argument("--at_least", type=float, default=0.0, metavar="ACCURACY", help="the "
                                            "accuracy on the test set that each of our models must reach")  # fmt: skip
    parser.add_output("FOLDER", help="the folder of the runs")
    return parser


def run_all(args) -> None:
    """Makes all runs, and prints the summaries.

    Raises:
        CommandError: a run failed, or one of our models is not accurate enough.
    """
    results = {name: [] for name in args.implementations}
    for seed in args.seeds:
        for name, own in results.items():
            print(f"\n== {name}, seed {seed}", flush=True)
            folder = (args.output / f"{name}-{seed}").resolve()
            own.append(result_of(folder, args.model, folder, name, seed, not args.random_batches))
    print("", *(summary(name, own) for name, own in results.items()), sep="\n")
    lowest = min((each["accuracy"] for each in results.get("scratchbert", [])), default=1.0)
    if lowest < args.at_least:
        raise CommandError(f"a test accuracy of ScratchBert is {lowest:.4f}; expected at least {args.at_least}", 1)


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code."""
    parser = make_parser()
    args = parser.parse_args(argv)
    return parser.run(lambda: run_all(args))


if __name__ == "__main__":
    sys.exit(main())
