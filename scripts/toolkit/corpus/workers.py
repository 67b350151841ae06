"""Computing parts: in this process, in several, or in actors of a Ray cluster."""

import hashlib
import json
import multiprocessing
import os
import signal
import threading
from argparse import Namespace
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, as_completed, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from functools import cached_property, lru_cache, partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch

from toolkit.common import CommandError, about, one_line, silence_libraries
from toolkit.corpus.models import Usage, open_model
from toolkit.corpus.output import Store, read_part, write_part
from toolkit.corpus.rows import Part, bad_row_error, column, fault
from toolkit.corpus.tasks import make_task
from toolkit.data import EmptyText, Row, usable

# Of a row, besides the columns of the output.
HIDDEN = {"digest": pa.binary(16), "tokens": pa.int32(), "cut": pa.int32()}
PARTS_EACH = 2  # that a process has been given: one to compute, and the next
RETRIES = 5  # of an actor that is lost
PARTS_IN_MEMORY = 8  # of an earlier run: rows that stay in their order need few


@dataclass
class Job:
    """What a worker needs to know of a run.

    Args:
        args: the flags.
        columns: of the input.
        settings: what decides the results of a text, besides the text.
        run: the name of the run among those that write to one output.
        output: where parts are written.
        types: of the columns of the input that the output has, see `toolkit.corpus.rows`.
    """

    args: Namespace
    usage: Usage
    columns: list[str]
    settings: bytes
    threads: int
    run: str
    output: str
    types: dict[str, pa.DataType | None] = field(default_factory=dict)

    def read(self, task, content: dict) -> dict:
        """The input of a row, and under `expected` its labels. A row with an empty text that gets no result has the
        field `is_empty`.

        Raises:
            ValueError: the row cannot be used.
        """
        expected = task.read_labels(content) if self.args.label_column is not None else {}
        try:
            return {"expected": expected, **task.read_inputs(content)}
        except EmptyText:
            if self.args.empty_texts == "bad":
                raise
            return {"expected": expected, "is_empty": True}

    def digest(self, fields: dict) -> bytes:
        """A digest of the settings and of the input of a row."""
        others = ("expected", "place")
        inputs = json.dumps({name: value for name, value in fields.items() if name not in others}, sort_keys=True)
        return hashlib.blake2b(self.settings + inputs.encode(), digest_size=16).digest()


