"""What a training run leaves in the folder beside the model: metrics.json, curves.png and README.md, the model card.

A history is what happened at which step, in order. Points of the log have `step`, `epoch`, `loss`, `learning_rate` and
`tokens_per_second`; evaluations have `step`, `epoch` and `validation`, a dict from metric to value.
"""

import functools
import json
import math
import os
import re
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path, PureWindowsPath

import torch
from huggingface_hub import EvalResult, ModelCardData
from torch import distributed

from modeling_scratchbert.configuration_scratchbert import AUTO_MAP

from benchmark_machine import processor, version
from model_classes import class_name, short_name
from output import written

LIBRARIES = ("torch", "transformers", "accelerate", "datasets", "tokenizers", "peft")

# A setting's name with one of these words in it, or a value of this form, is nobody else's business.
SECRET_WORDS = {"token", "secret", "secrets", "password", "passwd", "credential", "credentials", "key", "auth"}
SECRET_VALUE = re.compile(r"\b(hf|sk|ghp|github_pat)[_-]\w{16,}|://[^/\s]+@")

# What the card shows a model of each class doing, with `tokenizer` and `model` open.
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

# From so many points of the log on, the curve of the loss is smoothed.
SMOOTHED = 25

Metrics = Mapping[str, Mapping[str, float | None]]  # of each split, such as "validation"
History = Sequence[Mapping]


# ------------------------------------------------------------------------------------------------------------- metrics


def write_metrics(folder: Path, metrics: Mapping) -> None:
    """Writes metrics.json, whole or not at all. JSON has no NaN and no infinity: a metric that is undefined is null.

    Args:
        folder: exists already.
        metrics: values that JSON has, or numbers of NumPy or torch; nested as it pleases.
    """
    text = json.dumps(plain(metrics), indent=2, allow_nan=False, ensure_ascii=False) + "\n"
    write_text(Path(folder) / "metrics.json", text)


def plain(value):
    """`value` in the types of JSON."""
    if isinstance(value, Mapping):
        return {str(name): plain(entry) for name, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(entry) for entry in value]
    if hasattr(value, "tolist"):  # an array, a tensor, or a number of theirs
        return plain(value.tolist())
    return value if not isinstance(value, float) or math.isfinite(value) else None


def write_text(path: Path, text: str) -> None:
    with written(path) as temporary:
        temporary.write_text(text, encoding="utf-8", newline="\n")


# ---------------------------------------------------------------------------------------------------------- model card


def write_card(
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
    """Writes README.md, the model card, with the metadata that the Hub reads. It is in English, and fits a reader who
    knows transformers. The curves are shown if curves.png lies in `folder` by then.

    No secret and no absolute path gets into it: settings that look like a secret are left out, and of a path that
    begins at the root of a disk, or in a home folder, the last part is shown.

    Args:
        folder: exists already.
        task: the Hub's name of it, such as "text-classification" or "summarization".
        model_class: the name of the class that was saved, ours or its twin.
        base_model: where the weights came from, a folder or a hub id, or None if they began at random.
        dataset: the hub id of what was trained on, or its files.
        dataset_on_hub: which of the two.
        metrics: of the final evaluation, by split. Those that are not finite are in the table, as undefined, and not
            in the metadata.
        settings: the flags of the run. Those that are None are left out.
        name: the model's; that of the folder, if it is not given.
        language: the ISO 639 code of the language.
        licence: the Hub's name of the licence, such as "apache-2.0".
    """
    folder = Path(folder)
    name = name or folder.resolve().name
    metrics, dataset = plain(metrics), shown(dataset)
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
        eval_results=results(task, dataset, metrics),
        # As the Hub wants it, they are in the model-index, under the model's name.
        metrics=list(dict.fromkeys(metric for _, metric, _ in numbers_in(metrics))) or None,
    )
    if data.eval_results is None:
        data.pop("model_name")
    parts = (
        what_it_is(name, model_class, base_model, on_hub, dataset),
        how_good(metrics),
        how_to_use(name, model_class),
        how_trained(settings, history),
        "![Loss and metrics over the steps](curves.png)\n" if (folder / "curves.png").exists() else "",
    )
    write_text(folder / "README.md", f"---\n{data.to_yaml()}\n---\n\n" + "\n".join(part for part in parts if part))


def is_own(model_class: str) -> bool:
    return model_class.startswith("ScratchBert")


def is_number(value) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def numbers_in(metrics: Metrics) -> list[tuple[str, str, float]]:
    """Split, name and value of the metrics that have one."""
    return [(split, name, value) for split, own in metrics.items() for name, value in own.items() if is_number(value)]


