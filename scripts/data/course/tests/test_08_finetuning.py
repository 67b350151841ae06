"""Chapter 8: fine-tuning."""

import pytest
import torch

from finetuning import balanced_accuracy, freeze, parameter_groups
from grading import check, expect
from modeling_scratchbert import ScratchBertForSequenceClassification


@pytest.fixture
def model(source):
    return ScratchBertForSequenceClassification.from_pretrained(source, num_labels=2)


@pytest.mark.parametrize("num_trained", [2, 0])
def test_freeze(num_trained, model):
    freeze(model, num_trained)
    blocks = model.model.encoder.blocks
    trained = {*model.classifier.parameters(), *model.model.pooler.parameters()}
    trained.update(*(block.parameters() for block in blocks[len(blocks) - num_trained :]))
    for name, parameter in model.named_parameters():
        expected = parameter in trained
        advice = "frozen; expected it trained" if expected else "trained; expected it frozen: requires_grad_(False)"
        expect(parameter.requires_grad == expected, f"After freeze(model, {num_trained}), {name} is {advice}.")


def test_parameter_groups(model):
    model.model.encoder.blocks[0].requires_grad_(False)
    decay = {}
    for group in parameter_groups(model, 0.02):
        for parameter in group["params"]:
            expect(parameter not in decay, "A parameter is in two groups; expected one.")
            decay[parameter] = group["weight_decay"]
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            expect(parameter not in decay, f"{name} is frozen, and in a group; expected trained parameters only.")
            continue
        expect(parameter in decay, f"{name} is in no group, so that it is not trained.")
        expected = 0.02 if parameter.ndim == 2 and "embeddings" not in name else 0.0
        expect(decay[parameter] == expected, f"{name} has the weight decay {decay[parameter]}; expected {expected}.")


def test_balanced_accuracy(model, data):
    with torch.no_grad():
        logits = model.eval()(**data.batch).logits
        order = (logits[:, 1] - logits[:, 0]).sort()
        model.classifier.bias[1] -= order.values[:2].mean()  # the first in order is of class 0, the others of class 1
    lowest = order.indices[:1]
    predictions = (torch.arange(3) != lowest).long()
    wrong = {name: tensor[lowest] for name, tensor in data.batch.items()} | {"labels": torch.tensor([1])}
    batches = [data.batch | {"labels": predictions}, wrong, dict(wrong)]
    seen = []
    model.model.register_forward_pre_hook(lambda *_: seen.append((model.training, torch.is_grad_enabled())))
    balanced_accuracy(model.train(), batches)
    expect(
        all("labels" in batch for batch in batches),
        'The labels are removed from the batches, so that a second evaluation fails; read them with batch["labels"].',
    )
    expect(
        not any(training for training, _ in seen),
        "Dropout is active at evaluation; call model.eval() first, and model.train() afterwards.",
    )
    expect(
        model.training,
        "The model stays in evaluation mode, so that training goes on without dropout; call model.train() afterwards.",
    )
    expect(
        not any(grad for _, grad in seen), "Gradients are computed, which takes time and memory; use torch.no_grad()."
    )

    # Right are the one text of class 0, and two of the four texts of class 1.
    check("finetuning.balanced_accuracy", run=lambda function: float(function(model.train(), batches)))
