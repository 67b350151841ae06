"""Attention: the formula, and the multi-head layer around it (Vaswani et al. 2017, section 3.2)."""

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .unpadding import PADDED, PaddedBatch, UnpaddedBatch


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    *,
    query_mask: Tensor | None = None,
    key_mask: Tensor | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Attention(Q, K, V) = softmax(Q Kᵀ / sqrt(D)) V, equation 1 of Vaswani et al. 2017, section 3.2.1.

    Args:
        query: `(..., T, D)`.
        key: `(..., S, D)`.
        value: `(..., S, E)`.
        mask: broadcastable to `(..., T, S)`. Boolean: True where a query may attend to a key. Floating: added to the
            scores; an entry of `-inf`, or of the lowest number of the mask's dtype, hides the key.
        query_mask: `(..., T)`, True for queries that count; the rows of the others are zeros.
        key_mask: `(..., S)`, True for keys that may be attended to.
        scaling: the factor of the scores; `1 / sqrt(D)` by default.
        dropout: the probability with which a weight is set to zero.

    Returns:
        The context, `(..., T, E)`, and the attention weights, `(..., T, S)`, after dropout. Before dropout, a row of
        weights sums to 1, or is zero if every key is hidden from that query.

    Raises:
        ValueError: `mask` has an integer dtype.
    """
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    scores = query @ key.transpose(-2, -1) * scaling  # (..., T, S)

    hidden = torch.zeros((), dtype=torch.bool, device=scores.device)  # (..., T, S) with any mask
    if mask is not None and mask.dtype == torch.bool:
        hidden = ~mask
    elif mask is not None and mask.is_floating_point():
        scores, hidden = scores + mask.to(scores.dtype), mask <= torch.finfo(mask.dtype).min
    elif mask is not None:
        raise ValueError(
            f"mask has dtype {mask.dtype}; expected torch.bool (True: may attend) or a floating dtype "
            "(added to the scores). Pass a padding mask of 0 and 1 as key_mask."
        )
    if query_mask is not None:
        hidden = hidden | ~query_mask.bool()[..., :, None]
    if key_mask is not None:
        hidden = hidden | ~key_mask.bool()[..., None, :]

    # The lowest number, not -inf: the softmax of a row of -inf, and every gradient after it, would be NaN.
    weights = scores.masked_fill(hidden, torch.finfo(scores.dtype).min).softmax(dim=-1)
    weights = weights.masked_fill(hidden.all(dim=-1, keepdim=True), 0.0)
    weights = nn.functional.dropout(weights, p=dropout)
    return weights @ value, weights


def eager_attention(module, query, key, value, attention_mask, scaling=None, dropout=0.0, **kwargs):
    """The formula as a function of `transformers`' attention interface: `(B, H, T, D)` → `(B, T, H, D)`."""
    context, weights = scaled_dot_product_attention(query, key, value, attention_mask, scaling=scaling, dropout=dropout)
    return context.transpose(1, 2).contiguous(), weights


class MultiHeadAttention(nn.Module):
    """MultiHead(Q, K, V) = Concat(head_1, …, head_H) W_O (Vaswani et al. 2017, section 3.2.2).

    Self-attention, or cross-attention to the output of an encoder. The attention heads are computed by the kernel
    `config._attn_implementation` of `transformers`' attention interface.
    """

    def __init__(self, config, layer_idx: int = 0, is_causal: bool = False):
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.is_causal = is_causal  # read by the sdpa and flash kernels if they are given no mask
        width = config.hidden_size
        self.head_width = width // config.num_attention_heads
        self.scaling = self.head_width**-0.5  # an attribute, because vLLM reads it
        self.dropout = config.attention_probs_dropout_prob
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.value = nn.Linear(width, width)
        self.output = nn.Linear(width, width)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        encoder_hidden_states: Tensor | None = None,
        past_key_values: Cache | None = None,
        output_attentions: bool = False,
        batch: PaddedBatch | UnpaddedBatch = PADDED,
        **kwargs,
    ) -> tuple[Tensor, Tensor | None]:
        """
        Args:
            hidden_states: `(B, T, C)`, from which the queries are computed.
            attention_mask: `(B, 1, T, S)`, boolean or additive, or the form that the kernel expects.
            encoder_hidden_states: `(B, S, C)`, from which keys and values are computed; `hidden_states` by default.
            past_key_values: the cache of keys and values.
            output_attentions: compute the formula itself, because no other kernel returns attention weights.
            batch: the sequences in `hidden_states`. Those of an unpadded batch, `(1, N, C)`, each attend to themselves,
                without a mask.

        Returns:
            `(B, T, C)`, and the attention weights `(B, H, T, S)`, or None if the kernel does not return them.
        """
        if encoder_hidden_states is None:
            query, key, value = map(self._split_heads, self.project(hidden_states))
            if past_key_values is not None:
                cache = getattr(past_key_values, "self_attention_cache", past_key_values)
                key, value = cache.update(key, value, self.layer_idx)
        else:
            query = self._split_heads(self.query(hidden_states))
            key, value = self._project_encoder(encoder_hidden_states, past_key_values)

        implementation = "eager" if output_attentions else self.config._attn_implementation or "eager"
        kernel = ALL_ATTENTION_FUNCTIONS.get_interface(implementation, eager_attention)
        kernel = batch.kernel(kernel)
        # vLLM reads this call, of what the interface returns, in the source.
        context, weights = kernel(
            self,
            query,
            key,
            value,
            attention_mask,
            scaling=self.scaling,
            dropout=self.dropout if self.training else 0.0,
            **kwargs,
        )
        # -1: with tensor parallelism, a process has some of the heads. vLLM's kernel returns no batch dimension.
        return self.output(context.reshape(*hidden_states.shape[:-1], -1)), weights

    def project(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The queries, keys and values of self-attention, `(B, T, C)` each."""
        return self.query(hidden_states), self.key(hidden_states), self.value(hidden_states)

    def _project_encoder(self, encoder_hidden_states, cache):
        """The keys and values of cross-attention. The encoder's output is the same at each step of decoding: they are
        computed once."""
        if cache is not None and cache.is_updated.get(self.layer_idx):
            layer = cache.cross_attention_cache.layers[self.layer_idx]
            return layer.keys, layer.values
        key = self._split_heads(self.key(encoder_hidden_states))
        value = self._split_heads(self.value(encoder_hidden_states))
        if cache is not None:
            key, value = cache.cross_attention_cache.update(key, value, self.layer_idx)
            cache.is_updated[self.layer_idx] = True
        return key, value

    def _split_heads(self, projected: Tensor) -> Tensor:
        """`(B, T, C)` → `(B, H, T, D)`, with C = H · D"""
        return projected.view(*projected.shape[:2], -1, self.head_width).transpose(1, 2)
