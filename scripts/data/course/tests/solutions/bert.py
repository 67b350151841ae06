"""A solution of the exercise in bert.py."""

import torch
from torch import nn

from blocks import Block
from embeddings import Embeddings

NAMES = {
    "embeddings.word_embeddings": "embeddings.word_embeddings",
    "encoder.layer.{}.attention.self.query": "blocks.{}.attention.query",
    "embeddings.position_embeddings": "embeddings.position_embeddings",
    "embeddings.token_type_embeddings": "embeddings.token_type_embeddings",
    "embeddings.LayerNorm": "embeddings.norm",
    "encoder.layer.{}.attention.self.key": "blocks.{}.attention.key",
    "encoder.layer.{}.attention.self.value": "blocks.{}.attention.value",
    "encoder.layer.{}.attention.output.dense": "blocks.{}.attention.output",
    "encoder.layer.{}.attention.output.LayerNorm": "blocks.{}.attention_norm",
    "encoder.layer.{}.output.LayerNorm": "blocks.{}.feed_forward_norm",
    "encoder.layer.{}.intermediate.dense": "blocks.{}.feed_forward.intermediate",
    "encoder.layer.{}.output.dense": "blocks.{}.feed_forward.output",
    "pooler.dense": "pooler",
}


class MyBert(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.embeddings = Embeddings(config)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_hidden_layers))
        self.pooler = nn.Linear(config.hidden_size, config.hidden_size)

    @classmethod
    def from_bert(cls, bert):
        model = cls(bert.config)
        for number in range(bert.config.num_hidden_layers):
            for theirs, ours in NAMES.items():
                source, target = bert.get_submodule(theirs.format(number)), model.get_submodule(ours.format(number))
                target.load_state_dict(source.state_dict())
        return model.eval()

    def forward(self, input_ids, attention_mask, token_type_ids=None):
        mask = attention_mask == 1
        states = [self.embeddings(input_ids, attention_mask, token_type_ids)]
        for block in self.blocks:
            states.append(block(states[-1], mask[:, None, None]))
        return torch.stack(states), self.pooler(states[-1][:, 0]).tanh()


def mean_pooling(states, special_tokens_mask):
    words = 1 - special_tokens_mask[:, :, None]
    return (states * words).sum(dim=1) / words.sum(dim=1)
