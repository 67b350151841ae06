"""Chapter 8, docs/course/08_finetuning.md: fill the gaps, then run `scratchbert course check 8`.

The model is a `ScratchBertForSequenceClassification`: `model.model` is the encoder, with the parts `embeddings`,
`encoder.blocks` and `pooler`, and `model.classifier` is the classifier.
"""

import torch
from torch import nn


def freeze(model: nn.Module, num_blocks: int) -> None:
    """Excludes the embeddings and the first `num_blocks` blocks from training. All other parts are trained."""
    ...  # your code


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict]:
    """The argument of `torch.optim.AdamW`: two groups, `{"params": [...], "weight_decay": ...}`. Biases and the weights
    of layer norms have no weight decay. Frozen parameters are in no group."""
    ...  # your code


def accuracy(model: nn.Module, batches: list[dict[str, torch.Tensor]]) -> float:
    """The share of texts for which the class with the highest logit is the label.

    Args:
        model: may be in training mode, and is so again afterwards.
        batches: arguments of the model, with `labels`. They have different numbers of texts.
    """
    ...  # your code
