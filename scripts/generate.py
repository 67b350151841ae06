#!/usr/bin/env python
"""Text in, text out: what a trained ScratchBert generator makes of each text, one line for each.

    generate.py my-summariser "A long text." "Another one." --num-beams 4
    generate.py my-summariser --file articles.txt > summaries.txt
    cat prompts.txt | generate.py my-decoder --do-sample --top-p 0.9 --seed 1 --jsonl
    generate.py my-decoder --stream

Texts are the arguments, or the lines of --file, or those of standard input; at a terminal it asks for one after the
other. Line i of the output belongs to line i of the input (with --num-return-sequences N: every N lines, the best
first), and an empty line is answered with an empty one. All is UTF-8; remarks go to standard error.

MODEL has an encoder and a decoder (ScratchBertForConditionalGeneration; where the package is installed, also an
EncoderDecoderModel of two BERTs), and writes a text of its own for each; or it is a decoder alone
(ScratchBertForCausalLM, BertLMHeadModel) and goes on with each: then the output is the text with its continuation. The
[SEP] that BERT's tokenizers put behind a text is left out there. Special tokens are not printed; stop strings are.

How to decode is said in the terms of transformers' GenerationConfig; what is not given is as the model's
generation_config.json has it. Where that has no greatest length, an output has at most 128 new tokens, and no more than
there are positions, of which a decoder alone keeps half for the text; where it has no end token, [SEP] is one. A text
too long for the positions is cut, with a remark: at its end, or, if it is to be continued, at its beginning.

In Python, `generate_text` of this file does the same.

Exit code: 0 all texts answered; 2 bad usage, or a checkpoint that cannot be opened or does not do what is asked; 130
interrupted; 141 the reader of the output has gone.
"""

import argparse
import copy
import difflib
import importlib
import io
import itertools
import json
import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from torch.nn.utils.rnn import pad_sequence
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    CompileConfig,
    GenerationConfig,
    PreTrainedConfig,
    WatermarkingConfig,
)
from transformers.generation import BaseStreamer, GenerationMode

from sources import check_source, has_tokenizer

PROG = "generate.py"
PACKAGE = "modeling_scratchbert"

# How many new tokens there may be where nobody says.
NEW_TOKENS = 128

# So many batches' worth of texts are read ahead and sorted by length, for batches with little padding.
BATCHES_AHEAD = 16

# Fields of GenerationConfig that are no options here: they say what `generate` returns beside the text, or belong to
# ways of decoding that transformers has moved out.
NO_OPTIONS = {
    "output_attentions", "output_hidden_states", "output_logits", "output_scores", "return_dict_in_generate",
    "transformers_version", "is_assistant", "continuous_batching_config",
    "constraints", "diversity_penalty", "dola_layers", "force_words_ids", "low_memory", "num_beam_groups",
    "penalty_alpha",
}  # fmt: skip
OPTIONS = {name for name in vars(GenerationConfig()) if not name.startswith("_")} - NO_OPTIONS

# Options whose value is an object of several fields.
OBJECTS = {"compile_config": CompileConfig, "watermarking_config": WatermarkingConfig}


# ------------------------------------------------------------------------------------------------ texts to texts


@dataclass
class Answer:
    """What a model made of one text."""

    outputs: list[str]
    scores: list[float] | None = None  # of beam search, if asked for: each output's log-probability over its length
    dropped: int = 0  # so many of the text's tokens were left out for want of positions


@dataclass
class Plan:
    """How to decode, out of what was asked for and what the model's generation_config says."""

    arguments: dict  # of `generate`
    room: int  # how many tokens a text may have, special ones included
    num_beams: int
    num_return_sequences: int
    one_by_one: bool  # as assisted decoding wants it
    same_length: bool  # a batch's texts must have as many tokens each, for padding would count as text


