"""scripts/finetune_question_answering.py: rows, windows, losses, and answers with and without one."""

import gzip
import json
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoTokenizer, BertForQuestionAnswering

import finetune_question_answering as script
import question_answering
from finetune_question_answering import main
from modeling_scratchbert import ScratchBertForQuestionAnswering
from support.finetuning import SPECIAL, assert_help_tells, assert_one_line, assert_resumes, make_task, save_tiny
from toolkit.finetuning.question_answering import QuestionAnswering, answers_of, best_threshold, ids_of
from toolkit.finetuning.task_settings import QuestionAnsweringSettings
from toolkit.metrics import compute
from toolkit.spans import Answer, answer

pytestmark = pytest.mark.usefixtures("quiet_only_here")

WORDS = ["who", "when", "?", "was", "it", "the", "anna", "brandt", "in", "1843", "paul", "mill", ".", "a", "b", "c"]
ID = {word: i for i, word in enumerate([*SPECIAL, *WORDS])}
MILL = "It was Anna Brandt, in 1843. a b c a b c."  # 15 tokens; "," is unknown


def row(number, question: str, answers: list[tuple[str, int]], context: str = MILL) -> dict:
    texts, starts = [text for text, _ in answers], [start for _, start in answers]
    return {"id": number, "question": question, "context": context, "answers": {"text": texts, "answer_start": starts}}


ROWS = [
    row("q1", "Who?", [("Anna Brandt", 7)]),
    row("q2", "When?", [("in 1843", 20), ("1843", 23)]),
    row("q3", "Who was Paul?", []),
    row("q4", "When was it?", [("1843", 7)], "It was 1843."),
]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> str:
    torch.manual_seed(0)
    return save_tiny(tmp_path_factory.mktemp("tiny"), WORDS)


def write(path, rows: list[dict]) -> str:
    path.write_text("".join(json.dumps(each) + "\n" for each in rows), encoding="utf-8")
    return str(path)


@pytest.fixture
def task(tiny, tmp_path):
    """Makes the task of some rows; without any, of ROWS."""

    def make(rows=ROWS, validation=ROWS, **flags):
        files = {"train_file": [write(tmp_path / "t.jsonl", rows)]}
        if validation:
            files |= {"validation_file": [write(tmp_path / "v.jsonl", validation)]}
        lengths = {"max_length": 32, "stride": 4, "output": str(tmp_path)}
        return make_task(QuestionAnswering, QuestionAnsweringSettings, model=tiny, **files, **(lengths | flags))

    return make


# ---------------------------------------------------------------------------------------------------------------- rows


def nested(rows: list[dict]) -> dict:
    """Two articles of SQuAD's own form, the first with two paragraphs."""

    def paragraph(some: list[dict]) -> dict:
        answers = [
            [{"text": t, "answer_start": s} for t, s in zip(*each["answers"].values(), strict=True)] for each in some
        ]
        questions = [{"id": each["id"], "question": each["question"]} for each in some]
        return {
            "context": some[0]["context"],
            "qas": [q | {"answers": a} for q, a in zip(questions, answers, strict=True)],
        }

    data = [
        {"title": "x", "paragraphs": [paragraph(rows[:2]), paragraph(rows[2:3])]},
        {"paragraphs": [paragraph(rows[3:])]},
    ]
    return {"version": "v2.0", "data": data}


@pytest.mark.parametrize("name", ["dev.json", "dev.json.gz"])
@pytest.mark.parametrize("indent", [None, 1])
def test_squads_own_files(tiny, tmp_path, task, indent, name):
    path = tmp_path / name
    content = json.dumps(nested(ROWS), indent=indent).encode()
    path.write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    files = {"train_file": [str(path)], "validation_file": [str(path)], "max_length": 32, "stride": 4}
    made, flat = make_task(QuestionAnswering, QuestionAnsweringSettings, model=tiny, **files), task()
    rows = [each.rows["validation"].remove_columns(["place", "columns"]).to_list() for each in (made, flat)]
    assert rows[0] == rows[1]
    assert made.rows["validation"]["place"][1:3] == [
        f"{name}, row 2 (article 1, paragraph 1, question 2)",
        f"{name}, row 3 (article 1, paragraph 2, question 1)",
    ]


AS_LINES = "".join(json.dumps(each) + "\n" for each in ROWS)


