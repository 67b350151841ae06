"""The tasks of `scripts/predict.py`: their results beside those of transformers' own classes and pipelines."""

import json
import pickle
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from toolkit.corpus.model import read_model, task_of
from transformers import AutoTokenizer, pipeline

import predict
from modeling_scratchbert import ScratchBertModel
from modeling_scratchbert.cpu.library import find_library
from support.corpora import reference_of, save_model, texts, write_rows
from support.tasks import columns_of, compute, open_tiny, write_sentence_folder

pytestmark = pytest.mark.usefixtures("quiet_only_here")

TEXTS = texts(40)
MANY_TEXTS = texts(200)
LABELS = ["bad", "fair", "good"]


def assert_close(found, expected, tolerance: float = 5e-5) -> None:
    torch.testing.assert_close(torch.tensor(np.array(found), dtype=torch.float32), expected, rtol=0, atol=tolerance)


# -------------------------------------------------------------------------------------------------------------- embed


@torch.no_grad()
def embeddings(folder: str, values: list[str], pooling: str, length: int = 40) -> torch.Tensor:
    """By BertModel, one text at a time."""
    bert, tokenizer = reference_of(folder, "embed"), AutoTokenizer.from_pretrained(folder)
    found = []
    for text in values:
        outputs = bert(**tokenizer(text, truncation=True, max_length=length, return_tensors="pt"))
        states = outputs.last_hidden_state[0]
        weights = torch.arange(1.0, len(states) + 1)
        pooled = {
            "mean": states.mean(0),
            "cls": states[0],
            "max": states.max(0).values,
            "lasttoken": states[-1],
            "mean_sqrt_len_tokens": states.sum(0) / len(states) ** 0.5,
            "pooler": outputs.pooler_output[0],
            "weightedmean": weights @ states / weights.sum(),
        }
        found.append(torch.cat([pooled[name] for name in pooling.split(",")]))
    return torch.stack(found)


@pytest.mark.parametrize(
    "pooling",
    ["mean", "cls", "max", "pooler", "lasttoken", "weightedmean", "mean_sqrt_len_tokens", "lasttoken,pooler,mean"],
)
def test_embeddings_are_those_of_bert(pooling, make_bert):
    found = compute(make_bert(), "embed", TEXTS, pooling=predict.poolings(pooling))["embedding"]
    assert_close(found, embeddings(make_bert(), TEXTS, pooling))


def test_embeddings_are_cut_and_scaled(make_bert):
    found = compute(make_bert(), "embed", TEXTS, truncate_dim=5, normalize=True, prompt="good film ")["embedding"]
    expected = embeddings(make_bert(), ["good film " + text for text in TEXTS], "mean")[:, :5]
    assert_close(found, torch.nn.functional.normalize(expected))


