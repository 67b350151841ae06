#!/usr/bin/env python
"""Answers questions from a text: finds the part of it that answers each, or says that none does.

    question_answering.py my-reader --question "Who founded the town?" --context-file town.txt
    question_answering.py my-reader --question "When?" --question "By whom?" --context "It was built in 1843." --json
    cat town.txt | question_answering.py my-reader --question "How many people live there?" --context-file -

MODEL is a trained ScratchBertForQuestionAnswering or BertForQuestionAnswering, a folder or a hub id, with its
tokenizer. The text may be of any length: the model reads it in windows that overlap. There is a line for each question,
in their order, and an empty one where the text has no answer (with --n-best N: up to N lines each, the best first);
--json prints an object for each instead, with the answers' places in characters and their scores.

An answer's score is how far its start and end logits, summed, are above those of "no answer", the [CLS] token. It is
given if the score is above --threshold (Devlin et al. 2018, section 4.3).

In Python, `answer` of this file does the same. `windows`, `positions` and `best_spans` are its parts, for training and
evaluation.

Exit code: 0 all questions answered; 2 bad usage, or a file or checkpoint that cannot be read; 130 interrupted; 141 the
reader of the output has gone.
"""

import argparse
import dataclasses
import io
import json
import logging
import sys
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoTokenizer

from modeling_scratchbert import ScratchBertForQuestionAnswering

from generate import Parser, UsageError, about, one_line, whole_number
from sources import check_source, has_tokenizer

PROG = "question_answering.py"


@dataclass
class Feature:
    """One window of a context, after its question: `[CLS] question [SEP] part of the context [SEP]`."""

    example: int  # which question and context
    input_ids: list[int]
    token_type_ids: list[int]  # 0 for the question, 1 for the context
    first: int  # where the context's tokens begin
    offsets: list[tuple[int, int]]  # of the context's tokens alone: first character, and the one after the last


@dataclass(frozen=True)
class Answer:
    """A part of a context, `context[start:end] == text`; or that there is none, without text and place."""

    text: str
    start: int | None
    end: int | None
    score: float  # S·T_i + E·T_j - s_null, a difference of logits; 0 for no answer


NO_ANSWER = Answer("", None, None, 0.0)


# ------------------------------------------------------------------------------------------------ texts to windows


def windows(
    tokenizer, questions: Sequence[str], contexts: Sequence[str], max_length: int = 384, stride: int = 128
) -> list[Feature]:
    """Each question with every part of its context, in windows that overlap.

    Args:
        tokenizer: a fast one of BERT's kind; only those know which characters a token comes from.
        max_length: of a window, in tokens, with the question and the special ones.
        stride: how many tokens of the context a window has in common with the one before it.

    Returns:
        Features of one to `max_length` tokens, not padded; those of an example stand together, examples in order.

    Raises:
        ValueError: the tokenizer is slow, there are not as many contexts as questions, one of them is empty, or a
            question leaves no more than `stride` tokens of a window to its context.
    """
    check_texts(questions, contexts)
    check_room(tokenizer, questions, max_length, stride)
    if not questions:
        return []
    encoded = tokenizer(
        list(questions), list(contexts), truncation="only_second", max_length=max_length, stride=stride,
        return_overflowing_tokens=True, return_offsets_mapping=True, return_token_type_ids=True, padding=False,
    )  # fmt: skip
    features = []
    for i, example in enumerate(encoded["overflow_to_sample_mapping"]):
        of_context = [k for k, part in enumerate(encoded.sequence_ids(i)) if part == 1]
        if not of_context:
            raise ValueError(f"context {example} has no tokens: {contexts[example]!r}")
        first, end = of_context[0], of_context[-1] + 1
        offsets = with_marks(encoded["offset_mapping"][i][first:end], contexts[example])
        features.append(Feature(example, encoded["input_ids"][i], encoded["token_type_ids"][i], first, offsets))
    return features


def check_texts(questions: Sequence[str], contexts: Sequence[str]) -> None:
    for name, texts in (("questions", questions), ("contexts", contexts)):
        if isinstance(texts, str):
            raise ValueError(f"{name} is a string, {texts[:40]!r}: give a list of strings")
    if len(questions) != len(contexts):
        raise ValueError(f"there are {len(questions)} questions and {len(contexts)} contexts: give one for each")
    for i, context in enumerate(contexts):
        if not context.strip():
            raise ValueError(f"context {i} is empty")


