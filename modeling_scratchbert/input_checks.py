"""What a forward pass refuses, and what it then says. Shapes are always checked. Values are checked where that costs
nothing: for eager tensors on the CPU, so that nothing waits for an accelerator and nothing breaks a trace."""

import torch
from transformers.utils.import_utils import is_tracing


def check_inputs(config, input_ids, inputs_embeds, attention_mask, token_type_ids, position_ids, past_length) -> None:
    """Checks the arguments of `ScratchBertModel.forward`.

    Raises:
        ValueError: an argument has a wrong shape, dtype or value; the message names it, what it got and what it wants.
    """
    if (input_ids is None) == (inputs_embeds is None):
        got = "neither" if input_ids is None else "both"
        raise ValueError(f"Give exactly one of input_ids and inputs_embeds; got {got}.")
    if input_ids is not None:
        _check_ids("input_ids", input_ids, config.vocab_size, "vocab_size")
        if input_ids.ndim != 2:
            raise ValueError(f"input_ids has shape {_shape(input_ids)}; it wants (batch, length).")
        batch, length = input_ids.shape
    else:
        if inputs_embeds.ndim != 3 or inputs_embeds.shape[-1] != config.hidden_size:
            raise ValueError(
                f"inputs_embeds has shape {_shape(inputs_embeds)}; it wants (batch, length, {config.hidden_size})."
            )
        batch, length = inputs_embeds.shape[:2]

    limit = config.max_position_embeddings
    if position_ids is None and isinstance(past_length, int) and past_length + length > limit:
        cached = f" after {past_length} in the cache" if past_length else ""
        raise ValueError(
            f"The sequence has {length} tokens{cached}, and max_position_embeddings is {limit}. Truncate it: "
            f"tokenizer(text, truncation=True, max_length={limit}), or split it into windows."
        )
    for name, ids, size, field in (
        ("token_type_ids", token_type_ids, config.type_vocab_size, "type_vocab_size"),
        ("position_ids", position_ids, limit, "max_position_embeddings"),
    ):
        if ids is None:
            continue
        if ids.ndim != 2 or ids.shape[0] not in (1, batch) or ids.shape[1] != length:
            raise ValueError(f"{name} has shape {_shape(ids)}; it wants {(batch, length)}, like the tokens.")
        _check_ids(name, ids, size, field)
    check_mask("attention_mask", attention_mask, batch, length, past_length + length)


def check_mask(name: str, mask, batch: int, queries: int, keys: int) -> None:
    """Checks a padding mask `(batch, keys)` or a full one `(batch, heads, queries, keys)`. A cache whose size only
    tensors tell, and the kernels' own mask objects, are left to the kernels.

    Raises:
        ValueError: the mask has another shape.
    """
    if not isinstance(mask, torch.Tensor) or not isinstance(keys, int | torch.SymInt):
        return
    if mask.ndim == 4 and mask.dtype != torch.bool and not mask.is_floating_point():
        raise ValueError(
            f"{name} is a full mask of {mask.dtype}; it wants a boolean one (True: may look), or a floating one, which "
            "is added to the scores."
        )
    if mask.ndim == 2:
        fits = mask.shape[0] == batch and mask.shape[1] == keys
    else:
        fits = (
            mask.ndim == 4 and mask.shape[0] in (1, batch) and mask.shape[2] in (1, queries) and mask.shape[3] == keys
        )
    if not fits:
        raise ValueError(
            f"{name} has shape {_shape(mask)}; it wants {(batch, keys)}, 1 for a token and 0 for padding, or a full "
            f"mask {(batch, 'heads or 1', queries, keys)}."
        )


def _check_ids(name: str, ids: torch.Tensor, size: int, field: str) -> None:
    if ids.is_floating_point() or ids.dtype == torch.bool:
        raise ValueError(f"{name} has dtype {ids.dtype}; it wants whole numbers, torch.long.")
    if ids.device.type != "cpu" or ids.numel() == 0 or is_tracing(ids):
        return
    low, high = (bound.item() for bound in ids.aminmax())
    if low < 0 or high >= size:
        raise ValueError(
            f"{name} holds {low if low < 0 else high}; it wants ids from 0 to {size - 1} ({field} is {size})."
        )


def _shape(tensor: torch.Tensor) -> tuple[int, ...]:
    return tuple(tensor.shape)
