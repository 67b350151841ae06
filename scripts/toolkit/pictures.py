"""Pictures: what all of them share, which labels a classifier confuses, and the speeds of a benchmark."""

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from toolkit.benchmark import VARIANTS
from toolkit.common import atomic_file

DPI = 150
MOST_LABELS = 60
MOST_LABELS_WITH_COUNTS = 15
LONGEST_LABEL = 20
# The colours of bars in float32, bfloat16 and int8.
OURS = {"float32": "#f5b08a", "bfloat16": "#e8743b", "int8": "#c43c0a"}
OTHERS = {"float32": "#c9c9c9", "bfloat16": "#969696", "int8": "#5c5c5c"}


@contextmanager
def new_figure(path: Path, width: float, height: float) -> Iterator:
    """A `matplotlib.figure.Figure` with dark text on white, whatever the user's style. The end of the `with` block
    writes it.

    Args:
        path: of the PNG.
        width, height: in inches.
    """
    from matplotlib import style
    from matplotlib.figure import Figure

    with style.context("default"):
        figure = Figure(figsize=(width, height), dpi=DPI, layout="compressed")
        yield figure
        with atomic_file(Path(path)) as temporary, warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Glyph .* missing")  # of a label in another script
            figure.savefig(temporary)


def plot_confusion(path: Path, labels: Sequence[str], references: Sequence[str], predictions: Sequence[str]) -> None:
    """Draws a confusion matrix, with a row for each true label and a column for each predicted one.

    Nothing is drawn for more than 60 labels.

    Args:
        path: of the PNG.
        labels: all labels, in the order of rows and columns.
        references, predictions: a label for each item.
    """
    if len(labels) > MOST_LABELS:
        return
    from sklearn.metrics import ConfusionMatrixDisplay

    side = 2 + 0.4 * len(labels)  # inches
    names = [" ".join(label.split()).replace("$", r"\$")[:LONGEST_LABEL] for label in labels]  # $ begins a formula
    with new_figure(path, side + 1, side) as figure:
        ConfusionMatrixDisplay.from_predictions(
            references,
            predictions,
            labels=labels,
            display_labels=names,
            ax=figure.subplots(),
            cmap="Blues",
            include_values=len(labels) <= MOST_LABELS_WITH_COUNTS,
            xticks_rotation="vertical",
            colorbar=False,
        )


def plot_speeds(report: dict, path: Path) -> None:
    """Draws the speed of each variant of a benchmark relative to BertModel, in a panel for each workload."""
    rows = [row for name in VARIANTS for row in report["rows"] if row["variant"] == name]
    workloads = list(dict.fromkeys(row["workload"] for row in report["rows"]))
    height = 1.5 + 0.28 * len({row["variant"] for row in rows})
    with new_figure(path, 3 + 3 * len(workloads), height) as figure:
        panels = figure.subplots(1, len(workloads), sharey=True, squeeze=False)[0]
        for axis, workload in zip(panels, workloads, strict=True):
            shown = [row for row in rows if row["workload"] == workload]
            variants = [VARIANTS[row["variant"]] for row in shown]
            labels = [f"{variant.runtime}, {variant.details}" for variant in variants]
            colors = [(OURS if each.runtime == "ScratchBert" else OTHERS)[each.precision] for each in variants]
            bars = axis.barh(labels, [row["vs_bert"] for row in shown], color=colors)
            axis.bar_label(bars, fmt="%.1f", padding=3, fontsize=8)
            axis.set(title=workload, xlabel="times as fast as BertModel in float32")
            axis.axvline(1, color="black", linewidth=1)
            axis.margins(x=0.15)  # for the labels
            axis.spines[["top", "right", "left"]].set_visible(False)
        panels[0].invert_yaxis()
        figure.suptitle(f"{report['model'][-60:]} on {report['machine']['processor']}")
