"""Final project, step 1: your model has the weights and the results of a real BERT."""

import torch
from transformers import BertModel

from grading import compare, expect
from project import load_bert


def hidden_states(pick, source, batch):
    """The last hidden states of the tokens, as BertModel computes them."""
    settings = pick(
        {},
        {
            "GELU is computed with tanh; BERT computes it with erf.": {"hidden_act": "gelu_pytorch_tanh"},
            "The activation is ReLU; expected GELU.": {"hidden_act": "relu"},
            "The number of heads is not that of config.json.": {"num_attention_heads": 6},
        },
    )
    bert = BertModel.from_pretrained(source, **settings)
    for attention in [layer.attention.self for layer in bert.encoder.layer]:
        parts = attention.query, attention.key
        attention.query, attention.key = pick(parts, {"Queries and keys have each other's weights.": parts[::-1]})
    ids, mask = batch["input_ids"], batch["attention_mask"]
    given = pick(mask, {"attention_mask is not used, so tokens attend to padding.": None})
    positions = pick(0, {"The first position is 1; expected 0.": 1}) + torch.arange(ids.shape[1])[None]
    types = torch.full_like(ids, pick(0, {"The token type is 1; expected 0.": 1}))
    return bert(ids, given, types, positions).last_hidden_state[mask.bool()]


def test_weights(source, data):
    model = load_bert(source).eval()
    for part in model.modules():
        name = type(part).__module__
        expect(
            not name.startswith(("transformers.models", "modeling_scratchbert")),
            f"The model contains {type(part).__name__} of {name}; write the parts of BERT yourself.",
        )
    batch = {name: data.batch[name] for name in ("input_ids", "attention_mask")}
    result = model(**batch).last_hidden_state[data.tokens.bool()]
    compare(result, hidden_states, source, batch)
