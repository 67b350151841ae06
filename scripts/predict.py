#!/usr/bin/env python
"""Applies a model to a corpus or a text: embeds, classifies, tags, reranks, answers, generates, fills masks.

    predict.py sentence-transformers/all-MiniLM-L6-v2 reviews.csv --output embeddings
    predict.py my-classifier 'data/*.jsonl.gz' --label_column label --output labels
    predict.py my-classifier --text "A fine film."
    predict.py my-reader --text "Who wrote it?" --text_pair "The book was written by Ada."
    cat texts.txt | predict.py my-tagger - --format jsonl --output entities
    predict.py --check --output embeddings

MODEL is a BERT or a ScratchBert: a folder, one of sentence-transformers included, or a hub id. INPUT is a file, a
folder or a quoted pattern of .txt (a text on each line), .csv, .tsv, .jsonl, .ndjson, .json or .parquet, each also .gz,
.zst or .bz2; any of them as a URL that fsspec opens; - for standard input; or hub:DATASET[:SPLIT]. The input is read
twice: once to check all rows before the model is opened, and once to compute. It is never in memory as a whole.

The folder --output gets numbered parts of --part_rows rows of the input each, in the input's order: file and row, the
columns of the input (--keep_columns), and the results. A part is written whole or not at all. The folder __run__ in it,
which readers of datasets skip, has manifest.json; errors.jsonl, if rows were skipped; and with --label_column
metrics.json.

After a crash, --resume computes the parts that are missing and nothing else. After a change of the input, --update
computes the texts that are new. The files are the same, byte for byte, as those of one run. --check compares them with
what was written.

Exit code: 0 done; 1 --check found a difference; 2 bad usage, a model or an input that cannot be used, or an output that
cannot be written: what was finished is kept; 130 stopped by Ctrl-C or SIGTERM, after the parts in work were finished.
"""

import argparse
import json
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import takewhile
from pathlib import Path

from toolkit.common import (
    CommandError,
    Parser,
    about,
    add_reading_flags,
    handling_stop_signals,
    integer_from,
    processor,
    require,
    to_json,
    version,
)
from toolkit.tasks.arguments import NUMBER

TASKS = {
    "embed": "a vector for each text",
    "classify": "the label of each text or pair",
    "tag": "the entities in each text, or the tag of each word",
    "rerank": "a score for each pair",
    "answer": "the span of each context that answers its question",
    "generate": "a text for each text",
    "fill-mask": "the likeliest words for each [MASK]",
}
# The flags of single tasks. Their default is None, False or [].
TASK_FLAGS = {
    "embed": ("pooling", "normalize", "truncate_dim", "prompt", "prompt_name", "ranges"),
    "classify": ("all_scores", "threshold", "text_pair_column", "label_separator", "prompt", "prompt_name"),
    "tag": ("words_column",),
    "rerank": ("prompt", "prompt_name", "text_pair_column"),
    "answer": ("stride", "max_answer_length", "null_threshold"),
    "generate": ("max_new_tokens", "num_beams", "option"),
    "fill-mask": ("top_k",),
}
QUANTIZED = ("uint8", "binary", "ubinary")
TOKENS_ON_CPU, TOKENS_ON_ACCELERATOR = 2048, 16384
TRIED_ROWS = 256  # of --dry_run
ROWS_OF_A_PROCESS = 500  # by default, of --update: fewer are computed sooner than a process starts
LIBRARIES = ("scratchbert", "torch", "transformers", "tokenizers", "numpy", "pyarrow")


# ========================================================================================================== arguments


COUNT = {"type": integer_from(1), "metavar": "N"}


def make_parser() -> Parser:
    parser = Parser(__file__, __doc__, usage="%(prog)s MODEL INPUT [INPUT …] --output FOLDER [--FLAG VALUE …]")
    parser.add_argument("model", metavar="MODEL", nargs="?", help="a checkpoint with a tokenizer: a folder or a hub id")
    parser.add_argument(
        "inputs", metavar="INPUT", nargs="*", help="a file, a folder, a pattern, - or hub:DATASET[:SPLIT]"
    )
    add_most_used_flags(parser.group("most used"))
    add_data_flags(parser.group("data"))
    add_task_flags(parser.group("task"))
    add_computation_flags(parser.group("computation"))
    return parser


