"""The report of a training run: metrics.json, curves.png and confusion_matrix.png.

A history is a list of points in the order of the run. A point of the training has `step`, `epoch`, `loss`,
`learning_rate` and `tokens_per_second`; one of an evaluation has `step`, `epoch` and `validation`, a dict from metric
to value. `epoch` is None within the first epoch of a stream, whose length is not known.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from toolkit.files import atomic_file, to_json, write_json
from toolkit.metrics import metric_range
from toolkit.model_card import History, cell
from toolkit.pictures import DPI, open_pyplot
from toolkit.training.checkpoints import Progress

# Metrics of each label, such as DATE_precision, that are left out of progress lines, where they would be most of the
# text. Each label's F1 is shown; metrics.json and the model card have all metrics.
DETAILS = ("_precision", "_recall", "_number")

MOST_PANELS = 6  # of curves.png
VALIDATION = {"color": "tab:orange", "marker": "o", "markersize": 4, "linewidth": 1.2, "clip_on": False}

# A perplexity that falls by more than this factor, as from random weights, is drawn on a logarithmic scale.
LARGEST_LINEAR_RATIO = 100

LARGEST_DRAWN = 1e300

# A loss curve with more points than this is smoothed.
MOST_UNSMOOTHED = 25


def write_metrics(folder: Path, metrics: Mapping) -> None:
    """Writes metrics.json into `folder`. NaN, which JSON does not have, becomes null."""
    write_json(Path(folder) / "metrics.json", metrics)


def headline(metrics: Mapping) -> dict:
    """The metrics without those of `DETAILS`."""
    return {name: value for name, value in metrics.items() if not name.endswith(DETAILS)}


def in_words(metrics: Mapping) -> str:
    """The metrics of a progress line: `accuracy 0.8312, f1 0.8290`."""
    return ", ".join(f"{name} {value:.4f}" for name, value in headline(metrics).items())


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
    pyplot = open_pyplot()
    if pyplot is None:
        return
    evaluations = [(point["step"], to_json(point["validation"])) for point in history if "validation" in point]
    log = [point for point in history if "loss" in point]
    drawn = [name for name in metric_names if any(name in values for _, values in evaluations)][: MOST_PANELS - 1]
    rows = len(drawn) // 2 + 1
    with pyplot.style.context("default"):  # dark text on white, whatever the user's style
        figure, axes = pyplot.subplots(rows, 2, figsize=(10, 0.4 + 2.8 * rows), layout="constrained", squeeze=False)
        figure.get_layout_engine().set(w_pad=0.1, h_pad=0.1)
        panels = iter(axes.flat)
        draw_loss(next(panels), log, evaluations)
        for name in drawn:
            draw_metric(next(panels), name, evaluations, metric_range(name, task))
        for axis in panels:  # one at most
            draw_learning_rate(axis, log)
        last = max((point["step"] for point in history), default=0) or 1
        for axis in figure.axes:
            axis.set_xlim(0, 1.04 * last)
            axis.xaxis.get_major_locator().set_params(integer=True, nbins=6)
            axis.xaxis.set_major_formatter("{x:,.0f}")
            axis.grid(color="lightgrey", linewidth=0.5)
            axis.spines[["top", "right"]].set_visible(False)
        for axis in axes[-1]:
            axis.set_xlabel("step")
        with atomic_file(Path(path)) as temporary:
            figure.savefig(temporary, dpi=DPI)
    pyplot.close(figure)


def draw_loss(axis, log: History, evaluations: list) -> None:
    """Draws the training loss (faint), its smoothed curve and the loss of evaluations."""
    steps, losses = [point["step"] for point in log], numbers(point["loss"] for point in log)
    if len(log) > MOST_UNSMOOTHED:
        axis.plot(steps, losses, color="tab:blue", alpha=0.3, linewidth=1, label="training")
        axis.plot(steps, smoothed(losses), color="tab:blue", linewidth=1.8, label="training, smoothed")
    elif log:
        axis.plot(steps, losses, ".-", color="tab:blue", linewidth=1.2, label="training")
    evaluated = [(step, values["loss"]) for step, values in evaluations if "loss" in values]
    if evaluated:
        axis.plot(*over_steps(evaluated), label="validation", **VALIDATION)
    axis.set_title("loss", loc="left")
    set_limits(axis, metric_range("loss"))
    if axis.lines:
        axis.legend(frameon=False, fontsize="small")


def draw_metric(axis, name: str, evaluations: list, bounds: tuple[float, float]) -> None:
    """Draws a metric of the evaluations, within its range. Its last value is written above."""
    points = [(step, values[name]) for step, values in evaluations if name in values]
    axis.plot(*over_steps(points), **VALIDATION)
    axis.set_title(name, loc="left")
    if points[-1][1] is not None:
        axis.set_title(f"last: {cell(points[-1][1])}", loc="right", fontsize="small", color="dimgrey")
    set_limits(axis, bounds)


def draw_learning_rate(axis, log: History) -> None:
    rates = numbers(point.get("learning_rate") for point in log)
    axis.plot([point["step"] for point in log], rates, "-" if len(log) > MOST_UNSMOOTHED else ".-", color="grey")
    highest = max((rate for rate in rates if rate > 0), default=1)
    exponent = math.floor(math.log10(highest))
    axis.set_title("learning rate", loc="left")
    axis.set_title(f"unit: 1e{exponent}", loc="right", fontsize="small", color="dimgrey")
    axis.set_ylim(0, 1.1 * highest)
    axis.yaxis.set_major_formatter(lambda rate, _: f"{rate / 10**exponent:g}")


def set_limits(axis, bounds: tuple[float, float]) -> None:
    """Sets the limits of the values to those that are drawn, with a margin, but not beyond `bounds`."""
    values = [y for line in axis.lines for y in line.get_ydata() if math.isfinite(y)]
    low, high = bounds
    if not values:
        low = low if math.isfinite(low) else 0
        axis.set_ylim(low, high if math.isfinite(high) else low + 1)
        return
    lowest, highest = min(values), max(values)
    if not low <= lowest <= highest <= high:  # another scale than expected, such as per cent
        low, high = -math.inf, math.inf
    if low > 0 and highest > LARGEST_LINEAR_RATIO * lowest:
        axis.set_yscale("log")
        axis.set_ylim(max(lowest / 2, low), 2 * highest)
        return
    size = high - low if math.isfinite(high - low) else max(abs(lowest), abs(highest)) or 1
    margin = max(0.1 * (highest - lowest), (0.1 * size - (highest - lowest)) / 2)
    axis.set_ylim(max(lowest - margin, low), min(highest + margin, high))


def over_steps(points: list[tuple[int, float | None]]) -> tuple[list[int], list[float]]:
    """Steps and values, the arguments of `plot`."""
    return [step for step, _ in points], numbers(value for _, value in points)


def numbers(values) -> list[float]:
    """The values as floats; NaN, which is not drawn, for None, infinities, and numbers too large for matplotlib."""
    return [float(value) if value is not None and abs(value) < LARGEST_DRAWN else math.nan for value in values]


def smoothed(values: list[float]) -> list[float]:
    """The exponential moving average over about a 25th of the values, and at least one, corrected for its initial bias
    (Kingma & Ba 2015, section 3). NaN stays NaN and does not change later values."""
    keep = 1 - 1 / max(1, len(values) / MOST_UNSMOOTHED)
    mean = weight = 0.0
    smooth = []
    for value in values:
        if math.isfinite(value):
            mean, weight = keep * mean + (1 - keep) * value, keep * weight + (1 - keep)
        smooth.append(mean / weight if math.isfinite(value) else math.nan)
    return smooth
