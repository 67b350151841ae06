"""Model cards: of a trained model, of a converted checkpoint, and of a folder that is uploaded to the Hub.

A card contains no secrets and no paths: settings that look like a secret are omitted, and of a path only the last part
is shown.
"""

import os
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path, PureWindowsPath

import yaml
from huggingface_hub import EvalResult, ModelCard, ModelCardData, RepoCard, try_to_load_from_cache
from huggingface_hub.repocard import REGEX_YAML_BLOCK
from huggingface_hub.utils import validate_repo_id

from toolkit.checkpoint import AUTO_MAP, class_name, reference_class, short_name
from toolkit.files import looks_like_a_path, read_json, read_json_object, to_json, write_text
from toolkit.machine import hardware, version
from toolkit.metrics import main_metrics
from toolkit.training.settings import FILES, FOLDERS_OR_HUB_IDS, FREE_TO_CHANGE

LIBRARIES = ("torch", "transformers", "accelerate", "datasets", "tokenizers", "peft")

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

# A use of each class that the training commands save, with `tokenizer` and `model` open.
EXAMPLES = {
    "ForSequenceClassification": """\
classify = pipeline("text-classification", model=model, tokenizer=tokenizer)
print(classify("A text."))  # of a pair: {"text": "A text.", "text_pair": "Another one."}
""",
    "ForTokenClassification": """\
tag = pipeline("token-classification", model=model, tokenizer=tokenizer, ignore_labels=[])
print(tag("A text."))  # tags of tokens; the tag of a word is that of its first token
""",
    "ForQuestionAnswering": """\
inputs = tokenizer("A question?", "A text that answers it.", return_tensors="pt")
outputs = model(**inputs)
start, end = outputs.start_logits.argmax(), outputs.end_logits.argmax()
print(tokenizer.decode(inputs["input_ids"][0, start : end + 1]))
""",
    "ForConditionalGeneration": """\
inputs = tokenizer("A text.", return_tensors="pt")
ids = model.generate(**inputs)
print(tokenizer.batch_decode(ids, skip_special_tokens=True))
""",
    "ForMaskedLM": """\
fill = pipeline("fill-mask", model=model, tokenizer=tokenizer)
print(fill(f"A {tokenizer.mask_token} text."))
""",
}
# Tags that begin with B- and I- are grouped to entities.
EXAMPLE_WITH_ENTITIES = """\
tag = pipeline("token-classification", model=model, tokenizer=tokenizer, aggregation_strategy="first")
print(tag("A text with names in it."))
"""

# A model with both pre-training heads opens by its masked-LM head as well.
EXAMPLES["ForPreTraining"] = EXAMPLES["ForMaskedLM"]

# What a trained model of each class is for, in its card; "ForSequenceClassification" by its `problem_type`.
USES = {
    "regression": "It predicts numbers for a text, or for a pair of texts if it was trained on pairs.",
    "multi_label_classification": (
        "It predicts any number of labels for a text, or for a pair of texts if it was trained on pairs."
    ),
    "ForSequenceClassification": (
        "It predicts one label for a text, or for a pair of texts if it was trained on pairs, even if no label fits."
    ),
    "ForTokenClassification": "It tags each word of a text.",
    "ForQuestionAnswering": "It finds the answer to a question in a given text, and writes no answers of its own.",
    "ForConditionalGeneration": "It writes a text for a given text. What it writes can be wrong.",
    "ForMaskedLM": "It predicts masked words. Other tasks require fine-tuning.",
}
USES["ForPreTraining"] = USES["ForMaskedLM"]

MOST_LISTED = 50  # labels, files or other values of a list in a card

# In metrics.json, in the order of the columns of a card's table.
SPLITS = ("train", "validation", "test")

# A setting is private if its name has one of these words, or its value this form.
SECRET_WORDS = {"token", "secret", "secrets", "password", "passwd", "credential", "credentials", "key", "auth"}
SECRET_VALUE = re.compile(r"\b(hf|sk|ghp|github_pat)[_-]\w{16,}|://[^/\s]+@")

