"""`scripts/predict.py` beside sentence-transformers, on Ray, and its output in readers of datasets."""

import contextlib
import csv
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("sentence_transformers", reason="sentence-transformers is not installed")

import psutil
from pyarrow import parquet
from sentence_transformers import CrossEncoder, SentenceTransformer, quantize_embeddings
from sentence_transformers.sentence_transformer.modules import Dense, LayerNorm, Normalize, Pooling, Transformer

from support.corpora import all_files, results, rows_for, run, save_model, texts, write_rows
from support.folders import ROOT, SCRIPTS
from support.processes import run_python

pytestmark = pytest.mark.usefixtures("quiet_only_here")

FLAGS = ["--part_rows", "8"]
SENTENCES = [*texts(40), "a good film " * 50]


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    """The working directory, with a file of texts."""
    monkeypatch.chdir(tmp_path)
    write_rows(tmp_path / "rows.jsonl", [{"text": text} for text in SENTENCES])
    return tmp_path


def embeddings(output: str, folder, *flags: str) -> np.ndarray:
    return np.array([row["embedding"] for row in results(output, folder, "rows.jsonl", *flags)])


# ------------------------------------------------------------------------------------------------ sentence-transformers

MODULES = {
    "mean": lambda: [Pooling(32, "mean")],
    "normalised": lambda: [Pooling(32, "cls"), Normalize()],
    "without the prompt": lambda: [Pooling(32, "mean", include_prompt=False)],
    "several poolings": lambda: [Pooling(32, ("max", "weightedmean", "lasttoken"), include_prompt=False)],
    "dense": lambda: [Pooling(32, "mean"), Dense(32, 16, activation_function=torch.nn.GELU()), LayerNorm(16)],
}


@pytest.mark.parametrize("name", MODULES)
def test_embeddings_are_those_of_sentence_transformers(name, here):
    """With prompts, cut and scaled; also a folder that the library has saved anew."""
    parts = [Transformer(save_model(here / "model", kind="bert")), *MODULES[name]()]
    prompts = {"q": "good film : ", "d": ""}
    SentenceTransformer(modules=parts, prompts=prompts, default_prompt_name="q").save(str(here / "saved"))
    theirs = SentenceTransformer(str(here / "saved"), device="cpu")
    cases = [({}, []), ({"prompt_name": "d"}, ["--prompt_name", "d"]), ({"prompt": "bad "}, ["--prompt", "bad "])]
    cases += [({"truncate_dim": 7, "normalize_embeddings": True}, ["--truncate_dim", "7", "--normalize"])]
    for number, (options, flags) in enumerate(cases):
        expected = theirs.encode(SENTENCES, **options)
        np.testing.assert_allclose(embeddings(f"{number}", "saved", *flags), expected, rtol=0, atol=5e-5)


@pytest.mark.parametrize("precision", ["int8", "uint8", "binary", "ubinary"])
def test_stored_embeddings_are_those_of_quantize_embeddings(precision, here):
    folder = save_model(here / "model", kind="bert")
    exact = embeddings("exact", folder, "--truncate_dim", "13").astype(np.float32)
    ranges = np.stack([exact[:20].min(0), exact[:20].max(0)])
    np.save("ranges.npy", ranges)
    flags = ["--ranges", "ranges.npy"] if "int8" in precision else []
    found = embeddings("out", folder, "--truncate_dim", "13", "--embedding_dtype", precision, *flags)
    np.testing.assert_array_equal(found, quantize_embeddings(exact, precision, ranges))


@pytest.mark.parametrize("function", [None, torch.nn.Identity(), torch.nn.Sigmoid()])
def test_scores_are_those_of_a_cross_encoder(function, here):
    bert, rows = save_model(here / "model", "rerank", "bert"), rows_for("rerank", 50)
    CrossEncoder(bert, device="cpu", activation_fn=function, prompts={"q": "a "}, default_prompt_name="q").save("saved")
    expected = CrossEncoder("saved", device="cpu").predict([(row["query"], row["document"]) for row in rows])
    found = results("out", "saved", write_rows(here / "pairs.jsonl", rows))
    np.testing.assert_allclose([row["score"] for row in found], expected, rtol=0, atol=5e-5)


