"""`scripts/check_determinism.py`: a text whose bits depend on what is beside it is found, and nothing else is."""

import json
import random

import pytest
import torch

import check_determinism
from support.command_tokenizer import WORDS, make_tokenizer
from support.models import random_scratchbert
from toolkit import determinism
from toolkit.benchmark import variants as benchmark_variants
from toolkit.benchmark.workloads import pad

POSITIONS = 40

pytestmark = pytest.mark.usefixtures("quiet_only_here")


@pytest.fixture(autouse=True)
def same_threads_afterwards():
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    random_scratchbert("Model", max_position_embeddings=POSITIONS, num_attention_heads=2).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


def run(*arguments) -> int:
    return check_determinism.main([str(argument) for argument in arguments])


def report(tmp_path, folder, *arguments) -> tuple[int, dict]:
    """The exit code, and the JSON file."""
    small = ("--texts", 12, "--batchings", 2, "--threads", 1, 2)
    code = run(folder, *small, "--json", tmp_path / "report.json", *arguments)
    return code, json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))


def replace(monkeypatch, name, run_batch) -> None:
    open_variant = benchmark_variants.open_variant
    monkeypatch.setattr(
        benchmark_variants,
        "open_variant",
        lambda each, *arguments: run_batch if each == name else open_variant(each, *arguments),
    )


def ids_of(inputs, value=0.0):
    """Hidden states that are the ids, and `value` at padding."""
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    return torch.where(mask.bool(), ids.float(), value)[..., None]


# -------------------------------------------------------------------------------------------------------------- verdict


def test_our_optimised_variants_change_no_text(tmp_path, folder, capsys):
    names = [name for name in determinism.OPTIMISED if benchmark_variants.missing(name) is None]
    code, found = report(tmp_path, folder, "--variants", "bert", "ours", *names)
    assert (code, found["failures"], found["unavailable"]) == (0, [], {})
    assert [row["variant"] for row in found["rows"]] == ["bert", "ours", *names]
    for row in found["rows"]:
        assert (row["error"], row["comparisons"]) == (None, 3 * 12)
    for row in found["rows"][2:]:
        assert (row["different"], row["changed_texts"], row["tokens_of_changed_texts"], row["max_abs"]) == (0, 0, [], 0)
    printed = capsys.readouterr().out
    assert "12 texts of 1 to 40 tokens, batchings: 2, threads: 1, 2" in printed
    assert "No optimised variant that ran changes a text." in printed
    assert found["machine"]["processor"] in printed
    assert torch.__version__.startswith(found["machine"]["versions"]["torch"])


@pytest.mark.parametrize(("name", "expected"), [("ours-optimised", 1), ("ours", 0), ("bert", 0)])
def test_numbers_that_depend_on_the_batch_are_found(name, expected, tmp_path, folder, monkeypatch, capsys):
    def run_batch(inputs):
        sizes.append(len(inputs["input_ids"]))
        return ids_of(inputs) + 0.5 * (sizes[-1] > 1)

    sizes = []
    replace(monkeypatch, name, run_batch)
    code, found = report(tmp_path, folder, "--variants", name)
    (row,) = found["rows"]
    assert code == expected
    assert found["failures"] == ["ours-optimised: changes texts"] * expected
    assert row["different"] == sum(size for size in sizes if size > 1) > 0
    assert 0 < row["changed_texts"] == len(row["tokens_of_changed_texts"]) <= row["different"]
    assert row["max_abs"] == 0.5
    assert f"{row['different']:10} {row['changed_texts']:14}   5.0e-01" in capsys.readouterr().out


def test_numbers_that_depend_on_earlier_calls_are_found(tmp_path, folder, monkeypatch):
    def run_batch(inputs):
        calls.append(torch.get_num_threads())
        return ids_of(inputs) + (len(calls) > 12)

    calls = []
    replace(monkeypatch, "ours-bf16", run_batch)
    code, found = report(tmp_path, folder, "--variants", "ours-bf16")
    assert code == 1
    assert (found["rows"][0]["different"], found["rows"][0]["changed_texts"]) == (36, 12)
    assert found["rows"][0]["tokens_of_changed_texts"] == found["tokens"]
    assert calls[:12] == [1] * 12
    assert calls[-12:] == [2] * 12  # the fourth batching


def test_numbers_at_padding_do_not_count(tmp_path, folder, monkeypatch):
    replace(monkeypatch, "ours-optimised", lambda inputs: ids_of(inputs, random.random()))
    code, found = report(tmp_path, folder, "--variants", "ours-optimised")
    assert (code, found["rows"][0]["different"]) == (0, 0)


