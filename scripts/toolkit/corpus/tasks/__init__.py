"""What a model is applied for."""

from toolkit.corpus.job import Job
from toolkit.corpus.tasks.base import Task
from toolkit.corpus.tasks.classify import Classify, Rerank
from toolkit.corpus.tasks.embed import Embed
from toolkit.corpus.tasks.fill_mask import FillMask
from toolkit.corpus.tasks.tag import Tag

CLASSES: dict[str, type[Task]] = {
    "embed": Embed,
    "classify": Classify,
    "tag": Tag,
    "rerank": Rerank,
    "fill-mask": FillMask,
}


def open_task(job: Job) -> Task:
    """The task of a job, with its model. Raises OSError or ValueError if the model cannot be used for it."""
    return CLASSES[job.task](job)
