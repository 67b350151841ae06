"""manifest.json: what a run computes, from what and with what. `--resume` continues only the same run."""

import hashlib
import json
from dataclasses import asdict
from itertools import zip_longest
from pathlib import Path

from toolkit.checkpoint import weight_files
from toolkit.corpus.formats import ROWS_IN_GROUP
from toolkit.corpus.job import Job
from toolkit.corpus.model import CALIBRATION
from toolkit.corpus.sources import Input
from toolkit.corpus.store import Store
from toolkit.machine import processor, version
from toolkit.remote_code import find

MANIFEST = "manifest.json"
LIBRARIES = ("scratchbert", "torch", "transformers", "tokenizers", "numpy", "pyarrow")

# Files of a model that decide its results, besides the weights.
MODEL_FILES = (
    "config.json", "tokenizer.json", "tokenizer_config.json", "vocab.txt", "special_tokens_map.json", "modules.json",
    "sentence_bert_config.json", "config_sentence_transformers.json", "1_Pooling/config.json", CALIBRATION,
)  # fmt: skip


def make_manifest(job: Job, inputs: list[Input], limit: int | None) -> dict:
    """The manifest of a run.

    Raises:
        OSError: an input or a file of the model cannot be read.
    """
    settings = asdict(job)
    places = {name: settings.pop(name) for name in ("model", "output", "trust_remote_code", "verify", "threads")}
    options = settings.pop("options")
    return {
        "model": {"source": places["model"], "sha256": model_fingerprint(job)},
        "inputs": [each.fingerprint() for each in inputs],
        "flags": {**settings, "device": settings["device"].partition(":")[0], **options, "limit": limit},
        "threads_per_process": places["threads"],
        "rows_in_group": ROWS_IN_GROUP,
        "versions": {library: version(library) for library in LIBRARIES},
        "processor": processor(),
    }


def model_fingerprint(job: Job) -> str:
    """A hash of the weights of a checkpoint and of its files that decide results; with code of its own, also of it."""
    digest = hashlib.sha256()
    paths = [Path(path) for path in weight_files(job.model)]
    paths += [path for name in MODEL_FILES if (path := find(job.model, name)) is not None]
    if job.trust_remote_code:
        paths += sorted(paths[0].parent.glob("*.py"))
    for path in paths:
        digest.update(path.name.encode())
        with open(path, "rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


def read_manifest(store: Store) -> dict | None:
    """The manifest in a folder; None if there is none.

    Raises:
        ValueError: it is damaged.
    """
    if MANIFEST not in store.names():
        return None
    try:
        manifest = json.loads(store.read(MANIFEST))
        manifest["model"]["sha256"], manifest["inputs"], manifest["flags"], manifest["threads_per_process"]
    except (ValueError, TypeError, KeyError):
        raise ValueError(f"--resume: {MANIFEST} is damaged; expected the one that the run wrote") from None
    return manifest


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
    check_inputs(before["inputs"], now["inputs"])
    flags = before["flags"].keys() | now["flags"].keys() | {"threads_per_process"}
    for name in sorted(flags):
        was, is_now = (one["flags"].get(name, one.get(name)) for one in (before, now))
        if was != is_now:
            raise ValueError(f"--resume: --{name} was {was} and is {is_now}; expected the same")
    return [
        f"{name} was {before['versions'].get(name)} and is {now['versions'].get(name)}; new parts may differ from the "
        "others in the last digits"
        for name in LIBRARIES
        if before["versions"].get(name) != now["versions"].get(name)
    ]


def check_inputs(before: list[dict], now: list[dict]) -> None:
    """Raises ValueError if the inputs of two runs differ."""
    for one, other in zip_longest(before, now, fillvalue={"file": "none"}):
        if one["file"] != other["file"]:
            raise ValueError(f"--resume: an input was {one['file']} and is {other['file']}; expected the same inputs")
        changed = [name for name in sorted(one.keys() | other.keys()) if one.get(name) != other.get(name)]
        if changed:
            what = ", ".join(changed).replace("_", " ")
            raise ValueError(f"--resume: the input {one['file']} has changed ({what}); expected the same")
