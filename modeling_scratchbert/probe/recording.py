"""Records the probe of a model: the digests of its tensors, and the outputs of a forward pass."""

import copy
import hashlib
import json
from pathlib import Path

import torch
from transformers import PreTrainedConfig
from transformers.utils import logging

from ..embeddings import sinusoidal_table

logger = logging.get_logger(__name__)


def probe_name(variant: str | None = None) -> str:
    """Return the name of the probe of weights with this variant, such as "fp16"."""
    return f"probe.{variant}.json" if variant else "probe.json"


def write_probe(model, folder: Path, variant: str | None = None) -> None:
    """Write the probe of a model into `folder`, in the first process. If there is none, log the reason as a warning."""
    name = probe_name(variant)
    if torch.distributed.is_available() and torch.distributed.is_initialized() and torch.distributed.get_rank():
        return
    try:
        if (reason := why_unverifiable(model)) is None:
            (folder / name).write_text(json.dumps(make_probe(model), indent=1) + "\n", encoding="utf-8")
    except Exception as error:  # a model that raises here can still be saved
        reason = f"raises {error!r} while its probe is recorded"
    if reason:
        logger.warning_once(f"The model {reason}; it is saved without {name}, which verify=True expects.")


def why_unverifiable(model) -> str | None:
    """Return why the tensors of the model have no digests, as the predicate of a sentence; None if they have."""
    tensors = [*model.parameters(), *model.buffers()]
    if any(tensor.is_meta for tensor in tensors):
        return "is offloaded or has no values"
    flags: list = [getattr(model, name, None) for name in ("hf_quantizer", "_hf_peft_config_loaded", "_tp_size")]
    flags += [type(module).__module__.startswith("torch.distributed.") for module in model.modules()]
    # A parameter of DeepSpeed has an id.
    flags += [type(each) not in (torch.nn.Parameter, torch.Tensor) or hasattr(each, "ds_id") for each in tensors]
    return "is quantised or sharded over processes, or has adapters" if any(flags) else None


# ----------------------------------------------------------------------------------------------------------- the probe


def make_probe(model) -> dict:
    """Return the probe of a model: JSON with

    - `class`: the name of its class;
    - `tensors`: the SHA-256 of the bytes of each tensor in its state dict, tied ones included;
    - `tied`: for each tensor that has several names, the first of them;
    - `inputs`: the arguments of a forward pass;
    - `outputs`: the first numbers that the base model and the model head return for them, in float32 on a CPU;
    - `custom_modules`: see that function. If there are any, `inputs` and `outputs` are empty.
    """
    state, custom, first = model.state_dict(), custom_modules(model), dict[tuple, str]()
    places = {name: (held.data_ptr(), held.shape, held.stride(), held.device) for name, held in state.items()}
    tied = {name: first.setdefault(place, name) for name, place in places.items()}
    digests = {name: digest(state[name]) for name in first.values()}
    inputs = {} if custom else make_inputs(model)
    outputs = compute_outputs(model, inputs, {}, with_head=True) if inputs else {}
    return {
        "class": type(model).__name__,
        "inputs": inputs,
        "outputs": outputs,
        "custom_modules": custom,
        "tensors": {name: digests[tied[name]] for name in state},
        "tied": {name: other for name, other in tied.items() if other != name},
    }


def digest(tensor: torch.Tensor) -> str:
    """Return the SHA-256 of a tensor's bytes, as they are in a file of safetensors."""
    return hashlib.sha256(to_bits(tensor).numpy().data).hexdigest()


def to_bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bits of a tensor as integers of the same size, `(numbers,)`."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(getattr(torch, f"int{8 * tensor.element_size()}"))


def custom_modules(model) -> list[str]:
    """Return the class names of the modules that are neither ours nor of torch: nothing is known of their arguments."""
    # The classes of the model may come from a copy of this package in a checkpoint.
    base = next(cls for cls in type(model).__mro__ if cls.__name__ == "ScratchBertPreTrainedModel")
    known = (f"{base.__module__.rpartition('.')[0]}.", "torch.nn.", "transformers.activations")
    return sorted({type(each).__name__ for each in model.modules() if not type(each).__module__.startswith(known)})