# ------------------------------------------------------------------------------------------------------------------ Ray


def test_ray_writes_the_same_files_also_if_an_actor_is_killed(here):
    """With other batches. PYTHONPATH is empty, so that Ray brings the code."""
    pytest.importorskip("ray", reason="ray is not installed")
    folder, rows = save_model(here / "model"), write_rows(here / "many.jsonl", rows_for("embed", 60) * 30)
    argv = [folder, rows, *FLAGS, "--tokens_per_batch", "50"]
    assert run(*argv, "--output", "local") == 0
    code = (
        f"import sys; sys.path[:0] = {[str(SCRIPTS), str(ROOT)]}; import predict; sys.exit(predict.main(sys.argv[1:]))"
    )
    command = [sys.executable, "-c", code, *argv, "--output", "ray", "--ray", "--processes", "2"]
    process = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": ""}, stderr=subprocess.PIPE, text=True)
    while process.poll() is None and len(list(here.glob("ray/part-*"))) < 3:
        time.sleep(0.05)
    for child in psutil.Process(process.pid).children(recursive=True):
        with contextlib.suppress(psutil.Error):  # it has ended
            if re.search(r"Worker\.run|ray::Worker", " ".join(child.cmdline())):
                child.kill()
                break
    else:
        pytest.fail("there is no actor")
    errors = process.communicate(timeout=300)[1]
    assert process.returncode == 0, errors
    files, expected = all_files("ray"), all_files("local")
    for output in (files, expected):
        output.pop("__run__/manifest.json")  # which has where it was computed
    assert files == expected


# ----------------------------------------------------------------------------------------------------- docs/corpus.md


def code_of_documentation() -> list[str]:
    page = (ROOT / "docs" / "corpus.md").read_text()
    return re.findall(r"^```python corpus\n(.*?)^```", page, re.DOTALL | re.MULTILINE)


@pytest.fixture
def my_model(here) -> str:
    """The folder of the model in the documentation, beside its reviews.csv, of which one has no text."""
    with open("reviews.csv", "w", newline="") as file:
        rows = [["id", "text"], *([10 * number, text] for number, text in enumerate(SENTENCES))]
        csv.writer(file).writerows(rows)
    return save_model(here / "my-model", kind="bert")


def test_readers_of_the_documentation_open_the_output(my_model, here, monkeypatch):
    """pandas, pyarrow, datasets, DuckDB and Polars, beside a skipped row and metrics."""
    for library in ("duckdb", "polars"):
        pytest.importorskip(library, reason=f"{library} is not installed")
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", here / "cache")
    with open("reviews.csv", "a") as file:
        file.write("7,\n")
    results("embeddings", my_model, "reviews.csv", "--on_bad_row", "skip", *FLAGS)
    ids, found = [10 * number for number in range(len(SENTENCES))], {}
    tables, joins = code_of_documentation()[:2]
    for line in tables.splitlines():
        exec(line, found)
        if line.startswith("table"):
            column = found["table"]["id"]
            assert (column.to_pylist() if hasattr(column, "to_pylist") else list(column)) == ids
    exec(joins, found)
    assert list(found["frame"]["id"]) == ids
    assert sorted(found["joined"].fetchnumpy()["id"].tolist()) == ids


@pytest.mark.parametrize(("number", "output"), [(2, "embeddings/*.parquet"), (3, "embeddings.parquet")])
def test_programs_of_the_documentation_write_the_embeddings_of_predict(number, output, my_model, here):
    if number == 2:
        pytest.importorskip("ray", reason="ray is not installed")
    expected = {row["text"]: row["embedding"] for row in results("out", my_model, "reviews.csv")}
    (here / "example.py").write_text(code_of_documentation()[number])
    run_python("example.py", cwd=here, PYTHONPATH=str(ROOT), HF_HOME=str(here / "cache"))
    found = [row for path in here.glob(output) for row in parquet.read_table(path).to_pylist()]
    assert len(found) == len(SENTENCES)
    for row in found:
        np.testing.assert_allclose(row["embedding"], expected[row["text"]], rtol=0, atol=1e-5)
