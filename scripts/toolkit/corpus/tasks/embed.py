"""Embeddings of texts."""

import numpy as np
import torch
from torch.nn.functional import normalize

from toolkit.corpus.job import Job
from toolkit.corpus.sentence_folder import read_sentence_folder
from toolkit.corpus.sentence_modules import by_row, open_modules
from toolkit.corpus.tasks.base import Task

LARGEST_INT8 = 127


class Embed(Task):
    """A vector for each text.

    Options of the job: `pooling`, `normalize`, `prompt`, `prompt_name` (None: those of the folder), `truncate_dim`,
    `embedding_dtype`, and for it `ranges`: the lowest and the highest value of each number. An int8 vector without
    ranges has a `scale`, by which it is multiplied to restore the embedding.
    """

    def __init__(self, job: Job):
        options, folder = job.options, read_sentence_folder(job.model, "SentenceTransformer")
        self.poolings = options.get("pooling") or folder.poolings
        self.dtype = options.get("embedding_dtype") or "float32"
        super().__init__(job, folder, add_pooling_layer="pooler" in self.poolings)
        width = self.model.config.hidden_size * len(self.poolings)
        self.modules, width = open_modules(job.model, folder.modules, width, self.device)
        self.dimensions = options.get("truncate_dim") or width
        if self.dimensions > width:
            raise ValueError(f"--truncate_dim is {self.dimensions}; the embeddings have {width} numbers.")
        self.ranges = self.read_ranges(options.get("ranges"))
        self.skipped_tokens = 0 if folder.include_prompt else self.count_prompt_tokens()
        size, dtype = self.dimensions, self.dtype
        if dtype.endswith("binary"):
            size, dtype = -(-size // 8), "int8" if dtype == "binary" else "uint8"
        self.columns = {"embedding": f"vector of {size} {dtype}"}
        if self.dtype == "int8" and self.ranges is None:
            self.columns["scale"] = "number"

    def read_ranges(self, ranges: list[list[float]] | None) -> np.ndarray | None:
        """The ranges, `(2, C)`. Raises ValueError if they do not go together with the embeddings."""
        without_ranges = ("float32", "float16", "int8", "binary", "ubinary")
        if self.dtype not in (without_ranges if ranges is None else ("int8", "uint8")):
            given = "not given" if ranges is None else "given"
            raise ValueError(
                f"--ranges is {given} with --embedding_dtype {self.dtype}; uint8 requires it, int8 allows it."
            )
        if ranges is not None and len(ranges[0]) != self.dimensions:
            raise ValueError(
                f"--ranges has shape (2, {len(ranges[0])}); expected (2, {self.dimensions}), as the embeddings."
            )
        return None if ranges is None else np.array(ranges, np.float32)

    def count_prompt_tokens(self) -> int:
        """The number of tokens that the prompt has at the beginning of a text, as sentence-transformers counts it."""
        if not self.prompt:
            return 0
        [encoding] = self.tokenize([self.prompt], None)
        return len(encoding.ids) - (encoding.ids[-1] in self.tokenizer.all_special_ids)

    def fault_of(self, text: str, ids: list[int]) -> str | None:
        return "it has no tokens after the prompt" if len(ids) <= self.skipped_tokens else None

    def read(self, inputs: dict, lengths: list[int]) -> np.ndarray:
        vectors = by_row(self.finish, pool(self.model(**inputs), lengths, self.poolings, self.skipped_tokens))
        # Here, so that a number that is infinite in float16 is found.
        return (vectors.half() if self.dtype == "float16" else vectors).cpu().numpy()

    def finish(self, vectors: torch.Tensor) -> torch.Tensor:
        """What follows the pooling, in the order of sentence-transformers."""
        for module in self.modules:
            vectors = module(vectors)
        vectors = vectors[:, : self.dimensions]
        return normalize(vectors) if self.job.options.get("normalize") else vectors

    def result(self, values: list[np.ndarray], details: list) -> dict:
        vectors = np.array(values, "float16" if self.dtype == "float16" else "float32").reshape(-1, self.dimensions)
        if self.dtype in ("float32", "float16"):
            return {"embedding": vectors}
        if self.dtype == "int8" and self.ranges is None:
            scale = np.abs(vectors).max(axis=1, initial=0) / LARGEST_INT8
            rounded = np.rint(vectors / np.maximum(scale, np.finfo(np.float32).tiny)[:, None])
            return {"embedding": rounded.astype(np.int8), "scale": scale}
        # As `quantize_embeddings` of sentence-transformers does it.
        if self.ranges is None:
            codes = np.packbits(vectors > 0, axis=-1)
        else:
            steps = (self.ranges[1] - self.ranges[0]) / 255
            steps[steps == 0] = 1
            codes = np.clip(np.floor((vectors - self.ranges[0]) / steps), 0, 255).astype(np.uint8)
        is_signed = self.dtype in ("binary", "int8")
        return {"embedding": (codes.astype(np.int16) - 128).astype(np.int8) if is_signed else codes}


def pool(outputs, lengths: list[int], poolings: list[str], skipped: int) -> torch.Tensor:
    """One vector for each sequence, `(S, C · poolings)`, in float32: the results of the poolings side by side.

    Args:
        poolings: of the tokens' vectors, as sentence-transformers names them; or "pooler", the model's own.
        skipped: the number of tokens at the beginning of each sequence that are left out.
    """
    states = outputs.last_hidden_state[0].float()
    sizes = torch.tensor(lengths, device=states.device)
    weights = torch.cat([torch.arange(1, length + 1, device=states.device) for length in lengths])[:, None]
    if skipped:
        kept, sizes = weights[:, 0] > skipped, sizes - skipped
        states, weights = states[kept], weights[kept]
    ends = sizes.cumsum(0)

    def reduce(values: torch.Tensor, how: str) -> torch.Tensor:
        return torch.segment_reduce(values, how, lengths=sizes, unsafe=True)

    computed = {
        "cls": lambda: states[ends - sizes],
        "lasttoken": lambda: states[ends - 1],
        "mean": lambda: reduce(states, "mean"),
        "max": lambda: reduce(states, "max"),
        "mean_sqrt_len_tokens": lambda: reduce(states, "sum") / sizes[:, None].sqrt(),
        "weightedmean": lambda: reduce(states * weights, "sum") / reduce(weights.float(), "sum"),
        "pooler": lambda: outputs.pooler_output.float(),
    }
    return torch.cat([computed[name]() for name in poolings], dim=1)