@pytest.mark.parametrize(
    ("content", "lines"),
    [
        (AS_LINES, [1, 2, 3, 4]),
        (AS_LINES.replace("{", '{"data": [], ', 1), [1, 2, 3, 4]),
        (AS_LINES.splitlines()[0], [1]),
        (json.dumps(ROWS), None),
        (json.dumps(ROWS, indent=1), None),
    ],
    ids=["lines", "a column named data", "a line", "an array", "an array in lines"],
)
def test_other_json_with_the_ending_of_squads(content, lines, tiny, tmp_path):
    path = tmp_path / "rows.json.gz"
    path.write_bytes(gzip.compress(content.encode()))
    made = make_task(QuestionAnswering, QuestionAnsweringSettings, model=tiny, train_file=[str(path)], stride=4)
    places = [f"rows.json.gz, row {n}" + (f" (line {n})" if lines else "") for n in lines or (1, 2, 3, 4)]
    assert list(made.train_set["place"]) == places


def test_the_first_samples_of_squads_own_files(tiny, tmp_path):
    content = nested(ROWS)
    del content["data"][0]["paragraphs"][1]["context"]
    (tmp_path / "dev.json").write_text(json.dumps(content))
    flags = {"train_file": [str(tmp_path / "dev.json")], "max_length": 32, "stride": 4, "max_train_samples": 2}
    made = make_task(QuestionAnswering, QuestionAnsweringSettings, model=tiny, **flags)
    assert list(made.train_set["place"]) == [
        f"dev.json, row {n} (article 1, paragraph 1, question {n})" for n in (1, 2)
    ]


def test_damaged_gzip_files_of_squads_form_are_named(tiny, tmp_path, capsys):
    path = tmp_path / "dev.json.gz"
    path.write_bytes(gzip.compress(json.dumps(nested(ROWS)).encode())[:-20])
    argv = ["--model", tiny, "--train_file", str(path), "--output", str(tmp_path / "out")]
    assert_one_line(lambda: main(argv), f"{path} cannot be read: ", capsys)


def test_answers_in_each_form():
    expected = [("in 1843", 20), ("1843", 23)]
    assert answers_of(ROWS[1]) == expected
    assert answers_of(ROWS[1] | {"answers": [{"text": t, "answer_start": s} for t, s in expected]}) == expected
    assert answers_of(ROWS[2]) == answers_of(ROWS[2] | {"answers": []}) == []


BAD_ROWS = {
    "an answer elsewhere": (
        row("x", "Who?", [("Anna", 6)]),
        "answer 0 is 'Anna' at character 6 of its context; found ' Ann' there",
    ),
    "a second answer elsewhere": (row("x", "Who?", [("Anna", 7), ("Paul", 0)]), "answer 1 is 'Paul' at character 0"),
    "an empty answer": (row("x", "Who?", [("", 7)]), "answer 0 is empty"),
    "an answer that is no text": (row("x", "Who?", [(3, 7)]), "answer 0 is 3 at 7"),
    "a place that is none": (row("x", "Who?", [("Anna", "7")]), "answer 0 is 'Anna' at '7'"),
    "no answers": ({"question": "Who?", "context": MILL}, "'answers' is None; expected"),
    "more texts than places": (
        row("x", "Who?", []) | {"answers": {"text": ["a"], "answer_start": []}},
        "two lists of one length",
    ),
    "an answer to what has none": (
        row("x", "Who?", [("Anna", 7)]) | {"is_impossible": True},
        "'is_impossible' is True and 'answers' is {'text': ['Anna'], 'answer_start': [7]}; expected no answers",
    ),
    "a question that is empty": (row("x", " ", []), "'question' is empty"),
    "a question without tokens": (row("x", "\u200b", []), "question 0 is empty"),
    "a question without end": (
        row("x", "who " * 40, []),
        "question 0: max_length is 32; expected at least 48: 43 tokens",
    ),
    "a text that is empty": (row("x", "Who?", [], ""), "'context' is empty"),
    "an answer without tokens": (row("x", "Who?", [("\u200b", 2)], "a \u200b b"), "has no token in any window"),
}


