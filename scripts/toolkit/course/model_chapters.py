"""The checks of chapters 1 to 6: attention, masks, heads, blocks, embeddings and the whole model."""

import copy
import sys
from functools import partial
from types import ModuleType
from unittest import mock

import torch
from torch import nn

from modeling_scratchbert import ScratchBertConfig
from modeling_scratchbert.embeddings import sinusoidal_table
from toolkit.compare import parity
from toolkit.course.grading import GapError, MistakeError, Weights, agree, compare, filled

LOWEST = torch.finfo(torch.float32).min

# What is wrong in attention, and what to do: keyword arguments of `attention`.
ATTENTION_MISTAKES = {
    "The scores are not divided by √d; divide them by the square root of the width of a query.": {"width": 1},
    "The scores are divided by d; divide them by √d, the square root of the width of a query.": {"power": 1.0},
    "The scores are divided by their sum; use the softmax, whose weights are never negative.": {"is_softmax": False},
    "The softmax is over the queries; compute it over the keys, the last dimension (dim=-1).": {"dim": -2},
    "The softmax is over the wrong dimension; compute it over the keys, the last dimension (dim=-1).": {"dim": 1},
}
MASK_MISTAKES = ATTENTION_MISTAKES | {
    "The mask is added after the softmax, so hidden keys still take their share of the weights; add it to the scores, "
    "before the softmax.": {"place": "after"},
    "The weights of hidden keys are set to zero after the softmax, so the others no longer sum to 1; add the mask to "
    "the scores, before the softmax.": {"place": "multiplied"},
    "The mask is not used; add it to the scores, before the softmax.": {"place": "nowhere"},
    "The mask is subtracted, so that it hides the wrong keys; add it.": {"place": "subtracted"},
}


def attention(query, key, value, mask=None, *, width=None, power=0.5, dim=-1, place="before", is_softmax=True):
    """Scaled dot-product attention, with options for what can go wrong."""
    scores = query @ key.transpose(-2, -1) / (width or query.shape[-1]) ** power
    mask = torch.zeros(()) if mask is None or place == "nowhere" else mask
    if place == "before":
        scores = scores + mask
    elif place == "subtracted":
        scores = scores - mask
    elif place == "infinite":
        scores = scores.masked_fill(mask < 0, -torch.inf)
    weights = scores.softmax(dim) if is_softmax else scores / scores.sum(dim, keepdim=True)
    if place == "after":
        weights = weights + mask
    elif place == "multiplied":
        weights = weights * (mask == 0)
    return weights @ value, weights


# ------------------------------------------------------------------------------------------------- 1 and 2: attention


def check_attention(module: ModuleType, weights: Weights) -> None:
    query, key, value = weights.heads
    query, value = query[:, :, :5], value[..., :7]  # T, S, D and E all differ
    compare(module.attention(query, key, value), partial(attention, query, key, value), ATTENTION_MISTAKES)
    query, key, value = query[0, 0], key[0, 0], value[0, 0]
    compare(module.attention(query, key, value), partial(attention, query, key, value), {})


def check_to_linear(module: ModuleType, weights: Weights) -> None:
    matrix, x = weights.bert.encoder.layer[0].intermediate.dense.weight.detach().T, weights.states
    for each in (matrix, matrix[:, : len(matrix)]):  # a square one, too
        linear = filled(module.to_linear(each))
        if not isinstance(linear, nn.Linear):
            raise MistakeError(f"the result is a {type(linear).__name__}; expected an nn.Linear.")
        if linear.bias is not None:
            raise MistakeError("The layer has a bias; pass bias=False.")
        if linear.weight.shape == each.shape != each.T.shape or agree(linear.weight, each):
            raise MistakeError(
                "The matrix is not transposed; nn.Linear stores the transpose, `(D, C)`, and computes x @ weight.T."
            )
        compare(linear(x), lambda each=each: x @ each, {})


def check_causal_mask(module: ModuleType, weights: Weights) -> None:
    def reference(allowed=torch.tril, hidden=LOWEST, flipped=False):
        may_attend = allowed(torch.ones(5, 5)).bool() != flipped
        return torch.zeros(5, 5).masked_fill(~may_attend, hidden) if hidden else may_attend.float()

    compare(
        hidden_as_lowest(module.causal_mask(5)),
        reference,
        {
            "The mask is transposed: earlier positions attend to later ones. A row is a query; hide the keys "
            "after it.": {"allowed": torch.triu},
            "The mask is inverted; 0 is where a query may attend to a key.": {"flipped": True},
            "The mask has 1 where a query may attend to a key, which the softmax takes for a "
            "score; expected 0 there, and "
            "LOWEST elsewhere.": {"hidden": None},
            "A position does not attend to itself; it may.": {"allowed": partial(torch.tril, diagonal=-1)},
        },
    )


