"""The share of items that are right."""

import evaluate
from datasets import Features, List, Value
from sklearn.metrics import accuracy_score


class Accuracy(evaluate.Metric):
    """accuracy: the share of items whose label is the reference's.

    Predictions and references are labels, one an item; or, where an item may have several labels, a row of 0 and 1
    for each, which is right if all of the row is.
    """

    def _info(self):
        label = Value("int64")
        return evaluate.MetricInfo(
            description=self.__doc__,
            citation="",
            features=[Features(predictions=kind, references=kind) for kind in (label, List(label))],
        )

    def _compute(self, predictions, references):
        return {"accuracy": accuracy_score(references, predictions)}