def results(task: str, dataset: str, metrics: Metrics) -> list[EvalResult] | None:
    """The numbers among the metrics, as the Hub's model-index has them."""
    return [
        EvalResult(task_type=task, dataset_type=dataset, dataset_name=dataset, dataset_split=split,
                   metric_type=metric, metric_value=value)
        for split, metric, value in numbers_in(metrics)
    ] or None  # fmt: skip


def what_it_is(name: str, model_class: str, base_model: str | None, on_hub: bool, dataset: str) -> str:
    kind = "[BERT](https://arxiv.org/abs/1810.04805)"
    if is_own(model_class):
        kind = f"ScratchBert ({kind} written from scratch, with its code in this folder)"
    if base_model is None:
        start = "It began at random weights"
    else:
        base = shown(base_model)
        start = f"It began at the weights of {f'[{base}](https://huggingface.co/{base})' if on_hub else f'`{base}`'}"
    return f"# {name}\n\nA {kind} of the class `{model_class}`. {start} and was trained on `{dataset}`.\n"


def how_good(metrics: Metrics) -> str:
    """A table with a row for each metric and a column for each split."""
    names = dict.fromkeys(name for own in metrics.values() for name in own)
    if not names:
        return ""
    rows = [[name, *(own.get(name, "") for own in metrics.values())] for name in names]
    return "## Results\n\n" + table(["metric", *metrics], rows)


def how_to_use(name: str, model_class: str) -> str:
    """Code that opens the model, from the folder above or, pushed, by the name of its repository.

    Raises:
        ValueError: no script trains a model of this class.
    """
    short = short_name(model_class)
    if short not in EXAMPLES:
        raise ValueError(f"model_class is {model_class}; the card knows how to use {', '.join(EXAMPLES)}")
    opens = class_name("ForMaskedLM" if short == "ForPreTraining" else short, "scratchbert")
    auto = next(auto for auto, path in AUTO_MAP.items() if path.endswith(f".{opens}"))
    trust = ", trust_remote_code=True" if is_own(model_class) else ""
    imports = f"{auto}, AutoTokenizer" + (", pipeline" if "pipeline(" in EXAMPLES[short] else "")
    return f"""\
## Use

```python
from transformers import {imports}

tokenizer = AutoTokenizer.from_pretrained("{name}"{trust})
model = {auto}.from_pretrained("{name}"{trust})
{EXAMPLES[short]}```
"""


def how_trained(settings: Mapping, history: History) -> str:
    """The extent of the run, the machine, the versions and the settings."""
    lines = []
    if history:
        last = history[-1]
        lines.append(f"- {last['step']:,} steps, {last['epoch']:.4g} epochs")
    speeds = [point["tokens_per_second"] for point in history if point.get("tokens_per_second")]
    if speeds:
        lines.append(f"- {statistics.median(speeds):,.0f} real tokens a second (the median over the run)")
    lines.append(f"- {hardware()}")
    versions = {library: version(library) for library in LIBRARIES}
    lines.append("- " + ", ".join(f"{library} {number}" for library, number in versions.items() if number))
    return "## Training\n\n" + "\n".join(lines) + "\n\n" + table(["setting", "value"], public(settings).items())


def hardware() -> str:
    """The name of the GPU, or else of the processor, and how many processes trained on such."""
    world = distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else 1
    if torch.cuda.is_available():
        return f"{torch.cuda.get_device_name()}, processes: {world}"
    return f"{processor()[0]}, processes: {world}, threads of each: {torch.get_num_threads()}"


def public(settings: Mapping) -> dict:
    """The settings that were made and may be shown, those within others under a name with a dot."""
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
    """`value`; of a path from a disk's root or a home folder the last part, and lists with commas."""
    if isinstance(value, (list, tuple)):
        return ", ".join(str(shown(entry)) for entry in value)
    if isinstance(value, Mapping):
        return shown([f"{name}: {entry}" for name, entry in public(value).items()])
    if isinstance(value, (str, Path)):
        path = PureWindowsPath(value)  # which knows both slashes
        return path.name if path.root or str(value).startswith(("~", "file:")) else str(value)
    return value


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
    return " ".join(text.split()).replace("|", "\\|")


# -------------------------------------------------------------------------------------------------------------- curves


