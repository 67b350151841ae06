"""The mean of the squared errors."""

import evaluate
from datasets import Features, Value
from sklearn.metrics import mean_squared_error


class MeanSquaredError(evaluate.Metric):
    """mean_squared_error: the mean of the squared differences between predictions and references.

    Predictions and references are a number for each item.
    """

    def _info(self):
        number = Value("float64")
        return evaluate.MetricInfo(
            description=self.__doc__, citation="", features=Features({"predictions": number, "references": number})
        )

    def _compute(self, predictions, references):
        return {"mean_squared_error": mean_squared_error(references, predictions)}
