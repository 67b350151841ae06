"""Exporting models to torch.export, AOTInductor, ONNX and OpenVINO, and checking each graph against the model."""

import math
import shutil
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.export import Dim, ExportedProgram

from toolkit.checkpoint import (
    Checkpoint,
    covering_classes,
    decoder_of,
    is_per_token,
    load,
    open_tokenizer_if_any,
    read_checkpoint,
)
from toolkit.cli import CommandError, described, require, table
from toolkit.compare.parity import largest
from toolkit.files import atomic_folder, check_target, write_json
from toolkit.machine import version
from toolkit.trust import find

TOLERANCE = 1e-4

# The first opset in which attention is one operator; ONNX Runtime supports it since 1.23.
OPSET = 23

# In bytes of weights. A protocol buffer holds at most 2 GiB, names and graph included.
LARGEST_IN_ONE_FILE = 1_500_000_000

# The batch that a graph is traced with, and those that it is checked with, all of other sizes: rows, length (None: as
# many tokens as the model has positions), and the side of the padding.
TRACED = (3, 7, "right")
CHECKED = ((1, 1, "right"), (1, 9, "right"), (2, 5, "right"), (5, 12, "right"), (5, 16, "left"), (1, None, "right"))
CHOICES = 2


# ------------------------------------------------------------------------------------------------ models


class TensorModel(nn.Module):
    """A model whose inputs and outputs are plain tensors and dicts of them, which a graph can represent."""

    def __init__(self, model: nn.Module, fields: list[str]):
        super().__init__()
        self.model = model
        self.fields = fields

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        token_type_ids: torch.Tensor | None = None,
        encoder_hidden_states: torch.Tensor | None = None,
        encoder_attention_mask: torch.Tensor | None = None,
    ) -> dict:
        """Of the last three, a decoder with cross-attention has the last two, and other models have the first."""
        inputs = {
            "attention_mask": causal_mask(attention_mask) if self.model.config.is_decoder else attention_mask,
            "token_type_ids": token_type_ids,
            "encoder_hidden_states": encoder_hidden_states,
            "encoder_attention_mask": encoder_attention_mask,
        }
        returned = self.model(input_ids, **{name: value for name, value in inputs.items() if value is not None})
        return {field: returned[field] for field in self.fields}


def causal_mask(mask: torch.Tensor) -> torch.Tensor:
    """A decoder's mask, `(B, T)` → `(B, 1, T, T)`, in which padding attends to itself. Padding on the left has nothing
    else to attend to, which gives NaN in OpenVINO, and NaN spreads to all tokens in the next block."""
    places = torch.arange(mask.shape[1], device=mask.device)
    earlier, same = places[:, None] >= places, places[:, None] == places
    return earlier & mask.bool()[:, None, None] | same


@dataclass
class Piece:
    """The part of a model that becomes one graph."""

    module: TensorModel
    outputs: dict[str, bool]  # and whether they are per token, else per sequence
    axes: dict[str, tuple[str, ...]]  # the dynamic axes of each input

    @property
    def config(self):
        return self.module.model.config


def load_model(checkpoint: Checkpoint) -> nn.Module:
    """The model in float32, of the class that its configuration names, or else of one that it has all tensors of.

    Raises:
        ValueError: the class is not supported, or the checkpoint lacks a tensor of it.
    """
    name = checkpoint.named_class or covering_classes(checkpoint.classes, checkpoint.parts, [])[0]
    model = load(checkpoint, "scratchbert", name, "pooler" in checkpoint.parts)
    for module in model.modules():
        if hasattr(module, "config"):
            module.config.use_cache = False
    return model


def pieces_of(model) -> dict[str, Piece]:
    """The whole model, or the encoder and the decoder of a seq2seq model, by the names of their files."""
    if not model.config.is_encoder_decoder:
        return {"model": piece_of(model)}
    return {"encoder_model": piece_of(model.get_encoder()), "decoder_model": piece_of(decoder_of(model))}


def piece_of(model) -> Piece:
    choices = ["choices"] if type(model).__name__.endswith("ForMultipleChoice") else []
    tokens = ("batch", *choices, "length")
    axes = {"input_ids": tokens, "attention_mask": tokens}
    if model.config.add_cross_attention:
        axes |= dict.fromkeys(("encoder_hidden_states", "encoder_attention_mask"), ("batch", "source"))
    else:
        axes["token_type_ids"] = tokens
    returned = model(**make_batch(model.config, axes, *TRACED))
    outputs = {field: is_per_token(field, value) for field, value in returned.items() if torch.is_tensor(value)}
    return Piece(TensorModel(model, list(outputs)).eval(), outputs, axes)


