"""Times: of functions that take turns; of matrix products and memory, at this machine's best rates; and the GEMM lower
bound, the time that a model's matrix products alone take at these rates."""

import math
import statistics
import time
import timeit
from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from modeling_scratchbert.cpu.optimization import Prepacker
from toolkit.machine import identity

# Seconds before each measurement of several runtimes: threads of the one that was timed last spin for a while.
PAUSE = 0.01
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def interleave(runs: dict[str, Callable], inputs: list, repetitions: int) -> dict[str, list[float]]:
    """The median seconds of each function for each of its inputs. The functions take turns."""
    times = {name: [[] for _ in inputs] for name in runs}
    for repetition in range(repetitions):
        for i, each in enumerate(inputs):
            for name in list(runs) if (repetition + i) % 2 == 0 else reversed(runs):
                time.sleep(PAUSE if len(runs) > 1 else 0)
                started = time.perf_counter()
                runs[name](each)
                times[name][i].append(time.perf_counter() - started)
    return {name: list(map(statistics.median, of_inputs)) for name, of_inputs in times.items()}


def seconds(run: Callable[[], object], repetitions: int = 5) -> list[float]:
    """The seconds that each of several calls of `run` takes, after one to warm up."""
    run()
    return timeit.repeat(run, number=1, repeat=repetitions)


def bandwidth(size: int = 2**28) -> float:
    """The bytes per second at which this machine reads `size` float32 numbers, many more than fit into a cache."""
    return 4 * size / statistics.median(seconds(torch.ones(size).sum))


def linear_layers(weight: torch.Tensor, bias: torch.Tensor) -> list[Callable[[torch.Tensor], torch.Tensor]]:
    """The linear layer as torch computes it by default, and with its weight prepacked."""
    layer = nn.Linear(weight.shape[1], weight.shape[0], dtype=weight.dtype)
    layer.weight, layer.bias = nn.Parameter(weight), nn.Parameter(bias)
    prepacked = Prepacker(weight.dtype, weight.dtype, {}).layer(layer)
    return [partial(nn.functional.linear, weight=weight, bias=bias), prepacked]


def multiplies_natively(dtype: torch.dtype) -> bool:
    """Whether the CPU has instructions that multiply numbers of this dtype. Without, other libraries compute bfloat16
    at a quarter of float32's speed."""
    is_x86 = torch.backends.cpu.get_cpu_capability().startswith("AVX")
    has_bfloat16 = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return dtype != torch.bfloat16 or not is_x86 or has_bfloat16


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
            fastest = min(min(seconds(partial(layer, x))) for layer in linear_layers(weight, bias))
            best = max(best, 2 * x.numel() * width_out / fastest)
    return best


def describe(config, threads: int) -> dict:
    """The machine, for the JSON file of a benchmark: rates in GFLOP/s for the model's shapes, of bfloat16 where the CPU
    has instructions for it; bandwidth in GB/s."""
    natively = [name for name, dtype in DTYPES.items() if multiplies_natively(dtype)]  # others take minutes
    machine = {**identity(), "threads": threads, "gflops": dict.fromkeys(natively, 0.0), "bandwidth_gb": 0.0}
    measure_again(machine, config)
    return machine


def measure_again(machine: dict, config) -> None:
    """Measures rates and bandwidth again and keeps the better ones: on a shared machine, one measurement can be too
    low, and a lower bound computed from it would not be one."""
    machine["bandwidth_gb"] = max(machine["bandwidth_gb"], bandwidth() / 1e9)
    for dtype, rate in machine["gflops"].items():
        machine["gflops"][dtype] = max(rate, best_rate(config, DTYPES[dtype]) / 1e9)


def encoder_flops(config, lengths: list[int]) -> int:
    """The floating-point operations in the blocks' matrix products for non-padding tokens: the six linear layers, Q Kᵀ
    and the product of the attention weights with V. Without embeddings and pooler."""
    hidden, inner = config.hidden_size, config.intermediate_size
    linear = 2 * (4 * hidden * hidden + 2 * hidden * inner)
    attention = 2 * 2 * hidden
    return config.num_hidden_layers * sum(linear * length + attention * length * length for length in lengths)


def encoder_seconds(config, lengths: list[int], machine: dict, precision: str) -> float:
    """The seconds that the matrix products for sequences of these lengths take at the machine's best rate: of float32
    for int8, and for bfloat16 on a CPU without instructions for it."""
    rate = machine["gflops"].get(precision, machine["gflops"]["float32"]) * 1e9
    return encoder_flops(config, lengths) / rate if rate else math.nan


@torch.inference_mode()
def decoding_step_seconds(config, rows: int) -> float:
    """The seconds that the matrix products of one decoding step, with prepacked weights, take for this many rows.

    In each block: four weights of the self-attention, query and output of the cross-attention (its keys and values are
    computed once), and two of the feed-forward layer; then two of the language-model head. Each weight is a tensor of
    its own, as in the model: a single one would stay in the cache.
    """
    hidden, inner = config.hidden_size, config.intermediate_size
    shapes = ([(hidden, hidden)] * 6 + [(inner, hidden), (hidden, inner)]) * config.num_hidden_layers
    shapes += [(hidden, hidden), (config.vocab_size, hidden)]
    layers = [
        partial(linear_layers(torch.rand(out, width), torch.rand(out))[-1], torch.rand(rows, width))
        for out, width in shapes
    ]
    return statistics.median(seconds(lambda: [layer() for layer in layers]))


def decoding_step_bytes(model) -> int:
    """The bytes of weights that an `EncoderDecoderModel` reads to decode one token: those of the decoder, except for
    the keys and values of the cross-attention, which are computed once, and those of the language-model head."""
    once = ("crossattention.self.key.", "crossattention.self.value.")
    weights = [
        weight
        for name, weight in model.decoder.bert.encoder.named_parameters()
        if not any(part in name for part in once)
    ]
    return sum(weight.nbytes for weight in [*weights, *model.decoder.cls.parameters()])
