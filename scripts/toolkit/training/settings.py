"""The flags of the training commands, and reading them from a YAML recipe and from the command line.

Nothing here imports torch or transformers, so that `--help` answers at once.
"""

import argparse
import importlib
import json
import math
import sys
import types
from dataclasses import asdict, dataclass, field, fields
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
                  "keep_checkpoints", "log_steps", "save_steps", "eval_batch_size"}  # fmt: skip

# With --resume these may grow, once the run is finished.
EXTENDING = {"epochs", "max_steps"}

# Those of transformers that do not depend on a metric.
SCHEDULES = ("linear", "cosine", "cosine_with_restarts", "cosine_with_min_lr", "polynomial", "constant",
             "constant_with_warmup", "inverse_sqrt", "warmup_stable_decay")  # fmt: skip

# Before the values of a list in the parser's arguments: a value that begins with a hyphen is then not taken for a flag.
# No command line can have this character.
VALUE = "\0"

COUNTS = ("max_length", "batch_size", "eval_batch_size", "gradient_accumulation_steps", "max_steps", "eval_steps",
          "save_steps", "log_steps", "early_stopping", "max_train_samples", "max_eval_samples")  # fmt: skip


def flag(default: Any, group: str, help: str, *aliases: str):
    """A field of the settings: its default, its group in `--help`, its text there, and other spellings."""
    return field(default=default, metadata={"group": group, "help": help, "aliases": aliases})


