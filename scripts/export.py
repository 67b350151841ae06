#!/usr/bin/env python
"""Exports a ScratchBert, or a BERT, for other runtimes, and checks what it wrote against the model itself.

    export.py my-classifier my-classifier-onnx --format onnx
    export.py google-bert/bert-base-uncased bert-openvino --format openvino
    export.py my-summariser my-summariser-torch --format torch

OUTPUT becomes a folder with the graph, which needs neither this package nor transformers, and beside it the tokenizer,
config.json (without the model's code) and generation_config.json, as far as MODEL has them:

    torch      model.pt2            torch.export.load(…).module()(input_ids=…, attention_mask=…, token_type_ids=…)
    onnx       model.onnx           onnxruntime.InferenceSession(…).run(None, {"input_ids": …, …}); weights of more
                                    than 1.5 GB lie beside it, in model.onnx.data
    openvino   openvino_model.xml   openvino.Core().compile_model(…, "CPU", {"INFERENCE_PRECISION_HINT": "f32"});
               openvino_model.bin   without the hint it computes in bfloat16 where the processor can

The graph takes integers, `input_ids`, `attention_mask` and `token_type_ids`, (batch, length) each, and returns float32
numbers under the names that the model gives them. Batch and length are free; so are the choices of a multiple-choice
model, (batch, choices, length). The values at padding mean nothing: the model leaves zeros there, the graph whatever
comes out.

A model with two halves becomes two graphs, encoder_model and decoder_model; the decoder takes `input_ids`,
`attention_mask`, `encoder_hidden_states` (batch, source, width) and `encoder_attention_mask` (batch, source). It has no
cache: whoever generates with it gives it all that is written so far at every step.

The written files are opened in their runtime and run on ragged batches of several shapes. Where a number at a real
token is further than 1e-4 from the model's, the export is removed. OUTPUT appears, or is replaced, only when all
agrees.

Exit code: 0 exported, 1 the export computes something else than the model, 2 bad usage, a package that is not
installed, or a checkpoint that cannot be exported, 130 interrupted.
"""

import argparse
import importlib.metadata
import importlib.util
import json
import logging
import math
import shutil
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from torch import nn
from torch.export import Dim, ExportedProgram
from transformers.utils import cached_file

from modeling_scratchbert import ScratchBertForCausalLM
from modeling_scratchbert.checkpoints import raw_config

from check_parity import Checkpoint, classes_for, load, load_tokenizer, read_checkpoint
from model_classes import class_name, classes_in, short_name
from output import check_target, replacing

TOLERANCE = 1e-4

# The first opset in which attention is one operator; ONNX Runtime has it since 1.23.
OPSET = 23

# A protocol buffer holds no more than 2 GiB, names and graph included.
LARGEST_IN_ONE_FILE = 1_500_000_000

# What each class returns, and whether it says it of every token, or of a sequence.
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

# The batch that a graph is traced with, and those that it is checked on, none of which has either of its sizes: rows,
# length (None: as many tokens as there are positions), and where the padding is.
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


# ------------------------------------------------------------------------------------------------ what is exported


class Plain(nn.Module):
    """A model that takes tensors and returns a dict of them, so that a graph of it is of torch's own types alone."""

    def __init__(self, model: nn.Module, fields: list[str]):
        super().__init__()
        self.model = model
        self.fields = fields

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, token_type_ids: torch.Tensor) -> dict:
        mask = looking_back(attention_mask) if self.model.config.is_decoder else attention_mask
        returned = self.model(input_ids=input_ids, attention_mask=mask, token_type_ids=token_type_ids)
        return {field: returned[field] for field in self.fields}


class PlainDecoder(Plain):
    """The same of a decoder that looks at an encoder's output."""

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        encoder_hidden_states: torch.Tensor,
        encoder_attention_mask: torch.Tensor,
    ) -> dict:
        returned = self.model(
            input_ids=input_ids,
            attention_mask=looking_back(attention_mask),
            encoder_hidden_states=encoder_hidden_states,
            encoder_attention_mask=encoder_attention_mask,
        )
        return {field: returned[field] for field in self.fields}


def looking_back(mask: torch.Tensor) -> torch.Tensor:
    """A decoder's mask, `(B, T)` → `(B, 1, T, T)`, by which even padding sees itself. Padding on the left has nothing
    else to look at, for which OpenVINO returns no numbers; and in the next block, 0 times none is none."""
    places = torch.arange(mask.shape[1], device=mask.device)
    earlier, same = places[:, None] >= places, places[:, None] == places
    return earlier & mask.bool()[:, None, None] | same


@dataclass
class Piece:
    """What becomes one graph."""

    name: str
    module: Plain
    outputs: dict[str, bool]  # as in OUTPUTS
    axes: dict[str, tuple[str, ...]]  # of each input, those that are free

    @property
    def config(self):
        return self.module.model.config


