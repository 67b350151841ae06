"""What the constructors of the training tasks open and check besides the model."""

import dataclasses
from collections.abc import Iterable
from difflib import get_close_matches
from pathlib import Path

from transformers import BertConfig

from toolkit.files import read_json_object
from toolkit.finetuning.settings import Settings
from toolkit.hub import open_tokenizer

# Fields of the config.json of a BERT that neither implementation uses, or only with the value that is checked.
UNUSED_FIELDS = {
    "auto_map",
    "directionality",
    "gradient_checkpointing",
    "pooler_fc_size",
    "pooler_num_attention_heads",
    "pooler_num_fc_layers",
    "pooler_size_per_head",
    "pooler_type",
    "position_embedding_type",
    "torch_dtype",
}


def tokenizer_of(settings: Settings, **options):
    """The tokenizer of --tokenizer or, where that is not given, of --model.

    Args:
        options: of `AutoTokenizer.from_pretrained`.

    Raises:
        OSError: there is none.
    """
    name = "tokenizer" if getattr(settings, "tokenizer", None) else "model"
    source = getattr(settings, name)
    try:
        return open_tokenizer(source, **options)
    except OSError as error:
        raise OSError(f"--{name} {source}: {error}") from error


def config_file_fields(path: str, config_class: type) -> dict:
    """The fields of the configuration in a file, without its model type.

    Raises:
        OSError, ValueError: it cannot be read, or has a field that models of `config_class` do not use.
    """
    given = read_json_object(Path(path))
    known = {*config_class().to_dict(), *UNUSED_FIELDS, *(each.name for each in dataclasses.fields(config_class))}
    if unknown := sorted(given.keys() - known):
        close = [f", perhaps {each!r}" for each in get_close_matches(unknown[0], known, n=1)]
        raise ValueError(
            f"--config_file {path} has the field {unknown[0]!r}; "
            f"expected fields of {config_class.__name__}{''.join(close)}"
        )
    for name, expected in {"position_embedding_type": "absolute", "is_encoder_decoder": False}.items():
        if config_class is BertConfig and given.get(name, expected) != expected:
            raise ValueError(
                f"--config_file {path} has {name} {given[name]!r}, "
                f"which --implementation bert does not support; expected {expected!r}"
            )
    return {name: value for name, value in given.items() if name != "model_type"}


def check_lengths(settings: Settings, names: Iterable[str], config) -> None:
    """Raises ValueError if one of these flags exceeds the positions of the model."""
    positions = config.max_position_embeddings
    for name in names:
        if (value := getattr(settings, name)) > positions:
            raise ValueError(f"--{name} is {value}; expected at most {positions}, the positions of the model")


def check_room(name: str, settings: Settings, tokenizer, texts: int = 1) -> None:
    """Raises ValueError unless the flag `name` leaves a token of each of so many texts. A tokenizer does not truncate
    to fewer tokens than its special ones."""
    special = tokenizer.num_special_tokens_to_add(pair=texts == 2)
    if (value := getattr(settings, name)) < special + texts:
        needed = f"{special} special tokens + 1 for each text"
        raise ValueError(f"--{name} is {value}; expected at least {special + texts}: {needed}")
