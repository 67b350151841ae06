"""`scripts/predict.py` beside sentence-transformers, on Ray, over HTTP, and the Python of docs/corpus.md."""

import contextlib
import csv
import functools
import http.server
import inspect
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from pyarrow import parquet
from transformers import AutoTokenizer

pytest.importorskip("sentence_transformers", reason="sentence-transformers is not installed")

from sentence_transformers import CrossEncoder, SentenceTransformer, sentence_transformer
from sentence_transformers.sentence_transformer.modules import (
    Dense,
    Dropout,
    LayerNorm,
    Normalize,
    Pooling,
    Transformer,
)
from sentence_transformers.util import import_from_string
from sentence_transformers.util.quantization import quantize_embeddings
from toolkit.corpus.model import read_model, task_of
from toolkit.corpus.sentence_folder import KIND_OF_TYPE

import predict
from support.corpora import reference_of, save_model, texts, write_rows
from support.folders import ROOT, SCRIPTS
from support.tasks import compute, open_tiny, write_sentence_folder

pytestmark = pytest.mark.usefixtures("quiet_only_here")

FLAGS = ["--threads_per_process", "1", "--part_rows", "8"]
ROWS = [{"id": number, "text": text} for number, text in enumerate(texts(60))]


def table(folder: Path) -> dict[str, list]:
    """The columns of all parts."""
    parts = [parquet.read_table(path).to_pydict() for path in sorted(folder.glob("part-*.parquet"))]
    return {name: [value for part in parts for value in part[name]] for name in parts[0]}


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name[0] in "p0"}


# ------------------------------------------------------------------------------------------------ sentence-transformers


@pytest.mark.parametrize("prompts", [{}, {"prompts": {"query": "query: "}, "default_prompt_name": "query"}])
def test_embeddings_are_those_of_sentence_transformers(prompts, minilm, reviews, tmp_path):
    """On a folder of version 2 as it is on the Hub, and on one that the installed version has saved."""
    theirs = SentenceTransformer(minilm, device="cpu", **prompts)
    theirs.save(str(tmp_path / "saved"))
    sentences = [row["text"] for row in reviews] + ["a long story " * 200]
    expected = theirs.encode(sentences, batch_size=8)
    rows = write_rows(tmp_path / "rows.jsonl", [{"text": text} for text in sentences])
    for number, folder in enumerate([tmp_path / "saved"] if prompts else [minilm, tmp_path / "saved"]):
        output = tmp_path / f"out-{number}"
        assert predict.main([str(folder), rows, "--output", str(output), "--processes", "1", *FLAGS]) == 0
        found = np.array(table(output)["embedding"])
        assert (found * expected).sum(1).min() > 0.99999
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)


MODULES = {
    "dense": (lambda: [Dense(64, 16, activation_function=torch.nn.GELU()), Dropout(0.1), Normalize()], ("mean", "cls")),
    "residual": (lambda: [Normalize(), Dense(32, 17, bias=False, use_residual=True)], "weightedmean"),
    "all": (
        lambda: [Dense(192, 192, use_residual=True), Normalize(), LayerNorm(192)],
        ("cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken"),
    ),
}


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("include_prompt", [True, False])
def test_modules_and_poolings_are_those_of_sentence_transformers(name, include_prompt, tmp_path):
    """With and without a prompt, cut and scaled."""
    bert = save_model(tmp_path / "model", "embed", "bert")
    modules, poolings = MODULES[name]
    parts = [Transformer(bert), Pooling(32, poolings, include_prompt=include_prompt), *modules()]
    SentenceTransformer(modules=parts, prompts={"q": "good film : "}).save(str(tmp_path / "saved"))
    theirs, sentences = SentenceTransformer(str(tmp_path / "saved"), device="cpu"), texts(40)
    for options in ({}, {"prompt_name": "q"}, {"prompt": "bad "}, {"prompt_name": "q", "truncate_dim": 7}):
        expected = theirs.encode(sentences, **options)
        found = compute(tmp_path / "saved", "embed", sentences, **options)["embedding"]
        np.testing.assert_allclose(found, expected, rtol=0, atol=5e-5)
        scaled = theirs.encode(sentences, normalize_embeddings=True, **options)
        found = compute(tmp_path / "saved", "embed", sentences, normalize=True, **options)["embedding"]
        np.testing.assert_allclose(found, scaled, rtol=0, atol=5e-5)


