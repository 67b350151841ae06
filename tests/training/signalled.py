"""What `accelerate launch` runs: train.py, of which one process gets SIGTERM in the third update.

signalled.py RANK [arguments of train.py]
"""

import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

import train


def main(rank: str, argv: list[str]) -> int:
    step = train.step

    def step_and_signal(run, update):
        step(run, update)
        if run.progress.step == 2 and run.accelerator.process_index == int(rank):
            signal.raise_signal(signal.SIGTERM)

    train.step = step_and_signal
    return train.main(argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