# Around the section that a conversion writes, which the next conversion replaces.
SECTION = "<!-- {} of what convert_checkpoint.py wrote -->"
BEGIN, END = SECTION.format("Begin"), SECTION.format("End")

Metrics = Mapping[str, Mapping[str, float | None]]  # of each split, such as "validation"
History = Sequence[Mapping]  # see toolkit.training.report


# ------------------------------------------------------------------------------------------------ parts of every card


def is_own(model_class: str) -> bool:
    """Whether the class is ours, and thus opens by the code beside the weights."""
    return model_class.startswith("ScratchBert")


def auto_class(model_class: str) -> str:
    """The Auto class that opens a model of this class, ours or its reference."""
    path = f"modeling_scratchbert.{class_name(short_name(model_class), 'scratchbert')}"
    return next((auto for auto, opened in AUTO_MAP.items() if opened == path), "AutoModel")


def opening_code(name: str, auto: str, *, trust_remote_code: bool, example: str = "") -> str:
    """A Python block that opens the tokenizer and the model `name`, followed by an example of its use."""
    imports = ", ".join([auto, "AutoTokenizer", *(["pipeline"] if "pipeline(" in example else [])])
    trust = ", trust_remote_code=True" if trust_remote_code else ""
    return f"""\
```python
from transformers import {imports}

tokenizer = AutoTokenizer.from_pretrained("{name}"{trust})
model = {auto}.from_pretrained("{name}"{trust})
{example}```
"""


def usage_section(name: str, model_class: str, folder: Path) -> str:
    """Code that opens the model in `folder` by its folder or repository, `name`, and, if its class has an example, uses
    it."""
    short = short_name(model_class)
    example = EXAMPLES.get(short, "")
    if short == "ForTokenClassification" and tags_entities(folder):
        example = EXAMPLE_WITH_ENTITIES
    auto = auto_class("ScratchBertForMaskedLM" if short == "ForPreTraining" else model_class)
    return "## Use\n\n" + opening_code(name, auto, trust_remote_code=is_own(model_class), example=example)


def tags_entities(folder: Path) -> bool:
    """Whether the labels in config.json are O, B-TYPE and I-TYPE."""
    names = read_if_any(folder / "config.json").get("id2label")
    if not isinstance(names, dict):
        return False
    return bool(names) and all(re.fullmatch(r"O|[BI]-.+", str(name)) for name in names.values())


def results_section(metrics: Metrics) -> str:
    """A table with a row for each metric and a column for each split; "" if there are no metrics."""
    names = dict.fromkeys(name for own in metrics.values() for name in own)
    if not names:
        return ""
    rows = [[name, *(own.get(name, "") for own in metrics.values())] for name in names]
    return "## Results\n\n" + table(["metric", *metrics], rows)


