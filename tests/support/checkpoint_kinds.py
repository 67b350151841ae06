"""Random BERT checkpoints in every form in which they are found, and what a model computes once it has loaded one."""

import copy
import json
import logging
import os
import shutil
from collections import OrderedDict
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from support.models import OURS, random_bert, random_encoder_decoder

DECODER_WEIGHT, DECODER_BIAS = "cls.predictions.decoder.weight", "cls.predictions.decoder.bias"
OUTPUT_BIAS = "cls.predictions.bias"

# What `from_pretrained` reports if every tensor was found and used.
NOTHING = {"missing_keys": set(), "unexpected_keys": set(), "mismatched_keys": set(), "error_msgs": []}

CONTAINERS = (
    "safetensors",
    "safetensors without metadata",
    "sharded safetensors",
    "bin",
    "legacy bin",
    "sharded bin",
    "sharded legacy bin",
)


# The forms of BERT checkpoints: arguments of `write_bert` and `write_two_berts`.
FORMS = {
    "today's": {},
    "without metadata": {
        "container": "safetensors without metadata",
        "dtype": torch.float16,
        "layer_norm": "gamma",
        "decoder": "weight",
    },
    "shards": {"container": "sharded safetensors", "dtype": torch.bfloat16, "decoder": "weight and bias"},
    "converted from TensorFlow": {
        "container": "bin",
        "layer_norm": "gamma",
        "position_ids": True,
        "decoder": "weight and bias",
    },
    "before torch 1.6": {"container": "legacy bin", "dtype": torch.float16, "decoder": "weight"},
    "pickled shards": {"container": "sharded bin", "dtype": torch.bfloat16, "position_ids": True},
    "pickled shards before torch 1.6": {"container": "sharded legacy bin", "layer_norm": "gamma"},
}


# --- what a model computes


def outputs(model) -> dict[str, torch.Tensor]:
    """All that `model` computes in float32 for one fixed batch: its logits and every hidden state, for real tokens."""
    if model.dtype != torch.float32:
        model = copy.deepcopy(model).float()
    generator = torch.Generator().manual_seed(1)
    batch = {
        "input_ids": torch.randint(1, 50, (3, 7), generator=generator),
        "token_type_ids": torch.tensor([[0, 0, 0, 1, 1, 1, 1]]).expand(3, 7),
        "attention_mask": torch.tensor([[1] * 7, [1] * 5 + [0] * 2, [1] * 2 + [0] * 5]),
    }
    real = batch["attention_mask"].bool()
    if getattr(model.config, "add_cross_attention", False):
        batch["encoder_hidden_states"] = torch.randn(3, 4, model.config.hidden_size, generator=generator)
    if model.config.is_encoder_decoder:
        batch["decoder_input_ids"] = torch.randint(1, 50, (3, 6), generator=generator)
    if "MultipleChoice" in type(model).__name__:
        batch = {name: tensor[None] for name, tensor in batch.items()}
    was_training = model.training
    with torch.no_grad():
        result = model.eval()(**batch, output_hidden_states=True, use_cache=False)
    model.train(was_training)
    tensors = {name: value for name, value in result.items() if isinstance(value, torch.Tensor)}
    for kind in ("hidden_states", "encoder_hidden_states", "decoder_hidden_states"):
        tensors |= {f"{kind}.{i}": states for i, states in enumerate(result.get(kind) or ())}
    return {name: tensor[real] if tensor.shape[:2] == (3, 7) else tensor for name, tensor in tensors.items()}


def assert_same_outputs(ours, theirs, only: str = "", tolerance: float = 1e-6) -> None:
    """Of two models, or results of `outputs`; of those alone whose name starts with `only`."""
    ours, theirs = (result if isinstance(result, dict) else outputs(result) for result in (ours, theirs))
    ours, theirs = ({k: v for k, v in result.items() if k.startswith(only)} for result in (ours, theirs))
    assert ours, only
    torch.testing.assert_close(ours, theirs, rtol=0, atol=tolerance)


def load(source, head="ForPreTraining", **kwargs):
    """The model that `from_pretrained` opens, what it reports of the loading, and what it warns of."""
    with logged_warnings() as warnings:
        model, info = OURS[head].from_pretrained(source, output_loading_info=True, **kwargs)
    return model, info, "\n".join(warnings)


def assert_loads(source, expected, head="ForPreTraining", **kwargs):
    """`from_pretrained` finds and uses every tensor, warns of nothing, and the model computes what `expected` does."""
    model, info, warnings = load(source, head, **kwargs)
    assert info == NOTHING
    assert not warnings
    assert not model.training
    assert_same_outputs(model, expected, tolerance=1e-5)
    return model


# --- how a checkpoint is written


def bert_tensors(model, prefix=True, layer_norm="weight", decoder="left out", position_ids=False, dtype=torch.float32):
    """The tensors of `model`, a BERT, as one of the many programs that wrote BERT checkpoints would have named them.

    Args:
        prefix: whether the encoder's names start with "bert.".
        layer_norm: "weight" (and "bias"), or TensorFlow's "gamma" (and "beta").
        decoder: which of the output matrix and the second name of its bias are stored: "left out", "weight", "weight
            and bias".
        position_ids: whether the buffer that BERT once had is stored.
        dtype: of all floating tensors.
    """
    dropped = {"left out": (DECODER_WEIGHT, DECODER_BIAS), "weight": (DECODER_BIAS,), "weight and bias": ()}[decoder]
    tensors = {name: tensor.to(dtype) for name, tensor in model.state_dict().items() if name not in dropped}
    if position_ids:
        start = "" if "embeddings.word_embeddings.weight" in tensors else "bert."
        tensors[f"{start}embeddings.position_ids"] = torch.arange(model.config.max_position_embeddings)[None]
    if not prefix:
        tensors = {name.removeprefix("bert."): tensor for name, tensor in tensors.items()}
    if layer_norm == "gamma":
        tensors = {
            name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): tensor
            for name, tensor in tensors.items()
        }
    return tensors


