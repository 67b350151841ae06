"""Fine-tuning of generators on pairs of texts, from a BERT, a generator, or random weights."""

import torch
from accelerate.utils import DistributedType
from torch import nn
from transformers import DataCollatorForSeq2Seq, GenerationConfig

from modeling_scratchbert import ScratchBertConfig, ScratchBertForConditionalGeneration
from toolkit.checkpoint import config_fields, kind_of
from toolkit.cli import shortened
from toolkit.finetuning.checks import check_lengths, check_room, config_file_fields, tokenizer_of
from toolkit.finetuning.output import has_checkpoint
from toolkit.finetuning.rows import map_rows
from toolkit.finetuning.settings import named_values
from toolkit.finetuning.task import Evaluation, Task, sources, without
from toolkit.finetuning.task_settings import SEQ2SEQ_METRICS, Seq2SeqSettings
from toolkit.hub import check_vocabulary
from toolkit.metrics import compute, load, mean_loss, perplexity
from toolkit.row_files import find_column, text_of

SOURCES = ("source", "text", "article", "document", "en")
TARGETS = ("target", "summary", "highlights", "translation", "de")
LESS_IS_BETTER = {*SEQ2SEQ_METRICS["error_rate"], *SEQ2SEQ_METRICS["loss"]}
SPECIAL_IDS = ("bos_token_id", "decoder_start_token_id", "eos_token_id", "pad_token_id")
SAMPLES = 3  # outputs that each evaluation prints
IGNORED = -100  # the label that torch's cross-entropy ignores


