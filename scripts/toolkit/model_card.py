"""Model cards: of a trained model, of a converted checkpoint, and of a folder that is uploaded to the Hub.

A card contains no secrets and no absolute paths: settings that look like a secret are omitted, and of a path that
begins at the root of a disk or in a home folder only the last part is shown.
"""

import os
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path, PureWindowsPath

import yaml
from huggingface_hub import EvalResult, ModelCard, ModelCardData, RepoCard
from huggingface_hub.repocard import REGEX_YAML_BLOCK

from toolkit.checkpoint import AUTO_MAP, class_name, reference_class, short_name
from toolkit.files import read_json, read_json_object, to_json, write_text
from toolkit.machine import hardware, version

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
tag = pipeline("token-classification", model=model, tokenizer=tokenizer, aggregation_strategy="first")
print(tag("A text with names in it."))
""",
    "ForQuestionAnswering": """\
inputs = tokenizer("A question?", "A text that answers it.", return_tensors="pt")
outputs = model(**inputs)
start, end = outputs.start_logits.argmax(), outputs.end_logits.argmax()
print(tokenizer.decode(inputs["input_ids"][0, start : end + 1]))
""",
    "ForConditionalGeneration": """\
inputs = tokenizer("A text.", return_tensors="pt")
ids = model.generate(**inputs, num_beams=4)
print(tokenizer.batch_decode(ids, skip_special_tokens=True))
""",
    "ForMaskedLM": """\
fill = pipeline("fill-mask", model=model, tokenizer=tokenizer)
print(fill(f"A {tokenizer.mask_token} text."))
""",
}
# A model with both pre-training heads opens by its masked-LM head as well.
EXAMPLES["ForPreTraining"] = EXAMPLES["ForMaskedLM"]

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


def usage_section(name: str, model_class: str) -> str:
    """Code that opens the model by its folder or repository and, if its class has an example, uses it."""
    short = short_name(model_class)
    example = EXAMPLES.get(short, "")
    auto = auto_class("ScratchBertForMaskedLM" if short == "ForPreTraining" else model_class)
    return "## Use\n\n" + opening_code(name, auto, trust_remote_code=is_own(model_class), example=example)


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
    """The settings that were given and are not secret; the name of a nested one has a dot."""
    found = {}
    for name, value in settings.items():
        words = re.findall("[A-Z]?[a-z]+|[A-Z]+", str(name))
        if value is None or SECRET_WORDS & {word.lower() for word in words}:
            continue
        if isinstance(value, Mapping):
            found |= {f"{name}.{inner}": entry for inner, entry in public(value).items()}
        elif not SECRET_VALUE.search(str(value)):
            found[str(name)] = shown(value)
    return found


def shown(value):
    """`value`; of an absolute path, or one in a home folder, the last part; a list as its values with commas."""
    if isinstance(value, (list, tuple)):
        return ", ".join(str(shown(entry)) for entry in value)
    if isinstance(value, Mapping):
        return shown([f"{name}: {entry}" for name, entry in public(value).items()])
    if isinstance(value, (str, Path)):
        path = PureWindowsPath(value)  # which recognises both kinds of slash
        return path.name if path.root or str(value).startswith(("~", "file:")) else str(value)
    return value


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
    name: str | None = None,
    language: str | None = None,
    licence: str | None = None,
) -> None:
    """Writes README.md, the card of a model that was trained here, with the metadata that the Hub reads. The curves are
    shown if curves.png is in `folder`.

    Args:
        folder: exists already.
        task: the Hub's name of it, such as "text-classification" or "summarization".
        model_class: the class that was saved, ours or its reference.
        base_model: the folder or hub id of the initial weights; None if they were random.
        dataset: the hub id of the training data, or its files.
        dataset_on_hub: which of the two.
        metrics: of the final evaluation, by split. Values that are not finite are in the table, as undefined, and not
            in the metadata.
        settings: the flags of the run. Those that are None are omitted.
        name: of the model; None: of the folder.
        language: an ISO 639 code.
        licence: the Hub's name of the licence, such as "apache-2.0".

    Raises:
        ValueError: no command trains a model of this class.
    """
    if short_name(model_class) not in EXAMPLES:
        raise ValueError(f"model_class is {model_class}; expected one of {', '.join(EXAMPLES)}")
    folder = Path(folder)
    name = name or folder.resolve().name
    metrics, dataset = to_json(metrics), shown(dataset)
    on_hub = base_model is not None and not os.path.exists(base_model) and shown(base_model) == base_model
    data = ModelCardData(
        language=language,
        license=licence,
        library_name="transformers",
        pipeline_tag=task,
        tags=["scratchbert"] if is_own(model_class) else None,
        base_model=base_model if on_hub else None,
        datasets=[dataset] if dataset_on_hub else None,
        model_name=name,
        eval_results=evaluation_results(task, dataset, metrics),
        # The Hub expects them in the model-index, under the model's name.
        metrics=list(dict.fromkeys(metric for _, metric, _ in numbers_in(metrics))) or None,
    )
    if data.eval_results is None:
        data.pop("model_name")
    parts = (
        introduction(name, model_class, base_model, on_hub, dataset),
        results_section(metrics),
        usage_section(name, model_class),
        training_section(settings, history),
        "![Loss and metrics over the steps](curves.png)\n" if (folder / "curves.png").exists() else "",
    )
    write_text(folder / "README.md", f"---\n{data.to_yaml()}\n---\n\n" + "\n".join(part for part in parts if part))


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


def introduction(name: str, model_class: str, base_model: str | None, on_hub: bool, dataset: str) -> str:
    kind = "[BERT](https://arxiv.org/abs/1810.04805)"
    if is_own(model_class):
        kind = f"ScratchBert ({kind} written from scratch, with its code in this folder)"
    if base_model is None:
        start = "random weights"
    else:
        base = shown(base_model)
        start = f"the weights of {f'[{base}](https://huggingface.co/{base})' if on_hub else f'`{base}`'}"
    return f"# {name}\n\nA {kind} of the class `{model_class}`, trained on `{dataset}` from {start}.\n"


def training_section(settings: Mapping, history: History) -> str:
    """The length of the run, the machine, the versions and the settings."""
    lines = []
    if history:
        last = history[-1]
        lines.append(f"- {last['step']:,} steps, {last['epoch']:.4g} epochs")
    speeds = [point["tokens_per_second"] for point in history if point.get("tokens_per_second")]
    if speeds:
        lines.append(f"- {statistics.median(speeds):,.0f} non-padding tokens per second (median over the run)")
    lines.append(f"- {hardware()}")
    versions = {library: version(library) for library in LIBRARIES}
    lines.append("- " + ", ".join(f"{library} {number}" for library, number in versions.items() if number))
    return "## Training\n\n" + "\n".join(lines) + "\n\n" + table(["setting", "value"], public(settings).items())


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
    language = data.get("language", [])
    if language is False or (isinstance(language, list) and False in language):
        # YAML 1.1 reads the code of Norwegian, "no", as false.
        data["language"] = "no" if language is False else ["no" if code is False else code for code in language]
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
        text += f"\n{usage_section(repo, architecture)}"
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
    path = folder / "metrics.json"
    report = read_json_object(path) if path.exists() else {}
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
