"""Chapter 7, docs/course/07_pretraining.md: fill the gaps, then run `scratchbert course check 7`."""

import torch
from torch import nn


def mask_tokens(input_ids, special, mask_id, vocab_size):
    """Chooses tokens at random, and of these replaces 80 % by [MASK] and 10 % by random tokens. The other 10 % stay as
    they are. `input_ids` is not changed.

    The number of chosen tokens is not left to chance, as it is in the chapter: in each row, exactly 15 % of the tokens
    that are not special are chosen, rounded by `round()`: none of three, and one of four. So Google's code for BERT
    did it.

    Args:
        input_ids: `(B, T)`.
        special: `(B, T)`, boolean, True for [CLS], [SEP] and padding, which are never chosen.
        mask_id: the id of [MASK].
        vocab_size: random tokens are ids below it.

    Returns:
        The inputs of the model, `(B, T)`, and the labels, `(B, T)`: the id of `input_ids` at the chosen tokens, and
        -100 elsewhere.
    """
    raise NotImplementedError  # your code


class MaskedLMHead(nn.Module):
    """Computes the score of each token of the vocabulary: a linear layer, GELU, a layer norm, and the output matrix,
    which is the matrix of the word embeddings."""

    def __init__(self, config, word_embeddings):
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.decoder = nn.Linear(config.hidden_size, config.vocab_size)
        # Your code: let `self.decoder` and `word_embeddings` share one matrix.

    def forward(self, states, labels):
        """The logits of the labelled tokens only, which saves most of the work: `(B, T, C)` → `(N, vocab_size)`.

        Args:
            labels: `(B, T)`; N of them are not -100.
        """
        raise NotImplementedError  # your code


def masked_lm_loss(logits, labels):
    """The mean of -log p over the labels that are not -100, as a tensor without dimensions; 0 if there are none.

    Args:
        logits: `(N, vocab_size)`, as `MaskedLMHead` returns them.
        labels: `(B, T)`; N of them are not -100.
    """
    raise NotImplementedError  # your code
