"""The factors of int8 inference: how much larger some channels of a layer's input are than others.

A few channels of BERT's hidden states are many times larger than the rest, and the scale of a quantised row has to fit
them. SmoothQuant divides the inputs by a factor for each channel, and multiplies the weights by it (Xiao et al. 2023).
"""

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

import safetensors
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from .checkpoints import staged

Factors = dict[str, torch.Tensor]


def find_factors(model, groups: dict[str, list[nn.Linear]], batches: Iterable[Mapping]) -> Factors:
    """Returns the factors of the layers, by the names in `groups`, from the largest absolute values that their inputs
    have in these batches: sqrt(max |x| / max |w|) for each channel, which is SmoothQuant with α = 0.5.

    Raises:
        TypeError: a batch is not a mapping of the model's arguments.
        ValueError: there are no batches.
    """
    largest: Factors = {}
    # Hooks of this module do not turn unpadding off, so that no padding is seen.
    hooks = [
        layers[0].register_forward_pre_hook(_recorder(name, largest), prepend=True) for name, layers in groups.items()
    ]
    try:
        _run(model.eval(), batches)
    finally:
        for hook in hooks:
            hook.remove()
    by_weights: dict[tuple, Factors] = {}  # tied layers need the same factors
    for name, of_inputs in largest.items():
        by_weights.setdefault(tuple(id(layer.weight) for layer in groups[name]), {})[name] = of_inputs
    factors: Factors = {}
    for tied in by_weights.values():
        of_inputs = torch.stack(list(tied.values())).amax(dim=0)
        layers = groups[next(iter(tied))]
        of_weights = torch.stack([layer.weight.detach().float().abs().amax(dim=0) for layer in layers]).amax(dim=0)
        ratios = (of_inputs.clamp(min=1e-5) / of_weights.clamp(min=1e-5)).sqrt()
        factors |= dict.fromkeys(tied, ratios / ratios.mean())
    return factors


def random_batches(config) -> list[dict[str, torch.Tensor]]:
    """Returns token ids drawn from the whole vocabulary, as batches of the base model. They show which channels are
    large nearly as well as texts do."""
    generator = torch.Generator().manual_seed(0)
    length = min(64, config.max_position_embeddings)
    batches = []
    for _ in range(4):
        ids = torch.randint(config.vocab_size, (8, length), generator=generator)
        batches.append({"input_ids": ids, **({"decoder_input_ids": ids} if config.is_encoder_decoder else {})})
    return batches


def _recorder(name: str, largest: Factors):
    def record(layer, args):
        found = args[0].detach().float().flatten(0, -2).abs().amax(dim=0)
        largest[name] = torch.maximum(largest[name], found) if name in largest else found

    return record


@torch.no_grad()
def _run(model, batches: Iterable[Mapping]) -> None:
    number = 0
    for number, batch in enumerate(batches, start=1):
        if not isinstance(batch, Mapping):
            raise TypeError(
                f"calibration has a {type(batch).__name__} as batch {number}; expected a mapping of the model's "
                "arguments. Pass what the tokenizer returns."
            )
        model(**batch)
    if not number:
        raise ValueError(
            "calibration has no batches; expected at least one. Pass a few dozen texts like those to come."
        )


def save_factors(factors: Factors, path: str | os.PathLike) -> None:
    """Writes the factors into a safetensors file, under a temporary name until it is complete."""
    path = Path(path)
    with staged(path.parent) as folder:
        save_file(factors, folder / path.name, metadata={"format": "pt"})


def load_factors(path: str | os.PathLike, groups: dict[str, list[nn.Linear]]) -> Factors:
    """Returns the factors that `save_factors` wrote.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is not a file of factors, or those of another model.
    """
    try:
        factors = load_file(path)
    except safetensors.SafetensorError as error:
        raise ValueError(f"{path} is damaged or no safetensors file ({error}); expected calibration factors.") from None
    shapes = {name: (layers[0].in_features,) for name, layers in groups.items()}
    for name in sorted(factors.keys() | shapes.keys()):
        found = tuple(factors[name].shape) if name in factors else None
        if found != shapes.get(name):
            raise ValueError(
                f"{path} has {_described(found)} for {name}; expected {_described(shapes.get(name))}: it was made for "
                "another model. Pass batches as calibration, or None."
            )
    return factors


def _described(shape: tuple | None) -> str:
    return "no factors" if shape is None else f"factors of shape {shape}"
