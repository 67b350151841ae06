"""Chapter 9, docs/course/09_seq2seq.md: fill the gaps, then run `scratchbert course check 9`."""

import torch
from torch import nn


def shift_right(labels, start_id, pad_id):
    """The inputs of the decoder for teacher forcing: the start token, then the labels without the last.

    Args:
        labels: `(B, T)`, with -100 at padding, in whose place the inputs have `pad_id`.

    Returns:
        The inputs, and their attention mask, 1 for a token and 0 for padding: both `(B, T)`.
    """
    raise NotImplementedError  # your code


def sequence_losses(logits, labels):
    """The loss of each sequence, `(B,)`: the mean of -log p over those of its labels that are not -100.

    Args:
        logits: `(B, T, vocab_size)`: those at position t are for `labels[:, t]`.
        labels: `(B, T)`.
    """
    raise NotImplementedError  # your code


def greedy(model, input_ids, attention_mask, max_new_tokens):
    """The ids that the model generates for a batch, as `model.generate(...)` returns them.

    Each row begins with the start token. Each step appends the most probable next token to every row; a row that has
    its end token gets `pad_token_id` instead. It ends when all rows have their end token, or after `max_new_tokens`
    steps.

    Args:
        model: called as `model(input_ids=…, attention_mask=…, decoder_input_ids=…).logits`. `model.config` has
            `decoder_start_token_id`, `eos_token_id` and `pad_token_id`.
        input_ids, attention_mask: `(B, S)`.

    Returns:
        `(B, T)`
    """
    raise NotImplementedError  # your code
