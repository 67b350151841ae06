"""Exports for the benchmark: a graph of a model, AOTInductor, and opening files of ONNX Runtime and OpenVINO."""

from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn
from torch.export import Dim, ExportedProgram

Run = Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]


class TensorModel(nn.Module):
    """A model whose outputs are a dict of tensors, which a graph can represent."""

    def __init__(self, model: nn.Module, fields: list[str]):
        super().__init__()
        self.model = model
        self.fields = fields

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, token_type_ids: torch.Tensor | None = None
    ) -> dict:
        inputs = {} if token_type_ids is None else {"token_type_ids": token_type_ids}
        returned = self.model(input_ids, attention_mask=attention_mask, **inputs)
        return {field: returned[field] for field in self.fields}


def piece_of(model: nn.Module) -> TensorModel:
    return TensorModel(model, ["last_hidden_state"]).eval()


def trace(piece: TensorModel) -> ExportedProgram:
    """The graph for every batch size and length."""
    ids = torch.arange(21).reshape(3, 7) % piece.model.config.vocab_size
    mask = (torch.arange(7) < torch.tensor([[7], [3], [5]])).long()
    batch = {"input_ids": ids, "attention_mask": mask, "token_type_ids": torch.zeros_like(ids)}
    axes = {0: Dim("batch"), 1: Dim("length", max=piece.model.config.max_position_embeddings)}
    return torch.export.export(piece, (), batch, dynamic_shapes=dict.fromkeys(batch, axes), strict=False)


def has_compiler() -> bool:
    from torch._inductor import cpp_builder, exc

    try:
        return bool(cpp_builder.get_cpp_compiler())
    except exc.InvalidCxxCompiler:
        return False


def write_aotinductor(piece: TensorModel, program: ExportedProgram, path: Path) -> None:
    from torch._inductor.utils import fresh_cache

    # Prepacked weights in oneDNN's layout, and one multiplication for queries, keys and values.
    options = {"freezing": True, "cpp.enable_concat_linear": True}
    # The default cache would keep a second copy of the weights.
    with fresh_cache():
        torch._inductor.aoti_compile_and_package(program, package_path=str(path), inductor_configs=options)


def open_aotinductor(path: Path, threads: int) -> Run:
    module = torch._inductor.aoti_load_package(str(path))
    return lambda inputs: module(**inputs)


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
