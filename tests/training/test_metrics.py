"""Metrics of all tasks, with values worked out by hand."""

import math

import numpy as np
import pytest

from support.tiny import make_task
from toolkit.metrics import classification_metrics
from toolkit.tasks.question_answering import Squad, best_match, best_threshold
from toolkit.tasks.seq2seq import ErrorRate, Rouge, Sacrebleu
from toolkit.tasks.tagging import Entities

# The predicted and the true labels, accuracy, macro F1 and Matthews correlation.
LABELS = [
    # F1 of A: 1 of 2 and 2; of B: 2 of 2 and 3; of C: 1 of 2 and 1.
    ("AABBCC", "ABBBCA", 4 / 6, (1 / 2 + 4 / 5 + 2 / 3) / 3, (4 * 6 - 12) / math.sqrt((36 - 12) * (36 - 14))),
    ("AA", "AA", 1, 1, 0),  # over the labels that occur
    ("BBBAAA", "BBABAA", 4 / 6, 2 / 3, 3 / 9),
    ("ABA", "BAB", 0, 0, -1),
    ("BBB", "ABA", 1 / 3, 1 / 4, 0),
]


@pytest.mark.parametrize(("found", "right", "accuracy", "f1", "matthews"), LABELS)
def test_one_label(found, right, accuracy, f1, matthews, model):
    task, rows = make_task("classification", [{"text": "good", "label": each} for each in "ABC"], model=model)
    rows = [{"label": each} for each in right]
    metrics = task.metrics(rows, [{"prediction": each} for each in found])
    expected = {"accuracy": accuracy, "f1_macro": f1, "matthews_correlation": matthews}
    assert metrics == pytest.approx(expected)


# The labels of each row, the share of rows that are right as a whole, macro and micro F1.
SEVERAL = [
    # A: 1 of 2 and 3. B: 0 of 2 and 0.
    (["A", "AB", "", "B"], ["A", "A", "", "A"], 0.5, (4 / 5 + 0) / 2, 2 * 2 / (4 + 3)),
    (["AC", "ABC"], ["AC", "C"], 0.5, (2 / 3 + 0 + 1) / 3, 2 * 3 / (5 + 3)),
    (["A", "AB"], ["AB", "AB"], 0.5, (1 + 2 / 3) / 2, 2 * 3 / (3 + 4)),
    (["", ""], ["", ""], 1, 0, 0),
]


@pytest.mark.parametrize(("found", "right", "exact", "macro", "micro"), SEVERAL)
def test_several_labels(found, right, exact, macro, micro, model):
    flags = {"problem": "multi_label", "labels": sorted(set("".join(["AB", *found])))}
    task, _ = make_task("classification", [{"text": "good", "label": "A"}], model=model, **flags)
    rows = [{"label": list(each)} for each in right]
    metrics = task.metrics(rows, [{"prediction": list(each)} for each in found])
    if "A" in "".join(right):
        table = task.table_by_label(rows, [{"prediction": []} for _ in rows])
        assert {name: values[0] for name, values in table.items()} == {
            "label": "A",
            "precision": 0,
            "recall": 0,
            "f1": 0,
            "rows": sum("A" in each for each in right),
        }
    assert metrics == pytest.approx({"subset_accuracy": exact, "f1_macro": macro, "f1_micro": micro})


NUMBERS = [
    # Deviations from the means: -1, 0, 1 and -2, -1, 3. The order is the same.
    ([[1], [2], [3]], [[0], [1], [5]], 5 / math.sqrt(28), 1, (1 + 1 + 4) / 3),
    ([[2.5]] * 3, [[1], [2], [3]], 0, 0, (1.5**2 + 0.5**2 + 0.5**2) / 3),
    ([[1], [2]], [[4], [4]], 0, 0, (9 + 4) / 2),
    ([[1.0]], [[1]], 0, 0, 0),
    # The means over two columns, of which one is right.
    ([[1, 1], [2, 2], [3, 3]], [[1, 3], [2, 2], [3, 1]], 0, 0, (4 + 0 + 4) / 6),
    ([[2, 0], [1, 0], [4, 0], [3, 0]], [[1, 0], [2, 0], [3, 0], [4, 0]], 0.3, 0.3, 4 / 8),
]