@dataclass
class Settings:
    """The flags of a training run. Each command adds its own flags, and names the `Task` that they are for."""

    task: ClassVar[str]  # "module:class", imported only when the flags are parsed

    model: str | None = flag(None, "model", "the BERT or ScratchBert to start from: a folder or hub id")
    implementation: Literal["scratchbert", "bert"] = flag(
        "scratchbert", "model", "our classes, or those of transformers"
    )

    train_file: list[str] | None = flag(
        None,
        "data",
        "files to train on: .csv, .tsv, .json, .jsonl or .txt, each also as .gz, or .parquet; or patterns such as "
        "'data/*.csv'",
    )
    validation_file: list[str] | None = flag(None, "data", "files for evaluations during the training")
    test_file: list[str] | None = flag(None, "data", "files for one evaluation of the finished model")
    dataset: str | None = flag(None, "data", "instead of files: the hub id or folder of a dataset")
    dataset_config: str | None = flag(None, "data", "the configuration of --dataset")
    train_split: str = flag("train", "data", "the training split of --dataset")
    validation_split: str | None = flag("validation", "data", "the validation split of --dataset; none: no evaluation")
    test_split: str | None = flag(None, "data", "the test split of --dataset")
    on_bad_row: Literal["stop", "skip"] = flag(
        "stop", "data", "what to do with an invalid row; skipped ones are listed"
    )
    max_train_samples: int | None = flag(None, "data", "use only the first N valid rows of the training set")
    max_eval_samples: int | None = flag(
        None, "data", "use only the first N valid rows of the validation set, and of the test set"
    )
    max_length: int = flag(128, "data", "maximum tokens per sequence; longer ones are cut")
    padding_free_collation: bool = flag(False, "data", "batches are one row without padding (ScratchBert only)")

    batch_size: int = flag(32, "training", "sequences per batch, on each process")
    gradient_accumulation_steps: int = flag(1, "training", "batches per update, on each process")
    epochs: float = flag(3, "training", "passes over the training set; fractions such as 0.5 are supported")
    max_steps: int | None = flag(None, "training", "number of updates, instead of --epochs")
    gradient_checkpointing: bool = flag(
        False, "training", "compute activations again in the backward pass: less memory, slower"
    )
    optimizer: Literal["adamw", "adafactor", "sgd"] = flag(
        "adamw", "training", "the optimizer of torch.optim; sgd has momentum 0.9"
    )
    learning_rate: float = flag(5e-5, "training", "the maximum learning rate")
    schedule: Literal[SCHEDULES] = flag("linear", "training", "the learning-rate schedule, by transformers' name")
    lr_scheduler_kwargs: list[str] | None = flag(
        None, "training", "arguments of the schedule, as NAME=VALUE, such as num_cycles=2 for cosine_with_restarts"
    )
    warmup_ratio: float = flag(0.1, "training", "share of the updates during which the learning rate rises")
    weight_decay: float = flag(0.01, "training", "AdamW's weight decay; not applied to biases and layer norms")
    layer_decay: float = flag(
        1.0, "training", "factor of the learning rate per layer away from the model head; 1: none"
    )
    max_grad_norm: float = flag(1.0, "training", "larger gradients are scaled to this norm; 0: never")
    freeze: str | None = flag(
        None,
        "training",
        "what is not trained: embeddings, encoder, or the number of lowest blocks; in an encoder-decoder, those of its "
        "encoder and what the decoder shares with it; weights that the checkpoint lacks are always trained",
    )
    lora_rank: int = flag(0, "training", "train adapters of this rank (PEFT's LoRA) and the model head; 0: all weights")
    lora_alpha: float = flag(16, "training", "LoRA scales by this divided by the rank")
    lora_dropout: float = flag(0.0, "training", "dropout before the adapters")
    early_stopping: int | None = flag(None, "training", "stop after this many evaluations without a better one")
    mixed_precision: Literal["no", "fp16", "bf16"] | None = flag(
        None,
        "training",
        "the precision of the computation; fp16 requires an accelerator device; default: as accelerate is configured",
    )
    seed: int = flag(0, "training", "the random seed")

    eval_batch_size: int = flag(64, "evaluation", "sequences per batch of an evaluation, on each process")
    eval_steps: int | None = flag(None, "evaluation", "updates between evaluations; default: after each epoch")

    output: str | None = flag(None, "output", "the folder to write; new, empty, or that of the run to --resume")
    save_steps: int | None = flag(None, "output", "updates between checkpoints; default: at each evaluation")
    keep_checkpoints: int = flag(
        2, "output", "number of checkpoints to keep, in addition to the best; 0: none of them, once the run is finished"
    )
    resume: bool = flag(
        False, "output", "continue the run in --output from its last checkpoint, if it has one; a finished run is "
        "extended by more --epochs or --max_steps"
    )  # fmt: skip
    dry_run: bool = flag(
        False, "output", "check model and data, show three rows, the lengths and an estimate of the time; write nothing"
    )
    trust_checkpoints: bool = flag(
        False, "output", "resume from checkpoints of DeepSpeed or sharded FSDP, which can run code when they are read"
    )
    log_steps: int = flag(10, "output", "updates between points of the curves")
    trackers: str = flag("tensorboard", "output", "where the run is logged: one of accelerate's trackers, all, or none")
    push_to_hub: str | None = flag(None, "output", "the repository to push the finished model to: user/name")
    hub_private: bool = flag(False, "output", "make that repository private if it is new")

    def __post_init__(self):
        """Checks everything that does not depend on the data.

        Raises:
            ValueError: a flag is missing or invalid; the message names it, its value and what was expected.
        """
        # Commands that can start from random weights have a `config_file`, which replaces `model`.
        for name in ("output",) if getattr(self, "config_file", None) else ("model", "output"):
            if getattr(self, name) is None:
                alternative = " or --config_file" if name == "model" and hasattr(self, "config_file") else ""
                meaning = type(self).__dataclass_fields__[name].metadata["help"]
                raise ValueError(f"--{name}{alternative} is missing; expected {meaning}")
        if self.push_to_hub is not None and self.push_to_hub.count("/") != 1:
            raise ValueError(f"--push_to_hub is {self.push_to_hub}; expected user/name")
        for name in ("model", "tokenizer"):
            value = getattr(self, name, None)
            if value is not None and looks_like_a_path(value) and not Path(value).is_dir():
                raise ValueError(f"--{name} {value}: there is no such folder")
        for name in COUNTS:
            self.check_range(name, 1)
        for name in ("learning_rate", "weight_decay", "max_grad_norm", "lora_rank", "keep_checkpoints"):
            self.check_range(name, 0)
        if self.epochs <= 0:
            raise ValueError(f"--epochs is {self.epochs}; expected more than 0")
        self.check_range("seed", 0, 2**32 - 1)  # as NumPy expects
        for name in ("warmup_ratio", "layer_decay", "lora_dropout"):
            self.check_range(name, 0, 1)
        for name, value in vars(self).items():
            if isinstance(value, float) and not math.isfinite(value):
                raise ValueError(f"--{name} is {value}; expected a finite number")
        if (self.train_file is None) == (self.dataset is None):
            given = "neither is" if self.dataset is None else "both are"
            raise ValueError(f"{given} given of --train_file and --dataset; expected one of the two")
        if self.dataset is not None and (self.validation_file or self.test_file):
            raise ValueError("--validation_file and --test_file go with --train_file; with --dataset give splits of it")
        if self.dataset is None:
            defaults = defaults_of(self)
            for name in ("dataset_config", "train_split", "validation_split", "test_split"):
                if (value := getattr(self, name)) != defaults[name]:
                    raise ValueError(
                        f"--{name} is {value} without --dataset; expected --dataset with it. With --train_file give "
                        "--validation_file and --test_file"
                    )
        if self.padding_free_collation and self.implementation == "bert":
            raise ValueError("--padding_free_collation requires --implementation scratchbert")
        self.check_validation()

    def check_validation(self) -> None:
        """Raises ValueError if a flag that requires a validation set is given without one."""
        has_split = self.dataset is not None and self.validation_split not in (None, "none")
        if self.validation_file or has_split:
            return
        defaults = defaults_of(self)
        for name in ("early_stopping", "metric"):
            value = getattr(self, name, defaults.get(name))
            if value != defaults.get(name):
                expected = "--validation_split" if self.dataset is not None else "--validation_file"
                raise ValueError(f"--{name} is {value} and there is no validation set; expected one, as {expected}")

    def check_range(self, name: str, minimum: float, maximum: float = math.inf) -> None:
        """Raises ValueError unless the flag is not set or in the range."""
        value = getattr(self, name)
        if value is not None and not minimum <= value <= maximum:
            expected = f"{minimum} or more" if maximum == math.inf else f"{minimum} to {maximum}"
            raise ValueError(f"--{name} is {value}; expected {expected}")


