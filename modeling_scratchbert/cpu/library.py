"""The stack of blocks in C++, and how to call it: see `native/stack.h`.

There is a library for each kind of processor, built when the package is installed. Without one, or for an activation
that it does not support, `fallback` computes the same in torch's operators.
"""

import ctypes
import functools
import importlib.util
import os
import platform

import torch
from torch import Tensor, nn
from transformers.activations import (
    FastGELUActivation,
    GELUActivation,
    GELUTanh,
    NewGELUActivation,
    QuickGELUActivation,
    SiLUActivation,
)

# What each library requires of the processor, the fastest first.
REQUIREMENTS = {
    "amx": lambda: torch.cpu._is_amx_tile_supported() and torch.cpu._is_avx512_bf16_supported(),
    "avx512": lambda: torch.cpu._is_avx512_bf16_supported() and torch.cpu._is_vnni_supported(),
    "avx2": lambda: torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512"),
    "neon": lambda: platform.machine() == "aarch64",
}
TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2}
ACTIVATIONS: dict[type, int] = {
    GELUActivation: 1,
    GELUTanh: 2,
    NewGELUActivation: 2,
    FastGELUActivation: 2,
    QuickGELUActivation: 3,
    SiLUActivation: 4,
    nn.SiLU: 4,
    nn.Sigmoid: 5,
    nn.Tanh: 6,
    nn.ReLU: 7,
}


def fields_of(kind: type, names: str) -> list[tuple[str, type]]:
    return [(name, kind) for name in names.split()]


class Linear(ctypes.Structure):
    _fields_ = [
        *fields_of(ctypes.c_int64, "inputs outputs"),
        *fields_of(ctypes.c_void_p, "panels bias scales input_factors sums largest"),
    ]


class Norm(ctypes.Structure):
    _fields_ = fields_of(ctypes.c_void_p, "weight bias")


class NativeLayer(ctypes.Structure):
    _fields_ = [
        *fields_of(ctypes.c_int64, "type activation columns width threads rows"),
        *fields_of(ctypes.c_void_p, "x y"),
        *fields_of(ctypes.c_double, "epsilon"),
        *[("linear", Linear), ("norm", Norm)],
    ]


class NativeBlock(ctypes.Structure):
    _fields_ = [
        *fields_of(Linear, "query_key_value attention_output cross_query cross_output intermediate output"),
        *fields_of(Norm, "attention_norm cross_norm feed_forward_norm"),
    ]


class NativeStack(ctypes.Structure):
    _fields_ = [
        *fields_of(ctypes.c_int64, "size type activation hidden inner heads norm_first number"),
        *fields_of(ctypes.c_double, "epsilon"),
        ("blocks", ctypes.c_void_p),
    ]


class NativeKeys(ctypes.Structure):
    _fields_ = [
        *fields_of(ctypes.c_void_p, "keys values"),
        *fields_of(ctypes.c_int64, "size number"),
        *fields_of(ctypes.c_void_p, "is_key counts"),
    ]


class NativeBatch(ctypes.Structure):
    _fields_ = [
        *fields_of(ctypes.c_void_p, "x queries projected starts"),
        *fields_of(ctypes.c_int64, "rows sequences first last threads"),
        *fields_of(NativeKeys, "own source"),
    ]


@functools.cache
def find_library() -> tuple[str, ctypes.CDLL] | None:
    """Return the name and the library of the fastest kind that is built and that the processor supports; the
    environment variable SCRATCHBERT_ISA names another, or "torch" for none."""
    wanted = os.environ.get("SCRATCHBERT_ISA")
    if wanted not in (None, "torch", *REQUIREMENTS):
        names = ", ".join(REQUIREMENTS)
        raise ValueError(f"SCRATCHBERT_ISA is {wanted!r}; expected one of: {names}, torch. Correct it or remove it.")
    for name, is_supported in REQUIREMENTS.items():
        spec = importlib.util.find_spec(f"{__package__}._{name}") if wanted in (None, name) else None
        if spec is None or spec.origin is None or not is_supported():
            continue
        library = open_library(spec.origin)
        if name != "amx" or library.scratchbert_has_amx():
            return name, library
    if wanted not in (None, "torch"):
        raise ValueError(
            f"SCRATCHBERT_ISA is {wanted!r}, which was not built or is not supported by this processor; expected "
            "another one, or torch. Correct it or remove it."
        )
    return None


def open_library(path: str) -> ctypes.CDLL:
    library = ctypes.CDLL(path)
    # Of libgomp, which is loaded with torch.
    parallel = getattr(ctypes.CDLL(torch._C.__file__), "GOMP_parallel", 0)
    library.scratchbert_use_threads(ctypes.cast(parallel, ctypes.c_void_p))
    return library


def library_in_use() -> tuple[str, ctypes.CDLL]:
    """Return what `find_library` does, or raise RuntimeError: a pickled model may come to another machine."""
    found = find_library()
    if found is None:
        raise RuntimeError(
            "The model has weights in the layout of the library in C++; expected that library. Load the checkpoint on "
            "this machine and call optimize_for_inference()."
        )
    return found


def call(function: str, *structures: ctypes.Structure) -> None:
    """Call a function of the library."""
    result = getattr(library_in_use()[1], f"scratchbert_{function}")(*map(ctypes.byref, structures))
    if result == 2:
        raise MemoryError("The library in C++ found no memory. Pass a smaller batch.")
    if result:
        raise RuntimeError(
            f"The library in C++ refused {function}(); this is an error of the package. Please report it."
        )


def address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def spread(tensor: Tensor, dim: int = -1, heads: int = 1) -> Tensor:
    """Append zeros to each head along a dimension, to a multiple of 16, and to all of them, to one of 32."""
    parts = fill(tensor.movedim(dim, -1).unflatten(-1, (heads, -1)), 16).flatten(-2)
    return fill(parts, 32).movedim(-1, dim)


def fill(tensor: Tensor, multiple: int) -> Tensor:
    """Append zeros to the last dimension, to a multiple of a number. Without any, `pad` would copy the tensor."""
    missing = -tensor.shape[-1] % multiple
    return nn.functional.pad(tensor, (0, missing)) if missing else tensor
