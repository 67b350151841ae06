#!/usr/bin/env python
"""Applies a model to a whole corpus: embeddings, labels, entities, scores of pairs, or masked words.

    predict.py sentence-transformers/all-MiniLM-L6-v2 reviews.csv --id_column id --output embeddings
    predict.py my-classifier 'data/*.jsonl.gz' --label_column label --output labels
    cat texts.txt | predict.py my-tagger - --format jsonl --output entities
    predict.py --check --output embeddings

MODEL is a BERT or a ScratchBert: a folder, one of sentence-transformers included, or a hub id. INPUT is a file, a
folder or a quoted pattern of .txt (a text on each line), .csv, .tsv, .jsonl, .ndjson, .json or .parquet, each also .gz
or .zst; any of them as a URL that fsspec opens; - for standard input; or hub:DATASET[:SPLIT]. The input is read twice:
once to check all rows before the model is opened, and once to compute. It is never in memory as a whole.

The folder --output gets numbered parts of --part_rows rows of the input each, in the input's order: the id, or the file
and row, of each text, the columns of the input (--keep_columns), and the results. A part is written whole or not at
all. The folder __run__ in it, which readers of datasets skip, has manifest.json; errors.jsonl, if rows were skipped;
and with --label_column metrics.json.

After a crash, --resume computes the parts that are missing and nothing else. After a change of the input, --update
computes the texts that are new. The files are the same, byte for byte, as those of one run. --check compares them with
what was written.

Exit code: 0 done; 1 --check found a difference; 2 bad usage, a model or an input that cannot be used, or an output that
cannot be written: what was finished is kept; 130 stopped by Ctrl-C or SIGTERM, after the parts in work were finished.
"""

import argparse
import math
import sys

from toolkit.cli import Parser, integer_from, use_utf8
from toolkit.corpus.job import (
    AGGREGATIONS,
    EMBEDDING_DTYPES,
    FORMATS,
    POOLINGS,
    TASKS,
    TOKENS_ON_ACCELERATOR,
    TOKENS_ON_CPU,
)

COUNT = {"type": integer_from(1), "metavar": "N"}


