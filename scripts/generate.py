#!/usr/bin/env python
"""Generates a text for each input text, with a trained ScratchBert generator.

    generate.py my-summariser "A long text." "Another one." --num_beams 4
    generate.py my-summariser --file articles.txt > summaries.txt
    cat prompts.txt | generate.py my-decoder --do_sample --top_p 0.9 --seed 1 --jsonl
    generate.py my-decoder --stream

The texts are the arguments, or the lines of --file, or the lines of standard input; at a terminal it prompts for one
text after another. Line i of the output belongs to line i of the input (with --num_return_sequences N: every N lines,
the best first); the output for an empty line is empty. All text is UTF-8; remarks go to standard error.

MODEL is an encoder-decoder (ScratchBertForConditionalGeneration or, if the package is installed, an EncoderDecoderModel
of two BERTs), which generates a new text; or a decoder (ScratchBertForCausalLM, BertLMHeadModel), which continues the
text: the output is then the text with its continuation. A decoder's input does not end with [SEP]. Special tokens are
not printed; stop strings are.

Decoding flags have the names of transformers' GenerationConfig; their defaults come from the model's
generation_config.json. If that sets no maximum length, an output has at most 128 new tokens, and no more than the model
has positions; a decoder keeps half of its positions for the text. If it sets no end token, [SEP] is used. A text that
is too long for the positions is cut, with a remark: at its end or, if it is to be continued, at its beginning. The
source of an encoder-decoder is also cut at model_max_length of the tokenizer, which train.py sets to its
--max_length.

Code in the folder of a model runs only with --trust_remote_code. Without it, the installed package opens a ScratchBert,
if its code is that of the package or of a release.

Exit code: 0 a text was generated for each text; 2 bad usage, or a checkpoint that cannot be opened or does not support
the flags; 130 interrupted; 141 the reader of the output has closed it.
"""

import argparse
import itertools
import json
import sys
import warnings
from collections.abc import Iterable, Iterator
from functools import partial

from toolkit.cli import CommandError, Parser, about, integer_from, use_utf8, without_line_breaks, writing_output

# This many batches of texts are read ahead and sorted by length, for batches with little padding.
BATCHES_AHEAD = 16


def json_or_text(text: str) -> object:
    try:
        return json.loads(text)
    except ValueError:
        return text


# The flags for fields of GenerationConfig, with the arguments of `add_argument`.
COUNT, AMOUNT = {"type": integer_from(1), "metavar": "N"}, {"type": float, "metavar": "X"}
DECODING_FLAGS = {
    "max_new_tokens": COUNT | {"help": "maximum length of an output, in tokens"},
    "min_new_tokens": COUNT | {"type": integer_from(0), "help": "minimum length of an output, in tokens"},
    "num_beams": COUNT | {"help": "number of beams in beam search; 1: greedy decoding or sampling"},
    "length_penalty": AMOUNT | {"help": "beam search: above 0, long outputs are preferred; below 0, short ones"},
    "early_stopping": {
        "type": json_or_text,
        "choices": [True, False, "never"],
        "metavar": "{true,false,never}",
        "help": "true: beam search ends with num_beams finished candidates; false: when a better one is "
        "unlikely; never: when there can be none",
    },
    "num_return_sequences": COUNT | {"help": "outputs per text"},
    "do_sample": {"action": "store_true", "help": "draw each token at random by its probability"},
    "temperature": AMOUNT | {"help": "below 1, likely tokens become likelier; above 1, less likely"},
    "top_k": COUNT | {"type": integer_from(0), "help": "draw from the N likeliest tokens only; 0: from all"},
    "top_p": AMOUNT | {"help": "draw from the likeliest tokens whose probabilities add up to X"},
    "repetition_penalty": AMOUNT | {"help": "above 1, tokens that have occurred become less likely"},
    "no_repeat_ngram_size": COUNT | {"type": integer_from(0), "help": "no N tokens in a row occur twice; 0: they may"},
    "stop_strings": {
        "action": "append",
        "metavar": "TEXT",
        "help": "an output ends where it contains this; may be given several times",
    },
}
MOST_USED = ("max_new_tokens", "num_beams", "do_sample", "temperature", "top_p")


