"""Pictures: what all of them share, and which labels a classifier confuses."""

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from toolkit.common import atomic_file

DPI = 150
MOST_LABELS = 60
MOST_LABELS_WITH_COUNTS = 15
LONGEST_LABEL = 20


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
