"""The checks of chapters 1 to 6: attention, masks, heads, blocks, embeddings and the whole model."""

import copy
from functools import partial
from types import ModuleType

import torch
from torch import nn

from modeling_scratchbert import ScratchBertConfig
from modeling_scratchbert.embeddings import sinusoidal_table
from toolkit import parity
from toolkit.checkpoint import read_checkpoint
from toolkit.comparison import compare as compare_models
from toolkit.course.grading import GapError, MistakeError, Weights, agree, compare, filled

LOWEST = torch.finfo(torch.float32).min

# What is wrong in attention, and what to do: keyword arguments of `attention`.
ATTENTION_MISTAKES = {
    "The scores are not divided by √d; divide them by the square root of the width of a query.": {"width": 1},
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
}  # fmt: skip


def attention(query, key, value, mask=None, *, width=None, dim=-1, place="before"):
    """Scaled dot-product attention, with options for what can go wrong."""
    scores = query @ key.transpose(-2, -1) / (width or query.shape[-1]) ** 0.5
    mask = torch.zeros(()) if mask is None or place == "nowhere" else mask
    if place == "before":
        scores = scores + mask
    elif place == "subtracted":
        scores = scores - mask
    weights = scores.softmax(dim)
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
            raise MistakeError("The matrix is not transposed; nn.Linear stores the transpose, `(D, C)`, and computes "
                        "x @ weight.T.")  # fmt: skip
        compare(linear(x), lambda each=each: x @ each, {})


def check_causal_mask(module: ModuleType, weights: Weights) -> None:
    def reference(allowed=torch.tril, hidden=LOWEST, flipped=False):
        may_attend = allowed(torch.ones(5, 5)).bool() != flipped
        return torch.zeros(5, 5).masked_fill(~may_attend, hidden) if hidden else may_attend.float()

    compare(hidden_as_lowest(module.causal_mask(5)), reference, {
        "The mask is transposed: earlier positions attend to later ones. A row is a query; hide the keys after it.":
            {"allowed": torch.triu},
        "The mask is inverted; 0 is where a query may attend to a key.": {"flipped": True},
        "The mask has 1 where a query may attend to a key, which the softmax takes for a score; expected 0 there, and "
        "LOWEST elsewhere.": {"hidden": None},
        "A position does not attend to itself; it may.": {"allowed": partial(torch.tril, diagonal=-1)},
    })  # fmt: skip


def check_padding_mask(module: ModuleType, weights: Weights) -> None:
    tokens = weights.batch["attention_mask"]

    def reference(inverted=False, added=False, of_queries=False):
        mask = tokens.float() if added else torch.zeros(tokens.shape).masked_fill((tokens == 0) != inverted, LOWEST)
        return mask[:, None, :, None] if of_queries else mask[:, None, None, :]

    compare(hidden_as_lowest(module.padding_mask(tokens)), reference, {
        "The mask is inverted: it hides the tokens, and not the padding.": {"inverted": True},
        "1 and 0 are added to the scores, which hides nothing; expected 0 for a token and LOWEST for padding.":
            {"added": True},
        "The mask hides queries; padding must be hidden as keys, in the last dimension.": {"of_queries": True},
    })  # fmt: skip


def hidden_as_lowest(mask):
    """A mask with `LOWEST` for each number that hides a key as well: those from -10,000 down."""
    return (
        mask.masked_fill(mask <= -10_000, LOWEST)
        if isinstance(mask, torch.Tensor) and mask.dtype != torch.bool
        else mask
    )


def check_masked_attention(module: ModuleType, weights: Weights) -> None:
    for mask in (weights.mask, torch.triu(torch.full((weights.states.shape[1],) * 2, LOWEST), diagonal=1)):
        compare(module.masked_attention(*weights.heads, mask), partial(attention, *weights.heads, mask), MASK_MISTAKES)


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
    config.hidden_size = config.num_attention_heads * 8 + 1
    try:
        module.MultiHeadAttention(config)
    except ValueError:
        return
    raise MistakeError(f"A width of {config.hidden_size} with {config.num_attention_heads} heads is accepted; raise a "
                "ValueError if the heads do not divide the width.")  # fmt: skip


def check_heads(module: ModuleType, weights: Weights) -> None:
    layer = loaded(module.MultiHeadAttention(weights.model.config), weights.model.encoder.blocks[0].attention)
    width = weights.states.shape[-1]
    for mask in (None, weights.mask):
        compare(layer(weights.states, mask), partial(multi_head, layer, weights.states, mask), {
            "The heads are split without a transpose, which mixes the tokens; view as (B, T, H, D), and then "
            "transpose(1, 2).": {"split": "view"},
            "The width is viewed as (D, H), so that the numbers of a head are not next to each other; view it as "
            "(H, D).": {"split": "strided"},
            "The heads are joined without a transpose, which mixes the tokens; transpose(1, 2), and then reshape to "
            "(B, T, C).": {"join": "view"},
            "The scores are divided by √C; divide them by √D, where D is the width of one head.": {"width": width},
            "The output matrix is not applied; return self.output(...) of the joined heads.": {"output": False},
        } | (MASK_MISTAKES if mask is not None else ATTENTION_MISTAKES))  # fmt: skip


