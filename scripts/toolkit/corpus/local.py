"""Parts on this machine: in this process, or in several of the standard library's."""

import multiprocessing
import os
import signal
import threading
import traceback
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing.connection import Connection
from multiprocessing.connection import wait as wait_for_any

from toolkit.cli import CommandError, is_expected, missing_library, one_line
from toolkit.corpus.job import Job
from toolkit.corpus.sources import Part


def run_here(job: Job, parts: Iterator[Part]) -> Iterator:
    """Computes the parts in this process, and yields what is done. After an error, the parts in work are finished."""
    from toolkit.corpus.worker import PARTS_AT_ONCE, Worker

    worker = Worker(job)
    pending: set[Future] = set()
    with ThreadPoolExecutor(PARTS_AT_ONCE) as pool:
        for part in parts:
            pending.add(pool.submit(worker.run, part))
            if len(pending) >= PARTS_AT_ONCE:
                done, pending = wait(pending, return_when=FIRST_COMPLETED)
                yield from (each.result() for each in done)
        while pending:
            done, pending = wait(pending, return_when=FIRST_COMPLETED)
            yield from (each.result() for each in done)


# --------------------------------------------------------------------------------------------------- several processes


def run_in_processes(job: Job, parts: Iterator[Part], devices: list[str]) -> Iterator:
    """Computes the parts in a process for each device, and yields what is done. After an error, the parts in work are
    finished.

    Raises:
        CommandError: a process reports an error, or has ended.
    """
    from toolkit.corpus.worker import PARTS_AT_ONCE

    with processes(job, devices) as connections:
        in_work = dict.fromkeys(connections, 0)
        error: Exception | None = None
        is_exhausted = False
        for connection in connections:  # all models are open before the first part
            error = error or receive(connection)[1]
        while error is None or any(in_work.values()):
            while error is None and not is_exhausted:
                idlest = min(connections, key=in_work.__getitem__)
                if in_work[idlest] == PARTS_AT_ONCE:
                    break
                if (part := next(parts, None)) is None:
                    is_exhausted = True
                else:
                    idlest.send(part)
                    in_work[idlest] += 1
            waiting = [connection for connection, count in in_work.items() if count]
            if not waiting:
                break
            for connection in wait_for_any(waiting):
                done, failure = receive(connection)
                in_work[connection] = 0 if connection.closed else in_work[connection] - 1
                error = error or failure
                if done is not None:
                    yield done
        if error is not None:
            raise error


def receive(connection: Connection) -> tuple:
    """What a process has done, or the error that it reports; of a process that has ended, an error."""
    try:
        kind, content = connection.recv()
    except (EOFError, OSError):
        connection.close()
        return None, CommandError("a process has ended, perhaps for lack of memory; --resume computes the other parts")
    if kind == "expected":
        return None, CommandError(content)
    return (None, RuntimeError(content)) if kind == "unexpected" else (content, None)


@contextmanager
def processes(job: Job, devices: list[str]) -> Iterator[list[Connection]]:
    """Starts a process for each device. They end with this one, however it ends."""
    context = multiprocessing.get_context("spawn")
    started, connections = [], []
    with environment(job.threads):
        for device in devices:
            ours, theirs = context.Pipe()
            process = context.Process(target=serve, args=(replace(job, device=device), theirs), daemon=True)
            process.start()
            theirs.close()
            started.append(process)
            connections.append(ours)
    try:
        yield connections
    finally:
        for connection in connections:
            connection.close()
        for process in started:
            process.join()


@contextmanager
def environment(threads: int) -> Iterator[None]:
    """The number of threads of the libraries in processes that are started now."""
    values = {"OMP_NUM_THREADS": str(threads), "RAYON_NUM_THREADS": str(threads)}
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def serve(job: Job, connection: Connection) -> None:
    """The main function of a process: computes the parts that it receives, until there are no more."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the main process stops sending parts
    from toolkit.hub import silence_libraries

    silence_libraries()
    lock = threading.Lock()

    def report(kind: str, content) -> None:
        with lock:
            connection.send((kind, content))

    def attempt(work) -> bool:
        try:
            report("done", work())
        except Exception as error:
            report(*described(error))
            return False
        return True

    from toolkit.corpus.worker import PARTS_AT_ONCE, Worker

    opened: list[Worker] = []
    if not attempt(lambda: opened.append(Worker(job))):
        return
    with ThreadPoolExecutor(PARTS_AT_ONCE) as pool:
        while True:
            try:
                part = connection.recv()
            except (EOFError, OSError):
                os._exit(0)  # what is in work has no one to report to
            pool.submit(attempt, lambda part=part: opened[0].run(part))


def described(error: Exception) -> tuple[str, str]:
    """An error as another process can report it: expected errors in one line, others with their traceback."""
    if isinstance(error, CommandError):
        return "expected", str(error)
    if is_expected(error, (RuntimeError,)):
        return "expected", missing_library(error) or one_line(error)
    return "unexpected", "".join(traceback.format_exception(error))
