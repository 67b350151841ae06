"""The arguments of each task: its data, its model, and how texts become inputs."""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from typing import Any, Literal

NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")
# Usual names of columns.
TEXTS = ("text", "sentence", "sentence1", "premise", "question1")
SECOND_TEXTS = ("sentence2", "hypothesis", "question2")
WORDS = ("tokens", "words")
SOURCES = ("source", "text", "article", "document", "en")

# For each rule, a value that is true if the rule is broken, and what is wrong then.
Problems = Iterator[tuple[object, str]]

# The least values of numbers, where they are not 1 for an integer and 0 for others.
LEAST = {"max_steps": -1, "seed": 0, "split_seed": 0, "stride": 0, "lora_rank": 0, "max_target_length": 2}


def flag(help: str, default: Any = None):
    """An argument with its help."""
    return field(default=default, metadata={"help": help})


def problems_of_numbers(arguments) -> Problems:
    """For each argument that is a number, whether it is too small or not finite, and what is wrong then."""
    for each in fields(arguments):
        value = getattr(arguments, each.name)
        if type(value) in (int, float):  # no boolean
            least = LEAST.get(each.name, 1 if isinstance(value, int) else 0)
            yield not least <= value < math.inf, f"--{each.name} is {value}; expected {least} or more."


@dataclass
class TaskArguments:
    """Data and model of any task."""

    _argument_group_name = "data and model"
    smooths_labels = False

    model: str | None = flag("a BERT or ScratchBert to start from: a folder or a hub id")
    implementation: Literal["scratchbert", "bert"] = flag("classes of this project or of transformers", "scratchbert")
    train_file: list[str] | None = flag(
        "files, folders or patterns: .csv .tsv .json .jsonl .txt .conll .parquet, also with .gz .zst .bz2"
    )
    validation_file: list[str] | None = flag("the same, for evaluation during training")
    test_file: list[str] | None = flag("the same, for evaluation of the finished model")
    dataset: str | None = flag("instead of files: a dataset, a hub id or a folder")
    dataset_config: str | None = flag("the configuration of --dataset")
    train_split: str = flag("the split of --dataset to train on", "train")
    validation_split: str | None = flag("the split of --dataset to validate on")
    test_split: str | None = flag("the split of --dataset to test on")
    validation_fraction: float | None = flag("the share of the training rows to validate on; equal texts stay together")
    split_seed: int = flag("the seed that draws --validation_fraction", 0)
    group_column: str | None = flag("rows with the same value stay together in --validation_fraction")
    encoding: str = flag("the encoding of text files, such as cp1252 or utf-16", "utf-8")
    delimiter: str | None = flag("the separator of .csv, .tsv and .txt; default: comma, tab, and .txt is no table")
    on_bad_row: Literal["stop", "skip"] = flag(
        "what to do with a row that cannot be used; skipped ones are listed", "stop"
    )
    max_train_samples: int | None = flag("use the first N valid training rows only")
    max_eval_samples: int | None = flag("use the first N valid validation and test rows only")
    max_length: int = flag("tokens of an input; longer texts are cut, and their number is printed", 128)

    @property
    def has_validation(self) -> bool:
        return bool(self.validation_file or self.validation_split or self.validation_fraction)

    def problems(self) -> Problems:
        """The rules between the arguments."""
        files = [self.train_file, self.validation_file, self.test_file]
        splits = [self.dataset_config, self.validation_split, self.test_split]
        fraction = self.validation_fraction
        yield self.dataset and any(files), "--dataset is given with files; expected one of them."
        yield not self.dataset and any(splits), "a split or --dataset_config is given; expected --dataset with it."
        yield fraction is not None and not 0 < fraction < 1, f"--validation_fraction is {fraction}; expected 0 to 1."
        yield (
            fraction and (self.validation_file or self.validation_split),
            "--validation_fraction is given with a validation set; expected one of them.",
        )
        yield self.group_column and not fraction, "--group_column is given; expected --validation_fraction with it."
        yield (
            self.delimiter is not None and len(self.delimiter.replace("\\t", "\t")) != 1,
            f"--delimiter is {self.delimiter!r}; expected one character, or \\t for a tab.",
        )


@dataclass
class LabelArguments(TaskArguments):
    """Arguments of tasks with labels."""

    smooths_labels = True

    labels: list[str] | None = flag("the labels in their order; default: those of the training rows")
    class_weights: list[str] | None = flag(
        "the weight of each of --labels in the loss; or balanced, inverse to its frequency"
    )

    def problems(self) -> Problems:
        yield from super().problems()
        labels = self.labels or []
        yield len(set(labels)) < len(labels), f"--labels is {' '.join(labels)}; expected each label once."
        if self.class_weights in (None, ["balanced"]):
            return
        weights = [float(each) if NUMBER.fullmatch(each) else -1.0 for each in self.class_weights]
        yield (
            min(weights) < 0 or not 0 < max(weights) < math.inf,
            f"--class_weights is {' '.join(self.class_weights)}; expected numbers of 0 or more, or balanced.",
        )
        yield (
            len(weights) != len(labels),
            "--class_weights has numbers; expected --labels with it, one for each number.",
        )


