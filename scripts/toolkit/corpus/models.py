"""The model of a run: what it is for, how its folder says that it is used, and opening it."""

import hashlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import yaml
from transformers.dynamic_module_utils import get_class_from_dynamic_module

from toolkit.common import read_json, read_json_object
from toolkit.hub import check_source, open_tokenizer, read_config
from toolkit.trust import find, import_package

# From the end of the name of a model's class to its task, and from a task to the end of the name of its class.
TASK_OF_CLASS = {
    "Model": "embed",
    "ForTokenClassification": "tag",
    "ForQuestionAnswering": "answer",
    "ForMaskedLM": "fill-mask",
    "ForPreTraining": "fill-mask",
    "ForConditionalGeneration": "generate",
    "EncoderDecoderModel": "generate",
    "ForCausalLM": "generate",
    "LMHeadModel": "generate",
}
MODEL_CLASSES = {
    "embed": "Model",
    "classify": "ForSequenceClassification",
    "rerank": "ForSequenceClassification",
    "tag": "ForTokenClassification",
    "answer": "ForQuestionAnswering",
    "fill-mask": "ForMaskedLM",
}
AUTO_CLASSES = {
    "ForMaskedLM": "AutoModelForMaskedLM",
    "ForConditionalGeneration": "AutoModelForSeq2SeqLM",
    "ForCausalLM": "AutoModelForCausalLM",
}

# Files of a model that decide its results, besides its weights.
MODEL_FILES = ("*.json", "recipe.yaml", "*.txt", "*.safetensors", "*.bin")
MODEL_FILES += ("*/config.json", "*/*.safetensors", "*/*.bin")  # of modules of sentence-transformers
CALIBRATION = "calibration.safetensors"  # which `save_calibration` writes, for `optimize_for_inference("int8")`

# Poolings of sentence-transformers before version 5.4 that are computed here.
OLD_POOLINGS = {"pooling_mode_cls_token": "cls", "pooling_mode_mean_tokens": "mean"}
# The classes of its modules lie in one of several packages, by its version.
OWN_MODULES = "sentence_transformers."


@dataclass
class Usage:
    """How the folder of a model says that it is used.

    Args:
        task: that it is for.
        recipe: the arguments of the training, such as `text_column`.
        max_length: in tokens; None: the tokenizer's.
        modules: of sentence-transformers, after the Transformer: the class of each, and its folder.
        pooling: "mean" or "cls"; None: that of a module.
        normalize: whether embeddings are scaled to length 1.
        prompts, default_prompt: by their names.
        include_prompt: whether a pooling is over the tokens of the prompt, too.
        activation: the class of the activation function of a cross-encoder.
    """

    fields: dict
    task: str | None = None
    recipe: dict[str, Any] = field(default_factory=dict)
    max_length: int | None = None
    modules: list[tuple[str, str]] = field(default_factory=list)
    pooling: str | None = "mean"
    normalize: bool = False
    prompts: dict[str, str] = field(default_factory=dict)
    default_prompt: str | None = None
    include_prompt: bool = True
    activation: str | None = None

    @property
    def is_seq2seq(self) -> bool:
        return bool(self.fields.get("is_encoder_decoder")) or self.fields.get("model_type") == "encoder-decoder"

    def prompt(self, text: str | None, name: str | None) -> str:
        """The prompt: `text`, or the one of this name, or the default. Raises ValueError if there is no such name."""
        if text is not None:
            return text
        if name is not None and name not in self.prompts:
            existing = ", ".join(map(repr, self.prompts)) or "it has none"
            raise ValueError(f"--prompt_name is {name!r}; expected a prompt of the model: {existing}.")
        return self.prompts.get(name or self.default_prompt) or ""


def read_usage(source: str, trust_remote_code: bool) -> Usage:
    """How a checkpoint is used. Its weights are not read.

    Raises:
        OSError: there is no such checkpoint, or it has no tokenizer.
        ValueError: it is no BERT, has code that is not trusted, or a setting that is not supported.
    """
    check_source(source, trust_remote_code)
    usage = Usage(read_config(source))
    if usage.fields.get("model_type") not in ("bert", "scratchbert", "encoder-decoder"):
        raise ValueError(f"Its model_type is {usage.fields.get('model_type')!r}; expected 'bert' or 'scratchbert'.")
    open_tokenizer(source, trust_remote_code=trust_remote_code)
    recipe = Path(source, "recipe.yaml")
    if recipe.is_file():
        usage.recipe = yaml.safe_load(recipe.read_text(encoding="utf-8"))
    kind = read_sentence_folder(source, usage)
    name = str((usage.fields.get("architectures") or [None])[0]).removeprefix("Scratch").removeprefix("Bert")
    if kind == "SentenceTransformer":
        usage.task = "embed"
    elif name == "ForSequenceClassification":
        is_regression = kind is None and usage.fields.get("problem_type") == "regression"
        usage.task = "rerank" if number_of_labels(usage.fields) == 1 and not is_regression else "classify"
    else:
        usage.task = TASK_OF_CLASS.get(name)
    return usage


def number_of_labels(fields: dict) -> int:
    labels = fields.get("id2label")
    return len(labels) if labels else fields.get("num_labels", 2)