@pytest.mark.parametrize("kind", ["Transformer", "Pooling", "Dense", "LayerNorm", "Dropout", "Normalize"])
def test_modules_are_known_by_the_names_that_sentence_transformers_maps(kind):
    known = {name for name, value in KIND_OF_TYPE.items() if value == kind}
    classes = {name: find_class(name) for name in known}
    expected = getattr(sentence_transformer.modules, kind)
    assert {inspect.getsource(found) for found in classes.values() if found} == {inspect.getsource(expected)}
    assert f"{expected.__module__}.{kind}" in known
    assert f"sentence_transformers.models.{kind}" in known


def find_class(name: str):
    """What sentence-transformers imports by this name; None if it has no such class."""
    with contextlib.suppress(ImportError, AttributeError):
        found = import_from_string(name)
        return found if isinstance(found, type) else None
    return None


@pytest.mark.parametrize("of_folder", [None, 8, 16, 256])
@pytest.mark.parametrize("of_tokenizer", [None, 8, 16, 256])
@pytest.mark.parametrize("positions", [12, 40])
def test_texts_are_cut_as_by_sentence_transformers(of_folder, of_tokenizer, positions, tmp_path):
    """Except that it fails on a text with more tokens than the model has positions."""
    folder = save_model(tmp_path / "model", "embed", "bert", max_position_embeddings=positions)
    path = tmp_path / "model" / "tokenizer_config.json"
    fields = json.loads(path.read_text()) | {"model_max_length": of_tokenizer}
    path.write_text(json.dumps({name: value for name, value in fields.items() if value is not None}))
    settings = {} if of_folder is None else {"max_seq_length": of_folder}
    write_sentence_folder(
        tmp_path / "model",
        ["Transformer", "Pooling"],
        settings=settings,
        Pooling={"embedding_dimension": 32, "pooling_mode": "mean"},
    )
    task, long = open_tiny(folder, "embed"), "a good film " * 300
    theirs = SentenceTransformer(folder, device="cpu")
    expected = theirs.preprocess([long])["input_ids"][0].tolist()
    [found] = task.encode([long], None).ids
    assert len(found) == min(len(expected), positions)
    assert found[:-1] == expected[: len(found) - 1]


@pytest.mark.parametrize("precision", ["int8", "uint8", "binary", "ubinary"])
@pytest.mark.parametrize("dimensions", [5, 32])
def test_stored_embeddings_are_those_of_quantize_embeddings(precision, dimensions, tmp_path):
    folder, sentences = save_model(tmp_path / "model", "embed", "bert"), texts(60)
    exact = compute(folder, "embed", sentences, truncate_dim=dimensions)["embedding"]
    ranges = np.stack([exact[:20].min(0), exact[:20].max(0)]) if "int8" in precision else None
    if ranges is not None:
        ranges[:, 3] = ranges[0, 3]  # a number that does not vary
        np.save(tmp_path / "ranges.npy", ranges)
        ranges = predict.ranges(str(tmp_path / "ranges.npy"))
    found = compute(folder, "embed", sentences, truncate_dim=dimensions, embedding_dtype=precision, ranges=ranges)
    expected = quantize_embeddings(exact, precision, ranges and np.array(ranges, np.float32))
    assert list(found) == ["embedding"]
    assert found["embedding"].dtype == expected.dtype
    np.testing.assert_array_equal(found["embedding"], expected)


