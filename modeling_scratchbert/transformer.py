"""One block, and the stack of them. An encoder is a stack; a decoder is a stack whose blocks look back only."""

import torch
from torch import nn
from transformers.cache_utils import Cache
from transformers.modeling_layers import GradientCheckpointingLayer

from .attention import MultiHeadAttention
from .feed_forward import FeedForward
from .packing import Packing


class TransformerBlock(GradientCheckpointingLayer):
    """Attention, cross-attention where there is one, feed-forward; each with a residual sum and a layer norm.

    post-norm (BERT):  x ← norm(x + sublayer(x))         Vaswani et al. 2017, section 3.1
    pre-norm:          x ← x + sublayer(norm(x))         Xiong et al. 2020, figure 1
    """

    def __init__(self, config, layer_idx: int = 0):
        super().__init__()
        self.norm_first = config.norm_first
        self.attention = MultiHeadAttention(config, layer_idx, is_causal=config.is_decoder)
        self.attention_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        if config.add_cross_attention:
            self.cross_attention = MultiHeadAttention(config, layer_idx)
            self.cross_attention_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.feed_forward = FeedForward(config)
        self.feed_forward_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | Packing | None = None,
        encoder_hidden_states: torch.Tensor | None = None,
        encoder_attention_mask: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        **kwargs,
    ) -> torch.Tensor:
        """`(B, T, C)` → `(B, T, C)`. The arguments are those of `MultiHeadAttention.forward`."""

        def attend(x):
            return self.attention(x, attention_mask, past_key_values=past_key_values, **kwargs)[0]

        def attend_to_encoder(x):
            return self.cross_attention(
                x, encoder_attention_mask, encoder_hidden_states, past_key_values=past_key_values, **kwargs
            )[0]

        hidden_states = self.residual(hidden_states, attend, self.attention_norm)
        if encoder_hidden_states is not None:
            hidden_states = self.residual(hidden_states, attend_to_encoder, self.cross_attention_norm)
        return self.residual(hidden_states, self.feed_forward, self.feed_forward_norm)

    def residual(self, x: torch.Tensor, sublayer, norm: nn.LayerNorm) -> torch.Tensor:
        """The residual sum around a sub-layer, with its norm after the sum or before the sub-layer."""
        if self.norm_first:
            return x + self.dropout(sublayer(norm(x)))
        return norm(self.dropout(sublayer(x)) + x)


class TransformerStack(nn.Module):
    """`config.num_hidden_layers` blocks, and after pre-norm ones the norm that their last sum still lacks."""

    def __init__(self, config):
        super().__init__()
        self.blocks = nn.ModuleList(
            TransformerBlock(config, layer_idx) for layer_idx in range(config.num_hidden_layers)
        )
        if config.norm_first:
            self.final_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        else:
            self.final_norm = nn.Identity()

    def forward(self, hidden_states: torch.Tensor, *args, **kwargs) -> torch.Tensor:
        """`(B, T, C)` → `(B, T, C)`. The arguments are those of `TransformerBlock.forward`."""
        for block in self.blocks:
            hidden_states = block(hidden_states, *args, **kwargs)
        return self.final_norm(hidden_states)