def plot_curves(path: Path, history: History, metric_names: Sequence[str]) -> None:
    """Draws loss and learning rate over the steps, and beside them, where there are evaluations, each metric.

    Without matplotlib there is no picture, and a line on standard error says so, once.

    Args:
        path: of the PNG.
        metric_names: those of the evaluations to draw, in this order; "loss" goes to the training loss.
    """
    pyplot = open_pyplot()
    if pyplot is None:
        return
    evaluations = [(point["step"], plain(point["validation"])) for point in history if "validation" in point]
    log = [point for point in history if "loss" in point]
    drawn = [name for name in metric_names if name != "loss" and any(name in values for _, values in evaluations)]
    figure = pyplot.figure(figsize=(13 if drawn else 7, max(4.8, 1.8 * len(drawn))), layout="constrained")
    left, *right = figure.subfigures(1, 2 if drawn else 1, squeeze=False)[0]
    draw_training(left, log, evaluations)
    for panel in right:
        draw_metrics(panel, drawn, evaluations)
    last = max((point["step"] for point in history), default=1)
    for axis in figure.axes:
        axis.set_xlim(0, 1.04 * last)
        axis.xaxis.get_major_locator().set_params(integer=True)
        axis.grid(color="lightgrey", linewidth=0.5)
        axis.spines[["top", "right"]].set_visible(False)
    with written(Path(path)) as temporary:
        figure.savefig(temporary, dpi=120)
    pyplot.close(figure)


@functools.cache
def open_pyplot():
    """matplotlib.pyplot, or None where it is not installed."""
    try:
        import matplotlib  # an extra
    except ImportError:
        print("no curves: matplotlib is not installed (the extra `plot` brings it)", file=sys.stderr)
        return None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def draw_training(figure, log: History, evaluations: list) -> None:
    """The loss as logged, faint, the smoothed one and that of the evaluations; below them the learning rate."""
    loss, rate = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    steps, losses = [point["step"] for point in log], numbers(point["loss"] for point in log)
    if len(log) > SMOOTHED:
        loss.plot(steps, losses, color="tab:blue", alpha=0.3, linewidth=1, label="training")
        loss.plot(steps, smoothed(losses), color="tab:blue", linewidth=1.8, label="training, smoothed")
    elif log:
        loss.plot(steps, losses, ".-", color="tab:blue", linewidth=1.2, label="training")
    judged = [(step, values["loss"]) for step, values in evaluations if "loss" in values]
    if judged:
        loss.plot(*over_steps(judged), "o-", color="tab:orange", markersize=4, linewidth=1.2, label="validation")
    loss.set_ylabel("loss")
    if loss.lines:
        loss.legend(frameon=False, fontsize="small")
    rates = numbers(point.get("learning_rate") for point in log)
    rate.plot(steps, rates, "-" if len(log) > SMOOTHED else ".-", color="grey", linewidth=1.2)
    rate.set_ylim(bottom=0)
    rate.ticklabel_format(axis="y", style="sci", scilimits=(0, 0))
    rate.set_ylabel("learning rate")
    rate.set_xlabel("step")


def draw_metrics(figure, names: list[str], evaluations: list) -> None:
    """A strip for each metric, as a perplexity and an accuracy have no scale in common."""
    axes = figure.subplots(len(names), 1, sharex=True, squeeze=False)[:, 0]
    for axis, name in zip(axes, names, strict=True):
        points = [(step, values[name]) for step, values in evaluations if name in values]
        axis.plot(*over_steps(points), "o-", color="tab:green", markersize=4, linewidth=1.2)
        axis.set_title(name, loc="left", fontsize="medium")
        axis.margins(y=0.25)
        # The last one is what the card says, and is written out.
        step, value = points[-1]
        if value is not None:
            axis.annotate(cell(value), (step, value), (0, 5), textcoords="offset points", ha="right", fontsize="small")
    axes[-1].set_xlabel("step")


def over_steps(points: list[tuple[int, float | None]]) -> tuple[list[int], list[float]]:
    """What `plot` takes."""
    return [step for step, _ in points], numbers(value for _, value in points)


def numbers(values) -> list[float]:
    """As floats, NaN for None and for what has no place on an axis."""
    return [math.nan if value is None or not math.isfinite(value) else float(value) for value in values]


def smoothed(values: list[float]) -> list[float]:
    """The exponential moving average over about a 25th of the values, or over one where there are fewer, without a bias
    to its beginning (Kingma & Ba 2015, section 3). A NaN stays one, and does not reach those behind it."""
    keep = 1 - 1 / max(1, len(values) / SMOOTHED)
    mean = weight = 0.0
    smooth = []
    for value in values:
        if math.isfinite(value):
            mean, weight = keep * mean + (1 - keep) * value, keep * weight + (1 - keep)
        smooth.append(mean / weight if math.isfinite(value) else math.nan)
    return smooth
