"""Chapter 6, docs/course/06_bert.md: fill the gaps, then run `scratchbert course check 6`.

`MyBert` consists of your embeddings and your blocks. The table `NAMES` says where the weights of a `BertModel` belong.
"""

import torch
from torch import nn

from blocks import Block
from embeddings import Embeddings

# The parts of a BertModel that have weights, and the same parts of MyBert; {} is the number of a block.
# `print(bert)` and `print(MyBert(bert.config))` show the names of all parts.
NAMES = {
    "embeddings.word_embeddings": "embeddings.word_embeddings",
    "encoder.layer.{}.attention.self.query": "blocks.{}.attention.query",
    # Your code: the other parts, 11 lines.
}


class MyBert(nn.Module):
    """BERT made of your parts."""

    def __init__(self, config):
        super().__init__()
        self.embeddings = Embeddings(config)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_hidden_layers))
        self.pooler = nn.Linear(config.hidden_size, config.hidden_size)

    @classmethod
    def from_bert(cls, bert):
        """A MyBert with the weights of a `BertModel`, in evaluation mode."""
        model = cls(bert.config)
        for number in range(bert.config.num_hidden_layers):
            for theirs, ours in NAMES.items():
                source, target = bert.get_submodule(theirs.format(number)), model.get_submodule(ours.format(number))
                target.load_state_dict(source.state_dict())
        return model.eval()

    def forward(self, input_ids, attention_mask, token_type_ids=None):
        """
        Args:
            input_ids, attention_mask, token_type_ids: `(B, T)`, as a tokenizer returns them.

        Returns:
            All hidden states, `(1 + number of blocks, B, T, C)`, from the embeddings to the last block; and the pooled
            output, `(B, C)`: the tanh of the pooler, applied to the last hidden state of the first token.
        """
        raise NotImplementedError  # your code


def mean_pooling(states, special_tokens_mask):
    """The mean of the hidden states of the words of each sequence: `(B, T, C)` → `(B, C)`.

    Args:
        special_tokens_mask: `(B, T)`, 0 for words, and 1 for [CLS], [SEP] and padding, which do not count.
    """
    raise NotImplementedError  # your code
