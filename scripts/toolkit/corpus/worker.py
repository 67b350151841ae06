"""Computing a part: the function that every process and every Ray actor runs."""

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch

from toolkit.cli import CommandError, about
from toolkit.corpus.formats import encode_part
from toolkit.corpus.job import Job
from toolkit.corpus.sources import Part
from toolkit.corpus.store import STATE, open_store
from toolkit.corpus.tasks import open_task
from toolkit.inputs import Row
from toolkit.labels import read_labels
from toolkit.row_files import text_of


@dataclass
class Done:
    """What a run learns of a finished part."""

    number: int
    rows: int
    tokens: int


class Worker:
    """Computes and writes parts. Its methods may be called from several threads; the model runs in one of its own.

    Raises:
        CommandError: the model cannot be used for the job.
    """

    def __init__(self, job: Job):
        self.job, self.store = job, open_store(job.output)
        self.text_column, self.pair_column = job.options["text_column"], job.options.get("text_pair_column")
        self.model_thread = ThreadPoolExecutor(1, initializer=torch.set_num_threads, initargs=(job.threads,))
        with about(job.model):
            self.task = self.model_thread.submit(open_task, job).result()
        self.kinds = row_kinds(job) | self.task.columns

    def run(self, part: Part) -> Done:
        """Computes a part and writes it. The part's file is the last to be written.

        Raises:
            CommandError: a row cannot be used, and `on_bad_row` is "stop".
        """
        columns, state = self.compute(part)
        encoded = encode_part(self.job.format, self.kinds, columns)
        name = self.job.part_name(part.number).rpartition(".")[0]
        self.store.write(f"{STATE}/{part.number:06d}.json", json.dumps(state, ensure_ascii=False).encode())
        for ending, content in encoded.items():
            self.store.write(f"{name}.{ending}", content)
        return Done(part.number, state["rows"], state["tokens"])

    def compute(self, part: Part) -> tuple[dict, dict]:
        """The columns of a part, and what else is known of it: numbers of rows, tokens and truncated texts, and the
        rows that were skipped."""
        used, skipped = self.check_rows(part.rows)
        encoded = self.encode(used)
        found = self.model_thread.submit(self.task.compute, encoded).result()
        skipped += [fault(used[index][0], reason) for index, reason in encoded.faults.items()]
        kept = [index for index in range(len(used)) if index not in encoded.faults]
        used = [used[index] for index in kept]
        tokens, truncated = (sum(each[index] for index in kept) for each in (encoded.tokens, encoded.truncated))
        skipped.sort(key=lambda each: (each["file"], each["row"]))
        if skipped and self.job.on_bad_row == "stop":
            raise CommandError(in_words(skipped[0]) + ". --on_bad_row skip leaves such rows out")
        state = {"rows": len(used), "tokens": tokens, "truncated": truncated, "skipped": skipped}
        return self.row_columns(used) | found, state

    def encode(self, used: list[tuple[Row, dict]]):
        """The sequences of the texts."""
        texts = [values["text"] for _, values in used]
        pairs = [values["text_pair"] for _, values in used] if self.pair_column else None
        return self.task.encode(texts, pairs)

    def check_rows(self, rows: list[Row]) -> tuple[list[tuple[Row, dict]], list[dict]]:
        """The rows that can be used, each with what is needed of it; and the others, each with the reason."""
        used, skipped = [], []
        for row in rows:
            try:
                used.append((row, self.check(row)))
            except ValueError as error:
                skipped.append(fault(row, str(error)))
        return used, skipped

    def check(self, row: Row) -> dict:
        """What is needed of a row. Raises ValueError if it cannot be used."""
        job, content = self.job, row.content
        if isinstance(content, str):
            raise ValueError(content)
        values = {"text": text_of(content, self.text_column)}
        if self.pair_column:
            values["text_pair"] = text_of(content, self.pair_column)
        if job.id_column:
            values["id"] = clean_id(content.get(job.id_column), job)
        if job.label_column:
            problem, labels = job.options["problem"], job.options["labels"]
            found = read_labels(content.get(job.label_column), problem, labels, job.options["label_separator"])
            values["reference"] = found[0] if problem == "single_label" else found
        return values

    def row_columns(self, used: list[tuple[Row, dict]]) -> dict:
        """The columns that say which row it is."""
        if self.job.id_column:
            columns = {"id": [values["id"] for _, values in used]}
        else:
            columns = {"file": [row.file for row, _ in used], "row": [row.number for row, _ in used]}
        if self.job.label_column:
            columns["reference"] = [values["reference"] for _, values in used]
        return columns


def row_kinds(job: Job) -> dict[str, str]:
    """The kinds of the columns that say which row it is."""
    if job.id_column:
        kinds = {"id": "integer" if job.ids_are_integers else "text"}
    else:
        kinds = {"file": "text", "row": "integer"}
    if job.label_column:
        kinds["reference"] = {"single_label": "text", "multi_label": "texts", "regression": "numbers"}[
            job.options["problem"]
        ]
    return kinds


def clean_id(value, job: Job) -> int | str:
    """The id of a row, of the type of the first row's. Raises ValueError if it is missing or of another type."""
    if job.ids_are_integers:
        if isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**63:
            return value
        raise ValueError(f"{job.id_column!r} is {value!r}; expected an integer, as in the first row")
    if value is None or isinstance(value, (dict, list)):
        raise ValueError(f"{job.id_column!r} is {value!r}; expected a text or a number")
    return str(value)


def fault(row: Row, reason: str) -> dict:
    """A row that cannot be used, as errors.jsonl has it."""
    return {"file": row.file, "row": row.number, "line": row.line, "reason": reason}


def in_words(skipped: dict) -> str:
    """A row that cannot be used, in one line."""
    file, row, line, reason = skipped.values()
    return f"{Row(file, row, line, reason).place}: {reason}"
