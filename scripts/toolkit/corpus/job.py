"""What a run computes: the settings that a worker needs. A job travels to other processes and machines."""

from dataclasses import dataclass, field

# A task, and the words that say what it does.
TASKS = {
    "embed": "a vector for each text",
    "classify": "the label of each text or pair",
    "tag": "the entities in each text",
    "rerank": "a score for each pair",
    "fill-mask": "the likeliest words for each [MASK]",
}
FORMATS = ("parquet", "jsonl", "csv", "npy")
EMBEDDING_DTYPES = ("float32", "float16", "int8", "uint8", "binary", "ubinary")
POOLINGS = ("mean", "cls", "max", "lasttoken", "weightedmean", "mean_sqrt_len_tokens", "pooler")
AGGREGATIONS = ("none", "simple", "first", "average", "max")

# Larger batches are slower on a CPU: the C library returns blocks of more than 32 MiB to the system after each use.
TOKENS_ON_CPU, TOKENS_ON_ACCELERATOR = 2048, 16384


def part_name(number: int, ending: str) -> str:
    """The name of a file of a part."""
    return f"part-{number:06d}.{ending}"


@dataclass(frozen=True)
class Job:
    """The settings of a run that decide the content of its parts.

    Args:
        model: a folder or a hub id.
        threads: of torch, in each process; results may differ in the last bits between numbers of threads.
        device: "cpu", or an accelerator such as "cuda:1".
        dtype: float32, bfloat16 or int8; None: that of the stored weights.
        max_length: in tokens; None: the model's.
        run: the name of the run among those that write to one output.
        id_column: the column of `id`, which may be absent.
        label_column: the column of the true labels, which may be absent.
        empty_texts: "bad": a row with one cannot be used; "null": it gets a row without results.
        keep: the columns of the input that the output has, each with its name there.
        kinds: of these columns and of that of the ids, see `toolkit.corpus.formats`.
        verify: compare the model with its probe.json.
        options: of the task, such as the pooling of embed.
    """

    model: str
    task: str
    output: str
    run: str = "run"
    format: str = "parquet"
    device: str = "cpu"
    threads: int = 1
    dtype: str | None = None
    max_length: int | None = None
    tokens_per_batch: int = TOKENS_ON_CPU
    part_rows: int = 1000
    id_column: str | None = None
    label_column: str | None = None
    on_bad_row: str = "stop"
    empty_texts: str = "bad"
    keep: dict = field(default_factory=dict)
    kinds: dict = field(default_factory=dict)
    trust_remote_code: bool = False
    verify: bool = False
    options: dict = field(default_factory=dict)

    def part_name(self, number: int) -> str:
        """The name of the file of a part."""
        return part_name(number, self.format)
