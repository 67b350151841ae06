"""Parts on a Ray cluster: an actor runs what a process runs, `Worker.run`."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import toolkit
from toolkit.cli import CommandError, require
from toolkit.corpus.job import Job
from toolkit.corpus.local import described
from toolkit.corpus.sources import Part
from toolkit.remote_code import import_package

# How often a part whose actor was lost is computed again, and a lost actor is started again.
RETRIES = 5
SECONDS_TO_START = 600


class RemoteWorker:
    """A `Worker` that returns errors instead of raising them: Ray would wrap those that it raises."""

    def __init__(self, job: Job):
        from toolkit.corpus.worker import Worker
        from toolkit.hub import silence_libraries

        silence_libraries()
        self.error, self.worker = None, None
        try:
            self.worker = Worker(job)
        except Exception as error:
            self.error = described(error)

    def opened(self) -> tuple:
        """None, or why the model cannot be used."""
        return None, self.error

    def run(self, part: Part) -> tuple:
        """What is done, or an error as `described` has it."""
        try:
            return self.worker.run(part), None
        except Exception as error:
            return None, described(error)


def run_on_ray(job: Job, parts: Iterator[Part], processes: int | None, address: str | None) -> Iterator:
    """Computes the parts in actors, and yields what is done. After an error, the parts in work are finished.

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
        yield from run_in_actors(ray, absolute(job), parts, count)
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


def run_in_actors(ray, job: Job, parts: Iterator[Part], count: int) -> Iterator:
    """Computes the parts in `count` actors. Each has at most `PARTS_AT_ONCE` parts, so that the reader waits for
    them."""
    from toolkit.corpus.worker import PARTS_AT_ONCE

    actor_class = ray.remote(
        num_cpus=job.threads, max_restarts=RETRIES, max_task_retries=RETRIES, max_concurrency=PARTS_AT_ONCE
    )(RemoteWorker)
    actors = [actor_class.remote(job) for _ in range(count)]
    failures = [failure for _, failure in ray.get([actor.opened.remote() for actor in actors])]
    in_work, error = {}, next(filter(None, failures), None)
    while True:
        while error is None and len(in_work) < PARTS_AT_ONCE * count and (part := next(parts, None)) is not None:
            owners = list(in_work.values())
            idlest = min(actors, key=owners.count)
            in_work[idlest.run.remote(part)] = idlest
        if not in_work:
            break
        finished, _ = ray.wait(list(in_work))
        for reference in finished:
            del in_work[reference]
            done, failure = ray.get(reference)
            error = error or failure
            if done is not None:
                yield done
    if error is not None:
        kind, message = error
        raise CommandError(message) if kind == "expected" else RuntimeError(message)
