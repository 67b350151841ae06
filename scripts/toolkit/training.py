"""What a training run has beside its loop: batches, optimizer, checkpoints, curves and the model card."""

import hashlib
import json
import math
import os
import re
import shutil
import warnings
from collections import defaultdict
from collections.abc import Mapping, Sequence, Set
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
import yaml
from huggingface_hub import CommitInfo, CommitOperationAdd, EvalResult, HfApi, ModelCard, ModelCardData, get_token
from torch import nn
from torch.distributed.fsdp import register_fsdp_forward_method
from transformers.trainer_pt_utils import get_parameter_names

from modeling_scratchbert.configuration_scratchbert import AUTO_MAP
from toolkit.common import is_hub_id, public_path, read_json_object, with_paths, write_json
from toolkit.pictures import new_figure

# Rows are sorted by length within groups of this many batches, drawn at random.
BATCHES_SORTED_TOGETHER = 50

# Block 3 is `encoder.blocks.3` in ScratchBertModel and `encoder.layer.3` in BertModel.
BLOCK = re.compile(r"encoder\.(?:blocks|layer)\.(\d+)\.")
ADAPTED = ("query", "value")  # the modules that have an adapter with --lora_rank
PROGRESS = "progress.json"

# Arguments that change no weight: they may differ when a run is resumed.
FREE_TO_CHANGE = {
    "output_dir",
    "resume_from_checkpoint",
    "report_to",
    "logging_steps",
    "save_strategy",
    "save_steps",
    "save_total_limit",
    "per_device_eval_batch_size",
    "push_to_hub",
    "hub_model_id",
    "hub_private_repo",
}


# ------------------------------------------------------------------------------------------------------------- batches


