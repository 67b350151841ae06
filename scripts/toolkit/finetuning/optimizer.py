"""The optimizer: AdamW's parameter groups, and the learning-rate schedule."""

from collections import defaultdict

import torch
from torch import nn
from transformers import get_scheduler
from transformers.trainer_pt_utils import get_parameter_names

from toolkit.finetuning.settings import named_values
from toolkit.training import depth


def parameter_groups(model: nn.Module, learning_rate: float, weight_decay: float, layer_decay: float) -> list[dict]:
    """AdamW's groups: no decay of biases and norms, as in BERT's own code, and a learning rate that is multiplied by
    `layer_decay` for each layer further down (Howard & Ruder 2018, section 3.2)."""
    decayed = set(get_parameter_names(model, [nn.LayerNorm], [r"\bbias$"]))
    blocks = max(depth(name, 0) for name, _ in model.named_parameters())  # a decoder may have more than its encoder
    groups = defaultdict(list)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            groups[blocks + 1 - depth(name, blocks), name in decayed].append(parameter)
    return [
        {"params": each, "lr": learning_rate * layer_decay**distance, "weight_decay": weight_decay if decays else 0.0}
        for (distance, decays), each in groups.items()
    ]


def make_optimizer(model: nn.Module, settings) -> torch.optim.Optimizer:
    """The optimizer of the parameters that are trained.

    Raises:
        ValueError: there are none.
    """
    groups = parameter_groups(model, settings.learning_rate, settings.weight_decay, settings.layer_decay)
    if not groups:
        raise ValueError(f"--freeze is {settings.freeze}, which freezes all parameters; expected at least one to train")
    rate = settings.learning_rate  # each group has its own, but the polynomial schedule divides by this one
    if settings.optimizer == "sgd":
        return torch.optim.SGD(groups, rate, momentum=0.9)
    if settings.optimizer == "adafactor":
        return torch.optim.Adafactor(groups, rate)
    return torch.optim.AdamW(groups, rate, fused=True)  # one pass over the weights instead of a dozen


def make_schedule(optimizer: torch.optim.Optimizer, settings, steps: int):
    """The learning-rate schedule over `steps` updates.

    Raises:
        ValueError: --lr_scheduler_kwargs has an argument that the schedule does not have, or lacks one.
    """
    arguments = named_values("lr_scheduler_kwargs", settings.lr_scheduler_kwargs)
    try:
        if arguments and settings.schedule.startswith("constant"):  # get_scheduler would ignore them
            raise ValueError("it has none")
        return get_scheduler(
            settings.schedule,
            optimizer,
            num_warmup_steps=round(settings.warmup_ratio * steps),
            num_training_steps=steps,
            scheduler_specific_kwargs=arguments,
        )
    except (TypeError, ValueError) as error:
        given = ", ".join(settings.lr_scheduler_kwargs or []) or "missing"
        raise ValueError(
            f"--lr_scheduler_kwargs is {given}; expected arguments of {settings.schedule}: {error}"
        ) from error
