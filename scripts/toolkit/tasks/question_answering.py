"""Question answering: the answer is a span of a text, or there is none."""

import re
import string
import unicodedata
from collections import Counter
from typing import Any

import numpy as np
import torch

from toolkit.data import find_column, text_of, value_of
from toolkit.hub import read_config
from toolkit.tasks.arguments import QuestionAnsweringArguments
from toolkit.tasks.task import Task, encodings, example_of, inputs_of
from toolkit.tasks.text_metric import TextMetric

# Scores that differ by less are one level: another device can change their order.
LEAST_DIFFERENCE = 1e-4


class QuestionAnswering(Task):
    """Questions, texts and answers. An example is a question with a window of its text, `[CLS] question [SEP] part of
    the text [SEP]`; two windows share --stride tokens of the text.

    Attributes:
        threshold: the score that an answer must exceed; None: there always is an answer. It is saved in the model's
            configuration, with the lengths of windows and answers.
    """

    name = "question-answering"
    label_fields = ("answers",)
    model_class = "ForQuestionAnswering"
    metric_names = ("f1", "exact_match")
    grouped_by = ("context",)
    arguments: QuestionAnsweringArguments
    threshold: float | None = None

    # -- data

    def find_inputs(self, columns):
        for name in ("question", "context"):
            find_column(columns, "question answering", name, ())
        return "the columns are 'question' and 'context'"

    def find_labels(self, columns):
        return f"the answers are {find_column(columns, 'question answering', 'answers', ())!r}"

    def read_inputs(self, content):
        return {"question": text_of(content, "question"), "context": text_of(content, "context")}

    def read_labels(self, content):
        return {"answers": answers_of(content, text_of(content, "context"))}

    def prepare(self, rows):
        without = sum(not row["answers"] for row in rows)
        yield f"{without:,} of {len(rows):,} questions have no answer"
        self.set_threshold(0.0 if without or self.arguments.null_threshold == "best" else "never")

    def restore(self):
        self.set_threshold(read_config(self.arguments.model).get("null_threshold", 0.0))

    def set_threshold(self, default: float | str) -> None:
        given = self.arguments.null_threshold
        value = default if given in (None, "best") else given
        self.threshold = None if value == "never" else float(value)

    def encode(self, rows):
        length, stride = self.arguments.max_length, self.arguments.stride
        questions = [row["question"] for row in rows]
        for i, encoding in encodings(self.tokenizer, questions):
            least = len(encoding.ids) + 1 + stride  # one more [SEP]
            if least >= length:
                raise ValueError(
                    f"{rows[i]['place']}: the question has {len(encoding.ids) - 2} tokens; expected a --max_length "
                    f"above {least}, with --stride {stride}."
                )
        encoded = encodings(
            self.tokenizer,
            questions,
            [row["context"] for row in rows],
            truncation="only_second",
            max_length=length,
            stride=stride,
        )
        examples = [window(encoding, rows[i], i) for i, encoding in encoded]
        if "answers" in rows[0]:
            self.check_answers(rows, examples)
        return examples

    def check_answers(self, rows: list[dict], examples: list[dict]) -> None:
        """Says how many answers are in no window as a whole. They are trained as questions without answer."""
        answers = sum(bool(row["answers"]) for row in rows)
        lost = answers - len({example["row"] for example in examples if example["labels"][0]})
        if lost and lost == answers:
            raise ValueError(f"no answer fits in a window of --max_length {self.arguments.max_length}; expected more.")
        if lost:
            self.say(f"{lost:,} of {answers:,} answers fit in no window, and are trained as questions without answer")

    # -- model, loss and metrics

    def open_model(self):
        return super().open_model(num_labels=2)

    def save_settings(self, config):
        names = ("max_length", "stride", "max_answer_length")
        config.null_threshold = "never" if self.threshold is None else self.threshold
        config.question_answering = {name: getattr(self.arguments, name) for name in names}

    def logits(self, model, batch):
        """The start and the end logits, `(B, 2, T)`, -inf at padding: a loss does not depend on the other rows."""
        outputs = model(**inputs_of(batch))
        logits = torch.stack((outputs.start_logits, outputs.end_logits), 1).float()
        return logits.masked_fill(batch["attention_mask"][:, None] == 0, -torch.inf)

    def outputs_of(self, logits, batch):
        return list(logits.double().cpu().numpy())  # in float64 their sums compare exactly

    def tune(self, rows, examples, outputs):
        if self.arguments.null_threshold == "best":
            answers = self.best_answers(rows, examples, outputs)
            self.threshold = best_threshold(answers, texts_of(rows))

    def decode(self, rows, examples, outputs):
        limit = -np.inf if self.threshold is None else self.threshold
        answers = self.best_answers(rows, examples, outputs)
        found = [(text, score, start) if score > limit else ("", score, None) for text, score, start in answers]
        return [{"prediction": text, "score": score, "start": start} for text, score, start in found]

    def best_answers(self, rows, examples, outputs) -> list[tuple[str, float, int]]:
        """The best span of each text; its score, S·T_i + E·T_j of all windows, less the lowest S·C + E·C, where C is
        [CLS] (Devlin et al. 2018, section 4.3); and its first character."""
        best = [(-np.inf, 0, 0)] * len(rows)
        null = [np.inf] * len(rows)
        for example, (start, end) in zip(examples, outputs, strict=True):
            row = example["row"]
            score, first, last = best_span(example, start, end, self.arguments.max_answer_length)
            # Of equal scores the earlier span, then the shorter one.
            best[row] = max(best[row], (score, -first, -last))
            null[row] = min(null[row], float(start[0] + end[0]))
        return [
            (row["context"][-first:-last], score - lowest, -first)
            for row, (score, first, last), lowest in zip(rows, best, null, strict=True)
        ]

    def metrics(self, rows, predictions):
        found = [row["prediction"] for row in predictions]
        values = Squad.of(found, texts_of(rows))
        return values | ({"null_threshold": self.threshold} if self.arguments.null_threshold == "best" else {})


