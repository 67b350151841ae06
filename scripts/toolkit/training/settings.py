"""The flags of the training commands, and reading them from a YAML recipe and from the command line.

Nothing here imports torch or transformers, so that `--help` answers at once.
"""

import argparse
import importlib
import json
import math
import operator
import sys
import types
from dataclasses import MISSING, Field, asdict, dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal, Union, get_args, get_origin, get_type_hints

import yaml

from toolkit.cli import Parser, continuing_when_output_is_closed
from toolkit.files import find_shipped, looks_like_a_path
from toolkit.paths import FILES, with_paths

# The first group of `--help`. The others are in the order of GROUPS.
MOST_USED = ("model", "output", "train_file", "validation_file", "max_length", "batch_size", "epochs", "learning_rate",
             "seed", "resume")  # fmt: skip
GROUPS = ("most used", "data", "model", "training", "evaluation", "output")

# How `--help` shows the values of these flags; others are VALUE, or N or X for numbers.
METAVARS = dict.fromkeys(FILES, "FILE") | {"output": "FOLDER", "model": "MODEL", "tokenizer": "TOKENIZER",
                                           "dataset": "DATASET", "push_to_hub": "REPO"}  # fmt: skip

# Flags that may differ between a run and its continuation: they change no weight.
FREE_TO_CHANGE = {"resume", "dry_run", "output", "trust_checkpoints", "trackers", "push_to_hub", "hub_private",
                  "keep_checkpoints", "log_steps", "save_steps", "eval_batch_size", "all_scores"}  # fmt: skip

# What --evaluate_only takes from the recipe of the run that made the model: how rows become inputs, and outputs become
# losses and metrics.
EVALUATED_WITH = {
    "implementation", "mixed_precision", "padding_free_collation", "eval_batch_size", "delimiter", "max_length",
    "stride", "problem", "text_column", "text_pair_column", "label_column", "label_separator", "class_weights",
    "label_smoothing", "scheme", "words_column", "tags_column", "label_all_pieces", "max_answer_length",
    "source_column", "target_column", "max_target_length", "num_beams", "length_penalty", "max_new_tokens",
    "metrics", "line_by_line", "next_sentence", "whole_word_masking", "all_scores"}  # fmt: skip

# The other flags that --evaluate_only uses.
EVALUATION_OF = {"model", "output", "evaluate_only", "validation_file", "test_file", "dataset", "dataset_config",
                 "validation_split", "test_split", "max_eval_samples", "on_bad_row", "null_threshold"}  # fmt: skip

# With --resume these may grow, once the run is finished.
EXTENDING = {"epochs", "max_steps"}

# Those of transformers that do not depend on a metric.
SCHEDULES = ("linear", "cosine", "cosine_with_restarts", "cosine_with_min_lr", "polynomial", "constant",
             "constant_with_warmup", "inverse_sqrt", "warmup_stable_decay")  # fmt: skip

# Before the values of a list in the parser's arguments: a value that begins with a hyphen is then not taken for a flag.
# No command line can have this character.
VALUE = "\0"

# Of a run, in its folder.
RECIPE = "recipe.yaml"

# What flags of the validation set require.
VALIDATION = "validation_file or validation_fraction"

# The limits of a value: the comparison that it must pass, and the limit in words.
LIMITS = {"minimum": (operator.ge, "{} or more"), "above": (operator.gt, "more than {}"),
          "maximum": (operator.le, "at most {}"), "below": (operator.lt, "less than {}")}  # fmt: skip


def flag(
    group: str, help: str, default: Any = None, *, alias: str | None = None, requires: str | None = None,
    excludes: str | None = None, before: Any = MISSING, **limits: float):  # fmt: skip
    """A field of the settings.

    Args:
        group, help: where `--help` has the flag, and what it says there.
        default: its value if it is not given.
        alias: another spelling.
        requires: the flag without which it would do nothing; or "problem=regression", the flag with this value. " or "
            separates several of which one is enough.
        excludes: the flag that cannot be given as well, or several, as in `requires`.
        before: the value in runs of versions that did not have the flag, if it is not the default.
        limits: those of its value, by their names in `LIMITS`.
    """
    before = default if before is MISSING else before
    rules = {"requires": requires, "excludes": excludes, "before": before, "limits": limits}
    return field(default=default, metadata={"group": group, "help": help, "alias": alias, **rules})


