"""The optimizer: frozen parameters, LoRA, AdamW's parameter groups, and the learning-rate schedule."""

import re
import warnings
from collections import defaultdict
from collections.abc import Set

import torch
from torch import nn
from transformers import get_scheduler
from transformers.trainer_pt_utils import get_parameter_names

from toolkit.finetuning.settings import named_values

# Block 3 is `encoder.blocks.3` in ScratchBertModel and `encoder.layer.3` in BertModel.
BLOCK = re.compile(r"encoder\.(?:blocks|layer)\.(\d+)\.")

# The modules that have an adapter with --lora_rank.
ADAPTED = ("query", "value")


def depth(name: str, blocks: int) -> int:
    """The depth of a parameter: 0 in the embeddings, `blocks + 1` above the blocks."""
    if found := BLOCK.search(name):
        return int(found[1]) + 1
    return 0 if "embeddings." in name else blocks + 1


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


def freeze(model: nn.Module, what: str | None, new_weights: Set[str] = frozenset()) -> None:
    """Excludes `what` from the training: "embeddings"; "encoder", all but the model head; or a number of lowest blocks,
    with the embeddings. In an encoder-decoder these are parts of the encoder, with what the decoder shares with it.

    Args:
        new_weights: the names of parameters that are trained nevertheless, because they would stay random.

    Raises:
        ValueError: `what` is none of these.
    """
    if what is None:
        return
    blocks = model.config.num_hidden_layers
    highest = {"embeddings": 0, "encoder": blocks + 1} | {str(number): number for number in range(blocks + 1)}
    if what not in highest:
        raise ValueError(f"--freeze is {what}; expected embeddings, encoder, or a number of blocks, at most {blocks}")
    base = f"{model.base_model_prefix}." + ("encoder." if model.config.is_encoder_decoder else "")
    # A shared parameter has several names, one of them in the encoder.
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if name.startswith(base) and depth(name, blocks) <= highest[what] and name not in new_weights:
            parameter.requires_grad = False


def add_lora(model: nn.Module, settings, new_weights: Set[str] = frozenset()) -> nn.Module:
    """The model with adapters at queries and values (Hu et al. 2021, section 4.2), and with its model head trained.

    Args:
        new_weights: the names of parameters that are trained as well, because they would stay random.

    Raises:
        ImportError: PEFT is not installed.
        ValueError: modules with an adapter share a weight.
    """
    if not settings.lora_rank:
        return model
    weights = [module.weight for name, module in model.named_modules() if name.split(".")[-1] in ADAPTED]
    if len(set(map(id, weights))) < len(weights):
        # Each module has an adapter of its own; merging would add both to the one weight.
        raise ValueError(
            "--lora_rank is given and encoder and decoder share their weights (tie_encoder_decoder), "
            "which cannot hold the adapters of both; expected separate weights. Train all weights with "
            "--lora_rank 0"
        )
    from peft import LoraConfig, get_peft_model

    heads = [name for name, _ in model.named_children() if name not in (model.base_model_prefix, "lm_head", "dropout")]
    config = LoraConfig(
        r=settings.lora_rank,
        lora_alpha=settings.lora_alpha,
        lora_dropout=settings.lora_dropout,
        target_modules=list(ADAPTED),
        modules_to_save=heads or None,
    )
    # PEFT trains a copy of a head.
    new = [each for name, each in model.named_parameters() if name in new_weights and name.split(".")[0] not in heads]
    adapted = get_peft_model(model, config)
    for parameter in new:
        parameter.requires_grad = True
    return adapted


def merged(model: nn.Module) -> nn.Module:
    """The model with its adapters, if it has any, merged into its weights."""
    if not hasattr(model, "merge_and_unload"):
        return model
    tied = model.config.tie_word_embeddings
    with warnings.catch_warnings():
        # PEFT does not recognise a head that is tied to the embeddings of the decoder.
        warnings.filterwarnings("ignore", "Input and output embeddings are no longer tied")
        whole = model.merge_and_unload()
    whole.config.tie_word_embeddings = tied
    return whole
