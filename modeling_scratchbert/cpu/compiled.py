"""The stack of blocks of an encoder, computed in C++ by one call: see `native/encoder.h`.

There is a library for each kind of processor, built when the package is installed. Without one, or for a configuration
that it does not support, `OptimizedStack` computes the same in torch's operators.
"""

import ctypes
import functools
import importlib.util
import os
import uuid
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN, GELUTanh, NewGELUActivation

from .matrices import is_compiling, quantize_rows
from .stack import OptimizedStack, gelu_form, record

# What each library requires of the processor, the fastest first.
REQUIREMENTS = {
    "amx": lambda: torch.cpu._is_amx_tile_supported() and torch.cpu._is_avx512_bf16_supported(),
    "avx512": lambda: torch.cpu._is_avx512_bf16_supported() and torch.cpu._is_vnni_supported(),
    "avx2": lambda: torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512"),
}
TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2}
PANEL = 32
# One thread reads the weights for so few rows nearly as fast as several do.
ROWS_OF_ONE_THREAD = 16

# `torch.compile` does not accept the library, so its operator looks the stack up by a key.
STACKS_BY_KEY: weakref.WeakValueDictionary[str, "CompiledStack"] = weakref.WeakValueDictionary()


class Linear(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int64) for name in ("inputs", "outputs")),
        *((name, ctypes.c_void_p) for name in ("panels", "bias", "scales", "input_factors", "sums")),
    ]


class Norm(ctypes.Structure):
    _fields_ = [("weight", ctypes.c_void_p), ("bias", ctypes.c_void_p)]


class NativeBlock(ctypes.Structure):
    _fields_ = [
        *((name, Linear) for name in ("query_key_value", "attention_output", "intermediate", "output")),
        *((name, Norm) for name in ("attention_norm", "feed_forward_norm")),
    ]


class NativeEncoder(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int64) for name in ("size", "type", "activation", "hidden", "inner", "heads")),
        *((name, ctypes.c_int64) for name in ("norm_first", "number")),
        ("epsilon", ctypes.c_double),
        ("blocks", ctypes.c_void_p),
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
        library = ctypes.CDLL(spec.origin)
        if name != "amx" or library.scratchbert_has_amx():
            pointer, number = ctypes.c_void_p, ctypes.c_int64
            library.scratchbert_encode.argtypes = [pointer, pointer, number, pointer, pointer, number, number]
            return name, library
    return None


def library_in_use() -> tuple[str, ctypes.CDLL]:
    """Return what `find_library` does, or raise RuntimeError: a pickled model may come to another machine."""
    found = find_library()
    if found is None:
        raise RuntimeError(
            "The model has prepacked weights of a compiled encoder; expected the library that computes them. Load the "
            "checkpoint on this machine and call optimize_for_inference()."
        )
    return found


def supports(config) -> bool:
    """Whether a library is in use, and supports an encoder of this configuration."""
    widths = config.hidden_size % PANEL, config.intermediate_size % PANEL
    is_even = widths == (0, 0) and config.hidden_size % (16 * config.num_attention_heads) == 0
    is_encoder = config.num_hidden_layers > 0 and not config.is_decoder
    is_supported = is_even and is_encoder and activation_form(config.hidden_act) is not None
    return is_supported and find_library() is not None


def activation_form(name: str) -> int | None:
    """The number of an activation in the library, or None."""
    activation = ACT2FN[name]
    if isinstance(activation, nn.ReLU):
        return 2
    if isinstance(activation, GELUTanh | NewGELUActivation):
        return 1
    return 0 if gelu_form(activation, True) == "none" else None


