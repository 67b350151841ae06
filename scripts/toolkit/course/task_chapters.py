"""The checks of chapters 7 to 10: pre-training, fine-tuning, sequence to sequence, and speed."""

import copy
from functools import partial
from types import ModuleType

import torch
from torch import nn

from modeling_scratchbert import (
    ScratchBertConfig,
    ScratchBertForConditionalGeneration,
    ScratchBertForSequenceClassification,
)
from toolkit.course.grading import GapError, MistakeError, Weights, agree, compare, filled

# --------------------------------------------------------------------------------------------------- 7: pre-training


def check_mask_tokens(module: ModuleType, weights: Weights) -> None:
    """Counts what happens to 100,000 tokens. Every share is within five standard deviations of its probability."""
    vocab_size, mask_id = 30_522, 103
    ids = torch.randint(1000, vocab_size, (100, 1000))
    special = torch.zeros(ids.shape, dtype=torch.bool)
    special[:, 0], special[:, -1] = True, True
    before = ids.clone()
    result = filled(module.mask_tokens(ids, special, mask_id, vocab_size))
    if not (isinstance(result, tuple) and len(result) == 2 and all(each.shape == ids.shape for each in result)):
        raise MistakeError("the result is not a pair of tensors of the shape of input_ids; return (inputs, labels).")
    inputs, labels = result
    if not torch.equal(ids, before):
        raise MistakeError("input_ids is changed; clone it before you replace tokens.")
    chosen = labels != -100
    if torch.equal(labels, before):
        raise MistakeError(
            "There are labels at all tokens, so that the loss counts tokens that the model can see; "
            "expected -100 at tokens that are not chosen."
        )
    if (chosen & special).any():
        raise MistakeError("Special tokens are chosen; [CLS], [SEP] and padding are never replaced.")
    if not torch.equal(labels[chosen], before[chosen]):
        raise MistakeError("The labels are not the ids of input_ids; take them before you replace tokens.")
    if not torch.equal(inputs[~chosen], before[~chosen]):
        raise MistakeError("Tokens that are not chosen are replaced; expected only chosen ones.")
    check_share("of the tokens are chosen", chosen[~special], 0.15)
    masked, kept = inputs[chosen] == mask_id, inputs[chosen] == before[chosen]
    if masked.all():
        raise MistakeError("Every chosen token becomes [MASK]; 10 % of them become random tokens, and 10 % stay.")
    check_share("of the chosen tokens become [MASK]", masked, 0.8)
    check_share("of the chosen tokens stay as they are", kept, 0.1)
    replaced = inputs[chosen][~masked & ~kept].double()
    if len(replaced) and not 0.45 < replaced.mean() / vocab_size < 0.55:
        raise MistakeError(
            "The random tokens are not spread over the vocabulary; draw them with torch.randint(vocab_size, …)."
        )


def check_share(what: str, chosen: torch.Tensor, expected: float) -> None:
    share, deviation = chosen.double().mean().item(), (expected * (1 - expected) / len(chosen)) ** 0.5
    if abs(share - expected) > 5 * deviation:
        raise MistakeError(f"{share:.1%} {what}; expected {expected:.0%}.")


def check_head(module: ModuleType, weights: Weights) -> None:
    words = copy.deepcopy(weights.model.embeddings.word_embeddings)
    head = module.MaskedLMHead(weights.model.config, words)
    if head.decoder.weight is not words.weight:
        raise GapError(
            "The output matrix is not tied to the word embeddings: a copy would be trained apart from "
            "them. Assign the parameter: self.decoder.weight = word_embeddings.weight."
        )
    states = weights.states

    def reference(activation=nn.functional.gelu, norm=head.norm, dense=head.dense):
        return head.decoder(norm(activation(dense(states))))

    def unchanged(x):
        return x

    compare(
        head(states),
        reference,
        {
            "GELU is missing.": {"activation": unchanged},
            "The layer norm is missing.": {"norm": unchanged},
            "The first linear layer is missing.": {"dense": unchanged},
        },
    )