def add_most_used_flags(group) -> None:
    add = group.add_argument
    what = "; ".join(f"{name}: {what}" for name, what in TASKS.items())
    add("--task", choices=TASKS, help=f"{what}. Default: what the model's class is for")
    add("--text", action="append", metavar="TEXT", help="in place of INPUT: print the result; may be repeated")
    add("--text_pair", metavar="TEXT", help="with --text: the second text of a pair, or the context of a question")
    add("--output", metavar="FOLDER", help="a new folder, or a URL that fsspec writes to")
    add(
        "--format",
        choices=("parquet", "jsonl", "csv", "npy"),
        default="parquet",
        help="the format of the parts; npy: embeddings.npy and rows.csv",
    )
    add("--resume", action="store_true", help="continue the run in --output: compute what is missing")
    add(
        "--update",
        action="store_true",
        help="bring the output of an earlier run up to date: compute the texts that are new",
    )
    add("--limit", **COUNT, help="use the first N rows only")
    add(
        "--on_bad_row",
        choices=("stop", "skip"),
        default="stop",
        help="at a row that cannot be used; skip: list it in errors.jsonl",
    )
    add(
        "--empty_texts",
        choices=("bad", "null"),
        default="bad",
        help="a row with an empty text cannot be used, or has null for its results",
    )
    add(
        "--processes",
        **COUNT,
        help="each with a model; default: one for each processor or accelerator; on Ray, as many as have room",
    )
    add("--dry_run", action="store_true", help="compute a few rows, estimate the time, and write nothing")
    add("--check", action="store_true", help="compare every file of --output with what its run wrote")


def add_data_flags(group) -> None:
    add_reading_flags(group)
    add = group.add_argument
    trained = "default: that of the training, or a usual name"
    add("--text_pair_column", metavar="NAME", help=f"classify, rerank: the second texts; {trained}")
    add("--words_column", metavar="NAME", help=f"tag: lists of words, in place of texts; {trained}")
    add("--source_column", metavar="NAME", help=f"generate: the texts to start from; {trained}")
    add("--label_column", metavar="NAME", help="what the results are compared with, for metrics.json")
    add("--label_separator", metavar="TEXT", help="between the labels of a row, for a model with several; default: |")
    add(
        "--keep_columns",
        metavar="all|none|A,B",
        default="all",
        help="the columns of the input that the output has: all, none, or names such as A,B",
    )
    add(
        "--stdin_format",
        choices=("txt", "csv", "tsv", "jsonl"),
        help="default: jsonl if it begins with a brace, else txt",
    )
    add("--part_rows", **COUNT, default=1000, help="rows of the input in each part")


def add_task_flags(group) -> None:
    add = group.add_argument
    add(
        "--max_length",
        **COUNT,
        help="tokens to which a text is cut, or of a window; default: that of the training, or the model's",
    )
    add(
        "--pooling",
        choices=("mean", "cls", "max"),
        help="embed: default: that of a sentence-transformers folder, or mean",
    )
    add("--normalize", action="store_true", help="embed: scale each vector to length 1")
    add("--truncate_dim", **COUNT, help="embed: only the first N numbers of each vector")
    add(
        "--embedding_dtype",
        choices=("float32", "float16", "int8", *QUANTIZED),
        default="float32",
        help="embed: int8 vectors have a scale, unless --ranges is given",
    )
    add(
        "--ranges",
        metavar="FILE.npy",
        help="embed, uint8 and int8: lowest and highest value of each number, shape (2, N)",
    )
    add(
        "--prompt", metavar="TEXT", help="put before each (first) text; default: that of a sentence-transformers folder"
    )
    add("--prompt_name", metavar="NAME", help="a prompt of the folder, such as query")
    add("--all_scores", action="store_true", help="classify: the scores of all labels, by name")
    add(
        "--threshold",
        type=float,
        metavar="X",
        help="classify, several labels: the score above which a label is given; default: 0.5",
    )
    add(
        "--aggregation",
        choices=("none", "simple", "first", "average", "max"),
        default="simple",
        help="tag: as aggregation_strategy of transformers' pipeline",
    )
    add(
        "--stride",
        **COUNT,
        help="answer: tokens of the context that two windows share; default: that of the training, or 128",
    )
    add("--max_answer_length", **COUNT, help="answer: tokens of an answer; default: that of the training, or 30")
    add(
        "--null_threshold",
        metavar="X",
        help="answer: the score that an answer must exceed, or never; default: that of the training",
    )
    add("--max_new_tokens", **COUNT, help="generate: tokens of a text; default: the model's, or 128")
    add("--num_beams", **COUNT, help="generate: beams; 1: greedy decoding; default: the model's")
    add(
        "--option",
        action="append",
        default=[],
        type=option,
        metavar="NAME=VALUE",
        help="generate: any other field of GenerationConfig, as JSON; may be repeated",
    )
    add("--top_k", **COUNT, help="fill-mask: words for each mask; default: 5")