data_flag, model_flag, training_flag, evaluation_flag, output_flag = (partial(flag, group) for group in GROUPS[1:])


@dataclass
class Settings:
    """The flags of a training run. Each command adds its own flags, and names the `Task` that they are for."""

    task: ClassVar[str]  # "module:class", imported only when the flags are parsed

    model: str | None = model_flag("the BERT or ScratchBert to start from: a folder or hub id")
    implementation: Literal["scratchbert", "bert"] = model_flag("our classes, or those of transformers", "scratchbert")

    train_file: list[str] | None = data_flag(
        "files to train on: .csv, .tsv, .json, .jsonl, .txt, .conll or .parquet, each also as .gz or .zst; folders; or "
        "patterns such as 'data/*.csv'"
    )
    validation_file: list[str] | None = data_flag("files for evaluations during the training", excludes="dataset")
    test_file: list[str] | None = data_flag("files for one evaluation of the finished model", excludes="dataset")
    dataset: str | None = data_flag("instead of files: the hub id or folder of a dataset", excludes="train_file")
    dataset_config: str | None = data_flag("the configuration of --dataset", requires="dataset")
    train_split: str = data_flag("the training split of --dataset", "train", requires="dataset")
    validation_split: str | None = data_flag(
        "the validation split of --dataset; none: no evaluation", "validation", requires="dataset"
    )
    test_split: str | None = data_flag("the test split of --dataset", requires="dataset")
    validation_fraction: float | None = data_flag(
        "the share of the training set to use as the validation set, instead of --validation_file; of --problem "
        "single_label, the same share of each label", above=0, below=1, excludes="validation_file")  # fmt: skip
    split_seed: int = data_flag(
        "the random seed that draws --validation_fraction", 0, minimum=0, maximum=2**32 - 1,
        requires="validation_fraction")  # fmt: skip
    delimiter: str | None = data_flag(
        "of .csv, .tsv and .txt; default: comma, tab, and .txt is no table", excludes="dataset"
    )
    on_bad_row: Literal["stop", "skip"] = data_flag("what to do with an invalid row; skipped ones are listed", "stop")
    max_train_samples: int | None = data_flag("use only the first N valid rows of the training set", minimum=1)
    max_eval_samples: int | None = data_flag(
        "use only the first N valid rows of the validation set, and of the test set", minimum=1,
        requires=f"{VALIDATION} or test_file")  # fmt: skip
    max_length: int = data_flag("maximum tokens per sequence; longer ones are cut", 128, minimum=1)
    padding_free_collation: bool = data_flag(
        "batches are one row without padding (ScratchBert only)", False, requires="implementation=scratchbert"
    )

    batch_size: int = training_flag("sequences per batch, on each process", 32, minimum=1)
    gradient_accumulation_steps: int = training_flag("batches per update, on each process", 1, minimum=1)
    group_by_length: bool = training_flag(
        "batches of rows of similar length; otherwise drawn at random, which gives more padding", True
    )
    epochs: float = training_flag("passes over the training set; fractions such as 0.5 are supported", 3, above=0)
    max_steps: int | None = training_flag("number of updates, instead of --epochs", minimum=1)
    gradient_checkpointing: bool = training_flag(
        "compute activations again in the backward pass: less memory, slower", False
    )
    optimizer: Literal["adamw", "adafactor", "sgd"] = training_flag(
        "the optimizer of torch.optim; sgd has momentum 0.9", "adamw"
    )
    learning_rate: float = training_flag("the maximum learning rate", 5e-5, minimum=0)
    schedule: Literal[SCHEDULES] = training_flag("the learning-rate schedule, by transformers' name", "linear")
    lr_scheduler_kwargs: list[str] | None = training_flag(
        "arguments of the schedule, as NAME=VALUE, such as num_cycles=2 for cosine_with_restarts"
    )
    warmup_ratio: float = training_flag(
        "share of the updates during which the learning rate rises", 0.1, minimum=0, maximum=1
    )
    weight_decay: float = training_flag("AdamW's weight decay; not applied to biases and layer norms", 0.01, minimum=0)
    layer_decay: float = training_flag(
        "factor of the learning rate per layer away from the model head; 1: none", 1.0, minimum=0, maximum=1
    )
    max_grad_norm: float = training_flag("larger gradients are scaled to this norm; 0: never", 1.0, minimum=0)
    freeze: str | None = training_flag(
        "what is not trained: embeddings, encoder, or the number of lowest blocks; in an encoder-decoder, those of its "
        "encoder and what the decoder shares with it; weights that the checkpoint lacks are always trained"
    )
    lora_rank: int = training_flag(
        "train adapters of this rank (PEFT's LoRA) and the model head; 0: all weights", 0, minimum=0, excludes="freeze"
    )
    lora_alpha: float = training_flag("LoRA scales by this divided by the rank", 16, requires="lora_rank")
    lora_dropout: float = training_flag("dropout before the adapters", 0.0, minimum=0, maximum=1, requires="lora_rank")
    early_stopping: int | None = training_flag(
        "stop after this many evaluations without a better metric", minimum=1, requires=VALIDATION
    )
    mixed_precision: Literal["no", "fp16", "bf16"] | None = training_flag(
        "the precision of the computation; fp16 requires an accelerator device; default: as accelerate is configured"
    )
    seed: int = training_flag("the random seed", 0, minimum=0, maximum=2**32 - 1)  # as NumPy expects
    seeds: list[str] | None = training_flag(
        "two or more seeds: runs one after the other, with the mean and the standard deviation of their metrics; the "
        "model that is best on the validation set is saved", requires=VALIDATION, excludes="seed")  # fmt: skip

    evaluate_only: bool = evaluation_flag(
        "train nothing: evaluate --model on the validation and the test set. Flags that say how rows are read are "
        "those of its recipe.yaml, unless they are given",
        False,
        requires="validation_file or test_file",
    )
    eval_batch_size: int = evaluation_flag(
        "sequences per batch of an evaluation, on each process", 64, minimum=1, requires=f"{VALIDATION} or test_file"
    )
    eval_steps: int | None = evaluation_flag("updates between evaluations; default: after each epoch", minimum=1)

    output: str | None = output_flag("the folder to write; new, empty, or that of the run to --resume")
    save_steps: int | None = output_flag("updates between checkpoints; default: at each evaluation", minimum=1)
    keep_checkpoints: int = output_flag(
        "number of checkpoints to keep, in addition to the best; 0: none of them, once the run is finished", 2,
        minimum=0)  # fmt: skip
    resume: bool = output_flag(
        "continue the run in --output from its last checkpoint, if it has one; a finished run is extended by more "
        "--epochs or --max_steps", False)  # fmt: skip
    dry_run: bool = output_flag(
        "check model and data, show three rows, the lengths and an estimate of the time; write nothing", False
    )
    trust_checkpoints: bool = output_flag(
        "resume from checkpoints of DeepSpeed or sharded FSDP, which can run code when they are read", False,
        requires="resume")  # fmt: skip
    log_steps: int = output_flag("updates between points of the curves", 10, minimum=1)
    trackers: str = output_flag("where the run is logged: one of accelerate's trackers, all, or none", "tensorboard")
    push_to_hub: str | None = output_flag("the repository to push the finished model to: user/name")
    hub_private: bool = output_flag("make that repository private if it is new", False, requires="push_to_hub")

    def __post_init__(self):
        """Checks everything that does not depend on the data.

        Raises:
            ValueError: a flag is missing or invalid; the message names it, its value and what was expected.
        """
        if self.dataset is not None and self.validation_fraction is not None:
            self.validation_split = None if self.validation_split == "validation" else self.validation_split
        for each in fields(self):
            self.check(each)
        data = ("validation_file", "test_file") if self.evaluate_only else ("train_file",)
        for alternatives in (("model", "config_file"), ("output",), (*data, "dataset")):
            names = [name for name in alternatives if hasattr(self, name)]
            if all(getattr(self, name) is None for name in names):
                meaning = self.__dataclass_fields__[names[0]].metadata["help"]
                raise ValueError(f"--{' or --'.join(names)} is missing; expected {meaning}")
        if self.seeds is not None:
            wrong = [each for each in self.seeds if not each.isdecimal() or int(each) >= 2**32]
            if wrong or len(set(map(int, self.seeds))) < max(2, len(self.seeds)):
                raise ValueError(f"--seeds is {' '.join(self.seeds)}; expected two or more numbers, each once")
        if self.push_to_hub is not None and self.push_to_hub.count("/") != 1:
            raise ValueError(f"--push_to_hub is {self.push_to_hub}; expected user/name")
        for name in ("model", "tokenizer"):
            value = getattr(self, name, None)
            if value is not None and looks_like_a_path(value) and not Path(value).is_dir():
                raise ValueError(f"--{name} {value}: there is no such folder")
        if self.schedule == "constant" and self.warmup_ratio not in (0, defaults_of(self)["warmup_ratio"]):
            raise ValueError(
                f"--warmup_ratio is {self.warmup_ratio} with --schedule constant; expected constant_with_warmup"
            )

    def check(self, each: Field) -> None:
        """Raises ValueError if the value of a flag is not within its limits, or if the flag is given without one that
        it requires, or with one that it excludes."""
        name, value, rules = each.name, getattr(self, each.name), each.metadata
        given = "given" if value is True else " ".join(map(str, value)) if isinstance(value, list) else value
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"--{name} is {value}; expected a finite number")
        limits = [(*LIMITS[kind], limit) for kind, limit in rules["limits"].items()]
        if value is not None and not all(passes(value, limit) for passes, _, limit in limits):
            expected = " and ".join(text.format(limit) for _, text, limit in limits)
            raise ValueError(f"--{name} is {value}; expected {expected}")
        if value == each.default:
            return
        if rules["requires"] and not any(map(self.has, rules["requires"].split(" or "))):
            expected = self.spelled(rules["requires"])
            raise ValueError(f"--{name} is {given} without {expected}; expected {expected} with it")
        if self.evaluate_only and name not in EVALUATED_WITH | EVALUATION_OF:
            raise ValueError(
                f"--{name} is {given} with --evaluate_only, which does not use it; expected one of the two"
            )
        for other in rules["excludes"].split(" or ") if rules["excludes"] else ():
            if self.has(other):
                raise ValueError(f"--{name} and {self.spelled(other)} are both given; expected one of the two")

    def spelled(self, requirement: str) -> str:
        """A requirement as on the command line; of --dataset, with the splits in place of the files."""
        text = "--" + requirement.replace(" or ", " or --").replace("=", " ")
        if self.dataset is None:
            return text
        return text.replace("validation_file", "validation_split").replace("test_file", "test_split")

    def has(self, requirement: str) -> bool:
        """Whether a flag differs from its default; or, for "problem=regression", has this value, if the command has the
        flag. A split of --dataset is as good as a file."""
        name, equals, value = requirement.partition("=")
        if equals:
            return getattr(self, name, value) == value
        if self.dataset is not None and name in ("validation_file", "test_file"):
            return getattr(self, name.replace("_file", "_split")) not in (None, "none")
        return getattr(self, name) != defaults_of(self)[name]