def make_batch(config, axes: dict, rows: int, length: int | None, side: str, seed: int = 0) -> dict[str, torch.Tensor]:
    """Random inputs with these axes, in rows of random lengths; the first of several rows has no padding."""
    generator = torch.Generator().manual_seed(seed)
    limit = config.max_position_embeddings
    length = min(length or limit, limit)
    sizes = {"batch": rows, "choices": CHOICES, "length": length, "source": length // 2 + 1}
    ids = {"input_ids": config.vocab_size, "token_type_ids": config.type_vocab_size}
    inputs = {}
    for name, own in axes.items():
        shape = [sizes[axis] for axis in own]
        if name in ids:
            inputs[name] = torch.randint(ids[name], shape, generator=generator)
        elif name == "encoder_hidden_states":
            inputs[name] = torch.randn(*shape, config.hidden_size, generator=generator)
        else:
            lengths = torch.randint(1, shape[-1] + 1, shape[:-1], generator=generator)
            if rows > 1:
                lengths[0] = shape[-1]
            mask = (torch.arange(shape[-1]) < lengths[..., None]).long()
            inputs[name] = mask.flip(-1) if side == "left" else mask
    return inputs


# ------------------------------------------------------------------------------------------------ the formats

Run = Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]


@dataclass(frozen=True)
class Format:
    """How a graph is written, and how the file is opened again; `{}` in `file` is the piece's name."""

    file: str
    needs: tuple[str, ...]  # libraries
    write: Callable[[Piece, ExportedProgram, Path], None]
    open: Callable[[Path, int], Run]  # with this number of threads
    is_compiled: bool = False  # writing it requires a C++ compiler


def dynamic_shapes(piece: Piece) -> dict[str, dict[int, Dim]]:
    limits = {"length": piece.config.max_position_embeddings}
    dims = {axis: Dim(axis, max=limits.get(axis)) for axes in piece.axes.values() for axis in axes}
    return {name: {i: dims[axis] for i, axis in enumerate(axes)} for name, axes in piece.axes.items()}


def trace(piece: Piece) -> ExportedProgram:
    batch = make_batch(piece.config, piece.axes, *TRACED)
    return torch.export.export(piece.module, (), batch, dynamic_shapes=dynamic_shapes(piece), strict=False)


def open_torch(path: Path, threads: int) -> Run:
    module = torch.export.load(path).module()
    return lambda inputs: module(**inputs)


def has_compiler() -> bool:
    from torch._inductor import cpp_builder, exc

    try:
        return bool(cpp_builder.get_cpp_compiler())
    except exc.InvalidCxxCompiler:
        return False


def write_aotinductor(piece: Piece, program: ExportedProgram, path: Path) -> None:
    from torch._inductor.utils import fresh_cache

    # Prepacked weights in oneDNN's layout, and one multiplication for queries, keys and values.
    options = {"freezing": True, "cpp.enable_concat_linear": True}
    # The default cache would keep a second copy of the weights.
    with fresh_cache():
        torch._inductor.aoti_compile_and_package(program, package_path=str(path), inductor_configs=options)


def open_aotinductor(path: Path, threads: int) -> Run:
    module = torch._inductor.aoti_load_package(str(path))
    return lambda inputs: module(**inputs)


def write_onnx(piece: Piece, program: ExportedProgram, path: Path) -> None:
    size = sum(tensor.nbytes for tensor in piece.module.state_dict().values())
    torch.onnx.export(
        program,
        (),
        path,
        dynamic_shapes=dynamic_shapes(piece),
        output_names=list(piece.outputs),
        opset_version=OPSET,
        external_data=size > LARGEST_IN_ONE_FILE,
        verbose=False,
        dynamo=True,
    )


def open_onnx(path: Path, threads: int) -> Run:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3
    # Otherwise its threads spin after a call, and take cores from what a benchmark times next.
    options.add_session_config_entry("session.force_spinning_stop", "1")
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]

    def run(inputs):
        returned = session.run(None, {name: tensor.numpy() for name, tensor in inputs.items()})
        return {name: torch.from_numpy(array) for name, array in zip(names, returned, strict=True)}

    return run


def write_openvino(piece: Piece, program: ExportedProgram, path: Path) -> None:
    import openvino

    model = openvino.convert_model(program)
    for output, name in zip(model.outputs, piece.outputs, strict=True):
        output.get_tensor().set_names({name})
    openvino.save_model(model, path, compress_to_fp16=False)


def open_openvino(path: Path, threads: int, precision: str = "f32") -> Run:
    import openvino

    # Without the first hint, it computes in bfloat16 if the processor supports that.
    options = {"INFERENCE_PRECISION_HINT": precision, "INFERENCE_NUM_THREADS": threads, "PERFORMANCE_HINT": "LATENCY"}
    compiled = openvino.Core().compile_model(path, "CPU", options)
    outputs = {output.any_name: output for output in compiled.outputs}

    def run(inputs):
        returned = compiled({name: tensor.numpy() for name, tensor in inputs.items()})
        # A copy: the next call overwrites the result.
        return {name: torch.from_numpy(returned[output].copy()) for name, output in outputs.items()}

    return run


FORMATS = {
    "torch": Format("{}.pt2", (), lambda piece, program, path: torch.export.save(program, path), open_torch),
    "aotinductor": Format("compiled_{}.pt2", (), write_aotinductor, open_aotinductor, True),
    "onnx": Format("{}.onnx", ("onnx", "onnxscript", "onnxruntime"), write_onnx, open_onnx),
    "openvino": Format("openvino_{}.xml", ("openvino",), write_openvino, open_openvino),
}


