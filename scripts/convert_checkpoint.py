#!/usr/bin/env python
"""Converts a BERT checkpoint into a complete ScratchBert folder, or a ScratchBert back into a BERT.

    convert_checkpoint.py google-bert/bert-base-uncased my-model
    convert_checkpoint.py my-model my-bert --to bert

An EncoderDecoderModel of two BERTs becomes a ScratchBertForConditionalGeneration, which no BERT checkpoint can hold.

The weights come through bit for bit, in the dtype that they have. Tokenizer, label maps, generation settings,
sentence-transformers' module files and whatever else lies beside the weights come along; what does not is named, with
the reason. A checkpoint that lacks a weight of its own class is refused: nothing is ever filled in at random.

TARGET appears, or is replaced, only when all of it is written.

Exit code: 0 converted, 2 bad usage or a checkpoint that cannot be converted.
"""

import argparse
import functools
import json
import os
import re
import shutil
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
import yaml
from huggingface_hub import RepoCard, snapshot_download
from huggingface_hub.errors import DryRunError, StrictDataclassError
from huggingface_hub.repocard import REGEX_YAML_BLOCK
from tokenizers import Tokenizer
from tokenizers.models import WordPiece
from transformers import PreTrainedModel
from transformers.modeling_utils import load_state_dict
from transformers.utils import logging

import modeling_scratchbert
from modeling_scratchbert.bert_configuration import scratchbert_fields
from modeling_scratchbert.bert_weights import OUTPUT_BIAS_ALIAS, reference_class, to_bert, to_scratchbert
from modeling_scratchbert.checkpoints import WEIGHT_FILES, tensor_names, weight_files
from modeling_scratchbert.configuration_scratchbert import AUTO_MAP
from modeling_scratchbert.pretrained import NOT_IN_BERT

from model_classes import class_name, classes_in, kind_of, parts_of, short_name, why_unused
from output import check_target, replacing
from sources import looks_like_a_path

# The Hub's word for what each class does.
TASKS = {
    "ForPreTraining": "fill-mask",
    "ForMaskedLM": "fill-mask",
    "ForSequenceClassification": "text-classification",
    "ForTokenClassification": "token-classification",
    "ForMultipleChoice": "multiple-choice",
    "ForQuestionAnswering": "question-answering",
    "ForCausalLM": "text-generation",
    "ForConditionalGeneration": "text2text-generation",
    "Model": "feature-extraction",
}
TARGETS = ("bert", "scratchbert")

OUR_CODE = {path.name for path in Path(modeling_scratchbert.__file__).parent.glob("*.py")} - {"__init__.py"}

# What is not carried over, by its path in the folder, and why.
LEFT_BEHIND = {
    r"(.*/)?(\.git|\.cache|\.ipynb_checkpoints|__pycache__)/.*": "another tool's bookkeeping",
    r"checkpoint-\d+/.*": "a checkpoint of its own: convert it by itself",
    r"(onnx|openvino|coreml|saved_model)/.*": "another format of the weights",
    r"[^/]+\.(h5|msgpack|ot|onnx|onnx_data|gguf|tflite|mlmodel|pb)": "another format of the weights",
    r"[^/]+\.ckpt([.-].*)?": "another format of the weights",
    r"openvino_model[^/]*\.(bin|xml)": "another format of the weights",
    r"(pytorch_)?model[^/]*\.(bin|pt|pth|safetensors)(\.index[^/]*\.json)?": "another copy of the weights",
    r"adapter_(model|config)\.[^/]+": "an adapter, which goes by the names of the source's modules",
    r"optimizer\.(bin|pt)": "the optimizer's state, which goes by the order of the source's weights",
}

# Fields of the source's config.json that the target's must not have unless it is written there anew. "encoder" and
# "decoder" are the configurations of an EncoderDecoderModel's halves.
NOT_KEPT = {"auto_map", "torch_dtype", "encoder", "decoder", *NOT_IN_BERT}