def check_padding_mask(module: ModuleType, weights: Weights) -> None:
    tokens = weights.batch["attention_mask"]

    def reference(inverted=False, added=False, of_queries=False):
        mask = tokens.float() if added else torch.zeros(tokens.shape).masked_fill((tokens == 0) != inverted, LOWEST)
        return mask[:, None, :, None] if of_queries else mask[:, None, None, :]

    compare(
        hidden_as_lowest(module.padding_mask(tokens)),
        reference,
        {
            "The mask is inverted: it hides the tokens, and not the padding.": {"inverted": True},
            "1 and 0 are added to the scores, which hides nothing; expected 0 for a token and LOWEST for padding.": {
                "added": True
            },
            "The mask hides queries; padding must be hidden as keys, in the last dimension.": {"of_queries": True},
        },
    )


def hidden_as_lowest(mask):
    """A mask with `LOWEST` for each number that hides a key as well: those from -10,000 down."""
    is_additive = isinstance(mask, torch.Tensor) and mask.dtype != torch.bool
    return mask.masked_fill(mask <= -10_000, LOWEST) if is_additive else mask


def check_masked_attention(module: ModuleType, weights: Weights) -> None:
    causal = torch.triu(torch.full((weights.states.shape[1],) * 2, LOWEST), diagonal=1)
    no_keys = causal.clone()
    no_keys[0] = LOWEST
    infinite = {
        "Hidden keys have minus infinity, so that a query without keys gets NaN; add the mask as it is.": {
            "place": "infinite"
        }
    }
    for mask in (weights.mask, causal, no_keys):
        result = module.masked_attention(*weights.heads, mask)
        compare(result, partial(attention, *weights.heads, mask), MASK_MISTAKES | infinite)


# ------------------------------------------------------------------------------------------------------- 3: the heads


def multi_head(layer: nn.Module, x, mask=None, *, split="right", join="right", output=True, **options):
    """Multi-head attention with the linear layers of `layer`, with options for what can go wrong."""
    batch, length, width = x.shape
    heads = layer.num_heads
    projected = (each(x) for each in (layer.query, layer.key, layer.value))
    if split == "right":
        query, key, value = (each.view(batch, length, heads, -1).transpose(1, 2) for each in projected)
    elif split == "view":
        query, key, value = (each.view(batch, heads, length, -1) for each in projected)
    else:  # heads take every H-th number
        query, key, value = (each.view(batch, length, -1, heads).permute(0, 3, 1, 2) for each in projected)
    context, weights = attention(query, key, value, mask, **options)
    context = (context.transpose(1, 2) if join == "right" else context).reshape(batch, length, width)
    return (layer.output(context) if output else context), weights


def check_divisibility(module: ModuleType, weights: Weights) -> None:
    config = copy.deepcopy(weights.model.config)
    module.MultiHeadAttention(config)
    config.hidden_size = config.num_attention_heads * 8 + 1
    try:
        module.MultiHeadAttention(config)
    except ValueError:
        return
    raise GapError(
        f"A width of {config.hidden_size} with {config.num_attention_heads} heads is accepted; raise a "
        "ValueError if the heads do not divide the width."
    )


def check_heads(module: ModuleType, weights: Weights) -> None:
    layer = loaded(module.MultiHeadAttention(weights.model.config), weights.model.encoder.blocks[0].attention)
    width = weights.states.shape[-1]
    for mask in (None, weights.mask):
        compare(
            layer(weights.states, mask),
            partial(multi_head, layer, weights.states, mask),
            {
                "The heads are split without a transpose, which mixes the tokens; view as (B, T, H, D), and then "
                "transpose(1, 2).": {"split": "view"},
                "The width is viewed as (D, H), so that the numbers of a head are not next to each other; view it as "
                "(H, D).": {"split": "strided"},
                "The heads are joined without a transpose, which mixes the tokens; transpose(1, 2), and then reshape "
                "to (B, T, C).": {"join": "view"},
                "The scores are divided by √C; divide them by √D, where D is the width of one head.": {"width": width},
                "The output matrix is not applied; return self.output(...) of the joined heads.": {"output": False},
            }
            | (MASK_MISTAKES if mask is not None else ATTENTION_MISTAKES),
        )


