"""Entities in texts, as `pipeline("token-classification")` finds them, also in texts that are longer than the model."""

import warnings
from dataclasses import dataclass

import numpy as np
import torch
from tokenizers import Encoding
from transformers import TokenClassificationPipeline
from transformers.pipelines.token_classification import AggregationStrategy

from toolkit.corpus.job import Job
from toolkit.corpus.tasks.base import Encoded, Task
from toolkit.windows import split_into_windows

STRIDE_SHARE = 4  # neighbouring windows share a quarter of their tokens


@dataclass
class Tokens:
    """A text's tokens, and the windows that cover them.

    Args:
        windows: for each window, the positions of its text tokens in the sequence of the window, and in that of the
            whole text. A token that two windows share is tagged in the one in which it is further from the edge.
    """

    text: str
    encoding: Encoding
    windows: list[tuple[range, range]]


class Tag(Task):
    """The entities of each text, with their offsets in characters. Option of the job: `aggregation`."""

    def __init__(self, job: Job):
        super().__init__(job)
        self.strategy = AggregationStrategy[(job.options.get("aggregation") or "simple").upper()]
        self.columns = {"entities": "entities of " + ("tokens" if self.strategy.value == "none" else "words")}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.pipeline = TokenClassificationPipeline(model=self.model, tokenizer=self.tokenizer, device=self.device)

    def encode(self, texts: list[str], pairs: list[str] | None) -> Encoded:
        encodings = self.tokenizer(texts, verbose=False).encodings if texts else []
        found = Encoded(details=[], truncated=[len(each.ids) > self.max_length for each in encodings])
        for text, encoding, is_long in zip(texts, encodings, found.truncated, strict=True):
            pieces = [i for i, special in enumerate(encoding.special_tokens_mask) if not special]
            inner = range(pieces[0], pieces[-1] + 1) if pieces else range(0)
            if not is_long:
                found.ids.append(encoding.ids)
                found.tokens.append(len(encoding.ids))
                found.details.append(Tokens(text, encoding, [(inner, inner)]))
                continue
            stride = (self.max_length - len(encoding.ids) + len(inner)) // STRIDE_SHARE
            windows = split_into_windows(encoding, inner, self.max_length, stride)
            found.ids += [window.input_ids for window in windows]
            found.tokens.append(sum(len(window.input_ids) for window in windows))
            bounds = [0, *(window.tokens.start + stride // 2 for window in windows[1:]), len(inner)]
            places = [
                (
                    range(window.first + low - window.tokens.start, window.first + high - window.tokens.start),
                    range(inner.start + low, inner.start + high),
                )
                for window, low, high in zip(windows, bounds[:-1], bounds[1:], strict=True)
            ]
            found.details.append(Tokens(text, encoding, places))
        return found

    def read(self, inputs: dict, lengths: list[int]) -> list[np.ndarray]:
        logits = self.model(**inputs).logits[0].float().cpu()
        return [part.numpy() for part in logits.split(lengths)]

    def values(self, encoded: Encoded) -> list[np.ndarray]:
        """The logits of each text, `(T, L)`, of which each token has those of one window."""
        of_windows, found = iter(super().values(encoded)), []
        for tokens in encoded.details:
            whole = np.zeros((len(tokens.encoding.ids), self.model.config.num_labels), np.float32)
            for in_window, in_text in tokens.windows:
                whole[in_text.start : in_text.stop] = next(of_windows)[in_window.start : in_window.stop]
            found.append(whole)
        return found

    def result(self, values: list[np.ndarray], details: list[Tokens]) -> dict:
        return {"entities": [self.entities(*each) for each in zip(values, details, strict=True)]}

    def entities(self, logits: np.ndarray, tokens: Tokens) -> list[dict]:
        """The entities of a text with these logits, `(T, L)`."""
        encoding = tokens.encoding
        outputs = {
            "logits": torch.from_numpy(logits)[None],
            "sentence": tokens.text,
            "input_ids": [encoding.ids],
            "offset_mapping": [encoding.offsets],
            "special_tokens_mask": torch.tensor([encoding.special_tokens_mask]),
        }
        found = self.pipeline.postprocess([outputs], aggregation_strategy=self.strategy)
        return [{**entity, "score": float(entity["score"])} for entity in found]
