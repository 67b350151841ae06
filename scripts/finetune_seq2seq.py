#!/usr/bin/env python
"""Trains a generator, text in and text out, on pairs of texts. It starts from a BERT's weights, in an encoder and a
decoder (Rothe et al. 2020), from a generator that there is already, or from random weights.

    finetune_seq2seq.py --model google-bert/bert-base-uncased --tie_encoder_decoder true --train_file train.jsonl
                        --validation_file val.jsonl --max_length 512 --num_beams 4 --output my-summariser
    accelerate launch --config_file configuration/two_process.yaml scripts/finetune_seq2seq.py …

From random weights, to pronounce English words:

    cmudict_pairs.py cmudict
    train_tokenizer.py --train_file cmudict/train.jsonl --column source target --pre_split whitespace
                       --min_frequency 100 --output cmudict-tokenizer
    finetune_seq2seq.py configuration/recipes/cmudict.yaml --output g2p-model
    generate.py g2p-model hello            HH AH L OW

Files have a column of sources (source, text, article, document, en) and one of targets (target, summary, highlights,
translation, de), or columns that are named.

Evaluations generate, with beam search where --num_beams says so, as the finished model does. What it writes is compared
with the targets as they stand in the file. Rows that have the same source are one item with several right answers, and
the closest counts. `loss` and `perplexity` are those of a target token, every row for itself, without label smoothing.
With --metrics error_rate, token_error_rate is the phoneme error rate where targets are phonemes with spaces between,
the word error rate where they are sentences; item_error_rate is the share of sources with any error.

--output gets the model in the Hub's form with its tokenizer, a model card, metrics.json, curves.png, recipe.yaml and
the checkpoints.

Exit code: 0 done, 1 the training broke off, 2 bad usage or data, 143 stopped by SIGTERM (--resume continues).
"""

import json
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from accelerate.utils import DistributedType
from torch import nn
from transformers import AutoTokenizer, DataCollatorForSeq2Seq

from modeling_scratchbert import ScratchBertConfig, ScratchBertForConditionalGeneration
from modeling_scratchbert.checkpoints import raw_config

import training
from model_classes import kind_of
from training import FineTuning, sources
from training_data import columns_of, find_column, load_rows, text_of
from training_metrics import compute, load, perplexity
from training_settings import Settings, flag

SOURCES = ("source", "text", "article", "document", "en")
TARGETS = ("target", "summary", "highlights", "translation", "de")

# What each of --metrics gives; the first says which model is best.
METRICS = {
    "rouge": ["rougeL", "rouge1", "rouge2", "rougeLsum"],
    "sacrebleu": ["bleu", "chrf"],
    "error_rate": ["token_error_rate", "item_error_rate"],
    "loss": ["loss", "perplexity"],
}
LESS_IS_BETTER = {*METRICS["error_rate"], *METRICS["loss"]}

NO_LABEL = -100


