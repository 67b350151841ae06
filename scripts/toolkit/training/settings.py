"""The flags that all training scripts share, and how they are read: from a YAML recipe and from the command line."""

import sys
from argparse import ArgumentDefaultsHelpFormatter, RawDescriptionHelpFormatter
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

import yaml
from transformers import HfArgumentParser

from toolkit.files import looks_like_a_path

# What may differ between a run and its continuation: it changes no weight.
FREE_TO_CHANGE = {"resume", "output", "trackers", "push_to_hub", "hub_private", "keep_checkpoints", "log_steps"}

COUNTS = ("max_length", "batch_size", "eval_batch_size", "gradient_accumulation_steps", "epochs", "max_steps",
          "eval_steps", "save_steps", "keep_checkpoints", "log_steps", "early_stopping")  # fmt: skip


def flag(default: Any, help: str):
    """A field of the settings with the text that `--help` shows."""
    return field(default=default, metadata={"help": help})


@dataclass
class Settings:
    """What defines a training run. A script adds its own."""

    model: str = flag(None, "the BERT or ScratchBert to start from: a folder or hub id")
    output: str = flag(None, "the folder to write; new, empty, or that of the run to --resume")
    implementation: Literal["scratchbert", "bert"] = flag("scratchbert", "whose classes: ours, or transformers' own")

    train_file: list[str] | None = flag(None, "files to train on: .csv, .tsv, .jsonl, .parquet, .txt")
    validation_file: list[str] | None = flag(None, "files to evaluate on while training")
    test_file: list[str] | None = flag(None, "files to evaluate the finished model on, once")
    dataset: str | None = flag(None, "instead of files: a dataset's name on the hub")
    dataset_config: str | None = flag(None, "its configuration")
    train_split: str = flag("train", "of --dataset")
    validation_split: str | None = flag("validation", "of --dataset; none: no evaluation")
    test_split: str | None = flag(None, "of --dataset")
    on_bad_row: Literal["stop", "skip"] = flag(
        "stop", "what to do with a row that cannot be used; skipped ones are named"
    )
    max_length: int = flag(128, "tokens to a sequence, at most; longer ones are cut")

    batch_size: int = flag(32, "sequences to a batch, on each process")
    eval_batch_size: int = flag(64, "sequences to a batch of an evaluation, on each process")
    gradient_accumulation_steps: int = flag(1, "batches to an update, on each process")
    padding_free_collation: bool = flag(False, "batches come as one row without padding (ScratchBert alone)")

    epochs: int = flag(3, "times through the training set")
    max_steps: int | None = flag(None, "updates to stop after, instead of --epochs")
    learning_rate: float = flag(5e-5, "at its highest")
    schedule: str = flag(
        "linear", "of the learning rate: linear, cosine, constant_with_warmup, … (transformers' names)"
    )
    warmup_ratio: float = flag(0.1, "share of the updates in which the learning rate rises")
    weight_decay: float = flag(0.01, "AdamW's; not of biases and layer norms")
    layer_decay: float = flag(1.0, "factor to the learning rate for each layer further from the head; 1: none")
    max_grad_norm: float = flag(1.0, "longer gradients are shortened to this; 0: never")
    freeze: str | None = flag(None, "what is not trained: embeddings, encoder, or the number of lowest blocks")
    lora_rank: int = flag(0, "train adapters of this rank (PEFT's LoRA) and the head instead of all; 0: all")
    lora_alpha: float = flag(16, "LoRA's scaling is this, over the rank")
    lora_dropout: float = flag(0.0, "in front of the adapters")
    early_stopping: int | None = flag(None, "evaluations without a better one to stop after")
    mixed_precision: Literal["no", "fp16", "bf16"] | None = flag(None, "left out: what accelerate is configured for")
    seed: int = flag(0, "of everything that is drawn")

    eval_steps: int | None = flag(None, "updates between evaluations; left out: after each epoch")
    save_steps: int | None = flag(None, "updates between checkpoints; left out: at each evaluation")
    keep_checkpoints: int = flag(2, "how many of the last are kept; the best is kept besides")
    resume: bool = flag(False, "continue the run in --output where its last checkpoint stands, if there is one")
    log_steps: int = flag(10, "updates between points of the curve")
    trackers: str = flag("tensorboard", "who follows the run: one of accelerate's, all, or none")
    push_to_hub: str | None = flag(None, "the repository to push the finished model to: user/name")
    hub_private: bool = flag(False, "whether that repository, if new, is private")

    def __post_init__(self):
        """Checks what can be checked without data.

        Raises:
            ValueError: a flag is missing or out of range; the message names it, what it got and what it wants.
        """
        # Scripts that can start from random weights have a `config_file`, which takes the place of `model`.
        for name in ("output",) if getattr(self, "config_file", None) else ("model", "output"):
            if getattr(self, name) is None:
                instead = " or --config_file" if name == "model" and hasattr(self, "config_file") else ""
                told = type(self).__dataclass_fields__[name].metadata["help"]
                raise ValueError(f"--{name}{instead} is missing: {told}")
        if self.push_to_hub is not None and self.push_to_hub.count("/") != 1:
            raise ValueError(f"--push_to_hub is {self.push_to_hub}; it wants user/name")
        for name in ("model", "tokenizer"):
            value = getattr(self, name, None)
            if value is not None and looks_like_a_path(value) and not Path(value).is_dir():
                raise ValueError(f"--{name} {value}: there is no such folder")
        for name in COUNTS:
            if (value := getattr(self, name)) is not None and value < 1:
                raise ValueError(f"--{name} is {value}; it wants 1 or more")
        for name in ("learning_rate", "weight_decay", "max_grad_norm", "lora_rank", "seed"):
            if (value := getattr(self, name)) < 0:
                raise ValueError(f"--{name} is {value}; it wants 0 or more")
        for name, low, high in (("warmup_ratio", 0, 1), ("layer_decay", 0, 1), ("lora_dropout", 0, 1)):
            if not low <= (value := getattr(self, name)) <= high:
                raise ValueError(f"--{name} is {value}; it wants {low} to {high}")
        if (self.train_file is None) == (self.dataset is None):
            given = "neither was" if self.dataset is None else "both were"
            raise ValueError(f"the data come from --train_file or from --dataset; {given} given")
        if self.dataset is not None and (self.validation_file or self.test_file):
            raise ValueError("--validation_file and --test_file go with --train_file; with --dataset give splits of it")
        if self.padding_free_collation and self.implementation == "bert":
            raise ValueError("--padding_free_collation wants --implementation scratchbert: BertModel computes padding")