@pytest.mark.parametrize("name", BAD_ROWS)
def test_a_bad_row_is_named_or_skipped(name, tiny, tmp_path, capsys):
    bad, message = BAD_ROWS[name]
    rows = write(tmp_path / "rows.jsonl", [ROWS[0], bad, ROWS[1]])
    flags = ["--max_length", "32", "--stride", "4", "--output", str(tmp_path / "out")]
    assert main(["--model", tiny, "--train_file", rows, *flags]) == 2
    said = capsys.readouterr().err
    assert f"rows.jsonl, row 2 (line 2): {message}" in said or (message in said and "row 2 (line 2): " in said)
    assert said.count("\n") == 1
    flags = {"train_file": [rows], "on_bad_row": "skip", "max_length": 32, "stride": 4}
    made = make_task(QuestionAnswering, QuestionAnsweringSettings, model=tiny, **flags)
    assert list(made.train_set["place"]) == ["rows.jsonl, row 1 (line 1)", "rows.jsonl, row 3 (line 3)"]


def test_ids_are_the_places_where_there_are_none(task):
    rows = [{**each, "id": number} for each, number in zip(ROWS, [None, 7, 0, "a"], strict=True)]
    del rows[3]["id"]
    assert ids_of(task(ROWS, rows).rows["validation"]) == [
        "v.jsonl, row 1 (line 1)",
        "7",
        "0",
        "v.jsonl, row 4 (line 4)",
    ]
    with pytest.raises(ValueError, match=r"v.jsonl, row 2 \(line 2\): its id is 'q1', like that of v.jsonl, row 1"):
        task(ROWS, [ROWS[0], ROWS[0]])


# ------------------------------------------------------------------------------------------------- windows and losses


def test_two_windows_of_a_row(task):
    """Of 10 tokens, 3 special ones and 2 of the question leave 5 to the text, of which two windows share 2."""
    made = task(ROWS[:1], None, max_length=10, stride=2).train_set
    ids = [
        [ID.get(token, ID["[UNK]"]) for token in part.split()]
        for part in (
            "[CLS] who ? [SEP] it was anna brandt , [SEP]",
            "[CLS] who ? [SEP] brandt , in 1843 . [SEP]",
            "[CLS] who ? [SEP] 1843 . a b c [SEP]",
            "[CLS] who ? [SEP] b c a b c [SEP]",
            "[CLS] who ? [SEP] b c . [SEP]",
        )
    ]
    assert list(made["input_ids"]) == ids
    assert list(made["start_positions"]) == [6, 0, 0, 0, 0]
    assert list(made["end_positions"]) == [7, 0, 0, 0, 0]
    assert made["token_type_ids"][0] == [0] * 4 + [1] * 6


def test_answers_that_fit_in_no_window_are_counted(task, capsys):
    """Windows of 5 tokens of the text: of two answers of 2 and of 9 tokens, one fits, and none of the second alone."""
    long = row("long", "Who?", [("It was Anna Brandt, in 1843.", 0)])
    task([*ROWS[:1], long, ROWS[2]], None, max_length=10, stride=2)
    message = "1 of 2 answers fit in no window of --max_length 10 and --stride 2; their questions are trained as "
    assert message in capsys.readouterr().out
    with pytest.raises(ValueError, match="no answer fits in a window of --max_length 10 and --stride 2; expected"):
        task([long, ROWS[2]], None, max_length=10, stride=2)
    task([ROWS[0], ROWS[2]], [long], max_length=10, stride=2)
    assert "no window" not in capsys.readouterr().out


@pytest.mark.parametrize("implementation", ["scratchbert", "bert"])
def test_the_loss_is_that_of_bert(implementation, tiny, task):
    """Of each window by itself, where there is no padding; and of windows of a length together."""
    made = task(implementation=implementation, max_length=16)
    model, reference = made.model.eval(), BertForQuestionAnswering.from_pretrained(tiny).eval()
    reference.qa_outputs.load_state_dict(model.qa_outputs.state_dict())
    rows = list(made.train_set)
    batch = made.collate(rows)
    assert made.counts(batch).tolist() == [len(rows)]
    expected = [reference(**made.collate([each])).loss for each in rows]
    torch.testing.assert_close(made.losses(model, batch)[0] / len(rows), sum(expected) / len(rows), rtol=1e-5, atol=0)
    alike = [each for each in rows if each["length"] == 16]
    batch = made.collate(alike)
    assert len(alike) > 2
    torch.testing.assert_close(made.losses(model, batch)[0] / len(alike), reference(**batch).loss, rtol=1e-5, atol=0)


