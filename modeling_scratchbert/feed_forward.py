"""The position-wise half of a block (Vaswani et al. 2017, section 3.3, with BERT's GELU)."""

import torch
from torch import nn
from transformers.activations import ACT2FN
from transformers.pytorch_utils import apply_chunking_to_forward


class FeedForward(nn.Module):
    """FFN(x) = act(x W1 + b1) W2 + b2, for each position alone. `(B, T, C)` in and out. BERT's activation is
    GELU(x) = x Φ(x), Φ the normal distribution's cumulative function (Hendrycks & Gimpel 2016).

    With `config.chunk_size_feed_forward` positions go through in chunks of that many, which saves memory in the middle.
    """

    def __init__(self, config):
        super().__init__()
        self.chunk_size = config.chunk_size_feed_forward
        self.intermediate = nn.Linear(config.hidden_size, config.intermediate_size)
        self.activation = ACT2FN[config.hidden_act]
        self.output = nn.Linear(config.intermediate_size, config.hidden_size)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        if not self.chunk_size:  # transformers looks into `formula`'s signature, which at every token would be felt
            return self.formula(hidden_states)
        return apply_chunking_to_forward(self.formula, self.chunk_size, 1, hidden_states)

    def formula(self, x: torch.Tensor) -> torch.Tensor:
        return self.output(self.activation(self.intermediate(x)))
