"""Chapter 6: the whole model, from the embeddings to the gradients."""

import pytest
import torch

import test_03_heads
import test_04_blocks
import test_05_embeddings
from bert import MyBert, mean_pooling
from grading import compare, difference, expect


def test_names(bert, right):
    expected = {
        name.removeprefix("encoder.").replace("pooler.dense", "pooler"): weight
        for name, weight in right.state_dict().items()
    }
    for name, weight in MyBert.from_bert(bert).state_dict().items():
        same = [other for other, each in expected.items() if not difference(weight, each)]
        expect(same, f"{name} is not copied; its part is missing in NAMES.")
        expect(name in same, f"{name} has the weights of {same[0]}; see NAMES.")


def forward(pick, right, embeddings, batch, mask):
    types = pick(batch["token_type_ids"], {"token_type_ids is not passed to the embeddings.": None})
    mask = pick(
        mask,
        {
            "attention_mask is not passed to the blocks, so that tokens attend to padding.": None,
            "The mask of the blocks has 1 and 0; expected an additive one, (B, 1, 1, T), as in chapter 2.": (
                mask == 0
            ).float(),
        },
    )
    states = [embeddings(batch["input_ids"], batch["attention_mask"], types)]
    for block in right.encoder.blocks:
        x = pick(states[-1], {"All blocks get the embeddings; each one gets the result of the one before.": states[0]})
        states.append(block(x, mask))
    place = pick(0, {"The pooler gets the last token; expected the first one.": -1})
    pooled = right.pooler.dense(states[-1][:, place])
    start = pick(0, {"The embeddings are missing; they are the first of the hidden states.": 1})
    return torch.stack(states[start:]), pick(pooled.tanh(), {"The tanh of the pooler is missing.": pooled})


def test_forward(bert, right, data, config):
    for chapter, check, *arguments in (
        (3, test_03_heads.test_forward, config, right, data),
        (4, test_04_blocks.test_layer_norm, -1, right, data),
        (4, test_04_blocks.test_feed_forward, config, right, data),
        (4, test_04_blocks.test_block, "post", config, right, data),
        (5, test_05_embeddings.test_embeddings, config, right, data),
    ):
        try:
            check(*arguments)
        except pytest.fail.Exception as error:
            expect(False, f"A part of chapter {chapter} is wrong. {error} Run the check of that chapter.")
    model, output = MyBert.from_bert(bert), bert(**data.batch, output_hidden_states=True)
    states, pooled = model(**data.batch)
    compare((states, pooled), forward, right, model.embeddings, data.batch, data.mask)
    at_tokens = data.tokens.bool()
    compare(states[:, at_tokens], lambda pick: torch.stack(output.hidden_states)[:, at_tokens])
    gradients = [
        torch.autograd.grad(pooled.sum(), part.embeddings.word_embeddings.weight)[0]
        for part, pooled in ((model, pooled), (bert, output.pooler_output))
    ]
    expect(not difference(*gradients), "The gradients of the word embeddings are not those of BertModel.")


def mean_of_words(pick, states, words, tokens):
    counted = pick(
        words,
        {
            "[CLS] and [SEP] are averaged in; leave out all special tokens.": tokens,
            "Padding is averaged in; leave out all special tokens.": torch.ones_like(words),
            "The mean is over the special tokens; special_tokens_mask is 0 for words.": 1 - words,
        },
    )
    number = pick(
        counted.sum(dim=1, keepdim=True),
        {
            "The sum is divided by the length of the batch; divide by the number of words.": words.shape[1],
            "The sum is not divided by the number of words.": 1,
        },
    )
    return pick(
        (states * counted[:, :, None]).sum(dim=1) / number,
        {"This is the vector of [CLS]; expected the mean over all words.": states[:, 0]},
    )


def test_mean_pooling(data):
    compare(mean_pooling(data.states, data.special), mean_of_words, data.states, 1 - data.special, data.tokens)
