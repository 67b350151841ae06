"""What the machine can do: its best rates, its bandwidth, and the time below which a model's products cannot go."""

import importlib.metadata
import math
import os
import platform
import re
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
FLAGS = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_tile", "amx_bf16", "amx_int8")
LIBRARIES = ("torch", "transformers", "onnxruntime", "onnx", "openvino", "torchao")


def seconds(run: Callable[[], object], repetitions: int = 5) -> list[float]:
    """How long `run` takes, time after time, once it is warm."""
    run()
    times = []
    for _ in range(repetitions):
        started = time.perf_counter()
        run()
        times.append(time.perf_counter() - started)
    return times


def bandwidth(size: int = 2**28) -> float:
    """Bytes a second at which this machine reads float32 numbers, `size` of them, far more than any cache holds."""
    numbers = torch.ones(size)
    return 4 * size / statistics.median(seconds(numbers.sum))


def plain(weight: torch.Tensor, bias: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    """The linear layer as torch computes it by default."""
    return lambda x: nn.functional.linear(x, weight, bias)


def packed(weight: torch.Tensor, bias: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    """The linear layer over a weight that oneDNN has laid out for its own loops."""
    if not torch.backends.mkldnn.is_available():
        return plain(weight, bias)
    layout = torch.ops.mkldnn._reorder_linear_weight(weight, None)
    return lambda x: torch.ops.mkldnn._linear_pointwise(x, layout, bias, "none", [], "")


@torch.inference_mode()
def best_rate(config, dtype: torch.dtype, rows: tuple[int, ...] = (512, 2048)) -> float:
    """The most floating-point operations a second in any product of the model's shapes, packed or not."""
    hidden, inner = config.hidden_size, config.intermediate_size
    best = 0.0
    for width_in, width_out in ((hidden, hidden), (hidden, 3 * hidden), (hidden, inner), (inner, hidden)):
        weight, bias = torch.rand(width_out, width_in, dtype=dtype), torch.rand(width_out, dtype=dtype)
        for count in rows:
            x = torch.rand(count, width_in, dtype=dtype)
            for make in (plain, packed):
                layer = make(weight, bias)
                best = max(best, 2 * x.numel() * width_out / min(seconds(lambda layer=layer, x=x: layer(x))))
    return best


def encoder_flops(config, lengths: list[int]) -> int:
    """Floating-point operations of the blocks' matrix products, on real tokens alone: the six linear layers, Q Kᵀ and
    the weights' product with V. Neither embeddings nor pooler."""
    hidden, inner = config.hidden_size, config.intermediate_size
    linear = 2 * (4 * hidden * hidden + 2 * hidden * inner)
    attention = 2 * 2 * hidden
    return config.num_hidden_layers * sum(linear * length + attention * length * length for length in lengths)


@torch.inference_mode()
def packed_step(config, rows: int) -> float:
    """The seconds that the packed products of one step of decoding take by themselves, for so many rows.

    What a step multiplies in each block: self-attention's four weights, cross-attention's query and output (its keys
    and values are computed once), the feed-forward's two; then the head's two. Every weight is one of its own, as in
    the model: one weight over and over would stay in the cache.
    """
    hidden, inner = config.hidden_size, config.intermediate_size
    shapes = ([(hidden, hidden)] * 6 + [(inner, hidden), (hidden, inner)]) * config.num_hidden_layers
    shapes += [(hidden, hidden), (config.vocab_size, hidden)]
    layers = [(packed(torch.rand(shape), torch.rand(shape[0])), torch.rand(rows, shape[1])) for shape in shapes]
    return statistics.median(seconds(lambda: [layer(x) for layer, x in layers]))


def weights_of_a_step(model) -> int:
    """The bytes of weights that decoding one token cannot do without: the decoder's, but for the keys and values of the
    encoder's output, which are computed once, and the head's. Of an EncoderDecoderModel."""
    once = ("crossattention.self.key.", "crossattention.self.value.")
    blocks = [
        weight
        for name, weight in model.decoder.bert.encoder.named_parameters()
        if not any(part in name for part in once)
    ]
    return sum(weight.numel() * weight.element_size() for weight in [*blocks, *model.decoder.cls.parameters()])


def processor() -> tuple[str, list[str]]:
    """The processor's name, and which of the instructions that matter here it has."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:  # not Linux
        return platform.processor() or platform.machine(), []
    name = re.search(r"^model name\s*: (.*)$", text, flags=re.MULTILINE)
    flags = re.search(r"^flags\s*: (.*)$", text, flags=re.MULTILINE)
    has = flags[1].split() if flags else []
    return name[1] if name else platform.machine(), [flag for flag in FLAGS if flag in has]


def version(library: str) -> str | None:
    try:
        return importlib.metadata.version(library)
    except importlib.metadata.PackageNotFoundError:
        return None


def describe(config, threads: int) -> dict:
    """The machine, as it goes into the JSON file. Rates are of the model's shapes."""
    name, flags = processor()
    rates = {dtype: best_rate(config, torch_dtype) for dtype, torch_dtype in DTYPES.items()}
    return {
        "processor": name,
        "flags": flags,
        "cores": os.cpu_count(),
        "threads": threads,
        "gflops": {dtype: rate / 1e9 for dtype, rate in rates.items()},
        "bandwidth_gb": bandwidth() / 1e9,
        "python": platform.python_version(),
        "versions": {library: version(library) for library in LIBRARIES},
    }


def measure_again(machine: dict, config) -> None:
    """Rates and bandwidth once more, to keep the better ones: a machine that others use as well has its worse moments,
    and a floor that was taken in one of them would be none."""
    machine["bandwidth_gb"] = max(machine["bandwidth_gb"], bandwidth() / 1e9)
    for dtype, rate in machine["gflops"].items():
        machine["gflops"][dtype] = max(rate, best_rate(config, DTYPES[dtype]) / 1e9)


def floor(config, lengths: list[int], machine: dict, dtype: str) -> float:
    """The seconds that the products of these sequences take at the machine's best rate."""
    rate = machine["gflops"][dtype] * 1e9
    return encoder_flops(config, lengths) / rate if rate else math.nan
