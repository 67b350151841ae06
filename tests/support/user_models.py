"""Classes that a user derives from those of the package. Saved models contain a copy of this file."""

from torch import nn

from modeling_scratchbert import ScratchBertConfig, ScratchBertForSequenceClassification, ScratchBertModel


class TanhClassifier(ScratchBertForSequenceClassification):
    """A classifier with another head."""

    def __init__(self, config):
        super().__init__(config)
        self.classifier = nn.Sequential(nn.Linear(config.hidden_size, config.num_labels), nn.Tanh())
        self.post_init()


class ScaledConfig(ScratchBertConfig):
    """A configuration with an additional field."""

    scale: float = 1.0


class ScaledModel(ScratchBertModel):
    """An encoder with this configuration."""

    config: ScaledConfig