def test_scores_are_those_of_a_cross_encoder(tmp_path):
    folder = save_model(tmp_path / "model", "rerank", "bert")
    pairs = list(zip(texts(200, 1), texts(200, 2), strict=True))
    expected = CrossEncoder(folder, device="cpu", max_length=40).predict(pairs)
    rows = write_rows(tmp_path / "rows.jsonl", [{"query": one, "document": other} for one, other in pairs])
    assert predict.main([folder, rows, "--output", str(tmp_path / "out"), "--processes", "1", *FLAGS]) == 0
    np.testing.assert_allclose(table(tmp_path / "out")["score"], expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("task", ["rerank", "classify"])
@pytest.mark.parametrize("activation", [None, "Identity", "Tanh", "Softplus", "Softmax"])
@pytest.mark.parametrize("prompt", [None, "good film : "])
def test_a_saved_cross_encoder_is_followed(task, activation, prompt, tmp_path):
    bert = save_model(tmp_path / "model", task, "bert")
    prompts = {} if prompt is None else {"prompts": {"q": prompt}, "default_prompt_name": "q"}
    function = activation and getattr(torch.nn, activation)()
    CrossEncoder(bert, device="cpu", activation_fn=function, **prompts).save(str(tmp_path / "saved"))
    folder, (ones, others) = str(tmp_path / "saved"), (texts(60, 1), texts(60, 2))
    expected = CrossEncoder(folder, device="cpu").predict(list(zip(ones, others, strict=True)))
    assert task_of(folder, read_model(folder, False)) == task
    found = compute(folder, task, ones, others, **({"all_scores": True} if task == "classify" else {}))
    scores = found["score"] if task == "rerank" else [list(row.values()) for row in found["all_scores"]]
    np.testing.assert_allclose(scores, expected, rtol=0, atol=5e-5)
    if task == "classify":
        assert found["label"] == [("bad", "fair", "good")[number] for number in expected.argmax(1)]
        np.testing.assert_allclose(found["score"], expected.max(1), rtol=0, atol=5e-5)


# --------------------------------------------------------------------------------------------------------- HTTP, fsspec


def test_input_over_http_and_output_in_a_store(tmp_path):
    folder = save_model(tmp_path / "model")
    (tmp_path / "served").mkdir()
    path = write_rows(tmp_path / "served" / "rows.jsonl", ROWS)
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=tmp_path / "served")
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/rows.jsonl"
        argv = ["--id_column", "id", "--processes", "1", *FLAGS]
        assert predict.main([folder, url, "--output", "memory://corpus/out", *argv]) == 0
        import fsspec

        store = fsspec.filesystem("memory")
        found = {Path(name).name: store.cat_file(name) for name in store.find("/corpus/out")}
        assert predict.main([folder, path, "--output", f"file://{tmp_path / 'out'}", *argv]) == 0
        expected = content(tmp_path / "out")
        assert {name: found[name] for name in expected} == expected
        store.rm_file("/corpus/out/part-000002.parquet")
        assert predict.main([folder, url, "--output", "memory://corpus/out", *argv, "--resume"]) == 0
        assert store.cat_file("/corpus/out/part-000002.parquet") == expected["part-000002.parquet"]
        server.shutdown()


# ------------------------------------------------------------------------------------------------------------------ Ray


# The path of this process, not that of its environment, which Ray's workers would inherit.
COMMAND = (
    f"import sys; sys.path[:0] = {[str(SCRIPTS), str(ROOT)]}; import predict; sys.exit(predict.main(sys.argv[1:]))"
)
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


def children_named(pid: int, name: str) -> list[int]:
    """The processes below `pid` whose command line has this name."""
    import psutil

    found = []
    for child in psutil.Process(pid).children(recursive=True):
        with contextlib.suppress(psutil.Error):  # it has ended
            found += [child.pid] if any(name in part for part in child.cmdline()) else []
    return found


