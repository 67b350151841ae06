"""Matthews' correlation of labels."""

import evaluate
from datasets import Features, Value
from sklearn.metrics import matthews_corrcoef


class MatthewsCorrelation(evaluate.Metric):
    """matthews_correlation: Matthews' correlation coefficient, from -1 to 1, for two or more labels; 0 is no better
    than chance, and the value if all predictions, or all references, are the same label.

    Predictions and references are a label for each item.
    """

    def _info(self):
        label = Value("int64")
        return evaluate.MetricInfo(
            description=self.__doc__, citation="", features=Features({"predictions": label, "references": label})
        )

    def _compute(self, predictions, references):
        if len({*predictions, *references}) == 1:  # scikit-learn would warn
            return {"matthews_correlation": 0.0}
        return {"matthews_correlation": matthews_corrcoef(references, predictions)}