def table(header: list[str], rows: Iterable[Sequence]) -> str:
    """A Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "".join(f"| {' | '.join(map(cell, line))} |\n" for line in lines)


def cell(value) -> str:
    if value is None:
        return "undefined"
    text = str(value)
    if isinstance(value, float):
        text = f"{value:,.1f}" if 1000 <= abs(value) < 1e9 else f"{value:.4g}"
    return " ".join(text.split()).replace("|", "\\|").replace("*", "\\*")


def public(settings: Mapping) -> dict:
    """The settings that were given and are not secret, without paths; the name of a nested one has a dot."""
    found = {}
    for name, value in settings.items():
        words = re.findall("[A-Z]?[a-z]+|[A-Z]+", str(name))
        if value is None or SECRET_WORDS & {word.lower() for word in words}:
            continue
        if isinstance(value, Mapping):
            found |= {f"{name}.{inner}": entry for inner, entry in public(value).items()}
        elif not SECRET_VALUE.search(str(value)):
            found[str(name)] = shown(value, is_file=name in FILES, is_source=name in FOLDERS_OR_HUB_IDS)
    return found


def shown(value, is_file: bool = False, is_source: bool = False):
    """`value`; of a path, the last part; a list as its values with commas.

    Args:
        is_file: whether it is known to be a path.
        is_source: whether it is known to be a path or a hub id.
    """
    if isinstance(value, (list, tuple)):
        return listed([str(shown(entry, is_file, is_source)) for entry in value])
    if isinstance(value, Mapping):
        return shown([f"{name}: {entry}" for name, entry in public(value).items()])
    if isinstance(value, (str, Path)):
        text = str(value)
        parts = re.split(r"[/\\]+", text.rstrip("/\\"))
        is_path = (
            is_file
            or isinstance(value, Path)
            or (is_source and not is_hub_id(text))
            or PureWindowsPath(text).root
            or text.startswith(("~", "file:", "./", "../"))
            or (len(parts) > 1 and os.path.exists(text))
        )
        is_url = "://" in text and not text.startswith("file:")
        return (parts[-1] or text) if is_path and not is_url else text
    return value


def listed(values: Sequence[str]) -> str:
    """The values with commas, up to `MOST_LISTED`."""
    more = f", and {len(values) - MOST_LISTED} more" if len(values) > MOST_LISTED else ""
    return ", ".join(values[:MOST_LISTED]) + more


def is_hub_id(source: str) -> bool:
    """Whether `source` can be a repository, and is no file or folder."""
    try:
        validate_repo_id(source)
    except ValueError:
        return False
    return not looks_like_a_path(source) and not os.path.exists(source)


# ------------------------------------------------------------------------------------------------- of a trained model


def write_training_card(
    folder: Path,
    *,
    task: str,
    model_class: str,
    base_model: str | None,
    dataset: str | Sequence[str],
    dataset_on_hub: bool,
    metrics: Metrics,
    settings: Mapping,
    history: History,
    rows: Mapping[str, int] | None = None,
    checkpoint: str = "",
    defaults: Mapping | None = None,
    name: str | None = None,
    language: str | Sequence[str] | None = None,
    licence: str | None = None,
) -> None:
    """Writes README.md, the card of a model that was trained here, with the metadata that the Hub reads. The names of
    labels, the settings of generation and the pictures are those in `folder`.

    Args:
        folder: exists already, with config.json.
        task: the Hub's name of it, such as "text-classification" or "summarization".
        model_class: the class that was saved, ours or its reference.
        base_model: the folder or hub id of the initial weights; None if they were random.
        dataset: the hub id of the training data, or its files.
        dataset_on_hub: which of the two.
        metrics: of the final evaluation, by split. Values that are not finite are in the table, as undefined, and not
            in the metadata.
        settings: the flags of the run. Those that are None, and those that change no weight, are omitted.
        rows: the number of rows of each split, such as "train".
        checkpoint: a sentence that says which step the weights are of, and why.
        defaults: of the settings. Settings that have their default are omitted.
        name: of the model; None: of the folder.
        language: an ISO 639 code, or several; None: as in the card of the base model.
        licence: the Hub's name of the licence, such as "apache-2.0"; None: as in the card of the base model.

    Raises:
        ValueError: no command trains a model of this class.
    """
    if short_name(model_class) not in EXAMPLES:
        raise ValueError(f"model_class is {model_class}; expected one of {', '.join(EXAMPLES)}")
    folder = Path(folder)
    name = name or folder.resolve().name
    dataset_on_hub = dataset_on_hub and is_hub_id(str(dataset))
    metrics, dataset = to_json(metrics), shown(dataset, is_file=not dataset_on_hub)
    inherited = metadata_of(base_model)
    base_on_hub = hub_id_of(base_model, inherited)
    data = ModelCardData(
        language=language or language_codes(inherited.get("language")),
        license=licence or inherited.get("license"),
        license_name=None if licence else inherited.get("license_name"),
        license_link=None if licence else inherited.get("license_link"),
        library_name="transformers",
        pipeline_tag=task,
        tags=["scratchbert"] if is_own(model_class) else None,
        base_model=base_on_hub,
        datasets=[dataset] if dataset_on_hub else None,
        model_name=name,
        eval_results=evaluation_results(task, dataset, metrics),
        # The Hub expects them in the model-index, under the model's name.
        metrics=main_metrics(dict.fromkeys(metric for _, metric, _ in numbers_in(metrics))) or None,
    )
    if data.eval_results is None:
        data.pop("model_name")
    parts = (
        introduction(name, model_class, base_model, base_on_hub, dataset, dataset_on_hub),
        labels_section(folder, model_class),
        results_section(metrics),
        generation_section(folder, model_class),
        picture(folder, "confusion_matrix.png", "Confusion matrix"),
        usage_section(name, model_class, folder),
        limits_section(folder, model_class, base_model, metrics, settings),
        training_section(settings, history, rows or {}, checkpoint, defaults),
        picture(folder, "curves.png", "Loss and metrics over the steps"),
    )
    write_text(folder / "README.md", f"---\n{data.to_yaml()}\n---\n\n" + "\n".join(part for part in parts if part))


def picture(folder: Path, name: str, description: str) -> str:
    """The picture `name`, if it is in the folder."""
    return f"![{description}]({name})\n" if (folder / name).exists() else ""


# Of the card of the base model.


def metadata_of(source: str | None) -> dict:
    """The metadata of the card of a folder, or of a repository whose card is in the cache; empty if there is none, or
    it cannot be read. Of a licence or a language in another form than the Hub's nothing is returned."""
    if source is None:
        return {}
    try:
        path = Path(source, "README.md") if Path(source).is_dir() else try_to_load_from_cache(source, "README.md")
        text = Path(path).read_text(encoding="utf-8") if isinstance(path, (str, Path)) else ""
        if not REGEX_YAML_BLOCK.search(text):
            return {}
        data = ModelCard(text, ignore_metadata_errors=True).data
    except (OSError, TypeError, ValueError, yaml.YAMLError):
        return {}
    # Not in `to_dict`, which has the name in the model-index.
    found = {"model_name": data.model_name, **data.to_dict()}
    if not isinstance(found.get("license"), str):
        found = {name: value for name, value in found.items() if not name.startswith("license")}
    if "://" not in str(found.get("license_link")):
        found.pop("license_link", None)  # a file of that repository
    return found