def defaults_of(settings: Settings) -> dict[str, Any]:
    """The default of each flag."""
    return {each.name: each.default for each in fields(settings)}


@dataclass
class LabelSettings(Settings):
    """The flags for labels of sequences or tokens."""

    labels: list[str] | None = flag(None, "data", "the labels; default: those of the training set")
    class_weights: list[str] | None = flag(None, "training", "the weight of each label, in the order of --labels; or "
                                           "balanced: inversely to its frequency")  # fmt: skip
    label_smoothing: float = flag(0.0, "training", "share of each label's weight that is spread over all labels")

    def __post_init__(self):
        super().__post_init__()
        check_smoothing(self.label_smoothing)
        if self.class_weights and self.class_weights != ["balanced"] and self.labels is None:
            raise ValueError("--class_weights has numbers and --labels is missing; expected --labels, in their order")
        if self.labels and len(self.labels) < 2 and getattr(self, "problem", "single_label") == "single_label":
            raise ValueError(f"--labels is {self.labels[0]}; expected two labels or more")
        if self.labels and len(set(self.labels)) < len(self.labels):
            raise ValueError(f"--labels is {' '.join(self.labels)}; expected each label once")


def check_smoothing(value: float) -> None:
    if not 0 <= value < 1:
        raise ValueError(f"--label_smoothing is {value}; expected 0 or more, and less than 1")


