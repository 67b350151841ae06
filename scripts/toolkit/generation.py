"""Text generation: opening a generator, planning how to decode, and generating a text for each of many texts."""

import copy
import itertools
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    CompileConfig,
    GenerationConfig,
    WatermarkingConfig,
)
from transformers.generation import BaseStreamer, GenerationMode

from toolkit.hub import check_source, open_model, open_tokenizer, read_config, to_device
from toolkit.remote_code import check_code, import_package

# The limit of new tokens if neither the options nor the model set one.
DEFAULT_NEW_TOKENS = 128

# Fields of GenerationConfig that are not options: they add to what `generate` returns beside the text, or belong to
# decoding methods that transformers no longer has.
NOT_OPTIONS = {
    "output_attentions", "output_hidden_states", "output_logits", "output_scores", "return_dict_in_generate",
    "transformers_version", "is_assistant", "continuous_batching_config",
    "constraints", "diversity_penalty", "dola_layers", "force_words_ids", "low_memory", "num_beam_groups",
    "penalty_alpha",
}  # fmt: skip
OPTIONS = {name for name in vars(GenerationConfig()) if not name.startswith("_")} - NOT_OPTIONS

# Options whose value is an object with several fields.
OBJECTS = {"compile_config": CompileConfig, "watermarking_config": WatermarkingConfig}


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
    one_by_one: bool  # assisted decoding requires batches of one
    same_length: bool  # the texts of a batch must be equally long, because padding would count as text


def generate_text(model, tokenizer, texts: list[str], batch_size: int = 8, **options) -> list[list[str]]:
    """The texts that a model generates for each of `texts`.

    Args:
        model: a ScratchBertForConditionalGeneration, or a ScratchBertForCausalLM, which continues the texts.
        tokenizer: the model's; not changed.
        texts: of any length. A text with more tokens than the model has positions is cut, with a warning: at its end,
            or, if it is to be continued, at its beginning. The source of an encoder-decoder is also cut at
            `tokenizer.model_max_length`, to which the training has cut it.
        batch_size: texts per call of the model, texts of similar length together. Without sampling it does not change
            the result.
        options: fields of `GenerationConfig`, and `assistant_model`, an argument of `generate`. Defaults come from
            `model.generation_config`; if that has no maximum length, it is 128 new tokens, and if it has no end token,
            it is the tokenizer's [SEP].

    Returns:
        For each text, in order, its `num_return_sequences` outputs, the best first, without special tokens.

    Raises:
        ValueError: the options contradict each other, one would have no effect, there are too few positions for the new
            tokens, or there is nothing to continue.
    """
    plan = make_plan(model, tokenizer, options)
    answers = answer(model, tokenizer, texts, plan, batch_size)
    if dropped := sum(one.dropped > 0 for one in answers):
        warnings.warn(
            f"{dropped} of {len(texts)} texts are too long for the model's positions or the tokenizer's "
            "model_max_length and were cut.",
            stacklevel=2,
        )
    return [one.outputs for one in answers]


