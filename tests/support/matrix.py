"""Prints the "Works with" table of docs/ecosystem.md from the tests that ran: `make matrix`.

matrix.py REPORT.xml, which `make test-ecosystem` writes; exits with 1 if a row has a failed test, or none that passed.
"""

import re
import sys
from importlib.metadata import version
from xml.etree import ElementTree

# For each library or feature: packages, files of tests/ecosystem without "test_" and ".py", and what the names of its
# tests contain.
ROWS = {
    "pipelines": ("transformers", "pipelines", ""),
    "`trust_remote_code`, without the package": ("transformers", "remote_code", "without_the_package"),
    "PEFT: LoRA, DoRA, IA3, OFT, AdaLoRA, VeRA, prefix, prompt and p-tuning, without `target_modules`": (
        "peft",
        "peft",
        "",
    ),
    "sentence-transformers: bi-encoders, cross-encoders, SPLADE, late interaction, `Router`, and their trainers": (
        "sentence-transformers",
        "sentence_transformers",
        "",
    ),
    "SetFit": ("setfit", "frameworks", "setfit"),
    "Lightning, with two processes": ("lightning", "frameworks", "lightning"),
    "MLflow": ("mlflow-skinny", "frameworks", "mlflow"),
    "Ray Data: `predict` over a corpus": ("ray pyarrow", "corpus", "ray"),
    "`datasets.map` with two processes": ("datasets", "processes", "datasets_map"),
    "pickle, cloudpickle, dill": ("cloudpickle dill", "processes", "pickle|dill"),
    "sixteen threads": ("torch", "threads", ""),
    "LitServe: the server of serving.md": ("litserve", "server", ""),
    "bertviz": ("bertviz", "attention_readers", "bertviz"),
    "Captum": ("captum", "attention_readers", "captum"),
    "nnsight": ("nnsight", "attention_readers", "nnsight"),
    "AOTInductor, TorchScript": ("torch", "compiled_files", ""),
    "ONNX Runtime": ("onnxruntime onnx", "export", "onnx"),
    "OpenVINO": ("openvino", "export", "openvino"),
    "CTranslate2": ("ctranslate2", "export", "ctranslate2"),
    "torchao: int8": ("torchao", "quantisation", ""),
    "tensor parallelism": ("torch", "tensor_parallel", ""),
    "vLLM's Transformers backend: its calls, not vLLM itself": ("torch", "serving", ""),
    "wheel and source distribution": ("build", "packaging", ""),
}


def outcomes(report: str) -> dict[str, str]:
    """Return "passed", "failed" or "skipped" for each test in a JUnit report, by its file and name."""
    results = {}
    for case in ElementTree.parse(report).iter("testcase"):
        tags = {child.tag for child in case}
        outcome = "failed" if tags & {"failure", "error"} else "skipped" if "skipped" in tags else "passed"
        results[f"{case.attrib['classname']} {case.attrib['name']}"] = outcome
    return results


def table(results: dict[str, str]) -> tuple[list[str], bool]:
    """Return the lines of the table, and whether each row has a test that passed and none that failed."""
    lines, all_work = ["| library or feature | version | result | test files |", "| --- | --- | --- | --- |"], True
    for what, (packages, file, pattern) in ROWS.items():
        tests = re.compile(rf"\.test_{file} .*({pattern})")
        found = {outcome for test, outcome in results.items() if tests.search(test)}
        all_work &= "passed" in found and "failed" not in found
        versions = ", ".join(f"{name} {version(name)}" for name in packages.split()) if "passed" in found else ""
        lines.append(f"| {what} | {versions} | {', '.join(sorted(found)) or 'not run'} | `test_{file}.py` |")
    return lines, all_work


if __name__ == "__main__":
    printed, works = table(outcomes(sys.argv[1]))
    print("\n".join(printed))
    sys.exit(not works)
