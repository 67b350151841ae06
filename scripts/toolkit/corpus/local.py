"""Parts on this machine: in this process, or in several of the standard library's."""

import multiprocessing
import multiprocessing.util
import os
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing.managers import BaseManager

from toolkit.cli import CommandError, is_expected, missing_library, one_line
from toolkit.corpus.job import Job
from toolkit.corpus.sources import Part

# Parts that a worker has at once: while one is computed, the next is tokenised, or the one before it is written.
PARTS_AT_ONCE = 2


def run_parts(workers: Sequence[Callable], parts: Iterator[Part]) -> Iterator:
    """Computes the parts with several workers, and yields what is done. After an error, of the input too, the parts in
    work are finished.

    Args:
        workers: the method `run` of each.
    """
    idle = deque([*workers] * PARTS_AT_ONCE)
    in_work: dict[Future, Callable] = {}
    pool = ThreadPoolExecutor(len(idle))
    try:
        for part in parts:
            run = idle.popleft()
            in_work[pool.submit(run, part)] = run
            if not idle:
                yield from finished(in_work, idle)
        while in_work:
            yield from finished(in_work, idle)
    except Exception:
        wait(in_work)
        raise
    finally:
        pool.shutdown(wait=False)  # the second Ctrl-C does not wait for the parts in work


def finished(in_work: dict[Future, Callable], idle: deque[Callable]) -> Iterator:
    """Waits for a part, and yields what is done. Its worker is idle then."""
    done, _ = wait(in_work, return_when=FIRST_COMPLETED)
    for future in done:
        idle.append(in_work.pop(future))
        yield future.result()


# --------------------------------------------------------------------------------------------------- several processes


class RemoteWorker:
    """A `Worker` for another process. Only errors of its methods reach this one, so `check` raises those of opening the
    model."""

    def __init__(self, job: Job):
        from toolkit.hub import silence_libraries

        silence_libraries()
        from toolkit.corpus.worker import Worker

        self.error: Exception | None = None
        try:
            with portable_errors():
                self.worker = Worker(job)
        except Exception as error:
            self.error = error

    def check(self) -> None:
        """Raises CommandError or RuntimeError if the model cannot be used."""
        if self.error is not None:
            raise self.error

    def run(self, part: Part):
        """What is done. Raises CommandError or RuntimeError."""
        with portable_errors():
            return self.worker.run(part)


@contextmanager
def portable_errors() -> Iterator[None]:
    """Turns errors into those that another process can read: expected ones in one line, others with their traceback."""
    try:
        yield
    except CommandError:
        raise
    except Exception as error:
        if is_expected(error, (RuntimeError,)):
            raise CommandError(missing_library(error) or one_line(error)) from None
        raise RuntimeError("".join(traceback.format_exception(error))) from None


class WorkerProcess(BaseManager):
    """A process with a `RemoteWorker`, whose methods run in a thread for each call."""

    def open(self, job: Job) -> None:
        self.worker = self.call(self.RemoteWorker, job)
        self.call(self.worker.check)

    def run(self, part: Part):
        return self.call(self.worker.run, part)

    def call(self, method: Callable, *args):
        """What a method of the process returns. Raises CommandError if the process has ended."""
        try:
            return method(*args)
        except (EOFError, ConnectionError):
            raise CommandError(
                "a process has ended, perhaps for lack of memory; --resume computes the other parts"
            ) from None


WorkerProcess.register("RemoteWorker", RemoteWorker)


def run_in_processes(job: Job, parts: Iterator[Part], devices: list[str]) -> Iterator:
    """Computes the parts in a process for each device, and yields what is done.

    Raises:
        CommandError: a process reports an error, or has ended.
    """
    multiprocessing.util.get_temp_dir()  # of the sockets: this process removes it, because the others are killed
    context = multiprocessing.get_context("spawn")
    # At the end nothing is in work: by default, a second is spent on waiting for each process.
    processes = [WorkerProcess(ctx=context, shutdown_timeout=0) for _ in devices]
    jobs = [replace(job, device=device) for device in devices]
    with ThreadPoolExecutor(len(devices)) as pool:
        list(pool.map(lambda process: process.start(prepare, (job.threads,)), processes))
        try:
            list(pool.map(WorkerProcess.open, processes, jobs))  # all models are open before the first part
            yield from run_parts([process.run for process in processes], parts)
        finally:
            list(pool.map(lambda process: process.shutdown(), processes))


def prepare(threads: int) -> None:
    """Sets the threads of the libraries in this process, before they are imported, and lets it end with the main one,
    however that ends."""
    os.environ |= {"OMP_NUM_THREADS": str(threads), "RAYON_NUM_THREADS": str(threads)}
    threading.Thread(target=end_with_parent, daemon=True).start()


def end_with_parent() -> None:
    multiprocessing.parent_process().join()
    os._exit(0)  # what is in work has no one to report to
