"""Exact match and F1 of answers to questions, as computed by SQuAD's official script."""

import re
import string
from collections import Counter

import evaluate
from datasets import Features, List, Value


def normalize(text: str) -> str:
    """The text in lower case, without punctuation, articles and extra white space."""
    text = "".join(character for character in text.lower() if character not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())


def token_f1(answer: str, gold: str) -> float:
    """The F1 of the tokens that two normalized answers share; if one is empty, whether the other is empty as well."""
    if not answer or not gold:
        return float(answer == gold)
    tokens, gold_tokens = answer.split(), gold.split()
    shared = (Counter(tokens) & Counter(gold_tokens)).total()
    return 2 * shared / (len(tokens) + len(gold_tokens))


class Squad(evaluate.Metric):
    """exact_match: the percentage of answers that equal a gold answer, after normalization; f1: the mean, in per cent,
    of the F1 of the tokens that answer and gold answer share. The best of the gold answers counts. If some questions
    have an answer and others have none, also has_answer_exact_match, has_answer_f1, no_answer_exact_match and
    no_answer_f1.

    Rajpurkar et al. (2016), "SQuAD", section 6.1. For questions without an answer both values are 100 for an empty
    prediction and 0 for any other: Rajpurkar et al. (2018), "Know What You Don't Know".

    Predictions are texts, empty for no answer; references are a list of gold answers for each question, empty if it has
    none.
    """

    def _info(self):
        features = Features({"predictions": Value("string"), "references": List(Value("string"))})
        return evaluate.MetricInfo(description=self.__doc__, citation="", features=features)

    def _compute(self, predictions, references):
        scores = {True: [], False: []}  # of questions that have an answer, and of those that have none
        for prediction, answers in zip(predictions, references, strict=True):
            answer = normalize(prediction)
            golds = [gold for gold in map(normalize, answers) if gold] or [""]
            scores[bool(answers)].append((float(answer in golds), max(token_f1(answer, gold) for gold in golds)))
        metrics = means(scores[True] + scores[False], "")
        if scores[True] and scores[False]:
            metrics |= means(scores[True], "has_answer_") | means(scores[False], "no_answer_")
        return metrics


def means(scores: list[tuple[float, float]], prefix: str) -> dict[str, float]:
    """The mean exact match and the mean F1, in per cent."""
    exact, f1 = (100 * sum(column) / len(scores) for column in zip(*scores, strict=True))
    return {f"{prefix}exact_match": exact, f"{prefix}f1": f1}
