"""Extractive question answering over texts of any length: overlapping windows, the positions to train on, and the best
spans of all windows."""

import math
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch.nn.functional import pad

from modeling_scratchbert import ScratchBertForQuestionAnswering
from toolkit.hub import check_source, open_model, open_tokenizer, to_device
from toolkit.windows import split_into_windows


@dataclass
class Feature:
    """One window of a context, after its question: `[CLS] question [SEP] part of the context [SEP]`."""

    example: int  # the index of the question and its context
    input_ids: list[int]
    token_type_ids: list[int]  # 0 for the question, 1 for the context
    first: int  # the position of the context's first token
    offsets: list[tuple[int, int]]  # of the context's tokens: the first character, and the one after the last


@dataclass(frozen=True)
class Answer:
    """A span of a context, `context[start:end] == text`; or no answer, without text and position."""

    text: str
    start: int | None
    end: int | None
    score: float  # S·T_i + E·T_j - s_null, in logits; 0 for no answer


NO_ANSWER = Answer("", None, None, 0.0)

# The lengths of `answer`, which training saves in the field `question_answering` of config.json, and their values for
# models without this field.
LENGTHS = {"max_length": 384, "stride": 128, "max_answer_length": 30}


# ------------------------------------------------------------------------------------------------ texts to windows


def context_windows(
    tokenizer, questions: Sequence[str], contexts: Sequence[str], max_length: int = 384, stride: int = 128
) -> list[Feature]:
    """Each question with all of its context, in overlapping windows.

    Args:
        tokenizer: a fast BERT tokenizer; slow ones do not return offsets.
        max_length: of a window in tokens, including the question and the special tokens.
        stride: context tokens that a window shares with the one before it.

    Returns:
        The windows, not padded, in the order of the examples.

    Raises:
        ValueError: the tokenizer is slow, the numbers of questions and contexts differ, one of them is empty, or a
            question leaves no more than `stride` tokens of a window to its context.
    """
    check_texts(tokenizer, questions, contexts)
    features = []
    encodings = tokenizer(list(questions), list(contexts), verbose=False).encodings if questions else []
    for i, (encoding, context) in enumerate(zip(encodings, contexts, strict=True)):
        parts = encoding.sequence_ids  # 0 for the question, 1 for the context, None for special tokens
        if 0 not in parts:
            raise ValueError(f"question {i} is empty")
        if 1 not in parts:
            raise ValueError(f"context {i} has no tokens: {context!r}")
        text = range(parts.index(1), len(parts) - parts[::-1].index(1))
        offsets = with_marks(encoding.offsets[text.start : text.stop], context)
        try:
            found = split_into_windows(encoding, text, max_length, stride)
        except ValueError as error:
            raise ValueError(f"question {i}: {error}") from error
        features += [
            Feature(i, one.input_ids, one.token_type_ids, one.first, offsets[one.tokens.start : one.tokens.stop])
            for one in found
        ]
    return features


def check_texts(tokenizer, questions: Sequence[str], contexts: Sequence[str]) -> None:
    if not tokenizer.is_fast:
        raise ValueError(
            f"{type(tokenizer).__name__} is a slow tokenizer; expected a fast one, with a tokenizer.json, "
            "which returns offsets"
        )
    for name, texts in (("questions", questions), ("contexts", contexts)):
        if isinstance(texts, str):
            raise ValueError(f"{name} is a string, {texts[:40]!r}; expected a list of strings")
    if len(questions) != len(contexts):
        raise ValueError(f"there are {len(questions)} questions and {len(contexts)} contexts; expected as many")
    for i, context in enumerate(contexts):
        if not context.strip():
            raise ValueError(f"context {i} is empty")


def with_marks(offsets: list[tuple[int, int]], context: str) -> list[tuple[int, int]]:
    """The offsets, extended by combining marks, which an uncased tokenizer drops, after a token."""
    starts = [start for start, _ in offsets[1:]] + [len(context)]
    extended = []
    for (start, end), limit in zip(offsets, starts, strict=True):
        while end < limit and unicodedata.category(context[end]).startswith("M"):
            end += 1
        extended.append((start, end))
    return extended