class Worker:
    """Computes parts, with a model that is opened when it is first needed."""

    def __init__(self, job: Job, device: str):
        self.job, self.device = job, device
        self.store = Store(job.output, job.run)
        self.earlier_part = lru_cache(PARTS_IN_MEMORY)(partial(read_part, Store(job.args.output or "", job.run)))

    @cached_property
    def task(self):
        silence_libraries()
        with about(self.job.args.model):
            return make_task(self.job.args, self.job.usage, self.job.columns)

    @cached_property
    def model(self):
        if self.device == "cpu":
            torch.set_num_threads(self.job.threads)
        with about(self.job.args.model), torch.inference_mode():
            model = open_model(self.job.args, self.job.usage, self.device)
            if hasattr(self.task, "open"):
                self.task.open(model)
        return model

    def predict(self, rows: list[Row]) -> list[dict]:
        """The results of rows. Raises CommandError at one that cannot be used, with --on_bad_row stop."""
        table, _, record = self.compute(Part(0, rows))
        return table.select(record["results"]).to_pylist()

    def run(self, part: Part) -> Counter:
        """Computes and writes a part. Returns how many rows were read, rows written, and tokens. Raises CommandError at
        a row that cannot be used, with --on_bad_row stop."""
        table, hidden, record = self.compute(part)
        write_part(self.store, part.number, self.job.args.format, table, hidden, record)
        return Counter(read=len(part.rows), rows=record["rows"], tokens=record["tokens"])

    def compute(self, part: Part) -> tuple[pa.Table, pa.Table, dict]:
        """The columns of a part, the hidden ones, and its record."""
        # By its place, what is needed of each row that can be used, and why the others cannot.
        rows, skipped = {}, {}
        for place, row in enumerate(part.rows):
            try:
                rows[place] = {**self.job.read(self.task, usable(row.content)), "place": row.place}
            except ValueError as error:
                skipped[place] = fault(row, str(error))
        asked = [place for place, fields in rows.items() if place not in part.known and "is_empty" not in fields]
        results, faults = self.results([rows[place] for place in asked])
        skipped |= {asked[i]: fault(part.rows[asked[i]], reason) for i, reason in faults.items()}
        if skipped and self.job.args.on_bad_row == "stop":
            raise bad_row_error(skipped[min(skipped)])
        kept = [place for place in rows if place not in skipped]
        computed = {place: i for i, place in enumerate(place for place in asked if place not in skipped)}
        found = self.gather(results, computed, part.known, kept)
        names = [name for name in found.column_names if name not in HIDDEN]
        columns = self.row_columns([part.rows[place] for place in kept])
        table, hidden = pa.table({**columns, **{name: found[name] for name in names}}), found.select(list(HIDDEN))
        record = {
            "rows": len(kept),
            "tokens": sum(filter(None, hidden["tokens"].to_pylist())),
            "truncated": sum(bool(cut) for cut in hidden["cut"].to_pylist()),
            "skipped": [skipped[place] for place in sorted(skipped)],
            "results": names,
        }
        if self.job.args.label_column is not None:
            record["evaluated"] = self.evaluated([rows[place] for place in kept], found.select(names))
        return table, hidden, record

    def results(self, rows: list[dict]) -> tuple[pa.Table | None, dict[int, str]]:
        """The results of rows, and for those that have none, why. None without a row."""
        if not rows:
            return None, {}
        model, (examples, faults) = self.model, self.encoded(rows)
        outputs = self.outputs(model, examples)
        for example, output in zip(examples, outputs, strict=True):
            if output is None:
                faults[example["row"]] = "the model's numbers for it are NaN or infinite"
        if faults:  # the others again, because `decode` expects the examples of all rows
            used = [i for i in range(len(rows)) if i not in faults]
            table, more = self.results([rows[i] for i in used])
            return table, faults | {used[i]: reason for i, reason in more.items()}
        found = self.task.decode(rows, examples, outputs)
        tokens, cut = Counter(), Counter()
        for example in examples:
            tokens[example["row"]] += example["length"]
            cut[example["row"]] += example["cut"]
        for i, row in enumerate(rows):
            found[i] |= {"digest": self.job.digest(row), "tokens": tokens[i], "cut": cut[i]}
        return pa.Table.from_pylist(found, self.schema), {}

    @property
    def schema(self) -> pa.Schema:
        """The columns of the results, which are known when the model is open, and the hidden ones."""
        self.model  # noqa: B018
        return pa.schema([*self.task.columns.items(), *HIDDEN.items()])

    def encoded(self, rows: list[dict]) -> tuple[list[dict], dict[int, str]]:
        """The examples of rows or, if some have none, only why."""
        try:
            return self.task.encode(rows), {}
        except ValueError:
            faults = {}
            for i, row in enumerate(rows):
                try:
                    self.task.encode([row])
                except ValueError as error:
                    faults[i] = str(error).removeprefix(f"{row['place']}: ")
            if not faults:
                raise
            return [], faults

    def outputs(self, model, examples: list[dict]) -> list[Any]:
        """The outputs of examples, computed in batches of similar length."""
        outputs: list[Any] = [None] * len(examples)
        with torch.inference_mode():
            for batch in batches_by_length([example["length"] for example in examples], self.job.args.tokens_per_batch):
                inputs = self.task.collate([examples[i] for i in batch])
                inputs = {name: values.to(self.device) for name, values in inputs.items()}
                try:
                    answers = self.task.answer(model, inputs)
                except (TypeError, AttributeError, LookupError) as error:
                    if not self.job.args.option:
                        raise
                    # `generate` does not check every value before it computes with it.
                    raise ValueError(f"the value of an --option is invalid: {error}") from error
                for i, output in zip(batch, answers, strict=True):
                    outputs[i] = output
        return outputs

    def gather(self, results: pa.Table | None, computed: dict, known: dict, kept: list[int]) -> pa.Table:
        """The results of the rows that are kept, in their order: computed, of an earlier run, or null.

        Args:
            computed: from the place of a row to its number in `results`.
            known: from the place of a row to a part of the earlier run, and its row there.
        """
        tables = [] if results is None else [results]
        indices = dict(computed)
        for number in dict.fromkeys(part for part, _ in known.values()):
            start = sum(map(len, tables))
            tables.append(self.earlier_part(number))
            indices |= {place: start + row for place, (part, row) in known.items() if part == number}
        if not tables:
            tables = [self.schema.empty_table()]
        indices = pa.array(map(indices.get, kept), pa.int64())
        return pa.concat_tables(tables).combine_chunks().take(indices).combine_chunks()

    def row_columns(self, rows: list[Row]) -> dict[str, pa.Array]:
        """The columns that say which row it is, and those that are kept of the input."""
        columns = {
            "file": pa.array([row.file for row in rows], pa.string()),
            "row": pa.array([row.number for row in rows], pa.int64()),
        }
        for name, type in self.job.types.items():
            columns[name] = column([row.content.get(name) for row in rows], type)
        return columns

    def evaluated(self, rows: list[dict], results: pa.Table) -> list:
        """The labels and the prediction of each row that has a result; null for the others."""
        names = self.task.label_fields
        return [
            None if "is_empty" in row else [{name: (row | row["expected"])[name] for name in names}, prediction]
            for row, prediction in zip(rows, results.to_pylist(), strict=True)
        ]


