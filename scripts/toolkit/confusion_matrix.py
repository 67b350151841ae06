"""A picture of which labels a classifier confuses."""

from collections.abc import Sequence
from pathlib import Path

from toolkit.pictures import has_matplotlib, new_figure

MOST_LABELS = 60
MOST_LABELS_WITH_COUNTS = 15
LONGEST_LABEL = 20
LONGEST_HORIZONTAL_LABEL = 6


def plot_confusion(
    path: Path, labels: Sequence[str], references: Sequence[str], predictions: Sequence[str], title: str
) -> None:
    """Draws a confusion matrix, with a row for each true label and a column for each predicted one. Colours show the
    share of the row; counts are written in the cells of up to 15 labels.

    Nothing is drawn for more than 60 labels, without references, or without matplotlib.

    Args:
        path: of the PNG.
        labels: all labels, in the order of rows and columns.
        references, predictions: a label for each item.
    """
    if not 0 < len(labels) <= MOST_LABELS or not len(references) or not has_matplotlib():
        return
    from sklearn.metrics import ConfusionMatrixDisplay, confusion_matrix  # in an extra

    counts = confusion_matrix(references, predictions, labels=labels)
    shares = confusion_matrix(references, predictions, labels=labels, normalize="true")
    with_counts = len(labels) <= MOST_LABELS_WITH_COUNTS
    side = max(len(labels) * (0.6 if with_counts else 0.2), 2)  # inches
    names = [short_label(label) for label in labels]
    rotation = "horizontal" if with_counts and max(map(len, names)) <= LONGEST_HORIZONTAL_LABEL else "vertical"
    with new_figure(path, side + 3, side + 2) as figure:
        axis = figure.subplots()
        display = ConfusionMatrixDisplay(shares, display_labels=names)
        display.plot(
            ax=axis,
            cmap="Blues",
            include_values=with_counts,
            xticks_rotation=rotation,
            colorbar=False,
            im_kw={"vmin": 0, "vmax": 1},
            text_kw={"fontsize": "small"},
        )
        for text, count in zip(axis.texts, counts.flat, strict=False):
            text.set_text(f"{count:,}")
        axis.set_title(title, loc="left", parse_math=False)
        figure.colorbar(display.im_, ax=axis, label="share of the true label")


def short_label(label: str) -> str:
    """The label in one line, without the middle if it is long, and with `$` escaped, which would begin a formula."""
    text = " ".join(label.split())
    half = LONGEST_LABEL // 2
    text = text if len(text) <= LONGEST_LABEL else f"{text[:half]}…{text[1 - half :]}"
    return text.replace("$", r"\$")
