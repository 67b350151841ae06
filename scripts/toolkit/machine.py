"""The machine: its processor, and the versions of libraries."""

import importlib.metadata
import os
import platform
import re
import subprocess
from pathlib import Path

from modeling_scratchbert.cpu.library import find_library
from toolkit import cli
from toolkit.files import ROOT

CPU_INFO = Path("/proc/cpuinfo")
FLAGS = ("avx2", "avx_vnni", "avx512f", "avx512_vnni", "avx512_bf16", "avx512_fp16", "amx_tile", "amx_bf16", "amx_int8")
LIBRARIES = ("torch", "transformers", "sentence-transformers", *cli.LIBRARIES["bench"])


def processor() -> dict:
    """The processor: its name, its family, model and stepping (x86 on Linux; None elsewhere), and which of `FLAGS`, its
    instruction sets, it has and lacks. A virtual machine may hide instructions that its model has."""
    text = CPU_INFO.read_text(encoding="utf-8") if CPU_INFO.exists() else ""  # on Linux

    def field(name: str) -> str | None:
        found = re.search(rf"^{name}\s*: (.*)$", text, flags=re.MULTILINE)
        return found[1] if found else None

    has = (field("flags") or "").split()
    return {
        "processor": field("model name") or platform.processor() or platform.machine(),
        "family": field("cpu family"),
        "model": field("model"),
        "stepping": field("stepping"),
        "flags": [flag for flag in FLAGS if flag in has],
        "missing_flags": [flag for flag in FLAGS if has and flag not in has],
    }


def version(library: str) -> str | None:
    """The installed version; None if the library is not installed."""
    try:
        return importlib.metadata.version(library)
    except importlib.metadata.PackageNotFoundError:
        return None


def commit() -> str:
    """The commit of this clone, with "-dirty" if its files differ from it; empty in an installation, or without git."""
    # --git-dir: an installation may be within the clone of another project.
    command = "git --git-dir=.git describe --always --abbrev=40 --exclude=* --dirty"
    return subprocess.run(command, cwd=ROOT, shell=True, capture_output=True, text=True, check=False).stdout.strip()


def identity() -> dict:
    """The processor, its cores, what computes optimised models, the commit, and the versions of Python and of
    `LIBRARIES`, None where there is none."""
    found = find_library()
    return {
        **processor(),
        "engine": f"the library for {found[0]}" if found else "torch",
        "cores": os.cpu_count(),
        "commit": commit(),
        "python": platform.python_version(),
        "versions": {library: version(library) for library in LIBRARIES},
    }


def lines(machine: dict) -> list[str]:
    """What `identity` returns, as text."""
    libraries = ", ".join(f"{name} {version}" for name, version in machine["versions"].items() if version)
    numbers = [f"{name} {machine[name]}" for name in ("family", "model", "stepping") if machine[name] is not None]
    flags, missing = (", ".join(machine[name]) for name in ("flags", "missing_flags"))
    return [
        f"{', '.join([machine['processor'], *numbers])}; {machine['cores']} cores",
        f"instructions: {flags or 'unknown'}; missing: {missing or 'none'}",
        f"Python {machine['python']}, {libraries}; commit {machine['commit'] or 'unknown'}",
        f"optimised models are computed by {machine['engine']}",
    ]
