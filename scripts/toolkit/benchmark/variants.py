"""The variants that the benchmark times: one table of ways to run the same BERT, in other runtimes and in ours.

Each opens the same folder and returns a function from a padded batch to its last hidden states.
"""

import contextlib
import gc
import importlib.util
import io
import multiprocessing
import os
import re
import shutil
import tempfile
import warnings
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from transformers import BertModel

from modeling_scratchbert import ScratchBertModel
from toolkit.benchmark.workloads import Batch
from toolkit.cli import how_to_install
from toolkit.hub import silence_libraries

Run = Callable[[dict[str, torch.Tensor]], torch.Tensor]
TOLERANCE = 1e-5  # between float32 values that should be equal


@dataclass(frozen=True)
class Variant:
    """A way to run the model.

    Attributes:
        build: `build(folder, threads)` opens the model.
        needs: the libraries that it requires.
        dtype: whose matrix-multiplication rate its lower bound is computed with.
        tolerance: the largest difference to BertModel that is allowed; None: any, because the variant is not ours or
            computes in lower precision.
    """

    build: Callable[[Path, int], Run]
    needs: tuple[str, ...] = ()
    dtype: str = "float32"
    tolerance: float | None = None


def torch_run(model: torch.nn.Module) -> Run:
    @torch.inference_mode()
    def run(inputs):
        return model(**inputs).last_hidden_state

    return run


def bert(folder: Path, threads: int, attention: str = "sdpa", dtype=torch.float32, compiled: bool = False) -> Run:
    model = BertModel.from_pretrained(folder, attn_implementation=attention, dtype=dtype).eval()
    return torch_run(torch.compile(model, dynamic=True) if compiled else model)


def bert_int8(folder: Path, threads: int) -> Run:
    from torchao.quantization import Int8DynamicActivationInt8WeightConfig, quantize_

    model = BertModel.from_pretrained(folder).eval()
    quantize_(model, Int8DynamicActivationInt8WeightConfig())
    return torch_run(model)


def ours(folder: Path, threads: int, dtype=torch.float32, optimised: bool = False, compiled: bool = False) -> Run:
    model = ScratchBertModel.from_pretrained(folder, dtype=dtype).eval()
    if optimised:
        model.optimize_for_inference()
    return torch_run(torch.compile(model, dynamic=True) if compiled else model)


class LastHiddenState(torch.nn.Module):
    """BertModel with plain tensors as inputs and output, as exporters expect them."""

    def __init__(self, model: BertModel):
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state


def to_export(folder: Path) -> tuple[torch.nn.Module, tuple[torch.Tensor, torch.Tensor]]:
    """The model and example inputs. The wrapper is in evaluation mode as well: an exporter may pass its mode on."""
    input_ids, mask = torch.full((2, 8), 5), torch.ones(2, 8, dtype=torch.long)
    mask[0, 5:] = 0
    return LastHiddenState(BertModel.from_pretrained(folder)).eval(), (input_ids, mask)


def onnx(folder: Path, threads: int, int8: bool = False) -> Run:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3
    # Otherwise its threads spin after a call and take cores from the variant that is timed next.
    options.add_session_config_entry("session.force_spinning_stop", "1")
    file = onnx_file(folder, int8)
    session = onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])

    def run(inputs):
        (hidden,) = session.run(None, {name: tensor.numpy() for name, tensor in inputs.items()})
        return torch.from_numpy(hidden)

    return run


def onnx_file(folder: Path, int8: bool) -> Path:
    """The exported model, from an earlier call if there was one."""
    file = folder / ("int8.onnx" if int8 else "float32.onnx")
    if file.exists():
        return file
    if int8:
        from onnxruntime.quantization import quantize_dynamic

        quantize_dynamic(onnx_file(folder, False), file, op_types_to_quantize=["MatMul", "Gemm"], per_channel=True)
        return file
    model, example = to_export(folder)
    names = ["input_ids", "attention_mask"]
    free = {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC}
    torch.onnx.export(
        model, example, file, dynamo=True, dynamic_shapes=(free, free), input_names=names,
        output_names=["last_hidden_state"], verbose=False,
    )  # fmt: skip
    return file


