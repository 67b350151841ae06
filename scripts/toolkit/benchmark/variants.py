"""The variants that `benchmark` times: ways to run the same BERT, in other runtimes and in ours.

Each opens the same folder and returns a function from a padded batch to its last hidden states.
"""

import contextlib
import gc
import importlib.util
import io
import logging
import multiprocessing
import os
import re
import shutil
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy
import torch
from torch.nn.functional import pad as pad_tokens
from transformers import BertConfig, BertModel

from modeling_scratchbert import ScratchBertModel
from modeling_scratchbert.cpu.library import find_library
from toolkit import exporting
from toolkit.benchmark.timing import multiplies_natively
from toolkit.benchmark.workloads import Batch, pad, random_rows
from toolkit.cli import described, how_to_install
from toolkit.exporting import TensorModel, open_onnx, open_openvino
from toolkit.hub import silence_libraries

Run = Callable[[dict[str, torch.Tensor]], torch.Tensor]
Build = Callable[[Path, int], Callable]
CALIBRATION_BATCHES = 8
GPU, ON_GPU = "cuda", "bfloat16 on a GPU"


@dataclass(frozen=True)
class Variant:
    """A way to run the model.

    Attributes:
        build: `build(folder, threads)` opens the model.
        needs: the libraries that it requires.
        precision: of its matrix products: "float32", "bfloat16" or "int8"; or `ON_GPU`.
    """

    build: Callable[[Path, int], Run]
    needs: tuple[str, ...] = ()
    precision: str = "float32"


def torch_run(model: torch.nn.Module) -> Run:
    return torch.inference_mode()(lambda inputs: model(**inputs).last_hidden_state)


def load(folder: Path, model_class=BertModel, attention="sdpa", dtype=torch.float32) -> torch.nn.Module:
    """The model without its pooler: last hidden states do not depend on it. Ours removes padding."""
    options = {"padding_free": True} if model_class is ScratchBertModel else {}
    return model_class.from_pretrained(
        folder, attn_implementation=attention, dtype=dtype, add_pooling_layer=False, **options
    )


def as_loaded(folder: Path, threads: int, compiled: bool = False, **options) -> Run:
    model = load(folder, **options)
    return torch_run(torch.compile(model, dynamic=True) if compiled else model)


def bert_int8(folder: Path, threads: int) -> Run:
    from torchao.quantization import Int8DynamicActivationInt8WeightConfig, quantize_

    model = load(folder)
    quantize_(model, Int8DynamicActivationInt8WeightConfig())
    return torch_run(model)


def ours_optimised(folder: Path, threads: int, dtype: torch.dtype | str = torch.float32, attention="sdpa") -> Run:
    """In bfloat16, the weights are loaded as such; int8 weights are made of float32."""
    loaded = torch.float32 if dtype == "int8" else dtype
    return torch_run(load(folder, ScratchBertModel, attention, loaded).optimize_for_inference(dtype))


def aotinductor(folder: Path, threads: int) -> Run:
    file = folder / "aotinductor.pt2"
    if not file.exists():
        with torch.no_grad():
            piece = exporting.piece_of(load(folder, ScratchBertModel))
            exporting.write_aotinductor(piece, exporting.trace(piece), file)
    run = exporting.open_aotinductor(file, threads)
    return lambda inputs: run({**inputs, "token_type_ids": torch.zeros_like(inputs["input_ids"])})["last_hidden_state"]


def to_export(folder: Path) -> tuple[torch.nn.Module, tuple[torch.Tensor, torch.Tensor]]:
    """The model and example inputs. The wrapper is in evaluation mode as well: an exporter may pass its mode on."""
    input_ids, mask = torch.full((2, 8), 5), torch.ones(2, 8, dtype=torch.long)
    mask[0, 5:] = 0
    return TensorModel(load(folder), ["last_hidden_state"]).eval(), (input_ids, mask)


def onnx(folder: Path, threads: int, int8: bool = False) -> Run:
    run = open_onnx(onnx_file(folder, int8), threads)
    return lambda inputs: run(inputs)["last_hidden_state"]


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
        model,
        example,
        file,
        dynamo=True,
        dynamic_shapes=(free, free),
        input_names=names,
        output_names=["last_hidden_state"],
        verbose=False,
    )
    return file


def openvino(folder: Path, threads: int, precision: str = "f32", int8: bool = False) -> Run:
    run = open_openvino(openvino_file(folder, int8), threads, precision)
    return lambda inputs: run(inputs)["last_hidden_state"]


def openvino_file(folder: Path, int8: bool) -> Path:
    """The converted model, from an earlier call if there was one."""
    import openvino

    file = folder / ("openvino-int8.xml" if int8 else "openvino.xml")
    if file.exists():
        return file
    if int8:
        model = quantize(openvino.Core().read_model(openvino_file(folder, False)), BertConfig.from_pretrained(folder))
    else:
        model, example = to_export(folder)
        model = openvino.convert_model(model, example_input=example)
    openvino.save_model(model, file, compress_to_fp16=False)
    return file


