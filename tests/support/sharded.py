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

# Each head by its class; and more of the same classes, to what their names have before the dash.
CASES = (*OURS, "ForMaskedLM-of-BERT", "ForMaskedLM-untied", "ForCausalLM-crossed", "ForConditionalGeneration-tied")
GENERATORS = ("ForCausalLM", "ForConditionalGeneration")


def head_of(case: str) -> str:
    return case.partition("-")[0]


def compute(model: nn.Module, case: str, inputs: dict, labelled: dict) -> dict:
    """What a model makes of a batch with padding, whole or in parts: `{name: tensor}`."""
    model.eval()
    with torch.inference_mode():
        passes = {"packed": model(**inputs, padding_free=True), "padded": model(**inputs)}
    with torch.no_grad():
        passes["eager"] = model(**inputs, output_attentions=True)
    results = {
        f"{name}.{field}": value.clone()
        for name, outputs in passes.items()
        for field, value in outputs.items()
        if isinstance(value, torch.Tensor)
    }
    if case == "Model":
        results["attentions"] = torch.cat(passes["eager"].attentions)
    if head_of(case) in GENERATORS:
        prompt = {name: value for name, value in inputs.items() if name != "decoder_input_ids"}
        if head_of(case) == "ForCausalLM":  # prompts have their padding on the left
            prompt = {name: value.flip(1) if value.ndim == 2 else value for name, value in prompt.items()}
        for beams in (1, 3):
            results[f"generate.{beams}"] = model.generate(**prompt, max_new_tokens=6, num_beams=beams, do_sample=False)
    outputs = model(**labelled)
    loss = outputs.loss if "loss" in outputs else outputs.last_hidden_state.square().mean()
    loss.backward()
    results["loss"] = loss.detach()
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            results[f"gradient.{name}"] = whole(parameter.grad)
    return results


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Of a tensor in parts all of them."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def part(tensor: torch.Tensor) -> torch.Tensor:
    """What of it this process holds."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def main(folder: Path) -> None:
    rank, notes = os.environ["RANK"], {}
    given = torch.load(folder / "inputs.pt")
    for case in CASES:
        # The second is transformers' older spelling.
        asked = {"distributed_config": DistributedConfig(tp_plan="auto")} if case != "Model" else {"tp_plan": "auto"}
        opened = AutoModel if case == "Model" else OURS[head_of(case)]
        model = opened.from_pretrained(folder / case, **asked)
        parts = {name: tuple(part(parameter).shape) for name, parameter in model.named_parameters()}
        notes[case] = {"results": compute(model, case, **given[case]), "parts": parts}
        model.save_pretrained(folder / f"{case}-saved")
        assert not (folder / f"{case}-saved" / "probe.json").exists()
    torch.save(notes, folder / f"notes-{rank}.pt")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]))
    torch.distributed.destroy_process_group()
