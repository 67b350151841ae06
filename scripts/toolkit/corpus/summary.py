"""The end of a run: files that are joined from all parts, metrics, and what the run reports."""

import json
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from hashlib import file_digest
from pathlib import Path

import numpy as np

from toolkit.confusion_matrix import plot_confusion
from toolkit.corpus.formats import decode_part
from toolkit.corpus.job import Job, part_name
from toolkit.corpus.manifest import part_files, read_manifest, read_records
from toolkit.corpus.store import RUN, LocalStore, Store, flush, open_store, record_name
from toolkit.files import atomic_file, to_json
from toolkit.metrics import classification_metrics

EMBEDDINGS, ROWS = "embeddings.npy", "rows.csv"
JOINED = f"{RUN}/joined.json"
ERRORS, METRICS, CONFUSION = f"{RUN}/errors.jsonl", f"{RUN}/metrics.json", f"{RUN}/confusion_matrix.png"

# The damaged or missing files that --check names.
NAMED_FILES = 5


@dataclass
class Totals:
    """What is known of parts. `skipped` has the lines of errors.jsonl."""

    parts: int = 0
    rows: int = 0
    tokens: int = 0
    truncated: int = 0
    skipped: list[str] = field(default_factory=list)


def totals_of(records: Iterator[tuple[int, dict]]) -> Totals:
    """The totals of the parts with these records."""
    totals = Totals()
    for _, record in records:
        totals.parts += 1
        totals.rows += record["rows"]
        totals.tokens += record["tokens"]
        totals.truncated += record["truncated"]
        for skipped in record["skipped"]:
            skipped.pop("digest", None)
            totals.skipped.append(json.dumps(skipped, ensure_ascii=False) + "\n")
    return totals


def write_errors(store: Store, lines: list[str]) -> None:
    """Writes errors.jsonl if rows were skipped."""
    if lines:
        store.write(ERRORS, "".join(lines).encode())
    else:
        store.remove(ERRORS)


def join_arrays(store: LocalStore, parts: int) -> None:
    """Joins the parts of the format npy into embeddings.npy and rows.csv, with a line for each row, and removes them.

    Raises:
        OSError: the disk is full; the parts are still there.
    """
    rows, vectors = ([part_name(number, ending) for number in range(parts)] for ending in ("csv", "npy"))
    if not store.has(JOINED):
        join_rows(store, rows)
        arrays = [np.load(store.path / name, mmap_mode="r") for name in vectors]
        shape = sum(len(array) for array in arrays), arrays[0].shape[1]
        with atomic_file(store.path / EMBEDDINGS) as temporary:
            joined = np.lib.format.open_memmap(temporary, "w+", arrays[0].dtype, shape)
            np.concatenate(arrays, out=joined)
            joined.flush()
        found = {name: file_fingerprint(store, name) for name in (EMBEDDINGS, ROWS)}
        store.write(JOINED, json.dumps(found, indent=2).encode())
    for name in (*rows, *vectors):
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


# The column of the predictions for each problem, and its kind.
PREDICTIONS = {
    "single_label": ("label", "text"),
    "multi_label": ("labels", "texts"),
    "regression": ("prediction", "numbers"),
}


def predictions_and_references(store: Store, job: Job, parts: int) -> Iterator[tuple]:
    """The result and the true labels of each row that has a result."""
    problem = job.options["problem"]
    name, kind = PREDICTIONS[problem]
    kinds = ({"score": "number"} if job.task == "rerank" else {name: kind}) | {"reference": kind}
    for file in (job.part_name(number) for number in range(parts)):
        columns = decode_part(job.format, kinds, store.read(file))
        for found, reference in zip(*columns.values(), strict=True):
            if found is not None:
                yield found, reference


def write_metrics(store: Store, job: Job, parts: int) -> dict[str, float]:
    """Writes metrics.json, computed from the parts as in training, and for single labels the confusion matrix, if
    matplotlib is installed and they are not too many. Returns the metrics; none if no row has a result."""
    problem, labels = job.options["problem"], job.options["labels"]
    pairs = list(predictions_and_references(store, job, parts))
    store.remove(METRICS)
    store.remove(CONFUSION)
    if not pairs:
        return {}
    convert = {
        "single_label": labels.index,
        "multi_label": lambda names: [int(label in names) for label in labels],
        "regression": lambda numbers: numbers if isinstance(numbers, list) else [numbers],
    }[problem]
    predictions, references = zip(*pairs, strict=True)
    predicted, expected = (np.array([convert(each) for each in side]) for side in (predictions, references))
    metrics = classification_metrics(problem, expected, predicted)
    store.write(METRICS, (json.dumps(to_json(metrics), indent=2) + "\n").encode())
    if problem == "single_label":
        with tempfile.TemporaryDirectory() as folder:
            picture = Path(folder, "confusion_matrix.png")
            plot_confusion(picture, labels, references, predictions)
            if picture.exists():
                store.write(CONFUSION, picture.read_bytes())
    return metrics


def file_fingerprint(store: Store, name: str) -> dict:
    """The size and the SHA-256 of a file."""
    with store.system.open(store.path_of(name), "rb") as file:
        digest = file_digest(file, "sha256")
        return {"bytes": file.tell(), "sha256": digest.hexdigest()}


def check_output(url: str) -> list[str]:
    """What is wrong with an output: files that are missing, differ from what the run wrote, or are not of the run; of
    many, the first. Nothing if it is complete.

    Raises:
        ValueError: there is no run.
    """
    store = open_store(url)
    manifest = read_manifest(store)
    if manifest is None:
        raise ValueError(f"--check: {url} has no {RUN}/manifest.json; expected the --output of a run")
    expected: dict[str, dict] = {}
    records = dict(read_records(store))
    wrong = [
        f"{record_name(number)} is missing or damaged"
        for number in range(len(part_files(manifest)))
        if number not in records
    ]
    if store.has(JOINED):
        expected = json.loads(store.read(JOINED))
    else:
        for record in records.values():
            expected |= record["files"]
    sizes = store.sizes()
    for name, before in expected.items():
        if name not in sizes:
            wrong.append(f"{name} is missing")
        elif sizes[name] != before["bytes"] or file_fingerprint(store, name) != before:
            wrong.append(f"{name} is not what the run wrote")
    wrong += [f"{name} is not of the run" for name in sorted(sizes.keys() - expected) if name.startswith("part-")]
    more = [f"and {len(wrong) - NAMED_FILES:,} more"] if len(wrong) > NAMED_FILES else []
    return wrong[:NAMED_FILES] + more