def positions(
    features: Sequence[Feature], contexts: Sequence[str], answers: Sequence[tuple[str, int] | None]
) -> list[tuple[int, int]]:
    """The first and last token of the answer in each window, to train on.

    Args:
        answers: for each context the answer's text and first character; None: no answer.

    Returns:
        For each window two positions in `input_ids`; (0, 0), which is [CLS], if it lacks part of the answer. A token
        that an answer starts or ends inside belongs to the answer.

    Raises:
        ValueError: the numbers of answers and contexts differ, or an answer is empty or not at its position.
    """
    if len(answers) != len(contexts):
        raise ValueError(f"there are {len(answers)} answers and {len(contexts)} contexts; expected as many")
    spans = [span_of(i, context, answer) for i, (context, answer) in enumerate(zip(contexts, answers, strict=True))]
    # Spaces at an answer's ends may belong to no token, so the answer's extent is that of its tokens in all windows.
    needed = {}
    for feature in features:
        inside = overlapping(feature, spans[feature.example])
        if inside:
            start, end = feature.offsets[inside[0]][0], feature.offsets[inside[-1]][1]
            known = needed.get(feature.example, (start, end))
            needed[feature.example] = min(start, known[0]), max(end, known[1])
    if lost := set(needed) ^ {feature.example for feature in features if spans[feature.example]}:
        i = min(lost)
        raise ValueError(f"answer {i}, {answers[i][0]!r}, has no token in any window")
    return [position_in(feature, spans[feature.example], needed.get(feature.example)) for feature in features]


def span_of(i: int, context: str, answer: tuple[str, int] | None) -> tuple[int, int] | None:
    """The characters of a gold answer.

    Raises:
        ValueError: it is empty, or not at its position in the context.
    """
    if answer is None:
        return None
    text, start = answer
    if not text:
        raise ValueError(f"answer {i} is empty; expected a text, or None for no answer")
    there = context[start : start + len(text)] if start >= 0 else ""
    if there != text:
        raise ValueError(f"answer {i} is {text!r} at character {start} of its context; found {there!r} there")
    return start, start + len(text)


def overlapping(feature: Feature, span: tuple[int, int] | None) -> list[int]:
    """The indices of the window's context tokens that overlap with the span."""
    if span is None:
        return []
    return [k for k, (start, end) in enumerate(feature.offsets) if start < span[1] and end > span[0]]


def position_in(feature: Feature, span: tuple[int, int] | None, needed: tuple[int, int] | None) -> tuple[int, int]:
    inside = overlapping(feature, span)
    if not inside or (feature.offsets[inside[0]][0], feature.offsets[inside[-1]][1]) != needed:
        return 0, 0
    return feature.first + inside[0], feature.first + inside[-1]


# ------------------------------------------------------------------------------------------------ logits to answers


def best_spans(
    start_logits,
    end_logits,
    features: Sequence[Feature],
    contexts: Sequence[str],
    *,
    max_answer_length: int = 30,
    n_best: int = 1,
) -> list[list[Answer]]:
    """The spans with the highest S·T_i + E·T_j, j >= i, over all windows (Devlin et al. 2018, section 4.2).

    The score is that sum minus s_null = S·C + E·C, where C is [CLS] (section 4.3). The lowest s_null of all windows
    counts, as in BERT's own run_squad.py: a window without the answer correctly predicts that there is none.

    Args:
        start_logits, end_logits: a row for each window, `(F, T)` or a list of rows, at least as long as the window.
            Logits at padding are ignored.
        max_answer_length: in tokens.
        n_best: spans for each context, or fewer if there are not as many. A span in two windows counts once, with its
            better score.

    Returns:
        For each context its spans, the best first, without "no answer"; see `with_no_answer`. Among equal scores the
        earlier span comes first, then the shorter one.

    Raises:
        ValueError: the numbers of rows and windows differ, a row is too short, a logit is not finite, or
            `max_answer_length` or `n_best` is below 1.
    """
    check_least(max_answer_length=max_answer_length, n_best=n_best)
    if not len(start_logits) == len(end_logits) == len(features):
        raise ValueError(
            f"there are {len(start_logits)} rows of start_logits, {len(end_logits)} of end_logits, and "
            f"{len(features)} windows; expected as many"
        )
    found = [{} for _ in contexts]  # for each context: (start, end) → S·T_i + E·T_j
    null = [float("inf")] * len(contexts)
    for i, feature in enumerate(features):
        start = check_row("start_logits", start_logits[i], i, feature)
        end = check_row("end_logits", end_logits[i], i, feature)
        spans = found[feature.example]
        for span, score in spans_in(feature, start, end, max_answer_length, n_best).items():
            spans[span] = max(score, spans.get(span, score))
        null[feature.example] = min(null[feature.example], float(start[0] + end[0]))
    answers = []
    for context, spans, s_null in zip(contexts, found, null, strict=True):
        best = sorted(spans, key=lambda span, spans=spans: (-spans[span], span))[:n_best]
        answers.append([Answer(context[a:b], a, b, spans[a, b] - s_null) for a, b in best])
    return answers


