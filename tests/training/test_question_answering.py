"""Question answering: windows of long texts, answers from all of them, the loss, and rows that cannot be used."""

import numpy as np
import pytest
import torch
from transformers import BertForQuestionAnswering

from support.tiny import as_question, make_task, save_tiny, tokens
from toolkit.tasks.question_answering import best_span, positions

CONTEXT = "In O\u0304saka, 1970."  # an uncased tokenizer drops the combining mark
OFFSETS = np.array([(0, 2), (3, 9), (9, 10), (11, 15), (15, 16)])


@pytest.mark.parametrize(
    ("answer", "expected"),
    [(("1970", 11), (4, 4)), ((" 1970.", 10), (4, 5)), ((CONTEXT, 0), (1, 5)), (("97", 12), (4, 4)), (None, (0, 0))],
)
def test_tokens_of_an_answer(answer, expected):
    assert positions(OFFSETS, answer) == expected
    assert positions(OFFSETS[:3], ("1970", 11)) == (0, 0)  # not in this window


def test_the_best_span():
    """The highest sum of a start and a later end within the longest answer."""
    random = np.random.default_rng(0)
    for width in (1, 2, 5, 9):
        start, end = random.normal(size=(2, 7))
        example = {"first": 2, "offsets": np.array([(i, i + 1) for i in range(4)])}
        pairs = [(start[2 + i] + end[2 + j], i, j + 1) for i in range(4) for j in range(i, min(i + width, 4))]
        assert best_span(example, start, end, width) == pytest.approx(max(pairs))


BOOK = "It was Anna Brandt, in 1843. a b c a b c."  # 15 tokens


@pytest.fixture(scope="module")
def reading(tmp_path_factory) -> str:
    words = ["who", "when", "?", "was", "it", "anna", "brandt", "in", "1843", "paul", ".", "a", "b", "c", ","]
    return save_tiny(tmp_path_factory.mktemp("reading"), words)


def ask(question: str, *answers: tuple[str, int], context: str = BOOK) -> dict:
    return {"question": question, "context": context, "answers": [{"text": t, "answer_start": s} for t, s in answers]}


QUESTIONS = [
    ask("Who?", ("Anna Brandt", 7)),
    ask("When?", ("in 1843", 20), ("1843", 23)),
    ask("Who was Paul?"),
    ask("When was it?", ("1843", 7), context="It was 1843."),
]


def test_windows_of_a_text(reading, capsys):
    """Five tokens of the text in each, of which two windows share two; an answer in none is counted."""
    long = ask("Who?", ("It was Anna Brandt, in 1843.", 0))
    flags = {"model": reading, "max_length": 10, "stride": 2}
    task, rows = make_task("question-answering", [QUESTIONS[0], long], **flags)
    examples = task.encode(rows)
    assert [tokens(task, example["input_ids"][4:-1]) for example in examples[:5]] == [
        "it was anna brandt ,",
        "brandt , in 1843 .",
        "1843 . a b c",
        "b c a b c",
        "b c .",
    ]
    assert [example["labels"] for example in examples] == [[6, 7], *[[0, 0]] * 9]
    assert examples[0]["token_type_ids"].tolist() == [0] * 4 + [1] * 6
    assert not any(example["cut"] for example in examples)
    assert "1 of 2" in capsys.readouterr().out
    for wrong, named in ((long, "10"), (ask("who " * 9), "row 1.* 9 tokens"), (ask("who", context="\u200b"), "row 1")):
        with pytest.raises(ValueError, match=named):
            task.encode(make_task("question-answering", [wrong], **flags)[1])


STARTS = {"[CLS]": 1.0, "anna": 4.0, "was": 3.0, "1843": 1.0}
ENDS = {"[CLS]": 1.0, "brandt": 4.0, "1843": 2.0, "was": 1.5}
ANNA = ["Anna Brandt"] * 3


@pytest.mark.parametrize("max_length", [32, 13])
@pytest.mark.parametrize(
    ("flags", "expected", "f1"),
    [
        # The answer "Anna Brandt" has 4 + 4 - 2 = 6 and is right once; "was 1843" has 3 + 2 - 2 = 3 and F1 2/3.
        ({"null_threshold": "never"}, [*ANNA, "was 1843"], 1 + 2 / 3),
        ({"null_threshold": "3"}, [*ANNA, ""], 1),
        ({"null_threshold": "6"}, [""] * 4, 1),  # the third question has no answer
        ({}, [*ANNA, "was 1843"], 1 + 2 / 3),  # 0, since a question of the training has no answer
        ({"null_threshold": "best"}, [*ANNA, "was 1843"], 1 + 2 / 3),
        ({"null_threshold": "never", "max_answer_length": 1}, ["was"] * 4, 0),
    ],
)
def test_answers(flags, expected, f1, max_length, reading):
    """From all windows, by scores that each token has wherever it stands."""
    flags = {"model": reading, "max_length": max_length, "stride": 4, **flags}
    task, rows = make_task("question-answering", QUESTIONS, **flags)
    examples = task.encode(rows)
    assert len(examples) == (4 if max_length == 32 else 13)
    outputs = [
        np.array(
            [[said.get(token, -9.0) for token in tokens(task, each["input_ids"]).split()] for said in (STARTS, ENDS)]
        )
        for each in examples
    ]
    task.tune(rows, examples, outputs)
    predictions = task.decode(rows, examples, outputs)
    assert [row["prediction"] for row in predictions] == expected
    assert task.metrics(rows, predictions)["f1"] == pytest.approx(100 * f1 / 4)


ELSEWHERE = {
    "another place": ask("Who?", ("Anna", 6)),
    "a second one at another place": ask("Who?", ("Anna", 7), ("Paul", 0)),
    "empty": ask("Who?", ("", 7)),
    "no text": ask("Who?", (3, 7)),
    "no number": ask("Who?", ("Anna", "7")),
    "before the text": ask("Who?", (".", -1)),
    "missing": {"question": "Who?", "context": BOOK},
    "more texts than places": {**QUESTIONS[0], "answers": {"text": ["a"], "answer_start": []}},
    "impossible": {**QUESTIONS[0], "is_impossible": True},
    "no question": ask(" "),
    "no context": ask("Who?", context=""),
}


@pytest.mark.parametrize("row", ELSEWHERE.values(), ids=ELSEWHERE)
def test_answers_that_are_none(row, reading):
    task, _ = make_task("question-answering", QUESTIONS, model=reading)
    with pytest.raises(ValueError, match=r"answers?|'context'|'question'|is_impossible|argument"):
        task.read(row)
    columns = {"text": ["in 1843", "1843"], "answer_start": [20, 23]}
    assert task.read({**QUESTIONS[1], "answers": columns})["answers"] == [("in 1843", 20), ("1843", 23)]


def test_the_loss_of_windows_is_berts(reading):
    """That of each window by itself, where there is no padding."""
    task, rows = make_task("question-answering", QUESTIONS, model=reading, max_length=16, stride=4)
    examples, opened = task.encode(rows), task.open_model().eval()
    bert = BertForQuestionAnswering.from_pretrained(reading).eval()
    bert.qa_outputs.load_state_dict(opened.qa_outputs.state_dict())
    with torch.no_grad():
        expected = sum(bert(**as_question(task.collate([example]))).loss for example in examples)
        batch = task.collate(examples)
        loss = task.loss_of(task.logits(opened, batch), batch)
        torch.testing.assert_close(loss / task.count(batch), expected / len(examples))
