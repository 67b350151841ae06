"""The flags that all training commands have, and the rules that their values follow."""

import json
import math
import operator
from dataclasses import MISSING, Field, dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal

from toolkit.files import looks_like_a_path

# The first group of `--help` has the flags that are most used; the others are in the order of GROUPS.
GROUPS = ("most used", "data", "model", "training", "evaluation", "output")

# What --evaluate_only takes from the recipe of the run that made the model: how rows become inputs, and outputs become
# losses and metrics.
EVALUATED_WITH = {
    "implementation",
    "mixed_precision",
    "padding_free_collation",
    "eval_batch_size",
    "delimiter",
    "max_length",
    "stride",
    "problem",
    "text_column",
    "text_pair_column",
    "label_column",
    "label_separator",
    "class_weights",
    "label_smoothing",
    "scheme",
    "words_column",
    "tags_column",
    "label_all_pieces",
    "max_answer_length",
    "source_column",
    "target_column",
    "max_target_length",
    "num_beams",
    "length_penalty",
    "max_new_tokens",
    "metrics",
    "line_by_line",
    "next_sentence",
    "whole_word_masking",
    "all_scores",
}

# The other flags that --evaluate_only uses.
EVALUATION_OF = {
    "model",
    "output",
    "evaluate_only",
    "validation_file",
    "test_file",
    "dataset",
    "dataset_config",
    "validation_split",
    "test_split",
    "max_eval_samples",
    "on_bad_row",
    "null_threshold",
}

# Those of transformers that do not depend on a metric.
SCHEDULES = (
    "linear",
    "cosine",
    "cosine_with_restarts",
    "cosine_with_min_lr",
    "polynomial",
    "constant",
    "constant_with_warmup",
    "inverse_sqrt",
    "warmup_stable_decay",
)

# What flags of the validation set require.
VALIDATION = "validation_file or validation_fraction"

# The limits of a value: the comparison that it must pass, and the limit in words.
LIMITS = {
    "minimum": (operator.ge, "{} or more"),
    "above": (operator.gt, "more than {}"),
    "maximum": (operator.le, "at most {}"),
    "below": (operator.lt, "less than {}"),
}


def flag(
    group: str,
    help: str,
    default: Any = None,
    *,
    alias: str | None = None,
    requires: str | None = None,
    excludes: str | None = None,
    before: Any = MISSING,
    **limits: float,
):
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
        "single_label, the same share of each label",
        above=0,
        below=1,
        excludes="validation_file",
    )
    split_seed: int = data_flag(
        "the random seed that draws --validation_fraction",
        0,
        minimum=0,
        maximum=2**32 - 1,
        requires="validation_fraction",
    )
    delimiter: str | None = data_flag(
        "of .csv, .tsv and .txt; default: comma, tab, and .txt is no table", excludes="dataset"
    )
    on_bad_row: Literal["stop", "skip"] = data_flag("what to do with an invalid row; skipped ones are listed", "stop")
    max_train_samples: int | None = data_flag("use only the first N valid rows of the training set", minimum=1)
    max_eval_samples: int | None = data_flag(
        "use only the first N valid rows of the validation set, and of the test set",
        minimum=1,
        requires=f"{VALIDATION} or test_file",
    )
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
        "what is not trained: embeddings, encoder, or the number of lowest blocks; in "
        "an encoder-decoder, those of its encoder and what the decoder shares with it; "
        "weights that the checkpoint lacks are always trained"
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
        "model that is best on the validation set is saved",
        requires=VALIDATION,
        excludes="seed",
    )

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
        "number of checkpoints to keep, in addition to the best; 0: none of them, once the run is finished",
        2,
        minimum=0,
    )
    resume: bool = output_flag(
        "continue the run in --output from its last checkpoint, if it has one; a finished run is extended by more "
        "--epochs or --max_steps",
        False,
    )
    dry_run: bool = output_flag(
        "check model and data, show three rows, the lengths and an estimate of the time; write nothing", False
    )
    trust_checkpoints: bool = output_flag(
        "resume from checkpoints of DeepSpeed or sharded FSDP, which can run code when they are read",
        False,
        requires="resume",
    )
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
            if (value := getattr(self, name, None)) and looks_like_a_path(value) and not Path(value).is_dir():
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