def defaults_of(settings: Settings) -> dict[str, Any]:
    """The default of each flag."""
    return {each.name: each.default for each in fields(settings)}


@dataclass
class LabelSettings(Settings):
    """The flags for labels of sequences or tokens."""

    labels: list[str] | None = data_flag("the labels; default: those of the training set")
    class_weights: list[str] | None = training_flag(
        "the weight of each label, in the order of --labels; or balanced: inversely to its frequency",
        requires="problem=single_label or problem=multi_label")  # fmt: skip
    label_smoothing: float = training_flag(
        "share of each label's weight that is spread over all labels", 0.0, minimum=0, below=1,
        requires="problem=single_label")  # fmt: skip

    def __post_init__(self):
        super().__post_init__()
        has_order = self.labels is not None or self.evaluate_only  # that of the model
        if self.class_weights and self.class_weights != ["balanced"] and not has_order:
            raise ValueError("--class_weights has numbers and --labels is missing; expected --labels, in their order")
        if self.labels and len(self.labels) < 2 and self.has("problem=single_label"):
            raise ValueError(f"--labels is {self.labels[0]}; expected two labels or more")
        if self.labels and len(set(self.labels)) < len(self.labels):
            raise ValueError(f"--labels is {' '.join(self.labels)}; expected each label once")