def loaded(part: nn.Module, source: nn.Module) -> nn.Module:
    """The learner's part, in evaluation mode, with the weights of the package's.

    Raises:
        MistakeError: it has other names or shapes of weights.
    """
    shapes, expected = (
        {name: tuple(weight.shape) for name, weight in each.state_dict().items()} for each in (part, source)
    )
    if shapes != expected:
        raise MistakeError(
            f"The part has the weights {shapes}; expected {expected}. Keep the names of the file with gaps."
        )
    part.load_state_dict(source.state_dict())
    return part.eval()


# ------------------------------------------------------------------------------------------------------- 4: the block


def check_gelu(module: ModuleType, weights: Weights) -> None:
    x = torch.linspace(-4, 4, 200)

    def reference(approximate="none", function=nn.functional.gelu):
        return function(x, approximate=approximate) if function is nn.functional.gelu else function(x)

    compare(
        module.gelu(x),
        reference,
        {
            "This is the tanh approximation of GELU; BertModel computes it with erf.": {"approximate": "tanh"},
            "This is x · sigmoid(1.702 x), an approximation; BERT computes GELU with erf.": {
                "function": lambda x: x * (1.702 * x).sigmoid()
            },
            "The argument of erf is x; expected x / √2.": {"function": lambda x: x * (1 + torch.erf(x)) / 2},
            "This is Φ(x); expected x · Φ(x).": {"function": lambda x: (1 + torch.erf(x / 2**0.5)) / 2},
            "This is ReLU.": {"function": torch.relu},
        },
    )


def layer_norm(x, norm, eps, *, correction=0, power=0.5, dim=-1, affine=True, place="inside", is_centred=True):
    """Layer norm with the weights of `norm`, with options for what can go wrong."""
    mean, variance = x.mean(dim, keepdim=True), x.var(dim, correction=correction, keepdim=True)
    normed = (x - mean * is_centred) / ((variance + eps * (place == "inside")) ** power + eps * (place == "outside"))
    return normed * norm.weight + norm.bias if affine else normed


def check_layer_norm(module: ModuleType, weights: Weights) -> None:
    source, x = weights.model.encoder.blocks[0].attention_norm, weights.states
    eps = 0.5  # so large that its place counts
    norm = loaded(module.LayerNorm(len(source.weight), eps), source)
    compare(
        norm(x),
        partial(layer_norm, x, source, eps),
        {
            "The variance is divided by n - 1; divide by n (var(..., correction=0)).": {"correction": 1},
            "The numbers are divided by the variance; divide by its square root.": {"power": 1.0},
            "The mean is not subtracted.": {"is_centred": False},
            "The mean and the variance are over the tokens; compute them over the last dimension.": {"dim": -2},
            "weight and bias are not applied.": {"affine": False},
            "eps is not used; add it to the variance.": {"place": "nowhere"},
            "eps is added to the standard deviation; add it to the variance, before the square root.": {
                "place": "outside"
            },
        },
    )


def check_feed_forward(module: ModuleType, weights: Weights) -> None:
    source = weights.model.encoder.blocks[0].feed_forward
    part = loaded(module.FeedForward(weights.model.config), source)
    with mock.patch.object(module, "gelu", nn.functional.gelu):  # a wrong GELU is reported once
        result = part(weights.states)

    def reference(activation=nn.functional.gelu, last=lambda x: x):
        return last(source.output(activation(source.intermediate(weights.states))))

    compare(
        result,
        reference,
        {
            "GELU is missing between the two linear layers.": {"activation": lambda x: x},
            "The activation is ReLU; expected GELU.": {"activation": torch.relu},
            "GELU is applied after the second linear layer as well.": {"last": nn.functional.gelu},
            "The input is added to the result; the residual sum is part of the block.": {
                "last": lambda x: x + weights.states
            },
        },
    )


class RightAttention(nn.Module):
    """The attention of the package's block, with the arguments of the learner's."""

    def __init__(self, source: nn.Module):
        super().__init__()
        self.query, self.key, self.value, self.output = source.query, source.key, source.value, source.output
        self.num_heads = source.query.out_features // source.head_width

    def forward(self, x, mask=None, **options):
        return multi_head(self, x, mask, **options)


