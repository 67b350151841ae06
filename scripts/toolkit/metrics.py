"""Metrics of classifications, by scikit-learn and SciPy, for train and predict."""

import numpy as np


def classification_metrics(problem: str, references: np.ndarray, predictions: np.ndarray) -> dict[str, float]:
    """The metrics of a classification.

    - single_label: accuracy, the F1 score as the mean over the labels that occur, and Matthews' correlation;
    - multi_label: the share of items with exactly the right labels, and the F1 scores as the mean over the labels and
      of all labels together;
    - regression: Pearson's and Spearman's correlation and the mean squared error, as means over the columns.

    Args:
        problem: "single_label", with the number of a label for each item, `(N,)`; "multi_label", with 0 or 1 for each
            label, `(N, L)`; or "regression", with numbers, `(N, C)`.
    """
    if problem == "regression":
        return regression_metrics(references, predictions)
    from sklearn.metrics import accuracy_score, f1_score, matthews_corrcoef

    if references.ndim == 2:
        # A last column of zeros, because scikit-learn takes a single column for two labels.
        references, predictions = (np.pad(each, ((0, 0), (0, 1))) for each in (references, predictions))
    accuracy = accuracy_score(references, predictions)
    f1 = f1_score(references, predictions, average="macro", zero_division=np.nan)  # labels with NaN are left out
    values = {"f1_macro": np.nan_to_num(f1)}
    if problem == "multi_label":
        f1_micro = f1_score(references, predictions, average="micro", zero_division=0)
        values = {"subset_accuracy": accuracy, **values, "f1_micro": f1_micro}
    else:
        is_constant = len({*references, *predictions}) == 1  # scikit-learn warns
        correlation = 0.0 if is_constant else matthews_corrcoef(references, predictions)
        values = {"accuracy": accuracy, **values, "matthews_correlation": correlation}
    return {name: float(value) for name, value in values.items()}


def regression_metrics(references: np.ndarray, predictions: np.ndarray) -> dict[str, float]:
    """Means over the columns. The correlation of a column with one value is 0, because the formula divides 0 by 0."""
    from scipy.stats import pearsonr, spearmanr

    def correlation(function) -> float:
        pairs = zip(references.T, predictions.T, strict=True)
        return float(np.mean([function(*pair).statistic if np.ptp(pair, axis=1).all() else 0 for pair in pairs]))

    error = float(((references - predictions) ** 2).mean())
    return {"pearson": correlation(pearsonr), "spearman": correlation(spearmanr), "mean_squared_error": error}
