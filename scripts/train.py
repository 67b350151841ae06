#!/usr/bin/env python
"""Trains a BERT for a task: classification, tagging, question-answering, seq2seq or masked-lm.

    train.py TASK [recipe.yaml] --model MODEL --train_file train.csv --output_dir FOLDER
    train.py classification configuration/recipes/movie_reviews.yaml --model MODEL --output_dir reviews
    accelerate launch --config_file configuration/two_process.yaml scripts/train.py classification …

`train.py TASK --help` lists the arguments. Those of `transformers.TrainingArguments` have the same names and meanings.
A recipe is a YAML file of defaults for the arguments; the command line wins.

The folder then has the model with its code and tokenizer, README.md, metrics.json, predictions_SPLIT.jsonl,
labels_SPLIT.csv, curves.png, confusion_matrix.png, recipe.yaml and the checkpoints.

Exit code: 0 trained; 1 the training failed; 2 wrong arguments or data; 130 or 143 stopped by Ctrl-C or SIGTERM, after a
checkpoint was saved: --resume_from_checkpoint continues.
"""

import json
import logging
import math
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import yaml
from filelock import FileLock, Timeout

from toolkit.common import (
    CommandError,
    HelpFormatter,
    Parser,
    about,
    continuing_when_output_is_closed,
    find_shipped,
    first_of,
    handling_stop_signals,
    one_line,
    refuse_unknown,
    to_json,
    with_paths,
    write_json,
    write_text,
)
from toolkit.tasks import ARGUMENTS, task_class
from toolkit.tasks.arguments import DATA, Problems, TaskArguments, flag, names_kept_for_evaluation, problems_of_numbers

COMMAND = Parser(__file__, __doc__)
if (rank := os.environ.get("RANK", "0")) != "0":
    COMMAND.prog += f" (process {rank})"

RECIPE, METRICS_FILE = "recipe.yaml", "metrics.json"


# =========================================================================================================== arguments


@dataclass
class TrainingArguments:
    """Arguments of the training. Names and meanings are those of `transformers.TrainingArguments`; some defaults suit
    BERT better."""

    _argument_group_name = "training"

    output_dir: str | None = flag("the folder to write, new or empty")
    num_train_epochs: float = flag("passes over the training rows; fractions such as 0.5 are supported", 3.0)
    max_steps: int = flag("number of updates instead of --num_train_epochs; -1: not given", -1)
    per_device_train_batch_size: int = flag("rows per batch on each process", 32)
    per_device_eval_batch_size: int = flag("rows per batch of an evaluation on each process", 64)
    gradient_accumulation_steps: int = flag("batches per update on each process", 1)
    train_sampling_strategy: Literal["group_by_length", "random"] = flag(
        "how rows are put into batches", "group_by_length"
    )
    optim: Literal["adamw_torch_fused", "adafactor", "sgd"] = flag(
        "the optimizer; sgd has momentum 0.9", "adamw_torch_fused"
    )
    learning_rate: float = flag("the maximum learning rate", 5e-5)
    lr_scheduler_type: str = flag("the schedule, by transformers' name, such as linear, cosine or constant", "linear")
    lr_scheduler_kwargs: str | None = flag("arguments of the schedule, as JSON")
    warmup_steps: float = flag("updates in which the learning rate rises; below 1: a share of all updates", 0.1)
    weight_decay: float = flag("the weight decay of the optimizer; not applied to biases and norms", 0.01)
    max_grad_norm: float = flag("larger gradients are scaled to this norm; 0: never", 1.0)
    label_smoothing_factor: float = flag("share of each label's weight that is spread over all labels", 0.0)
    bf16: bool = flag("compute in bfloat16; weights stay in float32", False)
    fp16: bool = flag("compute in float16; requires an accelerator device", False)
    gradient_checkpointing: bool = flag("compute activations again in the backward pass: less memory, slower", False)
    freeze: str | None = flag("what is not trained: embeddings, encoder, or the number of lowest blocks")
    lora_rank: int = flag(
        "train adapters of this rank (LoRA, by PEFT) and the model head, with a rate such as 1e-3; 0: all weights", 0
    )
    lora_alpha: float = flag("LoRA scales by this divided by the rank", 16.0)
    lora_dropout: float = flag("dropout before the adapters", 0.0)
    seed: int = flag("the random seed", 42)
    eval_strategy: Literal["epoch", "steps", "no"] = flag("when the model is evaluated, besides at the end", "epoch")
    eval_steps: int | None = flag("updates between evaluations with --eval_strategy steps")
    save_strategy: Literal["epoch", "steps", "no"] = flag(
        "when a checkpoint is saved, besides the best and the last; no: only after Ctrl-C", "epoch"
    )
    save_steps: int = flag("updates between checkpoints with --save_strategy steps", 500)
    save_total_limit: int = flag("number of checkpoints to keep besides the best", 2)
    load_best_model_at_end: bool = flag("save the model of the best evaluation instead of the last one", True)
    metric_for_best_model: str | None = flag("the metric of the best evaluation; default: that of the task")
    early_stopping_patience: int | None = flag("stop after this many evaluations without a better metric")
    logging_steps: int = flag("updates between points of the curves", 10)
    report_to: str = flag("where the run is logged: a tracker of accelerate, such as tensorboard, all or none", "none")
    push_to_hub: bool = flag("push the finished model to the Hub", False)
    hub_model_id: str | None = flag("the repository for --push_to_hub: user/name")
    hub_private_repo: bool = flag("make a new repository private", False)
    resume_from_checkpoint: bool = flag(
        "continue the run in --output_dir from its last checkpoint, if there is one", False
    )
    evaluate_only: bool = flag("train nothing: evaluate --model on the validation and test rows", False)
    dry_run: bool = flag("check data and model, print the first inputs, and write nothing", False)

    def problems(self) -> Problems:
        """The rules between the arguments."""
        yield not self.output_dir, "--output_dir is missing; expected the folder to write."
        yield self.bf16 and self.fp16, "--bf16 and --fp16 are given; expected one of them."
        yield not self.max_steps, "--max_steps is 0; expected 1 or more, or -1."
        yield not self.num_train_epochs, "--num_train_epochs is 0; expected more."
        yield (
            (self.eval_strategy == "steps") != bool(self.eval_steps),
            "one of --eval_strategy steps and --eval_steps N is given; expected both or none.",
        )
        yield self.lora_rank and self.freeze, "--lora_rank and --freeze are given; expected one of them."
        yield (
            self.push_to_hub and (self.hub_model_id or "").count("/") != 1,
            "--push_to_hub is given; expected --hub_model_id user/name with it.",
        )
        yield self.seed >= 2**32, f"--seed is {self.seed}; expected 0 to 2**32 - 1."
        yield (
            self.label_smoothing_factor >= 1,
            f"--label_smoothing_factor is {self.label_smoothing_factor}; expected 0 or more, below 1.",
        )


