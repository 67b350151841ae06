"""Fingerprints of data, by which --resume finds out that they have changed."""

import hashlib
import json

import numpy as np
import pyarrow as pa
from datasets import Dataset

ROWS_TOGETHER = 1000


def fingerprint(*tables: Dataset) -> str:
    """A hash of the rows in their order, without `place`, which depends on the path by which a file was opened, and
    without `columns`, which training does not use."""
    digest = hashlib.sha256()
    for rows in tables:
        columns = sorted(set(rows.column_names) - {"place", "columns"})
        digest.update(repr((columns, len(rows))).encode())
        for batch in rows.select_columns(columns).with_format("arrow").iter(ROWS_TOGETHER):
            for column in columns:
                add(digest, batch[column].combine_chunks())
    return digest.hexdigest()


def add(digest, values: pa.Array) -> None:
    """Adds values to a hash: the same values give the same hash, however Arrow stores them."""
    if pa.types.is_list(values.type) or pa.types.is_large_list(values.type):
        digest.update(as_bytes(values.value_lengths().fill_null(-1)))
        add(digest, values.flatten())
    elif pa.types.is_integer(values.type) and not values.null_count:
        digest.update(as_bytes(values))
    else:
        digest.update(repr(values.to_pylist()).encode())


def as_bytes(values: pa.Array) -> bytes:
    return values.to_numpy(zero_copy_only=False).astype(np.int64).tobytes()


def tokenizer_fingerprint(tokenizer) -> str:
    """A hash of a tokenizer: its vocabulary, its special ids, and how it splits texts."""
    parts = [sorted(tokenizer.get_vocab().items()), tokenizer.special_tokens_map, tokenizer.all_special_ids]
    if tokenizer.is_fast:
        # Calls with other lengths change truncation and padding.
        rules = json.loads(tokenizer.backend_tokenizer.to_str())
        parts.append({name: rule for name, rule in rules.items() if name not in ("truncation", "padding")})
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()