@pytest.mark.parametrize(
    ("first", "later", "largest"),
    [(0.0, -0.0, 0.0), (1.0, torch.nan, torch.inf), (torch.nan, torch.nan, None), (1.0, 1.0, None)],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bits_are_compared(first, later, largest, dtype):
    values = iter((first, later))
    batching = [([0], pad([torch.tensor([7, 8])]))]
    found = determinism.examine(
        lambda inputs: torch.full((1, 2, 4), next(values), dtype=dtype),
        [torch.tensor([7, 8])],
        [batching] * 2,
        [torch.get_num_threads()],
    )
    assert found["different"] == (largest is not None)
    assert found["max_abs"] == (largest or 0.0)


@pytest.mark.parametrize(("name", "expected"), [("ours-optimised", 1), ("ours", 0), ("openvino", 0)])
def test_a_variant_that_fails_stops_nothing(name, expected, tmp_path, folder, monkeypatch, capsys):
    def run_batch(inputs):
        raise RuntimeError("no such\noperator")

    replace(monkeypatch, name, run_batch)
    code, found = report(tmp_path, folder, "--variants", name, "bert")
    assert code == expected
    assert [row["error"] for row in found["rows"]] == ["RuntimeError: no such operator", None]
    assert found["failures"] == ["ours-optimised: RuntimeError: no such operator"] * expected
    assert f"{name:21} RuntimeError: no such operator" in capsys.readouterr().out


def test_ours_that_cannot_be_opened_is_a_failure(tmp_path, folder, monkeypatch):
    def open_variant(name, folder, threads):
        raise ValueError("not today")

    monkeypatch.setattr(benchmark_variants, "open_variant", open_variant)
    code, found = report(tmp_path, folder, "--variants", "ours-optimised")
    assert (code, found["failures"], found["rows"]) == (1, ["ours-optimised: ValueError: not today"], [])


def test_what_is_not_installed_is_skipped(tmp_path, folder, monkeypatch, capsys):
    reason = "not here"
    monkeypatch.setattr(benchmark_variants, "missing", lambda name: reason)
    code, found = report(tmp_path, folder, "--variants", "ctranslate2")
    assert (code, found["unavailable"], found["rows"]) == (0, {"ctranslate2": reason}, [])
    assert f"skipped ctranslate2: {reason}" in capsys.readouterr().out


# ---------------------------------------------------------------------------------------------------------------- texts


@pytest.mark.parametrize(("count", "pieces", "joined"), [(1, 0, 1), (2, 1, 1), (12, 6, 2), (40, 16, 4), (100, 16, 10)])
def test_texts_of_three_kinds(count, pieces, joined, folder):
    def make():
        texts = [row["text"] for row in determinism.read_texts(determinism.REVIEWS, None)]
        config = random_scratchbert("Model").config
        return determinism.token_sequences(texts, make_tokenizer(), config, count, random.Random(3))

    rows = make()
    lengths = [len(row) for row in rows]
    assert len(rows) == count
    assert lengths[:pieces] == list(range(1, pieces + 1))
    assert lengths[pieces] == POSITIONS
    assert all(POSITIONS // 2 < length <= POSITIONS for length in lengths[pieces : pieces + joined])
    assert all(torch.equal(a, b) for a, b in zip(rows, make(), strict=True))


def test_batchings_have_every_text_once():
    rows = [torch.arange(1, 1 + length) for length in (*range(1, 41), *range(1, 41))]
    widths = set()
    for seed in range(20):
        batching = determinism.random_batching(rows, POSITIONS, random.Random(seed))
        assert sorted(number for numbers, _ in batching for number in numbers) == list(range(80))
        for numbers, batch in batching:
            lengths = [len(rows[number]) for number in numbers]
            assert (batch["attention_mask"].sum(dim=1).tolist(), len(lengths) <= 64) == (lengths, True)
            assert batch["input_ids"].shape[1] <= POSITIONS
            widths.add(batch["input_ids"].shape[1] - max(lengths))
    assert {0, 1} < widths <= set(range(9))


def test_texts_of_a_file(tmp_path, folder, monkeypatch):
    (tmp_path / "texts.csv").write_text("\n".join(["id,body", *(f"{i},{word}" for i, word in enumerate(WORDS[:4]))]))
    code, found = report(
        tmp_path, folder, "--data", tmp_path / "texts.csv", "--column", "body", "--variants", "ours-optimised"
    )
    assert code == 0
    assert found["tokens"] == sorted([*range(1, 7), 3, 3, 3, 3, 30, 40])


# ------------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--column", "text"], "--column is given without --data"),
        (["--variants", "tensorflow"], "--variants"),
        (["--threads", "0"], "expected an integer of at least 1"),
        (["--json", "missing/file.json"], "'missing/file.json' cannot be written"),
        (["--data", "missing.csv"], "missing.csv: there is no such file"),
        (["--data", "texts.csv"], "no column for the texts (--column)"),
        (["--data", "texts.csv", "--column", "text"], "no column 'text' for the texts (--column)"),
    ],
)
def test_what_cannot_run_is_said_in_one_line(arguments, words, tmp_path, folder, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "texts.csv").write_text("body\nthe dog\n")
    try:
        code = run(folder, *arguments)
    except SystemExit as stopped:
        code = stopped.code
    assert code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("check_determinism.py: ")
    assert words in line


@pytest.mark.parametrize(
    ("fields", "words"), [({}, "It has no tokenizer"), ({"vocab_size": 9}, "expected at most vocab_size, 9")]
)
def test_a_model_without_a_fitting_tokenizer_is_refused(fields, words, tmp_path, capsys):
    random_scratchbert("Model", **fields).save_pretrained(tmp_path)
    if fields:
        make_tokenizer().save_pretrained(tmp_path)
    assert run(tmp_path) == 2
    assert words in capsys.readouterr().err


def test_a_folder_that_is_not_there_is_refused(tmp_path, capsys):
    assert run(tmp_path / "missing") == 2
    assert "There is no such folder." in capsys.readouterr().err
