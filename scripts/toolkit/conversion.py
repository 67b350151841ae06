"""Converting checkpoints: a BERT into a complete ScratchBert folder, and a ScratchBert into a BERT.

The weights are converted bit for bit, in their dtype. The other files of the folder are copied; those that are not are
listed with the reason. Nothing is ever filled in at random.
"""

import functools
import json
import os
import re
import shutil
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import torch
import yaml
from huggingface_hub import ModelCardData, RepoCard, snapshot_download
from huggingface_hub.errors import DryRunError
from tokenizers import Tokenizer
from tokenizers.models import WordPiece
from transformers import PreTrainedModel
from transformers.modeling_utils import load_state_dict

import modeling_scratchbert
from modeling_scratchbert.bert.export import NOT_IN_BERT
from modeling_scratchbert.bert.names import OUTPUT_BIAS_ALIAS
from modeling_scratchbert.probe.recording import to_bits
from toolkit.checkpoint import (
    Checkpoint,
    class_name,
    open_class,
    read_checkpoint,
    reference_class,
    short_name,
    weight_files,
    weights_among,
    why_unused,
)
from toolkit.files import atomic_folder, check_target, looks_like_a_path
from toolkit.model_card import TASKS, opening, parse, render, update_metadata

OUR_CODE = {path.name for path in Path(modeling_scratchbert.__file__).parent.glob("*.py")} - {"__init__.py"}

# Files that are not copied, by their path in the folder, and why.
LEFT_BEHIND = {
    r"(.*/)?(\.git|\.cache|\.ipynb_checkpoints|__pycache__)/.*": "bookkeeping of another tool",
    r"checkpoint-\d+/.*": "a checkpoint of its own; convert it separately",
    r"checkpoints/(\.unfinished-|step-).*": "checkpoints of the training, which only its run can continue from",
    r"logs/.*|(.*/)?events\.out\.tfevents\..*": "logs of the training",
    r"(onnx|openvino|coreml|saved_model)/.*": "another format of the weights",
    r"[^/]+\.(h5|msgpack|ot|onnx|onnx_data|gguf|tflite|mlmodel|pb|ckpt([.-].*)?)": "another format of the weights",
    r"openvino_model[^/]*\.(bin|xml)": "another format of the weights",
    r"(pytorch_)?model[^/]*\.(bin|pt|pth|safetensors)(\.index[^/]*\.json)?": "another copy of the weights",
    r"adapter_(model|config)\.[^/]+": "an adapter, which refers to the names of the source's modules",
    r"probe(\.[^/]+)?\.json": "the source's probe, which names the source's tensors",
    r"optimizer\.(bin|pt)": "the optimizer's state, which depends on the order of the source's weights",
}

# Fields of the source's config.json that are not copied. "encoder" and "decoder" are the two configurations of an
# EncoderDecoderModel.
NOT_KEPT = {"auto_map", "torch_dtype", "encoder", "decoder", *NOT_IN_BERT}

# In the model card, around the section on the conversion, which the next conversion replaces.
SECTION = "<!-- {} of what convert_checkpoint.py wrote -->"
BEGIN, END = SECTION.format("Begin"), SECTION.format("End")


@dataclass
class Source(Checkpoint):
    """The checkpoint to convert, whose files are in a local folder."""

    on_hub: bool
    names: list[str]  # of all files, including those on the Hub that were not fetched
    weights: str  # the file among them that the weights are read from


@dataclass
class Report:
    """The result of a conversion."""

    model_class: str  # our class that holds the weights
    tensors: int = 0
    parameters: int = 0
    dtype: str = ""
    copied: list[str] = field(default_factory=list)
    left: dict[str, str] = field(default_factory=dict)  # from a file or a tensor to the reason
    notes: list[str] = field(default_factory=list)