def epoch_batches(examples: Sequence[dict], arguments, accelerator, epoch: int) -> list[list[int]]:
    """The batches of this process in an epoch, as lists of rows. They depend on the arguments only.

    By length: rows are shuffled, sorted by length in groups of 50 batches (fewer for few rows), and cut into batches,
    whose order is random. Of n processes, each has every n-th row of a step. The last step may have fewer rows, and
    then none for some processes.
    """
    random = np.random.default_rng([arguments.seed, epoch])
    rows = random.permutation(len(examples))
    size = arguments.per_device_train_batch_size * accelerator.num_processes
    if arguments.train_sampling_strategy == "group_by_length":
        group = size * max(1, min(BATCHES_SORTED_TOGETHER, len(rows) // (4 * size)))
        parts = np.split(rows, range(group, len(rows), group))
        rows = np.concatenate([part[longest_first([examples[i] for i in part])] for part in parts])
    steps = np.split(rows, range(size, len(rows), size))
    whole = len(rows) // size
    order = [*random.permutation(whole), *range(whole, len(steps))]
    return [own_rows(steps[step], accelerator) for step in order]


def evaluation_batches(examples: Sequence[dict], arguments, accelerator) -> list[list[int]]:
    """The batches of this process, the longest rows first. All processes have the same number of batches, some of them
    without a row."""
    size = arguments.per_device_eval_batch_size * accelerator.num_processes
    steps = np.array_split(longest_first(examples), math.ceil(len(examples) / size))
    return [own_rows(step, accelerator) for step in steps]


def longest_first(examples: Sequence[dict]) -> np.ndarray:
    return np.argsort([-example["length"] for example in examples], kind="stable")


def own_rows(step: np.ndarray, accelerator) -> list[int]:
    """The rows of a step that this process has."""
    return step[accelerator.process_index :: accelerator.num_processes].tolist()


def seed_update(seed: int, step: int, rank: int) -> None:
    """Seeds dropout for an update. A resumed run draws what the uninterrupted run draws."""
    torch.manual_seed(int(np.random.SeedSequence([seed, step, rank]).generate_state(1, np.uint64)[0]))


def fingerprint(rows: Sequence[dict], examples: Sequence[dict]) -> str:
    """A hash of the data. It does not depend on where the files are."""
    digest = hashlib.sha256()
    for row in rows:
        fields = {name: value for name, value in row.items() if name not in ("place", "columns")}
        digest.update(json.dumps(fields, sort_keys=True, default=str).encode())
    for example in examples:
        digest.update(example["input_ids"].tobytes())
    return digest.hexdigest()


# ----------------------------------------------------------------------------------------------------------- optimizer


def make_optimizer(model: nn.Module, arguments) -> torch.optim.Optimizer:
    """The optimizer of the parameters that are trained. Biases and norms have no weight decay, as in BERT's code."""
    decayed = set(get_parameter_names(model, [nn.LayerNorm], [r"\bbias$"]))
    groups = defaultdict(list)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            groups[arguments.weight_decay if name in decayed else 0.0].append(parameter)
    if not groups:
        raise ValueError(f"--freeze is {arguments.freeze}, which freezes everything; expected a parameter to train.")
    parameters = [{"params": group, "weight_decay": decay} for decay, group in groups.items()]
    if arguments.optim == "sgd":
        return torch.optim.SGD(parameters, arguments.learning_rate, momentum=0.9)
    if arguments.optim == "adafactor":
        return torch.optim.Adafactor(parameters, arguments.learning_rate)
    return torch.optim.AdamW(parameters, arguments.learning_rate, fused=True)


def prepare(accelerator, model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple:
    """As `Accelerator.prepare`, also for an encoder and a decoder that share tensors.

    All modules with a tensor must be in one group of FSDP. Accelerate makes a group of each block and one of the
    embeddings that the getters return. Here shared embeddings are in the group of the whole model, and shared blocks
    as well.
    """
    if accelerator.distributed_type != "FSDP" or not model.config.is_encoder_decoder:
        return accelerator.prepare(model, optimizer)
    if model.config.tie_encoder_decoder:
        accelerator.state.fsdp_plugin.auto_wrap_policy = None
    model.get_input_embeddings = model.get_output_embeddings = lambda: None
    prepared = accelerator.prepare(model, optimizer)
    del model.get_input_embeddings, model.get_output_embeddings
    # It calls the encoder alone, which needs the weights of the group of the whole model.
    register_fsdp_forward_method(prepared[0], "generate")
    return prepared


def make_schedule(optimizer: torch.optim.Optimizer, arguments, steps: int):
    """The learning-rate schedule over `steps` updates."""
    warmup = arguments.warmup_steps
    warmup = math.ceil(warmup * steps) if warmup < 1 else int(warmup)
    try:
        return transformers.get_scheduler(
            arguments.lr_scheduler_type,
            optimizer,
            num_warmup_steps=warmup,
            num_training_steps=steps,
            scheduler_specific_kwargs=json.loads(arguments.lr_scheduler_kwargs or "{}"),
        )
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"--lr_scheduler_type is {arguments.lr_scheduler_type} with --lr_scheduler_kwargs "
            f"{arguments.lr_scheduler_kwargs}; expected a schedule of transformers and its arguments in JSON: {error}"
        ) from error


def freeze(model: nn.Module, what: str | None, new_weights: Set[str]) -> None:
    """Excludes `what` from the training: "embeddings"; "encoder", all but the model head; or a number of lowest blocks,
    with the embeddings. In an encoder-decoder these are parts of the encoder, with what the decoder shares with it.

    Args:
        new_weights: the names of parameters that are trained nevertheless, because they would stay random.

    Raises:
        ValueError: `what` is none of these.
    """
    if what is None:
        return
    blocks = model.config.num_hidden_layers
    highest = {"embeddings": 0, "encoder": blocks + 1} | {str(number): number for number in range(blocks + 1)}
    if what not in highest:
        raise ValueError(f"--freeze is {what}; expected embeddings, encoder, or a number of blocks, at most {blocks}")
    base = f"{model.base_model_prefix}." + ("encoder." if model.config.is_encoder_decoder else "")
    # A shared parameter has several names, one of them in the encoder.
    for name, parameter in model.named_parameters(remove_duplicate=False):
        depth = 0 if "embeddings." in name else blocks + 1
        if block := BLOCK.search(name):
            depth = int(block[1]) + 1
        if name.startswith(base) and depth <= highest[what] and name not in new_weights:
            parameter.requires_grad = False


def add_lora(model: nn.Module, arguments, new_weights: Set[str]) -> nn.Module:
    """The model with adapters at queries and values (Hu et al. 2021, section 4.2), and with its model head trained.

    Args:
        new_weights: the names of parameters that are trained as well, because they would stay random.

    Raises:
        ImportError: PEFT is not installed.
        ValueError: encoder and decoder share their weights.
    """
    if not arguments.lora_rank:
        return model
    if getattr(model.config, "tie_encoder_decoder", False):
        # Each module has an adapter of its own; merging would add both to the one weight.
        raise ValueError(
            "--lora_rank is given and encoder and decoder share their weights (tie_encoder_decoder), "
            "which cannot hold the adapters of both; expected separate weights. Train all weights with "
            "--lora_rank 0"
        )
    from peft import LoraConfig, get_peft_model

    heads = [name for name, _ in model.named_children() if name not in (model.base_model_prefix, "lm_head", "dropout")]
    config = LoraConfig(
        r=arguments.lora_rank,
        lora_alpha=arguments.lora_alpha,
        lora_dropout=arguments.lora_dropout,
        target_modules=list(ADAPTED),
        modules_to_save=heads or None,
    )
    # PEFT trains a copy of a head.
    new = [each for name, each in model.named_parameters() if name in new_weights and name.split(".")[0] not in heads]
    adapted = get_peft_model(model, config)
    for parameter in new:
        parameter.requires_grad = True
    return adapted


def merged(model: nn.Module) -> nn.Module:
    """The model with its adapters, if it has any, merged into its weights."""
    if not hasattr(model, "merge_and_unload"):
        return model
    tied = model.config.tie_word_embeddings
    with warnings.catch_warnings():
        # PEFT does not recognise a head that is tied to the embeddings of the decoder.
        warnings.filterwarnings("ignore", "Input and output embeddings are no longer tied")
        whole = model.merge_and_unload()
    whole.config.tie_word_embeddings = tied
    return whole


# --------------------------------------------------------------------------------------------------------- checkpoints


@dataclass
class Progress:
    """The state of a run besides tensors, in `progress.json` of a checkpoint."""

    arguments: dict = field(default_factory=dict)  # those that change the weights
    data: dict[str, str] = field(default_factory=dict)  # the fingerprint of each split
    processes: int = 1
    steps: int = 0  # updates of the whole run
    step: int = 0  # updates made
    epoch: int = 0  # complete epochs
    batch: int = 0  # complete batches of this epoch
    best: list[float] | None = None  # metric and loss, larger is better
    best_step: int | None = None
    without_better: int = 0  # evaluations since the best one
    stopped_early: bool = False
    seconds: float = 0.0
    history: list[dict] = field(default_factory=list)
    window: list[float] = field(default_factory=list)  # the losses since the last point of the history

    @property
    def finished(self) -> bool:
        return self.stopped_early or self.step >= self.steps

    def check_same_run(self, saved: "Progress", folder: Path) -> None:
        """Raises ValueError if the run in a folder has other arguments, data or processes."""
        for name in {**saved.arguments, **self.arguments}:
            before, now = saved.arguments.get(name), self.arguments.get(name)
            if before != now:
                raise ValueError(f"--{name} is {now} and was {before} in {folder}; expected the same to resume.")
        if saved.data != self.data:
            raise ValueError(f"the data have changed since {folder} was saved; expected the same rows to resume.")
        if saved.processes != self.processes:
            raise ValueError(
                f"there are {self.processes} processes and {folder} was saved by {saved.processes}; expected as many "
                "to resume."
            )


@dataclass
class Checkpoints:
    """The checkpoints of a run: `checkpoint-STEP` in its folder. Each is written under a temporary name and renamed
    when it is complete, so that an interruption leaves complete ones only."""

    folder: Path
    accelerator: Any
    keep: int

    def complete(self) -> list[Path]:
        """The oldest first."""
        found = self.folder.glob("checkpoint-*")
        return sorted((path for path in found if (path / PROGRESS).is_file()), key=step_of)

    def path(self, step: int) -> Path:
        return self.folder / f"checkpoint-{step}"

    def save(self, progress: Progress) -> None:
        """Writes a checkpoint, unless there is one of this step. All processes take part.

        Raises:
            OSError: it cannot be written, as on a full disk.
        """
        path = self.path(progress.step)
        unfinished = self.folder / f".{path.name}-unfinished"
        if path.exists():
            return
        try:
            self.accelerator.save_state(str(unfinished))
            self.accelerator.wait_for_everyone()
            if self.accelerator.is_main_process:
                write_json(unfinished / PROGRESS, asdict(progress))
                flush_to_disk(unfinished)
                unfinished.rename(path)
                self.remove_old(progress.best_step)
        except Exception as error:  # torch and safetensors have types of their own
            shutil.rmtree(unfinished, ignore_errors=True)
            raise OSError(f"{path} cannot be written: {error}; expected enough space on the disk.") from error
        self.accelerator.wait_for_everyone()

    def remove_unfinished(self) -> None:
        """Removes what a killed process has partly written or partly removed."""
        for path in self.folder.glob(".checkpoint-*"):
            shutil.rmtree(path)

    def remove_old(self, best_step: int | None) -> None:
        """Keeps the last ones and the best one."""
        for path in self.complete()[: -self.keep]:
            if step_of(path) != best_step:
                # Renamed first: a partly removed one is not taken for complete.
                shutil.rmtree(path.rename(path.with_name(f".{path.name}-removed")))

    def load(self, path: Path) -> None:
        """Loads weights, optimizer and schedule.

        Raises:
            ValueError: a file is damaged.
        """
        try:
            self.accelerator.load_state(str(path))
        except Exception as error:
            raise ValueError(f"{path} cannot be loaded: {error}; remove it to resume from the one before.") from error


def step_of(path: Path) -> int:
    return int(path.name.rpartition("-")[2])


def read_progress(path: Path) -> Progress:
    try:
        return Progress(**read_json_object(path / PROGRESS))
    except TypeError as error:
        raise ValueError(f"{path} is of another version of this project: {error}; start a new run.") from error


def flush_to_disk(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())


# ------------------------------------------------------------------------------------------------ pictures and the card


def plot_curves(path: Path, history: Sequence[dict], metric: str) -> None:
    """Draws the loss of training and validation, and a metric of the validation, over the updates."""
    names = list(dict.fromkeys(["loss", metric]))
    with new_figure(path, 5 * len(names), 3) as figure:
        for number, name in enumerate(names, 1):
            axis = figure.add_subplot(1, len(names), number, title=name, xlabel="step")
            for split in ("train", "validation"):
                points = [(point["step"], point[split][name]) for point in history if name in point.get(split, {})]
                if points:
                    axis.plot(*zip(*points, strict=True), ".-", label=split)
            if axis.lines:
                axis.legend(frameon=False)


def write_card(run, metrics: Mapping[str, Mapping[str, float]], model_class: str) -> None:
    """Writes README.md from the template beside this file. It names files and folders by their last part only.

    Args:
        metrics: of each split.
        model_class: the name of the class of the model.
    """
    data, output = run.data, run.output
    given = with_paths(run.settings, public_path)
    defaults = {each.name: each.default for each in (*fields(data), *fields(run.arguments))}
    rows_of = given["dataset"] or ", ".join(given["train_file"])
    model_name = run.arguments.hub_model_id or output.resolve().name
    results = [
        EvalResult(run.task.name, rows_of, rows_of, name, value, dataset_split=split)
        for split, own in metrics.items()
        for name, value in own.items()
        if math.isfinite(value)
    ]
    metadata = ModelCardData(
        library_name="transformers",
        pipeline_tag=run.task.name,
        base_model=data.model if data.model and is_hub_id(data.model) else None,
        datasets=[data.dataset] if data.dataset and is_hub_id(data.dataset) else None,
        tags=["scratchbert"] if model_class.startswith("Scratch") else None,
        model_name=model_name if results else None,
        eval_results=results or None,
    )
    own_class = f".Scratch{model_class.removeprefix('Scratch')}"
    card = ModelCard.from_template(
        metadata,
        template_path=str(Path(__file__).with_name("training_card.jinja")),
        model_name=model_name,
        model_class=model_class,
        auto_class=next(auto for auto, path in AUTO_MAP.items() if path.endswith(own_class)),
        base=given["model"],
        data=rows_of,
        labels=run.task.labels,
        metrics=metrics,
        rows={split: len(rows) for split, rows in run.rows.items()},
        step=run.saved_step,
        chosen_by=run.metric if run.saved_step == run.progress.best_step else None,
        has_confusion=(output / "confusion_matrix.png").exists(),
        max_length=data.max_length,
        settings={
            name: value for name, value in given.items() if value != defaults[name] and name not in FREE_TO_CHANGE
        },
        torch=torch.__version__,
        transformers=transformers.__version__,
    )
    card.save(output / "README.md")


# ------------------------------------------------------------------------------------------------ the Hub

# What is uploaded of the folder of a run. Predictions, which have rows of the data, checkpoints and logs are not.
UPLOADED = (
    "config.json",
    "generation_config.json",
    "model*.safetensors*",
    "probe.json",
    "*.py",
    "tokenizer*",
    "special_tokens_map.json",
    "vocab.*",
    "README.md",
    "metrics.json",
    "labels_*.csv",
    "*.png",
    "recipe.yaml",
)

# Tokens of the Hub, of GitHub, OpenAI and Amazon, a password in a URL, a private key.
SECRET = re.compile(
    rb"\b(hf_[A-Za-z0-9]{30,}|gh[pousr]_[A-Za-z0-9]{30,}|github_pat_\w{30,}|sk-[\w-]{20,}|AKIA[A-Z0-9]{16})"
    rb"|://[^/\s\"':@]+:[^/\s\"'@]+@|-----BEGIN [A-Z ]*PRIVATE KEY-----"
)


def push_run(folder: Path, repo: str, *, private: bool) -> CommitInfo:
    """Uploads the files of a run to the repository `repo`, which is created if need be, in one commit.

    Args:
        folder: of a finished run.
        repo: "user/name".
        private: of a new repository; an existing one must not be public then.

    Raises:
        ValueError: a file has a secret, or the repository is public and should be private.
        HfHubHTTPError, HTTPError, RuntimeError: the Hub refuses, or cannot be reached.
    """
    paths = sorted({path for pattern in UPLOADED for path in folder.glob(pattern)})
    for path in paths:
        if path.suffix not in (".safetensors", ".png"):  # their bytes can match any pattern
            check_no_secret(path)
    recipe = yaml.safe_load((folder / "recipe.yaml").read_text(encoding="utf-8"))
    public = yaml.safe_dump(with_paths(recipe, public_path), sort_keys=False, allow_unicode=True)
    contents = {path.name: path for path in paths} | {"recipe.yaml": public.encode()}
    api = HfApi()
    api.create_repo(repo, private=private or None, exist_ok=True)
    if private and not api.model_info(repo).private:
        raise ValueError(f"{repo} is public; expected a private repository with --hub_private_repo.")
    # Not upload_folder, which makes several commits if hf_xet is installed: a push could end between two.
    operations = [CommitOperationAdd(path_in_repo=name, path_or_fileobj=content) for name, content in contents.items()]
    return api.create_commit(repo, operations, commit_message="Upload model")


def check_no_secret(path: Path) -> None:
    """Raises ValueError if the file has the user's token, or something that looks like a secret."""
    token = get_token()
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        if SECRET.search(line) or (token is not None and token.encode() in line):
            raise ValueError(f"{path}, line {number}, looks like a secret; remove it, then push with `hf upload`.")
