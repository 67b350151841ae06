"""Chapter 9, docs/course/09_seq2seq.md: fill the gaps, then run `scratchbert course check 9`."""

import torch
from torch import nn


def shift_right(labels: torch.Tensor, start_id: int, pad_id: int) -> torch.Tensor:
    """The inputs of the decoder for teacher forcing: the start token, then the labels without the last.

    Args:
        labels: `(B, T)`, with -100 at padding, in whose place the inputs have `pad_id`.
    """
    ...  # your code


def seq2seq_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The mean of -log p over the labels that are not -100, as a tensor without dimensions.

    Args:
        logits: `(B, T, vocab_size)`: those at position t are for `labels[:, t]`.
        labels: `(B, T)`.
    """
    ...  # your code


def greedy(
    model: nn.Module, input_ids: torch.Tensor, attention_mask: torch.Tensor, max_new_tokens: int
) -> torch.Tensor:
    """The ids that the model generates for one source, as `model.generate(...)` returns them: the start token, then in
    each step the most probable next token, up to the end token or `max_new_tokens` new tokens.

    Args:
        model: called as `model(input_ids=…, attention_mask=…, decoder_input_ids=…).logits`. `model.config` has
            `decoder_start_token_id` and `eos_token_id`.
        input_ids, attention_mask: `(1, S)`.

    Returns:
        `(1, T)`
    """
    ...  # your code