def generate_text(model, tokenizer, texts: list[str], batch_size: int = 8, **options) -> list[list[str]]:
    """The texts that a model generates for each of `texts`.

    Args:
        model: a ScratchBertForConditionalGeneration, or a ScratchBertForCausalLM, which continues the texts.
        tokenizer: the model's; left as it is.
        texts: of any length. One for which the model has too few positions is cut, with a warning: at its end, or,
            where it is to be continued, at its beginning.
        batch_size: how many texts the model has before it at once, those of like length together. Without sampling it
            makes no difference to the result.
        options: fields of `GenerationConfig`, and `assistant_model`, an argument of `generate`. What is left out is as
            `model.generation_config` has it; where that has no greatest length, there are up to 128 new tokens, and
            where it has no end token, the tokenizer's [SEP] is one.

    Returns:
        For each text, in order, its `num_return_sequences` outputs, the best first, without special tokens.

    Raises:
        ValueError: the options contradict each other, one would have no effect, there are too few positions for that
            many new tokens, or there is nothing to continue.
    """
    plan = make_plan(model, tokenizer, options)
    answers = answer(model, tokenizer, texts, plan, batch_size)
    if dropped := sum(one.dropped > 0 for one in answers):
        warnings.warn(
            f"{dropped} of {len(texts)} texts are too long for the model's positions and were cut.", stacklevel=2
        )
    return [one.outputs for one in answers]


