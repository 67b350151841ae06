"""PEFT's default target modules: the layers that it adapts if its configuration does not name any."""

import sys

from .names import BERT_TO_SCRATCHBERT


def add_default_target_modules(model_type: str) -> None:
    """Add BERT's default target modules, under our names, to PEFT's tables, if PEFT is imported.

    The tables, one for each method, are keyed by `model_type`. A model outside them has no other way to state its
    defaults, and would need `target_modules` in every configuration.
    """
    peft = sys.modules.get("peft.utils.constants")
    for name, table in vars(peft).items() if peft else ():
        is_default = name.startswith("TRANSFORMERS_MODELS_TO_") and name.endswith("_MODULES_MAPPING")
        if is_default and isinstance(table.get("bert"), list):
            table.setdefault(model_type, _our_names(table["bert"]))


def _our_names(targets: list[str]) -> list[str]:
    """The last part of our name for each module whose name in BERT ends with one of `targets`."""
    endings = tuple(f".{target}" for target in targets)
    return sorted({ours.rpartition(".")[2] for bert, ours in BERT_TO_SCRATCHBERT.items() if bert.endswith(endings)})
