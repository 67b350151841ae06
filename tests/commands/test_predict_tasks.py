"""The results of `scripts/predict.py` for each task beside an independent reference."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn.functional import normalize
from transformers import AutoTokenizer, EncoderDecoderModel, pipeline

from support.checkpoint_kinds import change_tensors
from support.corpora import HEADS, errors_of, read_output, results, rows_for, run, texts, write_rows
from support.models import REFERENCES
from support.prepacked import INT8, needs_library

pytestmark = pytest.mark.usefixtures("quiet_only_here", "here")

TEXTS = [*texts(20), "a good film " * 30]


def rows_file(rows: list[dict] | None = None) -> str:
    return write_rows(Path("rows.jsonl"), rows or [{"text": text} for text in TEXTS])


def close(found, expected, atol=5e-5):
    np.testing.assert_allclose(np.array(found), np.array(expected), rtol=0, atol=atol)


def reference_of(folder: str, task: str):
    """BERT's own class, from a folder of the kind bert."""
    cls = EncoderDecoderModel if task == "generate" else REFERENCES[HEADS[task]]
    return cls.from_pretrained(folder, dtype=torch.float32).eval()


def encoded(folder: str, *given, **options) -> dict:
    return AutoTokenizer.from_pretrained(folder)(*given, truncation=True, return_tensors="pt", **options)


# ------------------------------------------------------------------------------------------------ beside BERT, by hand


@pytest.mark.parametrize(
    ("flags", "pooled"),
    [
        ("", lambda states: states.mean(0)),
        ("--pooling cls --max_length 9", lambda states: states[0]),
        ("--pooling max --truncate_dim 5", lambda states: states.max(0).values[:5]),
        ("--normalize --truncate_dim 7", lambda states: normalize(states.mean(0)[:7], dim=0)),
        ("--prompt good --embedding_dtype float16", lambda states: states.mean(0).half()),
        ("--embedding_dtype int8", lambda states: states.mean(0)),
    ],
)
def test_embeddings_are_those_of_bert(flags, pooled, make_bert):
    folder = make_bert()
    found = results("out", folder, rows_file(), *flags.split())
    bert, prompt = reference_of(folder, "embed"), "good" if "--prompt" in flags else ""
    length = {"max_length": 9} if "--max_length" in flags else {}
    with torch.no_grad():
        states = [bert(**encoded(folder, prompt + text, **length)).last_hidden_state[0] for text in TEXTS]
    scales = np.array([row.get("scale", 1.0) for row in found])
    stored = np.array([row["embedding"] for row in found], float) * scales[:, None]
    expected = np.array([pooled(state) for state in states])
    bound = {"int8": scales[:, None] / 2 + 1e-6, "float16": np.abs(expected) / 1024}.get(flags.rpartition(" ")[2], 5e-5)
    assert (np.abs(stored - expected) <= bound).all()


@pytest.mark.parametrize("dtype", ["bfloat16", INT8])
def test_embeddings_in_fewer_bits_are_near(dtype, minilm, reviews):
    rows = rows_file([{"text": row["text"]} for row in reviews[:16]])
    exact, rounded = (
        np.array([row["embedding"] for row in results(name, minilm, rows, "--dtype", name)])
        for name in ("float32", dtype)
    )
    cosines = (exact * rounded).sum(1) / np.linalg.norm(rounded, axis=1)
    assert 0.98 < cosines.min() < cosines.max() < 0.999999


