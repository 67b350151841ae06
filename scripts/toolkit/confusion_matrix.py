"""A picture of which labels a classifier confuses."""

import warnings
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from toolkit.files import atomic_file, to_json
from toolkit.pictures import DPI, open_pyplot

POINTS_PER_INCH = 72
MOST_LABELS = 60
MOST_LABELS_WITH_COUNTS = 15
LONGEST_LABEL = 20


def plot_confusion(path: Path, labels: Sequence[str], references: Sequence, predictions: Sequence, title: str) -> None:
    """Draws a confusion matrix, with a row for each true label and a column for each predicted one. Colours show the
    share of the row; counts are written in the cells of up to 15 labels.

    Nothing is drawn for more than 60 labels, without references, or without matplotlib.

    Args:
        path: of the PNG.
        labels: the names, in order.
        references, predictions: a label for each item, by its number or its name.

    Raises:
        ValueError: there is no such label, or the numbers of references and predictions differ.
    """
    counts = confusion_counts(labels, references, predictions)
    pyplot = open_pyplot() if len(labels) <= MOST_LABELS and counts.any() else None
    if pyplot is None:
        return
    names = [short_label(label) for label in labels]
    with_counts = len(labels) <= MOST_LABELS_WITH_COUNTS
    shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    cell_size = 0.6 if with_counts else max(9 / len(labels), 0.2)  # inches
    side = max(cell_size * len(labels), 2)
    with pyplot.style.context("default"):  # dark text on white, whatever the user's style
        figure, axis = pyplot.subplots(figsize=(side + 3, side + 2))
        picture = axis.imshow(shares, cmap="Blues", vmin=0, vmax=1)
        size = min(10, 0.75 * POINTS_PER_INCH * cell_size)
        horizontal = max(map(len, names)) * 0.65 * size < POINTS_PER_INCH * side / len(labels)
        rotation = 0 if horizontal else 45 if with_counts else 90
        axis.set_xticks(
            range(len(names)), names, rotation=rotation, ha="right" if rotation == 45 else "center",
            rotation_mode="anchor" if rotation == 45 else "default", fontsize=size, parse_math=False,
        )  # fmt: skip
        axis.set_yticks(range(len(names)), names, fontsize=size, parse_math=False)
        axis.set_xlabel("predicted label")
        axis.set_ylabel("true label")
        axis.set_title(title, loc="left", parse_math=False)
        axis.tick_params(length=0)
        axis.spines[:].set_color("lightgrey")
        if with_counts:
            write_counts(axis, counts, shares, POINTS_PER_INCH * side / len(labels))
        figure.colorbar(picture, ax=axis, label="share of the true label", fraction=0.046, pad=0.04)
        with atomic_file(Path(path)) as temporary, warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Glyph .* missing")  # of a label in another script
            figure.savefig(temporary, dpi=DPI, bbox_inches="tight", pad_inches=0.15)
    pyplot.close(figure)


def confusion_counts(labels: Sequence[str], references: Sequence, predictions: Sequence) -> np.ndarray:
    """How often each label, the row, was predicted as each label, the column. Raises as `plot_confusion` does."""
    references, predictions = to_json(references), to_json(predictions)  # no arrays or tensors
    if len(references) != len(predictions):
        raise ValueError(f"there are {len(predictions)} predictions and {len(references)} references; expected as many")
    numbers_of = {name: i for i, name in enumerate(labels)}
    numbers_of |= {i: i for i in range(len(labels))}
    counts = np.zeros((len(labels), len(labels)), dtype=int)
    try:
        pairs = [[numbers_of[each] for each in column] for column in (references, predictions)]
    except KeyError as error:
        raise ValueError(f"a label is {error}; expected one of {', '.join(labels)}, or its number") from None
    np.add.at(counts, tuple(np.array(pairs, dtype=int)), 1)
    return counts


def write_counts(axis, counts: np.ndarray, shares: np.ndarray, cell_size: float) -> None:
    """Writes the count into each cell, of `cell_size` points."""
    size = min(10, cell_size / (0.7 * len(f"{counts.max():,}")))
    for row, column in np.ndindex(*counts.shape):
        colour = "white" if shares[row, column] > 0.5 else "black" if counts[row, column] else "darkgrey"
        text = f"{counts[row, column]:,}"
        axis.text(column, row, text, ha="center", va="center", color=colour, fontsize=size)


def short_label(label: str) -> str:
    """The label in one line, without the middle if it is long."""
    text = " ".join(str(label).split())
    half = LONGEST_LABEL // 2
    return text if len(text) <= LONGEST_LABEL else f"{text[:half]}…{text[1 - half :]}"
