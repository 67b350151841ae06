"""The settings of a short training with `Trainer`."""

from transformers import TrainingArguments


def sgd_settings(folder, **changes) -> TrainingArguments:
    """One step of plain SGD on the CPU, without reports or checkpoints; `changes` are other `TrainingArguments`."""
    settings = {
        "max_steps": 1,
        "optim": "sgd",
        "max_grad_norm": 0.0,
        "use_cpu": True,
        "report_to": [],
        "disable_tqdm": True,
        "save_strategy": "no",
    }
    return TrainingArguments(str(folder), **{**settings, **changes})
