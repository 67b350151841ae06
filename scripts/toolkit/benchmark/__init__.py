"""The parts of the command `benchmark`, and the variants that it times: ways to run the same BERT.

The names are here so that `--help` lists them without importing torch.
"""

from typing import NamedTuple


class Variant(NamedTuple):
    """A runtime and how it is used.

    Attributes:
        details: the precision of the matrix products, and what else distinguishes it from the runtime's other variants.
        needs: the libraries that it requires.
    """

    runtime: str
    details: str
    needs: tuple[str, ...] = ()

    @property
    def precision(self) -> str:
        return self.details.partition(",")[0]


ONNX = ("onnx", "onnxscript", "onnxruntime")
VARIANTS = {
    "bert": Variant("BertModel", "float32"),
    "bert-eager": Variant("BertModel", "float32, eager attention"),
    "bert-bf16": Variant("BertModel", "bfloat16"),
    "bert-int8": Variant("BertModel", "int8, of torchao", ("torchao",)),
    "onnx": Variant("ONNX Runtime", "float32", ONNX),
    "onnx-int8": Variant("ONNX Runtime", "int8", ONNX),
    "openvino": Variant("OpenVINO", "float32", ("openvino",)),
    "openvino-bf16": Variant("OpenVINO", "bfloat16", ("openvino",)),
    "openvino-int8": Variant("OpenVINO", "int8, calibrated", ("openvino", "nncf")),
    "zentorch": Variant("zentorch", "float32", ("zentorch",)),
    "zentorch-bf16": Variant("zentorch", "bfloat16", ("zentorch",)),
    "ctranslate2": Variant("CTranslate2", "float32", ("ctranslate2",)),
    "ctranslate2-int8": Variant("CTranslate2", "int8", ("ctranslate2",)),
    "ours-padded": Variant("ScratchBert", "float32, as loaded"),
    "ours": Variant("ScratchBert", "float32, padding_free"),
    "ours-optimised": Variant("ScratchBert", "float32, optimised"),
    "ours-bf16": Variant("ScratchBert", "bfloat16, optimised"),
    "ours-int8": Variant("ScratchBert", "int8, optimised"),
    "ours-int8-calibrated": Variant("ScratchBert", "int8, optimised, calibrated"),
}

ROW_WORKLOADS = ("rows", "single-rows")  # of the user's rows
SENTENCES = ("single", "single-32", "single-rows")
WORKLOADS = ("reviews", "reviews-sorted", "full-128", "single", "single-32", "training", "decoding")