@pytest.mark.skipif(not find_library(), reason="the processor has no VNNI instructions")
@pytest.mark.parametrize("is_calibrated", [False, True])
def test_int8_is_that_of_the_model(is_calibrated, tmp_path):
    folder = save_model(tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    inputs = [tokenizer(text, return_tensors="pt") for text in TEXTS]
    model, exact = (ScratchBertModel.from_pretrained(folder) for _ in range(2))
    model.optimize_for_inference("int8", calibration=inputs[:5] if is_calibrated else None)
    if is_calibrated:
        model.save_calibration(tmp_path / "model" / "calibration.safetensors")
    with torch.no_grad():
        expected, unrounded = (
            torch.stack([each(**one).last_hidden_state[0].mean(0) for one in inputs]) for each in (model, exact)
        )
    assert_close(compute(folder, "embed", TEXTS, dtype="int8")["embedding"], expected)
    assert (expected - unrounded).abs().max() > 1e-3


RANGES = [[-1.0] * 32, [2.0] * 32]


@pytest.mark.parametrize(
    ("dtype", "ranges", "expected"),
    [
        ("uint8", None, "uint8"),
        ("float16", RANGES, "float16"),
        ("binary", RANGES, "binary"),
        ("int8", [[0], [1]], "32"),
    ],
)
def test_ranges_that_do_not_fit(dtype, ranges, expected, make_bert):
    with pytest.raises(ValueError, match=f"--ranges.*{expected}"):
        open_tiny(make_bert(), "embed", embedding_dtype=dtype, ranges=ranges)


@pytest.mark.parametrize("content", ["text", "empty", "shape", "order", "nan", "objects"])
def test_a_file_of_ranges_that_cannot_be_used(content, make_bert, tmp_path, capsys):
    path = tmp_path / "ranges.npy"
    arrays = {"shape": np.zeros((3, 4)), "order": np.array([[1.0], [0.0]]), "nan": np.full((2, 3), np.nan)}
    if content in ("text", "empty"):
        path.write_text("1, 2" if content == "text" else "")
    else:
        np.save(path, arrays.get(content, np.array([[{}], [{}]])), allow_pickle=True)
    argv = [make_bert(), "x.txt", "--output", "out", "--embedding_dtype", "uint8", "--ranges", str(path)]
    with pytest.raises(SystemExit) as caught:
        predict.main(argv)
    assert caught.value.code == 2
    assert "ranges.npy" in capsys.readouterr().err.splitlines()[-1]


# ------------------------------------------------------------------------------------- folders of sentence-transformers

NORMALISED = ["Transformer", "Pooling", "Normalize"]
PROMPTS = {"prompts": {"q": "good film ", "d": "bad "}, "default_prompt_name": "q"}


@pytest.mark.parametrize("pooling", [{"pooling_mode": "cls"}, {"pooling_mode_cls_token": True}])
@pytest.mark.parametrize("modules", [NORMALISED, NORMALISED[:2]])
def test_a_sentence_transformers_folder_is_followed(pooling, modules, tmp_path):
    folder = save_model(tmp_path / "model", "embed", "bert")
    write_sentence_folder(tmp_path / "model", modules, Pooling=pooling, settings={"max_seq_length": 9}, config=PROMPTS)
    for prompt, options in (("good film ", {}), ("bad ", {"prompt_name": "d"}), ("", {"prompt": ""})):
        expected = embeddings(folder, [prompt + text for text in TEXTS], "cls", 9)
        normalised = torch.nn.functional.normalize(expected) if len(modules) == 3 else expected
        assert_close(compute(folder, "embed", TEXTS, **options)["embedding"], normalised)
    # Flags are stronger.
    found = compute(folder, "embed", TEXTS, pooling=["mean"], prompt="", max_length=40, normalize=True)["embedding"]
    assert_close(found, torch.nn.functional.normalize(embeddings(folder, TEXTS, "mean")))


def test_a_prompt_that_the_folder_does_not_have(make_bert, tmp_path, capsys):
    folder = save_model(tmp_path / "model", "embed", "bert")
    write_sentence_folder(tmp_path / "model", NORMALISED, config=PROMPTS)
    with pytest.raises(ValueError, match=r"--prompt_name is 'x'.*'q', 'd'"):
        open_tiny(folder, "embed", prompt_name="x")
    with pytest.raises(ValueError, match=r"--prompt_name is 'q'.*none"):
        open_tiny(make_bert(), "embed", prompt_name="q")
    with pytest.raises(SystemExit):
        predict.main([folder, "x.txt", "--output", "out", "--prompt_name", "q", "--prompt", "good "])
    assert "--prompt" in capsys.readouterr().err


MINUS = {"in_features": 32, "out_features": 16, "activation_function": "torch.nn.Identity"}


@pytest.mark.parametrize(
    ("modules", "files", "word"),
    [
        ([*NORMALISED[:2], "WordWeights"], {}, "WordWeights"),
        (["Transformer", "my_pooling.Pooling"], {}, "my_pooling.Pooling"),
        (["Transformer", "sentence_transformers.mine.Pooling"], {}, "mine.Pooling"),
        (NORMALISED, {"Pooling": {"pooling_mode": "tokens"}}, "tokens"),
        (NORMALISED, {"Pooling": {"pooling_mode": ["cls", "tokens"]}}, "cls, tokens"),
        (NORMALISED, {"settings": {"do_lower_case": True}}, "do_lower_case"),
        (NORMALISED, {"settings": {"transformer_task": "fill-mask"}}, "fill-mask"),
        (NORMALISED, {"Normalize": {"module_input_name": "token_embeddings"}}, "token_embeddings"),
        (NORMALISED, {"config": {"model_type": "SparseEncoder"}}, "SparseEncoder"),
        (NORMALISED[::2], {}, "Transformer, Normalize"),
        ([*NORMALISED, "Pooling"], {}, "Normalize, Pooling"),
        ([*NORMALISED[:2], "Dense"], {"Dense": MINUS}, "2_Dense"),  # which has no weights
        ([*NORMALISED[:2], "Dense"], {"Dense": MINUS | {"in_features": 33}}, "33"),
        ([*NORMALISED[:2], "LayerNorm"], {"LayerNorm": {"dimension": 16}}, "16"),
        ([*NORMALISED[:2], "Dense"], {"Dense": MINUS | {"activation_function": "my.Act"}}, "my.Act"),
    ],
)
def test_what_is_not_supported_of_sentence_transformers_is_named(modules, files, word, tmp_path, capsys):
    folder = save_model(tmp_path / "model", "embed", "bert")
    write_sentence_folder(tmp_path / "model", modules, **files)
    rows = write_rows(tmp_path / "rows.jsonl", [{"text": "a film"}])
    argv = [folder, rows, "--task", "embed", "--output", str(tmp_path / "out"), "--processes", "1"]
    assert predict.main(argv) == 2
    assert word in capsys.readouterr().err.splitlines()[-1]


def add_modules(folder: Path) -> str:
    """A folder with modules whose results depend on the batch if they are computed on a whole one."""
    generator = torch.Generator().manual_seed(0)
    fields = {"in_features": 64, "out_features": 17, "activation_function": "torch.nn.modules.activation.GELU"}
    modules = ["Transformer", "Pooling", "Dense", "LayerNorm", "Dropout", "Normalize"]
    write_sentence_folder(
        folder, modules, Pooling={"pooling_mode": ["weightedmean", "max"]}, Dense=fields, LayerNorm={"dimension": 17}
    )
    weights = {"linear.weight": torch.randn(17, 64, generator=generator), "linear.bias": torch.ones(17)}
    torch.save(weights, folder / "2_Dense" / "pytorch_model.bin")
    norm = {"norm.weight": torch.randn(17, generator=generator), "norm.bias": torch.ones(17)}
    save_file(norm, folder / "3_LayerNorm" / "model.safetensors")
    return str(folder)


@pytest.mark.parametrize("task", ["embed", "classify", "rerank", "tag", "fill-mask"])
def test_a_text_has_the_same_bits_in_any_batch(task, make_bert, tmp_path):
    """Also with another number of threads."""
    save_model(tmp_path / "embed", "embed", "bert")
    folder = add_modules(tmp_path / "embed") if task == "embed" else make_bert(task)
    if task == "rerank":
        save_model(tmp_path / "rerank", "rerank", "bert")
        config = {"model_type": "CrossEncoder", "activation_fn": "torch.nn.modules.activation.Softplus"}
        folder = write_sentence_folder(tmp_path / "rerank", ["Transformer"], config=config)
    values = [f"{text} [MASK]" for text in texts(60, longest=20)]
    pairs = values[::-1] if task == "rerank" else None
    expected, numbers = compute(folder, task, values, pairs), random.Random(0)
    for trial in range(6):
        opened = open_tiny(folder, task, tokens_per_batch=numbers.choice([1, 30, 100, 500, 16384]))
        order = numbers.sample(range(60), numbers.randint(1, 60))
        torch.set_num_threads(1 + trial % 2)
        found, _ = columns_of(opened, [values[i] for i in order], pairs and [pairs[i] for i in order])
        torch.set_num_threads(1)
        for name, column in found.items():
            for index, value in zip(order, column, strict=True):
                np.testing.assert_equal(value, expected[name][index])


def test_a_changed_weight_of_a_module_is_another_model(tmp_path, capsys):
    save_model(tmp_path / "model", "embed", "bert")
    folder = add_modules(tmp_path / "model")
    rows = write_rows(tmp_path / "rows.jsonl", [{"text": text} for text in TEXTS])
    argv = [folder, rows, "--output", str(tmp_path / "out"), "--processes", "1", "--format", "jsonl", "--resume"]
    assert predict.main(argv[:-1]) == 0
    path = tmp_path / "model" / "3_LayerNorm" / "model.safetensors"
    save_file({name: 2 * weight for name, weight in load_file(path).items()}, path)
    assert predict.main(argv) == 2
    assert "model" in capsys.readouterr().err.splitlines()[-1]


class Harmful:
    def __reduce__(self):
        return print, ("the pickle ran",)


@pytest.mark.parametrize("content", [pickle.dumps(Harmful()), b"", b"no weights"])
@pytest.mark.parametrize("place", [".", "2_Dense"])
def test_weights_that_cannot_be_read_are_reported_in_one_line(content, place, tmp_path, capsys):
    save_model(tmp_path / "model", "embed", "bert")
    folder = add_modules(tmp_path / "model")
    (tmp_path / "model" / place / "pytorch_model.bin").write_bytes(content)
    (tmp_path / "model" / place / "model.safetensors").unlink(missing_ok=True)
    rows = write_rows(tmp_path / "rows.jsonl", [{"text": "a film"}])
    assert predict.main([folder, rows, "--output", str(tmp_path / "out"), "--processes", "1"]) == 2
    out, err = capsys.readouterr()
    assert "the pickle ran" not in out + err
    assert "Traceback" not in err
    assert folder in err.splitlines()[-1]


# ---------------------------------------------------------------------------------------------------- classify, rerank


@pytest.mark.parametrize("problem", [None, "single_label_classification", "multi_label_classification", "regression"])
def test_labels_and_scores_are_those_of_the_pipeline(problem, make_bert):
    folder = make_bert("classify", problem_type=problem)
    reference = pipeline("text-classification", model=folder, device="cpu")
    expected = [{each["label"]: each["score"] for each in one} for one in reference(MANY_TEXTS, top_k=None)]
    found = compute(folder, "classify", MANY_TEXTS, all_scores=True)
    if problem == "regression":
        assert list(found) == ["prediction"]
        in_order = [[scores[label] for label in LABELS] for scores in expected]
        np.testing.assert_allclose(found["prediction"], in_order, rtol=0, atol=5e-5)
        return
    for number, scores in enumerate(expected):
        assert list(found["all_scores"][number]) == LABELS
        assert found["all_scores"][number] == pytest.approx(scores, abs=5e-5)
        if problem == "multi_label_classification":
            given_labels = dict(zip(found["labels"][number], found["scores"][number], strict=True))
            assert given_labels == pytest.approx({name: x for name, x in scores.items() if x > 0.5}, abs=5e-5)
        else:
            assert found["label"][number] == max(scores, key=scores.get)
            assert found["score"][number] == pytest.approx(max(scores.values()), abs=5e-5)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_the_likeliest_labels_are_those_of_the_pipeline(count, make_bert):
    expected = pipeline("text-classification", model=make_bert("classify"), device="cpu")(MANY_TEXTS, top_k=count)
    found = compute(make_bert("classify"), "classify", MANY_TEXTS, top_k=count)
    assert found["labels"] == [[each["label"] for each in one] for one in expected]
    scores = [[each["score"] for each in one] for one in expected]
    np.testing.assert_allclose(found["scores"], scores, rtol=0, atol=5e-5)


@pytest.mark.parametrize(
    ("fields", "options", "word"),
    [
        ({}, {"top_k": 4}, "3 labels"),
        ({}, {"top_k": 2, "label_column": "y"}, "--label_column"),
        ({"problem_type": "multi_label_classification"}, {"top_k": 2}, "multi_label_classification"),
        ({"id2label": {0: "good", 1: "good"}}, {"all_scores": True}, "--all_scores"),
    ],
)
def test_labels_that_cannot_be_given(fields, options, word, make_bert):
    with pytest.raises(ValueError, match=word):
        open_tiny(make_bert("classify", **fields), "classify", **options)


def test_pairs_are_those_of_the_pipeline(make_bert):
    reference = pipeline("text-classification", model=make_bert("classify"), device="cpu")
    inputs = [{"text": one, "text_pair": other} for one, other in zip(TEXTS, TEXTS[::-1], strict=True)]
    expected = [reference(each, truncation=True, max_length=40) for each in inputs]
    found = compute(make_bert("classify"), "classify", TEXTS, TEXTS[::-1])
    assert found["label"] == [row["label"] for row in expected]
    assert list(found["score"]) == pytest.approx([row["score"] for row in expected], abs=5e-5)


def test_a_threshold(make_bert):
    folder = make_bert("classify", problem_type="multi_label_classification")
    found = compute(folder, "classify", TEXTS, all_scores=True, threshold=0.9)
    for labels, scores in zip(found["labels"], found["all_scores"], strict=True):
        assert labels == [name for name, score in scores.items() if score > 0.9]
    assert 0 < sum(map(len, found["labels"])) < 120


@torch.no_grad()
def logits_of_pairs(folder: str, prompt: str = "") -> torch.Tensor:
    tokenizer, bert = AutoTokenizer.from_pretrained(folder), reference_of(folder, "rerank")
    pairs = zip(TEXTS, TEXTS[::-1], strict=True)
    encoded = [
        tokenizer(prompt + one, other, truncation=True, max_length=40, return_tensors="pt") for one, other in pairs
    ]
    return torch.stack([bert(**each).logits[0] for each in encoded])


IDENTITY = "torch.nn.modules.linear.Identity"


@pytest.mark.parametrize("place", [None, "config.json", "older config.json", "config_sentence_transformers.json"])
def test_scores_of_pairs(place, tmp_path):
    """Where sentence-transformers has saved an activation function, it is that one."""
    folder = save_model(tmp_path / "model", "rerank", "bert")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    if place == "config.json":
        config["sentence_transformers"] = {"activation_fn": IDENTITY}
    elif place == "older config.json":
        config["sbert_ce_default_activation_function"] = IDENTITY
    elif place:
        fields = PROMPTS | {"model_type": "CrossEncoder", "activation_fn": IDENTITY}
        write_sentence_folder(tmp_path / "model", ["Transformer"], config=fields)
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    assert task_of(folder, read_model(folder, False)) == "rerank"
    expected = logits_of_pairs(folder, "good film " if place == "config_sentence_transformers.json" else "")[:, 0]
    found = compute(folder, "rerank", TEXTS, TEXTS[::-1])["score"]
    assert_close(found, expected if place else expected.sigmoid())


@pytest.mark.parametrize(
    "path",
    [
        "my.Activation",
        "torch.nn.NoSuch",
        "torch.nn.functional.relu",
        "torch.nn.Linear",
        "torch.nn.Module",
        "torch.nn.GLU",
        "torch.nn.init.zeros_",
        "Sigmoid",
        "torch.nnx.Sigmoid",
        3,
    ],
)
def test_a_wrong_activation_function_is_reported_in_one_line(path, tmp_path, capsys):
    folder = save_model(tmp_path / "model", "rerank", "bert")
    config = {"model_type": "CrossEncoder", "activation_fn": path}
    write_sentence_folder(tmp_path / "model", ["Transformer"], config=config)
    rows = write_rows(tmp_path / "rows.jsonl", [{"query": "a", "document": "film"}])
    assert predict.main([folder, rows, "--output", str(tmp_path / "out"), "--processes", "1"]) == 2
    err = capsys.readouterr().err
    assert "Traceback" not in err
    assert str(path) in err.splitlines()[-1]


@pytest.mark.parametrize(("task", "model_type"), [("embed", "CrossEncoder"), ("rerank", "SentenceTransformer")])
def test_a_folder_of_the_other_class(task, model_type, tmp_path):
    folder = save_model(tmp_path / "model", task, "bert")
    modules = ["Transformer"] if task == "embed" else NORMALISED[:2]
    write_sentence_folder(tmp_path / "model", modules, config={"model_type": model_type})
    with pytest.raises(ValueError, match=model_type):
        open_tiny(folder, task)


# ----------------------------------------------------------------------------------------------------------- tag, masks


@pytest.mark.parametrize("aggregation", ["none", "simple", "first", "average", "max"])
def test_entities_are_those_of_the_pipeline(aggregation, make_bert):
    reference = pipeline("token-classification", model=make_bert("tag"), aggregation_strategy=aggregation, device="cpu")
    found = compute(make_bert("tag"), "tag", MANY_TEXTS, aggregation=aggregation)["entities"]
    for text, entities in zip(MANY_TEXTS, found, strict=True):
        expected = [{**each, "score": pytest.approx(float(each["score"]), abs=5e-5)} for each in reference(text)]
        assert entities == expected


def test_entities_of_a_text_longer_than_the_model(make_bert):
    """Every window is computed as it is by itself, and each token is taken from one window."""
    long = " ".join(f"word{number % 40}" for number in range(100))
    columns, encoded = columns_of(open_tiny(make_bert("tag"), "tag", aggregation="none"), ["a film", long])
    entities = columns["entities"][1]
    starts = [entity["start"] for entity in entities]
    assert starts == sorted(set(starts))
    assert starts[-1] > len(long) - 100
    assert all(long[entity["start"] : entity["end"]] == entity["word"] for entity in entities)
    reference = pipeline("token-classification", model=make_bert("tag"), device="cpu")
    first = reference(" ".join(long.split(" ")[:38]))  # 38 words fill the first window
    kept = [entity for entity in first if entity["index"] <= 38 - 5]
    found = [entity for entity in entities if entity["index"] <= 38 - 5]
    assert [entity["word"] for entity in found] == [entity["word"] for entity in kept]
    assert [entity["score"] for entity in found] == pytest.approx([float(each["score"]) for each in kept], abs=5e-5)
    assert encoded.truncated == [False, True]
    assert encoded.tokens == [4, sum(map(len, encoded.ids[1:]))]


def test_masked_words_are_those_of_the_pipeline(make_bert):
    masked = [f"{text} [MASK] {other}" for text, other in zip(TEXTS[:8], texts(8, 1, 3), strict=True)]
    masked.append("a [MASK] film with [MASK]")
    reference = pipeline("fill-mask", model=make_bert("fill-mask"), top_k=3, device="cpu")
    expected = [each if isinstance(each[0], list) else [each] for each in map(reference, masked)]
    found = compute(make_bert("fill-mask"), "fill-mask", masked, top_k=3)
    assert found["words"] == [[[guess["token_str"] for guess in mask] for mask in guesses] for guesses in expected]
    for scores, guesses in zip(found["scores"], expected, strict=True):
        in_order = [[guess["score"] for guess in mask] for mask in guesses]
        np.testing.assert_allclose(scores, in_order, rtol=0, atol=5e-5)


def test_a_text_without_a_mask_cannot_be_used(make_bert):
    values = ["a [MASK]", "a film", "word1 " * 60 + "[MASK]"]
    columns, encoded = columns_of(open_tiny(make_bert("fill-mask"), "fill-mask"), values)
    assert len(columns["words"]) == len(encoded.ids) == 1
    assert set(encoded.faults) == {1, 2}
    assert encoded.tokens == [4, 0, 0]
