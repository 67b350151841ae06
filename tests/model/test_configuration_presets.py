"""The sizes under configuration/ are those of the papers."""

import pytest
import torch

from modeling_scratchbert import ScratchBertConfig, ScratchBertModel
from support.folders import CONFIGURATION

# Millions of parameters: Turc et al. 2019, "Well-Read Students Learn Better", table 1; large: Devlin et al. 2018,
# section 3, which rounds to 10. Both count the masked-LM transform and the vocabulary's bias differently from one
# another, hence the tolerance.
MILLIONS = {"tiny": 4.4, "mini": 11.3, "small": 29.1, "medium": 41.7, "base": 110.1, "large": 340.0}


@pytest.mark.parametrize("name", MILLIONS)
def test_preset_has_the_size_of_the_paper(name):
    config = ScratchBertConfig.from_pretrained(CONFIGURATION / f"{name}.json")
    with torch.device("meta"):
        model = ScratchBertModel(config)
    assert model.num_parameters() / 1e6 == pytest.approx(MILLIONS[name], rel=0.02)