def run_block(block: nn.Module, x, mask, *, order="post", skipped="", swapped=False, drop=1.0, **options):
    """A block with the parts of `block`, with options for what can go wrong."""
    norms = [block.attention_norm, block.feed_forward_norm][:: -1 if swapped else 1]
    parts = [("attention", lambda x: block.attention(x, mask, **options)[0]), ("feed_forward", block.feed_forward)]
    for (name, part), norm in zip(parts, norms, strict=True):
        norm = nn.Identity() if skipped == f"{name}_norm" else norm
        residual = 0.0 if skipped in (name, "both") else 1.0
        if order == "pre":
            x = x * residual + part(norm(x)) * drop
        elif order == "post":
            x = norm(x * residual + part(x) * drop)
        elif order == "norm of the part":
            x = x * residual + norm(part(x)) * drop
    return x


def check_evaluation(part: nn.Module, *inputs) -> None:
    """Raises MistakeError if a part in evaluation mode returns zeros, or something else each time."""
    results = filled(part(*inputs)), part(*inputs)
    if isinstance(results[0], torch.Tensor) and not (results[0].any() and agree(*results)):
        raise MistakeError("Dropout is active at evaluation; use self.dropout, which model.eval() switches off.")


def check_block(module: ModuleType, weights: Weights) -> None:
    """Checks the block alone: its parts are replaced by right ones."""
    x, mask, source = weights.states, weights.mask, weights.model.encoder.blocks[0]
    for order, other in (("post", "pre"), ("pre", "post")):
        config = copy.deepcopy(weights.model.config)
        config.norm_first, config.hidden_dropout_prob = order == "pre", 1.0  # dropout with probability 1 leaves zeros
        block = loaded(module.Block(config), source)
        block.attention, block.feed_forward = RightAttention(source.attention), source.feed_forward
        block.attention_norm, block.feed_forward_norm = source.attention_norm, source.feed_forward_norm
        run = partial(run_block, block, x, mask)
        mistakes = {
            f"The order is {other}-norm where config.norm_first is {config.norm_first}; expected {order}-norm.": {
                "order": other
            },
            "The norm is applied to the result of each part, before the residual sum; see the formulas above.": {
                "order": "norm of the part"
            },
            "The residual sums are missing: add the input of each part to its result.": {"skipped": "both"},
            "The residual sum of the attention is missing.": {"skipped": "attention"},
            "The residual sum of the feed-forward is missing.": {"skipped": "feed_forward"},
            "attention_norm is missing.": {"skipped": "attention_norm"},
            "feed_forward_norm is missing.": {"skipped": "feed_forward_norm"},
            "The two norms are swapped.": {"swapped": True},
            "The mask is not passed to the attention.": {"place": "nowhere"},
        }
        check_evaluation(block, x, mask)
        compare(block(x, mask), run, mistakes, order=order)
        result = block.train()(x, mask)
        if agree(result, run(order=order)):
            raise MistakeError("There is no dropout in training; apply self.dropout to the result of each part.")
        if not agree(result, run(order=order, drop=0.0)):
            raise MistakeError(
                "Dropout is in the wrong place; apply self.dropout to the result of each part, before the residual sum."
            )


# ------------------------------------------------------------------------------------------------- 5: the embeddings