SECTION = "<!-- {} of what convert_checkpoint.py wrote -->"
BEGIN, END = SECTION.format("Begin"), SECTION.format("End")


@dataclass
class Checkpoint:
    """A folder on this machine, and what it says of itself before any weight is read."""

    source: str  # as the user gave it
    on_hub: bool
    folder: Path
    names: list[str]  # of all files, on the Hub too those that were not fetched
    weights: str  # the file among them that the weights are read from
    fields: dict  # of its config.json
    kind: str  # "bert", "scratchbert" or "encoder-decoder"

    @property
    def named_class(self) -> str | None:
        """The first of the architectures that config.json names, as `CLASS_PARTS` calls it."""
        architectures = self.fields.get("architectures") or [None]
        return architectures[0] and short_name(architectures[0])


@dataclass
class Report:
    """What a conversion did."""

    model_class: str  # of ours, through which it went
    tensors: int = 0
    parameters: int = 0
    dtype: str = ""
    carried: list[str] = field(default_factory=list)
    left: dict[str, str] = field(default_factory=dict)  # a file or a tensor, and why
    notes: list[str] = field(default_factory=list)


def convert(source, target, to: str = "scratchbert", *, overwrite: bool = False, revision: str | None = None) -> Report:
    """Writes the checkpoint `source` into the folder `target` as the other kind of checkpoint.

    Args:
        source: a folder, or a hub id.
        target: a folder that does not exist yet, or is empty.
        to: `"scratchbert"` or `"bert"`.
        overwrite: replace `target` where it holds a checkpoint.
        revision: of a hub id: a branch, a tag or a commit.

    Raises:
        ValueError: `source` cannot be converted without loss or guesswork; the message says why.
        OSError: a file cannot be read or written, or `target` is in use.
    """
    target = Path(target).resolve()
    check_target(Path(source).resolve(), target, overwrite)
    checkpoint = open_checkpoint(str(source), to, revision)
    model, report = load(checkpoint)
    with replacing(target) as folder:
        if to == "bert":
            model.save_as_bert(folder)
        else:
            model.save_pretrained(folder)
            # The source's is carried over if it has one; if not, its settings are in config.json, and stay there.
            (folder / "generation_config.json").unlink(missing_ok=True)
        restate_config(folder, checkpoint, to)
        carry_files(folder, checkpoint, to, report)
        if to == "bert" and not (folder / "vocab.txt").exists():
            write_vocabulary(folder, report)
        write_card(folder, checkpoint, to, target.name, report)
    return report


# ------------------------------------------------------------------------------------------------ the two folders


def open_checkpoint(source: str, to: str, revision: str | None) -> Checkpoint:
    """Finds `source`, fetches of it what is needed if it is a hub id, and checks that it can be converted to `to`."""
    on_hub = not os.path.lexists(source)
    if on_hub:
        names = hub_names(source, revision)
        weights = weights_among(names, source)
        left = [name for name in names if why_left(name, weights, to)]
        folder = Path(snapshot_download(source, revision=revision, ignore_patterns=left))
    else:
        if revision is not None:
            raise ValueError(f"--revision is for hub ids; {source} is a folder.")
        folder = Path(source)
        files = (path for path in folder.rglob("*") if path.is_symlink() or not path.is_dir())
        names = sorted(path.relative_to(folder).as_posix() for path in files)
        weights = weights_among(names, source)
    try:
        fields = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"The config.json of {source} is not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise ValueError(f"The config.json of {source} has no fields.")
    kind = check_fields(fields, source, to)
    return Checkpoint(source, on_hub, folder, names, weights, fields, kind)


def hub_names(source: str, revision: str | None) -> list[str]:
    """The names of the files in a repository on the Hub."""
    if looks_like_a_path(source):
        raise FileNotFoundError(f"There is no folder {source}.")
    try:
        return sorted(file.filename for file in snapshot_download(source, revision=revision, dry_run=True))
    except DryRunError as error:
        raise FileNotFoundError(
            f"There is no folder {source}, and the Hub cannot be asked for it ({error.__cause__ or error}). Without a "
            "network, give the folder of the snapshot in the cache."
        ) from error


