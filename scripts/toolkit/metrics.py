"""Metrics, computed by `evaluate` from the modules in scripts/metrics/, without a network.

    compute(["accuracy", "f1"], [0, 1, 2], [0, 1, 1], average="macro")     {"accuracy": 0.67, "f1": 0.56}

Each module, metrics/NAME/NAME.py, documents the inputs and values of its metric; `evaluate.load` can also open it by
its path. Keys have no prefix; values are floats on the usual scale: 0 to 100 for sacrebleu and squad, else 0 to 1.
"""

import inspect
import math
import tempfile
from collections.abc import Iterable, Sequence

import numpy as np

from toolkit.cli import require
from toolkit.files import ROOT

FOLDER = ROOT / "scripts" / "metrics"

# The libraries that each metric requires.
METRICS = {
    "accuracy": ("evaluate", "sklearn"),
    "correlation": ("evaluate", "scipy"),
    "error_rate": ("evaluate", "rapidfuzz"),
    "f1": ("evaluate", "sklearn"),
    "matthews_correlation": ("evaluate", "sklearn"),
    "mean_squared_error": ("evaluate", "sklearn"),
    "rouge": ("evaluate", "rouge_score"),
    "sacrebleu": ("evaluate", "sacrebleu"),
    "seqeval": ("evaluate", "seqeval"),
    "squad": ("evaluate",),
}
# The modules for the problems of classification.
CLASSIFICATION_METRICS = {
    "single_label": ["accuracy", "f1", "matthews_correlation"],
    "multi_label": ["f1", "accuracy"],
    "regression": ["correlation", "mean_squared_error"],
}
METRICS_OF_LABELS = {"accuracy", "f1", "matthews_correlation"}

SHARES = ("accuracy", "f1", "precision", "recall", "rouge1", "rouge2", "rougeL", "rougeLsum", "item_error_rate",
          "next_sentence_accuracy")  # fmt: skip

# The lowest and the highest value of each metric of a whole set.
RANGES = (
    dict.fromkeys(SHARES, (0, 1))
    | dict.fromkeys(("matthews_correlation", "pearson", "spearman"), (-1, 1))
    | dict.fromkeys(("exact_match", "bleu", "chrf"), (0, 100))
    | dict.fromkeys(("mean_squared_error", "token_error_rate", "loss", "next_sentence_loss"), (0, math.inf))
    | {"perplexity": (1, math.inf)}
)
RANGES_OF_TASKS = {"question-answering": {"f1": (0, 100)}}  # where they differ


def load(name: str):
    """The `evaluate.Metric` of this name. Tasks load their metrics before the training, to find missing libraries.

    `evaluate` copies the module, a few kB, into HF_MODULES_CACHE, under a lock and a hash of its content. Nothing else
    is written, so processes can compute metrics at the same time.

    Raises:
        ValueError: there is no such metric.
        CommandError: a library is not installed; the message says how to install it.
    """
    if name not in METRICS:
        raise ValueError(f"there is no metric {name!r}; expected one of {', '.join(METRICS)}")
    require(*METRICS[name])
    import evaluate

    # `evaluate` creates a folder even if everything is kept in memory.
    with tempfile.TemporaryDirectory() as folder:
        return evaluate.load(str(FOLDER / name), keep_in_memory=True, cache_dir=folder)


