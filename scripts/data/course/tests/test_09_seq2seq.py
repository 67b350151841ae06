"""Chapter 9: sequence to sequence."""

import pytest
import torch
from torch import nn

from grading import compare, expect
from modeling_scratchbert import ScratchBertConfig, ScratchBertForConditionalGeneration
from seq2seq import greedy, sequence_losses, shift_right
from test_07_pretraining import token_losses

PAD, START, END = 0, 1, 2


def shifted(pick, labels):
    inputs = torch.cat(
        [torch.full((2, 1), pick(START, {"The inputs begin with pad_id; expected start_id.": PAD})), labels], dim=1
    )
    inputs = pick(
        inputs[:, :-1],
        {
            "The last label is not removed; the inputs are as long as the labels.": inputs,
            "The labels are not shifted, so that each position sees its own label.": labels,
            "The labels are shifted to the left; put the start token before them.": nn.functional.pad(
                labels[:, 1:], (0, 1)
            ),
        },
    )
    mask = pick(inputs, {"The attention mask is that of the labels; expected that of the inputs.": labels}) != -100
    return pick(
        inputs.masked_fill(inputs == -100, PAD),
        {"-100 is left in the inputs of the decoder, which is no id; replace it by pad_id.": inputs},
    ), mask


def test_shift_right():
    labels = torch.tensor([[7, 8, 9, END], [5, END, -100, -100]])
    before = labels.clone()
    result = shift_right(labels, START, PAD)
    expect(torch.equal(labels, before), "labels is changed; expected a new tensor.")
    compare(result, shifted, labels)


def means(pick, logits, labels):
    losses, counted = token_losses(pick, logits, labels)
    total, number = losses.sum(dim=1), counted.sum(dim=1)
    return pick(
        total / number,
        {
            "This is the mean over all labels; expected one number for each sequence.": losses.sum() / counted.sum(),
            "The losses are divided by T; divide those of a sequence by the number of its labels.": losses.mean(dim=1),
            "The loss is summed; expected the mean over the labels that are not -100.": total,
        },
    )


def test_sequence_losses():
    logits, labels = 4 * torch.randn(3, 8, 30), torch.randint(30, (3, 8))
    labels[1, 5:], labels[2, 2:] = -100, -100
    compare(sequence_losses(logits, labels), means, logits, labels)


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


def generated(pick, model, source, mask, max_new_tokens=9):
    """Greedy decoding of a batch. It is also the reference of the final project."""
    mask = pick(mask, {"attention_mask is not passed to the model, so that it attends to padding.": None})
    seen = pick(99, {"The decoder gets the last token only; without a cache, it needs all tokens so far.": 1})
    place = pick(-1, {"The logits of the first position are used; those of the last one are for the next token.": 0})
    goes_on = "A row goes on after the end token; append pad_token_id to a row that has its end token."
    ids, ended = torch.full((len(source), 1), START), torch.zeros(len(source), dtype=torch.bool)
    while len(ids[0]) <= max_new_tokens and not ended.all():
        token = (
            model(input_ids=source, attention_mask=mask, decoder_input_ids=ids[:, -seen:])
            .logits[:, place]
            .argmax(dim=-1)
        )
        token = pick(token.masked_fill(ended, PAD), {goes_on: token})
        ids, ended = torch.cat([ids, token[:, None]], dim=1), ended | (token == END)
    return pick(
        ids,
        {
            "The start token is missing in the result; `generate` returns it.": ids[:, 1:],
            "The last token is missing; the end token, or the last of max_new_tokens, is part of the result.": ids[
                :, :-1
            ],
        },
    )


def test_greedy(model):
    source = torch.randint(3, 12, (8, 6))
    mask = (torch.arange(6) < torch.tensor([[4], [6]]).repeat(4, 1)).long()
    compare(greedy(model, source, mask, 9), generated, model, source, mask)
