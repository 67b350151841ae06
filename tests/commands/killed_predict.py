"""Runs of predict.py that are killed before each of their changes of a folder.

killed_predict.py BEFORE [arguments of predict.py, of which the folder of --output is the last]

BEFORE: a folder that the outputs are copies of; - for none. The outputs are OUTPUT-1, OUTPUT-2, and so on: a run is
killed before it replaces or removes its first file, its second one, and so on, and is then repeated. The last run has
fewer changes. Prints the exit code of each run as a JSON list; negative for a signal.

The parent computes nothing, because a forked child of a process with threads of torch hangs.
"""

import json
import os
import shutil
import signal
import sys
from itertools import count
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

import predict
from toolkit.corpus import tasks, workers  # noqa: F401  (what every child needs)
from toolkit.trust import import_package

import_package()


def run(argv: list[str], changes: float) -> int:
    """The exit code of a child, which is killed before it changes the folder for the time `changes`."""
    if (child := os.fork()) == 0:
        done = count(1)

        def counted(function):
            def call(*given, **options):
                if next(done) == changes:
                    os.kill(os.getpid(), signal.SIGKILL)
                return function(*given, **options)

            return call

        os.replace, os.remove = counted(os.replace), counted(os.remove)
        os._exit(predict.main(argv))
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def main(before: str, *argv: str) -> None:
    codes = []
    for changes in count(1):
        output = f"{argv[-1]}-{changes}"
        if before != "-":
            shutil.copytree(before, output)
        codes.append(run([*argv[:-1], output], changes))
        if codes[-1] != -signal.SIGKILL:
            break
        codes.append(run([*argv[:-1], output], float("inf")))
    print(json.dumps(codes))


if __name__ == "__main__":
    main(*sys.argv[1:])
