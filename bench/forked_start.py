"""Starts with a template beside the daemon: a fresh `preload serve` to its first token, and the takeover by a fork
when the core is killed in the middle of a stream.

In the same run, and by turns with it: a process that only imports what a frontend is built on, as the measure of the
machine.
"""

from __future__ import annotations

import http.client
import json
import os
import queue
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from preload.engine.template.fingerprint import place_of

from .processes import START_DEADLINE_S, BenchError, Child, PrivateDaemon, Server, wait_until
from .restart import load, wait_for_phases

IMPORTS = "import starlette, uvicorn, grpc, tokenizers"
_PROMPT = "Once upon a time"
_POLL_S = 0.001
_SELDOM_S = 0.1
_PIECES_BEFORE_KILL = 4


def run(checkpoint: str, count: int = 20) -> dict[str, Any]:
    """`serve_first_token`, `imports_only` and `takeover_fork`: p50 and every figure in s, and phases of the last."""
    first, imports, takeovers = [], [], []
    with PrivateDaemon() as daemon:
        load(daemon, checkpoint)
        with template(daemon):
            for _ in range(count):
                imports.append(imports_only())
                with TimedServer(daemon, checkpoint) as server:
                    first.append(server.first_token_s)
                    start_phases = wait_for_phases(server)
                    takeovers.append(takeover(server))
                    if not all(life["is_forked"] for life in server.cores()):
                        raise BenchError(f"a core was not forked:\n{server.child.log.read_text()[-2000:]}")
                    phases = wait_for_phases(server)
    return {
        "serve_first_token": {**_summary(first), "core_phases": start_phases},
        "imports_only": _summary(imports),
        "takeover_fork": {**_summary(takeovers), "core_phases": phases},
    }


def _summary(seconds: list[float]) -> dict[str, Any]:
    return {"p50_s": round(statistics.median(seconds), 4), "all_s": [round(s, 4) for s in seconds]}


@contextmanager
def template(daemon: PrivateDaemon) -> Iterator[None]:
    """A template that listens, as on a host that started one."""
    child = Child(daemon.folder / "template.log", "template", "--runtime-dir", daemon.runtime_dir)
    path = place_of(daemon.runtime_dir).socket

    def listens() -> bool:
        child.require_alive()
        return os.path.exists(path)

    try:
        wait_until(listens, "the template to listen")
        yield
    finally:
        child.stop()


def imports_only() -> float:
    """Seconds from exec to the end of a process that imports the frontend's libraries, and nothing else."""
    start_s = time.monotonic()
    subprocess.run([sys.executable, "-c", IMPORTS], check=True)
    return time.monotonic() - start_s


class TimedServer(Server):
    """A server whose first client came before it: `first_token_s` counts from exec to the first piece of text."""

    def __enter__(self) -> TimedServer:
        self.port = _free_port()
        self.child = Child(self._daemon.folder / "serve.log", "serve", *self._words, "--port", str(self.port))
        try:
            connection = self._connect()
            _ask(connection, max_tokens=1)
            next(_pieces(connection))
            self.first_token_s = (time.monotonic_ns() - self.child.started_ns) / 1e9
            connection.close()
        except BaseException:
            self.child.stop()
            raise
        return self

    def _connect(self) -> http.client.HTTPConnection:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=START_DEADLINE_S)
        while True:
            try:
                connection.connect()
            except ConnectionRefusedError:
                self.child.require_alive()
                time.sleep(_POLL_S)
            else:
                return connection


def takeover(server: Server) -> float:
    """Seconds from SIGKILL of the core to the next piece of the stream that was running, out of the next core."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=START_DEADLINE_S)
    arrivals: queue.SimpleQueue[int] = queue.SimpleQueue()
    _ask(connection, max_tokens=200)
    done = threading.Event()

    def read() -> None:
        for _ in _pieces(connection):
            arrivals.put(time.monotonic_ns())
            if done.is_set():
                break
        arrivals.put(0)
        connection.close()

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    for _ in range(_PIECES_BEFORE_KILL):
        arrivals.get(timeout=START_DEADLINE_S)
    victim = server.core_pid()
    killed_ns = time.monotonic_ns()
    os.kill(victim, signal.SIGKILL)
    # What the old core sent may still be on its way: the new one's pieces come after it is ready.
    ready_ns = wait_until(lambda: _ready_ns_after(server, victim), "the next core")
    while (arrived_ns := arrivals.get(timeout=START_DEADLINE_S)) < ready_ns:
        if not arrived_ns:
            raise BenchError("the stream was over before the next core came")
    done.set()
    reader.join()
    return (arrived_ns - killed_ns) / 1e9


def _ready_ns_after(server: Server, victim: int) -> int:
    """When the core after the victim was ready; 0 while it is not. Asked seldom: an answer takes time from it."""
    time.sleep(_SELDOM_S)
    serving = [life for life in server.cores() if life["state"] == "serving" and life["pid"] != victim]
    return int(serving[-1]["ready_at_ns"]) if serving else 0


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _ask(connection: http.client.HTTPConnection, max_tokens: int) -> None:
    body = {"prompt": _PROMPT, "max_tokens": max_tokens, "temperature": 0, "stream": True, "ignore_eos": True}
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})


def _pieces(connection: http.client.HTTPConnection) -> Iterator[str]:
    """Texts of a streamed completion as they arrive. Raises BenchError on anything but an answer."""
    response = connection.getresponse()
    if response.status != 200:
        raise BenchError(f"status {response.status}: {response.read().decode(errors='replace')}")
    for raw in response:
        if not raw.startswith(b"data: {"):
            continue
        event = json.loads(raw.removeprefix(b"data: "))
        if "error" in event:
            raise BenchError(f"the stream ended with {event['error']}")
        yield event["choices"][0]["text"]
