"""Parts on this machine: in this process, or in several."""

import multiprocessing
import os
import signal
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import replace

from toolkit.cli import CommandError, is_expected, missing_library, one_line
from toolkit.corpus.devices import thread_variables
from toolkit.corpus.job import Job
from toolkit.corpus.sources import Part

# Parts that a worker has at once: while one is computed, the next is tokenised, or the one before it is written.
PARTS_AT_ONCE = 2

# How often the dead processes of a run are replaced. On Ray: how often each actor is, and each part is computed again.
RETRIES = 5

SPAWN = multiprocessing.get_context("spawn")


def run_locally(job: Job, parts: Iterator[Part], devices: list[str]) -> Iterator:
    """Computes the parts in this process or, with several devices, in a process for each. Yields what is done.

    Raises:
        CommandError: the model cannot be used, a part cannot be computed, or processes have died too often.
    """
    if len(devices) == 1:
        from toolkit.corpus.worker import Worker

        yield from run_parts(deque([Worker(job).run] * PARTS_AT_ONCE), parts)
        return
    workers, deaths = [], []
    try:
        for device in devices:
            workers.append(LocalWorker(replace(job, device=device), deaths))
        for worker in workers:
            worker.run(None)  # all models are open before the first part
        yield from run_parts(deque([worker.run for worker in workers] * PARTS_AT_ONCE), parts)
    finally:
        for worker in workers:
            worker.close()


def run_parts(idle: deque[Callable], parts: Iterator[Part]) -> Iterator:
    """Computes the parts, and yields what is done. After an error, of the input too, the parts in work are finished.

    Args:
        idle: the functions that compute a part, one for each part that can be in work. Others may join at any time.
    """
    in_work: dict[Future, Callable] = {}
    pool = ThreadPoolExecutor(10_000)  # a thread starts when no other is idle
    try:
        for part in parts:
            run = idle.popleft()
            in_work[pool.submit(run, part)] = run
            if not idle:
                yield from finished(in_work, idle)
        while in_work:
            yield from finished(in_work, idle)
    except Exception as error:
        wait(in_work)
        if isinstance(error, BrokenPipeError):  # the command would take it for that of its standard output
            raise CommandError(one_line(error)) from error
        raise
    finally:
        pool.shutdown(wait=False)  # the second Ctrl-C does not wait for the parts in work


def finished(in_work: dict[Future, Callable], idle: deque[Callable]) -> Iterator:
    """Waits for a part, and yields what is done. Its worker is idle then."""
    done, _ = wait(in_work, return_when=FIRST_COMPLETED)
    for future in done:
        idle.append(in_work.pop(future))
        yield future.result()


class RemoteWorker:
    """A `Worker` for another process, which its errors can reach. Those of opening the model are raised by each
    method."""

    def __init__(self, job: Job):
        self.error: Exception | None = None
        try:
            with portable_errors():
                from toolkit.hub import silence_libraries

                silence_libraries()
                from toolkit.corpus.worker import Worker

                self.worker = Worker(job)
        except Exception as error:
            self.error = error

    def check(self) -> None:
        """Raises CommandError or RuntimeError if the model cannot be used."""
        if self.error is not None:
            raise self.error

    def run(self, part: Part):
        """What is done. Raises CommandError or RuntimeError."""
        self.check()
        with portable_errors():
            return self.worker.run(part)


@contextmanager
def portable_errors() -> Iterator[None]:
    """Turns errors into those that another process can read: expected ones in one line, others with their traceback."""
    try:
        yield
    except CommandError as error:
        raise CommandError(str(error), error.exit_code) from None  # a subclass need not be rebuilt from its arguments
    except Exception as error:
        if is_expected(error, (RuntimeError, MemoryError)):
            raise CommandError(missing_library(error) or one_line(error) or type(error).__name__) from None
        raise RuntimeError("".join(traceback.format_exception(error))) from None


class LocalWorker:
    """Computes parts in a process with a `RemoteWorker`, and in another one if that dies.

    Args:
        deaths: how processes have died; all workers of a run share the list.
    """

    def __init__(self, job: Job, deaths: list[str]):
        self.job, self.deaths, self.lock = job, deaths, threading.Lock()
        self.start()

    def start(self) -> None:
        """Starts a process, with a connection for each part that it has at once."""
        ends = [SPAWN.Pipe() for _ in range(PARTS_AT_ONCE)]
        self.process = SPAWN.Process(target=serve, args=(self.job, [theirs for _, theirs in ends]), daemon=True)
        self.process.start()
        for _, theirs in ends:
            theirs.close()  # the process alone has them now: its death closes the connections
        self.idle: list | None = [ours for ours, _ in ends]

    def run(self, part: Part | None):
        """What is done. Without a part, waits until the model is open.

        Raises:
            CommandError, RuntimeError: those of `RemoteWorker`, or the processes of the run have died too often.
        """
        while (idle := self.idle) is not None:
            try:
                connection = idle.pop()
                connection.send(part)
                answer = connection.recv()
            except (EOFError, OSError):
                self.replace(idle)
                continue
            idle.append(connection)
            if isinstance(answer, Exception):
                raise answer
            return answer
        return None  # the worker is closed

    def replace(self, idle: list) -> None:
        """Starts another process, unless that of these connections is replaced already, or closed."""
        with self.lock:
            if self.idle is not idle:
                return
            self.process.join()
            code = self.process.exitcode or 0
            self.deaths.append(f"signal {-code} ({signal.strsignal(-code)})" if code < 0 else f"exit code {code}")
            if len(self.deaths) > RETRIES:
                raise CommandError(
                    f"processes have died {len(self.deaths)} times, the last of {self.deaths[-1]}; "
                    f"expected at most {RETRIES}. If memory is short, give fewer --processes; for "
                    "files, --resume computes the rest"
                )
            self.start()

    def close(self) -> None:
        """Kills the process, with whatever is in work."""
        with self.lock:
            self.idle = None
            self.process.kill()


def serve(job: Job, connections: list) -> None:
    """Runs a process of a `LocalWorker`: answers each part with what is done, or with an error."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # a terminal or a scheduler sends them to all; the main process decides
    os.environ |= thread_variables(job.threads)  # before the libraries are imported
    threading.Thread(target=end_with_parent, daemon=True).start()
    worker = RemoteWorker(job)
    for connection in connections[1:]:
        threading.Thread(target=answer, args=(connection, worker)).start()
    answer(connections[0], worker)


def answer(connection, worker: RemoteWorker) -> None:
    """Answers what comes on one connection, for ever."""
    try:
        while True:
            part = connection.recv()
            try:
                done = worker.check() if part is None else worker.run(part)
            except Exception as error:
                done = error
            connection.send(done)
    finally:
        os._exit(1)  # the main process waits for an answer, or for the end


def end_with_parent() -> None:
    multiprocessing.parent_process().join()
    os._exit(0)  # what is in work has no one to report to