def make_inputs(model) -> dict[str, list]:
    """Return the arguments of a forward pass of two rows, the second with padding."""
    config, tables = model.config, [getattr(module, "word_embeddings", None) for module in model.modules()]
    # `set_input_embeddings` does not change the configuration.
    num_ids = min([config.vocab_size, *(table.num_embeddings for table in tables if table is not None)])
    length = min(8, config.max_position_embeddings)
    ids = [[i * 7919 % num_ids for i in range(start, start + length)] for start in (1, 1 + length)]
    mask = [[1] * length, [int(i <= length // 2) for i in range(length)]]
    types = [int(i >= length // 2) % config.type_vocab_size for i in range(length)]
    inputs = {"input_ids": ids, "attention_mask": mask, "token_type_ids": [types, types]}
    return inputs | ({"decoder_input_ids": [row[::-1] for row in ids]} if config.is_encoder_decoder else {})


# ---------------------------------------------------------------------------------------------------- the forward pass


def compute_outputs(model, inputs: dict[str, list], tensors: dict[str, torch.Tensor], with_head: bool) -> dict:
    """Return the first numbers of each output of the base model and, if requested, of the model head, in float32 on a
    CPU.

    Args:
        inputs: see `make_inputs`.
        tensors: values that replace those of the model's tensors, by name.
    """
    model = _plain_copy(model, tensors)
    batch = {name: torch.tensor(rows, device="cpu") for name, rows in inputs.items()}
    last = len(inputs["input_ids"][0]) // 2  # the last token of the second row, and one to which a decoder leads up
    options = {"output_attentions": False, "output_hidden_states": False, "return_dict": True}
    with torch.no_grad(), torch.device("cpu"), torch.autocast("cpu", enabled=False):
        if model.config.add_cross_attention:
            options["encoder_hidden_states"] = model.get_input_embeddings()(batch["input_ids"])
        outputs = dict(model.base_model(**batch, **options))
        if type(model).__name__.endswith("ForMultipleChoice"):
            batch = {name: rows[None] for name, rows in batch.items()}
        outputs |= model(**batch, **options) if with_head else {}
    rows = {n: (t[:, last] if t.ndim == 3 else t).tolist() for n, t in outputs.items() if isinstance(t, torch.Tensor)}
    return {name: [[round(x, 6) for x in row[: last + 1]] for row in table] for name, table in rows.items()}


def _plain_copy(model, tensors: dict[str, torch.Tensor]):
    """Return the model in float32 on the CPU, in evaluation mode, with eager attention, and without hooks: it computes
    the same wherever the model is and whatever observes it. The copy shares float32 tensors on the CPU and all other
    attributes with the model."""
    own = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    memo: dict = {id(tensor): _in_float32(tensors.get(name, tensor)) for name, tensor in own}
    for module in model.modules():
        for name, value in vars(module).items():
            _share(memo, name, value)
        if type(module).__name__ == "SinusoidalPositions":
            memo[id(module.table)] = _exact_table(memo[id(module.table)], module.table.dtype)
    model = copy.deepcopy(model, memo)
    for module in model.modules():
        vars(module).pop("forward", None)  # replaced in the instance, as Accelerate does for autocast
        # `__call__` calls `_compiled_call_impl` in place of hooks. The length need not be a multiple of `chunk_size`.
        vars(module).update(training=False, chunk_size=0, _compiled_call_impl=module.forward)
    return model


def _share(memo: dict, name: str, value) -> None:
    """Enter what a copy of a module has in place of an attribute: a configuration with eager attention, or the
    attribute itself; but not its tensors and modules."""
    if isinstance(value, PreTrainedConfig):
        memo[id(value)] = copy.copy(value)
        memo[id(value)]._attn_implementation = "eager"
    elif not isinstance(value, torch.nn.Module) and name not in ("_parameters", "_buffers", "_modules"):
        memo.setdefault(id(value), value)


def _in_float32(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", torch.float32 if tensor.is_floating_point() else tensor.dtype)


def _exact_table(table: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the sinusoidal table in float32 if `table` is that table rounded to `dtype`, else `table`: it is not in
    the file, from which other tensors are taken."""
    exact = sinusoidal_table(*table.shape).to("cpu", torch.float32)
    return exact if torch.allclose(table, exact, rtol=0, atol=torch.finfo(dtype).eps) else table
