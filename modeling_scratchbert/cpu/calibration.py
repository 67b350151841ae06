"""The factors of int8 inference: how much larger some channels of a layer's input are than others.

A few channels of BERT's hidden states are many times larger than the rest, and the scale of a quantised row has to fit
them. SmoothQuant divides the inputs by a factor for each channel, and multiplies the weights by it (Xiao et al. 2023).
"""

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import safetensors
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from ..checkpoints import staged
from .matrices import Matrix
from .stack import OptimizedStack

Factors = dict[str, torch.Tensor]
Groups = dict[str, list[nn.Linear]]


def find_factors(groups: Groups, largest: Factors) -> Factors:
    """Returns the factors of the layers in `groups`, by the names there, from the largest absolute values |x| of their
    inputs: sqrt(max |x| / max |w|) for each channel, which is SmoothQuant with α = 0.5."""
    factors = {}
    for name, layers in groups.items():
        of_weights = torch.cat([layer.weight.detach() for layer in layers]).float().abs().amax(dim=0)
        of_inputs = largest[name][: len(of_weights)]
        of_inputs = of_inputs if of_inputs.any() else of_weights  # factors of 1 where no batch has an input
        ratios = (of_inputs.clamp(min=1e-5) / of_weights.clamp(min=1e-5)).sqrt()
        factors[name] = ratios / ratios.mean()
    return factors


def largest_inputs(model, calibration: Iterable[Mapping] | None, matrices: dict[str, Matrix], places) -> Factors:
    """Runs batches, or random token ids, and returns the largest absolute inputs of matrices, by their names.

    Args:
        matrices: what collects them.
        places: the modules with these matrices, by the module and the name in whose place they run.

    Raises:
        TypeError: a batch is not a mapping of the model's arguments.
        ValueError: there are no batches, or one has no tokens, NaN or infinity.
    """
    if calibration is None:
        model, calibration = model.base_model, random_batches(model.config)
    found = {name: torch.zeros_like(matrix.largest) for name, matrix in matrices.items()}
    number = 0
    with evaluated(model, places):
        for number, batch in enumerate(calibration, start=1):
            check_batch(batch, number)
            model(**batch)
            check_inputs(torch.cat([matrix.largest for matrix in matrices.values()]), number)
            for name, matrix in matrices.items():
                found[name] = found[name].maximum(matrix.largest)
            for matrix in matrices.values():  # tied layers share one
                matrix.largest.zero_()
    if not number:
        raise ValueError("calibration has no batches; expected at least one. Pass a few dozen texts.")
    return found


def check_batch(batch: Any, number: int) -> None:
    if not isinstance(batch, Mapping):
        fact = f"calibration has a {type(batch).__name__} as batch {number}"
        raise TypeError(f"{fact}; expected a mapping of arguments. Pass what the tokenizer returns.")


def check_inputs(largest: torch.Tensor, number: int) -> None:
    """Raises ValueError if batch `number` has no inputs, or some that are not finite."""
    if not largest.any() or not largest.isfinite().all():
        fact = f"calibration has {'NaN or infinity' if largest.any() else 'no tokens'} in batch {number}"
        raise ValueError(f"{fact}; expected tokens with finite numbers. Leave the batch out.")


def random_batches(config) -> list[dict[str, torch.Tensor]]:
    """Returns token ids drawn from the whole vocabulary, as batches of the base model. They show which channels are
    large nearly as well as texts do."""
    generator = torch.Generator().manual_seed(0)
    length = min(64, config.max_position_embeddings)
    names = ["input_ids", "decoder_input_ids"] if config.is_encoder_decoder else ["input_ids"]
    ids = [torch.randint(config.vocab_size, (8, length), generator=generator) for _ in range(4)]
    return [dict.fromkeys(names, each) for each in ids]


@contextmanager
def evaluated(model, places: dict[tuple[Any, str], nn.Module]) -> Iterator[None]:
    """Within the `with` block, the model is in evaluation mode, without gradients, with other modules in `places`, and
    with one thread: several would write the same largest inputs."""
    with torch.no_grad(), ExitStack() as undo:
        undo.callback(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(1)
        for module in model.modules():
            undo.callback(setattr, module, "training", module.training)
        for (parent, name), module in places.items():
            undo.callback(setattr, parent, name, getattr(parent, name))
            setattr(parent, name, module)
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
