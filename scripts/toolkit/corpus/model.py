"""Opening the tokenizer and the model of a run."""

import torch
import transformers

from modeling_scratchbert.cpu.library import find_library
from toolkit.corpus.sentence_folder import model_type_of
from toolkit.hub import check_source, open_model, open_tokenizer, read_config
from toolkit.trust import find, import_package

# For each task, the class of the model, without "ScratchBert", and its Auto class.
CLASSES = {
    "embed": ("Model", "AutoModel"),
    "classify": ("ForSequenceClassification", "AutoModelForSequenceClassification"),
    "tag": ("ForTokenClassification", "AutoModelForTokenClassification"),
    "rerank": ("ForSequenceClassification", "AutoModelForSequenceClassification"),
    "fill-mask": ("ForMaskedLM", "AutoModelForMaskedLM"),
}
TASK_OF_CLASS = {
    "Model": "embed",
    "ForTokenClassification": "tag",
    "ForMaskedLM": "fill-mask",
    "ForPreTraining": "fill-mask",
}

# The file in a model's folder that `save_calibration` wrote, for `optimize_for_inference("int8")`.
CALIBRATION = "calibration.safetensors"


def read_model(source: str, trust_remote_code: bool) -> dict:
    """The fields of the config.json of a checkpoint, which is checked as far as possible without its weights.

    Raises:
        OSError: there is no such checkpoint, or it has no tokenizer.
        ValueError: it is no BERT encoder, or has code that is not trusted.
    """
    check_source(source, trust_remote_code)
    fields = read_config(source)
    if fields.get("model_type") not in ("bert", "scratchbert"):
        raise ValueError(f"Its model_type is {fields.get('model_type')!r}; expected 'bert' or 'scratchbert'.")
    if fields.get("is_decoder") or fields.get("is_encoder_decoder"):
        raise ValueError("It generates text; expected an encoder. scripts/generate.py applies it to lines.")
    open_tokenizer(source, trust_remote_code=trust_remote_code)
    return fields


def task_of(source: str, fields: dict) -> str:
    """The task that a checkpoint is for, by its class.

    Raises:
        ValueError: it names no class, or one of another task.
    """
    model_type = model_type_of(source)
    if model_type == "SentenceTransformer":
        return "embed"
    if model_type not in (None, "CrossEncoder"):
        raise ValueError(f"It is a {model_type}; expected a SentenceTransformer or a CrossEncoder.")
    [name] = (fields.get("architectures") or [None])[:1]
    short = str(name).removeprefix("Scratch").removeprefix("Bert")
    if short == "ForSequenceClassification":
        is_regression = model_type is None and fields.get("problem_type") == "regression"
        return "rerank" if number_of_labels(fields) == 1 and not is_regression else "classify"
    if short not in TASK_OF_CLASS:
        raise ValueError(f"Its class is {name}; expected one with a task. --task names the task.")
    return TASK_OF_CLASS[short]


def number_of_labels(fields: dict) -> int:
    labels = fields.get("id2label")
    return len(labels) if labels else fields.get("num_labels", 2)


def open_for(task: str, source: str, dtype: str | None, device: str, trust_remote_code: bool, **options):
    """The model of a checkpoint, for inference with a task. Options are those of `from_pretrained` and its class.

    Raises:
        ValueError: the checkpoint lacks weights, or the device does not support the dtype.
    """
    if dtype == "int8" and (device != "cpu" or not find_library()):
        raise ValueError(f"--dtype is int8, on {device}; expected a CPU and the library in C++, or another --dtype.")
    name, auto = CLASSES[task]
    package = import_package()
    model_class = getattr(package, f"ScratchBert{name}")
    if trust_remote_code and read_config(source).get("auto_map"):
        model_class, options = getattr(transformers, auto), options | {"trust_remote_code": True}
    else:
        options = options | {"padding_free": True}
    stored = "auto" if dtype in (None, "int8") else getattr(torch, dtype)
    model = open_model(
        model_class, source, advice="Expected a model that was trained for the task.", dtype=stored, **options
    )
    if device != "cpu":
        return model.to(device)
    if dtype == "int8":
        return model.optimize_for_inference("int8", calibration=find(source, CALIBRATION))
    return model.optimize_for_inference()


def longest(tokenizer, model, given: int | None, of_folder: int | None = None) -> int:
    """The number of tokens to which a text is cut: `given`, or the folder's, or the tokenizer's, but not more than the
    model has positions for.

    Raises:
        ValueError: `given` is more than the model has positions for.
    """
    positions = model.config.max_position_embeddings
    if given is not None and given > positions:
        raise ValueError(f"--max_length is {given}; the model has {positions} positions.")
    return min(given or of_folder or tokenizer.model_max_length, positions)
