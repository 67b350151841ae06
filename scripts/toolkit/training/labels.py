"""What the classifiers of texts and of words share: the set of labels, their weights, and how sure they are."""

from collections import Counter
from dataclasses import dataclass

import torch

from toolkit.training.settings import Settings, flag


@dataclass
class LabelSettings(Settings):
    """Settings of a script whose labels are of a set."""

    labels: list[str] | None = flag(None, "the set of labels; left out: those of the training set")
    class_weights: list[str] | None = flag(
        None, "of each label, in the order of --labels, or balanced: by how rare each is"
    )
    label_smoothing: float = flag(0.0, "share of each label's weight that all labels get")

    def __post_init__(self):
        super().__post_init__()
        if not 0 <= self.label_smoothing < 1:
            raise ValueError(f"--label_smoothing is {self.label_smoothing}; it wants 0 or more, and less than 1")
        if self.class_weights and self.class_weights != ["balanced"] and self.labels is None:
            raise ValueError("--class_weights as numbers wants --labels, whose order they have")
        if self.labels and len(set(self.labels)) < len(self.labels):
            raise ValueError(f"--labels is {' '.join(self.labels)}; it wants each label once")


def class_weights(given: list[str] | None, labels: list[str], counts: Counter) -> torch.Tensor:
    """The weight of each label, `(L,)`.

    Args:
        given: the numbers; "balanced", that is scikit-learn's: all that are counted / (labels · those of the label); or
            None, all 1.
        counts: how often each label occurs in the training set.

    Raises:
        ValueError: these are no numbers of 0 or more, one for each label.
    """
    if given is None:
        return torch.ones(len(labels))
    if given == ["balanced"]:
        return torch.tensor([counts.total() / (len(labels) * max(counts[label], 1)) for label in labels])
    try:
        weights = torch.tensor([float(each) for each in given])
    except ValueError:
        raise ValueError(f"--class_weights is {' '.join(given)}; it wants numbers, or balanced") from None
    if len(weights) != len(labels) or not (weights >= 0).all() or not weights.isfinite().all():
        raise ValueError(
            f"--class_weights is {' '.join(given)}; it wants {len(labels)} numbers of 0 or more, for {labels}"
        )
    return weights