# ------------------------------------------------------------------------------------------------ the check


@dataclass
class Comparison:
    """The differences between one written graph and the model."""

    file: str
    shapes: list[str]  # of the batches
    # Of each output, the largest for each batch; infinite if it has no result or NaN.
    differences: dict[str, list[float]]
    error: str | None = None  # the runtime's first

    @property
    def largest(self) -> float:
        return max(number for row in self.differences.values() for number in row)

    @property
    def agrees(self) -> bool:
        return self.largest <= TOLERANCE


def compare(piece: Piece, format_name: str, path: Path) -> Comparison:
    """Opens the file at `path` in its runtime, and runs it and the model on the batches of `CHECKED`."""
    found = Comparison(path.name, [], {name: [] for name in piece.outputs})
    run = None
    for seed, (rows, length, side) in enumerate(CHECKED, start=1):
        inputs = make_batch(piece.config, piece.axes, rows, length, side, seed)
        tokens = inputs["attention_mask"].bool()  # not padding
        found.shapes.append("×".join(map(str, tokens.shape)) + (" left" if side == "left" else ""))
        expected, returned = piece.module.model(**inputs), {}
        try:
            run = run or FORMATS[format_name].open(path, torch.get_num_threads())
            returned = run(inputs)
        except Exception as error:  # a runtime can raise any exception
            found.error = found.error or f"{found.shapes[-1]}: {described(error)}"
        for name, row in found.differences.items():
            at, output = tokens if piece.outputs[name] else tokens[..., 0], returned.get(name)
            has_result = output is not None and output.shape == expected[name].shape
            row.append(largest((output - expected[name])[at]) if has_result else math.inf)
    return found


def as_text(found: Comparison) -> str:
    """A row for each output, a column for each batch."""
    rows = [(name, *(f"{number:.1e}" for number in row)) for name, row in found.differences.items()]
    text = table([(found.file, *found.shapes), *rows])
    return f"{text}\n{found.error}" if found.error else text


# ------------------------------------------------------------------------------------------------ writing


def export(source: str, target: Path, format_name: str, *, overwrite: bool = False) -> None:
    """Writes the folder `target` with the graphs of the model `source`, if they agree with it, and prints the
    differences.

    Args:
        source: a ScratchBert or BERT checkpoint: a folder or a hub id.
        target: a new or empty folder.
        format_name: one of `FORMATS`.
        overwrite: replace `target` if it holds a checkpoint or an export.

    Raises:
        CommandError: a library or a compiler is missing, or (exit code 1) the export disagrees with the model.
        ValueError: the checkpoint cannot be exported.
        OSError: a file cannot be read or written, or `target` is in use.
    """
    chosen = FORMATS[format_name]
    require(*chosen.needs)
    if chosen.is_compiled and not has_compiler():
        raise CommandError(
            "no C++ compiler was found; expected g++, or the one that the environment variable CXX "
            "names. Install g++, or export with another --format."
        )
    check_target(Path(source).resolve(), target.resolve(), overwrite)
    checkpoint = read_checkpoint(source)
    with atomic_folder(target) as folder, torch.no_grad():
        found = []
        for name, part in pieces_of(load_model(checkpoint)).items():
            path = folder / chosen.file.format(name)
            try:
                with warnings.catch_warnings(action="ignore"):
                    chosen.write(part, trace(part), path)
            except Exception as error:  # an exporter can raise any exception
                raise ValueError(f"{source} cannot be exported to {format_name}: {described(error)}") from error
            found.append(compare(part, format_name, path))
            print(f"{as_text(found[-1])}\n")
        if wrong := [comparison.file for comparison in found if not comparison.agrees]:
            raise CommandError(
                f"{' and '.join(wrong)} would differ from {source} by more than {TOLERANCE:.0e}. Nothing is written.",
                exit_code=1,
            )
        write_settings(folder, checkpoint)
    difference = max(comparison.largest for comparison in found)
    versions = ", ".join(f"{package} {version(package)}" for package in ("torch", *chosen.needs))
    print(f"{target}: within {difference:.1e} of the model on {len(CHECKED)} batches ({versions})")


def write_settings(folder: Path, checkpoint: Checkpoint) -> None:
    """Writes the tokenizer and the configurations beside the graphs. The model's code is not there, so `auto_map` is
    omitted, and so is our `model_type`: AutoTokenizer warns about a type that transformers does not know."""
    omitted = ("auto_map", "model_type") if checkpoint.kind == "scratchbert" else ("auto_map",)
    fields = {name: value for name, value in sorted(checkpoint.fields.items()) if name not in omitted}
    write_json(folder / "config.json", fields)
    if generation := find(checkpoint.source, "generation_config.json"):
        shutil.copyfile(generation, folder / "generation_config.json")
    if (tokenizer := open_tokenizer_if_any(checkpoint.source)) is not None:
        tokenizer.save_pretrained(folder)
