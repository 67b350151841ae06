"""What a user's code is told by the hints of the package: `mypy tests/typed_use.py` checks it, and nothing runs it.

A line with `# type: ignore[…]` is a mistake that mypy must see: `warn_unused_ignores` reports the hint that was lost.
"""

from pathlib import Path
from typing import assert_type

import torch
from torch import nn
from transformers import BertConfig

from modeling_scratchbert import (
    ScratchBertConfig,
    ScratchBertForConditionalGeneration,
    ScratchBertForMaskedLM,
    ScratchBertForSequenceClassification,
    ScratchBertModel,
)


class OwnConfig(ScratchBertConfig):
    own_field: int = 1


class OwnModel(ScratchBertModel):
    pass


def opening() -> None:
    assert_type(ScratchBertForMaskedLM.from_pretrained(Path("x"), dtype=torch.bfloat16), ScratchBertForMaskedLM)
    assert_type(OwnModel.from_pretrained("x"), OwnModel)
    assert_type(
        ScratchBertForConditionalGeneration.from_bert("x", num_decoder_layers=2), ScratchBertForConditionalGeneration
    )
    ScratchBertModel.from_pretrained(5)  # type: ignore[arg-type]
    ScratchBertModel.from_pretrained("x", config={"hidden_size": 8})  # type: ignore[arg-type]
    ScratchBertForConditionalGeneration.from_bert(5)  # type: ignore[arg-type]


def configuring() -> None:
    config = ScratchBertConfig(hidden_size=64, num_labels=3, norm_first=True)
    assert_type(ScratchBertConfig.from_pretrained("x"), ScratchBertConfig)
    assert_type(ScratchBertConfig.from_dict({}), ScratchBertConfig)
    assert_type(ScratchBertConfig.from_bert(BertConfig()), ScratchBertConfig)
    assert_type(config.decoder_config(), ScratchBertConfig)
    assert_type(OwnConfig(own_field=2).encoder_config(), OwnConfig)
    assert_type(config.num_labels, int)
    assert_type(config.num_decoder_layers, int | None)
    ScratchBertConfig(hidden_size="wide")  # type: ignore[arg-type]
    ScratchBertConfig(hiden_size=64)  # type: ignore[call-arg]
    ScratchBertModel("x")  # type: ignore[arg-type]
    config.save_pretrained(5)  # type: ignore[arg-type]


def using(model: ScratchBertForSequenceClassification, own: OwnModel) -> None:
    assert_type(model.config, ScratchBertConfig)
    assert_type(model.optimize_for_inference(), ScratchBertForSequenceClassification)
    assert_type(own.optimize_for_inference(), OwnModel)
    assert_type(own.train(False), OwnModel)
    assert_type(own.get_input_embeddings(), nn.Embedding)
    assert_type(model.resize_token_embeddings(100), nn.Embedding)
    model.save_pretrained(Path("x"), push_to_hub=True)
    model.save_pretrained(5)  # type: ignore[arg-type]
    model.save_as_bert("x")
    model.save_as_bert(5)  # type: ignore[arg-type]
    model.train("yes")  # type: ignore[arg-type]
