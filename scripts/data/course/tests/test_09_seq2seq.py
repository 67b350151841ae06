"""Chapter 9: sequence to sequence."""

import pytest
import torch

from grading import check
from modeling_scratchbert import ScratchBertConfig, ScratchBertForConditionalGeneration

PAD, START, END = 0, 1, 2


def test_shift_right():
    check("seq2seq.shift_right", torch.tensor([[7, 8, 9, END], [5, END, -100, -100]]), START, PAD)


def test_sequence_losses():
    labels = torch.randint(30, (3, 8))
    labels[1, 5:], labels[2, 2:] = -100, -100
    check("seq2seq.sequence_losses", 4 * torch.randn(3, 8, 30), labels)


@pytest.fixture
def model():
    """A small model with random weights. Pre-norm and large positions make its outputs vary from token to token."""
    torch.manual_seed(0)
    config = ScratchBertConfig(
        is_encoder_decoder=True,
        pad_token_id=PAD,
        decoder_start_token_id=START,
        eos_token_id=END,
        vocab_size=12,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        initializer_range=0.5,
        norm_first=True,
        tie_word_embeddings=False,
    )
    model = ScratchBertForConditionalGeneration(config).eval().requires_grad_(False)
    model.get_decoder().embeddings.position_embeddings.weight.mul_(4)
    return model


def test_greedy(model):
    source = torch.randint(3, 12, (8, 6))
    mask = (torch.arange(6) < torch.tensor([[4], [6]]).repeat(4, 1)).long()
    check("seq2seq.greedy", source, mask, 9, run=lambda greedy, *inputs: greedy(model, *inputs))
