"""Exporting models to torch.export, ONNX and OpenVINO, and checking each graph against the model."""

import importlib.metadata
import importlib.util
import json
import math
import shutil
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.export import Dim, ExportedProgram
from transformers.utils import cached_file

from modeling_scratchbert import ScratchBertForCausalLM
from toolkit.checkpoint import (
    Checkpoint,
    class_name,
    config_fields,
    covering_classes,
    kind_of,
    load,
    open_tokenizer_if_any,
    read_checkpoint,
    short_name,
)
from toolkit.cli import CommandError, one_line, require
from toolkit.files import atomic_folder, check_target

TOLERANCE = 1e-4

# The first opset in which attention is one operator; ONNX Runtime supports it since 1.23.
OPSET = 23

# In bytes of weights. A protocol buffer holds at most 2 GiB, names and graph included.
LARGEST_IN_ONE_FILE = 1_500_000_000

# The outputs of each class, and whether they are per token (else per sequence).
OUTPUTS = {
    "Model": {"last_hidden_state": True, "pooler_output": False},
    "ForPreTraining": {"prediction_logits": True, "seq_relationship_logits": False},
    "ForMaskedLM": {"logits": True},
    "ForNextSentencePrediction": {"logits": False},
    "ForSequenceClassification": {"logits": False},
    "ForMultipleChoice": {"logits": False},
    "ForTokenClassification": {"logits": True},
    "ForQuestionAnswering": {"start_logits": True, "end_logits": True},
    "ForCausalLM": {"logits": True},
}

# The batch that a graph is traced with, and those that it is checked with, all of other sizes: rows, length (None: as
# many tokens as the model has positions), and the side of the padding.
TRACED = (3, 7, "right")
CHECKED = (
    (1, 1, "right"),
    (1, 9, "right"),
    (2, 5, "right"),
    (5, 12, "right"),
    (5, 16, "left"),
    (1, None, "right"),
)
CHOICES = 2


# ------------------------------------------------------------------------------------------------ models


class TensorModel(nn.Module):
    """A model whose inputs and outputs are plain tensors and dicts of them, which a graph can represent."""

    def __init__(self, model: nn.Module, fields: list[str]):
        super().__init__()
        self.model = model
        self.fields = fields

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, token_type_ids: torch.Tensor) -> dict:
        mask = causal_mask(attention_mask) if self.model.config.is_decoder else attention_mask
        returned = self.model(input_ids=input_ids, attention_mask=mask, token_type_ids=token_type_ids)
        return {field: returned[field] for field in self.fields}


class TensorDecoder(TensorModel):
    """The same for a decoder with cross-attention."""

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        encoder_hidden_states: torch.Tensor,
        encoder_attention_mask: torch.Tensor,
    ) -> dict:
        returned = self.model(
            input_ids=input_ids,
            attention_mask=causal_mask(attention_mask),
            encoder_hidden_states=encoder_hidden_states,
            encoder_attention_mask=encoder_attention_mask,
        )
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

    name: str
    module: TensorModel
    outputs: dict[str, bool]  # as in OUTPUTS
    axes: dict[str, tuple[str, ...]]  # the dynamic axes of each input

    @property
    def config(self):
        return self.module.model.config


def load_model(checkpoint: Checkpoint) -> nn.Module:
    """The model in float32, of the class that its configuration names, or else of one that it has all tensors of.

    Raises:
        ValueError: the class is not supported, or the checkpoint lacks a tensor of it.
    """
    classes = checkpoint.classes
    named = next(iter(checkpoint.architectures), None)
    if named is not None and short_name(named) not in classes:
        known = ", ".join(class_name(name, "scratchbert") for name in classes)
        raise ValueError(
            f"{checkpoint.source} is of the class {named}; expected one of {known}, or the Bert class of one."
        )
    name = covering_classes(classes, checkpoint.parts, [])[0] if named is None else short_name(named)
    model = load(checkpoint.source, "scratchbert", name, "pooler" in checkpoint.parts)
    for module in model.modules():
        if hasattr(module, "config"):
            module.config.use_cache = False
    return model


def pieces_of(model) -> list[Piece]:
    """The whole model, or the encoder and the decoder of a seq2seq model."""
    if not model.config.is_encoder_decoder:
        return [piece("model", model)]
    decoder = model.get_decoder()
    if hasattr(model, "lm_head"):
        config = model.config.decoder_config()
        with torch.device("meta"):  # its weights are replaced at once
            whole = ScratchBertForCausalLM(config)
        whole.model, whole.lm_head = decoder, model.lm_head
        decoder = whole.eval()
    return [piece("encoder_model", model.get_encoder()), piece("decoder_model", decoder)]


