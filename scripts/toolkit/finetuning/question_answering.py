"""Fine-tuning for question answering: the answer is a span of a text, or there is none."""

import json
from collections.abc import Sequence
from typing import ClassVar

import numpy as np
import torch
from datasets import Dataset
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from transformers import BertForQuestionAnswering

from modeling_scratchbert import ScratchBertForQuestionAnswering
from toolkit import spans
from toolkit.files import write_json
from toolkit.finetuning.batches import PadOrFlatten, unpadded
from toolkit.finetuning.checks import tokenizer_of
from toolkit.finetuning.rows import map_rows
from toolkit.finetuning.task import Evaluation, Task, without
from toolkit.finetuning.task_settings import QuestionAnsweringSettings
from toolkit.inputs import InputFile, Source
from toolkit.metrics import compute, load, mean_loss
from toolkit.row_files import Rows, find_column, open_text, read_json, text_of

CLASSES = {"scratchbert": ScratchBertForQuestionAnswering, "bert": BertForQuestionAnswering}
COLUMNS = ("question", "context", "answers")


def read_squad(file: InputFile) -> Rows:
    """The questions of a file in SQuAD's nested form; or the rows of another JSON file.

    Raises:
        ValueError: a part of the nested form is missing.
    """
    with open_text(file) as text:
        try:
            content = json.load(text)
        except (ValueError, RecursionError):  # JSON lines
            content = []
    if not isinstance(content, dict) or "question" in content:  # or a single line
        yield from read_json(file)
        return
    place = ""
    try:
        for i, article in enumerate(content["data"], 1):
            place = f", article {i}"
            for k, paragraph in enumerate(article["paragraphs"], 1):
                place = f", article {i}, paragraph {k}"
                for n, question in enumerate(paragraph["qas"], 1):
                    yield f"{place[2:]}, question {n}", {**question, "context": paragraph["context"]}
    except (KeyError, TypeError) as error:
        problem = f"{error} is missing" if isinstance(error, KeyError) else "a value is of another type"
        raise ValueError(f"{file}{place}: {problem}; expected SQuAD's nested form") from None


def answers_of(row: dict) -> list[tuple[str, int]]:
    """The gold answers and their first characters, checked against the context; none if there is no answer.

    Raises:
        ValueError: they are in another form, one is not at its position, or the question is impossible.
    """
    given = row.get("answers")
    if isinstance(given, list) and all(isinstance(each, dict) for each in given):
        texts, starts = ([each.get(name) for each in given] for name in ("text", "answer_start"))
    elif isinstance(given, dict):
        texts, starts = given.get("text"), given.get("answer_start")
    else:
        texts = starts = None
    if not (isinstance(texts, list) and isinstance(starts, list) and len(texts) == len(starts)):
        raise ValueError(
            f"'answers' is {given!r}; expected {{'text': […], 'answer_start': […]}}, two lists of one length"
        )
    for i, (text, start) in enumerate(zip(texts, starts, strict=True)):
        if not isinstance(text, str) or not isinstance(start, int):
            raise ValueError(f"answer {i} is {text!r} at {start!r}; expected a text at an integer")
        spans.span_of(i, row["context"], (text, start))
    if texts and row.get("is_impossible") is True:
        raise ValueError(f"'is_impossible' is True and 'answers' is {given!r}; expected no answers, or False")
    return list(zip(texts, starts, strict=True))