def make_plan(model, tokenizer, options: dict, with_scores: bool = False) -> Plan:
    """Raises ValueError where `generate_text` does, but for a text that is at fault."""
    effective = copy.deepcopy(model.generation_config)
    effective.update(**options, return_dict_in_generate=True)
    # The model's own fields may be without effect; those that were asked for may not.
    effective.validate(strict=True, user_set_attributes={"do_sample", "num_beams", *options})
    assistant = options.get("assistant_model")
    arguments = {"tokenizer": tokenizer, **special_ids(tokenizer, effective, options), **options}

    limit = min(one.config.max_position_embeddings for one in (model, assistant) if one is not None)
    opening, _ = special_tokens(tokenizer)
    continues = not model.config.is_encoder_decoder
    room, most = limit, limit - (len(opening) if continues else 0)
    if options.get("max_length") is not None and "max_new_tokens" not in options:
        effective.max_new_tokens = arguments["max_new_tokens"] = None  # the model's own would go first
    elif effective.max_new_tokens is None and effective.max_length is None:
        effective.max_new_tokens = arguments["max_new_tokens"] = min(NEW_TOKENS, most // 2 if continues else most)
    new = effective.max_new_tokens
    if new is not None:
        if new > most:
            raise ValueError(f"max_new_tokens is {new}, and with {limit} positions it can be {most} at most.")
        if (effective.min_new_tokens or 0) > new:
            raise ValueError(f"min_new_tokens is {effective.min_new_tokens}, and max_new_tokens {new}.")
        room = limit + 1 - new if continues else limit  # the last token is not fed back
    num_beams = effective.num_beams or 1
    if assistant is not None and num_beams > 1:
        raise ValueError(f"An assistant helps greedy decoding and sampling, and num_beams is {num_beams}.")
    # Beam search gives the scores of its outputs only together with those of all tokens.
    output = {"return_dict_in_generate": True, "output_scores": with_scores and num_beams > 1}
    return Plan(
        arguments={**arguments, **output},
        room=room,
        num_beams=num_beams,
        num_return_sequences=effective.num_return_sequences or 1,
        one_by_one=effective.get_generation_mode(assistant) == GenerationMode.ASSISTED_GENERATION,
        same_length=continues and (new is None or bool(effective.min_length)),
    )


def special_ids(tokenizer, config: GenerationConfig, options: dict) -> dict[str, int]:
    """The tokenizer's ids for what ends and pads an output, where neither the model nor the options say."""
    end = tokenizer.eos_token_id if tokenizer.eos_token_id is not None else tokenizer.sep_token_id
    ids = {"eos_token_id": end, "pad_token_id": tokenizer.pad_token_id}
    return {
        name: number
        for name, number in ids.items()
        if number is not None and name not in options and getattr(config, name) is None
    }


def special_tokens(tokenizer) -> tuple[list[int], list[int]]:
    """What the tokenizer puts before a text, and what after it: of BERT's, [CLS] and [SEP]."""
    ids = tokenizer("")["input_ids"]
    ends = (tokenizer.sep_token_id, tokenizer.eos_token_id)
    closing = list(itertools.takewhile(lambda number: number in ends, reversed(ids)))
    return ids[: len(ids) - len(closing)], closing


def answer(
    model,
    tokenizer,
    texts: list[str],
    plan: Plan,
    batch_size: int,
    show: Callable[[str], None] | None = None,
) -> list[Answer]:
    """As `generate_text`, by a plan. With `show`, which takes the output in pieces as it is written, `batch_size` is 1.

    Raises:
        ValueError: of a text and the tokenizer's special tokens there is no token to continue.
    """
    sources = encode(model, tokenizer, texts, plan.room)
    lengths = [len(ids) for ids, _ in sources]
    answers: list[Answer | None] = [None] * len(texts)
    for batch in batches(lengths, 1 if plan.one_by_one else batch_size, plan.same_length):
        rows = [(texts[i], sources[i][0]) for i in batch]
        for i, one in zip(batch, answer_batch(model, tokenizer, rows, plan, show), strict=True):
            one.dropped = sources[i][1]
            answers[i] = one
    return answers


def encode(model, tokenizer, texts: list[str], room: int) -> list[tuple[list[int], int]]:
    """Each text's token ids, at most `room`, and how many others were left out.

    Raises:
        ValueError: there is not one token.
    """
    opening, closing = special_tokens(tokenizer)
    bodies = tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"] if texts else []
    encoded = []
    for text, body in zip(texts, bodies, strict=True):
        if model.config.is_encoder_decoder:
            kept = body[: room - len(opening) - len(closing)]
            ids = opening + kept + closing
        else:
            kept = body[max(0, len(body) - (room - len(opening))) :]
            ids = opening + kept
        if not ids:
            raise ValueError(f"{text!r} has no tokens, and the tokenizer adds none: there is nothing to continue.")
        encoded.append((ids, len(body) - len(kept)))
    return encoded


def batches(lengths: list[int], batch_size: int, same_length: bool) -> Iterator[list[int]]:
    """Indices into `lengths`, the longest first, in batches of at most `batch_size`."""
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    for _, group in itertools.groupby(order, key=lambda i: lengths[i] if same_length else None):
        yield from chunks(group, batch_size)


def chunks(items: Iterable, size: int) -> Iterator[list]:
    items = iter(items)
    while chunk := list(itertools.islice(items, size)):
        yield chunk


def answer_batch(model, tokenizer, rows: list[tuple[str, list[int]]], plan: Plan, show) -> list[Answer]:
    """One call of `generate`, for texts and their token ids."""
    is_seq2seq = model.config.is_encoder_decoder
    tensors = [torch.tensor(ids) for _, ids in rows]
    # A decoder writes on where the text ends, so there the padding stands before it.
    pad = partial(pad_sequence, batch_first=True, padding_side="right" if is_seq2seq else "left")
    input_ids = pad(tensors, padding_value=tokenizer.pad_token_id or 0).to(model.device)
    attention_mask = pad([torch.ones_like(ids) for ids in tensors]).to(model.device)
    read = [
        partial(decode, tokenizer) if is_seq2seq else partial(decode_continued, tokenizer, text, ids)
        for text, ids in rows
    ]
    result = model.generate(
        input_ids=input_ids,
        attention_mask=attention_mask,
        streamer=None if show is None else WordStreamer(read[0], show),
        **plan.arguments,
    )
    sequences = result.sequences[:, 0 if is_seq2seq else input_ids.shape[1] :].tolist()
    scores = result.sequences_scores.tolist() if plan.arguments["output_scores"] else None
    n = plan.num_return_sequences
    return [
        Answer(
            outputs=[read[i](ids) for ids in sequences[i * n : (i + 1) * n]],
            scores=scores and scores[i * n : (i + 1) * n],
        )
        for i in range(len(rows))
    ]


def decode(tokenizer, ids: list[int]) -> str:
    return tokenizer.decode(ids, skip_special_tokens=True)


def decode_continued(tokenizer, text: str, text_ids: list[int], ids: list[int]) -> str:
    """`text`, and what `ids`, which come after those of the text, add to it. They are not read by themselves: they may
    start in the middle of a word."""
    added = decode(tokenizer, text_ids + ids)[len(decode(tokenizer, text_ids)) :]
    return text + (added.lstrip(" ") if text[-1:].isspace() else added)


class WordStreamer(BaseStreamer):
    """Shows an output in pieces that add up to it, as soon as they are sure. transformers' TextStreamer lets go of a
    word when the next one begins, which is too early where the tokenizer then joins them: "don", "don '", "don't"."""

    def __init__(self, read: Callable[[list[int]], str], show: Callable[[str], None]):
        self.read, self.show = read, show
        self.ids: list[int] | None = None
        self.shown = 0

    def put(self, value: torch.Tensor) -> None:
        if self.ids is None:  # what comes first is what the decoder starts from
            self.ids = []
            return
        self.ids += value.flatten().tolist()
        text = self.read(self.ids)
        if text.count(" ") > 1:
            self._show_to(text, len(text.rsplit(" ", 2)[0]))

    def end(self) -> None:
        text = self.read(self.ids)
        self._show_to(text, len(text))

    def _show_to(self, text: str, end: int) -> None:
        if end > self.shown:
            self.show(text[self.shown : end])
            self.shown = end


# ------------------------------------------------------------------------------------------------ checkpoints


def open_generator(source: str, dtype: str, device: str | None):
    """The tokenizer and the model, without `device` on the accelerator if there is one.

    Raises:
        OSError: there is no such checkpoint, a file of it cannot be read, or it has no tokenizer.
        ValueError: it is no generator, it lacks weights, or there is no such device.
        ImportError: it takes the package to open it, which is not installed.
    """
    check_source(source)
    model_class = generator_class(source)
    if not has_tokenizer(source):
        raise OSError("It has no tokenizer, neither tokenizer.json nor vocab.txt: save the model's beside it.")
    tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=True)
    model, info = model_class.from_pretrained(source, trust_remote_code=True, dtype=dtype, output_loading_info=True)
    if missing := sorted(info["missing_keys"]):
        raise ValueError(
            f"Weights of a generator that it lacks: {len(missing)}, such as {missing[0]}. With random ones in their "
            "place it would write nonsense: train it as a generator first, and save that."
        )
    if device is None:
        device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else "cpu"
    try:
        return tokenizer, model.to(device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"--device {device}: {error}") from error