def loaded(part: nn.Module, source: nn.Module) -> nn.Module:
    """The learner's part, in evaluation mode, with the weights of the package's.

    Raises:
        MistakeError: it has other names or shapes of weights.
    """
    try:
        part.load_state_dict(source.state_dict())
    except RuntimeError as error:
        raise MistakeError(
            f"The names or shapes of the weights are not those of the file with gaps: {error}"
        ) from error
    return part.eval()


# ------------------------------------------------------------------------------------------------------- 4: the block


def check_gelu(module: ModuleType, weights: Weights) -> None:
    x = torch.linspace(-4, 4, 200)

    def reference(approximate="none", function=nn.functional.gelu):
        return function(x, approximate=approximate) if function is nn.functional.gelu else function(x)

    compare(module.gelu(x), reference, {
        "This is the tanh approximation of GELU; BERT computes it with erf.": {"approximate": "tanh"},
        "This is x · sigmoid(1.702 x), an approximation; BERT computes GELU with erf.":
            {"function": lambda x: x * (1.702 * x).sigmoid()},
        "The argument of erf is x; expected x / √2.": {"function": lambda x: x * (1 + torch.erf(x)) / 2},
        "This is Φ(x); expected x · Φ(x).": {"function": lambda x: (1 + torch.erf(x / 2**0.5)) / 2},
        "This is ReLU.": {"function": torch.relu},
    })  # fmt: skip


def layer_norm(x, norm, *, correction=0, power=0.5, dim=-1, affine=True, eps="inside"):
    """Layer norm with the weights of `norm`, with options for what can go wrong."""
    mean, variance = x.mean(dim, keepdim=True), x.var(dim, correction=correction, keepdim=True)
    normed = (x - mean) / ((variance + norm.eps * (eps == "inside")) ** power + norm.eps * (eps == "outside"))
    return normed * norm.weight + norm.bias if affine else normed


def check_layer_norm(module: ModuleType, weights: Weights) -> None:
    source = weights.model.encoder.blocks[0].attention_norm
    norm = loaded(module.LayerNorm(len(source.weight), source.eps), source)
    for x in (weights.states, weights.states * 1e-5):  # with small numbers, eps counts
        compare(norm(x), partial(layer_norm, x, norm), {
            "The variance is divided by n - 1; divide by n (var(..., correction=0)).": {"correction": 1},
            "The numbers are divided by the variance; divide by its square root.": {"power": 1.0},
            "The mean and the variance are over the tokens; compute them over the last dimension.": {"dim": -2},
            "weight and bias are not applied.": {"affine": False},
            "eps is not used; add it to the variance.": {"eps": "nowhere"},
            "eps is added to the standard deviation; add it to the variance, before the square root.":
                {"eps": "outside"},
        })  # fmt: skip


def check_feed_forward(module: ModuleType, weights: Weights) -> None:
    source = weights.model.encoder.blocks[0].feed_forward
    part = loaded(module.FeedForward(weights.model.config), source)

    def reference(activation=nn.functional.gelu, last=lambda x: x):
        return last(source.output(activation(source.intermediate(weights.states))))

    compare(part(weights.states), reference, {
        "GELU is missing between the two linear layers.": {"activation": lambda x: x},
        "The activation is ReLU; expected GELU.": {"activation": torch.relu},
        "GELU is applied after the second linear layer as well.": {"last": nn.functional.gelu},
    })  # fmt: skip


def block_reference(block: nn.Module, x, mask, *, order="post", residual=True, **options):
    """A block with the parts of the package's `block`, with options for what can go wrong."""
    block.attention.num_heads = block.attention.query.out_features // block.attention.head_width
    parts = [(lambda x: multi_head(block.attention, x, mask, **options)[0], block.attention_norm),
             (block.feed_forward, block.feed_forward_norm)]  # fmt: skip
    for part, norm in parts:
        if order == "pre":
            x = x * residual + part(norm(x))
        elif order == "post":
            x = norm(x * residual + part(x))
        elif order == "norm of the part":
            x = x * residual + norm(part(x))
    return x


