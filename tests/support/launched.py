"""What test_training_processes has `accelerate launch` run: a fine-tuning that also writes down its first gradients.

launched.py GRADIENTS.pt [flags of finetune_classification.py]
"""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

import finetune_classification
from toolkit.finetuning.loop import Training


def main(argv: list[str]) -> int:
    step = Training.step

    def write_down_and_step(self, group):
        if self.progress.step == 0:
            gradients = {name.removeprefix("module."): whole(each.grad) for name, each in self.model.named_parameters()}
            if self.accelerator.is_main_process:
                torch.save(gradients, argv[0])
        step(self, group)

    Training.step = write_down_and_step
    try:
        return finetune_classification.main(argv[1:])
    finally:
        Training.step = step


def whole(gradient: torch.Tensor) -> torch.Tensor:
    """Of a sharded gradient all parts."""
    return gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient.clone()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
