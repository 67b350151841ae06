"""What a sentence-transformers folder says about its embeddings: pooling, normalisation, lengths and prompts."""

from dataclasses import dataclass

from toolkit.files import read_json, read_json_object
from toolkit.remote_code import find

# In 1_Pooling/config.json before sentence-transformers 5.
OLD_POOLINGS = {"pooling_mode_cls_token": "cls", "pooling_mode_max_tokens": "max", "pooling_mode_mean_tokens": "mean"}
MODULES = ("Transformer", "Pooling", "Normalize")


@dataclass
class Embedding:
    """How a model's embeddings are made. The defaults are those of a folder without modules.json."""

    pooling: str = "mean"
    normalize: bool = False
    max_length: int | None = None
    prompt: str = ""


def is_sentence_folder(source: str) -> bool:
    """Whether a checkpoint was saved by sentence-transformers."""
    return find(source, "modules.json") is not None


def read_embedding(source: str) -> Embedding:
    """How the embeddings of a checkpoint are made.

    Raises:
        ValueError: the folder has a module, or a setting of one, that is not supported.
        OSError: a file cannot be read.
    """
    if not is_sentence_folder(source):
        return Embedding()
    modules = read_json(find(source, "modules.json"))
    kinds = [str(module.get("type")).rpartition(".")[2] for module in modules]
    if unknown := [kind for kind in kinds if kind not in MODULES]:
        raise ValueError(f"Its modules.json has the module {unknown[0]}; expected only {', '.join(MODULES)}.")
    if kinds not in (["Transformer", "Pooling"], list(MODULES)):
        raise ValueError(f"Its modules.json has the modules {', '.join(kinds)}; expected {', '.join(MODULES)}.")
    if folder := modules[0].get("path"):
        raise ValueError(f"Its Transformer is in the folder {folder}; expected it beside modules.json.")
    settings = fields_of(source, "sentence_bert_config.json")
    if settings.get("do_lower_case"):
        raise ValueError("Its sentence_bert_config.json has do_lower_case; expected a tokenizer that does this.")
    if settings.get("transformer_task", "feature-extraction") != "feature-extraction":
        raise ValueError(f"Its transformer_task is {settings['transformer_task']!r}; expected 'feature-extraction'.")
    prompts = fields_of(source, "config_sentence_transformers.json")
    pooling = fields_of(source, f"{modules[1].get('path')}/config.json")
    prompt = (prompts.get("prompts") or {}).get(prompts.get("default_prompt_name")) or ""
    if pooling.get("include_prompt") is False:
        raise ValueError("Its Pooling has include_prompt false; expected a pooling over all tokens.")
    return Embedding(pooling_of(pooling), "Normalize" in kinds, settings.get("max_seq_length"), prompt)


def pooling_of(fields: dict) -> str:
    """The pooling that the config.json of a Pooling module names. Raises ValueError for one that is not supported."""
    modes = fields.get("pooling_mode")
    if modes is None:
        modes = [OLD_POOLINGS.get(name, name) for name, on in fields.items() if name.startswith("pooling_mode_") and on]
    modes = [modes] if isinstance(modes, str) else list(modes)
    if len(modes) != 1 or modes[0] not in OLD_POOLINGS.values():
        raise ValueError(f"Its Pooling is {', '.join(modes) or 'none'}; expected one of mean, cls, max.")
    return modes[0]


def fields_of(source: str, name: str) -> dict:
    """The content of a JSON file of a checkpoint; nothing if there is no such file."""
    path = find(source, name)
    return {} if path is None else read_json_object(path)
