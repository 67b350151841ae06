"""The processes of a run: on which devices, and with how many threads."""

import os


def processors() -> int:
    """The processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def devices_and_threads(args, resumed: int | None) -> tuple[list[str], int]:
    """The device of each process, and the threads of each. On CPUs, by default a process for each processor, or for as
    many processors as it has threads; on accelerators, one for each. A Ray cluster has devices of its own.

    Args:
        resumed: the threads of the run that is resumed; None: of a new run.

    Raises:
        ValueError: there are more processes than accelerators.
    """
    threads = args.threads_per_process or resumed or threads_of_environment()
    if args.engine == "ray":
        return [args.device or "cpu"] * (args.processes or 1), threads or 1
    import torch

    available = torch.accelerator.device_count() if torch.accelerator.is_available() else 0
    device = args.device or (torch.accelerator.current_accelerator().type if available else "cpu")
    if device == "cpu":
        devices = ["cpu"] * (args.processes or max(1, processors() // (threads or 1)))
    elif ":" in device:
        devices = [device]
    else:
        devices = [f"{device}:{number}" for number in range(args.processes or max(1, available))]
        if len(devices) > available:
            raise ValueError(
                f"--device {device}: {len(devices)} processes for {available} such devices; expected one for each"
            )
    return devices, threads or max(1, processors() // len(devices))


def threads_of_environment() -> int | None:
    """What OMP_NUM_THREADS says; None if it is not a positive integer, which OpenMP ignores, too."""
    text = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()  # a list has a number for each level of nesting
    return int(text) if text.isdecimal() and int(text) > 0 else None


def thread_variables(threads: int) -> dict[str, str]:
    """The environment of a process with so many threads. RAYON_NUM_THREADS is for tokenizers, and kept if it is set."""
    return {"OMP_NUM_THREADS": str(threads), "RAYON_NUM_THREADS": os.environ.get("RAYON_NUM_THREADS") or str(threads)}
