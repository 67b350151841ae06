"""The command line of the training commands: the parser of their flags, and their `main`.

Nothing that is imported here imports torch or transformers, so that `--help` answers at once.
"""

import argparse
import importlib
import sys
import types
from dataclasses import fields
from pathlib import Path
from typing import Literal, Union, get_args, get_origin, get_type_hints

from toolkit.cli import Parser, continuing_when_output_is_closed
from toolkit.files import find_shipped
from toolkit.finetuning.recipes import RECIPE, VALUE, recipe_arguments
from toolkit.finetuning.settings import EVALUATED_WITH, GROUPS, Settings
from toolkit.paths import FILES

# The flags in the first group of `--help`.
MOST_USED = (
    "model",
    "output",
    "train_file",
    "validation_file",
    "max_length",
    "batch_size",
    "epochs",
    "learning_rate",
    "seed",
    "resume",
)

# How `--help` shows the values of these flags; others are VALUE, or N or X for numbers.
METAVARS = dict.fromkeys(FILES, "FILE") | {
    "output": "FOLDER",
    "model": "MODEL",
    "tokenizer": "TOKENIZER",
    "dataset": "DATASET",
    "push_to_hub": "REPO",
}


def train(file: str, description: str, settings_class: type[Settings], argv: list[str] | None = None) -> int:
    """The `main` of a training command: reads its settings and runs the training. Returns the exit code.

    Args:
        file, description: the command's `__file__` and docstring.
    """
    parser, settings = parse(file, description, settings_class, argv)

    def work() -> None:
        from toolkit.finetuning.run import run

        module, _, name = settings_class.task.partition(":")
        run(parser, settings, getattr(importlib.import_module(module), name))

    with continuing_when_output_is_closed():
        return parser.run(work)


def parse(
    file: str, description: str, settings_class: type[Settings], argv: list[str] | None
) -> tuple[Parser, Settings]:
    """The parser of a command, and its settings: of the recipe, if the command line begins with one, overridden by the
    command line. Exits with code 2 and a line on standard error if one is invalid.

    Args:
        file: the command's `__file__`.
        description: the command's docstring.
    """
    argv = sys.argv[1:] if argv is None else argv
    parser, known = make_parser(file, description, settings_class), {each.name for each in fields(settings_class)}
    try:
        argv = mark_values(argv, {name for name, hint in get_type_hints(settings_class).items() if is_list(hint)})
        if argv and not argv[0].startswith("-"):
            argv = recipe_arguments(find_shipped(argv[0]), known) + argv[1:]
        given = vars(parser.parse_args(argv))
        if given["evaluate_only"] and (recipe := Path(given["model"] or "", RECIPE)).is_file():
            of_run = recipe_arguments(recipe, known, EVALUATED_WITH)
            given = vars(parser.parse_args([*of_run, *argv]))
        if given.get("config_file") is not None:
            given["config_file"] = str(find_shipped(given["config_file"]))
        settings = settings_class(**given)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    return parser, settings


def make_parser(file: str, description: str, settings_class: type[Settings]) -> Parser:
    """A parser with a flag for each field of the settings, in the groups of `--help`."""
    parser = Parser(file, description, usage="%(prog)s [RECIPE.yaml] [--FLAG VALUE …]")
    types_of = get_type_hints(settings_class)
    by_name = {each.name: each for each in fields(settings_class)}
    for title in GROUPS:
        for name in MOST_USED if title == "most used" else [name for name in by_name if name not in MOST_USED]:
            metadata = by_name[name].metadata
            if title in ("most used", metadata["group"]):
                spellings = [f"--{each}" for each in (name, metadata["alias"]) if each]
                options = argument_of(name, types_of[name])
                parser.group(title).add_argument(
                    *spellings, default=by_name[name].default, help=metadata["help"], **options
                )
    return parser


def argument_of(name: str, annotation) -> dict:
    """The arguments of `add_argument` for the field `name` of this type: `str`, `int`, `float`, `bool`, a list or a
    literal of strings, or one of these and None."""
    metavar = METAVARS.get(name, "VALUE")
    if get_origin(annotation) in (types.UnionType, Union):
        (annotation,) = set(get_args(annotation)) - {type(None)}
    if get_origin(annotation) is Literal:
        return {"choices": get_args(annotation)}
    if get_origin(annotation) is list:
        return {"nargs": "+", "type": unmarked, "metavar": metavar}
    if annotation is bool:
        return {"nargs": "?", "const": True, "type": boolean, "metavar": "true|false"}
    return {"type": annotation, "metavar": {int: "N", float: "X"}.get(annotation, metavar)}


def mark_values(arguments: list[str], lists: set[str]) -> list[str]:
    """The arguments with `VALUE` before each that begins with one hyphen and follows one of the flags `lists`, except
    for -h.

    Raises:
        ValueError: one of these flags is given twice: the parser would drop the first values.
    """
    marked, given, in_list = [], set(), False
    for argument in arguments:
        if argument.startswith("--"):
            name, equals, _ = argument[2:].replace("-", "_").partition("=")
            if name in lists & given:
                raise ValueError(f"--{name} is given twice; expected once, with all values after it")
            in_list = name in lists and not equals
            given.add(name)
        is_value = in_list and argument.startswith("-") and not argument.startswith("--") and argument != "-h"
        marked.append(VALUE + argument if is_value else argument)
    return marked


def is_list(annotation) -> bool:
    """Whether a type is a list, or a list or None."""
    return list in map(get_origin, (annotation, *get_args(annotation)))


def unmarked(text: str) -> str:
    return text.removeprefix(VALUE)


def boolean(text: str) -> bool:
    values = dict.fromkeys(("yes", "true", "on", "t", "y", "1"), True)
    values |= dict.fromkeys(("no", "false", "off", "f", "n", "0"), False)
    if text.lower() not in values:
        raise argparse.ArgumentTypeError(f"{text!r} is invalid; expected true or false")
    return values[text.lower()]