def add_computation_flags(group) -> None:
    add = group.add_argument
    add("--dtype", choices=("float32", "bfloat16", "int8"), help="default: that of the stored weights")
    add("--device", help="such as cpu or cuda:1; on Ray cpu or cuda; default: all accelerators if there are any")
    add(
        "--tokens_per_batch",
        **COUNT,
        help=f"default: {TOKENS_ON_CPU:,} on a CPU, {TOKENS_ON_ACCELERATOR:,} on an accelerator",
    )
    add(
        "--ray",
        nargs="?",
        const="local",
        metavar="ADDRESS",
        help="actors of a Ray cluster in place of processes; auto: the running one",
    )
    add(
        "--shard",
        type=shard,
        metavar="K/N",
        help="compute one share of the parts, such as 3/16; the same again continues it",
    )
    add(
        "--verify",
        action="store_true",
        help="first compare the model with its probe.json, which save_pretrained writes",
    )
    add(
        "--trust_remote_code",
        action="store_true",
        help="run the code in the folder of the model, if it is not what modeling_scratchbert saves",
    )


def shard(text: str) -> tuple[int, int]:
    """A share of the parts: its number, from 1, and how many there are."""
    found = re.fullmatch(r"(\d+)/(\d+)", text)
    if found is None or not 1 <= int(found[1]) <= int(found[2]):
        raise argparse.ArgumentTypeError(f"{text!r} is invalid; expected a share such as 3/16, from 1/16 to 16/16")
    return int(found[1]), int(found[2])


def option(text: str) -> tuple[str, object]:
    name, equals, value = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"{text!r} is invalid; expected NAME=VALUE")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def check_flags(args, task: str) -> None:
    """Raises ValueError if flags do not go together, or not with the task."""
    for name in sorted({name for names in TASK_FLAGS.values() for name in names} - {*TASK_FLAGS[task]}):
        if getattr(args, name):
            tasks = [other for other, names in TASK_FLAGS.items() if name in names]
            raise ValueError(f"--{name} is given for the task {task}; expected --task {' or '.join(tasks)}.")
    is_remote = "://" in (args.output or "")
    rules = [
        (args.text and args.inputs, "--text is given with INPUT; expected one of them."),
        (
            args.text and args.output,
            "--output is given with --text, whose result is printed; expected INPUT, or no --output.",
        ),
        (args.text_pair and not args.text, "--text_pair is given; expected --text with it."),
        (
            not args.text and not args.output and not args.dry_run,
            "--output is missing; expected a new folder, or --dry_run.",
        ),
        (not 0 <= (args.threshold or 0) <= 1, f"--threshold is {args.threshold}; expected a number from 0 to 1."),
        (
            args.null_threshold not in (None, "never") and not NUMBER.fullmatch(args.null_threshold),
            f"--null_threshold is {args.null_threshold}; expected a number, or never.",
        ),
        (args.prompt and args.prompt_name, "--prompt is given with --prompt_name; expected one of them."),
        (args.embedding_dtype != "float32" and task != "embed", "--embedding_dtype is given; expected --task embed."),
        (
            args.ranges is None if args.embedding_dtype == "uint8" else args.ranges and args.embedding_dtype != "int8",
            "--ranges is for --embedding_dtype uint8, which requires it, and int8.",
        ),
        (
            args.format == "npy" and (task != "embed" or is_remote or args.shard or args.empty_texts == "null"),
            "--format is npy; expected --task embed, a local folder, --empty_texts bad and no --shard.",
        ),
        (
            args.update and (args.format != "parquet" or args.shard or args.resume),
            "--update is given; expected --format parquet, and neither --shard nor --resume.",
        ),
        (
            args.ray and args.device not in (None, "cpu", "cuda"),
            f"--device is {args.device}; expected cpu or cuda with --ray.",
        ),
    ]
    for is_broken, message in rules:
        if is_broken:
            raise ValueError(message)