def hub_id_of(source: str | None, metadata: Mapping) -> str | None:
    """The hub id of a model: `source` itself or, of a folder, the one that the metadata of its card have."""
    if source is None or is_hub_id(source):
        return source
    name, base = metadata.get("model_name"), metadata.get("base_model")
    if isinstance(base, list) and len(base) == 1:
        base = base[0]
    # A name without a user is that of the folder.
    named = isinstance(name, str) and "/" in name
    return next((each for each in (name if named else None, base) if isinstance(each, str) and is_hub_id(each)), None)


def language_codes(language) -> str | list[str] | None:
    """The value of `language` in a card's metadata, with "no", the code of Norwegian, where YAML 1.1 reads false; None
    if it is no code."""
    codes = ["no" if code is False else code for code in (language if isinstance(language, list) else [language])]
    if not all(isinstance(code, str) for code in codes):
        return None
    return codes if isinstance(language, list) else codes[0]


# The metrics, and the sections.


def is_number(value) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def numbers_in(metrics: Metrics) -> list[tuple[str, str, float]]:
    """Split, name and value of the metrics that have a value."""
    return [(split, name, value) for split, own in metrics.items() for name, value in own.items() if is_number(value)]


def evaluation_results(task: str, dataset: str, metrics: Metrics) -> list[EvalResult] | None:
    """The numbers among the metrics, in the form of the Hub's model-index."""
    return [
        EvalResult(task_type=task, dataset_type=dataset, dataset_name=dataset, dataset_split=split,
                   metric_type=metric, metric_value=value)
        for split, metric, value in numbers_in(metrics)
    ] or None  # fmt: skip


