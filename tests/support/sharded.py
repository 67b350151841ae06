"""What test_tensor_parallel has `torchrun` run: every process opens its part of each model, and together they compute.

sharded.py FOLDER    with a folder for each of CASES, and inputs.pt
"""

import os
import sys
from pathlib import Path

import torch
from torch import nn
from transformers import AutoModel
from transformers.distributed import DistributedConfig

sys.path.insert(0, str(Path(__file__).parents[1]))

from support.models import OURS

# Each class, and more of the same classes, to what their names have before the dash.
CASES = (*OURS, "ForMaskedLM-of-BERT", "ForMaskedLM-untied", "ForCausalLM-crossed", "ForConditionalGeneration-tied")


def head_of(case: str) -> str:
    return case.partition("-")[0]


def compute(model: nn.Module, case: str, inputs: dict, labelled: dict) -> tuple[dict, dict]:
    """Return outputs and gradients of a batch with padding, of a model that is whole or in parts."""
    model.eval()
    with torch.no_grad():
        passes = {
            "unpadded": model(**inputs, padding_free=True),
            "padded": model(**inputs),
            "eager": model(**inputs, output_attentions=True),
        }
    outputs = {
        f"{name}.{field}": value
        for name, fields in passes.items()
        for field, value in fields.items()
        if torch.is_tensor(value)
    }
    if case == "Model":
        outputs["attentions"] = torch.cat(passes["eager"].attentions)
    if model.can_generate():
        prompt = {name: value for name, value in inputs.items() if name != "decoder_input_ids"}
        if head_of(case) == "ForCausalLM":  # prompts have their padding on the left
            prompt = {name: value.flip(1) if value.ndim == 2 else value for name, value in prompt.items()}
        for beams in (1, 3):
            outputs[f"generate.{beams}"] = model.generate(**prompt, max_new_tokens=6, num_beams=beams, do_sample=False)
    result = model(**labelled)
    loss = result.loss if "loss" in result else result.last_hidden_state.square().mean()
    loss.backward()
    gradients = {name: whole(each.grad) for name, each in model.named_parameters() if each.grad is not None}
    return outputs | {"loss": loss.detach()}, gradients


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor that is in parts as a whole."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def local_shape(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the shape of the part that this process has."""
    return tuple((tensor.to_local() if hasattr(tensor, "to_local") else tensor).shape)


def main(folder: Path) -> None:
    results = {}
    for case, batches in torch.load(folder / "inputs.pt").items():
        # The second is transformers' older spelling.
        options = {"distributed_config": DistributedConfig(tp_plan="auto")} if case != "Model" else {"tp_plan": "auto"}
        auto_class = AutoModel if case == "Model" else OURS[head_of(case)]
        model = auto_class.from_pretrained(folder / case, **options)
        shapes = {name: local_shape(parameter) for name, parameter in model.named_parameters()}
        results[case] = *compute(model, case, **batches), shapes
        model.save_pretrained(folder / f"{case}-saved")
    torch.save(results, folder / f"results-{os.environ['RANK']}.pt")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]))
    torch.distributed.destroy_process_group()
