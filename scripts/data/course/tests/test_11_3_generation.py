"""Final project, step 3: your model that writes each letter twice, which you have saved in the folder doubler."""

import random

import pytest
import torch

import project
from grading import check, difference, expect, saved_folder

ALPHABET = "_><abcdefghijklmnopqrstuvwxyz"  # the ids 0 to 28: padding, start, end, and the letters


def encode(words):
    rows = [torch.tensor([ALPHABET.index(letter) for letter in word]) for word in words]
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)


@pytest.fixture
def model():
    return project.MyBertForConditionalGeneration.from_pretrained(saved_folder("doubler")).requires_grad_(False)


def test_decoder(model):
    source, written = encode(["step", "owl"]), encode([">sst", ">oow"])
    mask, other = (source != 0).long(), written.clone()
    other[:, 3] = 20

    def logits(source, mask, written):
        return model(input_ids=source, attention_mask=mask, decoder_input_ids=written).logits

    right = logits(source, mask, written)
    expect(
        not difference(right[:, :3], logits(source, mask, other)[:, :3]),
        "The decoder sees tokens that are not written yet; its attention needs a causal mask.",
    )
    expect(
        difference(right, logits(source.flip(0), mask, written)),
        "The decoder does not see the source; add cross-attention to its blocks.",
    )
    expect(
        not difference(right[1:], logits(source[1:, :3], mask[1:, :3], written[1:])),
        "The decoder sees the padding of the source; pass attention_mask to the encoder and to the cross-attention.",
    )
    labels = written[:, 1:].masked_fill(written[:, 1:] == ALPHABET.index("w"), -100)
    result = model(input_ids=source, attention_mask=mask, labels=labels)
    expected = logits(source, mask, written[:, :-1])
    expect(
        not difference(result.logits, expected),
        "With labels, the decoder has other inputs; expected the start token and the labels without the last one.",
    )
    loss = torch.nn.functional.cross_entropy(expected.flatten(0, 1), labels.flatten())
    expect(not difference(result.loss, loss), "The loss is not the cross-entropy; labels of -100 must not count in it.")


def test_generate(model):
    generator = random.Random(0)
    words = ["".join(generator.choices(ALPHABET[3:], k=generator.randint(3, 7))) for _ in range(200)]
    source = encode(words)
    mask = (source != 0).long()
    check(
        "seq2seq.greedy",
        source,
        mask,
        15,
        run=lambda greedy, *inputs: greedy(model, *inputs),
        function=lambda model, ids, mask, number: model.generate(
            input_ids=ids, attention_mask=mask, max_new_tokens=number
        ),
    )
    result = model.generate(input_ids=source, attention_mask=mask, max_new_tokens=15)
    expected = ["".join(2 * letter for letter in word) for word in words]
    written = ["".join(ALPHABET[token] for token in row) for row in result]
    wrong = [pair for pair in zip(written, expected, strict=True) if not pair[0].startswith(f">{pair[1]}<")]
    expect(
        len(wrong) <= 10,
        f"{len(wrong)} of 200 words are wrong, such as {wrong[:1]}; expected at most 10. Train longer.",
    )