def batches_by_length(lengths: list[int], tokens: int) -> list[list[int]]:
    """The indices of sequences, the longest first, in batches of at most so many tokens, or of one longer sequence."""
    batches: list[list[int]] = []
    room = 0
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        if lengths[index] > room or not batches:
            batches.append([])
            room = tokens
        batches[-1].append(index)
        room -= lengths[index]
    return batches


# -------------------------------------------------------------------------------------------------------------- where


def processors() -> int:
    """The processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def devices_and_threads(args) -> tuple[list[str], int]:
    """The device of each process, and the threads of each. On CPUs, by default a process for each processor, or for as
    many processors as it has threads; on accelerators, one for each; on Ray, as many as have room.

    Raises:
        ValueError: there are more processes than accelerators.
    """
    threads = torch.get_num_threads() if "OMP_NUM_THREADS" in os.environ else None
    if args.ray is not None:
        return [args.device or "cpu"] * (args.processes or 1), threads or 1
    available = torch.accelerator.device_count() if torch.accelerator.is_available() else 0
    device = args.device or (torch.accelerator.current_accelerator().type if available else "cpu")
    if device == "cpu":
        devices = ["cpu"] * (args.processes or max(1, processors() // (threads or 1)))
    elif ":" in device:
        devices = [device]
    else:
        devices = [f"{device}:{number}" for number in range(args.processes or max(1, available))]
        if len(devices) > available:
            raise ValueError(
                f"--processes is {len(devices)}; there are {available} devices {device}. Expected one for each."
            )
    return devices, threads or max(1, processors() // len(devices))


def run_locally(job: Job, parts: Iterator[Part], devices: list[str], again: str) -> Iterator[Counter]:
    """Computes the parts in this process or, with several devices, in a process for each. Yields what is done.

    Args:
        again: what a user does after an error of a process.

    Raises:
        CommandError: the model cannot be used, a part cannot be computed, or a process has died.
    """
    if len(devices) == 1:
        yield from map(Worker(job, devices[0]).run, parts)
        return
    os.environ["OMP_NUM_THREADS"] = str(job.threads)  # which the processes inherit
    os.environ.setdefault("RAYON_NUM_THREADS", str(job.threads))  # of the tokenizers
    spawn = multiprocessing.get_context("spawn")
    queue = spawn.SimpleQueue()
    for device in devices:
        queue.put(device)
    pool = ProcessPoolExecutor(len(devices), spawn, start_worker, (job, queue))
    waiting = set()
    try:
        for part in parts:
            waiting.add(submit(pool, part))
            if len(waiting) == PARTS_EACH * len(devices):
                done, waiting = wait(waiting, return_when=FIRST_COMPLETED)
                yield from (future.result() for future in done)
        yield from (future.result() for future in as_completed(waiting))
    except BrokenProcessPool:
        for process in multiprocessing.active_children():
            process.kill()  # they ignore SIGTERM, and may wait for a lock that the lost process held
        raise CommandError(f"a process has ended, perhaps for lack of memory; {again} computes the rest") from None
    finally:
        # After an error the parts in work are finished, and those that wait are not begun.
        pool.shutdown(wait=True, cancel_futures=True)


def submit(pool: ProcessPoolExecutor, part: Part) -> Future:
    """Submits a part, which may start a process. A terminal or a scheduler sends signals to all processes, and the main
    process decides what they mean: the others inherit that they are blocked, so that none ends while it starts."""
    block = getattr(signal, "pthread_sigmask", lambda how, signals: None)  # Windows has none
    before = block(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        return pool.submit(run_part, part)
    finally:
        block(signal.SIG_SETMASK, before)


def start_worker(job: Job, queue) -> None:
    """Prepares a process of `run_locally`. Its model is opened with its first part, so that an error has a message."""
    global worker
    threading.Thread(target=end_with_parent, daemon=True).start()
    worker = Worker(job, queue.get())


def end_with_parent() -> None:
    multiprocessing.parent_process().join()
    os._exit(1)


def run_part(part: Part) -> Counter:
    """Computes a part in a process. Errors that the user can resolve become one line, which can be sent."""
    with about(f"part {part.number}"):
        return worker.run(part)


def run_on_ray(job: Job, parts: Iterator[Part]) -> Iterator[Counter]:
    """Computes the parts in actors, and yields what is done.

    Raises:
        CommandError: the cluster has no room for an actor, an actor reports an error, or was lost too often.
    """
    import ray
    from ray.util import ActorPool

    import toolkit
    from toolkit.trust import import_package

    code = [str(Path(module.__file__).parent) for module in (import_package(), toolkit)]
    variables = {name: str(job.threads) for name in ("OMP_NUM_THREADS", "RAYON_NUM_THREADS")}
    address, device = job.args.ray, job.args.device or "cpu"
    local = {"include_dashboard": False} if address == "local" else {}
    ray.init(
        address=address,
        runtime_env={"py_modules": code, "env_vars": variables},
        log_to_driver=False,
        logging_level="error",
        **local,
    )
    try:
        needs = {"CPU": job.threads} if device == "cpu" else {"CPU": job.threads, "GPU": 1}
        room = int(min(ray.available_resources().get(name, 0) // amount for name, amount in needs.items()))
        if not room:
            raise CommandError(
                f"the cluster has no room for an actor, which needs {needs}; set OMP_NUM_THREADS to fewer threads"
            )
        retries = {"max_restarts": RETRIES, "max_task_retries": RETRIES}
        actor = ray.remote(**retries, num_cpus=job.threads, num_gpus=needs.get("GPU", 0))(Worker)
        actors = [actor.remote(job, device) for _ in range(job.args.processes or room)]
        pool = ActorPool(actors)
        for part in parts:
            if not pool.has_free():
                yield pool.get_next_unordered()
            pool.submit(lambda actor, part: actor.run.remote(part), part)
        while pool.has_next():
            yield pool.get_next_unordered()
    except ray.exceptions.RayTaskError as error:
        raise error.cause from None
    except (ray.exceptions.RayActorError, ray.exceptions.RaySystemError) as error:
        raise CommandError(f"an actor was lost more than {RETRIES} times: {one_line(error)}") from error
    finally:
        ray.shutdown()