@dataclass
class ClassificationArguments(LabelArguments):
    """Arguments of `classification`."""

    problem: Literal["single_label", "multi_label", "regression"] = flag("the kind of labels", "single_label")
    text_column: str | None = flag("the column of the texts; default: text, sentence, sentence1, premise or question1")
    text_pair_column: str | None = flag(
        "the column of the second texts; default: sentence2, hypothesis or question2, unless --text_column is given"
    )
    label_column: str | None = flag(
        "the column of the labels, also nested, as in annotation.label; default: label, labels or score"
    )
    label_columns: list[str] | None = flag("for multi_label: columns of 0 and 1, one for each label")
    label_separator: str = flag("for multi_label: what separates the labels in a text", "|")

    def problems(self) -> Problems:
        yield from super().problems()
        yield (
            self.label_columns and self.problem != "multi_label",
            "--label_columns is given; expected --problem multi_label.",
        )
        yield (
            self.label_columns and (self.label_column or self.labels),
            "--label_columns is given with --label_column or --labels; expected one of them.",
        )
        yield (
            self.class_weights and self.problem != "single_label",
            f"--class_weights is given with --problem {self.problem}; expected single_label.",
        )
        yield not self.label_separator, "--label_separator is empty; expected the text between two labels."


@dataclass
class TaggingArguments(LabelArguments):
    """Arguments of `tagging`."""

    scheme: Literal["iob2", "iob1", "plain"] = flag("the tags: entities as B-TYPE, I-TYPE and O; or any tags", "iob2")
    words_column: str | None = flag("the column of the words; default: tokens or words")
    tags_column: str | None = flag("the column of the tags; default: tags, ner_tags or labels")
    stride: int | None = flag("tokens that two windows of a long text share; default: a quarter of --max_length")

    def problems(self) -> Problems:
        yield from super().problems()
        yield (
            self.scheme != "plain" and self.labels and "O" not in self.labels,
            f"--labels lacks O; expected it with --scheme {self.scheme}.",
        )


@dataclass
class QuestionAnsweringArguments(TaskArguments):
    """Arguments of `question-answering`."""

    max_length: int = flag("tokens of a window, with the question; longer texts have several", 384)
    stride: int = flag("tokens of the text that two windows share", 128)
    max_answer_length: int = flag("maximum tokens of an answer", 30)
    null_threshold: str | None = flag(
        "the score that an answer must exceed: a number, never (there always is an answer), or best (the best F1 on "
        "the validation rows); default: 0 if training rows have no answer, else never"
    )

    def problems(self) -> Problems:
        yield from super().problems()
        yield (
            self.null_threshold == "best" and not self.has_validation,
            "--null_threshold is best; expected validation rows with it.",
        )
        yield (
            self.null_threshold not in ("best", "never", None) and NUMBER.fullmatch(self.null_threshold) is None,
            f"--null_threshold is {self.null_threshold}; expected a number, best or never.",
        )


@dataclass
class NewModelArguments(TaskArguments):
    """Arguments of tasks that can start from random weights."""

    config_name: str | None = flag("instead of --model: random weights of a size such as configuration/tiny.json")
    config_overrides: list[str] | None = flag("fields of the configuration, as NAME=VALUE, such as norm_first=true")
    tokenizer_name: str | None = flag("the tokenizer, a folder or a hub id; default: that of --model")

    def problems(self) -> Problems:
        yield from super().problems()
        is_new = self.config_name
        yield is_new and self.model, "--config_name is given with --model; expected one of them."
        yield is_new and not self.tokenizer_name, "--config_name is given; expected --tokenizer_name with it."
        yield is_new and self.implementation == "bert", "--config_name is given; expected --implementation scratchbert."


# The values of each of --metrics. The first one selects the best model.
SEQ2SEQ_METRICS = {
    "rouge": ["rougeL", "rouge1", "rouge2", "rougeLsum"],
    "sacrebleu": ["bleu", "chrf"],
    "error_rate": ["token_error_rate", "item_error_rate"],
    "loss": ["loss"],
}


@dataclass
class Seq2SeqArguments(NewModelArguments):
    """Arguments of `seq2seq`."""

    smooths_labels = True

    num_decoder_layers: int | None = flag("blocks of a new decoder; default: as many as the encoder has")
    tie_encoder_decoder: bool = flag("encoder and new decoder share their weights, except cross-attention", False)
    source_column: str | None = flag("the column of the sources; default: source, text, article, document or en")
    target_column: str | None = flag(
        "the column of the targets; default: target, summary, highlights, translation or de"
    )
    max_target_length: int = flag("tokens of a target with [SEP], and of an output; longer targets are cut", 128)
    num_beams: int = flag("beams in evaluations and in the finished model; 1: greedy decoding", 1)
    metrics: list[str] | None = flag("some of rouge, sacrebleu, error_rate and loss; default: rouge")

    def problems(self) -> Problems:
        yield from super().problems()
        yield self.implementation == "bert", "--implementation is bert; expected scratchbert for seq2seq."
        for name in self.metrics or []:
            yield name not in SEQ2SEQ_METRICS, f"--metrics has {name}; expected some of {', '.join(SEQ2SEQ_METRICS)}."


@dataclass
class MaskedLMArguments(NewModelArguments):
    """Arguments of `masked-lm`."""

    text_column: str | None = flag("the column of the texts; default: text, sentence, content or document")
    line_by_line: bool = flag("each text is a sequence of its own, instead of concatenated with others", False)
    whole_word_masking: bool = flag("mask all tokens of a word, or none", False)

    def problems(self) -> Problems:
        yield from super().problems()
        yield (
            self.max_length < 3,
            f"--max_length is {self.max_length}; expected 3 or more, for [CLS], a word and [SEP].",
        )


# The arguments of every task, without those that decide how a row is read.
DATA = {each.name for each in fields(TaskArguments)} - {"max_length", "encoding", "delimiter", "implementation"}


def names_kept_for_evaluation(arguments: type[TaskArguments]) -> set[str]:
    """The arguments that --evaluate_only takes from the recipe of the model: neither the data, nor what makes a new
    model."""
    new_model = {"config_name", "config_overrides", "tokenizer_name", "num_decoder_layers", "tie_encoder_decoder"}
    return {each.name for each in fields(arguments)} - DATA - new_model - {"null_threshold"}
