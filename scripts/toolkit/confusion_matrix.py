"""A picture of which labels a classifier confuses."""

from collections.abc import Sequence
from pathlib import Path

from toolkit.pictures import has_matplotlib, new_figure

MOST_LABELS = 60
MOST_LABELS_WITH_COUNTS = 15
LONGEST_LABEL = 20


def plot_confusion(path: Path, labels: Sequence[str], references: Sequence[str], predictions: Sequence[str]) -> None:
    """Draws a confusion matrix, with a row for each true label and a column for each predicted one.

    Nothing is drawn for more than 60 labels, or without matplotlib.

    Args:
        path: of the PNG.
        labels: all labels, in the order of rows and columns.
        references, predictions: a label for each item.
    """
    if len(labels) > MOST_LABELS or not has_matplotlib():
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
