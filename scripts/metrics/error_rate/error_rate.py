"""Edits between what was generated and what is right: phoneme and word error rate."""

import evaluate
from datasets import Features, List, Value
from rapidfuzz.distance import Levenshtein


class ErrorRate(evaluate.Metric):
    """token_error_rate: the edits (substitutions, insertions, deletions) that turn the predictions into the references,
    per token of the references, over the whole set; may exceed 1. The phoneme error rate where tokens are phonemes, the
    word error rate where they are words. item_error_rate: the share of items with any edit.

    Of several references the one with the fewest edits counts, and of those the shortest.

    Predictions are texts, tokens separated by white space; references are for each item the list of texts that are
    right.
    """

    def _info(self):
        text = Value("string")
        return evaluate.MetricInfo(
            description=self.__doc__, citation="", features=Features({"predictions": text, "references": List(text)})
        )

    def _compute(self, predictions, references):
        if not all(references):
            raise ValueError(f"item {references.index([]) + 1} has no reference; expected one or more for each")
        edits = tokens = wrong = 0
        for prediction, texts in zip(predictions, references, strict=True):
            said = prediction.split()
            distance, length = min((Levenshtein.distance(said, right), len(right)) for right in map(str.split, texts))
            edits, tokens, wrong = edits + distance, tokens + length, wrong + (distance > 0)
        if tokens == 0:
            raise ValueError("the references hold no tokens at all; an error rate is edits per token of theirs")
        return {"token_error_rate": edits / tokens, "item_error_rate": wrong / len(predictions)}
