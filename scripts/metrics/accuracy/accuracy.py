"""The share of correct items."""

import evaluate
from datasets import Features, List, Value
from sklearn.metrics import accuracy_score


class Accuracy(evaluate.Metric):
    """accuracy: the share of items whose prediction equals the reference.

    Predictions and references are a label for each item; or, if items may have several labels, a row of 0 and 1 for
    each item, which must be equal as a whole.
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
