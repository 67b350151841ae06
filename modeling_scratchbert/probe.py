"""`probe.json`, beside the weights of a saved model: a digest of each tensor, and what the model computes.

`save_pretrained` writes it, and `from_pretrained(verify=True)` compares the loaded model with it. It shows damage and
wrong loading, not forgery: whoever can change the weights can change the file as well.
"""

import copy
import hashlib
import json
import os
from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub.errors import LocalEntryNotFoundError
from torch import nn
from transformers import PreTrainedConfig
from transformers.modeling_utils import load_state_dict
from transformers.utils import cached_file

from .embeddings import SinusoidalPositions, sinusoidal_table

PACKAGE = __name__.rpartition(".")[0]
FIELDS = ("class", "tensors", "inputs", "outputs")

# Outputs may differ by this much, absolutely or relatively.
TOLERANCE = 1e-3


def probe_name(variant: str | None = None) -> str:
    """The name of the probe of weights with this variant, such as "fp16"."""
    return f"probe.{variant}.json" if variant else "probe.json"


def read_probe(source, variant: str | None = None, **hub_options) -> dict[str, Any]:
    """Return the content of the probe of `source`, a folder, a hub id or a file of weights. Raise OSError if it has
    none, or if it cannot be read."""
    name, folder = probe_name(variant), Path(source).parent if source and os.path.isfile(source) else source
    path: Any = None
    try:
        path = None if source is None else cached_file(folder, name, **hub_options)
    except OSError as error:
        if isinstance(error.__cause__, LocalEntryNotFoundError):  # the Hub cannot be reached
            raise
    if path is None:
        raise OSError(
            f"{source or 'state_dict'} has no {name}; verify=True expects the one that save_pretrained writes beside "
            "the weights. Save the model again, or load it without verify=True."
        )
    try:
        probe = json.loads(Path(path).read_text(encoding="utf-8"))
    except ValueError:
        probe = None
    if not isinstance(probe, dict) or not all(name in probe for name in FIELDS):
        raise OSError(f"{path} is damaged; expected JSON with {', '.join(FIELDS)}. Download or save it again.")
    return probe


def why_unverifiable(model) -> str | None:
    """Return why the tensors of the model have no digests, as the predicate of a sentence; None if they have."""
    if getattr(model, "hf_quantizer", None) is not None:
        return "is quantised"
    if getattr(model, "_hf_peft_config_loaded", False):
        return "has adapters"
    if getattr(model, "_tp_size", None) is not None or any(
        type(module).__module__.startswith("torch.distributed.") for module in model.modules()
    ):
        return "is sharded over processes"
    for tensor in chain(model.parameters(), model.buffers()):
        if tensor.is_meta:
            return "is offloaded or has no values"
        if type(tensor) not in (nn.Parameter, torch.Tensor) or hasattr(tensor, "ds_id"):  # a parameter of DeepSpeed
            return "is quantised or sharded over processes"
    return None


# ----------------------------------------------------------------------------------------------------------- the probe


def make_probe(model) -> dict[str, Any]:
    """Return the probe of a model: JSON with

    - `class`: the name of its class;
    - `tensors`: the SHA-256 of the bytes of each tensor in its state dict, tied ones included;
    - `inputs`: the arguments of a forward pass of two rows, the second with padding;
    - `outputs`: the first numbers that the base model and the model head return for them, in float32 on a CPU. Empty if
      a part of the model is not of this package, because nothing is known about its arguments then.
    """
    state = model.state_dict()
    digests: dict[Any, str] = {}
    for tensor in state.values():
        if _place(tensor) not in digests:
            digests[_place(tensor)] = digest(tensor)
    inputs = _inputs(model.config) if _is_plain(model) else {}
    return {
        "class": type(model).__name__,
        "tensors": {name: digests[_place(tensor)] for name, tensor in state.items()},
        "inputs": inputs,
        "outputs": _outputs(model, inputs, {}, with_head=True) if inputs else {},
    }


def _place(tensor: torch.Tensor) -> tuple:
    """Return what only tied tensors have in common."""
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.device


def digest(tensor: torch.Tensor) -> str:
    """The SHA-256 of a tensor's bytes, as they are in a file of safetensors."""
    content: Any = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return hashlib.sha256(content).hexdigest()


def _is_plain(model) -> bool:
    """Return whether all modules are of this package or of torch."""
    origins = (f"{PACKAGE}.", "torch.nn.", "transformers.activations")
    return all(type(module).__module__.startswith(origins) for module in model.modules())