def weights_among(names: list[str], source: str) -> str:
    """The file that `from_pretrained` reads the weights from."""
    if "config.json" not in names:
        raise FileNotFoundError(f"{source} has no config.json: it is not a checkpoint's folder.")
    for name in WEIGHT_FILES:
        if name in names:
            return name
    raise FileNotFoundError(f"{source} has no weights that PyTorch reads, which would be {', '.join(WEIGHT_FILES)}.")


def check_fields(fields: dict, source: str, to: str) -> str:
    """Raises ValueError unless a checkpoint with this config.json can be converted; returns its kind."""
    scratchbert_fields(fields, source)  # refuses all that is neither kind
    kind = kind_of(fields)
    is_own = kind == "scratchbert"
    if is_own == (to == "scratchbert"):
        name, other = ("ScratchBert", "bert") if is_own else ("Bert", "scratchbert")
        raise ValueError(f"{source} is a {name} checkpoint already; --to {other} converts it.")
    if not is_own and fields.get("auto_map"):
        raise ValueError(
            f"{source} brings its own code (auto_map in its config.json), so nothing says that it computes what BERT "
            "does. If it does, remove auto_map and convert again."
        )
    if fields.get("quantization_config"):
        raise ValueError(f"{source} is quantised; convert the checkpoint that it was made from.")
    return kind


# ------------------------------------------------------------------------------------------------ the weights


def load(checkpoint: Checkpoint) -> tuple[PreTrainedModel, Report]:
    """The model that holds every tensor of the checkpoint that any class of ours has a place for, and no other."""
    ours = {name: to_scratchbert(name, checkpoint.kind) for name in tensor_names(checkpoint.folder) or ()}
    parts = parts_of(ours.values())
    chosen, notes = choose_class(checkpoint, parts)
    if chosen == "Model" and "pooler" not in parts:
        notes.append("the source has no pooler, so the target has none either")
    files = weight_files(checkpoint.folder)
    tensors = {name: tensor for file in files for name, tensor in load_state_dict(file).items()}
    dtypes = {tensors[name].dtype for name in ours if ours[name]} or {torch.float32}
    if not all(dtype.is_floating_point for dtype in dtypes):
        raise ValueError(f"{checkpoint.source} is quantised: it has weights of {', '.join(map(str, dtypes))}.")
    dtype = functools.reduce(torch.promote_types, dtypes)
    if len(dtypes) > 1:
        notes.append(
            f"the weights are in {' and '.join(sorted(map(str, dtypes)))}; all are written in {dtype}, exactly"
        )

    model = load_whole(checkpoint, chosen, dtype, with_pooler="pooler" in parts)
    if "pooler" in parts and model.base_model.pooler is None:
        model.base_model.pooler = load_whole(checkpoint, "Model", dtype, with_pooler=True).pooler
    report = Report(type(model).__name__, parameters=model.num_parameters(), dtype=str(dtype), notes=notes)
    compare(model, tensors, ours, checkpoint.kind, report)
    return model, report


def choose_class(checkpoint: Checkpoint, parts: set[str]) -> tuple[str, list[str]]:
    """The class to convert with, one of `classes_in`, and what there is to say of the choice.

    It is the class that config.json names, unless another one keeps heads that this one would drop: the file of
    bert-base-uncased, for one, says `BertForMaskedLM` and holds the next-sentence head as well.
    """
    fields, named = scratchbert_fields(checkpoint.fields, checkpoint.source), checkpoint.named_class
    classes = classes_in(fields.get("is_encoder_decoder", False), fields.get("is_decoder", False))
    in_source = {name: class_name(name, checkpoint.kind) for name in classes}
    if named is not None and named not in classes:
        known = ", ".join(in_source.values())
        raise ValueError(
            f"{checkpoint.source} is of the class {checkpoint.fields['architectures'][0]}; converted are {known}."
        )
    best = max((name for name, needs in classes.items() if needs <= parts), key=lambda name: len(classes[name]))
    heads = parts - {"pooler"}
    if named is None:
        return best, [f"config.json names no architectures; its tensors are those of {in_source[best]}"]
    needs, better = classes[named], classes[best]
    if needs <= parts and heads <= better and not heads <= needs:
        return best, [
            f"config.json names {in_source[named]}; the file holds, and the target keeps, all of {in_source[best]}"
        ]
    return named, []


