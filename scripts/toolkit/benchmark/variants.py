"""Opens the variants.

Each opener takes the name of a variant, a folder that `save_model` wrote, and the number of threads. It returns a
function from a padded batch to its last hidden states. Converted files are written into the folder once.
"""

import contextlib
import importlib.util
import io
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy
import torch
import transformers
from torch import nn
from transformers import BertConfig, BertModel

import modeling_scratchbert
from modeling_scratchbert.cpu.library import find_library
from toolkit.benchmark import VARIANTS
from toolkit.benchmark.workloads import CALIBRATION
from toolkit.checkpoint import open_class, read_checkpoint, short_name
from toolkit.common import described, how_to_install, processor

Encode = Callable[[dict[str, torch.Tensor]], torch.Tensor]


# --------------------------------------------------------------------------------------------------------------- model


def save_model(source: str | None, folder: Path):
    """Writes the weights that all variants open, as a BERT folder. Returns the model's configuration.

    Raises:
        CommandError: the model cannot be opened, or is no encoder.
    """
    if source is None:
        torch.manual_seed(0)
        BertModel(BertConfig(), add_pooling_layer=False).save_pretrained(folder)
    else:
        checkpoint = read_checkpoint(source)
        config = checkpoint.config
        if config.is_encoder_decoder or config.is_decoder:
            raise ValueError(f"{source} generates text; expected an encoder.")
        has_labels = config.num_labels > 1 and config.problem_type != "regression"
        name = short_name((checkpoint.architectures or [""])[0])
        is_classifier = name in ("ForSequenceClassification", "ForTokenClassification") and has_labels
        open_class(checkpoint, "scratchbert", name if is_classifier else "Model", False).save_as_bert(folder)
    return BertConfig.from_pretrained(folder)


def load(folder: Path, prefix: str, **options) -> nn.Module:
    """BERT's class (prefix Bert) or ours (prefix ScratchBert) with the weights of the folder."""
    [architecture] = BertConfig.from_pretrained(folder).architectures
    library = transformers if prefix == "Bert" else modeling_scratchbert
    if architecture == "BertModel":  # hidden states do not depend on the pooler
        options["add_pooling_layer"] = False
    model_class = getattr(library, prefix + architecture.removeprefix("Bert"))
    return model_class.from_pretrained(folder, **options)


class TorchEncoder:
    """A model of torch as a function of a batch."""

    def __init__(self, model):
        self.model = model
        self.has_labels = model.base_model is not model

    @torch.inference_mode()
    def __call__(self, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        return self.model.base_model(**inputs).last_hidden_state

    @torch.inference_mode()
    def labels(self, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        """The labels of texts, or of tokens without the first and the last, `(labels, 1)`; for a model with several
        labels for a text, whether it has each, `(texts, labels)`."""
        logits = self.model(**inputs).logits
        if self.model.config.problem_type == "multi_label_classification":
            return logits > 0
        labels = logits.argmax(dim=-1, keepdim=True)
        return labels if labels.dim() == 2 else labels[:, 1:-1][inputs["attention_mask"][:, 2:].bool()]


def to_export(folder: Path) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """A model whose first output is its hidden states, and example inputs."""
    mask = torch.ones(2, 8, dtype=torch.long)
    mask[0, 5:] = 0
    return load(folder, "Bert").base_model, {"input_ids": torch.full((2, 8), 5), "attention_mask": mask}


# ------------------------------------------------------------------------------------------------------------- openers


def open_bert(name: str, folder: Path, threads: int) -> Encode:
    dtype = torch.bfloat16 if name == "bert-bf16" else torch.float32
    attention = "eager" if name == "bert-eager" else "sdpa"
    model = load(folder, "Bert", dtype=dtype, attn_implementation=attention)
    if name == "bert-int8":
        from torchao.quantization import Int8DynamicActivationInt8WeightConfig, quantize_

        quantize_(model, Int8DynamicActivationInt8WeightConfig())
    return TorchEncoder(model)


def open_zentorch(name: str, folder: Path, threads: int) -> Encode:
    import zentorch  # noqa: F401, adds its backend to torch.compile

    model = load(folder, "Bert", dtype=torch.bfloat16 if name == "zentorch-bf16" else torch.float32)
    model.base_model.compile(backend="zentorch", dynamic=True)
    return TorchEncoder(model)


def open_ours(name: str, folder: Path, threads: int) -> Encode:
    dtype = torch.bfloat16 if name == "ours-bf16" else torch.float32
    model = load(folder, "ScratchBert", dtype=dtype, padding_free=name != "ours-padded")
    if VARIANTS[name].precision == "int8":
        calibration = torch.load(folder / CALIBRATION) if name.endswith("calibrated") else None
        model.optimize_for_inference("int8", calibration)
    elif name not in ("ours", "ours-padded"):
        model.optimize_for_inference()
    return TorchEncoder(model)


def open_onnx(name: str, folder: Path, threads: int) -> Encode:
    import onnxruntime
    from onnxruntime.quantization import quantize_dynamic

    file = folder / "float32.onnx"
    if not file.exists():
        model, inputs = to_export(folder)
        axes = {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC}
        shapes = dict.fromkeys(inputs, axes)
        torch.onnx.export(model, (), file, kwargs=inputs, dynamic_shapes=shapes, verbose=False)
    if name == "onnx-int8":
        int8_file = folder / "int8.onnx"
        if not int8_file.exists():
            quantize_dynamic(file, int8_file, op_types_to_quantize=["MatMul", "Gemm"], per_channel=True)
        file = int8_file
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3
    # Otherwise its threads spin after a call, and take cores from what is timed next.
    options.add_session_config_entry("session.force_spinning_stop", "1")
    session = onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])

    def run(inputs):
        outputs = session.run(None, {name: tensor.numpy() for name, tensor in inputs.items()})
        return torch.from_numpy(outputs[0])

    return run


