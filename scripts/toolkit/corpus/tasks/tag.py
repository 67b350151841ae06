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
        encodings = self.tokenizer(texts, verbose=False).encodings
        found = Encoded([], details=[])
        for text, encoding in zip(texts, encodings, strict=True):
            pieces = [i for i, special in enumerate(encoding.special_tokens_mask) if not special]
            inner = range(pieces[0], pieces[-1] + 1) if pieces else range(0)
            if len(encoding.ids) <= self.max_length:
                found.ids.append(encoding.ids)
                found.details.append(Tokens(text, encoding, [(inner, inner)]))
                continue
            found.truncated += 1
            stride = (self.max_length - len(encoding.ids) + len(inner)) // STRIDE_SHARE
            windows = split_into_windows(encoding, inner, self.max_length, stride)
            found.ids += [window.input_ids for window in windows]
            bounds = [0, *(window.tokens.start + stride // 2 for window in windows[1:]), len(inner)]
            places = [
                (range(window.first + low - window.tokens.start, window.first + high - window.tokens.start),
                 range(inner.start + low, inner.start + high))
                for window, low, high in zip(windows, bounds[:-1], bounds[1:], strict=True)
            ]  # fmt: skip
            found.details.append(Tokens(text, encoding, places))
        return found

    def read(self, inputs: dict, lengths: list[int]) -> list[np.ndarray]:
        logits = self.model(**inputs).logits[0].float().cpu()
        return [part.numpy() for part in logits.split(lengths)]

    def compute(self, encoded: Encoded) -> dict:
        logits = iter(self.values(encoded))
        return {"entities": [self.entities(tokens, logits) for tokens in encoded.details]}

    def entities(self, tokens: Tokens, logits) -> list[dict]:
        """The entities of a text. Takes the logits of its windows, `(T, L)`, from the iterator `logits`."""
        encoding = tokens.encoding
        whole = torch.zeros(len(encoding.ids), self.model.config.num_labels)
        for in_window, in_text in tokens.windows:
            window = torch.from_numpy(next(logits))
            whole[in_text.start : in_text.stop] = window[in_window.start : in_window.stop]
        outputs = {
            "logits": whole[None], "sentence": tokens.text, "input_ids": [encoding.ids],
            "offset_mapping": [encoding.offsets], "special_tokens_mask": torch.tensor([encoding.special_tokens_mask]),
        }  # fmt: skip
        found = self.pipeline.postprocess([outputs], aggregation_strategy=self.strategy)
        return [{**entity, "score": float(entity["score"])} for entity in found]