def rules(data: TaskArguments, arguments: TrainingArguments) -> Problems:
    """All rules."""
    for own in (data, arguments):
        yield from problems_of_numbers(own)
        yield from own.problems()
    has_rows = data.has_validation or data.test_file or data.test_split
    is_new = getattr(data, "config_name", None)
    yield not (data.model or is_new), "--model is missing; expected a folder or a hub id."
    yield (
        is_new and (arguments.freeze or arguments.lora_rank),
        "--freeze or --lora_rank is given with --config_name, whose weights are random; expected --model.",
    )
    yield (
        not (data.train_file or data.dataset or arguments.evaluate_only),
        "--train_file is missing; expected files, or --dataset.",
    )
    yield (
        arguments.evaluate_only and not has_rows,
        "--evaluate_only is given; expected validation or test rows with it.",
    )
    yield (
        arguments.evaluate_only and data.validation_fraction,
        "--validation_fraction is given with --evaluate_only; expected --validation_file or --test_file.",
    )
    smooths = data.smooths_labels and getattr(data, "problem", "single_label") == "single_label"
    yield (
        arguments.label_smoothing_factor and not smooths,
        "--label_smoothing_factor is given; expected a task with one label for each text, word or token.",
    )
    yield (
        arguments.early_stopping_patience and arguments.eval_strategy == "no",
        "--early_stopping_patience is given with --eval_strategy no; expected epoch or steps.",
    )
    for name in ("early_stopping_patience", "metric_for_best_model", "eval_steps"):
        yield (
            getattr(arguments, name) and not data.has_validation,
            f"--{name} is given; expected validation rows with it.",
        )
    yield (
        data.max_eval_samples and not has_rows,
        "--max_eval_samples is given; expected validation or test rows with it.",
    )


def parse(argv: list[str]) -> tuple[str, TaskArguments, TrainingArguments]:
    """The task and its arguments.

    Raises:
        OSError, ValueError, yaml.YAMLError: an argument is wrong, or the recipe cannot be read.
    """
    if not argv or argv[0] in ("-h", "--help"):
        print(__doc__)
        sys.exit(0)
    task = argv[0]
    if task not in ARGUMENTS:
        raise ValueError(
            f"the task is {task}; expected one of {', '.join(ARGUMENTS)}. `train.py --help` shows how to start."
        )
    data, arguments = parse_arguments(task, argv[1:])
    for is_broken, message in rules(data, arguments):
        if is_broken:
            raise ValueError(message)
    return task, data, arguments


def parse_arguments(task: str, given: list[str]) -> tuple[TaskArguments, TrainingArguments]:
    """The arguments of a recipe, if there is one, and of the command line, which wins. With --evaluate_only, how rows
    are read is in the recipe of the model."""
    from transformers import HfArgumentParser  # it takes a second

    parser = HfArgumentParser(
        (ARGUMENTS[task], TrainingArguments), prog=f"train.py {task}", allow_abbrev=False, formatter_class=HelpFormatter
    )
    parser.error = COMMAND.error
    if given and not given[0].startswith("-"):
        given = recipe_arguments(find_shipped(given[0])) + given[1:]
    data, arguments, unknown = parser.parse_args_into_dataclasses(
        given, return_remaining_strings=True, look_for_args_file=False
    )
    refuse_unknown(parser, unknown)
    if arguments.evaluate_only and (of_model := Path(data.model or "", RECIPE)).is_file():
        names = names_kept_for_evaluation(ARGUMENTS[task])
        given = recipe_arguments(of_model, names) + given
        data, arguments = parser.parse_args_into_dataclasses(given, look_for_args_file=False)
    return data, arguments


