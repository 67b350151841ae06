"""What goes into the first block: word + position + token type, normalised (Devlin et al. 2018, figure 2)."""

import torch
from torch import Tensor, nn


def sinusoidal_table(length: int, width: int) -> Tensor:
    """The fixed position table of Vaswani et al. 2017, "Attention is all you need", section 3.5.

        PE(pos, 2i)     = sin(pos / 10000^(2i / width))
        PE(pos, 2i + 1) = cos(pos / 10000^(2i / width))

    Computed in float64 and rounded once. Returns `(length, width)` in torch's default dtype, which is the model's own
    while it is made; `width` must be even.
    """
    position = torch.arange(length, dtype=torch.float64)[:, None]
    even = torch.arange(0, width, 2, dtype=torch.float64)
    angle = position / 10000 ** (even / width)  # (length, width / 2)
    return torch.stack([angle.sin(), angle.cos()], dim=-1).flatten(1).to(torch.get_default_dtype())


class SinusoidalPositions(nn.Module):
    """Looks positions up in the fixed sinusoidal table. Nothing is learned and nothing is saved."""

    def __init__(self, length: int, width: int):
        super().__init__()
        self.table = nn.Buffer(sinusoidal_table(length, width), persistent=False)

    def forward(self, position_ids: Tensor) -> Tensor:
        return self.table[position_ids]


class Embeddings(nn.Module):
    """norm(E_word + E_token_type + E_position), then dropout."""

    def __init__(self, config):
        super().__init__()
        width = config.hidden_size
        self.word_embeddings = nn.Embedding(config.vocab_size, width, padding_idx=config.pad_token_id)
        table = SinusoidalPositions if config.position_embedding_type == "sinusoidal" else nn.Embedding
        self.position_embeddings = table(config.max_position_embeddings, width)
        self.token_type_embeddings = nn.Embedding(config.type_vocab_size, width)
        self.norm = nn.LayerNorm(width, eps=config.layer_norm_eps)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(
        self,
        input_ids: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        past_length: int = 0,
    ) -> Tensor:
        """
        Args:
            input_ids: `(B, T)` token ids, or `inputs_embeds`: `(B, T, C)` in place of their word embeddings.
            token_type_ids: `(B, T)`, 0 for sentence A and 1 for sentence B; all 0 if left out.
            position_ids: `(B, T)` or `(1, T)`; counted from `past_length` if left out.
            past_length: how many tokens a cache holds already.

        Returns:
            `(B, T, C)`
        """
        words = self.word_embeddings(input_ids) if inputs_embeds is None else inputs_embeds
        if position_ids is None:
            position_ids = torch.arange(words.shape[1], device=words.device)[None] + past_length
        if token_type_ids is None:
            token_type_ids = torch.zeros_like(position_ids).expand(words.shape[:2])
        embeddings = words + self.token_type_embeddings(token_type_ids) + self.position_embeddings(position_ids)
        return self.dropout(self.norm(embeddings))