def check_masked_lm_loss(module: ModuleType, weights: Weights) -> None:
    logits = (4 * torch.randn(3, 12, 50)).requires_grad_()
    labels = torch.randint(50, (3, 12)).where(torch.rand(3, 12) < 0.3, torch.tensor(-100))
    compare(
        module.masked_lm_loss(logits, labels),
        partial(token_loss, logits, labels),
        LOSS_MISTAKES
        | {
            "The labels are shifted against the logits, as in a causal language model; the "
            "label of a position is for the "
            "logits at the same position.": {"shift": 1},
        },
    )


def token_loss(logits, labels, *, shift=0, reduction="mean", clamp=False):
    """The cross-entropy of labels, with options for what can go wrong."""
    if shift:
        logits, labels = logits[:, :-shift], labels[:, shift:]
    labels = labels.clamp(min=0) if clamp else labels
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction=reduction)


# In every loss of tokens; each chapter adds what a shift of the labels means there.
LOSS_MISTAKES = {
    "The loss is summed; expected the mean over the labels that are not -100.": {"reduction": "sum"},
    "Labels of -100 count as the token 0; leave them out (ignore_index=-100).": {"clamp": True},
}


# ---------------------------------------------------------------------------------------------------- 8: fine-tuning


def make_classifier(weights: Weights) -> ScratchBertForSequenceClassification:
    return ScratchBertForSequenceClassification.from_pretrained(weights.source, num_labels=2)


def check_freeze(module: ModuleType, weights: Weights) -> None:
    model = make_classifier(weights)
    module.freeze(model, 2)
    for name, parameter in model.named_parameters():
        frozen = name.startswith(("model.embeddings.", "model.encoder.blocks.0.", "model.encoder.blocks.1."))
        if parameter.requires_grad == frozen:
            advice = (
                "is trained; expected it frozen: requires_grad_(False)" if frozen else "is frozen; expected it trained"
            )
            raise MistakeError(f"After freeze(model, 2), {name} {advice}.")


def check_parameter_groups(module: ModuleType, weights: Weights) -> None:
    model = make_classifier(weights)
    model.model.embeddings.requires_grad_(False)
    groups = filled(module.parameter_groups(model, 0.02))
    decay: dict[int, float] = {}
    for group in groups:
        for parameter in group["params"]:
            if id(parameter) in decay:
                raise MistakeError("A parameter is in two groups; expected one.")
            decay[id(parameter)] = group["weight_decay"]
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            if id(parameter) in decay:
                raise MistakeError(f"{name} is frozen, and in a group; expected trained parameters only.")
            continue
        expected = 0.02 if parameter.ndim == 2 else 0.0
        if id(parameter) not in decay:
            raise MistakeError(f"{name} is in no group, so that it is not trained.")
        if decay[id(parameter)] != expected:
            kind = "a matrix" if expected else "a bias or the weight of a layer norm"
            raise MistakeError(f"{name} is {kind}, with weight decay {decay[id(parameter)]}; expected {expected}.")


def check_accuracy(module: ModuleType, weights: Weights) -> None:
    model = make_classifier(weights)
    batch = weights.batch
    with torch.no_grad():
        predictions = model.eval()(**batch).logits.argmax(dim=-1)
    # Three right of four, in batches of three and one: the mean of the batches' accuracies is 1/2.
    batches = [
        batch | {"labels": predictions},
        {name: tensor[:1] for name, tensor in batch.items()} | {"labels": 1 - predictions[:1]},
    ]
    seen: list[tuple[bool, bool]] = []
    hook = model.model.register_forward_pre_hook(lambda *_: seen.append((model.training, torch.is_grad_enabled())))
    result = filled(module.accuracy(model.train(), batches))
    hook.remove()
    if not all("labels" in batch for batch in batches):
        raise MistakeError(
            "The labels are removed from the batches, so that a second evaluation fails; read them with "
            'batch["labels"].'
        )
    if any(training for training, _ in seen):
        raise MistakeError("Dropout is active at evaluation; call model.eval() first, and model.train() afterwards.")
    if not model.training:
        raise MistakeError(
            "The model stays in evaluation mode, so that training goes on without dropout; call "
            "model.train() afterwards."
        )
    if any(grad for _, grad in seen):
        raise MistakeError("Gradients are computed, which takes time and memory; use torch.no_grad().")
    compare(
        torch.as_tensor(float(result)),
        lambda share=3 / 4: torch.tensor(share),
        {
            "The accuracies of the batches are averaged, so that the texts of a small batch count more; divide the "
            "number of right texts by the number of texts.": {"share": 1 / 2},
            "The number of right texts is not divided by the number of texts.": {"share": 3.0},
            "This is the share of wrong texts.": {"share": 1 / 4},
        },
    )


