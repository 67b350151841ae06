"""Labels of texts or pairs of texts, and scores of pairs."""

import importlib

import numpy as np
import torch

from toolkit.corpus.job import Job
from toolkit.corpus.tasks.base import Encoded, Task


class Classify(Task):
    """The label of each text or pair and its score; several labels; or numbers, of a regression.

    Options of the job: `all_scores`, and `threshold`, from which on a label of several is given. Scores are those of
    `pipeline("text-classification")`: by softmax, or by sigmoid if several labels are possible, or if there is one.
    """

    def __init__(self, job: Job):
        super().__init__(job)
        config = self.model.config
        self.labels = [config.id2label[number] for number in range(config.num_labels)]
        self.problem = config.problem_type or "single_label_classification"
        if self.problem == "regression":
            self.columns = {"prediction": "numbers"}
        elif self.problem == "multi_label_classification":
            self.columns = {"labels": "texts", "scores": "numbers"}
        else:
            self.columns = {"label": "text", "score": "number"}
        if job.options.get("all_scores") and self.problem != "regression":
            self.columns["all_scores"] = "numbers"

    def read(self, inputs: dict, lengths: list[int]) -> np.ndarray:
        logits = self.model(**inputs).logits.float().cpu()
        if self.problem == "regression":
            return logits.numpy()
        several = self.problem == "multi_label_classification" or len(self.labels) == 1
        return (logits.sigmoid() if several else logits.softmax(-1)).numpy()

    def compute(self, encoded: Encoded) -> dict:
        scores = np.array(self.values(encoded), np.float32).reshape(-1, len(self.labels))
        if self.problem == "regression":
            return {"prediction": scores.tolist()}
        if self.problem == "multi_label_classification":
            threshold = self.job.options.get("threshold")
            given = [np.flatnonzero(row > (0.5 if threshold is None else threshold)) for row in scores]
            found = {
                "labels": [[self.labels[number] for number in numbers] for numbers in given],
                "scores": [row[numbers].tolist() for row, numbers in zip(scores, given, strict=True)],
            }
        else:
            best = scores.argmax(-1)
            found = {"label": [self.labels[number] for number in best], "score": scores.max(-1, initial=0)}
        return found | ({"all_scores": scores.tolist()} if "all_scores" in self.columns else {})


class Rerank(Task):
    """The score of each pair of texts, as `CrossEncoder.predict` of sentence-transformers has it."""

    columns = {"score": "number"}

    def __init__(self, job: Job):
        super().__init__(job)
        if self.model.config.num_labels != 1:
            raise ValueError(
                f"It has {self.model.config.num_labels} labels; --task rerank expected one. --task classify gives the "
                "scores of labels."
            )
        self.activation = activation_of(self.model.config)

    def read(self, inputs: dict, lengths: list[int]) -> np.ndarray:
        return self.activation(self.model(**inputs).logits.float()).cpu().numpy()[:, 0]

    def compute(self, encoded: Encoded) -> dict:
        return {"score": np.array(self.values(encoded), np.float32)}


def activation_of(config) -> torch.nn.Module:
    """The function that sentence-transformers applies to the logit: what the configuration names, else the sigmoid.

    Raises:
        ValueError: the configuration names one that is not in torch.nn.
    """
    saved = getattr(config, "sentence_transformers", None) or {}
    path = saved.get("activation_fn") or getattr(config, "sbert_ce_default_activation_function", None)
    if path is None:
        return torch.nn.Sigmoid()
    module, _, name = path.rpartition(".")
    if not module.startswith("torch.nn"):
        raise ValueError(f"Its activation function is {path}; expected one of torch.nn.")
    return getattr(importlib.import_module(module), name)()
