"""BLEU and chrF of translations."""

from itertools import zip_longest

import evaluate
from datasets import Features, List, Value
from sacrebleu import corpus_bleu, corpus_chrf


class Sacrebleu(evaluate.Metric):
    """bleu, chrf: both over the whole set, from 0 to 100. Papineni et al. (2002), "BLEU", with sacreBLEU's tokenizer
    13a; Popović (2015), "chrF", of characters only (chrF2). Computed as in Post (2018), "A Call for Clarity in
    Reporting BLEU Scores".

    Predictions are texts; references are a list of correct texts for each item, of any length.
    """

    def _info(self):
        features = Features({"predictions": Value("string"), "references": List(Value("string"))})
        return evaluate.MetricInfo(description=self.__doc__, citation="", features=features)

    def _compute(self, predictions, references):
        if not all(references):
            raise ValueError(f"item {references.index([]) + 1} has no reference; expected one or more for each")
        # sacrebleu expects a list of all first references, one of all second ones (None if there is none), and so on.
        columns = [list(column) for column in zip_longest(*references)]
        return {"bleu": corpus_bleu(predictions, columns).score, "chrf": corpus_chrf(predictions, columns).score}