def _inputs(config) -> dict[str, list]:
    """Return the arguments of a forward pass, `(2, T)`."""
    length = min(8, config.max_position_embeddings)
    ids = (torch.arange(1, 2 * length + 1) * 7919 % config.vocab_size).view(2, length)
    mask = torch.ones_like(ids)
    mask[1, length // 2 + 1 :] = 0
    types = (torch.arange(length) >= length // 2).long() % config.type_vocab_size
    inputs = {"input_ids": ids, "attention_mask": mask, "token_type_ids": types.expand(2, length)}
    if config.is_encoder_decoder:
        inputs["decoder_input_ids"] = ids.flip(1)
    return {name: tensor.tolist() for name, tensor in inputs.items()}


@torch.no_grad()
def _outputs(model, inputs: dict[str, list], tensors: Mapping[str, torch.Tensor], with_head: bool) -> dict[str, list]:
    """Return the first numbers of each output of the base model and, if requested, of the model head.

    Args:
        inputs: see `make_probe`.
        tensors: values that replace those of the model's tensors, by name.
    """
    model = _plain_copy(model, tensors)
    batch: dict[str, Any] = {name: torch.tensor(rows, device="cpu") for name, rows in inputs.items()}
    last = batch["input_ids"].shape[1] // 2  # the last token of the second row, and one to which a decoder leads up
    options: dict[str, Any] = {"output_attentions": False, "output_hidden_states": False, "return_dict": True}
    if model.config.add_cross_attention:
        words = model.get_input_embeddings().weight[batch["input_ids"]]
        options["encoder_hidden_states"] = words.to(torch.float32)
    if with_head and type(model).__name__.endswith("ForMultipleChoice"):
        batch = {name: tensor[None] for name, tensor in batch.items()}
    base, returned = model.base_model, {}

    def record(*args, **kwargs):
        outputs = base.forward(*args, **kwargs)
        returned.update(outputs)
        return outputs

    base.__dict__["_compiled_call_impl"] = record  # the base model's outputs, too, are those of the one pass
    with torch.autocast("cpu", enabled=False):
        returned |= (model if with_head else base)(**batch, **options)
    tables = {name: value for name, value in returned.items() if isinstance(value, torch.Tensor)}
    rows = {name: table[:, last] if table.ndim == 3 else table for name, table in tables.items()}
    return {name: [[round(x, 6) for x in row] for row in table[:, : last + 1].tolist()] for name, table in rows.items()}


def _plain_copy(model, tensors: Mapping[str, torch.Tensor]):
    """Return the model in float32 on the CPU, in evaluation mode, with eager attention, and without hooks: it computes
    the same wherever the model is and whatever observes it. It shares the memory of float32 tensors on the CPU."""
    own = chain(model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False))
    values = {id(tensor): _in_float32(tensors.get(name, tensor)) for name, tensor in own}
    copies: dict[int, Any] = {}
    configs: dict[int, PreTrainedConfig] = {}
    for module in model.modules():
        copies[id(module)] = clone = object.__new__(type(module))
        clone.__dict__.update(module.__getstate__(), training=False)
        clone.__dict__.pop("forward", None)  # replaced in the instance, as Accelerate does for autocast
        for key, value in clone.__dict__.items():
            if isinstance(value, PreTrainedConfig):
                clone.__dict__[key] = configs.setdefault(id(value), _with_eager_attention(value))
        for kind in ("_parameters", "_buffers"):
            held = getattr(clone, kind).items()
            clone.__dict__[kind] = {
                name: values[id(tensor)] if id(tensor) in values else _in_float32(tensor) for name, tensor in held
            }
        if isinstance(clone, SinusoidalPositions):
            clone.__dict__["_buffers"]["table"] = _exact_table(clone.table, module.table.dtype)
        clone.__dict__["_compiled_call_impl"] = clone.forward  # called in place of `__call__`, which calls hooks
    for clone in copies.values():
        clone.__dict__["_modules"] = {name: copies.get(id(child)) for name, child in clone._modules.items()}
    return copies[id(model)]


def _in_float32(tensor: torch.Tensor | None) -> torch.Tensor | None:
    if tensor is None:
        return None
    return tensor.detach().to("cpu", torch.float32 if tensor.is_floating_point() else tensor.dtype)


def _with_eager_attention(config):
    config = copy.copy(config)
    config._attn_implementation = "eager"
    return config


def _exact_table(table: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the sinusoidal table in float32 if `table` is that table rounded to `dtype`, else `table`: it is not in
    the file, from which other tensors are taken."""
    exact = sinusoidal_table(*table.shape).to(torch.float32)
    return exact if torch.allclose(table, exact, rtol=0, atol=torch.finfo(dtype).eps) else table


# ------------------------------------------------------------------------------------------------------ the comparison


def check_probe(model, probe: dict[str, Any], source, files: list[str]) -> None:
    """Raise ValueError unless a loaded model is the one whose probe this is.

    In another dtype, the model is expected to have the saved tensors rounded to it; outputs are computed with the saved
    ones. The outputs of a model head are compared if the class is the one that was saved.

    Args:
        files: the files of weights that the model was loaded from.
    """
    if (why := why_unverifiable(model)) is not None:
        raise ValueError(
            f"The model {why}; verify=True expects all of it in memory, in floating point. Load it that way once, or "
            "without verify=True."
        )
    tensors = {name: tensor for file in files for name, tensor in load_state_dict(file).items()}
    by_digest = _check_files(tensors, probe["tensors"], source)
    saved = _check_tensors(model, probe["tensors"], by_digest, source)
    if probe["inputs"] and _is_plain(model):
        _check_outputs(model, probe, saved)


def _check_files(tensors: dict[str, torch.Tensor], recorded: dict[str, str], source) -> dict[str, torch.Tensor]:
    """Return the tensors of the files by digest. Raise ValueError unless they are those that were saved; of tied ones,
    a file has one."""
    found = {name: digest(tensor) for name, tensor in tensors.items()}
    present = set(found.values())
    changed = [name for name in found if found[name] != recorded.get(name)]
    changed += [name for name in recorded if name not in found and recorded[name] not in present]
    if changed:
        raise ValueError(
            f"{_listed(changed)} in the files of {source} {_differ(changed)} from probe.json; expected the tensors "
            "that were saved. Download or save the checkpoint again."
        )
    return {found[name]: tensor for name, tensor in tensors.items()}


def _check_tensors(model, recorded: dict[str, str], by_digest: dict[str, torch.Tensor], source) -> dict:
    """Return the saved tensor of each in the model. Raise ValueError unless the model has these values."""
    prefix = f"{model.base_model_prefix}."
    state = model.state_dict()
    names: dict[str, str] = {}  # in the checkpoint: of the same class, of one with a head, or of the base model
    for name in state:
        candidates = (name, f"{prefix}{name}", name.removeprefix(prefix))
        names[name] = next(filter(recorded.__contains__, candidates), "")
    if missing := [name for name in state if not names[name]]:
        raise ValueError(
            f"{_listed(missing)} {'are' if len(missing) > 1 else 'is'} not in {source}, and random in the loaded "
            f"{type(model).__name__}; verify=True expects every tensor in the checkpoint. Load it with the class that "
            "was saved, or without verify=True."
        )
    saved = {name: by_digest[recorded[names[name]]] for name in state}
    if wrong := [name for name, tensor in state.items() if not _same_bits(tensor, saved[name])]:
        raise ValueError(
            f"{_listed(wrong)} {_differ(wrong)} in the loaded model from the files of {source}; expected the same "
            f"values. {_advice(model)}"
        )
    return saved


def _same_bits(tensor: torch.Tensor, saved: torch.Tensor) -> bool:
    """Return whether a tensor is the saved one, in its own dtype. NaN is equal to itself."""
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    pair = [each.detach().cpu().to(tensor.dtype).contiguous() for each in (tensor, saved)]
    return tensor.shape == saved.shape and torch.equal(*[each.reshape(-1).view(bits) for each in pair])


def _check_outputs(model, probe: dict[str, Any], saved: dict[str, torch.Tensor]) -> None:
    """Raise ValueError unless the model returns the recorded outputs."""
    computed = _outputs(model, probe["inputs"], saved, with_head=type(model).__name__ == probe["class"])
    for name in [name for name in computed if name in probe["outputs"]]:
        now, then = torch.tensor(computed[name]), torch.tensor(probe["outputs"][name])
        if now.shape != then.shape or not torch.allclose(now, then, TOLERANCE, TOLERANCE, equal_nan=True):
            raise ValueError(
                f"{name} of the loaded {type(model).__name__} begins with {_shown(now)}; expected {_shown(then)}, as "
                f"when it was saved. {_advice(model)}"
            )


def _shown(numbers: torch.Tensor) -> str:
    return ", ".join(f"{x:.4f}" for x in numbers.flatten()[:4].tolist())


def _advice(model) -> str:
    versions = f"transformers {model.config.transformers_version}, loaded with {transformers.__version__}"
    return f"It was saved with {versions}: load it with the former, and without arguments that change the model."


def _listed(names: list[str]) -> str:
    """The first names, and how many more there are."""
    first, more = ", ".join(names[:3]), len(names) - 3
    return f"{first} and {more} more" if more > 0 else first


def _differ(names: list[str]) -> str:
    return "differ" if len(names) > 1 else "differs"
