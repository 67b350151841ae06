"""What a task is, once: its arguments, columns, encoding, loss, metrics and predictions. One module for each task.

This file and `arguments` import neither torch nor transformers' models, so that `--help` answers at once.
"""

import pkgutil

from toolkit.tasks import arguments

# From the name of a task on the command line to its arguments, and to its module and class.
ARGUMENTS: dict[str, type[arguments.TaskArguments]] = {
    "classification": arguments.ClassificationArguments,
    "tagging": arguments.TaggingArguments,
    "question-answering": arguments.QuestionAnsweringArguments,
    "seq2seq": arguments.Seq2SeqArguments,
    "masked-lm": arguments.MaskedLMArguments,
}
CLASSES = {
    "classification": "classification:Classification",
    "tagging": "tagging:Tagging",
    "question-answering": "question_answering:QuestionAnswering",
    "seq2seq": "seq2seq:Seq2Seq",
    "masked-lm": "masked_lm:MaskedLM",
}


def task_class(name: str) -> type:
    """The class of a task. Imports torch."""
    return pkgutil.resolve_name(f"toolkit.tasks.{CLASSES[name]}")