def texts_of(rows: list[dict]) -> list[list[str]]:
    """The texts of the right answers of each row."""
    return [[text for text, _ in row["answers"]] for row in rows]


def answers_of(content: dict, context: str) -> list[tuple[str, int]]:
    """The answers and their first characters; none if the question has no answer.

    Raises:
        ValueError: they have another form, or one is not at its place in the text.
    """
    given: Any = value_of(content, "answers")
    if isinstance(given, dict):
        answers = list(zip(given.get("text") or [], given.get("answer_start") or [], strict=True))
    elif isinstance(given, list) and all(isinstance(each, dict) for each in given):
        answers = [(each.get("text"), each.get("answer_start")) for each in given]
    else:
        raise ValueError(f"'answers' is {given!r}; expected {{'text': [...], 'answer_start': [...]}}")
    if answers and content.get("is_impossible") is True:
        raise ValueError("'is_impossible' is true; expected no answers with it")
    for text, start in answers:
        if not isinstance(text, str) or not isinstance(start, int) or not text:
            raise ValueError(f"an answer is {text!r} at {start!r}; expected a text at an integer")
        if start < 0 or context[start : start + len(text)] != text:
            raise ValueError(f"the answer {text!r} is not at character {start} of the context")
    return answers


def window(encoding, row: dict, number: int) -> dict:
    """An example: a question with a window of its text. `labels` are the first and the last token of the first answer,
    or 0, [CLS], if the window lacks a part of it. `offsets` are the characters of each token of the text."""
    parts = encoding.sequence_ids  # 1 for the text
    if 1 not in parts:
        raise ValueError(f"{row['place']}: the context has no token in a window; expected a larger --max_length.")
    first = parts.index(1)
    count = parts.count(1)
    offsets = np.array(with_marks(encoding.offsets[first : first + count], row["context"]))
    example = example_of(encoding, number) | {"first": first, "offsets": offsets}
    if "answers" not in row:
        return example
    start, end = positions(offsets, row["answers"][0] if row["answers"] else None)
    return example | {"labels": [start and start + first - 1, end and end + first - 1]}


