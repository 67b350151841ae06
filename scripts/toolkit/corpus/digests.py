"""Digests of texts and ids, and finding them among millions."""

from collections.abc import Iterable, Sequence
from hashlib import blake2b

import numpy as np

BYTES = 16

# The digests that are looked up in a dictionary, before they are sorted into an array.
RECENT = 2**16


def digest_of(*texts: str | None) -> bytes:
    """The digest of a text, or of several in this order."""
    # Two texts with a border between them are not one text: the lengths come first.
    head = ",".join("" if text is None else str(len(text)) for text in texts)
    return blake2b(":".join([head, *filter(None, texts)]).encode(), digest_size=BYTES).digest()


class DigestIndex:
    """The place of each digest, an integer of at least 0. It takes 24 bytes for each digest, and twice that while
    sorted arrays are joined.

    Attributes:
        recent: the places of the last digests.
        runs: arrays of the others, each less than half as long as the one before it. Their rows are the two numbers of
            each digest, by which they are sorted, and the places.
    """

    def __init__(self):
        self.recent: dict[bytes, int] = {}
        self.runs: list[np.ndarray] = []

    def add(self, digests: Sequence[bytes], places: Sequence[int]) -> None:
        """Adds digests that are not there yet."""
        self.recent.update(zip(digests, places, strict=True))
        if len(self.recent) >= RECENT:
            places = np.fromiter(self.recent.values(), np.uint64, len(self.recent))
            self.runs.append(in_order(np.vstack([as_numbers(self.recent), places])))
            self.recent = {}
            while len(self.runs) > 1 and self.runs[-2].shape[1] < 2 * self.runs[-1].shape[1]:
                self.runs.append(in_order(np.concatenate([self.runs.pop(), self.runs.pop()], axis=1)))

    def find(self, digests: Sequence[bytes]) -> list[int]:
        """The place of each digest; -1 for one that is not there."""
        found = np.array([self.recent.get(digest, -1) for digest in digests], np.int64)
        first, second = as_numbers(digests)
        for run in self.runs:
            at = np.searchsorted(run[0], first)
            for _ in range(2):  # two digests with the same first number are next to each other
                at = np.minimum(at, run.shape[1] - 1)
                is_same = (run[0, at] == first) & (run[1, at] == second)
                found[is_same] = run[2, at[is_same]]
                at = at + 1
        return found.tolist()


def as_numbers(digests: Iterable[bytes]) -> np.ndarray:
    """The bytes of each digest as two numbers, `(2, N)`."""
    return np.frombuffer(b"".join(digests), "<u8").reshape(-1, 2).T


def in_order(run: np.ndarray) -> np.ndarray:
    return run[:, np.lexsort((run[1], run[0]))]