@dataclass
class ClassificationSettings(LabelSettings):
    """The flags of `finetune_classification`."""

    task: ClassVar = "toolkit.training.classification:Classification"

    problem: Literal["single_label", "multi_label", "regression"] = flag("single_label", "data", "the kind of labels")
    text_column: str | None = flag(
        None, "data", "the column of the texts; default: text, sentence, sentence1, premise or question1"
    )
    text_pair_column: str | None = flag(
        None,
        "data",
        "the column of the second texts; default: sentence2, hypothesis or question2, if there is one and "
        "--text_column is not given",
    )
    label_column: str | None = flag(None, "data", "the column of the labels; default: label, labels or score")
    label_separator: str = flag(
        "|", "data", "the separator between the labels of a row, for --problem multi_label in CSV or TSV"
    )
    metric: str | None = flag(None, "evaluation", "the metric that selects the best model; default: accuracy, f1 or "
                              "pearson")  # fmt: skip

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
        if self.label_smoothing and self.problem != "single_label":
            raise ValueError(f"--label_smoothing is given with --problem {self.problem}; expected single_label")
        if self.metric is not None and self.metric not in self.metrics:
            raise ValueError(f"--metric is {self.metric}; expected one of {', '.join(self.metrics)} for {self.problem}")
        if self.class_weights and self.problem == "regression":
            raise ValueError("--class_weights is given with --problem regression, which has no labels")
        if self.class_weights == ["balanced"] and self.problem == "multi_label":
            raise ValueError("--class_weights is balanced with --problem multi_label; expected single_label")


@dataclass
class TokenClassificationSettings(LabelSettings):
    """The flags of `finetune_token_classification`."""

    task: ClassVar = "toolkit.training.token_classification:TokenClassification"

    max_length: int = flag(128, "data", "tokens per window; longer rows are read in several")
    stride: int | None = flag(
        None, "data", "tokens that two windows of a row share; default: a quarter of --max_length"
    )
    scheme: Literal["iob2", "plain"] = flag("iob2", "data", "the tags: entities as B-TYPE, I-TYPE and O; or any tags")
    words_column: str | None = flag(None, "data", "the column of the words; default: tokens or words")
    tags_column: str | None = flag(None, "data", "the column of the tags; default: tags, ner_tags or labels")
    label_all_pieces: bool = flag(False, "training", "train on all pieces of a word (I-PER after B-PER)")
    metric: Literal["f1", "accuracy"] = flag("f1", "evaluation", "the metric that selects the best model")

    def __post_init__(self):
        super().__post_init__()
        self.stride = self.max_length // 4 if self.stride is None else self.stride
        self.check_range("stride", 0)
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

    max_length: int = flag(384, "data", "tokens per window, including the question; longer texts are read in several")
    stride: int = flag(128, "data", "context tokens that two windows share", "--doc_stride")
    max_answer_length: int = flag(30, "evaluation", "maximum tokens of an answer")
    null_threshold: str | None = flag(None, "evaluation", "the score that an answer must exceed: a number; best: that "
                                      "with the best F1 on the validation set; never: there always is an answer. "
                                      "Default: 0 if training has questions without an answer, else never")  # fmt: skip
    metric: Literal["f1", "exact_match"] = flag("f1", "evaluation", "the metric that selects the best model")

    def __post_init__(self):
        super().__post_init__()
        self.check_range("stride", 0)
        self.check_range("max_answer_length", 1)
        if self.null_threshold not in (None, "best", "never"):
            try:
                number = float(self.null_threshold)
            except ValueError:
                number = math.nan
            if not math.isfinite(number):
                raise ValueError(f"--null_threshold is {self.null_threshold}; expected a number, best, or never")


# The values of each of --metrics; the first one selects the best model by default.
SEQ2SEQ_METRICS = {
    "rouge": ["rougeL", "rouge1", "rouge2", "rougeLsum"],
    "sacrebleu": ["bleu", "chrf"],
    "error_rate": ["token_error_rate", "item_error_rate"],
    "loss": ["loss", "perplexity"],
}