def open_openvino(name: str, folder: Path, threads: int) -> Encode:
    import openvino

    core, file = openvino.Core(), folder / "openvino.xml"
    if not file.exists():
        model, inputs = to_export(folder)
        model = openvino.convert_model(model, example_input=inputs)
        openvino.save_model(model, file, compress_to_fp16=False)
    if name == "openvino-int8":
        int8_file = folder / "openvino-int8.xml"
        if not int8_file.exists():
            import nncf

            batches = torch.load(folder / CALIBRATION)
            data = nncf.Dataset([{name: tensor.numpy() for name, tensor in batch.items()} for batch in batches])
            quantized = nncf.quantize(
                core.read_model(file),
                data,
                preset=nncf.QuantizationPreset.MIXED,  # symmetric weights, asymmetric inputs
                model_type=nncf.ModelType.TRANSFORMER,
                subset_size=len(batches),
            )
            openvino.save_model(quantized, int8_file, compress_to_fp16=False)
        file = int8_file
    options = {
        # By default, it computes in bfloat16 if the processor supports that.
        "INFERENCE_PRECISION_HINT": "bf16" if name == "openvino-bf16" else "f32",
        "INFERENCE_NUM_THREADS": threads,
        "PERFORMANCE_HINT": "LATENCY",
    }
    compiled = core.compile_model(file, "CPU", options)

    def run(inputs):
        outputs = compiled({name: tensor.numpy() for name, tensor in inputs.items()})
        return torch.from_numpy(outputs[0].copy())  # the next call overwrites it

    return run


def open_ctranslate2(name: str, folder: Path, threads: int) -> Encode:
    import ctranslate2

    converted = folder / "ctranslate2"
    if not converted.exists():
        copy = folder / "with-vocabulary"
        model = BertModel.from_pretrained(folder)
        model.config.position_embedding_type = "absolute"  # the converter expects it, and BertConfig no longer has it
        model.save_pretrained(copy)
        # The converter opens a tokenizer. Its words have no meaning: the model is given ids.
        words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *map(str, range(model.config.vocab_size))]
        (copy / "vocab.txt").write_text("\n".join(words[: model.config.vocab_size]))
        ctranslate2.converters.TransformersConverter(str(copy)).convert(str(converted))
    precision = "int8_float32" if name == "ctranslate2-int8" else "float32"
    encoder = ctranslate2.Encoder(str(converted), device="cpu", compute_type=precision, intra_threads=threads)

    def run(inputs):
        ids, mask = inputs["input_ids"], inputs["attention_mask"].bool()
        rows = [row[own].tolist() for row, own in zip(ids, mask, strict=True)]
        hidden = torch.from_numpy(numpy.array(encoder.forward_batch(rows).last_hidden_state))
        return nn.functional.pad(hidden, (0, 0, 0, ids.shape[1] - hidden.shape[1]))

    return run


OPENERS = {
    "BertModel": open_bert,
    "ScratchBert": open_ours,
    "ONNX Runtime": open_onnx,
    "OpenVINO": open_openvino,
    "zentorch": open_zentorch,
    "CTranslate2": open_ctranslate2,
}


def open_variant(name: str, folder: Path, threads: int) -> Encode:
    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings(action="ignore"):
        return OPENERS[VARIANTS[name].runtime](name, folder, threads)


def open_variants(names: list[str], folder: Path, threads: int) -> tuple[dict[str, Encode], dict[str, str]]:
    """The variants that run here, and the reason why each of the others does not."""
    reasons = {name: reason for name in names if (reason := missing(name)) is not None}
    runs = dict(surviving(names, reasons, lambda name: open_variant(name, folder, threads)))
    return runs, reasons


def surviving(names: Iterable[str], reasons: dict[str, str], function: Callable[[str], object]) -> Iterator[tuple]:
    """Yields the name and the result of the function for each variant that is not in `reasons`. If the function fails,
    the reason is added there: a runtime can raise any exception.

    Raises:
        RuntimeError: BertModel fails.
    """
    for name in names:
        if name in reasons:
            continue
        try:
            result = function(name)
        except Exception as error:
            if name == "bert":
                raise RuntimeError(f"BertModel, the reference, fails: {described(error)}") from error
            reasons[name] = described(error)
        else:
            yield name, result


# -------------------------------------------------------------------------------------------------------- requirements


def missing(name: str) -> str | None:
    """Why a variant cannot run here, or None if it can. Ours in bfloat16 runs everywhere: without instructions for
    bfloat16 it multiplies in float32."""
    variant = VARIANTS[name]
    is_ours = variant.runtime == "ScratchBert"
    absent = [library for library in variant.needs if importlib.util.find_spec(library) is None]
    if absent:
        return how_to_install(absent)
    flags = processor()["flags"]  # none where they are unknown
    if variant.precision == "bfloat16" and not is_ours and flags and "avx512_bf16" not in flags:
        return "this CPU has no bfloat16 instructions"
    if variant.precision == "int8" and is_ours and not find_library():
        return "int8 requires the library in C++, which is not built or not for this CPU"
    return None
