#!/usr/bin/env python
"""Converts a BERT checkpoint into a ScratchBert folder, or a ScratchBert back into a BERT.

    convert.py google-bert/bert-base-uncased my-model
    convert.py my-model my-bert --to bert

An EncoderDecoderModel of two BERTs becomes a ScratchBertForConditionalGeneration, which no BERT checkpoint can hold.

The weights are converted bit for bit, in their dtype. Tokenizer, model card, the modules of sentence-transformers and
other files are copied; those that are not are listed. A checkpoint that lacks a weight of its class raises an error:
nothing is ever filled in at random. OUTPUT appears, or is replaced, only when it is complete.

Exit code: 0 converted, 2 bad usage or a checkpoint that cannot be converted, 130 interrupted.
"""

import functools
import shutil
import sys
from pathlib import Path

from toolkit.common import Parser, about, atomic_folder, read_json, write_json

# Files that are not copied: other formats of the weights, and what belongs to a training or to another tool.
LEFT_BEHIND = [
    "*.h5",
    "*.msgpack",
    "*.ot",
    "*.onnx*",
    "*.gguf",
    "*.tflite",
    "*.mlmodel",
    "*.ckpt*",
    "onnx/*",
    "openvino*",
    "coreml/*",
    "saved_model/*",
    "probe*.json",
    "adapter_*",
    "optimizer.*",
    "checkpoint*/*",
    "logs/*",
    "runs/*",
    "*tfevents*",
    ".git/*",
    ".cache/*",
    "*__pycache__/*",
]
# The weights that are converted. Those of sentence-transformers' modules are in subfolders, and copied.
PICKLED, SAFE = "pytorch_model*", "model*.safetensors*"


def make_parser() -> Parser:
    parser = Parser(__file__, __doc__, usage="%(prog)s SOURCE OUTPUT [--FLAG VALUE …]")
    parser.add_argument("source", metavar="SOURCE", help="the checkpoint: a folder or a hub id")
    parser.add_argument("output", metavar="OUTPUT", type=Path, help="the folder to write")
    model, output = parser.group("model"), parser.group("output")
    model.add_argument("--revision", help="the branch, tag or commit of a hub id")
    output.add_argument("--to", choices=("bert", "scratchbert"), default="scratchbert", help="the format to write")
    output.add_argument("--overwrite", action="store_true", help="replace OUTPUT if it holds a checkpoint")
    return parser


def check_target(source: Path, target: Path, overwrite: bool) -> None:
    """Raises OSError unless the folder `target`, made from `source`, may be written or replaced."""
    if source.exists() and (source in (target, *target.parents) or target in source.parents):
        raise FileExistsError(
            f"The source {source} and the output {target} overlap; expected two folders, neither inside the other."
        )
    if not target.exists() or not any(target.iterdir()):
        return
    if not overwrite:
        raise FileExistsError(f"The output {target} is not empty; --overwrite replaces it.")
    if not (target / "config.json").exists() or (target / ".git").exists():
        raise FileExistsError(
            f"The output {target} is not replaced: it has no config.json, so it is not a checkpoint, "
            "or it has a .git folder, which would be lost."
        )


def fetch(source: str, revision: str | None) -> Path:
    """The folder of a checkpoint. Of a hub id, the files that are converted or copied are downloaded."""
    from huggingface_hub import snapshot_download

    from toolkit.hub import check_reachable

    if Path(source).is_dir():
        if revision is not None:
            raise ValueError(f"--revision is given for the folder {source}; expected a hub id.")
        return Path(source)
    check_reachable(source)
    folder = Path(snapshot_download(source, revision=revision, ignore_patterns=[*LEFT_BEHIND, PICKLED]))
    if not list(folder.glob(SAFE)):
        snapshot_download(source, revision=revision, allow_patterns=PICKLED)
    return folder