def introduction(
    name: str, model_class: str, base_model: str | None, base_on_hub: str | None, dataset: str, dataset_on_hub: bool
) -> str:
    kind = "[BERT](https://arxiv.org/abs/1810.04805)"
    if is_own(model_class):
        kind = f"ScratchBert ({kind} written from scratch, with its code in this folder)"
    link = f"[{base_on_hub}](https://huggingface.co/{base_on_hub})"
    start = "random weights"
    if base_model is not None:
        start = f"the weights of {link if base_model == base_on_hub else f'`{shown(base_model, is_source=True)}`'}"
        if base_on_hub not in (None, base_model):
            start += f", which derives from {link}"
    data = f"[{dataset}](https://huggingface.co/datasets/{dataset})" if dataset_on_hub else f"`{dataset}`"
    return f"# {name}\n\nA {kind} of the class `{model_class}`, trained on {data} from {start}.\n"


def labels_section(folder: Path, model_class: str) -> str:
    """The names of the labels in config.json; "" if they are only numbered, or of another task."""
    config = read_if_any(folder / "config.json")
    names = config.get("id2label")
    if short_name(model_class) not in ("ForSequenceClassification", "ForTokenClassification"):
        return ""
    if not isinstance(names, dict) or all(re.fullmatch(r"LABEL_\d+", str(each)) for each in names.values()):
        return ""
    in_order = [" ".join(str(label).split()).replace("`", "'") for label in names.values()]
    what = "Outputs" if config.get("problem_type") == "regression" else "Labels"
    return f"{what}: {listed([f'`{label}`' for label in in_order])}\n"


def generation_section(folder: Path, model_class: str) -> str:
    """The settings of generation that are saved with the model, without special tokens."""
    if short_name(model_class) != "ForConditionalGeneration":
        return ""
    saved = read_if_any(folder / "generation_config.json")
    fields = [
        f"{name} {value}"
        for name, value in saved.items()
        if is_number(value) and not name.startswith("_") and not name.endswith("_id")
    ]
    if not fields:
        return ""
    return f"Texts are generated with the settings in `generation_config.json`: {listed(fields)}.\n"


def limits_section(folder: Path, model_class: str, base_model: str | None, metrics: Metrics, settings: Mapping) -> str:
    """What the model is for, and what is not known of it."""
    problem, splits = (
        read_if_any(folder / "config.json").get("problem_type"),
        [name for name in metrics if metrics[name]],
    )
    is_classifier = short_name(model_class) == "ForSequenceClassification"
    lines = [USES.get(problem if is_classifier else None) or USES[short_name(model_class)]]
    if max_length := settings.get("max_length"):
        lines.append(f"In training its inputs had up to {max_length:,} tokens.")
    lines.append(
        f"Its quality was measured on the {' and '.join(splits)} data only; for other domains and languages it is not "
        "known."
        if splits
        else "It was not evaluated."
    )
    if "validation" in splits:
        line = "The checkpoint was selected by the validation metrics, which are therefore optimistic."
        lines.append(line + (" The test data was not used to select it." if "test" in splits else ""))
    origin = "its training data" if base_model is None else "the base model and of its training data"
    lines.append(f"It can reproduce biases of {origin}, which were not examined.")
    return "## Intended use and limitations\n\n" + "".join(f"- {line}\n" for line in lines)


