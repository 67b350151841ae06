"""The parts of the command `benchmark`."""

# Named here so that `--help` lists them without importing torch.
SENTENCES = ("single-1", "single", "single-32")
ENCODER_WORKLOADS = ("reviews", "reviews-sorted", "mix", "full-128", "full-512", *SENTENCES)
WORKLOADS = (*ENCODER_WORKLOADS, "training", "decoding")
VARIANT_NAMES = (
    "bert",
    "bert-eager",
    "bert-compiled",
    "bert-bf16",
    "bert-int8",
    "onnx",
    "onnx-int8",
    "openvino",
    "openvino-bf16",
    "openvino-int8",
    "sentence-transformers",
    "ctranslate2",
    "ctranslate2-int8",
    "bert-cuda",
    "bert-cuda-flash",
    "ours",
    "ours-optimised",
    "ours-eager",
    "ours-compiled",
    "ours-aotinductor",
    "ours-bf16",
    "ours-int8",
    "ours-cuda",
)
