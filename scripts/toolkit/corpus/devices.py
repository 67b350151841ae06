"""The processes of a run: on which devices, and with how many threads."""

import os

# The threads of torch and the BLAS, and those of tokenizers.
THREADS, TOKENIZER_THREADS = "OMP_NUM_THREADS", "RAYON_NUM_THREADS"


def processors() -> int:
    """The processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def devices_and_threads(args, resumed: int | None) -> tuple[list[str], int]:
    """The device of each process, and the threads of each. On CPUs, by default a process for each processor, or for as
    many processors as it has threads; on accelerators, one for each. On Ray the cluster decides how many there are.

    Args:
        resumed: the threads of the run that is resumed; None: of a new run.

    Raises:
        ValueError: there are more processes than accelerators.
    """
    threads = args.threads_per_process or resumed or threads_of_environment()
    if args.engine == "ray":
        return [args.device or "cpu"] * (args.processes or 1), threads or 1
    devices = devices_of(args, processors() // (threads or 1))
    return devices, threads or max(1, processors() // len(devices))


def threads_of_environment() -> int | None:
    """What OMP_NUM_THREADS says; None if it is not a positive integer, which OpenMP ignores, too."""
    text = os.environ.get(THREADS, "").split(",")[0].strip()  # a list has a number for each level of nesting
    return int(text) if text.isdecimal() and int(text) > 0 else None


def devices_of(args, count: int) -> list[str]:
    """The device of each process on this machine.

    Args:
        count: of processes on CPUs, if the flags do not say it.

    Raises:
        ValueError: there are more processes than accelerators.
    """
    import torch

    device = args.device
    if device is None:
        device = torch.accelerator.current_accelerator().type if torch.accelerator.is_available() else "cpu"
    if device == "cpu":
        return ["cpu"] * (args.processes or max(1, count))
    if ":" in device:
        return [device]
    available = torch.accelerator.device_count() if torch.accelerator.is_available() else 0
    count = args.processes or max(1, available)
    if count > available:
        raise ValueError(f"--device {device}: {count} processes for {available} such devices; expected one for each")
    return [f"{device}:{number}" for number in range(count)]


def thread_variables(threads: int) -> dict[str, str]:
    """The environment of a process with so many threads. Tokenizers keep a number of their own."""
    return {THREADS: str(threads), TOKENIZER_THREADS: os.environ.get(TOKENIZER_THREADS) or str(threads)}