def recipe_arguments(path: Path, names: set[str] | None = None) -> list[str]:
    """The arguments in a recipe. All values are texts, which the parser converts as it does on the command line. Paths
    that begin with ./ or ../ are relative to the recipe.

    Args:
        names: those to return; None: all.
    """
    with path.open("rb") as file:
        recipe = yaml.load(file, yaml.BaseLoader)
    if not isinstance(recipe, dict):
        raise ValueError(f"the recipe {path} has no arguments; expected `name: value` on each line.")
    arguments = []
    for name, value in recipe.items():
        if value in ("null", "") or (names is not None and name not in names):
            continue
        is_list = isinstance(value, list)
        values = [
            str((path.parent / each).resolve()) if each.startswith(("./", "../")) else each
            for each in (value if is_list else [value])
        ]
        arguments += [f"--{name}", *values] if is_list else [f"--{name}={values[0]}"]
    return arguments


def main(argv: list[str] | None = None) -> int:
    """Runs the training. Returns the exit code."""
    given = sys.argv[1:] if argv is None else argv
    with continuing_when_output_is_closed():
        return COMMAND.run(lambda: run(*parse(given)), expected=(yaml.YAMLError,))


# ================================================================================================================= run


@dataclass
class TrainingRun:
    """What the parts of a run share.

    Attributes:
        rows, examples: of the splits "train", "validation" and "test", as far as there are any.
        received: the signal to stop that this process got.
        stop: the signal for which all processes stop after this update.
        evaluated: the metrics and predictions of the validation rows, if the model as it is has been evaluated.
        saved_step: the step of the model that is saved.
    """

    task: Any
    data: TaskArguments
    arguments: TrainingArguments
    accelerator: Any
    rows: dict[str, list[dict]]
    examples: dict[str, list[dict]]
    model: Any = None
    optimizer: Any = None
    schedule: Any = None
    checkpoints: Any = None
    progress: Any = None
    received: int | None = None
    stop: int | None = None
    evaluated: tuple[dict, list[dict]] | None = None
    saved_step: int | None = None

    @property
    def output(self) -> Path:
        return Path(self.arguments.output_dir)

    @property
    def settings(self) -> dict:
        """All arguments, with absolute paths."""
        return with_paths(asdict(self.data) | asdict(self.arguments), absolute)

    @property
    def metric(self) -> str:
        return self.arguments.metric_for_best_model or self.task.metric_names[0]


def run(task_name: str, data: TaskArguments, arguments: TrainingArguments) -> None:
    """The whole way from the data to the saved model."""
    import transformers
    from accelerate.utils import set_seed

    check_output(arguments)
    check_hub(arguments)
    accelerator = make_accelerator(arguments)
    set_seed(arguments.seed)  # the weights that --model lacks
    transformers.logging.disable_progress_bar()
    # Warnings about weights that are tied, and therefore saved once, and about missing ones, which are printed below.
    # With a level, the logger of transformers would list the layers that a single process does not shard.
    for name in ("accelerate.utils.other", "transformers.modeling_utils"):
        logging.getLogger(name).addFilter(lambda record: record.levelno >= logging.ERROR)
    check_sources(data)
    task = task_class(task_name)(data)
    metrics, given = [*task.metric_names, "loss"], arguments.metric_for_best_model
    if given and given not in metrics:
        raise ValueError(f"--metric_for_best_model is {given}; expected one of {', '.join(metrics)}.")
    if arguments.evaluate_only:
        task.restore()
    task.say = accelerator.print
    task.label_smoothing = arguments.label_smoothing_factor
    rows = read_rows(task, arguments, accelerator.print)
    examples = {split: task.encode(own) for split, own in rows.items()}
    this = TrainingRun(task, data, arguments, accelerator, rows, examples)
    report_lengths(this)
    make_model(this)
    if arguments.evaluate_only:
        this.model = accelerator.prepare_model(this.model, evaluation_mode=True)
    elif arguments.dry_run:
        show_inputs(this)
        return
    else:
        make_optimizer_and_checkpoints(this)
    with locked(this):
        if not arguments.evaluate_only:
            resume(this)
            write_recipe(this)
            train(this)
        finish(this)


def check_sources(data: TaskArguments) -> None:
    """Raises CommandError unless model and tokenizer can be opened, without code from elsewhere."""
    from toolkit.hub import check_source

    for name in ("model", "tokenizer_name"):
        if source := getattr(data, name, None):
            with about(f"--{name} {source}"):
                check_source(source)


def check_hub(arguments: TrainingArguments) -> None:
    """Raises ValueError unless the finished model could be pushed now."""
    from huggingface_hub import constants, get_token

    if not arguments.push_to_hub:
        return
    if constants.HF_HUB_OFFLINE:
        raise ValueError("--push_to_hub is given and HF_HUB_OFFLINE is set; expected access to the Hub.")
    if get_token() is None:
        raise ValueError("--push_to_hub is given without a token; expected one, by `hf auth login` or HF_TOKEN.")


def check_output(arguments: TrainingArguments) -> None:
    """Raises ValueError if the folder holds something else, or a finished run."""
    output = Path(arguments.output_dir)
    names = {path.name for path in output.iterdir()} - {LOCK} if output.exists() else set()
    if names and not arguments.resume_from_checkpoint:
        raise ValueError(
            f"--output_dir {output} is not empty; expected a new folder, or --resume_from_checkpoint for a stopped run."
        )
    if names and RECIPE not in names:
        raise ValueError(f"--output_dir {output} holds no run to resume; expected a folder with {RECIPE}.")
    if METRICS_FILE in names:
        raise ValueError(
            f"--output_dir {output} holds a finished run; expected a new one. To train its model further, use --model."
        )