class QuestionAnswering(Task):
    """Questions, texts, and answers that are spans of the texts."""

    name = "question-answering"
    readers: ClassVar = {".json": read_squad}

    def __init__(self, settings: QuestionAnsweringSettings, accelerator):
        super().__init__(settings, accelerator)
        load("squad")  # raises before the training if a library is missing
        self.tokenizer = tokenizer_of(settings)
        self.metric, training_rows = settings.metric, self.encode_splits()
        if training_rows is not None:
            self.check_answers(training_rows, self.train_set)
            self.train_set = self.train_set.remove_columns(["first", "offsets", "row"])
        self.ids = {split: ids_of(rows) for split, rows in self.rows.items()}
        self.model = self.open_model(CLASSES[settings.implementation].from_pretrained, num_labels=2)
        self.set_threshold(self.make_threshold(training_rows))
        self.model.config.question_answering = {name: getattr(settings, name) for name in spans.LENGTHS}
        self.collate = PadOrFlatten(
            self.tokenizer, settings.padding_free_collation, per_sequence=["start_positions", "end_positions"]
        )

    def make_threshold(self, rows: Dataset | None) -> float | None:
        """The score that an answer must exceed; None: there always is an answer. For "best" it is 0 until the first
        evaluation.

        Args:
            rows: the training set; None: the default is that of the model.
        """
        given = self.settings.null_threshold
        if given == "best" and "validation" not in self.splits:
            raise ValueError(
                "--null_threshold is best and there is no validation set; expected one, on which it is chosen"
            )
        if given is None and rows is None:
            return spans.saved_threshold(self.model.config)
        if given is None:
            given = "never" if all(rows["answers"]) else "0"
        return None if given == "never" else 0.0 if given == "best" else float(given)

    def set_threshold(self, threshold: float | None) -> None:
        """Sets the threshold, with which the model is also saved; see `spans.saved_threshold`."""
        self.threshold = threshold
        self.model.config.null_threshold = "never" if threshold is None else threshold

    # -- data

    def read(self, source: Source):
        """The rows of a split: id, question, context, the answers, and where the first starts."""

        def check(row: dict) -> dict:
            question, context = text_of(row, "question"), text_of(row, "context")
            answers = answers_of(row)
            first = answers[0] if answers else None
            # Raises here, where the row can still be skipped. The windows are computed again in `encode`: to keep them
            # all as rows would take gigabytes.
            spans.positions(self.windows([question], [context]), [context], [first])
            found = {"id": "" if row.get("id") is None else str(row["id"]), "question": question, "context": context}
            return {**found, "answers": [text for text, _ in answers], "start": first[1] if first else -1}

        columns = source.columns()
        for name in COLUMNS:
            find_column(columns, None, [name], f"the {name}")
        return self.load(source, check)

    def windows(self, questions: list[str], contexts: list[str]) -> list[spans.Feature]:
        settings = self.settings
        return spans.context_windows(self.tokenizer, questions, contexts, settings.max_length, settings.stride)

    def encode(self, rows):
        """The windows of the rows as inputs of the model, each with the number of its row."""

        def encode(batch: dict, numbers: list[int]) -> dict:
            features = self.windows(batch["question"], batch["context"])
            answers = zip(batch["answers"], batch["start"], strict=True)
            firsts = [(texts[0], start) if texts else None for texts, start in answers]
            targets = spans.positions(features, batch["context"], firsts)
            names = ("input_ids", "token_type_ids", "first", "offsets")
            return {name: [getattr(feature, name) for feature in features] for name in names} | {
                "start_positions": [start for start, _ in targets],
                "end_positions": [end for _, end in targets],
                "row": [numbers[feature.example] for feature in features],
                "place": [batch["place"][feature.example] for feature in features],
                "length": [len(feature.input_ids) for feature in features],
            }

        return map_rows(rows, encode, batched=True, with_indices=True, remove_columns=rows.column_names)

    def check_answers(self, rows, windows) -> None:
        """Prints how many answers are in no window as a whole, so that "no answer" is the target of their questions.

        Raises:
            ValueError: all are.
        """
        answers = sum(map(bool, rows["answers"]))
        in_window = {row for row, start in zip(windows["row"], windows["start_positions"], strict=True) if start}
        if not (lost := answers - len(in_window)):
            return
        lengths = f"--max_length {self.settings.max_length} and --stride {self.settings.stride}"
        if lost == answers:
            raise ValueError(f"no answer fits in a window of {lengths}; expected larger values, in which answers fit")
        self.accelerator.print(
            f"{lost} of {answers} answers fit in no window of {lengths}; their questions are trained as without answer"
        )

    def shown(self, example):
        answer = super().shown(example).split(" ")[example["start_positions"] : example["end_positions"] + 1]
        return f"{super().shown(example)} → {' '.join(answer)}"

    # -- loss and metrics

    def counts(self, batch):
        return torch.tensor([len(batch["start_positions"])], device=batch["start_positions"].device)

    def losses_of(self, rows, batch):
        """The mean of the cross-entropies of start and end over the window's tokens. `BertForQuestionAnswering`
        includes padding, so that its loss depends on the other rows of the batch."""
        targets = batch["start_positions"], batch["end_positions"]
        logits = (pad_sequence(each, batch_first=True, padding_value=float("-inf")) for each in zip(*rows, strict=True))
        both = (nn.functional.cross_entropy(*each, reduction="sum") for each in zip(logits, targets, strict=True))
        return (sum(both) / 2)[None]

    def logits(self, model, batch) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """The start and the end logits, `(T,)` each, of each window."""
        outputs = model(**without(batch, "start_positions", "end_positions"))
        both = (unpadded(batch, logits.float()) for logits in (outputs.start_logits, outputs.end_logits))
        return list(zip(*both, strict=True))

    def evaluate(self, model, split):
        def forward(model, batch):
            logits = self.logits(model, batch)
            sums = [self.losses_of(logits, batch).item(), self.counts(batch).item()]
            return [torch.stack(pair).cpu() for pair in logits], sums

        logits, sums = self.predict(model, split, forward)
        starts, ends = zip(*logits, strict=True)
        fields = ("row", "input_ids", "token_type_ids", "first", "offsets")
        features = [spans.Feature(*(window[name] for name in fields)) for window in self.splits[split]]
        contexts, golds = self.rows[split]["context"], list(self.rows[split]["answers"])
        best = spans.best_spans(starts, ends, features, contexts, max_answer_length=self.settings.max_answer_length)
        answers = [spans_of_row[0] for spans_of_row in best]  # whatever their scores
        is_chosen = self.settings.null_threshold == "best"
        if is_chosen and split == "validation":
            self.set_threshold(best_threshold(answers, golds))
        texts = [spans.with_no_answer([span], self.threshold)[0].text for span in answers]
        threshold = {"null_threshold": self.threshold} if is_chosen else {}
        found = [
            {"id": each, "prediction": text, "score": span.score}
            for each, text, span in zip(self.ids[split], texts, answers, strict=True)
        ]
        predictions = self.joined(self.rows[split].remove_columns("start"), found)
        return Evaluation({"loss": mean_loss(*sums)} | compute("squad", texts, golds) | threshold, predictions)

    def write_predictions(self, folder, predictions):
        """Also writes the answers in the form that SQuAD's evaluation script reads."""
        super().write_predictions(folder, predictions)
        for split, rows in predictions.items():
            write_json(folder / f"predictions_{split}.json", {row["id"]: row["prediction"] for row in rows}, indent=1)