def convert(source, target, to: str = "scratchbert", *, overwrite: bool = False, revision: str | None = None) -> Report:
    """Converts the checkpoint `source` into the folder `target`.

    Args:
        source: a folder, or a hub id.
        target: a new or empty folder. It appears, or is replaced, only when it is complete.
        to: `"scratchbert"` or `"bert"`.
        overwrite: replace `target` if it holds a checkpoint.
        revision: of a hub id: a branch, a tag or a commit.

    Raises:
        ValueError: `source` cannot be converted exactly; the message says why.
        OSError: a file cannot be read or written, or `target` is in use.
    """
    target = Path(target).resolve()
    check_target(Path(source).resolve(), target, overwrite)
    checkpoint = open_source(str(source), to, revision)
    model, report = open_exactly(checkpoint)
    with atomic_folder(target) as folder:
        if to == "bert":
            model.save_as_bert(folder)
        else:
            model.save_pretrained(folder)
            # The source's is copied if it has one; if not, its settings are in config.json, and stay there.
            (folder / "generation_config.json").unlink(missing_ok=True)
        restate_config(folder, checkpoint, to)
        copy_files(folder, checkpoint, to, report)
        if to == "bert" and not (folder / "vocab.txt").exists():
            write_vocabulary(folder, report)
        write_card(folder, checkpoint, to, target.name, report)
    return report


# ------------------------------------------------------------------------------------------------ the two folders


def open_source(source: str, to: str, revision: str | None) -> Source:
    """Finds `source`, fetches the files that are needed if it is a hub id, and raises ValueError unless it can be
    converted to `to`."""
    on_hub = not os.path.lexists(source)
    if on_hub:
        names = hub_names(source, revision)
        weights = weights_among(names, source)
        # Our code is not copied, but must be what this package or a release of it wrote.
        left = [name for name in names if name not in OUR_CODE and why_left(name, weights, to)]
        folder = Path(snapshot_download(source, revision=revision, ignore_patterns=left))
    else:
        if revision is not None:
            raise ValueError(f"--revision is given for the folder {source}; expected a hub id.")
        folder = Path(source)
        files = (path for path in folder.rglob("*") if path.is_symlink() or not path.is_dir())
        names = sorted(path.relative_to(folder).as_posix() for path in files)
        weights = weights_among(names, source)
    checkpoint = read_checkpoint(source, str(folder))
    is_own = checkpoint.kind == "scratchbert"
    if is_own == (to == "scratchbert"):
        name, other = ("ScratchBert", "bert") if is_own else ("Bert", "scratchbert")
        raise ValueError(f"{source} is a {name} checkpoint already; --to {other} converts it.")
    if checkpoint.fields.get("quantization_config"):
        raise ValueError(
            f"{source} is quantised; expected float weights. Convert the checkpoint that it was made from."
        )
    return Source(**vars(checkpoint), on_hub=on_hub, names=names, weights=weights)


def hub_names(source: str, revision: str | None) -> list[str]:
    """The names of the files in a repository on the Hub."""
    if looks_like_a_path(source):
        raise FileNotFoundError(f"There is no folder {source}.")
    try:
        return sorted(file.filename for file in snapshot_download(source, revision=revision, dry_run=True))
    except DryRunError as error:
        raise FileNotFoundError(
            f"There is no folder {source}, and the Hub cannot be reached "
            f"({error.__cause__ or error}). Without a network, give the folder of the "
            "snapshot in the cache."
        ) from error


# ------------------------------------------------------------------------------------------------ the weights


def open_exactly(checkpoint: Source) -> tuple[PreTrainedModel, Report]:
    """The model with every tensor of the checkpoint that one of our classes has a place for, and no other."""
    ours, parts = checkpoint.tensors, checkpoint.parts
    chosen, notes = choose_class(checkpoint)
    if chosen == "Model" and "pooler" not in parts:
        notes.append("the source has no pooler, so the target has none either")
    tensors = {
        name: tensor for file in weight_files(checkpoint.files) for name, tensor in load_state_dict(file).items()
    }
    dtypes = {tensors[name].dtype for name in ours if ours[name]} or {torch.float32}
    if not all(dtype.is_floating_point for dtype in dtypes):
        raise ValueError(f"{checkpoint.source} is quantised: it has weights of {', '.join(map(str, dtypes))}.")
    dtype = functools.reduce(torch.promote_types, dtypes)
    if len(dtypes) > 1:
        notes.append(
            f"the weights are in {' and '.join(sorted(map(str, dtypes)))}; all are written in {dtype}, without loss"
        )

    model = open_class(checkpoint, "scratchbert", chosen, "pooler" in parts, dtype)
    if "pooler" in parts and model.base_model.pooler is None:
        model.base_model.pooler = open_class(checkpoint, "scratchbert", "Model", True, dtype).pooler
    report = Report(type(model).__name__, parameters=model.num_parameters(), dtype=str(dtype), notes=notes)
    compare(model, tensors, ours, checkpoint.kind, report)
    return model, report