LOCK = ".lock"


@contextmanager
def locked(run: TrainingRun) -> Iterator[None]:
    """Creates the folder. Only one run at a time has it."""
    run.output.mkdir(parents=True, exist_ok=True)
    if not run.accelerator.is_main_process:
        yield
        return
    try:
        with FileLock(run.output / LOCK, timeout=0):
            yield
    except Timeout:
        raise ValueError(f"--output_dir {run.output} is in use by another run; expected another folder.") from None
    (run.output / LOCK).unlink(missing_ok=True)


def make_accelerator(arguments: TrainingArguments):
    """Devices, processes and precision, as `accelerate launch` and its configuration say."""
    import torch
    from accelerate import Accelerator, PartialState
    from accelerate.tracking import get_available_trackers
    from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin

    has_device = torch.accelerator.is_available()
    trackers = ["none", "all", *map(str, get_available_trackers())]
    if arguments.report_to not in trackers:  # else Accelerate logs nowhere
        raise ValueError(
            f"--report_to is {arguments.report_to}; expected one of {', '.join(trackers)}, which are installed."
        )
    accelerator = Accelerator(
        mixed_precision="bf16" if arguments.bf16 else "fp16" if arguments.fp16 else None,
        gradient_accumulation_steps=arguments.gradient_accumulation_steps,
        step_scheduler_with_optimizer=False,  # else one step of the schedule for each process
        log_with=None if arguments.report_to == "none" else arguments.report_to,
        project_dir=arguments.output_dir,
        cpu=int(os.environ.get("WORLD_SIZE", "1")) > 1 and not has_device,
    )
    if accelerator.mixed_precision == "fp16" and not has_device:  # also as a configuration of accelerate says
        raise ValueError("the precision is fp16 without an accelerator device; expected --bf16, or neither.")
    if os.environ.get("ACCELERATE_USE_FSDP") == "true" and accelerator.distributed_type == DistributedType.MULTI_CPU:
        # Accelerate disables FSDP on the CPU, where torch supports it.
        accelerator.state.distributed_type = PartialState().distributed_type = DistributedType.FSDP
        accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin()
    if arguments.lora_rank and accelerator.distributed_type == DistributedType.FSDP:
        raise ValueError("--lora_rank is given with FSDP; expected processes without sharding.")
    return accelerator


# ================================================================================================================ data


def read_rows(task, arguments: TrainingArguments, say) -> dict[str, list[dict]]:
    """The rows of each split, with all columns of the file for the predictions. Prints what is read as what, the
    labels, and what looks wrong in them."""

    def read(content: dict) -> dict:
        return {**task.read(content), "columns": content}

    data = task.arguments
    rows = {}
    found = sources(task, arguments.evaluate_only)
    used = Counter(file.path for source in found.values() for file in source.files)
    for path, count in used.items():
        if count > 1:
            say(f"{path} is given more than once; metrics on rows of the training say nothing about other rows")
    for split, source in found.items():
        if not rows:
            say(f"{source}: {task.find_columns(source.columns())}")
        rows[split] = list(source.valid_rows(read, data.on_bad_row, say))
        if split == "train":
            # The validation and test rows may have these labels only.
            for remark in task.prepare(rows[split]):
                say(remark)
    if data.validation_fraction:
        rows["train"], rows["validation"] = hold_out_rows(task, rows["train"], say)
    return rows


def hold_out_rows(task, rows: list[dict], say) -> tuple[list[dict], list[dict]]:
    """The rows to train on, and those to validate on. Equal texts, and rows of a group, are on the same side."""
    from toolkit.data import hold_out, value_of

    data = task.arguments
    texts = [str([row.get(name) for name in task.grouped_by]) for row in rows]
    copies = len(rows) - len(set(texts))
    groups = [value_of(row["columns"], data.group_column) for row in rows] if data.group_column else texts
    strata = [task.stratum(row) for row in rows]
    kept, held_out = hold_out(list(zip(texts, groups, strict=True)), strata, data.validation_fraction, data.split_seed)
    held_out = held_out[: data.max_eval_samples]
    say(
        f"{len(held_out):,} of {len(rows):,} rows are held out for validation"
        + (f"; {copies:,} rows are copies of others, and stay together" if copies else "")
    )
    counts = Counter(strata)
    if missing := counts.keys() - {strata[i] for i in held_out}:
        fewest = min(counts.values())
        advice = f"; --validation_fraction {math.ceil(100 / fewest) / 100} has all of them" if fewest > 1 else ""
        say(f"{len(missing)} of {len(counts)} labels are in no validation row{advice}")
    return [rows[i] for i in kept], [rows[i] for i in held_out]


def sources(task, evaluate_only: bool) -> dict:
    """What each split is read from."""
    from toolkit.data import Source, open_files

    data, found = task.arguments, {}
    for split in ("train", "validation", "test")[evaluate_only:]:
        limit = data.max_train_samples if split == "train" else data.max_eval_samples
        files, part = getattr(data, f"{split}_file"), getattr(data, f"{split}_split")
        if files:
            name = f"--{split}_file"
            opened = open_files(files, name, data.encoding, data.delimiter, task.txt_format)
            found[split] = Source(name, opened, limit=limit)
        elif data.dataset and part:
            found[split] = Source("--dataset", [], (data.dataset, data.dataset_config, part), limit)
    return found


