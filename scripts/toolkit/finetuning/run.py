"""A training run: the checks before it, the training, and the files of the result."""

import logging
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path

import datasets
import torch
import transformers
from accelerate import Accelerator, PartialState
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, get_available_trackers
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin, ProjectConfiguration, set_seed
from huggingface_hub import constants, get_token

from toolkit.checkpoint import config_fields, kind_of, tensor_names
from toolkit.cli import EXTRAS, Parser, about, handling_stop_signals, how_to_install
from toolkit.finetuning.checks import check_lengths
from toolkit.finetuning.dry_run import rehearse
from toolkit.finetuning.evaluation import evaluate
from toolkit.finetuning.loop import Training, push
from toolkit.finetuning.output import OutputFolder
from toolkit.finetuning.seeds import run_seeds
from toolkit.finetuning.settings import Settings
from toolkit.finetuning.task import Task, sources
from toolkit.hub import check_source

# The variables that declare a process of several: those of torchrun and `accelerate launch`, and after each of them
# those of MPI that Accelerate accepts instead.
LAUNCHED = {
    "RANK": ("PMI_RANK", "OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK"),
    "LOCAL_RANK": ("MPI_LOCALRANKID", "OMPI_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_RANK"),
    "WORLD_SIZE": ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE"),
    "MASTER_PORT": (),
    "MASTER_ADDR": (),
}


def run(parser: Parser, settings: Settings, make_task: Callable[[Settings, Accelerator], Task]) -> None:
    """The whole run, or those of all seeds: checks, training, evaluation, and the files of the result.

    Args:
        parser: reports errors; with several processes, the process is named.
        make_task: makes the task of the settings and the accelerator.
    """
    rank, _ = launched_process()
    parser.prog += f" (process {rank})" if rank else ""
    check_sources(settings)
    check_services(settings)
    # It warns at each checkpoint that tied weights are written once.
    logging.getLogger("accelerate.utils.other").setLevel(logging.ERROR)
    # The progress bar of the training is enough.
    transformers.logging.disable_progress_bar()
    datasets.disable_progress_bar()
    run_one = partial(run_of_one_seed, parser, make_task, rank == 0)
    if settings.seeds is None:
        run_one(settings)
    else:
        run_seeds(settings, run_one, rank == 0)
        if rank == 0 and settings.push_to_hub:
            push(Path(settings.output), settings)
    PartialState().destroy_process_group()


def run_of_one_seed(
    parser: Parser,
    make_task: Callable[[Settings, Accelerator], Task],
    main_process: bool,
    settings: Settings,
    name: str | None = None,
    data: dict[str, str] | None = None,
) -> None:
    """A run: training and evaluation, or --evaluate_only, or --dry_run.

    Args:
        name: of the model; None: that of --output.
        data: the fingerprints that the data must have; None: any.
    """
    with OutputFolder(settings) as output:
        if main_process:
            output.check()
        accelerator = make_accelerator(settings)
        set_seed(settings.seed)
        task = make_task(settings, accelerator)
        check_lengths(settings, ["max_length"], task.model.config)
        if main_process and not settings.evaluate_only:
            output.check_space(sum(weight.numel() for weight in task.model.parameters()))
        if settings.evaluate_only:
            evaluate(task, output)
            return
        training = Training(task, output.path, name)
        if data is not None:
            training.check_data(data, "the model of another seed")
        if settings.dry_run:
            rehearse(training)
            return
        if main_process:
            output.prepare()
            for warning in shared_data(settings) if not training.checkpoints.complete() else ():
                parser.report(warning)
        accelerator.wait_for_everyone()
        training.resume()
        if main_process:
            output.write_recipe()  # only now, because the run in the folder may not be the one to continue
        accelerator.init_trackers("logs", {name: str(value) for name, value in asdict(settings).items()})
        with stopped_by_signals(training):
            training.train()
        training.finish()


