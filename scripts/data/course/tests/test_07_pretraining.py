"""Chapter 7: pre-training."""

import copy

import torch
from torch import nn

from grading import compare, expect
from pretraining import MaskedLMHead, mask_tokens, masked_lm_loss


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


def scores(pick, head, states, is_labelled):
    x = pick(
        states[is_labelled],
        {"The logits of all tokens are computed; expected (N, vocab_size), those of the labelled tokens.": states},
    )
    x = pick(head.dense(x), {"The first linear layer is missing.": x})
    x = pick(nn.functional.gelu(x), {"GELU is missing.": x})
    return head.decoder(pick(head.norm(x), {"The layer norm is missing.": x}))


def test_head(right, data):
    words = copy.deepcopy(right.embeddings.word_embeddings)
    head = MaskedLMHead(right.config, words)
    expect(
        head.decoder.weight is words.weight,
        "The output matrix is not tied to the word embeddings: a copy would be trained apart from them. Assign the "
        "parameter: self.decoder.weight = word_embeddings.weight.",
    )
    labels = torch.where(data.special == 0, data.batch["input_ids"], -100)
    compare(head(data.states, labels), scores, head, data.states, labels != -100)


def token_losses(pick, logits, labels):
    """The loss at each label, `(B, T)`, which is 0 for -100, and where the other labels are."""
    logits, labels = pick(
        (logits, labels),
        {
            "The labels are shifted; the label of a position is for the logits at the same position.": (
                logits[:, :-1],
                labels[:, 1:],
            )
        },
    )
    labels = pick(labels, {"Labels of -100 count as the token 0; leave them out (ignore_index=-100).": labels.clamp(0)})
    return nn.functional.cross_entropy(logits.mT, labels, reduction="none"), labels != -100


def mean_loss(pick, logits, labels):
    logits = pick(
        logits.transpose(0, 1),
        {
            "logits is (T, B, V) and labels is (B, T), so the logits are those of other labels; transpose one of "
            "them.": logits.reshape(*labels.shape, -1)
        },
    )
    losses, counted = token_losses(pick, logits, labels)
    total = losses.sum()
    return pick(
        total / counted.sum(), {"The loss is summed; expected the mean over the labels that are not -100.": total}
    )


def test_masked_lm_loss():
    logits = 4 * torch.randn(12, 3, 50)
    labels = torch.randint(50, (3, 12)).where(torch.rand(3, 12) < 0.3, -100)
    compare(masked_lm_loss(logits, labels), mean_loss, logits, labels)
