"""The likeliest words for masked ones."""

import numpy as np
import torch

from toolkit.corpus.job import Job
from toolkit.corpus.tasks.base import Task


class FillMask(Task):
    """The `top_k` (an option of the job) likeliest words for each mask token of a text, the likeliest first."""

    columns = {"words": "lists of texts", "scores": "lists of numbers"}

    def __init__(self, job: Job):
        super().__init__(job)
        self.top_k = job.options.get("top_k") or 5
        if self.top_k > self.model.config.vocab_size:
            raise ValueError(f"--top_k is {self.top_k}; the vocabulary has {self.model.config.vocab_size} words.")

    def fault_of(self, text: str, ids: list[int]) -> str | None:
        mask = self.tokenizer.mask_token
        has_one = self.tokenizer.mask_token_id in ids
        return None if has_one else f"the text has no {mask}" + (" in its first tokens" if mask in text else "")

    def read(self, inputs: dict, lengths: list[int]) -> list[np.ndarray]:
        """For each sequence, the ids and the scores of the words for each of its masks, `(2, M, K)`."""
        is_mask = inputs["input_ids"][0] == self.tokenizer.mask_token_id
        counts = [int(part.sum()) for part in is_mask.cpu().split(lengths)]
        states = self.model.base_model(**inputs).last_hidden_state[0, is_mask]
        best = self.model.lm_head(states).float().softmax(-1).topk(self.top_k)
        found = torch.stack([best.indices.double(), best.values.double()]).cpu()  # in which both are exact
        return [part.numpy() for part in found.split(counts, dim=1)]

    def result(self, values: list[np.ndarray], details: list) -> dict:
        words = [[[self.tokenizer.decode([each]) for each in mask] for mask in ids.astype(int)] for ids, _ in values]
        return {"words": words, "scores": [scores.tolist() for _, scores in values]}
