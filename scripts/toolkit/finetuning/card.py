"""The model card of a finished run. It contains no secrets, and of a path only the last part."""

import re
import statistics
from dataclasses import asdict
from pathlib import Path

import yaml
from huggingface_hub import EvalResult, ModelCardData, metadata_load, try_to_load_from_cache

from toolkit.files import to_json
from toolkit.finetuning.checkpoints import Progress
from toolkit.finetuning.recipes import FREE_TO_CHANGE
from toolkit.finetuning.report import checkpoint_in_words
from toolkit.finetuning.settings import Settings, defaults_of
from toolkit.finetuning.task import Task
from toolkit.machine import hardware, version
from toolkit.metrics import main_metrics
from toolkit.model_card import Metrics, is_own, language_codes, listed, read_if_any, render, results_table, table, use
from toolkit.paths import is_hub_id, public_path, with_paths
from toolkit.publish import SECRET_TEXT

# A setting is private if its name has one of these words.
SECRET_WORDS = {"token", "secret", "password", "credentials", "key", "auth"}

LIBRARIES = ("torch", "transformers", "accelerate", "datasets", "tokenizers", "peft")


def write_card(folder: Path, task: Task, progress: Progress, metrics: Metrics, *, model_class: str, name: str) -> None:
    """Writes README.md, with the metadata that the Hub reads.

    Args:
        folder: of the finished run. The names of labels, the settings of generation and the pictures are those there.
        metrics: of the final evaluation, by split. Values that are not finite are in the table, as undefined, and not
            in the metadata.
        model_class: the class that was saved, ours or its reference.
        name: of the model.
    """
    settings, metrics, config = task.settings, to_json(metrics), read_if_any(folder / "config.json")
    problem = config.get("problem_type") if task.name == "text-classification" else None  # else of an earlier task
    has_labels = task.name in ("text-classification", "token-classification")
    trained_on = dataset_of(settings, "train")["dataset_name"]
    results = [
        EvalResult(task_type=task.name, metric_type=metric, metric_value=value, **dataset_of(settings, split))
        for split, own in metrics.items()
        for metric, value in own.items()
        if value is not None
    ]
    data = ModelCardData(
        **base_metadata(settings.model),
        library_name="transformers",
        pipeline_tag=task.name,
        tags=["scratchbert"] if is_own(model_class) else None,
        datasets=[trained_on] if settings.dataset and is_hub_id(settings.dataset) else None,
        model_name=name if results else None,
        eval_results=results or None,
        # The Hub expects them in the model-index, under the model's name.
        metrics=main_metrics(dict.fromkeys(result.metric_type for result in results)) or None,
    )
    speeds = [point["tokens_per_second"] for point in progress.history if point.get("tokens_per_second")]
    versions = {library: version(library) for library in LIBRARIES}
    card = render(
        data,
        title=name,
        own=is_own(model_class),
        model_class=model_class,
        trained_on=trained_on,
        initial=settings.model and public_path(settings.model, is_file=False),
        labels=label_names(config) if has_labels else "",
        problem=problem,
        results=results_table(metrics),
        generation=generation_settings(folder) if task.name == "text2text-generation" else "",
        confusion_matrix=(folder / "confusion_matrix.png").exists(),
        curves=(folder / "curves.png").exists(),
        use=use(name, model_class, config),
        max_length=settings.max_length,
        evaluated=[split for split in metrics if metrics[split]],
        rows=task.row_counts,
        last=progress.history[-1] if progress.history else None,
        checkpoint=checkpoint_in_words(progress, task.metric),
        speed=statistics.median(speeds) if speeds else None,
        hardware=hardware(),
        versions=", ".join(f"{library} {number}" for library, number in versions.items() if number),
        settings=table(["setting", "value"], public_settings(settings).items()),
    )
    card.save(folder / "README.md")


def dataset_of(settings: Settings, split: str) -> dict[str, str | None]:
    """The data of "train", "validation" or "test", in the fields of `EvalResult`."""
    held_out = split == "validation" and settings.validation_fraction is not None
    part = f"{settings.validation_fraction:g} of train" if held_out else split
    if settings.dataset is None:
        given = settings.train_file if held_out else getattr(settings, f"{split}_file")
        files = listed([public_path(file, is_file=True) for file in given])
        return {"dataset_type": files, "dataset_name": files, "dataset_split": part}
    name, part = public_path(settings.dataset, is_file=False), part if held_out else getattr(settings, f"{split}_split")
    names = {"dataset_type": name, "dataset_name": name}
    return {**names, "dataset_config": settings.dataset_config, "dataset_split": part}


def base_metadata(source: str | None) -> dict:
    """The hub id, the licence and the language of the model that the training starts from, as the card of its folder,
    or in the cache, has them. What the Hub would not accept is omitted."""
    if source is None:
        return {}
    on_hub = is_hub_id(source)
    try:
        path = try_to_load_from_cache(source, "README.md") if on_hub else Path(source, "README.md")
        found = metadata_load(path) or {}
    except (OSError, TypeError, ValueError, yaml.YAMLError):  # there is none, or it cannot be read
        found = {}
    base = source if on_hub else found.get("base_model")
    if isinstance(base, list) and len(base) == 1:
        base = base[0]
    fields = {"language": language_codes(found.get("language"))}
    if isinstance(base, str) and is_hub_id(base):
        fields["base_model"] = base
    if isinstance(found.get("license"), str):
        fields |= {name: found.get(name) for name in ("license", "license_name", "license_link")}
        if "://" not in str(fields["license_link"]):  # a file of that repository
            fields["license_link"] = None
    return fields


def label_names(config: dict) -> str:
    """The names of the labels in config.json; "" if they are only numbered."""
    names = [" ".join(str(label).split()).replace("`", "'") for label in (config.get("id2label") or {}).values()]
    if all(re.fullmatch(r"LABEL_\d+", name) for name in names):
        return ""
    return listed([f"`{name}`" for name in names])


def generation_settings(folder: Path) -> str:
    """The settings of generation that are saved with the model, without special tokens."""
    saved = read_if_any(folder / "generation_config.json").items()
    return listed(
        [f"{name} {value}" for name, value in saved if type(value) in (int, float) and not name.endswith("_id")]
    )


def public_settings(settings: Settings) -> dict:
    """The flags that differ from their defaults and change the model, without secrets and without folders."""
    defaults = defaults_of(settings)
    return {
        name: value
        for name, value in with_paths(asdict(settings), public_path).items()
        if value not in (None, defaults[name])
        and name not in FREE_TO_CHANGE
        and not SECRET_WORDS.intersection(name.split("_"))
        and not SECRET_TEXT.search(str(value).encode())
    }
