"""A run over a corpus: checks everything, computes the parts that are missing, and joins what belongs together."""

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout
from tqdm import tqdm

from toolkit.checkpoint import verification
from toolkit.cli import about, require
from toolkit.corpus.job import TOKENS_ON_ACCELERATOR, TOKENS_ON_CPU, Job
from toolkit.corpus.local import run_in_processes, run_parts
from toolkit.corpus.manifest import MANIFEST, check_same, make_manifest, read_manifest
from toolkit.corpus.model import number_of_labels, read_model, task_of
from toolkit.corpus.sources import STANDARD_INPUT, Corpus, Part, open_inputs
from toolkit.corpus.store import STATE, LocalStore, is_remote, open_store
from toolkit.corpus.summary import ERRORS, Totals, is_joined, join_arrays, join_states, write_metrics
from toolkit.corpus.worker import Done, Worker, in_words
from toolkit.inputs import Row, columns_of
from toolkit.labels import saved_labels
from toolkit.progress import LogLines
from toolkit.row_files import SECOND_TEXTS, TEXTS, find_column

LOCK = ".lock"
SECONDS_BETWEEN_LOG_LINES = 60

# Usual names of the columns of pairs.
QUERIES, DOCUMENTS = ("query", *TEXTS), ("text_pair", "document", "passage", "answer", *SECOND_TEXTS)

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
    """

    def __init__(self, args, report):
        self.args, self.report = args, report
        self.is_interrupted, self.started = False, 0.0
        if args.format == "parquet":
            require("pyarrow")
        with about(args.model):
            self.fields = read_model(args.model, args.trust_remote_code)
            self.task = args.task or task_of(args.model, self.fields)
            if args.verify:
                verification(args.model)
        check_flags(args, self.task)
        self.corpus = Corpus(open_inputs(args.inputs, args.delimiter), args.limit)
        first = self.corpus.first_rows()
        self.store = open_store(args.output)
        self.before = read_manifest(self.store) if args.resume else None
        self.devices = devices_of(args)
        self.job = self.make_job(first)

    def make_job(self, first: list[Row]) -> Job:
        """The job, with the columns that the first rows have."""
        args, task = self.args, self.task
        columns = columns_of(lambda: first)
        options = {name: getattr(args, name) for name in TASK_FLAGS[task]}
        options |= find_text_columns(args, task, columns)
        for column, flag in ((args.id_column, "--id_column"), (args.label_column, "--label_column")):
            if column is not None:
                find_column(columns, column, (), f"{flag}")
        if args.label_column is not None:
            options |= self.label_options()
        ids = [row.content.get(args.id_column) for row in first if isinstance(row.content, dict)]
        used = {options["text_column"], options.get("text_pair_column"), args.id_column, args.label_column}
        for each in self.corpus.inputs:
            each.columns = used
        tokens = TOKENS_ON_CPU if self.devices[0] == "cpu" else TOKENS_ON_ACCELERATOR
        return Job(
            model=args.model, task=task, output=args.output, format=args.format, device=self.devices[0],
            threads=self.threads(), dtype=args.dtype, max_length=args.max_length,
            tokens_per_batch=args.tokens_per_batch or tokens, part_rows=args.part_rows, id_column=args.id_column,
            ids_are_integers=bool(ids) and isinstance(ids[0], int), label_column=args.label_column,
            on_bad_row=args.on_bad_row, trust_remote_code=args.trust_remote_code, verify=args.verify,
            options=options,
        )  # fmt: skip

    def label_options(self) -> dict:
        """What is known of the labels of the model, for the metrics."""
        problem = self.fields.get("problem_type") or "single_label"
        labels = saved_labels(self.args.model) or [f"LABEL_{i}" for i in range(number_of_labels(self.fields))]
        problem = "regression" if self.task == "rerank" else problem.removesuffix("_classification")
        return {"problem": problem, "labels": labels, "label_separator": self.args.label_separator}

    def threads(self) -> int:
        """Threads of each process: as given, or as in the run that is resumed, or a share of the processors."""
        if self.args.threads_per_process is not None:
            return self.args.threads_per_process
        if self.before is not None:
            return self.before["threads_per_process"]
        return 1 if self.args.engine == "ray" else max(1, processors() // len(self.devices))

    # -- the output

    def check_output(self) -> None:
        """Checks that the output is empty, or that the run in it is this one.

        Raises:
            ValueError: it is not.
        """
        output = self.args.output
        if not is_remote(output) and self.store.path.exists() and not self.store.path.is_dir():
            raise ValueError(f"--output {output} is a file; expected a folder")
        others = self.store.names() - {LOCK} or self.store.names(STATE)
        if not others:
            return
        if not self.args.resume:
            raise ValueError(f"--output {output} is not empty; expected a new folder, or --resume to continue its run")
        if self.before is None:
            raise ValueError(f"--resume: {output} holds no run; {MANIFEST} is missing there")
        for remark in check_same(self.before, self.manifest):
            self.report(remark)

    @contextmanager
    def output(self) -> Iterator[None]:
        """Creates and locks the folder of the output, and removes what a killed run left unfinished in it."""
        with ExitStack() as stack:
            if isinstance(self.store, LocalStore):
                self.store.path.mkdir(parents=True, exist_ok=True)
                stack.enter_context(locked(self.store.path))
                self.check_output()  # again: another run may have been faster
                for folder in (self.store.path, self.store.path / STATE):
                    for path in folder.glob(".*-[0-9]*"):
                        path.unlink(missing_ok=True)
            if self.before is None:
                self.store.write(MANIFEST, (json.dumps(self.manifest, indent=2, ensure_ascii=False) + "\n").encode())
            yield

    # -- work

    def start(self) -> int:
        """Runs. Returns the exit code."""
        if self.args.dry_run:
            return self.try_out()
        self.manifest = make_manifest(self.job, self.corpus.inputs, self.args.limit)
        self.check_output()
        with self.output():
            computed = self.compute()
            if self.is_interrupted:
                self.report(f"stopped; {computed.rows:,} rows were computed, and --resume computes the others")
                return 130
            return self.finish(computed, time.perf_counter() - self.started)

    def missing_parts(self) -> Iterator[Part]:
        """The parts that are not there, until the run is stopped. The first is read when all models are open."""
        self.started = time.perf_counter()
        names = self.store.names()
        joined = self.job.format == "npy" and is_joined(self.store)
        parts = self.corpus.parts(
            self.job.part_rows, lambda number: not joined and self.job.part_name(number) not in names
        )
        while not self.is_interrupted and (part := next(parts, None)) is not None:
            yield part

    def compute(self) -> Totals:
        """Computes the parts that are not there, and shows the progress. Returns what was computed."""
        computed = Totals()
        with interruptible(self), self.progress_bar() as bar:
            for done in self.engine(self.missing_parts()):
                computed.rows += done.rows
                computed.tokens += done.tokens
                show(bar, self.corpus, done, computed)
        return computed

    def engine(self, parts: Iterator[Part]) -> Iterator[Done]:
        """Computes the parts on the chosen engine."""
        if self.args.engine == "ray":
            from toolkit.corpus.ray_engine import run_on_ray

            return run_on_ray(self.job, parts, self.args.processes, self.args.ray_address)
        if len(self.devices) == 1:
            return run_parts([Worker(self.job).run], parts)
        return run_in_processes(self.job, parts, self.devices)

    def progress_bar(self) -> tqdm:
        is_terminal = sys.stderr.isatty()
        return (tqdm if is_terminal else LogLines)(
            unit="rows", unit_scale=True, desc=self.task, mininterval=0.5 if is_terminal else SECONDS_BETWEEN_LOG_LINES,
            dynamic_ncols=is_terminal,
        )  # fmt: skip

    def finish(self, computed: Totals, seconds: float) -> int:
        """Joins what belongs together, and prints the summary."""
        parts = -(-self.corpus.rows_read // self.job.part_rows)
        totals, metrics = join_states(self.store, parts), {}
        if self.job.label_column is not None and totals.rows:
            metrics = write_metrics(self.store, self.job, parts)
        if self.job.format == "npy":
            join_arrays(self.store, self.job, parts)
        print_summary(self.args.output, self.corpus, totals, computed, metrics, seconds)
        return 0

    def try_out(self) -> int:
        """Computes a few rows, writes nothing, and prints what a run would do."""
        worker = Worker(self.job)
        part = next(self.corpus.parts(TRIED_ROWS, lambda number: True))
        worker.compute(part)  # the first call is slower
        started = time.perf_counter()
        columns, state = worker.compute(part)
        rate = len(part.rows) / (time.perf_counter() - started)
        print(f"task: {self.task}; columns: {', '.join(worker.kinds)}; {len(self.corpus.inputs)} inputs")
        print(f"first row: {json.dumps({name: shown(columns[name]) for name in worker.kinds}, ensure_ascii=False)}")
        print(f"{state['rows']} rows tried, {state['truncated']} too long, {len(state['skipped'])} skipped")
        share = self.corpus.share()
        rows = f"; {self.corpus.rows_read / share:,.0f} rows in all" if share else ""
        print(f"{rate:,.0f} rows a second in one of {len(self.devices)} processes{rows}. Nothing was written.")
        return 0


def shown(values):
    """The first value of a column, without most of a vector."""
    if len(values) == 0:
        return None
    first = values[0].tolist() if hasattr(values[0], "tolist") else values[0]
    return [*first[:3], "…"] if isinstance(first, list) and len(first) > 3 else first


# ---------------------------------------------------------------------------------------------------------------- flags

# The flags of each task, which are options of its job.
TASK_FLAGS = {
    "embed": ("pooling", "normalize", "truncate_dim", "prompt", "prompt_name", "embedding_dtype", "ranges"),
    "classify": ("all_scores", "threshold", "top_k"),
    "tag": ("aggregation",),
    "rerank": ("prompt", "prompt_name"),
    "fill-mask": ("top_k",),
}
PAIR_TASKS = ("classify", "rerank")


def check_flags(args, task: str) -> None:
    """Raises ValueError if flags do not go together, or not with the task."""
    for name in sorted({name for names in TASK_FLAGS.values() for name in names} - {*TASK_FLAGS[task]}):
        if getattr(args, name) not in (None, False):
            tasks = " or ".join(other for other, names in TASK_FLAGS.items() if name in names)
            raise ValueError(f"--{name} is given for the task {task}; expected it with --task {tasks} only")
    for name in ("text_pair_column", "label_column"):
        if getattr(args, name) is not None and task not in PAIR_TASKS:
            raise ValueError(f"--{name} is given for the task {task}; expected --task {' or '.join(PAIR_TASKS)}")
    if args.format == "npy" and (task != "embed" or is_remote(args.output)):
        raise ValueError("--format npy is for --task embed with a local folder; expected another format")
    if args.resume and STANDARD_INPUT in args.inputs:
        raise ValueError("--resume reads the input again, which standard input does not allow; expected files")
    if args.engine == "ray" and args.device not in (None, "cpu"):
        raise ValueError(f"--device is {args.device}; expected cpu with --engine ray")
    if args.ray_address is not None and args.engine != "ray":
        raise ValueError("--ray_address is given without --engine ray; expected both")


def find_text_columns(args, task: str, columns: list[str]) -> dict:
    """The columns of the texts, and of the second texts of pairs. A pair is assumed for classify if there is a column
    of a usual name and no column is named."""
    texts = QUERIES if task == "rerank" else TEXTS
    text = find_column(columns, args.text_column, texts, "the text (--text_column)")
    pair = args.text_pair_column
    if task == "rerank" or pair is not None:
        pair = find_column(columns, pair, DOCUMENTS, "the second text (--text_pair_column)")
    elif task == "classify" and args.text_column is None:
        pair = next((name for name in SECOND_TEXTS if name in columns), None)
    return {"text_column": text, "text_pair_column": pair}


def processors() -> int:
    """The processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def devices_of(args) -> list[str]:
    """The device of each process. On CPUs, by default a process for each processor, or for each `threads_per_process`
    of them; on accelerators, one for each.

    Raises:
        ValueError: there are more processes than accelerators.
    """
    import torch

    device = args.device
    if device is None:
        has_accelerator = args.engine == "local" and torch.accelerator.is_available()
        device = torch.accelerator.current_accelerator().type if has_accelerator else "cpu"
    if device == "cpu":
        count = args.processes or max(1, processors() // (args.threads_per_process or 1))
        return ["cpu"] * count
    if ":" in device:
        return [device]
    available = torch.accelerator.device_count() if torch.accelerator.is_available() else 0
    count = args.processes or max(1, available)
    if count > available:
        raise ValueError(f"--device {device}: {count} processes for {available} such devices; expected one for each")
    return [f"{device}:{number}" for number in range(count)]


# ------------------------------------------------------------------------------------------------------- while it runs


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
    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Locks a folder against other runs. Raises ValueError if another run has it."""
    lock = FileLock(path / LOCK, timeout=0)
    try:
        lock.acquire()
    except Timeout:
        raise ValueError(f"--output {path} is in use by another run; expected a folder of its own") from None
    try:
        yield
    finally:
        with suppress(OSError):
            Path(lock.lock_file).unlink()
        lock.release(force=True)


def show(bar: tqdm, corpus: Corpus, done: Done, computed: Totals) -> None:
    """Shows a finished part: rows, tokens a second, and by the share of the input that was read the remaining time."""
    if share := corpus.share():
        bar.total = max(round(corpus.rows_read / share), bar.n + done.rows)
    seconds = max(time.time() - bar.start_t, 1e-9)
    bar.set_postfix_str(f"{computed.tokens / seconds:,.0f} tokens/s", refresh=False)
    bar.update(done.rows)


def print_summary(output: str, corpus: Corpus, totals: Totals, computed: Totals, metrics: dict, seconds: float) -> None:
    """Prints the end of a run: rows, tokens, speed, what was skipped, metrics, and where the output is."""
    rate = computed.rows / max(seconds, 1e-9)
    print(f"{totals.rows:,} rows, {totals.tokens:,} tokens; {computed.rows:,} rows now in {seconds:,.1f} s, "
          f"{rate:,.0f} rows a second")  # fmt: skip
    if totals.truncated:
        print(f"{totals.truncated:,} texts are longer than the model's input")
    if totals.skipped:
        print(f"{totals.skipped:,} rows were skipped; {ERRORS} names them: {in_words(totals.first_skipped[0])}")
    if corpus.empty:
        print(f"without rows: {', '.join(corpus.empty)}")
    if metrics:
        print(", ".join(f"{name} {value:.4f}" for name, value in metrics.items()))
    print(f"{output} has the output")