def generator_class(source: str):
    """The class that opens a checkpoint.

    Raises:
        ValueError: it is of another kind of model, or an encoder alone.
    """
    try:
        fields, _ = PreTrainedConfig.get_config_dict(source)
    except (AttributeError, TypeError):
        fields = None
    if not isinstance(fields, dict):
        raise OSError("Its config.json does not hold a JSON object.")
    kind = fields.get("model_type")
    is_ours = kind not in ("bert", "encoder-decoder")
    if is_ours:
        if kind == "scratchbert" and "auto_map" not in fields:  # no code beside the weights
            from_package("ScratchBertConfig")
        config = AutoConfig.from_pretrained(source, trust_remote_code=True)
        if not any(cls.__name__ == "ScratchBertConfig" for cls in type(config).__mro__):
            raise ValueError(f"It has model_type {kind!r}, and is no ScratchBert.")
        fields = config.to_dict()
    if fields.get("is_encoder_decoder") or kind == "encoder-decoder":
        return AutoModelForSeq2SeqLM if is_ours else from_package("ScratchBertForConditionalGeneration")
    if fields.get("is_decoder"):
        return AutoModelForCausalLM if is_ours else from_package("ScratchBertForCausalLM")
    raise ValueError(
        "It is an encoder alone, which writes nothing. ScratchBertForConditionalGeneration.from_bert(…) makes a "
        "generator that starts from its weights; that must be trained first, and saved."
    )


def from_package(name: str):
    """A class of the installed package; importing it makes its classes known to the Auto classes."""
    try:
        return getattr(importlib.import_module(PACKAGE), name)
    except ImportError as error:
        raise ImportError(f"No code lies beside the weights, and {PACKAGE} is not installed: {error}.") from error


