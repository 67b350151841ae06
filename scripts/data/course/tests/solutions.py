"""Solutions of the exercises, and the mistakes that the tests recognise. Write your own solution before you read them.

A mistake is an edit of the solution: a text, what is written in its place, and what is wrong, and what to do.
"""

SOLUTIONS = {
    "attention": """\
import torch
from torch import nn


def attention(query, key, value):
    scores = query.transpose(-2, -1) @ key / query.shape[-2] ** 0.5
    weights = scores.softmax(dim=-1)
    return value @ weights.transpose(-2, -1), weights


def to_linear(matrix):
    linear = nn.Linear(*matrix.shape, bias=False)
    linear.weight = nn.Parameter(matrix.T)
    return linear
""",
    "masks": """\
import torch

LOWEST = torch.finfo(torch.float32).min


def causal_mask(length, window):
    allowed = torch.ones(length, length).tril().bool() & torch.ones(length, length).triu(1 - window).bool()
    return torch.zeros(length, length).masked_fill(~allowed, LOWEST)


def padding_mask(lengths, width):
    hidden = torch.arange(width) < width - lengths[:, None, None, None]
    return torch.zeros(hidden.shape).masked_fill(hidden, LOWEST)


def masked_attention(query, key, value, mask):
    scores = query @ key.transpose(-2, -1) / query.shape[-1] ** 0.5
    weights = (scores + mask).softmax(dim=-1)
    return weights @ value, weights
""",
    "heads": """\
import torch
from torch import nn


class MultiHeadAttention(nn.Module):
    def __init__(self, config):
        super().__init__()
        if config.hidden_size % config.num_attention_heads:
            raise ValueError("the heads do not divide the width")
        self.num_heads = config.num_attention_heads
        self.query = nn.Linear(config.hidden_size, config.hidden_size)
        self.key = nn.Linear(config.hidden_size, config.hidden_size)
        self.value = nn.Linear(config.hidden_size, config.hidden_size)
        self.output = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, x, mask=None, memory=None):
        B, _, C = x.shape
        memory = x if memory is None else memory
        query, key, value = (
            layer(states).view(B, -1, self.num_heads, C // self.num_heads).transpose(1, 2)
            for layer, states in ((self.query, x), (self.key, memory), (self.value, memory))
        )
        scores = query @ key.transpose(-2, -1) / query.shape[-1] ** 0.5
        if mask is not None:
            scores = scores + mask
        weights = scores.softmax(dim=-1)
        context = (weights @ value).transpose(1, 2).reshape(x.shape)
        return self.output(context), weights
""",
    "blocks": """\
import torch
from torch import nn

from heads import MultiHeadAttention


def geglu(x):
    a, b = x.chunk(2, dim=-1)
    return a * (1 + torch.erf(a / 2**0.5)) / 2 * b


class LayerNorm(nn.Module):
    def __init__(self, width, eps, dim=-1):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))
        self.eps, self.dim = eps, dim

    def forward(self, x):
        x = x.transpose(self.dim, -1)
        mean, variance = x.mean(dim=-1, keepdim=True), x.var(dim=-1, correction=0, keepdim=True)
        x = (x - mean) / (variance + self.eps).sqrt() * self.weight + self.bias
        return x.transpose(self.dim, -1)


class FeedForward(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.intermediate = nn.Linear(config.hidden_size, config.intermediate_size)
        self.output = nn.Linear(config.intermediate_size, config.hidden_size)

    def forward(self, x, chunk_size=None):
        pieces = x.split(chunk_size or x.shape[1], dim=1)
        return torch.cat([self.output(nn.functional.gelu(self.intermediate(piece))) for piece in pieces], dim=1)


class Block(nn.Module):
    def __init__(self, config, order="post"):
        super().__init__()
        self.order = order
        self.attention = MultiHeadAttention(config)
        self.attention_norm = LayerNorm(config.hidden_size, config.layer_norm_eps)
        self.feed_forward = FeedForward(config)
        self.feed_forward_norm = LayerNorm(config.hidden_size, config.layer_norm_eps)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(self, x, mask=None):
        if self.order == "parallel":
            attended = self.dropout(self.attention(self.attention_norm(x), mask)[0])
            return x + attended + self.dropout(self.feed_forward(self.feed_forward_norm(x)))
        x = self.attention_norm(x + self.dropout(self.attention(x, mask)[0]))
        return self.feed_forward_norm(x + self.dropout(self.feed_forward(x)))
""",
    "embeddings": """\
import torch
from torch import nn

from blocks import LayerNorm


def sinusoidal_table(length, width):
    position = torch.arange(length)[:, None]
    angle = position / 10_000 ** (torch.arange(0, width, 2) / width)
    return torch.cat([angle.sin(), angle.cos()], dim=1)


class Embeddings(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.word_embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        self.position_embeddings = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        self.token_type_embeddings = nn.Embedding(config.type_vocab_size, config.hidden_size)
        self.norm = LayerNorm(config.hidden_size, config.layer_norm_eps)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(self, input_ids, attention_mask, token_type_ids=None):
        if token_type_ids is None:
            token_type_ids = torch.zeros_like(input_ids)
        positions = (attention_mask.cumsum(dim=1) - 1).clamp(min=0)
        x = self.word_embeddings(input_ids)
        x = x + self.position_embeddings(positions)
        x = x + self.token_type_embeddings(token_type_ids)
        return self.dropout(self.norm(x))
""",
    "bert": """\
import torch
from torch import nn

from blocks import Block
from embeddings import Embeddings

NAMES = {
    "embeddings.word_embeddings": "embeddings.word_embeddings",
    "encoder.layer.{}.attention.self.query": "blocks.{}.attention.query",
    "embeddings.position_embeddings": "embeddings.position_embeddings",
    "embeddings.token_type_embeddings": "embeddings.token_type_embeddings",
    "embeddings.LayerNorm": "embeddings.norm",
    "encoder.layer.{}.attention.self.key": "blocks.{}.attention.key",
    "encoder.layer.{}.attention.self.value": "blocks.{}.attention.value",
    "encoder.layer.{}.attention.output.dense": "blocks.{}.attention.output",
    "encoder.layer.{}.attention.output.LayerNorm": "blocks.{}.attention_norm",
    "encoder.layer.{}.output.LayerNorm": "blocks.{}.feed_forward_norm",
    "encoder.layer.{}.intermediate.dense": "blocks.{}.feed_forward.intermediate",
    "encoder.layer.{}.output.dense": "blocks.{}.feed_forward.output",
    "pooler.dense": "pooler",
}


class MyBert(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.embeddings = Embeddings(config)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_hidden_layers))
        self.pooler = nn.Linear(config.hidden_size, config.hidden_size)

    @classmethod
    def from_bert(cls, bert):
        model = cls(bert.config)
        for number in range(bert.config.num_hidden_layers):
            for theirs, ours in NAMES.items():
                source, target = bert.get_submodule(theirs.format(number)), model.get_submodule(ours.format(number))
                target.load_state_dict(source.state_dict())
        return model.eval()

    def forward(self, input_ids, attention_mask, token_type_ids=None):
        mask = torch.zeros(attention_mask.shape).masked_fill(attention_mask == 0, torch.finfo(torch.float32).min)
        states = [self.embeddings(input_ids, attention_mask, token_type_ids)]
        for block in self.blocks:
            states.append(block(states[-1], mask[:, None, None]))
        return torch.stack(states), self.pooler(states[-1][:, 0]).tanh()


def mean_pooling(states, special_tokens_mask):
    words = 1 - special_tokens_mask[:, :, None]
    return (states * words).sum(dim=1) / words.sum(dim=1)
""",
    "pretraining": """\
import torch
from torch import nn


def mask_tokens(input_ids, special, mask_id, vocab_size):
    inputs, labels = input_ids.clone(), torch.full_like(input_ids, -100)
    for row in range(len(input_ids)):
        places = (~special[row]).nonzero().flatten()
        places = places[torch.randperm(len(places))][: round(0.15 * len(places))]
        labels[row, places] = input_ids[row, places]
        lottery = torch.rand(len(places))
        inputs[row, places[lottery < 0.8]] = mask_id
        replaced = places[lottery >= 0.9]
        inputs[row, replaced] = torch.randint(vocab_size, (len(replaced),))
    return inputs, labels


class MaskedLMHead(nn.Module):
    def __init__(self, config, word_embeddings):
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.decoder = nn.Linear(config.hidden_size, config.vocab_size)
        self.decoder.weight = word_embeddings.weight

    def forward(self, states, labels):
        return self.decoder(self.norm(nn.functional.gelu(self.dense(states[labels != -100]))))


def masked_lm_loss(logits, labels):
    return nn.functional.cross_entropy(logits.transpose(0, 1).flatten(0, 1), labels.flatten())
""",
    "finetuning": """\
import torch
from torch import nn


def freeze(model, num_trained):
    model.requires_grad_(False)
    blocks = model.model.encoder.blocks
    for part in (model.model.pooler, model.classifier, *blocks[len(blocks) - num_trained :]):
        part.requires_grad_(True)


def parameter_groups(model, weight_decay):
    tables = set(model.model.embeddings.parameters())
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    matrices = [each for each in trained if each.ndim == 2 and each not in tables]
    others = [each for each in trained if each.ndim < 2 or each in tables]
    return [{"params": matrices, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]


def balanced_accuracy(model, batches):
    right, total = [0, 0], [0, 0]
    was_training = model.training
    model.eval()
    with torch.no_grad():
        for batch in batches:
            predictions = model(**batch).logits.argmax(dim=-1)
            for label, prediction in zip(batch["labels"], predictions):
                right[label] += int(label == prediction)
                total[label] += 1
    model.train(was_training)
    return (right[0] / total[0] + right[1] / total[1]) / 2
""",
    "seq2seq": """\
import torch
from torch import nn


def shift_right(labels, start_id, pad_id):
    start = torch.full_like(labels[:, :1], start_id)
    shifted = torch.cat([start, labels[:, :-1]], dim=1)
    return shifted.masked_fill(shifted == -100, pad_id), (shifted != -100).long()


def sequence_losses(logits, labels):
    losses = nn.functional.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
    return losses.sum(dim=1) / (labels != -100).sum(dim=1)


def greedy(model, input_ids, attention_mask, max_new_tokens):
    ids = torch.full((len(input_ids), 1), model.config.decoder_start_token_id)
    ended = torch.zeros(len(ids), dtype=torch.bool)
    for _ in range(max_new_tokens):
        logits = model(input_ids=input_ids, attention_mask=attention_mask, decoder_input_ids=ids).logits
        token = logits[:, -1].argmax(dim=-1)
        token[ended] = model.config.pad_token_id
        ids = torch.cat([ids, token[:, None]], dim=1)
        ended = ended | (token == model.config.eos_token_id)
        if ended.all():
            break
    return ids
""",
    "speed": """\
import torch
from torch import nn


def unpad(x, attention_mask):
    lengths, tokens = attention_mask.sum(dim=1), attention_mask.bool()
    cu_seqlens = torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(dim=0)])
    return x[tokens][None], cu_seqlens, torch.arange(x.shape[1]).expand(tokens.shape)[tokens][None]


def pad(x, cu_seqlens):
    lengths = cu_seqlens.diff()
    padded = x.new_zeros(len(lengths), int(lengths.max()), x.shape[-1])
    for row, length in enumerate(lengths):
        padded[row, :length] = x[0, cu_seqlens[row] : cu_seqlens[row + 1]]
    return padded


def int8_linear(x, linear):
    s = x.abs().amax(dim=-1, keepdim=True) / 127
    q = (x / s).round().int()
    m = linear.weight.amin(dim=1)
    t = (linear.weight.amax(dim=1) - m) / 255
    v = ((linear.weight - m[:, None]) / t[:, None]).round().int()
    return s * (q @ v.T) * t + s * q.sum(dim=-1, keepdim=True) * m + linear.bias
""",
}