def load_model(checkpoint: Checkpoint) -> nn.Module:
    """The model in float32: of the class that its configuration names, or else of one that its tensors are enough for.

    Raises:
        ValueError: the class is none of ours, or the checkpoint lacks a tensor of it.
    """
    config = checkpoint.config
    classes = classes_in(config.is_encoder_decoder, config.is_decoder)
    named = next(iter(checkpoint.architectures), None)
    if named is not None and short_name(named) not in classes:
        known = ", ".join(class_name(name, "scratchbert") for name in classes)
        raise ValueError(f"{checkpoint.source} is of the class {named}; exported are {known}, and their Bert twins.")
    name = classes_for(classes, checkpoint.parts, [])[0] if named is None else short_name(named)
    model = load(checkpoint.source, "scratchbert", name, "pooler" in checkpoint.parts)
    for module in model.modules():
        if hasattr(module, "config"):
            module.config.use_cache = False
    return model


def pieces_of(model) -> list[Piece]:
    """The whole model, or the two halves of one that has an encoder and a decoder."""
    if not model.config.is_encoder_decoder:
        return [piece("model", model)]
    decoder = model.get_decoder()
    if hasattr(model, "lm_head"):
        config = model.config.decoder_config()
        with torch.device("meta"):  # its own weights are given up at once
            whole = ScratchBertForCausalLM(config)
        whole.model, whole.lm_head = decoder, model.lm_head
        decoder = whole.eval()
    return [piece("encoder_model", model.get_encoder()), piece("decoder_model", decoder)]


def piece(name: str, model) -> Piece:
    short = short_name(type(model).__name__)
    outputs = dict(OUTPUTS[short])
    if short == "Model" and model.pooler is None:
        del outputs["pooler_output"]
    tokens = ("batch", "choices", "length") if short == "ForMultipleChoice" else ("batch", "length")
    axes = {"input_ids": tokens, "attention_mask": tokens}
    if model.config.add_cross_attention:
        axes |= dict.fromkeys(("encoder_hidden_states", "encoder_attention_mask"), ("batch", "source"))
        return Piece(name, PlainDecoder(model, list(outputs)).eval(), outputs, axes)
    axes["token_type_ids"] = tokens
    return Piece(name, Plain(model, list(outputs)).eval(), outputs, axes)


def make_batch(piece: Piece, rows: int, length: int | None, side: str, seed: int = 0) -> dict[str, torch.Tensor]:
    """Random ids in rows of random lengths, the first of several as long as can be."""
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
    """How a graph is written, and how the file is opened again; `{}` stands for the piece's name."""

    file: str
    needs: tuple[str, ...]  # packages
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
        # A copy: the next call writes over the numbers.
        return {name: torch.from_numpy(returned[name].copy()) for name in piece.outputs}

    return run


FORMATS = {
    "torch": Format("{}.pt2", (), write_torch, open_torch),
    "onnx": Format("{}.onnx", ("onnx", "onnxscript", "onnxruntime"), write_onnx, open_onnx),
    "openvino": Format("openvino_{}.xml", ("openvino",), write_openvino, open_openvino),
}


def check_packages(format_name: str) -> None:
    """Raises ValueError if a package that this format needs is not installed."""
    missing = [name for name in FORMATS[format_name].needs if importlib.util.find_spec(name) is None]
    if missing:
        are = "is" if len(missing) == 1 else "are"
        raise ValueError(
            f"--format {format_name} needs {' and '.join(missing)}, which {are} not installed: pip install "
            f"{' '.join(missing)}"
        )


# ------------------------------------------------------------------------------------------------ the check


@dataclass
class Comparison:
    """One written graph beside the model."""

    file: str
    shapes: list[str]  # of the batches
    differences: dict[str, list[float]]  # by output: the largest of each batch; infinite where nothing compares
    complaint: str | None = None  # of the runtime, the first

    @property
    def largest(self) -> float:
        """Not a number if any is none."""
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
        real = inputs["attention_mask"].bool()
        found.shapes.append("×".join(map(str, real.shape)) + (" left" if side == "left" else ""))
        expected, returned = piece.module.model(**inputs), {}
        try:
            run = run or FORMATS[format_name].open(piece, path)
            returned = run(inputs)
        except Exception as error:  # other people's libraries raise whatever they like
            found.complaint = found.complaint or f"{found.shapes[-1]}: {one_line(error)}"
        for name, row in found.differences.items():
            row.append(difference(returned.get(name), expected[name], real if piece.outputs[name] else real[..., 0]))
    return found


def difference(output: torch.Tensor | None, expected: torch.Tensor, real: torch.Tensor) -> float:
    """The largest between numbers of real tokens."""
    if output is None or output.shape != expected.shape:
        return math.inf
    return (output - expected)[real].abs().max().item()