class CompiledMatrix:
    """Weights `(out, in)`, one below the other, in panels of 32 outputs.

    Args:
        weights: the weights, without gradients.
        biases: the bias of each, or None for each.
        is_int8: whether to quantise them.
        factors: `(in,)`, of the inputs: see `Int8Matrix`.
    """

    def __init__(self, weights: list[Tensor], biases: Sequence[Tensor | None], is_int8: bool, factors: Tensor | None):
        self.dtype, self.is_int8, self.factors = weights[0].dtype, is_int8, factors
        weight = torch.cat(weights)
        outputs, self.width = weight.shape
        given = [bias for bias in biases if bias is not None]
        self.bias = torch.cat(given).float() if given else torch.zeros(outputs)
        self.scales = self.sums = self.input_factors = None
        if is_int8:
            values, self.scales = torch.empty(outputs, self.width, dtype=torch.int8), torch.empty(outputs)
            quantize_rows(factors, weight, values, self.scales)
            self.sums = values.sum(dim=1, dtype=torch.int32)
            self.input_factors = None if factors is None else 1 / factors
            weight = values
        numbers = 4 // weight.itemsize  # in a word of 32 bits
        self.panels = weight.view(-1, PANEL, self.width // numbers, numbers).transpose(1, 2).contiguous()

    def __deepcopy__(self, memo):
        return self

    def linear(self) -> Linear:
        """The matrix as the library reads it; valid as long as this object."""
        tensors = self.panels, self.bias, self.scales, self.input_factors, self.sums
        return Linear(self.width, len(self.bias), *(None if each is None else each.data_ptr() for each in tensors))


class CompiledStack(OptimizedStack):
    """The stack of an encoder, whose blocks one call of the library computes."""

    def __init__(self, *args):
        super().__init__(*args)
        self.key = uuid.uuid4().hex
        STACKS_BY_KEY[self.key] = self

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in ("key", "_native")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        library_in_use()
        self.key = uuid.uuid4().hex
        STACKS_BY_KEY[self.key] = self

    def extra_repr(self) -> str:
        return f"compiled for {library_in_use()[0]}"

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        *_,
        batch=None,
        **options,
    ) -> Tensor:
        """`(B, T, C)` → `(B, T, C)`. The arguments are those of `TransformerStack.forward`."""
        encode = torch.ops.scratchbert_cpu.encode if is_compiling(hidden_states) else encode_by_key
        starts = None if batch is None else batch.cu_seqlens
        x, number = hidden_states, len(self.blocks)
        if record(x):
            for index in range(number):
                x = encode(x, attention_mask, starts, self.key, index, 1)
                record(x)
        else:
            x = encode(x, attention_mask, starts, self.key, 0, number)
        return x if self.final_norm is None else self.final_norm(x)

    def encode(self, x: Tensor, mask: Tensor | None, starts: Tensor | None, first: int, number: int) -> Tensor:
        """Compute blocks from `first` for a batch, `(B, T, C)`: sequences in one row, with their `starts`; or one in
        each row, whose tokens are those that the last query of a full mask attends to."""
        keys = order = None
        if starts is None and mask is not None:
            starts = starts_in_mask(mask)
        if starts is None:
            starts = torch.arange(x.shape[0] + 1) * x.shape[1]
            if mask is not None:
                is_token = (mask[:, 0, -1] == 0).expand(x.shape[:2])
                keys = is_token.sum(dim=1)
                # The library expects padding at the end of each row.
                order = is_token.int().argsort(dim=1, descending=True, stable=True)[..., None].expand(x.shape)
                x = x.gather(1, order)
        rows = x.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
        self._run(rows.flatten(0, 1), starts, keys, first, number)
        states = rows.to(x.dtype)
        return states if order is None else torch.empty_like(states).scatter_(1, order, states)

    def _run(self, rows: Tensor, starts: Tensor, keys: Tensor | None, first: int, number: int) -> None:
        """Compute blocks of `rows`, `(N, C)`, in place."""
        native, array, _ = self._as_structs()
        part = NativeEncoder.from_buffer_copy(native)
        part.blocks, part.number = ctypes.addressof(array) + first * ctypes.sizeof(NativeBlock), number
        threads = 1 if len(rows) <= ROWS_OF_ONE_THREAD else torch.get_num_threads()
        encode = library_in_use()[1].scratchbert_encode
        places = [None if each is None else each.to(torch.int32).contiguous() for each in (starts, keys)]
        pointers = [None if each is None else each.data_ptr() for each in places]
        result = encode(ctypes.addressof(part), rows.data_ptr(), len(rows), *pointers, len(starts) - 1, threads)
        if result == 2:
            raise MemoryError(f"The encoder found no memory for {len(rows)} tokens. Pass a smaller batch.")
        if result:
            raise RuntimeError(
                f"The encoder does not accept {len(rows)} rows in {len(starts) - 1} sequences; this is an error of the "
                "package. Please report it."
            )

    def _as_structs(self):
        """The structures of the library, and the tensors that they point to."""
        if "_native" not in vars(self):
            array, kept = (NativeBlock * len(self.blocks))(), []
            for native, block in zip(array, self.blocks, strict=True):
                for name, kind in NativeBlock._fields_:
                    value = getattr(block, name)
                    if kind is Norm:
                        tensors = [value.keywords[field].float() for field in ("weight", "bias")]
                        kept += tensors
                        setattr(native, name, Norm(*(each.data_ptr() for each in tensors)))
                    else:
                        setattr(native, name, value.linear())
            config = self.config
            sizes = config.hidden_size, config.intermediate_size, config.num_attention_heads, config.norm_first
            is_int8 = self.blocks[0].output.is_int8
            types = TYPES[torch.int8 if is_int8 else self.dtype], activation_form(config.hidden_act)
            native = NativeEncoder(
                ctypes.sizeof(NativeEncoder), *types, *sizes, len(array), config.layer_norm_eps, None
            )
            vars(self)["_native"] = native, array, kept
        return vars(self)["_native"]


def starts_in_mask(mask: Tensor) -> Tensor | None:
    """The starts of packed sequences, and the end, by the full mask of the row that holds them: each token attends to
    its own sequence. None if all tokens attend to the same ones."""
    if mask.shape[2] == 1 or (mask == mask[:, :, -1:]).all():
        return None
    first_key = (mask[0, 0] == 0).int().argmax(dim=1)
    is_start = first_key == torch.arange(len(first_key))
    return nn.functional.pad(is_start.nonzero()[:, 0], (0, 1), value=len(first_key))


def encode_by_key(x: Tensor, mask: Tensor | None, starts: Tensor | None, key: str, first: int, number: int) -> Tensor:
    """The operator of `CompiledStack.encode`."""
    return STACKS_BY_KEY[key].encode(x, mask, starts, first, number)


torch.library.custom_op(
    "scratchbert_cpu::encode",
    encode_by_key,
    mutates_args=(),
    schema="(Tensor x, Tensor? mask, Tensor? starts, str key, int first, int number) -> Tensor",
).register_fake(lambda x, *_: torch.empty_like(x))
