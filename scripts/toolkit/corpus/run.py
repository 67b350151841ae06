"""A run over a corpus: checks everything, computes the parts that are missing, and joins what belongs together."""

import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice, takewhile

from tqdm import tqdm

from toolkit.checkpoint import verification
from toolkit.cli import CommandError, about, handling_stop_signals, require
from toolkit.corpus import flags, manifest
from toolkit.corpus.devices import devices_and_threads
from toolkit.corpus.job import TOKENS_ON_ACCELERATOR, TOKENS_ON_CPU, Job
from toolkit.corpus.local import run_locally
from toolkit.corpus.model import number_of_labels, read_model, task_of
from toolkit.corpus.rows import scan_rows
from toolkit.corpus.sources import Corpus, Part, open_inputs
from toolkit.corpus.store import LocalStore, open_store
from toolkit.corpus.summary import ERRORS, JOINED, METRICS, Totals, join_arrays, totals_of, write_errors, write_metrics
from toolkit.corpus.update import PLANNED, Assembler, finish_update, update
from toolkit.corpus.worker import Done, Worker, fault, in_words, unusable
from toolkit.inputs import Row, columns_of
from toolkit.labels import saved_labels
from toolkit.progress import LogLines
from toolkit.row_files import find_column

SECONDS_BETWEEN_LOG_LINES = 60

# How many rows --dry_run computes.
TRIED_ROWS = 256


