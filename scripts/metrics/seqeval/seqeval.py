"""Precision, recall and F1 of the entities in tagged sentences."""

import warnings

import evaluate
from datasets import Features, List, Value
from seqeval.metrics import accuracy_score, classification_report

MEASURES = {"precision": "precision", "recall": "recall", "f1": "f1-score", "number": "support"}  # our names, seqeval's


class Seqeval(evaluate.Metric):
    """precision, recall, f1: of entities, over all types together (micro average). An entity is correct if its first
    token, its last token and its type are. accuracy: the share of tokens with the correct tag. For each type T in the
    references or the predictions: T_precision, T_recall, T_f1, and T_number, the number of entities in the references.

    Values are 0 if there are no entities to find, or none were found. Predictions and references are the tags of each
    sentence, "O" or prefix and type ("B-PER", "I-PER"), interpreted as by conlleval.
    """

    def _info(self):
        features = Features(dict.fromkeys(("predictions", "references"), List(Value("string"))))
        return evaluate.MetricInfo(description=self.__doc__, citation="", features=features)

    def _compute(self, predictions, references):
        for item, (found, right) in enumerate(zip(predictions, references, strict=True), 1):
            if len(found) != len(right):
                raise ValueError(f"sentence {item} has {len(found)} predicted tags; expected {len(right)}")
        if not any(references):
            raise ValueError("the sentences have no tokens; expected at least one")
        with warnings.catch_warnings(action="ignore", category=RuntimeWarning):  # the mean over no types, not used
            report = classification_report(references, predictions, output_dict=True, zero_division=0)
        total = report.pop("micro avg")
        metrics = {name: total[MEASURES[name]] for name in ("precision", "recall", "f1")}
        metrics["accuracy"] = accuracy_score(references, predictions)
        for entity_type in sorted(report.keys() - {"macro avg", "weighted avg"}):
            metrics |= {f"{entity_type}_{ours}": report[entity_type][theirs] for ours, theirs in MEASURES.items()}
        return metrics