def with_marks(offsets: list[tuple[int, int]], context: str) -> list[tuple[int, int]]:
    """The offsets, extended by combining marks, which an uncased tokenizer drops, after a token."""
    extended = []
    for start, end in offsets:
        while end < len(context) and unicodedata.combining(context[end]):
            end += 1
        extended.append((start, end))
    return extended


def positions(offsets: np.ndarray, answer: tuple[str, int] | None) -> tuple[int, int]:
    """The first and the last token of an answer, counted from 1; 0 if it is not in the window as a whole."""
    if answer is None or not answer[0].strip():
        return 0, 0
    text, start = answer
    begin, stop = start + len(text) - len(text.lstrip()), start + len(text.rstrip())
    inside = np.flatnonzero((offsets[:, 0] < stop) & (offsets[:, 1] > begin))
    if not len(inside) or offsets[0, 0] > begin or offsets[-1, 1] < stop:
        return 0, 0
    return int(inside[0]) + 1, int(inside[-1]) + 1


def best_span(example: dict, start: np.ndarray, end: np.ndarray, max_answer_length: int) -> tuple[float, int, int]:
    """The best span of a window: its score, and its first and last character."""
    offsets = example["offsets"]
    text = slice(example["first"], example["first"] + len(offsets))
    width = min(max_answer_length, len(offsets))
    ends = np.pad(end[text], (0, width - 1), constant_values=-np.inf)
    scores = start[text, None] + np.lib.stride_tricks.sliding_window_view(ends, width)
    i, more = np.unravel_index(scores.argmax(), scores.shape)
    return float(scores[i, more]), int(offsets[i, 0]), int(offsets[i + more, 1])


def best_threshold(answers: list[tuple[str, float, int]], golds: list[list[str]]) -> float:
    """The threshold with the highest F1, as in SQuAD 2.0's evaluation script, but between two scores, so that rounding
    errors change no answer.

    Args:
        answers: the best span of each text, with its score and place.
        golds: the right answers.
    """
    # What the F1 gains if the span is the answer, instead of none.
    gains = np.array(
        [best_match(text, gold)[1] - best_match("", gold)[1] for (text, *_), gold in zip(answers, golds, strict=True)]
    )
    scores = np.array([score for _, score, _ in answers])
    levels = np.sort(scores)
    between = (levels[1:] + levels[:-1])[np.diff(levels) >= LEAST_DIFFERENCE] / 2
    thresholds = [levels[0] - 1, *between, levels[-1] + 1]
    return float(max(thresholds, key=lambda each: round(gains[scores > each].sum(), 6)))


def normalized(text: str) -> str:
    """The text in lower case, without punctuation, articles and extra white space."""
    text = "".join(character for character in text.lower() if character not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())


def best_match(answer: str, golds: list[str]) -> tuple[float, float]:
    """The exact match and the F1 of the shared tokens, the best of the gold answers, or of "" if there are none."""
    tokens = normalized(answer).split()
    right = [gold.split() for gold in map(normalized, golds) if gold] or [[]]
    shared = [(Counter(tokens) & Counter(gold)).total() for gold in right]
    scores = [
        2 * common / (len(tokens) + len(gold)) if tokens and gold else float(tokens == gold)
        for common, gold in zip(shared, right, strict=True)
    ]
    return float(tokens in right), max(scores)


class Squad(TextMetric):
    """exact_match, f1: the means in per cent, as in SQuAD's script. If some questions have an answer and others none,
    also has_answer_f1 and no_answer_f1. Rajpurkar et al. (2016), section 6.1, and (2018)."""

    def _compute(self, predictions, references):
        scores = 100 * np.array([best_match(*pair) for pair in zip(predictions, references, strict=True)])
        has_answer = np.array([bool(golds) for golds in references])
        exact_match, f1 = scores.mean(0)
        values = {"exact_match": exact_match, "f1": f1}
        if 0 < has_answer.sum() < len(has_answer):
            values["has_answer_f1"] = scores[has_answer, 1].mean()
            values["no_answer_f1"] = scores[~has_answer, 1].mean()
        return values
