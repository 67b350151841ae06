"""Model cards: the parts that several have, and the card of a folder that is uploaded to the Hub.

The text is in model_card.jinja, beside this file. A part of it is in a card if its values are given.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import yaml
from huggingface_hub import CardData, ModelCard, ModelCardData, RepoCard
from huggingface_hub.repocard import REGEX_YAML_BLOCK

from modeling_scratchbert.configuration_scratchbert import AUTO_MAP
from toolkit.checkpoint import class_name, short_name
from toolkit.files import read_json, read_json_object

TEMPLATE = Path(__file__).with_name("model_card.jinja")

# The Hub's name of the task of each class.
TASKS = {
    "ForPreTraining": "fill-mask",
    "ForMaskedLM": "fill-mask",
    "ForSequenceClassification": "text-classification",
    "ForTokenClassification": "token-classification",
    "ForMultipleChoice": "multiple-choice",
    "ForQuestionAnswering": "question-answering",
    "ForCausalLM": "text-generation",
    "ForConditionalGeneration": "text2text-generation",
    "Model": "feature-extraction",
}

MOST_LISTED = 50  # labels, files or other values of a list in a card

# In metrics.json, in the order of the columns of a card's table.
SPLITS = ("train", "validation", "test")

Metrics = Mapping[str, Mapping[str, float | None]]  # of each split, such as "validation"


# ------------------------------------------------------------------------------------------------ parts of every card


def is_own(model_class: str) -> bool:
    """Whether the class is ours, and thus opens by the code beside the weights."""
    return model_class.startswith("ScratchBert")


def auto_class(model_class: str) -> str:
    """The Auto class that opens a model of this class, ours or its reference."""
    path = f"modeling_scratchbert.{class_name(short_name(model_class), 'scratchbert')}"
    return next((auto for auto, opened in AUTO_MAP.items() if opened == path), "AutoModel")


def render(data: ModelCardData, **values) -> ModelCard:
    """A card with these metadata and the parts of the template that the values are for."""
    return ModelCard.from_template(data, template_path=str(TEMPLATE), **values)


def parse(text: str) -> RepoCard:
    """The card with this text.

    Raises:
        TypeError, ValueError, yaml.YAMLError: its metadata cannot be read.
    """
    return RepoCard(text if REGEX_YAML_BLOCK.search(text) else f"---\n\n---\n{text}")


def opening(name: str, model_class: str, *, trust_remote_code: bool) -> dict:
    """The values of the template's code that opens a model by `name`, its folder or repository."""
    trust = ", trust_remote_code=True" if trust_remote_code else ""
    return {"name": name, "auto_class": auto_class(model_class), "trust": trust}


def use(name: str, model_class: str, config: Mapping) -> dict:
    """The values of the template's code that opens a model and, if its task has an example, uses it.

    Args:
        config: the fields of its config.json.
    """
    task, labels = TASKS.get(short_name(model_class)), config.get("id2label") or {}
    # A model with both pre-training heads opens by its masked-LM head as well.
    opened = "ScratchBertForMaskedLM" if task == "fill-mask" else model_class
    # `pipeline` would take neighbours with the same tag, such as two nouns, for one.
    groups = bool(labels) and all(re.fullmatch(r"O|[BI]-.+", str(tag)) for tag in labels.values())
    return opening(name, opened, trust_remote_code=is_own(model_class)) | {"example": task, "tags_entities": groups}


def results_table(metrics: Metrics) -> str:
    """A table with a row for each metric and a column for each split; "" if there are no metrics."""
    names = dict.fromkeys(name for own in metrics.values() for name in own)
    rows = [[name, *(own.get(name, "") for own in metrics.values())] for name in names]
    return table(["metric", *metrics], rows) if rows else ""


def table(header: list[str], rows: Iterable[Sequence]) -> str:
    """A Markdown table."""
    return "\n".join(f"| {' | '.join(map(cell, line))} |" for line in [header, ["---"] * len(header), *rows])


def cell(value) -> str:
    """A value in a table or a sentence: a list with commas, and None, which NaN is in JSON, as undefined."""
    if value is None:
        return "undefined"
    text = listed(value) if isinstance(value, list) else str(value)
    if isinstance(value, float):
        text = f"{value:,.1f}" if 1000 <= abs(value) < 1e9 else f"{value:.4g}"
    return " ".join(text.split()).replace("|", "\\|").replace("*", "\\*")