def quantize(model, config):
    """The OpenVINO model in int8: weights and inputs of its matrix products, with ranges from a few random batches.
    Its accuracy has no meaning here; its speed does not depend on the ranges."""
    import nncf

    nncf.set_log_level(logging.ERROR)
    generator = torch.Generator().manual_seed(0)
    longest = min(128, config.max_position_embeddings)
    batches = [pad(random_rows(config, [longest, longest // 2], generator)) for _ in range(CALIBRATION_BATCHES)]
    data = nncf.Dataset([{name: ids.numpy() for name, ids in batch.inputs.items()} for batch in batches])
    preset = nncf.QuantizationPreset.MIXED  # symmetric weights, asymmetric inputs
    return nncf.quantize(
        model, data, preset=preset, model_type=nncf.ModelType.TRANSFORMER, subset_size=CALIBRATION_BATCHES
    )


def folder_with_vocabulary(folder: Path) -> Path:
    """A copy of the model for libraries that open a tokenizer with it, from an earlier call if there was one. They are
    given ids, so the words have no meaning."""
    copy = folder / "with-vocabulary"
    if not copy.exists():
        model = BertModel.from_pretrained(folder)
        model.config.position_embedding_type = "absolute"  # CTranslate2 expects it, and BertConfig no longer has it
        model.save_pretrained(copy)
        special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
        words = special + [f"[unused{i}]" for i in range(model.config.vocab_size)]
        (copy / "vocab.txt").write_text("\n".join(words[: model.config.vocab_size]), encoding="utf-8")
    return copy


def sentence_transformers(folder: Path, threads: int) -> Run:
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Transformer

    model = SentenceTransformer(modules=[Transformer(str(folder_with_vocabulary(folder)))], device="cpu").eval()
    return torch.inference_mode()(lambda inputs: model(dict(inputs))["token_embeddings"])


def ctranslate2(folder: Path, threads: int, precision: str = "float32") -> Run:
    import ctranslate2

    converted = folder / "ctranslate2"
    if not converted.exists():
        ctranslate2.converters.TransformersConverter(str(folder_with_vocabulary(folder))).convert(str(converted))
    encoder = ctranslate2.Encoder(str(converted), device="cpu", compute_type=precision, intra_threads=threads)

    def run(inputs):
        ids, mask = inputs["input_ids"], inputs["attention_mask"]
        rows = [row[: sum(ones)] for row, ones in zip(ids.tolist(), mask.tolist(), strict=True)]
        hidden = torch.from_numpy(numpy.array(encoder.forward_batch(rows).last_hidden_state))
        return pad_tokens(hidden, (0, 0, 0, ids.shape[1] - hidden.shape[1]))

    return run


def on_gpu(folder: Path, threads: int, model_class=BertModel, attention: str = "sdpa", is_packed: bool = False) -> Run:
    model = load(folder, model_class, attention, torch.bfloat16).to(GPU)

    @torch.inference_mode()
    def run(inputs):
        inputs = {name: tensor.to(GPU) for name, tensor in inputs.items()}
        hidden = run_packed(model, **inputs) if is_packed else model(**inputs).last_hidden_state
        torch.cuda.synchronize()
        return hidden

    return run


def run_packed(model, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
    """The hidden states of the non-padding tokens, packed into one row, as transformers' flash attention accepts them,
    and zeros at padding."""
    mask = attention_mask.bool()
    cu_seq_lens = pad_tokens(mask.sum(dim=1).cumsum(dim=0, dtype=torch.int32), (1, 0))
    longest = int(cu_seq_lens.diff().max())
    packed = model(
        input_ids=input_ids[mask][None],
        position_ids=(mask.cumsum(dim=1) - 1)[mask][None],
        cu_seq_lens_q=cu_seq_lens,
        cu_seq_lens_k=cu_seq_lens,
        max_length_q=longest,
        max_length_k=longest,
    ).last_hidden_state
    hidden = packed.new_zeros(*mask.shape, packed.shape[-1])
    hidden[mask] = packed[0]
    return hidden


ONNX = ("onnx", "onnxscript", "onnxruntime")
VARIANTS = {
    "bert": Variant(as_loaded),
    "bert-eager": Variant(partial(as_loaded, attention="eager")),
    "bert-compiled": Variant(partial(as_loaded, compiled=True)),
    "bert-bf16": Variant(partial(as_loaded, dtype=torch.bfloat16), precision="bfloat16"),
    "bert-int8": Variant(bert_int8, needs=("torchao",), precision="int8"),
    "onnx": Variant(onnx, needs=ONNX),
    "onnx-int8": Variant(partial(onnx, int8=True), needs=ONNX, precision="int8"),
    "openvino": Variant(openvino, needs=("openvino",)),
    "openvino-bf16": Variant(partial(openvino, precision="bf16"), needs=("openvino",), precision="bfloat16"),
    "openvino-int8": Variant(partial(openvino, int8=True), needs=("openvino", "nncf"), precision="int8"),
    "sentence-transformers": Variant(sentence_transformers, needs=("sentence_transformers",)),
    "ctranslate2": Variant(ctranslate2, needs=("ctranslate2",)),
    "ctranslate2-int8": Variant(partial(ctranslate2, precision="int8_float32"), ("ctranslate2",), precision="int8"),
    "bert-cuda": Variant(on_gpu, precision=ON_GPU),
    "bert-cuda-flash": Variant(partial(on_gpu, attention="flash_attention_2", is_packed=True), precision=ON_GPU),
    "ours": Variant(partial(as_loaded, model_class=ScratchBertModel)),
    "ours-optimised": Variant(ours_optimised),
    "ours-eager": Variant(partial(ours_optimised, attention="eager")),
    "ours-compiled": Variant(partial(as_loaded, model_class=ScratchBertModel, compiled=True)),
    "ours-aotinductor": Variant(aotinductor),
    "ours-bf16": Variant(partial(ours_optimised, dtype=torch.bfloat16), precision="bfloat16"),
    "ours-int8": Variant(partial(ours_optimised, dtype="int8"), precision="int8"),
    "ours-cuda": Variant(partial(on_gpu, model_class=ScratchBertModel), precision=ON_GPU),
}


def missing(name: str) -> str | None:
    """Why a variant cannot run here, or None if it can.

    Ours in bfloat16 runs everywhere: without instructions for bfloat16 it multiplies in float32. Other libraries
    emulate them, which takes a minute for a batch.
    """
    variant = VARIANTS[name]
    absent = [library for library in variant.needs if importlib.util.find_spec(library) is None]
    if absent:
        return how_to_install(absent)
    if variant.precision == "bfloat16" and not name.startswith("ours") and not multiplies_natively(torch.bfloat16):
        return "this CPU has no bfloat16 instructions"
    if variant.precision == ON_GPU and not torch.cuda.is_available():
        return "this machine has no CUDA GPU that torch can use"
    if name == "ours-aotinductor" and not exporting.has_compiler():
        return "there is no C++ compiler"
    if name == "ours-int8" and not find_library():
        return "int8 requires the library in C++, which is not built or not for this CPU"
    return None


def open_variants(names: list[str], folder: Path, threads: int) -> tuple[dict[str, Run], dict[str, str]]:
    """The variants that run here, and the reason why each of the others does not."""
    runs, reasons = {}, {}
    for name in names:
        if reason := missing(name):
            reasons[name] = reason
            continue
        try:
            with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings(action="ignore"):
                runs[name] = VARIANTS[name].build(folder, threads)
        except Exception as error:  # a runtime can raise any exception
            reasons[name] = described(error)
    gc.collect()
    return runs, reasons


# -------------------------------------------------------------------------------------------------------- new processes


def in_new_process(function: Callable, *arguments):
    """What the function returns in a new process."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), silence_libraries) as pool:
        return pool.submit(function, *arguments).result()


def memory(field: str) -> float:
    """The memory of this process in MiB: VmRSS now, VmHWM at its peak. ru_maxrss of a child starts at its parent's."""
    try:
        text = Path("/proc/self/status").read_text(encoding="utf-8")
    except OSError:  # not Linux
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    return int(re.search(rf"^{field}:\s+(\d+) kB$", text, flags=re.MULTILINE)[1]) / 1024


def peak_in_this_process(build: Build, folder: Path, threads: int, batch: Batch) -> tuple[float, float]:
    torch.set_num_threads(threads)
    before, anonymous = memory("VmRSS"), [memory("RssAnon")]
    threading.Thread(target=sample_anonymous_memory, args=[anonymous], daemon=True).start()
    build(folder, threads)(batch.inputs)
    return memory("VmHWM") - before, max(anonymous) - anonymous[0]


def sample_anonymous_memory(samples: list[float]) -> None:
    """Appends to `samples` until the process ends, because Linux does not record the peak of anonymous memory."""
    while True:
        samples.append(memory("RssAnon"))
        time.sleep(0.001)


def peak_memory(build: Build, folder: Path, threads: int, batch: Batch) -> tuple[float, float]:
    """The MiB by which `build` and running its result on one batch raise the peak of the resident and of the anonymous
    memory, which has no pages of files, of a new process that has imported torch and transformers. It reads a copy of
    the files: pages that this process has mapped, or that are not on the disk yet, would not count as resident."""
    with tempfile.TemporaryDirectory() as copy:
        shutil.copytree(folder, copy, dirs_exist_ok=True)
        os.sync()
        return in_new_process(peak_in_this_process, build, Path(copy), threads, batch)