def check_block(module: ModuleType, weights: Weights) -> None:
    prefixed("MultiHeadAttention of chapter 3: ", check_heads, module, weights)
    for order, other in (("post", "pre"), ("pre", "post")):
        config = copy.deepcopy(weights.model.config)
        config.norm_first, config.hidden_dropout_prob = order == "pre", 0.1
        source = weights.model.encoder.blocks[0]
        block = loaded(module.Block(config), source)
        result = filled(block(weights.states, weights.mask))
        if not agree(block(weights.states, weights.mask), result):
            raise MistakeError("Dropout is active at evaluation; use self.dropout, which model.eval() switches off.")
        compare(result, partial(block_reference, source, weights.states, weights.mask), {
            f"The order is {other}-norm where config.norm_first is {config.norm_first}; expected {order}-norm.":
                {"order": other},
            "The norm is applied to the result of each part, before the residual sum; see the formulas above.":
                {"order": "norm of the part"},
            "A residual sum is missing: add the input of each part to its result.": {"residual": False},
            "The mask is not passed to the attention.": {"place": "nowhere"},
        }, order=order)  # fmt: skip
        if agree(block.train()(weights.states, weights.mask), result):
            raise MistakeError("There is no dropout in training; apply self.dropout to the result of each part.")


def prefixed(prefix: str, check, module: ModuleType, weights: Weights) -> None:
    """Runs a check of an earlier chapter, whose part this one contains."""
    try:
        check(module, weights)
    except MistakeError as error:
        raise MistakeError(f"{prefix}{error}") from error


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

    compare(module.sinusoidal_table(length, width), reference, {
        "Sines and cosines are side by side; they alternate: even columns are sines, odd columns cosines.":
            {"layout": "side by side"},
        "Sines and cosines are swapped; the even columns, from 0 on, are sines.": {"layout": "swapped"},
        "The exponent is i / width; expected 2i / width, for the pair of columns i.": {"base": 100.0},
        "The first position is 1; expected 0.": {"start": 1},
    })  # fmt: skip


def check_embeddings(module: ModuleType, weights: Weights) -> None:
    source = weights.model.embeddings
    part = loaded(module.Embeddings(weights.model.config), source)
    ids, types = weights.batch["input_ids"], weights.batch["token_type_ids"]

    def reference(types, positions=True, use_types=True, norm=True):
        total = source.word_embeddings(ids)
        if positions is not False:
            total = total + source.position_embeddings(torch.arange(ids.shape[1]) + (positions is not True))
        if use_types:
            total = total + source.token_type_embeddings(types)
        return source.norm(total) if norm else total

    mistakes = {
        "The positions are forgotten: add position_embeddings of 0, 1, 2, …": {"positions": False},
        "The first position is 1; expected 0.": {"positions": "from 1"},
        "The token types are forgotten: add token_type_embeddings, also of type 0.": {"use_types": False},
        "The layer norm is forgotten.": {"norm": False},
    }
    result = filled(part(ids, types))
    if not agree(part(ids, types), result):
        raise MistakeError("Dropout is active at evaluation; use self.dropout, which model.eval() switches off.")
    compare(result, reference, mistakes, types=types)
    compare(part(ids), reference, mistakes, types=torch.zeros_like(types))


# --------------------------------------------------------------------------------------------------------- 6: the model


def check_copy_layer(module: ModuleType, weights: Weights) -> None:
    source = weights.model.encoder.blocks[0].state_dict()
    block = module.Block(weights.model.config)
    random = {name: weight.clone() for name, weight in block.state_dict().items()}
    module.copy_layer(weights.bert.encoder.layer[0], block)
    if all(torch.equal(weight, random[name]) for name, weight in block.state_dict().items()):
        raise GapError
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
    return total / (tokens.shape[1] if padding == "counted" else tokens.sum(dim=1, keepdim=True))


def check_mean_pooling(module: ModuleType, weights: Weights) -> None:
    tokens = weights.batch["attention_mask"]
    states = weights.bert(**weights.batch).last_hidden_state.detach()
    compare(module.mean_pooling(states, tokens), partial(mean_pooling, states, tokens), {
        "Padding is averaged in; sum over the tokens with attention_mask 1, and divide by their number.":
            {"padding": "averaged"},
        "The sum is divided by the length of the batch, which counts padding; divide by the number of tokens of each "
        "sequence.": {"padding": "counted"},
        "This is the vector of [CLS]; expected the mean over all tokens.": {"first": True},
    })  # fmt: skip


def check_my_bert(module: ModuleType, weights: Weights) -> str:
    """The comparison of `check_parity`, between the learner's model and `BertModel`. Returns its verdict."""
    for prefix, check in (("chapter 4, Block: ", check_block), ("chapter 5, Embeddings: ", check_embeddings)):
        prefixed(prefix, check, module, weights)
    rows, _ = parity.encode([read_checkpoint(weights.source)], seed=0)
    model = module.MyBert.from_pretrained(weights.source, attn_implementation="eager")
    config: ScratchBertConfig = model.config
    found = compare_models(model, weights.bert, parity.make_batch(rows, config))
    if not all(row.equal for row in found):
        raise MistakeError(f"The comparison of check_parity fails: {parity.verdict(found)}.")
    return f"check_parity: {parity.verdict(found)}"
