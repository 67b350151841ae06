"""Inspecting a checkpoint by its configuration and its tensor names, and opening it by our classes or those of
transformers.

Commands use the package's functions for checkpoints through this module, so that they do not depend on its files.
"""

from dataclasses import dataclass

import torch
import transformers
from transformers import AutoTokenizer
from transformers.utils import logging

import modeling_scratchbert
from modeling_scratchbert import ScratchBertConfig, ScratchBertForCausalLM
from modeling_scratchbert.bert.fields import scratchbert_fields
from modeling_scratchbert.bert.files import WEIGHT_FILES, tensor_names, weight_files
from modeling_scratchbert.bert.names import OTHER_REFERENCES, reference_class, to_bert, to_scratchbert
from modeling_scratchbert.checkpoints import explained, raw_config
from modeling_scratchbert.probe.comparison import check_probe, read_probe
from modeling_scratchbert.probe.recording import probe_name
from toolkit.hub import check_source, has_tokenizer
from toolkit.remote_code import find

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


def is_per_token(output: str, values: torch.Tensor) -> bool:
    """Whether an output of one of our classes, or of its reference, has values for each token, else each sequence."""
    return values.ndim == 3 or output in ("start_logits", "end_logits")


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

    source: str  # a folder or a hub id, as the user has given it
    files: str  # where its files are: `source`, or the folder of a snapshot of it
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
        known = set().union(*CLASS_PARTS.values())
        return {name.removeprefix("model.").split(".")[0] for name in self.tensors.values() if name} & known

    @property
    def classes(self) -> dict[str, set[str]]:
        """The classes that it may be of, with their parts."""
        return classes_in(self.config.is_encoder_decoder, self.config.is_decoder)

    @property
    def named_class(self) -> str | None:
        """The first of the architectures in config.json, by its name in `CLASS_PARTS`; None if there are none.

        Raises:
            ValueError: it is not one of `classes`.
        """
        if not self.architectures:
            return None
        name = short_name(self.architectures[0])
        if name not in self.classes:
            known = ", ".join(class_name(each, self.kind) for each in self.classes)
            raise ValueError(f"{self.source} is of the class {self.architectures[0]}; expected one of {known}.")
        return name


def config_fields(source: str) -> dict:
    """The fields of the config.json of `source`, as they are.

    Raises:
        OSError: there is none, or it cannot be read.
    """
    fields, _ = raw_config(source)
    return fields


def read_checkpoint(source: str, files: str | None = None) -> Checkpoint:
    """Reads the configuration and the tensor names of `source`, or of its snapshot in the folder `files`.

    Raises:
        ValueError: it is neither a BERT nor a ScratchBert, or has code that this package did not write.
        OSError: there is no such checkpoint, or it cannot be read.
    """
    files = files or source
    try:
        check_source(files)
        fields = config_fields(files)
    except (OSError, ValueError) as error:
        kind = OSError if isinstance(error, OSError) else ValueError
        raise kind(f"{source} cannot be read: {error}") from error
    scratchbert_fields(fields, source)  # raises for other kinds
    config = ScratchBertConfig.from_pretrained(files)
    kind = kind_of(fields)
    tensors = {name: to_scratchbert(name, kind) for name in tensor_names(files) or ()}
    if not tensors:
        raise OSError(f"{source} has no file of weights.")
    return Checkpoint(source, files, kind, fields, config, tensors)


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


def load(checkpoint: Checkpoint, kind: str, name: str, with_pooler: bool):
    """The class `name` of the given kind, opened from a checkpoint of any kind, in float32 and evaluation mode.

    Raises:
        ValueError: see `open_class`; or the model differs from probe.json.
    """
    model = open_class(checkpoint, kind, name, with_pooler, torch.float32)
    if kind == "scratchbert" and find(checkpoint.files, probe_name()):
        check_probe(model, read_probe(checkpoint.files), checkpoint.source, weight_files(checkpoint.files) or [])
    return model.eval()


def open_class(checkpoint: Checkpoint, kind: str, name: str, with_pooler: bool, dtype: torch.dtype):
    """The class `name` of the given kind, opened from a checkpoint of any kind.

    Raises:
        ValueError: the checkpoint lacks a tensor of it, or has it in another shape; the model's would be random.
    """
    model_class = getattr(modeling_scratchbert if kind == "scratchbert" else transformers, class_name(name, kind))
    options = {"add_pooling_layer": with_pooler} if name == "Model" else {}
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # what is missing is reported below
    try:
        model, info = model_class.from_pretrained(
            checkpoint.files, dtype=dtype, output_loading_info=True, ignore_mismatched_sizes=True, **options
        )
    finally:
        logging.set_verbosity(verbosity)

    def in_file(tensor: str) -> str:
        ours = to_scratchbert(tensor, kind)
        return (ours and to_bert(ours, checkpoint.kind)) or tensor

    wrong = [f"{in_file(tensor)} is not in the file" for tensor in sorted(info["missing_keys"])]
    for tensor, found, expected in sorted(info["mismatched_keys"]):
        wrong.append(f"{in_file(tensor)} is {tuple(found)} and not {tuple(expected)}")
    if wrong:
        raise ValueError(
            f"{checkpoint.source} is not a complete {class_name(name, checkpoint.kind)}: "
            f"{'; '.join(wrong)}. Correct the class or the sizes in its config.json; nothing is "
            "filled in at random."
        )
    return model


def decoder_of(model):
    """The decoder of a seq2seq model, with its model head if it has one. The tensors are those of `model`."""
    if not hasattr(model, "lm_head"):
        return model.get_decoder()
    with torch.device("meta"):  # its weights are replaced at once
        decoder = ScratchBertForCausalLM(model.config.decoder_config())
    decoder.model, decoder.lm_head = model.get_decoder(), model.lm_head
    return decoder.eval()


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
