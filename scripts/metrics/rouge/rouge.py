"""Words and phrases that a generated text shares with a reference."""

import evaluate
from datasets import Features, List, Value
from rouge_score.rouge_scorer import RougeScorer

TYPES = ["rouge1", "rouge2", "rougeL", "rougeLsum"]


class Rouge(evaluate.Metric):
    """rouge1, rouge2, rougeL, rougeLsum: the mean over all items of the F1, from 0 to 1, of the words, the pairs of
    words and the longest common subsequence that a text shares with its reference; rougeLsum is computed sentence by
    sentence, with a sentence on each line. Of several references the best counts. Lin (2004), "ROUGE".

    Words consist of a-z and 0-9, so texts in other scripts get 0. There is no stemming.

    Predictions are texts; references are a list of correct texts for each item.
    """

    def _info(self):
        features = Features({"predictions": Value("string"), "references": List(Value("string"))})
        return evaluate.MetricInfo(description=self.__doc__, citation="", features=features)

    def _compute(self, predictions, references):
        if not all(references):
            raise ValueError(f"item {references.index([]) + 1} has no reference; expected one or more for each")
        scorer = RougeScorer(TYPES)
        scores = [scorer.score_multi(right, text) for text, right in zip(predictions, references, strict=True)]
        return {name: sum(score[name].fmeasure for score in scores) / len(scores) for name in TYPES}
