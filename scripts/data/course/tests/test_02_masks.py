"""Chapter 2: masks."""

import torch

from grading import compare
from masks import causal_mask, masked_attention, padding_mask
from test_01_attention import attend

HIDDEN = -10_000.0  # lower numbers hide a key as well: `clamp` makes them equal


def additive(pick, allowed):
    allowed = pick(allowed, {"The mask is inverted; 0 is where a query may attend to a key.": ~allowed})
    return pick(
        torch.where(allowed, 0.0, HIDDEN),
        {
            "The mask has 1 where a query may attend to a key, and 0 elsewhere, which hides nothing; expected 0 and "
            "LOWEST.": allowed.float()
        },
    )


def windowed(pick):
    distance = torch.arange(7)[:, None] - torch.arange(7)  # of a key before a query
    distance = pick(
        distance, {"The mask is transposed: earlier positions attend to later ones. A row is a query.": -distance}
    )
    first = pick(0, {"A position does not attend to itself; it may.": 1})
    window = pick(
        3,
        {
            "The window is too large by one; the position itself is one of its positions.": 4,
            "The window is not used; hide the keys that are further back.": 7,
        },
    )
    return additive(pick, (distance >= first) & (distance < window))


def test_causal_mask():
    compare(causal_mask(7, window=3).clamp(HIDDEN), windowed)


def left_padded(pick, lengths):
    places = torch.arange(6)
    allowed = pick(
        places >= 6 - lengths,
        {"The mask hides padding on the right; the tokens are the last ones of each row.": places < lengths},
    )
    mask = additive(pick, allowed)
    return pick(
        mask[:, None, None],
        {"The mask hides queries; padding must be hidden as keys, in the last dimension.": mask[:, None, :, None]},
    )


def test_padding_mask():
    lengths = torch.tensor([6, 1, 4])
    compare(padding_mask(lengths, 6).clamp(HIDDEN), left_padded, lengths[:, None])


def test_masked_attention(data):
    causal = torch.full((data.states.shape[1],) * 2, data.mask.min().item()).triu(1)
    no_keys = causal.clone()
    no_keys[0] = causal[0, 1]
    for mask in (data.mask, causal, no_keys):
        compare(masked_attention(*data.heads, mask), attend, *data.heads, mask)
