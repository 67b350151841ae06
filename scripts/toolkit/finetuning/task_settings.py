"""The flags of each training command."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from toolkit.finetuning.settings import (
    VALIDATION,
    Settings,
    data_flag,
    evaluation_flag,
    model_flag,
    output_flag,
    training_flag,
)


@dataclass
class LabelSettings(Settings):
    """The flags for labels of sequences or tokens."""

    labels: list[str] | None = data_flag("the labels; default: those of the training set")
    class_weights: list[str] | None = training_flag(
        "the weight of each label, in the order of --labels; or balanced: inversely to its frequency",
        requires="problem=single_label or problem=multi_label",
    )
    label_smoothing: float = training_flag(
        "share of each label's weight that is spread over all labels",
        0.0,
        minimum=0,
        below=1,
        requires="problem=single_label",
    )

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

    task: ClassVar = "toolkit.finetuning.classification:Classification"

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
        "the separator between the labels of a row, for --problem multi_label in CSV or TSV",
        "|",
        requires="problem=multi_label",
    )
    metric: str | None = evaluation_flag(
        "the metric that selects the best model; default: accuracy, f1 or pearson", requires=VALIDATION
    )
    all_scores: bool = output_flag(
        "write the scores of all labels into predictions_….jsonl",
        False,
        requires="problem=single_label or problem=multi_label",
    )

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

    task: ClassVar = "toolkit.finetuning.token_classification:TokenClassification"

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

    task: ClassVar = "toolkit.finetuning.question_answering:QuestionAnswering"

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
        excludes="model",
        requires="tokenizer",
    )
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

    task: ClassVar = "toolkit.finetuning.seq2seq:Seq2Seq"

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
        "the value that selects the best model; default: the first of the first of --metrics", requires=VALIDATION
    )

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

    task: ClassVar = "toolkit.finetuning.masked_lm:Pretraining"

    text_column: str | None = data_flag("the column of the texts; default: text, sentence, content or document")
    line_by_line: bool = data_flag("each text is a sequence of its own, instead of concatenated with others", False)
    next_sentence: bool = training_flag(
        "also predict whether the second of two passages follows the first", False, excludes="line_by_line"
    )
    whole_word_masking: bool = training_flag("mask all tokens of a word, or none", False)
    streaming: bool = data_flag(
        "read the training set while training",
        False,
        requires="max_steps",
        excludes="validation_fraction or group_by_length",
    )
    shuffle_buffer: int = data_flag("sequences that --streaming draws from", 10_000, minimum=1, requires="streaming")

    def __post_init__(self):
        super().__post_init__()
        # [CLS], [SEP] and a word; or for pairs, two words and another [SEP].
        if self.max_length < (needed := 5 if self.next_sentence else 3):
            raise ValueError(f"--max_length is {self.max_length}; expected {needed} or more")
