"""manifest.json: what a run computes, from what and with what. A run is continued by the same run only."""

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from itertools import zip_longest
from pathlib import Path
from types import MappingProxyType

from modeling_scratchbert.bert.files import weight_files
from toolkit.corpus.formats import ROWS_IN_GROUP
from toolkit.corpus.job import Job, part_name
from toolkit.corpus.model import CALIBRATION
from toolkit.corpus.sentence_folder import module_files
from toolkit.corpus.store import RECORDS, RUN, Store
from toolkit.inputs import Input
from toolkit.machine import processor, version
from toolkit.trust import find

MANIFEST = f"{RUN}/manifest.json"
LIBRARIES = ("scratchbert", "torch", "transformers", "tokenizers", "numpy", "pyarrow")

# Files of a model that decide its results, besides the weights and those of the modules of sentence-transformers.
MODEL_FILES = (
    "config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "vocab.txt",
    "special_tokens_map.json",
    "modules.json",
    "sentence_bert_config.json",
    "config_sentence_transformers.json",
    CALIBRATION,
)

# What does not decide the results of a text: where things are, and the columns and files that results are put in.
PLACES = ("model", "output", "run", "trust_remote_code", "verify", "threads")
LAYOUT = (
    "format",
    "part_rows",
    "tokens_per_batch",
    "id_column",
    "label_column",
    "on_bad_row",
    "empty_texts",
    "keep",
    "kinds",
    "limit",
    "text_column",
    "text_pair_column",
    "problem",
    "labels",
    "label_separator",
)


def make_manifest(job: Job, inputs: list[Input], limit: int | None, rows: int) -> dict:
    """The manifest of a run.

    Args:
        rows: of the inputs, up to the limit.

    Raises:
        OSError: an input or a file of the model cannot be read.
    """
    settings = {name: value for name, value in asdict(job).items() if name not in PLACES}
    options = settings.pop("options")
    settings["kinds"] = {column: str(kind) for column, kind in job.kinds.items()}
    return {
        "model": {"source": job.model, "sha256": model_fingerprint(job)},
        "inputs": [each.fingerprint() for each in inputs],
        "rows": rows,
        "flags": {**settings, "device": job.device.partition(":")[0], **options, "limit": limit},
        "threads_per_process": job.threads,
        "rows_in_group": ROWS_IN_GROUP,
        "versions": {library: version(library) for library in LIBRARIES},
        "processor": processor(),
    }


def to_text(content: dict) -> bytes:
    return (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode()


def model_fingerprint(job: Job) -> str:
    """A hash of the weights of a checkpoint and of its files that decide results; with code of its own, also of it."""
    digest = hashlib.sha256()
    paths = [Path(path) for path in weight_files(job.model)]
    paths += [path for name in MODEL_FILES if (path := find(job.model, name)) is not None] + module_files(job.model)
    if job.trust_remote_code:
        paths += sorted(paths[0].parent.glob("*.py"))
    for path in paths:
        digest.update(path.name.encode())
        with open(path, "rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


def read_manifest(store: Store, name: str = MANIFEST) -> dict | None:
    """The manifest in a folder; None if there is none.

    Raises:
        ValueError: it is damaged.
    """
    if not store.has(name):
        return None
    try:
        manifest = json.loads(store.read(name))
        manifest["model"]["sha256"], manifest["inputs"][0], manifest["rows"], manifest["threads_per_process"]
        manifest["flags"]["part_rows"], manifest["flags"]["format"], manifest["versions"], manifest["processor"]
    except (ValueError, TypeError, KeyError, IndexError):
        raise ValueError(f"{name} in --output is damaged; expected the one that the run wrote") from None
    return manifest


def read_records(store: Store, folder: str = RECORDS) -> Iterator[tuple[int, dict]]:
    """The records of the parts that are complete, in their order. A damaged one does not count."""
    names = sorted(name for name in store.sizes(folder) if name.endswith(".json"))
    for name, content in zip(names, store.read_all([f"{folder}/{name}" for name in names]), strict=True):
        try:
            record = json.loads(content)
            record["files"], record["rows"], record["digests"]
        except (ValueError, TypeError, KeyError):
            continue
        yield int(name.removesuffix(".json")), record


def complete_records(store: Store, elsewhere: Mapping[str, dict] = MappingProxyType({})) -> Iterator[tuple[int, dict]]:
    """The records of the parts whose files are there in their sizes, or `elsewhere` with the same fingerprints, in
    their order."""
    sizes = store.sizes()
    for number, record in read_records(store):
        if all(
            elsewhere.get(name) == file or sizes.get(name) == file["bytes"] for name, file in record["files"].items()
        ):
            yield number, record


def complete_parts(store: Store, elsewhere: Mapping[str, dict] = MappingProxyType({})) -> set[int]:
    """The numbers of these parts."""
    return {number for number, _ in complete_records(store, elsewhere)}


def check_same(before: dict, now: dict) -> list[str]:
    """Checks that a run continues the one that wrote the manifest `before`.

    Returns:
        Remarks on differences that may change the last digits of results.

    Raises:
        ValueError: the model, an input or a flag has changed.
    """
    if before["model"]["sha256"] != now["model"]["sha256"]:
        raise ValueError(
            f"--resume: the model has changed; the run used {before['model']['source']} with other weights or files"
        )
    if (difference := difference_of_inputs(before["inputs"], now["inputs"])) is not None:
        raise ValueError(f"--resume: {difference}")
    flags = before["flags"].keys() | now["flags"].keys() | {"threads_per_process"}
    for name in sorted(flags):
        was, is_now = (one["flags"].get(name, one.get(name)) for one in (before, now))
        if was != is_now:
            raise ValueError(f"--resume: --{name} was {was} and is {is_now}; expected the same")
    return [f"{each}; new parts may differ from the others in the last digits" for each in other_machine(before, now)]


def difference_of_inputs(before: list[dict], now: list[dict]) -> str | None:
    """How the inputs of two runs differ, in words; None if they do not."""
    for one, other in zip_longest(before, now, fillvalue={"file": "none"}):
        if one["file"] != other["file"]:
            return f"an input was {one['file']} and is {other['file']}; expected the same inputs"
        changed = [name for name in sorted(one.keys() | other.keys()) if one.get(name) != other.get(name)]
        if changed:
            what = ", ".join(changed).replace("_", " ")
            return f"the input {one['file']} has changed ({what}); expected the same"
    return None


def other_machine(before: dict, now: dict) -> list[str]:
    """The versions of libraries and the processor that differ."""
    pairs = {name: (before["versions"].get(name), now["versions"].get(name)) for name in LIBRARIES}
    pairs["the processor"] = tuple(one["processor"].get("processor") for one in (before, now))
    if before["processor"] != now["processor"] and len(set(pairs["the processor"])) == 1:
        pairs["the processor"] = tuple(str(one["processor"]) for one in (before, now))
    return [f"{name} was {was} and is {is_now}" for name, (was, is_now) in pairs.items() if was != is_now]


def computation(manifest: dict) -> dict:
    """What decides the results of a text, besides the text: the model, its files, and options."""
    options = {name: value for name, value in manifest["flags"].items() if name not in LAYOUT}
    return {
        "sha256": manifest["model"]["sha256"],
        "pairs": manifest["flags"].get("text_pair_column") is not None,
        **options,
    }


def part_files(manifest: dict) -> list[str]:
    """The names of the files of all parts of a run."""
    parts = -(-manifest["rows"] // manifest["flags"]["part_rows"])
    return [part_name(number, manifest["flags"]["format"]) for number in range(parts)]