def lengths_of(run: TrainingRun) -> dict[str, dict[str, int]]:
    """For each split the numbers of rows, of tokens, and of those that --max_length cuts off."""
    return {
        split: {
            "rows": len(run.rows[split]),
            "tokens": sum(example["length"] for example in examples),
            "rows_cut": sum(example["cut"] > 0 for example in examples),
            "tokens_cut": sum(example["cut"] for example in examples),
        }
        for split, examples in run.examples.items()
    }


def report_lengths(run: TrainingRun) -> None:
    for split, found in lengths_of(run).items():
        cut = ""
        if found["rows_cut"]:
            share = found["tokens_cut"] / (found["tokens"] + found["tokens_cut"])
            cut = f"; --max_length {run.data.max_length} cuts {found['rows_cut']:,} rows, {share:.1%} of the tokens"
        run.accelerator.print(f"{split}: {found['rows']:,} rows, {found['tokens']:,} tokens{cut}")


def show_inputs(run: TrainingRun) -> None:
    """Prints the first inputs of the training, and the number of updates of an epoch."""
    for example in run.examples["train"][:3]:
        tokens = " ".join(run.task.tokenizer.convert_ids_to_tokens(example["input_ids"]))
        run.accelerator.print(f"{run.rows['train'][example['row']]['place']}: {tokens} → {example.get('labels')}")
    run.accelerator.print(f"{updates_of_an_epoch(run):,} updates per epoch; nothing was written")


# ================================================================================================= model and optimizer


def make_model(run: TrainingRun) -> None:
    """Opens the model. Prints which modules are new, and therefore random."""
    from toolkit.training import add_lora, freeze

    task, arguments = run.task, run.arguments
    model = task.open_model()
    positions = model.config.max_position_embeddings
    for name in ("max_length", "max_target_length"):
        length = getattr(run.data, name, 0)
        if length > positions:
            raise ValueError(f"--{name} is {length}; expected at most {positions}, the model's positions.")
    if task.new_weights:
        modules = {".".join(name.split(".")[:-1][:3]) for name in task.new_weights}
        new = ", ".join(sorted(modules))
        if arguments.evaluate_only:
            raise ValueError(
                f"--model {run.data.model} has no weights of {new}; expected a model trained for this task."
            )
        run.accelerator.print(f"{run.data.model} has no weights of {new}; they are random before the training")
    freeze(model, arguments.freeze, task.new_weights)
    if arguments.gradient_checkpointing:
        name = "activation_checkpointing_enable"  # since transformers 5.22
        enable = getattr(model, name, None) or model.gradient_checkpointing_enable
        enable({"use_reentrant": False})
    run.model = add_lora(model, arguments, task.new_weights)


def make_optimizer_and_checkpoints(run: TrainingRun) -> None:
    """The optimizer, the learning-rate schedule, and the state of a run that has not begun."""
    from toolkit.training import (
        FREE_TO_CHANGE,
        Checkpoints,
        Progress,
        fingerprint,
        make_optimizer,
        make_schedule,
        prepare,
    )

    arguments, accelerator = run.arguments, run.accelerator
    steps = arguments.max_steps
    if steps < 0:
        steps = math.ceil(arguments.num_train_epochs * updates_of_an_epoch(run))
    optimizer = make_optimizer(run.model, arguments)
    run.model, run.optimizer = prepare(accelerator, run.model, optimizer)
    run.schedule = accelerator.prepare_scheduler(make_schedule(optimizer, arguments, steps))
    run.checkpoints = Checkpoints(run.output, accelerator, arguments.save_total_limit)
    # Where the data are may change: their content is compared.
    free = FREE_TO_CHANGE | DATA - {"model"}
    run.progress = Progress(
        arguments={name: value for name, value in run.settings.items() if name not in free},
        data={split: fingerprint(run.rows[split], run.examples[split]) for split in run.rows},
        processes=accelerator.num_processes,
        steps=steps,
    )


def resume(run: TrainingRun) -> None:
    """Loads the last complete checkpoint, if there is one.

    Raises:
        ValueError: arguments, data or the number of processes have changed since.
    """
    from toolkit.training import read_progress

    if run.accelerator.is_main_process:
        run.checkpoints.remove_unfinished()
    found = run.checkpoints.complete()
    if found:
        saved = read_progress(found[-1])
        run.progress.check_same_run(saved, found[-1])
        run.checkpoints.load(found[-1])
        run.progress = saved
        run.accelerator.print(f"resuming at step {run.progress.step:,} of {run.progress.steps:,}")
    elif run.settings["resume_from_checkpoint"]:
        run.accelerator.print(f"{run.output} has no complete checkpoint: the training starts at step 0")


def write_recipe(run: TrainingRun) -> None:
    """Writes the arguments of this run, with absolute paths, so that it can be repeated from any folder."""
    if run.accelerator.is_main_process:
        recipe = run.settings
        del recipe["resume_from_checkpoint"]
        write_text(run.output / RECIPE, yaml.safe_dump(recipe, sort_keys=False, allow_unicode=True))


def absolute(value: str, is_file: bool) -> str:
    return str(Path(value).resolve()) if is_file or Path(value).exists() else value


# ============================================================================================================ the loop


