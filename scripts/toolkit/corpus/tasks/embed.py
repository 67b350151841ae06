"""Embeddings of texts."""

import numpy as np
import torch

from toolkit.corpus.job import Job
from toolkit.corpus.model import longest
from toolkit.corpus.sentence_folder import read_embedding
from toolkit.corpus.tasks.base import Encoded, Task

LARGEST_INT8 = 127


class Embed(Task):
    """A vector for each text.

    Options of the job: `pooling`, `normalize`, `prompt` (None: those of the folder), `truncate_dim`,
    `embedding_dtype`. An int8 vector has a `scale`, by which it is multiplied to restore the embedding.
    """

    def __init__(self, job: Job):
        options, saved = job.options, read_embedding(job.model)
        self.pooling = options.get("pooling") or saved.pooling
        self.normalize = options.get("normalize") or saved.normalize
        self.prompt = saved.prompt if options.get("prompt") is None else options["prompt"]
        self.dtype = options.get("embedding_dtype") or "float32"
        super().__init__(job, add_pooling_layer=self.pooling == "pooler")
        self.max_length = longest(self.tokenizer, self.model, job.max_length, saved.max_length)
        width = self.model.config.hidden_size
        self.dimensions = options.get("truncate_dim") or width
        if self.dimensions > width:
            raise ValueError(f"--truncate_dim is {self.dimensions}; the embeddings have {width} numbers.")
        self.columns = {"embedding": f"vector of {self.dimensions} {self.dtype}"}
        if self.dtype == "int8":
            self.columns["scale"] = "number"

    def encode(self, texts: list[str], pairs: list[str] | None) -> Encoded:
        return super().encode([self.prompt + text for text in texts] if self.prompt else texts, None)

    def read(self, inputs: dict, lengths: list[int]) -> np.ndarray:
        outputs = self.model(**inputs)
        if self.pooling == "pooler":
            pooled = outputs.pooler_output.float()
        else:
            pooled = pool(outputs.last_hidden_state[0], lengths, self.pooling)
        pooled = pooled[:, : self.dimensions]
        return (torch.nn.functional.normalize(pooled) if self.normalize else pooled).cpu().numpy()

    def compute(self, encoded: Encoded) -> dict:
        vectors = np.zeros((len(encoded.ids), self.dimensions), np.float32)
        for index, vector in enumerate(self.values(encoded)):
            vectors[index] = vector
        if self.dtype != "int8":
            return {"embedding": vectors.astype(self.dtype)}
        scale = np.abs(vectors).max(axis=1, initial=0) / LARGEST_INT8
        rounded = np.rint(vectors / np.maximum(scale, np.finfo(np.float32).tiny)[:, None])
        return {"embedding": rounded.astype(np.int8), "scale": scale}


def pool(states: torch.Tensor, lengths: list[int], pooling: str) -> torch.Tensor:
    """One vector for each sequence, `(N, C)` → `(S, C)`, in float32.

    Args:
        pooling: "cls", the first token's; or the "mean" or the "max" over the tokens.
    """
    sizes = torch.tensor(lengths, device=states.device)
    if pooling == "cls":
        return states[sizes.cumsum(0) - sizes].float()
    return torch.segment_reduce(states.float(), pooling, lengths=sizes, unsafe=True)
