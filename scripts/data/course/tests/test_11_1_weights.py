"""Final project, step 1: your model has the weights and the results of a real BERT."""

import torch
from transformers import BertModel, PreTrainedModel

import project
from grading import difference, expect


def test_weights(source, data):
    model = project.load_bert(source).eval()
    expect(isinstance(model, PreTrainedModel), f"The model is a {type(model)}; expected a PreTrainedModel.")
    for part in model.modules():
        name = type(part).__module__
        expect(
            not name.startswith(("transformers.models", "modeling_scratchbert")),
            f"The model contains {type(part).__name__} of {name}; write the parts of BERT yourself.",
        )
    tokens = data.tokens.bool()
    batch = {"input_ids": data.batch["input_ids"], "attention_mask": data.tokens}
    result = model(**batch).last_hidden_state[tokens]

    def expected(settings, inputs, is_swapped=False):
        bert = BertModel.from_pretrained(source, **settings)
        for attention in [layer.attention.self for layer in bert.encoder.layer if is_swapped]:
            attention.query, attention.key = attention.key, attention.query
        return bert(**{**batch, **inputs}).last_hidden_state[tokens]

    # Mistakes, and the settings and inputs with which BertModel makes them.
    ids = batch["input_ids"]
    mistakes = {
        "GELU is computed with tanh; BERT computes it with erf.": ({"hidden_act": "gelu_pytorch_tanh"}, {}),
        "The activation is ReLU; expected GELU.": ({"hidden_act": "relu"}, {}),
        "The number of heads is not that of config.json.": ({"num_attention_heads": 6}, {}),
        "attention_mask is not used, so tokens attend to padding.": ({}, {"attention_mask": None}),
        "The first position is 1; expected 0.": ({}, {"position_ids": torch.arange(1, 1 + ids.shape[1])[None]}),
        "The token type is 1; expected 0.": ({}, {"token_type_ids": torch.ones_like(ids)}),
        "Queries and keys have each other's weights.": ({}, {}, True),
    }
    problem = difference(result, expected({}, {}))
    for message, mistake in mistakes.items() if problem else ():
        expect(difference(result, expected(*mistake)), message)
    expect(not problem, f"The hidden states are not those of BertModel. {problem}")
