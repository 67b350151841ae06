"""The end of a run: files that are joined from all parts, metrics, and what the run reports."""

import json
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from toolkit.confusion_matrix import plot_confusion
from toolkit.corpus.job import Job
from toolkit.corpus.store import STATE, LocalStore, Store, flush
from toolkit.files import atomic_file, to_json
from toolkit.inputs import InputFile
from toolkit.metrics import classification_metrics

EMBEDDINGS, ROWS, ERRORS = "embeddings.npy", "rows.csv", "errors.jsonl"

# How many skipped rows the summary names.
NAMED_ROWS = 3


@dataclass
class Totals:
    """What is known of all parts of a run."""

    rows: int = 0
    tokens: int = 0
    truncated: int = 0
    skipped: int = 0
    first_skipped: list[dict] = field(default_factory=list)


def join_states(store: Store, parts: int) -> Totals:
    """The totals of all parts. Writes errors.jsonl if rows were skipped."""
    totals, errors = Totals(), []
    for number in range(parts):
        state = json.loads(store.read(f"{STATE}/{number:06d}.json"))
        totals.rows += state["rows"]
        totals.tokens += state["tokens"]
        totals.truncated += state["truncated"]
        totals.skipped += len(state["skipped"])
        totals.first_skipped += state["skipped"][: NAMED_ROWS - len(totals.first_skipped)]
        errors += [json.dumps(each, ensure_ascii=False) + "\n" for each in state["skipped"]]
    if errors:
        store.write(ERRORS, "".join(errors).encode())
    return totals


def is_joined(store: Store) -> bool:
    """Whether the `.npy` parts of a run have been joined."""
    return EMBEDDINGS in store.names()


def join_arrays(store: LocalStore, job: Job, parts: int) -> None:
    """Joins the parts of the format npy into embeddings.npy and rows.csv, with a line for each row, and removes them.

    Raises:
        OSError: the disk is full; the parts are still there.
    """
    if not is_joined(store):
        names = [job.part_name(number) for number in range(parts)]
        join_rows(store, [name.replace(".npy", ".csv") for name in names])
        arrays = [np.load(store.path / name, mmap_mode="r") for name in names]
        shape = sum(len(array) for array in arrays), arrays[0].shape[1]
        with atomic_file(store.path / EMBEDDINGS) as temporary:
            joined = np.lib.format.open_memmap(temporary, "w+", arrays[0].dtype, shape)
            np.concatenate(arrays, out=joined)
            joined.flush()
    for name in store.names():
        if name.startswith("part-"):
            store.remove(name)


def join_rows(store: LocalStore, names: list[str]) -> None:
    """Joins CSV files, of which each has the header."""
    with atomic_file(store.path / ROWS) as temporary, open(temporary, "wb") as target:
        for number, name in enumerate(names):
            with open(store.path / name, "rb") as source:
                header = source.readline()
                target.write(b"" if number else header)
                shutil.copyfileobj(source, target)
        flush(target)


# -------------------------------------------------------------------------------------------------------------- metrics


# The column of the predictions for each problem.
PREDICTIONS = {"single_label": "label", "multi_label": "labels", "regression": "prediction"}


def write_metrics(store: Store, job: Job, parts: int) -> dict[str, float]:
    """Writes metrics.json, computed from the parts as in training, and for single labels the confusion matrix."""
    problem, labels = job.options["problem"], job.options["labels"]
    names = "score" if job.task == "rerank" else PREDICTIONS[problem], "reference"
    files = (InputFile(f"{job.output}/{job.part_name(number)}") for number in range(parts))
    pairs = [[row.content[name] for name in names] for file in files for row in file.rows()]
    if job.format == "csv" and problem != "single_label":  # numbers and lists are JSON
        pairs = [list(map(json.loads, pair)) for pair in pairs]
    convert = {
        "single_label": labels.index,
        "multi_label": lambda names: [int(label in names) for label in labels],
        "regression": lambda numbers: numbers if isinstance(numbers, list) else [numbers],
    }[problem]
    predictions, references = zip(*pairs, strict=True)
    metrics = classification_metrics(problem, list(map(convert, predictions)), list(map(convert, references)))
    store.write("metrics.json", (json.dumps(to_json(metrics), indent=2) + "\n").encode())
    if problem == "single_label":
        draw_confusion(store, labels, references, predictions)
    return metrics


def draw_confusion(store: Store, labels: list[str], references: Sequence[str], predictions: Sequence[str]) -> None:
    """Writes confusion_matrix.png, if matplotlib is installed and the labels are not too many."""
    name = "confusion_matrix.png"
    with tempfile.TemporaryDirectory() as folder:
        plot_confusion(Path(folder, name), labels, references, predictions, f"{len(references):,} rows")
        if Path(folder, name).exists():
            store.write(name, Path(folder, name).read_bytes())
