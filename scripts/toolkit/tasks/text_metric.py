"""The base class of the metrics of texts, which are metrics of `evaluate`, each defined beside its task."""

import tempfile
from typing import ClassVar

import evaluate
from datasets import Features, List, Value


class TextMetric(evaluate.Metric):
    """A metric of predictions, texts or lists of texts, with a list of texts as the reference of each."""

    prediction: ClassVar = Value("string")

    def _info(self):
        features = Features(predictions=self.prediction, references=List(Value("string")))
        return evaluate.MetricInfo(description=self.__doc__, citation="", features=features)

    @classmethod
    def of(cls, predictions: list, references: list) -> dict[str, float]:
        """The values for all predictions, without a network or a cache."""
        with tempfile.TemporaryDirectory() as folder:
            metric = cls(keep_in_memory=True, cache_dir=folder)
            values = metric.compute(predictions=predictions, references=references)
        return {name: float(value) for name, value in values.items()}