def load_whole(checkpoint: Checkpoint, name: str, dtype: torch.dtype, with_pooler: bool) -> PreTrainedModel:
    """Opens the checkpoint by a class of ours.

    Raises:
        ValueError: the class has a weight that the checkpoint lacks, or has in another size.
    """
    options = {"add_pooling_layer": with_pooler} if name == "Model" else {}
    with quiet():
        model, info = getattr(modeling_scratchbert, f"ScratchBert{name}").from_pretrained(
            checkpoint.folder, dtype=dtype, output_loading_info=True, ignore_mismatched_sizes=True, **options
        )

    def source_name(tensor: str) -> str:
        return to_bert(to_scratchbert(tensor, "scratchbert"), checkpoint.kind)

    wrong = [f"{source_name(tensor)} is not in the file" for tensor in sorted(info["missing_keys"])]
    for tensor, in_file, in_model in sorted(info["mismatched_keys"]):
        wrong.append(f"{source_name(tensor)} is {tuple(in_file)} and not {tuple(in_model)}")
    if wrong:
        raise ValueError(
            f"{checkpoint.source} is not a whole {class_name(name, checkpoint.kind)}, which its config.json "
            f"describes: {'; '.join(wrong)}. Nothing is filled in at random; correct the class or the sizes there."
        )
    return model


def compare(model: PreTrainedModel, tensors: dict, ours: dict, kind: str, report: Report) -> None:
    """Holds every tensor of the file against the model's, and notes in `report` those that the model has no place
    for.

    Raises:
        ValueError: one came through changed.
    """
    held = model.state_dict()
    for name, tensor in tensors.items():
        own = (ours[name] or "").removeprefix("model." if model.base_model is model else "")
        if why := why_unused(name, kind):
            report.left[f"tensor {name}"] = why
        elif own not in held:
            report.left[f"tensor {name}"] = f"{report.model_class} has no place for it"
        elif same_bits(held[own], tensor.to(held[own].dtype)):
            report.tensors += 1
        elif name.removeprefix("decoder.") == OUTPUT_BIAS_ALIAS:
            report.left[f"tensor {name}"] = (
                "cls.predictions.decoder.bias differs, and is the one that BERT computes with"
            )
        else:
            raise ValueError(f"{name} would come out changed; this is a bug of the conversion.")


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Equal as bytes: a NaN is the same as itself, and 0 and -0 differ."""
    return torch.equal(one.flatten().view(torch.uint8), other.flatten().view(torch.uint8))


@contextmanager
def quiet() -> Iterator[None]:
    """Keeps back transformers' table of missing and unexpected weights, which is read here and told in one line."""
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)


# ------------------------------------------------------------------------------------------------ what lies beside them