def batches(run: TrainingRun, epoch: int) -> list[list[int]]:
    """The rows of each batch of an epoch on this process."""
    from toolkit.training import epoch_batches

    return epoch_batches(run.examples["train"], run.arguments, run.accelerator, epoch)


def updates_of_an_epoch(run: TrainingRun) -> int:
    return math.ceil(len(batches(run, 0)) / run.arguments.gradient_accumulation_steps)


def updates(run: TrainingRun) -> Iterator[list[tuple[list[dict], dict]]]:
    """The remaining updates of the epoch: of each its batches, with their examples.

    A process may have no row in the last batch. It takes part with another row, which adds nothing to the loss.
    """
    progress, examples = run.progress, run.examples["train"]
    seed = (run.arguments.seed, progress.epoch)
    remaining = iter(batches(run, progress.epoch)[progress.batch :])
    while numbers := list(islice(remaining, run.arguments.gradient_accumulation_steps)):
        chosen = [[examples[i] for i in own] for own in numbers]
        yield [(own, run.task.collate(own or examples[:1], seed)) for own in chosen]


def train(run: TrainingRun) -> None:
    """Makes the remaining updates, with evaluations and checkpoints between them."""
    from toolkit.progress import progress_bar
    from toolkit.training import seed_update

    progress, arguments = run.progress, run.arguments
    run.accelerator.init_trackers("logs", {name: str(value) for name, value in asdict(arguments).items()})
    run.model.train()
    bar_of_steps = progress_bar(
        progress.steps, initial=progress.step, unit="step", miniters=1, disable=not run.accelerator.is_main_process
    )
    with handling_stop_signals(partial(receive, run)), bar_of_steps as bar:
        began = time.monotonic()
        while not progress.finished:
            per_epoch = len(batches(run, progress.epoch))
            for update in updates(run):
                seed_update(arguments.seed, progress.step, run.accelerator.process_index)
                loss, tokens = backward(run, update)
                step(run, update)
                progress.step, progress.batch = progress.step + 1, progress.batch + len(update)
                if progress.batch == per_epoch:
                    progress.epoch, progress.batch = progress.epoch + 1, 0
                now = time.monotonic()
                progress.seconds, began = progress.seconds + now - began, now
                log(run, bar, loss, tokens)
                between_updates(run, bar)
                if progress.finished:
                    break


def backward(run: TrainingRun, update: list[tuple[list[dict], dict]]) -> tuple[float, int]:
    """Computes the gradient of an update: that of one large batch. Each loss is a sum over labels, divided by the
    number of labels in the update, over all its batches and all processes.

    Returns:
        The loss and the number of non-padding tokens, over all processes.

    Raises:
        CommandError: the loss is not finite.
    """
    import torch
    from accelerate.utils import send_to_device

    accelerator, task = run.accelerator, run.task
    moved = [(send_to_device(batch, accelerator.device, True), float(bool(own))) for own, batch in update]
    count = accelerator.reduce(sum(task.count(batch).float() * share for batch, share in moved), "sum")
    # Accelerate divides by the batches of an update, and averages the gradients of the processes.
    scale = accelerator.gradient_accumulation_steps * accelerator.num_processes / count.clamp(min=1e-9)
    losses = []
    for i, (batch, share) in enumerate(moved, 1):
        is_last = i == len(moved)
        accelerator.gradient_state._set_sync_gradients(is_last)
        with nullcontext() if is_last else accelerator.no_sync(run.model):
            loss = task.loss_of(task.logits(run.model, batch), batch) * share
            accelerator.backward(loss * scale)
        losses.append(loss.detach())
    tokens = sum(batch["attention_mask"].sum() * share for batch, share in moved)
    own = torch.stack(
        [torch.stack(losses).sum(), tokens, torch.tensor(float(run.received or 0), device=accelerator.device)]
    )
    total, tokens, stop = accelerator.reduce(own, "sum").tolist()  # one synchronisation with the device
    run.stop = (run.received or signal.SIGTERM) if stop else None
    if not math.isfinite(total):
        bad = [own for (own, _), loss in zip(update, losses, strict=True) if not loss.isfinite()]
        raise not_finite(run, "loss", [example for own in bad for example in own])
    return total / max(count.item(), 1e-9), int(tokens)


def step(run: TrainingRun, update: list[tuple[list[dict], dict]]) -> None:
    """Clips the gradient, and updates the weights and the learning rate.

    Raises:
        CommandError: the gradient is not finite.
    """
    accelerator = run.accelerator
    if run.arguments.max_grad_norm:
        norm = accelerator.clip_grad_norm_(run.model.parameters(), run.arguments.max_grad_norm)
        if accelerator.scaler is None and norm is not None and not math.isfinite(norm):
            raise not_finite(run, "gradient", [example for own, _ in update for example in own])
    run.optimizer.step()
    if not accelerator.optimizer_step_was_skipped:
        run.schedule.step()
    run.optimizer.zero_grad()


def not_finite(run: TrainingRun, what: str, examples: list[dict], split: str = "train") -> CommandError:
    """The error about a loss, gradient or output that is not finite, with the rows of all processes."""
    from accelerate.utils import gather_object

    rows = gather_object([run.rows[split][example["row"]]["place"] for example in examples])
    step, advice = "", "use another model"
    if run.progress is not None:
        step, advice = f" at step {run.progress.step + 1}", "train anew with a lower --learning_rate"
    return CommandError(
        f"the {what} is not finite{step}, in {'; '.join(first_of(rows, 8))}. Correct these rows, or {advice}.",
        exit_code=1,
    )