def training_section(
    settings: Mapping, history: History, rows: Mapping[str, int], checkpoint: str, defaults: Mapping | None
) -> str:
    """The rows, the length of the run, the machine, the versions and the settings."""
    lines = []
    if rows:
        lines.append("Rows: " + ", ".join(f"{count:,} {split}" for split, count in rows.items()))
    if history:
        last = history[-1]
        epochs = "" if last["epoch"] is None else f", {last['epoch']:.4g} epochs"
        lines.append(f"{last['step']:,} steps{epochs}")
    if checkpoint:
        lines.append(checkpoint)
    speeds = [point["tokens_per_second"] for point in history if point.get("tokens_per_second")]
    if speeds:
        lines.append(f"{statistics.median(speeds):,.0f} non-padding tokens per second (median over the run)")
    lines.append(hardware())
    versions = {library: version(library) for library in LIBRARIES}
    lines.append(", ".join(f"{library} {number}" for library, number in versions.items() if number))
    chosen = {
        name: value
        for name, value in settings.items()
        if name not in FREE_TO_CHANGE and (defaults is None or name not in defaults or value != defaults[name])
    }
    text = "## Training\n\n" + "".join(f"- {line}\n" for line in lines) + "\n"
    if defaults is not None:
        text += "Settings that differ from the defaults of the training command; `recipe.yaml` has all:\n\n"
    return text + table(["setting", "value"], public(chosen).items())


def read_if_any(path: Path) -> dict:
    return read_json_object(path) if path.exists() else {}


# ------------------------------------------------------------------------------------------ of a converted checkpoint


def conversion_card(
    text: str,
    *,
    to: str,
    title: str,
    model_class: str,
    origin: str,
    base_model: str | None,
    for_sentence_transformers: bool,
) -> tuple[str, list[str]]:
    """The card of a converted checkpoint: the source's metadata, a section on the conversion, and the source's text.

    Args:
        text: the source's card, or "".
        to: "scratchbert" or "bert".
        title: the model's name.
        model_class: our class that the weights were loaded into.
        origin: the source's name.
        base_model: the source's hub id, if it has one.
        for_sentence_transformers: whether sentence-transformers opens the result.

    Returns:
        The card, and remarks on it.
    """
    notes = []
    if not REGEX_YAML_BLOCK.search(text):
        text = "---\n\n---\n" + text
    try:
        card = RepoCard(text)
    except (TypeError, ValueError, yaml.YAMLError):
        notes.append("the metadata of README.md cannot be read as YAML; it is kept as text")
        card = RepoCard("---\n\n---\n" + text)
    update_metadata(card.data, to, TASKS.get(short_name(model_class)), base_model)
    before, _, rest = card.text.partition(f"\n{BEGIN}")
    body = before + rest.partition(f"{END}\n")[2]  # without the section of an earlier conversion
    section = conversion_section(to, title, model_class, origin, for_sentence_transformers)
    card.text = f"\n{BEGIN}\n{section}{END}\n{body}"
    return str(card), notes


def update_metadata(data, to: str, task: str | None, base_model: str | None) -> None:
    """Adds to a card's metadata what the Hub expects. The source's own entries stay."""
    tags = data.get("tags", [])
    tags = [tag for tag in ([tags] if isinstance(tags, str) else tags) if tag != "scratchbert"]
    data["tags"] = [*tags, "scratchbert"] if to == "scratchbert" else tags or None
    if (language := language_codes(data.get("language"))) is not None:
        data["language"] = language
    if base_model is not None:
        data["base_model"] = base_model
    for name, value in (("library_name", "transformers"), ("pipeline_tag", task)):
        if data.get(name) is None and value is not None:
            data[name] = value


def conversion_section(to: str, title: str, model_class: str, origin: str, for_sentence_transformers: bool) -> str:
    """What was converted, and how to open the result."""
    if to == "bert":
        what = f"A BERT checkpoint, converted from the ScratchBert `{origin}`: the same weights under BERT's names."
    else:
        what = (
            f"`{origin}` as a ScratchBert: [BERT](https://arxiv.org/abs/1810.04805) written from scratch, with its "
            f"code in this folder. The weights are the same, bit for bit, and it computes what "
            f"`{reference_class(model_class)}` computes, up to float32 rounding."
        )
    is_ours = to == "scratchbert"
    text = f"# {title}\n\n{what}\n\n{opening_code(title, auto_class(model_class), trust_remote_code=is_ours)}"
    if for_sentence_transformers:
        trust = ", trust_remote_code=True" if is_ours else ""
        text += f"""
```python
from sentence_transformers import SentenceTransformer

model = SentenceTransformer("{title}"{trust})
```
"""
    return text


