"""The factors of int8 inference: how much larger some channels of a layer's input are than others.

A few channels of BERT's hidden states are many times larger than the rest, and the scale of a quantised row has to fit
them. SmoothQuant divides the inputs by a factor for each channel, and multiplies the weights by it (Xiao et al. 2023).
"""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import safetensors
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from ..checkpoints import staged
from .stack import OptimizedStack
from .structure import is_base_model

Factors = dict[str, torch.Tensor]
Groups = dict[str, list[nn.Linear]]


def find_factors(model, groups: Groups, calibration: Iterable[Mapping] | str | os.PathLike | None) -> Factors:
    """Returns the factors of the layers in `groups`, by the names there, from batches, a file or random token ids.

    With |x| the absolute values of a layer's inputs at the tokens of all batches, a factor is sqrt(max |x| / max |w|)
    for each channel, which is SmoothQuant with α = 0.5.

    Raises:
        TypeError: a batch is not a mapping of the model's arguments.
        ValueError: there are no batches, or one has no tokens, NaN or infinity; or the file is invalid.
        OSError: the file cannot be read.
    """
    if isinstance(calibration, str | os.PathLike):
        return load_factors(calibration, groups)
    if calibration is None:
        model, calibration = model.base_model, random_batches(model.config)
    # By the weights, because tied layers need the same factors.
    weights = {name: tuple(id(layer.weight) for layer in layers) for name, layers in groups.items()}
    largest = largest_inputs(model, {weights[name]: layers[0] for name, layers in groups.items()}, calibration)
    factors = {}
    for name, layers in groups.items():
        of_weights = torch.cat([layer.weight.detach() for layer in layers]).float().abs().amax(dim=0)
        of_inputs = largest.get(weights[name], of_weights)  # factors of 1 where no batch has an input
        ratios = (of_inputs.clamp(min=1e-5) / of_weights.clamp(min=1e-5)).sqrt()
        factors[name] = ratios / ratios.mean()
    return factors


def random_batches(config) -> list[dict[str, torch.Tensor]]:
    """Returns token ids drawn from the whole vocabulary, as batches of the base model. They show which channels are
    large nearly as well as texts do."""
    generator = torch.Generator().manual_seed(0)
    length = min(64, config.max_position_embeddings)
    names = ["input_ids", "decoder_input_ids"] if config.is_encoder_decoder else ["input_ids"]
    ids = [torch.randint(config.vocab_size, (8, length), generator=generator) for _ in range(4)]
    return [dict.fromkeys(names, each) for each in ids]


def largest_inputs(model, layers: dict[Any, nn.Linear], batches: Iterable[Mapping]) -> dict[Any, torch.Tensor]:
    """Runs the batches, and returns the largest absolute value of each channel of each layer's inputs, by its key."""
    largest: dict[Any, torch.Tensor] = {}
    number = 0
    with evaluated(model), ExitStack() as hooks:
        for key, layer in layers.items():
            hook = partial(record, largest, key, lambda: number)
            hooks.enter_context(layer.register_forward_pre_hook(hook))
        for number, batch in enumerate(batches, start=1):
            if not isinstance(batch, Mapping):
                fact = f"calibration has a {type(batch).__name__} as batch {number}"
                raise TypeError(f"{fact}; expected a mapping of arguments. Pass what the tokenizer returns.")
            model(**batch)
    if not number:
        raise ValueError("calibration has no batches; expected at least one. Pass a few dozen texts.")
    return largest


def record(largest: dict[Any, torch.Tensor], key: Any, number: Callable[[], int], layer, args) -> None:
    """A hook that updates `largest[key]`; `number` returns that of the batch."""
    x = args[0].detach().float().flatten(0, -2)
    if not len(x) or not x.isfinite().all():
        fact = f"calibration has {'NaN or infinity' if len(x) else 'no tokens'} in batch {number()}"
        raise ValueError(f"{fact}; expected tokens with finite numbers. Leave the batch out.")
    found = x.abs().amax(dim=0)
    largest[key] = torch.maximum(largest.get(key, found), found)


@contextmanager
def evaluated(model) -> Iterator[None]:
    """Within the `with` block, the model is in evaluation mode, without gradients, and removes padding."""
    with torch.no_grad(), ExitStack() as undo:
        # The products of a model as loaded have other last bits with other numbers of threads.
        undo.callback(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(1)
        for module in model.modules():
            undo.callback(setattr, module, "training", module.training)
        for config in [module.config for module in model.modules() if is_base_model(module)]:
            undo.callback(setattr, config, "padding_free", config.padding_free)
            config.padding_free = True
        model.eval()
        yield


def save_calibration(model, path: str | os.PathLike) -> None:
    """Writes the factors of an int8 model. See `InferenceMixin.save_calibration`."""
    factors = {}
    for name, stack in model.named_modules():
        for index, block in enumerate(stack.blocks if isinstance(stack, OptimizedStack) else ()):
            matrices = {"attention.query": block.query_key_value, "feed_forward.intermediate": block.intermediate}
            for layer, matrix in matrices.items():
                if matrix.factors is not None:
                    full_name = f"{name}.blocks.{index}.{layer}".removeprefix(f"{model.base_model_prefix}.")
                    factors[full_name] = matrix.factors.clone()  # tied layers share them, which safetensors refuses
    if not factors:
        raise RuntimeError("The model has no int8 layers; expected some. Call optimize_for_inference('int8') before.")
    with staged(Path(path).parent) as folder:  # a temporary name until the file is complete
        save_file(factors, folder / Path(path).name, metadata={"format": "pt"})


def load_factors(path: str | os.PathLike, groups: Groups) -> Factors:
    """Returns the factors that `save_calibration` wrote.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is not a file of factors, or those of another model.
    """
    try:
        factors = load_file(path)
    except safetensors.SafetensorError as error:
        raise ValueError(f"{path} is damaged or no safetensors file ({error}); expected calibration factors.") from None
    for name in sorted(factors.keys() | groups.keys()):
        found = factors.get(name, torch.empty(0))
        shape = (groups[name][0].in_features,) if name in groups else None
        if found.shape != shape or not ((found > 0) & found.isfinite()).all():
            raise ValueError(
                f"{path} has missing, unexpected or invalid factors for {name}; expected those of this "
                "model, positive and finite. Pass batches as calibration, or None."
            )
    return factors
