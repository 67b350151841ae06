"""--seeds: runs that differ in their seed, one after the other, and the best of them."""

import shutil
import statistics
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from huggingface_hub import ModelCard

from toolkit.files import read_json_object, write_json, write_text
from toolkit.finetuning.output import LOCK, moved_when_complete, not_empty
from toolkit.finetuning.recipes import RECIPE, changed_flags, recipe_of
from toolkit.finetuning.report import headline, rank
from toolkit.finetuning.settings import Settings
from toolkit.finetuning.task import METRICS
from toolkit.model_card import table


def run_seeds(settings: Settings, run_one: Callable, is_main_process: bool) -> None:
    """Runs all seeds, each in a folder of its own in --output, and then writes the model that is best on the validation
    set into --output.

    Args:
        run_one: called with the settings of a run, the name of its model, and the fingerprints that its data must have.

    Raises:
        ValueError: --output is not empty and there is no --resume; or it holds something else.
    """
    output, runs = Path(settings.output), {}
    for seed in map(int, settings.seeds):
        folder = str(output / f"seed-{seed}")
        runs[seed] = replace(settings, seeds=None, seed=seed, output=folder, push_to_hub=None, hub_private=False)
    if is_main_process:
        check_output(output, settings.resume)
    data = next((report_of(run)["data"] for run in runs.values() if is_finished(run)), None)
    for number, (seed, run) in enumerate(runs.items(), 1):
        if is_main_process:
            print(f"seed {seed} ({number} of {len(runs)}){' is finished' if is_finished(run) else ''}")
        if not is_finished(run):
            run_one(run, output.resolve().name, data)
        if settings.dry_run:  # the others do the same
            return
        data = report_of(run)["data"]
    if is_main_process:
        write_best(settings, {seed: report_of(run) for seed, run in runs.items()})


def check_output(output: Path, resume: bool) -> None:
    """Raises ValueError unless --output is empty or, with --resume, holds runs of several seeds."""
    if not output.is_dir() or not any(path.is_file() and path.name != LOCK for path in output.rglob("*")):
        return
    if not resume:
        raise ValueError(not_empty(output))
    if not any(output.glob(f"seed-*/{RECIPE}")):
        raise ValueError(f"--resume: {output} holds no runs of several seeds; seed-N/{RECIPE} is missing there")


def is_finished(run: Settings) -> bool:
    folder = Path(run.output)
    return (folder / METRICS).is_file() and not changed_flags(run, folder / RECIPE)


def report_of(run: Settings) -> dict:
    """A run's metrics.json."""
    return read_json_object(Path(run.output) / METRICS)


def write_best(settings: Settings, reports: dict[int, dict]) -> None:
    """Writes the files of the best run into --output, with the metrics of all runs in metrics.json and in the model
    card."""

    def rank_of(seed: int) -> list[float]:
        report, metrics = reports[seed], reports[seed]["validation"]
        return rank(metrics[report["metric"]], metrics["loss"], report["greater_is_better"])

    output, best = Path(settings.output), max(reports, key=rank_of)
    summary = {
        split: summarise([report[split] for report in reports.values()])
        for split in ("validation", "test")
        if split in reports[best]
    }
    runs = {seed: {split: report[split] for split in summary} for seed, report in reports.items()}
    source = output / f"seed-{best}"
    with moved_when_complete(output, "--resume writes it") as folder:
        for path in source.iterdir():
            if path.is_file() and path.name != LOCK:
                shutil.copy2(path, folder)
        write_json(folder / METRICS, reports[best] | {"seeds": {"best": best, **summary, "runs": runs}})
        write_text(folder / RECIPE, recipe_of(settings))
        add_to_card(folder / "README.md", best, runs, summary)
    for split, own in summary.items():
        shown = headline({name: values for name, values in own.items() if None not in values.values()})
        means = ", ".join(f"{name} {each['mean']:.4f} ± {each['sd']:.4f}" for name, each in shown.items())
        print(f"{split}, mean ± standard deviation of {len(runs)} seeds: {means}")
    print(f"{output} has the model of seed {best}, the best on the validation set")


def summarise(metrics: list[dict]) -> dict[str, dict]:
    """The mean and the standard deviation of each metric, over the runs; None if a run has no value."""
    values = {name: [own.get(name) for own in metrics] for name in metrics[0]}
    functions = {"mean": statistics.mean, "sd": statistics.stdev}
    return {
        name: {key: None if None in each else function(each) for key, function in functions.items()}
        for name, each in values.items()
    }


def add_to_card(path: Path, best: int, runs: dict[int, dict], summary: dict) -> None:
    """Adds the metrics of all seeds to the model card of the best run."""
    rows = [
        [split, name, each["mean"], each["sd"], *(run[split].get(name) for run in runs.values())]
        for split, own in summary.items()
        for name, each in headline(own).items()
    ]
    columns = ["set", "metric", "mean", "standard deviation", *(f"seed {seed}" for seed in runs)]
    card = ModelCard.load(path)
    card.text += f"""
## Seeds

{len(runs)} models were trained, which differ in the random seed alone. This one, of seed {best}, is the best of them on
the validation set. Its validation metrics are therefore too high as an estimate for new texts; the mean is not.

{table(columns, rows)}
"""
    card.save(path)
