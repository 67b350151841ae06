"""toolkit.metrics and the modules in scripts/metrics: values worked out by hand, and what is refused."""

import math
import os
import random
import subprocess
import sys
import warnings

import evaluate
import numpy as np
import pytest
import sklearn.metrics
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from support.folders import SCRIPTS
from toolkit import metrics as training_metrics
from toolkit.cli import CommandError
from toolkit.metrics import classification_metrics, compute, label_metrics

# One input, right in half of its items or so, for each metric.
EXAMPLES = {
    "error_rate": (["a b"], [["a c"]]),
    "rouge": (["a b"], [["a c"]]),
    "sacrebleu": (["a b"], [["a c"]]),
    "seqeval": ([["B-X", "O"]], [["B-X", "B-X"]]),
    "squad": (["cat"], [["dog"]]),
}


@pytest.fixture(autouse=True)
def no_warnings():
    """A library's complaint would stand between the lines of a progress bar at each evaluation."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


# --------------------------------------------------------------------------------------------------- labels and numbers


@pytest.mark.parametrize(
    ("predictions", "references", "accuracy", "f1"),
    [
        # Label 0: 1 found rightly of 2 predicted and 2 there: F1 1/2. Label 1: 2 of 2 and 3: 2 * 2 / (2 + 3) = 4/5.
        # Label 2: 1 of 2 and 1: 2/3. 4 of 6 are right.
        ([0, 0, 1, 1, 2, 2], [0, 1, 1, 1, 2, 0], 4 / 6, (1 / 2 + 4 / 5 + 2 / 3) / 3),
        ([0, 0], [0, 0], 1, 1),
        # With several labels an item, all of a row must be right: the first and the third are.
        # Column 0: 1 of 2 and 3: 2/5. Column 1: 0 of 2 and 0.
        ([[1, 0], [1, 1], [0, 0], [0, 1]], [[1, 0], [1, 0], [0, 0], [1, 0]], 0.5, (2 * 2 / (2 + 3) + 0) / 2),
        # Column 0: 1 of 2 and 1: 2/3. Column 1 is never there, and predicted once: 0. Column 2: 2 of 2 and 2: 1.
        ([[1, 0, 1], [1, 1, 1]], [[1, 0, 1], [0, 0, 1]], 0.5, (2 / 3 + 0 + 1) / 3),
        ([[1, 0, 0], [1, 1, 0]], [[1, 1, 0], [1, 1, 0]], 0.5, (1 + 2 / 3) / 2),  # over the labels that occur
        ([[1]] * 4, [[1], [0], [0], [0]], 1 / 4, 2 / 5),
        ([[0, 0]], [[0, 0]], 1, 0),
    ],
)
def test_accuracy_and_f1_of_labels(predictions, references, accuracy, f1):
    assert label_metrics(predictions, references) == pytest.approx({"accuracy": accuracy, "f1": f1})


@settings(max_examples=40)
@given(pairs=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=20))
def test_single_labels_agree_with_scikit_learn(pairs):
    predicted, right = zip(*pairs, strict=True)
    f1 = sklearn.metrics.f1_score(right, predicted, average="macro", zero_division=0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a single label
        matthews = sklearn.metrics.matthews_corrcoef(right, predicted)
    assert classification_metrics("single_label", predicted, right) == pytest.approx(
        {"accuracy": np.mean(np.equal(predicted, right)), "f1": f1, "matthews_correlation": matthews}
    )


@pytest.mark.parametrize(
    ("predictions", "references", "value"),
    [
        # 2 true positives, 1 false one, 1 false negative, 2 true ones: (2 * 2 - 1 * 1) / sqrt(3 * 3 * 3 * 3) = 3/9.
        ([1, 1, 1, 0, 0, 0], [1, 1, 0, 1, 0, 0], 1 / 3),
        ([0, 1, 0], [1, 0, 1], -1),
        ([1, 1, 1], [1, 1, 1], 0),
        ([1, 1, 1], [0, 1, 0], 0),
        ([0, 1, 0], [1, 1, 1], 0),
    ],
)
def test_matthews_correlation(predictions, references, value):
    found = classification_metrics("single_label", predictions, references)
    assert found["matthews_correlation"] == pytest.approx(value)


@pytest.mark.parametrize(
    ("predictions", "references", "pearson", "spearman", "error"),
    [
        # Deviations from the means: -1, 0, 1 and -2, -1, 3: (2 + 0 + 3) / sqrt(2 * 14). The order is the same.
        ([[1], [2], [3]], [[0], [1], [5]], 5 / math.sqrt(28), 1, (1 + 1 + 4) / 3),
        ([[2.5]] * 3, [[1], [2], [3]], 0, 0, (1.5**2 + 0.5**2 + 0.5**2) / 3),
        ([[1], [2]], [[4], [4]], 0, 0, (9 + 4) / 2),
        ([[1.0]], [[1]], 0, 0, 0),
        # The mean over two columns, of which one is right.
        ([[1, 1], [2, 2], [3, 3]], [[1, 3], [2, 2], [3, 1]], 0, 0, (0 + (4 + 0 + 4) / 3) / 2),
    ],
)
def test_regression(predictions, references, pearson, spearman, error):
    assert classification_metrics("regression", predictions, references) == pytest.approx(
        {"pearson": pearson, "spearman": spearman, "mean_squared_error": error}
    )


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_numbers_that_are_none_are_refused(bad):
    with pytest.raises(ValueError, match=r"(?i)nan|infinity"):
        classification_metrics("regression", [[1.0], [bad]], [[1.0], [2.0]])


# ------------------------------------------------------------------------------------------------------------ entities


def test_entities_are_right_only_as_a_whole():
    references = [["B-PER", "I-PER", "O", "B-LOC"], ["B-LOC", "I-LOC", "O"]]
    predictions = [["B-PER", "I-PER", "O", "B-LOC"], ["B-LOC", "O", "B-ORG"]]
    # There are 3: a person, and two places, of which the second is found too short. Found are 4, of which 2 are right.
    # Of 7 tags 5 are right.
    assert compute("seqeval", predictions, references) == pytest.approx(
        {"precision": 2 / 4, "recall": 2 / 3, "f1": 4 / 7, "accuracy": 5 / 7}
        | {"PER_precision": 1, "PER_recall": 1, "PER_f1": 1, "PER_number": 1}
        | {"LOC_precision": 1 / 2, "LOC_recall": 1 / 2, "LOC_f1": 1 / 2, "LOC_number": 2}
        | {"ORG_precision": 0, "ORG_recall": 0, "ORG_f1": 0, "ORG_number": 0}
    )


def test_sentences_without_entities():
    assert compute("seqeval", [["O", "O"], []], [["O", "O"], []]) == {
        "precision": 0.0,
        "recall": 0.0,
        "f1": 0.0,
        "accuracy": 1.0,
    }
    with pytest.raises(ValueError, match="have no tokens; expected"):
        compute("seqeval", [[]], [[]])
    with pytest.raises(ValueError, match="sentence 2 has 1 predicted tags; expected 2"):
        compute("seqeval", [["O"], ["O"]], [["O"], ["O", "O"]])


# ------------------------------------------------------------------------------------------------------------- answers


@pytest.mark.parametrize(
    ("prediction", "answers", "exact", "f1"),
    [
        ("The  Cat's, mat!", ["cats mat"], 100, 100),  # case, punctuation, articles, white space
        ("bathe", ["b"], 0, 0),  # articles only as whole words
        ("U.S.A.", ["usa"], 100, 100),
        ("the", ["a"], 100, 100),  # both are nothing but an article
        ("the", ["cat"], 0, 0),
        ("big black cat", ["black cat"], 0, 80),  # 2 shared of 3 and 2: 2 * 2 / 5
        ("cat cat cat dog", ["cat cat"], 0, 100 * 2 * 2 / 6),  # a token counts as often as both have it
        ("in 1999", ["the year 1999", "1999", "in 2000"], 0, 100 * 2 / 3),  # the best of 1/2, 2/3 and 1/2
        ("1999", ["in 1999", "1999"], 100, 100),
        ("", [], 100, 100),
        ("a word", [], 0, 0),
        ("", ["cat"], 0, 0),
        ("", ["the", "cat"], 0, 0),  # a gold answer of which nothing is left is none
    ],
)
def test_an_answer(prediction, answers, exact, f1):
    assert compute("squad", [prediction], [answers]) == pytest.approx({"exact_match": exact, "f1": f1})


def test_questions_with_and_without_answers_are_reported_apart():
    predictions, references = ["black cat", "dog", "", "guess"], [["cat"], ["dog"], [], []]
    assert compute("squad", predictions, references) == pytest.approx(
        {"exact_match": 100 * 2 / 4, "f1": 100 * (2 / 3 + 1 + 1 + 0) / 4}
        | {"has_answer_exact_match": 50, "has_answer_f1": 100 * (2 / 3 + 1) / 2}
        | {"no_answer_exact_match": 50, "no_answer_f1": 50}
    )


# ------------------------------------------------------------------------------------------------------ generated text


def test_rouge():
    # Words: 3 shared of 4 and 3: 6/7. Pairs: "the cat" of 3 and 2: 2/5. The longest common subsequence is all of the
    # reference: 6/7 again.
    values = compute("rouge", ["The cat also sat."], [["the cat sat"]])
    assert values == pytest.approx({"rouge1": 6 / 7, "rouge2": 2 / 5, "rougeL": 6 / 7, "rougeLsum": 6 / 7})
    # Two lines in the other order: as one sequence half is common, sentence by sentence all is.
    values = compute("rouge", ["red fox\nblue bird"], [["blue bird\nred fox"]])
    assert (values["rougeL"], values["rougeLsum"]) == (0.5, 1.0)


def test_rouge_takes_the_best_reference_and_the_mean_over_items():
    values = compute("rouge", ["a cat", "", "cats"], [["a dog", "a cat"], ["a"], ["cat"]])  # without stemming
    assert values == pytest.approx({"rouge1": 1 / 3, "rouge2": 1 / 3, "rougeL": 1 / 3, "rougeLsum": 1 / 3})


def test_bleu():
    # Of 1, 2, 3, 4 tokens 5 of 6, 4 of 5, 3 of 4 and 2 of 3 are in the reference, of 7 tokens: brevity exp(1 - 7/6).
    values = compute("sacrebleu", ["a b c d e x"], [["a b c d e f g"]])
    assert values["bleu"] == pytest.approx(100 * (5 / 6 * 4 / 5 * 3 / 4 * 2 / 3) ** 0.25 * math.exp(1 - 7 / 6))


def test_chrf():
    # Of 1 to 4 characters 3 of 4, 2 of 3, 1 of 2 and 0 of 1 are shared, precision and recall alike; longer ones there
    # are none: the mean of four.
    assert compute("sacrebleu", ["abcd"], [["abcx"]])["chrf"] == pytest.approx(100 * (3 / 4 + 2 / 3 + 1 / 2 + 0) / 4)


def test_bleu_and_chrf_take_as_many_references_as_an_item_has():
    long, other = "the cat sat on the mat", "a bird sang in the old tree"
    values = compute("sacrebleu", [long, other], [[long], ["no bird", other, long]])
    assert values == pytest.approx({"bleu": 100, "chrf": 100})
    assert compute("sacrebleu", ["", ""], [["a b"], ["c", "d"]]) == {"bleu": 0.0, "chrf": 0.0}


@pytest.mark.parametrize(
    ("predictions", "references", "rates"),
    [
        (["A B"], [["A B"]], (0, 0)),
        (["A B"], [["A C D"]], (2 / 3, 1)),  # a substitution and an insertion
        ([""], [["A C"]], (1, 1)),
        (["A B C"], [["A"]], (2, 1)),
        (["A", ""], [["B"], [""]], (1, 1 / 2)),
        (["A", "A A A"], [["B"], ["A A A"]], (1 / 4, 1 / 2)),  # over the whole set: a mean of items would be 1/2
        (["A", "B"], [["X Y Z", "A"], ["B C"]], (1 / 3, 1 / 2)),  # the closest counts, with its length
        (["A"], [["A B", "C"]], (1, 1)),  # one edit either way: the shorter
        (["HH AH"], [["HHAH"]], (2, 1)),  # tokens, not letters
    ],
)
def test_error_rates_are_edits_per_token_and_items_with_any(predictions, references, rates):
    values = compute("error_rate", predictions, references)
    assert values == pytest.approx(dict(zip(("token_error_rate", "item_error_rate"), rates, strict=True)))


texts = st.lists(st.sampled_from("ABC"), min_size=1, max_size=4).map(" ".join)


@settings(max_examples=40)
@given(pairs=st.lists(st.tuples(texts, texts), min_size=1, max_size=5))
def test_an_error_rate_is_0_where_all_is_equal_and_only_there(pairs):
    predictions, references = zip(*pairs, strict=True)
    values = compute("error_rate", predictions, [[text] for text in references])
    assert (values["token_error_rate"] == 0) == (values["item_error_rate"] == 0) == (predictions == references)
    assert values["item_error_rate"] == np.mean(np.not_equal(predictions, references))


@pytest.mark.parametrize("name", ["error_rate", "rouge", "sacrebleu"])
def test_a_text_without_a_reference_is_refused(name):
    with pytest.raises(ValueError, match="item 2 has no reference"):
        compute(name, ["a", "b"], [["a"], []])


def test_references_without_a_token_have_no_error_rate():
    with pytest.raises(ValueError, match="have no tokens; expected"):
        compute("error_rate", ["a"], [[""]])


# ---------------------------------------------------------------------------------------------------------- perplexity


def test_perplexity_is_of_the_mean_over_all_tokens():
    # Batches of 1 token with loss log 8, and of 3 with log 2 each: (8 * 2 * 2 * 2) ** (1/4); 4 if means were averaged.
    assert training_metrics.perplexity(math.log(8) + 3 * math.log(2), 4) == pytest.approx(64**0.25)
    assert training_metrics.perplexity(0.0, 7) == 1.0
    assert training_metrics.perplexity(1e6, 1) == math.inf


@pytest.mark.parametrize(("loss", "count"), [(1.0, 0), (math.nan, 3), (1.0, math.nan)])
def test_what_has_no_perplexity(loss, count):
    with pytest.raises(ValueError, match=r"^(count|total_loss) is "):
        training_metrics.perplexity(loss, count)


# ----------------------------------------------------------------------------------------------------- of every metric


def test_every_module_is_in_the_table_and_has_an_example_here():
    folders = {path.parent.name for path in (SCRIPTS / "metrics").glob("*/*.py")}
    assert folders == set(training_metrics.METRICS) == set(EXAMPLES)


@pytest.mark.parametrize("name", EXAMPLES)
def test_values_are_plain_floats_and_evaluate_gives_the_same(name, tmp_path):
    predictions, references = EXAMPLES[name]
    values = compute(name, predictions, references)
    assert all(type(value) is float and math.isfinite(value) for value in values.values())
    metric = evaluate.load(str(SCRIPTS / "metrics" / name), cache_dir=str(tmp_path))
    for prediction, reference in zip(predictions, references, strict=True):
        metric.add_batch(predictions=[prediction], references=[reference])
    assert metric.compute() == values
    assert all(key in metric.description for key in values if not key.startswith("X_"))


@pytest.mark.parametrize("name", EXAMPLES)
def test_nothing_and_unequal_numbers_are_refused(name):
    predictions, references = EXAMPLES[name]
    with pytest.raises(ValueError, match="predictions and references are empty"):
        compute(name, predictions[:0], references[:0])
    count = len(predictions)
    with pytest.raises(ValueError, match=f"there are {count + 1} predictions and {count} references"):
        compute(name, predictions + predictions[:1], references)


@pytest.mark.parametrize("name", ["error_rate", "rouge", "sacrebleu", "squad"])
@pytest.mark.parametrize(("prediction", "reference"), [("a", "a"), (["a"], ["a"]), (1, ["1"]), (None, ["a"])])
def test_what_is_no_text_is_refused(name, prediction, reference):
    with pytest.raises(ValueError, match=r"expected a list|expected format"):
        compute(name, [prediction], [reference])


@pytest.mark.parametrize(("name", "module"), [("seqeval", "seqeval"), ("squad", "evaluate")])
def test_a_missing_library_is_named(name, module, monkeypatch):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(CommandError, match=rf'{module} is not installed; pip install "scratchbert\[train\]"'):
        training_metrics.load(name)


def test_the_random_numbers_of_a_training_run_are_left_alone():
    before = random.getstate(), np.random.get_state()[1:3], torch.get_rng_state()
    for name, example in EXAMPLES.items():
        compute(name, *example)
    assert random.getstate() == before[0]
    np.testing.assert_equal(np.random.get_state()[1:3], before[1])
    assert torch.equal(torch.get_rng_state(), before[2])


def test_processes_at_once_from_any_folder_leave_only_the_copied_modules(tmp_path):
    """Two that start together, with empty caches, as two runs of a fresh machine do."""
    code = (
        f"import sys; sys.path.insert(0, {str(SCRIPTS)!r})\n"
        "from toolkit.metrics import compute\n"
        "assert 'evaluate' not in sys.modules\n"
        # Only evaluate's pipelines want transformers, which is slow to import.
        "sys.modules['transformers'] = None; import evaluate; del sys.modules['transformers']\n"
        "for i in range(20):\n"
        "    found = compute(['squad', 'error_rate'], ['x y'], [['x z' if i % 2 else 'x y']])\n"
        "    assert (found['exact_match'], found['token_error_rate']) == ((0, 0.5) if i % 2 else (100, 0))\n"
    )
    environment = {"HF_HOME": str(tmp_path / "home"), "TMPDIR": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    environment = {**os.environ, **environment, "HF_MODULES_CACHE": str(tmp_path / "modules")}
    command = [sys.executable, "-c", code]
    runs = [subprocess.Popen(command, cwd=tmp_path, env=environment, stderr=subprocess.PIPE) for _ in range(2)]
    assert [(run.communicate()[1].decode(), run.returncode) for run in runs] == [("", 0)] * 2
    assert {path.name for path in tmp_path.iterdir()} == {"modules"}