def test_answers_are_the_best_spans_of_all_windows(make_bert):
    """Beside all spans of all windows, one after the other."""
    folder, rows = make_bert("answer"), rows_for("answer")
    for row in rows:
        row["context"] = f"{row['context']} {row['context']}".replace("film", "Fílm")
    bert, tokenizer = reference_of(folder, "answer"), AutoTokenizer.from_pretrained(folder)
    best = []
    for row in rows:
        windows = tokenizer(
            *(row["question"], row["context"]),
            truncation="only_second",
            max_length=30,
            stride=6,
            return_overflowing_tokens=True,
        )
        spans, nulls = [], []
        for window in windows.encodings:
            ids, types = torch.tensor([window.ids]), torch.tensor([window.type_ids])
            with torch.no_grad():
                start, end = (each[0].tolist() for each in bert(ids, token_type_ids=types).to_tuple())
            nulls.append(start[0] + end[0])
            places = [i for i, part in enumerate(window.sequence_ids) if part == 1]
            spans += [
                (start[i] + end[j], window.offsets[i][0], window.offsets[j][1])
                for i in places
                for j in places
                if i <= j < i + 4
            ]
        score, begin, stop = max(spans)
        best.append((score - min(nulls), begin, row["context"][begin:stop]))
    limit = sorted(score for score, *_ in best)[10] + 1e-3
    argv = [folder, rows_file(rows), "--max_length", "30", "--stride", "6", "--max_answer_length", "4"]
    found = results("out", *argv, "--null_threshold", f"{limit}")
    close([row["score"] for row in found], [score for score, *_ in best], 1e-4)
    expected = [(text, begin) if score > limit else ("", None) for score, begin, text in best]
    assert [(row["prediction"], row["start"]) for row in found] == expected
    assert len({row["prediction"] for row in found}) > 10


@pytest.mark.parametrize("task", ["generate", "continue"])
@pytest.mark.parametrize("beams", [1, 3])
def test_texts_are_those_that_the_reference_generates(task, beams, make_bert):
    folder = make_bert(task)
    argv = [folder, rows_file(), "--max_new_tokens", "8", "--num_beams", beams, "--option", "repetition_penalty=1.3"]
    found = results("out", *argv)
    reference, tokenizer = reference_of(folder, task), AutoTokenizer.from_pretrained(folder)
    options = {"max_new_tokens": 8, "num_beams": beams, "repetition_penalty": 1.3, "pad_token_id": 0, "eos_token_id": 3}
    for text, row in zip(TEXTS, found, strict=True):
        ids = encoded(folder, text)["input_ids"]
        if task == "continue":  # without [SEP], and the end of a text that is too long
            body = tokenizer(text, add_special_tokens=False)["input_ids"][-32:]
            ids = torch.tensor([[2, *body]])
        written = reference.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, **options)[0]
        if task == "continue":
            assert row["prediction"].startswith(text)
            written = written[ids.shape[1] :]
        expected = tokenizer.decode(written, skip_special_tokens=True)
        assert row["prediction"].replace(" ", "").removeprefix(text.replace(" ", "")) == expected.replace(" ", "")


# --------------------------------------------------------------------------------------- beside transformers' pipelines


@pytest.mark.parametrize(
    ("fields", "function"),
    [
        ({}, "softmax"),
        ({"problem_type": "multi_label_classification"}, "sigmoid"),
        ({"problem_type": "regression"}, "none"),
        ({"problem_type": "regression", "num_labels": 1, "id2label": {0: "score"}}, "none"),
    ],
)
@pytest.mark.parametrize("is_pair", [False, True])
def test_labels_are_those_of_the_pipeline(fields, function, is_pair, make_bert):
    folder = make_bert("classify", **fields)
    rows = [{"text": text, **({"text_pair": text[::2]} if is_pair else {})} for text in TEXTS]
    argv = ["--text_pair_column", "text_pair"] if is_pair else []
    argv += ["--all_scores"] if function == "softmax" else []
    found, reference = results("out", folder, rows_file(rows), *argv), reference_of(folder, "classify")
    classify = pipeline("text-classification", model=reference, tokenizer=folder)
    names = list(reference.config.id2label.values())
    for row, content in zip(found, rows, strict=True):
        scored = classify(content, top_k=None, function_to_apply=function, truncation=True)
        scores = {each["label"]: each["score"] for each in scored}
        expected = [scores[name] for name in names]
        if function == "none":
            close(np.ravel(row["prediction"]), expected)
            continue
        close([row["scores"][name] for name in names], expected)
        if function == "softmax":
            assert row["prediction"] == scored[0]["label"]
            close(row["score"], scored[0]["score"])
        else:
            assert row["prediction"] == [name for name in names if scores[name] > 0.5]


