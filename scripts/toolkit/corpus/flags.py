"""The flags of `predict.py`, checked against one another, the task and the columns of the input."""

import re

from toolkit.corpus.store import is_remote
from toolkit.row_files import SECOND_TEXTS, TEXTS, find_column

# Usual names of the columns of pairs.
QUERIES, DOCUMENTS = ("query", *TEXTS), ("text_pair", "document", "passage", "answer", *SECOND_TEXTS)

# The flags of each task, which are options of its job.
TASK_FLAGS = {
    "embed": ("pooling", "normalize", "truncate_dim", "prompt", "prompt_name", "embedding_dtype", "ranges"),
    "classify": ("all_scores", "threshold", "top_k"),
    "tag": ("aggregation",),
    "rerank": ("prompt", "prompt_name"),
    "fill-mask": ("top_k",),
}
PAIR_TASKS = ("classify", "rerank")

# Columns of results and of places. A column of the input with such a name is renamed.
RESERVED = {
    "id",
    "file",
    "row",
    "reference",
    "embedding",
    "scale",
    "label",
    "labels",
    "score",
    "scores",
    "all_scores",
    "prediction",
    "entities",
    "words",
}


def check_flags(args, task: str) -> None:
    """Raises ValueError if flags do not go together, or not with the task."""
    for name in sorted({name for names in TASK_FLAGS.values() for name in names} - {*TASK_FLAGS[task]}):
        if getattr(args, name) not in (None, False):
            tasks = [other for other, names in TASK_FLAGS.items() if name in names]
            raise ValueError(
                f"--{name} is given for the task {task}; expected it with --task {' or '.join(tasks)} only"
            )
    for name in ("text_pair_column", "label_column"):
        if getattr(args, name) is not None and task not in PAIR_TASKS:
            raise ValueError(f"--{name} is given for the task {task}; expected --task {' or '.join(PAIR_TASKS)}")
    if args.engine == "ray" and args.device not in (None, "cpu", "cuda"):
        raise ValueError(f"--device is {args.device}; expected cpu or cuda with --engine ray")
    if args.ray_address is not None and args.engine != "ray":
        raise ValueError("--ray_address is given without --engine ray; expected both")
    if args.output is None:
        if not args.dry_run:
            raise ValueError("--output is missing; expected a new folder, or --dry_run, which writes nothing")
        return
    if args.format == "npy":
        if task != "embed" or is_remote(args.output):
            raise ValueError("--format npy is for --task embed with a local folder; expected another format")
        for name in ("update", "shard"):
            if getattr(args, name):
                raise ValueError(
                    f"--{name} is given with --format npy, whose parts are joined; expected another format"
                )
        if args.empty_texts == "null":
            raise ValueError("--empty_texts is null with --format npy, which has no null; expected another format")
    if args.update and args.shard:
        raise ValueError("--update is given with --shard; expected one of them")


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


def find_kept_columns(args, columns: list[str]) -> dict[str, str]:
    """The columns of the input that the output has, each with its name there.

    Raises:
        ValueError: a column does not exist, or two have one name in the output.
    """
    given = args.keep_columns
    if given in ("all", "none"):
        chosen = [column for column in columns if given == "all" and column != args.id_column]
    else:
        chosen = [find_column(columns, name.strip(), (), "--keep_columns") for name in given.split(",")]
    names = {column: f"input_{column}" if column in RESERVED else column for column in dict.fromkeys(chosen)}
    if twice := [name for name in names.values() if list(names.values()).count(name) > 1]:
        raise ValueError(
            f"--keep_columns: two columns are {twice[0]!r} in the output, one of them because results "
            "have its name; expected a list of columns without one of them"
        )
    return names


def shard_of(text: str) -> tuple[int, int]:
    """The number of a share of the parts, from 1, and of how many.

    Raises:
        ValueError: it is not such a share.
    """
    found = re.fullmatch(r"(\d+)/(\d+)", text)
    if found is None or not 1 <= int(found[1]) <= int(found[2]):
        raise ValueError(f"--shard is {text!r}; expected a share such as 3/16, from 1/16 to 16/16")
    return int(found[1]), int(found[2])
