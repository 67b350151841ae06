"""Chapter 7: pre-training."""

import copy

import torch

from grading import check, expect
from pretraining import MaskedLMHead, mask_tokens


def test_mask_tokens():
    """Counts what happens to 100,000 tokens. Every share is within five standard deviations of its probability."""
    size, mask_id = 30_522, 103
    ids = torch.randint(1000, size, (100, 1000))
    special = torch.arange(1000).expand(100, -1) > torch.randint(500, 999, (100, 1))
    before = ids.clone()
    inputs, labels = mask_tokens(ids, special, mask_id, size)
    expect(torch.equal(ids, before), "input_ids is changed; clone it before you replace tokens.")
    expect(
        not torch.equal(labels, ids),
        "There are labels at all tokens, also at those that the model can see; expected -100 where none is chosen.",
    )
    chosen = labels != -100
    expect(not (chosen & special).any(), "Special tokens are chosen; [CLS], [SEP] and padding are never replaced.")
    expect(
        torch.equal(labels[chosen], ids[chosen]),
        "The labels are not the ids of input_ids; take them before you replace tokens.",
    )
    expect(
        torch.equal(inputs[~chosen], ids[~chosen]),
        "Tokens that are not chosen are replaced; expected only chosen ones.",
    )
    check_share("of the tokens are chosen", chosen[~special], 0.15)
    expected = [round(0.15 * count) for count in (~special).sum(dim=1).tolist()]
    expect(
        chosen.sum(dim=1).tolist() == expected,
        "The number of chosen tokens is left to chance; choose exactly round(0.15 · n) of the n tokens of each row.",
    )
    masked, kept = inputs[chosen] == mask_id, inputs[chosen] == ids[chosen]
    expect(not masked.all(), "Every chosen token becomes [MASK]; 10 % of them become random tokens, and 10 % stay.")
    check_share("of the chosen tokens become [MASK]", masked, 0.8)
    check_share("of the chosen tokens stay as they are", kept, 0.1)
    replaced = inputs[chosen][~masked & ~kept].double().mean() / size
    expect(
        0.45 < replaced < 0.55,
        "The random tokens are not spread over the vocabulary; draw them with torch.randint(vocab_size, …).",
    )


def check_share(what, chosen, expected):
    share, deviation = chosen.double().mean().item(), (expected * (1 - expected) / len(chosen)) ** 0.5
    expect(abs(share - expected) < 5 * deviation, f"{share:.1%} {what}; expected {expected:.0%}.")


def test_head(right, data):
    words = copy.deepcopy(right.embeddings.word_embeddings)
    expect(
        MaskedLMHead(right.config, words).decoder.weight is words.weight,
        "The output matrix is not tied to the word embeddings: a copy would be trained apart from them. Assign the "
        "parameter: self.decoder.weight = word_embeddings.weight.",
    )
    labels = torch.where(data.special == 0, data.batch["input_ids"], -100)
    check(
        "pretraining.MaskedLMHead",
        data.states,
        labels,
        run=lambda head, *inputs: head(right.config, words)(*inputs),
    )


def test_masked_lm_loss():
    labels = torch.randint(50, (3, 12))
    labels[:, 4:] = -100
    check("pretraining.masked_lm_loss", 4 * torch.randn(12, 50), labels)
    check("pretraining.masked_lm_loss", torch.zeros(0, 50), labels[:, 4:])