def table(found: Comparison) -> str:
    lines = [(found.file, *found.shapes)]
    lines += [(name, *(f"{number:.1e}" for number in row)) for name, row in found.differences.items()]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    text = "\n".join(
        "  ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])]).rstrip() for line in lines
    )
    return f"{text}\n{found.complaint}" if found.complaint else text


def one_line(error: Exception) -> str:
    return " ".join((str(error).strip() or type(error).__name__).split())[:300]


# ------------------------------------------------------------------------------------------------ writing


class DoesNotAgreeError(Exception):
    """An export that computes something else than the model."""


def export(source: str, target, format_name: str, *, overwrite: bool = False) -> list[Comparison]:
    """Writes the folder `target` with the graphs of the model `source`, once they are found to agree with it, and
    prints a table of the differences.

    Args:
        source: a ScratchBert or BERT checkpoint: a folder or a hub id.
        target: a folder that does not exist yet, or is empty.
        format_name: one of `FORMATS`.
        overwrite: replace `target` where it holds a checkpoint, or an export.

    Raises:
        DoesNotAgreeError: the export computes something else than the model.
        ValueError: a package is missing, or the checkpoint cannot be exported.
        OSError: a file cannot be read or written, or `target` is in use.
    """
    check_packages(format_name)
    target = Path(target).resolve()
    check_target(Path(source).resolve(), target, overwrite)
    checkpoint = read_checkpoint(source)
    with replacing(target) as folder, torch.no_grad():
        found = []
        for part in pieces_of(load_model(checkpoint)):
            path = folder / FORMATS[format_name].file.format(part.name)
            with about(f"{source} cannot be exported to {format_name}"):
                FORMATS[format_name].write(part, trace(part), path)
            found.append(compare(part, format_name, path))
            print(f"{table(found[-1])}\n")
        if wrong := [comparison.file for comparison in found if not comparison.agrees]:
            raise DoesNotAgreeError(
                f"{' and '.join(wrong)} would compute something else than {source}: {TOLERANCE:.0e} is allowed. "
                "Nothing is written."
            )
        write_settings(folder, source)
    return found


@contextmanager
def about(what: str) -> Iterator[None]:
    """Turns whatever an exporter raises into a ValueError of one line."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except Exception as error:
        raise ValueError(f"{what}: {one_line(error)}") from error


def write_settings(folder: Path, source: str) -> None:
    """Writes what goes with the graphs: the tokenizer, and the configurations as they are, but for the way to the
    model's code, which is not there."""
    fields, _ = raw_config(source)
    fields = {name: value for name, value in fields.items() if name != "auto_map"}
    text = json.dumps(fields, indent=2, sort_keys=True) + "\n"
    (folder / "config.json").write_text(text, encoding="utf-8")
    generation = cached_file(source, "generation_config.json", _raise_exceptions_for_missing_entries=False)
    if generation:
        shutil.copyfile(generation, folder / "generation_config.json")
    tokenizer = load_tokenizer(source)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)


# ------------------------------------------------------------------------------------------------ the command line


def verdict(found: list[Comparison], format_name: str, target: str) -> str:
    largest = max(comparison.largest for comparison in found)
    packages = ("torch", *FORMATS[format_name].needs)
    versions = ", ".join(f"{package} {importlib.metadata.version(package)}" for package in packages)
    return f"{target}: within {largest:.1e} of the model on {len(CHECKED)} batches ({versions})"


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code."""
    summary, _, rest = __doc__.partition("\n\n")
    parser = argparse.ArgumentParser(
        prog="export.py", description=summary, epilog=rest, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", metavar="MODEL", help="a ScratchBert or BERT checkpoint: a folder or a hub id")
    parser.add_argument("output", metavar="OUTPUT", help="the folder to write")
    parser.add_argument("--format", choices=FORMATS, required=True, help="what to write")
    parser.add_argument("--overwrite", action="store_true", help="replace OUTPUT if it holds an export or a checkpoint")
    args = parser.parse_args(argv)
    # Exporters and loaders talk: what matters of it comes back as an error.
    logging.disable(logging.WARNING)
    transformers.logging.disable_progress_bar()
    try:
        found = export(args.model, args.output, args.format, overwrite=args.overwrite)
    except DoesNotAgreeError as error:
        print(f"export.py: {error}", file=sys.stderr)
        return 1
    except (OSError, ValueError, RuntimeError, StrictDataclassError) as error:
        print(f"export.py: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"export.py: interrupted; {args.output} is as it was", file=sys.stderr)
        return 130
    print(verdict(found, args.format, args.output))
    return 0


if __name__ == "__main__":
    sys.exit(main())