def compute(names: str | Sequence[str], predictions: Sequence, references: Sequence, **options) -> dict[str, float]:
    """The values of one or several metrics over a set with a prediction and a reference for each item.

    An option is passed to every metric that has it, such as `average` to f1.

    Raises:
        ValueError: there is no metric, no item, or no metric of that name or with that option; the numbers of
            predictions and references differ; or items have the wrong type.
        CommandError: a library is not installed.
    """
    metrics = {name: load(name) for name in ([names] if isinstance(names, str) else names)}
    if not metrics:
        raise ValueError(f"names is {names!r}; expected at least one metric")
    if len(predictions) != len(references):
        raise ValueError(f"there are {len(predictions)} predictions and {len(references)} references; expected as many")
    if len(predictions) == 0:
        raise ValueError(f"predictions and references are empty; expected at least one for {', '.join(metrics)}")
    known = {name: options.keys() & inspect.signature(metric._compute).parameters for name, metric in metrics.items()}
    unknown = options.keys() - set().union(*known.values())
    if unknown:
        raise ValueError(f"there is no option {', '.join(sorted(unknown))} of {', '.join(metrics)}")
    values = {}
    for name, metric in metrics.items():
        if name in METRICS_OF_LABELS:
            check_labels(name, predictions=predictions, references=references)
        chosen = {option: options[option] for option in known[name]}
        values |= metric.compute(predictions=predictions, references=references, **chosen)
    return {key: float(value) for key, value in values.items()}


def classification_metrics(problem: str, predictions: Sequence, references: Sequence) -> dict[str, float]:
    """The metrics of a classification.

    Args:
        problem: "single_label", with a number for each item; "multi_label", with 0 or 1 for each label of an item; or
            "regression", with as many numbers for each item, over which the metrics are averaged.

    Raises:
        As `compute`.
    """
    names = CLASSIFICATION_METRICS[problem]
    if problem != "regression":
        return compute(names, predictions, references, average="macro")
    columns = zip(zip(*predictions, strict=True), zip(*references, strict=True), strict=True)
    found = [compute(names, *column) for column in columns]
    return {name: sum(each[name] for each in found) / len(found) for name in found[0]}


def check_labels(name: str, **columns: Sequence) -> None:
    """Checks that labels are integers, to which `evaluate` would silently round probabilities down.

    Raises:
        ValueError: they are not integers, or rows of labels differ in length.
    """
    shapes = set()
    for column, values in columns.items():
        try:
            array = np.asarray(values)
        except ValueError:
            raise ValueError(f"{column} has rows of different lengths; expected one length for {name}") from None
        if array.dtype.kind not in "biu":
            raise ValueError(f"{column} has {array.flat[0]!r}; expected labels, which are integers, for {name}")
        shapes.add(array.shape[1:])
    if len(shapes) > 1:
        raise ValueError(f"{' and '.join(columns)} have different numbers of labels; expected as many for {name}")


def metric_range(name: str, task: str | None = None) -> tuple[float, float]:
    """The lowest and the highest value of a metric; infinities for one that is not in `RANGES`.

    Args:
        task: the Hub's name of it, such as "question-answering", whose f1 is in per cent.
    """
    return RANGES_OF_TASKS.get(task, {}).get(name) or RANGES.get(name, (-math.inf, math.inf))


def main_metrics(names: Iterable[str], first: str | None = None) -> list[str]:
    """The metrics of a whole set other than the loss: not those of one label, such as DATE_f1, or of a part of the
    set, such as has_answer_f1.

    Args:
        first: the metric that the list begins with, if it is one of them.
    """
    return sorted((name for name in names if name in RANGES and name != "loss"), key=lambda name: name != first)


def mean_loss(total_loss: float, count: float) -> float:
    """The mean of a loss that was summed over `count` labels, or over their weights; 0 without labels."""
    return total_loss / count if count else 0.0


def perplexity(total_loss: float, count: float) -> float:
    """exp of the mean loss per token; infinity if that is too large for a float.

    Args:
        total_loss: the cross-entropy in nats, summed over the tokens of all batches. (In a mean of the means of
            batches, the tokens of small batches would count more.)
        count: the number of these tokens.

    Raises:
        ValueError: there are no tokens, or the loss is NaN.
    """
    if not count > 0:
        raise ValueError(f"count is {count}; expected at least one token")
    if math.isnan(total_loss):
        raise ValueError("total_loss is nan; expected a number")
    try:
        return math.exp(total_loss / count)
    except OverflowError:
        return math.inf