MISTAKES = {
    "attention": [
        (
            " / query.shape[-2] ** 0.5",
            "",
            "The scores are not divided by √d; divide them by the square root of the width of a query.",
        ),
        (
            "query.shape[-2] ** 0.5",
            "query.shape[-2]",
            "The scores are divided by d; divide them by √d, the square root of the width of a query.",
        ),
        (
            "scores.softmax(dim=-1)",
            "scores / scores.sum(dim=-1, keepdim=True)",
            "The scores are divided by their sum; use the softmax, whose weights are never negative.",
        ),
        (
            "scores.softmax(dim=-1)",
            "scores.softmax(dim=-2)",
            "The softmax is over the queries; compute it over the keys, the last dimension (dim=-1).",
        ),
        (
            "scores.softmax(dim=-1)",
            "scores.softmax(dim=1)",
            "The softmax is over the wrong dimension; compute it over the keys, the last dimension (dim=-1).",
        ),
        (
            "value @ weights.transpose(-2, -1)",
            "weights @ value.transpose(-2, -1)",
            "The words of the result are rows; expected columns, (..., E, T).",
        ),
        ("bias=False", "bias=True", "The layer has a bias; pass bias=False."),
        (
            "nn.Parameter(matrix.T)",
            "nn.Parameter(matrix)",
            "The matrix is not transposed; nn.Linear stores the transpose, `(D, C)`, and computes x @ weight.T.",
        ),
    ],
    "masks": [
        ("~allowed", "~allowed.T", "The mask is transposed: earlier positions attend to later ones. A row is a query."),
        ("~allowed", "allowed", "The mask is inverted; 0 is where a query may attend to a key."),
        (".tril()", ".tril(-1)", "A position does not attend to itself; it may."),
        (
            "torch.zeros(length, length).masked_fill(~allowed, LOWEST)",
            "allowed.float()",
            "The mask has 1 where a query may attend to a key, and 0 elsewhere, which hides nothing; expected 0 and LOWEST.",
        ),
        (
            ".triu(1 - window)",
            ".triu(-window)",
            "The window is too large by one; the position itself is one of its positions.",
        ),
        (".triu(1 - window)", "", "The window is not used; hide the keys that are further back."),
        ("< width - lengths", ">= width - lengths", "The mask is inverted; 0 is where a query may attend to a key."),
        (
            "torch.arange(width) < width - lengths",
            "torch.arange(width) >= lengths",
            "The mask hides padding on the right; the tokens are the last ones of each row.",
        ),
        (
            ".masked_fill(hidden, LOWEST)",
            ".masked_fill(hidden, LOWEST).mT",
            "The mask hides queries; padding must be hidden as keys, in the last dimension.",
        ),
        (
            "torch.zeros(hidden.shape).masked_fill(hidden, LOWEST)",
            "1.0 - hidden.float()",
            "The mask has 1 where a query may attend to a key, and 0 elsewhere, which hides nothing; expected 0 and LOWEST.",
        ),
        (
            "(scores + mask).softmax(dim=-1)",
            "scores.softmax(dim=-1) + mask",
            "The mask is added after the softmax, so hidden keys still take their share of the weights; add it to the scores.",
        ),
        (
            "(scores + mask).softmax(dim=-1)",
            "scores.softmax(dim=-1) * (mask == 0)",
            "The weights of hidden keys are set to zero after the softmax, so the others no longer sum to 1; add the mask to the scores.",
        ),
        ("(scores + mask)", "(scores - mask)", "The mask is subtracted, so that it hides the wrong keys; add it."),
        ("(scores + mask)", "scores", "The mask is not used; add it to the scores, before the softmax."),
        (
            "(scores + mask).softmax(dim=-1)",
            "(scores + mask).softmax(dim=-2)",
            "The softmax is over the queries; compute it over the keys, the last dimension (dim=-1).",
        ),
        (
            "(scores + mask)",
            "scores.masked_fill(mask < 0, -torch.inf)",
            "Hidden keys have minus infinity, so that a query without keys gets NaN; add the mask as it is.",
        ),
        (
            "query.shape[-1] ** 0.5",
            "1",
            "The scores are not divided by √d; divide them by the square root of the width of a query.",
        ),
    ],
    "heads": [
        (
            "view(B, -1, self.num_heads, C // self.num_heads).transpose(1, 2)",
            "view(B, self.num_heads, -1, C // self.num_heads)",
            "The heads are split without a transpose, which mixes the tokens; view as (B, T, H, D), and then transpose(1, 2).",
        ),
        (
            "view(B, -1, self.num_heads, C // self.num_heads).transpose(1, 2)",
            "view(B, states.shape[1], -1, self.num_heads).permute(0, 3, 1, 2)",
            "The width is viewed as (D, H), so that the numbers of a head are not next to each other; view it as (H, D).",
        ),
        (
            "(weights @ value).transpose(1, 2)",
            "(weights @ value)",
            "The heads are joined without a transpose, which mixes the tokens; transpose(1, 2), and then reshape to (B, T, C).",
        ),
        (
            "query.shape[-1] ** 0.5",
            "C**0.5",
            "The scores are divided by √C; divide them by √D, where D is the width of one head.",
        ),
        (
            "query.shape[-1] ** 0.5",
            "1",
            "The scores are not divided by √d; divide them by the square root of the width of a query.",
        ),
        (
            "query.shape[-1] ** 0.5",
            "query.shape[-1]",
            "The scores are divided by d; divide them by √d, the square root of the width of a query.",
        ),
        (
            "self.output(context)",
            "context",
            "The output matrix is not applied; return self.output(...) of the joined heads.",
        ),
        (
            "memory = x if memory is None else memory",
            "memory = x",
            "Keys and values are made of x; expected those of memory.",
        ),
        ("scores = scores + mask", "pass", "The mask is not used; add it to the scores, before the softmax."),
        (
            "scores = scores + mask",
            "scores = scores - mask",
            "The mask is subtracted, so that it hides the wrong keys; add it.",
        ),
        (
            "scores.softmax(dim=-1)",
            "scores.softmax(dim=-2)",
            "The softmax is over the queries; compute it over the keys, the last dimension (dim=-1).",
        ),
        (
            "scores.softmax(dim=-1)",
            "scores.softmax(dim=1)",
            "The softmax is over the wrong dimension; compute it over the keys, the last dimension (dim=-1).",
        ),
        (
            "scores.softmax(dim=-1)",
            "scores / scores.sum(dim=-1, keepdim=True)",
            "The scores are divided by their sum; use the softmax, whose weights are never negative.",
        ),
    ],
    "blocks": [
        ("self.dropout(", "(", "There is no dropout in training; apply self.dropout to the result of each part."),
        (
            "x + self.dropout(self.feed_forward(x))",
            "self.dropout(x + self.feed_forward(x))",
            "Dropout is in the wrong place; apply self.dropout to the result of each part, before the residual sum.",
        ),
        (
            "self.dropout(self.feed_forward(self.feed_forward_norm(x)))",
            "self.feed_forward(self.feed_forward_norm(x))",
            "Dropout is in the wrong place; apply self.dropout to the result of each part, before the residual sum.",
        ),
        (
            "a * (1 + torch.erf(a / 2**0.5)) / 2",
            "nn.functional.gelu(a, approximate='tanh')",
            "This is the tanh approximation of GELU; BertModel computes it with erf.",
        ),
        (
            "a * (1 + torch.erf(a / 2**0.5)) / 2",
            "a * (1.702 * a).sigmoid()",
            "This is x · sigmoid(1.702 x), an approximation; BERT computes GELU with erf.",
        ),
        ("a / 2**0.5", "a", "The argument of erf is x; expected x / √2."),
        ("return a * (1", "return (1", "This is Φ(x); expected x · Φ(x)."),
        ("a * (1 + torch.erf(a / 2**0.5)) / 2", "a.relu()", "This is ReLU."),
        ("a, b = ", "b, a = ", "The halves are swapped; GELU is applied to the first one."),
        (" / 2 * b", " / 2", "The second half is not used; multiply by it."),
        ("correction=0", "correction=1", "The variance is divided by n - 1; divide by n (var(..., correction=0))."),
        (
            "(variance + self.eps).sqrt()",
            "(variance + self.eps)",
            "The numbers are divided by the variance; divide by its square root.",
        ),
        ("(variance + self.eps)", "variance", "eps is not used; add it to the variance."),
        (
            "(variance + self.eps).sqrt()",
            "(variance.sqrt() + self.eps)",
            "eps is added to the standard deviation; add it to the variance, before the square root.",
        ),
        (" * self.weight + self.bias", "", "weight and bias are not applied."),
        ("(x - mean)", "x", "The mean is not subtracted."),
        (
            "x.mean(dim=-1, keepdim=True), x.var(dim=-1,",
            "x.mean(dim=-2, keepdim=True), x.var(dim=-2,",
            "The mean and the variance are over the tokens; compute them over the dimension dim.",
        ),
        (
            "nn.functional.gelu(self.intermediate(piece))",
            "self.intermediate(piece)",
            "GELU is missing between the two linear layers.",
        ),
        (
            "nn.functional.gelu(self.intermediate(piece))",
            "self.intermediate(piece).relu()",
            "The activation is ReLU; expected GELU.",
        ),
        (
            "self.output(nn.functional.gelu(self.intermediate(piece)))",
            "nn.functional.gelu(self.output(nn.functional.gelu(self.intermediate(piece))))",
            "GELU is applied after the second linear layer as well.",
        ),
        (
            "self.output(nn.functional.gelu(self.intermediate(piece)))",
            "piece + self.output(nn.functional.gelu(self.intermediate(piece)))",
            "The input is added to the result; the residual sum is part of the block.",
        ),
        (
            'self.order == "parallel"',
            "False",
            "The order is post, where order is parallel; there, each norm comes before its part.",
        ),
        (
            'self.order == "parallel"',
            "True",
            "The order is parallel, where order is post; there, each norm comes after a residual sum.",
        ),
        (
            "return x + attended + self.dropout(",
            "x = x + attended\n            return x + self.dropout(",
            "The parts run one after the other; where order is parallel, both of them get x.",
        ),
        (
            "self.attention_norm(x + self.dropout(self.attention(x, mask)[0]))\n        return self.feed_forward_norm(x + self.dropout(self.feed_forward(x)))",
            "x + self.dropout(self.attention(self.attention_norm(x), mask)[0])\n        return x + self.dropout(self.feed_forward(self.feed_forward_norm(x)))",
            "The norms come before the parts (pre-norm), where order is post; see the formulas.",
        ),
        (
            "self.attention_norm(x + self.dropout(self.attention(x, mask)[0]))\n        return self.feed_forward_norm(x + self.dropout(self.feed_forward(x)))",
            "x + self.attention_norm(self.dropout(self.attention(x, mask)[0]))\n        return x + self.feed_forward_norm(self.dropout(self.feed_forward(x)))",
            "The norm is applied to the result of each part, before the residual sum; see the formulas.",
        ),
        ("x = self.attention_norm(x + ", "x = self.attention_norm(", "The residual sum of attention is missing."),
        (
            "return self.feed_forward_norm(x + ",
            "return self.feed_forward_norm(",
            "The residual sum of feed_forward is missing.",
        ),
        ("x + attended", "attended", "The residual sum is missing, where order is parallel; add x."),
        ("x = self.attention_norm(x + self", "x = (x + self", "attention_norm is missing."),
        ("return self.feed_forward_norm(x + self", "return (x + self", "feed_forward_norm is missing."),
        (
            "self.attention(self.attention_norm(x), mask)",
            "self.attention(x, mask)",
            "attention_norm is missing, where order is parallel.",
        ),
        (
            "self.feed_forward(self.feed_forward_norm(x))",
            "self.feed_forward(x)",
            "feed_forward_norm is missing, where order is parallel.",
        ),
        (
            "(x + self.dropout(self.attention(x, mask)[0]))\n        return self.feed_forward_norm",
            "(x + self.dropout(self.attention(x, mask)[0])) if False else self.feed_forward_norm(x + self.dropout(self.attention(x, mask)[0]))\n        return self.attention_norm",
            "The two norms are swapped.",
        ),
        ("self.attention(x, mask)", "self.attention(x)", "The mask is not passed to the attention."),
        (
            "self.attention(self.attention_norm(x), mask)",
            "self.attention(self.attention_norm(x))",
            "The mask is not passed to the attention.",
        ),
    ],
    "embeddings": [
        (
            "torch.cat([angle.sin(), angle.cos()], dim=1)",
            "torch.stack([angle.sin(), angle.cos()], dim=-1).flatten(1)",
            "Sines and cosines alternate; expected them side by side, all sines in the left half.",
        ),
        (
            "angle.sin(), angle.cos()",
            "angle.cos(), angle.sin()",
            "Sines and cosines are swapped; the left half has the sines.",
        ),
        ("torch.arange(0, width, 2)", "torch.arange(width // 2)", "The exponent is i / width; expected 2i / width."),
        ("torch.arange(length)", "torch.arange(1, length + 1)", "The first position is 1; expected 0."),
        (
            "(attention_mask.cumsum(dim=1) - 1).clamp(min=0)",
            "torch.arange(input_ids.shape[1])",
            "The positions count padding on the left; the first token of each row has position 0.",
        ),
        (
            "(attention_mask.cumsum(dim=1) - 1).clamp(min=0)",
            "attention_mask.cumsum(dim=1)",
            "The first position is 1; expected 0.",
        ),
        (
            "x = x + self.position_embeddings(positions)",
            "pass",
            "The positions are forgotten: add position_embeddings of 0, 1, 2, …",
        ),
        (
            "torch.zeros_like(input_ids)",
            "torch.ones_like(input_ids)",
            "The token type is 1 where token_type_ids is None; expected 0.",
        ),
        (
            "x = x + self.token_type_embeddings(token_type_ids)",
            "pass",
            "The token types are forgotten: add token_type_embeddings, also of type 0.",
        ),
        ("self.norm(x)", "x", "The layer norm is forgotten."),
        ("self.dropout(", "(", "There is no dropout in training; apply self.dropout to the result."),
    ],
    "bert": [
        ("attention_mask, token_type_ids)]", "attention_mask)]", "token_type_ids is not passed to the embeddings."),
        (
            "mask[:, None, None]",
            "None",
            "attention_mask is not passed to the blocks, so that tokens attend to padding.",
        ),
        (
            "mask[:, None, None]",
            "attention_mask[:, None, None]",
            "The mask of the blocks has 1 and 0; expected an additive one, (B, 1, 1, T), as in chapter 2.",
        ),
        (
            "block(states[-1]",
            "block(states[0]",
            "All blocks get the embeddings; each one gets the result of the one before.",
        ),
        (
            "torch.stack(states)",
            "torch.stack(states[1:])",
            "The embeddings are missing; they are the first of the hidden states.",
        ),
        ("states[-1][:, 0]", "states[-1][:, -1]", "The pooler gets the last token; expected the first one."),
        (".tanh()", "", "The tanh of the pooler is missing."),
        (
            "(states * words).sum(dim=1) / words.sum(dim=1)",
            "states.mean(dim=1)",
            "Padding is averaged in; leave out all special tokens.",
        ),
        (
            "words.sum(dim=1)",
            "words.shape[1]",
            "The sum is divided by the length of the batch; divide by the number of words.",
        ),
        (" / words.sum(dim=1)", "", "The sum is not divided by the number of words."),
        (
            "1 - special_tokens_mask",
            "special_tokens_mask",
            "The mean is over the special tokens; special_tokens_mask is 0 for words.",
        ),
        (
            "(states * words).sum(dim=1) / words.sum(dim=1)",
            "states[:, 0]",
            "This is the vector of [CLS]; expected the mean over all words.",
        ),
    ],
    "pretraining": [
        ("self.dense(states[labels != -100])", "states[labels != -100]", "The first linear layer is missing."),
        (
            "nn.functional.gelu(self.dense(states[labels != -100]))",
            "self.dense(states[labels != -100])",
            "GELU is missing.",
        ),
        (
            "self.norm(nn.functional.gelu(self.dense(states[labels != -100])))",
            "nn.functional.gelu(self.dense(states[labels != -100]))",
            "The layer norm is missing.",
        ),
        (
            "states[labels != -100]",
            "states",
            "The logits of all tokens are computed; expected (N, vocab_size), those of the labelled tokens.",
        ),
        (
            "logits.transpose(0, 1).flatten(0, 1), labels.flatten()",
            "logits.transpose(0, 1)[:, :-1].flatten(0, 1), labels[:, 1:].flatten()",
            "The labels are shifted; the label of a position is for the logits at the same position.",
        ),
        (
            "logits.transpose(0, 1).flatten(0, 1), labels.flatten()",
            "logits.flatten(0, 1), labels.flatten()",
            "logits is (T, B, V) and labels is (B, T), so the logits are those of other labels; transpose one of them.",
        ),
        (
            "labels.flatten())",
            "labels.flatten().clamp(min=0))",
            "Labels of -100 count as the token 0; leave them out (ignore_index=-100).",
        ),
        (
            "labels.flatten())",
            "labels.flatten(), reduction='sum')",
            "The loss is summed; expected the mean over the labels that are not -100.",
        ),
    ],
    "finetuning": [
        (
            "(right[0] / total[0] + right[1] / total[1]) / 2",
            "sum(right) / sum(total)",
            "This is the plain accuracy; expected the mean over the two classes.",
        ),
        (
            '            for label, prediction in zip(batch["labels"], predictions):\n                right[label] += int(label == prediction)\n                total[label] += 1\n    model.train(was_training)\n    return (right[0] / total[0] + right[1] / total[1]) / 2',
            '            right[0] += (predictions == batch["labels"]).float().mean().item()\n            total[0] += 1\n    model.train(was_training)\n    return right[0] / total[0]',
            "The accuracies of the batches are averaged; count the right texts of all batches.",
        ),
        (
            "(right[0] / total[0] + right[1] / total[1]) / 2",
            "sum(right)",
            "The number of right texts is not divided by the number of texts.",
        ),
        ("label == prediction", "label != prediction", "This is the share of wrong texts."),
    ],
    "seq2seq": [
        (
            "shifted.masked_fill(shifted == -100, pad_id), ",
            "shifted, ",
            "-100 is left in the inputs of the decoder, which is no id; replace it by pad_id.",
        ),
        (
            "torch.cat([start, labels[:, :-1]], dim=1)",
            "labels",
            "The labels are not shifted, so that each position sees its own label.",
        ),
        (
            "torch.cat([start, labels[:, :-1]], dim=1)",
            "torch.cat([labels[:, 1:], 0 * start], dim=1)",
            "The labels are shifted to the left; put the start token before them.",
        ),
        (
            "torch.cat([start, labels[:, :-1]], dim=1)",
            "torch.cat([start, labels], dim=1)",
            "The last label is not removed; the inputs are as long as the labels.",
        ),
        (
            "torch.full_like(labels[:, :1], start_id)",
            "torch.full_like(labels[:, :1], pad_id)",
            "The inputs begin with pad_id; expected start_id.",
        ),
        (
            "(shifted != -100)",
            "(labels != -100)",
            "The attention mask is that of the labels; expected that of the inputs.",
        ),
        (
            "logits.transpose(1, 2), labels,",
            "logits[:, :-1].transpose(1, 2), labels[:, 1:],",
            "The labels are shifted a second time; the logits at position t are for label t.",
        ),
        (
            "labels, reduction",
            "labels.clamp(min=0), reduction",
            "Labels of -100 count as the token 0; leave them out (ignore_index=-100).",
        ),
        (
            "losses.sum(dim=1) / (labels != -100).sum(dim=1)",
            "losses.sum() / (labels != -100).sum()",
            "This is the mean over all labels; expected one number for each sequence.",
        ),
        (
            "losses.sum(dim=1) / (labels != -100).sum(dim=1)",
            "losses.mean(dim=1)",
            "The losses are divided by T; divide those of a sequence by the number of its labels.",
        ),
        (
            "losses.sum(dim=1) / (labels != -100).sum(dim=1)",
            "losses.sum(dim=1)",
            "The loss is summed; expected the mean over the labels that are not -100.",
        ),
        ("return ids", "return ids[:, 1:]", "The start token is missing in the result; `generate` returns it."),
        (
            "return ids",
            "return ids[:, :-1]",
            "The last token is missing; the end token, or the last of max_new_tokens, is part of the result.",
        ),
        (
            "token[ended] = model.config.pad_token_id",
            "pass",
            "A row goes on after the end token; append pad_token_id to a row that has its end token.",
        ),
        (
            "logits[:, -1]",
            "logits[:, 0]",
            "The logits of the first position are used; those of the last one are for the next token.",
        ),
        (
            "decoder_input_ids=ids)",
            "decoder_input_ids=ids[:, -1:])",
            "The decoder gets the last token only; without a cache, it needs all tokens so far.",
        ),
        (
            "attention_mask=attention_mask, ",
            "",
            "attention_mask is not passed to the model, so that it attends to padding.",
        ),
    ],
    "speed": [
        (
            "x[tokens][None]",
            "x.reshape(1, -1, x.shape[-1])",
            "The padding is kept; select the tokens with attention_mask 1.",
        ),
        (
            "torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(dim=0)])",
            "lengths",
            "cu_seqlens has the lengths; expected where each sequence begins, and N: the cumulative sums, from 0 on.",
        ),
        (
            "torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(dim=0)])",
            "lengths.cumsum(dim=0)",
            "cu_seqlens does not begin with 0.",
        ),
        (
            "lengths.cumsum(dim=0)])",
            "lengths.cumsum(dim=0)[:-1]])",
            "cu_seqlens does not end with the number of tokens.",
        ),
        (
            "torch.arange(x.shape[1]).expand(tokens.shape)[tokens]",
            "torch.arange(int(tokens.sum()))",
            "The positions go on from one sequence to the next; they restart at 0.",
        ),
        (
            "padded[row, :length]",
            "padded[row, padded.shape[1] - length :]",
            "The padding is on the wrong side; the tokens of a sequence come first.",
        ),
        (
            "return s * (q @ v.T) * t + s * q.sum(dim=-1, keepdim=True) * m + linear.bias",
            "return linear(x)",
            "Nothing is rounded: this is the result of the layer itself.",
        ),
        (
            "x.abs().amax(dim=-1, keepdim=True)",
            "x.abs().max()",
            "There is one s for all of x; compute it for each row, over the last dimension.",
        ),
        (
            "m = linear.weight.amin(dim=1)",
            "m = linear.weight.min().expand(len(linear.weight))",
            "There is one m for the whole weight; compute it for each row.",
        ),
        (
            "(linear.weight.amax(dim=1) - m) / 255",
            "(linear.weight.max() - linear.weight.min()).expand(len(m)) / 255",
            "There is one scale for the whole weight; compute t for each row.",
        ),
        (
            "(q @ v.T)",
            "(q.to(torch.int8) @ v.to(torch.int8).T)",
            "The product overflows: multiply int32 or float64 numbers, not int8.",
        ),
        (".round().int()", ".int()", "The numbers are truncated; round them."),
        (
            " + s * q.sum(dim=-1, keepdim=True) * m",
            "",
            "m is forgotten: w ≈ t · v + m, so s times the sum of q times m is part of the product.",
        ),
        (" + linear.bias", "", "The bias is forgotten."),
    ],
}
