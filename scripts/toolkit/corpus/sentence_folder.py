"""What a folder of sentence-transformers says: its modules, poolings, lengths, prompts and activation function."""

from dataclasses import dataclass, field
from pathlib import Path

from toolkit.files import read_json, read_json_object
from toolkit.trust import find

# The modules that are supported, and their files in sentence-transformers since version 5.4.
MODULES = {
    "Transformer": "transformer",
    "Pooling": "pooling",
    "Dense": "dense",
    "LayerNorm": "layer_norm",
    "Dropout": "dropout",
    "Normalize": "normalize",
}
KIND_OF_TYPE = {
    f"sentence_transformers.{package}{file}.{kind}": kind
    for kind, name in MODULES.items()
    for package in ("models", "sentence_transformer.modules", "base.modules")
    for file in ("", f".{kind}", f".{name}")
}
# In 1_Pooling/config.json before version 5.4, in the order in which sentence-transformers concatenates them.
OLD_POOLINGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
MODULE_WEIGHTS = ("model.safetensors", "pytorch_model.bin")  # one of them
# For each class of sentence-transformers, the task of its Transformer.
TRANSFORMER_TASKS = {"SentenceTransformer": "feature-extraction", "CrossEncoder": "sequence-classification"}


@dataclass
class Module:
    """A module after the pooling: its class, its folder, and its config.json."""

    kind: str
    folder: str
    fields: dict


@dataclass
class SentenceFolder:
    """How sentence-transformers uses a checkpoint. The defaults are those of one without modules.json.

    Args:
        poolings: the poolings whose results are concatenated.
        include_prompt: whether the pooling is over the tokens of the prompt, too.
        modules: those after the pooling.
        max_length: in tokens, which replaces the tokenizer's.
        default_prompt: the name of the prompt that is used if none is named.
        activation: the path of the class that is applied to logits.
    """

    poolings: list[str] = field(default_factory=lambda: ["mean"])
    include_prompt: bool = True
    modules: list[Module] = field(default_factory=list)
    max_length: int | None = None
    prompts: dict[str, str] = field(default_factory=dict)
    default_prompt: str | None = None
    activation: str | None = None

    def choose_prompt(self, options: dict) -> str:
        """The text of the option `prompt`, or of the name `prompt_name`, or the default.

        Raises:
            ValueError: the folder has no prompt of this name.
        """
        if options.get("prompt") is not None:
            return options["prompt"]
        name = options.get("prompt_name")
        if name is not None and name not in self.prompts:
            raise ValueError(
                f"--prompt_name is {name!r}; expected a prompt of the model: "
                f"{', '.join(map(repr, self.prompts)) or 'it has none'}."
            )
        return self.prompts.get(name or self.default_prompt) or ""


def model_type_of(source: str) -> str | None:
    """The class of sentence-transformers that saved a checkpoint; None if none did."""
    if find(source, "modules.json") is None:
        return None
    return fields_of(source, "config_sentence_transformers.json").get("model_type", "SentenceTransformer")


def module_files(source: str) -> list[Path]:
    """The files of a checkpoint that decide what its modules compute, besides those of its Transformer."""
    path = find(source, "modules.json")
    folders = [entry.get("path") for entry in read_json(path)] if path is not None else []
    files = [
        find(source, f"{folder}/{name}") for folder in folders if folder for name in ("config.json", *MODULE_WEIGHTS)
    ]
    return [file for file in files if file is not None]


def read_sentence_folder(source: str, expected: str) -> SentenceFolder:
    """How sentence-transformers uses a checkpoint.

    Args:
        expected: SentenceTransformer or CrossEncoder.

    Raises:
        ValueError: the folder is of another class, or has a module, or a setting of one, that is not supported.
        OSError: a file cannot be read.
    """
    model_type = model_type_of(source)
    if model_type is None:
        return SentenceFolder()
    if model_type != expected:
        raise ValueError(f"It is a {model_type} of sentence-transformers; expected a {expected}, or another --task.")
    entries = read_json(find(source, "modules.json"))
    unknown = [entry.get("type") for entry in entries if entry.get("type") not in KIND_OF_TYPE]
    if unknown:
        raise ValueError(
            f"Its modules.json has the module {unknown[0]}; expected sentence-transformers' own {', '.join(MODULES)}."
        )
    modules = [
        Module(KIND_OF_TYPE[entry["type"]], entry.get("path"), fields_of(source, f"{entry.get('path')}/config.json"))
        for entry in entries
    ]
    kinds = [module.kind for module in modules]
    is_encoder = expected == "CrossEncoder"
    first = ["Transformer"] if is_encoder else ["Transformer", "Pooling"]
    if kinds[: len(first)] != first or {*first} & {*kinds[len(first) :]} or (is_encoder and kinds != first):
        raise ValueError(
            f"Its modules.json has the modules {', '.join(kinds)}; expected a Transformer"
            + (" alone." if is_encoder else ", a Pooling, and then others.")
        )
    if modules[0].folder:
        raise ValueError(f"Its Transformer is in the folder {modules[0].folder}; expected it beside modules.json.")
    settings, task = fields_of(source, "sentence_bert_config.json"), TRANSFORMER_TASKS[expected]
    if settings.get("do_lower_case"):
        raise ValueError("Its sentence_bert_config.json has do_lower_case; expected a tokenizer that does this.")
    if settings.get("transformer_task", task) != task:
        raise ValueError(f"Its transformer_task is {settings['transformer_task']!r}; expected {task!r}.")
    tokenizer = settings.get("tokenizer_args") or settings.get("processor_kwargs") or {}
    config, pooling = fields_of(source, "config_sentence_transformers.json"), {} if is_encoder else modules[1].fields
    return SentenceFolder(
        poolings_of(pooling),
        pooling.get("include_prompt", True),
        modules[2:],
        tokenizer.get("model_max_length", settings.get("max_seq_length")),
        config.get("prompts") or {},
        config.get("default_prompt_name"),
        config.get("activation_fn"),
    )


def poolings_of(fields: dict) -> list[str]:
    """The poolings that the config.json of a Pooling names. Raises ValueError for one that is not supported."""
    modes = fields.get("pooling_mode")
    if modes is None:
        modes = [mode for name, mode in OLD_POOLINGS.items() if fields.get(name)] or ["mean"]
    modes = [modes] if isinstance(modes, str) else list(modes)
    if not modes or not set(modes) <= set(OLD_POOLINGS.values()):
        raise ValueError(
            f"Its Pooling is {', '.join(map(str, modes)) or 'none'}; expected some of "
            f"{', '.join(OLD_POOLINGS.values())}."
        )
    return modes


def fields_of(source: str, name: str) -> dict:
    """The content of a JSON file of a checkpoint; nothing if there is no such file."""
    path = find(source, name)
    return {} if path is None else read_json_object(path)
