"""Fifty steps of training: our losses and those of the reference."""

import re

import pytest
import torch
from transformers import BertConfig

from support.models import OURS, REFERENCES, tiny_config

PAD, CLS, SEP, MASK = range(4)


@pytest.fixture(scope="module")
def batches(reviews):
    """Eight batches of eight reviews, in words, with labels for masked LM or of the whole review."""
    words = [re.findall(r"[\w']+|[^\w\s]", review["text"].lower()) for review in reviews]
    vocabulary = {word: i for i, word in enumerate(sorted({word for text in words for word in text}), start=MASK + 1)}
    generator = torch.Generator().manual_seed(0)

    def batch(start, masked):
        rows = [torch.tensor([CLS, *map(vocabulary.get, text), SEP]) for text in words[start : start + 8]]
        ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=PAD)
        inputs = {"input_ids": ids, "attention_mask": (ids != PAD).long()}
        if not masked:
            return {**inputs, "labels": torch.tensor([review["label"] for review in reviews[start : start + 8]])}
        hidden = (ids > MASK) & (torch.rand(ids.shape, generator=generator) < 0.15)
        return {
            **inputs,
            "input_ids": ids.masked_fill(hidden, MASK),
            "labels": ids.masked_fill(~hidden, -100),
        }

    return {
        "vocab_size": MASK + 1 + len(vocabulary),
        "ForMaskedLM": [batch(start, masked=True) for start in range(0, 64, 8)],
        "ForSequenceClassification": [batch(start, masked=False) for start in range(0, 64, 8)],
    }


def train(model, batches, steps) -> torch.Tensor:
    """The loss at every step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model.train()
    losses = []
    for step in range(steps):
        torch.manual_seed(step)  # what dropout draws
        loss = model(**batches[step % len(batches)]).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return torch.tensor(losses)


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("head", ["ForMaskedLM", "ForSequenceClassification"])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_learning_curve(attention, head, dropout, batches, tmp_path):
    """50 steps of AdamW on real text, from the same weights; with dropout, from the same seed too."""
    fields = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "vocab_size": batches["vocab_size"],
        "hidden_dropout_prob": dropout,
        "attention_probs_dropout_prob": dropout,
        "attn_implementation": attention,
    }
    reference = REFERENCES[head](tiny_config(BertConfig, **fields))
    reference.save_pretrained(tmp_path)
    # Without padding, dropout draws fewer random numbers.
    ours = OURS[head].from_pretrained(tmp_path, attn_implementation=attention, padding_free=dropout == 0)
    actual, expected = (train(model, batches[head], steps=50) for model in (ours, reference))
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-4)
    assert expected[-8:].mean() < 0.9 * expected[:8].mean()  # it did learn