def test_ray_writes_the_same_files_also_if_an_actor_is_killed(tmp_path):
    """From another working directory, with other batches."""
    pytest.importorskip("ray", reason="ray is not installed")
    folder = save_model(tmp_path / "model")
    rows = write_rows(tmp_path / "rows.jsonl", ROWS * 30)
    (tmp_path / "elsewhere").mkdir()
    assert predict.main([folder, rows, "--output", str(tmp_path / "local"), "--processes", "1", *FLAGS]) == 0
    command = [sys.executable, "-c", COMMAND, folder, rows, "--output", tmp_path / "ray", *FLAGS]
    process = subprocess.Popen(
        [*command, "--engine", "ray", "--processes", "2", "--tokens_per_batch", "50"],
        cwd=tmp_path / "elsewhere",
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    while process.poll() is None and len(list((tmp_path / "ray").glob("part-*"))) < 3:
        time.sleep(0.05)
    actors = children_named(process.pid, "RemoteWorker") if process.poll() is None else []
    for pid in actors[:1]:
        os.kill(pid, signal.SIGKILL)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, out + err
    assert actors, "the run was over before an actor could be killed"
    assert content(tmp_path / "ray") == content(tmp_path / "local")


def test_ray_reports_an_error_in_one_line(tmp_path):
    pytest.importorskip("ray", reason="ray is not installed")
    folder = save_model(tmp_path / "model", "fill-mask")
    masked = [{"text": f"{row['text']} [MASK]"} for row in ROWS[:20]]
    rows = write_rows(tmp_path / "rows.jsonl", [*masked, {"text": "a film"}])  # which only an actor notices
    command = [sys.executable, "-c", COMMAND, folder, rows, "--output", tmp_path / "ray", *FLAGS]
    done = subprocess.run(
        [*command, "--engine", "ray", "--processes", "1"], env=ENVIRONMENT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "row 21" in done.stderr.splitlines()[-1]
    assert (tmp_path / "ray" / "part-000001.parquet").exists()


# Its actors leave a file each, compute slowly, and use the CPU: the GPUs below are pretended.
RECORDED = f"""
import os, sys, time
sys.path[:0] = {[str(SCRIPTS), str(ROOT)]}
import predict
from dataclasses import replace
from pathlib import Path
from toolkit.corpus import ray_engine

class Recorded(ray_engine.RemoteWorker):
    def __init__(self, job):
        super().__init__(replace(job, device="cpu"))
        file = Path(job.output).with_suffix(".actors") / str(os.getpid())
        file.parent.mkdir(exist_ok=True)
        file.write_text(f"{{job.device}}:{{os.environ.get('CUDA_VISIBLE_DEVICES')}}")

    def run(self, part):
        time.sleep(0.2)
        return super().run(part)

ray_engine.RemoteWorker, ray_engine.SECONDS_FOR_THE_FIRST = Recorded, int(sys.argv.pop(1))
sys.exit(predict.main(sys.argv[1:]))
"""


@contextlib.contextmanager
def ray_cluster(**resources):
    """A cluster of this process. Yields its address."""
    ray = pytest.importorskip("ray", reason="ray is not installed")
    ray.init(include_dashboard=False, log_to_driver=False, logging_level="error", **resources)
    try:
        yield ray.get_runtime_context().gcs_address
    finally:
        ray.shutdown()


def start_recorded(address: str, seconds: int, *argv) -> subprocess.Popen:
    """Starts the command on a cluster. It waits so many seconds for the first actor."""
    command = [sys.executable, "-c", RECORDED, str(seconds), *argv, *FLAGS, "--engine", "ray", "--ray_address", address]
    environment = {**os.environ, "PYTHONPATH": ""}  # Ray has added what the cluster's clients need
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_a_busy_cluster(tmp_path):
    """No actor starts while others have all CPUs; with one CPU one starts, and a second when there is room for it."""
    folder = save_model(tmp_path / "model")
    rows = write_rows(tmp_path / "rows.jsonl", ROWS * 30)
    assert predict.main([folder, rows, "--output", str(tmp_path / "local"), "--processes", "1", *FLAGS]) == 0
    with ray_cluster(num_cpus=2) as address:
        import ray

        @ray.remote(num_cpus=1)
        class Other:
            def start(self):
                return True

        others = [Other.remote() for _ in range(2)]
        ray.get([other.start.remote() for other in others])
        process = start_recorded(address, 3, folder, rows, "--output", tmp_path / "never")
        error = process.communicate(timeout=300)[1].splitlines()[-1]
        assert process.returncode == 2
        assert all(word in error for word in ("3 s", "1 CPU"))
        assert not (tmp_path / "never.actors").exists()
        ray.kill(others.pop())
        process = start_recorded(address, 300, folder, rows, "--output", tmp_path / "ray", "--processes", "2")
        while process.poll() is None and not list((tmp_path / "ray").glob("part-*")):
            time.sleep(0.05)
        assert len(list((tmp_path / "ray.actors").iterdir())) == 1
        ray.kill(others.pop())
        out, err = process.communicate(timeout=300)
    assert process.returncode == 0, out + err
    assert "1 of 2 actors" in err
    assert len(list((tmp_path / "ray.actors").iterdir())) == 2
    assert content(tmp_path / "ray") == content(tmp_path / "local")


def test_an_actor_for_each_gpu(tmp_path):
    """On a cluster with two pretended GPUs, which proves the scheduling only: each actor is given one of its own."""
    folder = save_model(tmp_path / "model")
    rows = write_rows(tmp_path / "rows.jsonl", ROWS)
    assert predict.main([folder, rows, "--output", str(tmp_path / "local"), "--processes", "1", *FLAGS]) == 0
    with ray_cluster(num_cpus=4, num_gpus=2) as address:
        process = start_recorded(address, 300, folder, rows, "--output", tmp_path / "ray", "--device", "cuda")
        out, err = process.communicate(timeout=300)
    assert process.returncode == 0, out + err
    assert sorted(path.read_text() for path in (tmp_path / "ray.actors").iterdir()) == ["cuda:0", "cuda:1"]
    assert content(tmp_path / "ray") == content(tmp_path / "local")


# ----------------------------------------------------------------------------------------------------- docs/corpus.md


def code_of_documentation() -> list[str]:
    page = (ROOT / "docs" / "corpus.md").read_text()
    return re.findall(r"^```python corpus\n(.*?)^```", page, re.DOTALL | re.MULTILINE)


def test_readers_open_the_output_as_it_lies(tmp_path, monkeypatch):
    """The code of the documentation for pandas, pyarrow, datasets, DuckDB and Polars."""
    for library in ("duckdb", "polars"):
        pytest.importorskip(library, reason=f"{library} is not installed")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    folder = save_model(tmp_path / "my-model")
    with open("reviews.csv", "w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows([["id", "text"], [7, ""], *([i * 10, each["text"]] for i, each in enumerate(ROWS))])
    argv = [folder, "reviews.csv", "--output", "embeddings", "--id_column", "id", "--on_bad_row", "skip", *FLAGS]
    assert predict.main([*argv, "--processes", "1"]) == 0
    ids = [i * 10 for i in range(60)]
    for number, name in enumerate(("table", "frame")):
        found: dict = {}
        exec(code_of_documentation()[number], found)
        assert list(found[name]["id"]) == ids
    assert sorted(found["joined"].fetchnumpy()["id"].tolist()) == ids


@pytest.mark.parametrize(("number", "output"), [(2, "embeddings/*.parquet"), (3, "embeddings.parquet")])
def test_the_python_of_the_documentation(number, output, tmp_path):
    if number == 2:
        pytest.importorskip("ray", reason="ray is not installed")
    folder = save_model(tmp_path / "my-model", "embed", "bert")
    sentences = texts(30)
    with open(tmp_path / "reviews.csv", "w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows([["text"], *([text] for text in sentences)])
    (tmp_path / "example.py").write_text(code_of_documentation()[number])
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HOME": str(tmp_path / "cache")}
    done = subprocess.run(
        [sys.executable, "example.py"], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [row for path in sorted(tmp_path.glob(output)) for row in parquet.read_table(path).to_pylist()]
    found = {row["text"]: row["embedding"] for row in rows}
    bert, tokenizer = reference_of(folder, "embed"), AutoTokenizer.from_pretrained(folder)
    for text in sentences:
        with torch.no_grad():
            states = bert(**tokenizer(text, return_tensors="pt")).last_hidden_state
        np.testing.assert_allclose(found[text], states[0].mean(0), rtol=0, atol=1e-5)
