"""A training run: the checks before it, the training, and the files of the result."""

import logging
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict

import datasets
import torch
import transformers
from accelerate import Accelerator, PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin, ProjectConfiguration, set_seed
from huggingface_hub import get_token

from toolkit.checkpoint import config_fields, kind_of, tensor_names
from toolkit.cli import Parser
from toolkit.hub import check_source
from toolkit.training.dry_run import rehearse
from toolkit.training.loop import Training
from toolkit.training.output import OutputFolder
from toolkit.training.rows import Source
from toolkit.training.settings import Settings
from toolkit.training.task import Task, check_lengths, sources


def run(parser: Parser, settings: Settings, make_task: Callable[[Settings, Accelerator], Task]) -> None:
    """The whole run: checks, training, evaluation, and the files of the result.

    Args:
        parser: reports errors; with several processes, the process is named.
        make_task: makes the task of the settings and the accelerator.
    """
    if rank := int(os.environ.get("RANK", 0)):
        parser.prog += f" (process {rank})"
    main_process = rank == 0
    check_sources(settings)
    # It warns at each checkpoint that tied weights are written once.
    logging.getLogger("accelerate.utils.other").setLevel(logging.ERROR)
    # The progress bar of the training is enough.
    transformers.logging.disable_progress_bar()
    datasets.disable_progress_bar()
    if settings.push_to_hub and get_token() is None:
        raise ValueError(
            "--push_to_hub is given and there is no token; expected one with write access, by `hf auth login` or "
            "HF_TOKEN"
        )
    with OutputFolder(settings) as output:
        if main_process:
            output.check()
        accelerator = make_accelerator(settings)
        set_seed(settings.seed)
        task = make_task(settings, accelerator)
        check_lengths(settings, ["max_length"], task.model.config)
        if main_process:
            output.check_space(sum(weight.numel() for weight in task.model.parameters()))
        training = Training(task, output.path)
        if settings.dry_run:
            rehearse(training)
            return
        if main_process:
            output.prepare()
            for warning in shared_data(settings) if not training.checkpoints.complete() else ():
                parser.report(warning)
        accelerator.wait_for_everyone()
        accelerator.init_trackers("logs", {name: str(value) for name, value in asdict(settings).items()})
        with stopped_by_signals(training):
            training.train()
        training.finish()


@contextmanager
def stopped_by_signals(training: Training) -> Iterator[None]:
    """Makes the run save a checkpoint and stop after SIGTERM, which clusters send, or SIGINT (Ctrl-C). A second signal
    stops it at once."""

    def request_stop(number, _):
        training.stop_signal = number
        signal.signal(number, signal.SIG_DFL)

    before = {number: signal.signal(number, request_stop) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def make_accelerator(settings: Settings) -> Accelerator:
    """The accelerator, as `accelerate launch` configures it.

    Raises:
        ValueError: there is no such tracker, the launched processes are not connected, or the precision requires an
            accelerator device and there is none.
    """
    processes = int(os.environ.get("WORLD_SIZE", 1))
    accelerator = Accelerator(
        mixed_precision=settings.mixed_precision,
        gradient_accumulation_steps=settings.gradient_accumulation_steps,
        log_with=None if settings.trackers == "none" else settings.trackers,
        project_config=ProjectConfiguration(settings.output, logging_dir=settings.output),
        cpu=processes > 1 and not torch.accelerator.is_available(),
    )
    if accelerator.num_processes != processes:
        raise ValueError(f"{processes} processes were launched and are not connected; expected `accelerate launch`")
    if accelerator.mixed_precision == "fp16" and accelerator.device.type == "cpu":
        # Accelerate would compute in float32.
        raise ValueError("--mixed_precision is fp16 and the run is on a CPU; expected bf16 or no")
    if os.environ.get("ACCELERATE_USE_FSDP") == "true" and accelerator.distributed_type == DistributedType.MULTI_CPU:
        # Accelerate disables FSDP on the CPU, where torch supports it.
        accelerator.state.distributed_type = PartialState().distributed_type = DistributedType.FSDP
        accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin()
    return accelerator


def check_sources(settings: Settings) -> None:
    """Checks that the model and the tokenizer can be opened.

    Raises:
        OSError: one is neither a folder nor a hub id that can be reached, or the weights of a BERT are corrupt.
        ValueError: the model is of a kind that --implementation bert would open with random weights.
    """
    for name in ("model", "tokenizer"):
        if (source := getattr(settings, name, None)) is not None:
            try:
                check_source(source)
            except OSError as error:
                raise OSError(f"--{name} {source}: {error}") from error
    if settings.implementation == "bert" and settings.model is not None:
        kind = kind_of(config_fields(settings.model))
        if kind != "bert":
            raise ValueError(
                f"--model {settings.model} is of the kind {kind}; expected a BERT with --implementation bert. "
                "convert_checkpoint.py --to bert makes one of a ScratchBert"
            )
        tensor_names(settings.model)  # our classes check the files of weights, those of transformers do not


def shared_data(settings: Settings) -> list[str]:
    """A warning for each held-out split that has a file, or the whole split, of the training set."""
    train, *held_out = sources(settings).items()
    return [
        f"{part} is in the train rows and in the {split} rows; expected other rows. Metrics of rows that were trained "
        "on are too high"
        for split, source in held_out
        for part in parts_in_both(train[1], source)
    ]


def parts_in_both(one: Source, other: Source) -> list[str]:
    """The files that two sources share; or their split, if it is the same."""
    if one.files:
        return [str(path) for path in other.files if any(path.samefile(each) for each in one.files)]
    return [str(one)] if one == other else []
