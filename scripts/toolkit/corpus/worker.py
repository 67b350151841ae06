"""Computing a part: the function that every process and every Ray actor runs."""

import base64
import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch

from toolkit.cli import CommandError, about
from toolkit.corpus.digests import digest_of
from toolkit.corpus.formats import encode_part, joined, with_gaps
from toolkit.corpus.job import Job, part_name
from toolkit.corpus.rows import check_row, in_kind
from toolkit.corpus.sources import Part
from toolkit.corpus.store import open_store, record_name
from toolkit.corpus.summary import PREDICTIONS
from toolkit.corpus.tasks import open_task
from toolkit.inputs import Row

# The texts that are tokenised at once have at most so many characters, or one more text: tokens take much more memory.
CHARACTERS_AT_ONCE = 2**20


@dataclass
class Done:
    """What a run learns of a finished part."""

    number: int
    rows: int
    skipped: int
    tokens: int


@dataclass
class Results:
    """What is known of texts.

    Args:
        tokens, truncated: for each text, the number of its tokens, and whether it was longer than the model.
        faults: by the index of a text, why it has no result.
        columns: of the others.
    """

    columns: dict[str, Sequence]
    tokens: list[int] = field(default_factory=list)
    truncated: list[bool] = field(default_factory=list)
    faults: dict[int, str] = field(default_factory=dict)


@dataclass
class UsedRow:
    """A row that can be used.

    Args:
        place: in its part.
        values: see `check_row`.
    """

    place: int
    row: Row
    values: dict

    @property
    def texts(self) -> tuple[str, str | None]:
        return self.values["text"], self.values.get("text_pair")

    @property
    def has_text(self) -> bool:
        return all(self.values[name] is not None for name in ("text", "text_pair") if name in self.values)

    @cached_property
    def digest(self) -> bytes:
        return digest_of(*self.texts)


def usable_rows(job: Job, rows: list[Row]) -> tuple[list[UsedRow], dict[int, dict]]:
    """The rows that can be used; and, by their places in the part, why the others cannot."""
    used, skipped = [], {}
    for place, row in enumerate(rows):
        try:
            used.append(UsedRow(place, row, check_row(job, row)))
        except ValueError as error:
            skipped[place] = fault(row, str(error))
    return used, skipped


