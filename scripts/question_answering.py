#!/usr/bin/env python
"""Answers questions from a text: prints the span of the text that answers each question.

    question_answering.py my-reader --question "Who founded the town?" --context_file town.txt
    question_answering.py my-reader --question "When?" --question "By whom?" --context "It was built in 1843." --json
    cat town.txt | question_answering.py my-reader --question "How many people live there?" --context_file -

MODEL is a trained ScratchBertForQuestionAnswering or BertForQuestionAnswering, a folder or a hub id, with its
tokenizer. The text may be of any length: the model reads it in overlapping windows. Each question has a line of output,
in order, which is empty if the text has no answer (with --n_best N: up to N lines, the best first). --json prints an
object for each question instead, with the answers' positions in characters and their scores.

An answer's score is the sum of its start and end logits minus that of "no answer", the [CLS] token. The answer is given
if the score is above --threshold (Devlin et al. 2018, section 4.3). By default this is the threshold of the training,
which train.py saves with the model, or 0 for other models. The defaults of --max_length, --stride
and --max_answer_length are those of the training as well, or 384, 128 and 30 for other models (less for a model with
fewer than 384 positions).

In Python, `toolkit.spans.answer` does the same.

Exit code: 0 all questions answered; 2 bad usage, or a file or checkpoint that cannot be read; 130 interrupted; 141 the
reader of the output has closed it.
"""

import dataclasses
import json
import sys
from pathlib import Path

from toolkit.cli import Parser, about, integer_from, use_utf8, without_line_breaks, writing_output


def make_parser() -> Parser:
    parser = Parser(__file__, __doc__, usage="%(prog)s MODEL --question TEXT --context TEXT [--FLAG VALUE …]")
    parser.add_argument("model", metavar="MODEL", help="a checkpoint with a tokenizer: a folder or a hub id")
    data = parser.group("data")
    data.add_argument(
        "--question", action="append", required=True, metavar="TEXT", help="a question; may be given several times"
    )
    where = data.add_mutually_exclusive_group(required=True)
    where.add_argument("--context", metavar="TEXT", help="the text with the answers")
    where.add_argument("--context_file", metavar="FILE", help="a UTF-8 file with the text; - for standard input")
    model = parser.group("model")
    counts = {
        "--max_length": (1, None, "tokens per window, including the question; default: that of the training"),
        "--stride": (0, None, "context tokens that two windows share; default: that of the training"),
        "--max_answer_length": (1, None, "maximum tokens of an answer; default: that of the training"),
        "--batch_size": (1, 8, "windows per batch"),
    }
    for flag, (minimum, default, text) in counts.items():
        model.add_argument(flag, type=integer_from(minimum), default=default, metavar="N", help=text)
    model.add_argument("--device", help="the device, such as cpu or cuda:1; default: an accelerator if there is one")
    output = parser.group("output")
    output.add_argument(
        "--n_best", type=integer_from(1), default=1, metavar="N", help="maximum number of answers to each question"
    )
    decides = output.add_mutually_exclusive_group()
    decides.add_argument(
        "--threshold",
        type=float,
        metavar="X",
        help="the score that an answer must exceed; a higher one gives fewer answers; default: that of the training",
    )
    decides.add_argument("--always_answer", action="store_true", help="give the best answer, whatever its score")
    output.add_argument(
        "--json",
        action="store_true",
        help="print an object on each line: question, and answers with "
        "text, start, end (characters of the context) and score",
    )
    return parser


def answer_all(args) -> None:
    """Reads the context, opens the model, and prints the answers.

    Raises:
        CommandError: one of these is not possible.
    """
    from toolkit.spans import answer, open_reader

    context, source = args.context, args.context_file
    if context is None:
        with about("standard input" if source == "-" else source):
            content = sys.stdin.buffer.read() if source == "-" else Path(source).read_bytes()
            context = content.decode("utf-8-sig")  # the BOM is no character of the text
    names = ("max_length", "stride", "max_answer_length", "threshold")
    options = {name: value for name in names if (value := getattr(args, name)) is not None}  # others are saved
    if args.always_answer:
        options["threshold"] = None
    with about(args.model):
        tokenizer, model = open_reader(args.model, args.device)
        found = answer(
            model,
            tokenizer,
            args.question,
            [context] * len(args.question),
            n_best=args.n_best,
            batch_size=args.batch_size,
            **options,
        )
    with writing_output():
        for question, answers in zip(args.question, found, strict=True):
            if args.json:
                record = {"question": question, "answers": [dataclasses.asdict(one) for one in answers]}
                print(json.dumps(record, ensure_ascii=False))
            else:
                print(*(without_line_breaks(one.text) for one in answers), sep="\n")
        sys.stdout.flush()


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code."""
    parser = make_parser()
    args = parser.parse_args(argv)
    use_utf8()
    return parser.run(lambda: answer_all(args), is_silent=True)


if __name__ == "__main__":
    sys.exit(main())