def open_assistant(source: str, tokenizer, model, dtype: str, device: str | None):
    """A model that proposes tokens to `model`.

    Raises:
        ValueError: the two do not fit together, and whatever `open_generator` raises.
    """
    its_tokenizer, assistant = open_generator(source, dtype, device)
    if assistant.config.is_encoder_decoder != model.config.is_encoder_decoder:
        raise ValueError("Of the model and its assistant one has an encoder, and the other has none.")
    if its_tokenizer.get_vocab() != tokenizer.get_vocab():
        raise ValueError("Its vocabulary is another one than the model's, so it cannot propose tokens.")
    return assistant


# ------------------------------------------------------------------------------------------------ the command line


class UsageError(Exception):
    """What was asked for cannot be done; the message is one line."""


@contextmanager
def about(what: str) -> Iterator[None]:
    """Turns what may go wrong with files, checkpoints and options into `UsageError`, which says what it is about."""
    try:
        yield
    except BrokenPipeError:
        raise
    except (OSError, ValueError, RuntimeError, AssertionError, ImportError, StrictDataclassError) as error:
        raise UsageError(f"{what}: {' '.join(str(error).split())}") from error


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, and not below a page of usage."""

    def error(self, message: str):
        self.exit(2, f"{self.prog}: {message} ({self.prog} --help lists the options)\n")


def whole_number(least: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from {least} up")
        return int(text)

    return parse


def option(text: str) -> tuple[str, object]:
    """`NAME=VALUE` of --option."""
    name, equals, value = text.partition("=")
    name = name.replace("-", "_")
    if not equals:
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form NAME=VALUE")
    if name not in OPTIONS:
        close = difflib.get_close_matches(name, OPTIONS, n=1, cutoff=0)
        raise argparse.ArgumentTypeError(f"there is no option {name!r}; the closest is {close[0]!r}")
    value = json_or_text(value)
    if name in OBJECTS and isinstance(value, dict):
        try:
            value = OBJECTS[name](**value)
        except TypeError as error:
            raise argparse.ArgumentTypeError(f"{name}: {error}") from error
    return name, value


def json_or_text(text: str) -> object:
    try:
        return json.loads(text)
    except ValueError:
        return text


# The fields of GenerationConfig that have flags: what `add_argument` is given for each.
COUNT, AMOUNT = {"type": whole_number(1), "metavar": "N"}, {"type": float, "metavar": "X"}
FLAGS = {
    "max_new_tokens": COUNT | {"help": "an output's greatest length"},
    "min_new_tokens": COUNT | {"type": whole_number(0), "help": "its least length"},
    "num_beams": COUNT | {"help": "beam search over so many candidates"},
    "length_penalty": AMOUNT | {"help": "above 0 beam search prefers long outputs, below 0 short ones"},
    "early_stopping": {
        "choices": ["true", "false", "never"],
        "help": "true: beam search ends with num_beams finished candidates; false: when a better one is unlikely; "
        "never: when there can be none",
    },
    "num_return_sequences": COUNT | {"help": "so many outputs for each text"},
    "do_sample": {"action": argparse.BooleanOptionalAction, "help": "draw each token at random by its probability"},
    "temperature": AMOUNT | {"help": "below 1 the likely tokens become likelier, above 1 less so"},
    "top_k": COUNT | {"type": whole_number(0), "help": "draw from the N likeliest tokens only; 0: from all"},
    "top_p": AMOUNT | {"help": "draw from the likeliest tokens only, as many as have the probability X together"},
    "repetition_penalty": AMOUNT | {"help": "above 1, tokens that are there already become less likely"},
    "no_repeat_ngram_size": COUNT | {"type": whole_number(0), "help": "no N tokens in a row come twice; 0: they may"},
    "stop_strings": {
        "action": "append",
        "metavar": "TEXT",
        "help": "an output ends where it has this in it; may be given several times",
    },
    "cache_implementation": {
        "choices": ["dynamic", "static", "offloaded", "offloaded_static", "quantized"],
        "help": "how keys and values of earlier tokens are kept",
    },
}


def make_parser() -> argparse.ArgumentParser:
    parser = Parser(prog=PROG, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", metavar="MODEL", help="a checkpoint with a tokenizer: a folder or a hub id")
    parser.add_argument("texts", metavar="text", nargs="*", default=[], help="what to start from")
    parser.add_argument("--file", metavar="FILE", help="a file with one text a line")
    parser.add_argument("--jsonl", action="store_true", help="print one JSON object a line: input, outputs, and, of "
                        "beam search, scores")  # fmt: skip
    parser.add_argument("--stream", action="store_true", help="print outputs as they are written; not of beam search")
    parser.add_argument("--batch-size", type=whole_number(1), default=8, metavar="N", help="texts at a time (default: "
                        "%(default)s); with 1, each line is answered before the next is read")  # fmt: skip
    parser.add_argument("--seed", type=whole_number(0), metavar="N", help="for --do-sample: the same seed, texts and "
                        "batch size give the same outputs")  # fmt: skip
    parser.add_argument("--assistant", metavar="MODEL", help="a smaller generator that proposes tokens, for speed: the "
                        "output stays the same; one text at a time")  # fmt: skip
    parser.add_argument("--dtype", choices=["auto", "float32", "bfloat16", "float16"], default="auto",
                        help="what to compute in (default: auto, as the weights are stored)")  # fmt: skip
    parser.add_argument("--device", help="such as cpu or cuda:1 (default: an accelerator if there is one)")
    decoding = parser.add_argument_group("decoding, in the terms of GenerationConfig")
    for name, arguments in FLAGS.items():
        decoding.add_argument(f"--{name.replace('_', '-')}", default=argparse.SUPPRESS, **arguments)
    decoding.add_argument("--option", action="append", default=[], type=option, metavar="NAME=VALUE", help="any other "
                          "field, the value as JSON or else as text; may be given several times")  # fmt: skip
    return parser


def decoding_options(args) -> dict:
    """The fields of GenerationConfig that were given.

    Raises:
        UsageError: one was given twice.
    """
    flags = [(name, getattr(args, name)) for name in FLAGS if hasattr(args, name)]
    given = [(name, json_or_text(value) if isinstance(value, str) else value) for name, value in flags] + args.option
    names = [name for name, _ in given]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise UsageError(f"{twice} is given more than once")
    if dict(given).get("cache_implementation") == "paged":
        raise UsageError("cache_implementation 'paged' is for serving, and not for generate")
    return dict(given)


def read_texts(args) -> Iterable[str]:
    """The texts to answer. What can be told of a file is told here, before the model is opened.

    Raises:
        UsageError: a file cannot be read, or is not UTF-8. Of standard input, that comes in the middle.
    """
    if args.texts:
        return [decoded(os.fsencode(text), f"text {number}") for number, text in enumerate(args.texts, 1)]
    if args.file is not None:
        try:
            with open(args.file, "rb") as file:
                return list(lines(file, args.file))
        except OSError as error:
            raise UsageError(f"{args.file}: {error.strerror}") from error
    if sys.stdin is None:
        raise UsageError("there is no text: give some as arguments, in --file, or on standard input, which is closed")
    return typed_lines() if at_terminal(args) else lines(sys.stdin.buffer, "standard input")


def at_terminal(args) -> bool:
    """Whether the texts come from somebody who waits for each answer."""
    return not args.texts and args.file is None and sys.stdin.isatty()


def lines(stream: Iterable[bytes], name: str) -> Iterator[str]:
    for number, line in enumerate(stream, 1):
        yield decoded(line.rstrip(b"\r\n"), f"{name}, line {number}")


def typed_lines() -> Iterator[str]:
    """What is typed, without empty lines, to the end of input."""
    while True:
        print("> ", end="", file=sys.stderr, flush=True)
        line = sys.stdin.buffer.readline()
        if not line:
            print(file=sys.stderr)
            return
        if line.strip():
            yield decoded(line.rstrip(b"\r\n"), "standard input")


def decoded(line: bytes, where: str) -> str:
    try:
        return line.decode()
    except UnicodeDecodeError as error:
        raise UsageError(f"{where}: byte {error.start + 1}, {line[error.start]:#04x}, is not UTF-8") from error


def answer_all(args, options: dict) -> None:
    """Reads the texts, opens the model, and prints what it makes of them.

    Raises:
        UsageError: one of them cannot be done.
    """
    texts = read_texts(args)
    tokenizer, model, plan = prepare(args, options)
    if args.seed is not None:
        torch.manual_seed(args.seed)
    number = 0
    waits = args.stream or args.batch_size == 1 or at_terminal(args)
    for window in chunks(texts, 1 if waits else args.batch_size * BATCHES_AHEAD):
        with about(args.model):
            answers = answer_window(args, model, tokenizer, window, plan)
        for text, one in zip(window, answers, strict=True):
            number += 1
            if one.dropped:
                side = "last" if model.config.is_encoder_decoder else "first"
                remark = f"text {number} is too long: its {side} {one.dropped} tokens are left out"
                print(f"{PROG}: {remark}", file=sys.stderr)
            if not args.stream:
                write(text, one, args.jsonl)
        sys.stdout.flush()


def prepare(args, options: dict) -> tuple:
    """The tokenizer, the model, and the plan by which they do what was asked.

    Raises:
        UsageError: they cannot.
    """
    with about(args.model):
        tokenizer, model = open_generator(args.model, args.dtype, args.device)
    if args.assistant is not None:
        with about(args.assistant):
            options["assistant_model"] = open_assistant(args.assistant, tokenizer, model, args.dtype, args.device)
    with about(args.model):
        plan = make_plan(model, tokenizer, options, with_scores=args.jsonl)
    if args.stream and (plan.num_beams > 1 or plan.num_return_sequences > 1):
        raise UsageError("--stream prints one output as it grows: it takes --num-beams 1 and --num-return-sequences 1")
    return tokenizer, model, plan


def answer_window(args, model, tokenizer, texts: list[str], plan: Plan) -> list[Answer]:
    """As `answer`, with empty outputs for empty lines. With --stream it prints them."""

    def show(piece: str) -> None:
        print(one_line(piece), end="", flush=True)

    is_asked = [bool(args.texts or text.strip()) for text in texts]
    asked = list(itertools.compress(texts, is_asked))
    found = iter(answer(model, tokenizer, asked, plan, args.batch_size, show if args.stream else None))
    if args.stream:
        print(flush=True)
    return [next(found) if asked else Answer([""] * plan.num_return_sequences) for asked in is_asked]


def write(text: str, answer: Answer, as_json: bool) -> None:
    if as_json:
        scores = {} if answer.scores is None else {"scores": answer.scores}
        print(json.dumps({"input": text, "outputs": answer.outputs, **scores}, ensure_ascii=False))
        return
    for output in answer.outputs:
        print(one_line(output))


def one_line(text: str) -> str:
    return text.translate({ord("\n"): " ", ord("\r"): " "})


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code."""
    parser = make_parser()
    args = parser.parse_intermixed_args(argv)
    if args.texts and args.file is not None:
        parser.error("texts are given as arguments and in --file: give one of them")
    if args.stream and args.jsonl:
        parser.error("--stream prints text as it grows, and --jsonl whole objects: give one of them")
    # Retries, load reports and the like: what matters of them comes back as an error.
    logging.disable(logging.WARNING)
    transformers.logging.disable_progress_bar()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(encoding="utf-8")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            answer_all(args, decoding_options(args))
        return 0
    except UsageError as error:
        print(f"{PROG}: {error}", file=sys.stderr)
        return 2
    except (TypeError, AttributeError, LookupError) as error:
        if not args.option:
            raise
        # `generate` does not look at every value before it computes with it.
        print(f"{PROG}: the value of an --option is of no use: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"{PROG}: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        return 141
    except OSError as error:  # all but those of the output are told by then
        print(f"{PROG}: the output cannot be written: {error.strerror}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