class PartWriter(ABC):
    """Writes parts. Its methods may be called from several threads.

    Args:
        kinds: of the columns of results.
    """

    def __init__(self, job: Job, kinds: dict[str, str]):
        self.job, self.store = job, open_store(job.output, job.run)
        self.result_kinds, self.kinds = kinds, row_kinds(job) | kinds

    @abstractmethod
    def results(self, texts: list[tuple[str, str | None]]) -> Results:
        """The results of texts, or of pairs of texts."""

    def run(self, part: Part) -> Done:
        """Computes a part and writes it: last its record, with which it is complete.

        Raises:
            CommandError: a row cannot be used, and `on_bad_row` is "stop".
        """
        columns, record = self.compute(part)
        encoded = encode_part(self.job.format, self.kinds, columns)
        contents = {part_name(part.number, ending): content for ending, content in encoded.items()}
        record["files"] = {
            file: {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
            for file, content in contents.items()
        }
        self.write(record["files"], contents)
        self.store.write(record_name(part.number), json.dumps(record, ensure_ascii=False).encode())
        return Done(part.number, record["rows"], len(record["skipped"]), record["tokens"])

    def write(self, files: dict[str, dict], contents: dict[str, bytes]) -> None:
        """Writes the files of a part, of which `files` has the fingerprints."""
        for name, content in contents.items():
            self.store.write(name, content)

    def compute(self, part: Part) -> tuple[dict, dict]:
        """The columns of a part, and its record.

        Raises:
            CommandError: see `run`.
        """
        used, skipped = usable_rows(self.job, part.rows)
        asked = [each for each in used if each.has_text]
        found = self.results([each.texts for each in asked])
        for number, reason in found.faults.items():
            skipped[asked[number].place] = fault(asked[number].row, reason) | {"digest": asked[number].digest.hex()}
        if skipped and self.job.on_bad_row == "stop":
            raise unusable(skipped[min(skipped)])
        kept = [each for each in used if each.place not in skipped]
        places = [place for place, each in enumerate(kept) if each.has_text]
        columns = found.columns
        if len(places) < len(kept):
            columns = {
                name: with_gaps(self.result_kinds[name], values, places, len(kept)) for name, values in columns.items()
            }
        computed = [number for number in range(len(asked)) if number not in found.faults]
        record = make_record(
            digests=[asked[number].digest for number in computed],
            tokens=[found.tokens[number] for number in computed],
            truncated=[found.truncated[number] for number in computed],
            places=places if len(places) < len(kept) else None,
        )
        record |= {
            "rows": len(kept),
            "columns": self.result_kinds,
            "skipped": [skipped[place] for place in sorted(skipped)],
        }
        return self.row_columns(kept) | columns, record

    def row_columns(self, used: list[UsedRow]) -> dict:
        """The columns that say which row it is, and those that are kept of the input."""
        job = self.job
        if job.id_column:
            columns = {"id": [in_kind(job.kinds[job.id_column], each.values["id"]) for each in used]}
        else:
            columns = {"file": [each.row.file for each in used], "row": [each.row.number for each in used]}
        if job.label_column:
            columns["reference"] = [each.values["reference"] for each in used]
        for column, name in job.keep.items():
            kind = job.kinds[column]
            columns[name] = [in_kind(kind, each.row.content.get(column)) for each in used]
        return columns


class Worker(PartWriter):
    """Computes parts with a model, which runs in a thread of its own.

    Raises:
        CommandError: the model cannot be used for the job.
    """

    def __init__(self, job: Job):
        self.model_thread = ThreadPoolExecutor(1, initializer=torch.set_num_threads, initargs=(job.threads,))
        with about(job.model):
            self.task = self.model_thread.submit(open_task, job).result()
        super().__init__(job, self.task.columns)

    def results(self, texts):
        found, pieces = Results({}), []
        for start, end in slices([len(text) + len(pair or "") for text, pair in texts]):
            ours = [text for text, _ in texts[start:end]]
            pairs = [pair for _, pair in texts[start:end]] if self.job.options.get("text_pair_column") else None
            sequences = self.task.encode(ours, pairs)
            pieces.append(self.model_thread.submit(self.task.compute, sequences).result())
            found.tokens += sequences.tokens
            found.truncated += sequences.truncated
            found.faults |= {start + index: reason for index, reason in sequences.faults.items()}
        found.columns = {name: joined([piece[name] for piece in pieces]) for name in self.task.columns}
        return found


def slices(sizes: list[int]) -> Iterator[tuple[int, int]]:
    """The bounds of slices that are at most `CHARACTERS_AT_ONCE` in size, or one text; of no texts, one slice."""
    start, total = 0, 0
    for index, size in enumerate(sizes):
        if index > start and total + size > CHARACTERS_AT_ONCE:
            yield start, index
            start, total = index, 0
        total += size
    yield start, len(sizes)


def row_kinds(job: Job) -> dict[str, object]:
    """The kinds of the columns that say which row it is, and of those that are kept of the input."""
    kinds: dict[str, object] = {"id": job.kinds[job.id_column]} if job.id_column else {"file": "text", "row": "integer"}
    if job.label_column:
        _, kinds["reference"] = PREDICTIONS[job.options["problem"]]
    return kinds | {name: job.kinds[column] for column, name in job.keep.items()}


def make_record(digests: list[bytes], tokens: list[int], truncated: list[bool], places: list[int] | None) -> dict:
    """What is known of the texts of a part, with their sums.

    Args:
        places: of the rows of the texts in the part; None: each row has a text.
    """
    return {
        "tokens": sum(tokens),
        "truncated": sum(truncated),
        "places": places,
        "digests": base64.b64encode(b"".join(digests)).decode(),
        "tokens_of": base64.b64encode(np.array(tokens, "<u4").tobytes()).decode(),
        "truncated_of": [number for number, is_truncated in enumerate(truncated) if is_truncated],
    }


def fault(row: Row, reason: str) -> dict:
    """A row that cannot be used, as errors.jsonl has it."""
    return {"file": row.file, "row": row.number, "line": row.line, "reason": reason}


def in_words(skipped: dict) -> str:
    """A row that cannot be used, in one line."""
    place = Row(skipped["file"], skipped["row"], skipped["line"], {}).place
    return f"{place}: {skipped['reason']}"


def unusable(skipped: dict) -> CommandError:
    """The error of a run that stops at a row that cannot be used."""
    return CommandError(in_words(skipped) + ". --on_bad_row skip leaves such rows out")
