"""A checkpoint before its weights are read: its configuration, its tensors, and the class that opens it."""

from dataclasses import dataclass

import torch
import transformers

import modeling_scratchbert
from modeling_scratchbert import ScratchBertConfig
from modeling_scratchbert.bert.fields import scratchbert_fields
from modeling_scratchbert.bert.files import tensor_names
from modeling_scratchbert.bert.names import OTHER_REFERENCES, reference_class, to_scratchbert
from modeling_scratchbert.checkpoints import raw_config
from modeling_scratchbert.probe.recording import probe_name
from toolkit.common import about
from toolkit.hub import check_source
from toolkit.trust import find

# Our classes, without "ScratchBert", and the parts beyond embeddings and blocks that a checkpoint of each holds. If a
# checkpoint does not name its class and several fit, the first is taken. The pooler of the bare model is optional.
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


def class_name(name: str, kind: str) -> str:
    """The full name of the class `name` of `CLASS_PARTS` in a checkpoint of this kind."""
    return f"ScratchBert{name}" if kind == "scratchbert" else reference_class(f"ScratchBert{name}")


def short_name(class_name: str) -> str:
    """The name in `CLASS_PARTS` of one of our classes or of its reference."""
    ours = {reference: own for own, reference in OTHER_REFERENCES.items()}.get(class_name, class_name)
    return ours.removeprefix("Scratch").removeprefix("Bert")


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
        known = set().union(*CLASS_PARTS.values())
        return {name.removeprefix("model.").split(".")[0] for name in self.tensors.values() if name} & known

    @property
    def unknown_tensors(self) -> set[str]:
        """The tensors that we have no place for, except those that BERT does not compute with either."""
        unused = ("encoder.pooler.",) if self.kind == "encoder-decoder" else ()
        names = {name for name, ours in self.tensors.items() if ours is None}
        return {name for name in names if not name.startswith(unused) and not name.endswith("position_ids")}

    @property
    def classes(self) -> dict[str, set[str]]:
        """The classes that it may be of, with their parts."""
        if self.config.is_encoder_decoder:
            return SEQ2SEQ_CLASS_PARTS
        is_decoder = self.config.is_decoder
        return CAUSAL_CLASS_PARTS | CLASS_PARTS if is_decoder else CLASS_PARTS | CAUSAL_CLASS_PARTS


def best_class(checkpoint: Checkpoint, parts: set[str]) -> str:
    """The class, one of `Checkpoint.classes`, that uses most of the model heads among `parts`; of several, the one that
    config.json names. bert-base-uncased names BertForMaskedLM, and has the next-sentence head as well.

    Raises:
        ValueError: config.json names a class that is not one of `Checkpoint.classes`.
    """
    named, classes = None, checkpoint.classes
    if checkpoint.architectures:
        named = short_name(checkpoint.architectures[0])
        if named not in classes:
            known = ", ".join(class_name(each, checkpoint.kind) for each in classes)
            raise ValueError(
                f"{checkpoint.source} is of the class {checkpoint.architectures[0]}; expected one of {known}."
            )
    if named is not None and not classes[named] <= checkpoint.parts:
        return named  # to open it names the missing tensors
    candidates = [name for name in classes if classes[name] <= parts]
    return max(candidates, key=lambda name: (len(classes[name] - {"pooler"}), name == named))


def read_checkpoint(source: str) -> Checkpoint:
    """Reads the configuration and the tensor names of `source`.

    Raises:
        CommandError: there is no such checkpoint, or it has code that this package did not write.
        ValueError: it is neither a BERT nor a ScratchBert.
        OSError: it has no weights, or they cannot be read.
    """
    with about(source):
        check_source(source)
        fields, _ = raw_config(source)
    scratchbert_fields(fields, source)  # raises for other kinds
    config = ScratchBertConfig.from_pretrained(source)
    model_type = fields.get("model_type")
    kind = model_type if model_type in ("scratchbert", "encoder-decoder") else "bert"
    tensors = {name: to_scratchbert(name, kind) for name in tensor_names(source) or ()}
    if not tensors:
        raise OSError(f"{source} has no file of weights.")
    return Checkpoint(source, kind, fields, config, tensors)


def open_class(checkpoint: Checkpoint, kind: str, name: str, with_pooler: bool, dtype: torch.dtype = torch.float32):
    """The class `name` of the given kind, opened from a checkpoint of any kind, with the pooler if requested. A
    ScratchBert with a probe.json is verified against it.

    Raises:
        ValueError: the checkpoint lacks a tensor of it, or has it in another shape; the model's would be random.
    """
    model_class = getattr(modeling_scratchbert if kind == "scratchbert" else transformers, class_name(name, kind))
    options = {"add_pooling_layer": with_pooler} if name == "Model" else {}
    if kind == "scratchbert" and find(checkpoint.source, probe_name()):
        options["verify"] = True
    model, info = model_class.from_pretrained(
        checkpoint.source, dtype=dtype, output_loading_info=True, ignore_mismatched_sizes=True, **options
    )
    if wrong := sorted({*info["missing_keys"], *(name for name, *_ in info["mismatched_keys"])}):
        raise ValueError(
            f"{checkpoint.source} is not a complete {class_name(name, checkpoint.kind)}: it lacks, or has in another "
            f"shape, {', '.join(wrong)}. Correct the class or the sizes in its config.json; nothing is filled in at "
            "random."
        )
    if with_pooler and model.base_model.pooler is None:  # which the class does not use, but the checkpoint has
        model.base_model.pooler = type(model.base_model).from_pretrained(checkpoint.source, dtype=dtype).pooler
    return model
