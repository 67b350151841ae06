"""Chapter 8, docs/course/08_finetuning.md: fill the gaps, then run `scratchbert course check 8`.

The model is a `ScratchBertForSequenceClassification`: `model.model` is the encoder, with the parts `embeddings`,
`encoder.blocks` and `pooler`, and `model.classifier` is the classifier.
"""

import torch
from torch import nn


def freeze(model, num_trained):
    """Leaves only the last `num_trained` blocks (0 or more), the pooler and the classifier in training."""
    raise NotImplementedError  # your code


def parameter_groups(model, weight_decay):
    """The argument of `torch.optim.AdamW`: two groups, `{"params": [...], "weight_decay": ...}`.

    Only the matrices of linear layers have weight decay. Biases, the weights of layer norms, and the tables of
    embeddings have none. Frozen parameters are in no group.
    """
    raise NotImplementedError  # your code


def balanced_accuracy(model, batches):
    """The mean over the two classes, 0 and 1, of the share of its texts for which the class with the highest logit is
    the label. It does not count the more frequent class more.

    Args:
        model: may be in training mode, and is so again afterwards.
        batches: arguments of the model, with `labels`. They have different numbers of texts.
    """
    raise NotImplementedError  # your code