def openvino(folder: Path, threads: int, precision: str = "f32") -> Run:
    import openvino

    file = folder / "openvino.xml"
    if not file.exists():
        model, example = to_export(folder)
        openvino.save_model(openvino.convert_model(model, example_input=example), file, compress_to_fp16=False)
    # Without the hint it computes in bfloat16 if the machine supports it.
    options = {
        "INFERENCE_PRECISION_HINT": precision,
        "INFERENCE_NUM_THREADS": threads,
        "PERFORMANCE_HINT": "LATENCY",
    }
    compiled = openvino.Core().compile_model(file, "CPU", options)

    def run(inputs):
        # A copy: the next call overwrites the result.
        return torch.from_numpy(compiled([inputs["input_ids"].numpy(), inputs["attention_mask"].numpy()])[0].copy())

    return run


ONNX = ("onnx", "onnxscript", "onnxruntime")
VARIANTS = {
    "bert": Variant(bert),
    "bert-eager": Variant(partial(bert, attention="eager")),
    "bert-compiled": Variant(partial(bert, compiled=True)),
    "bert-bf16": Variant(partial(bert, dtype=torch.bfloat16), dtype="bfloat16"),
    "bert-int8": Variant(bert_int8, needs=("torchao",)),
    "onnx": Variant(onnx, needs=ONNX),
    "onnx-int8": Variant(partial(onnx, int8=True), needs=ONNX),
    "openvino": Variant(openvino, needs=("openvino",)),
    "openvino-bf16": Variant(partial(openvino, precision="bf16"), needs=("openvino",), dtype="bfloat16"),
    "ours": Variant(ours, tolerance=TOLERANCE),
    "ours-optimised": Variant(partial(ours, optimised=True), tolerance=TOLERANCE),
    "ours-compiled": Variant(partial(ours, compiled=True), tolerance=TOLERANCE),
    "ours-bf16": Variant(partial(ours, dtype=torch.bfloat16, optimised=True), dtype="bfloat16"),
}


def missing(name: str) -> str | None:
    """Why a variant cannot run here, or None if it can."""
    absent = [library for library in VARIANTS[name].needs if importlib.util.find_spec(library) is None]
    return how_to_install(absent) if absent else None


def first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def open_variants(names: list[str], folder: Path, threads: int) -> tuple[dict[str, Run], dict[str, str]]:
    """The variants that run here, and the reason why each of the others does not."""
    runs, reasons = {}, {}
    for name in names:
        reason = missing(name)
        if reason is None:
            try:
                with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    runs[name] = VARIANTS[name].build(folder, threads)
            except Exception as error:  # a runtime can raise any exception
                reason = first_line(error)
        if reason is not None:
            reasons[name] = reason
    gc.collect()
    return runs, reasons


# --------------------------------------------------------------------------------------------------------------- memory


def memory(field: str) -> float:
    """The memory of this process in MiB: VmRSS now, VmHWM at its peak. ru_maxrss of a child starts at its parent's."""
    try:
        text = Path("/proc/self/status").read_text(encoding="utf-8")
    except OSError:  # not Linux
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    return int(re.search(rf"^{field}:\s+(\d+) kB$", text, flags=re.MULTILINE)[1]) / 1024


def peak_in_this_process(name: str, folder: Path, threads: int, batch: Batch) -> float:
    silence_libraries()
    torch.set_num_threads(threads)
    before = memory("VmRSS")
    VARIANTS[name].build(folder, threads)(batch.inputs)
    return memory("VmHWM") - before


def peak_memory(name: str, folder: Path, threads: int, batch: Batch) -> float:
    """The MiB by which opening this variant and running it on one batch raise the peak memory of a new process that has
    imported torch and transformers. The process reads a copy of the files: pages that this process has mapped, or that
    are not on the disk yet, would not count."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as copy, ProcessPoolExecutor(1, mp_context=context) as pool:
        shutil.copytree(folder, copy, dirs_exist_ok=True)
        os.sync()
        return pool.submit(peak_in_this_process, name, Path(copy), threads, batch).result()