# ------------------------------------------------------------------------------------------ 9: sequence to sequence

START, PAD, END = 1, 0, 2


def check_shift_right(module: ModuleType, weights: Weights) -> None:
    labels = torch.tensor([[7, 8, 9, END], [5, END, -100, -100]])
    before = labels.clone()

    def reference(ignored=PAD, way="right"):
        shifted = {
            "right": torch.cat([torch.full((2, 1), START), labels[:, :-1]], dim=1),
            "not": labels,
            "left": torch.cat([labels[:, 1:], torch.full((2, 1), PAD)], dim=1),
            "longer": torch.cat([torch.full((2, 1), START), labels], dim=1),
            "without start": torch.cat([torch.full((2, 1), PAD), labels[:, :-1]], dim=1),
        }[way]
        return shifted.masked_fill(shifted == -100, ignored)

    result = filled(module.shift_right(labels, START, PAD))
    if not torch.equal(labels, before):
        raise MistakeError("labels is changed; expected a new tensor.")
    compare(
        result,
        reference,
        {
            "-100 is left in the inputs of the decoder, which is no id; replace it by pad_id.": {"ignored": -100},
            "The labels are not shifted, so that each position sees its own label.": {"way": "not"},
            "The labels are shifted to the left; put the start token before them.": {"way": "left"},
            "The last label is not removed; the inputs are as long as the labels.": {"way": "longer"},
            "The inputs begin with pad_id; expected start_id.": {"way": "without start"},
        },
    )


def check_seq2seq_loss(module: ModuleType, weights: Weights) -> None:
    logits = 4 * torch.randn(3, 8, 30)
    labels = torch.randint(30, (3, 8))
    labels[1, 5:], labels[2, 2:] = -100, -100
    compare(
        module.seq2seq_loss(logits, labels),
        partial(token_loss, logits, labels),
        LOSS_MISTAKES
        | {
            "The labels are shifted a second time; the inputs of the decoder are shifted already, so the logits at "
            "position t are for label t.": {"shift": 1},
        },
    )


def make_seq2seq() -> ScratchBertForConditionalGeneration:
    """A small model with random weights. Pre-norm and large positions make its outputs vary from token to token."""
    config = ScratchBertConfig(
        is_encoder_decoder=True,
        pad_token_id=PAD,
        decoder_start_token_id=START,
        eos_token_id=END,
        vocab_size=12,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        initializer_range=0.5,
        norm_first=True,
        tie_word_embeddings=False,
    )
    model = ScratchBertForConditionalGeneration(config).eval()
    with torch.no_grad():
        model.get_decoder().embeddings.position_embeddings.weight.mul_(4)
    return model


@torch.no_grad()
def greedy(
    model, source, mask, max_new_tokens, *, stops=True, position=-1, last_only=False, is_masked=True, part="all"
):
    """Greedy decoding, with options for what can go wrong."""
    ids = torch.tensor([[START]])
    for _ in range(max_new_tokens):
        inputs = ids[:, -1:] if last_only else ids
        logits = model(source, mask if is_masked else None, decoder_input_ids=inputs).logits
        ids = torch.cat([ids, logits[:, [position]].argmax(dim=-1)], dim=1)
        if stops and ids[0, -1] == END:
            break
    return {"all": ids, "without start": ids[:, 1:], "without end": ids[:, :-1]}[part]