def is_time(progress, strategy: str, steps: int) -> bool:
    """Whether the last update ended an epoch or the run, or a number of steps; for the strategy "no", never."""
    ends = {"epoch": progress.batch == 0 or progress.finished, "steps": progress.step % steps == 0}
    return ends.get(strategy, False)


def between_updates(run: TrainingRun, bar) -> None:
    """Evaluates and saves when it is time, and ends the run after a signal."""
    progress, arguments = run.progress, run.arguments
    run.evaluated = None
    evaluates = "validation" in run.rows and is_time(progress, arguments.eval_strategy, arguments.eval_steps or 1)
    is_best = evaluates and evaluate_between(run, bar) and arguments.load_best_model_at_end
    saves = is_best or progress.finished or is_time(progress, arguments.save_strategy, arguments.save_steps)
    if saves and arguments.save_strategy != "no":
        run.checkpoints.save(progress)
    if run.stop and not progress.finished:
        run.checkpoints.save(progress)
        raise CommandError(
            f"stopped at step {progress.step:,} of {progress.steps:,} and saved; --resume_from_checkpoint continues",
            exit_code=128 + run.stop,
        )


def receive(run: TrainingRun, number: int, _) -> None:
    """Makes SIGTERM and SIGINT (Ctrl-C) save a checkpoint and end the run. A second signal ends it at once."""
    run.received = number
    signal.signal(number, signal.SIG_DFL)


def log(run: TrainingRun, bar, loss: float, tokens: int) -> None:
    """Shows an update, and adds a point to the curves every --logging_steps updates."""
    progress, rate = run.progress, run.schedule.get_last_lr()[0]
    bar.set_postfix(loss=f"{loss:.3f}", lr=f"{rate:.1e}", tokens=tokens, refresh=False)
    bar.update()
    progress.window.append(loss)
    if progress.step % run.arguments.logging_steps == 0 or progress.finished:
        point = {"loss": sum(progress.window) / len(progress.window), "learning_rate": rate}
        progress.window.clear()
        add_to_curves(run, "train", point)


def add_to_curves(run: TrainingRun, split: str, point: dict[str, float]) -> None:
    run.progress.history.append({"step": run.progress.step, split: point})
    run.accelerator.log({f"{split}/{name}": value for name, value in point.items()}, run.progress.step)


# ========================================================================================================== evaluation


def evaluate(run: TrainingRun, split: str) -> tuple[dict[str, float], list[dict]]:
    """The metrics of a split, and the prediction of each row in order. All processes return the same.

    Raises:
        CommandError: an output is not finite.
    """
    import torch
    from accelerate.utils import gather_object, send_to_device

    from toolkit.training import evaluation_batches

    examples, task, accelerator = run.examples[split], run.task, run.accelerator
    found, sums, bad = [], [], []
    run.model.eval()
    with torch.no_grad():
        for numbers in evaluation_batches(examples, run.arguments, accelerator):
            # Sharded models expect all processes in each call: one without a row takes another, which does not count.
            batch = send_to_device(task.collate([examples[i] for i in numbers or [0]]), accelerator.device, True)
            outputs, loss = task.predict(run.model, batch)
            if not loss.isfinite():
                bad += [examples[i] for i in numbers]
            if numbers:
                found += zip(numbers, outputs, strict=True)
                sums.append((loss.item(), task.count(batch).item()))
    in_order = dict(gather_object(found))
    losses, counts = zip(*gather_object(sums), strict=True)
    if not all(map(math.isfinite, losses)):
        raise not_finite(run, f"{split} loss", bad, split)
    outputs = [in_order[i] for i in range(len(examples))]
    if split == "validation":
        task.tune(run.rows[split], examples, outputs)
    predictions = task.decode(run.rows[split], examples, outputs)
    loss = math.fsum(losses) / (math.fsum(counts) or 1)
    perplexity = {"perplexity": math.exp(min(loss, 700))} if task.is_language_model else {}
    return {"loss": loss, **perplexity, **task.metrics(run.rows[split], predictions)}, predictions


def evaluate_between(run: TrainingRun, bar) -> bool:
    """Evaluates the validation rows. Returns whether the model is the best so far, and notes it."""
    progress, task = run.progress, run.task
    run.evaluated = evaluate(run, "validation")
    metrics, _ = run.evaluated
    run.model.train()
    sign = -1 if run.metric in task.lower_is_better else 1
    # The loss chooses between models with the same metric. A lower one is no reason to continue.
    value = [sign * metrics[run.metric], -metrics["loss"]]
    is_better = progress.best is None or value[0] > progress.best[0]
    is_best = progress.best is None or value > progress.best
    progress.without_better = 0 if is_better else progress.without_better + 1
    progress.stopped_early = progress.without_better >= (run.arguments.early_stopping_patience or math.inf)
    if is_best:
        progress.best, progress.best_step = value, progress.step
    add_to_curves(run, "validation", metrics)
    if run.accelerator.is_main_process:
        bar.write(f"step {progress.step:,}: {in_words(metrics)}{' (best)' if is_best else ''}")
    return is_best


def in_words(metrics: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:.4f}" for name, value in metrics.items())


# =============================================================================================================== files