def piece(name: str, model) -> Piece:
    """`model` as the piece of this name."""
    short = short_name(type(model).__name__)
    outputs = dict(OUTPUTS[short])
    if short == "Model" and model.pooler is None:
        del outputs["pooler_output"]
    tokens = ("batch", "choices", "length") if short == "ForMultipleChoice" else ("batch", "length")
    axes = {"input_ids": tokens, "attention_mask": tokens}
    if model.config.add_cross_attention:
        axes |= dict.fromkeys(("encoder_hidden_states", "encoder_attention_mask"), ("batch", "source"))
        return Piece(name, TensorDecoder(model, list(outputs)).eval(), outputs, axes)
    axes["token_type_ids"] = tokens
    return Piece(name, TensorModel(model, list(outputs)).eval(), outputs, axes)


def make_batch(piece: Piece, rows: int, length: int | None, side: str, seed: int = 0) -> dict[str, torch.Tensor]:
    """Random inputs in rows of random lengths; the first of several rows has no padding."""
    config, generator = piece.config, torch.Generator().manual_seed(seed)
    limit = config.max_position_embeddings
    length = min(length or limit, limit)
    sizes = {"batch": rows, "choices": CHOICES, "length": length, "source": length // 2 + 1}

    def random(name: str, low: int, high: int) -> torch.Tensor:
        return torch.randint(low, high, [sizes[axis] for axis in piece.axes[name]], generator=generator)

    def mask(name: str) -> torch.Tensor:
        *others, width = (sizes[axis] for axis in piece.axes[name])
        lengths = torch.randint(1, width + 1, others, generator=generator)
        if rows > 1:
            lengths[0] = width
        mask = torch.arange(width) < lengths[..., None]
        return (mask.flip(-1) if side == "left" else mask).long()

    made = {
        "input_ids": lambda: random("input_ids", 0, config.vocab_size),
        "attention_mask": lambda: mask("attention_mask"),
        "token_type_ids": lambda: random("token_type_ids", 0, config.type_vocab_size),
        "encoder_hidden_states": lambda: torch.randn(rows, sizes["source"], config.hidden_size, generator=generator),
        "encoder_attention_mask": lambda: mask("encoder_attention_mask"),
    }
    return {name: made[name]() for name in piece.axes}


# ------------------------------------------------------------------------------------------------ the formats

Run = Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]


@dataclass(frozen=True)
class Format:
    """How a graph is written, and how the file is opened again; `{}` in `file` is the piece's name."""

    file: str
    needs: tuple[str, ...]  # libraries
    write: Callable[[Piece, ExportedProgram, Path], None]
    open: Callable[[Piece, Path], Run]


def dynamic_shapes(piece: Piece) -> dict[str, dict[int, Dim]]:
    limits = {"length": piece.config.max_position_embeddings}
    dims = {axis: Dim(axis, max=limits.get(axis)) for axes in piece.axes.values() for axis in axes}
    return {name: {i: dims[axis] for i, axis in enumerate(axes)} for name, axes in piece.axes.items()}


def trace(piece: Piece) -> ExportedProgram:
    return torch.export.export(
        piece.module, (), make_batch(piece, *TRACED), dynamic_shapes=dynamic_shapes(piece), strict=False
    )


def write_torch(piece: Piece, program: ExportedProgram, path: Path) -> None:
    torch.export.save(program, path)


def open_torch(piece: Piece, path: Path) -> Run:
    module = torch.export.load(path).module()
    return lambda inputs: module(**inputs)


def write_onnx(piece: Piece, program: ExportedProgram, path: Path) -> None:
    size = sum(tensor.nbytes for tensor in piece.module.state_dict().values())
    torch.onnx.export(
        program, (), path, kwargs=make_batch(piece, *TRACED), dynamic_shapes=dynamic_shapes(piece),
        output_names=list(piece.outputs), opset_version=OPSET, external_data=size > LARGEST_IN_ONE_FILE, verbose=False,
        dynamo=True,
    )  # fmt: skip


def open_onnx(piece: Piece, path: Path) -> Run:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.log_severity_level = 3
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


