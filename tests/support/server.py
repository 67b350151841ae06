"""The server of docs/serving.md, in a process of its own."""

import http.client
import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from support.folders import ROOT

PORT = 8000  # of the page


def replaced(code: str, old: str, new: str) -> str:
    """The code with `new` in place of `old`, which it has once."""
    assert code.count(old) == 1, old
    return code.replace(old, new)


def server_code(mark: str = "server") -> str:
    """The Python block of the page with this mark, which is saved as server.py."""
    page = (ROOT / "docs" / "serving.md").read_text(encoding="utf-8")
    return re.search(rf"^```python {mark}\n(.*?)^```", page, re.DOTALL | re.MULTILINE)[1]


@contextmanager
def running(command: list[str], folder: Path, port: int = PORT) -> Iterator[None]:
    """Runs a server and its processes in a folder until the end of the block. Raises RuntimeError if it does not start,
    with its log, or if there is a server already."""
    if answers(port):
        raise RuntimeError(f"a server runs at port {port} already; expected none. Stop it first.")
    with open(folder / "server.log", "w") as log:
        process = subprocess.Popen(command, cwd=folder, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        deadline = time.monotonic() + 180
        while not answers(port):
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError((folder / "server.log").read_text(encoding="utf-8"))
            time.sleep(0.2)
        yield
    finally:
        for sent in (signal.SIGTERM, signal.SIGKILL):
            with suppress(ProcessLookupError, subprocess.TimeoutExpired):
                os.killpg(process.pid, sent)
                process.wait(timeout=5)


def answers(port: int) -> bool:
    """Whether a server at this port is ready."""
    try:
        return Client(port).request("GET", "/health")[0] == 200
    except (OSError, http.client.HTTPException):
        return False


class Client:
    """A client that keeps its connection."""

    def __init__(self, port: int = PORT):
        self.connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)

    def request(self, method: str, path: str, body: object = None) -> tuple[int, object]:
        """The status, and the answer if it is JSON."""
        text = None if body is None else json.dumps(body)
        self.connection.request(method, path, text, {"Content-Type": "application/json"})
        response = self.connection.getresponse()
        answer = response.read()
        is_json = response.headers.get_content_type() == "application/json"
        return response.status, json.loads(answer) if is_json else answer.decode()