@pytest.mark.parametrize("strategy", ["none", "simple", "first", "average", "max"])
def test_entities_are_those_of_the_pipeline(strategy, make_bert):
    """Also of texts of several windows."""
    folder, rows = make_bert("tag"), rows_for("tag", longest=90)
    found = results("out", folder, rows_file(rows), "--aggregation", strategy)
    tag = pipeline(
        *("token-classification", reference_of(folder, "tag")),
        tokenizer=AutoTokenizer.from_pretrained(folder),
        aggregation_strategy=strategy,
        **({} if strategy == "none" else {"stride": 10}),
    )
    for row in found:
        if strategy == "none" and len(row["text"].split()) > 35:
            continue  # the pipeline merges no windows
        expected = tag(row["text"])
        assert [{**each, "score": 0} for each in row["entities"]] == [{**each, "score": 0} for each in expected]
        close([each["score"] for each in row["entities"]], [each["score"] for each in expected])


def test_masked_words_are_those_of_the_pipeline(make_bert):
    folder, rows = make_bert("fill-mask"), rows_for("fill-mask")
    found = results("out", folder, rows_file(rows), "--top_k", "3")
    fill = pipeline("fill-mask", reference_of(folder, "fill-mask"), tokenizer=folder, top_k=3)
    for row in found:
        expected = fill(row["text"])
        assert row["words"] == [[each["token_str"] for each in mask] for mask in expected]
        close(row["scores"], [[each["score"] for each in mask] for mask in expected])


# ------------------------------------------------------------------------------------------------ what rows depend on


INT8_TASKS = [pytest.param(task, "int8", marks=needs_library) for task in ("embed", "tag")]


@pytest.mark.parametrize(
    ("task", "dtype"),
    [*((task, "float32") for task in HEADS), ("embed", "bfloat16"), *INT8_TASKS],
)
def test_a_row_has_the_same_bits_alone_and_in_any_batch(task, dtype, make_bert):
    folder, rows = make_bert(task, hidden_size=48, num_attention_heads=3, intermediate_size=1100), rows_for(task)
    options = ["--max_new_tokens", "5"] if HEADS[task] in ("ForConditionalGeneration", "ForCausalLM") else []
    argv = [folder, "rows.jsonl", "--dtype", dtype, *options, "--keep_columns", "id"]
    found = []
    for batch, order in [("1", rows), ("100", rows[::-1]), ("5000", rows[1::2] + rows[::2])]:
        rows_file(order)
        whole = results(f"out{batch}", *argv, "--tokens_per_batch", batch)
        found.append(sorted((row["id"], repr({**row, "row": 0})) for row in whole))
    assert found[0] == found[1] == found[2]


def spoil_film(tensors) -> None:
    for name, tensor in tensors.items():
        if name.endswith("word_embeddings.weight"):
            tensor[8] = float("nan")


@pytest.mark.parametrize("task", HEADS)
def test_a_row_whose_numbers_are_not_finite_is_bad(task, make_bert, here):
    rows = rows_for(task, longest=12)
    folder = make_bert(task, tie_word_embeddings=False, initializer_range=0.03)
    change_tensors(Path(folder), spoil_film)
    is_bad = [any("film" in str(value) for value in row.values()) for row in rows]
    argv = [folder, rows_file(rows), *(["--max_new_tokens", "3"] if task in ("generate", "continue") else [])]
    assert run(*argv, "--output", "stopped") == 2
    assert not read_output("stopped")
    found = results("out", *argv, "--on_bad_row", "skip")
    assert [row["id"] for row in found] == [row["id"] for row, bad in zip(rows, is_bad, strict=True) if not bad]
    assert [each["row"] - 1 for each in errors_of("out")] == np.flatnonzero(is_bad).tolist()


@pytest.mark.parametrize("task", ["embed", "tag", "rerank", "answer", "generate", "fill-mask"])
def test_a_text_of_the_command_line_has_the_result_of_a_row(task, make_bert, capsys):
    folder = make_bert(task)
    given = {name: value for name, value in rows_for(task)[3].items() if name != "id"}
    [row] = results("out", folder, rows_file([given]))
    capsys.readouterr()
    first, *second = given.values()
    assert run(folder, "--text", first, *(("--text_pair", second[0]) if second else ())) == 0
    assert json.loads(capsys.readouterr().out) == {name: row[name] for name in row.keys() - {"file", "row", *given}}
