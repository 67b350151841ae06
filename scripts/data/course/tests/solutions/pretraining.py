"""A solution of the exercise in pretraining.py."""

import torch
from torch import nn


def mask_tokens(input_ids, special, mask_id, vocab_size):
    inputs, labels = input_ids.clone(), torch.full_like(input_ids, -100)
    for row in range(len(input_ids)):
        places = (~special[row]).nonzero().flatten()
        places = places[torch.randperm(len(places))][: round(0.15 * len(places))]
        labels[row, places] = input_ids[row, places]
        lottery = torch.rand(len(places))
        inputs[row, places[lottery < 0.8]] = mask_id
        replaced = places[lottery >= 0.9]
        inputs[row, replaced] = torch.randint(vocab_size, (len(replaced),))
    return inputs, labels


class MaskedLMHead(nn.Module):
    def __init__(self, config, word_embeddings):
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.decoder = nn.Linear(config.hidden_size, config.vocab_size)
        self.decoder.weight = word_embeddings.weight

    def forward(self, states, labels):
        return self.decoder(self.norm(nn.functional.gelu(self.dense(states[labels != -100]))))


def masked_lm_loss(logits, labels):
    labels = labels[labels != -100]
    return nn.functional.cross_entropy(logits, labels, reduction="sum") / max(1, len(labels))
