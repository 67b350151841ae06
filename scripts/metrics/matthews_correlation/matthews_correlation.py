"""Matthews' correlation of labels."""

import evaluate
from datasets import Features, Value
from sklearn.metrics import matthews_corrcoef


class MatthewsCorrelation(evaluate.Metric):
    """matthews_correlation: Matthews' correlation coefficient, from -1 through 0 (no better than chance) to 1, for two
    labels or more; 0 where all predictions, or all references, are one label.

    Predictions and references are labels, one an item.
    """

    def _info(self):
        label = Value("int64")
        return evaluate.MetricInfo(
            description=self.__doc__, citation="", features=Features({"predictions": label, "references": label})
        )

    def _compute(self, predictions, references):
        if len({*predictions, *references}) == 1:  # of which scikit-learn warns
            return {"matthews_correlation": 0.0}
        return {"matthews_correlation": matthews_corrcoef(references, predictions)}