# -------------------------------------------------------------------------------------------- of an uploaded folder


def published_card(folder: Path, repo: str, architecture: str, parity: Path | None) -> str:
    """The README.md of `folder` as it is uploaded: with the repository's name in the code that opens the model, and
    completed by metadata, results, code and the table of `parity`, a file that check_parity.py wrote with --json.

    Raises:
        OSError, ValueError: README.md, metrics.json or `parity` cannot be read.
    """
    path = folder / "README.md"
    try:
        text = path.read_text(encoding="utf-8") if path.exists() else f"\n# {repo.split('/')[1]}\n"
        data = ModelCard(text).data.to_dict()
    except (TypeError, ValueError, yaml.YAMLError) as error:
        raise ValueError(
            f"{path} has metadata that cannot be read, and that the Hub would not accept: {error}"
        ) from error
    expected = {
        "library_name": "transformers",
        "pipeline_tag": TASKS.get(short_name(architecture), "feature-extraction"),
        "tags": ["scratchbert"] if is_own(architecture) else None,
    }
    text = with_metadata(text, {name: value for name, value in expected.items() if value and not data.get(name)})
    text = with_repository(text, folder.resolve().name, repo)
    if "## Results" not in text and (metrics := saved_metrics(folder)):
        text += f"\n{results_section(metrics)}"
    if "from_pretrained(" not in text:
        text += f"\n{usage_section(repo, architecture, folder)}"
    if parity is not None:
        text += f"\n{parity_section(parity)}"
    return text


def with_metadata(text: str, missing: dict) -> str:
    """The card with these fields at the end of its metadata, and everything else unchanged."""
    if not missing:
        return text
    block = yaml.safe_dump(missing, sort_keys=False).rstrip()
    if found := REGEX_YAML_BLOCK.search(text):
        return f"{text[: found.end(2)]}\n{block}{text[found.end(2) :]}"
    return f"---\n{block}\n---\n{text}"


def with_repository(text: str, folder_name: str, repo: str) -> str:
    """The card with the repository's name in place of the folder's in the code that opens the model."""
    heading = re.search(r"^# (.+)$", text, re.MULTILINE)
    names = {folder_name, heading[1].strip() if heading else folder_name}
    opening = rf'((?:from_pretrained|SentenceTransformer)\(")(?:{"|".join(map(re.escape, names))})"'
    return re.sub(opening, lambda found: f'{found[1]}{repo}"', text)


def saved_metrics(folder: Path) -> dict[str, dict]:
    """The metrics of each split in metrics.json, if there is one."""
    report = read_if_any(folder / "metrics.json")
    return {split: report[split] for split in SPLITS if isinstance(report.get(split), dict)}


def parity_section(path: Path) -> str:
    """The table that check_parity.py wrote with --json. Of absolute paths only the last part is shown."""
    report = read_json(path)
    try:
        rows = [row for row in report["rows"] if row["kind"] != "gradient"]
        numbers = [
            (row["what"], "×".join(map(str, row["shape"])), row["max_abs"], row["own_error"],
             "equal" if row["equal"] else "DIFFERS")
            for row in rows
        ]  # fmt: skip
        lines = [f"- model: {report['model']}", f"- reference: {report['reference']}", f"- batch: {report['batch']}"]
        lines += [f"- not compared: {name}" for name in report["not_compared"]]
        verdict = report["verdict"]
    except (KeyError, TypeError) as error:
        raise ValueError(f"{path} was not written by check_parity.py --json: {error!r}") from error
    head = re.sub(r"(?<!\w)(~|[A-Za-z]:)?[/\\][^\s,;]*[/\\]", "", "\n".join(lines))
    header = ["what", "shape", "max abs", "float32 error of the reference", "verdict"]
    return f"## Parity\n\n{head}\n\n{table(header, numbers)}\n{verdict}\n"