class Run:
    """A run of `predict.py`.

    Args:
        args: the parsed flags.
        report: prints a remark.

    Attributes:
        is_interrupted: whether it is stopped, which the parts in work do not notice.
        started: when the first part was asked for.
        expected: how many rows the parts in work have together; None: not known.
        before: the manifest in the output; None if there is none.
        shard, name: the share of the parts, and the name of the run among those of other shares.
    """

    def __init__(self, args, report):
        self.args, self.report = args, report
        self.is_interrupted, self.started, self.expected = False, time.perf_counter(), None
        self.shard = flags.shard_of(args.shard or "1/1")
        self.name = "shard-{}-of-{}".format(*self.shard) if args.shard else "run"
        if args.format == "parquet":
            require("pyarrow")
        with about(args.model):
            self.fields = read_model(args.model, args.trust_remote_code)
            self.task = args.task or task_of(args.model, self.fields)
            if args.verify:
                verification(args.model)
        flags.check_flags(args, self.task)
        self.corpus = Corpus(open_inputs(args.inputs, args.delimiter, args.stdin_format), args.limit)
        self.store = None if args.output is None else open_store(args.output, self.name)
        self.before = None if self.store is None else manifest.read_manifest(self.store)
        resumed = None if self.before is None or args.dry_run else self.before["threads_per_process"]
        self.devices, self.threads = devices_and_threads(args, resumed)
        self.job = self.make_job(self.corpus.first_rows())

    def make_job(self, first: list[Row]) -> Job:
        """The job, with the columns that the first rows have."""
        args, task = self.args, self.task
        columns = columns_of(lambda: first)
        options = {name: getattr(args, name) for name in flags.TASK_FLAGS[task]}
        options |= flags.find_text_columns(args, task, columns)
        for column, flag in ((args.id_column, "--id_column"), (args.label_column, "--label_column")):
            if column is not None:
                find_column(columns, column, (), flag)
        if args.label_column is not None:
            options |= self.label_options()
        keep = flags.find_kept_columns(args, columns)
        used = {options["text_column"], options.get("text_pair_column"), args.id_column, args.label_column, *keep}
        for each in self.corpus.inputs:
            each.columns = None if args.keep_columns == "all" else used
        tokens = TOKENS_ON_CPU if self.devices[0] == "cpu" else TOKENS_ON_ACCELERATOR
        return Job(
            model=args.model,
            task=task,
            output=args.output or "",
            run=self.name,
            format=args.format,
            device=self.devices[0],
            threads=self.threads,
            dtype=args.dtype,
            max_length=args.max_length,
            tokens_per_batch=args.tokens_per_batch or tokens,
            part_rows=args.part_rows,
            id_column=args.id_column,
            label_column=args.label_column,
            on_bad_row=args.on_bad_row,
            empty_texts=args.empty_texts,
            keep=keep,
            trust_remote_code=args.trust_remote_code,
            verify=args.verify,
            options=options,
        )

    def label_options(self) -> dict:
        """What is known of the labels of the model, for the metrics."""
        problem = self.fields.get("problem_type") or "single_label"
        labels = saved_labels(self.args.model) or [f"LABEL_{i}" for i in range(number_of_labels(self.fields))]
        problem = "regression" if self.task == "rerank" else problem.removesuffix("_classification")
        return {"problem": problem, "labels": labels, "label_separator": self.args.label_separator}

    # -- before the work

    def read_all_rows(self) -> None:
        """Reads the input once, before the model: its number of rows, the types of columns, and rows that cannot be
        used.

        Raises:
            CommandError: a row cannot be used, and `on_bad_row` is "stop".
        """
        scan = scan_rows(self.job, self.corpus.with_inputs(), self.args.keep_columns == "all")
        if scan.first_bad is not None and self.args.on_bad_row == "stop":
            raise unusable(fault(*scan.first_bad))
        self.corpus.repeated, self.rows = scan.repeated, scan.rows
        keep = flags.find_kept_columns(self.args, list(scan.kinds))
        self.job = replace(self.job, kinds=scan.kinds, keep=keep)

    def check_output(self) -> None:
        """Checks that the output is empty, or that it may be continued.

        Raises:
            ValueError: it is neither.
        """
        args, output = self.args, self.args.output
        if isinstance(self.store, LocalStore) and self.store.path.exists() and not self.store.path.is_dir():
            raise ValueError(f"--output {output} is a file; expected a folder")
        self.before = manifest.read_manifest(self.store)
        if self.before is None:
            if self.store.sizes():
                raise ValueError(
                    f"--output {output} is not empty and has no {manifest.MANIFEST}; expected a new folder"
                )
        elif args.update:
            return
        elif not (args.resume or args.shard):
            raise ValueError(
                f"--output {output} has a run; expected a new folder, --resume to continue the run, or "
                "--update to bring it up to date"
            )
        elif self.store.has(PLANNED):
            raise ValueError(f"--output {output} has an unfinished update; expected --update, which continues it")
        else:
            for remark in manifest.check_same(self.before, self.manifest):
                self.report(remark)

    def check_unchanged(self) -> None:
        """Raises CommandError if an input has changed since it was read for the first time."""
        try:
            now = [each.fingerprint() for each in self.corpus.inputs]
            difference = manifest.difference_of_inputs(self.manifest["inputs"], now)
        except (ValueError, OSError) as error:
            difference = str(error)
        if difference is not None:
            raise CommandError(f"during the run: {difference}. The output mixes both; start in a new folder")

    # -- work

    def start(self) -> int:
        """Runs. Returns the exit code."""
        self.read_all_rows()
        if self.args.dry_run:
            return self.try_out()
        self.manifest = manifest.make_manifest(self.job, self.corpus.inputs, self.args.limit, self.rows)
        self.check_output()
        with self.store.locked():
            finish_update(self.store)
            self.check_output()  # again: another run may have been faster
            is_update = self.args.update and self.before is not None
            computed = update(self) if is_update else self.compute(self.job, self.missing_parts(), self.write_manifest)
            if self.is_interrupted:
                again = "--update" if is_update else "the same --shard" if self.args.shard else "--resume"
                self.report(f"stopped; {computed.rows:,} rows were computed, and {again} computes the others")
                return 130
            if not is_update:
                self.check_unchanged()
            return self.finish(computed, time.perf_counter() - self.started)

    def missing_parts(self) -> Iterator[Part]:
        """The parts that are not there."""
        if self.job.format == "npy" and self.store.has(JOINED):
            return iter(())
        complete, size = manifest.complete_parts(self.store), self.job.part_rows
        numbers = range(len(manifest.part_files(self.manifest)))
        missing = {number for number in numbers if number % self.shard[1] == self.shard[0] - 1} - complete
        self.expected = sum(min(size, self.rows - size * number) for number in missing)
        return self.corpus.parts(size, lambda number: number in missing)

    def write_manifest(self) -> None:
        if self.args.shard and self.before is None:  # another share may have been faster
            self.check_output()
        if self.before is None:
            self.store.write(manifest.MANIFEST, manifest.to_text(self.manifest))

    def compute(self, job: Job, parts: Iterator[Part], begin: Callable[[], None]) -> Totals:
        """Computes parts, until the run is stopped, and shows the progress. Returns what was computed.

        Args:
            begin: is called when all models are open. Without parts, none is.
        """
        computed = Totals()
        first = list(islice(parts, 1))

        def asked() -> Iterator[Part]:
            self.started = time.perf_counter()
            begin()
            yield first.pop()  # which is not kept in memory
            yield from takewhile(lambda part: not self.is_interrupted, parts)

        if first:
            self.follow(self.engine(job, asked()), self.task, computed)
        return computed

    def follow(self, finished: Iterator[Done], what: str, computed: Totals) -> None:
        """Shows the progress of parts, and adds them to what was computed."""
        is_terminal = sys.stderr.isatty()
        options = {
            "total": self.expected,
            "unit": "rows",
            "unit_scale": True,
            "desc": what,
            "dynamic_ncols": is_terminal,
            "mininterval": 0.5 if is_terminal else SECONDS_BETWEEN_LOG_LINES,
        }
        with interruptible(self), (tqdm if is_terminal else LogLines)(**options) as bar:
            for done in finished:
                computed.rows += done.rows
                computed.tokens += done.tokens
                rate = computed.tokens / max(time.time() - bar.start_t, 1e-9)
                bar.set_postfix_str(f"{rate:,.0f} tokens/s", refresh=False)
                bar.update(done.rows + done.skipped)

    def assemble(self, assembler: Assembler, parts: Iterator[Part]) -> None:
        """Writes the parts of an update, until the run is stopped."""
        self.expected = self.rows
        remaining = takewhile(lambda part: not self.is_interrupted, parts)
        self.follow(map(assembler.run, remaining), "update", Totals())

    def engine(self, job: Job, parts: Iterator[Part]) -> Iterator[Done]:
        """Computes the parts on the chosen engine."""
        if self.args.engine == "ray":
            from toolkit.corpus.ray_engine import run_on_ray

            return run_on_ray(job, parts, self.args.processes, self.args.ray_address, self.report)
        return run_locally(job, parts, self.devices)

    # -- the end

    def finish(self, computed: Totals, seconds: float) -> int:
        """Joins what belongs together, and prints the summary."""
        parts = len(manifest.part_files(self.manifest))
        joined = self.job.format == "npy" and self.store.has(JOINED)
        totals = totals_of((manifest.read_records if joined else manifest.complete_records)(self.store))
        if not joined and totals.parts < parts:
            print(f"{computed.rows:,} rows now in {seconds:,.1f} s; {totals.parts:,} of {parts:,} parts are there")
            return 0
        write_errors(self.store, totals.skipped)
        metrics = {} if self.job.label_column is None else write_metrics(self.store, self.job, parts)
        if self.job.format == "npy":
            join_arrays(self.store, parts)
        print_summary(self.args.output, self.corpus, totals, computed, metrics, seconds)
        return 0

    def try_out(self) -> int:
        """Computes a few rows, writes nothing, and prints what a run would do."""
        worker = Worker(self.job)
        part = next(self.corpus.parts(TRIED_ROWS))
        worker.compute(part)  # the first call is slower
        started = time.perf_counter()
        columns, record = worker.compute(part)
        rate = len(part.rows) / (time.perf_counter() - started)
        print(f"task: {self.task}; columns: {', '.join(worker.kinds)}; {len(self.corpus.inputs)} inputs")
        first = {name: shown(columns[name]) for name in worker.kinds}
        print(f"first row: {json.dumps(first, ensure_ascii=False, default=str)}")
        print(f"{record['rows']} rows tried, {record['truncated']} too long, {len(record['skipped'])} skipped")
        processes = len(self.devices)
        print(
            f"{rate:,.0f} rows a second in one of {processes} processes; {self.rows:,} rows in all, about "
            f"{self.rows / rate / processes / 60:,.0f} minutes. Nothing was written."
        )
        return 0


