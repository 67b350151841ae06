"""The work of `check.py`: the comparison of two models, and of one text in several batches."""