class Seq2Seq(Task):
    """Pairs of texts."""

    name = "text2text-generation"

    def __init__(self, settings: Seq2SeqSettings, accelerator):
        super().__init__(settings, accelerator)
        sources(settings)  # raises before the weights are read if a file is missing
        self.text_metrics = [name for name in settings.metrics if name != "loss"]
        for name in self.text_metrics:
            load(name)  # raises before the training if a library is missing
        self.metric = settings.metric or SEQ2SEQ_METRICS[settings.metrics[0]][0]
        self.greater_is_better = self.metric not in LESS_IS_BETTER
        self.tokenizer = self.open_tokenizer()
        self.model = self.make_model()
        check_vocabulary(len(self.tokenizer), self.model.config)
        check_lengths(settings, ["max_length", "max_target_length", "max_new_tokens"], self.model.config)
        check_room("max_length", settings, self.tokenizer)
        self.set_generation()
        for split, rows in self.read_splits():
            self.splits[split], self.row_counts[split] = self.encode(rows), len(rows)
        self.train_set = self.splits.pop("train", None)
        if self.text_metrics and "validation" in self.splits and not has_checkpoint(settings):
            self.report_changed_targets(self.splits["validation"])
        self.pad = DataCollatorForSeq2Seq(self.tokenizer, self.model, label_pad_token_id=IGNORED)

    # -- data

    def open_tokenizer(self):
        """The tokenizer.

        Raises:
            OSError: there is none.
            ValueError: a special token is missing, or is not where BERT's tokenizers put it.
        """
        named = self.settings.tokenizer or self.settings.model
        # Padding on the left would be between the start token and the target.
        tokenizer = tokenizer_of(self.settings, padding_side="right")
        for role in ("pad_token", "cls_token", "sep_token"):
            if getattr(tokenizer, role) is None:
                raise ValueError(f"the tokenizer {named} has no {role}; expected BERT's special tokens")
        if tokenizer("").input_ids != [tokenizer.cls_token_id, tokenizer.sep_token_id]:
            raise ValueError(
                f"the tokenizer {named} does not put [CLS] before and [SEP] after a text; expected one like BERT's"
            )
        # With which it is saved: generate.py cuts sources as the evaluations do.
        tokenizer.model_max_length = self.settings.max_length
        return tokenizer

    def read(self, source):
        """The rows of a split: source and target."""
        settings, columns = self.settings, source.columns()
        # The column that is named for the target is no default for the source.
        others = [name for name in columns if settings.source_column or name != settings.target_column]
        first = find_column(others, settings.source_column, SOURCES, "the source (--source_column)")
        others = [name for name in columns if name != first]
        second = find_column(others, settings.target_column, TARGETS, "the target (--target_column)")

        def check(row: dict) -> dict:
            return {"source": text_of(row, first), "target": text_of(row, second)}

        return self.load(source, check)

    def encode(self, rows):
        """The rows with the inputs of the model. Labels lack [CLS], with which the decoder starts."""

        def ids(texts: list[str], length: int) -> list[list[int]]:
            return self.tokenizer(texts, truncation=True, max_length=length)["input_ids"]

        def encode(batch: dict) -> dict:
            inputs = ids(batch["source"], self.settings.max_length)
            labels = [target[1:] for target in ids(batch["target"], self.settings.max_target_length + 1)]
            lengths = [len(source) + len(target) for source, target in zip(inputs, labels, strict=True)]
            return {"input_ids": inputs, "labels": labels, "length": lengths}

        return map_rows(rows, encode, batched=True)

    def report_changed_targets(self, examples) -> None:
        """Prints how many targets no output can equal, because their decoded tokens are another text."""
        pairs = zip(examples["target"], self.decode(examples["labels"][:]), strict=True)
        if changed := [pair for pair in pairs if pair[0] != pair[1]]:
            target, decoded = map(shortened, changed[0])
            self.accelerator.print(
                f"{len(changed)} of {len(examples)} validation targets differ from their decoded tokens, e.g. "
                f"{target!r} and {decoded!r}; text metrics compare with the targets as they are written"
            )

    def decode(self, ids) -> list[str]:
        return self.tokenizer.batch_decode(ids, skip_special_tokens=True)

    def collate(self, examples: list[dict]) -> dict[str, torch.Tensor]:
        """`input_ids` and `attention_mask`, `(B, S)`; `decoder_input_ids` and `labels`, -100 for padding, `(B, T)`."""
        return {**self.pad([{name: example[name] for name in ("input_ids", "labels")} for example in examples])}

    def shown(self, example):
        return f"{super().shown(example)} → {super().shown({'input_ids': example['labels']})}"

    # -- model

    def make_model(self) -> ScratchBertForConditionalGeneration:
        """The model, from random weights, a generator or a BERT.

        Raises:
            ValueError: a flag does not apply to the kind of --model.
        """
        settings, cls = self.settings, ScratchBertForConditionalGeneration
        fields = self.overridden_fields()
        names = ("tie_encoder_decoder", "num_decoder_layers")
        decoder = {name: getattr(settings, name) for name in names if getattr(settings, name)}
        is_generator = settings.config_file is None and is_encoder_decoder(settings.model)
        if is_generator and decoder:
            raise ValueError(
                f"--{next(iter(decoder))} is given and {settings.model} has a decoder; expected an encoder"
            )
        if not is_generator and settings.lora_rank:
            raise ValueError(
                "--lora_rank is given and --model is not a generator, so the cross-attention would stay random"
            )
        if settings.config_file is not None and settings.freeze is not None:
            raise ValueError("--freeze is given with --config_file, whose weights are random; expected --model")
        # --tokenizer may have other ids than the generator was trained with.
        tokenizer, roles = self.tokenizer, {"decoder_start": "cls", "eos": "sep", "pad": "pad"}
        special = {f"{ours}_token_id": getattr(tokenizer, f"{its}_token_id") for ours, its in roles.items()}
        given = {"padding_free": True, **special, **decoder, **fields}
        if settings.config_file is None:
            # Before its ids become those of the tokenizer.
            check_vocabulary(len(tokenizer), ScratchBertConfig.from_pretrained(settings.model))
            return self.open_model(cls.from_pretrained if is_generator else cls.from_bert, **given)
        config_file_fields(settings.config_file, ScratchBertConfig)  # raises for unknown fields
        given = {"is_encoder_decoder": True, "vocab_size": len(tokenizer), **given}
        return cls(ScratchBertConfig.from_pretrained(settings.config_file, **given))

    def overridden_fields(self) -> dict:
        """The fields of --config_overrides.

        Raises:
            ValueError: one is not NAME=VALUE, there is no such field, or it is one that cannot be chosen.
        """
        fields = named_values("config_overrides", self.settings.config_overrides)
        if fixed := sorted(fields.keys() & {"is_decoder", "is_encoder_decoder", "model_type"}):
            raise ValueError(
                f"--config_overrides has {fixed[0]!r}; expected other fields, "
                "because the model is always an encoder-decoder"
            )
        known = {*ScratchBertConfig().to_dict(), "padding_free"}  # which is not saved
        if unknown := sorted(fields.keys() - known):
            raise ValueError(f"--config_overrides has {unknown[0]!r}; expected FIELD=VALUE, of ScratchBertConfig")
        return fields

    def set_generation(self) -> None:
        """Sets the model's generation settings, with which it is also saved: the special ids and the flags. Other
        settings of the base model are dropped, and named if the run starts anew.

        Raises:
            ValueError: they contradict each other.
        """
        settings, earlier = self.settings, self.model.generation_config.to_diff_dict()
        ids = {name: getattr(self.model.config, name) for name in SPECIAL_IDS}
        penalty = settings.length_penalty if settings.num_beams > 1 else None
        generation = GenerationConfig(
            **ids,
            max_new_tokens=settings.max_new_tokens,
            do_sample=False,
            num_beams=settings.num_beams,
            length_penalty=penalty,
        )
        generation.validate(strict=True)  # saving the model raises otherwise, after the training
        self.model.generation_config = generation
        # Of these, each model has its own or they change no output.
        not_named = {*SPECIAL_IDS, "max_length", "max_new_tokens", "transformers_version", "use_cache"}
        dropped = [
            name
            for name, value in earlier.items()
            if name not in not_named
            and not name.startswith("_")
            and value not in (False, getattr(generation, name, None))
        ]
        if dropped and not has_checkpoint(settings):
            self.accelerator.print(
                f"{settings.model} has {', '.join(sorted(dropped))} in generation_config.json, which the new model "
                "does not take over; flags set --num_beams, --length_penalty and --max_new_tokens"
            )

    # -- loss and metrics

    def counts(self, batch):
        return (batch["labels"] != IGNORED).sum()[None]

    def losses(self, model, batch):
        return self.token_losses(model, batch, label_smoothing=self.settings.label_smoothing).sum()[None]

    def token_losses(self, model, batch: dict, **options) -> torch.Tensor:
        """The cross-entropy of each label, `(B, T)`, 0 for padding."""
        scores = model(**without(batch, "labels"), use_cache=False).logits.float().transpose(1, 2)
        return nn.functional.cross_entropy(scores, batch["labels"], ignore_index=IGNORED, reduction="none", **options)

    def evaluate(self, model, split):
        def forward(model, batch):
            sums = [self.token_losses(model, batch).double().sum().item(), self.counts(batch).item()]
            texts = self.generate(model, batch) if self.text_metrics else [None] * len(batch["labels"])
            return texts, sums

        texts, sums = self.predict(model, split, forward)
        metrics = {"loss": mean_loss(*sums), "perplexity": perplexity(*sums)}
        if not self.text_metrics:
            return Evaluation(metrics, [])
        rows = self.splits[split].select_columns(["source", "target", "place", "columns"])
        found = compute(self.text_metrics, *items(rows["source"], rows["target"], texts))
        return Evaluation(found | metrics, self.joined(rows, [{"prediction": text} for text in texts]))

    def samples(self, predictions):
        return [
            f"{shortened(row['source'])} → {shortened(row['prediction'])}  (target: {shortened(row['target'])})"
            for row in predictions[:SAMPLES]
        ]

    def generate(self, model, batch: dict) -> list[str]:
        """The text that the model generates for each source."""
        # All processes gather the weights of a sharded model together, so none may finish before the others.
        sharded = self.accelerator.distributed_type in (DistributedType.FSDP, DistributedType.DEEPSPEED)
        inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
        inputs["synced_gpus"] = sharded and self.accelerator.num_processes > 1
        return self.decode(self.accelerator.unwrap_model(model).generate(**inputs))


def is_encoder_decoder(model: str) -> bool:
    """Whether a checkpoint has an encoder and a decoder."""
    fields = config_fields(model)
    return bool(fields.get("is_encoder_decoder")) or kind_of(fields) == "encoder-decoder"


def items(sources, targets, texts) -> tuple[list[str], list[list[str]]]:
    """Rows with the same source as one item: its first text, and all its targets."""
    written, right = {}, {}
    for source, target, text in zip(sources, targets, texts, strict=True):
        written.setdefault(source, text)
        right.setdefault(source, []).append(target)
    return list(written.values()), list(right.values())