@pytest.mark.parametrize(("found", "right", "pearson", "spearman", "error"), NUMBERS)
def test_numbers(found, right, pearson, spearman, error):
    expected = {"pearson": pearson, "spearman": spearman, "mean_squared_error": error}
    assert classification_metrics("regression", np.array(right), np.array(found)) == pytest.approx(expected)


PERSON = ["B-PER", "I-PER", "O", "B-LOC"]
TEXTS = {
    # 3 words of 4 and 3 are shared, and 1 pair of 3 and 2; the longest common subsequence is the reference.
    "rouge": (Rouge, ["The cat also sat."], [["the cat sat"]], {"rouge1": 6 / 7, "rouge2": 2 / 5, "rougeL": 6 / 7}),
    "rouge by lines": (
        Rouge,
        ["red fox\nblue bird"],
        [["blue bird\nred fox"]],
        {"rougeL": 0.5, "rougeLsum": 1.0},
    ),
    "the best reference, without stemming": (
        Rouge,
        ["a cat", "", "cats"],
        [["a dog", "a cat"], ["a"], ["cat"]],
        {"rouge1": 1 / 3, "rouge2": 1 / 3, "rougeL": 1 / 3},
    ),
    # 5 of 6 tokens, 4 of 5 pairs and so on are in the reference, which has 7 tokens.
    "bleu": (
        Sacrebleu,
        ["a b c d e x"],
        [["a b c d e f g"]],
        {"bleu": 100 * (5 / 6 * 4 / 5 * 3 / 4 * 2 / 3) ** 0.25 * math.exp(1 - 7 / 6)},
    ),
    "chrf": (Sacrebleu, ["abcd"], [["abcx"]], {"chrf": 100 * (3 / 4 + 2 / 3 + 1 / 2 + 0) / 4}),
    "unequal numbers of references": (
        Sacrebleu,
        ["the cat sat on the mat", "a bird sang in the old tree"],
        [["the cat sat on the mat"], ["no bird", "a bird sang in the old tree"]],
        {"bleu": 100, "chrf": 100},
    ),
    "no text": (Sacrebleu, ["", ""], [["a b"], ["c", "d"]], {"bleu": 0, "chrf": 0}),
    # A person and two places are there, of which one is found too short, and four entities are found.
    "entities": (
        Entities,
        [PERSON, ["B-LOC", "O", "B-ORG"]],
        [PERSON, ["B-LOC", "I-LOC", "O"]],
        {"entity_precision": 2 / 4, "entity_recall": 2 / 3, "entity_f1": 4 / 7, "tag_accuracy": 5 / 7},
    ),
    "no entities": (Entities, [["O", "O"]], [["O", "O"]], {"entity_f1": 0, "tag_accuracy": 1}),
    "questions with and without answer": (
        Squad,
        ["black cat", "dog", "", "guess"],
        [["cat"], ["dog"], [], []],
        {
            **{"exact_match": 100 * 2 / 4, "f1": 100 * (2 / 3 + 1 + 1 + 0) / 4},
            **{"has_answer_f1": 100 * (2 / 3 + 1) / 2, "no_answer_f1": 50},
        },
    ),
}


@pytest.mark.parametrize(("metric", "found", "right", "expected"), TEXTS.values(), ids=TEXTS)
def test_texts(metric, found, right, expected):
    values = metric.of(found, right)
    assert {name: values[name] for name in expected} == pytest.approx(expected)
    assert len(Squad.of(["a"], [["a"]])) == 2  # nothing about questions without answer, if there are none


