"""Inspecting a checkpoint by its configuration and its tensor names, and opening it by our classes or those of
transformers.

Commands use the package's functions for checkpoints through this module, so that they do not depend on its files.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import transformers
from transformers import AutoTokenizer
from transformers.utils import cached_file

import modeling_scratchbert
from modeling_scratchbert import ScratchBertConfig
from modeling_scratchbert.bert.fields import scratchbert_fields
from modeling_scratchbert.bert.files import WEIGHT_FILES, tensor_names, weight_files
from modeling_scratchbert.bert.names import (
    OTHER_REFERENCES,
    OUTPUT_BIAS_ALIAS,
    reference_class,
    to_bert,
    to_scratchbert,
)
from modeling_scratchbert.checkpoints import explained, raw_config
from modeling_scratchbert.configuration_scratchbert import AUTO_MAP
from modeling_scratchbert.probe.comparison import check_probe, read_probe
from modeling_scratchbert.probe.recording import probe_name
from toolkit.hub import check_source, has_tokenizer

__all__ = [
    "AUTO_MAP",
    "OUTPUT_BIAS_ALIAS",
    "WEIGHT_FILES",
    "reference_class",
    "scratchbert_fields",
    "tensor_names",
    "to_bert",
    "to_scratchbert",
    "weight_files",
]

# Our classes, without "ScratchBert", and the parts beyond embeddings and blocks that a checkpoint of each holds. If a
# checkpoint does not name its class and several fit, the first is taken.
CLASS_PARTS = {
    "ForPreTraining": {"pooler", "lm_head", "next_sentence_head"},
    "ForMaskedLM": {"lm_head"},
    "ForNextSentencePrediction": {"pooler", "next_sentence_head"},
    "ForSequenceClassification": {"pooler", "classifier"},
    "ForMultipleChoice": {"pooler", "classifier"},
    "ForTokenClassification": {"classifier"},
    "ForQuestionAnswering": {"qa_outputs"},
    "Model": set(),
}
CAUSAL_CLASS_PARTS = {"ForCausalLM": {"lm_head"}}
SEQ2SEQ_CLASS_PARTS = {"ForConditionalGeneration": {"lm_head"}, "Seq2SeqModel": set()}


# ------------------------------------------------------------------------------------------------------------- classes


def classes_in(is_encoder_decoder: bool, is_decoder: bool) -> dict[str, set[str]]:
    """The classes that a checkpoint with these fields in its configuration may be of, with their parts."""
    if is_encoder_decoder:
        return SEQ2SEQ_CLASS_PARTS
    return CAUSAL_CLASS_PARTS | CLASS_PARTS if is_decoder else CLASS_PARTS | CAUSAL_CLASS_PARTS


def parts_of(our_names: Iterable[str | None]) -> set[str]:
    """The parts in `CLASS_PARTS` that these tensors belong to."""
    known = set().union(*CLASS_PARTS.values())
    return {name.removeprefix("model.").split(".")[0] for name in our_names if name} & known


def kind_of(fields: dict) -> str:
    """The kind of a checkpoint with these fields in its config.json: "scratchbert", "encoder-decoder", else "bert"."""
    model_type = fields.get("model_type")
    return model_type if model_type in ("scratchbert", "encoder-decoder") else "bert"


def class_name(name: str, kind: str) -> str:
    """The full name of the class `name` of `CLASS_PARTS` in a checkpoint of this kind."""
    return f"ScratchBert{name}" if kind == "scratchbert" else reference_class(f"ScratchBert{name}")


def short_name(class_name: str) -> str:
    """The name in `CLASS_PARTS` of one of our classes or of its reference."""
    ours = {reference: own for own, reference in OTHER_REFERENCES.items()}.get(class_name, class_name)
    return ours.removeprefix("Scratch").removeprefix("Bert")


def why_unused(name: str, kind: str) -> str | None:
    """Why no model computes with the tensor `name` of a checkpoint; None if one does."""
    if name.endswith("position_ids"):
        return "the numbers 0, 1, 2, …, which the model counts itself"
    if kind == "encoder-decoder" and name.startswith("encoder.pooler."):
        return "the encoder's pooler, which EncoderDecoderModel never uses"
    return None


# --------------------------------------------------------------------------------------------------------- checkpoints


@dataclass
class Checkpoint:
    """A checkpoint before its weights are read."""

    source: str  # a folder or a hub id
    kind: str  # "bert", "scratchbert" or "encoder-decoder"
    fields: dict  # of its config.json
    config: ScratchBertConfig
    tensors: dict[str, str | None]  # from each tensor's name in the file to ours; None: we have no such tensor

    @property
    def architectures(self) -> list[str]:
        return self.fields.get("architectures") or []

    @property
    def parts(self) -> set[str]:
        """Those of `CLASS_PARTS` that it has tensors of."""
        return parts_of(self.tensors.values())

    @property
    def classes(self) -> dict[str, set[str]]:
        """The classes that it may be of, with their parts."""
        return classes_in(self.config.is_encoder_decoder, self.config.is_decoder)


def config_fields(source: str) -> dict:
    """The fields of the config.json of `source`, as they are.

    Raises:
        OSError: there is none, or it cannot be read.
    """
    fields, _ = raw_config(source)
    return fields


def read_checkpoint(source: str) -> Checkpoint:
    """Reads the configuration and the tensor names of `source`.

    Raises:
        ValueError: it is neither a BERT nor a ScratchBert.
        OSError: there is no such checkpoint, or it cannot be read.
    """
    try:
        check_source(source)
        fields = config_fields(source)
    except OSError as error:
        raise OSError(f"{source} cannot be read: {error}") from error
    config = ScratchBertConfig.from_pretrained(source)
    kind = kind_of(fields)
    tensors = {name: to_scratchbert(name, kind) for name in tensor_names(source) or ()}
    if not tensors:
        raise OSError(f"{source} has no file of weights.")
    return Checkpoint(source, kind, fields, config, tensors)


def weights_among(names: list[str], source: str) -> str:
    """The file, of those that `source` has, that `from_pretrained` reads the weights from.

    Raises:
        FileNotFoundError: there is none, or no config.json.
    """
    if "config.json" not in names:
        raise FileNotFoundError(f"{source} has no config.json, so it is not a checkpoint.")
    for name in WEIGHT_FILES:
        if name in names:
            return name
    raise FileNotFoundError(f"{source} has no weights that PyTorch reads; expected one of {', '.join(WEIGHT_FILES)}.")


def covering_classes(classes: dict[str, set[str]], parts: set[str], architectures: list[str]) -> list[str]:
    """Those of `classes` that together use all of `parts`, the ones among `architectures` first."""
    named = {short_name(name) for name in architectures}
    chosen, missing = [], set(parts)
    for name in sorted(classes, key=lambda name: name not in named):
        used = used_parts(classes[name])
        new = used - {"pooler"} or used
        if used <= parts and new <= missing:
            chosen.append(name)
            missing -= used
    return chosen or ["Model" if "Model" in classes else "Seq2SeqModel"]


def used_parts(parts: set[str]) -> set[str]:
    """The parts that a class with these parts uses: the bare model has its pooler."""
    return parts or {"pooler"}


def load(source, kind: str, name: str, with_pooler: bool):
    """The class `name` of the given kind, opened from a checkpoint of any kind, in float32 and evaluation mode.

    Raises:
        ValueError: the checkpoint lacks a tensor of it, which would be random; or the model differs from probe.json.
    """
    model_class = getattr(modeling_scratchbert if kind == "scratchbert" else transformers, class_name(name, kind))
    options = {"add_pooling_layer": with_pooler} if name == "Model" else {}
    model, loading = model_class.from_pretrained(source, dtype=torch.float32, output_loading_info=True, **options)
    if loading["missing_keys"]:
        raise ValueError(
            f"{source} lacks tensors of {model_class.__name__}: {', '.join(sorted(loading['missing_keys']))}."
        )
    if kind == "scratchbert" and cached_file(source, probe_name(), _raise_exceptions_for_missing_entries=False):
        check_probe(model, read_probe(source), source, weight_files(source) or [])
    return model.eval()


def verification(source: str) -> dict[str, bool]:
    """The argument with which `from_pretrained` compares the model with its probe.json.

    Raises:
        OSError: it has none. A class of transformers, which opens a BERT, does not have the argument.
    """
    with explained(source, {}):
        read_probe(source)
    return {"verify": True}


def open_tokenizer_if_any(source: str):
    """The tokenizer of a checkpoint; None if it has none, or one that cannot be opened here."""
    if not has_tokenizer(source):
        return None
    try:
        return AutoTokenizer.from_pretrained(source, trust_remote_code=False)
    except (OSError, ValueError, ImportError):
        return None
