"""What `accelerate launch` runs: train.py, which also writes the gradients of its first update.

first_gradients.py FILE.pt [arguments of train.py]
"""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

import train


def main(file: str, argv: list[str]) -> int:
    step = train.step

    def write_and_step(run, update):
        if run.progress.step == 0 and run.accelerator.is_main_process:
            named = run.model.named_parameters()
            torch.save({name.removeprefix("module."): each.grad.clone() for name, each in named}, file)
        step(run, update)

    train.step = write_and_step
    try:
        return train.main(argv)
    finally:
        train.step = step


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