def listed(values: Sequence) -> str:
    """The values with commas, up to `MOST_LISTED`."""
    more = f", and {len(values) - MOST_LISTED} more" if len(values) > MOST_LISTED else ""
    return ", ".join(map(str, values[:MOST_LISTED])) + more


def update_metadata(data: CardData, is_ours: bool, task: str | None, base_model: str | None = None) -> None:
    """Adds to a card's metadata what the Hub expects. Its own entries stay."""
    tags = data.get("tags", [])
    tags = [tag for tag in ([tags] if isinstance(tags, str) else tags) if tag != "scratchbert"]
    data["tags"] = [*tags, "scratchbert"] if is_ours else tags or None
    if (language := language_codes(data.get("language"))) is not None:
        data["language"] = language
    if base_model is not None:
        data["base_model"] = base_model
    for name, value in (("library_name", "transformers"), ("pipeline_tag", task)):
        if data.get(name) is None and value is not None:
            data[name] = value


def language_codes(language) -> str | list[str] | None:
    """The value of `language` in a card's metadata, with "no", the code of Norwegian, where YAML 1.1 reads false; None
    if it is no code."""
    codes = ["no" if code is False else code for code in (language if isinstance(language, list) else [language])]
    if not all(isinstance(code, str) for code in codes):
        return None
    return codes if isinstance(language, list) else codes[0]


def read_if_any(path: Path) -> dict:
    return read_json_object(path) if path.exists() else {}


# -------------------------------------------------------------------------------------------- of an uploaded folder


def published_card(folder: Path, repo: str, architecture: str, parity: Path | None) -> str:
    """The README.md of `folder` as it is uploaded: with the repository's name in the code that opens the model, and
    completed by metadata, results, code and the table of `parity`, a file that check_parity.py wrote with --json.

    Raises:
        OSError, ValueError: README.md, metrics.json or `parity` cannot be read.
    """
    path = folder / "README.md"
    try:
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        card = parse(text)
        ModelCard(str(card))  # checks its results as well
    except (TypeError, ValueError, yaml.YAMLError) as error:
        raise ValueError(
            f"{path} has metadata that cannot be read, and that the Hub would not accept: {error}"
        ) from error
    update_metadata(card.data, is_own(architecture), TASKS.get(short_name(architecture), "feature-extraction"))
    report = read_if_any(folder / "metrics.json")
    metrics = {split: report[split] for split in SPLITS if isinstance(report.get(split), dict)}
    opens = None if "from_pretrained(" in text else use(repo, architecture, read_if_any(folder / "config.json"))
    missing = render(
        ModelCardData(),
        title=None if path.exists() else repo.split("/")[1],
        use=opens,
        results=None if "## Results" in text else results_table(metrics),
        parity=None if parity is None else parity_values(parity),
    )
    card.text = with_repository(card.text, folder.resolve().name, repo) + missing.text
    return str(card)


def with_repository(text: str, folder_name: str, repo: str) -> str:
    """The card with the repository's name in place of the folder's in the code that opens the model."""
    heading = re.search(r"^# (.+)$", text, re.MULTILINE)
    names = {folder_name, heading[1].strip() if heading else folder_name}
    opening = rf'((?:from_pretrained|SentenceTransformer)\(")(?:{"|".join(map(re.escape, names))})"'
    return re.sub(opening, lambda found: f'{found[1]}{repo}"', text)


def parity_values(path: Path) -> dict:
    """The values of the template's section on the table that check_parity.py wrote with --json. Of absolute paths only
    the last part is shown."""
    report = read_json(path)
    try:
        about = [f"{name}: {report[name]}" for name in ("model", "reference", "batch")]
        about += [f"not compared: {name}" for name in report["not_compared"]]
        rows = [
            [
                row["what"],
                "×".join(map(str, row["shape"])),
                row["max_abs"],
                row["own_error"],
                "equal" if row["equal"] else "DIFFERS",
            ]
            for row in report["rows"]
            if row["kind"] != "gradient"
        ]
        return {
            "about": [re.sub(r"(?<!\w)(~|[A-Za-z]:)?[/\\][^\s,;]*[/\\]", "", line) for line in about],
            "table": table(["what", "shape", "max abs", "float32 error of the reference", "verdict"], rows),
            "verdict": report["verdict"],
        }
    except (KeyError, TypeError) as error:
        raise ValueError(f"{path} was not written by check_parity.py --json: {error!r}") from error