def check_least(**numbers: int) -> None:
    for name, number in numbers.items():
        if number < 1:
            raise ValueError(f"{name} is {number}; expected 1 or more")


def check_row(name: str, row, i: int, feature: Feature) -> torch.Tensor:
    """The logits of a window's tokens in float64, so that their sums compare exactly."""
    length = len(feature.input_ids)
    if len(row) < length:
        raise ValueError(f"row {i} of {name} has {len(row)} numbers; expected at least {length}, one for each token")
    logits = torch.as_tensor(row, dtype=torch.float64, device="cpu")[:length]
    if not logits.isfinite().all():
        raise ValueError(f"row {i} of {name} has {logits[~logits.isfinite()][0].item()}; expected finite numbers")
    return logits


def spans_in(feature: Feature, start: torch.Tensor, end: torch.Tensor, max_answer_length: int, n_best: int) -> dict:
    """The best spans of one window, in characters, with their S·T_i + E·T_j."""
    context = slice(feature.first, feature.first + len(feature.offsets))
    width = min(max_answer_length, len(feature.offsets))
    ends = pad(end[context], (0, width - 1), value=float("-inf")).unfold(0, width, 1)
    scores = (start[context, None] + ends).flatten()  # at i * width + (j - i)
    spans = {}
    for index in scores.argsort(descending=True, stable=True).tolist():
        score, (i, more) = float(scores[index]), divmod(index, width)
        if score == float("-inf") or len(spans) == n_best:
            break
        # Several spans of tokens can be the same characters, if a character has several tokens.
        spans.setdefault((feature.offsets[i][0], feature.offsets[i + more][1]), score)
    return spans


def with_no_answer(spans: Sequence[Answer], threshold: float | None) -> list[Answer]:
    """The spans with `NO_ANSWER` inserted before those whose score is not above `threshold` (τ in Devlin et al. 2018,
    section 4.3). None: there always is an answer, and the spans are returned as they are."""
    if threshold is None:
        return list(spans)
    above = sum(span.score > threshold for span in spans)
    return [*spans[:above], NO_ANSWER, *spans[above:]]


# ------------------------------------------------------------------------------------------------ questions to answers


