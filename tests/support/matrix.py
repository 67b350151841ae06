"""Prints the "Works with" table of docs/ecosystem.md from the tests that ran: `make matrix`.

matrix.py REPORT.xml, which `make test-ecosystem` writes; exits with 1 if a row has a failed test, or none.
"""

import re
import sys
from dataclasses import dataclass
from importlib.metadata import version
from xml.etree import ElementTree


@dataclass
class Row:
    what: str
    packages: tuple[str, ...]
    files: tuple[str, ...]  # in tests/ecosystem, without "test_" and ".py"
    pattern: str = ""  # what the names of the row's tests contain


ROWS = [
    Row("pipelines", ("transformers",), ("pipelines",)),
    Row("`trust_remote_code`, without the package", ("transformers",), ("hub_form",)),
    Row(
        "PEFT: LoRA, DoRA, IA3, OFT, AdaLoRA, VeRA, prefix, prompt and p-tuning, without `target_modules`",
        ("peft",),
        ("peft",),
    ),
    Row(
        "sentence-transformers: bi-encoders, cross-encoders, SPLADE, late interaction, `Router`, and their trainers",
        ("sentence-transformers",),
        ("sentence_transformers", "sentence_encoders"),
    ),
    Row("SetFit", ("setfit",), ("frameworks",), "setfit"),
    Row("Lightning, with two processes", ("lightning",), ("frameworks",), "lightning"),
    Row("MLflow", ("mlflow-skinny",), ("frameworks",), "mlflow"),
    Row("Ray Data: `predict` over a corpus", ("ray", "pyarrow"), ("corpus",), "ray"),
    Row("`datasets.map` with two processes", ("datasets",), ("processes", "hub_form"), "datasets.map"),
    Row("pickle, cloudpickle, dill", ("cloudpickle", "dill"), ("processes", "hub_form"), "pickle|dill"),
    Row("sixteen threads; a FastAPI server", ("fastapi", "uvicorn"), ("threads",)),
    Row("LitServe: the server of the README", ("litserve",), ("server",)),
    Row("bertviz", ("bertviz",), ("attention_readers",), "bertviz"),
    Row("Captum", ("captum",), ("attention_readers",), "captum"),
    Row("hooks, nnsight", ("nnsight",), ("attention_readers",), "hooks|nnsight"),
    Row("AOTInductor, TorchScript", ("torch",), ("compiled_files",)),
    Row("ONNX Runtime", ("onnxruntime", "onnx"), ("export",), "onnx"),
    Row("OpenVINO", ("openvino",), ("export",), "openvino"),
    Row("CTranslate2", ("ctranslate2",), ("export",), "ctranslate2"),
    Row("torchao: int8", ("torchao",), ("quantisation",)),
    Row("tensor parallelism", ("torch",), ("tensor_parallel",)),
    Row("vLLM's Transformers backend: its calls, not vLLM itself", ("torch",), ("serving",)),
    Row("wheel and source distribution", ("build",), ("packaging",)),
]


def outcomes(report: str) -> dict[tuple[str, str], str]:
    """Return "passed", "failed" or "skipped" for each test in a JUnit report, by the name of its file and its own."""
    results = {}
    for case in ElementTree.parse(report).iter("testcase"):
        file = case.attrib["classname"].rpartition(".test_")[2]
        children = {child.tag for child in case}
        outcome = "failed" if children & {"failure", "error"} else "skipped" if "skipped" in children else "passed"
        results[file, case.attrib["name"]] = outcome
    return results


def outcomes_of(row: Row, results: dict[tuple[str, str], str]) -> set[str]:
    """Return the outcomes of a row's tests. Their numbers would be others with the next test."""
    return {
        outcome
        for (file, name), outcome in results.items()
        if file in row.files and re.search(row.pattern, name, re.IGNORECASE)
    }


def table(results: dict[tuple[str, str], str]) -> tuple[list[str], bool]:
    """Return the lines of the table, and whether each row has a test that passed and none that failed."""
    lines, all_work = ["| library or feature | version | result | test files |", "| --- | --- | --- | --- |"], True
    for row in ROWS:
        found = outcomes_of(row, results)
        all_work &= "passed" in found and "failed" not in found
        tests = ", ".join(sorted(found)) or "not run"
        versions = ", ".join(f"{name} {version(name)}" for name in row.packages) if "passed" in found else ""
        files = ", ".join(f"`test_{file}.py`" for file in row.files)
        lines.append(f"| {row.what} | {versions} | {tests} | {files} |")
    return lines, all_work


def main(argv: list[str]) -> int:
    lines, all_work = table(outcomes(argv[0]))
    print("\n".join(lines))
    return 0 if all_work else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
