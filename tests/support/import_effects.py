"""What an import of the package changes in a process that has opened a configuration by its own code.

import_effects.py FOLDER    with the folder `saved` of a model; prints a JSON object
"""

import json
import os
import sys
from pathlib import Path

import torch
import transformers
from transformers.activations import ACT2FN
from transformers.conversion_mapping import get_checkpoint_conversion_mapping
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS


def registries() -> dict[str, list[str]]:
    """Return what is registered with torch, transformers and PEFT."""
    from peft.utils import constants  # once imported, PEFT makes each configuration that is saved import the package

    peft_tables = vars(constants)
    return {
        "operators": [name for name in torch._C._dispatch_get_all_op_names() if "scratchbert" in name],
        "attention": sorted(ALL_ATTENTION_FUNCTIONS.keys()),
        "masks": sorted(ALL_MASK_ATTENTION_FUNCTIONS.keys()),
        "activations": sorted(ACT2FN),
        "names of weights": [str(get_checkpoint_conversion_mapping("scratchbert"))],
        "PEFT": [name for name in peft_tables if "TRANSFORMERS" in name and "scratchbert" in peft_tables[name]],
    }


def changes(before: dict[str, list[str]]) -> list[str]:
    return [name for name, entries in registries().items() if entries != before[name]]


def main(folder: str) -> None:
    os.chdir(folder)
    config = transformers.AutoConfig.from_pretrained("saved", trust_remote_code=True)
    own_code = f"{type(config).__module__.rpartition('.')[0]}."
    effects = {"files": sorted(name.removeprefix(own_code) for name in sys.modules if name.startswith(own_code))}
    config.save_pretrained("configuration")
    effects["saved"] = sorted(path.name for path in Path("configuration").glob("*.py"))
    assert "modeling_scratchbert" not in sys.modules
    before = registries()
    import modeling_scratchbert

    effects["import"] = changes(before)
    subpackages = tuple(f"modeling_scratchbert.{name}" for name in ("bert", "cpu", "probe"))
    effects["subpackages"] = [name for name in sys.modules if name.startswith(subpackages)]
    model = transformers.AutoModel.from_pretrained("saved")
    assert type(model) is modeling_scratchbert.ScratchBertModel
    ids = torch.tensor([[2, 7, 3]])
    model(ids)
    effects["forward pass"] = changes(before)
    model.optimize_for_inference()(ids)
    effects["optimisation"] = registries()["operators"]
    print(json.dumps(effects))


if __name__ == "__main__":
    main(sys.argv[1])
