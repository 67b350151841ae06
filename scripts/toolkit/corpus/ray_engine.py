"""Parts on a Ray cluster: an actor runs what a process runs, `Worker.run`."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import toolkit
from toolkit.cli import CommandError, require
from toolkit.corpus.job import Job
from toolkit.corpus.local import PARTS_AT_ONCE, RemoteWorker, run_parts
from toolkit.corpus.sources import Part
from toolkit.remote_code import import_package

# How often a part whose actor was lost is computed again, and a lost actor is started again.
RETRIES = 5


def run_on_ray(job: Job, parts: Iterator[Part], processes: int | None, address: str | None) -> Iterator:
    """Computes the parts in actors, and yields what is done.

    Args:
        processes: the number of actors; None: as many as the cluster has processors for.
        address: of a running cluster; None: a new one on this machine.

    Raises:
        CommandError: ray is not installed, or an actor reports an error or was lost too often.
    """
    require("ray")
    import ray

    package = Path(import_package().__file__).parent
    library = Path(toolkit.__file__).parent
    environment = {
        "py_modules": [str(package), str(library)],
        "env_vars": {"OMP_NUM_THREADS": str(job.threads), "RAYON_NUM_THREADS": str(job.threads)},
    }
    local = {} if address else {"include_dashboard": False}
    ray.init(address=address or "local", runtime_env=environment, log_to_driver=False, logging_level="error", **local)
    try:
        count = processes or max(1, int(ray.cluster_resources().get("CPU", 1)) // job.threads)
        yield from run_parts(open_actors(ray, absolute(job), count), parts)
    except (ray.exceptions.RayActorError, ray.exceptions.RaySystemError) as error:
        raise CommandError(f"an actor was lost more than {RETRIES} times: {error}") from error
    finally:
        ray.shutdown()


def absolute(job: Job) -> Job:
    """The job with absolute paths: an actor has another working directory."""
    paths = {
        name: str(path.absolute())
        for name in ("model", "output")
        if "://" not in (value := getattr(job, name)) and (path := Path(value)).is_dir()
    }
    return replace(job, **paths)


def open_actors(ray, job: Job, count: int) -> list[Callable]:
    """The functions that compute a part in one of `count` actors, whose models are open."""

    def get(reference):
        try:
            return ray.get(reference)
        except ray.exceptions.RayTaskError as error:
            raise error.cause from None

    actor_class = ray.remote(
        num_cpus=job.threads, max_restarts=RETRIES, max_task_retries=RETRIES, max_concurrency=PARTS_AT_ONCE
    )(RemoteWorker)
    actors = [actor_class.remote(job) for _ in range(count)]
    for checked in [actor.check.remote() for actor in actors]:
        get(checked)
    return [lambda part, actor=actor: get(actor.run.remote(part)) for actor in actors]