def check_room(tokenizer, questions: Sequence[str], max_length: int, stride: int) -> None:
    """Raises ValueError unless every question leaves room for a context. The library would panic instead."""
    if not tokenizer.is_fast:
        raise ValueError(
            f"{type(tokenizer).__name__} is a slow tokenizer, which does not know the characters of its tokens: "
            "a fast one is needed, with a tokenizer.json"
        )
    if stride < 0:
        raise ValueError(f"stride is {stride}: it must be 0 or more")
    encoded = tokenizer(list(questions), add_special_tokens=False, verbose=False)["input_ids"] if questions else []
    special = tokenizer.num_special_tokens_to_add(pair=True)
    for i, ids in enumerate(encoded):
        if not ids:
            raise ValueError(f"question {i} is empty")
        room = max_length - special - len(ids)
        if room <= stride:
            raise ValueError(
                f"question {i} has {len(ids)} tokens, which leaves {max(room, 0)} of max_length={max_length} to the "
                f"context: there must be more than stride={stride}"
            )


def with_marks(offsets: list[tuple[int, int]], context: str) -> list[tuple[int, int]]:
    """Tokens with the accents behind them: an uncased tokenizer drops combining marks, also at the end of a word."""
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
    """What to train on: the first and last token of the answer in each window.

    Args:
        answers: for each context the answer's text and its first character; None where there is no answer.

    Returns:
        For each feature two positions in `input_ids`; (0, 0), that is [CLS], if it does not have the whole answer.
        Where an answer starts or ends within a token, that token is taken.

    Raises:
        ValueError: there are not as many answers as contexts, an answer is empty, or does not stand where it should.
    """
    if len(answers) != len(contexts):
        raise ValueError(f"there are {len(answers)} answers and {len(contexts)} contexts: give one, or None, for each")
    spans = [span_of(i, context, answer) for i, (context, answer) in enumerate(zip(contexts, answers, strict=True))]
    # Space and other characters at an answer's ends may belong to no token, so that whether a window has it all can
    # only be told from the tokens that it has in all windows.
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
    """The characters of a gold answer."""
    if answer is None:
        return None
    text, start = answer
    if not text:
        raise ValueError(f"answer {i} is empty: give None where there is no answer")
    there = context[start : start + len(text)] if start >= 0 else ""
    if there != text:
        raise ValueError(
            f"answer {i}, {text!r}, does not stand at character {start} of its context; there is {there!r}"
        )
    return start, start + len(text)


