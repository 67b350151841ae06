"""Chapter 6, docs/course/06_bert.md: fill the gaps, then run `scratchbert course check 6`.

`MyBert` is complete. It is the package's `ScratchBertModel` with your embeddings and your blocks in it.
"""

import torch
from torch import nn
from transformers.utils.output_capturing import OutputRecorder

from blocks import Block
from embeddings import Embeddings
from heads import MultiHeadAttention
from modeling_scratchbert import ScratchBertModel


def copy_layer(layer: nn.Module, block: Block) -> None:
    """Copies the weights of a layer of `BertModel` into your block.

    Args:
        layer: a `BertLayer`, such as `BertModel.from_pretrained(source).encoder.layer[0]`. `print(layer)` shows the
            names of its parts.
        block: `part.load_state_dict(other_part.state_dict())` copies all weights of a part.
    """
    ...  # your code


def mean_pooling(states: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
    """The mean of the hidden states of the tokens of each sequence: `(B, T, C)` → `(B, C)`.

    Args:
        attention_mask: `(B, T)`, 1 for a token and 0 for padding.
    """
    ...  # your code


class MyBert(ScratchBertModel):
    """BERT made of your parts. `MyBert.from_pretrained(source)` loads any BERT checkpoint into it."""

    # The modules whose results `output_hidden_states` and `output_attentions` return.
    _can_record_outputs = {"hidden_states": Block, "attentions": OutputRecorder(MultiHeadAttention, 1, "attention")}

    def __init__(self, config, **options):
        super().__init__(config, **options)
        self.embeddings = Embeddings(config)
        self.encoder.blocks = nn.ModuleList(Block(config) for _ in range(config.num_hidden_layers))
        self.post_init()