def choose_class(checkpoint: Source) -> tuple[str, list[str]]:
    """The class to convert with, one of `Checkpoint.classes`, and remarks on the choice.

    It is the class that config.json names, unless another one keeps model heads that this one would drop:
    bert-base-uncased names `BertForMaskedLM` and has the next-sentence head as well.
    """
    parts, named, classes = checkpoint.parts, checkpoint.named_class, checkpoint.classes
    in_source = {name: class_name(name, checkpoint.kind) for name in classes}
    best = max((name for name, needs in classes.items() if needs <= parts), key=lambda name: len(classes[name]))
    heads = parts - {"pooler"}
    if named is None:
        return best, [f"config.json names no architectures; the tensors are those of {in_source[best]}"]
    needs, better = classes[named], classes[best]
    if needs <= parts and heads <= better and not heads <= needs:
        return best, [f"config.json names {in_source[named]}; the file has all of {in_source[best]}, which is kept"]
    return named, []


def compare(model: PreTrainedModel, tensors: dict, ours: dict, kind: str, report: Report) -> None:
    """Compares every tensor of the file with the model's, and notes in `report` those that the model has no place for.

    Raises:
        ValueError: one has changed.
    """
    held = model.state_dict()
    for name, tensor in tensors.items():
        own = (ours[name] or "").removeprefix("model." if model.base_model is model else "")
        if why := why_unused(name, kind):
            report.left[f"tensor {name}"] = why
        elif own not in held:
            report.left[f"tensor {name}"] = f"{report.model_class} has no place for it"
        elif torch.equal(to_bits(held[own]), to_bits(tensor.to(held[own].dtype))):  # NaN equals NaN
            report.tensors += 1
        elif name.removeprefix("decoder.") == OUTPUT_BIAS_ALIAS:
            report.left[f"tensor {name}"] = (
                "cls.predictions.decoder.bias differs from it, and BERT computes with that one"
            )
        else:
            raise ValueError(f"{name} would change in the conversion, which is a bug; please report it.")


# ------------------------------------------------------------------------------------------------ the other files