@dataclass
class ClassificationSettings(LabelSettings):
    """The flags of `finetune_classification`."""

    task: ClassVar = "toolkit.training.classification:Classification"

    problem: Literal["single_label", "multi_label", "regression"] = data_flag("the kind of labels", "single_label")
    text_column: str | None = data_flag(
        "the column of the texts; default: text, sentence, sentence1, premise or question1"
    )
    text_pair_column: str | None = data_flag(
        "the column of the second texts; default: sentence2, hypothesis or question2, if there is one and "
        "--text_column is not given"
    )
    label_column: str | None = data_flag("the column of the labels; default: label, labels or score")
    label_separator: str = data_flag(
        "the separator between the labels of a row, for --problem multi_label in CSV or TSV", "|",
        requires="problem=multi_label")  # fmt: skip
    metric: str | None = evaluation_flag(
        "the metric that selects the best model; default: accuracy, f1 or pearson", requires=VALIDATION
    )
    all_scores: bool = output_flag(
        "write the scores of all labels into predictions_….jsonl", False,
        requires="problem=single_label or problem=multi_label")  # fmt: skip

    @property
    def metrics(self) -> list[str]:
        """The metrics of the problem; the first one selects the best model by default."""
        return {
            "single_label": ["accuracy", "f1", "matthews_correlation"],
            "multi_label": ["f1", "accuracy"],
            "regression": ["pearson", "spearman", "mean_squared_error"],
        }[self.problem]

    def __post_init__(self):
        super().__post_init__()
        if not self.label_separator:
            raise ValueError("--label_separator is empty; expected the text between two labels")
        if self.metric is not None and self.metric not in self.metrics:
            raise ValueError(f"--metric is {self.metric}; expected one of {', '.join(self.metrics)} for {self.problem}")
        if self.class_weights == ["balanced"] and self.problem == "multi_label":
            raise ValueError("--class_weights is balanced with --problem multi_label; expected single_label")


