"""The transformer block, and the stack of them. An encoder is a stack; a decoder is a stack of causal blocks."""

from torch import Tensor, nn
from transformers.cache_utils import Cache
from transformers.modeling_layers import GradientCheckpointingLayer

from .attention import MultiHeadAttention
from .feed_forward import FeedForward


class TransformerBlock(GradientCheckpointingLayer):
    """Attention, optional cross-attention, feed-forward; each with a residual sum and a layer norm.

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
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        encoder_hidden_states: Tensor | None = None,
        encoder_attention_mask: Tensor | None = None,
        past_key_values: Cache | None = None,
        **kwargs,
    ) -> Tensor:
        """`(B, T, C)` → `(B, T, C)`. The arguments are those of `MultiHeadAttention.forward`."""
        x, pre_norm = hidden_states, self.norm_first

        y, _ = self.attention(
            self.attention_norm(x) if pre_norm else x,
            attention_mask=attention_mask,
            past_key_values=past_key_values,
            **kwargs,
        )
        x = x + self.dropout(y)
        x = x if pre_norm else self.attention_norm(x)

        if encoder_hidden_states is not None:
            y, _ = self.cross_attention(
                self.cross_attention_norm(x) if pre_norm else x,
                attention_mask=encoder_attention_mask,
                past_key_values=past_key_values,
                encoder_hidden_states=encoder_hidden_states,
                **kwargs,
            )
            x = x + self.dropout(y)
            x = x if pre_norm else self.cross_attention_norm(x)

        y = self.feed_forward(self.feed_forward_norm(x) if pre_norm else x)
        x = x + self.dropout(y)
        return x if pre_norm else self.feed_forward_norm(x)


class TransformerStack(nn.Module):
    """`config.num_hidden_layers` blocks; after pre-norm blocks, one more norm for the last residual sum."""

    def __init__(self, config):
        super().__init__()
        self.blocks = nn.ModuleList(TransformerBlock(config, index) for index in range(config.num_hidden_layers))
        width, eps = config.hidden_size, config.layer_norm_eps
        self.final_norm = nn.LayerNorm(width, eps=eps) if config.norm_first else nn.Identity()

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        encoder_hidden_states: Tensor | None = None,
        **kwargs,
    ) -> Tensor:
        """`(B, T, C)` → `(B, T, C)`. The arguments are those of `TransformerBlock.forward`."""
        for block in self.blocks:
            # Reentrant checkpointing gives gradients to positional arguments only.
            hidden_states = block(hidden_states, attention_mask, encoder_hidden_states, **kwargs)
        return self.final_norm(hidden_states)
