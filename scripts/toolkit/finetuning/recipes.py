"""The YAML recipe of a training run: reading one as flags, writing that of a run, and comparing a run with its own."""

from dataclasses import asdict, fields
from pathlib import Path
from typing import ClassVar

import yaml

from toolkit.finetuning.settings import Settings
from toolkit.paths import with_paths

# Of a run, in its folder.
RECIPE = "recipe.yaml"

# Flags that may differ between a run and its continuation: they change no weight.
FREE_TO_CHANGE = {
    "resume",
    "dry_run",
    "output",
    "trust_checkpoints",
    "trackers",
    "push_to_hub",
    "hub_private",
    "keep_checkpoints",
    "log_steps",
    "save_steps",
    "eval_batch_size",
    "all_scores",
}

# With --resume these may grow, once the run is finished.
EXTENDING = {"epochs", "max_steps"}

# Before the values of a list in the parser's arguments: a value that begins with a hyphen is then not taken for a flag.
# No command line can have this character.
VALUE = "\0"


def recipe_arguments(path: Path, known: set[str], used: set[str] | None = None) -> list[str]:
    """A recipe as command-line arguments, so that its values are parsed and checked in the same way. Its files and
    folders that begin with ./ or ../ are relative to the recipe.

    Args:
        known: all flags.
        used: those to return; None: all.

    Raises:
        OSError, ValueError: it cannot be read, or has a name that is not a flag.
    """
    if path.suffix not in (".yaml", ".yml") or not path.is_file():
        raise ValueError(f"{path} is not a recipe; expected a .yaml file that exists, or flags that begin with --")
    recipe = read_recipe(path, RecipeLoader)
    if unknown := sorted(map(str, recipe.keys() - known)):
        raise ValueError(f"{path} has {', '.join(unknown)}; expected flags of this command")

    def beside(value: str, _: bool) -> str:
        return str((path.parent / value).resolve()) if value.startswith(("./", "../")) else value

    arguments = []
    for name, value in with_paths(recipe, beside).items():
        if used is not None and name not in used:
            continue
        if isinstance(value, list):
            arguments += [f"--{name}", *(VALUE + each if each.startswith("-") else each for each in map(str, value))]
        elif value is not None:
            arguments += [f"--{name}={value}"]
    return arguments


class RecipeLoader(yaml.SafeLoader):
    """Reads all values as strings, which the parser converts like those of the command line. YAML would make booleans
    of yes and no, which may be labels, and numbers of labels such as 01."""

    yaml_implicit_resolvers: ClassVar = {
        first: [(tag, pattern) for tag, pattern in resolvers if tag == "tag:yaml.org,2002:null"]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }


def read_recipe(path: Path, loader: type = yaml.SafeLoader) -> dict:
    """The flags in a recipe.

    Raises:
        OSError, ValueError: it cannot be read, or is not a recipe.
    """
    try:
        recipe = yaml.load(path.read_text(encoding="utf-8"), loader)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not YAML: {error}") from error
    if not isinstance(recipe, dict):
        raise ValueError(f"{path} is not a recipe; expected `flag: value` on each line")
    return recipe


def recipe_of(settings: Settings) -> str:
    """The recipe, in YAML, of exactly this run, from its beginning. It can be run from any folder: its paths are
    absolute."""
    recipe = with_paths(asdict(settings), absolute)
    del recipe["resume"], recipe["dry_run"], recipe["trust_checkpoints"]
    return yaml.safe_dump(recipe, sort_keys=False, allow_unicode=True)


def absolute(value: str, is_file: bool) -> str:
    """The absolute path of a file or an existing folder; a hub id as it is."""
    return str(Path(value).resolve()) if is_file or Path(value).is_dir() else value


def changed_flags(settings: Settings, recipe: Path) -> dict[str, tuple]:
    """The flags, with their earlier and present values, that make a continuation differ from the run of `recipe`."""
    before = {each.name: each.metadata["before"] for each in fields(settings)}
    earlier = before | with_paths(read_recipe(recipe), absolute)
    return {
        name: (earlier[name], value)
        for name, value in with_paths(asdict(settings), absolute).items()
        if name not in FREE_TO_CHANGE and earlier[name] != value
    }
