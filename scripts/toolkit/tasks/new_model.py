"""Models from random weights, for tasks that can start without a checkpoint."""

import json

from modeling_scratchbert import ScratchBertConfig
from toolkit.common import find_shipped, read_json_object


def overrides(arguments) -> dict:
    """The fields of --config_overrides. A value is JSON, or else a text.

    Raises:
        ValueError: an entry is not NAME=VALUE.
    """
    fields = {}
    for entry in arguments.config_overrides or []:
        name, equals, value = entry.partition("=")
        if not equals:
            raise ValueError(f"--config_overrides has {entry!r}; expected NAME=VALUE.")
        try:
            fields[name] = json.loads(value)
        except json.JSONDecodeError:
            fields[name] = value
    check_fields("--config_overrides", fields)
    return fields


def check_fields(flag: str, fields: dict) -> None:
    """Raises ValueError if one is no field of the configuration."""
    unknown = sorted(fields.keys() - {*ScratchBertConfig().to_dict(), "padding_free"})
    if unknown:
        raise ValueError(f"{flag} has the field {unknown[0]!r}; expected fields of ScratchBertConfig.")


def new_config(arguments, tokenizer, **fields) -> ScratchBertConfig:
    """The configuration in --config_name, for a tokenizer, with other fields."""
    path = find_shipped(arguments.config_name)
    check_fields(f"--config_name {path}", read_json_object(path))
    sizes = {"vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id, "padding_free": True}
    return ScratchBertConfig.from_pretrained(path, **(sizes | fields))
