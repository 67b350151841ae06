"""The report of a training run: its metrics in words, and curves.png.

A history is a list of points in the order of the run. A point of the training has `step`, `epoch`, `loss`,
`learning_rate` and `tokens_per_second`; one of an evaluation has `step`, `epoch` and `validation`, a dict from metric
to value. `epoch` is None within the first epoch of a stream, whose length is not known.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from toolkit.files import to_json
from toolkit.finetuning.checkpoints import Progress
from toolkit.metrics import metric_range
from toolkit.model_card import cell
from toolkit.pictures import has_matplotlib, new_figure

History = Sequence[Mapping]

# Metrics of each label, such as DATE_precision, that are left out of progress lines, where they would be most of the
# text. Each label's F1 is shown; metrics.json and the model card have all metrics.
DETAILS = ("_precision", "_recall", "_number")

MOST_PANELS = 6  # of curves.png
VALIDATION = {"color": "tab:orange", "marker": "o", "markersize": 4, "linewidth": 1.2, "clip_on": False}

# A perplexity that falls by more than this factor, as from random weights, is drawn on a logarithmic scale.
LARGEST_LINEAR_RATIO = 100

# A loss curve with more points than this is smoothed.
MOST_UNSMOOTHED = 25


def headline(metrics: Mapping) -> dict:
    """The metrics without those of `DETAILS`."""
    return {name: value for name, value in metrics.items() if not name.endswith(DETAILS)}


def in_words(metrics: Mapping) -> str:
    """The metrics of a progress line: `accuracy 0.8312, f1 0.8290`."""
    return ", ".join(f"{name} {value:.4f}" for name, value in headline(metrics).items())


def rank(metric: float | None, loss: float | None, greater_is_better: bool) -> list[float]:
    """A metric and the loss as two numbers that are larger for a better model. NaN, or None, which it is in JSON, is
    worse than every number."""
    values = [(metric, 1 if greater_is_better else -1), (loss, -1)]
    return [-math.inf if each is None or math.isnan(each) else sign * each for each, sign in values]


def checkpoint_in_words(progress: Progress, metric: str) -> str:
    """The step that the weights of the finished model are of, and why, for the model card.

    Args:
        metric: the one that selects the best checkpoint.
    """
    if progress.best_checkpoint is None:
        return f"The weights are those of the last step, {progress.step:,}, because there was no evaluation before."
    step = int(progress.best_checkpoint.split("-")[1])  # step-00000016-epoch-4
    epochs = [point["epoch"] for point in progress.history if point["step"] == step]
    epoch = f" (epoch {epochs[-1]:.4g})" if epochs and epochs[-1] is not None else ""
    value = cell(to_json(progress.best))
    return f"The weights are those of step {step:,}{epoch}, which had the best validation {metric}, {value}."


def plot_curves(path: Path, history: History, metric_names: Sequence[str], task: str | None = None) -> None:
    """Draws the loss of the training and of the evaluations, and each metric, over the steps: up to `MOST_PANELS`
    panels in two columns. The learning rate is drawn where a panel would be empty.

    Without matplotlib nothing is drawn, and one line on standard error reports it.

    Args:
        path: of the PNG.
        metric_names: the metrics, in this order; those without a value, and those without room, are left out.
        task: the Hub's name of it, which some ranges depend on; see `metric_range`.
    """
    if not has_matplotlib():
        return
    evaluations = [point for point in history if "validation" in point]
    log = [point for point in history if "loss" in point]
    drawn = [name for name in metric_names if any(name in point["validation"] for point in evaluations)]
    drawn = drawn[: MOST_PANELS - 1]
    rows = len(drawn) // 2 + 1
    with new_figure(path, 10, 0.4 + 2.8 * rows) as figure:
        axes = figure.subplots(rows, 2, squeeze=False, sharex=True)
        figure.get_layout_engine().set(w_pad=0.1, h_pad=0.1)
        panels = iter(axes.flat)
        draw_loss(next(panels), log, evaluations)
        for name in drawn:
            draw_metric(next(panels), name, evaluations, metric_range(name, task))
        for axis in panels:  # one at most
            axis.plot(*over_steps(log, [point.get("learning_rate") for point in log]), color="grey")
            axis.set_title("learning rate", loc="left")
            axis.yaxis.set_major_formatter("{x:.1e}")
        for axis in axes.flat:
            axis.grid(color="lightgrey", linewidth=0.5)
            axis.spines[["top", "right"]].set_visible(False)
        axis.set_xlim(0, 1.04 * max((point["step"] for point in history), default=1) or 1)
        axis.xaxis.get_major_locator().set_params(integer=True, nbins=6)
        axis.xaxis.set_major_formatter("{x:,.0f}")
        for axis in axes[-1]:
            axis.set_xlabel("step")


def draw_loss(axis, log: History, evaluations: History) -> None:
    """Draws the training loss (faint), its smoothed curve and the loss of evaluations."""
    steps, losses = over_steps(log, [point["loss"] for point in log])
    if len(log) > MOST_UNSMOOTHED:
        import pandas  # comes with `datasets`

        axis.plot(steps, losses, color="tab:blue", alpha=0.3, linewidth=1, label="training")
        losses = pandas.Series(losses).ewm(alpha=MOST_UNSMOOTHED / len(log)).mean()
        axis.plot(steps, losses, color="tab:blue", linewidth=1.8, label="training, smoothed")
    elif log:
        axis.plot(steps, losses, ".-", color="tab:blue", linewidth=1.2, label="training")
    draw_metric(axis, "loss", evaluations, metric_range("loss"))
    if axis.lines:
        axis.legend(frameon=False, fontsize="small")


def draw_metric(axis, name: str, evaluations: History, bounds: tuple[float, float]) -> None:
    """Draws a metric of the evaluations, with its last value above. The axis shows the values with a margin, but not
    beyond `bounds`, and at least a tenth of their size, so that noise is not magnified."""
    points = [point for point in evaluations if name in point["validation"]]
    steps, values = over_steps(points, [point["validation"][name] for point in points])
    axis.set_title(name, loc="left")
    if points:
        axis.plot(steps, values, label="validation", **VALIDATION)
        axis.set_title(f"last: {cell(to_json(values[-1]))}", loc="right", fontsize="small", color="dimgrey")
    (low, high), (lowest, highest) = bounds, axis.dataLim.intervaly
    if not low <= lowest <= highest <= high:  # no values, or another scale than expected, such as per cent
        return
    if low > 0 and highest > LARGEST_LINEAR_RATIO * lowest:
        axis.set_yscale("log")
        return
    size = min(high - low, max(abs(lowest), abs(highest)) or 1)
    margin = max(0.1 * (highest - lowest), (0.1 * size - (highest - lowest)) / 2)
    axis.set_ylim(max(lowest - margin, low), min(highest + margin, high))


def over_steps(points: History, values: list[float | None]) -> tuple[list[int], np.ndarray]:
    """The arguments of `plot`: steps and values, with NaN, which is not drawn, for None and infinities."""
    values = np.array(values, dtype=float)
    return [point["step"] for point in points], np.where(np.isfinite(values), values, math.nan)
