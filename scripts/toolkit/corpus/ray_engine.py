"""Parts on a Ray cluster: an actor runs what a process runs, `RemoteWorker.run`."""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import toolkit
from toolkit.cli import CommandError, require
from toolkit.corpus.devices import thread_variables
from toolkit.corpus.job import Job
from toolkit.corpus.local import PARTS_AT_ONCE, RETRIES, RemoteWorker, run_parts
from toolkit.corpus.sources import Part
from toolkit.trust import import_package

# How long a run waits for its first actor, and then for the others that the cluster has room for.
SECONDS_FOR_THE_FIRST, SECONDS_FOR_OTHERS = 300, 30


def run_on_ray(job: Job, parts: Iterator[Part], count: int | None, address: str | None, report: Callable) -> Iterator:
    """Computes the parts in actors, and yields what is done.

    Args:
        count: the number of actors; None: as many as the cluster has room for.
        address: of a running cluster; None: a new one on this machine.
        report: prints a remark.

    Raises:
        CommandError: ray is not installed, no actor starts, or an actor reports an error or was lost too often.
    """
    require("ray")
    import ray

    package = Path(import_package().__file__).parent
    library = Path(toolkit.__file__).parent
    environment = {"py_modules": [str(package), str(library)], "env_vars": thread_variables(job.threads)}
    local = {} if address else {"include_dashboard": False}
    ray.init(address=address or "local", runtime_env=environment, log_to_driver=False, logging_level="error", **local)
    try:
        actors = Actors(ray, absolute(job), count)
        actors.wait(report)
        yield from run_parts(actors.idle, actors.joining(parts))
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


class Actors:
    """The actors of a run, each with the processors and, on CUDA, the GPU that Ray assigns to it.

    Args:
        count: of actors; None: as many as there is room for now or, if there is none, as many as there will be.

    Attributes:
        starting: the actors that have no room yet, or open the model.
        idle: as `run_parts` expects it, of the other actors.
    """

    def __init__(self, ray, job: Job, count: int | None):
        self.ray, self.idle = ray, deque()
        self.needs = {"CPU": job.threads} | ({"GPU": 1} if job.device.startswith("cuda") else {})
        self.room = self.room_in(ray.available_resources())
        self.count = count or self.room or max(1, self.room_in(ray.cluster_resources()))
        actor_class = ray.remote(
            num_cpus=job.threads,
            num_gpus=self.needs.get("GPU", 0),
            max_restarts=RETRIES,
            max_task_retries=RETRIES,
            max_concurrency=PARTS_AT_ONCE,
        )(RemoteWorker)
        self.starting = {actor.check.remote(): actor for actor in [actor_class.remote(job) for _ in range(self.count)]}

    def room_in(self, resources: dict) -> int:
        """The number of actors for which these resources suffice."""
        return int(min(resources.get(name, 0) // amount for name, amount in self.needs.items()))

    def wait(self, report: Callable) -> None:
        """Waits for the actors that there is room for. Raises CommandError if there is none in time."""
        needs = " and ".join(f"{amount} {name}" for name, amount in self.needs.items())
        if not self.room:
            report(
                f"the cluster has no room for an actor, which needs {needs}; waiting {SECONDS_FOR_THE_FIRST} s for it"
            )
        self.admit(1, SECONDS_FOR_THE_FIRST)
        if not self.idle:
            raise CommandError(
                f"no actor has started in {SECONDS_FOR_THE_FIRST} s; each needs {needs}. End other work "
                "on the cluster, or give fewer --threads_per_process"
            )
        self.admit(min(self.room, self.count) - 1, SECONDS_FOR_OTHERS)
        if self.starting:
            started = self.count - len(self.starting)
            report(f"{started} of {self.count} actors have started; the others join when the cluster has room for them")

    def admit(self, count: int, seconds: float) -> None:
        """Waits for so many actors to open the model, and makes them idle. Raises their errors."""
        if count > 0:
            ready, _ = self.ray.wait(list(self.starting), num_returns=count, timeout=seconds)
            for check in ready:
                self.result(check)
            self.idle.extend([partial(self.run, self.starting.pop(check)) for check in ready] * PARTS_AT_ONCE)

    def joining(self, parts: Iterator[Part]) -> Iterator[Part]:
        """The parts. Before each, actors that have started since become idle."""
        for part in parts:
            self.admit(len(self.starting), 0)
            yield part

    def run(self, actor, part: Part):
        """What is done, by an actor."""
        return self.result(actor.run.remote(part))

    def result(self, reference):
        """What a method of an actor returns or raises."""
        try:
            return self.ray.get(reference)
        except self.ray.exceptions.RayTaskError as error:
            raise error.cause from None
