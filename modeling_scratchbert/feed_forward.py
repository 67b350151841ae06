"""The position-wise feed-forward network of a block (Vaswani et al. 2017, section 3.3, with BERT's GELU)."""

from torch import Tensor, nn
from transformers.activations import ACT2FN
from transformers.pytorch_utils import apply_chunking_to_forward


class FeedForward(nn.Module):
    """FFN(x) = act(x W1 + b1) W2 + b2 at each position. `(B, T, C)` → `(B, T, C)`. BERT's activation is
    GELU(x) = x Φ(x), Φ the cumulative distribution function of the normal distribution (Hendrycks & Gimpel 2016).

    With `config.chunk_size_feed_forward`, that many positions are computed at a time, which saves memory.
    """

    def __init__(self, config):
        super().__init__()
        self.chunk_size = config.chunk_size_feed_forward
        self.intermediate = nn.Linear(config.hidden_size, config.intermediate_size)
        self.activation = ACT2FN[config.hidden_act]
        self.output = nn.Linear(config.intermediate_size, config.hidden_size)

    def forward(self, hidden_states: Tensor) -> Tensor:
        if not self.chunk_size:  # `apply_chunking_to_forward` inspects a signature on every call, which is slow
            return self.formula(hidden_states)
        return apply_chunking_to_forward(self.formula, self.chunk_size, 1, hidden_states)

    def formula(self, x: Tensor) -> Tensor:
        """act(x W1 + b1) W2 + b2."""
        return self.output(self.activation(self.intermediate(x)))
