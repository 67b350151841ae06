"""The model card of a converted checkpoint. Its text is in model_card.jinja, beside this file."""

from pathlib import Path

from huggingface_hub import CardData, ModelCard, ModelCardData, RepoCard
from huggingface_hub.repocard import REGEX_YAML_BLOCK

from modeling_scratchbert.configuration_scratchbert import AUTO_MAP
from toolkit.checkpoint import class_name, short_name

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


def auto_class(model_class: str) -> str:
    """The Auto class that opens a model of this class, ours or its reference."""
    path = f"modeling_scratchbert.{class_name(short_name(model_class), 'scratchbert')}"
    return next((auto for auto, opened in AUTO_MAP.items() if opened == path), "AutoModel")


def render(data: ModelCardData, **values) -> ModelCard:
    """A card with these metadata, and the template with these values."""
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