def test_without_padding_the_loss_is_the_same(task):
    padded, flat = task(max_length=16), task(max_length=16, padding_free_collation=True)
    model, rows = padded.model.eval(), list(padded.train_set)
    batches = padded.collate(rows), flat.collate(rows)
    assert batches[1]["input_ids"].shape[0] == 1
    assert padded.counts(batches[0]).equal(flat.counts(batches[1]))
    torch.testing.assert_close(padded.losses(model, batches[0]), flat.losses(model, batches[1]), rtol=1e-5, atol=0)


# ------------------------------------------------------------------------------------------------------------- metrics


class Told(torch.nn.Module):
    """Says the same of a token wherever it stands."""

    def __init__(self, starts: dict[str, float], ends: dict[str, float]):
        super().__init__()
        self.scores = torch.tensor([[said.get(token, -9.0) for token in ID] for said in (starts, ends)])

    def forward(self, input_ids, **_):
        return SimpleNamespace(start_logits=self.scores[0][input_ids], end_logits=self.scores[1][input_ids])


STARTS = {"[CLS]": 1.0, "anna": 4.0, "was": 3.0, "1843": 1.0}
ENDS = {"[CLS]": 1.0, "brandt": 4.0, "1843": 2.0, "was": 1.5}


@pytest.mark.parametrize("padding_free", [False, True])
@pytest.mark.parametrize("max_length", [32, 13])
def test_metrics_by_hand(task, max_length, padding_free):
    """The answer "Anna Brandt" has 4 + 4 - 2 = 6 everywhere, and is right once: with those of q2 it shares no word, and
    q3 wants none. q4 gets "was 1843", 3 + 2 - 2 = 3: precision 1/2, recall 1, F1 2/3. With more than 3 to exceed, q4
    has no answer; with more than 6 none has, and q3 is right."""
    texts = {"q1": "Anna Brandt", "q2": "Anna Brandt", "q3": "Anna Brandt", "q4": "was 1843"}
    cases = {
        "never": (texts, [100, 0, 0, 200 / 3], [100, 0, 0, 0]),
        "2.9": (texts, [100, 0, 0, 200 / 3], [100, 0, 0, 0]),
        "3": (texts | {"q4": ""}, [100, 0, 0, 0], [100, 0, 0, 0]),
        "6": (dict.fromkeys(texts, ""), [0, 0, 100, 0], [0, 0, 100, 0]),
    }
    for threshold, (answers, f1, exact) in cases.items():
        flags = {"padding_free_collation": padding_free, "null_threshold": threshold, "eval_batch_size": 2}
        made = task(max_length=max_length, **flags)
        assert len(made.splits["validation"]) == (4 if max_length == 32 else 13)
        evaluation = made.evaluate(Told(STARTS, ENDS), "validation")
        assert {row["id"]: row["prediction"] for row in evaluation.predictions} == answers
        metrics = evaluation.metrics
        answered = [0, 1, 3]
        windows = [made.losses(Told(STARTS, ENDS), made.collate([row])) for row in made.splits["validation"]]
        expected = {"loss": float(sum(windows)) / len(windows)}
        for name, scores in (("f1", f1), ("exact_match", exact)):
            expected[name] = sum(scores) / 4
            expected[f"has_answer_{name}"] = sum(scores[i] for i in answered) / 3
            expected[f"no_answer_{name}"] = scores[2]
        assert metrics == pytest.approx(expected)


def test_any_gold_answer_counts(task):
    """Of q2's, "in 1843" and "1843", the second is given; and it is q4's."""
    metrics = task(null_threshold="never").evaluate(Told({"1843": 5.0}, {"1843": 5.0}), "validation").metrics
    assert metrics["exact_match"] == 50


def test_an_answer_has_a_length_at_most(task):
    """Of one token alone: the best is "was", 3 + 1.5."""
    evaluation = task(max_answer_length=1, null_threshold="never").evaluate(Told(STARTS, ENDS), "validation")
    assert {row["prediction"] for row in evaluation.predictions} == {"was"}


def test_the_threshold_is_that_of_the_training_set(task):
    assert task().threshold == 0
    assert task([ROWS[0], ROWS[3]]).threshold is None
    assert task(null_threshold="-1.5").threshold == -1.5
    with pytest.raises(ValueError, match="--null_threshold is best and there is no validation set"):
        task(validation=None, null_threshold="best")


