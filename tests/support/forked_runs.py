"""Runs of train.py in forked children, which are killed or get a signal, until one ends by itself.

forked_runs.py SEED KILLS [arguments of train.py]

Prints a JSON line: the exit code of each child, negative for a signal. The parent imports everything and computes
nothing, because a forked child of a process with threads of torch hangs.
"""

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

import train
from toolkit import training
from toolkit.tasks import CLASSES, task_class

for name in CLASSES:
    task_class(name)


def run(argv: list[str], seconds: float | None = None, dies_in_save: bool = False) -> int:
    """The exit code of a child. It is killed after some seconds, or when it has written a checkpoint's files."""
    if (child := os.fork()) == 0:
        if dies_in_save:
            training.flush_to_disk = lambda _: os.kill(os.getpid(), signal.SIGKILL)
        os._exit(train.main(argv))
    if seconds is not None:
        time.sleep(seconds)
        os.kill(child, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def main(seed: str, kills: str, *argv: str) -> None:
    output = next(each for each in argv if each.startswith("--output_dir="))
    began = time.monotonic()
    codes = [run([*argv, f"{output}-whole"])]
    duration = time.monotonic() - began
    draw = random.Random(int(seed))
    resumed = [*argv, "--resume_from_checkpoint"]
    codes += [run(resumed, dies_in_save=True)]
    for _ in range(int(kills)):
        codes.append(run(resumed, seconds=draw.uniform(0.1, 0.4) * duration))
        if codes[-1] == 0:
            break
    else:
        codes.append(run(resumed))
    print(json.dumps(codes))


if __name__ == "__main__":
    main(*sys.argv[1:])