def test_entities_of_each_type(model):
    flags = {"model": model, "labels": ["O", "B-PER", "I-PER", "B-LOC", "I-LOC", "B-ORG"]}
    task, _ = make_task("tagging", [{"tokens": PERSON, "tags": PERSON}], **flags)
    rows = [{"tags": PERSON}, {"tags": ["B-LOC", "I-LOC", "O"]}]
    table = task.table_by_label(rows, [{"predicted_tags": PERSON}, {"predicted_tags": ["B-LOC", "O", "B-ORG"]}])
    assert table == [
        {"label": "LOC", "precision": 1 / 2, "recall": 1 / 2, "f1": 1 / 2, "entities": 2},
        {"label": "ORG", "precision": 0, "recall": 0, "f1": 0, "entities": 0},
        {"label": "PER", "precision": 1, "recall": 1, "f1": 1, "entities": 1},
    ]


ERRORS = [
    (["A B"], [["A B"]], 0, 0),
    (["A B"], [["A C D"]], 2 / 3, 1),  # a substitution and an insertion
    ([""], [["A C"]], 1, 1),
    (["A B C"], [["A"]], 2, 1),
    (["A", ""], [["B"], [""]], 1, 1 / 2),
    (["A", "A A A"], [["B"], ["A A A"]], 1 / 4, 1 / 2),  # over the whole set
    (["A", "B"], [["X Y Z", "A"], ["B C"]], 1 / 3, 1 / 2),  # the closest reference counts, with its length
    (["A"], [["A B", "C"]], 1, 1),  # of equally close ones the shorter
    (["HH AH"], [["HHAH"]], 2, 1),  # tokens, not letters
]


@pytest.mark.parametrize(("found", "right", "tokens", "items"), ERRORS)
def test_error_rates(found, right, tokens, items):
    assert ErrorRate.of(found, right) == pytest.approx({"token_error_rate": tokens, "item_error_rate": items})


# An answer, the right ones, the exact match and the F1.
ANSWERS = [
    ("The  Cat's, mat!", ["cats mat"], 1, 1),
    ("bathe", ["b"], 0, 0),  # articles only as whole words
    ("U.S.A.", ["usa"], 1, 1),
    ("the", ["cat"], 0, 0),
    ("big black cat", ["black cat"], 0, 2 * 2 / 5),
    ("cat cat cat dog", ["cat cat"], 0, 2 * 2 / 6),  # a token counts as often as both have it
    ("in 1999", ["the year 1999", "1999", "in 2000"], 0, 2 / 3),
    ("1999", ["in 1999", "1999"], 1, 1),
    ("", [], 1, 1),
    ("a word", [], 0, 0),
    ("", ["the", "cat"], 0, 0),  # nothing is left of "the"
]


@pytest.mark.parametrize(("answer", "golds", "exact", "f1"), ANSWERS)
def test_answers(answer, golds, exact, f1):
    assert best_match(answer, golds) == pytest.approx((exact, f1))


def test_the_best_threshold():
    """No other one has a higher F1, and it is between two levels. Scores with a difference below 1e-4 are one level."""
    random = np.random.default_rng(0)
    kinds = [("a b", ["a b"]), ("a b", ["c"]), ("a b", ["a c"]), ("a b", [])]
    for _ in range(20):
        drawn = [(*kinds[kind], float(score)) for kind, score in random.integers(0, 4, (6, 2))]

        def f1(threshold: float, drawn=drawn) -> float:
            return sum(best_match(text if score > threshold else "", gold)[1] for text, gold, score in drawn)

        answers, golds = [(text, score, 0) for text, _, score in drawn], [gold for _, gold, _ in drawn]
        assert f1(best_threshold(answers, golds)) == pytest.approx(max(f1(each) for each in (-1, 0, 1, 2, 3)))
    answers, gold = [("x", score, 0) for score in (3.0, 1.0, 1.00005, -2.0)], ["x"]
    for golds, expected in {
        (1, 1, 1, 1): -3,
        (1, 1, 1, 0): -0.5,
        (1, 0, 0, 0): (3 + 1.00005) / 2,
        (0, 0, 0, 0): 4,
        (1, 0, 1, 0): -0.5,
    }.items():
        assert best_threshold(answers, [gold * each for each in golds]) == pytest.approx(expected)
