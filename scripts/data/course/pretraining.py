"""Chapter 7, docs/course/07_pretraining.md: fill the gaps, then run `scratchbert course check 7`."""

import torch
from torch import nn


def mask_tokens(
    input_ids: torch.Tensor, special: torch.Tensor, mask_id: int, vocab_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Chooses 15 % of the tokens at random, and of these replaces 80 % by [MASK] and 10 % by random tokens. The other
    10 % stay as they are. `input_ids` is not changed.

    Args:
        input_ids: `(B, T)`.
        special: `(B, T)`, boolean, True for [CLS], [SEP] and padding, which are never chosen.
        mask_id: the id of [MASK].
        vocab_size: random tokens are ids below it.

    Returns:
        The inputs of the model, `(B, T)`, and the labels, `(B, T)`: the id of `input_ids` at the chosen tokens, and
        -100 elsewhere.
    """
    ...  # your code


class MaskedLMHead(nn.Module):
    """Computes the score of each token of the vocabulary: a linear layer, GELU, a layer norm, and the output matrix,
    which is the matrix of the word embeddings."""

    def __init__(self, config, word_embeddings: nn.Embedding):
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.decoder = nn.Linear(config.hidden_size, config.vocab_size)
        # Your code: let `self.decoder` and `word_embeddings` share one matrix.

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """`(B, T, C)` → logits, `(B, T, vocab_size)`"""
        ...  # your code


def masked_lm_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The mean of -log p over the labels that are not -100, as a tensor without dimensions.

    Args:
        logits: `(B, T, vocab_size)`.
        labels: `(B, T)`.
    """
    ...  # your code