def check_greedy(module: ModuleType, weights: Weights) -> None:
    mask = torch.tensor([[1, 1, 1, 1, 0, 0]])
    models = [(make_seq2seq(), torch.randint(3, 12, (1, 6))) for _ in range(8)]  # some of the outputs end early
    with torch.no_grad():
        results = tuple(filled(module.greedy(model, source, mask, 9)) for model, source in models)

    def reference(**options):
        return tuple(greedy(model, source, mask, 9, **options) for model, source in models)

    compare(
        results,
        reference,
        {
            "The start token is missing in the result; `generate` returns it.": {"part": "without start"},
            "The last token is missing; the end token, or the last of max_new_tokens, is part of the result.": {
                "part": "without end"
            },
            "The output goes on after the end token.": {"stops": False},
            "The logits of the first position are used; those of the last one are for the next token.": {"position": 0},
            "The decoder gets the last token only; without a cache, it needs all tokens so far.": {"last_only": True},
            "attention_mask is not passed to the model, so that it attends to padding.": {"is_masked": False},
        },
    )


# --------------------------------------------------------------------------------------------------------- 10: speed


def check_unpad(module: ModuleType, weights: Weights) -> None:
    x, mask = weights.states, weights.batch["attention_mask"]
    starts = nn.functional.pad(mask.sum(dim=1).cumsum(dim=0), (1, 0))

    def reference(rows="tokens", offsets="starts"):
        kept = {"tokens": mask.bool(), "all": torch.ones_like(mask).bool()}[rows]
        ends = {"starts": starts, "lengths": mask.sum(dim=1), "without 0": starts[1:], "without end": starts[:-1]}
        return x[kept][None], ends[offsets]

    compare(
        module.unpad(x, mask),
        reference,
        {
            "The padding is kept; select the tokens with attention_mask 1.": {"rows": "all"},
            "cu_seqlens has the lengths; expected where each sequence begins, and N: the cumulative sums, from 0 on.": {
                "offsets": "lengths"
            },
            "cu_seqlens does not begin with 0.": {"offsets": "without 0"},
            "cu_seqlens does not end with the number of tokens.": {"offsets": "without end"},
        },
    )


def check_pad(module: ModuleType, weights: Weights) -> None:
    x, mask = weights.states, weights.batch["attention_mask"]

    def reference(side="right"):
        places = mask.flip(1) if side == "left" else mask
        padded = torch.zeros(x.shape)
        padded[places.bool()] = x[mask.bool()]
        return padded

    compare(
        module.pad(x[mask.bool()][None], mask),
        reference,
        {
            "The padding is on the wrong side; put the tokens where attention_mask is 1.": {"side": "left"},
        },
    )


def int8_linear(
    x,
    linear: nn.Linear,
    *,
    s_rows=True,
    m_rows=True,
    t_rows=True,
    minimum=True,
    bias=True,
    rounding=torch.round,
    overflows=False,
):
    """A linear layer in integers, with options for what can go wrong."""
    m = x.amin(-1, keepdim=True) if m_rows else x.min()
    s = ((x.amax(-1, keepdim=True) - m) if s_rows else (x.max() - x.min())) / 255
    t = linear.weight.abs().amax(1) / 127 if t_rows else linear.weight.abs().max().expand(len(linear.weight)) / 127
    q, v = rounding((x - m) / s).double(), rounding(linear.weight / t[:, None]).double()
    product = q @ v.T
    if overflows:  # 8 bits keep the remainder
        product = (product + 128) % 256 - 128
    return s * product.float() * t + m * (v.float().sum(1) * t) * minimum + linear.bias * bias


def check_int8_linear(module: ModuleType, weights: Weights) -> None:
    linear, x = weights.model.encoder.blocks[0].feed_forward.intermediate, weights.states
    with torch.no_grad():
        result = filled(module.int8_linear(x, linear))
        if agree(result, linear(x)):
            raise MistakeError("Nothing is rounded: this is the result of the layer itself.")
        compare(
            result,
            partial(int8_linear, x, linear),
            {
                "There is one s for all of x; compute it for each row, over the last dimension.": {"s_rows": False},
                "There is one m for all of x; compute it for each row, over the last dimension.": {"m_rows": False},
                "There is one scale for the whole weight; compute t for each row.": {"t_rows": False},
                "The product overflows: multiply int32 or float64 numbers, not int8.": {"overflows": True},
                "The numbers are truncated; round them.": {"rounding": torch.trunc},
                "m is forgotten: x ≈ s · q + m, so m times the sum of each row of the weight is part of the product.": {
                    "minimum": False
                },
                "The bias is forgotten.": {"bias": False},
            },
        )
