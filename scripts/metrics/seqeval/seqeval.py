"""Entities in tagged sentences, found whole or not."""

import warnings

import evaluate
from datasets import Features, List, Value
from seqeval.metrics import accuracy_score, classification_report

MEASURES = {"precision": "precision", "recall": "recall", "f1": "f1-score", "number": "support"}  # our names, seqeval's


class Seqeval(evaluate.Metric):
    """precision, recall, f1: of entities, over all types together (micro average). An entity is right if its first
    token, its last and its type are. accuracy: the share of tokens whose tag is right. For each type T that occurs in
    the references or the predictions: T_precision, T_recall, T_f1, and T_number, how many the references hold.

    What has no entities to find, or none found, gets 0. Predictions and references are for each sentence the tags of
    its tokens, "O" or prefix and type ("B-PER", "I-PER"), read as conlleval reads them.
    """

    def _info(self):
        tags = List(Value("string"))
        return evaluate.MetricInfo(
            description=self.__doc__, citation="", features=Features({"predictions": tags, "references": tags})
        )

    def _compute(self, predictions, references):
        for item, (found, right) in enumerate(zip(predictions, references, strict=True), 1):
            if len(found) != len(right):
                raise ValueError(f"sentence {item} has {len(found)} predicted tags for {len(right)} tokens")
        if not any(references):
            raise ValueError("the sentences hold no tokens at all")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # the mean over no types, which is not used
            report = classification_report(references, predictions, output_dict=True, zero_division=0)
        total = report.pop("micro avg")
        metrics = {name: total[MEASURES[name]] for name in ("precision", "recall", "f1")}
        metrics["accuracy"] = accuracy_score(references, predictions)
        for entity_type in sorted(report.keys() - {"macro avg", "weighted avg"}):
            metrics |= {f"{entity_type}_{ours}": report[entity_type][theirs] for ours, theirs in MEASURES.items()}
        return metrics
