"""The harmonic mean of precision and recall."""

import evaluate
import numpy as np
from datasets import Features, List, Value
from sklearn.metrics import f1_score

AVERAGES = ("binary", "macro", "micro", "weighted")


class F1(evaluate.Metric):
    """f1: the harmonic mean of precision and recall; 0 if there is nothing to find and nothing was found.

    Predictions and references are a label for each item; or, if items may have several labels, a row of 0 and 1 for
    each item.

    average: "binary", the F1 of label 1, for two labels; "macro", the mean over the labels that occur; "weighted",
    this mean weighted by their frequency in the references; "micro", the F1 of all decisions together.
    """

    def _info(self):
        label = Value("int64")
        return evaluate.MetricInfo(
            description=self.__doc__,
            citation="",
            features=[Features(predictions=kind, references=kind) for kind in (label, List(label))],
        )

    def _compute(self, predictions, references, average="binary"):
        if average not in AVERAGES:
            raise ValueError(f"average is {average!r}; expected one of {', '.join(AVERAGES)}")
        options = {"average": average, "zero_division": 0.0}
        references, predictions = np.asarray(references), np.asarray(predictions)
        if references.ndim == 2 and average != "binary":
            occurring = np.flatnonzero((references + predictions).any(0))
            options["labels"] = occurring if len(occurring) else [0]
            # Another column, because scikit-learn takes a single one for the two labels 0 and 1.
            references, predictions = (np.pad(each, ((0, 0), (0, 1))) for each in (references, predictions))
        return {"f1": f1_score(references, predictions, **options)}
