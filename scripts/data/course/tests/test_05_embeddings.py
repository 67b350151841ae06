"""Chapter 5: embeddings."""

import torch

from embeddings import Embeddings, sinusoidal_table
from grading import check_dropout, compare, loaded


def side_by_side(pick):
    first = pick(0, {"The first position is 1; expected 0.": 1})
    step = pick(2, {"The exponent is i / width; expected 2i / width.": 1})
    angles = torch.arange(first, first + 40)[:, None] / 10_000 ** (step * torch.arange(8) / 16)
    halves = angles.sin(), angles.cos()
    halves = pick(halves, {"Sines and cosines are swapped; the left half has the sines.": halves[::-1]})
    return pick(
        torch.cat(halves, dim=1),
        {
            "Sines and cosines alternate; expected them side by side, all sines in the left half.": torch.stack(
                halves, dim=-1
            ).flatten(1)
        },
    )


def test_sinusoidal_table():
    compare(sinusoidal_table(40, 16), side_by_side)


def embedded(pick, source, ids, tokens, types=None):
    """The embeddings of tokens; those of padding may have any position."""
    positions = pick(
        (tokens.cumsum(dim=1) - 1).clamp(min=0),
        {
            "The positions count padding on the left; the first token of each row has position 0.": torch.arange(
                ids.shape[1]
            ),
            "The first position is 1; expected 0.": tokens.cumsum(dim=1),
        },
    )
    if types is None:
        types = torch.full_like(ids, pick(0, {"The token type is 1 where token_type_ids is None; expected 0.": 1}))
    total = (
        source.word_embeddings(ids)
        + pick(
            source.position_embeddings(positions),
            {"The positions are forgotten: add position_embeddings of 0, 1, 2, …": 0},
        )
        + pick(
            source.token_type_embeddings(types),
            {"The token types are forgotten: add token_type_embeddings, also of type 0.": 0},
        )
    )
    return pick(source.norm(total), {"The layer norm is forgotten.": total})[tokens.bool()]


def test_embeddings(config, right, data):
    ids, tokens, types = data.batch["input_ids"], data.tokens, data.batch["token_type_ids"]
    part = loaded(Embeddings(config), right.embeddings)
    part.norm = right.embeddings.norm  # a wrong layer norm is reported in chapter 4
    check_dropout(part, ids, tokens, types)
    for given in ((ids, tokens, types), (ids, tokens), (ids.flip(1), tokens.flip(1), types)):
        compare(part(*given)[given[1].bool()], embedded, right.embeddings, *given)