@dataclass
class TokenClassificationSettings(LabelSettings):
    """The flags of `finetune_token_classification`."""

    task: ClassVar = "toolkit.training.token_classification:TokenClassification"

    max_length: int = data_flag("tokens per window; longer rows are read in several", 128, minimum=1)
    stride: int | None = data_flag(
        "tokens that two windows of a row share; default: a quarter of --max_length", minimum=0
    )
    scheme: Literal["iob2", "plain"] = data_flag("the tags: entities as B-TYPE, I-TYPE and O; or any tags", "iob2")
    words_column: str | None = data_flag("the column of the words; default: tokens or words")
    tags_column: str | None = data_flag("the column of the tags; default: tags, ner_tags or labels")
    label_all_pieces: bool = training_flag("train on all pieces of a word (I-PER after B-PER)", False)
    metric: Literal["f1", "accuracy"] = evaluation_flag(
        "the metric that selects the best model", "f1", requires=VALIDATION
    )

    def __post_init__(self):
        super().__post_init__()
        self.stride = self.max_length // 4 if self.stride is None else self.stride
        if self.labels and self.scheme == "iob2":
            wrong = [f"{tag!r} is one of them" for tag in self.labels if not is_iob_tag(tag)]
            if wrong or "O" not in self.labels:
                problem = (wrong or ["O is missing"])[0]
                raise ValueError(f"--labels is invalid: {problem}; expected O, B-TYPE and I-TYPE with --scheme iob2")


def is_iob_tag(tag: str) -> bool:
    """Whether it is O, B-TYPE or I-TYPE."""
    return tag == "O" or (tag[:2] in ("B-", "I-") and len(tag) > 2)


@dataclass
class QuestionAnsweringSettings(Settings):
    """The flags of `finetune_question_answering`."""

    task: ClassVar = "toolkit.training.question_answering:QuestionAnswering"

    max_length: int = data_flag(
        "tokens per window, including the question; longer texts are read in several", 384, minimum=1
    )
    stride: int = data_flag("context tokens that two windows share", 128, alias="doc_stride", minimum=0)
    max_answer_length: int = evaluation_flag("maximum tokens of an answer", 30, minimum=1)
    null_threshold: str | None = evaluation_flag(
        "the score that an answer must exceed: a number; best: that with the best F1 on the validation set; never: "
        "there always is an answer. Default: 0 if training has questions without an answer, else never"
    )
    metric: Literal["f1", "exact_match"] = evaluation_flag(
        "the metric that selects the best model", "f1", requires=VALIDATION
    )

    def __post_init__(self):
        super().__post_init__()
        if self.null_threshold not in (None, "best", "never"):
            try:
                number = float(self.null_threshold)
            except ValueError:
                number = math.nan
            if not math.isfinite(number):
                raise ValueError(f"--null_threshold is {self.null_threshold}; expected a number, best, or never")