def two_bert_tensors(model, **form) -> dict[str, torch.Tensor]:
    """The tensors of `model`, an `EncoderDecoderModel` of two BERTs; `form` as in `bert_tensors`."""
    halves = {"encoder": model.encoder, "decoder": model.decoder}
    return {f"{half}.{name}": t for half, bert in halves.items() for name, t in bert_tensors(bert, **form).items()}


def bert_fields(model, **changes) -> dict:
    """What the config.json of `model` holds; a change to None takes a field out."""
    fields = {**model.config.to_diff_dict(), "architectures": [type(model).__name__], **changes}
    return {name: value for name, value in fields.items() if value is not None or name not in changes}


def write_weights(folder: Path, tensors: dict, container: str = "safetensors", variant: str | None = None) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    stem, ending = ("model", "safetensors") if "safetensors" in container else ("pytorch_model", "bin")
    stem += f".{variant}" if variant else ""
    if not container.startswith("sharded"):
        _write_file(folder / f"{stem}.{ending}", tensors, container)
        return
    # Dealt out like cards, so that no shard has a whole layer
    names = sorted(tensors)
    files = {f"{stem}-0000{i + 1}-of-00003.{ending}": names[i::3] for i in range(3)}
    for file, held in files.items():
        _write_file(folder / file, {name: tensors[name] for name in held}, container)
    index = f"{stem.removesuffix(f'.{variant}')}.{ending}.index{f'.{variant}' if variant else ''}.json"
    weight_map = {name: file for file, held in files.items() for name in held}
    (folder / index).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def _write_file(path: Path, tensors: dict, container: str) -> None:
    if "safetensors" in container:
        metadata = None if "without metadata" in container else {"format": "pt"}
        save_file({name: tensor.clone().contiguous() for name, tensor in tensors.items()}, path, metadata=metadata)
    elif "legacy" in container:  # as torch wrote before 1.6; some programs saved the parameters themselves
        tensors = OrderedDict((k, nn.Parameter(v) if v.is_floating_point() else v) for k, v in tensors.items())
        torch.save(tensors, path, _use_new_zipfile_serialization=False)
    else:
        torch.save(OrderedDict(tensors), path)


def write_bert(folder: Path, model=None, container="safetensors", fields=None, dtype=torch.float32, **form) -> Path:
    """A BERT checkpoint of `model`, a random one if left out; `form` as in `bert_tensors`. Returns `folder`."""
    model = random_bert() if model is None else model
    write_weights(folder, bert_tensors(model, dtype=dtype, **form), container)
    fields = {"dtype": str(dtype).removeprefix("torch."), **(fields or {})}
    (folder / "config.json").write_text(json.dumps(bert_fields(model, **fields)))
    return folder


def write_two_berts(folder: Path, model=None, container="safetensors", dtype=torch.float32, **form) -> Path:
    """An `EncoderDecoderModel` of two BERTs, random ones if left out; `form` as in `bert_tensors`."""
    model = random_encoder_decoder() if model is None else model
    model.save_pretrained(folder)
    (folder / "model.safetensors").unlink()
    write_weights(folder, two_bert_tensors(model, dtype=dtype, **form), container)
    change_config(folder, dtype=str(dtype).removeprefix("torch."))
    return folder


def write_hub_cache(cache: Path, repo_id: str, folder: Path, revisions=("main",)) -> None:
    """Lays `folder` into `cache` as huggingface_hub does with what it has downloaded of the repository `repo_id`."""
    repo, commit = cache / f"models--{repo_id.replace('/', '--')}", "c0ffee" + "0" * 34
    (repo / "refs").mkdir(parents=True)
    for revision in revisions:
        (repo / "refs" / revision).write_text(commit)
    shutil.copytree(folder, repo / "snapshots" / commit)


def config_json(folder: Path) -> dict:
    return json.loads((folder / "config.json").read_text(encoding="utf-8"))


def change_config(folder: Path, **changes) -> None:
    """Writes fields into the config.json of `folder`; a change to None takes one out."""
    fields = {**config_json(folder), **changes}
    fields = {name: value for name, value in fields.items() if value is not None or name not in changes}
    (folder / "config.json").write_text(json.dumps(fields))


def change_tensors(folder: Path, edit) -> None:
    """Saves the tensors of model.safetensors again, after `edit` was called with them."""
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def weight_files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.suffix in (".safetensors", ".bin"))


class Intruder:
    """An object in a pickle that makes the folder `path` when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


# --- the tests' own tools


@contextmanager
def logged_warnings():
    """The messages that `transformers` and the package log as warnings or worse, as they come."""
    messages = []

    class Listener(logging.Handler):
        def emit(self, record):
            messages.append(record.getMessage())

    listener, loggers = (
        Listener(logging.WARNING),
        [logging.getLogger(n) for n in ("transformers", "modeling_scratchbert")],
    )
    for logger in loggers:
        logger.addHandler(listener)
    try:
        yield messages
    finally:
        for logger in loggers:
            logger.removeHandler(listener)
