"""The machine: its processor, and the rates at which it multiplies matrices and reads memory."""

import importlib.metadata
import os
import platform
import re
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import distributed, nn

from modeling_scratchbert.cpu.matrices import multiplies_natively

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
CPU_INFO = Path("/proc/cpuinfo")
FLAGS = (
    "avx2", "avx_vnni", "avx512f", "avx512_vnni", "avx512_bf16", "avx512_fp16", "amx_tile", "amx_bf16", "amx_int8",
)  # fmt: skip
LIBRARIES = (
    "torch", "transformers", "onnxruntime", "onnx", "openvino", "nncf", "torchao", "sentence-transformers",
    "ctranslate2",
)  # fmt: skip


def processor() -> dict:
    """The processor: its name, its family, model and stepping (x86 on Linux; None elsewhere), and which of `FLAGS`, its
    instruction sets, it has and lacks. A virtual machine may hide instructions that its model has."""
    try:
        text = CPU_INFO.read_text(encoding="utf-8")
    except OSError:  # not Linux
        text = ""

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


def hardware() -> str:
    """The name of the GPU, or else of the processor, and the number of processes that run on such."""
    world = distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else 1
    if torch.cuda.is_available():
        return f"{torch.cuda.get_device_name()}, processes: {world}"
    return f"{processor()['processor']}, processes: {world}, threads of each: {torch.get_num_threads()}"


def version(library: str) -> str | None:
    """The installed version; None if the library is not installed."""
    try:
        return importlib.metadata.version(library)
    except importlib.metadata.PackageNotFoundError:
        return None


# --------------------------------------------------------------------------------------------------------------- rates


def seconds(run: Callable[[], object], repetitions: int = 5) -> list[float]:
    """The seconds that each of several calls of `run` takes, after one to warm up."""
    run()
    times = []
    for _ in range(repetitions):
        started = time.perf_counter()
        run()
        times.append(time.perf_counter() - started)
    return times


def bandwidth(size: int = 2**28) -> float:
    """The bytes per second at which this machine reads `size` float32 numbers, many more than fit into a cache."""
    numbers = torch.ones(size)
    return 4 * size / statistics.median(seconds(numbers.sum))


def plain_linear(weight: torch.Tensor, bias: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    """The linear layer as torch computes it by default."""
    return lambda x: nn.functional.linear(x, weight, bias)


def prepacked_linear(weight: torch.Tensor, bias: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    """The linear layer with its weight prepacked in oneDNN's layout."""
    if not torch.backends.mkldnn.is_available():
        return plain_linear(weight, bias)
    layout = torch.ops.mkldnn._reorder_linear_weight(weight, None)
    return lambda x: torch.ops.mkldnn._linear_pointwise(x, layout, bias, "none", [], "")


@torch.inference_mode()
def best_rate(config, dtype: torch.dtype, rows: tuple[int, ...] = (512, 2048)) -> float:
    """The highest number of floating-point operations per second in any matrix product of the model's shapes, with
    plain or prepacked weights."""
    hidden, inner = config.hidden_size, config.intermediate_size
    best = 0.0
    for width_in, width_out in ((hidden, hidden), (hidden, 3 * hidden), (hidden, inner), (inner, hidden)):
        weight, bias = torch.rand(width_out, width_in, dtype=dtype), torch.rand(width_out, dtype=dtype)
        for count in rows:
            x = torch.rand(count, width_in, dtype=dtype)
            for make in (plain_linear, prepacked_linear):
                layer = make(weight, bias)
                best = max(best, 2 * x.numel() * width_out / min(seconds(lambda layer=layer, x=x: layer(x))))
    return best


def identity() -> dict:
    """The processor, its cores, and the versions of Python and of `LIBRARIES`, None for those not installed."""
    return {
        **processor(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "versions": {library: version(library) for library in LIBRARIES},
    }


def lines(machine: dict) -> list[str]:
    """What `identity` returns, as text."""
    libraries = ", ".join(f"{name} {version}" for name, version in machine["versions"].items() if version)
    numbers = [f"{name} {machine[name]}" for name in ("family", "model", "stepping") if machine[name] is not None]
    return [
        f"{', '.join([machine['processor'], *numbers])}; {machine['cores']} cores",
        f"instructions: {', '.join(machine['flags']) or 'unknown'}; "
        f"missing: {', '.join(machine['missing_flags']) or 'none'}",
        f"Python {machine['python']}, {libraries}",
    ]


def describe(config, threads: int) -> dict:
    """The machine, for the JSON file of a benchmark: rates in GFLOP/s for the model's shapes, of bfloat16 where the CPU
    has instructions for it; bandwidth in GB/s."""
    natively = {name: dtype for name, dtype in DTYPES.items() if multiplies_natively(dtype)}  # others take minutes
    rates = {name: best_rate(config, dtype) for name, dtype in natively.items()}
    return {
        **identity(),
        "threads": threads,
        "gflops": {dtype: rate / 1e9 for dtype, rate in rates.items()},
        "bandwidth_gb": bandwidth() / 1e9,
    }


def measure_again(machine: dict, config) -> None:
    """Measures rates and bandwidth again and keeps the better ones: on a shared machine, one measurement can be too
    low, and a lower bound computed from it would not be one."""
    machine["bandwidth_gb"] = max(machine["bandwidth_gb"], bandwidth() / 1e9)
    for dtype, rate in machine["gflops"].items():
        machine["gflops"][dtype] = max(rate, best_rate(config, DTYPES[dtype]) / 1e9)
