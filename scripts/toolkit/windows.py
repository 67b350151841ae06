"""Overlapping windows over a text that is longer than a model's input."""

from dataclasses import dataclass

from tokenizers import Encoding


@dataclass
class Window:
    """A part of a text, with all tokens that are around the text: special tokens, and the question before it."""

    input_ids: list[int]
    token_type_ids: list[int]
    first: int  # the position in `input_ids` of its first token of the text
    tokens: range  # its tokens of the text, where the text's first token is 0


def split_into_windows(encoding: Encoding, text: range, max_length: int, stride: int) -> list[Window]:
    """Splits the tokens `text` of an encoding, which is not truncated, into windows that cover all of them.

    Args:
        max_length: of a window in tokens, including those around the text.
        stride: tokens of the text that a window shares with the one before it.

    Returns:
        The windows from the beginning of the text to its end. Only the last one may be shorter than `max_length`.

    Raises:
        ValueError: `stride` is negative, or a window has no room for more than `stride` tokens of the text.
    """
    if stride < 0:
        raise ValueError(f"stride is {stride}; expected 0 or more")
    around = len(encoding.ids) - len(text)
    room = max_length - around
    if room <= stride:
        raise ValueError(
            f"max_length is {max_length}; expected at least {around + stride + 1}: {around} tokens around "
            f"the text + stride {stride} + 1"
        )
    found = []
    for start in range(text.start, max(text.stop - stride, text.start + 1), room - stride):
        end = min(start + room, text.stop)
        kept = [*range(text.start), *range(start, end), *range(text.stop, len(encoding.ids))]
        ids, types = ([values[i] for i in kept] for values in (encoding.ids, encoding.type_ids))
        found.append(Window(ids, types, text.start, range(start - text.start, end - text.start)))
    return found