def read_ranges(path: str | None):
    """The lowest and the highest value of each number of a vector, `(2, N)`. Raises ValueError for another file."""
    if path is None:
        return None
    import numpy as np

    try:
        found = np.load(path)
    except (OSError, ValueError) as error:
        raise ValueError(f"--ranges {path} cannot be read ({error}); expected a .npy file.") from error
    if found.ndim != 2 or len(found) != 2 or not np.isfinite(found).all() or (found[0] > found[1]).any():
        raise ValueError(f"--ranges {path} has shape {found.shape}; expected (2, N), the lowest values first.")
    return found.astype(np.float32)


# ================================================================================================================ run


class Prediction:
    """A run of the command, from its flags to its output.

    Attributes:
        is_interrupted: whether it is to stop, which the parts in work do not notice.
        again: what computes the rest after that.
        rows: of the input.
    """

    def __init__(self, args, report):
        from toolkit.corpus.models import read_usage
        from toolkit.corpus.workers import devices_and_threads

        self.args, self.report, self.is_interrupted = args, report, False
        with about(args.model):
            self.usage = read_usage(args.model, args.trust_remote_code)
            args.task = args.task or self.usage.task
        if args.task is None:
            raise ValueError(f"{args.model} has no class with a task; expected --task.")
        check_flags(args, args.task)
        args.ranges = read_ranges(args.ranges)
        if (
            args.embedding_dtype in QUANTIZED
            or args.ranges is not None
            or (self.usage.modules and args.pooling is None)
        ):
            require("sentence_transformers")
        if args.ray:
            require("ray")
        self.devices, self.threads = devices_and_threads(args)
        tokens = TOKENS_ON_CPU if self.devices[0] == "cpu" else TOKENS_ON_ACCELERATOR
        args.tokens_per_batch = args.tokens_per_batch or tokens
        self.again = "the same command" if args.update or args.shard else "the same command with --resume"

    def start(self) -> int:
        """Runs. Returns the exit code."""
        if self.args.text:
            return self.print_texts()
        with tempfile.TemporaryDirectory() as folder:
            return self.run_corpus(Path(folder))

    # -- one text

    def print_texts(self) -> int:
        """Prints the result of each text, in one line of JSON, or several texts as lines."""
        from toolkit.corpus.workers import Worker
        from toolkit.data import Row

        args = self.args
        names = {"answer": ("question", "context")}.get(args.task, ("text", "text_pair"))
        second = {names[1]: args.text_pair} if args.text_pair else {}
        contents = [{names[0]: text, **second} for text in args.text]
        if args.text_pair and args.task != "answer":
            args.text_column, args.text_pair_column = names
        args.label_column, args.on_bad_row = None, "stop"
        worker = Worker(self.make_job(list(contents[0]), "", b""), self.devices[0])
        for result in worker.predict([Row("--text", number, None, own) for number, own in enumerate(contents, 1)]):
            print(json.dumps(result, ensure_ascii=False))
        return 0

    def make_job(self, columns: list[str], output: str, settings: bytes):
        from toolkit.corpus.workers import Job

        run = "shard-{}-of-{}".format(*self.args.shard) if self.args.shard else "run"
        return Job(self.args, self.usage, columns, settings, self.threads, run, output)

    # -- a corpus

    def run_corpus(self, folder: Path) -> int:
        """Checks the input and the output, computes what is missing, and prints the summary.

        Args:
            folder: a temporary one.
        """
        from toolkit.corpus import output
        from toolkit.corpus.rows import open_corpus

        args, started = self.args, time.perf_counter()
        self.corpus = open_corpus(args, folder)
        columns = self.corpus.columns()
        self.settings = self.what_decides()
        job = self.make_job(columns, args.output or "", json.dumps(self.settings, sort_keys=True, default=str).encode())
        digests = self.scan(job, columns)
        if args.dry_run:
            return self.try_out(job)
        self.store = output.Store(args.output, job.run)
        self.manifest = json.loads(output.to_json_bytes(self.make_manifest(job)))
        with self.store.locked():
            output.finish_update(self.store, args.format)
            before = self.check_output()
            if args.update and before:
                done = self.update(job, digests, before)
            else:
                done = Counter() if self.store.has(output.JOINED) else self.compute(job, self.store)
            if self.is_interrupted:
                self.report(f"stopped; {done['rows']:,} rows were computed, and {self.again} computes the others")
                return 130
            return self.finish(job, done, time.perf_counter() - started)

    def what_decides(self) -> dict:
        """What decides the results of a text, besides the text."""
        from toolkit.corpus.models import model_fingerprint

        args = self.args
        # A column decides the text. The separator is that of the labels in the input.
        names = {name for names in TASK_FLAGS.values() for name in names if not name.endswith("_column")}
        names -= {"label_separator"}
        names |= {"task", "max_length", "embedding_dtype", "aggregation", "dtype"}
        return {
            **{name: getattr(args, name) for name in sorted(names)},
            "ranges": None if args.ranges is None else args.ranges.tolist(),
            "device": self.devices[0].partition(":")[0],
            "model_sha256": model_fingerprint(args.model, args.trust_remote_code),
        }

    def scan(self, job, columns: list[str]):
        """Reads the input once: its number of rows, and the types of its columns. Returns the digests of the rows.

        Raises:
            CommandError: a row cannot be used, and --on_bad_row is stop.
            ValueError: a column is missing, or has the name of a result.
        """
        from toolkit.corpus.rows import scan_rows
        from toolkit.corpus.tasks import make_task
        from toolkit.data import find_column

        args = self.args
        with about(args.model):
            task = make_task(args, self.usage, columns)
        kept = None
        if args.keep_columns != "all":
            named = [] if args.keep_columns == "none" else args.keep_columns.split(",")
            kept = [find_column(columns, "--keep_columns", name.strip(), ()) for name in named]
        self.rows, job.types, digests = scan_rows(self.corpus, job, task, kept)
        results = {"embedding", "scale"} if args.task == "embed" else set(task.columns)
        if clash := sorted(job.types.keys() & (results | {"file", "row"})):
            others = ",".join(name for name in job.types if name not in clash) or "none"
            raise ValueError(
                f"the input has the column {clash[0]!r}, which is one of the results; pass --keep_columns {others}."
            )
        return digests

    def make_manifest(self, job) -> dict:
        """What the run computes, from what and on which machine. A run is continued by the same run only."""
        from modeling_scratchbert.cpu.library import find_library
        from toolkit.corpus.output import ROWS_IN_GROUP

        names = ("format", "part_rows", "limit", "on_bad_row", "empty_texts", "label_column", "keep_columns")
        names += ("text_column", "text_pair_column", "words_column", "source_column")
        types = {name: str(own) for name, own in job.types.items()}
        compiled = find_library()
        # With the library in C++, a text has the same bits with any number of threads.
        engine = compiled[0] if compiled else f"torch with {self.threads} threads"
        return {
            "model": self.args.model,
            "settings": self.settings,
            "inputs": self.corpus.fingerprints(),
            "rows": self.rows,
            "layout": {name: getattr(self.args, name) for name in names}
            | {"types": types, "rows_in_group": ROWS_IN_GROUP},
            "machine": {"processor": processor(), "engine": engine, **{name: version(name) for name in LIBRARIES}},
        }

    def check_output(self) -> dict | None:
        """The manifest in the output; None if it is empty. Raises ValueError unless it may be written or continued."""
        from toolkit.corpus import output

        args, store = self.args, self.store
        before = output.read_manifest(store)
        if before is None:
            if store.sizes():
                raise ValueError(
                    f"--output {args.output} is not empty and has no {output.MANIFEST}; expected a new folder."
                )
            return None
        if not store.sizes(output.RECORDS) and not store.has(output.JOINED):
            return None  # nothing was computed
        if args.update:
            return before
        if store.has(f"{output.UPDATE}/{output.MANIFEST}"):
            raise ValueError(f"--output {args.output} has an unfinished update; expected --update, which continues it.")
        if not (args.resume or args.shard):
            raise ValueError(f"--output {args.output} has a run; expected a new folder, --resume or --update.")
        for remark in output.check_same(before, self.manifest):
            self.report(remark)
        return before

    def update(self, job, digests: bytearray, before: dict):
        """Writes all parts anew, beside the old ones, from the results that are known and those of new texts; and then
        puts them in their places.

        Raises:
            ValueError: a text may have other bits in another batch.
        """
        from dataclasses import replace

        from toolkit.corpus import output

        changing = {
            "sampling": dict(self.args.option).get("do_sample"),
            "--trust_remote_code": self.args.trust_remote_code,
            "an accelerator": self.settings["device"] != "cpu",
        }
        for what, is_given in changing.items():
            if is_given:
                raise ValueError(
                    f"--update is given with {what}; expected a run in which a text has the same bits again."
                )
        if before["layout"]["format"] != "parquet":
            raise ValueError(f"--update is given for an output of {before['layout']['format']}; expected parquet.")
        for name, what in (("settings", "the model or an option"), ("machine", "the processor or a library")):
            if before[name] != self.manifest[name]:
                self.report(f"{what} has changed: all rows are computed")
        records = list(output.read_records(self.store)) if before["machine"] == self.manifest["machine"] else []
        known = output.find_known(records, bytes(digests))
        new = (known[:, 0] < 0).sum()
        old = sum(len(record["hidden"]) for _, record in records)
        print(f"{old:,} rows before and {len(known):,} now: {new:,} are computed, the others have a result")
        if self.args.processes is None and new < ROWS_OF_A_PROCESS:
            self.devices = self.devices[:1]

        url, size = f"{self.args.output}/{output.UPDATE}", self.args.part_rows

        def with_known(part):
            own = known[part.number * size :][:size].tolist()
            return replace(part, known={place: tuple(pair) for place, pair in enumerate(own) if pair[0] >= 0})

        beside = output.Store(url, job.run)
        planned = output.to_json_bytes(self.manifest)
        if not beside.has(output.MANIFEST) or beside.read(output.MANIFEST) != planned:
            self.store.remove_folder(output.UPDATE)  # what is left of an update to another input
        done = self.compute(replace(job, output=url), beside, with_known)
        if not self.is_interrupted:
            self.store.write(output.COMPLETE, b"")
            output.finish_update(self.store, self.args.format)
        return done

    def compute(self, job, store, prepare=lambda part: part) -> Counter:
        """Computes the parts that `store` lacks, until the run is stopped, and shows the progress. Returns what was
        computed.

        Args:
            prepare: is called with each part before it is computed.

        Raises:
            CommandError: the input has changed meanwhile; or those of the engine.
        """
        from toolkit.corpus import output
        from toolkit.corpus.workers import run_locally, run_on_ray
        from toolkit.progress import progress_bar

        store.write(output.MANIFEST, output.to_json_bytes(self.manifest))
        shard, count = self.args.shard or (1, 1)
        numbers = set(range(shard - 1, output.number_of_parts(self.manifest), count))
        numbers -= {number for number, _ in output.read_records(store)}
        size, totals = self.args.part_rows, Counter()
        if not numbers:
            return totals
        parts = map(prepare, self.corpus.parts(size, numbers.__contains__))
        parts = takewhile(lambda part: not self.is_interrupted, parts)
        finished = run_on_ray(job, parts) if self.args.ray else run_locally(job, parts, self.devices, self.again)
        expected = sum(min(size, self.rows - size * number) for number in numbers)
        bar_of_rows = progress_bar(expected, unit="rows", unit_scale=True, desc=self.args.task)
        with self.interruptible(), bar_of_rows as bar:
            for done in finished:
                totals.update(done)
                rate = totals["tokens"] / max(time.time() - bar.start_t, 1e-9)
                bar.set_postfix_str(f"{rate:,.0f} tokens/s", refresh=False)
                bar.update(done["read"])
        if not self.is_interrupted and self.corpus.fingerprints() != self.manifest["inputs"]:
            raise CommandError("an input has changed during the run, and the output mixes both; start in a new folder")
        return totals

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """Stops the run at the first Ctrl-C or SIGTERM. The second one ends the run at once."""

        def stop(number, frame) -> None:
            if self.is_interrupted:
                raise KeyboardInterrupt
            self.is_interrupted = True

        with handling_stop_signals(stop):
            yield

    # -- the end

    def finish(self, job, computed: Counter, seconds: float) -> int:
        """Joins what belongs together, and prints the summary."""
        from toolkit.corpus import output

        args, store, parts = self.args, self.store, output.number_of_parts(self.manifest)
        rows = computed["rows"]
        now = f"{rows:,} rows now in {seconds:,.1f} s, {rows / max(seconds, 1e-9):,.0f} rows a second"
        if store.has(output.JOINED):
            output.join_arrays(store, parts)
            print(f"{args.output} has the output")
            return 0
        totals, skipped, evaluated = Counter(), [], []
        for _, record in output.read_records(store):
            totals.update({"parts": 1, **{name: record[name] for name in ("rows", "tokens", "truncated")}})
            skipped += record["skipped"]
            evaluated += record.get("evaluated", [])
        if totals["parts"] < parts:
            print(f"{now}; {totals['parts']:,} of {parts:,} parts are there")
            return 0
        store.remove(output.ERRORS)
        if skipped:
            store.write(
                output.ERRORS, "".join(json.dumps(each, ensure_ascii=False) + "\n" for each in skipped).encode()
            )
        print(f"{totals['rows']:,} rows, {totals['tokens']:,} tokens; {now}")
        if totals["truncated"]:
            print(f"{totals['truncated']:,} texts are longer than the model's input")
        if skipped:
            print(f"{len(skipped):,} rows were skipped; {output.ERRORS} names them")
        if args.label_column is not None:
            self.write_metrics(job, evaluated, len(skipped))
        if args.format == "npy":
            output.join_arrays(store, parts)
        print(f"{args.output} has the output")
        return 0

    def write_metrics(self, job, evaluated: list, skipped: int) -> None:
        """Writes and prints the metrics of the rows that have a result."""
        from toolkit.corpus import output
        from toolkit.corpus.tasks import make_task

        self.store.remove(output.METRICS_FILE)
        pairs = [pair for pair in evaluated if pair is not None]
        if not pairs:
            return
        task = make_task(self.args, self.usage, job.columns)
        rows, predictions = zip(*pairs, strict=True)
        left_out = skipped + len(evaluated) - len(pairs)
        found = {**task.metrics(list(rows), list(predictions)), "rows": len(pairs), "rows_left_out": left_out}
        self.store.write(output.METRICS_FILE, output.to_json_bytes(to_json(found)))
        shown = ", ".join(f"{name} {value:.4f}" for name, value in found.items() if isinstance(value, float))
        print(f"{output.METRICS_FILE}: {shown}; on {len(pairs):,} rows, {left_out:,} left out")

    def try_out(self, job) -> int:
        """Computes a few rows, writes nothing, and prints what a run would do."""
        from toolkit.corpus.workers import Worker

        worker = Worker(job, self.devices[0])
        rows = next(self.corpus.parts(TRIED_ROWS)).rows
        worker.predict(rows)  # the first call is slower
        started = time.perf_counter()
        results = worker.predict(rows)
        rate, processes = len(rows) / (time.perf_counter() - started), len(self.devices)
        columns = ["file", "row", *job.types, *(results[0] if results else ())]
        print(f"task: {self.args.task}; columns: {', '.join(columns)}")
        print(f"first result: {json.dumps(results[:1], ensure_ascii=False):.200}")
        minutes = self.rows / rate / processes / 60
        print(f"{rate:,.0f} rows a second in one of {processes} processes")
        print(f"{self.rows:,} rows take about {minutes:,.0f} minutes; nothing was written")
        return 0


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code."""
    parser = make_parser()
    args = parser.parse_args(argv)
    sys.stdout.reconfigure(encoding="utf-8")
    if args.check and (args.output is None or args.model is not None):
        parser.error("--check is given without --output, or with MODEL; expected --check --output FOLDER")
    if not args.check and (args.model is None or not (args.inputs or args.text)):
        parser.error("MODEL or INPUT is missing; expected a model and one or more inputs, or --text")

    def work() -> int:
        if args.check:
            from toolkit.corpus.output import check_output

            wrong = check_output(args.output)
            for difference in wrong:
                parser.report(difference)
            print(f"{args.output} is {'incomplete or changed' if wrong else 'complete and as it was written'}")
            return int(bool(wrong))
        return Prediction(args, parser.report).start()

    return parser.run(work, is_silent=True)


if __name__ == "__main__":
    sys.exit(main())
