"""Runs of train.py in forked children, which are killed or get a signal, until one ends by itself.

forked_runs.py SEED KILLS [arguments of train.py]

It is killed in the saves of steps 4 and 9, and KILLS times at random moments.

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


def run(argv: list[str], seconds: float | None = None, step: int | None = None) -> int:
    """The exit code of a child. It is killed after some seconds, or within the save of a step."""
    if (child := os.fork()) == 0:
        flush = training.flush_to_disk

        def flush_or_die(folder: Path) -> None:
            if folder.name.startswith(f".checkpoint-{step}-"):
                os.kill(os.getpid(), signal.SIGKILL)
            flush(folder)

        training.flush_to_disk = flush_or_die
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
    codes += [run(resumed, step=step) for step in (4, 9)]
    for _ in range(int(kills)):
        codes.append(run(resumed, seconds=draw.uniform(0.1, 0.4) * duration))
        if codes[-1] == 0:
            break
    else:
        codes.append(run(resumed))
    print(json.dumps(codes))


if __name__ == "__main__":
    main(*sys.argv[1:])