def test_the_best_threshold_is_found_and_kept(task, tmp_path):
    """All scores but q4's, 3, are 6. Without any answer q3 is right, F1 25; with those above 3 q1, 25; with all q1 and
    q4, 41.7. Another split is judged by what was found."""
    made = task(null_threshold="best", test_file=[write(tmp_path / "x.jsonl", ROWS[2:3])])
    metrics = made.evaluate(Told(STARTS, ENDS), "validation").metrics
    assert metrics["f1"] == pytest.approx((100 + 200 / 3) / 4)
    assert metrics["null_threshold"] == made.threshold == pytest.approx(2)
    metrics = made.evaluate(Told(STARTS, ENDS), "test").metrics
    assert metrics.pop("loss") > 0
    assert metrics == {"f1": 0, "exact_match": 0, "null_threshold": made.threshold}


def test_the_best_threshold_is_the_best_there_is():
    """Against all that make a difference, tried one by one; of answers right, wrong and half right, with scores that
    come several times."""
    generator = torch.Generator().manual_seed(0)
    kinds = [("a b", ["a b"]), ("a b", ["c"]), ("a b", ["a c"]), ("a b", [])]
    for _ in range(20):
        drawn = torch.randint(0, 4, (2, 6), generator=generator).tolist()
        spans = [Answer(kinds[kind][0], 0, 3, float(score)) for kind, score in zip(*drawn, strict=True)]
        golds = [kinds[kind][1] for kind in drawn[0]]

        def f1(threshold, spans=spans, golds=golds):
            return compute("squad", [span.text if span.score > threshold else "" for span in spans], golds)["f1"]

        assert f1(best_threshold(spans, golds)) == pytest.approx(max(f1(each) for each in (-1, 0, 1, 2, 3)))


def test_the_best_threshold_is_between_two_scores():
    """1 and 1.00005 are one level, because rounding can change their order."""
    spans = [Answer("x", 0, 1, score) for score in (3.0, 1.0, 1.00005, -2.0)]
    golds = {
        "all": [["x"]] * 4,
        "above -2": [["x"], ["x"], ["x"], []],
        "above 1": [["x"], [], [], []],
        "none": [[]] * 4,
    }
    found = {name: best_threshold(spans, each) for name, each in golds.items()}
    expected = {"all": -3, "above -2": -0.5, "above 1": (3 + 1.00005) / 2, "none": 4}
    assert found == pytest.approx(expected)
    assert best_threshold(spans, [["x"], [], ["x"], []]) == pytest.approx(-0.5)


# ---------------------------------------------------------------------------------------------------------------- runs


def test_resumed_is_uninterrupted_and_answers(tiny, tmp_path, monkeypatch):
    """Enough steps to learn four questions by heart, in windows that have not all the text."""
    rows = write(tmp_path / "rows.jsonl", ROWS)
    flags = ["--model", tiny, "--train_file", rows, "--validation_file", rows, "--test_file", rows, "--batch_size", "4"]
    flags += ["--epochs", "16", "--learning_rate", "5e-3", "--schedule", "constant", "--warmup_ratio", "0"]
    flags += ["--padding_free_collation", "--max_length", "14", "--doc_stride", "4"]
    assert_resumes(main, flags, tmp_path, monkeypatch, after=9)
    folder = tmp_path / "whole"
    report = json.loads((folder / "metrics.json").read_text())
    assert report["validation"] == report["test"]
    assert report["test"]["f1"] == report["test"]["no_answer_f1"] == 100
    answers = {"q1": "Anna Brandt", "q2": "in 1843", "q3": "", "q4": "1843"}
    for split in ("validation", "test"):
        assert json.loads((folder / f"predictions_{split}.json").read_text(encoding="utf-8")) == answers
    model, tokenizer = ScratchBertForQuestionAnswering.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    texts = [each["question"] for each in ROWS], [each["context"] for each in ROWS]
    found = answer(model, tokenizer, *texts, max_length=14, stride=4)
    assert [each[0].text for each in found] == list(answers.values())


ANSWERABLE = [each for each in ROWS if each["answers"]["text"]]


