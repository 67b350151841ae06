"""The report of a training run: metrics.json and curves.png.

A history is a list of points in the order of the run. A point of the training has `step`, `epoch`, `loss`,
`learning_rate` and `tokens_per_second`; one of an evaluation has `step`, `epoch` and `validation`, a dict from metric
to value.
"""

import functools
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from toolkit.cli import how_to_install
from toolkit.files import atomic_file, to_json, write_json
from toolkit.model_card import History, cell

# Metrics of each label, such as DATE_precision, that are left out of progress lines and curves, where they would be
# most of the text. Each label's F1 is shown; metrics.json and the model card have all metrics.
DETAILS = ("_precision", "_recall", "_number")
MOST_CURVES = 12  # the metrics that are drawn at most

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


def plot_curves(path: Path, history: History, metric_names: Sequence[str]) -> None:
    """Draws the loss and the learning rate over the steps, and beside them the metrics of evaluations.

    Without matplotlib nothing is drawn, and one line on standard error reports it.

    Args:
        path: of the PNG.
        metric_names: the metrics to draw, in this order; "loss" is drawn with the training loss.
    """
    pyplot = open_pyplot()
    if pyplot is None:
        return
    evaluations = [(point["step"], to_json(point["validation"])) for point in history if "validation" in point]
    log = [point for point in history if "loss" in point]
    drawn = [name for name in metric_names if name != "loss" and any(name in values for _, values in evaluations)]
    drawn = drawn[:MOST_CURVES]
    figure = pyplot.figure(figsize=(13 if drawn else 7, max(4.8, 1.8 * len(drawn))), layout="constrained")
    left, *right = figure.subfigures(1, 2 if drawn else 1, squeeze=False)[0]
    draw_training(left, log, evaluations)
    for panel in right:
        draw_metrics(panel, drawn, evaluations)
    last = max((point["step"] for point in history), default=1)
    for axis in figure.axes:
        axis.set_xlim(0, 1.04 * last)
        axis.xaxis.get_major_locator().set_params(integer=True)
        axis.grid(color="lightgrey", linewidth=0.5)
        axis.spines[["top", "right"]].set_visible(False)
    with atomic_file(Path(path)) as temporary:
        figure.savefig(temporary, dpi=120)
    pyplot.close(figure)


@functools.cache
def open_pyplot():
    """matplotlib.pyplot; None if it is not installed."""
    try:
        import matplotlib  # an extra
    except ImportError:
        print(f"curves.png is not drawn: {how_to_install(['matplotlib'])}", file=sys.stderr)
        return None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def draw_training(figure, log: History, evaluations: list) -> None:
    """Draws the training loss (faint), its smoothed curve and the loss of evaluations; below them the learning rate."""
    loss, rate = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    steps, losses = [point["step"] for point in log], numbers(point["loss"] for point in log)
    if len(log) > MOST_UNSMOOTHED:
        loss.plot(steps, losses, color="tab:blue", alpha=0.3, linewidth=1, label="training")
        loss.plot(steps, smoothed(losses), color="tab:blue", linewidth=1.8, label="training, smoothed")
    elif log:
        loss.plot(steps, losses, ".-", color="tab:blue", linewidth=1.2, label="training")
    evaluated = [(step, values["loss"]) for step, values in evaluations if "loss" in values]
    if evaluated:
        loss.plot(*over_steps(evaluated), "o-", color="tab:orange", markersize=4, linewidth=1.2, label="validation")
    loss.set_ylabel("loss")
    if loss.lines:
        loss.legend(frameon=False, fontsize="small")
    rates = numbers(point.get("learning_rate") for point in log)
    rate.plot(steps, rates, "-" if len(log) > MOST_UNSMOOTHED else ".-", color="grey", linewidth=1.2)
    rate.set_ylim(bottom=0)
    rate.ticklabel_format(axis="y", style="sci", scilimits=(0, 0))
    rate.set_ylabel("learning rate")
    rate.set_xlabel("step")


def draw_metrics(figure, names: list[str], evaluations: list) -> None:
    """Draws each metric in axes of its own, because their scales differ."""
    axes = figure.subplots(len(names), 1, sharex=True, squeeze=False)[:, 0]
    for axis, name in zip(axes, names, strict=True):
        points = [(step, values[name]) for step, values in evaluations if name in values]
        axis.plot(*over_steps(points), "o-", color="tab:green", markersize=4, linewidth=1.2)
        axis.set_title(name, loc="left", fontsize="medium")
        axis.margins(y=0.25)
        # The last value, which the model card has as well, is written beside its point.
        step, value = points[-1]
        if value is not None:
            axis.annotate(cell(value), (step, value), (0, 5), textcoords="offset points", ha="right", fontsize="small")
    axes[-1].set_xlabel("step")


def over_steps(points: list[tuple[int, float | None]]) -> tuple[list[int], list[float]]:
    """Steps and values, the arguments of `plot`."""
    return [step for step, _ in points], numbers(value for _, value in points)


def numbers(values) -> list[float]:
    """The values as floats; NaN, which is not drawn, for None and infinities."""
    return [math.nan if value is None or not math.isfinite(value) else float(value) for value in values]


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


def plot_confusion(path, labels, references, predictions, title):
    pass