@dataclass
class Seq2SeqSettings(Settings):
    """Of `finetune_seq2seq`."""

    config_file: str | None = flag(
        None, "instead of --model: random weights, of the size in a file such as configuration/tiny.json"
    )
    config_overrides: list[str] | None = flag(None, "NAME=VALUE, fields of the configuration, such as norm_first=true")
    tokenizer: str | None = flag(None, "a folder, such as train_tokenizer.py writes, or hub id; left out: the model's")
    num_decoder_layers: int | None = flag(None, "blocks of the decoder; left out: as many as the encoder has")
    tie_encoder_decoder: bool = flag(False, "the decoder's blocks are the encoder's, but for the cross-attention")
    source_column: str | None = flag(None, f"left out: the first there is of {', '.join(SOURCES)}")
    target_column: str | None = flag(None, f"left out: the first there is of {', '.join(TARGETS)}")
    max_target_length: int = flag(128, "tokens to a target, at most, [SEP] included; longer ones are cut")
    label_smoothing: float = flag(0.0, "share of each label's weight that the whole vocabulary gets")
    num_beams: int = flag(1, "of the evaluations and of the finished model; 1: greedy")
    length_penalty: float = flag(1.0, "of beam search: the larger, the longer the outputs")
    max_new_tokens: int | None = flag(None, "tokens to an output, at most; left out: as --max_target_length")
    metrics: list[str] | None = flag(
        None, f"some of {', '.join(METRICS)}; left out: rouge; loss alone: nothing is generated"
    )
    metric: str | None = flag(
        None, "which value says what model is best; left out: the first of the first of --metrics"
    )

    def __post_init__(self):
        super().__post_init__()
        self.metrics = self.metrics or ["rouge"]
        if unknown := [name for name in self.metrics if name not in METRICS]:
            raise ValueError(f"--metrics has {unknown[0]!r}; there are {', '.join(METRICS)}")
        values = [value for name in [*self.metrics, "loss"] for value in METRICS[name]]
        if self.metric is not None and self.metric not in values:
            raise ValueError(f"--metric is {self.metric!r}; --metrics {' '.join(self.metrics)} has {', '.join(values)}")
        for name in ("max_target_length", "num_beams", "max_new_tokens", "num_decoder_layers"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ValueError(f"--{name} is {value}; it wants 1 or more")
        if not 0 <= self.label_smoothing < 1:
            raise ValueError(f"--label_smoothing is {self.label_smoothing}; it wants 0 or more, and less than 1")
        if self.length_penalty != 1 and self.num_beams == 1:
            raise ValueError(f"--length_penalty is {self.length_penalty}; it goes with --num_beams of 2 or more")
        if self.padding_free_collation:
            raise ValueError("--padding_free_collation is for encoders alone: a decoder has padding")
        if self.implementation == "bert":
            raise ValueError("--implementation bert: EncoderDecoderModel is not trained here; it wants scratchbert")
        if None not in (self.config_file, self.model):
            raise ValueError("--model and --config_file are both given; weights are of the one, or random")
        if self.config_file is not None and not Path(self.config_file).is_file():
            raise ValueError(f"--config_file {self.config_file}: there is no such file")
        if self.config_file is not None and self.tokenizer is None:
            raise ValueError("--tokenizer is missing: a --config_file has none")
        if self.max_new_tokens is None:
            self.max_new_tokens = self.max_target_length


class Seq2Seq(FineTuning):
    """Pairs of texts."""

    # The Hub's name for text in, text out.
    name = "text2text-generation"

    def __init__(self, settings: Seq2SeqSettings, accelerator):
        super().__init__(settings, accelerator)
        found = sources(settings)  # a file that is missing shows before the weights are read
        self.judges = [name for name in settings.metrics if name != "loss"]
        for name in self.judges:
            load(name)  # a package that is missing shows before the training
        self.metric = settings.metric or METRICS[settings.metrics[0]][0]
        self.greater_is_better = self.metric not in LESS_IS_BETTER
        self.tokenizer = self.open_tokenizer()
        self.model = self.make_model()
        self.check_sizes()
        self.set_generation()
        for split, source in found.items():
            self.splits[split] = self.encode(self.read(source))
        self.train_set = self.splits.pop("train")
        self.pad = DataCollatorForSeq2Seq(self.tokenizer, self.model, label_pad_token_id=NO_LABEL)

    # -- data

    def open_tokenizer(self):
        """Raises:
        ValueError: a special token is missing, or is not where BERT has it.
        """
        named = self.settings.tokenizer or self.settings.model
        # On the left there would be padding between the start token and the target.
        tokenizer = AutoTokenizer.from_pretrained(named, padding_side="right")
        for role in ("pad_token", "cls_token", "sep_token"):
            if getattr(tokenizer, role) is None:
                raise ValueError(f"the tokenizer {named} has no {role}; a generator wants BERT's special tokens")
        if tokenizer("").input_ids != [tokenizer.cls_token_id, tokenizer.sep_token_id]:
            raise ValueError(f"the tokenizer {named} does not put [CLS] before a text and [SEP] after it, as BERT's do")
        return tokenizer

    def read(self, source):
        """The rows of a split: source and target."""
        settings, columns = self.settings, columns_of(source)
        first = find_column(columns, settings.source_column, SOURCES, "the source (--source_column)")
        others = [name for name in columns if name != first]
        second = find_column(others, settings.target_column, TARGETS, "the target (--target_column)")

        def check(row: dict) -> dict:
            return {"source": text_of(row, first), "target": text_of(row, second)}

        return load_rows(source, check, settings.on_bad_row, self.accelerator.print)

    def encode(self, rows):
        """The rows with what the model takes. Labels do not have [CLS], which the decoder starts from."""

        def ids(texts: list[str], length: int) -> list[list[int]]:
            return self.tokenizer(texts, truncation=True, max_length=length)["input_ids"]

        def encode(batch: dict) -> dict:
            inputs = ids(batch["source"], self.settings.max_length)
            labels = [target[1:] for target in ids(batch["target"], self.settings.max_target_length + 1)]
            lengths = [len(source) + len(target) for source, target in zip(inputs, labels, strict=True)]
            return {"input_ids": inputs, "labels": labels, "length": lengths}

        return rows.map(encode, batched=True)

    def collate(self, examples: list[dict]) -> dict[str, torch.Tensor]:
        """`input_ids` and `attention_mask`, `(B, S)`; `decoder_input_ids` and `labels`, -100 for padding, `(B, T)`."""
        return {**self.pad([{name: example[name] for name in ("input_ids", "labels")} for example in examples])}

    # -- model

    def make_model(self) -> ScratchBertForConditionalGeneration:
        """From random weights, a generator or a BERT.

        Raises:
            ValueError: a flag does not go with what --model is.
        """
        settings, cls = self.settings, ScratchBertForConditionalGeneration
        fields = self.config_fields()
        halves = {"tie_encoder_decoder": settings.tie_encoder_decoder or None,
                  "num_decoder_layers": settings.num_decoder_layers}  # fmt: skip
        halves = {name: value for name, value in halves.items() if value is not None}
        is_generator = settings.config_file is None and has_two_halves(settings.model)
        if is_generator and halves:
            raise ValueError(f"--{next(iter(halves))}: {settings.model} has an encoder and a decoder already")
        if not is_generator and (settings.lora_rank or settings.freeze not in (None, "embeddings")):
            name = "lora_rank" if settings.lora_rank else "freeze"
            raise ValueError(
                f"--{name} wants a --model that is a generator: here the cross-attention would stay random"
            )
        if is_generator:
            return cls.from_pretrained(settings.model, **fields)
        special = {
            "decoder_start_token_id": self.tokenizer.cls_token_id,
            "eos_token_id": self.tokenizer.sep_token_id,
            "pad_token_id": self.tokenizer.pad_token_id,
        }
        if settings.config_file is None:
            return cls.from_bert(settings.model, **special, **halves, **fields)
        special |= {"is_encoder_decoder": True, "vocab_size": len(self.tokenizer)}
        return cls(ScratchBertConfig.from_pretrained(settings.config_file, **{**special, **halves, **fields}))

    def config_fields(self) -> dict:
        """Those of --config_overrides. A value is JSON, or else a string.

        Raises:
            ValueError: one is not NAME=VALUE, or there is no such field.
        """
        fields, known = {}, set(ScratchBertConfig().to_dict())
        for override in self.settings.config_overrides or []:
            name, equals, value = override.partition("=")
            if not equals or name not in known:
                raise ValueError(f"--config_overrides has {override!r}; it wants FIELD=VALUE, of ScratchBertConfig")
            try:
                fields[name] = json.loads(value)
            except json.JSONDecodeError:
                fields[name] = value
        return fields

    def check_sizes(self) -> None:
        """Raises:
        ValueError: the model has too few words or positions.
        """
        config = self.model.config
        if len(self.tokenizer) > config.vocab_size:
            raise ValueError(f"the tokenizer has {len(self.tokenizer)} tokens, and the model {config.vocab_size} words")
        for name in ("max_length", "max_target_length", "max_new_tokens"):
            if (value := getattr(self.settings, name)) > config.max_position_embeddings:
                raise ValueError(f"--{name} is {value}; the model has {config.max_position_embeddings} positions")

    def set_generation(self) -> None:
        """Has the model, here and as it is saved, generate as the flags say."""
        settings, generation = self.settings, self.model.generation_config
        generation.update(max_new_tokens=settings.max_new_tokens, max_length=None, do_sample=False)
        generation.num_beams = settings.num_beams
        generation.length_penalty = settings.length_penalty if settings.num_beams > 1 else None
        for name in ("decoder_start_token_id", "eos_token_id", "pad_token_id"):
            if getattr(generation, name) is None:  # as where an EncoderDecoderModel was saved
                setattr(generation, name, getattr(self.model.config, name))

    # -- loss and metrics

    def counts(self, batch):
        return (batch["labels"] != NO_LABEL).sum()[None]

    def losses(self, model, batch):
        smoothing = self.settings.label_smoothing
        return self.token_losses(model, batch, label_smoothing=smoothing).sum()[None]

    def token_losses(self, model, batch: dict, **options) -> torch.Tensor:
        """The cross-entropy of each label, `(B, T)`, 0 for padding."""
        # The model is not given the labels: it would compute a loss of its own.
        logits = model(**{name: value for name, value in batch.items() if name != "labels"}, use_cache=False).logits
        scores = logits.float().transpose(1, 2)
        return nn.functional.cross_entropy(scores, batch["labels"], ignore_index=NO_LABEL, reduction="none", **options)

    def evaluate(self, model, split):
        def forward(model, batch):
            losses = self.token_losses(model, batch).sum(1)
            counts = (batch["labels"] != NO_LABEL).sum(1)
            texts = self.generate(model, batch) if self.judges else [None] * len(losses)
            return list(zip(losses.tolist(), counts.tolist(), texts, strict=True))

        losses, counts, texts = zip(*self.predict(model, split, forward), strict=True)
        metrics = {"loss": sum(losses) / sum(counts), "perplexity": perplexity(sum(losses), sum(counts))}
        if not self.judges:
            return metrics
        rows = self.splits[split]
        predictions, references = items(rows["source"], rows["target"], texts)
        return compute(self.judges, predictions, references) | metrics

    def generate(self, model, batch: dict) -> list[str]:
        """What the model writes for each source."""
        # All processes together assemble the pieces of a sharded model, so none may be done before the others.
        sharded = self.accelerator.distributed_type in (DistributedType.FSDP, DistributedType.DEEPSPEED)
        ids = self.accelerator.unwrap_model(model).generate(
            input_ids=batch["input_ids"],
            attention_mask=batch["attention_mask"],
            synced_gpus=sharded and self.accelerator.num_processes > 1,
        )
        return self.tokenizer.batch_decode(ids, skip_special_tokens=True)


def has_two_halves(model: str) -> bool:
    """Whether a checkpoint has an encoder and a decoder already."""
    fields, _ = raw_config(model)
    return bool(fields.get("is_encoder_decoder")) or kind_of(fields) == "encoder-decoder"


def items(sources, targets, texts) -> tuple[list[str], list[list[str]]]:
    """Rows with the same source as one item: what was written for it first, and all targets."""
    written, right = {}, {}
    for source, target, text in zip(sources, targets, texts, strict=True):
        written.setdefault(source, text)
        right.setdefault(source, []).append(target)
    return list(written.values()), list(right.values())


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code."""
    return training.main(Seq2SeqSettings, __doc__, Seq2Seq, argv)


if __name__ == "__main__":
    sys.exit(main())