@dataclass
class NewModelSettings(Settings):
    """The flags for random weights."""

    config_file: str | None = model_flag(
        "instead of --model: random weights of the size in a file such as configuration/tiny.json",
        excludes="model", requires="tokenizer")  # fmt: skip
    tokenizer: str | None = model_flag(
        "the tokenizer: a folder, such as train_tokenizer.py writes, or hub id; default: that of --model"
    )

    def __post_init__(self):
        super().__post_init__()
        if self.config_file is not None and not Path(self.config_file).is_file():
            raise ValueError(f"--config_file {self.config_file}: there is no such file")


# The values of each of --metrics; the first one selects the best model by default.
SEQ2SEQ_METRICS = {
    "rouge": ["rougeL", "rouge1", "rouge2", "rougeLsum"],
    "sacrebleu": ["bleu", "chrf"],
    "error_rate": ["token_error_rate", "item_error_rate"],
    "loss": ["loss", "perplexity"],
}


@dataclass
class Seq2SeqSettings(NewModelSettings):
    """The flags of `finetune_seq2seq`."""

    task: ClassVar = "toolkit.training.seq2seq:Seq2Seq"

    config_overrides: list[str] | None = model_flag(
        "fields of the configuration, as NAME=VALUE, such as norm_first=true"
    )
    num_decoder_layers: int | None = model_flag("blocks of the decoder; default: as many as the encoder has", minimum=1)
    tie_encoder_decoder: bool = model_flag("encoder and decoder share their weights, except cross-attention", False)
    source_column: str | None = data_flag("the column of the sources; default: source, text, article, document or en")
    target_column: str | None = data_flag(
        "the column of the targets; default: target, summary, highlights, translation or de"
    )
    max_target_length: int = data_flag(
        "maximum tokens per target, including [SEP]; longer ones are cut", 128, minimum=2
    )
    label_smoothing: float = training_flag(
        "share of each label's weight that is spread over the vocabulary", 0.0, minimum=0, below=1
    )
    num_beams: int = evaluation_flag("beams in evaluations and in the finished model; 1: greedy decoding", 1, minimum=1)
    length_penalty: float = evaluation_flag(
        "beam search: a larger value gives longer outputs", 1.0, requires="num_beams"
    )
    max_new_tokens: int | None = evaluation_flag("maximum tokens per output; default: --max_target_length", minimum=1)
    metrics: list[str] | None = evaluation_flag(
        f"some of {', '.join(SEQ2SEQ_METRICS)}; default: rouge; with loss alone nothing is generated"
    )
    metric: str | None = evaluation_flag(
        "the value that selects the best model; default: the first of the first of --metrics",
        requires=VALIDATION)  # fmt: skip

    def __post_init__(self):
        super().__post_init__()
        self.metrics = self.metrics or ["rouge"]
        if unknown := [name for name in self.metrics if name not in SEQ2SEQ_METRICS]:
            raise ValueError(f"--metrics has {unknown[0]!r}; expected some of {', '.join(SEQ2SEQ_METRICS)}")
        values = [value for name in [*self.metrics, "loss"] for value in SEQ2SEQ_METRICS[name]]
        if self.metric is not None and self.metric not in values:
            raise ValueError(f"--metric is {self.metric!r}; expected one of {', '.join(values)}, from --metrics")
        if self.padding_free_collation:
            raise ValueError("--padding_free_collation is given; expected an encoder, because decoders pad")
        if self.implementation == "bert":
            raise ValueError(
                "--implementation is bert; expected scratchbert, because EncoderDecoderModel is not supported"
            )
        if self.max_new_tokens is None:
            self.max_new_tokens = self.max_target_length


@dataclass
class PretrainingSettings(NewModelSettings):
    """The flags of `pretrain_mlm`."""

    task: ClassVar = "toolkit.training.masked_lm:Pretraining"

    text_column: str | None = data_flag("the column of the texts; default: text, sentence, content or document")
    line_by_line: bool = data_flag("each text is a sequence of its own, instead of concatenated with others", False)
    next_sentence: bool = training_flag(
        "also predict whether the second of two passages follows the first", False, excludes="line_by_line"
    )
    whole_word_masking: bool = training_flag("mask all tokens of a word, or none", False)
    streaming: bool = data_flag(
        "read the training set while training", False, requires="max_steps",
        excludes="validation_fraction or group_by_length")  # fmt: skip
    shuffle_buffer: int = data_flag("sequences that --streaming draws from", 10_000, minimum=1, requires="streaming")

    def __post_init__(self):
        super().__post_init__()
        # [CLS], [SEP] and a word; or for pairs, two words and another [SEP].
        if self.max_length < (needed := 5 if self.next_sentence else 3):
            raise ValueError(f"--max_length is {self.max_length}; expected {needed} or more")