def overlapping(feature: Feature, span: tuple[int, int] | None) -> list[int]:
    """Which of a window's context tokens have characters of the span."""
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
    start_logits, end_logits, features: Sequence[Feature], contexts: Sequence[str], *,
    max_answer_length: int = 30, n_best: int = 1,
) -> list[list[Answer]]:  # fmt: skip
    """The spans with the highest S·T_i + E·T_j, j >= i, over all windows (Devlin et al. 2018, section 4.2).

    The score is that sum less s_null = S·C + E·C, C being [CLS] (section 4.3). Of several windows the lowest s_null
    counts, as in BERT's own run_squad.py: a window without the answer is right to say that there is none.

    Args:
        start_logits, end_logits: for each feature a row of at least as many numbers as it has tokens, `(F, T)` or a
            list of rows. What follows, of padding, is not looked at.
        max_answer_length: in tokens.
        n_best: so many spans for each context, or all where there are fewer. What two windows have in common counts
            once, with the better of its scores.

    Returns:
        For each context its spans, the best first, without "no answer": see `with_no_answer`. Of equal ones the
        earlier comes first, then the shorter.

    Raises:
        ValueError: there are not as many rows as features, one is too short, has infinite numbers or NaN where the
            tokens are, or a number is below 1.
    """
    check_least(max_answer_length=max_answer_length, n_best=n_best)
    if not len(start_logits) == len(end_logits) == len(features):
        raise ValueError(
            f"there are {len(start_logits)} rows of start_logits, {len(end_logits)} of end_logits and {len(features)} "
            "features: give a row for each"
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
            raise ValueError(f"{name} is {number}: it must be 1 or more")


def check_row(name: str, row, i: int, feature: Feature) -> torch.Tensor:
    """The logits of a feature's tokens in float64, so that sums of them are exact enough to be compared."""
    length = len(feature.input_ids)
    if len(row) < length:
        raise ValueError(f"row {i} of {name} has {len(row)} numbers, and its feature {length} tokens")
    logits = torch.as_tensor(row, dtype=torch.float64, device="cpu")[:length]
    if not logits.isfinite().all():
        raise ValueError(f"row {i} of {name} is not finite: {logits[~logits.isfinite()][0].item()}")
    return logits


def spans_in(feature: Feature, start: torch.Tensor, end: torch.Tensor, max_answer_length: int, n_best: int) -> dict:
    """The best spans of one window in characters, each with its S·T_i + E·T_j."""
    context = slice(feature.first, feature.first + len(feature.offsets))
    width = min(max_answer_length, len(feature.offsets))
    ends = pad(end[context], (0, width - 1), value=float("-inf")).unfold(0, width, 1)
    scores = (start[context, None] + ends).flatten()  # at i * width + (j - i)
    spans = {}
    for index in scores.argsort(descending=True, stable=True).tolist():
        score, (i, more) = float(scores[index]), divmod(index, width)
        if score == float("-inf") or len(spans) == n_best:
            break
        # Two spans of tokens can be one of characters, where a character gives several tokens.
        spans.setdefault((feature.offsets[i][0], feature.offsets[i + more][1]), score)
    return spans


def with_no_answer(spans: Sequence[Answer], threshold: float | None) -> list[Answer]:
    """`NO_ANSWER` put before the spans whose score is not above `threshold` (τ in Devlin et al. 2018, section 4.3), and
    behind the others. With None, there always is an answer: the spans as they are."""
    if threshold is None:
        return list(spans)
    above = sum(span.score > threshold for span in spans)
    return [*spans[:above], NO_ANSWER, *spans[above:]]


# ------------------------------------------------------------------------------------------------ questions to answers


def answer(
    model, tokenizer, questions: Sequence[str], contexts: Sequence[str], *, max_length: int = 384, stride: int = 128,
    max_answer_length: int = 30, n_best: int = 1, threshold: float | None = 0.0, batch_size: int = 8,
) -> list[list[Answer]]:  # fmt: skip
    """The answers that a model finds to each question in the context of the same number.

    Args:
        model: a ScratchBertForQuestionAnswering or BertForQuestionAnswering; left in the mode it is in.
        tokenizer: the model's, a fast one.
        max_length, stride: see `windows`.
        max_answer_length: in tokens.
        threshold: an answer must have a score above it, or it comes after "no answer". None: there always is one,
            which is right for a model that has never been trained on questions without.
        batch_size: how many windows the model has before it at once, those of like length together.

    Returns:
        For each question up to `n_best` answers, the best first. "No answer" may be one of them: `NO_ANSWER`.

    Raises:
        ValueError: as `windows` and `best_spans`; or `max_length` is more than the model has positions.
    """
    check_least(batch_size=batch_size)
    limit = model.config.max_position_embeddings
    if max_length > limit:
        raise ValueError(f"max_length is {max_length}, and the model has {limit} positions")
    features = windows(tokenizer, questions, contexts, max_length, stride)
    start_logits, end_logits = logits_of(model, features, tokenizer.pad_token_id, batch_size)
    spans = best_spans(start_logits, end_logits, features, contexts, max_answer_length=max_answer_length, n_best=n_best)
    return [with_no_answer(one, threshold)[:n_best] for one in spans]


@torch.inference_mode()
def logits_of(model, features: Sequence[Feature], pad_token_id: int, batch_size: int) -> tuple[list, list]:
    """A row of start logits and one of end logits for each feature, padding included."""
    starts, ends = [None] * len(features), [None] * len(features)
    longest_first = sorted(range(len(features)), key=lambda i: -len(features[i].input_ids))
    was_training = model.training
    model.eval()
    try:
        for k in range(0, len(features), batch_size):
            chosen = longest_first[k : k + batch_size]
            outputs = model(**as_batch([features[i] for i in chosen], pad_token_id, model.device))
            rows = (outputs.start_logits.cpu(), outputs.end_logits.cpu())
            for i, start, end in zip(chosen, *rows, strict=True):
                starts[i], ends[i] = start, end
    finally:
        model.train(was_training)
    return starts, ends


def as_batch(features: Sequence[Feature], pad_token_id: int, device) -> dict[str, torch.Tensor]:
    """Padded on the right, whatever the tokenizer's side is: positions count from the beginning. Each is `(B, T)`."""

    def padded(rows, value):
        tensors = [torch.tensor(row, device=device) for row in rows]
        return pad_sequence(tensors, batch_first=True, padding_value=value)

    return {
        "input_ids": padded([feature.input_ids for feature in features], pad_token_id),
        "token_type_ids": padded([feature.token_type_ids for feature in features], 0),
        "attention_mask": padded([[1] * len(feature.input_ids) for feature in features], 0),
    }


# ------------------------------------------------------------------------------------------------ the command line


def open_reader(source: str, device: str | None):
    """The tokenizer and the model, without `device` on the accelerator if there is one.

    Raises:
        OSError: there is no such checkpoint, a file of it cannot be read, or it has no tokenizer.
        ValueError: it is no BERT, lacks weights, or there is no such device.
    """
    check_source(source)
    model, info = ScratchBertForQuestionAnswering.from_pretrained(source, output_loading_info=True)
    if missing := sorted(info["missing_keys"]):
        raise ValueError(
            f"it lacks weights that answer questions: {len(missing)}, such as {missing[0]}. Train it for that first"
        )
    if not has_tokenizer(source):
        raise OSError("it has no tokenizer, neither tokenizer.json nor vocab.txt: save the model's beside it")
    if device is None:
        device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else "cpu"
    try:
        return AutoTokenizer.from_pretrained(source), model.to(device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"--device {device}: {error}") from error


def make_parser() -> argparse.ArgumentParser:
    parser = Parser(prog=PROG, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", metavar="MODEL", help="a checkpoint with a tokenizer: a folder or a hub id")
    parser.add_argument("--question", action="append", required=True, metavar="TEXT", help="may be given several times")
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--context", metavar="TEXT", help="the text to look in")
    where.add_argument("--context-file", metavar="FILE", help="a UTF-8 file that has it, - for standard input")
    parser.add_argument("--json", action="store_true", help="print an object a line: question, and answers with text, "
                        "start, end (characters of the context) and score")  # fmt: skip
    parser.add_argument("--n-best", type=whole_number(1), default=1, metavar="N", help="up to so many answers to each "
                        "question (default: %(default)s)")  # fmt: skip
    decides = parser.add_mutually_exclusive_group()
    decides.add_argument("--threshold", type=float, default=0.0, metavar="X", help="the score that an answer must "
                         "exceed; higher: fewer answers (default: %(default)s)")  # fmt: skip
    decides.add_argument("--always-answer", action="store_true", help="give the best answer, whatever its score")
    counts = {
        "--max-length": (1, 384, "tokens in a window, question included"),
        "--stride": (0, 128, "tokens of the context that two windows have in common"),
        "--max-answer-length": (1, 30, "the longest answer, in tokens"),
        "--batch-size": (1, 8, "windows at a time"),
    }
    for flag, (least, default, text) in counts.items():
        text = f"{text} (default: %(default)s)"
        parser.add_argument(flag, type=whole_number(least), default=default, metavar="N", help=text)
    parser.add_argument("--device", help="such as cpu or cuda:1 (default: an accelerator if there is one)")
    return parser


def read_context(args) -> str:
    """Raises UsageError if it cannot be read."""
    if args.context is not None:
        return args.context
    with about("standard input" if args.context_file == "-" else args.context_file):
        if args.context_file == "-":
            return sys.stdin.buffer.read().decode()
        return Path(args.context_file).read_bytes().decode()


def answer_all(args) -> None:
    """Reads the context, opens the model, and prints the answers.

    Raises:
        UsageError: one of them cannot be done.
    """
    context = read_context(args)
    with about(args.model):
        tokenizer, model = open_reader(args.model, args.device)
        found = answer(
            model, tokenizer, args.question, [context] * len(args.question), max_length=args.max_length,
            stride=args.stride, max_answer_length=args.max_answer_length, n_best=args.n_best,
            threshold=None if args.always_answer else args.threshold, batch_size=args.batch_size,
        )  # fmt: skip
    for question, answers in zip(args.question, found, strict=True):
        if args.json:
            record = {"question": question, "answers": [dataclasses.asdict(one) for one in answers]}
            print(json.dumps(record, ensure_ascii=False))
        else:
            print(*(one_line(one.text) for one in answers), sep="\n")
    sys.stdout.flush()


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code."""
    args = make_parser().parse_args(argv)
    # Load reports and the like: what matters of them comes back as an error.
    logging.disable(logging.WARNING)
    transformers.logging.disable_progress_bar()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(encoding="utf-8")
    try:
        answer_all(args)
    except UsageError as error:
        print(f"{PROG}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"{PROG}: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        return 141
    except OSError as error:  # all but those of the output are told by then
        print(f"{PROG}: the output cannot be written: {error.strerror}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