def open_model(folder: Path, to: str):
    """The model of a checkpoint, as a ScratchBert with all its model heads, in the dtype of the weights.

    Raises:
        OSError, ValueError: the checkpoint cannot be read, or cannot be converted exactly.
    """
    import torch

    from modeling_scratchbert.bert.files import read_tensors, weight_files
    from toolkit.checkpoint import best_class, open_class, read_checkpoint

    checkpoint = read_checkpoint(str(folder))
    if (checkpoint.kind == "scratchbert") == (to == "scratchbert"):
        raise ValueError(f"--to is {to}, but {folder} is a {checkpoint.kind} already; expected the other format.")
    dtypes = {
        tensor.dtype
        for file in weight_files(folder)
        for name, tensor in read_tensors(file, "meta").items()
        if checkpoint.tensors[name]
    }
    if checkpoint.fields.get("quantization_config") or not all(dtype.is_floating_point for dtype in dtypes):
        raise ValueError(
            f"{folder} is quantised; expected float weights. Convert the checkpoint that it was made from."
        )
    # Weights of several dtypes are written in the one that holds them all.
    dtype = functools.reduce(torch.promote_types, dtypes)
    name = best_class(checkpoint, checkpoint.parts)
    model = open_class(checkpoint, "scratchbert", name, "pooler" in checkpoint.parts, dtype)
    # AutoTokenizer reads this for every model type but "bert".
    model.config.tokenizer_class = checkpoint.fields.get("tokenizer_class") or "BertTokenizer"
    print(f"{type(model).__name__}: {model.num_parameters():,} parameters in {dtype}")
    if checkpoint.unknown_tensors:
        print(f"tensors that no class has a place for: {', '.join(sorted(checkpoint.unknown_tensors))}")
    return model


def copy_files(source: Path, folder: Path) -> None:
    """Copies into `folder` all files of `source` that it does not have, except weights and the code of this package."""
    from huggingface_hub.utils import filter_repo_objects

    import modeling_scratchbert

    code = [path.name for path in Path(modeling_scratchbert.__file__).parent.glob("*.py")]
    names = [path.relative_to(source).as_posix() for path in source.rglob("*") if path.is_file()]
    names = [name for name in names if name not in code and not (folder / name).exists()]
    chosen = list(filter_repo_objects(names, ignore_patterns=[*LEFT_BEHIND, PICKLED, SAFE]))
    for name in chosen:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source / name, folder / name)
    left = {name.partition("/")[0] for name in set(names) - set(chosen)}
    print("files that are not copied:", ", ".join(sorted(left)) or "none")


def keep_origin(source: Path, folder: Path) -> None:
    """Keeps `_name_or_path` of the source's config.json, which says what it was made from. transformers drops it."""
    origin = {name: value for name, value in read_json(source / "config.json").items() if name == "_name_or_path"}
    if origin:
        write_json(folder / "config.json", read_json(folder / "config.json") | origin)


def write_vocabulary(folder: Path) -> None:
    """Writes vocab.txt, which other readers of BERT checkpoints expect, from a tokenizer.json of WordPiece."""
    from tokenizers import Tokenizer, models

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    ids = tokenizer.get_vocab()
    if isinstance(tokenizer.model, models.WordPiece) and max(ids.values()) == len(ids) - 1:
        lines = [f"{word}\n" for word in sorted(ids, key=ids.get)]
        (folder / "vocab.txt").write_text("".join(lines), encoding="utf-8", newline="\n")


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code."""
    parser = make_parser()
    args = parser.parse_args(argv)

    def work() -> None:
        check_target(Path(args.source).resolve(), args.output.resolve(), args.overwrite)
        with about(args.source):
            source = fetch(args.source, args.revision)
        model = open_model(source, args.to)
        with atomic_folder(args.output) as folder:
            if args.to == "bert":
                model.save_as_bert(folder)
            else:
                model.save_pretrained(folder)
            copy_files(source, folder)
            keep_origin(source, folder)
            if args.to == "bert" and (folder / "tokenizer.json").exists() and not (folder / "vocab.txt").exists():
                write_vocabulary(folder)

    return parser.run(work, interrupted=f"interrupted; {args.output} is unchanged", is_silent=True)


if __name__ == "__main__":
    sys.exit(main())