class HelpFormatter(ArgumentDefaultsHelpFormatter, RawDescriptionHelpFormatter):
    """Leaves the description's lines as they are, and one spelling of each flag: --batch_size, not --batch-size too."""

    def _format_action_invocation(self, action):
        spelt = action.option_strings
        action.option_strings = spelt[:1] if spelt != ["-h", "--help"] else spelt
        try:
            return super()._format_action_invocation(action)
        finally:
            action.option_strings = spelt

    def _get_help_string(self, action):
        return action.help if action.default is None else super()._get_help_string(action)


class Parser(HfArgumentParser):
    """Says what is wrong in one line."""

    def error(self, message: str):
        self.exit(2, f"{self.prog}: {' '.join(message.split())}\n")


def parse(settings_class: type[Settings], description: str, argv: list[str] | None) -> Settings:
    """The settings of a recipe, if the command line begins with one, with what the command line says instead.

    Exits with code 2 and a line on stderr if something is wrong with either.
    """
    argv = sys.argv[1:] if argv is None else argv
    parser = Parser(
        settings_class,
        description=description,
        usage="%(prog)s [RECIPE.yaml] [--FLAG VALUE …]",
        formatter_class=HelpFormatter,
    )
    try:
        if argv and not argv[0].startswith("-"):
            argv = recipe_arguments(Path(argv[0]), {each.name for each in fields(settings_class)}) + argv[1:]
        (settings,) = parser.parse_args_into_dataclasses(argv, look_for_args_file=False)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    return settings


def recipe_arguments(path: Path, known: set[str]) -> list[str]:
    """A recipe as the command line that says the same, so that its values are read, and refused, in the same way.

    Raises:
        OSError, ValueError: it cannot be read, or has a name that is no flag's.
    """
    if path.suffix not in (".yaml", ".yml") or not path.is_file():
        raise ValueError(f"{path}: the recipe wants to be a .yaml file that exists; flags begin with --")
    try:
        recipe = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not YAML: {error}") from error
    if not isinstance(recipe, dict):
        raise ValueError(f"{path}: a recipe is a list of `flag: value`, a line each")
    if unknown := sorted(map(str, recipe.keys() - known)):
        raise ValueError(f"{path}: no such flag: {', '.join(unknown)}")
    arguments = []
    for name, value in recipe.items():
        if value is not None:
            # One argument, so that a value such as -1 is not taken for a flag.
            arguments += [f"--{name}={value}"] if not isinstance(value, list) else [f"--{name}", *map(str, value)]
    return arguments


def recipe_of(settings: Settings) -> str:
    """The recipe, in YAML, of exactly this run."""
    return yaml.safe_dump(asdict(settings), sort_keys=False, allow_unicode=True)


def changed(settings: Settings, recipe: str) -> dict[str, tuple]:
    """The flags, with the earlier and the present value, that would make of a continuation another run."""
    earlier = yaml.safe_load(recipe)
    return {
        name: (earlier.get(name), value)
        for name, value in asdict(settings).items()
        if name not in FREE_TO_CHANGE and earlier.get(name) != value
    }