def open_openvino(piece: Piece, path: Path) -> Run:
    import openvino

    options = {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": torch.get_num_threads()}
    compiled = openvino.Core().compile_model(path, "CPU", options)

    def run(inputs):
        returned = compiled({name: tensor.numpy() for name, tensor in inputs.items()})
        # A copy: the next call overwrites the result.
        return {name: torch.from_numpy(returned[name].copy()) for name in piece.outputs}

    return run


FORMATS = {
    "torch": Format("{}.pt2", (), write_torch, open_torch),
    "onnx": Format("{}.onnx", ("onnx", "onnxscript", "onnxruntime"), write_onnx, open_onnx),
    "openvino": Format("openvino_{}.xml", ("openvino",), write_openvino, open_openvino),
}


# ------------------------------------------------------------------------------------------------ the check


@dataclass
class Comparison:
    """The differences between one written graph and the model."""

    file: str
    shapes: list[str]  # of the batches
    differences: dict[str, list[float]]  # of each output, the largest for each batch; infinite if it has no result
    error: str | None = None  # the runtime's first

    @property
    def largest(self) -> float:
        """NaN if any difference is NaN."""
        return max((number for row in self.differences.values() for number in row), key=lambda x: (math.isnan(x), x))

    @property
    def agrees(self) -> bool:
        return self.largest <= TOLERANCE


def compare(piece: Piece, format_name: str, path: Path) -> Comparison:
    """Opens the file at `path` in its runtime, and runs it and the model on the batches of `CHECKED`."""
    found = Comparison(path.name, [], {name: [] for name in piece.outputs})
    run = None
    for seed, (rows, length, side) in enumerate(CHECKED, start=1):
        inputs = make_batch(piece, rows, length, side, seed)
        tokens = inputs["attention_mask"].bool()  # not padding
        found.shapes.append("×".join(map(str, tokens.shape)) + (" left" if side == "left" else ""))
        expected, returned = piece.module.model(**inputs), {}
        try:
            run = run or FORMATS[format_name].open(piece, path)
            returned = run(inputs)
        except Exception as error:  # a runtime can raise any exception
            found.error = found.error or f"{found.shapes[-1]}: {message(error)}"
        for name, row in found.differences.items():
            row.append(
                difference(returned.get(name), expected[name], tokens if piece.outputs[name] else tokens[..., 0])
            )
    return found


def difference(output: torch.Tensor | None, expected: torch.Tensor, tokens: torch.Tensor) -> float:
    """The largest difference where the mask `tokens` is True; infinite if there is no output of the expected shape."""
    if output is None or output.shape != expected.shape:
        return math.inf
    return (output - expected)[tokens].abs().max().item()


def table(found: Comparison) -> str:
    """A row for each output, a column for each batch."""
    lines = [(found.file, *found.shapes)]
    lines += [(name, *(f"{number:.1e}" for number in row)) for name, row in found.differences.items()]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    text = "\n".join(
        "  ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])]).rstrip() for line in lines
    )
    return f"{text}\n{found.error}" if found.error else text


def message(error: Exception) -> str:
    """The error in one line of at most 300 characters."""
    return one_line(str(error).strip() or type(error).__name__)[:300]


# ------------------------------------------------------------------------------------------------ writing


def export(source: str, target, format_name: str, *, overwrite: bool = False) -> list[Comparison]:
    """Writes the folder `target` with the graphs of the model `source`, if they agree with it, and prints the
    differences.

    Args:
        source: a ScratchBert or BERT checkpoint: a folder or a hub id.
        target: a new or empty folder.
        format_name: one of `FORMATS`.
        overwrite: replace `target` if it holds a checkpoint or an export.

    Raises:
        CommandError: a library is missing, or (exit code 1) the export disagrees with the model.
        ValueError: the checkpoint cannot be exported.
        OSError: a file cannot be read or written, or `target` is in use.
    """
    require(*FORMATS[format_name].needs)
    target = Path(target).resolve()
    check_target(Path(source).resolve(), target, overwrite)
    checkpoint = read_checkpoint(source)
    with atomic_folder(target) as folder, torch.no_grad():
        found = []
        for part in pieces_of(load_model(checkpoint)):
            path = folder / FORMATS[format_name].file.format(part.name)
            with exporter_errors(f"{source} cannot be exported to {format_name}"):
                FORMATS[format_name].write(part, trace(part), path)
            found.append(compare(part, format_name, path))
            print(f"{table(found[-1])}\n")
        if wrong := [comparison.file for comparison in found if not comparison.agrees]:
            raise CommandError(
                f"{' and '.join(wrong)} would differ from {source} by more than {TOLERANCE:.0e}. Nothing is written.",
                exit_code=1,
            )
        write_settings(folder, source)
    return found


@contextmanager
def exporter_errors(what: str) -> Iterator[None]:
    """Turns any exception of an exporter into a ValueError of one line."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except Exception as error:
        raise ValueError(f"{what}: {message(error)}") from error


def write_settings(folder: Path, source: str) -> None:
    """Writes the tokenizer and the configurations beside the graphs. The model's code is not there, so `auto_map` is
    omitted, and so is our `model_type`: AutoTokenizer warns about a type that transformers does not know."""
    fields = config_fields(source)
    omitted = ("auto_map", "model_type") if kind_of(fields) == "scratchbert" else ("auto_map",)
    fields = {name: value for name, value in fields.items() if name not in omitted}
    text = json.dumps(fields, indent=2, sort_keys=True) + "\n"
    (folder / "config.json").write_text(text, encoding="utf-8")
    generation = cached_file(source, "generation_config.json", _raise_exceptions_for_missing_entries=False)
    if generation:
        shutil.copyfile(generation, folder / "generation_config.json")
    tokenizer = open_tokenizer_if_any(source)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)


def verdict(found: list[Comparison], format_name: str, target: Path) -> str:
    """The largest difference, in one line."""
    largest = max(comparison.largest for comparison in found)
    packages = ("torch", *FORMATS[format_name].needs)
    versions = ", ".join(f"{package} {importlib.metadata.version(package)}" for package in packages)
    return f"{target}: within {largest:.1e} of the model on {len(CHECKED)} batches ({versions})"
