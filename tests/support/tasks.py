"""The tasks of `predict.py`, without files, processes and parts."""

import json
from pathlib import Path

from toolkit.corpus.job import Job
from toolkit.corpus.tasks.base import Encoded

from toolkit.corpus.tasks import Task, open_task

FIELDS_OF_JOB = ("dtype", "max_length", "tokens_per_batch", "label_column")


def open_tiny(folder: str | Path, task: str, **options) -> Task:
    """A task with its model. Options are those of the job or of the task."""
    fields = {name: options.pop(name) for name in FIELDS_OF_JOB if name in options}
    return open_task(Job(model=str(folder), task=task, output="", options=options, **fields))


def columns_of(task: Task, texts: list[str], pairs: list[str] | None = None) -> tuple[dict, Encoded]:
    """The columns of texts, and the sequences with the faults."""
    encoded = task.encode(texts, pairs)
    return task.compute(encoded), encoded


def compute(folder: str | Path, task: str, texts: list[str], pairs: list[str] | None = None, **options) -> dict:
    """The columns of texts, of which none has a fault."""
    columns, encoded = columns_of(open_tiny(folder, task, **options), texts, pairs)
    assert not encoded.faults
    return columns


def write_sentence_folder(folder: Path, modules: list[str], **files: dict) -> str:
    """Adds the files of sentence-transformers to a folder with a model.

    Args:
        modules: the classes, or whole paths of them. Each has the folder `1_Pooling`, `2_Dense` and so on.
        files: the content of `settings` (sentence_bert_config.json), `config` (config_sentence_transformers.json), and
            of the config.json of a module, by the name of its class.
    """
    entries = []
    for number, name in enumerate(modules):
        kind = name.rpartition(".")[2]
        path = f"{number}_{kind}" if number else ""
        type_name = name if "." in name else f"sentence_transformers.models.{name}"
        entries.append({"idx": number, "name": str(number), "path": path, "type": type_name})
        if path:
            (folder / path).mkdir(exist_ok=True)
            (folder / path / "config.json").write_text(json.dumps(files.get(kind, {})))
    (folder / "modules.json").write_text(json.dumps(entries))
    (folder / "sentence_bert_config.json").write_text(json.dumps(files.get("settings", {})))
    (folder / "config_sentence_transformers.json").write_text(json.dumps(files.get("config", {})))
    return str(folder)