def make_plan(model, tokenizer, options: dict, with_scores: bool = False) -> Plan:
    """The plan for these options. Raises ValueError as `generate_text` does, except for an invalid text."""
    effective = copy.deepcopy(model.generation_config)
    effective.update(**options, return_dict_in_generate=True)
    # The model's own fields may have no effect; those among the options must have one.
    effective.validate(strict=True, user_set_attributes={"do_sample", "num_beams", *options})
    assistant = options.get("assistant_model")
    arguments = {"tokenizer": tokenizer, **special_ids(tokenizer, effective, options), **options}

    limit = min(one.config.max_position_embeddings for one in (model, assistant) if one is not None)
    opening, _ = special_tokens(tokenizer)
    continues = not model.config.is_encoder_decoder
    room, most = limit, limit - (len(opening) if continues else 0)
    if options.get("max_length") is not None and "max_new_tokens" not in options:
        effective.max_new_tokens = arguments["max_new_tokens"] = None  # the model's own would take precedence
    elif effective.max_new_tokens is None and effective.max_length is None:
        default = min(DEFAULT_NEW_TOKENS, most // 2 if continues else most)
        effective.max_new_tokens = arguments["max_new_tokens"] = default
    new = effective.max_new_tokens
    if new is not None:
        if new > most:
            raise ValueError(f"max_new_tokens is {new}; expected at most {most}, with {limit} positions.")
        if (effective.min_new_tokens or 0) > new:
            raise ValueError(f"min_new_tokens is {effective.min_new_tokens}; expected at most max_new_tokens, {new}.")
        room = limit + 1 - new if continues else limit  # the last token is not fed back
    if not continues:
        room = min(room, tokenizer.model_max_length)
    num_beams = effective.num_beams or 1
    if assistant is not None and num_beams > 1:
        raise ValueError(
            f"num_beams is {num_beams}; expected 1, because an assistant supports greedy decoding and sampling only."
        )
    # Beam search returns the scores of its outputs only together with those of all tokens.
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
    model,
    tokenizer,
    texts: list[str],
    plan: Plan,
    batch_size: int,
    show: Callable[[str], None] | None = None,
) -> list[Answer]:
    """Generates the outputs of each text.

    Args:
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
    tensors = [torch.tensor(ids) for _, ids in rows]
    # A decoder continues at the end of the text, so its padding is on the left.
    pad = partial(pad_sequence, batch_first=True, padding_side="right" if is_seq2seq else "left")
    input_ids = pad(tensors, padding_value=tokenizer.pad_token_id or 0).to(model.device)
    attention_mask = pad([torch.ones_like(ids) for ids in tensors]).to(model.device)
    decoders = [
        partial(decode, tokenizer) if is_seq2seq else partial(decode_continued, tokenizer, text, ids)
        for text, ids in rows
    ]
    result = model.generate(
        input_ids=input_ids,
        attention_mask=attention_mask,
        streamer=None if show is None else WordStreamer(decoders[0], show),
        **plan.arguments,
    )
    sequences = result.sequences[:, 0 if is_seq2seq else input_ids.shape[1] :].tolist()
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
            self._show_to(text, len(text.rsplit(" ", 2)[0]))

    def end(self) -> None:
        text = self.read(self.ids)
        self._show_to(text, len(text))

    def _show_to(self, text: str, end: int) -> None:
        if end > self.shown:
            self.show(text[self.shown : end])
            self.shown = end


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
    check_source(source)
    fields = read_config(source)
    if not trust_remote_code:
        check_code(source, fields)
    model_class = generator_class(source, fields, trust_remote_code)
    tokenizer = open_tokenizer(source, trust_remote_code=trust_remote_code)
    advice = "Train it as a generator first, and save that."
    model = open_model(model_class, source, advice=advice, trust_remote_code=trust_remote_code, dtype=dtype)
    return tokenizer, to_device(model, device)


def generator_class(source: str, fields: dict, trust_remote_code: bool):
    """The class that opens a checkpoint with these fields in its config.json.

    Raises:
        ValueError: it is of another kind of model, or an encoder alone.
    """
    kind = fields.get("model_type")
    is_ours = kind not in ("bert", "encoder-decoder")
    if is_ours:
        if kind == "scratchbert" and "auto_map" not in fields:  # no code beside the weights
            import_package()
        config = AutoConfig.from_pretrained(source, trust_remote_code=trust_remote_code)
        if not any(cls.__name__ == "ScratchBertConfig" for cls in type(config).__mro__):
            raise ValueError(f"It has model_type {kind!r}; expected a ScratchBert or a BERT.")
        fields = config.to_dict()
    if fields.get("is_encoder_decoder") or kind == "encoder-decoder":
        return AutoModelForSeq2SeqLM if is_ours else import_package().ScratchBertForConditionalGeneration
    if fields.get("is_decoder"):
        return AutoModelForCausalLM if is_ours else import_package().ScratchBertForCausalLM
    raise ValueError(
        "It is an encoder, which generates nothing; expected a generator. Make one of its weights with "
        "ScratchBertForConditionalGeneration.from_bert(…), train it, and save it."
    )


def open_assistant(source: str, tokenizer, model, dtype: str, device: str | None, trust_remote_code: bool = False):
    """A model that proposes tokens to `model`, for assisted decoding.

    Raises:
        ValueError: the two are of different kinds or have different vocabularies.
        OSError, ImportError: as `open_generator`.
    """
    its_tokenizer, assistant = open_generator(source, dtype, device, trust_remote_code)
    if assistant.config.is_encoder_decoder != model.config.is_encoder_decoder:
        raise ValueError(
            "Either the model or its assistant has an encoder, and the other has none; expected two of a kind."
        )
    if its_tokenizer.get_vocab() != tokenizer.get_vocab():
        raise ValueError("Its vocabulary differs from the model's, so it cannot propose tokens.")
    return assistant