def read_sentence_folder(source: str, usage: Usage) -> str | None:
    """Reads how sentence-transformers uses a checkpoint. Returns its class there; None if there is no modules.json.

    Raises:
        ValueError: it has a module or a setting that is not supported.
    """
    path = find(source, "modules.json")
    saved = usage.fields.get("sentence_transformers") or {}
    usage.activation = saved.get("activation_fn") or usage.fields.get("sbert_ce_default_activation_function")
    if path is None:
        return None
    settings, config = (
        fields_of(source, f"{name}.json") for name in ("sentence_bert_config", "config_sentence_transformers")
    )
    kind = config.get("model_type", "SentenceTransformer")
    modules = [(str(entry.get("type")), entry.get("path") or "") for entry in read_json(path)]
    if others := [name for name, _ in modules if not name.startswith(OWN_MODULES)]:
        raise ValueError(f"Its modules.json has {others[0]}; expected modules of sentence-transformers.")
    if (
        kind not in ("SentenceTransformer", "CrossEncoder")
        or not modules[0][0].endswith("Transformer")
        or modules[0][1]
    ):
        raise ValueError(f"It is a {kind} with {modules[0][0]}; expected a Transformer beside modules.json.")
    if settings.get("do_lower_case"):
        raise ValueError("Its sentence_bert_config.json has do_lower_case; expected a tokenizer that does this.")
    tokenizer = settings.get("tokenizer_args") or settings.get("processor_kwargs") or {}
    usage.max_length = tokenizer.get("model_max_length", settings.get("max_seq_length"))
    usage.prompts, usage.default_prompt = config.get("prompts") or {}, config.get("default_prompt_name")
    usage.activation = config.get("activation_fn") or usage.activation
    if kind == "CrossEncoder":
        usage.activation = usage.activation or ("Sigmoid" if number_of_labels(usage.fields) == 1 else "Identity")
        return kind
    pooling = fields_of(source, f"{modules[1][1]}/config.json") if len(modules) > 1 else {}
    usage.include_prompt = pooling.get("include_prompt", True)
    modes = pooling.get("pooling_mode") or [
        name for name, is_used in pooling.items() if is_used is True and "mode" in name
    ]
    [mode] = [modes] if isinstance(modes, str) else modes if len(modes) == 1 else [None]
    usage.pooling = OLD_POOLINGS.get(mode, mode)
    names = [name.rpartition(".")[2] for name, _ in modules[1:]]
    if names in (["Pooling"], ["Pooling", "Normalize"]) and usage.pooling in OLD_POOLINGS.values():
        usage.normalize = names[-1] == "Normalize"
    else:
        usage.modules, usage.pooling = modules[1:], None
    return kind


def fields_of(source: str, name: str) -> dict:
    """The content of a JSON file of a checkpoint; nothing if there is no such file."""
    path = find(source, name)
    return {} if path is None else read_json_object(path)


def open_modules(source: str, usage: Usage, device) -> list:
    """The modules of sentence-transformers after the Transformer, from that library. Raises ValueError for one that
    would run code from elsewhere."""
    from sentence_transformers.util import import_from_string

    modules = []
    for name, folder in usage.modules:
        function = fields_of(source, f"{folder}/config.json").get("activation_function", "torch.nn.Tanh")
        if not str(function).startswith("torch.nn."):
            raise ValueError(f"Its activation function is {function}; expected a class of torch.nn.")
        modules.append(import_from_string(name).load(source, subfolder=folder).to(device).eval())
    return modules


def open_model(args, usage: Usage, device: str):
    """The model for the task of a run, in evaluation mode; on a CPU optimised for inference.

    Raises:
        ValueError: the checkpoint lacks weights, or the device does not support the dtype.
    """
    from modeling_scratchbert.cpu.library import find_library  # the package may be missing

    has_own_code = args.trust_remote_code and "auto_map" in usage.fields
    if args.dtype == "int8" and (device != "cpu" or has_own_code or not find_library()):
        raise ValueError(
            f"--dtype is int8, on {device}; expected a CPU, the library in C++ and a model without code of its own."
        )
    generator = "ForConditionalGeneration" if usage.is_seq2seq else "ForCausalLM"
    name = MODEL_CLASSES.get(args.task, generator)
    options = {"dtype": "auto" if args.dtype in (None, "int8") else getattr(torch, args.dtype)}
    if has_own_code:  # an Auto class would open it with the installed package, which has registered its classes
        auto = AUTO_CLASSES.get(name, f"AutoModel{name.removeprefix('Model')}")
        cls = get_class_from_dynamic_module(usage.fields["auto_map"][auto], args.model)
    else:
        cls = getattr(import_package(), f"ScratchBert{name}")
        options |= {"padding_free": True} | ({"verify": True} if args.verify else {})
    if name == "Model":
        options["add_pooling_layer"] = False
    model, info = cls.from_pretrained(args.model, output_loading_info=True, **options)
    if missing := sorted(info["missing_keys"]):
        raise ValueError(
            f"It lacks {len(missing)} weights, such as {missing[0]}, which would be random. Expected a model that was "
            "trained for the task."
        )
    model.eval()
    if device != "cpu" or has_own_code:  # which an optimised model would not run
        return model.to(device)
    if args.dtype == "int8":
        return model.optimize_for_inference("int8", calibration=find(args.model, CALIBRATION))
    return model.optimize_for_inference()


def model_fingerprint(source: str, with_code: bool) -> str:
    """A hash of the files of a checkpoint that decide its results; with code of its own, also of it."""
    folder = find(source, "config.json").parent
    digest = hashlib.sha256()
    patterns = (*MODEL_FILES, "*.py") if with_code else MODEL_FILES
    for path in sorted({path for pattern in patterns for path in folder.glob(pattern)}):
        if path.name in ("metrics.json", "probe.json", "trainer_state.json"):
            continue
        digest.update(str(path.relative_to(folder)).encode())
        with open(path, "rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()