# ------------------------------------------------------------------------------------------------------------- parsing


def make_parser() -> Parser:
    parser = Parser(__file__, __doc__, usage="%(prog)s MODEL [TEXT …] [--FLAG VALUE …]")
    parser.add_argument("model", metavar="MODEL", help="a checkpoint with a tokenizer: a folder or a hub id")
    parser.add_argument("texts", metavar="TEXT", nargs="*", default=[], help="the texts to start from")
    used = parser.group("most used")
    used.add_argument("--file", metavar="FILE", help="a file with a text on each line")
    add_decoding_flags(used, MOST_USED)
    used.add_argument(
        "--seed",
        type=integer_from(0),
        metavar="N",
        help="the seed of --do_sample: the same seed, texts and batch size give the same outputs",
    )
    used.add_argument(
        "--batch_size",
        type=integer_from(1),
        default=8,
        metavar="N",
        help="texts per batch; with 1, each line is answered before the next is read",
    )
    used.add_argument("--device", help="the device, such as cpu or cuda:1; default: an accelerator if there is one")
    used.add_argument(
        "--jsonl",
        action="store_true",
        help="print a JSON object on each line: input, outputs and, for beam search, scores",
    )
    model = parser.group("model")
    model.add_argument(
        "--dtype",
        choices=["auto", "float32", "bfloat16", "float16"],
        default="auto",
        help="the dtype of the computation; auto: that of the stored weights",
    )
    model.add_argument(
        "--trust_remote_code",
        action="store_true",
        help="run the code in the folder of a model; needed only if it is not what modeling_scratchbert saves",
    )
    decoding = parser.group("decoding")
    add_decoding_flags(decoding, [name for name in DECODING_FLAGS if name not in MOST_USED])
    decoding.add_argument(
        "--option",
        action="append",
        default=[],
        type=option,
        metavar="NAME=VALUE",
        help="any other field of GenerationConfig, its value as JSON or else text; may be repeated",
    )
    parser.group("output").add_argument(
        "--stream", action="store_true", help="print each output while it is generated; not for beam search"
    )
    return parser


def add_decoding_flags(group, names: Iterable[str]) -> None:
    for name in names:
        group.add_argument(f"--{name}", default=argparse.SUPPRESS, **DECODING_FLAGS[name])
        if name == "do_sample":
            group.add_argument(
                "--no_do_sample",
                dest="do_sample",
                action="store_false",
                default=argparse.SUPPRESS,
                help="take the likeliest token",
            )


def option(text: str) -> tuple[str, object]:
    """`NAME=VALUE` of --option."""
    name, equals, value = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"{text!r} is invalid; expected NAME=VALUE")
    return name.replace("-", "_"), json_or_text(value)


# ------------------------------------------------------------------------------------------------------- reading texts


def read_texts(args) -> Iterable[str]:
    """The texts. A file is read here, so that its errors show before the model is opened.

    Raises:
        CommandError: a file cannot be read, or is not UTF-8. Standard input raises while it is iterated.
    """
    utf8 = {"encoding": "utf-8", "errors": "surrogateescape", "newline": "\n"}
    if args.texts:
        return list(checked(args.texts, "text"))
    if args.file is not None:
        with about(args.file), open(args.file, **utf8) as file:
            return list(checked(file, f"{args.file}, line"))
    if sys.stdin is None:
        raise CommandError("there is no text; expected some as arguments, in --file, or on standard input")
    sys.stdin.reconfigure(**utf8)
    return checked(typed_lines() if is_interactive(args) else sys.stdin, "standard input, line")


