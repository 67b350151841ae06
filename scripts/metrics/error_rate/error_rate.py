"""Edits between generated and correct texts: phoneme and word error rate."""

import evaluate
from datasets import Features, List, Value
from rapidfuzz.distance import Levenshtein


class ErrorRate(evaluate.Metric):
    """token_error_rate: the edits (substitutions, insertions, deletions) that turn the predictions into the references,
    divided by the tokens of the references, over the whole set. It may exceed 1. It is the phoneme error rate if tokens
    are phonemes, and the word error rate if they are words. item_error_rate: the share of items with an edit.

    Of several references the one with the fewest edits counts, and of these the shortest.

    Predictions are texts, with tokens separated by white space; references are a list of correct texts for each item.
    """

    def _info(self):
        features = Features({"predictions": Value("string"), "references": List(Value("string"))})
        return evaluate.MetricInfo(description=self.__doc__, citation="", features=features)

    def _compute(self, predictions, references):
        if not all(references):
            raise ValueError(f"item {references.index([]) + 1} has no reference; expected one or more for each")
        edits = tokens = wrong = 0
        for prediction, texts in zip(predictions, references, strict=True):
            tokens_of_text = prediction.split()
            distance, length = min(
                (Levenshtein.distance(tokens_of_text, correct), len(correct)) for correct in map(str.split, texts)
            )
            edits, tokens, wrong = edits + distance, tokens + length, wrong + (distance > 0)
        if tokens == 0:
            raise ValueError("the references have no tokens; expected at least one, because the rate is per token")
        return {"token_error_rate": edits / tokens, "item_error_rate": wrong / len(predictions)}
