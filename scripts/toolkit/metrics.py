"""Metrics of labels and numbers, by scikit-learn; and of tags and texts, by `evaluate` from the modules in
scripts/metrics/, without a network.

    classification_metrics("multi_label", [[1, 0], [1, 1]], [[1, 1], [1, 1]])     {"accuracy": 0.5, "f1": 0.83}
    compute(["rouge", "sacrebleu"], ["a b"], [["a c"]])                           {"rouge1": 0.5, …, "bleu": …}

Each module, metrics/NAME/NAME.py, documents the inputs and values of its metric; `evaluate.load` can also open it by
its path. Keys have no prefix; values are floats on the usual scale: 0 to 100 for sacrebleu and squad, else 0 to 1.
"""

import math
import tempfile
from collections.abc import Iterable, Sequence

import numpy as np

from toolkit.cli import require
from toolkit.files import ROOT

FOLDER = ROOT / "scripts" / "metrics"

# The libraries that each metric requires.
METRICS = {
    "error_rate": ("evaluate", "rapidfuzz"),
    "rouge": ("evaluate", "rouge_score"),
    "sacrebleu": ("evaluate", "sacrebleu"),
    "seqeval": ("evaluate", "seqeval"),
    "squad": ("evaluate",),
}
SHARES = (
    "accuracy",
    "f1",
    "precision",
    "recall",
    "rouge1",
    "rouge2",
    "rougeL",
    "rougeLsum",
    "item_error_rate",
    "next_sentence_accuracy",
)

# The lowest and the highest value of each metric of a whole set.
RANGES = {
    **dict.fromkeys(SHARES, (0, 1)),
    **dict.fromkeys(("matthews_correlation", "pearson", "spearman"), (-1, 1)),
    **dict.fromkeys(("exact_match", "bleu", "chrf"), (0, 100)),
    "perplexity": (1, math.inf),
    **dict.fromkeys(("mean_squared_error", "token_error_rate", "loss", "next_sentence_loss"), (0, math.inf)),
}
RANGES_OF_TASKS = {"question-answering": {"f1": (0, 100)}}  # where they differ


def load(name: str):
    """The `evaluate.Metric` of this name. Tasks load their metrics before the training, to find missing libraries.

    `evaluate` copies the module, a few kB, into HF_MODULES_CACHE, under a lock and a hash of its content. Nothing else
    is written, so processes can compute metrics at the same time.

    Raises:
        CommandError: a library is not installed; the message says how to install it.
    """
    require(*METRICS[name])
    import evaluate

    # `evaluate` creates a folder even if everything is kept in memory.
    with tempfile.TemporaryDirectory() as folder:
        return evaluate.load(str(FOLDER / name), keep_in_memory=True, cache_dir=folder)


def compute(names: str | Sequence[str], predictions: Sequence, references: Sequence) -> dict[str, float]:
    """The values of one or several metrics over a set with a prediction and a reference for each item.

    Raises:
        ValueError: there is no item; the numbers of predictions and references differ; or items have the wrong type.
        CommandError: a library is not installed.
    """
    metrics = {name: load(name) for name in ([names] if isinstance(names, str) else names)}
    if len(predictions) != len(references):
        raise ValueError(f"there are {len(predictions)} predictions and {len(references)} references; expected as many")
    if len(predictions) == 0:
        raise ValueError(f"predictions and references are empty; expected at least one for {', '.join(metrics)}")
    values = {}
    for metric in metrics.values():
        values |= metric.compute(predictions=predictions, references=references)
    return {key: float(value) for key, value in values.items()}


def classification_metrics(problem: str, predictions: Sequence, references: Sequence) -> dict[str, float]:
    """The metrics of a classification.

    Args:
        problem: "single_label", with a number for each item; "multi_label", with 0 or 1 for each label of an item; or
            "regression", with as many numbers for each item.

    Raises:
        ValueError: there are no items, or a number is NaN or infinite.
        CommandError: scikit-learn is not installed.
    """
    require("sklearn")
    if problem == "regression":
        return regression_metrics(predictions, references)
    metrics = label_metrics(predictions, references)
    return metrics | matthews_correlation(predictions, references) if problem == "single_label" else metrics


def label_metrics(predictions: Sequence, references: Sequence) -> dict[str, float]:
    """accuracy: the share of items whose prediction equals the reference, as a whole if it is a row of 0 and 1.
    f1: the mean over the labels that occur of the harmonic mean of precision and recall; 0 if none occurs."""
    from sklearn.metrics import accuracy_score, f1_score

    references, predictions = np.asarray(references), np.asarray(predictions)
    if references.ndim == 2:
        # Another column, because scikit-learn takes a single one for the two labels 0 and 1.
        references, predictions = (np.pad(each, ((0, 0), (0, 1))) for each in (references, predictions))
    f1 = f1_score(references, predictions, average="macro", zero_division=np.nan)  # labels with NaN are left out
    return {"accuracy": accuracy_score(references, predictions), "f1": float(np.nan_to_num(f1))}


def matthews_correlation(predictions: Sequence[int], references: Sequence[int]) -> dict[str, float]:
    """Matthews' correlation coefficient, from -1 to 1; 0 is no better than chance, and the value if all predictions, or
    all references, are the same label."""
    from sklearn.metrics import matthews_corrcoef

    is_one_label = len({*predictions, *references}) == 1  # scikit-learn would warn
    return {"matthews_correlation": 0.0 if is_one_label else matthews_corrcoef(references, predictions)}


def regression_metrics(predictions: Sequence[Sequence], references: Sequence[Sequence]) -> dict[str, float]:
    """The mean squared error, and Pearson's and Spearman's correlation, from -1 to 1: means over the columns. The
    correlation of a column with one value is 0, because the formulas divide 0 by 0."""
    from scipy.stats import pearsonr, spearmanr
    from sklearn.metrics import mean_squared_error

    error = mean_squared_error(references, predictions)  # raises if a number is NaN or infinite
    columns = list(zip(np.transpose(predictions), np.transpose(references), strict=True))

    def correlation(function) -> float:
        return float(np.mean([function(*pair).statistic if np.ptp(pair, axis=1).all() else 0 for pair in columns]))

    return {"pearson": correlation(pearsonr), "spearman": correlation(spearmanr), "mean_squared_error": error}


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