def ids_of(rows: Dataset) -> list[str]:
    """The rows' ids, or their places if they have none.

    Raises:
        ValueError: two have the same one.
    """
    ids, seen = [given or place for given, place in zip(rows["id"], rows["place"], strict=True)], {}
    for each, place in zip(ids, rows["place"], strict=True):
        if each in seen:
            raise ValueError(
                f"{place}: its id is {each!r}, like that of {seen[each]}; expected an id for each question"
            )
        seen[each] = place
    return ids


# Scores that differ by less are one level: other batches or another device can change their order.
# Much larger, it would join the scores of a large validation set to one level.
LEAST_DIFFERENCE = 1e-4


def best_threshold(answers: Sequence[spans.Answer], golds: Sequence[list[str]]) -> float:
    """The threshold with the highest F1 (the lowest of several), as in SQuAD 2.0's evaluation script; but between two
    scores, so that rounding errors change no answer."""
    squad = load("squad")
    gains = [
        squad._compute([answer.text], [gold])["f1"] - squad._compute([""], [gold])["f1"]
        for answer, gold in zip(answers, golds, strict=True)
    ]
    scores = np.sort([answer.score for answer in answers])
    starts = np.diff(scores, prepend=-np.inf) >= LEAST_DIFFERENCE  # where a level begins
    between = (scores[1:] + scores[:-1])[starts[1:]] / 2
    thresholds = [scores[0] - 1, *between, scores[-1] + 1]
    # The F1 gained by answering above a threshold: below the first level, below the second, …, above the last.
    level_of = np.searchsorted(between, [answer.score for answer in answers])
    gained = [*np.bincount(level_of, gains)[::-1].cumsum()[::-1], 0.0]
    return float(thresholds[int(np.argmax(gained))])
