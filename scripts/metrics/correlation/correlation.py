"""Pearson's and Spearman's correlation of numbers."""

import evaluate
import numpy as np
from datasets import Features, Value
from scipy.stats import pearsonr, spearmanr


class Correlation(evaluate.Metric):
    """pearson: the linear correlation of predictions and references, from -1 to 1; spearman: that of their ranks.

    Both are 0 if all predictions, or all references, are the same number, for which the formulas divide 0 by 0.
    Predictions and references are a number for each item.
    """

    def _info(self):
        number = Value("float64")
        return evaluate.MetricInfo(
            description=self.__doc__, citation="", features=Features({"predictions": number, "references": number})
        )

    def _compute(self, predictions, references):
        if not np.isfinite([predictions, references]).all():
            raise ValueError("predictions or references have nan or infinity; expected finite numbers")
        if min(np.ptp(predictions), np.ptp(references)) == 0:
            return {"pearson": 0.0, "spearman": 0.0}
        return {
            "pearson": pearsonr(predictions, references).statistic,
            "spearman": spearmanr(predictions, references).statistic,
        }