@pytest.mark.parametrize(
    ("rows", "flags"),
    [(ANSWERABLE, []), (ANSWERABLE, ["--null_threshold", "best"]), (ROWS, ["--null_threshold", "-100"])],
    ids=["never", "best", "a number"],
)
def test_the_command_answers_as_the_training_did(rows, flags, tiny, tmp_path, capsys):
    """With the lengths and the threshold of the training. After two updates some answers have a score below 0, so that
    a threshold of 0 would omit them."""
    path, out = write(tmp_path / "rows.jsonl", rows), tmp_path / "out"
    flags = [
        *flags,
        "--max_steps",
        "2",
        "--learning_rate",
        "1e-3",
        "--max_length",
        "14",
        "--stride",
        "4",
        "--max_answer_length",
        "2",
    ]
    files = ["--train_file", path, "--validation_file", path, "--output", str(out), "--trackers", "none"]
    assert main(["--model", tiny, *files, *flags]) == 0
    expected = json.loads((out / "predictions_validation.json").read_text(encoding="utf-8"))
    capsys.readouterr()
    found = {}
    for each in rows:
        asked = ["--question", each["question"], "--context", each["context"]]
        assert question_answering.main([str(out), *asked]) == 0
        found[each["id"]] = capsys.readouterr().out.removesuffix("\n")
    assert found == expected
    assert all(found.values())


def test_help(capsys):
    assert_help_tells(script, ("--stride", "--doc_stride", "--null_threshold", "--max_answer_length"), capsys)


WRONG = {
    "a threshold that is none": (
        ["--null_threshold", "high"],
        "--null_threshold is high; expected a number, best, or never",
    ),
    "an infinite threshold": (["--null_threshold", "inf"], "--null_threshold is inf"),
    "no length": (["--max_answer_length", "0"], "--max_answer_length is 0; expected 1 or more"),
    "a stride below 0": (["--stride", "-1"], "--stride is -1; expected 0 or more"),
    "a stride too long": (["--max_length", "10", "--stride", "5"], "expected at least 11: 5 tokens around the text"),
    "a metric that is none": (["--metric", "bleu"], "invalid choice: 'bleu'"),
    "a flag that is none": (["--question_column", "x"], "--question_column"),
    "a file that is not there": (["--validation_file", "no.jsonl"], "no.jsonl"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_said_in_a_line(name, tiny, tmp_path, capsys):
    flags, message = WRONG[name]
    rows = write(tmp_path / "rows.jsonl", ROWS)
    argv = ["--model", tiny, "--train_file", rows, "--output", str(tmp_path / "out"), *flags]
    assert_one_line(lambda: main(argv), message, capsys)


BROKEN = {
    "a paragraph without text": (
        {"data": [{"paragraphs": [{"qas": [{"id": "1", "question": "a?", "answers": []}]}]}]},
        "dev.json, article 1, paragraph 1: 'context' is missing; expected SQuAD's nested form",
    ),
    "an article that is none": ({"data": ["x"]}, "dev.json, article 1: a value is of another type"),
    "a list that is none": (
        {"data": [{"paragraphs": {"qas": 1}}]},
        "article 1, paragraph 1: a value is of another type",
    ),
    "a paragraph without questions": (
        {"data": [{"paragraphs": []}, {"paragraphs": [{"context": "a"}]}]},
        "dev.json, article 2, paragraph 1: 'qas' is missing",
    ),
    "a question that is none": (
        {"data": [{"paragraphs": [{"context": "a", "qas": ["a?"]}]}]},
        "dev.json, article 1, paragraph 1: a value is of another type",
    ),
    "another name": ({"version": "v2.0", "articles": [{"paragraphs": []}]}, "dev.json: 'data' is missing"),
    "no questions": ({"data": [{"paragraphs": [{"context": "a", "qas": []}]}]}, "dev.json has no rows"),
    "no articles": ({"data": []}, "dev.json has no rows"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_file_of_squads(name, tiny, tmp_path, capsys):
    content, message = BROKEN[name]
    path = tmp_path / "dev.json"
    path.write_text(json.dumps(content, indent=1), encoding="utf-8")
    argv = ["--model", tiny, "--train_file", str(path), "--output", str(tmp_path / "out")]
    assert_one_line(lambda: main(argv), message, capsys)


def test_columns_that_are_missing(tiny, tmp_path, capsys):
    rows = [{name: value for name, value in each.items() if name != "context"} for each in ROWS]
    path = write(tmp_path / "rows.jsonl", rows)
    assert main(["--model", tiny, "--train_file", path, "--output", str(tmp_path / "out")]) == 2
    assert "no column for the context" in capsys.readouterr().err
