"""The GEMM lower bound: the time that a model's matrix products alone take on this machine."""

import math
import statistics

import torch

from toolkit.machine import prepacked_linear, seconds


def encoder_flops(config, lengths: list[int]) -> int:
    """The floating-point operations in the blocks' matrix products for non-padding tokens: the six linear layers, Q Kᵀ
    and the product of the attention weights with V. Without embeddings and pooler."""
    hidden, inner = config.hidden_size, config.intermediate_size
    linear = 2 * (4 * hidden * hidden + 2 * hidden * inner)
    attention = 2 * 2 * hidden
    return config.num_hidden_layers * sum(linear * length + attention * length * length for length in lengths)


def encoder_seconds(config, lengths: list[int], machine: dict, dtype: str) -> float:
    """The seconds that the matrix products for sequences of these lengths take at the machine's best rate."""
    rate = machine["gflops"][dtype] * 1e9
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
        (prepacked_linear(torch.rand(out, width), torch.rand(out)), torch.rand(rows, width)) for out, width in shapes
    ]
    return statistics.median(seconds(lambda: [layer(x) for layer, x in layers]))


def decoding_step_bytes(model) -> int:
    """The bytes of weights that an `EncoderDecoderModel` reads to decode one token: those of the decoder, except for
    the keys and values of the cross-attention, which are computed once, and those of the language-model head."""
    once = ("crossattention.self.key.", "crossattention.self.value.")
    blocks = [
        weight
        for name, weight in model.decoder.bert.encoder.named_parameters()
        if not any(part in name for part in once)
    ]
    return sum(weight.numel() * weight.element_size() for weight in [*blocks, *model.decoder.cls.parameters()])
