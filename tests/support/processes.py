"""Python processes of their own."""

import os
import subprocess
import sys
from pathlib import Path


def run_python(*arguments, cwd: Path, **environment: str) -> str:
    """Run Python in a folder, with a cache of remote code there, and return what it prints. An error fails the test."""
    environment = {**os.environ, "HF_MODULES_CACHE": str(cwd / "modules"), "HF_HUB_OFFLINE": "1", **environment}
    command = [sys.executable, *map(str, arguments)]
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done.stdout