def share(text: str) -> float:
    """An argument type: a number from 0 to 1."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is invalid; expected a number from 0 to 1")
    return value


def processes(text: str) -> int | None:
    """An argument type: an integer of at least 1, or None for `auto`."""
    return None if text == "auto" else integer_from(1)(text)


def poolings(text: str) -> list[str]:
    """An argument type: names of poolings, separated by commas."""
    names = text.split(",")
    if not set(names) <= set(POOLINGS):
        raise argparse.ArgumentTypeError(f"{text!r} is invalid; expected some of {', '.join(POOLINGS)}")
    return names


def ranges(path: str) -> list[list[float]]:
    """An argument type: the numbers of a .npy file with a lowest and a highest value for each number of a vector."""
    import numpy as np

    try:
        found = np.lib.format.open_memmap(path, "r")
    except (OSError, ValueError) as error:
        raise argparse.ArgumentTypeError(f"{path!r} cannot be read ({error}); expected a .npy file") from error
    if found.ndim != 2 or len(found) != 2 or found.dtype.kind not in "fiu":
        raise argparse.ArgumentTypeError(f"{path!r} has shape {found.shape} of {found.dtype}; expected (2, N) numbers")
    if not np.isfinite(found).all() or (found[0] > found[1]).any():
        raise argparse.ArgumentTypeError(f"{path!r} is invalid; expected finite numbers, the lowest values first")
    return found.astype(np.float32).tolist()


def make_parser() -> Parser:
    parser = Parser(__file__, __doc__, usage="%(prog)s MODEL INPUT [INPUT …] --output FOLDER [--FLAG VALUE …]")
    parser.add_argument("model", metavar="MODEL", nargs="?", help="a checkpoint with a tokenizer: a folder or a hub id")
    parser.add_argument(
        "inputs", metavar="INPUT", nargs="*", help="a file, a folder, a pattern, - or hub:DATASET[:SPLIT]"
    )
    used = parser.group("most used")
    used.add_argument(
        "--task",
        choices=TASKS,
        help="; ".join(f"{name}: {what}" for name, what in TASKS.items()) + ". Default: what the model's class is for",
    )
    used.add_argument("--text_column", metavar="NAME", help="the texts; default: a usual name, such as text")
    used.add_argument("--id_column", metavar="NAME", help="the ids, which the output has instead of file and row")
    used.add_argument(
        "--keep_columns",
        metavar="all|none|A,B",
        default="all",
        help="the columns of the input that the output has, with their types; default: all",
    )
    used.add_argument("--output", metavar="FOLDER", help="a new folder, or a URL that fsspec writes to")
    used.add_argument(
        "--format",
        choices=FORMATS,
        default="parquet",
        help="of the parts; npy parts are joined at the end into embeddings.npy and rows.csv",
    )
    used.add_argument("--resume", action="store_true", help="continue the run in --output: compute what is missing")
    used.add_argument(
        "--update",
        action="store_true",
        help="bring the output of an earlier run up to date: "
        "compute the texts that are new or changed; without an output, a new run",
    )
    used.add_argument("--limit", **COUNT, help="use the first N rows only")
    used.add_argument(
        "--on_bad_row",
        choices=["stop", "skip"],
        default="stop",
        help="what to do at a row that cannot be used; skip: list it in errors.jsonl",
    )
    used.add_argument(
        "--empty_texts",
        choices=["bad", "null"],
        default="bad",
        help="a row with an empty text cannot be used (bad), or has null for its results",
    )
    used.add_argument(
        "--processes",
        type=processes,
        metavar="N",
        help="processes, each with a model; auto, the "
        "default: one for each processor or accelerator; on Ray, as many as have room",
    )
    used.add_argument("--dry_run", action="store_true", help="compute a few rows, estimate the time, and write nothing")
    add_data_flags(parser.group("data"))
    add_model_flags(parser.group("model"))
    add_output_flags(parser.group("output"))
    return parser


def add_data_flags(data) -> None:
    data.add_argument("--text_pair_column", metavar="NAME", help="the second texts of pairs")
    data.add_argument(
        "--delimiter", metavar="C", help="of .csv, .tsv and .txt; default: comma, tab, and in .txt a text on each line"
    )
    data.add_argument(
        "--stdin_format",
        choices=["txt", "csv", "tsv", "jsonl"],
        help="of standard input; default: jsonl if it begins with a brace, else txt",
    )
    data.add_argument("--label_column", metavar="NAME", help="the true labels, for metrics.json and a confusion matrix")
    data.add_argument(
        "--label_separator", metavar="TEXT", default="|", help="between the labels of a row, for a model with several"
    )
    data.add_argument("--part_rows", **COUNT, default=1000, help="rows of the input in each part; default: 1000")


def add_model_flags(model) -> None:
    model.add_argument(
        "--pooling",
        type=poolings,
        metavar="NAMES",
        help=f"embed: of the tokens' vectors, some of "
        f"{', '.join(POOLINGS)}, joined by commas; default: that of a sentence-transformers folder, or "
        "mean",
    )
    model.add_argument(
        "--normalize",
        action="store_true",
        help="embed: scale each vector to length 1, as many sentence-transformers folders do",
    )
    prompt = model.add_mutually_exclusive_group()
    prompt.add_argument(
        "--prompt",
        metavar="TEXT",
        help="embed, rerank: put before each (first) text; default: that of a sentence-transformers folder",
    )
    prompt.add_argument("--prompt_name", metavar="NAME", help="embed, rerank: a prompt of the folder, such as query")
    model.add_argument("--all_scores", action="store_true", help="classify: the scores of all labels, by name")
    model.add_argument(
        "--threshold",
        type=share,
        metavar="X",
        help="classify, several labels: the score above which a label is given; default: 0.5",
    )
    model.add_argument(
        "--aggregation",
        choices=AGGREGATIONS,
        help="tag: as aggregation_strategy of transformers' pipeline; default: simple",
    )
    model.add_argument(
        "--top_k",
        **COUNT,
        help="fill-mask: words for each mask, default: 5; classify: the N likeliest labels instead of one",
    )
    model.add_argument(
        "--max_length", **COUNT, help="tokens to which a text is cut (tag: of a window); default: the model's"
    )
    model.add_argument(
        "--dtype",
        choices=["float32", "bfloat16", "int8"],
        help="of the computation; default: that of the stored weights",
    )
    model.add_argument(
        "--device",
        help="such as cpu or cuda:1, and with --engine ray cpu or cuda; default: all accelerators if there are any",
    )
    model.add_argument(
        "--tokens_per_batch",
        **COUNT,
        help="texts are sorted by length and computed in batches of so "
        f"many tokens, without padding; default: {TOKENS_ON_CPU:,} on a CPU, {TOKENS_ON_ACCELERATOR:,} "
        "on an accelerator",
    )
    model.add_argument("--threads_per_process", **COUNT, help="default: OMP_NUM_THREADS, or processors / processes")
    model.add_argument(
        "--engine",
        choices=["local", "ray"],
        default="local",
        help="processes of this machine, or actors of a Ray cluster",
    )
    model.add_argument(
        "--ray_address", metavar="ADDRESS", help="of a running cluster, or auto; default: a new one on this machine"
    )
    model.add_argument(
        "--verify",
        action="store_true",
        help="first compare the model with its probe.json, which save_pretrained writes",
    )
    model.add_argument(
        "--trust_remote_code",
        action="store_true",
        help="run the code in the folder of the model; needed only if it is not what modeling_scratchbert saves",
    )


def add_output_flags(output) -> None:
    output.add_argument("--truncate_dim", **COUNT, help="embed: only the first N numbers of each vector")
    output.add_argument(
        "--embedding_dtype",
        choices=EMBEDDING_DTYPES,
        help="embed: of the numbers; int8 vectors have "
        "a scale, unless --ranges is given; binary ones a bit for each number; default: "
        "float32",
    )
    output.add_argument(
        "--ranges",
        type=ranges,
        metavar="FILE.npy",
        help="embed, for uint8 and int8: the lowest and the highest value of each number, shape (2, N)",
    )
    output.add_argument(
        "--shard",
        metavar="K/N",
        help="compute one share of the parts, such as 3/16, so that several "
        "machines fill one folder; the same again continues it",
    )
    output.add_argument("--check", action="store_true", help="compare every file of --output with what its run wrote")


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code."""
    parser = make_parser()
    args = parser.parse_args(argv)
    use_utf8()

    if args.check and (args.output is None or args.model is not None):
        parser.error("--check is given without --output, or with MODEL; expected --check --output FOLDER")
    if not args.check and not args.inputs:
        parser.error("MODEL or INPUT is missing; expected a model and one or more inputs")

    def work() -> int:
        if args.check:
            from toolkit.corpus.summary import check_output

            for difference in (wrong := check_output(args.output)):
                parser.report(difference)
            print(f"{args.output} is {'incomplete or changed' if wrong else 'complete and as it was written'}")
            return int(bool(wrong))
        from toolkit.corpus.run import Run

        return Run(args, parser.report).start()

    return parser.run(work, is_silent=True)


if __name__ == "__main__":
    sys.exit(main())
