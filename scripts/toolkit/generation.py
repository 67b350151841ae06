"""Text generation: opening a generator, planning how to decode, and generating a text for each of many texts."""

import copy
import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, GenerationConfig
from transformers.generation import BaseStreamer, GenerationMode

from toolkit.hub import check_source, open_model, open_tokenizer, read_config, to_device
from toolkit.trust import import_package

# The limit of new tokens if neither the options nor the model set one.
DEFAULT_NEW_TOKENS = 128


# ----------------------------------------------------------------------------------------------------- texts to texts


@dataclass
class Answer:
    """The outputs of a model for one text."""

    outputs: list[str]
    scores: list[float] | None = None  # of beam search, on request: log-probability divided by length
    dropped: int = 0  # tokens of the text that were cut because it has more than `Plan.room`


@dataclass
class Plan:
    """How to decode, from the options and the model's generation_config."""

    arguments: dict  # of `generate`
    room: int  # the tokens that a text may have, special tokens included
    num_beams: int
    num_return_sequences: int
    one_by_one: bool  # prompt lookup requires batches of one
    same_length: bool  # the texts of a batch must be equally long, because padding would count as text


def make_plan(model, tokenizer, options: dict, with_scores: bool = False) -> Plan:
    """The plan for these options.

    Args:
        options: fields of `GenerationConfig`. Defaults come from `model.generation_config`; if that has no maximum
            length, it is 128 new tokens, and if it has no end token, it is the tokenizer's [SEP].
        with_scores: the answers of beam search have scores.

    Raises:
        ValueError: the options contradict each other, one does not exist or would have no effect, or there are too few
            positions for the new tokens.
    """
    effective = copy.deepcopy(model.generation_config)
    if unknown := effective.update(**{**options, "return_dict_in_generate": True}):
        raise ValueError(f"GenerationConfig has no field {min(unknown)}; expected one of its fields.")
    # The model's own fields may have no effect; those among the options must have one.
    effective.validate(strict=True, user_set_attributes={"do_sample", "num_beams", *options})
    arguments = {"tokenizer": tokenizer, **special_ids(tokenizer, effective, options), **options}

    continues = not model.config.is_encoder_decoder
    limit = model.config.max_position_embeddings
    most = limit - (len(special_tokens(tokenizer)[0]) if continues else 0)
    if options.get("max_length") is not None and "max_new_tokens" not in options:
        effective.max_new_tokens = arguments["max_new_tokens"] = None  # the model's own would take precedence
    elif effective.max_new_tokens is None and effective.max_length is None:
        default = min(DEFAULT_NEW_TOKENS, most // 2 if continues else most)
        effective.max_new_tokens = arguments["max_new_tokens"] = default
    room, new = limit, effective.max_new_tokens
    if new is not None:
        if new > most:
            raise ValueError(f"max_new_tokens is {new}; expected at most {most}, with {limit} positions.")
        if (effective.min_new_tokens or 0) > new:
            raise ValueError(f"min_new_tokens is {effective.min_new_tokens}; expected at most max_new_tokens, {new}.")
        room = limit + 1 - new if continues else limit  # the last token is not fed back
    if effective.cache_implementation == "paged":
        raise ValueError("cache_implementation is 'paged', which is for serving; expected a cache of `generate`.")
    # Beam search returns the scores of its outputs only together with those of all tokens.
    arguments |= {"return_dict_in_generate": True, "output_scores": with_scores and (effective.num_beams or 1) > 1}
    return Plan(
        arguments=arguments,
        room=room if continues else min(room, tokenizer.model_max_length),
        num_beams=effective.num_beams or 1,
        num_return_sequences=effective.num_return_sequences or 1,
        one_by_one=effective.get_generation_mode() == GenerationMode.ASSISTED_GENERATION,
        same_length=continues and (new is None or bool(effective.min_length)),
    )


def special_ids(tokenizer, config: GenerationConfig, options: dict) -> dict[str, int]:
    """The tokenizer's end and padding ids, as far as neither the model nor the options set them."""
    end = tokenizer.eos_token_id if tokenizer.eos_token_id is not None else tokenizer.sep_token_id
    ids = {"eos_token_id": end, "pad_token_id": tokenizer.pad_token_id}
    return {
        name: number
        for name, number in ids.items()
        if number is not None and name not in options and getattr(config, name) is None
    }


def special_tokens(tokenizer) -> tuple[list[int], list[int]]:
    """The ids that the tokenizer puts before and after a text: [CLS] and [SEP] for BERT's."""
    ids = tokenizer("")["input_ids"]
    ends = (tokenizer.sep_token_id, tokenizer.eos_token_id)
    closing = list(itertools.takewhile(lambda number: number in ends, reversed(ids)))
    return ids[: len(ids) - len(closing)], closing


def answer(
    model, tokenizer, texts: list[str], plan: Plan, batch_size: int, show: Callable[[str], None] | None = None
) -> list[Answer]:
    """Generates the outputs of each text. Texts of similar length are batched.

    Args:
        texts: of any length. A text with more than `plan.room` tokens is cut: at its end or, if it is to be continued,
            at its beginning.
        batch_size: texts per call of the model. Without sampling it does not change the result.
        show: is called with each piece of the output as it is generated; requires `batch_size` 1.

    Raises:
        ValueError: a text to continue has no tokens.
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
    """The token ids of each text, at most `room`, and the number of ids that were cut.

    Raises:
        ValueError: a text to continue has no tokens.
    """
    opening, closing = special_tokens(tokenizer)
    is_seq2seq = model.config.is_encoder_decoder
    most = room - len(opening) - (len(closing) if is_seq2seq else 0)
    bodies = tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"] if texts else []
    encoded = []
    for text, body in zip(texts, bodies, strict=True):
        kept = body[:most] if is_seq2seq else body[max(0, len(body) - most) :]
        ids = opening + kept + (closing if is_seq2seq else [])
        if not ids:
            raise ValueError(f"{text!r} has no tokens, and the tokenizer adds none, so there is nothing to continue.")
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
    # A decoder continues at the end of the text, so its padding is on the left.
    inputs = tokenizer.pad(
        {"input_ids": [ids for _, ids in rows]}, padding_side="right" if is_seq2seq else "left", return_tensors="pt"
    ).to(model.device)
    decoders = [
        partial(decode, tokenizer) if is_seq2seq else partial(decode_continued, tokenizer, text, ids)
        for text, ids in rows
    ]
    result = model.generate(
        **inputs, streamer=None if show is None else WordStreamer(decoders[0], show), **plan.arguments
    )
    sequences = result.sequences[:, 0 if is_seq2seq else inputs.input_ids.shape[1] :].tolist()
    scores = result.sequences_scores.tolist() if plan.arguments["output_scores"] else None
    n = plan.num_return_sequences
    return [
        Answer(
            outputs=[decoders[i](ids) for ids in sequences[i * n : (i + 1) * n]],
            scores=scores and scores[i * n : (i + 1) * n],
        )
        for i in range(len(rows))
    ]


def decode(tokenizer, ids: list[int]) -> str:
    return tokenizer.decode(ids, skip_special_tokens=True)


def decode_continued(tokenizer, text: str, text_ids: list[int], ids: list[int]) -> str:
    """`text` with its continuation `ids`. These are not decoded alone: they may start in the middle of a word."""
    added = decode(tokenizer, text_ids + ids)[len(decode(tokenizer, text_ids)) :]
    return text + (added.lstrip(" ") if text[-1:].isspace() else added)


class WordStreamer(BaseStreamer):
    """Shows an output in pieces, each as soon as it is final. transformers' TextStreamer shows a word when the next one
    begins, which is too early if the tokenizer then joins the two: "don", "don '", "don't"."""

    def __init__(self, read: Callable[[list[int]], str], show: Callable[[str], None]):
        self.read, self.show = read, show
        self.ids: list[int] | None = None
        self.shown = 0

    def put(self, value: torch.Tensor) -> None:
        if self.ids is None:  # the prompt comes first
            self.ids = []
            return
        self.ids += value.flatten().tolist()
        text = self.read(self.ids)
        if text.count(" ") > 1:
            self._show(text.rsplit(" ", 2)[0])

    def end(self) -> None:
        self._show(self.read(self.ids))

    def _show(self, text: str) -> None:
        if len(text) > self.shown:
            self.show(text[self.shown :])
            self.shown = len(text)


# -------------------------------------------------------------------------------------------------------- checkpoints


def open_generator(source: str, dtype: str, device: str | None, trust_remote_code: bool = False):
    """The tokenizer and the model, on `device` or else on the accelerator if there is one.

    Args:
        trust_remote_code: run code from the checkpoint, if it has any.

    Raises:
        OSError: there is no such checkpoint, a file of it cannot be read, or it has no tokenizer.
        ValueError: it is no generator, it lacks weights, it has code that is not trusted, or there is no such device.
        ImportError: the package is required and not installed.
    """
    check_source(source, trust_remote_code)
    fields = read_config(source)
    kind, is_remote = fields.get("model_type"), trust_remote_code and "auto_map" in fields
    if not is_remote and kind not in ("scratchbert", "bert", "encoder-decoder"):
        raise ValueError(f"Its config.json is missing or has model_type {kind!r}; expected a ScratchBert or a BERT.")
    is_encoder_decoder = fields.get("is_encoder_decoder") or kind == "encoder-decoder"
    if not is_encoder_decoder and not fields.get("is_decoder"):
        raise ValueError(
            "It is an encoder, which generates nothing; expected a generator. Make one of its weights "
            "with ScratchBertForConditionalGeneration.from_bert(…), train it, and save it."
        )
    if is_remote:
        model_class = AutoModelForSeq2SeqLM if is_encoder_decoder else AutoModelForCausalLM
    else:
        name = "ScratchBertForConditionalGeneration" if is_encoder_decoder else "ScratchBertForCausalLM"
        model_class = getattr(import_package(), name)
    tokenizer = open_tokenizer(source, trust_remote_code=trust_remote_code)
    advice = "Train it as a generator first, and save that."
    options = {} if is_remote else {"padding_free": True}
    model = open_model(model_class, source, advice=advice, trust_remote_code=trust_remote_code, dtype=dtype, **options)
    return tokenizer, to_device(model, device)