def restate_config(folder: Path, checkpoint: Checkpoint, to: str) -> None:
    """Puts back into the target's config.json what the source's says and a configuration object does not keep: old
    checkpoints have their generation settings there, and tools read fields that transformers knows nothing of."""
    path = folder / "config.json"
    kept = {name: value for name, value in checkpoint.fields.items() if name not in NOT_KEPT}
    fields = {**kept, **json.loads(path.read_text(encoding="utf-8"))}
    if checkpoint.named_class is not None:
        fields["architectures"] = [class_name(checkpoint.named_class, to)]
    # AutoTokenizer knows by itself what "bert" has, and reads this for any other model type.
    if to == "scratchbert" and fields.get("tokenizer_class") is None:
        fields["tokenizer_class"] = "BertTokenizer"
    path.write_text(json.dumps(fields, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def carry_files(folder: Path, checkpoint: Checkpoint, to: str, report: Report) -> None:
    """Copies all that is neither converted nor left behind."""
    for name in checkpoint.names:
        why = why_left(name, checkpoint.weights, to)
        if why is not None:
            report.left[name] = why
        elif (checkpoint.folder / name).is_dir():
            report.left[name] = "a link to a folder"
        elif name not in ("config.json", "README.md") and not is_weights(name, checkpoint.weights):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(checkpoint.folder / name, folder / name)
            report.carried.append(name)


def why_left(name: str, weights: str, to: str) -> str | None:
    """Why the file `name` is left behind, or None if it is not."""
    if name in OUR_CODE:
        return "ScratchBert's code, which a BERT does without" if to == "bert" else "replaced by ScratchBert's own"
    if is_weights(name, weights):
        return None
    return next((why for pattern, why in LEFT_BEHIND.items() if re.fullmatch(pattern, name)), None)


def is_weights(name: str, weights: str) -> bool:
    """Whether `name` is the file `weights`, or one of the shards that it lists."""
    stem, _, endings = weights.partition(".")  # ("pytorch_model", "bin.index.json")
    shards = rf"{stem}-\d+-of-\d+\.{endings.removesuffix('.index.json')}"
    return name == weights or (weights.endswith(".json") and re.fullmatch(shards, name) is not None)


def write_vocabulary(folder: Path, report: Report) -> None:
    """Writes vocab.txt, which readers of BERT checkpoints outside of transformers ask for, from tokenizer.json."""
    if not (folder / "tokenizer.json").exists():
        return
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    ids = tokenizer.get_vocab()
    words = sorted(ids, key=ids.get)
    if not isinstance(tokenizer.model, WordPiece) or ids[words[-1]] != len(words) - 1:
        report.notes.append("no vocab.txt: the tokenizer is not a WordPiece one with an id for every line")
        return
    (folder / "vocab.txt").write_text("".join(f"{word}\n" for word in words), encoding="utf-8", newline="\n")
    report.notes.append("vocab.txt is written from tokenizer.json")


# ------------------------------------------------------------------------------------------------ the model card


def write_card(folder: Path, checkpoint: Checkpoint, to: str, title: str, report: Report) -> None:
    """Writes README.md: the source's metadata, a section of our own, and then the source's text, untouched."""
    path = checkpoint.folder / "README.md"
    # A byte that is not UTF-8 goes through as it is.
    text = path.read_bytes().decode("utf-8", "surrogateescape") if path.exists() else ""
    if not REGEX_YAML_BLOCK.search(text):
        text = "---\n\n---\n" + text
    try:
        card = RepoCard(text)
    except (TypeError, ValueError, yaml.YAMLError):
        report.notes.append("the metadata of README.md cannot be read as YAML; it is kept as text")
        card = RepoCard("---\n\n---\n" + text)
    update_metadata(card, checkpoint, to, report)
    before, _, rest = card.text.partition(f"\n{BEGIN}")
    body = before + rest.partition(f"{END}\n")[2]  # without the section of an earlier conversion
    card.text = f"\n{BEGIN}\n{section(checkpoint, to, title, report)}{END}\n{body}"
    (folder / "README.md").write_bytes(str(card).encode("utf-8", "surrogateescape"))


def update_metadata(card: RepoCard, checkpoint: Checkpoint, to: str, report: Report) -> None:
    """Adds to the card's metadata what the Hub asks for. What the source says of itself stands."""
    data = card.data
    tags = data.get("tags", [])
    tags = [tag for tag in ([tags] if isinstance(tags, str) else tags) if tag != "scratchbert"]
    data["tags"] = [*tags, "scratchbert"] if to == "scratchbert" else tags or None
    language = data.get("language", [])
    if language is False or (isinstance(language, list) and False in language):
        # YAML 1.1 reads Norwegian's code as the opposite of yes.
        data["language"] = "no" if language is False else ["no" if code is False else code for code in language]
    if checkpoint.on_hub:
        data["base_model"] = checkpoint.source
    task = TASKS.get(short_name(report.model_class))
    for name, value in (("library_name", "transformers"), ("pipeline_tag", task)):
        if data.get(name) is None and value is not None:
            data[name] = value


def section(checkpoint: Checkpoint, to: str, title: str, report: Report) -> str:
    """What the card says of the conversion, and how to open the result."""
    origin = f"`{checkpoint.source}`" if checkpoint.on_hub else f"`{checkpoint.folder.resolve().name}`"
    opens = f"modeling_scratchbert.{report.model_class}"
    auto_class = next(auto for auto, path in AUTO_MAP.items() if path == opens)
    if to == "bert":
        what = f"A BERT checkpoint, converted from the ScratchBert {origin}: the same weights, under BERT's own names."
        trust = ""
    else:
        what = (
            f"{origin} as a ScratchBert: [BERT](https://arxiv.org/abs/1810.04805) written from scratch, in blocks that "
            f"one can read, with its code in this folder. The weights are the same, bit for bit, and it computes what "
            f"`{reference_class(report.model_class)}` computes, up to the rounding of float32."
        )
        trust = ", trust_remote_code=True"
    text = f"""# {title}

{what}

```python
from transformers import AutoTokenizer, {auto_class}

tokenizer = AutoTokenizer.from_pretrained("{title}"{trust})
model = {auto_class}.from_pretrained("{title}"{trust})
```
"""
    if "modules.json" in report.carried:
        text += f"""
```python
from sentence_transformers import SentenceTransformer

model = SentenceTransformer("{title}"{trust})
```
"""
    return text


# ------------------------------------------------------------------------------------------------ the command line


def print_report(report: Report, target: str, to: str) -> None:
    name = reference_class(report.model_class) if to == "bert" else report.model_class
    dtype = report.dtype.removeprefix("torch.")
    print(f"{target}: {name}, {report.tensors} tensors, {report.parameters:,} parameters, {dtype}")
    if report.carried:
        print(f"carried over: {', '.join(report.carried)}")
    for why in dict.fromkeys(report.left.values()):
        names = [name for name in report.left if report.left[name] == why]
        # .git alone may have thousands.
        folders = Counter(name.split("/")[0] for name in names if "/" in name)
        labels = [name for name in names if "/" not in name] + [f"{name}/… ({n} files)" for name, n in folders.items()]
        print(f"left behind: {', '.join(labels)}: {why}")
    for note in report.notes:
        print(f"note: {note}")


def main(argv: list[str] | None = None) -> int:
    summary, _, rest = __doc__.partition("\n\n")
    parser = argparse.ArgumentParser(
        prog="convert_checkpoint.py",
        description=summary,
        epilog=rest,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("source", metavar="SOURCE", help="the checkpoint: a folder or a hub id")
    parser.add_argument("target", metavar="TARGET", help="the folder to write")
    parser.add_argument("--to", choices=TARGETS, default="scratchbert", help="what to write (default: %(default)s)")
    parser.add_argument("--overwrite", action="store_true", help="replace TARGET if it holds a checkpoint")
    parser.add_argument("--revision", help="of a hub id: the branch, tag or commit to convert")
    args = parser.parse_args(argv)
    try:
        report = convert(args.source, args.target, args.to, overwrite=args.overwrite, revision=args.revision)
    except (OSError, ValueError, StrictDataclassError) as error:
        print(f"convert_checkpoint.py: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"convert_checkpoint.py: interrupted; {args.target} is as it was", file=sys.stderr)
        return 130
    print_report(report, args.target, args.to)
    return 0


if __name__ == "__main__":
    sys.exit(main())
