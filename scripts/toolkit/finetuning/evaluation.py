"""--evaluate_only: the metrics and the predictions of a trained model."""

from pathlib import Path

from toolkit.files import write_json
from toolkit.finetuning.output import OutputFolder, moved_when_complete
from toolkit.finetuning.recipes import RECIPE
from toolkit.finetuning.report import in_words
from toolkit.finetuning.task import METRICS, Task


def evaluate(task: Task, output: OutputFolder) -> None:
    """Evaluates the model on the validation and the test set, if there are both, and writes the metrics, the
    predictions and the recipe."""
    settings, accelerator = task.settings, task.accelerator
    recipe = Path(settings.model, RECIPE)
    if recipe.is_file():
        accelerator.print(f"flags that say how rows are read, and were not given, are those of {recipe}")
    else:
        accelerator.print(f"{settings.model} has no {RECIPE}; flags that were not given have their defaults")
    model = accelerator.prepare_model(task.model, evaluation_mode=True)
    evaluations = {split: task.evaluate(model, split) for split in task.splits}
    if not accelerator.is_main_process:
        return
    output.prepare()
    with moved_when_complete(output.path, "the same command writes it") as folder:
        task.write_predictions(folder, {split: each.predictions for split, each in evaluations.items()})
        write_json(folder / METRICS, {split: each.metrics for split, each in evaluations.items()})
    output.write_recipe()
    for split, each in evaluations.items():
        print(f"{split}: {in_words(each.metrics)}")
    print(f"{output.path} has {METRICS} and the predictions")