def shown(values):
    """The first value of a column, without most of a vector."""
    if len(values) == 0:
        return None
    first = values[0].tolist() if hasattr(values[0], "tolist") else values[0]
    return [*first[:3], "…"] if isinstance(first, list) and len(first) > 3 else first


@contextmanager
def interruptible(run: Run) -> Iterator[None]:
    """Stops the run at the first Ctrl-C or SIGTERM. The second one ends the run at once."""

    def stop(number, frame) -> None:
        if run.is_interrupted:
            raise KeyboardInterrupt
        run.is_interrupted = True

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    with handling_stop_signals(stop):
        yield


def print_summary(output: str, corpus: Corpus, totals: Totals, computed: Totals, metrics: dict, seconds: float) -> None:
    """Prints the end of a run: rows, tokens, speed, what was skipped, metrics, and where the output is."""
    rate = computed.rows / max(seconds, 1e-9)
    print(
        f"{totals.rows:,} rows, {totals.tokens:,} tokens; {computed.rows:,} rows now in {seconds:,.1f} s, "
        f"{rate:,.0f} rows a second"
    )
    if totals.truncated:
        print(f"{totals.truncated:,} texts are longer than the model's input")
    if totals.skipped:
        first = in_words(json.loads(totals.skipped[0]))
        print(f"{len(totals.skipped):,} rows were skipped; {ERRORS} names them: {first}")
    if corpus.empty:
        print(f"without rows: {', '.join(sorted(corpus.empty))}")
    if metrics:
        print(f"{METRICS}: " + ", ".join(f"{name} {value:.4f}" for name, value in metrics.items()))
    print(f"{output} has the output")
