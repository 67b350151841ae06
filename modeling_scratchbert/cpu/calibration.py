"""The factors of int8 inference: how much larger some channels of a layer's input are than others.

A few channels of BERT's hidden states are many times larger than the rest, and the scale of a quantised row has to fit
them. SmoothQuant divides the inputs by a factor for each channel, and multiplies the weights by it (Xiao et al. 2023).
"""

import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import safetensors
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from ..checkpoints import staged
from .matrices import Matrix
from .stack import Block
from .structure import base_models

Factors = dict[str, Tensor]


def find_factors(model, calibration: Iterable[Mapping] | None, matrices: dict[str, Matrix]) -> Factors:
    """Run batches, or random token ids, and return the factors of matrices: sqrt(max |x| / max |w|) for each channel,
    which is SmoothQuant with α = 0.5.

    Args:
        model: an optimised model with these matrices, in float32; of random token ids, the base model.
        matrices: by the names of the factors.
    """
    for matrix in matrices.values():
        matrix.largest = torch.zeros(matrix.inputs)
    collect_inputs(model, random_batches(model.config) if calibration is None else calibration, matrices)
    factors = {}
    for name, matrix in matrices.items():
        of_weights = matrix.panels.abs().amax(dim=(0, 2)).flatten()[: matrix.width]
        of_inputs = matrix.largest[: matrix.width]
        of_inputs = of_inputs if of_inputs.any() else of_weights  # factors of 1 where no batch has an input
        ratios = of_inputs.clamp(min=1e-5) / of_weights.clamp(min=1e-5)
        # torch.sqrt is not always rounded to the nearest: it has other bits on other processors.
        factors[name] = torch.tensor([math.sqrt(ratio) for ratio in ratios.tolist()], dtype=torch.float32)
    return factors


@torch.no_grad()
def collect_inputs(model, batches: Iterable[Mapping], matrices: dict[str, Matrix]) -> None:
    """Run batches, and collect the largest absolute inputs in `matrix.largest`.

    Raises:
        TypeError: a batch is not a mapping of the model's arguments.
        ValueError: no batch has tokens, or one has NaN or infinity.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # several would write the same largest inputs
    largest = torch.zeros(1)
    try:
        for number, batch in enumerate(batches, start=1):
            if not isinstance(batch, Mapping):
                raise TypeError(
                    f"calibration has a {type(batch).__name__} as batch {number}; expected a mapping of arguments. "
                    "Pass what the tokenizer returns."
                )
            model(**batch)
            largest = torch.cat([matrix.largest for matrix in matrices.values()])
            if not largest.isfinite().all():
                raise ValueError(
                    f"calibration has NaN or infinity in batch {number}; expected finite numbers. Leave the batch out."
                )
    finally:
        torch.set_num_threads(threads)
    if not largest.any():
        raise ValueError("calibration has no tokens; expected some. Pass a few dozen texts.")


def random_batches(config) -> list[dict[str, Tensor]]:
    """Returns token ids drawn from the whole vocabulary, as batches of the base model. They show which channels are
    large nearly as well as texts do."""
    generator = torch.Generator().manual_seed(0)
    names = ["input_ids", "decoder_input_ids"] if config.is_encoder_decoder else ["input_ids"]
    shape = 8, min(64, config.max_position_embeddings)
    return [dict.fromkeys(names, torch.randint(config.vocab_size, shape, generator=generator)) for _ in range(4)]


def scaled(model) -> dict[str, Any]:
    """The layers that follow a layer norm, in whose output a few channels are much larger than the others, or their
    matrices in an optimised model; by names that are the same with any model head."""
    found = {}
    for path, each in base_models(model).items():
        for index, block in enumerate(each.encoder.blocks):
            name = f"{path}encoder.blocks.{index}".removeprefix(f"{model.base_model_prefix}.")
            is_optimized = isinstance(block, Block)
            found[f"{name}.attention.query"] = block.query_key_value if is_optimized else block.attention.query
            network = block if is_optimized else block.feed_forward
            found[f"{name}.feed_forward.intermediate"] = network.intermediate
    return found


def save_calibration(model, path: str | os.PathLike) -> None:
    """Writes the factors of an int8 model. See `InferenceMixin.save_calibration`."""
    found = scaled(model).items()
    # Tied layers share their factors, which safetensors refuses.
    factors = {name: each.factors.clone() for name, each in found if getattr(each, "factors", None) is not None}
    if not factors:
        raise RuntimeError("The model has no int8 layers; expected some. Call optimize_for_inference('int8') before.")
    with staged(Path(path).parent) as folder:  # a temporary name until the file is complete
        save_file(factors, folder / Path(path).name, metadata={"format": "pt"})


def load_factors(path: str | os.PathLike, layers: Mapping[str, nn.Linear]) -> Factors:
    """Returns the factors that `save_calibration` wrote.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is not a file of factors, or those of another model.
    """
    try:
        factors = load_file(path)
    except safetensors.SafetensorError as error:
        raise ValueError(f"{path} is damaged or no safetensors file ({error}); expected calibration factors.") from None
    for name in sorted(factors.keys() | layers.keys()):
        found = factors.get(name, torch.empty(0))
        shape = (layers[name].in_features,) if name in layers else None
        if found.shape != shape or not ((found > 0) & found.isfinite()).all():
            raise ValueError(
                f"{path} has missing, unexpected or invalid factors for {name}; expected those of this "
                "model, positive and finite. Pass batches as calibration, or None."
            )
    return factors