def is_interactive(args) -> bool:
    """Whether somebody types the texts and waits for each output."""
    return not args.texts and args.file is None and sys.stdin.isatty()


def typed_lines() -> Iterator[str]:
    """The lines typed at the terminal, without empty ones, to the end of input."""
    prompt = partial(print, "> ", end="", file=sys.stderr, flush=True)
    prompt()
    for line in sys.stdin:
        if line.strip():
            yield line
        prompt()
    print(file=sys.stderr)


def checked(texts: Iterable[str], name: str) -> Iterator[str]:
    """The texts without line ends. Raises CommandError at one that was not UTF-8."""
    for number, text in enumerate(texts, 1):
        try:
            text.encode()
        except UnicodeEncodeError as error:  # of a byte that `surrogateescape` has kept
            raise CommandError(f"{name} {number} is not UTF-8") from error
        yield text if name == "text" else text.rstrip("\r\n")


# ---------------------------------------------------------------------------------------------------------- generating


def generate(parser: Parser, args) -> None:
    """Reads the texts, opens the model, and prints its outputs.

    Raises:
        CommandError: one of these is not possible, or the model does not support the options.
    """
    import torch

    from toolkit.generation import Answer, answer, chunks, make_plan, open_generator

    texts = read_texts(args)
    options = dict(args.option) | {name: getattr(args, name) for name in DECODING_FLAGS if hasattr(args, name)}
    with about(args.model):
        tokenizer, model = open_generator(args.model, args.dtype, args.device, args.trust_remote_code)
        plan = make_plan(model, tokenizer, options, with_scores=args.jsonl)
    if args.stream and (plan.num_beams > 1 or plan.num_return_sequences > 1):
        raise CommandError(
            "--stream prints one output while it grows; expected --num_beams 1 and --num_return_sequences 1"
        )
    if args.seed is not None:
        torch.manual_seed(args.seed)
    number = 0
    waits = args.stream or args.batch_size == 1 or is_interactive(args)
    for window in chunks(texts, 1 if waits else args.batch_size * BATCHES_AHEAD):
        is_asked = [bool(args.texts or text.strip()) for text in window]  # an empty line has an empty output
        asked = list(itertools.compress(window, is_asked))
        with about(args.model):
            answers = iter(answer(model, tokenizer, asked, plan, args.batch_size, show if args.stream else None))
        for text, is_answered in zip(window, is_asked, strict=True):
            number += 1
            one = next(answers) if is_answered else Answer([""] * plan.num_return_sequences)
            if one.dropped:
                side = "last" if model.config.is_encoder_decoder else "first"
                parser.report(f"text {number} is too long: its {side} {one.dropped} tokens are left out")
            if args.stream:
                print()
            else:
                write(text, one, args.jsonl)
        sys.stdout.flush()


def show(piece: str) -> None:
    print(without_line_breaks(piece), end="", flush=True)


def write(text: str, answer, as_json: bool) -> None:
    if as_json:
        scores = {} if answer.scores is None else {"scores": answer.scores}
        print(json.dumps({"input": text, "outputs": answer.outputs, **scores}, ensure_ascii=False))
        return
    for output in answer.outputs:
        print(without_line_breaks(output))


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code."""
    parser = make_parser()
    args = parser.parse_args(argv)
    if args.texts and args.file is not None:
        parser.error("texts are given both as arguments and in --file; expected one of the two")
    if args.stream and args.jsonl:
        parser.error("--stream and --jsonl are both given; expected one of the two")
    use_utf8()

    def work() -> None:
        try:
            with warnings.catch_warnings(action="ignore"), writing_output():
                generate(parser, args)
        except (TypeError, AttributeError, LookupError) as error:
            if not args.option:
                raise
            # `generate` of transformers does not check every value before it computes with it.
            raise CommandError(f"the value of an --option is invalid: {error}") from error

    return parser.run(work, is_silent=True)


if __name__ == "__main__":
    sys.exit(main())