# ------------------------------------------------------------------------------------------------------------- parsing


def train(file: str, description: str, settings_class: type[Settings], argv: list[str] | None) -> int:
    """The `main` of a training command: reads its settings and runs the training. Returns the exit code.

    Args:
        file, description: the command's `__file__` and docstring.
    """
    parser, settings = parse(file, description, settings_class, argv)

    def work() -> None:
        from toolkit.training.run import run

        module, _, name = settings_class.task.partition(":")
        run(parser, settings, getattr(importlib.import_module(module), name))

    with continuing_when_output_is_closed():
        return parser.run(work)


def parse(
    file: str, description: str, settings_class: type[Settings], argv: list[str] | None
) -> tuple[Parser, Settings]:
    """The parser of a command, and its settings: of the recipe, if the command line begins with one, overridden by the
    command line. Exits with code 2 and a line on standard error if one is invalid.

    Args:
        file: the command's `__file__`.
        description: the command's docstring.
    """
    argv = sys.argv[1:] if argv is None else argv
    parser, known = make_parser(file, description, settings_class), {each.name for each in fields(settings_class)}
    try:
        argv = mark_values(argv, {name for name, hint in get_type_hints(settings_class).items() if is_list(hint)})
        if argv and not argv[0].startswith("-"):
            argv = recipe_arguments(find_shipped(argv[0]), known) + argv[1:]
        given = vars(parser.parse_args(argv))
        if given["evaluate_only"] and (recipe := Path(given["model"] or "", RECIPE)).is_file():
            of_run = recipe_arguments(recipe, known, EVALUATED_WITH)
            given = vars(parser.parse_args([*of_run, *argv]))
        if given.get("config_file") is not None:
            given["config_file"] = str(find_shipped(given["config_file"]))
        settings = settings_class(**given)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    return parser, settings


def make_parser(file: str, description: str, settings_class: type[Settings]) -> Parser:
    """A parser with a flag for each field of the settings, in the groups of `--help`."""
    parser = Parser(file, description, usage="%(prog)s [RECIPE.yaml] [--FLAG VALUE …]")
    types_of = get_type_hints(settings_class)
    by_name = {each.name: each for each in fields(settings_class)}
    for title in GROUPS:
        for name in MOST_USED if title == "most used" else [name for name in by_name if name not in MOST_USED]:
            metadata = by_name[name].metadata
            if title in ("most used", metadata["group"]):
                spellings = [f"--{each}" for each in (name, metadata["alias"]) if each]
                options = argument_of(name, types_of[name])
                parser.group(title).add_argument(
                    *spellings, default=by_name[name].default, help=metadata["help"], **options
                )
    return parser


def argument_of(name: str, annotation) -> dict:
    """The arguments of `add_argument` for the field `name` of this type: `str`, `int`, `float`, `bool`, a list or a
    literal of strings, or one of these and None."""
    metavar = METAVARS.get(name, "VALUE")
    if get_origin(annotation) in (types.UnionType, Union):
        (annotation,) = set(get_args(annotation)) - {type(None)}
    if get_origin(annotation) is Literal:
        return {"choices": get_args(annotation)}
    if get_origin(annotation) is list:
        return {"nargs": "+", "type": unmarked, "metavar": metavar}
    if annotation is bool:
        return {"nargs": "?", "const": True, "type": boolean, "metavar": "true|false"}
    return {"type": annotation, "metavar": {int: "N", float: "X"}.get(annotation, metavar)}


def named_values(flag: str, given: list[str] | None) -> dict[str, Any]:
    """The values of a flag with NAME=VALUE entries. A value is JSON, or else a string.

    Raises:
        ValueError: an entry has another form.
    """
    values = {}
    for entry in given or []:
        name, equals, value = entry.partition("=")
        if not name or not equals:
            raise ValueError(f"--{flag} has {entry!r}; expected NAME=VALUE")
        try:
            values[name] = json.loads(value)
        except json.JSONDecodeError:
            values[name] = value
    return values


def is_list(annotation) -> bool:
    """Whether a type is a list, or a list or None."""
    return list in map(get_origin, (annotation, *get_args(annotation)))


def unmarked(text: str) -> str:
    return text.removeprefix(VALUE)