def finish(run: TrainingRun) -> None:
    """Evaluates the model to save, and writes the files of the run."""
    accelerator, progress = run.accelerator, run.progress
    if progress is not None:
        run.saved_step = load_best(run)
        check_weights(run)
    evaluations = {split: evaluated(run, split) for split in ("validation", "test") if split in run.rows}
    state = None
    if progress is not None and accelerator.distributed_type in ("FSDP", "DEEPSPEED") and not run.arguments.lora_rank:
        state = accelerator.get_state_dict(run.model)
    if accelerator.is_main_process:
        with about(f"{run.output} cannot be written"):
            write_files(run, evaluations, state)
        for split, (metrics, _) in evaluations.items():
            print(f"{split}: {in_words(metrics)}")
        print(f"{run.output} has the {'metrics' if progress is None else 'model'}")
        if run.arguments.push_to_hub:
            push(run)
    accelerator.wait_for_everyone()
    accelerator.end_training()


def check_weights(run: TrainingRun) -> None:
    """Raises CommandError if a weight is not finite: the loss of the last update is computed before it."""
    if not all(weight.isfinite().all() for weight in run.model.parameters()):
        raise CommandError("weights are not finite after the last update; train anew with a lower --learning_rate.", 1)


def load_best(run: TrainingRun) -> int:
    """Loads the checkpoint of the best evaluation, if it is not the last one. Returns the step of the model."""
    progress, arguments = run.progress, run.arguments
    if not arguments.load_best_model_at_end or progress.best_step in (None, progress.step):
        return progress.step
    if arguments.save_strategy == "no":
        run.accelerator.print(
            f"the model is that of step {progress.step:,}; the best one, of step {progress.best_step:,}, was not saved "
            "with --save_strategy no"
        )
        return progress.step
    run.checkpoints.load(run.checkpoints.path(progress.best_step))
    run.evaluated = None
    return progress.best_step


def evaluated(run: TrainingRun, split: str) -> tuple[dict[str, float], list[dict]]:
    """The evaluation of the model as it is; that of the last update is not computed twice."""
    return run.evaluated if split == "validation" and run.evaluated else evaluate(run, split)


def write_files(run: TrainingRun, evaluations: dict, state: dict | None) -> None:
    """Writes the model with its code and tokenizer, predictions, metrics, pictures and card."""
    from toolkit.pictures import plot_confusion
    from toolkit.training import merged, plot_curves, write_card

    output, task = run.output, run.task
    for split, (_, predictions) in evaluations.items():
        if predictions:
            write_predictions(run, split, predictions)
    metrics = {split: own for split, (own, _) in evaluations.items()}
    if run.progress is not None:
        model = merged(run.accelerator.unwrap_model(run.model))
        task.save_settings(model.config)
        model.save_pretrained(output, state_dict=state)
        task.tokenizer.backend_tokenizer.no_truncation()  # else the saved one cuts texts unasked
        task.tokenizer.save_pretrained(output)
        plot_curves(output / "curves.png", run.progress.history, run.metric)
        if evaluations and getattr(run.data, "problem", None) == "single_label":
            split = list(evaluations)[-1]
            references = [row["label"] for row in run.rows[split]]
            found = [row["prediction"] for row in evaluations[split][1]]
            plot_confusion(output / "confusion_matrix.png", task.labels, references, found)
        write_card(run, metrics, type(model).__name__.removeprefix("FSDP"))
    report = {split: {**own, "rows": len(run.rows[split])} for split, own in metrics.items()}
    write_json(output / METRICS_FILE, report | run_report(run))  # last: it says that the run is finished


def run_report(run: TrainingRun) -> dict:
    """What metrics.json has besides the metrics."""
    progress, report = run.progress, {"lengths": lengths_of(run)}
    if progress is None:
        return report
    return report | {
        "step": run.saved_step,
        "updates": progress.step,
        "metric_for_best_model": run.metric,
        "seconds": progress.seconds,
        "processes": progress.processes,
        "label_counts": run.task.label_counts,
        "data": progress.data,
        "history": progress.history,
    }


def write_predictions(run: TrainingRun, split: str, predictions: list[dict]) -> None:
    """Writes a line for each row, in order: the columns of the file, and the prediction. A column with the name of a
    field of the prediction is input_NAME. Of labels, also writes a table with the metrics of each."""
    from pandas import DataFrame

    lines = []
    for row, prediction in zip(run.rows[split], predictions, strict=True):
        columns = {f"input_{name}" if name in prediction else name: value for name, value in row["columns"].items()}
        lines.append(json.dumps(to_json(columns | prediction), ensure_ascii=False, default=str))
    write_text(run.output / f"predictions_{split}.jsonl", "".join(f"{line}\n" for line in lines))
    if table := run.task.table_by_label(run.rows[split], predictions):
        DataFrame(table).to_csv(run.output / f"labels_{split}.csv", index=False)


def push(run: TrainingRun) -> None:
    """Pushes the finished model to the Hub.

    Raises:
        OSError: that failed. The folder is complete.
    """
    from huggingface_hub import get_token

    from toolkit.training import push_run

    repo = run.arguments.hub_model_id
    try:
        commit = push_run(run.output, repo, private=run.arguments.hub_private_repo)
    except Exception as error:
        reason = one_line(error).replace(get_token() or "no token", "…")  # a server may repeat it
        raise OSError(f"{run.output} is complete and was not pushed to {repo}: {reason}") from None
    print(f"pushed to {commit}")


if __name__ == "__main__":
    sys.exit(main())