@dataclass
class Seq2SeqSettings(Settings):
    """The flags of `finetune_seq2seq`."""

    task: ClassVar = "toolkit.training.seq2seq:Seq2Seq"

    config_file: str | None = flag(None, "model", "instead of --model: random weights of the size in a file such as "
                                   "configuration/tiny.json")  # fmt: skip
    config_overrides: list[str] | None = flag(None, "model", "fields of the configuration, as NAME=VALUE, such as "
                                              "norm_first=true")  # fmt: skip
    tokenizer: str | None = flag(None, "model", "the tokenizer: a folder, such as train_tokenizer.py writes, or hub "
                                 "id; default: that of --model")  # fmt: skip
    num_decoder_layers: int | None = flag(None, "model", "blocks of the decoder; default: as many as the encoder has")
    tie_encoder_decoder: bool = flag(False, "model", "encoder and decoder share their weights, except cross-attention")
    source_column: str | None = flag(
        None, "data", "the column of the sources; default: source, text, article, document or en"
    )
    target_column: str | None = flag(
        None, "data", "the column of the targets; default: target, summary, highlights, translation or de"
    )
    max_target_length: int = flag(128, "data", "maximum tokens per target, including [SEP]; longer ones are cut")
    label_smoothing: float = flag(0.0, "training", "share of each label's weight that is spread over the vocabulary")
    num_beams: int = flag(1, "evaluation", "beams in evaluations and in the finished model; 1: greedy decoding")
    length_penalty: float = flag(1.0, "evaluation", "beam search: a larger value gives longer outputs")
    max_new_tokens: int | None = flag(None, "evaluation", "maximum tokens per output; default: --max_target_length")
    metrics: list[str] | None = flag(None, "evaluation", f"some of {', '.join(SEQ2SEQ_METRICS)}; default: rouge; with "
                                     "loss alone nothing is generated")  # fmt: skip
    metric: str | None = flag(None, "evaluation", "the value that selects the best model; default: the first of the "
                              "first of --metrics")  # fmt: skip

    def __post_init__(self):
        super().__post_init__()
        self.metrics = self.metrics or ["rouge"]
        if unknown := [name for name in self.metrics if name not in SEQ2SEQ_METRICS]:
            raise ValueError(f"--metrics has {unknown[0]!r}; expected some of {', '.join(SEQ2SEQ_METRICS)}")
        values = [value for name in [*self.metrics, "loss"] for value in SEQ2SEQ_METRICS[name]]
        if self.metric is not None and self.metric not in values:
            raise ValueError(f"--metric is {self.metric!r}; expected one of {', '.join(values)}, from --metrics")
        for name in ("num_beams", "max_new_tokens", "num_decoder_layers"):
            self.check_range(name, 1)
        self.check_range("max_target_length", 2)  # a token and [SEP]
        check_smoothing(self.label_smoothing)
        if self.length_penalty != 1 and self.num_beams == 1:
            raise ValueError(f"--length_penalty is {self.length_penalty}; expected --num_beams of 2 or more with it")
        if self.padding_free_collation:
            raise ValueError("--padding_free_collation is given; expected an encoder, because decoders pad")
        if self.implementation == "bert":
            raise ValueError(
                "--implementation is bert; expected scratchbert, because EncoderDecoderModel is not supported"
            )
        if None not in (self.config_file, self.model):
            raise ValueError("--model and --config_file are both given; expected one of the two")
        if self.config_file is not None and not Path(self.config_file).is_file():
            raise ValueError(f"--config_file {self.config_file}: there is no such file")
        if self.config_file is not None and self.tokenizer is None:
            raise ValueError("--tokenizer is missing; --config_file requires one")
        if self.max_new_tokens is None:
            self.max_new_tokens = self.max_target_length