def answer(
    model,
    tokenizer,
    questions: Sequence[str],
    contexts: Sequence[str],
    *,
    max_length: int | Literal["saved"] = "saved",
    stride: int | Literal["saved"] = "saved",
    max_answer_length: int | Literal["saved"] = "saved",
    n_best: int = 1,
    batch_size: int = 8,
    threshold: float | Literal["saved"] | None = "saved",
) -> list[list[Answer]]:
    """The answers of a model to each question, in the context with the same index.

    Args:
        model: a ScratchBertForQuestionAnswering or BertForQuestionAnswering; its training mode is not changed.
        tokenizer: the model's, a fast one.
        max_length, stride: see `context_windows`.
        max_answer_length: in tokens. "saved", for these three: those of `saved_lengths`.
        threshold: an answer whose score is not above it comes after "no answer". None: there always is an answer, for
            models that were not trained on questions without one. "saved": that of `saved_threshold`.
        batch_size: windows per call of the model, windows of similar length together.

    Returns:
        For each question up to `n_best` answers, the best first. "No answer" may be one of them: `NO_ANSWER`.

    Raises:
        ValueError: as `context_windows`, `best_spans`, `saved_lengths` and `saved_threshold`; `max_length` is more
            than the model has positions; or `threshold` is NaN.
    """
    check_least(batch_size=batch_size)
    threshold = saved_threshold(model.config) if threshold == "saved" else threshold
    if threshold is not None and math.isnan(threshold):
        raise ValueError("threshold is nan; expected a number, or None")
    given = {"max_length": max_length, "stride": stride, "max_answer_length": max_answer_length}
    if "saved" in given.values():
        saved = saved_lengths(model.config)
        given = {name: saved[name] if value == "saved" else value for name, value in given.items()}
    max_length, stride, max_answer_length = given.values()
    limit = model.config.max_position_embeddings
    if max_length > limit:
        raise ValueError(f"max_length is {max_length}; expected at most {limit}, the positions of the model")
    features = context_windows(tokenizer, questions, contexts, max_length, stride)
    start_logits, end_logits = logits_of(model, tokenizer, features, batch_size)
    spans = best_spans(start_logits, end_logits, features, contexts, max_answer_length=max_answer_length, n_best=n_best)
    return [with_no_answer(one, threshold)[:n_best] for one in spans]


def saved_lengths(config) -> dict[str, int]:
    """The `LENGTHS` that training saved in the model's configuration; their defaults if it did not save them, or less
    for a model with fewer positions.

    Raises:
        ValueError: they are not three integers.
    """
    saved = getattr(config, "question_answering", None)
    if saved is None:
        limit = config.max_position_embeddings
        limits = {"max_length": limit, "stride": limit // 3}  # the share of the defaults
        return {name: min(default, limits.get(name, default)) for name, default in LENGTHS.items()}
    if not isinstance(saved, dict) or not all(type(saved.get(name)) is int for name in LENGTHS):
        raise ValueError(
            f"question_answering in config.json is {saved!r}; expected integers for {', '.join(LENGTHS)}. "
            "The flags of these names, all three, replace it"
        )
    return saved


def saved_threshold(config) -> float | None:
    """The threshold of `answer` that training saved in the model's configuration; 0 if it did not save one.

    Raises:
        ValueError: it is neither a number nor "never".
    """
    saved = getattr(config, "null_threshold", None)
    if saved is None or saved == "never":
        return None if saved == "never" else 0.0
    if not isinstance(saved, int | float) or not math.isfinite(saved):
        raise ValueError(
            f"null_threshold in config.json is {saved!r}; expected a number or 'never'. --threshold X or "
            "--always_answer replaces it"
        )
    return float(saved)


@torch.inference_mode()
def logits_of(model, tokenizer, features: Sequence[Feature], batch_size: int) -> tuple[list, list]:
    """The start and the end logits of each window, padding included."""
    starts, ends = [None] * len(features), [None] * len(features)
    longest_first = sorted(range(len(features)), key=lambda i: -len(features[i].input_ids))
    was_training = model.training
    model.eval()
    try:
        for k in range(0, len(features), batch_size):
            chosen = longest_first[k : k + batch_size]
            batch = {name: [getattr(features[i], name) for i in chosen] for name in ("input_ids", "token_type_ids")}
            # On the right whatever the tokenizer's side is, because positions count from the beginning.
            inputs = tokenizer.pad(batch, padding_side="right", return_attention_mask=True, return_tensors="pt")
            outputs = model(**inputs.to(model.device))
            rows = (outputs.start_logits.cpu(), outputs.end_logits.cpu())
            for i, start, end in zip(chosen, *rows, strict=True):
                starts[i], ends[i] = start, end
    finally:
        model.train(was_training)
    return starts, ends


def open_reader(source: str, device: str | None):
    """The tokenizer and the model, on `device` or else on the accelerator if there is one.

    Raises:
        OSError: there is no such checkpoint, a file of it cannot be read, or it has no tokenizer.
        ValueError: it is no BERT, lacks weights, or there is no such device.
    """
    check_source(source)
    advice = "Train it to answer questions first."
    model = open_model(ScratchBertForQuestionAnswering, source, advice=advice, padding_free=True)
    return open_tokenizer(source), to_device(model, device)
