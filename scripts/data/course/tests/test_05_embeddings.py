"""Chapter 5: embeddings."""

from embeddings import Embeddings
from grading import check, check_evaluation, loaded


def test_sinusoidal_table():
    check("embeddings.sinusoidal_table", 40, 16)


def test_embeddings(config, right, data):
    def make(embeddings):
        return loaded(embeddings(config), right.embeddings)

    def run(embeddings, ids, tokens, *types):
        return make(embeddings)(ids, tokens, *types)[tokens.bool()]

    ids, tokens, types = data.batch["input_ids"], data.tokens, data.batch["token_type_ids"]
    check_evaluation(make(Embeddings), ids, tokens, types)
    for inputs in ((ids, tokens, types), (ids, tokens), (ids.flip(1), tokens.flip(1), types)):
        check("embeddings.Embeddings", *inputs, run=run)
    check("embeddings.Embeddings", ids, tokens, run=lambda embeddings, *inputs: make(embeddings).train()(*inputs))
