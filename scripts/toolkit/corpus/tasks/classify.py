"""Labels of texts or pairs of texts, and scores of pairs."""

import json

import numpy as np
import torch

from toolkit.corpus.job import Job
from toolkit.corpus.sentence_folder import model_type_of, read_sentence_folder
from toolkit.corpus.sentence_modules import by_row, open_activation
from toolkit.corpus.tasks.base import Task


class Scores(Task):
    """A task with scores of labels.

    Attributes:
        activation: the function of the logits that sentence-transformers applies for this checkpoint; None if it is
            not one of a cross-encoder.
    """

    def __init__(self, job: Job):
        folder = read_sentence_folder(job.model, "CrossEncoder")
        super().__init__(job, folder)
        config = self.model.config
        saved = getattr(config, "sentence_transformers", None) or {}
        old = getattr(config, "sbert_ce_default_activation_function", None)
        path = folder.activation or saved.get("activation_fn") or old
        if path is None and model_type_of(job.model) is not None:
            path = "torch.nn.Sigmoid" if config.num_labels == 1 else "torch.nn.Identity"
        self.activation = None if path is None else open_activation(path, config.num_labels)

    def read(self, inputs: dict, lengths: list[int]) -> np.ndarray:
        return self.model(**inputs).logits.float().cpu().numpy()

    def scores(self, values: list[np.ndarray], activation: torch.nn.Module) -> np.ndarray:
        """The scores of all labels for each text, from its logits."""
        logits = torch.from_numpy(np.array(values, np.float32).reshape(-1, self.model.config.num_labels))
        return by_row(activation, logits).numpy()


class Classify(Scores):
    """The label of each text or pair and its score; several labels; or numbers, of a regression.

    Options of the job: `all_scores`; `top_k`, for the likeliest labels instead of one; and `threshold`, from which on a
    label of several is given. Scores are those of `CrossEncoder.predict` for a cross-encoder, else those of
    `pipeline("text-classification")`: by softmax, or by sigmoid if several labels are possible, or if there is one.
    """

    def __init__(self, job: Job):
        super().__init__(job)
        config, self.top_k = self.model.config, job.options.get("top_k")
        self.labels = [config.id2label[number] for number in range(config.num_labels)]
        self.problem = config.problem_type or "single_label_classification"
        if self.top_k is not None:
            self.check_top_k()
        several = self.problem == "multi_label_classification"
        if self.activation is None:
            is_sigmoid = several or len(self.labels) == 1
            self.activation = torch.nn.Sigmoid() if is_sigmoid else torch.nn.Softmax(-1)
        if self.problem == "regression":
            self.columns = {"prediction": "numbers"}
        elif several or self.top_k is not None:
            self.columns = {"labels": "texts", "scores": "numbers"}
        else:
            self.columns = {"label": "text", "score": "number"}
        if job.options.get("all_scores") and self.problem != "regression":
            if len(set(self.labels)) < len(self.labels):
                raise ValueError("Two of its labels have the same name; --all_scores expected different names.")
            self.columns["all_scores"] = f"scores of {json.dumps(self.labels, ensure_ascii=False)}"

    def check_top_k(self) -> None:
        """Raises ValueError if the model or another flag does not allow `top_k`."""
        if self.problem != "single_label_classification":
            raise ValueError(f"--top_k is given; its problem_type is {self.problem}, expected one label for each text.")
        if self.top_k > len(self.labels):
            raise ValueError(f"--top_k is {self.top_k}; the model has {len(self.labels)} labels.")
        if self.job.label_column is not None:
            raise ValueError("--top_k and --label_column are given, which compares one label; expected one of them.")

    def result(self, values: list[np.ndarray], details: list) -> dict:
        if self.problem == "regression":
            return {"prediction": np.array(values).tolist()}
        scores = self.scores(values, self.activation)
        if "label" in self.columns:
            best = scores.argmax(-1)
            found = {"label": [self.labels[number] for number in best], "score": scores[np.arange(len(best)), best]}
        else:
            given = [self.chosen(row) for row in scores]
            found = {
                "labels": [[self.labels[number] for number in numbers] for numbers in given],
                "scores": [row[numbers].tolist() for row, numbers in zip(scores, given, strict=True)],
            }
        if "all_scores" in self.columns:
            found["all_scores"] = [dict(zip(self.labels, row, strict=True)) for row in scores.tolist()]
        return found

    def chosen(self, scores: np.ndarray) -> np.ndarray:
        """The numbers of the labels that a text is given."""
        if self.top_k is not None:
            return np.argsort(-scores, kind="stable")[: self.top_k]
        threshold = self.job.options.get("threshold")
        return np.flatnonzero(scores > (0.5 if threshold is None else threshold))


class Rerank(Scores):
    """The score of each pair of texts, as `CrossEncoder.predict` of sentence-transformers has it."""

    columns = {"score": "number"}

    def __init__(self, job: Job):
        super().__init__(job)
        if self.model.config.num_labels != 1:
            raise ValueError(
                f"It has {self.model.config.num_labels} labels; --task rerank expected one. --task "
                "classify gives the scores of labels."
            )
        self.activation = self.activation or torch.nn.Sigmoid()

    def result(self, values: list[np.ndarray], details: list) -> dict:
        return {"score": self.scores(values, self.activation)[:, 0]}