def restate_config(folder: Path, checkpoint: Source, to: str) -> None:
    """Restores in the target's config.json the source's fields that a configuration object drops: generation settings
    of old checkpoints, and fields that other tools read."""
    path = folder / "config.json"
    kept = {name: value for name, value in checkpoint.fields.items() if name not in NOT_KEPT}
    fields = {**kept, **json.loads(path.read_text(encoding="utf-8"))}
    if checkpoint.named_class is not None:
        fields["architectures"] = [class_name(checkpoint.named_class, to)]
    # AutoTokenizer reads this for every model type but "bert".
    if to == "scratchbert" and fields.get("tokenizer_class") is None:
        fields["tokenizer_class"] = "BertTokenizer"
    path.write_text(json.dumps(fields, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def copy_files(folder: Path, checkpoint: Source, to: str, report: Report) -> None:
    """Copies every file that is neither converted nor left behind."""
    for name in checkpoint.names:
        why = why_left(name, checkpoint.weights, to)
        if why is not None:
            report.left[name] = why
        elif Path(checkpoint.files, name).is_dir():
            report.left[name] = "a link to a folder"
        elif name not in ("config.json", "README.md") and not is_weights(name, checkpoint.weights):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(Path(checkpoint.files, name), folder / name)
            report.copied.append(name)


def why_left(name: str, weights: str, to: str) -> str | None:
    """Why the file `name` is left behind, or None if it is not."""
    if name in OUR_CODE:
        return "ScratchBert's code, which a BERT does not need" if to == "bert" else "replaced by ScratchBert's own"
    if is_weights(name, weights):
        return None
    return next((why for pattern, why in LEFT_BEHIND.items() if re.fullmatch(pattern, name)), None)


def is_weights(name: str, weights: str) -> bool:
    """Whether `name` is the file `weights` or one of its shards."""
    stem, _, endings = weights.partition(".")  # ("pytorch_model", "bin.index.json")
    shards = rf"{stem}-\d+-of-\d+\.{endings.removesuffix('.index.json')}"
    return name == weights or (weights.endswith(".json") and re.fullmatch(shards, name) is not None)


def write_vocabulary(folder: Path, report: Report) -> None:
    """Writes vocab.txt, which other readers of BERT checkpoints expect, from tokenizer.json."""
    if not (folder / "tokenizer.json").exists():
        return
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    ids = tokenizer.get_vocab()
    words = sorted(ids, key=ids.get)
    if not isinstance(tokenizer.model, WordPiece) or ids[words[-1]] != len(words) - 1:
        report.notes.append("no vocab.txt: the tokenizer is not a WordPiece tokenizer with an id for every line")
        return
    (folder / "vocab.txt").write_text("".join(f"{word}\n" for word in words), encoding="utf-8", newline="\n")
    report.notes.append("vocab.txt is written from tokenizer.json")


def write_card(folder: Path, checkpoint: Source, to: str, title: str, report: Report) -> None:
    """Writes README.md, the model card: the source's metadata, a section on the conversion, and the source's text.
    Bytes of the source's that are not UTF-8 are kept."""
    path, is_ours, model_class = Path(checkpoint.files, "README.md"), to == "scratchbert", report.model_class
    text = path.read_bytes().decode("utf-8", "surrogateescape") if path.exists() else ""
    try:
        card = parse(text)
    except (TypeError, ValueError, yaml.YAMLError):
        report.notes.append("the metadata of README.md cannot be read as YAML; it is kept as text")
        card = RepoCard(f"---\n\n---\n{text}")
    hub_id = checkpoint.source if checkpoint.on_hub else None
    update_metadata(card.data, is_ours, TASKS.get(short_name(model_class)), hub_id)
    use = opening(title, model_class, trust_remote_code=is_ours) | {"sentences": "modules.json" in report.copied}
    section = render(
        ModelCardData(),
        title=title,
        converted_from=hub_id or Path(checkpoint.source).resolve().name,
        reference=reference_class(model_class) if is_ours else None,
        use=use,
    )
    before, _, rest = card.text.partition(f"\n{BEGIN}")
    body = before + rest.partition(f"{END}\n")[2]  # without the section of an earlier conversion
    card.text = f"\n{BEGIN}{section.text}{END}\n{body}"
    (folder / "README.md").write_bytes(str(card).encode("utf-8", "surrogateescape"))


def print_report(report: Report, target: Path, to: str) -> None:
    """Prints what was converted, copied and left behind, and the remarks."""
    name = reference_class(report.model_class) if to == "bert" else report.model_class
    dtype = report.dtype.removeprefix("torch.")
    print(f"{target}: {name}, {report.tensors} tensors, {report.parameters:,} parameters, {dtype}")
    if report.copied:
        print(f"copied: {', '.join(report.copied)}")
    for why in dict.fromkeys(report.left.values()):
        names = [name for name in report.left if report.left[name] == why]
        # A .git folder can have thousands.
        folders = Counter(name.split("/")[0] for name in names if "/" in name)
        labels = [name for name in names if "/" not in name] + [f"{name}/… ({n} files)" for name, n in folders.items()]
        print(f"left behind: {', '.join(labels)}: {why}")
    for note in report.notes:
        print(f"note: {note}")