def boolean(text: str) -> bool:
    values = dict.fromkeys(("yes", "true", "on", "t", "y", "1"), True)
    values |= dict.fromkeys(("no", "false", "off", "f", "n", "0"), False)
    if text.lower() not in values:
        raise argparse.ArgumentTypeError(f"{text!r} is invalid; expected true or false")
    return values[text.lower()]


# ------------------------------------------------------------------------------------------------------------- recipes


def recipe_arguments(path: Path, known: set[str], used: set[str] | None = None) -> list[str]:
    """A recipe as command-line arguments, so that its values are parsed and checked in the same way. Its files and
    folders that begin with ./ or ../ are relative to the recipe.

    Args:
        known: all flags.
        used: those to return; None: all.

    Raises:
        OSError, ValueError: it cannot be read, or has a name that is not a flag.
    """
    if path.suffix not in (".yaml", ".yml") or not path.is_file():
        raise ValueError(f"{path} is not a recipe; expected a .yaml file that exists, or flags that begin with --")
    recipe = read_recipe(path, RecipeLoader)
    if unknown := sorted(map(str, recipe.keys() - known)):
        raise ValueError(f"{path} has {', '.join(unknown)}; expected flags of this command")

    def beside(value: str, _: bool) -> str:
        return str((path.parent / value).resolve()) if value.startswith(("./", "../")) else value

    arguments = []
    for name, value in with_paths(recipe, beside).items():
        if used is not None and name not in used:
            continue
        if isinstance(value, list):
            arguments += [f"--{name}", *(VALUE + each if each.startswith("-") else each for each in map(str, value))]
        elif value is not None:
            arguments += [f"--{name}={value}"]
    return arguments


class RecipeLoader(yaml.SafeLoader):
    """Reads all values as strings, which the parser converts like those of the command line. YAML would make booleans
    of yes and no, which may be labels, and numbers of labels such as 01."""

    yaml_implicit_resolvers: ClassVar = {
        first: [(tag, pattern) for tag, pattern in resolvers if tag == "tag:yaml.org,2002:null"]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }


def mark_values(arguments: list[str], lists: set[str]) -> list[str]:
    """The arguments with `VALUE` before each that begins with one hyphen and follows one of the flags `lists`, except
    for -h.

    Raises:
        ValueError: one of these flags is given twice: the parser would drop the first values.
    """
    marked, given, in_list = [], set(), False
    for argument in arguments:
        if argument.startswith("--"):
            name, equals, _ = argument[2:].replace("-", "_").partition("=")
            if name in lists & given:
                raise ValueError(f"--{name} is given twice; expected once, with all values after it")
            in_list = name in lists and not equals
            given.add(name)
        is_value = in_list and argument.startswith("-") and not argument.startswith("--") and argument != "-h"
        marked.append(VALUE + argument if is_value else argument)
    return marked


def read_recipe(path: Path, loader: type = yaml.SafeLoader) -> dict:
    """The flags in a recipe.

    Raises:
        OSError, ValueError: it cannot be read, or is not a recipe.
    """
    try:
        recipe = yaml.load(path.read_text(encoding="utf-8"), loader)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not YAML: {error}") from error
    if not isinstance(recipe, dict):
        raise ValueError(f"{path} is not a recipe; expected `flag: value` on each line")
    return recipe


def recipe_of(settings: Settings) -> str:
    """The recipe, in YAML, of exactly this run, from its beginning. It can be run from any folder: its paths are
    absolute."""
    recipe = with_paths(asdict(settings), absolute)
    del recipe["resume"], recipe["dry_run"], recipe["trust_checkpoints"]
    return yaml.safe_dump(recipe, sort_keys=False, allow_unicode=True)


def absolute(value: str, is_file: bool) -> str:
    """The absolute path of a file or an existing folder; a hub id as it is."""
    return str(Path(value).resolve()) if is_file or Path(value).is_dir() else value


def changed_flags(settings: Settings, recipe: Path) -> dict[str, tuple]:
    """The flags, with their earlier and present values, that make a continuation differ from the run of `recipe`."""
    before = {each.name: each.metadata["before"] for each in fields(settings)}
    earlier = before | with_paths(read_recipe(recipe), absolute)
    return {
        name: (earlier[name], value)
        for name, value in with_paths(asdict(settings), absolute).items()
        if name not in FREE_TO_CHANGE and earlier[name] != value
    }
