"""Compares a loaded model with the probe of the one that was saved."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.modeling_utils import load_state_dict
from transformers.utils import cached_file, logging

from ..bert.files import weight_files
from ..checkpoints import HUB_OPTIONS
from .recording import compute_outputs, custom_modules, digest, probe_name, to_bits, why_unverifiable

logger = logging.get_logger(__name__)

# Outputs may differ by this much, absolutely or relatively.
TOLERANCE = 1e-3


def read_probe(source, variant: str | None = None, **hub_options) -> dict:
    """Return the content of the probe of `source`, a folder, a hub id or a file of weights. Raise OSError if it has
    none, or if it cannot be read."""
    name, folder = probe_name(variant), Path(source).parent if source and os.path.isfile(source) else source
    try:
        if source is None:
            raise FileNotFoundError
        path: Any = cached_file(folder, name, **hub_options)
    except OSError as error:
        missing = (
            f"{source or 'state_dict'} has no {name}; verify=True expects the one that save_pretrained writes "
            "beside the weights. Save the model again, or load it without verify=True."
        )
        raise OSError(missing) from error.__cause__  # in which `bert.files.explain` looks for its own
    try:
        probe = json.loads(Path(path).read_bytes())
        _check_structure(probe)
    except Exception as error:  # damaged JSON may have any structure
        raise OSError(f"{path} is damaged; expected what save_pretrained writes. Download or save it again.") from error
    return probe


def _check_structure(probe) -> None:
    """Raise an exception, of any class, unless a probe has the structure that `make_probe` returns."""
    tables = [torch.tensor(rows) for name in ("inputs", "outputs") for rows in probe[name].values()]
    # Earlier versions wrote neither `tied` nor `custom_modules`.
    custom = probe.setdefault("custom_modules", [] if tables else ["unknown"])
    texts = [probe["class"], *probe["tensors"].values(), *probe.get("tied", {}).values(), *custom]
    is_typed = all(isinstance(text, str) for text in texts) and all(table.ndim == 2 for table in tables)
    if not is_typed or bool(probe["inputs"]) != bool(probe["outputs"]) or bool(tables) == bool(custom):
        raise ValueError("a field is incomplete")


def probe_check(source, options: dict) -> Callable:
    """Read the probe of `source`, and return the function that compares a loaded model with it. `options` are those of
    `from_pretrained`."""
    hub_options = {name: options[name] for name in HUB_OPTIONS if name in options}
    probe = read_probe(source, options.get("variant"), **hub_options)

    def check(model) -> None:
        files = weight_files(source, options.get("variant"), options.get("use_safetensors"), **hub_options)
        check_probe(model, probe, source, files or [])

    return check


def check_probe(model, probe: dict, source, files: list[str]) -> None:
    """Raise ValueError unless a loaded model is the one whose probe this is, and OSError if the probe is damaged.

    In another dtype, the model is expected to have the saved tensors rounded to it; outputs are computed with the saved
    ones. The outputs of a model head are compared if the class is the one that was saved.

    Args:
        files: the files of weights that the model was loaded from.
    """
    if reason := why_unverifiable(model):
        raise ValueError(f"The model {reason}; verify=True expects floats in memory. Load it without verify=True.")
    stored = _check_files({name: held for file in files for name, held in load_state_dict(file).items()}, probe, source)
    _check_outputs(model, probe, _check_tensors(model, stored, source), source)


def _check_files(tensors: dict[str, torch.Tensor], probe: dict, source) -> dict[str, torch.Tensor]:
    """Return the tensor of the files for each name in the probe. Raise ValueError unless the tensors of the files are
    those that were saved; of tied ones, a file has one."""
    recorded = probe["tensors"]
    # Earlier versions recorded no ties: a name that the files do not have stands for a tensor of the same bytes.
    first = probe.get("tied", dict.fromkeys(recorded))
    identities = {name: (first.get(name, name), recorded[name]) for name in recorded}
    present = {identities[name]: tensor for name, tensor in tensors.items() if name in recorded}
    changed = [name for name, tensor in tensors.items() if digest(tensor) != recorded.get(name)]
    changed += [name for name in recorded if identities[name] not in present]
    if changed:
        raise ValueError(
            f"{_listed(changed)} in the files of {source} differ{'' if changed[1:] else 's'} from "
            "probe.json; expected the tensors that were saved. Download or save it again."
        )
    return {name: tensors.get(name, present[identities[name]]) for name in recorded}


def _check_tensors(model, stored: dict[str, torch.Tensor], source) -> dict[str, torch.Tensor]:
    """Return the stored tensor for each in the model. Raise ValueError unless the model has these values, in its own
    dtype."""
    state, prefix = model.state_dict(), f"{model.base_model_prefix}."
    # The checkpoint is of the base model, of a class with a head, or of the same class, whose names take precedence.
    candidates = ((name, key) for name in state for key in (name.removeprefix(prefix), f"{prefix}{name}", name))
    saved = {name: stored[key] for name, key in candidates if key in stored}
    if missing := [name for name in state if name not in saved]:
        raise ValueError(
            f"{_listed(missing)} {'are' if len(missing) > 1 else 'is'} not in {source}, and random in the "
            f"loaded {type(model).__name__}; verify=True expects every tensor in the checkpoint. Load it "
            "with the class that was saved, or without verify=True."
        )
    # Bits, because NaN is not equal to itself.
    if wrong := [n for n, held in state.items() if not torch.equal(to_bits(held), to_bits(saved[n].to(held.dtype)))]:
        raise ValueError(
            f"{_listed(wrong)} differ{'' if wrong[1:] else 's'} in the loaded model from the files of "
            f"{source}; expected the same values. {_advice(model)}"
        )
    return {name: saved[name].reshape(tensor.shape) for name, tensor in state.items()}


def _check_outputs(model, probe: dict, saved: dict[str, torch.Tensor], source) -> None:
    """Raise ValueError unless the model returns the recorded outputs. With custom modules, log a warning instead."""
    class_name, custom, expected = type(model).__name__, custom_modules(model), probe["custom_modules"]
    if class_name == probe["class"] and bool(custom) != bool(expected):
        raise ValueError(f"{class_name} has custom modules {custom}; expected {expected}. Load it without verify=True.")
    if custom or expected:
        reason = f"the saved or the loaded model has modules of other code ({', '.join(custom or expected)})"
        logger.warning(f"verify=True compared the tensors of {source}, and not the outputs: {reason}.")
        return
    try:
        computed = compute_outputs(model, probe["inputs"], saved, with_head=class_name == probe["class"])
        recorded = {name: probe["outputs"][name] for name in computed}
    except Exception as error:  # a model may raise any exception
        raise OSError(f"probe.json of {source} does not fit {class_name}: {error!r}. Save the model again.") from error
    for name in recorded:
        now, then = torch.tensor(computed[name]), torch.tensor(recorded[name])
        if now.shape != then.shape or not torch.allclose(now, then, TOLERANCE, TOLERANCE, equal_nan=True):
            raise ValueError(
                f"{name} of the loaded {class_name} begins with {computed[name][0][:4]}; expected "
                f"{recorded[name][0][:4]}, as when it was saved. {_advice(model)}"
            )


def _advice(model) -> str:
    versions = f"transformers {model.config.transformers_version}, loaded with {transformers.__version__}"
    return f"It was saved with {versions}: load it with the former, and without arguments that change the model."


def _listed(names: list[str]) -> str:
    """The first names, and how many more there are."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
