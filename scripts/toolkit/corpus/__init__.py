"""Applying a model to a whole corpus: the library of `scripts/predict.py`."""
