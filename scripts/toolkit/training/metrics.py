"""Metrics, computed by `evaluate` from the modules in scripts/metrics/, without a network.

    compute(["accuracy", "f1"], [0, 1, 2], [0, 1, 1], average="macro")     {"accuracy": 0.67, "f1": 0.56}

The inputs and values of each metric are documented in its module, metrics/NAME/NAME.py, which `evaluate.load` can open
by its path as well. Keys have no prefix; values are floats on the usual scale: 0 to 100 for sacrebleu and squad, else 0
to 1.
"""

import inspect
import math
import tempfile
from collections.abc import Sequence

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
OF_LABELS = {"accuracy", "f1", "matthews_correlation"}


def load(name: str):
    """The `evaluate.Metric` of this name. Tasks call it before the training, so that a missing library is found then.

    evaluate copies the module, a few kB, to HF_MODULES_CACHE, under a lock and a hash of its content. Nothing else is
    written: processes that compute metrics at the same time share no file.

    Raises:
        ValueError: there is no such metric.
        CommandError: a library is not installed; the message says how to install it.
    """
    if name not in METRICS:
        raise ValueError(f"there is no metric {name!r}; expected one of {', '.join(METRICS)}")
    require(*METRICS[name])
    import evaluate

    # evaluate makes a folder even for a metric that keeps everything in memory.
    with tempfile.TemporaryDirectory() as folder:
        return evaluate.load(str(FOLDER / name), keep_in_memory=True, cache_dir=folder)


def compute(names: str | Sequence[str], predictions: Sequence, references: Sequence, **options) -> dict[str, float]:
    """The values of one or several metrics over the whole set, of which predictions and references are one an item.

    An option goes to every metric that has it (`average` to f1).

    Raises:
        ValueError: No metric, or one that does not exist; no items, or not as many predictions as references; items of
            another type than the metric's; an option, or its value, that no metric knows.
        ImportError: A package is not installed, as for `load`.
    """
    metrics = {name: load(name) for name in ([names] if isinstance(names, str) else names)}
    if not metrics:
        raise ValueError("no metric is named")
    if len(predictions) != len(references):
        raise ValueError(f"there are {len(predictions)} predictions for {len(references)} references")
    if len(predictions) == 0:
        raise ValueError(f"there is nothing to compute {', '.join(metrics)} of: predictions and references are empty")
    known = {name: options.keys() & inspect.signature(metric._compute).parameters for name, metric in metrics.items()}
    unknown = options.keys() - set().union(*known.values())
    if unknown:
        raise ValueError(f"{', '.join(metrics)} have no option {', '.join(sorted(unknown))}")
    values = {}
    for name, metric in metrics.items():
        if name in OF_LABELS:
            check_labels(name, predictions=predictions, references=references)
        chosen = {option: options[option] for option in known[name]}
        values |= metric.compute(predictions=predictions, references=references, **chosen)
    return {key: float(value) for key, value in values.items()}


def check_labels(name: str, **columns: Sequence) -> None:
    """evaluate would cut the digits off a probability and call the rest a label.

    Raises:
        ValueError: Something else than integers, or rows that are not of one length.
    """
    shapes = set()
    for column, values in columns.items():
        try:
            array = np.asarray(values)
        except ValueError:
            raise ValueError(f"{name}: the rows of {column} are not of one length") from None
        if array.dtype.kind not in "biu":
            raise ValueError(
                f"{name} is of labels, which are integers; {column} hold others, such as {array.flat[0]!r}"
            )
        shapes.add(array.shape[1:])
    if len(shapes) > 1:
        raise ValueError(f"{name}: the items of {' and '.join(columns)} have different numbers of labels")


def perplexity(total_loss: float, count: float) -> float:
    """exp of the mean loss a token, infinity where that is more than a float holds.

    Args:
        total_loss: Cross-entropy in nats, summed over the tokens of all batches: a mean of the batches' means would
            weigh the tokens of small batches more.
        count: How many tokens that are.

    Raises:
        ValueError: No tokens, or a loss that is not a number.
    """
    if not count > 0:
        raise ValueError(f"count is {count}; a perplexity is of one token or more")
    if math.isnan(total_loss):
        raise ValueError("total_loss is nan, of which there is no perplexity")
    try:
        return math.exp(total_loss / count)
    except OverflowError:
        return math.inf