def check_sinusoidal_table(module: ModuleType, weights: Weights) -> None:
    length, width = 40, 16

    def reference(layout="alternating", base=10_000.0, start=0):
        table = sinusoidal_table(length + start, width)[start:]
        if base != 10_000.0:  # the exponent is i / width in place of 2i / width
            angle = torch.arange(length)[:, None] / 10_000 ** (torch.arange(width // 2) / width)
            table = torch.stack([angle.sin(), angle.cos()], dim=-1).flatten(1)
        sines, cosines = table[:, 0::2], table[:, 1::2]
        if layout == "side by side":
            return torch.cat([sines, cosines], dim=1)
        return torch.stack([cosines, sines], dim=-1).flatten(1) if layout == "swapped" else table

    compare(
        module.sinusoidal_table(length, width),
        reference,
        {
            "Sines and cosines are side by side; they alternate: even columns are sines, odd columns cosines.": {
                "layout": "side by side"
            },
            "Sines and cosines are swapped; the even columns, from 0 on, are sines.": {"layout": "swapped"},
            "The exponent is i / width; expected 2i / width, for the pair of columns i.": {"base": 100.0},
            "The first position is 1; expected 0.": {"start": 1},
        },
    )


def check_embeddings(module: ModuleType, weights: Weights) -> None:
    source = weights.model.embeddings
    config = copy.deepcopy(weights.model.config)
    config.hidden_dropout_prob = 1.0
    part = loaded(module.Embeddings(config), source)
    part.norm = source.norm  # a wrong layer norm is reported in chapter 4
    ids, types = weights.batch["input_ids"], weights.batch["token_type_ids"]

    def reference(types, positions=True, use_types=True, norm=True, drop=1.0, default=0):
        total = source.word_embeddings(ids)
        if positions is not False:
            total = total + source.position_embeddings(torch.arange(ids.shape[1]) + (positions is not True))
        if use_types:
            total = total + source.token_type_embeddings(types + default)
        return (source.norm(total) if norm else total) * drop

    mistakes = {
        "The positions are forgotten: add position_embeddings of 0, 1, 2, …": {"positions": False},
        "The first position is 1; expected 0.": {"positions": "from 1"},
        "The token types are forgotten: add token_type_embeddings, also of type 0.": {"use_types": False},
        "The layer norm is forgotten.": {"norm": False},
    }
    check_evaluation(part, ids, types)
    compare(part(ids, types), reference, mistakes, types=types)
    default = {"The token type is 1 where token_type_ids is None; expected 0.": {"default": types.max()}}
    compare(part(ids), reference, mistakes | default, types=torch.zeros_like(types))
    if not agree(part.train()(ids, types), reference(types, drop=0.0)):
        raise MistakeError("There is no dropout in training; apply self.dropout to the result.")


# --------------------------------------------------------------------------------------------------------- 6: the model


def check_copy_layer(module: ModuleType, weights: Weights) -> None:
    source = weights.model.encoder.blocks[0].state_dict()
    block = module.Block(weights.model.config)
    random = {name: weight.clone() for name, weight in block.state_dict().items()}
    module.copy_layer(weights.bert.encoder.layer[0], block)
    if all(torch.equal(weight, random[name]) for name, weight in block.state_dict().items()):
        raise GapError("The block is unchanged; copy the weights of the layer into the block.")
    for name, weight in block.state_dict().items():
        if torch.equal(weight, source[name]):
            continue
        others = [
            other for other, tensor in source.items() if tensor.shape == weight.shape and torch.equal(weight, tensor)
        ]
        if others:
            raise MistakeError(f"{name} has the weights of {others[0]}.")
        if torch.equal(weight, random[name]):
            raise MistakeError(f"{name} is not copied.")
        raise MistakeError(f"{name} has other weights than the layer.")


def mean_pooling(states, tokens, *, padding="left out", first=False):
    """The means of hidden states, with options for what can go wrong."""
    if first:
        return states[:, 0]
    if padding == "averaged":
        return states.mean(dim=1)
    total = (states * tokens[:, :, None]).sum(dim=1)
    numbers = {"counted": tokens.shape[1], "summed": 1, "left out": tokens.sum(dim=1, keepdim=True)}
    return total / numbers[padding]


def check_mean_pooling(module: ModuleType, weights: Weights) -> None:
    tokens = weights.batch["attention_mask"]
    states = weights.bert(**weights.batch).last_hidden_state.detach()
    compare(
        module.mean_pooling(states, tokens),
        partial(mean_pooling, states, tokens),
        {
            "Padding is averaged in; sum over the tokens with attention_mask 1, and divide by their number.": {
                "padding": "averaged"
            },
            "The sum is divided by the length of the batch, which counts padding; divide by the number of tokens of "
            "each sequence.": {"padding": "counted"},
            "This is the vector of [CLS]; expected the mean over all tokens.": {"first": True},
            "The sum is not divided by the number of tokens.": {"padding": "summed"},
        },
    )


def check_my_bert(module: ModuleType, weights: Weights) -> str:
    """The comparison of `check.py`, between the learner's model and `BertModel`. Returns its verdict."""
    for chapter, name, check in (
        (3, "heads", check_heads),
        (4, "blocks", check_gelu),
        (4, "blocks", check_layer_norm),
        (4, "blocks", check_feed_forward),
        (4, "blocks", check_block),
        (5, "embeddings", check_embeddings),
    ):
        try:
            check(sys.modules[name], weights)
        except (MistakeError, GapError) as error:
            raise MistakeError(
                f"A part of chapter {chapter} is wrong. {error} Run the check of that chapter."
            ) from error
    model = module.MyBert.from_pretrained(weights.source, attn_implementation="eager")
    config: ScratchBertConfig = model.config
    rows = parity.compare(model, weights.bert, [parity.make_batch(parity.random_rows(config, seed=0), config)])
    if different := [row.what for row in rows if row.excess > 1]:
        raise MistakeError(f"The comparison of check.py fails, first in {different[0]}.")
    return f"check: equal, {len(rows)} outputs and gradients"