@dataclass
class PretrainingSettings(Settings):
    """The flags of `pretrain_mlm`."""

    task: ClassVar = "toolkit.training.masked_lm:Pretraining"

    config_file: str | None = flag(None, "model", "instead of --model: a configuration (.json), for random weights")
    tokenizer: str | None = flag(None, "model", "the tokenizer: a folder or hub id; default: that of --model")
    text_column: str | None = flag(
        None, "data", "the column of the texts; default: text, sentence, content or document"
    )
    line_by_line: bool = flag(False, "data", "each text is a sequence of its own, instead of concatenated with others")
    next_sentence: bool = flag(False, "training", "also predict whether the second of two passages follows the first")
    whole_word_masking: bool = flag(False, "training", "mask all tokens of a word, or none")
    streaming: bool = flag(False, "data", "read the training set while training; requires --max_steps")
    shuffle_buffer: int = flag(10_000, "data", "sequences that --streaming draws from")

    def __post_init__(self):
        if (self.model is None) == (self.config_file is None):
            given = "neither is" if self.model is None else "both are"
            raise ValueError(f"{given} given of --model and --config_file (random weights); expected one of the two")
        super().__post_init__()
        if self.config_file is not None and self.tokenizer is None:
            raise ValueError("--tokenizer is missing; --config_file requires one, such as train_tokenizer.py writes")
        if self.streaming and self.max_steps is None:
            raise ValueError("--max_steps is missing; --streaming requires it, because the number of rows is not known")
        if self.next_sentence and self.line_by_line:
            raise ValueError("--line_by_line and --next_sentence are both given; expected one of the two")
        self.check_range("shuffle_buffer", 1)
        # [CLS], [SEP] and a word; or for pairs, two words and another [SEP].
        self.check_range("max_length", 5 if self.next_sentence else 3)


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
    parser = make_parser(file, description, settings_class)
    try:
        lists = {name for name, annotation in get_type_hints(settings_class).items() if is_list(annotation)}
        check_repetitions(argv, lists)
        if argv and not argv[0].startswith("-"):
            argv = recipe_arguments(find_shipped(argv[0]), {each.name for each in fields(settings_class)}) + argv[1:]
        given = vars(parser.parse_args(mark_values(argv, lists)))
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
                parser.group(title).add_argument(
                    f"--{name}", *metadata["aliases"], default=by_name[name].default, help=metadata["help"],
                    **argument_of(name, types_of[name]),
                )  # fmt: skip
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


def recipe_arguments(path: Path, known: set[str]) -> list[str]:
    """A recipe as command-line arguments, so that its values are parsed and checked in the same way. Its files and
    folders that begin with ./ or ../ are relative to the recipe.

    Raises:
        OSError, ValueError: it cannot be read, or has a name that is not a flag.
    """
    if path.suffix not in (".yaml", ".yml") or not path.is_file():
        raise ValueError(f"{path} is not a recipe; expected a .yaml file that exists, or flags that begin with --")
    recipe = read_recipe(path, RecipeLoader)
    if unknown := sorted(map(str, recipe.keys() - known)):
        raise ValueError(f"{path} has {', '.join(unknown)}; expected names of flags")
    arguments = []
    for name, value in with_paths(recipe, lambda each, _: beside(path, each)).items():
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


def check_repetitions(arguments: list[str], lists: set[str]) -> None:
    """Raises ValueError if one of the flags `lists` is given twice: the parser would drop the first values."""
    names = [each[2:].partition("=")[0].replace("-", "_") for each in arguments if each.startswith("--")]
    for name in sorted(lists):
        if (count := names.count(name)) > 1:
            raise ValueError(f"--{name} is given {count} times; expected once, with all values after it")


def mark_values(arguments: list[str], lists: set[str]) -> list[str]:
    """The arguments with `VALUE` before each that begins with one hyphen and follows one of the flags `lists`, except
    for -h."""
    marked, in_list = [], False
    for argument in arguments:
        if argument.startswith("--"):
            in_list = argument[2:].replace("-", "_") in lists
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


def beside(recipe: Path, value: str) -> str:
    """`value`, if it begins with ./ or ../, relative to the folder of the recipe."""
    return str((recipe.parent / value).resolve()) if value.startswith(("./", "../")) else value


def recipe_of(settings: Settings) -> str:
    """The recipe, in YAML, of exactly this run, from its beginning. It can be run from any folder: its paths are
    absolute."""
    recipe = with_paths(asdict(settings), absolute)
    del recipe["resume"], recipe["dry_run"]
    return yaml.safe_dump(recipe, sort_keys=False, allow_unicode=True)


def absolute(value: str, is_file: bool) -> str:
    """The absolute path of a file or an existing folder; a hub id as it is."""
    return str(Path(value).resolve()) if is_file or Path(value).is_dir() else value


def changed_flags(settings: Settings, recipe: Path) -> dict[str, tuple]:
    """The flags, with their earlier and present values, that make a continuation differ from the run of `recipe`."""
    earlier = with_paths(read_recipe(recipe), absolute)
    return {
        name: (earlier.get(name), value)
        for name, value in with_paths(asdict(settings), absolute).items()
        if name not in FREE_TO_CHANGE and earlier.get(name) != value
    }