def launched_process() -> tuple[int, int]:
    """The rank of this process and the number of processes, as a launcher declares them; 0 and 1 without a launcher.

    Raises:
        ValueError: a variable of `LAUNCHED` is not a number, or is missing where others declare several processes.
    """
    values, given = {}, []
    for name, others in LAUNCHED.items():
        for variable in (name, *others):
            value = os.environ.get(variable, "-1")
            if name in values or value == "-1":  # Accelerate takes -1 for not set
                continue
            if name != "MASTER_ADDR" and not value.isdecimal():
                raise ValueError(f"{variable} is {value!r}; expected a number. Unset it, if no launcher has set it")
            values[name] = value
            given.append(f"{variable} is {value}")
    rank, processes = int(values.get("RANK", 0)), int(values.get("WORLD_SIZE", 1))
    if processes == 1 and os.environ.get("LOCAL_RANK", "-1") == "-1":
        return 0, 1  # Accelerate connects no processes
    if missing := [name for name in LAUNCHED if name not in values]:
        raise ValueError(
            f"{', '.join(given)} without {', '.join(missing)}; expected all, as `accelerate launch` sets them"
        )
    if rank >= processes:
        raise ValueError(f"{', '.join(given)}; expected a rank of less than {processes}")
    return rank, processes


@contextmanager
def stopped_by_signals(training: Training) -> Iterator[None]:
    """Makes the run save a checkpoint and stop after SIGTERM, which clusters send, or SIGINT (Ctrl-C). A second signal
    stops it at once."""

    def request_stop(number, _):
        training.stop_signal = number
        signal.signal(number, signal.SIG_DFL)

    with handling_stop_signals(request_stop):
        yield


def make_accelerator(settings: Settings) -> Accelerator:
    """The accelerator, as `accelerate launch` configures it.

    Raises:
        ValueError: there is no such tracker, the launched processes are not connected, or the precision requires an
            accelerator device and there is none.
    """
    _, processes = launched_process()
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


def check_services(settings: Settings) -> None:
    """Checks that the run can be logged, and pushed to the Hub.

    Raises:
        ValueError: there is no such tracker, it is not installed, or the Hub cannot be reached.
    """
    name = settings.trackers
    if name not in ("all", "none", *LOGGER_TYPE_TO_CLASS):
        raise ValueError(f"--trackers is {name}; expected one of {', '.join(LOGGER_TYPE_TO_CLASS)}, all, or none")
    if name not in ("all", "none", *map(str, get_available_trackers())):
        installing = how_to_install([name]) if name in EXTRAS else f"{name} is not installed; pip install {name}"
        raise ValueError(f"--trackers is {name}: {installing}")
    if settings.push_to_hub is None:
        return
    if constants.HF_HUB_OFFLINE:
        raise ValueError(
            f"--push_to_hub is {settings.push_to_hub} and HF_HUB_OFFLINE is set; expected access to the "
            "Hub. Unset it, or push the finished model with push_to_hub.py"
        )
    if get_token() is None:
        raise ValueError(
            "--push_to_hub is given and there is no token; "
            "expected one with write access, by `hf auth login` or HF_TOKEN"
        )


def check_sources(settings: Settings) -> None:
    """Checks that the model and the tokenizer can be opened.

    Raises:
        CommandError: one is neither a folder nor a hub id that can be reached.
        OSError: the weights of a BERT are corrupt.
        ValueError: the model is of a kind that --implementation bert would open with random weights.
    """
    for name in ("model", "tokenizer"):
        if (source := getattr(settings, name, None)) is not None:
            with about(f"--{name} {source}"):
                check_source(source)
    if settings.implementation == "bert" and settings.model is not None:
        if (kind := kind_of(config_fields(settings.model))) != "bert":
            raise ValueError(
                f"--model {settings.model} is of the kind {kind}; expected a BERT with --implementation "
                "bert. convert_checkpoint.py --to bert makes one of a ScratchBert"
            )
        tensor_names(settings.model)  # our classes check the files of weights, those of transformers do not


def shared_data(settings: Settings) -> list[str]:
    """A warning for each held-out split that has a file, or the whole split, of the training set."""
    (_, train), *held_out = sources(settings).items()
    trained_on = {one.identity for one in train.inputs}
    shared = [(one, split) for split, source in held_out for one in source.inputs if one.identity in trained_on]
    return [
        f"{one} is in the train rows and in the {split} rows; expected other rows. "
        "Metrics of rows that were trained on are too high"
        for one, split in shared
    ]
